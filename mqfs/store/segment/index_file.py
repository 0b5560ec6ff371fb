"""The .idx of a segment: parts, each with the rows and columns of a range of the log.

Owns the layout of .idx (docs/reference/format.md, "Index") and its file. Nothing in it is needed: the log has all of
it too.
"""

from __future__ import annotations

import os
import struct
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence

import attrs
from google_crc32c import value

from mqfs.log.record import checksum
from mqfs.store.disk import Buffer, Disk, read_all, read_file, write_all, write_file
from mqfs.store.segment.index import COLUMNS, NO_ORDINALS, OTHER_SIZE, NonMessageRecords, OpenIndex

MAGIC = b"mqfsidx1"
SEALED, CLEAN = 1, 2

_HEAD = struct.Struct("<8sIIIIQQIIIIQQqQ40x")
HEAD_SIZE = _HEAD.size
_PART_GUESS = 4_096  # bytes of a part to read first: enough for the head and rows of most


class SealedIndex:
    """The index of a sealed segment: one part with postings, read in place. Keeps the file mapped while it lives."""

    __slots__ = (
        "_begin",
        "_map",
        "_messages",
        "_present",
        "bodies",
        "headers",
        "kinds",
        "others",
        "positions",
        "sequences",
        "streams",
        "times",
    )

    def __init__(self, data: Buffer, part: IndexPart) -> None:
        self._map = data
        view = memoryview(data)
        at = part.at + HEAD_SIZE + OTHER_SIZE * part.others
        self.others = view[part.at + HEAD_SIZE : at]  # packed
        columns = []
        for _, code in COLUMNS:
            columns.append(_column(view, at, code, part.messages))
            at += _padded(part.messages * struct.calcsize(code))
        self.sequences, self.times, self.positions, self.bodies, self.streams, self.headers, self.kinds = columns
        self._present = _column(view, at, "I", part.streams)
        at += 4 * part.streams
        self._begin = _column(view, at, "I", part.streams + 1)
        at += 4 * (part.streams + 1)
        self._messages = _column(view, at, "I", part.messages)

    def __len__(self) -> int:
        return len(self.sequences)

    def posting(self, stream: int) -> Sequence[int]:
        at = bisect_left(self._present, stream)
        if at == len(self._present) or self._present[at] != stream:
            return NO_ORDINALS
        return self._messages[self._begin[at] : self._begin[at + 1]]

    def present(self) -> Sequence[int]:
        return self._present


def _column(view: memoryview, at: int, code: str, count: int) -> memoryview:
    return view[at : at + count * struct.calcsize(code)].cast(code)  # type: ignore[call-overload, no-any-return]


def _padded(size: int) -> int:
    return (size + 7) & ~7


@attrs.frozen
class IndexPart:
    """The head of one part, checked; `rows`: its records that are no messages, packed."""

    at: int  # position in the .idx
    identity: int
    flags: int
    start: int
    to: int
    messages: int
    others: int
    streams: int
    first: int
    last: int
    last_ns: int
    size: int
    columns_crc: int
    rows: bytes


def encode_part(
    index: OpenIndex,
    rows: bytes | bytearray,
    first: int,
    count: int,
    start: int,
    to: int,
    identity: int,
    flags: int,
    last_ns: int,
) -> bytes:
    """A part for the messages [first, first + count) and the other records `rows`, which lie in bytes [start, to)."""
    columns: list[bytes | memoryview] = []  # views: the index of a segment may be large, and is copied only once
    for name, _ in COLUMNS:
        column = memoryview(getattr(index, name))[first : first + count].cast("B")
        columns += [column, bytes(-len(column) & 7)]
    streams = 0
    if flags & SEALED:
        postings = _postings(index)
        streams = len(postings[0])
        columns += [memoryview(some).cast("B") for some in postings]
        columns.append(bytes(-sum(map(len, columns)) & 7))
    body = b"".join(columns)
    size = HEAD_SIZE + len(rows) + len(body)
    ends = (index.sequences[first], index.sequences[first + count - 1]) if count else (0, 0)
    others = len(rows) // OTHER_SIZE
    fields = (value(body), identity, flags, start, to, count, others, streams, 0, *ends, last_ns, size)
    crc = value(_HEAD.pack(MAGIC, 0, *fields)[12:] + bytes(rows))
    return b"".join((_HEAD.pack(MAGIC, crc, *fields), rows, body))


