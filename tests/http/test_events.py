"""Server-sent events: each trap."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.http.hasty_server import HASTE
from tests.http.web import Lines, Web, rest, statuses
from tests.support.eventually import eventually
from tests.support.server import COMMAND, short_folder

SSE = "text/event-stream"


def start(lines: Lines) -> Lines:
    """Behind the first comment on when to come back."""
    assert lines.event() == {"retry": "2000"}
    return lines


def test_messages_are_events_with_their_sequence(web: Web, group: str) -> None:
    web.post(f"{group}/s", "one")
    with web.stream(f"{group}/s", Accept=SSE) as lines:
        assert lines.headers["Content-Type"] == SSE
        assert lines.headers["X-Accel-Buffering"] == "no"
        event = start(lines).event()
        assert (event["id"], json.loads(event["data"])["body"], "event" in event) == ("1", "one", False)
        web.post(f"{group}/s", "two")
        assert lines.event()["id"] == "2"


@pytest.mark.parametrize("body", ["a\nb", "a\r\nb", "a\rb", " a", "\n", "a\n", "data: x", "\u2028"])
def test_lines_of_raw_data(web: Web, group: str, body: str) -> None:
    web.post(f"{group}/s", body)
    with web.stream(f"{group}/s?data=raw", Accept=SSE) as lines:
        event = start(lines).event()
    assert event == {"id": "1", "data": body.replace("\r\n", "\n").replace("\r", "\n")}


def test_what_is_no_text(web: Web, group: str) -> None:
    web.post(f"{group}/s", b"\xff\0")
    with web.stream(f"{group}/s?data=raw&format=sse") as lines:
        assert start(lines).event() == {"id": "1", "event": "base64", "data": "/wA="}


def test_last_event_id(web: Web, group: str) -> None:
    for n in range(1, 5):
        web.post(f"{group}/s", str(n))
    for path, headers in (
        ("?since=first", {"Last_Event_ID": "2"}),
        ("?last_event_id=2&since=1", {}),
        ("?last_event_id=1", {"Last_Event_ID": "2"}),
    ):
        with web.stream(f"{group}/s{path}", Accept=SSE, **headers) as lines:
            assert start(lines).event()["id"] == "3"
    assert web.get(f"{group}/s", Accept=SSE, Last_Event_ID="x").status == 400


def test_below_the_floor_the_first_event_is_lost(web: Web) -> None:
    group = web.group("depth 2")
    for n in range(1, 6):
        web.post(f"{group}/s", str(n))
    with web.stream(f"{group}/s", Accept=SSE, Last_Event_ID="1") as lines:
        assert start(lines).event() == {"event": "lost", "data": "[2, 3]"}
        assert lines.event()["id"] == "4"
    assert web.get(f"{group}/s?strict", Accept=SSE, Last_Event_ID="1").status == 410


def test_end_and_do_not_come_back(web: Web, group: str) -> None:
    web.post(f"{group}/s", "1")
    with web.stream(f"{group}/s", Accept=SSE) as lines:
        start(lines).event()
        web.ask("DELETE", f"{group}/s")
        assert lines.event() == {"event": "end", "data": "{}"}
        assert lines.line() == b""
    assert web.get(f"{group}/s", Accept=SSE, Last_Event_ID="1").status == 204
    assert web.get(f"{group}/s", Accept=SSE).status == 404


def test_an_old_client_gets_no_chunks(web: Web, group: str) -> None:
    web.post(f"{group}/s", "1")
    with web.raw() as sock:
        sock.sendall(f"GET {group}/s?format=sse&count=1 HTTP/1.0\r\n\r\n".encode())
        answer = rest(sock)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert b"Connection: close" in head
    assert body.startswith(b"retry: 2000\n\nid: 1\n")


@pytest.mark.parametrize("unix", [False, True])
def test_a_half_closed_client_is_served(web: Web, group: str, unix: bool) -> None:
    web.put(f"{group}/s")
    with web.raw(unix=unix) as sock:
        sock.sendall(f"GET {group}/s?follow&format=line HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        sock.shutdown(socket.SHUT_WR)
        web.eventually_open(group, ".cursor", 1)
        web.post(f"{group}/s", "still here")
        data = part = sock.recv(4_096)
        while part and b"still here\n" not in data:
            part = sock.recv(4_096)
            data += part
        assert part


@pytest.mark.parametrize("unix", [False, True])
def test_a_client_that_leaves_ends_its_wait_at_once(web: Web, group: str, unix: bool) -> None:
    web.put(f"{group}/s")
    with web.raw(unix=unix) as sock:
        sock.sendall(f"GET {group}/s?wait=1h&since=end HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        web.eventually_open(group, ".cursor", 1)
    web.eventually_open(group, ".cursor", 0)


def test_a_reset_ends_a_stream_at_once(web: Web, group: str) -> None:
    web.put(f"{group}/s")
    sock = web.raw()
    sock.sendall(f"GET {group}/s?follow HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    web.eventually_open(group, ".cursor", 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    sock.close()
    web.eventually_open(group, ".cursor", 0)


def test_a_claim_takes_nothing_for_a_client_that_left(web: Web, group: str) -> None:
    web.put(f"{group}/s")
    web.put(f"{group}/.consumers/c")
    with web.raw() as sock:
        sock.sendall(f"POST {group}/.consumers/c/claim?wait=1h HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        web.eventually_open(group, "c", 1)
    web.eventually_open(group, "c", 0)
    web.post(f"{group}/s", "x")
    assert web.post(f"{group}/.consumers/c/claim").lines[0]["deliveries"] == 1


def memory(pid: int) -> int:
    """KiB of a process."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0])


