"""`ctl`: a write is parsed and checked in portions, recorded as one unit, and then put in force.

From the open file down: CtlHandle (the write), Plan (its changes), Losses (messages that it removes from streams).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice, pairwise
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from mqfs import errors, limits
from mqfs.engine.core.log import AckSteps
from mqfs.engine.core.portions import Work, exhaust
from mqfs.engine.delivery import redelivery
from mqfs.engine.delivery.consumer import Consumer
from mqfs.engine.files import status
from mqfs.engine.files.consumer_lines import CONSUMER_ACTIONS, Changes, ConsumerLines
from mqfs.engine.files.handle import CommandFile
from mqfs.engine.group import NO_REPLICA, Group
from mqfs.engine.language import programs
from mqfs.engine.language.settings import NO_DEPTH, SYNC_REPLICA, Action, Settings, read
from mqfs.engine.publishing.admission import WriteRequest
from mqfs.engine.publishing.publisher import RECORD_BYTES
from mqfs.engine.retention.newest import look_up
from mqfs.engine.retention.retained import counted_of, cut_in_steps, has_all, plan_clear
from mqfs.engine.retention.retention import forget_dropped
from mqfs.engine.routing import View
from mqfs.engine.stream import Stream
from mqfs.model import Draft, Kind, Step, User
from mqfs.state.group import encode_change
from mqfs.syntax.names import check_name
from mqfs.syntax.patterns import check_pattern

_STEPS = 32  # lines between two looks at the clock: some 50 us
_TRIES = 3  # in portions, if the group changes meanwhile; then one at once
_DROPS = ("drop", "unschedule")  # checked again when planned: the message may have been removed


class CtlHandle(CommandFile):
    """`ctl`, open for writing: settings and actions of a group. For reading only it is a TextHandle."""

    text = b""  # the text that is read
    may_publish = True

    def read(self, count: int, offset: int = 0) -> Step[bytes]:
        """Return why the last write was refused, or else the text of `ctl`: a read of its beginning prints the present
        state."""
        self.require(reading=True)
        told = self.take_response(count)
        if told is not None:
            return told
        if offset:
            return self.text[offset : offset + count]
        return self.group.portions.run(self._print(count), may_be_cancelled=False)

    def _print(self, count: int) -> Work[bytes]:
        self.text = (yield from status.ctl(self.group, self.user)).encode()
        return self.text[:count]

    def count_messages(self, data: bytes) -> int:
        return (self.partial + data).count(b"eof")  # each line that writes an EOF marker has the word

    def write(self, data: bytes, offset: int = 0) -> Step[int]:
        self.require(reading=False)
        if self.group.removed:
            raise errors.NotFound("the group was removed")
        try:
            if not (text := self.lines_of(data)):
                return len(data)
            self.group.commands.admit(self.user.uid, len(text))
        except errors.MqfsError as error:
            self.refused(error)
            raise
        rest = self.partial
        return self.group.commands.run(lambda: self._work(text, len(data), rest), self.user.uid, len(text))

    def _work(self, text: str, value: int, rest: bytes) -> Work[Step[int]]:
        try:
            return (yield from self._carry_out(text, value))
        except errors.MqfsError as error:
            self.refused(error, rest)
            raise

    def _carry_out(self, text: str, value: int) -> Work[Step[int]]:
        group, steps, named = self.group, list[tuple[Settings, Action | None]](), 0
        for count, (settings, action) in enumerate(read(text, group.settings), 1):
            steps += short_steps(settings, action) if action and action.sequences else [(settings, action)]
            named += len(action.sequences) if action else 0
            if count % _STEPS == 0:
                yield
        made = not group.ranks.is_complete and any(action and action.verb == "consumer" for _, action in steps)
        if group.retention.newest is not None or made:  # a new consumer needs the messages of all keys
            yield from look_up(group.retention)
        if len(group.state.dropped) + named > limits.DROPPED:
            yield from forget_dropped(group, {action.stream or "" for _, action in steps if action is not None})
        portions, seen = group.portions.count, group.catalog_version
        yield from self._check(steps)
        for part in parts_of(steps):
            plan, losses = yield from self._plan(part, portions, seen)
            yield from plan.commit(losses)
            if part and (last := part[-1][1]) is not None and last.verb in MESSAGE_ACTIONS:
                yield from write_messages(group, last)
                yield
            seen = -1  # changes made here count, too
        for count, line in enumerate(map(str.strip, text.split("\n")), 1):
            if line and not line.startswith("#"):
                self.audit("ctl", line)
            if count % _STEPS == 0:
                yield
        group.unblock()
        return group.log.after_metadata_sync(value)

    def _plan(self, part: Steps, portions: int, seen: int) -> Work[tuple[Plan, Losses]]:
        """Return the changes and the losses of a part. It was checked at `seen`, a `catalog_version`, and is checked
        again if others were served since the count `portions`. Raises the error of a line."""
        group = self.group
        for _ in range(_TRIES):
            self._end_ring(part)
            plan, losses = Plan(group, self.user), Losses(group, part)
            yield from plan.prepare(part)
            yield from losses.find()
            if group.portions.count == portions:
                return plan, losses
            yield from self._check_again(part, seen)
            if plan.holds():
                return plan if plan.has_its_numbers else self._plan_at_once(part), losses
        exhaust(self._check(part))
        self._end_ring(part)
        losses = Losses(group, part)
        exhaust(losses.find())
        return self._plan_at_once(part), losses

    def _plan_at_once(self, part: Steps) -> Plan:
        plan = Plan(self.group, self.user)
        exhaust(plan.prepare(part))
        return plan

    def _check(self, steps: Steps) -> Work[None]:
        """Check lines by a rehearsal. Raises the error of the first line that fails."""
        check_settings(self.group, steps)
        plan = Plan(self.group, self.user, rehearsed=True)
        for count, (settings, action) in enumerate(steps, 1):
            plan.rehearse(settings, action)
            if count % _STEPS == 0:
                yield

    def _check_again(self, steps: Steps, seen: int) -> Work[None]:
        """Repeat the check made at version `seen`, after others were served: in portions, but at once if the group
        keeps changing."""
        group = self.group
        for _ in range(_TRIES):
            if group.catalog_version == seen:
                break
            seen = group.catalog_version
            yield from self._check(steps)
        if group.catalog_version != seen:
            exhaust(self._check(steps))
        else:
            check_settings(self.group, steps)
        self._end_ring(steps)

    def _end_ring(self, steps: Steps) -> None:
        """End the ring if new settings do, and take its messages, before anything is planned."""
        group = self.group
        if group.ring is not None and steps and steps[-1][0] != group.settings:
            group.ring.changed([{"do": "ctl", "lines": steps[-1][0].lines(given=True)}])


# ------------------------------------------------------------ plan

# The changes of one write to `ctl`: checked, recorded as one unit, then put in force.
#
#     rehearsal   all lines are checked in portions, each as those before it leave things; nothing is done
#     prepare     each line becomes changes, as the log will have them, and new consumers: in portions
#     holds       whether what lines name is still as it was then; if not, they are prepared again
#     commit      the log takes all of them or none; only then do the group's streams, views and consumers follow
#
# From `holds` to the end of `commit` no other request is served, except while floors rise, which are in the log by
# then. A write of 64 KiB makes 4,000 consumers: `prepare` does as much as possible beforehand, and shows none of it.


class Plan:
    """The changes of the lines in a part of a write. `rehearsed`: the lines are only checked, and change nothing."""

    def __init__(self, group: Group, user: User, *, rehearsed: bool = False) -> None:
        self._group = group
        self._changes = Changes(group, user, rehearsed)
        self._consumers: ConsumerLines | None = None  # made for the first line that names one
        self._steps: list[AckSteps] = []
        self._drops: dict[Stream, dict[int, int]] = {}  # messages: sequence -> bytes
        self._late: dict[Stream, dict[int, None]] = {}  # delayed messages
        self._firsts: dict[Stream, int] = {}  # for some of these streams: nothing below is retained after the lines
        self._dropped = 0  # single messages to drop, neither delayed nor below `_firsts`
        self._views: dict[str, list[str]] = {}  # patterns of views that lines name, as they found them
        self._patterns: dict[str, dict[str, None]] = {}  # after these lines; a view without patterns is removed
        self._grown = 0  # patterns added to all views together
        self._first = group.state.next_stream  # number of the first file that it makes
        self._is_reserved = False  # whether its numbers are reserved
        self._searches = group.views.searches  # searches in all programs after these lines

    def rehearse(self, settings: Settings, action: Action | None) -> None:
        """Check a line in the state that the lines before it leave. Raises its error."""
        if settings.words != self._changes.settings.words:
            self._check_words()
        if action is None:
            self._changes.settings = settings
            return
        try:
            _LINES[action.verb].check(self, settings, action)
        except errors.MqfsError as error:
            prefix = f"line {action.line}: " if action.line else ""
            if not error.detail.startswith(f"{action.verb}:") and not isinstance(error, errors.NotFound):
                prefix += f"{action.verb}: "
            if not prefix:
                raise
            raise type(error)(prefix + error.detail) from None
        self.add(settings, action)

    def add(self, settings: Settings, action: Action | None) -> None:
        """Add the changes of a checked line. Lines that write messages do so later; cleared messages are Losses."""
        self._changes.settings = settings
        if action is not None and (add := _LINES[action.verb].add) is not None:
            add(self, action)

    def prepare(self, steps: Steps) -> Work[None]:
        """Add checked lines. In steps."""
        for count, (settings, action) in enumerate(steps, 1):
            note = self.rehearse if action is not None and action.verb in _DROPS else self.add
            note(settings, action)
            if count == _STEPS:
                self._group.log.reserve_numbers(len(steps))
                self._is_reserved = True
            if count % _STEPS == 0:
                yield
        if self._drops:
            yield from self._plan_drops()

    @property
    def has_its_numbers(self) -> bool:
        """Whether no other file got a number planned for its files. Numbers are reserved only for a long plan: a short
        one is soon made again."""
        return self._is_reserved or self._group.state.next_stream == self._first

    def holds(self) -> bool:
        """Whether all that lines name is as they found it, and new consumers may still claim the same messages."""
        views = self._group.views
        return (
            (self._consumers is None or self._consumers.holds())
            and all(_patterns_of(views.get(name)) == found for name, found in self._views.items())
            and self._has_dropped()
        )

    def _consumer_lines(self) -> ConsumerLines:
        if self._consumers is None:
            self._consumers = ConsumerLines(self._changes)
        return self._consumers

    def _require_stream(self, action: Action) -> Stream:
        stream = self._group.streams.get(action.stream or "")
        if stream is None:
            raise self._group.no_stream(action.stream or "")
        return stream

    # ------------------------------------------------------------ messages

    def _check_eof(self, settings: Settings, action: Action) -> None:
        self._require_stream(action)
        if settings.deliver == "one":
            raise errors.BadCommand("eof: not with 'deliver one' (expected 'deliver all')")
        self._group.retention.reserve_room(RECORD_BYTES)  # it is written when lines before it are in force

    def _check_redrive(self, settings: Settings, action: Action) -> None:
        if action.stream is not None:
            self._require_stream(action)

    def _check_clear(self, settings: Settings, action: Action) -> None:
        self._check_redrive(settings, action)
        self._changes.require_unprotected(settings, action)

    def _check_drop(self, settings: Settings, action: Action) -> None:
        stream = self._require_stream(action)
        self._changes.require_unprotected(settings, action)
        stream.kept.update_low_watermark()  # once the newest is dropped, under `replay last` the one before it counts
        group, floor, targets = self._group, stream.state.floor, self._group.held.targets
        sizes, late = self._drops.setdefault(stream, {}), self._late.setdefault(stream, {})
        before = len(sizes)
        for sequence in action.sequences:
            if targets(stream, sequence):
                late[sequence] = None
                continue
            found = group.log.reader.locate(stream.number, sequence)
            if found is None or found[0] != sequence or sequence < floor or stream.kept.is_deleted(sequence):
                raise errors.NotFound(f"no message {sequence} in stream {stream.name!r}")
            sizes[sequence] = found[1]
        self._dropped += len(sizes) - before
        if len(group.state.dropped) + self._dropped > limits.DROPPED:
            self._dropped -= self._pass_dropped(stream, sizes)
        if len(group.state.dropped) + self._dropped > limits.DROPPED:
            raise errors.OverLimit(f"drop: too many single messages (expected at most {limits.DROPPED} in a group)")

    def _pass_dropped(self, stream: Stream, sizes: dict[int, int]) -> int:
        """Have the floor of the stream drop the oldest messages, as too many single ones would be remembered. Return
        how many more the floor drops: none where keys decide which messages are retained."""
        group, passed = self._group, 0
        if group.retention.newest is None:
            first = self._firsts.get(stream) or stream.kept.first_kept()
            while first in sizes:
                first, passed = stream.kept.first_kept(first + 1) or group.log.end.next, passed + 1
            self._firsts[stream] = first
        return passed

    def _check_unschedule(self, settings: Settings, action: Action) -> None:
        """Check the removal of a schedule, which drops its delayed message."""
        group, name = self._group, action.stream or ""
        run = group.held.schedules.get(name)
        stream = group.numbers.get(run.stream) if run is not None else None
        if run is None or stream is None:
            raise errors.NotFound(f"no schedule {name!r} in group {group.name!r}")
        self._changes.require_unprotected(settings, action)
        self._drops.setdefault(stream, {})
        self._late.setdefault(stream, {})[run.sequence] = None

    def _has_dropped(self) -> bool:
        """Whether all messages to be dropped are still there."""
        return all(
            self._group.streams.get(stream.name) is stream
            and (not sizes or has_all(stream.kept, sizes))
            and all(self._group.held.targets(stream, sequence) for sequence in self._late[stream])
            for stream, sizes in self._drops.items()
        )

    def _plan_drops(self) -> Work[None]:
        for count, (stream, sizes) in enumerate(self._drops.items(), 1):
            first = self._firsts.get(stream, 0)
            sequences = [sequence for sequence in sizes if sequence >= first]
            if len(sequences) < len(sizes):
                self._changes.add({"do": "floor", "floors": [[stream.number, first]]})
            if sequences:
                self._changes.add({"do": "drop", "stream": stream.number, "sequences": sequences})
            rest = iter(self._late[stream])
            while some := list(islice(rest, _STEPS)):
                steps = self._group.held.drop_steps(some)
                self._steps.append((steps[0][0], b"".join(step for _, step in steps)))
                yield
            if count % _STEPS == 0:
                yield

    # ------------------------------------------------------------ views

    def _patterns_of(self, name: str) -> dict[str, None]:
        """Return the patterns that a view will have; empty: no such view."""
        if name not in self._patterns:
            self._views[name] = _patterns_of(self._group.views.get(name))
            self._patterns[name] = dict.fromkeys(self._views[name])
        return self._patterns[name]

    def _check_words(self) -> None:
        """Check new `words`. Raises Busy if patterns are bound: their meaning would change."""
        for name in dict.fromkeys([*self._group.views, *self._patterns]):
            if any(not programs.is_program(pattern) for pattern in self._patterns_of(name)):
                raise errors.Busy(f"words: view {name!r} is bound to patterns ('unbind' them first)")

    def _check_bind(self, settings: Settings, action: Action) -> None:
        group, name, pattern = self._group, action.stream or "", action.words[0]
        if name not in group.views:
            check_name(name)
        if name in group.streams or name in group.groups or group.tree.is_making(group, name):
            raise errors.Exists(f"bind: {name!r} is a stream or group (expected a name of the view's own)")
        searches = 0
        if programs.is_program(pattern):
            searches = programs.parse(pattern).searches
        else:
            check_pattern(pattern, settings.words)
        patterns = self._patterns_of(name)
        if pattern in patterns:
            return
        if len(patterns) >= limits.VIEW_PATTERNS or group.views.bound + self._grown >= limits.PATTERNS:
            raise errors.OverLimit(
                f"bind: too many patterns (expected at most {limits.VIEW_PATTERNS} a view, {limits.PATTERNS} a group)"
            )
        if searches and self._searches + searches > limits.PROGRAM_SEARCHES:
            raise errors.OverLimit(
                f"bind: {self._searches + searches} searches of messages (expected at most {limits.PROGRAM_SEARCHES} "
                "in all programs of a group)"
            )
        self._searches += searches

    def _bind(self, action: Action) -> None:
        name, pattern = action.stream or "", action.words[0]
        patterns = self._patterns_of(name)
        if pattern in patterns:
            return
        patterns[pattern] = None
        self._grown += 1
        now = self._group.tree.clock.wall_ns()
        self._changes.add({"do": "bind", "number": self._changes.next, "name": name, "pattern": pattern, "time": now})
        self._changes.next += 1
        self._changes.bound.setdefault(name, []).append(pattern)

    def _check_unbind(self, settings: Settings, action: Action) -> None:
        name, pattern = action.stream or "", action.words[0] if action.words else None
        patterns = self._patterns_of(name)
        if not patterns or (pattern is not None and pattern not in patterns):
            bound = f" bound to {pattern!r}" if pattern and patterns else ""
            raise errors.NotFound(f"no view {name!r}{bound} in group {self._group.name!r}")
        self._changes.require_unprotected(settings, action)
        if (view := self._group.views.get(name)) is not None:
            going = patterns if pattern is None else (pattern,)
            self._searches -= sum(p.searches for p in view.programs if p.text in patterns and p.text in going)

    def _unbind(self, action: Action) -> None:
        name, pattern = action.stream or "", action.words[0] if action.words else None
        patterns = self._patterns_of(name)
        before = len(patterns)
        if pattern is None:
            patterns.clear()
        else:
            patterns.pop(pattern, None)
        self._grown -= before - len(patterns)
        self._changes.add({"do": "unbind", "name": name, "pattern": pattern})

    # ------------------------------------------------------------ done

    def commit(self, losses: Losses) -> Work[None]:
        """Record the changes and losses, and put them in force; floors rise in portions. Raises DiskFailed, DiskFull,
        ReadOnly; then none of the changes is in force."""
        group, settings, changes = self._group, self._changes.settings, self._changes
        if settings != group.settings:
            self._changes.add({"do": "ctl", "lines": settings.lines(given=True)})
        counted = [(stream, counted_of(stream.kept, sizes)) for stream, sizes in self._drops.items()]
        removed, refreshed = (lines.removed, lines.refreshed) if (lines := self._consumers) is not None else ([], [])
        for consumer in removed:
            consumer.exclusives.release_all()
        covered = group.consumers.before_removal(removed) if removed else []
        if changes.rows or self._steps or losses.floors:
            drafts = [*changes.drafts, *progress_of(lines.recorded if lines is not None else ())]
            group.log.change(*changes.rows, acks=self._steps, floors=losses.floors, drafts=drafts)
        group.commands.count += 1
        group.waiting.left = limits.PASSED_MESSAGES
        carrying_out = group.portions.owe(losses.carry_out())
        respelled = settings.words != group.settings.words
        if settings != group.settings:
            group.put_in_force(settings)
        if self._patterns or respelled:
            group.views.refresh(*self._patterns)
        if removed:
            group.consumers.removed(removed, covered)
        if refreshed:
            group.consumers.refresh(refreshed)
        for stream, (count, size) in counted:
            stream.kept.on_deleted(size, count)
            group.held.dropped(list(self._late[stream]))
        yield from carrying_out
        yield from losses.bound()


def progress_of(consumers: Iterable[Consumer]) -> Iterator[Draft]:
    """Yield the records by which the log has the progress of these consumers. They are not applied: the consumers have
    it already, and their claims refer to it."""
    for consumer in consumers:
        for steps in consumer.progress.whole():
            yield Draft(Kind.ACK, consumer.number, steps)


class Line(NamedTuple):
    """How a plan checks and adds an action."""

    check: Callable[[Plan, Settings, Action], None]  # raises the error of the line
    add: Callable[[Plan, Action], None] | None = None  # none: `write_messages` or Losses do it, or `_plan_drops`


_LINES = {  # each action of settings.USAGE
    "eof": Line(Plan._check_eof),
    "clear": Line(Plan._check_clear),
    "redrive": Line(Plan._check_redrive),
    "drop": Line(Plan._check_drop),
    "unschedule": Line(Plan._check_unschedule),
    "bind": Line(Plan._check_bind, Plan._bind),
    "unbind": Line(Plan._check_unbind, Plan._unbind),
    **dict.fromkeys(
        CONSUMER_ACTIONS,
        Line(
            lambda plan, settings, action: plan._consumer_lines().check(settings, action),
            lambda plan, action: plan._consumer_lines().add(action),
        ),
    ),
}


def _patterns_of(view: View | None) -> list[str]:
    return list(view.state.patterns) if view is not None else []


# ------------------------------------------------------------ losses

# Messages that one write to `ctl` removes from streams: found in portions, recorded together, removed in portions.
#
#     find        of each stream the new floor; others are served between two streams
#     the log     has all floors, as one unit with the other changes of the write
#     carry_out   floors and counts of streams; without a pause where the state of the group is to be written
#
# A floor only rises: a floor that was found still holds when it is recorded. Messages written since the search began
# stay.

_FLOORS = 512  # in one record
_LOST_STEPS = 8  # streams between two looks at the clock: some 50 us


_RETAINING = attrgetter("replay", "ttl", "depth", "full", "dead")
Steps: TypeAlias = Sequence[tuple[Settings, Action | None]]  # settings and actions of lines


class Losses:
    """The messages that a write removes, or a part of it up to a line that writes messages."""

    def __init__(self, group: Group, steps: Steps) -> None:
        self.group, now = group, group.settings
        self.floors: list[Draft] = []  # for the log
        self._end = group.log.end.next  # messages from here on are not cleared
        settings = steps[-1][0] if steps else now
        verbs = {action.verb for _, action in steps if action is not None}
        named = {action.stream for _, action in steps if action is not None and action.verb == "clear"}
        self._forgets = _RETAINING(settings) != _RETAINING(now) and (not group.retention.keeps_all or now.ttl > 0)
        bounds = (settings.depth, settings.full) != (now.depth, now.full) and settings.full == "drop-old"
        self._depth = settings.depth if bounds and settings.depth is not NO_DEPTH else None
        self._dead = settings.dead
        self._is_thinned = not verbs.isdisjoint(("clear", "drop"))  # then a new `depth` cuts fewer messages, or none
        self._clears = None if None in named else {name for name in named if name is not None}
        self._taken: list[Callable[[], None]] = []  # the removals, one for each stream with losses

    def find(self) -> Work[None]:
        """Find the new floors of streams, without removing messages. In steps."""
        rows: list[list[int]] = []
        for count, stream in enumerate(self._streams(), 1):
            if count % _LOST_STEPS == 0:
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
        """Return the floor that a stream will have. Messages that the old settings no longer retained must not come
        back under new ones."""
        kept = stream.kept
        if self._clears is None or stream.name in self._clears:
            clearing = plan_clear(kept, self._end)
            if clearing.cut.gone or clearing.newest or clearing.cut.floor > kept.state.floor:
                self._taken.append(partial(kept.cleared, clearing))
            return clearing.cut.floor
        kept.update_low_watermark()
        if self._depth is None or self._is_thinned or stream.name == self._dead:
            return kept.state.floor
        cut = yield from cut_in_steps(kept, self._depth)
        if cut.gone:
            self._taken.append(partial(kept.carry_out_cut, cut))
        return max(cut.floor, kept.state.floor)

    def carry_out(self) -> Work[None]:
        """Remove the messages from the streams; the log has the floors already. In steps."""
        for count, take_out in enumerate(self._taken, 1):
            take_out()
            if count % _LOST_STEPS == 0:
                yield

    def bound(self) -> Work[None]:
        """Cut streams to a new `depth`: again if messages were written meanwhile, and only now if the write cleared or
        dropped some. In steps."""
        if self._depth is None or not (self._is_thinned or self.group.log.end.next != self._end):
            return
        for count, stream in enumerate(list(self.group.streams.values()), 1):
            if not stream.removed:
                self.group.retention.bound_depth(stream)
            if count % _LOST_STEPS == 0:
                yield


# ------------------------------------------------------------ settings and actions


def check_settings(group: Group, steps: Steps) -> None:
    """Check new settings. Raises Busy where `deliver` or `keep` would change under messages or readers, or dead letters
    would no longer be retained; BadCommand for an invalid stream name as `dead`, or `sync replica` without a
    replica."""
    now = group.settings
    others = {settings.dead for settings, _ in steps} - {now.dead}
    for name in others:
        try:
            check_name(name)
        except errors.BadName as error:
            raise errors.BadCommand(f"dead: {error.detail}") from None
    if others:
        group.require_no_dead_letters("dead", now, steps[-1][0])
    asked = steps[-1][0].sync if steps else now.sync
    if asked == SYNC_REPLICA != now.sync and group.tree.store.replication is None:
        raise errors.BadCommand(NO_REPLICA)
    for what in ("deliver", "keep"):
        if any(getattr(settings, what) != getattr(now, what) for settings, _ in steps):
            _require_empty(group, what)


def _require_empty(group: Group, what: str) -> None:
    if group.ring is not None:  # messages published in it count
        group.ring.drain()
    if what == "keep" and group.ring is not None:
        group.ring.retire("keep changes")
    for stream in group.streams.values():
        if stream.kept.count:
            stream.kept.update_low_watermark()
        if (count := stream.kept.count + stream.kept.held_count) > 0:
            raise errors.Busy(f"{what}: stream {stream.name!r} has {count} messages ('clear' or read them first)")
        if stream.opens:
            raise errors.Busy(f"{what}: stream {stream.name!r} is open (close it first)")
    if what == "keep" and (len(group.held) or group.ring is not None):
        raise errors.Busy("keep: the group has delayed messages, or messages that wait for room on the disk")


MESSAGE_ACTIONS = frozenset({"eof", "redrive"})


def short_steps(settings: Settings, action: Action) -> Steps:
    """Split a line that names messages into steps of some messages each."""
    every = action.sequences
    return [(settings, action._replace(sequences=every[n : n + _STEPS])) for n in range(0, len(every), _STEPS)]


def parts_of(steps: Steps) -> list[Steps]:
    """Split steps into parts. Each part but the last ends with an action that writes messages."""
    ends = [n + 1 for n, (_, action) in enumerate(steps) if action is not None and action.verb in MESSAGE_ACTIONS]
    return [steps[begin:end] for begin, end in pairwise([0, *ends, len(steps)])]


def write_messages(group: Group, action: Action) -> Work[None]:
    """Carry out a checked action that writes messages. Raises NotFound if its stream was removed while the changes
    before it were put in force."""
    name = action.stream
    if name is not None and name not in group.streams:
        raise group.no_stream(name)
    if action.verb == "eof":
        group.publisher.write(group.streams[name or ""], WriteRequest(Kind.END, (b"",), 0))
    else:
        yield from redelivery.redrive(group, name, action.sequences[0] if action.sequences else None)
