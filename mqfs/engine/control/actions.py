"""What the lines of `ctl` do: settings and actions are checked, and become changes of the group, all or nothing.

The language itself is in settings.py.
"""

from __future__ import annotations

from itertools import pairwise

from mqfs import errors, limits
from mqfs.engine.control.changes import Changes
from mqfs.engine.control.losses import Losses, Steps
from mqfs.engine.delivery import dead_letters
from mqfs.engine.group import Group
from mqfs.engine.language import programs
from mqfs.engine.language.settings import POLICIES, USAGE, Action, Settings
from mqfs.engine.log.portions import exhaust
from mqfs.engine.publishing.admission import WriteRequest
from mqfs.engine.publishing.publisher import RECORD_BYTES
from mqfs.engine.stream import Stream
from mqfs.group_state import Change
from mqfs.model import Kind
from mqfs.syntax.names import check_name
from mqfs.syntax.patterns import check_pattern
from mqfs.syntax.size import parse_number


def check_settings(group: Group, steps: Steps) -> None:
    """Raises Busy where `deliver` or `keep` would change under messages or readers, or dead letters would be kept no
    more; BadCommand for a new `dead` that no stream can be called."""
    now = group.settings
    for name in {settings.dead for settings, _ in steps} - {now.dead}:
        try:
            check_name(name)
        except errors.BadName as error:
            raise errors.BadCommand(f"dead: {error.detail}") from None
    letters_of = group.streams.get(now.dead)
    if letters_of is not None and any(settings.dead != now.dead for settings, _ in steps):
        letters_of.kept.update_low_watermark()
        if letters_of.kept.count > 0 and now.deliver == "all" and now.replay != "all":
            raise errors.Busy(
                f"dead: {now.dead} keeps {letters_of.kept.count} dead letters; 'redrive' or 'clear' them first"
            )
    for what in ("deliver", "keep"):
        if any(getattr(settings, what) != getattr(now, what) for settings, _ in steps):
            _require_empty(group, what)


def _require_empty(group: Group, what: str) -> None:
    if what == "keep" and group.ring is not None:
        group.ring.retire("keep changes")
    for stream in group.streams.values():
        if stream.kept.count:
            stream.kept.update_low_watermark()
        if stream.kept.count > 0:
            raise errors.Busy(f"{what}: {stream.name} keeps {stream.kept.count} messages; 'clear' or read them first")
        if stream.opens:
            raise errors.Busy(f"{what}: {stream.name} is open")
    if what == "keep" and (len(group.held) or group.ring is not None):
        raise errors.Busy("keep: messages of the group wait for their time, or for room on the disk")


