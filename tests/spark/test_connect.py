"""Spark Connect: the client speaks gRPC to a server, and the format is there as anywhere."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.parametrize("how", ["installed", "artifact"])
def test_read_write_and_stream(scene: Scene, tmp_path: Path, how: str) -> None:
    """The package is installed where the server runs its Pythons, or comes from the client."""
    if why := java():
        pytest.skip(why)
    python, package, sources = sys.executable, [], str(ROOT)
    if how == "artifact":
        python, package = str(packages.python(tmp_path / "bare")), [str(packages.zipped(tmp_path))]
        sources = ""
    scene.group("g")
    scene.stream("g/in", b"1", b"2", b"3")
    # the server it starts is of its session, and ends with it
    program = subprocess.Popen(
        [sys.executable, str(ROOT / "tests/spark/connect.py"), scene.address, str(tmp_path), *package],
        env=environment(
            PYSPARK_PYTHON=python, PYTHONPATH=sources, SPARK_LOCAL_IP="127.0.0.1", SPARK_HOME=spark_home()
        ),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        start_new_session=True,
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
    for name in ("batch", "live") if how == "installed" else ("batch",):
        assert scene.stats("g")["streams"][name]["written"] == 3
