"""The write side of a group: messages to be published, requests for `.put`, batches, large bodies.

Publishing threads share its open files: a thread has a file to itself while it writes.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache, partial
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, TypeVar

import attrs

from mqfs import limits
from mqfs.client.large import BodyWriter, StagedUploads, is_long
from mqfs.client.message import Receipt
from mqfs.client.types import Body, Duration, File, Link, bytes_of, is_empty
from mqfs.errors import BadName, BadRequest, Denied, Disconnected, Exists, MqfsError, NotFound, TooLong
from mqfs.records.headers import TOPIC
from mqfs.syntax.duration import format_duration
from mqfs.syntax.names import check_file_name, is_shortened, stream_name

if TYPE_CHECKING:
    from mqfs.client.transport.ring import RingGroup


@attrs.frozen
class Outgoing:
    """A message to be published with its options, for `Group.publish_many`: the arguments of `Group.publish`.

    Attributes:
        stream: The message's stream.
        body: Its body; text as UTF-8.
        ttl: How long it lives, in seconds or as "30s". None: the group's `ttl`.
        delay: How long it is delayed, in seconds or as "30s". None: not at all.
        at: When it is delivered, UNIX seconds or a datetime. None: at once.
        priority: 0 to 9. Higher ones are claimed first. None: 5.
        headers: Texts by name. None: none.
        id: A message whose `id` was published within `dedup` is not published again. Empty: none.
        single: Whether it is for one receiver, also in a group with `deliver all`.
        key: Messages with the same key belong together; at most 255 bytes. Empty: none.
        expect: The sequence that the stream's newest retained message must have; 0: it retains none. None: any.
        every: How long between two runs of a schedule, in seconds or as "1h". None: none.
        cron: When a schedule runs: five fields and perhaps a zone. Empty: none.
    """

    stream: str
    body: Body
    ttl: Duration | None = None
    delay: Duration | None = None
    at: float | datetime | None = None
    priority: int | None = None
    headers: Mapping[str, str] | None = None
    id: str = ""
    single: bool = False
    key: str = ""
    expect: int | None = None
    every: Duration | None = None
    cron: str = ""

    def metadata(self) -> dict[str, Any]:
        """Build the fields of `.put`.

        Returns:
            The fields without the stream; none where a plain write suffices.

        Raises:
            BadRequest: A duration is invalid.
        """
        fields: dict[str, Any] = {}
        if self.ttl is not None:
            fields["ttl"] = format_duration(self.ttl)
        if self.delay is not None:
            fields["delay"] = format_duration(self.delay)
        if self.at is not None:
            fields["at"] = self.at.timestamp() if isinstance(self.at, datetime) else self.at
        if self.priority is not None:
            fields["priority"] = self.priority
        if self.headers:
            fields["headers"] = dict(self.headers)
        if self.id:
            fields["id"] = self.id
        if self.single:
            fields["single"] = True
        if self.key:
            fields["key"] = self.key
        if self.expect is not None:
            fields["expect"] = self.expect
        if self.every is not None:
            fields["every"] = format_duration(self.every)
        if self.cron:
            fields["cron"] = self.cron
        return fields

    def put(self, *, kept: bool = False) -> bytes:
        """Build the request for `.put`.

        Args:
            kept: Whether the answer is a receipt.

        Returns:
            The object and the body.

        Raises:
            BadName: The name is not one of a stream.
            TypeError: The body is neither bytes nor text.
        """
        fields = {"stream": check_file_name(self.stream), **self.metadata(), **({"kept": True} if kept else {})}
        return json.dumps(fields, ensure_ascii=False).encode() + b"\n" + bytes_of(self.body)


@lru_cache(maxsize=1_024)
def head_of(stream: str) -> bytes:
    """Return the object of `.put` and the newline for a message without options; the answer is a receipt."""
    return Outgoing(stream, b"").put(kept=True)


class PublishOptions(TypedDict, total=False):
    """The options of `Group.publish`."""

    ttl: Duration | None
    delay: Duration | None
    at: float | datetime | None
    priority: int | None
    headers: Mapping[str, str] | None
    id: str
    key: str
    single: bool
    expect: int | None
    create: bool
    ephemeral: bool
    wait: Durability
    wait_s: float | None


def json_of(value: Any) -> bytes:
    """Return a value as a body in JSON. Raises TypeError, ValueError for values that are not in JSON, also for NaN,
    which Python would write."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"publish_json failed: {error} (expected a value that JSON has)") from None


Durability: TypeAlias = Literal["committed", "published"]


