"""Splits: where a long run of messages may be divided among bulk readers.

Owns that arithmetic, from indexes alone. Reads no log.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence, Set

from mqfs.log.record import HEAD_BYTES, padded
from mqfs.model import Split
from mqfs.store.segment.index import Index

PORTIONS = 16  # into which a log without sealed segments is split


def chosen(index: Index, begin: int, end: int, streams: Set[int] | None) -> Sequence[int]:
    """The ordinals of those messages in [begin, end) of a segment that are of the streams (None: of any)."""
    present = [stream for stream in index.present() if streams is None or stream in streams]
    if len(present) == len(index.present()):
        return range(begin, end)
    found: list[int] = []
    for stream in present:
        posting = index.posting(stream)
        at = bisect_left(posting, begin)
        found.extend(posting[at : bisect_left(posting, end, at)])
    found.sort()
    return found


class SplitPlanner:
    """Takes runs of messages, segment by segment, and splits them."""

    def __init__(self, messages: int, size: int, most: int) -> None:
        self.messages, self.size, self.most = messages, size, most
        self.found: list[Split] = []
        self._count = self._bytes = self._last = 0

    @property
    def full(self) -> bool:
        return len(self.found) >= self.most

    def take(self, index: Index, those: Sequence[int], begin: int, end: int) -> None:
        """`those` of the messages [begin, end): each is taken to be as large as they are on average where some were
        left out, since only positions are at hand."""
        share = len(those) / (end - begin) if end > begin else 1.0
        at = 0
        while at < len(those) and not self.full:
            to = min(len(those), at + self.messages - self._count)
            first = index.positions[those[at]]
            room = first + int((self.size - self._bytes) / share)
            to = bisect_right(those, room, at, to, key=index.positions.__getitem__)
            if to > at + 1 and _end(index, those[to - 1]) > room:
                to -= 1
            self._count += to - at
            self._bytes += int((_end(index, those[to - 1]) - first) * share)
            self._last = index.sequences[those[to - 1]]
            at = to
            if at < len(those) or self._count >= self.messages or self._bytes >= self.size:
                self.close()

    def close(self) -> None:
        """End the split that was begun."""
        if self._count:
            self.found.append(Split(self._last + 1, self._count, self._bytes))
        self._count = self._bytes = 0


def _end(index: Index, ordinal: int) -> int:
    return index.positions[ordinal] + padded(HEAD_BYTES + index.headers[ordinal] + index.bodies[ordinal])


def of_sizes(rows: Iterable[tuple[int, int]], messages: int, size: int, most: int) -> list[Split]:
    """The same of (sequence, bytes) one by one."""
    found: list[Split] = []
    count = weight = last = 0
    for sequence, taken in rows:
        if count and (count >= messages or weight + taken > size):
            found.append(Split(last + 1, count, weight))
            count = weight = 0
            if len(found) >= most:
                return found
        count, weight, last = count + 1, weight + taken, sequence
    if count:
        found.append(Split(last + 1, count, weight))
    return found


__all__ = ["PORTIONS", "SplitPlanner", "chosen", "of_sizes"]
