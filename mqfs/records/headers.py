"""A record's headers ↔ text: `u8 key length · key · u16 value length · value`, UTF-8, in the order given.

The layout is in docs/reference/format.md, "Record". Some names have a meaning of their own.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import lru_cache

from mqfs import limits

_VALUE_SIZE = struct.Struct("<H")

SENDER, PRIORITY, TTL, ID, SINGLE, HELD = "sender", "priority", "ttl", "id", "single", "held"
TO, DUE = "to", "due"  # of a delayed message: its stream's number, and when it is due, engine ns
STREAM, SEQUENCE, DELIVERIES = "stream", "sequence", "deliveries"  # of a dead letter
REASON, CONSUMER = "reason", "consumer"
EVERY, CRON, NEXT = "every", "cron", "next"  # of a schedule: its rule, and its next run, wall ns
EXPECT = "expect"  # a condition in a frame of `.batch`; no record has it
NORMAL = 5  # priority of a message without one
PART = "part"  # of a body in several messages: "3" is the third of them, "17/17" the last; a client sets it
KEY = "key"  # which messages belong together; a client sets it
REPLY_TO = "reply-to"  # the stream of its group to which a reply is to be written; a client sets it
TOPIC = "fsq-topic"  # the whole topic, if a stream's name is too short for it; a client sets it
OWN = frozenset({SENDER, PRIORITY, TTL, ID, SINGLE, HELD, TO, DUE, EVERY, CRON, NEXT, EXPECT})
LETTER = frozenset({STREAM, SEQUENCE, DELIVERIES, REASON, CONSUMER})
RESERVED = OWN | LETTER  # a client may not set these itself


def encode(headers: Mapping[str, str]) -> bytes:
    """Encode headers in the given order. Keys have at most 255 bytes, values at most 65,535."""
    parts = []
    for key, value in headers.items():
        name, text = key.encode(), value.encode()
        parts.append(bytes([len(name)]) + name + _VALUE_SIZE.pack(len(text)) + text)
    return b"".join(parts)


def key(name: str) -> bytes:
    """Return the encoded beginning of a header of that name: headers without these bytes do not have it."""
    return bytes([len(name)]) + name.encode()


_KEY = key(KEY)


@lru_cache(limits.CONNECTIONS)
def of_sender(uid: int) -> bytes:
    """Return the encoded header `sender`, which the server sets."""
    return encode({SENDER: str(uid)})


def decode(data: bytes) -> dict[str, str]:
    """Decode headers. An incomplete one at the end is left out; a record that passed its check has none."""
    headers: dict[str, str] = {}
    at = 0
    while at < len(data):
        key_end = at + 1 + data[at]
        if key_end + 2 > len(data):
            break
        end = key_end + 2 + _VALUE_SIZE.unpack_from(data, key_end)[0]
        headers[data[at + 1 : key_end].decode("utf-8", "replace")] = data[key_end + 2 : end].decode("utf-8", "replace")
        at = end
    return headers


def key_of(data: bytes) -> bytes:
    """Return the value of `key` in encoded headers, at most limits.KEY_BYTES of it; empty if there is none."""
    if _KEY not in data:
        return b""
    return decode(data).get(KEY, "").encode()[: limits.KEY_BYTES]


def parse_part(text: str) -> tuple[int, int]:
    """Parse the header `part`: the number of the part, and the number of parts, or 0 if it is not given. (0, 0):
    malformed, or no header."""
    number, slash, total = text.partition("/")
    if not _is_count(number) or (slash and not _is_count(total)):
        return 0, 0
    place = int(number), int(total or 0)
    return place if not slash or place[0] <= place[1] else (0, 0)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= limits.PART_DIGITS and text.strip("0") != ""
