"""The stream reader: positions, triggers, and the consumers of the query.

Owns the offsets in the checkpoint: the uuid of the store, the name of the consumer, and by stream the next sequence and
the identity of the stream. One process of the driver has this object and its connection; tasks have a copy of `task`.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs
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

from mqfs.ninep.blocking import Client
from pyspark_mqfs import schema
from pyspark_mqfs.catalog import Selection, ServerCatalog, path_of
from pyspark_mqfs.connection import Server
from pyspark_mqfs.consumers import Consumers
from pyspark_mqfs.options import READ, OptionError, Options
from pyspark_mqfs.plan import Shares, Slice, limited, ranges, waiting
from pyspark_mqfs.positions import LATEST, Bound
from pyspark_mqfs.task import Task, check_losses, data_loss, other_store

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_ONLY = ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp")
log = logging.getLogger(__name__)
DELAY_S = 900.0  # maxTriggerDelay, as of Kafka
Offset = dict[str, Any]


@attrs.define
class Patience:
    """Decides when to start a batch: with enough messages, or after a delay. The first batch starts at once, as the age
    of its messages is unknown."""

    least: int  # messages; 0: any
    delay_s: float
    last: float = -1e9  # start of the last batch

    @classmethod
    def of(cls, options: Options) -> Patience:
        least, most = options.number("minOffsetsPerTrigger", 0) or 0, options.number("maxOffsetsPerTrigger")
        if most is not None and least > most:
            raise OptionError(
                f"option minOffsetsPerTrigger: invalid value {str(least)!r}"
                f" (expected at most maxOffsetsPerTrigger, {most})"
            )
        if not least and "maxTriggerDelay" in options:
            raise OptionError("option maxTriggerDelay: not without minOffsetsPerTrigger")
        return cls(least, options.seconds("maxTriggerDelay", DELAY_S))

    def over(self) -> bool:
        return not self.least or time.monotonic() - self.last >= self.delay_s

    def begun(self) -> None:
        self.last = time.monotonic()


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads micro-batches of the messages since the last one."""

    def __init__(self, said: Mapping[str, str], wanted: StructType) -> None:
        options = Options(said, READ, "the reader")
        for name in BATCH_ONLY:
            if name in options:
                raise OptionError(f"option {name}: only for batch reads")
        server, self.selection = Server.of(options), Selection.of(options)
        self.start = Bound.starting(options, LATEST)
        self.shares = Shares.of(options)
        self.most, self.most_bytes = options.number("maxOffsetsPerTrigger"), options.size("maxBytesPerTrigger")
        self.patience = Patience.of(options)
        self.strict = options.flag("failOnDataLoss", True)
        self.consumer = options.text("consumer")
        self.name = self.consumer or f"{options.text('groupIdPrefix', 'spark')}-{uuid.uuid4().hex[:12]}"
        wanted = schema.checked(wanted, headers=options.flag("includeHeaders", False))
        self.task = Task(server, wanted, self.strict, options.text("path"))
        self.link = server.link()
        self.consumers = Consumers(required=bool(self.consumer), patience_s=server.retry_s)
        self.stop_at: dict[str, int] | None = None  # Trigger.AvailableNow: the ends at the start of the query
        self.moved: dict[str, int] = {}  # the positions of its consumers
        self.seen: Offset | None = None  # the latest offset
        self.begun: Offset | None = None  # the first offset of a new query, until its first batch is planned

    def __getstate__(self) -> dict[str, Any]:
        return {"task": self.task}

    # ------------------------------------------------------------ positions

    def initialOffset(self) -> Offset:
        """The first offset of a new query. Creates its consumers, which retain messages for the first batch."""

        def begin(client: Client) -> Offset:
            survey = self.selection.survey(client)
            self._tell_missing(survey)
            start = self.start.positions(client, survey)
            self.consumers.move(client, self.name, survey, start)
            self.begun = _offset(survey, {"consumer": self.name}, start)
            return self.begun

        return self.link.retried(begin)

    def _tell_missing(self, survey: ServerCatalog) -> None:
        """Warn of missing streams: a stream may be created later, or its name is wrong."""
        there = {path for path, _, _ in survey.streams()}
        if missing := [path for path in self.selection.paths if path not in there]:
            option = self.selection.option
            log.warning("option %s: no stream %r yet; waiting for it", option, missing[0])

    def getDefaultReadLimit(self) -> ReadLimit:
        if self.most is not None:
            return ReadMaxRows(self.most)
        if self.most_bytes is not None:
            return ReadMaxBytes(self.most_bytes)
        return ReadMinRows(self.patience.least) if self.patience.least else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        def look(client: Client) -> dict[str, int]:
            return _ends(self.selection.survey(client), {})

        self.stop_at = self.link.retried(look)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """The end of the next batch."""

        def look(client: Client) -> Offset:
            if self._begins(start):
                return start
            survey = self._survey(client, start)
            before = self._known(survey, start)
            self._done(client, survey, start["consumer"], before)  # the batch before is committed
            end = self._ends(survey, before)
            self.seen = {**start, "streams": end}
            if not self._enough(client, survey, before, end, limit):
                return start
            messages = limit.max_rows if isinstance(limit, ReadMaxRows) else None
            size = limit.max_bytes if isinstance(limit, ReadMaxBytes) else None
            if not isinstance(limit, ReadAllAvailable) and size is None:
                size = self.most_bytes
            return _offset(survey, start, limited(client, survey, before, dict(end), messages, size))

        return self.link.retried(look)

    def _begins(self, start: Offset) -> bool:
        """Whether the first batch has to be empty. Spark records the end of a batch, and asks for the initial offset
        again if the first fails: if that has moved, the messages between would be in no batch."""
        begins = self.begun == start and self.start.moves(start["streams"])
        self.begun = None
        return begins

    def _known(self, survey: ServerCatalog, at: Offset) -> dict[str, int]:
        """The positions without replaced streams. A stream removed and created again is another one: data loss, or
        it is read from its beginning."""
        positions: dict[str, int] = at["streams"]
        had, now = at.get("numbers", {}), survey.numbers()
        other = {path for path in positions if path in now and had.get(path, now[path]) != now[path]}
        if not other:
            return positions
        first = min(other)
        what = f"{first}, read up to sequence {positions[first]}, was removed and created again"
        if self.strict:
            raise data_loss(what)
        log.warning("%s", what)
        self.moved = {path: position for path, position in self.moved.items() if path not in other}
        return {path: position for path, position in positions.items() if path not in other}

    def _enough(
        self, client: Client, survey: ServerCatalog, before: dict[str, int], end: dict[str, int], limit: ReadLimit
    ) -> bool:
        """Whether there is enough for a batch now; always for a trigger without limits."""
        if end == before:
            return True
        at_once = isinstance(limit, ReadAllAvailable) or self.stop_at is not None or self.patience.over()
        if not at_once and waiting(client, ranges(survey, before, end)) < self.patience.least:
            return False
        self.patience.begun()
        return True

    def reportLatestOffset(self) -> Offset | None:
        return self.seen

    def _survey(self, client: Client, start: Offset) -> ServerCatalog:
        survey = self.selection.survey(client)
        if survey.store != start["store"]:
            raise other_store(start["store"], survey.store, self.task.server.address)
        return survey

    def _ends(self, survey: ServerCatalog, before: Mapping[str, int]) -> dict[str, int]:
        """The present end of each stream; the old position of a removed one."""
        found = _ends(survey, before)
        if self.stop_at is not None:
            found = {path: max(min(end, self.stop_at.get(path, 0)), before.get(path, 0)) for path, end in found.items()}
            found = {path: end for path, end in found.items() if end or path in before}
        return {**before, **found}

    # ------------------------------------------------------------ batches

    def partitions(self, start: Offset, end: Offset) -> list[Slice]:
        def planned(client: Client) -> list[Slice]:
            survey = self._survey(client, start)
            if start["consumer"] != end["consumer"]:  # the first batch is repeated, planned by another process
                self.consumers.leave(client, start["consumer"], survey)
            low, high = self._known(survey, start), self._known(survey, end)
            check_losses(client, survey, low, high, strict=self.strict)
            return self.shares.slices(client, ranges(survey, low, high), survey.store)

        return self.link.retried(planned)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Slice)
        return self.task.batches(partition)

    def commit(self, end: Offset) -> None:
        """Move the consumers: the batch before `end` is processed."""

        def done(client: Client) -> None:
            survey = self._survey(client, end)
            self._done(client, survey, end["consumer"], self._known(survey, end))

        self.link.retried(done)

    def _done(self, client: Client, survey: ServerCatalog, consumer: str, positions: dict[str, int]) -> None:
        if any(position > self.moved.get(path, -1) for path, position in positions.items()):  # never backwards
            self.consumers.move(client, consumer, survey, positions)
            self.moved = positions

    def stop(self) -> None:
        self.link.close()


def _offset(survey: ServerCatalog, before: Offset, streams: Mapping[str, int]) -> Offset:
    """An offset; `before` has the consumer, and the identities of removed streams."""
    numbers = {**before.get("numbers", {}), **survey.numbers()}
    return {
        "store": survey.store,
        "consumer": before["consumer"],
        "streams": dict(sorted(streams.items())),
        "numbers": {path: numbers[path] for path in sorted(streams) if path in numbers},
    }


def _ends(survey: ServerCatalog, before: Mapping[str, int]) -> dict[str, int]:
    """The ends: all streams of a group end after its newest message, so that they move together; without a new message
    none moves."""
    found = {}
    for path, group, stream in survey.streams():
        had = before.get(path)
        if had is None:
            had = stream.first or group.end
        found[path] = max(group.end, had)
    for group in survey.groups.values():
        keys = {path_of(group.path, name) for name in group.streams} & before.keys()
        if keys and all(group.end <= before[key] for key in keys):
            found.update({key: before[key] for key in keys})
    return found


__all__ = ["StreamReader"]
