"""The first line of a write to `.put`, a JSON object, and what it says."""

from __future__ import annotations

import json
from typing import Any

import attrs

from mqfs import errors, limits
from mqfs.engine.language import batch_frames
from mqfs.records import headers
from mqfs.syntax.duration import parse_duration

_decoder = json.JSONDecoder()


_BLANKS = (" ", "\t", "\n")


@attrs.define
class PutRequest:
    """A request of `.put`. Durations in ns."""

    stream: str = ""
    delay: int | None = None
    at_ns: int | None = None  # wall time
    ttl: int = 0
    priority: int = headers.NORMAL
    id: str = ""
    single: bool = False
    kept: bool = False  # the answer is a receipt
    headers: dict[str, str] = attrs.Factory(dict)
    is_plain: bool = False  # it asks for a receipt, and for nothing that a plain write has not


def parse(data: bytes) -> tuple[PutRequest, bytes]:
    """The object and the body. Raises BadCommand, TooLong."""
    head = data[: limits.PUT_BYTES].decode("utf-8", "surrogateescape")
    try:
        value, end = _decoder.raw_decode(head)
    except (ValueError, RecursionError) as error:
        raise errors.BadCommand(
            f".put begins with a JSON object of at most {limits.PUT_BYTES} bytes: {error}"
        ) from None
    if not isinstance(value, dict):
        raise errors.BadCommand('.put begins with a JSON object, such as {"stream":"mail"}')
    if head[end : end + 1] not in _BLANKS:
        raise errors.BadCommand("one blank, tab or newline stands between the object and the body")
    body = data[len(head[: end + 1].encode("utf-8", "surrogateescape")) :]
    if len(body) > limits.MESSAGE_BYTES:
        raise errors.TooLong(f"{len(body)} bytes; a message has at most {limits.MESSAGE_BYTES}")
    return _read(value), body


def _read(value: dict[str, Any]) -> PutRequest:
    unknown = value.keys() - _KEYS.keys()
    if unknown:
        raise errors.BadCommand(f"unknown key {sorted(unknown)[0]!r}; there are: {' '.join(_KEYS)}")
    if "stream" not in value:
        raise errors.BadCommand('the key "stream" is needed')
    if "delay" in value and "at" in value:
        raise errors.BadCommand("either delay or at")
    put = PutRequest(is_plain=value.keys() == {"stream", "kept"})
    for key, what in value.items():
        _KEYS[key](put, what)
    return put


def _text(key: str, what: Any, most: int) -> str:
    if not isinstance(what, str) or not what:
        raise errors.BadCommand(f"{key} is a string that is not empty")
    try:
        size = len(what.encode())
    except UnicodeEncodeError:
        raise errors.BadCommand(f"{key} is valid UTF-8") from None
    if size > most:
        raise errors.BadCommand(f"{key} has at most {most} bytes, this one {size}")
    return what


def _stream(put: PutRequest, what: Any) -> None:
    put.stream = _text("stream", what, limits.NAME_BYTES)


def _delay(put: PutRequest, what: Any) -> None:
    put.delay = parse_duration(_text("delay", what, 64))


def _at(put: PutRequest, what: Any) -> None:
    if isinstance(what, bool) or not isinstance(what, int | float) or not 0 <= what < 1 << 33:
        raise errors.BadCommand("at is a number: UNIX seconds")
    put.at_ns = int(what * 10**9)


def _ttl(put: PutRequest, what: Any) -> None:
    put.ttl = parse_duration(_text("ttl", what, 64))


def _priority(put: PutRequest, what: Any) -> None:
    if isinstance(what, bool) or not isinstance(what, int) or not 0 <= what <= 9:
        raise errors.BadCommand("priority is a number from 0 to 9")
    put.priority = what


def _id(put: PutRequest, what: Any) -> None:
    put.id = _text("id", what, limits.ID_BYTES)


def _single(put: PutRequest, what: Any) -> None:
    if not isinstance(what, bool):
        raise errors.BadCommand("single is true or false")
    put.single = what


def _kept(put: PutRequest, what: Any) -> None:
    if not isinstance(what, bool):
        raise errors.BadCommand("kept is true or false")
    put.kept = what


def _headers(put: PutRequest, what: Any) -> None:
    if not isinstance(what, dict):
        raise errors.BadCommand("headers is an object of strings")
    for key, text in what.items():
        _text("a header's name", key, 255)
        if key in headers.RESERVED:
            raise errors.BadCommand(f"the header {key!r} is set by the server")
        if text != "":
            _text(f"header {key!r}", text, limits.HEADER_BYTES)
        batch_frames.check_part(key, text)
    if sum(len(key.encode()) + len(text.encode()) + 3 for key, text in what.items()) > limits.HEADER_BYTES:
        raise errors.BadCommand(f"at most {limits.HEADER_BYTES} bytes of headers")
    put.headers = what


_KEYS = {
    "stream": _stream,
    "delay": _delay,
    "at": _at,
    "ttl": _ttl,
    "priority": _priority,
    "id": _id,
    "single": _single,
    "kept": _kept,
    "headers": _headers,
}
