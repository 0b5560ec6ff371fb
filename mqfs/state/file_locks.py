"""flock and POSIX locks, one table for all front ends: a lock held through one is seen through the others.

Held and waiting locks are kept by the file's stable number. The two kinds are independent, as everywhere on Linux (over
9P there is only the POSIX kind). Deadlocks are not detected; a waiting lock can be interrupted.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import NamedTuple

from mqfs.model import Step, Wait
from mqfs.quotas import UserLimits

END = 1 << 64


class Held(NamedTuple):
    """A lock on [start, end) of a file. `through`: the open file whose close releases it, if any."""

    owner: Hashable
    exclusive: bool
    start: int
    end: int
    pid: int = 0
    through: Hashable = None
    user: Hashable = 0  # its share is charged


class Key(NamedTuple):
    """A file's locks of one kind."""

    ino: int
    flock: bool


class Ranges:
    """The locks of one file, ordered by their start, so that few are examined for a range."""

    def __init__(self, shares: UserLimits) -> None:
        self._shares = shares
        self._locks: list[Held] = []
        self._starts: list[int] = []
        self._longest = 0  # length of the longest lock so far
        self._owned: dict[Hashable, set[Held]] = {}
        self._exclusive = 0

    def __len__(self) -> int:
        return len(self._locks)

    def has(self, lock: Held) -> bool:
        return lock in self._owned.get(lock.owner, ())

    def through(self, through: Hashable) -> list[Held]:
        return [lock for lock in self._locks if lock.through == through]

    def _window(self, start: int, end: int) -> slice:
        """Return the part of the list that may overlap a range."""
        return slice(bisect_right(self._starts, start - self._longest), bisect_left(self._starts, end))

    def conflict(self, wanted: Held) -> Held | None:
        """Return a lock of another owner that conflicts; None: there is none."""
        if not wanted.exclusive and not self._exclusive:
            return None
        window = self._window(wanted.start, wanted.end)
        for at in range(window.start, window.stop):
            lock = self._locks[at]
            if lock.end > wanted.start and lock.owner != wanted.owner and (lock.exclusive or wanted.exclusive):
                return lock
        return None

    def add(self, lock: Held) -> None:
        """Add a lock on a range of which its owner holds nothing."""
        at = bisect_right(self._starts, lock.start)
        self._locks.insert(at, lock)
        self._starts.insert(at, lock.start)
        self._longest = max(self._longest, lock.end - lock.start)
        self._exclusive += lock.exclusive
        self._owned.setdefault(lock.owner, set()).add(lock)
        self._shares.release(lock.user, -1)

    def cut(self, owner: Hashable, start: int, end: int, *, checked: bool = False) -> bool:
        """Remove an owner's locks from a range; return whether there were any. Raises OverLimit, if `checked`, where a
        lock would become two and its user has no share left."""
        own = self._owned.get(owner)
        if own is None:
            return False
        window = self._window(start, end)
        near = own if len(own) < window.stop - window.start else self._locks[window]
        found = [lock for lock in near if lock.owner == owner and lock.start < end and start < lock.end]
        if checked and found and found[0].start < start and end < found[0].end:
            self._shares.check(found[0].user)
        for lock in found:
            self._remove(lock)
            if lock.start < start:
                self.add(lock._replace(end=start))
            if end < lock.end:
                self.add(lock._replace(start=end))
        return bool(found)

    def _remove(self, lock: Held) -> None:
        at = self._locks.index(lock, bisect_left(self._starts, lock.start))
        del self._locks[at], self._starts[at]
        self._exclusive -= lock.exclusive
        self._shares.release(lock.user)
        own = self._owned[lock.owner]
        own.discard(lock)
        if not own:
            del self._owned[lock.owner]


