"""Bytes that are gone or changed: never wrong data, and no more is missing than was hit."""

from __future__ import annotations

import contextlib
import logging
import math
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from mqfs import limits
from mqfs.errors import Damaged
from mqfs.model import MORE, Draft, Kind, Record
from mqfs.records.record import HEAD, HEAD_BYTES, INNER, SETTLED, encode, next_good, padded, row_at
from mqfs.store.api import Bucket
from mqfs.store.check import Checker, no_progress
from mqfs.store.segment.index import NonMessageRecords, OpenIndex
from mqfs.store.segment.recovery import scan_segment
from mqfs.store.sequences import RESERVE, reserved_by
from mqfs.store.store import DiskStore
from tests.support.campaign import size, tree_seed
from tests.support.lying_disk import File, LyingDisk, Stopped
from tests.support.temp_store import SMALL, lowered

PATH = "/s/store"
FOLDER = f"{PATH}/buckets/01/1"


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    logging.getLogger("mqfs.store").setLevel(logging.CRITICAL)
    with lowered(**SMALL, RING_SEQUENCE_BLOCK=16):
        yield
    logging.getLogger("mqfs.store").setLevel(logging.NOTSET)


class Written:
    """A bucket of a few segments, with what was put into it."""

    def __init__(self, *, clean: bool) -> None:
        luck = random.Random(tree_seed())
        self.disk = LyingDisk()
        self.units: list[list[int]] = []
        self.changes = 0
        store = DiskStore(PATH, disk=self.disk)
        bucket = store.make(store.number(), b"0")
        bucket.writer.state = lambda: b"%d" % self.changes + b" " * 90
        while len(bucket.chain.segments) < 3 or bucket.chain.segments[-1].used < 1_500:
            self._step(bucket, luck)
        self.records = {r.sequence: r for r in read(bucket)[0]}
        if clean:
            store.close()

    def _step(self, bucket: Bucket, luck: random.Random) -> None:
        choice, body = luck.random(), luck.randbytes(luck.choice([0, 5, 60, 300]))
        if choice < 0.6:
            self.units.append([bucket.writer.append(Kind.MESSAGE, luck.randint(16, 18), 0, body)])
        elif choice < 0.8:
            first = bucket.writer.append_batch(
                [Draft(Kind.MESSAGE, 16, body), Draft(Kind.END, 17, b""), Draft(1, 18, body)], 0
            )
            self.units.append([first, first + 1, first + 2])
        else:
            bucket.writer.append(luck.choice([Kind.CHANGE, Kind.ACK]), 0, 0, b"%d" % self.changes)
            self.changes += 1
        if choice < 0.3:
            bucket.upkeep.sync()

    def copy(self) -> LyingDisk:
        for name in self.files():
            self.disk._find(f"{FOLDER}/{name}").durable = bytes(self.disk._find(f"{FOLDER}/{name}").data)
        self.disk._find(FOLDER).sync()
        return self.disk.after_power_loss(None)

    def files(self) -> list[str]:
        return sorted(self.disk.listdir(FOLDER))

    def check(self, disk: LyingDisk, given: int | None = None) -> set[int]:
        """Only what was written is there, units whole; returns the sequences that are missing. `given`: the last one
        that the store can know of, unless that is the last message's."""
        store = DiskStore(PATH, disk=disk)
        bucket = store.open(1)
        found, damaged = read(bucket)
        for record in found:
            assert record == self.records[record.sequence], "wrong data"
        seen = {record.sequence for record in found}
        for unit in self.units:
            assert not seen & set(unit) or seen | damaged >= set(unit) or bucket.upkeep.damaged, "half a unit"
        state, behind = bucket.upkeep.history()
        assert state is not None
        changes = [int(state), *(int(record.body) for record in behind)]
        assert changes[1:] == sorted(set(changes[1:]))
        assert max(changes) <= self.changes
        assert bucket.end.next > (max(self.records) if given is None else given)
        missing = set(self.records) - seen
        self.told = bool(bucket.upkeep.damaged or disk.listdir(f"{PATH}/quarantine"))
        return missing


