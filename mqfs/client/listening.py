"""Callbacks: functions that are called with each message of their patterns.

Owns the threads that call them, and the joining of what is registered twice.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

from mqfs.client.reading import Reading
from mqfs.errors import MqfsError
from mqfs.types import Message

log = logging.getLogger("mqfs.client")

Handler: TypeAlias = Callable[[Message], object]
OnError: TypeAlias = Callable[[Exception, Message | None], object]


def say(error: Exception, message: Message | None) -> None:
    """What is done with errors where nobody said otherwise."""
    at = f"message {message.sequence} of {message.stream}" if message is not None else "a subscription"
    log.error("%s: %s", at, error, exc_info=error if message is not None else None)


class Registration:
    """A handler and its pattern. `unsubscribe` ends it; with `once` so does the first message."""

    def __init__(
        self,
        reading: Reading,
        patterns: tuple[str, ...],
        handler: Handler,
        *,
        once: bool,
        concurrency: int,
        on_error: OnError | None,
        ended: Callable[[Registration], None],
    ) -> None:
        self.patterns, self.handler = patterns, handler
        self._reading, self._once, self._on_error = reading, once, on_error or say
        self._ended = ended
        self._free = threading.Semaphore(concurrency)
        self._pool = ThreadPoolExecutor(concurrency, "mqfs-handler") if concurrency > 1 else None
        self._thread = threading.Thread(target=self._run, name="mqfs-listener", daemon=True)
        self._thread.start()

    @property
    def active(self) -> bool:
        return self._thread.is_alive()

    def unsubscribe(self, wait: bool = True) -> None:
        """No call begins after this; it waits for those under way, unless it is one of them that asks."""
        self._reading.close()
        if wait and threading.current_thread() is not self._thread:
            self._thread.join()

    def join(self, timeout: float | None = None) -> None:
        """Wait until it ended by itself: `once`, or its group was removed."""
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            while self._step():
                pass
        finally:
            if self._pool is not None:
                self._pool.shutdown()
            self._reading.close()
            self._ended(self)

    def _step(self) -> bool:
        """One message. False: it is over."""
        try:
            message = next(self._reading, None)
        except MqfsError as error:
            self._report(error, None)
            return not self._reading.lost(error)
        if message is None:
            return False
        if self._pool is None:
            self._call(message)
        else:
            self._free.acquire()
            self._pool.submit(self._call_and_free, message)
        return not self._once

    def _call_and_free(self, message: Message) -> None:
        try:
            self._call(message)
        finally:
            self._free.release()

    def _call(self, message: Message) -> None:
        try:
            self.handler(message)
        except Exception as error:
            self._report(error, message)

    def _report(self, error: Exception, message: Message | None) -> None:
        try:
            self._on_error(error, message)
        except Exception:
            log.exception("on_error failed")


class Registry:
    """The registrations of one group."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: list[Registration] = []

    def find(self, patterns: tuple[str, ...], handler: Handler) -> Registration | None:
        with self._lock:
            return next((r for r in self._all if r.handler == handler and r.patterns == patterns), None)

    def add(
        self,
        patterns: tuple[str, ...],
        handler: Handler,
        make: Callable[[Callable[[Registration], None]], Registration],
    ) -> Registration:
        """The registration of that handler for those patterns: the one there is, or a new one."""
        found = self.find(patterns, handler)
        if found is not None:
            return found
        made = make(self._forget)
        with self._lock:
            if made.active:
                self._all.append(made)
        return made

    def _forget(self, registration: Registration) -> None:
        with self._lock:
            if registration in self._all:
                self._all.remove(registration)

    def end(self, patterns: tuple[str, ...] | None = None, handler: Handler | None = None) -> int:
        """End those of that pattern and that handler (None: any); how many."""
        with self._lock:
            ending = [
                r for r in self._all if patterns in (None, r.patterns) and (handler is None or r.handler == handler)
            ]
        for registration in ending:
            registration.unsubscribe()
            self._forget(registration)
        return len(ending)
