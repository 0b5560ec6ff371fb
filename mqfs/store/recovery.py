"""Starting a log: its newest segment, where that ends, the next sequence, and the history of the group.

    [1 to 39, sealed]   [40 to 71, sealed]   [72: state|..............|.......|torn]
     not scanned         not scanned          its index covers 72 to 85, the scan finds 86 to 89; the rest is cut
    next sequence       the bound of the newest reserve record; after damage, more than that may have hidden

A newest segment without a whole head was begun just before the stop: it is moved to quarantine/, and the one before it
is the newest. The history is the newest state and the records after it that are no messages. If that state is damaged,
the history is the state before it and all changes since, provided that no record is missing between the two segments.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from math import inf
from typing import Protocol

from mqfs import errors
from mqfs.model import MORE, Kind, Record
from mqfs.records.record import HEAD_BYTES, INNER, Row, decode, padded
from mqfs.store.chain import Chain
from mqfs.store.group_commit import GroupCommit
from mqfs.store.segment.file import Segment
from mqfs.store.segment.index import NonMessageRecords, Plain
from mqfs.store.segment.recovery import is_reserve
from mqfs.store.sequences import REMOVED, RESERVE, behind_damage, reserved_by

MOVED = ".tmp"  # ends the name of a segment that a repair renames, between its old name and its own
_OWN_BODY = 40  # bytes; the store's own records have shorter bodies


def recover(chain: Chain, commit: GroupCommit) -> int:
    """Fill the chain from its folder and return the next sequence. A newest segment that is not whole is moved to
    quarantine/. Raises DiskFailed and OSError."""
    found = chain.disk.listdir(chain.folder)
    if any(name.endswith(MOVED) for name in found):
        raise errors.DiskFailed(f"group {chain.group}: a repair of it did not end (run mqfs check --fix)")
    names = sorted(name for name in found if name.endswith(".log"))
    firsts = [int(name[:-4]) for name in names]
    lost = 0  # the first sequence of the newest segment that is not whole
    while firsts:
        newest = chain.segment(firsts[-1])
        if newest.start(newest=True, only=len(firsts) == 1 and not lost):
            break
        newest.close_idle()
        lost = lost or newest.first
        chain.context.quarantine.move(chain.group, newest.first, newest.path, "a segment without a whole state")
        firsts.pop()
    else:
        raise errors.DiskFailed(f"no segment of group {chain.group} is whole (see quarantine/)")
    chain.segments, chain.firsts = [chain.segment(first) for first in firsts[:-1]] + [newest], firsts
    for older in chain.segments[:-1]:
        older.used = chain.disk.size_of(older.path)
        chain.sealed_bytes += older.used
    if newest.sealed:
        chain.sealed_bytes += newest.used
    else:
        _reopen(chain, commit, newest)
    chain.end.last_ns = newest.last_ns()
    return _next_sequence(chain, lost)


def _reopen(chain: Chain, commit: GroupCommit, segment: Segment) -> None:
    """Continue the segment that was open at the stop. After an unclean stop, bytes that no whole index covers may not
    be on disk: they are written again."""
    chain.open = segment
    segment.may_close_fd = commit.may_close
    commit.watch(segment, inf)
    if segment.idx.is_clean(segment.used):
        return
    commit.note_folder_change()
    unsure = [older for older in chain.segments[:-1] if not older.looks_sealed()]
    commit.watch_only({**dict.fromkeys(unsure, commit.written), segment: inf})
    for some in (*unsure, segment):
        some.may_close_fd = commit.may_close
        some.write_again()


def _next_sequence(chain: Chain, lost: int) -> int:
    """Return the bound of the newest reserve record, or a greater sequence that the log holds or that damage may
    hide."""
    bound = 1
    for segment in reversed(chain.segments):
        bounds = _reserves(segment)
        newest = next(bounds, 0)
        bound = max(bound, segment.counts()[2] + 1, lost)
        if newest and not chain.damaged and not lost:
            return max(bound, newest)
        if newest:
            return behind_damage(max(bound, newest, *bounds))
    return behind_damage(bound)


def _reserves(segment: Segment) -> Iterator[int]:
    """Yield the bounds that reserve records of the segment have, the newest first."""
    rows = segment.rows()
    for number in reversed(rows.of_kind(Kind.CHANGE)):
        row = rows[number]
        if row.stream == 0 and row.body < _OWN_BODY:
            record = _record(segment, row)
            if record is not None and (bound := reserved_by(record.body)):
                yield bound


def is_removed(chain: Chain) -> bool:
    """Whether the newest change of the log, which nothing follows, is the removal of the group."""
    segment = chain.segments[-1]
    rows = segment.rows()
    newest = rows[rows.of_kind(Kind.CHANGE)[-1]]
    if newest.stream or newest.body >= _OWN_BODY:
        return False
    record = _record(segment, newest)
    return record is not None and record.body.startswith(REMOVED)


# ------------------------------------------------------------ history

# The history of a group: its newest state, and the records after it that are no messages.
#
# The history is read once at a start, and by a check. The state is whole if none of its records is damaged. A damaged
# state at the head of a segment is replaced by the state before it and the changes since, if the two segments join.

_GAP = 4_096  # bytes between two of these records that are read along rather than skipped
_PIECE = 1 << 20  # bytes of one read


class LogSegment(Protocol):
    """One segment of a log, as the server and the check read it."""

    @property
    def first(self) -> int: ...

    @property
    def doubtful(self) -> set[int]:
        """Positions where damage may have been more than a message, unless an index lists what was there."""
        ...

    @property
    def damaged_head(self) -> int:
        """The position below which doubtful places were parts of the state at the head."""
        ...

    def rows(self) -> NonMessageRecords: ...

    def counts(self) -> tuple[int, int, int]:
        """Return the number of messages, and the sequences of the first and the last."""
        ...

    def read(self, position: int, size: int) -> bytes: ...

    def report_corruption(self, position: int, data: bytes) -> None: ...

    @property
    def index(self) -> object | None:
        """The index of the messages; None while it is not in memory."""
        ...

    def drop_index_cache(self) -> None: ...


class History:
    """The history of a group. Iterate once: `lost` is complete afterwards."""

    def __init__(self, newest_first: Iterable[LogSegment]) -> None:
        self.state: bytes | None = None  # the newest whole state
        self.lost: list[str] = []  # damaged parts that affect the state
        self._ranges: list[tuple[LogSegment, int]] = []
        self._begun = 0  # position of the state in its segment
        self.is_newest = True  # whether the state is in the newest segment
        for source in newest_first:
            rows = source.rows()
            if self._ranges and rows and last_sequence(source) != self._ranges[-1][0].first - 1:
                self.lost.append(f"what was between {source.first} and {self._ranges[-1][0].first}")
            self.state, begin, self._begun = self._newest_state(source, rows)
            self._ranges.append((source, begin))
            if self.state is not None:
                self.is_newest = len(self._ranges) == 1
                return
        self.lost = ["no state is whole"]

    def _newest_state(self, source: LogSegment, rows: NonMessageRecords) -> tuple[bytes | None, int, int]:
        """Return the newest whole state in the segment, the number of the record after it, and its position; None, 0, 0
        if there is none."""
        for unit in _states_in(rows):
            if (body := _state(source, rows, unit)) is not None:
                return body, unit[-1] + 1, rows[unit[0]].position
        return None, 0, 0

    def __iter__(self) -> Iterator[Record]:
        """Yield the records after the state, of each segment in order, without states and reserve records."""
        change, state = int(Kind.CHANGE), int(Kind.STATE)
        for source, begin in reversed(self._ranges):
            is_oldest = source is self._ranges[-1][0]
            least = self._begun if is_oldest and self.state is not None else source.damaged_head
            self.lost += [_place(source, at) for at in sorted(source.doubtful) if at >= least]
            for portion in source.rows().portions(begin):
                for record in self._read_rows(source, [row for row in portion if row[5] != state]):
                    if record.kind != change or not record.body.startswith(RESERVE):
                        yield record
            if source.index is None:
                source.drop_index_cache()

    def _read_rows(self, source: LogSegment, rows: list[Plain]) -> Iterator[Record]:
        """Yield the records of those rows, by large reads; a record that does not pass is read again by itself. Raises
        DiskFailed."""
        at = 0
        while at < len(rows):
            begin, stop, to = rows[at][1], _end(rows[at]), at + 1
            while to < len(rows) and rows[to][1] - stop <= _GAP and _end(rows[to]) - begin <= _PIECE:
                stop, to = _end(rows[to]), to + 1
            data = source.read(begin, stop - begin)
            for sequence, position, body, stream, headers, kind, flags in rows[at:to]:
                record = decode(data[position - begin : position - begin + HEAD_BYTES + headers + body])
                if record is None:
                    record = _record(source, Row(sequence, 0, position, body, stream, headers, kind, flags))
                if record is not None:
                    yield record
                elif not is_reserve(kind, stream, body):
                    self.lost.append(_place(source, position))
            at = to


def last_sequence(source: LogSegment) -> int:
    """Return the sequence of the segment's last record. If records are missing, the next segment does not begin just
    after it."""
    rows = source.rows()
    return max([source.counts()[2], *(rows[number].sequence for number in range(len(rows))[-1:])])


def _states_in(rows: NonMessageRecords) -> Iterator[list[int]]:
    """Yield the numbers of the records of each state, the newest state first; some records may be missing."""
    numbers = rows.of_kind(Kind.STATE)
    while numbers:
        unit = [numbers.pop()]
        while rows[unit[0]].flags & INNER and numbers and numbers[-1] == unit[0] - 1:
            unit.insert(0, numbers.pop())
        yield unit


def whole_states(source: LogSegment) -> set[int]:
    """Return the positions of all records of the segment's whole states."""
    rows = source.rows()
    units = [unit for unit in _states_in(rows) if _state(source, rows, unit) is not None]
    return {rows[number].position for unit in units for number in unit}


