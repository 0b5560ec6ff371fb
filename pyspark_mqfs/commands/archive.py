"""`mqfs spark archive`: streams → Parquet by group, stream and date of the message, each message once.

A batch of the query is written to a folder aside. Files of an earlier attempt at the batch are removed; then its own
are renamed into place, with the number of the batch in their names. So `messages` is plain Parquet for any reader, and
an archive may be moved.

    DIR/_mqfs/archive.json     store and streams
    DIR/_mqfs/checkpoint/      of the query
    DIR/messages/group=G/stream=S/date=D/NUMBER-PIECE.parquet
"""

from __future__ import annotations

import json
import shlex
from typing import Any

import attrs
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from pyspark_mqfs.catalog import ServerCatalog, split
from pyspark_mqfs.commands.folder import Folder
from pyspark_mqfs.commands.session import CommandError
from pyspark_mqfs.commands.sources import (
    ROOT,
    Progress,
    Source,
    follow,
    group_of,
    no_progress,
    path_of,
    selected_names,
    stream_of,
    watch,
)

FORMAT = 1
ABOUT, CHECKPOINT, ASIDE, MESSAGES = "_mqfs/archive.json", "_mqfs/checkpoint", "_mqfs/aside", "messages"
PARTITIONS = ("group", "stream", "date")
SCHEMA = (
    "offset bigint, timestamp timestamp, value binary, headers array<struct<key:string,value:binary>>, crc bigint,"
    " group string, stream string, date date"
)
FILE_BYTES = 128 << 20
FILES_PER_BATCH = 8
SCHEMES, NAME_BYTES = ("file", "hdfs"), 255  # file systems that limit the length of a name


@attrs.frozen
class Archive:
    """The request of `archive`."""

    source: Source
    path: str
    file_bytes: int = FILE_BYTES
    batch_bytes: int = 0  # 0: of several files

    def check(self) -> None:
        """Raise CommandError or OptionError for an invalid request."""
        self.source.check()


def run(spark: SparkSession, request: Archive, progress: Progress = no_progress) -> dict[str, Any]:
    """Add the present messages to the archive. Raises CommandError if it is of another store or of other streams."""
    request.source.check_lists()
    catalog = request.source.catalog()
    folder = Folder(spark, request.path)
    metadata = {"format": FORMAT, "store": catalog.store, "streams": request.source.selection_options()}
    _check_identity(folder, metadata)
    _check_names(spark, folder, catalog)
    cores = spark.sparkContext.defaultParallelism
    rows = follow(
        spark, request.source,
        maxBytesPerTrigger=str(request.batch_bytes or request.file_bytes * max(FILES_PER_BATCH, 2 * cores)),
        maxBytesPerPartition=str(request.file_bytes),
        groupIdPrefix="archive",
    )  # fmt: skip
    batch_files = _BatchFiles(folder)
    query = (
        archive_columns(rows)
        .writeStream.foreachBatch(batch_files.write)
        .option("checkpointLocation", folder.under(CHECKPOINT))
        .trigger(availableNow=True)
        .start()
    )
    try:
        count = watch(query, progress, "archived")
    finally:
        query.stop()
    return {"archive": folder.path, "messages": count}


def archive_columns(rows: DataFrame) -> DataFrame:
    """Return the columns of an archive."""
    return rows.select(
        "offset", "timestamp", "value", "headers", F.crc32("value").alias("crc"),
        group_of(F.col("topic")).alias("group"), stream_of(F.col("topic")).alias("stream"),
        F.to_date("timestamp").alias("date"),
    )  # fmt: skip


def _check_identity(folder: Folder, metadata: dict[str, Any]) -> None:
    """Check that the archive is new, or of the same store and streams. Raises CommandError."""
    present = folder.read_json(ABOUT)
    if present is None:
        if folder.names():
            raise CommandError(f"{folder.path}: not empty and not an archive (expected an archive or a new directory)")
        folder.write_json(ABOUT, metadata)
        return
    for name, value in metadata.items():
        if present.get(name) != value:
            raise CommandError(
                f"{folder.path}: archive of {name} {_describe(present.get(name))}"
                f" (expected {_describe(value)}, or a new directory)"
            )


