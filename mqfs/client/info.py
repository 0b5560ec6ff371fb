"""The settings and counters of a group, and its consumers.

Times and durations are seconds here; `ctl` and `.stats` of mqfs(4) have the same values as texts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import attrs

from mqfs.client.types import Duration, Link, Moment, read_whole, write_lines
from mqfs.errors import BadRequest, NotFound
from mqfs.syntax.duration import format_duration, format_moment, parse_duration
from mqfs.syntax.lines import quote_word, split

T = TypeVar("T")

_SECOND_NS = 10**9


@attrs.frozen(kw_only=True)
class Settings:
    """The settings of a group, for `Client.group` and `Group.ctl`; `Group.settings` returns all of them.

    None leaves a setting as it is. Durations are seconds, "30s" or a timedelta; `Group.settings` returns seconds.

    Attributes:
        data: What a write is: "message", "line" (each line is a message), or "coalesce" (a part of one stream of
            bytes).
        replay: Where a reader begins, and so what is retained: "off", "last", "key" or "all".
        depth: The most messages of a stream, or a size such as "64K". 0: no bound.
        ttl: How long a message lives. 0: for ever.
        deliver: The receivers of a message: "all" readers, or "one".
        ack: The acknowledgement with `deliver="one"`: that the message is "read", or that its reader reads the "next".
        full: The answer to a write to a full stream: "drop-old", "drop-new", "block" or "reject".
        sync: When a publish returns: "always" on disk, "replica" on disk and in the replica, "off", or on disk within
            a duration.
        keep: Where messages are: on "disk", or in memory, "ring".
        ring: Whose programs may use shared memory: the "owner", "all" or "off".
        lease: How long a message may be claimed. 0: while its reader has the file open.
        retries: Failed deliveries until a message is a dead letter. 0: no bound.
        backoff: The shortest and the longest wait after a failed delivery.
        dead: The name of the stream of dead letters.
        order: Which message of a priority is claimed first: by "sequence" or "expiry".
        dedup: How long the `id` of a message is remembered.
        idle: The time after which an unused, empty stream is removed. 0: never.
        protect: Whether nothing may be removed, renamed or dropped.
        sender: Whether every message has the header `sender`.
        words: The separator and the wildcards of patterns: ".", "*" and "#".
    """

    data: Literal["message", "line", "coalesce"] | None = None
    replay: Literal["off", "last", "key", "all"] | None = None
    depth: int | str | None = None
    ttl: Duration | None = None
    deliver: Literal["all", "one"] | None = None
    ack: Literal["read", "next"] | None = None
    full: Literal["drop-old", "drop-new", "block", "reject"] | None = None
    sync: Duration | Literal["always", "off", "replica"] | None = None
    keep: Literal["disk", "ring"] | None = None
    ring: Literal["owner", "all", "off"] | None = None
    lease: Duration | None = None
    retries: int | None = None
    backoff: tuple[Duration, Duration] | None = None
    dead: str | None = None
    order: Literal["sequence", "expiry"] | None = None
    dedup: Duration | None = None
    idle: Duration | None = None
    protect: bool | None = None
    sender: bool | None = None
    words: tuple[str, ...] | None = None

    def lines(self) -> list[str]:
        """Build the lines of ctl for these settings.

        Returns:
            A line for each setting that is not None, in an order that ctl accepts.

        Raises:
            BadCommand: A duration is invalid.
        """
        values = attrs.asdict(self, recurse=False)
        return [f"{key} {_word_of(_KINDS[key], value)}" for key, value in values.items() if value is not None]

    @classmethod
    def parse(cls, lines: Sequence[str]) -> Settings:
        """Read the settings that ctl prints.

        Args:
            lines: The lines of ctl; those of views, consumers and unknown settings are ignored.

        Returns:
            The settings, durations in seconds.

        Raises:
            BadCommand: A value is not one that ctl prints.
        """
        rows = (row.partition(" ") for row in lines)
        return cls(**{key: _value_of(_KINDS[key], text) for key, _, text in rows if key in _KINDS})


# The type of each field, as it is written above: it determines how the value is printed and parsed.
_KINDS = {field.name: str(field.type).removesuffix(" | None") for field in attrs.fields(Settings)}


def _word_of(kind: str, value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if kind.startswith("tuple"):
        return " ".join(_word_of(_part(kind), word) for word in value)
    if kind.startswith("Duration") and repr(value) not in kind:  # else a word of `sync`
        return format_duration(value)
    return quote_word(str(value)) if kind == "str" else str(value)


def _value_of(kind: str, text: str) -> Any:
    if kind == "bool":
        return text == "on"
    if kind.startswith("tuple"):
        return tuple(_value_of(_part(kind), quote_word(word)) for word in split(text))
    if kind.startswith("Duration") and repr(text) not in kind:
        return parse_duration(text) / _SECOND_NS
    if kind == "str":
        return split(text)[0]
    return int(text) if text.isdigit() else text


def _part(kind: str) -> str:
    """Return the type of a tuple's elements."""
    return kind.removeprefix("tuple[").partition(",")[0]


