"""Where each record of a segment lies, in columns, the search in them, and the file .idx that keeps them.

    ordinal      0   1   2   3       a message is a row of the columns
    sequences   40  41  42  43       ascending: bisected
    streams     17  16  16  17       postings 16: [1, 2], 17: [0, 3]: the ordinals of each stream

An open segment has an OpenIndex, and its .idx gets a part for each stretch that was synced. A sealed one has a single
part with postings, mapped and read in place (SealedIndex). Records that are no messages are packed rows of 24 bytes.
All of it can be made again from the log, but for one thing: what an index covers was on disk, so it is no torn tail.
The layout is in docs/reference/format.md, "Index".

appender.py writes these columns itself, for a message and for a batch: a new column or index is added there, too.
"""

from __future__ import annotations

import os
import re
import struct
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import attrs
from google_crc32c import extend, value

from mqfs.model import RecordColumns
from mqfs.records.batch import postings
from mqfs.records.record import HEAD_BYTES, Row, decode
from mqfs.store.disk import Buffer, Disk, opened, read_all, read_file, replace_file, write_all

OTHER = struct.Struct("<QIIIHBB")
OTHER_SIZE = OTHER.size
_KIND_AT = 22  # of the kind in it
_PORTION = 4_096  # of them decoded at once
pack_other = OTHER.pack
COLUMNS = (
    ("sequences", "Q"),
    ("times", "q"),
    ("positions", "I"),
    ("bodies", "I"),
    ("streams", "I"),
    ("headers", "H"),
    ("kinds", "B"),
)


Plain = tuple[int, int, int, int, int, int, int]  # sequence, position, body, stream, headers, kind, flags


class NonMessageRecords:
    """The records of a segment that are no messages, in their order: 24 bytes each, as they lie in an .idx, decoded
    when they are asked for. Their times are not kept, but for the newest."""

    __slots__ = ("last_ns", "packed")

    def __init__(self, packed: bytes | bytearray = b"", last_ns: int = 0) -> None:
        self.packed = bytearray(packed)
        self.last_ns = last_ns

    def __len__(self) -> int:
        return len(self.packed) // OTHER_SIZE

    def __getitem__(self, number: int) -> Row:
        sequence, position, body, stream, headers, kind, flags = OTHER.unpack_from(self.packed, number * OTHER_SIZE)
        return Row(sequence, 0, position, body, stream, headers, kind, flags)

    def __iter__(self) -> Iterator[Row]:
        for portion in self.portions():
            for sequence, position, body, stream, headers, kind, flags in portion:
                yield Row(sequence, 0, position, body, stream, headers, kind, flags)

    def portions(self, begin: int = 0) -> Iterator[list[Plain]]:
        """From that number on, some at a time."""
        for at in range(begin * OTHER_SIZE, len(self.packed), _PORTION * OTHER_SIZE):
            yield list(OTHER.iter_unpack(self.packed[at : at + _PORTION * OTHER_SIZE]))

    def add(
        self, sequence: int, position: int, body: int, stream: int, headers: int, kind: int, flags: int, time_ns: int
    ) -> None:
        self.packed += pack_other(sequence, position, body, stream, headers, kind, flags)
        self.last_ns = time_ns

    def take(self, packed: bytes | bytearray, last_ns: int) -> None:
        """Add some that are packed, the last of them of that time."""
        self.packed += packed
        self.last_ns = last_ns if packed else self.last_ns

    def append(self, row: Row) -> None:
        self.add(row.sequence, row.position, row.body, row.stream, row.headers, row.kind, row.flags, row.time_ns)

    def of_kind(self, kind: int) -> list[int]:
        """The numbers of those of that kind, ascending."""
        wanted = re.escape(bytes([kind]))
        return [found.start() for found in re.finditer(wanted, self.packed[_KIND_AT::OTHER_SIZE])]

    def between(self, begin: int, end: int) -> bytes:
        """The bytes of the numbers [begin, end)."""
        return bytes(self.packed[begin * OTHER_SIZE : end * OTHER_SIZE])


