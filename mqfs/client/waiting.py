"""The common part of the library's iterators that wait: interrupts, ends and lost connections.

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
        """`limit_s`: seconds for all attempts, from the first failure on; True: no limit; False: one attempt only.
        `closed` ends pauses and attempts. `longest_s`: of one pause."""
        self._limit_s, self._closed, self._longest_s = limit_s, closed, longest_s
        self._pause_s, self._began = FIRST_PAUSE_S, 0.0
        self.next_at = 0.0  # of time.monotonic(): when the next attempt is due
        self._error: MqfsError | None = None

    def wait(self, error: MqfsError, deadline: float | None = None) -> None:
        """Pause before the next attempt. Raises `error` if there is none, TimeoutError at the deadline."""
        if self._limit_s is False or self._closed.is_set() or (isinstance(error, Disconnected) and error.final):
            raise error
        if not self._began:
            self._began = time.monotonic()
            if isinstance(error, Disconnected):
                log.warning("%s; reconnecting", error)
        elif self._limit_s is not True and time.monotonic() - self._began > self._limit_s:
            raise error
        pause_s = random.uniform(self._pause_s / 2, self._pause_s)  # jitter: clients do not reconnect all at once
        self._error, self.next_at = error, time.monotonic() + pause_s
        self._pause_s = min(self._pause_s * 2, self._longest_s)
        self.resume(deadline)

    def resume(self, deadline: float | None = None) -> None:
        """Wait for the rest of a pause that an earlier deadline cut short. Raises the errors of `wait`."""
        if self._error is None:
            return
        until = self.next_at if deadline is None else min(self.next_at, deadline)
        if self._closed.wait(max(until - time.monotonic(), 0.0)):
            raise self._error
        if until < self.next_at:
            raise TimeoutError
        self._error = None

    def retry(self, attempt: Callable[[], T], *errors: type[MqfsError], deadline: float | None = None) -> T:
        """Return the result of the first attempt that raises none of `errors`. Raises TimeoutError at the deadline; the
        next call resumes the pause."""
        self.resume(deadline)
        while True:
            try:
                return attempt()
            except errors as error:
                self.wait(error, deadline)


T_co = TypeVar("T_co", covariant=True)


class PythonReady:
    """An iterator that returns received items by `_pop`, or by `_wait_next` if that is None or raises IndexError. Its
    twin in C needs no Python call for an item."""

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
        self._interrupt_requested = False  # `interrupt` was called, and no `get` has raised Interrupted yet
        self._at_end = False
        self._backoff: Backoff | None = None  # while the server is disconnected
        self._woken = threading.Event()  # set by `close` and `interrupt`, to end pauses
        self._on_wake: Callable[[], None] | None = None  # called by `close` and `interrupt` if an async program waits

    def get(self, timeout: float | None = None) -> T_co:
        """Wait for the next item.

        Args:
            timeout: The most seconds to wait. None: without limit.

        Returns:
            The item.

        Raises:
            TimeoutError: No item came in time.
            EOFError: The iterator was closed, or has ended.
            Interrupted: `interrupt` was called.
            Disconnected: The server is disconnected, and `reconnect` does not wait for it.
        """
        try:
            return self._next_item(None if timeout is None else time.monotonic() + timeout)
        except TimeoutError:
            raise TimeoutError(f"no message in {timeout or 0:g} s") from None

    def _acquire_turn(self, deadline: float | None) -> None:
        """Become the thread that reads. Raises TimeoutError if another thread reads until the deadline."""
        if not self._turn.acquire(timeout=-1 if deadline is None else max(0.0, deadline - time.monotonic())):
            raise TimeoutError

    @property
    def _is_of_parent(self) -> bool:
        """Whether this process is a forked child: it must not close the parent's handle, and the lock may be held by a
        thread that only the parent has."""
        return self._process != os.getpid()

    def _next_item(self, deadline: float | None) -> T_co:
        raise NotImplementedError

    def _when_ready(self, call: Callable[[], None]) -> tuple[float, float] | None:
        """Call `call` once `get` would hardly wait: at once, or later from any thread, so it must not block.

        If (AFTER, TIMEOUT) is returned, the caller has to call `get(TIMEOUT)` after AFTER seconds even if `call` was
        not called. Raises Disconnected."""
        if self._closed.is_set() or self._at_end:
            call()
        elif self._backoff is not None:
            return self._wait_away(call, self._backoff.next_at - time.monotonic())
        else:
            self._file.when_ready(call)
        return None

    def _wait_away(self, call: Callable[[], None], pause_s: float) -> tuple[float, float]:
        """Return (AFTER, TIMEOUT) of `_when_ready` while the server is disconnected. `interrupt` and `close` call
        `call` earlier."""
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
        """Return the result of the first attempt that succeeds after the connection was lost. Raises Disconnected,
        EOFError, Interrupted, and TimeoutError at the deadline; the next `get` resumes the pause."""

        def reach_and_attempt() -> T:
            self._link.reach(deadline)
            return attempt()

        self._woken.clear()  # before the flags are read, so that no later wake-up is missed
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
        """Whether `get` certainly returns an item at once, as it was received."""
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
        """End the waiting `get` of another thread, or else the next one, with Interrupted. No message is lost."""
        self._interrupt_requested = True
        self._file.interrupt()
        self._wake()

    def _interrupted(self, error: Interrupted) -> None:
        """Raise the error of a wait that `interrupt` ended; else, as after `close`, return."""
        requested, self._interrupt_requested = self._interrupt_requested, False
        if requested and not self._closed.is_set():
            raise error

    def _require_reconnect(self, error: Disconnected) -> None:
        """Raise EOFError if the iterator is closed, and the error if it does not reconnect."""
        if self._closed.is_set():
            raise EOFError from None
        if self._reconnect is False:
            raise error
