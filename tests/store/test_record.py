"""The record is as in docs/reference/format.md, in the log and in `format record`; every changed bit of it is seen."""

from __future__ import annotations

import struct

from google_crc32c import value
from hypothesis import given
from hypothesis import strategies as st

from mqfs.model import Kind, Record
from mqfs.records import record as codec

RECORDS = st.builds(
    Record,
    st.integers(0, 2**64 - 1),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 2**32 - 1),
    st.sampled_from([kind for kind in Kind if kind < Kind.NAMES]),
    st.integers(0, 255),
    st.binary(max_size=40),
    st.binary(max_size=100) | st.integers(4_000, 5_000).map(bytes),
)


def encode(r: Record) -> bytes:
    return codec.encode(r.sequence, r.time_ns, r.stream, r.kind, r.flags, r.headers, r.body)


def test_the_crc_is_castagnoli() -> None:
    assert value(b"123456789") == 0xE3069283


def test_by_hand() -> None:
    record = Record(7, 1_000, 16, Kind.MESSAGE, 1, b"\x01k\x01\x00v", b"hello")
    rest = struct.pack("<QqIBBH", 7, 1_000, 16, 1, 1, 5) + b"\x01k\x01\x00vhello"
    size = struct.pack("<I", 42)
    assert encode(record) == size + struct.pack("<I", value(size + rest)) + rest + bytes(6)


@given(RECORDS)
def test_both_ways(record: Record) -> None:
    data = encode(record)
    size = int.from_bytes(data[:4], "little")
    assert len(data) % 8 == 0
    assert codec.decode(data[:size]) == record
    row = codec.row_at(bytes(16) + data, 16, 100)
    assert row == (
        record.sequence,
        record.time_ns,
        116,
        len(record.body),
        record.stream,
        len(record.headers),
        record.kind,
        record.flags,
    )
    assert row is not None
    assert codec.padded(row.size) == len(data)


@given(RECORDS, st.data())
def test_no_bit_changes_unseen(record: Record, data: st.DataObject) -> None:
    good = encode(record)
    size = int.from_bytes(good[:4], "little")
    at = data.draw(st.integers(0, size - 1))
    bad = bytearray(good)
    bad[at] ^= 1 << data.draw(st.integers(0, 7))
    assert codec.decode(bytes(bad[:size])) is None
    assert codec.row_at(bytes(bad), 0) is None


@given(st.lists(RECORDS, min_size=1, max_size=4), st.integers(1, 200))
def test_the_next_good_one_is_found(records: list[Record], garbage: int) -> None:
    junk = b"\xff" * (garbage * 8)
    data = junk + b"".join(map(encode, records))
    assert codec.next_good(data, 0) == len(junk)
    assert codec.next_good(junk + bytes(1_000), 0) == -1
