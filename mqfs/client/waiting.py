"""The common part of the library's iterators that wait: interrupts, ends, lost connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from mqfs.client.types import File
from mqfs.errors import Disconnected, Interrupted

T_co = TypeVar("T_co", covariant=True)


class Waiting(Generic[T_co]):
    """An iterator that waits; other threads may interrupt and close it."""

    _file: File
    _reconnect: bool | float

    def __init__(self) -> None:
        self._closed = threading.Event()
        self._interrupt_requested = False  # `interrupt` was called, and no `get` has raised it yet
        self._at_end = False

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

    def _next_item(self, deadline: float | None) -> T_co:
        raise NotImplementedError

    def _when_ready(self, call: Callable[[], None]) -> float | None:
        """Call once `get` hardly waits: at once, or from any thread, so that it must not block. The caller asks `get`
        after the returned seconds all the same. Raises Disconnected."""
        if self._closed.is_set() or self._at_end:
            call()
        else:
            self._file.when_ready(call)
        return None

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


__all__ = ["Waiting"]
