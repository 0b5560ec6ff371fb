"""One file of a bucket: its bytes, its index, and what a start makes of it.

Owns the file, what was preallocated, the parts of the index on disk, and the descriptor, which it may give up when too
many are open. Never decides what is kept.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator

import attrs

from mqfs import errors, limits
from mqfs.log import batch
from mqfs.log.record import INNER, MORE, SETTLED, Row, last_byte, next_good, padded, row_at, skim
from mqfs.model import Kind
from mqfs.store.disk import Disk, read_all, read_file, write_all, write_file
from mqfs.store.segment import index as idx
from mqfs.store.segment.index import OTHER_SIZE, Index, IndexPart, NonMessageRecords, OpenIndex, SealedIndex

Aside = Callable[["Segment", int, bytes, str], None]  # copy bytes of a log, which failed a check, to quarantine/

log = logging.getLogger("mqfs.store")

_PART_GUESS = 4_096  # of a part, read first: its head and the rows of most


@attrs.define
class RecoveryScan:
    """What was found in a stretch of a log."""

    end: int = 0  # behind the last whole unit
    written: int = 0  # behind the last byte that is not zero
    bad: list[tuple[int, int]] = attrs.Factory(list)  # stretches that failed


def scan_segment(data: bytes, base: int, index: OpenIndex, others: NonMessageRecords, *, tail: bool) -> RecoveryScan:
    """Add the whole units in `data`, which lies at `base` of its log, to `index` and `others`.

    With `tail`, what is behind the first bad place is given up unless a later record says that it was settled; without,
    every bad place is passed over.
    """
    found = RecoveryScan(base, base + last_byte(data))
    limit = found.written - base
    at = 0
    unit: list[Row] = []
    doubt: tuple[int, int, int, int, int] | None = None  # where to cut back to, if nothing settled follows
    while at < limit:
        if not unit and doubt is None:
            at = skim(data, at, base, index, others.add)
            found.end = base + at
            if at >= limit:
                break
            whole = batch.scan_batch(data, at, base)
            if whole is not None:
                index.take(whole.columns)
                others.take(whole.others, whole.last_ns)
                at = whole.end
                found.end = base + at
                continue
        row = row_at(data, at, base)
        if row is None:
            if tail and doubt is None:
                doubt = (found.end, len(index), len(others), others.last_ns, len(found.bad))
            good = next_good(data, at)
            found.bad.append((base + at, base + good if good >= 0 else found.written))
            unit = []
            if good < 0:
                break
            at = good
            continue
        at += padded(row.size)
        if row.flags & SETTLED:
            doubt = None
        if row.flags & INNER and not unit:
            continue  # the beginning of its unit is lost
        if not row.flags & INNER:
            unit = []
        unit.append(row)
        if not row.flags & MORE:
            _add(unit, index, others)
            unit, found.end = [], base + at
    if doubt is not None:
        found.end, messages, rows, last_ns, bad = doubt
        index.cut(messages)
        others.cut(rows, last_ns)
        del found.bad[bad:]
    return found


def torn(data: bytes, covered: int, bad: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Of the bad stretches of a log, those that a stop left: behind `covered`, what is known to have been on disk, and
    before no record that says so of what is before it."""
    if not bad:
        return []
    sure = scan_segment(data[covered:], covered, OpenIndex(), NonMessageRecords(), tail=True).bad
    return [stretch for stretch in bad if stretch[0] >= covered and stretch not in sure]


def _add(unit: list[Row], index: OpenIndex, others: NonMessageRecords) -> None:
    for row in unit:
        if row.kind <= Kind.END:
            index.append(row)
        else:
            others.append(row)


class Files:
    """Which segments have descriptors: not more than limits.OPEN_BUCKETS, the ones not used lately given up first."""

    def __init__(self) -> None:
        self._open: deque[Segment] = deque()

    def opened(self, segment: Segment) -> None:
        self._open.append(segment)
        for _ in range(2 * len(self._open)):
            # A sealed one has a descriptor for its index too.
            if (
                2 * len(self._open) <= limits.OPEN_BUCKETS
                or sum(1 + s.sealed for s in self._open) <= limits.OPEN_BUCKETS
            ):
                return
            self._look_at(self._open.popleft(), segment)

    def _look_at(self, segment: Segment, newest: Segment) -> None:
        """Second chance: one that was used since it was last looked at stays, once."""
        if segment.fd < 0 and segment.index is None and segment.others is None:
            segment.listed = False
        elif segment is newest or segment.recent or not segment.may_close_fd(segment):
            segment.recent = False
            self._open.append(segment)
        else:
            segment.close_idle()
            segment.listed = False


