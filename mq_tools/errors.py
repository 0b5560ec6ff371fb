"""ToolError: what ends a tool with one clear line on standard error, and the exit codes that mq-cat and pin share."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

USAGE = 2
TIMED_OUT = 124  # as timeout(1) has it
INTERRUPTED = 130  # 128 + SIGINT


class ToolError(Exception):
    """One line for standard error, and the exit code that goes with it."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


def reason(error: OSError) -> str:
    """The words of an errno, small as they stand behind a colon."""
    text = os.strerror(error.errno) if error.errno else str(error)
    return text[:1].lower() + text[1:]


def printable(text: str) -> str:
    """The text for a person: what a terminal would act on (control characters, changes of direction) is escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def note(program: str, text: str) -> None:
    """Say something on standard error, whatever has become of it."""
    try:
        sys.stderr.write(f"{program}: {printable(text)}\n")
        sys.stderr.flush()
    except OSError:
        pass


def close(fd: int) -> None:
    """Close a file for reading, which is closed even where its server cannot be told any more."""
    with suppress(OSError):
        os.close(fd)
