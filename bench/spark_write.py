#!/usr/bin/env python3
"""Writing with Spark, all in one run: rows to streams, streams to streams, an archive, its check, a replay.

usage: bench/spark_write.py [MESSAGES [STREAMS]]    (1000000 messages of 100 bytes in 8 streams)
Prints one line a way: seconds (once, after a small run of each), and rows a second. "Frames" is what a task does to its
rows without Spark and without a server.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.argv[1:] = sys.argv[1:] or ["1000000"]

from bench.spark_read import MESSAGES, SIZE, STREAMS, fill, session  # noqa: E402
from tests.server.process import serving  # noqa: E402

SMALL = 10_000


def once(act: Callable[[], Any]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def frames() -> None:
    """Of all rows, 100,000 at a time."""
    import pyarrow as pa

    from pyspark_mqfs.frames import Encoder

    count = 100_000
    batch = pa.record_batch(
        {"value": [b"x" * SIZE] * count, "topic": [f"bench/s{n % STREAMS:04d}" for n in range(count)]}
    )
    for _ in range(MESSAGES // count):
        for _ in Encoder().encode(batch):
            pass


def measure(folder: Path, address: str) -> None:
    from pyspark.sql import functions as F

    from pyspark_mqfs.commands import archive, copy, replay, verify
    from pyspark_mqfs.commands.archive import Archive
    from pyspark_mqfs.commands.copy import Copy
    from pyspark_mqfs.commands.replay import Replay
    from pyspark_mqfs.commands.shared import Source
    from pyspark_mqfs.commands.verify import Verify

    spark = session(folder)
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "100000")
    source = Source(address, pattern="bench/.*")
    rows = spark.range(0, MESSAGES, 1, 2).select(
        F.rpad(F.col("id").cast("string"), SIZE, "x").alias("value"),
        F.format_string("bench/s%04d", F.col("id") % STREAMS).alias("topic"),
    )  # fmt: skip
    rows = rows.persist()
    rows.count()

    def sink(frame: Any) -> None:
        frame.write.format("mqfs").options(address=address).mode("append").save()

    sink(rows.limit(SMALL))
    path = str(folder / "archive")
    found = {"frames, without Spark": once(frames)}
    found["archive"] = once(lambda: archive.run(spark, Archive(source, path)))
    found["sink, of rows in memory"] = once(lambda: sink(rows))
    found["verify, archive against streams"] = once(lambda: verify.run(spark, Verify(path, source)))
    found["replay"] = once(lambda: replay.run(spark, Replay(path, source, into="again")))
    again = Source(address, pattern="again/.*")
    found["copy, stream to stream"] = once(lambda: copy.run(spark, Copy(again, again, to="copy/all")))
    print(f"{MESSAGES} messages of {SIZE} B in {STREAMS} streams, local[2]")
    for what, seconds in found.items():
        print(f"{what:35} {seconds:8.2f} s {MESSAGES / seconds / 1e6:8.2f} M rows/s")
    spark.stop()


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name)
        address = f"unix!{folder}/9p"
        with serving("--store", str(folder / "store"), "--listen", address, cwd=folder):
            fill(address)
            measure(folder, address)


if __name__ == "__main__":
    main()
