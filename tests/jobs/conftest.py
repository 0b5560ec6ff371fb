"""A server for libraries of jobs; the tests of a module share it, so each takes a group of its own name."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.server import Server, short_folder

os.environ["HUEY_SLOW_TESTS"] = "1"  # its own tests look at that when they are imported


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with short_folder() as folder, Server.at(folder) as server:
        yield server


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """The name of a group for this test alone."""
    return str(request.node.name).replace("/", "_")
