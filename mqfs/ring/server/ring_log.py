"""A group's log while the group has a ring: it follows the ring and copies what is published there into the log.

Owns the one order of what the server writes and what others publish: the server's own messages go through the ring too.
Whatever another process wrote there is checked before it is taken; nothing else of the ring is believed. Which groups
have rings, and who may attach, is registry.py's.
"""

from __future__ import annotations

import logging
import os
import re
import struct
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import le
from typing import TYPE_CHECKING, Any

from mqfs import errors, limits, ring
from mqfs.engine.group import Group
from mqfs.engine.language.settings import SYNC_ALWAYS
from mqfs.engine.publishing.ring_ingest import count_unstored, has_live_readers, ingest
from mqfs.group_state import FIRST_STREAM
from mqfs.log.record import HEAD_BYTES, decode, padded, row_at
from mqfs.model import MORE, NEVER, Columns, Draft, Kind, LazyBatch, Record
from mqfs.ring import OWN

if TYPE_CHECKING:
    from mqfs.ring import Consumer, Ring

log = logging.getLogger("mqfs.ring")

_TIME, _CRC = struct.Struct("<q"), struct.Struct("<I")
_MESSAGE, _END = int(Kind.MESSAGE), int(Kind.END)
_AHEAD_NS = 10**9  # a record's time may be before the wall clock: it was set back, or another CPU's is ahead
_UNITS = re.compile(rb"(?:\x00|\x01\x03*\x02)*")  # flags of whole units
_PATIENCE_BYTES = 2 << 20  # some 10 ms
_LEAST_ASIDE = 64 << 10  # bytes that take as long as to make a file
_HIT_COST = 64
_HEAD_COST = 1_024  # bytes that take as long as a look at a head
_MARK_BYTES = 64 << 10  # between two places of the ring whose sequence is remembered
_FOLLOWERS_S = 0.05  # how often it is looked who follows
_UNWRITABLE = (errors.DiskFull, errors.StreamFull, errors.DiskFailed, errors.ReadOnly)
_NO_WAY = (errors.Again, errors.Stale, errors.OverLimit, errors.BadRing, errors.Busy, errors.Disconnected)


class _Range:
    """Records copied from the ring and not all taken yet."""

    def __init__(self, data: bytes | memoryview, rows: Columns) -> None:
        self.data, self.rows = data, rows
        self.at = 0  # the next row

    def __len__(self) -> int:
        return len(self.rows.sequences)

    @property
    def sequence(self) -> int:
        """Of the next row."""
        return self.rows.sequences[self.at]

    def between(self, begin: int, end: int) -> memoryview:
        """The records of these rows."""
        positions = self.rows.positions
        stop = positions[end] if end < len(positions) else self.rows.end
        return memoryview(self.data)[positions[begin] : stop]


