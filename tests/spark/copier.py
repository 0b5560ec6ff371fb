"""The program that is killed: copies g/in to g/out by small batches until all that is there now is copied."""

from __future__ import annotations

import sys


def main() -> None:
    from pyspark.sql import SparkSession

    address, folder, at_once, *retry = sys.argv[1:]
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "1g")
        .config("spark.local.dir", f"{folder}/local")
        .getOrCreate()
    )
    source = spark.readStream.format("mqfs").options(
        address=address, subscribe="g/in", startingOffsets="earliest", maxOffsetsPerTrigger=at_once, minPartitions=2,
        retrySeconds=retry[0] if retry else "60",
    )  # fmt: skip
    query = source.load().select("value").writeStream.format("mqfs")
    query = query.options(address=address, topic="g/out", checkpointLocation=f"{folder}/checkpoint")
    query.trigger(availableNow=True).start().awaitTermination()


if __name__ == "__main__":
    main()
