"""The built-in functions of routing programs: each is made of its arguments, and called for each message."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from operator import contains
from typing import TypeAlias

from mqfs.syntax.escape import text_of

Selects: TypeAlias = Callable[[str, bytes, int], bool]  # topic, body, sequence


def true(topic: str, body: bytes, sequence: int) -> bool:
    return True


def sample(share: float, salt: int) -> Selects:
    """True for that share of messages, always the same ones. Another `sample` of the program gets another salt."""
    below = share * 2.0**64
    prefix = salt.to_bytes(2, "little")

    def select(topic: str, body: bytes, sequence: int) -> bool:
        digest = blake2b(prefix + sequence.to_bytes(8, "little"), digest_size=8).digest()
        return int.from_bytes(digest, "little") < below

    return select


def _route_contains(text: str) -> Selects:
    return lambda topic, body, sequence: text in topic


def _payload_prefix(text: str) -> Selects:
    prefix = text.encode(errors="surrogateescape")
    return lambda topic, body, sequence: body.startswith(prefix)


def _payload_contains(text: str) -> Selects:
    part = text.encode(errors="surrogateescape")
    return lambda topic, body, sequence: part in body


def _unescaped(holds: Callable[[bytes, bytes], bool], text: str) -> Selects:
    return lambda topic, body, sequence: holds(text_of(topic), text.encode(errors="surrogateescape"))


OF_NAME: dict[str, Callable[[str], Selects]] = {
    "route_contains": _route_contains,
    "escaped_contains": partial(_unescaped, contains),
    "escaped_prefix": partial(_unescaped, bytes.startswith),
}
ON_STRING = {**OF_NAME, "payload_prefix": _payload_prefix, "payload_contains": _payload_contains}
BUILT_IN = ("true", "sample", *ON_STRING)
