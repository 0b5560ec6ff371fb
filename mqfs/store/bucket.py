"""One group's log on disk: the writing half.

Owns its start and its end, appending, reserving sequences, rolling to a new segment and giving back room. Never waits
for a sync except where a block of sequences must be on disk before its first number is given.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Set
from math import inf
from typing import Any

from mqfs import errors, limits
from mqfs.log.batch import finalize
from mqfs.log.record import INNER, MORE, SETTLED, Row, encode, padded, settled
from mqfs.model import Buffer, Columns, Draft, Kind, LazyBatch, UnsequencedRecords
from mqfs.store.compaction import compact
from mqfs.store.disk import write_all
from mqfs.store.group_commit import GroupCommit
from mqfs.store.log_reader import StoreContext, reserve_body, reserved_by
from mqfs.store.segment import index as idx
from mqfs.store.segment.file import Segment
from mqfs.store.segment.index import Index, NonMessageRecords, OpenIndex, pack_other

log = logging.getLogger("mqfs.store")

_FULL = (errno.ENOSPC, errno.EDQUOT)
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # the system lacks something, for a while; the disk is sound
_END = int(Kind.END)
_LOOKS = 4  # segments of which one trim reads the index


def write_head(
    home: StoreContext, folder: str, group: int, first: int, state: bytes, reserve: int, now_ns: int
) -> tuple[list[Row], int]:
    """Make the file of a new segment in `folder`, with its head; the name is not synced. Returns the head's rows and a
    descriptor: one that could not be opened, and has its name, would hide the records behind it in the old segment."""
    step = limits.STATE_RECORD_BYTES
    bodies = [state[at : at + step] for at in range(0, len(state), step)] or [b""]
    bodies.append(reserve_body(reserve))
    rows: list[Row] = []
    records: list[bytes] = []
    position = 0
    for body in bodies:
        ends = len(rows) == len(bodies) - 1
        kind, flags = Kind.CHANGE if ends else Kind.STATE, (0 if ends else MORE) | (INNER if rows else 0)
        rows.append(Row(first - 1, now_ns, position, len(body), 0, 0, kind, flags))
        records.append(encode(first - 1, now_ns, 0, kind, flags, b"", body))
        position += len(records[-1])
    made = f"{home.staging}/{group}-{first:020d}.log"
    fd = home.disk.open(made, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        write_all(home.disk, fd, b"".join(records), 0)
        home.disk.rename(made, f"{folder}/{first:020d}.log")
    except BaseException:
        home.disk.close(fd)
        raise
    return rows, fd


def _measure(drafts: Sequence[Draft]) -> tuple[int, int]:
    """The bytes they take, and how many take a sequence."""
    if isinstance(drafts, LazyBatch):
        return drafts.room, drafts.taking
    need = sum(padded(32 + len(draft.headers) + len(draft.body)) for draft in drafts)
    return need, sum(draft.kind <= _END for draft in drafts)


class BatchEncoder:
    """The records of one unit, encoded piece by piece: it may be larger than what is good to hold."""

    def __init__(self, drafts: Sequence[Draft], sequence: int, time_ns: int, position: int, marks: int) -> None:
        self.stamped: list[Columns] = []
        self.messages: OpenIndex | None = None
        self.others: list[Row] = []
        self.first = -1  # what the first record carries
        self._drafts, self._sequence, self._time_ns = drafts, sequence, time_ns
        self._position, self._marks = position, marks | MORE

    def encoded(self) -> Iterator[bytes]:
        drafts = self._drafts
        if isinstance(drafts, UnsequencedRecords):
            yield from self._stamped(drafts)
            drafts = drafts.behind
        if len(drafts):
            yield from self._encoded(drafts)

    def _stamped(self, drafts: UnsequencedRecords) -> Iterator[bytes]:
        """The messages that are encoded but for what is known only now."""
        left = drafts.taking if not drafts.behind else 0
        for blanks, numbers in drafts.pieces():
            try:
                data, rows = finalize(
                    blanks, numbers, self._sequence + 1, self._time_ns, self._marks, MORE | INNER, left, self._position
                )
            except ValueError as error:
                raise errors.DiskFailed(f"what was put aside cannot be read back: {error}") from None
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
        self._marks = MORE | INNER  # what is before the others is not on disk

    def _encoded(self, drafts: Sequence[Draft]) -> Iterator[bytes]:
        index = self.messages = OpenIndex()
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
                self.others.append(Row(sequence, time_ns, position, len(body), stream, len(headers), kind, marks))
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


class DiskBucket(GroupCommit):
    """See `Bucket` in mqfs/seams.py."""

    def __init__(self, home: StoreContext, number: int, folder: str) -> None:
        super().__init__(home, number, folder)
        self.state: Callable[[], bytes] = self._no_state
        self._pwrite = home.disk.pwrite
        self._reserved = self._refill = 1  # below it sequences may be given; from when on a new block is wanted
        self._announced = 1  # what the newest reserve record says, on disk or not
        self._unsure = 0  # where a segment was that is not whole
        self._seen = 0  # bytes appended at the last tick
        self._work: Generator[bool, None, None] | None = None  # a compaction under way
        self.rewriting = False  # whether it has chosen segments: none may go meanwhile
        self._replaced: deque[Segment] = deque()  # what is wanted of them is in another segment: to be removed
        self._removing = False  # whether a sync is under way after which the first of them goes
        self._floors: Mapping[int, int] = {}
        self._told = False  # what is wanted: nothing is given back before
        self._dropped: Set[int] = frozenset()
        self._looked: object = None
        self._block = limits.SEQUENCE_BLOCK  # sequences reserved at once
        self._granted: Callable[[int], None] | None = None
        self._start()

    # ------------------------------------------------------------ a start

    def _start(self) -> None:
        names = sorted(name for name in self._disk.listdir(self._folder) if name.endswith(".log"))
        firsts = [int(name[:-4]) for name in names]
        while firsts:
            segment = self._segment(firsts[-1])
            if segment.start(newest=True):
                break
            self._set_whole_aside(segment)
            firsts.pop()
        else:
            raise errors.DiskFailed(f"no segment of group {self.id} is whole; see quarantine/")
        self._segments = [self._segment(first) for first in firsts[:-1]] + [segment]
        self._firsts = firsts
        for older in self._segments[:-1]:
            older.used = self._disk.size_of(older.path)
            self._sealed_bytes += older.used
        if segment.sealed:
            self._sealed_bytes += segment.used
        else:
            self._take_up(segment)
        self.last_ns = segment.last_ns()
        self.next = self._reserved = self._refill = self._announced = self._bound()

    def _take_up(self, segment: Segment) -> None:
        """Go on with the segment that was open at the stop."""
        self._open = segment
        segment.may_close_fd = self._quiet
        self._unsynced = {segment: inf}
        clean = segment.parts and segment.parts[-1].flags & idx.CLEAN and segment.covered == segment.used
        if not clean:
            self._note_folder_change()
            older = [s for s in self._segments[:-1] if not s.looks_sealed()]
            self._unsynced = {**dict.fromkeys(older, self._written), segment: inf}
            for unsure in self._unsynced:
                unsure.may_close_fd = self._quiet
                unsure.write_again()

    def _set_whole_aside(self, segment: Segment) -> None:
        segment.close_idle()
        self._unsure = segment.first
        self._home.move_aside(self.id, segment.first, segment.path, "a segment without a whole state")

    def _bound(self) -> int:
        """The next sequence: what the newest reserve record says, if nothing greater is seen."""
        bound = 1
        for segment in reversed(self._segments):
            found = self._reserves(segment)
            newest = next(found, 0)
            bound = max(bound, segment.counts()[2] + 1, self._unsure)
            if newest and not self.damaged and not self._unsure:
                return max(bound, newest)
            if newest:
                # Damage may have hidden the record that counts.
                return max(bound, newest, *found) + limits.SEQUENCE_BLOCK
        return bound + limits.SEQUENCE_BLOCK

    def _reserves(self, segment: Segment) -> Iterator[int]:
        """What its records reserve, the newest first."""
        rows = segment.rows()
        for number in reversed(rows.of_kind(Kind.CHANGE)):
            row = rows[number]
            if row.stream == 0 and row.body < 40:
                record = self._row(segment, row)
                if record is not None and (bound := reserved_by(record.body)):
                    yield bound

    @staticmethod
    def _no_state() -> bytes:
        raise AssertionError("Bucket.state was not set")

    # ------------------------------------------------------------ appending

    def append(self, kind: int, stream: int, time_ns: int, body: bytes, headers: bytes = b"") -> int:
        if self.failed is not None:
            raise errors.ReadOnly(str(self.failed))
        if time_ns < self.last_ns:
            time_ns = self.last_ns
        segment = self._open
        need = 32 + len(headers) + len(body)
        if segment is None or segment.used + need > segment.room:
            segment = self._make_room(need)
        if kind <= 2:
            if self.next >= self._refill:
                segment = self._reserve(need)
            sequence = self.next
        else:
            sequence = self.next - 1
        flags = SETTLED if self._synced == self._written else 0
        data = encode(sequence, time_ns, stream, kind, flags, headers, body)
        position = segment.used
        if kind > 2:
            others: Any = segment.others
            if others is None:
                others = segment.rows()
        else:
            index: Any = segment.index
            if index is None:
                index = segment.load()
        fd = segment.fd if segment.fd >= 0 else segment.open()
        try:
            done = self._pwrite(fd, data, position)
            if done != len(data):
                write_all(self._disk, fd, data[done:], position + done)
        except OSError as error:
            self._roll_back(segment, len(data), error)
        segment.used = position + len(data)
        self._written += len(data)
        self.last_ns = time_ns
        segment.recent = True
        if kind > 2:
            others.packed += pack_other(sequence, position, len(body), stream, len(headers), kind, flags)
            others.last_ns = time_ns
            return sequence
        self.next = sequence + 1
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

    def append_unit(self, drafts: Sequence[Draft], time_ns: int) -> int:
        if self.failed is not None:
            raise errors.ReadOnly(str(self.failed))
        time_ns = max(time_ns, self.last_ns)
        need, taking = _measure(drafts)
        segment = self._open
        if segment is None or segment.used + need > segment.room:
            segment = self._make_room(need)
        while taking and self.next + taking > self._refill:
            segment = self._reserve(need, self.next + taking)
        marks = SETTLED if self._synced == self._written else 0
        unit = BatchEncoder(drafts, self.next - 1, time_ns, segment.used, marks)
        index, others = segment.load(), segment.rows()
        assert isinstance(index, OpenIndex)
        fd, written = segment.open(), segment.used
        try:
            for data in unit.encoded():
                write_all(self._disk, fd, data, written)
                written += len(data)
        except OSError as error:
            self._roll_back(segment, need, error)
        except errors.MqfsError as error:  # what was to be written cannot be had
            self._erase(segment, need)
            raise error from None
        segment.used = written
        self._written += need
        self.last_ns = time_ns
        self._note(unit, index, others)
        return unit.first

    def _note(self, unit: BatchEncoder, index: OpenIndex, others: NonMessageRecords) -> None:
        """Take records that were written into the index."""
        for rows in unit.stamped:
            index.extend_by(rows)
            self.next += len(rows.sequences)
        if unit.messages is not None:
            for ordinal, stream in enumerate(unit.messages.streams, len(index)):
                index.postings.setdefault(stream, array("I")).append(ordinal)
            index.extend(unit.messages)
            self.next += len(unit.messages)
        for row in unit.others:
            others.append(row)

    def skip(self) -> int:
        if self.failed is not None:
            raise errors.ReadOnly(str(self.failed))
        if self.next >= self._refill:
            if self._open is None:
                self._make_room(0)
            self._reserve(0)
        sequence = self.next
        self.next += 1
        return sequence

    # ------------------------------------------------------------ what others encoded and numbered

    def reserve_space(self, size: int, messages: int) -> int:
        if self.failed is not None:
            raise errors.ReadOnly(str(self.failed))
        segment = self._open
        if segment is None or segment.used + size > segment.room:
            segment = self._make_room(size)
        if messages and self.next + messages > self._refill:
            segment = self._reserve(size, self.next + messages)
        return segment.used

    def append_range(self, data: Buffer, rows: Columns) -> None:
        if self.failed is not None:
            raise errors.ReadOnly(str(self.failed))
        segment = self._open
        assert segment is not None
        assert segment.used == rows.positions[0]
        if self._synced == self._written:
            data = settled(data)
        index = segment.load()
        assert isinstance(index, OpenIndex)
        fd = segment.open()
        try:
            write_all(self._disk, fd, data, segment.used)
        except OSError as error:
            self._roll_back(segment, len(data), error)
        segment.used += len(data)
        self._written += len(data)
        self.last_ns = max(self.last_ns, rows.times[-1])
        index.extend_by(rows)
        self.next = rows.sequences[-1] + 1

    def quarantine(self, data: bytes, why: str) -> None:
        try:
            self._home.quarantine(self.id, self.next, 0, data, why)
        except OSError as error:
            log.warning("group %d: %d bytes were not copied: %s", self.id, len(data), error)

    def skip_to(self, sequence: int) -> None:
        self.next = max(self.next, sequence)

    def continue_at(self, sequence: int) -> None:
        seen = next((segment.counts()[2] for segment in reversed(self._segments) if segment.counts()[0]), 0)
        if sequence > self._reserved:
            sequence = 0  # nobody was allowed to give that one
        self.next = max(sequence, seen + 1, self._firsts[-1])
        self._refill = max(self._reserved - self._block // 2, self.next)

    def on_sequences_reserved(self, granted: Callable[[int], None] | None) -> None:
        self._granted = granted
        self._block = limits.SEQUENCE_BLOCK if granted is None else limits.RING_SEQUENCE_BLOCK
        if granted is None:
            return
        granted(self._reserved)
        if self._reserved - self.next < self._block // 2 and self.failed is None:
            try:
                self._make_room(64)
                bound = self._announce(self.next)
            except errors.MqfsError as error:  # what was reserved before is granted; `place` tries again
                log.warning("group %d: %s", self.id, error)
                return
            self.sync(lambda error: None if error else self._reserve_to(bound))

    def _roll_back(self, segment: Segment, length: int, error: OSError) -> None:
        """An append failed: leave nothing of it, and raise."""
        try:
            self._erase(segment, length)
        except OSError as again:
            error = again if error.errno in _FULL and again.errno not in _FULL else error
            if error.errno in _FULL:
                error = OSError(errno.EIO, "a record could not be taken back")
        if error.errno in _FULL:
            raise errors.DiskFull(f"group {self.id}") from error
        self._break(error)
        raise errors.DiskFailed(str(error)) from error

    def _erase(self, segment: Segment, length: int) -> None:
        """Zeros where something was perhaps written behind the end."""
        end = segment.used + max(0, min(length, segment.allocated - segment.used))
        step = limits.UNIT_PIECE_BYTES
        for at in range(segment.used, end, step):
            write_all(self._disk, segment.open(), bytes(min(step, end - at)), at)

    def _make_room(self, need: int) -> Segment:
        """The segment that takes the next record of `need` bytes, preallocated."""
        need = padded(need)
        segment = self._open
        if segment is None or self._is_full(segment, need):
            segment = self._roll()
        covered = segment.covered
        if segment.used - covered >= limits.INDEX_STRIDE_BYTES:
            self._ask_for_part(segment)
        try:
            segment.grow(need)
        except OSError as error:
            if error.errno in _FULL:
                raise errors.DiskFull(f"group {self.id}") from error
            self._break(error)
            raise errors.DiskFailed(str(error)) from error
        stride = segment.used + need + limits.INDEX_STRIDE_BYTES
        segment.room = min(segment.allocated, max(stride, segment.used + need))
        return segment

    def _is_full(self, segment: Segment, need: int) -> bool:
        if segment.used <= segment.head or self._is_named_next(segment):
            return False
        most = max(limits.SEGMENT_BYTES, 4 * segment.head)
        if segment.used + need > most:
            return True
        # Small records behind a large state: it is not written again for less than its own bytes.
        records = segment.counts()[0] + segment.count_others()
        return records >= limits.SEGMENT_RECORDS and segment.used - segment.head >= segment.head

    def _reserve(self, need: int, least: int = 0) -> Segment:
        """Have the next block of sequences on disk: while half a block is left, without waiting."""
        least = max(least, self.next + 1)
        bound = self._announce(least - 1)
        if least <= self._reserved:
            self._refill = self._reserved
            self.sync(lambda error: None if error else self._reserve_to(bound))
        else:
            self._sync_now()
            self._reserve_to(bound)
        segment = self._open
        assert segment is not None
        if segment.used + padded(need) > segment.room:
            segment = self._make_room(need)
        return segment

    def _announce(self, least: int) -> int:
        """Append a reserve record; it counts once it is on disk. Never lower than the one before: the newest counts."""
        self._announced = max(self._announced, max(self._reserved, least) + self._block)
        self._put(Kind.CHANGE, reserve_body(self._announced))
        return self._announced

    def _put(self, kind: int, body: bytes) -> None:
        """Append a record of our own."""
        self.append(kind, 0, self.last_ns, body)

    def _reserve_to(self, bound: int) -> None:
        self._reserved = max(self._reserved, bound)
        self._refill = self._reserved - self._block // 2
        if self._granted is not None:
            self._granted(self._reserved)

    def _is_named_next(self, segment: Segment) -> bool:
        """Whether the next segment would use up a sequence, and a ring gives them: it would not know of that."""
        return self._granted is not None and self.next <= segment.first

    def _roll(self) -> Segment:
        """Begin a new segment. The old one is sealed when it is synced."""
        old = self._segments[-1]
        # Where only changes came since the old one began its name is taken, so that number is used up.
        first = max(self.next, old.first + 1)
        self._announced = max(self._announced, first)
        try:
            rows, fd = write_head(self._home, self._folder, self.id, first, self.state(), self._announced, self.last_ns)
        except OSError as error:
            if error.errno in _FULL:
                raise errors.DiskFull(f"group {self.id}") from error
            if error.errno not in _SHORT:
                self._break(error)
            raise errors.DiskFailed(str(error)) from error
        segment = self._segment(first)
        segment.may_close_fd = self._quiet
        segment.index, segment.others, segment.started = OpenIndex(), NonMessageRecords(), True
        for row in rows:
            segment.others.append(row)
        segment.used = segment.allocated = segment.head = rows[-1].position + padded(rows[-1].size)
        segment.take_up(fd)
        self.next = first
        if first > self._reserved:
            self._reserved = self._refill = first
        if self._open is not None:
            self._sealed_bytes += old.used
            self._unsynced[old] = self._written
        self._segments.append(segment)
        self._firsts.append(first)
        self._unsynced[segment] = inf
        self._written += segment.used
        self._note_folder_change()
        self._open = segment
        self.sync()
        return segment

    # ------------------------------------------------------------ giving back

    def trim(self, floors: Mapping[int, int], dropped: Set[int]) -> None:
        self._floors, self._dropped, self._told = floors, dropped, True
        try:
            self._trim()
        except (OSError, errors.MqfsError) as error:
            log.warning("group %d was not trimmed: %s", self.id, error)

    def _trim(self) -> None:
        opened = self._open
        looks = _LOOKS
        unwanted = []
        for segment in self._segments:
            if segment is opened or self._has_witness(segment):
                continue
            looks -= 1
            if looks >= 0 and not self._wanted(segment):
                unwanted.append(segment)
        if opened is not None and self._has_grown(opened) and not self._is_named_next(opened) and self.failed is None:
            opened.cursor = 0
            if len(unwanted) == len(self._segments) - 1 and not self._wanted(opened):
                self._roll()
                unwanted.append(opened)
        if self._open is None:
            unwanted = [s for s in unwanted if s is not self._segments[-1]]  # it holds the newest state
        if unwanted and not self.rewriting and self.failed is None:
            self.sync(lambda error: None if error else self._drop(unwanted))

    def _has_grown(self, segment: Segment) -> bool:
        """By so much that a new one costs less than what it gives back: it begins with the state."""
        return segment.used - segment.head > max(limits.SEGMENT_FIRST_BYTES * 16, segment.head)

    def _has_witness(self, segment: Segment) -> bool:
        """Whether the message in it that was wanted when last looked still is."""
        stream, last = segment.live_hint
        return self._floors.get(stream, last + 1) <= last and last not in self._dropped

    def _wanted(self, segment: Segment) -> bool:
        """Whether a message in it is wanted. What is unwanted once is never looked at again."""
        if self._has_witness(segment):
            return True
        index = segment.load()
        present = index.present()
        while segment.cursor < len(present):
            stream = present[segment.cursor]
            floor = self._floors.get(stream)
            if floor is not None and (last := self._last_wanted(index, stream, floor)) >= 0:
                segment.live_hint = (stream, last)
                return True
            segment.cursor += 1
        return False

    def _last_wanted(self, index: Index, stream: int, floor: int) -> int:
        for ordinal in reversed(index.posting(stream)):
            sequence = index.sequences[ordinal]
            if sequence < floor:
                return -1
            if sequence not in self._dropped:
                return sequence
        return -1

    def _drop(self, segments: list[Segment]) -> None:
        """Remove segments in which nothing is wanted, and everything that made it so is synced."""
        if self.rewriting:
            return  # perhaps some of them; the next trim asks again
        for segment in segments:
            if segment not in self._segments or segment in self._unsynced or self._closed:
                continue
            self._forget(segment)
            self._remove_files(segment)
        self._first = None

    def _forget(self, segment: Segment) -> None:
        at = self._segments.index(segment)
        del self._segments[at], self._firsts[at]
        self._sealed_bytes -= segment.used

    def _remove_files(self, segment: Segment) -> bool:
        """Whether its log is gone."""
        segment.index = None
        segment.close_idle()
        for path in (segment.idx_path, segment.path):
            try:
                self._unlink(path)
            except FileNotFoundError:
                pass
            except OSError as error:
                log.warning("group %d: %s was not removed: %s", self.id, path, error)
                return False
        return True

    def _unlink(self, path: str) -> None:
        """The room of a file is freed with its last descriptor, in 16 ms for 64 MiB: on the committer's thread."""
        fd = -1
        with contextlib.suppress(OSError):
            fd = self._disk.open(path, os.O_RDONLY)
        try:
            self._disk.unlink(path)
        finally:
            if fd >= 0:
                self._home.close_later(fd)

    def tick(self, until: float) -> None:
        """A portion of compaction, until that moment of the monotonic clock."""
        if self.failed is not None or self._closed:
            return
        try:
            self._tick(until)
        except (OSError, errors.MqfsError) as error:
            self._work = None
            log.warning("group %d: house-keeping failed: %s", self.id, error)

    def _tick(self, until: float) -> None:
        self._ask_again()
        self._go_on_removing()
        self._rest_when_idle()
        if not self._told:
            return
        if self._work is None:
            if len(self._segments) < 2:
                return
            looked = (len(self._floors), sum(self._floors.values()), len(self._dropped), len(self._segments))
            if looked == self._looked:
                return
            self._looked = looked
            self._work = compact(self)
        for waits in self._work:
            if waits or time.monotonic() >= until:
                return
        self._work = None

    def _rest_when_idle(self) -> None:
        """A bucket that is not written: its index goes to the disk, and out of memory when it is not read either."""
        segment, seen = self._open, self._seen
        self._seen = self._written
        if segment is None or self._written != self._synced or seen != self._written:
            return
        if segment.used - segment.covered > limits.SEGMENT_FIRST_BYTES:
            segment.extend(segment.used, segment.counts()[0], segment.count_others(), self.last_ns)
        elif not segment.recent:
            segment.drop_index_cache()
        segment.recent = False

    def wanted(self, stream: int, sequence: int) -> bool:
        """Whether that message is wanted, as `trim` was told last."""
        floor = self._floors.get(stream)
        return floor is not None and sequence >= floor and sequence not in self._dropped

    def floor(self, stream: int) -> int:
        """Below it nothing of that stream is wanted."""
        return self._floors.get(stream, self.next)

    def wants_all(self, lowest: Mapping[int, int]) -> bool:
        """Whether no floor has passed those sequences of the streams. Messages dropped one by one are not looked at."""
        return all(self._floors.get(stream, self.next) <= sequence for stream, sequence in lowest.items())

    def holds(self, segment: Segment) -> bool:
        return segment in self._segments

    def sealed_segments(self) -> list[tuple[Segment, int]]:
        """The sealed ones, each with the sequence where its responsibility ends."""
        ends = [*self._firsts[1:], self.next]
        return [(s, end) for s, end in zip(self._segments, ends, strict=True) if s.sealed and s is not self._open]

    def replace(self, run: list[Segment], used: int, put_in_place: Callable[[], None]) -> None:
        """One segment of that length, of the first one's name, comes in the place of a run of them."""
        at = self._segments.index(run[0])
        put_in_place()
        for segment in run:
            segment.index = None
            segment.close_idle()
        made = self._segment(run[0].first)
        made.used = used
        self._sealed_bytes += used - sum(segment.used for segment in run)
        self._segments[at : at + len(run)] = [made]
        self._firsts[at : at + len(run)] = [made.first]
        self._first = None
        self._note_folder_change()
        self._replaced.extend(run[1:])
        self._go_on_removing()

    def _go_on_removing(self) -> None:
        if self._replaced and not self._removing:
            self._removing = True
            self.sync(self._remove_replaced)

    def _remove_replaced(self, error: OSError | None) -> None:
        """Each is gone from the disk before the next: else one that is left would answer for the next one's numbers.
        One that cannot be removed is tried again by the next tick."""
        self._removing = False
        if error is None and self._replaced and not self._closed and self._remove_files(self._replaced[0]):
            self._replaced.popleft()
            self._note_folder_change()
            self._go_on_removing()

    # ------------------------------------------------------------ the end

    def rebuild(self) -> None:
        """Look into every segment, so that each has its index."""
        for segment in self._segments:
            segment.load()

    def close(self) -> None:
        if self._closed:
            return
        self._home.committer.cancel(self)
        self._asked = None
        if self._work is not None:
            self._work.close()
            self._work = None
        if self.failed is None:
            self._leave_clean()
        self._closed = True
        for segment in self._segments:
            segment.index = None
            segment.close_idle()

    def give_up(self) -> None:
        """It was removed: nothing of it matters any more."""
        if self._work is not None:
            self._work.close()
        self._closed = True
        waiting, self._waiting = self._waiting, deque()
        for segment in self._segments:
            segment.index = None
            segment.close_idle()
        for entry in waiting:
            if entry.then is not None:
                entry.then(None)

    def _leave_clean(self) -> None:
        """Everything on disk, the exact next sequence too, and the index to the end."""
        try:
            if self._reserved != self.next and self._open is not None:
                self._open.grow(64)  # without a roll, which might use up a number
                self._open.room = self._open.allocated
                self._put(Kind.CHANGE, reserve_body(self.next))
            self._sync_now()
        except (OSError, errors.MqfsError) as error:
            log.warning("group %d was not stopped cleanly: %s", self.id, error)
            return
        self._committed(None)
        segment = self._open
        if segment is not None:
            self._finish_open(segment)

    def _finish_open(self, segment: Segment) -> None:
        try:
            segment.shrink()
            messages, others = segment.counts()[0], segment.count_others()
            segment.extend(segment.used, messages, others, self.last_ns, idx.CLEAN)
        except (OSError, errors.MqfsError) as error:
            log.warning("group %d: its index was not written: %s", self.id, error)

    def begin(self) -> None:
        """It was just made, with a block of sequences, and is on disk."""
        self.next, self._refill = 1, 1 + limits.SEQUENCE_BLOCK // 2
        self._written = self._synced = self._folder_changed = 0

    @property
    def home(self) -> StoreContext:
        return self._home

    @property
    def folder(self) -> str:
        return self._folder
