"""The reading half of a bucket: its segments as one log, in the order of their sequences.

Owns finding, the history, and what is done with a record that fails its check. Never writes to a log.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Protocol

from mqfs import errors
from mqfs.record import INNER, Row, decode
from mqfs.store.committer import Committer
from mqfs.store.disk import Disk
from mqfs.store.index import Index, seek, seek_before, with_headers
from mqfs.store.segment import Files, Segment
from mqfs.types import Kind, Record

_RESERVE = b'{"reserve":'


class Home(Protocol):
    """What a bucket needs of its store."""

    disk: Disk
    files: Files
    committer: Committer
    staging: str

    def set_aside(self, group: int, first: int, position: int, data: bytes, why: str) -> None: ...

    def move_aside(self, group: int, first: int, path: str, why: str) -> None: ...


def reserve_body(bound: int) -> bytes:
    return b'{"reserve":%d}' % bound


def reserved_by(body: bytes) -> int:
    """The bound that a CHANGE record's body reserves; 0 if it is another change."""
    return int(json.loads(body)["reserve"]) if body.startswith(_RESERVE) else 0


class Reading:
    """What a bucket is to its readers."""

    def __init__(self, home: Home, number: int, folder: str) -> None:
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
        self._home.set_aside(self.id, segment.first, position, data, why)

    def _row(self, segment: Segment, row: Row) -> Record | None:
        data = segment.read(row.position, row.size)
        record = decode(data)
        if record is None:
            segment.rot(row.position, data)
        return record

    # ------------------------------------------------------------ history

    def history(self) -> tuple[bytes, Sequence[Record]]:
        """The newest state that passes and what is behind it."""
        behind: list[Record] = []
        for segment in reversed(self._segments):
            state, records = self._history_of(segment)
            behind = records + behind
            if state is not None:
                return state, behind
        raise errors.DiskFailed(f"no state of group {self.id} is whole; see quarantine/")

    def _history_of(self, segment: Segment) -> tuple[bytes | None, list[Record]]:
        state: bytes | None = None
        parts: list[bytes] | None = []
        records: list[Record] = []
        for row in segment.rows():
            record = self._row(segment, row)
            if row.kind == Kind.STATE:
                if not row.flags & INNER:
                    parts = []
                parts = None if record is None or parts is None else [*parts, record.body]
                continue
            if parts:
                state, parts, records = b"".join(parts), [], []
            elif parts is None:
                parts = []
            if record is not None and not (row.kind == Kind.CHANGE and reserved_by(record.body)):
                records.append(record)
        return state, records

    # ------------------------------------------------------------ finding

    def _where(self, stream: int | None, sequence: int) -> tuple[Segment, Index, int] | None:
        """The first message (of that stream) at or after `sequence`."""
        segments = self._segments
        last = len(segments) - 1
        at = last if sequence >= self._firsts[-1] else max(0, bisect_right(self._firsts, sequence) - 1)
        while at <= last:
            segment = segments[at]
            index = segment.index or segment.load()
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
        except OSError as error:
            raise errors.Damaged(sequence, f"record {sequence} cannot be read: {error.strerror}") from error
        record = decode(data)
        if record is None or record.sequence != sequence or record.stream != index.streams[ordinal]:
            segment.rot(position, data)
            raise errors.Damaged(sequence)
        return record

    def find(self, stream: int, sequence: int) -> Record | None:
        place = self._where(stream, sequence)
        return None if place is None else self._get(*place)

    def scan(self, sequence: int) -> Record | None:
        place = self._where(None, sequence)
        return None if place is None else self._get(*place)

    def peek(self, stream: int, sequence: int) -> tuple[int, int] | None:
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

    def at(self, time_ns: int) -> int:
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

    def tally(self, stream: int, sequence: int, end: int | None = None) -> tuple[int, int]:
        messages = size = 0
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
            messages += to - begin
            bodies = index.bodies
            size += sum([bodies[ordinal] for ordinal in posting[begin:to]])
        return messages, size

    def _end_of(self, number: int) -> int:
        """Where the responsibility of a segment ends."""
        return self._firsts[number + 1] if number + 1 < len(self._firsts) else self.next

    def headed(self, sequence: int, stream: int | None = None) -> Iterator[int]:
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
            segment.rows()
            messages, first, _ = segment.counts()
            if messages:
                return first
        return None

    @property
    def size(self) -> int:
        return self._sealed_bytes + (self._open.used if self._open is not None else 0)
