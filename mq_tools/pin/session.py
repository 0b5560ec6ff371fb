"""Session: a group of the tree whose streams are a terminal: `in`, `out`, `size` and `status`.

This module creates and removes sessions, and reads their state from the files of the group: whether a session exists,
has ended, or has lost its host. It never runs a program, and never touches a terminal.
"""

from __future__ import annotations

import json
import os
import time

from mq_tools.errors import USAGE, ToolError, close, reason

STREAMS = ("in", "out", "size", "status")
CONFIGURATION = b"replay all\ndepth 4M\nsync 1s\n"
GRACE_S = 1.5  # time for a host to reconnect after a restart of the server
_POLL_S = 0.1


class Session:
    """A session by its mount and id. Holds no open file."""

    def __init__(self, mount: str, id: str) -> None:
        check_id(id)
        self.mount = os.path.abspath(mount)
        self.id = id
        self.path = os.path.join(self.mount, id)

    def stream(self, name: str) -> str:
        return os.path.join(self.path, name)

    def check_mount(self) -> None:
        """Raise ToolError if the mount does not serve a tree with cursors."""
        if not self.is_served:
            raise ToolError(f"{self.mount}: no tree mounted there (start a server, or set -m or $MQFS)")

    @property
    def is_served(self) -> bool:
        return os.path.lexists(os.path.join(self.mount, ".cursor"))

    @property
    def exists(self) -> bool:
        return os.path.lexists(self.path)

    def check(self) -> None:
        """Raise ToolError if the session does not exist, or its group is not a session."""
        self.check_mount()
        if not self.exists:
            raise ToolError(f"no session {self.id!r} in {self.mount} (create it: pin -c {self.id})")
        for name in STREAMS:
            try:
                os.stat(self.stream(name))
            except FileNotFoundError:
                raise ToolError(f"{self.path}: not a session: no stream {name!r} in it") from None
            except OSError as error:
                raise ToolError(f"{self.path}: {reason(error)}") from error

    def create(self) -> None:
        """Create the group and its streams, private to the user. Raises ToolError, also if the group exists."""
        self.check_mount()
        try:
            os.mkdir(self.path, 0o700)
        except FileExistsError:
            raise ToolError(self._conflict()) from None
        except OSError as error:
            raise ToolError(f"{self.path}: {reason(error)}") from error
        try:
            write_once(os.path.join(self.path, "ctl"), CONFIGURATION)
            for name in STREAMS:
                os.close(os.open(self.stream(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except OSError as error:
            self.remove()
            raise ToolError(f"{self.path}: {reason(error)}") from error

    def _conflict(self) -> str:
        """Return the error text for an id in use."""
        try:
            self.check()
        except ToolError as error:
            return str(error)
        if (status := self.exit_status()) is not None:
            return f"session {self.id!r} ended: status {status} (remove it: rm -r {self.path})"
        if not self.has_host(GRACE_S):
            return self.host_lost()
        return f"session {self.id!r} exists (attach: pin -a {self.id})"

    def host_lost(self) -> str:
        return f"session {self.id!r} has lost its host (remove it: rm -r {self.path})"

    def remove(self) -> None:
        """Remove the group and its streams; errors are ignored."""
        try:
            for name in STREAMS:
                if os.path.lexists(self.stream(name)):
                    os.unlink(self.stream(name))
            os.rmdir(self.path)
        except OSError:
            pass

    def exit_status(self) -> int | None:
        """Return the exit status of the command; None while it runs. Raises ToolError."""
        try:
            fd = os.open(self.stream("status"), os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            raise ToolError(f"{self.stream('status')}: {reason(error)}") from error
        try:
            while data := os.read(fd, 4096):
                if (status := parse_status(data)) is not None:
                    return status
        except OSError:
            pass
        finally:
            close(fd)
        return None

    def has_host(self, timeout_s: float = 0.0) -> bool:
        """Whether the host runs: only a host has `out` open for writing. Wait for a host up to `timeout_s`."""
        until = time.monotonic() + timeout_s
        while not self._host_listed():
            if time.monotonic() >= until:
                return False
            time.sleep(_POLL_S)
        return True

    def _host_listed(self) -> bool:
        try:
            with open(os.path.join(self.path, ".who"), encoding="utf-8") as who:
                rows = [json.loads(line) for line in who]
        except (OSError, ValueError):
            return False
        return any(row["file"] == "out" and "w" in row["mode"] for row in rows)

    def check_running(self) -> None:
        """Raise ToolError if no host reads the input of the session."""
        self.check()
        status = self.exit_status()
        if status is not None:
            raise ToolError(f"session {self.id!r} ended: status {status}")
        if not self.has_host(GRACE_S):
            raise ToolError(self.host_lost())


def parse_status(message: bytes) -> int | None:
    """Return N of a message `exit N` in `status`; None for another message."""
    words = message.split()
    if len(words) != 2 or words[0] != b"exit" or not words[1].isdigit() or len(words[1]) > 3:
        return None
    return int(words[1])


def check_id(id: str) -> None:
    """Raise ToolError if the id cannot be the name of a group."""
    fault = ""
    if not id or id in ("ctl", "order") or id.startswith("."):
        fault = "reserved" if id else "empty"
    elif any(c < " " or c == "\x7f" for c in id):
        fault = "has a control character"
    elif "/" in id:
        fault = "has a '/' (the mount is set by -m)"
    elif len(os.fsencode(id)) > 255:
        fault = "too long (expected at most 255 bytes)"
    elif any("\ud800" <= c <= "\udfff" for c in id):
        fault = "not valid UTF-8"
    if fault:
        raise ToolError(f"invalid session id {id!r}: {fault}", USAGE)


def write_once(path: str, data: bytes) -> None:
    """Write the data in one write to an existing file. Raises OSError."""
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)
