"""A cache of what clients send: bounded by bytes, as a bound of their number alone is none."""

from __future__ import annotations

from collections.abc import Callable, Sized
from functools import lru_cache, wraps
from typing import TypeVar, cast

K = TypeVar("K", bound=Sized)
V = TypeVar("V")


def cache_short(entries: int, size: int) -> Callable[[Callable[[K], V]], Callable[[K], V]]:
    """Remember the results for that many arguments of at most `size` bytes or characters; longer ones are computed each
    time."""

    def decorate(function: Callable[[K], V]) -> Callable[[K], V]:
        remembered = cast(Callable[[K], V], lru_cache(entries)(function))

        @wraps(function)
        def call(argument: K) -> V:
            return (
                remembered(argument)
                if isinstance(argument, str | bytes) and len(argument) <= size
                else function(argument)
            )

        return call

    return decorate
