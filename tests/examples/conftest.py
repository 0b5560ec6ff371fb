"""One mounted server for the examples."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.server import Server, short_folder
from tests.support.tools import tools_server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with short_folder() as folder, tools_server(folder) as server:
        yield server
