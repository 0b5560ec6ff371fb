"""`mqfs spark verify`: check streams, an archive, or one against the other.

Every problem is counted, with some examples. The reader always verifies the checksum of the log. The checksum in an
archive is of the body, and was computed when archiving.
"""

from __future__ import annotations

from typing import Any

import attrs
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from pyspark_mqfs.commands import archive, replay
from pyspark_mqfs.commands.sequence_audit import BITS, EXAMPLES, audit
from pyspark_mqfs.commands.session import CommandError
from pyspark_mqfs.commands.sources import Progress, Source, group_of, no_progress, read

PROBLEMS = ("doubled", "clock", "checksum", "lost", "differs")  # holes are legal in sequences


@attrs.frozen
class Verify:
    """The request of `verify`: an archive, streams, or both, to be compared."""

    path: str = ""
    source: Source | None = None
    replayed: bool = False  # the streams are a replay of the archive
    into: str = ""  # the group put before the paths of the replay
    holes: bool = False  # whether holes count as problems

    def check(self) -> None:
        """Raise CommandError or OptionError for an invalid request."""
        if not self.path and self.source is None:
            raise CommandError("verify: no source (expected --archive, --at, or both)")
        if self.source is not None:
            self.source.check()


def run(spark: SparkSession, request: Verify, progress: Progress = no_progress) -> dict[str, Any]:
    """Return counts, and examples of problems; `sound`: whether there are none."""
    request.check()
    result: dict[str, Any] = {"examples": {}}
    archived = archive.open_archive(spark, request.path) if request.path else None
    live = _live(spark, request)
    if archived is not None:
        progress("reading the archive")
        _audit(archived, result)
        corrupt = archived.where(F.crc32("value") != F.col("crc"))
        result["checksum"] = corrupt.count()
        _examples(result, "checksum", corrupt)
    if live is not None and archived is None:
        progress("reading the streams")
        _audit(live.withColumn("group", group_of(F.col("topic"))), result)
    if live is not None and archived is not None:
        progress("comparing")
        if request.replayed:  # a message replayed into the archived streams kept its first sequence in the next replay
            archived = replay.restore_originals(archived, others=True)
        _compare_all(archived, live, request.replayed, result)
    problems = [name for name in (*PROBLEMS, *(("holes",) if request.holes else ())) if result.get(name)]
    return {**result, "sound": not problems, "problems": problems}


def _live(spark: SparkSession, request: Verify) -> DataFrame | None:
    if request.source is None:
        return None
    rows = read(spark, request.source)
    if not request.replayed:
        return rows
    rows = replay.restore_originals(rows)
    prefix = f"{request.into.strip('/')}/"
    return rows.withColumn("topic", F.expr(f"substr(topic, {len(prefix) + 1})")) if request.into else rows


def _audit(rows: DataFrame, result: dict[str, Any]) -> None:
    """Audit the sequences of each group."""
    sequences = audit(rows)
    result.update({name: getattr(sequences, name) for name in ("messages", "holes", "missing", "doubled", "clock")})
    for name, places in sequences.places.items():
        here = F.lit(False)
        for group, sequence in places[:EXAMPLES]:
            here = here | ((F.col("group") == group) & (F.col("offset") == sequence))
        _examples(result, name, rows.where(here).dropDuplicates(["topic", "offset"]))


def _to_int(condition: Column) -> Column:
    return F.when(condition, 1).otherwise(0)


def _compare_all(archived: DataFrame, live: DataFrame, replayed: bool, result: dict[str, Any]) -> None:
    """Compare the messages of both. Messages of a stream after the end of the archive are not archived yet; messages of
    the archive before the first of a stream were trimmed there. Splits with equal digests are equal; only the others
    are compared by message."""
    sums = _sums(archived, "archived").join(_sums(live, "live"), ["topic", "split"], "full_outer").cache()
    try:
        end = F.broadcast(sums.groupBy("topic").agg(F.max("archived.last").alias("end")))
        begin = F.broadcast(sums.groupBy("topic").agg(F.min("live.first").alias("begin")))
        agree = F.col("archived").isNotNull() & F.col("archived").eqNullSafe(F.col("live"))
        same = sums.where(agree).agg(F.sum("archived.messages")).first()
        assert same is not None
        others = F.broadcast(sums.where(~agree).select("topic", "split"))
        left, right = (
            rows.join(others, ["topic", "split"], "left_semi") for rows in map(_with_split, (archived, live))
        )
        both = _keys(left, "archived").join(_keys(right, "live"), ["topic", "offset"], "full_outer")
        joined = both.join(end, "topic", "left").join(begin, "topic", "left").cache()
        try:
            _compare(joined, replayed, result)
        finally:
            joined.unpersist()
        result["same"] += int(same[0] or 0)
        extra = right.count() - right.select("topic", "offset").distinct().count() if replayed else 0
        result["doubled"] = result.get("doubled", 0) + extra
    finally:
        sums.unpersist()


