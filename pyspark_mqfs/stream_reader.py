"""The stream reader: positions, triggers, and the query as a consumer of its groups.

Owns what Spark writes into the checkpoint: the store's uuid, the name of the consumer, and of each stream the next
sequence to read, and the numbers that tell it from a later one of its name. One process of the driver keeps this object
and its connection; tasks have a copy of `task` alone.
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
DELAY_S = 900.0  # maxTriggerDelay, as Kafka has it
Offset = dict[str, Any]


@attrs.define
class Patience:
    """Whether a batch is begun: with enough messages, or when the last one was long enough ago. The first is at once,
    for nobody knows how long its messages have waited."""

    least: int  # messages; 0: any
    delay_s: float
    last: float = -1e9  # when a batch was begun

    @classmethod
    def of(cls, options: Options) -> Patience:
        least, most = options.number("minOffsetsPerTrigger", 0) or 0, options.number("maxOffsetsPerTrigger")
        if most is not None and least > most:
            raise OptionError(
                f"option minOffsetsPerTrigger is {least}, more than maxOffsetsPerTrigger; at most {most} is right"
            )
        if not least and "maxTriggerDelay" in options:
            raise OptionError("option maxTriggerDelay is of minOffsetsPerTrigger; both or neither are right")
        return cls(least, options.seconds("maxTriggerDelay", DELAY_S))

    def over(self) -> bool:
        return not self.least or time.monotonic() - self.last >= self.delay_s

    def begun(self) -> None:
        self.last = time.monotonic()


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Micro-batches of what was written since the last one."""

    def __init__(self, said: Mapping[str, str], wanted: StructType) -> None:
        options = Options(said, READ, "the reader")
        for name in BATCH_ONLY:
            if name in options:
                raise OptionError(f"option {name} is of batches; without it a stream is right")
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
        self.stop_at: dict[str, int] | None = None  # Trigger.AvailableNow: where it was when the query began
        self.moved: dict[str, int] = {}  # where its consumer is
        self.seen: Offset | None = None  # what the last look found
        self.begun: Offset | None = None  # where a new query begins, until its first batch is planned

    def __getstate__(self) -> dict[str, Any]:
        return {"task": self.task}

    # ------------------------------------------------------------ positions

    def initialOffset(self) -> Offset:
        """Of a new query. It is a consumer from here on, so that nothing goes before its first batch is committed."""

        def begin(client: Client) -> Offset:
            survey = self.selection.survey(client)
            self._tell_missing(survey)
            start = self.start.positions(client, survey)
            self.consumers.move(client, self.name, survey, start)
            self.begun = _offset(survey, {"consumer": self.name}, start)
            return self.begun

        return self.link.retried(begin)

    def _tell_missing(self, survey: ServerCatalog) -> None:
        """A stream that is named may come later; or its name is wrong."""
        there = {path for path, _, _ in survey.streams()}
        if missing := [path for path in self.selection.paths if path not in there]:
            option = self.selection.option
            log.warning("option %s names %r, and no stream is called so yet; it is waited for", option, missing[0])

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
        """Where the next batch ends."""

        def look(client: Client) -> Offset:
            if self._begins(start):
                return start
            survey = self._survey(client, start)
            before = self._known(survey, start)
            self._done(client, survey, start["consumer"], before)  # the batch up to here is committed
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
        """Whether the first batch is to be empty. Spark keeps where a batch ends, and asks once more where the query
        begins if the first one failed: where that moves on, what is between would be in no batch."""
        begins = self.begun == start and self.start.moves(start["streams"])
        self.begun = None
        return begins

    def _known(self, survey: ServerCatalog, at: Offset) -> dict[str, int]:
        """The positions in streams that still are what they were. One that was removed and made anew is another, of
        which nothing was read: an error, or it is read from its beginning."""
        positions: dict[str, int] = at["streams"]
        had, now = at.get("numbers", {}), survey.numbers()
        other = {path for path in positions if path in now and had.get(path, now[path]) != now[path]}
        if not other:
            return positions
        first = min(other)
        what = f"{first}, read up to sequence {positions[first]}, was removed and made anew"
        if self.strict:
            raise data_loss(what)
        log.warning("%s", what)
        self.moved = {path: position for path, position in self.moved.items() if path not in other}
        return {path: position for path, position in positions.items() if path not in other}

    def _enough(
        self, client: Client, survey: ServerCatalog, before: dict[str, int], end: dict[str, int], limit: ReadLimit
    ) -> bool:
        """Whether what waits is worth a batch now; a trigger that takes all there is asks for no more than one."""
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
        """Where all that is there ends; of a stream that is gone, where it was."""
        found = _ends(survey, before)
        if self.stop_at is not None:
            found = {path: max(min(end, self.stop_at.get(path, 0)), before.get(path, 0)) for path, end in found.items()}
            found = {path: end for path, end in found.items() if end or path in before}
        return {**before, **found}

    # ------------------------------------------------------------ batches

    def partitions(self, start: Offset, end: Offset) -> list[Slice]:
        def planned(client: Client) -> list[Slice]:
            survey = self._survey(client, start)
            if start["consumer"] != end["consumer"]:  # the first batch, planned by another process, is repeated
                self.consumers.leave(client, start["consumer"], survey)
            low, high = self._known(survey, start), self._known(survey, end)
            check_losses(client, survey, low, high, strict=self.strict)
            return self.shares.slices(client, ranges(survey, low, high), survey.store)

        return self.link.retried(planned)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Slice)
        return self.task.batches(partition)

    def commit(self, end: Offset) -> None:
        """All before that was worked on: the query's consumer says so to everybody else."""

        def done(client: Client) -> None:
            survey = self._survey(client, end)
            self._done(client, survey, end["consumer"], self._known(survey, end))

        self.link.retried(done)

    def _done(self, client: Client, survey: ServerCatalog, consumer: str, positions: dict[str, int]) -> None:
        if any(position > self.moved.get(path, -1) for path, position in positions.items()):  # never back
            self.consumers.move(client, consumer, survey, positions)
            self.moved = positions

    def stop(self) -> None:
        self.link.close()


def _offset(survey: ServerCatalog, before: Offset, streams: Mapping[str, int]) -> Offset:
    """`before` has the consumer, and the numbers of streams that are gone."""
    numbers = {**before.get("numbers", {}), **survey.numbers()}
    return {
        "store": survey.store,
        "consumer": before["consumer"],
        "streams": dict(sorted(streams.items())),
        "numbers": {path: numbers[path] for path in sorted(streams) if path in numbers},
    }


def _ends(survey: ServerCatalog, before: Mapping[str, int]) -> dict[str, int]:
    """All streams of a group end behind its newest message of them, so that they move together; where they have
    nothing new, nothing moves."""
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