def is_committed(wait: Durability) -> bool:
    """Whether `wait` is "committed". Raises BadRequest for an unknown word."""
    if wait not in ("committed", "published"):
        raise BadRequest(f"invalid wait {wait!r} (expected committed or published)")
    return wait == "committed"


Item: TypeAlias = Outgoing | tuple[str, Body]  # of publish_many: a tuple is a plain message


def require_items(items: Sequence[Item]) -> None:
    """Check that items are pairs or Outgoing. Raises TypeError. The elements of tuples and lists are read only if an
    item has another type, as there are many items."""
    if not {tuple, list, Outgoing}.issuperset(map(type, items)):
        for item in items:
            if not isinstance(item, Outgoing):
                pair_of(item)


def outgoing(item: Item) -> Outgoing:
    return item if isinstance(item, Outgoing) else Outgoing(*item)


def pair_of(item: Any) -> tuple[str, Body]:
    """Return the stream and body of a plain message. Raises TypeError for other items, such as a text of two
    characters."""
    if isinstance(item, (tuple, list)) and len(item) == 2:
        return item  # type: ignore[return-value]
    raise TypeError(f"invalid message {item!r} (expected (stream, body) or Outgoing)")


def escaped(item: Item) -> Item:
    """Return an item in which the stream's name replaces the text to escape."""
    if isinstance(item, Outgoing):
        stream, headers = addressed(item.stream, item.headers)
        return attrs.evolve(item, stream=stream, headers=headers)
    text, body = pair_of(item)
    stream, headers = addressed(text, None)
    return Outgoing(stream, body, headers=headers) if headers else (stream, body)


def addressed(text: str, headers: Mapping[str, str] | None) -> tuple[str, Mapping[str, str] | None]:
    """Return the stream's name for a text, and the headers of its messages, which have the text if the name is
    shortened. Raises BadName where the text is not UTF-8 and the name is shortened."""
    name = stream_name(text)
    if not is_shortened(name) or name == text:
        return name, headers
    try:
        topic = text.decode() if isinstance(text, bytes) else text.encode().decode()
    except UnicodeError:
        raise BadName(f"{text[:20]!r} is not UTF-8 (expected that of more than {limits.NAME_BYTES} bytes)") from None
    return name, {**(headers or {}), TOPIC: topic}


def way_of(item: Item) -> str:
    """Return how to write an item: "long", "put" or "plain". An empty body is "put", as a write of zero bytes is not a
    message."""
    if isinstance(item, Outgoing):
        body = item.body
    else:
        try:
            _, body = item
        except (TypeError, ValueError):
            body = pair_of(item)[1]
    if is_long(body):
        return "long"
    return "put" if is_empty(body) or (isinstance(item, Outgoing) and item.metadata()) else "plain"


def plain_pair(item: Item) -> tuple[str, bytes]:
    stream, body = (item.stream, item.body) if isinstance(item, Outgoing) else item
    return stream, (body if type(body) is bytes else bytes_of(body))


T = TypeVar("T")

OPEN_STREAMS = 128  # streams of a group with files kept open, each a fid in the server
IN_PARTS = ("headers", "id", "key", "priority", "ttl")  # options of a body in parts
_BATCH = 1_024  # messages passed to the link at once: bounds the memory of an endless iterable


def _cannot(_stream: str, _body: object, _committed: bool) -> None:
    """Return None: without a ring nothing is published. See `RingGroup.publish_now`."""


# ------------------------------------------------------------ publishing


