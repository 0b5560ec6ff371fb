"""The stream reader: positions, triggers, and the consumers of the query.

The checkpoint has its offsets: the uuid of the store, the name of the consumer, and by stream the next sequence and the
identity of the stream. An offset also has the data to repeat the batch that ends there (BATCH); older checkpoints lack
it. One process of the driver has this object and its connection; tasks have a copy of `task`.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from mqfs.ninep.client.connection import Client
from pyspark_mqfs import schema
from pyspark_mqfs.catalog import Selection, ServerCatalog, path_of
from pyspark_mqfs.connection import Server
from pyspark_mqfs.consumers import Consumers
from pyspark_mqfs.options import READ, OptionError, Options
from pyspark_mqfs.plan import PartitionLimits, Slice, count_messages, limit_end, ranges
from pyspark_mqfs.positions import LATEST, Bound
from pyspark_mqfs.task import Task, check_losses, data_loss, wrong_store

BATCH_ONLY = ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp")
log = logging.getLogger(__name__)
DELAY_S = 900.0  # maxTriggerDelay, as in Kafka
BATCH = ("starts", "tasks")  # keys of an offset: where streams begin that are new in the batch; the limits of its tasks
Offset = dict[str, Any]


@attrs.define
class TriggerPolicy:
    """Decides when to start a batch: with enough messages, or after a delay. The first batch starts at once, as the age
    of its messages is unknown."""

    least: int  # messages; 0: any number
    delay_s: float
    last: float = -1e9  # when the last batch started

    @classmethod
    def of(cls, options: Options) -> TriggerPolicy:
        least, most = options.number("minOffsetsPerTrigger", 0) or 0, options.number("maxOffsetsPerTrigger")
        if most is not None and least > most:
            raise OptionError(
                f"option minOffsetsPerTrigger: invalid value {str(least)!r}"
                f" (expected at most maxOffsetsPerTrigger, {most})"
            )
        if not least and "maxTriggerDelay" in options:
            raise OptionError("option maxTriggerDelay: not without minOffsetsPerTrigger")
        return cls(least, options.seconds("maxTriggerDelay", DELAY_S))

    def is_due(self) -> bool:
        return not self.least or time.monotonic() - self.last >= self.delay_s

    def on_batch(self) -> None:
        self.last = time.monotonic()


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads micro-batches of the messages since the last one."""

    def __init__(self, values: Mapping[str, str], wanted: StructType) -> None:
        options = Options(values, READ, "the reader")
        for name in BATCH_ONLY:
            if name in options:
                raise OptionError(f"option {name}: only for batch reads")
        server, self.selection = Server.of(options), Selection.of(options)
        self.start = Bound.starting(options, LATEST)
        self.partition_limits = PartitionLimits.of(options)
        self.max_messages, self.max_bytes = options.number("maxOffsetsPerTrigger"), options.size("maxBytesPerTrigger")
        self.trigger = TriggerPolicy.of(options)
        self.strict = options.flag("failOnDataLoss", True)
        self.consumer = options.text("consumer")
        self.name = self.consumer or f"{options.text('groupIdPrefix', 'spark')}-{uuid.uuid4().hex[:12]}"
        wanted = schema.check_columns(wanted, headers=options.flag("includeHeaders", False))
        self.task = Task(server, wanted, self.strict, options.text("path"))
        self.link = server.link()
        self.consumers = Consumers(required=bool(self.consumer), timeout_s=server.retry_s)
        self.end_limits: dict[str, int] | None = None  # Trigger.AvailableNow: the ends at the start of the query
        self.positions: dict[str, int] = {}  # the positions of its consumers
        self.turn = 0  # limited batches so far
        self.latest: Offset | None = None  # the latest offset
        self.initial: Offset | None = None  # the first offset of a new query, until its first batch is planned

    def __getstate__(self) -> dict[str, Any]:
        return {"task": self.task}

    # ------------------------------------------------------------ positions

    def initialOffset(self) -> Offset:
        """Return the first offset of a new query. Creates its consumers, which retain messages for the first batch."""

        def begin(client: Client) -> Offset:
            catalog = self.selection.catalog(client)
            self._warn_missing(catalog)
            start = self.start.positions(client, catalog)
            self.consumers.move(client, self.name, catalog, start)
            self.initial = _offset(catalog, {"consumer": self.name}, start)
            return self.initial

        return self.link.with_retry(begin)

    def _warn_missing(self, catalog: ServerCatalog) -> None:
        """Warn of missing streams, which may be created later or have a wrong name."""
        there = {path for path, _, _ in catalog.streams()}
        if missing := [path for path in self.selection.paths if path not in there]:
            option = self.selection.option
            log.warning("option %s: no stream %r yet; waiting for it", option, missing[0])

    def getDefaultReadLimit(self) -> ReadLimit:
        if self.max_messages is not None:
            return ReadMaxRows(self.max_messages)
        if self.max_bytes is not None:
            return ReadMaxBytes(self.max_bytes)
        return ReadMinRows(self.trigger.least) if self.trigger.least else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        def look(client: Client) -> dict[str, int]:
            return _ends(self.selection.catalog(client), {})

        self.end_limits = self.link.with_retry(look)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """Return the end of the next batch."""

        def look(client: Client) -> Offset:
            if self._starts_empty(start):
                return start
            catalog = self._read_catalog(client, start)
            before = self._known_positions(catalog, start)
            self._move_consumers(client, catalog, start["consumer"], before)  # the batch before is committed
            end = self._ends(catalog, before)
            self.latest = {**start, "streams": end}
            if not self._has_enough(client, catalog, before, end, limit):
                return start
            messages = limit.max_rows if isinstance(limit, ReadMaxRows) else None
            size = limit.max_bytes if isinstance(limit, ReadMaxBytes) else None
            if not isinstance(limit, ReadAllAvailable) and size is None:
                size = self.max_bytes
            self.turn += 1
            after = _offset(catalog, start, limit_end(client, catalog, before, dict(end), messages, size, self.turn))
            if after == {key: value for key, value in start.items() if key not in BATCH}:
                return start
            starts = _starts(catalog, before, after["streams"])
            return {**after, "starts": starts, "tasks": attrs.asdict(self.partition_limits)}

        return self.link.with_retry(look)

    def _starts_empty(self, start: Offset) -> bool:
        """Whether the first batch must be empty. Spark records the end of a batch, and requests the initial offset
        again if the first batch fails. If that has moved by then, the messages in between would be in no batch."""
        starts_empty = self.initial == start and self.start.may_move(start["streams"])
        self.initial = None
        return starts_empty

    def _known_positions(self, catalog: ServerCatalog, at: Offset) -> dict[str, int]:
        """Return the positions without replaced streams. A stream removed and created again is another stream: that is
        data loss, or the new stream is read from its beginning."""
        positions: dict[str, int] = at["streams"]
        had, now = at.get("numbers", {}), catalog.numbers()
        other = {path for path in positions if path in now and had.get(path, now[path]) != now[path]}
        if not other:
            return positions
        first = min(other)
        loss = f"{first}, read up to sequence {positions[first]}, was removed and created again"
        if self.strict:
            raise data_loss(loss)
        log.warning("%s", loss)
        self.positions = {path: position for path, position in self.positions.items() if path not in other}
        return {path: position for path, position in positions.items() if path not in other}

    def _has_enough(
        self, client: Client, catalog: ServerCatalog, before: dict[str, int], end: dict[str, int], limit: ReadLimit
    ) -> bool:
        """Whether there are enough messages for a batch now; always true for a trigger without limits."""
        if end == before:
            return True
        at_once = isinstance(limit, ReadAllAvailable) or self.end_limits is not None or self.trigger.is_due()
        if not at_once and count_messages(client, ranges(catalog, before, end)) < self.trigger.least:
            return False
        self.trigger.on_batch()
        return True

    def reportLatestOffset(self) -> Offset | None:
        return self.latest

    def _read_catalog(self, client: Client, start: Offset) -> ServerCatalog:
        catalog = self.selection.catalog(client)
        if catalog.store != start["store"]:
            raise wrong_store(start["store"], catalog.store, self.task.server.address)
        return catalog

    def _ends(self, catalog: ServerCatalog, before: Mapping[str, int]) -> dict[str, int]:
        """Return the present end of each stream, and the old position of a removed one."""
        ends = _ends(catalog, before)
        if self.end_limits is not None:
            ends = {
                path: max(min(end, self.end_limits.get(path, 0)), before.get(path, 0)) for path, end in ends.items()
            }
            ends = {path: end for path, end in ends.items() if end or path in before}
        return {**before, **ends}

    # ------------------------------------------------------------ batches

    def partitions(self, start: Offset, end: Offset) -> list[Slice]:
        def planned(client: Client) -> list[Slice]:
            catalog = self._read_catalog(client, start)
            if start["consumer"] != end["consumer"]:  # the first batch is repeated, after planning by another process
                self.consumers.remove(client, start["consumer"], catalog)
            low = {**end.get("starts", {}), **self._known_positions(catalog, start)}
            high = self._known_positions(catalog, end)
            check_losses(client, catalog, low, high, strict=self.strict, new=low.keys() - start["streams"].keys())
            limits = PartitionLimits(**end["tasks"]) if "tasks" in end else self.partition_limits
            return limits.slices(client, ranges(catalog, low, high), catalog.store)

        return self.link.with_retry(planned)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Slice)
        return self.task.batches(partition)

    def commit(self, end: Offset) -> None:
        """Move the consumers: the batch up to `end` is processed."""

        def done(client: Client) -> None:
            catalog = self._read_catalog(client, end)
            self._move_consumers(client, catalog, end["consumer"], self._known_positions(catalog, end))

        self.link.with_retry(done)

    def _move_consumers(self, client: Client, catalog: ServerCatalog, consumer: str, positions: dict[str, int]) -> None:
        if not any(position > self.positions.get(path, -1) for path, position in positions.items()):
            positions = self.positions  # never backwards
        # Also if no position has changed: a consumer of a whole group passes other streams, and after a lost connection
        # one is opened again.
        self.consumers.move(client, consumer, catalog, positions)
        self.positions = positions

    def stop(self) -> None:
        self.link.close()


