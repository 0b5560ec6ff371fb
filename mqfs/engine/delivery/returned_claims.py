"""Claims whose receiver is gone, until they are requeued: in portions, since there may be many.

Until then they are in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from mqfs import limits
from mqfs.engine.delivery.claims import Claims, InFlight
from mqfs.seams import Clock

_AT_ONCE = 256  # claims requeued by one record: about a millisecond


class ReturnedClaims:
    """Of one consumer. `requeue` is called with a portion and the reason."""

    __slots__ = ("_claims", "_clock", "_queue", "_requeue", "_set_alarm")

    def __init__(
        self,
        claims: Claims,
        clock: Clock,
        set_alarm: Callable[[int], None],
        requeue: Callable[[list[InFlight], str], None],
    ) -> None:
        self._claims, self._clock, self._set_alarm, self._requeue = claims, clock, set_alarm, requeue
        self._queue: list[tuple[Iterator[InFlight], str]] = []

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, claims: Iterable[InFlight], reason: str, whole: bool) -> None:
        """Requeue them; where it takes long and not `whole` is wanted, the rest at the next alarm."""
        self._queue.append((iter(claims), reason))
        self.resume(whole)

    def resume(self, whole: bool) -> None:
        until = self._clock.engine_ns() + int(limits.SLICE_S * 1e9)
        while self._queue:
            claims, reason = self._queue[0]
            portion = list(islice(claims, _AT_ONCE))
            if len(portion) < _AT_ONCE:
                del self._queue[0]
            current = self._claims.by_sequence
            self._requeue([claim for claim in portion if current.get(claim.sequence) is claim], reason)
            if self._queue and self._clock.engine_ns() >= until and not whole:
                self._set_alarm(self._clock.engine_ns() + 1)
                return
