"""`mqfs spark stats`: counts, sizes, rates and latencies of each stream.

The driver gets only results of aggregations, never messages.
"""

from __future__ import annotations

from typing import Any

import attrs
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from pyspark_mqfs.commands import archive
from pyspark_mqfs.commands.copy import headers_map, select_messages
from pyspark_mqfs.commands.session import CommandError
from pyspark_mqfs.commands.sources import Progress, Source, no_progress, read

POINTS = 200  # of the plot of rates
SHARES = (0.5, 0.9, 0.99, 0.999)
NAMES = ("p50", "p90", "p99", "p999")


@attrs.frozen
class Stats:
    """The request of `stats`. `sent`: the header with the UNIX time of sending, in seconds."""

    path: str = ""
    source: Source | None = None
    where: str = ""
    sent: str = ""

    def check(self) -> None:
        """Raise CommandError or OptionError for an invalid request."""
        if bool(self.path) == (self.source is not None):
            raise CommandError("stats: no source or two (expected --archive or --at)")
        if self.source is not None:
            self.source.check()


def run(spark: SparkSession, request: Stats, progress: Progress = no_progress) -> dict[str, Any]:
    """Return counts by stream, over time and by size; latencies if messages have the header."""
    request.check()
    rows = archive.open_archive(spark, request.path) if request.source is None else read(spark, request.source)
    rows = select_messages(rows, request.where).withColumn("size", F.octet_length("value").cast("bigint"))
    rows = rows.withColumn("late", F.unix_micros("timestamp") / 1e6 - _sent(request.sent))
    rows = rows.select("topic", "timestamp", "size", "late").cache()
    try:
        progress("counting")
        result: dict[str, Any] = {"streams": _streams(rows), "sizes": _sizes(rows)}
        result["rates"] = _rates(rows, result["streams"])
        return result
    finally:
        rows.unpersist()


def _sent(header: str) -> Column:
    """Return the time in a header; null if it is missing or not a finite number."""
    if not header:
        return F.lit(None).cast("double")
    seconds = headers_map()[header].try_cast("double")
    return F.when(F.abs(seconds) < float("inf"), seconds)  # nan is above all numbers here


def _streams(rows: DataFrame) -> list[dict[str, Any]]:
    counts = rows.groupBy("topic").agg(
        F.count("*").alias("messages"), F.sum("size").alias("bytes"), F.min("size").alias("smallest"),
        F.max("size").alias("largest"), F.percentile_approx("size", list(SHARES)).alias("size"),
        F.min(F.unix_micros("timestamp") / 1e6).alias("first"), F.max(F.unix_micros("timestamp") / 1e6).alias("last"),
        F.percentile_approx("late", list(SHARES)).alias("late"),
    )  # fmt: skip
    return [_row(row.asDict()) for row in counts.orderBy("topic").collect()]


def _row(counts: dict[str, Any]) -> dict[str, Any]:
    seconds = counts["last"] - counts["first"]
    size, late = counts.pop("size"), counts.pop("late")
    return {
        "stream": counts.pop("topic"),
        **counts,
        "messages_a_second": counts["messages"] / seconds if seconds else None,
        "bytes_a_second": counts["bytes"] / seconds if seconds else None,
        "size": dict(zip(NAMES, size, strict=True)),
        "latency_s": dict(zip(NAMES, late, strict=True)) if late else None,
    }


def _sizes(rows: DataFrame) -> list[tuple[int, int]]:
    """Return (size, messages from this size to twice that) by powers of two."""
    power = F.floor(F.log2(F.greatest("size", F.lit(1))))  # an empty message counts as one byte
    counts = rows.groupBy(power.alias("power")).count().orderBy("power").collect()
    return [(1 << int(row["power"]), int(row["count"])) for row in counts]


def _rates(rows: DataFrame, streams: list[dict[str, Any]]) -> dict[str, Any]:
    """Return messages a second of each stream, in POINTS equal intervals of the whole time."""
    if not streams:
        return {"begin": 0.0, "step": 1.0, "streams": {}}
    begin, end = min(row["first"] for row in streams), max(row["last"] for row in streams)
    step = max((end - begin) / POINTS, 0.001)
    place = F.least(F.floor((F.unix_micros("timestamp") / 1e6 - begin) / step), F.lit(POINTS - 1))
    counts = rows.groupBy("topic", place.alias("place")).count().collect()
    lines: dict[str, list[float]] = {row["stream"]: [0.0] * POINTS for row in streams}
    for row in counts:
        lines[row["topic"]][max(int(row["place"]), 0)] = row["count"] / step
    return {"begin": begin, "step": step, "streams": lines}
