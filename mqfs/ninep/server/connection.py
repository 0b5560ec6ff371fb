"""The 9P server: its connections, over sockets and standard input/output, driven by trio.

A connection carries bytes between two descriptors and a session. It reads and writes the descriptors directly, and uses
trio only when they would block. The server holds the list of connections. The replies that one batch of requests
causes, on all connections, are sent before the next batch is read.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from collections import OrderedDict
from collections.abc import Callable, Iterator, Set
from time import perf_counter
from typing import Any

import trio

from mqfs import limits
from mqfs.engine.tree.tree import Tree
from mqfs.errors import BadFrame, OverLimit
from mqfs.model import Grant
from mqfs.net.peer import Peer
from mqfs.net.sockets import let_client_run
from mqfs.net.tls import DescriptorCalls, TlsCalls
from mqfs.ninep.server.session import Session
from mqfs.quotas import UserLimits
from mqfs.serving.accept import Acceptor, Listener
from mqfs.serving.await_step import answered

log = logging.getLogger("mqfs.ninep")


class Server(Acceptor):
    """All 9P connections of one tree.

    `add` listeners, then `run`. Call `stop` after the tree was closed, which answers parked requests.
    """

    def __init__(self, tree: Tree, *, trace: Callable[[str], None] | None = None, **shared: Any) -> None:
        """`trace`: called with a line for each message. `shared`: see `Acceptor`."""
        super().__init__("9p", "9p", UserLimits("connections", "CONNECTIONS"), memory=tree.memory, **shared)
        self.tree = tree
        self.connections: set[Connection] = set()
        self._strangers: OrderedDict[Connection, float] = OrderedDict()  # not attached yet, with their deadlines
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
        """Serve one connection over two descriptors (standard input and output) to its end. `run` must be running."""
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
        """Return the function that prints a connection's messages, or None without a trace."""
        trace, where = self._trace, where.removeprefix("9p ")
        return None if trace is None else lambda line: trace(f"{where} {line}")

    # ------------------------------------------------------------ replies of parked requests

    def woken(self, connection: Connection) -> None:
        """Schedule the sending of replies that no batch of the connection will send. Called from inside the engine."""
        self._woken.append(connection)
        if not self.inside:
            self._woken_event.set()

    def flush_woken(self) -> None:
        """Send the replies of all woken connections."""
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
                del connection  # keep no reference: it may end meanwhile
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
        """End the connections of revoked or expired tokens, which releases their claims."""
        for connection in list(self.connections):
            if mine := connection.session.fids.grants() & ended:
                where, names = connection.session.peer.where, ", ".join(sorted(grant.id for grant in mine if grant))
                log.info("%s: connection ended: token %s revoked, changed or expired", where, names)
                connection.lost()

    async def serve(self, sock: socket.socket, tls: TlsCalls | None, peer: Peer, listener: Listener) -> None:
        """Serve an accepted connection, which has to attach in time. After wrong tokens its place is released only
        limits.TOKEN_DELAY_S seconds after its socket was closed."""
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
            pass  # `lost` was called during a read
        except Exception:
            log.exception("%s: connection ended", connection.session.peer.where)
        finally:
            self.connections.discard(connection)
            trio.lowlevel.notify_closing(connection.incoming)


@contextlib.contextmanager
def _nonblocking(descriptor: int) -> Iterator[None]:
    """Make a descriptor nonblocking for a while, and restore it: other processes may share it."""
    before = os.get_blocking(descriptor)
    os.set_blocking(descriptor, False)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.set_blocking(descriptor, before)


# ------------------------------------------------------------ a connection

RECEIVE_BYTES = 65_536
BATCHES = 16  # performed before other tasks run
JOIN_BYTES = 65_536  # replies below this are joined into one buffer; larger ones are gathered by the kernel
GATHER = 1_000  # buffers of one writev; the system accepts 1,024
_GONE = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.ETIMEDOUT, errno.EBADF, errno.EIO)


