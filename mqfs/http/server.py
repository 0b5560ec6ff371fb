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
from collections.abc import Awaitable, Callable, Hashable, Set
from typing import Protocol

import trio

from mqfs import limits
from mqfs.engine.tree.tree import Tree
from mqfs.errors import BadAddress, OverLimit, printable
from mqfs.http.answers import Answer
from mqfs.http.claims import Claims
from mqfs.http.connection import Connection
from mqfs.http.gate import BrowserRules, Gate, Proxies
from mqfs.http.routes import TREE, Table
from mqfs.http.wire import Request
from mqfs.model import Grant
from mqfs.net import identity
from mqfs.net.address import Address, TcpAddress, TlsAddress, UnixAddress, is_loopback
from mqfs.net.certificates import ServerTls
from mqfs.net.peer import Peer
from mqfs.net.tokens import Tokens
from mqfs.quotas import Shares
from mqfs.serving.accept import look_up, peer_at, shake_hands
from mqfs.serving.fairness import Turns
from mqfs.serving.stream import ENDS, GONE, Channel

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
    """All HTTP connections of one tree.

    `tls`: for listeners at addresses of TLS. `troubles` tells why the server is not ready. `trace` gets a line for
    each answer. `speak`: serves connections of another protocol first, and returns whether one was; it has no byte of
    the others. `name`: in logs and `.who`.
    """

    def __init__(
        self,
        tree: Tree,
        *,
        tcp_user: str = "nobody",
        tokens: Tokens | None = None,
        tls: ServerTls | None = None,
        rules: BrowserRules | None = None,
        proxies: Proxies | None = None,
        turns: Turns | None = None,
        troubles: Callable[[], list[str]] = list,
        trace: Callable[[str], None] | None = None,
        speak: Callable[[Channel, Peer], Awaitable[bool]] | None = None,
        name: str = "http",
    ) -> None:
        uid = identity.user_number(tcp_user)
        if uid is None:
            raise BadAddress(f"unknown user {tcp_user!r} for clients over TCP")
        self.tree, self.claims, self.gate = tree, Claims(tree), Gate()
        self._tokens, self._tls, self._trace = tokens, tls, trace
        if tokens is not None:
            tokens.on_ended.append(self._end_tokens)
        self.rules, self.proxies, self.troubles = rules or BrowserRules(), proxies or Proxies(), troubles
        self.turns, self.stopping = turns or Turns(), False
        self.requests: Counter[tuple[str, int]] = Counter()  # answered, by method and status
        self._tcp_uid, self._speak, self._name = uid, speak, name
        self._listeners: dict[Listener, Table] = {}
        self._connections: dict[int, Connection] = {}  # by descriptor
        self._places = Shares("connections", "HTTP_CONNECTIONS")
        self._connected: Counter[Hashable] = Counter()  # connections of each user
        self._streams: Counter[Hashable] = Counter()  # answers without an end of each user
        self._numbers = itertools.count(1)
        self._ends = select.epoll()
        self._nursery: trio.Nursery
        self._empty = trio.Event()
        self._scope = trio.CancelScope()

    def add(self, listener: Listener, table: Table = TREE) -> None:
        """Serve that at an address, from the beginning."""
        self._listeners[listener] = table

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
                sock.setblocking(False)
                try:
                    peer = self._peer(sock, listener.address)
                except OSError:
                    sock.close()  # it is gone already
                    continue
                self._nursery.start_soon(self._serve, sock, listener, peer)
                await self.turns.accepted(peer.account)

    def _peer(self, sock: socket.socket, address: Address) -> Peer:
        peer = peer_at(sock, address, self._name, next(self._numbers), self._tcp_uid, self._tokens)
        if isinstance(address, UnixAddress) and self.proxies.has(peer.account):
            return peer.as_proxy(self._tcp_uid, self._tokens)
        return peer

    async def _serve(self, sock: socket.socket, listener: Listener, peer: Peer) -> None:
        address = listener.address
        encrypted = isinstance(address, TlsAddress)
        with sock:
            try:
                self._take_place(peer, encrypted)
            except OverLimit as error:
                log.warning("%s: connection refused: %s", address, error)
                if not encrypted:
                    Channel(sock).send_now(FULL)
                return
            try:
                await self._greet(sock, listener, peer)
            finally:
                self._leave_place(peer, encrypted)

    def _take_place(self, peer: Peer, encrypted: bool) -> None:
        """Raises OverLimit."""
        if self._connected[self._owner(peer)] >= limits.HTTP_USER_CONNECTIONS:
            raise OverLimit(f"at most {limits.HTTP_USER_CONNECTIONS} connections of a user")
        self._places.take(self._owner(peer))
        self._connected[self._owner(peer)] += 1
        try:
            if encrypted:
                self.tree.memory.take(peer.account, limits.TLS_BYTES)
        except OverLimit:
            self._leave_place(peer, encrypted=False)
            raise

    def _leave_place(self, peer: Peer, encrypted: bool) -> None:
        self._places.give(self._owner(peer))
        _count_down(self._connected, self._owner(peer))
        if encrypted:
            self.tree.memory.give(peer.account, limits.TLS_BYTES)

    def _owner(self, peer: Peer) -> Hashable:
        """Whom a connection counts for; each of a proxy for itself, as these have no bound of a user."""
        return peer.where if self.proxies.has(peer.account) else peer.account

    async def _greet(self, sock: socket.socket, listener: Listener, peer: Peer) -> None:
        """Complete the handshake of TLS where it is spoken, then serve."""
        address, tls = listener.address, None
        if isinstance(address, TlsAddress):
            assert self._tls is not None, "a listener at an address of TLS, and no certificate"
            turn = self.turns.of(peer.account)
            tls = await shake_hands(self._tls, "http/1.1", sock.fileno(), peer, turn)
            if tls is None:
                return
        channel = Channel(sock, tls)
        await look_up(peer)
        if self._speak is not None and await self._speak(channel, peer):
            channel.end()
            return
        rebindable = isinstance(address, TcpAddress) or self.proxies.has(peer.account)
        rebindable = rebindable or (isinstance(address, TlsAddress) and is_loopback(address.host))
        await self._serve_peer(Connection(self, channel, peer, rebindable, self._listeners[listener]))
        channel.end()

    async def _serve_peer(self, connection: Connection) -> None:
        descriptor = connection.channel.fileno()
        self._connections[descriptor] = connection
        try:
            self._ends.register(descriptor, ENDS)
            await connection.run()
        except Exception:
            log.exception("%s: connection ended", connection.peer.where)
        finally:
            del self._connections[descriptor]
            if not self._connections:
                self._empty.set()

    def _end_tokens(self, ended: Set[Grant]) -> None:
        """End the connections of tokens that were revoked or expired; what they claimed goes back."""
        for connection in list(self._connections.values()):
            if (grant := connection.grant) in ended:
                where, name = connection.peer.where, grant.id if grant is not None else ""
                log.info("%s: connection ended: token %s revoked, changed or expired", where, name)
                connection.lost()
        self.claims.end_grants(ended)

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

    # ------------------------------------------------------------ answers

    def note(self, peer: Peer, request: Request, answer: Answer) -> None:
        """Count an answer that begins, and trace it. The query may have secrets."""
        self.requests[request.method, answer.status] += 1
        if self._trace is not None:
            path = printable(request.target.partition("?")[0])
            size = f" {len(answer.body)} bytes" if isinstance(answer.body, bytes) else ""
            where = peer.where.removeprefix("http ")
            self._trace(f"{where} {request.method} {path} {len(request.body)} bytes -> {answer.status}{size}")

    @property
    def streams(self) -> int:
        return self._streams.total()

    def begin_stream(self, peer: Peer) -> None:
        """Raises OverLimit."""
        if self._streams[peer.account] >= limits.HTTP_USER_STREAMS:
            raise OverLimit(f"{limits.HTTP_USER_STREAMS} answers without an end of a user")
        self._streams[peer.account] += 1

    def end_stream(self, peer: Peer) -> None:
        _count_down(self._streams, peer.account)


def _count_down(counts: Counter[Hashable], user: Hashable) -> None:
    counts[user] -= 1
    if not counts[user]:
        del counts[user]
