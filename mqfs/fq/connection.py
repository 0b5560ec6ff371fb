"""One client of fq: its command connection, and the data connection that its key pairs with it.

If one of them ends, so does the other. This module also sends heartbeats, and takes turns in the fair queue of the
user. While a message waits for room in a queue, only its data connection is not read.
"""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Callable

import attrs
import trio

from mqfs import limits
from mqfs.errors import BadCommand, MqfsError, OverLimit
from mqfs.fq import codec
from mqfs.fq.codec import HOP_BYTES, CommandParser, Malformed, Message, MessageParser
from mqfs.fq.delivery import Delivery
from mqfs.fq.exchanges import BrokerCounts, Exchange, Exchanges
from mqfs.fq.publishing import Publisher, address, origin
from mqfs.fq.queues import Queue
from mqfs.model import Step, User, Wait
from mqfs.net.peer import Peer
from mqfs.serving.await_step import await_step
from mqfs.serving.fairness import FairQueue, TimeSlice
from mqfs.serving.stream import Gone, SocketStream

log = logging.getLogger("mqfs.fq")
LEAST_BEAT_S = 0.01
SMALL_BYTES = 65_536  # up to this size an incomplete message is not charged to its user's memory


@attrs.define(eq=False)
class Client:
    """A client. `name`: the user name that it authenticated with, the sender of its messages. `node`: our address in
    hops."""

    exchanges: Exchanges
    peer: Peer
    user: User
    name: bytes
    queue: Queue
    fair_queue: FairQueue
    node: bytes
    port: int = 0
    is_peer: bool = False
    counts: BrokerCounts = attrs.Factory(BrokerCounts)
    delivery: Delivery | None = None
    scope: trio.CancelScope = attrs.Factory(trio.CancelScope)  # of its command connection
    data_scope: trio.CancelScope = attrs.Factory(trio.CancelScope)
    _data_ended: trio.Event = attrs.Factory(trio.Event)
    _last_sign: float = 0.0
    _beat_s: float = 0.0  # period of heartbeats; 0: none requested
    _held_commands: int = 0  # bytes of commands charged to its user's memory
    _pause: trio.CancelScope = attrs.Factory(trio.CancelScope)  # of the sleep before the next heartbeat
    _writing: trio.Lock = attrs.Factory(trio.Lock)

    @property
    def address(self) -> bytes:
        return address(self.peer.account)

    def on_bound(self, exchange: Exchange) -> None:
        if self.delivery is not None:
            self.delivery.add(exchange)

    # ------------------------------------------------------------ commands

    async def serve_commands(self, channel: SocketStream, parser: CommandParser) -> None:
        """Answer commands in order until it disconnects. Raises Malformed, Gone, trio.TooSlowError."""
        with self.scope:
            async with trio.open_nursery() as nursery:
                self._last_sign = trio.current_time()
                nursery.start_soon(self._beat, channel)
                time_slice = TimeSlice(self.fair_queue)
                try:
                    await self._answer_commands(channel, parser, time_slice)
                finally:
                    time_slice.pause()  # else the user's other connections would wait for ever
                    self._held_commands = self._hold(self._held_commands, 0)
                nursery.cancel_scope.cancel()

    async def _answer_commands(self, channel: SocketStream, parser: CommandParser, time_slice: TimeSlice) -> None:
        """Execute commands in the time slices of the user; unparsed bytes are charged to the user's memory."""
        channel.before_wait = time_slice.pause
        data = b""
        while True:
            for command in parser.receive(data):
                self._held_commands = self._hold(self._held_commands, _large(parser.held))
                await time_slice.start()
                if waits := isinstance(command, codec.Bind | codec.Unbind):
                    time_slice.pause()  # other connections run while it waits for the disk
                await self._perform(command, channel)
                await time_slice.stop(done=not waits)
            self._held_commands = self._hold(self._held_commands, _large(parser.held))
            deadline = self._last_sign + limits.FQ_BEATS * self._beat_s if self._beat_s else math.inf
            if not (data := await channel.receive(deadline)):
                return
            self._last_sign = trio.current_time()
            await trio.lowlevel.checkpoint()

    async def _perform(self, command: codec.Command, channel: SocketStream) -> None:
        if isinstance(command, codec.BeatRequest):
            self._beat_s = command.period_ms and max(command.period_ms / 1e3, LEAST_BEAT_S)
            self._pause.cancel()
        elif isinstance(command, codec.Bind):
            await self._answer(channel, codec.bound(await self._bind(command)))
        elif isinstance(command, codec.Unbind):
            await self._answer(channel, codec.unbound(await self._unbind(command)))
        elif isinstance(command, codec.Status):
            await self._answer(channel, codec.counts(self.counts.items()))

    async def _answer(self, channel: SocketStream, data: bytes) -> None:
        async with self._writing:
            await channel.send(data, limits.HTTP_SEND_S)

    async def _beat(self, channel: SocketStream) -> None:
        """Send a heartbeat in each period that the client requested."""
        sent = trio.current_time()
        while True:
            with trio.CancelScope() as self._pause:
                await trio.sleep_until(sent + self._beat_s if self._beat_s else math.inf)
            if self._pause.cancelled_caught:
                continue  # another period was requested
            try:
                await self._answer(channel, codec.BEAT)
            except Gone:
                self.scope.cancel()
            sent = trio.current_time()

    async def _bind(self, command: codec.Bind) -> int:
        permanent = command.flags & codec.FLAG_PERMANENT == codec.FLAG_PERMANENT
        try:
            return await self.exchanges.bind(self.user, self.queue, command.exchange, command.program, permanent)
        except MqfsError as error:
            level = logging.INFO if isinstance(error, BadCommand) else logging.WARNING
            log.log(level, "%s: bind of %r refused: %s", self.peer.where, command.exchange, error)
            return codec.ILLEGAL

    async def _unbind(self, command: codec.Unbind) -> int:
        try:
            await self.exchanges.unbind(self.user, self.queue, command.exchange, command.route)
        except MqfsError as error:
            log.info("%s: unbind of %r refused: %s", self.peer.where, command.exchange, error)
            return codec.ILLEGAL
        return command.route

    # ------------------------------------------------------------ data

    async def serve_data(self, channel: SocketStream, data: bytes, *, relayed: bool) -> None:
        """Receive the client's messages, and deliver those of its queue, until it disconnects. Raises Malformed,
        Gone."""
        self.is_peer, channel.unread = relayed, data
        if channel.socket.family != socket.AF_UNIX:
            channel.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limits.FQ_UNACKED_S * 1_000)
        delivery = self.delivery = Delivery(
            self.exchanges,
            self.user,
            self.queue,
            channel,
            self.counts,
            self.node,
            self.fair_queue,
            self.scope.cancel,  # the data connection is still read to its end
        )
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(delivery.run)
                await self._receive(channel, MessageParser(relayed=relayed))
                delivery.end(clean=not channel.failed)
                nursery.cancel_scope.cancel()
        finally:
            delivery.end(clean=False)
            self._data_ended.set()
            self.scope.cancel()

    async def end_delivery(self) -> None:
        """Stop delivery after the command connection ended. Wait a while for the end of the data connection, which
        shows what the client has read."""
        delivery = self.delivery
        if delivery is not None:
            delivery.stop()
            with trio.move_on_after(limits.FQ_PART_S):
                await self._data_ended.wait()
            delivery.end(clean=False)

    async def _receive(self, channel: SocketStream, parser: MessageParser) -> None:
        """Publish the client's messages until the end of the connection, or, if its command connection has ended, until
        a silence."""
        time_slice = TimeSlice(self.fair_queue)
        channel.before_wait = time_slice.pause

        async def await_room(step: Step[int]) -> int:
            if isinstance(step, Wait):
                time_slice.pause()
            return await await_step(step)

        async def pause() -> None:
            await time_slice.stop()
            await trio.lowlevel.checkpoint()
            await time_slice.start()

        publisher = Publisher(self.exchanges, self.user, self.counts, self.node, await_room, pause)
        origin_of = self._origins(relayed=self.is_peer)
        held = 0
        try:
            while data := await self._next(channel):
                await time_slice.start()
                messages = parser.receive(data)
                if self.is_peer:
                    messages = self._take_confirmations(messages)
                if parser.held > SMALL_BYTES or held:
                    held = self._hold(held, _large(parser.held))
                self._count_too_large(parser)
                await publisher.publish(messages, origin_of)
                if parser.malformed is not None:
                    raise parser.malformed
                await time_slice.stop()
                await trio.lowlevel.checkpoint()
        finally:
            time_slice.pause()
            publisher.close()
            self._hold(held, 0)

    def _take_confirmations(self, messages: list[Message]) -> list[Message]:
        """Handle the peer's acknowledgements, and return the other messages."""
        for message in messages:
            if message.exchange == codec.CONFIRM and self.delivery is not None:
                self.delivery.confirm(int.from_bytes(message.payload[:8]))
        return [message for message in messages if message.exchange != codec.CONFIRM]

    async def _next(self, channel: SocketStream) -> bytes:
        """Return received bytes; empty at the end, or after a silence if the command connection has ended."""
        while True:
            ended = self.scope.cancel_called
            try:
                return await channel.receive(trio.current_time() + limits.FQ_AWAY_S)
            except trio.TooSlowError:
                if ended:
                    return b""

    def _hold(self, before: int, after: int) -> int:
        """Change the bytes charged to the user's memory, and return `after`. Raises Malformed if there are too many."""
        try:
            return self.exchanges.tree.memory.change(self.peer.account, before, after)
        except OverLimit as error:
            raise Malformed(str(error)) from None

    def _count_too_large(self, parser: MessageParser) -> None:
        if parser.too_large:
            for counts in (self.counts, self.exchanges.counts):
                counts.size_dropped += parser.too_large
            parser.too_large = 0

    def _origins(self, *, relayed: bool) -> Callable[[Message], bytes | None]:
        """Return a function that encodes the origin of a message as headers. It returns None for a message that passed
        through this broker before, or has too many hops. The last hop does not count, as it is its client's, which may
        be on the host of this broker."""
        if not relayed:
            mine = origin(self.name, self.node + self.address)
            return lambda message: mine

        def of(message: Message) -> bytes | None:
            steps = [message.hops[at : at + HOP_BYTES] for at in range(0, len(message.hops), HOP_BYTES)]
            if self.node in (steps[:-1] or steps) or len(steps) >= limits.FQ_HOPS:
                return None
            return origin(message.sender or self.name, self.node + message.hops)

        return of


def _large(size: int) -> int:
    """Return the bytes to charge to a user: few bytes are covered by the connection itself."""
    return size if size > SMALL_BYTES else 0
