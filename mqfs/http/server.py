"""The HTTP server: sockets driven by trio.

It holds the connections, and notifies each when its client disconnects.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Set
from typing import Any

import trio

from mqfs import limits
from mqfs.engine.tree.tree import Tree
from mqfs.errors import OverLimit
from mqfs.http.answers import Answer
from mqfs.http.connection import Connection
from mqfs.http.consuming import Claims
from mqfs.http.gate import BrowserRules, Gate, Proxies
from mqfs.http.routes import TREE, Table
from mqfs.http.wire import Request
from mqfs.model import Grant
from mqfs.net.peer import Peer
from mqfs.net.sockets import Address, TcpAddress, TlsAddress, UnixAddress, is_loopback
from mqfs.net.tls import TlsCalls
from mqfs.quotas import UserLimits
from mqfs.serving.accept import Acceptor, Listener
from mqfs.serving.stream import ENDS, GONE, SocketStream

log = logging.getLogger("mqfs.http")
FULL = (
    b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 21\r\n\r\n"
    b"too many connections\n"
)
EVENTS = 256  # of disconnected clients, in one poll


class HttpServer(Acceptor):
    """All HTTP connections of one tree.

    `troubles` returns why the server is not ready. `trace` gets a line for each answer. `speak` serves a connection
    that uses another protocol, and returns whether it did; it consumes no byte of an HTTP connection. `shared`: see
    `Acceptor`.
    """

    def __init__(
        self,
        tree: Tree,
        *,
        rules: BrowserRules | None = None,
        proxies: Proxies | None = None,
        troubles: Callable[[], list[str]] = list,
        trace: Callable[[str], None] | None = None,
        speak: Callable[[SocketStream, Peer], Awaitable[bool]] | None = None,
        name: str = "http",
        **shared: Any,
    ) -> None:
        super().__init__(name, "http/1.1", UserLimits("connections", "HTTP_CONNECTIONS"), memory=tree.memory, **shared)
        self.tree, self.claims, self.gate = tree, Claims(tree), Gate()
        self.rules, self.proxies, self.troubles = rules or BrowserRules(), proxies or Proxies(), troubles
        self.requests: Counter[tuple[str, int]] = Counter()  # answered, by method and status
        self._trace, self._speak = trace, speak
        self._tables: dict[Listener, Table] = {}
        self._connections: dict[int, Connection] = {}  # by descriptor
        self._connected: Counter[Hashable] = Counter()  # connections of each user
        self._streams: Counter[Hashable] = Counter()  # answers without an end of each user
        self._ends = select.epoll()
        self._empty = trio.Event()

    def add(self, listener: Listener, table: Table = TREE) -> None:
        """Serve the routes of a table at an address, from the start or while running."""
        self._tables[listener] = table
        super().add(listener)

    def start_tasks(self) -> None:
        self.nursery.start_soon(self._watch_ends)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until `stop`, or until cancelled."""
        try:
            await super().run(task_status=task_status)
        finally:
            self._ends.close()

    async def stop(self) -> None:
        """Stop accepting, wait up to limits.SHUTDOWN_S for answers to be sent, then close all connections."""
        self.stop_accepting()
        for connection in self._connections.values():
            if connection.idle:
                connection.lost()
        with trio.move_on_after(limits.SHUTDOWN_S):
            while self._connections:
                self._empty = trio.Event()
                await self._empty.wait()
        self.scope.cancel()

    # ------------------------------------------------------------ connections

    def peer(self, sock: socket.socket, address: Address) -> Peer:
        peer = super().peer(sock, address)
        if isinstance(address, UnixAddress) and self.proxies.has(peer.account):
            return peer.as_proxy(self.tcp_uid, self.tokens)
        return peer

    def take_place(self, peer: Peer) -> None:
        owner = self._owner(peer)
        if self._connected[owner] >= limits.HTTP_USER_CONNECTIONS:
            raise OverLimit(f"connections: too many of this user (expected at most {limits.HTTP_USER_CONNECTIONS})")
        self._places.acquire(owner)
        self._connected[owner] += 1

    def give_place(self, peer: Peer) -> None:
        self._places.release(self._owner(peer))
        _count_down(self._connected, self._owner(peer))

    def _owner(self, peer: Peer) -> Hashable:
        """The account that a connection is charged to. Each connection of a proxy has an account of its own: no user
        limit bounds them."""
        return peer.where if self.proxies.has(peer.account) else peer.account

    def refuse(self, sock: socket.socket, error: OverLimit) -> None:
        with contextlib.suppress(OSError):
            sock.send(FULL)

    async def serve(self, sock: socket.socket, tls: TlsCalls | None, peer: Peer, listener: Listener) -> None:
        address, queue = listener.address, self.fairness.of(peer.account)
        channel = SocketStream(sock, queue.join(), tls)
        try:
            if self._speak is not None and await self._speak(channel, peer):
                await queue.end()
                return
            rebindable = isinstance(address, TcpAddress) or self.proxies.has(peer.account)
            rebindable = rebindable or (isinstance(address, TlsAddress) and is_loopback(address.host))
            await self._serve_connection(Connection(self, channel, peer, rebindable, self._tables[listener]))
        finally:
            queue.leave()
            channel.end()

    async def _serve_connection(self, connection: Connection) -> None:
        descriptor = connection.channel.fileno()
        self._connections[descriptor] = connection
        try:
            self._ends.register(descriptor, ENDS)
            await connection.run()
        finally:
            del self._connections[descriptor]
            if not self._connections:
                self._empty.set()

    def end_tokens(self, ended: Set[Grant]) -> None:
        """Close the connections of tokens that were revoked, changed or expired, and release their claims."""
        for connection in list(self._connections.values()):
            if (grant := connection.grant) in ended:
                where, name = connection.peer.where, grant.id if grant is not None else ""
                log.info("%s: connection ended: token %s revoked, changed or expired", where, name)
                connection.lost()
        self.claims.end_grants(ended)

    # ------------------------------------------------------------ clients that disconnect

    async def _watch_ends(self) -> None:
        """Notify connections whose client has shut down its sending side or disconnected. Each event comes once."""
        while True:
            await trio.lowlevel.wait_readable(self._ends.fileno())
            for descriptor, events in self._ends.poll(0, EVENTS):
                connection = self._connections.get(descriptor)
                if connection is None:
                    continue
                if events & GONE:
                    connection.gone()
                else:
                    connection.half_closed()

    # ------------------------------------------------------------ answers

    def note(self, peer: Peer, request: Request, answer: Answer) -> None:
        """Count an answer that is about to be sent, and trace it."""
        self.requests[request.method, answer.status] += 1
        if self._trace is not None:
            size = f" {len(answer.body)} bytes" if isinstance(answer.body, bytes) else ""
            where = peer.where.removeprefix("http ")
            self._trace(f"{where} {request.method} {request.shown} {request.size} bytes -> {answer.status}{size}")

    @property
    def streams(self) -> int:
        return self._streams.total()

    def begin_stream(self, peer: Peer) -> None:
        """Count an answer without an end. Raises OverLimit."""
        if self._streams[peer.account] >= limits.HTTP_USER_STREAMS:
            raise OverLimit(f"follow: too many open answers of this user (expected at most {limits.HTTP_USER_STREAMS})")
        self._streams[peer.account] += 1

    def end_stream(self, peer: Peer) -> None:
        _count_down(self._streams, peer.account)


def _count_down(counts: Counter[Hashable], user: Hashable) -> None:
    counts[user] -= 1
    if not counts[user]:
        del counts[user]
