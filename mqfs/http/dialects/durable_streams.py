"""The dialect of Durable Streams (draft 1.0): a group at the root of a listener, its streams at their paths.

This module makes, appends to, closes, forks and deletes streams; durable_state.py stores their state, durable_reads.py
reads them. A client acts as its own user, by the modes of the tree.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import partial
from itertools import chain
from stat import S_ISVTX
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import attrs

from mqfs import limits
from mqfs.engine.tree.tree import Tree
from mqfs.errors import Again, BadRequest, Busy, Exists, MqfsError, NotFound, StreamFull
from mqfs.http import groups, publishing, target
from mqfs.http.answers import Answer, Headers, Unsupported, media_type
from mqfs.http.dialects import durable_reads
from mqfs.http.dialects.durable_reads import SAME_SITE, parse_offset, print_offset
from mqfs.http.dialects.durable_state import (
    BYTES,
    CATALOG,
    JSON,
    MOST,
    Catalog,
    Config,
    Lock,
    Producer,
    StreamState,
    Turn,
    catalog_of,
    in_turn,
    is_header,
    is_used,
    split,
    stored_bytes,
)
from mqfs.http.route import APPEND, Call, Route
from mqfs.http.routes import Table
from mqfs.http.target import Path, Target
from mqfs.http.wire import Request
from mqfs.model import User
from mqfs.syntax.names import check_name

_COUNT = re.compile("0|[1-9][0-9]{0,15}")
_NEEDED = "data message", "replay all", "deliver all", "depth 0", "ttl 0"
_MAKING: WeakKeyDictionary[Tree, Lock] = WeakKeyDictionary()  # held to make groups, or to remove those just made


def resolve(root: tuple[str, ...], tree: Tree, user: User, path: Path) -> Target:
    """Return the target of a path on the listener of a group. Where groups are missing, its node is the last existing
    one. Raises NotFound, Denied, Unsupported."""
    if CATALOG in path.names:
        raise Unsupported("subscriptions: not served (expected a consumer of the group, see mqfs-http(5))")
    if not path.names or path.slash:
        raise NotFound(f"no stream {path.text!r}")
    node, names = tree.root, (*root, *path.names)  # type: Any, tuple[str, ...]
    for at, name in enumerate(names):
        check_name(name)
        if not node.directory:
            raise NotFound(f"stream {node.name!r}: not a group")
        try:
            node = tree.walk(user, node, name)
        except NotFound:
            return Target("new stream" if at == len(names) - 1 else "nothing", node, name)
    if node.directory:
        raise NotFound(f"group {path.text!r}: not a stream")
    return Target("stream" if hasattr(node, "kept") else "view", node, node.name)


# ---------------------------------------------------------------- the headers of a request


def _flag(call: Call, name: str) -> bool:
    return call.request.headers.get(name, "").strip().lower() == "true"


def _count(call: Call, name: str, most: int = MOST) -> int | None:
    """Return the number in a header, or None without it. Raises BadRequest."""
    text = call.request.headers.get(name)
    if text is None:
        return None
    if not _COUNT.fullmatch(text) or int(text) > most:
        raise BadRequest(f"{name} {text[:80]!r} (expected a number from 0 to {most}, without leading zeros)")
    return int(text)


def _config(call: Call) -> Config:
    """Return the config that a request gives for a new stream. Raises BadRequest."""
    ttl, expires = _count(call, "stream-ttl"), call.request.headers.get("stream-expires-at", "")
    if ttl is not None and expires:
        raise BadRequest("stream-ttl and stream-expires-at: both given (expected one)")
    if expires:
        try:
            is_time = is_header(expires) and datetime.fromisoformat(expires).tzinfo is not None
        except (ValueError, OverflowError):
            is_time = False
        if not is_time:
            raise BadRequest(f"stream-expires-at {expires[:80]!r} (expected a time as RFC 3339 has it)")
    kind = call.request.headers.get("content-type", "")
    if not is_header(kind):
        raise BadRequest(f"content-type {kind[:80]!r}: too long, or not ASCII")
    return Config(kind, ttl, expires)


def _producer(call: Call) -> Producer | None:
    """Return the producer of a request, or None. Raises BadRequest."""
    id = call.request.headers.get("producer-id")
    epoch, seq = _count(call, "producer-epoch"), _count(call, "producer-seq")
    if id is None and epoch is None and seq is None:
        return None
    if not id or epoch is None or seq is None:
        raise BadRequest("producer: incomplete (expected Producer-Id, Producer-Epoch and Producer-Seq)")
    if len(id) > limits.NAME_BYTES:
        raise BadRequest(f"producer-id: too long (expected at most {limits.NAME_BYTES} characters)")
    return Producer(id, epoch, seq)


# ---------------------------------------------------------------- answers


def _conflict(text: str, *more: tuple[str, str], status: int = 409) -> Answer:
    return Answer(status, f"{text}\n".encode(), headers=[*SAME_SITE, *more, ("Cache-Control", "no-store")])


def _gone(name: str, status: int = 410) -> Answer:
    return _conflict(f"stream {name!r}: deleted (its forks still use it)", status=status)


def _places(config: Config, state: StreamState) -> Headers:
    """Return the headers of the answers to PUT and HEAD of a stream."""
    head: Headers = [*SAME_SITE, ("Stream-Next-Offset", print_offset(state.tail)), ("Cache-Control", "no-store")]
    if config.ttl is not None:
        head.append(("Stream-TTL", str(config.ttl)))
    if config.expires:
        head.append(("Stream-Expires-At", config.expires))
    return [*head, ("Stream-Closed", "true")] if state.closed else head


async def _found(call: Call, *, uses: bool = True) -> tuple[Catalog, Any, Config] | Answer:
    """Return an existing stream, or the answer for a deleted one. `uses`: the request renews its Stream-TTL. Raises
    NotFound where it has expired."""
    stream = call.target.node
    catalog = await catalog_of(call, call.group)
    config = catalog.config(stream)
    if catalog.is_expired(stream):
        async with catalog.lock.held(call):
            await _remove_expired(call, catalog, stream)
        raise NotFound(f"stream {stream.name!r}: {'deleted' if config.deleted else 'expired'}")
    if config.deleted:
        return _gone(stream.name)
    if uses:
        config.used_ns = call.tree.clock.engine_ns()
    return catalog, stream, config


# ---------------------------------------------------------------- requests


async def look(call: Call) -> Answer:
    """Answer HEAD: the end of a stream, and its config."""
    call.tree.access(call.user, call.target.node, os.R_OK)
    if isinstance(found := await _found(call, uses=False), Answer):
        return found
    catalog, stream, config = found
    return Answer(200, kind=config.kind, headers=_places(config, await catalog.state(call, stream)))


async def read(call: Call) -> Answer:
    """Answer GET: the present messages, a long poll, or events."""
    call.tree.access(call.user, call.target.node, os.R_OK)
    if isinstance(found := await _found(call), Answer):
        return found
    catalog, stream, _ = found
    return await durable_reads.read(call, catalog, stream)


async def append(call: Call) -> Answer:
    """Answer POST: append messages, close the stream, or both."""
    return await in_turn(call, partial(_append, call))


async def _append(call: Call, turn: Turn) -> Answer:
    call.tree.access(call.user, call.target.node, os.W_OK)
    producer, seq, closes = _producer(call), call.request.headers.get("stream-seq", ""), _flag(call, "stream-closed")
    if not call.body and not closes:
        raise BadRequest("body: empty (expected data, or Stream-Closed: true)")
    if len(seq) > limits.NAME_BYTES:
        raise BadRequest(f"stream-seq: too long (expected at most {limits.NAME_BYTES} characters)")
    if isinstance(found := await _found(call), Answer):
        return found
    catalog, stream, config = found
    async with catalog.lock_of(stream).held(call):
        call.group.log.require_writable(messages=True)  # after a failure a repeated append may not be on disk
        state = await catalog.state(call, stream)
        if (refused := _refused(call, config, state, producer)) is not None:
            return refused
        messages = await _messages(call, stream.name, config.kind)
        if not messages.number and call.body:
            raise BadRequest("body: an empty array (expected at least one message)")
        if (done := _repeated(state, producer)) is not None:
            return done
        if seq and seq <= state.seq:
            return _conflict(f"stream-seq {seq!r}: not above the last one, {state.seq!r}")
        after = state.after(producer, seq, close=closes)
        await _write(call, catalog, stream, after, messages, turn)
    head: Headers = [*SAME_SITE, ("Stream-Next-Offset", print_offset(after.tail))]
    head += [("Stream-Closed", "true")] if closes else []
    return Answer(200 if producer is not None and messages.number else 204, headers=[*head, *_echoed(producer)])


def _refused(call: Call, config: Config, state: StreamState, producer: Producer | None) -> Answer | None:
    """Return the answer to an append that the stream refuses, or None. Raises BadRequest."""
    known = state.producers.get(producer.id) if producer is not None else None
    if producer is not None and known is not None and producer.epoch < known.epoch:
        return _conflict("producer: another one has its id now", ("Producer-Epoch", str(known.epoch)), status=403)
    if state.closed:
        places = ("Stream-Closed", "true"), ("Stream-Next-Offset", print_offset(state.tail))
        if (producer is None and not call.body) or (producer is not None and producer == state.closer):
            return Answer(204, headers=[*SAME_SITE, *places, *_echoed(producer)])
        return _conflict("stream: closed", *places)
    if call.body:
        if (kind := call.request.headers.get("content-type")) is None:
            raise BadRequest(f"content-type: missing (expected {config.kind})")
        if media_type(kind) != media_type(config.kind):
            return _conflict(f"content-type {kind[:80]!r} (expected {config.kind})")
    return None


def _echoed(producer: Producer | None) -> Headers:
    if producer is None:
        return []
    return [("Producer-Epoch", str(producer.epoch)), ("Producer-Seq", str(producer.seq))]


def _repeated(state: StreamState, producer: Producer | None) -> Answer | None:
    """Return the answer to a producer's append that is a repeat or not its next one, else None. Raises BadRequest."""
    if producer is None:
        return None
    known = state.producers.get(producer.id)
    if known is not None and producer.epoch > known.epoch and producer.seq:
        raise BadRequest(f"producer-seq {producer.seq}: not in a new epoch (expected 0)")
    last = known.seq if known is not None and known.epoch == producer.epoch else -1
    if producer.seq <= last:
        head = [("Stream-Next-Offset", print_offset(state.tail)), *_echoed(known)]
        return Answer(204, headers=[*SAME_SITE, *head])
    if producer.seq > last + 1:
        expected = ("Producer-Expected-Seq", str(last + 1)), ("Producer-Received-Seq", str(producer.seq))
        return _conflict(f"producer-seq {producer.seq}: some are missing (expected {last + 1})", *expected)
    return None


