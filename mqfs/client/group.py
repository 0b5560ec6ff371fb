"""Groups: the public calls. Each is a few operations on the group's files (mqfs(4)), or one call of another module."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from mqfs import limits
from mqfs.client.administration import Services
from mqfs.client.callbacks import Handler, OnError, Registration, Streams, Worker
from mqfs.client.delivery import Claim, Claims, consumer_opener, opener
from mqfs.client.dispatching import Registry
from mqfs.client.info import Consumer, seconds
from mqfs.client.large import BodyWriter, place_of
from mqfs.client.message import Message, Receipt
from mqfs.client.origin import Origin
from mqfs.client.prefetch import Lease
from mqfs.client.publisher import (
    Durability,
    Item,
    Outgoing,
    Publisher,
    PublishOptions,
    addressed,
    escaped,
    is_committed,
    json_of,
)
from mqfs.client.subscription import CursorSubscription, names_of, read_one, require_patterns
from mqfs.client.types import Body, Duration, File, Filters, Link, Moment, Patterns, Subscription
from mqfs.errors import BadRequest, NotFound
from mqfs.syntax.duration import format_moment
from mqfs.syntax.lines import split
from mqfs.syntax.names import check_file_name, escape, stream_name
from mqfs.syntax.patterns import Words, has_wildcard

if TYPE_CHECKING:
    from pyarrow import RecordBatchReader

S = TypeVar("S", bound=CursorSubscription)


class Group(Services):
    """A group of streams, from `Client.group`. Thread-safe.

    Attributes:
        path: The group's path from the root; empty: the root.
        filters: Functions `(message, handlers)` for all handlers of `on`: they return the handlers to be called, None
            for all, or `mqfs.LATER` to be called again later. The list may be changed.
    """

    def __init__(self, link: Link, path: str, reconnect: bool | float, escapes: bool = False) -> None:
        """`escapes`: its calls accept any text as the name of a stream."""
        self.path = path
        self._link, self._reconnect, self._escapes = link, reconnect, escapes
        self._publisher = Publisher(link, path)
        self._publish_now = self._publisher.publish_now
        self._origin = Origin(link, path, reconnect)
        self._registry = Registry(self._origin)
        self._lease = Lease(lambda: seconds(self.settings().lease))
        self.filters = self._registry.shared.filters

    def __repr__(self) -> str:
        return f"<mqfs group {self.path or '/'!r} at {self._link.label}>"

    # ------------------------------------------------------------ publishing

    def publish(
        self,
        stream: str,
        body: Body,
        *,
        ttl: Duration | None = None,
        delay: Duration | None = None,
        at: float | datetime | None = None,
        priority: int | None = None,
        headers: Mapping[str, str] | None = None,
        id: str = "",
        key: str = "",
        single: bool = False,
        expect: int | None = None,
        create: bool = True,
        ephemeral: bool = False,
        wait: Durability = "committed",
        wait_s: float | None = None,
    ) -> Receipt:
        """Publish a message.

        Args:
            stream: The stream to publish to.
            body: The message's body, of any size, also empty; text as UTF-8.
            ttl: How long the message lives: seconds, "30s" or a timedelta. None: the group's `ttl`.
            delay: How long it is delayed: seconds, "30s" or a timedelta. None: not at all.
            at: When it is delivered: UNIX seconds or a datetime. None: at once.
            priority: 0 to 9; higher ones are claimed first. None: 5.
            headers: Texts by name, for its readers. None: none.
            id: A message whose `id` was published within the group's `dedup` is not published again. Empty: none.
            key: Messages with the same key belong together; at most 255 bytes. Empty: none.
            single: Whether it is for one receiver, also in a group with `deliver all`.
            expect: The sequence of the newest message that the stream retains; 0: none. If the newest is another one,
                the message is not published. None: any.
            create: Whether a missing stream is made.
            ephemeral: Whether it is for subscribers in shared memory only, and never in the log. With no other option
                but `create`.
            wait: "committed": return when it is as durable as the group's `sync` demands. "published": in shared
                memory, return when only the end of the machine can lose it.
            wait_s: With `full block`, the most seconds to wait for room. None: without limit. The message is then
                published through the files, not through shared memory.

        Returns:
            The receipt. From shared memory it has only the sequence and `retained`.

        Raises:
            NotFound: The stream is missing, with `create=False`.
            Conflict: The newest message is not the one of `expect`; `error.newest` is.
            StreamFull: The stream is full, with `full reject`.
            TooLong: The body is larger than a message, and an option forbids that.
            TimeoutError: There was no room in `wait_s` seconds; nothing was published.
            Disconnected: The outcome is unknown; with an `id` the call may be repeated.
            BadName: The name is not one of a stream.
            BadRequest: Options exclude each other.
            Denied: The user has no w on the stream.
        """
        committed = wait != "published" and is_committed(wait)
        if self._escapes:
            stream, headers = addressed(stream, headers)
        has_options = not (ttl is delay is at is priority is expect is wait_s is None) or headers or id or key or single
        if not (has_options or ephemeral):
            return self._publish_now(stream, body, committed) or self._publisher.plain(stream, body, create, committed)
        message = Outgoing(stream, body, ttl, delay, at, priority, headers, id, single, key, expect)
        if ephemeral:
            return self._publisher.ephemeral(message, create, [] if wait_s is None else ["wait_s"])
        return self._publisher.publish(message, create, wait_s)

    def publish_json(self, /, stream: str, value: Any, **options: Unpack[PublishOptions]) -> Receipt:
        """Publish a value as JSON, which `Message.json` returns.

        Args:
            stream: The stream to publish to.
            value: A value of JSON: NaN, sets and bytes are refused.
            **options: The options of `publish`.

        Returns:
            See `publish`.

        Raises:
            TypeError: JSON has no values of this type.
            ValueError: JSON has no such number.
        """
        return self.publish(stream, json_of(value), **options)

    def writer(
        self,
        stream: str,
        *,
        ttl: Duration | None = None,
        priority: int | None = None,
        headers: Mapping[str, str] | None = None,
        id: str = "",
        key: str = "",
        create: bool = True,
    ) -> BodyWriter:
        """Open a file to write a body of any size to: one message, published when the file is closed, or not at all.

        In a `with` block an exception drops the body. A body of more than 1,000,000 bytes is several messages in the
        log, one atomic batch; see mqfs(4), "Bodies in parts". `Message.open` reads it without holding it in memory.

        Args:
            stream: The stream to publish to.
            ttl: How long the message lives: seconds, "30s" or a timedelta. None: the group's `ttl`.
            priority: 0 to 9; higher ones are claimed first. None: 5.
            headers: Texts by name. None: none.
            id: See `publish`. Empty: none.
            key: See `publish`. Empty: none.
            create: Whether a missing stream is made.

        Returns:
            The file.

        Raises:
            BadName: The name is not one of a stream.
            BadRequest: A header is reserved for the writer.
        """
        if self._escapes:
            stream, headers = addressed(stream, headers)
        message = Outgoing(stream, b"", ttl, priority=priority, headers=headers, id=id, key=key)
        return self._publisher.writer(message, create)

    def publish_many(self, messages: Iterable[Item], *, create: bool = True, wait: Durability = "committed") -> int:
        """Publish many messages in order, without waiting for each.

        Args:
            messages: Pairs `(stream, body)`, or `mqfs.Outgoing` for messages with options.
            create: Whether missing streams are made.
            wait: See `publish`.

        Returns:
            The number of messages.

        Raises:
            MqfsError: The error of the first message that failed. Later messages already under way, at most 1,024,
                are published.
            TypeError: An item is neither a pair nor an Outgoing.
        """
        if self._escapes:
            messages = map(escaped, messages)
        return self._publisher.publish_many(messages, create, is_committed(wait))

    def _names(self, pattern: Patterns) -> Patterns:
        """Return names and patterns of streams; with `escapes`, escaped except for separators and wildcards."""
        names = require_patterns(pattern)
        return [escape(n) if has_wildcard(n) else stream_name(n) for n in names] if self._escapes else names

    # ------------------------------------------------------------ subscribing

    def subscribe(
        self,
        pattern: Patterns = "#",
        *,
        existing: bool = False,
        program: str = "",
        filters: Filters = (),
        reconnect: bool | float | None = None,
    ) -> Subscription:
        """Read every message of the matching streams and views from now on, in order. Other readers get them, too.

        Args:
            pattern: A stream, a view or a pattern, or a list of them: `*` is one word, `#` any number.
            existing: Whether to begin at the oldest retained message.
            program: A routing program that the server runs, instead of a pattern:
                `prefix:log. (payload_contains("error"))`. Empty: none.
            filters: Functions of a message that must all return true; a list may be changed meanwhile.
            reconnect: Whether to wait for a server after a disconnect; a number: at most that many seconds. None: as
                given to `mqfs.connect`.

        Returns:
            An iterator that waits for messages.

        Raises:
            NotFound: A view or the group is missing.
            Denied: The user has no r on a named stream.
            BadRequest: Both a pattern and a program, or no pattern.
        """
        pattern = self._names(pattern)
        start = "first" if existing else "end"
        return self._origin.subscribe(pattern, start, program=program, filters=filters, reconnect=reconnect)

    def history(
        self,
        first: int | None = None,
        last: int | None = None,
        *,
        since: Moment | None = None,
        pattern: Patterns = "#",
        program: str = "",
        filters: Filters = (),
    ) -> Subscription:
        """Read the retained messages, oldest first, to the present end.

        Args:
            first: The first sequence; a negative one counts messages from the end. None: the oldest.
            last: The last sequence. None: the present end.
            since: The earliest time: UNIX seconds or a datetime, or how long ago: "10m" or a timedelta. Instead of
                `first`.
            pattern: See `subscribe`.
            program: See `subscribe`.
            filters: See `subscribe`.

        Returns:
            An iterator that ends.

        Raises:
            BadRequest: Both `first` and `since`.
            TypeError: A sequence that is not an integer.
        """
        return self._past(CursorSubscription, first, last, since, pattern, program, filters)

    def to_arrow(
        self,
        first: int | None = None,
        last: int | None = None,
        *,
        since: Moment | None = None,
        pattern: Patterns = "#",
        program: str = "",
    ) -> RecordBatchReader:
        """Read the retained messages as columns, for pandas, polars, DuckDB and Arrow. It needs the package pyarrow.

        The columns: `sequence`, `stream`, `time` (microseconds, UTC), `body` and `headers` (a map of texts).

        Args:
            first: See `history`.
            last: See `history`.
            since: See `history`.
            pattern: See `subscribe`.
            program: See `subscribe`.

        Returns:
            A `pyarrow.RecordBatchReader`: `read_all()` is a table, `read_pandas()` a frame, and iterating yields
            batches of some thousand messages. It reads while it is used; an error of `Subscription.get` ends it. Its
            cursor is closed at the end, or with the last reference to the reader.

        Raises:
            BadRequest: Both `first` and `since`.
            TypeError: A sequence that is not an integer.
            ImportError: pyarrow is not installed: install the extra `arrow`.
        """
        from mqfs.client import arrow

        return arrow.reader_of(self._past(arrow.ColumnSubscription, first, last, since, pattern, program))

    def _past(
        self,
        kind: type[S],
        first: int | None,
        last: int | None,
        since: Moment | None,
        pattern: Patterns,
        program: str,
        filters: Filters = (),
    ) -> S:
        if first is not None and since is not None:
            raise BadRequest("history failed: first and since given (expected one)")
        if first is None:
            self._origin.warn_of_loss("history")
        start = "first" if first is None else str(operator.index(first))
        if since is not None:
            start = format_moment(since)
        until = "end" if last is None else str(operator.index(last))
        return kind(
            self._link, self.path, self._names(pattern), start=start, until=until, program=program, filters=filters,
            is_past=True,
        )  # fmt: skip

    def get(self, sequence: int) -> Message:
        """Read one retained message.

        Args:
            sequence: The message's sequence; of a body in parts the first part's.

        Returns:
            The message.

        Raises:
            NotFound: No retained message has that sequence, or the user has no r on its stream.
            BadRequest: The sequence is not positive.
        """
        if sequence < 1:
            raise BadRequest(f"get failed: sequence {sequence} (expected 1 or more)")
        message = read_one(self._link, self.path, sequence)
        if message is None or message.sequence != sequence:
            raise NotFound(f"no message {sequence} in group {self.path or '/'!r}")
        number, total = place_of(message)
        if number == 1 and total > 1:
            return read_one(self._link, self.path, sequence, sequence + total - 1) or message
        return message

    def on(
        self,
        pattern: Patterns,
        handler: Handler,
        *,
        existing: bool = False,
        filters: Filters = (),
        concurrency: int = 1,
        once: bool = False,
        dedup: bool = True,
        single: bool = False,
        on_error: OnError | None = None,
    ) -> Registration:
        """Call `handler(message)` for each message, on a thread of the library.

        A handler is registered once for a pattern, and called once for a message that several of its patterns match. It
        stays registered when it raises.

        Args:
            pattern: See `subscribe`.
            handler: The function to call.
            existing: See `subscribe`.
            filters: See `subscribe`. Functions that also see the handlers belong in `Group.filters`.
            concurrency: The most calls at once; with more than one, messages may overtake each other.
            once: Whether the first message ends the registration.
            dedup: Whether it is called once for a message of several of its patterns; False: for each registration.
            single: Whether it is called with messages for one receiver, as `take` claims them, also of streams made
                later: a return acknowledges, an exception is a nack.
            on_error: Called with `(error, message or None)` for the handler's exceptions and for lost messages. None:
                they are logged.

        Returns:
            The registration; the same one for the same handler and pattern.

        Raises:
            BadRequest: The handler is registered with other options; `concurrency` is less than 1; `single` with
                filters or over a view.
            OverLimit: `single` would need more than 1,024 threads.
        """
        names = names_of(self._names(pattern))
        if concurrency < 1:
            raise BadRequest(f"on failed: concurrency {concurrency} (expected 1 or more)")
        take = None
        if single:
            take = self._single(names, filters)
        else:
            self._origin.warn_of_sharing()
        return self._registry.add(
            names, handler, existing=existing, filters=filters, concurrency=concurrency, once=once, dedup=dedup,
            single=take, on_error=on_error,
        )  # fmt: skip

    def _single(self, names: Sequence[str], filters: Filters) -> Streams:
        if filters:
            raise BadRequest(f"on failed: single with filters {filters} (expected none)")
        rows = [split(row) for row in self._ctl_lines() if row.startswith(("bind ", "words "))]
        if views := sorted({row[1] for row in rows if row[0] == "bind"} & {*names}):
            raise BadRequest(f"on failed: single over the view {views[0]!r} (expected streams, or a consumer over it)")
        words = Words(*next(row[1:] for row in rows if row[0] == "words"))
        names_now = partial(self._link.names, f"{self.path}/.kept")
        return Streams(names, words, names_now, partial(self._take, create=False, renew=True))

    def once(
        self, pattern: Patterns, handler: Handler, *, existing: bool = False, filters: Filters = ()
    ) -> Registration:
        """Call `handler(message)` for one message.

        Args:
            pattern: See `subscribe`.
            handler: The function to call.
            existing: See `subscribe`.
            filters: See `subscribe`.

        Returns:
            The registration, which ends with the first message.

        Raises:
            BadRequest: The handler is registered with other options.
        """
        return self.on(pattern, handler, existing=existing, filters=filters, once=True)

    def unsubscribe(self, pattern: Patterns | None = None, handler: Handler | None = None) -> int:
        """End registrations of `on`, and wait for the calls under way.

        Args:
            pattern: As given to `on`. None: any.
            handler: As given to `on`. None: any.

        Returns:
            The number of registrations that were ended.
        """
        return self._registry.end(None if pattern is None else names_of(self._names(pattern)), handler)

    # ------------------------------------------------------------ consuming

    def consume(
        self,
        consumer: str,
        *,
        over: str = "",
        pattern: Patterns = "#",
        private: bool = False,
        transient: bool = False,
        create: bool = True,
        renew: bool = False,
        prefetch: int = 1,
        reconnect: bool | float | None = None,
    ) -> Claims:
        """Open a handle on a consumer, a named and durable position. Each message goes to one handle.

        For concurrency open several handles, one a thread.

        Args:
            consumer: The consumer's name.
            over: The stream or view of a new consumer; an existing one keeps its options. Empty: the whole group.
            pattern: Selects among the consumer's messages, for this handle.
            private: Whether only one handle at a time may be open.
            transient: Whether the consumer is removed with its last handle.
            create: Whether a missing consumer is made. If it is made after the first messages of a group with
                `replay off`, it does not have those, and a warning is logged.
            renew: Whether the lease is renewed while a `with claim:` block runs, so that only the end of the process or
                of the connection ends it.
            prefetch: The most messages claimed at once. With more than 1, the acknowledgements of `with claim:` are
                written together, within 10 ms. For short work: other workers do not get the prefetched messages. These
                are released after 15 s or half the lease, whichever is first; if the process ends they are redelivered,
                and count as failed deliveries.
            reconnect: See `subscribe`.

        Returns:
            An iterator of claims.

        Raises:
            NotFound: The consumer is missing, with `create=False`.
            Exists: It is over another stream or view than `over`.
            Busy: It is private, and open.
            Denied: The user may not use it.
            BadRequest: `prefetch` is out of range.
        """
        over = over and self._name(over)
        late = partial(self._origin.warn_of_loss, f"new consumer {consumer!r}")
        make = consumer_opener(self._link, self.path, check_file_name(consumer), over, private, transient, late)
        return self._claims(consumer, make if create else None, self._names(pattern), renew, reconnect, prefetch)

    def take(
        self,
        stream: str,
        *,
        create: bool = True,
        renew: bool = False,
        prefetch: int = 1,
        reconnect: bool | float | None = None,
    ) -> Claims:
        """Open a handle on a stream itself. Each message goes to one receiver: a caller or a reader of its file.

        With `deliver one` all messages are claimed, each until it is acknowledged, under `ack read` and `ack next`
        alike; with `deliver all`, only those published with `single`.

        Args:
            stream: The stream.
            create: Whether a missing stream is made.
            renew: See `consume`.
            prefetch: See `consume`.
            reconnect: See `subscribe`.

        Returns:
            An iterator of claims.

        Raises:
            NotFound: The stream is missing, with `create=False`.
            Denied: The user has no r or no w on it.
            BadRequest: `prefetch` is out of range.
        """
        return self._take(self._name(stream), create, renew, reconnect, prefetch)

    def _take(
        self,
        stream: str,
        create: bool,
        renew: bool = False,
        reconnect: bool | float | None = None,
        prefetch: int = 1,
    ) -> Claims:
        name = f".{check_file_name(stream)}"
        make = opener(self._link, f"{self.path}/.consumers/{name}", f"{self.path}/{stream}") if create else None
        return self._claims(name, make, (), renew, reconnect, prefetch)

    def _claims(
        self,
        name: str,
        make: Callable[[], File] | None,
        pattern: Patterns,
        renew: bool,
        reconnect: bool | float | None,
        prefetch: int = 1,
    ) -> Claims:
        """Open a handle on a file of `.consumers`."""
        if not 1 <= prefetch <= limits.PREFETCH:
            raise BadRequest(f"prefetch {prefetch}: out of range (expected 1 to {limits.PREFETCH})")
        if renew or prefetch > 1:
            self._lease.read()
        again = self._reconnect if reconnect is None else reconnect
        path = f"{self.path}/.consumers/{name}"
        return Claims(
            self._link, path, make, patterns=pattern, lease=self._lease, renew=renew, reconnect=again,
            prefetch=prefetch,
        )  # fmt: skip

    def work(
        self,
        consumer: str,
        handler: Callable[[Claim], object],
        *,
        concurrency: int = 1,
        over: str = "",
        renew: bool = False,
        prefetch: int = 1,
        on_error: OnError | None = None,
    ) -> Worker:
        """Call `handler(claim)` for each message. A return acknowledges, an exception is a nack.

        Args:
            consumer: The consumer's name; it is made where it is missing.
            handler: The function to call.
            concurrency: The number of threads, each with a handle.
            over: See `consume`.
            renew: See `consume`.
            prefetch: See `consume`; for each thread.
            on_error: Called with `(error, message or None)` for the handler's exceptions, for a refusal that is retried
                (a full disk, for example), and where a thread ends by an error. None: they are logged.

        Returns:
            The worker, until `Worker.stop`.

        Raises:
            BadRequest: `concurrency` is less than 1.
            MqfsError: See `consume`.
        """
        if concurrency < 1:
            raise BadRequest(f"work failed: concurrency {concurrency} (expected 1 or more)")
        handles = [self.consume(consumer, over=over, renew=renew, prefetch=prefetch) for _ in range(concurrency)]
        return Worker(handles, handler, on_error)

    def consumer(self, name: str) -> Consumer:
        """Return a consumer to look at, and to move.

        Args:
            name: The consumer's name. It need not exist yet.

        Returns:
            The consumer.

        Raises:
            BadName: The name is not one of a consumer.
        """
        return Consumer(self._link, self.path, check_file_name(name))

    def close(self) -> None:
        """End the handlers, and close the files. `Client.close` calls it."""
        self._registry.close()
        self._publisher.close()
