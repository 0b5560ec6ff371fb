"""The folder quarantine/: what failed a check, for a person to look at.

Owns its names. Nothing in it is ever read or removed by the store.
"""

from __future__ import annotations

import errno
import logging

from mqfs.store.disk import Disk, read_file, write_file

log = logging.getLogger("mqfs.store")


class Quarantine:
    """All calls raise OSError where the disk fails."""

    __slots__ = ("_disk", "_path")

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk, self._path = disk, path

    def copy(self, group: int, first: int, position: int, data: bytes, why: str) -> None:
        """Copy bytes of a segment, durably; the same bytes of one place only once."""
        log.warning("group %d: %s of %d bytes at %d of segment %d", group, why, len(data), position, first)
        self._keep(f"{group}-{first:020d}-{position}", data)

    def move(self, group: int, first: int, path: str, why: str) -> None:
        """Move a whole segment; one of zeros, which holds nothing, is removed."""
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
        """A path that is not taken; None if those bytes are there already."""
        for number in range(1_000):
            path = f"{self._path}/{name}" + (f".{number}" if number else "")
            if not self._disk.exists(path):
                return path
            if self._disk.size_of(path) == len(data) and read_file(self._disk, path) == data:
                return None
        raise OSError(errno.EEXIST, "quarantine is full of copies of one place", name)


__all__ = ["Quarantine"]
