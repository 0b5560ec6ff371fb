"""A histogram of times, counted by one thread or by several."""

from __future__ import annotations

import threading
from bisect import bisect_left
from itertools import accumulate

BOUNDS_S = (0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0)


class Histogram:
    """`bounds`: the highest value of each bucket, ascending; a last bucket has what is above all."""

    def __init__(self, bounds: tuple[float, ...] = BOUNDS_S) -> None:
        self.bounds = bounds
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)
        self._lock = threading.Lock()

    def add(self, value: float) -> None:
        with self._lock:
            self._counts[bisect_left(self.bounds, value)] += 1
            self.sum += value

    def cumulative(self) -> list[int]:
        """How many values are at or below each bound, and last, how many there are."""
        return list(accumulate(self._counts))
