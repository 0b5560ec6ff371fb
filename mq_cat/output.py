"""Output: formats of mq-cat, standard output, and waiting for the next message.

The program ends, while it waits too, once no process reads its standard output. This module never reads the tree.
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

_CLOSED = select.POLLERR | select.POLLHUP | select.POLLNVAL
_STDOUT = 1
_IMMEDIATE_S = 0.0005
_PAUSE_S = 0.05  # where poll(2) reports "readable" though a read finds nothing

Format = Callable[[Message], bytes]


def raw(message: Message) -> bytes:
    """Return the body, unchanged."""
    return message.body


def timed(message: Message) -> bytes:
    """Return local time, stream and body, separated by blanks."""
    second, ns = divmod(message.time_ns, 1_000_000_000)
    local = datetime.fromtimestamp(second, UTC).astimezone()
    stamp = f"{local:%Y-%m-%dT%H:%M:%S}.{ns // 1000:06d}{local.isoformat()[19:]}"
    return os.fsencode(f"{stamp} {printable(quote(message.stream))} ") + message.body


def as_json(message: Message) -> bytes:
    """Return one JSON object; a body that is not UTF-8 is in base64."""
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
    """Return the record as it is in the log."""
    return message.record


def ended_by_nul(format: Format) -> Format:
    """Return a format that adds a NUL byte to each message."""
    return lambda message: format(message) + b"\0"


def ended_by_newline(format: Format) -> Format:
    """Return a format that adds a newline to each message that does not end with one."""

    def line(message: Message) -> bytes:
        data = format(message)
        return data if data.endswith(b"\n") else data + b"\n"

    return line


class Output:
    """Standard output in one format, with a limit on messages and on idle time."""

    def __init__(self, format: Format, count: int | None, idle_s: float | None, *, write_each: bool = False) -> None:
        self._write_each = write_each  # one write for each message
        self._format = format
        self._remaining = count
        self._idle_s = idle_s
        self._last_message = time.monotonic()
        self._empty_polls = 0  # polls in a row that returned immediately

    @property
    def full(self) -> bool:
        """Whether the limit of messages is reached."""
        return self._remaining == 0

    def put(self, messages: Iterable[Message]) -> int:
        """Write messages up to the limit, in one write if possible; return their number. Raises ToolError,
        BrokenPipeError."""
        chosen = list(messages)[: self._remaining]
        if not chosen:
            return 0
        formatted = map(self._format, chosen)
        for data in formatted if self._write_each else (b"".join(formatted),):
            self._write(data)
        if self._remaining is not None:
            self._remaining -= len(chosen)
        self._last_message = time.monotonic()
        self._empty_polls = 0
        return len(chosen)

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(_STDOUT, rest) :]
            except BlockingIOError:  # standard output is non-blocking
                self._poll({_STDOUT: select.POLLOUT}, None)
            except BrokenPipeError:
                raise  # SIGPIPE is ignored: the caller releases the unwritten messages
            except OSError as error:
                raise ToolError(f"standard output: {os.strerror(error.errno or 0).lower()}") from error

    def wait(self, fd: int, timeout_s: float) -> bool:
        """Wait at most `timeout_s` until `fd` may be readable; return whether it is. Ends the program if no process
        reads its output. Raises ToolError (TIMED_OUT) after --idle."""
        left = timeout_s
        if self._idle_s is not None:
            left = min(left, self._last_message + self._idle_s - time.monotonic())
            if left <= 0:
                raise ToolError("", TIMED_OUT)
        if self._empty_polls > 3:  # a file system without poll(2) always reports "readable"
            pause = min(_PAUSE_S, left)
            self._poll({}, pause)
            left -= pause
        started = time.monotonic()
        ready = self._poll({fd: select.POLLIN}, left)
        self._empty_polls = self._empty_polls + 1 if time.monotonic() - started < _IMMEDIATE_S else 0
        return ready

    def _poll(self, fds: dict[int, int], seconds: float | None) -> bool:
        """Wait at most `seconds` for one of `fds`; return whether one is ready. Ends the program if no process reads
        its output."""
        poll = select.poll()
        poll.register(_STDOUT, fds.get(_STDOUT, 0))
        for fd, mask in fds.items():
            if fd != _STDOUT:
                poll.register(fd, mask)
        timeout = None if seconds is None else max(0, int(seconds * 1000) + 1)
        ready = poll.poll(timeout)
        for fd, event in ready:
            if fd == _STDOUT and event & _CLOSED:
                die_of_sigpipe()
        return bool(ready)


def die_of_sigpipe() -> None:
    """End silently by SIGPIPE."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGPIPE)
