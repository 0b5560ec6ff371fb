"""Answers, and the framing of messages in them. The format of a single message is the engine's."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import attrs

from mqfs import limits
from mqfs.errors import BadRequest, MqfsError

Headers = list[tuple[str, str]]
NO_STORE: Headers = [("Cache-Control", "no-store"), ("X-Accel-Buffering", "no")]
SANDBOX = ("Content-Security-Policy", "sandbox")  # for content that other users wrote
TEXT, JSON, LINES = "text/plain; charset=utf-8", "application/json", "application/x-ndjson"


class Cut(Exception):
    """The rest of a body cannot be sent. The connection closes before the body's end, so that the client notices."""


@attrs.define
class Answer:
    """An answer. `done` is called once: True if all of it was sent."""

    status: int
    body: bytes | AsyncIterator[bytes] = b""
    kind: str = TEXT
    headers: Headers = attrs.Factory(list)
    done: Callable[[bool], None] | None = None
    endless: bool = False  # its client may read as slowly as it likes

    def all_headers(self) -> Headers:
        return [("Content-Type", self.kind), *self.headers] if self.body or self.status == 200 else self.headers


def as_json(value: Any, status: int = 200) -> Answer:
    return json_answer(json.dumps(value, ensure_ascii=False) + "\n", status)


def json_answer(text: str, status: int = 200) -> Answer:
    """Return an answer whose body is a text of JSON."""
    return Answer(status, text.encode(), JSON, list(NO_STORE))


# ---------------------------------------------------------------- formats


@attrs.frozen
class Format:
    """A framing of messages. `cursor` is the engine's format. `lost` frames a range of lost sequences; where it is
    None, a gap must close the connection."""

    kind: str
    cursor: str
    message: Callable[[bytes], bytes] = lambda data: data
    lost: Callable[[int, int], bytes] | None = None
    begin: bytes = b""
    beat: Callable[[], bytes] | None = None  # sent after a silence
    silence_s: Callable[[], float] = lambda: limits.HTTP_BEAT_S
    end: bytes = b""


BREAK = re.compile("\r\n|\n|\r")


def media_type(kind: str) -> str:
    """Return a content type without its parameters, in lower case."""
    return kind.partition(";")[0].strip().lower()


def event(text: str, *, name: str = "", sequence: int | None = None) -> bytes:
    """Return one server-sent event. The text is split at each line end of the format: CR LF, LF and CR."""
    head = (f"id: {sequence}\n" if sequence is not None else "") + (f"event: {name}\n" if name else "")
    return (head + "".join(f"data: {line}\n" for line in BREAK.split(text)) + "\n").encode()


def _json_event(line: bytes) -> bytes:
    """Return the event for a line of `format json`, which begins with the sequence and contains no line end."""
    sequence = line[len(b'{"sequence":') : line.index(b",")]
    return b"id: %b\ndata: %b\n" % (sequence, line)


def _raw_event(line: bytes) -> bytes:
    message = json.loads(line)
    if (body := message.get("body")) is not None:
        return event(body, sequence=message["sequence"])
    return event(message["body_base64"], name="base64", sequence=message["sequence"])


def _lost_line(first: int, last: int) -> bytes:
    return f'{{"lost":[{first},{last}]}}\n'.encode()


def _lost_event(first: int, last: int) -> bytes:
    return event(json.dumps([first, last]), name="lost")


RAW = Format("application/octet-stream", "raw")
LINE = Format(TEXT, "line")
NUL = Format("application/octet-stream", "nul")
JSON_LINES = Format(LINES, "json", lost=_lost_line)
RECORD = Format("application/vnd.mqfs.record", "record")
SSE = Format(
    "text/event-stream",
    "json",
    _json_event,
    _lost_event,
    begin=b"retry: 2000\n\n",
    beat=lambda: b":\n\n",
    end=event("{}", name="end"),
)
SSE_RAW = attrs.evolve(SSE, message=_raw_event)
FORMATS = {"raw": RAW, "line": LINE, "nul": NUL, "json": JSON_LINES, "sse": SSE, "record": RECORD}
ACCEPTED = {
    "*/*": RAW,
    "application/octet-stream": RAW,
    LINES: JSON_LINES,
    JSON: JSON_LINES,
    "text/event-stream": SSE,
    "application/vnd.mqfs.record": RECORD,
}


