"""The bytes of one connection: the only place where they are received and sent."""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
from collections.abc import Awaitable, Callable

import trio

from mqfs import limits
from mqfs.net.sockets import let_client_run
from mqfs.net.tls import DescriptorCalls, TlsCalls

RECEIVE_BYTES = 65_536


class Gone(Exception):
    """Raised when the client has disconnected, or accepted no bytes for too long."""


class SocketStream:
    """A connected socket that never blocks. `readable` waits for input. `tls`: through TLS, after the handshake."""

    def __init__(
        self, sock: socket.socket, readable: Callable[[int], Awaitable[None]], tls: TlsCalls | None = None
    ) -> None:
        self.socket, self._descriptor, self._tls = sock, sock.fileno(), tls
        self._readable = readable
        self.before_wait: Callable[[], object] = bool  # called before each wait
        self.unread = b""  # received, and to be returned again
        self.failed = False  # the stream ended without an end announced by the client
        calls: DescriptorCalls = tls or os
        self._read, self._write = calls.read, calls.write
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, limits.HTTP_SEND_BUFFER_BYTES)

    @property
    def encrypted(self) -> bool:
        return self._tls is not None

    def fileno(self) -> int:
        return self._descriptor

    async def receive(self, deadline: float) -> bytes:
        """Return the received bytes; b"" at the end. Raises trio.TooSlowError at the deadline."""
        if self.unread:
            data, self.unread = self.unread, b""
            return data
        try:
            try:
                return self._read(self._descriptor, RECEIVE_BYTES)
            except BlockingIOError:
                self.before_wait()
            with trio.CancelScope(deadline=deadline):
                while True:
                    await self._readable(self._descriptor)
                    try:
                        return self._read(self._descriptor, RECEIVE_BYTES)
                    except BlockingIOError:
                        continue
        except OSError:
            self.failed = True
            return b""
        raise trio.TooSlowError

    async def receive_soon(self, seconds: float) -> bytes:
        """Receive from a client that is about to send: let it run before waiting for it."""
        if not self.unread:
            try:
                return self._read(self._descriptor, RECEIVE_BYTES)
            except BlockingIOError:
                let_client_run()
            except OSError:
                self.failed = True
                return b""
        return await self.receive(trio.current_time() + seconds)

    async def send(self, data: bytes, patience: float = math.inf) -> None:
        """Send all data. Raises Gone if the client disconnected, or accepts no bytes for `patience` seconds."""
        rest: bytes | memoryview = data
        while rest:
            try:
                size = self._write(self._descriptor, rest)
                if size == len(rest):
                    return
                rest = memoryview(rest)[size:]
            except BlockingIOError:
                self.before_wait()
                await self._writable(patience)
            except OSError as error:
                raise Gone from error

    async def _writable(self, patience: float) -> None:
        with trio.move_on_after(patience):
            try:
                await trio.lowlevel.wait_writable(self.socket)
            except OSError as error:
                raise Gone from error
            return
        raise Gone

    def send_now(self, data: bytes) -> None:
        """Send a few bytes if the socket has room for them. A failure shows at a later call."""
        with contextlib.suppress(OSError):
            if self._tls is None:
                os.write(self._descriptor, data)
            else:
                self._tls.push(self._descriptor, data)

    def end(self) -> None:
        """Announce the end over TLS."""
        if self._tls is not None:
            self._tls.end(self._descriptor)

    async def linger(self) -> None:
        """End the sending side, and drop received bytes for a while: closing at once would reset the connection, and
        destroy the bytes sent."""
        self.end()
        try:
            self.socket.shutdown(socket.SHUT_WR)
        except OSError:
            return
        deadline = trio.current_time() + limits.HTTP_LINGER_S
        try:
            while await self.receive(deadline):
                await trio.lowlevel.checkpoint()
        except trio.TooSlowError:
            pass


ENDS = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR | select.EPOLLET
GONE = select.EPOLLHUP | select.EPOLLERR
