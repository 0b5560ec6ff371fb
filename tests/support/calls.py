"""Costs in calls of Python functions, rather than in seconds."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any


def calls(do: Callable[[], Any]) -> int:
    """Return the number of calls of Python functions that `do` makes: the least of five runs."""
    return min(calls_once(do) for _ in range(5))


def calls_once(do: Callable[[], Any]) -> int:
    return _count(do, "call", sys.setprofile)


def lines(do: Callable[[], Any]) -> int:
    """Return the number of lines that `do` executes in Python functions, so that loops without calls count, too."""
    return _count(do, "line", sys.settrace)


def _count(do: Callable[[], Any], what: str, hook: Callable[[Any], None]) -> int:
    count = 0

    def note(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == what
        return note

    gc.disable()  # callbacks of the collector would be counted, too, as that of hypothesis
    hook(note)
    try:
        do()
    finally:
        hook(None)
        gc.enable()
    return count
