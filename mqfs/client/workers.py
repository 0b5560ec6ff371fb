"""Workers: threads that call a handler with each claim."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from mqfs.client.callbacks import inside
from mqfs.client.delivery import Claim, Claims
from mqfs.errors import MqfsError

log = logging.getLogger("mqfs.client")


class Worker:
    """Threads, one for each handle on a consumer. `Group.work` starts them, `stop` ends them."""

    def __init__(self, handles: Sequence[Claims], handler: Callable[[Claim], object]) -> None:
        self._handles, self._handler = handles, handler
        self._threads = [threading.Thread(target=self._run, args=(claims,), daemon=True) for claims in handles]
        for thread in self._threads:
            thread.start()

    def _run(self, claims: Claims) -> None:
        inside.set(frozenset((self,)))
        with claims:
            try:
                for claim in claims:
                    self._handle(claim)
            except MqfsError as error:
                log.error("worker stopped: %s", error)

    def _handle(self, claim: Claim) -> None:
        try:
            with claim:
                self._handler(claim)
        except Exception as error:
            log.error("message %d of %s: %s", claim.sequence, claim.stream, error, exc_info=error)

    def stop(self) -> None:
        """Claim no more, and wait for the handlers under way, unless this is called by one of them."""
        for claims in self._handles:
            claims.finish()
        if self not in inside.get():
            self.join()

    def close(self) -> None:
        """The same as `stop`, by the name that subscriptions and claims have for it."""
        self.stop()

    def join(self, timeout: float | None = None) -> None:
        for thread in self._threads:
            thread.join(timeout)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
