"""The clock the engine is given: wall time, and an engine time that never jumps.

The arithmetic is that of "Time" in mqfs(4). Engine time runs with the boot clock while serving; over a restart it moves
on by the boot clock's difference within one boot, else by the wall clock's, clamped to 0 ... limits.DOWNTIME_DAYS.
A standby that takes over has heard when the last record was written, so no wall clock of its own counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from mqfs import limits

# ------------------------------------------------------------ clock api


class Anchor(NamedTuple):
    """The clocks read at one moment: what turns a record's wall time into engine time. `wall_ns` is what a record got
    then: where the wall clock went back, that is more than what it showed, `shown_ns` (0: the same)."""

    engine_ns: int
    wall_ns: int
    boot_ns: int = 0
    boot: str = ""
    shown_ns: int = 0


class Heard(NamedTuple):
    """When another machine wrote its newest record: at `boot_ns` of this machine's boot clock. Where that was not heard
    when it was written, `wall_ns` is what the other one's wall clock showed at `boot_ns`; else 0."""

    boot_ns: int
    wall_ns: int = 0


class Clock(Protocol):
    """Wall time and engine time, injected."""

    def wall_ns(self) -> int: ...

    def engine_ns(self) -> int:
        """Never goes back and never jumps while serving; see "Time" in mqfs(4)."""
        ...

    def anchor(self) -> Anchor:
        """All clocks at once."""
        ...

    def resume(self, last: Sequence[tuple[Anchor, int]]) -> None:
        """Go on after the newest (anchor, wall time of the newest record under it) of an earlier run."""
        ...


class ProcessWatcher(Protocol):
    """Notice of the end of processes."""

    def watch(self, pid: int, then: Callable[[], None]) -> Callable[[], None] | None:
        """Call `then` once when the process has ended, never before this returns; what is returned stops the watch.
        None: it has ended already, or never was."""
        ...


# ------------------------------------------------------------ clock

DAY_NS = 86_400 * 10**9


def boot_id() -> str:
    """A name for this boot of the machine; empty where the system has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


class SystemClock:
    """The machine's clocks. `resume` before the first use sets the engine time to where the last run left it."""

    def __init__(self, heard: Heard | None = None) -> None:
        """`heard`: of the last run, where that was another machine's and this one heard it."""
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
    """Engine time now. `last`: of each group its newest anchor and the wall time of its newest record.

    What was written last of all tells where the run before stopped; only from there on it is asked how long nothing
    ran.
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
