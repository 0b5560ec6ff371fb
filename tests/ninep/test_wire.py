"""The wire format: what is written is read again, in whatever pieces it comes; what is malformed is refused."""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqfs import limits
from mqfs.errors import BadFrame
from mqfs.model import Qid
from mqfs.ninep.codec import messages as m
from mqfs.ninep.codec.wire import TYPES, Framer, decode, encode
from tests.support.ninep import messages

EVERY_DIALECT = st.booleans().flatmap(lambda unix: st.tuples(st.just(unix), st.lists(messages(unix), max_size=6)))


def cut(framer: Framer, data: bytes, unix: bool) -> list[Any]:
    return [decode(buffer, start, size, unix) for buffer, start, size in framer.frames(data)]


@given(EVERY_DIALECT)
def test_written_is_read_again(sent: tuple[bool, list[Any]]) -> None:
    unix, values = sent
    data = b"".join(encode(value, unix) for value in values)
    assert cut(Framer(1 << 20), data, unix) == values


@given(EVERY_DIALECT, st.data())
def test_pieces_make_no_difference(sent: tuple[bool, list[Any]], data: st.DataObject) -> None:
    unix, values = sent
    stream = b"".join(encode(value, unix) for value in values)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    framer = Framer(1 << 20)
    found = []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += cut(framer, stream[begin:end], unix)
    assert found == values


def test_byte_by_byte() -> None:
    values: list[Any] = [m.Twrite(1, 2, 3, bytes(1000)), m.Tclunk(2, 2), m.Tversion(0xFFFF, 8192, "9P2000")]
    framer = Framer(8192)
    found = []
    for byte in b"".join(encode(value, False) for value in values):
        found += cut(framer, bytes([byte]), False)
    assert found == values
    assert framer.missing == 0


def test_known_bytes() -> None:
    """Some frames as the manual of Plan 9 lays them out, by hand."""
    assert encode(m.Tversion(0xFFFF, 8192, "9P2000"), False).hex() == "1300000064ffff00200000060039503230 3030".replace(
        " ", ""
    )
    assert (
        encode(m.Rwalk(1, (Qid(0x80, 2, 3),)), False).hex() == "160000006f0100" + "0100" + "80020000000300000000000000"
    )
    assert encode(m.Rerror(1, "x", 5), False).hex() == "0a0000006b0100" + "010078"
    assert encode(m.Rerror(1, "x", 5), True).hex() == "0e0000006b0100" + "01007805000000"


def test_stat_has_its_size_twice() -> None:
    plain = m.Dir(0, 0, Qid(0, 0, 1), 0o644, 0, 0, 0, "n", "u", "g", "m")
    raw = encode(m.Rstat(1, plain), False)
    outer, inner = struct.unpack_from("<HH", raw, 7)
    assert (outer, inner) == (len(raw) - 9, len(raw) - 11)


@pytest.mark.parametrize("size", [0, 1, 6, 8193, 0xFFFF_FFFF])
def test_size_is_checked_before_anything_is_waited_for(size: int) -> None:
    with pytest.raises(BadFrame):
        list(Framer(8192).frames(struct.pack("<I", size)))


@pytest.mark.parametrize(
    ("what", "frame"),
    [
        ("unknown type", b"\x07\0\0\0\xfe\0\0"),
        ("Terror, which does not exist", b"\x07\0\0\0\x6a\0\0"),
        ("data runs over", struct.pack("<IBHIQI", 23, 118, 1, 1, 0, 0xFFFF_FFFF)),
        ("count that overflows when the header is added", struct.pack("<IBHIQI", 23, 118, 1, 1, 0, 0xFFFF_FFF0)),
        ("data falls short", struct.pack("<IBHIQI", 26, 118, 1, 1, 0, 2) + b"abc"),
        ("names that are not there", struct.pack("<IBHIIH", 17, 110, 1, 0, 1, 0xFFFF)),
        ("text that runs over", struct.pack("<IBHIH", 13, 100, 0xFFFF, 8192, 0xFFFF)),
        ("version that is not UTF-8", struct.pack("<IBHIH", 14, 100, 0xFFFF, 8192, 1) + b"\xff"),
        ("bytes too many", struct.pack("<IBHIB", 12, 120, 1, 1, 0)),
        ("bytes too few", struct.pack("<IBHH", 9, 120, 1, 1)),
        ("stat larger than its message", struct.pack("<IBHIHH", 15, 126, 1, 1, 100, 98)),
        ("stat smaller than its message", struct.pack("<IBHIHH", 17, 126, 1, 1, 4, 0) + b"\0\0"),
    ],
)
def test_malformed(what: str, frame: bytes) -> None:
    assert struct.unpack_from("<I", frame)[0] == len(frame)
    with pytest.raises(BadFrame):
        decode(frame, 0, len(frame), False)


def test_name_that_is_not_utf8_is_left_to_the_tree() -> None:
    frame = struct.pack("<IBHIIHH", 20, 110, 1, 0, 1, 1, 1) + b"\xff"
    walk = decode(frame, 0, len(frame), False)
    assert isinstance(walk, m.Twalk)
    assert walk.names == ("\udcff",)
    assert encode(walk, False) == frame


def test_older_clients_leave_datasync_out() -> None:
    assert decode(struct.pack("<IBHI", 11, 50, 1, 7), 0, 11, True) == m.Tfsync(1, 7, 0)
    assert decode(struct.pack("<IBHII", 15, 50, 1, 7, 1), 0, 15, True) == m.Tfsync(1, 7, 1)


def test_text_that_does_not_fit() -> None:
    with pytest.raises(BadFrame):
        encode(m.Tattach(1, 0, 0, "x" * 65_536, ""), False)


def test_large_frame_in_many_pieces_is_kept_once() -> None:
    """Cost in proportion to the bytes: a quadratic framer would take minutes here."""
    frame = encode(m.Twrite(1, 1, 0, bytes(limits.MSIZE_MOST - 24)), False)
    framer = Framer(limits.MSIZE_MOST)
    found = []
    for at in range(0, len(frame), 16):
        found += [size for _, _, size in framer.frames(frame[at : at + 16])]
    assert found == [len(frame)]


@given(st.binary(max_size=200), st.booleans(), st.randoms())
def test_arbitrary_bytes_do_no_more_than_bad_frame(data: bytes, unix: bool, chance: random.Random) -> None:
    framed = struct.pack("<IB", len(data) + 5, chance.choice(sorted(TYPES))) + data
    for stream in (data, framed):
        try:
            for buffer, start, size in Framer(8192).frames(stream):
                decode(buffer, start, size, unix)
        except BadFrame:
            pass
