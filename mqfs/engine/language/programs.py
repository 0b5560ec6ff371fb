r"""Routing programs, the language of fq: they select messages for a view by stream name, body and chance.

    prefix:"http." (payload_prefix("M") && route_contains("x"))

`exact:` or `prefix:` and a string, then one expression or none: functions, `&&` (binds closer), `||`, parentheses. A
string after the colon needs quotes only if it holds blanks, quotes, parentheses or backslashes; in quotes `\" \\ \0 \n
\r \t \xHH` are escapes. Arguments are strings, numbers, `true` and `false`. There is no negation.

Packages add functions as entry points of the group `mqfs.functions`. The entry point is called with the arguments when
the program is parsed. It returns a function that is called for each message:
(topic: str, body: bytes, sequence: int) -> bool.

This module parses and evaluates programs. It accesses no stream or group.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Iterator
from functools import cache, lru_cache, partial
from hashlib import blake2b
from importlib.metadata import EntryPoint, entry_points
from operator import contains
from typing import NoReturn, TypeAlias

import attrs

from mqfs import limits
from mqfs.errors import BadCommand, unknown
from mqfs.syntax.lines import split
from mqfs.syntax.names import text_of
from mqfs.syntax.patterns import check_size

# ------------------------------------------------------------ program functions

# The built-in functions of routing programs: each is made from its arguments once, and called for each message.

Selects: TypeAlias = Callable[[str, bytes, int], bool]  # topic, body, sequence


def true(topic: str, body: bytes, sequence: int) -> bool:
    return True


def sample(share: float, salt: int) -> Selects:
    """Select that share of messages, always the same ones. Each `sample` of a program gets a salt of its own."""
    below = share * 2.0**64
    prefix = salt.to_bytes(2, "little")

    def select(topic: str, body: bytes, sequence: int) -> bool:
        digest = blake2b(prefix + sequence.to_bytes(8, "little"), digest_size=8).digest()
        return int.from_bytes(digest, "little") < below

    return select


def _route_contains(text: str) -> Selects:
    return lambda topic, body, sequence: text in topic


def _payload_prefix(text: str) -> Selects:
    prefix = text.encode(errors="surrogateescape")
    return lambda topic, body, sequence: body.startswith(prefix)


def _payload_contains(text: str) -> Selects:
    part = text.encode(errors="surrogateescape")
    return lambda topic, body, sequence: part in body


def _unescaped(holds: Callable[[bytes, bytes], bool], text: str) -> Selects:
    return lambda topic, body, sequence: holds(text_of(topic), text.encode(errors="surrogateescape"))


OF_NAME: dict[str, Callable[[str], Selects]] = {
    "route_contains": _route_contains,
    "escaped_contains": partial(_unescaped, contains),
    "escaped_prefix": partial(_unescaped, bytes.startswith),
}
ON_STRING = {**OF_NAME, "payload_prefix": _payload_prefix, "payload_contains": _payload_contains}
BUILT_IN = ("true", "sample", *ON_STRING)


# ------------------------------------------------------------ programs

log = logging.getLogger("mqfs.engine")

GROUP = "mqfs.functions"

Argument: TypeAlias = str | float | bool

#     program = ("exact:" | "prefix:") [string] [either]          no blank before the string
#     either  = both ("||" both)*
#     both    = term ("&&" term)*
#     term    = "(" either ")" | NAME ["(" [value ("," value)*] ")"]
#     value   = STRING | NUMBER | "true" | "false"
_STRING = r'"(?:[^"\\]|\\.)*"'
# The last alternative ends at the first open string: tried again at each quote, many quotes would take square time.
_STRING_OR_PARENTHESIS = re.compile(rf'{_STRING}|[()]|".*', re.DOTALL)
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|(.))", re.DOTALL)
_ESCAPES = {"\\": "\\", '"': '"', "0": "\0", "n": "\n", "r": "\r", "t": "\t"}
_ESCAPES_SAID = r"\\ \" \0 \n \r \t \xHH"
_CHEAP = frozenset({"true", "sample", "payload_prefix", *OF_NAME})  # functions with a cost independent of the body
_WORD = r"(?:[^\s'#]|'(?:[^']|'')*+')(?:[^\s']|'(?:[^']|'')*+')*+"  # as quoting.split reads it
_VERB_AND_NAME = re.compile(rf"\s*+{_WORD}\s++{_WORD}\s*+")
_SHARP = re.compile("#")
_TOKEN = re.compile(
    rf"\s*(?:(?P<STRING>{_STRING})|(?P<NUMBER>-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)"
    r"|(?P<NAME>[A-Za-z_][A-Za-z0-9_]*)|(?P<SIGN>&&|\|\||[(),])|(?P<OTHER>[^\s\"()\\]+|.)|\Z)",
    re.DOTALL,
)
_BARE = re.compile(r'[^\s"()\\]+')
_STRING_OR_SHARP = re.compile(rf'{_STRING}|"|#', re.DOTALL)


@attrs.frozen
class _Call:
    name: str
    arguments: tuple[Argument, ...]
    column: int


@attrs.frozen
class _Branch:
    """A condition that holds if all of its parts hold (`together`), or any of them."""

    together: bool
    parts: tuple[_Node, ...]


_Node: TypeAlias = _Call | _Branch


_Parsed: TypeAlias = tuple[bool, str, _Node | None]  # whether exact, the string after the colon, the rest


class _Failed(Exception):
    """The failure of a package's function, already logged."""


