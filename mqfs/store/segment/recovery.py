"""Which records of a log count where no index lists them: a scan of its bytes, record by record.

    m1 m2 XX m4 m5S          m5 is SETTLED: XX was on disk before it. That is damage: all but XX count
    m1 m2 XX m4 m5           nothing says so. It is torn: the newest segment ends behind m2, nothing later was promised
    m1 m2 [m3 size ... m5S   m5 may be a part of the body of m3, which its writer chose, and proves nothing

A torn batch does not count at all; of a damaged one, the remaining records count. There is no I/O here.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from mqfs import limits
from mqfs.model import MORE, Kind
from mqfs.records import batch
from mqfs.records.record import (
    HEAD,
    HEAD_BYTES,
    INNER,
    SETTLED,
    Row,
    last_byte,
    next_good,
    padded,
    row_at,
    size_to,
    skim,
)
from mqfs.store.segment.index import NonMessageRecords, OpenIndex
from mqfs.store.sequences import RESERVE

_SHORTEST_CHANGE = 23  # bytes: {"do":"ctl","lines":[]}
_CHANGE = b'{"do"'
_RESERVE_BYTES = 72  # bytes of a reserve record, at most
_SECTOR_BYTES = 512  # a disk writes at least such a piece whole or not at all


@attrs.define
class RecoveryScan:
    """The result of a scan of a range of a log."""

    end: int = 0  # after the last whole batch
    written: int = 0  # after the last byte that is not zero
    bad: list[tuple[int, int]] = attrs.Factory(list)  # ranges that failed their check although they were on disk
    torn: list[tuple[int, int]] = attrs.Factory(list)  # ranges that an unclean stop left
    doubtful: set[int] = attrs.Factory(set)  # starts of the `bad` ranges that may have held more than a message
    head: int = 0  # doubtful ranges below it held only parts of the state at the head


def scan_segment(
    data: bytes,
    base: int,
    index: OpenIndex,
    others: NonMessageRecords,
    *,
    covered: int,
    tail: bool = False,
    low: int = -1,
) -> RecoveryScan:
    """Add the whole batches in `data`, which lies at `base` of its log, to `index` and `others`.

    A range that fails its check is torn if it lies at or after `covered`, below which all was on disk, and no SETTLED
    record follows. Its batch does not count, and with `tail` nothing after it does. Any other failed range is damage:
    it is skipped, and the remaining records of its batch count as before. `low`: the sequence of the message before
    `data`.
    """
    return _Scan(data, base, index, others, covered, tail, low).run()


@attrs.define
class _Scan:
    """One call of `scan_segment`. Positions are offsets in `data`."""

    data: bytes
    base: int
    index: OpenIndex
    others: NonMessageRecords
    covered: int
    tail: bool
    low: int
    unit: list[Row] = attrs.Factory(list)  # the batch that is being read
    broken: bool = False  # a part of it is damaged
    sure: int = -1  # everything before it was on disk; computed at the first failure
    is_claimed: bool = False  # a SETTLED record, perhaps inside a torn message, claims that more was on disk
    found: RecoveryScan = attrs.Factory(RecoveryScan)

    def run(self) -> RecoveryScan:
        found = self.found
        found.end, found.written = self.base, self.base + last_byte(self.data)
        at, limit = 0, found.written - self.base
        while at < limit:
            if not self.unit and not self.broken and (at := self._whole(at)) >= limit:
                break
            row = row_at(self.data, at, self.base)
            if row is None:
                at = self._pass_over(at)
                if at < 0:
                    return found
                continue
            at += padded(row.size)
            self._take(row, at)
        if self.covered - self.base > at and (self.unit or at < len(self.data)):  # the index covers more than was found
            self._add(at)
            self._report(at, -1)
        return found

    def _whole(self, at: int) -> int:
        """Add whole batches as long as they pass their check; return where they end."""
        while True:
            at = skim(self.data, at, self.base, self.index, self.others.add)
            whole = batch.scan_batch(self.data, at, self.base) if at < len(self.data) else None
            if whole is None:
                self.found.end = self.base + at
                return at
            self.index.take(whole.columns)
            self.others.take(whole.others, whole.last_ns)
            at = whole.end

    def _take(self, row: Row, end: int) -> None:
        if row.flags & INNER and not self.unit and not self.broken:
            return  # the beginning of its batch is lost
        if not row.flags & INNER:
            self.unit, self.broken = [], False
        self.unit.append(row)
        if not row.flags & MORE or self.broken:
            self._add(end)
            self.broken = self.broken and bool(row.flags & MORE)

    def _add(self, end: int) -> None:
        for row in self.unit:
            if row.kind <= Kind.END:
                self.index.append(row)
            else:
                self.others.append(row)
        self.unit, self.found.end = [], self.base + end

    def _pass_over(self, at: int) -> int:
        """Handle a record that failed its check. Returns where the next record begins; -1: the scan ends."""
        last = max([self.low, *self.index.sequences[-1:], *(row.sequence for row in self.unit if row.kind <= Kind.END)])
        if self.sure < 0:
            settled = [(row, sure) for row, sure in _behind(self.data, self.base, at, last) if row.flags & SETTLED]
            self.sure = max([self.covered - self.base, *(row.position for row, sure in settled if sure)])
            self.is_claimed = any(not sure for _, sure in settled)
        good = next_good(self.data, at, last)
        if at < self.sure:
            if self.unit:
                self._add(at)
            self._report(at, good)
        elif self.tail:
            if self.is_claimed:
                self.found.bad.append((self.base + at, self.found.written))
            return -1
        else:
            good = next((row.position for row, sure in _behind(self.data, self.base, at, last) if sure), -1)
            self.found.torn.append((self.base + at, self.base + good if good >= 0 else self.found.written))
        self.unit, self.broken = [], at < self.sure
        return good

    def _report(self, at: int, good: int) -> None:
        """Report damage up to the next good record, and whether it may have held more than a message or a reserve
        record. That is ruled out only where two fields would have to be wrong for another record to look like one."""
        data, end = self.data, good if good >= 0 else max(len(self.data), at)
        is_cut = good < 0 and self.base + at < self.found.written
        self.found.bad.append((self.base + at, self.found.written if is_cut else self.base + end))
        size, _, sequence, _, stream, kind, _, headers = HEAD.unpack_from(data.ljust(at + HEAD_BYTES, b"\0"), at)
        if padded(size) != end - at:
            size = size_to(data, at, end)
        if size and 0 < kind <= Kind.END and 0 <= max(self.low, _last_sequence(self.index, self.others)) < sequence:
            return
        is_change = data.startswith(_CHANGE, at + HEAD_BYTES)  # if so, its size is damaged
        if size and not headers and not is_change and is_reserve(kind, stream, size - HEAD_BYTES):
            return
        if end - at <= _RESERVE_BYTES and data.startswith(RESERVE, at + HEAD_BYTES):
            return
        self.found.doubtful.add(self.base + at)
        is_head = not len(self.index) and len(self.others.of_kind(Kind.STATE)) == len(self.others)
        behind = row_at(data, good) if size and is_head and good >= 0 else None
        if behind is not None and behind.flags & INNER:
            self.found.head = self.base + end


def _behind(data: bytes, base: int, at: int, low: int) -> Iterator[tuple[Row, bool]]:
    """Yield the records behind the bad one at `at`, each with whether it surely is a record. It is not sure where the
    body of a torn message may hold it, since a client chose those bytes. Only for the bad record itself the reach of
    such a body is known; behind any other place that fails, a body may begin wherever the next record is found."""
    reach = 0  # the furthest end of a torn body
    while (good := next_good(data, at, low)) >= 0:
        reach = max(reach, good + _most() if at < reach else _reach(data, base, at, good))
        at = good
        while (row := row_at(data, at)) is not None:
            if at >= reach and row.kind <= Kind.END:
                low = row.sequence
            yield row, at >= reach
            at += padded(row.size)


def _reach(data: bytes, base: int, at: int, good: int) -> int:
    """Return how far the last of the records from `at` to `good` may reach if a power cut tore them. The sector with
    the head of each was either written, and has its size, or not, and is zeros. Anything else is damage, not a tear."""
    if size_to(data, at, good):
        return good
    while at < good:
        size = int.from_bytes(data[at : at + 4], "little")
        left = _SECTOR_BYTES - (base + at) % _SECTOR_BYTES  # bytes from here to the end of its sector
        if not size:
            return good if any(data[at : at + left]) else at + _most()
        if not HEAD_BYTES <= size <= _most() or (left >= HEAD_BYTES and not _is_head(data, at)):
            return good
        at += padded(size)
    return at


def _is_head(data: bytes, at: int) -> bool:
    """Whether a head that was written whole may be there, rather than noise."""
    size, _, sequence, _, _, kind, flags, headers = HEAD.unpack_from(data, at)
    if not 0 < kind <= Kind.STATE or flags > MORE | INNER | SETTLED or size < HEAD_BYTES + headers:
        return False
    return bool(sequence < 1 << 56)  # a million messages a second for 2,000 years


def _most() -> int:
    """Return the bytes of the largest message."""
    return HEAD_BYTES + 0xFFFF + limits.MESSAGE_BYTES


def _last_sequence(index: OpenIndex, others: NonMessageRecords) -> int:
    """Return the sequence of the last record of any kind; -1 if there is none."""
    other = others[len(others) - 1] if len(others) else None
    if len(index) and (other is None or other.position < index.positions[-1]):
        return index.sequences[-1]
    return other.sequence if other is not None else -1


def is_reserve(kind: int, stream: int, body: int) -> bool:
    """Whether a record that is no message must be a reserve record by its size: no other change is as short."""
    return kind == Kind.CHANGE and stream == 0 and body < _SHORTEST_CHANGE
