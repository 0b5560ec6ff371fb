"""What holds for every test."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.support.queues import Queues
from tests.support.server import end_keepers

# `nohup script/test &` starts us with these ignored, and a child would go on ignoring them; but tests interrupt their
# children. What has a handler is the default again in a child.
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)


@pytest.fixture(autouse=True, scope="session")
def no_keeper_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What holds the rings of servers that were killed, and never started again, ends with the tests."""
    yield
    end_keepers(tmp_path_factory.getbasetemp())


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    """select(2), which Spark uses, knows 1,024."""
    yield
    while Queues.on_disk:
        with suppress(Exception):  # it may have been left in the middle, or have no disk any more
            Queues.on_disk.pop().close()
