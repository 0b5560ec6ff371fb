"""Copying records from a group's ring into its log: whole ranges, or one by one where not all of them are sound.

The intake keeps the position in the ring, and the order of the server's own messages among those of clients.
ingest_checks.py decides which records are ingested; the others are moved to quarantine. If nothing is promised to later
readers, records stay in the ring until its readers have passed them. Then they are only checked and counted
(RingReaders).
"""

from __future__ import annotations

import logging
import os
import re
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from mqfs import errors, limits, ring
from mqfs.engine.group import Group
from mqfs.engine.publishing.publisher import count_unstored, has_live_readers, ingest
from mqfs.model import MORE, NEVER, Buffer, Record, RecordColumns
from mqfs.records.record import HEAD_BYTES, padded
from mqfs.ring.server.ingest_checks import HEAD_COST, IngestChecks
from mqfs.store.api import Bucket, LogEnd

if TYPE_CHECKING:
    from mqfs.ring import Consumer, Ring

log = logging.getLogger("mqfs.ring")

UNWRITABLE = (errors.DiskFull, errors.StreamFull, errors.DiskFailed, errors.ReadOnly)

_TIME, _CRC = struct.Struct("<q"), struct.Struct("<I")
_EPHEMERAL = re.compile(re.escape(bytes([ring.EPHEMERAL])) + b"+")  # in a column of flags
_OWN_BYTES = 64 << 10  # bytes of the server's changes and acks, appended to the log meanwhile
_LEAST_KEPT = 64 << 10  # bytes whose writing takes as long as making a file


class _Range:
    """Records copied from the ring; the log does not have all of them yet."""

    def __init__(self, data: bytes | memoryview, rows: RecordColumns) -> None:
        self.data, self.rows = data, rows
        self.at = 0  # the next row
        self._flags = rows.flags.tobytes()

    def __len__(self) -> int:
        return len(self.rows.sequences)

    @property
    def sequence(self) -> int:
        """The sequence of the next row."""
        return self.rows.sequences[self.at]

    def split(self, begin: int, end: int) -> tuple[Buffer, RecordColumns, RecordColumns]:
        """Return the records of these rows that are not ephemeral, their rows, and the rows of the ephemeral ones. It
        takes one pass: a client may publish both by turns, as many as the ring has room for."""
        if ring.EPHEMERAL not in self._flags[begin:end]:
            return self.between(begin, end), self.rows.part(begin, end), ring.scan(b"")
        whole, stops = memoryview(self.data), [*self.rows.positions[begin:end], self._stop(end)]
        kept, ephemeral, at = [], [], 0
        for run in _EPHEMERAL.finditer(self._flags[begin:end]):
            first, after = run.span()
            kept.append(whole[stops[at] : stops[first]])
            ephemeral.append(whole[stops[first] : stops[after]])
            at = after
        kept.append(whole[stops[at] : stops[-1]])
        data = b"".join(kept)
        return data, ring.scan(data), ring.scan(b"".join(ephemeral))

    def between(self, begin: int, end: int) -> memoryview:
        """Return the bytes of these rows."""
        return memoryview(self.data)[self.rows.positions[begin] : self._stop(end)]

    def _stop(self, end: int) -> int:
        """Return where the row before row `end` ends."""
        return self.rows.positions[end] if end < len(self) else self.rows.end


