"""The sink: every row once, whatever fails; a batch is seen whole; errors are one line."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from mqfs import limits
from mqfs.errors import MqfsError
from mqfs.ninep.client import connection
from pyspark_mqfs import sink, writer
from pyspark_mqfs.connection import Server
from pyspark_mqfs.options import OptionError, Options
from pyspark_mqfs.sink import SinkError
from pyspark_mqfs.writer import Sink
from tests.spark.scene import Scene

VALUE = StructType([StructField("value", StringType())])


def write(frame: Any, scene: Scene, **options: Any) -> None:
    frame.write.format("mqfs").options(address=scene.address, **options).mode("append").save()


def read(spark: Any, scene: Scene, path: str) -> list[str]:
    """The bodies of a stream, in order."""
    frame = spark.read.format("mqfs").options(address=scene.address, subscribe=path).load()
    return [bytes(row["value"]).decode() for row in frame.select("offset", "value").orderBy("offset").collect()]


def parts(scene: Scene, group: str) -> list[str]:
    return [name for name in scene.client.list(f"{group}/.txn") if name != "ctl"]


def numbers(spark: Any, count: int, slices: int = 2) -> Any:
    return spark.range(0, count, 1, slices).selectExpr("cast(id as string) value")


def test_columns(spark: Any, scene: Scene) -> None:
    scene.group("g")
    scene.group("h")
    scene.ctl("", "replay all")
    frame = spark.createDataFrame(
        [
            (b"one", "k1", "g/a", [("x", b"1"), ("sender", b"0")]),
            (b"two", None, "h/b", None),
            (b"three", None, "root", []),
            (b"four", None, "g/c", [("\u00fc", b"")]),
            (b"", "k2", "g/empty", None),
        ],
        "value binary, key string, topic string, headers array<struct<key:string,value:binary>>",
    ).coalesce(1)
    write(frame, scene)
    found = (
        spark.read.format("mqfs").options(address=scene.address, subscribePattern=".*", includeHeaders="true").load()
    )
    rows = {
        row["topic"]: (bytes(row["value"]), sorted((h["key"], bytes(h["value"])) for h in row["headers"] or []))
        for row in found.collect()
    }
    sender = ("sender", dict(rows["g/a"][1])["sender"])
    assert rows == {
        "g/a": (b"one", [("key", b"k1"), sender, ("x", b"1")]),
        "h/b": (b"two", []),
        "root": (b"three", []),
        "g/c": (b"four", [sender, ("\u00fc", b"")]),
        "g/empty": (b"", [("key", b"k2"), sender]),
    }
    write(numbers(spark, 1000, 4), scene, topic="g/all")
    assert read(spark, scene, "g/all") == [str(n) for n in range(1000)]  # in the order of the partitions
    assert parts(scene, "g") == parts(scene, "h") == []


def test_a_batch_with_a_name_is_written_once(spark: Any, scene: Scene) -> None:
    scene.group("g")
    for version in (0, 0, 1, 0):
        write(numbers(spark, 10), scene, topic="g/a", txnAppId="nightly", txnVersion=version)
    assert read(spark, scene, "g/a") == [str(n) for n in range(10)] * 2


def test_batches_without_a_name_are_never_taken_for_one_another(
    spark: Any, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where a driver was killed before it sent the server the command to forget the first."""
    scene.group("g")
    monkeypatch.setattr(sink, "_clean_up", lambda *_: None)
    for value in ("1", "2"):
        made = writer.batch_writer({"address": scene.address, "topic": "g/a"}, VALUE, False)
        made.commit([made.write(rows(value))])
    assert read(spark, scene, "g/a") == ["1", "2"]