def seconds(duration: Duration | None) -> float:
    """Return a duration of `Group.settings`, which is in seconds."""
    assert isinstance(duration, float)
    return duration


def setting_lines(settings: Settings | None, lines: Sequence[str]) -> list[str]:
    """Return the lines of ctl for settings and further lines. Raises BadRequest for another type of settings."""
    if settings is not None and not isinstance(settings, Settings):
        raise BadRequest(f"invalid settings {settings!r} (expected mqfs.Settings, or ctl=[LINE, ...])")
    return [*(settings.lines() if settings is not None else ()), *lines]


# ---------------------------------------------------------------- counters


@attrs.frozen(kw_only=True)
class ConsumerInfo:
    """A consumer's position and counters.

    Attributes:
        over: The consumer's stream or view. Empty: the whole group.
        low: The sequence below which everything is acknowledged.
        claimed: Messages in flight.
        waiting: Messages to be claimed, delayed ones too.
        delayed: Waiting messages that are not due yet.
        oldest: When the oldest waiting message was written, UNIX seconds. None: none waits, or it is not among the next
            256 unacknowledged messages.
        held_back: The rule by which messages wait although a read waits for them: "paused", "breaker", "limit", "rate"
            or "key". None: no rule.
        handles: Open handles.
        parked: Reads that wait for a message.
        delivered: Deliveries since the server started.
        acknowledged: Messages acknowledged since the server started.
        failed: Failed deliveries since the server started.
        dead: Messages that became dead letters since the server started.
    """

    over: str = ""
    low: int = 0
    claimed: int = 0
    waiting: int = 0
    delayed: int = 0
    oldest: float | None = None
    held_back: str | None = None
    handles: int = 0
    parked: int = 0
    delivered: int = 0
    acknowledged: int = 0
    failed: int = 0
    dead: int = 0

    @property
    def lag(self) -> int:
        """The number of unacknowledged messages, waiting and in flight."""
        return self.waiting + self.claimed


@attrs.frozen(kw_only=True)
class Singles:
    """The exclusive messages of a stream, with `deliver all`.

    Attributes:
        first: The sequence of the first one that no reader has. 0: none.
        parked: Reads that wait for one.
    """

    first: int = 0
    parked: int = 0


@attrs.frozen(kw_only=True)
class ScheduleInfo:
    """A schedule.

    Attributes:
        stream: The stream of its messages.
        every: The time between two runs, such as "1h"; empty: see `cron`.
        cron: Its fields of crontab, and perhaps a zone; empty: see `every`.
        next: When it runs next, UNIX seconds.
        sequence: The sequence of the delayed message for the next run.
        uid: The number of the user who made it.
    """

    stream: str = ""
    every: str = ""
    cron: str = ""
    next: float = 0.0
    sequence: int = 0
    uid: int = 0


