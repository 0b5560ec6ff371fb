"""Clocks that a test moves by hand; only RunningClock also runs by itself."""

from collections.abc import Sequence

from mqfs.clock import Anchor, SystemClock, resumed

SECOND = 10**9


class ManualClock:
    """Wall time and engine time that a test moves."""

    def __init__(self, wall_ns: int = 1_700_000_000 * SECOND) -> None:
        self.wall, self.engine = wall_ns, 0

    def wall_ns(self) -> int:
        return self.wall

    def engine_ns(self) -> int:
        return self.engine

    def anchor(self) -> Anchor:
        return Anchor(self.engine, self.wall)

    def resume(self, last: Sequence[tuple[Anchor, int]]) -> None:
        for anchor, newest in last:
            self.engine = max(self.engine, anchor.engine_ns + max(newest - anchor.wall_ns, 0))

    def forward(self, seconds: float) -> None:
        self.wall += int(seconds * SECOND)
        self.engine += int(seconds * SECOND)


class HastyClock(ManualClock):
    """A clock that moves by 1 ms at each look while `hasty`, which ends a portion of work."""

    hasty = False

    def engine_ns(self) -> int:
        if self.hasty:
            self.forward(0.001)
        return super().engine_ns()


class RunningClock(SystemClock):
    """The machine's running clocks, which a test can also move ahead."""

    moved = 0

    def wall_ns(self) -> int:
        return super().wall_ns() + self.moved

    def engine_ns(self) -> int:
        return super().engine_ns() + self.moved

    def anchor(self) -> Anchor:
        now = super().anchor()
        return now._replace(engine_ns=now.engine_ns + self.moved, wall_ns=now.wall_ns + self.moved)

    def forward(self, seconds: float) -> None:
        self.moved += int(seconds * SECOND)


class MachineClock:
    """Wall clock, boot clock and boot id of a machine, moved by hand. Engine time is computed as by the server."""

    def __init__(self, wall_ns: int = 1_700_000_000 * SECOND) -> None:
        self.wall, self.boot_ns, self.boot = wall_ns, 1000 * SECOND, "first"
        self.base = 0

    def wall_ns(self) -> int:
        return self.wall

    def engine_ns(self) -> int:
        return self.base + self.boot_ns

    def anchor(self) -> Anchor:
        return Anchor(self.engine_ns(), self.wall, self.boot_ns, self.boot)

    def resume(self, last: Sequence[tuple[Anchor, int]]) -> None:
        self.base = resumed(last, self.boot_ns, self.wall, self.boot) - self.boot_ns

    def forward(self, seconds: float) -> None:
        self.wall += int(seconds * SECOND)
        self.boot_ns += int(seconds * SECOND)

    def reboot(self, seconds: float) -> None:
        """Reboot the machine, which is off for `seconds`."""
        self.wall += int(seconds * SECOND)
        self.boot_ns, self.boot = 5 * SECOND, self.boot + "'"
