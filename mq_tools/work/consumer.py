"""The file of a consumer: its path and lease, and its handles.

This module writes commands to `.consumers/NAME`. It never waits, and never runs the command of a message.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

from mq_tools.consumer import message_of
from mq_tools.cursor import Message
from mq_tools.errors import ToolError, close, reason
from mq_tools.times import duration_ns
from mq_tools.tree import CONSUMERS, ctl_of, is_group

READ_BYTES = 1 << 20  # the limit of a read on a mount; the next read returns the rest of a line
_UNKNOWN_LEASE_S = 15.0  # if `ctl` cannot be read
_LEASE_AGE_S = 1.0  # then `ctl` is read again


class ConsumerFile:
    """The path `GROUP/.consumers/NAME`."""

    def __init__(self, path: str) -> None:
        self.label = path  # as typed, for errors
        self.path = os.path.realpath(path)
        folder, self.name = os.path.split(self.path)
        self.group = os.path.dirname(folder)
        self._is_consumer = os.path.basename(folder) == CONSUMERS
        self._lease: float | None = None
        self._read_at = 0.0

    def check(self, *, make: bool = False) -> None:
        """Raise ToolError if the consumer does not exist; `make`: create it first."""
        if not self._is_consumer:
            what = "a stream" if os.path.isfile(self.path) else "not a consumer"
            raise ToolError(f"{self.label}: {what} (expected GROUP/.consumers/NAME)")
        if not is_group(self.group):
            raise ToolError(f"{self.label}: no group {self.group!r} (is the tree mounted?)")
        if make and not os.path.lexists(self.path):
            try:
                os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o666))
            except OSError as error:
                raise ToolError(f"{self.label}: cannot create it: {reason(error)}") from error
        if not os.path.lexists(self.path):
            raise ToolError(f"{self.label}: no such consumer (create it: touch {self.label})")

    def is_removed(self) -> bool:
        """Whether the consumer was removed from a served tree; False while the tree is unmounted."""
        if os.path.lexists(self.path):
            return False
        folder = self.group
        while not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        return is_group(folder)

    def lease_s(self) -> float:
        """Return the lease of a claim in seconds, by the group's `ctl`; 0: a claim does not expire."""
        now = time.monotonic()
        if self._lease is None or now - self._read_at > _LEASE_AGE_S:
            self._lease, self._read_at = self._read_lease(), now
        return self._lease

    def _read_lease(self) -> float:
        if not (rows := [line.split() for line in ctl_of(self.group)]):
            return _UNKNOWN_LEASE_S
        lease = next((words[1] for words in rows if len(words) == 2 and words[0] == "lease"), "0")
        try:
            return duration_ns(lease) / 1e9
        except ValueError:
            return _UNKNOWN_LEASE_S


class Handle:
    """An open consumer in `format json`, with at most one claim. Raises OSError, for the worker to retry."""

    def __init__(self, consumer: ConsumerFile, *, end: bool) -> None:
        self.fd = os.open(consumer.path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._line = b""
        try:
            self.command("format json" + ("\nuntil end" if end else ""))
        except BaseException:
            self.close()
            raise

    def claim_next(self) -> Message | None:
        """Claim the next message; return None if there is none yet. Raises EOFError, OSError, ValueError, KeyError."""
        while not self._line.endswith(b"\n"):
            try:
                data = os.read(self.fd, READ_BYTES)
            except BlockingIOError:
                return None
            if not data:
                raise EOFError
            self._line += data
        line, self._line = self._line, b""
        return message_of(line)

    def command(self, lines: str) -> None:
        """Write commands, such as those that settle the claim. Raises OSError."""
        os.write(self.fd, lines.encode() + b"\n")

    def skip_error(self) -> None:
        """Read the text of a refusal: left unread, it would be taken for the next message."""
        with suppress(OSError):
            os.read(self.fd, READ_BYTES)

    def close(self) -> None:
        close(self.fd)
