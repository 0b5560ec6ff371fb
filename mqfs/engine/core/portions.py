"""Long work of a group, in portions, so that requests are served between them.

Work is a generator that yields between two rows: rows it has read may change before it resumes. Short work is done at
once. An alarm runs the next portions of long work, in turns if there are several; the caller gets a Wait, which can be
cancelled.

Work that changes state records the change in the log first. The rest of that work is owed: see `Portions.owe`.
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
_SORTED = 4_096  # names sorted at once: about a millisecond


class Portions:
    """The unfinished work of a group."""

    def __init__(self, timers: Timers, group: Group, clock: Clock) -> None:
        self._clock, self._timers = clock, timers
        self._alarm = Alarm(timers, group, LOOKING, "continuing long work", lambda _: self._resume())
        self._queue: OrderedDict[Wait[Any], Work[Any]] = OrderedDict()
        self._owed: list[Work[None]] = []
        self._over: MqfsError | None = None  # why the group ended: long work fails with it
        self.count = 0  # portions resumed; if it grew, requests may have been served in between

    def run(self, work: Work[T], *, may_be_cancelled: bool = True) -> Step[T]:
        """Return the result of the work, or a Wait if it takes more than a portion. Raises what the work raises."""
        wait: Wait[T] = Wait(self._cancel if may_be_cancelled else None)
        self._perform(wait, work, self._until(False))
        return wait.result() if wait.settled else wait

    def later(self, work: Work[T]) -> Wait[T]:
        """Run the work after the caller has returned, as it may be in the middle of a delivery."""
        wait: Wait[T] = Wait(self._cancel)
        self._queue[wait] = work
        self._alarm.at(self._clock.engine_ns() + 1)
        return wait

    def owe(self, work: Work[None]) -> Work[None]:
        """Register work whose change is in the log already, and return it for the caller to run. `finish` runs the
        rest of it at once, before the state is encoded or the group ends."""
        self._owed.append(work)
        return self._pay(work)

    def _pay(self, work: Work[None]) -> Work[None]:
        yield from work
        if work in self._owed:
            self._owed.remove(work)

    def finish(self) -> None:
        """Complete all owed work at once."""
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
        """Run a portion of the work. Whether it is complete, or failed."""
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
        """Complete owed work, then fail all other work, and later long work, with `error`: the group was removed, or
        the server stops."""
        self.finish()
        self._over = error
        while self._queue:
            self._queue.popitem(last=False)[0].fail(error)


def exhaust(work: Work[T]) -> T:
    """Run all of the work at once and return its result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            found: T = end.value
            return found


def in_order(names: Iterable[str]) -> Work[list[str]]:
    """Sort names in portions. `sorted` also merges two sorted runs fast: 100,000 names in 3 ms."""
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

# Writes to `ctl` of one group run one after the other, as do new consumers that need long work: each sees the settings
# and names that earlier writes made.
#
# A short write is done at once. A long one, and those that arrive meanwhile, are done in portions. None can be
# cancelled: each is completed and answered, whatever its client does. O_NONBLOCK would make it fail each time.

Begin = Callable[[], Work[Step[Any]]]
_ROW_BYTES = 512  # memory, about, of a write that waits, without its text


class CommandQueue:
    """The commands of one group, in order. `memory`: the user limits that unfinished commands count against."""

    def __init__(self, portions: Portions, memory: UserLimits) -> None:
        self._portions, self._memory = portions, memory
        self.count = 0  # writes recorded in the log; files/ctl.py increments it
        self._before = 0  # `count` before the first of `_asked`
        self._working = self._work()
        self._asked: deque[tuple[Begin, Wait[Any], int, int]] = deque()

    def admit(self, uid: int, size: int) -> None:
        """Charge a write to its user's memory until it is done. Raises OverLimit only if the write has to wait."""
        self._memory.change(uid, 0, size + _ROW_BYTES, refuse=bool(self._asked))

    def run(self, begin: Callable[[], Work[Step[T]]], uid: int, size: int) -> Step[T]:
        """Run the work of an admitted write in its turn and return the result. Raises what the work raises."""
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
        """Complete and answer the first write if it is in the log already: the server stops."""
        asked = len(self._asked)
        if self.count != self._before:
            with suppress(StopIteration):
                while len(self._asked) == asked:
                    next(self._working)

    def _ended(self, working: Wait[Any]) -> None:
        """Fail the remaining writes if the work failed: the group was removed, or the server stops."""
        try:
            working.result()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        while self._asked:
            self._next().fail(error)
