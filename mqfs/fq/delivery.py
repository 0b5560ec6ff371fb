"""Delivery to one client of fq: messages are claimed, sent, and acked when the client's kernel has them.

The protocol has no acknowledgement. A message is acked some time after the peer's kernel has its bytes: the last
limits.FQ_HELD messages stay claimed for limits.FQ_HELD_S. A client that has read everything ends its connection by FIN:
then they are acked. A client that is killed with unread bytes resets the connection: then they are redelivered.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import struct
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import cast

import attrs
import trio

from mqfs import limits
from mqfs.engine.files.consumer import ConsumerHandle
from mqfs.errors import BadCommand, MqfsError, OverQuota, Stale, StreamFull
from mqfs.fq.codec import HOP_BYTES, ID_BYTES, NAME_BYTES, hop_list, name, payload
from mqfs.fq.exchanges import BrokerCounts, Exchange, Exchanges
from mqfs.fq.publishing import HOPS, ID, ID_HEAD, SENDER, address
from mqfs.fq.queues import Queue
from mqfs.model import Record, User, Wait
from mqfs.net import identity
from mqfs.net.identity import NotAnswered
from mqfs.net.sockets import unsent
from mqfs.records import headers
from mqfs.serving.await_step import answered, await_step
from mqfs.serving.fairness import FairQueue, TimeSlice
from mqfs.serving.stream import Gone, SocketStream
from mqfs.syntax.duration import parse_number
from mqfs.syntax.names import cache_short, text_of

log = logging.getLogger("mqfs.fq")
WHOLE = 1 << 30  # size of a read that returns a whole message
_NUMBERS = struct.Struct(">QQ")
_ID_TAIL = len(ID_HEAD) + 2 * ID_BYTES
_ORIGINS, _ORIGIN_BYTES = 1_024, 1_024  # cached origins of messages, and the longest: it has 32 hops
_ACKED_AT_ONCE = 4_096  # sequences in one command
_QUOTA_S, _AGAIN_S = 0.1, 1.0
_NO_SENDER = b"mqfs"  # the sender of messages without one


Late = deque[tuple[Record, bytes]]  # claimed messages of one sender whose name is not known yet


class QueueReader:
    """The reader of a client's queue in the group of one exchange."""

    def __init__(
        self, exchange: Exchange, handle: ConsumerHandle, counts: BrokerCounts, node: bytes, fair_queue: FairQueue
    ) -> None:
        self.exchange, self.handle, self._counts, self._node = exchange, handle, counts, node
        self.time_slice = TimeSlice(fair_queue)
        self._named, self._head = exchange.group.name, name(exchange.name)
        self._routes: dict[str, bytes] = {}
        self.late: dict[str, Late] = {}  # by the number of the sender
        self.caught_up = trio.Event()
        self.skipped: list[int] = []  # claimed sequences that are not for the client
        self.unreadable: list[int] = []  # claimed sequences of messages that no client can read

    def encode(self, record: Record, body: bytes, stream: str) -> bytes | None:
        """Encode a message of a stream as a broker sends it; None: its route is too long for any client. Raises
        NotAnswered."""
        route = self._routes.get(stream)
        if route is None:
            if len(text := text_of(stream)) > NAME_BYTES:
                return None
            if len(self._routes) >= limits.NAMES_SENT:  # perhaps most are of removed streams
                self._routes.clear()
            route = self._routes[stream] = name(text)
        if self._named != self.exchange.group.name:
            self._named, self._head = self.exchange.group.name, name(self.exchange.name)
        id, tail = _identity(record.headers)
        if not tail:
            tail = name(_writer(record.headers).encode()[:NAME_BYTES]) + hop_list(2 * self._node)
        if not id:
            id = _NUMBERS.pack(self.exchange.group.number, record.sequence)
        self._counts.octets_out += len(body)
        return b"".join((self._head, route, id, tail, payload(body)))

    @property
    def is_over(self) -> bool:
        """Whether the consumer was removed, or the connection has ended."""
        return self.handle.closed or self.handle.has_ended

    @property
    def is_late(self) -> bool:
        """Whether to claim no more messages before some of `late` are sent."""
        bodies = [body for late in self.late.values() for _, body in late]
        return len(bodies) >= limits.FQ_SEND_MESSAGES or sum(map(len, bodies)) >= limits.FQ_SEND_BYTES

    def settle(self, verb: str, sequences: list[int]) -> None:
        """`ack` or `release` those of the sequences that are still claimed."""
        claims = self.handle.claims
        mine = [str(sequence) for sequence in sequences if sequence in claims]
        for at in range(0, len(mine), _ACKED_AT_ONCE):
            self.handle.write(f"{verb} {' '.join(mine[at : at + _ACKED_AT_ONCE])}\n".encode())

    def settle_unsent(self) -> None:
        """Ack the skipped messages, and make the unreadable ones dead letters. Raises MqfsError; unsettled messages,
        also dead letters without room, are left for the next call."""
        self.settle("ack", self.skipped)
        self.skipped.clear()
        with contextlib.suppress(StreamFull):
            while self.unreadable:
                if (sequence := self.unreadable[-1]) in self.handle.claims:
                    self.handle.write(f"dead {sequence} 'a route of more than {NAME_BYTES} bytes'\n".encode())
                self.unreadable.pop()


