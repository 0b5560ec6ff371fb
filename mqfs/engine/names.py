"""File names and the words of a command line. Owns what a legal name is and the quoting of rc(1)."""

from __future__ import annotations

import re

from mqfs import limits
from mqfs.errors import BadCommand, BadName

RESERVED = frozenset({"ctl", "order", "", ".", ".."})

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_WORD = re.compile(r"[^\s'#]+|'(?:[^']|'')*'")
_PLAIN = re.compile(r"[^\s'#]+\Z")


def check_name(name: str) -> str:
    """The name, if a user may give it to a stream or group; raises BadName."""
    if name in RESERVED or name.startswith("."):
        raise BadName(f"{name!r} is reserved; take one that does not begin with a dot and is not ctl or order")
    if "/" in name:
        raise BadName(f"{name!r} holds a slash")
    check_control(name)
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise BadName("a name is valid UTF-8") from None
    if size > limits.NAME_BYTES:
        raise BadName(f"a name has at most {limits.NAME_BYTES} bytes, this one {size}")
    return name


def check_control(name: str) -> None:
    """Raises BadName where a terminal, a log or a line of commands would take the name for something else."""
    if _CONTROL.search(name):
        raise BadName(f"{name!r} holds a control character")


def one_line(name: str) -> str:
    """A name in a file that is read line by line: those of older stores may hold newlines."""
    return name.replace("\n", "\\n")


def with_suffix(name: str, suffix: str) -> str:
    """The name and a suffix, the name cut at a character where both have too many bytes."""
    kept = name.encode()[: limits.NAME_BYTES - len(suffix.encode())]
    return kept.decode(errors="ignore") + suffix


def split(line: str) -> list[str]:
    """The words of a line, quoted as in rc(1): 'it''s'. From an unquoted # on it is a comment, but for one with a dot
    behind it, which begins a pattern. Raises BadCommand."""
    words: list[str] = []
    at, glued = 0, False
    while at < len(line):
        if line[at].isspace():
            at, glued = at + 1, False
            continue
        if line[at] == "#":
            if not glued and line[at + 1 : at + 2] != ".":
                break
            words[-1:] = [words[-1] + "#"] if glued else [*words[-1:], "#"]
            at, glued = at + 1, True
            continue
        match = _WORD.match(line, at)
        if match is None:
            raise BadCommand("a quote is not closed")
        word = match.group()
        if word[0] == "'":
            word = word[1:-1].replace("''", "'")
        if glued:
            words[-1] += word
        else:
            words.append(word)
        at, glued = match.end(), True
    return words


def quote(word: str) -> str:
    """The word so that `split` gives it back."""
    return word if _PLAIN.match(word) else "'" + word.replace("'", "''") + "'"
