"""How batches are planned: a repeat as it was, by any machine with any options; a bounded one for all groups."""

from __future__ import annotations

import os
import struct
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from pyspark_mqfs import plan
from tests.spark.scene import Scene
from tests.spark.test_stream import Readers, reader, repeated

__all__ = ["reader"]  # the fixture


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"cores": 16}),
        ({}, {"minPartitions": "7"}),
        ({"minPartitions": "7"}, {}),
        ({"maxRecordsPerPartition": "90"}, {"maxRecordsPerPartition": "50"}),
        ({"maxBytesPerPartition": "20k"}, {"maxBytesPerPartition": "30k"}),
    ],
)
def test_the_tasks_of_a_repeat(
    scene: Scene, reader: Readers, monkeypatch: pytest.MonkeyPatch, before: dict[str, Any], after: dict[str, Any]
) -> None:
    """As many, each with the same messages: of them `largeBatches split` makes its atomic batches."""
    monkeypatch.setattr(plan, "MOST_BYTES", 20_000)  # tests write less than the sizes are made for
    monkeypatch.setattr(plan, "LEAST_BYTES", 4_000)

    def start(options: dict[str, Any]) -> Any:
        monkeypatch.setattr(os, "cpu_count", lambda: options.get("cores", 2))
        return reader(scene, subscribe="g/s", **{name: value for name, value in options.items() if name != "cores"})

    scene.group("g")
    scene.stream("g/s", *(b"%d" % n + bytes(200) for n in range(300)))
    first = start(before)
    begin = first.initialOffset()
    end = first.latestOffset(begin, ReadAllAvailable())
    planned = [piece.value for piece in first.partitions(begin, end)]
    assert len(planned) > 1
    first.stop()
    second = start(after)
    assert [piece.value for piece in second.partitions(begin, end)] == planned
    assert len(repeated(second, begin, end)) == 300
    older = {name: value for name, value in end.items() if name not in ("starts", "tasks")}
    assert [piece.value for piece in second.partitions(begin, older)] != planned  # of a checkpoint without them


@pytest.mark.parametrize(("bound", "value"), [("maxOffsetsPerTrigger", "2"), ("maxBytesPerTrigger", "500")])
def test_a_bounded_batch_has_something_of_each_group_soon(
    scene: Scene, reader: Readers, bound: str, value: str
) -> None:
    """Also of more groups than the batch may have messages, beside one that gets as much as is read."""
    groups = ["big", *(f"small{number}" for number in range(4))]
    for group in groups:
        scene.group(group)
        scene.stream(f"{group}/s", b"1", b"2")
    scene.write("big/s", *(b"%d" % number for number in range(1_000)))
    mine = reader(scene, subscribePattern=".*", **{bound: value})
    position = mine.initialOffset()
    for _ in range(2 * len(groups)):
        scene.write("big/s", *(b"more" for _ in range(20)))
        position = mine.latestOffset(position, mine.getDefaultReadLimit())
    assert all(position["streams"][f"{group}/s"] > 1 for group in groups)


def test_what_a_bounded_batch_costs_does_not_grow(scene: Scene, reader: Readers) -> None:
    """As many requests, however many batches wait."""
    scene.group("g")
    scene.stream("g/s")
    frame = struct.pack("<IHH", 8 + 1 + 1, 1, 0) + b"sx"

    def requests(backlog: int) -> int:
        with scene.client.open("g/.batch", "w") as file:
            file.write(frame * backlog)
        mine = reader(scene, subscribe="g/s", maxOffsetsPerTrigger="1")
        start = mine.initialOffset()
        before = mine.link.client()._replies
        assert mine.latestOffset(start, mine.getDefaultReadLimit())["streams"] == {"g/s": 2}
        return mine.link.client()._replies - before

    assert requests(10) == requests(30_000)
