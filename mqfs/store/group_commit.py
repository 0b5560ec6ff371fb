"""What of a bucket is on disk: one request to the committer at a time, for all who wait.

Owns who waits for a sync and which segments are to be synced. Never syncs on the engine's thread, except where its
caller must have it (`_sync_now`).
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from typing import NamedTuple

from mqfs import errors
from mqfs.seams import Committed
from mqfs.store.log_reader import DiskLogReader, StoreContext
from mqfs.store.segment.file import Segment

log = logging.getLogger("mqfs.store")

_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)  # nothing was synced, and nothing failed: `_ask_again` after a while


class _Waiting(NamedTuple):
    mark: int
    due: float
    then: Committed | None


class GroupCommit(DiskLogReader):
    """A bucket whose segments reach the disk."""

    def __init__(self, home: StoreContext, number: int, folder: str) -> None:
        super().__init__(home, number, folder)
        self._written = self._synced = 0  # bytes and changes of the folder so far, and what of it is on disk
        self._unsynced: dict[Segment, float] = {}  # in order; what `_written` was when its last byte was appended
        self._folder_changed = 0  # what `_written` was behind the last change of the folder
        self._waiting: deque[_Waiting] = deque()
        self._asked: float | None = None  # when the sync that was asked for is due
        self._begun = self._covered = 0  # what of `_written` the last sync began with, and covered
        self._one_sync = threading.RLock()
        self._sync_error: OSError | None = None
        self._closed = False

    def sync(self, then: Committed | None = None, within_s: float = 0.0) -> None:
        if self.failed is not None or self._closed:
            if then is not None:
                then(self.failed)
            return
        if self._synced == self._written:
            if then is not None:
                then(None)
            return
        due = time.monotonic() + within_s
        last = self._waiting[-1] if self._waiting else None
        if then is None and last is not None and last.then is None and last.due <= due and last.mark > self._begun:
            self._waiting[-1] = _Waiting(self._written, last.due, None)  # the sync that is to come covers this too
            return
        self._waiting.append(_Waiting(self._written, due, then))
        self._ask(due)

    def _ask(self, due: float) -> None:
        if self._asked is None or due < self._asked:
            try:
                for segment in self._to_sync():
                    segment.open()  # and it stays open until the answer: see _quiet
            except errors.DiskFailed as error:
                if not _lacks_descriptor(error.__cause__):
                    self._break(OSError(errno.EIO, str(error)))
                return
            self._asked = due
            self._home.committer.request(self, self._sync_job, self._committed, max(0.0, due - time.monotonic()))

    def _sync_job(self) -> None:
        """On the committer's thread, or on the engine's where it cannot wait for that. The system reports a failure to
        one sync only, so it is kept: no later sync passes for success."""
        with self._one_sync:
            if self._sync_error is not None:
                raise self._sync_error
            try:
                self._sync_all()
            except OSError as error:
                if not _lacks_descriptor(error):
                    self._sync_error = error
                raise

    def _to_sync(self) -> list[Segment]:
        """Segments with bytes that are not known to be on disk. Others are not opened for it: that may close one of
        these, or ask it to be synced first."""
        return [segment for segment, last in list(self._unsynced.items()) if last > self._synced]

    def _sync_all(self) -> None:
        """The mark is read first: what was written before it is in a segment of the list. The engine appends and rolls
        meanwhile: of that nothing is known to be on disk."""
        mark = self._begun = self._written
        for segment in self._to_sync():
            self._disk.fdatasync(segment.fd)
        if self._folder_changed > self._synced:
            self._disk.sync_folder(self._folder)
        self._covered = max(self._covered, mark)

    def _committed(self, error: OSError | None) -> None:
        self._asked = None
        if self._closed:
            return
        if _lacks_descriptor(error):
            log.warning("group %d: not synced yet: %s", self.id, error)
            return
        if error is not None:
            self._break(error)
            return
        self._settle(self._covered)
        while self._waiting and self._waiting[0].mark <= self._synced:
            then = self._waiting.popleft().then
            if then is not None:
                then(None)
        self._ask_again()

    def _ask_again(self) -> None:
        """Whoever waits for a sync that could not begin."""
        if self._waiting and self._asked is None and self.failed is None:
            self._ask(min(waiting.due for waiting in self._waiting))

    def _settle(self, mark: int) -> None:
        """So much is on disk: segments whose last byte is in that are sealed."""
        self._synced = mark
        for segment in [segment for segment, last in self._unsynced.items() if last <= mark]:
            del self._unsynced[segment]
            self._seal(segment)

    def _note_folder_change(self) -> None:
        self._written += 1
        self._folder_changed = self._written

    def _seal(self, segment: Segment) -> None:
        try:
            segment.look()
            if segment.sealed:
                return
            before = segment.used
            segment.shrink()
            segment.finish()
            self._sealed_bytes += segment.used - before
        except (OSError, errors.DiskFailed) as error:
            log.warning("group %d: segment %d was not sealed: %s", self.id, segment.first, error)

    def _sync_now(self) -> None:
        """Sync on this thread. Raises DiskFailed."""
        try:
            for segment in self._to_sync():
                segment.open()
            self._sync_job()
        except OSError as error:
            if not _lacks_descriptor(error):
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
            self._synced = self._covered
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
        self._ask_again()


def _lacks_descriptor(error: BaseException | None) -> bool:
    return isinstance(error, OSError) and error.errno in _NO_DESCRIPTOR
