"""The program of Spark Connect: read, write and a stream, through a client that has no Java of its own.

    tests/spark/connect.py REMOTE ADDRESS FOLDER [ZIP]

REMOTE is the address of a server, or local[2] for one that is started. With ZIP the server's Python has no package:
it goes along as an artifact, and the client registers it. Spark gives artifacts to batches, but not to the process that
asks for a stream's positions, so then there is no stream.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    from pyspark.sql import SparkSession

    remote, address, folder, *package = sys.argv[1:]
    builder = SparkSession.builder.remote(remote)
    if remote.startswith("local"):
        builder = builder.config("spark.ui.enabled", "false").config("spark.driver.memory", "1g")
        builder = builder.config("spark.local.dir", f"{folder}/local")
    spark = builder.getOrCreate()
    for path in package:
        import pyspark_mqfs

        spark.addArtifacts(path, pyfile=True)
        pyspark_mqfs.register(spark)
    at = {"address": address, "subscribe": "g/in"}
    found: dict[str, object] = {"client": type(spark).__module__}
    rows = spark.read.format("mqfs").options(**at).load()
    found["read"] = [bytes(row["value"]).decode() for row in rows.orderBy("offset").collect()]
    rows.select("value").write.format("mqfs").options(address=address, topic="g/batch").mode("append").save()
    live = spark.readStream.format("mqfs").options(**at, startingOffsets="earliest").load().select("value")
    for _ in range(0 if package else 2):
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
