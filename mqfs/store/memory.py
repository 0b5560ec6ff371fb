"""A store that is gone with its process: for tests, and for servers that store nothing on disk.

Owns its logs. Never touches a file.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence

from mqfs import errors
from mqfs.store.api import Bucket, Histogram
from mqfs.store.memory_log import MemoryBucket
from mqfs.store.memory_only import MemoryOnlyLog
from mqfs.store.spool import MemoryStaged


class MemoryStore:
    """See `Store` in mqfs/store/api.py."""

    path = ""

    def __init__(self) -> None:
        self.uuid = str(uuid.uuid4())
        self.sync_times = Histogram()  # it stays empty
        self.full: dict[int, int] = {}  # this, too
        self._buckets: dict[int, MemoryBucket] = {}
        self._numbers = 0

    def groups(self) -> Sequence[int]:
        return sorted(self._buckets)

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def make(self, number: int, state: bytes) -> MemoryBucket:
        bucket = self._buckets[number] = MemoryBucket(number, state)
        return bucket

    def open(self, number: int) -> MemoryBucket:
        bucket = self._buckets.get(number)
        if bucket is None:
            raise errors.NotFound(f"group {number} has no bucket")
        return bucket

    def heads(self, number: int) -> Iterable[bytes]:
        return ()

    def in_memory(self, bucket: Bucket) -> Bucket:
        return MemoryOnlyLog(bucket)

    def remove(self, number: int) -> None:
        if self._buckets.pop(number, None) is None:
            raise errors.NotFound(f"group {number} has no bucket")

    def stage(self, number: int) -> MemoryStaged:
        return MemoryStaged()

    def tick(self) -> None:
        pass

    def close(self) -> None:
        pass


__all__ = ["MemoryStore"]
