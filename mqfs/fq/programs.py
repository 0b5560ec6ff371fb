"""Programs of fq's clients, as programs of views over escaped names.

Owns the differences: the string behind the colon is that of a route, bytes up to a blank or between quotes; a view has
names. What both languages share is checked by the engine's.
"""

from __future__ import annotations

import re

from mqfs.engine.language import programs
from mqfs.errors import BadCommand
from mqfs.syntax.escape import escape, escape_prefix

_HEAD = re.compile(r'\s*(exact|prefix):(?:"([^"]*)"|(\S*))\s*')
_STRING_OR_NAME = re.compile(r'"(?:[^"\\]|\\.)*"|[A-Za-z_][A-Za-z0-9_]*', re.DOTALL)
_NOT_PLAIN = re.compile(r'["\\]|[^\x20-\x7e\x80-\ud7ff\ue000-\U0010ffff]')
_TORN = re.compile(rb"[\xc2-\xdf]\Z|[\xe0-\xef][\x80-\xbf]?\Z|[\xf0-\xf4][\x80-\xbf]{0,2}\Z")  # of UTF-8, at an end


def translate(program: bytes) -> str:
    """The program for a view. Raises BadCommand where it is none."""
    text = program.decode(errors="surrogateescape")
    head = _HEAD.match(text)
    if head is None:
        raise BadCommand("a program begins with exact: or prefix:")
    route = (head[2] if head[2] is not None else head[3]).encode(errors="surrogateescape")
    rest = _STRING_OR_NAME.sub(_part, text[head.end() :]).strip()
    if head[1] == "exact":
        start = escape(route)
    elif torn := _TORN.search(route):
        start = escape_prefix(route[: torn.start()])
        mine = f"escaped_prefix({_quote(head[2] if head[2] is not None else head[3])})"
        rest = f"{mine} && ({rest})" if rest else mine
    else:
        start = escape_prefix(route)
    found = f"{head[1]}:{_quote(start)} {rest}".rstrip()
    programs.parse(found)
    return found


def _part(match: re.Match[str]) -> str:
    """A string or a name of an expression."""
    part = match.group()
    if part.startswith('"'):
        return _NOT_PLAIN.sub(lambda char: char.group() if char.group() in '"\\' else _byte(char.group()), part)
    return "escaped_contains" if part == "route_contains" else part


def _byte(char: str) -> str:
    return f"\\x{char.encode(errors='surrogateescape')[0]:02x}"


def _quote(text: str) -> str:
    return '"' + _NOT_PLAIN.sub(lambda char: _byte(char.group()), text) + '"'
