"""Publishing: one message, a batch, and the parts of a transaction.

A message without options is written to its stream if that returns its sequence, else to `.batch`, which always does. A
message with options is written to `.put`.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from io import BytesIO
from json.decoder import scanstring  # type: ignore[attr-defined]
from time import monotonic
from typing import Any, cast

from mqfs import limits
from mqfs.engine.language.batch_frames import HEAD
from mqfs.errors import (
    Again,
    BadCommand,
    BadRequest,
    Conflict,
    Exists,
    Interrupted,
    MqfsError,
    NotFound,
    OverLimit,
    StreamFull,
    TooLong,
)
from mqfs.http import cloud_events
from mqfs.http.answers import JSON, Answer, LongReply, NoReply, base64_body, media_type
from mqfs.http.groups import is_there, make_stream, with_stream
from mqfs.http.reading import message_of
from mqfs.http.route import WHOLE, Call, TimedOut
from mqfs.http.target import absent
from mqfs.model import Wait
from mqfs.records import headers
from mqfs.syntax.duration import parse_duration, parse_number

FRAMES = "application/vnd.mqfs.frames"
NAMED = "mqfs-h-"
TEMPORARY = 0o1622  # the mode of a stream for one reply
TRACING = ("traceparent", "tracestate")
_IDS = "(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
_TRACEPARENT = re.compile(f"00-{_IDS}|(?!00|ff)[0-9a-f]{{2}}-{_IDS}(-.*)?")  # else both are ignored: W3C Trace Context
_KEYS = {"idempotency-key", "if-match", "if-none-match", *TRACING}
_PART = f"Mqfs-H-{headers.PART}"
_TAG = re.compile(r'"([0-9]{1,19})"')
_MARKS = "mqfs-", cloud_events.PREFIX
_SHORT_BYTES = 16 << 10  # of a line for json.loads: any JSON of this size is parsed in less than a millisecond
PORTION_BYTES = 64 << 10  # of frames: fewer are joined and checked at once, and are not charged as memory
_LINE_BYTES = 4 * limits.MESSAGE_BYTES  # of any line: a body in base64, or with most characters escaped
_PAIRS = limits.HEADER_BYTES // 3  # in an object: no message has more headers
_BLANKS = re.compile(r"[ \t\r]*")
_JSON_LINES = ("application/x-ndjson", "application/json", "application/jsonl")


class ReplyEnded(Interrupted):
    """The message was published, but no reply to it can arrive any more."""


class ReplyRefused(OverLimit):
    """The message was published, but the user's limits do not permit waiting for its reply."""


async def publish(call: Call) -> Answer:
    """Publish the body as one message, or a batch of CloudEvents; with `reply`, answer with the reply."""
    given, node, place, body = keys(call), call.target.node, place_of(call), call.body
    is_new, seconds, frames = call.target.kind == "new stream", call.seconds("reply"), b""
    if is_new and call.option("create") is not None and not call.flag("create"):
        raise absent(call.target, call.path.names)
    name, group = call.target.name if is_new else node.name, node.group
    if cloud_events.is_structured(call.request.headers):
        call.tree.access(call.user, node, os.W_OK)
        if media_type(call.request.headers.get("content-type", "")) == cloud_events.BATCH:
            frames = await _frames_of_events(call, name, given)
        else:
            (event,) = cloud_events.from_body(body, batch=False)
            given, body = given | {"headers": event.headers | given.get("headers", {})}, event.body
    if is_new and not frames and (given or group.settings.data != "line"):
        call.tree.access(call.user, node, os.W_OK)
        _check_first(name, given, body)

    if seconds is not None and not frames:
        return await _request(call, name, given, body, seconds, is_new)

    async def attempt() -> Answer:
        if frames:
            return published(call, await append(call, group, ".batch", frames), None, place)
        if given:
            head = json.dumps({"stream": name, **given}, ensure_ascii=False).encode()
            sequence = await append(call, group, ".put", head + b"\n" + body)
            held = not given.keys().isdisjoint(("delay", "at", "single", "every", "cron"))
            return published(call, sequence, None if held else group.streams.get(name), place)
        return await _publish_plain(call, call.own(name) if is_new else node, place)

    return await (with_stream(call, name, attempt) if is_new else attempt())


