"""The server's link to its fd keeper, the process that holds the rings over a kill -9 of the server.

The link starts the keeper, and passes all descriptors again after that was killed. A request never waits longer than a
second, except at a start (ANSWER_S). Without a keeper rings are made all the same, and the log warns that they would
not survive the server.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator

from mqfs import limits
from mqfs.errors import BadStore, MqfsError, Unsupported
from mqfs.net.sockets import peer, reachable
from mqfs.ring.server import fd_keeper

log = logging.getLogger("mqfs")

PATIENCE_S = 1.0
ANSWER_S = 30.0  # at a start: on a machine short of memory the keeper is slow
_PACKET_BYTES = 256


class _Child(subprocess.Popen[bytes]):
    """A child process that outlives the server."""

    def __del__(self, *_: object) -> None:
        pass


class KeeperLink:
    """The fd keeper of one store. Call `ensure_alive` about once a second."""

    def __init__(self, store_path: str) -> None:
        self._path = store_path
        self._socket: socket.socket | None = None
        self._child: _Child | None = None
        self._given: dict[bytes, int] = {}  # our duplicates of the descriptors that it should hold
        self._complained = False

    @staticmethod
    def held(store_path: str) -> dict[tuple[int, int], int]:
        """Return the descriptors held by a live keeper, by (group, generation); none without a keeper. Raises BadStore
        if it does not answer: its rings may hold messages that are nowhere else."""
        found: dict[tuple[int, int], int] = {}
        try:
            with _connect(store_path, ANSWER_S) as sock:
                for name, fd in _listed(sock):
                    group, _, generation = name.partition(b".")
                    found[int(group), int(generation)] = fd
        except (TimeoutError, BlockingIOError):
            while found:
                os.close(found.popitem()[1])
            raise BadStore(
                f"{store_path}/{fd_keeper.NAME}: the process that keeps the rings does not answer (expected it within "
                f"{ANSWER_S:g} s; to start without what only rings have kill it)"
            ) from None
        except (OSError, ValueError):
            pass
        return found

    def keep(self, group: int, generation: int, fd: int) -> None:
        """Pass a ring to the keeper, which holds it from then on."""
        name = _name(group, generation)
        self._forget(name)
        self._given[name] = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
        self._try(b"keep " + name, self._given[name])

    def drop(self, group: int, generation: int) -> None:
        name = _name(group, generation)
        self._forget(name)
        if self._socket is not None or os.path.lexists(f"{self._path}/{fd_keeper.NAME}"):
            self._try(b"drop " + name)

    def ensure_alive(self) -> None:
        """Start another keeper after one was killed."""
        if self._socket is not None and _has_ended(self._socket):
            self._lose()
        if self._socket is None and self._given:
            if not self._complained:
                log.warning("fd keeper died: starting another")
            self._try(b"")

    def quit(self) -> None:
        """End the keeper, which drops all it holds."""
        with contextlib.suppress(OSError, MqfsError):
            if self._socket is None:
                self._socket = _connect(self._path)
            self._ask(b"quit")
        self.close()
        if self._child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(PATIENCE_S)

    def close(self) -> None:
        """Close the link; the keeper keeps what it holds."""
        for name in list(self._given):
            self._forget(name)
        self._lose()

    # ------------------------------------------------------------ requests

    def _try(self, request: bytes, fd: int = -1) -> None:
        """Send a request to the keeper, or to a new one, which gets all rings first."""
        for _ in range(2):
            try:
                if self._socket is None:
                    self._begin()
                if request:
                    self._ask(request, fd)
                self._complained = False
                return
            except (OSError, MqfsError) as error:
                self._lose()
                reason = error
        if not self._complained:
            self._complained = True
            log.error("no fd keeper: rings will not survive a kill of this server (%s)", reason)

    def _begin(self) -> None:
        try:
            self._socket = _connect(self._path)
        except OSError:
            self._start()
            self._socket = _connect(self._path)
        for name, fd in self._given.items():
            self._ask(b"keep " + name, fd)

    def _ask(self, request: bytes, fd: int = -1) -> None:
        assert self._socket is not None
        socket.send_fds(self._socket, [request], [fd] if fd >= 0 else [])
        answer = self._socket.recv(_PACKET_BYTES)
        if answer != b"ok":
            raise Unsupported(f"fd keeper answered {answer.decode(errors='replace')!r} (expected 'ok')")

    def _start(self) -> None:
        """Start a keeper. Its socket is made here, so that it accepts connections at once."""
        if self._child is not None:
            self._child.poll()
        folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            where = f"/proc/self/fd/{folder}/{fd_keeper.NAME}"
            _remove_old(where)
            listener.bind(where)
            os.chmod(where, 0o600)
            listener.listen(4)
            fds = listener.fileno(), folder
            self._child = _Child(
                [sys.executable, "-I", "-S", fd_keeper.__file__, *map(str, fds), str(limits.RINGS), self._path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=fds,
                start_new_session=True,  # does not end with the server's terminal or process group
                cwd="/",
            )
        finally:
            listener.close()
            os.close(folder)

    def _lose(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._child is not None:
            self._child.poll()

    def _forget(self, name: bytes) -> None:
        if name in self._given:
            os.close(self._given.pop(name))


def _has_ended(sock: socket.socket) -> bool:
    """Whether the keeper has closed its end: it sends nothing unasked, so only the end is readable."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def _name(group: int, generation: int) -> bytes:
    return b"%d.%d" % (group, generation)


def _connect(store_path: str, patience_s: float = PATIENCE_S) -> socket.socket:
    """Connect to the keeper of a store. Raises OSError, for another user's socket too."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(patience_s)
        with reachable(f"{store_path}/{fd_keeper.NAME}") as where:
            sock.connect(where)
        _, uid, _ = peer(sock)
        if uid != os.geteuid():
            raise PermissionError(f"{store_path}/{fd_keeper.NAME}: socket of user {uid} (expected {os.geteuid()})")
    except BaseException:
        sock.close()
        raise
    return sock


def _listed(sock: socket.socket) -> Iterator[tuple[bytes, int]]:
    """Yield the name and the descriptor of each ring."""
    sock.send(b"list")
    while True:
        name, fds, _, _ = socket.recv_fds(sock, _PACKET_BYTES, 1)
        if len(fds) != 1:
            return  # the end of the list, or an invalid answer
        os.set_inheritable(fds[0], False)
        yield name, fds[0]


def _remove_old(path: str) -> None:
    """Remove the socket of a keeper that was killed or does not answer: without its file, such a keeper ends."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise Unsupported("'keeper' in the store is not a socket (left as it is)")
        os.unlink(path)
