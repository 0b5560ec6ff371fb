"""The two clocks of a log: the wall times that its records carry, and the engine time by which they expire.

Owns the anchors that turn one into the other (mqfs(4), "Time"), and what has outlived the group's `ttl`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mqfs.engine.delivery.priority_index import NEVER
from mqfs.group_state import encode_change
from mqfs.model import Kind, Record

if TYPE_CHECKING:
    from mqfs.engine.group import Group

_SECOND_NS = 10**9
_COMPARE_NS = _SECOND_NS // 10  # how often the two clocks are compared while messages are written


class LogClock:
    """Of one group."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._checked_ns = 0  # wall time at which the clocks were last compared
        self._anchored = False  # the log says how the clocks stand in this boot
        self._expired = (-1, 0)  # (engine time asked for, the answer)

    def next_ns(self) -> int:
        """The wall time of the next record: never before the last one's. Notes a step of the wall clock."""
        clock = self.group.tree.clock
        wall = clock.wall_ns()
        last_ns = self.group.bucket.end.last_ns
        if wall < last_ns:
            wall = last_ns
        elif 0 <= wall - self._checked_ns < _COMPARE_NS:
            return wall
        self._checked_ns, engine = wall, clock.engine_ns()
        anchors = self.group.state.anchors
        if anchors:
            last = anchors[-1][1]
            steady = abs((wall - last.wall_ns) - (engine - last.engine_ns)) < _SECOND_NS
            if steady and (self._anchored or last.boot == clock.anchor().boot):
                self._anchored = True
                return wall
        self._anchored = True
        self._anchor(wall, engine)
        return wall

    def _anchor(self, wall: int, engine: int) -> None:
        """Note how the clocks stand."""
        now = self.group.tree.clock.anchor()
        anchor = now._replace(wall_ns=wall, engine_ns=engine, shown_ns=now.wall_ns)
        change = {"do": "clock", "sequence": self.group.bucket.end.next, "anchor": list(anchor)}
        self.group.bucket.writer.append(Kind.CLOCK, 0, wall, encode_change(change))
        self.group.state.apply(change)

    def note_step(self) -> None:
        """The wall clock was set: let the log say so even if nothing is written, for the next boot to know."""
        if self.group.bucket.end.failed is None:
            wall = max(self.group.tree.clock.wall_ns(), self.group.bucket.end.last_ns)
            self._anchor(wall, self.group.tree.clock.engine_ns())
            self.group.bucket.upkeep.sync(None, 1.0)

    def written_ns(self, record: Record) -> int:
        """When a message was written, on the engine clock."""
        anchor = self.group.state.anchor_at(record.sequence)
        return anchor.engine_ns + record.time_ns - anchor.wall_ns if anchor else record.time_ns

    def expired(self, record: Record) -> bool:
        """Whether a message has outlived the group's `ttl`."""
        ttl = self.group.settings.ttl
        return bool(ttl) and self.written_ns(record) + ttl <= self.group.tree.clock.engine_ns()

    def expired_before(self) -> int:
        """Every message below this sequence has outlived `ttl`."""
        ttl = self.group.settings.ttl
        if not ttl:
            return 0
        limit = self.group.tree.clock.engine_ns() - ttl
        known_at, known = self._expired
        if known_at == limit:
            return known
        floor = 0
        anchors = self.group.state.anchors
        for i, (_, anchor) in enumerate(anchors):
            if anchor.engine_ns > limit and i:
                break
            floor = self.group.bucket.reader.first_at_time(anchor.wall_ns + limit - anchor.engine_ns + 1)
            if i + 1 < len(anchors):
                floor = min(floor, anchors[i + 1][0])
        self._expired = (limit, floor)
        return floor

    def expires_by_ttl(self, sequence: int) -> int:
        """Until when the group's `ttl` keeps a message, engine ns; NEVER where it has none."""
        if not self.group.settings.ttl:
            return NEVER
        record = self.group.bucket.reader.scan(sequence)
        return self.written_ns(record) + self.group.settings.ttl if record is not None else NEVER
