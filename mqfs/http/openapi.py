"""`/.openapi.json`: the table of routes as an OpenAPI 3.1 document.

Owns the types of options. The node at a path decides which row a request meets, so rows of one path and method are one
operation here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from hashlib import sha256
from http import HTTPStatus
from typing import Any

from mqfs import limits
from mqfs.http.answers import JSON, Answer, Headers
from mqfs.http.call import Call
from mqfs.http.refusals import CONTENT_TYPE
from mqfs.http.route import BATCH, MESSAGE, Route
from mqfs.version import __version__

Json = dict[str, Any]
_NAMES = {"shop": "group", "orders": "stream", "view": "stream", "jobs": "stream", "mail": "consumer", "PART": "part"}
_DURATION: Json = {"type": "string", "pattern": r"^[0-9]+(ms|s|m|h|d)$"}
_COUNT: Json = {"type": "integer", "minimum": 1}
_FLAG: Json = {"type": "string", "enum": ["", "yes", "no"]}
_TEXT: Json = {"type": "string"}
OPTIONS: dict[str, tuple[Json, str]] = {
    "after": (_TEXT, "Begin behind that name or sequence; of nack, how long to wait before the next delivery."),
    "at": ({"type": "number"}, "Deliver at that UNIX time."),
    "backlog": (_COUNT, "Messages that the consumer may have waiting."),
    "bytes": ({**_COUNT, "maximum": limits.HTTP_READ_BYTES}, "End the answer behind that many bytes."),
    "count": (_COUNT, "End the answer behind that many messages or names."),
    "create": (_FLAG, "`no`: 404 where the stream is not there."),
    "data": ({"type": "string", "enum": ["json", "raw"]}, "What the data of an event is."),
    "delay": (_DURATION, "Deliver later."),
    "detail": (_FLAG, "Each entry with its counters."),
    "follow": (_FLAG, "Answer without an end."),
    "format": ({"type": "string", "enum": ["raw", "line", "nul", "json", "sse", "record"]}, "How messages are framed."),
    "full": ({"type": "string", "enum": ["drop-old", "drop-new", "block", "reject"]}, "The policy at the backlog."),
    "id": (_TEXT, "Publish once: a message of the same id is not published again."),
    "last_event_id": (_COUNT, "Begin behind that sequence; the header Last-Event-ID wins."),
    "lease": (_DURATION, "How long the claims last, 1 s to 12 h."),
    "max": ({**_COUNT, "maximum": limits.HTTP_CLAIMED}, "Messages at most."),
    "memory": (_FLAG, "The consumer is not on disk."),
    "over": (_TEXT, "The stream that the consumer is over; without it, the group."),
    "priority": ({"type": "integer", "minimum": 0, "maximum": 9}, "0 to 9; 9 is delivered first."),
    "private": (_FLAG, "One open handle at a time."),
    "reason": (_TEXT, "Why it is a dead letter."),
    "select": (_TEXT, "A stream, view or pattern to read; may be repeated."),
    "seq": (_COUNT, "The message of that sequence."),
    "since": (_TEXT, "first, last, end, a sequence, -N messages, -DURATION or @UNIX."),
    "single": (_FLAG, "For one of all subscribers."),
    "streams": (_TEXT, "Also the counters of streams of that pattern."),
    "strict": (_FLAG, "410 instead of a gap at the beginning."),
    "transient": (_FLAG, "The consumer ends with its last handle."),
    "ttl": (_DURATION, "Expire after."),
    "type": ({"type": "string", "enum": ["group", "stream", "view"]}, "Entries of that type only."),
    "until": (_TEXT, "The last sequence, or `end`: that of now."),
    "wait": (_DURATION, "Wait that long for the first message, or for room."),
}
_BODIES = {
    "": {"text/plain": {"schema": {"type": "string"}}},
    MESSAGE: {"application/octet-stream": {}},
    BATCH: {
        "application/x-ndjson": {"example": '{"stream":"orders","body":"hello"}\n'},
        "application/vnd.mqfs.frames": {},
    },
}


async def serve(table: Callable[[], tuple[Route, ...]], call: Call) -> Answer:
    """The document of a table."""
    data, tag = _made(table())
    head: Headers = [("ETag", tag), ("Cache-Control", "no-cache")]
    if call.has_tag(tag):
        return Answer(304, headers=head)
    return Answer(200, data, JSON, head)


@cache
def _made(table: tuple[Route, ...]) -> tuple[bytes, str]:
    data = json.dumps(document(table), indent=1).encode() + b"\n"
    return data, f'"{sha256(data).hexdigest()[:24]}"'


def document(table: Iterable[Route]) -> Json:
    paths: dict[str, Json] = {}
    for route in table:
        path = template(route.path)
        item = paths.setdefault(path, _item(path))
        _add(item, route, path)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mqfs",
            "version": __version__,
            "description": "Message queues as files: directories are groups, files are streams. See mqfs-http(5).",
        },
        "servers": [{"url": "/"}],
        "security": [{}, {"bearer": []}, {"basic": []}],
        "paths": paths,
        "components": {"securitySchemes": _schemes(), "responses": {"Refused": _refused()}},
    }


def template(path: str) -> str:
    """An example of a path with its names as parameters."""
    return "/".join(f"{{{_NAMES[name]}}}" if name in _NAMES else name for name in path.split("/"))


def _item(path: str) -> Json:
    names = [name[1:-1] for name in path.split("/") if name.startswith("{")]
    named = [{"name": name, "in": "path", "required": True, "schema": {**_TEXT, "minLength": 1}} for name in names]
    return {"parameters": named} if named else {}


def _add(item: Json, route: Route, path: str) -> None:
    """A row of the table; another of the same method may be there."""
    method = route.method.lower()
    words = [word.strip("{}.") for word in path.split("/") if word.strip("{}.")]
    operation = item.setdefault(
        method,
        {
            "operationId": "_".join([method, *words, *(["folder"] if path.endswith("/") else [])]),
            "summary": route.about,
            "tags": [words[-1] if words else "tree"],
            "parameters": [],
            "responses": {"default": {"$ref": "#/components/responses/Refused"}},
        },
    )
    if route.about not in operation["summary"]:
        operation["summary"] += f" Or: {route.about}"
    known = {parameter["name"] for parameter in operation["parameters"]}
    operation["parameters"] += [_option(name) for name in route.options if name in OPTIONS and name not in known]
    for status in route.statuses:
        operation["responses"][str(status)] = _response(status)
    if route.method in ("PUT", "POST"):
        operation.setdefault("requestBody", {"required": False, "content": _BODIES[route.body]})


def _option(name: str) -> Json:
    schema, about = OPTIONS[name]
    return {"name": name, "in": "query", "required": False, "schema": schema, "description": about}


def _response(status: int) -> Json:
    if status >= 400:
        return {"$ref": "#/components/responses/Refused"}
    return {"description": HTTPStatus(status).phrase}


def _refused() -> Json:
    problem = {
        "type": "object",
        "required": ["title", "status", "detail"],
        "properties": {"type": _TEXT, "title": _TEXT, "status": {"type": "integer"}, "detail": _TEXT},
    }
    return {
        "description": "Why it was refused: for `*/*` and text/plain a line of text.",
        "content": {CONTENT_TYPE: {"schema": problem}, "text/plain": {"schema": _TEXT}},
    }


def _schemes() -> Json:
    return {
        "bearer": {"type": "http", "scheme": "bearer", "description": "A token of `mqfs token new`."},
        "basic": {"type": "http", "scheme": "basic", "description": "The token as the password."},
    }
