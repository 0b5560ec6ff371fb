"""Records as bytes → record batches of Arrow, column by column.

Owns the gathering: where records lie is told by one pass in C, and everything else is done on whole columns. There is
no loop over records here, but where the C part is missing. It asks no server and opens no file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from mqfs import record, ring
from mqfs.errors import DiskFailed
from mqfs.record import HEAD_BYTES
from mqfs.types import Kind

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

Numbers = Any  # a one-dimensional numpy array of integers
_NAME = np.dtype([("number", "<u4"), ("size", "<u2")])
_NAMES_KIND_AT = 28
_NO_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


class Rows(NamedTuple):
    """Messages in a buffer, column by column."""

    sequences: Numbers
    times: Numbers
    positions: Numbers
    bodies: Numbers
    streams: Numbers
    headers: Numbers
    kinds: Numbers

    def where(self, mask: Numbers) -> Rows:
        return self if mask.all() else Rows(*(column[mask] for column in self))


_TABLE = 1 << 16  # numbers of streams up to here are looked up in a table, which is five times as fast as sorting


def distinct(streams: Numbers) -> tuple[Numbers, Numbers]:
    """The different numbers, ascending, and of each row which it is."""
    most = int(streams.max()) if len(streams) else 0
    if not len(streams) or most >= _TABLE:
        numbers, places = np.unique(streams, return_inverse=True)
        return numbers, places
    numbers = np.flatnonzero(np.bincount(streams, minlength=most + 1))
    table = np.empty(most + 1, np.int64)
    table[numbers] = np.arange(len(numbers))
    return numbers, table[streams]


_TYPES = {"sequences": "u8", "times": "i8", "positions": "u4", "bodies": "u4", "streams": "u4", "headers": "u2"}


def _scanned(data: memoryview, at: int) -> tuple[int, Rows]:
    """The run of records at `at`, and where it ends."""
    if ring.MISSING:
        return _walked(data, at)
    columns = ring.scan(data[at:], at)
    arrays = [np.frombuffer(getattr(columns, name), dtype=kind) for name, kind in _TYPES.items()]
    return at + columns.end, Rows(*[*arrays, np.frombuffer(columns.kinds, "u1")])


def _walked(data: memoryview, at: int) -> tuple[int, Rows]:
    """The same without the C part."""
    raw, rows = bytes(data), []
    while (row := record.row_at(raw, at)) is not None and at + record.padded(row.size) <= len(raw):
        rows.append((row.sequence, row.time_ns, row.position, row.body, row.stream, row.headers, row.kind))
        at += record.padded(row.size)
    columns = list(zip(*rows, strict=True)) or [()] * 7
    return at, Rows(*(np.array(c, dtype=k) for c, k in zip(columns, [*_TYPES.values(), "u1"], strict=True)))


class Gather:
    """Bytes of `format record`, as they come, to batches: the state is what of a record has not come yet."""

    def __init__(self, schema: StructType, group: str) -> None:
        """`group`: its path from the root, "" for the root itself."""
        from pyspark.sql.pandas.types import to_arrow_schema

        self.schema: pa.Schema = to_arrow_schema(schema, timezone="UTC")
        self.names: dict[int, str] = {}  # of streams
        self.next = 0  # the sequence behind the last record that was seen
        self._prefix = f"{group}/" if group else ""
        self._rest = b""

    @property
    def clean(self) -> bool:
        """All that came was whole records."""
        return not self._rest

    def restart(self) -> None:
        """What comes next comes from a new connection."""
        self._rest = b""

    def feed(self, data: bytes, wanted: Callable[[Rows, Mapping[int, str]], Numbers] | None = None) -> pa.RecordBatch:
        """The messages that are whole now, but those that `wanted` (a mask over them) leaves out."""
        data = self._rest + data if self._rest else data
        view, at, runs = memoryview(data), 0, []
        while at < len(data):
            end, rows = _scanned(view, at)
            if len(rows.sequences):
                runs.append(rows)
            at = end if end == len(data) else self._names_at(data, end)
            if at == end:
                break
        self._rest = bytes(view[at:])
        return self._batch(data, _joined(runs), wanted)

    def finish(self) -> None:
        """Nothing more comes. DiskFailed where a record is not whole."""
        if self._rest:
            raise DiskFailed(f"{len(self._rest)} bytes behind sequence {self.next - 1} are no whole record")

    def _names_at(self, data: bytes, at: int) -> int:
        """Take a record of names; where it ends, or `at` where none is there."""
        if len(data) < at + HEAD_BYTES or data[at + _NAMES_KIND_AT] != Kind.NAMES:
            return at
        size = int.from_bytes(data[at : at + 4], "little")
        found = record.decode(data[at : at + size]) if at + record.padded(size) <= len(data) else None
        if found is None:
            return at
        body, place = found.body, 0
        while place < len(body):
            number, length = np.frombuffer(body, _NAME, 1, place)[0].item()
            self.names[number] = body[place + 6 : place + 6 + length].decode()
            place += 6 + length
        return at + record.padded(size)

    def _batch(
        self, data: bytes, rows: Rows, wanted: Callable[[Rows, Mapping[int, str]], Numbers] | None
    ) -> pa.RecordBatch:
        if len(rows.sequences):
            self.next = int(rows.sequences[-1]) + 1
        rows = rows.where(rows.kinds == Kind.MESSAGE)
        if wanted is not None and len(rows.sequences):
            rows = rows.where(wanted(rows, self.names))
        columns = [_COLUMNS[field.name](self, data, rows).cast(field.type) for field in self.schema]
        if not columns:  # count() of nothing but rows
            return pa.RecordBatch.from_struct_array(pa.array([{}] * len(rows.sequences), pa.struct([])))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    # ------------------------------------------------------------ columns

    def _stream(self, data: bytes, rows: Rows) -> pa.Array:
        numbers, places = distinct(rows.streams)
        names = pa.array([self._prefix + self.names[int(number)] for number in numbers], pa.string())
        return pa.DictionaryArray.from_arrays(pa.array(places.astype(np.int32)), names).dictionary_decode()

    def _value(self, data: bytes, rows: Rows) -> pa.Array:
        begin = rows.positions.astype(np.int64) + HEAD_BYTES + rows.headers
        return _slices(data, begin, begin + rows.bodies, pa.binary())

    def _headers(self, data: bytes, rows: Rows) -> pa.Array:
        if not rows.headers.any():
            return pa.nulls(len(rows.sequences), _NO_HEADERS)
        return _headers(data, rows)


def _joined(runs: list[Rows]) -> Rows:
    if len(runs) == 1:
        return runs[0]
    if not runs:
        return Rows(*(np.empty(0, kind) for kind in [*_TYPES.values(), "u1"]))
    return Rows(*(np.concatenate(columns) for columns in zip(*runs, strict=True)))


def _slices(data: bytes, begin: Numbers, end: Numbers, kind: pa.DataType) -> pa.Array:
    """An array of data[begin:end], which ascend: the whole buffer as one array in which every other element is the gap
    between two slices, and of that every other element."""
    count = len(begin)
    if not count:
        return pa.array([], kind)
    borders = np.empty(2 * count, np.int32)
    borders[0::2], borders[1::2] = begin, end
    whole = pa.Array.from_buffers(kind, 2 * count - 1, [None, pa.py_buffer(borders), pa.py_buffer(data)])
    return whole.take(pa.array(np.arange(0, 2 * count - 1, 2, dtype=np.int32)))


def _headers(data: bytes, rows: Rows) -> pa.Array:
    """The headers of each message, null where it has none. Each turn takes one header of every message that has one
    left: as many turns as the message with the most has headers."""
    raw = np.frombuffer(data, np.uint8)
    at = rows.positions.astype(np.int64) + HEAD_BYTES
    stop = at + rows.headers
    owners = np.flatnonzero(rows.headers)
    at, stop = at[owners], stop[owners]
    found: list[tuple[Numbers, ...]] = []
    while len(owners):
        key = at + 1
        key_end = key + raw[at]
        value = key_end + 2
        value_end = value + raw[key_end] + raw[key_end + 1].astype(np.int64) * 256
        found.append((owners, key, key_end, value, value_end))
        left = value_end < stop
        owners, at, stop = owners[left], value_end[left], stop[left]
    owner, key, key_end, value, value_end = (np.concatenate(column) for column in zip(*found, strict=True))
    order = np.argsort(key, kind="stable")
    keys = _slices(data, key[order], key_end[order], pa.string())
    values = _slices(data, value[order], value_end[order], pa.binary())
    counts = np.bincount(owner, minlength=len(rows.headers))
    borders = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    empty = pa.array(rows.headers == 0)
    pairs = pa.StructArray.from_arrays([keys, values], ["key", "value"])
    return pa.ListArray.from_arrays(pa.array(borders), pairs, mask=empty)


def _timestamp(gather: Gather, data: bytes, rows: Rows) -> pa.Array:
    return pa.array(rows.times // 1_000).cast(pa.timestamp("us", "UTC"))


def _zeros(gather: Gather, data: bytes, rows: Rows) -> pa.Array:
    return pa.array(np.zeros(len(rows.sequences), np.int32))


_COLUMNS: dict[str, Callable[[Gather, bytes, Rows], pa.Array]] = {
    "key": lambda gather, data, rows: pa.nulls(len(rows.sequences), pa.binary()),
    "value": Gather._value,
    "topic": Gather._stream,
    "partition": _zeros,
    "offset": lambda gather, data, rows: pa.array(rows.sequences.astype(np.int64)),
    "timestamp": _timestamp,
    "timestampType": _zeros,
    "headers": Gather._headers,
}

__all__ = ["Gather", "Rows", "distinct"]
