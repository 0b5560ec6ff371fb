"""A registration for messages that go to one receiver each: threads that claim them, and call the handler."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from mqfs.client.callbacks import Listener, Shared
from mqfs.client.delivery import Claim, Claims
from mqfs.errors import MqfsError


class Taking:
    """Of one listener: a thread for each handle. It ends with the listener, or ends it with the last handle."""

    def __init__(self, shared: Shared, listener: Listener, handles: Sequence[Claims]) -> None:
        self._shared, self._listener, self._handles = shared, listener, handles
        self._left = len(handles)
        listener.source = self
        for claims in handles:
            threading.Thread(target=self._run, args=(claims,), name="mqfs-listener", daemon=True).start()

    def remove(self, listener: Listener) -> None:
        for claims in self._handles:
            self._shared.threads.run(claims.finish)  # not here: the lock is held

    def _run(self, claims: Claims) -> None:
        try:
            with claims:
                while self._call(next(claims, None)):
                    pass
        except MqfsError as error:
            self._listener.report(error, None)
        with self._shared.changed:
            self._left -= 1
            if not self._left:
                self._listener.close()

    def _call(self, claim: Claim | None) -> bool:
        """False: the handler takes no more."""
        if claim is None:
            return False
        try:
            with claim:
                called = self._listener.call(claim.message)
                if not called:
                    claim.release()
                return called
        except Exception as error:  # of the handler, or its claim is gone
            self._listener.report(error, claim.message)
            return True
