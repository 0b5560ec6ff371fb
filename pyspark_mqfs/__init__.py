"""The Spark data source `mqfs`: streams of an mqfs server as DataFrames, and DataFrames as streams.

Spark finds this package by its name. The import takes milliseconds: reader, writer and Arrow are imported on use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark_mqfs.source import DefaultSource, MqfsDataSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pyspark_mqfs.archived import history


def register(spark: SparkSession) -> None:
    """Make `format("mqfs")` known to a session that did not find the package by itself (`--py-files`)."""
    spark.dataSource.register(MqfsDataSource)


def __getattr__(name: str) -> Any:
    if name == "history":
        from pyspark_mqfs.archived import history

        return history
    raise AttributeError(name)


__all__ = ["DefaultSource", "MqfsDataSource", "history", "register"]
