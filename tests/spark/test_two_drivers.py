"""Two drivers with one checkpoint: the second gets an error, and where none is possible, nothing is lost or doubled."""

from __future__ import annotations

import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.spark.kills import kill, session
from tests.spark.scene import Scene
from tests.support.eventually import HANG_S, eventually
from tests.support.server import environment


class Second:
    """Another driver, which copies with the same checkpoint what there is."""

    def __init__(self, scene: Scene, folder: Path, python: str) -> None:
        self._log = folder / "second.log"
        with open(self._log, "wb") as log:
            self._program = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.copier", scene.address, str(folder), "1000", "0.2"],
                env=environment(PYSPARK_PYTHON=python, SPARK_LOCAL_IP="127.0.0.1"), stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
            )  # fmt: skip

    def copy(self) -> str:
        """How it ended."""
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        self._program.stdin.write("copy\n")
        self._program.stdin.flush()
        assert select.select([self._program.stdout], [], [], HANG_S)[0]
        said = self._program.stdout.readline()
        assert said, self._log.read_text()[-3_000:]
        return said

    def close(self) -> None:
        kill(list(session(self._program.pid)))
        self._program.communicate()


def first(spark: Any, scene: Scene, folder: Path) -> Any:
    """A query that copies, and stands still in a batch that has b"wait" in it until FOLDER/go is there."""

    def slow(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield batch
            while b"wait" in batch["value"].to_pylist() and not (folder / "go").exists():
                (folder / "waiting").touch()
                time.sleep(0.02)

    rows = spark.readStream.format("mqfs").options(
        address=scene.address, subscribe="g/in", startingOffsets="earliest", consumer="copy"
    )
    writer = rows.load().select("value").mapInArrow(slow, "value binary").writeStream.format("mqfs")
    return writer.options(address=scene.address, topic="g/out", checkpointLocation=str(folder / "checkpoint")).start()


def bodies(scene: Scene) -> list[bytes]:
    with scene.client.open("g/.cursor", "r+") as file:
        file.write(b"select out\nseek first\nuntil end\n")
        return list(iter(lambda: file.receive(1 << 20), b""))


def test_two_drivers_with_one_checkpoint(spark: Any, scene: Scene, tmp_path: Path, python: str) -> None:
    scene.group("g")
    scene.stream("g/in", b"1", b"2")
    scene.client.create("g/out").close()
    second = Second(scene, tmp_path, python)
    query = first(spark, scene, tmp_path)
    try:
        eventually(lambda: bodies(scene) == [b"1", b"2"], "the first batch")
        assert "consumer copy of group g: open by another query (expected another checkpoint" in second.copy()
        scene.write("g/in", b"wait", b"3")
        eventually(lambda: (tmp_path / "waiting").exists(), "the batch it stands still in")
        # As where the user may not make private consumers: the second takes that batch for one that a crash has left.
        scene.ctl("g", "consumer copy in")
        assert second.copy() == "copied\n"
        assert bodies(scene) == [b"1", b"2", b"wait", b"3"]
        (tmp_path / "go").touch()
        with pytest.raises(Exception, match="CONCURRENT_STREAM_LOG_UPDATE"):
            query.awaitTermination(int(HANG_S))
        assert bodies(scene) == [b"1", b"2", b"wait", b"3"]
        assert [name for name in scene.client.list("g/.txn") if name != "ctl"] == []
    finally:
        (tmp_path / "go").touch()
        query.stop()
        second.close()
