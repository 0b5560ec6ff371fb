"""Bodies of Durable Streams ↔ messages: JSON arrays, bytes, and server-sent events.

An append to a stream of JSON is a message for each element of its array, in the very bytes that were sent. Of any other
type it is one message, and a read is all of them one behind the other.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence

from mqfs import limits
from mqfs.errors import TooLong
from mqfs.http.answers import BREAK, media_type
from mqfs.http.json_values import elements, is_json

JSON = "application/json"
BYTES = "application/octet-stream"


def is_text(kind: str) -> bool:
    """Whether events carry the data of that type as it is; of any other they carry base64."""
    return media_type(kind) == JSON or media_type(kind).startswith("text/")


def split(kind: str, body: bytes) -> Iterator[bytes]:
    """The messages of an append, in steps of some milliseconds at most. Raises BadRequest, TooLong."""
    if media_type(kind) != JSON:
        if len(body) > limits.MESSAGE_BYTES:
            raise TooLong(f"body of {len(body)} bytes: too long (expected at most {limits.MESSAGE_BYTES})")
        yield body
        return
    yield from (element.encode() for element in elements(body))


def join(kind: str, messages: Sequence[bytes]) -> bytes:
    """The body of an answer. In a stream of JSON a message of another program that is none is given as a string."""
    if media_type(kind) != JSON:
        return b"".join(messages)
    return b"[" + b",".join(map(_as_json, messages)) + b"]"


def _as_json(message: bytes) -> bytes:
    return message if is_json(message) else json.dumps(message.decode(errors="replace"), ensure_ascii=False).encode()


def data_event(kind: str, messages: Sequence[bytes]) -> bytes:
    """The event of some messages; empty for none. A blank after the colon is there for a line that begins with one."""
    if not messages:
        return b""
    data = join(kind, messages)
    text = data.decode(errors="replace") if is_text(kind) else base64.b64encode(data).decode()
    lines = (f"data:{' ' if line.startswith(' ') else ''}{line}\n" for line in BREAK.split(text))
    return f"event: data\n{''.join(lines)}\n".encode()


def control_event(control: dict[str, object]) -> bytes:
    """The event that says where the messages before it end."""
    return b"event: control\ndata:" + json.dumps(control).encode() + b"\n\n"
