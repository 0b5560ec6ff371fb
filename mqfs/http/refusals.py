"""Conditions that HTTP alone has, and how any condition reads in an answer. All others are in mqfs/errors.py."""

from __future__ import annotations

import json

from mqfs.errors import MqfsError

CONTENT_TYPE = "application/problem+json"


class Unauthorized(MqfsError):
    """A token that the server does not have."""

    text, http = "unknown token", 401


class NoToken(Unauthorized):
    """No token, where one is required."""

    text = "token required"


class NotAllowed(MqfsError):
    """A method that a file does not have. `allowed` are those it has."""

    text, http = "method not allowed", 405

    def __init__(self, detail: str, allowed: tuple[str, ...]) -> None:
        super().__init__(detail)
        self.allowed = allowed


class TooSlow(MqfsError):
    """A request that did not arrive in time."""

    text, http = "request timed out", 408


class NotTrue(MqfsError):
    """An `If-` header that does not hold."""

    text, http = "precondition failed", 412


class BadRange(MqfsError):
    """A Range beyond the file. `size` is the file's."""

    text, http = "range not satisfiable", 416

    def __init__(self, size: int) -> None:
        super().__init__(f"the file has {size} bytes")
        self.size = size


class TooManyHeaders(MqfsError):
    """A request line or headers above the bounds in limits.py."""

    text, http = "request header fields too large", 431


class UnknownCoding(MqfsError):
    """A Transfer-Encoding that would have to be undone, such as gzip."""

    text, http = "transfer coding not implemented", 501


class BadVersion(MqfsError):
    text, http = "HTTP version not supported", 505


def problem(error: MqfsError, plain: bool) -> tuple[str, bytes]:
    """Content type and body for a condition: a line, or RFC 9457."""
    if plain:
        return "text/plain; charset=utf-8", f"{error}\n".encode()
    body = {"type": "about:blank", "title": error.text, "status": error.http, "detail": str(error)}
    return CONTENT_TYPE, json.dumps(body, ensure_ascii=False).encode() + b"\n"
