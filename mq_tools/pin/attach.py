"""Attach: the user's terminal on a session, and `-w`, which only types.

Owns the terminal's state: whatever way the attachment ends (but SIGKILL), the terminal is as it was found.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from mq_tools.cursor import Cursor, Message
from mq_tools.errors import ToolError, note, reason
from mq_tools.pin.host import get_size
from mq_tools.pin.session import GRACE_S, Session, exit_status

PROGRAM = "pin"
READ_BYTES = 65536
LOOK_S = 2.0  # how often a silent session is asked whether its host is still there
LOOK_AGAIN_S = 0.2  # and where it was not
STDIN, STDOUT = 0, 1


class Detached(Exception):
    """A signal asks us to go."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Attachment:
    """One terminal on one session."""

    def __init__(self, session: Session, detach: bytes) -> None:
        self._session = session
        self._detach = detach
        self._cursor = Cursor(session.path)
        self._cursor.select(("out", "status"))
        self._cursor.command("seek first")
        self._in = self._open("in")
        self._size = self._open("size")
        self._typing = True
        self._missing_since: float | None = None
        self._pause_s = LOOK_AGAIN_S  # the first look comes soon

    def _open(self, name: str) -> int | None:
        """None where we may only look on: without w, or where what is typed would reach another user."""
        try:
            fd = os.open(self._session.stream(name), os.O_WRONLY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno == errno.EACCES:
                return None
            raise ToolError(f"{self._session.stream(name)}: {reason(error)}") from error
        if is_trusted(fd):
            return fd
        os.close(fd)
        if name == "in":
            note(PROGRAM, f"{foreign(self._session)}; only looking on")
        return None

    def run(self) -> int:
        """Until the session ends (its status), the user detaches (0) or a signal says so."""
        try:
            with signals_raised(), self._terminal():
                status = self._loop()
        except Detached as left:
            return 128 + left.number
        if status is None:
            note(PROGRAM, f"detached from {self._session.id}")
        return status or 0

    @contextmanager
    def _terminal(self) -> Iterator[None]:
        if not os.isatty(STDIN):
            yield
            return
        found = termios.tcgetattr(STDIN)

        def take_over(*_: object) -> None:
            tty.setraw(STDIN, termios.TCSADRAIN)
            self._send_size()

        before = {
            signal.SIGWINCH: signal.signal(signal.SIGWINCH, self._send_size),
            signal.SIGCONT: signal.signal(signal.SIGCONT, take_over),
        }
        try:
            take_over()
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)
            with suppress(OSError, termios.error):  # the terminal may be gone
                termios.tcsetattr(STDIN, termios.TCSADRAIN, found)
                if os.isatty(STDOUT):
                    os.write(STDOUT, b"\r\n")

    def _send_size(self, *_: object) -> None:
        size = get_size()
        if size is not None and self._size is not None:
            try:
                os.write(self._size, b"%d %d\n" % size)
            except OSError:
                pass  # told by the next read

    def _loop(self) -> int | None:
        """The status of the session's command, or None for a detachment."""
        while True:
            messages = self._news()
            for message in messages or ():
                if message.stream == "status":
                    if (status := exit_status(message.body)) is not None:
                        return status
                else:
                    write_all(STDOUT, message.body)
            if messages is None and self._wait() and not self._type():
                return None

    def _news(self) -> list[Message] | None:
        try:
            messages = self._cursor.take()
        except EOFError:
            raise ToolError(self._why_over()) from None
        except OSError as error:
            if error.errno == errno.EPIPE:
                write_all(STDOUT, b"\r\n[pin: output was lost, this reader fell behind]\r\n")
                return []
            raise ToolError(self._why_over()) from error
        if messages:
            self._missing_since = None
        return messages

    def _why_over(self) -> str:
        if self._session.served and not self._session.there:
            return f"session {self._session.id!r} was removed"
        return f"lost the tree at {self._session.mount}; when it is served again: pin -a {self._session.id}"

    def _look_for_host(self) -> None:
        if self._session.hosted():
            self._missing_since = None
            return
        now = time.monotonic()
        if self._missing_since is None:
            self._missing_since = now
        elif now - self._missing_since > GRACE_S and self._session.ended() is None:
            raise ToolError(self._session.dead_line())

    def _wait(self) -> bool:
        """Whether there is something typed; returns also for news of the session, and now and then."""
        poll = select.poll()
        poll.register(self._cursor.fd, select.POLLIN)
        if self._typing:
            poll.register(STDIN, select.POLLIN)
        ready = poll.poll(int(self._pause_s * 1000))
        if not ready:
            self._look_for_host()
            self._pause_s = LOOK_S if self._missing_since is None else LOOK_AGAIN_S
        return any(fd == STDIN for fd, _ in ready)

    def _type(self) -> bool:
        """Pass on what was typed; False where that was the detach key."""
        try:
            data = os.read(STDIN, READ_BYTES)
        except OSError:
            raise Detached(signal.SIGHUP) from None
        if not data:
            self._typing = False  # end of a file or pipe: look on
            return True
        terminal = os.isatty(STDIN)
        typed, key, _ = data.partition(self._detach) if terminal and self._detach else (data, b"", b"")
        if typed and self._in is not None:
            try:
                os.write(self._in, typed)
            except OSError:
                raise ToolError(self._why_over()) from None
        return not key


@contextmanager
def signals_raised() -> Iterator[None]:
    """Signals that end us become an exception, so that everything is put back."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise Detached(number)

    ours = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
    before: dict[int, Any] = {number: signal.signal(number, leave) for number in ours}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def write_all(fd: int, data: bytes) -> None:
    """All of it, also where somebody made the descriptor non-blocking."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:
            select.select([], [fd], [])
        except OSError as error:
            if error.errno == errno.EIO:
                raise Detached(signal.SIGHUP) from None  # the terminal is gone
            raise ToolError(f"standard output: {reason(error)}") from error


def is_trusted(fd: int) -> bool:
    """Whether the stream belongs to the user or to root: what is typed may be a password."""
    return os.fstat(fd).st_uid in (os.geteuid(), 0)


def foreign(session: Session) -> str:
    return f"session {session.id!r} belongs to another user (expected you or root)"


def attach(session: Session, detach: bytes) -> int:
    """Attach this terminal: the exit code."""
    session.check()
    if os.environ.get("PIN") == session.path:
        raise ToolError(f"this is session {session.id!r}: attached to itself it would repeat itself for ever")
    return Attachment(session, detach).run()


def write(session: Session, words: Sequence[str]) -> None:
    """Type the words and a newline, or all of standard input."""
    session.check_running()
    path = session.stream("in")
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        if not is_trusted(fd):
            raise ToolError(foreign(session))
        if words:
            os.write(fd, os.fsencode(" ".join(words)) + b"\n")
        else:
            while data := os.read(sys.stdin.fileno(), READ_BYTES):
                os.write(fd, data)
        os.close(fd)
    except OSError as error:
        raise ToolError(f"{path}: {reason(error)}") from error
