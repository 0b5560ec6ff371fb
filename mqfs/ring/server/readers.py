"""The processes that read a group's ring, and the part of the log that they may still need.

A reader that is overtaken continues in the log: the log holds what the slowest one has not passed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from mqfs.model import NEVER
from mqfs.seams import LogEnd

if TYPE_CHECKING:
    from mqfs.ring import Ring

_MARK_BYTES = 64 << 10  # between two positions of the ring whose sequence is remembered
_LOOK_S = 0.05  # how long an answer holds


class RingReaders:
    """The readers of one ring. `end` is that of the group's log, `raised` is called when their floor has risen."""

    def __init__(self, made: Ring, end: LogEnd, position: int, raised: Callable[[], None]) -> None:
        self._ring, self._end, self._raised = made, end, raised
        self._floor = NEVER
        # (position, the sequence behind it); of one that is further back the floor stays where it is
        self._marks: deque[tuple[int, int]] = deque([(position, end.next)], 2 + 2 * made.size // _MARK_BYTES)
        self._seen = (0.0, False)  # (time of the last update, whether there are any)

    def mark(self, position: int) -> None:
        """The ring up to a position is in the log."""
        if not self._marks or position - self._marks[-1][0] >= _MARK_BYTES:
            self._marks.append((position, self._end.next))

    @property
    def floor(self) -> int:
        """The lowest sequence that a reader may still need; NEVER where there is none."""
        self.has_any()
        return self._floor

    def has_any(self) -> bool:
        """Whether there are any. That there are none is never remembered: a reader may have come meanwhile."""
        if not self._seen[1] or time.monotonic() - self._seen[0] >= _LOOK_S:
            self.refresh()
        return self._seen[1]

    def refresh(self) -> None:
        self._seen = time.monotonic(), self.update()

    def update(self) -> bool:
        """Whether there are any now; sets the floor to the slowest one's."""
        positions = [position for slot, _, position, _, lives in self._ring.slots() if slot and lives]
        before = self._floor
        if positions:
            self._raise_floor(min(positions))
        else:
            self._floor = NEVER
        if self._floor > before:
            self._raised()
        return bool(positions)

    def _raise_floor(self, slowest: int) -> None:
        marks = self._marks
        while len(marks) > 1 and marks[1][0] <= slowest:
            marks.popleft()
        if marks and marks[0][0] <= slowest:
            self._floor = marks[0][1]
        elif self._floor == NEVER:
            self._floor = self._end.next
