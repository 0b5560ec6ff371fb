"""Session: one group of the tree whose streams are a terminal.

Owns the layout (`in`, `out`, `size`, `status`), its making, and what can be told about a session from its files alone:
whether it is there, has ended, or lost its host. Never runs a program and never touches a terminal.
"""

from __future__ import annotations

import json
import os
import time

from mq_tools.errors import ToolError, close, reason

STREAMS = ("in", "out", "size", "status")
CONFIGURATION = b"replay all\ndepth 4M\nsync 1s\n"
GRACE_S = 1.5  # what a host may take to come back after the server was restarted
_LOOK_S = 0.1


class Session:
    """A session by its mount and id. Knows names; holds nothing open."""

    def __init__(self, mount: str, id: str) -> None:
        check_id(id)
        self.mount = os.path.abspath(mount)
        self.id = id
        self.path = os.path.join(self.mount, id)

    def stream(self, name: str) -> str:
        return os.path.join(self.path, name)

    def check_mount(self) -> None:
        """Raises ToolError where the mount does not serve a tree with cursors."""
        if not self.served:
            raise ToolError(
                f"{self.mount}: no mqfs tree is mounted here; start one, or name its mount with -m or $MQFS"
            )

    @property
    def served(self) -> bool:
        return os.path.lexists(os.path.join(self.mount, ".cursor"))

    @property
    def there(self) -> bool:
        return os.path.lexists(self.path)

    def check(self) -> None:
        """Raises ToolError where there is no such session."""
        self.check_mount()
        if not self.there:
            raise ToolError(f"no session {self.id!r} in {self.mount}; make one with: pin -c {self.id}")
        for name in STREAMS:
            try:
                os.stat(self.stream(name))
            except FileNotFoundError:
                raise ToolError(f"{self.path} is not a session: it has no stream {name!r}") from None
            except OSError as error:
                raise ToolError(f"{self.path}: {reason(error)}") from error

    def make(self) -> None:
        """The group and its streams, for its maker alone. Raises ToolError where it is there already."""
        self.check_mount()
        try:
            os.mkdir(self.path, 0o700)
        except FileExistsError:
            raise ToolError(self._occupied()) from None
        except OSError as error:
            raise ToolError(f"{self.path}: {reason(error)}") from error
        try:
            write_once(os.path.join(self.path, "ctl"), CONFIGURATION)
            for name in STREAMS:
                os.close(os.open(self.stream(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except OSError as error:
            self.remove()
            raise ToolError(f"{self.path}: {reason(error)}") from error

    def _occupied(self) -> str:
        try:
            self.check()
        except ToolError as problem:
            return str(problem)
        if (status := self.ended()) is not None:
            return f"session {self.id!r} has ended (status {status}); to use the name again: rm -r {self.path}"
        if not self.hosted(GRACE_S):
            return self.dead_line()
        return f"session {self.id!r} exists already; attach with: pin -a {self.id}"

    def dead_line(self) -> str:
        return f"session {self.id!r} is dead: its host is gone; to use the name again: rm -r {self.path}"

    def remove(self) -> None:
        """Take back what `make` made."""
        try:
            for name in STREAMS:
                if os.path.lexists(self.stream(name)):
                    os.unlink(self.stream(name))
            os.rmdir(self.path)
        except OSError:
            pass

    def ended(self) -> int | None:
        """The status its command ended with; None while it runs."""
        try:
            fd = os.open(self.stream("status"), os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            raise ToolError(f"{self.stream('status')}: {reason(error)}") from error
        try:
            while data := os.read(fd, 4096):
                if (status := exit_status(data)) is not None:
                    return status
        except OSError:
            pass
        finally:
            close(fd)
        return None

    def hosted(self, within_s: float = 0.0) -> bool:
        """Whether the session's host is there: it alone has `out` open for writing. May wait for one to come."""
        until = time.monotonic() + within_s
        while not self._host_listed():
            if time.monotonic() >= until:
                return False
            time.sleep(_LOOK_S)
        return True

    def _host_listed(self) -> bool:
        try:
            with open(os.path.join(self.path, ".who"), encoding="utf-8") as who:
                rows = [json.loads(line) for line in who]
        except (OSError, ValueError):
            return False
        return any(row["file"] == "out" and "w" in row["mode"] for row in rows)

    def check_running(self) -> None:
        """Raises ToolError where there is nobody to read the session's input."""
        self.check()
        status = self.ended()
        if status is not None:
            raise ToolError(f"session {self.id!r} has ended (status {status})")
        if not self.hosted(GRACE_S):
            raise ToolError(self.dead_line())


def exit_status(message: bytes) -> int | None:
    """What an `exit N` message in `status` says."""
    words = message.split()
    return int(words[1]) if len(words) == 2 and words[0] == b"exit" and words[1].isdigit() else None


def check_id(id: str) -> None:
    """Raises ToolError where it cannot be the name of a group."""
    wrong = ""
    if not id or id in ("ctl", "order") or id.startswith("."):
        wrong = "is reserved" if id else "is empty"
    elif any(c < " " or c == "\x7f" for c in id):
        wrong = "has a control character in it"
    elif "/" in id:
        wrong = "has a '/' in it; the mount is given with -m"
    elif len(os.fsencode(id)) > 255:
        wrong = "is longer than 255 bytes"
    elif any("\ud800" <= c <= "\udfff" for c in id):
        wrong = "is not valid UTF-8"
    if wrong:
        raise ToolError(f"session id {id!r} {wrong}", 2)


def write_once(path: str, data: bytes) -> None:
    """One write to a file that is there."""
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)
