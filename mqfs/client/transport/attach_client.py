"""The library's end of a connection to the attach socket (docs/reference/ring-protocol.md).

Owns the socket. What a group's ring is used for is ring_group.py's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
import weakref
from typing import Any

from mqfs import limits
from mqfs.errors import Disconnected, Unsupported
from mqfs.net.sockets import reachable
from mqfs.ring import protocol

_GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL
_NOBODY = (errno.ENOENT, errno.ECONNREFUSED, errno.ENOTSOCK, errno.EPROTOTYPE)


class NoAttachSocket(Unsupported):
    """Nobody answers where a door would be."""


class AttachClient:
    """One connection: one attachment, while it is open. Any thread may ask."""

    def __init__(self, path: str, timeout: float | None) -> None:
        """Raises NoAttachSocket, Disconnected."""
        self._path = path
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.settimeout(timeout)
            with reachable(path) as where:
                self._socket.connect(where)
        except OSError as error:
            self._socket.close()
            if error.errno in _NOBODY:
                raise NoAttachSocket(f"{path}: the server has no rings, or does not run ({error.strerror})") from None
            raise Disconnected(f"{path}: {error}") from None
        _open.add(self)

    def attach(self, group: str) -> tuple[dict[str, Any], int]:
        """What the server says of the group's ring, and a descriptor of it. Raises what it refuses with."""
        said, fds = self._exchange({"attach": group, "version": protocol.VERSION})
        if len(fds) != 1:
            raise Disconnected(f"{self._path}: the door gave no ring")
        return said, fds[0]

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Raises what the server refuses with, Disconnected."""
        return self._exchange(question)[0]

    def _exchange(self, question: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        try:
            with self._lock:
                with contextlib.suppress(BrokenPipeError):  # turned away; why, is there to be read
                    self._socket.send(protocol.encode(question))
                data, fds, _, _ = socket.recv_fds(self._socket, limits.RING_PACKET_BYTES, 1)
        except OSError as error:
            self.close()
            raise Disconnected(f"{self._path}: {error}") from None
        for fd in fds:
            os.set_inheritable(fd, False)
        if not data:
            raise Disconnected(f"{self._path}: the server closed the connection")
        said = protocol.decode(data)
        if "error" in said:
            protocol.raise_refusal(said)
        return said, fds

    @property
    def lost(self) -> bool:
        """Whether the server is gone, or it was closed here."""
        fd = self._socket.fileno()
        if fd < 0:
            return True
        poll = select.poll()  # one a call: threads may not share one
        poll.register(fd, select.POLLRDHUP)
        return any(what & _GONE for _, what in poll.poll(0))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes who asks
        self._socket.close()

    def __del__(self) -> None:
        self._socket.close()


_open: weakref.WeakSet[AttachClient] = weakref.WeakSet()


def _in_child() -> None:
    """A child that kept the connection open would hide the parent's death from the server."""
    for call in list(_open):
        call._socket.close()


os.register_at_fork(after_in_child=_in_child)

__all__ = ["AttachClient", "NoAttachSocket"]
