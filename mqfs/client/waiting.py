"""What all iterators of the library have that wait for the next thing: interrupts, and what a lost connection means.

Owns whose an interrupt is. What is waited for, and how, is theirs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
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
        self._wanted = False  # an interrupt that somebody asked for
        self._over = False

    def get(self, timeout: float | None = None) -> T_co:
        raise NotImplementedError

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
        """The thread that waits in `get` gets Interrupted, or the next one that would; nothing is lost."""
        self._wanted = True
        self._file.interrupt()

    def _interrupted(self, error: Interrupted) -> None:
        """A wait was interrupted: raises it where somebody asked for that, and it was not the end."""
        wanted, self._wanted = self._wanted, False
        if wanted and not self._closed.is_set():
            raise error

    def _away(self, error: Disconnected) -> None:
        """The server is away: returns where it is to be reached again."""
        if self._closed.is_set():
            raise EOFError from None
        if self._reconnect is False:
            raise error


__all__ = ["Waiting"]
