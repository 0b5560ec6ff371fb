"""A message to be published, and its form as a `.put` request."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Literal, TypeAlias, TypedDict

import attrs

from mqfs import limits
from mqfs.client.large import is_long
from mqfs.client.types import Body, Duration, bytes_of, is_empty
from mqfs.errors import BadName, BadRequest
from mqfs.records.headers import TOPIC
from mqfs.syntax.duration import format_duration
from mqfs.syntax.escape import is_shortened, stream_name
from mqfs.syntax.names import check_file_name


@attrs.frozen
class Outgoing:
    """A message to be published with its options, for `Group.publish_many`: the arguments of `Group.publish`.

    Attributes:
        stream: Its stream.
        body: Its body; text as UTF-8.
        ttl: How long it lives, in seconds or as "30s". None: as the group has it.
        delay: How long it is held back, in seconds or as "30s". None: not at all.
        at: When it is delivered, UNIX seconds or a datetime. None: at once.
        priority: 0 to 9. Higher ones are claimed first. None: 5.
        headers: Texts by name. None: none.
        id: A message with an `id` that was published within `dedup` is not published again. Empty: none.
        single: For one receiver, also in a group with `deliver all`.
        key: Which messages belong together, at most 255 bytes. Empty: none.
        expect: The sequence of the newest message that its stream is to have; 0: none. None: any.
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
            The fields but the stream; none where a plain write does.

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
            kept: Whether it is answered with a receipt.

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
    """The object of `.put` for a message without options, which is answered with a receipt, and the newline."""
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
    """A value as a body. Raises TypeError, ValueError for what JSON has not: NaN, though Python would write it."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"publish_json failed: {error} (expected a value that JSON has)") from None


Durability: TypeAlias = Literal["committed", "published"]


def is_committed(wait: Durability) -> bool:
    """Raises BadRequest."""
    if wait not in ("committed", "published"):
        raise BadRequest(f"invalid wait {wait!r} (expected committed or published)")
    return wait == "committed"


Item: TypeAlias = Outgoing | tuple[str, Body]  # of publish_many: a tuple is a plain message


def require_items(items: Sequence[Item]) -> None:
    """Raises TypeError where a text stands for a pair. The types alone are read: there are many items."""
    if not {tuple, list, Outgoing}.issuperset(map(type, items)):
        for item in items:
            if not isinstance(item, Outgoing):
                pair_of(item)


def outgoing(item: Item) -> Outgoing:
    return item if isinstance(item, Outgoing) else Outgoing(*item)


def pair_of(item: Any) -> tuple[str, Body]:
    """A plain message. Raises TypeError: two characters of a text are no stream and body."""
    if isinstance(item, (tuple, list)) and len(item) == 2:
        return item  # type: ignore[return-value]
    raise TypeError(f"invalid message {item!r} (expected (stream, body) or Outgoing)")


def escaped(item: Item) -> Item:
    """The same with a text for its stream's name."""
    if isinstance(item, Outgoing):
        stream, headers = addressed(item.stream, item.headers)
        return attrs.evolve(item, stream=stream, headers=headers)
    text, body = pair_of(item)
    stream, headers = addressed(text, None)
    return Outgoing(stream, body, headers=headers) if headers else (stream, body)


def addressed(text: str, headers: Mapping[str, str] | None) -> tuple[str, Mapping[str, str] | None]:
    """The stream's name of a text, and the headers of its messages, which have the text where the name is shortened.
    Raises BadName where they cannot."""
    name = stream_name(text)
    if not is_shortened(name) or name == text:
        return name, headers
    try:
        topic = text.decode() if isinstance(text, bytes) else text.encode().decode()
    except UnicodeError:
        raise BadName(f"{text[:20]!r} is not UTF-8 (expected that of more than {limits.NAME_BYTES} bytes)") from None
    return name, {**(headers or {}), TOPIC: topic}


def way_of(item: Item) -> str:
    """The way to write an item: "long", "put" or "plain". An empty write is no message, so an empty body is put."""
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
