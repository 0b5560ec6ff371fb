"""Quotas of the bytes that a user's streams keep, whoever writes to them: each is charged to its stream's owner.

What a stream keeps changes at many places, so it is not followed there: a write is charged when it is admitted, and
what went meanwhile is seen when the stream is looked at again, in portions: each second, and before a write is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mqfs.engine.publishing.admission import Stream
from mqfs.errors import OverQuota
from mqfs.quotas import Quotas

PORTION = 256  # streams looked at in a row: about a millisecond


class KeptBytes:
    """Of the streams of one owner."""

    def __init__(self) -> None:
        self.total = 0
        self._sizes: dict[Stream, int] = {}  # as last looked at, and written since; the one looked at last stands last

    def charge(self, stream: Stream, size: int) -> None:
        """The stream keeps so much more."""
        self._sizes[stream] = self._sizes.get(stream, 0) + size
        self.total += size

    def look(self, owner: int, first: Iterable[Stream] = ()) -> None:
        """Look at the next streams, before them at `first`."""
        streams = [stream for stream in first if stream in self._sizes]
        streams += [stream for stream, _ in zip(self._sizes, range(PORTION), strict=False)]
        for stream in dict.fromkeys(streams):
            self.total -= self._sizes.pop(stream)
            if not stream.removed and stream.state.uid == owner:
                stream.kept.update_low_watermark()
                self.charge(stream, stream.kept.size)


class KeptQuotas:
    """Of one tree."""

    def __init__(self, quotas: Quotas) -> None:
        self.quotas = quotas
        self.owners: dict[int, KeptBytes] = {}

    def total_of(self, owner: int) -> int:
        """About what the streams of a user keep."""
        kept = self.owners.get(owner)
        return kept.total if kept is not None else 0

    def begin(self, streams: Iterable[Stream]) -> None:
        """Look at all streams, once."""
        for stream in streams:
            if (quota := self.quotas.of(stream.state.uid)) is not None and quota.kept:
                stream.kept.update_low_watermark()
                self.owners.setdefault(stream.state.uid, KeptBytes()).charge(stream, stream.kept.size)

    def check(self, sizes: Mapping[Stream, int]) -> None:
        """Charge a write, its bytes by stream. Raises OverQuota, and charges nothing then."""
        owners: dict[int, dict[Stream, int]] = {}
        for stream, size in sizes.items():
            owners.setdefault(stream.state.uid, {})[stream] = size
        for owner, mine in owners.items():
            quota = self.quotas.of(owner)
            if quota is not None and quota.kept:
                self._check(owner, mine, quota.kept)
        for owner, mine in owners.items():
            for stream, size in mine.items():
                if owner in self.owners:
                    self.owners[owner].charge(stream, size)

    def _check(self, owner: int, mine: Mapping[Stream, int], most: int) -> None:
        kept, more = self.owners.setdefault(owner, KeptBytes()), sum(mine.values())
        if more and kept.total + more > most:
            kept.look(owner, mine)
        if more and kept.total + more > most:
            raise OverQuota(f"the streams of uid {owner} keep {kept.total} bytes (expected at most {most})")

    def tick(self) -> None:
        """Once a second."""
        for owner, kept in self.owners.items():
            kept.look(owner)
