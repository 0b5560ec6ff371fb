"""The program of Spark Connect: read, write and a stream, through a client that has no Java of its own.

    python -m tests.spark.connect ADDRESS FOLDER

The package goes along as an artifact and is registered, or is found by the server where that has it.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    from pyspark.sql import SparkSession

    address, folder = sys.argv[1:]
    spark = (
        SparkSession.builder.remote("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "1g")
        .config("spark.local.dir", f"{folder}/local")
        .getOrCreate()
    )
    at = {"address": address, "subscribe": "g/in"}
    found: dict[str, object] = {"client": type(spark).__module__}
    rows = spark.read.format("mqfs").options(**at).load()
    found["read"] = [bytes(row["value"]).decode() for row in rows.orderBy("offset").collect()]
    rows.select("value").write.format("mqfs").options(address=address, topic="g/batch").mode("append").save()
    live = spark.readStream.format("mqfs").options(**at, startingOffsets="earliest").load().select("value")
    for _ in range(2):
        writer = live.writeStream.format("mqfs").options(address=address, topic="g/live")
        query = writer.option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True).start()
        query.awaitTermination()
    try:
        spark.read.format("mqfs").options(**at, subscribePattern="x").load().collect()
    except Exception as error:
        found["refused"] = str(error)
    print("found " + json.dumps(found), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
