"""`mqfs spark replay`: the messages of an archive → streams, in order, each once.

The plan of a replay divides each group into splits that fit one atomic batch. It is written into the archive before the
first split is published, so that a repeat has the same splits; each is committed once, by its number. Messages archived
later are planned after that, in a file of their own.

A message keeps its headers. Reserved ones become `was.NAME`, and `replay.sequence` and `replay.time` (µs since 1970)
have the original sequence and time. With `plain` reserved headers and these are left out.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import attrs
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from mqfs import limits
from mqfs.errors import Exists
from mqfs.ninep.client.connection import Client
from mqfs.records import headers
from pyspark_mqfs.batch_encoder import RESERVED_PREFIX
from pyspark_mqfs.catalog import path_of, stream_positions
from pyspark_mqfs.commands import archive
from pyspark_mqfs.commands.folder import Folder
from pyspark_mqfs.commands.session import CommandError
from pyspark_mqfs.commands.sources import ROOT, Progress, Source, header_of, headers_or_empty, no_progress
from pyspark_mqfs.connection import Server, read_text, write_text

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
    into: str = ""  # a group, put before all paths
    streams: tuple[str, ...] = ()
    since: float | None = None
    until: float | None = None
    where: str = ""
    rate: int = 0
    speed: float = 0.0
    plain: bool = False
    name: str = ""

    def check(self) -> None:
        """Raise CommandError or OptionError for an invalid request."""
        if self.rate and self.speed:
            raise CommandError("--rate and --speed: both given (expected one)")
        self.target.connection()

    def identity(self) -> dict[str, Any]:
        """Return the parameters that identify this replay."""
        keys = ("into", "streams", "since", "until", "where", "plain")
        return {key: getattr(self, key) for key in keys} | {"streams": list(self.streams)}


def run(spark: SparkSession, request: Replay, progress: Progress = no_progress) -> dict[str, Any]:
    """Publish the messages that are not yet published."""
    request.check()
    folder, rows = Folder(spark, request.path), _selected(spark, request)
    server = request.target.connection()
    plan = _plan(spark, folder, rows, request, _store(server))
    rows = _selected(spark, request)  # again: another run may have planned messages archived meanwhile
    groups = {target_of(split[0], request.into) for split in plan["stretches"]}
    make_groups(server, groups)
    published = _published(server, plan, groups)
    remaining = [
        (number, split)
        for number, split in enumerate(plan["stretches"])
        if number >= published.get(target_of(split[0], request.into), 0)
    ]
    pace = _Pace([split for _, split in remaining], request, progress)
    for turn, (number, (group, first, last, _, _, _)) in enumerate(remaining):
        pace.wait(turn)
        part = rows.where((F.col("group") == group) & F.col("offset").between(first, last))
        ordered = _partition(part, first, last, spark.sparkContext.defaultParallelism)
        ordered.select("value", _headers(request.plain), topic_in(request.into).alias("topic")).write.format(
            "mqfs"
        ).options(**request.target.server(), txnAppId=plan["name"], txnVersion=str(number)).mode("append").save()
        pace.add(turn)
    return {"replay": plan["name"], "messages": pace.messages, "batches": len(remaining)}


def _partition(rows: DataFrame, first: int, last: int, tasks: int) -> DataFrame:
    """Partition by ranges of sequences, without the sampling pass of repartitionByRange."""
    share = F.floor((F.col("offset") - first) * tasks / (last - first + 1)).cast("int")
    return rows.repartitionById(tasks, share).sortWithinPartitions("offset")


# ---------------------------------------------------------------- selection


def _selected(spark: SparkSession, request: Replay) -> DataFrame:
    """Return the present messages of the archive that the request selects."""
    rows = archive.open_archive(spark, request.path)
    if request.streams:
        rows = rows.where(F.col("topic").isin(*request.streams))
    if request.since is not None:
        rows = rows.where(F.col("timestamp") >= F.timestamp_micros(F.lit(int(request.since * 1e6))))
    if request.until is not None:
        rows = rows.where(F.col("timestamp") < F.timestamp_micros(F.lit(int(request.until * 1e6))))
    return rows.where(request.where) if request.where else rows


def topic_in(into: str) -> Column:
    """Return the path that a message is published to: below the group `into` unless that is empty."""
    path = F.col("topic")
    return F.concat(F.lit(f"{into.strip('/')}/"), path) if into else path


def target_of(group: str, into: str) -> str:
    """Return the group that a group's messages are published to; "" is the root."""
    own = "" if group == ROOT else group
    return "/".join(name for name in (into.strip("/"), own) if name)


# ---------------------------------------------------------------- headers


