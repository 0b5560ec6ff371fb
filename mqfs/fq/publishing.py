"""Publishing for fq clients: messages are counted, and appended in one atomic batch for each exchange.

This module makes their headers `fq-sender`, `fq-hops` and `fq-id`.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple

import trio

from mqfs import limits
from mqfs.errors import Denied, MqfsError, NotFound, OverLimit, OverQuota, StreamFull, TooLong
from mqfs.fq.codec import HOP_BYTES, Message
from mqfs.fq.exchanges import BrokerCounts, Exchange, Exchanges
from mqfs.fq.queues import Queue
from mqfs.http.publishing import frame
from mqfs.model import Step, User, Wait
from mqfs.records import headers
from mqfs.syntax.names import escape

SENDER, HOPS, ID = "fq-sender", "fq-hops", "fq-id"
_OF_SOME = Denied, NotFound, OverLimit, OverQuota, StreamFull, TooLong  # refusals that may concern only some messages
ID_HEAD = b"\x05fq-id\x20\x00"


def address(text: object) -> bytes:
    """Encode the address of a hop; 0.0.0.0 if it is not IPv4."""
    try:
        return socket.inet_aton(str(text))
    except OSError:
        return bytes(HOP_BYTES)


def origin(sender: bytes, hops: bytes) -> bytes:
    """Encode sender and hops of a message as headers."""
    steps = (socket.inet_ntoa(hops[at : at + HOP_BYTES]) for at in range(0, len(hops), HOP_BYTES))
    return headers.encode({SENDER: escape(sender), HOPS: ",".join(steps)})


class _Frame(NamedTuple):
    """A message to append. `stream`: the stream's name. `queues`: the queues that receive it. `data`: its frame."""

    stream: str
    queues: tuple[Queue, ...]
    data: bytes


