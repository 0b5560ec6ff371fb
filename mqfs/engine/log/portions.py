"""Long work of a group that only looks: a portion at a time, so that others are served between.

Such work is a generator, which yields between two rows: what it has looked at may change before it continues. A short
one is done at once. The next portions of a long one come by an alarm, in turns where there are several; its caller gets
a Wait, which can be cancelled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from heapq import merge
from itertools import islice
from typing import Any, TypeAlias, TypeVar

from mqfs.engine.log.faults import Group
from mqfs.engine.log.timers import LOOKING, Alarm, Timers
from mqfs.errors import MqfsError
from mqfs.seams import Clock
from mqfs.wait import Step, Wait

T = TypeVar("T")

Work: TypeAlias = Generator[None, None, T]
_SORTED = 2_048  # at once: about a millisecond


class Portions:
    """The work in hand."""

    def __init__(self, timers: Timers, group: Group, clock: Clock) -> None:
        self._clock, self._timers = clock, timers
        self._alarm = Alarm(timers, group, LOOKING, "continuing long work", lambda _: self._resume(True))
        self._queue: deque[tuple[Work[Any], Wait[Any]]] = deque()

    def run(self, work: Work[T]) -> Step[T]:
        """What it returns. Raises what it raises."""
        wait: Wait[T] = Wait(self._cancel)
        self._queue.append((work, wait))
        if len(self._queue) == 1:
            self._resume(False)
        return wait.result() if wait.settled else wait

    def _resume(self, continued: bool) -> None:
        until = self._clock.engine_ns() + int(self._timers.piece_s(continued) * 1e9)
        while self._queue:
            work, wait = self._queue.popleft()
            try:
                while True:
                    next(work)
                    if self._clock.engine_ns() >= until:
                        self._queue.append((work, wait))
                        self._alarm.at(self._clock.engine_ns() + 1)
                        return
            except StopIteration as end:
                wait.settle(end.value)
            except Exception as error:
                wait.fail(error)

    def _cancel(self, wait: Wait[Any]) -> bool:
        for row in list(self._queue):
            if row[1] is wait:
                self._queue.remove(row)
        return True

    def end(self, error: MqfsError) -> None:
        """The group was removed, or the server stops: what the callers get."""
        while self._queue:
            self._queue.popleft()[1].fail(error)


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


__all__ = ["Portions", "Work", "in_order"]
