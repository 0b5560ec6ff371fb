"""A server for the tests of programs that use mqfs: a context manager, and a fixture of pytest.

from mqfs.testing import mqfs_client, mqfs_server  # in conftest.py: fixtures

def test_it(mqfs_client):
    mqfs_client.group("jobs", create=True).publish("mail", b"hello")
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mqfs.client import Client, connect
from mqfs.server.inside import InsideServer, serve


@contextmanager
def server(**options: Any) -> Iterator[InsideServer]:
    """Run a server in this process, on a temporary socket and with its store in memory.

    Its groups have `replay all`, so a test can read messages that it wrote before.

    Args:
        **options: Options of `mqfs.serve`: `store=` keeps messages on disk, `http=` serves HTTP, `default=` has other
            settings of new groups.

    Yields:
        The server; `server.address` is for `mqfs.connect`.

    Raises:
        BadConfig: An option is invalid.
    """
    with serve(**{"default": ("replay all",), **options}) as running:
        yield running


__all__ = ["server"]

try:
    import pytest
except ImportError:  # without pytest there is only the context manager
    pass
else:

    @pytest.fixture
    def mqfs_server() -> Iterator[InsideServer]:
        """A server for one test."""
        with server() as running:
            yield running

    @pytest.fixture
    def mqfs_client(mqfs_server: InsideServer) -> Iterator[Client]:
        """A client of that server."""
        with connect(mqfs_server.address) as client:
            yield client

    __all__ += ["mqfs_client", "mqfs_server"]
