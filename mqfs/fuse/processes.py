"""Notice of the end of processes: one descriptor a process, one task for all of them.

Owns the pidfds and the epoll that holds them.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import signal
from collections.abc import Callable

import trio

log = logging.getLogger("mqfs.fuse")

EVENTS = 64  # ends of processes handled before other tasks have a turn


class Watched:
    """A process without a notice of its end."""

    __slots__ = ("fd", "pid", "thens")

    def __init__(self, pid: int, fd: int) -> None:
        self.pid, self.fd = pid, fd
        self.thens: dict[object, Callable[[], None]] = {}

    def is_the(self, pid: int) -> bool:
        """Whether that number is still this process's."""
        try:
            signal.pidfd_send_signal(self.fd, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return self.pid == pid


class Watcher:
    """`seams.ProcessWatcher`, while `run` runs."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._by_pid: dict[int, Watched] = {}
        self._by_fd: dict[int, Watched] = {}

    def __len__(self) -> int:
        return len(self._by_fd)

    def watch(self, pid: int, then: Callable[[], None]) -> Callable[[], None] | None:
        """See `ProcessWatcher`."""
        watched = self._by_pid.get(pid)
        if watched is None or not watched.is_the(pid):
            try:
                watched = self._open(pid)
            except OSError as error:
                if error.errno in (errno.ESRCH, errno.EINVAL, errno.ENOENT):
                    return None
                log.error("process %d not watched: %s; its claims return when it closes the file", pid, error)
                return nothing
        key = object()
        watched.thens[key] = then

        def stop() -> None:
            watched.thens.pop(key, None)
            if not watched.thens:
                self._forget(watched)

        return stop

    def _open(self, pid: int) -> Watched:
        if pid <= 0:
            raise ProcessLookupError(errno.ESRCH, "no process")
        fd = os.pidfd_open(pid)
        try:
            self._epoll.register(fd, select.EPOLLIN)
        except BaseException:
            os.close(fd)
            raise
        watched = self._by_pid[pid] = self._by_fd[fd] = Watched(pid, fd)
        return watched

    def _forget(self, watched: Watched) -> None:
        """Close a process's descriptor; again does nothing."""
        if self._by_fd.get(watched.fd) is not watched:
            return
        del self._by_fd[watched.fd]
        if self._by_pid.get(watched.pid) is watched:
            del self._by_pid[watched.pid]
        self._epoll.unregister(watched.fd)
        os.close(watched.fd)

    async def run(self) -> None:
        """Handle the ends of processes, for ever."""
        while True:
            await trio.lowlevel.wait_readable(self._epoll.fileno())
            for fd, _ in self._epoll.poll(0, EVENTS):
                watched = self._by_fd.get(fd)
                if watched is not None:
                    self._ended(watched)

    def _ended(self, watched: Watched) -> None:
        self._forget(watched)
        while watched.thens:
            then = watched.thens.pop(next(iter(watched.thens)))
            try:
                then()
            except Exception:
                log.exception("end of process %d: callback failed", watched.pid)

    def close(self) -> None:
        """Stop all watches."""
        for watched in list(self._by_fd.values()):
            self._forget(watched)
        self._epoll.close()


def nothing() -> None:
    pass
