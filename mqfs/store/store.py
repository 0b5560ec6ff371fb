"""The folder of a store: its lock, its version, its numbers and its buckets.

Owns everything outside the buckets' own folders; what a bucket does is in bucket.py. Refuses what is not a store of
this version before anything is changed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

from mqfs import errors, limits
from mqfs.seams import Bucket, Log
from mqfs.store.bucket import DiskBucket, write_head
from mqfs.store.commit_thread import CommitThread, Inline, Post, SyncScheduler
from mqfs.store.disk import Disk, read_file, remove_tree, write_all, write_file
from mqfs.store.memory_only import MemoryOnlyLog
from mqfs.store.segment.file import Files
from mqfs.store.spool import DiskStaged

log = logging.getLogger("mqfs.store")

VERSION = 1
FOLDERS = ("staging", "buckets", "quarantine")
PORTION_S = 0.01  # of one tick


class DiskStore:
    """See `Store` in mqfs/seams.py. `post` runs a function on the engine's thread; without it syncs are inline."""

    def __init__(self, path: str, post: Post | None = None, disk: Disk | None = None) -> None:
        self.path = os.path.realpath(path)
        self.disk = disk if disk is not None else Disk()
        self.files = Files()
        self.staging = f"{self.path}/staging"
        self._lock = -1
        self._buckets: dict[int, DiskBucket] = {}
        self._closing: set[int] = set()  # descriptors, by the committer's thread
        self._turn: list[DiskBucket] = []  # whose turn it is in `tick`
        self._closed = False
        with _refusing(self.path):
            self._prepare()
            self._lock = take_lock(self.disk, self.path)
        try:
            with _refusing(self.path):
                self.uuid, self._next_number = self._begin()
        except BaseException:
            self.disk.close(self._lock)
            raise
        self._reserved = self._next_number
        self.committer: SyncScheduler = Inline() if post is None else CommitThread(post)

    # ------------------------------------------------------------ a start

    def _prepare(self) -> None:
        """Make the folder if there is none; refuse one that holds something else."""
        try:
            if not self.disk.exists(self.path):
                self.disk.mkdir(self.path)
                self.disk.sync_folder(os.path.dirname(self.path))
            names = set(self.disk.listdir(self.path))
            if self.disk.is_open_to_others(self.path):
                raise errors.BadStore(f"{self.path} is open to other users (expected: ours, mode 700)")
        except FileNotFoundError as error:
            raise errors.BadStore(f"{self.path}: the folder {os.path.dirname(self.path)} does not exist") from error
        except NotADirectoryError as error:
            raise errors.BadStore(f"{self.path} is not a store: not a directory") from error
        except OSError as error:
            raise errors.BadStore(f"{self.path}: {error.strerror}") from error
        if "mqfs" not in names and names - {"lock", *FOLDERS, "lost+found"}:
            raise errors.BadStore(f"{self.path} is not empty and not a store: name an empty or new directory")
        if "mqfs" in names:
            read_label(self.disk, self.path)

    def _begin(self) -> tuple[str, int]:
        disk = self.disk
        if disk.exists(f"{self.path}/mqfs"):
            uuid_, number = read_label(disk, self.path)
        else:
            uuid_, number = str(uuid.uuid4()), 1
        for name in FOLDERS:
            if not disk.exists(f"{self.path}/{name}"):
                disk.mkdir(f"{self.path}/{name}")
            elif not disk.is_folder(f"{self.path}/{name}"):
                raise errors.BadStore(f"{self.path}/{name} is not a folder")
        for name in disk.listdir(self.staging):
            remove_tree(disk, f"{self.staging}/{name}")
        if not disk.exists(f"{self.path}/mqfs"):
            disk.sync_folder(self.path)
            self._write_label(uuid_, number)
        return uuid_, number

    def _write_label(self, uuid_: str, number: int) -> None:
        made = f"{self.staging}/mqfs"
        write_file(self.disk, made, label(uuid_, number))
        self.disk.rename(made, f"{self.path}/mqfs")
        self.disk.sync_folder(self.path)

    # ------------------------------------------------------------ the seam

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
                self._write_label(self.uuid, self._next_number + limits.GROUP_NUMBER_BLOCK)
            self._reserved = self._next_number + limits.GROUP_NUMBER_BLOCK
        self._next_number += 1
        return self._next_number - 1

    def stage(self, number: int) -> DiskStaged:
        return DiskStaged(self.disk, f"{self.staging}/part-{number}")

    def make(self, number: int, state: bytes) -> DiskBucket:
        with _refusing(f"group {number}"):
            self._make(number, state)
        bucket = self.open(number)
        bucket.begin()
        return bucket

    def _make(self, number: int, state: bytes) -> None:
        disk, made, final = self.disk, f"{self.staging}/{number}", self._folder(number)
        above = os.path.dirname(final)
        if disk.exists(made):
            remove_tree(disk, made)  # of an attempt that failed
        disk.mkdir(made)
        _, fd = write_head(self, made, number, 1, state, 1 + limits.SEQUENCE_BLOCK, 0)
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
        """Rename a folder, durably in `synced`; after an error it is where it was, if the disk lets us."""
        self.disk.rename(old, new)
        try:
            self.disk.sync_folder(synced)
        except OSError:
            with contextlib.suppress(OSError):
                self.disk.rename(new, old)
            raise

    def open(self, number: int) -> DiskBucket:
        bucket = self._buckets.get(number)
        if bucket is None:
            folder = self._folder(number)
            with _refusing(f"group {number}"):
                if not self.disk.is_folder(folder) or not self._has_log(folder):
                    raise errors.NotFound(f"group {number} has no bucket")
                bucket = self._buckets[number] = DiskBucket(self, number, folder)
        return bucket

    def in_memory(self, bucket: Bucket) -> Bucket:
        return MemoryOnlyLog(cast(Log, bucket))

    def remove(self, number: int) -> None:
        bucket = self._buckets.get(number)
        folder, gone = self._folder(number), f"{self.staging}/{number}.gone"
        with _refusing(f"group {number}"):
            if not self.disk.is_folder(folder):
                raise errors.NotFound(f"group {number} has no bucket")
        if bucket is not None:
            bucket.pause()
        try:
            with _refusing(f"group {number}"):
                self._move(folder, gone, os.path.dirname(folder))
        except errors.MqfsError:
            if bucket is not None:
                bucket.resume()
            raise
        if bucket is not None:
            bucket.give_up()
            del self._buckets[number]
        try:
            remove_tree(self.disk, gone)
        except OSError as error:
            log.warning("%s stays until the next start: %s", gone, error)

    def tick(self) -> None:
        until = time.monotonic() + PORTION_S
        if not self._turn:
            self._turn = list(self._buckets.values())
        while self._turn and time.monotonic() < until:
            bucket = self._turn.pop()
            bucket.tick(until)

    def close_later(self, fd: int) -> None:
        """Close a descriptor on the committer's thread."""
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
            bucket.close()
        if self._reserved != self._next_number:
            with contextlib.suppress(OSError):
                self._write_label(self.uuid, self._next_number)
        self.disk.close(self._lock)

    # ------------------------------------------------------------ quarantine

    def quarantine(self, group: int, first: int, position: int, data: bytes, why: str) -> None:
        """Copy bytes that failed a check, durably; once for each place."""
        log.warning("group %d: %s of %d bytes at %d of segment %d", group, why, len(data), position, first)
        path = self._free_name(f"{group}-{first:020d}-{position}", data)
        if path is not None:
            write_file(self.disk, path, data)
            self.disk.sync_folder(f"{self.path}/quarantine")

    def move_aside(self, group: int, first: int, path: str, why: str) -> None:
        """Move a whole file; one of zeros, which holds nothing, is removed."""
        data = read_file(self.disk, path)
        if not data.strip(b"\0"):
            self.disk.unlink(path)
            return
        log.warning("group %d: %s: %s", group, why, path)
        to = self._free_name(f"{group}-{first:020d}-0", data)
        if to is not None:
            # A copy, then the removal: the rename of one folder's entry to another's is not one step on every disk.
            write_file(self.disk, to, data)
            self.disk.sync_folder(f"{self.path}/quarantine")
        self.disk.unlink(path)

    def _free_name(self, name: str, data: bytes) -> str | None:
        """A path in quarantine/ that is not taken; None if those bytes are there already."""
        for number in range(1_000):
            path = f"{self.path}/quarantine/{name}" + (f".{number}" if number else "")
            if not self.disk.exists(path):
                return path
            if self.disk.size_of(path) == len(data) and read_file(self.disk, path) == data:
                return None
        raise OSError(errno.EEXIST, "quarantine is full of copies of one place", name)

    def _folder(self, number: int) -> str:
        return f"{self.path}/buckets/{number & 255:02x}/{number}"


