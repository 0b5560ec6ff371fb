#!/usr/bin/env python3
"""Count the words of a stream, and write the counts to another stream.

    examples/spark_words.py ADDRESS FROM TO [CHECKPOINT]
    examples/spark_words.py 'unix!mqfs.sock' talk/in talk/words

Shows a query that reads and writes streams. Each word is counted once: the changed counts of a batch are written under
the query's name and the batch's number. With a checkpoint the query continues where the last run stopped; without one
it counts the present messages, and ends.
"""

import sys
import tempfile

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F


def main() -> None:
    if len(sys.argv) < 4:
        sys.exit("usage: examples/spark_words.py ADDRESS FROM TO [CHECKPOINT]")
    address, read, write, *more = sys.argv[1:]
    spark = SparkSession.builder.appName("words").config("spark.sql.shuffle.partitions", "2").getOrCreate()
    lines = spark.readStream.format("mqfs").options(address=address, subscribe=read, startingOffsets="earliest").load()
    words = lines.select(F.explode(F.split(F.col("value").cast("string"), r"\s+")).alias("word")).where("word <> ''")

    def told(batch: DataFrame, number: int) -> None:
        query = spark.sparkContext.getLocalProperty("sql.streaming.queryId")
        batch.select(F.to_json(F.struct("word", "count")).alias("value")).write.format("mqfs").options(
            address=address, topic=write, txnAppId=f"words-{query}", txnVersion=number
        ).mode("append").save()

    with tempfile.TemporaryDirectory() as own:
        query = words.groupBy("word").count().writeStream.outputMode("update").foreachBatch(told)
        query = query.option("checkpointLocation", more[0] if more else own)
        (query if more else query.trigger(availableNow=True)).start().awaitTermination()


if __name__ == "__main__":
    main()
