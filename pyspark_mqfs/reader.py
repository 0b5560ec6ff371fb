"""The batch reader: its options and filters. task.py reads."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from pyspark_mqfs import filters, schema
from pyspark_mqfs.catalog import Selection
from pyspark_mqfs.connection import Server
from pyspark_mqfs.options import READ, OptionError, Options
from pyspark_mqfs.plan import Shares, Slice, ranges
from pyspark_mqfs.positions import EARLIEST, Bound
from pyspark_mqfs.task import Task, check_losses

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import Filter

STREAMING = (
    "maxOffsetsPerTrigger",
    "maxBytesPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "consumer",
    "groupIdPrefix",
)
_PUSHING = "pyspark.sql.worker.data_source_pushdown_filters"


class BatchReader(DataSourceReader):
    """Reads the messages present at planning, once."""

    def __init__(self, said: Mapping[str, str], wanted: StructType) -> None:
        options = Options(said, READ, "the reader")
        for name in STREAMING:
            if name in options:
                raise OptionError(f"option {name}: only for streaming reads")
        self.server, self.selection = Server.of(options), Selection.of(options)
        self.start, self.end = Bound.starting(options, EARLIEST), Bound.ending(options)
        self.shares = Shares.of(options)
        self.strict = options.flag("failOnDataLoss", True)
        self.schema = schema.checked(wanted, headers=options.flag("includeHeaders", False))
        self.narrowed = filters.Narrowed()
        self.task = Task(self.server, self.schema, self.strict, options.text("path"))
        if _PUSHING in sys.modules:  # without pushdown Spark rejects a reader with this method
            self.pushFilters = self.push  # type: ignore

    def __getstate__(self) -> dict[str, Any]:
        return {"task": self.task}

    def push(self, given: list[Filter]) -> Iterable[Filter]:
        """Take the pushable filters; yield those that Spark has to apply."""
        for one in given:
            if not self.narrowed.take(one):
                yield one

    def partitions(self) -> list[Slice]:
        with self.server.link() as link:
            return link.retried(self._planned)

    def _planned(self, client: Any) -> list[Slice]:
        survey = self.selection.survey(client)
        there = {path for path, _, _ in survey.streams()}
        for path in self.selection.paths:
            if path not in there:
                raise OptionError(f"option {self.selection.option}: no stream {path!r}")
        start, end = self.start.positions(client, survey), self.end.positions(client, survey)
        if self.start.option:
            check_losses(client, survey, start, end, strict=self.strict)
        self.narrowed.apply(client, survey, start, end)
        return self.shares.slices(client, ranges(survey, start, end), survey.store) or [Slice((), survey.store)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Slice)
        return self.task.batches(partition)


__all__ = ["BatchReader"]
