"""scan: what record.row_at finds one by one, in one pass; and a ring's bytes are a log's bytes."""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqfs.records import record
from mqfs.ring import RecordColumns, create, is_ordered, is_plain, moved, scan

DRAFTS = st.lists(
    st.tuples(st.integers(1, 6), st.integers(0, 2**32 - 1), st.binary(max_size=60), st.binary(max_size=30)), max_size=12
)


def encoded(drafts: list[tuple[int, int, bytes, bytes]]) -> bytes:
    return b"".join(
        record.encode(number, number * 5, stream, kind, 0, headers, body)
        for number, (kind, stream, body, headers) in enumerate(drafts, 1)
    )


def rows(buffer: bytes) -> tuple[int, list[tuple[int, ...]]]:
    at, found = 0, []
    while row := record.row_at(buffer, at):
        found.append((row.sequence, row.time_ns, row.position, row.body, row.stream, row.headers, row.kind, row.flags))
        if at + record.padded(row.size) > len(buffer):
            return at, found[:-1]
        at += record.padded(row.size)
    return at, found


@given(DRAFTS, st.data())
def test_finds_what_row_at_finds(drafts: list[tuple[int, int, bytes, bytes]], data: st.DataObject) -> None:
    buffer = bytearray(encoded(drafts))
    if buffer and data.draw(st.booleans()):
        buffer[data.draw(st.integers(0, len(buffer) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    cut = bytes(buffer[: data.draw(st.integers(0, len(buffer)))])
    columns = scan(cut)
    assert (columns.end, list(zip(*(list(column) for column in columns[1:]), strict=True))) == rows(cut)


@given(st.binary(max_size=400))
def test_noise(noise: bytes) -> None:
    columns = scan(noise)
    assert (columns.end, [*zip(*columns[1:], strict=True)]) == rows(noise)


ALL = range(1 << 32)  # numbers of streams
BATCHES = re.compile(rb"(?:\x00|\x01\x03*\x02|\x04)*")  # flags of whole atomic batches, and of ephemeral messages


@given(st.binary(max_size=12).map(lambda flags: bytes(flag % 6 for flag in flags)))
def test_flags_of_whole_batches(flags: bytes) -> None:
    assert is_plain(columns_of(flags=flags), 1, ALL) == bool(BATCHES.fullmatch(flags))


@pytest.mark.parametrize("at", range(3))
def test_what_a_client_may_not_publish(at: int) -> None:
    def changed(sound: int, other: int) -> list[int]:
        return [other if row == at else sound for row in range(3)]

    assert is_plain(columns_of(bodies=[1, 9, 2]), 9, ALL)
    for other in (0, 10, 2**32 - 1):
        assert not is_plain(columns_of(bodies=changed(9, other)), 9, ALL)
    for other in (0, 2, 6, 255):
        assert not is_plain(columns_of(kinds=changed(1, other)), 9, ALL)
    for other in (1, 256, 2**16 - 1):
        assert not is_plain(columns_of(headers=changed(0, other)), 9, ALL)
    for other in (0, 15, 18, 2**32 - 1):
        assert is_plain(columns_of(streams=changed(16, 17)), 9, range(16, 18))
        assert not is_plain(columns_of(streams=changed(17, other)), 9, range(16, 18))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 2)), min_size=1, max_size=6), st.booleans())
def test_order(rows: list[tuple[int, int]], plain: bool) -> None:
    first, times = 2**64 - 7, [time for _, time in rows]
    sequences = [first + (number if plain else row) for number, (row, _) in enumerate(rows)]
    wanted = sequences == list(range(sequences[0], sequences[0] + len(rows))) and times == sorted(times)
    assert is_ordered(columns_of(sequences=sequences, times=times)) == wanted


@given(st.lists(st.integers(2**20, 2**31), max_size=5), st.integers(-(2**20), 2**30))
def test_moved(positions: list[int], by: int) -> None:
    rows = columns_of(positions=positions)
    assert list(moved(rows, by).positions) == [position + by for position in positions]
    assert list(rows.positions) == positions


def test_columns_that_do_not_fit() -> None:
    for rows in (columns_of(kinds=[1] * 3, flags=[0] * 2), columns_of(kinds=[], flags=[0])):
        with pytest.raises(ValueError, match="columns of different lengths"):
            is_plain(rows, 9, ALL)
    with pytest.raises(ValueError, match="columns of different lengths"):
        is_ordered(columns_of(sequences=[1, 2], times=[1]))


def columns_of(**given: Sequence[int]) -> RecordColumns:
    """A row for each value that is given; the other columns hold what a client may publish."""
    count = len(next(iter(given.values())))
    sound = {"bodies": 1, "kinds": 1}
    names = ("sequences", "times", "positions", "bodies", "streams", "headers", "kinds", "flags")
    columns = (
        array(code, given.get(name, [sound.get(name, 0)] * count)) for name, code in zip(names, "QqIIIHBB", strict=True)
    )
    return RecordColumns(0, *map(memoryview, columns))


@given(DRAFTS)
def test_a_range_of_the_ring_is_a_range_of_a_log(drafts: list[tuple[int, int, bytes, bytes]]) -> None:
    ring = create(1 << 16, sequence=7)
    consumer = ring.consumer()
    for kind, stream, body, headers in drafts:
        ring.publish(stream, body, headers, kind)
    data = consumer.range(1 << 16, 0) or b""
    taken, sequence, at = [], 6, 0
    for kind, stream, body, headers in drafts:
        sequence += kind <= 2
        row = record.row_at(data, at)
        assert row is not None
        assert data[at : at + record.padded(row.size)] == record.encode(
            sequence, row.time_ns, stream, kind, 0, headers, body
        )
        at += record.padded(row.size)
        taken.append(row)
    assert at == len(data)
    assert [row.time_ns for row in taken] == sorted(row.time_ns for row in taken)
