"""Listening: on a unix socket or a TCP port, with TLS or without."""

from __future__ import annotations

import socket
from collections.abc import Callable

import attrs

from mqfs.errors import BadAddress
from mqfs.net.address import (
    Address,
    TcpAddress,
    TlsAddress,
    UnixAddress,
    explain_failure,
    is_loopback,
    parse_address,
)
from mqfs.net.sockets import BACKLOG, SocketFile


class Listener:
    """One address and its listening socket."""

    def __init__(self, address: Address, sock: socket.socket, end: Callable[[], None]) -> None:
        self.address, self.socket, self._end = address, sock, end

    def close(self) -> None:
        """Stop, and remove the socket's file if it still is ours."""
        self._end()


def listen(address: Address | str, *, mode: int = 0o666, insecure: bool = False, identified: bool = False) -> Listener:
    """Listen now, or BadAddress. `mode` is that of a unix socket. Off loopback, TLS needs clients that are `identified`
    (by token or certificate), and TCP needs `insecure`, which permits both."""
    where = parse_address(address) if isinstance(address, str) else address
    try:
        if isinstance(where, UnixAddress):
            return _listen_unix(where, mode)
        if not insecure and not is_loopback(where.host):
            _require_safe(where, identified)
        return _listen_tcp(where)
    except OSError as error:
        raise BadAddress(explain_failure(where, error)) from None


def _listen_unix(address: UnixAddress, mode: int) -> Listener:
    file = SocketFile(address.path, socket.SOCK_STREAM, mode)
    return Listener(address, file.socket, file.close)


def _require_safe(address: TcpAddress | TlsAddress, identified: bool) -> None:
    if isinstance(address, TcpAddress):
        lack, expected = "nothing is encrypted", "tls!HOST!PORT, or --insecure"
    elif not identified:
        lack, expected = "no client is identified", "--token-file, --tls-client-ca or --insecure"
    else:
        return
    raise BadAddress(f"{address}: not a loopback address, and {lack} (expected {expected})")


def _listen_tcp(address: TcpAddress | TlsAddress) -> Listener:
    family, kind, proto, _, where = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return Listener(attrs.evolve(address, port=sock.getsockname()[1]), sock, sock.close)
