"""The position of each record of a segment, in columns, the search in them, and the file .idx that stores them.

    ordinal      0   1   2   3       a message is a row of the columns
    sequences   40  41  42  43       ascending: bisected
    streams     17  16  16  17       postings 16: [1, 2], 17: [0, 3]: the ordinals of each stream

An open segment has an OpenIndex, and its .idx gets a part for each stretch that was synced. A sealed one has a single
part with postings, mapped and read in place (SealedIndex). Records that are no messages are packed rows of 24 bytes.
Everything can be made again from the log, except one fact: bytes that an index covers were on disk, and are no torn
tail. The layout is in docs/reference/format.md, "Index".

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
_KIND_AT = 22  # offset of the kind in a row
_PORTION = 4_096  # rows decoded at once
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
    """The records of a segment that are no messages, in order: 24 bytes each, as in an .idx, decoded on access. Of
    their times only the newest is kept."""

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
        """Yield the rows from number `begin` on, some at a time."""
        for at in range(begin * OTHER_SIZE, len(self.packed), _PORTION * OTHER_SIZE):
            yield list(OTHER.iter_unpack(self.packed[at : at + _PORTION * OTHER_SIZE]))

    def add(
        self, sequence: int, position: int, body: int, stream: int, headers: int, kind: int, flags: int, time_ns: int
    ) -> None:
        self.packed += pack_other(sequence, position, body, stream, headers, kind, flags)
        self.last_ns = time_ns

    def take(self, packed: bytes | bytearray, last_ns: int) -> None:
        """Add packed rows; `last_ns`: the time of the last of them."""
        self.packed += packed
        self.last_ns = last_ns if packed else self.last_ns

    def append(self, row: Row) -> None:
        self.add(row.sequence, row.position, row.body, row.stream, row.headers, row.kind, row.flags, row.time_ns)

    def of_kind(self, kind: int) -> list[int]:
        """Return the numbers of the rows of that kind, ascending."""
        wanted = re.escape(bytes([kind]))
        return [found.start() for found in re.finditer(wanted, self.packed[_KIND_AT::OTHER_SIZE])]

    def between(self, begin: int, end: int) -> bytes:
        """Return the packed rows [begin, end)."""
        return bytes(self.packed[begin * OTHER_SIZE : end * OTHER_SIZE])


class Index(Protocol):
    """The messages of one segment, in columns; their row numbers are called ordinals."""

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
        """Return the ordinals of the messages of that stream, ascending; empty if there are none."""
        ...

    def present(self) -> Sequence[int]:
        """Return the streams that have messages in the segment."""
        ...


def seek(index: Index, stream: int | None, sequence: int) -> int:
    """Return the ordinal of the first message (of that stream) at or after `sequence`; -1 if there is none."""
    ordinal = bisect_left(index.sequences, sequence)
    if stream is None:
        return ordinal if ordinal < len(index.sequences) else -1
    posting = index.posting(stream)
    at = bisect_left(posting, ordinal)
    return posting[at] if at < len(posting) else -1


def seek_before(index: Index, stream: int | None, sequence: int) -> int:
    """Return the ordinal of the last message (of that stream) below `sequence`; -1 if there is none."""
    ordinal = bisect_left(index.sequences, sequence)
    if stream is None:
        return ordinal - 1
    posting = index.posting(stream)
    at = bisect_left(posting, ordinal)
    return posting[at - 1] if at else -1


def weight(rows: bytearray | memoryview) -> int:
    """Estimate the bytes that the records of those packed rows have in a log: headers, which are rare, are not
    counted."""
    words = memoryview(rows).cast("I")
    return sum(words[3::6]) + (HEAD_BYTES + 4) * (len(words) // 6)


def size_of(index: Index, ordinal: int) -> int:
    """Return the record's bytes without padding."""
    return HEAD_BYTES + index.headers[ordinal] + index.bodies[ordinal]


