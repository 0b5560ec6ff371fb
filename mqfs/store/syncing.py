"""What of a bucket is on disk: one request to the committer at a time, for all who wait.

Owns who waits for a sync and which segments are to be synced. Never syncs on the engine's thread, except where its
caller must have it (`_sync_now`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import NamedTuple

from mqfs import errors
from mqfs.store.reading import Home, Reading
from mqfs.store.segment import Segment
from mqfs.types import Committed

log = logging.getLogger("mqfs.store")


class _Waiting(NamedTuple):
    mark: int
    due: float
    then: Committed | None


class Syncing(Reading):
    """A bucket whose segments reach the disk."""

    def __init__(self, home: Home, number: int, folder: str) -> None:
        super().__init__(home, number, folder)
        self._written = self._synced = 0  # bytes appended since the start, and how many of them are on disk
        self._unsynced: list[Segment] = []  # in their order; the open one is always the last
        self._entries = 0  # changes of the folder not synced
        self._waiting: deque[_Waiting] = deque()
        self._asked: float | None = None  # when the sync that was asked for is due
        self._job: tuple[int, list[Segment], int] = (0, [], 0)
        self._closed = False

    def sync(self, then: Committed | None = None, within_s: float = 0.0) -> None:
        if self.failed is not None or self._closed:
            if then is not None:
                then(self.failed)
            return
        if self._synced == self._written and not self._entries:
            if then is not None:
                then(None)
            return
        due = time.monotonic() + within_s
        self._waiting.append(_Waiting(self._written, due, then))
        self._ask(due)

    def _ask(self, due: float) -> None:
        if self._asked is None or due < self._asked:
            for segment in self._unsynced:
                segment.open()  # and it stays open until the answer: see _quiet
            self._asked = due
            self._home.committer.request(self, self._sync_job, self._committed, max(0.0, due - time.monotonic()))

    def _sync_job(self) -> None:
        """On the committer's thread. The mark is read first: what was written before it is in a segment of the list."""
        mark = self._written
        segments = list(self._unsynced)
        entries = self._entries
        for segment in segments:
            self._disk.fdatasync(segment.fd)
        if entries:
            self._disk.sync_folder(self._folder)
        self._job = (mark, segments, entries)

    def _committed(self, error: OSError | None) -> None:
        self._asked = None
        if self._closed:
            return
        if error is not None:
            self._break(error)
            return
        mark, segments, entries = self._job
        self._settle(mark, segments, entries)
        while self._waiting and self._waiting[0].mark <= mark:
            then = self._waiting.popleft().then
            if then is not None:
                then(None)
        if self._waiting and self.failed is None:
            self._ask(min(waiting.due for waiting in self._waiting))

    def _settle(self, mark: int, segments: list[Segment], entries: int) -> None:
        """So much is on disk: segments that are not appended to any more are sealed."""
        self._synced = max(self._synced, mark)
        self._entries -= min(entries, self._entries)
        for segment in segments:
            if segment is not self._open and segment in self._unsynced:
                self._unsynced.remove(segment)
                self._seal(segment)

    def _seal(self, segment: Segment) -> None:
        try:
            segment.look()
            if segment.sealed:
                return
            before = segment.used
            segment.shrink()
            segment.finish()
            self._sealed_bytes += segment.used - before
        except OSError as error:
            log.warning("group %d: segment %d was not sealed: %s", self.id, segment.first, error)

    def _sync_now(self) -> None:
        """Sync on this thread, and have it or raise."""
        try:
            for segment in self._unsynced:
                segment.open()
            self._sync_job()
        except OSError as error:
            self._break(error)
            raise errors.DiskFailed(str(error)) from error

    def fail(self, error: OSError) -> None:
        self._break(error)

    def _break(self, error: OSError) -> None:
        """The log failed to reach the disk: read-only from now on, and all who wait are told."""
        if self.failed is None:
            self.failed = error
            log.error("group %d is read-only: %s", self.id, error)
        waiting, self._waiting = self._waiting, deque()
        for entry in waiting:
            if entry.then is not None:
                entry.then(self.failed)

    def _quiet(self, segment: Segment) -> bool:
        """Whether the descriptor may be closed: nobody syncs it, and nothing in it waits for that."""
        if segment not in self._unsynced:
            return True
        if self._asked is not None or self.failed is not None:
            return False
        if self._synced != self._written:
            try:
                self._sync_now()
            except errors.DiskFailed:
                return False
            self._synced = max(self._synced, self._job[0])
        return True

    def _ask_for_part(self, segment: Segment) -> None:
        """Extend the index on disk when what is appended now is synced."""
        to, messages, others, last_ns = segment.used, segment.counts()[0], segment.count_others(), self.last_ns
        self.sync(lambda error: None if error or self._closed else segment.extend(to, messages, others, last_ns), 1.0)

    def pause(self) -> None:
        """Nothing of it is synced until `resume` or `give_up`: its folder is being moved."""
        self._home.committer.cancel(self)
        self._asked = None

    def resume(self) -> None:
        if self._waiting:
            self._ask(time.monotonic())
