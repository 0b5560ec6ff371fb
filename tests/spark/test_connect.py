"""Spark Connect: the client speaks gRPC to a server, and the format is there as anywhere."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.spark import packages
from tests.spark.kills import kill, session
from tests.spark.scene import Scene
from tests.support import ROOT
from tests.support.eventually import HANG_S
from tests.support.java import java
from tests.support.server import environment


def spark_home() -> str:
    spec = importlib.util.find_spec("pyspark")
    assert spec is not None
    return str(Path(str(spec.origin)).parent)


def run(remote: str, scene: Scene, folder: Path, *package: Path, **env: str) -> None:
    """Run connect.py, and look at what it found."""
    scene.group("g")
    scene.stream("g/in", b"1", b"2", b"3")
    # A server that it starts is of its session, and ends with it.
    program = subprocess.Popen(
        [sys.executable, str(ROOT / "tests/spark/connect.py"), remote, scene.address, str(folder), *map(str, package)],
        env=environment(SPARK_LOCAL_IP="127.0.0.1", SPARK_HOME=spark_home(), **env), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, start_new_session=True,
    )  # fmt: skip
    try:
        out, errors = program.communicate(timeout=HANG_S)
    finally:
        kill(list(session(program.pid)))
    assert program.returncode == 0, errors[-3_000:]
    (line,) = (line for line in out.splitlines() if line.startswith("found "))
    found = json.loads(line.removeprefix("found "))
    assert ".connect." in found["client"]
    assert found["read"] == ["1", "2", "3"]
    assert "options subscribe and subscribePattern: more than one given" in found["refused"]


def test_the_package_is_where_the_server_is(spark: Any, scene: Scene, tmp_path: Path) -> None:
    """The server is in the Java of all tests here."""
    port = spark.conf.get("spark.connect.grpc.binding.port")
    run(f"sc://127.0.0.1:{port}", scene, tmp_path)
    for name in ("batch", "live"):
        assert scene.stats("g")["streams"][name]["written"] == 3


def test_the_package_comes_from_the_client(scene: Scene, tmp_path: Path) -> None:
    if why := java():
        pytest.skip(why)
    bare = packages.python(tmp_path / "bare")
    package = packages.zipped(tmp_path)
    run("local[2]", scene, tmp_path, package, PYSPARK_PYTHON=str(bare), PYTHONPATH="")
    assert scene.stats("g")["streams"]["batch"]["written"] == 3
