"""Record batches of Arrow → the frames of `.batch`, a group at a time, column by column.

Rows are checked; reserved headers are dropped, renamed or refused. No loop over rows; asks no server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from mqfs import limits
from mqfs.records import headers
from mqfs.records.record import HEAD_BYTES
from pyspark_mqfs.catalog import path_of, split
from pyspark_mqfs.options import OptionError

Numbers = Any  # a one-dimensional numpy array of integers

READ_ONLY = ("partition", "offset", "timestamp", "timestampType")  # columns of the reader only
WRITABLE = {
    "value": ("binary", "string"),
    "key": ("binary", "string"),
    "topic": ("string",),
    "headers": (
        "array<struct<key:string,value:binary>>",
        "array<struct<key:string,value:string>>",
    ),
}
RESERVED_POLICIES = ("drop", "keep", "refuse")
RESERVED_PREFIX = "was."  # of a reserved header under "keep"
BATCH_BYTES = 256 << 20  # of one encoding: offsets in an array have 32 bits
_HEAD = np.dtype([("frame", "<u4"), ("name", "<u2"), ("headers", "<u2")])
_SENDER_BYTES = 24  # of the header that the server adds to other headers
_KEY = b"key"


class Frames(NamedTuple):
    """Messages of one group, in order."""

    group: str
    streams: tuple[str, ...]  # the names that are used
    data: Any  # the frames, concatenated
    borders: Numbers  # where each frame begins, and the end of the last
    log_bytes: Numbers  # bytes of each message in a log

    def path(self, row: int) -> str:
        """Return the path of the stream of a message."""
        begin = int(self.borders[row])
        [head] = np.frombuffer(self.data, _HEAD, 1, begin)
        name = memoryview(self.data)[begin + _HEAD.itemsize :][: int(head["name"])]
        return path_of(self.group, bytes(name).decode())


def check_schema(schema: StructType, *, has_topic: bool) -> None:
    """Raise OptionError if rows of the schema cannot be written. `has_topic`: option topic is set."""
    for field in schema.fields:
        kind = field.dataType.simpleString()
        if field.name in READ_ONLY:
            continue
        if field.name not in WRITABLE:
            raise OptionError(f"column {field.name}: unknown to the writer (expected one of: {' '.join(WRITABLE)})")
        if kind not in WRITABLE[field.name]:
            raise OptionError(
                f"column {field.name}: invalid type {kind!r} (expected {' or '.join(WRITABLE[field.name])})"
            )
    names = set(schema.fieldNames())
    if "value" not in names:
        raise OptionError("column value: missing (expected the message, binary or string)")
    if "topic" not in names and not has_topic:
        raise OptionError("no column topic and no option topic (expected GROUP/STREAM in one of them)")


class Encoder:
    """Encodes rows as frames."""

    def __init__(self, stream: str = "", reserved: str = "drop") -> None:
        """`stream`: the path for all messages, instead of the column; `reserved`: a policy of RESERVED_POLICIES for
        headers that only the server sets."""
        self._stream, self._reserved = stream, reserved

    def encode(self, batch: pa.RecordBatch) -> Iterator[Frames]:
        """Yield the rows as frames, in order within each group. Raises OptionError."""
        if not batch.num_rows:
            return
        if batch.nbytes > BATCH_BYTES and batch.num_rows > 1:
            half = batch.num_rows // 2
            yield from self.encode(batch.slice(0, half))
            yield from self.encode(batch.slice(half))
            return
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        values = columns["value"].cast(pa.binary())
        heads = self._heads(columns, batch.num_rows)
        paths, places = self._paths(columns, batch.num_rows)
        _check_values(values, paths, places)
        _check_heads(heads, paths, places)
        groups: dict[str, list[int]] = {}
        for number, path in enumerate(paths):
            groups.setdefault(split(path)[0], []).append(number)
        for group, numbers in groups.items():
            names = pa.array([split(path)[1].encode() for path in paths], pa.binary())
            if len(groups) == 1:
                yield _encode_frames(group, tuple(split(path)[1] for path in paths), values, heads, names.take(places))
                continue
            mask = pa.array(np.isin(np.asarray(places), numbers))
            streams = tuple(split(paths[number])[1] for number in numbers)
            selected = None if heads is None else heads.filter(mask)
            yield _encode_frames(group, streams, values.filter(mask), selected, names.take(places.filter(mask)))

    def _paths(self, columns: Mapping[str, pa.Array], count: int) -> tuple[list[str], pa.Array]:
        """Return the streams that occur, and the index of each row's stream."""
        if self._stream:
            return [self._stream], pa.array(np.zeros(count, np.int32))
        column = columns["topic"]
        if column.null_count:
            raise OptionError("column topic: null in a row (expected GROUP/STREAM, or option topic)")
        coded = column.dictionary_encode()
        return [check_path(path) for path in coded.dictionary.to_pylist()], coded.indices

    def _heads(self, columns: Mapping[str, pa.Array], count: int) -> pa.Array | None:
        """Return the encoded headers of each row; None if no row has any."""
        encoded = []
        if "headers" in columns and columns["headers"].null_count < count:
            encoded.append(self._encode_headers(columns["headers"]))
        if "key" in columns and columns["key"].null_count < count:
            encoded.append(_as_header(columns["key"]))
        if not encoded:
            return None
        heads = encoded[0] if len(encoded) == 1 else pc.binary_join_element_wise(*encoded, b"")
        return heads if pc.max(pc.binary_length(heads)).as_py() else None

    def _encode_headers(self, column: pa.Array) -> pa.Array:
        counts = np.asarray(pc.fill_null(pc.list_value_length(column), 0), np.int64)
        pairs = column.flatten()
        keys, values = pairs.field("key").cast(pa.binary()), pairs.field("value").cast(pa.binary())
        if pairs.null_count or keys.null_count:
            raise OptionError("column headers: null entry or key (expected a key for each)")
        owners = np.repeat(np.arange(len(counts)), counts)
        keys, values, owners = self._apply_policy(keys, pc.fill_null(values, b""), owners)
        flat = _pairs(keys, values)
        ends = np.concatenate(([0], np.cumsum(np.bincount(owners, minlength=len(counts)))))
        borders = _borders(flat)[ends].astype(np.int32)
        return pa.Array.from_buffers(pa.binary(), len(counts), [None, pa.py_buffer(borders), flat.buffers()[2]])

    def _apply_policy(self, keys: pa.Array, values: pa.Array, owners: Numbers) -> tuple[pa.Array, pa.Array, Numbers]:
        if not len(keys):
            return keys, values, owners
        mask = pc.is_in(keys, value_set=_reserved())
        if not pc.any(mask).as_py():
            return keys, values, owners
        if self._reserved == "refuse":
            name = keys.filter(mask)[0].as_py().decode()
            raise OptionError(f"header {name!r}: set by the server (expected option reservedHeaders drop or keep)")
        if self._reserved == "keep":
            renamed = pc.binary_join_element_wise(pa.scalar(RESERVED_PREFIX.encode()), keys, b"")
            return pc.if_else(mask, renamed, keys), values, owners
        rest = pc.invert(mask)
        return keys.filter(rest), values.filter(rest), owners[np.asarray(rest)]


