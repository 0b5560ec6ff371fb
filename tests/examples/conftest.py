"""One mounted server for the examples."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tools.mount import Server, folder_for_all, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with folder_for_all() as folder, serving(folder) as server:
        yield server