async def _publish_plain(call: Call, stream: Any, place: str) -> Answer:
    """Publish a body without options: as one message, or under `data line` its lines."""
    group = stream.group
    if is_plain(group):
        with closing(call.tree.open(call.user, stream, os.O_WRONLY)) as handle:
            answer = await publish_to(handle, call, stream, place)
        if answer is not None:
            return answer
    frames = await gathered(call, framed(group, stream.name, call.body))
    return published(call, await append(call, group, ".batch", frames), stream, place)


def _check_first(name: str, given: dict[str, Any], body: bytes) -> None:
    """Check the first message of a stream for errors that should not leave an empty stream. Raises TooLong,
    Conflict."""
    if len(body) > limits.MESSAGE_BYTES:
        raise TooLong(f"message of {len(body)} bytes (expected at most {limits.MESSAGE_BYTES})")
    if expect := given.get("expect"):
        raise Conflict(f"expect: newest message 0 of {name!r} (expected {expect})")


async def _frames_of_events(call: Call, name: str, given: dict[str, Any]) -> bytes:
    """Return the frames for `.batch` of a batch of CloudEvents, all for one stream. Raises BadRequest, TooLong."""
    if given or call.option("reply") is not None:
        raise BadRequest(f"{min(given, default='reply')}: not with a batch of CloudEvents (expected no options)")
    if not (frames := await gathered(call, _from_events(name, call.body))):
        raise BadRequest("body: an empty array (expected at least one event)")
    return frames


def _from_events(name: str, body: bytes) -> Iterator[bytes]:
    """Yield the frame of each event. Raises BadRequest, TooLong."""
    for number, event in enumerate(cloud_events.from_body(body, batch=True), 1):
        if any(len(text.encode()) > 0xFFFF for text in event.headers.values()):
            raise TooLong(f"event {number}: attribute too long (expected at most 65,535 bytes)")
        yield frame(name, event.body, headers.encode(event.headers))


async def _request(call: Call, stream: str, given: dict[str, Any], body: bytes, seconds: float, is_new: bool) -> Answer:
    """Publish a message, and answer with the first body written to the temporary stream that its `reply-to` names.

    The temporary stream is removed with the request. A stream made for the message (`is_new`) stays once the message is
    published, whether or not a reply arrives."""
    tree, user, group, name = call.tree, call.user, call.group, f"reply.{secrets.token_hex(12)}"
    if wrong := given.keys() & {"delay", "at", "every", "cron"}:
        raise BadRequest(f"reply: not with {min(wrong)} (expected a message that is written now)")
    if seconds < 0.001:
        raise BadRequest("reply 0 (expected at least 1ms)")
    node: Any = await call.front.await_step(tree.create(user, group, name, TEMPORARY))
    try:
        handle = tree.open(user, node, os.O_RDWR)
    except MqfsError:  # no close will remove it
        group.remove_temporary(node)
        raise
    with closing(handle):  # while it is open the temporary stream exists, and retains the reply for the cursor
        reader = tree.walk(user, group, ".cursor")
        tree.access(user, reader, os.R_OK | os.W_OK)
        given = {**given, "headers": {**given.get("headers", {}), headers.REPLY_TO: name}}
        send = partial(_ask_for_reply, call, stream, given, body, seconds)
        await (with_stream(call, stream, send) if is_new else send())
        try:
            with closing(tree.open(user, reader, os.O_RDWR)) as cursor:  # not earlier: it would count as a reader
                cursor.write(f"select {name}\nseek first\nformat json\n".encode())
                return await _reply(call, stream, cursor, seconds)
        except Interrupted as error:
            raise ReplyEnded(f"{error} (the message was published)") from None
        except OverLimit as error:
            raise ReplyRefused(f"{error} (the message was published)") from None


