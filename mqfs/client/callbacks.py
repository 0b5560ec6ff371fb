"""Callbacks: functions that are called with each message of their patterns.

Owns the threads that call them, and the joining of what is registered twice.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

from mqfs.client.subscription import Subscription
from mqfs.errors import MqfsError
from mqfs.model import Message

log = logging.getLogger("mqfs.client")

Handler: TypeAlias = Callable[[Message], object]
TOGETHER = 16_384  # messages by which one pattern of a handler may be behind another and still be known to repeat it
OnError: TypeAlias = Callable[[Exception, Message | None], object]


def say(error: Exception, message: Message | None) -> None:
    """What is done with errors where nobody said otherwise."""
    at = f"message {message.sequence} of {message.stream}" if message is not None else "a subscription"
    log.error("%s: %s", at, error, exc_info=error if message is not None else None)


class Joined:
    """What the registrations of one handler share: each message is for the first of them that meets it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[int, None] = {}
        self.sharers = 1

    def first(self, message: Message) -> bool:
        if self.sharers == 1:
            return True
        with self._lock:
            if message.sequence in self._seen:
                return False
            self._seen[message.sequence] = None
            if len(self._seen) > TOGETHER:
                del self._seen[next(iter(self._seen))]
            return True


class Registration:
    """A handler and its pattern. `unsubscribe` ends it; with `once` so does the first message."""

    def __init__(
        self,
        reading: Subscription,
        patterns: tuple[str, ...],
        handler: Handler,
        *,
        once: bool,
        concurrency: int,
        on_error: OnError | None,
        joined: Joined,
        ended: Callable[[Registration], None],
    ) -> None:
        self.patterns, self.handler, self.joined = patterns, handler, joined
        self._reading, self._once, self._on_error = reading, once, on_error or say
        self._ended, self._over = ended, threading.Event()
        self._calling: set[int] = set()  # threads inside the handler
        self._free = threading.Semaphore(concurrency)
        self._pool = ThreadPoolExecutor(concurrency, "mqfs-handler") if concurrency > 1 else None
        self._thread = threading.Thread(target=self._run, name="mqfs-listener", daemon=True)
        self._thread.start()

    @property
    def active(self) -> bool:
        return not self._over.is_set()

    def unsubscribe(self, wait: bool = True) -> None:
        """No call begins after this; it waits for those under way, unless it is one of them that asks."""
        self._reading.close()
        if wait and threading.get_ident() not in self._calling:
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
            self._over.set()
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
        if not self.joined.first(message):
            return True
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
        self._calling.add(threading.get_ident())
        try:
            self.handler(message)
        except Exception as error:
            self._report(error, message)
        finally:
            self._calling.discard(threading.get_ident())

    def _report(self, error: Exception, message: Message | None) -> None:
        try:
            self._on_error(error, message)
        except Exception:
            log.exception("on_error failed")


class Registry:
    """The registrations of one group."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._adding = threading.Lock()
        self._all: list[Registration] = []

    def add(self, patterns: tuple[str, ...], handler: Handler, make: Callable[[Joined], Registration]) -> Registration:
        """The registration of that handler for those patterns: the one there is, or a new one."""
        with self._adding:
            with self._lock:
                same = [r for r in self._all if r.handler == handler]
                found = next((r for r in same if r.patterns == patterns), None)
                if found is not None:
                    return found
                joined = same[0].joined if same else Joined()
                joined.sharers = len(same) + 1  # before the new one begins: from now on it is noted what was met
            made = make(joined)
            with self._lock:
                if made.active:
                    self._all.append(made)
            return made

    def forget(self, registration: Registration) -> None:
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
            self.forget(registration)
        return len(ending)
