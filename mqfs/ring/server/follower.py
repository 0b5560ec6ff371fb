"""The thread of one ring: it sleeps until something is published, and has the engine take it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from mqfs import limits
from mqfs.ring.server.ring_log import RingLog

log = logging.getLogger("mqfs.ring")

Post = Callable[[Callable[[], None]], None]  # has the engine's thread call a function
_CHECK_S = 0.25  # between two checks of the ring's lock
_CHECK_AGAIN_S = 0.05  # while it is held
_RETRY_S = 0.25  # when the log had no room


class Follower:
    """The thread of one ring."""

    def __init__(self, ring_log: RingLog, post: Post) -> None:
        self._ring_log, self._ring, self._post = ring_log, ring_log.ring, post
        self._position = ring_log.ring.tail
        self._again = threading.Semaphore(0)
        self._stopped = threading.Event()
        self._held: tuple[int, int, float] = (0, 0, 0.0)  # (thread, tail, since when)
        self._thread = threading.Thread(target=self._follow, name="ring", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop it; returns when it does not use the ring any more."""
        self._stopped.set()
        self._again.release()
        self._thread.join()

    def _follow(self) -> None:
        try:
            while not self._stopped.is_set():
                if self._ring.wait(self._position, _CHECK_AGAIN_S if self._held[0] else _CHECK_S):
                    self._ask(self._take)
                elif self._is_held_too_long():
                    self._ask(self._retire)
                if self._ring.retired:
                    return
        except RuntimeError:
            log.debug("ring of group %d published after the end of the loop", self._ring_log.group.number)

    def _ask(self, call: Callable[[], None]) -> None:
        self._post(call)
        self._again.acquire()
        if self._ring_log.intake.blocked:
            self._stopped.wait(_RETRY_S)

    def _take(self) -> None:
        try:
            self._ring_log.pump(limits.RING_TURN_BYTES)
            if not self._ring_log.ended:
                self._position = self._ring_log.intake.position
        except Exception:
            log.exception("ring of group %d: taking failed", self._ring_log.group.number)
            self._stopped.set()
        finally:
            self._again.release()

    def _is_held_too_long(self) -> bool:
        """Whether one thread has held the lock, and published nothing, for longer than limits.RING_HOLD_S."""
        now = time.monotonic()
        thread, tail, since = self._held
        if not self._ring.holder or (self._ring.holder, self._ring.tail) != (thread, tail):
            self._held = self._ring.holder, self._ring.tail, now
            return False
        return now - since >= limits.RING_HOLD_S

    def _retire(self) -> None:
        self._ring_log.held_up = True
        self._ring_log.retire(f"thread {self._held[0]} held its lock too long")
        self._again.release()