def _headers(plain: bool) -> Column:
    """Return the headers that a client may set, and those with the original sequence and time; a message that was
    replayed before keeps its own."""
    present, reserved = headers_or_empty(), sorted(headers.RESERVED)
    settable = F.filter(present, lambda header: ~header["key"].isin(reserved))
    if plain:
        return F.filter(settable, lambda header: ~_is_replay_header(header)).alias("headers")
    renamed = F.transform(
        present,
        lambda header: F.struct(
            F.when(header["key"].isin(reserved), F.concat(F.lit(RESERVED_PREFIX), header["key"]))
            .otherwise(header["key"])
            .alias("key"),
            header["value"].alias("value"),
        ),
    )
    with_origin = F.concat(
        renamed, F.array(header_of(SEQUENCE, F.col("offset")), header_of(TIME, F.unix_micros("timestamp")))
    )
    return (
        F.when(F.exists(present, lambda header: header["key"] == SEQUENCE), settable)
        .otherwise(with_origin)
        .alias("headers")
    )


def _is_replay_header(header: Column) -> Column:
    return header["key"].isin(SEQUENCE, TIME) | header["key"].startswith(RESERVED_PREFIX)


def restore_originals(rows: DataFrame, *, others: bool = False) -> DataFrame:
    """Return replayed messages with their original sequence, time and headers. `others`: also the remaining messages,
    unchanged."""
    present = F.col("headers")
    settable = F.filter(present, lambda header: ~header["key"].isin(SEQUENCE, TIME, headers.SENDER))
    back = F.transform(
        settable,
        lambda header: F.struct(
            F.when(
                header["key"].startswith(RESERVED_PREFIX),
                header["key"].substr(F.lit(len(RESERVED_PREFIX) + 1), F.length(header["key"])),
            )
            .otherwise(header["key"])
            .alias("key"),
            header["value"].alias("value"),
        ),
    )
    replayed = F.col("sequence_then").isNotNull()
    then = F.timestamp_micros(_value_of(TIME).try_cast("bigint"))
    return (
        rows.withColumn("sequence_then", _value_of(SEQUENCE).try_cast("bigint"))
        .where(replayed | F.lit(others))
        .withColumn("timestamp", F.when(replayed, then).otherwise(F.col("timestamp")))
        .withColumn("offset", F.when(replayed, F.col("sequence_then")).otherwise(F.col("offset")))
        .withColumn("headers", F.when(~replayed, present).when(F.size(back) > 0, back))
        .drop("sequence_then")
    )


def _value_of(key: str) -> Column:
    """Return the value of a header; null if it is missing."""
    matches = F.filter(F.col("headers"), lambda header: header["key"] == key)
    return F.get(matches, F.lit(0))["value"].cast("string")


# ---------------------------------------------------------------- the plan


def _plan(spark: SparkSession, folder: Folder, rows: DataFrame, request: Replay, store: str) -> dict[str, Any]:
    """Return the plan of this name, extended by messages archived since, or a new plan. Raises CommandError if the plan
    is of another replay, or if the archive has more messages than were planned."""
    identity = {**request.identity(), "store": store}
    digest = hashlib.sha256(repr(sorted(identity.items())).encode()).hexdigest()[:16]
    about = folder.read_json(archive.ABOUT)
    name = request.name or f"replay-{about['store'][:8]}-{digest}"
    file = f"{PLANS}/{name}.json"
    plan = folder.read_json(file)
    if plan is None:
        new = {"name": name, "said": identity, "stretches": list(_splits(rows, request))}
        if folder.create_json(file, new):
            return new
        plan = folder.read_json(file)  # made by another run meanwhile
    if plan["said"] != identity:
        raise CommandError(f"replay {name!r}: used for {plan['said']} (expected another --id for {identity})")
    count = 0
    while True:
        while more := folder.read_json(f"{PLANS}/{name}+{count + 1}.json"):
            count += 1
            plan["stretches"] += more["stretches"]
        new = {"stretches": _unplanned(spark, rows, request, plan)}
        if not new["stretches"]:
            return dict(plan)
        # A file of its own: a crash while the plan is replaced would lose it. If another run creates the file first,
        # its splits count, as it may have published them.
        folder.create_json(f"{PLANS}/{name}+{count + 1}.json", new)


def _unplanned(spark: SparkSession, rows: DataFrame, request: Replay, plan: dict[str, Any]) -> list[Split]:
    """Return the splits of the messages after the last planned one of each group. Raises CommandError."""
    ends: dict[str, int] = {}
    for group, _, last, *_ in plan["stretches"]:
        ends[group] = max(last, ends.get(group, 0))
    planned = F.broadcast(spark.createDataFrame(list(ends.items()), "group string, planned bigint"))
    rows = rows.join(planned, "group", "left")
    present, expected = rows.where("offset <= planned").count(), sum(split[3] for split in plan["stretches"])
    if present > expected:
        text = f"the archive has {present} messages where {expected} were planned (expected another --id)"
        raise CommandError(f"replay {plan['name']!r}: {text}")
    return list(_splits(rows.where("planned is null or offset > planned").drop("planned"), request))


Split = tuple[str, int, int, int, int, float]  # group, first, last, messages, bytes, time of the first


