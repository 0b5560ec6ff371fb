"""What the options of the table of routes are: types, examples, and the headers that say the same.

For readers of the table only: each call checks its own options.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mqfs import limits
from mqfs.http.answers import FORMATS

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 1}
FLAG: Schema = {"type": "string", "enum": ["", "yes", "no"]}
DURATION: Schema = {"type": "string", "pattern": "^(0|[0-9]{1,9}(ms|s|m|h|d))$"}
SEQUENCE: Schema = {**COUNT, "maximum": 1 << 62}


class Option(NamedTuple):
    """`header` is the header that says the same."""

    schema: Schema
    about: str
    example: str
    header: str = ""


def _words(*words: str) -> Schema:
    return {**TEXT, "enum": list(words)}


# By name; where it means something else behind a verb, or at a kind of node, by that and its name.
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
    "data": Option(_words("json", "raw"), "What the data of an event is.", "raw"),
    "delay": Option(DURATION, "Deliver later.", "30s", "Mqfs-Delay"),
    "detail": Option(FLAG, "Each entry with its counters.", "yes"),
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
    "last_event_id": Option(
        {"type": "integer", "minimum": 0, "maximum": 10**18 - 1},
        "Begin behind that sequence; it wins over `since`, and the header over both.",
        "1",
        "Last-Event-ID",
    ),
    "lease": Option(DURATION, "How long the claims last, 1s to 12h.", "1m"),
    "max": Option({**COUNT, "maximum": limits.HTTP_CLAIMED}, "Messages at most.", "10"),
    "memory": Option(FLAG, "The consumer is not on disk.", "yes"),
    "over": Option(TEXT, "The stream that the consumer is over; without it, the group.", "orders"),
    "priority": Option({"type": "integer", "minimum": 0, "maximum": 9}, "9 is delivered first.", "9", "Mqfs-Priority"),
    "private": Option(FLAG, "One open handle at a time.", "yes"),
    "reason": Option(TEXT, "Why it is a dead letter.", "no such address"),
    "select": Option(
        {"type": "array", "items": TEXT}, "A stream, view or pattern to read; it may be repeated.", "orders"
    ),
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
    """`place`: the verb, else the kind of node."""
    return _OPTIONS.get(f"{place} {name}") or _OPTIONS[name]
