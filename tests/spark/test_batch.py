"""Batches: what is in streams is in the DataFrame, by every option; and errors are one line."""

from __future__ import annotations

import datetime
import json
import os
import re
from typing import Any

import pytest
from pyspark.sql import functions as F

from pyspark_mqfs import schema
from pyspark_mqfs.options import OptionError
from pyspark_mqfs.reader import BatchReader
from tests.spark.scene import Scene


def read(spark: Any, scene: Scene, **options: Any) -> Any:
    return spark.read.format("mqfs").options(address=scene.address, **options).load()


def values(frame: Any) -> list[tuple[str, int, bytes]]:
    rows = frame.select("topic", "offset", "value").collect()
    return sorted((row[0], row[1], bytes(row[2])) for row in rows)


@pytest.fixture
def jobs(scene: Scene) -> Scene:
    """Sequences 1-3 in a, 4 and 5 in b, 6 in a; 1 in other/a; one of the root."""
    scene.group("jobs")
    scene.stream("jobs/a", b"a1", b"a2", b"a3")
    scene.stream("jobs/b", b"b4", b"b5")
    scene.write("jobs/a", b"a6")
    scene.group("other")
    scene.stream("other/a", b"o1")
    return scene


A = [("jobs/a", 1, b"a1"), ("jobs/a", 2, b"a2"), ("jobs/a", 3, b"a3"), ("jobs/a", 6, b"a6")]
B = [("jobs/b", 4, b"b4"), ("jobs/b", 5, b"b5")]
OTHER = [("other/a", 1, b"o1")]


def test_streams_by_name_by_pattern_and_assigned(spark: Any, jobs: Scene) -> None:
    assert values(read(spark, jobs, subscribe="jobs/a")) == A
    assert values(read(spark, jobs, subscribe="jobs/a, /jobs/b")) == A + B
    assert values(read(spark, jobs, subscribePattern=".*/a")) == A + OTHER
    assert values(read(spark, jobs, assign='{"jobs/b": [0]}')) == B


def test_all_columns(spark: Any, jobs: Scene) -> None:
    jobs.put("jobs", '{"stream":"b","headers":{"k":"v","ü":""}}', b"with headers")
    frame = read(spark, jobs, subscribe="jobs/b", includeHeaders="true")
    assert frame.schema.simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,timestamp:timestamp,"
        "timestampType:int,headers:array<struct<key:string,value:binary>>>"
    )
    first, _, last = frame.orderBy("offset").collect()
    assert (first["key"], first["partition"], first["timestampType"], first["headers"]) == (None, 0, 0, None)
    assert sorted((h["key"], bytes(h["value"])) for h in last["headers"]) == [
        ("k", b"v"), ("sender", b"%d" % os.geteuid()), ("ü", b"")
    ]  # fmt: skip
    age = datetime.datetime.now() - last["timestamp"]
    assert datetime.timedelta() < age < datetime.timedelta(minutes=5)
    assert "headers" not in read(spark, jobs, subscribe="jobs/b").columns


def test_a_schema_of_fewer_columns(spark: Any, jobs: Scene) -> None:
    reader = spark.read.format("mqfs").option("address", jobs.address).option("subscribe", "jobs/b")
    assert [tuple(row) for row in reader.schema("offset bigint, topic string").load().collect()] == [
        (4, "jobs/b"),
        (5, "jobs/b"),
    ]
    with pytest.raises(Exception, match=r"invalid column 'colour string' \(expected some of: key binary, value binary"):
        reader.schema("colour string").load().collect()


def test_offsets(spark: Any, jobs: Scene) -> None:
    both = {"subscribe": "jobs/a,jobs/b"}
    assert values(read(spark, jobs, startingOffsets='{"jobs/a": 3, "jobs/b": {"0": 5}}', **both)) == A[2:] + B[1:]
    assert values(read(spark, jobs, startingOffsets='{"jobs/a": -1}', **both)) == B
    assert values(read(spark, jobs, endingOffsets='{"jobs/a": 3}', **both)) == A[:2] + B
    assert values(read(spark, jobs, startingOffsets="latest", **both)) == []


