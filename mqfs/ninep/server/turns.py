"""Turns: how users share the one thread."""

from __future__ import annotations

import math
from time import perf_counter, thread_time

import trio

from mqfs import limits


class Turns:
    """Who performs, of users. `shared` while there is more than one of them."""

    def __init__(self) -> None:
        self.last: Turn | None = None
        self.changed_at = -math.inf  # when another user than before came

    def shared(self, turn: Turn) -> bool:
        now = perf_counter()
        if self.last is not turn:
            self.last, self.changed_at = turn, now
        return now - self.changed_at < limits.TURN_SHARED_S


class Turn:
    """One user's: what its connections perform together, some limits.TURN_S, before all other users have had theirs.

    Counted, in seconds of the processor, while others perform something, too. Then a request that took long, as it
    cannot be divided, is followed by a rest, for otherwise every second request of others would wait for such a one.
    """

    def __init__(self, turns: Turns) -> None:
        self.owner: trio.lowlevel.Task | None = None  # whose turn it is next, or who rests; None: whoever comes
        self._turns = turns
        self._spent = 0.0
        self._queue = trio.lowlevel.ParkingLot()

    async def come(self) -> None:
        """Wait for the turn, behind others of the same user."""
        if self.owner is not None:
            await self._queue.park()

    def begin(self) -> float:
        """When it began on the processor's clock; 0 where that does not matter."""
        return thread_time() if self._turns.shared(self) else 0.0

    async def end(self, began: float, done: bool) -> None:
        """Something was performed: let others have their turn where it was enough."""
        cost = thread_time() - began if began else 0.0
        self._spent += cost
        if not done or self._spent >= limits.TURN_S:
            if began:
                self.owner, self._spent = trio.lowlevel.current_task(), 0.0
            if cost > limits.TURN_LONG_S:
                await trio.sleep(min(max(limits.TURN_REST * cost, limits.TURN_REST_S), limits.TURN_REST_MOST_S))
            else:
                await trio.lowlevel.checkpoint()
        self.leave()

    def leave(self) -> None:
        """The next one has the turn, if it was this one's."""
        if self.owner is trio.lowlevel.current_task():
            self.owner = next(iter(self._queue.unpark()), None)
