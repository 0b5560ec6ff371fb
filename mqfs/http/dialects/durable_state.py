"""The state of durable streams: their messages, config and producers, and whether they are closed.

A durable stream is a stream of a group with `replay all`. An offset is a sequence of the group's log, so a fork copies
nothing: it is its source below the fork's offset, and then its own messages, which were all written later.

    sequence     1      2     3     4      5      6        `draft` is a fork of `chat` at 4
    stream       __ds   chat  chat  __ds   draft  chat     to read chat:  2 3 6
                                                           to read draft: 2 3 5

The config of a stream is a message of the stream `__ds` of its group, in one atomic batch with the first messages. It
changes only when a stream with forks is deleted. The state that an append changes (producers, Stream-Seq, closed) is
whole in the header `durable` of the append's last message: it is in the log exactly when the append is, and after a
start only the messages after the newest append are read. A close is an empty message: an end of file to readers of the
file.

A write is made under a lock that others wait for, so it waits only for the disk there. A write beyond the rate of its
user leaves the lock, waits for its turn among all of the user's writes, and is retried once. A write without room is
refused.

An append to a stream of JSON is a message for each element of its array, in the very bytes that were sent. An append of
any other type is one message, and a read joins the messages.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import attrs

from mqfs import limits
from mqfs.engine.tree.tree import Tree
from mqfs.errors import Again, BadCommand, MqfsError, NotFound, OverLimit, TooLong
from mqfs.http import groups, publishing, reading
from mqfs.http.answers import BREAK, RAW, Answer, media_type
from mqfs.http.cloud_events import elements, is_json
from mqfs.http.route import Call, TimedOut
from mqfs.model import Kind, Record, Step, User, Wait
from mqfs.records import headers
from mqfs.records.record import HEAD_BYTES

JSON = "application/json"
BYTES = "application/octet-stream"


def is_text(kind: str) -> bool:
    """Whether events carry data of a type as it is; data of other types is base64."""
    return media_type(kind) == JSON or media_type(kind).startswith("text/")


def split(kind: str, body: bytes) -> Iterator[bytes]:
    """Yield the messages of an append, each in some milliseconds at most. Raises BadRequest, TooLong."""
    if media_type(kind) != JSON:
        if len(body) > limits.MESSAGE_BYTES:
            raise TooLong(f"body of {len(body)} bytes: too long (expected at most {limits.MESSAGE_BYTES})")
        yield body
        return
    yield from (element.encode() for element in elements(body))


def join(kind: str, messages: Sequence[bytes]) -> bytes:
    """Return the body of an answer. In a stream of JSON, another program's message that is not JSON becomes a
    string."""
    if media_type(kind) != JSON:
        return b"".join(messages)
    return b"[" + b",".join(map(_as_json, messages)) + b"]"


def _as_json(message: bytes) -> bytes:
    return message if is_json(message) else json.dumps(message.decode(errors="replace"), ensure_ascii=False).encode()


def data_event(kind: str, messages: Sequence[bytes]) -> bytes:
    """Return the event with some messages; empty for none. A line that begins with a blank gets another before it."""
    if not messages:
        return b""
    data = join(kind, messages)
    text = data.decode(errors="replace") if is_text(kind) else base64.b64encode(data).decode()
    lines = (f"data:{' ' if line.startswith(' ') else ''}{line}\n" for line in BREAK.split(text))
    return f"event: data\n{''.join(lines)}\n".encode()


def control_event(control: dict[str, object]) -> bytes:
    """Return the event that says where the messages before it end."""
    return b"event: control\ndata:" + json.dumps(control).encode() + b"\n\n"


# ------------------------------------------------------------ turns of writers


class Turn:
    """The turn of one request for its single write, by the rate of its user."""

    def __init__(self, call: Call) -> None:
        self._call, meters = call, call.tree.open_files.meters
        self._meter = meters.of(call.user.uid) if meters is not None else None
        self._is_taken = self._meter is None
        self._asked: tuple[int, int] | None = None  # messages and bytes of the write that has to wait

    @property
    def is_bounded(self) -> bool:
        """Whether the user may have to wait for the turn."""
        return not self._is_taken

    @property
    def is_awaited(self) -> bool:
        """Whether `take` raised."""
        return self._asked is not None

    def take(self, messages: int, size: int) -> None:
        """Count a write of that number of messages and bytes, unless the request's write was counted before. Raises
        Again where it has to wait for its turn."""
        if self._is_taken or self._meter is None:
            return
        self._is_taken = self._meter.try_turn(messages, size)
        if not self._is_taken:
            self._asked = messages, size
            raise Again("write: beyond the rate of its user (try again)")

    async def wait(self) -> None:
        """Wait for the turn after `take` raised Again. Raises Again after limits.DURABLE_WAIT_S."""
        assert self._meter is not None
        assert self._asked is not None
        try:
            await self._call.front.await_step(self._meter.turn(*self._asked), limits.DURABLE_WAIT_S)
        except TimedOut:
            raise Again("write: beyond the rate of its user (try again)") from None
        self._is_taken = True


async def in_turn(call: Call, write: Callable[[Turn], Awaitable[Answer]]) -> Answer:
    """Return the answer of a write; if the write has to wait for its turn, retry it then. `write` takes the turn under
    a lock, and holds none when it returns or raises."""
    turn = Turn(call)
    try:
        return await write(turn)
    except Again:
        if not turn.is_awaited:
            raise
    await turn.wait()
    return await write(turn)


def stored_bytes(name: str, messages: int, size: int) -> int:
    """Estimate the bytes in the log of messages of a stream, which have `size` bytes as frames."""
    return size + messages * (HEAD_BYTES - len(publishing.frame(name, b"")))


# ------------------------------------------------------------ the state


CATALOG = "__ds"  # also the protocol's name for paths that are not streams
HEADER = "durable"
SERVER = User(0, 0, where="durable")  # reads back what was written on behalf of clients that may only write
_LOSSY = attrs.evolve(RAW, lost=lambda first, last: b"")  # damaged and trimmed messages do not end a look-up
MOST = 2**53 - 1  # the largest exact integer of a client in JavaScript
_DROPPED_BYTES = 8  # in the log, at most, to drop one record among many, besides its sequence
_CREATED = ("kind", "ttl", "expires", "source", "fork", "asked")


class Producer(NamedTuple):
    """A producer's place: one number of Producer-Seq is accepted once, and no smaller Producer-Epoch ever again."""

    id: str
    epoch: int
    seq: int


