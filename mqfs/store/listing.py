"""Which messages of some streams a log has, from its index: nothing is read, and nothing is looked at one by one.

Owns the columns of that answer. A portion is what one segment has.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter

from mqfs.model import Kind, Listed
from mqfs.store.segment.index import Index

_END = bytes([Kind.END])


def listed(index: Index, floors: Mapping[int, int], begin: int, stop: int) -> Listed:
    """The messages of a segment in [begin, stop), of those streams, each from its floor on; without end marks."""
    low, high = bisect_left(index.sequences, begin), bisect_left(index.sequences, stop)
    runs = [run for number, floor in _present(index, floors) if (run := _run(index, number, floor, low, high))]
    if _END in bytes(index.kinds[low:high]):
        kinds = index.kinds
        runs = [[ordinal for ordinal in run if kinds[ordinal] != Kind.END] for run in runs]
    return Listed(sum(map(len, runs)), lambda newest: _columns(index, runs, newest))


def _present(index: Index, floors: Mapping[int, int]) -> Iterable[tuple[int, int]]:
    present = index.present()
    if len(present) < len(floors):
        return [(number, floors[number]) for number in present if number in floors]
    return floors.items()


def _run(index: Index, stream: int, floor: int, low: int, high: int) -> Sequence[int]:
    posting = index.posting(stream)
    if low < high and index.sequences[low] < floor:
        low = bisect_left(index.sequences, floor, low, high)
    at = bisect_left(posting, low)
    return posting[at : bisect_left(posting, high, at)]


def _columns(index: Index, runs: Sequence[Sequence[int]], newest: int) -> tuple[Sequence[int], Sequence[int]]:
    some = [run[-newest:] for run in runs] if newest else []
    ordinals = some[0] if len(some) == 1 else sorted(chain.from_iterable(some))[-newest:]
    return pick(index.sequences, ordinals), pick(index.bodies, ordinals)


def pick(column: Sequence[int], ordinals: Sequence[int]) -> Sequence[int]:
    """What those messages have in a column."""
    if len(ordinals) < 2:
        return [column[ordinal] for ordinal in ordinals]
    first, last = ordinals[0], ordinals[-1]
    if last - first + 1 == len(ordinals):
        return column[first : last + 1]
    return itemgetter(*ordinals)(column)  # type: ignore[no-any-return]


__all__ = ["listed", "pick"]
