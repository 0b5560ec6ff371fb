"""Long answers to many clients at once: what the server holds of them stays within the memory of their user."""

from __future__ import annotations

import socket
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from mqfs import limits
from tests.http.test_durable_streams import Durable
from tests.http.web import Web
from tests.support.server import short_folder

pytestmark = pytest.mark.process
MIB = 1 << 20
CLIENTS = 16
SHARE = 32 * MIB  # of their user
BODY = b"x" * 1_000_000
CONTROL = bytes(1_000_000)  # JSON has six bytes for each
MESSAGES = limits.HTTP_CLAIM_BYTES // len(BODY) + 1  # a whole answer
WHOLE = f"?max={limits.HTTP_CLAIMED}"
ASKED = {
    "pages": f"GET /all/s?bytes={limits.HTTP_READ_BYTES}",
    "claims": "POST /all/.consumers/c{}/claim" + WHOLE,
    "taken": "POST /jobs/s{}/take" + WHOLE,
    "streamed": "GET /all/s?format=json",
    "followed": "GET /all/s?format=sse",
}


@pytest.fixture
def web() -> Iterator[Web]:
    """A server with streams that have a whole answer each."""
    with short_folder() as folder:
        program = (sys.executable, "-m", "tests.server.lowered_server")
        web = Web(folder, program=program, MQFS_LIMITS=f"HELD_BYTES={2 * SHARE}")
        with web.server:
            for path in ("/all/", "/jobs/"):
                assert web.put(path).status == 201
            assert web.post("/all/ctl", "sync off").status == 204
            assert web.post("/jobs/ctl", "deliver one\nsync off").status == 204
            yield web


def fill(web: Web, stream: str, body: bytes = BODY) -> None:
    assert web.put(stream).status == 201
    for _ in range(MESSAGES):
        assert web.post(stream, body).status == 201


def highest(web: Web) -> int:
    """The most memory that the server had since `forget_highest`."""
    status = Path(f"/proc/{web.server.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def forget_highest(web: Web) -> None:
    Path(f"/proc/{web.server.pid}/clear_refs").write_text("5")


@pytest.mark.parametrize("what", ASKED)
def test_many_long_answers_at_once(web: Web, what: str) -> None:
    """Each is what fits the memory of its user, or a refusal."""
    for stream in ["/all/s"] if what != "taken" else [f"/jobs/s{n}" for n in range(CLIENTS)]:
        fill(web, stream, CONTROL if what in ("streamed", "followed") else BODY)
    for n in range(CLIENTS) if what == "claims" else ():
        assert web.put(f"/all/.consumers/c{n}?over=s").status == 201
    forget_highest(web)
    before = highest(web)
    with ExitStack() as stack:
        socks = [stack.enter_context(web.raw()) for _ in range(CLIENTS)]
        for n, sock in enumerate(socks):
            sock.sendall(f"{ASKED[what].format(n)} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        for sock in socks:
            sock.recv(1, socket.MSG_PEEK)  # all are answered; none is read yet
        held = highest(web) - before
        found = Counter(sock.recv(len("HTTP/1.1 200")).decode() for sock in socks)
    assert found["HTTP/1.1 200"] > 0
    assert found.keys() <= {"HTTP/1.1 200", "HTTP/1.1 429"}
    assert held < 5 * SHARE  # one is put together of its pieces, and the allocator keeps some of what was freed


# ---------------------------------------------------------------- followers that have read all there is

FOLLOWERS = SHARE // len(BODY) + 4  # the memory of their user would not hold a message for each
MARK = b"the end"
FOLLOWED = {"raw": "/ds/g/{}?follow", "events": "/ds/g/{}?follow&format=sse", "durable": "/g/{}?offset=-1&live=sse"}


@pytest.fixture
def durable() -> Iterator[Durable]:
    with short_folder() as folder:
        program = (sys.executable, "-m", "tests.server.lowered_server")
        durable = Durable(folder, program=program, MQFS_LIMITS=f"HELD_BYTES={2 * SHARE}")
        with durable.server:
            assert durable.create("/g/first").status == 201
            assert durable.tree.post("/ds/g/ctl", "sync off").status == 204
            yield durable


def read_to_mark(sock: socket.socket) -> None:
    data = b""
    while MARK not in data:
        more = sock.recv(MIB)
        assert more, f"cut after {len(data)} bytes"
        data += more


@pytest.mark.parametrize("comes", ["before", "later"])
@pytest.mark.parametrize("what", FOLLOWED)
def test_idle_followers_hold_nothing(durable: Durable, what: str, comes: str) -> None:
    """Not the last message that each has read, whether it was the first piece of its answer or a later one."""
    web = durable if what == "durable" else durable.tree
    with ExitStack() as stack:
        for n in range(FOLLOWERS):
            assert durable.create(f"/g/s{n}").status == 201
            if comes == "before":
                assert durable.append(f"/g/s{n}", BODY + MARK).status == 204
            sock = stack.enter_context(web.raw())
            sock.sendall(f"GET {FOLLOWED[what].format(f's{n}')} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            if comes == "later":
                sock.recv(1, socket.MSG_PEEK)  # it has begun
                assert durable.append(f"/g/s{n}", BODY + MARK).status == 204
            read_to_mark(sock)
