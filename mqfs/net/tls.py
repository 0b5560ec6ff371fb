"""TLS without I/O: bytes of a socket to plaintext, plaintext to bytes for the socket.

A TlsMachine is the state of one connection. Its caller moves the bytes and decides what the peer may do. Settings and
files are in certificates.py.
"""

from __future__ import annotations

import contextlib
import errno
import os
import ssl
from collections.abc import Callable, Sequence
from typing import Any, Protocol

PIECE_BYTES = 16_384  # of plaintext in one TLS record: more at once would only grow the buffers, which never shrink
UNASKED_BYTES = 65_536  # of answers to the peer's messages of TLS itself, not taken yet: no honest peer needs as many


class TlsMachine:
    """One end of a TLS connection.

    Every method but `close` raises ssl.SSLError where the peer breaks the protocol or is refused; `take` then has the
    alert for the peer, and `explain` is the reason in words.
    """

    def __init__(self, context: ssl.SSLContext, host: str | None = None) -> None:
        """`host`: at a client's end, the name that the server's certificate has to have."""
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, host is None, host)
        self.ready = False  # the handshake is complete: `send` works
        self.ended = False  # the peer has announced that it sends no more
        self._unasked = 0  # bytes of answers to it, not taken yet

    def shake_hands(self) -> None:
        """Continue the handshake; a client's end begins it by this, a server's waits for what it receives."""
        with contextlib.suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()
            self.ready = True

    def receive(self, data: bytes) -> bytes:
        """The plaintext that is complete with these bytes of the socket; b"" where none is.

        None is kept back, so the end of the socket needs no call.
        """
        parts: list[bytes] = []
        before = self._outgoing.pending
        for start in range(0, len(data), PIECE_BYTES):
            if not self.ended:
                self._incoming.write(data[start : start + PIECE_BYTES])
                if not self.ready:
                    self.shake_hands()
                if self.ready:
                    self._decrypt(parts)
        self._unasked += self._outgoing.pending - before
        if self._unasked > UNASKED_BYTES:
            raise ssl.SSLError(f"more than {UNASKED_BYTES} bytes of answers not taken")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _decrypt(self, parts: list[bytes]) -> None:
        """Append the plaintext of all whole records."""
        try:
            while not self.ended and (self._incoming.pending or self._tls.pending()):
                part = self._tls.read(PIECE_BYTES)
                parts.append(part)
                self.ended = not part
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:  # instead of b"" where this end was closed before
            self.ended = True

    def send(self, data: bytes | memoryview) -> None:
        """Encrypt, for `take`. The handshake is complete."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._tls.write(rest) :]

    def take(self) -> bytes:
        """All bytes for the socket so far, in order."""
        self._unasked = 0
        return self._outgoing.read()

    def close(self) -> None:
        """Announce, by `take`, that no more is sent."""
        with contextlib.suppress(ssl.SSLError):
            if self.ready:
                self._tls.unwrap()

    @property
    def certificate(self) -> dict[str, Any]:
        """The verified certificate of the peer, as of ssl.SSLSocket.getpeercert; empty where it has none."""
        return dict(self._tls.getpeercert() or {})


def explain(error: ssl.SSLError) -> str:
    """The reason of a failure, in words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate refused: {error.verify_message.rstrip('.')}"
    reason = (error.reason or "").replace("_", " ").lower()
    if reason in ("wrong version number", "http request"):
        return f"the peer does not speak TLS ({reason})"
    return f"TLS failed: {reason or error}"


# ---------------------------------------------------------------- system calls through TLS

RECEIVE_BYTES = 65_536


class DescriptorCalls(Protocol):
    """The system calls of a connection: those of os, or of TlsCalls."""

    def read(self, fd: int, length: int, /) -> bytes: ...
    def write(self, fd: int, data: bytes | memoryview, /) -> int: ...
    def writev(self, fd: int, buffers: Sequence[bytes | memoryview], /) -> int: ...