@attrs.define
class Config:
    """The config of a stream.

    `ttl`: seconds without a read or write after which it expires. `expires`: a time as in RFC 3339. `source`: number of
    the stream that it is a fork of, below the sequence `fork`. `asked`: the offset of the fork as the client gave it.
    `deleted`: it exists only for its forks. `used_ns`: when it was last read or written here, in engine time, which a
    step of the wall clock does not move. `readers`: requests that read it now."""

    kind: str = BYTES
    ttl: int | None = None
    expires: str = ""
    source: int = 0
    fork: int = 0
    asked: str = ""
    deleted: bool = False
    used_ns: int = attrs.field(default=0, eq=False)
    readers: int = attrs.field(default=0, eq=False)

    @property
    def expires_ns(self) -> float:
        """The expiry in UNIX nanoseconds; infinite without one. Raises ValueError, OverflowError where `expires` is
        not a time."""
        return datetime.fromisoformat(self.expires).timestamp() * 10**9 if self.expires else math.inf

    def encode(self, number: int) -> bytes:
        """Return the message of the catalog for the stream of that number."""
        kept = attrs.asdict(self, filter=attrs.filters.exclude("used_ns", "readers"))
        return json.dumps({"stream": number, **kept}).encode()


def decode_config(body: bytes) -> tuple[int, Config] | None:
    """Return the number and the config of a stream from a message of the catalog; None for another program's
    message."""
    try:
        found: Any = json.loads(body) if len(body) <= limits.CTL_BYTES else None
        config = Config(**{name: found[name] for name in (*_CREATED, "deleted")})
        numbers = found["stream"], config.source, config.fork, *([] if config.ttl is None else [config.ttl])
        if not all(map(_is_number, numbers)) or type(config.deleted) is not bool:
            return None
        if not all(map(is_header, (config.kind, config.expires, config.asked))):
            return None
        _ = config.expires_ns  # raises if it is not a time
        return numbers[0], config
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def _is_number(value: object) -> bool:
    """Whether a value is an integer from 0 to MOST: a stream's number, a sequence, seconds or a client's count."""
    return type(value) is int and 0 <= value <= MOST


def is_header(text: object) -> bool:
    """Whether a value is a text that may be the value of a header."""
    if not isinstance(text, str) or len(text) > limits.NAME_BYTES:
        return False
    return text.isascii() and (text == "" or text.isprintable())