class Messages(NamedTuple):
    """The messages of an append to the stream `name`. `frames`: all but the last message, for `.batch`."""

    name: str
    frames: bytes
    last: bytes
    number: int


async def _messages(call: Call, name: str, kind: str, prefix: Sequence[bytes] = ()) -> Messages:
    """Return the messages of a body for the stream `name`; `prefix`: messages before them. Raises BadRequest, TooLong,
    OverLimit."""
    count, last = 0, b""

    def frames() -> Iterator[bytes]:
        nonlocal count, last
        for message in chain(prefix, split(kind, call.body) if call.body else ()):
            yield publishing.frame(name, last) if count else b""
            count, last = count + 1, message

    return Messages(name, await publishing.gathered(call, frames()), last, count)


def _frames(after: StreamState, messages: Messages, begin: bytes) -> tuple[bytes, int]:
    """Return the data for `.batch`, and the number of the stream's messages in it. The data is the frame `begin` and
    the messages; the last one has the state after them in a header."""
    pieces, last, count = [begin, messages.frames], messages.last, messages.number + after.closed
    if after.closed and messages.number:
        pieces.append(publishing.frame(messages.name, last))
    if count:
        pieces.append(publishing.frame(messages.name, b"" if after.closed else last, after.encode()))
    return b"".join(pieces), count


