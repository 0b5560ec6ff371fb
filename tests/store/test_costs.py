"""What a start and a read cost, in calls and descriptors rather than in seconds."""

from __future__ import annotations

import os
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from mqfs.engine.core.portions import exhaust
from mqfs.errors import DiskFull
from mqfs.model import Draft, Kind
from mqfs.records import batch, headers
from mqfs.store import memory
from mqfs.store.disk import Disk
from mqfs.store.memory import MemoryStore
from mqfs.store.segment.index import OpenIndex
from mqfs.store.segment.liveness import Liveness
from mqfs.store.store import DiskStore
from tests.support.calls import calls_once, lines
from tests.support.temp_store import abandon, lowered


class CountingDisk(Disk):
    def __init__(self) -> None:
        self.reads = 0
        self.read_bytes = 0

    def pread(self, fd: int, count: int, position: int) -> bytes:
        data = os.pread(fd, count, position)
        self.reads += 1
        self.read_bytes += len(data)
        return data


@pytest.mark.slow
def test_descriptors_are_bounded(tmp_path: Path) -> None:
    with lowered(OPEN_BUCKETS=16, SEGMENT_BYTES=4_096, SEGMENT_FIRST_BYTES=1_024):
        store = DiskStore(f"{tmp_path}/store")
        buckets = [store.make(store.number(), b"{}") for _ in range(40)]
        most = before = len(os.listdir("/proc/self/fd"))
        for round_ in range(60):
            for bucket in buckets:
                bucket.writer.state = lambda: b"{}"
                bucket.writer.append(Kind.MESSAGE, 16, 0, b"x" * 200)
                if round_ % 10 == 0:
                    bucket.upkeep.sync()
            most = max(most, len(os.listdir("/proc/self/fd")))
        for bucket in buckets:
            assert [bucket.reader.find(16, n) is not None for n in (1, 30, 60)] == [True] * 3
            most = max(most, len(os.listdir("/proc/self/fd")))
        assert most - before <= 18
        store.close()


def opening_ten(path: str, groups: int) -> int:
    """Calls that the last ten groups of a store take to open."""
    store = DiskStore(path)
    numbers = [store.number() for _ in range(groups)]
    for number in numbers:
        store.make(number, b"{}").writer.append(Kind.MESSAGE, 16, 0, b"x")
    store.close()
    store = DiskStore(path)

    def open_all(some: list[int]) -> None:
        for number in some:
            store.open(number).upkeep.history()

    open_all(numbers[:-10])
    found = calls_once(lambda: open_all(numbers[-10:]))
    store.close()
    return found


def test_a_group_opens_as_cheaply_beside_hundreds(tmp_path: Path) -> None:
    """Its descriptor is counted with those that are open, which are not counted again for it."""
    assert opening_ten(f"{tmp_path}/many", 320) < 1.2 * opening_ten(f"{tmp_path}/few", 60)


def filled(path: str) -> None:
    """10 messages in each of 1,000 streams."""
    store = DiskStore(path)
    bucket = store.make(store.number(), b"{}")
    bucket.writer.state = lambda: b"{}"
    for number in range(10_000):
        bucket.writer.append(Kind.MESSAGE, 16 + number % 1_000, number, b"x" * 1_000)
    store.close()


def test_one_stream_costs_its_own_messages(tmp_path: Path) -> None:
    """Both from sealed segments and from the open one; a start reads no messages at all."""
    with lowered(SEGMENT_BYTES=4 << 20):
        filled(f"{tmp_path}/store")
        disk = CountingDisk()
        store = DiskStore(f"{tmp_path}/store", disk=disk)
        bucket = store.open(1)
        bucket.upkeep.history()
        assert disk.read_bytes < 20_000
        bucket.metrics.count(20, 0)  # loads the indexes
        disk.reads = disk.read_bytes = 0
        sequence = count = 0
        while (record := bucket.reader.find(20, sequence)) is not None:
            sequence, count = record.sequence + 1, count + 1
        assert count == 10
        assert disk.reads == 10
        assert disk.read_bytes == 10 * 1_032
        store.close()


