"""The events of ntfy: messages as JSON lines, server-sent events and lines of text.

Owns what a message looks like to its clients, and which of them a subscriber's filters let through.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from mqfs.http.call import Call
from mqfs.http.dialects.ntfy_notes import PARTS, find, parse_priority, split_list
from mqfs.log import headers
from mqfs.syntax.duration import parse_duration

ID_DIGITS = 12
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_FIELDS = ("title", "click", "icon")  # of the message's headers, as they are


def to_id(sequence: int) -> str:
    """The sequence in base 36; as long as its clients expect."""
    text = ""
    while sequence:
        sequence, digit = divmod(sequence, 36)
        text = _DIGITS[digit] + text
    return text.zfill(ID_DIGITS)


def from_id(text: str) -> int | None:
    """None: it is none of ours."""
    known = len(text) == ID_DIGITS and not text.strip(_DIGITS)
    return int(text, 36) if known else None


def from_message(message: dict[str, Any]) -> dict[str, Any]:
    """Of a message as `format json` has it."""
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
    """The parts of a notification that are headers of the message."""
    event: dict[str, Any] = {name: given[name] for name in _FIELDS if name in given}
    if headers.PRIORITY in given:
        event["priority"] = max(1, (int(given[headers.PRIORITY]) + 1) // 2)
    if "tags" in given:
        event["tags"] = split_list(given["tags"])
    if "content-type" in given:
        event["content_type"] = given["content-type"]
    try:
        event["actions"] = json.loads(given["actions"])
    except (KeyError, ValueError, RecursionError):
        pass  # there are none, or not from here
    return event


def as_line(event: dict[str, Any]) -> bytes:
    return json.dumps(event, ensure_ascii=False).encode() + b"\n"


def as_event(event: dict[str, Any]) -> bytes:
    """With the id, which a browser sends when it comes back, of messages only: others stand for no place."""
    kind = event["event"]
    head = f"id: {event['id']}\n" if kind == "message" else f"event: {kind}\n"
    return head.encode() + b"data: " + as_line(event) + b"\n"


def as_text(event: dict[str, Any]) -> bytes:
    """The message on one line; of another event an empty one."""
    text: str = event.get("message", "")
    return text.replace("\r\n", " ").replace("\n", " ").encode() + b"\n"


class Filters(NamedTuple):
    """What a subscriber asks for; empty is everything."""

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
    """Raises BadRequest."""
    message, title, tags, priority = (find(call, PARTS[part]) for part in ("message", "title", "tags", "priority"))
    priorities = frozenset(map(parse_priority, split_list(priority)))
    return Filters(find(call, ("x-id", "id")), message, title, priorities, frozenset(split_list(tags)))
