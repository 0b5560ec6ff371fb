"""A store on disk: its buckets, each made, opened and removed whole.

The store assigns group numbers. Only a bucket itself writes its files.

The folders of new groups are made on the committer's thread; requests that come meanwhile are served together.

    staging/7/00000000000000000001.log    the log with its first state, synced; then its folder
    buckets/07/7                          that folder, renamed; then the sync of the folder above

A folder has its final name only when its log is on disk. What a stop leaves in staging/ is removed by the next start.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from mqfs import errors, limits
from mqfs.model import Kind, Step, Wait
from mqfs.store.api import Bucket, Committed, Histogram
from mqfs.store.appender import Appender, DiskRangeWriter, read_heads, write_head
from mqfs.store.chain import Chain
from mqfs.store.compaction import put_index_in_place
from mqfs.store.disk import Disk, DiskStaged, read_file, remove_tree, replace_file, write_all, write_file
from mqfs.store.group_commit import CommitThread, GroupCommit, Inline, Post
from mqfs.store.log_reader import DiskLogReader
from mqfs.store.memory import MemoryOnlyLog
from mqfs.store.recovery import MOVED, is_removed, recover
from mqfs.store.replication import Removed, Replication
from mqfs.store.segment.file import Descriptors
from mqfs.store.sequences import SequenceBlocks, removal_body
from mqfs.store.upkeep import DiskUpkeep

log = logging.getLogger("mqfs.store")

_AT_ONCE = 64  # groups made together: each needs a descriptor


def folder_of(path: str, number: int) -> str:
    """Return the folder of a bucket."""
    return f"{path}/buckets/{number & 255:02x}/{number}"


class NewGroups:
    """Requests for new groups: those that come while the committer makes some are served next, together."""

    def __init__(self, store: DiskStore) -> None:
        self._store = store
        self._asked: deque[tuple[int, bytes, Wait[Bucket]]] = deque()  # number, state
        self._tried: deque[tuple[int, OSError | None, Wait[Bucket]]] = deque()

    def make(self, number: int, state: bytes) -> Step[Bucket]:
        """Make a bucket whose first record is that state; the step is done once it is on disk."""
        wait: Wait[Bucket] = Wait()
        self._asked.append((number, state, wait))
        self._request()
        return wait.result() if wait.settled else wait

    def _request(self) -> None:
        self._store.committer.request(self, self._make_some, self._answer, 0.0)

    def _make_some(self) -> None:
        """Make the folders of requested groups, on the committer's thread."""
        some = [self._asked.popleft() for _ in range(min(len(self._asked), _AT_ONCE))]
        failed: Mapping[int, OSError] = {number: OSError(errno.EIO, "not made") for number, _, _ in some}
        try:
            failed = FolderMaker(self._store, {number: state for number, state, _ in some}).run()
        finally:
            self._tried.extend((number, failed.get(number), wait) for number, _, wait in some)

    def _answer(self, _: OSError | None) -> None:
        """Answer the requests, on the engine's thread."""
        while self._tried:
            number, failed, wait = self._tried.popleft()
            try:
                wait.follow_call(partial(self._store.open_new, number, failed))
            except Exception:  # of the requester: the remaining ones are answered
                log.exception("group %d: its maker was not answered", number)
        if self._asked:
            self._request()


