"""Times as ntfy has them: `30m`, `2 days`, `1h30m`, UNIX seconds, `tomorrow, 10am`, `monday 17:30`, `9am`.

Owns that language; days and hours are local time.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta

from mqfs.errors import BadRequest

DELAY_LEAST_S, DELAY_MOST_S = 10, 3 * 86_400
_PART = re.compile(r"(\d{1,9})\s*(days?|d|hours?|hrs?|h|minutes?|mins?|m|seconds?|secs?|s)\s*")
_SECONDS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_CLOCK = re.compile(r"(?:at )?(\d{1,2})(?::(\d\d))?\s*(am|pm)?")
_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_FORMS = "30m, 2 days, UNIX seconds, or such as `tomorrow, 10am`, `monday 17:30`, `9am`"


def parse_span(text: str) -> int | None:
    """Seconds of a duration; None: it is none."""
    at, seconds, text = 0, 0, text.strip().lower()
    while match := _PART.match(text, at):
        seconds += int(match[1]) * _SECONDS[match[2][0]]
        at = match.end()
    return seconds if at and at == len(text) else None


def parse_delay(text: str, now: float) -> float:
    """The UNIX time of a delay of 10 seconds to 3 days. Raises BadRequest."""
    span = parse_span(text)
    if span is not None:
        due = now + span
    elif text.isascii() and text.isdigit() and len(text) < 12:
        due = float(text)
    else:
        due = _named(text.lower(), datetime.fromtimestamp(now)).timestamp()
    if not DELAY_LEAST_S <= due - now + 0.5 <= DELAY_MOST_S + 1:
        raise BadRequest(f"delay {text!r} (expected 10 seconds to 3 days from now)")
    return due


def _named(text: str, now: datetime) -> datetime:
    """A day, a time of day, or both; a time of day alone is the next one."""
    words = text.replace(",", " ").split(maxsplit=1)
    day, rest = (words[0], " ".join(words[1:])) if words else ("", "")
    ahead = {"today": 0, "tomorrow": 1}.get(day)
    if day in _DAYS:
        ahead = (_DAYS.index(day) - now.weekday() - 1) % 7 + 1
    match = _CLOCK.fullmatch(text.strip() if ahead is None else rest)
    if match is None or (match[2] is None and match[3] is None):
        raise BadRequest(f"delay {text!r} (expected {_FORMS})")
    hour, minute = int(match[1]), int(match[2] or 0)
    if minute > 59 or (hour > 23 if match[3] is None else not 1 <= hour <= 12):
        raise BadRequest(f"delay {text!r}: no such time of day")
    if match[3] is not None:
        hour = hour % 12 + 12 * (match[3] == "pm")
    moment = (now + timedelta(days=ahead or 0)).replace(hour=hour, minute=minute, second=0, microsecond=0)
    return moment + timedelta(days=1) if ahead is None and moment <= now else moment
