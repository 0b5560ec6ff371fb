"""Staged batches of tasks, and their commit by the driver.

Owns the names of staged batches and producers, the grouping into atomic batches, and the meaning of failures. A staged
batch belongs to one attempt of one task, so attempts do not interfere. One write to `.txn/ctl`, which the server
remembers, decides what is published.
"""

from __future__ import annotations

import stat
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

import attrs

from mqfs import limits
from mqfs.errors import Disconnected, Exists, MqfsError, NotFound
from mqfs.ninep.blocking import Client
from mqfs.ninep.client.channel import Channel
from mqfs.ninep.codec.messages import Twrite
from pyspark_mqfs.batch_encoder import Frames
from pyspark_mqfs.catalog import path_of
from pyspark_mqfs.connection import Link, Server
from pyspark_mqfs.options import OptionError

IN_FLIGHT = 4  # pipelined writes of a task, a MiB each
_O_WRONLY = 1


class SinkError(RuntimeError):
    """Rows could not be staged or committed; the text has the consequence."""


@attrs.frozen
class Part:
    """A batch that a task attempt has staged in one group."""

    group: str
    name: str
    messages: int
    room: int  # bytes in the log


class Staging:
    """The staged batches of one task attempt; a full one is followed by the next."""

    def __init__(self, server: Server, prefix: str, create: bool) -> None:
        """`create`: create missing streams."""
        self._link = server.link()
        self._prefix, self._create = f"{prefix}-{uuid.uuid4().hex[:12]}", create
        self._open: dict[str, _Open] = {}
        self._known: set[str] = set()  # existing streams
        self._full: list[Part] = []
        self._count = 0

    def put(self, frames: Frames) -> None:
        """Stage the frames. Raises SinkError, OptionError."""
        try:
            self._make_streams(frames.group, frames.streams)
            self._put(frames)
        except (OSError, Disconnected) as error:
            raise SinkError(
                f"staging failed: lost the server at {self._link.server.address!r}: {error}"
                " (nothing was published; Spark has to repeat the batch)"
            ) from None
        except MqfsError as error:
            raise SinkError(f"group {frames.group or '/'!r}: {error}") from None

    def _put(self, frames: Frames) -> None:
        at, count = 0, len(frames.room)
        total = frames.room.cumsum()
        while at < count:
            part = self._open.get(frames.group) or self._begin(frames.group)
            before = int(total[at - 1]) if at else 0
            fits = int(total.searchsorted(before + limits.UNIT_BYTES - part.room, "right")) - at
            fits = min(fits, limits.UNIT_MESSAGES - part.messages, count - at)
            if fits:
                part.write(frames, at, at + fits)
                part.room += int(total[at + fits - 1]) - before
                at += fits
            if at < count:
                self._end(frames.group)

    def _begin(self, group: str) -> _Open:
        name = f"{self._prefix}-{self._count}"
        self._count += 1
        self._link.retried(lambda client: _mkdir(client, f"{path_of(group, '.txn')}/{name}"))
        part = self._open[group] = _Open(self._link.client(), group, name)
        return part

    def _end(self, group: str) -> None:
        part = self._open[group]
        part.close()
        del self._open[group]
        self._full.append(Part(group, part.name, part.messages, part.room))

    def _make_streams(self, group: str, streams: Iterable[str]) -> None:
        for name in streams:
            path = path_of(group, name)
            if path in self._known:
                continue
            if self._create:
                self._link.retried(lambda client, path=path: _make(client, path))  # type: ignore[misc]
            self._known.add(path)

    def finish(self) -> tuple[Part, ...]:
        """End staging; the staged batches, in order. Raises SinkError."""
        try:
            for group in list(self._open):
                self._end(group)
        except (OSError, Disconnected) as error:
            raise SinkError(
                f"staging failed: lost the server: {error} (nothing was published; repeat the batch)"
            ) from None
        except MqfsError as error:
            raise SinkError(str(error)) from None
        self._link.close()
        return tuple(self._full)

    def drop(self) -> None:
        """Remove the staged batches of a failed attempt, if the server answers."""
        with suppress(OSError, MqfsError, OptionError):
            client = self._link.client()
            names = [(part.group, part.name) for part in self._full]
            for group, name in [*names, *((part.group, part.name) for part in self._open.values())]:
                with suppress(MqfsError):
                    client.remove(f"{path_of(group, '.txn')}/{name}")
        self._link.close()


class _Open:
    """A staged batch open for writing, with several writes in flight."""

    def __init__(self, client: Client, group: str, name: str) -> None:
        self.group, self.name, self.messages, self.room = group, name, 0, 0
        self._client = client
        self._file: Channel = client.do(client.caller.open(f"{path_of(group, '.txn')}/{name}/.batch", _O_WRONLY))
        self._rest: list[bytes] = []
        self._rest_bytes = 0
        self._waiting: deque[tuple[Twrite, int]] = deque()

    def write(self, frames: Frames, first: int, last: int) -> None:
        """Write frames, as many whole ones a write as fit. Raises OptionError."""
        data, borders, most = memoryview(frames.data), frames.borders, self._file.most
        self.messages += last - first
        at = first
        while at < last:
            left = most - self._rest_bytes
            end = min(int(borders.searchsorted(borders[at] + left, "right")) - 1, last)
            if end > at:
                self._rest.append(bytes(data[borders[at] : borders[end]]))
                self._rest_bytes += int(borders[end] - borders[at])
                at = end
            elif not self._rest:
                size = int(borders[at + 1] - borders[at])
                raise OptionError(
                    f"row too large: {size} bytes with its headers (expected at most {most} by option msize)"
                )
            if at < last:
                self._send()

    def _send(self) -> None:
        request = Twrite(0, self._file.fid, 0, b"".join(self._rest))
        self._rest, self._rest_bytes = [], 0
        while len(self._waiting) >= IN_FLIGHT:
            self._client.end(*self._waiting.popleft())
        self._waiting.append((request, self._client.begin(request)))

    def close(self) -> None:
        if self._rest:
            self._send()
        while self._waiting:
            self._client.end(*self._waiting.popleft())
        self._client.do(self._client.caller.clunk(self._file.fid))