@attrs.define
class StreamState:
    """The state of a stream after its appends. `tail`: the sequence after its last message with data. `end`: the
    sequence after its last message."""

    producers: OrderedDict[str, Producer] = attrs.Factory(OrderedDict)  # the most recent appender is last
    seq: str = ""  # Stream-Seq
    closed: bool = False
    closer: Producer | None = None  # the producer that closed it
    tail: int = 0
    end: int = 0
    is_told: bool = False  # whether a header with the state was found

    def after(self, producer: Producer | None, seq: str, *, close: bool) -> StreamState:
        """Return the state after an append."""
        producers = self.producers.copy()
        if producer is not None:
            producers[producer.id] = producer
            producers.move_to_end(producer.id)
        state = attrs.evolve(self, producers=producers, seq=seq or self.seq, closed=close)
        state.closer = producer if close else None
        while len(producers) > limits.DURABLE_PRODUCERS or len(state.encode()) > limits.DURABLE_STATE_BYTES:
            producers.popitem(last=False)
        return state

    def encode(self) -> bytes:
        """Return the header of an append's last message. An empty state is written, too, so that a look-up ends
        there."""
        producers = {one.id: [one.epoch, one.seq] for one in self.producers.values()}
        said = {"producers": producers, "seq": self.seq, "closed": self.closed, "closer": self.closer}
        said = {name: value for name, value in said.items() if value}
        return headers.encode({HEADER: json.dumps(said, ensure_ascii=False)})

    def take(self, record: Record) -> None:
        """Apply a message of the stream; messages come in their order, and a repeated one changes nothing."""
        if record.sequence < self.end:
            return
        text = headers.decode(record.headers).get(HEADER) if record.headers else None
        self.end = record.sequence + 1
        if record.body:
            self.tail = self.end
        if text is None:
            return
        try:
            said = json.loads(text)
            producers = [Producer(id, *numbers) for id, numbers in said.get("producers", {}).items()]
            seq, closed = said.get("seq", ""), said.get("closed", False)
            closer = Producer(*said["closer"]) if "closer" in said else None
            all_of = [*producers, *([] if closer is None else [closer])]
            "".join((seq, *(one.id for one in all_of))).encode()  # raises if one is not text, or has a lone surrogate
        except (ValueError, TypeError, AttributeError, RecursionError):
            return  # another program's header
        if type(closed) is not bool or not all(_is_number(n) for one in all_of for n in (one.epoch, one.seq)):
            return
        self.producers = OrderedDict((one.id, one) for one in producers)
        self.seq, self.closed, self.closer, self.is_told = seq, closed, closer, True


class Lock:
    """A fair lock. A holder waits only for the disk: if it waited for room or for the rate of its user, all others
    would wait for that, too."""

    def __init__(self) -> None:
        self.is_held = False
        self._waits: deque[Wait[None]] = deque()

    @asynccontextmanager
    async def held(self, call: Call) -> AsyncIterator[None]:
        """Hold the lock. Raises OverLimit where the user has too many waits."""
        if self.is_held:
            wait: Wait[None] = Wait(self._leave)
            self._waits.append(wait)
            await call.front.await_step(cast(Step[None], wait))
        self.is_held = True
        try:
            yield
        finally:
            if self._waits:
                self._waits.popleft().resolve(None)  # hand the lock over
            else:
                self.is_held = False

    def _leave(self, wait: Wait[None]) -> bool:
        self._waits.remove(wait)
        return True


class Part(NamedTuple):
    """The messages of one stream that are a part of a durable stream: those below `end`, or all in the last part."""

    stream: Any
    end: int | None  # a sequence


