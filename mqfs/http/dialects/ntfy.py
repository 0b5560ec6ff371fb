"""The dialect of ntfy: a group at the root of a listener of its own, whose streams are topics.

The parts of a notification are headers of its message; publishing and reading are those of the tree.
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from datetime import datetime, timedelta
from email.errors import HeaderParseError
from email.header import decode_header, make_header
from functools import partial
from typing import Any, NamedTuple, cast

import attrs

from mqfs import limits
from mqfs.engine.language.message_formats import as_json as as_json_line
from mqfs.engine.tree.tree import Tree
from mqfs.errors import BadRequest, Denied, MqfsError, NotFound, StreamFull, TooLong
from mqfs.http import publishing, reading
from mqfs.http.answers import JSON, LINES, TEXT, Answer, Format, as_json
from mqfs.http.groups import with_stream
from mqfs.http.route import JSON_NOTE, NOTE, Call, Route
from mqfs.http.routes import Table
from mqfs.http.target import Path, Target, group_at
from mqfs.http.wire import Request
from mqfs.model import User
from mqfs.records import headers
from mqfs.syntax.duration import parse_duration
from mqfs.syntax.names import check_name

# ---------------------------------------------------------------- times

# `30m`, `2 days`, `1h30m`, UNIX seconds, `tomorrow, 10am`, `monday 17:30`, `9am`; days and hours are local time.

DELAY_LEAST_S, DELAY_MOST_S = 10, 3 * 86_400
_PART = re.compile(r"(\d{1,9})\s*(days?|d|hours?|hrs?|h|minutes?|mins?|m|seconds?|secs?|s)\s*")
_SECONDS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_CLOCK = re.compile(r"(?:at )?(\d{1,2})(?::(\d\d))?\s*(am|pm)?")
_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_EXPECTED = "30m, 2 days, UNIX seconds, or such as `tomorrow, 10am`, `monday 17:30`, `9am`"


def parse_span(text: str) -> int | None:
    """Return the seconds of a duration, or None for other text."""
    at, seconds, text = 0, 0, text.strip().lower()
    while match := _PART.match(text, at):
        seconds += int(match[1]) * _SECONDS[match[2][0]]
        at = match.end()
    return seconds if at and at == len(text) else None


def parse_delay(text: str, now: float) -> float:
    """Return the UNIX time of a delay of 10 seconds to 3 days. Raises BadRequest."""
    span = parse_span(text)
    if span is not None:
        due = now + span
    elif text.isascii() and text.isdigit() and len(text) < 12:
        due = float(text)
    else:
        due = _named(text.lower(), datetime.fromtimestamp(now)).timestamp()
    if not DELAY_LEAST_S <= due - now + 0.5 <= DELAY_MOST_S + 1:
        raise BadRequest(f"delay {text!r} (expected 10 seconds to 3 days from now)")
    return due


def _named(text: str, now: datetime) -> datetime:
    """Return the moment of a time of day on a named day; without a day it is the next such time. Raises BadRequest."""
    words = text.replace(",", " ").split(maxsplit=1)
    day, rest = (words[0], " ".join(words[1:])) if words else ("", "")
    ahead = {"today": 0, "tomorrow": 1}.get(day)
    if day in _DAYS:
        ahead = (_DAYS.index(day) - now.weekday() - 1) % 7 + 1
    match = _CLOCK.fullmatch(text.strip() if ahead is None else rest)
    if match is None or (match[2] is None and match[3] is None):
        raise BadRequest(f"delay {text!r} (expected {_EXPECTED})")
    hour, minute = int(match[1]), int(match[2] or 0)
    if minute > 59 or (hour > 23 if match[3] is None else not 1 <= hour <= 12):
        raise BadRequest(f"delay {text!r}: no such time of day")
    if match[3] is not None:
        hour = hour % 12 + 12 * (match[3] == "pm")
    moment = (now + timedelta(days=ahead or 0)).replace(hour=hour, minute=minute, second=0, microsecond=0)
    return moment + timedelta(days=1) if ahead is None and moment <= now else moment


# ---------------------------------------------------------------- notifications

# A notification in a request (headers, query or JSON) and in a message. PARTS: by part, its names in all these forms.

PARTS = {
    "message": ("x-message", "message", "m"),
    "title": ("x-title", "title", "t"),
    "priority": ("x-priority", "priority", "prio", "p"),
    "tags": ("x-tags", "tags", "tag", "ta"),
    "delay": ("x-delay", "delay", "x-at", "at", "x-in", "in"),
    "click": ("x-click", "click"),
    "actions": ("x-actions", "actions", "action"),
    "icon": ("x-icon", "icon"),
    "markdown": ("x-markdown", "markdown", "md"),
    "cache": ("x-cache", "cache"),
    "attach": ("x-attach", "attach", "a"),
    "filename": ("x-filename", "filename", "file", "f"),
    "email": ("x-email", "x-e-mail", "email", "e-mail", "mail", "e"),
    "call": ("x-call", "call"),
    "template": ("x-template", "template", "tpl"),
}
ABSENT = ("attach", "filename", "email", "call", "template")  # parts of ntfy that are refused here
KEPT = ("title", "tags", "click", "icon", "actions")  # as headers of the message
PRIORITIES = ("min", "low", "default", "high", "max")
EMPTY = "triggered"  # the message of a request that has none
_OF_HTTP = re.compile(r"(u=\d|i)\b")  # RFC 9218: the Priority that browsers send
_NO = ("0", "no", "false")
ACTION_BRACKETS = 500  # in all actions; ntfy has three of them at most
UNCACHED_TTL_S = 10  # of a message with `cache: no`, for present subscribers


@attrs.frozen
class Note:
    """A notification. `priority`: 1 to 5, by default 3. `due`: UNIX time; 0: at once. `headers`: of the message."""

    text: str
    priority: int
    due: float
    cached: bool
    headers: dict[str, str]


def find(call: Call, names: tuple[str, ...]) -> str:
    """Return the first value that is not empty: of the headers of those names, then of the options; else ""."""
    given = call.request.headers
    for name in names:
        value = given.get(name, "").strip()
        if value and not (name == "priority" and _OF_HTTP.match(value)):
            return _decoded(value)
    options = {name.lower(): value.strip() for name, value in call.path.options}
    return next((options[name] for name in names if options.get(name)), "")


def _decoded(value: str) -> str:
    """Return the text of a header, decoded if it is encoded as in RFC 2047."""
    if "=?" not in value:
        return value
    try:
        return str(make_header(decode_header(value)))
    except (HeaderParseError, LookupError, ValueError):
        return value


def from_request(call: Call, now: float) -> Note:
    """Return the notification of a request. Its message is the body, else in a header or the query. Raises BadRequest,
    TooLong."""
    parts = {part: find(call, names) for part, names in PARTS.items()}
    try:
        text = call.body.decode().strip()
    except UnicodeDecodeError:
        raise BadRequest("message: not UTF-8 (attachments are not supported)") from None
    return _note({**parts, "message": text or parts["message"].replace("\\n", "\n")}, now)


def from_json(call: Call, now: float) -> tuple[str, Note]:
    """Return the topic and the notification of a body in JSON, whose parts override those of headers and the query.
    Raises BadRequest, TooLong."""
    try:
        given = json.loads(call.body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"body: not JSON: {error}") from None
    if not isinstance(given, dict) or not isinstance(given.get("topic"), str):
        raise BadRequest('body: no "topic" (expected {"topic": ..., "message": ...})')
    parts = {part: find(call, names) for part, names in PARTS.items()}
    parts |= {part: _text(part, given[part]) for part in PARTS if given.get(part) not in (None, "", [])}
    return given["topic"], _note(parts, now)


def _text(part: str, value: Any) -> str:
    """Return a part of JSON as the text of a header. Raises BadRequest."""
    if part == "actions":
        return json.dumps(value, ensure_ascii=False)
    if part == "tags" and isinstance(value, list) and all(isinstance(tag, str) for tag in value):
        return ",".join(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str | int):
        return str(value)
    raise BadRequest(f"{part} {str(value)[:80]!r} (expected text)")


def _note(parts: dict[str, str], now: float) -> Note:
    if absent := [part for part in ABSENT if parts[part]]:
        raise BadRequest(f"{absent[0]}: not supported by this server")
    cached = parts["cache"].lower() not in _NO
    if not cached and parts["delay"]:
        raise BadRequest("cache: a delayed message is always kept")
    if parts["actions"] and parse_actions(parts["actions"]) is None:
        raise BadRequest("actions: not an array of objects in JSON (the short form is not supported)")
    try:
        size = len(parts["message"].encode())
        "".join(parts.values()).encode()
    except UnicodeEncodeError:
        raise BadRequest("notification: half a character (expected Unicode text)") from None
    if size > limits.NTFY_BYTES:
        raise TooLong(f"message of {size} bytes: too long (expected at most {limits.NTFY_BYTES})")
    parts["tags"] = ",".join(split_list(parts["tags"]))
    headers = {part: parts[part] for part in KEPT if parts[part]}
    if parts["markdown"].lower() in ("1", "yes", "true"):
        headers["content-type"] = "text/markdown"
    if not cached:
        headers["cache"] = "no"
    return Note(
        text=parts["message"] or EMPTY,
        priority=parse_priority(parts["priority"]) if parts["priority"] else 3,
        due=parse_delay(parts["delay"], now) if parts["delay"] else 0.0,
        cached=cached,
        headers=headers,
    )


def parse_actions(text: str) -> list[dict[str, Any]] | None:
    """Return the actions, or None where they are not an array of objects that every program can read.

    Python's json also reads NaN, infinite numbers and lone surrogates, and nesting as deep as its stack permits at the
    moment."""
    if text.count("[") + text.count("{") > ACTION_BRACKETS:
        return None
    try:
        actions = _DECODER.decode(text)
        json.dumps(actions, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return actions if isinstance(actions, list) and all(isinstance(action, dict) for action in actions) else None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} (expected a finite number)")
    return value


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def split_list(text: str) -> list[str]:
    return [word for part in text.split(",") if (word := part.strip())]


def parse_priority(text: str) -> int:
    """Return a priority, 1 to 5, from its number or name. Raises BadRequest."""
    word = "max" if text.lower() == "urgent" else text.lower()
    if word in PRIORITIES:
        return PRIORITIES.index(word) + 1
    if word not in ("1", "2", "3", "4", "5"):
        raise BadRequest(f"priority {text[:80]!r} (expected 1 to 5, or {', '.join(PRIORITIES)})")
    return int(word)


# ---------------------------------------------------------------- events: messages as JSON lines, SSE or text, filtered

ID_DIGITS = 12
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_FIELDS = ("title", "click", "icon")  # headers of the message, copied unchanged


def to_id(sequence: int) -> str:
    """Return the sequence in base 36, with as many digits as clients expect."""
    text = ""
    while sequence:
        sequence, digit = divmod(sequence, 36)
        text = _DIGITS[digit] + text
    return text.zfill(ID_DIGITS)


def from_id(text: str) -> int | None:
    """Return the sequence of an id; None for other text."""
    known = len(text) == ID_DIGITS and not text.strip(_DIGITS)
    return int(text, 36) if known else None


def from_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return the event for a message of `format json`."""
    given, time = message.get("headers", {}), int(message["time"])
    event: dict[str, Any] = {"id": to_id(message["sequence"]), "time": time}
    if headers.TTL in given:
        event["expires"] = time + parse_duration(given[headers.TTL]) // 10**9
    event |= {"event": "message", "topic": message["stream"]}
    event["message"] = message.get("body", message.get("body_base64"))
    if "body" not in message:
        event["encoding"] = "base64"
    return event | described(given)


