"""The one thread of the core: it syncs, and makes the few other calls that may take long.

A key has one job waiting at most; asking again only makes it earlier, so one
sync serves all its callers. Results are posted to the engine's thread, where `run_posted` runs them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

Job = Callable[[], None]
Done = Callable[[OSError | None], None]
Post = Callable[[Callable[[], None]], None]

log = logging.getLogger("mqfs.store")


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
