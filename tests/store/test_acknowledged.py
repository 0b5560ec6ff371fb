"""Segments full of acknowledgements: they go when a newer state accounts for them, and never before."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Iterator

import attrs
import pytest

from mqfs.model import Draft, Kind
from mqfs.store.store import DiskBucket, DiskStore
from tests.support.lying_disk import LyingDisk, Stopped
from tests.support.temp_store import SMALL, lowered

PATH = "/s/store"
FOLDER = f"{PATH}/buckets/01/1"
LUCKS = [None, *range(6)]  # None: killed, the page cache stays; else without power


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    logging.getLogger("mqfs.store").setLevel(logging.CRITICAL)
    with lowered(**SMALL):
        yield
    logging.getLogger("mqfs.store").setLevel(logging.NOTSET)


@attrs.define
class Used:
    """A bucket whose state is the number of acknowledgements so far."""

    disk: LyingDisk = attrs.Factory(LyingDisk)
    acked: int = 0
    synced: int = 0  # of those
    kept: list[int] = attrs.Factory(list)  # messages that stay wanted, all of stream 17
    padding: int = 0  # bytes of the state that say nothing
    store: DiskStore = attrs.field(init=False)
    bucket: DiskBucket = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.store = DiskStore(PATH, disk=self.disk)
        self.bucket = self.store.make(self.store.number(), b"0")
        self.bucket.writer.state = lambda: b"%d" % self.acked + b" " * self.padding

    def ack(self, count: int) -> None:
        for _ in range(count):
            self.bucket.writer.append(Kind.ACK, 1, 0, b"%024d" % self.acked)
            self.acked += 1

    def roll(self) -> None:
        """Acknowledge until a new segment is begun."""
        newest = self.bucket.chain.segments[-1]
        while self.bucket.chain.segments[-1] is newest:
            self.ack(1)

    def keep(self) -> None:
        """A unit with one message that stays wanted between two that do not."""
        drafts = [Draft(Kind.MESSAGE, 16, b"x" * 100), Draft(Kind.MESSAGE, 17, b"kept"), Draft(Kind.END, 16, b"")]
        self.kept.append(self.bucket.writer.append_batch(drafts, 0) + 1)

    def sync(self) -> None:
        count = self.acked

        def told(error: OSError | None) -> None:
            if error is None:
                self.synced = max(self.synced, count)

        self.bucket.upkeep.sync(told)

    def give_back(self) -> None:
        for _ in range(3):
            self.bucket.upkeep.trim({17: 0}, frozenset())
            self.store.tick()

    def logs(self) -> list[str]:
        return [name for name in sorted(self.disk.listdir(FOLDER)) if name.endswith(".log")]

    def after(self, luck: int | None) -> LyingDisk:
        return self.disk.after_kill() if luck is None else self.disk.after_power_loss(random.Random(luck))


def check(used: Used, disk: LyingDisk) -> None:
    """Each synced record counts once, in the state or after it; kept messages are there."""
    bucket = DiskStore(PATH, disk=disk).open(1)
    state, behind = bucket.upkeep.history()
    assert state is not None
    numbers = [int(record.body) for record in behind]
    assert numbers == list(range(int(state), int(state) + len(numbers))), "one is missing or there twice"
    assert used.synced <= int(state) + len(numbers) <= used.acked
    found, sequence = [], 0
    while (record := bucket.reader.find(17, sequence)) is not None:
        found.append(record.sequence)
        sequence = record.sequence + 1
    assert found == used.kept
    assert bucket.upkeep.damaged == 0


def stopped_at_every_call(luck: int | None, prepare: Callable[[], Used], most: int = 150) -> None:
    for stop in range(1, most):
        used = prepare()
        used.disk.stop_at = used.disk.calls + stop
        with contextlib.suppress(Stopped):
            used.give_back()
            used.ack(3)
            used.sync()
            check(used, used.disk.copy())
        check(used, used.after(luck))
        if used.disk.calls < used.disk.stop_at:
            return
    raise AssertionError("more calls than that")


def with_nothing_wanted() -> Used:
    """Segments of acknowledgements alone and of messages that no consumer wants, behind one message that is kept."""
    used = Used()
    used.keep()
    for number in range(5):
        for _ in range(number % 2 * 3):
            used.bucket.writer.append(Kind.MESSAGE, 16, 0, b"x" * 90)
        used.roll()
    used.ack(7)
    used.sync()
    used.ack(2)
    return used


def test_segments_of_acknowledgements_alone_go() -> None:
    used = with_nothing_wanted()
    before = used.logs()
    assert len(before) >= 6
    assert any(not segment.counts()[0] for segment in used.bucket.chain.segments[1:-1]), "none without messages"
    used.give_back()
    assert used.logs() == [before[0], before[-1]]
    assert used.bucket.reader.find(17, 0) is not None
    check(used, used.disk.copy())
    used.kept.clear()
    used.bucket.upkeep.trim({}, frozenset())
    assert used.logs() == before[-1:], "the one that held the message"
    check(used, used.disk.copy())


@pytest.mark.parametrize("luck", LUCKS)
def test_their_removal_stopped_at_every_call(luck: int | None) -> None:
    stopped_at_every_call(luck, with_nothing_wanted)


def with_something_wanted() -> Used:
    """In each segment one message is kept among many acknowledgements."""
    used = Used()
    for _ in range(5):
        used.keep()
        used.bucket.writer.append(Kind.MESSAGE, 16, 0, b"x" * 600)
        used.roll()
    used.ack(4)
    used.sync()
    used.ack(2)
    return used


def test_compaction_keeps_the_acknowledgements_of_the_last_of_a_run() -> None:
    used = with_something_wanted()
    before = used.logs()
    last = used.bucket.chain.segments[-2]
    acks = len(last.rows().of_kind(Kind.ACK))
    assert acks > 10
    used.give_back()
    assert used.logs() == [before[0], before[-1]]
    merged = used.bucket.chain.segments[0]
    merged.look()
    assert len(merged.rows().of_kind(Kind.ACK)) == acks
    check(used, used.disk.copy())
    # Were the newest begun just before the power went, it is moved aside, and that is what is left.
    disk = used.disk.copy()
    disk.unlink(f"{FOLDER}/{before[-1]}")
    state, behind = DiskStore(PATH, disk=disk).open(1).upkeep.history()
    assert state is not None
    assert int(state) + len(list(behind)) == used.acked - 7


def test_compaction_does_not_copy_the_same_again_and_again() -> None:
    used = with_something_wanted()
    used.give_back()
    calls, first = used.disk.calls, used.logs()[0]
    size = used.disk.size_of(f"{FOLDER}/{first}")
    for number in range(20):
        used.bucket.upkeep.trim({17: 0, 18: number}, frozenset())
        used.store.tick()
    assert used.disk.size_of(f"{FOLDER}/{first}") == size
    assert used.disk.calls - calls < 20, "it was written again"


@pytest.mark.parametrize("luck", LUCKS)
def test_compaction_stopped_at_every_call(luck: int | None) -> None:
    stopped_at_every_call(luck, with_something_wanted)


@pytest.mark.parametrize("padding", [0, 1_000, 20_000])
def test_a_state_is_not_written_more_often_than_its_own_bytes(padding: int) -> None:
    """Whatever its size, beside small records; and what is kept is bounded."""
    used = Used(padding=padding)
    used.roll()
    heads, largest, names = 0, 0, set(used.logs())
    begun = used.acked
    while used.acked < begun + 4_000:
        used.ack(20)
        used.bucket.writer.append(Kind.MESSAGE, 16, 0, b"x")
        used.bucket.upkeep.trim({}, frozenset())
        used.store.tick()
        heads += len(set(used.logs()) - names)
        names = set(used.logs())
        largest = max(largest, used.bucket.upkeep.size)
    assert heads * padding <= used.bucket.commit.written
    assert heads * padding <= 1.1 * 56 * (used.acked - begun)
    assert heads or padding > 1_000
    assert largest <= 2 * (max(2_048, 4 * padding) + padding + 2_000)


def test_a_segment_may_go_while_others_are_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weighing is done in portions, and holds up nothing; what is known to be heavy is not weighed again."""
    monkeypatch.setattr("mqfs.store.compaction._LOOKED", 4)
    used = Used()
    while len(used.logs()) < 8:
        used.kept.append(used.bucket.writer.append(Kind.MESSAGE, 17, 0, b"x" * 60))
    used.sync()
    used.bucket.upkeep.trim({17: 0}, frozenset())
    for _ in range(5):
        used.bucket.upkeep.tick(0.0)  # one portion
    assert used.bucket.upkeep.compaction._work is not None
    logs = used.logs()
    used.bucket.upkeep.trim({17: int(logs[4][:-4])}, frozenset())
    assert used.logs() == logs[4:]
    used.kept = [sequence for sequence in used.kept if sequence >= int(logs[4][:-4])]
    for _ in range(100):
        used.bucket.upkeep.tick(0.0)
    assert used.bucket.upkeep.compaction._work is None
    assert used.logs() == logs[4:]
    check(used, used.disk.copy())
    assert list(used.bucket.upkeep.compaction.compact()) == []