class Publisher:
    """The publisher of one connection. `await_step` waits for room outside of the user's time slice. `pause` is awaited
    between the parts of a refused batch, as there may be many."""

    def __init__(
        self,
        exchanges: Exchanges,
        user: User,
        counts: BrokerCounts,
        node: bytes,
        await_step: Callable[[Step[int]], Awaitable[int]],
        pause: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint,
    ) -> None:
        self._exchanges, self._tree, self._user = exchanges, exchanges.tree, user
        self._counts, self._node = counts, node
        self._handles: dict[Exchange, Any] = {}  # open `.batch` files; `pending` has the answer
        self._await_step, self._pause = await_step, pause

    async def publish(self, messages: Iterable[Message], origin_of: Callable[[Message], bytes | None]) -> None:
        """Append the messages with a receiver. Waits while a queue with policy `block` has no room.

        `origin_of`: returns the origin of a message as headers; None: the message is dropped.
        """
        runs: dict[bytes, list[Message]] = {}
        for message in messages:
            runs.setdefault(message.exchange, []).append(message)
        for name, run in runs.items():
            self._count("msgs_in", len(run))
            self._count("octets_in", size := sum(len(message.payload) for message in run))
            exchange = self._exchanges.find(name)
            if exchange is None:
                self._count("no_exchange", len(run))
                continue
            exchange.counts.msgs_in += len(run)
            exchange.counts.octets_in += size
            await self._publish(exchange, run, origin_of)

    def _count(self, name: str, amount: int, exchange: Exchange | None = None) -> None:
        for counts in (self._counts, self._exchanges.counts, *((exchange.counts,) if exchange is not None else ())):
            setattr(counts, name, getattr(counts, name) + amount)

    async def _publish(
        self, exchange: Exchange, run: list[Message], origin_of: Callable[[Message], bytes | None]
    ) -> None:
        frames: list[_Frame] = []
        unwanted = 0
        for message in run:
            if (head := origin_of(message)) is None:
                self._count("dropped_in", 1, exchange)
                continue
            name = escape(message.route)
            wanted = exchange.wanted(name)
            if not (wanted.queues or wanted.others):
                unwanted += 1
                continue
            if len(frames) >= _most(exchange, wanted.queues):
                await self._append(exchange, frames)
                frames = []
            head += ID_HEAD + message.id.hex().encode()
            frames.append(_Frame(name, wanted.queues, frame(name, message.payload, head)))
        if unwanted:
            self._count("no_route", unwanted, exchange)
        await self._append(exchange, frames)

    def _has_stream(self, exchange: Exchange, name: str) -> bool:
        """Make a stream if it does not exist. Whether it exists then."""
        if name in exchange.group.streams:
            return True
        try:
            self._exchanges.make_stream(self._user, exchange, name)
        except MqfsError as error:
            exchange.group.refuse(self._user, "fq", str(error))
        return name in exchange.group.streams  # False while a group of that name is being made

    async def _append(self, exchange: Exchange, frames: list[_Frame]) -> None:
        """Append messages in order, as one batch. A refused batch is halved and tried again, so that a refused message
        affects no other. A refused message is reported in `.errors`, and counts as without a route."""
        parts = [frames]
        while parts:
            part = parts.pop()
            found = [frame for frame in part if self._has_stream(exchange, frame.stream)]
            refused = len(part) - len(found)
            try:
                if found and not await self._write(exchange, found):
                    parts.append(found)
            except MqfsError as error:
                if len(found) > 1 and isinstance(error, _OF_SOME):
                    middle = len(found) // 2
                    parts += [found[middle:], found[:middle]]
                    await self._pause()
                else:
                    refused += len(found)
            if refused:
                self._count("no_route", refused, exchange)

    async def _write(self, exchange: Exchange, frames: list[_Frame]) -> bool:
        """Write one batch. False: a stream was removed while the batch waited for room, so nothing is appended; the
        caller makes the stream again. Raises any other refusal. Messages that `full drop-new` discards count as
        dropped."""
        queued = Counter(queue for frame in frames for queue in frame.queues)
        dropped = {queue: lost for queue, count in queued.items() if (lost := _dropped(exchange, queue, count))}
        waits = False
        try:
            handle = self._handle(exchange)
            step = handle.write(b"".join(frame.data for frame in frames))
            waits = isinstance(step, Wait) and not step.settled
            await self._await_step(step)
        except MqfsError as error:
            if waits and isinstance(error, NotFound):
                return False
            if not isinstance(error, (StreamFull, TooLong)):
                self.close()
            raise
        if handle.pending is None:  # no answer with a sequence: the batch was discarded
            self._count("dropped", len(frames), exchange)
            return True
        self._count("routed", len(frames), exchange)
        for queue, lost in dropped.items():
            queue.dropped_to += lost
            self._count("dropped", lost, exchange)
        return True

    def _handle(self, exchange: Exchange) -> Any:
        handle = self._handles.get(exchange)
        if handle is None:
            node = self._tree.walk(self._user, exchange.group, ".batch")
            handle = self._handles[exchange] = self._tree.open(self._user, node, os.O_WRONLY)
        return handle

    def close(self) -> None:
        for handle in self._handles.values():
            handle.close()
        self._handles.clear()


def _most(exchange: Exchange, queues: Iterable[Queue]) -> int:
    """Return the most messages of one batch. A batch above the backlog of a blocking queue would never have room, and
    `full drop-new` would discard a whole batch for one message."""
    settings = exchange.group.settings
    if settings.full == "drop-new" and (settings.depth.messages or settings.depth.size):
        return 1
    blocking = (queue.options.backlog for queue in queues if queue.options.policy == "block" and queue.options.backlog)
    return min((max(backlog // 2, 1) for backlog in blocking), default=limits.FQ_BATCH)


def _dropped(exchange: Exchange, queue: Queue, count: int) -> int:
    """Return how many of `count` messages the queue will drop."""
    consumer = exchange.consumer(queue)
    if consumer is None or not queue.options.backlog or queue.options.policy == "block":
        return 0
    return min(count, max(0, int(consumer.backlog.size()) + count - queue.options.backlog))