def _postings(index: OpenIndex) -> tuple[array[int], array[int], array[int]]:
    present, begin, messages = array("I", sorted(index.postings)), array("I", [0]), array("I")
    for stream in present:
        messages.extend(index.postings[stream])
        begin.append(len(messages))
    return present, begin, messages


def decode_part(data: bytes, at: int = 0, place: int = 0) -> IndexPart | None:
    """The head of the part at `data[at:]`, which lies at `place` in its file; None if it does not pass. `data` must
    reach to the end of its rows: `rows_end` says how far that is."""
    if at + HEAD_SIZE > len(data):
        return None
    fields = _HEAD.unpack_from(data, at)
    others = fields[8]
    end = at + HEAD_SIZE + OTHER_SIZE * others
    if fields[0] != MAGIC or end > len(data) or value(data[at + 12 : end]) != fields[1]:
        return None
    columns_crc, identity, flags, start, to, messages, others, streams, _, first, last, last_ns, size = fields[2:]
    rows = bytes(data[at + HEAD_SIZE : end])
    return IndexPart(
        place, identity, flags, start, to, messages, others, streams, first, last, last_ns, size, columns_crc, rows
    )


def rows_end(data: bytes) -> int:
    """How many bytes of a part its head and rows take, from its first bytes; 0 if it is none."""
    if len(data) < HEAD_SIZE or data[:8] != MAGIC:
        return 0
    return HEAD_SIZE + OTHER_SIZE * int(_HEAD.unpack_from(data)[8])


def columns_pass(data: Buffer, part: IndexPart) -> bool:
    """Whether the columns of the part, whose file is `data`, are as they were written."""
    body = data[part.at + HEAD_SIZE + OTHER_SIZE * part.others : part.at + part.size]
    return part.at + part.size <= len(data) and value(body) == part.columns_crc


def load_part(index: OpenIndex, data: bytes, part: IndexPart) -> None:
    """Add the messages of a part to an index, without postings."""
    at = part.at + HEAD_SIZE + OTHER_SIZE * part.others
    for name, code in COLUMNS:
        size = part.messages * struct.calcsize(code)
        getattr(index, name).frombytes(data[at : at + size])
        at += _padded(size)


