#!/usr/bin/env python3
"""Writes with Spark: rows to streams, beside other sinks, all in one run.

usage: benchmarks/spark_write.py [MESSAGES [STREAMS]]    (10000000 messages of 100 bytes in 8 streams)
Prints one line per way: seconds (the median of three, after a small run of each), rows per second, and the processor
time per million rows in all processes, which depends less on other load of the machine.
  noop       Spark makes the rows and drops them
  Parquet    Spark writes the rows with its own writer, uncompressed
  discarded  Python workers receive the rows as Arrow, and drop them: the upper bound of sinks in Python
  sink       the rows are appended to a group that keeps all, with `sync always`: counted rows are on disk
  encoded    a task encodes its rows, without Spark and without a server
  staged     as encoded; then one connection stages and commits the rows, without Spark
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.spark_read import MESSAGES, SIZE, STREAMS, session  # noqa: E402
from mqfs.ninep.client import connection  # noqa: E402
from tests.support.server import Server  # noqa: E402

SMALL = 100_000
ROUNDS = 3
BATCH = 10_000  # rows of an Arrow batch, the default of Spark


class Took(NamedTuple):
    seconds: float
    processor: float  # seconds of this process and its descendants


def once(act: Callable[[], Any]) -> Took:
    began, used = time.perf_counter(), processor()
    act()
    return Took(time.perf_counter() - began, processor() - used)


def processor() -> float:
    """Return the processor seconds so far of this process and its descendants."""
    rows = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            rows[int(path.parent.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    ours = {os.getpid()}
    for number in sorted(rows):
        ours |= {number} if rows[number][0] in ours else set()
    return sum(rows[number][1] for number in ours if number in rows) / os.sysconf("SC_CLK_TCK")


def batch_of() -> Any:
    import pyarrow as pa

    bodies = [b"%010d" % n + b"x" * (SIZE - 10) for n in range(BATCH)]
    return pa.record_batch({"value": bodies, "topic": [f"sink/s{n % STREAMS}" for n in range(BATCH)]})


def encode(batch: Any) -> None:
    """Encode all rows, one batch at a time."""
    from pyspark_mqfs.batch_encoder import Encoder

    for _ in range(max(MESSAGES // BATCH, 1)):
        for _ in Encoder().encode(batch):
            pass


def stage(batch: Any, address: str, number: int) -> None:
    """Encode all rows into parts of a transaction, and commit it."""
    from pyspark_mqfs import sink
    from pyspark_mqfs.batch_encoder import Encoder
    from pyspark_mqfs.connection import Server

    server = Server(address)
    staging = sink.Staging(server, "bench-", True)
    for _ in range(max(MESSAGES // BATCH, 1)):
        for found in Encoder().encode(batch):
            staging.put(found)
    sink.commit(server, sink.Transaction(f"bench{number}", 1, "bench-", True, True), staging.finish())


def discarding() -> Any:
    """Return a format that receives rows as the sink does, and drops them."""
    from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage

    class Writer(DataSourceArrowWriter):  # type: ignore[misc]
        def write(self, iterator: Iterator[Any]) -> Any:
            for _ in iterator:
                pass
            return WriterCommitMessage()

    class Discard(DataSource):  # type: ignore[misc]
        @classmethod
        def name(cls) -> str:
            return "discard"

        def writer(self, schema: Any, overwrite: bool) -> Any:
            return Writer()

    return Discard


def rows_of(spark: Any, count: int) -> Any:
    """Return rows that Spark makes on demand; `noop` shows the cost of that."""
    from pyspark.sql import functions as F

    number = (F.col("id") + 10**9).cast("string")  # ten digits
    return spark.range(0, count, 1, 2).select(
        F.concat(number, F.lit("x" * (SIZE - 10))).alias("value"),
        F.concat(F.lit("sink/s"), (F.col("id") % STREAMS).cast("string")).alias("topic"),
    )


def ways_of(spark: Any, folder: Path, address: str) -> dict[str, Callable[[int], None]]:
    def save(count: int, name: str, path: str = "", **options: str) -> None:
        mode = "append" if name in ("mqfs", "discard") else "overwrite"
        rows_of(spark, count).write.format(name).options(**options).mode(mode).save(path or None)

    spark.dataSource.register(discarding())
    parquet = str(folder / "rows.parquet")
    batch, numbers = batch_of(), itertools.count()
    return {
        "noop": lambda count: save(count, "noop"),
        "Parquet": lambda count: save(count, "parquet", parquet, compression="none"),
        "discarded in Python": lambda count: save(count, "discard"),
        "sink": lambda count: save(count, "mqfs", address=address),
        "encoded, without Spark": lambda count: encode(batch),
        "staged, without Spark": lambda count: stage(batch, address, next(numbers)),
    }


def measure(folder: Path, address: str) -> None:
    spark = session(folder)
    ways = ways_of(spark, folder, address)
    for way in list(ways.values())[:4]:
        way(SMALL)
    found: dict[str, list[Took]] = {what: [] for what in ways}
    for _ in range(ROUNDS):
        for what, way in ways.items():
            found[what].append(once(lambda way=way: way(MESSAGES)))  # type: ignore[misc]
    print(f"{MESSAGES} messages of {SIZE} B in {STREAMS} streams, local[2]")
    for what, rounds in found.items():
        took = sorted(rounds)[ROUNDS // 2]
        rate, each = MESSAGES / took.seconds / 1e6, took.processor / MESSAGES * 1e6
        print(f"{what:25} {took.seconds:8.2f} s {rate:8.2f} M rows/s {each:8.2f} s of processor a million")
    spark.stop()


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name)
        address = f"unix!{folder}/9p"
        with Server("--store", str(folder / "store"), "--listen", address, cwd=folder):
            with connection.connect(address) as client:
                client.mkdir("sink")
                with client.open("sink/ctl", "w") as file:
                    file.write(b"replay all\n")
            measure(folder, address)


if __name__ == "__main__":
    main()
