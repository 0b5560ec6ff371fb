"""Lines of a write to `ctl` that concern consumers, checked and planned before any is in force.

check      whether a line can be carried out, as the lines before it leave things
add        its change for the log; a new consumer is made, and is not shown yet
holds      whether the consumers and messages that lines found are as they were then
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from mqfs import errors, limits
from mqfs.engine.core.log import draft_of
from mqfs.engine.delivery.consumer import Consumer
from mqfs.engine.delivery.registry import plan, streams_over, unclaimed
from mqfs.engine.language import programs
from mqfs.engine.language.settings import POLICIES, USAGE, Action, Settings
from mqfs.errors import unknown
from mqfs.model import Draft, User
from mqfs.state.group import Change, Slot, new_consumer
from mqfs.state.rules import NO_RULES, RULES, Rules, parse_rule
from mqfs.syntax.duration import parse_number
from mqfs.syntax.names import check_name
from mqfs.syntax.patterns import compile_pattern

if TYPE_CHECKING:
    from mqfs.engine.group import Group
    from mqfs.engine.stream import Stream

CONSUMER_ACTIONS = frozenset({"consumer", "remove", *RULES})


class Changes:
    """The changes of a write's lines so far, as the log will have them and later lines find them. `rehearsed`: the
    lines are only checked."""

    def __init__(self, group: Group, user: User, rehearsed: bool) -> None:
        self.group, self.user, self.rehearsed = group, user, rehearsed
        self.settings = group.settings
        self.rows: list[Change] = []
        self.drafts: list[Draft] = []  # the same, encoded for the log
        self.next = group.state.next_stream  # the number of the next file
        self.bound: dict[str, list[str]] = {}  # patterns that lines add to views

    def add(self, change: Change) -> Change:
        self.rows.append(change)
        if not self.rehearsed:
            self.drafts.append(draft_of(change))
        return change

    def require_unprotected(self, settings: Settings, action: Action) -> None:
        """Check that the group is not protected. Raises NotPermitted."""
        if settings.protect:
            raise errors.NotPermitted(
                f"{action.verb}: group {self.group.name!r} is protected (write 'protect off' first)"
            )


class ConsumerLines:
    """The lines of one write that name consumers."""

    def __init__(self, changes: Changes) -> None:
        self._changes, self._group = changes, changes.group
        self._found: dict[str, Consumer | None] = {}  # named consumers, as lines found them
        self._named: dict[str, tuple[int, str] | None] = {}  # (number, `over`); None: removed
        self._made = 0  # consumers added
        self._states: dict[str, tuple[Rules, Change]] = {}  # rules and options after these lines
        self._found_rules: dict[str, Rules] = {}  # rules, as lines found them
        self._ruled: set[str] = set()  # consumers whose rules a line has changed
        self._low: dict[tuple[str, str, int], Change] = {}  # changes that make consumers over the same streams
        self.refreshed: list[Consumer] = []  # new consumers, and those with other options
        self.removed: list[Consumer] = []
        self.recorded: dict[Consumer, None] = {}  # consumers whose acks are in the log from now on

    def check(self, settings: Settings, action: Action) -> None:
        """Check a line. Raises its error."""
        if action.verb == "consumer":
            self._check_consumer(action)
        elif action.verb in RULES:
            self._require(action.stream or "")
            parse_rule(action.verb, action.words, NO_RULES, 0)
        else:
            self._check_remove(settings, action)

    def add(self, action: Action) -> None:
        """Add the changes of a checked line."""
        if action.verb == "consumer":
            self._consumer(action)
        elif action.verb in RULES:
            self._set_rule(action)
        else:
            self._remove(action)

    def holds(self) -> bool:
        """Whether all that lines name is as they found it, and new consumers may still claim the same messages."""
        consumers = self._group.consumers
        return (
            all(name in consumers and consumers[name].state.rules == was for name, was in self._found_rules.items())
            and all(consumers.get(name) is found for name, found in self._found.items())
            and not any(consumer.claims for consumer in self.removed)
            and all(self._unclaimed(*key[:2]) == made["open"] for key, made in self._low.items())
        )

    def _known(self, name: str) -> tuple[int, str] | None:
        """Return the (number, `over`) that a consumer will have. None: there will be no consumer of that name."""
        if name in self._named:
            return self._named[name]
        consumer = self._found[name] = self._group.consumers.get(name)
        return (consumer.number, consumer.state.over) if consumer is not None else None

    def _require(self, name: str) -> tuple[int, str]:
        if (known := self._known(name)) is None:
            raise errors.NotFound(f"no consumer {name!r} in group {self._group.name!r}")
        return known

    # ------------------------------------------------------------ made, or with other options

    def _check_consumer(self, action: Action) -> None:
        group, name = self._group, action.stream or ""
        over, _, options = consumer_options(action)
        if (now := self._known(name)) is None:
            check_name(name)
            if len(group.consumers) + self._made >= limits.CONSUMERS:
                raise errors.OverLimit(f"consumer: too many (expected at most {limits.CONSUMERS} in a group)")
            if over and over not in group.streams and over not in group.views:
                check_name(over)
        elif now[1] != over:
            raise errors.Exists(f"consumer: {name!r} exists, over {now[1] or 'the whole group'} (remove it first)")
        known = group.consumers.get(name)
        if known is not None and now is not None and options.get("memory", False) and not known.state.memory:
            raise errors.Exists(f"consumer: {name!r} exists, without 'memory' (remove it first)")

    def _consumer(self, action: Action) -> None:
        """Make a consumer, or change its options."""
        group, changes, name = self._group, self._changes, action.stream or ""
        over, ordered, options = consumer_options(action)
        rules = self._rules_of(name)
        rules = rules if ordered is None else attrs.evolve(rules, ordered=ordered)
        self._states[name] = rules, options
        known = self._known(name)
        number = changes.next if known is None else known[0]
        if known is None:
            changes.next, self._made, self._named[name] = number + 1, self._made + 1, (number, over)
        if changes.rehearsed:
            return
        if known is not None:
            self._change(name, number)
            return
        more = {"rules": rules.encode()} if rules != NO_RULES else {}
        change = changes.add({**self._beginning(over), "name": name, "number": number, **options, **more})
        change["state"] = new_consumer(change)
        self.refreshed.append(Consumer(group, change["state"]))

    def _change(self, name: str, number: int) -> None:
        """Change options and rules of a consumer that exists, or that an earlier line makes."""
        rules, options = self._states[name]
        consumer = self._group.consumers.get(name)
        if consumer is not None and consumer.number == number:
            self.refreshed.append(consumer)
            if consumer.state.memory and not options.get("memory", False):
                self.recorded[consumer] = None
        if name in self._ruled or rules != NO_RULES or (consumer is not None and consumer.state.rules != NO_RULES):
            self._ruled.add(name)
            options = {**options, "rules": rules.encode()}
        self._changes.add({"do": "consumer", "number": number, **options})

    def _rules_of(self, name: str) -> Rules:
        """Return the rules of a consumer after the earlier lines."""
        if name in self._states:
            return self._states[name][0]
        consumer = self._group.consumers.get(name) if self._known(name) is not None else None
        if consumer is None:
            return NO_RULES
        self._found_rules[name] = consumer.state.rules
        return consumer.state.rules

    def _set_rule(self, action: Action) -> None:
        group, name = self._group, action.stream or ""
        number, _ = self._require(name)
        rules = parse_rule(action.verb, action.words, self._rules_of(name), group.clock.engine_ns())
        if name in self._states:
            options = self._states[name][1]
        else:
            options = group.consumers[name].state.options()
        self._states[name] = rules, options
        if not self._changes.rehearsed:
            self._change(name, number)

    def _beginning(self, over: str) -> Change:
        """Return the change that makes a consumer. It is cached: a write may make thousands over the same streams."""
        group, replay = self._group, self._changes.settings.replay
        key = over, replay, len(self._changes.bound.get(over, ()))
        if key not in self._low:
            looks = replay in ("last", "key") or group.ranks.streams_with_exclusives()
            streams = self._streams_of(over) if looks else []
            self._low[key] = plan(group, 0, "", over, self._changes.user, 0o666, replay, streams)
        return self._low[key]

    def _unclaimed(self, over: str, replay: str) -> list[Slot]:
        group = self._group
        looks = replay == "key" or group.ranks.streams_with_exclusives()
        return unclaimed(group, replay, self._streams_of(over)) if looks else []

    def _streams_of(self, over: str) -> list[Stream]:
        """Return the streams that `over` covers, including those of a view that the same write binds."""
        group, bound = self._group, self._changes.bound.get(over, [])
        streams = streams_over(group, over) if over in group.views or not bound else []
        if not bound or any(programs.is_program(text) for text in bound):
            return streams or streams_over(group, "")
        matches = [compile_pattern(text, self._changes.settings.words) for text in bound]
        others = [s for s in streams_over(group, "") if s not in streams and any(m(s.name) for m in matches)]
        return [*streams, *others]

    # ------------------------------------------------------------ removed

    def _check_remove(self, settings: Settings, action: Action) -> None:
        name = action.stream or ""
        self._require(name)
        self._changes.require_unprotected(settings, action)
        consumer = self._group.consumers.get(name)
        if consumer is not None and consumer.claims:
            raise errors.Busy(f"remove: consumer {name!r} holds {len(consumer.claims)} claims (settle them first)")

    def _remove(self, action: Action) -> None:
        name = action.stream or ""
        known = self._known(name)
        self._named[name] = None
        self._states.pop(name, None)
        self._made -= 1
        self._changes.add({"do": "forget", "number": known and known[0]})
        consumer = self._group.consumers.get(name)
        if consumer is not None and known is not None and consumer.number == known[0]:
            self.removed.append(consumer)


# ------------------------------------------------------------ options


def consumer_options(action: Action) -> tuple[str, bool | None, Change]:
    """Parse `consumer NAME ...`. Return the stream or view that it is over, whether it has `order key` (None:
    unchanged), and its options as in the log. Raises BadCommand."""
    words = list(action.words)
    over = words.pop(0) if words and words[0] not in _CONSUMER_WORDS else ""
    ordered: bool | None = None
    options: Change = {"transient": False, "private": False, "backlog": 0}
    while words:
        word = words.pop(0)
        if word in _CONSUMER_FLAGS:
            options[word] = True
        elif word == "backlog" and words:
            options[word] = parse_number(words.pop(0))
        elif word == "full" and words and words[0] in POLICIES:
            options[word] = words.pop(0)
        elif word == "order" and words and words[0] in _ORDERS:
            ordered = words.pop(0) == "key"
        elif word == "order" and words:
            raise errors.BadCommand(f"consumer: {unknown('order', words[0], _ORDERS)}")
        elif word == "full" and words:
            raise errors.BadCommand(f"consumer: {unknown('policy', words[0], POLICIES)}")
        elif word in _CONSUMER_WORDS:
            raise errors.BadCommand(f"consumer: {word} without a value (expected {USAGE['consumer']})")
        else:
            raise errors.BadCommand(f"consumer: {unknown('option', word, _CONSUMER_WORDS)}")
    return over, ordered, options


_ORDERS = ("key", "sequence")
_CONSUMER_FLAGS = ("transient", "private", "memory")
_CONSUMER_WORDS: Sequence[str] = (*_CONSUMER_FLAGS, "backlog", "full", "order")