class FolderMaker:
    """Makes the folders of new groups, durably. All groups take one step before any takes the next: the first sync of a
    step does most of the work for the others."""

    def __init__(self, store: DiskStore, states: Mapping[int, bytes]) -> None:
        self._store, self._disk, self._states = store, store.disk, states
        self._left, self._failed = list(states), dict[int, OSError]()
        self._logs: dict[int, int] = {}  # descriptors
        self._has_new_name = False  # in buckets/, which needs a sync

    def run(self) -> dict[int, OSError]:
        """Make the folders; return the error of each group that failed."""
        self._each(self._write)
        self._each(self._sync_log)
        self._sync(self._made)
        self._each(self._make_above)
        if self._has_new_name:
            self._sync(lambda number: os.path.dirname(self._above(number)))
        self._each(lambda number: self._disk.rename(self._made(number), self._final(number)))
        renamed = list(self._left)
        self._sync(self._above)
        for number in renamed:
            if number in self._failed:
                with contextlib.suppress(OSError):  # its requester gets an error: the group must not exist
                    self._disk.rename(self._final(number), self._made(number))
        for number in self._failed:
            with contextlib.suppress(OSError):
                remove_tree(self._disk, self._made(number))
        return self._failed

    def _each(self, step: Callable[[int], None]) -> None:
        """Run a step for each group that has not failed."""
        for number in list(self._left):
            try:
                step(number)
            except OSError as error:
                self._fail(number, error)

    def _sync(self, folder: Callable[[int], str]) -> None:
        """Sync a folder of each group; a shared one only once, since a failure is reported once."""
        shared: dict[str, list[int]] = {}
        for number in self._left:
            shared.setdefault(folder(number), []).append(number)
        for path, numbers in shared.items():
            try:
                self._disk.sync_folder(path)
            except OSError as error:
                for number in numbers:
                    self._fail(number, error)

    def _fail(self, number: int, error: OSError) -> None:
        self._failed[number] = error
        self._left.remove(number)

    def _made(self, number: int) -> str:
        return f"{self._store.staging}/{number}"

    def _final(self, number: int) -> str:
        return folder_of(self._store.path, number)

    def _above(self, number: int) -> str:
        return os.path.dirname(self._final(number))

    def _write(self, number: int) -> None:
        made = self._made(number)
        if self._disk.exists(made):
            remove_tree(self._disk, made)  # left by an attempt that failed
        self._disk.mkdir(made)
        reserve = 1 + limits.SEQUENCE_BLOCK
        _, _, self._logs[number] = write_head(self._store, made, number, 1, self._states[number], reserve, 0)

    def _sync_log(self, number: int) -> None:
        try:
            self._disk.fdatasync(self._logs[number])
        finally:
            self._disk.close(self._logs[number])

    def _make_above(self, number: int) -> None:
        if not self._disk.exists(self._above(number)):
            self._disk.mkdir(self._above(number))
            self._has_new_name = True


# ------------------------------------------------------------ the store

PORTION_S = 0.01  # of one tick


