"""Which buckets of a folder are to be scanned: by inotify, by the stamps of UPDATE, by times of directories.

inotify reports this machine's writers only, stamps all that write them, a directory's time the others.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import select
import struct
import time

from mqfs.bridge.folder import Folder

log = logging.getLogger("mqfs.bridge")

IN_MODIFY, IN_MOVED_TO, IN_CREATE, IN_Q_OVERFLOW = 0x2, 0x80, 0x100, 0x4000
IN_NO_LINK = 0x0300_0000  # IN_ONLYDIR, IN_DONT_FOLLOW
LOOK_S = 10.0  # between two looks at the times of all directories
BURST_S = 0.002  # after an event: many files that are written at once are one scan
_EVENT = struct.Struct("iIII")


class Inotify:
    """Events of directories. `fileno`: readable when there are some; -1: the system gives none."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fileno = int(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        self._names: dict[int, str] = {}

    def watch(self, path: str, mask: int, name: str) -> bool:
        """Report `name` when there are such events at a path; whether the system does."""
        number = self._libc.inotify_add_watch(self.fileno, os.fsencode(path), ctypes.c_uint32(mask | IN_NO_LINK))
        if number >= 0:
            self._names[number] = name
        return bool(number >= 0)

    def read(self) -> set[str] | None:
        """The names reported since the last call; None: events were lost."""
        found: set[str] = set()
        while True:
            try:
                data = os.read(self.fileno, 65_536)
            except BlockingIOError:
                return found
            at = 0
            while at < len(data):
                number, mask, _, size = _EVENT.unpack_from(data, at)
                if mask & IN_Q_OVERFLOW:
                    return None
                if number in self._names:
                    found.add(self._names[number])
                at += _EVENT.size + size

    def close(self) -> None:
        if self.fileno >= 0:
            os.close(self.fileno)


class Changes:
    """The buckets to scan, of one folder."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._stamps: list[bytes] | None = None
        self._scanned: dict[str, int] = {}  # the time of each directory at its last scan, ns
        self._sure: set[str] = set()  # those with the same time at two scans: times are coarse on some file systems
        self._looked = self._poll_at = 0.0
        self._inotify = Inotify()
        update = os.path.dirname(folder.update_path)
        watched = self._inotify.watch(update, IN_MODIFY | IN_CREATE | IN_MOVED_TO, "")
        for bucket in folder.buckets:
            watched = watched and self._inotify.watch(folder.bucket_path(bucket), IN_MOVED_TO | IN_CREATE, bucket)
        if not watched:
            log.warning("inotify: %s (only the poll finds new files)", os.strerror(ctypes.get_errno() or errno.ENOSYS))

    def wait(self, seconds: float, wake: int) -> set[str]:
        """The buckets to scan: at most that long after the last look, sooner by inotify, or when `wake` is readable."""
        files = [wake] + [self._inotify.fileno] * (self._inotify.fileno >= 0)
        ready = select.select(files, [], [], max(self._poll_at - time.monotonic(), 0.0))[0]
        found: set[str] = set()
        if self._inotify.fileno in ready:
            time.sleep(BURST_S)
            reported = self._inotify.read()
            found = set(self._folder.buckets) if reported is None else reported - {""}
            if reported is None or "" in reported:
                found |= self._stamped()
        if time.monotonic() >= self._poll_at:  # also where events of this machine never end
            self._poll_at = time.monotonic() + seconds
            found |= self._stamped() | self._touched()
        return found

    def _stamped(self) -> set[str]:
        """Buckets with a new stamp."""
        stamps, before = self._folder.read_stamps(), self._stamps
        if stamps is None:
            self._looked = 0.0  # no stamps: the directories tell
            return set()
        self._stamps = stamps
        if before is None:
            return set(self._folder.buckets)
        return {b for b, new, old in zip(self._folder.buckets, stamps, before, strict=True) if new != old}

    def _touched(self) -> set[str]:
        """Buckets whose directory changed since its scan; looked at once in LOOK_S."""
        if time.monotonic() - self._looked < LOOK_S:
            return set()
        self._looked = time.monotonic()
        times = {bucket: self._time(bucket) for bucket in self._folder.buckets}
        return {b for b, changed in times.items() if b not in self._sure or changed != self._scanned[b]}

    def _time(self, bucket: str) -> int:
        return self._folder.changed_ns(bucket)

    def scanning(self, bucket: str) -> None:
        """A scan of it begins."""
        changed = self._time(bucket)
        if self._scanned.get(bucket) == changed:
            self._sure.add(bucket)
        else:
            self._sure.discard(bucket)
        self._scanned[bucket] = changed

    def close(self) -> None:
        self._inotify.close()