def _compare(joined: DataFrame, replayed: bool, result: dict[str, Any]) -> None:
    """Count the messages of both by the result of their comparison."""
    not_archived = F.col("archived").isNull() & (F.col("offset") <= F.col("end"))
    below = F.lit(False) if replayed else F.col("offset") < F.coalesce("begin", F.lit(1 << 62))
    trimmed = F.col("live").isNull() & below
    not_live = F.col("live").isNull() & ~trimmed
    differs = F.col("archived").isNotNull() & F.col("live").isNotNull() & (F.col("archived") != F.col("live"))
    counted = joined.agg(
        F.sum(_to_int(F.col("archived") == F.col("live"))).alias("same"),
        F.sum(_to_int(not_archived | not_live)).alias("lost"),
        F.sum(_to_int(trimmed)).alias("cut"),
        F.sum(_to_int(F.col("archived").isNull() & ~F.coalesce(not_archived, F.lit(False)))).alias("not_archived_yet"),
        F.sum(_to_int(differs)).alias("differs"),
    ).first()
    assert counted is not None
    result.update({name: int(value or 0) for name, value in counted.asDict().items()})
    _examples(result, "lost", joined.where(not_archived | not_live))
    _examples(result, "differs", joined.where(differs))


def _with_split(rows: DataFrame) -> DataFrame:
    return rows.withColumn("split", F.shiftright("offset", BITS))


def _sums(rows: DataFrame, name: str) -> DataFrame:
    """Return the count and digests of each split of the sequences of a stream."""
    heads = F.coalesce(F.array_sort("headers"), F.expr("array()").cast("array<struct<key:string,value:binary>>"))
    digest = F.xxhash64("offset", "value", F.unix_micros("timestamp"), heads)
    other = F.xxhash64(digest, F.octet_length("value"), F.crc32("value"))
    return (
        _with_split(rows)
        .select("topic", "split", "offset", digest.alias("digest"), F.shiftrightunsigned(other, 24).alias("other"))
        .groupBy("topic", "split")
        .agg(
            F.struct(
                F.count("*").alias("messages"), F.min("offset").alias("first"), F.max("offset").alias("last"),
                F.bit_xor("digest").alias("digests"), F.sum("other").alias("others"),
            ).alias(name)
        )
    )  # fmt: skip


def _keys(rows: DataFrame, name: str) -> DataFrame:
    """Return a digest of each message, by stream and sequence."""
    pairs = F.transform(
        F.array_sort("headers"),
        lambda header: F.concat(header["key"], F.lit("\0"), F.hex(header["value"])),
    )
    heads = F.coalesce(F.concat_ws("\0", pairs), F.lit(""))
    text = F.concat(F.unix_micros("timestamp").cast("string"), F.lit("\0"), heads)
    digest = F.sha2(F.concat(F.col("value"), F.lit("\0").cast("binary"), text.cast("binary")), 256)
    return rows.select("topic", "offset", digest.alias(name)).dropDuplicates(["topic", "offset"])


def _examples(result: dict[str, Any], name: str, rows: DataFrame) -> None:
    if result.get(name):
        sample = rows.select("topic", "offset").limit(EXAMPLES).collect()
        result["examples"][name] = [f"{row['topic']} {row['offset']}" for row in sample]


LABELS = {
    "messages": "messages", "same": "the same in both", "lost": "lost", "differs": "different", "doubled": "doubled",
    "checksum": "with a wrong checksum", "clock": "older than the one before", "holes": "holes",
    "cut": "cut from the streams since", "not_archived_yet": "not archived yet",
}  # fmt: skip


def summary(result: dict[str, Any]) -> str:
    """Return the result as text for a terminal."""
    lines = ["sound" if result["sound"] else f"NOT SOUND: {', '.join(result['problems'])}"]
    lines += [f"{result[name]:>14,} {label}" for name, label in LABELS.items() if name in result]
    lines += [f"{name}: {', '.join(places)}" for name, places in result["examples"].items()]
    return "\n".join(lines)
