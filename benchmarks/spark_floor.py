#!/usr/bin/env python3
"""Fixed costs of Spark: micro-batches of one message, and tasks and queries over many streams.

usage: benchmarks/spark_floor.py [STREAMS [MESSAGES]]    (up to 1000 streams, 100000 messages in all of them)
All in one run. First the floor: the median time of a micro-batch of one message, for Spark's own rate source, a source
in Python, mqfs to nothing, and mqfs to mqfs. Then the same messages in 1, 10, 100 and 1,000 streams, in one group and
each in a group of its own: seconds to plan a batch, to read it, and for a micro-batch of one message.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
MOST = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000
MESSAGES = int(sys.argv[2]) if len(sys.argv) > 2 else 100_000
sys.argv[1:] = []

from benchmarks.spark_read import FRAME, SIZE, noop, session, timed  # noqa: E402
from mqfs.ninep.client import connection  # noqa: E402
from tests.support.server import Server  # noqa: E402

BATCHES = 15  # micro-batches of each floor; the first ones warm up and do not count
WARM = 5
DEADLINE_S = 60.0


# ---------------------------------------------------------------- the floor


def batches_of(query: Any, write: Callable[[], None], count: int = BATCHES) -> list[dict[str, int]]:
    """Return the times in ms of each of `count` micro-batches of one message."""
    found: list[dict[str, int]] = []
    seen = -1
    while len(found) < count:
        write()
        until = time.monotonic() + DEADLINE_S
        while not (fresh := [p for p in query.recentProgress if p["batchId"] > seen and p["numInputRows"]]):
            assert time.monotonic() < until, query.exception() or "no batch came"
            time.sleep(0.01)
        seen = fresh[-1]["batchId"]
        found.append(fresh[-1]["durationMs"])
    return found[WARM:] if count > WARM else found


def one_row() -> type:
    """Return a minimal source in Python, the lower bound of all."""
    from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

    class Reader(DataSourceStreamReader):  # type: ignore[misc]
        def initialOffset(self) -> dict[str, int]:
            return {"next": 0}

        def latestOffset(self, start: dict[str, int], limit: Any) -> dict[str, int]:
            return {"next": start["next"] + 1}

        def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[Any]:
            return [InputPartition(start["next"])]

        def read(self, partition: Any) -> Any:
            import pyarrow as pa

            yield pa.record_batch({"value": pa.array([partition.value], pa.int64())})

    class One(DataSource):  # type: ignore[misc]
        @classmethod
        def name(cls) -> str:
            return "one"

        def schema(self) -> str:
            return "value bigint"

        def streamReader(self, schema: Any) -> Any:
            return Reader()

    return One


def floors(
    spark: Any, folder: Path, address: str, client: connection.Client
) -> Iterator[tuple[str, list[dict[str, int]]]]:
    """Measure Spark's rate source, the minimal source in Python, mqfs to nothing, and mqfs to mqfs."""

    def start(frame: Any, sink: str, name: str, **options: str) -> Any:
        writer = frame.writeStream.format(sink).options(checkpointLocation=str(folder / name), **options)
        return writer.trigger(processingTime="0 seconds").start()

    rate = spark.readStream.format("rate-micro-batch").options(rowsPerBatch="1", numPartitions="1").load()
    query = start(rate, "noop", "rate")
    yield "Spark's rate source", batches_of(query, lambda: None)
    query.stop()
    spark.dataSource.register(one_row())
    query = start(spark.readStream.format("one").load(), "noop", "one")
    yield "a source in Python, one row", batches_of(query, lambda: None)
    query.stop()
    with client.create("floor/s") as stream, client.create("floor/other"):
        mqfs = (
            spark.readStream.format("mqfs")
            .options(address=address, subscribe="floor/s", startingOffsets="earliest")
            .load()
        )
        query = start(mqfs, "noop", "noop")
        yield "mqfs to nothing", batches_of(query, lambda: stream.write(b"x" * SIZE) and None)
        query.stop()
        from pyspark.sql import functions as F

        rows = mqfs.select("value", F.lit("floor/other").alias("topic"))
        query = start(rows, "mqfs", "mqfs", address=address)
        yield "mqfs to mqfs", batches_of(query, lambda: stream.write(b"x" * SIZE) and None)
        query.stop()


