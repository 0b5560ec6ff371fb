"""Staged batches of tasks, and their commit by the driver.

A staged batch belongs to one attempt of one task, so attempts do not interfere. The driver groups them into atomic
batches. One write to `.txn/ctl`, which the server remembers, decides whether they are published.
"""

from __future__ import annotations

import stat
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import attrs

from mqfs import limits
from mqfs.errors import Disconnected, Exists, MqfsError, NotFound, OverLimit
from mqfs.ninep.client.connection import Client, Slot
from mqfs.ninep.client.machine import Channel
from mqfs.ninep.codec.messages import Twrite
from pyspark_mqfs.batch_encoder import Frames
from pyspark_mqfs.catalog import path_of
from pyspark_mqfs.connection import Link, Server, write_text
from pyspark_mqfs.options import OptionError

IN_FLIGHT = 4  # pipelined writes of a task, one MiB each
_O_WRONLY = 1


class SinkError(RuntimeError):
    """Rows could not be staged or committed; the text says what that means."""


@attrs.frozen
class StagedBatch:
    """A batch that a task attempt has staged in one group."""

    group: str
    name: str
    messages: int
    log_bytes: int  # bytes in the log


class Staging:
    """The staged batches of one task attempt; after a full one the next begins."""

    def __init__(self, server: Server, prefix: str, create: bool) -> None:
        """`create`: whether to create missing streams."""
        self._link = server.link()
        self._prefix, self._create = f"{prefix}-{uuid.uuid4().hex[:12]}", create
        self._open: dict[str, _OpenBatch] = {}
        self._existing: set[str] = set()  # streams that exist
        self._full: list[StagedBatch] = []
        self._count = 0

    def put(self, frames: Frames) -> None:
        """Stage the frames. Raises SinkError, OptionError."""
        try:
            self._create_streams(frames.group, frames.streams)
            self._put(frames)
        except (OSError, Disconnected) as error:
            raise SinkError(
                f"staging failed: lost the server at {self._link.server.address!r}: {error}"
                " (nothing was published; Spark has to repeat the batch)"
            ) from None
        except MqfsError as error:
            raise SinkError(f"group {frames.group or '/'!r}: {error}{_advice(error)}") from None

    def _put(self, frames: Frames) -> None:
        at, count = 0, len(frames.log_bytes)
        total = frames.log_bytes.cumsum()
        while at < count:
            batch = self._open.get(frames.group) or self._open_batch(frames.group)
            before = int(total[at - 1]) if at else 0
            fits = int(total.searchsorted(before + limits.UNIT_BYTES - batch.log_bytes, "right")) - at
            fits = min(fits, limits.UNIT_MESSAGES - batch.messages, count - at)
            if fits:
                batch.write(frames, at, at + fits)
                batch.log_bytes += int(total[at + fits - 1]) - before
                at += fits
            if at < count:
                self._close_batch(frames.group)

    def _open_batch(self, group: str) -> _OpenBatch:
        name = f"{self._prefix}-{self._count}"
        self._count += 1
        self._link.with_retry(lambda client: _create_batch(client, f"{path_of(group, '.txn')}/{name}"))
        batch = self._open[group] = _OpenBatch(self._link.client(), group, name)
        return batch

    def _close_batch(self, group: str) -> None:
        batch = self._open[group]
        batch.close()
        del self._open[group]
        self._full.append(StagedBatch(group, batch.name, batch.messages, batch.log_bytes))

    def _create_streams(self, group: str, streams: Iterable[str]) -> None:
        for name in streams:
            path = path_of(group, name)
            if path in self._existing:
                continue
            if self._create:
                self._link.with_retry(partial(_create_stream, path=path))
            self._existing.add(path)

    def finish(self) -> tuple[StagedBatch, ...]:
        """End staging; return the staged batches, in order. Raises SinkError."""
        try:
            for group in list(self._open):
                self._close_batch(group)
        except (OSError, Disconnected) as error:
            raise SinkError(
                f"staging failed: lost the server: {error} (nothing was published; repeat the batch)"
            ) from None
        except MqfsError as error:
            raise SinkError(f"staging failed: {error}{_advice(error)}") from None
        self._link.close()
        return tuple(self._full)

    def drop(self) -> None:
        """Remove the staged batches of a failed attempt, if the server answers."""
        with suppress(OSError, MqfsError, OptionError):
            client = self._link.client()
            names = [(batch.group, batch.name) for batch in self._full]
            for group, name in [*names, *((batch.group, batch.name) for batch in self._open.values())]:
                with suppress(MqfsError):
                    client.remove(f"{path_of(group, '.txn')}/{name}")
        self._link.close()


class _OpenBatch:
    """A staged batch open for writing, with several writes in flight."""

    def __init__(self, client: Client, group: str, name: str) -> None:
        self.group, self.name, self.messages, self.log_bytes = group, name, 0, 0
        self._client = client
        self._file: Channel = client.do(client.caller.open(f"{path_of(group, '.txn')}/{name}/.batch", _O_WRONLY))
        self._rest: list[bytes] = []
        self._rest_bytes = 0
        self._waiting: deque[Slot] = deque()

    def write(self, frames: Frames, first: int, last: int) -> None:
        """Write frames, in writes of as many whole frames as fit. Raises OptionError."""
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
                    f"row too large: {size} bytes for {frames.path(at)} with its name and headers"
                    f" (expected at most {most} by option msize)"
                )
            if at < last:
                self._send()

    def _send(self) -> None:
        request = Twrite(0, self._file.fid, 0, b"".join(self._rest))
        self._rest, self._rest_bytes = [], 0
        while len(self._waiting) >= IN_FLIGHT:
            self._client.answer(self._waiting.popleft())
        self._waiting += self._client.send([request])

    def close(self) -> None:
        if self._rest:
            self._send()
        while self._waiting:
            self._client.answer(self._waiting.popleft())
        self._client.do(self._client.caller.clunk(self._file.fid))