class IndexFile:
    """The .idx of one segment. Errors are not raised by readers: what cannot be read is taken from the log."""

    __slots__ = ("_disk", "_size", "_staged", "checked", "parts", "path")

    def __init__(self, disk: Disk, path: str, staged: str) -> None:
        self._disk, self.path, self._staged = disk, path, staged
        self._size = 0  # bytes of the parts
        self.parts: list[IndexPart] = []  # those that join and fit the log; without their rows
        self.checked = False  # whether the columns of a sealed index passed their CRC once

    @property
    def covered(self) -> int:
        """How far in the log the parts reach."""
        return self.parts[-1].to if self.parts else 0

    @property
    def is_sealed(self) -> bool:
        return bool(self.parts and self.parts[0].flags & SEALED)

    def is_clean(self, used: int) -> bool:
        """Whether the server stopped cleanly behind the last record of a log of that length."""
        return bool(self.parts and self.parts[-1].flags & CLEAN and self.covered == used)

    def count(self) -> tuple[int, int]:
        """(messages, other records) in the parts."""
        return sum(part.messages for part in self.parts), sum(part.others for part in self.parts)

    # ------------------------------------------------------------ reading

    def read(self, log: Callable[[int], bytes], size: int, others: NonMessageRecords) -> bool:
        """Read the heads of the parts for a log of that size, of whose beginning `log` reads a count of bytes; their
        rows are added to `others`. Returns whether the log lacks an end that the index covers."""
        self._size, self.parts = 0, []
        head = log(8)
        identity = int.from_bytes(head[4:], "little")
        try:
            fd = self._disk.open(self.path, os.O_RDONLY)
            try:
                parts: list[IndexPart] = []
                at = 0
                while (part := self._read_part(fd, at)) is not None:
                    if not parts and part.identity != identity:
                        # Perhaps only the checksum of the first record is damaged.
                        identity = checksum(log(min(size, int.from_bytes(head[:4], "little"))))
                    if not _fits(part, parts, size, identity):
                        break
                    parts.append(part)
                    at += part.size
            finally:
                self._disk.close(fd)
        except OSError:
            return False
        for whole in parts:
            others.take(whole.rows, whole.last_ns)
        self._size, self.parts = at, [attrs.evolve(whole, rows=b"") for whole in parts]
        return part is not None and part.identity == identity and part.to > size

    def _read_part(self, fd: int, at: int) -> IndexPart | None:
        data = self._disk.pread(fd, _PART_GUESS, at)
        need = rows_end(data)
        if need > len(data):
            data = read_all(self._disk, fd, min(need, self._disk.size(fd)), at)
        return decode_part(data, 0, at)

    def sealed_index(self) -> SealedIndex | None:
        """The index of a sealed segment; None where the file is not as it was written."""
        try:
            data = self._disk.view(self.path)
            if self.checked or columns_pass(data, self.parts[0]):
                self.checked = True
                return SealedIndex(data, self.parts[0])
        except OSError:
            pass
        return None

    def load(self) -> bytes:
        """The whole file."""
        try:
            return read_file(self._disk, self.path) if self.parts else b""
        except OSError:
            return b""

    def rows(self) -> list[bytes | None]:
        """The rows of each part; None for one that is not as it was written."""
        try:
            fd = self._disk.open(self.path, os.O_RDONLY)
            try:
                return [self._rows_of(fd, part) for part in self.parts]
            finally:
                self._disk.close(fd)
        except OSError:
            return [None] * len(self.parts)

    def _rows_of(self, fd: int, part: IndexPart) -> bytes | None:
        data = read_all(self._disk, fd, HEAD_SIZE + OTHER_SIZE * part.others, part.at)
        there = decode_part(data, 0, part.at)
        return there.rows if there is not None and attrs.evolve(there, rows=b"") == part else None

    # ------------------------------------------------------------ writing

    def append(self, data: bytes) -> None:
        """Append an encoded part. Raises OSError."""
        fd = self._disk.open(self.path, os.O_RDWR | os.O_CREAT)
        try:
            write_all(self._disk, fd, data, self._size)
        finally:
            self._disk.close(fd)
        self.parts.append(_head_of(data, self._size))
        self._size += len(data)

    def replace_parts(self, data: bytes) -> None:
        """Take that sealed part for all there are; `save` writes it."""
        self.parts, self.checked = [_head_of(data, 0)], False

    def save(self, data: bytes) -> None:
        """Replace the file. Raises OSError."""
        write_file(self._disk, self._staged, data, sync=False)
        self._disk.rename(self._staged, self.path)
        self.checked = True


def _head_of(data: bytes, at: int) -> IndexPart:
    part = decode_part(data, 0, at)
    assert part is not None
    return attrs.evolve(part, rows=b"")


def _fits(part: IndexPart, parts: list[IndexPart], size: int, identity: int) -> bool:
    if part.identity != identity or part.start != (parts[-1].to if parts else 0) or part.to > size:
        return False
    if not part.flags & SEALED:
        return not (parts and parts[0].flags & SEALED)
    return not parts and part.to == size


__all__ = [
    "CLEAN",
    "HEAD_SIZE",
    "SEALED",
    "IndexFile",
    "IndexPart",
    "SealedIndex",
    "columns_pass",
    "decode_part",
    "encode_part",
    "load_part",
    "rows_end",
]
