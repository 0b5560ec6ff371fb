"""The segments of one log, in order.

A segment is responsible for the sequences from its name up to the name of the next segment. Records that it holds above
that are in the next one too, after an interrupted compaction, and are ignored.

    firsts      1            40           72             `end.next` 90
    segments    [1 to 39]    [40 to 75]   [72 to 89]     the last is `open`: it is appended to
    number_of   73 is number 2, though number 1 holds a 73 as well

Bytes that fail a check are counted here and copied to quarantine/.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from typing import TYPE_CHECKING

from mqfs.store.segment.file import Segment

if TYPE_CHECKING:
    from mqfs.store.store import DiskStore

log = logging.getLogger("mqfs.store")


class Chain:
    """The segments of one log; each is responsible for the sequences from its own first to that of the next."""

    __slots__ = (
        "context", "damaged", "disk", "end", "firsts", "folder", "group", "lowest", "open", "sealed_bytes", "segments"
    )  # fmt: skip

    def __init__(self, context: DiskStore, group: int, folder: str) -> None:
        self.context, self.disk, self.group, self.folder = context, context.disk, group, folder
        self.end = StoredEnd()
        self.damaged = 0  # records read that failed their check
        self.segments: list[Segment] = []
        self.firsts: list[int] = []  # of the segments
        self.open: Segment | None = None  # the newest, while it is appended to
        self.sealed_bytes = 0
        self.lowest: int | None = None  # sequence of the first message; None: to be searched

    @property
    def size(self) -> int:
        """Bytes of the whole log."""
        return self.sealed_bytes + (self.open.used if self.open is not None else 0)

    def segment(self, first: int) -> Segment:
        """Make the segment of that name; it is not in the chain yet."""
        context = self.context
        return Segment(
            self.disk, context.descriptors, self.folder, context.staging, self.group, first, self._quarantine
        )

    def _quarantine(self, segment: Segment, position: int, data: bytes, why: str) -> None:
        if why != "a torn tail":
            self.damaged += 1
        if not data:
            log.error("group %d: segment %d: %s at %d", self.group, segment.first, why, position)
            return
        self.context.quarantine.copy(self.group, segment.first, position, data, why)

    # ------------------------------------------------------------ lookup

    def number_of(self, sequence: int) -> int:
        """Return the number of the segment that is responsible for a sequence."""
        return max(0, bisect_right(self.firsts, sequence) - 1)

    def end_of(self, number: int) -> int:
        """Return the sequence at which the responsibility of a segment ends."""
        return self.firsts[number + 1] if number + 1 < len(self.firsts) else self.end.next

    def sealed(self) -> list[tuple[Segment, int]]:
        """Return the sealed segments, each with the sequence at which its responsibility ends."""
        ends = [*self.firsts[1:], self.end.next]
        return [(s, end) for s, end in zip(self.segments, ends, strict=True) if s.sealed and s is not self.open]

    # ------------------------------------------------------------ changes

    def append(self, segment: Segment) -> None:
        """Add the segment that is appended to from now on."""
        if self.open is not None:
            self.sealed_bytes += self.open.used
        self.segments.append(segment)
        self.firsts.append(segment.first)
        self.open = segment

    def remove(self, segment: Segment) -> None:
        at = self.segments.index(segment)
        del self.segments[at], self.firsts[at]
        self.sealed_bytes -= segment.used
        self.lowest = None

    def replace(self, run: list[Segment], made: Segment) -> None:
        """Put one segment in the place of a run of sealed ones."""
        at = self.segments.index(run[0])
        self.sealed_bytes += made.used - sum(segment.used for segment in run)
        self.segments[at : at + len(run)] = [made]
        self.firsts[at : at + len(run)] = [made.first]
        self.lowest = None

    def close(self) -> None:
        """Close all descriptors and drop all caches."""
        for segment in self.segments:
            segment.index = None
            segment.close_idle()


class StoredEnd:
    """See `LogEnd` in mqfs/store/api.py. The writer sets all but `failed`, which stays once it is set."""

    __slots__ = ("failed", "last_ns", "next")

    def __init__(self) -> None:
        self.next = 1
        self.last_ns = 0
        self.failed: OSError | None = None
