"""One segment of a log: its bytes, and what is known of the records in them.

    only a name   nothing was read; `look` reads the heads of its index, or scans the log
    open          index and rows in memory, or on disk as parts and in `_tail` what no part has; `used` <= `allocated`
    sealed        whole and on disk: descriptor and index may be given up at any time (Descriptors)

An index that does not fit is made again from the log. It is not saved if it would hide damage to more than a message.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

from mqfs import errors, limits
from mqfs.model import MORE, NEVER
from mqfs.records.record import last_byte, padded
from mqfs.store.disk import Disk, read_all, write_all
from mqfs.store.segment.index import (
    SEALED,
    Index,
    IndexFile,
    NonMessageRecords,
    OpenIndex,
    columns_pass,
    encode_part,
    load_part,
)
from mqfs.store.segment.liveness import LivenessCache
from mqfs.store.segment.recovery import RecoveryScan, scan_segment

_LOOKED_AT = 64  # segments checked before one is closed where another is opened: some 0.05 ms
_RESTED = 256  # segments checked in one tick: some 0.1 ms

Aside = Callable[["Segment", int, bytes, str], None]  # copies bytes of a log that failed a check to quarantine/
Rebuilt = tuple[OpenIndex, NonMessageRecords]

log = logging.getLogger("mqfs.store")


class Segment:
    """The segment that begins with sequence `first`. `fd` is -1 while it is not open."""

    __slots__ = (
        "_aside", "_descriptors", "_disk", "_foreign", "_group", "_reported", "_started", "_summary", "_tail",
        "_tail_others", "allocated", "damaged_head", "doubtful", "fd", "first", "head", "idx", "index",
        "listed", "liveness", "may_close_fd", "others", "path", "recent", "room", "sealed", "used",
    )  # fmt: skip

    def __init__(
        self, disk: Disk, descriptors: Descriptors, folder: str, staging: str, group: int, first: int, aside: Aside
    ) -> None:
        self._disk, self._descriptors, self._group, self._aside, self.first = disk, descriptors, group, aside, first
        self.path = f"{folder}/{first:020d}.log"
        self.idx = IndexFile(disk, f"{folder}/{first:020d}.idx", f"{staging}/{group}-{first:020d}.idx")
        self.fd = -1
        self.listed = 0  # its descriptors that are counted (Descriptors); 0: the segment is not listed
        self.recent = False
        self.may_close_fd: Callable[[Segment, bool], bool] = lambda segment, at_once: True
        self.used = self.allocated = self.room = self.head = 0
        self.sealed = False
        self.index: Index | None = None
        self.others: NonMessageRecords | None = None  # the records that are no messages
        self.liveness = LivenessCache()
        self._started = False  # whether the log was read; before, only its name is known
        self._foreign = ""  # why it is not the segment that its name says
        self._tail = OpenIndex()  # messages that no part on disk has, while `index` is not loaded
        self._tail_others = NonMessageRecords()  # the same of other records, while `others` is not
        self._reported: set[int] = set()  # positions already counted and copied
        self.doubtful, self.damaged_head = set[int](), 0  # results of scans: see `RecoveryScan`
        self._summary: tuple[int, int, int] = (0, 0, 0)  # of a sealed segment: messages, first and last sequence

    # ------------------------------------------------------------ descriptors

    def open(self) -> int:
        """Open the segment if needed, and return its descriptor. Raises DiskFailed."""
        self.recent = True
        if self.fd < 0:
            with self._failing():
                self.fd = self._disk.open(self.path, os.O_RDWR)
            self._list()
        return self.fd

    def begin(self, fd: int, head: int, others: NonMessageRecords) -> None:
        """Begin with a file that was just made, has that descriptor and `head` bytes of head."""
        self.index, self.others, self._started = OpenIndex(), others, True
        self.used = self.allocated = self.head = head
        self.fd = fd
        self._list()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Turn OSError into DiskFailed: a segment that cannot be read now is not an empty one."""
        try:
            yield
        except OSError as error:
            raise errors.DiskFailed(f"segment {self.first} of group {self._group}: {error.strerror}") from error

    def _list(self) -> None:
        if not self.listed:
            self._descriptors.opened(self)

    def close_idle(self) -> None:
        """Close the descriptor, and drop the caches."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            self._disk.close(fd)
        self.drop_index_cache()

    def drop_index_cache(self) -> None:
        """Drop the index in memory, except rows that are not on disk."""
        messages, others = self.idx.count()
        if isinstance(self.index, OpenIndex) and not self.sealed:
            self._tail = self.index.behind(messages)
        self.index = None
        if self.others is not None and not self.sealed:
            self._tail_others = NonMessageRecords(self.others.between(others, len(self.others)), self.others.last_ns)
        self.others = None

    @property
    def is_idle(self) -> bool:
        """Whether the segment has no descriptor and nothing in memory."""
        return self.fd < 0 and self.index is None and self.others is None

    # ------------------------------------------------------------ reading

    def read(self, position: int, size: int) -> bytes:
        """Read bytes of the log. Raises DiskFailed."""
        with self._failing():
            return self._disk.pread(self.fd if self.fd >= 0 else self.open(), size, position)

    def load(self) -> Index:
        """Return the index, from its file or, if that is wrong, from the log. Raises DiskFailed."""
        self.recent = True
        self.look()
        if self.index is None:
            with self._failing():
                self.index = self._load_sealed() if self.sealed else self._load_open()
            self._list()
        return self.index

    def _load_sealed(self) -> Index:
        index = self.idx.sealed_index()
        return self._rebuild_synced()[0] if index is None else index

    def _load_open(self) -> Index:
        index, data = OpenIndex(), self.idx.load()
        for part in self.idx.parts:
            if columns_pass(data, part):
                load_part(index, data, part)
            else:
                self._scan(part.start, part.to, index, NonMessageRecords())
        index.extend(self._tail)
        index.collect()
        self._tail = OpenIndex()
        return index

    def _scan(self, start: int, end: int, index: OpenIndex, others: NonMessageRecords) -> None:
        """Index a range of the log whose part of the index is damaged."""
        self._report(scan_segment(self._read_all(start, end), start, index, others, covered=NEVER))

    def _read_all(self, start: int, end: int) -> bytes:
        return read_all(self._disk, self.open(), end - start, start)

    def look(self) -> None:
        """Read the heads of the index, or scan the log, unless that was done. Raises DiskFailed."""
        if self._foreign:
            raise errors.DiskFailed(self._foreign)
        if not self._started:
            with self._failing():
                self.start(newest=False)

    def rows(self) -> NonMessageRecords:
        """Return the records that are no messages. Raises DiskFailed."""
        self.look()
        if self.others is None:
            with self._failing():
                self.others = self._sealed_rows() if self.sealed else self._open_rows()
            self._list()
        return self.others

    def _sealed_rows(self) -> NonMessageRecords:
        (rows,) = self.idx.rows()
        return self._rebuild_synced()[1] if rows is None else NonMessageRecords(rows, self.idx.parts[0].last_ns)

    def _open_rows(self) -> NonMessageRecords:
        others = NonMessageRecords()
        for part, rows in zip(self.idx.parts, self.idx.rows(), strict=True):
            if rows is not None:
                others.packed += rows
            else:
                self._scan(part.start, part.to, OpenIndex(), others)
        others.packed += self._tail_others.packed
        others.last_ns = self.last_ns()
        self._tail_others = NonMessageRecords()
        return others

    def count_others(self) -> int:
        """Return the number of records that are no messages."""
        if self.others is not None:
            return len(self.others)
        return self.idx.count()[1] + len(self._tail_others)

    # ------------------------------------------------------------ recovery

    def start(self, *, newest: bool, only: bool = False) -> bool:
        """Read the heads of the index, or scan the log. Returns whether it holds any whole record. Of the newest
        segment a torn tail is cut. `only`: the group's only segment, which was on disk before it got its name."""
        fd = self.open()
        size = self._disk.size(fd)
        others = NonMessageRecords()
        self._read_index_heads(size, others)
        if self.idx.is_sealed:
            self.sealed = True
            self._descriptors.recount(self)
            self.used = self.allocated = size
            part = self.idx.parts[0]
            self._summary = (part.messages, part.first, part.last)
        elif not newest:
            _, others = self._rebuild_synced()
        elif not self._recover_tail(fd, size, others, only):
            return False
        self._started = True
        self._set_head(others)
        self._check_name(others)
        return True

    def _recover_tail(self, fd: int, size: int, others: NonMessageRecords, only: bool) -> bool:
        covered = self.idx.covered
        last = max((part.last for part in self.idx.parts), default=-1)
        data = self._read_all(covered, size)
        scan = scan_segment(data, covered, self._tail, others, covered=covered, tail=True, low=last)
        if scan.end == 0 and only:
            scan = scan_segment(data, 0, self._tail, others, covered=padded(last_byte(data)) + 1)
        if scan.end == 0:
            return False
        self._report(scan)
        self._cut(fd, scan, size)
        self.others = others
        return True

    def _check_name(self, others: NonMessageRecords) -> None:
        """Raise DiskFailed if it holds lower sequences than its name says: served, it would hide messages of another
        segment."""
        messages, first, _ = self.counts()
        least = min([self.first, *(row.sequence + 1 for row in islice(others, 1)), *([first] if messages else [])])
        if least < self.first:
            self._foreign = f"segment {self.first} of group {self._group}: it holds {least} (run mqfs check --fix)"
            raise errors.DiskFailed(self._foreign)

    def looks_sealed(self) -> bool:
        """Whether it has a whole index, which is written only after the segment was synced."""
        if not self._started:
            self._read_index_heads(self._disk.size(self.open()), NonMessageRecords())
        return self.idx.is_sealed

    def write_again(self) -> None:
        """Write again the bytes that the index does not cover. A killed server may have left them in the page cache; if
        its sync failed, the system takes those pages for clean, and no later sync would write them."""
        start = self.idx.covered if self._started else 0
        fd = self.open()
        for at in range(start, self.used, limits.UNIT_PIECE_BYTES):
            write_all(self._disk, fd, read_all(self._disk, fd, min(limits.UNIT_PIECE_BYTES, self.used - at), at), at)

    def _set_head(self, others: NonMessageRecords) -> None:
        """Find the end of the state at the beginning of the segment."""
        self.head = 0
        for row in others:
            if row.position != self.head:
                break
            self.head = row.position + padded(row.size)
            if not row.flags & MORE:
                break

    def _cut(self, fd: int, scan: RecoveryScan, size: int) -> None:
        self.used = scan.end
        self.allocated = max(size, scan.end)
        if scan.end > size:
            self._disk.truncate(fd, scan.end)  # only the padding of its last record is missing
        if scan.written > scan.end:
            self._aside(self, scan.end, self._read_all(scan.end, scan.written), "a torn tail")
            self._disk.truncate(fd, scan.end)
            self._disk.fdatasync(fd)
            self.allocated = scan.end

    def _report(self, scan: RecoveryScan) -> None:
        self.doubtful |= scan.doubtful
        self.damaged_head = max(self.damaged_head, scan.head)
        for start, end in scan.bad:
            self.report_corruption(start, self._read_all(start, end))

    def report_corruption(self, position: int, data: bytes) -> None:
        """Copy bytes that failed their check to quarantine/, and count them, once for each position."""
        if position not in self._reported:
            self._reported.add(position)
            try:
                self._aside(self, position, data, "a damaged record")
            except OSError as error:
                log.warning("group %d: bytes at %d of %s were not copied: %s", self._group, position, self.path, error)

    def _read_index_heads(self, size: int, others: NonMessageRecords) -> None:
        if self.idx.read(lambda count: read_all(self._disk, self.open(), count, 0), size, others):
            self._aside(self, size, b"", "a missing end")  # it was on disk when the index was written

    def _identity(self) -> int:
        parts = self.idx.parts
        return parts[0].identity if parts else int.from_bytes(self._disk.pread(self.open(), 8, 0)[4:], "little")

    def _rebuild_synced(self) -> Rebuilt:
        """Index the log as `_rebuild` does, and save the index only after a sync: a whole index says that its log is on
        disk."""
        try:
            self._disk.fdatasync(self.open())
        except OSError as error:
            log.warning("group %d: %s was not synced: %s", self._group, self.path, error)
            return self._rebuild(save=False)
        return self._rebuild(save=True)

    def _rebuild(self, *, save: bool) -> Rebuilt:
        """Index a log that is not appended to, from its records."""
        size = self._disk.size(self.open())
        index, others = OpenIndex(), NonMessageRecords()
        data = self._read_all(0, size)
        scan = scan_segment(data, 0, index, others, covered=self.idx.covered)
        for start, end in scan.torn:
            self._aside(self, start, data[start:end], "a torn tail")
        self._report(scan)
        if scan.written > scan.end and not scan.bad and not scan.torn:
            why = "a torn tail" if scan.end >= self.idx.covered else "a damaged record"
            self._aside(self, scan.end, data[scan.end : scan.written], why)  # a batch without its end
        index.collect()
        self.used, self.others, self._started = size, others, True
        # The index of a doubtful log is not saved: it would hide what is missing. The index of a torn log is synced,
        # because from then on only the index says that bytes are torn. If only a part of it were on disk, they would
        # count as damage, and the rest of their batch as messages.
        is_torn = bool(scan.torn) or scan.end < size
        self._write_index(index, others, save=save and not scan.doubtful, sync=is_torn)
        return index, others

    # ------------------------------------------------------------ writing

    def grow(self, need: int) -> None:
        """Allocate at least `need` more bytes. Raises OSError, if there is no room."""
        end = self.used + need
        if end <= self.allocated:
            return
        wish = max(limits.SEGMENT_FIRST_BYTES, min(2 * self.allocated, limits.SEGMENT_BYTES), end)
        try:
            self._disk.allocate_whole(self.open(), self.allocated, wish - self.allocated)
        except OSError:
            if wish == end:
                raise
            wish = end
            self._disk.allocate_whole(self.open(), self.allocated, wish - self.allocated)
        self.allocated = wish

    def shrink(self) -> None:
        """Give back bytes that are allocated and not used."""
        if self.allocated > self.used:
            self._disk.truncate(self.open(), self.used)
            self.allocated = self.used

    def extend(self, to: int, messages: int, others: int, last_ns: int, flags: int = 0) -> None:
        """Add a part to the .idx for the synced log up to `to`, whose records count `messages` and `others`. Best
        effort: after an error the index is rebuilt at the next start."""
        start = self.idx.covered
        if to <= start or self.sealed:
            return
        index = self.load()
        assert isinstance(index, OpenIndex)
        begin, had = self.idx.count()
        rows = self.rows().between(had, others)
        with contextlib.suppress(OSError):
            self.idx.append(
                encode_part(index, rows, begin, messages - begin, start, to, self._identity(), flags, last_ns)
            )

    def seal(self) -> None:
        """Write the whole index of a segment that is complete and on disk, and use it from now on."""
        index = self.load()
        assert isinstance(index, OpenIndex)
        self._write_index(index, self.rows(), save=not self.doubtful)

    def _write_index(self, index: OpenIndex, others: NonMessageRecords, *, save: bool, sync: bool = False) -> None:
        self._summary = (len(index), index.sequences[0], index.sequences[-1]) if len(index) else (0, 0, 0)
        data = encode_part(index, others.packed, 0, len(index), 0, self.used, self._identity(), SEALED, self.last_ns())
        self.idx.replace_parts(data)
        self.sealed, self.index = True, index
        self._descriptors.recount(self)
        self.liveness.cursor = 0  # the order of its streams changes
        self._set_head(others)
        # Best effort: the index in memory works as well, but is larger, and is made again at the next start.
        with contextlib.suppress(OSError):
            if save:
                self.idx.save(data, sync=sync)
                self.index = self.others = None

    def counts(self) -> tuple[int, int, int]:
        """Return the number of messages, and the sequences of the first and the last; (0, 0, 0) if there are none."""
        if self.sealed:
            return self._summary
        if isinstance(self.index, OpenIndex):
            sequences = self.index.sequences
            return (len(sequences), sequences[0], sequences[-1]) if sequences else (0, 0, 0)
        parts = [part for part in self.idx.parts if part.messages]
        messages = sum(part.messages for part in parts) + len(self._tail)
        ends = [s for part in parts for s in (part.first, part.last)] + list(self._tail.sequences)
        return (messages, ends[0], ends[-1]) if messages else (0, 0, 0)

    def last_ns(self) -> int:
        """Return the time of the newest record."""
        newest = (
            [part.last_ns for part in self.idx.parts[-1:]] + list(self._tail.times[-1:]) + [self._tail_others.last_ns]
        )
        newest += [self.others.last_ns] if self.others is not None else []
        if self.index is not None and len(self.index.times):
            newest.append(self.index.times[-1])
        return max(newest, default=0)


