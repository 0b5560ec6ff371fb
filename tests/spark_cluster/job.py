"""A program for spark-submit: copies a stream twice, as a batch and as a stream, and prints where the Python
of each machine and the package are.

spark-submit job.py ADDRESS TOKEN FROM TO register|found
"""

from __future__ import annotations

import json
import os
import sys

from pyspark.sql import SparkSession


def look(_: int) -> tuple[str, str, str]:
    import platform

    import pyspark_mqfs

    return sys.executable, sys.prefix, f"{platform.python_version()} {pyspark_mqfs.__file__}"


def main() -> None:
    address, token, source, target, how = sys.argv[1:]
    spark = SparkSession.builder.appName("job").getOrCreate()
    if how == "register":
        import pyspark_mqfs

        pyspark_mqfs.register(spark)
    at = {"address": address, "token": token}
    options = {**at, "subscribe": source, "minPartitions": "2"}
    rows = spark.read.format("mqfs").options(**options).load()
    rows.select("value").write.format("mqfs").options(**at, topic=target).mode("append").save()
    live = spark.readStream.format("mqfs").options(**options, startingOffsets="earliest").load().select("value")
    query = live.writeStream.format("mqfs").options(**at, topic=target, checkpointLocation=f"file:{os.getcwd()}/noted")
    query.trigger(availableNow=True).start().awaitTermination()
    executors = spark.sparkContext.parallelize(range(4), 4).map(look).collect()
    print("found " + json.dumps({"executors": sorted(set(executors))}), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
