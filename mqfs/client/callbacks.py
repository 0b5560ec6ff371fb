"""Registrations: handlers that are called with each message of their patterns.

Owns the threads that call them, and the deduplication between registrations of one handler.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import TypeAlias

from mqfs.client.types import Subscription
from mqfs.errors import MqfsError
from mqfs.model import Message

log = logging.getLogger("mqfs.client")

Handler: TypeAlias = Callable[[Message], object]
DEDUPLICATION_WINDOW = 16_384  # messages by which a pattern of a handler may lag behind another
# Registrations and workers whose handler is running: it may end its own, which then does not wait for it.
inside: ContextVar[frozenset[object]] = ContextVar("inside", default=frozenset())
OnError: TypeAlias = Callable[[Exception, Message | None], object]


def log_error(error: Exception, message: Message | None) -> None:
    """The `on_error` of registrations without one."""
    at = f"message {message.sequence} of {message.stream}" if message is not None else "a subscription"
    log.error("%s: %s", at, error, exc_info=error if message is not None else None)


class Deduplication:
    """The state that the registrations of one handler share: each message is for the first that receives it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[int, None] = {}
        self.sharers = 1

    def is_first(self, message: Message) -> bool:
        if self.sharers == 1:
            return True
        with self._lock:
            if message.sequence in self._seen:
                return False
            self._seen[message.sequence] = None
            if len(self._seen) > DEDUPLICATION_WINDOW:
                del self._seen[next(iter(self._seen))]
            return True


class Registration:
    """A handler and its patterns. `unsubscribe` ends it; with `once` the first message does."""

    def __init__(
        self,
        subscription: Subscription,
        patterns: tuple[str, ...],
        handler: Handler,
        *,
        once: bool,
        concurrency: int,
        on_error: OnError | None,
        deduplication: Deduplication,
        on_end: Callable[[Registration], None],
    ) -> None:
        self.patterns, self.handler, self.deduplication = patterns, handler, deduplication
        self._subscription, self._once, self._on_error = subscription, once, on_error or log_error
        self._on_end, self._stopped = on_end, threading.Event()
        self._free = threading.Semaphore(concurrency)
        self._pool = ThreadPoolExecutor(concurrency, "mqfs-handler") if concurrency > 1 else None
        self._thread = threading.Thread(target=self._run, name="mqfs-listener", daemon=True)
        self._thread.start()

    @property
    def active(self) -> bool:
        return not self._stopped.is_set()

    def unsubscribe(self, wait: bool = True) -> None:
        """Start no more calls; `wait`: until those under way return, unless this is called by one of them."""
        self._subscription.close()
        if wait and self not in inside.get():
            self._thread.join()

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end: by `once`, `unsubscribe`, or the removal of its group."""
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            while self._step():
                pass
        finally:
            if self._pool is not None:
                self._pool.shutdown()
            self._subscription.close()
            self._stopped.set()
            self._on_end(self)

    def _step(self) -> bool:
        """Handle one message. False at the end."""
        try:
            message = next(self._subscription, None)
        except MqfsError as error:
            self._report(error, None)
            return not self._subscription.lost(error)
        if message is None:
            return False
        if not self.deduplication.is_first(message):
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
        token = inside.set(inside.get() | {self})
        try:
            self.handler(message)
        except Exception as error:
            self._report(error, message)
        finally:
            inside.reset(token)

    def _report(self, error: Exception, message: Message | None) -> None:
        try:
            self._on_error(error, message)
        except Exception:
            log.exception("on_error raised")


class Registry:
    """The registrations of one group."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._adding = threading.Lock()
        self._all: list[Registration] = []

    def add(
        self, patterns: tuple[str, ...], handler: Handler, make: Callable[[Deduplication], Registration]
    ) -> Registration:
        """The registration of a handler for patterns: the existing one, or a new one."""
        with self._adding:
            with self._lock:
                same = [r for r in self._all if r.handler == handler]
                present = next((r for r in same if r.patterns == patterns), None)
                if present is not None:
                    return present
                deduplication = same[0].deduplication if same else Deduplication()
                deduplication.sharers = len(same) + 1  # before the new one starts: the others note messages from now on
            registration = make(deduplication)
            with self._lock:
                if registration.active:
                    self._all.append(registration)
            return registration

    def remove(self, registration: Registration) -> None:
        with self._lock:
            if registration in self._all:
                self._all.remove(registration)

    def end(self, patterns: tuple[str, ...] | None = None, handler: Handler | None = None) -> int:
        """End the registrations of patterns and handler (None: any); how many."""
        with self._lock:
            ending = [
                r for r in self._all if patterns in (None, r.patterns) and (handler is None or r.handler == handler)
            ]
        for registration in ending:
            registration.unsubscribe()
            self.remove(registration)
        return len(ending)
