"""The clock of the engine: wall time, and an engine time that never jumps.

The arithmetic is that of "Time" in mqfs(4). Engine time runs with the boot clock while the server runs. Over a restart
it advances by the boot clock's difference within one boot, else by the wall clock's, clamped to 0 ...
limits.DOWNTIME_DAYS. A standby that takes over heard when the last record was written, so its own wall clock does not
count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from mqfs import limits

# ------------------------------------------------------------ clock api


class Anchor(NamedTuple):
    """All clocks read at one moment; it converts a record's wall time into engine time. `wall_ns` is the time that a
    record got then. After the wall clock went back it is later than `shown_ns`, what the clock showed (0: the same)."""

    engine_ns: int
    wall_ns: int
    boot_ns: int = 0
    boot: str = ""
    shown_ns: int = 0


class Heard(NamedTuple):
    """When another machine wrote its newest record: at `boot_ns` of this machine's boot clock. If it was not heard at
    once, `wall_ns` is what the other machine's wall clock showed at `boot_ns`; else 0."""

    boot_ns: int
    wall_ns: int = 0


class Clock(Protocol):
    """Wall time and engine time, injected."""

    def wall_ns(self) -> int: ...

    def engine_ns(self) -> int:
        """Return the engine time. It never goes back and never jumps while the server runs; see "Time" in mqfs(4)."""
        ...

    def anchor(self) -> Anchor:
        """Read all clocks at once."""
        ...

    def resume(self, last: Sequence[tuple[Anchor, int]]) -> None:
        """Continue after the newest of `last`: (anchor, wall time of the newest record under that anchor)."""
        ...


class ProcessWatcher(Protocol):
    """A watcher for the end of processes."""

    def watch(self, pid: int, then: Callable[[], None]) -> Callable[[], None] | None:
        """Call `then` once when the process has ended, never before this returns. Returns a function that stops the
        watch; None: the process has ended already, or never existed."""
        ...


# ------------------------------------------------------------ clock

DAY_NS = 86_400 * 10**9


def boot_id() -> str:
    """Return the identifier of this boot of the machine; empty if the system has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


class SystemClock:
    """The machine's clocks. `resume`, called before the first use, continues the engine time of the last run."""

    def __init__(self, heard: Heard | None = None) -> None:
        """Make a clock. `heard`: when another machine wrote the last record, if this one is its standby."""
        self.boot, self._heard = boot_id(), heard
        self._base = 0

    def wall_ns(self) -> int:
        return time.time_ns()

    def engine_ns(self) -> int:
        return self._base + time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def anchor(self) -> Anchor:
        boot = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        return Anchor(engine_ns=self._base + boot, wall_ns=time.time_ns(), boot_ns=boot, boot=self.boot)

    def resume(self, last: Iterable[tuple[Anchor, int]]) -> None:
        """Continue after the newest of `last`: (anchor, wall time of the newest record under that anchor)."""
        boot, wall = time.clock_gettime_ns(time.CLOCK_BOOTTIME), time.time_ns()
        self._base = resumed(last, boot, wall, self.boot, self._heard) - boot


def resumed(
    last: Iterable[tuple[Anchor, int]], boot_ns: int, wall_ns: int, boot: str, heard: Heard | None = None
) -> int:
    """Return the present engine time. `last`: newest anchor and wall time of the newest record, for each group.

    The newest record of all groups gives the engine time at which the last run stopped. Only the time since then is
    estimated from the clocks.
    """
    ends = [(anchor.engine_ns + max(newest - anchor.wall_ns, 0), anchor, newest) for anchor, newest in last]
    if not ends:
        return 0
    stopped, anchor, newest = max(ends, key=lambda end: end[0])
    if boot and anchor.boot == boot:
        return max(stopped, anchor.engine_ns + boot_ns - anchor.boot_ns)
    if heard is not None:
        down = boot_ns - heard.boot_ns + (max(heard.wall_ns - newest, 0) if heard.wall_ns else 0)
    else:
        down = wall_ns - (anchor.shown_ns or anchor.wall_ns) - max(newest - anchor.wall_ns, 0)
    return stopped + min(max(down, 0), limits.DOWNTIME_DAYS * DAY_NS)