def test_a_client_that_reads_nothing_costs_no_memory(web: Web) -> None:
    group = web.group("depth 4")
    web.put(f"{group}/s")
    sock = web.raw()
    sock.sendall(f"GET {group}/s?follow HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    web.eventually_open(group, ".cursor", 1)
    with web.server.connect() as client:
        place = client.group(group[1:])
        for _ in range(8):
            place.publish("s", b"x" * 1_000_000)
        before = memory(web.server.pid)
        for _ in range(40):
            place.publish("s", b"x" * 1_000_000)
    assert memory(web.server.pid) - before < 16_384
    sock.close()


def test_no_body_with_204_304_and_head(web: Web, group: str) -> None:
    web.post(f"{group}/s", "x")
    tag = web.get(f"{group}/.kept/s").headers["ETag"]
    requests = [
        f"GET {group}/s?since=end&wait=1ms",
        f"GET {group}/.kept/s",
        f"HEAD {group}/s",
        f"HEAD {group}/.kept/s",
        f"HEAD {group}/ctl",
        f"HEAD {group}/s?format=sse",
        "GET /.health",
    ]
    head = f"HTTP/1.1\r\nHost: localhost\r\nIf-None-Match: {tag}\r\n"
    answer = web.say(f"{'|'.join(requests)}|".replace("|", f" {head}\r\n").encode()[:-2] + b"Connection: close\r\n\r\n")
    assert statuses(answer) == [204, 304, 200, 304, 200, 200, 200]
    assert answer.endswith(b'{"status": "ok"}\n')
    assert b"Content-Length" not in answer.split(b"\r\n\r\n")[0]


def test_a_restart_leaves_no_gap(tmp_path: Path) -> None:
    with short_folder() as folder:
        web = Web(folder)
        with web.server:
            group = web.group()
            web.post(f"{group}/s", "1")
            with web.stream(f"{group}/s", Accept=SSE) as lines:
                assert start(lines).event()["id"] == "1"
                web.server.stop()
                assert lines.event() == {}  # no `end`: the client is to come back
            web.server.start()
            web.post(f"{group}/s", "2")
            with web.stream(f"{group}/s", Accept=SSE, Last_Event_ID="1") as lines:
                assert json.loads(start(lines).event()["data"])["body"] == "2"


def test_comments_after_a_silence() -> None:
    program: Any = [COMMAND[0], "-m", "tests.http.hasty_server"]
    assert HASTE["HTTP_BEAT_S"] < 1
    with short_folder() as folder:
        web = Web(folder, program=program)
        with web.server:
            group = web.group()
            web.put(f"{group}/s")
            with web.stream(f"{group}/s", Accept=SSE) as lines:
                assert [start(lines).event(), lines.event()] == [{"": ""}, {"": ""}]
                web.post(f"{group}/s", "x")
                eventually(lambda: lines.event().get("id") == "1")
