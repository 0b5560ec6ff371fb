"""`mqfs spark verify`: check streams, an archive, or one against the other.

Owns the checks. Every problem is counted, with some examples. The reader always verifies the checksum of the log; that
of an archive is of the body, computed when archiving.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
from pyspark.sql import functions as F

from pyspark_mqfs.commands import archive, replay
from pyspark_mqfs.commands.sequence_audit import BITS, EXAMPLES, walk
from pyspark_mqfs.commands.session import Failed
from pyspark_mqfs.commands.sources import Source, Tell, group_of, no_progress, read

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

PROBLEMS = ("doubled", "clock", "checksum", "lost", "differs")  # holes are legal in sequences


@attrs.frozen
class Verify:
    """The request of `verify`: an archive, streams, or both, to be compared."""

    path: str = ""
    source: Source | None = None
    replayed: bool = False  # the streams are a replay of the archive
    into: str = ""  # the prefix of the replay
    holes: bool = False  # count holes as problems

    def check(self) -> None:
        """Raises CommandError or OptionError for an invalid request."""
        if not self.path and self.source is None:
            raise Failed("verify: no source (expected --archive, --at, or both)")
        if self.source is not None:
            self.source.check()


def run(spark: SparkSession, what: Verify, tell: Tell = no_progress) -> dict[str, Any]:
    """Counts, and examples of problems; `sound`: whether there are none."""
    what.check()
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
    """Audit the sequences of each group."""
    walked = walk(rows)
    found.update({name: getattr(walked, name) for name in ("messages", "holes", "missing", "doubled", "clock")})
    for name, places in walked.places.items():
        here = F.lit(False)
        for group, sequence in places[:EXAMPLES]:
            here = here | ((F.col("group") == group) & (F.col("offset") == sequence))
        _examples(found, name, rows.where(here).dropDuplicates(["topic", "offset"]))


def _is(condition: Column) -> Column:
    return F.when(condition, 1).otherwise(0)


def _against(kept: DataFrame, live: DataFrame, replayed: bool, found: dict[str, Any]) -> None:
    """Compare the messages of both. Those of streams after the end of the archive are not archived yet; those of the
    archive below the first of a stream were trimmed there. Splits with equal digests are equal; only the others are
    compared by message."""
    sums = _sums(kept, "kept").join(_sums(live, "live"), ["topic", "stretch"], "full_outer").cache()
    try:
        end = F.broadcast(sums.groupBy("topic").agg(F.max("kept.last").alias("end")))
        begin = F.broadcast(sums.groupBy("topic").agg(F.min("live.first").alias("begin")))
        agree = F.col("kept").isNotNull() & F.col("kept").eqNullSafe(F.col("live"))
        same = sums.where(agree).agg(F.sum("kept.messages")).first()
        assert same is not None
        others = F.broadcast(sums.where(~agree).select("topic", "stretch"))
        left, right = (rows.join(others, ["topic", "stretch"], "left_semi") for rows in map(_stretched, (kept, live)))
        both = _keys(left, "kept").join(_keys(right, "live"), ["topic", "offset"], "full_outer")
        joined = both.join(end, "topic", "left").join(begin, "topic", "left").cache()
        try:
            _compare(joined, replayed, found)
        finally:
            joined.unpersist()
        found["same"] += int(same[0] or 0)
        extra = right.count() - right.select("topic", "offset").distinct().count() if replayed else 0
        found["doubled"] = found.get("doubled", 0) + extra
    finally:
        sums.unpersist()


def _compare(joined: DataFrame, replayed: bool, found: dict[str, Any]) -> None:
    """Count the messages of both by the result of their comparison."""
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
    _examples(found, "lost", joined.where(not_kept | not_live))
    _examples(found, "differs", joined.where(differs))


def _stretched(rows: DataFrame) -> DataFrame:
    return rows.withColumn("stretch", F.shiftright("offset", BITS))


def _sums(rows: DataFrame, name: str) -> DataFrame:
    """The count and digests of each split of the sequences of a stream."""
    heads = F.coalesce(F.array_sort("headers"), F.expr("array()").cast("array<struct<key:string,value:binary>>"))
    digest = F.xxhash64("offset", "value", F.unix_micros("timestamp"), heads)
    other = F.xxhash64(digest, F.octet_length("value"), F.crc32("value"))
    return (
        _stretched(rows)
        .select("topic", "stretch", "offset", digest.alias("digest"), F.shiftrightunsigned(other, 24).alias("other"))
        .groupBy("topic", "stretch")
        .agg(
            F.struct(
                F.count("*").alias("messages"), F.min("offset").alias("first"), F.max("offset").alias("last"),
                F.bit_xor("digest").alias("digests"), F.sum("other").alias("others"),
            ).alias(name)
        )
    )  # fmt: skip


def _keys(rows: DataFrame, name: str) -> DataFrame:
    """A digest of each message, by stream and sequence."""
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
    """The result, for a terminal."""
    lines = ["sound" if found["sound"] else f"NOT SOUND: {', '.join(found['problems'])}"]
    lines += [f"{found[name]:>14,} {words}" for name, words in WORDS.items() if name in found]
    lines += [f"{name}: {', '.join(places)}" for name, places in found["examples"].items()]
    return "\n".join(lines)


__all__ = ["Verify", "line", "run"]