async def _write(
    call: Call, catalog: Catalog, stream: Any, after: StreamState, messages: Messages, turn: Turn, begin: bytes = b""
) -> None:
    """Append messages, with the state after them; `begin`: a frame before them.

    The caller holds a lock that others wait for, so this waits only for the disk. Raises NotFound where the stream was
    removed meanwhile (another may have its name), Again where there is no room or the write has to wait for its turn,
    and StreamFull."""
    data, count = _frames(after, messages, begin)
    if not data:
        return

    def check() -> None:
        if stream.removed or stream.name != messages.name or catalog.config(stream).deleted:
            raise NotFound(f"stream {messages.name!r}: removed")

    call.front.hold(len(messages.frames) + len(data))
    turn.take(count + bool(begin), len(data))
    try:
        words = await publishing.ask(call, catalog.group, ".batch", data, 0, check, had_turn=True)
    except Again:
        raise Again(f"stream {messages.name!r}: no room (try again)") from None
    except BaseException:  # the messages may be appended all the same: the client may have disconnected
        catalog.forget(stream)
        raise
    if not words:
        raise StreamFull(f"stream {stream.name!r}: full")
    if count:
        after.end = int(words[0]) + bool(begin) + count
        if messages.number:
            after.tail = after.end - after.closed
    catalog.update(stream, after)