def _offset(catalog: ServerCatalog, before: Offset, streams: Mapping[str, int]) -> Offset:
    """Return an offset; `before` has the consumer, and the identities of removed streams."""
    numbers = {**before.get("numbers", {}), **catalog.numbers()}
    return {
        "store": catalog.store,
        "consumer": before["consumer"],
        "streams": dict(sorted(streams.items())),
        "numbers": {path: numbers[path] for path in sorted(streams) if path in numbers},
    }


def _starts(catalog: ServerCatalog, before: Mapping[str, int], end: Mapping[str, int]) -> dict[str, int]:
    """Return where the batch begins to read its new streams, so that a repeat notices lost messages. Streams without
    messages in the batch are left out."""
    new = {path: stream.oldest for path, _, stream in catalog.streams() if path in end and path not in before}
    return {path: oldest for path, oldest in sorted(new.items()) if 0 < oldest < end[path]}


def _ends(catalog: ServerCatalog, before: Mapping[str, int]) -> dict[str, int]:
    """Return the ends. All streams of a group end after its newest message, so that they move together; without a new
    message none moves."""
    ends = {}
    for path, group, stream in catalog.streams():
        had = before.get(path)
        if had is None:
            had = stream.first or group.end
        ends[path] = max(group.end, had)
    for group in catalog.groups.values():
        keys = {path_of(group.path, name) for name in group.streams} & before.keys()
        if keys and all(group.end <= before[key] for key in keys):
            ends.update({key: before[key] for key in keys})
    return ends
