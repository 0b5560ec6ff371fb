"""Threads for handlers: one for each that runs, of which some stay for the next."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

IDLE = 8  # threads that stay


class Threads:
    """Runs calls at once, however many there are."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle = 0
        self._closed = False
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()

    def run(self, call: Callable[[], object]) -> None:
        with self._lock:
            if self._idle:
                self._idle -= 1
                self._calls.put(call)
                return
        threading.Thread(target=self._work, args=(call,), name="mqfs-handler", daemon=True).start()

    def _work(self, call: Callable[[], object] | None) -> None:
        while call is not None:
            call()
            with self._lock:
                if self._closed or self._idle >= IDLE:
                    return
                self._idle += 1
            call = self._calls.get()

    def close(self) -> None:
        """End the idle ones, and the others when their calls return."""
        with self._lock:
            self._closed, idle, self._idle = True, self._idle, 0
        for _ in range(idle):
            self._calls.put(None)
