"""The dialect of ntfy: one group at the root of a listener of its own, its streams are topics.

Owns that table. A notification is a message whose parts are headers; publishing and reading are those of the tree.
"""

from __future__ import annotations

import base64
import json
import os
import re
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from mqfs import limits
from mqfs.engine.language.message_formats import as_json as as_json_line
from mqfs.engine.tree.tree import Tree
from mqfs.errors import BadRequest, Denied, MqfsError, NotFound, StreamFull
from mqfs.http import publishing, reading
from mqfs.http.answers import JSON, LINES, TEXT, Answer, Format, as_json
from mqfs.http.call import Call
from mqfs.http.dialects import ntfy_notes
from mqfs.http.dialects.ntfy_events import (
    as_event,
    as_line,
    as_text,
    described,
    filters_of,
    from_id,
    from_message,
    to_id,
)
from mqfs.http.dialects.ntfy_notes import UNCACHED_TTL_S, Note, find
from mqfs.http.dialects.ntfy_times import parse_span
from mqfs.http.groups import ensure_stream
from mqfs.http.route import JSON_NOTE, NOTE, Route
from mqfs.http.routes import Table
from mqfs.http.target import Path, Target, group_at
from mqfs.http.wire import Request
from mqfs.log import headers
from mqfs.model import User
from mqfs.syntax.names import check_name

TOPIC = re.compile(r"[-_A-Za-z0-9]{1,64}")
_YES = ("1", "yes", "true")
_FORMS: dict[str, tuple[str, Callable[[dict[str, Any]], bytes]]] = {
    "json": (LINES, as_line),
    "sse": ("text/event-stream", as_event),
    "raw": (TEXT, as_text),
}


# ---------------------------------------------------------------- paths, credentials, refusals


def resolve(group: tuple[str, ...], tree: Tree, user: User, path: Path) -> Target:
    """A path on the listener of that group. Raises NotFound, Denied."""
    if path.names in (("v1", "health"), ("v1", "stats")):
        return Target(path.names[1], group_at(tree, user, group), path.text)
    if len(path.names) > 2 or (path.names and path.slash):
        raise NotFound(path.text)
    if not path.names:
        return Target("root", group_at(tree, user, group), "/")
    topics, verb = path.names[0], path.names[1] if len(path.names) == 2 else ""
    for topic in topics.split(","):
        if not TOPIC.fullmatch(topic):
            raise NotFound(f"{topic[:80]!r} (expected a topic: 1 to 64 letters, digits, - and _)")
        check_name(topic)
    return Target("topics" if "," in topics else "topic", group_at(tree, user, group), topics, verb)


def credentials(request: Request, path: Path, encrypted: bool) -> str | None:
    """Of the header, or of `auth`, which is such a header in base64; it lands in logs, so only over TLS."""
    coded = next((value for name, value in path.options if name.lower() in ("auth", "authorization")), None)
    if coded is None:
        return request.headers.get("authorization")
    if not encrypted:
        raise Denied("auth in the query of a request that is not encrypted (expected the header Authorization)")
    try:
        return base64.urlsafe_b64decode(coded + "=" * (-len(coded) % 4)).decode()
    except ValueError:
        raise BadRequest("auth is no base64 of a header Authorization") from None


def problem(error: MqfsError, plain: bool) -> tuple[str, bytes]:
    """As its clients read it."""
    code = error.http * 100 + (error.http != 400)
    return JSON, json.dumps(
        {"code": code, "http": error.http, "error": str(error)}, ensure_ascii=False
    ).encode() + b"\n"


# ---------------------------------------------------------------- publishing


async def publish(call: Call) -> Answer:
    """The body, or what a header or the query says, is the message."""
    return await _publish(call, call.target.name, ntfy_notes.from_request(call, time.time()))


async def publish_json(call: Call) -> Answer:
    topic, note = ntfy_notes.from_json(call, time.time())
    if not TOPIC.fullmatch(topic):
        raise BadRequest(f"topic {topic[:80]!r} (expected 1 to 64 letters, digits, - and _)")
    return await _publish(call, check_name(topic), note)


async def _publish(call: Call, topic: str, note: Note) -> Answer:
    await ensure_stream(call, topic)
    put: dict[str, Any] = {"stream": topic, "headers": note.headers, "kept": True}
    if note.priority != 3:
        put["priority"] = 2 * note.priority - 1
    if note.due:
        put["at"] = note.due
    if not note.cached:
        put["ttl"] = f"{UNCACHED_TTL_S}s"
    data = json.dumps(put, ensure_ascii=False).encode() + b"\n" + note.text.encode()
    if not (answer := await publishing.ask(call, call.group, ".put", data)):
        raise StreamFull(topic)
    sequence, time_ns = int(answer[0]), int(answer[1])
    event = {"id": to_id(sequence), "time": int(note.due or time_ns / 1e9), "event": "message", "topic": topic}
    priority = {headers.PRIORITY: str(put["priority"])} if "priority" in put else {}
    return as_json(event | {"message": note.text} | described(note.headers | priority))


# ---------------------------------------------------------------- subscribing


