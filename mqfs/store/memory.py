"""Logs in memory: those of a store that ends with its process, and the messages of a group with `keep ring`.

A MemoryLog has the semantics of a log on disk and is bounded by limits.MEMORY_BYTES. With `keep ring` it is one half:

    MESSAGE, END   ->  MemoryLog, gone with the server
    CHANGE, CLOCK  ->  the bucket on disk: names, settings, consumers
    ACK            ->  nowhere: consumers have it in memory
    sequences      ->  reserved on disk in very large blocks: none is given twice, and no message writes there
"""

from __future__ import annotations

import re
import uuid
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import islice

from mqfs import errors, limits
from mqfs.model import MORE, Buffer, Draft, Head, Kind, Listed, Record, RecordColumns, RecordRun, Split
from mqfs.records.record import HEAD_BYTES, INNER, encode, padded
from mqfs.store.api import Bucket, Committed, Histogram, LogEnd, LogUpkeep, Wanted
from mqfs.store.chain import StoredEnd
from mqfs.store.log_reader import PORTIONS, of_sizes

_CHANGED_BYTES = 64 << 10  # changes kept behind a state; with more the log refers to the group's current state
_STEPS, _STREAMS = 4_096, 1_024  # messages and streams examined at once: some 2 ms
_LEAST = 4  # messages in a run; fewer are read one by one


class Posting:
    """The messages of one stream. A range of them is counted from its two ends, however long it is."""

    __slots__ = ("marks", "sequences", "sizes")

    def __init__(self) -> None:
        self.sequences = array("Q")
        self.sizes = array("Q", [0])  # body bytes before each message, and before the next one
        self.marks = array("Q")  # EOF markers

    def add(self, record: Record) -> None:
        self.sequences.append(record.sequence)
        self.sizes.append(self.sizes[-1] + len(record.body))
        if record.kind == Kind.END:
            self.marks.append(record.sequence)

    def cut(self, count: int) -> array[int]:
        """Remove the oldest messages; return their sequences."""
        gone = self.sequences[:count]
        del self.sequences[:count], self.sizes[:count], self.marks[: bisect_right(self.marks, gone[-1])]
        return gone


