"""Which segments have descriptors.

Owns the bound on them, limits.OPEN_BUCKETS, and the choice of the one to close.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from mqfs import limits


class Closable(Protocol):
    """A segment, as to its descriptor and what it has in memory."""

    listed: bool
    recent: bool  # used since the last look
    sealed: bool
    may_close_fd: Callable[[Any], bool]

    @property
    def is_idle(self) -> bool: ...

    def close_idle(self) -> None: ...


class Descriptors:
    """At most limits.OPEN_BUCKETS of them, closed by second chance."""

    __slots__ = ("_open",)

    def __init__(self) -> None:
        self._open: deque[Closable] = deque()

    def opened(self, segment: Closable) -> None:
        self._open.append(segment)
        for _ in range(2 * len(self._open)):
            # A sealed one has a descriptor for its index too.
            bound = limits.OPEN_BUCKETS
            if 2 * len(self._open) <= bound or sum(1 + s.sealed for s in self._open) <= bound:
                return
            self._look_at(self._open.popleft(), segment)

    def _look_at(self, segment: Closable, newest: Closable) -> None:
        """Second chance: one that was used since the last look stays, once."""
        if segment.is_idle:
            segment.listed = False
        elif segment is newest or segment.recent or not segment.may_close_fd(segment):
            segment.recent = False
            self._open.append(segment)
        else:
            segment.close_idle()
            segment.listed = False


__all__ = ["Closable", "Descriptors"]
