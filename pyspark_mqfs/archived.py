"""The history of streams as one DataFrame: the messages of an archive, and after them those that only the log has.

    archive    g/a 1..200, g/b 3..180      the last sequence of each stream is looked up in it
    log        g/a 120..230, g/b 95..181   read from 201 and 181 on: 120..200 are in both, and count once

So a log may retain days of messages and its archive years. A removed stream is only in the archive, a new one only in
the log. Messages that neither has any more are a loss: an error, as for any read (`failOnDataLoss`). A stream that was
removed and created again is another stream, whose sequences do not continue those of the archive: an error, too.
"""

from __future__ import annotations

import json

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from pyspark_mqfs.catalog import ServerCatalog
from pyspark_mqfs.commands.archive import identity, open_archive, stream_numbers
from pyspark_mqfs.commands.session import CommandError
from pyspark_mqfs.commands.sources import Source, read, selected_names
from pyspark_mqfs.schema import all_columns


def history(spark: SparkSession, archive: str, address: str, *, user: str = "", token: str = "") -> DataFrame:
    """Read an archive and, of the same streams, the messages that came after it.

    The archive's files and the end of each stream are those at the time of the call; each action reads them again.

    Args:
        spark: The session.
        archive: The directory of an archive that `mqfs spark archive` made, on any file system of Spark.
        address: The server that the archive is of, as of option `address`.
        user: The user to read as; by default the one that runs this.
        token: A token for a server that asks for one; by default none.

    Returns:
        The columns of the reader with `includeHeaders`; `offset` is unique in a group, rows are in no order.

    Raises:
        CommandError: There is no archive, it is of another store, or a stream was created again since.
        OptionError: The address is invalid, or the server cannot be reached.
    """
    archived = open_archive(spark, archive)
    metadata = identity(spark, archive)
    selection = metadata["streams"]
    names = selected_names(selection)
    source = Source(address, names, selection.get("subscribePattern", ""), user, token)
    catalog = source.catalog()
    if catalog.store != metadata["store"]:
        stores = f"archive of store {metadata['store']} (expected that of {address}: {catalog.store})"
        raise CommandError(f"{archive}: {stores}")
    columns = [*all_columns(headers=True).fields]
    present = [path for path, _, _ in catalog.streams()]
    kept = archived.select(*(_column(archived, field.name, field.dataType.simpleString()) for field in columns))
    if not present:
        return kept
    if names:
        source = Source(address, tuple(path for path in names if path in present), "", user, token)
    live = read(spark, source, **_after(spark, archive, archived, catalog))
    return kept.unionByName(live)


def _column(archived: DataFrame, name: str, kind: str) -> Column:
    """Return a column of the reader; an archive lacks columns with the same value for all messages."""
    if name in archived.columns:
        return F.col(name)
    return F.lit(0 if kind == "int" else None).cast(kind).alias(name)


def _after(spark: SparkSession, archive: str, archived: DataFrame, catalog: ServerCatalog) -> dict[str, str]:
    """Return the option to begin after the archive's last message of each stream. Raises CommandError for a stream that
    was created again."""
    ends = archived.groupBy("topic").agg(F.max("offset").alias("last")).collect()
    starts = {row["topic"]: row["last"] + 1 for row in ends}
    known, now = stream_numbers(spark, archive), catalog.numbers()
    found = {}
    for path, group, _ in catalog.streams():
        if path not in starts:
            continue
        if known.get(path, now[path]) != now[path] or group.next < starts[path]:
            raise CommandError(f"{archive}: {path} was removed and created again since (expected a new archive)")
        found[path] = starts[path]
    return {"startingOffsets": json.dumps(found)} if found else {}
