"""The batch reader: its options and filters. task.py reads the messages."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from pyspark_mqfs import filters, schema
from pyspark_mqfs.catalog import Selection
from pyspark_mqfs.connection import Server
from pyspark_mqfs.options import READ, OptionError, Options
from pyspark_mqfs.plan import PartitionLimits, Slice, ranges
from pyspark_mqfs.positions import EARLIEST, Bound
from pyspark_mqfs.task import Task, check_losses

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

    def __init__(self, values: Mapping[str, str], wanted: StructType) -> None:
        options = Options(values, READ, "the reader")
        for name in STREAMING:
            if name in options:
                raise OptionError(f"option {name}: only for streaming reads")
        self.server, self.selection = Server.of(options), Selection.of(options)
        self.start, self.end = Bound.starting(options, EARLIEST), Bound.ending(options)
        self.partition_limits = PartitionLimits.of(options)
        self.strict = options.flag("failOnDataLoss", True)
        self.schema = schema.check_columns(wanted, headers=options.flag("includeHeaders", False))
        self.pushed = filters.PushedFilters()
        self.task = Task(self.server, self.schema, self.strict, options.text("path"))
        if _PUSHING in sys.modules:  # without pushdown Spark rejects a reader with this method
            self.pushFilters = self.push  # type: ignore

    def __getstate__(self) -> dict[str, Any]:
        return {"task": self.task}

    def push(self, pushed: list[Filter]) -> Iterable[Filter]:
        """Handle pushable filters; yield those that Spark has to apply."""
        for filter_ in pushed:
            if not self.pushed.add(filter_):
                yield filter_

    def partitions(self) -> list[Slice]:
        with self.server.link() as link:
            return link.with_retry(self._plan)

    def _plan(self, client: Any) -> list[Slice]:
        catalog = self.selection.catalog(client)
        there = {path for path, _, _ in catalog.streams()}
        for path in self.selection.paths:
            if path not in there:
                raise OptionError(f"option {self.selection.option}: no stream {path!r}")
        start, end = self.start.positions(client, catalog), self.end.positions(client, catalog)
        if self.start.option:
            check_losses(client, catalog, start, end, strict=self.strict)
        self.pushed.apply(client, catalog, start, end)
        return self.partition_limits.slices(client, ranges(catalog, start, end), catalog.store) or [
            Slice((), catalog.store)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Slice)
        return self.task.batches(partition)
