"""Messages that go from the middle of what a group keeps, long after their segments were first measured: their room is
given back, on the disk and in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mqfs import errors
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


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("lines", [("replay all",), ("deliver one",)])
def test_the_oldest_can_be_dropped_though_as_many_are_as_may_be(
    tmp_path: Path, lines: tuple[str, ...], clean: bool
) -> None:
    """They need not be remembered, and those that follow them no more."""
    q = Queues(*lines, path=tmp_path / "store")
    with lowered(DROPPED=5):
        sequences = [q.put(b"%d" % number) for number in range(12)]
        drop(q, sequences[1:6])
        with pytest.raises(errors.OverLimit):
            drop(q, [sequences[7]])
        with pytest.raises(errors.OverLimit):
            drop(q, [sequences[0], sequences[7], *sequences[9:]])
        drop(q, [sequences[0]])
        drop(q, [sequences[7]])
        assert [row["body"] for row in q.kept()] == ["6", "8", "9", "10", "11"]
        drop(q, sequences[8:11])
        with pytest.raises(errors.NotFound):
            drop(q, [sequences[0]])
        assert [row["body"] for row in q.kept()] == ["6", "11"]
        assert (q.row()["messages"], q.row()["bytes"]) == (2, 3)
        q.ctl(*(f"drop s {sequences[number]}" for number in (11, 6)))
        for _ in range(2):
            assert q.kept() == []
            assert (q.row()["messages"], q.row()["bytes"]) == (0, 0)
            q.restart(clean=clean)
        last = q.put(b"new")
        drop(q, [last])
        assert q.kept() == []
