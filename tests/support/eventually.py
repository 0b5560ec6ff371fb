"""How long a test waits before it takes what does not come for a hang. Only MQFS_TEST_PATIENCE scales it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE = float(os.environ.get("MQFS_TEST_PATIENCE", "1"))
HANG_S = 300.0 * PATIENCE  # nothing that a test waits for takes so long, not even at load 10


def patient(seconds: float) -> float:
    """A bound that a test asserts, times MQFS_TEST_PATIENCE."""
    return seconds * PATIENCE


def eventually(value: Callable[[], T], what: str = "it", pause: Callable[[float], object] = time.sleep) -> T:
    """The first value that is true. `pause` is called between two looks, with some milliseconds."""
    began = time.monotonic()
    while not (found := value()):
        pause(before_next_look(began, what))
    return found


def before_next_look(began: float, what: str) -> float:
    """Seconds until the next look: a look costs its time, often of a server too, so a long wait has few. The end of it
    is seen at most a tenth of the wait too late."""
    waited = time.monotonic() - began
    assert waited < HANG_S, f"still waiting for {what} after {HANG_S:.0f} s"
    return min(max(waited / 10, 0.005), 0.05)


def unhurried(act: Callable[[int], T], wanted: T) -> None:
    """Assert what comes of an act of a test that has to end before something is due. `act` is given by how many times
    to multiply the time that it has: more and more, as a busy machine may take longer than the first."""
    for times in (1, 10, 100):
        if (found := act(times)) == wanted:
            return
    assert found == wanted


async def eventually_async(value: Callable[[], T], what: str = "it") -> T:
    """The same, in a program of trio or of asyncio."""
    import anyio  # not at the top: what imports this may run as a user who has little

    began = time.monotonic()
    while not (found := value()):
        await anyio.sleep(before_next_look(began, what))
    return found
