"""Make Spark start quickly: called by script/setup.

    python -m tests.support.spark_classes

Java archives the classes that it loads, so that Spark starts in a third of the time. The zips from which Spark's
Pythons import pyspark get byte code: each Python is a new process, and would compile its imports.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from compileall import compile_dir
from importlib.util import find_spec
from pathlib import Path
from py_compile import PycInvalidationMode
from shutil import make_archive
from typing import Any
from zipfile import ZipFile

from tests.support.java import ARCHIVE, QUICK, java


def main() -> None:
    if why := java():
        raise SystemExit(why)
    compile_zips()
    made = ARCHIVE.with_suffix(".new")
    os.environ.update(
        SPARK_SUBMIT_OPTS=f"{QUICK} -XX:ArchiveClassesAtExit={made}",
        SPARK_LOCAL_IP="127.0.0.1",
        PYSPARK_PYTHON=sys.executable,
    )
    with tempfile.TemporaryDirectory() as folder:
        run(folder)
    made.rename(ARCHIVE)


def compile_zips() -> None:
    spec = find_spec("pyspark")
    assert spec is not None
    for path in Path(str(spec.origin)).parent.glob("python/lib/*.zip"):
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            with ZipFile(path) as zipped:
                zipped.extractall(f"{folder}/all")
            # Beside its source, where an import from a zip searches for it.
            compile_dir(f"{folder}/all", quiet=2, legacy=True, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH)
            os.rename(make_archive(f"{folder}/new", "zip", f"{folder}/all"), path)


def run(folder: str) -> None:
    """Do the steps of most tests: read, write and copy, as a batch and as a stream, through Python."""
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
