"""Retries: exponential pauses with jitter, up to a limit. All retry loops of the library use it."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from mqfs.errors import Disconnected, MqfsError

T = TypeVar("T")

log = logging.getLogger("mqfs.client")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0


class Backoff:
    """The pauses between the attempts of one call."""

    def __init__(self, limit_s: bool | float, closed: threading.Event, *, longest_s: float = LONGEST_PAUSE_S) -> None:
        """`limit_s`: of all attempts, from the first failure on; True: none; False: one attempt. `closed` ends them."""
        self._limit_s, self._closed, self._longest_s = limit_s, closed, longest_s
        self._pause_s, self._began = FIRST_PAUSE_S, 0.0
        self.next_at = 0.0  # of time.monotonic(): when the next attempt is due
        self._error: MqfsError | None = None

    def wait(self, error: MqfsError, deadline: float | None = None) -> None:
        """Pause before the next attempt. Raises the error where there is none, TimeoutError at the deadline."""
        if self._limit_s is False or self._closed.is_set() or (isinstance(error, Disconnected) and error.final):
            raise error
        if not self._began:
            self._began = time.monotonic()
            if isinstance(error, Disconnected):
                log.warning("%s; reconnecting", error)
        elif self._limit_s is not True and time.monotonic() - self._began > self._limit_s:
            raise error
        pause_s = random.uniform(self._pause_s / 2, self._pause_s)  # jitter: clients do not return at once
        self._error, self.next_at = error, time.monotonic() + pause_s
        self._pause_s = min(self._pause_s * 2, self._longest_s)
        self.resume(deadline)

    def resume(self, deadline: float | None = None) -> None:
        """Wait for the rest of a pause that an earlier deadline ended. Raises as `wait`."""
        if self._error is None:
            return
        until = self.next_at if deadline is None else min(self.next_at, deadline)
        if self._closed.wait(max(until - time.monotonic(), 0.0)):
            raise self._error
        if until < self.next_at:
            raise TimeoutError
        self._error = None

    def retry(self, attempt: Callable[[], T], *errors: type[MqfsError], deadline: float | None = None) -> T:
        """The result of the first attempt that raises none of `errors`. Raises TimeoutError at the deadline; the next
        call resumes there."""
        self.resume(deadline)
        while True:
            try:
                return attempt()
            except errors as error:
                self.wait(error, deadline)


__all__ = ["FIRST_PAUSE_S", "LONGEST_PAUSE_S", "Backoff"]