class RingLog:
    """See `Bucket` and `RingPort` in mqfs/seams.py. `judge` says why a change of the group ends the ring, "" if it does
    not; `over` is called once, when the ring has ended and what was taken is committed."""

    def __init__(
        self,
        group: Group,
        made: Ring,
        judge: Callable[[Mapping[str, Any]], str],
        over: Callable[[RingLog], None],
    ) -> None:
        self.group, self.ring, self.inner = group, made, group.log.bucket
        self._floor = NEVER
        self.why = ""  # it is being retired
        self.ended = False
        self.blocked = ""  # why the log takes nothing now
        self.corrupt = ""  # what was found in it that nobody may write
        self._judge, self._over = judge, over
        self._taker: Consumer = made.consumer(kept=True, hold=True)
        self._most = made.size // HEAD_BYTES  # messages that it can hold
        # Below that another server may have taken or written messages.
        self._resumed = min(made.next, self.inner.end.next + self._most) if made.tail else 0
        self._range: _Range | None = None
        self._raw: bytes | memoryview = b""  # copied, and not looked at yet
        self._salvaged: int | None = None  # the end of what is taken, where the ring could not be read on
        self._broken = False  # nothing more is taken from it
        self._own = range(0)  # sequences of the server's messages that are being written
        self._void = range(0)  # of such as could not be
        self._slack = 0  # messages that may be missing, as bytes that are none were found
        self._kept_aside = 0  # such bytes in quarantine
        self._patience = _PATIENCE_BYTES  # that are looked at for what is whole again, and may be refused one by one
        self._taking = False
        # (position, the sequence behind it); of one that is further back the floor stays where it is
        begin = self._taker.position, self.inner.end.next
        self._marks: deque[tuple[int, int]] = deque([begin], 2 + 2 * made.size // _MARK_BYTES)
        self._followed = (0.0, False)  # (when it was looked, whether somebody does)
        self.held_up = False  # a client had its lock for so long that the server waited in vain
        self._senseless: int | None = None  # the end at the last tick, where its state did not fit it
        inner = self.inner
        self.id, self.end, self.upkeep, self.ranges = inner.id, inner.end, inner.upkeep, inner.ranges
        self.reader, self.metrics = inner.reader, inner.metrics
        self.writer = self
        inner.ranges.on_sequences_reserved(self._grant)
        group.log.use(self)
        group.ring = self

    @property
    def position(self) -> int:
        """What is below it in the ring was taken, or copied to be."""
        return self._taker.position

    def _grant(self, bound: int) -> None:
        self.ring.grant(bound)

    # ------------------------------------------------------------ as a bucket

    @property
    def state(self) -> Callable[[], bytes]:
        return self.inner.writer.state

    @state.setter
    def state(self, state: Callable[[], bytes]) -> None:
        self.inner.writer.state = state

    def append(self, kind: int, stream: int, time_ns: int, body: bytes, headers: bytes = b"") -> int:
        if kind > _END:
            return self.inner.writer.append(kind, stream, self._before_pending(time_ns), body, headers)
        published = self._publish([Draft(kind, stream, body, headers)], OWN if headers or kind == _END else 0)
        try:
            sequence = self.inner.writer.append(kind, stream, published or time_ns, body, headers)
        except BaseException:
            self._give_up()
            raise
        self._passed()
        return sequence

    def append_batch(self, drafts: Sequence[Draft], time_ns: int) -> int:
        if isinstance(drafts, LazyBatch) and drafts.room > self.ring.size // 2:
            self.retire("a unit of more than half of it is written")
            self._without_ring()
            return self.inner.writer.append_batch(drafts, time_ns)
        messages = [draft for draft in drafts if draft.kind <= _END]
        if not messages:
            return self.inner.writer.append_batch(drafts, self._before_pending(time_ns))
        published = self._publish(messages, OWN)
        try:
            sequence = self.inner.writer.append_batch(drafts, published or time_ns)
        except BaseException:
            self._give_up()
            raise
        self._passed()
        return sequence

    def skip(self) -> int:
        raise AssertionError("a group with a ring keeps what is written")

    def _before_pending(self, time_ns: int) -> int:
        """The time of a record that goes straight to the log: never behind that of a message not yet taken."""
        return time_ns if self._is_empty else self.end.last_ns

    @property
    def _is_empty(self) -> bool:
        return self._range is None and not self._raw and self.ring.tail == self._taker.position

    # ------------------------------------------------------------ the server's own messages

    def _publish(self, drafts: Sequence[Draft], flags: int) -> int:
        """Put them into the ring, and what came before them into the log. Returns their time, or 0 where the ring is
        not to be had: then it is retired, and they only go to the log. Raises DiskFull and the like, before anything of
        them is published."""
        assert not self._taking
        if self.why:
            return self._without_ring()
        self._take()
        if self.blocked:
            raise errors.DiskFull(self.blocked)
        self.inner.ranges.reserve_space(sum(padded(HEAD_BYTES + len(d.headers) + len(d.body)) for d in drafts), 0)
        try:
            last = self.ring.publish_unit(drafts, limits.RING_PATIENCE_S, flags)
        except _NO_WAY as error:
            self.held_up = self.held_up or isinstance(error, errors.Again)
            self.retire(f"the server could not write to it ({error})")
            return self._without_ring()
        first = last - len(drafts) + 1
        if not 0 <= first - self.inner.end.next <= self._most:
            self.corrupt = "a state that nobody may write"
            self.retire(f"nonsense was found in it: {self.corrupt}")
            return self._without_ring()
        self._own = range(first, last + 1)
        self._take(self._own.start)
        there = self._range
        if there is not None and there.sequence == self._own.start:
            self._pass_to(self._own.start)
            return self._possible(int(there.rows.times[there.at]))
        self._give_up()
        if self.blocked:
            raise errors.DiskFull(self.blocked)
        self.retire("what the server wrote did not come back")
        return self._without_ring()

    def _possible(self, time_ns: int) -> int:
        """That time, or 0 where nobody may have written it."""
        if time_ns <= time.time_ns() + _AHEAD_NS:
            return time_ns
        self.corrupt = self.corrupt or "a time that is yet to come"
        return 0

    def _without_ring(self) -> int:
        """Nothing is written before what was published is in the log."""
        self._finish()
        if not self.ended:
            raise errors.DiskFull(f"what was published before it could not be written: {self.blocked}")
        return 0

    def _give_up(self) -> None:
        """The server's own messages are not taken: who wrote them gets an error."""
        if self._own:
            self._void, self._own = self._own, range(0)

    def _passed(self) -> None:
        """The server's own messages are in the log."""
        there = self._range
        if self._own and there is not None:
            there.at += len(self._own)
            self._done_with_range()
            self.commit()
        self._own = range(0)
        if self.corrupt:
            self.retire(f"nonsense was found in it: {self.corrupt}")

    # ------------------------------------------------------------ taking

    def settle(self) -> None:
        if not self._is_empty:
            self.pump()

    def pump(self, most_bytes: int | None = None) -> None:
        """Take what is there, or about so much of it, and have it committed as `sync` says."""
        if self.ended:
            return
        before = self.inner.end.next
        self._take(None, most_bytes)
        if self.inner.end.next != before:
            self.commit()
        if self.corrupt:
            self.retire(f"nonsense was found in it: {self.corrupt}")
        if self.inner.end.failed is not None and not self.why:
            self.retire(f"the disk failed: {self.inner.end.failed}")

    def commit(self) -> None:
        """Have what was taken committed as `sync` says, and tell who waits for that."""
        if self.ended:
            return
        sync, last = self.group.settings.sync, self.inner.end.next - 1
        if sync == SYNC_ALWAYS and self.group.log.must_retain:
            self.inner.upkeep.sync(lambda error: self._committed(last, error))
            return
        if sync > 0:
            self.inner.upkeep.sync(None, sync / 1e9)
        self.ring.commit(last)

    def _committed(self, last: int, error: OSError | None) -> None:
        if error is not None:
            self.retire(f"the disk failed: {error}")
        elif not self.ended and last > self.ring.committed:
            self.ring.commit(last)

    def _take(self, until: int | None = None, most_bytes: int | None = None) -> None:
        """Take what is in the ring, up to that sequence. Where the log has no room `stalled` says so afterwards."""
        if self._taking or self._broken:
            return
        self._taking, self.blocked = True, ""
        left = limits.RING_BYTES if most_bytes is None else most_bytes
        try:
            while left > 0:
                there = self._range
                if there is None:
                    looked = self._look_at_next()
                    left -= looked if self._range is None else 0
                    if not looked:
                        return
                elif until is not None and there.sequence >= until:
                    return
                else:
                    left -= self._take_rows(there, until)
        except _UNWRITABLE as error:
            self.blocked = error.detail
        except Exception:
            self._break_off()
        finally:
            self._taking = False

    def _break_off(self) -> None:
        """Something in it was met that nobody thought of: take no more of it. What was not taken goes to quarantine."""
        log.exception("ring of group %d given up: reading it failed", self.group.number)
        there, untaken = self._range, self._raw
        self._range, self._raw, self._broken = None, b"", True
        if there is not None and there.at < len(there):
            untaken = bytes(there.between(there.at, len(there))) + bytes(untaken)
        if self._salvaged is None:
            self._salvaged = self._taker.position - len(untaken)
        self._refuse(bytes(untaken))

    def _look_at_next(self) -> int:
        """Make what was published next a range, or take of it what is right; how many bytes that were. 0: nothing."""
        data = self._raw or self._copy()
        if not data:
            return 0
        rows = ring.scan(data)
        while rows.end == len(data) and rows.flags[-1] & MORE and (more := self._copy()):
            data = bytes(data) + more
            rows = ring.scan(data)
            if len(data) > self.ring.size:
                break  # a unit that never ends
        self._raw = data
        if rows.end == len(data) and self._is_in_order(rows) and self._is_plain(rows):
            self._range, self._raw = _Range(data, rows), b""
        else:
            self._filter_range(data)
        return len(data)

    def _copy(self) -> bytes:
        if self._salvaged is not None:
            return b""
        try:
            return self._taker.range(limits.RING_RANGE_BYTES, 0) or b""
        except (errors.Damaged, errors.FellBehind) as error:
            self.corrupt = error.detail
            return self._salvage()

    def _salvage(self) -> bytes:
        """All that is behind what is no record: it may be whole again."""
        self.why = self.why or "it is damaged"
        self.ring.retire(limits.RING_PATIENCE_S)
        memory, begin, tail = self.ring.fileno(), self._taker.position, self.ring.tail
        of = self.ring.size
        size, at = tail - begin if begin <= tail <= begin + of else of, begin & (of - 1)
        self._salvaged = begin + size
        whole = os.pread(memory, min(size, of - at), ring.HEAD_BYTES + at)
        return whole + os.pread(memory, size - len(whole), ring.HEAD_BYTES)

    def _take_rows(self, there: _Range, until: int | None) -> int:
        """Take rows of a range, up to that sequence; returns how many bytes."""
        begin, end, sequences = there.at, len(there), there.rows.sequences
        if until is not None and sequences[end - 1] >= until:
            end = begin + until - sequences[begin]
        if self._void and self._void.start <= sequences[end - 1]:
            return self._leave_out(there)
        data, part = there.between(begin, end), there.rows.part(begin, end)
        if self._is_wanted(part):
            self.group.retention.reserve_room(len(data))
            if part.times[0] < self.end.last_ns:
                data = _lifted(data, part, self.end.last_ns)
            self._pass_to(part.sequences[0])
            base = self.inner.ranges.reserve_space(len(data), end - begin)
            part = ring.scan(data, base)
            self.inner.ranges.append_range(data, part)
            there.at = end
            try:
                ingest(self.group, data, base, part)
            finally:
                self._done_with_range()
        else:
            self._pass(part)
            there.at = end
            self._done_with_range()
        return len(data)

    def _pass(self, rows: Columns) -> None:
        """Nobody is there for whom they are to be kept."""
        self.inner.ranges.reserve_space(0, len(rows.sequences))
        self.inner.ranges.skip_to(rows.sequences[-1] + 1)
        count_unstored(self.group, rows)

    def _pass_to(self, sequence: int) -> None:
        """What is below it and was not taken is nowhere."""
        missing = sequence - self.inner.end.next
        if missing > 0:
            self.inner.ranges.reserve_space(0, missing)
            self.inner.ranges.skip_to(sequence)

    def _leave_out(self, there: _Range) -> int:
        """Messages of the server's that it answered with an error. They are in a range that nobody else's precede."""
        first = there.sequence
        if first < self._void.start:
            return self._take_rows_before(there, self._void.start)
        there.at += min(self._void.stop - first, len(there) - there.at)
        self.inner.ranges.skip_to(self._void.stop)
        self._void = range(0)
        self._done_with_range()
        return 0

    def _take_rows_before(self, there: _Range, sequence: int) -> int:
        void, self._void = self._void, range(0)
        try:
            return self._take_rows(there, sequence)
        finally:
            self._void = void

    def _is_wanted(self, rows: Columns) -> bool:
        """Whether they are promised to somebody, or somebody is there who has not had them."""
        group = self.group
        return group.log.must_retain or has_live_readers(group, rows) or bool(group.past_rings) or self._is_followed()

    def _done_with_range(self) -> None:
        """The ring may have the room again of what was taken."""
        there = self._range
        if there is None or there.at < len(there):
            return
        self._range = None
        if self._raw or self._salvaged is not None:
            return
        self._taker.release()
        position = self._taker.position
        if not self._marks or position - self._marks[-1][0] >= _MARK_BYTES:
            self._marks.append((position, self.inner.end.next))

    # ------------------------------------------------------------ what others may write there

    def _is_in_order(self, rows: Columns) -> bool:
        sequences, times = rows.sequences, rows.times
        first, count = sequences[0], len(sequences)
        holes = self._most if first < self._resumed or self.corrupt else 0
        if not 0 <= first - self.inner.end.next <= holes:
            return False
        if sequences.tobytes() != array("Q", range(first, first + count)).tobytes():
            return False
        return times[-1] <= time.time_ns() + _AHEAD_NS and all(map(le, times, times[1:]))

    def _is_plain(self, rows: Columns) -> bool:
        """Whether all that is not the server's is what a client may publish."""
        first, count, mine = rows.sequences[0], len(rows.sequences), self._own or self._void
        if mine and first <= mine.start < first + count:
            begin, end = mine.start - first, mine.stop - first
            around = [rows.part(a, b) for a, b in ((0, begin), (end, count)) if a < b]
            return all(map(self._is_clients, around))
        return self._is_clients(rows)

    def _is_clients(self, rows: Columns) -> bool:
        if rows.kinds.tobytes() != b"\1" * len(rows.kinds) or any(rows.headers):
            return False
        if _UNITS.fullmatch(rows.flags.tobytes()) is None:
            return False
        if max(rows.bodies) > limits.MESSAGE_BYTES or not min(rows.bodies):
            return False
        return all(number in self.group.numbers for number in set(rows.streams))

    # ------------------------------------------------------------ one by one, where not all is as it must be

    def _filter_range(self, data: bytes | memoryview) -> None:
        """Take the records that are right, up to the server's own; what is not goes to quarantine. Where too much is
        not, the rest goes there, too: a server's time is not what noise may cost."""
        refused: list[memoryview] = []
        view, at = memoryview(data), 0
        try:
            while at < len(view):
                rows = ring.scan(view[at:])
                if rows.sequences and self._is_in_order(rows) and self._is_plain(rows):
                    self._range, self._raw = _Range(view[at : at + rows.end], rows), view[at + rows.end :]
                    return
                for begin, end, record in self._pieces(view, at, rows):
                    self._raw = view[begin:]  # should the log have no room
                    if record is not None and record.sequence in self._own:
                        self._range = self._head_of_own()
                        return
                    at = end
                    if record is None or not self._is_acked(record):
                        self._patience -= _HEAD_COST
                        at = end if self._patience >= 0 else len(view)
                        refused.append(view[begin:at])
                        self._slack += (at - begin) // HEAD_BYTES  # messages that may have been there
                        if self._patience < 0:
                            break
            self._raw = b""
        finally:
            if refused:
                self._refuse(b"".join(refused))
        if self._salvaged is None:
            self._taker.release()

    def _is_acked(self, record: Record) -> bool:
        """Take a record, or pass it over; whether it may be there."""
        ahead = record.sequence - self.inner.end.next
        is_old = record.sequence < self._resumed and ahead <= self._most
        if is_old and (ahead < 0 or record.flags & OWN):
            # The server before took it, or never came to it: then nobody was told that it was written.
            self._pass_to(record.sequence + 1)
            self._slack += ahead < 0
            return True
        if record.sequence in self._void and 0 <= ahead <= self._most:
            self._pass_to(record.sequence + 1)
            return True
        if not 0 <= ahead <= self._slack or not self._may_be_taken(record):
            return False
        self._take_one(record)
        return True

    def _pieces(self, data: memoryview, at: int, rows: Columns) -> Iterator[tuple[int, int, Record | None]]:
        """(begin, end, what it is) of those rows, which begin at `at`, and of what is no record behind them: None."""
        for begin, size in _spans(rows):
            yield at + begin, at + begin + padded(size), decode(bytes(data[at + begin : at + begin + size]))
        at += rows.end
        if at < len(data):
            yield at, self._whole_again(data, at), None

    def _whole_again(self, data: memoryview, bad: int) -> int:
        """Where a record may begin again behind what is none. It looks only where a sequence and a time may be ours."""
        whole, low = data.obj, self.inner.end.next
        assert isinstance(whole, bytes)
        if self._patience < 0:
            return len(data)
        before = len(whole) - len(data)
        sequences = {number.to_bytes(8, "little")[3:] for number in (low, low + self._most)}
        times = {moment.to_bytes(8, "little")[6:] for moment in (max(self.end.last_ns, 0), time.time_ns())}
        for at in _found(whole, times, before + bad):
            self._patience -= _HIT_COST
            if self._patience < 0:
                break
            if (at - before - bad) % 8 or whole[at + 11 : at + 16] not in sequences:
                continue
            self._patience -= _HEAD_COST + min(int.from_bytes(whole[at : at + 4], "little"), len(whole) - at)
            if self._patience < 0:
                break
            if row_at(whole, at):
                return at - before
        return len(data)

    def _head_of_own(self) -> _Range | None:
        """Split `_raw`: the server's own records, and the rest."""
        rows = ring.scan(self._raw)
        count = min(len(self._own), len(rows.sequences))
        end = rows.positions[count] if count < len(rows.sequences) else rows.end
        there = _Range(self._raw[:end], rows.part(0, count)._replace(end=end))
        self._raw = self._raw[end:]
        return there

    def _may_be_taken(self, record: Record) -> bool:
        if record.kind != _MESSAGE or record.headers or record.flags & ~3:
            return False
        if not FIRST_STREAM <= record.stream < self.group.state.next_stream:
            return False
        return 0 < len(record.body) <= limits.MESSAGE_BYTES and record.time_ns <= time.time_ns() + _AHEAD_NS

    def _take_one(self, record: Record) -> None:
        stream = self.group.numbers.get(record.stream)
        if stream is None:  # removed, since it was published
            self._pass_to(record.sequence + 1)
            return
        self.group.retention.reserve_room(HEAD_BYTES + len(record.body))
        self._pass_to(record.sequence)
        self.inner.ranges.reserve_space(padded(HEAD_BYTES + len(record.body)), 1)
        self.inner.writer.append(record.kind, record.stream, record.time_ns, record.body)
        stream.kept.appended(record.sequence, record.kind, len(record.body))
        self.group.publisher.deliver(stream, record.sequence, record.body, b"")
        self.group.retention.bound_depth(stream)

    def _refuse(self, data: bytes) -> None:
        if not self.corrupt:
            log.error("the ring of group %d has %d bytes that no client may write", self.group.number, len(data))
        self.corrupt = self.corrupt or "bytes that no client may write"
        room = max(limits.RING_RANGE_BYTES - self._kept_aside, 0)  # a person needs no more, and the disk has other use
        kept = data[:room]
        self._kept_aside += max(len(kept), _LEAST_ASIDE)
        if kept:
            self.inner.ranges.quarantine(kept, "bytes that no client may write in a ring")

    # ------------------------------------------------------------ who follows

    @property
    def floor(self) -> int:
        """See `RingPort`."""
        self._is_followed()
        return self._floor

    def is_needed(self) -> bool:
        """When it has ended: whether somebody is still on the way from it to the log or the next ring."""
        return self._look_who_follows()

    def _is_followed(self) -> bool:
        """Whether a process follows the ring: what it is overtaken by is to be had from the log. That nobody does is
        looked up each time: what came after somebody sat down is for that one."""
        now = time.monotonic()
        if not self._followed[1] or now - self._followed[0] >= _FOLLOWERS_S:
            self._followed = now, self._look_who_follows()
        return self._followed[1]

    def _look_who_follows(self) -> bool:
        """And how far the hindmost is, for `floor`."""
        places = [position for seat, _, position, _, lives in self.ring.seats() if seat and lives]
        before = self._floor
        if places:
            self._raise_floor(min(places))
        else:
            self._floor = NEVER
        if self._floor > before:
            self.group.retention.note_change()
        return bool(places)

    def _raise_floor(self, hindmost: int) -> None:
        marks = self._marks
        while len(marks) > 1 and marks[1][0] <= hindmost:
            marks.popleft()
        if marks and marks[0][0] <= hindmost:
            self._floor = marks[0][1]
        elif self._floor == NEVER:
            self._floor = self.inner.end.next

    # ------------------------------------------------------------ its end

    def changed(self, changes: Sequence[Mapping[str, Any]]) -> None:
        for change in changes:
            if why := self._judge(change):
                self.retire(why)
                return

    def retire(self, why: str) -> None:
        """Nothing more is published in it; who uses it attaches to the next generation."""
        if self.ended:
            return
        if not self.why:
            log.info("the ring of group %d is retired: %s", self.group.number, why)
        self.why = self.why or why
        self.ring.retire(limits.RING_PATIENCE_S)
        if not self._taking:
            self._finish()

    def _finish(self) -> None:
        """Take the rest. Where the log has no room for it now, `tick` tries again."""
        if self.ended:
            return
        self._take()
        if self.blocked or self._range is not None or self._raw:
            return
        self.ring.end(self._taker.position if self._salvaged is None else self._salvaged)
        self.ended = True
        if self._look_who_follows():
            self.group.past_rings.add(self)
        self._restore_bucket()
        last = self.inner.end.next - 1
        self.inner.upkeep.sync(lambda error: self._is_over(last, error))

    def _restore_bucket(self) -> None:
        self.group.log.use(self.inner)
        self.group.ring = None
        self.inner.ranges.on_sequences_reserved(None)

    def detach(self) -> None:
        """Leave the ring as it is and the group without it, before anything was taken."""
        self._restore_bucket()
        self._taker.close()

    def _is_over(self, last: int, error: OSError | None) -> None:
        if error is None:
            self.ring.commit(last)
        self._over(self)

    def tick(self) -> None:
        """Once a second."""
        # A state that fits no end: publishers are refused, and a server that writes nothing would not notice. While
        # somebody publishes, both may be seen at different moments; then the end moves.
        senseless = None if self.ring.next else self.ring.tail
        if not self.why and (self.ring.retired or (senseless is not None and senseless == self._senseless)):
            self.corrupt = "an end that nobody may write"
            self.retire(f"nonsense was found in it: {self.corrupt}")
        self._senseless = senseless
        if self.why:
            self._finish()
        elif not self.ended:
            self.pump(limits.RING_TURN_BYTES)
            self._grant_more()
            self._followed = time.monotonic(), self._look_who_follows()

    def _grant_more(self) -> None:
        """Where there was no room to reserve sequences publishers wait for some, and nothing comes that would ask."""
        try:
            self.inner.ranges.reserve_space(0, 1)
        except _UNWRITABLE as error:
            self.blocked = error.detail

    def release(self) -> None:
        """It has ended, and nobody else in this process uses it."""
        self.group.past_rings.discard(self)
        self.group.retention.note_change()
        self._taker.close()
        self.ring.close()


def _lifted(data: memoryview, rows: Columns, least_ns: int) -> memoryview:
    """The same records, none before that time: they were published while the log had a later one written, the clock was
    set back, or somebody forged it. What others wrote expires by its own time."""
    made = bytearray(data)
    for position, headers, body, time_ns in zip(rows.positions, rows.headers, rows.bodies, rows.times, strict=True):
        if time_ns >= least_ns:
            break
        at = position - rows.positions[0]
        end = at + HEAD_BYTES + headers + body
        _TIME.pack_into(made, at + 16, least_ns)
        _CRC.pack_into(made, at + 4, ring.crc32c(bytes(made[at + 8 : end]), ring.crc32c(bytes(made[at : at + 4]))))
    return memoryview(bytes(made))


def _found(data: bytes, times: set[bytes], bad: int) -> Iterator[int]:
    """Where behind a place heads may be whose time ends with one of those bytes."""
    ends = re.compile(b"|".join(map(re.escape, times)))
    return (found.start() - 22 for found in ends.finditer(data, bad + 8 + 22))


def _spans(rows: Columns) -> Iterator[tuple[int, int]]:
    for position, headers, body in zip(rows.positions, rows.headers, rows.bodies, strict=True):
        yield position, HEAD_BYTES + headers + body
