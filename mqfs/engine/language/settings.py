"""The language of `ctl`: settings and actions, parsed from lines and printed back.

This module executes nothing. Printed settings, written back, give the same settings. docs/contributing/hacking.md lists
what a new setting needs in the library, the tools and the documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import attrs

from mqfs import limits
from mqfs.engine.language import programs
from mqfs.errors import BadCommand, unknown
from mqfs.syntax.duration import MOST, parse_duration, parse_number, parse_size, print_duration, print_size
from mqfs.syntax.lines import quote, split
from mqfs.syntax.patterns import DOTTED, Words, check_words

SYNC_ALWAYS, SYNC_OFF, SYNC_REPLICA = 0, -1, -2
_VERB = 16  # characters of a command's name in an error: it may be any text


class Depth(NamedTuple):
    """The bound of one stream; 0: none."""

    messages: int = 0
    size: int = 0  # bytes


NO_DEPTH = Depth()


class Setting(NamedTuple):
    """How the value of a setting is parsed and printed."""

    parse: Callable[..., Any]  # called with the words of the value; raises BadCommand
    show: Callable[[Any], str] = str
    choices: tuple[str, ...] = ()  # the words allowed; none: any that `parse` accepts
    expected: str = ""  # for error texts, if it has several words
    words: tuple[int, ...] = (1,)  # the numbers of words allowed
    is_newer: bool = False  # the default is not recorded in the log, as older servers do not know the setting


def parse_depth(word: str) -> Depth:
    """Parse a number of messages, or of bytes. Raises BadCommand."""
    size = parse_size(word)
    if size is None:
        try:
            return Depth(messages=parse_number(word)) if parse_number(word) else NO_DEPTH
        except BadCommand:
            raise BadCommand(
                f"invalid bound {word!r} (expected a number of messages, or bytes as 512B, 64K, 10M, 1G)"
            ) from None
    if size > MOST:
        raise BadCommand(f"bound {word!r}: too large (expected at most {MOST} bytes)")
    return Depth(size=size) if size else NO_DEPTH


def _print_depth(depth: Depth) -> str:
    return print_size(depth.size) if depth.size else str(depth.messages)


def _parse_sync(word: str) -> int:
    if word in _SYNC:
        return _SYNC[word]
    try:
        value = parse_duration(word)
    except BadCommand:
        value = 0
    if not value:
        raise BadCommand(f"invalid time {word!r} (expected always, off, replica, or a duration such as 10ms or 1s)")
    return value


def _print_sync(value: int) -> str:
    return next((word for word, known in _SYNC.items() if known == value), "") or print_duration(value)


def _parse_backoff(*words: str) -> tuple[int, int]:
    least, most = map(parse_duration, words)
    if least > most:
        raise BadCommand(f"backoff {' '.join(words)}: the first is longer (expected least, then most)")
    return least, most


def _row(parse: Callable[..., Any], show: Callable[[Any], str] = str, **more: Any) -> dict[str, Setting]:
    return {"row": Setting(parse, show, **more)}


def _choice(*words: str, **more: Any) -> Any:
    """Make a field for a setting with one of these words; the first is the default."""
    return attrs.field(default=words[0], metadata=_row(str, choices=words, **more))


def _switch(**more: Any) -> Any:
    return attrs.field(
        default=False,
        metadata=_row(lambda word: word == "on", lambda on: "on" if on else "off", choices=("on", "off"), **more),
    )


def _duration(default: int = 0, **more: Any) -> Any:
    return attrs.field(default=default, metadata=_row(parse_duration, print_duration, **more))


_SYNC = {"always": SYNC_ALWAYS, "off": SYNC_OFF, "replica": SYNC_REPLICA}
POLICIES = ("drop-old", "drop-new", "block", "reject")  # values of `full`


@attrs.frozen
class Settings:
    """The settings of a group, in the order in which they are printed. Durations in ns; 0: never or for ever."""

    data: str = _choice("message", "line", "coalesce")
    replay: str = _choice("off", "last", "key", "all")
    depth: Depth = attrs.field(default=NO_DEPTH, metadata=_row(parse_depth, _print_depth))
    ttl: int = _duration()
    deliver: str = _choice("all", "one")
    ack: str = _choice("read", "next")  # printed with `deliver one`
    full: str = _choice(*POLICIES)
    sync: int = attrs.field(default=SYNC_ALWAYS, metadata=_row(_parse_sync, _print_sync))
    keep: str = _choice("disk", "ring")
    ring: str = _choice("owner", "off", "all", is_newer=True)  # who may attach to shared memory
    lease: int = _duration()
    retries: int = attrs.field(default=5, metadata=_row(parse_number))  # 0 = no bound
    backoff: tuple[int, int] = attrs.field(
        default=(10**9, 5 * 60 * 10**9),
        metadata=_row(
            _parse_backoff,
            lambda times: " ".join(map(print_duration, times)),
            expected="the shortest and the longest time, such as 1s 5m",
            words=(2,),
        ),
    )
    dead: str = attrs.field(
        default="dead", metadata=_row(str, quote)
    )  # stores hold names of older versions: see ctl.py
    order: str = _choice("sequence", "expiry")
    dedup: int = _duration(2 * 60 * 10**9)
    idle: int = _duration()
    protect: bool = _switch()
    sender: bool = _switch(is_newer=True)  # whether every message gets the header `sender`
    words: Words = attrs.field(  # separator and wildcards of the group's patterns
        default=DOTTED,
        metadata=_row(
            lambda *words: check_words(Words(*words)),
            lambda words: " ".join(map(quote, words.listed)),
            expected="a separator and two or three wildcards, such as . * #",
            words=(3, 4),
            is_newer=True,
        ),
    )
    full_was_set: bool = False  # whether a line has set `full`; else it follows `deliver`

    def lines(self, *, given: bool = False) -> list[str]:
        """Return every setting as a ctl line, `ack` only under `deliver one`. `given`: without a `full` that no line
        has set, and without newer settings that have their default."""
        values = ((key, row, getattr(self, key)) for key, row in SETTINGS.items())
        return [f"{key} {row.show(value)}" for key, row, value in values if not self._is_hidden(key, value, given)]

    def _is_hidden(self, key: str, value: Any, given: bool) -> bool:
        if key == "ack":
            return self.deliver != "one"
        if key == "full":
            return given and not self.full_was_set
        return given and SETTINGS[key].is_newer and value == _DEFAULTS[key]

    def backoff_after(self, failed: int) -> int:
        """Return the ns that a message waits after its `failed`th failed delivery: the least time, doubled each time,
        up to the most."""
        least, most = self.backoff
        return min(most, least << min(failed - 1, 62))


SETTINGS: dict[str, Setting] = {field.name: field.metadata["row"] for field in attrs.fields(Settings) if field.metadata}
_DEFAULTS = attrs.asdict(Settings(), recurse=False)


class Action(NamedTuple):
    """A line that is executed once: `eof S`, `clear [S]`, `drop S SEQ...`, `consumer NAME ...`."""

    verb: str
    stream: str | None  # the first word: a stream's name, or a consumer's or view's
    sequences: tuple[int, ...] = ()
    words: tuple[str, ...] = ()  # the words after the first
    line: int = 0  # its line number; 0: the only line


def parse(text: str, settings: Settings) -> list[tuple[Settings, Action | None]]:
    """Return everything that `read` yields."""
    return list(read(text, settings))


def read(text: str, settings: Settings) -> Iterator[tuple[Settings, Action | None]]:
    """Yield for each command line of `text`, in order, the settings after it, and its action if it is one.

    Raises BadCommand as `in_line` makes it; then no line of the text may be executed.
    """
    is_one_of_several = "\n" in text.strip()
    for number, line in enumerate(text.split("\n"), 1):
        try:
            words = split_line(line)
            if not words:
                continue
            action = _action(words, number if is_one_of_several else 0) if words[0] in USAGE else None
            if action is None:
                settings = _setting(words, settings)
        except BadCommand as error:
            raise in_line(error, line, number, text) from None
        yield settings, action


def in_line(error: BadCommand, line: str, number: int, text: str) -> BadCommand:
    """Return an error for a line of commands: with the verb, and with the line's number if `text` has several lines."""
    verb, detail = line.split(None, 1)[0][:_VERB], error.detail
    if not detail.startswith((verb, "unknown ")):
        detail = f"{verb}: {detail}"
    return BadCommand(f"line {number}: {detail}" if "\n" in text.strip() else detail)