def test_times(spark: Any, scene: Scene) -> None:
    scene.group("g")
    scene.stream("g/s", b"one", b"two")
    rows = read(spark, scene, subscribe="g/s").orderBy("offset").collect()
    ms = int(rows[1]["timestamp"].timestamp() * 1_000) + 1
    while True:  # until the clock has moved on
        scene.write("g/s", b"three")
        last = read(spark, scene, subscribe="g/s").orderBy(F.desc("offset")).first()
        if last["timestamp"].timestamp() * 1_000 > ms + 1:
            break
    late = values(read(spark, scene, subscribe="g/s", startingTimestamp=ms))
    early = values(read(spark, scene, subscribe="g/s", endingTimestamp=ms))
    assert [value for _, _, value in early] == [b"one", b"two"]
    assert {value for _, _, value in late} == {b"three"}
    by_stream = json.dumps({"g/s": ms})
    assert values(read(spark, scene, subscribe="g/s", startingOffsetsByTimestamp=by_stream)) == late
    with pytest.raises(Exception, match="option startingTimestamp: group g has no message at or after 99999999999999"):
        read(spark, scene, subscribe="g/s", startingTimestamp=99999999999999).collect()
    options = {"startingTimestamp": 99999999999999, "startingOffsetsByTimestampStrategy": "latest"}
    assert values(read(spark, scene, subscribe="g/s", **options)) == []


def test_shares(spark: Any, scene: Scene) -> None:
    scene.group("g")
    for name in "abc":
        scene.stream(f"g/{name}", *(b"%d" % n + bytes(500) for n in range(400)))
    whole = values(read(spark, scene, subscribePattern="g/.*"))
    assert len(whole) == 1_200
    for options, tasks, off in (
        ({}, 1, 0),
        ({"minPartitions": 5}, 5, 0),
        ({"maxRecordsPerPartition": 100}, 12, 1),
        ({"maxBytesPerPartition": "100k"}, 7, 1),
    ):
        frame = read(spark, scene, subscribePattern="g/.*", **options)
        assert values(frame) == whole, options
        assert abs(frame.rdd.getNumPartitions() - tasks) <= off, options


def test_small_groups_share_a_task(spark: Any, scene: Scene) -> None:
    for number in range(6):
        scene.group(f"g{number}")
        scene.stream(f"g{number}/s", b"%d" % number)
    frame = read(spark, scene, subscribePattern="g./s")
    assert frame.rdd.getNumPartitions() == 1
    assert [value for _, _, value in values(frame)] == [b"%d" % n for n in range(6)]


def test_filters_are_answered_before_reading(spark: Any, jobs: Scene) -> None:
    frame = read(spark, jobs, subscribePattern=".*")
    assert values(frame.where("topic = 'jobs/a' and offset >= 2 and offset < 6")) == A[1:3]
    assert values(frame.where("topic in ('jobs/b', 'other/a')")) == B + OTHER
    assert values(frame.where("topic like 'other/%' and offset = 1")) == OTHER
    at = frame.where("offset = 3").first()["timestamp"]
    assert values(frame.where(F.col("timestamp") == F.lit(at)).where("topic = 'jobs/a'"))[0] in A
    assert values(frame.where(F.col("timestamp") < F.lit(at - datetime.timedelta(days=1)))) == []
    assert values(frame.where("topic = 'nobody'")) == []
    assert values(frame.where("key is not null")) == []
    assert values(frame.where("topic = 'jobs/a' and offset > 2")) == A[2:]
    assert values(frame.where("topic = 'jobs/a' and offset <= 2")) == A[:2]
    assert values(frame.where("topic != 'jobs/a' and offset != 4 and topic like '%/%'")) == B[1:] + OTHER


def test_without_push_down_the_same(spark: Any, jobs: Scene) -> None:
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")
    try:
        assert values(read(spark, jobs, subscribePattern=".*").where("topic = 'jobs/a' and offset > 2")) == A[2:]
    finally:
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")


