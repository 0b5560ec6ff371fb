"""Frames: every one comes back as it was, and nothing else passes for one."""

from __future__ import annotations

import struct
import uuid

import pytest
from google_crc32c import value
from hypothesis import given
from hypothesis import strategies as st

from mqfs import limits
from mqfs.errors import BadReplica
from mqfs.replica.frame import HEAD_BYTES, Entry, Frame, Owner, crc_of, decode, encode
from mqfs.store.replication import LogBytes, Removed, Trimmed

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
OWNERS = st.builds(Owner, st.uuids(), st.text(max_size=40))
ENTRIES = st.lists(
    st.one_of(
        st.builds(LogBytes, U32, U64, U64, st.binary(min_size=1, max_size=200)),
        st.builds(Trimmed, U32, U64, U64),
        st.builds(Removed, U32),
    ),
    max_size=6,
)
FRAMES = st.builds(
    Frame, st.uuids(), U64, U64, U64, U32, st.integers(-(2**63), 2**63 - 1), st.booleans(),
    st.one_of(ENTRIES, st.tuples(OWNERS).map(list)),
)  # fmt: skip
STORE = uuid.UUID(int=7)


def frame_of(*entries: Entry) -> Frame:
    return Frame(STORE, 3, 18, 17, 0xABCDEF01, 1_700_000_000_000_000_000, False, list(entries))


def with_crc(data: bytes) -> bytes:
    """The bytes with the check sum that fits them."""
    return data[:8] + value(data[:8] + data[12:]).to_bytes(4, "little") + data[12:]


@given(FRAMES)
def test_a_frame_comes_back_as_it_was(frame: Frame) -> None:
    assert decode(encode(frame)) == frame


def test_every_bit_that_is_flipped_is_noticed() -> None:
    data = encode(frame_of(LogBytes(1, 2, 3, b"some records"), Trimmed(4, 5, 6), Removed(7)))
    for bit in range(8 * len(data)):
        wrong = bytearray(data)
        wrong[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadReplica):
            decode(bytes(wrong))


def test_every_frame_that_is_cut_or_longer_is_refused() -> None:
    data = encode(frame_of(LogBytes(1, 2, 3, b"some records"), Owner(uuid.UUID(int=1), "tcp!a!5640")))
    for size in range(len(data)):
        with pytest.raises(BadReplica):
            decode(data[:size])
    with pytest.raises(BadReplica):
        decode(data + b"\0")


@given(st.binary(max_size=300))
def test_noise_is_refused_also_behind_a_head_that_fits(noise: bytes) -> None:
    """The check sum fits: who writes such a frame is a server of another version, or an enemy."""
    head = bytearray(encode(frame_of())[:HEAD_BYTES])
    head[12:16] = struct.pack("<I", HEAD_BYTES + len(noise))
    data = with_crc(bytes(head) + noise)
    try:
        frame = decode(data)
    except BadReplica:
        return
    assert encode(frame)[HEAD_BYTES:] == noise


def test_an_entry_that_says_more_than_is_there_costs_nothing() -> None:
    data = encode(frame_of(LogBytes(1, 2, 3, b"some records")))
    wrong = bytearray(data)
    wrong[HEAD_BYTES : HEAD_BYTES + 4] = struct.pack("<I", 2**32 - 1)
    with pytest.raises(BadReplica, match="exceeds the frame"):
        decode(with_crc(bytes(wrong)))


def test_a_frame_is_bounded() -> None:
    room = limits.REPLICA_FRAME_BYTES - len(encode(frame_of(LogBytes(1, 2, 3, b"x")))) + 1
    assert len(encode(frame_of(LogBytes(1, 2, 3, bytes(room))))) == limits.REPLICA_FRAME_BYTES
    with pytest.raises(BadReplica, match="expected at most"):
        encode(frame_of(LogBytes(1, 2, 3, bytes(room + 1))))
    with pytest.raises(BadReplica, match="expected 72 to"):
        decode(bytes(limits.REPLICA_FRAME_BYTES + 1))


def test_the_check_sum_is_what_the_next_frame_repeats() -> None:
    data = encode(frame_of(Removed(1)))
    assert crc_of(data) == value(data[:8] + data[12:])
