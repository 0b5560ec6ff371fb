"""Start Spark once, for Java to archive the classes that it loads: called by script/setup.

    python -m tests.support.spark_classes

With the archive a Spark starts in a third of the time.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from tests.support.java import ARCHIVE, QUICK, java


def main() -> None:
    if why := java():
        raise SystemExit(why)
    made = ARCHIVE.with_suffix(".new")
    os.environ.update(
        SPARK_SUBMIT_OPTS=f"{QUICK} -XX:ArchiveClassesAtExit={made}",
        SPARK_LOCAL_IP="127.0.0.1",
        PYSPARK_PYTHON=sys.executable,
    )
    with tempfile.TemporaryDirectory() as folder:
        run(folder)
    made.rename(ARCHIVE)


def run(folder: str) -> None:
    """What most tests do: read, write and copy, as a batch and as a stream, through Python."""
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    rows = spark.range(100).selectExpr("id", "id % 3 as part").mapInArrow(same, "id long, part long")
    rows.write.partitionBy("part").parquet(f"{folder}/rows")
    read = spark.readStream.schema("id long, part long").parquet(f"{folder}/rows")
    copy = read.writeStream.format("parquet").option("checkpointLocation", f"{folder}/noted")
    copy.trigger(availableNow=True).start(f"{folder}/copy").awaitTermination()
    again = spark.read.parquet(f"{folder}/copy")
    again.join(rows.select("id"), "id").groupBy("part").count().orderBy("part").collect()
    process = spark.sparkContext._gateway.proc  # type: ignore[union-attr]
    spark.stop()
    process.stdin.close()
    process.wait()


def same(batches: Iterator[Any]) -> Iterator[Any]:
    return batches


if __name__ == "__main__":
    main()
