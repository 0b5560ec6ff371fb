"""scan: what record.row_at finds one by one, in one pass; and a ring's bytes are a log's bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mqfs.records import record
from mqfs.ring import create, scan

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
