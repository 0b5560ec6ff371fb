"""One server for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fq.client import serve
from tests.support.server import Server, short_folder


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with short_folder() as folder, serve(folder) as it:
        yield it


@pytest.fixture
def address(server: Server) -> str:
    return f"{server.folder}/fq"