class ValidatedChange:
    """What the names will be as the actions of one write are carried out, so that all are checked before the first."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._consumers: dict[str, str | None] = {}  # named here -> what each will be over; None: removed
        self._views: dict[str, list[str]] = {}  # named here -> the patterns of each; without any it is removed
        self._grown = 0  # patterns added to all views together
        self._searches = group.views.searches  # of the programs that were looked at
        self._made = 0  # consumers added
        self._dropped: set[int] = set()

    def over(self, name: str) -> str | None:
        """What a consumer will be over; None where there will be none of that name."""
        if name in self._consumers:
            return self._consumers[name]
        consumer = self.group.consumers.get(name)
        return consumer.state.over if consumer is not None else None

    def patterns(self, name: str) -> list[str]:
        """The patterns that a view will have, for the caller to change; none: no such view."""
        if name not in self._views:
            view = self.group.views.get(name)
            self._views[name] = list(view.state.patterns) if view is not None else []
        return self._views[name]

    def check_words(self) -> None:
        """Raises Busy where patterns are bound: they would come to mean something else."""
        for name in dict.fromkeys([*self.group.views, *self._views]):
            if any(not programs.is_program(pattern) for pattern in self.patterns(name)):
                raise errors.Busy(f"words: view {name} is bound to patterns; 'unbind' them first")

    def check(self, settings: Settings, action: Action) -> None:
        """Raises what would stop the action."""
        try:
            getattr(self, f"_check_{action.verb}")(settings, action)
        except errors.MqfsError as error:
            if not error.detail.startswith(f"{action.verb}:"):
                raise type(error)(f"{action.verb}: {error.detail}") from None
            raise

    def _require_stream(self, action: Action) -> Stream:
        stream = self.group.streams.get(action.stream or "")
        if stream is None:
            raise errors.NotFound(f"{action.verb}: no stream {action.stream!r} in this group")
        return stream

    def _require_unprotected(self, settings: Settings, action: Action) -> None:
        if settings.protect:
            raise errors.NotPermitted(f"{action.verb}: the group is protected; write 'protect off' first")

    def _check_eof(self, settings: Settings, action: Action) -> None:
        self._require_stream(action)
        if settings.deliver == "one":
            raise errors.BadCommand("eof: not supported with 'deliver one'")
        self.group.retention.reserve_room(RECORD_BYTES)  # it is written when lines before it hold already

    def _check_clear(self, settings: Settings, action: Action) -> None:
        if action.stream is not None:
            self._require_stream(action)
        self._require_unprotected(settings, action)

    def _check_drop(self, settings: Settings, action: Action) -> None:
        stream = self._require_stream(action)
        self._require_unprotected(settings, action)
        group = self.group
        for sequence in action.sequences:
            if group.held.targets(stream, sequence):
                continue
            found = group.log.reader.locate(stream.number, sequence)
            gone = sequence < stream.kept.kept_from() or stream.kept.is_deleted(sequence)
            if gone or found is None or found[0] != sequence:
                raise errors.NotFound(f"drop: {stream.name} keeps no message {sequence}")
            self._dropped.add(sequence)
            if len(group.state.dropped) + len(self._dropped) > limits.DROPPED:
                raise errors.OverLimit(f"drop: at most {limits.DROPPED} messages dropped one by one")

    def _check_redrive(self, settings: Settings, action: Action) -> None:
        if action.stream is not None:
            self._require_stream(action)

    def _check_consumer(self, settings: Settings, action: Action) -> None:
        name = action.stream or ""
        over, options = consumer_options(action)
        if (now := self.over(name)) is None:
            check_name(name)
            if len(self.group.consumers) + self._made >= limits.CONSUMERS:
                raise errors.OverLimit(f"consumer: a group has at most {limits.CONSUMERS} consumers")
            self._made += 1
            if over and over not in self.group.streams and over not in self.group.views:
                check_name(over)
        elif now != over:
            raise errors.Exists(f"consumer {name} is over {now or 'the whole group'}; remove it first")
        known = self.group.consumers.get(name)
        if known is not None and now is not None and known.state.memory != options.get("memory", False):
            raise errors.Exists(
                f"consumer {name} is {'in' if known.state.memory else 'not in'} memory; remove it first"
            )
        self._consumers[name] = over

    def _check_remove(self, settings: Settings, action: Action) -> None:
        name = action.stream or ""
        if self.over(name) is None:
            raise errors.NotFound(f"remove: no consumer {name!r} in this group")
        self._require_unprotected(settings, action)
        consumer = self.group.consumers.get(name)
        if consumer is not None and consumer.claims:
            raise errors.Busy(f"remove: consumer {name} holds {len(consumer.claims)} claims")
        self._consumers[name] = None
        self._made -= 1

    def _check_bind(self, settings: Settings, action: Action) -> None:
        name, pattern = action.stream or "", action.words[0]
        if name not in self.group.views:
            check_name(name)
        if name in self.group.streams or name in self.group.groups:
            raise errors.Exists(f"bind: {name} is a stream or group; a view has a name of its own")
        searches = 0
        if programs.is_program(pattern):
            searches = programs.parse(pattern).searches
        else:
            check_pattern(pattern, settings.words)
        patterns = self.patterns(name)
        if pattern in patterns:
            return
        if len(patterns) >= limits.VIEW_PATTERNS or self.group.views.bound + self._grown >= limits.PATTERNS:
            raise errors.OverLimit(f"bind: at most {limits.VIEW_PATTERNS} a view, {limits.PATTERNS} a group")
        if searches and self._searches + searches > limits.PROGRAM_SEARCHES:
            raise errors.OverLimit(
                f"bind: {self._searches + searches} searches of messages (expected at most {limits.PROGRAM_SEARCHES} "
                "in all programs of a group)"
            )
        patterns.append(pattern)
        self._grown += 1
        self._searches += searches

    def _check_unbind(self, settings: Settings, action: Action) -> None:
        name = action.stream or ""
        patterns = self.patterns(name)
        pattern = action.words[0] if action.words else None
        if not patterns or (pattern is not None and pattern not in patterns):
            raise errors.NotFound(f"unbind: {name!r} is not bound{f' to {pattern!r}' if pattern and patterns else ''}")
        self._require_unprotected(settings, action)
        left = self._views[name] = [text for text in patterns if pattern not in (None, text)]
        self._grown -= len(patterns) - len(left)
        if (view := self.group.views.get(name)) is not None:
            self._searches -= sum(p.searches for p in view.programs if p.text in patterns and p.text not in left)


def consumer_options(action: Action) -> tuple[str, Change]:
    """What `consumer NAME ...` makes it over, and its options as in the log. Raises BadCommand."""
    words = list(action.words)
    over = words.pop(0) if words and words[0] not in _CONSUMER_WORDS else ""
    options: Change = {"transient": False, "private": False, "backlog": 0}
    while words:
        word = words.pop(0)
        if word in _CONSUMER_FLAGS:
            options[word] = True
        elif word == "backlog" and words:
            options[word] = parse_number(words.pop(0))
        elif word == "full" and words and words[0] in POLICIES:
            options[word] = words.pop(0)
        else:
            raise errors.BadCommand(f"consumer: {word!r}; write {USAGE['consumer']}")
    return over, options


_CONSUMER_FLAGS = ("transient", "private", "memory")
_CONSUMER_WORDS = (*_CONSUMER_FLAGS, "backlog", "full")
MESSAGE_ACTIONS = frozenset({"eof", "redrive"})
PASSING = frozenset({"bind", "drop", "remove"})  # what stops them may come without a change of its state: claims, say


def parts_of(steps: Steps) -> list[Steps]:
    """Each ends with an action that writes messages, but for the last."""
    ends = [n + 1 for n, (_, action) in enumerate(steps) if action is not None and action.verb in MESSAGE_ACTIONS]
    return [steps[begin:end] for begin, end in pairwise([0, *ends, len(steps)])]


def losses_now(group: Group, steps: Steps) -> Losses:
    """What a part of a write takes from streams, found at once: parts before it are done, and cannot be taken back."""
    losses = Losses(group, steps)
    exhaust(losses.find())
    return losses


def write_messages(group: Group, action: Action) -> None:
    """Carry out an action that was checked, and is no change of the group."""
    name = action.stream
    if action.verb == "eof":
        group.publisher.write(group.streams[name or ""], WriteRequest(Kind.END, (b"",), 0))
    else:
        dead_letters.redrive(group, name, action.sequences[0] if action.sequences else None)


def add(changes: Changes, group: Group, action: Action) -> None:
    """An action that was checked, to be carried out with others; not one that writes messages, or is a loss."""
    verb, name = action.verb, action.stream or ""
    if verb == "drop":
        changes.drop(group.streams[name], list(dict.fromkeys(action.sequences)))
    elif verb == "consumer":
        changes.consumer(name, *consumer_options(action))
    elif verb == "remove":
        changes.remove(name)
    elif verb == "bind":
        changes.bind(name, action.words[0])
    elif verb == "unbind":
        changes.unbind(name, action.words[0] if action.words else None)
