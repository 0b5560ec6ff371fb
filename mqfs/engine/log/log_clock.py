"""The two clocks of a log: the wall times that its records carry, and the engine time that they mean.

Owns the anchors that turn one into the other (mqfs(4), "Time").
"""

from __future__ import annotations

from typing import Protocol

from mqfs.group_state import Change, State
from mqfs.model import Record
from mqfs.seams import Clock, LogEnd, LogUpkeep

_SECOND_NS = 10**9
_COMPARE_NS = _SECOND_NS // 10  # how often the two clocks are compared while messages are written


class ClockedLog(Protocol):
    """The log whose clocks these are."""

    end: LogEnd
    upkeep: LogUpkeep
    state: State

    def append_clock(self, change: Change, wall_ns: int) -> None: ...


class LogClock:
    """Of one group."""

    def __init__(self, log: ClockedLog, clock: Clock) -> None:
        self._log, self._clock = log, clock
        self._checked_ns = 0  # wall time at which the clocks were last compared
        self._anchored = False  # the log says how the clocks stand in this boot

    def next_ns(self) -> int:
        """The wall time of the next record: never before the last one's. Notes a step of the wall clock."""
        wall = self._clock.wall_ns()
        last_ns = self._log.end.last_ns
        if wall < last_ns:
            wall = last_ns
        elif 0 <= wall - self._checked_ns < _COMPARE_NS:
            return wall
        self._checked_ns, engine = wall, self._clock.engine_ns()
        anchors = self._log.state.anchors
        if anchors:
            last = anchors[-1][1]
            steady = abs((wall - last.wall_ns) - (engine - last.engine_ns)) < _SECOND_NS
            if steady and (self._anchored or last.boot == self._clock.anchor().boot):
                self._anchored = True
                return wall
        self._anchored = True
        self._anchor(wall, engine)
        return wall

    def _anchor(self, wall: int, engine: int) -> None:
        """Note how the clocks stand."""
        now = self._clock.anchor()
        anchor = now._replace(wall_ns=wall, engine_ns=engine, shown_ns=now.wall_ns)
        change: Change = {"do": "clock", "sequence": self._log.end.next, "anchor": list(anchor)}
        self._log.append_clock(change, wall)

    def note_step(self) -> None:
        """The wall clock was set: let the log say so even if nothing is written, for the next boot to know."""
        log = self._log
        if log.end.failed is None:
            self._anchor(max(self._clock.wall_ns(), log.end.last_ns), self._clock.engine_ns())
            log.upkeep.sync(None, 1.0)

    def written_ns(self, record: Record) -> int:
        """When a message was written, on the engine clock."""
        anchor = self._log.state.anchor_at(record.sequence)
        return anchor.engine_ns + record.time_ns - anchor.wall_ns if anchor else record.time_ns