async def _reply(call: Call, stream: str, cursor: Any, seconds: float) -> Answer:
    """Return the first message that the cursor reads within `seconds`, or the whole body if it is a first part. Raises
    NoReply, LongReply, OverLimit, and Interrupted where no reply can arrive any more."""
    ends = monotonic() + seconds
    answers, size = list[Answer](), 0
    while True:
        try:
            line = await call.front.await_step(cursor.read(WHOLE), max(ends - monotonic(), 0))
        except TimedOut:
            if not answers:
                raise NoReply(f"no reply from stream {stream!r} in {seconds:g} s") from None
            return answers[0]  # parts are missing: it is a single message
        if not line:
            why = "the server stops" if call.tree.closing else "the stream of the reply was removed"
            raise Interrupted(f"reply from stream {stream!r}: {why}")
        answers.append(message_of(line))
        number, total = headers.parse_part(dict(answers[-1].headers).get(_PART, ""))
        if number != len(answers) or number == total or not (total or answers[1:]):
            break
        size += len(cast(bytes, answers[-1].body))
        if size > limits.HTTP_READ_BYTES:
            raise LongReply(f"reply from stream {stream!r}: too long (expected at most {limits.HTTP_READ_BYTES} bytes)")
        call.front.hold(size)
        await call.front.pause()
    if number != len(answers) or number != total:
        return answers[0]  # as above
    body = b"".join(cast(bytes, answer.body) for answer in answers)
    return Answer(200, body, answers[-1].kind, [pair for pair in answers[-1].headers if pair[0] != _PART])


