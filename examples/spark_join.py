#!/usr/bin/env python3
"""Join orders and payments: two streams of messages.

    examples/spark_join.py ADDRESS ORDERS PAYMENTS TO
    examples/spark_join.py 'unix!mqfs.sock' shop/orders shop/paid shop/done

Messages are {"order": 7, ...}. A payment counts within an hour of its order; older messages are dropped, so that the
state of the query stays bounded. The query joins the present messages, and ends; without the trigger it continues.
"""

import sys
import tempfile

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F


def stream(spark: SparkSession, address: str, path: str, name: str) -> DataFrame:
    rows = spark.readStream.format("mqfs").options(address=address, subscribe=path, startingOffsets="earliest").load()
    text = F.col("value").cast("string")
    return rows.select(
        F.get_json_object(text, "$.order").alias(f"{name}_order"),
        F.trim(text).alias(name),
        F.col("timestamp").alias(f"{name}_time"),
    ).withWatermark(f"{name}_time", "1 hour")


def main() -> None:
    if len(sys.argv) != 5:
        sys.exit("usage: examples/spark_join.py ADDRESS ORDERS PAYMENTS TO")
    address, orders, payments, to = sys.argv[1:]
    spark = SparkSession.builder.appName("join").config("spark.sql.shuffle.partitions", "2").getOrCreate()
    both = stream(spark, address, orders, "ordered").join(
        stream(spark, address, payments, "paid"),
        F.expr("ordered_order = paid_order and paid_time between ordered_time and ordered_time + interval 1 hour"),
    )
    done = both.select(F.to_json(F.struct("ordered", "paid")).alias("value"))
    with tempfile.TemporaryDirectory() as checkpoint:
        query = done.writeStream.format("mqfs").options(address=address, topic=to, checkpointLocation=checkpoint)
        query.trigger(availableNow=True).start().awaitTermination()


if __name__ == "__main__":
    main()
