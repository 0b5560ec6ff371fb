"""Sockets in the file system: listening, stale files of killed servers, credentials of peers.

Never waits and speaks no protocol; its user accepts.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import struct
from collections.abc import Iterator
from typing import Any

from mqfs import limits
from mqfs.errors import BadAddress

BACKLOG = 1_024
PATH_BYTES = 107  # of an address, less its NUL
PROBE_S = 1.0
_CREDENTIALS = struct.Struct("3i")
_PEERGROUPS = 59  # of <asm/socket.h>; Python's socket has no name for it
_INFO_BYTES, _RETRANSMITS = 4, 2  # of struct tcp_info of <linux/tcp.h>: its third byte
_GROUPS_BYTES = 1_024  # the most that Python's getsockopt takes: 256 groups


@contextlib.contextmanager
def reachable(path: str) -> Iterator[str]:
    """A name of a path that fits an address: a longer path goes through a descriptor of its folder."""
    if len(os.fsencode(path)) <= PATH_BYTES:
        yield path
        return
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{os.path.basename(path)}"
    finally:
        os.close(folder)


class SocketFile:
    """A listening socket and its file. Raises OSError, or BadAddress where the path is another kind of file."""

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
        """Stop listening. Removes the file unless another process has replaced it."""
        self.socket.close()
        with contextlib.suppress(OSError):
            if _inode(self.path) == self._made:
                os.unlink(self.path)


def _inode(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


def _remove_stale(where: str, path: str, kind: int) -> None:
    """Remove a socket's file that no process listens at. Raises BadAddress for any other file."""
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
    """Have the kernel end a TCP connection whose host is gone: after `silent_s` seconds without a word, and the same
    again for the probes. It probes only where nothing that was sent waits for its receipt: see `is_host_silent`."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, silent_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, silent_s // limits.ASKED)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, limits.ASKED)


def is_host_silent(sock: Any) -> bool:
    """Whether the host of a TCP connection has not acknowledged what was sent to it again and again, for some 25 s. A
    host whose program reads nothing does acknowledge."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except OSError:  # no TCP
        return False
    return bool(info[_RETRANSMITS] >= limits.UNACKNOWLEDGED)


def peer(sock: socket.socket) -> tuple[int, int, int]:
    """Process, user and group of the peer, by the kernel."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return pid, uid, gid


def pid_namespace() -> int:
    """The number of the PID namespace of this process: within it the numbers of processes and threads differ. 0 where
    /proc does not tell."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def peer_groups(sock: Any) -> frozenset[int] | None:
    """The supplementary groups of the peer when it connected; None where the kernel has no record of them."""
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, _PEERGROUPS, _GROUPS_BYTES)
    except OSError:
        return None
    return frozenset(gid for (gid,) in struct.iter_unpack("=I", raw))
