"""The minimum of many named numbers that mostly grow: a heap in which a row may be below its number.

the numbers     w 7, v 9          w grows to 8, which writes no row: (7, w) is replaced when it is next the least
the rows        (7, w) (9, v)     w falls to 5: a row (5, w) is added, and (7, w) is removed when it is the least
"""

from __future__ import annotations

import heapq

from mqfs.model import NEVER


class LowWatermark(dict[int, int]):
    """The values by name. Setting a greater value costs no more than in a dict."""

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []  # (value, name): for each name a row that is not above its value

    def set(self, name: int, value: int) -> None:
        old = self.get(name)
        self[name] = value
        if old is None or value < old:
            heapq.heappush(self._heap, (value, name))
            if len(self._heap) > 2 * len(self) + 16:
                self._heap = [(value, name) for name, value in self.items()]
                heapq.heapify(self._heap)

    def remove(self, name: int) -> None:
        self.pop(name, None)

    def _least(self) -> tuple[int, int] | None:
        heap = self._heap
        while heap:
            value, name = heap[0]
            now = self.get(name)
            if now == value:
                return heap[0]
            if now is None or now < value:  # the name was removed, or has a lower row
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (now, name))
        return None

    @property
    def value(self) -> int:
        """The minimum; NEVER if there are no values."""
        least = self._least()
        return least[0] if least else NEVER

    @property
    def name(self) -> int | None:
        """The name of the minimum, or None."""
        least = self._least()
        return least[1] if least else None
