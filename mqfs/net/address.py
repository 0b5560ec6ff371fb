"""Addresses: `unix!PATH`, `tcp!HOST!PORT` and `tls!HOST!PORT`.

Parses and prints them, and words the failures to connect or listen. Opens no socket.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket

import attrs

from mqfs.errors import BadAddress

ADDRESS_FORMS = "unix!PATH, tcp!HOST!PORT or tls!HOST!PORT"
DEFAULT_PORT = 564
_UNIX_PATH_BYTES = 107  # sun_path, less its NUL


@attrs.frozen
class UnixAddress:
    """A socket in the file system."""

    path: str

    def __str__(self) -> str:
        return f"unix!{self.path}"


@attrs.frozen
class TcpAddress:
    """A TCP port of a host."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp!{self.host}!{self.port}"


@attrs.frozen
class TlsAddress:
    """A TCP port of a host, where TLS is spoken."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tls!{self.host}!{self.port}"


Address = UnixAddress | TcpAddress | TlsAddress


def parse_address(text: str) -> Address:
    """Parse an address. Raises BadAddress."""
    network, _, rest = text.partition("!")
    if network == "unix":
        return _unix(text, rest)
    if network == "tcp":
        return TcpAddress(*_host_and_port(text, rest))
    if network == "tls":
        return TlsAddress(*_host_and_port(text, rest))
    raise BadAddress(f"invalid address {text!r}: unknown network (expected {ADDRESS_FORMS})")


def _unix(text: str, path: str) -> UnixAddress:
    if not path or "\0" in path:
        raise BadAddress(f"invalid address {text!r}: no path (expected {ADDRESS_FORMS})")
    if len(os.fsencode(path)) > _UNIX_PATH_BYTES:
        raise BadAddress(f"invalid address {text!r}: path too long (expected at most {_UNIX_PATH_BYTES} bytes)")
    return UnixAddress(path)


def _host_and_port(text: str, rest: str) -> tuple[str, int]:
    host, sign, port = rest.partition("!")
    if not host:
        raise BadAddress(f"invalid address {text!r}: no host (expected {ADDRESS_FORMS})")
    if not sign:
        return host, DEFAULT_PORT
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 65_536):
        raise BadAddress(f"invalid address {text!r}: {port!r} is not a port (expected 0 to 65535)")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether a host is this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def explain_failure(address: Address, error: OSError) -> str:
    """The text of a failed connect or listen."""
    reasons = {
        errno.EADDRINUSE: "in use by another server",
        errno.EACCES: "permission denied",
        errno.ENOTDIR: "not in a directory",
        errno.ECONNREFUSED: "connection refused",
    }
    if isinstance(error, socket.gaierror):
        reason = "unknown host"
    elif error.errno == errno.ENOENT:
        reason = "no such socket"
        if isinstance(address, UnixAddress) and not os.path.isdir(os.path.dirname(address.path) or "."):
            reason = "in a directory that does not exist"
    else:
        reason = reasons.get(error.errno or 0) or str(error.strerror or error)
    return f"{address}: {reason}"
