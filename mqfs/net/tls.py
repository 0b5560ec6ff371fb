"""TLS without I/O: bytes of a socket to plaintext, plaintext to bytes for the socket.

A TlsMachine is the state of one connection. Its caller moves the bytes and decides what the peer may do. The settings
are here: version 1.2 or later, the protocol by ALPN, session tickets; and the certificates of a server and of its
clients, as files, with the user that a client's certificate names.
"""

from __future__ import annotations

import contextlib
import errno
import os
import ssl
import stat
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from mqfs.errors import BadConfig, Denied
from mqfs.net import identity

PIECE_BYTES = 16_384  # of plaintext in one TLS record: larger pieces only grow the buffers, which never shrink
UNASKED_BYTES = 65_536  # of replies by TLS itself that the caller has not taken: no honest peer causes more


class TlsMachine:
    """One end of a TLS connection.

    Every method but `close` raises ssl.SSLError where the peer breaks the protocol or is refused; `take` then has the
    alert for the peer, and `explain` is the reason in words.
    """

    def __init__(self, context: ssl.SSLContext, host: str | None = None) -> None:
        """`host`: at a client's end, the name that the server's certificate must have."""
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, host is None, host)
        self.ready = False  # the handshake is complete: `send` works
        self.ended = False  # the peer has announced that it sends no more
        self._unasked = 0  # of replies by TLS itself, not taken yet

    def shake_hands(self) -> None:
        """Continue the handshake. A client's end starts with this call, a server's with received bytes."""
        with contextlib.suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()
            self.ready = True

    def receive(self, data: bytes) -> bytes:
        """Return the plaintext that these bytes of the socket complete, or b"".

        No plaintext is held back, so the end of the socket needs no call.
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
        except ssl.SSLZeroReturnError:  # raised instead of b"" if this end was closed before
            self.ended = True

    def send(self, data: bytes | memoryview) -> None:
        """Encrypt data, for `take`. The handshake must be complete."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._tls.write(rest) :]

    def take(self) -> bytes:
        """Return and remove all bytes for the socket so far, in order."""
        self._unasked = 0
        return self._outgoing.read()

    def close(self) -> None:
        """Announce the end of sending; `take` has the bytes."""
        with contextlib.suppress(ssl.SSLError):
            if self.ready:
                self._tls.unwrap()

    @property
    def certificate(self) -> dict[str, Any]:
        """The verified certificate of the peer, as of ssl.SSLSocket.getpeercert; empty if it has none."""
        return dict(self._tls.getpeercert() or {})


