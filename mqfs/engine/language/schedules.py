"""When a schedule is due: the keys `every` and `cron` of `.put`, and the next time of each.

    every 30s                        a fixed rhythm on the engine's clock: what was missed leaves the rhythm as it was
    cron  0 5 * * 1-5 Europe/Berlin  five fields of crontab(5) on the wall clock of a zone, UTC where none is named

Where a zone's clock skips an hour, a time of day in it is the end of that hour; where an hour comes twice it is the
first of the two. Steps such as `*/10` pass such an hour as any other.
"""

from __future__ import annotations

from datetime import UTC, datetime, tzinfo
from zoneinfo import ZoneInfo

import attrs

from mqfs.errors import BadCommand
from mqfs.syntax.duration import parse_duration, print_duration

_SECOND_NS = 10**9
_EXAMPLE = "five fields and perhaps a zone, such as '0 5 * * 1-5 Europe/Berlin'"
_ZONE_BYTES = 64
_SHOWN = "%Y-%m-%dT%H:%M:%SZ"
CRON_BYTES = 256


@attrs.frozen
class Schedule:
    """One of the two: a duration in ns, or fields and a zone."""

    every: int = 0
    cron: str = ""

    def next_ns(self, wall_ns: int) -> int:
        """The first time of `cron` after that wall time. Raises BadCommand where there is none in fifty years."""
        from cronsim import CronSim, CronSimError  # here, as most servers have no schedule

        *fields, zone = self.cron.split() if len(self.cron.split()) == 6 else [*self.cron.split(), "UTC"]
        begin = datetime.fromtimestamp(wall_ns // _SECOND_NS, _zone_of(zone))
        try:
            found = next(CronSim(" ".join(fields), begin), None)
        except (CronSimError, AssertionError, ValueError, OverflowError) as error:
            raise BadCommand(f"cron {self.cron[:60]!r}: {str(error).lower()} (expected {_EXAMPLE})") from None
        if found is None:
            raise BadCommand(f"cron {self.cron[:60]!r}: never due (expected a time within fifty years)")
        return int(found.timestamp()) * _SECOND_NS

    def texts(self) -> dict[str, str]:
        """As headers of the message that waits."""
        return {"cron": self.cron} if self.cron else {"every": print_duration(self.every)}


def _zone_of(name: str) -> tzinfo:
    """Raises BadCommand."""
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name[:_ZONE_BYTES])
    except (LookupError, ValueError, OSError):  # no such file, no name of one, or a folder of zones
        raise BadCommand(f"cron: unknown zone {name[:_ZONE_BYTES]!r} (expected one such as Europe/Berlin)") from None


def parse_every(text: str) -> Schedule:
    """Raises BadCommand."""
    every = parse_duration(text)
    if every < _SECOND_NS:
        raise BadCommand(f"every {text!r}: too short (expected 1s or more)")
    return Schedule(every=every)


def parse_cron(text: str, wall_ns: int = 0) -> Schedule:
    """Fields and zone. Raises BadCommand where they are invalid, or are never due after that wall time."""
    words = text.split()
    if len(words) not in (5, 6):
        raise BadCommand(f"cron {text[:60]!r}: {len(words)} fields (expected {_EXAMPLE})")
    schedule = Schedule(cron=" ".join(words))
    schedule.next_ns(wall_ns)
    return schedule


def shown(time_ns: int) -> str:
    """A wall time as in the id of a message, to the second."""
    return datetime.fromtimestamp(time_ns // _SECOND_NS, UTC).strftime(_SHOWN)


def parse_shown(text: str) -> int:
    """The wall time in ns; 0 where it is none."""
    try:
        return int(datetime.strptime(text, _SHOWN).replace(tzinfo=UTC).timestamp()) * _SECOND_NS
    except ValueError:
        return 0
