"""The socket of a client over TLS.

Owns the handshake and the lock of the machine: one thread may receive while another sends.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator

from mqfs.net.certificates import client_context
from mqfs.net.tls import TlsMachine, explain


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Raises ConnectionError with the reason in words where TLS fails."""
    try:
        yield
    except ssl.SSLError as error:
        raise ConnectionError(explain(error)) from None


class TlsSocket:
    """The calls of a connected socket that a client makes, through TLS. A failure of TLS is a ConnectionError."""

    def __init__(self, sock: socket.socket, host: str) -> None:
        """Complete the handshake, and check that the server's certificate has that name. Raises OSError, BadConfig."""
        self._socket = sock
        self._machine = machine = TlsMachine(client_context("9p"), host)
        self._lock = threading.Lock()
        self._early = b""
        machine.shake_hands()
        while not machine.ready:
            sock.sendall(machine.take())
            data = sock.recv(65_536)
            if not data:
                raise ConnectionError("closed by the server in the TLS handshake (expected a TLS server)")
            try:
                with _explained():
                    self._early = machine.receive(data)
            except ConnectionError:
                with contextlib.suppress(OSError):
                    sock.sendall(machine.take())  # the alert: the server's log then has the reason
                raise
        sock.sendall(machine.take())

    def recv(self, size: int) -> bytes | None:
        """Received bytes, all there are; None: none that can be decrypted yet; b"": the end."""
        if self._early:
            data, self._early = self._early, b""
            return data
        data = self._socket.recv(size)
        if not data:
            return b""
        with self._lock, _explained():
            plain = self._machine.receive(data)
            return plain if plain or self._machine.ended else None

    def sendall(self, data: bytes) -> None:
        """Send, behind the answers of TLS to what was received. Never in two threads at once."""
        with self._lock, _explained():
            self._machine.send(data)
            encrypted = self._machine.take()
        self._socket.sendall(encrypted)

    def settimeout(self, timeout: float | None) -> None:
        self._socket.settimeout(timeout)

    def fileno(self) -> int:
        return self._socket.fileno()

    def shutdown(self, how: int) -> None:
        """As of a socket; announces the end first, if that does not block."""
        with contextlib.suppress(OSError), self._lock:
            self._machine.close()
            self._socket.send(self._machine.take(), socket.MSG_DONTWAIT)
        self._socket.shutdown(how)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)
        self._socket.close()


__all__ = ["TlsSocket"]
