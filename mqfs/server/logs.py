"""The server's log: a line per event on standard error, as text or JSON, and a limit for lines of one kind.

No line has the body of a message or a secret. If standard error leads to systemd's journal, each line begins with its
priority, as of sd-daemon(3), and has no time, which the journal adds.

The progress of a command that may take long is one line on a terminal's standard error, and nothing elsewhere. It
appears after `DELAY_S`, is drawn by a thread of rich, and is removed at the end. If Ctrl-C ends the command, the last
text is printed. Other writes to the terminal have to be made within `paused()`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from logging.handlers import SysLogHandler
from socket import socket as Socket
from typing import TYPE_CHECKING, TextIO

from mqfs import limits
from mqfs.errors import BadConfig, printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

DELAY_S = 0.5  # a shorter command shows nothing
_A_SECOND = 5  # redraws of the line


class Progress:
    """The line of progress. A call sets its text."""

    def __init__(self) -> None:
        self.text = ""
        self._started = time.monotonic()
        self._live: Live | None = None
        self._timer: threading.Timer | None = None
        self._lock = threading.RLock()  # guards `_live` and `_timer`

    def __call__(self, text: str) -> None:
        self.text = text

    def __enter__(self) -> Progress:
        global _shown
        if sys.stderr is not None and sys.stderr.isatty():
            self._timer = threading.Timer(DELAY_S, self._show)
            self._timer.daemon = True
            self._timer.start()
            _shown = self
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        global _shown
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            if self._live is not None:
                self._live.stop()
            self._timer = self._live = _shown = None
        if kind is KeyboardInterrupt:
            print(f"mqfs: interrupted{': ' if self.text else ''}{self.text}", file=sys.stderr)

    def _show(self) -> None:
        from rich.console import Console  # here: most commands end sooner, or have no terminal
        from rich.live import Live

        with self._lock:
            if self._timer is not None:
                console = Console(stderr=True, highlight=False)
                self._live = Live(
                    console=console,
                    get_renderable=self._line,
                    refresh_per_second=_A_SECOND,
                    transient=True,
                    redirect_stdout=False,
                    redirect_stderr=False,
                )
                self._live.start(refresh=True)

    def _line(self) -> RenderableType:
        from rich.text import Text

        seconds = time.monotonic() - self._started
        return Text(f"{seconds:5.1f} s   {self.text}   Ctrl-C ends it", no_wrap=True, overflow="ellipsis")

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Remove the line within this context."""
        with self._lock:
            if self._live is not None:
                self._live.stop()
            try:
                yield
            finally:
                if self._live is not None:
                    self._live.start(refresh=True)


_shown: Progress | None = None


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Remove the line of progress within this context, so that other lines are printed above it."""
    shown = _shown  # once: another thread may end it
    with shown.away() if shown is not None else contextlib.nullcontext():
        yield


# ------------------------------------------------------------ the log


LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
_PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}


class Sparing(logging.Filter):
    """A filter that passes limits.LOG_LINES of a kind in limits.LOG_S. The next line has the number of suppressed
    lines.

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
    """A formatter that escapes control characters, which users' names may contain. A traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))


class JsonLine(logging.Formatter):
    """A formatter of an event as an object on a line, in ASCII, of at most limits.LOG_LINE_BYTES.

    It has time, level, logger, message and the fields of the event; `exception` is a traceback. If the line is too
    long, its longest values are cut.
    """

    def __init__(self, *, timed: bool = True) -> None:
        super().__init__()
        self._timed = timed

    def format(self, record: logging.LogRecord) -> str:
        values = {"time": _moment(record.created)} if self._timed else {}
        values |= {"level": record.levelname.lower(), "logger": record.name}
        fields: dict[str, str] = getattr(record, "fields", {})
        # The text of an event with fields is its name and the fields; here the fields are values of their own.
        values["message"] = record.msg.removesuffix(" %s") if fields else record.getMessage()
        values |= fields
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        while len(line := json.dumps(values)) > limits.LOG_LINE_BYTES:
            longest = max(values, key=lambda key: len(values[key]))
            values[longest] = values[longest][: len(values[longest]) // 2] + "..."
        return line


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Handler(logging.StreamHandler[TextIO]):
    """A handler that writes above a line of progress."""

    def __init__(self, stream: TextIO, form: str = "text") -> None:
        super().__init__(stream)
        self._in_journal = leads_to_journal(stream)
        if form == "json":
            self.setFormatter(JsonLine(timed=not self._in_journal))
        else:
            self.setFormatter(OneLine("%(message)s" if self._in_journal else "mqfs: %(message)s"))

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if not self._in_journal:
            return text
        priority = f"<{_PRIORITIES.get(record.levelno, 6)}>"
        return priority + text.replace("\n", f"\n{priority}")

    def emit(self, record: logging.LogRecord) -> None:
        with paused():
            super().emit(record)


def leads_to_journal(stream: TextIO) -> bool:
    """Whether the journal reads a stream: JOURNAL_STREAM has the device and the inode of its socket."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def check(level: str, form: str) -> None:
    """Check level and format of the log. Raises BadConfig."""
    for option, word, words in (("--log-level", level, LEVELS), ("--log-format", form, FORMATS)):
        if word not in words:
            raise BadConfig(f"{option} {word!r}: unknown (expected one of {', '.join(words)})")


def set_up(level: str = "info", form: str = "text") -> None:
    """Log to standard error: standard output may carry 9P. A later call changes level and format."""
    handler = Handler(sys.stderr, form)
    handler.addFilter(Sparing())
    logging.root.handlers[:] = [handler]
    logging.root.setLevel(level.upper())
    logging.captureWarnings(True)
    audit = logging.getLogger("mqfs.audit")  # none of its lines is left out
    audit.handlers[:], audit.propagate = [Handler(sys.stderr, form)], False
    audit.setLevel(logging.INFO)


class Syslog(SysLogHandler):
    """A handler that waits for a busy daemon, but not for one that hangs: after a line that it did not accept in time,
    further lines are dropped at once, until it accepts one again."""

    socket: Socket
    _is_stuck = False

    def emit(self, record: logging.LogRecord) -> None:
        self._is_stuck, was_stuck = False, self._is_stuck
        with contextlib.suppress(OSError):  # closed if there was no daemon
            self.socket.settimeout(0.0 if was_stuck else limits.SYSLOG_S)
        super().emit(record)

    def _connect_unixsocket(self, address: str) -> None:  # the base class's second try, after an error
        super()._connect_unixsocket(address)  # type: ignore[misc]
        self.socket.setblocking(False)

    def handleError(self, record: logging.LogRecord) -> None:
        self._is_stuck = True


def move_to_syslog(path: str = "/dev/log") -> None:
    """Log to syslog from now on, for a process that leaves its terminal; without syslog, log nothing.

    Args:
        path: The socket of syslog.
    """
    for logger in (logging.root, logging.getLogger("mqfs.audit")):
        handler: logging.Handler
        try:
            handler = Syslog(path, Syslog.LOG_DAEMON)
        except OSError:
            handler = logging.NullHandler()
        handler.setFormatter(OneLine("mqfs[%(process)d]: %(message)s"))
        logger.handlers[:] = [handler]
    logging.root.handlers[0].addFilter(Sparing())  # no line of the audit is left out
