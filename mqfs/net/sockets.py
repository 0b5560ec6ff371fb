"""Addresses and sockets: listening, stale files of killed servers, credentials of peers, failures in words.

This module never waits and speaks no protocol; its callers accept. Addresses are `unix!PATH`, `tcp!HOST!PORT` and
`tls!HOST!PORT`, also understood as `unix:PATH`, `unix://PATH`, `tcp://HOST:PORT`, `tls://HOST:PORT` and `HOST:PORT`,
and printed in the first form. A client accepts several, separated by commas.

After an answer its server lets the client run (`let_client_run`), which often sends its next request sooner than a wait
would take. If a client can run now, a yield and a read cost less than an empty read, epoll and two task switches. But
the kernel runs other programs first, so that each yield takes milliseconds. So a slow yield is followed by none for a
while: beside four busy programs on two CPUs, that gives five times as many requests per second.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import re
import socket
import stat
import struct
import termios
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import attrs

from mqfs import limits
from mqfs.errors import BadAddress, Disconnected

BACKLOG = 1_024
PATH_BYTES = 107  # of a unix socket: sun_path, less its NUL
PROBE_S = 1.0
_CREDENTIALS = struct.Struct("3i")
_PEERGROUPS = 59  # of <asm/socket.h>; Python's socket module does not name it
_INFO_BYTES, _RETRANSMITS = 4, 2  # of struct tcp_info of <linux/tcp.h>: its third byte
_GROUPS_BYTES = 1_024  # the most that Python's getsockopt accepts: 256 groups


@contextlib.contextmanager
def reachable(path: str) -> Iterator[str]:
    """Yield a name for a path that fits an address: a longer path goes through a descriptor of its folder."""
    if len(os.fsencode(path)) <= PATH_BYTES:
        yield path
        return
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{os.path.basename(path)}"
    finally:
        os.close(folder)


class SocketFile:
    """A listening socket and its file. Raises OSError, or BadAddress if the path is another kind of file."""

    def __init__(self, path: str, kind: int, mode: int) -> None:
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, kind)
        try:
            with reachable(path) as where:
                _remove_stale(where, path, kind)
                self.socket.bind(where)
                os.chmod(where, mode)
            self.socket.listen(BACKLOG)
            self._made = _inode(path)
        except BaseException:
            self.socket.close()
            raise
        self.socket.setblocking(False)

    def close(self) -> None:
        """Stop listening, and remove the file unless another process has replaced it."""
        self.socket.close()
        with contextlib.suppress(OSError):
            if _inode(self.path) == self._made:
                os.unlink(self.path)


def _inode(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


def _remove_stale(where: str, path: str, kind: int) -> None:
    """Remove the file of a socket at which no process listens. Raises BadAddress for any other kind of file."""
    try:
        found = os.lstat(where)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise BadAddress(f"unix!{path}: not a socket (the file is left unchanged)")
    with socket.socket(socket.AF_UNIX, kind) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(where)
        except ConnectionRefusedError:
            os.unlink(where)
            return
        except TimeoutError:
            pass
    raise OSError(errno.EADDRINUSE, "in use")


def detect_dead_host(sock: socket.socket, silent_s: int = limits.SILENT_S) -> None:
    """Have the kernel end a TCP connection to a dead host: `silent_s` seconds without a packet, then as long for
    probes.

    The kernel probes only if no sent bytes are unacknowledged; for those see `is_host_silent`.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, silent_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, silent_s // limits.ASKED)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, limits.ASKED)


def is_host_silent(sock: Any) -> bool:
    """Whether the host of a TCP connection has not acknowledged bytes that were sent again and again, for some 25 s. A
    host whose program reads nothing does acknowledge."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except OSError:  # not a TCP socket
        return False
    return bool(info[_RETRANSMITS] >= limits.UNACKNOWLEDGED)


def unsent(sock: Any) -> int:
    """Return the number of sent bytes that the other side has not acknowledged (TCP) or not read. Raises OSError."""
    return int.from_bytes(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)), "little")


def peer(sock: socket.socket) -> tuple[int, int, int]:
    """Return process, user and group of the peer, as the kernel reports them."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return pid, uid, gid


def pid_namespace() -> int:
    """Return the number of this process's PID namespace: numbers of processes and threads are valid in it only. 0 if
    /proc does not say."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def peer_groups(sock: Any) -> frozenset[int] | None:
    """Return the peer's supplementary groups when it connected, or None if the kernel has no record of them."""
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, _PEERGROUPS, _GROUPS_BYTES)
    except OSError:
        return None
    return frozenset(gid for (gid,) in struct.iter_unpack("=I", raw))


# ------------------------------------------------------------ after an answer


_SLOW_S = 0.0005
_PAUSE_S = 0.1  # after a slow yield

_from = 0.0  # no yield before that time


def let_client_run() -> bool:
    """Yield the CPU. Return whether that was done; if not, wait for the client, which has not run yet."""
    global _from
    began = perf_counter()
    if began < _from:
        return False
    os.sched_yield()
    if perf_counter() - began > _SLOW_S:
        _from = began + _PAUSE_S
    return True


# ------------------------------------------------------------ addresses


ADDRESS_FORMS = "unix!PATH, tcp!HOST!PORT, tls!HOST!PORT or HOST:PORT"
DEFAULT_PORT = 564
SOCKET_NAME = "mqfs.sock"  # in the current folder, or that of the user's sockets


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
    """A TCP port of a host that speaks TLS."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tls!{self.host}!{self.port}"


Address = UnixAddress | TcpAddress | TlsAddress


_PLAIN = re.compile(r"(unix|tcp|tls)!(.*)", re.DOTALL)
_URL = re.compile(r"(unix):(?://)?(.*)|(tcp|tls)://(.*?)/?", re.DOTALL)
_COMMA = re.compile(
    r",(?=(?:unix|tcp|tls)[!:]|(?:\[[^\]]*\]|[^:/!,]+):\d+(?:,|$)|$)"
)  # a socket's path may contain one
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
    """Parse one address, or several separated by commas. Raises BadAddress."""
    return [parse_address(word) for word in _COMMA.split(text)]


def _unix(text: str, path: str) -> UnixAddress:
    if not path or "\0" in path:
        raise BadAddress(f"invalid address {text!r}: no path (expected {ADDRESS_FORMS})")
    if len(os.fsencode(path)) > PATH_BYTES:
        raise BadAddress(f"invalid address {text!r}: path too long (expected at most {PATH_BYTES} bytes)")
    return UnixAddress(path)


def _host_and_port(text: str, rest: str) -> tuple[str, str | None]:
    """Return the parts of HOST:PORT, where an IPv6 address is in brackets."""
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
    """Return the address of a client that names none: $MQFS_ADDRESS, else ./mqfs.sock, else mqfs.sock in the folder of
    the user's sockets. Raises Disconnected if there is none of these."""
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
    """Whether a host is always this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def explain_failure(address: Address, error: OSError) -> str:
    """Return the text of a failed connect or listen."""
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