class Catalog:
    """The durable streams of one group. `lock`: held to make or remove one."""

    def __init__(self, group: Any) -> None:
        self.group, self.lock = group, Lock()
        self._configs: dict[int, Config] = {}  # by the stream's number
        self._forks: Counter[int] = Counter()  # of each source
        self._states: OrderedDict[int, StreamState] = OrderedDict()  # the most recently used is last
        self._locks: WeakValueDictionary[int, Lock] = WeakValueDictionary()  # of appends, while in use
        self._looks: WeakValueDictionary[int, Lock] = WeakValueDictionary()  # of look-ups, while in use
        self._is_loaded = False

    async def load(self, call: Call) -> None:
        """Read the configs of the streams that were made before the server started."""
        if self._is_loaded:
            return  # without the lock, whose holder may be waiting
        async with self.lock.held(call):
            if self._is_loaded:
                return
            records = list[int]()
            if CATALOG in self.group.streams:
                async for record in _messages(call, CATALOG, "first"):
                    records.append(record.sequence)
                    if (found := decode_config(record.body)) is not None and found[0] in self.group.numbers:
                        self._set(*found)
            self._is_loaded = True
            if len(records) > 2 * len(self._configs) + limits.DURABLE_RECORDS:
                await self._compact(attrs.evolve(call, user=SERVER), records)

    async def _compact(self, call: Call, old: list[int]) -> None:
        """Write the present configs once more, and then drop the messages before them, both in portions.

        Without room for all of it, or in a protected group, which refuses the drop, nothing is done: each start would
        add records, and drop none."""
        true, step = [*self._configs.items()], limits.DURABLE_RECORDS
        with suppress(MqfsError):
            size = sum(len(str(sequence)) + _DROPPED_BYTES for sequence in old)
            for number, one in true:
                size += stored_bytes(CATALOG, 1, len(publishing.frame(CATALOG, one.encode(number))))
                await call.front.pause()
            if self.group.settings.protect or not self.has_room(len(true), size):
                return
            for at in range(0, len(true), step):
                frames = (publishing.frame(CATALOG, one.encode(number)) for number, one in true[at : at + step])
                data = await publishing.gathered(call, frames)
                if not await publishing.ask(call, self.group, ".batch", data, 0, had_turn=True):
                    return  # the batch was discarded
            ctl = call.tree.walk(SERVER, self.group, "ctl")
            for at in range(0, len(old), step):
                words = " ".join(map(str, old[at : at + step]))
                await groups.write(call, ctl, f"drop {CATALOG} {words}\n".encode())
                await call.front.pause()

    def has_room(self, records: int, size: int) -> bool:
        """Whether a batch with that number of records of the catalog would be appended now. `size`: bytes of the whole
        batch in the log. Raises StreamFull."""
        there = self.group.streams.get(CATALOG)
        if self.group.settings.full == "drop-old":  # the oldest messages are evicted for it
            return True
        return bool(self.group.publisher.has_room({} if there is None else {there: records}, size))

    def _set(self, number: int, config: Config | None) -> None:
        before = self._configs.pop(number, None)
        if before is not None:
            self._forks[before.source] -= 1
        if config is not None:
            config.used_ns = self.group.clock.engine_ns()
            self._configs[number] = config
            self._forks[config.source] += 1

    # ------------------------------------------------------------ of one stream

    def config(self, stream: Any) -> Config:
        """Return the config of a stream; the defaults for a stream of another program."""
        return self._configs.get(stream.number) or Config()

    def is_expired(self, stream: Any) -> bool:
        """Whether a stream has expired, or is deleted and its last fork is removed. Writes of other programs renew its
        `ttl`, too."""
        config = self.config(stream)
        if config.deleted:
            return not self.has_forks(stream)
        if config.expires_ns <= self.group.clock.wall_ns():
            return True
        if config.ttl is None or config.readers:
            return False
        used_ns = max(config.used_ns, self._written_ns(stream))
        return used_ns + config.ttl * 10**9 <= int(self.group.clock.engine_ns())

    def _written_ns(self, stream: Any) -> int:
        """Return when the newest message of a stream was written, in engine time."""
        newest = Record(stream.kept.newest_kept(), stream.kept.mtime_ns, stream.number, Kind.MESSAGE, 0, b"", b"")
        return int(self.group.log.times.written_ns(newest))

    def is_made(self, stream: Any) -> bool:
        """Whether a stream was made through this dialect."""
        return stream.number in self._configs

    def put(self, stream: Any, config: Config) -> None:
        """Record the config of a stream that was made, or deleted while it has forks."""
        self._set(stream.number, config)
        if len(self._configs) > 2 * len(self.group.numbers):
            for number in self._configs.keys() - self.group.numbers.keys():  # removed by other programs
                self._set(number, None)

    def drop(self, stream: Any) -> None:
        """Forget a stream that was removed."""
        self._set(stream.number, None)
        self.forget(stream)

    def has_forks(self, stream: Any) -> bool:
        if not self._forks[stream.number]:
            return False
        there = self.group.numbers  # other programs may have removed some
        return any(one.source == stream.number and number in there for number, one in self._configs.items())

    def source(self, stream: Any) -> Any:
        """Return the stream that a stream is a fork of; None if it is none, or its source was removed."""
        return self.group.numbers.get(self.config(stream).source)

    def parts(self, stream: Any) -> list[Part]:
        """Return the streams that have the messages of a stream, the oldest first. Raises NotFound, OverLimit."""
        found, end = [Part(stream, None)], None
        while (config := self.config(stream)).source:
            end = config.fork if end is None else min(end, config.fork)
            if (stream := self.source(stream)) is None:
                raise NotFound("source of a fork: removed by another program")
            found.append(Part(stream, end))
            if len(found) > limits.DURABLE_FORKS:
                raise OverLimit(f"fork: {len(found)} of each other (expected at most {limits.DURABLE_FORKS})")
        return found[::-1]

    def lock_of(self, stream: Any) -> Lock:
        """Return the lock of appends to a stream: each is checked and made before the next one is checked."""
        return self._locks.setdefault(stream.number, Lock())

    async def state(self, call: Call, stream: Any) -> StreamState:
        """Return the state of a stream after all appends so far, including unsynced ones and other programs'."""
        state = self._states.get(stream.number) or await self._look_up(call, stream)
        self._states.move_to_end(stream.number)
        if len(self._states) > limits.DURABLE_STATES:
            self._states.popitem(last=False)
        newest = stream.kept.newest_kept()
        if newest and newest >= state.end:
            is_near = state.end and newest - state.end < limits.DURABLE_LOOK_BACK
            since = str(state.end) if is_near else f"-{limits.DURABLE_LOOK_BACK}"
            async for record in _messages(call, stream.name, since):
                state.take(record)
            state.end = max(state.end, newest + 1)
        if (floor := stream.state.floor) > state.end:
            state.end = state.tail = floor
        return state

    async def _look_up(self, call: Call, stream: Any) -> StreamState:
        """Return the state of a stream that is not cached, from the newest message with its header.

        Other programs may have written any number of messages after that one, so the search goes back in portions, each
        twice as long."""
        async with self._looks.setdefault(stream.number, Lock()).held(call):
            if (known := self._states.get(stream.number)) is not None:
                return known  # another request has looked it up meanwhile
            fork = self.config(stream).fork
            state, span = StreamState(tail=fork, end=fork), limits.DURABLE_LOOK_BACK
            first, below = max(fork, stream.kept.first_kept()), stream.kept.newest_kept() + 1
            while first < below and not state.is_told:
                start = max(below - span, first)
                older = StreamState()
                async for record in _messages(call, stream.name, str(start), below - 1):
                    older.take(record)
                state = attrs.evolve(older, tail=max(state.tail, older.tail), end=max(state.end, older.end))
                below, span = start, 2 * span
            return self._states.setdefault(stream.number, state)

    def update(self, stream: Any, state: StreamState) -> None:
        """Record the state after an append."""
        self._states[stream.number] = state

    def forget(self, stream: Any) -> None:
        """Forget the state of a stream after an append with an unknown outcome: it is looked up again."""
        self._states.pop(stream.number, None)


