"""Group commit: one sync at a time serves all callers of `sync`.

    written    0 ........ 40 ........ 90 ... 120      bytes so far; each caller waits until its mark is on disk
    a sync     read `written`, 90, then fdatasync: `synced` is 90, and the callers with marks up to 90 are answered
    the next   one for 120, requested at once; all who ask meanwhile share it

The mark is read before the sync, as writers append while it runs. Segments are synced in their order, then the folder;
a segment whose last byte is on disk is sealed. A failed sync makes the log read-only: none after it passes for success.

The one thread of the core syncs, and makes the few other calls that may take long. A key has one job waiting at most;
asking again only makes it earlier, so one sync serves all its callers. Results are posted to the engine's thread, where
`run_posted` runs them.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from mqfs import errors, limits
from mqfs.store.api import Committed
from mqfs.store.chain import Chain
from mqfs.store.segment.file import Segment

if TYPE_CHECKING:
    from mqfs.store.replication import LogCopy

log = logging.getLogger("mqfs.store")

_IDLE_S = 1.0  # until a log is synced so that its descriptor can be closed
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)  # nothing was synced, and nothing failed: see `_put_off`


class _Waiting(NamedTuple):
    mark: int
    due: float
    then: Committed | None


class GroupCommit:
    """When the segments of a chain reach the disk."""

    __slots__ = (
        "_asked", "_begun", "_chain", "_closed", "_covered", "_folder_changed", "_lacking_since", "_one_sync",
        "_paused", "_sync_error", "_unsynced", "_waiting", "copy", "synced", "written",
    )  # fmt: skip

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self.written = self.synced = 0  # bytes and changes of the folder so far, and how far they are on disk
        self._unsynced: dict[Segment, float] = {}  # in order; `written` when its last byte was appended
        self._folder_changed = 0  # `written` behind the last change of the folder
        self._waiting: deque[_Waiting] = deque()
        self._asked: float | None = None  # when the requested sync is due
        self._begun = self._covered = 0  # the `written` that the last sync began with, and covered
        self._lacking_since: float | None = None  # no sync had a descriptor
        self._one_sync = threading.RLock()
        self._sync_error: OSError | None = None
        self._closed = self._paused = False
        self.copy: LogCopy | None = None  # of the log, elsewhere

    def start_synced(self) -> None:
        """The log was just made, and is on disk."""
        self.written = self.synced = self._folder_changed = 0

    def sync(self, then: Committed | None = None, within_s: float = 0.0) -> None:
        if self._chain.end.failed is not None or self._closed:
            if then is not None:
                then(self._chain.end.failed)
            return
        if self.synced == self.written:
            if then is not None:
                then(None)
            return
        due = time.monotonic() + within_s
        last = self._waiting[-1] if self._waiting else None
        if then is None and last is not None and last.then is None and last.due <= due and last.mark > self._begun:
            self._waiting[-1] = _Waiting(self.written, last.due, None)  # the sync that is to come covers this too
            return
        self._waiting.append(_Waiting(self.written, due, then))
        self._ask(due)

    def replicate(self, then: Committed) -> None:
        """As `sync`, in the copy too; without a copy the same."""
        copy, mark = self.copy, self.written
        if copy is None:
            self.sync(then)
        else:
            copy.expect(mark)  # now: it goes there while this disk syncs
            self.sync(lambda error: then(error) if error is not None else copy.after(mark, then))

    def _ask(self, due: float) -> None:
        if not self._paused and (self._asked is None or due < self._asked):
            try:
                for segment in self._to_sync():
                    segment.open()  # and it stays open until the answer: see `may_close`
            except errors.DiskFailed as error:
                if isinstance(error.__cause__, OSError) and _lacks_descriptor(error.__cause__):
                    self._put_off(error.__cause__)
                else:
                    self.fail(OSError(errno.EIO, str(error)))
                return
            self._asked = due
            self._chain.context.committer.request(
                self, self._sync_unless_paused, self._end_sync, max(0.0, due - time.monotonic())
            )

    def _sync_unless_paused(self) -> None:
        if not self._paused:
            self._sync_job()

    def _sync_job(self) -> None:
        """On the committer's thread, or on the engine's where it cannot wait for that. The system reports a failure to
        one sync only, so it is kept: no later sync passes for success."""
        with self._one_sync:
            if self._sync_error is not None:
                raise self._sync_error
            try:
                began = time.monotonic()
                self._sync_all()
                if self._sync_error is not None:
                    raise self._sync_error  # of a sync within this one, on the same thread
                self._chain.context.sync_times.add(time.monotonic() - began)
            except OSError as error:
                if not _lacks_descriptor(error):
                    self._sync_error = error
                raise

    def _to_sync(self) -> list[Segment]:
        """Segments with bytes that are not known to be on disk. Others are not opened for it: that may close one of
        these, or ask it to be synced first."""
        return [segment for segment, last in list(self._unsynced.items()) if last > self.synced]

    def _sync_all(self) -> None:
        """The mark is read first: what was written before it is in a segment of the list. The engine appends and rolls
        meanwhile: of that nothing is known to be on disk."""
        mark = self._begun = self.written
        for segment in self._to_sync():
            self._chain.disk.fdatasync(segment.fd)
        if self._folder_changed > self.synced:
            self._chain.disk.sync_folder(self._chain.folder)
        self._covered = max(self._covered, mark)

    def _end_sync(self, error: OSError | None) -> None:
        """Called by the committer. Whatever fails here, callers are answered and other logs are not affected."""
        try:
            self._committed(error)
        except Exception as bug:
            self.note_bug(bug)
        if self._chain.end.failed is not None:
            self.answer_all(self._chain.end.failed)

    def _committed(self, error: OSError | None) -> None:
        self._asked = None
        if self._closed:
            return
        if error is not None and _lacks_descriptor(error):
            self._put_off(error)
            return
        if error is not None:
            self.fail(error)
            return
        self._lacking_since = None
        self._settle(self._covered)
        while self._waiting and self._waiting[0].mark <= self.synced:
            self.answer(self._waiting.popleft().then, None)
        self.ask_again()

    def _put_off(self, error: OSError) -> None:
        """No descriptor was left to sync with: the next tick tries again. Callers wait for a while only: what they
        wrote stays, and may reach the disk yet."""
        now = time.monotonic()
        if self._lacking_since is None:
            self._lacking_since = now
            log.warning("group %d: not synced yet: %s", self._chain.group, error)
        if now - self._lacking_since >= limits.DESCRIPTOR_WAIT_S:
            self.answer_all(error)
            self._waiting.append(_Waiting(self.written, now, None))

    def ask_again(self) -> None:
        """Request the sync of waiting callers that could not begin."""
        if self._waiting and self._asked is None and self._chain.end.failed is None:
            self._ask(min(waiting.due for waiting in self._waiting))

    def _settle(self, mark: int) -> None:
        """The log is on disk up to that mark: seal the segments whose last byte is below it."""
        self.synced = mark
        for segment in [segment for segment, last in self._unsynced.items() if last <= mark]:
            del self._unsynced[segment]
            self._seal(segment)

    def note_folder_change(self) -> None:
        self._folder_changed = self.written + 1  # first: the committer's thread may read both at any moment
        self.written += 1
        if self.copy is not None:
            self.copy.note()

    def _seal(self, segment: Segment) -> None:
        try:
            segment.look()
            if segment.sealed:
                return
            before = segment.used
            segment.shrink()
            segment.seal()
            self._chain.sealed_bytes += segment.used - before
        except (OSError, errors.DiskFailed) as error:
            log.warning("group %d: segment %d was not sealed: %s", self._chain.group, segment.first, error)

    def sync_now(self) -> None:
        """Sync on this thread. Raises DiskFailed."""
        try:
            for segment in self._to_sync():
                segment.open()
            self._sync_job()
        except OSError as error:
            if not _lacks_descriptor(error):
                self.fail(error)
            raise errors.DiskFailed(str(error)) from error

    def fail(self, error: OSError) -> None:
        """The log failed to reach the disk: it is read-only from now on, and all waiting callers get the error."""
        end = self._chain.end
        if end.failed is None:
            end.failed = error
            log.error("group %d is read-only: %s", self._chain.group, error)
        self.answer_all(end.failed)

    def answer(self, then: Committed | None, error: OSError | None) -> None:
        """Answer a caller; what it raises ends nothing but the log: those after it are answered all the same."""
        try:
            if then is not None:
                then(error)
        except Exception as bug:
            self.note_bug(bug)

    def note_bug(self, bug: Exception) -> None:
        """Handle what a caller raised when it was answered: the log is read-only until the next start, as its
        state in memory may be half changed. Its messages on disk stay."""
        end = self._chain.end
        if end.failed is None:
            end.failed = OSError(errno.EIO, f"internal error: {bug!r}")
            log.error("group %d is read-only until the next start", self._chain.group, exc_info=bug)

    def answer_all(self, error: OSError | None) -> None:
        waiting, self._waiting = self._waiting, deque()
        for entry in waiting:
            self.answer(entry.then, error)
        if self.copy is not None:
            self.copy.answer_all(error)

    def may_close(self, segment: Segment, at_once: bool) -> bool:
        """Whether the descriptor may be closed: no sync uses it or waits to. A log is synced first: on this thread
        with `at_once`, else on the committer's, and the descriptor may be closed at a later look."""
        if segment not in self._unsynced:
            return True
        if self._asked is not None or self._paused or self._chain.end.failed is not None:
            return False
        if at_once and self.synced != self.written:
            try:
                self.sync_now()
            except errors.DiskFailed:
                return False
            self.synced = self._covered
        self.sync(None, _IDLE_S)
        return self.synced == self.written

    def extend_index(self, segment: Segment) -> None:
        """Extend the index on disk once the records appended so far are synced."""
        to, messages, others = segment.used, segment.counts()[0], segment.count_others()
        last_ns = self._chain.end.last_ns
        self.sync(lambda error: None if error or self._closed else segment.extend(to, messages, others, last_ns), 1.0)

    # ------------------------------------------------------------ which segments

    def watch(self, segment: Segment, mark: float) -> None:
        """Sync a segment until `mark` of `written` is on disk; inf: it is appended to. One step: the committer's thread
        may read the list at any moment, and a segment missing from it is not synced."""
        self._unsynced[segment] = mark

    def watch_only(self, marks: dict[Segment, float]) -> None:
        """As `watch`, of these and no others, in their order."""
        self._unsynced = marks

    def has_unsynced(self, segment: Segment) -> bool:
        return segment in self._unsynced

    # ------------------------------------------------------------ the end

    def pause(self) -> None:
        """Begin no sync until `resume`, but by `sync_now`: the folder is being moved, or the server stops."""
        self._paused = True

    def resume(self) -> None:
        self._paused, self._asked = False, None
        self.ask_again()

    def settle_all(self) -> None:
        """After `sync_now`, where nothing is appended any more."""
        self._committed(None)

    def close(self) -> None:
        """Sync nothing any more."""
        self._closed = True