class MemoryLog:
    """The records of one log. See `LogUpkeep` in mqfs/store/api.py."""

    __slots__ = (
        "_changed", "_changes", "_group", "_state", "damaged", "end", "lost", "records", "sequences", "size", "streams",
    )  # fmt: skip

    def __init__(self, group: int, state: bytes) -> None:
        self._group = group
        self._state: Callable[[], bytes] = lambda: state
        self._changes: list[Record] = []  # records after the state
        self._changed = 0  # their bytes
        self.end = StoredEnd()
        self.size = 0
        self.damaged = 0
        self.lost: list[str] = []
        self.records: dict[int, Record] = {}
        self.sequences: list[int] = []  # of all messages, in order
        self.streams: dict[int, Posting] = {}

    @property
    def lag(self) -> None:
        return None

    @property
    def is_final(self) -> bool:
        return True

    def fail(self, error: OSError) -> None:
        self.end.failed = self.end.failed or error

    def history(self) -> tuple[bytes | None, Iterable[Record]]:
        return self._state(), list(self._changes)

    def check_room(self, need: int) -> None:
        """Raise DiskFull if `need` more bytes would exceed the bound."""
        if self.size + need > limits.MEMORY_BYTES:
            raise errors.DiskFull(
                f"no room for group {self._group} (expected at most {limits.MEMORY_BYTES} bytes in memory)"
            )

    def add_change(self, record: Record, size: int, state: Callable[[], bytes]) -> None:
        """Add a record that is no message. `state` returns the group's current state."""
        if record.kind == Kind.STATE:
            self._state, self._changes, self._changed = lambda: record.body, [], 0
        elif self._changed + size > _CHANGED_BYTES:
            self._state, self._changes, self._changed = state, [], _CHANGED_BYTES
        else:
            self._changes.append(record)
            self._changed += size

    def trim(self, floors: Mapping[int, int], dropped: Set[int], wanted: Wanted | None = None) -> Iterator[None]:
        gone = set[int]()
        try:
            yield from self._unlist(floors, dropped, wanted, gone)
            yield from self._forget(gone)
        finally:  # after an error, or where the caller stops, which is rare: in one piece
            for _ in self._forget(gone):
                pass

    def _unlist(
        self, floors: Mapping[int, int], dropped: Set[int], wanted: Wanted | None, gone: set[int]
    ) -> Iterator[None]:
        """Remove unwanted messages from their streams, and enter them in `gone`. In steps; a message that is appended
        meanwhile stays."""
        end, middle = self.end.next, set[int]()
        for number, stream in enumerate(list(self.streams), 1):
            posting = self.streams[stream]
            while count := min(bisect_left(posting.sequences, floors.get(stream, end)), _STEPS):
                gone.update(posting.cut(count))
                yield
            if not posting.sequences:
                del self.streams[stream]
            if number % _STREAMS == 0:
                yield
        for number, sequence in enumerate(dropped, 1):
            if sequence not in gone and sequence in self.records:
                middle.add(self.records[sequence].stream)
            if number % _STEPS == 0:
                yield
        for stream in list(middle if wanted is None else self.streams):
            old, new, away, at = self.streams[stream], Posting(), list[int](), 0
            while some := old.sequences[at : at + _STEPS]:
                for sequence in some:
                    if sequence in dropped or (wanted is not None and wanted(stream, sequence) != sequence):
                        away.append(sequence)
                    else:
                        new.add(self.records[sequence])
                at += len(some)
                yield
            if new.sequences:
                self.streams[stream] = new
            else:
                del self.streams[stream]
            gone.update(away)

    def _forget(self, gone: set[int]) -> Iterator[None]:
        """Remove messages that no stream lists. In steps."""
        found, at, most = 0, 0, len(gone)  # mostly they are the oldest messages
        while found < len(gone) and (some := self.sequences[at : at + min(most, _STEPS)]):
            left = [sequence for sequence in some if sequence not in gone]
            self.sequences[at : at + len(some)] = left
            found, at, most = found + len(some) - len(left), at + len(left), 2 * most
            yield
        while gone:
            for _ in range(min(len(gone), _STEPS)):
                record = self.records.pop(gone.pop())
                self.size -= padded(HEAD_BYTES + len(record.headers) + len(record.body))
            yield

    def sync(self, then: Committed | None = None, within_s: float = 0.0) -> None:
        if then is not None:
            then(None)

    replicate = sync

    def on_rolled(self, then: Callable[[], None]) -> None:
        """Do nothing: the log has no segments."""

    def close(self) -> None:
        pass


