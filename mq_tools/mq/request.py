"""`mq request`: a message, and the reply to it.

The reply is written to a stream that is made for it, with the sticky bit: it goes with the file that this program has
open, so also when the program is killed.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from mq_tools.errors import TIMED_OUT, ToolError, reason
from mq_tools.files import READ_BYTES, open_file, write
from mq_tools.tree import TreePath

_MODE = 0o1622  # everybody may write a reply


def request(stream: TreePath, body: bytes, headers: Mapping[str, str], timeout_s: float) -> bytes:
    """The reply to a message. Raises ToolError."""
    name = f"reply.{secrets.token_hex(12)}"
    with _replies(stream.file(name)) as replies, _alarm(timeout_s, stream.name):
        keys = {"stream": stream.name, "ttl": f"{max(int(timeout_s * 1000), 1)}ms", "kept": True}
        head = json.dumps({**keys, "headers": {**headers, "reply-to": name}}, ensure_ascii=False)
        path = stream.file(".put")
        with open_file(path, os.O_RDWR) as fd:
            write(fd, head.encode("utf-8", "surrogateescape") + b"\n" + body, path)
            answer = os.read(fd, 100).split()
            if not answer:
                raise ToolError(f"{stream.path}: discarded: stream is full")
            if answer[-1] == b"0":
                raise ToolError(f"{stream.path}: no reply possible (expected a consumer or a reader)")
        try:
            return os.read(replies, READ_BYTES)
        except OSError as error:
            raise ToolError(f"{stream.file(name)}: {reason(error)}") from error


@contextmanager
def _replies(path: str) -> Iterator[int]:
    """The stream of replies, open for reading and writing: with `deliver one` only that takes a message."""
    with open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, _MODE) as fd:
        os.fchmod(fd, _MODE)  # whatever the umask is
        yield fd


@contextmanager
def _alarm(timeout_s: float, stream: str) -> Iterator[None]:
    """Raises ToolError after that time."""

    def ring(*_: object) -> None:
        raise ToolError(f"no reply from {stream!r} in {timeout_s:g} s", TIMED_OUT)

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
