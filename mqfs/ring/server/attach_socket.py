"""The attach socket: the unix socket at which processes of this machine ask for a group's ring.

Each connection is one attachment of one user to one group, and ends with it. registry.py decides which users may attach
and which groups have rings.
"""

from __future__ import annotations

import array
import contextlib
import logging
import socket
from typing import Any

import trio

from mqfs import limits
from mqfs.errors import BadRequest, DiskFailed, MqfsError, OverLimit, Unsupported
from mqfs.net.peer import Peer
from mqfs.net.sockets import UnixAddress, pid_namespace
from mqfs.net.tls import TlsCalls
from mqfs.quotas import UserLimits
from mqfs.ring import protocol
from mqfs.ring.server.registry import Attachment, RingRegistry
from mqfs.serving import accept
from mqfs.serving.accept import Acceptor, Listener
from mqfs.serving.fairness import Fairness, FairQueue, TimeSlice

log = logging.getLogger("mqfs.ring")

ATTACH_S = 10.0  # from a connection to its attach request


def listen(address: UnixAddress, *, mode: int = 0o666) -> Listener:
    """Listen beside a 9P socket. Raises BadAddress."""
    return accept.listen(UnixAddress(address.path + protocol.SUFFIX), kind=socket.SOCK_SEQPACKET, mode=mode)


class AttachConnection:
    """One connection to an attach socket."""

    def __init__(self, rings: RingRegistry, sock: trio.socket.SocketType, peer: Peer, queue: FairQueue) -> None:
        self.rings, self.socket, self.peer = rings, sock, peer
        self._slice = TimeSlice(queue)  # an attach looks at all streams of its group
        self.attachment: Attachment | None = None

    async def run(self) -> None:
        """Serve the connection until it ends, or breaks the protocol."""
        try:
            with trio.move_on_after(ATTACH_S):
                while self.attachment is None and await self.serve_one():
                    pass
            while self.attachment is not None and await self.serve_one():
                pass
        except OSError:
            pass  # disconnected
        finally:
            self._slice.pause()  # cancelled, too: else the user's other connections would wait for this slice for ever
            if self.attachment is not None:
                self.attachment.close()

    async def serve_one(self) -> bool:
        """Answer one request. Returns False if it was the last or invalid."""
        data = await self.socket.recv(limits.RING_PACKET_BYTES + 1)
        if not data:
            return False
        await self._slice.start()
        is_valid = False
        fds: list[int] = []
        try:
            request = protocol.decode(data)
            is_valid = True
            answer = self.carry_out(request, fds)
        except MqfsError as error:
            answer = protocol.refusal(error)
        except Exception:
            log.exception("%s: request failed", self.peer.where)
            answer = protocol.refusal(DiskFailed("internal server error (see the server log)"))
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self._slice.pause()
        await self.socket.sendmsg([protocol.encode(answer)], passed)
        await self._slice.stop()
        return is_valid

    def carry_out(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Return the answer; append the descriptors to send with it to `fds`."""
        wanted = [key for key in ("attach", "stream", "number") if key in request]
        if len(wanted) != 1:
            raise BadRequest(f"invalid packet: keys {sorted(request)} (expected one of attach, stream, number)")
        value = request[wanted[0]]
        if wanted[0] == "attach":
            self.require_namespace(request.get("pid_namespace"))
            return self.attach(value, request.get("version"), fds)
        if self.attachment is None:
            raise BadRequest("not attached (expected attach first)")
        if wanted[0] == "stream":
            if not isinstance(value, str):
                raise BadRequest('"stream": invalid value (expected a string)')
            if (number := self.attachment.number(value)) is None:
                return {"stream": value, "view": True}
            return {"stream": value, "number": number, "retained": self.attachment.is_retaining(number)}
        if type(value) is not int or not 0 < value < 1 << 32:
            raise BadRequest('"number": invalid value (expected an integer from 1 to 4294967295)')
        return {"number": value, "stream": self.attachment.name(value)}

    def require_namespace(self, number: Any) -> None:
        """Raise Unsupported for a client of another PID namespace: the ring's lock has the number of the thread that
        holds it, and threads of two namespaces may have the same number. `number`: the client's namespace; None: an
        older client, which does not say. Peer pid 0 is a process outside our namespace."""
        if self.peer.pid == 0 or number not in (None, pid_namespace()):
            raise Unsupported("rings: not from another PID namespace (expected the server's, as of one container)")

    def attach(self, path: Any, version: Any, fds: list[int]) -> dict[str, Any]:
        if not isinstance(path, str):
            raise BadRequest('"attach": invalid value (expected a string)')
        if version != protocol.VERSION:
            raise BadRequest(f"unknown version {version!r} (expected {protocol.VERSION})")
        if self.attachment is not None:
            raise BadRequest("already attached (one group a connection)")
        self.attachment = self.rings.attach(self.peer.itself(), path)
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
            "ephemeral": True,  # the server understands ephemeral messages
        }


class AttachSocket(Acceptor):
    """All attach sockets of a server. `run` serves them; `stop` ends that, and all attachments."""

    def __init__(self, rings: RingRegistry, listeners: list[Listener], fairness: Fairness | None = None) -> None:
        super().__init__("ring", "", UserLimits("attachments to rings", "RING_DOORS"), fairness=fairness)
        self.rings, self.listeners = rings, listeners

    async def stop(self) -> None:
        self.scope.cancel()
        await self.ended.wait()

    def refuse(self, sock: socket.socket, error: OverLimit) -> None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RD)
            sock.send(protocol.encode(protocol.refusal(error)))
            while sock.recv(1):  # unread requests would reset the connection and lose our answer
                pass

    async def serve(self, sock: socket.socket, tls: TlsCalls | None, peer: Peer, listener: Listener) -> None:
        queue = self.fairness.of(peer.account)
        await AttachConnection(self.rings, trio.socket.from_stdlib_socket(sock), peer, queue).run()
