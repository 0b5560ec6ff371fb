"""The data source class of Spark, which creates readers and writers.

It imports no Arrow, and opens no connection.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from pyspark_mqfs import options, schema


class MqfsDataSource(DataSource):
    """Format `mqfs`."""

    @classmethod
    def name(cls) -> str:
        return "mqfs"

    def schema(self) -> StructType:
        parsed = options.Options(self.options, options.READ, "the reader")
        return schema.all_columns(headers=parsed.flag("includeHeaders", False))

    def reader(self, schema: StructType) -> Any:
        from pyspark_mqfs.reader import BatchReader

        return BatchReader(self.options, schema)

    def streamReader(self, schema: StructType) -> Any:
        from pyspark_mqfs.stream_reader import StreamReader

        return StreamReader(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        from pyspark_mqfs.writer import batch_writer

        return batch_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:
        from pyspark_mqfs.writer import stream_writer

        return stream_writer(self.options, schema, overwrite)


class DefaultSource(MqfsDataSource):
    """The data source under the name that Spark looks for."""