class DiskStore:
    """See `Store` in mqfs/store/api.py. `post` runs a function on the engine's thread; without it syncs are inline.
    `replica`: called when there is something to copy; None: the store has no copy (replication.py)."""

    def __init__(
        self, path: str, post: Post | None = None, disk: Disk | None = None, replica: Callable[[], None] | None = None
    ) -> None:
        self.path, self.post = os.path.realpath(path), post
        self.disk = disk if disk is not None else Disk()
        self.descriptors = Descriptors()
        self.sync_times = Histogram()
        self.full: dict[int, int] = {}
        self.staging = f"{self.path}/staging"
        self.quarantine = Quarantine(self.disk, f"{self.path}/quarantine")
        self._lock = -1
        self._buckets: dict[int, DiskBucket] = {}
        self._removing: dict[int, DiskBucket] = {}  # removed in their logs; the copy does not know yet
        self.replication = Replication(self, replica) if replica is not None else None
        self._closing: set[int] = set()  # descriptors that the committer closes
        self._turn: list[DiskBucket] = []  # still to come in this round of `tick`
        self._closed = False
        with refusing(self.path):
            prepare(self.disk, self.path)
            self._lock = take_lock(self.disk, self.path)
        try:
            with refusing(self.path):
                self.uuid, number = begin(self.disk, self.path)
                # The label has no checksum: whatever it says, never assign a number that is in use.
                self._next_number = max([number, *(used + 1 for used, _ in group_folders(self.disk, self.path))])
        except BaseException:
            self.disk.close(self._lock)
            raise
        self._reserved = self._next_number
        self.committer: CommitThread | Inline = Inline() if post is None else CommitThread(post)
        self._new_groups = NewGroups(self)

    def groups(self) -> Sequence[int]:
        numbers = []
        with refusing(f"the groups of {self.path}"):
            for number, folder in group_folders(self.disk, self.path):
                if number in self._removing:
                    continue
                if self._has_log(folder):
                    numbers.append(number)
                else:
                    log.warning("group %d has no log: it was not made to the end, or not removed to the end", number)
        return sorted(numbers)

    def _has_log(self, folder: str) -> bool:
        return any(name.endswith((".log", MOVED)) for name in self.disk.listdir(folder))

    def number(self) -> int:
        if self._next_number >= self._reserved:
            with refusing("no group number"):
                write_label(self.disk, self.path, self.uuid, self._next_number + limits.GROUP_NUMBER_BLOCK)
            self._reserved = self._next_number + limits.GROUP_NUMBER_BLOCK
        self._next_number += 1
        return self._next_number - 1

    def stage(self, number: int) -> DiskStaged:
        return DiskStaged(self.disk, f"{self.staging}/part-{number}")

    def make(self, number: int, state: bytes) -> DiskBucket:
        return self.open_new(number, FolderMaker(self, {number: state}).run().get(number))

    def make_soon(self, number: int, state: bytes) -> Step[Bucket]:
        return self._new_groups.make(number, state)

    def open_new(self, number: int, error: OSError | None) -> DiskBucket:
        """Open the bucket of a folder that was just made; `error`: why it was not. Raises DiskFull, DiskFailed."""
        if self._closed:  # during the making of the folder: the next start has the group
            raise errors.DiskFailed(f"group {number}: the store was closed")
        with refusing(f"group {number}"):
            if error is not None:
                raise error
        return self._open(number, fresh=True)

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
            with refusing(f"group {number}"):
                if number in self._removing or not self.disk.is_folder(folder) or not self._has_log(folder):
                    raise errors.NotFound(f"no bucket of group {number}")
                bucket = self._buckets[number] = DiskBucket(self, number, folder, fresh=fresh)
                if not fresh and is_removed(bucket.chain):
                    self._finish_removal(number)
                    raise errors.NotFound(f"group {number}: removed")
        return bucket

    def heads(self, number: int) -> Iterator[bytes]:
        return read_heads(self.disk, folder_of(self.path, number))

    def in_memory(self, bucket: Bucket) -> Bucket:
        return MemoryOnlyLog(bucket)

    def remove(self, number: int, then: Committed | None = None) -> Step[None]:
        if self.replication is not None:
            self._record_removal(number)
            self._finish_removal(number, then)
            return None
        wait: Wait[None] = Wait()
        with refusing(f"group {number}"):
            if not self.disk.is_folder(folder_of(self.path, number)):
                raise errors.NotFound(f"no bucket of group {number}")
        self._move_away(number, lambda error: wait.follow_call(lambda: self._moved(number, error, then)))
        return wait.result() if wait.settled else wait

    def _record_removal(self, number: int) -> None:
        """Append the removal to the log itself, durably. Raises NotFound, DiskFull, DiskFailed, ReadOnly."""
        bucket = self._open(number, fresh=False)
        bucket.writer.append(Kind.CHANGE, 0, bucket.end.last_ns, removal_body(time.time_ns()))
        bucket.commit.sync_now()  # on this thread: the copy gets the record and the removal in one frame

    def _finish_removal(self, number: int, then: Committed | None = None) -> None:
        """Remove the folder of a group whose log records the removal: when the copy has it too, or at once without a
        copy."""
        bucket = self._removing[number] = self._buckets.pop(number)
        bucket.upkeep.retire()
        if self.replication is not None:
            self.replication.note_event(Removed(number))

        def on_copied(error: OSError | None) -> None:
            if error is None:
                self._move_away(number, on_moved)
            if then is not None:
                then(error)

        def on_moved(error: OSError | None) -> None:
            try:
                self._moved(number, error)
            except errors.MqfsError as failed:
                log.warning("group %d: its folder stays until the next start: %s", number, failed)

        bucket.commit.replicate(on_copied)

    def _move_away(self, number: int, then: Committed) -> None:
        """Move the folder away, durably, on the committer's thread; syncs of this log pause meanwhile."""
        if (bucket := self._buckets.get(number) or self._removing.get(number)) is not None:
            bucket.commit.pause()
        folder = folder_of(self.path, number)
        move = partial(self._move, folder, self._gone(number), os.path.dirname(folder))
        self.committer.request(move, move, then, 0.0)

    def _gone(self, number: int) -> str:
        return f"{self.staging}/{number}.gone"

    def _moved(self, number: int, error: OSError | None, then: Committed | None = None) -> None:
        """Remove the contents of a folder that was moved away; `error`: why it was not moved. Raises DiskFull,
        DiskFailed."""
        if error is not None:
            if (bucket := self._buckets.get(number)) is not None:
                bucket.commit.resume()
            with refusing(f"group {number}"):
                raise error
        bucket = self._buckets.pop(number, None) or self._removing.pop(number, None)
        if bucket is not None:
            bucket.upkeep.abandon()
        self.full.pop(number, None)
        self._empty(self._gone(number))
        if then is not None:
            then(None)

    def _empty(self, gone: str) -> None:
        """Remove a folder of files, in portions, so that commits run between them."""
        emptied = False

        def remove_some() -> None:
            nonlocal emptied
            until = time.monotonic() + PORTION_S
            for name in self.disk.listdir(gone):
                self.disk.unlink(f"{gone}/{name}")
                if time.monotonic() > until:
                    return
            self.disk.rmdir(gone)
            emptied = True

        def removed(error: OSError | None) -> None:
            if error is not None:
                log.warning("%s stays until the next start: %s", gone, error)
            elif not (emptied or self._closed):
                self._empty(gone)

        self.committer.request(gone, remove_some, removed, 0.0)

    def tick(self) -> None:
        self.descriptors.rest()
        until = time.monotonic() + PORTION_S
        if not self._turn:
            self._turn = list(self._buckets.values())
        while self._turn and time.monotonic() < until:
            self._turn.pop().upkeep.tick(until)
        for removing in self._removing.values():
            removing.commit.ask_again()
        until = time.monotonic() + PORTION_S
        for number in list(self.full):
            if time.monotonic() > until:
                break
            bucket, need = self._buckets.get(number), self.full.pop(number)
            if bucket is not None:
                self.full[number] = need  # last, so that other groups are tried first next time
                bucket.writer.ask_for_room()

    def close_later(self, fd: int) -> None:
        """Close an unused descriptor on the committer's thread: that may be slow."""
        self._closing.add(fd)
        self.committer.request(("close", fd), lambda: self._close(fd), lambda error: None, 0.0)

    def _close(self, fd: int) -> None:
        self._closing.discard(fd)
        self.disk.close(fd)

    def leave_to_parent(self) -> None:
        """Close the lock in a forked child, which would hold it after the parent has ended."""
        if not self._closed:
            self.disk.close(self._lock)

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
        for bucket in list(self._removing.values()):
            bucket.upkeep.abandon()
        if self._reserved != self._next_number:
            with contextlib.suppress(OSError):
                write_label(self.disk, self.path, self.uuid, self._next_number)
        if self.replication is not None:
            self.replication.on_closed()  # before the lock is released: no other server has started
        self.disk.close(self._lock)