def split_line(line: str) -> list[str]:
    """Split a line into words; after `bind NAME` a program is the rest of the line. Raises BadCommand."""
    verb = line.split(None, 1)[:1]
    if verb in (["bind"], ["unbind"], ["words"]) and line.rstrip().endswith(" #"):
        return [*split(line), "#"]  # the pattern of everything: a comment would have a text
    if verb in (["bind"], ["unbind"]):
        name, rest = programs.binding(line)
        return [verb[0], name, rest] if rest else [verb[0], name]
    return split(line)


def parse_settings(lines: Sequence[str]) -> Settings:
    """Parse settings, on top of the defaults, from lines without actions. Raises BadCommand."""
    return _parse_settings("\n".join(lines))


@lru_cache(limits.SHARED_SETTINGS)  # most groups of a store have the same
def _parse_settings(text: str) -> Settings:
    steps = parse(text, Settings())
    for _, action in steps:
        if action is not None:
            raise BadCommand(f"{action.verb}: an action (expected a setting)")
    return steps[-1][0] if steps else Settings()


USAGE = {  # the grammar of each action: words in [] are optional, ... is any number
    "eof": "eof STREAM",
    "clear": "clear [STREAM]",
    "drop": "drop STREAM SEQUENCE...",
    "unschedule": "unschedule ID",
    "redrive": "redrive [STREAM [COUNT]]",
    "consumer": "consumer NAME [STREAM|VIEW] [transient] [private] [memory] [backlog N] [full POLICY] [order key]",
    "remove": "remove CONSUMER",
    "limit": "limit CONSUMER N [key]",
    "rate": "rate CONSUMER N/TIME",
    "breaker": "breaker CONSUMER N/TIME",
    "pause": "pause CONSUMER [DURATION]",
    "resume": "resume CONSUMER",
    "bind": "bind NAME PATTERN|PROGRAM",
    "unbind": "unbind NAME [PATTERN|PROGRAM]",
}
_COUNTS = {  # the fewest and the most words after the verb
    verb: (len(usage.partition("[")[0].split()) - 1, 1 << 30 if "..." in usage else len(usage.split()) - 1)
    for verb, usage in USAGE.items()
}