@attrs.frozen(kw_only=True)
class StreamStats:
    """A stream's place in the log and its counters.

    Attributes:
        number: The stream's number in the log.
        messages: Retained messages.
        bytes: The size of their bodies.
        floor: The sequence below which nothing is retained.
        cut: The sequence below which a bound or `purge` removed messages.
        first: The sequence of the first retained message. None: no message is retained.
        newest: The sequence of the last retained message.
        written: Messages written since the server started.
        readers: Open readers of its file.
        waiting: Waiting reads of its file.
        blocked: Writes that wait for room.
        consumer: Its default consumer, with `deliver one`; else None.
        singles: Its exclusive messages. None: it has none.
    """

    number: int = 0
    messages: int = 0
    bytes: int = 0
    floor: int = 0
    cut: int = 0
    first: int | None = None
    newest: int | None = None
    written: int = 0
    readers: int = 0
    waiting: int = 0
    blocked: int = 0
    consumer: ConsumerInfo | None = None
    singles: Singles | None = None


@attrs.frozen(kw_only=True)
class Stats:
    """The counters of a group, its streams and its consumers.

    Attributes:
        store: The identifier of the store, a text that no other store has.
        group: The group's number in the store.
        groups: The names of the groups inside.
        next: The sequence of the next message.
        log_bytes: The size of the log on disk.
        plain: Whether every message in the log, from its stream's floor on, can be read.
        read_only: Whether the log can only be read.
        disk_full: Whether the disk had no room for a write; False again once it has.
        failure: Why the log can only be read; else None.
        damaged: Records that did not pass their check.
        written: Messages written since the server started.
        written_bytes: The size of their bodies.
        read: Messages read since the server started.
        discarded: Messages that `full drop-new` discarded since the server started.
        cut: Messages that `full drop-old` evicted since the server started.
        fell_behind: How often readers fell behind since the server started.
        lost: Messages that these readers missed.
        refused: Refused writes since the server started.
        order_readers: Open readers of `order`.
        cursors: Open cursors: subscriptions by 9P have one each.
        held: Delayed messages.
        schedules: The schedules by name.
        dead_letters: Messages in the stream of dead letters.
        streams: The streams by name.
        views: The number of open readers of each view.
        consumers: The consumers by name.
    """

    store: str = ""
    group: int = 0
    groups: tuple[str, ...] = ()
    next: int = 0
    log_bytes: int = 0
    plain: bool = True
    read_only: bool = False
    disk_full: bool = False
    failure: str | None = None
    damaged: int = 0
    written: int = 0
    written_bytes: int = 0
    read: int = 0
    discarded: int = 0
    cut: int = 0
    fell_behind: int = 0
    lost: int = 0
    refused: int = 0
    order_readers: int = 0
    cursors: int = 0
    held: int = 0
    schedules: Mapping[str, ScheduleInfo] = attrs.field(factory=dict)
    dead_letters: int = 0
    streams: Mapping[str, StreamStats] = attrs.field(factory=dict)
    views: Mapping[str, int] = attrs.field(factory=dict)
    consumers: Mapping[str, ConsumerInfo] = attrs.field(factory=dict)

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> Stats:
        """Read the object of `.stats`.

        Args:
            value: The decoded JSON. Unknown keys are ignored.

        Returns:
            The counters.

        Raises:
            AttributeError: The value is not such an object.
        """
        more = {
            "groups": tuple(value.get("groups", ())),
            "schedules": {name: _made(ScheduleInfo, row) for name, row in value.get("schedules", {}).items()},
            "streams": {name: _stream(row) for name, row in value.get("streams", {}).items()},
            "views": {name: row["readers"] for name, row in value.get("views", {}).items()},
            "consumers": {name: _made(ConsumerInfo, row) for name, row in value.get("consumers", {}).items()},
        }
        return _made(cls, {**value, **more})


def _stream(row: Mapping[str, Any]) -> StreamStats:
    consumer, singles = row.get("consumer"), row.get("singles")
    more = {
        "consumer": None if consumer is None else _made(ConsumerInfo, consumer),
        "singles": None if singles is None else _made(Singles, singles),
    }
    return _made(StreamStats, {**row, **more})


def _made(kind: type[T], row: Mapping[str, Any]) -> T:
    known = {field.name for field in attrs.fields(kind)}  # type: ignore[arg-type]
    return kind(**{key: value for key, value in row.items() if key in known})


