"""Records as bytes → record batches of Arrow, column by column.

Owns the types of the columns; one pass of mqfs/log/columns fills their buffers. No loop over records, except without
the C extension. Asks no server, opens no file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from mqfs.errors import DiskFailed
from mqfs.log import columns as gather
from mqfs.log import record
from mqfs.log.columns import HEADERS, SEQUENCES, TIMES, TOPICS, VALUES, Columns, NameTable
from mqfs.log.record import HEAD_BYTES
from mqfs.model import Buffer, Kind

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

Numbers = Any  # a one-dimensional numpy array of integers
Bounds = Mapping[str, tuple[int, int]]  # by stream: [first, end) of the wanted sequences
_NAME = np.dtype([("number", "<u4"), ("size", "<u2")])
_NAMES_KIND_AT = 28
_NO_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_ALL = (0, 1 << 63)
_NOTHING = (0, 0)
_ROOMS = 4  # Spark holds one batch while the next is decoded


class BufferPool:
    """Memory of batches, reused once a batch is released: allocating each costs more than decoding it."""

    def __init__(self) -> None:
        self._rooms: list[bytearray] = []

    def __call__(self, size: int) -> bytearray:
        for room in self._rooms:
            if len(room) >= size and sys.getrefcount(room) <= _IDLE:
                return room
        room = bytearray(size + size // 8)
        self._rooms = [*self._rooms[-_ROOMS + 1 :], room]
        return room


def _idle() -> int:
    """The reference count of a buffer that only the list has."""
    rooms = [bytearray()]
    return next(sys.getrefcount(room) for room in rooms)


_IDLE = _idle()


class ArrowDecoder:
    """Decode chunks of `format record` to batches; the state is an incomplete record."""

    def __init__(self, schema: StructType, group: str, bounds: Bounds | None = None) -> None:
        """`group`: its path from the root, "" for the root; `bounds`: the wanted streams and ranges, None for all."""
        from pyspark.sql.pandas.types import to_arrow_schema

        self.schema: pa.Schema = to_arrow_schema(schema, timezone="UTC")
        self.next = 0  # the sequence after the last record
        self._asked = sum({_ASKED.get(name, 0) for name in self.schema.names})
        self._prefix = f"{group}/" if group else ""
        self._bounds = bounds
        self._names: dict[int, str] = {}  # of streams
        self._table, self._strangers = NameTable.of({}), False
        self._rest = b""
        self._rooms = BufferPool()

    @property
    def clean(self) -> bool:
        """Whether no record is incomplete."""
        return not self._rest

    def restart(self) -> None:
        """Drop an incomplete record: the next chunk is of a new connection."""
        self._rest = b""
        if self._strangers:
            self._tell({})

    def know(self, streams: Mapping[int, tuple[str, int, int]]) -> None:
        """Set the streams of the next chunks, by number: name and bounds. Records of other streams are skipped."""
        self._table = NameTable.of({n: (self._prefix + name, low, high) for n, (name, low, high) in streams.items()})
        self._strangers = True

    def _tell(self, names: Mapping[int, str]) -> None:
        self._names.update(names)
        bounds = self._bounds
        self._table = NameTable.of(
            {
                number: (self._prefix + name, *(_ALL if bounds is None else bounds.get(name, _NOTHING)))
                for number, name in self._names.items()
            }
        )
        self._strangers = False

    def feed(self, data: Buffer) -> pa.RecordBatch:
        """The wanted messages that are complete with this chunk."""
        data = self._rest + bytes(data) if self._rest else data
        at, batches = 0, []
        while at < len(data):
            found = gather.columns(
                data, at, self._table, self._asked, strangers=self._strangers, allocate=self._rooms
            )  # fmt: skip
            if found.end > at:
                self.next = found.last + 1
            if found.rows:
                batches.append(self._batch(data, found))
            at = found.end if found.end == len(data) else self._names_at(data, found.end)
            if at == found.end:
                break
        self._rest = bytes(memoryview(data)[at:])
        return batches[0] if len(batches) == 1 else self._joined(batches)

    def finish(self) -> None:
        """End the input. Raises DiskFailed for an incomplete record."""
        if self._rest:
            raise DiskFailed(f"incomplete record: {len(self._rest)} bytes after sequence {self.next - 1}")

    def _names_at(self, data: Buffer, at: int) -> int:
        """Apply a NAMES record at a position; its end, or `at` without one."""
        if len(data) < at + HEAD_BYTES or data[at + _NAMES_KIND_AT] != Kind.NAMES:
            return at
        size = int.from_bytes(data[at : at + 4], "little")
        found = record.decode(bytes(data[at : at + size])) if at + record.padded(size) <= len(data) else None
        if found is None:
            return at
        body, place, names = found.body, 0, {}
        while place < len(body):
            number, length = np.frombuffer(body, _NAME, 1, place)[0].item()
            names[number] = body[place + 6 : place + 6 + length].decode()
            place += 6 + length
        self._tell(names)
        return at + record.padded(size)

    def _batch(self, data: Buffer, found: Columns) -> pa.RecordBatch:
        if not self.schema.names:  # count() reads no column
            return pa.RecordBatch.from_struct_array(pa.array([{}] * found.rows, pa.struct([])))
        columns = [_COLUMNS[field.name](data, found) for field in self.schema]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _joined(self, batches: list[pa.RecordBatch]) -> pa.RecordBatch:
        """One batch of all, split by NAMES records; an empty one of none."""
        if not batches:
            return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in self.schema], schema=self.schema)
        return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


# ---------------------------------------------------------------- columns


def _plain(kind: pa.DataType, column: str) -> Callable[[Buffer, Columns], pa.Array]:
    return lambda data, found: pa.Array.from_buffers(kind, found.rows, [None, pa.py_buffer(getattr(found, column))])


def _bytes(kind: pa.DataType, ends: str, column: str) -> Callable[[Buffer, Columns], pa.Array]:
    def made(data: Buffer, found: Columns) -> pa.Array:
        buffers = [None, pa.py_buffer(getattr(found, ends)), pa.py_buffer(getattr(found, column))]
        return pa.Array.from_buffers(kind, found.rows, buffers)

    return made


def _zeros(data: Buffer, found: Columns) -> pa.Array:
    return pa.Array.from_buffers(pa.int32(), found.rows, [None, pa.py_buffer(bytes(4 * found.rows))])


def _nulls(data: Buffer, found: Columns) -> pa.Array:
    return pa.nulls(found.rows, pa.binary())


def _headers(data: Buffer, found: Columns) -> pa.Array:
    """The headers of each message, null where it has none. Each pass decodes one header of every message that has one
    left: as many passes as one message has headers."""
    if found.headers is None:
        return pa.nulls(found.rows, _NO_HEADERS)
    raw = np.frombuffer(data, np.uint8)
    sizes = np.frombuffer(found.headers, np.uint16, found.rows)
    at = np.frombuffer(found.positions, np.uint32, found.rows).astype(np.int64) + HEAD_BYTES
    stop = at + sizes
    owners = np.flatnonzero(sizes)
    at, stop = at[owners], stop[owners]
    turns: list[tuple[Numbers, ...]] = []
    while len(owners):
        key = at + 1
        key_end = key + raw[at]
        value = key_end + 2
        value_end = value + raw[key_end] + raw[key_end + 1].astype(np.int64) * 256
        turns.append((owners, key, key_end, value, value_end))
        left = value_end < stop
        owners, at, stop = owners[left], value_end[left], stop[left]
    if not turns:
        return pa.nulls(found.rows, _NO_HEADERS)
    owner, key, key_end, value, value_end = (np.concatenate(column) for column in zip(*turns, strict=True))
    order = np.argsort(key, kind="stable")
    keys = _slices(data, key[order], key_end[order], pa.string())
    values = _slices(data, value[order], value_end[order], pa.binary())
    counts = np.bincount(owner, minlength=found.rows)
    borders = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    pairs = pa.StructArray.from_arrays([keys, values], ["key", "value"])
    return pa.ListArray.from_arrays(pa.array(borders), pairs, mask=pa.array(sizes == 0))


def _slices(data: Buffer, begin: Numbers, end: Numbers, kind: pa.DataType) -> pa.Array:
    """An array of the ascending slices data[begin:end]. The whole buffer becomes an array in which slices and the gaps
    between them alternate; every other element of it is taken."""
    count = len(begin)
    borders = np.empty(2 * count, np.int32)
    borders[0::2], borders[1::2] = begin, end
    whole = pa.Array.from_buffers(kind, 2 * count - 1, [None, pa.py_buffer(borders), pa.py_buffer(data)])
    return whole.take(pa.array(np.arange(0, 2 * count - 1, 2, dtype=np.int32)))


_COLUMNS: dict[str, Callable[[Buffer, Columns], pa.Array]] = {
    "key": _nulls,
    "value": _bytes(pa.binary(), "value_ends", "values"),
    "topic": _bytes(pa.string(), "topic_ends", "topics"),
    "partition": _zeros,
    "offset": _plain(pa.int64(), "sequences"),
    "timestamp": _plain(pa.timestamp("us", "UTC"), "times"),
    "timestampType": _zeros,
    "headers": _headers,
}
_ASKED = {"value": VALUES, "topic": TOPICS, "offset": SEQUENCES, "timestamp": TIMES, "headers": HEADERS}

__all__ = ["ArrowDecoder", "Bounds"]
