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
    """The first value that is true. `pause` is called between two looks, with a few milliseconds."""
    deadline = time.monotonic() + HANG_S
    while not (found := value()):
        assert time.monotonic() < deadline, f"still waiting for {what} after {HANG_S:.0f} s"
        pause(0.005)
    return found


async def eventually_async(value: Callable[[], T], what: str = "it") -> T:
    """The same, in a program of trio or of asyncio."""
    import anyio  # not at the top: what imports this may run as a user who has little

    deadline = time.monotonic() + HANG_S
    while not (found := value()):
        assert time.monotonic() < deadline, f"still waiting for {what} after {HANG_S:.0f} s"
        await anyio.sleep(0.005)
    return found