@attrs.frozen
class Program:
    """A parsed program; two of the same text are equal."""

    text: str
    by_name: bool = attrs.field(eq=False)  # whether it selects all messages of a stream or none
    searches: int = attrs.field(eq=False)  # calls that search a whole body
    _may_route: Callable[[str], bool] = attrs.field(eq=False, repr=False)
    _selects: Selects = attrs.field(eq=False, repr=False)

    def may_route(self, topic: str) -> bool:
        """False only if no message of a stream of this name can be selected."""
        return self._may_route(topic)

    def selects(self, topic: str, body: bytes, sequence: int, most: int = limits.PROGRAM_SEARCH_BYTES) -> bool:
        """Whether the program selects a message. A package's function that raises selects none.

        `most`: the bytes from the beginning of a body that each search sees. The bytes searched in a message by all
        programs together are bounded, so that it does not delay others.
        """
        if self.searches and len(body) > (most := min(most, limits.PROGRAM_SEARCH_BYTES // self.searches)):
            body = body[:most]
        try:
            return self._selects(topic, body, sequence)
        except _Failed:
            return False


def is_program(text: str) -> bool:
    """Whether a text is a program, not a pattern."""
    return text.startswith(("exact:", "prefix:"))


def at_end(line: str) -> tuple[str, str] | None:
    """Return the second word of a line and the program that is the rest of the line; None: the rest is no program."""
    match = _VERB_AND_NAME.match(line)
    if match is None or not is_program(line[match.end() :]):
        return None
    return split(match.group())[1], _without_comment(line[match.end() :]).rstrip()


def binding(line: str) -> tuple[str, str]:
    """Return the view's name and the pattern or program of a line `bind NAME ...` or `unbind NAME ...`; "" without one.

    A program may be one word quoted as in rc(1), or the rest of the line: then its blanks and quotes belong to the
    program, and a comment may follow. Raises BadCommand.
    """
    if (found := at_end(line)) is not None:
        return found
    words = split(line)
    if not 2 <= len(words) <= 3:
        raise BadCommand(
            f"{len(words) - 1} values (expected NAME and a PATTERN, or a program: exact:... or prefix:...)"
        )
    return words[1], words[2] if len(words) == 3 else ""


def _without_comment(text: str) -> str:
    """Return the text before the first # that follows a blank outside of strings."""
    marks = _STRING_OR_SHARP
    at = 0
    while mark := marks.search(text, at):
        at = mark.end()
        if mark.group() == '"':
            marks = _SHARP
        elif mark.group() == "#" and text[at - 2 : at - 1].isspace():
            return text[: at - 1]
    return text


@lru_cache(maxsize=256)  # it takes a millisecond or more, and a program is parsed to be checked and to be bound
def parse(text: str) -> Program:
    """Parse a program. Raises BadCommand with the column (from 1) and what was expected there."""
    check_size(text, limits.PROGRAM_BYTES, "a program")
    if not is_program(text):
        _refuse(1, "unknown kind (expected exact: or prefix:)")
    _check_depth(text)
    exact, name, expression = _Parser(text).program()
    starts: Callable[[str], bool] = name.__eq__ if exact else lambda topic: topic.startswith(name)
    if expression is None:
        return Program(text, True, 0, starts, lambda topic, body, sequence: starts(topic))
    samples = itertools.count()
    may = _build(expression, lambda call: _function(call, samples) if call.name in OF_NAME else true)
    selects = _build(expression, lambda call: _function(call, samples))
    return Program(
        text,
        all(call.name == "true" or call.name in OF_NAME for call in _calls(expression)),
        sum(call.name not in _CHEAP for call in _calls(expression)),
        lambda topic: starts(topic) and may(topic, b"", 0),
        lambda topic, body, sequence: starts(topic) and selects(topic, body, sequence),
    )


def _calls(node: _Node) -> Iterator[_Call]:
    if isinstance(node, _Call):
        yield node
    else:
        for part in node.parts:
            yield from _calls(part)


def _refuse(column: int, detail: str) -> NoReturn:
    raise BadCommand(f"program, column {column}: {detail}")


def _check_depth(text: str) -> None:
    depth = 0
    for match in _STRING_OR_PARENTHESIS.finditer(text):
        depth += {"(": 1, ")": -1}.get(match.group(), 0)
        if depth > limits.PROGRAM_DEPTH:
            _refuse(match.start() + 1, f"parentheses too deep (expected at most {limits.PROGRAM_DEPTH})")


class _Parser:
    """A parser that reads a program token by token. Raises BadCommand at the first unexpected token."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._takes_arguments = False  # whether the last token is the name of a function
        self._advance(text.index(":") + 1)

    def _advance(self, to: int) -> None:
        """Read the token at an offset."""
        match = _TOKEN.match(self._text, to)
        assert match is not None
        self._kind = match.lastgroup or "END"
        self._token = match[self._kind] if match.lastgroup else ""
        self._at, self._end = match.end() - len(self._token), match.end()

    def _take(self, sign: str) -> bool:
        if found := self._kind == "SIGN" and self._token == sign:
            self._advance(self._end)
        return found

    def _refuse(self, *expected: str) -> NoReturn:
        at, seen = self._at, repr(self._token)
        if self._kind == "END":
            at, seen = len(self._text) - 1, "end"
        elif self._token == '"' and "a string in quotes" in expected:
            _refuse(at + 1, "string not closed (expected a double quote)")
        *most, last = sorted(expected)
        _refuse(at + 1, f"unexpected {seen} (expected {' or '.join(filter(None, [', '.join(most), last]))})")

    def program(self) -> _Parsed:
        name, head = "", self._text.index(":") + 1
        bare = _BARE.match(self._text, head)
        if self._at == head and self._kind != "END":
            if bare is None and self._kind != "STRING":
                self._refuse("a string", "a string in quotes")
            name = _name(bare[0] if bare is not None else _string(self._token, head), head)
            self._advance(bare.end() if bare is not None else self._end)
        elif self._kind == "STRING":
            _refuse(self._at + 1, "blank after the colon (expected the string there)")
        expression = None
        if self._kind != "END":
            expression = self._either("the end")
            if self._kind != "END":
                self._refuse_after_term("the end")
        return self._text.startswith("exact"), name, expression

    def _refuse_after_term(self, end: str) -> NoReturn:
        if self._kind == "END":
            self._refuse(end)
        self._refuse("'&&'", "'||'", end, *["'('"] * self._takes_arguments)

    def _either(self, *instead: str) -> _Node:
        either: list[_Node] = []
        while True:
            both = [self._term(*instead)]
            while self._take("&&"):
                both.append(self._term())
            either.append(_branch(both, together=True))
            if not self._take("||"):
                return _branch(either, together=False)
            instead = ()

    def _term(self, *instead: str) -> _Node:
        """Parse a term. `instead`: what else may stand there, for an error text."""
        if self._take("("):
            node = self._either()
            if not self._take(")"):
                self._refuse_after_term("')'")
            self._takes_arguments = False
            return node
        if self._kind != "NAME":
            self._refuse("'('", "a function", *instead)
        name, column = self._token, self._at + 1
        self._advance(self._end)
        self._takes_arguments = not self._take("(")
        return _Call(name, () if self._takes_arguments else tuple(self._arguments()), column)

    def _arguments(self) -> Iterator[Argument]:
        if self._take(")"):
            return
        instead = ["')'"]
        while True:
            if self._kind == "STRING":
                yield _string(self._token, self._at)
            elif self._kind == "NUMBER":
                yield float(self._token)
            elif self._token in ("true", "false"):
                yield self._token == "true"
            else:
                self._refuse("a string in quotes", "a number", "true", "false", *instead)
            self._advance(self._end)
            if self._take(")"):
                return
            if not self._take(","):
                self._refuse("a comma", "')'")
            instead = []


def _branch(parts: list[_Node], *, together: bool) -> _Node:
    return parts[0] if len(parts) == 1 else _Branch(together, tuple(parts))


def _string(token: str, at: int) -> str:
    """Return the value of a quoted string. Bytes that are not UTF-8 become surrogates, as in Python's file names."""

    def escaped(match: re.Match[str]) -> str:
        if match[1]:
            byte = int(match[1], 16)
            return chr(byte if byte < 128 else 0xDC00 + byte)
        if match[2] not in _ESCAPES:
            _refuse(at + match.start() + 2, f"unknown escape {match[0]!r} (expected {_ESCAPES_SAID})")
        return _ESCAPES[match[2]]

    text = _ESCAPE.sub(escaped, token[1:-1])
    return text.encode(errors="surrogateescape").decode(errors="surrogateescape")


def _name(text: str, at: int) -> str:
    """Check that a text can be part of a stream's name, and return it. Raises BadCommand."""
    try:
        text.encode()
    except UnicodeEncodeError:
        _refuse(at + 1, "name of the stream is not UTF-8")
    return text


def _build(node: _Node, leaf: Callable[[_Call], Selects]) -> Selects:
    if isinstance(node, _Call):
        return leaf(node)
    parts = [_build(part, leaf) for part in node.parts]
    decided = not node.together  # the value of one part that decides the whole

    def branch(topic: str, body: bytes, sequence: int) -> bool:
        for part in parts:
            if part(topic, body, sequence) is decided:
                return decided
        return not decided

    return branch


def _function(call: _Call, samples: Iterator[int]) -> Selects:
    """Make the function of a call. Raises BadCommand."""
    match call.name, call.arguments:
        case "true", ():
            return true
        case "sample", (float(share),) if 0 <= share <= 1:
            return sample(share, next(samples))
        case name, (str(text),) if name in ON_STRING:
            return ON_STRING[name](text)
        case name, _ if name in BUILT_IN:
            wanted = {"true": "no argument", "sample": "a number from 0 to 1"}.get(name, "one string")
            _refuse(call.column, f"wrong arguments of {name} (expected {wanted})")
    return _extension(call)


@cache
def _installed() -> dict[str, list[EntryPoint]]:
    """Return the functions that packages declare, without those that have the name of a built-in function."""
    found: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=GROUP):
        if entry.name in BUILT_IN:
            log.error("function %r of %s is refused: there is one of mqfs with this name", entry.name, entry.value)
        else:
            found.setdefault(entry.name, []).append(entry)
    return found


def _extension(call: _Call) -> Selects:
    entries = _installed().get(call.name, [])
    if not entries:
        _refuse(call.column, unknown("function", call.name, sorted([*BUILT_IN, *_installed()])))
    values = sorted({entry.value for entry in entries})
    if len(values) > 1:
        _refuse(call.column, f"function {call.name!r}: declared more than once, by {' and '.join(values)}")
    try:
        function = entries[0].load()(*call.arguments)
    except Exception as error:
        _refuse(call.column, f"function {call.name!r}: {error or type(error).__name__}")
    if not callable(function):
        _refuse(call.column, f"function {call.name!r}: {values[0]} returned nothing callable")
    return _guarded(call.name, function)


def _guarded(name: str, function: Callable[[str, bytes, int], object]) -> Selects:
    """Wrap the function of a package: if it raises, the message is not selected, and the first time that is logged."""
    logged = False

    def select(topic: str, body: bytes, sequence: int) -> bool:
        nonlocal logged
        try:
            return bool(function(topic, body, sequence))
        except Exception:
            if not logged:
                log.exception("function %r failed at a message of %r, which is not selected", name, topic)
            logged = True
            raise _Failed from None

    return select