# ---------------------------------------------------------------- one consumer


class Consumer:
    """A consumer to look at and to move, from `Group.consumer`; `Group.consume` claims its messages. Thread-safe.

    Attributes:
        name: The consumer's name.
    """

    def __init__(self, link: Link, group: str, name: str) -> None:
        self.name = name
        self._link, self._group = link, group

    def __repr__(self) -> str:
        return f"<mqfs consumer {self.name!r} of group {self._group or '/'!r} at {self._link.label}>"

    def info(self) -> ConsumerInfo:
        """Read the consumer's position and counters.

        Returns:
            The present ones.

        Raises:
            NotFound: The consumer is missing.
        """
        stats = Stats.parse(json.loads(read_whole(self._link, f"{self._group}/.stats")))
        if self.name not in stats.consumers:
            raise NotFound(f"no consumer {self.name!r} in group {self._group or '/'!r}")
        return stats.consumers[self.name]

    def lag(self) -> int:
        """Count the unacknowledged messages.

        Returns:
            The number of waiting messages and of those in flight.

        Raises:
            NotFound: The consumer is missing.
        """
        return self.info().lag

    def seek(self, to: int | Literal["first", "last", "end"] | None = None, *, since: Moment | None = None) -> None:
        """Move the consumer, for all its handles. Claims in flight become void, and their messages may be redelivered.

        Args:
            to: A sequence, where a negative one counts messages from the end; "first": the oldest retained message;
                "last": the newest; "end": after the newest.
            since: UNIX seconds or a datetime, or how long ago: "10m" or a timedelta. Instead of `to`.

        Raises:
            NotFound: The consumer is missing.
            BadRequest: Both `to` and `since`, or none.
            Denied: The user has no r or no w on it.
        """
        if (to is None) == (since is None):
            raise BadRequest("seek failed: to and since (expected one of them)")
        place = str(to) if since is None else format_moment(since)
        write_lines(self._link, f"{self._group}/.consumers/{self.name}", f"seek {place}")

    def pause(self, duration: Duration | None = None) -> None:
        """Stop deliveries. Messages in flight can be acknowledged, and publishers are not blocked.

        Args:
            duration: For how long: seconds, "30s" or a timedelta. None: until `resume`.

        Raises:
            NotFound: The consumer is missing.
            BadCommand: The duration is invalid.
            Denied: The user may not write ctl.
        """
        self._rule("pause", *([] if duration is None else [format_duration(duration)]))

    def resume(self) -> None:
        """End a pause, also one by the consumer's breaker, which then counts from 0.

        Raises:
            NotFound: The consumer is missing.
            Denied: The user may not write ctl.
        """
        self._rule("resume")

    def limit(self, messages: int, *, per_key: bool = False) -> None:
        """Limit the number of messages in flight.

        Args:
            messages: The most messages. 0: no limit.
            per_key: Whether this is the limit for the messages of each key.

        Raises:
            NotFound: The consumer is missing.
            BadCommand: The number is negative.
            Denied: The user may not write ctl.
        """
        self._rule("limit", str(messages), *(["key"] if per_key else []))

    def rate(self, deliveries: str) -> None:
        """Limit the rate of deliveries.

        Args:
            deliveries: The most deliveries in a time: "5/s", "100/m", "10/15m". "0": no limit.

        Raises:
            NotFound: The consumer is missing.
            BadCommand: The rate is invalid.
            Denied: The user may not write ctl.
        """
        self._rule("rate", quote_word(deliveries))

    def breaker(self, dead_letters: str) -> None:
        """Pause the consumer automatically when too many of its messages become dead letters.

        Args:
            dead_letters: The most dead letters in a time: "10/5m". "0": any number.

        Raises:
            NotFound: The consumer is missing.
            BadCommand: The text is invalid.
            Denied: The user may not write ctl.
        """
        self._rule("breaker", quote_word(dead_letters))

    def _rule(self, verb: str, *words: str) -> None:
        write_lines(self._link, f"{self._group}/ctl", " ".join([verb, quote_word(self.name), *words]))
