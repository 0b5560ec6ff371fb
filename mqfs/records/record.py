"""One record ↔ bytes, and finding the next good record behind a bad one.

The layout is in docs/reference/format.md. There is no I/O here.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from google_crc32c import extend, value

from mqfs.model import MORE, Buffer, Kind, Record

INNER = 2  # flag: not the first record of its batch
SETTLED = 4  # flag: when this was written, everything before it was on disk

HEAD = struct.Struct("<IIQqIBBH")
HEAD_BYTES = HEAD.size
FLAGS_AT = 29  # in a head
_CHECKED_HEAD = struct.Struct("<IQqIBBH")  # what the CRC covers of the head
_PADDING = tuple(bytes(-size & 7) for size in range(8))
_SMALL_BYTES = 4_096  # below it one copy is cheaper than a second call of the CRC
_KINDS = frozenset(kind.value for kind in Kind if kind < Kind.NAMES)  # of a log
_END = Kind.END.value
_IN_UNIT = MORE | INNER
_KIND = re.compile(b"[%s]" % re.escape(bytes(sorted(_KINDS))))
_KIND_AT = 28  # in a head
_SPARE_BYTES, _SPARE_RATE = 64 << 20, 64  # bytes that a search checks: in advance, and for each byte that it has passed
_NAME = struct.Struct("<IH")
_pack = HEAD.pack
_pack_checked = _CHECKED_HEAD.pack
_unpack = HEAD.unpack_from


class RowColumns(Protocol):
    """Rows, column by column."""

    sequences: array[int]
    times: array[int]
    positions: array[int]
    bodies: array[int]
    streams: array[int]
    headers: array[int]
    kinds: array[int]


class Row(NamedTuple):
    """The position of a record, and the fields of its head. `headers` and `body` are byte counts."""

    sequence: int
    time_ns: int
    position: int
    body: int
    stream: int
    headers: int
    kind: int
    flags: int

    @property
    def size(self) -> int:
        return HEAD_BYTES + self.headers + self.body


def padded(size: int) -> int:
    """Return the bytes that a record of that size takes in a log."""
    return (size + 7) & ~7


def encode(sequence: int, time_ns: int, stream: int, kind: int, flags: int, headers: bytes, body: bytes) -> bytes:
    """Encode one record, with its padding."""
    size = HEAD_BYTES + len(headers) + len(body)
    checked = _pack_checked(size, sequence, time_ns, stream, kind, flags, len(headers))
    if size < _SMALL_BYTES:
        crc = value(checked + headers + body)
    else:
        crc = extend(value(checked + headers), body)
    head = _pack(size, crc, sequence, time_ns, stream, kind, flags, len(headers))
    return b"".join((head, headers, body, _PADDING[size & 7]))


def settled(data: Buffer) -> bytearray:
    """Return a copy of a run of records whose first one is marked SETTLED: everything before it is on disk."""
    return with_flags(data, data[FLAGS_AT] | SETTLED)


def with_flags(data: Buffer, flags: int) -> bytearray:
    """Return a copy of a run of records whose first one has those flags."""
    made = bytearray(data)
    size = int.from_bytes(made[:4], "little")
    made[FLAGS_AT] = flags
    made[4:8] = value(bytes(made[:4] + made[8:size])).to_bytes(4, "little")
    return made


def encode_names(sequence: int, time_ns: int, names: Mapping[int, str]) -> bytes:
    """Encode a record with names of streams: each `u32 number, u16 bytes of the name, name`."""
    pieces = []
    for number, name in names.items():
        text = name.encode()
        pieces.append(_NAME.pack(number, len(text)) + text)
    return encode(sequence, time_ns, 0, Kind.NAMES, 0, b"", b"".join(pieces))


def encode_deliveries(sequence: int, time_ns: int, deliveries: int) -> bytes:
    """Encode a record with the delivery count of the message after it, this delivery included: u32."""
    return encode(sequence, time_ns, 0, Kind.DELIVERIES, 0, b"", deliveries.to_bytes(4, "little"))


def decode(data: bytes) -> Record | None:
    """Decode the record whose bytes, without padding, are `data`; None if it fails its check."""
    if len(data) < HEAD_BYTES:
        return None
    size, crc, sequence, time_ns, stream, kind, flags, headers = _unpack(data)
    if size != len(data):
        return None
    body = HEAD_BYTES + headers
    if size >= _SMALL_BYTES:  # copies the body only once
        rest = data[body:]
        found = extend(value(data[:4] + data[8:body]), rest)
        return Record(sequence, time_ns, stream, kind, flags, data[HEAD_BYTES:body], rest) if found == crc else None
    if value(data[:4] + data[8:]) != crc:
        return None
    return Record(sequence, time_ns, stream, kind, flags, data[HEAD_BYTES:body], data[body:])


def heads(data: Buffer) -> list[tuple[int, int, int, int]]:
    """Return (sequence, stream, kind, bytes of the body) of each record of a run that was checked."""
    found, at, end = [], 0, len(data)
    while at < end:
        size, _, sequence, _, stream, kind, _, headers = _unpack(data, at)
        found.append((sequence, stream, kind, size - HEAD_BYTES - headers))
        at += (size + 7) & ~7
    return found


def row_at(data: bytes, at: int, base: int = 0) -> Row | None:
    """Return the row of the record at `data[at:]`; None if it is not whole or fails its check. `base` is the position
    of data[0] in the log."""
    if at + HEAD_BYTES > len(data):
        return None
    size, crc, sequence, time_ns, stream, kind, flags, headers = _unpack(data, at)
    end = at + size
    if size < HEAD_BYTES + headers or end > len(data) or kind not in _KINDS:
        return None
    if value(data[at : at + 4] + data[at + 8 : end]) != crc:
        return None
    return Row(sequence, time_ns, base + at, size - HEAD_BYTES - headers, stream, headers, kind, flags)


Add = Callable[[int, int, int, int, int, int, int, int], None]  # as Row, the time last


def skim(data: bytes, at: int, base: int, rows: RowColumns, add: Add) -> int:
    """Scan the run of records, each a batch of its own, that begins at `at`; return where it ends. Messages are
    appended to `rows`, others passed to `add`. It does what `row_at` does, three times as fast: a start after a kill
    reads the tail of every bucket."""
    sequences, times, positions = rows.sequences.append, rows.times.append, rows.positions.append
    bodies, streams, heads, kinds = rows.bodies.append, rows.streams.append, rows.headers.append, rows.kinds.append
    last = len(data) - HEAD_BYTES
    while at <= last:
        size, crc, sequence, time_ns, stream, kind, flags, headers = _unpack(data, at)
        end = at + size
        if kind not in _KINDS or flags & _IN_UNIT or size < HEAD_BYTES + headers or end > len(data):
            break
        if value(data[at : at + 4] + data[at + 8 : end]) != crc:
            break
        if kind > _END:
            add(sequence, base + at, size - HEAD_BYTES - headers, stream, headers, kind, flags, time_ns)
            at += (size + 7) & ~7
            continue
        sequences(sequence)
        times(time_ns)
        positions(base + at)
        bodies(size - HEAD_BYTES - headers)
        streams(stream)
        heads(headers)
        kinds(kind)
        at += (size + 7) & ~7
    return at


def next_good(data: bytes, bad: int, low: int = -1) -> int:
    """Return where the next record begins, after the bad one at `bad`, that passes its check and has a fitting
    sequence; -1 if there is none. `low`: the sequence of the message before the bad record.

    The size of the bad record may be the damaged field, so every position is tried. But a body may hold forged records.
    If the size leads to a record that passes, records before that one must have lower sequences. If moreover only one
    message fits in between, they count only if the bad record passes with the size that ends there.
    """
    high, told = 1 << 64, -1  # above every sequence; where the size leads to
    after = row_at(data, bad + padded(_unpack(data, bad)[0])) if bad + HEAD_BYTES <= len(data) else None
    if after is not None and _fits(after.sequence, after.kind, low, high):
        high, told = after.sequence + (after.kind > _END), after.position
    is_next = told >= 0 and high - low <= 2
    spare = _SPARE_BYTES  # makes the cost of a body full of heads linear in its size
    last = len(data) - HEAD_BYTES
    for found in _KIND.finditer(data, bad + 8 + _KIND_AT):
        at = found.start() - _KIND_AT
        if (at - bad) & 7:
            continue
        if at > last:
            break
        if at == told:
            return at
        size, _, sequence, _, _, kind, _, headers = _unpack(data, at)
        if size < HEAD_BYTES + headers or at + size > len(data) or not _fits(sequence, kind, low, high):
            continue
        cost = size + is_next * 8 * (at - bad)
        if cost > _SMALL_BYTES:
            if spare + _SPARE_RATE * (at - bad) < cost:
                continue
            spare -= cost
        if row_at(data, at) and (not is_next or size_to(data, bad, at)):
            return at
    return -1


def size_to(data: bytes, at: int, end: int) -> int:
    """Return the size, padded up to `end`, with which the record at `at` passes its check; 0 if there is none."""
    sizes = range(end - at, max(end - at - 8, HEAD_BYTES - 1), -1)
    return next((size for size in sizes if row_at(size.to_bytes(4, "little") + data[at + 4 : at + size], 0)), 0)


def _fits(sequence: int, kind: int, low: int, high: int) -> bool:
    """Whether a record with that sequence may follow the message `low` and precede `high`: messages use up a sequence,
    other records carry the last one used."""
    return (low < sequence if kind <= _END else low <= sequence) and sequence < high


def last_byte(data: bytes) -> int:
    """Return the number of bytes up to the last one that is not zero."""
    return len(data.rstrip(b"\0"))
