"""The right of one client to use a group's ring."""

from __future__ import annotations

from collections.abc import Callable

from mqfs import errors
from mqfs.engine.group import Group
from mqfs.model import User
from mqfs.ring.server.ring_log import RingLog


class Attachment:
    """One client's right to use a group's ring, for one generation."""

    def __init__(self, user: User, group: Group, ring_log: RingLog, left: Callable[[Attachment], None]) -> None:
        self.user, self.group, self._ring_log, self._left = user, group, ring_log, left
        self.generation = ring_log.ring.generation

    def fileno(self) -> int:
        """The descriptor of the ring's memory."""
        return self._ring_log.ring.fileno()

    def number(self, name: str) -> int | None:
        """The number of a stream; None for a view. Raises NotFound, DiskFailed; Stale where the ring was retired;
        DiskFull while the log has no room for what was published."""
        self._require()
        if blocked := self._ring_log.intake.blocked:
            raise errors.DiskFull(f"the ring is not in the log yet: {blocked}")
        if self._ring_log.why:
            raise errors.Stale(f"ring retired: {self._ring_log.why} (expected a new attachment)")
        stream = self.group.streams.get(name)
        if stream is not None:
            return stream.number
        if name in self.group.views:
            return None
        raise errors.NotFound(name)

    def name(self, number: int) -> str:
        """The name of a stream, also when the ring was retired. Raises NotFound, DiskFailed."""
        self._require()
        stream = self.group.numbers.get(number)
        if stream is None:
            raise errors.NotFound(f"stream number {number}")
        return stream.name

    def _require(self) -> None:
        if self.group.log.end.failed is not None:
            raise errors.DiskFailed(f"the disk failed: {self.group.log.end.failed}")

    def close(self) -> None:
        self._left(self)