# ---------------------------------------------------------------- making


async def create(call: Call) -> Answer:
    """Answer PUT: make a stream, or confirm that one with the same config exists."""
    return await in_turn(call, partial(_create_or_undo, call))


async def _create_or_undo(call: Call, turn: Turn) -> Answer:
    made = list[Any]()
    try:
        answer = await _create(call, made, turn)
    except BaseException:  # also where the client has disconnected
        await _unmake_groups(call, made)
        raise
    if answer.status >= 400:
        await _unmake_groups(call, made)
    return answer


async def _create(call: Call, made: list[Any], turn: Turn) -> Answer:
    """Return the answer to a PUT. Groups that are made for it are added to `made`, the outermost first."""
    asked, closes = _config(call), _flag(call, "stream-closed")
    if call.target.kind == "nothing" and turn.is_bounded:  # before a group is made
        first = await _messages(call, call.target.name, asked.kind or BYTES)
        turn.take(first.number + closes + 1, len(first.frames) + len(first.last))
    call = await _in_its_group(call, made)
    catalog = await catalog_of(call, call.group)
    async with catalog.lock.held(call):
        call.group.log.require_writable(messages=True)
        stream = catalog.group.streams.get(call.target.name)
        if stream is not None and catalog.is_expired(stream):
            await _remove_expired(call, catalog, stream)
            stream = catalog.group.streams.get(call.target.name)
            if stream is not None and not catalog.config(stream).deleted:
                raise Busy(f"stream {stream.name!r}: expired, and not removed (its group is protected, or sticky)")
        if stream is not None:  # also for another program's empty one: an expiry would remove its later messages
            call.tree.access(call.user, stream, os.W_OK)
        source, prefix = None, list[bytes]()
        if "stream-forked-from" in call.request.headers:
            if isinstance(found := await _source(call, catalog), Answer):
                return found
            source, asked = found[0], _forked(asked, catalog.config(found[0]))
            asked.source, asked.asked = source.number, found[1]
            if media_type(asked.kind) != media_type(catalog.config(source).kind):
                return _conflict(f"content-type {asked.kind[:80]!r} (expected that of the source)")
        elif "stream-fork-offset" in call.request.headers or "stream-fork-sub-offset" in call.request.headers:
            raise BadRequest("stream-fork-offset: not without Stream-Forked-From")
        asked.kind = asked.kind or BYTES
        if stream is not None and not await _is_blank(call, catalog, stream):
            return await _compared(call, catalog, stream, asked, closes)
        if source is not None:
            asked.fork, prefix = await _place(call, catalog, source)
        messages = await _messages(call, call.target.name, asked.kind, prefix)
        return await _made(call, catalog, asked, messages, closes, turn)


