"""The task of a read: ranges of logs, over 9P or from segments, as record batches.

Each range is read whole and once, over reconnects, and lost messages are reported. Ranges are known in advance: a task
never waits for a message to be written.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress

import attrs
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from mqfs.errors import Denied, Disconnected, FellBehind, NotDirectory, NotFound, NotPermitted
from mqfs.ninep.client.connection import Client, File, Slot
from mqfs.ninep.codec.messages import Fcall, Rread, Tread
from mqfs.ninep.codec.wire import IO_OVERHEAD
from mqfs.records.arrow import BODY, HEADER_LIST, SEQUENCE, STREAM, TIME, ArrowDecoder, Bounds, Column, zeros
from mqfs.serving import memory
from pyspark_mqfs.catalog import ServerCatalog, measure, path_of, select, stream_positions
from pyspark_mqfs.connection import FIRST_PAUSE_S, LONGEST_PAUSE_S, Link, Server, read_text
from pyspark_mqfs.options import OptionError
from pyspark_mqfs.plan import Range, Slice
from pyspark_mqfs.segments import Segments, check_store

log = logging.getLogger(__name__)
IN_FLIGHT = 2  # parallel reads


_frozen: list[bool] = []


def _freeze_modules() -> None:
    """Exempt modules from the garbage collection after each task, which takes 40 ms; once in each worker process."""
    if not _frozen and TaskContext.get() is not None:
        _frozen.append(True)
        gc.freeze()
        memory.keep()


class DataLoss(RuntimeError):
    """Messages of a range are no longer retained."""


@attrs.frozen
class Task:
    """The parameters for reading a slice; pickled with each task."""

    server: Server
    schema: StructType
    strict: bool  # failOnDataLoss
    path: str = ""  # path of the store, if it is visible here

    def batches(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        _freeze_modules()
        with self.server.link() as link:
            for range_ in piece.ranges:
                yield from _RangeReader(self, link, range_, piece.store).batches()


def decoder(schema: StructType, group: str, bounds: Bounds | None = None) -> ArrowDecoder:
    """Return a decoder of a group's `format record` into Spark's columns. `group`: its path from the root, "" for the
    root."""
    return ArrowDecoder(to_arrow_schema(schema, timezone="UTC"), _COLUMNS, group, bounds)


_COLUMNS = {
    "key": Column(0, lambda _, columns: pa.nulls(columns.rows, pa.binary())),
    "value": BODY,
    "topic": STREAM,
    "partition": Column(0, lambda _, columns: zeros(columns.rows)),
    "offset": SEQUENCE,
    "timestamp": TIME,
    "timestampType": Column(0, lambda _, columns: zeros(columns.rows)),
    "headers": HEADER_LIST,
}


class _RangeReader:
    """Reads one range."""

    def __init__(self, task: Task, link: Link, wanted: Range, store: str) -> None:
        self.task, self.link, self.range, self.store = task, link, wanted, store
        self.position = wanted.low
        self._decoder = decoder(task.schema, wanted.group, wanted.bounds())

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the batches of the range; after a failure, reconnect and resume. Raises OptionError at the deadline."""
        retry_s = self.task.server.retry_s
        deadline, pause = time.monotonic() + retry_s, FIRST_PAUSE_S
        while True:
            try:
                for batch in self._attempt():
                    deadline, pause = time.monotonic() + retry_s, FIRST_PAUSE_S
                    yield batch
                return
            except (OSError, Disconnected) as error:
                self.link.close()
                self._decoder.restart()
                if time.monotonic() + pause > deadline:
                    raise self.link.timeout_error(error) from None
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _read_segments(self) -> Iterator[pa.RecordBatch]:
        """Yield batches from sealed segments, if these are visible."""
        path = self.task.path
        if path and self.range.plain and check_store(path, self.store):
            segments = Segments(path, self.range.bucket)
            for position, batch in segments.batches(self.range, self._decoder, self.position):
                self.position = position
                if batch.num_rows:
                    yield batch
            self._decoder.restart()

    def _attempt(self) -> Iterator[pa.RecordBatch]:
        yield from self._read_segments()
        client = self.link.client()
        try:
            with client.open(path_of(self.range.group, ".cursor"), "r+") as file:
                yield from self._read(client, file)
            self._decoder.finish()
            self._check_losses(client)
        except (NotFound, NotDirectory) as error:
            self._on_loss(f"group {self.range.group or '/'}: {error}")
            if self._group_is_there(client):  # only a stream was removed
                self._decoder.restart()
                yield from self._attempt()

    def _read(self, client: Client, file: File) -> Iterator[pa.RecordBatch]:
        present = self._present(client)
        names = [name for name in self.range.streams if name in present]
        if not names or self.position >= self.range.high:
            return
        select(file, names)
        file.write(f"format record\nseek {self.position}\nuntil {self.range.high - 1}\n".encode())
        window = Window(client, file, self.task.server.retry_s or None)
        while True:
            try:
                data = window.next()
            except FellBehind as error:
                self._on_loss(str(error))
                continue
            if not data:
                window.drain()
                return
            batch = self._decoder.feed(data)
            self.position = max(self.position, self._decoder.next)
            if batch.num_rows:
                yield batch

    def _present(self, client: Client) -> dict[str, Mapping[str, int | None]]:
        """Return the positions of those streams of the range that exist and are the planned ones. It is a loss if a
        stream is missing, or if another stream or group has its name."""
        read = stream_positions(client, self.range.group)
        if read["store"] != self.store:
            raise wrong_store(self.store, str(read["store"]), self.task.server.address)
        if read["group"] != self.range.bucket:
            self._on_loss(f"group {self.range.group or '/'} was removed and created again")
            return {}
        rows: dict[str, Mapping[str, int | None]] = read["streams"]  # type: ignore[assignment]
        present = {}
        for name, (number, _) in self.range.numbers.items():
            if name not in rows:
                self._on_loss(f"{path_of(self.range.group, name)} was removed")
            elif rows[name]["number"] != number:
                self._on_loss(f"{path_of(self.range.group, name)} was removed and created again")
            else:
                present[name] = rows[name]
        return present

    def _group_is_there(self, client: Client) -> bool:
        try:
            client.stat(path_of(self.range.group, ".stats"))
        except (NotFound, NotDirectory):
            return False
        return True

    def _check_losses(self, client: Client) -> None:
        """Check, after reading, that no message of the range was removed before it was read."""
        for name, row in self._present(client).items():
            low, high = self.range.streams[name]
            if has_lost_messages(client, self.range.group, name, low, high, row["floor"] or 0, row["cut"] or 0):
                self._on_loss(loss_of(path_of(self.range.group, name), low, min(high, row["floor"] or 0)))

    def _on_loss(self, loss: str) -> None:
        if self.task.strict:
            raise data_loss(loss)
        log.warning("%s", loss)


