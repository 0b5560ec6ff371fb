"""`mqfs spark copy`: selected messages of streams to other streams, each once.

Owns the copying query and the limits of its batches, each of which is one atomic batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import attrs
from pyspark.sql import functions as F

from mqfs import limits
from pyspark_mqfs.commands.checkpoints import forget, noted
from pyspark_mqfs.commands.replay import make_group, target_of
from pyspark_mqfs.commands.session import Failed
from pyspark_mqfs.commands.sources import ROOT, Source, Tell, follow, no_progress, watch
from pyspark_mqfs.connection import Server
from pyspark_mqfs.options import COMMON, Options

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

MESSAGES, BYTES = (
    limits.UNIT_MESSAGES // 2,
    limits.UNIT_BYTES // 2,
)  # of a batch, which is one atomic batch in each group
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
        """Raises CommandError or OptionError for an invalid request."""
        if bool(self.to) == bool(self.into):
            raise Failed("copy: no target (expected --to GROUP/STREAM, or --into GROUP)")
        self.source.check()
        self.target.check_server()


def run(spark: SparkSession, what: Copy, tell: Tell = no_progress) -> dict[str, Any]:
    """Copy the present messages, or all new ones until stopped."""
    what.check()
    survey = what.source.survey()
    groups = {what.to.rpartition("/")[0]} if what.to else {target_of(g or ROOT, what.into) for g in survey.groups}
    server = Server.of(Options(what.target.server(), COMMON, "a command"))
    with server.link() as link:
        for group in groups:
            link.retried(lambda client, group=group: make_group(client, group))  # type: ignore[misc]
    topic = F.lit(what.to) if what.to else F.concat(F.lit(what.into.strip("/") + "/"), F.col("topic"))

    def columns(rows: DataFrame) -> DataFrame:
        return selected(rows, what.where).select("value", given().alias("headers"), topic.alias("topic"))

    return carry_over(spark, what, columns, groups, tell)


def carry_over(
    spark: SparkSession, what: Copy, columns: Callable[[DataFrame], DataFrame], groups: Iterable[str], tell: Tell
) -> dict[str, Any]:
    """Run the query from the source, transformed by `columns`, to streams in these groups of the target."""
    with noted(what.checkpoint, what.source) as notes:
        rows = columns(follow(spark, what.source, **bounds(), **notes.reader))
        query = start(rows, what, notes.checkpoint)
        try:
            count = watch(query, tell, "read", 0)
        finally:
            query.stop()
            if not notes.again:
                forget(what.target, groups, f"spark-{query.id}")
    return {"read": count}


def at(source: Source, target: str) -> Source:
    """The server to write to: the target, or that of the source."""
    return Source(target, user=source.user, token=source.token) if target else source


def bounds() -> dict[str, str]:
    """Reader options for batches that fit one atomic batch."""
    return {"maxOffsetsPerTrigger": str(MESSAGES), "maxBytesPerTrigger": str(BYTES)}


def start(rows: DataFrame, what: Copy, checkpoint: str) -> StreamingQuery:
    writer = rows.writeStream.format("mqfs").options(**what.target.server(), checkpointLocation=checkpoint)
    return writer.start() if what.forever else writer.trigger(availableNow=True).start()


def selected(rows: DataFrame, where: str) -> DataFrame:
    """The messages of a condition, which may also use `text`, the message, and `header`, a map of texts."""
    if not where:
        return rows
    more = rows.withColumn(TEXT, F.decode("value", "UTF-8")).withColumn(HEADER, as_map())
    return more.where(where).drop(TEXT, HEADER)


def given() -> Column:
    """The headers, empty instead of null: for every null list Spark copies the whole batch again on its way to a sink."""
    return F.coalesce(F.col("headers"), F.expr("array()").cast("array<struct<key:string,value:binary>>"))


def as_map() -> Column:
    """The headers as a map of texts."""
    pairs = F.transform(
        given(),
        lambda header: F.struct(header["key"], F.decode(header["value"], "UTF-8")),
    )
    return F.map_from_entries(pairs)


__all__ = ["Copy", "as_map", "at", "bounds", "carry_over", "given", "run", "selected", "start"]