async def _made(call: Call, catalog: Catalog, config: Config, messages: Messages, closes: bool, turn: Turn) -> Answer:
    """Make a stream with its first messages, and return the answer.

    If the messages are refused, the stream made for them is removed. That takes room in the log, which no rate bounds,
    so known reasons for a refusal are checked before."""
    if CATALOG in catalog.group.streams:  # without the right to write its config, a user makes no stream
        call.tree.access(call.user, call.own(CATALOG), os.W_OK)
    state = StreamState(tail=config.fork, end=config.fork).after(None, "", close=closes)
    _require_now(catalog, config, state, messages, turn)
    was_there = call.target.name in catalog.group.streams
    stream = await groups.make_stream(call)
    if stream is not catalog.group.streams.get(call.target.name):
        raise Exists(f"{call.target.name!r}: a group (made meanwhile)")  # its number may be another stream's
    begin = publishing.frame(CATALOG, config.encode(stream.number))
    try:
        await _make_catalog(call, catalog.group)
        await _write(call, catalog, stream, state, messages, turn, begin)
    except BaseException:  # also where the client has disconnected, which cancels a write that waits for room
        if not was_there:
            call.tree.unmake(stream)
        raise
    catalog.put(stream, config)
    url = f"{call.site}{call.path.text}"
    return Answer(
        201, kind=config.kind, headers=[*_places(config, state), ("Location", url), ("Content-Type", config.kind)]
    )


def _require_now(catalog: Catalog, config: Config, state: StreamState, messages: Messages, turn: Turn) -> None:
    """Check that a new stream with these messages would be accepted now. Raises Again, StreamFull."""
    data, count = _frames(state, messages, b"")
    record = publishing.frame(CATALOG, config.encode(MOST))  # the stream's number is not known yet
    size = stored_bytes(messages.name, count, len(data)) + stored_bytes(CATALOG, 1, len(record))
    if not catalog.has_room(1, size):
        if catalog.group.settings.full == "block":
            raise Again(f"stream {messages.name!r}: no room (try again)")
        raise StreamFull(f"stream {messages.name!r}: full")
    turn.take(count + 1, len(data) + len(record))


async def _make_catalog(call: Call, group: Any) -> None:
    """Make the catalog of a group where it is missing. It has the group's owner and mode, so that users who may make a
    stream may write to it."""
    if CATALOG not in group.streams:
        owner = User(group.state.uid, group.state.gid, where="durable")
        call = attrs.evolve(call, user=owner, target=Target("new stream", group, CATALOG))
        await groups.make_stream(call, most=0o666)


async def _compared(call: Call, catalog: Catalog, stream: Any, asked: Config, closes: bool) -> Answer:
    """Return the answer to a PUT of an existing stream: 200 if it has the requested config, else 409."""
    config, state = catalog.config(stream), await catalog.state(call, stream)
    if config.deleted:
        return _gone(stream.name, 409)
    differences = {
        f"content type {config.kind}": media_type(config.kind) != media_type(asked.kind),
        "another expiry": (config.ttl, config.expires) != (asked.ttl, asked.expires),
        "another source": (config.source, config.asked) != (asked.source, asked.asked),
        "its end" if state.closed else "no end": state.closed != closes,
    }
    if found := [what for what, differs in differences.items() if differs]:
        return _conflict(f"stream {stream.name!r}: is there, with {', '.join(found)}")
    return Answer(200, kind=config.kind, headers=_places(config, state))


async def _is_blank(call: Call, catalog: Catalog, stream: Any) -> bool:
    """Whether a stream has neither config nor messages, as after a server was killed in the middle of a PUT."""
    return not catalog.is_made(stream) and not (await catalog.state(call, stream)).end


