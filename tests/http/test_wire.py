"""Bytes on the wire: what is no request, what comes slowly, and several requests at once."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from mqfs import limits
from mqfs.http.wire import RequestParser
from tests.http.web import Web, rest, statuses
from tests.support.eventually import HANG_S, eventually
from tests.support.server import COMMAND, short_folder

HOST = b"Host: localhost\r\n"
POST = b"POST /g/s HTTP/1.1\r\n" + HOST
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n"
REFUSED = {
    "length and chunks": (POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", 400),
    "chunks and length": (CHUNKED + b"Content-Length: 3\r\n\r\n3\r\nabc\r\n0\r\n\r\n", 400),
    "two lengths": (POST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc", 400),
    "two lengths in one": (POST + b"Content-Length: 3, 3\r\n\r\nabc", 400),
    "length with a sign": (POST + b"Content-Length: +3\r\n\r\nabc", 400),
    "empty length": (POST + b"Content-Length:\r\n\r\nabc", 400),
    "chunks twice": (POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n", 400),
    "chunks of an old client": (b"POST /g/s HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "chunks in two headers": (CHUNKED + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "another coding below": (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", 501),
    "another coding in a header": (
        POST + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        501,
    ),
    "another coding": (POST + b"Transfer-Encoding: gzip\r\n\r\nabc", 400),
    "bad end of a chunk": (CHUNKED + b"\r\n3\r\nabcX0\r\n\r\n", 400),
    "bad size of a chunk": (CHUNKED + b"\r\nx\r\nabc\r\n0\r\n\r\n", 400),
    "folded header": (b"GET / HTTP/1.1\r\n" + HOST + b"X: a\r\n b\r\n\r\n", 400),
    "bare line feeds": (b"GET / HTTP/1.1\nHost: localhost\n\n", 400),
    "bare carriage return": (b"GET / HTTP/1.1\r\nHost: localhost\rX: y\r\n\r\n", 400),
    "blank before the colon": (b"GET / HTTP/1.1\r\nHost : localhost\r\n\r\n", 400),
    "NUL in a header": (b"GET / HTTP/1.1\r\n" + HOST + b"X: a\0b\r\n\r\n", 400),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "two hosts": (b"GET / HTTP/1.1\r\n" + HOST + HOST + b"\r\n", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "another version": (b"GET / HTTP/2.0\r\n" + HOST + b"\r\n", 505),
    "no version": (b"GET /\r\n\r\n", 505),
    "no method": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "many headers": (b"GET / HTTP/1.1\r\n" + HOST + b"X: y\r\n" * 64 + b"\r\n", 431),
    "large headers": (
        b"GET / HTTP/1.1\r\n" + HOST + b"".join(b"X: %b\r\n" % (b"y" * 4_000) for _ in range(5)) + b"\r\n",
        431,
    ),
    "a large header": (b"GET / HTTP/1.1\r\n" + HOST + b"X: " + b"y" * 30_000, 431),
    "a large trailer": (CHUNKED + b"\r\n0\r\nX: " + b"y" * 200_000, 431),
    "a long line": (b"GET /" + b"y" * 9_000 + b" HTTP/1.1\r\n", 431),
    "two tokens": (b"GET / HTTP/1.1\r\n" + HOST + b"Authorization: a\r\nAuthorization: b\r\n\r\n", 400),
    "a long body": (POST + b"Content-Length: 1044481\r\n\r\n", 413),
    "connect": (b"CONNECT a:1 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
}


@pytest.fixture(scope="module")
def hasty() -> Iterator[Web]:
    program: Any = [COMMAND[0], "-m", "tests.http.hasty_server"]
    with short_folder() as folder:
        web = Web(folder, program=program)
        with web.server:
            assert web.put("/g/").status == 201
            yield web


# The bounds are counted in what was received, so those requests come whole only.
CASES = [
    (what, by_one) for what, (data, _) in REFUSED.items() for by_one in (False, True) if len(data) < 4_000 or not by_one
]


@pytest.mark.parametrize(("what", "by_one"), CASES)
def test_what_is_no_request_ends_the_connection(hasty: Web, what: str, by_one: bool) -> None:
    data, status = REFUSED[what]
    with hasty.raw() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            for piece in [data[at : at + 1] for at in range(len(data))] if by_one else [data]:
                sock.sendall(piece)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it was refused before its end
        answer = rest(sock)
    assert statuses(answer) == [status]
    assert b"\r\nConnection: close\r\n" in answer
    assert hasty.get("/g/.stats").json["written"] == 0


POSTS = ("s", "new", "s?key=k", ".batch", "ctl", ".txn/p/s", ".txn/ctl", ".consumers/c/ack", ".consumers/c/seek")


@pytest.mark.parametrize("body", [b"", b"ab", b"ab" * 50_000])
@pytest.mark.parametrize("file", POSTS)
def test_a_post_of_an_old_client_says_how_long_it_is(web: Web, file: str, body: bytes) -> None:
    """Else its body has no end, and was dropped."""
    group = web.group("consumer c")
    web.put(f"{group}/s")
    web.put(f"{group}/.txn/p/")
    before = web.get(f"{group}/.stats").json
    with web.raw() as sock:
        sock.sendall(f"POST {group}/{file} HTTP/1.0\r\n\r\n".encode() + body)
        answer = rest(sock)
    assert (statuses(answer), b"\r\nConnection: close\r\n" in answer) == ([411], True)
    assert web.get(f"{group}/.stats").json == before


@pytest.mark.parametrize(("version", "length"), [("1.0", "Content-Length: 0\r\n"), ("1.1", "Host: localhost\r\n")])
def test_a_post_without_a_body_publishes_an_empty_message(web: Web, group: str, version: str, length: str) -> None:
    with web.raw() as sock:
        sock.sendall(f"POST {group}/s HTTP/{version}\r\n{length}Connection: close\r\n\r\n".encode())
        assert statuses(rest(sock)) == [201]
    assert web.get(f"{group}/s?format=json").lines[0]["body"] == ""


@pytest.mark.parametrize("verb", ["claim", "take"])
def test_a_post_of_an_old_client_to_what_has_no_body(web: Web, verb: str) -> None:
    group = web.group("deliver one", "ack read")
    web.post(f"{group}/s", "x")
    at = f"{group}/s/take" if verb == "take" else f"{group}/.consumers/.s/claim"
    assert statuses(web.say(f"POST {at} HTTP/1.0\r\n\r\n".encode())) == [200]


@pytest.fixture(scope="module")
def speaking() -> Iterator[Web]:
    """A server with all dialects: two at ports of their own."""
    with short_folder() as folder:
        at = "tcp!127.0.0.1!0"
        web = Web(folder, "--http-ntfy", f"nt={at}", "--http-durable", f"ds={at}", "--http-qpubs")
        with web.server:
            assert [web.put(path).status for path in ("/nt/", "/ds/", "/qp/", "/qp/s")] == [201] * 4
            assert web.post("/qp/ctl", "replay all").status == 204
            yield web


def old_client(web: Web, dialect: str, begin: str, behind: bytes = b"") -> bytes:
    """The answer to a request of HTTP/1.0: its first lines, and what comes behind its head."""
    ports = dict(re.findall(r"of group '(nt|ds)' at tcp!127\.0\.0\.1!(\d+)", web.server.text()))
    with socket.create_connection(("127.0.0.1", int(ports.get(dialect, web.port))), HANG_S) as sock:
        line, *headers = begin.split("\n")
        sock.sendall("\r\n".join([f"{line} HTTP/1.0", *headers, "\r\n"]).encode() + behind)
        return rest(sock)


# Requests that are whole without a body: the dialect, first lines and status of each.
WITHOUT = [
    ("nt", "POST /topic?message=hi", 200),
    ("nt", "POST /topic?M=hi", 200),
    ("nt", "POST /topic\nX-Message: hi", 200),
    ("nt", "POST /topic\nMessage: hi", 200),
    ("qp", "POST /.qpubs/qp/emit?name=s&value=hi", 201),
]


@pytest.mark.parametrize(("dialect", "begin", "status"), WITHOUT)
def test_a_post_of_an_old_client_that_is_whole_without_a_body(
    speaking: Web, dialect: str, begin: str, status: int
) -> None:
    path = "/nt/topic" if dialect == "nt" else "/qp/s"
    before = speaking.get(f"/{dialect}/.stats").json["written"]
    assert statuses(old_client(speaking, dialect, begin)) == [status]
    assert speaking.get(f"/{dialect}/.stats").json["written"] == before + 1
    assert speaking.get(f"{path}?since=-1&format=json").lines[0]["body"] == "hi"


def test_an_old_client_closes_a_durable_stream(speaking: Web) -> None:
    assert statuses(old_client(speaking, "ds", "PUT /closed\nContent-Type: text/plain")) == [201]
    assert b"Stream-Closed" not in old_client(speaking, "ds", "HEAD /closed")
    assert statuses(old_client(speaking, "ds", "POST /closed\nStream-Closed: true")) == [204]
    assert b"Stream-Closed: true\r\n" in old_client(speaking, "ds", "HEAD /closed")


@pytest.mark.parametrize(
    ("dialect", "begin"),
    [
        ("nt", "POST /topic"),
        ("nt", "POST /topic?message="),
        ("nt", "POST /topic?title=hi"),
        ("nt", "POST /\nMessage: hi"),
        ("qp", "POST /.qpubs/qp/emit?name=s"),
        ("qp", "POST /.qpubs/qp/emit?name=s&value="),
        ("qp", "POST /qp/s\nValue: x\nMessage: x\nStream-Closed: true"),
        ("ds", "POST /there"),
        ("ds", "POST /there\nContent-Type: text/plain"),
    ],
)
@pytest.mark.parametrize("body", [b"", b"ab"])
def test_a_post_of_an_old_client_that_is_not(speaking: Web, dialect: str, begin: str, body: bytes) -> None:
    """Its body would be lost."""
    old_client(speaking, "ds", "PUT /there\nContent-Type: text/plain")
    before = speaking.get(f"/{dialect}/.stats").json["written"]
    assert statuses(old_client(speaking, dialect, begin, body)) == [411]
    assert speaking.get(f"/{dialect}/.stats").json["written"] == before


def test_a_body_comes_in_chunks_byte_by_byte(hasty: Web) -> None:
    hasty.put("/chunks/")
    request = CHUNKED.replace(b"/g/", b"/chunks/") + b"\r\n3;x=y\r\nabc\r\n2\r\nde\r\n0\r\nTrailer: z\r\n\r\n"
    with hasty.raw() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(len(request)):
            sock.sendall(request[at : at + 1])
        assert statuses(sock.recv(4_096)) == [201]
    assert hasty.get("/chunks/s").body == b"abcde"


def test_a_body_of_many_parts_is_not_copied_when_it_is_read() -> None:
    """A copy of 16 MB takes 9 ms of the server's thread in one piece."""
    parser, part = RequestParser(), b"x" * 65_536
    parser.receive(POST + b"Content-Length: %d\r\n\r\n" % (256 * len(part)))
    for _ in range(256):
        parser.receive(part)
    request = parser.requests[0]
    assert request.complete
    began = time.thread_time()
    body = request.body
    assert time.thread_time() - began < 0.001
    assert body is request.body
    assert body == part * 256


