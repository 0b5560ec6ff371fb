"""Sequences reserved in blocks: a bound is on disk before the first number below it is assigned.

The module has the arithmetic and the bodies of the store's own records: the reserve record, which appender.py writes,
and the record that ends the log of a removed group.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from mqfs import limits

RESERVE = b'{"reserve":'  # how the body of a reserve record, a CHANGE, begins
REMOVED = b'{"removed":'


def reserve_body(bound: int) -> bytes:
    return b'{"reserve":%d}' % bound


def reserved_by(body: bytes) -> int:
    """Return the bound that a CHANGE record's body reserves; 0 for any other change."""
    return int(json.loads(body)["reserve"]) if body.startswith(RESERVE) else 0


def removal_body(time_ns: int) -> bytes:
    """Return the body of the record that ends the log of a removed group."""
    return b'{"removed":%d}' % time_ns


def behind_damage(bound: int) -> int:
    """Return a sequence that was never given, where damage may have hidden the records of one segment from `bound` on.
    The newest reserve record was among them or before them: it reserved up to a block and a half, and a ring has the
    largest blocks."""
    return bound + limits.SEGMENT_RECORDS + 2 * max(limits.SEQUENCE_BLOCK, limits.RING_SEQUENCE_BLOCK)


class SequenceBlocks:
    """The sequences reserved for one log, block by block."""

    __slots__ = ("_granted", "announced", "refill", "reserved", "size")

    def __init__(self, bound: int) -> None:
        self.reserved = bound  # sequences below it may be assigned
        self.refill = bound  # from it on a new block is due
        self.announced = bound  # bound of the newest reserve record, on disk or not
        self.size = limits.SEQUENCE_BLOCK
        self._granted: Callable[[int], None] | None = None

    @property
    def are_given_by_others(self) -> bool:
        """Whether a ring assigns the sequences."""
        return self._granted is not None

    def announce(self, least: int) -> int:
        """Return the bound to reserve next, a block behind `least`. It is never lower than the one before: the newest
        counts."""
        self.announced = max(self.announced, max(self.reserved, least) + self.size)
        return self.announced

    def confirm(self, bound: int) -> None:
        """Record that the reserve record with that bound is on disk."""
        self.reserved = max(self.reserved, bound)
        self.refill = self.reserved - self.size // 2
        if self._granted is not None:
            self._granted(self.reserved)

    def jump(self, first: int) -> None:
        """Record that a new segment begins at `first`; its head reserves at least that."""
        if first > self.reserved:
            self.reserved = self.refill = first

    def continue_at(self, sequence: int) -> None:
        self.refill = max(self.reserved - self.size // 2, sequence)

    def is_low(self, sequence: int) -> bool:
        """Whether less than half a block remains at that sequence."""
        return self.reserved - sequence < self.size // 2

    def give_to(self, granted: Callable[[int], None] | None) -> None:
        """Pass each bound to `granted`, and the current one now; None: the log assigns the sequences again."""
        self._granted = granted
        self.size = limits.SEQUENCE_BLOCK if granted is None else limits.RING_SEQUENCE_BLOCK
        if granted is not None:
            granted(self.reserved)
