"""Accepting connections: the addresses of a front end, and the peer of each connection.

Every front end that is served at sockets is an `Acceptor`. A connection goes through these steps, and each front end
fills in those marked *:

    accept  ->  peer*  ->  place*  ->  TLS handshake  ->  look-up of the user  ->  serve*  ->  place and memory released
                             |
                             full: refuse*

Users share the accepting: between two connections of one user the others are served (fairness.py).
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import socket
from collections.abc import Callable, Hashable, Set
from functools import partial

import attrs
import trio

from mqfs import limits
from mqfs.errors import BadAddress, Denied, OverLimit
from mqfs.model import Grant
from mqfs.net import identity
from mqfs.net.identity import NotAnswered
from mqfs.net.peer import Peer
from mqfs.net.sockets import (
    BACKLOG,
    Address,
    SocketFile,
    TcpAddress,
    TlsAddress,
    UnixAddress,
    detect_dead_host,
    explain_failure,
    is_loopback,
    parse_address,
    peer_groups,
)
from mqfs.net.sockets import peer as peer_of
from mqfs.net.tls import ServerTls, TlsCalls, user_of
from mqfs.net.tokens import Tokens
from mqfs.quotas import UserLimits
from mqfs.serving import memory
from mqfs.serving.await_step import answered, await_step
from mqfs.serving.fairness import Fairness, FairQueue

log = logging.getLogger("mqfs.net")
RETRY_S = 0.1  # after a failure to accept, such as for lack of descriptors: some may be closed meanwhile


class Acceptor:
    """The sockets of one front end. `add` listeners, then `run`. The front end implements its own stop."""

    def __init__(
        self,
        name: str,
        protocol: str,
        places: UserLimits,
        *,
        memory: UserLimits | None = None,
        fairness: Fairness | None = None,
        tcp_user: str = "nobody",
        tokens: Tokens | None = None,
        tls: ServerTls | None = None,
    ) -> None:
        """`name`: in logs and `.who`. `places`: the limit of connections, by user. `fairness`: shared by front ends
        with the same users. `tcp_user`: the user as whom TCP clients act. `tls`: for TLS addresses, with `protocol` as
        the ALPN name; its memory is charged to `memory`, by user. Raises BadAddress."""
        uid = identity.user_number(tcp_user)
        if uid is None:
            raise BadAddress(f"unknown user {tcp_user!r} of TCP clients (expected one of getent passwd)")
        self.name, self.fairness = name, fairness or Fairness()
        self.tcp_uid, self.tokens = uid, tokens
        self.listeners: list[Listener] = []
        self.stopping = False
        self.scope, self.ended = trio.CancelScope(), trio.Event()  # of `run`
        self.nursery: trio.Nursery
        self._protocol, self._places, self._tls, self._memory = protocol, places, tls, memory
        self._numbers = itertools.count(1)
        self._is_full = False
        if tokens is not None:
            tokens.on_ended.append(self.end_tokens)

    def add(self, listener: Listener) -> None:
        """Serve an address, from the beginning or while running."""
        self.listeners.append(listener)
        if hasattr(self, "nursery"):
            self.nursery.start_soon(self._accept, listener)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until `scope` is cancelled."""
        try:
            with self.scope:
                async with trio.open_nursery() as self.nursery:
                    self.start_tasks()
                    for listener in self.listeners:
                        self.nursery.start_soon(self._accept, listener)
                    task_status.started()
        finally:
            self.stop_accepting()
            self.ended.set()

    def stop_accepting(self) -> None:
        self.stopping = True
        for listener in self.listeners:
            if listener.socket.fileno() >= 0:
                trio.lowlevel.notify_closing(listener.socket)
            listener.close()

    # ------------------------------------------------------------ hooks of a front end

    def start_tasks(self) -> None:
        """Start the front end's own tasks in `nursery`."""

    def peer(self, sock: socket.socket, address: Address) -> Peer:
        """Return the peer of an accepted socket. Raises OSError if it has disconnected."""
        where = f"{self.name} {str(address).partition('!')[0]} {next(self._numbers)}"
        if not isinstance(address, UnixAddress):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            detect_dead_host(sock)
            return Peer(where, self.tcp_uid, fixed=True, host=sock.getpeername()[0], tokens=self.tokens)
        pid, uid, gid = peer_of(sock)
        return Peer(where, uid, gid, pid, groups=peer_groups(sock))

    def take_place(self, peer: Peer) -> None:
        """Acquire a place for a connection. Raises OverLimit."""
        self._places.acquire(peer.account)

    def give_place(self, peer: Peer) -> None:
        self._places.release(peer.account)

    def refuse(self, sock: socket.socket, error: OverLimit) -> None:
        """Send a client the reason of its refusal in plain text; the caller then closes the socket."""

    async def serve(self, sock: socket.socket, tls: TlsCalls | None, peer: Peer, listener: Listener) -> None:
        raise NotImplementedError

    def end_tokens(self, ended: Set[Grant]) -> None:
        """End the connections of tokens that were revoked or expired."""

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
                self._log_refusal(listener, error)
                await trio.sleep(RETRY_S)
            else:
                await self.fairness.accepted(self._admit(sock, listener))

    def _admit(self, sock: socket.socket, listener: Listener) -> Hashable:
        """Serve a connection, unless its user has too many. Return the user's account; None: it has disconnected."""
        encrypted = isinstance(listener.address, TlsAddress)
        sock.setblocking(False)
        try:
            peer = self.peer(sock, listener.address)
        except OSError:
            sock.close()
            return None
        try:
            self._take(peer, encrypted)
        except OverLimit as error:
            self._log_refusal(listener, error)
            with sock:
                if not encrypted:
                    self.refuse(sock, error)
        else:
            self._is_full = False
            memory.count_connection()
            self.nursery.start_soon(self._serve, sock, listener, peer, encrypted)
        return peer.account

    def _log_refusal(self, listener: Listener, why: Exception) -> None:
        """Log once why connections are not accepted, until one is accepted."""
        if not self._is_full:
            refused = "connection refused: " if isinstance(why, OverLimit) else ""
            log.warning("%s: %s%s", listener.address, refused, why)
        self._is_full = True

    def _take(self, peer: Peer, encrypted: bool) -> None:
        """Acquire a place, and memory for TLS. Raises OverLimit."""
        self.take_place(peer)
        try:
            if encrypted and self._memory is not None:
                self._memory.acquire(peer.account, limits.TLS_BYTES)
        except OverLimit:
            self.give_place(peer)
            raise

    async def _serve(self, sock: socket.socket, listener: Listener, peer: Peer, encrypted: bool) -> None:
        tls = None
        try:
            with sock:
                if encrypted:
                    assert self._tls is not None, "a listener at an address of TLS, and no certificate"
                    queue = self.fairness.of(peer.account)
                    tls = await shake_hands(self._tls, self._protocol, sock.fileno(), peer, queue)
                    if tls is None:
                        return
                try:
                    await await_step(answered(peer.look_up))
                except NotAnswered:
                    log.warning("%s: connection ended: user %d not looked up in time", peer.where, peer.uid)
                    return
                await self.serve(sock, tls, peer, listener)
        except* Exception:  # also beside a cancellation: an exception would end all connections
            log.exception("%s: connection ended", peer.where)
        finally:
            self.give_place(peer)
            if encrypted and self._memory is not None:
                self._memory.release(peer.account, limits.TLS_BYTES)