def accepted(accept: str) -> list[str]:
    """Return the types of an Accept header, without their parameters, in its order."""
    return [part.partition(";")[0].strip().lower() for part in accept.split(",")]


def choose(word: str | None, accept: str, data: str | None = None) -> Format:
    """Return the format of `format=`, else of the first known type of Accept, else raw. `data`: what an event holds,
    "json" (the default) or "raw". Raises BadRequest."""
    if word is not None and word not in FORMATS:
        raise BadRequest(f"format {word!r} (expected one of {' '.join(FORMATS)})")
    known = (ACCEPTED[kind] for kind in accepted(accept) if kind in ACCEPTED)
    form = FORMATS[word] if word is not None else next(known, RAW)
    if data not in (None, "json", "raw"):
        raise BadRequest(f"data {data!r} (expected json or raw)")
    return SSE_RAW if form is SSE and data == "raw" else form


def base64_body(text: Any, key: str = "body_base64") -> bytes:
    """Decode the base64 value of a `key` of JSON. Raises BadRequest."""
    try:
        return base64.b64decode(text, validate=True)
    except (ValueError, TypeError):
        raise BadRequest(f"{key}: not base64") from None


# ---------------------------------------------------------------- errors: those of HTTP alone, and any as an answer

CONTENT_TYPE = "application/problem+json"


class Unauthorized(MqfsError):
    """A token that the server does not have."""

    text, http = "unknown token", 401


class NoToken(Unauthorized):
    """No token, where one is required."""

    text = "token required"


class NotAllowed(MqfsError):
    """A method that a file does not have. `allowed` lists its methods."""

    text, http = "method not allowed", 405

    def __init__(self, detail: str, allowed: tuple[str, ...]) -> None:
        super().__init__(detail)
        self.allowed = allowed


class TooSlow(MqfsError):
    """A request that did not arrive in time."""

    text, http = "request timed out", 408


class NoLength(MqfsError):
    """A body whose end the client does not announce, in HTTP/1.0."""

    text, http = "length required", 411


class NotTrue(MqfsError):
    """An `If-` header that does not hold."""

    text, http = "precondition failed", 412


class NoReply(MqfsError):
    """A request without a reply in time."""

    text, http = "no reply", 504


class LongReply(MqfsError):
    """A reply that is too long for one answer."""

    text, http = "reply too long", 502


class BadRange(MqfsError):
    """A Range beyond the file. `size` is the file's."""

    text, http = "range not satisfiable", 416

    def __init__(self, size: int) -> None:
        super().__init__(f"the file has {size} bytes")
        self.size = size


class TooManyHeaders(MqfsError):
    """A request line or headers above the bounds in limits.py."""

    text, http = "request header fields too large", 431


class Unsupported(MqfsError):
    """A part of a protocol that is not served."""

    text, http = "not implemented", 501


class UnknownCoding(MqfsError):
    """A Transfer-Encoding that would have to be decoded, such as gzip."""

    text, http = "transfer coding not implemented", 501


class BadVersion(MqfsError):
    text, http = "HTTP version not supported", 505


def problem(error: MqfsError, plain: bool, **more: Any) -> tuple[str, bytes]:
    """Return content type and body for an error: a line of text if `plain`, else the JSON of RFC 9457, with `more`."""
    if plain:
        return "text/plain; charset=utf-8", f"{error}\n".encode()
    body = {"type": "about:blank", "title": error.text, "status": error.http, "detail": str(error), **more}
    return CONTENT_TYPE, json.dumps(body, ensure_ascii=False).encode() + b"\n"
