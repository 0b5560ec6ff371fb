"""Reading a log: its segments as one, in the order of their sequences.

Owns finding, counting, and the check of each record. Never writes to a log.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence, Set

from mqfs import errors, limits
from mqfs.log.record import decode
from mqfs.model import Kind, Listed, Record, RecordRun, Split
from mqfs.store import bulk_read
from mqfs.store.chain import Chain
from mqfs.store.listing import listed, pick
from mqfs.store.segment.file import Segment
from mqfs.store.segment.index import Index, seek, seek_before, with_headers
from mqfs.store.split_points import PORTIONS, SplitPlanner, chosen

_END = bytes([Kind.END])


class DiskLogReader:
    """See `LogReader` and `LogMetrics` in mqfs/seams.py."""

    __slots__ = ("_chain", "_pread")

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._pread = chain.disk.pread

    def _where(self, stream: int | None, sequence: int) -> tuple[Segment, Index, int] | None:
        """The first message (of that stream) at or after `sequence`."""
        segments, firsts = self._chain.segments, self._chain.firsts
        last = len(segments) - 1
        at = last if sequence >= firsts[-1] else max(0, bisect_right(firsts, sequence) - 1)
        while at <= last:
            segment = segments[at]
            index = segment.index
            if index is None:
                index = segment.load()
            ordinal = seek(index, stream, sequence)
            if ordinal >= 0 and (at == last or index.sequences[ordinal] < firsts[at + 1]):
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
        except OSError as error:  # the disk may recover: no reader may continue behind it
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
        end = min(end, self._chain.end_of(bisect_right(self._chain.firsts, index.sequences[ordinal]) - 1))
        return bulk_read.read_run(segment, index, ordinal, end, most_bytes, streams, headed)

    def locate(self, stream: int, sequence: int) -> tuple[int, int] | None:
        place = self._where(stream, sequence)
        if place is None:
            return None
        _, index, ordinal = place
        return index.sequences[ordinal], index.bodies[ordinal]

    def before(self, sequence: int, stream: int | None = None) -> int | None:
        segments, firsts = self._chain.segments, self._chain.firsts
        at = min(len(segments), bisect_right(firsts, sequence))
        while at > 0:
            at -= 1
            if at + 1 < len(firsts):
                sequence = min(sequence, firsts[at + 1])
            index = segments[at].load()
            ordinal = seek_before(index, stream, sequence)
            if ordinal >= 0:
                return index.sequences[ordinal]
        return None

    def first_at_time(self, time_ns: int) -> int:
        count = len(self._chain.segments)
        for number in range(bisect_left(range(count), time_ns, key=self._last_time), count):
            index = self._chain.segments[number].load()
            ordinal = bisect_left(index.times, time_ns)
            if ordinal < len(index.times):
                sequence = index.sequences[ordinal]
                if number + 1 == count or sequence < self._chain.firsts[number + 1]:
                    return sequence
        return self._chain.end.next

    def _last_time(self, number: int) -> int:
        """The time of the last message up to that segment."""
        while number >= 0:
            times = self._chain.segments[number].load().times
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

    def header_bytes(self, stream: int, sequence: int, end: int | None = None) -> int:
        return sum(sum(pick(index.headers, ordinals)) for index, ordinals in self._range(stream, sequence, end))

    def count_eof_markers(self, stream: int, sequence: int, end: int | None = None) -> int:
        marks = 0
        for index, ordinals in self._range(stream, sequence, end):
            marks += bytes(pick(index.kinds, ordinals)).count(_END)
        return marks

    def _range(self, stream: int, sequence: int, end: int | None) -> Iterator[tuple[Index, Sequence[int]]]:
        """Where the messages of the stream in [sequence, end) are: of each segment, their ordinals."""
        end = self._chain.end.next if end is None else end
        at = self._chain.number_of(sequence)
        for number in range(at, len(self._chain.segments)):
            if self._chain.firsts[number] >= end:
                break
            stop = min(end, self._chain.end_of(number))
            index = self._chain.segments[number].load()
            posting = index.posting(stream)
            begin = bisect_left(posting, bisect_left(index.sequences, sequence))
            to = bisect_left(posting, bisect_left(index.sequences, stop), begin)
            yield index, posting[begin:to]

    def listing(self, floors: Mapping[int, int], end: int) -> Iterator[Listed]:
        lowest = min(floors.values(), default=end)
        for number in reversed(range(min(len(self._chain.segments), bisect_right(self._chain.firsts, end)))):
            begin, stop = self._chain.firsts[number], self._chain.end_of(number)
            if stop <= lowest:
                return
            yield listed(self._chain.segments[number].load(), floors, begin, min(end, stop))

    def streams(self) -> Set[int]:
        return {number for segment in self._chain.segments for number in segment.load().present()}

    def stretch_end(self, sequence: int) -> int:
        at = self._chain.number_of(sequence)
        if at + 1 < len(self._chain.firsts):
            return self._chain.end_of(at)
        return min(sequence + (self._chain.end.next - sequence) // PORTIONS + 1, self._chain.end.next)

    def split_points(self, sequence: int, end: int, streams: Set[int] | None, messages: int, size: int) -> list[Split]:
        cutter = SplitPlanner(messages, size, limits.STRETCHES)
        at = self._chain.number_of(sequence)
        for number in range(at, min(len(self._chain.segments), at + limits.STRETCH_SEGMENTS)):
            if self._chain.firsts[number] >= end or cutter.full:
                break
            index = self._chain.segments[number].load()
            begin = bisect_left(index.sequences, sequence)
            stop = bisect_left(index.sequences, min(end, self._chain.end_of(number)), begin)
            cutter.take(index, chosen(index, begin, stop, streams), begin, stop)
        cutter.close()
        return cutter.found[: limits.STRETCHES]

    def with_headers(self, sequence: int, stream: int | None = None) -> Iterator[int]:
        at = self._chain.number_of(sequence)
        while True:
            newest = at + 1 == len(self._chain.segments)
            index, end = self._chain.segments[at].load(), self._chain.end_of(at)
            yield from with_headers(index, stream, sequence, end)
            if newest:
                return
            sequence = max(sequence, end)
            at = self._chain.number_of(sequence)  # segments may have come and gone meanwhile

    @property
    def first(self) -> int:
        chain = self._chain
        if chain.lowest is None:
            chain.lowest = self._find_first()
        return chain.end.next if chain.lowest is None else chain.lowest

    def _find_first(self) -> int | None:
        for segment in self._chain.segments:
            segment.look()
            messages, first, _ = segment.counts()
            if messages:
                return first
        return None


__all__ = ["DiskLogReader"]