@contextlib.contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn OSError into DiskFull or DiskFailed."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise errors.DiskFull(f"{what}: no room on the disk") from error
        raise errors.DiskFailed(f"{what}: {error}") from error


# ------------------------------------------------------------ bucket


class DiskBucket:
    """See `Bucket` in mqfs/store/api.py. `fresh`: its segment was just made and synced, with a block of sequences."""

    __slots__ = ("chain", "commit", "end", "id", "metrics", "ranges", "reader", "upkeep", "writer")

    def __init__(self, context: DiskStore, number: int, folder: str, *, fresh: bool = False) -> None:
        self.id = number
        self.chain = chain = Chain(context, number, folder)
        self.commit = commit = GroupCommit(chain)
        self.end = chain.end
        self.end.next = recover(chain, commit)
        sequences = SequenceBlocks(self.end.next)
        if fresh:
            self.end.next, sequences.refill = 1, 1 + limits.SEQUENCE_BLOCK // 2
            commit.start_synced()
        self.reader = self.metrics = DiskLogReader(chain)
        self.writer = Appender(chain, commit, sequences)
        self.ranges = DiskRangeWriter(chain, commit, sequences, self.writer)
        self.upkeep = DiskUpkeep(chain, commit, self.writer)
        if context.replication is not None:
            context.replication.attach(chain, commit)


