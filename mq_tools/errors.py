"""ToolError, which ends a tool with one line on standard error, the exit codes of the tools, and a time limit."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

USAGE = 2
TIMED_OUT = 124  # as timeout(1)
INTERRUPTED = 130  # 128 + SIGINT


class ToolError(Exception):
    """One line for standard error, and the exit code."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


def reason(error: OSError) -> str:
    """Return the text of an error, its first letter in lower case for use after a colon."""
    text = os.strerror(error.errno) if error.errno else str(error)
    return text[:1].lower() + text[1:]


def printable(text: str) -> str:
    """Escape control characters and changes of direction: the text is safe for a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def print_line(program: str, text: str) -> None:
    """Print a line on standard error; a failure to do so is ignored."""
    try:
        sys.stderr.write(f"{program}: {printable(text)}\n")
        sys.stderr.flush()
    except OSError:
        pass


@contextmanager
def alarm(seconds: float, error: Exception) -> Iterator[None]:
    """Raise `error` in the block once it has run for `seconds`. For the main thread: it uses SIGALRM."""

    def ring(*_: object) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def close(fd: int) -> None:
    """Close a descriptor. Errors are ignored: the descriptor is closed even if the server is unreachable."""
    with suppress(OSError):
        os.close(fd)