def test_a_length_with_leading_zeros(hasty: Web) -> None:
    hasty.put("/zeros/")
    request = POST.replace(b"/g/", b"/zeros/") + b"Content-Length: " + b"0" * 5_000 + b"3\r\n\r\nabc"
    assert statuses(hasty.say(request + b"GET /zeros/s HTTP/1.1\r\nConnection: close\r\n" + HOST + b"\r\n")) == [
        201,
        200,
    ]


def test_pipelining(hasty: Web) -> None:
    requests = b"PUT /pipe/ HTTP/1.1\r\n" + HOST + b"\r\n"
    for n in range(50):
        requests += b"POST /pipe/s HTTP/1.1\r\n" + HOST + b"Content-Length: 2\r\n\r\n%02d" % n
    requests += b"GET /pipe/s HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\nGET / HTTP/1.1\r\n\r\n"
    answer = hasty.say(requests)
    assert statuses(answer) == [201] * 51 + [200]
    assert answer.endswith(b"".join(b"%02d" % n for n in range(50)))


def test_pipelining_more_than_is_received_at_once(hasty: Web) -> None:
    request = b"GET /.health HTTP/1.1\r\n" + HOST + b"X: " + b"y" * 900 + b"\r\n\r\n"
    with hasty.raw() as sock:
        sock.sendall(request * 200)
        data = b""
        while data.count(b"HTTP/1.1 200 OK") < 200:
            part = sock.recv(65_536)
            assert part, statuses(data)[-1]
            data += part