async def subscribe(call: Call) -> Answer:
    """Messages of topics: those that are kept, then those that come; with `poll` the former only. Before them, with
    `scheduled`, those that wait for their time."""
    kind, encode = _FORMS[call.target.verb]
    topics = list(dict.fromkeys(call.target.name.split(",")))
    poll = _flag(call, "x-poll", "poll", "po")
    known = [topic for topic in topics if reading.exists(call, topic)]
    select = "select" if len(known) == len(topics) else "cover"  # what is not there is waited for
    filters, end = filters_of(call), call.group.log.end.next

    def message(line: bytes) -> bytes:
        message = json.loads(line)
        if message["sequence"] < end and message.get("headers", {}).get("cache") == "no":
            return b""
        event = from_message(message)
        return encode(event) if filters.admit(event) else b""

    def other(event: str) -> bytes:
        now = time.time()
        return encode({"id": to_id(int(now * 1e6)), "time": int(now), "event": event, "topic": call.target.name})

    begin = b"" if poll else other("open")
    if _flag(call, "x-scheduled", "scheduled", "sched"):
        begin += b"".join([encode(event) async for event in _scheduled(call, known) if filters.admit(event)])
    form = Format(
        kind,
        "json",
        message,
        begin=begin,
        beat=partial(other, "keepalive"),
        silence_s=lambda: limits.NTFY_BEAT_S,
    )
    words = reading.Wish(form, _since(call, poll), None, None, None, None, follow=not poll, strict=False)
    return await reading.answer(call, reading.open_source(call, topics, words, select), words)


async def _scheduled(call: Call, topics: list[str]) -> AsyncIterator[dict[str, Any]]:
    """Messages that wait for their time, which is theirs."""
    clock, delayed = call.tree.clock, call.group.held
    wall_ns = clock.wall_ns() - clock.engine_ns()
    for stream in map(call.own, topics):
        for sequence in delayed.sequences(stream.number):
            if (record := delayed.record(sequence)) is not None:
                due_ns = int(headers.decode(record.headers)[headers.DUE]) + wall_ns
                yield from_message(json.loads(as_json_line(record, stream.name)) | {"time": due_ns / 1e9})
            await call.front.pause()


def _flag(call: Call, *names: str) -> bool:
    return find(call, names).lower() in _YES


def _since(call: Call, poll: bool) -> str:
    """A word of `seek`. Raises BadRequest."""
    text = find(call, ("x-since", "since", "si")) or ("all" if poll else "none")
    text = call.request.headers.get("last-event-id") or text
    if (word := {"all": "first", "none": "end", "latest": "-1"}.get(text)) is not None:
        return word
    if (sequence := from_id(text)) is not None:
        return str(sequence + 1) if sequence < call.group.log.end.next else "first"  # as one that is not known
    if text.isascii() and text.isdigit() and len(text) < 12:
        return f"@{text}"
    if (span := parse_span(text)) is not None:
        return f"@{max(int(time.time()) - span, 0)}"
    raise BadRequest(f"since {text[:80]!r} (expected a duration, UNIX time, an id, all, latest or none)")


# ---------------------------------------------------------------- the rest


async def check_access(call: Call) -> Answer:
    """Whether the user may read the topic."""
    try:
        call.tree.access(call.user, call.own(call.target.name), os.R_OK)
    except NotFound:
        call.tree.access(call.user, call.group, os.R_OK)
    return as_json({"success": True})


async def health(call: Call) -> Answer:
    return as_json({"healthy": not call.front.troubles()})


async def stats(call: Call) -> Answer:
    """Messages of the group since the server started."""
    return as_json({"messages": call.group.counts.written})


def _reads(kind: str) -> tuple[Route, ...]:
    return tuple(Route("GET", kind, f"/TOPIC/{verb}", subscribe, "Subscribe.", verb, ("*",)) for verb in _FORMS)


def _publishes(verb: str) -> Route:
    about = "Publish what the query says."
    return Route("GET", "topic", f"/TOPIC/{verb}", publish, about, verb, ("*",), NOTE, changes=True)


ROUTES = (
    Route("POST", "topic", "/TOPIC", publish, "Publish the body.", options=("*",), body=NOTE),
    Route("PUT", "topic", "/TOPIC", publish, "Publish the body.", options=("*",), body=NOTE),
    *map(_publishes, ("publish", "send", "trigger")),
    Route("POST", "root", "/", publish_json, "Publish a notification in JSON.", options=("*",), body=JSON_NOTE),
    Route("PUT", "root", "/", publish_json, "Publish a notification in JSON.", options=("*",), body=JSON_NOTE),
    *_reads("topic"),
    *_reads("topics"),
    Route("GET", "topic", "/TOPIC/auth", check_access, "Whether the topic may be read.", "auth", ("*",)),
    Route("GET", "health", "/v1/health", health, "Whether the server is ready.", options=("*",)),
    Route("GET", "stats", "/v1/stats", stats, "How many messages there were.", options=("*",)),
)


def table(group: str) -> Table:
    """What a listener serves whose root is that group, `NAME` or `NAME/NAME`."""
    return Table(ROUTES, partial(resolve, tuple(group.split("/"))), credentials, problem)
