"""No test takes over 20 s but those named here; tests/support/durations.py writes down how long each took."""

from __future__ import annotations

import json

from tests.support import ROOT
from tests.support.durations import DURATIONS

LONG = {
    "tests/docs/test_typed.py::test_page[05-spark]",
    "tests/http/test_durable_streams.py::test_its_own_tests",  # they wait for streams to expire
    "tests/interop/test_v9fs.py::test_v9fs",
    "tests/ring/memory/test_sanitizers.py::test_under_sanitizers",
    "tests/spark/test_archive.py::test_there_and_back",  # starts the Java
    "tests/spark/test_connect.py::test_read_write_and_stream[installed]",
    "tests/spark/test_kills.py::test_kills",
    "tests/spark_cluster/test_cluster.py::test_both_workers_read_what_only_the_driver_has",  # starts the cluster
}


def test_what_was_measured_is_there_and_short() -> None:
    found: dict[str, dict[str, float]] = json.loads(DURATIONS.read_text())
    for name in [*found["groups"], *found["tests"]]:
        path = name.partition("::")[0]
        assert (ROOT / path).exists() or (ROOT / "tests" / path).is_dir(), f"{name} is gone: take it out of {DURATIONS}"
    assert found["tests"].keys() <= LONG, f"too long: {found['tests'].keys() - LONG}"
