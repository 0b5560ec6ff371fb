"""The words of a command line, quoted as in rc(1)."""

from __future__ import annotations

import re

from mqfs.errors import BadCommand, BadRequest

_WORD = re.compile(r"[^\s'#]+|'[^']*(?:''[^']*)*'")
_PLAIN = re.compile(r"[^\s'#]+\Z")


def split(line: str) -> list[str]:
    """The words of a line, quoted as in rc(1): 'it''s'. An unquoted # begins a comment, but
    one before a dot begins a pattern. Raises BadCommand."""
    if "'" not in line and "#" not in line:
        return line.split()
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
            raise BadCommand("quote not closed (expected another ')")
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


def quote_word(word: str) -> str:
    """The word for a command line. Raises BadRequest where it would end the line."""
    if "\n" in word:
        raise BadRequest(f"invalid argument {word!r}: newline (expected one line)")
    return quote(word)


def command_lines(*lines: str) -> bytes:
    """Commands for one write."""
    return "".join(f"{line}\n" for line in lines).encode()
