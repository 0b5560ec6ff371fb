"""The retained messages of a group as record batches of Arrow, for half the processor time of `history`.

A chunk of the server becomes a batch at once, without an object for each message. Only bodies in parts are assembled
message by message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from mqfs.client.message import Message
from mqfs.client.subscription import CursorSubscription
from mqfs.client.types import File
from mqfs.model import Buffer
from mqfs.records import headers
from mqfs.records.arrow import BODY, HEADER_LIST, SEQUENCE, STREAM, TIME, ArrowDecoder, Column, zeros
from mqfs.records.columns import ArrowColumns


def _header_map(data: Buffer, columns: ArrowColumns) -> pa.Array:
    if columns.headers is None:
        none = pa.array([], pa.string())
        return pa.MapArray.from_arrays(zeros(columns.rows + 1), none, none)
    lists = HEADER_LIST.array(data, columns)  # null without headers, where both offsets are the same
    keys, values = lists.values.field(0), lists.values.field(1)
    return pa.MapArray.from_arrays(lists.offsets, keys, _texts(values))


def _texts(values: pa.Array) -> pa.Array:
    """Return headers as texts. Those that are not UTF-8, which older stores may have, are decoded as elsewhere in the
    library."""
    try:
        return values.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([value.decode(errors="replace") for value in values.to_pylist()], pa.string())


_COLUMNS = {
    "sequence": SEQUENCE,
    "stream": STREAM,
    "time": TIME,
    "body": BODY,
    "headers": Column(HEADER_LIST.asked, _header_map),
}
SCHEMA = pa.schema(
    [
        pa.field("sequence", pa.int64()),
        pa.field("stream", pa.string()),
        pa.field("time", pa.timestamp("us", "UTC")),
        pa.field("body", pa.binary()),
        pa.field("headers", pa.map_(pa.string(), pa.string())),
    ]
)


class ColumnSubscription(CursorSubscription):
    """A subscription whose items are record batches."""

    _read_bytes = 1 << 19  # a batch costs as much as a thousand messages
    _ready: deque[pa.RecordBatch]
    has_headers = False  # for messages only, and the items are batches

    @staticmethod
    def _sequence_of(batch: pa.RecordBatch) -> int:
        return int(batch.column(0)[0].as_py())

    def _open(self) -> File:
        file = super()._open()
        self._batches = ArrowDecoder(SCHEMA, _COLUMNS)
        self._decoder = self  # type: ignore[assignment]
        return file

    @property
    def has_part(self) -> bool:
        return not self._batches.is_complete

    def feed(self, data: bytes) -> list[pa.RecordBatch]:
        batch = self._batches.feed(data)
        return [batch] if batch.num_rows else []

    def _receive(self, batches: list[pa.RecordBatch], _has_headers: bool) -> None:
        self._ready.extend(batches)
        self._received_to = self._batches.next

    def _get(self, deadline: float | None) -> pa.RecordBatch:
        self._acquire_turn(deadline)
        try:
            while True:
                batch = self._assemble(self._take(deadline))
                if self._exactly:
                    batch = batch.filter(pc.is_in(batch.column(1), pa.array(self._exactly)))
                if batch.num_rows:
                    return batch
        finally:
            self._turn.release()

    def _assemble(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the batch with complete bodies in place of their parts; parts of incomplete bodies are kept back."""
        keys = batch.column(4).keys
        if not self._assembly.is_open and not (len(keys) and pc.any(pc.equal(keys, headers.PART)).as_py()):
            return batch
        whole = [self._assembly.add_part(message) for message in _messages(batch)]
        return _batch([message for message in whole if message is not None])


def _messages(batch: pa.RecordBatch) -> Iterator[Message]:
    times = batch.column(2).cast(pa.int64()).to_pylist()
    columns = [batch.column(i).to_pylist() for i in (0, 1, 3, 4)]
    for sequence, stream, body, texts, time_us in zip(*columns, times, strict=True):
        yield Message(sequence, stream, time_us * 1000, body, dict(texts))


def _batch(messages: Sequence[Message]) -> pa.RecordBatch:
    columns: list[Any] = [
        [m.sequence for m in messages], [m.stream for m in messages], [m.time_ns // 1000 for m in messages],
        [m.body for m in messages], [list(m.headers.items()) for m in messages],
    ]  # fmt: skip
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)], schema=SCHEMA
    )


def reader_of(subscription: ColumnSubscription) -> pa.RecordBatchReader:
    """Return a reader that closes the subscription at its end."""

    def batches() -> Iterator[pa.RecordBatch]:
        with subscription:
            yield from subscription

    return pa.RecordBatchReader.from_batches(SCHEMA, batches())
