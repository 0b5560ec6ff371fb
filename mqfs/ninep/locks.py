"""POSIX locks taken over 9P2000.L, by stable file number, so that two connections see each other's.

Owns the table; one is shared by all connections of a server. It never makes anyone wait: a client that is told BLOCKED
asks again. An owner is a process of a client of a connection.
"""

from __future__ import annotations

from typing import NamedTuple

from mqfs import limits
from mqfs.errors import OverLimit

READ, WRITE, UNLOCK = 0, 1, 2  # types of Tlock
SUCCESS, BLOCKED = 0, 1  # states of Rlock
END = 1 << 64

Owner = tuple[int, str, int]  # connection, client_id, proc_id


class Lock(NamedTuple):
    """A range [start, end) of a file, held by one owner through one fid."""

    owner: Owner
    fid: int
    exclusive: bool
    start: int
    end: int


def range_of(start: int, length: int) -> tuple[int, int]:
    """[start, end) of a Tlock; a length of 0 is to the end of the file."""
    return start, min(start + length, END) if length else END


class Locks:
    """All locks, each file's list without overlaps between owners that may not share."""

    def __init__(self) -> None:
        self._files: dict[int, list[Lock]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def conflict(self, path: int, wanted: Lock) -> Lock | None:
        """A lock of another owner that stands in the way."""
        for lock in self._files.get(path, ()):
            overlap = lock.start < wanted.end and wanted.start < lock.end
            if overlap and lock.owner != wanted.owner and (lock.exclusive or wanted.exclusive):
                return lock
        return None

    def take(self, path: int, wanted: Lock) -> bool:
        """Take a lock, in place of what the owner held of that range; False if another's stands in the way."""
        if self.conflict(path, wanted) is not None:
            return False
        if self._count >= limits.LOCKS:
            raise OverLimit(f"{limits.LOCKS} locks are held")
        self.release(path, wanted.owner, wanted.start, wanted.end)
        self._files.setdefault(path, []).append(wanted)
        self._count += 1
        return True

    def release(self, path: int, owner: Owner, start: int, end: int) -> None:
        """Give up what the owner holds of a range; a lock that reaches over it is cut."""
        left = []
        for lock in self._files.get(path, ()):
            if lock.owner != owner or lock.end <= start or end <= lock.start:
                left.append(lock)
                continue
            if lock.start < start:
                left.append(lock._replace(end=start))
            if end < lock.end:
                left.append(lock._replace(start=end))
        self._put(path, left)

    def release_fid(self, path: int, connection: int, fid: int) -> None:
        """The fid of a connection is gone, and with it all locks taken through it."""
        held = self._files.get(path)
        if held:
            self._put(path, [lock for lock in held if (lock.owner[0], lock.fid) != (connection, fid)])

    def _put(self, path: int, left: list[Lock]) -> None:
        self._count += len(left) - len(self._files.get(path, ()))
        if left:
            self._files[path] = left
        else:
            self._files.pop(path, None)
