"""`mqfs spark archive`: streams → Parquet by group, stream and date of the message, each message once.

Owns the layout of an archive. A batch of the query is written aside; then its files get the batch's number as their
names and are renamed into place, those of an earlier try of the same batch being removed first. So what is below
`messages` is plain Parquet for any reader, and the archive may be moved.

    DIR/_mqfs/archive.json     what it is an archive of
    DIR/_mqfs/checkpoint/      how far it is
    DIR/messages/group=G/stream=S/date=D/NUMBER-PIECE.parquet
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
from pyspark.sql import functions as F

from pyspark_mqfs.commands.folder import Folder
from pyspark_mqfs.commands.session import Failed
from pyspark_mqfs.commands.sources import Source, Tell, follow, group_of, no_progress, path_of, stream_of, watch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FORMAT = 1
ABOUT, CHECKPOINT, ASIDE, MESSAGES = "_mqfs/archive.json", "_mqfs/checkpoint", "_mqfs/aside", "messages"
PARTITIONS = ("group", "stream", "date")
SCHEMA = (
    "offset bigint, timestamp timestamp, value binary, headers array<struct<key:string,value:binary>>, crc bigint,"
    " group string, stream string, date date"
)
FILE_BYTES = 128 << 20
FILES_PER_BATCH = 8


@attrs.frozen
class Archive:
    """What is asked for."""

    source: Source
    path: str
    file_bytes: int = FILE_BYTES
    batch_bytes: int = 0  # 0: some files' worth

    def check(self) -> None:
        """Raises Failed or OptionError for what means nothing."""
        self.source.check()


def run(spark: SparkSession, what: Archive, tell: Tell = no_progress) -> dict[str, Any]:
    """Bring the archive up to what is there now. Failed where it is one of something else."""
    survey = what.source.survey()
    folder = Folder(spark, what.path)
    about = {"format": FORMAT, "store": survey.store, "streams": what.source.which()}
    _claim(folder, about)
    cores = spark.sparkContext.defaultParallelism
    rows = follow(
        spark, what.source,
        maxBytesPerTrigger=str(what.batch_bytes or what.file_bytes * max(FILES_PER_BATCH, 2 * cores)),
        maxBytesPerPartition=str(what.file_bytes),
        groupIdPrefix="archive",
    )  # fmt: skip
    into = _Into(folder)
    query = (
        columns(rows)
        .writeStream.foreachBatch(into.write)
        .option("checkpointLocation", folder.under(CHECKPOINT))
        .trigger(availableNow=True)
        .start()
    )
    try:
        count = watch(query, tell, "archived", 0)
    finally:
        query.stop()
    return {"archive": folder.path, "messages": count}


def columns(rows: DataFrame) -> DataFrame:
    """As they stand in an archive."""
    return rows.select(
        "offset", "timestamp", "value", "headers", F.crc32("value").alias("crc"),
        group_of(F.col("topic")).alias("group"), stream_of(F.col("topic")).alias("stream"),
        F.to_date("timestamp").alias("date"),
    )  # fmt: skip


def _claim(folder: Folder, about: dict[str, Any]) -> None:
    """It is ours, or new."""
    found = folder.read_json(ABOUT)
    if found is None:
        if folder.names():
            raise Failed(f"{folder.path} is no archive and not empty; an archive or a new directory is right")
        folder.write_json(ABOUT, about)
        return
    for name, value in about.items():
        if found.get(name) != value:
            raise Failed(
                f"{folder.path} is an archive of {name} {_shown(found.get(name))}, not of {_shown(value)}; take another"
                " directory"
            )


def _shown(value: Any) -> str:
    return ", ".join(value.values()) if isinstance(value, dict) else str(value)


class _Into:
    """Where the batches of one run go."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._first = True  # only the first one of a run may have been tried before

    def write(self, batch: DataFrame, number: int) -> None:
        """One batch, aside and then into place. May be repeated at every point."""
        folder, aside = self._folder, f"{ASIDE}/{number}"
        batch.write.mode("overwrite").partitionBy(*PARTITIONS).parquet(folder.under(aside))
        if self._first:
            for old in folder.files(f"{MESSAGES}/*/*/*/{number:010d}-*.parquet"):
                folder.remove(old)
        made = set()
        for piece, name in enumerate(folder.files(f"{aside}/*/*/*/*.parquet")):
            where = f"{MESSAGES}/{'/'.join(name.split('/')[-4:-1])}"
            if where not in made:
                made.add(where)
                folder.make(where)
            folder.rename(name, f"{where}/{number:010d}-{piece:05d}.parquet")
        folder.remove(ASIDE)
        self._first = False


def opened(spark: SparkSession, path: str) -> DataFrame:
    """The messages of an archive, as the reader has them, with `crc`. Failed where there is none."""
    folder = Folder(spark, path)
    about = folder.read_json(ABOUT)
    if about is None:
        raise Failed(f"{folder.path} is no archive: {ABOUT} is not there")
    if about["format"] != FORMAT:
        raise Failed(f"{folder.path} is an archive of format {about['format']}; {FORMAT} is right")
    if not folder.exists(MESSAGES):
        folder.make(MESSAGES)
    rows = spark.read.schema(SCHEMA).parquet(folder.under(MESSAGES))
    return rows.withColumn("topic", path_of(F.col("group"), F.col("stream")))


__all__ = ["Archive", "columns", "opened", "run"]
