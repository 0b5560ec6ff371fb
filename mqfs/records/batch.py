"""Many messages at once: from the frames of a write to unsequenced records, on to records of a log, and to an index.

An unsequenced record (`blanks` here) is a record (mqfs/records/record.py) without sequence, time, flags and CRC. Its
stream is a place in a table that `finalize` is given. Callers see to names, permissions and limits; there is no I/O
here. The work is done in C (`frames.c`, `batch.c`), or in Python if the C part was not built.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import attrs

from mqfs import limits
from mqfs.model import MORE, Buffer, Draft, Kind, RecordColumns
from mqfs.records import headers
from mqfs.records.record import HEAD, HEAD_BYTES, encode, padded

try:
    from mqfs.records import _native
except ImportError as error:
    MISSING = str(error)  # why Python does the work; empty if C does
else:
    MISSING = ""

MESSAGE = int(Kind.MESSAGE)
_RESERVED = tuple(sorted(name.encode() for name in headers.RESERVED))
_CODES = "QqIIIHBB"  # of columns
_64_BITS = (1 << 64) - 1


class StreamTotal(NamedTuple):
    """Totals of one stream in a run of messages."""

    place: int  # in the table of streams
    messages: int
    size: int  # of their bodies
    last: int  # which of the messages is its last one


class EncodedBatch(NamedTuple):
    """Messages as unsequenced records, one after the other."""

    data: bytes
    messages: int
    fresh: Sequence[str]  # unknown names, which get the next places of the table
    rows: Sequence[StreamTotal]  # of each stream, in the order of first messages
    headed: bool  # some have headers
    expected: Mapping[str, int] = MappingProxyType({})  # stream -> the newest message that it must have


def encode_batch(
    data: bytes,
    known: Mapping[bytes, int],
    sender: bytes,
    *,
    more: Mapping[bytes, int] = MappingProxyType({}),
    always: bool = False,
    at: int = 0,
    stop: int = _64_BITS,
) -> tuple[EncodedBatch, int] | None:
    """Encode the frames of one write from `at` on as unsequenced records. Returns them and the end of the last frame
    encoded, which begins before `stop`. `known`, `more`: the places of names. `sender` is put before the headers of
    messages that have any, with `always` of all messages. Returns None without the C part, or if Python has to parse
    the first frame."""
    if MISSING:
        return None
    places = cast("dict[bytes, int]", known), cast("dict[bytes, int]", more or {})
    most = limits.MESSAGE_BYTES, limits.HEADER_BYTES
    done = _native.pack(data, *places, sender, _RESERVED, at, stop, always, *most)
    if done is None:
        return None
    blanks, messages, fresh, rows, headed, end = done
    names = [name.decode() for name in fresh]
    return EncodedBatch(blanks, messages, names, [StreamTotal(*row) for row in rows], bool(headed)), end


def count_frames(data: bytes) -> int:
    """Count the frames of one write, unchecked."""
    if not MISSING:
        return _native.frames(data)
    at = frames = 0
    while at + 8 <= len(data) and (size := int.from_bytes(data[at : at + 4], "little")) >= 8:
        at, frames = at + size, frames + 1
    return frames


def concatenate(
    messages: Iterable[tuple[str, bytes, bytes]],
    known: Mapping[bytes, int],
    more: Mapping[bytes, int] = MappingProxyType({}),
) -> EncodedBatch:
    """Encode messages that were parsed, each (name, headers, body), as `encode_batch` does."""
    places: dict[str, int] = {}
    fresh: list[str] = []
    pieces: list[bytes] = []
    counts: dict[int, list[int]] = {}
    headed = False
    for number, (name, head, body) in enumerate(messages):
        place = places.get(name)
        if place is None:
            raw = name.encode()
            place = known.get(raw, -1) if raw in known else more.get(raw, -1)
            if place < 0:
                place = len(known) + len(more) + len(fresh)
                fresh.append(name)
            places[name] = place
        size = HEAD_BYTES + len(head) + len(body)
        pieces += (HEAD.pack(size, 0, 0, 0, place, MESSAGE, 0, len(head)), head, body, bytes(-size & 7))
        count = counts.setdefault(place, [0, 0, 0])
        count[0] += 1
        count[1] += len(body)
        count[2] = number
        headed = headed or bool(head)
    rows = [StreamTotal(place, *count) for place, count in counts.items()]
    return EncodedBatch(b"".join(pieces), len(pieces) // 4, fresh, rows, headed)


def finalize(
    blanks: bytes, numbers: array[int], sequence: int, time_ns: int, first: int, rest: int, left: int, base: int
) -> tuple[bytes, RecordColumns]:
    """Turn unsequenced records into records; return these and their columns. The first gets the number `sequence`, and
    lies at `base`. `numbers`: the stream number of each place. `first`, `rest`: flags of the first record and of the
    later ones. `left`: records to the end of the batch, 0 if it ends later. Raises ValueError for other bytes."""
    if MISSING:
        return _stamped(blanks, numbers, sequence, time_ns, first, rest, left, base)
    table = cast(Buffer, numbers)
    made, *columns = _native.stamp(blanks, table, sequence, time_ns & _64_BITS, first, rest, left, base)
    views = [cast(Any, memoryview(column)).cast(code) for column, code in zip(columns, _CODES, strict=True)]
    return made, RecordColumns(len(made), *views)


def _stamped(
    blanks: bytes, numbers: array[int], sequence: int, time_ns: int, first: int, rest: int, left: int, base: int
) -> tuple[bytes, RecordColumns]:
    columns: list[array[Any]] = [array(code) for code in _CODES]
    made: list[bytes] = []
    flags, position = first, base
    for number, (kind, stream, body, head) in enumerate(decode_batch(blanks, numbers), 1):
        if number == left:
            flags &= ~MORE
        made.append(encode(sequence, time_ns, stream, kind, flags, head, body))
        row = (sequence, time_ns, position, len(body), stream, len(head), kind, flags)
        for column, value in zip(columns, row, strict=True):
            column.append(value)
        position += len(made[-1])
        sequence, flags = sequence + 1, rest
    return b"".join(made), RecordColumns(position - base, *(memoryview(column) for column in columns))


def decode_batch(blanks: bytes, numbers: Sequence[int]) -> Iterator[Draft]:
    """Yield unsequenced records as drafts. Raises ValueError for other bytes."""
    at, end, unpack = 0, len(blanks), HEAD.unpack_from
    while at < end:
        if end - at < HEAD_BYTES:
            raise ValueError("not unsequenced records")
        size, _, _, _, place, kind, _, head = unpack(blanks, at)
        body = at + HEAD_BYTES + head
        if at + size < body or at + padded(size) > end or kind != MESSAGE or place >= len(numbers):
            raise ValueError("not unsequenced records")
        yield Draft(MESSAGE, numbers[place], blanks[body : at + size], blanks[at + HEAD_BYTES : body])
        at += padded(size)


class ScannedBatch(NamedTuple):
    """An atomic batch of several records, each of which passed its check."""

    end: int  # position after it
    columns: tuple[bytes, ...]  # of its messages
    others: bytes  # its other records, as they lie in an index
    last_ns: int  # time of the last of the other records


def scan_batch(data: bytes, at: int, base: int) -> ScannedBatch | None:
    """Scan the atomic batch of several records that begins at `data[at:]`. `base`: the position of data[0] in the log.
    Returns None if there is none, or if it must be scanned record by record."""
    found = None if MISSING else _native.unit(data, at, base)
    return None if found is None else ScannedBatch(*found)


def postings(streams: Buffer | array[int], begin: int) -> Iterable[tuple[int, bytes]]:
    """Return the streams of that column, each with the numbers of its rows as u32; `begin`: the number of the first
    row."""
    if not MISSING:
        return _native.postings(cast(Buffer, streams), begin)
    found: dict[int, array[int]] = {}
    for number, stream in enumerate(cast("Sequence[int]", streams), begin):
        rows = found.get(stream)
        if rows is None:
            rows = found[stream] = array("I")
        rows.append(number)
    return [(stream, rows.tobytes()) for stream, rows in found.items()]


def tally(rows: RecordColumns) -> Sequence[StreamTotal]:
    """Return the totals of each stream in those rows, in the order of first rows. The stream numbers are the places."""
    if not MISSING:
        return [StreamTotal(*row) for row in _native.tally(rows.streams, rows.bodies)]
    found: dict[int, StreamTotal] = {}
    for number, (stream, body) in enumerate(zip(rows.streams, rows.bodies, strict=True)):
        _, messages, size, _ = found.get(stream, (stream, 0, 0, 0))
        found[stream] = StreamTotal(stream, messages + 1, size + body, number)
    return list(found.values())


def total(column: Sequence[int], ordinals: Sequence[int]) -> int:
    """Return the sum of a column of an index at those ordinals, u32 in a buffer."""
    if not MISSING:
        return _native.total(cast(Buffer, column), cast(Any, column).itemsize, cast(Buffer, ordinals))
    return sum(column[ordinal] for ordinal in ordinals)


def search(data: bytes, begin: int, positions: Sequence[int], sizes: Sequence[int], keys: Sequence[bytes]) -> list[int]:
    """Return the rows of the records whose headers have one of the keys, as headers.key makes them. `data`: bytes of
    the log from `begin` on. `positions` of the records in the log, u32, and `sizes` of their headers, u16, are
    buffers."""
    if not MISSING:
        return _native.search(data, begin, cast(Buffer, positions), cast(Buffer, sizes), tuple(keys))
    places = (position - begin + HEAD_BYTES for position in positions)
    texts = (data[at : at + size] for at, size in zip(places, sizes, strict=True))
    names = {key[1:].decode() for key in keys}
    return [row for row, text in enumerate(texts) if not names.isdisjoint(headers.decode(text))]


# ------------------------------------------------------------ record batch

# An atomic batch whose messages are encoded already, except for the fields that only the log knows. It is read a piece
# at a time, since its messages may be too many for memory.


@attrs.frozen
class BatchSource:
    """Unsequenced messages. `pieces` reads them at every call; each piece has whole messages."""

    messages: int
    stored_bytes: int  # bytes in a log
    numbers: array[int]  # the stream number of each place
    pieces: Callable[[], Iterable[bytes]]


class RecordBatch(Sequence[Draft]):
    """The messages of several sources, in order, and other records after them. Iteration yields all of them as
    drafts."""

    def __init__(self, sources: Sequence[BatchSource], tail: Sequence[Draft] = ()) -> None:
        self._sources, self.tail = sources, tail
        self.sequence_count = sum(source.messages for source in sources)  # messages: the tail takes no sequence
        self.stored_bytes = sum(source.stored_bytes for source in sources)
        self.stored_bytes += sum(padded(HEAD_BYTES + len(draft.body)) for draft in tail)

    def with_tail(self, tail: Sequence[Draft]) -> RecordBatch:
        return RecordBatch(self._sources, [*self.tail, *tail])

    def __len__(self) -> int:
        return self.sequence_count + len(self.tail)

    def pieces(self) -> Iterator[tuple[bytes, array[int]]]:
        """Yield the unsequenced messages, some at a time, with the stream number of each place."""
        for source in self._sources:
            for data in source.pieces():
                yield data, source.numbers

    def messages(self) -> Iterator[Draft]:
        for data, numbers in self.pieces():
            yield from decode_batch(data, numbers)

    def __iter__(self) -> Iterator[Draft]:
        yield from self.messages()
        yield from self.tail

    def __getitem__(self, at: Any) -> Any:
        raise TypeError("a record batch is iterated")
