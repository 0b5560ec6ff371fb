"""The common part of the library's iterators that wait: interrupts, ends, lost connections."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Generic, TypeVar

from mqfs.client.backoff import Backoff
from mqfs.client.types import File, Link
from mqfs.errors import Disconnected, Interrupted

T = TypeVar("T")
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
    from mqfs.records._native import Ready
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


__all__ = ["PythonReady", "Ready", "Waiting"]