async def shake_hands(
    server: ServerTls, protocol: str, descriptor: int, peer: Peer, queue: FairQueue
) -> TlsCalls | None:
    """Complete the handshake, a step in each turn of the user. The peer then is the user of its certificate. Return
    None if it failed; the reason is logged."""
    tls = TlsCalls(server.machine(protocol), lambda why: log.warning("%s: connection ended: %s", peer.where, why))
    with trio.move_on_after(limits.HANDSHAKE_S) as scope:
        try:
            await _complete(tls, descriptor, queue)
        except OSError:
            return None  # the peer disconnected, or TLS failed
        finally:
            queue.release()
    if scope.cancelled_caught:
        log.info("%s: connection ended: no TLS handshake in %g s", peer.where, limits.HANDSHAKE_S)
    if not tls.ready:
        return None
    if server.client_ca is not None:
        try:
            peer.uid = await await_step(answered(partial(user_of, tls.machine.certificate)))
            peer.certified = True
        except Exception as error:  # no such user, or no answer
            peer.refuse(error.detail if isinstance(error, Denied) else f"user not looked up: {error}")
            log.warning("%s: client refused: %s", peer.where, peer.refused)
    return tls


async def _complete(tls: TlsCalls, descriptor: int, queue: FairQueue) -> None:
    while not tls.ready:
        if queue.owner is not None:
            await queue.acquire()
        began = queue.start()
        waits_for = tls.shake_hands(descriptor)
        await queue.stop(began, True)
        if waits_for == "read":
            await trio.lowlevel.wait_readable(descriptor)
        elif waits_for == "write":
            await trio.lowlevel.wait_writable(descriptor)


# ------------------------------------------------------------ listening


class Listener:
    """One address and its listening socket."""

    def __init__(self, address: Address, sock: socket.socket, close: Callable[[], None]) -> None:
        """`close`: stops listening, and removes the socket's file if it is still this listener's."""
        self.address, self.socket, self.close = address, sock, close


def listen(
    address: Address | str,
    *,
    kind: int = socket.SOCK_STREAM,
    mode: int = 0o666,
    insecure: bool = False,
    identified: bool = False,
) -> Listener:
    """Listen now. `kind` and `mode` are those of a unix socket, the others as of `require_safe`. Raises BadAddress."""
    where = parse_address(address) if isinstance(address, str) else address
    require_safe(where, insecure=insecure, identified=identified)
    try:
        if isinstance(where, UnixAddress):
            file = SocketFile(where.path, kind, mode)
            return Listener(where, file.socket, file.close)
        return _listen_tcp(where)
    except OSError as error:
        raise BadAddress(explain_failure(where, error)) from None


def adopt(sock: socket.socket, *, insecure: bool = False) -> Listener:
    """Return the listener of a socket that another program opened, and whose file stays that program's. Raises
    BadAddress if `listen` would refuse its address."""
    where: Address
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        where = UnixAddress(os.fsdecode(name).replace("\0", "@"))
    else:
        where = TcpAddress(name[0], name[1])
        require_safe(where, insecure=insecure)
    sock.setblocking(False)
    return Listener(where, sock, sock.close)


def require_safe(address: Address, *, insecure: bool = False, identified: bool = False) -> None:
    """Check an address to listen at. Off loopback, TLS needs clients that are `identified` (by token or certificate),
    and TCP needs `insecure`, which permits both. Raises BadAddress."""
    if insecure or isinstance(address, UnixAddress) or is_loopback(address.host):
        return
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
