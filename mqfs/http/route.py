"""One row of the table of routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

import attrs

from mqfs import limits
from mqfs.http.answers import Answer
from mqfs.http.call import Call
from mqfs.http.target import Path
from mqfs.http.wire import Request

# What a body may be.
MESSAGE, BATCH, STAGED, LINES, COMMANDS = "message", "batch", "staged", "lines", "commands"
NOTE, JSON_NOTE = "note", "json note"
APPEND, VALUE = "append", "value"
_BODIES = {
    "": lambda: limits.CTL_BYTES,
    MESSAGE: lambda: limits.MESSAGE_BYTES,
    BATCH: lambda: limits.HTTP_BATCH_BYTES,
    STAGED: lambda: limits.HTTP_BATCH_BYTES,
    LINES: lambda: limits.MESSAGE_BYTES,
    COMMANDS: lambda: limits.CTL_BYTES,
    NOTE: lambda: limits.NTFY_BYTES,
    APPEND: lambda: limits.DURABLE_BYTES,
    VALUE: lambda: limits.MESSAGE_BYTES,
    JSON_NOTE: lambda: 2 * limits.NTFY_BYTES,  # with its title and the rest
}
# The names of headers and options that make a request whole without a body.
_INSTEAD = {APPEND: ("stream-closed",), NOTE: ("x-message", "message", "m"), VALUE: ("value",)}
Calls = Callable[[Call], Awaitable[Answer]]


class Sends(NamedTuple):
    """The content types and names of headers of a successful answer."""

    kinds: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()


NOTHING = Sends()


@attrs.frozen
class Route:
    """`kind` is what a path means (target.py), `path` an example of one, `body` what a body may be, `example` one.
    `changes`: a GET that no other site's page may make."""

    method: str
    kind: str
    path: str
    call: Calls
    about: str
    verb: str = ""
    options: tuple[str, ...] = ()
    body: str = ""
    statuses: tuple[int, ...] = (200,)
    changes: bool = False
    sends: Sends = NOTHING
    example: str = ""

    @property
    def most_bytes(self) -> int:
        """The most bytes that a body may have."""
        return _BODIES[self.body]()

    def needs_body(self, request: Request, path: Path) -> bool:
        """Whether a request may not be performed without the body that it may have. `path`: its target, parsed."""
        given = {name.lower() for name, value in (*request.headers.items(), *path.options) if value}
        return bool(self.body) and given.isdisjoint(_INSTEAD.get(self.body, ()))
