"""The reading half of a bucket: its segments as one log, in the order of their sequences.

Owns finding, the history, and what is done with a record that fails its check. Never writes to a log.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Protocol

from mqfs import errors, limits
from mqfs.log.record import HEAD_BYTES, INNER, Row, decode
from mqfs.model import Kind, Listed, Record, RecordRun, Split
from mqfs.store import bulk_read
from mqfs.store.commit_thread import SyncScheduler
from mqfs.store.disk import Disk
from mqfs.store.listing import listed, pick
from mqfs.store.segment.file import Files, Segment
from mqfs.store.segment.index import Index, Plain, seek, seek_before, with_headers
from mqfs.store.split_points import SplitPlanner, chosen

log = logging.getLogger("mqfs.store")

_RESERVE = b'{"reserve":'
_GAP = 4_096  # bytes of messages between two other records that are rather read than passed over
_PIECE = 1 << 20  # of one read
_END = bytes([Kind.END])
PORTIONS = 16  # into which a log without sealed segments is cut


class StoreContext(Protocol):
    """What a bucket needs of its store."""

    disk: Disk
    files: Files
    committer: SyncScheduler
    staging: str

    def quarantine(self, group: int, first: int, position: int, data: bytes, why: str) -> None: ...

    def move_aside(self, group: int, first: int, path: str, why: str) -> None: ...

    def close_later(self, fd: int) -> None: ...


def reserve_body(bound: int) -> bytes:
    return b'{"reserve":%d}' % bound


def reserved_by(body: bytes) -> int:
    """The bound that a CHANGE record's body reserves; 0 if it is another change."""
    return int(json.loads(body)["reserve"]) if body.startswith(_RESERVE) else 0


def _end(row: Plain) -> int:
    """Where its record ends, without the padding."""
    return row[1] + HEAD_BYTES + row[4] + row[2]


