"""One mounted server for the tests of a module; those that stop it bring their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tools.mount import Server, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server")) as server:
        yield server
