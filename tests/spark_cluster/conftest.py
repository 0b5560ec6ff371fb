"""One cluster for all tests here, and one driver with a session."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.spark_cluster.cluster import Cluster, Driver, missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/spark_cluster/" in str(item.path):
            item.add_marker(pytest.mark.timeout(1_200))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    if why := missing():
        pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="mqfs-") as folder:  # the name of a socket is short
        made = Cluster(Path(folder))
        try:
            yield made
        finally:
            made.close()


@pytest.fixture(scope="session")
def driver(cluster: Cluster) -> Driver:
    return Driver(cluster)
