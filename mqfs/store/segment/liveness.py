"""Which messages of a group are live: at or above their stream's low watermark, and not dropped one by one. Under
`replay key` messages that `wanted` leaves out are not live either: a search finds them, not a visit of each.

    sequences   40  41  42  43  44   floors 16: 42, 17: 40; dropped: 43; `end` 44
    streams     17  16  16  17  18
    live         x       x       x   41 is below the floor of 16; 18 has none, and 44 was written since

In a stream without a watermark only messages written since the last `update` are live: the stream may be new.

Floors only rise. So a segment remembers results (LivenessCache), and no message is checked twice: one live message
makes the segment live while it is live (`hint`), streams before `cursor` have no live message any more, and a segment
of which a quarter is live stays so until a floor passes `dense_until`, or one of its messages is dropped.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence, Set

from mqfs.store.api import Wanted
from mqfs.store.segment.index import Index


class LivenessCache:
    """The results remembered for one segment."""

    __slots__ = ("cursor", "dense_until", "hint", "is_damaged", "live_bytes", "metadata_bytes")

    def __init__(self) -> None:
        self.hint = (0, -1)  # a stream, and its last live message in the segment at the last search
        self.cursor = 0  # streams before it have no live message here
        self.live_bytes: int | None = None  # at the last count
        self.dense_until: dict[int, int] | None = None  # stream -> sequence: dense while all from there on are live
        self.is_damaged = False  # a record that is no message is damaged
        self.metadata_bytes = 0  # bytes of its records that are no messages; 0: not added up yet


class Liveness:
    """The low watermarks of the streams, and the messages dropped one by one."""

    __slots__ = ("_raised", "_updates", "dropped", "end", "floors", "is_known", "wanted")

    def __init__(self) -> None:
        self.floors: Mapping[int, int] = {}
        self.dropped: Set[int] = frozenset()
        self.end = 0  # where the log ended at the last `update`
        self.is_known = False  # nothing is removed before the first `update`
        self.wanted: Wanted | None = None  # None: no message is left out
        self._updates = 0  # updates with `wanted`
        self._raised = 0, 0  # the number of floors, and their sum

    def update(self, floors: Mapping[int, int], dropped: Set[int], wanted: Wanted | None, end: int) -> None:
        self.floors, self.dropped, self.wanted, self.end, self.is_known = floors, dropped, wanted, end, True
        self._updates += wanted is not None
        self._raised = len(floors), sum(floors.values())

    def version(self) -> tuple[tuple[int, int], int, int]:
        """Return a value that changes when a watermark rises or a message is dropped."""
        return self._raised, len(self.dropped), self._updates

    def is_live(self, stream: int, sequence: int) -> bool:
        if sequence < self.floors.get(stream, self.end) or sequence in self.dropped:
            return False
        return self.wanted is None or self.wanted(stream, sequence) == sequence

    def live(self, index: Index, stream: int, posting: Sequence[int]) -> Iterator[int]:
        """Yield the ordinals of the live messages of a stream, the last first; -1 for a dropped message."""
        floor, sequences, at = self.floors.get(stream, self.end), index.sequences, len(posting)
        while at and (sequence := sequences[posting[at - 1]]) >= floor:
            found = sequence if self.wanted is None else self.wanted(stream, sequence)
            if found < sequence:
                at = bisect_right(posting, found, 0, at, key=sequences.__getitem__)
                continue
            at -= 1
            yield posting[at] if sequence not in self.dropped else -1

    def are_all_above(self, lowest: Mapping[int, int]) -> bool:
        """Whether no low watermark has passed those sequences of the streams. Dropped messages are not considered."""
        return all(self.floors.get(stream, self.end) <= sequence for stream, sequence in lowest.items())

    def confirms(self, cache: LivenessCache) -> bool:
        """Whether the message that was live at the last search still is."""
        return self.is_live(*cache.hint)

    def has_live(self, cache: LivenessCache, index: Index) -> bool:
        """Whether a message of a segment is live. A stream found without a live message is not searched again."""
        present = index.present()
        while cache.cursor < len(present):
            stream = present[cache.cursor]
            if (last := self._last_live(index, stream)) >= 0:
                cache.hint = (stream, last)
                return True
            cache.cursor += 1
        return False

    def _last_live(self, index: Index, stream: int) -> int:
        ordinal = next((ordinal for ordinal in self.live(index, stream, index.posting(stream)) if ordinal >= 0), -1)
        return index.sequences[ordinal] if ordinal >= 0 else -1
