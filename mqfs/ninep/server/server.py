"""The 9P server: sockets and standard input/output, driven by trio.

Holds the list of connections. The replies that one batch of requests causes, on all connections, are sent before the
next batch is read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections import OrderedDict
from collections.abc import Callable, Iterator, Set
from typing import Any

import trio

from mqfs import limits
from mqfs.engine.tree.tree import Tree
from mqfs.model import Grant
from mqfs.net.peer import Peer
from mqfs.net.tls import TlsCalls
from mqfs.ninep.server.connection import Connection
from mqfs.quotas import UserLimits
from mqfs.serving.accept import Acceptor, Listener

log = logging.getLogger("mqfs.ninep")


class Server(Acceptor):
    """All 9P connections of one tree.

    `add` listeners, then `run`; `stop` ends it after the tree was closed (which answers parked requests).
    """

    def __init__(self, tree: Tree, *, trace: Callable[[str], None] | None = None, **shared: Any) -> None:
        """`trace`: gets a line for each message. `shared`: see `Acceptor`."""
        super().__init__("9p", "9p", memory=tree.memory, **shared)
        self.tree = tree
        self.connections: set[Connection] = set()
        self._places = UserLimits("connections", "CONNECTIONS")
        self._strangers: OrderedDict[Connection, float] = OrderedDict()  # not attached yet: deadlines
        self._stranger_came = trio.Event()
        self.inside = 0  # batches being performed: connections they wake are flushed at their end
        self.batches = 0
        self._trace = trace
        self._woken: list[Connection] = []
        self._woken_event = trio.Event()

    def start_tasks(self) -> None:
        self.nursery.start_soon(self._flush_forever)
        self.nursery.start_soon(self._end_strangers)

    async def serve_descriptors(self, incoming: int = 0, outgoing: int = 1) -> None:
        """One connection over two descriptors (standard input and output); returns at its end. `run` must run."""
        groups = frozenset(os.getgroups())
        peer = Peer(f"9p stdio {next(self._numbers)}", os.geteuid(), os.getegid(), os.getpid(), groups=groups)
        with _nonblocking(incoming), _nonblocking(outgoing):
            await self._serve_connection(Connection(self, peer, incoming, outgoing))

    async def stop(self) -> None:
        """Stop accepting and reading, send replies for up to limits.SHUTDOWN_S, then end all connections."""
        self.stop_accepting()
        with trio.move_on_after(limits.SHUTDOWN_S):
            while not all(connection.idle or connection.ended for connection in self.connections):
                self.flush_woken()
                await trio.sleep(0.005)
        self.scope.cancel()

    def tracer(self, where: str) -> Callable[[str], None] | None:
        """The function that prints a connection's messages, if there is a trace."""
        trace, where = self._trace, where.removeprefix("9p ")
        return None if trace is None else lambda line: trace(f"{where} {line}")

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

    # ------------------------------------------------------------ connections

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
                await self.fairness.accepted(connection.session.peer.account)
            del connection

    def end_tokens(self, ended: Set[Grant]) -> None:
        """End the connections of tokens that were revoked or expired: claims go back."""
        for connection in list(self.connections):
            if mine := connection.session.fids.grants() & ended:
                where, names = connection.session.peer.where, ", ".join(sorted(grant.id for grant in mine if grant))
                log.info("%s: connection ended: token %s revoked, changed or expired", where, names)
                connection.lost()

    def take_place(self, peer: Peer) -> None:
        self._places.acquire(peer.account)

    def give_place(self, peer: Peer) -> None:
        self._places.release(peer.account)

    async def serve(self, sock: socket.socket, tls: TlsCalls | None, peer: Peer, listener: Listener) -> None:
        """Serve a connection, which has to attach in time."""
        descriptor = sock.fileno()
        connection = Connection(self, peer, descriptor, descriptor, tls or os)
        self._strangers[connection] = trio.current_time() + limits.HANDSHAKE_S
        self._stranger_came.set()
        try:
            await self._serve_connection(connection)
        finally:
            self._strangers.pop(connection, None)
        if tls is not None:
            tls.end(descriptor)
        if connection.session.wrong_tokens:
            sock.close()
            await trio.sleep(limits.TOKEN_DELAY_S)

    async def _serve_connection(self, connection: Connection) -> None:
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
