"""Host: the process behind a session, which copies bytes between the tree and a program on a pseudo-terminal.

It runs the program, sets the size of its terminal, and reconnects after a restart of the server. It keeps its position
and the unwritten output (at the limit the program blocks), so input is typed at most once and no output is lost. Input
is lost if the depth of `in` evicts it before the program reads it: the host reports that in `out`. The host ends with
the program, or when its group is removed. It is detached from the user's terminal.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from collections import deque
from collections.abc import Sequence

from mq_tools.cursor import Cursor, Message
from mq_tools.errors import ToolError, close, reason
from mq_tools.pin.session import Session, write_once

READ_BYTES = 65536
UNSENT_BYTES = 1 << 20  # limit of output kept while the tree is unavailable; then the program blocks
LAST_READS = 64  # limit of reads, mostly of 4 KiB, from the terminal of an ended program
RETRY_S = 0.2
LAST_WRITE_S = 3600.0  # last output and status of an ended program wait for the tree at most this long


def start(session: Session, command: Sequence[str], size: tuple[int, int]) -> None:
    """Run the command in a host process of its own, detached from this terminal. Raises ToolError."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _detach(session, command, size, writing)
    os.close(writing)
    with open(reading, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    if answer != b"ok":
        session.remove()
        raise ToolError(os.fsdecode(answer) or f"session {session.id!r}: host did not start")


def _detach(session: Session, command: Sequence[str], size: tuple[int, int], pipe: int) -> None:
    """Detach from the terminal and run the host, in the child. Never returns. Writes "ok" or an error to `pipe`."""
    code = 1
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(null, fd)
        os.closerange(3, pipe)
        os.closerange(pipe + 1, os.sysconf("SC_OPEN_MAX"))
        host = Host(session, command, size)
        os.chdir("/")
        os.write(pipe, b"ok")
        os.close(pipe)
        host.run()
        code = 0
    except ToolError as error:
        os.write(pipe, os.fsencode(str(error)))
    except OSError as error:
        os.write(pipe, os.fsencode(f"session {session.id!r}: {reason(error)}"))
    finally:
        os._exit(code)


class Host:
    """The program, its terminal, and the link to the tree."""

    def __init__(self, session: Session, command: Sequence[str], size: tuple[int, int]) -> None:
        self._session = session
        self._inode = os.stat(session.path).st_ino
        self._link: Link | None = Link(session, "first")
        self._next = 0  # sequence after the last message read
        self._unsent: deque[bytes] = deque()
        self._input = b""  # not yet read by the program
        self._status: int | None = None
        self._removed = False
        self._wake = self._listen_to_signals()
        self._pid, self._master = run_on_terminal(command, size, session)
        os.set_blocking(self._master, False)
        write_once(session.stream("status"), b"running\n")

    def _listen_to_signals(self) -> int:
        reading, writing = os.pipe()
        for fd in (reading, writing):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(writing)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._hang_up())
        return reading

    def run(self) -> None:
        """Run until the program has ended and its status is written, or the group is removed."""
        while self._status is None and not self._removed:
            self._step()
        self._read_terminal(to_the_end=True)
        self._unsent.append(b"")  # stands for the status, see `_send`
        until = time.monotonic() + LAST_WRITE_S
        while self._unsent and not self._removed and time.monotonic() < until:
            self._send()
            if self._unsent and self._link is None:
                self._reconnect()
        os.close(self._master)  # hangs up on other processes of the terminal

    def _step(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        room = sum(map(len, self._unsent)) < UNSENT_BYTES
        poll.register(self._master, (select.POLLIN if room else 0) | (select.POLLOUT if self._input else 0))
        if self._link is not None and not self._input:
            poll.register(self._link.cursor.fd, select.POLLIN)
        ready = dict(poll.poll(None if self._link and not self._unsent else int(RETRY_S * 1000)))
        if self._wake in ready:
            os.read(self._wake, 4096)
        if self._master in ready:
            self._read_terminal(to_the_end=False)
        self._send()
        if self._link is None:
            self._reconnect()
        else:
            self._receive(self._link)
        self._type()
        self._reap(ready.get(self._master, 0))

    def _reap(self, terminal: int) -> None:
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            self._status = code if code >= 0 else 128 - code
        elif terminal & select.POLLHUP:
            time.sleep(RETRY_S / 4)  # the program still runs, without its terminal

    def _hang_up(self) -> None:
        try:
            os.killpg(self._pid, signal.SIGHUP)
            os.killpg(self._pid, signal.SIGCONT)
        except ProcessLookupError:
            pass

    # ------------------------------------------------------------ terminal

    def _read_terminal(self, to_the_end: bool) -> None:
        """Read present output: once, or at most LAST_READS times if `to_the_end`. Bounded: other processes may still
        write to the terminal of an ended program."""
        for _ in range(LAST_READS):
            try:
                data = os.read(self._master, READ_BYTES)
            except OSError:  # no output at present, or no process has the terminal
                return
            if not data:
                return
            self._unsent.append(data)
            if not to_the_end:
                return

    def _type(self) -> None:
        if self._input:
            try:
                self._input = self._input[os.write(self._master, self._input) :]
            except BlockingIOError:
                pass
            except OSError:
                self._input = b""  # no process has the terminal

    def _resize(self, body: bytes) -> None:
        words = body.split()
        if len(words) == 2 and all(word.isdigit() and len(word) <= 5 and int(word) < 65536 for word in words):
            try:
                set_size(self._master, (int(words[0]), int(words[1])))
            except OSError:
                pass

    # ------------------------------------------------------------ tree

    def _send(self) -> None:
        """Write the unsent output to the tree until a write fails. An empty piece stands for the exit status."""
        while self._unsent and self._link is not None:
            try:
                if self._unsent[0]:
                    os.write(self._link.out, self._unsent[0])
                else:
                    write_once(self._session.stream("status"), b"exit %d\n" % (self._status or 0))
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                    self._drop_link()
                else:
                    time.sleep(RETRY_S)
                return
            self._unsent.popleft()

    def _receive(self, link: Link) -> None:
        if self._input:
            return
        try:
            messages = link.cursor.read()
        except EOFError:
            self._drop_link()
            return
        except OSError as error:
            if error.errno == errno.EPIPE:
                self._unsent.append(b"\r\n[pin: input was lost, the program reads slower than it was typed]\r\n")
            elif error.errno != errno.EIO:
                self._drop_link()
            return
        for message in messages or ():
            self._handle(message)

    def _handle(self, message: Message) -> None:
        self._next = message.sequence + 1
        if message.stream == "in":
            self._input += message.body
        elif message.stream == "size":
            self._resize(message.body)

    def _drop_link(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _reconnect(self) -> None:
        """Try once to open the files again. The host ends if its group was removed from a served tree, or replaced."""
        try:
            inode = os.stat(self._session.path).st_ino
        except OSError as error:
            self._removed = error.errno == errno.ENOENT and self._session.is_served
        else:
            self._removed = inode != self._inode and self._session.is_served
            if not self._removed:
                try:
                    self._link = Link(self._session, str(self._next))
                    return
                except (OSError, ToolError):
                    pass
        if not self._removed and self._status is not None:
            time.sleep(RETRY_S)


class Link:
    """The open files of a host in the tree."""

    def __init__(self, session: Session, seek: str) -> None:
        self.cursor = Cursor(session.path)
        try:
            self.cursor.select(("in", "size"))
            self.cursor.command(f"seek {seek}")
            self.out = os.open(session.stream("out"), os.O_WRONLY | os.O_CLOEXEC)
        except BaseException:
            self.cursor.close()
            raise

    def close(self) -> None:
        self.cursor.close()
        close(self.out)


def run_on_terminal(command: Sequence[str], size: tuple[int, int], session: Session) -> tuple[int, int]:
    """Start the command on a new pseudo-terminal. Return process id and descriptor of the master. Raises ToolError."""
    reading, writing = os.pipe()
    pid, master = pty.fork()
    if pid == 0:
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            set_size(0, size)
            os.environ["PIN"] = session.path
            os.execvp(command[0], list(command))
        except OSError as error:
            os.write(writing, reason(error).encode())
        finally:
            os._exit(127)
    os.close(writing)
    with open(reading, "rb") as pipe:
        failure = pipe.read().decode()
    if failure:
        os.close(master)
        os.waitpid(pid, 0)
        raise ToolError(f"{command[0]}: {failure}")
    return pid, master


def set_size(fd: int, size: tuple[int, int]) -> None:
    """Set rows and columns of a terminal; a change sends SIGWINCH to its foreground programs."""
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))


def get_size() -> tuple[int, int] | None:
    """Return rows and columns of the terminal of the standard files; None without one."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        try:
            columns, rows = os.get_terminal_size(stream.fileno())
        except (OSError, ValueError, AttributeError):
            continue
        if rows and columns:
            return rows, columns
    return None
