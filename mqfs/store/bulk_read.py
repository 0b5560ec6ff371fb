"""Bulk reads: many messages as they lie in the log.

Owns reading a range of one segment with one call, checking it in one pass, and leaving out the other streams. Runs that
need more care than that are read record by record.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Set

from mqfs.log import columns
from mqfs.log.record import HEAD_BYTES, decode, padded
from mqfs.model import RecordRun
from mqfs.store.segment.file import Segment
from mqfs.store.segment.index import Index

_LEAST = 4  # messages; fewer are read one by one


def read_run(
    segment: Segment, index: Index, ordinal: int, end: int, most_bytes: int, streams: Set[int], headed: bool
) -> RecordRun | None:
    """From the message `ordinal` on, below sequence `end`: see `LogReader.read_run`."""
    if columns.MISSING:
        return None
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


def _end(index: Index, ordinal: int) -> int:
    return index.positions[ordinal] + padded(HEAD_BYTES + index.headers[ordinal] + index.bodies[ordinal])


__all__ = ["read_run"]
