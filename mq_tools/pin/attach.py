"""Attach: connect the user's terminal to a session; and `-w`, which only types.

The state of the terminal is restored at the end of the attachment, except after SIGKILL.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from mq_tools.cursor import Cursor, Message
from mq_tools.errors import ToolError, print_line, printable, reason
from mq_tools.pin.host import get_size
from mq_tools.pin.session import GRACE_S, Session, parse_status

PROGRAM = "pin"
READ_BYTES = 65536
CHECK_S = 2.0  # interval of checks for the host of an idle session
RECHECK_S = 0.2  # the same while the host is missing
LOST = (errno.ENOTCONN, errno.ECONNABORTED)  # errors of files whose server ended
LEAVE_S = 2.0  # limit of waiting at the end for a terminal that takes no output
STDIN, STDOUT, STDERR = 0, 1, 2
BEHIND = Message(0, 0, "out", b"\r\n[pin: output was lost, this reader fell behind]\r\n")


class Detached(Exception):
    """A signal ended the attachment."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Attachment:
    """A terminal attached to a session."""

    def __init__(self, session: Session, detach: bytes) -> None:
        self._session = session
        self._detach = detach
        self._cursor = Cursor(session.path)
        self._cursor.select(("out", "status"))
        self._cursor.command("seek first")
        self._in = self._open("in")
        self._size = self._open("size")
        self._output = open_again(STDOUT)
        self._reads_input = True
        self._missing_since: float | None = None
        self._pause_s = RECHECK_S  # the first check is early

    def _open(self, name: str) -> int | None:
        """Open a stream for writing. Return None, to only watch, without permission or if another user owns the stream.
        Raises ToolError."""
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
            print_line(PROGRAM, f"{foreign(self._session)}; read-only")
        return None

    def run(self) -> int:
        """Attach until the session ends, the user detaches, or a signal arrives. Return the exit code: the session's
        status, 0, or 128 + the signal. Raises ToolError."""
        try:
            with signals_raised(), self._terminal():
                status = self._loop()
        except Detached as detached:
            return 128 + detached.number
        if status is None:
            say_detached(self._session)
        return status or 0

    @contextmanager
    def _terminal(self) -> Iterator[None]:
        if not os.isatty(STDIN):
            yield
            return
        settings = termios.tcgetattr(STDIN)

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
            with suppress(OSError, termios.error):  # the terminal may be disconnected
                termios.tcsetattr(STDIN, termios.TCSADRAIN, settings)
                if os.isatty(STDOUT) and takes_output(self._output):
                    os.write(self._output, b"\r\n")

    def _send_size(self, *_: object) -> None:
        size = get_size()
        if size is not None and self._size is not None:
            try:
                os.write(self._size, b"%d %d\n" % size)
            except OSError:
                pass  # the next read fails with the reason

    def _loop(self) -> int | None:
        """Show messages and type input. Return the exit status of the session; None after detaching."""
        while True:
            messages = self._read()
            for message in messages or ():
                if message.stream == "status":
                    if (status := parse_status(message.body)) is not None:
                        return status
                elif not self._show(message.body):
                    return None
            if messages is None and self._wait() and not self._type():
                return None

    def _read(self) -> list[Message] | None:
        try:
            messages = self._cursor.read()
        except EOFError:
            raise ToolError(self._end_reason()) from None
        except OSError as error:
            if error.errno == errno.EPIPE:
                return [BEHIND]
            raise ToolError(self._end_reason(error)) from error
        if messages:
            self._missing_since = None
        return messages

    def _show(self, data: bytes) -> bool:
        """Write output at the speed of the terminal, and forward input meanwhile. Return False after the detach key.
        Raises Detached, ToolError."""
        rest = memoryview(data)
        while rest:
            ready = self._ready(self._output, select.POLLOUT)
            if STDIN in ready and not self._type():
                return False
            if self._output in ready:
                rest = rest[write_some(self._output, rest) :]
        return True

    def _ready(self, fd: int, event: int, most_s: float | None = None) -> set[int]:
        """Wait at most `most_s` seconds for an event of a file, or for input. Return the ready descriptors."""
        poll = select.poll()
        poll.register(fd, event)
        if self._reads_input:
            poll.register(STDIN, select.POLLIN)
        return {fd for fd, _ in poll.poll(None if most_s is None else int(most_s * 1000))}

    def _end_reason(self, error: OSError | None = None, file: str = ".cursor") -> str:
        """Return the reason why the attachment ends. `error`: of `file`; None at its end of file."""
        if self._session.is_served:
            if not self._session.exists:
                return f"session {self._session.id!r} was removed"
            if error is not None and error.errno not in LOST:
                return f"{self._session.stream(file)}: {reason(error)}"
        return f"lost the tree at {self._session.mount} (once it is served again: pin -a {self._session.id})"

    def _check_host(self) -> None:
        if self._session.has_host():
            self._missing_since = None
            return
        now = time.monotonic()
        if self._missing_since is None:
            self._missing_since = now
        elif now - self._missing_since > GRACE_S and self._session.exit_status() is None:
            raise ToolError(self._session.host_lost())

    def _wait(self) -> bool:
        """Wait for input, output or the next check of the host. Return whether there is input. Raises ToolError."""
        ready = self._ready(self._cursor.fd, select.POLLIN, self._pause_s)
        if not ready:
            self._check_host()
            self._pause_s = CHECK_S if self._missing_since is None else RECHECK_S
        return STDIN in ready

    def _type(self) -> bool:
        """Forward typed input. Return False after the detach key. Raises Detached, ToolError."""
        try:
            data = os.read(STDIN, READ_BYTES)
        except OSError as error:
            if error.errno == errno.EIO:
                raise Detached(signal.SIGHUP) from None  # the terminal was disconnected
            raise input_failed(error) from error
        if not data:
            self._reads_input = False  # end of a file or pipe: only watch
            return True
        terminal = os.isatty(STDIN)
        text, key, _ = data.partition(self._detach) if terminal and self._detach else (data, b"", b"")
        if text and self._in is not None:
            try:
                os.write(self._in, text)
            except OSError as error:
                raise ToolError(self._end_reason(error, "in")) from error
        return not key


