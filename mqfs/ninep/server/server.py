"""The 9P server: sockets and standard input/output, driven by trio.

Owns listening, the peers' identity, and carrying bytes between connections and their sessions. What a request does is
the session's. Reading and sending go straight to the descriptor and meet trio only when it would block; what one
batch of requests answers, on whatever connections, leaves before the next batch is read.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import math
import os
import socket
from collections.abc import Callable, Hashable, Iterator
from time import perf_counter, thread_time
from typing import TextIO
from weakref import WeakValueDictionary

import trio

from mqfs import limits
from mqfs.engine.tree import Tree
from mqfs.errors import BadAddress, BadFrame, OverLimit
from mqfs.net import identity
from mqfs.net.address import Address, TcpAddress, UnixAddress, explain_failure, is_loopback, parse_address
from mqfs.net.identity import Peer
from mqfs.net.sockets import BACKLOG, SocketFile, peer_groups
from mqfs.net.sockets import peer as peer_of
from mqfs.net.tokens import Tokens
from mqfs.ninep.server.session import Session
from mqfs.shares import Shares

log = logging.getLogger(__name__)

RECEIVE_BYTES = 65_536
BATCHES = 16  # read in a row from one connection before the others have their turn
JOIN_BYTES = 65_536  # replies below this are joined into one buffer; larger ones are gathered by the kernel
GATHER = 1_000  # buffers of one writev; the system takes 1,024
_GONE = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.ETIMEDOUT, errno.EBADF, errno.EIO)


# ---------------------------------------------------------------- listening


class Listener:
    """One address that is listened on."""

    def __init__(self, address: Address, sock: socket.socket, end: Callable[[], None]) -> None:
        self.address, self.socket, self._end = address, sock, end

    def close(self) -> None:
        """Stop, and remove the socket's file if it still is ours."""
        self._end()


def listen(address: Address | str, *, mode: int = 0o666, insecure: bool = False) -> Listener:
    """Listen now, or BadAddress. `mode` is that of a unix socket; `insecure` permits TCP off loopback."""
    where = parse_address(address) if isinstance(address, str) else address
    try:
        return _listen_unix(where, mode) if isinstance(where, UnixAddress) else _listen_tcp(where, insecure)
    except OSError as error:
        raise explain_failure(where, error) from None


def _listen_unix(address: UnixAddress, mode: int) -> Listener:
    file = SocketFile(address.path, socket.SOCK_STREAM, mode)
    return Listener(address, file.socket, file.close)


def _listen_tcp(address: TcpAddress, insecure: bool) -> Listener:
    if not insecure and not is_loopback(address.host):
        raise BadAddress(f"{address} is off loopback, where nothing is encrypted; --insecure permits it")
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
    return Listener(TcpAddress(address.host, sock.getsockname()[1]), sock, sock.close)


# ---------------------------------------------------------------- turns


class Turns:
    """Who performs, of users. `shared` while there is more than one of them."""

    def __init__(self) -> None:
        self.last: Turn | None = None
        self.changed_at = -math.inf  # when another user than before came

    def shared(self, turn: Turn) -> bool:
        now = perf_counter()
        if self.last is not turn:
            self.last, self.changed_at = turn, now
        return now - self.changed_at < limits.TURN_SHARED_S


class Turn:
    """One user's: what its connections perform together, some limits.TURN_S, before all other users have had theirs.

    Counted, in seconds of the processor, while others perform something, too. Then a request that took long, as it
    cannot be divided, is followed by a rest, for otherwise every second request of others would wait for such a one.
    """

    def __init__(self, turns: Turns) -> None:
        self.owner: trio.lowlevel.Task | None = None  # whose turn it is next, or who rests; None: whoever comes
        self._turns = turns
        self._spent = 0.0
        self._queue = trio.lowlevel.ParkingLot()

    async def come(self) -> None:
        """Wait for the turn, behind others of the same user."""
        if self.owner is not None:
            await self._queue.park()

    def begin(self) -> float:
        """When it began on the processor's clock; 0 where that does not matter."""
        return thread_time() if self._turns.shared(self) else 0.0

    async def end(self, began: float, done: bool) -> None:
        """Something was performed: let others have their turn where it was enough."""
        cost = thread_time() - began if began else 0.0
        self._spent += cost
        if not done or self._spent >= limits.TURN_S:
            if began:
                self.owner, self._spent = trio.lowlevel.current_task(), 0.0
            if cost > limits.TURN_LONG_S:
                await trio.sleep(min(max(limits.TURN_REST * cost, limits.TURN_REST_S), limits.TURN_REST_MOST_S))
            else:
                await trio.lowlevel.checkpoint()
        self.leave()

    def leave(self) -> None:
        """The next one has the turn, if it was this one's."""
        if self.owner is trio.lowlevel.current_task():
            self.owner = next(iter(self._queue.unpark()), None)


