"""Giving back room: segments without a live message are removed, those with few are rewritten.

    sealed        [1: none live]   [40: 2 % live]   [72: 5 % live]   [99: 90 % live]
    trim          1 is removed
    compaction    40 and 72 become one segment 40: the live messages of both, the head and the changes of 72

The records that made messages unwanted are on disk before a segment is removed. Of the segments that one replaces, the
others are removed from the lowest on, each durably before the next: until all are removed, both copies of a message are
the same. Work is done in portions. A segment that is appended to, or that may hide damage, is not compacted.

    staging/1-…40.compact, .compact.idx    both synced; then the log gets its name, then the index
    after a kill between the two           the next start puts the index in place

The index is not put in place first: only the old index says that a torn tail is one. The log is not put in place
without an index: a copy continues a segment that has none, with frames of the replaced segment.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Set
from functools import partial
from heapq import merge
from operator import attrgetter

from mqfs import errors, limits
from mqfs.model import MORE, Kind
from mqfs.records.record import INNER, Row, decode, encode, padded
from mqfs.store.appender import Appender
from mqfs.store.chain import Chain
from mqfs.store.disk import Disk, opened, read_all, removed_on_error, write_all, write_file
from mqfs.store.group_commit import GroupCommit
from mqfs.store.recovery import last_sequence
from mqfs.store.segment.file import Segment
from mqfs.store.segment.index import (
    SEALED,
    Index,
    IndexFile,
    NonMessageRecords,
    OpenIndex,
    SealedIndex,
    encode_part,
    size_of,
    weight,
)
from mqfs.store.segment.liveness import Liveness
from mqfs.store.sequences import reserve_body

log = logging.getLogger("mqfs.store")

_LOOKS = 4  # segments whose index one trim may load
_PORTION = 256  # records copied between two readings of the clock
_LOOKED = 4_096  # messages counted between two readings of the clock
_REMEMBERED = 64  # streams: a dense segment of more is measured again by each compaction
_BUFFER = 256 << 10
_RUN = 64  # segments that one replaces: they are removed one by one, each with a sync

Work = Generator[bool, None, None]  # yields between portions; True: the work waits for a sync


class SegmentRemoval:
    """Removes the files of segments, and takes these out of the chain."""

    __slots__ = ("_chain", "_closed", "_commit", "_replaced", "_syncing", "paused")

    def __init__(self, chain: Chain, commit: GroupCommit) -> None:
        self._chain, self._commit = chain, commit
        self.paused = False  # a compaction has chosen segments: none may be removed meanwhile
        self._replaced: deque[Segment] = deque()  # compacted into another segment, and to be removed
        self._syncing = False  # a sync is under way, after which the first of them is removed
        self._closed = False

    @property
    def is_pending(self) -> bool:
        """Whether files of replaced segments may still exist after a crash: their messages would count again."""
        return bool(self._replaced) or self._syncing

    def remove(self, segments: list[Segment]) -> None:
        """Remove the segments after a sync, except those with unsynced bytes. None is removed if a compaction has
        chosen segments by then: a later trim tries again."""
        self._commit.sync(lambda error: None if error else self._remove_now(segments))

    def _remove_now(self, segments: list[Segment]) -> None:
        if self.paused:
            return  # it may be one of these; the next trim tries again
        for segment in segments:
            if segment in self._chain.segments and not self._commit.has_unsynced(segment) and not self._closed:
                try:
                    end = self._held_until(segment)
                except (OSError, errors.MqfsError) as error:
                    log.warning("group %d: %s was not removed: %s", self._chain.group, segment.path, error)
                    continue
                self._chain.remove(segment)
                if (copy := self._commit.copy) is None:
                    self._remove_files(segment)
                else:
                    copy.note_trimmed(segment.first, end, partial(self._remove_told, segment))
        self._chain.lowest = None

    def _held_until(self, segment: Segment) -> int:
        """Return the end of the sequences that a copy no longer needs. It is not the start of the next segment: a
        segment between the two may have been lost here. Raises OSError, MqfsError."""
        if self._commit.copy is None:
            return segment.first
        return min(self._chain.end_of(self._chain.segments.index(segment)), last_sequence(segment) + 1)

    def _remove_told(self, segment: Segment) -> None:
        if not self._closed:
            self._remove_files(segment)

    def replace(self, run: list[Segment], used: int, put_in_place: Callable[[], None]) -> None:
        """Replace a run of segments by one segment of `used` bytes, which has the name of the first."""
        assert run[0] in self._chain.segments
        put_in_place()
        for segment in run:
            segment.index = None
            segment.close_idle()
        made = self._chain.segment(run[0].first)
        made.used = used
        self._chain.replace(run, made)
        self._commit.note_folder_change()
        self._replaced.extend(run[1:])
        self.resume()

    def resume(self) -> None:
        """Continue to remove the replaced segments; a removal that failed is retried."""
        if self._replaced and not self._syncing:
            self._syncing = True
            self._commit.sync(self._remove_replaced)

    def _remove_replaced(self, error: OSError | None) -> None:
        """Remove the first replaced segment. Its removal is on disk before the next begins: otherwise a remaining
        segment would take over the sequences of a removed one."""
        self._syncing = False
        if error is None and self._replaced and not self._closed and self._remove_files(self._replaced[0]):
            self._replaced.popleft()
            self._commit.note_folder_change()
            self.resume()

    def _remove_files(self, segment: Segment) -> bool:
        """Remove the index and the log of a segment. Returns whether the log is removed."""
        segment.index = None
        segment.close_idle()
        for path in (segment.idx.path, segment.path):
            try:
                self._unlink(path)
            except FileNotFoundError:
                pass
            except OSError as error:
                log.warning("group %d: %s was not removed: %s", self._chain.group, path, error)
                return False
        return True

    def _unlink(self, path: str) -> None:
        """Remove a file. Its room is freed with the last descriptor, in 16 ms for 64 MiB: on the committer's thread."""
        fd = -1
        with contextlib.suppress(OSError):
            fd = self._chain.disk.open(path, os.O_RDONLY)
        try:
            self._chain.disk.unlink(path)
        finally:
            if fd >= 0:
                self._chain.context.close_later(fd)

    def close(self) -> None:
        """Stop removing files."""
        self._closed = True


