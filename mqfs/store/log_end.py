"""Where a log ends, shared by the parts of a bucket.

Owns three values and nothing else. The writer sets `next` and `last_ns`; whoever finds the disk broken sets `failed`.
"""

from __future__ import annotations


class StoredEnd:
    """See `LogEnd` in mqfs/seams.py."""

    __slots__ = ("failed", "last_ns", "next")

    def __init__(self) -> None:
        self.next = 1
        self.last_ns = 0
        self.failed: OSError | None = None


__all__ = ["StoredEnd"]
