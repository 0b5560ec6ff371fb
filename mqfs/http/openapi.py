"""`/.openapi.json`: the table of routes as an OpenAPI 3.1 document; `/.asyncapi.json`: the streams as one of AsyncAPI.

The node at a path decides which row serves a request, so the rows of one path and method are one operation here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from hashlib import sha256
from http import HTTPStatus
from typing import Any, NamedTuple, cast

from mqfs import __version__, limits
from mqfs.errors import Denied, NotFound
from mqfs.http import groups
from mqfs.http.answers import CONTENT_TYPE, FORMATS, JSON, NO_STORE, Answer, Headers
from mqfs.http.route import BATCH, COMMANDS, LINES, MESSAGE, STAGED, Call, Route

# ---------------------------------------------------------------- the options of the table of routes

# Types, examples, and the equivalent headers. Only the document uses them: each call checks its own options.

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 1}
FLAG: Schema = {"type": "string", "enum": ["", "yes", "no"]}
DURATION: Schema = {"type": "string", "pattern": "^(0|[0-9]{1,9}(ms|s|m|h|d))$"}
SEQUENCE: Schema = {**COUNT, "maximum": 1 << 62}


class Option(NamedTuple):
    """An option of a request. `header` is the equivalent header."""

    schema: Schema
    about: str
    example: str
    header: str = ""


def _words(*words: str) -> Schema:
    return {**TEXT, "enum": list(words)}


# By name. An option with another meaning for a verb or a kind of node has that before its name, as "nack after".
_OPTIONS = {
    "after": Option(TEXT, "Entries behind that name.", "orders"),
    "consumer after": Option(SEQUENCE, "Messages behind that sequence.", "1"),
    "nack after": Option(DURATION, "How long to wait before the next delivery.", "30s"),
    "at": Option(
        {"type": "number", "minimum": 0, "maximum": (1 << 33) - 1}, "Deliver at that UNIX time.", "0", "Mqfs-At"
    ),
    "backlog": Option(SEQUENCE, "Messages that the consumer may have waiting.", "1000"),
    "bytes": Option({**COUNT, "maximum": limits.HTTP_READ_BYTES}, "End the answer behind that many bytes.", "65536"),
    "count": Option(SEQUENCE, "End the answer behind that many messages.", "10"),
    "group count": Option({**COUNT, "maximum": limits.HTTP_LISTED}, "Names, or messages of a `select`.", "10"),
    "consumer count": Option({**COUNT, "maximum": limits.HTTP_LISTED}, "Messages at most.", "10"),
    "create": Option(FLAG, "`no`: 404 where the stream is not there.", "no"),
    "cron": Option(
        TEXT,
        "Publish at the times of five fields and perhaps a zone; `id` names the schedule.",
        "0 5 * * 1-5 Europe/Berlin",
        "Mqfs-Cron",
    ),
    "data": Option(_words("json", "raw"), "The form of an event's data.", "raw"),
    "delay": Option(DURATION, "Deliver later.", "30s", "Mqfs-Delay"),
    "detail": Option(FLAG, "Each entry with its counters.", "yes"),
    "every": Option(DURATION, "Publish again and again, each 1s or more; `id` names the schedule.", "1h", "Mqfs-Every"),
    "expect": Option(
        {"type": "integer", "minimum": 0, "maximum": 1 << 62},
        "412 unless the newest message of the stream has that sequence; 0: it has none. As a header `If-Match`, in "
        "double quotes, too; `If-None-Match: *` is 0.",
        "0",
        "Mqfs-Expect",
    ),
    "follow": Option(FLAG, "Answer without an end.", "yes"),
    "format": Option(_words(*FORMATS), "How messages are framed; it wins over Accept.", "json"),
    "take format": Option(_words("raw", "line", "nul", "json"), "How messages are framed.", "line"),
    "consumer format": Option(_words("raw", "line", "nul", "json"), "How messages are framed.", "line"),
    "full": Option(_words("drop-old", "drop-new", "block", "reject"), "The policy at the backlog.", "drop-old"),
    "h-": Option(
        {"type": "object", "additionalProperties": TEXT, "propertyNames": {"pattern": "^h-[A-Za-z0-9_.-]{1,64}$"}},
        "`h-NAME=VALUE`, or `Mqfs-H-NAME`, is a header of the message; so are `traceparent` and `tracestate`.",
        "",
    ),
    "id": Option(
        {**TEXT, "minLength": 1, "maxLength": limits.ID_BYTES},
        "Publish once: a message of the same id is not published again. As a header `Mqfs-Id`, too.",
        "order-17",
        "Idempotency-Key",
    ),
    "key": Option(
        {**TEXT, "minLength": 1, "maxLength": limits.KEY_BYTES},
        "Which messages belong together.",
        "customer-7",
        "Mqfs-Key",
    ),
    "last_event_id": Option(
        {"type": "integer", "minimum": 0, "maximum": 10**18 - 1},
        "Begin behind that sequence; it wins over `since`, and the header over both.",
        "1",
        "Last-Event-ID",
    ),
    "lease": Option(DURATION, "How long the claims last, 1s to 12h.", "1m"),
    "max": Option({**COUNT, "maximum": limits.HTTP_CLAIMED}, "Messages at most.", "10"),
    "memory": Option(FLAG, "The consumer is not on disk.", "yes"),
    "order": Option(_words("key", "sequence"), "`key`: one message of a key at a time.", "key"),
    "over": Option(TEXT, "The stream that the consumer is over; without it, the group.", "orders"),
    "priority": Option({"type": "integer", "minimum": 0, "maximum": 9}, "9 is delivered first.", "9", "Mqfs-Priority"),
    "private": Option(FLAG, "One open handle at a time.", "yes"),
    "reason": Option(TEXT, "Why it is a dead letter.", "no such address"),
    "select": Option(
        {"type": "array", "items": TEXT}, "A stream, view or pattern to read; it may be repeated.", "orders"
    ),
    "reply": Option(DURATION, "Wait so long for the reply to the message, which is the answer; 504: none came.", "1s"),
    "seq": Option(SEQUENCE, "The message of that sequence.", "1"),
    "since": Option(TEXT, "`first`, `last`, `end`, a sequence, `-N` messages, `-DURATION` or `@UNIX`.", "-10"),
    "single": Option(FLAG, "For one of all subscribers.", "yes", "Mqfs-Single"),
    "streams": Option(TEXT, "Also the counters of streams of that pattern.", "#"),
    ".stats streams": Option(FLAG, "`no`: without those of streams.", "no"),
    "strict": Option(FLAG, "410 instead of a gap at the beginning.", "yes"),
    "transient": Option(FLAG, "The consumer ends with its last handle.", "no"),
    "ttl": Option(DURATION, "Expire after.", "1h", "Mqfs-Ttl"),
    "type": Option(_words("group", "stream", "view"), "Entries of that type only.", "stream"),
    "until": Option(TEXT, "The last sequence, or `end`: that of now.", "end"),
    "wait": Option(DURATION, "Wait that long for the first message, or for room.", "20s"),
}


def option(name: str, place: str) -> Option:
    """Return the description of an option. `place`: the verb, else the kind of node."""
    return _OPTIONS.get(f"{place} {name}") or _OPTIONS[name]


# ---------------------------------------------------------------- the document

Json = dict[str, Any]
ABOUT = """Message queues as files: directories are groups, files are streams. mqfs-http(5) explains each request.

