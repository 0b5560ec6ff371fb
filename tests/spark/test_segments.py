"""Sealed segments read from the disk: the same rows as over 9P, whatever was removed, and where they end the server."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqfs.errors import Disconnected
from pyspark_mqfs import schema
from pyspark_mqfs.catalog import Selection
from pyspark_mqfs.connection import Server
from pyspark_mqfs.plan import PartitionLimits, ranges
from pyspark_mqfs.task import Task
from tests.spark.scene import Scene
from tests.spark.test_batch import read

SEGMENTS = 3


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Some segments, three streams, and other records between the messages. Tests that change it come last."""
    scene = Scene(tmp_path_factory.mktemp("full"))
    try:
        fill(scene)
        yield scene
    finally:
        scene.stop()


def fill(scene: Scene) -> None:
    scene.group("g")
    for name in ("a", "b", "c"):
        scene.stream(f"g/{name}")
    body = bytes(900_000)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(scene.client.open(f"g/{name}", "w")) for name in ("a", "b", "c")]
        for number in range(SEGMENTS * 72):
            files[number % 3].write(b"%d " % number + (body if number % 2 else b""))
            if number % 50 == 0:
                scene.ctl("g", f"bind view{number} x.*")
        for number in range(150, SEGMENTS * 72):
            files[number % 3].write(b"large %d " % number + body)
    assert len(list(scene.store.glob("buckets/*/*/*.log"))) > 2


def batches(
    scene: Scene,
    path: str,
    low: int = 0,
    high: int = 1 << 40,
    names: tuple[str, ...] = ("g/a", "g/c"),
    strict: bool = False,
) -> list[Any]:
    """What a task gives, without Spark."""
    server = Server(scene.address, retry_s=5.0)
    catalog = Selection("subscribe", names).catalog(scene.client)
    start = {path: low for path, _, _ in catalog.streams()}
    wanted = ranges(catalog, start, {path: min(high, group.next) for path, group, _ in catalog.streams()})
    task = Task(server, schema.all_columns(headers=False), strict, path)
    rows = []
    for piece in PartitionLimits(0, 0, 0).slices(scene.client, wanted, catalog.store):
        for batch in task.batches(piece):
            columns = batch.to_pydict()
            rows += [
                (o, t, hash(v)) for o, t, v in zip(columns["offset"], columns["topic"], columns["value"], strict=True)
            ]
    return rows


def test_the_same_rows(full: Scene) -> None:
    store = str(full.store)
    over9p = batches(full, "")
    assert len(over9p) > 100
    assert batches(full, store) == over9p
    for low, high in ((5, 6), (17, 140), (100, 1 << 40), (1 << 30, 1 << 31)):
        assert batches(full, store, low, high) == batches(full, "", low, high)


def test_it_is_the_disk_that_is_read(full: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task over the first segment asks the server nothing but whether something was lost."""
    from pyspark_mqfs import task as reading

    def never(*_: object) -> Iterator[Any]:
        raise AssertionError("asked for a message over 9P")

    monkeypatch.setattr(reading.Window, "next", never)
    assert len(batches(full, str(full.store), 0, 100)) > 10
    with pytest.raises(AssertionError, match="over 9P"):
        batches(full, "", 1, 100)


def test_the_store_is_not_there(full: Scene, tmp_path: Path) -> None:
    assert batches(full, str(tmp_path / "nowhere")) == batches(full, "")


def test_another_store(spark: Any, full: Scene, tmp_path: Path) -> None:
    shutil.copytree(full.store, tmp_path / "other", ignore=shutil.ignore_patterns("buckets", "lock"))
    label = tmp_path / "other" / "mqfs"
    label.write_text(label.read_text().replace("uuid ", "uuid f"))
    with pytest.raises(Exception, match=r"option path '.*other': store f.* \(expected store .*, of option address\)"):
        read(spark, full, subscribe="g/a", path=str(tmp_path / "other")).collect()


def test_in_spark(spark: Any, full: Scene) -> None:
    frame = read(spark, full, subscribePattern="g/.*", path=str(full.store)).selectExpr(
        "offset", "topic", "crc32(value)"
    )
    other = read(spark, full, subscribePattern="g/.*").selectExpr("offset", "topic", "crc32(value)")
    assert sorted(map(tuple, frame.collect())) == sorted(map(tuple, other.collect()))


def test_after_the_server_went(full: Scene) -> None:
    """The disk alone is not enough: what was lost only the server knows."""
    assert os.path.exists(full.store / "mqfs")
    full.server.stop()
    with pytest.raises((Disconnected, OSError, ValueError)):
        batches(full, str(full.store))
    full.start()


def test_what_is_removed_is_not_shown(full: Scene) -> None:
    full.ctl("g", "clear a")
    assert batches(full, str(full.store), 200) == batches(full, "", 200)
    full.ctl("g", "drop c 3")
    assert batches(full, str(full.store), 200) == batches(full, "", 200)
    full.client.remove("g/b")
    names = ("g/c",)
    assert batches(full, str(full.store), names=names) == batches(full, "", names=names)


def test_a_damaged_segment_is_the_servers_to_tell(full: Scene) -> None:
    group = full.stats("g")["group"]
    folder = full.store / "buckets" / f"{group % 256:02x}" / str(group)
    first = min(folder.glob("*.log"))
    with open(first, "r+b") as file:
        file.seek(20_000_000)
        file.write(b"rot rot rot")
    before = batches(full, str(full.store), 1, 10)
    assert before == batches(full, "", 1, 10)
    with pytest.raises(Exception, match="damaged"):
        batches(full, str(full.store))
