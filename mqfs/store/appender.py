"""The one writer of a log: it encodes records, writes them behind the last one, and indexes them in memory.

    segment     [state|reserve 65537|m1 m2 .. m9|.......]   `used` is behind m9, `room` at the end of what is allocated
    sequences   next 10, refill 32769, reserved 65537       a block is reserved again when half of it is left
    append      m10: room and number, pwrite, then `used`, index and `next`; an error before that leaves nothing

Without room the writer allocates more, or rolls: a new segment begins with the state of the group. An append waits for
a sync only where its number belongs to a block whose reserve record is not on disk. A record is marked SETTLED if
everything before it was on disk when it was written. At a start, a failed check before such a record is damage, and no
torn tail.
"""

from __future__ import annotations

import errno
import logging
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any, NoReturn

from mqfs import errors, limits
from mqfs.model import MORE, Buffer, Draft, Kind, RecordColumns
from mqfs.records.batch import RecordBatch, finalize
from mqfs.records.record import HEAD_BYTES, INNER, SETTLED, Row, encode, padded, row_at, settled
from mqfs.store.chain import Chain
from mqfs.store.disk import Disk, opened, read_all, removed_on_error, write_all
from mqfs.store.group_commit import GroupCommit
from mqfs.store.recovery import last_sequence
from mqfs.store.segment.file import Segment
from mqfs.store.segment.index import NonMessageRecords, OpenIndex, pack_other
from mqfs.store.sequences import SequenceBlocks, reserve_body

if TYPE_CHECKING:
    from mqfs.store.store import DiskStore

_FULL = (errno.ENOSPC, errno.EDQUOT)
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # temporary shortages of the system; the disk is sound


def _no_state() -> bytes:
    raise AssertionError("the state of a log was not set")


def _ignore() -> None:
    """Do nothing: no index follows the log."""


