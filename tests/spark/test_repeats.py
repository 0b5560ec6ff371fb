"""A batch that another driver repeats: planned as it was, whatever the machine and the options are by then."""

from __future__ import annotations

import os
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
