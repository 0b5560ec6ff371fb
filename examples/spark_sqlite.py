#!/usr/bin/env python3
"""Keep the newest message of each stream in an SQLite table, and write each change to a stream.

    examples/spark_sqlite.py ADDRESS REGEX DATABASE TO
    examples/spark_sqlite.py 'unix!mqfs.sock' 'home/.*' home.db log/home

Shows foreachBatch: each batch is written to two places, to both once. The database stores the number of the batch in
the same transaction as the rows; the stream knows the batch by txnAppId and txnVersion. The next run continues from
DATABASE.checkpoint.
"""

import sqlite3
import sys

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

TABLES = """
create table if not exists newest (stream text primary key, sequence integer, body blob);
create table if not exists done (batch integer primary key);
"""


def keep(database: str, rows: list[tuple[str, int, bytes]], number: int) -> None:
    with sqlite3.connect(database) as table:
        table.executescript(TABLES)
        if table.execute("select 1 from done where batch = ?", (number,)).fetchone() is None:
            table.executemany("insert or replace into newest values (?, ?, ?)", rows)
            table.execute("insert into done values (?)", (number,))


def main() -> None:
    if len(sys.argv) != 5:
        sys.exit("usage: examples/spark_sqlite.py ADDRESS REGEX DATABASE TO")
    address, pattern, database, to = sys.argv[1:]
    spark = SparkSession.builder.appName("newest").config("spark.sql.shuffle.partitions", "2").getOrCreate()
    rows = (
        spark.readStream.format("mqfs")
        .options(address=address, subscribePattern=pattern, startingOffsets="earliest")
        .load()
    )

    def each(batch: DataFrame, number: int) -> None:
        newest = batch.groupBy("topic").agg(F.max("offset").alias("offset"), F.max_by("value", "offset").alias("value"))
        newest = newest.persist()
        keep(database, [(row[0], row[1], bytes(row[2])) for row in newest.collect()], number)
        told = newest.select(F.concat_ws(" ", "topic", F.col("value").cast("string")).alias("value"))
        query = spark.sparkContext.getLocalProperty("sql.streaming.queryId")
        told.write.format("mqfs").options(
            address=address, topic=to, txnAppId=f"newest-{query}", txnVersion=number
        ).mode("append").save()
        newest.unpersist()

    query = rows.writeStream.foreachBatch(each).option("checkpointLocation", f"{database}.checkpoint")
    query.trigger(availableNow=True).start().awaitTermination()


if __name__ == "__main__":
    main()
