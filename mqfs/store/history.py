"""The history of a group: its newest state, and the records behind it that are no messages.

Owns reading them, once, at a start.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mqfs import errors
from mqfs.log.record import HEAD_BYTES, INNER, Row, decode
from mqfs.model import Kind, Record
from mqfs.store.chain import Chain
from mqfs.store.segment.file import Segment
from mqfs.store.segment.index import Plain
from mqfs.store.sequences import RESERVE

_GAP = 4_096  # bytes between two of these records that are read along rather than passed over
_PIECE = 1 << 20  # bytes of one read


def read_history(chain: Chain) -> tuple[bytes, Iterable[Record]]:
    """The newest state that passes its check, and the records behind it. Raises DiskFailed."""
    ranges: list[tuple[Segment, int]] = []
    for segment in reversed(chain.segments):
        state, begin = _newest_state(chain, segment)
        ranges.append((segment, begin))
        if state is not None:
            return state, _behind(chain, ranges[::-1])
    raise errors.DiskFailed(f"no state of group {chain.group} is whole; see quarantine/")


def _newest_state(chain: Chain, segment: Segment) -> tuple[bytes | None, int]:
    """The newest state in it, and the number of the record behind it; None and 0 if none there is whole."""
    rows = segment.rows()
    numbers = rows.of_kind(Kind.STATE)
    while numbers:
        unit = [numbers.pop()]
        while rows[unit[0]].flags & INNER and numbers and numbers[-1] == unit[0] - 1:
            unit.insert(0, numbers.pop())
        records = [chain.record(segment, rows[number]) for number in unit]
        parts = [record.body for record in records if record is not None]
        if len(parts) == len(unit):
            return b"".join(parts), unit[-1] + 1
    return None, 0


def _behind(chain: Chain, ranges: list[tuple[Segment, int]]) -> Iterator[Record]:
    """The records of each segment from that number on, without states and reserve records."""
    change, state = int(Kind.CHANGE), int(Kind.STATE)
    for segment, begin in ranges:
        for portion in segment.rows().portions(begin):
            for record in _read_rows(chain, segment, [row for row in portion if row[5] != state]):
                if record.kind != change or not record.body.startswith(RESERVE):
                    yield record
        if segment.index is None:
            segment.drop_index_cache()  # it is not read or written yet


def _read_rows(chain: Chain, segment: Segment, rows: list[Plain]) -> Iterator[Record]:
    """Those records, by large reads; one that does not pass is read again by itself. Raises DiskFailed."""
    at = 0
    while at < len(rows):
        begin, stop, to = rows[at][1], _end(rows[at]), at + 1
        while to < len(rows) and rows[to][1] - stop <= _GAP and _end(rows[to]) - begin <= _PIECE:
            stop, to = _end(rows[to]), to + 1
        data = segment.read(begin, stop - begin)
        for sequence, position, body, stream, headers, kind, flags in rows[at:to]:
            record = decode(data[position - begin : position - begin + HEAD_BYTES + headers + body])
            if record is None:
                record = chain.record(segment, Row(sequence, 0, position, body, stream, headers, kind, flags))
            if record is not None:
                yield record
        at = to


def _end(row: Plain) -> int:
    """Where its record ends, without the padding."""
    return row[1] + HEAD_BYTES + row[4] + row[2]


__all__ = ["read_history"]