class Locks:
    """All locks of a tree."""

    def __init__(self) -> None:
        self._held: dict[Key, Ranges] = {}
        self._waiting: dict[Key, dict[Wait[None], Held]] = {}
        self._waiters: Counter[tuple[Key, Hashable]] = Counter()  # how many locks each owner waits for
        self._shares = UserLimits("locks", "LOCKS")  # for held and waiting locks

    def __len__(self) -> int:
        return self._shares.used

    def conflict(self, key: Key, wanted: Held) -> Held | None:
        """Return a lock of another owner that conflicts; None: there is none."""
        return self._held[key].conflict(wanted) if key in self._held else None

    def take(self, key: Key, wanted: Held, *, wait: bool) -> Step[None] | bool:
        """Take a lock in place of its owner's locks of that range. Return None if it is held, False if another
        conflicts and `wait` is false, else a Wait. A flock that changes its kind is released first, as flock(2) says.
        Raises OverLimit."""
        self._shares.check(wanted.user)
        if key.flock and key in self._held and not self._held[key].has(wanted):
            self.release(key, wanted.owner)
        if self.conflict(key, wanted) is None:
            self._put(key, wanted)
            if not wanted.exclusive:  # its owner may have had an exclusive one there
                self._serve(key, wanted.start, wanted.end)
            return None
        if not wait:
            return False
        promise: Wait[None] = Wait(lambda promise: self._give_up(key, promise))
        self._waiting.setdefault(key, {})[promise] = wanted
        self._waiters[key, wanted.owner] += 1
        self._shares.release(wanted.user, -1)
        return promise

    def _put(self, key: Key, wanted: Held) -> None:
        ranges = self._held.get(key)
        if ranges is None:
            ranges = self._held[key] = Ranges(self._shares)
        ranges.cut(wanted.owner, wanted.start, wanted.end)
        ranges.add(wanted)

    def _give_up(self, key: Key, promise: Wait[None]) -> bool:
        waiting = self._waiting.get(key, {})
        wanted = waiting.pop(promise, None)
        if wanted is None:
            return False
        self._shares.release(wanted.user)
        self._waiters[key, wanted.owner] -= 1
        if not self._waiters[key, wanted.owner]:
            del self._waiters[key, wanted.owner]
        if not waiting:
            del self._waiting[key]
        return True

    def release(self, key: Key, owner: Hashable, start: int = 0, end: int = END) -> None:
        """Release an owner's locks of a range and grant waiting ones, in order. Raises OverLimit where a lock would
        become two and its user has no share left."""
        if self._cut(key, owner, start, end, checked=True):
            self._serve(key, start, end)

    def release_through(self, key: Key, through: Hashable) -> None:
        """Release all locks taken through an open file, which is closed."""
        freed = self._held[key].through(through) if key in self._held else []
        for lock in freed:
            self._cut(key, lock.owner, lock.start, lock.end)
        if freed:
            self._serve(key, 0, END)

    def _cut(self, key: Key, owner: Hashable, start: int, end: int, *, checked: bool = False) -> bool:
        """Remove an owner's locks from a range; return whether there were any."""
        ranges = self._held.get(key)
        if ranges is None:
            return False
        held = ranges.cut(owner, start, end, checked=checked)
        if not ranges:
            del self._held[key]
        return held

    def _serve(self, key: Key, start: int, end: int) -> None:
        """Grant the waiting locks of a range. Once an exclusive one covers it, only its owner can get more."""
        alone: Hashable = None
        for promise, wanted in first_and_rest(self._waiting.get(key, {})):
            if alone is not None and wanted.owner != alone:
                continue
            if self.conflict(key, wanted) is None and self._give_up(key, promise):
                self._put(key, wanted)
                promise.resolve(None)
                if wanted.exclusive and wanted.start <= start and end <= wanted.end:
                    alone = wanted.owner
                    if (key, alone) not in self._waiters:
                        return


def first_and_rest(waiting: dict[Wait[None], Held]) -> Iterator[tuple[Wait[None], Held]]:
    """Yield all waiting locks, in order. The rest is copied only if more than the first is consumed."""
    first = next(iter(waiting.items()), None)
    if first is not None:
        yield first
        yield from [item for item in waiting.items() if item[0] is not first[0]]
