"""Routing programs: a table, random programs printed and read back, nonsense, and functions of an installed package."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mqfs import limits
from mqfs.engine.language.programs import Program, binding, is_program, parse
from mqfs.errors import BadCommand
from mqfs.syntax.lines import quote
from tests.support import ROOT
from tests.support.campaign import size

# A program, messages it selects, messages it does not: each is a name and a body.
TABLE: list[tuple[str, list[tuple[str, bytes]], list[tuple[str, bytes]]]] = [
    ("prefix:", [("a", b""), ("http.x", b"M")], []),
    ("prefix:http.", [("http.", b""), ("http.x.y", b"M")], [("http", b""), ("a.http.", b""), ("HTTP.x", b"")]),
    ('prefix:"http."', [("http.x", b"")], [("http", b"")]),
    ("exact:http.x", [("http.x", b"")], [("http.x.y", b""), ("http.", b"")]),
    ('exact:"a b"', [("a b", b"")], [("a", b""), ('"a b"', b"")]),
    (
        'prefix:"http." (payload_prefix("M") && route_contains("x"))',
        [("http.x", b"M"), ("http.ax.b", b"More")],
        [("http.x", b"m"), ("http.x", b""), ("http.y", b"M"), ("ftp.x", b"M"), ("http.x", b" M")],
    ),
    ('prefix: payload_prefix("M")', [("a", b"M")], [("a", b"m")]),
    ("prefix:a (true)", [("ab", b"")], [("b", b"")]),
    ("prefix:a true()", [("ab", b"")], [("b", b"")]),
    ("prefix:a(true)", [("ab", b"")], [("b", b"")]),
    ('prefix:a(payload_contains("x")||payload_contains("y"))', [("a", b"ax"), ("a", b"ya")], [("a", b"z")]),
    (
        'prefix: (payload_contains("x") && payload_contains("y") && payload_contains("z"))',
        [("a", b"zyx")],
        [("a", b"xy"), ("a", b"yz"), ("a", b"xz")],
    ),
    (  # && binds closer
        'prefix: (payload_contains("x") || payload_contains("y") && payload_contains("z"))',
        [("a", b"x"), ("a", b"yz")],
        [("a", b"y"), ("a", b"z")],
    ),
    (
        'prefix: ((payload_contains("x") || payload_contains("y")) && payload_contains("z"))',
        [("a", b"xz"), ("a", b"yz")],
        [("a", b"x"), ("a", b"y"), ("a", b"z")],
    ),
    ("prefix: sample(1)", [("a", b"")], []),
    ("prefix: sample(0)", [], [("a", b"")]),
    ("prefix: ( sample ( 1.0 ) )", [("a", b"")], []),
    (r'prefix: payload_prefix("a\"\\\n\r\t\0\x41")', [("a", b'a"\\\n\r\t\0A')], [("a", b'a"')]),
    (r'prefix: payload_prefix("\xff\xfe")', [("a", b"\xff\xfe!")], [("a", b"\xfe\xff"), ("a", "ÿþ".encode())]),
    (r'prefix:"\xc3\xa4" (payload_contains("ä"))', [("äb", "öä".encode())], [("a", "ä".encode()), ("ä", b"\xe4")]),
    ('prefix:"" (payload_prefix(""))', [("a", b""), ("b", b"c")], []),
    ("prefix:a&&b", [("a&&b", b"")], [("a", b"")]),
    ("exact:true", [("true", b"")], [("a", b"")]),
    ('prefix: (((payload_prefix(")("))))', [("a", b")(")], [("a", b"(")]),
]


@pytest.mark.parametrize(("text", "yes", "no"), TABLE)
def test_table(text: str, yes: list[tuple[str, bytes]], no: list[tuple[str, bytes]]) -> None:
    program = parse(text)
    assert program.text == text
    assert is_program(text)
    for topic, body in yes:
        assert program.may_route(topic), topic
        assert program.selects(topic, body, 1), (topic, body)
    for topic, body in no:
        assert not program.selects(topic, body, 1), (topic, body)


def test_what_the_name_alone_decides() -> None:
    program = parse('prefix:a (route_contains("x") && payload_prefix("M") || route_contains("y"))')
    assert [program.may_route(name) for name in ("ax", "ay", "a", "bx")] == [True, True, False, False]


def test_programs_of_the_same_text_are_equal() -> None:
    assert parse("prefix: sample(.5)") == parse("prefix: sample(.5)")
    assert hash(parse("prefix: sample(.5)")) == hash(parse("prefix: sample(.5)"))
    assert parse("prefix: sample(.5)") != parse("prefix: sample(0.5)")


def test_only_what_begins_so_is_a_program() -> None:
    assert all(map(is_program, ["exact:", "prefix:a", 'prefix:"']))
    assert not any(map(is_program, ["exact", "prefix.a", "", " exact:a", "Prefix:", "a.*", "#"]))


REFUSED = [
    ("", 1, "unknown kind (expected exact: or prefix:)"),
    ("a.*", 1, "unknown kind"),
    ('prefix:"a', 8, "string not closed"),
    (" prefix:", 1, "unknown kind"),
    ('prefix: "a"', 9, "blank after the colon"),
    (r'prefix:"\xff"', 8, "not UTF-8"),
    (r'prefix:"a\q"', 10, r"unknown escape '\\q' (expected \\ \" \0 \n \r \t \xHH)"),
    (r'prefix: payload_prefix("ab\xg1")', 27, "unknown escape"),
    ("prefix:a (", 10, "unexpected end (expected '(' or a function)"),
    ("prefix:a ()", 11, "unexpected ')' (expected '(' or a function)"),
    ("prefix:a (true", 14, "unexpected end (expected ')')"),
    ("prefix:a (true &&)", 18, "unexpected ')' (expected '(' or a function)"),
    ("prefix:a (true & true)", 16, "unexpected '&' (expected '&&', '(', ')' or '||')"),
    ("prefix:a !true", 10, "unexpected '!true' (expected '(', a function or the end)"),
    ("prefix:a (true true)", 16, "unexpected 'true'"),
    ("prefix:a true)", 14, "unexpected ')'"),
    ("prefix:a (sample)", 11, "wrong arguments of sample (expected a number from 0 to 1)"),
    ("prefix:a (sample(1.5))", 11, "wrong arguments of sample (expected a number from 0 to 1)"),
    ("prefix:a (sample(-1))", 11, "wrong arguments of sample"),
    ("prefix:a (sample(true))", 11, "wrong arguments of sample"),
    ("prefix:a (sample(1,1))", 11, "wrong arguments of sample"),
    ("prefix:a (sample(1,))", 20, "unexpected ')' (expected a number, a string in quotes, false or true)"),
    ("prefix:a (sample(1 1))", 20, "unexpected '1'"),
    ('prefix:a (true("x"))', 11, "wrong arguments of true (expected no argument)"),
    ("prefix:a (payload_prefix(1))", 11, "wrong arguments of payload_prefix (expected one string)"),
    ("prefix:a (payload_prefix)", 11, "wrong arguments of payload_prefix (expected one string)"),
    ("prefix:a (nothing(1))", 11, "unknown function 'nothing' (expected one of escaped_contains escaped_prefix"),
    ("prefix:a " + "(" * 33 + "true" + ")" * 33, 42, "parentheses too deep (expected at most 32)"),
    ("prefix:a (\x00)", 11, "expected"),
]


@pytest.mark.parametrize(("text", "column", "said"), REFUSED)
def test_refused(text: str, column: int, said: str) -> None:
    with pytest.raises(BadCommand) as caught:
        parse(text)
    assert caught.value.detail.startswith(f"program, column {column}: ")
    assert said in caught.value.detail


def test_bounds() -> None:
    assert parse("prefix:a " + "(" * 32 + "true" + ")" * 32).selects("a", b"", 1)
    chain = "prefix: true" + " && true" * ((limits.PROGRAM_BYTES - 12) // 8)
    assert parse(chain).selects("a", b"", 1)
    for text in ("prefix:" + "a" * (limits.PROGRAM_BYTES - 6), "prefix:" + "ä" * (limits.PROGRAM_BYTES // 2)):
        with pytest.raises(BadCommand, match=r"bytes \(expected at most 4096"):
            parse(text)
    with pytest.raises(BadCommand, match="UTF-8"):
        parse("prefix:\ud800")


def test_sample_is_a_share_and_always_the_same_one() -> None:
    tenth, again, half, both = (
        [program.selects("a", b"", sequence) for sequence in range(20_000)]
        for program in map(parse, ("prefix: sample(.1)", "exact:a (sample(1e-1))", "prefix: sample(0.5)",
                                   "prefix: (sample(0.5) && sample(0.5))"))
    )  # fmt: skip
    assert tenth == again
    assert abs(sum(tenth) / len(tenth) - 0.1) < 0.01
    assert abs(sum(half) / len(half) - 0.5) < 0.02
    assert abs(sum(both) / len(both) - 0.25) < 0.02  # each sample of a program draws for itself
    assert 20 < sum(tenth[0:20_000:64]) < 45  # not in step with the numbers


def test_sample_stays_the_same_over_versions() -> None:
    """A view after an update is the view before it."""
    program = parse("prefix: sample(0.05)")
    chosen = [sequence for sequence in range(1, 200) if program.selects("a", b"", sequence)]
    assert chosen == [16, 22, 32, 33, 53, 57, 63, 67, 94, 138, 142, 146, 153, 168, 183, 199]


# A tree in the words of the test: ("call", name, argument) or ("&&" | "||", parts).
TEXT = st.text(st.characters(codec="utf-8"), max_size=4)
CALL = st.one_of(
    st.tuples(st.just("true"), st.none()),
    st.tuples(st.just("sample"), st.floats(0, 1)),
    st.tuples(st.sampled_from(["route_contains", "payload_prefix", "payload_contains"]), TEXT | st.sampled_from("abc")),
)
NODE = st.recursive(
    CALL,
    lambda inner: st.tuples(st.sampled_from(["&&", "||"]), st.lists(inner, min_size=2, max_size=4)),
    max_leaves=10,
)


ESCAPES = {r"\n": "\n", r"\r": "\r", r"\t": "\t", r"\0": "\0"}


@attrs.frozen
class Printer:
    """Prints a tree with random blanks and superfluous parentheses."""

    draw: st.DrawFn

    def blank(self) -> str:
        return self.draw(st.sampled_from(["", " ", "  ", "\t"]))

    def string(self, text: str) -> str:
        printed = ""
        for letter in text:
            ways = [letter] if letter not in '"\\' else ["\\" + letter]
            ways += ["".join(rf"\x{byte:02x}" for byte in letter.encode())]
            ways += [escape for escape, meant in ESCAPES.items() if meant == letter]
            printed += self.draw(st.sampled_from(ways))
        return f'"{printed}"'

    def argument(self, value: str | float | None) -> str:
        if value is None:
            return self.draw(st.sampled_from(["", "()", " ( )"]))
        printed = self.string(value) if isinstance(value, str) else repr(value)
        return f"({self.blank()}{printed}{self.blank()})"

    def node(self, node: tuple[str, object], above: str = "") -> str:
        kind, inner = node
        if kind in ("&&", "||"):
            assert isinstance(inner, list)
            glue = f"{self.blank()}{kind}{self.blank()}"
            printed = glue.join(self.node(part, kind) for part in inner)
            needed = above == "&&" and kind == "||"
        else:
            assert inner is None or isinstance(inner, (str, float))
            printed, needed = kind + self.argument(inner), False
        if needed or self.draw(st.booleans()):
            return f"({self.blank()}{printed}{self.blank()})"
        return printed


@st.composite
def programs(draw: st.DrawFn) -> tuple[str, str, str, tuple[str, object]]:
    kind, name, node = draw(st.sampled_from(["exact", "prefix"])), draw(TEXT), draw(NODE)
    printer = Printer(draw)
    return f"{kind}:{printer.string(name)}{printer.blank()}{printer.node(node)}", kind, name, node


def value(node: tuple[str, object], topic: str, body: bytes) -> bool:
    kind, inner = node
    if kind in ("&&", "||"):
        assert isinstance(inner, list)
        return (all if kind == "&&" else any)([value(part, topic, body) for part in inner])
    if isinstance(inner, str):
        part = inner.encode()
        at = (topic.encode() if kind == "route_contains" else body).find(part)
        return at == 0 if kind == "payload_prefix" else at >= 0
    return True


def sampled(node: tuple[str, object]) -> bool:
    kind, inner = node
    return any(map(sampled, inner)) if isinstance(inner, list) else kind == "sample" and inner != 1


@pytest.mark.slow
@settings(max_examples=size(5_000), deadline=None)
@given(programs(), st.lists(st.tuples(TEXT, TEXT | st.text("abc"), st.integers(0, 2**63)), min_size=1))
def test_what_is_printed_is_read_back(
    printed: tuple[str, str, str, tuple[str, object]], messages: list[tuple[str, str, int]]
) -> None:
    text, kind, name, node = printed
    assume(text.count("(") <= limits.PROGRAM_DEPTH)
    program = parse(text)
    for topic, body, sequence in [*messages, (name, "", 1), (name + "a", "a", 2)]:
        starts = topic == name if kind == "exact" else topic.startswith(name)
        selects = program.selects(topic, body.encode(), sequence)
        assert selects is program.selects(topic, body.encode(), sequence)
        assert program.may_route(topic) or not selects
        if not sampled(node):
            assert selects is (starts and value(node, topic, body.encode()))


WORDS = """prefix: exact: " a ( ) (((( && || & ! \\ \\x4 , 1 - 1e999
true false sample sample( payload_prefix (" ") true( ä # '"""
PIECES = st.lists(st.sampled_from([*WORDS.split(), " ", "\t", "\n", "\0", "\udc80"]))


@pytest.mark.slow
@settings(max_examples=size(20_000), deadline=None)
@given(st.one_of(st.text(), PIECES.map("".join), PIECES.map(lambda pieces: "prefix:a (" + " ".join(pieces))))
def test_nonsense_is_refused_with_a_column(text: str) -> None:
    refused = None
    try:
        parse(text).selects("a", b"a", 1)
    except BadCommand as error:
        refused = error.detail
    if refused is None:
        assert is_program(text)
    elif match := re.match(r"program, column (\d+): ", refused):
        assert 1 <= int(match[1]) <= max(1, len(text))
    else:
        assert "UTF-8" in refused or "at most" in refused


@pytest.mark.process
def test_the_first_program_costs_what_the_next_does() -> None:
    """In a new process, as a server is when it starts: nothing is built for it that others would wait for."""
    code = (
        "import time; from mqfs.engine.language.programs import parse\n"
        "for text in ('prefix:a true', 'prefix:b true'):\n"
        " began = time.thread_time(); parse(text); print(time.thread_time() - began)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = map(float, done.stdout.split())
    assert first < max(20 * second, 0.003)


@pytest.mark.parametrize(
    "piece", ["(", ")", "(true", "((", "a(", "prefix:(", "&&", '"', '\\"', "\\", "(1,", "'", " ", "-"]
)
def test_much_of_the_same(piece: str) -> None:
    for head in ("", "prefix:", "prefix:a ", 'prefix:"', "prefix: sample("):
        for length in (limits.PROGRAM_BYTES, 100_000):
            text = (head + piece * length)[:length]
            try:
                assert isinstance(parse(text), Program)
            except BadCommand:
                pass


LINES = [
    ("bind v a.*", ("v", "a.*")),
    ("  bind  v   a.*   # comment", ("v", "a.*")),
    ("bind 'a view' 'a b.#'", ("a view", "a b.#")),
    ("bind v 'it''s.*'", ("v", "it's.*")),
    ("bind v a.#", ("v", "a.#")),
    ("bind v prefix:a", ("v", "prefix:a")),
    ("bind v prefix:", ("v", "prefix:")),
    ("bind v 'prefix:\"a b\" (true)'", ("v", 'prefix:"a b" (true)')),
    ("bind v 'prefix:\"it''s # 1\"' # comment", ("v", 'prefix:"it\'s # 1"')),
    ('bind v prefix:"http." (payload_prefix("M") && true)', ("v", 'prefix:"http." (payload_prefix("M") && true)')),
    ('bind v prefix:"it\'s  #1 # 2" (true)  # comment', ("v", 'prefix:"it\'s  #1 # 2" (true)')),
    ("bind v prefix:a#b", ("v", "prefix:a#b")),
    ("bind v#1 prefix:a", ("v#1", "prefix:a")),
    ("bind 'v'' 1'x prefix:a  true", ("v' 1x", "prefix:a  true")),
    ("unbind v", ("v", "")),
    ("unbind v # comment", ("v", "")),
    ("unbind v exact:a", ("v", "exact:a")),
]


@pytest.mark.parametrize(("line", "meant"), LINES)
def test_lines(line: str, meant: tuple[str, str]) -> None:
    assert binding(line) == meant


@pytest.mark.parametrize(
    "line", ["bind", "bind v a b", "bind v 'prefix:a' true", "bind v 'a", "bind 'v prefix:a", "", "#"]
)
def test_lines_refused(line: str) -> None:
    with pytest.raises(BadCommand):
        binding(line)


@pytest.mark.slow
@settings(max_examples=size(2_000), deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_characters="\n\0"), min_size=1), programs())
def test_a_program_can_be_written_quoted_and_plain(
    name: str, printed: tuple[str, str, str, tuple[str, object]]
) -> None:
    text = printed[0]
    assert binding(f"bind {quote(name)} {quote(text)}") == (name, text)
    assert binding(f"bind {quote(name)} {text}   # comment") == (name, text)


def test_lines_of_many_quotes_are_not_exponential() -> None:
    quotes = "'" * 60_001
    for line in (
        quotes,
        f"bind {quotes}",
        f"bind v {quotes}",
        "bind " + "a'" * 30_001,
        "bind v prefix:" + '"' * 60_001,
    ):
        try:
            binding(line)
        except BadCommand:
            pass


PACKAGE = """
import sys

def longer(least):
    if not isinstance(least, float):
        raise TypeError("longer takes a number")
    return lambda topic, body, sequence: len(body) > least

def words(*arguments):
    return lambda topic, body, sequence: [topic, body, sequence, *arguments] == ["a", b"body", 7, "x", 1.5, True, False]

def failing():
    def fail(topic, body, sequence):
        if body == b"bad":
            raise ValueError("poison")
        return 1
    return fail

def nothing():
    return None
"""

ENTRY_POINTS = """[mqfs.functions]
longer = matchers:longer
words = matchers:words
failing = matchers:failing
nothing = matchers:nothing
missing = matchers:missing
true = matchers:nothing
twice = matchers:longer
"""

SCRIPT = r"""
import logging, sys
logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stdout)
from mqfs.engine.language.programs import parse
from mqfs.errors import BadCommand

assert "importlib.metadata" in sys.modules and "matchers" not in sys.modules
assert parse("prefix: (true)").selects("a", b"", 1)
assert "matchers" not in sys.modules
longer = parse("prefix:a (longer(3) || payload_prefix(\"M\"))")
assert [longer.selects("a", body, 1) for body in (b"1234", b"123", b"M")] == [True, False, True]
assert longer.may_route("ab") and not longer.may_route("b")
assert parse('prefix: words("x", 1.5, true, false)').selects("a", b"body", 7)
failing = parse("prefix: (failing || true)")
assert failing.selects("a", b"good", 1) is True
print("failing")
assert not failing.selects("a", b"bad", 1)
assert not failing.selects("a", b"bad", 2)
assert failing.selects("a", b"good", 3)
print("refusing")
for call in ('longer("x")', "longer", "nothing", "missing", "twice(1)", "other"):
    try:
        parse(f"prefix:a ({call})")
    except BadCommand as error:
        print(error.detail)
    else:
        raise AssertionError(call)
"""


def install(folder: Path, name: str, entry_points: str) -> None:
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)


