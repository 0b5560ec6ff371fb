"""Periodic maintenance of all groups of a tree, contained group by group."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial

from mqfs.engine.group import Group
from mqfs.engine.log.faults import Faults
from mqfs.engine.log.timers import Timers
from mqfs.model import User
from mqfs.seams import Clock, Store

log = logging.getLogger("mqfs.engine")


class Maintenance:
    """Of one tree. `dirty`: the groups that it has to look at."""

    def __init__(self, store: Store, clock: Clock, faults: Faults, timers: Timers) -> None:
        self._store, self._clock, self._faults, self._timers = store, clock, faults, timers
        self.dirty: set[Group] = set()
        self._full: set[int] = set()  # the groups that were reported as without room
        self._ahead_ns = clock.wall_ns() - clock.engine_ns()  # what the wall clock is before the engine's

    def restart_clocks(self) -> None:
        """The engine's clock was resumed."""
        self._ahead_ns = self._clock.wall_ns() - self._clock.engine_ns()

    def tick(self, root: Group, groups: Mapping[int, Group]) -> None:
        """Once a second: what has expired, streams that are idle, room to be given back, writers that may go on."""
        self._timers.run(self._clock.engine_ns())
        self._faults.contain(root, "noting a step of the clock", partial(self._look_at_clocks, root))
        for group in list(self.dirty):
            if not group.settings.ttl and not group.settings.idle:
                self.dirty.discard(group)
            succeeded = self._faults.contain(group, "maintenance", partial(self._maintain, group))
            if not succeeded and group.log.end.failed is None:  # what has failed for good is not tried again
                self.dirty.add(group)
        self._store.tick()
        self._report_full(groups)

    def _report_full(self, groups: Mapping[int, Group]) -> None:
        """One line a group, in the log and in `.errors`, when the disk has no room for it, and one when it has."""
        full, before = set(self._store.full), self._full
        self._full = full
        for number in full ^ before:
            group = groups.get(number)
            if group is not None and number in full:
                log.error("group %d: no space left on device: writes are refused until there is room", number)
                text = "no space left on device: writes are refused until there is room"
                group.refuse(User(group.state.uid, group.state.gid), ".", text)
            elif group is not None:
                log.warning("group %d: the disk has room again", number)

    def _maintain(self, group: Group) -> None:
        if group.settings.idle:
            self._remove_idle(group)
        group.retention.trim()
        group.unblock()

    def _look_at_clocks(self, root: Group) -> None:
        """Record a step of the wall clock in one log: at the next start the newest record sets the clock."""
        ahead = self._clock.wall_ns() - self._clock.engine_ns()
        if abs(ahead - self._ahead_ns) >= 10**9:
            self._ahead_ns = ahead
            root.log.times.note_step()

    def _remove_idle(self, group: Group) -> None:
        limit = self._clock.engine_ns() - group.settings.idle
        if group.settings.protect or group.log.end.failed is not None:
            return
        for stream in list(group.streams.values()):
            if stream.opens or stream.unused_since_ns > limit:
                continue
            stream.kept.update_low_watermark()
            if not stream.kept.count and not group.held.of(stream.number):
                group.remove_stream(stream)