class Window:
    """Pipelined reads of one file: the next is in flight while a reply is decoded."""

    def __init__(self, client: Client, file: File, timeout: float | None) -> None:
        self._client, self._timeout = client, timeout
        self._request = Tread(0, file.channel.fid, 0, client.caller.msize - IO_OVERHEAD - 1)
        self._slots: deque[Slot] = deque()

    def next(self) -> bytes:
        while len(self._slots) < IN_FLIGHT:
            self._slots += self._client.send([self._request])
        reply = self._answer()
        assert isinstance(reply, Rread)
        return reply.data

    def drain(self) -> None:
        """Receive the replies in flight."""
        while self._slots:
            self._answer()

    def _answer(self) -> Fcall:
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        return self._client.answer(self._slots.popleft(), deadline)


def has_lost_messages(client: Client, group: str, name: str, low: int, high: int, floor: int, cut: int) -> bool:
    """Whether messages of [low, high) of a stream are no longer retained."""
    if floor <= low or cut > low:
        return floor > low
    had_some = bool(measure(client, group, [name], str(low), min(high, floor), "0"))
    return had_some and not _only_replaces(client, group)


def _only_replaces(client: Client, group: str) -> bool:
    """Whether messages below a floor were only replaced by later messages of their keys, which is no loss: in a group
    with `replay key` and without `ttl`, which raises floors as well. It is rarely called. False if the user may not
    read `ctl`."""
    with suppress(Denied, NotPermitted):
        lines = read_text(client, path_of(group, "ctl")).split("\n")
        return "replay key" in lines and "ttl 0" in lines
    return False


def check_losses(
    client: Client,
    catalog: ServerCatalog,
    start: dict[str, int],
    end: dict[str, int],
    *,
    strict: bool,
    new: Collection[str] = (),
) -> None:
    """Raise DataLoss, or warn, for messages between two positions that are no longer retained. `new`: the paths of
    streams that no earlier batch has read."""
    known = {path: (group, stream) for path, group, stream in catalog.streams()}
    for path, low in start.items():
        high = end.get(path, low)
        loss = ""
        if path not in known:
            read = f"to be read from sequence {low}" if path in new else f"read up to sequence {low}"
            loss = f"{path}, {read}, was removed or is not selected"
        else:
            group, stream = known[path]
            name = path.rpartition("/")[2]
            if low < high and has_lost_messages(client, group.path, name, low, high, stream.floor, stream.cut):
                loss = loss_of(path, low, min(high, stream.floor))
        if loss and strict:
            raise data_loss(loss)
        if loss:
            log.warning("%s", loss)


def loss_of(path: str, low: int, high: int) -> str:
    return f"{path}: sequences {low} to {high - 1} are no longer retained"


def data_loss(loss: str) -> DataLoss:
    return DataLoss(f"data loss: {loss} (to continue: option failOnDataLoss false)")


def wrong_store(expected: str, actual: str, address: str) -> OptionError:
    return OptionError(
        f"option address {address!r}: store {actual} (expected store {expected}, of the checkpoint; or another"
        " checkpointLocation)"
    )
