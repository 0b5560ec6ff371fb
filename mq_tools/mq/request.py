"""`mq request`: write a message, and return the reply to it.

The reply is written to a stream of its own with the sticky bit. The server removes that stream when this program closes
it, also if the program is killed.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from mq_tools.cursor import Cursor, Message
from mq_tools.errors import TIMED_OUT, ToolError, alarm, reason
from mq_tools.files import open_file, write
from mq_tools.parts import place_of
from mq_tools.tree import TreePath

_MODE = 0o1622  # everybody may write a reply


def request(stream: TreePath, body: bytes, headers: Mapping[str, str], timeout_s: float) -> bytes:
    """Write a message and return the reply to it. Raises ToolError, with code TIMED_OUT after `timeout_s`."""
    name = f"reply.{secrets.token_hex(12)}"
    late = ToolError(f"no reply from {stream.name!r} in {timeout_s:g} s", TIMED_OUT)
    with _replies(stream.file(name)), _cursor(stream.group, name) as replies, alarm(timeout_s, late):
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
            return _body(replies)
        except EOFError:
            raise ToolError(f"{stream.file(name)}: unexpected end of file") from None
        except OSError as error:
            raise ToolError(f"{stream.file(name)}: {reason(error)}") from error


def _body(replies: Cursor) -> bytes:
    """Return the body of the first reply, all its parts. Raises EOFError, OSError."""
    parts: list[Message] = []
    total = 1
    while len(parts) < total:
        parts += replies.read() or []
        if parts:
            number, of = place_of(parts[0])
            total = of if number == 1 else 1
    return b"".join(part.body for part in parts[:total])


@contextmanager
def _cursor(group: str, stream: str) -> Iterator[Cursor]:
    """Yield a blocking cursor on the replies. It shows every part of a reply that is several messages."""
    cursor = Cursor(group)
    try:
        cursor.select([stream])
        os.set_blocking(cursor.fd, True)
        yield cursor
    finally:
        cursor.close()


@contextmanager
def _replies(path: str) -> Iterator[None]:
    """Keep the stream of replies open. With `deliver one` a file open for reading only would not count."""
    with open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, _MODE) as fd:
        os.fchmod(fd, _MODE)  # regardless of the umask
        yield