def trim(chain: Chain, liveness: Liveness, removal: SegmentRemoval, appender: Appender) -> None:
    """Remove segments without a live message. Raises OSError, MqfsError."""
    opened, looks, unwanted = chain.open, _LOOKS, []
    for segment in chain.segments:
        if segment is opened or liveness.confirms(segment.liveness):
            continue
        looks -= 1
        if looks >= 0 and not liveness.has_live(segment.liveness, segment.load()):
            unwanted.append(segment)
    if opened is not None and _is_worth_a_roll(opened, appender) and chain.end.failed is None:
        opened.liveness.cursor = 0
        are_others_unwanted = len(unwanted) == len(chain.segments) - 1
        if are_others_unwanted and not _has_live(liveness, opened):
            appender.roll_for_removal()
            unwanted.append(opened)
    if chain.open is None:  # the last holds the newest state
        unwanted = [segment for segment in unwanted if segment is not chain.segments[-1]]
    if unwanted and not removal.paused and chain.end.failed is None:
        removal.remove(unwanted)


def _has_live(liveness: Liveness, segment: Segment) -> bool:
    return liveness.confirms(segment.liveness) or liveness.has_live(segment.liveness, segment.load())


def _is_worth_a_roll(segment: Segment, appender: Appender) -> bool:
    """Whether a new segment, which begins with the state, is smaller than the room this one gives back."""
    grown = segment.used - segment.head
    return grown > max(limits.SEGMENT_FIRST_BYTES * 16, segment.head) and not appender.would_use_up_a_number(segment)


