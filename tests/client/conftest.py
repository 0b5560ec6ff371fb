"""The ways to a tree: what takes `tree` runs over 9P and over rings against a server, and with the engine inside."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import mqfs
from mqfs import ring
from mqfs.client import Client, aio
from tests.client.opening import Opening
from tests.support.server import Server, short_folder

SERVED = [pytest.param(way, marks=pytest.mark.process) for way in ("9p", "auto")]


@pytest.fixture(params=SERVED)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """One that clients reach by 9P alone, or by rings too."""
    if request.param == "auto" and ring.MISSING:
        pytest.skip(ring.MISSING)
    with short_folder() as folder, Server.at(folder, transport=request.param) as server:
        yield server


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    with short_folder() as folder, Server.at(folder) as server:
        yield server


@pytest.fixture(params=[*SERVED, "inside"])
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Client]:
    """A client of a tree; with a server the tests of a module share a server, so each takes a group of its own name."""
    if request.param != "inside":
        if request.param == "auto" and ring.MISSING:
            pytest.skip(ring.MISSING)
        with request.getfixturevalue("shared").connect(transport=request.param) as client:
            yield client
    else:
        with mqfs.open(tmp_path / "store") as client:
            yield client


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """The name of a group for this test alone."""
    return str(request.node.name).replace("/", "_")


@pytest.fixture(params=[SERVED[0], "inside"])
def opening(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opening]:
    if request.param == "9p":
        shared: Server = request.getfixturevalue("shared")
        yield partial(aio.connect, shared.address)
    else:
        yield partial(aio.open, tmp_path / "store")


@pytest.fixture(params=["trio", "asyncio"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)