class Index(Protocol):
    """The messages of one segment, in columns; their numbers are called ordinals."""

    @property
    def sequences(self) -> Sequence[int]: ...

    @property
    def times(self) -> Sequence[int]: ...

    @property
    def positions(self) -> Sequence[int]: ...

    @property
    def bodies(self) -> Sequence[int]: ...

    @property
    def streams(self) -> Sequence[int]: ...

    @property
    def headers(self) -> Sequence[int]: ...

    @property
    def kinds(self) -> Sequence[int]: ...

    def posting(self, stream: int) -> Sequence[int]:
        """Ordinals of the messages of that stream, ascending; empty if it has none."""
        ...

    def present(self) -> Sequence[int]:
        """The streams that have messages here."""
        ...


def seek(index: Index, stream: int | None, sequence: int) -> int:
    """The ordinal of the first message (of that stream) at or after `sequence`; -1 if there is none."""
    ordinal = bisect_left(index.sequences, sequence)
    if stream is None:
        return ordinal if ordinal < len(index.sequences) else -1
    posting = index.posting(stream)
    at = bisect_left(posting, ordinal)
    return posting[at] if at < len(posting) else -1


def seek_before(index: Index, stream: int | None, sequence: int) -> int:
    """The ordinal of the last message (of that stream) below `sequence`; -1 if there is none."""
    ordinal = bisect_left(index.sequences, sequence)
    if stream is None:
        return ordinal - 1
    posting = index.posting(stream)
    at = bisect_left(posting, ordinal)
    return posting[at - 1] if at else -1


