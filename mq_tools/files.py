"""The files that commands are written to and answers read from: ctl, .put, .stats, .cursor.

Owns the reading of a refusal's own words: the next read of the same handle.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mq_tools.errors import ToolError, close, reason
from mq_tools.place import Place

READ_BYTES = 1 << 20
_HINTS = {
    errno.EMSGSIZE: "the message is too long; the most is 1,044,480 bytes",
    errno.ENOSPC: "the stream is full, or the disk",
}


@contextmanager
def opened(path: str, flags: int) -> Iterator[int]:
    """Raises ToolError where it cannot be opened."""
    try:
        fd = os.open(path, flags | os.O_CLOEXEC)
    except OSError as error:
        raise ToolError(f"{path}: {reason(error)}") from error
    try:
        yield fd
    finally:
        close(fd)


def write(fd: int, data: bytes, path: str) -> None:
    """One write. Raises ToolError, with the server's own text where the file is open for reading too."""
    try:
        os.write(fd, data)
    except OSError as error:
        text = refusal(fd)
        raise ToolError(f"{path}: {text or _HINTS.get(error.errno or 0) or reason(error)}") from error


def refusal(fd: int) -> str:
    """Why the last write was refused; empty where the file does not say."""
    try:
        os.set_blocking(fd, False)
        return " ".join(os.read(fd, 65536).decode("utf-8", "replace").split())
    except OSError:
        return ""


def tell_ctl(place: Place, lines: Sequence[str]) -> None:
    """Write lines to a group's ctl, all or nothing. Raises ToolError with the server's text."""
    path = place.file("ctl")
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except PermissionError:
        raise ToolError(f"{path}: permission denied; only the group's owner may write it") from None
    except OSError as error:
        raise ToolError(f"{path}: {reason(error)}") from error
    try:
        write(fd, "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape"), path)
    finally:
        close(fd)


def read_whole(path: str) -> str:
    """Raises ToolError."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, ValueError) as error:
        raise ToolError(f"{path}: {reason(error) if isinstance(error, OSError) else error}") from error


def stats_of(group: str) -> dict[str, Any]:
    """A group's counters. Raises ToolError."""
    path = os.path.join(group, ".stats")
    try:
        value = json.loads(read_whole(path))
    except ValueError as error:
        raise ToolError(f"{path}: {error}") from error
    return value if isinstance(value, dict) else {}
