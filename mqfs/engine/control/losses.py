"""Messages that one write to `ctl` takes from streams: found in portions, recorded together, removed in portions.

    find            of each stream the new floor; others are served between two streams
    the log         has all floors, as one unit with the other changes of the write
    carry_out       floors and counts of streams; without a pause where the state of the group is to be written

A floor only rises: one that was found still holds when the log has it. Messages written since the search began stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TypeAlias

from mqfs.engine.group import Group
from mqfs.engine.language.settings import NO_DEPTH, Action, Settings
from mqfs.engine.log.portions import Work
from mqfs.engine.retention.cuts import Clearing, Cut, cut_in_steps, plan_clear
from mqfs.engine.stream import Stream
from mqfs.group_state import encode_change
from mqfs.model import Draft, Kind

_FLOORS = 512  # in one record
_STEPS = 8  # streams between two looks at the clock: some 50 us


_RETAINING = attrgetter("replay", "ttl", "depth", "full")
Steps: TypeAlias = Sequence[tuple[Settings, Action | None]]  # settings and actions of lines


class Losses:
    """Of one write, or of a part of it that ends where messages are written."""

    def __init__(self, group: Group, steps: Steps) -> None:
        self.group, now = group, group.settings
        self.floors: list[Draft] = []  # for the log
        self._end = group.log.end.next  # what has this number or a higher one is not cleared
        settings = steps[-1][0] if steps else now
        verbs = {action.verb for _, action in steps if action is not None}
        named = {action.stream for _, action in steps if action is not None and action.verb == "clear"}
        self._forgets = _RETAINING(settings) != _RETAINING(now) and (not group.retention.keeps_all or now.ttl > 0)
        bounds = (settings.depth, settings.full) != (now.depth, now.full) and settings.full == "drop-old"
        self._depth = settings.depth if bounds and settings.depth is not NO_DEPTH else None
        self._dead = settings.dead
        self._is_thinned = not verbs.isdisjoint(("clear", "drop"))  # then a new `depth` has less to cut, or nothing
        self._clears = None if None in named else {name for name in named if name is not None}
        self._clearings: list[tuple[Stream, Clearing]] = []
        self._cuts: list[tuple[Stream, Cut]] = []

    def find(self) -> Work[None]:
        """Looks only."""
        rows: list[list[int]] = []
        for count, stream in enumerate(self._streams(), 1):
            if count % _STEPS == 0:
                yield
            if not stream.removed and (floor := (yield from self._floor(stream))):
                rows.append([stream.number, floor])
            if len(rows) == _FLOORS:
                self._record(rows)
                rows = []
        if rows:
            self._record(rows)

    def _streams(self) -> list[Stream]:
        streams = self.group.streams
        if self._forgets or self._clears is None or self._depth is not None:
            return list(streams.values())
        return [streams[name] for name in self._clears if name in streams]

    def _record(self, rows: list[list[int]]) -> None:
        self.floors.append(Draft(Kind.CHANGE, 0, encode_change({"do": "floor", "floors": rows})))

    def _floor(self, stream: Stream) -> Work[int]:
        """That it will have. What the old settings did not keep any more must not come back under new ones."""
        kept = stream.kept
        if self._clears is None or stream.name in self._clears:
            clearing = plan_clear(kept, self._end)
            if clearing.cut.gone or clearing.newest or clearing.cut.floor > kept.state.floor:
                self._clearings.append((stream, clearing))
            return clearing.cut.floor
        kept.update_low_watermark()
        if self._depth is None or self._is_thinned or stream.name == self._dead:
            return kept.state.floor
        cut = yield from cut_in_steps(kept, self._depth)
        if cut.gone:
            self._cuts.append((stream, cut))
        return max(cut.floor, kept.state.floor)

    def carry_out(self) -> Work[None]:
        """The log has it."""
        for count, (stream, clearing) in enumerate(self._clearings, 1):
            stream.kept.cleared(clearing)
            if count % _STEPS == 0:
                yield
        for count, (stream, cut) in enumerate(self._cuts, 1):
            stream.kept.carry_out_cut(cut)
            if count % _STEPS == 0:
                yield

    def bound(self) -> Work[None]:
        """Cut to a new `depth` what came meanwhile, and what was not cut since messages went anyway."""
        if self._depth is None or not (self._is_thinned or self.group.log.end.next != self._end):
            return
        for count, stream in enumerate(list(self.group.streams.values()), 1):
            if not stream.removed:
                self.group.retention.bound_depth(stream)
            if count % _STEPS == 0:
                yield