def took(act: Callable[[], object]) -> float:
    """Seconds of this thread, the least of several."""
    times = []
    for _ in range(5):
        began = time.thread_time()
        act()
        times.append(time.thread_time() - began)
    return min(times)


@pytest.mark.skipif(bool(batch.MISSING), reason=batch.MISSING)
@pytest.mark.parametrize("sealed", [False, True])
def test_what_a_stream_has_is_added_up_much_faster_than_one_by_one(tmp_path: Path, sealed: bool) -> None:
    """It is asked for in one piece, as by the first open of a stream after a start."""
    store = DiskStore(f"{tmp_path}/store")
    bucket = store.make(store.number(), b"{}")
    bucket.writer.state = lambda: b"{}"
    for _ in range(20):
        bucket.writer.append_batch([Draft(Kind.MESSAGE, 16 + n % 2, b"x" * (n % 9), b"") for n in range(4_000)], 0)
    if sealed:
        bucket.upkeep.sync()
        bucket.writer.roll()
        bucket.upkeep.sync()
    index = bucket.chain.segments[0].load()
    assert isinstance(index, OpenIndex) != sealed
    posting, metrics = index.posting(16), bucket.metrics
    asked: dict[str, Callable[[], object]] = {
        "bodies": lambda: metrics.count(16, 0),
        "headers": lambda: metrics.header_bytes(16, 0),
        "kinds": lambda: metrics.count_eof_markers(16, 0),
    }
    for column, ask in asked.items():
        each = took(lambda column=column: sum(itemgetter(*posting)(getattr(index, column))))
        assert took(ask) < each / 5, column
    assert metrics.count(16, 0) == (40_000, sum(index.bodies[ordinal] for ordinal in posting))
    store.close()