def test_large_messages_and_names_in_quotes(spark: Any, scene: Scene) -> None:
    scene.group("g")
    scene.stream("g/it's a name", b"x" * 1_000_000, b"", b"y" * 1_040_000)
    scene.stream("g/other", b"z")
    found = values(read(spark, scene, assign=json.dumps({"g/it's a name": [0]})))
    assert [len(value) for _, _, value in found] == [1_000_000, 1_040_000]  # an end mark is none
    assert {path for path, _, _ in found} == {"g/it's a name"}


A_ = {"subscribe": "jobs/a"}
WRONG: list[tuple[dict[str, str], str]] = [
    (A_ | {"startingOffset": "latest"}, "startingoffset: unknown to the reader (did you mean startingOffsets"),
    (A_ | {"subscribePattern": "x"}, "options subscribe and subscribePattern: more than one given"),
    ({}, "no streams selected (expected one of subscribe, subscribePattern and assign)"),
    ({"subscribePattern": "("}, "option subscribePattern: invalid value '(' (expected a regular expression"),
    ({"subscribe": "jobs/nobody"}, "option subscribe: no stream 'jobs/nobody'"),
    (
        A_ | {"startingOffsets": "oldest"},
        "option startingOffsets: invalid value 'oldest' (expected earliest, latest or",
    ),
    (A_ | {"startingOffsets": '{"jobs/b": 1}'}, "option startingOffsets: unknown stream 'jobs/b'"),
    (
        A_ | {"startingOffsetsByTimestamp": '{"jobs/a": 1000000000000000000000000000000}'},
        "option startingOffsetsByTimestamp: invalid value '{\"jobs/a\": 1000000000000000000000000000000}' (expected {",
    ),
    (A_ | {"endingOffsets": "earliest"}, "option endingOffsets: invalid value 'earliest' (expected latest"),
    (
        A_ | {"minPartitions": "many"},
        "option minPartitions: invalid value 'many' (expected a whole number, at least 1)",
    ),
    (A_ | {"maxBytesPerPartition": "0"}, "option maxBytesPerPartition: invalid value '0' (expected bytes"),
    (A_ | {"failOnDataLoss": "maybe"}, "option failOnDataLoss: invalid value 'maybe' (expected true or false)"),
    (A_ | {"maxOffsetsPerTrigger": "5"}, "option maxOffsetsPerTrigger: only for streaming reads"),
    (
        A_ | {"address": "nonsense"},
        "option address: invalid value 'nonsense' (expected unix!PATH, tcp!HOST!PORT, tls!HOST!PORT or HOST:PORT)",
    ),
    (
        A_ | {"address": "unix!/nowhere/9p", "retrySeconds": "0"},
        "option address: no answer from 'unix!/nowhere/9p' for 0 s (option retrySeconds): ",
    ),
]


@pytest.mark.parametrize(("options", "text"), WRONG)
def test_what_is_wrong_is_said(jobs: Scene, options: dict[str, str], text: str) -> None:
    with pytest.raises(OptionError, match=f"(?i){re.escape(text)}"):  # Spark gives names in lower case
        BatchReader({"address": jobs.address, **options}, schema.all_columns(headers=False)).partitions()


@pytest.mark.parametrize(("options", "text"), [WRONG[0], WRONG[4]], ids=["before a reader is made", "by its plan"])
def test_what_is_wrong_is_said_by_spark(spark: Any, jobs: Scene, options: dict[str, str], text: str) -> None:
    with pytest.raises(Exception) as caught:
        spark.read.format("mqfs").options(**{"address": jobs.address, **options}).load().collect()
    assert text.lower() in str(caught.value).lower()


def test_what_was_cut_is_told(spark: Any, scene: Scene) -> None:
    scene.group("g", "replay all", "depth 3", "sync off")
    scene.stream("g/s", *(b"%d" % n for n in range(10)))
    assert [value for _, _, value in values(read(spark, scene, subscribe="g/s"))] == [b"7", b"8", b"9"]
    from_two = {"subscribe": "g/s", "startingOffsets": '{"g/s": 2}'}
    with pytest.raises(Exception, match=r"g/s: sequences 2 to 7 are no longer retained .*option failOnData"):
        read(spark, scene, **from_two).collect()
    clipped = read(spark, scene, failOnDataLoss="false", **from_two)
    assert [value for _, _, value in values(clipped)] == [b"7", b"8", b"9"]
