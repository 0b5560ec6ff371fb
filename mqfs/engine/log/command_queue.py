"""Writes to `ctl` of one group, one after the other: each finds the settings and names that those before it left.

A short one is done at once. A long one, and what comes meanwhile, is done in portions. None can be cancelled: it is
done to its end, and answered, whatever its client does meanwhile. O_NONBLOCK would make it fail each time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from mqfs.engine.log.portions import Portions, Work
from mqfs.shares import Shares
from mqfs.wait import Step, Wait

Begin = Callable[[], Work[Step[int]]]


class CommandQueue:
    """Of one group. `memory`: what its users share."""

    def __init__(self, portions: Portions, memory: Shares) -> None:
        self._portions, self._memory = portions, memory
        self.count = 0  # of writes that are in force
        self._asked: deque[tuple[Begin, Wait[int], int, int]] = deque()

    def admit(self, uid: int, size: int) -> None:
        """So many bytes of that user's memory are a write's, until it is done. Raises OverLimit, if it has to wait."""
        self._memory.change(uid, 0, size, refuse=bool(self._asked))

    def run(self, begin: Begin, uid: int, size: int) -> Step[int]:
        """What the work of a write, which was admitted, returns. Raises what it raises."""
        wait: Wait[int] = Wait()
        self._asked.append((begin, wait, uid, size))
        if len(self._asked) == 1:
            working = self._portions.run(self._work())
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

    def _next(self) -> Wait[int]:
        _, wait, uid, size = self._asked.popleft()
        self._memory.give(uid, size)
        return wait

    def _ended(self, working: Wait[Any]) -> None:
        """All is done, or the group is removed, or the server stops."""
        try:
            working.result()
        except Exception as error:
            while self._asked:
                self._next().fail(error)
