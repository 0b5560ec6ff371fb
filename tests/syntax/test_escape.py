"""Escaping: a bijection of any bytes to legal names that keeps prefixes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqfs import limits
from mqfs.errors import BadName
from mqfs.syntax.names import check_name, escape, escape_prefix, unescape

# Few bytes, so that those that matter meet: of names that are reserved, of escapes, of characters cut in two.
HARD = st.lists(
    st.sampled_from([b".", b"/", b"%", b"\0", b"\n", b"\x7f", b"ctl", b"order", b"2F", b"\xc3", b"\xa9", b"a"])
)
ANY = st.one_of(st.binary(max_size=80), HARD.map(b"".join))
TEXT = st.one_of(st.text(max_size=40), st.sampled_from(["", "c", "ct", "ctl", "ctls", "o", "order", ".", "%"]))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("mail", "mail"),
        ("a.b/c", "a.b%2Fc"),
        (".hidden.", "%2Ehidden."),
        ("100%", "100%25"),
        ("%41", "%2541"),
        ("", "%"),
        ("ctl", "ctl%"),
        ("order", "order%"),
        ("orders", "orders"),
        ("é", "é"),
        (b"\xc3\xa9\xff\0", "é%FF%00"),
    ],
)
def test_a_name_stays_as_it_is_but_for_what_no_name_may_have(text: bytes | str, name: str) -> None:
    assert escape(text) == name
    assert unescape(name) == (text if isinstance(text, bytes) else text.encode())


@given(ANY)
def test_any_bytes_are_a_legal_name_and_come_back(text: bytes) -> None:
    name = escape(text)
    assert unescape(name) == text
    if len(name.encode()) <= limits.NAME_BYTES:
        assert check_name(name) == name


@given(ANY, ANY)
def test_two_texts_have_two_names(one: bytes, other: bytes) -> None:
    assert (escape(one) == escape(other)) == (one == other)


@given(TEXT, TEXT)
def test_a_prefix_of_a_text_is_a_prefix_of_its_name(prefix: str, rest: str) -> None:
    assert escape(prefix + rest).startswith(escape_prefix(prefix))


@given(TEXT, TEXT)
def test_no_other_name_has_the_prefix(prefix: str, text: str) -> None:
    assert escape(text).startswith(escape_prefix(prefix)) == text.startswith(prefix)


@given(st.text(alphabet="%aA2Ff.ctl\udc80/\0", max_size=8))
def test_what_is_no_escaped_name_is_refused(name: str) -> None:
    try:
        text = unescape(name)
    except BadName:
        return
    assert escape(text) == name
