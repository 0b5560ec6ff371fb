"""The checks of a ring's records before they enter the log: clients may write anything into a ring.

This module has the rules for clients' records, and the budget for checking a corrupt ring. It changes neither ring nor
log.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mqfs import limits, ring
from mqfs.engine.group import Group
from mqfs.model import Kind, Record, RecordColumns
from mqfs.records.batch import tally
from mqfs.records.record import HEAD_BYTES, decode, padded, row_at
from mqfs.ring import EPHEMERAL, OWN
from mqfs.state.group import FIRST_STREAM
from mqfs.store.api import LogEnd

if TYPE_CHECKING:
    from mqfs.ring import Ring

HEAD_COST = 1_024  # bytes whose scan takes as long as the check of a head
_HIT_COST = 64
_BUDGET_BYTES = 2 << 20  # some 10 ms
_AHEAD_NS = 10**9  # a record may be so far ahead of the wall clock: it was set back, or another CPU's is ahead


class IngestChecks:
    """The checks of one ring. `end` is that of the group's log."""

    def __init__(self, group: Group, end: LogEnd, made: Ring) -> None:
        self._group, self._end = group, end
        self.capacity = made.size // HEAD_BYTES  # messages that the ring can hold
        # An earlier server may have ingested or written messages below it.
        self._resumed = min(made.next, end.next + self.capacity) if made.tail else 0
        self.corrupt = ""  # the first thing found that no client may write
        self.slack = 0  # sequences that may be missing: refused bytes may have been their messages
        self._budget = _BUDGET_BYTES  # for bytes that are examined one by one

    def report(self, finding: str) -> None:
        self.corrupt = self.corrupt or finding

    def spend(self, cost: int) -> bool:
        """Whether the budget allows for that cost. It bounds the server's time for corrupt bytes."""
        self._budget -= cost
        return self._budget >= 0

    # ------------------------------------------------------------ a run of records

    def is_sound(self, rows: RecordColumns, own: range) -> bool:
        """Whether a whole run may be ingested as it is. `own`: sequences of the server's messages."""
        return self._is_in_order(rows) and self._is_plain(rows, own)

    def _is_in_order(self, rows: RecordColumns) -> bool:
        first = rows.sequences[0]
        holes = self.capacity if first < self._resumed or self.corrupt else 0
        if not 0 <= first - self._end.next <= holes:
            return False
        return is_plausible(rows.times[-1]) and ring.is_ordered(rows)

    def _is_plain(self, rows: RecordColumns, own: range) -> bool:
        """Whether every record except the server's own is one that a client may publish."""
        first, count = rows.sequences[0], len(rows.sequences)
        if own and first <= own.start < first + count:
            begin, end = own.start - first, own.stop - first
            around = [rows.part(a, b) for a, b in ((0, begin), (end, count)) if a < b]
            return all(map(self._is_clients, around))
        return self._is_clients(rows)

    def _is_clients(self, rows: RecordColumns) -> bool:
        # First a check by range: a forged run may have as many stream numbers as records, too many to tally.
        if not ring.is_plain(rows, limits.MESSAGE_BYTES, range(FIRST_STREAM, self._group.state.next_stream)):
            return False
        return all(row.place in self._group.numbers for row in tally(rows))

    # ------------------------------------------------------------ one record, where a run is not sound

    def is_settled(self, record: Record) -> bool:
        """Whether an earlier server ingested the record, or never answered its writer."""
        ahead = record.sequence - self._end.next
        return record.sequence < self._resumed and ahead <= self.capacity and (ahead < 0 or bool(record.flags & OWN))

    def is_acceptable(self, record: Record) -> bool:
        """Whether a record may come next, and a client may publish it."""
        if not 0 <= record.sequence - self._end.next <= self.slack:
            return False
        if record.kind != Kind.MESSAGE or record.headers or not (record.flags <= 3 or record.flags == EPHEMERAL):
            return False
        if not FIRST_STREAM <= record.stream < self._group.state.next_stream:
            return False
        return 0 < len(record.body) <= limits.MESSAGE_BYTES and is_plausible(record.time_ns)

    def pieces(self, data: memoryview, at: int, rows: RecordColumns) -> Iterator[tuple[int, int, Record | None]]:
        """Yield (begin, end, record) of those rows, which begin at `at`, and of the bytes after them; record is None
        for bytes that are no record."""
        for position, headers, body in zip(rows.positions, rows.headers, rows.bodies, strict=True):
            begin, size = at + position, HEAD_BYTES + headers + body
            yield begin, begin + padded(size), decode(bytes(data[begin : begin + size]))
        at += rows.end
        if at < len(data):
            yield at, self._next_record(data, at), None

    def _next_record(self, data: memoryview, bad: int) -> int:
        """Return the next offset where a record may begin. Only offsets with a possible sequence and time are
        examined."""
        whole, low = data.obj, self._end.next
        assert isinstance(whole, bytes)
        if self._budget < 0:
            return len(data)
        before = len(whole) - len(data)
        sequences = {number.to_bytes(8, "little")[3:] for number in (low, low + self.capacity)}
        times = {moment.to_bytes(8, "little")[6:] for moment in (max(self._end.last_ns, 0), time.time_ns())}
        for at in _heads(whole, times, before + bad):
            if not self.spend(_HIT_COST):
                break
            if (at - before - bad) % 8 or whole[at + 11 : at + 16] not in sequences:
                continue
            if not self.spend(HEAD_COST + min(int.from_bytes(whole[at : at + 4], "little"), len(whole) - at)):
                break
            if row_at(whole, at):
                return at - before
        return len(data)


def is_plausible(time_ns: int) -> bool:
    """Whether a record may have that time: it is not too far ahead of the wall clock."""
    return time_ns <= time.time_ns() + _AHEAD_NS


def _heads(data: bytes, times: set[bytes], bad: int) -> Iterator[int]:
    """Return offsets after `bad` where record heads may be, found by the last bytes of their time."""
    ends = re.compile(b"|".join(map(re.escape, times)))
    return (found.start() - 22 for found in ends.finditer(data, bad + 8 + 22))
