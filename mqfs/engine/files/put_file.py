"""`.put`: one message with metadata in one write.

Owns the language of mqfs(4), ".put": a JSON object, one blank, tab or newline, and the body.
"""

from __future__ import annotations

import json
from typing import Any

import attrs

from mqfs import errors, limits
from mqfs import group_state as states
from mqfs.engine.control.actions import Commands
from mqfs.engine.delivery.priority_index import NORMAL
from mqfs.engine.language import batch_frames
from mqfs.engine.language.permissions import W, require
from mqfs.engine.publishing.deduplication import PutId
from mqfs.engine.stream import Post, Stream
from mqfs.log import headers
from mqfs.syntax.duration import parse_duration, print_duration
from mqfs.types import Draft, Kind, Step

_decoder = json.JSONDecoder()
_BLANKS = (" ", "\t", "\n")


@attrs.define
class Put:
    """What was asked for. Durations in ns."""

    stream: str = ""
    delay: int | None = None
    at_ns: int | None = None  # wall time
    ttl: int = 0
    priority: int = NORMAL
    id: str = ""
    single: bool = False
    headers: dict[str, str] = attrs.Factory(dict)


def parse(data: bytes) -> tuple[Put, bytes]:
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
    if not body:
        raise errors.BadCommand("a message has at least one byte; 'eof STREAM' in ctl writes an end mark")
    if len(body) > limits.MESSAGE_BYTES:
        raise errors.TooLong(f"{len(body)} bytes; a message has at most {limits.MESSAGE_BYTES}")
    return _read(value), body


def _read(value: dict[str, Any]) -> Put:
    unknown = value.keys() - _KEYS.keys()
    if unknown:
        raise errors.BadCommand(f"unknown key {sorted(unknown)[0]!r}; there are: {' '.join(_KEYS)}")
    if "stream" not in value:
        raise errors.BadCommand('the key "stream" is needed')
    if "delay" in value and "at" in value:
        raise errors.BadCommand("either delay or at")
    put = Put()
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


def _stream(put: Put, what: Any) -> None:
    put.stream = _text("stream", what, limits.NAME_BYTES)


def _delay(put: Put, what: Any) -> None:
    put.delay = parse_duration(_text("delay", what, 64))


def _at(put: Put, what: Any) -> None:
    if isinstance(what, bool) or not isinstance(what, int | float) or not 0 <= what < 1 << 33:
        raise errors.BadCommand("at is a number: UNIX seconds")
    put.at_ns = int(what * 10**9)


def _ttl(put: Put, what: Any) -> None:
    put.ttl = parse_duration(_text("ttl", what, 64))


def _priority(put: Put, what: Any) -> None:
    if isinstance(what, bool) or not isinstance(what, int) or not 0 <= what <= 9:
        raise errors.BadCommand("priority is a number from 0 to 9")
    put.priority = what


def _id(put: Put, what: Any) -> None:
    put.id = _text("id", what, limits.ID_BYTES)


def _single(put: Put, what: Any) -> None:
    if not isinstance(what, bool):
        raise errors.BadCommand("single is true or false")
    put.single = what


def _headers(put: Put, what: Any) -> None:
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
    "headers": _headers,
}


class PutHandle(Commands):
    """An open `.put`."""

    text: bytes | None = None  # the last message's sequence

    def read(self, count: int, offset: int = 0) -> Step[bytes]:
        self.require(reading=True)
        told = self.told(count)
        if told is not None:
            return told
        if self.text is None:
            return b""
        text, rest = self.text[:count], self.text[count:]
        self.text = rest or None
        return text

    def write(self, data: bytes, offset: int = 0) -> Step[int]:
        self.require(reading=False)
        try:
            put, body = parse(data)
            stream = self.group.streams.get(put.stream)
            if stream is None:
                raise errors.NotFound(f"no stream {put.stream!r} in this group")
            require(self.user, stream.state, W, put.stream)
            due = self._due_ns(put)
            step = self._hold(stream, put, body, due, len(data)) if due else self._post(stream, put, body, len(data))
        except errors.MqfsError as error:
            self.refused(error)
            raise
        return step

    def _due_ns(self, put: Put) -> int:
        """When it may be read, engine time; 0: at once."""
        clock = self.group.tree.clock
        wait = put.delay if put.delay is not None else 0
        if put.at_ns is not None:
            wait = max(put.at_ns - clock.wall_ns(), 0)
        return clock.engine_ns() + wait if wait else 0

    def _texts(self, put: Put) -> dict[str, str]:
        texts = {headers.SENDER: str(self.user.uid)}
        if put.priority != NORMAL:
            texts[headers.PRIORITY] = str(put.priority)
        if put.ttl:
            texts[headers.TTL] = print_duration(put.ttl)
        if put.id:
            texts[headers.ID] = put.id
        if put.single:
            texts[headers.SINGLE] = "true"
        return {**texts, **put.headers}

    def _tell(self, sequence: int) -> None:
        self.text = f"{sequence}\n".encode()

    def _post(self, stream: Stream, put: Put, body: bytes, total: int) -> Step[int]:
        head = headers.encode(self._texts(put))
        return self.group.write(stream, Post(Kind.MESSAGE, (body,), total, None, head, self._id(put), self._tell))

    def _id(self, put: Put) -> PutId | None:
        return PutId(self.user.uid, put.id) if put.id else None

    def _hold(self, stream: Stream, put: Put, body: bytes, due_ns: int, total: int) -> Step[int]:
        group = self.group
        if group.bucket.failed is not None:
            raise errors.ReadOnly(f"the disk failed: {group.bucket.failed}")
        put_id = self._id(put)
        known = group.ids.known(put_id) if put_id else 0
        if not known:
            also: list[Draft] = []
            change = group.ids.note(put_id, group.bucket.next) if put_id else None
            if change is not None:
                also.append(Draft(Kind.CHANGE, 0, states.encode_change(change)))
            known = group.held.put(stream, body, self._texts(put), due_ns, also)
            if change is not None:
                group.state.apply(change)
        self._tell(known)
        return group.promised(total)


__all__ = ["Put", "PutHandle", "parse"]