class RingIntake:
    """Copies one ring's records into the group's log, `inner`. `retire` ends publishing in the ring."""

    def __init__(self, group: Group, made: Ring, inner: Bucket, retire: Callable[[str], None]) -> None:
        self._group, self._ring, self._inner, self._retire = group, made, inner, retire
        self._consumer: Consumer = made.consumer(kept=True, hold=True)
        self.checks = IngestChecks(group, inner.end, made)
        self.readers = RingReaders(made, inner.end, self._consumer.position, group.retention.note_change)
        self.taking = False
        self.blocked = ""  # why the log accepts nothing now
        self.no_room = ""  # why the log has no room for more than the ring's records: the ring must be retired
        self.leaves = False  # the last `take` left records to the ring's readers: call it again soon
        self._is_promised = True  # others than the ring's readers may read the records ingested last
        self._range: _Range | None = None
        self._raw: bytes | memoryview = b""  # bytes copied and not scanned yet
        self._salvaged: int | None = None  # end of the bytes to ingest, if the ring could not be read further
        self._broken = False  # a bug was met: nothing more is read from the ring
        self._own = range(0)  # sequences of the server's messages that are being written
        self._void = range(0)  # those that the log refused
        self._may_leave = False  # see `take`
        self._quarantined = 0  # bytes

    @property
    def position(self) -> int:
        """The position in the ring up to which records were copied."""
        return self._consumer.position

    @property
    def is_empty(self) -> bool:
        return self._range is None and not self._raw and self._ring.tail == self._consumer.position

    @property
    def final_position(self) -> int | None:
        """The position where a retired ring ends; None while records are to be ingested."""
        if self.blocked or self._range is not None or self._raw:
            return None
        return self._consumer.position if self._salvaged is None else self._salvaged

    def expect_reader(self) -> None:
        """Note that a file of the group is opened: readers other than the ring's may want the next records."""
        self._is_promised = True

    def close(self) -> None:
        """Stop reading the ring, and leave it as it is."""
        self._consumer.close()

    # ------------------------------------------------------------ the server's own messages

    def take_before_own(self, own: range) -> int | None:
        """Ingest the records published before the server's messages with those sequences. Returns the time of these
        messages, or None if they are not in the ring. Call `own_appended` or `own_refused` next."""
        self._own = own
        self.take(own.start)
        there = self._range
        if there is None or there.sequence != own.start:
            return None
        self._skip_to(own.start)
        return int(there.rows.times[there.at])

    def own_appended(self) -> bool:
        """Skip the server's own messages, which are in the log. Returns whether they were in the ring."""
        there, own, self._own = self._range, self._own, range(0)
        if not own or there is None:
            return False
        there.at += len(own)
        self._done_with_range()
        return True

    def own_refused(self) -> None:
        """Note that the log refused the server's own messages: their writer gets an error."""
        if self._own:
            self._void, self._own = self._own, range(0)

    # ------------------------------------------------------------ taking

    def take(self, until: int | None = None, most_bytes: int | None = None, *, may_leave: bool = False) -> None:
        """Ingest records below sequence `until`, about `most_bytes` (None: a ring's worth). If the log refuses them,
        `blocked` says why. `may_leave`: leave records that only the ring's readers may read, while these are about to
        pass them."""
        if self.taking or self._broken:
            return
        self.taking, self.blocked = True, ""
        self._may_leave, self.leaves = may_leave and self._is_left_to_readers(), False
        left = limits.RING_BYTES if most_bytes is None else most_bytes
        try:
            while left > 0:
                there = self._range
                if there is None:
                    scanned = self._scan_next()
                    left -= scanned if self._range is None else 0
                    if not scanned:
                        return
                elif until is not None and there.sequence >= until:
                    return
                else:
                    left -= self._take_rows(there, until)
        except UNWRITABLE as error:
            self.blocked = error.detail
        except Exception:
            self._break_off()
        finally:
            self.taking = False

    def _break_off(self) -> None:
        """Stop reading the ring after a bug. Bytes that were not ingested are moved to quarantine."""
        log.exception("ring of group %d abandoned: reading it failed", self._group.number)
        there, untaken = self._range, self._raw
        self._range, self._raw, self._broken = None, b"", True
        if there is not None and there.at < len(there):
            untaken = bytes(there.between(there.at, len(there))) + bytes(untaken)
        if self._salvaged is None:
            self._salvaged = self._consumer.position - len(untaken)
        self._refuse(bytes(untaken))

    def _scan_next(self) -> int:
        """Make the next published records the range, or ingest the sound ones. Returns the bytes scanned; 0: there are
        none."""
        data = self._raw or self._copy(self._takeable_bytes())
        if not data:
            return 0
        rows = ring.scan(data)
        while rows.end == len(data) and rows.flags[-1] & MORE and (more := self._copy()):
            data = bytes(data) + more
            rows = ring.scan(data)
            if len(data) > self._ring.size:
                break  # an atomic batch that never ends
        self._raw = data
        if rows.end == len(data) and self.checks.is_sound(rows, self._own or self._void):
            self._range, self._raw = _Range(data, rows), b""
        else:
            self._filter_range(data)
        return len(data)

    def _is_left_to_readers(self) -> bool:
        """Whether records may stay in the ring for a while: only its own readers wait for them, which do not need the
        server, and no publisher waits for a commit."""
        group = self._group
        promised = self._is_promised or group.log.must_retain or group.waiting.readers or group.past_rings
        return not (promised or self._ring.awaited)

    def _takeable_bytes(self) -> int:
        """Return the number of bytes to copy next from the ring."""
        most = limits.RING_RANGE_BYTES
        if self._may_leave and self._salvaged is None:
            passed = self.readers.passed_bytes(self._consumer.position)
            self.leaves = passed == 0
            most = min(most, passed)
        return most

    def _copy(self, most: int = limits.RING_RANGE_BYTES) -> bytes:
        if self._salvaged is not None or not most:
            return b""
        try:
            return self._consumer.range(most, 0) or b""
        except (errors.Damaged, errors.FellBehind) as error:
            self.checks.corrupt = error.detail
            return self._salvage()

    def _salvage(self) -> bytes:
        """Retire a corrupt ring, and return all its remaining bytes: records may follow the bad bytes."""
        self._retire("it is corrupt")
        memory, begin, tail = self._ring.fileno(), self._consumer.position, self._ring.tail
        of = self._ring.size
        size, at = tail - begin if begin <= tail <= begin + of else of, begin & (of - 1)
        self._salvaged = begin + size
        whole = os.pread(memory, min(size, of - at), ring.HEAD_BYTES + at)
        return whole + os.pread(memory, size - len(whole), ring.HEAD_BYTES)

    def _take_rows(self, there: _Range, until: int | None) -> int:
        """Ingest rows of a range, below sequence `until`; return their bytes."""
        begin, end, sequences = there.at, len(there), there.rows.sequences
        if until is not None and sequences[end - 1] >= until:
            end = begin + until - sequences[begin]
        if self._void and self._void.start <= sequences[end - 1]:
            return self._leave_out_void(there)
        size, following = len(there.between(begin, end)), sequences[end - 1] + 1
        data, part, ephemeral = there.split(begin, end)
        if len(data) and self._is_wanted(part):
            self._group.retention.reserve_room(len(data))
            if part.times[0] < self._inner.end.last_ns:
                data = _lifted(data, part, self._inner.end.last_ns)
                part = ring.scan(data, part.positions[0])
            self._skip_to(sequences[begin])
            base = self._inner.ranges.reserve_space(len(data), end - begin)
            part = ring.moved(part, base - part.positions[0])
            self._inner.ranges.append_range(data, part)
            self._inner.ranges.skip_to(following)
            there.at = end
            try:
                count_unstored(self._group, ephemeral)
                ingest(self._group, data, base, part)
            finally:
                self._done_with_range()
        else:
            self._inner.ranges.reserve_space(0, end - begin)
            self._inner.ranges.skip_to(following)
            for rows in (part, ephemeral):
                count_unstored(self._group, rows)
            there.at = end
            self._done_with_range()
        return size

    def _is_wanted(self, rows: RecordColumns) -> bool:
        """Whether records must be retained, or a reader has not read them yet."""
        group = self._group
        self._is_promised = group.log.must_retain or has_live_readers(group, rows) or bool(group.past_rings)
        taken_to = self._consumer.position if self._salvaged is None else self._salvaged
        return self._is_promised or not self.readers.have_passed(taken_to - len(self._raw))

    def _skip_to(self, sequence: int) -> None:
        """Use up the sequences below `sequence` that have no message in the log: they exist nowhere."""
        missing = sequence - self._inner.end.next
        if missing > 0:
            self._inner.ranges.reserve_space(0, missing)
            self._inner.ranges.skip_to(sequence)

    def _leave_out_void(self, there: _Range) -> int:
        """Skip messages of the server that it answered with an error; ingest those before them first."""
        first, void = there.sequence, self._void
        if first < void.start:
            self._void = range(0)
            try:
                return self._take_rows(there, void.start)
            finally:
                self._void = void
        there.at += min(void.stop - first, len(there) - there.at)
        self._inner.ranges.skip_to(void.stop)
        self._void = range(0)
        self._done_with_range()
        return 0

    def _done_with_range(self) -> None:
        """Release the ring's room of a range that was ingested whole."""
        there = self._range
        if there is None or there.at < len(there):
            return
        self._range = None
        if self._raw or self._salvaged is not None:
            return
        self._release()
        self.readers.mark(self._consumer.position)

    def _release(self) -> None:
        """Release the ring's room of copied records, once the log has room for a whole ring again."""
        try:
            hold_room(self._inner, self._ring.size)
        except UNWRITABLE as error:
            self.no_room = error.detail
        else:
            self._consumer.release()

    # ------------------------------------------------------------ one by one, where not all is sound

    def _filter_range(self, data: bytes | memoryview) -> None:
        """Ingest the sound records up to the server's own; the others are moved to quarantine. If too much is unsound,
        the rest is moved there, too."""
        refused: list[memoryview] = []
        view, at, checks = memoryview(data), 0, self.checks
        try:
            while at < len(view):
                rows = ring.scan(view[at:])
                if rows.sequences and checks.is_sound(rows, self._own or self._void):
                    self._range, self._raw = _Range(view[at : at + rows.end], rows), view[at + rows.end :]
                    return
                for begin, end, record in checks.pieces(view, at, rows):
                    self._raw = view[begin:]  # to go on here if the log has no room
                    if record is not None and record.sequence in self._own:
                        self._range = self._split_own()
                        return
                    at = end
                    if record is None or not self._take_record(record):
                        more = checks.spend(HEAD_COST)
                        at = end if more else len(view)
                        refused.append(view[begin:at])
                        checks.slack += (at - begin) // HEAD_BYTES
                        if not more:
                            break
            self._raw = b""
        finally:
            if refused:
                self._refuse(b"".join(refused))
        if self._salvaged is None:
            self._release()

    def _take_record(self, record: Record) -> bool:
        """Ingest a record, or skip one that the log does not need. Returns False if it must not be there."""
        ahead = record.sequence - self._inner.end.next
        if self.checks.is_settled(record):
            self._skip_to(record.sequence + 1)
            self.checks.slack += ahead < 0
        elif record.sequence in self._void and 0 <= ahead <= self.checks.capacity:
            self._skip_to(record.sequence + 1)
        elif self.checks.is_acceptable(record):
            self._append(record)
        else:
            return False
        return True

    def _split_own(self) -> _Range:
        """Split the server's own records off the head of `_raw`, which keeps the rest."""
        rows = ring.scan(self._raw)
        count = min(len(self._own), len(rows.sequences))
        end = rows.positions[count] if count < len(rows.sequences) else rows.end
        there = _Range(self._raw[:end], rows.part(0, count)._replace(end=end))
        self._raw = self._raw[end:]
        return there

    def _append(self, record: Record) -> None:
        stream = self._group.numbers.get(record.stream)
        if stream is None or record.flags == ring.EPHEMERAL:  # removed meanwhile, or not for the log
            self._skip_to(record.sequence + 1)
            return
        self._group.retention.reserve_room(HEAD_BYTES + len(record.body))
        self._skip_to(record.sequence)
        self._inner.ranges.reserve_space(padded(HEAD_BYTES + len(record.body)), 1)
        self._inner.writer.append(record.kind, record.stream, record.time_ns, record.body)
        stream.kept.appended(record.sequence, record.kind, len(record.body))
        self._group.publisher.deliver(stream, record._replace(flags=0, headers=b""))
        self._group.retention.bound_depth(stream)

    def _refuse(self, data: bytes) -> None:
        if not self.checks.corrupt:
            log.error("ring of group %d corrupt: %d bytes that no client may write", self._group.number, len(data))
        self.checks.report("bytes that no client may write")
        room = max(limits.RING_RANGE_BYTES - self._quarantined, 0)  # enough for a person to examine
        kept = data[:room]
        self._quarantined += max(len(kept), _LEAST_KEPT)
        if kept:
            self._inner.ranges.quarantine(kept, "bytes that no client may write in a ring")


