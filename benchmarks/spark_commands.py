#!/usr/bin/env python3
"""The commands of Spark, all in one run: archive, verify, replay and copy, each beside its upper bound.

usage: benchmarks/spark_commands.py [MESSAGES [STREAMS]]    (1000000 messages of 100 bytes in 8 streams)
Prints one line per way: seconds (once, after a small run of each), rows per second, and the ratio to its peer: for the
archive Spark's own Parquet to Parquet in the same folders, for commands that only read the reading alone, for commands
that write the sink.
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

from benchmarks.spark_read import MESSAGES, SIZE, STREAMS, fill, noop, session  # noqa: E402
from mqfs.ninep.client import connection  # noqa: E402
from tests.support.server import Server  # noqa: E402

SMALL = 20_000  # messages of the first run, which warms up


def once(act: Callable[[], Any]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


class Ways:
    """All ways over the streams of one group, each run once."""

    def __init__(self, spark: Any, folder: Path, address: str, group: str, messages: int) -> None:
        from pyspark_mqfs.commands.sources import Source

        self.spark, self.folder, self.address, self.group, self.messages = spark, folder, address, group, messages
        self.source = Source(address, pattern=f"{group}/.*")
        self.archived = str(folder / f"archive-{group}")
        self.found: dict[str, tuple[float, str]] = {}

    def run(self, what: str, peer: str, act: Callable[[], Any]) -> Any:
        results: list[Any] = []
        self.found[what] = once(lambda: results.append(act())), peer
        return results[0]

    def measure(self) -> None:
        from pyspark_mqfs.commands import archive, copy, replay, verify
        from pyspark_mqfs.commands.copy import Copy
        from pyspark_mqfs.commands.replay import Replay
        from pyspark_mqfs.commands.verify import Verify

        spark, source, path = self.spark, self.source, self.archived
        live = spark.read.format("mqfs").options(**source.options()).load()
        parquet = str(self.folder / f"plain-{self.group}")
        archive.archive_columns(live).write.parquet(parquet)
        plain = spark.read.parquet(parquet)
        self.run("streams read", "", noop(live))
        other = str(self.folder / f"other-{self.group}")
        self.run("Parquet to Parquet", "", lambda: plain.write.partitionBy(*archive.PARTITIONS).parquet(other))
        self.run("archive", "Parquet to Parquet", lambda: archive.run(spark, archive.Archive(source, path)))
        self.run("archive read", "", noop(archive.open_archive(spark, path)))
        done = self.run("verify, streams", "streams read", lambda: verify.run(spark, Verify(source=source)))
        assert (done["messages"], done["sound"]) == (self.messages, True), done
        done = self.run("verify, archive", "archive read", lambda: verify.run(spark, Verify(path)))
        assert (done["messages"], done["sound"]) == (self.messages, True), done
        done = self.run("verify, archive against streams", "both read", lambda: verify.run(spark, Verify(path, source)))
        assert (done["same"], done["sound"]) == (self.messages, True), done
        self.found["both read"] = self.found["streams read"][0] + self.found["archive read"][0], ""
        self.sink(archive.open_archive(spark, path))
        done = self.run("replay", "sink", lambda: replay.run(spark, Replay(path, source, into=f"again-{self.group}")))
        assert done["messages"] == self.messages
        self.run("copy", "sink", lambda: copy.run(spark, Copy(source, source, to=f"copied-{self.group}/all")))

    def sink(self, rows: Any) -> None:
        """Write the rows of an archive to the sink: the upper bound of replay and copy."""
        with connection.connect(self.address) as client:
            client.mkdir(f"sunk-{self.group}")
            with client.open(f"sunk-{self.group}/ctl", "w") as file:
                file.write(b"replay all\n")
        from pyspark.sql import functions as F

        rows = rows.select("value", F.concat(F.lit(f"sunk-{self.group}/"), F.col("stream")).alias("topic"))
        self.run("sink", "", lambda: rows.write.format("mqfs").options(address=self.address).mode("append").save())


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name)
        address = f"unix!{folder}/9p"
        with Server("--store", str(folder / "store"), "--listen", address, cwd=folder):
            fill(address, "small", SMALL)
            fill(address)
            spark = session(folder)
            for key, value in SETTINGS.items():
                spark.conf.set(key, value)
            Ways(spark, folder, address, "small", SMALL).measure()
            ways = Ways(spark, folder, address, "bench", MESSAGES)
            ways.measure()
            progress(ways.found)
            spark.stop()


# The settings of `mqfs spark` that an existing session accepts.
SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "100000",
}


def progress(found: dict[str, tuple[float, str]]) -> None:
    print(f"{MESSAGES} messages of {SIZE} B in {STREAMS} streams, local[2]")
    for what, (seconds, peer) in found.items():
        ratio = f"{found[peer][0] / seconds:6.2f} x {peer}" if peer else ""
        print(f"{what:35} {seconds:8.2f} s {MESSAGES / seconds / 1e6:8.2f} M rows/s {ratio}")


if __name__ == "__main__":
    main()