def _identity(head: bytes) -> tuple[bytes, bytes]:
    """Return the id, and sender with hops as on the wire, from the headers of a message; each empty if not given."""
    if head[-_ID_TAIL : -2 * ID_BYTES] == ID_HEAD:  # the layout that this front end writes
        return _unhex(head[-2 * ID_BYTES :]), _origin(head[:-_ID_TAIL])
    return (_unhex(headers.decode(head).get(ID, "").encode()), _origin(head)) if head else (b"", b"")


@cache_short(_ORIGINS, _ORIGIN_BYTES)
def _origin(head: bytes) -> bytes:
    """Encode sender and hops from headers as on the wire; empty without a sender. An empty sender, which clients cannot
    read, is replaced."""
    given = headers.decode(head)
    if SENDER not in given:
        return b""
    sender = text_of(given[SENDER])[:NAME_BYTES] or _NO_SENDER
    hops = b"".join(map(address, given.get(HOPS, "").split(",")))[: limits.FQ_HOPS * HOP_BYTES]
    return name(sender) + hop_list(hops)


def _unhex(text: bytes) -> bytes:
    """Decode an id; empty if it is invalid, as anyone may write headers."""
    try:
        id = bytes.fromhex(text.decode())
    except ValueError:
        return b""
    return id if len(id) == ID_BYTES else b""


def _sender(head: bytes) -> str:
    """Return the number, as text, of the user who published a message; "" without headers."""
    return headers.decode(head).get(headers.SENDER, "") if head else ""


def _writer(head: bytes) -> str:
    """Return the name of the user who published a message. Raises NotAnswered."""
    try:
        return identity.user_name(parse_number(_sender(head)))
    except BadCommand:
        return _NO_SENDER.decode()


@attrs.frozen
class Sent:
    """Messages of one source that were sent together. `end`: bytes sent on the connection up to their end; `count`:
    messages sent up to the last of them."""

    end: int
    count: int
    source: QueueReader
    sequences: list[int]
    at: float = 0.0  # when the peer's kernel was seen to have them


