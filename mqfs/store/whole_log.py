"""One segment's log, read whole: what a check looks at.

Owns which bytes of it are damaged and which are a torn tail. Writes nothing.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence

from mqfs.log.record import FLAGS_AT, INNER, Row, checksum, last_byte, padded, with_flags
from mqfs.model import MORE, Kind
from mqfs.store.disk import Disk, read_file
from mqfs.store.history import whole_states
from mqfs.store.segment.index import COLUMNS, NonMessageRecords, OpenIndex, size_of
from mqfs.store.segment.index_file import columns_pass, decode_part, load_part
from mqfs.store.segment.recovery import RecoveryScan, is_reserve, scan_segment


def least_of(index: OpenIndex, others: NonMessageRecords, first: int) -> int:
    """The lowest sequence a log holds: of a message, or the one that its head says it begins with; else `first`."""
    heads = [others[0].sequence + 1] if len(others) else []
    return min([*heads, *index.sequences[:1]], default=first)


class Log:
    """One segment's log, read whole."""

    def __init__(self, disk: Disk, folder: str, name: str, names: Sequence[str]) -> None:
        """`names`: of all segments of the group."""
        newest = name == names[-1]
        self.folder, self.name, self.newest = folder, name, newest
        self._disk = disk
        self.path = f"{folder}/{name}"
        self.first = int(name[:-4])
        self.data = read_file(disk, self.path)
        self.identity = int.from_bytes(self.data[4:8], "little")
        self.index, self.others = OpenIndex(), NonMessageRecords()
        self.listed: dict[int, Row | None] = {}  # where its index says that records are, and those that are no messages
        covered = self.covered = self._covered(disk)
        end = covered if newest else len(self.data)
        self.found: RecoveryScan = self._scan(end, covered)
        if newest and covered < len(self.data):
            self._tail(covered)
        if len(names) == 1 and not self.found.end:
            self.found = self._scan(
                len(self.data), last_byte(self.data)
            )  # the only one was on disk before it got its name
        self.torn = self.found.torn
        self._judge_listed()
        self.doubtful, self.damaged_head = self.found.doubtful, self.found.head

    def _scan(self, end: int, covered: int) -> RecoveryScan:
        return scan_segment(self.data[:end], 0, self.index, self.others, covered=covered)

    def _judge_listed(self) -> None:
        """What the index covers it lists: damage that it does not list was torn before."""
        others = [
            at for at, row in self.listed.items() if row is not None and not is_reserve(row.kind, row.stream, row.body)
        ]
        torn = []
        for start, end in self.found.bad:
            if end > self.covered:
                continue
            self.found.doubtful.discard(start)
            if any(start <= at < end for at in others):
                self.found.doubtful.add(start)
            if not any(start <= at < end for at in self.listed):
                torn.append((start, end))
        if torn:
            self.torn = self.torn + torn
            self.found.bad = [stretch for stretch in self.found.bad if stretch not in torn]
            self.index, self.others = self._listed_only()

    def _listed_only(self) -> tuple[OpenIndex, NonMessageRecords]:
        """Without the rest of a batch that was torn."""
        index, others = OpenIndex(), NonMessageRecords()
        kept = [n for n, at in enumerate(self.index.positions) if at >= self.covered or at in self.listed]
        for name, code in COLUMNS:
            column = getattr(self.index, name)
            getattr(index, name).extend(array(code, [column[n] for n in kept]))
        for row in self.others:
            if row.position >= self.covered or row.position in self.listed:
                others.append(row)
        others.last_ns = self.others.last_ns
        return index, others

    def _covered(self, disk: Disk) -> int:
        """How far its index says that it is on disk: damage before that is no torn tail."""
        path, covered, at = f"{self.path[:-4]}.idx", 0, 0
        data = read_file(disk, path) if disk.exists(path) else b""
        while (part := decode_part(data, at, at)) is not None and part.start == covered:
            if part.identity != self.identity and not at and part.identity == self._made_checksum():
                self.identity = part.identity  # only the checksum of the first record is damaged
            if part.to > len(self.data) or part.identity != self.identity or not columns_pass(data, part):
                break
            at, covered = at + part.size, part.to
            index = OpenIndex()
            load_part(index, data, part)
            self.listed.update(dict.fromkeys(index.positions))
            self.listed.update((row.position, row) for row in NonMessageRecords(part.rows))
        return covered

    def _tail(self, covered: int) -> None:
        low = max(self.index.sequences[-1:], default=-1)
        behind = scan_segment(
            self.data[covered:], covered, self.index, self.others, covered=covered, tail=True, low=low
        )
        self.found.bad += behind.bad
        self.found.doubtful |= behind.doubtful
        self.found.head = max(self.found.head, behind.head)
        self.found.end = max(self.found.end, behind.end)
        self.found.written = max(self.found.written, behind.written)

    def body(self, row: Row) -> bytes:
        return self.data[row.position + row.size - row.body : row.position + row.size]

    def good(self) -> bytes:
        """The records that pass, in order. Of a batch that lost a record each other is one of its own from then on."""
        index = self.index
        spans = [(position, size_of(index, n)) for n, position in enumerate(index.positions)]
        states = whole_states(self)
        rows = (row for row in self.others if row.kind != Kind.STATE or row.position in states)
        spans = sorted([*spans, *((row.position, row.size) for row in rows)])
        flags = [self.data[at + FLAGS_AT] for at, _ in spans]
        joined = [
            bool(flags[n] & MORE and flags[n + 1] & INNER and at + padded(size) == spans[n + 1][0])
            for n, (at, size) in enumerate(spans[:-1])
        ]
        pieces = []
        for (at, size), had, before, behind in zip(spans, flags, [False, *joined], [*joined, False], strict=False):
            data = self.data[at : at + padded(size)]
            is_inner = INNER if before else 0
            now = had & ~(MORE | INNER) | (MORE if behind else 0) | is_inner
            pieces.append(data if now == had else with_flags(data, now))
        return b"".join(pieces)

    def _made_checksum(self) -> int:
        """What the checksum of the first record has to be."""
        return checksum(self.data[: int.from_bytes(self.data[:4], "little")])

    # ------------------------------------------------------------ see `Source`

    def rows(self) -> NonMessageRecords:
        return self.others

    def counts(self) -> tuple[int, int, int]:
        sequences = self.index.sequences
        return (len(sequences), sequences[0], sequences[-1]) if sequences else (0, 0, 0)

    def drop_bytes(self) -> None:
        """Only `read` is called from now on; it reads the file."""
        self.data = b""

    def read(self, position: int, size: int) -> bytes:
        if self.data:
            return self.data[position : position + size]
        fd = self._disk.open(self.path, os.O_RDONLY)
        try:
            return self._disk.pread(fd, size, position)
        finally:
            self._disk.close(fd)

    def report_corruption(self, position: int, data: bytes) -> None:
        """It was found before."""

    def drop_index_cache(self) -> None:
        """It stays in memory."""


__all__ = ["Log", "least_of"]