def test_what_is_wrong_behind_a_request_is_refused_behind_it(hasty: Web) -> None:
    good = b"GET /.health HTTP/1.1\r\n" + HOST + b"\r\n"
    assert statuses(hasty.say(good + b"nonsense\r\n\r\n")) == [200, 400]
    assert statuses(hasty.say(good + good + b"GET / HTTP/1.1\r\n\r\n" + good)) == [200, 200, 400]


def test_upgrade_is_not_granted(hasty: Web) -> None:
    hasty.put("/up/")
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"
    assert statuses(hasty.say(b"GET /.health HTTP/1.1\r\n" + HOST + upgrade + b"\r\n")) == [200]
    sent = hasty.say(b"POST /up/s HTTP/1.1\r\n" + HOST + upgrade + b"Content-Length: 3\r\n\r\nabc")
    assert statuses(sent) == [201]
    assert hasty.curl("--http2", "-d", "def", "/up/s").status == 201
    assert hasty.get("/up/s").body == b"abcdef"


def test_expect(hasty: Web) -> None:
    with hasty.raw() as sock:
        sock.sendall(POST.replace(b"/g/", b"/expect/") + b"Content-Length: 3\r\nExpect: 100-continue\r\n\r\n")
        assert statuses(rest(sock)) == [404]
    hasty.put("/expect/")
    with hasty.raw() as sock:
        sock.sendall(POST.replace(b"/g/", b"/expect/") + b"Content-Length: 3\r\nExpect: 100-continue\r\n\r\n")
        assert sock.recv(4_096) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(b"abc")
        assert statuses(sock.recv(4_096)) == [201]


