"""Stand-ins for the default consumer of a stream, to retention."""

from __future__ import annotations

from collections.abc import Iterator


class HeldExclusives:
    """Under `deliver all`: it holds back the exclusive messages that were claimed through it and are not acked."""

    low = 0

    def __init__(self, held: set[int]) -> None:
        self._held = held

    def is_acked(self, sequence: int) -> bool:
        return sequence not in self._held

    def acked_in(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        for sequence in sorted(self._held):
            if sequence > last:
                break
            if first < sequence:
                yield first, sequence - 1
            first = max(first, sequence + 1)
        if first <= last:
            yield first, last


class NeverConsumed:
    """Under `deliver one`, where no message was ever claimed: it has acked nothing."""

    low = 0

    def is_acked(self, sequence: int) -> bool:
        return False

    def acked_in(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        return iter(())


NEVER_CONSUMED = NeverConsumed()