async def _messages(call: Call, name: str, since: str, until: int | None = None) -> AsyncIterator[Record]:
    """Yield the messages of a stream from `since` to the present end, or to `until`, whatever the caller's rights; lost
    ones are skipped."""
    words = reading.Wish(_LOSSY, since, until)
    try:
        source = reading.open_source(attrs.evolve(call, user=SERVER), [name], words)
    except (NotFound, BadCommand):
        return  # no such stream
    try:
        await source.begin()
        reading.bound(source.cursor, until)
        while not source.over:
            if source.poll() is None:
                await source.pause()
            elif source.cursor.shown is not None:
                yield source.cursor.shown
                await call.front.pause()
    finally:
        source.stop()
        source.cursor.close()


_CATALOGS: WeakKeyDictionary[Tree, dict[int, Catalog]] = WeakKeyDictionary()  # all listeners of a tree share them


async def catalog_of(call: Call, group: Any) -> Catalog:
    """Return the catalog of a group, loaded."""
    known = _CATALOGS.setdefault(call.tree, {})
    catalog = known.get(group.number)
    if catalog is None or catalog.group is not group:
        catalog = known[group.number] = Catalog(group)
        for number in [number for number, one in known.items() if one.group.removed]:
            del known[number]
    await catalog.load(call)
    return catalog


def is_used(tree: Tree, group: Any) -> bool:
    """Whether a request makes or removes a stream of a group now, or waits to."""
    catalog = _CATALOGS.get(tree, {}).get(group.number)
    return catalog is not None and catalog.lock.is_held
