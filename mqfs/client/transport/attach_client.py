"""The client of a server's attach socket (docs/reference/ring-protocol.md).

Owns the connection; the use of the ring is ring_attachment.py's.
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
_NO_SERVER = (errno.ENOENT, errno.ECONNREFUSED, errno.ENOTSOCK, errno.EPROTOTYPE)


class NoAttachSocket(Unsupported):
    """No server listens at the attach socket."""


class AttachClient:
    """A connection, which holds one attachment while it is open. Thread-safe."""

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
            if error.errno in _NO_SERVER:
                raise NoAttachSocket(f"{path}: no server with rings ({error.strerror})") from None
            raise Disconnected(f"{path}: {error}") from None
        _open.add(self)

    def attach(self, group: str) -> tuple[dict[str, Any], int]:
        """Attach to a group's ring: its description and a descriptor. Raises the server's error."""
        answer, fds = self._exchange({"attach": group, "version": protocol.VERSION})
        if len(fds) != 1:
            raise Disconnected(f"{self._path}: no descriptor in the answer")
        return answer, fds[0]

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """The server's answer. Raises its error, Disconnected."""
        return self._exchange(question)[0]

    def _exchange(self, question: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        try:
            with self._lock:
                with contextlib.suppress(BrokenPipeError):  # refused; the reason can still be read
                    self._socket.send(protocol.encode(question))
                data, fds, _, _ = socket.recv_fds(self._socket, limits.RING_PACKET_BYTES, 1)
        except OSError as error:
            self.close()
            raise Disconnected(f"{self._path}: {error}") from None
        for fd in fds:
            os.set_inheritable(fd, False)
        if not data:
            raise Disconnected(f"{self._path}: the server closed the connection")
        answer = protocol.decode(data)
        if "error" in answer:
            protocol.raise_refusal(answer)
        return answer, fds

    @property
    def is_lost(self) -> bool:
        """Whether either end was closed."""
        fd = self._socket.fileno()
        if fd < 0:
            return True
        poll = select.poll()  # threads cannot share one
        poll.register(fd, select.POLLRDHUP)
        return any(what & _GONE for _, what in poll.poll(0))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes threads that wait for an answer
        self._socket.close()

    def __del__(self) -> None:
        self._socket.close()


_open: weakref.WeakSet[AttachClient] = weakref.WeakSet()


def _in_child() -> None:
    """Close the parent's connections: one open in a child would hide the parent's end from the server."""
    for call in list(_open):
        call._socket.close()


os.register_at_fork(after_in_child=_in_child)

__all__ = ["AttachClient", "NoAttachSocket"]