# ------------------------------------------------------------ compaction


class Compaction:
    """The compaction of one log."""

    __slots__ = ("_commit", "_dropped", "_looked", "_work", "chain", "liveness", "removal")

    def __init__(self, chain: Chain, commit: GroupCommit, liveness: Liveness, removal: SegmentRemoval) -> None:
        self.chain, self._commit, self.liveness, self.removal = chain, commit, liveness, removal
        self._work: Work | None = None
        self._looked: object = None  # the inputs of the last compaction
        self._dropped: Set[int] = frozenset()  # messages dropped one by one, as of the last compaction

    def tick(self, until: float) -> None:
        """Do a portion of the work, until that moment of the monotonic clock. Raises OSError, MqfsError."""
        if self._work is None:
            if len(self.chain.segments) < 2:
                return
            copied = (copy.settled, copy.held) if (copy := self._commit.copy) is not None else ()
            looked = (*self.liveness.version(), len(self.chain.segments), *copied)
            if looked == self._looked:
                return
            self._looked = looked
            self._work = self.compact()
        for waits in self._work:
            if waits or time.monotonic() >= until:
                return
        self._work = None

    def cancel(self) -> None:
        if self._work is not None:
            with contextlib.suppress(errors.Interrupted):
                self._work.throw(errors.Interrupted("compaction: cancelled"))
            self._work = None

    def compact(self) -> Work:
        """Rewrite each run of adjacent sealed segments of which less than a quarter is live."""
        yield from self._note_dropped()
        for segment, end in self.chain.sealed():
            if segment in self.chain.segments:  # it may be removed while others are measured
                yield from self._measure_live_bytes(segment, end)
        runs = self._runs()
        self.removal.paused = bool(runs)
        try:
            for run in runs:
                yield from CompactionJob(self.chain, self._commit, self.liveness, self.removal, run).work()
        except (OSError, errors.DiskFailed) as error:
            log.warning("group %d was not compacted: %s", self.chain.group, error)
        finally:
            self.removal.paused = False

    def _note_dropped(self) -> Work:
        """Mark segments in which messages were dropped since the last time to be measured again."""
        dropped = self.liveness.dropped
        for count, sequence in enumerate(dropped - self._dropped, 1):
            self.chain.segments[self.chain.number_of(sequence)].liveness.dense_until = None
            if count % _LOOKED == 0:
                yield False
        self._dropped = dropped

    def _measure_live_bytes(self, segment: Segment, end: int) -> Work:
        """Count the bytes of the segment's live messages, but stop at a quarter of its size."""
        cache, liveness = segment.liveness, self.liveness
        if cache.dense_until is not None and liveness.are_all_above(cache.dense_until):
            return
        cache.dense_until = None
        index, live, seen = segment.load(), 0, 0
        counted: dict[int, int] = {}  # of each stream, the lowest sequence counted
        for stream in index.present():
            for ordinal in liveness.live(index, stream, index.posting(stream)):
                seen += 1
                if seen % _LOOKED == 0:
                    yield False
                if ordinal >= 0 and (sequence := index.sequences[ordinal]) < end:
                    live += padded(size_of(index, ordinal))
                    counted[stream] = sequence
                if live >= segment.used // 4:
                    cache.live_bytes = live
                    may_lose = liveness.wanted is not None  # a message may be replaced before a watermark passes it
                    cache.dense_until = counted if len(counted) <= _REMEMBERED and not may_lose else None
                    return
        cache.live_bytes = live

    def _runs(self) -> list[list[Segment]]:
        """Return the runs of adjacent segments that become much smaller. A segment that would only be copied is not
        among them."""
        runs: list[list[Segment]] = [[]]
        behind, copy = 0, self._commit.copy
        held = copy.held if copy is not None else 0
        for segment, end in self.chain.sealed():
            if copy is not None and segment.first >= copy.settled:
                break  # the copy has not confirmed these: positions in a rewritten segment would differ from its own
            if segment.first != behind:
                runs.append([])  # a segment between the two may not be sealed
            behind = end
            live, is_damaged = segment.liveness.live_bytes, segment.liveness.is_damaged or segment.doubtful
            if live is None or live >= segment.used // 4 or is_damaged or segment.first == held:
                runs.append([])
                continue
            if len(runs[-1]) == _RUN or (runs[-1] and _result([*runs[-1], segment]) > limits.SEGMENT_BYTES):
                runs.append([])
            runs[-1].append(segment)
        return [run for run in runs if run and 4 * _result(run) < 3 * sum(segment.used for segment in run)]


