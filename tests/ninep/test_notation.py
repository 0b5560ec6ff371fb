"""The notation: printing and parsing are each other's inverse, and its forms stay as documented."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from mqfs.model import Qid
from mqfs.ninep.codec import messages as m
from mqfs.ninep.codec.notation import parse, show
from tests.support.ninep import messages


@given(messages(True))
def test_inverse(message: Any) -> None:
    line = show(message)
    assert "\n" not in line
    assert parse(line) == message


LINES = [
    "Tversion tag NOTAG msize 8192 version 9P2000",
    'Tattach tag 1 fid 0 afid NOFID uname glenda aname ""',
    "Tattach tag 1 fid 0 afid NOFID uname glenda aname /a n_uname 1000",
    "Twalk tag 1 fid 0 newfid 1 names [a b]",
    "Rwalk tag 1 qids [12.0.d 40.1.a 41.0.f 42.0.130]",
    'Twrite tag 1 fid 1 offset 0 data "hi\\n"',
    "Rread tag 1 data 0xff00",
    'Rerror tag 1 ename "file does not exist: x"',
    "Tlopen tag 1 fid 1 flags 04000",
    'Rreaddir tag 1 entries [{qid 1.0.d offset 1 type 4 name .} {qid 2.0.f offset 2 type 8 name "a b"}]',
    "Tfsync tag 1 fid 1",
    'Twstat tag 1 fid 1 stat {type ~ dev ~ qid 0.0.f mode ~ atime ~ mtime ~ length ~ name new uid "" gid "" muid ""}',
]


@pytest.mark.parametrize("line", LINES)
def test_form(line: str) -> None:
    assert show(parse(line)) == line


def test_trace_cuts_data() -> None:
    assert show(m.Rread(1, b"abcdef"), 3) == 'Rread tag 1 data "abc"..6'
    with pytest.raises(ValueError):
        parse('Rread tag 1 data "abc"..6')


@pytest.mark.parametrize(
    "line",
    [
        "",
        "Tnothing tag 1",
        "Tclunk fid 1 tag 1",
        "Tclunk tag 1",
        "Tclunk tag 1 fid 1 more 2",
        "Tclunk tag 65536 fid 1",
        "Twalk tag 1 fid 0 newfid 1 names [a",
        "Twrite tag 1 fid 1 offset 0 data hi",
        "Topen tag 1 fid 1 mode x",
    ],
)
def test_refused(line: str) -> None:
    with pytest.raises(ValueError):
        parse(line)


def test_qid_letters() -> None:
    assert parse("Rattach tag 1 qid 7.0.a") == m.Rattach(1, Qid(0x40, 0, 7))
