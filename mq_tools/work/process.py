"""The command of a message: its input, environment, time-out, and the outcome by its exit code.

Each command has its own process group. This module never reads the tree.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import attrs

from mq_tools.cursor import Message

DATA_ERROR, TRY_AGAIN = 65, 75  # EX_DATAERR and EX_TEMPFAIL of sysexits.h
NOT_EXECUTABLE, NOT_FOUND = 126, 127  # as by a shell
_LOOK_S = 0.05  # interval of checks whether the rest of a process group has ended
_BUSY = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


class CannotRun(Exception):
    """The command can never run for this message."""


class Busy(Exception):
    """The system cannot run a command at present."""


@attrs.frozen
class Outcome:
    """The consumer command that settles a message, and its reason."""

    command: str  # ack, nack, release or `dead REASON`
    text: str  # of the log line; empty on success


def arguments_of(command: Sequence[str], body: bytes) -> list[bytes]:
    """Return the words of the command. `{}` becomes the body without a final newline, except in the first word."""
    text = body.removesuffix(b"\n")
    words = [os.fsencode(word) for word in command]
    return words[:1] + [word.replace(b"{}", text) for word in words[1:]]


def environment_of(message: Message, group: str, consumer: str) -> dict[str, str]:
    """Return the environment variables of the command. Variables that would have a NUL byte are omitted."""
    env = {f"MQ_HEADER_{re.sub(r'[^A-Za-z0-9_]', '_', key)}": value for key, value in message.headers.items()}
    env |= {f"MQ_HEADER_{key}": value for key, value in message.headers.items() if "=" not in key}
    env |= {key.upper(): message.headers[key] for key in ("traceparent", "tracestate") if key in message.headers}
    second, ns = divmod(message.time_ns, 1_000_000_000)
    env |= {"MQ_GROUP": group, "MQ_CONSUMER": consumer, "MQ_STREAM": message.stream, "MQ_TIME": f"{second}.{ns:09d}"}
    env |= {"MQ_SEQUENCE": str(message.sequence), "MQ_DELIVERIES": str(message.deliveries)}
    return {key: value for key, value in env.items() if "\0" not in key + value}


def _as_input(body: bytes) -> int:
    """Return an anonymous file with the body: a command that does not read its input blocks no writer."""
    fd = os.memfd_create("message", os.MFD_CLOEXEC)
    rest = memoryview(body)
    while rest:
        rest = rest[os.write(fd, rest) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


class Process:
    """A running command with its message."""

    def __init__(
        self, command: Sequence[str], message: Message, env: Mapping[str, str], timeout_s: float | None
    ) -> None:
        self.message = message
        self.started = time.monotonic()
        self.signal_at = None if timeout_s is None else self.started + timeout_s
        self.timed_out = False
        self.look_at: float | None = None  # next check of the process group, whose end no signal reports
        self.renew_at: float | None = None
        self.lease_lost = False  # the message may be with another worker
        try:
            stdin = _as_input(message.body)
        except OSError as error:
            raise Busy(os.strerror(error.errno or 0).lower()) from error
        try:
            self._process = subprocess.Popen(
                arguments_of(command, message.body), stdin=stdin, env={**os.environ, **env}, process_group=0
            )
        except ValueError as error:
            raise CannotRun("message has a NUL byte, which an argument cannot hold") from error
        except OSError as error:
            if error.errno == errno.E2BIG:
                raise CannotRun("message too long for an argument") from error
            if error.errno in _BUSY:
                raise Busy(os.strerror(error.errno or 0).lower()) from error
            raise
        finally:
            os.close(stdin)

    def has_ended(self) -> bool:
        """Whether the command has ended. After a time-out its whole process group must have ended too; after the grace,
        kill the remaining processes."""
        if self.timed_out and self._process.returncode is None:
            if os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return False
            if self.signal_at is not None and group_runs(self._process.pid):
                self.look_at = time.monotonic() + _LOOK_S
                return False
            self.signal(signal.SIGKILL)  # before it is reaped and its number reused
        return self._process.poll() is not None

    def check_time(self, now: float, grace_s: float) -> None:
        """Send SIGTERM to the process group at the time-out, SIGKILL `grace_s` later."""
        if self.signal_at is not None and now >= self.signal_at:
            self.signal(signal.SIGKILL if self.timed_out else signal.SIGTERM)
            self.signal_at = None if self.timed_out else now + grace_s
            self.timed_out = True

    def signal(self, number: int) -> None:
        """Send a signal to the process group, unless the command was reaped."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.wait()

    def outcome(self) -> Outcome:
        """Return the outcome of an ended command: by its exit code, or `nack` after a time-out."""
        status = self._process.returncode
        if self.timed_out:
            return Outcome("nack", "timed out")
        if status == 0:
            return Outcome("ack", "")
        if status == DATA_ERROR:
            return Outcome(f"dead exit code {status}", f"exit code {status}, now a dead letter")
        if status == TRY_AGAIN:
            return Outcome("nack", f"exit code {status}, will be retried")
        if status < 0:
            return Outcome("nack", f"killed by {_signal_name(-status)}")
        return Outcome("nack", f"exit code {status}")


def group_runs(group: int) -> bool:
    """Whether a process of the group runs; zombies do not count."""
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{process}/stat", "rb") as file:
                state, _, its_group = file.read().rpartition(b")")[2].split()[:3]
        except OSError:
            continue  # it has ended
        if int(its_group) == group and state not in (b"Z", b"X"):
            return True
    return False


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
