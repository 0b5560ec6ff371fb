"""Collections of garbage stop the server: what ends is freed without one, and what is young is collected often."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest

from mqfs import limits
from mqfs.errors import Interrupted
from mqfs.http.wire import RequestParser
from mqfs.model import Wait
from mqfs.serving import memory


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