GROUP is the path of a group: of nested ones several segments, of the root none. A HEAD is a GET without the body.
"""
NAMES = {"shop": "GROUP", "orders": "STREAM", "view": "STREAM", "jobs": "STREAM", "mail": "CONSUMER", "PART": "PART"}
TAGS = {  # by a part of the template; the first match counts
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
_BEARER = {"type": "http", "scheme": "bearer", "description": "A token of `mqfs token new`."}
_BASIC = {"type": "http", "scheme": "basic", "description": "The token as the password."}
_WORD = {"type": ["string", "null"]}
_SCHEMAS: dict[str, Json] = {
    "Problem": {
        "type": "object",
        "required": ["type", "title", "status", "detail"],
        "properties": {
            "type": TEXT,
            "title": TEXT,
            "status": {"type": "integer"},
            "detail": TEXT,
            "tokens": {"type": "array", "items": TEXT, "description": "With 410: those that were not settled."},
        },
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
    "Published": {
        "type": "object",
        "required": ["sequence", "retained"],
        "properties": {
            "sequence": {"type": ["integer", "null"], "description": "Sequence of the first message; null: discarded."},
            "retained": {"type": "boolean", "description": "false: neither settings, consumers nor readers retain it."},
        },
    },
    "Health": {
        "type": "object",
        "required": ["status"],
        "properties": {name: {"type": "array", "items": TEXT} for name in ("reasons", "warnings")} | {"status": TEXT},
    },
}
_MADE: dict[tuple[Route, ...], tuple[bytes, str]] = {}  # the text and its entity tag
_PIECES = 256  # of the encoder, between two looks at the clock
_OF_KIND = {"group": "Listing", "health": "Health", "ready": "Health"}
_OF_KIND |= dict.fromkeys(("stream", "new stream", ".batch"), "Published")


async def serve(table: Callable[[], tuple[Route, ...]], call: Call) -> Answer:
    """Answer with the OpenAPI document of a table of routes."""
    rows = table()
    if rows not in _MADE:
        made = await encoded(document(rows), call)
        _MADE[rows] = made, f'"{sha256(made).hexdigest()[:24]}"'
    data, tag = _MADE[rows]
    head: Headers = [("ETag", tag), ("Cache-Control", "no-cache")]
    if call.has_tag(tag):
        return Answer(304, headers=head)
    return Answer(200, data, JSON, head)


async def encoded(value: Json, call: Call) -> bytes:
    """Return a document's text. That takes some milliseconds, in which others are served."""
    pieces = []
    for number, piece in enumerate(json.JSONEncoder(indent=1).iterencode(value)):
        pieces.append(piece)
        if number % _PIECES == 0:
            await call.front.pause()
    return "".join(pieces).encode() + b"\n"


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
        "components": {
            "securitySchemes": {"bearer": _BEARER, "basic": _BASIC},
            "responses": {"Refused": _refused()},
            "schemas": _SCHEMAS,
        },
    }