# ------------------------------------------------------------ quarantine


class Quarantine:
    """The folder quarantine/: data that failed a check, for a person to examine. Nothing in it is used or removed by
    the store. All calls raise OSError where the disk fails."""

    __slots__ = ("_disk", "_path")

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk, self._path = disk, path

    def copy(self, group: int, first: int, position: int, data: bytes, why: str) -> None:
        """Copy bytes of a segment, durably; the same bytes of one position only once."""
        log.warning("group %d: %s of %d bytes at %d of segment %d", group, why, len(data), position, first)
        self._keep(f"{group}-{first:020d}-{position}", data)

    def move(self, group: int, first: int, path: str, why: str) -> None:
        """Move a whole segment to quarantine/; one of zeros only is removed."""
        data = read_file(self._disk, path)
        if data.strip(b"\0"):
            log.warning("group %d: %s: %s", group, why, path)
            # A copy, then the removal: a rename from one directory to another is not one step on every disk.
            self._keep(f"{group}-{first:020d}-0", data)
        self._disk.unlink(path)

    def _keep(self, name: str, data: bytes) -> None:
        path = self._free_path(name, data)
        if path is not None:
            write_file(self._disk, path, data)
            self._disk.sync_folder(self._path)

    def _free_path(self, name: str, data: bytes) -> str | None:
        """Return a path that is not taken; None if a file there already has those bytes."""
        for number in range(1_000):
            path = f"{self._path}/{name}" + (f".{number}" if number else "")
            if not self._disk.exists(path):
                return path
            if self._disk.size_of(path) == len(data) and read_file(self._disk, path) == data:
                return None
        raise OSError(errno.EEXIST, "quarantine is full of copies of one place", name)


# ------------------------------------------------------------ directory: label, lock and folders

VERSION = 1
FOLDERS = ("staging", "buckets", "quarantine")
_STAGED_INDEX = re.compile(r"([0-9]+)-([0-9]{20})\.compact\.idx")


def prepare(disk: Disk, path: str) -> None:
    """Make the directory if it does not exist. Raises BadStore if it holds something else or is open to other users."""
    try:
        if not disk.exists(path):
            disk.mkdir(path)
            disk.sync_folder(os.path.dirname(path))
        names = set(disk.listdir(path))
        if disk.is_open_to_others(path):
            raise errors.BadStore(f"{path}: open to other users (expected the server's user, mode 700)")
    except FileNotFoundError as error:
        raise errors.BadStore(f"{path}: {os.path.dirname(path)} does not exist (expected a folder)") from error
    except NotADirectoryError as error:
        raise errors.BadStore(f"{path}: not a directory") from error
    except OSError as error:
        raise errors.BadStore(f"{path}: {error.strerror}") from error
    if "mqfs" not in names and names - {"lock", "promote", *FOLDERS, "lost+found"}:
        raise errors.BadStore(f"{path}: not empty and not a store (expected an empty or new directory)")
    if "mqfs" in names:
        read_label(disk, path)


def begin(disk: Disk, path: str, copy_of: str = "") -> tuple[str, int]:
    """Make missing folders and the label, and empty staging/. Returns the label, as `read_label`. `copy_of`: the uuid
    for a store that is new."""
    is_new = not disk.exists(f"{path}/mqfs")
    uuid_, number = (copy_of or str(uuid.uuid4()), 1) if is_new else read_label(disk, path)
    for name in FOLDERS:
        if not disk.exists(f"{path}/{name}"):
            disk.mkdir(f"{path}/{name}")
        elif not disk.is_folder(f"{path}/{name}"):
            raise errors.BadStore(f"{path}/{name}: not a folder")
    for name in disk.listdir(f"{path}/staging"):
        staged, index = f"{path}/staging/{name}", _STAGED_INDEX.fullmatch(name)
        if not index or put_index_in_place(disk, staged, f"{folder_of(path, int(index[1]))}/{index[2]}.log"):
            remove_tree(disk, staged)
    if is_new:
        disk.sync_folder(path)
        write_label(disk, path, uuid_, number)
    return uuid_, number


