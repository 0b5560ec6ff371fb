"""The group's `ttl`: which messages have outlived it."""

from __future__ import annotations

from mqfs.engine.log.group_log import GroupLog
from mqfs.model import NEVER, Record
from mqfs.seams import Clock


class Expiry:
    """Of one group."""

    def __init__(self, log: GroupLog, clock: Clock) -> None:
        self._log, self._clock = log, clock
        self._before = (-1, 0)  # (engine time asked for, the answer)

    def is_expired(self, record: Record) -> bool:
        """Whether a message has outlived the group's `ttl`."""
        ttl = self._log.settings.ttl
        return bool(ttl) and self._log.times.written_ns(record) + ttl <= self._clock.engine_ns()

    def expired_before(self) -> int:
        """Every message below this sequence has outlived `ttl`."""
        ttl = self._log.settings.ttl
        if not ttl:
            return 0
        limit = self._clock.engine_ns() - ttl
        known_at, known = self._before
        if known_at == limit:
            return known
        floor = 0
        anchors = self._log.state.anchors
        for i, (_, anchor) in enumerate(anchors):
            if anchor.engine_ns > limit and i:
                break
            floor = self._log.reader.first_at_time(anchor.wall_ns + limit - anchor.engine_ns + 1)
            if i + 1 < len(anchors):
                floor = min(floor, anchors[i + 1][0])
        self._before = (limit, floor)
        return floor

    def expires_by_ttl(self, sequence: int) -> int:
        """Until when the group's `ttl` keeps a message, engine ns; NEVER where it has none."""
        ttl = self._log.settings.ttl
        if not ttl:
            return NEVER
        record = self._log.reader.scan(sequence)
        return self._log.times.written_ns(record) + ttl if record is not None else NEVER