# ------------------------------------------------------------ descriptors


class Descriptors:
    """The segments that have descriptors: about limits.OPEN_BUCKETS, closed by second chance. There are more while logs
    are synced before some of these may be closed, up to half of what the process may open."""

    __slots__ = ("_count", "_most", "_open")

    def __init__(self) -> None:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = NEVER if most == resource.RLIM_INFINITY else most // 2
        self._open: deque[Segment] = deque()
        self._count = 0  # sum of their `listed`

    def opened(self, segment: Segment) -> None:
        self._open.append(segment)
        self._list(segment, 1 + segment.sealed)  # a sealed one has a descriptor for its index too
        for _ in range(min(2 * len(self._open), _LOOKED_AT)):
            if self._count <= limits.OPEN_BUCKETS:
                return
            self._look_at(self._open.popleft(), segment)

    def recount(self, segment: Segment) -> None:
        """Count the descriptors of a segment that was sealed."""
        if segment.listed:
            self._list(segment, 2)

    def _list(self, segment: Segment, descriptors: int) -> None:
        self._count += descriptors - segment.listed
        segment.listed = descriptors

    def rest(self) -> None:
        """Drop the indexes of sealed segments that were not used since the last round, and delist segments that hold
        nothing more, such as removed ones: some at a time."""
        for _ in range(min(len(self._open), _RESTED)):
            segment = self._open.popleft()
            if segment.is_idle:
                self._list(segment, 0)
                continue
            self._open.append(segment)
            if segment.sealed and not segment.recent and not isinstance(segment.index, OpenIndex):
                segment.drop_index_cache()  # an OpenIndex may not be on disk
            segment.recent = segment.recent and not segment.sealed

    def _look_at(self, segment: Segment, newest: Segment) -> None:
        """Close a segment, or give it a second chance if it was used since the last round."""
        if segment.is_idle:
            self._list(segment, 0)
        elif segment is newest or segment.recent or not segment.may_close_fd(segment, self._count > self._most):
            segment.recent = False
            self._open.append(segment)
        else:
            segment.close_idle()
            self._list(segment, 0)