def group_folders(disk: Disk, path: str) -> Iterable[tuple[int, str]]:
    """Yield the number and the folder of each bucket."""
    for spread in disk.listdir(f"{path}/buckets"):
        for name in disk.listdir(f"{path}/buckets/{spread}"):
            if name.isdecimal():
                yield int(name), f"{path}/buckets/{spread}/{name}"


def write_label(disk: Disk, path: str, uuid_: str, number: int) -> None:
    """Replace the label, durably."""
    replace_file(disk, f"{path}/mqfs", f"{path}/staging/mqfs", label(uuid_, number))
    disk.sync_folder(path)


def label(uuid_: str, number: int) -> bytes:
    return f"mqfs {VERSION}\nuuid {uuid_}\ngroups {number}\n".encode()


def read_label(disk: Disk, path: str) -> tuple[str, int]:
    """Return the uuid and the first group number that is not reserved. Raises BadStore."""
    if not disk.exists(f"{path}/mqfs"):
        raise errors.BadStore(f"{path}: {'not a store' if disk.exists(path) else 'does not exist'}")
    try:
        lines = read_file(disk, f"{path}/mqfs").decode().splitlines()
        words = dict(line.split(" ", 1) for line in lines)
        version = int(words["mqfs"])
    except (OSError, ValueError, KeyError) as error:
        raise errors.BadStore(f"{path}/mqfs: no label (expected 'mqfs {VERSION}')") from error
    if version != VERSION:
        raise errors.BadStore(f"{path}: store version {version} (expected {VERSION})")
    try:
        return words["uuid"], int(words["groups"])
    except (ValueError, KeyError) as error:
        raise errors.BadStore(f"{path}/mqfs: no uuid or groups line") from error


def check_alone(path: str) -> None:
    """Raise BadStore for the store of a replicated log. A server without the replica would not record for the copies
    which messages were dropped, and where they are in the log."""
    if os.path.exists(f"{path}/replica"):
        expected = "expected mqfs serve --replica URL, or its file 'replica' moved away for good"
        raise errors.BadStore(f"{path}: has a replicated log ({expected})")


def _holder(disk: Disk, lock: str) -> str:
    """Return the number of the process that holds the lock. The kernel is asked first: the file may have the number of
    an earlier server, which another process may have now. A check does not write it, and locks the folder if there is
    no file."""
    with contextlib.suppress(OSError):
        status = os.stat(lock)
        where = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        with open("/proc/locks", encoding="ascii") as file:
            for words in map(str.split, file):
                if words[1] == "FLOCK" and words[5] == where:
                    return words[4]
    with contextlib.suppress(OSError):
        return read_file(disk, lock).decode(errors="replace").strip() or "unknown"
    return "unknown"


def take_lock(disk: Disk, path: str, *, write: bool = True) -> int:
    """Lock the store, write our process number into the lock file, and return its descriptor. `write` off: the file is
    left as it is."""
    lock = f"{path}/lock"
    if not (write or disk.exists(lock)):
        lock = path
    try:
        fd = disk.lock(lock, os.O_RDWR | os.O_CREAT if write else os.O_RDONLY)
    except BlockingIOError:
        raise errors.BadStore(f"{path}: in use by process {_holder(disk, lock)}") from None
    except OSError as error:
        raise errors.BadStore(f"{path}/lock: {error.strerror}") from error
    try:
        if write:
            disk.truncate(fd, 0)
            write_all(disk, fd, b"%d\n" % os.getpid(), 0)
    except BaseException:
        disk.close(fd)
        raise
    return fd
