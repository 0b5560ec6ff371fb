"""What the driver of the cluster does when it is asked: a line of JSON in, a line out. Run as a program.

Functions that executors run go with the tasks, for they are of the program itself; the package is what is installed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from pyspark import TaskContext
from pyspark.sql import SparkSession


def here() -> str:
    """The address of the machine that asks."""
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("10.77.0.1", 9))
        return str(probe.getsockname()[0])


def started() -> SparkSession:
    address, folder = os.environ["ADDRESS"], os.environ["FOLDER"]
    builder = SparkSession.builder.master(os.environ["MASTER"]).appName("steps")
    for name, value in {
        "spark.ui.enabled": "false",
        "spark.driver.host": address,
        "spark.driver.bindAddress": address,
        "spark.driver.memory": "768m",
        "spark.executor.memory": os.environ["MEMORY"],
        "spark.executor.cores": os.environ["EACH"],
        "spark.cores.max": os.environ["CORES"],
        "spark.sql.warehouse.dir": f"{folder}/warehouse",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.streaming.metricsEnabled": "false",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "100",  # rows are staged before a task is at its end
        "spark.speculation": "true",
        "spark.speculation.quantile": "0.5",
        "spark.speculation.interval": "50ms",
        "spark.speculation.minTaskRuntime": "500ms",
    }.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("WARN")
    return spark


class Steps:
    """Each by its name."""

    def __init__(self) -> None:
        self.spark = started()
        self._speculate("false")

    def _speculate(self, said: str) -> None:
        """Set speculation of the tasks that come: else a machine that is slow today does nothing."""
        self.spark.sparkContext._jsc.sc().conf().set("spark.speculation", said)  # type: ignore[union-attr]

    def both(self) -> int:
        """Wait until both workers have an executor."""
        import time

        status = self.spark.sparkContext._jsc.sc()  # type: ignore[union-attr]
        deadline = time.monotonic() + 300
        while (count := status.getExecutorMemoryStatus().size() - 1) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        return int(count)

    def read(self, options: dict[str, str], hidden: str) -> dict[str, Any]:
        """The messages read, by which machines, and what these see where the driver has its store."""

        def look(batches: Iterator[Any]) -> Iterator[Any]:
            import pyarrow as pa

            rows = sum(batch.num_rows for batch in batches)
            seen = ",".join(sorted(os.listdir(hidden)))
            yield pa.record_batch({"host": [here()], "rows": [rows], "seen": [seen]})

        frame = self.spark.read.format("mqfs").options(**options).load()
        found = frame.mapInArrow(look, "host string, rows bigint, seen string").collect()
        return {"tasks": [row.asDict() for row in found], "driver": here(), "sees": sorted(os.listdir(hidden))}

    def archive(self, address: str, token: str, stream: str, path: str) -> int:
        """The command; how many messages are in the archive."""
        from pyspark_mqfs.commands import archive
        from pyspark_mqfs.commands.sources import Source

        return int(archive.run(self.spark, archive.Archive(Source(address, (stream,), token=token), path))["messages"])

    def copy(
        self, options: dict[str, str], to: dict[str, str], checkpoint: str, slow: dict[str, str] | None = None
    ) -> int:
        """Copy what there is now; the number of batches."""
        rows = self.spark.readStream.format("mqfs").options(startingOffsets="earliest", **options).load()
        frame = rows.select("value")
        if slow is not None:
            frame = frame.mapInArrow(slowed(**slow), "value binary")
            self._speculate("true" if slow["how"] == "first" else "false")
        writer = frame.writeStream.format("mqfs").options(checkpointLocation=checkpoint, **to)
        query = writer.trigger(availableNow=True).start()
        try:
            query.awaitTermination()
            return sum(progress["numInputRows"] > 0 for progress in query.recentProgress)
        finally:
            query.stop()
            self._speculate("false")


def slowed(how: str, folder: str) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Rows pass at once, and each attempt of a task tells of itself; then some wait until a file is there, or fail."""

    def slow(batches: Iterator[Any]) -> Iterator[Any]:
        import time

        yield from batches
        context = TaskContext.get()
        assert context is not None
        attempt, partition = context.attemptNumber(), context.partitionId()
        with open(f"{folder}/{partition}-{attempt}-{here()}", "w"):
            pass
        if how == "fail" and attempt == 0:
            raise RuntimeError("the first attempt fails")
        waits = {"all": "go", "first": "never" if attempt == 0 else "go"}.get(how)
        while waits and (how == "all" or partition == 0) and not os.path.exists(f"{folder}/{waits}"):
            time.sleep(0.02)

    return slow


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    steps = Steps()
    for line in sys.stdin:
        said = json.loads(line)
        try:
            answer = {"found": getattr(steps, said.pop("step"))(**said)}
        except Exception as error:
            answer = {"error": str(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
