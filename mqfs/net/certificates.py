"""Certificates: those of a server and of its clients, as files; the user that a client's certificate names.

The settings of TLS are here: version 1.2 or later, the protocol by ALPN, session tickets. Opens no socket.
"""

from __future__ import annotations

import os
import ssl
import stat
from collections.abc import Mapping
from typing import Any

from mqfs.errors import BadConfig, Denied
from mqfs.net import identity
from mqfs.net.tls import TlsMachine

PROTOCOLS = ("9p", "http/1.1")
USER_URI = "mqfs:"
_CERTIFICATE, _KEY = "CERTIFICATE", "PRIVATE KEY"


class ServerTls:
    """The certificate of a server, its key, and the authorities of its clients.

    `key`: None where it is in the file of the certificate. `client_ca`: every client has to have a certificate of one
    of these. Raises BadConfig.
    """

    def __init__(self, cert: str, key: str | None = None, client_ca: str | None = None) -> None:
        self.cert, self.key, self.client_ca = cert, key, client_ca
        self.reload()

    def reload(self) -> None:
        """Read the files, for connections from now on. Raises BadConfig, and changes nothing then."""
        _check_key_mode(*self._key_file())
        self._contexts = {protocol: self._context(protocol) for protocol in PROTOCOLS}

    def machine(self, protocol: str) -> TlsMachine:
        """The server's end of a new connection of that protocol."""
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


def client_context(protocol: str, environment: Mapping[str, str] = os.environ) -> ssl.SSLContext:
    """The settings of a client: MQFS_CA names the authorities that it trusts (else those of the system), MQFS_CERT its
    own certificate and key, in one file. Raises BadConfig."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([protocol])
    if ca := environment.get("MQFS_CA"):
        _load_authorities(context, "MQFS_CA", ca)
    else:
        context.load_default_certs()
    if cert := environment.get("MQFS_CERT"):
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
    """Why a file could not be loaded: it may also have gone meanwhile."""
    reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    return (reason or str(error)).replace("_", " ").lower()


def _check_pem(name: str, path: str, what: str) -> None:
    """Check that a file has a PEM block of that kind: OpenSSL names neither the file nor what it lacks."""
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
    """An open of a named pipe would wait for its writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def _check_key_mode(name: str, path: str) -> None:
    """Check that others cannot read a key; a group may where root owns it, as Debian's ssl-cert."""
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
    """The user of a client's certificate, as of TlsMachine.certificate: its URI `mqfs:USER`, or its common name.

    Raises Denied, NotAnswered.
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