def _setting(words: list[str], settings: Settings) -> Settings:
    key, given = words[0], words[1:]
    row = SETTINGS.get(key)
    if row is None:
        raise BadCommand(unknown("command", key, [*SETTINGS, *USAGE]))
    if len(given) not in row.words:
        raise BadCommand(f"{key}: {len(given)} values (expected {row.expected or 'one'})")
    if row.choices and given[0] not in row.choices:
        choices = f"{', '.join(row.choices[:-1])} or {row.choices[-1]}"
        raise BadCommand(f"{key} {given[0]!r}: unknown value (expected {choices})")
    value = row.parse(*given)
    if key == "deliver":
        return _set_deliver(value, settings)
    if key == "ack" and settings.deliver != "one":
        raise BadCommand("ack: only with 'deliver one' (write that line first)")
    if key == "data" and value == "coalesce" and settings.deliver == "one":
        raise BadCommand("data coalesce: not with 'deliver one' (expected 'deliver all')")
    if (key, value) == ("sync", SYNC_REPLICA) and settings.keep == "ring":
        raise BadCommand("sync replica: not with 'keep ring' (expected 'keep disk')")
    if (key, value) == ("keep", "ring") and settings.sync == SYNC_REPLICA:
        raise BadCommand("keep ring: not with 'sync replica' (expected another 'sync')")
    if key == "full":
        settings = evolve(settings, "full_was_set", True)
    return evolve(settings, key, value)


def _set_deliver(word: str, settings: Settings) -> Settings:
    if word == "one" and settings.data == "coalesce":
        raise BadCommand("deliver one: not with 'data coalesce' (expected 'data message')")
    if not settings.full_was_set:
        settings = evolve(settings, "full", "reject" if word == "one" else "drop-old")
    if word == "all":
        settings = evolve(settings, "ack", "read")
    return evolve(settings, "deliver", word)


def evolve(settings: Settings, key: str, value: Any) -> Settings:
    return attrs.evolve(settings, **{key: value})


def _action(words: list[str], line: int) -> Action:
    verb, arguments = words[0], words[1:]
    least, most = _COUNTS[verb]
    if not least <= len(arguments) <= most:
        raise BadCommand(f"{verb}: {len(arguments)} values (expected {USAGE[verb]})")
    name = arguments[0] if arguments else None
    if verb in ("drop", "redrive"):
        return Action(verb, name, tuple(parse_number(word) for word in arguments[1:]), (), line)
    return Action(verb, name, (), tuple(arguments[1:]), line)
