"""Reading a log: its segments as one, in the order of their sequences.

A search bisects the names of the segments, then the columns of one index. From the log only the record is read.

    find(17, 41)   firsts 1 40 72: segment 40
    its index      sequences 40 41 42 43, postings 17: [0, 3]      the first ordinal from 41 on is 3
    the record     position of ordinal 3: pread, CRC, and it must be message 43 of stream 17

A message at or above the name of the next segment is read from that segment. A record that fails its check is reported
and raises Damaged each time; readers continue behind it. Long runs are read with one call and checked in one pass.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain
from operator import itemgetter

from mqfs import errors, limits
from mqfs.model import Head, Kind, Listed, Record, RecordRun, Split
from mqfs.records import batch, columns
from mqfs.records.record import HEAD_BYTES, decode, padded
from mqfs.store.chain import Chain
from mqfs.store.segment.file import Segment
from mqfs.store.segment.index import Index, first_headed, seek, seek_before

_END = bytes([Kind.END])
_NEAR_BYTES = 2_048  # bytes for each record: copying them takes as long as a call
_LEAST = 4  # messages that are read as a run; fewer are read one by one


class DiskLogReader:
    """See `LogReader` and `LogMetrics` in mqfs/store/api.py."""

    __slots__ = ("_chain", "_pread")

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._pread = chain.disk.pread

    def _where(self, stream: int | None, sequence: int) -> tuple[Segment, Index, int] | None:
        """Return segment, index and ordinal of the first message (of `stream`) at or after `sequence`; None: there is
        none."""
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
        except OSError as error:  # not Damaged: the disk may recover, and no reader may skip it
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
        place = self._where(None, sequence) if not columns.MISSING else None
        if place is None:
            return None
        segment, index, ordinal = place
        end = min(end, self._chain.end_of(bisect_right(self._chain.firsts, index.sequences[ordinal]) - 1))
        positions = index.positions
        begin = positions[ordinal]
        stop = min(bisect_left(index.sequences, end), bisect_right(positions, begin + most_bytes))
        while stop > ordinal and _end(index, stop - 1) > begin + most_bytes:
            stop -= 1
        if stop - ordinal < _LEAST:
            return None
        segment.recent = True
        data = segment.read(begin, _end(index, stop - 1) - begin)
        if len(streams) > stop - ordinal:
            streams = streams & set(index.streams[ordinal:stop])
        numbers = array("I", sorted(streams))
        found = columns.filter_run(data, numbers)
        if found.end != len(data) or (found.headed and not headed) or not found.rows:
            return None
        seen = {number for number, some in zip(numbers, found.seen, strict=True) if some}
        size = int.from_bytes(data[found.newest : found.newest + 4], "little")
        newest = decode(data[found.newest : found.newest + size])
        assert newest is not None
        return RecordRun([data if found.kept is None else found.kept], seen, found.rows, found.last, newest)

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
        """Return the time of the last message in that segment or before it."""
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
            size += batch.total(index.bodies, ordinals)
        return messages, size

    def header_bytes(self, stream: int, sequence: int, end: int | None = None) -> int:
        return sum(batch.total(index.headers, ordinals) for index, ordinals in self._range(stream, sequence, end))

    def count_eof_markers(self, stream: int, sequence: int, end: int | None = None) -> int:
        marks = 0
        for index, ordinals in self._range(stream, sequence, end):
            marks += batch.total(index.kinds, ordinals) - Kind.MESSAGE * len(ordinals)  # END is MESSAGE + 1
        return marks

    def _range(self, stream: int, sequence: int, end: int | None) -> Iterator[tuple[Index, Sequence[int]]]:
        """Yield, for each segment, its index and the ordinals of the stream's messages in [sequence, end)."""
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

    def heads(self, sequence: int, most: int) -> list[Head]:
        place = self._where(None, sequence)
        if place is None:
            return []
        segment, index, first = place
        found = range(first, min(first + most, self._stop(index, first)))
        streams, kinds, bodies = (column[first : found.stop] for column in (index.streams, index.kinds, index.bodies))
        texts = _header_texts(segment, index, found)
        return list(map(Head, index.sequences[first : found.stop], streams, kinds, bodies, texts))

    def search_headers(self, sequence: int, most: int, keys: Sequence[bytes]) -> tuple[list[int], int]:
        place = self._where(None, sequence)
        if place is None:
            return [], self._chain.end.next
        segment, index, first = place
        stop = self._stop(index, first)
        first, stop = first_headed(index, first, stop)
        found = range(first, min(first + most, stop))
        sizes, positions = index.headers[first : found.stop], index.positions[first : found.stop]
        if any(sizes) and (span := _span(positions, sizes)):
            rows = batch.search(segment.read(positions[0], span), positions[0], positions, sizes, keys)
        else:
            texts = enumerate(_header_texts(segment, index, found))
            rows = [row for row, text in texts if any(key in text for key in keys)]
        return [index.sequences[first + row] for row in rows], index.sequences[found.stop - 1] + 1

    def _stop(self, index: Index, ordinal: int) -> int:
        """Return one above the ordinal of the last message for which the segment of the index is responsible."""
        return bisect_left(index.sequences, self._chain.end_of(self._chain.number_of(index.sequences[ordinal])))

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


