"""A clock that stands still until it is told to move."""

from collections.abc import Sequence

from mqfs.types import Anchor

SECOND = 10**9


class ManualClock:
    """Wall and engine time moved by hand."""

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