@contextmanager
def signals_raised() -> Iterator[None]:
    """Raise Detached for signals that would end the program, so that the terminal is restored."""

    def detach(number: int, _frame: FrameType | None) -> None:
        raise Detached(number)

    fatal = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
    before: dict[int, Any] = {number: signal.signal(number, detach) for number in fatal}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def open_again(fd: int) -> int:
    """Return a descriptor for an output. A terminal is opened again with O_NONBLOCK, as other programs share the first
    descriptor; another file is returned as it is."""
    if os.isatty(fd):
        with suppress(OSError):
            return os.open(os.ttyname(fd), os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    return fd


def takes_output(fd: int) -> bool:
    """Whether a file takes output within LEAVE_S."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(LEAVE_S * 1000))


def say_detached(session: Session) -> None:
    """Say on standard error that the session was detached, unless that takes no output within LEAVE_S."""
    fd = open_again(STDERR)
    if takes_output(fd):
        with suppress(OSError):
            os.write(fd, os.fsencode(f"{PROGRAM}: {printable(f'detached from {session.id}')}\n"))


def write_some(fd: int, data: memoryview) -> int:
    """Write at most PIPE_BUF bytes, which a writable pipe takes without blocking. Return the number of bytes written.
    Raises Detached, ToolError."""
    try:
        return os.write(fd, data[: select.PIPE_BUF])
    except BlockingIOError:
        return 0
    except OSError as error:
        if error.errno == errno.EIO:
            raise Detached(signal.SIGHUP) from None  # the terminal was disconnected
        raise ToolError(f"standard output: {reason(error)}") from error


def input_failed(error: OSError) -> ToolError:
    return ToolError(f"standard input: {reason(error)}")


def is_trusted(fd: int) -> bool:
    """Whether the stream belongs to the user or to root: typed input may be a password."""
    return os.fstat(fd).st_uid in (os.geteuid(), 0)


def foreign(session: Session) -> str:
    return f"session {session.id!r} belongs to another user (expected you or root)"


def attach(session: Session, detach: bytes) -> int:
    """Attach this terminal; return the exit code. Raises ToolError."""
    session.check()
    is_own = False
    with suppress(OSError):
        is_own = os.path.samefile(os.environ.get("PIN") or "", session.path)  # also if mounted at another path
    if is_own:
        raise ToolError(f"cannot attach session {session.id!r} to itself")
    return Attachment(session, detach).run()


def read_piece() -> bytes:
    """Return a piece of standard input; empty at its end. Raises ToolError."""
    try:
        return os.read(STDIN, READ_BYTES)
    except OSError as error:
        raise input_failed(error) from error


def write(session: Session, words: Sequence[str]) -> None:
    """Type the words and a newline, or all of standard input. Raises ToolError."""
    session.check_running()
    path = session.stream("in")
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        if not is_trusted(fd):
            raise ToolError(foreign(session))
        if words:
            os.write(fd, os.fsencode(" ".join(words)) + b"\n")
        else:
            _write_input(fd, path)
        os.close(fd)
    except OSError as error:
        raise ToolError(f"{path}: {reason(error)}") from error


def _write_input(fd: int, path: str) -> None:
    """Type all of standard input. After a refused write, move the position of a file back to the first untyped byte.
    Raises ToolError, which says how much was typed."""
    typed = 0
    while data := read_piece():
        try:
            os.write(fd, data)
        except OSError as error:
            with suppress(OSError):  # a pipe
                os.lseek(STDIN, -len(data), os.SEEK_CUR)
            raise ToolError(f"{path}: {reason(error)} (typed: {typed} bytes of standard input)") from error
        typed += len(data)
