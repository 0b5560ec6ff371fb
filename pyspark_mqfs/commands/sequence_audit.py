"""Audit of the sequences of each group: gaps, duplicates, and time running backwards, in any number of messages.

Messages are partitioned by splits of sequences. Each split is sorted by itself, and the driver gets only its counts and
its borders. There is no global sort.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import attrs
import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

BITS = 17  # log2 of the sequences of a split
EXAMPLES = 5
SPLIT = (
    "group string, first bigint, last bigint, begin bigint, end bigint, messages bigint, holes bigint, missing bigint,"
    " doubled bigint, clock bigint, doubled_at array<bigint>, clock_at array<bigint>"
)
_LISTS = ("doubled_at", "clock_at")
_ARROW = pa.schema(
    [(name, pa.list_(pa.int64()) if name in _LISTS else pa.int64()) for name in SPLIT.replace(",", "").split()[2::2]]
).insert(0, pa.field("group", pa.string()))


@attrs.define
class AuditResult:
    """The counts, and examples as (group, sequence)."""

    messages: int = 0
    holes: int = 0
    missing: int = 0
    doubled: int = 0
    clock: int = 0
    places: dict[str, list[tuple[str, int]]] = attrs.Factory(lambda: {"doubled": [], "clock": []})


def audit(rows: DataFrame) -> AuditResult:
    """Audit rows with `group`, `offset` and `timestamp`."""
    narrow = rows.select("group", "offset", F.unix_micros("timestamp").alias("time"))
    partitioned = narrow.repartition("group", F.shiftright("offset", BITS))
    return merge(row.asDict() for row in partitioned.mapInArrow(audit_splits, SPLIT).collect())


def merge(rows: Iterable[dict[str, Any]]) -> AuditResult:
    """Merge the rows of all splits, and audit the borders between them."""
    result, before = AuditResult(), None
    for current in sorted(rows, key=lambda row: (row["group"], row["first"])):
        for name in ("messages", "holes", "missing", "doubled", "clock"):
            setattr(result, name, getattr(result, name) + current[name])
        for name, places in result.places.items():
            places += [(current["group"], sequence) for sequence in current[f"{name}_at"]]
        if before is not None and before["group"] == current["group"]:
            _audit_border(result, before, current)
        before = current
    return result


def _audit_border(result: AuditResult, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Audit the border of two splits."""
    gap = after["first"] - before["last"] - 1
    result.holes += gap > 0
    result.missing += gap
    if after["begin"] < before["end"]:
        result.clock += 1
        result.places["clock"].append((after["group"], after["first"]))


def audit_splits(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield one row for each split in the batches."""
    present = [batch for batch in batches if batch.num_rows]
    if not present:
        return
    table = pa.Table.from_batches(present)
    groups = table["group"].combine_chunks().dictionary_encode()
    if isinstance(groups, pa.ChunkedArray):
        groups = groups.combine_chunks()
    columns = (groups.indices, table["offset"], table["time"])
    group, offset, time = (np.asarray(column).astype(np.int64) for column in columns)
    order = np.lexsort((offset, group))
    group, offset, time = group[order], offset[order], time[order]
    split = offset >> BITS
    step, inside = np.diff(offset), (np.diff(group) == 0) & (np.diff(split) == 0)
    marks = {
        "holes": inside & (step > 1),
        "missing": np.where(inside, np.maximum(step - 1, 0), 0),
        "doubled": inside & (step == 0),
        "clock": inside & (np.diff(time) < 0),
    }
    starts = np.flatnonzero(np.concatenate(([True], ~inside)))
    stops = np.append(starts[1:], len(offset))
    values: dict[str, Any] = {
        name: np.add.reduceat(np.concatenate(([0], mark.astype(np.int64))), starts) for name, mark in marks.items()
    }
    for name in ("doubled", "clock"):
        values[f"{name}_at"] = [
            _examples(offset, marks[name], a, b) for a, b in zip(starts.tolist(), stops.tolist(), strict=True)
        ]
    values |= {"group": groups.dictionary.take(pa.array(group[starts])), "messages": stops - starts}
    values |= {"first": offset[starts], "last": offset[stops - 1], "begin": time[starts], "end": time[stops - 1]}
    yield pa.RecordBatch.from_arrays([pa.array(values[field.name], field.type) for field in _ARROW], schema=_ARROW)


def _examples(offset: Any, mark: Any, start: int, stop: int) -> list[int]:
    """Return the first marked sequences of a split. A mark belongs to the step to the next row."""
    result = start + 1 + np.flatnonzero(mark[start : stop - 1])[:EXAMPLES]
    return [int(sequence) for sequence in offset[result]]