def _check_names(spark: SparkSession, folder: Folder, catalog: ServerCatalog) -> None:
    """Check the paths of the streams with messages against the file system. Raises CommandError.

    Names have at most 255 bytes, and Spark escapes some characters in a value to three. Object stores have no such
    limit.
    """
    if folder.scheme not in SCHEMES:
        return
    jvm: Any = spark._jvm
    escape = jvm.org.apache.spark.sql.catalyst.catalog.ExternalCatalogUtils.escapePathName
    for path, group, stream in catalog.streams():
        for label, name in (("group", group.path or ROOT), ("stream", split(path)[1])):
            size = len(f"{label}={escape(name)}".encode())
            if size > NAME_BYTES and stream.newest:
                raise CommandError(
                    f"{folder.path}: {label} {name!r} makes a folder name of {size} bytes"
                    f" (expected at most {NAME_BYTES}: leave its streams out, or archive to an object store)"
                )


def _describe(value: Any) -> str:
    """Return a store, or the streams as arguments of the command."""
    if isinstance(value, dict):
        return shlex.join(selected_names(value)) or ", ".join(value.values())
    return str(value)


class _BatchFiles:
    """Writes the batches of one run into the archive."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._first = True  # only the first batch of a run may be a repeat

    def write(self, batch: DataFrame, number: int) -> None:
        """Write one batch aside, then rename it into place. May be repeated after a failure at any point."""
        folder, aside = self._folder, f"{ASIDE}/{number}"
        batch.write.mode("overwrite").partitionBy(*PARTITIONS).parquet(folder.under(aside))
        if self._first:
            for old in folder.files(f"{MESSAGES}/*/*/*/{number:010d}-*.parquet"):
                folder.remove(old)
        made = set()
        names = folder.files(f"{aside}/*/*/*/*.parquet")
        if not names and not batch.isEmpty():
            raise CommandError(f"{folder.path}: batch {number} has no files (expected some in {aside})")
        for piece, name in enumerate(names):
            where = f"{MESSAGES}/{'/'.join(name.split('/')[-4:-1])}"
            if where not in made:
                made.add(where)
                folder.make(where)
            folder.rename(name, f"{where}/{number:010d}-{piece:05d}.parquet")
        folder.remove(ASIDE)
        self._first = False


def identity(spark: SparkSession, path: str) -> dict[str, Any]:
    """Return the metadata of an archive: its `store`, and its `streams` as options. Raises CommandError if it does not
    exist."""
    folder = Folder(spark, path)
    metadata: dict[str, Any] | None = folder.read_json(ABOUT)
    if metadata is None:
        raise CommandError(f"{folder.path}: not an archive: no {ABOUT}")
    if metadata["format"] != FORMAT:
        raise CommandError(f"{folder.path}: archive of format {metadata['format']} (expected {FORMAT})")
    return metadata


def stream_numbers(spark: SparkSession, path: str) -> dict[str, str]:
    """Return the identity of each archived stream, as `ServerCatalog.numbers` does. It is in the offsets of the
    checkpoint; a file there has a line with its version, one with metadata, and one for each source."""
    folder = Folder(spark, path)
    batches = [int(name) for name in folder.names(f"{CHECKPOINT}/offsets") if name.isdigit()]
    if not batches:
        return {}
    lines = folder.read_text(f"{CHECKPOINT}/offsets/{max(batches)}").strip().splitlines()
    return dict(json.loads(lines[-1]).get("numbers", {}))


def open_archive(spark: SparkSession, path: str) -> DataFrame:
    """Return the messages of an archive, with the columns of a reader and `crc`. Raises CommandError if it does not
    exist."""
    identity(spark, path)
    folder = Folder(spark, path)
    if not folder.exists(MESSAGES):
        folder.make(MESSAGES)
    rows = spark.read.schema(SCHEMA).parquet(folder.under(MESSAGES))
    return rows.withColumn("topic", path_of(F.col("group"), F.col("stream")))
