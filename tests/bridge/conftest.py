"""One server for the tests of a file; a folder, a group and bridges for each test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.bridge.rig import Make, Rig, numbers
from tests.support.server import Server, short_folder


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with short_folder() as home, Server.at(home) as made:
        yield made


@pytest.fixture
def make(server: Server) -> Iterator[Make]:
    """Makes a Rig with these lines of ctl."""
    with contextlib.ExitStack() as stack:

        def rig(*ctl: str) -> Rig:
            return stack.enter_context(contextlib.closing(Rig(server, f"g{next(numbers)}", *ctl)))

        yield rig
