"""Runs of records: checked, and copied into Arrow's columns or filtered to some streams.

Every record is checked as in recovery, and the first that does not pass ends the run. Imports no
Arrow and never does I/O. The work is done in C (`columns.c`), or slowly in Python if the C part was not built.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import attrs

from mqfs.model import Buffer, Kind
from mqfs.records import record
from mqfs.records.record import HEAD_BYTES, padded

try:
    from mqfs.records import _native
except ImportError as error:
    MISSING = str(error)  # why Python does the work; empty if C does
else:
    MISSING = ""

# The columns that a caller asks for, a bit each.
SEQUENCES, TIMES, VALUES, TOPICS, HEADERS = 1 << 0, 1 << 1, 1 << 3, 1 << 5, 1 << 7
_MESSAGE = int(Kind.MESSAGE)


@attrs.frozen
class NameTable:
    """Streams by number: the name of each, and the range [first, end) of its wanted messages."""

    numbers: array[int]
    bounds: array[int]
    ends: array[int]
    names: bytes

    @classmethod
    def of(cls, streams: Mapping[int, tuple[str, int, int]]) -> NameTable:
        numbers = sorted(streams)
        names = [streams[number][0].encode() for number in numbers]
        ends = array("i", accumulate(map(len, names), initial=0))
        bounds = (min(max(side, 0), _MOST) for number in numbers for side in streams[number][1:])
        return cls(array("I", numbers), array("Q", bounds), ends, b"".join(names))


_MOST = (1 << 64) - 1


class ArrowColumns(NamedTuple):
    """The wanted messages of a run, as Arrow stores them; None for a column that was not asked for."""

    end: int  # where the first record that does not pass would begin
    last: int  # sequence of the last record, wanted or not; 0 if there is none
    rows: int
    sequences: Any  # i64
    times: Any  # µs, i64
    value_ends: Any  # i32, a 0 in front
    values: Any
    topic_ends: Any
    topics: Any
    positions: Any  # u32, of the records in the buffer; None where no message has headers
    headers: Any  # u16: header bytes of each message


def columns(
    data: Buffer,
    begin: int,
    table: NameTable,
    asked: int,
    *,
    strangers: bool,
    allocate: Callable[[int], bytearray] = bytearray,
) -> ArrowColumns:
    """Return the columns of the run at `begin`. Raises KeyError for a message of a stream that is not in the table;
    with `strangers`, such messages are left out instead. `allocate` returns at least that many bytes; a column that
    ends early has more than it needs."""
    said = table.numbers, table.bounds, table.ends, table.names
    if MISSING:
        return _columns(bytes(data), begin, table, asked, strangers)
    (end, last, rows, room), places = _native.columns(data, begin, said, asked, strangers, allocate)
    view = memoryview(room)
    return ArrowColumns(end, last, rows, *[None if place is None else view[place[0] : place[1]] for place in places])


def _columns(data: bytes, at: int, table: NameTable, asked: int, strangers: bool) -> ArrowColumns:
    last, found = 0, []
    places = {number: place for place, number in enumerate(table.numbers)}
    while (row := record.row_at(data, at)) is not None and at + padded(row.size) <= len(data):
        last, begin, at = row.sequence, at, at + padded(row.size)
        if row.kind != _MESSAGE:
            continue
        if row.stream not in places:
            if not strangers:
                raise KeyError(f"the stream of the record at {begin} has no name")
            continue
        place = places[row.stream]
        if table.bounds[2 * place] <= row.sequence < table.bounds[2 * place + 1]:
            found.append((row, begin, table.names[table.ends[place] : table.ends[place + 1]]))
    bodies = [data[begin + HEAD_BYTES + row.headers : begin + row.size] for row, begin, _ in found]
    made: dict[int, bytearray] = {
        SEQUENCES: _array("q", (row.sequence for row, _, _ in found)),
        TIMES: _array("q", (row.time_ns // 1_000 for row, _, _ in found)),
        VALUES: bytearray(b"".join(bodies)),
        TOPICS: bytearray(b"".join(name for _, _, name in found)),
    }
    ends = {VALUES: _ends(bodies), TOPICS: _ends([name for _, _, name in found])}
    headed = asked & HEADERS and any(row.headers for row, _, _ in found)

    def given(bit: int, of: Mapping[int, bytearray] = made) -> bytearray | None:
        return of[bit] if asked & bit else None

    return ArrowColumns(
        at, last, len(found), given(SEQUENCES), given(TIMES), given(VALUES, ends), given(VALUES),
        given(TOPICS, ends), given(TOPICS),
        _array("I", (begin for _, begin, _ in found)) if headed else None,
        _array("H", (row.headers for row, _, _ in found)) if headed else None,
    )  # fmt: skip


def _array(code: str, values: Iterable[int]) -> bytearray:
    return bytearray(array(code, values).tobytes())


def _ends(pieces: Iterable[bytes]) -> bytearray:
    return _array("i", accumulate(map(len, pieces), initial=0))


class FilteredRun(NamedTuple):
    """The records of some streams in a run."""

    end: int  # where the first record that does not pass would begin
    last: int  # sequence of the last record that passed; 0 if there is none
    rows: int  # records of those streams
    newest: int  # where the last of these lies; -1: there is none
    headed: int  # whether any record of the run has headers
    seen: bytearray  # of each stream, whether it has records
    kept: bytes | None  # bytes of the records of those streams; None: all of the run's


def filter_run(data: Buffer, numbers: array[int]) -> FilteredRun:
    """Filter a run to the messages and EOF markers of the streams with these ascending numbers. Requires the C part."""
    found: tuple[Any, ...] = _native.pick(data, numbers)
    return FilteredRun(*found)