class TlsCalls:
    """Read and write the plaintext of one nonblocking descriptor, by the calls of os.

    The caller waits where a call would block. `failed` gets the reason where TLS fails; the caller sees the end of the
    connection.
    """

    def __init__(self, machine: TlsMachine, failed: Callable[[str], None]) -> None:
        self.machine, self._failed = machine, failed
        self.ready = False  # the handshake is complete, and its last message has left
        self._early = b""  # plaintext that came with the end of the handshake
        self._encrypted = memoryview(b"")  # taken from the machine, not by the descriptor yet
        self._covered = 0  # bytes of plaintext that left the caller in it, and do not count as written yet

    def read(self, fd: int, length: int, /) -> bytes:
        """Plaintext; b"" at the end. Raises BlockingIOError where one read of the descriptor completes none, so that a
        peer that never completes any delays no other."""
        plain, self._early = self._early, b""
        if not plain and not self.machine.ended and (data := os.read(fd, min(length, RECEIVE_BYTES))):
            plain = self._decrypt(fd, data)
            if not plain and not self.machine.ended:
                raise BlockingIOError
        return plain

    def write(self, fd: int, data: bytes | memoryview, /) -> int:
        """Write plaintext: the number of bytes that left, encrypted. Raises BlockingIOError where there are none.

        The next call has to begin with the rest: some of it may be encrypted already.
        """
        rest, written = memoryview(data), 0
        while self._flush(fd):
            written += self._covered
            self._covered = 0
            if written >= len(rest):
                return written
            self._covered = len(piece := rest[written : written + PIECE_BYTES])
            try:
                self.machine.send(piece)
            except ssl.SSLError as error:
                raise BrokenPipeError(errno.EPIPE, str(error)) from None
        if not written:
            raise BlockingIOError
        return written

    def writev(self, fd: int, buffers: Sequence[bytes | memoryview], /) -> int:
        """As `write`, of several buffers."""
        written = 0
        for buffer in buffers:
            try:
                count = self.write(fd, buffer)
            except BlockingIOError:
                if not written:
                    raise
                break
            written += count
            if count < len(buffer):
                break
        return written

    def push(self, fd: int, data: bytes) -> None:
        """Write a few bytes; what the descriptor does not take leaves before the next write."""
        with contextlib.suppress(ssl.SSLError):
            self.machine.send(data)
            self._flush(fd)

    def end(self, fd: int) -> None:
        """Announce the end, if the descriptor takes that at once."""
        self.machine.close()
        with contextlib.suppress(OSError):
            self._flush(fd)

    def shake_hands(self, fd: int) -> str:
        """Continue the handshake by one read: what it waits for then, "read" or "write"; "": nothing. Raises OSError
        where TLS fails or the peer goes."""
        if not self.machine.ready and not self._encrypted:
            try:
                data = os.read(fd, RECEIVE_BYTES)
            except BlockingIOError:
                return "read"
            if not data:
                raise ConnectionResetError(errno.ECONNRESET, "end of the connection in the handshake")
            self._early = self._decrypt(fd, data)
        if not self._flush(fd):
            return "write"
        self.ready = self.machine.ready
        return ""

    def _decrypt(self, fd: int, data: bytes) -> bytes:
        """The plaintext of these bytes. Raises ConnectionResetError where TLS fails."""
        try:
            return self.machine.receive(data)
        except ssl.SSLError as error:
            self._failed(reason := explain(error))
            raise ConnectionResetError(errno.ECONNRESET, reason) from None
        finally:
            with contextlib.suppress(OSError):
                self._flush(fd)  # what TLS itself answers: a new key, or an alert

    def _flush(self, fd: int) -> bool:
        """Write what is encrypted; False: the descriptor takes no more at present."""
        while self._encrypted or (taken := self.machine.take()):
            self._encrypted = self._encrypted or memoryview(taken)
            try:
                sent = os.write(fd, self._encrypted)
            except BlockingIOError:
                return False
            self._encrypted = self._encrypted[sent:]
        return True
