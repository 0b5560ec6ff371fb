"""The HTTP server: sockets driven by trio.

Owns accepting, the peers' identity, the list of connections, and the notice that a client is gone.
"""

from __future__ import annotations

import errno
import itertools
import logging
import select
import socket
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Protocol

import trio

from mqfs import limits
from mqfs.engine.tree.tree import Tree
from mqfs.errors import BadAddress, OverLimit
from mqfs.http.browser import BrowserRules
from mqfs.http.channel import ENDS, GONE, Channel
from mqfs.http.claims import Claims
from mqfs.http.connection import Connection
from mqfs.http.gate import Gate
from mqfs.net import identity
from mqfs.net.address import Address, TcpAddress, is_loopback
from mqfs.net.peer import Peer
from mqfs.net.sockets import detect_dead_host, peer_groups
from mqfs.net.sockets import peer as peer_of
from mqfs.net.tokens import Tokens

log = logging.getLogger("mqfs.http")
FULL = (
    b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 21\r\n\r\n"
    b"too many connections\n"
)
EVENTS = 256  # of clients that are gone, at once


class Listener(Protocol):
    """An address and its listening socket."""

    address: Address
    socket: socket.socket

    def close(self) -> None: ...


class HttpServer:
    """All HTTP connections of one tree. `troubles` tells why the server is not ready."""

    def __init__(
        self,
        tree: Tree,
        *,
        tcp_user: str = "nobody",
        tokens: Tokens | None = None,
        rules: BrowserRules | None = None,
        troubles: Callable[[], list[str]] = list,
    ) -> None:
        uid = identity.user_number(tcp_user)
        if uid is None:
            raise BadAddress(f"unknown user {tcp_user!r} for clients over TCP")
        self.tree, self.claims, self.gate = tree, Claims(tree), Gate(tokens)
        self.rules, self.troubles = rules or BrowserRules(), troubles
        self.stopping = False
        self._tcp_uid = uid
        self._listeners: list[Listener] = []
        self._connections: dict[int, Connection] = {}  # by descriptor
        self._places: Counter[Hashable] = Counter()  # connections of each user
        self._streams: Counter[Hashable] = Counter()  # answers without an end of each user
        self._numbers = itertools.count(1)
        self._ends = select.epoll()
        self._nursery: trio.Nursery
        self._empty = trio.Event()
        self._scope = trio.CancelScope()

    def add(self, listener: Listener) -> None:
        """Serve an address, from the beginning."""
        self._listeners.append(listener)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until `stop`, or until cancelled."""
        try:
            with self._scope:
                async with trio.open_nursery() as self._nursery:
                    self._nursery.start_soon(self._watch_ends)
                    for listener in self._listeners:
                        self._nursery.start_soon(self._accept, listener)
                    task_status.started()
        finally:
            self._ends.close()
            for listener in self._listeners:
                listener.close()

    async def stop(self) -> None:
        """Stop accepting, let answers leave for up to limits.SHUTDOWN_S, then end all connections."""
        self.stopping = True
        for listener in self._listeners:
            trio.lowlevel.notify_closing(listener.socket)
            listener.close()
        for connection in self._connections.values():
            if connection.idle:
                connection.lost()
        with trio.move_on_after(limits.SHUTDOWN_S):
            while self._connections:
                self._empty = trio.Event()
                await self._empty.wait()
        self._scope.cancel()

    # ------------------------------------------------------------ accepting

    async def _accept(self, listener: Listener) -> None:
        while not self.stopping:
            try:
                sock, _ = listener.socket.accept()
            except BlockingIOError:
                try:
                    await trio.lowlevel.wait_readable(listener.socket)
                except (trio.ClosedResourceError, OSError):
                    return
            except OSError as error:
                if error.errno in (errno.EBADF, errno.EINVAL):
                    return
                log.warning("%s: %s", listener.address, error)
                await trio.sleep(0.1)  # out of descriptors, say: some may be closed
            else:
                self._nursery.start_soon(self._serve, sock, listener.address)
                await trio.lowlevel.checkpoint()

    async def _serve(self, sock: socket.socket, address: Address) -> None:
        with sock:
            try:
                peer, channel = self._peer(sock, address), Channel(sock)
            except OSError:
                return  # it is gone already
            if not self._has_place(peer):
                log.warning("%s: connection refused: too many", address)
                channel.send_now(FULL)
                return
            self._places[peer.account] += 1
            loopback = isinstance(address, TcpAddress) and is_loopback(address.host)
            try:
                await self._serve_peer(Connection(self, channel, peer, loopback), peer)
            finally:
                self._places[peer.account] -= 1
                if not self._places[peer.account]:
                    del self._places[peer.account]

    def _has_place(self, peer: Peer) -> bool:
        mine, used = self._places[peer.account], self._places.total()
        return mine < limits.HTTP_USER_CONNECTIONS and used < limits.HTTP_CONNECTIONS

    async def _serve_peer(self, connection: Connection, peer: Peer) -> None:
        descriptor = connection.channel.fileno()
        self._connections[descriptor] = connection
        try:
            if not peer.is_known:
                await self._look_up(peer)
            self._ends.register(descriptor, ENDS)
            await connection.run()
        except Exception:
            log.exception("%s: connection ended", peer.where)
        finally:
            del self._connections[descriptor]
            if not self._connections:
                self._empty.set()

    async def _look_up(self, peer: Peer) -> None:
        try:
            await trio.to_thread.run_sync(peer.look_up)
        except Exception as error:  # no thread, or no answer: it is looked up again when it is needed
            log.warning("%s: user %d not looked up: %s", peer.where, peer.uid, error)

    def _peer(self, sock: socket.socket, address: Address) -> Peer:
        number = next(self._numbers)
        if isinstance(address, TcpAddress):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            detect_dead_host(sock)
            return Peer(f"http tcp {number}", self._tcp_uid, fixed=True, host=sock.getpeername()[0])
        pid, uid, gid = peer_of(sock)
        return Peer(f"http unix {number}", uid, gid, pid, groups=peer_groups(sock))

    # ------------------------------------------------------------ clients that are gone

    async def _watch_ends(self) -> None:
        """Tell connections that their client sends no more, or is gone. Each such event comes once."""
        while True:
            await trio.lowlevel.wait_readable(self._ends.fileno())
            for descriptor, events in self._ends.poll(0, EVENTS):
                connection = self._connections.get(descriptor)
                if connection is None:
                    continue
                if events & GONE:
                    connection.lost()
                else:
                    connection.half_closed()

    # ------------------------------------------------------------ answers without an end

    def begin_stream(self, peer: Peer) -> None:
        """Raises OverLimit."""
        if self._streams[peer.account] >= limits.HTTP_USER_STREAMS:
            raise OverLimit(f"{limits.HTTP_USER_STREAMS} answers without an end of a user")
        self._streams[peer.account] += 1

    def end_stream(self, peer: Peer) -> None:
        self._streams[peer.account] -= 1
        if not self._streams[peer.account]:
            del self._streams[peer.account]
