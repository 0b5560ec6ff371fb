"""Long work of a group that only looks: a portion at a time, so that others are served between.

Such work is a generator, which yields between two rows: what it has looked at may change before it continues. A short
one is done at once. The next portions of a long one come by an alarm, in turns where there are several; its caller gets
a Wait, which can be cancelled.

Work that does more than look has that in the log first: what follows is owed.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from mqfs.clock import Clock
from mqfs.engine.core.timers import LOOKING, Alarm, Timers
from mqfs.errors import MqfsError
from mqfs.model import Step, Wait
from mqfs.quotas import UserLimits

if TYPE_CHECKING:
    from mqfs.engine.group import Group

T = TypeVar("T")

Work: TypeAlias = Generator[None, None, T]
_SORTED = 4_096  # at once: about a millisecond


class Portions:
    """The work in hand."""

    def __init__(self, timers: Timers, group: Group, clock: Clock) -> None:
        self._clock, self._timers = clock, timers
        self._alarm = Alarm(timers, group, LOOKING, "continuing long work", lambda _: self._resume())
        self._queue: OrderedDict[Wait[Any], Work[Any]] = OrderedDict()
        self._owed: list[Work[None]] = []
        self._over: MqfsError | None = None  # why no alarm rings any more
        self.count = 0  # grows when others may have been served meanwhile

    def run(self, work: Work[T], *, may_be_cancelled: bool = True) -> Step[T]:
        """What it returns. Raises what it raises."""
        wait: Wait[T] = Wait(self._cancel if may_be_cancelled else None)
        self._perform(wait, work, self._until(False))
        return wait.result() if wait.settled else wait

    def later(self, work: Work[T]) -> Wait[T]:
        """As `run`, but not before the caller has returned: it is in the middle of a delivery, say."""
        wait: Wait[T] = Wait(self._cancel)
        self._queue[wait] = work
        self._alarm.at(self._clock.engine_ns() + 1)
        return wait

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

    def _until(self, continued: bool) -> int:
        return self._clock.engine_ns() + int(self._timers.piece_s(continued) * 1e9)

    def _resume(self) -> None:
        self.count += 1
        until = self._until(True)
        while self._queue and self._perform(*self._queue.popitem(last=False), until):
            pass

    def _perform(self, wait: Wait[Any], work: Work[Any], until: int) -> bool:
        """A portion. Whether that was all."""
        try:
            while True:
                next(work)
                if self._clock.engine_ns() >= until:
                    if self._over is not None:
                        raise self._over
                    self._queue[wait] = work
                    self._alarm.at(self._clock.engine_ns() + 1)
                    return False
        except StopIteration as end:
            wait.resolve(end.value)
        except Exception as error:
            wait.fail(error)
        return True

    def _cancel(self, wait: Wait[Any]) -> bool:
        self._queue.pop(wait, None)
        return True

    def end(self, error: MqfsError) -> None:
        """The group was removed, or the server stops: what the callers get, and those of later long work."""
        self.finish()
        self._over = error
        while self._queue:
            self._queue.popitem(last=False)[0].fail(error)


def exhaust(work: Work[T]) -> T:
    """What it returns; all of it at once."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            found: T = end.value
            return found


def in_order(names: Iterable[str]) -> Work[list[str]]:
    """As `sorted`, in steps. `sorted` merges two runs, too: 100,000 names in 3 ms."""
    rest, runs = iter(names), list[list[str]]()
    while some := list(islice(rest, _SORTED)):
        if runs:
            yield
        runs.append(sorted(some))
    while len(runs) > 1:
        merged = []
        for at in range(0, len(runs), 2):
            merged.append(sorted(chain(*runs[at : at + 2])))
            yield
        runs = merged
    return runs[0] if runs else []


# ------------------------------------------------------------ command queue

# Writes to `ctl` of one group, one after the other: each finds the settings and names that those before it left.
#
# A short one is done at once. A long one, and what comes meanwhile, is done in portions. None can be cancelled: it is
# done to its end, and answered, whatever its client does meanwhile. O_NONBLOCK would make it fail each time.

Begin = Callable[[], Work[Step[Any]]]
_ROW_BYTES = 512  # of memory, about, for a write that waits, beside its text


class CommandQueue:
    """The long commands of one group, by turns. `memory`: what its users share."""

    def __init__(self, portions: Portions, memory: UserLimits) -> None:
        self._portions, self._memory = portions, memory
        self.count = 0  # of writes that are in force
        self._before = 0  # `count` when the first of `_asked` had not begun
        self._working = self._work()
        self._asked: deque[tuple[Begin, Wait[Any], int, int]] = deque()

    def admit(self, uid: int, size: int) -> None:
        """A write takes memory of its user until it is done. Raises OverLimit, if it has to wait."""
        self._memory.change(uid, 0, size + _ROW_BYTES, refuse=bool(self._asked))

    def run(self, begin: Callable[[], Work[Step[T]]], uid: int, size: int) -> Step[T]:
        """What the work of a write, which was admitted, returns. Raises what it raises."""
        wait: Wait[T] = Wait()
        self._asked.append((begin, wait, uid, size))
        if len(self._asked) == 1:
            self._working = self._work()
            try:
                working = self._portions.run(self._working)
            except MqfsError as error:
                self.finish()
                self._fail(error)
            else:
                if isinstance(working, Wait):
                    working.subscribe(self._ended)
        return wait.result() if wait.settled else wait

    def _work(self) -> Work[None]:
        while self._asked:
            try:
                step = yield from self._asked[0][0]()
            except Exception as error:
                self._next().fail(error)
            else:
                self._next().follow(step)
            if self._asked:
                yield

    def _next(self) -> Wait[Any]:
        _, wait, uid, size = self._asked.popleft()
        self._memory.release(uid, size + _ROW_BYTES)
        self._before = self.count
        return wait

    def finish(self) -> None:
        """The server stops: a write that is in force is done to its end, and answered."""
        asked = len(self._asked)
        if self.count != self._before:
            with suppress(StopIteration):
                while len(self._asked) == asked:
                    next(self._working)

    def _ended(self, working: Wait[Any]) -> None:
        """All is done, or the group is removed, or the server stops."""
        try:
            working.result()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        while self._asked:
            self._next().fail(error)
