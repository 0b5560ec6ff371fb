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
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    gc.disable()  # what runs with it is counted, too
    sys.setprofile(note)
    try:
        do()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def lines(do: Callable[[], Any]) -> int:
    """Lines that it goes through, in Python functions: a loop that calls nothing is seen, too."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return note

    gc.disable()  # those of hypothesis that run with it are counted, too
    sys.settrace(note)
    try:
        do()
    finally:
        sys.settrace(None)
        gc.enable()
    return count
