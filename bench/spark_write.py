#!/usr/bin/env python3
"""Writing with Spark, all in one run: rows to streams beside what else Spark may do with them; an archive, its check, a
replay, a copy.

usage: bench/spark_write.py [MESSAGES [STREAMS [sink]]]    (1000000 messages of 100 bytes in 8 streams)
Prints one line a way: seconds (of the sink and what it is compared with the median of three, of others once; each after
a small run), rows a second, and what processor time it took a million rows in all processes, which others that use the
machine change less. With `sink` only the sink is measured, and what it is compared with:
  noop       Spark makes the rows and throws them away
  Parquet    Spark writes them with its own writer, uncompressed
  discarded  they go as Arrow to Python workers, which throw them away: more than that no sink in Python can do
  frames     what a task does to its rows, without Spark and without a server
The group keeps all and has `sync always`: what is counted is on disk.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.argv[1:] = sys.argv[1:] or ["1000000"]

from bench.spark_read import MESSAGES, SIZE, STREAMS, fill, session  # noqa: E402
from mqfs.ninep import blocking  # noqa: E402
from tests.server.process import serving  # noqa: E402

SMALL = 100_000
ROUNDS = 3
BATCH = 100_000  # rows of an Arrow batch, as doc/spark.md says


class Took(NamedTuple):
    seconds: float
    processor: float  # of this process and all it has started


def once(act: Callable[[], Any]) -> Took:
    began, used = time.perf_counter(), processor()
    act()
    return Took(time.perf_counter() - began, processor() - used)


def processor() -> float:
    """Seconds that this process and all it has started have used until now."""
    rows = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            rows[int(path.parent.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    ours = {os.getpid()}
    for number in sorted(rows):
        ours |= {number} if rows[number][0] in ours else set()
    return sum(rows[number][1] for number in ours if number in rows) / os.sysconf("SC_CLK_TCK")


def frames() -> None:
    """Of all rows, a batch at a time."""
    import pyarrow as pa

    from pyspark_mqfs.frames import Encoder

    topics = [f"sink/s{n % STREAMS:04d}" for n in range(BATCH)]
    batch = pa.record_batch({"value": [b"x" * SIZE] * BATCH, "topic": topics})
    for _ in range(max(MESSAGES // BATCH, 1)):
        for _ in Encoder().encode(batch):
            pass


def discarding() -> Any:
    """A format that takes rows as the sink does, and does nothing with them."""
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
    """They are made as they are asked for: what that costs says noop."""
    from pyspark.sql import functions as F

    number = (F.col("id") + 10**9).cast("string")  # of ten digits
    return spark.range(0, count, 1, 2).select(
        F.concat(number, F.lit("x" * (SIZE - 10))).alias("value"),
        F.concat(F.lit("sink/s"), (F.col("id") % STREAMS).cast("string")).alias("topic"),
    )


def measure_sink(spark: Any, folder: Path, address: str) -> dict[str, Took]:
    spark.dataSource.register(discarding())

    def to(name: str, count: int, path: str = "", **options: str) -> Callable[[], None]:
        mode = "append" if name in ("mqfs", "discard") else "overwrite"
        return lambda: rows_of(spark, count).write.format(name).options(**options).mode(mode).save(path or None)

    parquet = str(folder / "rows.parquet")
    ways = {
        "noop": lambda count: to("noop", count),
        "Parquet": lambda count: to("parquet", count, parquet, compression="none"),
        "discarded in Python": lambda count: to("discard", count),
        "sink": lambda count: to("mqfs", count, address=address),
    }
    for way in ways.values():
        way(SMALL)()
    took: dict[str, list[Took]] = {what: [] for what in ways}
    for _ in range(ROUNDS):
        for what, way in ways.items():
            took[what].append(once(way(MESSAGES)))
    found = {what: sorted(times)[ROUNDS // 2] for what, times in took.items()}
    found["frames, without Spark"] = once(frames)
    return found


def measure_commands(spark: Any, folder: Path, address: str) -> dict[str, Took]:
    from pyspark_mqfs.commands import archive, copy, replay, verify
    from pyspark_mqfs.commands.archive import Archive
    from pyspark_mqfs.commands.copy import Copy
    from pyspark_mqfs.commands.replay import Replay
    from pyspark_mqfs.commands.shared import Source
    from pyspark_mqfs.commands.verify import Verify

    source = Source(address, pattern="bench/.*")
    path = str(folder / "archive")
    found = {"archive": once(lambda: archive.run(spark, Archive(source, path)))}
    found["verify, archive against streams"] = once(lambda: verify.run(spark, Verify(path, source)))
    found["replay"] = once(lambda: replay.run(spark, Replay(path, source, into="again")))
    again = Source(address, pattern="again/.*")
    found["copy, stream to stream"] = once(lambda: copy.run(spark, Copy(again, again, to="copy/all")))
    return found


def measure(folder: Path, address: str) -> None:
    spark = session(folder)
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", str(BATCH))
    found = measure_sink(spark, folder, address)
    if "sink" not in sys.argv[3:]:
        found |= measure_commands(spark, folder, address)
    print(f"{MESSAGES} messages of {SIZE} B in {STREAMS} streams, local[2]")
    for what, took in found.items():
        rate, each = MESSAGES / took.seconds / 1e6, took.processor / MESSAGES * 1e6
        print(f"{what:35} {took.seconds:8.2f} s {rate:8.2f} M rows/s {each:8.2f} s of processor a million")
    spark.stop()


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name)
        address = f"unix!{folder}/9p"
        with serving("--store", str(folder / "store"), "--listen", address, cwd=folder):
            if "sink" not in sys.argv[3:]:
                fill(address)
            with blocking.connect(address) as client:
                client.mkdir("sink")
                with client.open("sink/ctl", "w") as file:
                    file.write(b"replay all\n")
            measure(folder, address)


if __name__ == "__main__":
    main()