class MemoryLogReader:
    """See `LogReader` and `LogMetrics` in mqfs/store/api.py."""

    __slots__ = ("_log",)

    def __init__(self, log: MemoryLog) -> None:
        self._log = log

    @property
    def first(self) -> int:
        log = self._log
        return log.sequences[0] if log.sequences else log.end.next

    def _search(self, sequence: int, stream: int | None) -> tuple[Sequence[int], int]:
        log = self._log
        sequences = log.sequences if stream is None else log.streams.get(stream, _NOTHING).sequences
        return sequences, bisect_left(sequences, sequence)

    def _posting(self, stream: int) -> Posting:
        return self._log.streams.get(stream, _NOTHING)

    def find(self, stream: int, sequence: int) -> Record | None:
        sequences, at = self._search(sequence, stream)
        return self._log.records[sequences[at]] if at < len(sequences) else None

    def scan(self, sequence: int) -> Record | None:
        sequences, at = self._search(sequence, None)
        return self._log.records[sequences[at]] if at < len(sequences) else None

    def locate(self, stream: int, sequence: int) -> tuple[int, int] | None:
        record = self.find(stream, sequence)
        return None if record is None else (record.sequence, len(record.body))

    def read_run(self, sequence: int, end: int, most_bytes: int, streams: Set[int], headed: bool) -> RecordRun | None:
        sequences, at = self._search(sequence, None)
        stop = bisect_left(sequences, end, at)
        if stop - at < _LEAST:
            return None
        left, found, newest, pieces, seen = most_bytes, -1, None, list[bytes](), set[int]()
        for number in islice(sequences, at, stop):
            record = self._log.records[number]
            left -= padded(HEAD_BYTES + len(record.headers) + len(record.body))
            if left < 0:
                break
            found = number
            if record.stream in streams:
                if record.headers and not headed:
                    return None
                newest = record
                seen.add(record.stream)
                pieces.append(encode(*record))
        return None if newest is None else RecordRun(pieces, seen, len(pieces), found, newest)

    def before(self, sequence: int, stream: int | None = None) -> int | None:
        sequences, at = self._search(sequence, stream)
        return sequences[at - 1] if at else None

    def first_at_time(self, time_ns: int) -> int:
        at = bisect_left(self._log.sequences, time_ns, key=lambda sequence: self._log.records[sequence].time_ns)
        return self._log.sequences[at] if at < len(self._log.sequences) else self._log.end.next

    def count(self, stream: int, sequence: int, end: int | None = None) -> tuple[int, int]:
        at, to = _range(self._posting(stream).sequences, sequence, end)
        sizes = self._posting(stream).sizes
        return to - at, sizes[to] - sizes[at]

    def streams(self) -> Set[int]:
        return set(self._log.streams)

    def stretch_end(self, sequence: int) -> int:
        return min(sequence + (self._log.end.next - sequence) // PORTIONS + 1, self._log.end.next)

    def split_points(self, sequence: int, end: int, streams: Set[int] | None, messages: int, size: int) -> list[Split]:
        sequences, at = self._search(sequence, None)
        found = (self._log.records[s] for s in sequences[at : bisect_left(sequences, end, at)])
        some = (record for record in found if streams is None or record.stream in streams)
        rows = ((r.sequence, padded(HEAD_BYTES + len(r.headers) + len(r.body))) for r in some)
        return of_sizes(rows, messages, size, limits.STRETCHES)

    def header_bytes(self, stream: int, sequence: int, end: int | None = None) -> int:
        sequences = self._posting(stream).sequences
        at, to = _range(sequences, sequence, end)
        return sum(len(self._log.records[s].headers) for s in sequences[at:to])

    def count_eof_markers(self, stream: int, sequence: int, end: int | None = None) -> int:
        at, to = _range(self._posting(stream).marks, sequence, end)
        return to - at

    def listing(self, floors: Mapping[int, int], end: int) -> Iterator[Listed]:
        mine: list[int] = []
        for stream, floor in floors.items():
            sequences, at = self._search(floor, stream)
            mine += sequences[at : bisect_left(sequences, end, at)]
        mine = sorted(s for s in mine if self._log.records[s].kind != Kind.END)
        yield Listed(
            len(mine), lambda newest: (mine[-newest:], [len(self._log.records[s].body) for s in mine[-newest:]])
        )

    def heads(self, sequence: int, most: int) -> list[Head]:
        sequences, at = self._search(sequence, None)
        found = (self._log.records[s] for s in sequences[at : at + most])
        return [Head(r.sequence, r.stream, r.kind, len(r.body), r.headers) for r in found]

    def search_headers(self, sequence: int, most: int, keys: Sequence[bytes]) -> tuple[list[int], int]:
        sequences, at = self._search(sequence, None)
        some, records = sequences[at : at + most], self._log.records
        search = re.compile(b"|".join(map(re.escape, keys))).search  # a quarter of the time of `any`
        found = [s for s in some if search(records[s].headers)]
        return found, some[-1] + 1 if some else self._log.end.next


_NOTHING = Posting()


def _range(sequences: Sequence[int], first: int, end: int | None) -> tuple[int, int]:
    """Return the indexes [at, to) of the sequences from `first` on and below `end` (None: to the end)."""
    at = bisect_left(sequences, first)
    return at, len(sequences) if end is None else bisect_left(sequences, end, at)


class MemoryAppender:
    """See `LogWriter` and `RangeWriter` in mqfs/store/api.py."""

    __slots__ = ("_end", "_log", "state")

    def __init__(self, log: MemoryLog) -> None:
        self._log, self._end = log, log.end
        self.state: Callable[[], bytes] = bytes  # until its group sets it

    def append_batch(self, drafts: Sequence[Draft], time_ns: int) -> int:
        if self._end.failed is not None:
            raise errors.ReadOnly(str(self._end.failed))
        messages = [draft for draft in drafts if draft.kind <= Kind.END]
        self._log.check_room(sum(padded(HEAD_BYTES + len(d.headers) + len(d.body)) for d in messages))
        sequences = [
            self.append(
                d.kind, d.stream, time_ns, d.body, d.headers, (MORE if n < len(drafts) - 1 else 0) | (INNER if n else 0)
            )
            for n, d in enumerate(drafts)
        ]
        return sequences[0]

    def append(self, kind: int, stream: int, time_ns: int, body: bytes, headers: bytes = b"", flags: int = 0) -> int:
        size = padded(HEAD_BYTES + len(headers) + len(body))
        if kind <= Kind.END:  # other kinds are never refused: they are few, and some give back room
            self._log.check_room(size)
        self._end.last_ns = time_ns = max(time_ns, self._end.last_ns)
        if kind > Kind.END:
            record = Record(self._end.next - 1, time_ns, stream, kind, flags, headers, body)
            self._log.add_change(record, size, self.state)
            return record.sequence
        sequence = self._end.next
        self._end.next += 1
        self._log.records[sequence] = Record(sequence, time_ns, stream, kind, flags, headers, body)
        self._log.sequences.append(sequence)
        posting = self._log.streams.get(stream)
        if posting is None:
            posting = self._log.streams[stream] = Posting()
        posting.sequences.append(sequence)  # as Posting.add, without its call: each write comes here
        posting.sizes.append(posting.sizes[-1] + len(body))
        if kind == Kind.END:
            posting.marks.append(sequence)
        self._log.size += size
        return sequence

    def skip(self) -> int:
        self._end.next += 1
        return self._end.next - 1

    def reserve_space(self, size: int, messages: int) -> int:
        self._log.check_room(size)
        return 0

    def hold_room(self, size: int) -> None:
        pass

    def append_range(self, data: Buffer, rows: RecordColumns) -> None:
        for n, position in enumerate(rows.positions):
            self._end.next = rows.sequences[n]
            begin = position + HEAD_BYTES
            body = begin + rows.headers[n]
            headers, text = bytes(data[begin:body]), bytes(data[body : body + rows.bodies[n]])
            self.append(rows.kinds[n], rows.streams[n], rows.times[n], text, headers, rows.flags[n])

    def quarantine(self, data: bytes, why: str) -> None:
        pass

    def skip_to(self, sequence: int) -> None:
        self._end.next = max(self._end.next, sequence)

    def continue_at(self, sequence: int) -> None:
        self._end.next = max(self._end.next, sequence)

    def on_sequences_reserved(self, granted: Callable[[int], None] | None) -> None:
        if granted is not None:
            granted((1 << 64) - 1)


class MemoryBucket:
    """See `Bucket` in mqfs/store/api.py."""

    __slots__ = ("end", "id", "metrics", "ranges", "reader", "upkeep", "writer")

    def __init__(self, number: int, state: bytes) -> None:
        self.id = number
        self.upkeep = log = MemoryLog(number, state)
        self.end = log.end
        self.reader = self.metrics = MemoryLogReader(log)
        self.writer = self.ranges = MemoryAppender(log)


# ------------------------------------------------------------ keep ring


class _CombinedEnd:
    """See `LogEnd` in mqfs/store/api.py."""

    __slots__ = ("_disk", "_memory")

    def __init__(self, memory: LogEnd, disk: LogEnd) -> None:
        self._memory, self._disk = memory, disk

    @property
    def next(self) -> int:
        return self._memory.next

    @property
    def last_ns(self) -> int:
        return max(self._memory.last_ns, self._disk.last_ns)

    @property
    def failed(self) -> OSError | None:
        return self._disk.failed


class _Writer:
    """See `LogWriter` and `RangeWriter` in mqfs/store/api.py."""

    __slots__ = ("_bound", "_disk", "_memory")

    def __init__(self, memory: MemoryBucket, disk: Bucket) -> None:
        self._memory, self._disk = memory, disk
        self._bound = 0
        self._reserve()

    def _reserve(self) -> None:
        bound = self._memory.end.next + limits.VOLATILE_SEQUENCES
        self._disk.ranges.reserve_space(0, limits.VOLATILE_SEQUENCES)
        self._bound = bound

    def _require_sequences(self, count: int) -> None:
        """Reserve `count` sequences on disk before the first is assigned: if the disk refuses, memory has nothing."""
        if self._memory.end.next + count > self._bound:
            self._reserve()

    def _in_step(self) -> None:
        """Pass the next sequence to the bucket on disk, which writes it at a clean stop."""
        self._disk.ranges.skip_to(self._memory.end.next)

    @property
    def state(self) -> Callable[[], bytes]:
        return self._disk.writer.state

    @state.setter
    def state(self, state: Callable[[], bytes]) -> None:
        self._disk.writer.state = state

    def append(self, kind: int, stream: int, time_ns: int, body: bytes, headers: bytes = b"") -> int:
        if kind == Kind.ACK:
            return self._memory.end.next - 1  # the consumer keeps it
        if kind > Kind.END:
            return self._disk.writer.append(kind, stream, time_ns, body, headers)
        self._require_sequences(1)
        sequence = self._memory.writer.append(kind, stream, time_ns, body, headers)
        self._in_step()
        return sequence

    def append_batch(self, drafts: Sequence[Draft], time_ns: int) -> int:
        messages = [draft for draft in drafts if draft.kind <= Kind.END]
        durable = [draft for draft in drafts if draft.kind > Kind.END and draft.kind != Kind.ACK]
        self._require_sequences(len(messages))
        if durable:
            # Check memory first, then append to the disk, which may refuse: nothing of a refused batch is readable.
            need = sum(padded(HEAD_BYTES + len(d.headers) + len(d.body)) for d in messages)
            self._memory.ranges.reserve_space(need, 0)
            self._disk.writer.append_batch(durable, time_ns)
        if not messages:
            return self._memory.end.next - 1
        sequence = self._memory.writer.append_batch(messages, time_ns)
        self._in_step()
        return sequence

    def skip(self) -> int:
        self._require_sequences(1)
        sequence = self._memory.writer.skip()
        self._in_step()
        return sequence

    # ------------------------------------------------------------ records that others encoded and numbered

    def reserve_space(self, size: int, messages: int) -> int:
        self._require_sequences(messages)
        return self._memory.ranges.reserve_space(size, messages)

    def hold_room(self, size: int) -> None:
        pass  # the messages use no disk

    def append_range(self, data: Buffer, rows: RecordColumns) -> None:
        self._memory.ranges.append_range(data, rows)
        self._in_step()

    def skip_to(self, sequence: int) -> None:
        self._memory.ranges.skip_to(sequence)
        self._in_step()

    def continue_at(self, sequence: int) -> None:
        if sequence <= self._bound:  # no ring was granted a later one
            self.skip_to(sequence)

    def on_sequences_reserved(self, granted: Callable[[int], None] | None) -> None:
        self._memory.ranges.on_sequences_reserved(granted)

    def quarantine(self, data: bytes, why: str) -> None:
        self._disk.ranges.quarantine(data, why)


class _Upkeep:
    """See `LogUpkeep` in mqfs/store/api.py."""

    __slots__ = ("_disk", "_memory", "close", "fail", "history", "lost", "on_rolled", "replicate", "sync")

    def __init__(self, memory: LogUpkeep, disk: LogUpkeep) -> None:
        self._memory, self._disk = memory, disk
        self.history, self.sync, self.fail, self.close = disk.history, disk.sync, disk.fail, disk.close
        self.lost, self.replicate, self.on_rolled = disk.lost, disk.replicate, disk.on_rolled

    @property
    def damaged(self) -> int:
        return self._disk.damaged

    @property
    def size(self) -> int:
        return self._memory.size

    @property
    def lag(self) -> tuple[int, float] | None:
        return self._disk.lag

    @property
    def is_final(self) -> bool:
        return True

    def trim(self, floors: Mapping[int, int], dropped: Set[int], wanted: Wanted | None = None) -> Iterator[None]:
        for _ in self._disk.trim({}, frozenset()):  # at once: mostly there is nothing
            pass
        return self._memory.trim(floors, dropped, wanted)


class MemoryOnlyLog:
    """See `Bucket` in mqfs/store/api.py. Messages are read from memory alone."""

    __slots__ = ("end", "id", "metrics", "ranges", "reader", "upkeep", "writer")

    def __init__(self, disk: Bucket) -> None:
        memory = MemoryBucket(disk.id, b"")
        memory.end.next = disk.end.next
        self.id = disk.id
        self.end = _CombinedEnd(memory.end, disk.end)
        self.reader, self.metrics = memory.reader, memory.metrics
        self.writer = self.ranges = _Writer(memory, disk)
        self.upkeep = _Upkeep(memory.upkeep, disk.upkeep)


# ------------------------------------------------------------ store


class MemoryStore:
    """See `Store` in mqfs/store/api.py."""

    path = ""
    replication = None

    def __init__(self) -> None:
        self.uuid = str(uuid.uuid4())
        self.sync_times = Histogram()  # it stays empty
        self.full: dict[int, int] = {}  # this, too
        self._buckets: dict[int, MemoryBucket] = {}
        self._numbers = 0

    def groups(self) -> Sequence[int]:
        return sorted(self._buckets)

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def make(self, number: int, state: bytes) -> MemoryBucket:
        bucket = self._buckets[number] = MemoryBucket(number, state)
        return bucket

    def make_soon(self, number: int, state: bytes) -> MemoryBucket:
        return self.make(number, state)

    def open(self, number: int) -> MemoryBucket:
        bucket = self._buckets.get(number)
        if bucket is None:
            raise errors.NotFound(f"no bucket of group {number}")
        return bucket

    def heads(self, number: int) -> Iterable[bytes]:
        return ()

    def in_memory(self, bucket: Bucket) -> Bucket:
        return MemoryOnlyLog(bucket)

    def remove(self, number: int, then: Committed | None = None) -> None:
        if self._buckets.pop(number, None) is None:
            raise errors.NotFound(f"no bucket of group {number}")
        if then is not None:
            then(None)

    def stage(self, number: int) -> MemoryStaged:
        return MemoryStaged()

    def tick(self) -> None:
        pass

    def close(self) -> None:
        pass


class MemoryStaged:
    """See `SpoolFile` in mqfs/store/api.py."""

    def __init__(self) -> None:
        self._data = bytearray()

    @property
    def size(self) -> int:
        return len(self._data)

    def append(self, data: bytes) -> None:
        self._data += data

    def read(self, at: int, count: int) -> bytes:
        return bytes(self._data[at : at + count])

    def close(self) -> None:
        self._data.clear()