@pytest.mark.process
def test_functions_of_an_installed_package(tmp_path: Path) -> None:
    install(tmp_path, "matchers", ENTRY_POINTS)
    install(tmp_path, "others", "[mqfs.functions]\ntwice = others:twice\n")
    (tmp_path / "matchers.py").write_text(PACKAGE)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    before, rest = done.stdout.split("failing\n", 1)
    failed, refused = rest.split("refusing\n")
    assert before == "ERROR function 'true' of matchers:nothing is refused: there is one of mqfs with this name\n"
    assert failed.startswith("ERROR function 'failing' failed at a message of 'a', which is not selected\nTraceback")
    assert failed.count("poison") == 2  # the line of the source, and the error: once each
    assert failed.count("ERROR") == 1
    lines = refused.splitlines()
    assert all(line.startswith("program, column 11: ") for line in lines)
    assert [line.removeprefix("program, column 11: ") for line in lines][:3] == [
        "function 'longer': longer takes a number",
        "function 'longer': longer() missing 1 required positional argument: 'least'",
        "function 'nothing': matchers:nothing returned nothing callable",
    ]
    assert "missing" in lines[3]
    assert lines[4].endswith("function 'twice': declared more than once, by matchers:longer and others:twice")
    assert lines[5].endswith(
        "(expected one of escaped_contains escaped_prefix failing longer missing nothing "
        "payload_contains payload_prefix route_contains sample true twice words)"
    )