@cache
def _reserved() -> Any:
    """Return the reserved names. They are not made at import: the first value that Arrow makes imports pandas, which
    takes half a second."""
    return pa.array([name.encode() for name in sorted(headers.RESERVED)], pa.binary())


def check_path(path: str) -> str:
    """Check a path: GROUP/STREAM, or STREAM in the root group. Raises OptionError."""
    path = path.strip("/")
    if not path or any(name.startswith(".") or not name for name in path.split("/")):
        raise OptionError(f"invalid topic {path!r} (expected GROUP/STREAM, no leading dots)")
    return path


def _check_values(values: pa.Array, paths: list[str], places: pa.Array) -> None:
    sizes = np.asarray(pc.fill_null(pc.binary_length(values), -1))  # -1: null; an empty message is valid
    least, most = sizes.min(), sizes.max()
    if least >= 0 and most <= limits.MESSAGE_BYTES:
        return
    row = int(sizes.argmin() if least < 0 else sizes.argmax())
    path = paths[places[row].as_py()]
    if least < 0:
        raise OptionError(f"column value: null in a row for {path} (expected a message, which may be empty)")
    limit = limits.MESSAGE_BYTES
    raise OptionError(f"column value: {sizes[row]} bytes in a row for {path} (expected at most {limit})")