class DiskLogReader:
    """What a bucket is to its readers."""

    def __init__(self, home: StoreContext, number: int, folder: str) -> None:
        self.id = number
        self.next = 1
        self.last_ns = 0
        self.failed: OSError | None = None
        self.damaged = 0
        self._home, self._disk, self._folder = home, home.disk, folder
        self._pread = home.disk.pread
        self._segments: list[Segment] = []
        self._firsts: list[int] = []  # of the segments
        self._open: Segment | None = None  # the one that is appended to
        self._sealed_bytes = 0
        self._first: int | None = None

    def _segment(self, first: int) -> Segment:
        home = self._home
        return Segment(home.disk, home.files, self._folder, home.staging, self.id, first, self._aside)

    def _aside(self, segment: Segment, position: int, data: bytes, why: str) -> None:
        if why != "a torn tail":
            self.damaged += 1
        if not data:
            log.error("group %d: segment %d: %s at %d", self.id, segment.first, why, position)
            return
        self._home.quarantine(self.id, segment.first, position, data, why)

    def _row(self, segment: Segment, row: Row) -> Record | None:
        data = segment.read(row.position, row.size)
        record = decode(data)
        if record is None:
            segment.report_corruption(row.position, data)
        return record

    # ------------------------------------------------------------ history

    def history(self) -> tuple[bytes, Iterable[Record]]:
        """The newest state that passes and what is behind it."""
        stretches: list[tuple[Segment, int]] = []
        for segment in reversed(self._segments):
            state, begin = self._newest_state(segment)
            stretches.append((segment, begin))
            if state is not None:
                return state, self._behind(stretches[::-1])
        raise errors.DiskFailed(f"no state of group {self.id} is whole; see quarantine/")

    def _newest_state(self, segment: Segment) -> tuple[bytes | None, int]:
        """Of those in it, and the number of the record behind it; None and 0 if no one there is whole."""
        rows = segment.rows()
        numbers = rows.of_kind(Kind.STATE)
        while numbers:
            unit = [numbers.pop()]
            while rows[unit[0]].flags & INNER and numbers and numbers[-1] == unit[0] - 1:
                unit.insert(0, numbers.pop())
            records = [self._row(segment, rows[number]) for number in unit]
            parts = [record.body for record in records if record is not None]
            if len(parts) == len(unit):
                return b"".join(parts), unit[-1] + 1
        return None, 0

    def _behind(self, stretches: list[tuple[Segment, int]]) -> Iterator[Record]:
        """The records of each segment from that number on, without states and our own."""
        change, state = int(Kind.CHANGE), int(Kind.STATE)
        for segment, begin in stretches:
            for portion in segment.rows().portions(begin):
                for record in self._read_rows(segment, [row for row in portion if row[5] != state]):
                    if record.kind != change or not record.body.startswith(_RESERVE):
                        yield record
            if segment.index is None:
                segment.drop_index_cache()  # nobody reads or writes it yet

    def _read_rows(self, segment: Segment, rows: list[Plain]) -> Iterator[Record]:
        """Those records, by large reads; one that does not pass is read again by itself. Raises DiskFailed."""
        at = 0
        while at < len(rows):
            begin, stop, to = rows[at][1], _end(rows[at]), at + 1
            while to < len(rows) and rows[to][1] - stop <= _GAP and _end(rows[to]) - begin <= _PIECE:
                stop, to = _end(rows[to]), to + 1
            data = segment.read(begin, stop - begin)
            for sequence, position, body, stream, headers, kind, flags in rows[at:to]:
                record = decode(data[position - begin : position - begin + HEAD_BYTES + headers + body])
                if record is None:
                    record = self._row(segment, Row(sequence, 0, position, body, stream, headers, kind, flags))
                if record is not None:
                    yield record
            at = to

    # ------------------------------------------------------------ finding

    def _where(self, stream: int | None, sequence: int) -> tuple[Segment, Index, int] | None:
        """The first message (of that stream) at or after `sequence`."""
        segments = self._segments
        last = len(segments) - 1
        at = last if sequence >= self._firsts[-1] else max(0, bisect_right(self._firsts, sequence) - 1)
        while at <= last:
            segment = segments[at]
            index = segment.index
            if index is None:
                index = segment.load()
            ordinal = seek(index, stream, sequence)
            if ordinal >= 0 and (at == last or index.sequences[ordinal] < self._firsts[at + 1]):
                return segment, index, ordinal
            at += 1
        return None

    def _get(self, segment: Segment, index: Index, ordinal: int) -> Record:
        position = index.positions[ordinal]
        sequence = index.sequences[ordinal]
        size = 32 + index.headers[ordinal] + index.bodies[ordinal]
        segment.recent = True
        try:
            data = self._pread(segment.fd if segment.fd >= 0 else segment.open(), size, position)
        except OSError as error:  # the disk may be well again: no reader goes on behind it
            raise errors.DiskFailed(f"record {sequence} cannot be read: {error.strerror}") from error
        record = decode(data)
        if record is None or record.sequence != sequence or record.stream != index.streams[ordinal]:
            segment.report_corruption(position, data)
            raise errors.Damaged(sequence)
        return record

    def find(self, stream: int, sequence: int) -> Record | None:
        place = self._where(stream, sequence)
        return None if place is None else self._get(*place)

    def scan(self, sequence: int) -> Record | None:
        place = self._where(None, sequence)
        return None if place is None else self._get(*place)

    def read_run(self, sequence: int, end: int, most_bytes: int, streams: Set[int], headed: bool) -> RecordRun | None:
        place = self._where(None, sequence)
        if place is None:
            return None
        segment, index, ordinal = place
        end = min(end, self._end_of(bisect_right(self._firsts, index.sequences[ordinal]) - 1))
        return bulk_read.read_run(segment, index, ordinal, end, most_bytes, streams, headed)

    def locate(self, stream: int, sequence: int) -> tuple[int, int] | None:
        place = self._where(stream, sequence)
        if place is None:
            return None
        _, index, ordinal = place
        return index.sequences[ordinal], index.bodies[ordinal]

    def before(self, sequence: int, stream: int | None = None) -> int | None:
        at = min(len(self._segments), bisect_right(self._firsts, sequence))
        while at > 0:
            at -= 1
            if at + 1 < len(self._firsts):
                sequence = min(sequence, self._firsts[at + 1])
            index = self._segments[at].load()
            ordinal = seek_before(index, stream, sequence)
            if ordinal >= 0:
                return index.sequences[ordinal]
        return None

    def first_at_time(self, time_ns: int) -> int:
        count = len(self._segments)
        for number in range(bisect_left(range(count), time_ns, key=self._last_time), count):
            index = self._segments[number].load()
            ordinal = bisect_left(index.times, time_ns)
            if ordinal < len(index.times):
                sequence = index.sequences[ordinal]
                if number + 1 == count or sequence < self._firsts[number + 1]:
                    return sequence
        return self.next

    def _last_time(self, number: int) -> int:
        """The time of the last message up to that segment."""
        while number >= 0:
            times = self._segments[number].load().times
            if len(times):
                return times[-1]
            number -= 1
        return -(1 << 63)

    def count(self, stream: int, sequence: int, end: int | None = None) -> tuple[int, int]:
        messages = size = 0
        for index, ordinals in self._range(stream, sequence, end):
            messages += len(ordinals)
            size += sum(pick(index.bodies, ordinals))
        return messages, size

    def count_eof_markers(self, stream: int, sequence: int, end: int | None = None) -> int:
        marks = 0
        for index, ordinals in self._range(stream, sequence, end):
            marks += bytes(pick(index.kinds, ordinals)).count(_END)
        return marks

    def _range(self, stream: int, sequence: int, end: int | None) -> Iterator[tuple[Index, Sequence[int]]]:
        """Where the messages of the stream in [sequence, end) are: of each segment, their ordinals."""
        end = self.next if end is None else end
        at = max(0, bisect_right(self._firsts, sequence) - 1)
        for number in range(at, len(self._segments)):
            if self._firsts[number] >= end:
                break
            stop = min(end, self._end_of(number))
            index = self._segments[number].load()
            posting = index.posting(stream)
            begin = bisect_left(posting, bisect_left(index.sequences, sequence))
            to = bisect_left(posting, bisect_left(index.sequences, stop), begin)
            yield index, posting[begin:to]

    def listing(self, floors: Mapping[int, int], end: int) -> Iterator[Listed]:
        lowest = min(floors.values(), default=end)
        for number in reversed(range(min(len(self._segments), bisect_right(self._firsts, end)))):
            begin, stop = self._firsts[number], self._end_of(number)
            if stop <= lowest:
                return
            yield listed(self._segments[number].load(), floors, begin, min(end, stop))

    def stretch_end(self, sequence: int) -> int:
        at = max(0, bisect_right(self._firsts, sequence) - 1)
        if at + 1 < len(self._firsts):
            return self._end_of(at)
        return min(sequence + (self.next - sequence) // PORTIONS + 1, self.next)

    def split_points(self, sequence: int, end: int, streams: Set[int] | None, messages: int, size: int) -> list[Split]:
        cutter = SplitPlanner(messages, size, limits.STRETCHES)
        at = max(0, bisect_right(self._firsts, sequence) - 1)
        for number in range(at, min(len(self._segments), at + limits.STRETCH_SEGMENTS)):
            if self._firsts[number] >= end or cutter.full:
                break
            index = self._segments[number].load()
            begin = bisect_left(index.sequences, sequence)
            stop = bisect_left(index.sequences, min(end, self._end_of(number)), begin)
            cutter.take(index, chosen(index, begin, stop, streams), begin, stop)
        cutter.close()
        return cutter.found[: limits.STRETCHES]

    def _end_of(self, number: int) -> int:
        """Where the responsibility of a segment ends."""
        return self._firsts[number + 1] if number + 1 < len(self._firsts) else self.next

    def with_headers(self, sequence: int, stream: int | None = None) -> Iterator[int]:
        at = max(0, bisect_right(self._firsts, sequence) - 1)
        while True:
            newest = at + 1 == len(self._segments)
            index, end = self._segments[at].load(), self._end_of(at)
            yield from with_headers(index, stream, sequence, end)
            if newest:
                return
            sequence = max(sequence, end)
            at = max(0, bisect_right(self._firsts, sequence) - 1)  # segments may have come and gone meanwhile

    @property
    def first(self) -> int:
        if self._first is None:
            self._first = self._find_first()
        return self.next if self._first is None else self._first

    def _find_first(self) -> int | None:
        for segment in self._segments:
            segment.look()
            messages, first, _ = segment.counts()
            if messages:
                return first
        return None

    @property
    def size(self) -> int:
        return self._sealed_bytes + (self._open.used if self._open is not None else 0)
