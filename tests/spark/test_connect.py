"""Spark Connect: the client speaks gRPC to a server, and the format is there as anywhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.process import environment
from tests.spark.conftest import Scene, java
from tests.spark.kills import kill, session


def test_read_write_and_stream(scene: Scene, tmp_path: Path) -> None:
    if why := java():
        pytest.skip(why)
    scene.group("g")
    scene.stream("g/in", b"1", b"2", b"3")
    # the server it starts is of its session, and ends with it
    program = subprocess.Popen(
        [sys.executable, "-m", "tests.spark.connect", scene.address, str(tmp_path)],
        env=environment(PYSPARK_PYTHON=sys.executable, SPARK_LOCAL_IP="127.0.0.1"), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, start_new_session=True,
    )  # fmt: skip
    try:
        out, errors = program.communicate(timeout=200)
    finally:
        kill(list(session(program.pid)))
    assert program.returncode == 0, errors[-3_000:]
    (line,) = (line for line in out.splitlines() if line.startswith("found "))
    found = json.loads(line.removeprefix("found "))
    assert ".connect." in found["client"]
    assert found["read"] == ["1", "2", "3"]
    assert "options subscribe and subscribePattern exclude one another" in found["refused"]
    for name in ("batch", "live"):
        assert scene.stats("g")["streams"][name]["written"] == 3
