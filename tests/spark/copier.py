"""The program that is killed: copies g/in to g/out by small batches until all that is there now is copied.

    python -m tests.spark.copier ADDRESS FOLDER MESSAGES [RETRY_S]

With RETRY_S it copies for each line of standard input, and answers it with a line: how that came to its end.
"""

from __future__ import annotations

import sys
from typing import Any


def session(folder: str) -> Any:
    from pyspark.sql import SparkSession

    return (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "1g")
        .config("spark.local.dir", f"{folder}/local")
        .getOrCreate()
    )


def copy(spark: Any, address: str, folder: str, at_once: str, retry_s: str = "60") -> None:
    source = spark.readStream.format("mqfs").options(
        address=address, subscribe="g/in", startingOffsets="earliest", maxOffsetsPerTrigger=at_once, minPartitions=2,
        retrySeconds=retry_s,
    )  # fmt: skip
    query = source.load().select("value").writeStream.format("mqfs")
    query = query.options(address=address, topic="g/out", checkpointLocation=f"{folder}/checkpoint")
    query.trigger(availableNow=True).start().awaitTermination()


def main() -> None:
    address, folder, at_once, *retry_s = sys.argv[1:]
    spark = session(folder)
    if not retry_s:
        return copy(spark, address, folder, at_once)
    for _ in sys.stdin:
        try:
            copy(spark, address, folder, at_once, *retry_s)
            print("copied", flush=True)
        except Exception as error:
            print(repr(str(error)), flush=True)


if __name__ == "__main__":
    main()