@pytest.mark.skipif(bool(batch.MISSING), reason=batch.MISSING)
def test_headers_are_searched_without_a_look_at_the_bodies(tmp_path: Path) -> None:
    """Those of a whole log are, where one asks for its priorities before maintenance has read them."""
    store = DiskStore(f"{tmp_path}/store")
    bucket = store.make(store.number(), b"{}")
    bucket.writer.state = lambda: b"{}"
    head = headers.encode({"kind": "order", "customer": "ann"})
    bucket.writer.append_batch([Draft(Kind.MESSAGE, 16, b"x" * 1_500, head)] * 4_000, 0)
    segment = bucket.chain.segments[0]
    keys = [headers.key(name) for name in ("priority", "ttl", "single")]

    def search() -> None:
        position = 1
        while position < bucket.end.next:
            found, position = bucket.reader.search_headers(position, 1_000, keys)
            assert found == []

    def read() -> None:
        for at in range(segment.head, segment.used, segment.used // 4):
            segment.read(at, segment.used // 4)

    assert took(search) < 6 * took(read)
    store.close()


def test_acknowledgements_are_few_bytes_in_memory(tmp_path: Path) -> None:
    store = DiskStore(f"{tmp_path}/store")
    bucket = store.make(store.number(), b"{}")
    bucket.writer.state = lambda: b"{}"
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(20_000):
        bucket.writer.append(Kind.ACK, 1, 0, bytes(24))
    each = (tracemalloc.get_traced_memory()[0] - before) / 20_000
    tracemalloc.stop()
    assert each < 40
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize("clean", [True, False])
def test_history_is_read_in_large_pieces(tmp_path: Path, clean: bool) -> None:
    """20,000 acknowledgements between as many messages, without memory in proportion."""
    store = DiskStore(f"{tmp_path}/store")
    bucket = store.make(store.number(), b"{}")
    bucket.writer.state = lambda: b"{}"
    for number in range(20_000):
        bucket.writer.append(Kind.MESSAGE, 16, number, b"x" * 100)
        bucket.writer.append(Kind.ACK, 1, number, b"%024d" % number)
        if number % 1_000 == 0:
            bucket.upkeep.sync()
    if clean:
        store.close()
    else:
        abandon(store)
    disk = CountingDisk()
    store = DiskStore(f"{tmp_path}/store", disk=disk)
    bucket = store.open(1)
    disk.reads = 0
    tracemalloc.start()
    _, behind = bucket.upkeep.history()
    assert [int(record.body) for record in behind if record.kind == Kind.ACK] == list(range(20_000))
    del behind
    kept, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert disk.reads < 100
    assert kept < 400_000  # free tuples that Python keeps; not the 24 bytes of each
    assert most < 20_000 * 100 + (4 << 20)
    store.close()


def test_an_index_that_is_not_used_takes_no_memory(tmp_path: Path) -> None:
    """That of a sealed segment is read again when it is needed. One that the disk does not have stays."""
    with lowered(SEGMENT_BYTES=8_192, SEGMENT_FIRST_BYTES=1_024, INDEX_STRIDE_BYTES=1_024):
        store = DiskStore(f"{tmp_path}/store")
        bucket = store.make(store.number(), b"{}")
        bucket.writer.state = lambda: b"{}"
        for number in range(600):
            bucket.writer.append(Kind.MESSAGE, 16, number, b"x" * 100)
        bucket.upkeep.sync()
        sealed = [segment for segment in bucket.chain.segments if segment.sealed]
        assert len(sealed) > 5
        for segment in sealed:
            segment.load()
        sealed[1].index = only = OpenIndex()
        store.tick()
        assert all(segment.index is not None for segment in sealed)
        assert bucket.reader.find(16, 5) is not None
        store.tick()
        assert [segment.index is not None for segment in sealed] == [True, True] + [False] * (len(sealed) - 2)
        assert sealed[1].index is only
        assert bucket.reader.find(16, 500) is not None
        store.close()


def test_a_full_memory_store_takes_acknowledgements() -> None:
    """They are what makes room in it."""
    with lowered(MEMORY_BYTES=10_000):
        bucket = MemoryStore().make(1, b"{}")
        bucket.writer.state = lambda: b"{}"
        for _ in range(10_000 // 56):
            bucket.writer.append(Kind.MESSAGE, 16, 0, bytes(24))
        with pytest.raises(DiskFull):
            bucket.writer.append(Kind.MESSAGE, 16, 0, bytes(24))
        for _ in range(5_000):
            bucket.writer.append(Kind.ACK, 1, 0, bytes(24))
        assert bucket.upkeep.size < 10_000 + (64 << 10) + 56
        exhaust(bucket.upkeep.trim({}, frozenset()))
        bucket.writer.append(Kind.STATE, 0, 0, b"{}")
        assert bucket.writer.append(Kind.MESSAGE, 16, 0, bytes(24)) == 179


def test_messages_in_memory_are_counted_without_a_look_at_each() -> None:
    calls = []
    for count in (100, 10_000):
        bucket = MemoryStore().make(1, b"{}")
        for number in range(count):
            bucket.writer.append(Kind.MESSAGE if number % 10 else Kind.END, 16, 0, b"x" if number % 10 else b"")
        metrics = bucket.metrics
        calls.append(calls_once(lambda metrics=metrics: (metrics.count(16, 2), metrics.count_eof_markers(16, 2))))
        assert (metrics.count(16, 2), metrics.count_eof_markers(16, 2)) == (
            (count - 1, count * 9 // 10),
            count // 10 - 1,
        )
    assert calls[0] == calls[1]


def start_s(path: str, messages: int) -> float:
    """Seconds of a start after a unit of that many messages that no index on disk holds yet."""
    store = DiskStore(path)
    bucket = store.make(store.number(), b"{}")
    bucket.writer.state = lambda: b"{}"
    bucket.writer.append_batch([Draft(Kind.MESSAGE, 16, b"x")] * messages, 0)
    abandon(store)
    took = []
    for _ in range(3):
        began = time.process_time()
        again = DiskStore(path)
        assert again.open(1).metrics.count(16, 0) == (messages, messages)
        took.append(time.process_time() - began)
        abandon(again)
    return min(took)


def test_a_start_costs_as_much_as_there_is_in_a_unit(tmp_path: Path) -> None:
    """Eight times as many: eight times as much, or not much more, and not sixty-four times."""
    few, many = (start_s(f"{tmp_path}/{messages}", messages) for messages in (5_000, 40_000))
    assert many < 24 * few


class CountedFloors(dict):  # type: ignore[type-arg]
    """Floors that count how often all of them are gone through."""

    walks = 0

    def values(self) -> Any:
        self.walks += 1
        return super().values()


def test_a_look_for_what_changed_goes_through_no_floors() -> None:
    floors, liveness = CountedFloors({16: 1, 17: 2}), Liveness()
    liveness.update(floors, frozenset(), None, 9)
    before, walks = liveness.version(), floors.walks
    assert [liveness.version() for _ in range(5)] == [before] * 5
    assert floors.walks == walks
    for changed in ({16: 2, 17: 2}, {16: 2, 17: 2, 18: 0}, {16: 2, 17: 3, 18: 0}):
        liveness.update(changed, frozenset(), None, 9)
        assert liveness.version() != before
        before = liveness.version()


def in_memory(count: int) -> tuple[Any, Iterator[None], list[int]]:
    """A log in memory with as many messages, of three streams; the trim of it, and what that leaves."""
    bucket = MemoryStore().make(16, b"")
    for number in range(1, count + 1):
        bucket.writer.append(Kind.MESSAGE, 16 + number % 3, 0, b"x")
    floors, dropped = {16: count // 2, 17: 1}, set(range(count // 3, count, 4))
    wanted = [n for n in range(1, count + 1) if n % 3 < 2 and n not in dropped and n >= floors[16 + n % 3]]
    return bucket, bucket.upkeep.trim(floors, dropped), wanted


def test_a_log_in_memory_is_trimmed_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_STEPS", 64)
    costs = []
    for count in (1_000, 8_000):
        _, steps, _ = in_memory(count)
        costs.append(max(lines(partial(next, steps, None)) for _ in range(count)))
    assert costs[1] < 1.5 * costs[0]


@pytest.mark.parametrize("steps", [5, 10, 15, 20, 1_000])
def test_a_log_in_memory_is_read_and_written_while_it_is_trimmed(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """And may be left in the middle."""
    monkeypatch.setattr(memory, "_STEPS", 64)
    bucket, trimming, wanted = in_memory(1_000)

    def found(stream: int | None) -> list[int]:
        sequences, at = list[int](), bucket.end.next
        while at := bucket.reader.before(at, stream) or 0:
            record = bucket.reader.scan(at) if stream is None else bucket.reader.find(stream, at)
            assert record is not None
            assert record.sequence == at
            sequences.append(at)
        return sequences[::-1]

    before, unwanted, size = set(found(None)), set(found(None)) - set(wanted), bucket.upkeep.size
    for _ in islice(trimming, steps):
        wanted.append(bucket.writer.append(Kind.MESSAGE, 18, 0, b"new"))
        for stream in (None, 16, 17, 18):
            assert set(found(stream)) <= before | set(wanted)
        assert set(found(None)) >= set(wanted)
    trimming.close()
    if steps == 1_000:
        assert found(None) == sorted(found(16) + found(17) + found(18)) == wanted
        assert bucket.upkeep.size == size // len(before) * len(wanted)
    else:
        assert sorted(found(16) + found(17) + found(18)) == found(None)
        assert unwanted & set(found(None))
