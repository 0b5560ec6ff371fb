"""The one textual notation of 9P messages: for the trace, `tests/ninep/dialogues/*.txt` and the documents.

    Tversion tag NOTAG msize 8192 version 9P2000
    Rwalk tag 1 qids [12.0.d 40.0.a]
    Twrite tag 3 fid 2 offset 0 data "hi\n"

Printing and parsing are inverse. A message is its name, then the name and value of each field.

Numbers are decimal, modes octal with a leading 0. All bits set is `~` (NOTAG for a tag, NOFID for a fid). A qid is
path.version.type, the type a letter (d directory, a append-only, f file) or a number. A text of letters, digits and the
signs of `_BARE` is bare; any other text, also an empty one, is a JSON string. Data that is printable UTF-8 is a JSON
string, other data 0x and hexadecimal. Lists are in brackets, the fields of a stat or an entry in braces. A field that
is not part of every dialect is left out if it has its default value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from mqfs.model import Qid
from mqfs.ninep.codec.messages import Dir, Entry, Fcall
from mqfs.ninep.codec.wire import NUMBERS, layout

_BARE = re.compile(r"[A-Za-z0-9._/+@:,!%=&^#-]+")
_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[\[\]{}]|[^\s\[\]{}"]+)')
_ONES = {"u8": 0xFF, "u16": 0xFFFF, "u32": 0xFFFF_FFFF, "mode": 0xFFFF_FFFF, "u64": 0xFFFF_FFFF_FFFF_FFFF}
_LETTERS = {0x80: "d", 0x40: "a", 0x00: "f"}
_MESSAGES = {kind.__name__: kind for kind in NUMBERS}


# ---------------------------------------------------------------- printing


def show(message: Fcall, most: int | None = None) -> str:
    """Return the line of a message. `most`: cut data to that many bytes; such a line cannot be parsed again."""
    tag = "NOTAG" if message.tag == 0xFFFF else str(message.tag)
    return " ".join([type(message).__name__, "tag", tag, *_show_fields(message, most)])


def _show_fields(value: Any, most: int | None) -> Iterator[str]:
    defaults = type(value)._field_defaults
    for name, kind, mark in layout(type(value)):
        field = getattr(value, name)
        if not mark or field != defaults[name]:
            yield name
            yield _show(name, kind, field, most)


def _show(name: str, kind: str, value: Any, most: int | None) -> str:
    if kind in _ONES:
        return _show_number(name, kind, value)
    if kind == "data":
        return show_data(value, most)
    if kind == "qid":
        return _show_qid(value)
    if kind == "qids":
        return f"[{' '.join(map(_show_qid, value))}]"
    if kind == "names":
        return f"[{' '.join(map(_show_text, value))}]"
    if kind == "stat":
        return _show_braces(value, most)
    if kind == "entries":
        return f"[{' '.join(_show_braces(entry, most) for entry in value)}]"
    return _show_text(value)


def _show_braces(value: Any, most: int | None) -> str:
    return "{" + " ".join(_show_fields(value, most)) + "}"


def _show_number(name: str, kind: str, value: int) -> str:
    if value == _ONES[kind] and kind != "u8":
        return "NOFID" if name.endswith("fid") else "NOTAG" if name.endswith("tag") else "~"
    return f"0{value:o}" if kind == "mode" and value else str(value)


def _show_qid(qid: Qid) -> str:
    return f"{qid.path}.{qid.version}.{_LETTERS.get(qid.type, qid.type)}"


def _show_text(value: str) -> str:
    return value if _BARE.fullmatch(value) else json.dumps(value, ensure_ascii=not _plain(value))


def _plain(value: str) -> bool:
    """Whether a text can be printed as it is, with only line ends and tabs escaped."""
    return all(letter.isprintable() or letter in "\n\t\r" for letter in value)


def show_data(value: bytes, most: int | None = None) -> str:
    """Return data as JSON text if it is printable UTF-8, else in hexadecimal."""
    if most is not None and len(value) > most:
        return f"{show_data(value[:most])}..{len(value)}"
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return "0x" + value.hex()
    return json.dumps(text, ensure_ascii=False) if _plain(text) else "0x" + value.hex()


# ---------------------------------------------------------------- parsing


class Tokens:
    """The words of a line, one after the other. A missing or unexpected word raises ValueError."""

    def __init__(self, line: str) -> None:
        self._words = list(_split(line))
        self._at = 0

    def peek(self) -> str:
        return self._words[self._at] if self._at < len(self._words) else ""

    def next(self) -> str:
        word = self.peek()
        if not word:
            raise ValueError("incomplete line (expected another word)")
        self._at += 1
        return word

    def expect(self, wanted: str) -> None:
        word = self.next()
        if word != wanted:
            raise ValueError(f"unexpected word {word!r} (expected {wanted!r})")

    def until(self, closing: str) -> Iterator[None]:
        while self.peek() != closing:
            yield
        self.next()


def _split(line: str) -> Iterator[str]:
    line, at = line.strip(), 0
    while at < len(line):
        found = _TOKEN.match(line, at)
        if found is None:
            raise ValueError(f"unreadable word: {line[at:]!r}")
        yield found[1]
        at = found.end()


def parse(line: str) -> Fcall:
    """Return the message of a line. Raises ValueError."""
    tokens = Tokens(line)
    name = tokens.next()
    if name not in _MESSAGES:
        raise ValueError(f"unknown message {name!r}")
    tokens.expect("tag")
    tag = _parse_number("u16")(tokens)
    message: Fcall = _MESSAGES[name](tag, **_parse_fields(_MESSAGES[name], tokens))
    if tokens.peek():
        raise ValueError(f"unexpected word {tokens.peek()!r} (expected the end of the line)")
    return message


def _parse_fields(kind: type[Any], tokens: Tokens) -> dict[str, Any]:
    fields = {}
    for name, form, mark in layout(kind):
        if mark and tokens.peek() != name:
            continue
        tokens.expect(name)
        fields[name] = _PARSERS[form](tokens)
    return fields


def _parse_number(kind: str) -> Callable[[Tokens], int]:
    def parse_one(tokens: Tokens) -> int:
        word = tokens.next()
        if word in ("~", "NOTAG", "NOFID"):
            return _ONES[kind]
        value = int(word, 8 if kind == "mode" else 10)
        if not 0 <= value <= _ONES[kind]:
            raise ValueError(f"number {word} out of range (expected a {kind})")
        return value

    return parse_one


def _parse_qid(tokens: Tokens) -> Qid:
    word = tokens.next()
    path, version, kind = word.split(".")
    types = {letter: number for number, letter in _LETTERS.items()}
    return Qid(types[kind] if kind in types else int(kind), int(version), int(path))


def _parse_text(tokens: Tokens) -> str:
    word = tokens.next()
    return str(json.loads(word)) if word.startswith('"') else word


def _parse_data(tokens: Tokens) -> bytes:
    word = tokens.next()
    if word.startswith("0x"):
        return bytes.fromhex(word[2:])
    if not word.startswith('"'):
        raise ValueError(f"invalid data {word!r} (expected a JSON string, or 0x and hexadecimal digits)")
    return str(json.loads(word)).encode()


def _parse_list(one: Callable[[Tokens], Any]) -> Callable[[Tokens], tuple[Any, ...]]:
    def parse_all(tokens: Tokens) -> tuple[Any, ...]:
        tokens.expect("[")
        return tuple(one(tokens) for _ in tokens.until("]"))

    return parse_all


def _parse_braces(kind: type[Any]) -> Callable[[Tokens], Any]:
    def parse_all(tokens: Tokens) -> Any:
        tokens.expect("{")
        value = kind(**_parse_fields(kind, tokens))
        tokens.expect("}")
        return value

    return parse_all


_PARSERS: dict[str, Callable[[Tokens], Any]] = {
    **{kind: _parse_number(kind) for kind in _ONES},
    "text": _parse_text,
    "name": _parse_text,
    "names": _parse_list(_parse_text),
    "qid": _parse_qid,
    "qids": _parse_list(_parse_qid),
    "data": _parse_data,
    "stat": _parse_braces(Dir),
    "entries": _parse_list(_parse_braces(Entry)),
}