def group_folders(disk: Disk, path: str) -> Iterable[tuple[int, str]]:
    """The number and the folder of each bucket."""
    for spread in disk.listdir(f"{path}/buckets"):
        for name in disk.listdir(f"{path}/buckets/{spread}"):
            if name.isdecimal():
                yield int(name), f"{path}/buckets/{spread}/{name}"


def label(uuid_: str, number: int) -> bytes:
    return f"mqfs {VERSION}\nuuid {uuid_}\ngroups {number}\n".encode()


def read_label(disk: Disk, path: str) -> tuple[str, int]:
    """The uuid and the first group number that is not reserved. Raises BadStore."""
    if not disk.exists(f"{path}/mqfs"):
        raise errors.BadStore(f"{path} {'is not a store' if disk.exists(path) else 'does not exist'}")
    try:
        lines = read_file(disk, f"{path}/mqfs").decode().splitlines()
        words = dict(line.split(" ", 1) for line in lines)
        version = int(words["mqfs"])
    except (OSError, ValueError, KeyError) as error:
        raise errors.BadStore(f"{path}/mqfs does not say what store this is") from error
    if version != VERSION:
        raise errors.BadStore(f"{path} is of version {version}; this server reads version {VERSION}")
    try:
        return words["uuid"], int(words["groups"])
    except (ValueError, KeyError) as error:
        raise errors.BadStore(f"{path}/mqfs lacks its uuid or groups line") from error


def take_lock(disk: Disk, path: str, *, write: bool = True) -> int:
    """The lock's descriptor, with our process number in the file; with `write` off that is left as it is."""
    try:
        if write:
            fd = disk.lock(f"{path}/lock")
        else:
            fd = disk.lock(f"{path}/lock" if disk.exists(f"{path}/lock") else path, os.O_RDONLY)
    except BlockingIOError:
        holder = read_file(disk, f"{path}/lock").decode(errors="replace").strip()
        raise errors.BadStore(f"{path} is in use by process {holder or 'unknown'}") from None
    except OSError as error:
        raise errors.BadStore(f"{path}/lock: {error.strerror}") from error
    if write:
        disk.truncate(fd, 0)
        write_all(disk, fd, b"%d\n" % os.getpid(), 0)
    return fd


@contextlib.contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Errors of the system as conditions of ours."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise errors.DiskFull(what) from error
        raise errors.DiskFailed(f"{what}: {error}") from error


__all__ = ["VERSION", "DiskStore", "group_folders", "label", "read_label", "take_lock"]