class Segment:
    """The segment that begins with sequence `first`. `fd` is -1 while it is not open."""

    __slots__ = (
        "allocated",
        "aside",
        "checked",
        "cursor",
        "dense_until",
        "disk",
        "fd",
        "files",
        "first",
        "folder",
        "foreign",
        "group",
        "head",
        "idx_path",
        "idx_size",
        "index",
        "listed",
        "live_bytes",
        "live_hint",
        "may_close_fd",
        "metadata_bytes",
        "others",
        "parts",
        "path",
        "recent",
        "room",
        "rotten",
        "sealed",
        "staging",
        "started",
        "summary",
        "tail",
        "tail_others",
        "used",
    )

    def __init__(
        self, disk: Disk, files: Files, folder: str, staging: str, group: int, first: int, aside: Aside
    ) -> None:
        self.disk, self.files, self.folder, self.staging, self.group, self.first = (
            disk,
            files,
            folder,
            staging,
            group,
            first,
        )
        self.aside = aside
        self.path = f"{folder}/{first:020d}.log"
        self.idx_path = f"{folder}/{first:020d}.idx"
        self.fd = -1
        self.listed = self.recent = False
        self.may_close_fd: Callable[[Segment], bool] = lambda segment: True  # whether its descriptor may be closed
        self.used = self.allocated = self.room = self.head = 0
        self.sealed = False
        self.foreign = ""  # why it is not the segment its name says
        self.checked = False  # the columns on disk passed their CRC once
        self.parts: list[IndexPart] = []
        self.idx_size = 0
        self.started = False  # whether it was looked at: before that only its name is known
        self.index: Index | None = None
        self.others: NonMessageRecords | None = None  # the records that are no messages
        self.tail = OpenIndex()  # what the parts on disk do not hold, while `index` is not loaded
        self.tail_others = NonMessageRecords()  # and the same while `others` is not
        self.rotten: set[int] = set()  # positions already counted and copied
        self.summary: tuple[int, int, int] = (0, 0, 0)  # messages, first and last sequence; of a sealed one
        self.live_hint = (0, -1)  # a stream, and its last message here that was wanted when last looked
        self.cursor = 0  # streams before it have nothing wanted here
        self.live_bytes: int | None = None  # wanted bytes when last counted
        self.dense_until: dict[int, int] | None = (
            None  # streams and sequences: while all from there on are wanted, it stays
        )
        self.metadata_bytes = 0  # bytes of its records that are no messages; 0: not added up yet

    # ------------------------------------------------------------ descriptors

    def open(self) -> int:
        """The descriptor. Raises DiskFailed."""
        self.recent = True
        if self.fd < 0:
            with self._failing():
                self.fd = self.disk.open(self.path, os.O_RDWR)
            self._list()
        return self.fd

    def take_up(self, fd: int) -> None:
        """It was just made, with that descriptor."""
        self.fd = fd
        self._list()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """A segment that cannot be read now is not one that holds nothing: whoever asks is refused."""
        try:
            yield
        except OSError as error:
            raise errors.DiskFailed(f"segment {self.first} of group {self.group}: {error.strerror}") from error

    def _list(self) -> None:
        if not self.listed:
            self.listed = True
            self.files.opened(self)

    def close_idle(self) -> None:
        """Give up the descriptor and what is in memory."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            self.disk.close(fd)
        self.drop_index_cache()

    def drop_index_cache(self) -> None:
        """Give up the index in memory, but for what is not on disk."""
        if isinstance(self.index, OpenIndex) and not self.sealed:
            self.tail = self.index.behind(sum(part.messages for part in self.parts))
        self.index = None
        if self.others is not None and not self.sealed:
            had = sum(part.others for part in self.parts)
            self.tail_others = NonMessageRecords(self.others.between(had, len(self.others)), self.others.last_ns)
        self.others = None

    @property
    def covered(self) -> int:
        """How far the index on disk reaches."""
        return self.parts[-1].to if self.parts else 0

    # ------------------------------------------------------------ reading

    def read(self, position: int, size: int) -> bytes:
        """Bytes of the log. Raises DiskFailed."""
        with self._failing():
            return self.disk.pread(self.fd if self.fd >= 0 else self.open(), size, position)

    def load(self) -> Index:
        """The index, from the file or, where that is wrong, from the log. Raises DiskFailed."""
        self.recent = True
        self.look()
        if self.index is None:
            with self._failing():
                self.index = self._load_sealed() if self.sealed else self._load_open()
            self._list()
        return self.index

    def _load_sealed(self) -> Index:
        try:
            data = self.disk.view(self.idx_path)
            if self.checked or idx.columns_pass(data, self.parts[0]):
                self.checked = True
                return SealedIndex(data, self.parts[0])
        except OSError:
            pass
        return self._rebuild(save=self._is_synced(self.open()))[0]

    def _load_open(self) -> Index:
        index = OpenIndex()
        try:
            data = read_file(self.disk, self.idx_path) if self.parts else b""
        except OSError:
            data = b""
        for part in self.parts:
            if idx.columns_pass(data, part):
                idx.load_part(index, data, part)
            else:
                stretch = read_all(self.disk, self.open(), part.to - part.start, part.start)
                self._report(scan_segment(stretch, part.start, index, NonMessageRecords(), tail=False))
        index.extend(self.tail)
        index.collect()
        self.tail = OpenIndex()
        return index

    def look(self) -> None:
        """Find out what the log holds, if that is not known. Raises DiskFailed."""
        if self.foreign:
            raise errors.DiskFailed(self.foreign)
        if not self.started:
            with self._failing():
                self.start(newest=False)

    def rows(self) -> NonMessageRecords:
        """The records that are no messages. Raises DiskFailed."""
        self.look()
        others = self.others
        if others is None:
            with self._failing():
                others = self.others = self._sealed_rows() if self.sealed else self._open_rows()
            self._list()
        return others

    def weigh(self) -> int:
        """About the bytes that the records that are no messages take in the log; of a sealed one."""
        if not self.metadata_bytes:
            index = self.load()
            self.metadata_bytes = idx.weight(index.others if isinstance(index, SealedIndex) else self.rows().packed)
        return self.metadata_bytes

    def _sealed_rows(self) -> NonMessageRecords:
        try:
            data = self._read_from_idx(self.parts)
        except OSError:
            data = [None]
        if data[0] is None:
            return self._rebuild(save=self._is_synced(self.open()))[1]
        return NonMessageRecords(data[0], self.parts[0].last_ns)

    def _open_rows(self) -> NonMessageRecords:
        others = NonMessageRecords()
        try:
            data = self._read_from_idx(self.parts)
        except OSError:
            data = [None] * len(self.parts)
        for part, rows in zip(self.parts, data, strict=True):
            if rows is not None:
                others.packed += rows
            else:
                stretch = read_all(self.disk, self.open(), part.to - part.start, part.start)
                self._report(scan_segment(stretch, part.start, OpenIndex(), others, tail=False))
        others.packed += self.tail_others.packed
        others.last_ns = self.last_ns()
        self.tail_others = NonMessageRecords()
        return others

    def _read_from_idx(self, parts: list[IndexPart]) -> list[bytes | None]:
        """The rows of each part, where it still is as it was written."""
        fd = self.disk.open(self.idx_path, os.O_RDONLY)
        try:
            found = []
            for part in parts:
                data = read_all(self.disk, fd, idx.HEAD_SIZE + OTHER_SIZE * part.others, part.at)
                there = idx.decode_part(data, 0, part.at)
                found.append(there.rows if there is not None and attrs.evolve(there, rows=b"") == part else None)
            return found
        finally:
            self.disk.close(fd)

    def count_others(self) -> int:
        """How many records are no messages."""
        if self.others is not None:
            return len(self.others)
        return sum(part.others for part in self.parts) + len(self.tail_others)

    # ------------------------------------------------------------ a start

    def start(self, *, newest: bool) -> bool:
        """Find out what the log holds. False: nothing whole is in it."""
        fd = self.open()
        size = self.disk.size(fd)
        others = NonMessageRecords()
        self.parts = self._read_parts(size, others)
        if self.parts and self.parts[0].flags & idx.SEALED:
            self._adopt(self.parts[0], size, others)
            self._prove(others)
            return True
        if not newest:
            self._prove(self._rebuild(save=self._is_synced(fd))[1])
            return True
        data = read_all(self.disk, fd, size - self.covered, self.covered)
        found = scan_segment(data, self.covered, self.tail, others, tail=True)
        if found.end == 0:
            return False
        self._report(found)
        self._cut(fd, found, size)
        self.others, self.started = others, True
        self._set_head(others)
        self._prove(others)
        return True

    def _prove(self, others: NonMessageRecords) -> None:
        """That it is the segment its name says. Raises DiskFailed: served, it would hide another's messages."""
        messages, first, _ = self.counts()
        heads = [others[0].sequence + 1] if len(others) else []
        least = min([self.first, *heads, *([first] if messages else [])])
        if least < self.first:
            self.foreign = f"segment {self.first} of group {self.group}: it holds {least} (run mqfs check --fix)"
            raise errors.DiskFailed(self.foreign)

    def looks_sealed(self) -> bool:
        """Whether it has a whole index, which is written when it is synced."""
        if not self.started:
            self.parts = self._read_parts(self.disk.size(self.open()), NonMessageRecords())
        return bool(self.parts and self.parts[0].flags & idx.SEALED)

    def write_again(self) -> None:
        """What a killed server left in the page cache is ours to sync; and where its sync failed, the system holds
        those pages for clean, so that no sync of ours would reach them."""
        start = self.covered if self.started else 0
        fd = self.open()
        for at in range(start, self.used, limits.UNIT_PIECE_BYTES):
            write_all(self.disk, fd, read_all(self.disk, fd, min(limits.UNIT_PIECE_BYTES, self.used - at), at), at)

    def _adopt(self, part: IndexPart, size: int, others: NonMessageRecords) -> None:
        """It is sealed and its index fits."""
        self.sealed = self.started = True
        self.used = self.allocated = size
        self.summary = (part.messages, part.first, part.last)
        self._set_head(others)

    def _set_head(self, others: NonMessageRecords) -> None:
        """Where the state at the beginning ends."""
        self.head = 0
        for row in others:
            if row.position != self.head:
                break
            self.head = row.position + padded(row.size)
            if not row.flags & MORE:
                break

    def _cut(self, fd: int, found: RecoveryScan, size: int) -> None:
        self.used = found.end
        self.allocated = max(size, found.end)
        if found.end > size:
            self.disk.truncate(fd, found.end)  # only the padding of its last record is missing
        if found.written > found.end:
            torn = read_all(self.disk, fd, found.written - found.end, found.end)
            self.aside(self, found.end, torn, "a torn tail")
            self.disk.truncate(fd, found.end)
            self.disk.fdatasync(fd)
            self.allocated = found.end

    def _report(self, found: RecoveryScan) -> None:
        for start, end in found.bad:
            self.report_corruption(start, read_all(self.disk, self.open(), end - start, start))

    def report_corruption(self, position: int, data: bytes) -> None:
        """Bytes here failed their check: copied and counted once."""
        if position not in self.rotten:
            self.rotten.add(position)
            try:
                self.aside(self, position, data, "a damaged record")
            except OSError as error:
                log.warning("group %d: bytes at %d of %s were not copied: %s", self.group, position, self.path, error)

    def _read_parts(self, size: int, others: NonMessageRecords) -> list[IndexPart]:
        """The heads of the parts that join and fit the log, without their rows, which are added to `others`."""
        self.idx_size = 0
        parts: list[IndexPart] = []
        identity = self._identity()
        try:
            fd = self.disk.open(self.idx_path, os.O_RDONLY)
            try:
                at = 0
                while (part := self._read_part(fd, at)) is not None and self._fits(part, parts, size, identity):
                    parts.append(part)
                    at += part.size
                if part is not None and part.identity == identity and part.to > size:
                    self.aside(self, size, b"", "a missing end")  # it was on disk when the index was written
            finally:
                self.disk.close(fd)
        except OSError:
            return []  # what it says is in the log too
        for part in parts:
            others.take(part.rows, part.last_ns)
        self.idx_size = at
        return [attrs.evolve(part, rows=b"") for part in parts]

    def _read_part(self, fd: int, at: int) -> IndexPart | None:
        data = self.disk.pread(fd, _PART_GUESS, at)
        need = idx.rows_end(data)
        if need > len(data):
            data = read_all(self.disk, fd, min(need, self.disk.size(fd)), at)
        return idx.decode_part(data, 0, at)

    def _fits(self, part: IndexPart, parts: list[IndexPart], size: int, identity: int) -> bool:
        if part.identity != identity or part.start != (parts[-1].to if parts else 0) or part.to > size:
            return False
        if not part.flags & idx.SEALED:
            return not (parts and parts[0].flags & idx.SEALED)
        return not parts and part.to == size

    def _identity(self) -> int:
        return int.from_bytes(self.disk.pread(self.open(), 8, 0)[4:], "little")

    def _is_synced(self, fd: int) -> bool:
        """A whole index says that its log is on disk: so it is had there first."""
        try:
            self.disk.fdatasync(fd)
        except OSError as error:
            log.warning("group %d: %s was not synced: %s", self.group, self.path, error)
            return False
        return True

    def _rebuild(self, *, save: bool) -> tuple[Index, NonMessageRecords]:
        """Index a log that is not appended to, from its records."""
        fd = self.open()
        size = self.disk.size(fd)
        index, others = OpenIndex(), NonMessageRecords()
        data = read_all(self.disk, fd, size, 0)
        found = scan_segment(data, 0, index, others, tail=False)
        for start, end in torn(data, self.covered, found.bad):
            found.bad.remove((start, end))
            self.aside(self, start, data[start:end], "a torn tail")
        self._report(found)
        if found.written > found.end and not found.bad:
            why = "a torn tail" if found.end >= self.covered else "a damaged record"
            self.aside(self, found.end, data[found.end : found.written], why)  # a unit without its end
        index.collect()
        self.used, self.others, self.started = size, others, True
        self.finish(index, save=save)
        return self.index if self.index is not None else index, others

    # ------------------------------------------------------------ writing

    def grow(self, need: int) -> None:
        """Allocate for `need` more bytes at least; OSError where there is no room."""
        end = self.used + need
        if end <= self.allocated:
            return
        wish = max(limits.SEGMENT_FIRST_BYTES, min(2 * self.allocated, limits.SEGMENT_BYTES), end)
        try:
            self.disk.allocate(self.open(), self.allocated, wish - self.allocated)
        except OSError:
            if wish == end:
                raise
            wish = end
            self.disk.allocate(self.open(), self.allocated, wish - self.allocated)
        self.allocated = wish

    def shrink(self) -> None:
        """Give back what was allocated and not used."""
        if self.allocated > self.used:
            self.disk.truncate(self.open(), self.used)
            self.allocated = self.used

    def extend(self, to: int, messages: int, others: int, last_ns: int, flags: int = 0) -> None:
        """Add a part for what is synced: the log up to `to`, in which so many records are. It is only a help: an error
        leaves it away."""
        start = self.covered
        if to <= start or self.sealed:
            return
        index = self.load()
        assert isinstance(index, OpenIndex)
        had = sum(part.messages for part in self.parts), sum(part.others for part in self.parts)
        rows = self.rows().between(had[1], others)
        try:
            data = idx.encode_part(index, rows, had[0], messages - had[0], start, to, self._identity(), flags, last_ns)
            fd = self.disk.open(self.idx_path, os.O_RDWR | os.O_CREAT)
            try:
                write_all(self.disk, fd, data, self.idx_size)
            finally:
                self.disk.close(fd)
        except OSError:
            return
        part = idx.decode_part(data, 0, self.idx_size)
        assert part is not None
        self.parts.append(attrs.evolve(part, rows=b""))
        self.idx_size += len(data)

    def finish(self, index: OpenIndex | None = None, *, save: bool = True) -> None:
        """It is sealed and on disk: write the whole index, and use that from now on."""
        if index is None:
            loaded = self.load()
            assert isinstance(loaded, OpenIndex)
            index = loaded
        others = self.rows()
        ends = (index.sequences[0], index.sequences[-1]) if len(index) else (0, 0)
        self.summary = (len(index), *ends)
        identity, last_ns = self._identity(), self.last_ns()
        data = idx.encode_part(index, others.packed, 0, len(index), 0, self.used, identity, idx.SEALED, last_ns)
        part = idx.decode_part(data)
        assert part is not None
        self.sealed, self.parts, self.checked = True, [attrs.evolve(part, rows=b"")], False
        self.cursor = 0
        self._set_head(others)
        self.index = index
        if not save:
            return
        try:
            made = f"{self.staging}/{self.group}-{self.first:020d}.idx"
            write_file(self.disk, made, data, sync=False)
            self.disk.rename(made, self.idx_path)
            self.index, self.others, self.checked = None, None, True
        except OSError:
            pass  # the one in memory is as good, only larger, and made again at the next start

    def counts(self) -> tuple[int, int, int]:
        """Messages, and the sequences of the first and the last; (0, 0, 0) if there are none."""
        if self.sealed:
            return self.summary
        if isinstance(self.index, OpenIndex):
            sequences = self.index.sequences
            return (len(sequences), sequences[0], sequences[-1]) if sequences else (0, 0, 0)
        parts = [part for part in self.parts if part.messages]
        messages = sum(part.messages for part in parts) + len(self.tail)
        ends = [s for part in parts for s in (part.first, part.last)] + list(self.tail.sequences)
        return (messages, ends[0], ends[-1]) if messages else (0, 0, 0)

    def last_ns(self) -> int:
        """The time of the newest record."""
        newest = [part.last_ns for part in self.parts[-1:]] + list(self.tail.times[-1:]) + [self.tail_others.last_ns]
        newest += [self.others.last_ns] if self.others is not None else []
        if self.index is not None and len(self.index.times):
            newest.append(self.index.times[-1])
        return max(newest, default=0)
