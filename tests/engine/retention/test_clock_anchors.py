"""What `ttl` ends, where the wall clock was set several times: as each message by itself, and found by one search."""

from __future__ import annotations

import os
import random

import pytest

from mqfs.clock import Anchor
from mqfs.state.group import GroupState
from tests.support.calls import calls
from tests.support.clock import SECOND
from tests.support.queues import Queues


def stepped(seed: int, steps: int) -> Queues:
    """Messages between which time passes and the wall clock is set."""
    luck, queues = random.Random(seed), Queues("replay all", "ttl 20s")
    handle = queues.at("s", os.O_WRONLY)
    for _ in range(steps):
        for _ in range(luck.randint(0, 3)):
            handle.write(b"x")
            queues.clock.forward(luck.choice([0, 0.1, 2]))
        queues.clock.wall += luck.choice([-1, 1]) * luck.choice([5, 100, 10**6]) * SECOND
        queues.clock.forward(luck.choice([0, 0, 1, 3]))
    handle.write(b"last")
    return queues


@pytest.mark.parametrize("seed", range(8))
def test_what_expires_is_what_each_message_says(seed: int) -> None:
    queues = stepped(seed, 20)
    log, expiry = queues.group.log, queues.group.retention.expiry
    assert len(log.state.anchors) > 5
    for _ in range(60):
        limit = queues.clock.engine_ns() - 20 * SECOND
        records = [record for n in range(1, log.end.next) if (record := log.reader.find(log.state.next_stream - 1, n))]
        left = [record.sequence for record in records if log.times.written_ns(record) > limit]
        floor = expiry.expired_before()
        assert all(sequence >= floor for sequence in left)
        gone = [record.sequence for record in records if record.sequence not in left]
        assert all(sequence < floor for sequence in gone)
        queues.clock.forward(1)
    assert not left


def looking(anchors: int) -> tuple[int, int]:
    """The calls of a look what has expired, and of the engine time of a message."""
    queues = Queues("replay all", "ttl 1h")
    queues.clock.forward(100)
    queues.write("s", b"x")
    log = queues.group.log
    first, anchor = log.state.anchors[-1]
    log.state.anchors[:] = [(first, anchor._replace(engine_ns=n)) for n in range(anchors)]
    record = log.reader.scan(1)
    assert record is not None

    def look() -> None:
        queues.clock.forward(1)
        queues.group.retention.expiry.expired_before()

    queues.clock.forward(7_200)
    return calls(look), calls(lambda: log.times.written_ns(record))


def test_many_steps_of_the_clock_cost_no_more() -> None:
    assert looking(200) == looking(2)


@pytest.mark.parametrize("firsts", [[], [5], [1, 1, 1], [1, 4, 4, 9], [3, 7, 8]])
def test_the_anchor_of_a_sequence_is_the_last_that_holds_for_it(firsts: list[int]) -> None:
    state = GroupState(0o755, 0, 0, 1, 1, "", 0, anchors=[(n, Anchor(at, at)) for at, n in enumerate(firsts)])
    for sequence in range(12):
        mine = [at for at, n in enumerate(firsts) if n <= sequence] or [0]
        wanted = Anchor(mine[-1], mine[-1]) if firsts else None
        assert state.anchor_at(sequence) == wanted