def read(bucket: Bucket) -> tuple[list[Record], set[int]]:
    found: list[Record] = []
    damaged: set[int] = set()
    sequence = 0
    while True:
        try:
            record = bucket.reader.scan(sequence)
        except Damaged as error:
            damaged.add(error.sequence)
            sequence = error.sequence + 1
            continue
        if record is None:
            return found, damaged
        found.append(record)
        sequence = record.sequence + 1


def file_of(disk: LyingDisk, name: str) -> File:
    file = disk._find(f"{FOLDER}/{name}")
    assert isinstance(file, File)
    return file


@pytest.mark.slow
@pytest.mark.parametrize("index", [True, False])
def test_the_last_segment_cut_at_every_byte(index: bool) -> None:
    """Synced records are on disk, so this is no power loss: the file is shorter than any start expects. Which sequences
    were given only the records that are left tell, and those that the index covers."""
    written = Written(clean=False)
    last = [name for name in written.files() if name.endswith(".log")][-1]
    data = bytes(file_of(written.disk, last).data).rstrip(b"\0")
    parts = DiskStore(PATH, disk=written.copy()).open(1).chain.segments[-1].idx.parts if index else ()
    covered = parts[-1].to if parts else 0
    at, given = 0, int(last[:-4]) - 1
    for length in range(len(data) + 1):
        disk = written.copy()
        while (row := row_at(data[: max(length, covered)], at)) is not None:
            given = max(given, row.kind == Kind.CHANGE and reserved_by(data[at + HEAD_BYTES : at + row.size]) - 1)
            at += padded(row.size)
        file_of(disk, last).resize(length)
        if not index and disk.exists(f"{FOLDER}/{last[:-4]}.idx"):
            disk.unlink(f"{FOLDER}/{last[:-4]}.idx")
        missing = written.check(disk, given)
        whole = [not missing & set(unit) for unit in written.units]
        assert whole == sorted(whole, reverse=True), "not a prefix"
        assert not missing or min(missing) >= int(last[:-4])


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("bit", range(32))
def test_a_damaged_size_costs_one_message(bit: int, index: bool) -> None:
    """Messages of one length: a wrong size leads to the beginning of another record, far behind."""
    disk = LyingDisk()
    with lowered(SEGMENT_BYTES=1 << 20, SEGMENT_RECORDS=10_000, INDEX_STRIDE_BYTES=1 << 20):
        store, bucket = opened(disk)
        for number in range(4_000):
            bucket.writer.append(Kind.MESSAGE, 16, 0, b"%032d" % number)
        store.close()
    (name,) = (name for name in disk.listdir(FOLDER) if name.endswith(".log"))
    file = file_of(disk, name)
    at = bytes(file.data).index(b"%032d" % 77) - 32
    file.write(at, (int.from_bytes(file.data[at : at + 4], "little") ^ 1 << bit).to_bytes(4, "little"))
    if not index:
        disk.unlink(f"{FOLDER}/{name[:-4]}.idx")
    _, bucket = opened(disk.copy())
    found, damaged = read(bucket)
    assert {record.sequence for record in found} == {*range(1, 4_001)} - {78}
    assert bucket.upkeep.damaged == 1
    assert damaged == ({78} if index else set())
    assert list(bucket.upkeep.history()[1]) == []
    assert bucket.upkeep.lost == []