def _check_heads(heads: pa.Array | None, paths: list[str], places: pa.Array) -> None:
    if heads is None:
        return
    sizes = np.asarray(pc.binary_length(heads))
    row = int(sizes.argmax())
    if sizes[row] > limits.HEADER_BYTES:
        path = paths[places[row].as_py()]
        raise OptionError(
            f"column headers: {sizes[row]} bytes in a row for {path} (expected at most {limits.HEADER_BYTES})"
        )


def _borders(array: pa.Array) -> Numbers:
    """Return the offsets of the elements of a binary array in its buffer, with the end."""
    return np.frombuffer(array.buffers()[1], np.int32)[array.offset : array.offset + len(array) + 1]


def _fixed(numbers: Numbers, size: int) -> pa.Array:
    """Return numbers of `size` bytes each as a binary array."""
    borders = np.arange(0, size * len(numbers) + 1, size, dtype=np.int32)
    return pa.Array.from_buffers(pa.binary(), len(numbers), [None, pa.py_buffer(borders), pa.py_buffer(numbers)])


def _pairs(keys: pa.Array, values: pa.Array) -> pa.Array:
    """Return each header encoded: `u8 key bytes, key, u16 value bytes, value`."""
    lengths, sizes = np.asarray(pc.binary_length(keys)), np.asarray(pc.binary_length(values))
    if len(lengths) and (lengths.max() > 255 or lengths.min() < 1 or sizes.max() > 65_535):
        raise OptionError(
            "column headers: key or value too long (expected keys of 1 to 255 bytes, values of at most 65535)"
        )
    one, two = _fixed(lengths.astype("u1"), 1), _fixed(sizes.astype("<u2"), 2)
    return pc.binary_join_element_wise(one, keys, two, values, b"")


def _as_header(column: pa.Array) -> pa.Array:
    """Return column key as the header `key`, and nothing where it is null."""
    present = column.is_valid()
    texts = pc.fill_null(column.cast(pa.binary()), b"")
    names = pa.array([_KEY], pa.binary()).take(pa.array(np.zeros(len(column), np.int32)))
    return pc.if_else(present, _pairs(names, texts), b"")


def _encode_frames(
    group: str, streams: tuple[str, ...], values: pa.Array, heads: pa.Array | None, names: pa.Array
) -> Frames:
    count = len(values)
    body_sizes = np.asarray(pc.binary_length(values)).astype(np.int64)
    name_sizes = np.asarray(pc.binary_length(names)).astype(np.int64)
    header_sizes = np.zeros(count, np.int64) if heads is None else np.asarray(pc.binary_length(heads)).astype(np.int64)
    table = np.empty(count, _HEAD)
    table["frame"] = _HEAD.itemsize + name_sizes + header_sizes + body_sizes
    table["name"], table["headers"] = name_sizes, header_sizes
    parts = [_fixed(table, _HEAD.itemsize), names, *([] if heads is None else [heads]), values]
    joined = pc.binary_join_element_wise(*parts, b"")
    log_bytes = (HEAD_BYTES + np.where(header_sizes, header_sizes + _SENDER_BYTES, 0) + body_sizes + 7) & ~7
    return Frames(group, streams, joined.buffers()[2], _borders(joined).astype(np.int64), log_bytes)
