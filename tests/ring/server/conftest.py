"""A server with rings, the keeper of the rings of rigs, and no log where corruption is meant to be."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from mqfs.ring.server import registry
from tests.ring.server.rig import Keeper
from tests.support.server import Server, short_folder


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> Any:
    """For rigs with a disk that is none."""
    monkeypatch.setattr(registry, "KeeperLink", Keeper)
    yield Keeper
    Keeper("").quit()


@pytest.fixture
def quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(before)


@pytest.fixture
def away() -> Iterator[Server]:
    """A server to which clients attach by its ring."""
    with short_folder() as folder:
        server = Server.at(folder, transport="ring")
        try:
            yield server
        finally:
            server.close()
