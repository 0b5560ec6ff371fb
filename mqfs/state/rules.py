"""The rules that hold back a consumer's messages: as recorded, and as lines of `ctl`. engine/delivery/flow.py applies
them.

order key       one message of a key is out at once, and the next of it waits until it is done
limit           claims at once: of the consumer, and of one key
rate, breaker   a number of deliveries, or of dead letters, in a time
paused          nothing is claimed

    limit NAME N [key] · rate NAME N/TIME · breaker NAME N/TIME · pause NAME [DURATION] · resume NAME

A time is a duration, `5m`, or a unit, `m`, which stands for `1m`. Printed rules, written back, give the same rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from mqfs import limits
from mqfs.errors import BadCommand
from mqfs.syntax.duration import parse_duration, parse_number, print_duration

UNTIL_RESUMED, TRIPPED = -1, -2  # values of `paused`: by hand, by the breaker
Pace = tuple[int, int]  # (a number, in this time in ns); (0, 0): none


@attrs.frozen
class Rules:
    """The rules of a consumer; the defaults are no rules."""

    ordered: bool = False  # `order key`
    limit: int = 0  # claims at once; 0: no bound
    key_limit: int = 0  # claims of one key at once; 0: no bound
    rate: Pace = (0, 0)  # deliveries
    breaker: Pace = (0, 0)  # dead letters: with more the consumer is paused
    paused: int = 0  # until that engine time, UNTIL_RESUMED or TRIPPED; 0: not at all

    @property
    def per_key(self) -> int:
        """Messages of one key that may be out at once; 0: no bound."""
        return 1 if self.ordered else self.key_limit

    def is_paused(self, now_ns: int) -> bool:
        return self.paused < 0 or now_ns < self.paused

    def encode(self) -> dict[str, Any]:
        """Return the rules that are set, as the log has them."""
        values = attrs.asdict(self, recurse=False)
        return {key: _plain(value) for key, value in values.items() if value != _NONE[key]}

    @classmethod
    def decode(cls, row: Mapping[str, Any]) -> Rules:
        """Return recorded rules; keys of a newer version are ignored. `row` has the shapes of state/group.py."""
        known: dict[str, Any] = {key: value for key, value in row.items() if key in _NONE}
        known |= {key: tuple(known[key]) for key in ("rate", "breaker") if key in known}
        return cls(**{**known, "ordered": bool(known.get("ordered"))})


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else int(value)


# ------------------------------------------------------------ lines of ctl


NO_RULES = Rules()
_NONE = attrs.asdict(NO_RULES, recurse=False)


RULES = ("limit", "rate", "breaker", "pause", "resume")
_UNITS = ("s", "m", "h", "d")
_MS = 10**6


def parse_rule(verb: str, words: Sequence[str], rules: Rules, now_ns: int) -> Rules:
    """Return the rules after a line. `words`: the words after the name; `now_ns`: engine time. Raises BadCommand."""
    if verb == "limit":
        if words[1:] not in ([], ["key"], (), ("key",)):
            raise BadCommand(f"limit: unexpected word {words[1]!r} (expected limit NAME N [key])")
        most = parse_number(words[0])
        return attrs.evolve(rules, key_limit=most) if words[1:] else attrs.evolve(rules, limit=most)
    if verb == "rate":
        rate = _parse_pace(verb, words[0])
        if rate[0] > rate[1]:
            raise BadCommand(f"rate {words[0]!r}: too fast (expected at most one in a nanosecond)")
        return attrs.evolve(rules, rate=rate)
    if verb == "breaker":
        breaker = _parse_pace(verb, words[0])
        if breaker[0] > limits.BREAKER:
            raise BadCommand(f"breaker {words[0]!r}: too many (expected at most {limits.BREAKER})")
        return attrs.evolve(rules, breaker=breaker)
    if verb == "resume":
        return attrs.evolve(rules, paused=0)
    pause_ns = parse_duration(words[0]) if words else 0
    if words and not pause_ns:
        raise BadCommand(f"pause: invalid duration {words[0]!r} (expected 1ms or more, or none)")
    return attrs.evolve(rules, paused=now_ns + pause_ns if words else UNTIL_RESUMED)


def _parse_pace(verb: str, word: str) -> Pace:
    """Parse `5/s` or `5/10s`; 0: none. Raises BadCommand."""
    number, slash, time = word.partition("/")
    try:
        count = parse_number(number)
        per_ns = parse_duration(f"1{time}" if time in _UNITS else time) if slash else 0
    except BadCommand:
        count, per_ns = 1, 0
    if (count > 0) != (per_ns > 0):
        raise BadCommand(
            f"{verb}: invalid value {word[:40]!r} (expected a number in a time, such as 5/s or 10/5m, or 0)"
        )
    return count, per_ns


def print_rules(rules: Rules, now_ns: int) -> Iterator[tuple[str, str]]:
    """Yield (verb, the words after the name) of each line."""
    if rules.limit:
        yield "limit", str(rules.limit)
    if rules.key_limit:
        yield "limit", f"{rules.key_limit} key"
    for verb, (count, per_ns) in (("rate", rules.rate), ("breaker", rules.breaker)):
        if count:
            text = print_duration(per_ns)
            yield verb, f"{count}/{text[1:] if text[:1] == '1' and text[1:] in _UNITS else text}"
    if rules.is_paused(now_ns):
        left_ns = rules.paused - now_ns
        yield "pause", print_duration(-(-left_ns // _MS) * _MS) if rules.paused > 0 else ""