# ---------------------------------------------------------------- one connection


class Connection:
    """Two descriptors (often one) and the session between them."""

    def __init__(self, server: Server, peer: Peer, incoming: int, outgoing: int) -> None:
        self.server, self.incoming, self.outgoing = server, incoming, outgoing
        self._memory = server.tree.memory
        self.dirty = False  # in the server's list of those with replies to send
        self.ended = False
        self.session = Session(server.tree, peer, self._wake, server.tracer(peer.where))
        self.session.delay = self._delay
        self._turn = server.turn_of(peer.account)
        self.sent = 0  # bytes
        self._held = 0  # bytes of memory that count as the client's
        self._unsent: list[memoryview] = []
        self._moved = trio.Event()  # set when something was sent, or a reply came

    @property
    def idle(self) -> bool:
        """Everything that was answered is sent."""
        return not self._unsent and not self.dirty

    def _wake(self) -> None:
        """The session has a reply; perhaps from inside the engine."""
        if not self.dirty and not self.ended:
            self.dirty = True
            self.server.woken(self)

    def _delay(self, then: Callable[[], None]) -> None:
        async def wait() -> None:
            await trio.sleep(limits.TOKEN_DELAY_S)
            then()

        self.server.nursery.start_soon(wait)

    async def run(self) -> None:
        """Read and perform until the client goes, breaks the protocol, or the server ends."""
        try:
            while data := await self._receive():
                if not await self._perform(data):
                    break
            await self._finish()
        except BadFrame as error:
            log.warning("%s: connection ended: %s", self.session.peer.where, error)
        finally:
            self._turn.leave()
            self.flush()
            self.ended = True
            with trio.CancelScope(shield=True):
                await self._in_slices(self.session.closing(self.sent))
            self._unsent = []
            self._held = self._memory.change(self.session.peer.account, self._held, 0)

    async def _finish(self) -> None:
        """The client sends no more, but may still read: what was done and is not answered yet goes to it."""
        await self._in_slices(self.session.give_up())
        with trio.move_on_after(limits.SHUTDOWN_S):
            while (self._unsent or self.session.waiting) and not self.ended:
                self._moved = trio.Event()
                await self._moved.wait()

    async def _receive(self) -> bytes:
        """What is there to be read; b"" at the end."""
        size = RECEIVE_BYTES
        if self._held or self.session.unfinished:
            self._count_memory()
            size = max(size, self.session.missing)
        while not self.ended:
            try:
                return os.read(self.incoming, size)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self.incoming)
            except OSError as error:
                if error.errno not in _GONE:
                    raise
                return b""
        return b""

    async def _in_slices(self, steps: Iterator[None]) -> None:
        """Others have their turn now and then."""
        until = perf_counter() + limits.TURN_S
        for _ in steps:
            if perf_counter() > until:
                await trio.lowlevel.checkpoint()
                until = perf_counter() + limits.TURN_S

    async def _perform(self, data: bytes) -> bool:
        """Perform a batch and send what it answers; wait while too much is unanswered or unsent. False: ended."""
        server, session, turn = self.server, self.session, self._turn
        done = False
        while not done:
            if turn.owner is not None:
                await turn.come()
            if self.ended:
                break
            began = turn.begin()
            self.dirty = True  # so that the session's wake has nothing to do
            server.inside += 1
            try:
                done = session.receive(data, limits.TURN_S if began else limits.BATCH_S)
            finally:
                server.inside -= 1
                self.flush()
                server.flush_woken()
            data = b""
            server.batches += 1
            if began or not done or turn.owner is not None:
                await turn.end(began, done)
            elif server.batches % BATCHES == 0:
                await trio.lowlevel.checkpoint()
            if not done and session.congested:
                self._count_memory()
                self._moved = trio.Event()
                await self._moved.wait()
        return not self.ended

    def flush(self) -> None:
        """Send what there is, as far as it goes without waiting; a task of its own sees to the rest."""
        self.dirty = False
        if self._unsent:
            return  # that task comes back here
        out = self.session.take()
        if out:
            self._send(out)
        if self._unsent and not self.ended:
            self._note_unsent()
            self.server.nursery.start_soon(self._drain)

    def _note_unsent(self) -> None:
        self.session.unsent = sum(map(len, self._unsent))

    def _count_memory(self) -> None:
        """What waits here comes from the client's share of the server's memory; beyond it the connection ends."""
        try:
            self._held = self._memory.change(self.session.peer.account, self._held, self.session.held)
        except OverLimit as error:
            log.warning("%s: connection ended: %s", self.session.peer.where, error)
            self.lost()

    def moved(self) -> None:
        """Replies came from elsewhere: send them, and read on if that was what it waited for."""
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
            sent = os.write(self.outgoing, whole)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._broken(error)
            return
        self.sent += sent
        if sent < len(whole):
            self._unsent = [memoryview(whole)[sent:]]

    def _gather(self) -> None:
        """Send what is unsent, until it is or the descriptor takes no more."""
        while self._unsent:
            try:
                sent = os.writev(self.outgoing, self._unsent[:GATHER])
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
        """Nothing can be sent any more: the reading side is told by its own descriptor, or here."""
        self._unsent, self.ended = [], True
        self._moved.set()
        with contextlib.suppress(OSError, ValueError):
            trio.lowlevel.notify_closing(self.incoming)