async def _ask_for_reply(call: Call, stream: str, given: dict[str, Any], body: bytes, seconds: float) -> None:
    """Publish a message that expires when the wait for its reply ends.

    Raises an error where no reply will come: StreamFull (it was discarded), Exists (its id is known), NotFound (it has
    no reader); and Again where there was no room in that time."""
    ttl_ms = int(seconds * 1000)
    if own_ns := parse_duration(given.get("ttl", "0")):
        ttl_ms = min(ttl_ms, own_ns // 10**6)
    head = {"stream": stream, **given, "ttl": f"{ttl_ms}ms", "kept": True}
    data = json.dumps(head, ensure_ascii=False).encode() + b"\n" + body
    room_s = call.seconds("wait")
    receipt = await ask(call, call.group, ".put", data, seconds if room_s is None else min(room_s, seconds))
    if not receipt:
        raise StreamFull(f"stream is full: {stream!r} (the message was discarded, no reply will come)")
    _, _, _, known, retained = receipt
    if known == b"1":
        raise Exists(f"id {given['id']!r}: published before (no reply comes to a repeat)")
    if retained == b"0":
        raise NotFound(f"reply: no consumer and no reader of stream {stream!r}")


def is_plain(group: Any) -> bool:
    """Whether a write to a stream of the group is one message and returns its sequence."""
    return group.settings.data != "line" and group.ring is None


async def publish_to(handle: Any, call: Call, stream: Any, place: str) -> Answer | None:
    """Write the body to an open stream. Returns None, and has done nothing, where the write cannot be done here: an
    empty body, a rate for the user, or no room yet."""
    if not (body := call.body):
        return None  # a write of zero bytes would be an EOF marker
    if handle.gate is not None:
        return None  # the user's rate may delay the write, and would count it here and again in `.batch`
    end = handle.group.log.stored.end
    sequence = end.next
    step = handle.write(body)
    appended = end.next > sequence
    if not appended and isinstance(step, Wait) and step.cancel():
        return None
    await call.front.await_step(step)
    return published(call, sequence if appended else 0, stream, place)


def place_of(call: Call) -> str:
    """Return the path of a message of the stream, up to its sequence."""
    return f"{call.path.text}?seq="


def published(call: Call, sequence: int, stream: Any = None, place: str = "") -> Answer:
    """Return the answer to a publish, as text or JSON. `sequence`: 0 if the message was discarded. `stream`, `place`:
    of a single message; `stream` is None where the message is delayed or for a single receiver."""
    text, head = str(sequence), list[tuple[str, str]]()
    retained = bool(sequence) and (stream is None or call.group.is_retaining(stream))
    if sequence:
        head.append(("Mqfs-Sequence", text))
        if place:
            head.append(("Location", place + text))
        if stream is not None and retained and stream.kept.newest_kept() == sequence:  # else the tag has changed
            head.append(("ETag", f'"{text}"'))
    if not retained:
        head.append(("Mqfs-Retained", "no"))
    if JSON in call.request.headers.get("accept", ""):
        answer = {"sequence": sequence or None, "retained": retained}
        return Answer(201, json.dumps(answer).encode() + b"\n", JSON, head)
    return Answer(201, text.encode() + b"\n" if sequence else b"discarded\n", headers=head)


async def put(call: Call) -> Answer:
    """Publish the body, or make the stream where there is none. Raises BadRequest for a stream in the root without a
    body."""
    if call.body:
        return await publish(call)
    if len(call.path.names) == 1:  # a forgotten slash at the end of a group must not make a stream in the root
        raise BadRequest(f"expected PUT {call.path.text}/ (a group) or a body (a message)")
    await make_stream(call)
    return Answer(201)


async def put_there(call: Call) -> Answer:
    """Publish the body to an existing stream; without a body, answer that it exists."""
    return await publish(call) if call.body else await is_there(call)


def frame(name: str, body: bytes, head: bytes = b"") -> bytes:
    """Return the frame of a message for `.batch`, see mqfs(4). Raises TooLong where a length does not fit its field."""
    raw = name.encode()
    if len(raw) > 0xFFFF or len(head) > 0xFFFF:
        what = "headers" if len(head) > 0xFFFF else "name of a stream"
        raise TooLong(f"{what}: {max(len(raw), len(head))} bytes (expected at most 65,535)")
    return b"".join((HEAD.pack(HEAD.size + len(raw) + len(head) + len(body), len(raw), len(head)), raw, head, body))


def framed(group: Any, name: str, body: bytes) -> Iterator[bytes]:
    """Yield frames for `.batch` of the messages that a write of the body to the stream would make."""
    return (frame(name, one) for one in (lines(body) if group.settings.data == "line" else [body]))


def lines(body: bytes) -> Iterable[bytes]:
    """Return the messages that a write makes of a body under `data line`."""
    return BytesIO(body) if body else [b""]


async def gathered(call: Call, frames: Iterable[bytes]) -> bytes:
    """Join the frames of one write, in portions. They may be many times as long as the body they come from, and are
    charged to the user's memory besides it. Raises OverLimit, and the errors of `frames`."""
    data, charged = BytesIO(), 0
    for piece in frames:
        data.write(piece)
        if (size := data.tell()) > charged + PORTION_BYTES:
            charged = size
            call.front.hold(size)
        await call.front.pause()
    return data.getvalue()


async def append(call: Call, group: Any, file: str, data: bytes) -> int:
    """Write to `.put` or `.batch`. Returns the first sequence, or 0 if the write was discarded."""
    return int((await ask(call, group, file, data) or [b"0"])[0])


async def ask(
    call: Call,
    group: Any,
    file: str,
    data: bytes,
    most: float | None = None,
    check: Callable[[], None] | None = None,
    *,
    had_turn: bool = False,
) -> list[bytes]:
    """Write to `.put` or `.batch`, and return the words of its answer; none if the write was discarded.

    `most`: seconds to wait for room; None: as the request says. `check` is called right before the write, and may
    refuse it by raising. `had_turn`: the write is not counted against its user's rate, as it was counted before."""
    with closing(_opened(call, group, file)) as handle:
        handle.had_turn = had_turn
        if file == ".batch" and len(data) > PORTION_BYTES:
            await _prepare(call, handle, data)
        if check is not None:
            check()
        return await _ask(call, handle, data, call.seconds("wait") if most is None else most)


def _opened(call: Call, group: Any, file: str) -> Any:
    return call.tree.open(call.user, call.tree.walk(call.user, group, file), os.O_RDWR)


async def _ask(call: Call, handle: Any, data: bytes, seconds: float | None) -> list[bytes]:
    try:
        await call.front.await_step(handle.write(data), seconds)
    except TimedOut:
        raise Again("stream is full: no room within wait") from None
    text = handle.read(64)
    return text.split() if isinstance(text, bytes) else []


# ---------------------------------------------------------------- options of a message


def keys(call: Call) -> dict[str, Any]:
    """Return the keys of `.put` that a request gives, in the query or as headers. The engine checks them."""
    given = call.request.headers
    if not call.path.options and not any(name.startswith(_MARKS) or name in _KEYS for name in given):
        return {}
    found: dict[str, Any] = {
        key: value
        for key in ("delay", "ttl", "key", "every", "cron")
        if (value := call.option(key, f"mqfs-{key}")) is not None
    }
    if (at := call.option("at", "mqfs-at")) is not None:
        found["at"] = _number(at, "at")
    if (priority := call.option("priority", "mqfs-priority")) is not None:
        found["priority"] = _number(priority, "priority")
    if call.flag("single", "mqfs-single"):
        found["single"] = True
    if (key := call.option("id", "mqfs-id")) is None:
        key = given.get("idempotency-key")
    if key is not None:
        found["id"] = key
    if (expect := _expected(call)) is not None:
        found["expect"] = expect
    of_query = {name[2:]: value for name, value in call.path.options if name.startswith("h-")}
    if own := _from_headers(given) | of_query:
        found["headers"] = own
    return found


def _expected(call: Call) -> int | None:
    """Return the sequence of the stream's newest message that a request expects, or None: from `expect`, or from the
    entity tag of If-Match or If-None-Match. Raises BadRequest."""
    if (text := call.option("expect", "mqfs-expect")) is not None:
        return parse_number(text)
    given = call.request.headers
    if given.get("if-none-match") == "*":
        return 0
    if (tag := given.get("if-match")) is None:
        return None
    if (found := _TAG.fullmatch(tag)) is None:
        raise BadRequest(
            f"header If-Match {tag[:40]!r}: invalid entity tag ("
            f'expected the sequence of a message in double quotes, or "0")'
        )
    return parse_number(found[1])


def _from_headers(given: dict[str, str]) -> dict[str, str]:
    own = {name.removeprefix(NAMED): value for name, value in given.items() if name.startswith(NAMED)}
    tracing = TRACING if _TRACEPARENT.fullmatch(given.get("traceparent", "")) else ()
    return {**cloud_events.from_headers(given), **own, **{name: given[name] for name in tracing if name in given}}


def _number(text: str, name: str) -> int | float:
    """Parse a JSON number. Raises BadCommand."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadCommand(f"{name} {text!r} (expected a number)")
    return value


# ---------------------------------------------------------------- batches and transactions


async def batch(call: Call) -> Answer:
    """Publish many messages in one atomic batch."""
    with closing(_opened(call, call.group, ".batch")) as handle:
        words = await _ask(call, handle, await _prepared(call, handle), call.seconds("wait"))
    return published(call, int((words or [b"0"])[0]))


async def _prepared(call: Call, handle: Any) -> bytes:
    """Return the frames of a body for an open `.batch`, checked in portions. Each stream is checked at its first
    mention, so that a body without permission is not parsed to its end."""
    kind = media_type(call.request.headers.get("content-type", ""))
    if kind != FRAMES and kind not in _JSON_LINES:
        raise BadRequest(f"content type {kind!r} (expected {_JSON_LINES[0]} or {FRAMES})")
    data = call.body
    if kind != FRAMES:
        data = await gathered(call, _from_lines(data, handle.stream))
    if not data:
        raise BadRequest("body: empty (expected at least one message)")
    await _prepare(call, handle, data)
    return data


async def _prepare(call: Call, handle: Any, data: bytes) -> None:
    """Check, in portions, the data of the next write to an open `.batch`."""
    for _ in handle.prepare(data):
        await call.front.pause()


def _from_lines(body: bytes, admit: Callable[[str], object]) -> Iterator[bytes]:
    """Yield the frame of each line. `admit` is called once with each stream, before its first frame."""
    seen: set[str] = set()
    for number, line in enumerate(BytesIO(body), 1):
        if number > limits.UNIT_MESSAGES:
            raise OverLimit(f"line {number}: too many lines (expected at most {limits.UNIT_MESSAGES})")
        if line.isspace():
            yield b""
            continue
        try:
            stream, piece = _from_line(line.removesuffix(b"\n"))
        except (ValueError, RecursionError, UnicodeError) as error:
            raise BadRequest(f"line {number}: {error}") from None
        except (BadRequest, TooLong) as error:
            raise type(error)(f"line {number}: {error.detail}") from None
        if stream not in seen:
            admit(stream)
            seen.add(stream)
        yield piece


def _from_line(line: bytes) -> tuple[str, bytes]:
    """Return the stream and the frame of a line. Raises BadRequest, TooLong, ValueError, RecursionError."""
    value = json.loads(line.decode()) if len(line) <= _SHORT_BYTES else strings_of(line)
    if not isinstance(value, dict) or not isinstance(value.get("stream"), str):
        raise BadRequest('not a message (expected an object with "stream", and "body" or "body_base64")')
    if unknown := value.keys() - {"stream", "body", "body_base64", "headers"}:
        raise BadRequest(f"unknown key {min(unknown)!r} (expected stream, body, body_base64, headers)")
    text, coded = value.get("body"), value.get("body_base64")
    if (text is None) == (coded is None) or not isinstance(coded if text is None else text, str):
        raise BadRequest('no body (expected "body" or "body_base64", a string)')
    body = text.encode() if isinstance(text, str) else base64_body(str(coded))
    own = value.get("headers", {})
    if not isinstance(own, dict) or not all(isinstance(text, str) for text in own.values()):
        raise BadRequest("headers: not text (expected an object of strings)")
    if any(len(name.encode()) > 255 or len(text.encode()) > 0xFFFF for name, text in own.items()):
        raise TooLong("header: too long (expected a name of at most 255 bytes, a value of at most 65,535)")
    return value["stream"], frame(value["stream"], body, headers.encode(own))


def strings_of(line: bytes) -> dict[str, Any]:
    """Parse a JSON object of strings, nulls and objects of strings and nulls. Any other value is refused at its first
    character, so that a long one costs no time. Raises ValueError, TooLong."""
    if len(line) > _LINE_BYTES:
        raise TooLong(f"too long: {len(line)} bytes (expected at most {_LINE_BYTES})")
    text = line.decode()
    found, at = _object(text, _past(text, 0), 1)
    if at < len(text):
        raise ValueError(f"column {at + 1}: text after the object")
    return found


def _object(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    before = "{"
    for _ in range(_PAIRS):
        at = _past(text, at, before)
        if before == "{" and text[at : at + 1] == "}":
            break
        key, at = scanstring(text, _past(text, at, '"', blanks=False))
        at = _past(text, _past(text, at), ":")
        if depth and text[at : at + 1] == "{":
            found[key], at = _object(text, at, depth - 1)
        elif text.startswith("null", at):
            found[key], at = None, at + len("null")
        else:
            found[key], at = scanstring(text, _past(text, at, '"', blanks=False))
        at, before = _past(text, at), ","
        if text[at : at + 1] == "}":
            break
    return found, _past(text, at, "}")


def _past(text: str, at: int, mark: str = "", *, blanks: bool = True) -> int:
    """Return the offset after a mark and blanks. Raises ValueError where the mark is missing."""
    if not text.startswith(mark, at):
        raise ValueError(f"column {at + 1}: expected {mark}, in an object of strings")
    found = _BLANKS.match(text, at + len(mark)) if blanks else None
    return found.end() if found is not None else at + len(mark)


async def make_part(call: Call) -> Answer:
    """Make a part of a transaction."""
    folder = call.target.node
    await call.front.await_step(call.tree.mkdir(call.user, folder, call.target.name, 0o700))
    return Answer(201)


async def stage(call: Call) -> Answer:
    """Write a message to a part, or many messages to its `.batch`."""
    handle: Any
    with closing(call.tree.open(call.user, call.target.node, os.O_WRONLY)) as handle:
        data = await _prepared(call, handle) if call.target.name == ".batch" else call.body
        handle.is_whole = True
        await call.front.await_step(handle.write(data))
    return Answer(202)
