"""Multipart bodies for consumers: the messages of one body are one claim.

The messages of a body are found and read as one, without the body in memory. The header `part` is `1/17` of the first,
`17/17` of the last, and they are adjacent in the log, as they were written in one atomic batch. For a consumer such a
body is its last part, whose slot begins at the first part; see "Acknowledgement" in docs/reference/format.md.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import accumulate, islice
from typing import TYPE_CHECKING

from mqfs import errors
from mqfs.engine.core.log import GroupLog, record_at
from mqfs.engine.core.portions import Work
from mqfs.model import Kind, Record, Step
from mqfs.records import headers

if TYPE_CHECKING:
    from mqfs.engine.group import Group

_KEY = headers.key(headers.PART)
_READ = 32  # parts read between two checks of the clock
_LOOKED_UP = 4_096  # parts whose sizes are looked up at once: a millisecond


def place(head: bytes) -> tuple[int, int]:
    """Return the number of a part and the total, from encoded headers; (0, 0) unless the header `part` has both."""
    if _KEY not in head:
        return 0, 0
    number, total = headers.parse_part(headers.decode(head).get(headers.PART, ""))
    return (number, total) if total else (0, 0)


def is_last(record: Record) -> bool:
    """Whether the headers say that the message is the last part of a body."""
    number, total = place(record.headers)
    return 1 < number == total


def has_next_part(record: Record) -> bool:
    """Whether the headers say that the message is a part of a body, but not the last."""
    if not record.headers or _KEY not in record.headers:
        return False
    number, total = headers.parse_part(headers.decode(record.headers).get(headers.PART, ""))
    return number != total


def first_of(log: GroupLog, record: Record) -> int:
    """Return the sequence of the first part of the body whose last part is `record`; the record's own if it is not the
    last part of a complete body."""
    number, total = place(record.headers)
    first = record.sequence - total + 1
    if not 1 < number == total or first < 1 or not _together(log, record.stream, first, record.sequence):
        return record.sequence
    head = _find(log, record.stream, first)
    return first if head is not None and place(head.headers) == (1, total) else record.sequence


def last_of(log: GroupLog, record: Record) -> Record | None:
    """Return the last part of the body whose first part is `record`, or None if the body is not complete."""
    number, total = place(record.headers)
    last = record.sequence + total - 1
    if number != 1 or total < 2 or not _together(log, record.stream, record.sequence, last):
        return None
    tail = _find(log, record.stream, last)
    return tail if tail is not None and place(tail.headers) == (total, total) else None


def _together(log: GroupLog, stream: int, first: int, last: int) -> bool:
    """Whether all sequences from `first` to `last` are retained messages of that stream."""
    kept = log.state.streams.get(stream)
    if kept is not None and first < kept.floor:
        return False  # the log may have them for a while, but the stream does not keep them
    if log.metrics.count(stream, first, last + 1)[0] != last - first + 1:
        return False
    dropped = log.state.dropped
    if len(dropped) < last - first:
        return not any(first <= sequence <= last for sequence in dropped)
    return not any(sequence in dropped for sequence in range(first, last + 1))


def _find(log: GroupLog, stream: int, sequence: int) -> Record | None:
    record = record_at(log.reader, sequence)
    return record if record is not None and (record.stream, record.kind) == (stream, Kind.MESSAGE) else None


def parts(log: GroupLog, stream: int, first: int, last: int) -> Iterator[Record]:
    """Yield the messages of a stream with the sequences from `first` to `last`. Raises Damaged, DiskFailed."""
    for sequence in range(first, last + 1):
        record = log.reader.find(stream, sequence)
        if record is None or record.sequence != sequence:
            raise errors.DiskFailed(f"body in parts: message {sequence} was removed")
        yield record


class LongBody:
    """The bytes of a multipart body, read from the log on demand. `end`: bytes that the format puts after the body."""

    def __init__(self, group: Group, record: Record, first: int, end: bytes = b"") -> None:
        self._group, self._stream, self._end = group, record.stream, end
        self._first, self._behind = first, record.sequence + 1
        self._size = group.log.metrics.count(record.stream, first, self._behind)[1]
        self._begins = array("Q", [0])  # offsets at which the parts begin, as far as they were looked up
        self._last = (-1, b"")  # number and bytes of the part that was read last, unless it was read to its end

    def __len__(self) -> int:
        return self._size + len(self._end)

    def read(self, begin: int, end: int, failed: Callable[[], None]) -> Step[bytes]:
        """Return the bytes from offset `begin` to `end`, in portions, as they may span many parts. It cannot be
        cancelled. Raises Damaged, DiskFailed, after a call of `failed`."""
        return self._group.portions.run(self._read(begin, end, failed), may_be_cancelled=False)

    def _read(self, begin: int, end: int, failed: Callable[[], None]) -> Work[bytes]:
        try:
            data = yield from self._pieces(begin, end)
        except errors.MqfsError:
            failed()
            raise
        return data

    def _pieces(self, begin: int, end: int) -> Work[bytes]:
        begins, pieces = self._begins, list[bytes]()
        while begins[-1] < min(end, self._size):
            self._look_up()
            yield
        number = bisect_right(begins, begin) - 1
        while number + 1 < len(begins) and begins[number] < end:
            pieces.append(self._part(number, end)[max(begin - begins[number], 0) : end - begins[number]])
            number += 1
            if number % _READ == 0:
                yield
        pieces.append(self._end[max(begin - self._size, 0) : max(end - self._size, 0)])
        return b"".join(pieces)

    def _look_up(self) -> None:
        """Append the offsets of the next _LOOKED_UP parts to `_begins`."""
        at = self._first + len(self._begins) - 1
        stop = min(at + _LOOKED_UP, self._behind)
        listing = self._group.log.metrics.listing({self._stream: at}, stop)
        sizes = [size for portion in reversed(list(listing)) for size in portion.columns(portion.messages)[1]]
        if len(sizes) != stop - at or not sizes:
            raise errors.DiskFailed(f"body in parts: a message from {at} on was removed")
        self._begins.extend(islice(accumulate(sizes, initial=self._begins[-1]), 1, None))

    def _part(self, number: int, end: int) -> bytes:
        if self._last[0] == number:
            body = self._last[1]
        else:
            sequence = self._first + number
            (record,) = parts(self._group.log, self._stream, sequence, sequence)
            body = record.body
        self._last = (number, body) if end < self._begins[number + 1] else (-1, b"")
        return body


def whole(group: Group, record: Record, slot: int, end: bytes = b"") -> LongBody | None:
    """Return the body whose last part is `record`, if the claim's `slot` begins at or before its first part. None: the
    message is not such a body."""
    first = first_of(group.log, record) if record.headers else record.sequence
    return LongBody(group, record, first, end) if slot <= first < record.sequence else None