def _advice(error: MqfsError) -> str:
    """Return advice where all staged messages together reach a bound of the server; "" for other errors."""
    if not isinstance(error, OverLimit):
        return ""
    return " (a write is staged whole: write less at once, from fewer tasks or to fewer groups, or as a stream)"


def _create_batch(client: Client, path: str) -> None:
    """Create a staged batch. Its name is unique: an existing one was made by a first request whose reply was lost."""
    try:
        client.mkdir(path, 0o700)
    except Exists:
        pass
    except NotFound:
        group = path.rpartition("/.txn/")[0]
        raise OptionError(f"no group {group!r} (create it with mkdir, and set its retention in ctl)") from None


def _create_stream(client: Client, path: str) -> None:
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
class Transaction:
    """The transaction id of a batch, and how to commit it. `number` counts the batches of the producer."""

    producer: str
    number: int
    prefix: str  # of the names staged for this batch, by failed attempts too
    once: bool  # a repeat has the same id
    split: bool  # whether a batch over the limits is committed as several


def commit(server: Server, transaction: Transaction, batches: Sequence[StagedBatch]) -> None:
    """Commit the staged batches in order, in each group as one atomic batch; a repeat is ignored. Raises SinkError."""
    groups: dict[str, list[StagedBatch]] = {}
    for batch in batches:
        groups.setdefault(batch.group, []).append(batch)
    plan = {group: list(_atomic_batches(staged)) for group, staged in groups.items()}
    for group, chunks in plan.items():
        if len(chunks) > 1 and not transaction.split:
            raise SinkError(_too_large(group, groups[group]))
    with server.link() as link:
        for group, chunks in plan.items():
            for ordinal, chunk in enumerate(chunks):
                producer = f"{transaction.producer}.part{ordinal}" if ordinal else transaction.producer
                _commit(link, group, producer, transaction, chunk)
        for group, chunks in plan.items():
            _clean_up(link, group, transaction, len(chunks))


def _atomic_batches(batches: Iterable[StagedBatch]) -> Iterator[list[StagedBatch]]:
    """Group neighbours into atomic batches within the limits."""
    chunk: list[StagedBatch] = []
    messages = log_bytes = 0
    for batch in batches:
        if chunk and (
            messages + batch.messages > limits.UNIT_MESSAGES or log_bytes + batch.log_bytes > limits.UNIT_BYTES
        ):
            yield chunk
            chunk, messages, log_bytes = [], 0, 0
        chunk.append(batch)
        messages, log_bytes = messages + batch.messages, log_bytes + batch.log_bytes
    if chunk:
        yield chunk


def _too_large(group: str, batches: Sequence[StagedBatch]) -> str:
    messages, log_bytes = sum(batch.messages for batch in batches), sum(batch.log_bytes for batch in batches)
    return (
        f"batch too large for group {group or '/'!r}: {messages} messages, {log_bytes} bytes (expected at most"
        f" {limits.UNIT_MESSAGES} messages and {limits.UNIT_BYTES} bytes: lower maxOffsetsPerTrigger or"
        " maxBytesPerTrigger, or set option largeBatches to split)"
    )


def _commit(link: Link, group: str, producer: str, transaction: Transaction, chunk: Sequence[StagedBatch]) -> None:
    command = f"commit {producer}.{transaction.number} {' '.join(batch.name for batch in chunk)}"
    try:
        link.with_retry(lambda client: write_text(client, path_of(group, ".txn/ctl"), command))
    except NotFound as error:
        raise SinkError(
            f"commit of {producer}.{transaction.number} failed: staged batch in group {group or '/'!r} is lost:"
            f" {error.detail} (nothing was published there; restart the query to repeat the batch)"
        ) from None
    except MqfsError as error:
        raise SinkError(
            f"commit of {producer}.{transaction.number} failed in group {group or '/'!r}: {error}"
        ) from None


def _clean_up(link: Link, group: str, transaction: Transaction, chunks: int) -> None:
    """Remove batches that other attempts have staged; make the server forget a producer whose commits are not
    repeated."""
    with suppress(MqfsError, OptionError):
        link.with_retry(lambda client: _remove_batches(client, group, transaction.prefix))
    if not transaction.once:
        names = [transaction.producer, *(f"{transaction.producer}.part{n}" for n in range(1, chunks))]
        command = f"forget {' '.join(names)}"
        with suppress(MqfsError, OptionError):
            link.with_retry(lambda client: write_text(client, path_of(group, ".txn/ctl"), command))


def _remove_batches(client: Client, group: str, prefix: str) -> None:
    for name in client.list(path_of(group, ".txn")):
        if name.startswith(prefix):
            with suppress(MqfsError):
                client.remove(f"{path_of(group, '.txn')}/{name}")


def drop(server: Server, batches: Iterable[StagedBatch]) -> None:
    """Remove the staged batches of an aborted write. After a commit, which consumes them, this is harmless: names are
    unique."""
    with server.link() as link, suppress(OSError, MqfsError, OptionError):
        client = link.client()
        for batch in batches:
            with suppress(MqfsError):
                client.remove(f"{path_of(batch.group, '.txn')}/{batch.name}")
