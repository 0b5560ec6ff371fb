"""A consumer as files: where it is, its handles, what a message is, and why it may be gone.

Owns the commands written to `.consumers/NAME` and the reading of `format json`. Never waits, never runs anything.
"""

from __future__ import annotations

import base64
import json
import os
import time
from contextlib import suppress
from typing import Any

import attrs

from mq_tools.errors import ToolError, close, reason
from mq_tools.times import duration_ns

READ_BYTES = 1 << 20  # the most that one read through a mount can give; the rest of a line comes with the next
_UNKNOWN_LEASE_S = 15.0  # where `ctl` may not be read
_LOOK_S = 1.0  # the lease is looked up again after this


@attrs.frozen
class Message:
    """One message as a consumer hands it out."""

    sequence: int
    stream: str
    time: str  # UNIX seconds with all decimals
    deliveries: int
    headers: dict[str, str]
    body: bytes

    @property
    def label(self) -> str:
        return f"{self.stream} {self.sequence}"


def message_of(line: bytes) -> Message:
    """The message of a line of `format json`. Raises ValueError, KeyError."""
    row: dict[str, Any] = json.loads(line, parse_float=str)
    body = row["body"].encode() if "body" in row else base64.b64decode(row["body_base64"])
    return Message(
        sequence=row["sequence"],
        stream=row["stream"],
        time=str(row["time"]),
        deliveries=row.get("deliveries", 1),
        headers=row.get("headers", {}),
        body=body,
    )


def seconds_of(word: str) -> float | None:
    """The seconds of a duration as `ctl` prints it."""
    try:
        return duration_ns(word) / 1e9
    except ValueError:
        return None


class Place:
    """`GROUP/.consumers/NAME`."""

    def __init__(self, path: str) -> None:
        self.given = path
        self.path = os.path.realpath(path)
        folder, self.name = os.path.split(self.path)
        self.group = os.path.dirname(folder)
        self._named = os.path.basename(folder) == ".consumers"
        self._lease: float | None = None
        self._looked = 0.0

    def check(self, *, make: bool = False) -> None:
        """Raises ToolError where it is no consumer; may make it first."""
        if not self._named:
            what = "is a stream" if os.path.isfile(self.path) else "is not a consumer"
            raise ToolError(f"{self.given}: {what}; a consumer is a file GROUP/.consumers/NAME")
        if not is_group(self.group):
            raise ToolError(f"{self.given}: no group {self.group}; is the tree mounted?")
        if make and not os.path.lexists(self.path):
            try:
                os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o666))
            except OSError as error:
                raise ToolError(f"{self.given}: cannot be made: {reason(error)}") from error
        if not os.path.lexists(self.path):
            raise ToolError(f"{self.given}: no such consumer; make it with: touch {self.given}")

    def gone(self) -> bool:
        """Whether it was removed, where a tree that is merely away for a while may come back with it."""
        if os.path.lexists(self.path):
            return False
        folder = self.group
        while not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        return is_group(folder)

    def lease_s(self) -> float:
        """How long a claim may be held, by the group's `ctl`; 0: no bound."""
        now = time.monotonic()
        if self._lease is None or now - self._looked > _LOOK_S:
            self._lease, self._looked = self._read_lease(), now
        return self._lease

    def _read_lease(self) -> float:
        try:
            with open(os.path.join(self.group, "ctl"), encoding="utf-8") as ctl:
                rows = [line.split() for line in ctl]
        except (OSError, ValueError):
            return _UNKNOWN_LEASE_S
        said = [seconds_of(words[1]) for words in rows if len(words) == 2 and words[0] == "lease"]
        return 0.0 if not said else said[0] if said[0] is not None else _UNKNOWN_LEASE_S


def is_group(path: str) -> bool:
    return os.path.lexists(os.path.join(path, "ctl")) and os.path.lexists(os.path.join(path, "order"))


class Handle:
    """An open consumer in `format json`, which has at most one message claimed."""

    def __init__(self, place: Place, *, end: bool) -> None:
        self.fd = os.open(place.path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._read = b""
        try:
            self.command("format json" + ("\nuntil end" if end else ""))
        except BaseException:
            self.close()
            raise

    def take(self) -> Message | None:
        """Claim the next message; None where there is none now. Raises EOFError, OSError; then the handle is done."""
        while not self._read.endswith(b"\n"):
            try:
                data = os.read(self.fd, READ_BYTES)
            except BlockingIOError:
                return None
            if not data:
                raise EOFError
            self._read += data
        line, self._read = self._read, b""
        return message_of(line)

    def command(self, lines: str) -> None:
        """Say something about the claim. Raises OSError."""
        os.write(self.fd, lines.encode() + b"\n")

    def clear(self) -> None:
        """Read away why the last command was refused: else it would be the next message."""
        with suppress(OSError):
            os.read(self.fd, READ_BYTES)

    def close(self) -> None:
        close(self.fd)
