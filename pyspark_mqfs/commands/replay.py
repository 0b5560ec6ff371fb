"""`mqfs spark replay`: the messages of an archive → streams, in order, each once.

Owns the plan of a replay: splits of each group that fit one atomic batch. It is written into the archive before the
first split is published, so that a repeat has the same splits; each is committed once, by its number. A message keeps
its headers. Reserved ones become `was.NAME`, and `replay.sequence` and `replay.time` (µs since 1970) have the original
sequence and time; not so with `plain`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import attrs
from pyspark.sql import functions as F

from mqfs import limits
from mqfs.errors import Exists
from mqfs.log import headers
from mqfs.ninep.blocking import Client
from pyspark_mqfs.batch_encoder import KEPT_PREFIX
from pyspark_mqfs.commands import archive
from pyspark_mqfs.commands.folder import Folder
from pyspark_mqfs.commands.session import Failed
from pyspark_mqfs.commands.sources import ROOT, Source, Tell, no_progress
from pyspark_mqfs.connection import Server
from pyspark_mqfs.options import COMMON, Options

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

SEQUENCE, TIME = "replay.sequence", "replay.time"
PLANS = "_mqfs/replays"
MESSAGES, BYTES = limits.UNIT_MESSAGES // 2, limits.UNIT_BYTES // 2  # of a split: the next waits for its commit
STEP = 1_024  # sequences, the unit of splitting
LARGE_STEP, LARGE_BYTES = 64, 64 << 10  # the step for messages above this size


@attrs.frozen
class Replay:
    """The request of `replay`. Times are UNIX times; `rate`: messages a second; `speed`: a factor of the original."""

    path: str
    target: Source
    into: str = ""  # a group, the prefix of all paths
    streams: tuple[str, ...] = ()
    since: float | None = None
    until: float | None = None
    where: str = ""
    rate: int = 0
    speed: float = 0.0
    plain: bool = False
    name: str = ""

    def check(self) -> None:
        """Raises CommandError or OptionError for an invalid request."""
        if self.rate and self.speed:
            raise Failed("--rate and --speed: both given (expected one)")
        self.target.check_server()

    def said(self) -> dict[str, Any]:
        """The parameters that identify this replay."""
        keys = ("into", "streams", "since", "until", "where", "plain")
        return {key: getattr(self, key) for key in keys} | {"streams": list(self.streams)}


def run(spark: SparkSession, what: Replay, tell: Tell = no_progress) -> dict[str, Any]:
    """Publish the messages that are not yet published."""
    what.check()
    folder, rows = Folder(spark, what.path), _selected(archive.opened(spark, what.path), what)
    server = _server(what.target)
    plan = _plan(spark, folder, rows, what, _store(server))
    _make_groups(server, {target_of(stretch[0], what.into) for stretch in plan["stretches"]})
    done = _Progress(plan["stretches"], what, tell)
    for number, (group, first, last, _, _, _) in enumerate(plan["stretches"]):
        done.wait(number)
        part = rows.where((F.col("group") == group) & F.col("offset").between(first, last))
        ordered = _in_order(part, first, last, spark.sparkContext.defaultParallelism)
        ordered.select("value", _headers(what.plain), _topic(what.into).alias("topic")).write.format("mqfs").options(
            **what.target.server(), txnAppId=plan["name"], txnVersion=str(number)
        ).mode("append").save()
        done.add(number)
    return {"replay": plan["name"], "messages": done.messages, "batches": len(plan["stretches"])}


def _in_order(rows: DataFrame, first: int, last: int, tasks: int) -> DataFrame:
    """Partition by ranges of sequences, without the sampling pass of repartitionByRange."""
    share = F.floor((F.col("offset") - first) * tasks / (last - first + 1)).cast("int")
    return rows.repartitionById(tasks, share).sortWithinPartitions("offset")


# ---------------------------------------------------------------- which


def _selected(rows: DataFrame, what: Replay) -> DataFrame:
    if what.streams:
        rows = rows.where(F.col("topic").isin(*what.streams))
    if what.since is not None:
        rows = rows.where(F.col("timestamp") >= F.timestamp_micros(F.lit(int(what.since * 1e6))))
    if what.until is not None:
        rows = rows.where(F.col("timestamp") < F.timestamp_micros(F.lit(int(what.until * 1e6))))
    return rows.where(what.where) if what.where else rows


def _topic(into: str) -> Column:
    path = F.col("topic")
    return F.concat(F.lit(f"{into.strip('/')}/"), path) if into else path


def target_of(group: str, into: str) -> str:
    """The target of a group; "" is the root."""
    own = "" if group == ROOT else group
    return "/".join(name for name in (into.strip("/"), own) if name)


# ---------------------------------------------------------------- headers


def _headers(plain: bool) -> Column:
    """The settable headers, and those of the original sequence and time; a message replayed before keeps its own."""
    given = F.coalesce(F.col("headers"), F.expr("array()").cast("array<struct<key:string,value:binary>>"))
    reserved = sorted(headers.RESERVED)
    free = F.filter(given, lambda header: ~header["key"].isin(reserved))
    if plain:
        return F.filter(free, lambda header: ~_is_ours(header)).alias("headers")
    renamed = F.transform(
        given,
        lambda header: F.struct(
            F.when(header["key"].isin(reserved), F.concat(F.lit(KEPT_PREFIX), header["key"]))
            .otherwise(header["key"])
            .alias("key"),
            header["value"].alias("value"),
        ),
    )
    fresh = F.concat(renamed, F.array(_header(SEQUENCE, F.col("offset")), _header(TIME, F.unix_micros("timestamp"))))
    return F.when(F.exists(given, lambda header: header["key"] == SEQUENCE), free).otherwise(fresh).alias("headers")


def _header(key: str, value: Column) -> Column:
    return F.struct(F.lit(key).alias("key"), value.cast("string").cast("binary").alias("value"))


def _is_ours(header: Column) -> Column:
    return header["key"].isin(SEQUENCE, TIME) | header["key"].startswith(KEPT_PREFIX)


def original(rows: DataFrame) -> DataFrame:
    """Replayed messages with their original sequence, time and headers."""
    given = F.col("headers")
    mine = F.filter(given, lambda header: ~header["key"].isin(SEQUENCE, TIME, headers.SENDER))
    back = F.transform(
        mine,
        lambda header: F.struct(
            F.when(
                header["key"].startswith(KEPT_PREFIX),
                header["key"].substr(F.lit(len(KEPT_PREFIX) + 1), F.length(header["key"])),
            )
            .otherwise(header["key"])
            .alias("key"),
            header["value"].alias("value"),
        ),
    )
    return (
        rows.withColumn("sequence_then", _value_of(SEQUENCE).cast("bigint"))
        .where("sequence_then is not null")
        .withColumn("timestamp", F.timestamp_micros(_value_of(TIME).cast("bigint")))
        .withColumn("offset", F.col("sequence_then"))
        .withColumn("headers", F.when(F.size(back) > 0, back))
        .drop("sequence_then")
    )


def _value_of(key: str) -> Column:
    """The value of a header, null without it."""
    found = F.filter(F.col("headers"), lambda header: header["key"] == key)
    return F.get(found, F.lit(0))["value"].cast("string")


# ---------------------------------------------------------------- the plan


def _plan(spark: SparkSession, folder: Folder, rows: DataFrame, what: Replay, store: str) -> dict[str, Any]:
    """The plan of this name, or a new one. Raises CommandError where it is of another replay."""
    said = {**what.said(), "store": store}
    digest = hashlib.sha256(repr(sorted(said.items())).encode()).hexdigest()[:16]
    about = folder.read_json(archive.ABOUT)
    name = what.name or f"replay-{about['store'][:8]}-{digest}"
    file = f"{PLANS}/{name}.json"
    found = folder.read_json(file)
    if found is None:
        found = {"name": name, "said": said, "stretches": list(_stretches(rows, what))}
        folder.write_json(file, found)
    elif found["said"] != said:
        raise Failed(f"replay {name!r}: used for {found['said']} (expected another --id for {said})")
    return dict(found)


Stretch = tuple[str, int, int, int, int, float]  # group, first, last, messages, bytes, time of the first


def _stretches(rows: DataFrame, what: Replay) -> Iterator[Stretch]:
    """The splits, which fit one atomic batch each; with `speed` in the order of time."""
    counted = _counted(rows, what, STEP).persist()
    try:
        largest = counted.agg(F.max("largest")).first()
        if largest is not None and (largest[0] or 0) > LARGE_BYTES:
            counted.unpersist()
            counted = _counted(rows, what, LARGE_STEP).persist()
        most = min(MESSAGES, what.rate) if what.rate else MESSAGES
        yield from _joined(_flat(counted.toLocalIterator()), most, bool(what.speed))
    finally:
        counted.unpersist()


def _counted(rows: DataFrame, what: Replay, step: int) -> DataFrame:
    """The contents of every `step` sequences."""
    step = max(1, min(step, what.rate)) if what.rate else step
    keys = [F.floor(F.col("offset") / step).alias("step")]
    if what.speed:
        keys.insert(0, F.floor(F.unix_seconds("timestamp")).alias("second"))
    size = F.octet_length("value") + F.coalesce(
        F.aggregate("headers", F.lit(0), lambda so, h: so + F.octet_length(h["key"]) + F.octet_length(h["value"]) + 3),
        F.lit(0),
    )
    return (
        rows.groupBy("group", *keys)
        .agg(
            F.min("offset").alias("first"), F.max("offset").alias("last"), F.count("*").alias("messages"),
            F.sum(size + 160).alias("bytes"), F.min(F.unix_micros("timestamp")).alias("time"),
            F.max(F.octet_length("value")).alias("largest"),
        )
        .orderBy("time" if what.speed else "group", "group", "first")
    )  # fmt: skip


def _flat(rows: Iterable[Any]) -> Iterator[Stretch]:
    for row in rows:
        yield row["group"], row["first"], row["last"], row["messages"], row["bytes"], row["time"] / 1e6


def _joined(stretches: Iterable[Any], most: int, timed: bool) -> Iterator[Stretch]:
    """Merge neighbours of one group up to the limits; with `timed` only those of the same second."""
    held: Any = None
    for one in stretches:
        fits = held is not None and held[0] == one[0] and held[3] + one[3] <= most and held[4] + one[4] <= BYTES
        if fits and not (timed and int(held[5]) != int(one[5])):
            held = (held[0], held[1], one[2], held[3] + one[3], held[4] + one[4], held[5])
            continue
        if held is not None:
            yield held
        held = one
    if held is not None:
        yield held


class _Progress:
    """The progress of a replay, and the pace of its splits."""

    def __init__(self, stretches: list[Stretch], what: Replay, tell: Tell) -> None:
        self._stretches, self._what, self._tell = stretches, what, tell
        self._total = sum(stretch[3] for stretch in stretches)
        self._began = time.monotonic()
        self.messages = 0

    def wait(self, number: int) -> None:
        due = self._began
        if self._what.rate:
            due += self.messages / self._what.rate
        elif self._what.speed:
            due += (self._stretches[number][5] - self._stretches[0][5]) / self._what.speed
        time.sleep(max(due - time.monotonic(), 0))

    def add(self, number: int) -> None:
        self.messages += self._stretches[number][3]
        speed = self.messages / max(time.monotonic() - self._began, 1e-9)
        self._tell(f"replayed: {self.messages:,} of {self._total:,} messages, {speed:,.0f}/s")


# ---------------------------------------------------------------- the target


def _server(target: Source) -> Server:
    return Server.of(Options(target.server(), COMMON, "a command"))


def _store(server: Server) -> str:
    from pyspark_mqfs.catalog import places

    with server.link() as link:
        return str(link.retried(lambda client: places(client, ""))["store"])


def _make_groups(server: Server, groups: Iterable[str]) -> None:
    """Create missing groups, which retain all messages."""
    with server.link() as link:
        for group in sorted(groups):
            link.retried(lambda client, group=group: make_group(client, group))  # type: ignore[misc]


def make_group(client: Client, path: str) -> None:
    """Create a group and its parents where missing, with `replay all`."""
    names = [name for name in path.split("/") if name]
    for end in range(1, len(names) + 1):
        above = "/".join(names[:end])
        try:
            client.mkdir(above)
        except Exists:
            continue
        with client.open(f"{above}/ctl", "w") as file:
            file.write(b"replay all\n")


__all__ = ["Replay", "make_group", "original", "run", "target_of"]
