"""Listening: on a unix socket or a TCP port."""

from __future__ import annotations

import socket
from collections.abc import Callable

from mqfs.errors import BadAddress
from mqfs.net.address import Address, TcpAddress, UnixAddress, explain_failure, is_loopback, parse_address
from mqfs.net.sockets import BACKLOG, SocketFile


class Listener:
    """One address and its listening socket."""

    def __init__(self, address: Address, sock: socket.socket, end: Callable[[], None]) -> None:
        self.address, self.socket, self._end = address, sock, end

    def close(self) -> None:
        """Stop, and remove the socket's file if it still is ours."""
        self._end()


def listen(address: Address | str, *, mode: int = 0o666, insecure: bool = False) -> Listener:
    """Listen now, or BadAddress. `mode` is that of a unix socket; `insecure` permits TCP off loopback."""
    where = parse_address(address) if isinstance(address, str) else address
    try:
        return _listen_unix(where, mode) if isinstance(where, UnixAddress) else _listen_tcp(where, insecure)
    except OSError as error:
        raise explain_failure(where, error) from None


def _listen_unix(address: UnixAddress, mode: int) -> Listener:
    file = SocketFile(address.path, socket.SOCK_STREAM, mode)
    return Listener(address, file.socket, file.close)


def _listen_tcp(address: TcpAddress, insecure: bool) -> Listener:
    if not insecure and not is_loopback(address.host):
        raise BadAddress(f"{address}: not a loopback address, and nothing is encrypted (expected --insecure)")
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
    return Listener(TcpAddress(address.host, sock.getsockname()[1]), sock, sock.close)
