"""flock and POSIX locks, one table for all faces: what is held over one is seen over the others.

Owns who holds what of which file, and who waits for it, by the file's stable number. The two kinds never meet, as
everywhere on Linux (over 9P there is only the POSIX kind). Deadlocks are not looked for; a lock that waits can be
interrupted.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from mqfs import limits
from mqfs.errors import OverLimit
from mqfs.types import Step, Wait

END = 1 << 64


class Held(NamedTuple):
    """A lock on [start, end) of a file. `through`: the open file whose end is the lock's too, where a face needs it."""

    owner: Hashable
    exclusive: bool
    start: int
    end: int
    pid: int = 0
    through: Hashable = None


class Key(NamedTuple):
    """A file's locks of one kind."""

    ino: int
    flock: bool


class Locks:
    """All locks of a tree."""

    def __init__(self) -> None:
        self._held: dict[Key, list[Held]] = {}
        self._waiting: dict[Key, dict[Wait[None], Held]] = {}
        self._count = 0  # held and waited for

    def __len__(self) -> int:
        return self._count

    def conflict(self, key: Key, wanted: Held) -> Held | None:
        """Somebody else's lock that stands in the way."""
        for lock in self._held.get(key, ()):
            overlap = lock.start < wanted.end and wanted.start < lock.end
            if overlap and lock.owner != wanted.owner and (lock.exclusive or wanted.exclusive):
                return lock
        return None

    def take(self, key: Key, wanted: Held, *, wait: bool) -> Step[None] | bool:
        """Take a lock in place of what its owner held of that range: None when held, False when another is in the way,
        or a Wait. A flock that is to change its kind is given up first, as flock(2) says. Raises OverLimit."""
        if self._count >= limits.LOCKS:
            raise OverLimit(f"{limits.LOCKS} locks are held")
        if key.flock and wanted not in self._held.get(key, ()):
            self.release(key, wanted.owner)
        if self.conflict(key, wanted) is None:
            self._put(key, wanted)
            return None
        if not wait:
            return False
        promise: Wait[None] = Wait(lambda promise: self._give_up(key, promise))
        self._waiting.setdefault(key, {})[promise] = wanted
        self._count += 1
        return promise

    def _put(self, key: Key, wanted: Held) -> None:
        self._cut(key, wanted.owner, wanted.start, wanted.end)
        self._held.setdefault(key, []).append(wanted)
        self._count += 1

    def _give_up(self, key: Key, promise: Wait[None]) -> bool:
        waiting = self._waiting.get(key, {})
        if waiting.pop(promise, None) is None:
            return False
        self._count -= 1
        if not waiting:
            del self._waiting[key]
        return True

    def release(self, key: Key, owner: Hashable, start: int = 0, end: int = END) -> None:
        """Give up what an owner holds of a range; who waited for it gets it, in order."""
        if key in self._held:
            self._cut(key, owner, start, end)
            if key in self._waiting:
                self._serve(key)

    def release_through(self, key: Key, through: Hashable) -> None:
        """An open file is gone, and with it all locks taken through it."""
        for lock in self._held.get(key, [])[:]:
            if lock.through == through:
                self.release(key, lock.owner, lock.start, lock.end)

    def _cut(self, key: Key, owner: Hashable, start: int, end: int) -> None:
        before = self._held.get(key, [])
        left: list[Held] = []
        for lock in before:
            if lock.owner != owner or lock.end <= start or end <= lock.start:
                left.append(lock)
                continue
            if lock.start < start:
                left.append(lock._replace(end=start))
            if end < lock.end:
                left.append(lock._replace(start=end))
        self._count += len(left) - len(before)
        if left:
            self._held[key] = left
        else:
            self._held.pop(key, None)

    def _serve(self, key: Key) -> None:
        for promise, wanted in list(self._waiting[key].items()):
            if self.conflict(key, wanted) is None and self._give_up(key, promise):
                self._put(key, wanted)
                promise.settle(None)
