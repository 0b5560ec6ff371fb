"""What the library's values look like in commands and `.put`: names quoted, durations, positions.

Owns the printing; the language is the tree's, mqfs(4).
"""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from typing import TypeAlias

from mqfs.client.types import Body
from mqfs.errors import BadName, BadRequest
from mqfs.syntax import quoting
from mqfs.syntax.names import RESERVED

Duration: TypeAlias = float | str | timedelta  # seconds, or as in ctl: "30s"
Moment: TypeAlias = float | str | timedelta | datetime  # UNIX seconds; or ago: "10m", timedelta


def quote(word: str) -> str:
    """As in rc(1)."""
    if "\n" in word:
        raise BadRequest(f"{word!r} cannot stand in a command: it holds a newline")
    return quoting.quote(word)


def file_name(name: str) -> str:
    """The name of a stream, group or consumer, to be joined to a path. What else it may be the tree says: a store has
    names that were given before a rule was."""
    if name in RESERVED or name.startswith(".") or "/" in name or "\0" in name:
        raise BadName(f"{name!r} is reserved or a path (expected no '/', no '.' first, neither ctl nor order)")
    return name


def duration(value: Duration) -> str:
    """In whole milliseconds, rounded up: what is not nothing stays so."""
    if isinstance(value, str):
        return value
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if not 0 <= seconds < 1e9:
        raise BadRequest(f"a duration of {seconds} seconds; 0 or more is right")
    return f"{math.ceil(round(seconds * 1_000, 3))}ms" if seconds else "0"


def moment(value: Moment) -> str:
    """As `seek` has it."""
    if isinstance(value, str | timedelta):
        return f"-{duration(value)}"
    seconds = value.timestamp() if isinstance(value, datetime) else value
    return f"@{seconds:.6f}"


def view(body: object) -> memoryview:
    """Of a body that is no text. Raises TypeError."""
    try:
        return memoryview(body)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"a message's body is {type(body).__name__} (expected bytes or str)") from None


def data(body: Body) -> bytes:
    """A message's bytes; text is UTF-8."""
    it = body.encode() if isinstance(body, str) else body if isinstance(body, bytes) else bytes(view(body))
    if not it:
        raise BadRequest("a message has at least one byte; ctl('eof STREAM') writes an end mark")
    return it


def commands(*lines: str) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()