def _mkdir(client: Client, path: str) -> None:
    """Create a staged batch. Its name is unique: an existing one is of a first try whose reply was lost."""
    try:
        client.mkdir(path, 0o700)
    except Exists:
        pass
    except NotFound:
        group = path.rpartition("/.txn/")[0]
        raise OptionError(f"no group {group!r} (create it with mkdir, and set its retention in ctl)") from None


def _make(client: Client, path: str) -> None:
    try:
        client.create(path).close()
    except Exists:
        if stat.S_ISDIR(client.stat(path).mode):
            raise OptionError(f"topic {path!r}: a group (expected a stream in it, as {path}/all)") from None
    except NotFound:
        group = path.rpartition("/")[0]
        raise OptionError(f"no group {group!r} (create it with mkdir, and set its retention in ctl)") from None


# ---------------------------------------------------------------- the driver's side


@attrs.frozen
class Decision:
    """The transaction id of a batch, and how to commit it. `number` counts the batches of the producer."""

    producer: str
    number: int
    prefix: str  # of the names staged for this batch, by failed attempts too
    once: bool  # a repeat has the same id
    split: bool  # a batch over the limits is committed as several


def commit(server: Server, decision: Decision, parts: Sequence[Part]) -> None:
    """Commit the staged batches in order, in each group as one atomic batch; a repeat is ignored. Raises SinkError."""
    groups: dict[str, list[Part]] = {}
    for part in parts:
        groups.setdefault(part.group, []).append(part)
    plan = {group: list(_units(mine)) for group, mine in groups.items()}
    for group, units in plan.items():
        if len(units) > 1 and not decision.split:
            raise SinkError(_too_large(group, groups[group]))
    with server.link() as link:
        for group, units in plan.items():
            for ordinal, unit in enumerate(units):
                producer = f"{decision.producer}.part{ordinal}" if ordinal else decision.producer
                _commit(link, group, producer, decision, unit)
        for group, units in plan.items():
            _tidy(link, group, decision, len(units))


def _units(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Group neighbours into atomic batches within the limits."""
    unit: list[Part] = []
    messages = room = 0
    for part in parts:
        if unit and (messages + part.messages > limits.UNIT_MESSAGES or room + part.room > limits.UNIT_BYTES):
            yield unit
            unit, messages, room = [], 0, 0
        unit.append(part)
        messages, room = messages + part.messages, room + part.room
    if unit:
        yield unit


def _too_large(group: str, parts: Sequence[Part]) -> str:
    messages, room = sum(part.messages for part in parts), sum(part.room for part in parts)
    return (
        f"batch too large for group {group or '/'!r}: {messages} messages, {room} bytes (expected at most"
        f" {limits.UNIT_MESSAGES} messages and {limits.UNIT_BYTES} bytes: lower maxOffsetsPerTrigger or"
        " maxBytesPerTrigger, or set option largeBatches to split)"
    )


def _commit(link: Link, group: str, producer: str, decision: Decision, unit: Sequence[Part]) -> None:
    command = f"commit {producer}.{decision.number} {' '.join(part.name for part in unit)}".encode()
    try:
        link.retried(lambda client: _say(client, group, command))
    except NotFound as error:
        raise SinkError(
            f"commit of {producer}.{decision.number} failed: staged batch in group {group or '/'!r} is lost:"
            f" {error.detail} (nothing was published there; restart the query to repeat the batch)"
        ) from None
    except MqfsError as error:
        raise SinkError(f"commit of {producer}.{decision.number} failed in group {group or '/'!r}: {error}") from None


def _say(client: Client, group: str, command: bytes) -> None:
    with client.open(path_of(group, ".txn/ctl"), "w") as file:
        file.write(command)


def _tidy(link: Link, group: str, decision: Decision, units: int) -> None:
    """Remove what other attempts have staged; forget a producer without repeats."""
    with suppress(MqfsError, OptionError):
        link.retried(lambda client: _drop(client, group, decision.prefix))
    if not decision.once:
        names = [decision.producer, *(f"{decision.producer}.part{n}" for n in range(1, units))]
        with suppress(MqfsError, OptionError):
            link.retried(lambda client: _say(client, group, f"forget {' '.join(names)}".encode()))


def _drop(client: Client, group: str, prefix: str) -> None:
    for name in client.list(path_of(group, ".txn")):
        if name.startswith(prefix):
            with suppress(MqfsError):
                client.remove(f"{path_of(group, '.txn')}/{name}")


def drop(server: Server, parts: Iterable[Part]) -> None:
    """Remove the staged batches of an aborted write. Harmless after a commit, which consumes them: names are unique."""
    with server.link() as link, suppress(OSError, MqfsError, OptionError):
        client = link.client()
        for part in parts:
            with suppress(MqfsError):
                client.remove(f"{path_of(part.group, '.txn')}/{part.name}")


__all__ = ["Decision", "Part", "SinkError", "Staging", "commit", "drop"]
