"""A store that is gone with its process: for tests, and for servers that keep nothing.

Owns the same semantics as the disk store, bounded by limits.MEMORY_BYTES a group; never touches a file.
"""

from __future__ import annotations

import uuid
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import cast

from mqfs import errors, limits
from mqfs.log.record import HEAD_BYTES, INNER, padded
from mqfs.model import MORE, Buffer, Columns, Draft, Kind, Listed, Record, RecordRun, Split
from mqfs.seams import Bucket, Committed, Log
from mqfs.store.log_reader import PORTIONS
from mqfs.store.split_points import of_sizes
from mqfs.store.spool import MemoryStaged

_CHANGED_BYTES = (
    64 << 10
)  # kept behind the state before a new one is taken; of a large state, as many as a quarter of it


class MemoryBucket:
    """See `Bucket` in mqfs/seams.py."""

    def __init__(self, number: int, state: bytes) -> None:
        self.id = number
        self.next = 1
        self.last_ns = 0
        self.size = 0
        self.failed: OSError | None = None
        self.damaged = 0
        self.state: Callable[[], bytes] = lambda: self._state
        self._state = state
        self._changes: list[Record] = []
        self._changed = 0  # bytes of the changes
        self._records: dict[int, Record] = {}
        self._sequences: list[int] = []  # of all messages, in order
        self._streams: dict[int, array[int]] = {}  # of each stream's

    @property
    def first(self) -> int:
        return self._sequences[0] if self._sequences else self.next

    def fail(self, error: OSError) -> None:
        self.failed = self.failed or error

    def history(self) -> tuple[bytes, Iterable[Record]]:
        return self._state, list(self._changes)

    def append(self, kind: int, stream: int, time_ns: int, body: bytes, headers: bytes = b"") -> int:
        return self._add(kind, stream, time_ns, body, headers, 0)

    def append_unit(self, drafts: Sequence[Draft], time_ns: int) -> int:
        if self.failed is not None:
            raise errors.ReadOnly(str(self.failed))
        messages = [draft for draft in drafts if draft.kind <= Kind.END]
        self._check_room(sum(padded(HEAD_BYTES + len(d.headers) + len(d.body)) for d in messages))
        sequences = [
            self._add(
                d.kind, d.stream, time_ns, d.body, d.headers, (MORE if n < len(drafts) - 1 else 0) | (INNER if n else 0)
            )
            for n, d in enumerate(drafts)
        ]
        return sequences[0]

    def _check_room(self, need: int) -> None:
        if self.size + need > limits.MEMORY_BYTES:
            raise errors.DiskFull(f"group {self.id} may have {limits.MEMORY_BYTES} bytes in memory")

    def _add(self, kind: int, stream: int, time_ns: int, body: bytes, headers: bytes, flags: int) -> int:
        size = padded(HEAD_BYTES + len(headers) + len(body))
        if kind > Kind.END:
            # Not refused where there is no room: what gives room is among them, and they are few.
            self.last_ns = time_ns = max(time_ns, self.last_ns)
            record = Record(self.next - 1, time_ns, stream, kind, flags, headers, body)
            self._take_change(record, size)
            return record.sequence
        self._check_room(size)
        self.last_ns = time_ns = max(time_ns, self.last_ns)
        sequence = self.next
        self.next += 1
        self._records[sequence] = Record(sequence, time_ns, stream, kind, flags, headers, body)
        self._sequences.append(sequence)
        posting = self._streams.get(stream)
        if posting is None:
            posting = self._streams[stream] = array("Q")
        posting.append(sequence)
        self.size += size
        return sequence

    def _take_change(self, record: Record, size: int) -> None:
        if record.kind == Kind.STATE:
            self._renew(record.body)
            return
        if self._changed >= max(_CHANGED_BYTES, len(self._state) // 4):
            self._renew(self.state())
        self._changes.append(record)
        self._changed += size
        self.size += size

    def _renew(self, state: bytes) -> None:
        self._state = state
        self.size -= self._changed
        self._changed = 0
        self._changes.clear()

    def skip(self) -> int:
        self.next += 1
        return self.next - 1

    def reserve_space(self, size: int, messages: int) -> int:
        self._check_room(size)
        return 0

    def append_range(self, data: Buffer, rows: Columns) -> None:
        for n, position in enumerate(rows.positions):
            self.next = rows.sequences[n]
            begin = position + HEAD_BYTES
            body = begin + rows.headers[n]
            headers, text = bytes(data[begin:body]), bytes(data[body : body + rows.bodies[n]])
            self._add(rows.kinds[n], rows.streams[n], rows.times[n], text, headers, rows.flags[n])

    def quarantine(self, data: bytes, why: str) -> None:
        pass

    def skip_to(self, sequence: int) -> None:
        self.next = max(self.next, sequence)

    def continue_at(self, sequence: int) -> None:
        self.next = max(self.next, sequence)

    def on_sequences_reserved(self, granted: Callable[[int], None] | None) -> None:
        if granted is not None:
            granted((1 << 64) - 1)

    def _search(self, sequence: int, stream: int | None) -> tuple[Sequence[int], int]:
        sequences: Sequence[int] = self._sequences if stream is None else self._streams.get(stream, ())
        return sequences, bisect_left(sequences, sequence)

    def find(self, stream: int, sequence: int) -> Record | None:
        sequences, at = self._search(sequence, stream)
        return self._records[sequences[at]] if at < len(sequences) else None

    def scan(self, sequence: int) -> Record | None:
        sequences, at = self._search(sequence, None)
        return self._records[sequences[at]] if at < len(sequences) else None

    def locate(self, stream: int, sequence: int) -> tuple[int, int] | None:
        record = self.find(stream, sequence)
        return None if record is None else (record.sequence, len(record.body))

    def read_run(self, sequence: int, end: int, most_bytes: int, streams: Set[int], headed: bool) -> RecordRun | None:
        return None

    def before(self, sequence: int, stream: int | None = None) -> int | None:
        sequences, at = self._search(sequence, stream)
        return sequences[at - 1] if at else None

    def first_at_time(self, time_ns: int) -> int:
        at = bisect_left(self._sequences, time_ns, key=lambda sequence: self._records[sequence].time_ns)
        return self._sequences[at] if at < len(self._sequences) else self.next

    def count(self, stream: int, sequence: int, end: int | None = None) -> tuple[int, int]:
        sequences, at = self._search(sequence, stream)
        to = len(sequences) if end is None else max(at, bisect_left(sequences, end))
        return to - at, sum(len(self._records[s].body) for s in sequences[at:to])

    def stretch_end(self, sequence: int) -> int:
        return min(sequence + (self.next - sequence) // PORTIONS + 1, self.next)

    def split_points(self, sequence: int, end: int, streams: Set[int] | None, messages: int, size: int) -> list[Split]:
        sequences, at = self._search(sequence, None)
        found = (self._records[s] for s in sequences[at : bisect_left(sequences, end, at)])
        rows = (
            (r.sequence, padded(HEAD_BYTES + len(r.headers) + len(r.body)))
            for r in found
            if streams is None or r.stream in streams
        )
        return of_sizes(rows, messages, size, limits.STRETCHES)

    def count_eof_markers(self, stream: int, sequence: int, end: int | None = None) -> int:
        sequences, at = self._search(sequence, stream)
        to = len(sequences) if end is None else max(at, bisect_left(sequences, end))
        return sum(self._records[s].kind == Kind.END for s in sequences[at:to])

    def listing(self, floors: Mapping[int, int], end: int) -> Iterator[Listed]:
        mine: list[int] = []
        for stream, floor in floors.items():
            sequences, at = self._search(floor, stream)
            mine += sequences[at : bisect_left(sequences, end, at)]
        mine = sorted(s for s in mine if self._records[s].kind != Kind.END)
        yield Listed(len(mine), lambda newest: (mine[-newest:], [len(self._records[s].body) for s in mine[-newest:]]))

    def with_headers(self, sequence: int, stream: int | None = None) -> Iterator[int]:
        sequences, at = self._search(sequence, stream)
        return iter([s for s in sequences[at:] if self._records[s].headers])

    def trim(self, floors: Mapping[int, int], dropped: Set[int]) -> None:
        gone = 0
        for stream in list(self._streams):
            floor = floors.get(stream)
            posting = self._streams[stream]
            count = len(posting) if floor is None else bisect_left(posting, floor)
            if count:
                gone += self._forget(posting[:count])
                del posting[:count]
            if not posting:
                del self._streams[stream]
        gone += self._drop(dropped)
        if gone:
            self._sequences = [s for s in self._sequences if s in self._records]

    def _drop(self, dropped: Set[int]) -> int:
        """Messages dropped one by one."""
        gone = [s for s in dropped if s in self._records]
        for stream in {self._records[s].stream for s in gone}:
            self._streams[stream] = array("Q", [s for s in self._streams[stream] if s not in dropped])
        return self._forget(gone)

    def _forget(self, sequences: Sequence[int]) -> int:
        for sequence in sequences:
            record = self._records.pop(sequence)
            self.size -= padded(HEAD_BYTES + len(record.headers) + len(record.body))
        return len(sequences)

    def sync(self, then: Committed | None = None, within_s: float = 0.0) -> None:
        if then is not None:
            then(None)

    def close(self) -> None:
        pass


class MemoryStore:
    """See `Store` in mqfs/seams.py."""

    path = ""

    def __init__(self) -> None:
        self.uuid = str(uuid.uuid4())
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

    def open(self, number: int) -> MemoryBucket:
        bucket = self._buckets.get(number)
        if bucket is None:
            raise errors.NotFound(f"group {number} has no bucket")
        return bucket

    def in_memory(self, bucket: Bucket) -> Bucket:
        from mqfs.store.memory_only import MemoryOnlyLog  # it is made of what is here

        return MemoryOnlyLog(cast(Log, bucket))

    def remove(self, number: int) -> None:
        if self._buckets.pop(number, None) is None:
            raise errors.NotFound(f"group {number} has no bucket")

    def stage(self, number: int) -> MemoryStaged:
        return MemoryStaged()

    def tick(self) -> None:
        pass

    def close(self) -> None:
        pass
