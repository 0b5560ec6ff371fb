"""CloudEvents 1.0 by HTTP ↔ messages: an attribute is a header `ce-NAME` of the message, the data is its body.

In binary mode the attributes are headers of the request; in structured mode the event is a JSON object, and a batch is
an array of them. Both modes make the same message.

The elements of a JSON array are parsed one after another, and keep the characters that were sent. Each is bounded
before it is parsed, so that no body of a client delays others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, NamedTuple, NoReturn
from urllib.parse import quote, unquote

from mqfs import limits
from mqfs.errors import BadRequest, TooLong
from mqfs.http.answers import base64_body, media_type

_BLANKS = re.compile(r"[ \t\r\n]*")


def is_json(text: bytes) -> bool:
    """Whether a text is one JSON value."""
    try:
        _DECODER.decode(text.decode())
    except (ValueError, RecursionError):
        return False
    return True


def _constant(word: str) -> NoReturn:
    raise ValueError(f"{word} (expected JSON)")


_DECODER = json.JSONDecoder(parse_constant=_constant)


def elements(body: bytes) -> Iterator[str]:
    """Yield the elements of a JSON array, or the body itself if it is another value. Raises BadRequest, TooLong."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        raise BadRequest("body: not UTF-8 (expected JSON)") from None
    at = _past_blanks(text, 0)
    if not text.startswith("[", at):
        end = _element_end(text, at)
        yield text[at:end]
        _require_end(text, end)
        return
    at = _past_blanks(text, at + 1)
    if text.startswith("]", at):
        return _require_end(text, at + 1)
    begin, part = 0, ""  # the text that is parsed at once, and its offset
    while True:
        if not part or at - begin > limits.HTTP_JSON_BYTES:
            begin, part = at, text[at : at + 2 * limits.HTTP_JSON_BYTES]
        end = begin + _element_end(part, at - begin, is_cut=begin + len(part) < len(text))
        yield text[at:end]
        at = _past_blanks(text, end)
        if text.startswith("]", at):
            return _require_end(text, at + 1)
        if not text.startswith(",", at):
            raise BadRequest(f"body: not JSON: column {at + 1} (expected a comma or ])")
        at = _past_blanks(text, at + 1)


def _element_end(text: str, at: int, *, is_cut: bool = False) -> int:
    """Return the end of the value at an offset. `is_cut`: more text follows. Raises BadRequest, TooLong."""
    if len(text) - at > 2 * limits.HTTP_JSON_BYTES:
        text, is_cut = text[: at + 2 * limits.HTTP_JSON_BYTES], True
    try:
        end = int(_DECODER.raw_decode(text, at)[1])
    except (ValueError, RecursionError) as error:
        if not is_cut:
            reason = "nested too deeply" if isinstance(error, RecursionError) else error
            raise BadRequest(f"body: not JSON: {reason}") from None
        end = len(text)
    if is_cut and end == len(text):  # even a number may continue
        expected = f"at most {limits.HTTP_JSON_BYTES} characters"
        raise TooLong(f"body: not JSON, or an element is too long (expected {expected})")
    return end


def member(text: str, name: str) -> str:
    """Return the characters of a member's value in a valid JSON object; of several of that name the last one's, as
    json.loads does; empty if there is none."""
    at, found = text.index("{") + 1, ""
    while text[at := _past_blanks(text, at)] != "}":
        key, end = _DECODER.raw_decode(text, at)
        begin = _past_blanks(text, _past_blanks(text, end) + 1)  # after the colon
        _, at = _DECODER.raw_decode(text, begin)
        if key == name:
            found = text[begin:at]
        at = _past_blanks(text, at)
        at += text[at] == ","
    return found


def _past_blanks(text: str, at: int) -> int:
    found = _BLANKS.match(text, at)
    return found.end() if found is not None else at


def _require_end(text: str, at: int) -> None:
    if _past_blanks(text, at) != len(text):
        raise BadRequest(f"body: not JSON: column {at + 1} (expected the end)")


# ------------------------------------------------------------ events


PREFIX = "ce-"
MARK = "ce-specversion"  # the header by which a message is an event
EVENT, BATCH = "application/cloudevents+json", "application/cloudevents-batch+json"
CONTENT_TYPE = "content-type"
_NEEDED = ("id", "source", "specversion", "type")
_TEXTS = (*_NEEDED, "time", "subject", "datacontenttype", "dataschema")
_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d):(?:[0-5]\d|60)(.+)", re.IGNORECASE)
_NAME = re.compile(r"[a-z0-9]{1,64}")
_ATTRIBUTE = re.compile(f"{PREFIX}{_NAME.pattern}")
_PLAIN = "".join(map(chr, range(0x21, 0x7F))).replace('"', "").replace("%", "")  # sent as they are


