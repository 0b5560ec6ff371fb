"""A group, as programs use it.

Owns the public calls; each is some opens, reads and writes of the group's files, mqfs(4), and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any, Literal, TypeAlias

from mqfs.client.callbacks import Handler, Joined, OnError, Registration, Registry
from mqfs.client.delivery import Claim, Claims, consumer_opener, opener
from mqfs.client.large import BodyWriter
from mqfs.client.publisher import Outgoing, Publisher
from mqfs.client.subscription import Filters, Patterns, Subscription, names_of
from mqfs.client.types import Body, File, Link, read_whole
from mqfs.client.words import Duration, Moment, commands, file_name, moment, quote
from mqfs.client.workers import Worker
from mqfs.errors import BadRequest, Denied, Exists, NotFound
from mqfs.syntax.quoting import split

Kept: TypeAlias = Literal["committed", "published"]

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
_NOT_SETTINGS = ("bind", "consumer")
RENEWALS = 3  # of a lease, in its time


def _committed(wait: Kept) -> bool:
    if wait not in ("committed", "published"):
        raise BadRequest(f"wait {wait!r}; committed or published is right")
    return wait == "committed"


class Group:
    """One group; `Client.group` gives it. Any number of threads may use it."""

    def __init__(self, link: Link, path: str, reconnect: bool | float) -> None:
        self.path = path
        self._link, self._reconnect = link, reconnect
        self._publisher = Publisher(link, path)
        self._registry = Registry()

    def __repr__(self) -> str:
        return f"<mqfs group {self.path or '/'} at {self._link.where}>"

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
        wait: Kept = "committed",
    ) -> int | None:
        """Write one message; when this returns it is kept as the group's `sync` promises (`wait="published"`: in shared
        memory it may yet be on its way there, and only the end of the machine can lose it).

        `create`: make the stream if it is missing. `sequence`: return the message's (of one with `delay` or `at`: that
        under which it is held). Disconnected leaves open whether it was written; with an `id` it may be repeated.
        """
        committed = _committed(wait)
        if ttl is delay is at is priority is None and not headers and not id and not single:
            return self._publisher.plain(stream, body, create, sequence, committed)
        message = Outgoing(stream, body, ttl, delay, at, priority, headers, id, single)
        return self._publisher.publish(message, create, sequence)

    def writer(self, stream: str, *, headers: Mapping[str, str] | None = None, create: bool = True) -> BodyWriter:
        """A body of any size, written as a file: one message, there when the file is closed, whole or not at all. In a
        `with` block an exception drops it. Readers get a message whose `open` reads it without holding it in memory.

        More than 1,000,000 bytes are several messages in the log, one unit, with the header `part`; mqfs(4), "Bodies in
        parts".
        """
        return self._publisher.writer(stream, headers, create)

    def publish_many(
        self, messages: Iterable[Outgoing | tuple[str, Body]], *, create: bool = True, wait: Kept = "committed"
    ) -> int:
        """Write many, in their order, without waiting for each; how many. All are kept when this returns (`wait`: as
        `publish` has it).

        If one is refused its error is raised, but others behind it that were under way (at most 1,024) are written.
        """
        return self._publisher.publish_many(messages, create, _committed(wait))

    # ------------------------------------------------------------ subscribing

    def subscribe(
        self,
        pattern: Patterns = "#",
        *,
        existing: bool = False,
        filters: Filters = (),
        reconnect: bool | float | None = None,
    ) -> Subscription:
        """Every message of the matching streams and views from now on (`existing`: from the oldest kept on), in the
        order in which they were written, as an iterator that waits. It takes nothing from anybody.

        `filters`: functions of a message; it is passed over unless all are true. `reconnect`: see `mqfs.connect`.
        """
        start = "first" if existing else "end"
        again = self._reconnect if reconnect is None else reconnect
        direct = self._link.direct(self.path)
        if direct is not None:
            reading = direct.subscribe(pattern, existing=existing, filters=filters, reconnect=again)
            if reading is not None:
                return reading
        return Subscription(self._link, self.path, pattern, start=start, filters=filters, reconnect=again)

    def history(
        self,
        first: int | None = None,
        last: int | None = None,
        *,
        since: Moment | None = None,
        pattern: Patterns = "#",
        filters: Filters = (),
    ) -> Subscription:
        """What is kept, oldest first, to the present end: an iterator that ends.

        `first` and `last` are sequences, both included; a negative `first` is so many messages before the end.
        `since` is UNIX seconds or a datetime, or how long ago: "10m" or a timedelta.
        """
        if first is not None and since is not None:
            raise BadRequest("either first or since")
        start = "first" if first is None else str(first)
        if since is not None:
            start = moment(since)
        until = "end" if last is None else str(last)
        return Subscription(self._link, self.path, pattern, start=start, until=until, filters=filters)

    def on(
        self,
        pattern: Patterns,
        handler: Handler,
        *,
        existing: bool = False,
        filters: Filters = (),
        concurrency: int = 1,
        once: bool = False,
        on_error: OnError | None = None,
    ) -> Registration:
        """Call `handler(message)` for each, on a thread of the library's; one after the other in their order, or up
        to `concurrency` at once. The same handler for the same pattern is registered only once, and called only once
        for a message that several of its patterns match.

        `on_error(error, message or None)` is told what the handler raises, and that messages were lost; without it
        that is logged. Either way it goes on.
        """
        names = names_of(pattern)
        if concurrency < 1:
            raise BadRequest(f"concurrency {concurrency}; 1 or more is right")

        def make(joined: Joined) -> Registration:
            return Registration(
                self.subscribe(pattern, existing=existing, filters=filters),
                names,
                handler,
                once=once,
                concurrency=concurrency,
                on_error=on_error,
                joined=joined,
                ended=self._registry.forget,
            )

        return self._registry.add(names, handler, make)

    def once(
        self, pattern: Patterns, handler: Handler, *, existing: bool = False, filters: Filters = ()
    ) -> Registration:
        """As `on`, for the first message only."""
        return self.on(pattern, handler, existing=existing, filters=filters, once=True)

    def unsubscribe(self, pattern: Patterns | None = None, handler: Handler | None = None) -> int:
        """End what `on` began: of that pattern and handler, of that pattern, or all; how many it were."""
        return self._registry.end(None if pattern is None else names_of(pattern), handler)

    # ------------------------------------------------------------ consuming

    def consume(
        self,
        consumer: str,
        *,
        over: str = "",
        pattern: Patterns = (),
        private: bool = False,
        transient: bool = False,
        create: bool = True,
        renew: bool = False,
        reconnect: bool | float | None = None,
    ) -> Claims:
        """A handle on a consumer: an iterator of claims, each message for one handle only.

        `over`: the stream or view the consumer is over (made so if it is made now); `pattern`: of that, what this
        handle takes. `private`, `transient`: as in ctl. `renew`: while a `with claim:` block runs its lease is
        renewed, so that only a death or a lost connection ends it. For concurrency open several, a thread each.
        """
        make = consumer_opener(self._link, self.path, file_name(consumer), over, private, transient) if create else None
        return self._claims(consumer, make, pattern, renew, reconnect)

    def take(
        self, stream: str, *, create: bool = False, renew: bool = False, reconnect: bool | float | None = None
    ) -> Claims:
        """A handle that takes from a stream: an iterator of claims, each message for one taker only, whether that is
        a program with this call or one that reads the stream's file.

        With `deliver one` that is every message, under `ack read` and `ack next` alike until it is acknowledged; with
        `deliver all`, those that were published with `single`. Needs r and w on the stream. NotFound where it is
        missing (`create`: make it). `renew`, `reconnect`: as `consume` has them. For concurrency open several.
        """
        name = f".{file_name(stream)}"
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
        """A handle on that file of `.consumers`."""
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
        """Call `handler(claim)` for each message, on `concurrency` threads with a handle each: its return acknowledges,
        an exception is a nack and is logged. `Worker.stop` ends it."""
        if concurrency < 1:
            raise BadRequest(f"work failed: concurrency {concurrency} (expected 1 or more)")
        return Worker([self.consume(consumer, over=over, renew=renew) for _ in range(concurrency)], handler)

    def _lease_s(self) -> float:
        text = self.settings()["lease"]
        digits = text.rstrip("dhms")
        return int(digits) * _UNITS_S.get(text[len(digits) :], 0.0)

    # ------------------------------------------------------------ what there is

    def streams(self) -> list[str]:
        """The names of the group's streams."""
        return self._link.names(f"{self.path}/.kept")

    def groups(self) -> list[str]:
        """The names of the groups inside."""
        views = {split(row)[1] for row in self._ctl_lines() if row.startswith("bind ")}
        mine = {*self.streams(), *views, "ctl", "order"}
        return [n for n in self._link.names(self.path) if n not in mine and not n.startswith(".")]

    def consumers(self) -> list[str]:
        return self._link.names(f"{self.path}/.consumers")

    def stats(self) -> dict[str, Any]:
        """The group's counters, `.stats`."""
        found: dict[str, Any] = json.loads(read_whole(self._link, f"{self.path}/.stats"))
        return found

    def settings(self) -> dict[str, str]:
        """Every setting of ctl and its value, defaults too."""
        rows = (row.partition(" ") for row in self._ctl_lines())
        return {key: value for key, _, value in rows if key not in _NOT_SETTINGS}

    def _ctl_lines(self) -> list[str]:
        return read_whole(self._link, f"{self.path}/ctl").decode().splitlines()

    # ------------------------------------------------------------ configuring

    def ctl(self, *lines: str) -> None:
        """Write lines to the group's ctl: all are carried out or none."""
        self._publisher.let_go()
        file = self._link.open(f"{self.path}/ctl", "w")
        try:
            file.write(commands(*lines))
        finally:
            file.close()

    def bind(self, view: str, *patterns: str) -> None:
        """A view over the streams that match."""
        self.ctl(*(f"bind {quote(view)} {quote(pattern)}" for pattern in patterns))

    def unbind(self, view: str, pattern: str = "") -> None:
        """Remove a view, or one of its patterns."""
        self.ctl(f"unbind {quote(view)} {quote(pattern)}" if pattern else f"unbind {quote(view)}")

    def redrive(self, stream: str = "", count: int | None = None) -> None:
        """Dead letters back to where they came from: of that stream, at most so many, oldest first."""
        if count is not None and not stream:
            raise BadRequest("redrive: a count needs a stream")
        self.ctl(
            " ".join(["redrive", *([quote(stream)] if stream else []), *([str(count)] if count is not None else [])])
        )

    def purge(self, stream: str = "") -> None:
        """Drop what is kept: of that stream, or of all."""
        self.ctl(f"clear {quote(stream)}" if stream else "clear")

    def create(self, *streams: str) -> None:
        """Make streams; those that are there already stay as they are."""
        for stream in streams:
            self._publisher.make(stream)

    def remove(self, stream: str) -> None:
        """Remove a stream (or a view) and all it keeps."""
        self._publisher.let_go()
        self._link.remove(f"{self.path}/{file_name(stream)}")

    def remove_consumer(self, consumer: str) -> None:
        self._link.remove(f"{self.path}/.consumers/{file_name(consumer)}")

    def close(self) -> None:
        """End what `on` began; the client calls it."""
        self._registry.end()
        self._publisher.close()


def require_group(link: Link, path: str) -> None:
    """Raises NotFound where there is no group of that path."""
    with suppress(Denied):  # it is there, and what may be done with it will be seen
        link.open(f"{path}/.stats", "r").close()


def make_groups(link: Link, path: str) -> None:
    """A group and those above it, where they are missing: for what is there no permission is needed."""
    try:
        require_group(link, path)
    except NotFound:
        above = path.rpartition("/")[0]
        if above:
            make_groups(link, above)
        with suppress(Exists):
            link.mkdir(path)
