"""A notification of ntfy as a request has it: in headers, in the query, or as JSON; and as a message has it.

Owns the names of its parts in all their forms. Publishes nothing.
"""

from __future__ import annotations

import json
import re
from email.errors import HeaderParseError
from email.header import decode_header, make_header
from typing import Any

import attrs

from mqfs import limits
from mqfs.errors import BadRequest, TooLong
from mqfs.http.call import Call
from mqfs.http.dialects.ntfy_times import parse_delay

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
ABSENT = ("attach", "filename", "email", "call", "template")  # what ntfy has and this has not
KEPT = ("title", "tags", "click", "icon", "actions")  # as headers of the message
PRIORITIES = ("min", "low", "default", "high", "max")
EMPTY = "triggered"  # the message of a request that has none
_OF_HTTP = re.compile(r"(u=\d|i)\b")  # RFC 9218: what browsers say in Priority
_NO = ("0", "no", "false")
UNCACHED_TTL_S = 10  # of a message with `cache: no`: for those who subscribe by then


@attrs.frozen
class Note:
    """A notification. `priority`: 1 to 5, 3 is none; `due`: UNIX time, 0 at once; `headers`: of the message."""

    text: str
    priority: int
    due: float
    cached: bool
    headers: dict[str, str]


def find(call: Call, names: tuple[str, ...]) -> str:
    """The first of some headers, then of some options, that is not empty."""
    given = call.request.headers
    for name in names:
        value = given.get(name, "").strip()
        if value and not (name == "priority" and _OF_HTTP.match(value)):
            return _decoded(value)
    options = {name.lower(): value.strip() for name, value in call.path.options}
    return next((options[name] for name in names if options.get(name)), "")


def _decoded(value: str) -> str:
    """A header's text, which may be encoded as RFC 2047 says."""
    if "=?" not in value:
        return value
    try:
        return str(make_header(decode_header(value)))
    except (HeaderParseError, LookupError, ValueError):
        return value


def from_request(call: Call, now: float) -> Note:
    """The body is the message, else one in a header or the query. Raises BadRequest."""
    parts = {part: find(call, names) for part, names in PARTS.items()}
    try:
        text = call.body.decode().strip()
    except UnicodeDecodeError:
        raise BadRequest("the message is no UTF-8, and there are no attachments") from None
    return _note({**parts, "message": text or parts["message"].replace("\\n", "\n")}, now)


def from_json(call: Call, now: float) -> tuple[str, Note]:
    """The topic, and a notification whose parts beat those of headers. Raises BadRequest."""
    try:
        given = json.loads(call.body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from None
    if not isinstance(given, dict) or not isinstance(given.get("topic"), str):
        raise BadRequest('the body is no object with a "topic" (expected {"topic": ..., "message": ...})')
    parts = {part: find(call, names) for part, names in PARTS.items()}
    parts |= {part: _text(part, given[part]) for part in PARTS if given.get(part) not in (None, "", [])}
    return given["topic"], _note(parts, now)


def _text(part: str, value: Any) -> str:
    """A part of JSON as a header would have it."""
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
    if parts["actions"]:
        _check_actions(parts["actions"])
    try:
        size = len(parts["message"].encode())
        "".join(parts.values()).encode()
    except UnicodeEncodeError:
        raise BadRequest("the notification holds half a character (expected Unicode text)") from None
    if size > limits.NTFY_BYTES:
        raise TooLong(f"a message of {size} bytes (expected at most {limits.NTFY_BYTES})")
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


def _check_actions(text: str) -> None:
    try:
        actions = json.loads(text)
    except (ValueError, RecursionError):
        actions = None
    if not isinstance(actions, list) or not all(isinstance(action, dict) for action in actions):
        raise BadRequest("actions: not an array of objects in JSON (the short form is not supported)")


def split_list(text: str) -> list[str]:
    return [word for part in text.split(",") if (word := part.strip())]


def parse_priority(text: str) -> int:
    """1 to 5. Raises BadRequest."""
    word = "max" if text.lower() == "urgent" else text.lower()
    if word in PRIORITIES:
        return PRIORITIES.index(word) + 1
    if word not in ("1", "2", "3", "4", "5"):
        raise BadRequest(f"priority {text[:80]!r} (expected 1 to 5, or {', '.join(PRIORITIES)})")
    return int(word)
