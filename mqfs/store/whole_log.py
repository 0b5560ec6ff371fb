"""One segment's log, read whole: what a check looks at.

Owns which bytes of it are damaged and which are a torn tail. Writes nothing.
"""

from __future__ import annotations

from mqfs.log.record import INNER, Row
from mqfs.model import Kind
from mqfs.store.disk import Disk, read_file
from mqfs.store.segment.index import NonMessageRecords, OpenIndex, size_of
from mqfs.store.segment.index_file import columns_pass, decode_part, load_part
from mqfs.store.segment.recovery import RecoveryScan, scan_segment, torn


def least_of(index: OpenIndex, others: NonMessageRecords, first: int) -> int:
    """The lowest sequence a log holds: of a message, or the one that its head says it begins with; else `first`."""
    heads = [others[0].sequence + 1] if len(others) else []
    return min([*heads, *index.sequences[:1]], default=first)


class Log:
    """One segment's log, read whole."""

    def __init__(self, disk: Disk, folder: str, name: str, *, newest: bool) -> None:
        self.folder, self.name, self.newest = folder, name, newest
        self.path = f"{folder}/{name}"
        self.first = int(name[:-4])
        self.data = read_file(disk, self.path)
        self.identity = int.from_bytes(self.data[4:8], "little")
        self.index, self.others = OpenIndex(), NonMessageRecords()
        self.listed: set[int] = set()  # where its index says that records are
        covered = self.covered = self._covered(disk)
        end = covered if newest else len(self.data)
        self.found: RecoveryScan = scan_segment(self.data[:end], 0, self.index, self.others, tail=False)
        if newest and covered < len(self.data):
            self._tail(covered)
        self.torn = [] if newest else torn(self.data, covered, self.found.bad)
        self.torn += [(a, b) for a, b in self.found.bad if b <= covered and not any(a <= at < b for at in self.listed)]
        self.found.bad = [stretch for stretch in self.found.bad if stretch not in self.torn]

    def _covered(self, disk: Disk) -> int:
        """How far its index says that it is on disk: damage before that is no torn tail."""
        path, covered, at = f"{self.path[:-4]}.idx", 0, 0
        data = read_file(disk, path) if disk.exists(path) else b""
        while (part := decode_part(data, at, at)) is not None and part.start == covered:
            if part.to > len(self.data) or part.identity != self.identity or not columns_pass(data, part):
                break
            at, covered = at + part.size, part.to
            index = OpenIndex()
            load_part(index, data, part)
            self.listed.update(index.positions, (row.position for row in NonMessageRecords(part.rows)))
        return covered

    def _tail(self, covered: int) -> None:
        behind = scan_segment(self.data[covered:], covered, self.index, self.others, tail=True)
        self.found.bad += behind.bad
        self.found.end = max(self.found.end, behind.end)
        self.found.written = max(self.found.written, behind.written)

    def body(self, row: Row) -> bytes:
        return self.data[row.position + row.size - row.body : row.position + row.size]

    def units(self) -> list[tuple[int, int]]:
        """Stretches of the log that hold the records that are good, in order."""
        index = self.index
        spans = [(position, size_of(index, n)) for n, position in enumerate(index.positions)]
        spans += [(row.position, row.size) for row in self.others]
        return sorted(spans)

    def state(self) -> bytes | None:
        """The body of its newest whole state."""
        state, parts = None, list[bytes]()
        for row in self.others:
            if row.kind == Kind.STATE:
                parts = [*parts, self.body(row)] if row.flags & INNER else [self.body(row)]
            elif parts:
                state, parts = b"".join(parts), []
        return b"".join(parts) if parts else state


__all__ = ["Log", "least_of"]
