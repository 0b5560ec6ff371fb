"""Each row of `acks.LIFE` is what the engine does with a message, and what it writes into the log about it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mqfs import errors
from mqfs.state.acks import LIFE, AckState, Op, State, Transition, step
from tests.support.ack_steps import ack_steps
from tests.support.queues import Queues, read, say, waits

NAMED = ("replay all", "backoff 2s 2s", "retries 3", "lease 1h", "consumer w s")
BOUNDED = ("replay all", "full drop-old", "consumer w s backlog 1")
SHARED = (*NAMED, "consumer other s")
ACK_NEXT = ("deliver one", "ack next", "backoff 2s 2s")
ACK_READ = ("deliver one", "ack read")


class Life:
    """One message of a stream, and a reader of it: of the consumer `w`, else of the stream itself."""

    def __init__(self, path: Path, lines: tuple[str, ...]) -> None:
        self.path, self.named = path, any(line.startswith("consumer w s") for line in lines)
        self.q = Queues(*lines, path=path)
        if "consumer other s" in lines:
            self.q.put(b"x", single=True)
        else:
            self.q.write("s", b"x")
        self.open()

    def open(self) -> None:
        self.reader: Any = self.q.worker() if self.named else self.q.taker()

    def come_to(self, state: State) -> None:
        if state in (State.IN_FLIGHT, State.DELAYED, State.UNCONFIRMED):
            assert read(self.reader) == b"x"
        if state is State.DELAYED:
            say(self.reader, "nack")

    def restart(self, *, clean: bool) -> None:
        self.q.restart(clean=clean)
        self.open()

    @property
    def state(self) -> State:
        """As a user can tell."""
        stats = self.q.stats() if self.named else self.q.queue()
        if stats["dead"] or self.q.group.streams.get("dead"):
            return State.DEAD
        if stats["claimed"]:
            return State.IN_FLIGHT
        if stats["waiting"]:
            return State.DELAYED if stats["delayed"] else State.READY
        return State.ACKED if stats["acknowledged"] or self.q.kept() else State.GONE

    @property
    def steps(self) -> list[Op]:
        """Those of all ACK records in the log."""
        (bucket,) = self.path.glob(f"buckets/*/{self.q.group.number}")
        return [step.op for step in ack_steps(bucket)]

    def lose_what_was_read(self) -> None:
        self.reader.push_back(b"x")
        self.reader.close()

    def deliveries(self) -> int:
        """The count that its next reader is given."""
        self.q.pass_time(2)
        taker = self.q.worker() if self.named else self.q.at(".consumers/.s", os.O_RDWR)
        say(taker, "format json")
        return int(json.loads(read(taker))["deliveries"])

    def expire(self) -> None:
        self.q.ctl("ttl 1s")
        self.q.pass_time(3)

    def let_the_lease_run_out(self) -> None:
        self.q.clock.forward(3601)
        self.q.tree.tick()

    def fail_for_the_last_time(self) -> None:
        for _ in range(2):
            say(self.reader, "nack 0s")
            assert read(self.reader) == b"x"
        say(self.reader, "nack")

    def be_left_out(self) -> None:
        """For the next one, which goes then."""
        self.q.write("s", b"y")
        self.q.ctl("drop s 2")

    def let_another_release_it(self) -> None:
        other = self.q.worker("other")
        assert read(other) == b"x"
        say(other, "release")

    def acknowledge_and_seek(self) -> None:
        read(self.reader)
        say(self.reader, "ack")
        say(self.reader, "seek first")


def says(line: str) -> Callable[[Life], None]:
    return lambda life: say(life.reader, line)


Event = tuple[tuple[str, ...], Callable[[Life], object]]
EVENTS: dict[str, list[Event]] = {
    "read, with `ack next` or at a consumer": [
        (ACK_NEXT, lambda life: read(life.reader)),
        (NAMED, lambda life: read(life.reader)),
    ],
    "read, with `ack read`": [(ACK_READ, lambda life: read(life.reader))],
    "expired, cut by `depth` or dropped": [
        (ACK_READ, Life.expire),
        (NAMED, lambda life: life.q.ctl("drop s 1")),
        (NAMED, lambda life: life.q.ctl("clear s")),
    ],
    "left out, for the consumer has its `backlog`": [(BOUNDED, Life.be_left_out)],
    "another consumer releases an exclusive message": [(SHARED, Life.let_another_release_it)],
    "`ack`; with `ack next` the next read": [
        (NAMED, says("ack")),
        (ACK_NEXT, lambda life: waits(life.reader)),
    ],
    "`touch`: the lease is renewed": [(NAMED, says("touch"))],
    "`release`, or the server stops": [
        (NAMED, says("release")),
        (NAMED, lambda life: life.restart(clean=True)),
        (ACK_NEXT, lambda life: life.restart(clean=True)),
    ],
    "`nack`, or the lease runs out": [(NAMED, says("nack")), (NAMED, Life.let_the_lease_run_out)],
    "last close, or the claiming process dies": [
        (NAMED, lambda life: life.reader.close()),
        (ACK_NEXT, lambda life: life.reader.close()),
    ],
    "the server is killed": [
        (NAMED, lambda life: life.restart(clean=False)),
        (ACK_NEXT, lambda life: life.restart(clean=False)),
    ],
    "`dead`, or the last of `retries` fails": [(NAMED, says("dead")), (NAMED, Life.fail_for_the_last_time)],
    "due": [(NAMED, lambda life: life.q.pass_time(2))],
    "the next read": [(ACK_READ, lambda life: waits(life.reader))],
    "its handle is lost before the data was read": [(ACK_READ, Life.lose_what_was_read)],
    "`seek` behind it": [(NAMED, says("seek end"))],
    "`seek` to it or before it": [(NAMED, says("seek 1")), (NAMED, Life.acknowledge_and_seek)],
}


def cases() -> list[Any]:
    assert set(EVENTS) == {row.event for row in LIFE}
    return [
        pytest.param(row, event, id=f"{row.state}: {row.event} {number}")
        for row in LIFE
        for number, event in enumerate(EVENTS[row.event])
    ]


@pytest.mark.parametrize(("row", "event"), cases())
def test_row(row: Transition, event: Event, tmp_path: Path) -> None:
    lines, act = event
    life = Life(tmp_path / "store", lines)
    life.come_to(row.state)
    before = len(life.steps)
    act(life)
    written = life.steps[before:]
    assert (row.step in written) if row.step else not written, written
    if row.next is State.UNCONFIRMED:
        life.lose_what_was_read()
        assert life.state is State.READY
        return
    assert life.state is row.next
    if row.state is State.UNCONFIRMED and row.next is State.ACKED:
        life.reader.close()
        assert life.state is State.ACKED
    if row.state is State.IN_FLIGHT and row.next in (State.READY, State.DELAYED):
        assert life.deliveries() == (2 if row.is_counted else 1)


def test_a_whole_state_as_steps_is_that_state() -> None:
    made, other = AckState(7), AckState(100)
    for body in (step(Op.ACK, 9, 12), step(Op.ACK, 20, 20), step(Op.CLAIM, 7, 8, 2), step(Op.REQUEUE, 30, 31, 1, 99)):
        made.apply(body)
    other.apply(step(Op.CLAIM, 8, 9))
    for body in made.whole():
        other.apply(body)
    assert other.encode() == made.encode()


@pytest.mark.parametrize(
    ("come_to", "op"),
    [
        ((), Op.CLAIM),  # what is acked below the floor
        ((Op.CLAIM,), Op.CLAIM),
        ((Op.ACK,), Op.ACK),
        ((Op.ACK,), Op.CLAIM),
        ((Op.CLAIM, Op.ACK), Op.CLAIM),
    ],
)
def test_a_step_that_no_row_has_is_refused(come_to: tuple[Op, ...], op: Op) -> None:
    progress = AckState(8)
    at = 9 if come_to else 7
    for done in come_to:
        progress.apply(progress.step(done, at, at))
    with pytest.raises(ValueError, match=f"message {at}: {op.name} of one that is"):
        progress.step(op, at, at)


@pytest.mark.parametrize("verb", ["ack", "nack", "release", "dead"])
def test_a_seek_in_the_same_write_makes_the_claim_void(verb: str) -> None:
    q = Queues("replay all", "consumer w")
    q.write("s", b"x")
    worker = q.worker()
    assert read(worker) == b"x"
    say(worker, f"seek end\n{verb}")
    assert waits(worker)
    say(worker, "seek first")
    assert read(worker) == b"x"


@pytest.mark.parametrize("settle", ["ack", "nack", "release", "dead", "close"])
@pytest.mark.parametrize("away", ["ttl", "drop"])
@pytest.mark.parametrize("lines", [("deliver one", "ack next"), ("replay off",), ("replay off", "consumer other")])
def test_a_claimed_message_that_has_left_the_log_is_not_counted(lines: tuple[str, ...], away: str, settle: str) -> None:
    q = Queues(*lines, "consumer w backlog 3", "full reject")
    q.write("s", b"first")  # so that the other goes from the middle
    first, second = q.worker(), q.worker()
    assert read(first) == b"first"
    sequence = q.put(b"x", **({"ttl": "2s"} if away == "ttl" else {}))
    assert read(second) == b"x"
    if away == "drop":
        q.ctl(f"drop s {sequence}")
    q.pass_time(5)
    q.group.retention.trim(always=True)
    assert q.group.log.reader.locate(q.group.streams["s"].number, sequence) is None
    assert (q.stats()["claimed"], q.stats()["waiting"]) == (2, 0)
    if settle == "close":
        second.close()
    else:
        say(second, settle)
    assert (q.stats()["waiting"], q.row()["messages"]) == (0, 1)
    q.write("s", b"new", b"newer")
    with pytest.raises(errors.StreamFull):
        q.write("s", b"one too many")
    assert (q.stats()["waiting"], q.row()["messages"]) == (2, 3)
    say(first, "ack")
    assert [row["body"] for row in q.kept()] == (["new", "newer"] if len(lines) == 1 else ["first", "new", "newer"])


@pytest.mark.parametrize("settle", ["ack", "nack 1h", "release", "close"])
def test_a_claimed_message_whose_stream_left_the_view_is_not_counted(settle: str) -> None:
    q = Queues("replay all", "full reject", "bind v s", "consumer w v backlog 2")
    q.stream("t")
    q.write("s", b"of s")
    worker = q.worker()
    assert read(worker) == b"of s"
    q.ctl("unbind v s", "bind v t")
    assert (q.stats()["claimed"], q.stats()["waiting"], q.stats()["delayed"]) == (1, 0, 0)
    q.write("t", b"one")
    if settle == "close":
        worker.close()
    else:
        say(worker, settle)
    assert (q.stats()["claimed"], q.stats()["waiting"], q.stats()["delayed"]) == (0, 1, 0)
    q.write("t", b"two")
    with pytest.raises(errors.StreamFull):
        q.write("t", b"three")
