"""Where each record of a segment lies, in columns, and the search in them.

Owns the layout of .idx (docs/reference/format.md, "Index") and searching in it. Never reads or writes a file.
"""

from __future__ import annotations

import re
import struct
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Protocol

from mqfs.log.batch import postings
from mqfs.log.record import HEAD_BYTES, Row
from mqfs.model import Columns

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

    def take(self, packed: bytes, last_ns: int) -> None:
        """Add some that are packed, the last of them of that time."""
        self.packed += packed
        self.last_ns = last_ns if packed else self.last_ns

    def append(self, row: Row) -> None:
        self.add(row.sequence, row.position, row.body, row.stream, row.headers, row.kind, row.flags, row.time_ns)

    def of_kind(self, kind: int) -> list[int]:
        """The numbers of those of that kind, ascending."""
        wanted = re.escape(bytes([kind]))
        return [found.start() for found in re.finditer(wanted, self.packed[_KIND_AT::OTHER_SIZE])]

    def cut(self, count: int, last_ns: int) -> None:
        """Keep the first `count`, of which the newest is of that time."""
        del self.packed[count * OTHER_SIZE :]
        self.last_ns = last_ns

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


def with_headers(index: Index, stream: int | None, sequence: int, end: int) -> list[int]:
    """The sequences in [sequence, end) of messages (of that stream) that have header bytes."""
    begin, to = bisect_left(index.sequences, sequence), bisect_left(index.sequences, end)
    headers, sequences = index.headers, index.sequences
    if stream is None:
        heads = memoryview(headers)[begin:to].tobytes()  # type: ignore[arg-type]
        if heads.count(0) == len(heads):
            return []  # mostly; a search without a hit takes longer
        ordinals = dict.fromkeys(begin + found.start() // 2 for found in _HEADED.finditer(heads))
        return [sequences[ordinal] for ordinal in ordinals]
    posting = index.posting(stream)
    at = bisect_left(posting, begin)
    mine = posting[at : bisect_left(posting, to, at)]
    return [sequences[ordinal] for ordinal in mine if headers[ordinal]]


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

    def extend_by(self, rows: Columns) -> None:
        """With the postings."""
        begin = len(self.sequences)
        mine = (self.sequences, self.times, self.positions, self.bodies, self.streams, self.headers, self.kinds)
        for column, more in zip(mine, rows[1:], strict=False):
            column.frombytes(more.cast("B"))
        for stream, ordinals in postings(rows.streams, begin):
            self._posting_of(stream).frombytes(ordinals)

    def _posting_of(self, stream: int) -> array[int]:
        posting = self.postings.get(stream)
        if posting is None:
            posting = self.postings[stream] = array("I")
        return posting

    def behind(self, count: int) -> OpenIndex:
        """A copy without the first `count` messages, and without postings."""
        rest = OpenIndex()
        for name, _ in COLUMNS:
            getattr(rest, name).extend(getattr(self, name)[count:])
        return rest

    def cut(self, count: int) -> None:
        """Keep the first `count` messages."""
        for name, _ in COLUMNS:
            del getattr(self, name)[count:]

    def collect(self) -> None:
        """Make the postings."""
        self.postings = {}
        for stream, ordinals in postings(self.streams, 0):
            self._posting_of(stream).frombytes(ordinals)

    def posting(self, stream: int) -> Sequence[int]:
        return self.postings.get(stream, NO_ORDINALS)

    def present(self) -> Sequence[int]:
        return list(self.postings)


__all__ = [
    "COLUMNS",
    "NO_ORDINALS",
    "OTHER",
    "OTHER_SIZE",
    "Index",
    "NonMessageRecords",
    "OpenIndex",
    "Plain",
    "pack_other",
    "seek",
    "seek_before",
    "size_of",
    "weight",
    "with_headers",
]
