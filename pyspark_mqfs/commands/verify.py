"""`mqfs spark verify`: whether streams, or an archive, or one against the other, are as they should be.

Owns what is looked for. Every problem is counted, and some examples of each are shown. The checksum of the log is
checked by the reader anyway; that of an archive is of the body, made when it was archived.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
from pyspark.sql import Window
from pyspark.sql import functions as F

from pyspark_mqfs.commands import archive, replay
from pyspark_mqfs.commands.session import Failed
from pyspark_mqfs.commands.shared import Source, Tell, group_of, quiet, read

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

EXAMPLES = 5
PROBLEMS = ("doubled", "clock", "checksum", "lost", "differs")  # holes alone are none: sequences may have them


@attrs.frozen
class Verify:
    """What is asked for: an archive, streams, or both, one against the other."""

    path: str = ""
    source: Source | None = None
    replayed: bool = False  # the streams hold what was replayed from the archive
    into: str = ""  # below this group
    holes: bool = False  # a hole is a problem


def run(spark: SparkSession, what: Verify, tell: Tell = quiet) -> dict[str, Any]:
    """What was found: counts, and examples of problems. `sound` says whether there are none."""
    if not what.path and what.source is None:
        raise Failed("name an archive, or a server with --at, or both")
    found: dict[str, Any] = {"examples": {}}
    kept = archive.opened(spark, what.path) if what.path else None
    live = _live(spark, what)
    if kept is not None:
        tell("reading the archive")
        _alone(kept, found)
        _sample(found, "checksum", kept.where(F.crc32("value") != F.col("crc")))
    if live is not None and kept is None:
        tell("reading the streams")
        _alone(live.withColumn("group", group_of(F.col("topic"))), found)
    if live is not None and kept is not None:
        tell("comparing")
        _against(kept, live, what.replayed, found)
    wrong = [name for name in (*PROBLEMS, *(("holes",) if what.holes else ())) if found.get(name)]
    return {**found, "sound": not wrong, "problems": wrong}


def _live(spark: SparkSession, what: Verify) -> DataFrame | None:
    if what.source is None:
        return None
    rows = read(spark, what.source)
    if not what.replayed:
        return rows
    rows = replay.original(rows)
    prefix = f"{what.into.strip('/')}/"
    return rows.withColumn("topic", F.expr(f"substr(topic, {len(prefix) + 1})")) if what.into else rows


def _alone(rows: DataFrame, found: dict[str, Any]) -> None:
    """Each group by itself, in the order of its sequences."""
    order = Window.partitionBy("group").orderBy("offset")
    walked = rows.select(
        "group", "topic", "offset", "timestamp",
        F.lag("offset").over(order).alias("before"), F.lag("timestamp").over(order).alias("time_before"),
    ).cache()  # fmt: skip
    try:
        counted = walked.agg(
            F.count("*").alias("messages"),
            F.sum(F.when(F.col("offset") > F.col("before") + 1, 1).otherwise(0)).alias("holes"),
            F.sum(F.greatest(F.col("offset") - F.col("before") - 1, F.lit(0))).alias("missing"),
            F.sum(_is(F.col("offset") == F.col("before"))).alias("doubled"),
            F.sum(_is(F.col("timestamp") < F.col("time_before"))).alias("clock"),
        ).first()
        assert counted is not None
        found.update({name: int(value or 0) for name, value in counted.asDict().items()})
        _examples(found, "doubled", walked.where("offset = before"))
        _examples(found, "clock", walked.where("timestamp < time_before"))
    finally:
        walked.unpersist()


def _is(condition: Column) -> Column:
    return F.when(condition, 1).otherwise(0)


def _against(kept: DataFrame, live: DataFrame, replayed: bool, found: dict[str, Any]) -> None:
    """Every message that both should have. Of the streams: what is behind the archive's end is not archived yet; of the
    archive: what is below a stream's floor has been cut there."""
    ours, theirs = _keys(kept, "kept"), _keys(live, "live")
    both = ours.join(theirs, ["topic", "offset"], "full_outer")
    end = kept.groupBy("topic").agg(F.max("offset").alias("end"))
    begin = live.groupBy("topic").agg(F.min("offset").alias("begin"))
    joined = both.join(F.broadcast(end), "topic", "left").join(F.broadcast(begin), "topic", "left").cache()
    try:
        not_kept = F.col("kept").isNull() & (F.col("offset") <= F.col("end"))
        below = F.lit(False) if replayed else F.col("offset") < F.coalesce("begin", F.lit(1 << 62))
        cut = F.col("live").isNull() & below
        not_live = F.col("live").isNull() & ~cut
        differs = F.col("kept").isNotNull() & F.col("live").isNotNull() & (F.col("kept") != F.col("live"))
        counted = joined.agg(
            F.sum(_is(F.col("kept") == F.col("live"))).alias("same"),
            F.sum(_is(not_kept | not_live)).alias("lost"),
            F.sum(_is(cut)).alias("cut"),
            F.sum(_is(F.col("kept").isNull() & ~F.coalesce(not_kept, F.lit(False)))).alias("not_archived_yet"),
            F.sum(_is(differs)).alias("differs"),
        ).first()
        assert counted is not None
        found.update({name: int(value or 0) for name, value in counted.asDict().items()})
        extra = live.count() - live.select("topic", "offset").distinct().count() if replayed else 0
        found["doubled"] = found.get("doubled", 0) + extra
        _examples(found, "lost", joined.where(not_kept | not_live))
        _examples(found, "differs", joined.where(differs))
    finally:
        joined.unpersist()


def _keys(rows: DataFrame, name: str) -> DataFrame:
    """A digest of all that a message is, by its place."""
    pairs = F.transform(
        F.array_sort("headers"),
        lambda header: F.concat(header["key"], F.lit("\0"), F.hex(header["value"])),
    )
    heads = F.coalesce(F.concat_ws("\0", pairs), F.lit(""))
    text = F.concat(F.unix_micros("timestamp").cast("string"), F.lit("\0"), heads)
    digest = F.sha2(F.concat(F.col("value"), F.lit("\0").cast("binary"), text.cast("binary")), 256)
    return rows.select("topic", "offset", digest.alias(name)).dropDuplicates(["topic", "offset"])


def _sample(found: dict[str, Any], name: str, rows: DataFrame) -> None:
    found[name] = rows.count()
    _examples(found, name, rows)


def _examples(found: dict[str, Any], name: str, rows: DataFrame) -> None:
    if found.get(name):
        some = rows.select("topic", "offset").limit(EXAMPLES).collect()
        found["examples"][name] = [f"{row['topic']} {row['offset']}" for row in some]


WORDS = {
    "messages": "messages", "same": "the same in both", "lost": "lost", "differs": "different", "doubled": "doubled",
    "checksum": "with a wrong checksum", "clock": "older than the one before", "holes": "holes",
    "cut": "cut from the streams since", "not_archived_yet": "not archived yet",
}  # fmt: skip


def line(found: dict[str, Any]) -> str:
    """What was found, for a person."""
    lines = ["sound" if found["sound"] else f"NOT SOUND: {', '.join(found['problems'])}"]
    lines += [f"{found[name]:>14,} {words}" for name, words in WORDS.items() if name in found]
    lines += [f"{name}: {', '.join(places)}" for name, places in found["examples"].items()]
    return "\n".join(lines)


__all__ = ["Verify", "line", "run"]