async def _in_its_group(call: Call, made: list[Any]) -> Call:
    """Return the call with its stream's group as the target's node; missing groups are made. Raises Busy where that
    group does not retain all messages."""
    if call.group.removed:  # a refused PUT may be removing the groups that it made
        async with _MAKING.setdefault(call.tree, Lock()).held(call):
            call = attrs.evolve(call, target=call.front.table.resolve(call.tree, call.user, call.path))
    while call.target.kind == "nothing":
        async with _MAKING.setdefault(call.tree, Lock()).held(call):
            call = attrs.evolve(call, target=call.front.table.resolve(call.tree, call.user, call.path))
            if call.target.kind == "nothing":
                group, name = call.target.node, call.target.name
                mode = groups.mode(call, group, groups.GROUP_MODE)
                try:
                    new = await call.front.await_step(call.tree.mkdir(call.user, group, name, mode, _NEEDED))
                except Exists:  # made in the tree meanwhile
                    if name not in group.groups:
                        raise
                else:
                    made.append(new)
                call = attrs.evolve(call, target=call.front.table.resolve(call.tree, call.user, call.path))
    if call.target.kind == "stream":
        call = attrs.evolve(call, target=Target("new stream", call.target.node.group, call.target.name))
    if not _keeps_all(call.group):
        expected = "replay all, deliver all, data message, no depth, no ttl"
        raise Busy(f"group {call.group.state.name!r}: keeps too little (expected {expected})")
    return call


async def _unmake_groups(call: Call, made: list[Any]) -> None:
    """Remove groups that were made for a refused stream, unless they are in use. A request that arrives meanwhile waits
    for the removal, and makes them again."""
    if not made:
        return
    with call.front.to_the_end(), contextlib.suppress(MqfsError):  # waits only for other PUTs and the disk
        async with _MAKING.setdefault(call.tree, Lock()).held(call):
            for group in reversed(made):
                if is_used(call.tree, group):
                    return
                if (catalog := group.streams.get(CATALOG)) is not None:
                    call.tree.unmake(catalog)
                await call.front.await_step(call.tree.rmdir(call.user, group.parent, group.name, is_unmade=True))


def _keeps_all(group: Any) -> bool:
    settings = group.settings
    is_kept = (settings.data, settings.replay, settings.deliver) == ("message", "all", "all")
    return is_kept and not (settings.depth.messages or settings.depth.size or settings.ttl)  # the catalog, too


# ---------------------------------------------------------------- forks


async def _source(call: Call, catalog: Catalog) -> tuple[Any, str] | Answer:
    """Return the stream of Stream-Forked-From and the offset in it as the client gave it, or the answer for a deleted
    one. Raises BadRequest, NotFound."""
    given = call.request.headers
    path = target.parse(given["stream-forked-from"])
    found = call.front.table.resolve(call.tree, call.user, path)
    if found.kind != "stream":
        raise NotFound(f"stream-forked-from {path.text[:80]!r}: no such stream")
    if found.node.group is not catalog.group:
        raise BadRequest("stream-forked-from: in another group (expected a stream beside the new one)")
    call.tree.access(call.user, found.node, os.R_OK)
    config = catalog.config(found.node)
    if config.deleted:
        return _gone(found.node.name, 409)
    if catalog.is_expired(found.node):
        raise NotFound(f"stream {found.node.name!r}: expired")
    return found.node, f"{given.get('stream-fork-offset', '')}+{_count(call, 'stream-fork-sub-offset') or 0}"


def _forked(asked: Config, source: Config) -> Config:
    """Return the config of a fork, with its source's expiry and type where the request gives none."""
    if asked.ttl is None and not asked.expires:
        asked = attrs.evolve(asked, ttl=source.ttl, expires=source.expires)
    return attrs.evolve(asked, kind=asked.kind or source.kind)


async def _place(call: Call, catalog: Catalog, source: Any) -> tuple[int, list[bytes]]:
    """Return the sequence below which the source's messages are the fork's, and the fork's first own message where the
    sub-offset is within a message of the source. Raises BadRequest."""
    if len(catalog.parts(source)) >= limits.DURABLE_FORKS:
        raise BadRequest(f"stream-forked-from: a fork of too many (expected at most {limits.DURABLE_FORKS})")
    tail = (await catalog.state(call, source)).tail
    text = call.request.headers.get("stream-fork-offset")
    at = tail if text is None else 0 if text == "-1" else parse_offset(text)
    if at > tail:
        raise BadRequest(f"stream-fork-offset {text!r}: beyond the end of the source")
    more = _count(call, "stream-fork-sub-offset") or 0
    if not more:
        return at, []
    stitched = durable_reads.Stitched(call, catalog, source, at)
    is_json = media_type(catalog.config(source).kind) == JSON
    try:
        while True:
            begin, found = stitched.next, await stitched.gather(1)
            if not found or (not is_json and len(found[0]) < more):
                raise BadRequest("stream-fork-sub-offset: beyond the next message of the source")
            if not is_json:
                return (stitched.next, []) if len(found[0]) == more else (begin, [found[0][:more]])
            if (more := more - 1) == 0:
                return stitched.next, []
    finally:
        stitched.close()


