"""The request at the beginning of a write to `.put`: a JSON object.

The keys `every` and `cron` say when a schedule is due:

    every 30s                        a fixed rhythm on the engine clock, which missed runs do not shift
    cron  0 5 * * 1-5 Europe/Berlin  five fields of crontab(5) on the wall clock of a zone, by default UTC

A time of day in an hour that the zone's clock skips is due at the end of that hour. In an hour that occurs twice it is
due in the first. Steps such as `*/10` treat such an hour as any other.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, tzinfo
from typing import Any, TypeAlias
from zoneinfo import ZoneInfo

import attrs

from mqfs import errors, limits
from mqfs.engine.language import batch_frames
from mqfs.errors import BadCommand, unknown
from mqfs.records import headers
from mqfs.syntax.duration import parse_duration, print_duration

_SECOND_NS = 10**9
_EXAMPLE = "five fields and perhaps a zone, such as '0 5 * * 1-5 Europe/Berlin'"
_ZONE_BYTES = 64
_CRON_BYTES = 256
_SHOWN = "%Y-%m-%dT%H:%M:%SZ"


@attrs.frozen
class Schedule:
    """When a message is published repeatedly: `every` in ns, or `cron` with five fields and perhaps a zone."""

    every: int = 0
    cron: str = ""

    def next_ns(self, wall_ns: int) -> int:
        """Return the first time of `cron` after that wall time. Raises BadCommand if there is none in fifty years."""
        from cronsim import CronSim, CronSimError  # here, as most servers have no schedule

        *fields, zone = self.cron.split() if len(self.cron.split()) == 6 else [*self.cron.split(), "UTC"]
        begin = datetime.fromtimestamp(wall_ns // _SECOND_NS, _zone_of(zone))
        try:
            found = next(CronSim(" ".join(fields), begin), None)
        except (CronSimError, AssertionError, ValueError, OverflowError) as error:
            raise BadCommand(f"cron {self.cron[:60]!r}: {str(error).lower()} (expected {_EXAMPLE})") from None
        if found is None:
            raise BadCommand(f"cron {self.cron[:60]!r}: never due (expected a time within fifty years)")
        return int(found.timestamp()) * _SECOND_NS

    def texts(self) -> dict[str, str]:
        """Return the schedule as headers of its delayed message."""
        return {"cron": self.cron} if self.cron else {"every": print_duration(self.every)}


def _zone_of(name: str) -> tzinfo:
    """Return the time zone of that name. Raises BadCommand."""
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name[:_ZONE_BYTES])
    except (LookupError, ValueError, OSError):  # no such file, an invalid name, or a folder of zones
        raise BadCommand(f"cron: unknown zone {name[:_ZONE_BYTES]!r} (expected one such as Europe/Berlin)") from None


def parse_cron(text: str) -> Schedule:
    """Parse fields and zone. Raises BadCommand if they are invalid or never due."""
    words = text.split()
    if len(words) not in (5, 6):
        raise BadCommand(f"cron {text[:60]!r}: {len(words)} fields (expected {_EXAMPLE})")
    schedule = Schedule(cron=" ".join(words))
    schedule.next_ns(0)
    return schedule


def shown(time_ns: int) -> str:
    """Print a wall time to the second, as in the ids of a schedule's messages."""
    return datetime.fromtimestamp(time_ns // _SECOND_NS, UTC).strftime(_SHOWN)


def parse_shown(text: str) -> int:
    """Parse the output of `shown` and return the wall time in ns; 0: it is not valid."""
    try:
        return int(datetime.strptime(text, _SHOWN).replace(tzinfo=UTC).timestamp()) * _SECOND_NS
    except ValueError:
        return 0


# ------------------------------------------------------------ requests


Parse: TypeAlias = Callable[[str, Any], Any]  # a key and its value in the object; raises BadCommand
_decoder = json.JSONDecoder()
_OF_LINES = {"stream", "file", "id", "kept", "expect", "lines"}  # keys that may be given with `lines`

_BLANKS = (" ", "\t", "\n")
_TIME_BYTES = len("@2026-01-31T08:00:00Z")  # after the name of a schedule, in the ids of its messages


@attrs.define
class PutRequest:
    """A request of `.put`. Durations in ns."""

    stream: str = ""
    file: int = 0  # the stream's inode, which counts even if the stream was renamed; 0: the name counts
    delay: int | None = None
    at_ns: int | None = None  # wall time
    ttl: int = 0
    priority: int = headers.NORMAL
    id: str = ""
    key: str = ""
    single: bool = False
    kept: bool = False  # whether the answer is a receipt
    schedule: Schedule | None = None
    expect: int | None = None  # the newest message that the stream must have; 0: none
    headers: dict[str, str] = attrs.Factory(dict)
    lines: bool = False  # whether each line of the body is a message
    is_plain: bool = False  # whether its messages have only the headers of a plain write


def parse(data: bytes) -> tuple[PutRequest, bytes]:
    """Parse a write to `.put` into the request and the body. Raises BadCommand, TooLong."""
    head = data[: limits.PUT_BYTES].decode("utf-8", "surrogateescape")
    try:
        value, end = _decoder.raw_decode(head)
    except (ValueError, RecursionError) as error:
        if len(data) > limits.PUT_BYTES and _is_cut(error, head):
            raise errors.TooLong(f"headers and key (expected at most {limits.PUT_BYTES} bytes of JSON)") from None
        raise errors.BadCommand(f".put: invalid JSON: {error} (expected an object)") from None
    if not isinstance(value, dict):
        raise errors.BadCommand('.put: no JSON object (expected one such as {"stream":"mail"})')
    if head[end : end + 1] not in _BLANKS:
        raise errors.BadCommand(".put: no separator after the object (expected one blank, tab or newline)")
    body = data[len(head[: end + 1].encode("utf-8", "surrogateescape")) :]
    if len(body) > limits.MESSAGE_BYTES:
        raise errors.TooLong(f"message of {len(body)} bytes (expected at most {limits.MESSAGE_BYTES})")
    put = _read(value)
    if put.lines and not body.endswith(b"\n"):
        raise errors.BadCommand("lines: no newline at the end of the body (expected whole lines)")
    return put, body


def _is_cut(error: Exception, head: str) -> bool:
    """Whether the object continues after `head`: the error is in an open string or in the last word."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    return error.msg.startswith("Unterminated") or error.pos >= len(head) - len("false")


def _read(value: dict[str, Any]) -> PutRequest:
    others = value.keys() - _KEYS.keys()
    if others:
        raise errors.BadCommand(unknown("key", sorted(others)[0], _KEYS))
    if "stream" not in value:
        raise errors.BadCommand('.put: no key "stream" (expected the name of a stream)')
    if "delay" in value and "at" in value:
        raise errors.BadCommand("delay and at: both given (expected one)")
    if "every" in value and "cron" in value:
        raise errors.BadCommand("every and cron: both given (expected one)")
    if (kind := next((key for key in ("every", "cron") if key in value), "")) and "id" not in value:
        raise errors.BadCommand(f'{kind}: no key "id" (expected the name of the schedule)')
    if kind and "expect" in value:
        raise errors.BadCommand(f"expect: not with {kind} (expected a message that is written now)")
    if "cron" in value and not value.keys().isdisjoint(("delay", "at")):
        raise errors.BadCommand("cron: not with delay or at (expected them with 'every', for its first time)")
    if "expect" in value and not value.keys().isdisjoint(("delay", "at")):
        raise errors.BadCommand("expect: not with delay or at (expected a message that is written now)")
    put = PutRequest(is_plain=value.keys() - {"expect"} == {"stream", "kept"})
    for key, what in value.items():
        field, parse_value = _KEYS[key]
        setattr(put, field, parse_value(key, what))
    if put.lines:
        if wrong := sorted(value.keys() - _OF_LINES):
            raise errors.BadCommand(f"{wrong[0]}: not with lines (expected it with one message)")
        put.is_plain = True
    if put.key and headers.KEY in put.headers:
        raise errors.BadCommand("key: given as a header, too (expected one)")
    if put.single and headers.PART in put.headers:
        raise errors.BadCommand("single: not with the header 'part' (expected a body that is one message)")
    if put.schedule is not None and (size := len(put.id.encode())) > limits.ID_BYTES - _TIME_BYTES:
        raise errors.BadCommand(f"id: {size} bytes (expected at most {limits.ID_BYTES - _TIME_BYTES} of a schedule)")
    return put


def _text(key: str, what: Any, most: int) -> str:
    if not isinstance(what, str) or not what:
        raise errors.BadCommand(f"{key}: invalid value {str(what)[:40]!r} (expected a string, not empty)")
    try:
        size = len(what.encode())
    except UnicodeEncodeError:
        raise errors.BadCommand(f"{key}: invalid bytes (expected UTF-8)") from None
    if size > most:
        raise errors.BadCommand(f"{key}: {size} bytes (expected at most {most})")
    return what


def _name_of(most: int) -> Parse:
    return lambda key, what: _text(key, what, most)


def _duration(key: str, what: Any) -> int:
    return parse_duration(_text(key, what, 64))


def _flag(key: str, what: Any) -> bool:
    if not isinstance(what, bool):
        raise errors.BadCommand(f"{key} {str(what)[:40]!r}: unknown value (expected true or false)")
    return what


def _number(least: int, end: int, wrong: str) -> Parse:
    def parse(key: str, what: Any) -> int:
        if isinstance(what, bool) or not isinstance(what, int) or not least <= what < end:
            raise errors.BadCommand(f"{key} {str(what)[:40]}: {wrong}")
        return what

    return parse


def _at(key: str, what: Any) -> int:
    if isinstance(what, bool) or not isinstance(what, int | float) or not 0 <= what < 1 << 33:
        raise errors.BadCommand(f"at {str(what)[:40]}: not a time (expected UNIX seconds)")
    return int(what * 10**9)


def _every(key: str, what: Any) -> Schedule:
    every = parse_duration(text := _text(key, what, 64))
    if every < _SECOND_NS:
        raise BadCommand(f"every {text!r}: too short (expected 1s or more)")
    return Schedule(every=every)


def _cron(key: str, what: Any) -> Schedule:
    return parse_cron(_text(key, what, _CRON_BYTES))


def _headers(_: str, what: Any) -> dict[str, str]:
    if not isinstance(what, dict):
        raise errors.BadCommand("headers: not an object (expected one of strings)")
    for key, text in what.items():
        _text("name of a header", key, 255)
        if key in headers.RESERVED:
            raise errors.BadCommand(f"header {key!r}: set by the server (expected another name)")
        if text != "":
            _text(f"header {key!r}", text, limits.HEADER_BYTES)
        batch_frames.check_value(key, text)
    size = sum(len(key.encode()) + len(text.encode()) + 3 for key, text in what.items())
    if size > limits.HEADER_BYTES:
        raise errors.BadCommand(f"headers of {size} bytes (expected at most {limits.HEADER_BYTES})")
    return what


_KEYS: dict[str, tuple[str, Parse]] = {  # the field of PutRequest, and the parser of its value
    "stream": ("stream", _name_of(limits.NAME_BYTES)),
    "file": ("file", _number(1, 1 << 64, "not an inode (expected that of the stream)")),
    "delay": ("delay", _duration),
    "at": ("at_ns", _at),
    "ttl": ("ttl", _duration),
    "priority": ("priority", _number(0, 10, "out of range (expected 0 to 9)")),
    "id": ("id", _name_of(limits.ID_BYTES)),
    "key": ("key", _name_of(limits.KEY_BYTES)),
    "single": ("single", _flag),
    "kept": ("kept", _flag),
    "every": ("schedule", _every),
    "cron": ("schedule", _cron),
    "expect": ("expect", _number(0, 1 << 63, "not a sequence (expected that of a message, or 0)")),
    "headers": ("headers", _headers),
    "lines": ("lines", _flag),
}
