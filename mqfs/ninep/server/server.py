"""The 9P server: sockets and standard input/output, driven by trio.

Owns accepting, the peers' identity and the list of connections. The replies that one batch of requests causes, on all
connections, are sent before the next batch is read.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import socket
from collections.abc import Callable, Hashable, Iterator, Set
from typing import TextIO

import attrs
import trio

from mqfs import limits
from mqfs.engine.tree.tree import Tree
from mqfs.errors import BadAddress, OverLimit
from mqfs.model import Grant
from mqfs.net import identity
from mqfs.net.address import Address, TcpAddress, TlsAddress, UnixAddress, explain_failure, is_loopback, parse_address
from mqfs.net.certificates import ServerTls
from mqfs.net.peer import Peer
from mqfs.net.sockets import BACKLOG, SocketFile
from mqfs.net.tokens import Tokens
from mqfs.ninep.server.connection import Connection
from mqfs.quotas import Shares
from mqfs.serving.accept import look_up, peer_at, shake_hands
from mqfs.serving.fairness import Turns

log = logging.getLogger("mqfs.ninep")


class Server:
    """All 9P connections of one tree.

    `add` listeners, then `run`; `stop` ends it after the tree was closed (which answers parked requests).
    """

    def __init__(
        self,
        tree: Tree,
        *,
        tcp_user: str = "nobody",
        tokens: Tokens | None = None,
        tls: ServerTls | None = None,
        turns: Turns | None = None,
        trace: TextIO | None = None,
    ) -> None:
        """`tls`: for listeners at addresses of TLS. `turns`: of users that come by several front ends."""
        uid = identity.user_number(tcp_user)
        if uid is None:
            raise BadAddress(f"unknown user {tcp_user!r} for clients over TCP")
        self.tree = tree
        self.connections: set[Connection] = set()
        self._places = Shares("connections", "CONNECTIONS")
        self.turns = turns or Turns()
        self._strangers: dict[Connection, float] = {}  # connections without a Tattach yet: their deadlines
        self._stranger_came = trio.Event()
        self.listeners: list[Listener] = []
        self.inside = 0  # batches being performed: connections they wake are flushed at their end
        self.batches = 0
        self.nursery: trio.Nursery
        self._tcp_uid, self._tokens, self._tls, self._trace = uid, tokens, tls, trace
        self._woken: list[Connection] = []
        self._woken_event = trio.Event()
        self._numbers = itertools.count(1)
        self._full = False
        self._stopping = False
        self._scope = trio.CancelScope()
        if tokens is not None:
            tokens.on_ended.append(self._end_tokens)

    def add(self, listener: Listener) -> None:
        """Serve an address, from the beginning or while running."""
        self.listeners.append(listener)
        if hasattr(self, "nursery"):
            self.nursery.start_soon(self._accept, listener)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until `stop`, or until cancelled."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    self.nursery = nursery
                    nursery.start_soon(self._flush_forever)
                    nursery.start_soon(self._end_strangers)
                    for listener in self.listeners:
                        nursery.start_soon(self._accept, listener)
                    task_status.started()
        finally:
            for listener in self.listeners:
                listener.close()

    async def serve_descriptors(self, incoming: int = 0, outgoing: int = 1) -> None:
        """One connection over two descriptors (standard input and output); returns at its end. `run` must run."""
        groups = frozenset(os.getgroups())
        peer = Peer(f"9p stdio {next(self._numbers)}", os.geteuid(), os.getegid(), os.getpid(), groups=groups)
        with _nonblocking(incoming), _nonblocking(outgoing):
            await self._serve(Connection(self, peer, incoming, outgoing))

    async def stop(self) -> None:
        """Stop accepting and reading, send replies for up to limits.SHUTDOWN_S, then end all connections."""
        self._stopping = True
        for listener in self.listeners:
            trio.lowlevel.notify_closing(listener.socket)
            listener.close()
        with trio.move_on_after(limits.SHUTDOWN_S):
            while not all(connection.idle or connection.ended for connection in self.connections):
                self.flush_woken()
                await trio.sleep(0.005)
        self._scope.cancel()

    def tracer(self, where: str) -> Callable[[str], None] | None:
        """The function that prints a connection's messages, if there is a trace."""
        trace = self._trace
        return None if trace is None else lambda line: print(where, line, file=trace, flush=True)

    # ------------------------------------------------------------ replies of parked requests

    def woken(self, connection: Connection) -> None:
        """A connection has replies that no batch of its own will send. Called from inside the engine."""
        self._woken.append(connection)
        if not self.inside:
            self._woken_event.set()

    def flush_woken(self) -> None:
        """Send the replies of all that were woken."""
        while self._woken:
            woken, self._woken = self._woken, []
            for connection in woken:
                if connection.ended:
                    continue
                try:
                    connection.moved()
                except Exception:
                    log.exception("%s: connection ended", connection.session.peer.where)
                    connection.lost()

    async def _flush_forever(self) -> None:
        while True:
            await self._woken_event.wait()
            self._woken_event = trio.Event()
            self.flush_woken()

    # ------------------------------------------------------------ accepting

    async def _end_strangers(self) -> None:
        """End connections that do not attach in time."""
        while True:
            while not self._strangers:
                self._stranger_came = trio.Event()
                await self._stranger_came.wait()
            connection, until = next(iter(self._strangers.items()))
            if until > trio.current_time():
                del connection  # it may end meanwhile
                await trio.sleep_until(until)
                continue
            del self._strangers[connection]
            if not connection.session.attached:
                where = connection.session.peer.where
                log.info("%s: connection ended: no Tattach in %g s", where, limits.HANDSHAKE_S)
                connection.lost()
            del connection

    def _end_tokens(self, ended: Set[Grant]) -> None:
        """End the connections of tokens that were revoked or expired: claims go back."""
        for connection in list(self.connections):
            if mine := connection.session.fids.grants() & ended:
                where, names = connection.session.peer.where, ", ".join(sorted(grant.id for grant in mine if grant))
                log.info("%s: connection ended: token %s revoked, changed or expired", where, names)
                connection.lost()

    async def _accept(self, listener: Listener) -> None:
        while not self._stopping:
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
                self._refuse(f"{listener.address}: {error}")
                await trio.sleep(0.1)  # out of descriptors, say: some may be closed
            else:
                account = self._begin(sock, listener)
                await self.turns.accepted(account)

    def _refuse(self, why: str) -> None:
        """Log once why connections are not accepted, until one is."""
        if not self._full:
            log.warning("%s", why)
        self._full = True

    def _begin(self, sock: socket.socket, listener: Listener) -> Hashable:
        """Serve it, unless its user has too many. Returns the user's account, None where it has gone."""
        peer, encrypted = None, isinstance(listener.address, TlsAddress)
        try:
            peer = peer_at(sock, listener.address, "9p", next(self._numbers), self._tcp_uid, self._tokens)
            self._take_place(peer, encrypted)
        except (OSError, OverLimit) as error:  # OSError: it is gone already
            if isinstance(error, OverLimit):
                self._refuse(f"{listener.address}: connection refused: {error}")
            sock.close()
        else:
            self._full = False
            sock.setblocking(False)
            self.nursery.start_soon(self._serve_socket, sock, peer, encrypted)
        return peer.account if peer is not None else None

    def _take_place(self, peer: Peer, encrypted: bool) -> None:
        """Raises OverLimit."""
        if encrypted:
            self.tree.memory.take(peer.account, limits.TLS_BYTES)
        try:
            self._places.take(peer.account)
        except OverLimit:
            self._give_memory(peer, encrypted)
            raise

    def _give_memory(self, peer: Peer, encrypted: bool) -> None:
        if encrypted:
            self.tree.memory.give(peer.account, limits.TLS_BYTES)

    async def _serve_socket(self, sock: socket.socket, peer: Peer, encrypted: bool) -> None:
        descriptor, tls = sock.fileno(), None
        try:
            with sock:
                if encrypted:
                    assert self._tls is not None, "a listener at an address of TLS, and no certificate"
                    tls = await shake_hands(self._tls, "9p", descriptor, peer, self.turns.of(peer.account))
                    if tls is None:
                        return
                connection = Connection(self, peer, descriptor, descriptor, tls or os)
                await self._serve_stranger(connection)
                if tls is not None:
                    tls.end(descriptor)
            if connection.session.wrong_tokens:
                await trio.sleep(limits.TOKEN_DELAY_S)
        finally:
            self._places.give(peer.account)
            self._give_memory(peer, encrypted)

    async def _serve_stranger(self, connection: Connection) -> None:
        """Serve a connection, which has to attach in time."""
        self._strangers[connection] = trio.current_time() + limits.HANDSHAKE_S
        self._stranger_came.set()
        try:
            await look_up(connection.session.peer)
            await self._serve(connection)
        finally:
            self._strangers.pop(connection, None)

    async def _serve(self, connection: Connection) -> None:
        self.connections.add(connection)
        try:
            await connection.run()
        except trio.ClosedResourceError:
            pass  # it was lost during a read
        except Exception:
            log.exception("%s: connection ended", connection.session.peer.where)
        finally:
            self.connections.discard(connection)
            trio.lowlevel.notify_closing(connection.incoming)


