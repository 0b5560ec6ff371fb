"""Long work of a group that only looks: a portion at a time, so that others are served between.

Such work is a generator, which yields between two rows: what it has looked at may change before it continues. A short
one is done at once. The next portions of a long one come by an alarm, in turns where there are several; its caller gets
a Wait, which can be cancelled.

Work that does more than look has that in the log first: what follows is owed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from heapq import merge
from itertools import islice
from typing import Any, TypeAlias, TypeVar

from mqfs import limits
from mqfs.engine.log.faults import Group
from mqfs.engine.log.timers import LOOKING, Alarm, Timers
from mqfs.errors import NotFound
from mqfs.seams import Clock
from mqfs.wait import Step, Wait

T = TypeVar("T")

Work: TypeAlias = Generator[Any, None, T]  # True: it is not to be given up any more
_SORTED = 2_048  # at once: about a millisecond


class Portions:
    """The work in hand."""

    def __init__(self, timers: Timers, group: Group, clock: Clock) -> None:
        self._clock = clock
        self._alarm = Alarm(timers, group, LOOKING, "continuing long work", lambda _: self._resume())
        self._queue: deque[tuple[Work[Any], Wait[Any]]] = deque()
        self._owed: list[Work[None]] = []
        self._fixed: set[Wait[Any]] = set()  # of work that cannot be given up any more
        self.count = 0  # grows when others may have been served meanwhile

    def run(self, work: Work[Step[T]]) -> Step[T]:
        """What it returns. Raises what it raises."""
        wait: Wait[T] = Wait(self._cancel)
        self._perform(work, wait, self._until())
        return wait.result() if wait.settled else wait

    def owe(self, work: Work[None]) -> Work[None]:
        """Work that the log has already, for the caller to do: at once where the state is written meanwhile."""
        self._owed.append(work)
        return self._pay(work)

    def _pay(self, work: Work[None]) -> Work[None]:
        yield from work
        if work in self._owed:
            self._owed.remove(work)

    def finish(self) -> None:
        """Do what is owed."""
        while self._owed:
            exhaust(self._owed.pop())

    def _until(self) -> int:
        return self._clock.engine_ns() + int(limits.LOOKING_S * 1e9)

    def _resume(self) -> None:
        self.count += 1
        until = self._until()
        while self._queue and self._perform(*self._queue.popleft(), until):
            pass

    def _perform(self, work: Work[Any], wait: Wait[Any], until: int) -> bool:
        """A portion. Whether that was all."""
        try:
            while True:
                if next(work):
                    self._fixed.add(wait)
                if self._clock.engine_ns() >= until:
                    self._queue.append((work, wait))
                    self._alarm.at(self._clock.engine_ns() + 1)
                    return False
        except StopIteration as end:
            self._fixed.discard(wait)
            wait.follow(end.value)
        except Exception as error:
            self._fixed.discard(wait)
            wait.fail(error)
        return True

    def _cancel(self, wait: Wait[Any]) -> bool:
        """False: it waits for a sync by now, or is to be done in any case."""
        found = [row for row in self._queue if row[1] is wait]
        if not found or wait in self._fixed:
            return False
        self._queue.remove(found[0])
        return True

    def end(self) -> None:
        """The group is gone, or the server stops."""
        self.finish()
        while self._queue:
            self._queue.popleft()[1].fail(NotFound("the group was removed, or the server stops"))


def exhaust(work: Work[T]) -> T:
    """What it returns; all of it at once."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            found: T = end.value
            return found


def in_order(items: Iterable[T], key: Callable[[T], Any]) -> Work[list[T]]:
    """As `sorted`, in steps."""
    rest, runs = iter(items), list[list[T]]()
    while some := list(islice(rest, _SORTED)):
        runs.append(sorted(some, key=key))
        yield
    if len(runs) < 2:
        return runs[0] if runs else []
    found: list[T] = []
    merged = merge(*runs, key=key)
    while some := list(islice(merged, _SORTED)):
        found += some
        yield
    return found


__all__ = ["Portions", "Work", "exhaust", "in_order"]
