"""Reading: positions, bounds, formats, and how gaps are reported."""

from __future__ import annotations

import json
import re
import select
import socket
from contextlib import ExitStack
from typing import Any

import pytest

from mqfs.records.record import HEAD
from tests.http.web import Web, rest
from tests.support.eventually import HANG_S, eventually
from tests.support.server import COMMAND, short_folder


@pytest.fixture
def stream(web: Web, group: str) -> str:
    """A stream with the messages m1 to m5."""
    for number in range(1, 6):
        web.post(f"{group}/s", f"m{number}")
    return f"{group}/s"


@pytest.mark.parametrize(
    ("options", "body", "first", "following"),
    [
        ("", b"m1m2m3m4m5", 1, 6),
        ("since=3", b"m3m4m5", 3, 6),
        ("since=last", b"m5", 5, 6),
        ("since=end", b"", 6, 6),
        ("since=-2", b"m4m5", 4, 6),
        ("since=-10m", b"m1m2m3m4m5", 1, 6),
        ("since=@1", b"m1m2m3m4m5", 1, 6),
        ("count=2", b"m1m2", 1, 3),
        ("since=2&count=9", b"m2m3m4m5", 2, 6),
        ("bytes=3", b"m1m2", 1, 3),
        ("until=3", b"m1m2m3", 1, 4),
        ("since=2&until=3", b"m2m3", 2, 4),
        ("until=end", b"m1m2m3m4m5", 1, 6),
        ("until=99", b"m1m2m3m4m5", 1, 6),
        ("since=99", b"m1m2m3m4m5", 1, 6),
        ("format=line", b"m1\nm2\nm3\nm4\nm5\n", 1, 6),
        ("format=nul&count=2", b"m1\0m2\0", 1, 3),
    ],
)
def test_places(web: Web, stream: str, options: str, body: bytes, first: int, following: int) -> None:
    read = web.get(f"{stream}?{options}")
    assert (read.status, read.body) == (200, body)
    assert (int(read.headers["Mqfs-First"]), read.next) == (first, following)
    assert read.headers["Cache-Control"] == "no-store"
    assert read.headers["Content-Security-Policy"] == "sandbox"


@pytest.mark.parametrize(
    "options", ["since=never", "count=0", "count=x", "format=xml", "wait=1", "what=1", "seq=x", "format=record&count=1"]
)
def test_options_that_are_none(web: Web, stream: str, options: str) -> None:
    refused = web.get(f"{stream}?{options}")
    assert refused.status == 400
    assert not re.search(r"line \d|seek", refused.body.decode())


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("*/*", "application/octet-stream"),
        ("application/x-ndjson", "application/x-ndjson"),
        ("text/html,application/x-ndjson;q=0.9,*/*;q=0.8", "application/x-ndjson"),
        ("application/vnd.mqfs.record", "application/vnd.mqfs.record"),
        ("image/png", "application/octet-stream"),
    ],
)
def test_formats_by_accept(web: Web, stream: str, accept: str, kind: str) -> None:
    assert web.get(stream, Accept=accept).headers["Content-Type"] == kind


def test_record_is_the_bytes_of_the_log(web: Web, stream: str) -> None:
    read = web.get(f"{stream}?format=record")
    with web.server.connect() as client:
        group = stream.split("/")[1]
        with client.group(group).subscribe("s", existing=True) as subscription:
            sequences = [message.sequence for message in [next(subscription) for _ in range(5)]]
    assert sequences == [1, 2, 3, 4, 5]
    assert [read.body.count(f"m{n}".encode()) for n in range(1, 6)] == [1] * 5


def test_pages_meet(web: Web, group: str) -> None:
    lines = "\n".join(json.dumps({"stream": "ab"[n % 3 == 0], "body": f"{n},"}) for n in range(400))
    web.put(f"{group}/a")
    web.put(f"{group}/b")
    assert web.post(f"{group}/.batch", lines, Content_Type="application/x-ndjson").status == 201
    since, found = 1, b""
    while (page := web.get(f"{group}/a?since={since}&count=77")).body:
        found += page.body
        since = page.next
    assert found == b"".join(b"%d," % n for n in range(400) if n % 3)