@pytest.mark.parametrize(("way", "kept"), [("drop", []), ("keep", [("was.sender", b"7")])])
def test_reserved_headers(spark: Any, scene: Scene, way: str, kept: list[tuple[str, bytes]]) -> None:
    scene.group("g")
    given = spark.createDataFrame(
        [(b"1", [("x", b"1"), ("sender", b"7")])], "value binary, headers array<struct<key:string,value:binary>>"
    )
    write(given, scene, topic="g/a", reservedHeaders=way)
    options = {"address": scene.address, "subscribe": "g/a", "includeHeaders": "true"}
    [row] = spark.read.format("mqfs").options(**options).load().collect()
    found = [(h["key"], bytes(h["value"])) for h in row["headers"]]
    assert sorted(found[1:]) == [*kept, ("x", b"1")]
    assert found[0] == ("sender", b"%d" % os.getuid())
    with pytest.raises(Exception, match=r"header 'sender': set by the server"):
        write(given, scene, topic="g/a", reservedHeaders="refuse")


def test_a_task_that_is_tried_again(spark: Any, scene: Scene) -> None:
    """The first attempt stages rows, and fails."""
    scene.group("g")

    def fail_once(batches: Any) -> Any:
        from pyspark import TaskContext

        yield from batches
        if TaskContext.get().attemptNumber() == 0:  # type: ignore[union-attr]
            raise RuntimeError("the first attempt fails")

    frame = numbers(spark, 30_000).mapInArrow(fail_once, "value string")
    write(frame, scene, topic="g/a")
    assert read(spark, scene, "g/a") == [str(n) for n in range(30_000)]
    assert parts(scene, "g") == []


def into(scene: Scene, **more: str) -> Sink:
    return Sink.of(Options({"address": scene.address, "topic": "g/a", **more}, writer.WRITE, "a test"), VALUE, False)


def rows(*values: str | None) -> Any:
    return iter([pa.record_batch({"value": list(values)})])


def test_an_attempt_that_nobody_wants(spark: Any, scene: Scene) -> None:
    """Two stage the same rows, as with speculation; one is committed, the other is dropped with it."""
    scene.group("g")
    mine = into(scene)
    lost, wanted = (mine.stage("q", "spark-q-0-", rows("1", "2")) for _ in range(2))
    assert len(parts(scene, "g")) == 2
    transaction = sink.Transaction("spark-q", 1, "spark-q-0-", once=True, split=False)
    sink.commit(mine.server, transaction, wanted.batches)
    assert parts(scene, "g") == []
    sink.commit(mine.server, transaction, lost.batches)  # a driver that does not know of it
    sink.drop(mine.server, lost.batches)
    assert read(spark, scene, "g/a") == ["1", "2"]


def test_an_attempt_that_fails_leaves_nothing(scene: Scene) -> None:
    scene.group("g")
    with pytest.raises(OptionError, match="column value: null in a row for g/a"):
        into(scene).stage("q", "spark-q-0-", iter([*rows("1"), *rows("2", None)]))
    assert parts(scene, "g") == []