def hold_room(bucket: Bucket, size: int) -> None:
    """Allocate room in a log for all records that a ring of that size may hold: published messages are ingested, and
    publishers answered, even if the disk is full. Raises DiskFull, DiskFailed, ReadOnly."""
    bucket.ranges.hold_room(size + _OWN_BYTES)


def _lifted(data: Buffer, rows: RecordColumns, least_ns: int) -> memoryview:
    """Return the same records, with times not before `least_ns`. A client may have published while the log wrote a
    later record, or before the clock was set back, or may have forged the time; messages of others expire by their own
    time."""
    made = bytearray(data)
    for position, headers, body, time_ns in zip(rows.positions, rows.headers, rows.bodies, rows.times, strict=True):
        if time_ns >= least_ns:
            break
        at = position - rows.positions[0]
        end = at + HEAD_BYTES + headers + body
        _TIME.pack_into(made, at + 16, least_ns)
        _CRC.pack_into(made, at + 4, ring.crc32c(bytes(made[at + 8 : end]), ring.crc32c(bytes(made[at : at + 4]))))
    return memoryview(bytes(made))


# ---------------------------------------------------------------- readers of the ring

# The processes that read one ring, and the part of the log that they may still need.
#
#     ring       |....... 40 41 42 43 44 45 46 47 48]        a reader's slot is at 44, another's at 46
#     log        taken up to 40, what is below 38 removed    44 is the slowest
#
# A reader that is overtaken continues in the log. So when the ring's room is released, the log must have all records
# that the slowest reader has not passed. If the log is promised to no one else, the server therefore leaves records in
# the ring while its readers advance: records that all have passed need not be written at all. If the ring is full, the
# server waits no longer than a publisher does (core.h, `ring_await_followers`). Then it writes an eighth of the ring to
# make room.

