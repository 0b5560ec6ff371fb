"""One row of the table of routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

import attrs

from mqfs import limits
from mqfs.http.answers import Answer
from mqfs.http.call import Call

# What a body may be.
MESSAGE, BATCH, STAGED, LINES, COMMANDS = "message", "batch", "staged", "lines", "commands"
NOTE, JSON_NOTE = "note", "json note"
APPEND = "append"
_BODIES = {
    "": lambda: limits.CTL_BYTES,
    MESSAGE: lambda: limits.MESSAGE_BYTES,
    BATCH: lambda: limits.HTTP_BATCH_BYTES,
    STAGED: lambda: limits.HTTP_BATCH_BYTES,
    LINES: lambda: limits.MESSAGE_BYTES,
    COMMANDS: lambda: limits.CTL_BYTES,
    NOTE: lambda: limits.NTFY_BYTES,
    APPEND: lambda: limits.DURABLE_BYTES,
    JSON_NOTE: lambda: 2 * limits.NTFY_BYTES,  # with its title and the rest
}
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
