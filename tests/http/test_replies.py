"""A request with `reply` whose reply does not come, for other reasons than its time: what the answer says is true."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from mqfs.ninep.client.connection import connect
from tests.http.web import Web, rest, statuses
from tests.support.eventually import eventually
from tests.support.server import COMMAND, short_folder

HASTY: Any = [COMMAND[0], "-m", "tests.http.hasty_server"]


def asked(web: Web, group: str) -> tuple[socket.socket, str]:
    """A request that waits for its reply, and the name of the stream of that."""
    sock = web.raw()
    sock.sendall(f"POST {group}/s?reply=1h HTTP/1.0\r\nContent-Length: 6\r\n\r\ncharge".encode())
    eventually(lambda: web.open_files(group, ".cursor") == 1, "its wait")
    (line,) = eventually(lambda: web.get(f"{group}/s?format=json").lines, "its message")
    return sock, line["headers"]["reply-to"]


def stop(web: Web, group: str, name: str) -> None:
    assert web.server.stop(signal.SIGTERM) == 0


def remove(web: Web, group: str, name: str) -> None:
    assert web.ask("DELETE", f"{group}/{name}").status == 204


def remove_under_a_part(web: Web, group: str, name: str) -> None:
    """The rest of the reply cannot come any more."""
    part = json.dumps({"stream": name, "body": "the first", "headers": {"part": "1/2"}})
    assert web.post(f"{group}/.batch", part, Content_Type="application/x-ndjson").status == 201
    remove(web, group, name)


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("end", [stop, remove, remove_under_a_part])
def test_no_504_for_a_message_that_is_delivered_yet(end: Callable[[Web, str, str], None], is_new: bool) -> None:
    with short_folder() as folder:
        web = Web(folder)
        with web.server:
            group = web.group("consumer c")
            if not is_new:
                web.put(f"{group}/s")
            sock, name = asked(web, group)
            with sock:
                end(web, group, name)
                answer = rest(sock)
            assert (statuses(answer), b"(the message was published)" in answer) == ([503], True)
            assert b"retry-after" not in answer.lower()  # a client that obeys it publishes twice
            if end is stop:
                web.server.start()
            (line,) = web.post(f"{group}/.consumers/c/claim").lines
            assert line["body"] == "charge"


def test_a_refusal_of_the_wait_says_that_the_message_was_published() -> None:
    with short_folder() as folder:
        web = Web(folder, program=HASTY, HASTE=json.dumps({"PARKED": 2}))
        with web.server:
            group = web.group("consumer c")
            web.put(f"{group}/s")
            web.put(f"{group}/other")
            with web.raw() as sock:
                sock.sendall(f"GET {group}/other?since=end&wait=1h HTTP/1.0\r\n\r\n".encode())
                web.eventually_open(group, ".cursor", 1)
                refused = web.post(f"{group}/s?reply=1h", "charge")
            assert (refused.status, b"(the message was published)" in refused.body) == (429, True)
            assert refused.headers["Retry-After"] is None
            assert web.post(f"{group}/.consumers/c/claim").lines[0]["body"] == "charge"


def test_a_request_of_a_user_who_may_not_wait_for_its_reply_is_not_published() -> None:
    with short_folder() as folder:
        web = Web(folder, "--tcp-user", "nobody")
        with web.server, connect(web.server.address) as owner:
            owner.mkdir("g")
            owner.create("g/s").close()
            for path, mode in (("g", 0o777), ("g/s", 0o666), ("g/.cursor", 0o600)):
                owner.chmod(path, mode)
            assert web.post("/g/s?reply=100ms", "x").status == 403
            with owner.open("g/.stats", "r") as stats:
                assert json.loads(stats.read(1 << 16))["written"] == 0


# ---------------------------------------------------------------- a server that stops

WAITS = {
    "POST /g/s?reply=1h": 503,
    "POST /g/s?reply=1h&id=1": 503,
    "POST /g/.consumers/c/claim?wait=1h": 503,
    "POST /g/.consumers/.s/claim?wait=1h": 503,
    "GET /g/s?since=end&wait=1h": 503,
    "GET /g/s?since=end&follow": 200,
    "POST /one/s/take?wait=1h": 503,
    "POST /full/s": 503,
    "POST /full/s?wait=1h": 503,
    "POST /full/s?id=1": 503,
}


def test_a_wait_that_begins_while_the_server_stops_is_answered() -> None:
    """The rest of each request comes when those that waited before have been answered."""
    with short_folder() as folder, ExitStack() as stack:
        web = Web(folder)
        with web.server:
            for group, settings in (("g", ""), ("one", "deliver one\nack read"), ("full", "depth 1\nfull block")):
                assert web.put(f"/{group}/").status == 201
                assert web.post(f"/{group}/ctl", f"{settings}\nconsumer c\n").status == 204
                assert web.put(f"/{group}/s").status == 201
            web.post("/full/s", "fills it")
            late = {request: stack.enter_context(web.raw()) for request in WAITS}
            head = "Host: localhost\r\nConnection: close\r\nExpect: 100-continue\r\nContent-Length: 1"
            for request, sock in late.items():
                sock.sendall(f"{request} HTTP/1.1\r\n{head}\r\n\r\n".encode())
                assert statuses(sock.recv(4_096)) == [100]  # it was read, so its connection is not idle
            before = stack.enter_context(web.raw())
            before.sendall(b"GET /g/s?since=end&wait=1h HTTP/1.0\r\n\r\n")
            web.eventually_open("/g", ".cursor", 1)
            web.server.process.send_signal(signal.SIGTERM)
            assert statuses(rest(before)) == [204]
            for sock in late.values():
                sock.sendall(b"x")
            assert {request: statuses(rest(sock)) for request, sock in late.items()} == {
                request: [status] for request, status in WAITS.items()
            }
