"""What a task does when its server goes away, without Spark; and who it is over TCP."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_mqfs import schema
from pyspark_mqfs.catalog import Selection
from pyspark_mqfs.connection import Server
from pyspark_mqfs.options import OptionError
from pyspark_mqfs.plan import PartitionLimits, Slice, _shares, ranges
from pyspark_mqfs.task import DataLoss, Task
from tests.spark.scene import Scene
from tests.spark.test_batch import read, values
from tests.support.eventually import patient
from tests.support.tokens import SECRET, line_of


def planned(scene: Scene, *, strict: bool = True, retry_s: float = 20.0, pattern: str = "g/.*") -> tuple[Task, Slice]:
    catalog = Selection("subscribePattern", pattern=pattern).catalog(scene.client)
    start = {path: 0 for path, _, _ in catalog.streams()}
    wanted = ranges(catalog, start, {path: group.next for path, group, _ in catalog.streams()})
    (piece,) = PartitionLimits(0, 0, 1 << 40).slices(scene.client, wanted, catalog.store)
    return Task(Server(scene.address, retry_s=retry_s), schema.all_columns(headers=False), strict), piece


def offsets(batches: Iterator[Any]) -> list[int]:
    return [sequence for batch in batches for sequence in batch.to_pydict()["offset"]]


@pytest.fixture
def full(scene: Scene) -> Scene:
    scene.group("g")
    scene.stream("g/a", *(b"%d" % n + bytes(99_000) for n in range(100)))
    return scene


def test_a_task_goes_on_when_the_server_is_back(full: Scene) -> None:
    task, piece = planned(full)
    batches = task.batches(piece)
    found = offsets(iter([next(batches)]))
    assert 0 < len(found) < 50
    full.server.kill()
    full.start()
    assert found + offsets(batches) == list(range(1, 101))


def test_a_task_gives_up(full: Scene) -> None:
    task, piece = planned(full, retry_s=0.5)
    batches = task.batches(piece)
    next(batches)
    full.server.kill()
    began = time.monotonic()
    with pytest.raises(OptionError, match=r"option address: no answer from .* for 0.5 s"):
        list(batches)
    assert time.monotonic() - began < patient(60)
    full.start()


def test_one_warning_that_a_server_is_awaited(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The warning comes at once: the address may be mistyped, and the default of retrySeconds is a minute."""
    link = Server(f"unix!{tmp_path}/absent", retry_s=0.5).link()
    with pytest.raises(OptionError, match=r"no answer from .* for 0.5 s"):
        link.with_retry(lambda client: None)
    assert caplog.messages == [f"option address: unix!{tmp_path}/absent: no such socket; trying again for 0.5 s"]


def test_what_goes_while_it_is_read(full: Scene) -> None:
    for strict in (False, True):
        task, piece = planned(full, strict=strict)
        batches = task.batches(piece)
        next(batches)
        full.ctl("g", "depth 10")
        if strict:
            with pytest.raises(DataLoss, match=r"to continue: option failOnDataLoss false"):
                list(batches)
        else:
            assert offsets(batches)[-10:] == list(range(91, 101))
            full.ctl("g", "depth 0")


def test_a_stream_goes_while_it_is_read(full: Scene) -> None:
    full.stream("g/b", b"1")
    for strict in (True, False):
        task, piece = planned(full, strict=strict)
        batches = task.batches(piece)
        if strict:
            next(batches)
            full.client.remove("g/b")
            with pytest.raises(DataLoss, match=r"data loss: g/b was removed .*option failOnDataLoss"):
                list(batches)
        else:
            assert len(offsets(batches)) == 100


def test_a_thousand_streams_are_one_task(scene: Scene) -> None:
    scene.group("g")
    for number in range(1_100):
        scene.stream(f"g/s{number}", b"x")
    scene.stream("g/a b", b"x")
    for pattern, count in (("g/s.*", 1_100), ("g/s.*[02468]", 550), ("(?s)g/.*", 1_101), ("(?s)g/a.*", 1)):
        task, piece = planned(scene, pattern=pattern)
        assert [len(one.streams) for one in piece.ranges] == [count]
        assert len(offsets(task.batches(piece))) == count


@pytest.mark.parametrize(
    ("wanted", "most", "given"),
    [
        ([5, 5], 20, [None, None]),
        ([10, 30], 20, [6, 14]),
        ([1, 1, 1], 2, [1, 1, 0]),
        ([1_000, 1], 10, [9, 1]),
        ([0, 1_000, 0, 2], 10, [0, 9, 0, 1]),
        ([], 5, []),
        ([3], None, [None]),
    ],
)
def test_shares_of_a_bound(wanted: list[int], most: int | None, given: list[int | None]) -> None:
    assert _shares(wanted, most, 0) == given


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(1, 60), st.integers(0, 20))
def test_all_of_a_bound_is_shared(wanted: list[int], most: int, turn: int) -> None:
    """And of as many turns as there are groups each has something in one."""
    shares = [_shares(wanted, most, turn + number) for number in range(len(wanted))]
    for those in shares:
        found = [item if share is None else share for item, share in zip(wanted, those, strict=True)]
        assert sum(found) == min(most, sum(wanted))
        assert all(share <= item for share, item in zip(found, wanted, strict=True))
    assert all(any(those[number] != 0 for those in shares) for number, item in enumerate(wanted) if item)


def test_over_tcp_as_the_user_of_the_token(spark: Any, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(line_of(os.geteuid(), SECRET))
    tokens.chmod(0o600)
    scene = Scene(tmp_path, "--listen", "tcp!127.0.0.1!0", "--token-file", str(tokens), "--tcp-user", "nobody")
    try:
        found = re.search(r"9P at (tcp!\S+)", scene.server.text())
        assert found is not None
        scene.group("g")
        scene.stream("g/s", b"mine")
        scene.client.chmod("g/s", 0o600)
        over_tcp: Any = {"subscribe": "g/s", "address": found[1], "retrySeconds": "1"}

        def frame(**more: str) -> Any:
            return spark.read.format("mqfs").options(**over_tcp, **more).load()

        assert values(frame(TOKEN=SECRET)) == values(read(spark, scene, subscribe="g/s")) == [("g/s", 1, b"mine")]
        with pytest.raises(Exception, match="excludes uid"):
            frame().collect()
        with pytest.raises(Exception, match=r"option token: refused by the server at 'tcp!.*: unknown token") as caught:
            frame(token="wrong-wrong-wrong-wrong").collect()
        assert "wrong-wrong" not in str(caught.value)
    finally:
        scene.stop()


def test_the_token_is_not_printed() -> None:
    assert SECRET not in repr(Server("tcp!h!1", token=SECRET))


@pytest.mark.parametrize("what", ["a", "group"])
@pytest.mark.parametrize("read_before", [0, 1])
def test_one_made_anew_after_planning(full: Scene, what: str, read_before: int) -> None:
    """Nothing of a later stream or group of the name is read for the first; that is a loss, never silence."""
    for strict in (False, True):
        task, piece = planned(full, strict=strict, pattern="g/a")
        batches = task.batches(piece)
        for _ in range(read_before):
            next(batches)
        full.client.remove("g/a")
        if what == "group":
            full.client.remove("g")
            full.group("g")
        full.stream("g/a", *(b"new" for _ in range(200)))
        if strict:
            with pytest.raises(DataLoss, match=r"g.* was removed and created again .*option failOnDataLoss false"):
                list(batches)
        else:
            assert b"new" not in [body for rows in batches for body in rows.to_pydict()["value"]]
