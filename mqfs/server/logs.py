"""The server's log: a line an event on standard error, and a limit for lines of one kind."""

from __future__ import annotations

import logging
import sys
import time
from typing import TextIO

from mqfs import limits
from mqfs.errors import printable
from mqfs.server.progress import paused


class Sparing(logging.Filter):
    """Pass limits.LOG_LINES of a kind in limits.LOG_S; the next line has the number of suppressed ones.

    Lines of one statement are of one kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[tuple[str, int], tuple[float, int]] = {}  # (since when, how many since) of each

    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.pathname, record.lineno
        since, count = self._kinds.get(kind, (0.0, 0))
        now = time.monotonic()
        if not count or now - since >= limits.LOG_S:
            left_out = count - limits.LOG_LINES
            since, count = now, 0
            if left_out > 0:
                record.msg = f"{record.getMessage()} ({left_out} such lines left out)"
                record.args = None
        self._kinds[kind] = since, count + 1
        return count < limits.LOG_LINES


class OneLine(logging.Formatter):
    """Escapes control characters, which names of others may have; a traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))


class Handler(logging.StreamHandler[TextIO]):
    """Writes above a line of progress."""

    def emit(self, record: logging.LogRecord) -> None:
        with paused():
            super().emit(record)


def set_up() -> None:
    """Log to standard error: standard output may carry 9P."""
    handler = Handler(sys.stderr)
    handler.setFormatter(OneLine("mqfs: %(message)s"))
    handler.addFilter(Sparing())
    logging.root.handlers[:] = [handler]
    logging.root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    whole = Handler(sys.stderr)  # of audit lines none is left out
    whole.setFormatter(handler.formatter)
    audit = logging.getLogger("mqfs.audit")
    audit.handlers[:], audit.propagate = [whole], False


__all__ = ["OneLine", "Sparing", "set_up"]
