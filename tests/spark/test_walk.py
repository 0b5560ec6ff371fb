"""Holes, doubles and clocks that went back: found in stretches as in all messages in a row."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_mqfs.commands import sequence_audit

ROWS = st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 40)), max_size=40)
TIMES = st.lists(st.integers(0, 3), min_size=41, max_size=41)  # of each sequence


def dealt(rows: list[tuple[str, int]], times: list[int], tasks: int) -> Iterator[pa.RecordBatch]:
    """As a shuffle would: whole stretches to tasks, there in any order."""
    for task in range(tasks):
        mine = [(g, n) for g, n in rows if hash((g, n >> sequence_audit.BITS)) % tasks == task]
        batches = [
            pa.record_batch(
                {"group": [g], "offset": pa.array([n], pa.int64()), "time": pa.array([times[n]], pa.int64())}
            )
            for g, n in mine
        ]
        yield from sequence_audit.audit_splits(iter(batches))


@given(ROWS, TIMES, st.integers(1, 4))
def test_as_in_a_row(rows: list[tuple[str, int]], times: list[int], tasks: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequence_audit, "BITS", 2)
        found = sequence_audit.merge(row for batch in dealt(rows, times, tasks) for row in batch.to_pylist())
    holes = missing = 0
    places: dict[str, list[tuple[str, int]]] = {"doubled": [], "clock": []}
    for group in "ab":
        for before, after in pairwise(sorted(n for g, n in rows if g == group)):
            holes += after > before + 1
            missing += max(after - before - 1, 0)
            if after == before:
                places["doubled"].append((group, after))
            if times[after] < times[before]:
                places["clock"].append((group, after))
    assert (found.messages, found.holes, found.missing) == (len(rows), holes, missing)
    assert (found.doubled, found.clock) == (len(places["doubled"]), len(places["clock"]))
    for name, those in places.items():
        assert set(found.places[name]) <= set(those)
        assert bool(found.places[name]) == bool(those)