class Delivery:
    """The delivery to one client over its data connection. `on_unbound` is called when the last exchange of its queue
    was removed: the protocol cannot report that, so the caller ends the connection."""

    def __init__(
        self,
        exchanges: Exchanges,
        user: User,
        queue: Queue,
        channel: SocketStream,
        counts: BrokerCounts,
        node: bytes,
        fair_queue: FairQueue,
        on_unbound: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_unbound = on_unbound
        self._exchanges, self._user, self._queue, self._channel = exchanges, user, queue, channel
        self._counts, self._node, self._fair_queue = counts, node, fair_queue
        self._sources: dict[Exchange, QueueReader] = {}
        self._sending = trio.Lock()
        self._written = self._count = 0  # bytes, messages
        self._confirming = False  # whether the client acks messages itself
        self._window: deque[Sent] = deque()  # messages that the peer's kernel may not have
        self._in_window = 0  # their number
        self._held: deque[Sent] = deque()  # messages that the peer's kernel has, still claimed
        self._in_held = 0  # their number
        self._moved = trio.Event()
        self._sent = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._scope = trio.CancelScope()
        self._ended = False

    @property
    def _hold(self) -> int:
        """The number of messages that may stay claimed. They count as waiting, so with a small backlog none."""
        backlog = self._queue.options.backlog
        return min(limits.FQ_HELD, backlog // 8) if backlog else limits.FQ_HELD

    # ------------------------------------------------------------ start and end

    async def run(self) -> None:
        """Deliver until it is stopped."""
        with self._scope:
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self._confirm)
                for exchange in self._exchanges.bound(self._queue):
                    self.add(exchange)

    def stop(self) -> None:
        """Stop claiming messages."""
        self._scope.cancel()

    def add(self, exchange: Exchange) -> None:
        """Deliver from an exchange that the queue is bound to, if it is not done already."""
        source, node = self._sources.get(exchange), exchange.consumer(self._queue)
        if self._nursery is None or self._ended or node is None or (source and not source.handle.has_ended):
            return
        try:
            self._exchanges.require(self._user, exchange, self._queue)
            handle = cast(ConsumerHandle, self._exchanges.tree.open(self._user, node, os.O_RDWR))
        except MqfsError as error:
            exchange.group.refuse(self._user, self._queue.consumer, str(error))
            log.warning("queue %s of %s: %s", self._queue.consumer, exchange.group.name, error)
            return
        source = self._sources[exchange] = QueueReader(exchange, handle, self._counts, self._node, self._fair_queue)
        with contextlib.suppress(RuntimeError):  # a closed nursery: the connection ends, and `end` closes the source
            self._nursery.start_soon(self._pump, source)

    def end(self, clean: bool) -> None:
        """Settle all claims after the connection ended, once. `clean`: the client had read everything that its kernel
        had, so these messages are acked; all others are released."""
        if self._ended:
            return
        self._ended = True
        self.stop()
        if clean:
            self._look()
            self._settle(0)
        for source in self._sources.values():
            if source.handle.closed:
                continue
            try:
                source.settle("release", list(source.handle.claims))
            except MqfsError as error:
                log.warning("queue %s: %s", self._queue.consumer, error)
            source.handle.close()
        self._sources.clear()

    # ------------------------------------------------------------ sending

    async def _pump(self, source: QueueReader) -> None:
        """Send the messages of one source until its consumer is removed."""
        try:
            while not source.is_over:
                try:
                    while source.is_late:
                        source.caught_up = trio.Event()
                        await source.caught_up.wait()
                    gathered = await self._gather(source)
                    await source.time_slice.stop()
                    await self._send(source, *gathered)
                    source.settle_unsent()
                except MqfsError as error:
                    source.time_slice.pause()
                    if isinstance(error, OverQuota):
                        await trio.sleep(_QUOTA_S)
                    else:
                        self._log(source, error)
                        await trio.sleep(_AGAIN_S)
            was_bound = source.exchange.group.removed and source.exchange.of(self._queue)
            if was_bound and not self._exchanges.bound(self._queue):
                log.info("queue %s: its last exchange was removed, client ended", self._queue.consumer)
                self._on_unbound()
        except (Gone, OSError):
            pass  # the end of the connection is seen where it is read
        finally:
            source.time_slice.pause()  # else other connections of the user would wait for it

    def _log(self, source: QueueReader, error: MqfsError) -> None:
        log.warning("queue %s of %s: %s", self._queue.consumer, source.exchange.group.name, error)

    async def _gather(self, source: QueueReader) -> tuple[bytes, list[int]]:
        """Claim the present messages; wait for the first only. Returns the bytes and sequences to send. Raises
        MqfsError, only if nothing was claimed."""
        handle, data, sequences, claimed, size = source.handle, bytearray(), list[int](), 0, 0

        def take(record: Record, body: bytes) -> None:
            nonlocal claimed, size
            claimed, size = claimed + 1, size + len(body)
            if piece := self._encode_known(source, record, body):
                data.extend(piece)
                sequences.append(record.sequence)
                size += len(piece) - len(body)

        try:
            while claimed < limits.FQ_SEND_MESSAGES and size < limits.FQ_SEND_BYTES:
                step = handle.read(WHOLE)
                if isinstance(step, Wait) and not step.settled:
                    if claimed and step.cancel():
                        break  # also while the consumer still searches: claimed messages are sent first
                    source.time_slice.pause()
                body = await await_step(step)
                if not claimed:
                    await source.time_slice.start()
                shown = handle.shown
                if shown is None or shown[0].sequence not in handle.claims:
                    break  # the consumer was removed, or the server stops
                take(shown[0], body)
                most = limits.FQ_SEND_MESSAGES - claimed, limits.FQ_SEND_BYTES - size
                for record in handle.claim_behind(*most):
                    take(record, record.body)
        except MqfsError as error:
            if not claimed:
                raise
            if not isinstance(error, OverQuota):
                self._log(source, error)
        return bytes(data), sequences

    def _encode_known(self, source: QueueReader, record: Record, body: bytes) -> bytes | None:
        """Encode a message as `_encode` does. If its sender's name is not known yet, it is sent later, as are all later
        messages of this sender, to keep their order; then None."""
        late = source.late.get(_sender(record.headers)) if source.late else None
        if late is None:
            try:
                return self._encode(source, record, body)
            except NotAnswered:
                late = source.late[_sender(record.headers)] = deque()
                assert self._nursery is not None
                self._nursery.start_soon(self._send_late, source, _sender(record.headers), late)
        late.append((record, body))
        return None

    async def _send_late(self, source: QueueReader, sender: str, late: Late) -> None:
        """Send the messages that wait for the name of their sender, in order. Clients store the name, so the number
        cannot replace it."""
        time_slice = TimeSlice(self._fair_queue)
        try:
            while late and not source.is_over:
                record, body = late[0]
                try:
                    step = answered(partial(self._encode, source, record, body))
                    if isinstance(step, Wait):
                        time_slice.pause()
                    piece = await await_step(step)
                    if isinstance(step, Wait):
                        await time_slice.start()
                except MqfsError as error:
                    time_slice.pause()
                    self._log(source, error)
                    await trio.sleep(_AGAIN_S)
                    continue
                await time_slice.stop()
                if piece and record.sequence in source.handle.claims:
                    await self._send(source, piece, [record.sequence])
                late.popleft()
                source.caught_up.set()
            del source.late[sender]
            source.caught_up.set()
        except (Gone, OSError):
            pass  # as in `_pump`
        finally:
            time_slice.pause()

    def _encode(self, source: QueueReader, record: Record, body: bytes) -> bytes | None:
        """Encode a claimed message; None: it is not for the client, or not readable by it. Raises NotAnswered."""
        exchange = source.exchange
        stream = exchange.group.numbers.get(record.stream)
        if stream is None or (  # it was removed after the claim
            record.sequence < exchange.since.get(self._queue, 0)
            and not exchange.selects(self._queue, stream.name, record.body, record.sequence)
        ):
            source.skipped.append(record.sequence)
            return None
        piece = source.encode(record, body, stream.name)
        if piece is None:
            source.unreadable.append(record.sequence)
        return piece

    async def _send(self, source: QueueReader, data: bytes, sequences: list[int]) -> None:
        if not sequences:
            await trio.lowlevel.checkpoint()
            return
        async with self._sending:
            while self._in_window >= limits.FQ_WINDOW:
                self._moved = trio.Event()
                await self._moved.wait()
            end = self._written + len(data)
            self._count += len(sequences)
            self._window.append(Sent(end, self._count, source, sequences))  # before the send: a peer may ack at once
            self._in_window += len(sequences)
            await self._channel.send(data)
            self._written = end
            self._sent.set()
        self._counts.msgs_out += len(sequences)
        if self._in_window >= self._hold:
            self._look()
            self._settle(self._hold)
        await trio.lowlevel.checkpoint()

    # ------------------------------------------------------------ acknowledging

    async def _confirm(self) -> None:
        """Ack messages that the peer's kernel has had for FQ_HELD_S."""
        while True:
            if not (self._window or self._held):
                self._sent = trio.Event()
                await self._sent.wait()
            await trio.sleep(limits.FQ_CONFIRM_S)
            self._look()
            self._settle(self._hold)

    def _look(self) -> None:
        """Move the messages that the peer's kernel has from `_window` to `_held`: all sent bytes except those that our
        kernel keeps. TLS makes these more bytes, so fewer messages count, which is safe."""
        if not self._window or self._confirming:
            return
        try:
            kept = unsent(self._channel)
        except OSError:
            return
        done, now = self._written - kept, trio.current_time()
        while self._window and self._window[0].end <= done:
            sent = self._window.popleft()
            self._in_window -= len(sent.sequences)
            self._held.append(attrs.evolve(sent, at=now))
            self._in_held += len(sent.sequences)
        self._moved.set()

    def confirm(self, count: int) -> None:
        """Ack the first `count` messages, as the client has acked them. From now on only its own acks count."""
        self._confirming = True
        while self._window:
            sent = self._window[0]
            safe = len(sent.sequences) - max(sent.count - count, 0)  # how many of these are acked
            if safe <= 0:
                break
            self._held.append(attrs.evolve(sent, sequences=sent.sequences[:safe], at=-math.inf))
            self._in_held += safe
            self._in_window -= safe
            self._window[0] = attrs.evolve(sent, sequences=sent.sequences[safe:])
            if sent.count <= count:
                self._window.popleft()
        self._settle(0)
        self._moved.set()

    def _settle(self, most: int) -> None:
        """Ack the oldest held messages down to `most`, and those that were held for FQ_HELD_S."""
        since = trio.current_time() - limits.FQ_HELD_S
        due: dict[QueueReader, list[int]] = {}
        while self._held and (self._in_held > most or self._held[0].at <= since):
            sent = self._held.popleft()
            self._in_held -= len(sent.sequences)
            due.setdefault(sent.source, []).extend(sent.sequences)
        for source, sequences in due.items():
            if not source.handle.closed:
                try:
                    source.settle("ack", sequences)
                except Stale:
                    pass  # the queue was set back to a checkpoint
                except MqfsError as error:
                    log.warning("queue %s: %s", self._queue.consumer, error)
