"""Addresses, the dial strings of 9P: `unix!PATH` and `tcp!HOST!PORT`.

Owns their parsing and printing, and nothing else that is said about an address: dialling and listening raise what is
explained here.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket

import attrs

from mqfs.errors import BadAddress

ADDRESS_FORMS = "unix!PATH or tcp!HOST!PORT"
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


Address = UnixAddress | TcpAddress


def parse_address(text: str) -> Address:
    """The address of a address string; BadAddress says what would be right."""
    network, _, rest = text.partition("!")
    if network == "unix":
        return _unix(text, rest)
    if network == "tcp":
        return _tcp(text, rest)
    raise BadAddress(f"{text!r}; {ADDRESS_FORMS} is right")


def _unix(text: str, path: str) -> UnixAddress:
    if not path or "\0" in path:
        raise BadAddress(f"{text!r} has no path; {ADDRESS_FORMS} is right")
    if len(os.fsencode(path)) > _UNIX_PATH_BYTES:
        raise BadAddress(f"{text!r}: a socket's path has at most {_UNIX_PATH_BYTES} bytes")
    return UnixAddress(path)


def _tcp(text: str, rest: str) -> TcpAddress:
    host, sign, port = rest.partition("!")
    if not host:
        raise BadAddress(f"{text!r} has no host; {ADDRESS_FORMS} is right")
    if not sign:
        return TcpAddress(host, DEFAULT_PORT)
    if not (port.isascii() and port.isdigit() and int(port) < 65_536):
        raise BadAddress(f"{text!r}: {port!r} is not a port; a number from 0 to 65535 is right")
    return TcpAddress(host, int(port))


def is_loopback(host: str) -> bool:
    """Is this host only this machine?"""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def explain_failure(address: Address, error: OSError) -> BadAddress:
    """Why an address could not be listened on or dialled, in a clause."""
    reasons = {
        errno.EADDRINUSE: "is in use by another server",
        errno.EACCES: "is not permitted to this user",
        errno.ENOTDIR: "is not in a directory",
        errno.ECONNREFUSED: "is served by nobody",
    }
    if isinstance(error, socket.gaierror):
        reason = "has a host that is not known"
    elif error.errno == errno.ENOENT:
        reason = "is not there"
        if isinstance(address, UnixAddress) and not os.path.isdir(os.path.dirname(address.path) or "."):
            reason = "is in a directory that does not exist"
    else:
        reason = reasons.get(error.errno or 0) or f"cannot be used ({error.strerror or error})"
    return BadAddress(f"{address} {reason}")
