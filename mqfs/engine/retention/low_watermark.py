"""The least of many numbers that only grow, each under a name: a heap whose outdated entries are left until met."""

from __future__ import annotations

import heapq

from mqfs.model import NEVER


class LowWatermark(dict[int, int]):
    """name -> value. `value` costs nothing while no more than the greater ones change."""

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []  # (value, name)

    def set(self, name: int, value: int) -> None:
        if self.get(name) == value:
            return
        self[name] = value
        heapq.heappush(self._heap, (value, name))
        if len(self._heap) > 2 * len(self) + 16:
            self._heap = [(value, name) for name, value in self.items()]
            heapq.heapify(self._heap)

    def remove(self, name: int) -> None:
        self.pop(name, None)

    def _least(self) -> tuple[int, int] | None:
        heap = self._heap
        while heap and self.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0] if heap else None

    @property
    def value(self) -> int:
        """The least; a number greater than any sequence where there is none."""
        least = self._least()
        return least[0] if least else NEVER

    @property
    def name(self) -> int | None:
        """Whose it is."""
        least = self._least()
        return least[1] if least else None
