"""A group: the public calls. Each is a few operations on the group's files (mqfs(4)), or one line over a part."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Unpack

from mqfs.client.callbacks import Handler, OnError, Registration, Worker
from mqfs.client.delivery import Claim, Claims, consumer_opener, opener
from mqfs.client.dispatching import Registry
from mqfs.client.large import BodyWriter
from mqfs.client.message import Kept, topic_of
from mqfs.client.origin import Origin
from mqfs.client.outgoing import Durability, Item, Outgoing, PublishOptions, addressed, escaped, is_committed, json_of
from mqfs.client.publisher import Publisher
from mqfs.client.subscription import CursorSubscription, names_of, require_patterns
from mqfs.client.taking import Streams
from mqfs.client.types import Body, Duration, File, Filters, Link, Moment, Patterns, Subscription, read_whole
from mqfs.errors import BadRequest
from mqfs.syntax.duration import format_moment, parse_duration
from mqfs.syntax.escape import escape, stream_name
from mqfs.syntax.names import check_file_name
from mqfs.syntax.patterns import Words, has_wildcard
from mqfs.syntax.quoting import command_lines, quote_word, split

_NOT_SETTINGS = ("bind", "consumer")
RENEWALS = 3  # of a lease, in its time


class Group:
    """A group, from `Client.group`. Thread-safe."""

    def __init__(self, link: Link, path: str, reconnect: bool | float, escapes: bool = False) -> None:
        """`escapes`: what its calls take for names of streams are any texts."""
        self.path = path
        self._link, self._reconnect, self._escapes = link, reconnect, escapes
        self._publisher = Publisher(link, path)
        self._origin = Origin(link, path, reconnect)
        self._registry = Registry(self._origin)
        self.filters = self._registry.shared.filters  # of handlers: (message, handlers) -> those called, None, LATER

    def __repr__(self) -> str:
        return f"<mqfs group {self.path or '/'} at {self._link.label}>"

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
        single: bool = False,
        create: bool = True,
        sequence: bool = False,
        kept: bool = False,
        ephemeral: bool = False,
        wait: Durability = "committed",
    ) -> int | Kept | None:
        """Publish a message. Returns when it is as durable as the group's `sync` demands; with `wait="published"`, in
        shared memory, when only the end of the machine can lose it.

        `create`: make the stream if it is missing. `sequence`: return the message's sequence (with `delay` or `at`:
        that of the delayed message); `kept`: that with its time and its end. Neither costs a round trip. `ephemeral`:
        for subscribers in shared memory only, and never in the log; it takes no other option. After Disconnected
        the outcome is unknown; with an `id` the call may be repeated.
        """
        committed = is_committed(wait)
        if self._escapes:
            stream, headers = addressed(stream, headers)
        if ttl is delay is at is priority is None and not headers and not id and not (single or kept or ephemeral):
            return self._publisher.plain(stream, body, create, sequence, committed)
        message = Outgoing(stream, body, ttl, delay, at, priority, headers, id, single)
        if ephemeral:
            self._publisher.ephemeral(message, create, sequence or kept)
            return None
        if kept:
            return self._publisher.kept(message, create)
        return self._publisher.publish(message, create, sequence)

    def publish_json(self, /, stream: str, value: Any, **options: Unpack[PublishOptions]) -> int | Kept | None:
        """Publish a value as JSON, which `Message.json` gives back. `options`: see `publish`. Raises TypeError,
        ValueError for what JSON has not."""
        return self.publish(stream, json_of(value), **options)

    def writer(
        self,
        stream: str,
        *,
        ttl: Duration | None = None,
        priority: int | None = None,
        headers: Mapping[str, str] | None = None,
        id: str = "",
        create: bool = True,
    ) -> BodyWriter:
        """A file to write a body of any size to: one message, published when the file is closed, whole or not at all.
        In a `with` block an exception drops it. `Message.open` reads such a body without holding it in memory.

        More than 1,000,000 bytes are several messages in the log, one atomic batch, with the header `part`; mqfs(4),
        "Bodies in parts".
        """
        if self._escapes:
            stream, headers = addressed(stream, headers)
        message = Outgoing(stream, b"", ttl, priority=priority, headers=headers, id=id)
        return self._publisher.writer(message, create)

    def publish_many(self, messages: Iterable[Item], *, create: bool = True, wait: Durability = "committed") -> int:
        """Publish many messages in order, without waiting for each; how many. `wait`: see `publish`.

        The error of one is raised; later ones already under way (at most 1,024) are published.
        """
        if self._escapes:
            messages = map(escaped, messages)
        return self._publisher.publish_many(messages, create, is_committed(wait))

    def _name(self, stream: str) -> str:
        return stream_name(stream) if self._escapes else stream

    def _names(self, pattern: Patterns) -> Patterns:
        """The names of streams or patterns of them, escaped except for separators and wildcards."""
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
        """Every message of the matching streams and views from now on, in order: an iterator that waits. Other readers
        get them, too.

        `existing`: from the oldest retained message on. `program`: a routing program that the server runs, instead of a
        pattern: `prefix:log. (payload_contains("error"))`. `filters`: functions of a message that must all be true.
        `reconnect`: see `mqfs.connect`.
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
        """The retained messages, oldest first, to the present end: an iterator that ends.

        `first`, `last`: sequences, included; a negative `first` counts messages from the end. `since`: UNIX seconds or
        a datetime, or how long ago: "10m" or a timedelta. `program`: see `subscribe`.
        """
        if first is not None and since is not None:
            raise BadRequest("history failed: first and since given (expected one)")
        if first is None:
            self._origin.warn_of_loss("history")
        start = "first" if first is None else str(first)
        if since is not None:
            start = format_moment(since)
        until = "end" if last is None else str(last)
        return CursorSubscription(
            self._link, self.path, self._names(pattern), start=start, until=until, program=program, filters=filters,
            is_past=True,
        )  # fmt: skip

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
        """Call `handler(message)` for each message, on a thread of the library: in order, or up to `concurrency` at
        once. A handler is registered once for a pattern, and called once for a message that several of its patterns
        match; `dedup=False`: as often as it is registered. `filters`: functions of a message that must all be true; a
        list may be changed meanwhile. `Group.filters` has those that see the handlers, too.

        `single`: call it with the messages that are for one receiver, as `take` gives them, instead, also of streams to
        come; a return acknowledges, an exception is a nack.

        `on_error(error, message or None)` gets the handler's exceptions and reports of lost messages, which are else
        logged. The registration stays in either case.
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
        return Streams(names, words, names_now, partial(self._take, renew=True))

    def once(
        self, pattern: Patterns, handler: Handler, *, existing: bool = False, filters: Filters = ()
    ) -> Registration:
        """As `on`, for one message."""
        return self.on(pattern, handler, existing=existing, filters=filters, once=True)

    def unsubscribe(self, pattern: Patterns | None = None, handler: Handler | None = None) -> int:
        """End registrations of `on`, by pattern and handler (None: any); how many."""
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
        reconnect: bool | float | None = None,
    ) -> Claims:
        """A handle on a consumer: an iterator of claims. Each message goes to one handle.

        `over`: the stream or view of a new consumer; `pattern`: selects among its messages, for this handle. `private`,
        `transient`: as in ctl. `renew`: renew the lease while a `with claim:` block runs, so that only the end of the
        process or of the connection ends it. For concurrency open several handles, a thread each.
        """
        over = over and self._name(over)
        late = partial(self._origin.warn_of_loss, f"new consumer {consumer!r}")
        make = consumer_opener(self._link, self.path, check_file_name(consumer), over, private, transient, late)
        return self._claims(consumer, make if create else None, self._names(pattern), renew, reconnect)

    def take(
        self, stream: str, *, create: bool = False, renew: bool = False, reconnect: bool | float | None = None
    ) -> Claims:
        """A handle on a stream itself: an iterator of claims. Each message goes to one receiver, be it this call's or a
        reader of the stream's file.

        With `deliver one` these are all messages, until acknowledged under `ack read` and `ack next` alike; with
        `deliver all`, those published with `single`. Needs r and w on the stream. `create`: make it, or else raise
        NotFound. `renew`, `reconnect`: see `consume`.
        """
        return self._take(self._name(stream), create, renew, reconnect)

    def _take(
        self, stream: str, create: bool = False, renew: bool = False, reconnect: bool | float | None = None
    ) -> Claims:
        name = f".{check_file_name(stream)}"
        make = opener(self._link, f"{self.path}/.consumers/{name}", f"{self.path}/{stream}") if create else None
        return self._claims(name, make, (), renew, reconnect)

    def _claims(
        self,
        name: str,
        make: Callable[[], File] | None,
        pattern: Patterns,
        renew: bool,
        reconnect: bool | float | None,
    ) -> Claims:
        """A handle on a file of `.consumers`."""
        renew_s = self._lease_s() / RENEWALS if renew else 0.0
        again = self._reconnect if reconnect is None else reconnect
        path = f"{self.path}/.consumers/{name}"
        return Claims(self._link, path, make, patterns=pattern, renew_s=renew_s, reconnect=again)

    def work(
        self,
        consumer: str,
        handler: Callable[[Claim], object],
        *,
        concurrency: int = 1,
        over: str = "",
        renew: bool = False,
    ) -> Worker:
        """Call `handler(claim)` for each message, on `concurrency` threads with a handle each. A return acknowledges;
        an exception is logged, and a nack. `Worker.stop` ends it."""
        if concurrency < 1:
            raise BadRequest(f"work failed: concurrency {concurrency} (expected 1 or more)")
        return Worker([self.consume(consumer, over=over, renew=renew) for _ in range(concurrency)], handler)

    def _lease_s(self) -> float:
        return parse_duration(self.settings()["lease"]) / 1e9

    # ------------------------------------------------------------ queries

    def streams(self) -> list[str]:
        """The names of the streams."""
        names = self._link.names(f"{self.path}/.kept")
        return [*map(topic_of, names)] if self._escapes else names

    def groups(self) -> list[str]:
        """The names of the groups inside."""
        views = {split(row)[1] for row in self._ctl_lines() if row.startswith("bind ")}
        others = {*self._link.names(f"{self.path}/.kept"), *views, "ctl", "order"}
        return [n for n in self._link.names(self.path) if n not in others and not n.startswith(".")]

    def consumers(self) -> list[str]:
        return self._link.names(f"{self.path}/.consumers")

    def stats(self) -> dict[str, Any]:
        """The group's counters, `.stats`."""
        counters: dict[str, Any] = json.loads(read_whole(self._link, f"{self.path}/.stats"))
        return counters

    def settings(self) -> dict[str, str]:
        """The settings of ctl, defaults included."""
        rows = (row.partition(" ") for row in self._ctl_lines())
        return {key: value for key, _, value in rows if key not in _NOT_SETTINGS}

    def _ctl_lines(self) -> list[str]:
        return read_whole(self._link, f"{self.path}/ctl").decode().splitlines()

    # ------------------------------------------------------------ configuration

    def ctl(self, *lines: str) -> None:
        """Write lines to the group's ctl: all take effect, or none."""
        self._publisher.close_idle()
        file = self._link.open(f"{self.path}/ctl", "w")
        try:
            file.write(command_lines(*lines))
        finally:
            file.close()

    def bind(self, view: str, *patterns: str) -> None:
        """Bind a view to patterns."""
        if not patterns:
            raise BadRequest(f"bind failed: no pattern of {view!r} (expected one or more)")
        self.ctl(*(f"bind {quote_word(view)} {quote_word(pattern)}" for pattern in patterns))

    def unbind(self, view: str, pattern: str = "") -> None:
        """Remove a view, or one of its patterns."""
        self.ctl(f"unbind {quote_word(view)} {quote_word(pattern)}" if pattern else f"unbind {quote_word(view)}")

    def redrive(self, stream: str = "", count: int | None = None) -> None:
        """Republish dead letters to their streams, oldest first (`stream`: of that one, `count`: at most that many)."""
        if count is not None and not stream:
            raise BadRequest("redrive failed: count without stream (expected both)")
        words = [quote_word(self._name(stream))] if stream else []
        self.ctl(" ".join(["redrive", *words, *([] if count is None else [str(count)])]))

    def purge(self, stream: str = "") -> None:
        """Drop the retained messages of a stream, or of all."""
        self.ctl(f"clear {quote_word(self._name(stream))}" if stream else "clear")

    def create(self, *streams: str) -> None:
        """Make streams, unless they exist."""
        for stream in streams:
            self._publisher.make(self._name(stream))

    def remove(self, stream: str) -> None:
        """Remove a stream with its messages, or a view."""
        self._publisher.close_idle()
        self._link.remove(f"{self.path}/{check_file_name(self._name(stream))}")

    def remove_consumer(self, consumer: str) -> None:
        self._link.remove(f"{self.path}/.consumers/{check_file_name(consumer)}")

    def close(self) -> None:
        """End the handlers; `Client.close` calls it."""
        self._registry.close()
        self._publisher.close()
