"""One Spark for all tests here, on two threads of this machine; and a server for each test."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.spark.scene import Scene
from tests.support import ROOT
from tests.support.eventually import HANG_S
from tests.support.java import java
from tests.support.ports import free_port
from tests.support.spark_pythons import forked_python


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/spark/" in str(item.path):
            item.add_marker(pytest.mark.filterwarnings("default"))  # Spark's own
            item.add_marker(pytest.mark.timeout(4 * HANG_S))


@pytest.fixture(scope="session")
def python() -> Iterator[str]:
    """For PYSPARK_PYTHON."""
    with forked_python() as program:
        yield program


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory, python: str) -> Iterator[Any]:
    """Found as an installed package would be: by its name, among the modules of the workers' Python."""
    if why := java():
        pytest.skip(why)
    from pyspark.sql import SparkSession

    folder = tmp_path_factory.mktemp("spark")
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = python
    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    session = (
        SparkSession.builder.master("local[2,2]")
        .appName("tests")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "1g")
        .config("spark.local.dir", str(folder / "local"))
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.python.filterPushdown.enabled", "true")
        .config("spark.sql.streaming.metricsEnabled", "false")
        .config("spark.plugins", "org.apache.spark.sql.connect.SparkConnectPlugin")  # is served for test_connect.py
        .config("spark.connect.grpc.binding.address", "127.0.0.1")
        .config("spark.connect.grpc.binding.port", str(free_port()))
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    try:
        yield session
    finally:
        session.stop()
        gateway = session.sparkContext._gateway
        if gateway is not None and hasattr(gateway, "proc"):
            gateway.shutdown()
            gateway.proc.stdin.close()
            gateway.proc.wait(HANG_S)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    try:
        yield made
    finally:
        made.stop()