def _lacks_descriptor(error: OSError) -> bool:
    return error.errno in _NO_DESCRIPTOR


# ------------------------------------------------------------ the thread that syncs


Job = Callable[[], None]
Done = Callable[[OSError | None], None]
Post = Callable[[Callable[[], None]], None]


def run(job: Job) -> OSError | None:
    try:
        job()
    except OSError as error:
        return error
    except Exception as error:
        log.exception("a job of the committer failed")
        return OSError(5, repr(error))
    return None


def run_posted(call: Callable[[], None]) -> None:
    """Run a call that was posted to the engine's thread. What it raises is logged and ends nothing else: the loop that
    runs it is everybody's. A caller that knows what a failure means contains it before."""
    try:
        call()
    except Exception:
        log.exception("a call for another thread failed")


class Inline:
    """Does each job at once, on the caller's thread: for tools and tests. See CommitThread."""

    def request(self, key: object, job: Job, done: Done, within_s: float) -> None:
        done(run(job))

    def cancel(self, key: object) -> None:
        pass

    def progress(self) -> int | None:
        return None

    def stop(self) -> None:
        pass


class _Task(NamedTuple):
    due: float
    job: Job
    done: Done


class CommitThread:
    """Runs the jobs that are due on its own thread, in the order in which they were requested first."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._tasks: dict[object, _Task] = {}
        self._running: object = None
        self._begun = 0  # jobs
        self._stopped = False
        self._condition = threading.Condition()
        self._wakes = float("inf")  # until when the thread sleeps
        self._thread = threading.Thread(target=self._serve, name="committer", daemon=True)
        self._thread.start()

    def request(self, key: object, job: Job, done: Done, within_s: float) -> None:
        """Run `job` within that time, then `done(error or None)` on the engine's thread."""
        due = time.monotonic() + within_s
        with self._condition:
            task = self._tasks.get(key)
            if task is None or due < task.due:
                self._tasks[key] = _Task(due, job, done)
                if due < self._wakes:
                    self._condition.notify_all()

    def cancel(self, key: object) -> None:
        """Forget the job of `key`; if it runs now, wait until it ended (its `done` still comes)."""
        with self._condition:
            self._tasks.pop(key, None)
            while self._running is key:
                self._condition.wait()

    def progress(self) -> int | None:
        """The number of jobs that were begun; None while nothing is to be done."""
        with self._condition:
            now = time.monotonic()
            is_idle = self._running is None and all(task.due > now for task in self._tasks.values())
            return None if is_idle else self._begun

    def stop(self) -> None:
        with self._condition:
            self._stopped = True
            self._condition.notify_all()
        self._thread.join()

    def _serve(self) -> None:
        while (batch := self._take()) is not None:
            for key in batch:
                self._run(key)

    def _take(self) -> list[object] | None:
        """Sleep until something is due; None when stopped."""
        with self._condition:
            while not self._stopped:
                now = time.monotonic()
                due = [key for key, task in self._tasks.items() if task.due <= now]
                if due:
                    return due
                self._wakes = min((task.due for task in self._tasks.values()), default=float("inf"))
                self._condition.wait(None if self._wakes == float("inf") else self._wakes - now)
                self._wakes = 0.0  # awake: no notification is needed
            return None

    def _run(self, key: object) -> None:
        with self._condition:
            # Taken only now: requests made meanwhile are served by this run, cancelled ones are not run.
            task = self._tasks.pop(key, None)
            if self._stopped or task is None:
                return
            self._running, self._begun = key, self._begun + 1
        error = run(task.job)
        with self._condition:
            self._running = None
            self._condition.notify_all()
        try:
            self._post(lambda: task.done(error))
        except RuntimeError:
            log.debug("a result came after the end of the loop")
