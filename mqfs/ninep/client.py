"""A 9P client for trio programs.

Owns one stream and the tasks that carry its bytes; what is said over it is caller.py's. Any number of tasks may use one
client. A read that is cancelled is flushed, and waits for the Rflush: a message that came before it is kept for the
next read of the same file.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

import trio

from mqfs import limits
from mqfs.errors import BadFrame, MqfsError
from mqfs.net.address import Address, UnixAddress, explain_failure, parse_address
from mqfs.ninep import caller
from mqfs.ninep.blocking import flags_of
from mqfs.ninep.caller import Caller, Channel, Procedure
from mqfs.ninep.dialect import Dialect
from mqfs.ninep.messages import Fcall
from mqfs.types import Stat

T = TypeVar("T")

RECEIVE_BYTES = 65_536


@asynccontextmanager
async def connect(
    address: Address | str,
    *,
    user: str = "",
    aname: str = "",
    dialect: Dialect = Dialect.PLAIN,
    msize: int = limits.MSIZE_DEFAULT,
    token: str = "",
) -> AsyncIterator[Client]:
    """A client attached to the tree at an address, for as long as the block lasts. `token`: see blocking.py."""
    where = parse_address(address) if isinstance(address, str) else address
    try:
        stream = await _dialled(where)
    except OSError as error:
        raise explain_failure(where, error) from None
    try:
        async with stream, trio.open_nursery() as nursery:
            client = Client(stream, Caller(dialect, msize))
            nursery.start_soon(client.send_forever)
            nursery.start_soon(client.receive_forever)
            await client.do(client.caller.connect(user, aname, "" if isinstance(where, UnixAddress) else token))
            yield client
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        if len(group.exceptions) > 1:
            raise
        raise group.exceptions[0] from None  # the nursery's wrapping says nothing to the caller


async def _dialled(where: Address) -> trio.SocketStream:
    if not isinstance(where, UnixAddress):
        return await trio.open_tcp_stream(where.host, where.port)
    sock = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
    try:
        await sock.connect(where.path)
    except BaseException:
        sock.close()
        raise
    return trio.SocketStream(sock)


class _Slot:
    """A request that is unanswered, and the task that waits for its reply."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.reply: Fcall | None = None

    def settle(self, reply: Fcall | None) -> None:
        self.reply = reply
        self.done.set()

    def answer(self) -> Fcall:
        if self.reply is None:
            raise ConnectionError("the server closed the connection")
        return self.reply


class Client:
    """One attached connection; `connect` makes it."""

    def __init__(self, stream: trio.SocketStream, machine: Caller) -> None:
        self.caller = machine
        self._stream = stream
        self._slots: dict[int, _Slot] = {}
        self._queued = trio.Event()
        self._lost = False

    async def send_forever(self) -> None:
        """Carry requests out: those of one moment in one send."""
        while not self._lost:
            await self._queued.wait()
            self._queued = trio.Event()
            try:
                await self._stream.send_all(self.caller.take())
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self._end()

    async def receive_forever(self) -> None:
        """Bring replies to those who wait for them, until the connection ends."""
        try:
            while data := await self._stream.receive_some(max(RECEIVE_BYTES, self.caller.missing)):
                for tag, reply in self.caller.receive(data):
                    self._slots.pop(tag).settle(reply)
        except (trio.BrokenResourceError, trio.ClosedResourceError, BadFrame):
            pass
        finally:
            self._end()

    def _end(self) -> None:
        self._lost = True
        slots, self._slots = self._slots, {}
        for slot in slots.values():
            slot.settle(None)

    def _ask(self, tag: int) -> _Slot:
        if self._lost:
            raise ConnectionError("the server closed the connection")
        slot = self._slots[tag] = _Slot()
        self._queued.set()
        return slot

    async def do(self, procedure: Procedure[T], channel: Channel | None = None) -> T:
        """Drive a procedure of the client machine. With a channel its requests can be cancelled: they are flushed."""
        try:
            request = next(procedure)
            while True:
                try:
                    reply = caller.expect(request, await self._call(request, channel))
                except MqfsError as error:
                    request = procedure.throw(error)
                else:
                    request = procedure.send(reply)
        except StopIteration as done:
            value: T = done.value
            return value

    async def _call(self, request: Fcall, channel: Channel | None) -> Fcall:
        tag = self.caller.call(request)
        slot = self._ask(tag)
        try:
            with trio.CancelScope(shield=channel is None):
                await slot.done.wait()
        except trio.Cancelled:
            assert channel is not None
            await self._flush(tag, slot, channel)
            raise
        return slot.answer()

    async def _flush(self, tag: int, slot: _Slot, channel: Channel) -> None:
        if self._lost or slot.reply is not None:
            if slot.reply is not None:
                channel.keep(slot.reply)
            return
        flushed = self._ask(self.caller.flush(tag))
        with trio.CancelScope(shield=True):
            await flushed.done.wait()
        self._slots.pop(tag, None)
        if slot.reply is not None:
            channel.keep(slot.reply)

    # ------------------------------------------------------------ files

    async def open(self, path: str, mode: str = "r", *, nonblocking: bool = False) -> File:
        return File(self, await self.do(self.caller.open(path, flags_of(mode), nonblocking=nonblocking)))

    async def create(self, path: str, mode: str = "w", permissions: int = 0o666) -> File:
        return File(self, await self.do(self.caller.create(path, flags_of(mode), permissions)))

    async def mkdir(self, path: str, permissions: int = 0o777) -> None:
        await self.do(self.caller.mkdir(path, permissions))

    async def remove(self, path: str) -> None:
        await self.do(self.caller.remove(path))

    async def rename(self, path: str, name: str) -> None:
        """Another name in the same group."""
        await self.do(self.caller.rename(path, name))

    async def chmod(self, path: str, permissions: int) -> None:
        await self.do(self.caller.chmod(path, permissions))

    async def stat(self, path: str) -> Stat:
        return await self.do(self.caller.stat(path))

    async def list(self, path: str = "") -> list[str]:
        return await self.do(self.caller.names(path))


class File(trio.abc.AsyncResource):
    """An open file: each read is one message (or a part), each write is one message."""

    def __init__(self, client: Client, channel: Channel) -> None:
        self._client, self.channel = client, channel
        self._closed = False

    async def read(self, count: int = limits.MESSAGE_BYTES) -> bytes:
        """One message; b"" at an end. Cancelling it loses nothing."""
        return await self._client.do(self.channel.read(count), self.channel)

    async def write(self, data: bytes) -> int:
        """One message; TooLong where it does not fit. Cancelling it leaves open whether it was written."""
        return await self._client.do(self.channel.write(data), self.channel)

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            await self._client.do(self._client.caller.clunk(self.channel.fid))
        except ConnectionError:
            pass
