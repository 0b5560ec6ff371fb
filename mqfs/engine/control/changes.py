"""What one write to `ctl` changes: recorded as one unit, then put in force.

Owns that order: every change is worked out from how things are, the log takes all of them or none, and only then do
the group's streams, views and consumers follow. What an action is, actions.py knows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from mqfs.engine.delivery import catalog
from mqfs.engine.delivery.new_consumers import plan, streams_over
from mqfs.engine.group import Group
from mqfs.engine.language import programs
from mqfs.engine.language.settings import Settings
from mqfs.engine.log.group_log import AckSteps
from mqfs.engine.retention.cuts import Cut, plan_clear, plan_cut
from mqfs.engine.stream import Stream
from mqfs.group_state import Change
from mqfs.model import User
from mqfs.syntax.patterns import compile_pattern


class Resetting(NamedTuple):
    """What new settings come to."""

    changes: list[Change]
    cuts: dict[Stream, Cut]


class Changes:
    """Of one group, for one user. `commit` does them; then nothing more is to be added."""

    def __init__(self, group: Group, user: User) -> None:
        self._group, self._user = group, user
        self._settings = group.settings
        self._changes: list[Change] = []
        self._steps: list[AckSteps] = []
        self._after: list[Callable[[], None]] = []
        self._thinned = False  # messages go that a new `depth` need not cut any more
        self._next = group.state.next_stream  # the number of the next file
        self._bound: dict[str, list[str]] = {}  # patterns and programs of views, bound here
        self._cleared: set[Stream] = set()
        self._all_cleared = False
        self._dropped: set[int] = set()  # messages that lines before this one drop
        self._patterns: dict[str, dict[str, None]] = {}  # of views that lines here name: all they will be bound to
        self._numbers: dict[str, int | None] = {}  # of the consumers that are made here; None: removed

    def set(self, settings: Settings) -> None:
        self._settings = settings

    def clear(self, name: str) -> None:
        """A stream, or all without a name. A write may say so thousands of times: each is cleared once."""
        self._thinned = True
        if self._all_cleared:
            return
        self._all_cleared = not name
        streams = [self._group.streams[name]] if name else list(self._group.streams.values())
        if not (streams := [stream for stream in streams if stream not in self._cleared]):
            return
        self._cleared.update(streams)
        clearings = [plan_clear(stream.kept) for stream in streams]
        floors = [[c.number, c.floor] for c in clearings if c.floor]
        if floors:
            self._changes.append({"do": "floor", "floors": floors})
        self._after += [partial(s.kept.cleared, c) for s, c in zip(streams, clearings, strict=True)]

    def drop(self, stream: Stream, sequences: list[int]) -> None:
        held, group = self._group.held, self._group
        self._thinned = True
        sequences = [sequence for sequence in sequences if sequence not in self._dropped]
        self._dropped.update(sequences)
        waiting = [sequence for sequence in sequences if held.targets(stream, sequence)]
        stream.kept.update_low_watermark()
        new = [s for s in sequences if s not in group.state.dropped and s not in waiting]
        self._steps += held.drop_steps(waiting)
        if new:
            self._changes.append({"do": "drop", "stream": stream.number, "sequences": new})
        self._after.append(lambda: self._put_drop_in_force(stream, waiting))

    def _put_drop_in_force(self, stream: Stream, waiting: list[int]) -> None:
        self._group.held.dropped(waiting)
        stream.kept.recount()
        stream.kept.update_low_watermark()

    def consumer(self, name: str, over: str, options: Change) -> None:
        """Make one, or change its options."""
        consumers, number = self._group.consumers, self._number_of(name)
        if number is None:
            number, self._next = self._next, self._next + 1
            self._numbers[name] = number
            streams = self._streams_of(over)
            made = plan(self._group, number, name, over, self._user, 0o666, self._settings.replay, streams)
            self._changes.append({**made, **options})
        else:
            self._changes.append({"do": "consumer", "number": number, **options})
        self._after.append(lambda: consumers.refresh(name, number))

    def _number_of(self, name: str) -> int | None:
        if name in self._numbers:
            return self._numbers[name]
        consumer = self._group.consumers.get(name)
        return consumer.number if consumer is not None else None

    def _streams_of(self, over: str) -> list[catalog.Stream]:
        """Also where that view is bound here."""
        group, bound = self._group, self._bound.get(over, [])
        streams = streams_over(group, over) if over in group.views or not bound else []
        if not bound or any(programs.is_program(text) for text in bound):
            return streams or streams_over(group, "")
        matches = [compile_pattern(text, self._settings.words) for text in bound]
        others = [s for s in streams_over(group, "") if s not in streams and any(m(s.name) for m in matches)]
        return [*streams, *others]

    def remove(self, name: str) -> None:
        number = self._number_of(name)
        self._numbers[name] = None
        self._changes.append({"do": "forget", "number": number})
        consumer = self._group.consumers.get(name)
        if consumer is not None and consumer.number == number:
            covered = self._group.consumers.before_removal(consumer)
            self._after.append(lambda: self._group.consumers.removed(consumer, covered))

    def bind(self, name: str, pattern: str) -> None:
        patterns = self._patterns_of(name)
        if pattern in patterns:
            return
        patterns[pattern] = None
        now = self._group.tree.clock.wall_ns()
        self._changes.append({"do": "bind", "number": self._next, "name": name, "pattern": pattern, "time": now})
        self._next += 1
        self._bound.setdefault(name, []).append(pattern)

    def unbind(self, name: str, pattern: str | None) -> None:
        patterns = self._patterns_of(name)
        if pattern is None:
            patterns.clear()
        else:
            patterns.pop(pattern, None)
        self._changes.append({"do": "unbind", "name": name, "pattern": pattern})

    def _patterns_of(self, name: str) -> dict[str, None]:
        if name not in self._patterns:
            view = self._group.views.get(name)
            self._patterns[name] = dict.fromkeys(view.state.patterns) if view is not None else {}
        return self._patterns[name]

    def commit(self) -> None:
        """Record them, and put them in force. Raises DiskFailed, DiskFull, ReadOnly; then nothing of them holds."""
        group, settings = self._group, self._settings
        change = plan_settings(group, settings, cut=not self._thinned) if settings != group.settings else None
        if change is not None:
            self._changes[:0] = change.changes
        if self._changes or self._steps:
            group.log.change(*self._changes, acks=self._steps)
        respelled = settings.words != group.settings.words
        if change is not None:
            group.put_in_force(settings, change.cuts)
        if self._patterns or respelled:
            group.views.refresh(*self._patterns)
        for then in self._after:
            then()
        if change is not None and self._thinned:
            for stream in self._group.numbers.values():
                group.retention.bound_depth(stream)


def plan_settings(group: Group, settings: Settings, *, cut: bool) -> Resetting:
    """What the log has to say, and, with `cut`, what a new `depth` cuts, when settings are put in force."""
    now, floors = group.settings, dict[int, int]()
    if (settings.replay, settings.ttl, settings.depth, settings.full) != (now.replay, now.ttl, now.depth, now.full):
        # What the old settings did not keep any more must not come back under the new ones.
        for stream in group.numbers.values():
            stream.kept.update_low_watermark()
            floors[stream.number] = stream.state.floor
    cuts: dict[Stream, Cut] = {}
    if cut and (settings.depth, settings.full) != (now.depth, now.full) and settings.full == "drop-old":
        mine = [stream for stream in group.numbers.values() if stream.name != settings.dead]
        cuts = {stream: plan_cut(stream.kept, settings.depth) for stream in mine}
        floors.update({stream.number: cut.floor for stream, cut in cuts.items()})
    changes: list[Change] = [{"do": "ctl", "lines": settings.lines(given=True)}]
    if kept_from := [[number, floor] for number, floor in floors.items() if floor]:
        changes.insert(0, {"do": "floor", "floors": kept_from})
    return Resetting(changes, cuts)