def test_a_long_answer_comes_in_chunks(web: Web, group: str) -> None:
    bodies = [bytes([n]) * 100_000 for n in range(30)]
    for body in bodies:
        web.post(f"{group}/s", body)
    read = web.get(f"{group}/s")
    assert read.headers["Transfer-Encoding"] == "chunked"
    assert (read.body == b"".join(bodies), read.next) == (True, 31)
    page = web.get(f"{group}/s?count=30")
    assert (page.headers["Content-Length"], page.next) == ("1100000", 12)
    old = web.say(f"GET {group}/s HTTP/1.0\r\n\r\n".encode())
    assert old.endswith(b"\r\n\r\n" + b"".join(bodies))
    assert b"chunked" not in old


def test_long_poll(web: Web, group: str) -> None:
    web.put(f"{group}/s")
    empty = web.get(f"{group}/s?since=1&wait=20ms")
    assert (empty.status, empty.body, empty.next) == (204, b"", 1)
    with web.raw() as sock:
        sock.sendall(f"GET {group}/s?since=1&wait=1h HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        web.eventually_open(group, ".cursor", 1)
        web.post(f"{group}/s", "now")
        assert rest(sock).endswith(b"\r\n\r\nnow")


def test_follow(web: Web, group: str) -> None:
    web.post(f"{group}/s", "1")
    with web.stream(f"{group}/s?follow&format=line") as lines:
        assert lines.line() == b"1\n"
        for number in (2, 3):
            web.post(f"{group}/s", str(number))
            assert lines.line() == b"%d\n" % number
        web.ask("DELETE", f"{group}/s")
        assert lines.line() == b""


def test_follow_ends_after_count_and_at_until(web: Web, group: str) -> None:
    web.post(f"{group}/s", "1")
    for options in ("count=2", "until=2"):
        with web.stream(f"{group}/s?follow&format=line&{options}") as lines:
            assert lines.line() == b"1\n"
            web.post(f"{group}/s", "2")
            assert lines.line() == b"2\n"
            assert lines.line() == b""


def test_several_streams(web: Web, group: str) -> None:
    for name in ("a.x", "b.x", "a.y"):
        web.post(f"{group}/{name}", name)
    assert web.get(f"{group}/?select=a.*").body == b"a.xa.y"
    assert web.get(f"{group}/?select=a.x&select=b.x").body == b"a.xb.x"
    assert web.get(f"{group}/?select").body == b"a.xb.xa.y"
    assert web.get(f"{group}/?select=no").status == 404


def test_a_gap_is_never_silent(web: Web) -> None:
    group = web.group("depth 2")
    for number in range(1, 6):
        web.post(f"{group}/s", f"m{number}")
    raw = web.get(f"{group}/s?since=1")
    assert (raw.body, raw.headers["Mqfs-First"]) == (b"m4m5", "4")
    assert web.get(f"{group}/s?since=1&format=json").lines[0] == {"lost": [1, 3]}
    assert "lost" not in web.get(f"{group}/s?since=4&format=json").lines[0]
    assert "lost" not in web.get(f"{group}/s?format=json").lines[0]
    assert web.get(f"{group}/s?since=1&strict").status == 410
    assert web.get(f"{group}/s?since=4&strict").body == b"m4m5"
    assert web.get(f"{group}/s?seq=2").status == 410


@pytest.mark.parametrize("path", ["s?", "?select=*&"])
def test_a_place_beyond_the_end_is_no_silent_gap(web: Web, path: str) -> None:
    """A group of that name was there before, and removed; or a server without a store had it."""
    group = web.group()
    for number in range(1, 7):
        web.post(f"{group}/s", f"a{number}")
    for name in ("s", ""):
        assert web.ask("DELETE", f"{group}/{name}").status == 204
    assert web.put(f"{group}/").status == 201
    for number in range(1, 3):
        assert web.post(f"{group}/s", f"b{number}").status == 201
    where = f"{group}/{path}"
    assert web.get(f"{where}since=3").body == b""  # the end
    for since in (4, 7, 10**18):
        raw = web.get(f"{where}since={since}")
        assert (raw.body, raw.headers["Mqfs-First"], raw.next) == (b"b1b2", "1", 3)
        lost, *rows = web.get(f"{where}since={since}&format=json&wait=1h").lines
        assert (lost, [row["body"] for row in rows]) == ({"lost": [3, since - 1]}, ["b1", "b2"])
        assert web.get(f"{where}since={since}&until=1&format=json").lines[1:] == rows[:1]
        assert web.get(f"{where}since={since}&strict&follow").status == 410
    with web.stream(f"{where}format=sse", Last_Event_ID="6") as lines:
        assert lines.event() == {"retry": "2000"}
        assert lines.event() == {"event": "lost", "data": "[3, 6]"}
        assert [lines.event()["id"] for _ in range(2)] == ["1", "2"]
    assert web.get(f"{where}since={10**30}").status == 400


def test_a_gap_where_messages_are_kept_for_readers_only(web: Web) -> None:
    group = web.group("replay off")
    for number in range(1, 4):
        web.post(f"{group}/s", f"m{number}")
    assert web.get(f"{group}/s?since=2&format=json&wait=1ms").lines == [{"lost": [2, 3]}]
    assert web.get(f"{group}/s?since=4&wait=1ms").status == 204


def test_nothing_is_lost_before_the_first_message(web: Web, group: str) -> None:
    web.put(f"{group}/s")
    web.post(f"{group}/other", "x")
    web.post(f"{group}/late", "x")
    for since in (0, 1):
        assert "lost" not in web.get(f"{group}/late?since={since}&format=json").lines[0]
        assert web.get(f"{group}/s?since={since}&format=json").body == b""


def fall_behind(web: Web, group: str, options: str) -> tuple[socket.socket, bytes]:
    """A follower that reads nothing until messages it did not have are gone."""
    web.post(f"{group}/s", "first")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    sock.connect(("127.0.0.1", web.port))
    sock.sendall(f"GET {group}/s?follow&{options} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    web.eventually_open(group, ".cursor", 1)
    body = b"x" * 500_000
    eventually(lambda: web.post(f"{group}/s", body) and web.get(f"{group}/.stats").json["cut"] > 6)
    web.post(f"{group}/s", "last")
    data = b""
    while b"last" not in data and (part := sock.recv(1 << 20)):
        data += part
    return sock, data


def test_a_slow_follower_is_cut_in_raw(web: Web) -> None:
    sock, data = fall_behind(web, web.group("depth 2"), "format=raw")
    with sock:
        assert not data.endswith(b"0\r\n\r\n")
        assert sock.recv(1) == b""


def test_a_slow_follower_gets_lost_in_json(web: Web) -> None:
    sock, data = fall_behind(web, web.group("depth 2"), "format=json")
    sock.close()
    assert b'\n{"lost":[' in data


def test_deliver_one_is_only_looked_at(web: Web) -> None:
    group = web.group("deliver one")
    web.post(f"{group}/s", "job")
    assert [web.get(f"{group}/s").body for _ in range(2)] == [b"job", b"job"]
    assert web.post(f"{group}/s/take").body == b"job"
    assert web.get(f"{group}/s").body == b""


def test_until_ends_what_begins_at_a_sequence(web: Web) -> None:
    group = web.group("replay last")
    for body in ("1", "2", "3", "4"):
        web.post(f"{group}/s", body)
    assert web.get(f"{group}/s?since=1&until=3&format=json").lines == [{"lost": [1, 3]}]
    assert web.get(f"{group}/s?since=1&until=3&format=json&wait=1s").lines == [{"lost": [1, 3]}]


@pytest.mark.parametrize("options", ["", "until=end", "count=9", "format=json", "since=5"])
def test_a_page_of_what_is_rare(web: Web, group: str, options: str) -> None:
    """20,000 messages are passed over, in portions."""
    web.put(f"{group}/s")
    web.post(f"{group}/ctl", 'bind view prefix:"" payload_contains("yes")\n')
    for _ in range(2):
        lines = '{"stream":"s","body":"no"}\n' * 10_000 + '{"stream":"s","body":"yes"}\n'
        web.post(f"{group}/.batch", lines, Content_Type="application/x-ndjson")
    read = web.get(f"{group}/view?{options}")
    assert read.status == 200
    assert read.body.count(b"yes") == 2
    assert read.next == 20_003


@pytest.mark.parametrize(
    ("options", "body", "following"), [("", b"yes", 10_002), ("&until=7000", b"yes", 7_001), ("&until=9", b"", 5_001)]
)
def test_a_place_before_what_is_rare(web: Web, group: str, options: str, body: bytes, following: int) -> None:
    """It is looked for in portions, and known before the head of the answer is made."""
    web.put(f"{group}/s")
    web.post(f"{group}/ctl", 'bind view prefix:"" payload_contains("yes")\n')
    lines = ['{"stream":"s","body":"no"}\n'] * 10_001
    lines[5_000] = '{"stream":"s","body":"yes"}\n'
    web.post(f"{group}/.batch", "".join(lines), Content_Type="application/x-ndjson")
    read = web.get(f"{group}/view?since=-1{options}")
    assert (read.status, read.body) == (200, body)
    assert (int(read.headers["Mqfs-First"]), read.next) == (5_001, following)


@pytest.mark.parametrize("options", ["", "&wait=20s"])
def test_records_begin_with_the_first_of_them(web: Web, group: str, options: str) -> None:
    """Also where a search passed over others before it."""
    web.put(f"{group}/s")
    web.post(f"{group}/ctl", 'bind view prefix:"" payload_contains("yes")\n')
    lines = ['{"stream":"s","body":"no"}\n'] * 10_001
    lines[5_000] = '{"stream":"s","body":"yes"}\n'
    web.post(f"{group}/.batch", "".join(lines), Content_Type="application/x-ndjson")
    read = web.get(f"{group}/view?format=record{options}")
    assert int(read.headers["Mqfs-First"]) == HEAD.unpack_from(read.body)[2] == 5_001


def test_a_rare_message_is_waited_for(web: Web, group: str) -> None:
    web.put(f"{group}/s")
    web.post(f"{group}/ctl", 'bind view prefix:"" payload_contains("yes")\n')
    web.post(f"{group}/.batch", '{"stream":"s","body":"no"}\n' * 10_000, Content_Type="application/x-ndjson")
    assert web.get(f"{group}/view?since=1&wait=0s").status == 204
    web.post(f"{group}/s", "yes")
    assert web.get(f"{group}/view?since=1&wait=20s").body == b"yes"


# A server of whose 8 places to wait a user gets 4.
FEW_WAIT = """import sys
from mqfs import limits
from mqfs.cli.main import main
limits.PARKED = 8
sys.argv = ["mqfs", "serve", *sys.argv[1:]]
main()"""


def test_a_search_without_a_place_to_wait_is_refused() -> None:
    program: Any = [COMMAND[0], "-c", FEW_WAIT]
    with short_folder() as folder, ExitStack() as waiting:
        web = Web(folder, program=program)
        with web.server:
            group = web.group('bind view prefix:"" payload_contains("yes")')
            for name in ("s", "quiet"):
                web.put(f"{group}/{name}")
            lines = '{"stream":"s","body":"no"}\n' * 20_000 + '{"stream":"s","body":"yes"}\n'
            web.post(f"{group}/.batch", lines, Content_Type="application/x-ndjson")
            readers = [waiting.enter_context(web.raw()) for _ in range(5)]
            for sock in readers:
                sock.sendall(f"GET {group}/quiet?since=end&wait=60s HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            refused, _, _ = select.select(readers, [], [], HANG_S)  # one has no place, so the others have theirs
            assert refused[0].recv(100).startswith(b"HTTP/1.1 429 ")
            assert web.get(f"{group}/view").status == 429
            waiting.close()
            eventually(lambda: web.get(f"{group}/view").body == b"yes", "there are places again")
