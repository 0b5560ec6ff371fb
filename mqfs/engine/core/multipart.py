"""Bodies in parts, as consumers have them: the messages of one body are one claim.

The messages of a body are found and read as one without being held. The header `part` is `1/17` of the first, `17/17`
of the last, and they are next to each other in the log: they came as one unit. A consumer
has such a body as its last part, whose slot begins at the first; see "Acknowledgement" in docs/reference/format.md.
"""

from __future__ import annotations

from collections.abc import Iterator

from mqfs import errors
from mqfs.engine.core.log import GroupLog
from mqfs.model import Kind, Record
from mqfs.records import headers

_KEY = headers.key(headers.PART)


def place(head: bytes) -> tuple[int, int]:
    """Which part it is and of how many, where the headers say both; else (0, 0)."""
    if _KEY not in head:
        return 0, 0
    number, total = headers.parse_part(headers.decode(head).get(headers.PART, ""))
    return (number, total) if total else (0, 0)


def is_last(record: Record) -> bool:
    """Whether it says that it is the last part of a body."""
    number, total = place(record.headers)
    return 1 < number == total


def has_next_part(record: Record) -> bool:
    """Whether it says that it is a part of a body and not the last one."""
    if not record.headers or _KEY not in record.headers:
        return False
    number, total = headers.parse_part(headers.decode(record.headers).get(headers.PART, ""))
    return number != total


def first_of(log: GroupLog, record: Record) -> int:
    """The sequence of the first part of the body whose last one that is; its own where it is none."""
    number, total = place(record.headers)
    first = record.sequence - total + 1
    if not 1 < number == total or first < 1 or not _together(log, record.stream, first, record.sequence):
        return record.sequence
    head = _find(log, record.stream, first)
    return first if head is not None and place(head.headers) == (1, total) else record.sequence


def last_of(log: GroupLog, record: Record) -> Record | None:
    """The last part of the body that begins there, if all of it is there."""
    number, total = place(record.headers)
    last = record.sequence + total - 1
    if number != 1 or total < 2 or not _together(log, record.stream, record.sequence, last):
        return None
    tail = _find(log, record.stream, last)
    return tail if tail is not None and place(tail.headers) == (total, total) else None


def _together(log: GroupLog, stream: int, first: int, last: int) -> bool:
    """Whether all messages from here to there are of that stream, and kept."""
    if log.metrics.count(stream, first, last + 1)[0] != last - first + 1:
        return False
    dropped = log.state.dropped
    return not dropped or not any(sequence in dropped for sequence in range(first, last + 1))


def _find(log: GroupLog, stream: int, sequence: int) -> Record | None:
    try:
        record = log.reader.find(stream, sequence)
    except errors.Damaged:
        return None
    return record if record is not None and record.sequence == sequence and record.kind == Kind.MESSAGE else None


def parts(log: GroupLog, stream: int, first: int, last: int) -> Iterator[Record]:
    """The messages from here to there. Raises Damaged, DiskFailed."""
    for sequence in range(first, last + 1):
        record = log.reader.find(stream, sequence)
        if record is None or record.sequence != sequence:
            raise errors.DiskFailed(f"body in parts: message {sequence} was removed")
        yield record


class LongBody:
    """What `bytes` would be, read from the log as it is asked for. `end`: what the format puts after it."""

    def __init__(self, log: GroupLog, record: Record, first: int, end: bytes = b"") -> None:
        self._log, self._stream, self._end = log, record.stream, end
        self._last = (-1, b"")  # the part that was read last, and where it begins
        self._begins = [0]
        self._first = first
        for sequence in range(first, record.sequence + 1):
            found = log.reader.locate(record.stream, sequence)
            self._begins.append(self._begins[-1] + (found[1] if found is not None else 0))

    def __len__(self) -> int:
        return self._begins[-1] + len(self._end)

    def __getitem__(self, at: slice) -> bytes:
        begin, end, _ = at.indices(len(self))
        pieces = []
        for number in range(len(self._begins) - 1):
            low, high = self._begins[number], self._begins[number + 1]
            if low < end and high > begin:
                pieces.append(self._part(number)[max(begin - low, 0) : end - low])
        pieces.append(self._end[max(begin - self._begins[-1], 0) : max(end - self._begins[-1], 0)])
        return b"".join(pieces)

    def _part(self, number: int) -> bytes:
        if self._last[0] != number:
            sequence = self._first + number
            (record,) = parts(self._log, self._stream, sequence, sequence)
            self._last = number, record.body
        return self._last[1]

    def endswith(self, text: bytes) -> bool:
        return self[max(len(self) - len(text), 0) :] == text


def whole(log: GroupLog, record: Record, slot: int, end: bytes = b"") -> LongBody | None:
    """All of the body whose last part that is, where the slot in which it was claimed holds all of it."""
    first = first_of(log, record) if record.headers else record.sequence
    return LongBody(log, record, first, end) if slot <= first < record.sequence else None