@contextlib.contextmanager
def _nonblocking(descriptor: int) -> Iterator[None]:
    """Nonblocking for a while: other processes may share the descriptor."""
    before = os.get_blocking(descriptor)
    os.set_blocking(descriptor, False)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.set_blocking(descriptor, before)


# ------------------------------------------------------------ listener

# Listening: on a unix socket or a TCP port, with TLS or without.


class Listener:
    """One address and its listening socket."""

    def __init__(self, address: Address, sock: socket.socket, end: Callable[[], None]) -> None:
        self.address, self.socket, self._end = address, sock, end

    def close(self) -> None:
        """Stop, and remove the socket's file if it still is ours."""
        self._end()


def listen(address: Address | str, *, mode: int = 0o666, insecure: bool = False, identified: bool = False) -> Listener:
    """Listen now, or BadAddress. `mode` is that of a unix socket. Off loopback, TLS needs clients that are `identified`
    (by token or certificate), and TCP needs `insecure`, which permits both."""
    where = parse_address(address) if isinstance(address, str) else address
    try:
        if isinstance(where, UnixAddress):
            return _listen_unix(where, mode)
        if not insecure and not is_loopback(where.host):
            _require_safe(where, identified)
        return _listen_tcp(where)
    except OSError as error:
        raise BadAddress(explain_failure(where, error)) from None


def _listen_unix(address: UnixAddress, mode: int) -> Listener:
    file = SocketFile(address.path, socket.SOCK_STREAM, mode)
    return Listener(address, file.socket, file.close)


def _require_safe(address: TcpAddress | TlsAddress, identified: bool) -> None:
    if isinstance(address, TcpAddress):
        lack, expected = "nothing is encrypted", "tls!HOST!PORT, or --insecure"
    elif not identified:
        lack, expected = "no client is identified", "--token-file, --tls-client-ca or --insecure"
    else:
        return
    raise BadAddress(f"{address}: not a loopback address, and {lack} (expected {expected})")


def _listen_tcp(address: TcpAddress | TlsAddress) -> Listener:
    family, kind, proto, _, where = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return Listener(attrs.evolve(address, port=sock.getsockname()[1]), sock, sock.close)