def test_what_is_too_large_is_named(scene: Scene) -> None:
    """By its stream, for headers and for a row that no write has room for; for parts by what to do."""
    scene.group("g")
    scene.group("h")
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    paths, long = ["g/a", "h/b", "g/" + "n" * 200], [("x", bytes(16_000))]
    values = [b"1", b"2", bytes(limits.MESSAGE_BYTES)]
    columns = StructType([StructField("value", BinaryType()), StructField("topic", StringType())])
    mine = Sink.of(Options({"address": scene.address}, writer.WRITE, "a test"), columns, False)
    for headers, text in (
        ([None, long + long, None], "column headers: 32008 bytes in a row for h/b"),
        ([None, None, [("x", bytes(5_000))]], r"row too large: \d+ bytes for g/n{200} with its name and headers"),
    ):
        batch = pa.record_batch({"value": values, "topic": paths, "headers": pa.array(headers, kind)})
        with pytest.raises(OptionError, match=text):
            mine.stage("q", "spark-q-0-", iter([batch]))
    parts = (scene.client.caller.mkdir(f"g/.txn/{number}", 0o700) for number in range(limits.PARTS // 2))
    assert scene.client.together(parts).count(None) == limits.PARTS // 2
    with pytest.raises(SinkError, match=r"group 'g': too many parts .*: write less at once, from fewer tasks"):
        into(scene).stage("q", "spark-q-0-", rows("1"))


def test_a_server_that_starts_anew_before_the_commit(spark: Any, scene: Scene) -> None:
    scene.group("g")
    mine = into(scene)
    staged = mine.stage("q", "spark-q-0-", rows("1"))
    scene.stop()
    scene.start()
    transaction = sink.Transaction("spark-q", 1, "spark-q-0-", once=True, split=False)
    with pytest.raises(
        SinkError, match=r"commit of spark-q.1 failed: staged batch in group 'g' is lost: .* repeat the batch"
    ):
        sink.commit(mine.server, transaction, staged.batches)
    again = mine.stage("q", "spark-q-0-", rows("1"))
    sink.commit(mine.server, transaction, again.batches)
    scene.stop()
    scene.start()
    sink.commit(mine.server, transaction, staged.batches)  # now it is known
    assert read(spark, scene, "g/a") == ["1"]


def test_more_than_a_unit(spark: Any, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.group("g")
    monkeypatch.setattr(limits, "UNIT_MESSAGES", 10)
    mine = into(scene)
    staged = mine.stage("q", "spark-q-0-", rows(*map(str, range(25))))
    assert [part.messages for part in staged.batches] == [10, 10, 5]
    with pytest.raises(SinkError, match=r"batch too large for group 'g': 25 messages, .* option largeBatches to split"):
        sink.commit(mine.server, sink.Transaction("spark-q", 1, "spark-q-0-", once=True, split=False), staged.batches)
    for _ in range(2):
        sink.commit(mine.server, sink.Transaction("spark-q", 1, "spark-q-0-", once=True, split=True), staged.batches)
    assert read(spark, scene, "g/a") == [str(n) for n in range(25)]


def copy(spark: Any, scene: Scene, checkpoint: Path, to: str, **options: Any) -> Any:
    frame = spark.readStream.format("mqfs").options(
        address=scene.address, subscribe="g/in", startingOffsets="earliest", **options
    )
    query = (
        frame.load()
        .select("value")
        .writeStream.format("mqfs")
        .options(address=scene.address, topic=to, checkpointLocation=str(checkpoint))
    )
    started = query.trigger(availableNow=True).start()
    started.awaitTermination(120)
    return started


def test_a_batch_that_is_repeated(spark: Any, scene: Scene, tmp_path: Path) -> None:
    """As after a kill between the commit and the note of it."""
    scene.group("g")
    bodies = [str(n) for n in range(100)]
    scene.stream("g/in", *(body.encode() for body in bodies))
    copy(spark, scene, tmp_path / "c", "g/out", maxOffsetsPerTrigger=40)
    assert read(spark, scene, "g/out") == bodies
    commits = sorted((tmp_path / "c/commits").iterdir())
    for file in commits:
        if file.name.strip(".").startswith("2"):
            file.unlink()
    query = copy(spark, scene, tmp_path / "c", "g/out", maxOffsetsPerTrigger=40)
    assert query.lastProgress["batchId"] == 2
    assert read(spark, scene, "g/out") == bodies
    assert parts(scene, "g") == []


def test_a_writer_inside_foreach_batch_writes_every_row(spark: Any, scene: Scene, tmp_path: Path) -> None:
    scene.group("g")
    scene.stream("g/in", *(b"%d" % n for n in range(10)))

    def both(batch: Any, number: int) -> None:
        kept = batch.select("value").persist()
        write(kept, scene, topic="g/one")
        write(kept, scene, topic="g/one")
        write(kept, scene, topic="g/two", txnAppId="mine", txnVersion=number)
        kept.unpersist()

    source = spark.readStream.format("mqfs").options(
        address=scene.address, subscribe="g/in", startingOffsets="earliest", maxOffsetsPerTrigger=5
    )
    query = source.load().writeStream.foreachBatch(both).option("checkpointLocation", str(tmp_path / "c"))
    query.trigger(availableNow=True).start().awaitTermination(120)
    first, second = [str(n) for n in range(5)], [str(n) for n in range(5, 10)]
    assert read(spark, scene, "g/one") == first * 2 + second * 2
    assert read(spark, scene, "g/two") == first + second


def test_live_publishers_do_not_get_between(spark: Any, scene: Scene) -> None:
    """All of a batch is next to one another in the log, and nothing of theirs is lost."""
    scene.group("g")
    scene.stream("g/a")
    stop, sent = threading.Event(), [0, 0]

    def publish(which: int) -> None:
        with connection.connect(scene.address) as client, client.open("g/a", "w") as file:
            while not stop.is_set():
                file.write(b"live%d" % which)
                sent[which] += 1

    threads = [threading.Thread(target=publish, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    try:
        for version in range(3):
            write(numbers(spark, 2_000), scene, topic="g/a", txnAppId="x", txnVersion=version)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    found = read(spark, scene, "g/a")
    assert [found.count(f"live{which}") for which in range(2)] == sent
    batch = [str(n) for n in range(2_000)]
    starts = [at for at, body in enumerate(found) if body == "0"]
    assert len(starts) == 3
    assert all(found[at : at + 2_000] == batch for at in starts)


BAD = [
    ({}, {"adress": "x"}, r"option adress: unknown to the writer \(did you mean address"),
    ({}, {"txnAppId": "x"}, "txnAppId and txnVersion: one without the other"),
    ({}, {"txnAppId": "a b", "txnVersion": "1"}, "option txnAppId: invalid value 'a b'"),
    ({}, {"txnAppId": "x", "txnVersion": "-1"}, "option txnVersion: invalid value '-1'"),
    ({}, {"create": "yes"}, "expected true or false"),
    ({}, {"reservedHeaders": "x"}, "expected drop or keep or refuse"),
    ({}, {"largeBatches": "x"}, "expected refuse or split"),
    ({}, {"topic": ""}, "no column topic and no option topic"),
    ({}, {"topic": "g/.put"}, "invalid topic 'g/.put'"),
    ({"value": BinaryType(), "extra": StringType()}, {}, "column extra: unknown to the writer"),
    ({"key": BinaryType()}, {}, "column value: missing"),
    ({"value": VALUE}, {}, "expected binary or string"),
]


@pytest.mark.parametrize(("columns", "options", "text"), BAD)
def test_bad_options(columns: dict[str, Any], options: dict[str, str], text: str) -> None:
    schema = StructType([StructField(*column) for column in columns.items()]) if columns else VALUE
    said = {"address": "unix!/nowhere", "topic": "g/a", **options}
    with pytest.raises(OptionError, match=text):
        writer.batch_writer(said, schema, False)


def test_what_a_stream_and_a_mode_do_not_take() -> None:
    said = {"address": "unix!/nowhere", "topic": "g/a"}
    with pytest.raises(OptionError, match="expected append"):
        writer.batch_writer(said, VALUE, True)
    with pytest.raises(OptionError, match="option txnAppId: only for batch writes"):
        writer.stream_writer({**said, "txnAppId": "x"}, VALUE, False)


def test_what_the_server_refuses(spark: Any, scene: Scene) -> None:
    with pytest.raises(OptionError, match=r"no group 'none' \(create it"):
        into(scene, topic="none/a").stage("q", "spark-q-0-", rows("1"))
    scene.group("g")
    with pytest.raises(OptionError, match=r"topic 'g': a group \(expected a stream in it, as g/all\)"):
        into(scene, topic="g").stage("q", "spark-q-0-", rows("1"))
    with pytest.raises(SinkError, match="no stream 'a' in the group of part"):
        into(scene, create="false").stage("q", "spark-q-0-", rows("1"))
    scene.ctl("g", "full reject", "depth 3")
    scene.stream("g/a", b"there")
    with pytest.raises(Exception, match="depth reached with"):
        write(numbers(spark, 3), scene, topic="g/a")
    with pytest.raises(Exception, match="option adress: unknown to the writer"):
        write(numbers(spark, 3), scene, topic="g/a", adress="x")
    assert read(spark, scene, "g/a") == ["there"]
    assert parts(scene, "g") == []
    with pytest.raises((SinkError, OptionError, MqfsError)):
        sink.Staging(Server(f"{scene.address}-none", retry_s=0.1), "x", True)._open_batch("g")