def _span(positions: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the size of one read that covers the headers of all these messages; 0: one read for each is cheaper."""
    span = positions[-1] + HEAD_BYTES + sizes[-1] - positions[0]
    return span if span <= _NEAR_BYTES * len(positions) else 0


def _header_texts(segment: Segment, index: Index, found: range) -> list[bytes]:
    """Return the header bytes of those messages."""
    sizes, positions = index.headers[found.start : found.stop], index.positions[found.start : found.stop]
    if not any(sizes):
        return [b""] * len(found)
    if span := _span(positions, sizes):
        data, begin = segment.read(positions[0], span), positions[0]
        places = [position - begin + HEAD_BYTES for position in positions]
        return [data[at : at + size] for at, size in zip(places, sizes, strict=True)]
    places = [position + HEAD_BYTES for position in positions]
    return [segment.read(at, size) if size else b"" for at, size in zip(places, sizes, strict=True)]


def _end(index: Index, ordinal: int) -> int:
    return index.positions[ordinal] + padded(HEAD_BYTES + index.headers[ordinal] + index.bodies[ordinal])


# ------------------------------------------------------------ listing

# The messages of some streams, from the index alone: the log is not read, and no message is visited by itself.


def listed(index: Index, floors: Mapping[int, int], begin: int, stop: int) -> Listed:
    """Return the messages of a segment in [begin, stop) of the streams in `floors`, each from its floor on; without EOF
    markers."""
    low, high = bisect_left(index.sequences, begin), bisect_left(index.sequences, stop)
    runs = [run for number, floor in _present(index, floors) if (run := _run(index, number, floor, low, high))]
    if _END in bytes(index.kinds[low:high]):
        kinds = index.kinds
        runs = [[ordinal for ordinal in run if kinds[ordinal] != Kind.END] for run in runs]
    return Listed(sum(map(len, runs)), lambda newest: _columns(index, runs, newest))


def _present(index: Index, floors: Mapping[int, int]) -> Iterable[tuple[int, int]]:
    present = index.present()
    if len(present) < len(floors):
        return [(number, floors[number]) for number in present if number in floors]
    return floors.items()


def _run(index: Index, stream: int, floor: int, low: int, high: int) -> Sequence[int]:
    posting = index.posting(stream)
    if low < high and index.sequences[low] < floor:
        low = bisect_left(index.sequences, floor, low, high)
    at = bisect_left(posting, low)
    return posting[at : bisect_left(posting, high, at)]


def _columns(index: Index, runs: Sequence[Sequence[int]], newest: int) -> tuple[Sequence[int], Sequence[int]]:
    some = [run[-newest:] for run in runs] if newest else []
    ordinals = some[0] if len(some) == 1 else sorted(chain.from_iterable(some))[-newest:]
    return pick(index.sequences, ordinals), pick(index.bodies, ordinals)


def pick(column: Sequence[int], ordinals: Sequence[int]) -> Sequence[int]:
    """Return the values of a column for those messages."""
    if len(ordinals) < 2:
        return [column[ordinal] for ordinal in ordinals]
    first, last = ordinals[0], ordinals[-1]
    if last - first + 1 == len(ordinals):
        return column[first : last + 1]
    return itemgetter(*ordinals)(column)  # type: ignore[no-any-return]


# ------------------------------------------------------------ split points

# Splits: where a long run of messages may be divided among bulk readers.

PORTIONS = 16  # a stretch in the open segment is a sixteenth of the log from its sequence on


def chosen(index: Index, begin: int, end: int, streams: Set[int] | None) -> Sequence[int]:
    """Return the ordinals in [begin, end) of the segment's messages that belong to `streams` (None: to any)."""
    present = [stream for stream in index.present() if streams is None or stream in streams]
    if len(present) == len(index.present()):
        return range(begin, end)
    found: list[int] = []
    for stream in present:
        posting = index.posting(stream)
        at = bisect_left(posting, begin)
        found.extend(posting[at : bisect_left(posting, end, at)])
    found.sort()
    return found


class SplitPlanner:
    """Splits runs of messages, segment by segment."""

    def __init__(self, messages: int, size: int, most: int) -> None:
        self.messages, self.size, self.most = messages, size, most
        self.found: list[Split] = []
        self._count = self._bytes = self._last = 0

    @property
    def full(self) -> bool:
        return len(self.found) >= self.most

    def take(self, index: Index, those: Sequence[int], begin: int, end: int) -> None:
        """Add `those` of the messages [begin, end). If others lie between them, their bytes are estimated by their
        share in the run, since only positions are known."""
        share = len(those) / (end - begin) if end > begin else 1.0
        at = 0
        while at < len(those) and not self.full:
            to = min(len(those), at + self.messages - self._count)
            first = index.positions[those[at]]
            room = first + int((self.size - self._bytes) / share)
            to = bisect_right(those, room, at, to, key=index.positions.__getitem__)
            if to > at + 1 and _end(index, those[to - 1]) > room:
                to -= 1
            self._count += to - at
            self._bytes += int((_end(index, those[to - 1]) - first) * share)
            self._last = index.sequences[those[to - 1]]
            at = to
            if at < len(those) or self._count >= self.messages or self._bytes >= self.size:
                self.close()

    def close(self) -> None:
        """End the current split, if it has any messages."""
        if self._count:
            self.found.append(Split(self._last + 1, self._count, self._bytes))
        self._count = self._bytes = 0


def of_sizes(rows: Iterable[tuple[int, int]], messages: int, size: int, most: int) -> list[Split]:
    """Split (sequence, bytes) rows in the same way; return at most `most` splits."""
    found: list[Split] = []
    count = weight = last = 0
    for sequence, taken in rows:
        if count and (count >= messages or weight + taken > size):
            found.append(Split(last + 1, count, weight))
            count = weight = 0
            if len(found) >= most:
                return found
        count, weight, last = count + 1, weight + taken, sequence
    if count:
        found.append(Split(last + 1, count, weight))
    return found