class Publisher:
    """The publisher of one group. Thread-safe."""

    def __init__(self, link: Link, path: str) -> None:
        self._link, self._path = link, path
        self._direct = link.direct(path)
        self.publish_now = _cannot if self._direct is None else self._direct.publish_now
        self._lock = threading.Lock()
        self._idle: OrderedDict[str | None, list[File]] = OrderedDict()  # by stream; None: `.put`
        self._units = StagedUploads(link, path)

    # ------------------------------------------------------------ open files

    def _acquire(self, name: str | None) -> File:
        """Return an open file of a stream, or of `.put` (None). Files of a lost connection are skipped: they send
        nothing, while an open by path connects again."""
        with self._lock:
            while idle := self._idle.get(name):
                file = idle.pop()
                if not idle:
                    del self._idle[name]
                if not file.is_lost:
                    return file
        if name is None:
            return self._link.open(f"{self._path}/.put", "r+")
        return self._link.open(f"{self._path}/{check_file_name(name)}", "w")

    def _return(self, name: str | None, file: File) -> None:
        spare: list[File] = []
        with self._lock:
            self._idle.setdefault(name, []).append(file)
            self._idle.move_to_end(name)
            if len(self._idle) > OPEN_STREAMS:
                spare = self._idle.popitem(last=False)[1]
        for old in spare:
            old.close()

    @contextmanager
    def _open_file(self, name: str | None) -> Iterator[File]:
        """Yield a file to write to; it is closed after an error."""
        file = self._acquire(name)
        try:
            yield file
        except BaseException as error:
            if isinstance(error, Disconnected):
                self.close_idle()
            file.close()
            raise
        self._return(name, file)

    def close_idle(self) -> None:
        """Close the files that are not in use."""
        with self._lock:
            idle, self._idle = self._idle, OrderedDict()
        for files in idle.values():
            for file in files:
                file.close()

    def close(self) -> None:
        """Close the files, and end the producer of large bodies."""
        self.close_idle()
        self._units.close()

    # ------------------------------------------------------------ one message

    def plain(self, stream: str, body: Body, create: bool, committed: bool) -> Receipt:
        """Write a message without options."""
        direct = self._direct
        if direct is None or is_long(body) or is_empty(body):
            return self._without_options(stream, body, create)
        data = body if type(body) is bytes else bytes_of(body)
        try:
            number = direct.publish(stream, data, committed)
        except NotFound:
            if not create:
                raise
            self.make(stream)
            number = direct.publish(stream, data, committed)
        if number is None:
            return self._without_options(stream, body, create)
        return Receipt(number, 0, None, False, direct.is_retaining(stream))

    def _without_options(self, stream: str, body: Body, create: bool) -> Receipt:
        if is_long(body):
            return self._publish_long(Outgoing(stream, body), create)
        data = head_of(stream) + (body if type(body) is bytes else bytes_of(body))
        return self._with_create(stream, create, lambda: self._put(data, stream, body))

    def ephemeral(self, message: Outgoing, create: bool, options: Sequence[str]) -> Receipt:
        """Put a message into the ring, and not into the log. Raises BadRequest where that is impossible. `options`: the
        names of other given options, which are refused."""
        if given := sorted([*message.metadata(), *options]):
            raise BadRequest(f"publish failed: ephemeral with {' and '.join(given)} (expected no other option)")
        direct, body = self._direct, bytes_of(message.body)
        if direct is None or not body:
            what = "an empty body" if direct is not None else "no shared memory"
            raise BadRequest(f"publish failed: ephemeral with {what} (expected a group with a ring, and a body)")
        if not self._with_create(message.stream, create, lambda: direct.publish_ephemeral(message.stream, body)):
            raise BadRequest("publish failed: ephemeral without a ring (expected 'deliver all', and a ring)")
        return Receipt(retained=False)

    def publish(self, message: Outgoing, create: bool, wait_s: float | None = None) -> Receipt:
        """Write a message by `.put`. Raises TimeoutError if there was no room for it in `wait_s` seconds (None: no
        limit)."""
        is_large = is_long(message.body)
        data = b"" if is_large else message.put(kept=True)
        try:
            if is_large:
                return self._publish_long(message, create, wait_s)
            return self._with_create(message.stream, create, lambda: self._ask(data, wait_s))
        except TimeoutError:
            raise TimeoutError(f"publish failed: no room in stream {message.stream!r} in {wait_s or 0:g} s") from None

    def _put(self, data: bytes, stream: str, body: Body) -> Receipt:
        """Write a message without options by `.put`; if the user has no rights there, to its stream's file."""
        try:
            return self._ask(data, None)
        except Denied:
            if is_empty(body):
                raise
            with self._open_file(stream) as file:
                file.write(bytes_of(body))
            return Receipt()

    def _ask(self, data: bytes, wait_s: float | None) -> Receipt:
        with self._open_file(None) as file:
            return Receipt.parse(file.ask(data, wait_s))

    def writer(self, message: Outgoing, create: bool, wait_s: float | None = None) -> BodyWriter:
        """Return a writer for a body of any size, with the options of a message."""

        def whole(body: bytes) -> None:
            self.publish(attrs.evolve(message, body=body), create, wait_s)

        stream = check_file_name(message.stream)
        make = (lambda: self.make(stream)) if create else None
        return BodyWriter(self._units, stream, message.metadata(), whole, make, wait_s)

    def _publish_long(self, message: Outgoing, create: bool, wait_s: float | None = None) -> Receipt:
        """Publish a body larger than a message. Raises TooLong if an option forbids that."""
        options = sorted(message.metadata().keys() - set(IN_PARTS))
        if options:
            raise TooLong(
                f"body of {len(message.body)} bytes with {' and '.join(options)} (expected at most "
                f"{limits.MESSAGE_BYTES}, or no options but {' '.join(IN_PARTS)})"
            )
        with self.writer(message, create, wait_s) as file:
            file.write(message.body)
        return Receipt()

    def _with_create(self, stream: str, create: bool, write: Callable[[], T]) -> T:
        """Return the result of `write`; if the stream is missing, or was removed under an open file, make it and write
        again."""
        try:
            return write()
        except NotFound:
            check_file_name(stream)
            if not create:
                raise
        self.make(stream)
        return write()

    def make(self, stream: str) -> None:
        """Make a stream, unless it exists; an existing one needs no permission."""
        path = f"{self._path}/{check_file_name(stream)}"
        try:
            self._link.create(path)
        except Exists:
            pass
        except Denied:
            if not self._link.look_up([path])()[0]:
                raise

    # ------------------------------------------------------------ many

    def publish_many(self, messages: Iterable[Item], create: bool, committed: bool) -> int:
        """Write messages in order, several under way at once. Returns their number."""
        count = 0
        wait: Callable[[], None] | None = None
        source = iter(messages)
        while batch := list(islice(source, _BATCH)):
            if self._direct is not None:
                done, wait = self._directly(self._direct, batch, create, count, wait, known=True)
                count += done
                if done == len(batch):
                    continue
                batch = batch[done:]
            require_items(batch)
            for kind, run in groupby(batch, way_of):
                alike = list(run)
                done = 0
                if kind == "long":
                    self._write_long([*map(outgoing, alike)], create, count)
                    done = len(alike)
                if kind == "plain" and self._direct is not None:
                    pairs = [*map(plain_pair, alike)]
                    done, wait = self._directly(self._direct, pairs, create, count, wait)
                if done < len(alike):
                    self._write([*map(outgoing, alike[done:])], create, count + done)
                count += len(alike)
        if wait is not None and committed:
            wait()
        return count

    def _write_long(self, messages: Sequence[Outgoing], create: bool, before: int) -> None:
        for number, message in enumerate(messages, before):
            try:
                self.publish(message, create)
            except MqfsError as error:
                error.add_note(f"publish_many failed at message {number}; those before it are published")
                raise

    def _directly(
        self,
        direct: RingGroup,
        messages: Sequence[Any],
        create: bool,
        before: int,
        wait: Callable[[], None] | None,
        known: bool = False,
    ) -> tuple[int, Callable[[], None] | None]:
        """Publish through the ring. Returns the number of messages, and a function that waits for the commit of all so
        far. `known`: only to streams that the ring knows."""
        first = 0
        try:
            try:
                done, later = direct.publish_many(messages, known=known)
            except NotFound as error:
                if not create or known:  # the group was removed
                    raise
                first = getattr(error, "published", 0)  # the messages before a removed stream's
                for stream in dict.fromkeys(stream for stream, _ in messages[first:]):
                    self.make(stream)
                done, later = direct.publish_many(messages[first:])
        except MqfsError as error:
            done = before + first + getattr(error, "published", 0)
            error.add_note(f"publish_many failed at message {done}; those before it are published")
            raise
        return first + done, later or wait

    def _write(self, batch: list[Outgoing], create: bool, before: int) -> None:
        files: dict[str | None, File] = {}
        ordered: list[tuple[File, bytes]] = []
        try:
            for message in batch:
                plain = way_of(message) == "plain"
                if message.stream not in files:
                    acquire = partial(self._acquire, message.stream)
                    files[message.stream] = self._with_create(message.stream, create, acquire)
                name = message.stream if plain else None
                if name not in files:
                    files[name] = self._acquire(name)
                ordered.append((files[name], bytes_of(message.body) if plain else message.put()))
            results = self._link.write_all(ordered)
        except BaseException as error:
            if isinstance(error, Disconnected):
                self.close_idle()
            for file in files.values():
                file.close()
            raise
        self._check(results, before, files)

    def _check(self, results: list[MqfsError | None], before: int, files: dict[str | None, File]) -> None:
        failed = next((n for n, error in enumerate(results) if error is not None), None)
        if failed is None:
            for name, file in files.items():
                self._return(name, file)
            return
        for file in files.values():
            file.close()
        error = results[failed]
        assert error is not None
        stored = results.count(None)
        error.add_note(
            f"publish_many failed at message {before + failed}; {stored} of its batch of {len(results)} are published"
        )
        raise error