_MARK_BYTES = 64 << 10  # between two positions of the ring whose sequences are remembered
_LOOK_S = 0.05  # how long an answer is valid
_STILL_S = 0.25  # a reader that has not moved for so long is not waited for
_STILL_FULL_S, _EIGHTH_S = 0.01, 0.05  # the same in a full ring; the time for a reader to pass an eighth of it


class RingReaders:
    """The readers of one ring. `end`: the end of the group's log; `raised` is called when the readers' floor has
    risen."""

    def __init__(self, made: Ring, end: LogEnd, position: int, raised: Callable[[], None]) -> None:
        self._ring, self._end, self._raised = made, end, raised
        self._floor = NEVER
        self._slowest = NEVER  # position of the slowest reader at the last update
        # (position, next sequence of the log there); for a reader further back the floor stays as it is
        self._marks: deque[tuple[int, int]] = deque([(position, end.next)], 2 + 2 * made.size // _MARK_BYTES)
        self._seen = (0.0, False)  # (time of the last update, whether there are readers)
        self._moved = self._eighth = (-1, 0.0)  # (position, time) of the slowest: it moved, passed an eighth
        self._is_lost = False  # the slowest reader is not waited for until at most half the ring is unread

    def mark(self, position: int) -> None:
        """Note that the log has the ring up to `position`."""
        if not self._marks or position - self._marks[-1][0] >= _MARK_BYTES:
            self._marks.append((position, self._end.next))

    @property
    def floor(self) -> int:
        """The lowest sequence that a reader may still need; NEVER without readers."""
        # The absence of readers is never cached: one may have come meanwhile.
        if not self._seen[1] or time.monotonic() - self._seen[0] >= _LOOK_S:
            self.refresh()
        return self._floor

    def refresh(self) -> None:
        self._seen = time.monotonic(), self.update()

    def update(self) -> bool:
        """Set the floor to that of the slowest reader. Returns whether there are readers."""
        positions = [position for slot, _, position, _, lives in self._ring.slots() if slot and lives]
        before, self._slowest = self._floor, min(positions, default=NEVER)
        if positions:
            self._raise_floor(self._slowest)
        else:
            self._floor = NEVER
        if self._floor > before:
            self._raised()
        return bool(positions)

    def _raise_floor(self, slowest: int) -> None:
        marks = self._marks
        while len(marks) > 1 and marks[1][0] <= slowest:
            marks.popleft()
        if marks and marks[0][0] <= slowest:
            self._floor = marks[0][1]
        elif self._floor == NEVER:
            self._floor = self._end.next

    # ------------------------------------------------------------ records that readers have passed

    def have_passed(self, position: int) -> bool:
        """Whether all readers have passed `position`. A new reader begins at the ring's end, so the answer stays
        true."""
        if self._slowest == NEVER or self._slowest < position:
            self.refresh()
        return self._slowest >= position

    def passed_bytes(self, position: int) -> int:
        """Return the bytes from `position` on that may be ingested: those that all readers have passed, or more if the
        readers are not waited for. 0: call again soon."""
        self.refresh()
        now, slowest, size, tail = self._seen[0], self._slowest, self._ring.size, self._ring.tail
        if slowest >= tail:
            self._moved = self._eighth = (tail, now)
            return size
        if slowest != self._moved[0]:
            self._moved = (slowest, now)
        if tail - slowest <= size // 2:
            self._is_lost = False
        passed, still_s = max(slowest - position, 0), now - self._moved[1]
        if tail - position <= size - size // 8:
            self._eighth = (slowest, now)
            return size if still_s > _STILL_S else passed
        if slowest - self._eighth[0] >= size // 8:
            self._eighth = (slowest, now)
        self._is_lost |= now - self._eighth[1] > _EIGHTH_S
        return max(passed, size // 8) if self._is_lost or still_s > _STILL_FULL_S else passed
