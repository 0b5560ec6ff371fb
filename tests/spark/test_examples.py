"""The examples with Spark do what their heads say, on the session of all tests."""

from __future__ import annotations

import json
import runpy
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.spark.scene import Scene
from tests.spark.test_commands import bodies
from tests.support import ROOT


@pytest.fixture
def run(spark: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    def started(name: str, *arguments: str) -> None:
        monkeypatch.setattr("sys.argv", [name, *arguments])
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")

    return started


def test_words(run: Any, scene: Scene) -> None:
    scene.group("talk")
    scene.stream("talk/in", b"to be or not to be\n", b"or\n")
    run("spark_words.py", scene.address, "talk/in", "talk/words")
    counts = {row["word"]: row["count"] for row in map(json.loads, bodies(scene, "talk/words"))}
    assert counts == {"to": 2, "be": 2, "or": 2, "not": 1}


def test_join(run: Any, scene: Scene) -> None:
    scene.group("shop")
    scene.stream("shop/orders", b'{"order": 7, "item": "tea"}', b'{"order": 8}')
    scene.stream("shop/paid", b'{"order": 7, "sum": 3}', b'{"order": 9}')
    run("spark_join.py", scene.address, "shop/orders", "shop/paid", "shop/done")
    (done,) = map(json.loads, bodies(scene, "shop/done"))
    assert done == {"ordered": '{"order": 7, "item": "tea"}', "paid": '{"order": 7, "sum": 3}'}


def test_sqlite(run: Any, scene: Scene, tmp_path: Path) -> None:
    scene.group("home")
    scene.group("log")
    scene.stream("home/kitchen", b"20", b"21")
    scene.stream("home/cellar", b"9")
    base = str(tmp_path / "home.db")
    for _ in range(2):
        run("spark_sqlite.py", scene.address, "home/.*", base, "log/home")
    with sqlite3.connect(base) as table:
        rows = table.execute("select stream, body from newest order by stream").fetchall()
    table.close()
    assert rows == [("home/cellar", b"9"), ("home/kitchen", b"21")]
    assert sorted(bodies(scene, "log/home")) == [b"home/cellar 9", b"home/kitchen 21"]
