"""A disk that keeps unsynced writes in memory only, and loses them, stops or fails on demand.

It replaces mqfs.store.disk.Disk. The durable part of a file is its bytes when its last fdatasync began; that of a
folder is its entries when its last sync_folder began. A sync takes time: `meanwhile` runs during it, and writes of
`meanwhile` are not synced. `after_power_loss` returns the disk as the next start finds it.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mqfs.store.disk import Disk


class Stopped(BaseException):
    """The stop of the machine: no code of the program may catch this."""


class File:
    def __init__(self) -> None:
        self.data = bytearray()
        self.durable = b""
        self.pending: list[tuple[int, bytes]] = []  # unsynced writes; a position below 0: a new length of -1 - position

    def write(self, position: int, data: bytes) -> None:
        self.data.extend(bytes(max(0, position - len(self.data))))
        self.data[position : position + len(data)] = data
        self.pending.append((position, bytes(data)))

    def resize(self, size: int) -> None:
        del self.data[size:]
        self.data.extend(bytes(size - len(self.data)))
        self.pending.append((-1 - size, b""))

    def sync(self, count: int | None = None) -> None:
        """Make the first `count` pending writes durable; None: all."""
        disk = bytearray(self.durable)
        for position, data in self.pending[:count]:
            size = max(len(disk), position + len(data)) if position >= 0 else -1 - position
            del disk[size:]
            disk.extend(bytes(size - len(disk)))
            if data:
                disk[position : position + len(data)] = data
        self.durable = bytes(disk)
        del self.pending[:count]

    def fail(self) -> None:
        """Drop the pending writes, as Linux does: after a failed sync pages count as clean, and no later sync writes
        them."""
        self.pending.clear()

    def survivor(self, luck: random.Random | None) -> File:
        """Return the file after a power cut: without the pending writes if `luck` is None, else with random sectors of
        them."""
        file = File()
        file.write(0, self.durable)
        for position, data in self.pending if luck is not None else ():
            assert luck is not None
            if position < 0:
                if luck.random() < 0.5:
                    file.resize(-1 - position)
                continue
            for at in range(0, len(data), 64):
                if luck.random() < 0.7:
                    file.write(position + at, data[at : at + 64])
        file.sync()
        return file


class Folder:
    def __init__(self) -> None:
        self.entries: dict[str, Any] = {}
        self.durable: dict[str, Any] = {}
        self.pending: list[tuple[str, Any]] = []  # name, and its new node; None: removed

    def set(self, name: str, node: File | Folder | None) -> None:
        if node is None:
            del self.entries[name]
        else:
            self.entries[name] = node
        self.pending.append((name, node))

    def sync(self, count: int | None = None) -> None:
        """Make the first `count` pending changes durable; None: all."""
        durable = dict(self.durable)
        for name, node in self.pending[:count]:
            if node is None:
                durable.pop(name, None)
            else:
                durable[name] = node
        self.durable = durable
        del self.pending[:count]

    def survivor(self, luck: random.Random | None) -> Folder:
        """Return the folder after a power cut: without the pending changes if `luck` is None, else with some first
        ones, or with random ones."""
        entries = dict(self.durable)
        count = luck.randint(0, len(self.pending)) if luck is not None else 0
        some = self.pending[:count]
        if luck is not None and luck.random() < 0.5:
            some = [change for change in self.pending if luck.random() < 0.5]
        for name, node in some:
            if node is None:
                entries.pop(name, None)
            else:
                entries[name] = node
        folder = Folder()
        for name, node in entries.items():
            folder.set(name, node.survivor(luck))
        folder.sync()
        return folder


class LyingDisk(Disk):
    """Files in memory. `calls` counts the calls that change the disk, from 1; `looks` those that only read. `stop_at`:
    the call in which the machine stops. `fail_at`: the call that fails, with the errno `fail_with`; with `fail_on` all
    later calls fail, too. `fail_look_at`: the look that fails."""

    def __init__(self, root: Folder | None = None) -> None:
        self.root = root if root is not None else Folder()
        self.calls = 0
        self.stop_at = 0
        self.fail_at = 0
        self.looks = 0
        self.fail_look_at = 0
        self.fail_with = 0
        self.fail_on = False
        self.failed: list[str] = []
        self.luck = random.Random(0)
        self.meanwhile: Callable[[], None] = lambda: None  # run during each sync
        self._files: dict[int, File] = {}
        self._next = 3
        if root is None:
            self.root.set("s", Folder())
            self.root.sync()

    def after_power_loss(self, luck: random.Random | None) -> LyingDisk:
        return LyingDisk(self.root.survivor(luck))

    def save(self, to: Path) -> None:
        """Write the files as they are now to a folder of the real file system."""
        _save(self.root, to)

    def after_kill(self) -> LyingDisk:
        """Return the disk after a kill of the program: the page cache is still there."""
        return LyingDisk(self.root)

    def copy(self) -> LyingDisk:
        """Return another disk with the same bytes, all durable."""
        return LyingDisk(_copy(self.root))

    # ------------------------------------------------------------ lies

    def _count(self, what: str, *, reads: bool = False) -> None:
        if self.stop_at and self.calls >= self.stop_at:
            raise Stopped
        if reads:
            self.looks += 1
            if self.looks == self.fail_look_at:
                self._fail(what)
            return
        self.calls += 1
        if self.stop_at and self.calls >= self.stop_at:
            raise Stopped
        if self.fail_at and (self.calls == self.fail_at or (self.fail_on and self.calls > self.fail_at)):
            self._fail(what)

    def _fail(self, what: str) -> None:
        self.failed.append(what)
        raise OSError(self.fail_with, os.strerror(self.fail_with))

    def _find(self, path: str) -> Any:
        node: Any = self.root
        for name in path.strip("/").split("/"):
            if not isinstance(node, Folder) or name not in node.entries:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            node = node.entries[name]
        return node

    def _above(self, path: str) -> tuple[Folder, str]:
        above, name = path.rstrip("/").rsplit("/", 1)
        node = self._find(above) if above else self.root
        assert isinstance(node, Folder)
        return node, name

    # ------------------------------------------------------------ the calls

    def pwrite(self, fd: int, data: bytes, position: int) -> int:  # type: ignore[override]
        file = self._files[fd]
        try:
            self._count("pwrite")
        except Stopped:
            if self.calls == self.stop_at and self.luck.random() < 0.5:
                file.write(position, data[: self.luck.randint(0, len(data))])
            raise
        except OSError:
            part = self.luck.choice([0, 0, len(data) // 2])
            if part:
                file.write(position, data[:part])
            raise
        if len(data) > 8 and self.luck.random() < 0.05:
            data = data[: len(data) // 2]  # a short write, as the system may do
        file.write(position, data)
        return len(data)

    def pread(self, fd: int, count: int, position: int) -> bytes:
        self._count("pread", reads=True)
        return bytes(self._files[fd].data[position : position + count])

    def fdatasync(self, fd: int) -> None:  # type: ignore[override]
        try:
            self._count("fdatasync")
        except OSError:
            self._files[fd].fail()
            raise
        self._sync(self._files[fd])

    def _sync(self, node: File | Folder) -> None:
        begun = len(node.pending)
        self.meanwhile()
        node.sync(begun)

    def truncate(self, fd: int, size: int) -> None:
        self._count("truncate")
        self._files[fd].resize(size)

    def close(self, fd: int) -> None:
        del self._files[fd]  # not counted: it changes nothing on the disk, also after a stop

    def allocate(self, fd: int, position: int, length: int) -> None:
        self._count("allocate")
        file = self._files[fd]
        if position + length > len(file.data):
            file.resize(position + length)

    def size(self, fd: int) -> int:
        self._count("size", reads=True)
        return len(self._files[fd].data)

    def size_of(self, path: str) -> int:  # type: ignore[override]
        self._count("size_of", reads=True)
        return len(self._find(path).data)

    def open(self, path: str, flags: int) -> int:
        try:
            self._count("open", reads=True)
            file = self._find(path)
            if flags & os.O_TRUNC:
                self._count("truncate")
                file.resize(0)
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
            self._count("create")
            file = File()
            folder, name = self._above(path)
            folder.set(name, file)
        self._next += 1
        self._files[self._next] = file
        return self._next

    def rename(self, old: str, new: str) -> None:  # type: ignore[override]
        self._count("rename")
        source, name = self._above(old)
        target, to = self._above(new)
        node = source.entries[name]
        target.set(to, node)
        source.set(name, None)

    def unlink(self, path: str) -> None:  # type: ignore[override]
        self._count("unlink")
        folder, name = self._above(path)
        if name not in folder.entries:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        folder.set(name, None)

    def rmdir(self, path: str) -> None:  # type: ignore[override]
        self._count("rmdir")
        folder, name = self._above(path)
        assert not folder.entries[name].entries
        folder.set(name, None)

    def mkdir(self, path: str) -> None:
        self._count("mkdir")
        folder, name = self._above(path)
        if name in folder.entries:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        folder.set(name, Folder())

    def listdir(self, path: str) -> list[str]:  # type: ignore[override]
        self._count("listdir", reads=True)
        return list(self._find(path).entries)

    def exists(self, path: str) -> bool:
        self._count("exists", reads=True)
        try:
            self._find(path)
        except FileNotFoundError:
            return False
        return True

    def is_folder(self, path: str) -> bool:
        return self.exists(path) and isinstance(self._find(path), Folder)

    def sync_folder(self, path: str) -> None:
        self._count("sync_folder")
        self._sync(self._find(path))

    def view(self, path: str) -> bytes:
        self._count("view", reads=True)
        return bytes(self._find(path).data)

    def is_open_to_others(self, path: str) -> bool:
        return False

    def lock(self, path: str, flags: int = os.O_RDWR | os.O_CREAT) -> int:
        return self.open(path, flags)


class RecordingDisk(LyingDisk):
    """A disk that records, at each change, the disks that a kill and a power cut would leave."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[LyingDisk] = []

    def _count(self, what: str, *, reads: bool = False) -> None:
        super()._count(what, reads=reads)
        if not reads:
            self.left += [self.copy(), self.after_power_loss(None)]


def _save(folder: Folder, to: Path) -> None:
    to.mkdir()
    for name, node in folder.entries.items():
        if isinstance(node, Folder):
            _save(node, to / name)
        else:
            (to / name).write_bytes(node.data)


def _copy(folder: Folder) -> Folder:
    made = Folder()
    for name, node in folder.entries.items():
        if isinstance(node, Folder):
            made.set(name, _copy(node))
        else:
            file = File()
            file.write(0, bytes(node.data))
            file.sync()
            made.set(name, file)
    made.sync()
    return made