def tell_floors(found: dict[str, list[dict[str, int]]]) -> None:
    first = None
    for what, batches in found.items():
        whole = statistics.median(one["triggerExecution"] for one in batches)
        first = first or whole
        parts = {name: statistics.median(one.get(name, 0) for one in batches) for name in batches[0]}
        shown = " ".join(f"{name} {ms:.0f}" for name, ms in parts.items() if name != "triggerExecution" and ms)
        print(f"{what:25} {whole:6.0f} ms {whole / first:6.2f} x rate   ({shown})", flush=True)


# ---------------------------------------------------------------- many streams


def fill(client: connection.Client, root: str, streams: int, groups: bool) -> None:
    """Write the messages, evenly to all streams, in batches of whole frames for each group."""
    make(client, root)
    each = MESSAGES // streams
    places = [(f"{root}/g{n:04d}" if groups else root, f"s{n:04d}") for n in range(streams)]
    for group, name in places:
        if groups:
            make(client, group)
        client.create(f"{group}/{name}").close()
    per = 1_000_000 // (SIZE + 16)
    for group in dict.fromkeys(group for group, _ in places):
        names = [name for at, name in places if at == group]
        frames = [FRAME.pack(FRAME.size + len(n) + SIZE, len(n), 0) + n.encode() + bytes(SIZE) for n in names] * each
        with client.open(f"{group}/.batch", "w") as file:
            for at in range(0, len(frames), per):
                file.write(b"".join(frames[at : at + per]))


def make(client: connection.Client, group: str) -> None:
    client.mkdir(group)
    with client.open(f"{group}/ctl", "w") as file:
        file.write(b"replay all\nsync off\n")


def many(spark: Any, folder: Path, address: str, client: connection.Client, streams: int, groups: bool) -> None:
    root = f"{'groups' if groups else 'streams'}{streams}"
    fill(client, root, streams, groups)
    options = {"address": address, "subscribePattern": f"{root}/.*"}

    def frame() -> Any:
        return spark.read.format("mqfs").options(**options).load()

    planned = timed(lambda: frame().rdd.getNumPartitions())
    read = timed(noop(frame()))
    followed = spark.readStream.format("mqfs").options(**options, startingOffsets="earliest").load()
    found = followed.writeStream.format("noop")
    query = found.option("checkpointLocation", str(folder / root)).trigger(processingTime="0 seconds").start()
    path = f"{root}/g0000/s0000" if groups else f"{root}/s0000"
    with client.open(path, "w") as stream:
        batches = batches_of(query, lambda: stream.write(b"x" * SIZE) and None, WARM + 5)
    query.stop()
    whole = statistics.median(one["triggerExecution"] for one in batches)
    parts = {name: statistics.median(one.get(name, 0) for one in batches) for name in batches[0]}
    ours = " ".join(f"{name} {parts.get(name, 0):.0f}" for name in ("latestOffset", "queryPlanning", "addBatch"))
    where = "groups" if groups else "one group"
    print(
        f"{streams:5} streams, {where:10} {planned:7.3f} s planned {read:7.3f} s read in"
        f" {frame().rdd.getNumPartitions():3} tasks, micro-batch {whole:6.0f} ms ({ours})",
        flush=True,
    )


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name)
        address = f"unix!{folder}/9p"
        with (
            Server("--store", str(folder / "store"), "--listen", address, cwd=folder),
            connection.connect(address, msize=1 << 20) as client,
        ):
            make(client, "floor")
            spark = session(folder)
            tell_floors(dict(floors(spark, folder, address, client)))
            streams = 1
            while streams <= MOST:
                for groups in (False, True) if streams > 1 else (False,):
                    many(spark, folder, address, client, streams, groups)
                streams *= 10
            spark.stop()


if __name__ == "__main__":
    main()
