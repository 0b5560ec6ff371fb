"""Output: where messages go, and every way of waiting for the next one.

Owns the formats of mq-cat and the end of its reader: whoever waits here is told when the other side of standard output
has gone away. Never reads the tree.
"""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

from mq_tools.cursor import Message, quote
from mq_tools.errors import TIMED_OUT, ToolError, printable

_GONE = select.POLLERR | select.POLLHUP | select.POLLNVAL
_AT_ONCE_S = 0.0005
_LAZY_S = 0.05  # how long to wait where poll says "readable" and a read says "nothing"

Format = Callable[[Message], bytes]


def raw(message: Message) -> bytes:
    """The message as it was written."""
    return message.body


def timed(message: Message) -> bytes:
    """Local time, stream, body, with blanks between."""
    second, ns = divmod(message.time_ns, 1_000_000_000)
    local = datetime.fromtimestamp(second, UTC).astimezone()
    stamp = f"{local:%Y-%m-%dT%H:%M:%S}.{ns // 1000:06d}{local.isoformat()[19:]}"
    return os.fsencode(f"{stamp} {printable(quote(message.stream))} ") + message.body


def as_json(message: Message) -> bytes:
    """One JSON object, the body in base64 where it is not UTF-8."""
    second, ns = divmod(message.time_ns, 1_000_000_000)
    try:
        body = f'"body":{json.dumps(message.body.decode(), ensure_ascii=False)}'
    except UnicodeDecodeError:
        body = f'"body_base64":"{base64.b64encode(message.body).decode()}"'
    name = json.dumps(message.stream, ensure_ascii=False)
    more = f',"deliveries":{message.deliveries}' if message.deliveries else ""
    if message.headers:
        more += f',"headers":{json.dumps(dict(message.headers), ensure_ascii=False)}'
    return f'{{"sequence":{message.sequence},"stream":{name},"time":{second}.{ns:09d}{more},{body}}}'.encode()


def as_record(message: Message) -> bytes:
    """The bytes of the log."""
    return message.record


def ended_by_nul(format: Format) -> Format:
    """Each message followed by a NUL byte."""
    return lambda message: format(message) + b"\0"


def ended_by_newline(format: Format) -> Format:
    """Each message ended by a newline, its own where it has one."""

    def line(message: Message) -> bytes:
        data = format(message)
        return data if data.endswith(b"\n") else data + b"\n"

    return line


class Output:
    """Standard output in one format, with a bound on messages and on idle time."""

    def __init__(
        self, format: Format, count: int | None, idle_s: float | None, *, each: bool = False, fd: int = 1
    ) -> None:
        self._fd = fd
        self._each = each  # one write for each message
        self._format = format
        self._left = count
        self._idle_s = idle_s
        self._news = time.monotonic()
        self._fruitless = 0

    @property
    def full(self) -> bool:
        """As many messages as were asked for have been written."""
        return self._left == 0

    def put(self, messages: Iterable[Message]) -> int:
        """Write messages, in one go as far as the other side takes them. How many were asked for, and so written."""
        chosen = list(messages)[: self._left]
        if not chosen:
            return 0
        shaped = map(self._format, chosen)
        for data in shaped if self._each else (b"".join(shaped),):
            self._write(data)
        if self._left is not None:
            self._left -= len(chosen)
        self._news = time.monotonic()
        self._fruitless = 0
        return len(chosen)

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:  # somebody made our standard output non-blocking
                self._poll({self._fd: select.POLLOUT}, None)
            except BrokenPipeError:
                raise  # where SIGPIPE has not ended us, it is to be known what was not written
            except OSError as error:
                raise ToolError(f"standard output: {os.strerror(error.errno or 0).lower()}") from error

    def wait(self, fd: int, at_most_s: float) -> bool:
        """Return when `fd` may be readable: True; or after that time: False.

        Ends the program when nobody reads its output any more, or at the time-out of `--idle`.
        """
        left = at_most_s
        if self._idle_s is not None:
            left = min(left, self._news + self._idle_s - time.monotonic())
            if left <= 0:
                raise ToolError("", TIMED_OUT)
        if self._fruitless > 3:  # a file system without poll says "readable" at all times
            pause = min(_LAZY_S, left)
            self._poll({}, pause)
            left -= pause
        started = time.monotonic()
        ready = self._poll({fd: select.POLLIN}, left)
        self._fruitless = self._fruitless + 1 if time.monotonic() - started < _AT_ONCE_S else 0
        return ready

    def _poll(self, fds: dict[int, int], seconds: float | None) -> bool:
        """Whether one of them is ready. Ends the program when nobody reads its output any more."""
        poll = select.poll()
        poll.register(self._fd, fds.get(self._fd, 0))
        for fd, mask in fds.items():
            if fd != self._fd:
                poll.register(fd, mask)
        timeout = None if seconds is None else max(0, int(seconds * 1000) + 1)
        ready = poll.poll(timeout)
        for fd, event in ready:
            if fd == self._fd and event & _GONE:
                die_of_sigpipe()
        return bool(ready)


def die_of_sigpipe() -> None:
    """End as a program does that writes where nobody reads: silently."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGPIPE)
