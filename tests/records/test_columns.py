"""Runs of records to columns and to some streams: in C as in Python, whatever the bytes are."""

from __future__ import annotations

import itertools
import struct
from array import array
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqfs.records import columns as gather
from mqfs.records import headers, record
from mqfs.records.columns import HEADERS, SEQUENCES, TIMES, TOPICS, VALUES, NameTable
from mqfs.records.record import padded

pytestmark = pytest.mark.skipif(gather.MISSING != "", reason=f"the part in C was not built: {gather.MISSING}")

ALL = SEQUENCES | TIMES | VALUES | TOPICS | HEADERS
NUMBERS = st.sampled_from([3, 4, 5, 7, 70_000, (1 << 32) - 1])
RECORDS = st.lists(
    st.tuples(
        st.integers(0, 40),
        st.one_of(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(-2_000, 2_000)),
        NUMBERS,
        st.sampled_from([1, 1, 1, 2, 3, 6]),
        st.dictionaries(st.text(max_size=3), st.text(max_size=9), max_size=2),
        st.binary(max_size=20),
    ),
    max_size=12,
)
TABLES = st.dictionaries(NUMBERS, st.tuples(st.text(max_size=4), st.integers(0, 41), st.integers(0, 41)), max_size=6)


def encoded(records: Any) -> bytes:
    return b"".join(record.encode(n, t, s, kind, 0, headers.encode(h), body) for n, t, s, kind, h, body in records)


def shown(found: gather.ArrowColumns) -> Any:
    """What the columns say, without what lies behind their ends."""
    columns: list[Any] = [found.end, found.last, found.rows]
    for data, code in ((found.sequences, "q"), (found.times, "q"), (found.positions, "I"), (found.headers, "H")):
        width = struct.calcsize(code) * found.rows
        columns.append(None if data is None or not found.rows else array(code, bytes(data[:width])).tolist())
    for ends, data in ((found.value_ends, found.values), (found.topic_ends, found.topics)):
        if ends is None:
            columns.append(data)
            continue
        borders = array("i", bytes(ends[: 4 * (found.rows + 1)])).tolist()
        columns.append([bytes(data[a:b]) for a, b in itertools.pairwise(borders)])
    return columns


def in_python(monkeypatch: pytest.MonkeyPatch, *said: Any) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(gather, "MISSING", "no compiler")
        return shown(gather.columns(*said, strangers=True))


@pytest.mark.slow
@given(RECORDS, TABLES, st.integers(0, 255), st.integers(0, 3), st.data())
def test_in_c_as_in_python(records: Any, streams: Any, asked: int, ahead: int, draw: st.DataObject) -> None:
    asked &= ALL
    data = bytearray(b"x" * 8 * ahead + encoded(records))
    if data and draw.draw(st.booleans()):
        data[draw.draw(st.integers(0, len(data) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    end = draw.draw(st.integers(8 * ahead, len(data)))
    said = bytes(data[:end]), 8 * ahead, NameTable.of(streams), asked
    with pytest.MonkeyPatch.context() as patch:
        assert shown(gather.columns(*said, strangers=True)) == in_python(patch, *said)


def test_headers_of_a_damaged_record_make_no_column() -> None:
    data = bytearray(encoded([(0, 0, 3, 1, {}, b""), (0, 0, 3, 1, {"a": "b"}, b"")]))
    data[50] ^= 1  # in the second
    found = gather.columns(bytes(data), 0, NameTable.of({3: ("", 0, 1)}), HEADERS, strangers=True)
    assert (found.rows, found.positions, found.headers) == (1, None, None)


@given(RECORDS, st.sets(NUMBERS), st.integers(0, 100))
def test_some_streams(records: Any, wanted: set[int], cut: int) -> None:
    data = encoded(records)
    data = data[: len(data) - cut]
    found = gather.filter_run(data, array("I", sorted(wanted)))
    at, last, kept, newest, headed, seen = 0, 0, [], -1, False, set()
    while (row := record.row_at(data, at)) is not None and at + padded(row.size) <= len(data):
        last, headed = row.sequence, headed or bool(row.headers)
        if row.kind <= 2 and row.stream in wanted:
            kept.append(data[at : at + padded(row.size)])
            newest = at
            seen.add(row.stream)
        at += padded(row.size)
    assert (found.end, found.last, found.rows, found.newest, bool(found.headed)) == (
        at,
        last,
        len(kept),
        newest,
        headed,
    )
    assert {n for n, some in zip(sorted(wanted), found.seen, strict=True) if some} == seen
    assert (data[:at] if found.kept is None else found.kept) == b"".join(kept)


def test_a_stream_without_a_name_is_no_surprise_only_where_it_may_be() -> None:
    data = encoded([(1, 5, 3, 1, {}, b"a"), (2, 5, 4, 1, {}, b"b")])
    table = NameTable.of({3: ("a", 0, 9)})
    assert shown(gather.columns(data, 0, table, ALL, strangers=True))[:4] == [len(data), 2, 1, [1]]
    with pytest.raises(KeyError, match="record at 40 has no name"):
        gather.columns(data, 0, table, ALL, strangers=False)


@pytest.mark.parametrize("begin", [-1, 41])
def test_what_begins_outside(begin: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        gather.columns(encoded([(1, 5, 3, 1, {}, b"a")]), begin, NameTable.of({}), ALL, strangers=True)


UNALIGNED = memoryview(bytes(65))[1:]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"numbers": UNALIGNED[:8]}, "not aligned"),
        ({"bounds": UNALIGNED[:32]}, "not aligned"),
        ({"ends": UNALIGNED[:12]}, "not aligned"),
        ({"bounds": array("Q", [0, 9, 0])}, "not of one length"),
        ({"ends": array("i", [0, 1])}, "not of one length"),
        ({"ends": array("i", [0, 1, 3])}, "end outside"),
        ({"ends": array("i", [-1, 1, 2])}, "end outside"),
        ({"ends": array("i", [0, 9, 2])}, "do not follow"),
        ({"ends": array("i", [2, 1, 2])}, "do not follow"),
        ({"ends": array("i", [0, -(1 << 31), 2])}, "do not follow"),
    ],
)
def test_what_is_no_table_is_refused(change: dict[str, Any], why: str) -> None:
    data = encoded([(1, 5, 3, 1, {}, b"a"), (2, 5, 4, 1, {}, b"b")])
    table = attrs.evolve(NameTable.of({3: ("s", 0, 9), 4: ("t", 0, 9)}), **change)
    with pytest.raises(ValueError, match=why):
        gather.columns(data, 0, table, ALL, strangers=True)
    if "numbers" in change:
        with pytest.raises(ValueError, match=why):
            gather.filter_run(data, table.numbers)


def test_room_that_is_too_small_is_refused() -> None:
    data = encoded([(1, 5, 3, 1, {}, b"a")])
    with pytest.raises(ValueError, match="less was allocated"):
        gather.columns(
            data, 0, NameTable.of({3: ("a", 0, 9)}), ALL, strangers=True, allocate=lambda size: bytearray(size - 1)
        )