def template(path: str) -> str:
    """Return the path template of an example: its names as parameters."""
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
    """Return the example as a value of its schema."""
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


# ---------------------------------------------------------------- AsyncAPI: the streams of the tree

# A stream is a channel: a POST to its path sends a message, a GET receives messages. The document is made for each
# request, as streams are made and removed.

STREAMS = "The streams of a tree of mqfs. POST publishes to a path, GET reads it; /.openapi.json has all requests."
_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
_MESSAGE = {
    "contentType": "application/octet-stream",
    "headers": {**_TEXTS, "description": "Headers of the message; in a request Mqfs-H-NAME."},
    "payload": {"type": "string", "format": "binary", "description": f"At most {limits.MESSAGE_BYTES:,} bytes."},
}


async def serve_streams(call: Call) -> Answer:
    """Answer with the AsyncAPI document of the streams that the user may list."""
    paths, whole = await _stream_paths(call)
    channels: Json = {}
    operations: Json = {}
    for path in paths:
        channels[path] = _channel(path)
        operations[f"publish:{path}"] = _stream_operation(path, "receive", "POST")
        operations[f"read:{path}"] = _stream_operation(path, "send", "GET")
        await call.front.pause()
    document = streams_document(call, channels, operations, whole=whole)
    return Answer(200, await encoded(document, call), JSON, list(NO_STORE))


def streams_document(call: Call, channels: Json, operations: Json, *, whole: bool) -> Json:
    """Return the AsyncAPI document. `whole`: whether it has all streams."""
    scheme, _, host = call.site.partition("://")
    more = "" if whole else f" Only {limits.HTTP_LISTED:,} streams are shown."
    server = {"host": host, "protocol": scheme}
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "mqfs",
            "version": __version__,
            "description": STREAMS + more,
            "license": {"name": "MIT"},
        },
        "servers": {"mqfs": {**server, "security": [{"$ref": "#/components/securitySchemes/token"}]}},
        "channels": channels,
        "operations": operations,
        "components": {"messages": {"message": _MESSAGE}, "securitySchemes": {"token": _BEARER}},
    }


def _channel(path: str) -> Json:
    return {"address": f"/{path}", "messages": {"message": {"$ref": "#/components/messages/message"}}}


def _stream_operation(path: str, action: str, method: str) -> Json:
    """Return an operation of AsyncAPI. `action`: as the server sees it."""
    pointer = path.replace("~", "~0").replace("/", "~1")
    return {
        "action": action,
        "channel": {"$ref": f"#/channels/{pointer}"},
        "bindings": {"http": {"method": method, "bindingVersion": "0.3.0"}},
    }


async def _stream_paths(call: Call) -> tuple[list[str], bool]:
    """Return the paths of streams and views, sorted, and whether these are all."""
    todo: list[tuple[str, Any]] = []
    found: list[str] = []
    path, node = "/".join(call.user.grant.path if call.user.grant is not None else ()), cast(Any, call.tree.root)
    try:
        for name in path.split("/") if path else ():  # a token may list nothing above its path
            node = call.tree.walk(call.user, node, name)
    except (Denied, NotFound):
        return [], True
    if (kind := groups.TYPES.get(type(node))) == "group":
        todo.append((f"{path}/" if path else "", node))
    elif kind is not None:
        found.append(path)
    while todo:
        above, group = todo.pop()
        for node in await _entries(group, call):
            kind, path = groups.TYPES.get(type(node)), f"{above}{node.name}"
            if kind == "group":
                todo.append((f"{path}/", node))
            elif kind is not None:
                if len(found) == limits.HTTP_LISTED:
                    return sorted(found), False
                found.append(path)
            await call.front.pause()
    return sorted(found), True


async def _entries(group: Any, call: Call) -> list[Any]:
    """Return the files in a group; none where the user may not list it or it was removed."""
    try:
        return list(await call.front.await_step(group.portions.run(call.tree.entries(call.user, group))))
    except (Denied, NotFound):
        return []
