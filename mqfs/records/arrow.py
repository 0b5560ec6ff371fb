"""Chunks of `format record` → record batches of Arrow, column by column.

One pass of columns.py fills the buffers of all columns. No loop over records, except without the C extension. The
caller, the library or Spark, chooses the columns and their names. No server is asked, and no file is opened.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from mqfs.errors import DiskFailed
from mqfs.model import Buffer, Kind
from mqfs.records import record
from mqfs.records.columns import HEADERS, SEQUENCES, TIMES, TOPICS, VALUES, ArrowColumns, NameTable
from mqfs.records.columns import columns as fill_columns
from mqfs.records.record import HEAD_BYTES

Numbers = Any  # a one-dimensional numpy array of integers
Bounds = Mapping[str, tuple[int, int]]  # by stream: [first, end) of the wanted sequences
_NAME = np.dtype([("number", "<u4"), ("size", "<u2")])
_NAMES_KIND_AT = 28
_HEADERS_TYPE = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_ALL = (0, 1 << 63)
_NOTHING = (0, 0)
_BUFFERS = 4  # Spark holds one batch while the next is decoded


class Column(NamedTuple):
    """A column of Arrow, and how it is made."""

    asked: int  # the bit of columns.py
    array: Callable[[Buffer, ArrowColumns], pa.Array]


class BufferPool:
    """Memory of batches, reused once a batch is released: allocating each costs more than decoding it."""

    def __init__(self) -> None:
        self._buffers: list[bytearray] = []

    def __call__(self, size: int) -> bytearray:
        for buffer in self._buffers:
            if len(buffer) >= size and sys.getrefcount(buffer) <= _IDLE:
                return buffer
        buffer = bytearray(size + size // 8)
        self._buffers = [*self._buffers[-_BUFFERS + 1 :], buffer]
        return buffer


def _idle() -> int:
    """Return the reference count of a buffer that only the list refers to."""
    buffers = [bytearray()]
    return next(sys.getrefcount(buffer) for buffer in buffers)


_IDLE = _idle()


class ArrowDecoder:
    """Decodes chunks of `format record` to batches; its state is an incomplete record."""

    def __init__(
        self, schema: pa.Schema, columns: Mapping[str, Column], group: str = "", bounds: Bounds | None = None
    ) -> None:
        """`columns`: for each name in the schema; `group`: path put before the streams' names, "" for none; `bounds`:
        the wanted streams and ranges, None for all."""
        self.schema, self._columns = schema, [columns[name] for name in schema.names]
        self.next = 0  # the sequence after the last record
        self._asked = sum({column.asked for column in self._columns})
        self._prefix = f"{group}/" if group else ""
        self._bounds = bounds
        self._names: dict[int, str] = {}  # of streams
        self._table, self._skip_unknown = NameTable.of({}), False
        self._rest = b""
        self._buffers = BufferPool()

    @property
    def is_complete(self) -> bool:
        """Whether the input so far ends with a complete record."""
        return not self._rest

    def restart(self) -> None:
        """Drop an incomplete record: the next chunk is of a new connection."""
        self._rest = b""
        if self._skip_unknown:
            self._add_names({})

    def set_streams(self, streams: Mapping[int, tuple[str, int, int]]) -> None:
        """Set the streams of the next chunks, by number: name and bounds. Records of other streams are skipped."""
        self._table = NameTable.of({n: (self._prefix + name, low, high) for n, (name, low, high) in streams.items()})
        self._skip_unknown = True

    def _add_names(self, names: Mapping[int, str]) -> None:
        self._names.update(names)
        bounds = self._bounds
        self._table = NameTable.of(
            {
                number: (self._prefix + name, *(_ALL if bounds is None else bounds.get(name, _NOTHING)))
                for number, name in self._names.items()
            }
        )
        self._skip_unknown = False

    def feed(self, data: Buffer) -> pa.RecordBatch:
        """Return the wanted messages that are complete with this chunk."""
        data = self._rest + bytes(data) if self._rest else data
        at, batches = 0, []
        while at < len(data):
            columns = fill_columns(
                data, at, self._table, self._asked, strangers=self._skip_unknown, allocate=self._buffers
            )  # fmt: skip
            if columns.end > at:
                self.next = columns.last + 1
            if columns.rows:
                batches.append(self._batch(data, columns))
            at = columns.end if columns.end == len(data) else self._names_at(data, columns.end)
            if at == columns.end:
                break
        self._rest = bytes(memoryview(data)[at:])
        return batches[0] if len(batches) == 1 else self._merge(batches)

    def finish(self) -> None:
        """End the input. Raises DiskFailed for an incomplete record."""
        if self._rest:
            raise DiskFailed(f"incomplete record: {len(self._rest)} bytes after sequence {self.next - 1}")

    def _names_at(self, data: Buffer, at: int) -> int:
        """Apply a NAMES record at a position; return its end, or `at` if there is no complete one."""
        if len(data) < at + HEAD_BYTES or data[at + _NAMES_KIND_AT] != Kind.NAMES:
            return at
        size = int.from_bytes(data[at : at + 4], "little")
        names_record = record.decode(bytes(data[at : at + size])) if at + record.padded(size) <= len(data) else None
        if names_record is None:
            return at
        body, start, names = names_record.body, 0, {}
        while start < len(body):
            number, length = np.frombuffer(body, _NAME, 1, start)[0].item()
            names[number] = body[start + 6 : start + 6 + length].decode()
            start += 6 + length
        self._add_names(names)
        return at + record.padded(size)

    def _batch(self, data: Buffer, columns: ArrowColumns) -> pa.RecordBatch:
        if not self.schema.names:  # count() reads no column
            return pa.RecordBatch.from_struct_array(pa.array([{}] * columns.rows, pa.struct([])))
        arrays = [column.array(data, columns) for column in self._columns]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _merge(self, batches: list[pa.RecordBatch]) -> pa.RecordBatch:
        """Return one batch of all, since NAMES records split a chunk; an empty batch if there is none."""
        if not batches:
            return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in self.schema], schema=self.schema)
        return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


# ---------------------------------------------------------------- columns


def _plain(kind: pa.DataType, column: str) -> Callable[[Buffer, ArrowColumns], pa.Array]:
    return lambda data, columns: pa.Array.from_buffers(
        kind, columns.rows, [None, pa.py_buffer(getattr(columns, column))]
    )


def _bytes(kind: pa.DataType, ends: str, column: str) -> Callable[[Buffer, ArrowColumns], pa.Array]:
    def array_of(data: Buffer, columns: ArrowColumns) -> pa.Array:
        buffers = [None, pa.py_buffer(getattr(columns, ends)), pa.py_buffer(getattr(columns, column))]
        return pa.Array.from_buffers(kind, columns.rows, buffers)

    return array_of


def zeros(count: int) -> pa.Array:
    return pa.Array.from_buffers(pa.int32(), count, [None, pa.py_buffer(bytes(4 * count))])


def _headers(data: Buffer, columns: ArrowColumns) -> pa.Array:
    """Return the headers of each message, null where it has none. Each pass decodes the next header of every message,
    so there are as many passes as headers in one message."""
    if columns.headers is None:
        return pa.nulls(columns.rows, _HEADERS_TYPE)
    raw = np.frombuffer(data, np.uint8)
    sizes = np.frombuffer(columns.headers, np.uint16, columns.rows)
    at = np.frombuffer(columns.positions, np.uint32, columns.rows).astype(np.int64) + HEAD_BYTES
    stop = at + sizes
    owners = np.flatnonzero(sizes)
    at, stop = at[owners], stop[owners]
    passes: list[tuple[Numbers, ...]] = []
    while len(owners):
        key = at + 1
        key_end = key + raw[at]
        value = key_end + 2
        value_end = value + raw[key_end] + raw[key_end + 1].astype(np.int64) * 256
        passes.append((owners, key, key_end, value, value_end))
        left = value_end < stop
        owners, at, stop = owners[left], value_end[left], stop[left]
    if not passes:
        return pa.nulls(columns.rows, _HEADERS_TYPE)
    owner, key, key_end, value, value_end = (np.concatenate(column) for column in zip(*passes, strict=True))
    order = np.argsort(key, kind="stable")
    keys = _slices(data, key[order], key_end[order], pa.string())
    values = _slices(data, value[order], value_end[order], pa.binary())
    counts = np.bincount(owner, minlength=columns.rows)
    borders = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    pairs = pa.StructArray.from_arrays([keys, values], ["key", "value"])
    return pa.ListArray.from_arrays(pa.array(borders), pairs, mask=pa.array(sizes == 0))


def _slices(data: Buffer, begin: Numbers, end: Numbers, kind: pa.DataType) -> pa.Array:
    """Return an array of the ascending slices data[begin:end]. The whole buffer becomes an array in which slices and
    the gaps between them alternate; every other element of it is taken."""
    count = len(begin)
    borders = np.empty(2 * count, np.int32)
    borders[0::2], borders[1::2] = begin, end
    whole = pa.Array.from_buffers(kind, 2 * count - 1, [None, pa.py_buffer(borders), pa.py_buffer(data)])
    return whole.take(pa.array(np.arange(0, 2 * count - 1, 2, dtype=np.int32)))


SEQUENCE = Column(SEQUENCES, _plain(pa.int64(), "sequences"))
TIME = Column(TIMES, _plain(pa.timestamp("us", "UTC"), "times"))
STREAM = Column(TOPICS, _bytes(pa.string(), "topic_ends", "topics"))
BODY = Column(VALUES, _bytes(pa.binary(), "value_ends", "values"))
HEADER_LIST = Column(HEADERS, _headers)
