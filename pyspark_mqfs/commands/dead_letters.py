"""`mqfs spark dead-letters`: divert selected messages, and redrive dead letters.

Owns the headers of the origin of a dead letter. The server sets `stream` and `sequence`, which are reserved; diverted
messages have `letter.stream`, `letter.sequence` and `letter.reason`.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import attrs
from pyspark.sql import functions as F

from mqfs.errors import MqfsError, NotFound
from mqfs.log import headers
from mqfs.ninep.blocking import Client
from mqfs.syntax.quoting import quote_word
from pyspark_mqfs.catalog import path_of, split
from pyspark_mqfs.commands.checkpoints import forget, noted
from pyspark_mqfs.commands.copy import Copy, as_map, bounds, carry_over, selected
from pyspark_mqfs.commands.session import Failed
from pyspark_mqfs.commands.sources import Source, Tell, follow, no_progress, watch
from pyspark_mqfs.connection import Server
from pyspark_mqfs.options import COMMON, Options

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

PREFIX = "letter."
DROPPED_AT_ONCE = 1_000  # sequences in one line of ctl


@attrs.frozen
class Divert:
    """The request of `dead-letters divert`: copies of the selected messages to a stream of dead letters."""

    source: Source
    where: str
    to: str
    reason: str = ""
    checkpoint: str = ""
    forever: bool = False

    def check(self) -> None:
        """Raises CommandError or OptionError for an invalid request."""
        if not self.where:
            raise Failed("dead-letters divert: no --where (expected an SQL condition)")
        self.source.check()


@attrs.frozen
class Redrive:
    """The request of `dead-letters redrive`: dead letters to their original streams in the same group."""

    source: Source  # one stream, of dead letters
    where: str = ""
    checkpoint: str = ""

    def check(self) -> None:
        """Raises CommandError or OptionError for an invalid request."""
        if len(self.source.streams) != 1:
            raise Failed("dead-letters redrive: invalid streams (expected one stream of dead letters, as jobs/dead)")
        self.source.check()


def divert(spark: SparkSession, what: Divert, tell: Tell = no_progress) -> dict[str, Any]:
    """Copy the selected messages; the originals stay."""
    what.check()
    said = [("stream", F.element_at(F.split("topic", "/"), -1)), ("sequence", F.col("offset").cast("string"))]
    added = F.array(*(_header(PREFIX + name, value) for name, value in [*said, ("reason", F.lit(what.reason))]))

    def letters(rows: DataFrame) -> DataFrame:
        headers = F.concat(_free(), added).alias("headers")
        return selected(rows, what.where).select("value", headers, F.lit(what.to).alias("topic"))

    copy = Copy(what.source, what.source, to=what.to, checkpoint=what.checkpoint, forever=what.forever)
    return carry_over(spark, copy, letters, [split(what.to)[0]], tell)


def redrive(spark: SparkSession, what: Redrive, tell: Tell = no_progress) -> dict[str, Any]:
    """Publish dead letters to their original streams, each once, also after a crash, and drop them."""
    what.check()
    group = what.source.streams[0].rpartition("/")[0]
    server = Server.of(Options(what.source.server(), COMMON, "a command"))
    sent = [0]
    names: SimpleQueue[str] = SimpleQueue()  # the id of the query, known after its start

    def send(batch: DataFrame, number: int) -> None:
        kept = batch.persist()
        name = names.get()
        names.put(name)
        try:
            _publish(kept, what, f"redrive-{name}", number)
            sequences = [row["offset"] for row in kept.select("offset").collect()]
            with server.link() as link:
                link.retried(lambda client: _drop(client, what.source.streams[0], sequences))
            sent[0] += len(sequences)
        finally:
            kept.unpersist()

    with noted(what.checkpoint, what.source) as notes:
        letters = selected(follow(spark, what.source, **bounds(), **notes.reader), what.where)
        writer = letters.withColumn("to", _came_from(group)).where("to is not null").writeStream.foreachBatch(send)
        query = writer.option("checkpointLocation", notes.checkpoint).trigger(availableNow=True).start()
        names.put(query.id)
        try:
            watch(query, tell, "read", 0)
        finally:
            query.stop()
            if not notes.again:
                forget(what.source, [group], f"spark-app-redrive-{query.id}")
    return {"redriven": sent[0]}


def _publish(letters: DataFrame, what: Redrive, name: str, number: int) -> None:
    again = letters.select("value", _free().alias("headers"), F.col("to").alias("topic"))
    again.write.format("mqfs").options(**what.source.server(), txnAppId=name, txnVersion=str(number)).mode(
        "append"
    ).save()


def _came_from(group: str) -> Column:
    found = as_map()
    name = F.coalesce(found[headers.STREAM], found[PREFIX + "stream"])
    return F.concat(F.lit(f"{group}/"), name) if group else name


def _free() -> Column:
    """The headers that may be set, without those of a dead letter."""
    given = F.coalesce(F.col("headers"), F.expr("array()").cast("array<struct<key:string,value:binary>>"))
    reserved = sorted(headers.RESERVED)
    return F.filter(given, lambda header: ~header["key"].isin(reserved) & ~header["key"].startswith(PREFIX))


def _header(key: str, value: Column) -> Column:
    return F.struct(F.lit(key).alias("key"), value.cast("binary").alias("value"))


def _drop(client: Client, path: str, sequences: Iterable[int]) -> None:
    """Drop messages, of which some may be removed already."""
    group, _, stream = path.rpartition("/")
    left = sorted(sequences)
    for at in range(0, len(left), DROPPED_AT_ONCE):
        some = left[at : at + DROPPED_AT_ONCE]
        try:
            _say(client, group, f"drop {quote_word(stream)} {' '.join(map(str, some))}\n")
        except NotFound:
            for one in some:
                with suppress(MqfsError):
                    _say(client, group, f"drop {quote_word(stream)} {one}\n")


def _say(client: Client, group: str, line: str) -> None:
    with client.open(path_of(group, "ctl"), "w") as file:
        file.write(line.encode())


__all__ = ["Divert", "Redrive", "divert", "redrive"]
