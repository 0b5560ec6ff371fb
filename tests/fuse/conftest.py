"""Fixtures: one server for a module's tests, each test in a group of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fuse.served_by import Served

numbers = itertools.count(1)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
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
