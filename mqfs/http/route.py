"""A row of the table of routes, and a request on its way through the front end: its user, target and options, and how
its call may wait.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import attrs

from mqfs import limits
from mqfs.engine.tree.tree import Tree
from mqfs.errors import BadRequest, TooLong
from mqfs.http.answers import Answer
from mqfs.http.target import Path, Target
from mqfs.http.wire import Request
from mqfs.model import User
from mqfs.quotas import counted
from mqfs.syntax.duration import parse_duration, parse_number

if TYPE_CHECKING:
    from mqfs.http.connection import Connection

T = TypeVar("T")
WHOLE = 1 << 30  # bytes of a read that returns all


class TimedOut(Exception):
    """A wait reached its time limit and has done nothing."""


@attrs.define
class Call:
    """A request with its user and its target."""

    front: Connection
    user: User
    account: Hashable
    request: Request
    path: Path
    target: Target

    @property
    def tree(self) -> Tree:
        return self.front.tree

    @property
    def owner(self) -> Hashable:
        """The account that the call is charged to: the user of a token, else that of the client (over TCP its block of
        addresses)."""
        return counted(self.account) if self.user.grant is None else self.user.uid

    @property
    def group(self) -> Any:
        """The group of the target."""
        return self.target.node.group

    @property
    def body(self) -> bytes:
        return self.request.body

    @property
    def site(self) -> str:
        """The server's URL without a path, as the client addressed it."""
        scheme = "https" if self.front.is_encrypted(self.request) else "http"
        return f"{scheme}://{self.request.headers.get('host', 'localhost')}"

    def own(self, name: str) -> Any:
        """Return one of the group's own files, such as "ctl"."""
        return self.tree.walk(self.user, self.group, name)

    def has_tag(self, tag: str) -> bool:
        """Whether the client has the version with an entity tag (If-None-Match)."""
        known = [word.strip().removeprefix("W/") for word in self.request.headers.get("if-none-match", "").split(",")]
        return tag in known or "*" in known

    # ------------------------------------------------------------ options

    def check_options(self, known: tuple[str, ...]) -> None:
        """Raise BadRequest for an option that is not known; "h-" stands for all names with that prefix, "*" for any."""
        if "*" in known:
            return
        for name, _ in self.path.options:
            if name not in known and not (name.startswith("h-") and "h-" in known):
                raise BadRequest(f"unknown option {name!r} (expected one of: {' '.join(known) or 'none'})")

    def option(self, name: str, header: str = "") -> str | None:
        """Return the value of an option in the query, else of `header`, else None."""
        for key, value in self.path.options:
            if key == name:
                return value
        return self.request.headers.get(header) if header else None

    def flag(self, name: str, header: str = "") -> bool:
        """Whether an option is set: `name` or `name=yes`; `name=no` is as without it. Raises BadRequest."""
        value = self.option(name, header)
        if value in (None, "no", "false", "0"):
            return False
        if value in ("", "yes", "true", "1"):
            return True
        raise BadRequest(f"{name} {value!r} (expected yes or no)")

    def number(self, name: str, most: int) -> int | None:
        """Return a count from 1 to `most`, or None if it is not given. Raises BadRequest, TooLong."""
        word = self.option(name)
        if word is None:
            return None
        value = parse_number(word)
        if not value:
            raise BadRequest(f"{name} 0 (expected at least 1)")
        if value > most:
            raise TooLong(f"{name} {value} (expected at most {most})")
        return value

    def seconds(self, name: str, most: float = limits.HTTP_WAIT_MOST_S) -> float | None:
        """Return a duration in seconds, at most `most`, or None if it is not given."""
        word = self.option(name)
        return None if word is None else min(parse_duration(word) / 1e9, most)


# The kinds of bodies.
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


# ------------------------------------------------------------ a route


NOTHING = Sends()


@attrs.frozen
class Route:
    """A row of the table of routes. `kind` is the kind of the target (target.py), `path` an example of its path; `body`
    is the kind of body, `example` an example of one. `changes`: a GET that changes something, which another site's page
    may not send."""

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
        """The maximum size of a body in bytes."""
        return _BODIES[self.body]()

    def needs_body(self, request: Request, path: Path) -> bool:
        """Whether a request needs its body: the route has one, and no header or option takes its place. `path`: the
        parsed target."""
        given = {name.lower() for name, value in (*request.headers.items(), *path.options) if value}
        return bool(self.body) and given.isdisjoint(_INSTEAD.get(self.body, ()))
