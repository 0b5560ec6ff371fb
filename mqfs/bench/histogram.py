"""A histogram of durations, of constant size: those that differ by less than 3 % are counted as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_STEPS = 32  # to a doubling
_BITS = 6  # durations below 2 × _STEPS ns are exact
_SIZE = (64 - _BITS) * _STEPS + 2 * _STEPS
PERCENTILES = (50.0, 90.0, 99.0, 99.9)


class Histogram:
    """Durations, in nanoseconds."""

    __slots__ = ("counts", "most")

    def __init__(self, counts: Sequence[int] = (), most: int = 0) -> None:
        self.counts = list(counts) + [0] * (_SIZE - len(counts))
        self.most = most

    def add(self, ns: int) -> None:
        shift = ns.bit_length() - _BITS
        if shift > 0:
            self.counts[(shift * _STEPS) + (ns >> shift)] += 1
        else:
            self.counts[ns if ns > 0 else 0] += 1
        if ns > self.most:
            self.most = ns

    def merge(self, other: Histogram) -> None:
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.most = max(self.most, other.most)

    def __len__(self) -> int:
        return sum(self.counts)

    def bars(self) -> Iterator[tuple[int, int]]:
        """The middle of each counted duration, and its count."""
        for at, count in enumerate(self.counts):
            if count:
                yield min(_middle(at), self.most), count

    def percentile(self, percent: float) -> int:
        """Nanoseconds; 0 where nothing was counted."""
        wanted = len(self) * percent / 100
        passed = 0
        for ns, count in self.bars():
            passed += count
            if passed >= wanted:
                return ns
        return self.most

    def to_list(self) -> list[int]:
        """For another process: `most`, then the counts up to the last that is not 0."""
        counts = list(self.counts)
        while counts and not counts[-1]:
            counts.pop()
        return [self.most, *counts]

    @classmethod
    def from_list(cls, row: Sequence[int]) -> Histogram:
        return cls(row[1:], row[0])


def _middle(at: int) -> int:
    shift = max(0, at // _STEPS - 1)
    return ((at - shift * _STEPS) << shift) + (1 << shift) // 2