class Event(NamedTuple):
    """The headers and the body of a message that is an event."""

    headers: dict[str, str]
    body: bytes


def is_structured(given: Mapping[str, str]) -> bool:
    """Whether the body of a request is an event or a batch, by its content type."""
    return media_type(given.get(CONTENT_TYPE, "")) in (EVENT, BATCH)


def from_headers(given: Mapping[str, str]) -> dict[str, str]:
    """Return the message's headers of a request in binary mode; none for another request. Raises BadRequest."""
    if MARK not in given:
        return {}
    found = {name: unquote(value) for name, value in given.items() if name.startswith(PREFIX)}
    _check({name.removeprefix(PREFIX): value for name, value in found.items()})
    return found | ({CONTENT_TYPE: given[CONTENT_TYPE]} if CONTENT_TYPE in given else {})


def to_headers(own: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the headers of an answer in binary mode for a message's headers; none where it is not an event. Headers
    with the prefix that are not attributes are left out: other front ends accept any name."""
    if MARK not in own:
        return []
    return [(name, quote(value, safe=_PLAIN)) for name, value in own.items() if _ATTRIBUTE.fullmatch(name)]


def from_body(body: bytes, *, batch: bool) -> Iterator[Event]:
    """Yield the events of a request in structured mode, each in some milliseconds. Raises BadRequest, TooLong."""
    if not batch and body.lstrip()[:1] == b"[":
        raise BadRequest(f"body: an array (expected an object, or content type {BATCH})")
    if batch and body.lstrip()[:1] != b"[":
        raise BadRequest("body: not an array (expected one of CloudEvents)")
    for number, text in enumerate(elements(body), 1):
        try:
            yield _from_object(text)
        except BadRequest as error:
            raise BadRequest(f"event {number}: {error.detail}") from None


def _from_object(text: str) -> Event:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise BadRequest("not an object (expected a CloudEvent)")
    data, coded = value.pop("data", None), value.pop("data_base64", None)
    if data is not None and coded is not None:
        raise BadRequest("data and data_base64: both given (expected one)")
    for name in _TEXTS:
        if not isinstance(value.get(name), str | None):
            raise BadRequest(f"attribute {name!r} (expected a string)")
    attributes = {name: _text(name, given) for name, given in value.items() if given is not None}
    kind = attributes.pop("datacontenttype", "")
    _check(attributes)
    head = {PREFIX + name: text for name, text in attributes.items()}
    if coded is not None:
        body = base64_body(coded, "data_base64")
    elif data is None:
        body = b""
    elif isinstance(data, str) and kind and not _is_json(kind):
        body = _encoded(data)
    else:
        _encoded(json.dumps(data, ensure_ascii=False))
        kind, body = kind or "application/json", member(text, "data").encode()  # as sent: numbers are not rounded
    return Event(head | ({CONTENT_TYPE: kind} if kind else {}), body)


def _is_json(kind: str) -> bool:
    return media_type(kind).endswith(("/json", "+json"))


def _text(name: str, value: Any) -> str:
    """Return the value of an attribute as the text of a header. Raises BadRequest."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str | int):
        raise BadRequest(f"attribute {name[:64]!r} (expected a string, a number or a boolean)")
    return _encoded(str(value)).decode()


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise BadRequest("half a character (expected Unicode text)") from None


def _check(attributes: Mapping[str, str]) -> None:
    if missing := [name for name in _NEEDED if not attributes.get(name)]:
        raise BadRequest(f"attribute {missing[0]!r}: missing (expected {', '.join(_NEEDED)})")
    if attributes["specversion"] != "1.0":
        raise BadRequest(f"attribute 'specversion' {attributes['specversion'][:80]!r} (expected 1.0)")
    if wrong := [name for name in attributes if not _NAME.fullmatch(name)]:
        raise BadRequest(f"attribute {wrong[0][:80]!r}: invalid name (expected lower-case letters and digits)")
    if "time" in attributes and not _is_time(attributes["time"]):
        raise BadRequest(f"attribute 'time' {attributes['time'][:80]!r} (expected RFC 3339, as 2026-01-31T08:00:00Z)")


def _is_time(text: str) -> bool:
    if (found := _TIME.fullmatch(text)) is None:
        return False
    try:  # without the seconds, which may be 60, a leap second
        return datetime.fromisoformat(f"{found[1]}:00{found[2]}".upper()).tzinfo is not None
    except ValueError:
        return False