def _splits(rows: DataFrame, request: Replay) -> Iterator[Split]:
    """Yield the splits, each of which fits one atomic batch; with `speed` in the order of time."""
    steps = _count_steps(rows, request, STEP).persist()
    try:
        largest = steps.agg(F.max("largest")).first()
        if largest is not None and (largest[0] or 0) > LARGE_BYTES:
            steps.unpersist()
            steps = _count_steps(rows, request, LARGE_STEP).persist()
        most = min(MESSAGES, request.rate) if request.rate else MESSAGES
        columns = ("group", "first", "last", "messages", "bytes")
        splits = ((*(row[name] for name in columns), row["time"] / 1e6) for row in steps.toLocalIterator())
        yield from _merge(splits, most, bool(request.speed))
    finally:
        steps.unpersist()


def _count_steps(rows: DataFrame, request: Replay, step: int) -> DataFrame:
    """Return the totals of every `step` sequences."""
    step = max(1, min(step, request.rate)) if request.rate else step
    keys = [F.floor(F.col("offset") / step).alias("step")]
    if request.speed:
        keys.insert(0, F.floor(F.unix_seconds("timestamp")).alias("second"))
    size = F.octet_length("value") + F.coalesce(
        F.aggregate(
            "headers", F.lit(0), lambda total, h: total + F.octet_length(h["key"]) + F.octet_length(h["value"]) + 3
        ),
        F.lit(0),
    )
    return (
        rows.groupBy("group", *keys)
        .agg(
            F.min("offset").alias("first"), F.max("offset").alias("last"), F.count("*").alias("messages"),
            F.sum(size + 160).alias("bytes"), F.min(F.unix_micros("timestamp")).alias("time"),
            F.max(F.octet_length("value")).alias("largest"),
        )
        .repartition(1)  # there are few rows, and `toLocalIterator` runs a job for each partition
        .sortWithinPartitions("time" if request.speed else "group", "group", "first")
    )  # fmt: skip


def _merge(splits: Iterable[Any], most: int, timed: bool) -> Iterator[Split]:
    """Merge neighbours of one group up to the limits; with `timed` only those of the same second."""
    pending: Any = None
    for split in splits:
        fits = (
            pending is not None
            and pending[0] == split[0]
            and pending[3] + split[3] <= most
            and pending[4] + split[4] <= BYTES
        )
        if fits and not (timed and int(pending[5]) != int(split[5])):
            pending = (pending[0], pending[1], split[2], pending[3] + split[3], pending[4] + split[4], pending[5])
            continue
        if pending is not None:
            yield pending
        pending = split
    if pending is not None:
        yield pending


class _Pace:
    """The progress of a replay, and the pace of its splits."""

    def __init__(self, splits: list[Split], request: Replay, progress: Progress) -> None:
        self._splits, self._request, self._progress = splits, request, progress
        self._total = sum(split[3] for split in splits)
        self._started = time.monotonic()
        self.messages = 0

    def wait(self, number: int) -> None:
        due = self._started
        if self._request.rate:
            due += self.messages / self._request.rate
        elif self._request.speed:
            due += (self._splits[number][5] - self._splits[0][5]) / self._request.speed
        time.sleep(max(due - time.monotonic(), 0))

    def add(self, number: int) -> None:
        self.messages += self._splits[number][3]
        speed = self.messages / max(time.monotonic() - self._started, 1e-9)
        self._progress(f"replayed: {self.messages:,} of {self._total:,} messages, {speed:,.0f}/s")


# ---------------------------------------------------------------- the target


def _store(server: Server) -> str:
    with server.link() as link:
        return str(link.with_retry(lambda client: stream_positions(client, ""))["store"])


def make_groups(server: Server, groups: Iterable[str]) -> None:
    """Create missing groups, which retain all messages."""
    with server.link() as link:
        for group in sorted(groups):
            link.with_retry(partial(make_group, path=group))


def _published(server: Server, plan: dict[str, Any], groups: Iterable[str]) -> dict[str, int]:
    """Return, by group, the number of the first split that was not committed there; groups without any committed split
    are left out."""
    prefix, found = f"committed spark-app-{plan['name']}.", {}
    with server.link() as link:
        for group in groups:
            lines = link.with_retry(partial(read_text, path=path_of(group, ".txn/ctl")))
            for line in lines.split("\n"):
                if line.startswith(prefix) and line[len(prefix) :].isdigit():
                    found[group] = int(line[len(prefix) :])
    return found


def make_group(client: Client, path: str) -> None:
    """Create a group and its parents if they are missing, with `replay all`. An existing group without streams gets
    that setting, too: an earlier run may have ended before. Raises CommandError if the group retains nothing."""
    names = [name for name in path.split("/") if name]
    for end in range(1, len(names) + 1):
        above = "/".join(names[:end])
        try:
            client.mkdir(above)
        except Exists:
            if end < len(names) or retains(client, above):
                continue
            if json.loads(read_text(client, f"{above}/.stats"))["streams"]:
                raise CommandError(f"{above}: replay off without consumers (expected 'replay all')") from None
        write_text(client, f"{above}/ctl", "replay all\n")


def retains(client: Client, group: str) -> bool:
    """Whether a group retains messages without a reader: by its settings, or for its consumers."""
    lines = read_text(client, path_of(group, "ctl")).split("\n")
    if "replay off" not in lines or "deliver one" in lines:
        return True
    return bool(json.loads(read_text(client, path_of(group, ".stats"))).get("consumers"))
