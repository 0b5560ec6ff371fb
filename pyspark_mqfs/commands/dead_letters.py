"""`mqfs spark dead-letters`: divert selected messages, and redrive dead letters.

Headers have the origin of a dead letter. The server sets `stream` and `sequence`, which are reserved; diverted messages
have `letter.stream`, `letter.sequence` and `letter.reason`. No header has the group: dead letters are in the group that
they came from. A group in a header, which any publisher may set, would let a letter choose where a redrive publishes.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import attrs
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from mqfs.errors import MqfsError, NotFound
from mqfs.ninep.client.connection import Client
from mqfs.records import headers
from mqfs.syntax.lines import quote_word
from pyspark_mqfs.catalog import path_of, split
from pyspark_mqfs.commands.checkpoints import forget_producer, query_checkpoint
from pyspark_mqfs.commands.copy import Copy, batch_limits, headers_map, run_query, select_messages
from pyspark_mqfs.commands.replay import retains
from pyspark_mqfs.commands.session import CommandError
from pyspark_mqfs.commands.sources import (
    ROOT,
    Progress,
    Source,
    follow,
    group_of,
    header_of,
    headers_or_empty,
    no_progress,
    stream_of,
    watch,
)
from pyspark_mqfs.connection import read_text, write_text

PREFIX = "letter."
ADDED = tuple(PREFIX + name for name in ("stream", "sequence", "reason"))  # headers that divert adds
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
        """Raise CommandError or OptionError for an invalid request."""
        if not self.where:
            raise CommandError("dead-letters divert: no --where (expected an SQL condition)")
        self.source.check()
        _check_groups((split(path.strip("/"))[0] for path in self.source.streams), self.to)


@attrs.frozen
class Redrive:
    """The request of `dead-letters redrive`: dead letters to their original streams in the same group."""

    source: Source  # one stream, with dead letters
    where: str = ""
    checkpoint: str = ""

    def check(self) -> None:
        """Raise CommandError or OptionError for an invalid request."""
        if len(self.source.streams) != 1:
            raise CommandError(
                "dead-letters redrive: invalid streams (expected one stream of dead letters, as jobs/dead)"
            )
        self.source.check()


def divert(spark: SparkSession, request: Divert, progress: Progress = no_progress) -> dict[str, Any]:
    """Copy the selected messages; the originals stay. Raises CommandError for streams of another group than `to`."""
    request.check()
    _check_groups(request.source.catalog().groups, request.to)
    stream = _stream_in(split(request.to.strip("/"))[0])
    values = stream, F.col("offset"), F.lit(request.reason)
    added = F.array(*map(header_of, ADDED, values))

    def letters(rows: DataFrame) -> DataFrame:
        headers = F.concat(_settable_headers(), added).alias("headers")
        return select_messages(rows, request.where).select("value", headers, F.lit(request.to).alias("topic"))

    copy = Copy(request.source, request.source, to=request.to, checkpoint=request.checkpoint, forever=request.forever)
    return run_query(spark, copy, letters, [split(request.to.strip("/"))[0]], progress)


def redrive(spark: SparkSession, request: Redrive, progress: Progress = no_progress) -> dict[str, Any]:
    """Publish dead letters to their original streams, and drop them.

    With a checkpoint each is published once. Without one nothing remembers a run that ended between the publishing and
    the drop of a batch: the next run publishes the letters of that batch again.
    """
    request.check()
    group = request.source.streams[0].rpartition("/")[0]
    server = request.source.connection()
    with server.link() as link:
        link.with_retry(lambda client: _require_room(client, group))
    sent = [0]
    names: SimpleQueue[str] = SimpleQueue()  # the id of the query, which is known after its start

    def send(batch: DataFrame, number: int) -> None:
        cached = batch.persist()
        name = names.get()
        names.put(name)
        try:
            _publish(cached, request, f"redrive-{name}", number)
            sequences = [row["offset"] for row in cached.select("offset").collect()]
            with server.link() as link:
                link.with_retry(lambda client: _drop_messages(client, request.source.streams[0], sequences))
            sent[0] += len(sequences)
        finally:
            cached.unpersist()

    with query_checkpoint(request.checkpoint, request.source) as checkpoint:
        letters = select_messages(
            follow(spark, request.source, **batch_limits(), **checkpoint.reader_options), request.where
        )
        writer = letters.withColumn("to", _origin(group)).where("to is not null").writeStream.foreachBatch(send)
        query = writer.option("checkpointLocation", checkpoint.path).trigger(availableNow=True).start()
        names.put(query.id)
        try:
            watch(query, progress, "read")
        finally:
            query.stop()
            if not checkpoint.resumable:
                forget_producer(request.source, [group], f"spark-app-redrive-{query.id}")
    return {"redriven": sent[0]}


def _check_groups(groups: Iterable[str], to: str) -> None:
    """Check that the sources are in the group of `to`, where a redrive publishes. Raises CommandError."""
    for group in groups:
        if group != split(to.strip("/"))[0]:
            raise CommandError(
                f"dead-letters divert: --to {to}: not in group {group or '/'!r} of the messages (expected their group)"
            )


def _stream_in(group: str) -> Column:
    """Return the name of a message's stream. The column raises an error for another group, which appeared after the
    check (--pattern with --follow)."""
    stream = stream_of(F.col("topic"))
    late = F.raise_error(F.concat(F.lit("dead-letters divert: not in the group of --to: "), F.col("topic")))
    return F.when(group_of(F.col("topic")) == (group or ROOT), stream).otherwise(late)


def _require_room(client: Client, group: str) -> None:
    """Check that the group does not discard published messages, since their dead letters are dropped then. Raises
    CommandError."""
    if "full drop-new" in read_text(client, path_of(group, "ctl")).split("\n"):
        raise CommandError(f"dead-letters redrive: {group}: full drop-new (expected another 'full', or mq redrive)")
    if not retains(client, group):
        raise CommandError(f"dead-letters redrive: {group}: replay off without consumers (expected one, or mq redrive)")


def _publish(letters: DataFrame, request: Redrive, name: str, number: int) -> None:
    resumable = letters.select("value", _settable_headers().alias("headers"), F.col("to").alias("topic"))
    resumable.write.format("mqfs").options(**request.source.server(), txnAppId=name, txnVersion=str(number)).mode(
        "append"
    ).save()


def _origin(group: str) -> Column:
    header = headers_map()
    name = F.coalesce(header[headers.STREAM], header[PREFIX + "stream"])
    return F.concat(F.lit(f"{group}/"), name) if group else name


def _settable_headers() -> Column:
    """Return the headers that a client may set, without those of a dead letter."""
    others = [*sorted(headers.RESERVED), *ADDED]
    return F.filter(headers_or_empty(), lambda header: ~header["key"].isin(others))


def _drop_messages(client: Client, path: str, sequences: Iterable[int]) -> None:
    """Drop messages; some may be removed already."""
    group, _, stream = path.rpartition("/")
    remaining = sorted(sequences)
    for at in range(0, len(remaining), DROPPED_AT_ONCE):
        part = remaining[at : at + DROPPED_AT_ONCE]
        try:
            write_text(client, path_of(group, "ctl"), f"drop {quote_word(stream)} {' '.join(map(str, part))}\n")
        except NotFound:
            for one in part:
                with suppress(MqfsError):
                    write_text(client, path_of(group, "ctl"), f"drop {quote_word(stream)} {one}\n")
