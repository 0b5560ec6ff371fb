"""All calls of the store to the operating system, in one place: a test replaces the disk by one that fails.

No call retries or hides an error. Staged bytes, the only files that are never synced, are here too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Iterator

from mqfs import limits

Buffer = bytes | mmap.mmap


class Disk:
    """The calls of the real operating system."""

    pwrite = staticmethod(os.pwrite)
    pread = staticmethod(os.pread)
    fdatasync = staticmethod(os.fdatasync)
    truncate = staticmethod(os.ftruncate)
    close = staticmethod(os.close)
    rename = staticmethod(os.rename)
    unlink = staticmethod(os.unlink)
    rmdir = staticmethod(os.rmdir)
    listdir = staticmethod(os.listdir)
    size_of = staticmethod(os.path.getsize)

    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def mkdir(self, path: str) -> None:
        os.mkdir(path, 0o700)

    def exists(self, path: str) -> bool:
        """Whether the path exists, a symbolic link too. Raises OSError where that cannot be determined."""
        return self._mode(path) != 0

    def is_folder(self, path: str) -> bool:
        return stat.S_ISDIR(self._mode(path))

    def _mode(self, path: str) -> int:
        try:
            return os.lstat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return 0

    def allocate(self, fd: int, position: int, length: int) -> None:
        os.posix_fallocate(fd, position, length)

    def allocate_whole(self, fd: int, position: int, length: int) -> None:
        """Allocate at the end of a file; where there is no room, give back the part that was allocated."""
        try:
            self.allocate(fd, position, length)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                with contextlib.suppress(OSError):
                    self.truncate(fd, position)
            raise

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def sync_folder(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def view(self, path: str) -> Buffer:
        """Map a file that is not written any more. If the disk cannot read a page of it later, or the file is cut off,
        an access to that page ends the process with SIGBUS."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            return mmap.mmap(fd, size, prot=mmap.PROT_READ) if size else b""
        finally:
            os.close(fd)

    def is_open_to_others(self, path: str) -> bool:
        """Whether another user may create files in the folder."""
        found = os.lstat(path)
        return found.st_uid not in (0, os.geteuid()) or bool(found.st_mode & stat.S_IWOTH)

    def lock(self, path: str, flags: int = os.O_RDWR | os.O_CREAT) -> int:
        """Open the file and lock it; return the descriptor. Raises BlockingIOError if another process holds the
        lock."""
        fd = self.open(path, flags)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(fd)
            raise
        return fd


def write_all(disk: Disk, fd: int, data: bytes | bytearray | memoryview, position: int) -> None:
    """Write all of `data` at `position`, or raise OSError."""
    done = disk.pwrite(fd, data, position)
    while done < len(data):
        done += disk.pwrite(fd, data[done:], position + done)


def read_all(disk: Disk, fd: int, count: int, position: int) -> bytes:
    """Read `count` bytes at `position`; fewer only at the end of the file."""
    data = disk.pread(fd, count, position)
    while len(data) < count:
        more = disk.pread(fd, count - len(data), position + len(data))
        if not more:
            break
        data += more
    return data


@contextlib.contextmanager
def opened(disk: Disk, path: str, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Open a file for the block, and close its descriptor at the end."""
    fd = disk.open(path, flags)
    try:
        yield fd
    finally:
        disk.close(fd)


def read_file(disk: Disk, path: str) -> bytes:
    with opened(disk, path) as fd:
        return read_all(disk, fd, disk.size(fd), 0)


def write_file(disk: Disk, path: str, data: bytes, *, sync: bool = True) -> None:
    """Write a new file; an error may leave a part of it."""
    with opened(disk, path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
        write_all(disk, fd, data, 0)
        if sync:
            disk.fdatasync(fd)


def replace_file(disk: Disk, path: str, staged: str, data: bytes, *, sync: bool = True) -> None:
    """Write `staged`, and rename it to `path`; the rename is not synced."""
    with removed_on_error(disk, staged):
        write_file(disk, staged, data, sync=sync)
        disk.rename(staged, path)


@contextlib.contextmanager
def removed_on_error(disk: Disk, *paths: str) -> Iterator[None]:
    """Remove the paths if the block fails, as far as the disk allows that: a full disk needs the room."""
    try:
        yield
    except Exception:  # not GeneratorExit: when garbage is collected, another store may have these names
        for path in paths:
            with contextlib.suppress(OSError):
                remove_tree(disk, path)
        raise


def remove_tree(disk: Disk, path: str) -> None:
    if not disk.is_folder(path):
        disk.unlink(path)
        return
    for name in disk.listdir(path):
        remove_tree(disk, f"{path}/{name}")
    disk.rmdir(path)


class DiskStaged:
    """See `SpoolFile` in mqfs/store/api.py. The file is opened for each use, as there may be many; small contents stay
    in memory. A start of the server removes all files."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk, self._path = disk, path
        self._written = 0  # bytes in the file
        self._buffer = bytearray()  # bytes after those in the file
        self._made = False

    @property
    def size(self) -> int:
        return self._written + len(self._buffer)

    def append(self, data: bytes) -> None:
        if len(self._buffer) + len(data) > limits.PART_BUFFER_BYTES:
            self._flush()
        if len(data) > limits.PART_BUFFER_BYTES:
            self._write(data)
        else:
            self._buffer += data

    def _flush(self) -> None:
        if self._buffer:
            self._write(bytes(self._buffer))
            self._buffer.clear()

    def _write(self, data: bytes) -> None:
        with opened(self._disk, self._path, os.O_RDWR | os.O_CREAT) as fd:
            self._made = True
            write_all(self._disk, fd, data, self._written)
        self._written += len(data)

    def read(self, at: int, count: int) -> bytes:
        if at >= self._written:
            at -= self._written
            return bytes(self._buffer[at : at + count])
        with opened(self._disk, self._path) as fd:
            data = read_all(self._disk, fd, min(count, self._written - at), at)
        return data + bytes(self._buffer[: count - len(data)])

    def close(self) -> None:
        self._buffer.clear()
        self._written = 0
        if self._made:
            self._made = False
            self._disk.unlink(self._path)
