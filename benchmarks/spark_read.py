#!/usr/bin/env python3
"""Reads with Spark, all in one run: mqfs over 9P and from its segments, beside Spark's own Parquet and single rows.

usage: benchmarks/spark_read.py [MESSAGES [STREAMS]]    (10000000 messages of 100 bytes in 8 streams)
Prints one line per way: seconds (the median of three), rows per second, and the ratio to Parquet.
"""

from __future__ import annotations

import os
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mqfs.ninep.client import connection  # noqa: E402
from tests.support.server import Server  # noqa: E402

MESSAGES = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000
STREAMS = int(sys.argv[2]) if len(sys.argv) > 2 else 8
SIZE = 100
FRAME = struct.Struct("<IHH")
ROUNDS = 3


def session(folder: Path) -> Any:
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    from pyspark.sql import SparkSession

    made = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "3g")
        .config("spark.local.dir", str(folder / "local"))
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.python.filterPushdown.enabled", "true")
        .getOrCreate()
    )
    made.sparkContext.setLogLevel("OFF")
    return made


def fill(address: str, group: str = "bench", messages: int = MESSAGES) -> None:
    """Write the messages in batches of whole frames, each with messages of all streams."""
    with connection.connect(address, msize=1 << 20) as client:
        client.mkdir(group)
        with client.open(f"{group}/ctl", "w") as file:
            file.write(b"replay all\nsync off\n")
        names = [f"s{number:04d}" for number in range(STREAMS)]
        for name in names:
            client.create(f"{group}/{name}").close()
        per = 1_000_000 // (SIZE + 16)
        heads = [FRAME.pack(FRAME.size + len(name) + SIZE, len(name), 0) + name.encode() for name in names]
        with client.open(f"{group}/.batch", "w") as file:
            for first in range(0, messages, per):
                count = min(per, messages - first)
                noise = os.urandom(count * SIZE)  # all bodies differ: Parquet would store equal ones once
                numbers = range(count)
                file.write(b"".join([heads[n % STREAMS] + noise[n * SIZE : n * SIZE + SIZE] for n in numbers]))


def timed(act: Callable[[], Any], rounds: int = ROUNDS) -> float:
    took = []
    for _ in range(rounds):
        began = time.perf_counter()
        act()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def noop(frame: Any) -> Callable[[], None]:
    return lambda: frame.write.format("noop").mode("overwrite").save()


def by_row(spark: Any, address: str) -> Any:
    """Return a reader that yields rows to Spark: the same bytes, one tuple per message."""
    from pyspark.sql.datasource import DataSource, DataSourceReader

    class Reader(DataSourceReader):  # type: ignore[misc]
        def read(self, partition: Any) -> Any:
            import datetime

            from mqfs.ninep.client import connection
            from mqfs.records import record

            zone = datetime.UTC
            with connection.connect(address, msize=1 << 20) as client, client.open("bench/.cursor", "r+") as file:
                file.write(b"format record\nseek first\nuntil %d\n" % (MESSAGES // 10))
                while data := file.receive(1 << 20):
                    at = 0
                    while row := record.row_at(data, at):
                        body = at + 32 + row.headers
                        when = datetime.datetime.fromtimestamp(row.time_ns / 1e9, zone)
                        yield None, data[body : body + row.body], str(row.stream), 0, row.sequence, when, 0
                        at += record.padded(row.size)
                    if not at:  # the record of names comes first
                        at = record.padded(int.from_bytes(data[:4], "little"))
                        while row := record.row_at(data, at):
                            body = at + 32 + row.headers
                            when = datetime.datetime.fromtimestamp(row.time_ns / 1e9, zone)
                            yield None, data[body : body + row.body], str(row.stream), 0, row.sequence, when, 0
                            at += record.padded(row.size)

    class Rows(DataSource):  # type: ignore[misc]
        @classmethod
        def name(cls) -> str:
            return "rows"

        def schema(self) -> Any:
            from pyspark_mqfs.schema import all_columns

            return all_columns(headers=False)

        def reader(self, schema: Any) -> Any:
            return Reader()

    spark.dataSource.register(Rows)
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")
    return spark.read.format("rows").load()


def available_now(spark: Any, options: dict[str, str], folder: Path) -> Callable[[], None]:
    runs = iter(range(100))

    def run() -> None:
        frame = spark.readStream.format("mqfs").options(**options, startingOffsets="earliest").load()
        query = (
            frame.writeStream.format("noop")
            .option("checkpointLocation", str(folder / f"checkpoint{next(runs)}"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    return run


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name)
        address = f"unix!{folder}/9p"
        with Server("--store", str(folder / "store"), "--listen", address, cwd=folder):
            fill(address)
            measure(folder, address)


def measure(folder: Path, address: str) -> None:
    spark = session(folder)
    options = {"address": address, "subscribePattern": "bench/.*"}
    over9p = spark.read.format("mqfs").options(**options).load()
    segments = spark.read.format("mqfs").options(**options, path=str(folder / "store")).load()
    narrow = spark.read.format("mqfs").options(**options).schema("value binary, offset bigint").load()
    over9p.write.parquet(str(folder / "parquet"))
    parquet = spark.read.parquet(str(folder / "parquet"))
    assert parquet.count() == over9p.count() == segments.count() == MESSAGES
    ways = {
        "Parquet": noop(parquet),
        "mqfs, segments": noop(segments),
        "mqfs, 9P at a unix socket": noop(over9p),
        "mqfs, 9P, value and offset": noop(narrow),
        "AvailableNow, 9P": available_now(spark, options, folder),
    }
    took: dict[str, list[float]] = {what: [] for what in ways}
    for _ in range(ROUNDS + 1):  # by turns, as the load of the machine changes; the first warms up
        for what, act in ways.items():
            took[what].append(timed(act, 1))
    found = {what: statistics.median(seconds[1:]) for what, seconds in took.items()}
    tenth = timed(noop(by_row(spark, address)), 1)
    found["row at a time (a tenth of them, times ten)"] = tenth * 10
    best = found["Parquet"]
    print(f"{MESSAGES} messages of {SIZE} B in {STREAMS} streams, {over9p.rdd.getNumPartitions()} tasks, local[2]")
    for what, seconds in found.items():
        print(f"{what:45} {seconds:8.2f} s {MESSAGES / seconds / 1e6:8.2f} M rows/s {best / seconds:8.2f} x Parquet")
    nine, rows = found["mqfs, 9P at a unix socket"], found["row at a time (a tenth of them, times ten)"]
    print(f"9P / segments {found['mqfs, segments'] / nine:.2f}   9P / rows {rows / nine:.1f}", end="   ")
    print(f"AvailableNow / batch {nine / found['AvailableNow, 9P']:.2f}")
    spark.stop()


if __name__ == "__main__":
    main()