def _state(source: LogSegment, rows: NonMessageRecords, unit: list[int]) -> bytes | None:
    """Return the state in those records, or None if they are not all of it. Each record must begin where the one before
    ends, and so must the record after them; where that is damaged the body must be one JSON object."""
    pieces = [rows[number] for number in unit]
    ends = [piece.position + padded(piece.size) for piece in pieces]
    if pieces[0].flags & INNER or any(end != piece.position for end, piece in zip(ends, pieces[1:], strict=False)):
        return None
    records = [_record(source, piece) for piece in pieces]
    body = b"".join(record.body for record in records if record is not None)
    if None in records:
        return None
    behind = unit[-1] + 1
    joins = behind < len(rows) and rows[behind].position == ends[-1]
    return body if joins or not pieces[-1].flags & MORE or is_json(body) else None


def _record(source: LogSegment, row: Row) -> Record | None:
    """Return the record of that row; if it does not pass its check, report it and return None. Raises DiskFailed."""
    data = source.read(row.position, row.size)
    record = decode(data)
    if record is None:
        source.report_corruption(row.position, data)
    return record


def is_json(body: bytes) -> bool:
    """Whether the body is one JSON object."""
    try:
        return isinstance(json.loads(body), dict)
    except ValueError:
        return False


def _place(source: LogSegment, position: int) -> str:
    return f"the record at {position} of {source.first:020d}.log"


def _end(row: Plain) -> int:
    """Return the position where its record ends, without the padding."""
    return row[1] + HEAD_BYTES + row[4] + row[2]
