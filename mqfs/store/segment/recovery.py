"""What a log holds that no index tells: a scan of its bytes, record by record.

Owns which records of a torn tail count. Never reads or writes a file.
"""

from __future__ import annotations

import attrs

from mqfs.log import batch
from mqfs.log.record import INNER, MORE, SETTLED, Row, last_byte, next_good, padded, row_at, skim
from mqfs.model import Kind
from mqfs.store.segment.index import NonMessageRecords, OpenIndex


@attrs.define
class RecoveryScan:
    """The result of a scan of a range of a log."""

    end: int = 0  # behind the last whole batch
    written: int = 0  # behind the last byte that is not zero
    bad: list[tuple[int, int]] = attrs.Factory(list)  # ranges that failed their check


def scan_segment(data: bytes, base: int, index: OpenIndex, others: NonMessageRecords, *, tail: bool) -> RecoveryScan:
    """Add the whole batches in `data`, which lies at `base` of its log, to `index` and `others`.

    With `tail`, the bytes behind the first bad range are given up unless a later record is marked SETTLED; without,
    every bad range is passed over.
    """
    found = RecoveryScan(base, base + last_byte(data))
    limit = found.written - base
    at = 0
    unit: list[Row] = []
    doubt: tuple[int, int, int, int, int] | None = None  # where to cut back to, if nothing settled follows
    while at < limit:
        if not unit and doubt is None:
            at = skim(data, at, base, index, others.add)
            found.end = base + at
            if at >= limit:
                break
            whole = batch.scan_batch(data, at, base)
            if whole is not None:
                index.take(whole.columns)
                others.take(whole.others, whole.last_ns)
                at = whole.end
                found.end = base + at
                continue
        row = row_at(data, at, base)
        if row is None:
            if tail and doubt is None:
                doubt = (found.end, len(index), len(others), others.last_ns, len(found.bad))
            good = next_good(data, at)
            found.bad.append((base + at, base + good if good >= 0 else found.written))
            unit = []
            if good < 0:
                break
            at = good
            continue
        at += padded(row.size)
        if row.flags & SETTLED:
            doubt = None
        if row.flags & INNER and not unit:
            continue  # the beginning of its batch is lost
        if not row.flags & INNER:
            unit = []
        unit.append(row)
        if not row.flags & MORE:
            _add(unit, index, others)
            unit, found.end = [], base + at
    if doubt is not None:
        found.end, messages, rows, last_ns, bad = doubt
        index.cut(messages)
        others.cut(rows, last_ns)
        del found.bad[bad:]
    return found


def torn(data: bytes, covered: int, bad: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The bad ranges of a log that a stop left: behind `covered`, below which all was on disk, and not followed by a
    record that is marked SETTLED."""
    if not bad:
        return []
    sure = scan_segment(data[covered:], covered, OpenIndex(), NonMessageRecords(), tail=True).bad
    return [stretch for stretch in bad if stretch[0] >= covered and stretch not in sure]


def _add(unit: list[Row], index: OpenIndex, others: NonMessageRecords) -> None:
    for row in unit:
        if row.kind <= Kind.END:
            index.append(row)
        else:
            others.append(row)
