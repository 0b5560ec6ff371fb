"""What a bucket needs of its store."""

from __future__ import annotations

from typing import Protocol

from mqfs.histogram import Histogram
from mqfs.store.commit_thread import SyncScheduler
from mqfs.store.disk import Disk
from mqfs.store.quarantine import Quarantine
from mqfs.store.segment.descriptors import Descriptors


class StoreContext(Protocol):
    disk: Disk
    descriptors: Descriptors
    committer: SyncScheduler
    sync_times: Histogram
    quarantine: Quarantine
    staging: str
    full: dict[int, int]  # groups that the disk had no room for, and for how many bytes

    def close_later(self, fd: int) -> None:
        """Close a descriptor on the committer's thread."""
        ...


__all__ = ["StoreContext"]
