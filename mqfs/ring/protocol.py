"""The language of the attach socket (docs/reference/ring-protocol.md): packets ↔ JSON objects, and errors in them.

Owns the language; who speaks it are attach_socket.py and the library. Does no I/O.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from mqfs import errors, limits

VERSION = 1  # of this language; that of the ring is checked by who attaches to it
SUFFIX = ".ring"  # of the socket's path, behind that of 9P


def encode(said: dict[str, Any]) -> bytes:
    return json.dumps(said, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogateescape")


def decode(data: bytes) -> dict[str, Any]:
    """Raises BadRequest."""
    if len(data) > limits.RING_PACKET_BYTES:
        raise errors.BadRequest(f"packet too long (expected at most {limits.RING_PACKET_BYTES} bytes)")
    try:
        said = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise errors.BadRequest(f"invalid packet: {error} (expected a JSON object)") from None
    if not isinstance(said, dict):
        raise errors.BadRequest("invalid packet (expected a JSON object)")
    return said


def refusal(error: errors.MqfsError) -> dict[str, Any]:
    return {"error": type(error).__name__, "text": error.detail}


def raise_refusal(said: dict[str, Any]) -> NoReturn:
    """What a door refused with, as what it is."""
    kind = getattr(errors, str(said["error"]), None)
    text = str(said.get("text", ""))
    if isinstance(kind, type) and issubclass(kind, errors.MqfsError) and kind is not errors.Damaged:
        raise kind(text)
    raise errors.RemoteError(text)
