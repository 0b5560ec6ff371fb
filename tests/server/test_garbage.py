"""Collections of garbage stop the server: what ends is freed without one, and what is young is collected often."""

from __future__ import annotations

import gc
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from mqfs import limits
from mqfs.errors import Interrupted, MqfsError
from mqfs.http.publishing import frame
from mqfs.http.wire import RequestParser
from mqfs.model import Wait
from mqfs.serving import memory
from tests.support.queues import BIG, Queues


@pytest.fixture(autouse=True)
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    threshold = gc.get_threshold()
    yield
    gc.set_threshold(*threshold)
    gc.enable()


@pytest.mark.parametrize("settle", [lambda wait: wait.resolve(b"x"), lambda wait: wait.fail(Interrupted())])
def test_what_waited_is_freed_when_it_is_settled(settle: Callable[[Wait[bytes]], None]) -> None:
    wait: Wait[bytes] = Wait()
    wait.subscribe(lambda _, row=[wait]: row.clear)  # type: ignore[misc]
    freed = weakref.finalize(wait._then, int)
    settle(wait)
    assert not freed.alive


REQUESTS: dict[str, list[bytes | None]] = {  # writes; None: a read
    "s": [b"x", None],
    ".batch": [frame("s", b"x") * 3, None],
    ".put": [b'{"stream":"s","id":"a","headers":{"a":"b"}} x', None],
    ".cursor": [b"select s\nseek first\nformat json\n", None],
    ".consumers/w": [b"format record\n", None, b"ack\n"],
    "ctl": [b"ttl 1d\n", None],
    ".stats": [None],
    "nothing": [],
}


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
def test_a_request_leaves_no_garbage(name: str, on_disk: bool, tmp_path: Path) -> None:
    """Else it lies there until all is collected, once in an hour under load."""
    queues = Queues("replay all", "consumer w s", path=tmp_path / "store" if on_disk else None)

    def request() -> None:
        queues.at("s", os.O_WRONLY).write(b"x")
        with suppress(MqfsError):
            handle = queues.at(name, os.O_RDWR)
            for data in REQUESTS[name]:
                with suppress(MqfsError):
                    handle.read(BIG) if data is None else handle.write(data)
            handle.close()

    request()
    gc.collect()
    request()
    assert garbage() == {}


def garbage() -> Counter[str]:
    """The garbage that there is, by type; it is collected."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return Counter(repr(found)[:200] for found in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def test_a_parser_of_requests_is_freed_when_it_is_closed() -> None:
    parser = RequestParser()
    parser.receive(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    freed = weakref.finalize(parser, int)
    parser.close()
    del parser
    assert not freed.alive


def test_few_objects_are_young_where_connections_come_and_go() -> None:
    kept: list[object] = []
    gc.set_threshold(*limits.GARBAGE)
    for _ in range(2 * limits.GARBAGE_CONNECTIONS):
        kept.append([[] for _ in range(100)])
        memory.count_connection()
    assert len(gc.get_objects(generation=0)) < limits.GARBAGE_CONNECTIONS * 100
