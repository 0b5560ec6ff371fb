"""One server for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.http.web import Web
from tests.support.server import short_folder


@pytest.fixture(scope="module")
def web() -> Iterator[Web]:
    with short_folder() as folder:
        it = Web(folder)
        with it.server:
            yield it


@pytest.fixture
def group(web: Web) -> str:
    """The path of a new group that keeps everything."""
    return web.group()