@pytest.mark.parametrize("kind", [Kind.CHANGE, Kind.ACK, Kind.CLOCK, Kind.STATE])
def test_no_bit_makes_a_change_look_harmless(kind: Kind) -> None:
    """Whatever bit of it is wrong, a scan without an index says that more than a message may be missing."""
    before, after = encode(1, 5, 16, 1, 0, b"", b"one"), encode(2, 5, 16, 1, SETTLED, b"", b"two")
    for length in (23, 24, 32, 40, 56, 97):
        change = encode(1, 5, 0, kind, 0, b"", b'{"do":"ctl","lines":["'.ljust(length, b"x"))
        for bit in range(8 * (32 + length)):
            data = bytearray(before + change + after)
            data[len(before) + bit // 8] ^= 1 << bit % 8
            index, others = OpenIndex(), NonMessageRecords()
            found = scan_segment(bytes(data), 0, index, others, covered=0)
            assert found.doubtful == {len(before)}, (length, bit)
            assert list(index.sequences) == [1, 2]


@pytest.mark.parametrize("in_state", [False, True])
def test_noise_is_no_tear_whatever_size_it_says(in_state: bool) -> None:
    """It reaches past what follows, as a torn message does that holds records; but that has a head of its own."""
    luck = random.Random(1)
    before = encode(6, 0, 0, Kind.STATE, MORE, b"", bytes(64)) if in_state else b""
    rest = encode(6, 0, 0, Kind.CHANGE, INNER, b"", RESERVE) if in_state else b""
    after = encode(8, 0, 16, Kind.MESSAGE, SETTLED, b"", b"intact")
    for _ in range(200):
        noise = luck.randrange(1_000, 1 << 20).to_bytes(4, "little") + luck.randbytes(92)
        index = OpenIndex()
        found = scan_segment(before + noise + rest + after, 0, index, NonMessageRecords(), covered=0, tail=True)
        assert list(index.sequences) == [8]
        assert [start for start, _ in found.bad] == [len(before)]


def test_a_search_is_linear_in_what_it_passes() -> None:
    """A body full of heads, each of a record that would reach far: no one's message stops a start."""
    head = HEAD.pack(1 << 19, 0, 1 << 40, 0, 16, Kind.MESSAGE, 0, 0)
    good = encode(7, 0, 16, Kind.MESSAGE, 0, b"", b"good")
    data = b"\1" * 32 + head * (1 << 16) + good + bytes(1 << 20)
    began = time.process_time()
    assert next_good(data, 0, 6) == len(data) - (1 << 20) - len(good)
    assert time.process_time() - began < 3
    inside = encode(3, 0, 16, Kind.MESSAGE, 0, b"", b"of another log")
    bad = bytearray(encode(7, 0, 16, Kind.MESSAGE, 0, b"", inside) + encode(8, 0, 16, Kind.MESSAGE, 0, b"", b"next"))
    bad[40] ^= 1
    assert next_good(bytes(bad), 0, 6) == 32 + padded(len(inside))


@pytest.mark.parametrize("kind", [Kind.MESSAGE, Kind.CHANGE, Kind.ACK])
def test_what_a_message_holds_is_no_record_where_a_bit_of_it_is_damaged(kind: Kind) -> None:
    """Whoever writes may write records: they are not taken for some, whichever bit behind the size is damaged."""
    forged = b"".join(encode(6 + (kind is Kind.MESSAGE), 0, 0, kind, SETTLED, b"", b'{"do":"x"}') for _ in range(3))
    first, second = encode(7, 0, 16, Kind.MESSAGE, 0, b"", forged), encode(8, 0, 16, Kind.MESSAGE, 0, b"", b"next")
    for bit in range(32, 8 * len(first)):
        data = bytearray(first + second)
        data[bit // 8] ^= 1 << bit % 8
        assert next_good(bytes(data), 0, 6) == len(first)


def test_a_damaged_size_that_leads_past_a_change_hides_nothing() -> None:
    """It leads to the next message, as if nothing but the damaged one stood before it."""
    message = encode(7, 0, 16, Kind.MESSAGE, 0, b"", bytes(32))
    change = encode(7, 0, 0, Kind.CHANGE, 0, b"", bytes(32))
    data = bytearray(message + change + encode(8, 0, 16, Kind.MESSAGE, 0, b"", b"next"))
    data[:4] = (len(message) + len(change)).to_bytes(4, "little")
    assert next_good(bytes(data), 0, 6) == len(message)


@pytest.mark.slow
@pytest.mark.parametrize("clean", [True, False])
def test_one_bit(clean: bool) -> None:
    """After a clean stop one unit may be missing, and damage to an index costs nothing."""
    written = Written(clean=clean)
    luck = random.Random(tree_seed())
    for _ in range(size(3_000)):
        disk = written.copy()
        name = luck.choice(written.files())
        file = file_of(disk, name)
        at = luck.randrange(len(file.data))
        file.write(at, bytes([file.data[at] ^ 1 << luck.randrange(8)]))
        missing = written.check(disk)
        if name.endswith(".idx"):
            assert not missing
        if missing:
            assert written.told, "damage without a report"
            if clean:
                assert any(missing <= set(unit) for unit in written.units), "more is missing than was hit"


def test_rot_is_kept_aside_and_told_each_time() -> None:
    written = Written(clean=True)
    disk = written.copy()
    first = written.files()[1]
    assert first.endswith(".log")
    file = file_of(disk, first)
    message = next(record for record in written.records.values() if record.body and record.body[:1] != b"!")
    at = bytes(file.data).index(message.body)
    file.write(at, b"!")
    store = DiskStore(PATH, disk=disk)
    bucket = store.open(1)
    for _ in range(2):
        with pytest.raises(Damaged) as caught:
            read_to_end(bucket)
        assert caught.value.sequence == message.sequence
    assert bucket.upkeep.damaged == 1
    kept = disk.listdir(f"{PATH}/quarantine")
    assert len(kept) == 1
    assert bytes(disk._find(f"{PATH}/quarantine/{kept[0]}").data).find(b"!" + message.body[1:]) >= 0


def read_to_end(bucket: Bucket) -> None:
    sequence = 0
    while (record := bucket.reader.scan(sequence)) is not None:
        sequence = record.sequence + 1


@pytest.mark.parametrize(
    "damage", [bytes(512), bytes(40), random.Random(1).randbytes(90)], ids=["sector", "zeros", "noise"]
)
@pytest.mark.parametrize("which", [0, 1, -1])
def test_an_index_counts_where_the_first_record_is_damaged(which: int, damage: bytes) -> None:
    """That record says of which log an index is. Without the index the segment looks as if a power cut had torn it."""
    written = Written(clean=True)
    disk = written.copy()
    name = [name for name in written.files() if name.endswith(".log")][which]
    file = file_of(disk, name)
    data, at, hit = bytes(file.data), 0, set[int]()
    while (row := row_at(data, at)) is not None:
        if row.kind <= Kind.END and at < len(damage):
            hit.add(row.sequence)
        at += padded(row.size)
    file.write(0, damage)
    assert written.check(disk) == hit
    assert written.told or not hit


def test_all_bytes_of_a_new_head_are_zeros() -> None:
    """A segment was begun just before the power went: its name is there, its bytes are not."""
    written = Written(clean=True)
    disk = written.copy()
    name = f"{max(written.records) + 1:020d}.log"
    disk.close(disk.open(f"{FOLDER}/{name}", 0o102))
    file_of(disk, name).resize(4_096)
    assert written.check(disk) == set()
    assert not disk.exists(f"{FOLDER}/{name}")
    assert disk.listdir(f"{PATH}/quarantine") == []


def opened(disk: LyingDisk) -> tuple[DiskStore, Bucket]:
    store = DiskStore(PATH, disk=disk)
    bucket = store.make(store.number(), b"0") if not store.groups() else store.open(1)
    bucket.writer.state = lambda: b"0"
    return store, bucket


def hit(disk: LyingDisk, body: bytes, *, zeros: bool = False) -> None:
    """Damage the record in the last segment that holds that body."""
    name = [name for name in sorted(disk.listdir(FOLDER)) if name.endswith(".log")][-1]
    file = file_of(disk, name)
    at = bytes(file.data).index(body)
    file.write(at - 32 if zeros else at, bytes(32 + len(body)) if zeros else b"!")


@pytest.mark.parametrize("zeros", [True, False])
def test_behind_a_tear_nothing_is_served(zeros: bool) -> None:
    """The page of an earlier record never reached the disk, those of later ones did: none was promised."""
    disk = LyingDisk()
    _, bucket = opened(disk)
    for body in (b"sync'd", b"first", b"second", b"third"):
        bucket.writer.append(Kind.MESSAGE, 16, 0, body)
        if body == b"sync'd":
            bucket.upkeep.sync()
    disk = disk.after_kill()
    hit(disk, b"second", zeros=zeros)
    _, bucket = opened(disk)
    records, damaged = read(bucket)
    assert [record.body for record in records] == [b"sync'd", b"first"]
    assert not damaged
    (kept,) = disk.listdir(f"{PATH}/quarantine")
    assert b"third" in bytes(disk._find(f"{PATH}/quarantine/{kept}").data)


def test_what_stood_behind_a_tear_does_not_come_back() -> None:
    """The next record ends where a record that was given up began; then the server is killed again."""
    disk = LyingDisk()
    _, bucket = opened(disk)
    bodies = [b"%016d" % number for number in range(6)]  # records as long as one that reserves numbers
    for body in bodies:
        bucket.writer.append(Kind.MESSAGE, 16, 0, body)
    disk = disk.after_kill()
    hit(disk, bodies[1])
    _, bucket = opened(disk)
    bucket.writer.append(Kind.MESSAGE, 16, 0, b"of a second run.")
    _, bucket = opened(disk.after_kill())
    assert [record.body for record in read(bucket)[0]] == [bodies[0], b"of a second run."]
    assert bucket.metrics.count(16, 0)[0] == 2


def test_numbers_are_not_given_again_where_the_record_that_reserves_them_is_damaged() -> None:
    disk = LyingDisk()
    _, bucket = opened(disk)
    for number in range(20):
        bucket.writer.append(Kind.MESSAGE, 16, 0, b"%04d" % number)
    bucket.upkeep.sync()
    bucket.writer.append(Kind.CHANGE, 0, 0, b"later")  # it says that all before it was on disk
    given = bucket.end.next - 1
    disk = disk.after_kill()
    (name,) = (name for name in disk.listdir(FOLDER) if name.endswith(".log"))
    file = file_of(disk, name)
    begin, end = bytes(file.data).rindex(RESERVE), bytes(file.data).index(b"later")
    assert begin < bytes(file.data).index(b"%04d" % limits.SEQUENCE_BLOCK)
    file.write(begin, b"!" * (end - 32 - begin))
    _, bucket = opened(disk)
    assert bucket.upkeep.damaged
    assert bucket.end.next > given


@pytest.mark.parametrize("lost", [1, 2])
@pytest.mark.parametrize("fix", [False, True])
def test_numbers_of_segments_whose_heads_are_lost_are_not_given_again(
    lost: int, fix: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment may have used several blocks of them."""
    monkeypatch.setattr(limits, "SEQUENCE_BLOCK", 4)
    disk = LyingDisk()
    _, bucket = opened(disk)
    while len(bucket.chain.segments) < 4 or bucket.chain.segments[-1].counts()[0] < 20:
        bucket.writer.append(Kind.MESSAGE, 16, 0, b"")
    bucket.upkeep.sync()
    given, disk = bucket.end.next - 1, disk.after_kill()
    for name in sorted(name for name in disk.listdir(FOLDER) if name.endswith(".log"))[-lost:]:
        file_of(disk, name).resize(20)
    if fix:
        Checker(disk, PATH, True, print, no_progress).group(1, FOLDER)
    _, bucket = opened(disk)
    assert bucket.end.next > given


def test_behind_rot_all_is_served() -> None:
    """A later record says that the damaged one had been on disk: so it is no tear. The rest of its batch is served,
    as it is where an index lists it."""
    disk = LyingDisk()
    _, bucket = opened(disk)
    bucket.writer.append_batch([Draft(Kind.MESSAGE, 16, body) for body in (b"one", b"two", b"three")], 0)
    bucket.upkeep.sync()
    bucket.writer.append(Kind.MESSAGE, 16, 0, b"later")
    disk = disk.after_kill()
    hit(disk, b"two")
    _, bucket = opened(disk)
    assert [record.body for record in read(bucket)[0]] == [b"one", b"three", b"later"]
    assert bucket.upkeep.damaged == 1
    assert bucket.end.next > 4


@pytest.mark.parametrize("luck", range(12))
def test_what_made_messages_unwanted_is_on_disk_before_they_go(luck: int) -> None:
    for stop in range(1, 60):
        disk = LyingDisk()
        _, bucket = opened(disk)
        while len(bucket.chain.segments) < 3:  # type: ignore[attr-defined]
            bucket.writer.append(Kind.MESSAGE, 16, 0, b"x" * 200)
        bucket.upkeep.sync()
        bucket.writer.append(Kind.CHANGE, 0, 0, b"cleared")
        disk.stop_at = disk.calls + stop
        with contextlib.suppress(Stopped):
            bucket.upkeep.trim({}, frozenset())
        _, bucket = opened(disk.after_power_loss(random.Random(luck)))
        if not any(record.sequence == 1 for record in read(bucket)[0]):
            assert [record.body for record in bucket.upkeep.history()[1]] == [b"cleared"]
        if disk.calls < disk.stop_at:
            return
    raise AssertionError("a trim of too many calls")


@pytest.mark.parametrize("luck", [None, *range(8)])
def test_compaction_stopped_at_every_call(luck: int | None) -> None:
    """Killed (no luck) or without power: every wanted message is there, once."""
    for stop in range(1, 100):
        disk = LyingDisk()
        _, bucket = opened(disk)
        kept = []
        while len(bucket.chain.segments) < 5:  # type: ignore[attr-defined]
            bucket.writer.append(Kind.MESSAGE, 17, 0, b"x" * 200)
            kept.append(
                bucket.writer.append_batch([Draft(1, 16, b"a"), Draft(1, 17, b"y" * 90), Draft(1, 18, b"b")], 0)
            )
        bucket.upkeep.sync()
        before = bucket.upkeep.size
        disk.stop_at = disk.calls + stop
        with contextlib.suppress(Stopped):
            bucket.upkeep.trim({16: 0, 18: 0}, frozenset())
            bucket.upkeep.tick(math.inf)  # all of it, however slow the machine is
            assert bucket.upkeep.size < before / 2
            check_kept(bucket, kept)
        after = disk.after_kill() if luck is None else disk.after_power_loss(random.Random(luck))
        _, again = opened(after)
        check_kept(again, kept)
        assert again.upkeep.damaged == 0
        if disk.calls < disk.stop_at:
            return
    raise AssertionError("a compaction of too many calls")


def check_kept(bucket: Bucket, kept: list[int]) -> None:
    for stream, step, body in ((16, 0, b"a"), (18, 2, b"b")):
        found, sequence = [], 0
        while (record := bucket.reader.find(stream, sequence)) is not None:
            found.append((record.sequence, record.body))
            sequence = record.sequence + 1
        assert found == [(first + step, body) for first in kept]
        assert bucket.metrics.count(stream, 0) == (len(kept), len(kept))


def _skip(disk: LyingDisk, bucket: Any) -> tuple[LyingDisk, Any]:
    """Reserve the number of a message that was published and not kept."""
    bucket.writer.skip()
    return disk, bucket


def _kill(disk: LyingDisk, bucket: Any) -> tuple[LyingDisk, Any]:
    """Numbers that were reserved are not given again."""
    bucket.upkeep.sync()
    disk = disk.after_kill()
    return disk, opened(disk)[1]


def _roll_twice(disk: LyingDisk, bucket: Any) -> tuple[LyingDisk, Any]:
    """A segment without a message: the next one cannot have its name."""
    bucket.writer.roll()
    return disk, bucket


def _compact(disk: LyingDisk, bucket: Any) -> tuple[LyingDisk, Any]:
    """The last message of a segment is not live, so its copy is without it."""
    bucket.writer.append(Kind.MESSAGE, 16, 0, b"x" * 900)
    bucket.writer.state = lambda: b"the new state"
    bucket.writer.roll()
    bucket.upkeep.sync()
    size = bucket.upkeep.size
    bucket.upkeep.trim({17: 0}, frozenset())
    for _ in bucket.upkeep.compaction.compact():
        pass
    assert bucket.upkeep.size < size / 2
    return disk, bucket


@pytest.mark.parametrize("use_up", [_skip, _kill, _roll_twice, _compact])
def test_numbers_without_a_message_are_not_missing(use_up: Any) -> None:
    """The newest head is damaged, and the segment before has no message with the number before: its state counts."""
    disk = LyingDisk()
    _, bucket = opened(disk)
    bucket.writer.append(Kind.MESSAGE, 17, 0, b"live")
    bucket.writer.append(Kind.CHANGE, 0, 0, b"change 1")
    disk, bucket = use_up(disk, bucket)
    bucket.writer.state = lambda: b"the new state"
    if use_up is not _compact:
        bucket.writer.roll()
    bucket.writer.append(Kind.CHANGE, 0, 0, b"change 2")
    bucket.upkeep.close()
    hit(disk, b"the new state")
    _, bucket = opened(disk.copy())
    state, behind = bucket.upkeep.history()
    assert [record.body for record in behind][-1] == b"change 2"
    assert state == b"0"
    assert bucket.upkeep.lost == []
