"""HTTP/1.1 and 1.0 without I/O: bytes to requests, answers to bytes.

httptools parses; requests that it accepts against RFC 9112 are refused here. A refused request closes its connection:
the bytes after it cannot be trusted to begin a request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from io import BytesIO
from typing import Any

import httptools

from mqfs import limits
from mqfs.errors import BadRequest, MqfsError, printable
from mqfs.http.answers import BadVersion, TooManyHeaders, UnknownCoding

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
ONCE = ("host", "authorization", "origin", "range", "last-event-id", "idempotency-key")  # a second one is refused
HEAD_END = b"\r\n\r\n"
_BOUND_BYTES = limits.HTTP_LINE_BYTES + limits.HTTP_HEADER_BYTES
_NEVER_BODY = frozenset({204, 304})
_CLOSE = "Connection: close\r\n"


class Request:
    """One request. Names of headers are lower case; values are decoded as UTF-8, with other bytes escaped."""

    __slots__ = ("_body", "complete", "headers", "keep_alive", "method", "size", "target", "version")

    def __init__(self) -> None:
        self.method, self.target, self.version = "", "", "1.1"
        self.headers: dict[str, str] = {}
        self._body = BytesIO()  # read without a copy
        self.size = 0  # bytes of the body received so far
        self.keep_alive = False
        self.complete = False

    @property
    def body(self) -> bytes:
        """The body; read it once it is complete, as a later `add` would copy it."""
        return self._body.getvalue()

    def add(self, part: bytes) -> None:
        """Append a received part of the body."""
        self.size += self._body.write(part)

    def replace(self, body: bytes) -> None:
        """Replace the body by that of another request with the same head."""
        self._body, self.size = BytesIO(body), len(body)

    @property
    def shown(self) -> str:
        """The target for a log: without the query, which may contain secrets."""
        return printable(self.target.partition("?")[0])

    @property
    def announced(self) -> int:
        """Bytes of the body by Content-Length; 0 without one."""
        return int(self.headers.get("content-length", "").lstrip("0") or "0")  # int() refuses thousands of zeros

    @property
    def has_unknown_length(self) -> bool:
        """Whether a POST of HTTP/1.0 lacks Content-Length: the parser would pass on no byte of its body."""
        return self.version == "1.0" and self.method == "POST" and "content-length" not in self.headers

    @property
    def expects_continue(self) -> bool:
        return self.version == "1.1" and self.headers.get("expect", "").lower() == "100-continue"


class RequestParser:
    """The requests of one connection, in order.

    `requests` have a complete head; the body may be incomplete. After an `error` no more requests are parsed: it is
    to be answered after them.
    """

    def __init__(self) -> None:
        self.requests: deque[Request] = deque()
        self.error: MqfsError | None = None
        self._parser: Any = httptools.HttpRequestParser(self)
        self._target = bytearray()
        self._pairs: list[tuple[bytes, bytes]] = []
        self._size = 0  # bytes of headers
        self._raw = 0  # bytes received since the last start of a request, part of a body, or end of a request
        self._moved = False  # whether the bytes being parsed had a part of a body or the end of a request
        self._in_head = False
        self._rest = 0  # missing bytes of the body of a request for an upgrade
        self._current = Request()

    @property
    def idle(self) -> bool:
        """Whether no byte of a next request was received."""
        return not self._in_head and not self.requests

    @property
    def complete(self) -> bool:
        """Whether the last bytes received ended a request, with none after it."""
        return self._current.complete and not self._in_head

    def receive(self, data: bytes) -> bytes:
        """Parse up to the first end of a head after limits.HTTP_PARSED_BYTES. Returns the bytes after it, which are to
        be passed in again. Raises nothing: see `error`."""
        if self._rest:
            data = self._body_of_upgrade(data)
        if self.error is not None or not data:
            return b""
        rest, self._moved = b"", False
        if len(data) > limits.HTTP_PARSED_BYTES:
            body = 0 if self._current.complete else self._current.announced - self._current.size
            if (end := data.find(HEAD_END, max(body, limits.HTTP_PARSED_BYTES))) >= 0:
                end += len(HEAD_END)
                data, rest = data[:end], data[end:]
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:  # it stops there: no request may follow
            self._body_of_upgrade(data[upgrade.args[0] :])
            self.error = self.error or BadRequest("upgrade: data after the request")
        except httptools.HttpParserError as error:
            if self.error is None:
                self.error = BadRequest(f"malformed request: {error}")
        self._raw = 0 if self._moved else self._raw + len(data)
        if self._raw > _BOUND_BYTES:
            self._refuse(TooManyHeaders(f"headers: too long (expected at most {_BOUND_BYTES} bytes)"))
        return rest

    def close(self) -> None:
        """Break the reference cycle with the parser of httptools: garbage collections are rare."""
        self._parser = None

    def _refuse(self, error: MqfsError) -> None:
        if self.error is None:
            self.error = error
        self._in_head = False

    # ------------------------------------------------------------ callbacks of httptools

    def on_message_begin(self) -> None:
        self._target.clear()
        self._pairs.clear()
        self._size = self._raw = 0
        self._in_head = True

    def on_url(self, part: bytes) -> None:
        self._target += part
        if len(self._target) > limits.HTTP_LINE_BYTES:
            self._fail(TooManyHeaders(f"request line: too long (expected at most {limits.HTTP_LINE_BYTES} bytes)"))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._size += len(name) + len(value) + 4
        if self._size > limits.HTTP_HEADER_BYTES or len(self._pairs) >= limits.HTTP_HEADERS:
            bounds = f"{limits.HTTP_HEADERS} fields, {limits.HTTP_HEADER_BYTES} bytes"
            self._fail(TooManyHeaders(f"too many headers (expected at most {bounds})"))
        self._pairs.append((name, value))  # also trailers, which are not used

    def on_headers_complete(self) -> None:
        parser, request = self._parser, Request()
        request.method = parser.get_method().decode()
        request.version = parser.get_http_version()
        request.target = self._target.decode()
        request.headers = self._headers(request.version)
        request.keep_alive = request.version == "1.1" and parser.should_keep_alive() and not parser.should_upgrade()
        self._in_head = False
        self._current = request
        if parser.should_upgrade():
            self._rest = request.announced
            if "transfer-encoding" in request.headers:
                self._fail(BadRequest("upgrade: a body in chunks (expected Content-Length)"))
        self.requests.append(request)

    def _headers(self, version: str) -> dict[str, str]:
        """Return the headers of a request. Raises the error of invalid ones."""
        if version not in ("1.1", "1.0"):
            self._fail(BadVersion(f"HTTP/{version} (expected 1.1 or 1.0)"))
        headers: dict[str, str] = {}
        for raw, value in self._pairs:
            name, text = raw.decode().lower(), value.decode("utf-8", "backslashreplace")
            if name in headers:
                if name in ONCE:
                    self._fail(BadRequest(f"header {name}: given twice"))
                text = f"{headers[name]}, {text}"
            headers[name] = text
        if version == "1.1" and "host" not in headers:
            self._fail(BadRequest("header Host: missing"))
        if "transfer-encoding" in headers:
            self._check_coding(headers["transfer-encoding"], version)
        return headers

    def _check_coding(self, text: str, version: str) -> None:
        *codings, last = map(str.strip, text.lower().split(","))
        if last != "chunked" or "chunked" in codings:
            self._fail(BadRequest("a body without an end (expected Transfer-Encoding: chunked, once and last)"))
        if codings:
            self._fail(UnknownCoding(f"{codings[0]!r} (expected chunked only)"))
        if version == "1.0":
            self._fail(BadRequest("a body in chunks in HTTP/1.0"))

    def on_body(self, part: bytes) -> None:
        self._current.add(part)
        self._moved = True

    def on_message_complete(self) -> None:
        self._moved = True
        self._current.complete = not self._rest

    def _fail(self, error: MqfsError) -> None:
        """Record an error, and stop httptools by raising it; httptools wraps it in an exception of its own."""
        self._refuse(error)
        raise error

    def _body_of_upgrade(self, data: bytes) -> bytes:
        """Add the body of a request for an upgrade, which httptools does not parse, and return the bytes after it. The
        upgrade is not granted."""
        part, data = data[: self._rest], data[self._rest :]
        self._current.add(part)
        self._rest -= len(part)
        self._current.complete = not self._rest
        return data


# ---------------------------------------------------------------- answers

_REASONS = {int(status): status.phrase for status in HTTPStatus}


@lru_cache(maxsize=64)
def _begin(status: int, second: int) -> str:
    """Return the first lines of every answer with a status in a second of UNIX time."""
    reason, date = _REASONS.get(status, ""), formatdate(second, usegmt=True)
    return f"HTTP/1.1 {status} {reason}\r\nX-Content-Type-Options: nosniff\r\nDate: {date}\r\n"


def head(status: int, headers: Iterable[tuple[str, str]], second: int, size: int | None, close: bool) -> bytes:
    """Return the head of an answer. `size`: bytes of its body; None if `headers` have it, or the body ends with the
    connection. `second`: UNIX time.

    Raises ValueError where a name or a value has a line break or NUL: a client would read another header or another
    answer there. A caller that makes a header of data of others leaves such a header out."""
    lines = [f"{name}: {value}\r\n" for name, value in headers]
    fields = "".join(lines)
    if fields.count("\r") != len(lines) or fields.count("\n") != len(lines) or "\0" in fields:
        raise ValueError(f"answer {status}: a line break or NUL in its headers: {fields[:1000]!r}")
    if size is not None and status not in _NEVER_BODY:
        fields += f"Content-Length: {size}\r\n"
    return f"{_begin(status, second)}{fields}{_CLOSE if close else ''}\r\n".encode()


def chunk(data: bytes) -> tuple[bytes, ...]:
    """Return the parts of a chunk for a piece of a body; none for an empty piece, as an empty chunk ends the body."""
    return (b"%x\r\n" % len(data), data, b"\r\n") if data else ()
