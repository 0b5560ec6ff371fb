"""The iterator that gives out what was received, in C and in Python."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from mqfs.client import waiting

KINDS = [waiting.Ready, waiting.PythonReady]


def source(kind: type, after: Callable[[], Any], pop: Callable[[], Any] | None = None) -> Any:
    """An iterator of that kind which asks `after` when it has nothing ready."""
    made: Any = type("Source", (kind,), {"_wait_next": lambda _: after()})()
    made._pop = pop
    return made


def fail() -> None:
    raise ValueError("no item")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_ready_comes_first(kind: type) -> None:
    items, later = deque([1, 2]), iter([7, 8])
    reading = source(kind, lambda: next(later))
    assert next(reading) == 7
    reading._pop = items.popleft
    assert [next(reading), next(reading), next(reading)] == [1, 2, 8]
    items.append(3)
    reading._pop = None
    with pytest.raises(StopIteration):
        next(reading)
    reading._pop = items.popleft
    assert next(reading) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_errors_of_both_ways_are_raised(kind: type) -> None:
    for reading in (source(kind, fail), source(kind, lambda: 1, fail), source(kind, fail, deque().popleft)):
        with pytest.raises(ValueError, match="no item"):
            next(reading)


@pytest.mark.parametrize("kind", KINDS)
def test_it_keeps_nothing_alive(kind: type) -> None:
    class Items(deque[int]):
        pass

    items = Items([1])
    reading = source(kind, fail, items.popleft)
    gone, ended = weakref.ref(items), weakref.ref(reading)
    del items
    assert next(reading) == 1
    del reading
    gc.collect()
    assert (gone(), ended()) == (None, None)
