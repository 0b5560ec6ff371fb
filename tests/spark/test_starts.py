"""Where a query starts: messages that were never asked for, or that others replaced, are not lost."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from pyspark_mqfs import schema
from pyspark_mqfs.reader import BatchReader
from pyspark_mqfs.task import DataLoss
from tests.spark.scene import Scene
from tests.spark.test_stream import Readers, bodies, reader, taken
from tests.support.eventually import eventually

__all__ = ["reader"]  # the fixture


def put(scene: Scene, name: str) -> None:
    for number in range(9):
        scene.put("g", f'{{"stream":"s","headers":{{"key":"{number % 3}"}}}}', b"%s%d" % (name.encode(), number))


def batch(scene: Scene, **options: str) -> list[bytes]:
    reader = BatchReader({"address": scene.address, "subscribe": "g/s", **options}, schema.all_columns(headers=False))
    return [body for piece in reader.partitions() for rows in reader.read(piece) for body in bodies(rows)]


OLD: list[dict[str, str]] = [
    {"startingTimestamp": "1"},
    {"startingOffsetsByTimestamp": '{"g/s": 1}'},
]


@pytest.mark.parametrize("start", OLD)
@pytest.mark.parametrize("why", ["replay key", "depth 3", "ttl 1s"])
def test_a_time_before_the_oldest_message(scene: Scene, reader: Readers, why: str, start: dict[str, str]) -> None:
    scene.group("g", why if why == "replay key" else "replay all", "sync off")
    scene.stream("g/s")
    put(scene, "v")
    if why.startswith("ttl"):
        scene.ctl("g", why)
        eventually(lambda: scene.stats("g")["streams"]["s"]["messages"] == 0, "they have gone")
        scene.ctl("g", "ttl 0")
        put(scene, "v")
    scene.ctl("g", "depth 3")
    mine = reader(scene, subscribe="g/s", **start)
    assert batch(scene, **start) == taken(mine, mine.initialOffset()) == [b"v6", b"v7", b"v8"]


def test_messages_that_others_replaced(scene: Scene, reader: Readers) -> None:
    """By a sequence of one; and for a query without a consumer, between its batches. What `clear` takes is lost."""
    scene.group("g", "replay key", "sync off")
    scene.stream("g/s")
    put(scene, "v")
    assert batch(scene, startingOffsets='{"g/s": 1}') == [b"v6", b"v7", b"v8"]
    first = reader(scene, subscribe="g/s", consumer="mine")
    position: Any = first.latestOffset(first.initialOffset(), ReadAllAvailable())
    first.stop()
    for command, left in (("replay key", [b"w6", b"w7", b"w8"]), ("clear", None)):
        scene.client.remove("g/.consumers/mine")
        put(scene, "w")
        scene.ctl("g", command)
        again = reader(scene, subscribe="g/s", consumer="mine")
        if left is None:
            put(scene, "x")  # without them there would be no batch
            with pytest.raises(DataLoss, match="g/s: sequences 10 to"):
                taken(again, position)
        else:
            assert taken(again, position) == left
        again.stop()


def test_messages_that_expired_beside_replaced_ones(scene: Scene, reader: Readers) -> None:
    """They are lost, of a planned task and of the next batch: `ttl` takes messages that no other has replaced."""
    scene.group("g", "replay key", "sync off", "bind v 'a\rttl 0\rb'")  # which is a pattern, no setting
    scene.stream("g/s")
    put(scene, "v")
    mine = reader(scene, subscribe="g/s")
    start: Any = mine.initialOffset()
    pieces = mine.partitions(start, mine.latestOffset(start, ReadAllAvailable()))
    scene.client.remove(f"g/.consumers/{mine.name}")
    scene.ctl("g", "ttl 1s")
    eventually(lambda: scene.stats("g")["streams"]["s"]["floor"] > 9, "they have gone")
    with pytest.raises(DataLoss, match="g/s: sequences 7 to 9 are no longer retained"):
        list(mine.read(pieces[0]))
    put(scene, "w")
    with pytest.raises(DataLoss, match="g/s: sequences 7 to"):
        taken(mine, start)
