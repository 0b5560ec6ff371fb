"""A store on disk: its buckets, each made, opened and removed whole.

Owns group numbers and the buckets that are open; a bucket's own files are its own.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Iterator, Sequence

from mqfs import errors, limits
from mqfs.histogram import Histogram
from mqfs.seams import Bucket
from mqfs.store import directory
from mqfs.store.bucket import DiskBucket
from mqfs.store.commit_thread import CommitThread, Inline, Post, SyncScheduler
from mqfs.store.directory import folder_of, group_folders
from mqfs.store.disk import Disk, remove_tree
from mqfs.store.memory_only import MemoryOnlyLog
from mqfs.store.quarantine import Quarantine
from mqfs.store.segment.descriptors import Descriptors
from mqfs.store.segment_head import read_heads, write_head
from mqfs.store.spool import DiskStaged

log = logging.getLogger("mqfs.store")

PORTION_S = 0.01  # of one tick


class DiskStore:
    """See `Store` in mqfs/seams.py. `post` runs a function on the engine's thread; without it syncs are inline."""

    def __init__(self, path: str, post: Post | None = None, disk: Disk | None = None) -> None:
        self.path = os.path.realpath(path)
        self.disk = disk if disk is not None else Disk()
        self.descriptors = Descriptors()
        self.sync_times = Histogram()
        self.full: dict[int, int] = {}
        self.staging = f"{self.path}/staging"
        self.quarantine = Quarantine(self.disk, f"{self.path}/quarantine")
        self._lock = -1
        self._buckets: dict[int, DiskBucket] = {}
        self._closing: set[int] = set()  # descriptors, by the committer's thread
        self._turn: list[DiskBucket] = []  # still to come in this round of `tick`
        self._closed = False
        with _refusing(self.path):
            directory.prepare(self.disk, self.path)
            self._lock = directory.take_lock(self.disk, self.path)
        try:
            with _refusing(self.path):
                self.uuid, self._next_number = directory.begin(self.disk, self.path)
        except BaseException:
            self.disk.close(self._lock)
            raise
        self._reserved = self._next_number
        self.committer: SyncScheduler = Inline() if post is None else CommitThread(post)

    def groups(self) -> Sequence[int]:
        numbers = []
        with _refusing(f"the groups of {self.path}"):
            for number, folder in group_folders(self.disk, self.path):
                if self._has_log(folder):
                    numbers.append(number)
                else:
                    log.warning("group %d has no log: it was not made to the end, or not removed to the end", number)
        return sorted(numbers)

    def _has_log(self, folder: str) -> bool:
        return any(name.endswith(".log") for name in self.disk.listdir(folder))

    def number(self) -> int:
        if self._next_number >= self._reserved:
            # The label has no check of its own: a number that is in use is never given.
            self._next_number = max([self._next_number, *(number + 1 for number in self.groups())])
            with _refusing("no group number"):
                directory.write_label(self.disk, self.path, self.uuid, self._next_number + limits.GROUP_NUMBER_BLOCK)
            self._reserved = self._next_number + limits.GROUP_NUMBER_BLOCK
        self._next_number += 1
        return self._next_number - 1

    def stage(self, number: int) -> DiskStaged:
        return DiskStaged(self.disk, f"{self.staging}/part-{number}")

    def make(self, number: int, state: bytes) -> DiskBucket:
        with _refusing(f"group {number}"):
            self._make(number, state)
        return self._open(number, fresh=True)

    def _make(self, number: int, state: bytes) -> None:
        disk, made, final = self.disk, f"{self.staging}/{number}", folder_of(self.path, number)
        above = os.path.dirname(final)
        if disk.exists(made):
            remove_tree(disk, made)  # of an attempt that failed
        disk.mkdir(made)
        _, _, fd = write_head(self, made, number, 1, state, 1 + limits.SEQUENCE_BLOCK, 0)
        try:
            disk.fdatasync(fd)
        finally:
            disk.close(fd)
        disk.sync_folder(made)
        if not disk.exists(above):
            disk.mkdir(above)
            disk.sync_folder(os.path.dirname(above))
        self._move(made, final, above)

    def _move(self, old: str, new: str, synced: str) -> None:
        """Rename a folder, durably in `synced`; after an error it is renamed back, if the disk allows that."""
        self.disk.rename(old, new)
        try:
            self.disk.sync_folder(synced)
        except OSError:
            with contextlib.suppress(OSError):
                self.disk.rename(new, old)
            raise

    def open(self, number: int) -> DiskBucket:
        return self._open(number, fresh=False)

    def _open(self, number: int, *, fresh: bool) -> DiskBucket:
        bucket = self._buckets.get(number)
        if bucket is None:
            folder = folder_of(self.path, number)
            with _refusing(f"group {number}"):
                if not self.disk.is_folder(folder) or not self._has_log(folder):
                    raise errors.NotFound(f"group {number} has no bucket")
                bucket = self._buckets[number] = DiskBucket(self, number, folder, fresh=fresh)
        return bucket

    def heads(self, number: int) -> Iterator[bytes]:
        return read_heads(self.disk, folder_of(self.path, number))

    def in_memory(self, bucket: Bucket) -> Bucket:
        return MemoryOnlyLog(bucket)

    def remove(self, number: int) -> None:
        bucket = self._buckets.get(number)
        folder, gone = folder_of(self.path, number), f"{self.staging}/{number}.gone"
        with _refusing(f"group {number}"):
            if not self.disk.is_folder(folder):
                raise errors.NotFound(f"group {number} has no bucket")
        if bucket is not None:
            bucket.upkeep.pause()
        try:
            with _refusing(f"group {number}"):
                self._move(folder, gone, os.path.dirname(folder))
        except errors.MqfsError:
            if bucket is not None:
                bucket.upkeep.resume()
            raise
        if bucket is not None:
            bucket.upkeep.abandon()
            del self._buckets[number]
            self.full.pop(number, None)
        try:
            remove_tree(self.disk, gone)
        except OSError as error:
            log.warning("%s stays until the next start: %s", gone, error)

    def tick(self) -> None:
        until = time.monotonic() + PORTION_S
        if not self._turn:
            self._turn = list(self._buckets.values())
        while self._turn and time.monotonic() < until:
            self._turn.pop().upkeep.tick(until)
        until = time.monotonic() + PORTION_S
        for number in list(self.full):
            if time.monotonic() > until:
                break
            bucket, need = self._buckets.get(number), self.full.pop(number)
            if bucket is not None:
                self.full[number] = need  # behind the others, which are asked for next time
                bucket.writer.ask_for_room()

    def close_later(self, fd: int) -> None:
        """See `StoreContext`."""
        self._closing.add(fd)
        self.committer.request(("close", fd), lambda: self._close(fd), lambda error: None, 0.0)

    def _close(self, fd: int) -> None:
        self._closing.discard(fd)
        self.disk.close(fd)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.committer.stop()
        while self._closing:
            with contextlib.suppress(OSError):
                self.disk.close(self._closing.pop())
        for bucket in self._buckets.values():
            bucket.upkeep.close()
        if self._reserved != self._next_number:
            with contextlib.suppress(OSError):
                directory.write_label(self.disk, self.path, self.uuid, self._next_number)
        self.disk.close(self._lock)


@contextlib.contextmanager
def _refusing(what: str) -> Iterator[None]:
    """OSError becomes DiskFull or DiskFailed."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise errors.DiskFull(what) from error
        raise errors.DiskFailed(f"{what}: {error}") from error


__all__ = ["DiskStore"]