def test_a_refused_upload_gets_its_answer(hasty: Web) -> None:
    body = b"x" * 3_000_000
    with hasty.raw() as sock:
        sock.sendall(b"POST /g/s HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\n\r\n" % len(body))
        try:
            sock.sendall(body)
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert statuses(rest(sock)) == [413]
    chunks = b"".join(b"10000\r\n%b\r\n" % (b"x" * 65_536) for _ in range(20))
    with hasty.raw() as sock:
        sock.sendall(CHUNKED + b"\r\n" + chunks)
        assert statuses(rest(sock)) == [413]


def test_a_slow_head(hasty: Web) -> None:
    with hasty.raw() as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n")
        assert statuses(rest(sock)) == [408]


def test_line_ends_do_not_keep_a_connection(hasty: Web) -> None:
    with hasty.raw() as sock:
        sock.settimeout(0.05)
        data = None
        while data is None:
            try:
                sock.sendall(b"\r\n")
                data = sock.recv(4_096)
            except TimeoutError:
                continue
            except (BrokenPipeError, ConnectionResetError):
                data = b""
        assert data == b""


def test_a_slow_body(hasty: Web) -> None:
    with hasty.raw() as sock:
        sock.sendall(POST + b"Content-Length: 3\r\n\r\na")
        assert statuses(rest(sock)) == [408]


def test_an_idle_connection_ends_without_a_word(hasty: Web) -> None:
    with hasty.raw() as sock:
        assert rest(sock) == b""


def test_a_reader_of_nothing_is_left(hasty: Web) -> None:
    hasty.put("/large/")
    for _ in range(12):
        assert hasty.post("/large/s", b"x" * 1_000_000).status == 201
    with hasty.raw() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        sock.sendall(b"GET /large/s HTTP/1.1\r\n" + HOST + b"\r\n")
        hasty.eventually_open("/large", ".cursor", 1)
        hasty.eventually_open("/large", ".cursor", 0)
        assert not rest(sock).endswith(b"0\r\n\r\n")


def test_connections_of_a_user_are_bounded(hasty: Web) -> None:
    socks: list[socket.socket] = []
    try:
        for _ in range(12):
            socks.append(sock := hasty.raw())
            sock.sendall(b"GET /.health HTTP/1.1\r\n" + HOST + b"\r\n")
            assert statuses(sock.recv(4_096)) == [200]
        with hasty.raw() as sock:
            assert statuses(rest(sock)) == [429]
    finally:
        for sock in socks:
            sock.close()


def test_streams_of_a_user_are_bounded(hasty: Web) -> None:
    eventually(lambda: hasty.put("/many/").status == 201, "the places of those who closed")
    hasty.put("/many/s")
    socks = [hasty.raw() for _ in range(3)]
    try:
        for sock in socks:
            sock.sendall(b"GET /many/s?follow HTTP/1.1\r\n" + HOST + b"\r\n")
        hasty.eventually_open("/many", ".cursor", 3)
        refused = hasty.get("/many/s?follow")
        assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
    finally:
        for sock in socks:
            sock.close()


def test_no_host_takes_the_places_of_all(hasty: Web) -> None:
    """Whatever addresses of loopback it has: the others are for other hosts, unix sockets and root."""
    eventually(lambda: hasty.get("/.health").status == 200, "the places of those who closed")
    group, found = hasty.group(), []
    hasty.put(f"{group}/s")
    with ExitStack() as stack:
        for n in range(64):
            source = f"127.0.0.{n // 3 + 2}", 0
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", hasty.port), HANG_S, source))
            sock.sendall(f"GET {group}/s?follow HTTP/1.1\r\n".encode() + HOST + b"\r\n")
            found += statuses(sock.recv(4_096))
        assert found == [200] * 32 + [429] * 32
        sock = stack.enter_context(hasty.raw(unix=True))
        sock.sendall(b"GET /.health HTTP/1.1\r\n" + HOST + b"\r\n")
        assert statuses(sock.recv(4_096)) == [200]


@pytest.mark.parametrize("before", [b"", POST + b"Content-Length: 2000\r\n\r\n" + b"\r\n" * 1_000])
def test_many_requests_are_parsed_in_portions(before: bytes) -> None:
    """However many came at once; and a body is taken as it comes."""
    data, count, parser = before + b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 2_000, 0, RequestParser()
    most = limits.HTTP_PARSED_BYTES // 26 + 1
    while data:
        data = parser.receive(data)
        assert len(parser.requests) <= most
        count += len(parser.requests)
        parser.requests.clear()
    assert (count, parser.complete, parser.error) == (2_000 + bool(before), True, None)
