"""The consumers of a query retain what it reads, whatever the names and the number of its streams."""

from __future__ import annotations

import json
import os

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from mqfs.limits import VIEW_PATTERNS
from pyspark_mqfs.commands.checkpoints import query_checkpoint
from pyspark_mqfs.commands.sources import Source
from pyspark_mqfs.options import OptionError
from tests.spark.scene import Scene
from tests.spark.test_stream import Readers, reader, taken

__all__ = ["reader"]  # the fixture

MANY = [f"{number:03}{'n' * 240}" for number in range(300)]  # no one write to `ctl` has room for a view of these


@pytest.mark.parametrize(
    ("first", "odd"),
    [
        *((first, [name]) for name in ("c#", "a*b", "x.#", "c+") for first in (["a"], ["a", "b"], [])),
        (["a"], MANY),
    ],
)
def test_names_that_no_view_can_have(scene: Scene, reader: Readers, first: list[str], odd: list[str]) -> None:
    """From the first, or when they are added to a consumer of one stream, or of a view. The group keeps only what
    consumers have not had."""
    scene.group("g", "replay off", "words . + ~" if odd == ["c+"] else "words . * #", "sync off")
    for name in {"a", "b", "other", *odd}:
        scene.stream(f"g/{name}")

    def selection(names: list[str]) -> dict[str, str]:
        return {"assign": json.dumps({f"g/{name}": [0] for name in names}), "consumer": "mine"}

    before = reader(scene, **selection(first or odd))
    start = before.initialOffset()
    scene.write(f"g/{(first or odd)[0]}", b"1")
    before.stop()
    mine = reader(scene, **selection(first + odd))
    assert taken(mine, start) == [b"1"]
    mine.stop()
    scene.write("g/other", b"not asked for")
    scene.write(f"g/{odd[-1]}", b"2")
    assert taken(reader(scene, **selection(first + odd)), start) == [b"1", b"2"]
    assert list(scene.stats("g")["consumers"]) == ["mine"]


def test_two_queries_with_one_checkpoint_after_a_restart(scene: Scene, reader: Readers) -> None:
    """The first has the consumer again with its next look, also if nothing new was written."""
    scene.group("g")
    scene.stream("g/a", b"1")
    first = reader(scene, subscribe="g/a", retrySeconds="20")
    end = first.latestOffset(first.initialOffset(), ReadAllAvailable())
    first.commit(end)
    scene.server.kill()
    scene.start()
    assert first.latestOffset(end, ReadAllAvailable()) == end
    with pytest.raises(OptionError, match=r"consumer spark-.* of group g: open by another query"):
        reader(scene, subscribe="g/a").latestOffset(end, ReadAllAvailable())
    scene.write("g/a", b"2")
    assert taken(first, end) == [b"2"]


def test_other_streams_of_a_group_that_is_full(scene: Scene, reader: Readers) -> None:
    """A consumer of the whole group waits for their messages as long as some that the query reads are before them."""
    scene.group("g", "replay off", "full block", "depth 4", "sync off")
    for name in ("c#", "d*", "other"):
        scene.stream(f"g/{name}")
    mine = reader(scene, assign=json.dumps({"g/c#": [0], "g/d*": [0]}), consumer="mine")
    start = mine.initialOffset()
    scene.write("g/c#", b"1")
    end = mine.latestOffset(start, ReadAllAvailable())
    scene.write("g/other", b"a", b"b", b"c", b"d")
    low = scene.stats("g")["consumers"]["mine"]["low"]
    assert mine.latestOffset(start, ReadAllAvailable()) == end
    assert scene.stats("g")["consumers"]["mine"]["low"] == low  # until the batch is committed
    mine.commit(end)
    assert scene.stats("g")["streams"]["other"]["messages"] == 0
    scene.write("g/other", b"e", b"f", b"g", b"h")
    assert mine.latestOffset(end, ReadAllAvailable()) == end
    assert scene.stats("g")["streams"]["other"]["messages"] == 0
    scene.write("g/other", b"i", b"j", b"k", b"l")
    scene.write("g/d*", b"2")
    assert taken(mine, end) == [b"2"]


def test_a_view_full_of_removed_streams(scene: Scene, reader: Readers) -> None:
    scene.group("g", "replay off", "sync off")
    scene.stream("g/other")
    names = [f"g/x{number}" for number in range(VIEW_PATTERNS)]
    scene.client.together(scene.client.caller.create(name, os.O_WRONLY, 0o666) for name in names)
    mine = reader(scene, subscribePattern="g/x.*", failOnDataLoss="false", consumer="mine")
    start = mine.latestOffset(mine.initialOffset(), ReadAllAvailable())
    for name in names[:3]:
        scene.client.remove(name)
    scene.stream("g/xnew", b"1")
    end = mine.latestOffset(start, ReadAllAvailable())
    mine.commit(end)
    scene.write("g/xnew", b"2")
    assert taken(mine, end) == [b"2"]
    assert scene.stats("g")["consumers"]["mine"]["over"] == "mine"
    assert list(scene.stats("g")["consumers"]) == ["mine"]


def test_a_temporary_checkpoint_leaves_no_consumer_though_one_group_refuses(scene: Scene) -> None:
    """They would retain what is written from then on."""
    with query_checkpoint("", Source(scene.address, pattern="[abc]/s")) as checkpoint:
        prefix = checkpoint.reader_options["groupIdPrefix"]
        for name in "abc":
            scene.group(name, "replay all", f"consumer {prefix}-x", f"protect {'on' if name == 'b' else 'off'}")
            scene.stream(f"{name}/s")
    left = {name: [c for c in scene.client.list(f"{name}/.consumers") if c.startswith(prefix)] for name in "abc"}
    assert left == {"a": [], "b": [f"{prefix}-x"], "c": []}
