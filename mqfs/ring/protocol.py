"""The wire protocol of the attach socket (docs/reference/ring-protocol.md): packets ↔ JSON objects, errors among them.

It is spoken by attach_socket.py and by the library. There is no I/O here.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from mqfs import errors, limits

VERSION = 1  # of this protocol; that of the ring is checked when a process attaches to it
SUFFIX = ".ring"  # appended to the path of the 9P socket


def encode(packet: dict[str, Any]) -> bytes:
    return json.dumps(packet, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogateescape")


def decode(data: bytes) -> dict[str, Any]:
    """Parse a packet. Raises BadRequest."""
    if len(data) > limits.RING_PACKET_BYTES:
        raise errors.BadRequest(f"packet too long (expected at most {limits.RING_PACKET_BYTES} bytes)")
    try:
        packet = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise errors.BadRequest(f"invalid packet: {error} (expected a JSON object)") from None
    if not isinstance(packet, dict):
        raise errors.BadRequest("invalid packet (expected a JSON object)")
    return packet


def refusal(error: errors.MqfsError) -> dict[str, Any]:
    return {"error": type(error).__name__, "text": error.detail}


def raise_refusal(packet: dict[str, Any]) -> NoReturn:
    """Raise the error of a refusal."""
    kind = getattr(errors, str(packet["error"]), None)
    text = str(packet.get("text", ""))
    if isinstance(kind, type) and issubclass(kind, errors.MqfsError) and kind is not errors.Damaged:
        raise kind(text)
    raise errors.RemoteError(text)