# ---------------------------------------------------------------- removing


async def delete(call: Call) -> Answer:
    """Answer DELETE. A stream with forks is only marked deleted, as they need it."""
    return await in_turn(call, partial(_delete, call))


async def _delete(call: Call, turn: Turn) -> Answer:
    if isinstance(found := await _found(call, uses=False), Answer):
        return found
    catalog, stream, _ = found
    async with catalog.lock.held(call):
        await _remove(call, catalog, stream, turn)
    return Answer(204, headers=SAME_SITE)


async def _remove(call: Call, catalog: Catalog, stream: Any, turn: Turn) -> None:
    """Remove a stream, and the deleted sources that only it still needed."""
    while stream is not None and not stream.removed:
        if catalog.has_forks(stream):
            call.tree.require_removable(call.user, stream)
            config = attrs.evolve(catalog.config(stream), deleted=True, readers=0)
            frame = publishing.frame(CATALOG, config.encode(stream.number))
            turn.take(1, len(frame))
            await _make_catalog(call, catalog.group)
            await publishing.ask(call, catalog.group, ".batch", frame, 0, had_turn=True)
            return catalog.put(stream, config)
        source = catalog.source(stream)
        await call.front.await_step(call.tree.unlink(call.user, catalog.group, stream.name))
        catalog.drop(stream)
        stream = source if source is not None and catalog.config(source).deleted else None


async def _remove_expired(call: Call, catalog: Catalog, stream: Any) -> None:
    """Remove an expired stream as its owner, who has set the expiry.

    In a sticky group another user may have set it: all may write to the catalog, but not remove the streams of others.
    There it is removed as the caller, and stays hidden until a caller has that right."""
    state = stream.state
    is_sticky = catalog.group.state.mode & S_ISVTX
    user = call.user if is_sticky else User(state.uid, state.gid, where="durable")
    call = attrs.evolve(call, user=user)
    try:
        await _remove(call, catalog, stream, Turn(call))
    except MqfsError:
        return


ROUTES = (
    Route("PUT", "new stream", "/STREAM", create, "Make a stream.", options=("*",), body=APPEND),
    Route("PUT", "nothing", "/GROUP/STREAM", create, "Make a stream, and its group.", options=("*",), body=APPEND),
    Route("PUT", "stream", "/STREAM", create, "The stream is there.", options=("*",), body=APPEND),
    Route("POST", "stream", "/STREAM", append, "Append, or close.", options=("*",), body=APPEND),
    Route("GET", "stream", "/STREAM", read, "Read.", options=("*",)),
    Route("HEAD", "stream", "/STREAM", look, "Where it ends.", options=("*",)),
    Route("DELETE", "stream", "/STREAM", delete, "Remove a stream.", options=("*",)),
)


@attrs.frozen
class DurableTable(Table):
    """The routes of the dialect. Pages of other sites may use the answers that the browser rules permit them."""

    def find(self, method: str, target: Target, path: Path) -> Route:
        if method != "PUT" and target.kind in ("new stream", "nothing"):
            raise NotFound(f"no stream {path.text!r} (make it: PUT {path.text})")
        return super().find(method, target, path)

    def refuse(self, request: Request, error: MqfsError) -> Answer:
        answer = super().refuse(request, error)
        answer.headers += SAME_SITE
        return answer


def table(group: str) -> Table:
    """Return the routes of a listener whose root is a group, `NAME` or `NAME/NAME`."""
    return DurableTable(ROUTES, partial(resolve, tuple(group.split("/"))))
