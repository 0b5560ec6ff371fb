"""Durations as `ctl` has them: `0`, `10ms`, `30s`, `5m`, `2h`, `7d`."""

from __future__ import annotations

import re

from mqfs.errors import BadCommand
from mqfs.syntax.size import MOST

_DURATION = re.compile(r"([0-9]{1,19})(ms|s|m|h|d)\Z")
_UNITS_NS = {"ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9, "d": 86400 * 10**9}


def parse_duration(word: str) -> int:
    """Nanoseconds. Raises BadCommand."""
    if word == "0":
        return 0
    match = _DURATION.match(word)
    if match is None or (value := int(match[1]) * _UNITS_NS[match[2]]) > MOST:
        raise BadCommand(f"{word!r} is no duration; write 0, 10ms, 30s, 5m, 2h or 7d")
    return value


def print_duration(ns: int) -> str:
    """In the largest unit that has no rest."""
    for unit in ("d", "h", "m", "s", "ms"):
        if ns and ns % _UNITS_NS[unit] == 0:
            return f"{ns // _UNITS_NS[unit]}{unit}"
    return "0"
