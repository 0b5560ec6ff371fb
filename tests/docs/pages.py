"""The EXAMPLES of the manual pages, read from their mdoc source: what is to be typed, and what the page says is shown.

Reads the little mdoc that examples are written in. Never runs anything. Unknown mdoc is an error, so that
no example is passed over in silence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from tests.support import ROOT

PAGES = sorted((ROOT / "man").glob("*.[1-9]"))

_ESCAPES = {r"\e": "\\", r"\-": "-", r"\&": "", r"\(dq": '"'}


class Line(NamedTuple):
    """One line to be typed."""

    typed: str
    shown: list[str]  # what the page shows below it; only where the page writes `$ ` before what is typed


class Block(NamedTuple):
    """One display: `.Bd -literal` to `.Ed`, or a `.Dl`."""

    lines: list[Line]

    @property
    def text(self) -> str:
        return "\n".join(line.typed for line in self.lines)


def examples(source: str) -> list[Block]:
    """The displays of the EXAMPLES section, in order."""
    section = re.search(r"^\.Sh EXAMPLES\n(.*?)(?=^\.Sh |\Z)", source, re.MULTILINE | re.DOTALL)
    assert section, "no EXAMPLES"
    found: list[Block] = []
    rows = iter(section[1].splitlines())
    for row in rows:
        if row.startswith(".Dl "):
            assert '"' not in row, f"mdoc takes double quotes away: {row}"
            found.append(_block([row.removeprefix(".Dl ")]))
        elif row.startswith((".Bd", ".D1")):
            assert row.startswith(".Bd -literal"), f"not a literal display: {row}"
            found.append(_block(_display(rows)))
    return found


def _display(rows: Iterator[str]) -> list[str]:
    inside: list[str] = []
    for row in rows:
        if row == ".Ed":
            return inside
        assert not row.startswith("."), f"a macro in a literal display: {row}"
        inside.append(row)
    raise AssertionError(".Bd without .Ed")


def _block(rows: list[str]) -> Block:
    plain = [_unescaped(row) for row in rows]
    if not plain[0].startswith("$ "):
        return Block([Line(row, []) for row in plain])
    lines: list[Line] = []
    for row in plain:
        if row.startswith("$ "):
            lines.append(Line(row[2:], []))
        else:
            lines[-1].shown.append(row)
    return Block(lines)


def _unescaped(row: str) -> str:
    def one(match: re.Match[str]) -> str:
        assert match[0] in _ESCAPES, f"unknown escape {match[0]} in: {row}"
        return _ESCAPES[match[0]]

    return re.sub(r"\\(?:\(..|.)", one, row)
