"""`mqfs spark copy`: selected messages of streams to other streams, each once.

The query has limits, so that each of its batches fits one atomic batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import attrs
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from mqfs import limits
from pyspark_mqfs.commands.checkpoints import forget_producer, query_checkpoint
from pyspark_mqfs.commands.replay import make_groups, target_of, topic_in
from pyspark_mqfs.commands.session import CommandError
from pyspark_mqfs.commands.sources import ROOT, Progress, Source, follow, headers_or_empty, no_progress, watch

MESSAGES, BYTES = limits.UNIT_MESSAGES // 2, limits.UNIT_BYTES // 2  # of a batch, atomic in each group
TEXT, HEADER = "text", "header"  # columns of a condition beside those of the reader


@attrs.frozen
class Copy:
    """The request of `copy`. `to`: one stream for all messages; or `into`: a group as the prefix of all paths."""

    source: Source
    target: Source
    to: str = ""
    into: str = ""
    where: str = ""
    checkpoint: str = ""  # for a later run to continue; "": none
    forever: bool = False

    def check(self) -> None:
        """Raise CommandError or OptionError for an invalid request."""
        if bool(self.to) == bool(self.into):
            raise CommandError("copy: no target (expected --to GROUP/STREAM, or --into GROUP)")
        self.source.check()
        self.target.connection()


def run(spark: SparkSession, request: Copy, progress: Progress = no_progress) -> dict[str, Any]:
    """Copy the present messages, or all new ones until stopped."""
    request.check()
    catalog = request.source.catalog()
    groups = {target_of(group or ROOT, request.into) for group in catalog.groups}
    if request.to:
        groups = {request.to.rpartition("/")[0]}
    make_groups(request.target.connection(), groups)
    topic = F.lit(request.to) if request.to else topic_in(request.into)

    def columns(rows: DataFrame) -> DataFrame:
        selected = select_messages(rows, request.where)
        return selected.select("value", headers_or_empty().alias("headers"), topic.alias("topic"))

    return run_query(spark, request, columns, groups, progress)


def run_query(
    spark: SparkSession,
    request: Copy,
    columns: Callable[[DataFrame], DataFrame],
    groups: Iterable[str],
    progress: Progress,
) -> dict[str, Any]:
    """Run the query from the source, transformed by `columns`, to streams in these groups of the target."""
    with query_checkpoint(request.checkpoint, request.source) as checkpoint:
        rows = columns(follow(spark, request.source, **batch_limits(), **checkpoint.reader_options))
        query = start_query(rows, request, checkpoint.path)
        try:
            count = watch(query, progress, "read")
        finally:
            query.stop()
            if not checkpoint.resumable:
                forget_producer(request.target, groups, f"spark-{query.id}")
    return {"read": count}


def target_server(source: Source, target: str) -> Source:
    """Return the server to write to: the target, or that of the source."""
    return Source(target, user=source.user, token=source.token) if target else source


def batch_limits() -> dict[str, str]:
    """Return reader options for batches that fit one atomic batch."""
    return {"maxOffsetsPerTrigger": str(MESSAGES), "maxBytesPerTrigger": str(BYTES)}


def start_query(rows: DataFrame, request: Copy, checkpoint: str) -> StreamingQuery:
    writer = rows.writeStream.format("mqfs").options(**request.target.server(), checkpointLocation=checkpoint)
    return writer.start() if request.forever else writer.trigger(availableNow=True).start()


def select_messages(rows: DataFrame, where: str) -> DataFrame:
    """Return the messages for which a condition holds. It may also use `text`, the message, and `header`, a map of
    texts. In both, bytes that are not UTF-8 become U+FFFD."""
    if not where:
        return rows
    more = rows.withColumn(TEXT, _text(F.col("value"))).withColumn(HEADER, headers_map())
    return more.where(where).drop(TEXT, HEADER)


def _text(value: Column) -> Column:
    """Return bytes as a string. `decode` would fail on bytes that are not UTF-8, and one such message would end the
    whole query."""
    return F.make_valid_utf8(value.cast("string"))


def headers_map() -> Column:
    """Return the headers as a map of texts."""
    pairs = F.transform(
        headers_or_empty(),
        lambda header: F.struct(header["key"], _text(header["value"])),
    )
    return F.map_from_entries(pairs)