def first_headed(index: Index, begin: int, stop: int) -> tuple[int, int]:
    """Return the ordinal of the first message in [begin, stop) that has header bytes, and the end of the search: at
    most 65,536 ordinals are searched. If none of these has headers, both are that end."""
    stop = min(stop, begin + _HEADED_AT_ONCE)
    found = _HEADED.search(memoryview(index.headers)[begin:stop].tobytes())  # type: ignore[arg-type]
    return (stop if found is None else begin + found.start() // 2), stop


_HEADED_AT_ONCE = 65_536  # messages: some 0.1 ms
_HEADED = re.compile(rb"[^\0]")  # in the column of header sizes
NO_ORDINALS: Sequence[int] = array("I")


class OpenIndex:
    """The index of a segment that is appended to."""

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
        """Append a row without its posting: `collect` makes the postings, which most logs that are started never
        need."""
        self.sequences.append(row.sequence)
        self.times.append(row.time_ns)
        self.positions.append(row.position)
        self.bodies.append(row.body)
        self.streams.append(row.stream)
        self.headers.append(row.headers)
        self.kinds.append(row.kind)

    def take(self, columns: Sequence[bytes]) -> None:
        """Append messages, column by column, without the postings."""
        mine = (self.sequences, self.times, self.positions, self.bodies, self.streams, self.headers, self.kinds)
        for column, more in zip(mine, columns, strict=False):
            column.frombytes(more)

    def extend(self, other: OpenIndex) -> None:
        for name, _ in COLUMNS:
            getattr(self, name).extend(getattr(other, name))

    def extend_by(self, rows: RecordColumns) -> None:
        """Append messages, with their postings."""
        begin = len(self.sequences)
        mine = (self.sequences, self.times, self.positions, self.bodies, self.streams, self.headers, self.kinds)
        for column, more in zip(mine, rows[1:], strict=False):
            column.frombytes(more.cast("B"))
        for stream, ordinals in postings(rows.streams, begin):
            self.postings.setdefault(stream, array("I")).frombytes(ordinals)

    def behind(self, count: int) -> OpenIndex:
        """Return a copy without the first `count` messages, and without postings."""
        rest = OpenIndex()
        for name, _ in COLUMNS:
            getattr(rest, name).extend(getattr(self, name)[count:])
        return rest

    def collect(self) -> None:
        """Make the postings from the column of streams."""
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
_PART_GUESS = 4_096  # bytes of a part to read first: most heads with their rows fit
_PIECE = 1 << 20  # bytes of one step of a CRC


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
    """The checked head of one part. `rows`: its records that are no messages, packed."""

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
    """Encode a part for the messages [first, first + count) and the packed rows of other records, which lie in bytes
    [start, to) of the log."""
    columns: list[bytes | memoryview] = []  # views: a large index is copied only once
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
    """Decode the head of the part at `data[at:]`, which lies at `place` in its file; None if it does not pass its
    check. `data` must reach to the end of its rows: see `rows_end`."""
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
    """Return the bytes of a part's head and rows, given its first bytes; 0 if it is not a part."""
    if len(data) < HEAD_SIZE or data[:8] != MAGIC:
        return 0
    return HEAD_SIZE + OTHER_SIZE * int(_HEAD.unpack_from(data)[8])


def columns_pass(data: bytes, part: IndexPart) -> bool:
    """Whether the columns of the part pass their CRC; `data` is the whole file."""
    return part.at + part.size <= len(data) and file_columns_pass(lambda count, at: data[at : at + count], part)


def file_columns_pass(read: Callable[[int, int], bytes], part: IndexPart) -> bool:
    """Whether the columns of the part pass their CRC; `read` returns a count of bytes at a position of the file. It
    raises OSError for a page that the disk cannot read, where an access to a map would end the process."""
    begin, end, crc = part.at + HEAD_SIZE + OTHER_SIZE * part.others, part.at + part.size, 0
    for at in range(begin, end, _PIECE):
        crc = extend(crc, read(min(_PIECE, end - at), at))
    return crc == part.columns_crc


def load_part(index: OpenIndex, data: bytes, part: IndexPart) -> None:
    """Append the messages of a part to an index, without postings."""
    at = part.at + HEAD_SIZE + OTHER_SIZE * part.others
    for name, code in COLUMNS:
        size = part.messages * struct.calcsize(code)
        getattr(index, name).frombytes(data[at : at + size])
        at += _padded(size)


class IndexFile:
    """The .idx of one segment. Its readers raise no errors: what cannot be read is taken from the log."""

    __slots__ = ("_disk", "_size", "_staged", "checked", "parts", "path")

    def __init__(self, disk: Disk, path: str, staged: str) -> None:
        self._disk, self.path, self._staged = disk, path, staged
        self._size = 0  # bytes of the parts
        self.parts: list[IndexPart] = []  # parts that join and fit the log, without their rows
        self.checked = False  # whether the columns of a sealed index passed their CRC once

    @property
    def covered(self) -> int:
        """The position in the log up to which the parts reach."""
        return self.parts[-1].to if self.parts else 0

    @property
    def is_sealed(self) -> bool:
        return bool(self.parts and self.parts[0].flags & SEALED)

    def is_clean(self, used: int) -> bool:
        """Whether the server stopped cleanly after the last record of a log of `used` bytes."""
        return bool(self.parts and self.parts[-1].flags & CLEAN and self.covered == used)

    def count(self) -> tuple[int, int]:
        """Return the number of messages and of other records in the parts."""
        return sum(part.messages for part in self.parts), sum(part.others for part in self.parts)

    # ------------------------------------------------------------ reading

    def read(self, log: Callable[[int], bytes], size: int, others: NonMessageRecords) -> bool:
        """Read the heads of the parts that fit a log of `size` bytes, and add their rows to `others`. `log` returns the
        first bytes of the log, by count. Returns whether the log lacks an end that the index covers."""
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
                        if decode(first) is None:  # the first record is damaged: it cannot identify the log
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
        """Return the index of a sealed segment; None if the file fails its check, or cannot be read."""
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
        """Return the whole file; empty if there are no parts or it cannot be read."""
        try:
            return read_file(self._disk, self.path) if self.parts else b""
        except OSError:
            return b""

    def rows(self) -> list[bytes | None]:
        """Return the packed rows of each part; None for a part that fails its check."""
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
        """Replace all parts by that sealed part; `save` writes it."""
        self.parts, self.checked = [_head_of(data, 0)], False

    def save(self, data: bytes, *, sync: bool = False) -> None:
        """Replace the file by a rename; with `sync`, the new file is on disk before that. Raises OSError."""
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