class Appender:
    """See `LogWriter` in mqfs/store/api.py."""

    __slots__ = (
        "_chain", "_commit", "_disk", "_end", "_held", "_holding", "_pwrite", "_sequences", "on_rolled", "state",
    )  # fmt: skip

    def __init__(self, chain: Chain, commit: GroupCommit, sequences: SequenceBlocks) -> None:
        self._chain, self._commit, self._sequences = chain, commit, sequences
        self._end, self._disk, self._pwrite = chain.end, chain.disk, chain.disk.pwrite
        self.state: Callable[[], bytes] = _no_state
        self.on_rolled: Callable[[], None] = _ignore
        self._held = 0  # bytes that stay allocated, for a ring
        self._holding = False

    def append(self, kind: int, stream: int, time_ns: int, body: bytes, headers: bytes = b"") -> int:
        end, commit = self._end, self._commit
        if end.failed is not None:
            raise errors.ReadOnly(str(end.failed))
        if time_ns < end.last_ns:
            time_ns = end.last_ns
        segment = self._chain.open
        need = 32 + len(headers) + len(body)
        if segment is None or segment.used + need > segment.room:
            segment = self.make_room(need)
        if kind <= 2 and end.next >= self._sequences.refill:
            segment = self.reserve(need)
        sequence = end.next - (kind > 2)
        flags = SETTLED if commit.synced == commit.written else 0
        data = encode(sequence, time_ns, stream, kind, flags, headers, body)
        position = segment.used
        if kind > 2:
            others: Any = segment.rows() if segment.others is None else segment.others
        else:
            index: Any = segment.load() if segment.index is None else segment.index
        fd = segment.fd if segment.fd >= 0 else segment.open()
        try:
            done = self._pwrite(fd, data, position)
            if done != len(data):
                write_all(self._disk, fd, data[done:], position + done)
        except OSError as error:
            self.roll_back(segment, len(data), error)
        segment.used = position + len(data)
        commit.written += len(data)
        if commit.copy is not None:
            commit.copy.note()
        end.last_ns = time_ns
        segment.recent = True
        if kind > 2:
            others.packed += pack_other(sequence, position, len(body), stream, len(headers), kind, flags)
            others.last_ns = time_ns
            return sequence
        end.next = sequence + 1
        posting = index.postings.get(stream)
        if posting is None:
            posting = index.postings[stream] = array("I")
        posting.append(len(index.sequences))
        index.sequences.append(sequence)
        index.times.append(time_ns)
        index.positions.append(position)
        index.bodies.append(len(body))
        index.streams.append(stream)
        index.headers.append(len(headers))
        index.kinds.append(kind)
        return sequence

    def append_batch(self, drafts: Sequence[Draft], time_ns: int) -> int:
        end, commit, sequences = self._end, self._commit, self._sequences
        if end.failed is not None:
            raise errors.ReadOnly(str(end.failed))
        time_ns = max(time_ns, end.last_ns)
        need, taking = measure(drafts)
        segment = self._chain.open
        if segment is None or segment.used + need > segment.room:
            segment = self.make_room(need)
        while taking and end.next + taking > sequences.refill:
            segment = self.reserve(need, end.next + taking)
        marks = SETTLED if commit.synced == commit.written else 0
        batch = BatchEncoder(drafts, end.next - 1, time_ns, segment.used, marks)
        index, others = segment.load(), segment.rows()
        assert isinstance(index, OpenIndex)
        fd, written = segment.open(), segment.used
        try:
            for data in batch.encoded():
                write_all(self._disk, fd, data, written)
                written += len(data)
        except OSError as error:
            self.roll_back(segment, need, error)
        except errors.MqfsError as error:  # staged records cannot be read
            self._erase(segment, need)
            raise error from None
        segment.used = written
        commit.written += need
        if commit.copy is not None:
            commit.copy.note()
        end.last_ns = time_ns
        self._add_to_index(batch, index, others)
        return batch.first

    def _add_to_index(self, batch: BatchEncoder, index: OpenIndex, others: NonMessageRecords) -> None:
        """Index the records that were written."""
        for rows in batch.stamped:
            index.extend_by(rows)
            self._end.next += len(rows.sequences)
        if batch.messages is not None:
            for ordinal, stream in enumerate(batch.messages.streams, len(index)):
                index.postings.setdefault(stream, array("I")).append(ordinal)
            index.extend(batch.messages)
            self._end.next += len(batch.messages)
        others.take(batch.others, self._end.last_ns)

    def skip(self) -> int:
        end = self._end
        if end.failed is not None:
            raise errors.ReadOnly(str(end.failed))
        if end.next >= self._sequences.refill:
            if self._chain.open is None:
                self.make_room(0)
            self.reserve(0)
        end.next += 1
        return end.next - 1

    # ------------------------------------------------------------ room

    def roll_back(self, segment: Segment, length: int, error: OSError) -> NoReturn:
        """Undo a failed append so that nothing of it remains, and raise DiskFull or DiskFailed."""
        try:
            self._erase(segment, length)
        except OSError as again:
            error = again if error.errno in _FULL and again.errno not in _FULL else error
            if error.errno in _FULL:
                error = OSError(errno.EIO, "a record could not be taken back")
        if error.errno in _FULL:
            raise self._disk_full(length) from error
        self._commit.fail(error)
        raise errors.DiskFailed(str(error)) from error

    def _disk_full(self, need: int) -> errors.DiskFull:
        full, group = self._chain.context.full, self._chain.group
        if not self._holding:  # no write was refused
            full[group] = max(need, full.get(group, 0))  # until there is room for the largest
        return errors.DiskFull(f"no room for the log of group {self._chain.group}")

    def _erase(self, segment: Segment, length: int) -> None:
        """Overwrite with zeros the bytes behind the end that may have been written."""
        end = segment.used + max(0, min(length, segment.allocated - segment.used))
        step = limits.UNIT_PIECE_BYTES
        for at in range(segment.used, end, step):
            write_all(self._disk, segment.open(), bytes(min(step, end - at)), at)

    def hold_room(self, size: int) -> None:
        """Keep `size` bytes allocated, across rolls too, for records published in shared memory; 0: give back the
        unused rest. At most a quarter of a segment's bound of them counts toward that bound. Raises DiskFull,
        DiskFailed."""
        segment = self._chain.open
        if size and size == self._held and segment is not None and segment.used + size <= segment.room:
            return
        self._held = 0
        if size:
            self._holding = True
            try:
                self.make_room(size, min(size, limits.SEGMENT_BYTES // 4))
            finally:
                self._holding = False
            self._held = size
        elif segment is not None and self._end.failed is None:
            with suppress(OSError):  # on failure they stay until the segment is sealed
                segment.shrink()
                segment.room = segment.used

    def ask_for_room(self) -> None:
        """Retry the largest allocation that the disk refused."""
        if self._end.failed is None:
            with suppress(errors.MqfsError):
                self.make_room(self._chain.context.full[self._chain.group])

    def make_room(self, need: int, counted: int | None = None) -> Segment:
        """Return the segment that takes the next records of `need` bytes, preallocated. `counted`: the part of `need`
        that counts toward the bound of a segment (None: all). Raises DiskFull, DiskFailed."""
        need = padded(need)
        segment = self._chain.open
        if segment is None or self._is_full(segment, need if counted is None else counted):
            try:
                segment = self.roll(need)
            except errors.DiskFull:
                if segment is None or segment.used + need > segment.allocated:
                    raise  # otherwise the old segment takes as much as it has room for
        if segment.used - segment.idx.covered >= limits.INDEX_STRIDE_BYTES:
            self._commit.extend_index(segment)
        try:
            segment.grow(need)
        except OSError as error:
            if error.errno in _FULL:
                raise self._disk_full(need) from error
            self._commit.fail(error)
            raise errors.DiskFailed(str(error)) from error
        full = self._chain.context.full
        if full and need >= full.get(self._chain.group, need):
            full.pop(self._chain.group, None)
        segment.room = min(segment.allocated, segment.used + need + limits.INDEX_STRIDE_BYTES)
        return segment

    def _is_full(self, segment: Segment, need: int) -> bool:
        if segment.used <= segment.head or self.would_use_up_a_number(segment):
            return False
        most = max(limits.SEGMENT_BYTES, 4 * segment.head)
        if segment.used + need > most:
            return True
        # Small records behind a large state: do not repeat the state for fewer bytes than its own.
        records = segment.counts()[0] + segment.count_others()
        return records >= limits.SEGMENT_RECORDS and segment.used - segment.head >= segment.head

    def reserve(self, need: int, least: int = 0) -> Segment:
        """Reserve the next block of sequences on disk, without waiting while half a block remains. Returns the segment
        that takes the next `need` bytes."""
        sequences = self._sequences
        least = max(least, self._end.next + 1)
        bound = self.announce(least - 1)
        if least <= sequences.reserved:
            sequences.refill = sequences.reserved
            self._commit.sync(lambda error: None if error else sequences.confirm(bound))
        else:
            self._commit.sync_now()
            sequences.confirm(bound)
        segment = self._chain.open
        assert segment is not None
        if segment.used + padded(need) > segment.room:
            segment = self.make_room(need)
        return segment

    def announce(self, least: int) -> int:
        """Append a reserve record and return its bound, which counts once it is on disk."""
        bound = self._sequences.announce(least)
        self._append_reserve(bound)
        return bound

    def reserve_at_stop(self) -> None:
        """Append a record that reserves nothing behind `next`, so that a clean stop uses up no number."""
        segment = self._chain.open
        if segment is not None and self._sequences.reserved != self._end.next:
            segment.grow(64)  # without a roll, which might use up a number
            segment.room = segment.allocated
            self._append_reserve(self._end.next)

    def _append_reserve(self, bound: int) -> None:
        self.append(Kind.CHANGE, 0, self._end.last_ns, reserve_body(bound))

    def would_use_up_a_number(self, segment: Segment) -> bool:
        """Whether a new segment would use up a sequence while a ring assigns them: the ring would not know."""
        return self._sequences.are_given_by_others and self._end.next <= segment.first

    def roll(self, need: int = 0) -> Segment:
        """Begin a new segment, for records of `need` bytes. The old segment is sealed once it is synced."""
        chain, commit, end = self._chain, self._commit, self._end
        old = chain.segments[-1]
        # If no message followed the head of the old segment, `next` is its name: that number is used up.
        first = max(end.next, old.first + 1)
        self._sequences.announced = max(self._sequences.announced, first)
        self._record_unused(old, first)
        state = self.state()
        try:
            others, head, fd = write_head(
                chain.context, chain.folder, chain.group, first, state, self._sequences.announced, end.last_ns
            )
        except OSError as error:
            if error.errno in _FULL:
                raise self._disk_full(need or padded(len(state))) from error
            if error.errno not in _SHORT:
                commit.fail(error)
            raise errors.DiskFailed(str(error)) from error
        segment = chain.segment(first)
        segment.may_close_fd = commit.may_close
        segment.begin(fd, head, others)
        end.next = first
        self._sequences.jump(first)
        if chain.open is not None:
            commit.watch(old, commit.written)
        chain.append(segment)
        self.on_rolled()
        if commit.copy is not None:
            commit.copy.add(segment)
        commit.watch(segment, inf)
        commit.written += head
        commit.note_folder_change()
        commit.sync()
        if self._held:
            with suppress(OSError):  # on failure: the old segment gives back its own when it is sealed
                segment.grow(self._held)
                segment.room = segment.used + self._held
        return segment

    def _record_unused(self, old: Segment, first: int) -> None:
        """Append a record with the number before `first`, if no message has it. Otherwise a segment or a change would
        seem to be missing between the two segments if the state of the new one is damaged."""
        if old is not self._chain.open or last_sequence(old) >= first - 1:
            return
        self._end.next = first
        with suppress(OSError, errors.DiskFull):  # the roll does not depend on it
            old.grow(self._held + 64)
            old.room = old.allocated
            self._append_reserve(self._sequences.announced)

    def roll_for_removal(self) -> None:
        """Begin a new segment because the open one is to be removed. On a full disk, use the room allocated behind its
        records."""
        try:
            self.roll()
        except errors.DiskFull:
            segment = self._chain.open
            if segment is None or self._held:
                raise
            segment.shrink()
            segment.room = segment.used
            self.roll()


# ------------------------------------------------------------ batch encoder

_END = int(Kind.END)


def measure(drafts: Sequence[Draft]) -> tuple[int, int]:
    """Return (bytes of the records, number of sequences they use up)."""
    if isinstance(drafts, RecordBatch):
        return drafts.stored_bytes, drafts.sequence_count
    need = sum(padded(32 + len(draft.headers) + len(draft.body)) for draft in drafts)
    return need, sum(draft.kind <= _END for draft in drafts)


class BatchEncoder:
    """The records of one atomic batch, encoded piece by piece: it may be too large to hold."""

    __slots__ = ("_drafts", "_marks", "_position", "_sequence", "_time_ns", "first", "messages", "others", "stamped")

    def __init__(self, drafts: Sequence[Draft], sequence: int, time_ns: int, position: int, marks: int) -> None:
        self.stamped: list[RecordColumns] = []
        self.messages: OpenIndex | None = None
        self.others = bytearray()  # packed rows of records that are no messages
        self.first = -1  # sequence of the first record
        self._drafts, self._sequence, self._time_ns = drafts, sequence, time_ns
        self._position, self._marks = position, marks | MORE

    def encoded(self) -> Iterator[bytes]:
        drafts: Sequence[Draft] = self._drafts
        if isinstance(drafts, RecordBatch):
            yield from self._stamped(drafts)
            drafts = drafts.tail
        if len(drafts):
            yield from self._encoded(drafts)

    def _stamped(self, drafts: RecordBatch) -> Iterator[bytes]:
        """Yield the unsequenced records with their final numbers."""
        left = drafts.sequence_count if not drafts.tail else 0
        for blanks, numbers in drafts.pieces():
            try:
                data, rows = finalize(
                    blanks, numbers, self._sequence + 1, self._time_ns, self._marks, MORE | INNER, left, self._position
                )
            except ValueError as error:
                raise errors.DiskFailed(f"staged records cannot be read back: {error}") from None
            if not rows.end:
                continue
            yield data
            count = len(rows.sequences)
            self._sequence += count
            self._position += rows.end
            left = max(left - count, 0)
            self._begun(rows.sequences[0])
            self.stamped.append(rows)

    def _begun(self, sequence: int) -> None:
        self.first = sequence if self.first < 0 else self.first
        self._marks = MORE | INNER  # only the first record is marked SETTLED

    def _encoded(self, drafts: Sequence[Draft]) -> Iterator[bytes]:
        index, others = self.messages, self.others = OpenIndex(), bytearray()
        sequence, time_ns, position = self._sequence, self._time_ns, self._position
        parts: list[bytes] = []
        size, last, marks = 0, len(drafts) - 1, self._marks
        for number, (kind, stream, body, headers) in enumerate(drafts):
            sequence += kind <= _END
            if number == last:
                marks &= ~MORE
            data = encode(sequence, time_ns, stream, kind, marks, headers, body)
            if kind <= _END:
                index.sequences.append(sequence)
                index.positions.append(position)
                index.bodies.append(len(body))
                index.streams.append(stream)
                index.headers.append(len(headers))
                index.kinds.append(kind)
            else:
                others += pack_other(sequence, position, len(body), stream, len(headers), kind, marks)
            if not number:
                self._begun(sequence)
                marks = self._marks
            parts.append(data)
            size += len(data)
            position += len(data)
            if size >= limits.UNIT_PIECE_BYTES:
                yield b"".join(parts)
                parts, size = [], 0
        index.times.extend([time_ns] * len(index))
        if parts:
            yield b"".join(parts)


# ------------------------------------------------------------ segment head


def write_head(
    context: DiskStore, folder: str, group: int, first: int, state: bytes, reserve: int, now_ns: int
) -> tuple[NonMessageRecords, int, int]:
    """Make the file of a new segment in `folder`, with its head: the state, then a reserve record. The name is not
    synced. Returns the head's rows, its bytes, and an open descriptor: a file that has its name and cannot be opened
    would hide the records appended to the old segment meanwhile. Raises OSError."""
    step = limits.STATE_RECORD_BYTES
    bodies = [state[at : at + step] for at in range(0, len(state), step)] or [b""]
    bodies.append(reserve_body(reserve))
    rows = NonMessageRecords()
    records: list[bytes] = []
    position = 0
    for body in bodies:
        is_last = len(rows) == len(bodies) - 1
        kind, flags = Kind.CHANGE if is_last else Kind.STATE, (0 if is_last else MORE) | (INNER if len(rows) else 0)
        rows.append(Row(first - 1, now_ns, position, len(body), 0, 0, kind, flags))
        records.append(encode(first - 1, now_ns, 0, kind, flags, b"", body))
        position += len(records[-1])
    staged = f"{context.staging}/{group}-{first:020d}.log"
    fd = context.disk.open(staged, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    with removed_on_error(context.disk, staged):
        try:
            write_all(context.disk, fd, b"".join(records), 0)
            context.disk.rename(staged, f"{folder}/{first:020d}.log")
        except BaseException:
            context.disk.close(fd)
            raise
    return rows, position, fd


def read_heads(disk: Disk, folder: str) -> Iterator[bytes]:
    """Yield the first record of the state at the head of each segment, the newest first; unreadable ones are
    skipped."""
    with suppress(OSError):
        for name in sorted((name for name in disk.listdir(folder) if name.endswith(".log")), reverse=True):
            with suppress(OSError):
                yield from _read_head(disk, f"{folder}/{name}")


def _read_head(disk: Disk, path: str) -> Iterator[bytes]:
    with opened(disk, path) as fd:
        size = int.from_bytes(read_all(disk, fd, 4, 0), "little")
        data = read_all(disk, fd, min(size, HEAD_BYTES + limits.STATE_RECORD_BYTES), 0)
    row = row_at(data, 0)
    if row is not None and row.kind == Kind.STATE:
        yield data[HEAD_BYTES : row.size]


# ------------------------------------------------------------ range writer

log = logging.getLogger("mqfs.store")


class DiskRangeWriter:
    """See `RangeWriter` in mqfs/store/api.py."""

    __slots__ = ("_appender", "_chain", "_commit", "_end", "_sequences")

    def __init__(self, chain: Chain, commit: GroupCommit, sequences: SequenceBlocks, appender: Appender) -> None:
        self._chain, self._commit, self._sequences, self._appender = chain, commit, sequences, appender
        self._end = chain.end

    def reserve_space(self, size: int, messages: int) -> int:
        end = self._end
        if end.failed is not None:
            raise errors.ReadOnly(str(end.failed))
        segment = self._chain.open
        if segment is None or segment.used + size > segment.room:
            segment = self._appender.make_room(size)
        if messages and end.next + messages > self._sequences.refill:
            segment = self._appender.reserve(size, end.next + messages)
        return segment.used

    def hold_room(self, size: int) -> None:
        if size and self._end.failed is not None:
            raise errors.ReadOnly(str(self._end.failed))
        self._appender.hold_room(size)

    def append_range(self, data: Buffer, rows: RecordColumns) -> None:
        end, commit, segment = self._end, self._commit, self._chain.open
        if end.failed is not None:
            raise errors.ReadOnly(str(end.failed))
        assert segment is not None
        assert segment.used == rows.positions[0]
        if commit.synced == commit.written:
            data = settled(data)
        index = segment.load()
        assert isinstance(index, OpenIndex)
        fd = segment.open()
        try:
            write_all(self._chain.disk, fd, data, segment.used)
        except OSError as error:
            self._appender.roll_back(segment, len(data), error)
        segment.used += len(data)
        commit.written += len(data)
        if commit.copy is not None:
            commit.copy.note()
        end.last_ns = max(end.last_ns, rows.times[-1])
        index.extend_by(rows)
        end.next = rows.sequences[-1] + 1

    def skip_to(self, sequence: int) -> None:
        self._end.next = max(self._end.next, sequence)

    def continue_at(self, sequence: int) -> None:
        counts = (segment.counts() for segment in reversed(self._chain.segments))
        newest = next((last for messages, _, last in counts if messages), 0)
        if sequence > self._sequences.reserved:
            sequence = 0  # no ring was granted that sequence
        self._end.next = max(sequence, newest + 1, self._chain.firsts[-1])
        self._sequences.continue_at(self._end.next)

    def on_sequences_reserved(self, granted: Callable[[int], None] | None) -> None:
        sequences, end = self._sequences, self._end
        sequences.give_to(granted)
        if granted is None or not sequences.is_low(end.next) or end.failed is not None:
            return
        try:
            self._appender.make_room(64)
            bound = self._appender.announce(end.next)
        except errors.MqfsError as error:  # the earlier bound stays granted; `reserve_space` tries again
            log.warning("group %d: %s", self._chain.group, error)
            return
        self._commit.sync(lambda error: None if error else sequences.confirm(bound))

    def quarantine(self, data: bytes, why: str) -> None:
        group = self._chain.group
        try:
            self._chain.context.quarantine.copy(group, self._end.next, 0, data, why)
        except OSError as error:
            log.warning("group %d: %d bytes were not copied: %s", group, len(data), error)
