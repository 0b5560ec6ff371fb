"""The arrival of a connection: who is at its other end, and the TLS handshake, waited for by trio.

Owns the handshake's time-out, and lookups of users by threads.
"""

from __future__ import annotations

import logging
import socket

import trio

from mqfs import limits
from mqfs.errors import Denied
from mqfs.net.address import Address, UnixAddress
from mqfs.net.certificates import ServerTls, user_of
from mqfs.net.peer import Peer
from mqfs.net.sockets import detect_dead_host, peer_groups
from mqfs.net.sockets import peer as peer_of
from mqfs.net.tls import TlsCalls
from mqfs.net.tokens import Tokens
from mqfs.serving.fairness import Turn

log = logging.getLogger("mqfs.net")


def peer_at(sock: socket.socket, address: Address, name: str, number: int, tcp_uid: int, tokens: Tokens | None) -> Peer:
    """The peer of a socket that was accepted at an address, by the front end of that name. Raises OSError."""
    network = str(address).partition("!")[0]
    where = f"{name} {network} {number}"
    if not isinstance(address, UnixAddress):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        detect_dead_host(sock)
        return Peer(where, tcp_uid, fixed=True, host=sock.getpeername()[0], tokens=tokens)
    pid, uid, gid = peer_of(sock)
    return Peer(where, uid, gid, pid, groups=peer_groups(sock))


async def look_up(peer: Peer) -> None:
    """Ask the system's database about its user, unless that was done lately."""
    if peer.is_known:
        return
    try:
        await trio.to_thread.run_sync(peer.look_up)
    except Exception as error:  # no thread, or no answer: it is looked up again when it is needed
        log.warning("%s: user %d not looked up: %s", peer.where, peer.uid, error)


async def shake_hands(server: ServerTls, protocol: str, descriptor: int, peer: Peer, turn: Turn) -> TlsCalls | None:
    """Complete the handshake, a step in each turn of the user; then the peer is the user of its certificate. None: it
    failed, and the reason is logged."""
    tls = TlsCalls(server.machine(protocol), lambda why: log.warning("%s: connection ended: %s", peer.where, why))
    with trio.move_on_after(limits.HANDSHAKE_S) as scope:
        try:
            await _complete(tls, descriptor, turn)
        except OSError:
            return None  # the peer has gone, or has failed
        finally:
            turn.leave()
    if scope.cancelled_caught:
        log.info("%s: connection ended: no TLS handshake in %g s", peer.where, limits.HANDSHAKE_S)
    if not tls.ready:
        return None
    if server.client_ca is not None:
        try:
            peer.uid = await trio.to_thread.run_sync(user_of, tls.machine.certificate)
            peer.certified = True
        except Exception as error:  # no such user; or no thread, or no answer
            peer.refuse(error.detail if isinstance(error, Denied) else f"user not looked up: {error}")
            log.warning("%s: client refused: %s", peer.where, peer.refused)
    return tls


async def _complete(tls: TlsCalls, descriptor: int, turn: Turn) -> None:
    while not tls.ready:
        if turn.owner is not None:
            await turn.come()
        began = turn.begin()
        waits_for = tls.shake_hands(descriptor)
        await turn.end(began, True)
        if waits_for == "read":
            await trio.lowlevel.wait_readable(descriptor)
        elif waits_for == "write":
            await trio.lowlevel.wait_writable(descriptor)
