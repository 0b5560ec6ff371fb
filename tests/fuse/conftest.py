"""Fixtures: one server for a module's tests, each test in a group of its own."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fuse.served_by import Served

numbers = itertools.count(1)


@pytest.fixture(scope="session", autouse=True)
def fuse() -> None:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("/dev/fuse is missing or may not be opened: load the fuse module, or chmod 666 /dev/fuse")


@pytest.fixture(scope="module")
def served(fuse: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A mount over a store in memory. It must log nothing."""
    server = Served(tmp_path_factory.mktemp("fuse") / "mq")
    yield server
    server.close()
    assert server.complaints() == ""


@pytest.fixture
def mq(served: Served) -> Path:
    """An empty group of the mount, which keeps everything."""
    group = served.path / f"g{next(numbers)}"
    group.mkdir()
    (group / "ctl").write_text("replay all\n")
    return group


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """A server of one's own, on disk."""
    made: list[Served] = []

    def make(store: Path | None = tmp_path / "store") -> Served:
        made.append(Served(tmp_path / "mq", store))
        return made[-1]

    yield make
    for server in made:
        server.close()
