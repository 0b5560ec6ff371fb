"""What something costs, in calls of Python functions rather than in seconds."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any


def calls(do: Callable[[], Any]) -> int:
    """Calls of Python functions that it makes, the least of some runs."""
    return min(calls_once(do) for _ in range(5))


def calls_once(do: Callable[[], Any]) -> int:
    return _count(do, "call", sys.setprofile)


def lines(do: Callable[[], Any]) -> int:
    """Lines that it goes through, in Python functions: a loop that calls nothing is seen, too."""
    return _count(do, "line", sys.settrace)


def _count(do: Callable[[], Any], what: str, hook: Callable[[Any], None]) -> int:
    count = 0

    def note(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == what
        return note

    gc.disable()  # what runs with it is counted, too; as that of hypothesis
    hook(note)
    try:
        do()
    finally:
        hook(None)
        gc.enable()
    return count
