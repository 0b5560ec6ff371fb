"""The language of `ctl`: settings and actions, read from lines and printed back.

Performs nothing. Printed settings, written back, give the same settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import attrs

from mqfs.engine.language import programs
from mqfs.errors import BadCommand
from mqfs.syntax.duration import MOST, parse_duration, parse_number, parse_size, print_duration, print_size
from mqfs.syntax.patterns import DOTTED, Words, check_words
from mqfs.syntax.quoting import quote, split

SYNC_ALWAYS, SYNC_OFF = 0, -1


class Depth(NamedTuple):
    """A bound of one stream; 0 = none."""

    messages: int = 0
    size: int = 0  # bytes


NO_DEPTH = Depth()


@attrs.frozen
class Settings:
    """The settings of a group. Durations in ns, 0 = never or for ever."""

    data: str = "message"
    replay: str = "off"
    depth: Depth = NO_DEPTH
    ttl: int = 0
    full: str = "drop-old"
    full_was_set: bool = False  # else it follows `deliver`
    sync: int = SYNC_ALWAYS
    keep: str = "disk"
    ring: str = "owner"  # who may attach to shared memory
    deliver: str = "all"
    ack: str = "read"
    lease: int = 0
    retries: int = 5  # 0 = no bound
    backoff: tuple[int, int] = (10**9, 5 * 60 * 10**9)
    dead: str = "dead"
    order: str = "sequence"
    dedup: int = 2 * 60 * 10**9
    idle: int = 0
    protect: bool = False
    sender: bool = False  # every message gets the header of that name
    words: Words = DOTTED  # of the patterns of the group

    def lines(self, *, given: bool = False) -> list[str]:
        """Every setting as a ctl line; `given`: without what only follows from others."""
        sync = {SYNC_ALWAYS: "always", SYNC_OFF: "off"}.get(self.sync) or print_duration(self.sync)
        lines = [
            f"data {self.data}",
            f"replay {self.replay}",
            f"depth {_print_depth(self.depth)}",
            f"ttl {print_duration(self.ttl)}",
            f"deliver {self.deliver}",
            f"full {self.full}",
            f"sync {sync}",
            f"keep {self.keep}",
            f"ring {self.ring}",
            f"lease {print_duration(self.lease)}",
            f"retries {self.retries}",
            f"backoff {' '.join(map(print_duration, self.backoff))}",
            f"dead {quote(self.dead)}",
            f"order {self.order}",
            f"dedup {print_duration(self.dedup)}",
            f"idle {print_duration(self.idle)}",
            f"protect {'on' if self.protect else 'off'}",
            f"sender {'on' if self.sender else 'off'}",
            f"words {' '.join(map(quote, self.words.listed))}",
        ]
        if given and not self.full_was_set:
            lines.remove(f"full {self.full}")
        if given and self.ring == "owner":
            lines.remove("ring owner")  # older servers read the log, too
        if given and not self.sender:
            lines.remove("sender off")
        if given and self.words == DOTTED:
            lines.pop()  # as above
        if self.deliver == "one":
            lines.insert(5, f"ack {self.ack}")
        return lines

    def backoff_after(self, failed: int) -> int:
        """How long a message waits after that many failed deliveries, ns: the shortest time, doubled with each."""
        least, most = self.backoff
        return min(most, least << min(failed - 1, 62))


class Action(NamedTuple):
    """A line that does something once: `eof S`, `clear [S]`, `drop S SEQ...`, `consumer NAME ...`."""

    verb: str
    stream: str | None  # the first word: a stream's name, or a consumer's or view's
    sequences: tuple[int, ...] = ()
    words: tuple[str, ...] = ()  # what follows


def parse(text: str, settings: Settings) -> list[tuple[Settings, Action | None]]:
    """As `read`, all of it."""
    return list(read(text, settings))


def read(text: str, settings: Settings) -> Iterator[tuple[Settings, Action | None]]:
    """Each command line of `text`, in order: the settings then in force, and the action if it is one.

    Raises BadCommand naming the line; then nothing of the text counts.
    """
    for line in text.split("\n"):
        try:
            words = split_line(line)
            if not words:
                continue
            action = _action(words) if words[0] in _ACTIONS else None
            if action is None:
                settings = _setting(words, settings)
        except BadCommand as error:
            raise BadCommand(f"{line.strip()!r}: {error.detail}") from None
        yield settings, action


def split_line(line: str) -> list[str]:
    """The words of a line; behind `bind NAME` a program is the rest of it, as it stands. Raises BadCommand."""
    verb = line.split(None, 1)[:1]
    if verb in (["bind"], ["unbind"], ["words"]) and line.rstrip().endswith(" #"):
        return [*split(line), "#"]  # the pattern of everything; a comment would go on
    if verb in (["bind"], ["unbind"]):
        name, rest = programs.binding(line)
        return [verb[0], name, rest] if rest else [verb[0], name]
    return split(line)


def parse_settings(lines: Sequence[str]) -> Settings:
    """Settings from lines that hold no action, on top of the defaults. Raises BadCommand."""
    steps = parse("\n".join(lines), Settings())
    for _, action in steps:
        if action is not None:
            raise BadCommand(f"{action.verb}: a default is a setting, not an action")
    return steps[-1][0] if steps else Settings()


def _parse_depth(word: str) -> Depth:
    return parse_depth(word)


def parse_depth(word: str, verb: str = "depth") -> Depth:
    """A number of messages, or bytes. Raises BadCommand, which begins with the verb."""
    size = parse_size(word)
    if size is None:
        try:
            return Depth(messages=parse_number(word)) if parse_number(word) else NO_DEPTH
        except BadCommand:
            raise BadCommand(f"{verb} {word!r}: write a number of messages, or bytes as 512B, 64K, 10M, 1G") from None
    if size > MOST:
        raise BadCommand(f"{verb} {word!r} is too large")
    return Depth(size=size) if size else NO_DEPTH


def _print_depth(depth: Depth) -> str:
    return print_size(depth.size) if depth.size else str(depth.messages)


def _parse_sync(word: str) -> int:
    if word in ("always", "off"):
        return SYNC_ALWAYS if word == "always" else SYNC_OFF
    try:
        value = parse_duration(word)
    except BadCommand:
        value = 0
    if not value:
        raise BadCommand(f"sync {word!r}: write always, off, or a duration such as 10ms or 1s")
    return value


def _parse_stored(word: str) -> str:
    """A name as it is: stores hold those of older versions. ctl.py checks a new one."""
    return word


POLICIES = ("drop-old", "drop-new", "block", "reject")  # of `full`
_WORDS = {
    "data": ("message", "line", "coalesce"),
    "replay": ("off", "last", "all"),
    "full": POLICIES,
    "deliver": ("all", "one"),
    "ack": ("read", "next"),
    "order": ("sequence", "expiry"),
    "keep": ("disk", "ring"),
    "ring": ("owner", "off", "all"),
    "protect": ("on", "off"),
    "sender": ("on", "off"),
}
_VALUES = {
    "depth": _parse_depth,
    "ttl": parse_duration,
    "sync": _parse_sync,
    "idle": parse_duration,
    "lease": parse_duration,
    "retries": parse_number,
    "dead": _parse_stored,
    "dedup": parse_duration,
}
_ACTIONS = {
    "eof": (1, 1),
    "clear": (0, 1),
    "drop": (2, 1 << 30),
    "redrive": (0, 2),
    "consumer": (1, 9),
    "remove": (1, 1),
    "bind": (2, 2),
    "unbind": (1, 2),
}
USAGE = {
    "eof": "eof STREAM",
    "clear": "clear [STREAM]",
    "drop": "drop STREAM SEQUENCE...",
    "redrive": "redrive [STREAM [COUNT]]",
    "consumer": "consumer NAME [STREAM|VIEW] [transient] [private] [memory] [backlog N] [full POLICY]",
    "remove": "remove CONSUMER",
    "bind": "bind NAME PATTERN|PROGRAM",
    "unbind": "unbind NAME [PATTERN|PROGRAM]",
}


def _setting(words: list[str], settings: Settings) -> Settings:
    key = words[0]
    if key not in _WORDS and key not in _VALUES and key not in _OF_SEVERAL:
        known = " ".join([*_WORDS, *_VALUES, *_OF_SEVERAL, *_ACTIONS])
        raise BadCommand(f"unknown command {key!r}; there are: {known}")
    if key in _OF_SEVERAL:
        return _OF_SEVERAL[key](words, settings)
    if len(words) != 2:
        raise BadCommand(f"{key} takes one value, not {len(words) - 1}")
    word = words[1]
    if key in _VALUES:
        return evolve(settings, key, _VALUES[key](word))
    if word not in _WORDS[key]:
        raise BadCommand(f"{key} {word!r}: write {' or '.join(_WORDS[key])}")
    if key == "deliver":
        return _set_deliver(word, settings)
    if key == "ack" and settings.deliver != "one":
        raise BadCommand("ack is a matter of 'deliver one'; write that line first")
    if key == "data" and word == "coalesce" and settings.deliver == "one":
        raise BadCommand("data coalesce has no messages to hand to one reader each; write 'deliver all' first")
    if key == "full":
        settings = evolve(settings, "full_was_set", True)
    return evolve(settings, key, word == "on" if key in ("protect", "sender") else word)


def _set_backoff(words: list[str], settings: Settings) -> Settings:
    if len(words) != 3:
        raise BadCommand("backoff takes the shortest and the longest time, such as 1s 5m")
    least, most = parse_duration(words[1]), parse_duration(words[2])
    if least > most:
        raise BadCommand(f"backoff {words[1]} {words[2]}: the shortest time comes first")
    return evolve(settings, "backoff", (least, most))


def _set_words(words: list[str], settings: Settings) -> Settings:
    if len(words) not in (4, 5):
        raise BadCommand("words takes a separator and two or three wildcards, such as . * #")
    return evolve(settings, "words", check_words(Words(*words[1:])))


_OF_SEVERAL = {"backoff": _set_backoff, "words": _set_words}  # values


def _set_deliver(word: str, settings: Settings) -> Settings:
    if word == "one" and settings.data == "coalesce":
        raise BadCommand("deliver one hands out messages and data coalesce has none; write 'data message' first")
    if not settings.full_was_set:
        settings = evolve(settings, "full", "reject" if word == "one" else "drop-old")
    if word == "all":
        settings = evolve(settings, "ack", "read")
    return evolve(settings, "deliver", word)


def evolve(settings: Settings, key: str, value: Any) -> Settings:
    return attrs.evolve(settings, **{key: value})


def _action(words: list[str]) -> Action:
    verb, arguments = words[0], words[1:]
    least, most = _ACTIONS[verb]
    if not least <= len(arguments) <= most:
        raise BadCommand(f"usage: {USAGE[verb]}")
    name = arguments[0] if arguments else None
    if verb in ("drop", "redrive"):
        return Action(verb, name, tuple(parse_number(word) for word in arguments[1:]))
    return Action(verb, name, (), tuple(arguments[1:]))
