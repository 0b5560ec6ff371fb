"""Times and durations on the command lines of the tools: one grammar for each. Reads no clock."""

from __future__ import annotations

import re
from datetime import datetime
from decimal import Decimal

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)(ms|[smhd]?)")
_UNITS_NS = {"ms": 10**6, "": 10**9, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9, "d": 86400 * 10**9}
_MOST_NS = 2**63 - 1  # the server's limit, 292 years
_UNIX_TIME = re.compile(r"@[0-9]+(\.[0-9]{1,9})?|(?![0-9]{8}$)[0-9]+(\.[0-9]{1,9})?")  # 8 digits are a date
_END_S = 253_402_300_800  # the year 10,000: ISO 8601 has no more


def duration_ns(text: str) -> int:
    """Return the nanoseconds of `500ms`, `30s`, `5m`, `2h`, `7d`, or of a number of seconds. Raises ValueError."""
    match = _DURATION.fullmatch(text)
    if match is None or (value := int(Decimal(match[1]) * _UNITS_NS[match[2]])) > _MOST_NS:
        raise ValueError(f"bad duration {text!r} (expected 500ms, 30s, 5m, 2h or 7d)")
    return value


def ctl_duration(text: str) -> str:
    """Return the duration in whole milliseconds, rounded up, for `ctl` and `.put`. Raises ValueError."""
    return f"{-(-duration_ns(text) // 10**6)}ms"


def unix_time(text: str) -> float:
    """Return UNIX seconds of an ISO 8601 time, local unless it has a zone, or of `@UNIXTIME`. Raises ValueError."""
    try:
        value = float(text.lstrip("@")) if _UNIX_TIME.fullmatch(text) else datetime.fromisoformat(text).timestamp()
        if 0 <= value < _END_S:
            return value
    except (ValueError, OverflowError):
        pass
    raise ValueError(f"bad time {text!r} (expected 2030-01-31T08:00, 2030-01-31T08:00Z or @1900000000)")
