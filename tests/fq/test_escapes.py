"""Any route has a name of its own, and programs select by names what they would by routes."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mqfs.engine.language import programs
from mqfs.errors import BadCommand
from mqfs.fq.exchanges import translate
from mqfs.limits import NAME_BYTES
from mqfs.syntax.names import check_name, escape, escape_prefix, text_of

odd = st.lists(
    st.sampled_from([b"/", b".", b"%", b"ctl", b"order", b"\xc3", b"\xa9", b"\xff", b"\0", b"2F", b"a", b'"', b"\\"])
)
routes = st.one_of(st.binary(max_size=127), odd.map(lambda parts: b"".join(parts)[:127]))


@given(routes)
@example(b"")
@example(b"ctl")
@example(b"order")
@example(b".")
def test_a_name_is_legal_and_stands_for_its_route(route: bytes) -> None:
    name = escape(route)
    assert text_of(name) == route
    if len(name.encode()) <= NAME_BYTES:
        check_name(name)


@given(routes, routes)
def test_two_routes_have_two_names(one: bytes, other: bytes) -> None:
    assert (escape(one) == escape(other)) == (one == other)


@given(st.text(max_size=40).map(str.encode), st.text(max_size=40).map(str.encode))
@example(b"ct", b"l")
@example(b"orde", b"r")
@example(b"", b"")
def test_what_a_route_begins_with_its_name_begins_with(begin: bytes, end: bytes) -> None:
    assert escape(begin + end).startswith(escape_prefix(begin))


def quoted(text: bytes) -> bytes:
    return b'"' + b"".join(b"\\x%02x" % byte for byte in text) + b'"'


@given(routes.filter(lambda text: b'"' not in text), routes, st.booleans())
@example(b"caf\xc3", b"caf\xc3\xa9", False)
@example(b"ct", b"ctl", False)
def test_a_program_selects_by_name_what_it_would_by_route(text: bytes, route: bytes, exact: bool) -> None:
    kind = b"exact" if exact else b"prefix"
    program = programs.parse(translate(kind + b':"' + text + b'"'))
    assert program.selects(escape(route), b"", 1) == (route == text if exact else route.startswith(text))
    if program.selects(escape(route), b"", 1):
        assert program.may_route(escape(route))


@given(routes, routes)
@example(b"2", b"a/b")
@example(b".a", b".a")
@example(b"\xa9", b"\xc3\xa9")
def test_route_contains_looks_at_the_route(part: bytes, route: bytes) -> None:
    program = programs.parse(translate(b"prefix: route_contains(" + quoted(part) + b")"))
    assert program.selects(escape(route), b"", 1) == (part in route)
    assert program.may_route(escape(route)) == (part in route)


@pytest.mark.parametrize(
    ("program", "route", "body", "wanted"),
    [
        (b'prefix:"a." sample(1)', b"a.b", b"", True),
        (b'prefix:"a." sample(0)', b"a.b", b"", False),
        (b"exact:a true()", b"a", b"", True),
        (b'prefix: (payload_prefix("x") || payload_contains("\xff"))', b"a", b"a\xff", True),
        (b'prefix: payload_prefix("x") && route_contains("a")', b"b", b"x", False),
        (b"prefix:a(b", b"a(b)", b"", True),
        (b'prefix:"a\\b"', b"a\\bc", b"", True),
    ],
)
def test_the_functions_of_fq(program: bytes, route: bytes, body: bytes, wanted: bool) -> None:
    assert programs.parse(translate(program)).selects(escape(route), body, 1) is wanted


@pytest.mark.parametrize(
    "program", [b"", b"a", b"suffix:a", b"prefix:a nothing()", b"prefix:a sample(", b"prefix:a true() x"]
)
def test_what_is_no_program_is_refused(program: bytes) -> None:
    with pytest.raises(BadCommand):
        translate(program)
