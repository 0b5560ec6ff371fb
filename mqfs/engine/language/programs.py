r"""Routing programs, the language of fq: which messages a view selects, by name, body and chance.

    prefix:"http." (payload_prefix("M") && route_contains("x"))

`exact:` or `prefix:` and a string, then one expression or none: functions, `&&` (binds closer), `||`, parentheses. A
string after the colon needs quotes only if it holds blanks, quotes, parentheses or backslashes; in quotes `\" \\ \0 \n
\r \t \xHH` are escapes. Arguments are strings, numbers, `true` and `false`. There is no negation.

Packages add functions as entry points of the group `mqfs.functions`. The entry point is called with the arguments when
the program is parsed, and returns what is called for each message: (topic: str, body: bytes, sequence: int) -> bool.

Here are the language and its evaluation, which never looks at a stream or a group.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache, partial
from hashlib import blake2b
from importlib.metadata import EntryPoint, entry_points
from operator import contains
from typing import Any, NoReturn, TypeAlias, cast

import attrs
from lark import Lark, Token, Transformer, UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from mqfs import limits
from mqfs.errors import BadCommand, unknown
from mqfs.syntax.escape import text_of
from mqfs.syntax.patterns import check_size
from mqfs.syntax.quoting import split

# ------------------------------------------------------------ program functions

# The built-in functions of routing programs: each is made of its arguments, and called for each message.

Selects: TypeAlias = Callable[[str, bytes, int], bool]  # topic, body, sequence


def true(topic: str, body: bytes, sequence: int) -> bool:
    return True


def sample(share: float, salt: int) -> Selects:
    """True for that share of messages, always the same ones. Another `sample` of the program gets another salt."""
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

_GRAMMAR = r"""
    start: (EMPTY | KIND (STRING | BARE)) [either]
    either: both (_OR both)*
    both: _term (_AND _term)*
    _term: call | "(" either ")"
    call: NAME ["(" [value ("," value)*] ")"]
    value: STRING -> string | NUMBER -> number | TRUE -> yes | FALSE -> no

    EMPTY: /(exact|prefix):(?=\s|\Z)/
    KIND: /(exact|prefix):(?=\S)/
    STRING: /"([^"\\]|\\.)*"/s
    BARE: /[^\s"()\\]+/
    TRUE: /true\b/
    FALSE: /false\b/
    NAME: /[A-Za-z_][A-Za-z0-9_]*/
    NUMBER: /-?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?/
    _OR: "||"
    _AND: "&&"
    %ignore /\s+/
"""
_EXPECTED = {
    "EMPTY": "", "KIND": "exact: or prefix:", "STRING": "a string in quotes", "BARE": "a string", "NAME": "a function",
    "NUMBER": "a number", "TRUE": "true", "FALSE": "false", "_OR": "'||'", "_AND": "'&&'", "LPAR": "'('",
    "RPAR": "')'", "COMMA": "a comma", "$END": "the end",
}  # fmt: skip

_STRING = r'"(?:[^"\\]|\\.)*"'
# Where a string is not closed none after it is: looked for again at each quote, a text of quotes took its square.
_STRING_OR_PARENTHESIS = re.compile(rf'{_STRING}|[()]|".*', re.DOTALL)
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|(.))", re.DOTALL)
_ESCAPES = {"\\": "\\", '"': '"', "0": "\0", "n": "\n", "r": "\r", "t": "\t"}
_ESCAPES_SAID = r"\\ \" \0 \n \r \t \xHH"
_CHEAP = frozenset({"true", "sample", "payload_prefix", *OF_NAME})  # whatever the size of a body
_WORD = r"(?:[^\s'#]|'(?:[^']|'')*+')(?:[^\s']|'(?:[^']|'')*+')*+"  # as quoting.split reads it
_VERB_AND_NAME = re.compile(rf"\s*+{_WORD}\s++{_WORD}\s*+")
_SHARP = re.compile("#")
_STRING_OR_SHARP = re.compile(rf'{_STRING}|"|#', re.DOTALL)


@attrs.frozen
class _Call:
    name: str
    arguments: tuple[Argument, ...]
    column: int


@attrs.frozen
class _Branch:
    """A condition that holds if all (or any) of its parts do."""

    together: bool
    parts: tuple[_Node, ...]


_Node: TypeAlias = _Call | _Branch


_Parsed: TypeAlias = tuple[bool, str, _Node | None]  # whether exact, the string after the colon, the rest


class _Failed(Exception):
    """A function of a package raised; that was logged."""


@attrs.frozen
class Program:
    """A parsed program; two of the same text are equal."""

    text: str
    by_name: bool = attrs.field(eq=False)  # of a stream it selects all messages or none
    searches: int = attrs.field(eq=False)  # calls that look through a whole body
    _may_route: Callable[[str], bool] = attrs.field(eq=False, repr=False)
    _selects: Selects = attrs.field(eq=False, repr=False)

    def may_route(self, topic: str) -> bool:
        """False only if no message of a stream of this name can be selected."""
        return self._may_route(topic)

    def selects(self, topic: str, body: bytes, sequence: int, most: int = limits.PROGRAM_SEARCH_BYTES) -> bool:
        """Whether this message is selected. A function of a package that raises selects nothing.

        `most`: the bytes of a body that each search sees, from its beginning. What all programs search of a message
        together is bounded, so that it does not hold up others.
        """
        if self.searches and len(body) > (most := min(most, limits.PROGRAM_SEARCH_BYTES // self.searches)):
            body = body[:most]
        try:
            return self._selects(topic, body, sequence)
        except _Failed:
            return False


def is_program(text: str) -> bool:
    """Whether it is to be read as a program, not as a pattern."""
    return text.startswith(("exact:", "prefix:"))


def at_end(line: str) -> tuple[str, str] | None:
    """The second word of a line and the program after it, that is the rest of the line; None: there is none."""
    match = _VERB_AND_NAME.match(line)
    if match is None or not is_program(line[match.end() :]):
        return None
    return split(match.group())[1], _without_comment(line[match.end() :]).rstrip()


def binding(line: str) -> tuple[str, str]:
    """The view's name and its pattern or program in a line `bind NAME ...`, `unbind NAME ...`; "" where there is none.

    A program may be one word quoted as in rc(1), or the rest of the line as it is: then its blanks and quotes are its
    own, and a comment may follow. Raises BadCommand.
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
    """Up to a # that stands after a blank and in no string."""
    marks = _STRING_OR_SHARP
    at = 0
    while mark := marks.search(text, at):
        at = mark.end()
        if mark.group() == '"':
            marks = _SHARP
        elif mark.group() == "#" and text[at - 2 : at - 1].isspace():
            return text[: at - 1]
    return text


@lru_cache(maxsize=256)  # it takes a millisecond and more, and is done when one is checked, and when it is bound
def parse(text: str) -> Program:
    """Raises BadCommand, which names the column (from 1) and what is wrong there."""
    check_size(text, limits.PROGRAM_BYTES, "a program")
    if not is_program(text):
        _refuse(1, "unknown kind (expected exact: or prefix:)")
    _check_depth(text)
    try:
        exact, name, expression = cast(_Parsed, _parser().parse(text))
    except UnexpectedInput as error:
        _refuse_syntax(text, error)
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


def _refuse_syntax(text: str, error: UnexpectedInput) -> NoReturn:
    at = error.pos_in_stream or 0
    if isinstance(error, UnexpectedCharacters):
        names, seen = error.allowed, repr(text[at])
        if text[at] == '"' and "STRING" in names:
            _refuse(at + 1, "string not closed (expected a double quote)")
    elif isinstance(error, UnexpectedToken):
        names, seen = error.accepts or error.expected, repr(str(error.token))
        if error.token.type == "$END":
            at, seen = max(len(text) - 1, 0), "end"
        elif error.token.type == "STRING" and "NAME" in names and text[:at].strip() in ("exact:", "prefix:"):
            _refuse(at + 1, "blank after the colon (expected the string there)")
    else:
        names, seen = set(), "text"
    _refuse(at + 1, f"unexpected {seen} (expected {_either(names)})")


def _either(names: Iterable[str]) -> str:
    said = sorted({_EXPECTED[name] for name in names if _EXPECTED.get(name)})
    return " or ".join([", ".join(said[:-1]), said[-1]] if len(said) > 1 else said) or "something else"


@cache
def _parser() -> Lark:
    return Lark(_GRAMMAR, parser="lalr", transformer=_Nodes(), maybe_placeholders=False)


class _Nodes(Transformer[Token, Any]):
    """From what was parsed to nodes; `both` and `either` of one part are that part."""

    def start(self, parts: list[Any]) -> _Parsed:
        kind, *more = parts
        name = ""
        if more and isinstance(more[0], Token):
            token = more.pop(0)
            name = _name(_string(token) if token.type == "STRING" else str(token), token)
        return kind.startswith("exact"), name, more[0] if more else None

    def either(self, parts: list[_Node]) -> _Node:
        return _branch(parts, together=False)

    def both(self, parts: list[_Node]) -> _Node:
        return _branch(parts, together=True)

    def call(self, parts: list[Any]) -> _Call:
        name, *arguments = parts
        return _Call(str(name), tuple(arguments), (name.start_pos or 0) + 1)

    def string(self, parts: list[Token]) -> str:
        return _string(parts[0])

    def number(self, parts: list[Token]) -> float:
        return float(parts[0])

    def yes(self, parts: list[Token]) -> bool:
        return True

    def no(self, parts: list[Token]) -> bool:
        return False


def _branch(parts: list[_Node], *, together: bool) -> _Node:
    return parts[0] if len(parts) == 1 else _Branch(together, tuple(parts))


def _string(token: Token) -> str:
    """The value of a quoted string; bytes that are no UTF-8 as surrogates, as everywhere in Python."""
    column = (token.start_pos or 0) + 1

    def escaped(match: re.Match[str]) -> str:
        if match[1]:
            byte = int(match[1], 16)
            return chr(byte if byte < 128 else 0xDC00 + byte)
        if match[2] not in _ESCAPES:
            _refuse(column + match.start() + 1, f"unknown escape {match[0]!r} (expected {_ESCAPES_SAID})")
        return _ESCAPES[match[2]]

    text = _ESCAPE.sub(escaped, token[1:-1])
    return text.encode(errors="surrogateescape").decode(errors="surrogateescape")


def _name(text: str, token: Token) -> str:
    """The text, if it can be a part of a stream's name."""
    try:
        text.encode()
    except UnicodeEncodeError:
        _refuse((token.start_pos or 0) + 1, "name of the stream is not UTF-8")
    return text


def _build(node: _Node, leaf: Callable[[_Call], Selects]) -> Selects:
    if isinstance(node, _Call):
        return leaf(node)
    parts = [_build(part, leaf) for part in node.parts]
    decided = not node.together  # what one part alone decides

    def branch(topic: str, body: bytes, sequence: int) -> bool:
        for part in parts:
            if part(topic, body, sequence) is decided:
                return decided
        return not decided

    return branch


def _function(call: _Call, samples: Iterator[int]) -> Selects:
    """What a call stands for. Raises BadCommand."""
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
    """Functions that packages declare. One with the name of a built-in function is refused."""
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
    """The function of a package. If it raises, the message is not selected; the log hears of it once a program."""
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
