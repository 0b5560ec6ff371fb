"""TLS without I/O: bytes of a socket to plaintext, plaintext to bytes for the socket.

Owns the state of one connection's TLS. Its user moves the bytes, and decides what the peer may do; the settings and the
files are those of certificates.py.
"""

from __future__ import annotations

import contextlib
import ssl
from typing import Any

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


__all__ = ["PIECE_BYTES", "TlsMachine", "explain"]
