"""Messages as they lie in the log, many at once: what bulk readers are given.

Owns reading a stretch of one segment with one call, checking all of it in one pass, and leaving out what is not wanted.
Whatever is not plain it leaves to who reads record by record.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Set
from typing import TYPE_CHECKING

from mqfs import ring
from mqfs.record import HEAD_BYTES, decode, padded
from mqfs.types import Columns, Kind, Record, Span

if TYPE_CHECKING:
    from mqfs.store.index import Index
    from mqfs.store.segment import Segment

_END = int(Kind.END)
_LEAST = 4  # messages; fewer are read one by one


def span(
    segment: Segment, index: Index, ordinal: int, end: int, most_bytes: int, streams: Set[int], headed: bool
) -> Span | None:
    """From the message `ordinal` on, below sequence `end`: see `Bucket.span`."""
    if ring.MISSING:
        return None
    positions = index.positions
    begin = positions[ordinal]
    stop = min(bisect_left(index.sequences, end), bisect_right(positions, begin + most_bytes))
    while stop > ordinal and _end(index, stop - 1) > begin + most_bytes:
        stop -= 1
    if stop - ordinal < _LEAST:
        return None
    segment.recent = True
    try:
        data = segment.read(begin, _end(index, stop - 1) - begin)
    except OSError:
        return None
    rows = ring.scan(data)
    if rows.end != len(data) or (not headed and any(rows.headers)):
        return None
    return _cut(data, rows, streams)


def _end(index: Index, ordinal: int) -> int:
    return index.positions[ordinal] + padded(HEAD_BYTES + index.headers[ordinal] + index.bodies[ordinal])


def _cut(data: bytes, rows: Columns, streams: Set[int]) -> Span | None:
    """Only the messages of those streams."""
    seen = set(rows.streams)
    last = rows.sequences[-1]
    if max(rows.kinds) <= _END and seen <= streams:
        return Span([data], seen, len(rows.kinds), last, _record(data, rows, len(rows.kinds) - 1))
    pieces: list[bytes] = []
    count, begin, newest = 0, -1, -1
    for n, (kind, stream) in enumerate(zip(rows.kinds, rows.streams, strict=True)):
        if kind <= _END and stream in streams:
            count, newest = count + 1, n
            begin = rows.positions[n] if begin < 0 else begin
        elif begin >= 0:
            pieces.append(data[begin : rows.positions[n]])
            begin = -1
    if begin >= 0:
        pieces.append(data[begin:])
    return Span(pieces, seen & streams, count, last, _record(data, rows, newest)) if count else None


def _record(data: bytes, rows: Columns, row: int) -> Record:
    begin = rows.positions[row]
    found = decode(data[begin : begin + HEAD_BYTES + rows.headers[row] + rows.bodies[row]])
    assert found is not None
    return found


__all__ = ["span"]