def _result(run: list[Segment]) -> int:
    """Return the bytes of the segment that would replace the run."""
    return sum(segment.liveness.live_bytes or 0 for segment in run) + _metadata_bytes(run[-1])


def _metadata_bytes(segment: Segment) -> int:
    """Estimate the bytes of the segment's records that are no messages."""
    cache = segment.liveness
    if not cache.metadata_bytes:
        index = segment.load()
        cache.metadata_bytes = weight(index.others if isinstance(index, SealedIndex) else segment.rows().packed)
    return cache.metadata_bytes


class CompactionJob:
    """The replacement of one run by one segment."""

    def __init__(
        self, chain: Chain, commit: GroupCommit, liveness: Liveness, removal: SegmentRemoval, run: list[Segment]
    ) -> None:
        self.chain, self.commit, self.liveness, self.removal, self.run = chain, commit, liveness, removal, run
        self.disk = chain.disk
        self.staged = f"{chain.context.staging}/{chain.group}-{run[0].first:020d}.compact"
        self.fd = -1
        self.written = 0  # bytes in the file
        self.buffer: list[bytes] = []
        self.buffered = 0
        self.index, self.others = OpenIndex(), NonMessageRecords()
        self.last_end = -1  # where the last copied record ended in its old segment
        self.held: tuple[Row, bytes, bytes] | None = None  # that record, until it is known whether its batch continues
        self.missing = 2  # syncs to wait for: of the new file, and of the bucket
        self.error: OSError | None = None

    def work(self) -> Work:
        self.fd = self.disk.open(self.staged, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            with removed_on_error(self.disk, self.staged, self.staged + ".idx"):
                try:
                    yield from self._copy()
                    yield from self._sync()
                finally:
                    self.chain.context.committer.cancel(self)  # its job makes the index
                self.removal.replace(self.run, self.written, self._put_in_place)
        finally:
            self.disk.close(self.fd)

    def _copy(self) -> Work:
        last = self.run[-1]
        rows = last.rows()
        for row in rows:
            if row.position >= last.head:
                break
            self._keep(last, row)
        ends = {segment.first: end for segment, end in self.chain.sealed()}
        for segment in self.run:
            others = (row for row in rows if row.position >= last.head) if segment is last else iter(())
            self.last_end = -1
            live = self._live(segment, ends[segment.first])
            for number, row in enumerate(merge(live, others, key=attrgetter("position"))):
                self._keep(segment, row)
                if number % _PORTION == _PORTION - 1:
                    yield False
        self._release(False)
        self._record_unused(last, ends[last.first])
        self._flush()

    def _record_unused(self, last: Segment, end: int) -> None:
        """Append a record as `Appender` does at a roll: the message before `end` may be left out."""
        changes = (self.others[number].sequence for number in range(len(self.others))[-1:])
        kept = max([0, *changes, *self.index.sequences[-1:]])
        if kept < end - 1 <= last_sequence(last):
            body = reserve_body(end)
            self.held = Row(end - 1, last.last_ns(), 0, len(body), 0, 0, int(Kind.CHANGE), 0), b"", body
            self._release(False)

    def _live(self, segment: Segment, end: int) -> Iterator[Row]:
        index: Index = segment.load()
        for ordinal, sequence in enumerate(index.sequences):
            if sequence >= end:
                return
            if self.liveness.is_live(index.streams[ordinal], sequence):
                yield _row(index, ordinal)

    def _keep(self, segment: Segment, row: Row) -> None:
        """Hold one record for copying, and fix MORE and INNER of a batch that is only partly retained."""
        data = segment.read(row.position, row.size)
        record = decode(data)
        if record is None and row.kind > Kind.END:
            segment.liveness.is_damaged = True  # not to be compacted: a copy would hide the damage
            raise errors.DiskFailed(f"{segment.path}: damaged record at {row.position}")
        if record is None:
            self.chain.context.quarantine.copy(self.chain.group, segment.first, row.position, data, "a damaged record")
            return
        joins = row.position == self.last_end and bool(record.flags & INNER)
        self._release(joins)
        flags = record.flags if joins else record.flags & ~INNER
        self.held = (row._replace(time_ns=record.time_ns, flags=flags), record.headers, record.body)
        self.last_end = row.position + padded(row.size)

    def _release(self, joined: bool) -> None:
        if self.held is None:
            return
        row, headers, body = self.held
        self.held = None
        if not joined:
            row = row._replace(flags=row.flags & ~MORE)
        row = row._replace(position=self.written + self.buffered)
        data = encode(row.sequence, row.time_ns, row.stream, row.kind, row.flags, headers, body)
        if row.kind <= Kind.END:
            self.index.append(row)
        else:
            self.others.append(row)
        self.buffer.append(data)
        self.buffered += len(data)
        if self.buffered >= _BUFFER:
            self._flush()

    def _flush(self) -> None:
        data = b"".join(self.buffer)
        write_all(self.disk, self.fd, data, self.written)
        self.written += len(data)
        self.buffer, self.buffered = [], 0

    def _sync(self) -> Work:
        self.index.collect()
        last_ns = self.run[-1].last_ns()
        identity = int.from_bytes(self.disk.pread(self.fd, 8, 0)[4:], "little")
        data = encode_part(
            self.index, self.others.packed, 0, len(self.index), 0, self.written, identity, SEALED, last_ns
        )

        def sync() -> None:
            self.disk.fdatasync(self.fd)
            write_file(self.disk, self.staged + ".idx", data)

        self.chain.context.committer.request(self, sync, self._done, 0.0)
        self.commit.sync(self._done)  # the changes that made messages unwanted, before these are removed
        while self.missing:
            yield True
        if self.error is not None:
            raise self.error

    def _done(self, error: OSError | None) -> None:
        self.missing -= 1
        self.error = self.error or error

    def _put_in_place(self) -> None:
        first = self.run[0]
        self.disk.rename(self.staged, first.path)
        with contextlib.suppress(OSError), removed_on_error(self.disk, first.idx.path):  # the old index does not fit
            self.disk.rename(self.staged + ".idx", first.idx.path)  # else the next start does it


def put_index_in_place(disk: Disk, staged: str, log_path: str) -> bool:
    """Give a compacted log the index that a kill left staged. Returns whether the staged file is of no use, because it
    belongs to another log. If the disk fails the file stays for the next start, and the index is made from the log."""
    try:
        if not disk.exists(log_path):
            return True
        index = IndexFile(disk, staged, "")
        with opened(disk, log_path) as fd:
            index.read(lambda count: read_all(disk, fd, count, 0), disk.size(fd), NonMessageRecords())
        if index.is_sealed:
            disk.rename(staged, f"{log_path.removesuffix('.log')}.idx")
        return not index.is_sealed
    except OSError as error:
        log.warning("%s stays until the next start: %s", staged, error)
        return False


def _row(index: Index, ordinal: int) -> Row:
    return Row(
        index.sequences[ordinal],
        index.times[ordinal],
        index.positions[ordinal],
        index.bodies[ordinal],
        index.streams[ordinal],
        index.headers[ordinal],
        index.kinds[ordinal],
        0,
    )
