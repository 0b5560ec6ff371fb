"""Messages that go from the middle of what a group keeps, long after their segments were first measured: their room is
given back, on the disk and in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.queues import Queues
from tests.support.temp_store import lowered


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    with lowered(SEGMENT_BYTES=50_000, SEGMENT_FIRST_BYTES=4_096, TRIM_BYTES=10_000):
        yield


def tick(q: Queues, seconds: int) -> None:
    for _ in range(seconds):
        q.pass_time(1)
        q.store.tick()


def drop(q: Queues, sequences: list[int]) -> None:
    q.ctl(f"drop s {' '.join(map(str, sequences))}")


def expire(q: Queues, sequences: list[int]) -> None:
    tick(q, 30)


@pytest.mark.parametrize("end", [drop, expire])
@pytest.mark.parametrize("times", [1, 4])
def test_their_room_is_given_back(tmp_path: Path, end: Callable[[Queues, list[int]], None], times: int) -> None:
    q = Queues("replay all", path=tmp_path / "store")
    q.put(b"kept")
    for _ in range(times):
        sequences = []
        for _ in range(5):
            sequences += [q.put(b"x" * 1_000, ttl="20s") for _ in range(40)]
            q.put(b"kept")
            tick(q, 1)  # the segments are measured while all of it is kept
        assert q.group.log.upkeep.size > 200_000
        end(q, sequences)
        for _ in range(10):
            q.put(b"k" * 1_000)
            tick(q, 1)
    assert q.group.log.upkeep.size < 100_000 + times * 10_000
    assert len(q.group.retention.lapsed) + len(q.group.state.dropped) < 60
    assert len(q.kept()) == 1 + times * 15
