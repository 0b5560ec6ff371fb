"""Staged bytes: those of a staged batch until it is committed.

A file in `staging/` is opened for each use, for there may be many; small ones stay in memory. A start of the server
removes them all, so nothing of them is ever synced.
"""

from __future__ import annotations

import os

from mqfs import limits
from mqfs.store.disk import Disk, read_all, write_all


class MemoryStaged:
    """See `SpoolFile` in mqfs/store/api.py."""

    def __init__(self) -> None:
        self._data = bytearray()

    @property
    def size(self) -> int:
        return len(self._data)

    def append(self, data: bytes) -> None:
        self._data += data

    def read(self, at: int, count: int) -> bytes:
        return bytes(self._data[at : at + count])

    def close(self) -> None:
        self._data.clear()


class DiskStaged:
    """See `SpoolFile` in mqfs/store/api.py."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk, self._path = disk, path
        self._written = 0  # bytes in the file
        self._buffer = bytearray()  # behind them
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
        fd = self._disk.open(self._path, os.O_RDWR | os.O_CREAT)
        self._made = True
        try:
            write_all(self._disk, fd, data, self._written)
        finally:
            self._disk.close(fd)
        self._written += len(data)

    def read(self, at: int, count: int) -> bytes:
        if at >= self._written:
            at -= self._written
            return bytes(self._buffer[at : at + count])
        fd = self._disk.open(self._path, os.O_RDONLY)
        try:
            data = read_all(self._disk, fd, min(count, self._written - at), at)
        finally:
            self._disk.close(fd)
        return data + bytes(self._buffer[: count - len(data)])

    def close(self) -> None:
        self._buffer.clear()
        self._written = 0
        if self._made:
            self._made = False
            self._disk.unlink(self._path)
