"""A copy of a store, written from the bytes that the store's own server appended: the files, without an engine.

    run         group 7, segment 40, at 4096: bytes     written there; the first of a segment makes its file
    trimmed     group 7, [40, 72)                       the segments that hold no other sequence are removed
    removed     group 7                                 its folder is moved away, then removed

An entry may be repeated after a crash: bytes that are there already stay. If this disk is further than the entry, a
segment that was sealed, compacted or removed here is not written to: it was on disk. A segment is sealed when the next
one begins, so that a server that starts on the copy need not read it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from itertools import pairwise

from mqfs import errors, limits
from mqfs.records.record import padded
from mqfs.store.disk import Disk, opened, read_all, remove_tree, write_all
from mqfs.store.replication import Entry, LogBytes, Removed, Trimmed
from mqfs.store.segment.file import Descriptors, Segment
from mqfs.store.store import Quarantine, begin, folder_of, group_folders, prepare, refusing, take_lock, write_label

_OPEN_FILES = 64  # descriptors of segments kept open between two calls of `sync`


class StandbyStore:
    """The folder of a store without a server. All calls raise DiskFull and DiskFailed. After such an error nothing
    applied since the last `sync` is known to be on disk, and all of it must be applied again."""

    def __init__(self, path: str, uuid: str, disk: Disk | None = None) -> None:
        """Open or make the store, and hold its lock. Raises BadStore if it is in use, or another store's copy."""
        self.path, self.uuid = os.path.realpath(path), uuid
        self._disk = disk if disk is not None else Disk()
        self._files: dict[str, int] = {}  # descriptors of files that were written, by path
        self._folders: set[str] = set()  # in which a name was made since the last sync
        self._sealed: set[str] = set()  # paths of segments that are not written to
        self._done: list[tuple[int, int]] = []  # complete segments to be sealed: group, first
        with refusing(self.path):
            prepare(self._disk, self.path)
            self._lock = take_lock(self._disk, self.path)
        try:
            with refusing(self.path):
                self._begin(uuid)
        except BaseException:
            self._disk.close(self._lock)
            raise

    def _begin(self, uuid: str) -> None:
        found, self._numbers = begin(self._disk, self.path, uuid)
        if found != uuid:
            raise errors.BadStore(f"{self.path}: store {found} (expected a copy of {uuid})")
        self._quarantine = Quarantine(self._disk, f"{self.path}/quarantine")

    def positions(self) -> dict[int, tuple[int, int]]:
        """Return, of each group, the name of the newest segment and the bytes written of it."""
        found: dict[int, tuple[int, int]] = {}
        with refusing(self.path):
            for number, folder in group_folders(self._disk, self.path):
                if firsts := self._firsts(folder):
                    found[number] = firsts[-1], self._written(f"{folder}/{firsts[-1]:020d}.log")
        return found

    def _written(self, path: str) -> int:
        """Return the size of the file without the zeros at its end."""
        with opened(self._disk, path) as fd:
            end = self._disk.size(fd)
            while end:
                begin = max(0, end - limits.UNIT_PIECE_BYTES)
                if rest := read_all(self._disk, fd, end - begin, begin).rstrip(b"\0"):
                    return padded(begin + len(rest))
                end = begin
            return 0

    def _firsts(self, folder: str) -> list[int]:
        """Return the names of its segments, ascending; none if the folder does not exist."""
        if not self._disk.is_folder(folder):
            return []
        return sorted(int(name[:-4]) for name in self._disk.listdir(folder) if name.endswith(".log"))

    # ------------------------------------------------------------ applying

    def apply(self, entries: Iterable[Entry]) -> None:
        """Write entries in order; they are on disk after `sync`."""
        with refusing(self.path):
            for entry in entries:
                if isinstance(entry, LogBytes):
                    self._write(entry)
                elif isinstance(entry, Trimmed):
                    self._trim(entry)
                else:
                    self._remove(entry)

    def _write(self, run: LogBytes) -> None:
        folder = folder_of(self.path, run.group)
        path = f"{folder}/{run.first:020d}.log"
        fd = self._files.get(path, -1)
        if fd < 0:
            if path in self._sealed or self._is_past(run, folder, path):
                return
            fd = self._open(run, folder, path)
        size = self._disk.size(fd)
        if run.position > size:
            raise errors.BadStore(f"{path}: bytes missing from {size} to {run.position} (make a new copy)")
        if read_all(self._disk, fd, len(run.data), run.position) != run.data:
            write_all(self._disk, fd, run.data, run.position)

    def _is_past(self, run: LogBytes, folder: str, path: str) -> bool:
        """Whether this disk is further than the entry: the segment is sealed or was removed, or its group was
        removed."""
        if not self._disk.exists(path):
            firsts = self._firsts(folder)
            if not firsts or run.first > firsts[-1]:
                return run.position > 0 and not firsts
            return run.position > 0 or self._is_removed(run, firsts)
        segment = self._segment(run.group, run.first)
        is_sealed = segment.looks_sealed()
        segment.close_idle()
        if is_sealed:
            self._sealed.add(path)
        return is_sealed

    def _is_removed(self, run: LogBytes, firsts: Sequence[int]) -> bool:
        """Whether a segment below the newest was trimmed, or merged into the one before it. Otherwise a power cut took
        its file but not the later ones."""
        before = [first for first in firsts if first < run.first]
        if not before:
            return True
        segment = self._segment(run.group, before[-1])
        sequences = segment.load().sequences
        segment.close_idle()
        return len(sequences) > 0 and sequences[-1] >= run.first

    def _segment(self, group: int, first: int) -> Segment:
        def aside(segment: Segment, position: int, data: bytes, why: str) -> None:
            self._quarantine.copy(group, segment.first, position, data, why)

        folder = folder_of(self.path, group)
        return Segment(self._disk, Descriptors(), folder, f"{self.path}/staging", group, first, aside)

    def _open(self, run: LogBytes, folder: str, path: str) -> int:
        """Return the descriptor of its file, which is made if it is missing."""
        if len(self._files) >= _OPEN_FILES:
            self.sync()  # before names are made: it clears `_folders`
        if not self._disk.is_folder(folder):
            self._make_folder(run.group, folder)
        if not self._disk.exists(path):
            before = self._firsts(folder)
            if before and before[-1] < run.first:
                self._done.append((run.group, before[-1]))
            self._folders.add(folder)
        fd = self._files[path] = self._disk.open(path, os.O_RDWR | os.O_CREAT)
        return fd

    def _make_folder(self, group: int, folder: str) -> None:
        above = os.path.dirname(folder)
        if not self._disk.exists(above):
            self._disk.mkdir(above)
            self._folders.add(os.path.dirname(above))
        self._disk.mkdir(folder)
        self._folders.add(above)
        if group >= self._numbers:
            self._numbers = group + limits.GROUP_NUMBER_BLOCK
            write_label(self._disk, self.path, self.uuid, self._numbers)

    def _trim(self, entry: Trimmed) -> None:
        folder = folder_of(self.path, entry.group)
        firsts = self._firsts(folder)
        for first, end in pairwise(firsts):  # never the newest
            if entry.first <= first and (end <= entry.end or (first == entry.first and self._ends_before(entry))):
                self.sync()  # the state that made the messages unwanted must be on disk first
                for name in (f"{first:020d}.idx", f"{first:020d}.log"):
                    with contextlib.suppress(FileNotFoundError):
                        self._disk.unlink(f"{folder}/{name}")
                self._sealed.discard(f"{folder}/{first:020d}.log")
                self._folders.add(folder)

    def _ends_before(self, entry: Trimmed) -> bool:
        """Whether the segment of that name has no message at or after the entry's end. Later segments may have been
        trimmed before they were copied, so that here the next one begins later."""
        segment = self._segment(entry.group, entry.first)
        sequences = segment.load().sequences
        segment.close_idle()
        return not sequences or sequences[-1] < entry.end

    def _remove(self, entry: Removed) -> None:
        folder, gone = folder_of(self.path, entry.group), f"{self.path}/staging/{entry.group}.gone"
        if not self._disk.is_folder(folder):
            return
        self.sync()
        self._disk.rename(folder, gone)
        self._disk.sync_folder(os.path.dirname(folder))
        remove_tree(self._disk, gone)

    # ------------------------------------------------------------ durable

    def sync(self) -> None:
        """Sync everything that was applied, and seal complete segments."""
        with refusing(self.path):
            for path in list(self._files):
                self._disk.fdatasync(self._files[path])
                self._disk.close(self._files.pop(path))
            for folder in sorted(self._folders, key=len, reverse=True):
                if self._disk.is_folder(folder):
                    self._disk.sync_folder(folder)
            self._folders.clear()
            while self._done:
                self._seal(*self._done.pop())

    def _seal(self, group: int, first: int) -> None:
        """Write the index of a segment that ends where the next begins."""
        segment = self._segment(group, first)
        if self._disk.exists(segment.path):
            segment.look()
            segment.close_idle()
            self._sealed.add(segment.path)

    def close(self) -> None:
        """Sync everything, and release the lock: a server may start on the copy."""
        try:
            self.sync()
        finally:
            for fd in self._files.values():
                self._disk.close(fd)
            self._files.clear()
            self._disk.close(self._lock)