class Connection:
    """Two descriptors (often the same) and the session between them."""

    def __init__(self, server: Server, peer: Peer, incoming: int, outgoing: int, calls: DescriptorCalls = os) -> None:
        self.server, self.incoming, self.outgoing = server, incoming, outgoing
        self._read, self._write, self._writev = calls.read, calls.write, calls.writev
        self._memory = server.tree.memory
        self.dirty = False  # in the server's list of connections with replies to send
        self.ended = False
        self.session = Session(server.tree, peer, self._wake, server.tracer(peer.where))
        self.session.delay, self.session.answered = self._delay, answered
        self._queue = server.fairness.of(peer.account)
        self._readable = self._queue.join()
        self.sent = 0  # bytes
        self._held = 0  # bytes charged to the client's memory limit
        self._unsent: list[memoryview] = []
        self._moved = trio.Event()  # set when bytes were sent, or a reply is ready
        self._pause: trio.CancelScope | None = None  # of a wait for bytes; cancelled when the session resumes

    @property
    def idle(self) -> bool:
        """Whether all replies are sent."""
        return not self._unsent and not self.dirty

    def _wake(self) -> None:
        """Have the server send the session's replies; perhaps called from inside the engine."""
        if not self.dirty and not self.ended:
            self.dirty = True
            self.server.woken(self)

    def _delay(self, then: Callable[[], None]) -> None:
        async def wait() -> None:
            await trio.sleep(limits.TOKEN_DELAY_S)
            then()

        self.server.nursery.start_soon(wait)

    async def run(self) -> None:
        """Read and perform until the client disconnects or breaks the protocol, or the server ends."""
        try:
            while (data := await self._receive()) is not None:
                if not await self._perform(data):
                    break
            await self._finish()
        except BadFrame as error:
            log.warning("%s: connection ended: %s", self.session.peer.where, error)
        finally:
            self._queue.leave()
            self._queue.release()
            self.flush()
            self.ended = True
            with trio.CancelScope(shield=True):
                await self._in_slices(self.session.closing(self.sent))
            self._unsent = []
            self._held = self._memory.change(self.session.peer.account, self._held, 0)

    async def _finish(self) -> None:
        """Send the remaining replies after the client stopped sending: it may still read."""
        await self._in_slices(self.session.abort())
        with trio.move_on_after(limits.SHUTDOWN_S):
            while (self._unsent or self.session.waiting) and not self.ended:
                self._moved = trio.Event()
                await self._moved.wait()

    async def _receive(self) -> bytes | None:
        """Return the bytes read; b"" if there are none but the session resumes; None at the end."""
        size = RECEIVE_BYTES
        if self._held or self.session.unfinished:
            self._count_memory()
            size = max(size, self.session.missing)
        is_awaited = False  # whether the client already had the CPU since the last data
        while not self.ended:
            try:
                data = self._read(self.incoming, size)
                return data if data or self.session.resumes else None
            except BlockingIOError:
                if self.session.waits_to_resume:
                    if await self._pause_until_readable():
                        return b""
                elif is_awaited or not let_client_run():
                    await self._readable(self.incoming)
                is_awaited = not is_awaited
            except OSError as error:
                if error.errno not in _GONE:
                    raise
                return None
        return None

    async def _pause_until_readable(self) -> bool:
        """Wait for bytes, or until the session resumes. Return whether it does."""
        if not self.session.resumes:
            with trio.CancelScope() as self._pause:
                await self._readable(self.incoming)
            self._pause = None
        return self.session.resumes

    async def _in_slices(self, steps: Iterator[None]) -> None:
        """Perform steps in time slices of the user, however many of its connections end at once."""
        done = False
        while not done:
            await self._queue.end()
            until = perf_counter() + limits.TURN_S
            if not (done := all(perf_counter() < until for _ in steps)):
                await trio.lowlevel.checkpoint()

    async def _perform(self, data: bytes) -> bool:
        """Perform a batch and send its replies. Wait while too much is unanswered or unsent. Return False if ended."""
        server, session, queue = self.server, self.session, self._queue
        done = False
        while not done:
            if queue.owner is not None:
                await queue.acquire()
            if self.ended:
                break
            began = queue.start()
            self.dirty = True  # so that `_wake` does nothing: the batch flushes at its end
            server.inside += 1
            try:
                done = session.receive(data, limits.TURN_S if began else limits.BATCH_S)
            finally:
                server.inside -= 1
                self.flush()
                server.flush_woken()
            data = b""
            server.batches += 1
            if began or not done or queue.owner is not None:
                await queue.stop(began, done)
            elif server.batches % BATCHES == 0:
                await trio.lowlevel.checkpoint()
            if not done and session.congested:
                self._count_memory()
                self._moved = trio.Event()
                await self._moved.wait()
        return not self.ended

    def flush(self) -> None:
        """Send replies as far as possible without waiting. A task of its own sends the rest."""
        self.dirty = False
        if self._unsent:
            return  # `_drain` calls this again after sending them
        out = self.session.take()
        if out and not self.session.is_mute:
            self._send(out)
        if self._pause is not None and self.session.resumes:
            self._pause.cancel()
        if self._unsent and not self.ended:
            self._note_unsent()
            self.server.nursery.start_soon(self._drain)

    def _note_unsent(self) -> None:
        self.session.unsent = sum(map(len, self._unsent))

    def _count_memory(self) -> None:
        """Charge the bytes in memory to the client's limit. Beyond it, end the connection."""
        try:
            self._held = self._memory.change(self.session.peer.account, self._held, self.session.held)
        except OverLimit as error:
            log.warning("%s: connection ended: %s", self.session.peer.where, error)
            self.lost()

    def moved(self) -> None:
        """Send the replies of parked requests, and continue reading if that waited for them."""
        self.flush()
        if self._unsent:
            self._count_memory()
        self._moved.set()

    def _send(self, out: list[bytes]) -> None:
        if len(out) == 1:
            whole = out[0]
        elif sum(map(len, out)) <= JOIN_BYTES:
            whole = b"".join(out)
        else:
            self._unsent = [memoryview(part) for part in out]
            self._gather()
            return
        try:
            sent = self._write(self.outgoing, whole)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._broken(error)
            return
        self.sent += sent
        if sent < len(whole):
            self._unsent = [memoryview(whole)[sent:]]

    def _gather(self) -> None:
        """Send the unsent buffers until the descriptor would block."""
        while self._unsent:
            try:
                sent = self._writev(self.outgoing, self._unsent[:GATHER])
            except BlockingIOError:
                return
            except OSError as error:
                self._broken(error)
                return
            self.sent += sent
            done = 0
            while done < len(self._unsent) and sent >= len(self._unsent[done]):
                sent -= len(self._unsent[done])
                done += 1
            del self._unsent[:done]
            if sent:
                self._unsent[0] = self._unsent[0][sent:]

    async def _drain(self) -> None:
        try:
            await self._send_rest()
        except Exception:
            log.exception("%s: connection ended", self.session.peer.where)
            self.lost()

    async def _send_rest(self) -> None:
        while self._unsent and not self.ended:
            try:
                await trio.lowlevel.wait_writable(self.outgoing)
            except (trio.ClosedResourceError, OSError):
                return
            self._gather()
            self._note_unsent()
        if not self.ended:
            self._count_memory()
        self._moved.set()
        if not self.ended:
            self.flush()

    def _broken(self, error: OSError) -> None:
        if error.errno not in _GONE:
            log.warning("%s: %s", self.session.peer.where, error)
        self.lost()

    def lost(self) -> None:
        """Drop unsent bytes and end the connection, its reading side too."""
        self._unsent, self.ended = [], True
        self._moved.set()
        with contextlib.suppress(OSError, ValueError):
            self._queue.closing(self.incoming)
