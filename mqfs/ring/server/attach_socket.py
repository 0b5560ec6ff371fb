"""The attach socket: the unix socket at which processes of this machine ask for a group's ring.

Owns the connections: each is one attachment of one user to one group, and ends with it. Which users may attach, and
which groups have rings, is decided in registry.py.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import logging
import socket
from typing import Any

import trio

from mqfs import limits
from mqfs.errors import BadAddress, BadRequest, DiskFailed, MqfsError, OverLimit
from mqfs.net.address import UnixAddress, explain_failure
from mqfs.net.peer import Peer
from mqfs.net.sockets import SocketFile, peer, peer_groups
from mqfs.quotas import Shares
from mqfs.ring import protocol
from mqfs.ring.server.registry import Attachment, RingRegistry

log = logging.getLogger("mqfs.ring")

ATTACH_S = 10.0  # from a connection to its attach request
_RETRY_S = 0.1


def listen(address: UnixAddress, *, mode: int = 0o666) -> SocketFile:
    """Listen beside a 9P socket, now, or BadAddress."""
    path = address.path + protocol.SUFFIX
    try:
        return SocketFile(path, socket.SOCK_SEQPACKET, mode)
    except OSError as error:
        raise BadAddress(explain_failure(UnixAddress(path), error)) from None


class AttachConnection:
    """One connection."""

    def __init__(
        self, server: AttachSocket, sock: trio.socket.SocketType, uid: int, gid: int, pid: int, where: str
    ) -> None:
        self.server, self.socket = server, sock
        self.uid, self.gid, self.pid, self.where = uid, gid, pid, where
        self.attachment: Attachment | None = None

    async def run(self) -> None:
        """Serve it until it ends, or breaks the protocol."""
        try:
            with trio.move_on_after(ATTACH_S):
                while self.attachment is None and await self.serve_one():
                    pass
            while self.attachment is not None and await self.serve_one():
                pass
        except OSError:
            pass  # it is gone
        finally:
            if self.attachment is not None:
                self.attachment.close()

    async def serve_one(self) -> bool:
        """Answer one request. False: it was the last."""
        data = await self.socket.recv(limits.RING_PACKET_BYTES + 1)
        if not data:
            return False
        is_valid = False
        fds: list[int] = []
        try:
            request = protocol.decode(data)
            is_valid = True
            answer = self.carry_out(request, fds)
        except MqfsError as error:
            answer = protocol.refusal(error)
        except Exception:
            log.exception("%s: request failed", self.where)
            answer = protocol.refusal(DiskFailed("internal server error (see the server log)"))
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        await self.socket.sendmsg([protocol.encode(answer)], passed)
        return is_valid

    def carry_out(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """The answer; `fds` gets the descriptors to send with it."""
        wanted = [key for key in ("attach", "stream", "number") if key in request]
        if len(wanted) != 1:
            raise BadRequest(f"invalid packet: keys {sorted(request)} (expected one of attach, stream, number)")
        value = request[wanted[0]]
        if wanted[0] == "attach":
            return self.attach(value, request.get("version"), fds)
        if self.attachment is None:
            raise BadRequest("not attached (expected attach first)")
        if wanted[0] == "stream":
            if not isinstance(value, str):
                raise BadRequest('"stream" must be a string')
            number = self.attachment.number(value)
            return {"stream": value, "view": True} if number is None else {"stream": value, "number": number}
        if type(value) is not int or not 0 < value < 1 << 32:
            raise BadRequest('"number" must be an integer from 1 to 4294967295')
        return {"number": value, "stream": self.attachment.name(value)}

    def attach(self, path: Any, version: Any, fds: list[int]) -> dict[str, Any]:
        if not isinstance(path, str):
            raise BadRequest('"attach" must be a string')
        if version != protocol.VERSION:
            raise BadRequest(f"version {version!r} (expected {protocol.VERSION})")
        if self.attachment is not None:
            raise BadRequest("already attached (one group a connection)")
        groups = peer_groups(self.socket)
        user = Peer(self.where, self.uid, self.gid, self.pid, groups=groups).itself()
        self.attachment = self.server.rings.attach(user, path)
        fds.append(self.attachment.fileno())
        group = self.attachment.group
        settings = dict(line.split(" ", 1) for line in group.settings.lines())
        return {
            "generation": self.attachment.generation,
            "group": group.number,
            "sync": settings["sync"],
            "keep": settings.get("keep", "disk"),
            "deliver": settings["deliver"],
            "ttl_ns": group.settings.ttl,
            "words": group.settings.words.listed,
            "ephemeral": True,  # it knows such messages
        }


class AttachSocket:
    """All attach sockets of a server. `run` it; `stop` ends it, and all attachments."""

    def __init__(self, rings: RingRegistry, listeners: list[SocketFile]) -> None:
        self.rings, self.listeners = rings, listeners
        self._places = Shares("attachments to rings", "RING_DOORS")
        self._numbers = itertools.count(1)
        self._scope = trio.CancelScope()
        self._ended = trio.Event()
        self._full = False

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    for listener in self.listeners:
                        nursery.start_soon(self._accept, listener, nursery)
                    task_status.started()
        finally:
            for listener in self.listeners:
                listener.close()
            self._ended.set()

    async def stop(self) -> None:
        self._scope.cancel()
        await self._ended.wait()

    async def _accept(self, listener: SocketFile, nursery: trio.Nursery) -> None:
        while True:
            try:
                sock, _ = listener.socket.accept()
            except BlockingIOError:
                await trio.lowlevel.wait_readable(listener.socket)
            except OSError as error:
                self._refuse(f"{listener.path}: {error}")
                await trio.sleep(_RETRY_S)  # out of descriptors, say: some may be closed
            else:
                sock.setblocking(False)
                pid, uid, gid = peer(sock)
                if self._admit(sock, uid):
                    nursery.start_soon(self._serve, sock, pid, uid, gid)

    def _admit(self, sock: socket.socket, uid: int) -> bool:
        """Take a place for a connection. False: there is none, and the client got the reason."""
        try:
            self._places.take(uid)
        except OverLimit as error:
            self._refuse(str(error))
            with sock, contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RD)
                sock.send(protocol.encode(protocol.refusal(error)))
                while sock.recv(1):  # unread requests would reset the connection and lose our answer
                    pass
            return False
        self._full = False
        return True

    def _refuse(self, why: str) -> None:
        """Log once why connections are not accepted, until one is."""
        if not self._full:
            log.warning("%s", why)
        self._full = True

    async def _serve(self, sock: socket.socket, pid: int, uid: int, gid: int) -> None:
        where = f"ring {next(self._numbers)}"
        try:
            with trio.socket.from_stdlib_socket(sock) as connection:
                await AttachConnection(self, connection, uid, gid, pid, where).run()
        except Exception:
            log.exception("%s: connection ended", where)
        finally:
            self._places.give(uid)


__all__ = ["AttachSocket", "listen"]
