"""`/.openapi.json`: the table of routes as an OpenAPI 3.1 document.

The node at a path decides which row a request meets, so rows of one path and method are one operation here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from hashlib import sha256
from http import HTTPStatus
from typing import Any

from mqfs.http.answers import JSON, Answer, Headers
from mqfs.http.call import Call
from mqfs.http.options import TEXT, Option, option
from mqfs.http.refusals import CONTENT_TYPE
from mqfs.http.route import BATCH, COMMANDS, LINES, MESSAGE, STAGED, Route
from mqfs.version import __version__

Json = dict[str, Any]
ABOUT = """Message queues as files: directories are groups, files are streams. mqfs-http(5) explains each request.

GROUP is the path of a group: of nested ones several segments, of the root none. A HEAD is a GET without the body.
"""
NAMES = {"shop": "GROUP", "orders": "STREAM", "view": "STREAM", "jobs": "STREAM", "mail": "CONSUMER", "PART": "PART"}
TAGS = {  # the first that is in the template
    ".consumers": ("consumers", "Messages that are claimed, settled, and come again."),
    ".txn": ("transactions", "Batches that are larger than a request."),
    ".batch": ("streams", "Messages, published and read."),
    "{STREAM}": ("streams", "Messages, published and read."),
    "{GROUP}": ("groups", "Groups, their settings and counters."),
    "": ("server", "The server itself."),
}
_BINARY = {"application/octet-stream": {"schema": {**TEXT, "format": "binary"}}}
_FRAMES = {"application/vnd.mqfs.frames": {"schema": {**TEXT, "format": "binary"}}}
_LINES = {"text/plain": {"schema": TEXT}}
_BODIES: dict[str, Json] = {
    MESSAGE: _BINARY,
    BATCH: {"application/x-ndjson": {"schema": TEXT}, **_FRAMES},
    STAGED: {**_BINARY, **_FRAMES},
    LINES: _LINES,
    COMMANDS: _LINES,
}
_WITH_BODY = (200, 201, 206, 503)  # 503 in a row is the row's own answer
_CONDITIONS = {  # headers that lead to a status
    412: ("If-None-Match", Option({"const": "*"}, "Only if nothing is there.", "*")),
    304: ("If-None-Match", Option(TEXT, "Only if it is not of that entity tag.", '"1-9-120"')),
    206: ("Range", Option(TEXT, "The bytes to send.", "bytes=0-")),
}
_WORD = {"type": ["string", "null"]}
_SCHEMAS: dict[str, Json] = {
    "Problem": {
        "type": "object",
        "required": ["type", "title", "status", "detail"],
        "properties": {"type": TEXT, "title": TEXT, "status": {"type": "integer"}, "detail": TEXT},
    },
    "Listing": {
        "type": "object",
        "required": ["group", "entries", "after"],
        "properties": {
            "group": TEXT,
            "entries": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["name", "type"],
                    "properties": {"name": TEXT, "type": {**TEXT, "enum": ["group", "stream", "view"]}},
                },
            },
            "after": {**_WORD, "description": "Where the next page begins; null at the end."},
        },
    },
    "Health": {
        "type": "object",
        "required": ["status"],
        "properties": {"status": TEXT, "reasons": {"type": "array", "items": TEXT}},
    },
}
_MADE: dict[tuple[Route, ...], tuple[bytes, str]] = {}
_PIECES = 256  # of the encoder, between two looks at the clock
_OF_KIND = {"group": "Listing", "health": "Health", "ready": "Health"}


async def serve(table: Callable[[], tuple[Route, ...]], call: Call) -> Answer:
    """The document of a table."""
    rows = table()
    if rows not in _MADE:
        _MADE[rows] = await _make(rows, call)
    data, tag = _MADE[rows]
    head: Headers = [("ETag", tag), ("Cache-Control", "no-cache")]
    if call.has_tag(tag):
        return Answer(304, headers=head)
    return Answer(200, data, JSON, head)


async def _make(rows: tuple[Route, ...], call: Call) -> tuple[bytes, str]:
    """The text and its entity tag. It takes some milliseconds: others are served meanwhile."""
    pieces = []
    for number, piece in enumerate(json.JSONEncoder(indent=1).iterencode(document(rows))):
        pieces.append(piece)
        if number % _PIECES == 0:
            await call.front.pause()
    data = "".join(pieces).encode() + b"\n"
    return data, f'"{sha256(data).hexdigest()[:24]}"'


def document(table: Iterable[Route]) -> Json:
    operations: dict[tuple[str, str], list[Route]] = {}
    for route in table:
        operations.setdefault((template(route.path), route.method.lower()), []).append(route)
    paths: dict[str, Json] = {}
    for (path, method), rows in operations.items():
        paths.setdefault(path, _item(rows[0].path))[method] = _operation(path, method, rows)
    return {
        "openapi": "3.1.0",
        "info": {"title": "mqfs", "version": __version__, "description": ABOUT, "license": {"name": "MIT"}},
        "servers": [{"url": "/", "description": "This server."}],
        "security": [{}, {"bearer": []}, {"basic": []}],
        "tags": [{"name": name, "description": about} for name, about in reversed(dict(TAGS.values()).items())],
        "paths": paths,
        "components": {"securitySchemes": _schemes(), "responses": {"Refused": _refused()}, "schemas": _SCHEMAS},
    }


def template(path: str) -> str:
    """An example of a path with its names as parameters."""
    return "/".join(f"{{{NAMES[name]}}}" if name in NAMES else name for name in path.split("/"))


def _item(path: str) -> Json:
    named = [_parameter(NAMES[name], "path", Option({**TEXT, "minLength": 1}, "", name))
             for name in path.split("/") if name in NAMES]  # fmt: skip
    return {"parameters": named} if named else {}


def _operation(path: str, method: str, rows: list[Route]) -> Json:
    words = [word.strip("{}.").lower() for word in path.split("/") if word]
    operation: Json = {
        "operationId": "_".join([method, *words, *(["folder"] if path.endswith("/") else [])]),
        "summary": rows[0].about,
        "tags": [next(tag for part, (tag, _) in TAGS.items() if part in path)],
        "parameters": _parameters(rows),
        "responses": {},
    }
    if len(rows) > 1:
        operation["description"] = "\n".join(f"- {row.kind}: {row.about}" for row in rows)
    for row in rows:
        for status in row.statuses:
            answer = _response(row, status)
            operation["responses"][str(status)] = {**operation["responses"].get(str(status), {}), **answer}
    operation["responses"]["default"] = {"$ref": "#/components/responses/Refused"}
    if body := next((row.body for row in rows if row.body), ""):
        operation["requestBody"] = _request_body(body, rows[0])
    return operation


def _parameters(rows: list[Route]) -> list[Json]:
    made: dict[tuple[str, str], Json] = {}
    for row in rows:
        for name in row.options:
            known = option(name, row.verb or row.kind)
            made["query", name] = _parameter(name, "query", known)
            if known.header:
                made["header", known.header] = _parameter(known.header, "header", known)
        for status in row.statuses:
            if status in _CONDITIONS:
                name, known = _CONDITIONS[status]
                made["header", name] = _parameter(name, "header", known)
    return list(made.values())


def _parameter(name: str, place: str, known: Option) -> Json:
    parameter: Json = {"name": name, "in": place, "required": place == "path", "schema": known.schema}
    if known.about:
        parameter["description"] = known.about
    if known.example:
        parameter["example"] = _value(known)
    return parameter


def _value(known: Option) -> Any:
    """The example as its schema has it."""
    kind = known.schema.get("type")
    if kind == "array":
        return [known.example]
    return int(known.example) if kind in ("integer", "number") else known.example


def _request_body(body: str, row: Route) -> Json:
    kinds = {kind: dict(media) for kind, media in _BODIES[body].items()}
    if row.example:
        next(iter(kinds.values()))["example"] = row.example
    return {"required": row.method == "POST", "content": kinds, "description": f"At most {row.most_bytes:,} bytes."}


def _response(row: Route, status: int) -> Json:
    if status >= 400 and status not in _WITH_BODY:
        return {"$ref": "#/components/responses/Refused"}
    answer: Json = {"description": HTTPStatus(status).phrase}
    if status in _WITH_BODY and row.sends.kinds:
        answer["content"] = {kind.partition(";")[0]: _media(row, kind) for kind in row.sends.kinds}
    if status in _WITH_BODY and row.sends.headers:
        answer["headers"] = {name: {"schema": TEXT} for name in row.sends.headers}
    if status in (303, 308):
        answer["headers"] = {"Location": {"schema": TEXT, "required": True}}
    return answer


def _media(row: Route, kind: str) -> Json:
    if kind != JSON:
        return {}
    known = _OF_KIND.get(row.kind)
    return {"schema": {"$ref": f"#/components/schemas/{known}"} if known else {"type": "object"}}


def _refused() -> Json:
    return {
        "description": "The reason, as a line of text for Accept `*/*` and text/plain. Any call may be answered by 400 "
        "malformed, 401 unknown token, 403 not allowed, 404 and 405 nothing to call, 409 not now, 413 too large, "
        "429 and 503 later.",
        "content": {CONTENT_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}, "text/plain": {"schema": TEXT}},
    }


def _schemes() -> Json:
    return {
        "bearer": {"type": "http", "scheme": "bearer", "description": "A token of `mqfs token new`."},
        "basic": {"type": "http", "scheme": "basic", "description": "The token as the password."},
    }
