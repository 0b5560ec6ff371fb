"""Numbers and sizes as `ctl` has them: `7`, `512B`, `64K`, `10M`, `1G`."""

from __future__ import annotations

import re

from mqfs.errors import BadCommand

MOST = 1 << 62

_SIZE = re.compile(r"([0-9]{1,19})([BKMG])\Z")
_UNITS = {"B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_number(word: str) -> int:
    """At most MOST. Raises BadCommand."""
    if len(word) > 19 or not word.isascii() or not word.isdigit() or (value := int(word)) > MOST:
        raise BadCommand(f"{word!r} is no number")
    return value


def parse_size(word: str) -> int | None:
    """Bytes; None if it is no size with a unit. May be above MOST."""
    match = _SIZE.match(word)
    return int(match[1]) * _UNITS[match[2]] if match else None


def print_size(size: int) -> str:
    """Bytes above 0, in the largest unit that has no rest."""
    unit = next(unit for unit in "GMKB" if size % _UNITS[unit] == 0)
    return f"{size // _UNITS[unit]}{unit}"
