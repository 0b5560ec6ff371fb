"""What one write to `ctl` changes: recorded as one unit, then put in force.

Owns that order: every change is worked out from how things are, the log takes all of them or none, and only then do
the group's streams, views and consumers follow. What an action is, actions.py knows.
"""

from __future__ import annotations

from collections.abc import Callable

from mqfs.engine.control.losses import Losses
from mqfs.engine.delivery import catalog
from mqfs.engine.delivery.consumer import Consumer
from mqfs.engine.delivery.new_consumers import plan, streams_over
from mqfs.engine.group import Group
from mqfs.engine.language import programs
from mqfs.engine.language.settings import Settings
from mqfs.engine.log.group_log import AckSteps
from mqfs.engine.log.portions import Work
from mqfs.engine.stream import Stream
from mqfs.group_state import Change
from mqfs.model import User
from mqfs.syntax.patterns import compile_pattern


class Changes:
    """Of one group, for one user. `commit` does them; then nothing more is to be added. `losses`: what they take from
    streams, which was found."""

    def __init__(self, group: Group, user: User, losses: Losses) -> None:
        self._group, self._user, self._losses = group, user, losses
        self._settings = group.settings
        self._changes: list[Change] = []
        self._steps: list[AckSteps] = []
        self._after: list[Callable[[], None]] = []
        self._next = group.state.next_stream  # the number of the next file
        self._bound: dict[str, list[str]] = {}  # patterns and programs of views, bound here
        self._dropped: set[int] = set()  # messages that lines before this one drop
        self._patterns: dict[str, dict[str, None]] = {}  # of views that lines here name: all they will be bound to
        self._plans: dict[tuple[str, str, int], Change] = {}  # of consumers
        self._removed: list[Consumer] = []
        self._numbers: dict[str, int | None] = {}  # of the consumers that are made here; None: removed

    def set(self, settings: Settings) -> None:
        self._settings = settings

    def drop(self, stream: Stream, sequences: list[int]) -> None:
        held, group = self._group.held, self._group
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
            self._changes.append({**self._plan(over), "number": number, "name": name, **options})
        else:
            self._changes.append({"do": "consumer", "number": number, **options})
        self._after.append(lambda: consumers.refresh(name, number))

    def _plan(self, over: str) -> Change:
        """Of a consumer. A write may make thousands over the same."""
        group, replay = self._group, self._settings.replay
        key = over, replay, len(self._bound.get(over, ()))
        if key not in self._plans:
            looks = replay == "last" or group.ranks.streams_with_exclusives()
            streams = self._streams_of(over) if looks else []
            self._plans[key] = plan(group, 0, "", over, self._user, 0o666, replay, streams)
        return self._plans[key]

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
            consumer.exclusives.release_all()
            self._removed.append(consumer)

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

    def commit(self) -> Work[None]:
        """Record them, and put them in force: the floors of streams in portions. Raises DiskFailed, DiskFull, ReadOnly;
        then nothing of them holds."""
        group, settings, losses = self._group, self._settings, self._losses
        if settings != group.settings:
            self._changes.insert(0, {"do": "ctl", "lines": settings.lines(given=True)})
        covered = group.consumers.before_removal(self._removed)
        if self._changes or self._steps or losses.floors:
            group.log.change(*self._changes, acks=self._steps, floors=losses.floors)
        group.commands.count += 1
        carrying_out = group.portions.owe(losses.carry_out())
        respelled = settings.words != group.settings.words
        if settings != group.settings:
            group.put_in_force(settings)
        if self._patterns or respelled:
            group.views.refresh(*self._patterns)
        if self._removed:
            group.consumers.removed(self._removed, covered)
        for then in self._after:
            then()
        yield from carrying_out
        yield from losses.bound()
