"""The right of one client to use a group's ring."""

from __future__ import annotations

from collections.abc import Callable

from mqfs import errors
from mqfs.engine.group import Group
from mqfs.model import User
from mqfs.ring.server.ring_log import RingLog


class Attachment:
    """One client's right to use a group's ring, as long as the generation lasts."""

    def __init__(self, user: User, group: Group, ring_log: RingLog, left: Callable[[Attachment], None]) -> None:
        self.user, self.group, self._ring_log, self._left = user, group, ring_log, left
        self.generation = ring_log.ring.generation

    def fileno(self) -> int:
        """The ring's memory, to be passed on."""
        return self._ring_log.ring.fileno()

    def number(self, name: str) -> int | None:
        """Of a stream; None: that is a view. Raises NotFound; Stale where the ring was retired; DiskFailed."""
        self._require()
        if self._ring_log.why:
            raise errors.Stale(f"a newer generation takes the ring's place: {self._ring_log.why}")
        stream = self.group.streams.get(name)
        if stream is not None:
            return stream.number
        if name in self.group.views:
            return None
        raise errors.NotFound(name)

    def name(self, number: int) -> str:
        """Of the stream of that number, also when the ring was retired. Raises NotFound, DiskFailed."""
        self._require()
        stream = self.group.numbers.get(number)
        if stream is None:
            raise errors.NotFound(f"no stream has number {number}")
        return stream.name

    def _require(self) -> None:
        if self.group.log.end.failed is not None:
            raise errors.DiskFailed(f"the disk failed: {self.group.log.end.failed}")

    def close(self) -> None:
        self._left(self)
