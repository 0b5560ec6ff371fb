"""Deadlines of tests: a wait that is longer counts as a hang. Only MQFS_TEST_PATIENCE scales them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE = float(os.environ.get("MQFS_TEST_PATIENCE", "1"))
HANG_S = 300.0 * PATIENCE  # no wait of a test takes so long, not even at load 10


def patient(seconds: float) -> float:
    """Return a time that a test asserts, multiplied by MQFS_TEST_PATIENCE."""
    return seconds * PATIENCE


def eventually(value: Callable[[], T], what: str = "it", pause: Callable[[float], object] = time.sleep) -> T:
    """Call `value` until its result is true, and return that. `pause` is called between two calls, with seconds. Raises
    AssertionError after HANG_S."""
    began = time.monotonic()
    while not (found := value()):
        pause(before_next_look(began, what))
    return found


def before_next_look(began: float, what: str) -> float:
    """Return the seconds until the next look. A look costs time, often of a server, too, so a long wait has few looks.
    It ends at most a tenth of its length too late. Raises AssertionError after HANG_S."""
    waited = time.monotonic() - began
    assert waited < HANG_S, f"still waiting for {what} after {HANG_S:.0f} s"
    return min(max(waited / 10, 0.005), 0.05)


def unhurried(act: Callable[[int], T], wanted: T) -> None:
    """Assert the result of an act that has to end before a deadline of its own. `act` is called with a factor for that
    deadline: 1, and then more, as a busy machine may be too slow for the first."""
    for times in (1, 10, 100):
        if (found := act(times)) == wanted:
            return
    assert found == wanted


async def eventually_async(value: Callable[[], T], what: str = "it") -> T:
    """Do as `eventually`, in a program of trio or asyncio."""
    import anyio  # not at the top: a user without access to anyio may import this module

    began = time.monotonic()
    while not (found := value()):
        await anyio.sleep(before_next_look(began, what))
    return found
