"""The common part of the library's iterators that wait: interrupts, ends, lost connections.

All retry loops of the library use `Backoff`: exponential pauses with jitter, up to a limit.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Generic, TypeVar

from mqfs.client.types import File, Link
from mqfs.errors import Disconnected, Interrupted, MqfsError

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


T_co = TypeVar("T_co", covariant=True)


class PythonReady:
    """An iterator that gives out what it has received by `_pop`; where that is None or raises IndexError, `_wait_next`
    does. In C it is done without a call of Python for each item."""

    _pop: Callable[[], Any] | None
    _wait_next: Callable[[], Any]

    def __next__(self) -> Any:
        if self._pop is not None:
            with suppress(IndexError):
                return self._pop()
        return self._wait_next()


try:
    from mqfs.records._native import Ready as Ready
except ImportError:
    Ready = PythonReady  # type: ignore[assignment, misc]


class Waiting(Generic[T_co]):
    """An iterator that waits; other threads may interrupt and close it."""

    _file: File
    _link: Link
    _reconnect: bool | float
    _turn: threading.Lock

    def __init__(self) -> None:
        self._process = os.getpid()
        self._closed = threading.Event()
        self._interrupt_requested = False  # `interrupt` was called, and no `get` has raised it yet
        self._at_end = False
        self._backoff: Backoff | None = None  # while the server is away
        self._woken = threading.Event()  # `close` and `interrupt` end its pauses
        self._on_wake: Callable[[], None] | None = None  # of an async program that waits meanwhile

    def get(self, timeout: float | None = None) -> T_co:
        """Wait for the next one.

        Args:
            timeout: The most seconds to wait. None: without limit.

        Returns:
            The next one.

        Raises:
            TimeoutError: There was none in time.
            EOFError: It was closed, or has ended.
            Interrupted: `interrupt` was called.
            Disconnected: The server went away, and it is not to be waited for.
        """
        try:
            return self._next_item(None if timeout is None else time.monotonic() + timeout)
        except TimeoutError:
            raise TimeoutError(f"no message in {timeout or 0:g} s") from None

    def _acquire_turn(self, deadline: float | None) -> None:
        """Be the thread that reads. Raises TimeoutError where another one is until the deadline."""
        if not self._turn.acquire(timeout=-1 if deadline is None else max(0.0, deadline - time.monotonic())):
            raise TimeoutError

    @property
    def _is_of_parent(self) -> bool:
        """Whether a forked child has this: nothing is to be closed there, and the turn may be a thread's that is not
        there."""
        return self._process != os.getpid()

    def _next_item(self, deadline: float | None) -> T_co:
        raise NotImplementedError

    def _when_ready(self, call: Callable[[], None]) -> tuple[float, float] | None:
        """Call once `get` hardly waits: at once, or from any thread, so that it must not block. Where it returns
        (AFTER, TIMEOUT), the caller asks `get(TIMEOUT)` after AFTER seconds all the same. Raises Disconnected."""
        if self._closed.is_set() or self._at_end:
            call()
        elif self._backoff is not None:
            return self._wait_away(call, self._backoff.next_at - time.monotonic())
        else:
            self._file.when_ready(call)
        return None

    def _wait_away(self, call: Callable[[], None], pause_s: float) -> tuple[float, float]:
        """See `_when_ready`: while the server is away. `interrupt` and `close` end the pause."""
        self._on_wake = call
        if self._closed.is_set() or self._interrupt_requested:
            self._wake()
        return max(pause_s, 0.0), 0.0

    def _wake(self) -> None:
        self._woken.set()
        call, self._on_wake = self._on_wake, None
        if call is not None:
            call()

    def _retry(self, attempt: Callable[[], T], deadline: float | None) -> T:
        """The result of an attempt to reach the server again. Raises Disconnected, EOFError, Interrupted, and
        TimeoutError at the deadline; the next `get` resumes there."""

        def reach_and_attempt() -> T:
            self._link.reach(deadline)
            return attempt()

        self._woken.clear()  # before the look at what may have set it
        backoff, self._backoff = self._backoff or Backoff(self._reconnect, self._woken), None
        try:
            if not (self._closed.is_set() or self._interrupt_requested):
                return backoff.retry(reach_and_attempt, Disconnected, Interrupted, deadline=deadline)
        except (Disconnected, TimeoutError):
            self._backoff = backoff
            if not (self._closed.is_set() or self._interrupt_requested):
                raise
        if self._closed.is_set():
            raise EOFError
        self._backoff, self._interrupt_requested = backoff, False
        raise Interrupted

    def _has_next(self) -> bool:
        """Whether `get` returns at once, surely: what it returns was received."""
        return False

    def __iter__(self) -> Iterator[T_co]:
        return self

    def __next__(self) -> T_co:
        try:
            return self.get()
        except EOFError:
            raise StopIteration from None
        except Disconnected:
            if self._closed.is_set():
                raise StopIteration from None
            raise

    def interrupt(self) -> None:
        """End the `get` that waits in another thread, or else the next one, with Interrupted. Loses no message."""
        self._interrupt_requested = True
        self._file.interrupt()
        self._wake()

    def _interrupted(self, error: Interrupted) -> None:
        """Raise the error of an interrupted wait, unless it was interrupted by `close`."""
        requested, self._interrupt_requested = self._interrupt_requested, False
        if requested and not self._closed.is_set():
            raise error

    def _require_reconnect(self, error: Disconnected) -> None:
        """Raises EOFError where it is closed, and the error where it is not to reconnect."""
        if self._closed.is_set():
            raise EOFError from None
        if self._reconnect is False:
            raise error