def weight(rows: bytearray | memoryview) -> int:
    """About the bytes that those records, packed, take in a log: their headers, which are rare, are left out."""
    words = memoryview(rows).cast("I")
    return sum(words[3::6]) + (HEAD_BYTES + 4) * (len(words) // 6)


def size_of(index: Index, ordinal: int) -> int:
    """The record's bytes without padding."""
    return HEAD_BYTES + index.headers[ordinal] + index.bodies[ordinal]


def first_headed(index: Index, begin: int, stop: int) -> tuple[int, int]:
    """The first message among those ordinals that has header bytes, and one above the last. Where none of the next
    65,536 has any: one above them, twice."""
    stop = min(stop, begin + _HEADED_AT_ONCE)
    found = _HEADED.search(memoryview(index.headers)[begin:stop].tobytes())  # type: ignore[arg-type]
    return (stop if found is None else begin + found.start() // 2), stop


_HEADED_AT_ONCE = 65_536  # messages: some 0.1 ms
_HEADED = re.compile(rb"[^\0]")  # in the column of header bytes
NO_ORDINALS: Sequence[int] = array("I")


class OpenIndex:
    """An index that grows."""

    __slots__ = ("bodies", "headers", "kinds", "positions", "postings", "sequences", "streams", "times")

    def __init__(self) -> None:
        self.sequences = array("Q")
        self.times = array("q")
        self.positions = array("I")
        self.bodies = array("I")
        self.streams = array("I")
        self.headers = array("H")
        self.kinds = array("B")
        self.postings: dict[int, array[int]] = {}

    def __len__(self) -> int:
        return len(self.sequences)

    def append(self, row: Row) -> None:
        """Without the postings, which `collect` makes: most logs that are started are not read."""
        self.sequences.append(row.sequence)
        self.times.append(row.time_ns)
        self.positions.append(row.position)
        self.bodies.append(row.body)
        self.streams.append(row.stream)
        self.headers.append(row.headers)
        self.kinds.append(row.kind)

    def take(self, columns: Sequence[bytes]) -> None:
        """Add messages, column by column, without the postings."""
        mine = (self.sequences, self.times, self.positions, self.bodies, self.streams, self.headers, self.kinds)
        for column, more in zip(mine, columns, strict=False):
            column.frombytes(more)

    def extend(self, other: OpenIndex) -> None:
        for name, _ in COLUMNS:
            getattr(self, name).extend(getattr(other, name))

    def extend_by(self, rows: RecordColumns) -> None:
        """With the postings."""
        begin = len(self.sequences)
        mine = (self.sequences, self.times, self.positions, self.bodies, self.streams, self.headers, self.kinds)
        for column, more in zip(mine, rows[1:], strict=False):
            column.frombytes(more.cast("B"))
        for stream, ordinals in postings(rows.streams, begin):
            self.postings.setdefault(stream, array("I")).frombytes(ordinals)

    def behind(self, count: int) -> OpenIndex:
        """A copy without the first `count` messages, and without postings."""
        rest = OpenIndex()
        for name, _ in COLUMNS:
            getattr(rest, name).extend(getattr(self, name)[count:])
        return rest

    def collect(self) -> None:
        """Make the postings."""
        self.postings = {stream: array("I", ordinals) for stream, ordinals in postings(self.streams, 0)}

    def posting(self, stream: int) -> Sequence[int]:
        return self.postings.get(stream, NO_ORDINALS)

    def present(self) -> Sequence[int]:
        return list(self.postings)


# ------------------------------------------------------------ index file

MAGIC = b"mqfsidx1"
SEALED, CLEAN = 1, 2

_HEAD = struct.Struct("<8sIIIIQQIIIIQQqQ40x")
HEAD_SIZE = _HEAD.size
_PART_GUESS = 4_096  # bytes of a part to read first: enough for the head and rows of most
_PIECE = 1 << 20  # bytes whose CRC is taken at once


class SealedIndex:
    """The index of a sealed segment: one part with postings, read in place. Its views keep the file mapped."""

    __slots__ = (
        "_begin", "_messages", "_present", "bodies", "headers", "kinds", "others", "positions", "sequences",
        "streams", "times",
    )  # fmt: skip

    def __init__(self, data: Buffer, part: IndexPart) -> None:
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


def columns_pass(data: bytes, part: IndexPart) -> bool:
    """Whether the columns of the part, whose file is `data`, are as they were written."""
    return part.at + part.size <= len(data) and file_columns_pass(lambda count, at: data[at : at + count], part)


def file_columns_pass(read: Callable[[int, int], bytes], part: IndexPart) -> bool:
    """The same of a file of which `read` reads a count of bytes at a position. For a page that the disk cannot read it
    raises OSError, where a look at a map would end the process."""
    begin, end, crc = part.at + HEAD_SIZE + OTHER_SIZE * part.others, part.at + part.size, 0
    for at in range(begin, end, _PIECE):
        crc = extend(crc, read(min(_PIECE, end - at), at))
    return crc == part.columns_crc


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
            with opened(self._disk, self.path) as fd:
                parts: list[IndexPart] = []
                at = 0
                while (part := self._read_part(fd, at)) is not None:
                    if not parts and part.identity != identity:
                        first = log(min(size, int.from_bytes(head[:4], "little")))
                        if decode(first) is None:  # it is damaged, and does not say which log this is
                            identity = part.identity
                    if not _fits(part, parts, size, identity):
                        break
                    parts.append(part)
                    at += part.size
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
        """The index of a sealed segment; None where the file is not as it was written, or cannot be read."""
        part = self.parts[0]
        try:
            if not self.checked:
                with opened(self._disk, self.path) as fd:
                    self.checked = file_columns_pass(partial(read_all, self._disk, fd), part)
            if self.checked:
                data = self._disk.view(self.path)
                if len(data) >= part.at + part.size:
                    return SealedIndex(data, part)
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
            with opened(self._disk, self.path) as fd:
                return [self._rows_of(fd, part) for part in self.parts]
        except OSError:
            return [None] * len(self.parts)

    def _rows_of(self, fd: int, part: IndexPart) -> bytes | None:
        data = read_all(self._disk, fd, HEAD_SIZE + OTHER_SIZE * part.others, part.at)
        there = decode_part(data, 0, part.at)
        return there.rows if there is not None and attrs.evolve(there, rows=b"") == part else None

    # ------------------------------------------------------------ writing

    def append(self, data: bytes) -> None:
        """Append an encoded part. Raises OSError."""
        with opened(self._disk, self.path, os.O_RDWR | os.O_CREAT) as fd:
            write_all(self._disk, fd, data, self._size)
        self.parts.append(_head_of(data, self._size))
        self._size += len(data)

    def replace_parts(self, data: bytes) -> None:
        """Take that sealed part for all there are; `save` writes it."""
        self.parts, self.checked = [_head_of(data, 0)], False

    def save(self, data: bytes, *, sync: bool = False) -> None:
        """Replace the file; with `sync`, by one that is on disk. Raises OSError."""
        replace_file(self._disk, self.path, self._staged, data, sync=sync)
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
