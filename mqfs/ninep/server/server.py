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
from collections.abc import Callable, Hashable, Iterator
from typing import TextIO
from weakref import WeakValueDictionary

import trio

from mqfs import limits
from mqfs.engine.tree.tree import Tree
from mqfs.errors import BadAddress, OverLimit
from mqfs.net import identity
from mqfs.net.address import Address, TcpAddress
from mqfs.net.peer import Peer
from mqfs.net.sockets import detect_dead_host, peer_groups
from mqfs.net.sockets import peer as peer_of
from mqfs.net.tokens import Tokens
from mqfs.ninep.server.connection import Connection
from mqfs.ninep.server.listener import Listener
from mqfs.ninep.server.turns import Turn, Turns
from mqfs.shares import Shares

log = logging.getLogger("mqfs.ninep")


class Server:
    """All 9P connections of one tree.

    `add` listeners, then `run`; `stop` ends it after the tree was closed (which answers parked requests).
    """

    def __init__(
        self, tree: Tree, *, tcp_user: str = "nobody", tokens: Tokens | None = None, trace: TextIO | None = None
    ) -> None:
        uid = identity.user_number(tcp_user)
        if uid is None:
            raise BadAddress(f"unknown user {tcp_user!r} for clients over TCP")
        self.tree = tree
        self.connections: set[Connection] = set()
        self._places = Shares("connections", "CONNECTIONS")
        self._turns, self._turn_of = Turns(), WeakValueDictionary[Hashable, Turn]()
        self._strangers: dict[Connection, float] = {}  # connections without a Tattach yet: their deadlines
        self._stranger_came = trio.Event()
        self.listeners: list[Listener] = []
        self.inside = 0  # batches being performed: connections they wake are flushed at their end
        self.batches = 0
        self.nursery: trio.Nursery
        self._tcp_uid, self._tokens, self._trace = uid, tokens, trace
        self._woken: list[Connection] = []
        self._woken_event = trio.Event()
        self._numbers = itertools.count(1)
        self._full = False
        self._stopping = False
        self._scope = trio.CancelScope()

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

    def turn_of(self, user: Hashable) -> Turn:
        """The turn of a user, for all its connections."""
        return self._turn_of.setdefault(user, Turn(self._turns))

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
                self._begin(sock, listener)

    def _refuse(self, why: str) -> None:
        """Log once why connections are not accepted, until one is."""
        if not self._full:
            log.warning("%s", why)
        self._full = True

    def _begin(self, sock: socket.socket, listener: Listener) -> None:
        try:
            peer = self._peer(sock, listener.address)
            self._places.take(peer.account)
        except (OSError, OverLimit) as error:  # OSError: it is gone already
            if isinstance(error, OverLimit):
                self._refuse(f"{listener.address}: connection refused: {error}")
            sock.close()
            return
        self._full = False
        sock.setblocking(False)
        self.nursery.start_soon(self._serve_socket, sock, peer)

    def _peer(self, sock: socket.socket, address: Address) -> Peer:
        number = next(self._numbers)
        if isinstance(address, TcpAddress):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            detect_dead_host(sock)
            host = sock.getpeername()[0]
            return Peer(f"9p tcp {number}", self._tcp_uid, fixed=True, host=host, tokens=self._tokens)
        pid, uid, gid = peer_of(sock)
        return Peer(f"9p unix {number}", uid, gid, pid, groups=peer_groups(sock))

    async def _serve_socket(self, sock: socket.socket, peer: Peer) -> None:
        connection = Connection(self, peer, sock.fileno(), sock.fileno())
        self._strangers[connection] = trio.current_time() + limits.HANDSHAKE_S
        self._stranger_came.set()
        try:
            with sock:
                if not peer.is_known:
                    await self._look_up(peer)
                await self._serve(connection)
            if connection.session.wrong_tokens:
                await trio.sleep(limits.TOKEN_DELAY_S)
        finally:
            self._strangers.pop(connection, None)
            self._places.give(peer.account)

    async def _look_up(self, peer: Peer) -> None:
        try:
            await trio.to_thread.run_sync(peer.look_up)
        except Exception as error:  # no thread, or no answer: it is looked up again when it is needed
            log.warning("%s: user %d not looked up: %s", peer.where, peer.uid, error)

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
