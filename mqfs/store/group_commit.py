"""Group commit: one sync at a time serves all callers of `sync`.

    written    0 ........ 40 ........ 90 ... 120      bytes so far; each caller waits until its mark is on disk
    a sync     read `written`, 90, then fdatasync: `synced` is 90, and the callers with marks up to 90 are answered
    the next   one for 120, requested at once; all who ask meanwhile share it

The mark is read before the sync, as writers append while it runs. Segments are synced in their order, then the folder;
a segment whose last byte is on disk is sealed. A failed sync makes the log read-only: no later one counts as success.

One thread, the committer, syncs and makes the few other calls that may take long. Each key has at most one pending job;
another request only makes it earlier, so one sync serves all callers of a log. Results are posted to the engine's
thread, where `run_posted` runs them.
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
    """Syncs the segments of a chain, and answers the callers that wait for it."""

    __slots__ = (
        "_asked", "_begun", "_chain", "_closed", "_covered", "_folder_changed", "_lacking_since", "_one_sync",
        "_paused", "_sync_error", "_unsynced", "_waiting", "copy", "synced", "written",
    )  # fmt: skip

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self.written = self.synced = 0  # bytes appended plus changes of the folder: so far, and on disk
        self._unsynced: dict[Segment, float] = {}  # segment -> `written` when its last byte was appended; in order
        self._folder_changed = 0  # `written` after the last change of the folder
        self._waiting: deque[_Waiting] = deque()
        self._asked: float | None = None  # when the requested sync is due
        self._begun = self._covered = 0  # marks of the last sync that began, and of the last that succeeded
        self._lacking_since: float | None = None  # since when syncs have had no descriptor
        self._one_sync = threading.RLock()
        self._sync_error: OSError | None = None
        self._closed = self._paused = False
        self.copy: LogCopy | None = None  # the log's copy in the replica

    def start_synced(self) -> None:
        """Mark a log that was just made as being on disk."""
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
            self._waiting[-1] = _Waiting(self.written, last.due, None)  # the pending sync covers this too
            return
        self._waiting.append(_Waiting(self.written, due, then))
        self._ask(due)

    def replicate(self, then: Committed) -> None:
        """Sync as `sync` does, and wait for the copy too, if there is one."""
        copy, mark = self.copy, self.written
        if copy is None:
            self.sync(then)
        else:
            copy.expect(mark)  # before the sync: both run at the same time
            self.sync(lambda error: then(error) if error is not None else copy.after(mark, then))

    def _ask(self, due: float) -> None:
        if not self._paused and (self._asked is None or due < self._asked):
            try:
                for segment in self._to_sync():
                    segment.open()  # it stays open until the answer: see `may_close`
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
        """Sync, on the committer's thread, or on the engine's if it cannot wait. A failure is remembered, since the
        system reports it to one sync only: no later sync counts as success."""
        with self._one_sync:
            if self._sync_error is not None:
                raise self._sync_error
            try:
                began = time.monotonic()
                self._sync_all()
                if self._sync_error is not None:
                    raise self._sync_error  # set by a nested sync on the same thread
                self._chain.context.sync_times.add(time.monotonic() - began)
            except OSError as error:
                if not _lacks_descriptor(error):
                    self._sync_error = error
                raise

    def _to_sync(self) -> list[Segment]:
        """Return the segments with bytes that may not be on disk. Others are not opened for a sync: opening them may
        close one of these, or request its sync first."""
        return [segment for segment, last in list(self._unsynced.items()) if last > self.synced]

    def _sync_all(self) -> None:
        """Sync segments and folder. The mark is read first: everything written before it is in a listed segment. The
        engine appends and rolls meanwhile; none of that counts as synced."""
        mark = self._begun = self.written
        for segment in self._to_sync():
            self._chain.disk.fdatasync(segment.fd)
        if self._folder_changed > self.synced:
            self._chain.disk.sync_folder(self._chain.folder)
        self._covered = max(self._covered, mark)

    def _end_sync(self, error: OSError | None) -> None:
        """Handle the committer's result. Whatever fails here, callers are answered and other logs are not affected."""
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
        """Retry at the next tick: no descriptor was available for the sync. Callers wait for a while only, then get the
        error; their records stay, and may still reach the disk."""
        now = time.monotonic()
        if self._lacking_since is None:
            self._lacking_since = now
            log.warning("group %d: not synced yet: %s", self._chain.group, error)
        if now - self._lacking_since >= limits.DESCRIPTOR_WAIT_S:
            self.answer_all(error)
            self._waiting.append(_Waiting(self.written, now, None))

    def ask_again(self) -> None:
        """Request the sync of waiting callers that could not be requested before."""
        if self._waiting and self._asked is None and self._chain.end.failed is None:
            self._ask(min(waiting.due for waiting in self._waiting))

    def _settle(self, mark: int) -> None:
        """Record that the log is on disk up to `mark`, and seal the segments that end there or before."""
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
        """Make the log read-only after a failure to reach the disk; all waiting callers get the error."""
        end = self._chain.end
        if end.failed is None:
            end.failed = error
            log.error("group %d is read-only: %s", self._chain.group, error)
        self.answer_all(end.failed)

    def answer(self, then: Committed | None, error: OSError | None) -> None:
        """Answer a caller. If it raises, the log becomes read-only, and the remaining callers are still answered."""
        try:
            if then is not None:
                then(error)
        except Exception as bug:
            self.note_bug(bug)

    def note_bug(self, bug: Exception) -> None:
        """Make the log read-only until the next start: a caller raised when it was answered, and the state in memory
        may be half changed. Messages on disk stay."""
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
        """Whether the descriptor may be closed: no sync uses it or waits to. An unsynced log is synced first: on this
        thread with `at_once`, else on the committer's, and a later call may succeed."""
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
        """Sync `segment` until `written` is on disk up to `mark`; inf: it is appended to. The list changes in one step:
        the committer's thread may read it at any moment, and a segment missing from it is not synced."""
        self._unsynced[segment] = mark

    def watch_only(self, marks: dict[Segment, float]) -> None:
        """Replace the list of segments to sync by `marks`, in that order."""
        self._unsynced = marks

    def has_unsynced(self, segment: Segment) -> bool:
        return segment in self._unsynced

    # ------------------------------------------------------------ the end

    def pause(self) -> None:
        """Start no sync until `resume`, except by `sync_now`: the folder is being moved, or the server stops."""
        self._paused = True

    def resume(self) -> None:
        self._paused, self._asked = False, None
        self.ask_again()

    def settle_all(self) -> None:
        """Answer all callers after `sync_now`, when nothing more is appended."""
        self._committed(None)

    def close(self) -> None:
        """Stop syncing, and ignore later results."""
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
    """Run a call that was posted to the engine's thread. An exception is logged and does not end the loop, which all
    share. A caller that can handle a failure catches it itself."""
    try:
        call()
    except Exception:
        log.exception("a call for another thread failed")


class Inline:
    """A committer that runs each job at once on the caller's thread: for tools and tests. See CommitThread."""

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
        self._wakes = float("inf")  # the monotonic time at which the thread wakes
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
        """Drop the job of `key`; if it is running, wait until it has ended (its `done` is still called)."""
        with self._condition:
            self._tasks.pop(key, None)
            while self._running is key:
                self._condition.wait()

    def progress(self) -> int | None:
        """Return the number of jobs that were started; None while no job is running or due."""
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
        """Sleep until jobs are due, and return their keys; None when stopped."""
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
            # Take the task only now: this run serves later requests too, and cancelled jobs do not run.
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
