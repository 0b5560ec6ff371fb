"""Durations as `ctl` has them: `0`, `10ms`, `30s`, `5m`, `2h`, `7d`."""

from __future__ import annotations

import math
import re
from datetime import datetime, timedelta

from mqfs.errors import BadCommand, BadRequest

_DURATION = re.compile(r"([0-9]{1,19})(ms|s|m|h|d)\Z")
_UNITS_NS = {"ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9, "d": 86400 * 10**9}


def parse_duration(word: str) -> int:
    """Return nanoseconds. Raises BadCommand."""
    if word == "0":
        return 0
    match = _DURATION.match(word)
    if match is None or (value := int(match[1]) * _UNITS_NS[match[2]]) > MOST:
        raise BadCommand(f"invalid duration {word!r} (expected 0, 10ms, 30s, 5m, 2h or 7d)")
    return value


def print_duration(ns: int) -> str:
    """Return a duration of whole milliseconds in the largest unit without a remainder."""
    for unit in ("d", "h", "m", "s", "ms"):
        if ns and ns % _UNITS_NS[unit] == 0:
            return f"{ns // _UNITS_NS[unit]}{unit}"
    return "0"


def format_duration(value: float | str | timedelta) -> str:
    """Return seconds or a timedelta in whole milliseconds, rounded up, so that only 0 becomes `0`; a text as it is.
    Raises BadRequest."""
    if isinstance(value, str):
        return value
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if not 0 <= seconds < 1e9:
        raise BadRequest(f"invalid duration: {seconds} s (expected 0 to 999999999)")
    return f"{max(1, math.ceil(round(seconds * 1_000, 3)))}ms" if seconds else "0"


def format_moment(value: float | str | timedelta | datetime) -> str:
    """Return an argument of `seek`: `@...` for UNIX seconds or a datetime, `-...` for a duration, which is how long
    ago. Raises BadRequest."""
    if isinstance(value, str | timedelta):
        return f"-{format_duration(value)}"
    seconds = value.timestamp() if isinstance(value, datetime) else value
    return f"@{seconds:.6f}"


# ---------------------------------------------------------------- sizes

# Numbers and sizes as `ctl` has them: `7`, `512B`, `64K`, `10M`, `1G`.

MOST = 1 << 62

_SIZE = re.compile(r"([0-9]{1,19})([BKMG])\Z")
_UNITS = {"B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_number(word: str) -> int:
    """Return a number of at most MOST. Raises BadCommand."""
    if len(word) > 19 or not word.isascii() or not word.isdigit() or (value := int(word)) > MOST:
        raise BadCommand(f"invalid number {word!r} (expected 0 to 2^62)")
    return value


def parse_size(word: str) -> int | None:
    """Return bytes, which may be above MOST; None if the word is not a size with a unit."""
    match = _SIZE.match(word)
    return int(match[1]) * _UNITS[match[2]] if match else None


def print_size(size: int) -> str:
    """Return bytes above 0 in the largest unit without a remainder."""
    unit = next(unit for unit in "GMKB" if size % _UNITS[unit] == 0)
    return f"{size // _UNITS[unit]}{unit}"