def explain(error: ssl.SSLError) -> str:
    """Return the reason of a failure in words."""
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
    """Calls like those of os, which read and write the plaintext of one nonblocking descriptor.

    The caller waits where a call would block. `failed` is called with the reason if TLS fails; the caller sees the end
    of the connection.
    """

    def __init__(self, machine: TlsMachine, failed: Callable[[str], None]) -> None:
        self.machine, self._failed = machine, failed
        self.ready = False  # the handshake is complete, and its last message was sent
        self._early = b""  # plaintext received with the end of the handshake
        self._encrypted = memoryview(b"")  # not written to the descriptor yet
        self._covered = 0  # bytes of plaintext in `_encrypted` that are not reported as written yet

    def read(self, fd: int, length: int, /) -> bytes:
        """Read plaintext; b"" at the end. Raises BlockingIOError if one read of the descriptor completes none, so that
        a peer that never completes any delays no other."""
        plain, self._early = self._early, b""
        if not plain and not self.machine.ended and (data := os.read(fd, min(length, RECEIVE_BYTES))):
            plain = self._decrypt(fd, data)
            if not plain and not self.machine.ended:
                raise BlockingIOError
        return plain

    def write(self, fd: int, data: bytes | memoryview, /) -> int:
        """Write plaintext. Return the number of bytes that were sent, encrypted. Raises BlockingIOError if there are
        none.

        The next call has to begin with the rest, some of which may be encrypted already.
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
        """Write several buffers, as `write` does."""
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
        """Write a few bytes. Bytes that the descriptor does not accept are sent before the next write."""
        with contextlib.suppress(ssl.SSLError):
            self.machine.send(data)
            self._flush(fd)

    def end(self, fd: int) -> None:
        """Announce the end, if the descriptor accepts that at once."""
        self.machine.close()
        with contextlib.suppress(OSError):
            self._flush(fd)

    def shake_hands(self, fd: int) -> str:
        """Continue the handshake by one read. Return what it waits for then: "read", "write" or "" (nothing). Raises
        OSError if TLS fails or the peer disconnects."""
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
        """Return the plaintext of these bytes. Raises ConnectionResetError if TLS fails."""
        try:
            return self.machine.receive(data)
        except ssl.SSLError as error:
            self._failed(reason := explain(error))
            raise ConnectionResetError(errno.ECONNRESET, reason) from None
        finally:
            with contextlib.suppress(OSError):
                self._flush(fd)  # replies of TLS itself: a new key, or an alert

    def _flush(self, fd: int) -> bool:
        """Write encrypted bytes. Return False if the descriptor accepts no more at present."""
        while self._encrypted or (taken := self.machine.take()):
            self._encrypted = self._encrypted or memoryview(taken)
            try:
                sent = os.write(fd, self._encrypted)
            except BlockingIOError:
                return False
            self._encrypted = self._encrypted[sent:]
        return True


# ------------------------------------------------------------ certificates


PROTOCOLS = ("9p", "http/1.1")
USER_URI = "mqfs:"
_CERTIFICATE, _KEY = "CERTIFICATE", "PRIVATE KEY"


class ServerTls:
    """The certificate of a server, its key, and the authorities of its clients.

    `key`: None if it is in the file of the certificate. `client_ca`: every client must have a certificate of one of
    these. Raises BadConfig.
    """

    def __init__(self, cert: str, key: str | None = None, client_ca: str | None = None) -> None:
        self.cert, self.key, self.client_ca = cert, key, client_ca
        self.reload()

    def reload(self) -> None:
        """Read the files, for later connections. Raises BadConfig, and then changes nothing."""
        _check_key_mode(*self._key_file())
        self._contexts = {protocol: self._context(protocol) for protocol in PROTOCOLS}

    def machine(self, protocol: str) -> TlsMachine:
        """Return the server's end of a new connection of that protocol."""
        return TlsMachine(self._contexts[protocol])

    def _key_file(self) -> tuple[str, str]:
        return ("--tls-cert", self.cert) if self.key is None else ("--tls-key", self.key)

    def _context(self, protocol: str) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols([protocol])
        _load_pair(context, ("--tls-cert", self.cert), self._key_file())
        if self.client_ca is not None:
            _load_authorities(context, "--tls-client-ca", self.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def client_context(protocol: str) -> ssl.SSLContext:
    """Return the settings of a client: MQFS_CA names the authorities that it trusts (else those of the system),
    MQFS_CERT its own certificate and key, in one file. Raises BadConfig."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([protocol])
    if ca := os.environ.get("MQFS_CA"):
        _load_authorities(context, "MQFS_CA", ca)
    else:
        context.load_default_certs()
    if cert := os.environ.get("MQFS_CERT"):
        _load_pair(context, ("MQFS_CERT", cert), ("MQFS_CERT", cert))
    return context


def _load_pair(context: ssl.SSLContext, cert: tuple[str, str], key: tuple[str, str]) -> None:
    """Load a certificate and its key, each the (name, value) of a setting."""
    _check_pem(*cert, _CERTIFICATE)
    _check_pem(*key, _KEY)

    def refuse() -> str:
        raise BadConfig(f"{' '.join(key)}: key is encrypted (expected one without a password)")

    try:
        context.load_cert_chain(cert[1], key[1], refuse)
    except OSError as error:
        if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
            raise BadConfig(f"{' '.join(key)}: not the key of the certificate (expected that of {cert[1]})") from None
        raise BadConfig(f"{' '.join(cert)}: {_reason(error)} (expected a certificate and its key in PEM)") from None


def _load_authorities(context: ssl.SSLContext, name: str, path: str) -> None:
    _check_pem(name, path, _CERTIFICATE)
    try:
        context.load_verify_locations(path)
    except OSError as error:
        raise BadConfig(f"{name} {path}: {_reason(error)} (expected certificates in PEM)") from None


def _reason(error: OSError) -> str:
    """Return why a file could not be loaded: perhaps it was removed meanwhile."""
    reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    return (reason or str(error)).replace("_", " ").lower()


def _check_pem(name: str, path: str, what: str) -> None:
    """Check that a file has a PEM block of that kind: OpenSSL names neither the file nor the missing block."""
    try:
        with open(path, encoding="ascii", errors="replace", opener=_open_at_once) as file:
            text = file.read() if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else None
    except OSError as error:
        raise BadConfig(f"{name} {path}: {error.strerror} (expected a readable PEM file)") from None
    if text is None:
        raise BadConfig(f"{name} {path}: not a regular file (expected a PEM file)")
    if f"{what}-----" not in text:
        raise BadConfig(f"{name} {path}: no {what.lower()} in it (expected a PEM file)")


def _open_at_once(path: str, flags: int) -> int:
    """Open without waiting: a named pipe would wait for its writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def _check_key_mode(name: str, path: str) -> None:
    """Check that others cannot read a key. A group may, if root owns the key, as in Debian's ssl-cert."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise BadConfig(f"{name} {path}: {error.strerror} (expected a readable PEM file)") from None
    if not stat.S_ISREG(status.st_mode):
        raise BadConfig(f"{name} {path}: not a regular file (expected a PEM file)")
    closed = 0o027 if status.st_uid == 0 else 0o077
    if status.st_mode & closed or status.st_uid not in (0, os.geteuid()):
        raise BadConfig(f"{name} {path}: key open to others (expected mode 600 of the server's user, or 640 of root)")


def user_of(certificate: Mapping[str, Any]) -> int:
    """Return the user that a client's certificate names by its URI `mqfs:USER`, or its common name.

    `certificate`: as of TlsMachine.certificate. Raises Denied, NotAnswered.
    """
    names = [
        value.removeprefix(USER_URI)
        for kind, value in certificate.get("subjectAltName", ())
        if kind == "URI" and value.startswith(USER_URI)
    ]
    names = names or [value for rows in certificate.get("subject", ()) for kind, value in rows if kind == "commonName"]
    if len(names) != 1:
        raise Denied(f"{len(names)} users in the client's certificate (expected one URI {USER_URI}USER, or a CN)")
    uid = identity.user_number(names[0])
    if uid is None:
        raise Denied(f"unknown user {names[0]!r} in the client's certificate (expected one of the server's system)")
    return uid