# ---------------------------------------------------------------- the server


class Server:
    """All 9P connections of one tree.

    `add` what `listen` returned, then `run`; `stop` ends it after the tree was closed (which answers what waits).
    """

    def __init__(
        self, tree: Tree, *, tcp_user: str = "nobody", tokens: Tokens | None = None, trace: TextIO | None = None
    ) -> None:
        uid = identity.user_number(tcp_user)
        if uid is None:
            raise BadAddress(f"no user is called {tcp_user!r}, as whom clients over TCP would act")
        self.tree = tree
        self.connections: set[Connection] = set()
        self._places = Shares("connections", "CONNECTIONS")
        self._turns, self._turn_of = Turns(), WeakValueDictionary[Hashable, Turn]()
        self._strangers: dict[Connection, float] = {}  # those without a Tattach yet, and until when that is well
        self._stranger_came = trio.Event()
        self.listeners: list[Listener] = []
        self.inside = 0  # a batch is being performed: what it wakes is flushed at its end
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
        """Accept and read no more, send what is answered, within limits.SHUTDOWN_S; then end all connections."""
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
        """That of a user, for all its connections."""
        return self._turn_of.setdefault(user, Turn(self._turns))

    def tracer(self, where: str) -> Callable[[str], None] | None:
        """The function that prints a connection's messages, if there is a trace."""
        trace = self._trace
        return None if trace is None else lambda line: print(where, line, file=trace, flush=True)

    # ------------------------------------------------------------ replies that came from elsewhere

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
        """End connections whose clients do not say who they are."""
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
                await trio.sleep(0.1)  # out of descriptors, say: let some go first
            else:
                self._begin(sock, listener)

    def _refuse(self, why: str) -> None:
        """Say once why connections are not accepted, until one is."""
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
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a host that is gone lets go in a minute
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, limits.SILENT_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, limits.ASKED_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, limits.ASKED)
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
        except Exception as error:  # no thread, or no answer: it is asked again when it matters
            log.warning("%s: user %d was not looked up: %s", peer.where, peer.uid, error)

    async def _serve(self, connection: Connection) -> None:
        self.connections.add(connection)
        try:
            await connection.run()
        except trio.ClosedResourceError:
            pass  # it was found lost while it was read
        except Exception:
            log.exception("%s: connection ended", connection.session.peer.where)
        finally:
            self.connections.discard(connection)
            trio.lowlevel.notify_closing(connection.incoming)


@contextlib.contextmanager
def _nonblocking(descriptor: int) -> Iterator[None]:
    """Others may share the descriptor: leave it as it was."""
    before = os.get_blocking(descriptor)
    os.set_blocking(descriptor, False)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.set_blocking(descriptor, before)
