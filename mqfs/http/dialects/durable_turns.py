"""When a durable stream is written to: when the rate of its user and the room of its group allow it.

A write is made under a lock that others wait for, so it waits for nothing but the disk there. One that is beyond the
rate of its user leaves the lock, waits for its turn among all of the user's writes, and is tried once more. One for
which there is no room is refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from mqfs import limits
from mqfs.errors import Again
from mqfs.http import publishing
from mqfs.http.answers import Answer
from mqfs.http.call import Call, TimedOut
from mqfs.records.record import HEAD_BYTES


class Turn:
    """The turn of one request, by the rate of its user: it writes once."""

    def __init__(self, call: Call) -> None:
        self._call, meters = call, call.tree.open_files.meters
        self._meter = meters.of(call.user.uid) if meters is not None else None
        self._is_taken = self._meter is None
        self._asked: tuple[int, int] | None = None  # for how much it has to wait

    @property
    def is_bounded(self) -> bool:
        """Whether its user may have to wait for it."""
        return not self._is_taken

    @property
    def is_awaited(self) -> bool:
        """Whether `take` raised."""
        return self._asked is not None

    def take(self, messages: int, size: int) -> None:
        """Count a write of that number of messages and bytes, unless one was counted. Raises Again where it has to
        wait."""
        if self._is_taken or self._meter is None:
            return
        self._is_taken = self._meter.try_turn(messages, size)
        if not self._is_taken:
            self._asked = messages, size
            raise Again("write: beyond the rate of its user (try again)")

    async def wait(self) -> None:
        """Wait until it is there, where `take` raised. Raises Again where that takes too long."""
        assert self._meter is not None
        assert self._asked is not None
        try:
            await self._call.front.await_step(self._meter.turn(*self._asked), limits.DURABLE_WAIT_S)
        except TimedOut:
            raise Again("write: beyond the rate of its user (try again)") from None
        self._is_taken = True


async def in_turn(call: Call, write: Callable[[Turn], Awaitable[Answer]]) -> Answer:
    """What a write comes to, at its turn. `write` holds a lock when it takes that, and none when it returns."""
    turn = Turn(call)
    try:
        return await write(turn)
    except Again:
        if not turn.is_awaited:
            raise
    await turn.wait()
    return await write(turn)


def stored_bytes(name: str, messages: int, size: int) -> int:
    """About how many bytes the log takes for messages of the stream of that name, `size` bytes as frames."""
    return size + messages * (HEAD_BYTES - len(publishing.frame(name, b"")))
