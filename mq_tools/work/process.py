"""The command that runs for a message: its input, environment, time-out, and what its end says.

Owns the process group of each command. Never reads the tree.
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

from mq_tools.work.consumer import Message

DATA_ERROR, TRY_AGAIN = 65, 75  # EX_DATAERR and EX_TEMPFAIL of sysexits.h
NOT_EXECUTABLE, NOT_FOUND = 126, 127  # as a shell has it
_BUSY = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


class CannotRun(Exception):
    """This message cannot be given to this command at all."""


class Busy(Exception):
    """The system cannot run a command just now."""


@attrs.frozen
class Outcome:
    """What to tell the consumer about a message, and why."""

    command: str  # ack, nack, release or `dead REASON`
    text: str  # for people; empty where it went well


def arguments_of(command: Sequence[str], body: bytes) -> list[bytes]:
    """The command's words, `{}` replaced in all but the first by the body less one final newline."""
    text = body.removesuffix(b"\n")
    words = [os.fsencode(word) for word in command]
    return words[:1] + [word.replace(b"{}", text) for word in words[1:]]


def environment_of(message: Message, group: str, consumer: str) -> dict[str, str]:
    """What the command finds in its environment. A header that cannot stand there is left out."""
    env = {f"MQ_HEADER_{re.sub(r'[^A-Za-z0-9_]', '_', key)}": value for key, value in message.headers.items()}
    env |= {f"MQ_HEADER_{key}": value for key, value in message.headers.items() if "=" not in key}
    env |= {"MQ_GROUP": group, "MQ_CONSUMER": consumer, "MQ_STREAM": message.stream, "MQ_TIME": message.time}
    env |= {"MQ_SEQUENCE": str(message.sequence), "MQ_DELIVERIES": str(message.deliveries)}
    return {key: value for key, value in env.items() if "\0" not in key + value}


def _as_input(body: bytes) -> int:
    """A file in memory: the command may read it, all or nothing of it, at its leisure."""
    fd = os.memfd_create("message", os.MFD_CLOEXEC)
    rest = memoryview(body)
    while rest:
        rest = rest[os.write(fd, rest) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


class Running:
    """A command at work on a message."""

    def __init__(
        self, command: Sequence[str], message: Message, env: Mapping[str, str], timeout_s: float | None
    ) -> None:
        self.message = message
        self.started = time.monotonic()
        self.signal_at = None if timeout_s is None else self.started + timeout_s
        self.timed_out = False
        self.renew_at: float | None = None
        self.lost = False  # somebody else may have the message by now
        try:
            stdin = _as_input(message.body)
        except OSError as error:
            raise Busy(os.strerror(error.errno or 0).lower()) from error
        try:
            self._process = subprocess.Popen(
                arguments_of(command, message.body), stdin=stdin, env={**os.environ, **env}, process_group=0
            )
        except ValueError as error:
            raise CannotRun("the message has a NUL byte, which no argument can hold") from error
        except OSError as error:
            if error.errno == errno.E2BIG:
                raise CannotRun("the message is too long for an argument") from error
            if error.errno in _BUSY:
                raise Busy(os.strerror(error.errno or 0).lower()) from error
            raise
        finally:
            os.close(stdin)

    def ended(self) -> bool:
        """Whether it has ended. After a time-out what it left behind is ended with it."""
        if self.timed_out:
            done = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if done is not None:
                self.signal(signal.SIGKILL)  # while its number, and so its group's, is still taken
        return self._process.poll() is not None

    def check_time(self, now: float, grace_s: float) -> None:
        """TERM at the time-out, KILL after the grace."""
        if self.signal_at is not None and now >= self.signal_at:
            self.signal(signal.SIGKILL if self.timed_out else signal.SIGTERM)
            self.signal_at = None if self.timed_out else now + grace_s
            self.timed_out = True

    def signal(self, number: int) -> None:
        """To its whole process group, while the command itself was not waited for."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.wait()

    def verdict(self) -> Outcome:
        """What its end says about the message."""
        status = self._process.returncode
        if self.timed_out:
            return Outcome("nack", "took too long")
        if status == 0:
            return Outcome("ack", "")
        if status == DATA_ERROR:
            return Outcome(f"dead exit code {status}", f"exit code {status}, now a dead letter")
        if status == TRY_AGAIN:
            return Outcome("nack", f"exit code {status}, will be tried again")
        if status < 0:
            return Outcome("nack", f"ended by {_signal_name(-status)}")
        return Outcome("nack", f"exit code {status}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
