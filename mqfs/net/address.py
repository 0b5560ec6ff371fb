"""Addresses: `unix!PATH`, `tcp!HOST!PORT` and `tls!HOST!PORT`.

They are also understood as `unix:PATH`, `unix://PATH`, `tcp://HOST:PORT`, `tls://HOST:PORT` and `HOST:PORT`, and
printed in the first form. A client takes several, with commas between. This module words the failures to connect or
listen, too. It opens no socket.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket

import attrs

from mqfs.errors import BadAddress, Disconnected

ADDRESS_FORMS = "unix!PATH, tcp!HOST!PORT, tls!HOST!PORT or HOST:PORT"
DEFAULT_PORT = 564
SOCKET_NAME = "mqfs.sock"  # in the current folder, or that of the user's sockets
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


_PLAIN = re.compile(r"(unix|tcp|tls)!(.*)", re.DOTALL)
_URL = re.compile(r"(unix):(?://)?(.*)|(tcp|tls)://(.*?)/?", re.DOTALL)
_COMMA = re.compile(
    r",(?=(?:unix|tcp|tls)[!:]|(?:\[[^\]]*\]|[^:/!,]+):\d+(?:,|$)|$)"
)  # the path of a socket may have one
_HOST_AND_PORT = re.compile(r"\[(.*)\]:(\w*)|([^:/!]+):(\w*)")
_HOST = re.compile(r"\[(.*)\]|([^:/!]*)")


def parse_address(text: str) -> Address:
    """Parse an address. Raises BadAddress."""
    if plain := _PLAIN.fullmatch(text):
        host, sign, port = plain[2].partition("!")
        return (
            _unix(text, plain[2]) if plain[1] == "unix" else _of_network(plain[1], text, host, port if sign else None)
        )
    if (url := _URL.fullmatch(text)) and url[1]:
        return _unix(text, url[2])
    if url:
        return _of_network(url[3], text, *_host_and_port(text, url[4]))
    if _HOST_AND_PORT.fullmatch(text):
        return _of_network("tcp", text, *_host_and_port(text, text))
    raise BadAddress(f"invalid address {text!r}: unknown network (expected {ADDRESS_FORMS})")


def parse_addresses(text: str) -> list[Address]:
    """Parse one address, or several with commas between. Raises BadAddress."""
    return [parse_address(word) for word in _COMMA.split(text)]


def _unix(text: str, path: str) -> UnixAddress:
    if not path or "\0" in path:
        raise BadAddress(f"invalid address {text!r}: no path (expected {ADDRESS_FORMS})")
    if len(os.fsencode(path)) > _UNIX_PATH_BYTES:
        raise BadAddress(f"invalid address {text!r}: path too long (expected at most {_UNIX_PATH_BYTES} bytes)")
    return UnixAddress(path)


def _host_and_port(text: str, rest: str) -> tuple[str, str | None]:
    """The parts of HOST:PORT, where an IPv6 address is in brackets."""
    if found := _HOST_AND_PORT.fullmatch(rest):
        return found[1] or found[3] or "", found[2] if found[1] else found[4]
    if found := _HOST.fullmatch(rest):
        return found[1] or found[2] or "", None
    raise BadAddress(f"invalid address {text!r}: host {rest!r} (expected HOST:PORT, or [IPV6]:PORT)")


def _of_network(network: str, text: str, host: str, port: str | None) -> TcpAddress | TlsAddress:
    if not host:
        raise BadAddress(f"invalid address {text!r}: no host (expected {ADDRESS_FORMS})")
    if port is not None and not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 65_536):
        raise BadAddress(f"invalid address {text!r}: {port!r} is not a port (expected 0 to 65535)")
    number = DEFAULT_PORT if port is None else int(port)
    return TlsAddress(host, number) if network == "tls" else TcpAddress(host, number)


def default_address() -> str:
    """The address of a client that names none: $MQFS_ADDRESS, else ./mqfs.sock, else mqfs.sock in the folder of the
    user's sockets. Raises Disconnected where there is none of them."""
    if named := os.environ.get("MQFS_ADDRESS"):
        return named
    folder = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    for path in SOCKET_NAME, f"{folder}/{SOCKET_NAME}":
        if os.path.exists(path):
            return f"unix!{path}"
    raise Disconnected(
        f"no server: neither ./{SOCKET_NAME} nor {folder}/{SOCKET_NAME} (expected an address, or MQFS_ADDRESS)"
    )


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