def described(given: dict[str, str]) -> dict[str, Any]:
    """Return the parts of a notification from the headers of its message."""
    event: dict[str, Any] = {name: given[name] for name in _FIELDS if name in given}
    if headers.PRIORITY in given:
        event["priority"] = max(1, (int(given[headers.PRIORITY]) + 1) // 2)
    if "tags" in given:
        event["tags"] = split_list(given["tags"])
    if "content-type" in given:
        event["content_type"] = given["content-type"]
    if (actions := parse_actions(given.get("actions", ""))) is not None:  # else none, or of another program
        event["actions"] = actions
    return event


def as_line(event: dict[str, Any]) -> bytes:
    return json.dumps(event, ensure_ascii=False).encode() + b"\n"


def as_event(event: dict[str, Any]) -> bytes:
    """Return a server-sent event. Only a message has an id, which a browser sends when it reconnects: other events have
    no position."""
    kind = event["event"]
    head = f"id: {event['id']}\n" if kind == "message" else f"event: {kind}\n"
    return head.encode() + b"data: " + as_line(event) + b"\n"


def as_text(event: dict[str, Any]) -> bytes:
    """Return the message on one line; an empty line for another event."""
    text: str = event.get("message", "")
    return text.replace("\r\n", " ").replace("\n", " ").encode() + b"\n"


class Filters(NamedTuple):
    """The filters of a subscriber; an empty one passes all."""

    id: str
    message: str
    title: str
    priorities: frozenset[int]
    tags: frozenset[str]

    def admit(self, event: dict[str, Any]) -> bool:
        return (
            self.id in ("", event["id"])
            and self.message in ("", event["message"])
            and self.title in ("", event.get("title"))
            and (not self.priorities or event.get("priority", 3) in self.priorities)
            and self.tags <= set(event.get("tags", ()))
        )


def filters_of(call: Call) -> Filters:
    """Return the filters of a request. Raises BadRequest."""
    message, title, tags, priority = (find(call, PARTS[part]) for part in ("message", "title", "tags", "priority"))
    priorities = frozenset(map(parse_priority, split_list(priority)))
    return Filters(find(call, ("x-id", "id")), message, title, priorities, frozenset(split_list(tags)))


# ---------------------------------------------------------------- paths, credentials, refusals

TOPIC = re.compile(r"[-_A-Za-z0-9]{1,64}")
_YES = ("1", "yes", "true")
_FORMS: dict[str, tuple[str, Callable[[dict[str, Any]], bytes]]] = {
    "json": (LINES, as_line),
    "sse": ("text/event-stream", as_event),
    "raw": (TEXT, as_text),
}


def resolve(group: tuple[str, ...], tree: Tree, user: User, path: Path) -> Target:
    """Return the target of a path on the listener of a group. Raises NotFound, Denied."""
    if path.names in (("v1", "health"), ("v1", "stats")):
        return Target(path.names[1], group_at(tree, user, group), path.text)
    if len(path.names) > 2 or (path.names and path.slash):
        raise NotFound(f"no page {path.text!r}")
    if not path.names:
        return Target("root", group_at(tree, user, group), "/")
    topics, verb = path.names[0], path.names[1] if len(path.names) == 2 else ""
    for topic in topics.split(","):
        if not TOPIC.fullmatch(topic):
            raise NotFound(f"invalid topic {topic[:80]!r} (expected 1 to 64 letters, digits, - and _)")
        check_name(topic)
    return Target("topics" if "," in topics else "topic", group_at(tree, user, group), topics, verb)


def credentials(request: Request, path: Path, encrypted: bool) -> str | None:
    """Return the credentials of a request: of its header, or of the option `auth`, the header's value in base64. Raises
    Denied for `auth` without TLS, as queries are logged; BadRequest."""
    coded = next((value for name, value in path.options if name.lower() in ("auth", "authorization")), None)
    if coded is None:
        return request.headers.get("authorization")
    if not encrypted:
        raise Denied("auth: in the query of an unencrypted request (expected the header Authorization)")
    try:
        return base64.urlsafe_b64decode(coded + "=" * (-len(coded) % 4)).decode()
    except ValueError:
        raise BadRequest("auth: not base64 (expected that of a header Authorization)") from None


def problem(error: MqfsError, plain: bool) -> tuple[str, bytes]:
    """Return content type and body for an error, in the JSON of ntfy."""
    code = error.http * 100 + (error.http != 400)
    return JSON, json.dumps(
        {"code": code, "http": error.http, "error": str(error)}, ensure_ascii=False
    ).encode() + b"\n"


# ---------------------------------------------------------------- publishing


async def publish(call: Call) -> Answer:
    """Publish the notification of a request."""
    return await _publish(call, call.target.name, from_request(call, time.time()))


async def publish_json(call: Call) -> Answer:
    topic, note = from_json(call, time.time())
    if not TOPIC.fullmatch(topic):
        raise BadRequest(f"topic {topic[:80]!r} (expected 1 to 64 letters, digits, - and _)")
    return await _publish(call, check_name(topic), note)


async def _publish(call: Call, topic: str, note: Note) -> Answer:
    put: dict[str, Any] = {"stream": topic, "headers": note.headers, "kept": True}
    if note.priority != 3:
        put["priority"] = 2 * note.priority - 1
    if note.due:
        put["at"] = note.due
    if not note.cached:
        put["ttl"] = f"{UNCACHED_TTL_S}s"
    data = json.dumps(put, ensure_ascii=False).encode() + b"\n" + note.text.encode()

    async def ask() -> list[bytes]:
        if not (words := await publishing.ask(call, call.group, ".put", data)):
            raise StreamFull(f"stream is full: {topic!r}")
        return words

    answer = await with_stream(call, topic, ask)
    sequence, time_ns = int(answer[0]), int(answer[1])
    event = {"id": to_id(sequence), "time": int(note.due or time_ns / 1e9), "event": "message", "topic": topic}
    priority = {headers.PRIORITY: str(put["priority"])} if "priority" in put else {}
    return as_json(event | {"message": note.text} | described(note.headers | priority))


# ---------------------------------------------------------------- subscribing


async def subscribe(call: Call) -> Answer:
    """Answer with messages of topics: retained ones, then new ones; with `poll`, only retained ones. With `scheduled`
    the delayed messages are first."""
    kind, encode = _FORMS[call.target.verb]
    topics = list(dict.fromkeys(call.target.name.split(",")))
    poll = _flag(call, "x-poll", "poll", "po")
    known = {call.own(topic).number: topic for topic in topics if reading.exists(call, topic)}
    select = "select" if len(known) == len(topics) else "cover"  # waits for streams that do not exist yet
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

    begin, scheduled = b"" if poll else other("open"), _flag(call, "x-scheduled", "scheduled", "sched")
    form = Format(
        kind,
        "json",
        message,
        begin=b"" if scheduled else begin,
        beat=partial(other, "keepalive"),
        silence_s=lambda: limits.NTFY_BEAT_S,
    )
    words = reading.Wish(form, _since(call, poll), follow=not poll)
    # opened before delayed messages are read: a message that becomes due between the two is read by the cursor
    answer = await reading.answer(call, reading.open_source(call, topics, words, select), words)
    if not scheduled:
        return answer
    waiting = _scheduled(call, known, lambda event: encode(event) if filters.admit(event) else b"")
    return attrs.evolve(answer, body=_joined(begin, waiting, answer.body))


async def _joined(*parts: bytes | AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the pieces of all parts: all delayed messages may be too large for memory."""
    for part in parts:
        if isinstance(part, bytes):
            yield part
            continue
        async with aclosing(cast(Any, part)):
            async for piece in part:
                yield piece
                del piece  # free it: the wait for the next piece may be long


async def _scheduled(
    call: Call, topics: dict[int, str], encode: Callable[[dict[str, Any]], bytes]
) -> AsyncIterator[bytes]:
    """Yield the delayed messages of topics, each with its due time as its time. Other requests are served after each,
    and after each portion without any."""
    clock, delayed = call.tree.clock, call.group.held
    wall_ns = clock.wall_ns() - clock.engine_ns()
    for sequences in delayed.sequences(topics):
        for sequence, number in sequences:
            if (record := delayed.record(sequence)) is not None:
                due_ns = int(headers.decode(record.headers)[headers.DUE]) + wall_ns
                message = json.loads(as_json_line(record, topics[number]))
                yield encode(from_message(message | {"time": due_ns / 1e9}))
            await call.front.pause()
        await call.front.pause()


def _flag(call: Call, *names: str) -> bool:
    return find(call, names).lower() in _YES


def _since(call: Call, poll: bool) -> str:
    """Return the word of `seek` for the option `since`, or for the last event's id. Raises BadRequest."""
    text = find(call, ("x-since", "since", "si")) or ("all" if poll else "none")
    text = call.request.headers.get("last-event-id") or text
    if (word := {"all": "first", "none": "end", "latest": "-1"}.get(text)) is not None:
        return word
    if (sequence := from_id(text)) is not None:
        return str(sequence + 1) if sequence < call.group.log.end.next else "first"  # as for an unknown id
    if text.isascii() and text.isdigit() and len(text) < 12:
        return f"@{text}"
    if (span := parse_span(text)) is not None:
        return f"@{max(int(time.time()) - span, 0)}"
    raise BadRequest(f"since {text[:80]!r} (expected a duration, UNIX time, an id, all, latest or none)")


# ---------------------------------------------------------------- the rest


async def check_access(call: Call) -> Answer:
    """Check that the user may read the topic, and open the cursor of `subscribe`. Raises Denied."""
    call.tree.access(call.user, call.own(".cursor"), os.R_OK | os.W_OK)
    try:
        call.tree.access(call.user, call.own(call.target.name), os.R_OK)
    except NotFound:
        call.tree.access(call.user, call.group, os.R_OK)
    return as_json({"success": True})


async def health(call: Call) -> Answer:
    return as_json({"healthy": not call.front.server.troubles()})


async def stats(call: Call) -> Answer:
    """Answer with the number of messages of the group since the server started. Raises Denied, as `.stats` does."""
    call.tree.access(call.user, call.own(".stats"), os.R_OK)
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
    """Return the routes of a listener whose root is a group, `NAME` or `NAME/NAME`."""
    return Table(ROUTES, partial(resolve, tuple(group.split("/"))), credentials, problem)
