"""Open, write and read the command files of a group: ctl, .put, .stats, .cursor.

After a refused write, the next read of the same handle returns the text of the refusal.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mq_tools.errors import ToolError, close, reason

READ_BYTES = 1 << 20
INPUT_BYTES = 1 << 21  # more than any write takes: an endless input is read up to here, and refused
_HINTS = {
    errno.EMSGSIZE: "message too long (expected at most 1,044,480 bytes)",
    errno.ENOSPC: "stream or disk full",
}


@contextmanager
def open_file(path: str, flags: int, mode: int = 0o777) -> Iterator[int]:
    """Yield an open descriptor, and close it after the block. `mode`: of a created file. Raises ToolError."""
    try:
        fd = os.open(path, flags | os.O_CLOEXEC, mode)
    except OSError as error:
        raise ToolError(f"{path}: {reason(error)}") from error
    try:
        yield fd
    finally:
        close(fd)


def write(fd: int, data: bytes, path: str) -> None:
    """Write the data in one write. Raises ToolError: with the server's text if possible, or for a short write."""
    try:
        count = os.write(fd, data)
    except OSError as error:
        text = refusal(fd) or logged_refusal(path)
        raise ToolError(f"{path}: {text or _HINTS.get(error.errno or 0) or reason(error)}") from error
    if count < len(data):
        raise ToolError(f"{path}: cut short: {count} of {len(data)} bytes written")


def refusal(fd: int) -> str:
    """Return the server's text of the last refused write, or "" if there is none. Makes the handle non-blocking."""
    try:
        os.set_blocking(fd, False)
        return " ".join(os.read(fd, 65536).decode("utf-8", "replace").split())
    except OSError:
        return ""


def logged_refusal(path: str) -> str:
    """Return the text of this process's last refused write from `.errors` in the folder of the file, or ""."""
    try:
        rows = map(json.loads, read_lines(os.path.join(os.path.dirname(path), ".errors")))
        return next((str(row["text"]) for row in reversed(list(rows)) if row["pid"] == os.getpid()), "")
    except (ToolError, ValueError, KeyError):
        return ""


def read_answer(fd: int, path: str) -> bytes:
    """Return the server's answer to the last write. Raises ToolError."""
    try:
        return os.read(fd, 100)
    except OSError as error:
        raise ToolError(f"{path}: {reason(error)}") from error


def read_input() -> bytes:
    """Return all of standard input, at most INPUT_BYTES. Raises ToolError."""
    try:
        return sys.stdin.buffer.read(INPUT_BYTES) or b""  # None: there is nothing yet in a non-blocking one
    except OSError as error:
        raise ToolError(f"standard input: {reason(error)}") from error


def lines_of_input() -> Iterator[bytes]:
    """Yield the lines of standard input with their newlines, a longer one in parts of INPUT_BYTES. Raises ToolError."""
    try:
        while line := sys.stdin.buffer.readline(INPUT_BYTES):
            yield line
    except OSError as error:
        raise ToolError(f"standard input: {reason(error)}") from error


def write_ctl(group: str, lines: Sequence[str]) -> None:
    """Write lines to a group's ctl, all or nothing. Raises ToolError with the server's text."""
    path = os.path.join(group, "ctl")
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except PermissionError:
        raise ToolError(f"{path}: permission denied (expected the group's owner)") from None
    except OSError as error:
        raise ToolError(f"{path}: {reason(error)}") from error
    try:
        write(fd, "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape"), path)
    finally:
        close(fd)


def read_text(path: str) -> str:
    """Return the text of a whole file. Raises ToolError."""
    try:
        with open(path, encoding="utf-8", newline="\n") as file:
            return file.read()
    except (OSError, ValueError) as error:
        raise ToolError(f"{path}: {reason(error) if isinstance(error, OSError) else error}") from error


def read_lines(path: str) -> list[str]:
    """Return the lines of a file of the tree. `splitlines` is wrong here: it also splits at characters that a name or a
    pattern may have. Raises ToolError."""
    return read_text(path).removesuffix("\n").split("\n")


def stats_of(group: str) -> dict[str, Any]:
    """Return the counters of a group. Raises ToolError."""
    path = os.path.join(group, ".stats")
    try:
        value = json.loads(read_text(path))
    except ValueError as error:
        raise ToolError(f"{path}: {error}") from error
    return value if isinstance(value, dict) else {}
