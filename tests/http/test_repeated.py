"""Publishes again and again on one connection: as any other publish, whatever changes between them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import mqfs
from mqfs.ninep.client import connection as ninep
from tests.http.web import Web, statuses
from tests.support.server import short_folder


class Publisher:
    """A connection that publishes to one path."""

    def __init__(self, sock: socket.socket, path: str, *lines: str, method: str = "POST") -> None:
        self.sock, self.path, self.lines, self.method = sock, path, lines, method

    def request(self, body: bytes, *, length: int | str = "", behind: bytes = b"") -> bytes:
        head = [
            f"{self.method} {self.path} HTTP/1.1",
            "Host: localhost",
            *self.lines,
            f"Content-Length: {length or len(body)}",
        ]
        return "\r\n".join([*head, "X: y", "", ""]).encode() + body + behind

    def send(self, body: bytes, **other: bytes | int | str) -> bytes:
        """The answer to one publish."""
        self.sock.sendall(self.request(body, **other))  # type: ignore[arg-type]
        return self.answer()

    def answer(self) -> bytes:
        data = b""
        while b"\r\n\r\n" not in data:
            part = self.sock.recv(1)
            assert part, data
            data += part
        size = next((line for line in data.split(b"\r\n") if line.startswith(b"Content-Length: ")), b": 0")
        for _ in range(int(size.split(b": ")[1])):
            data += self.sock.recv(1)
        return data


@contextmanager
def publisher(web: Web, path: str, *lines: str, method: str = "POST") -> Iterator[Publisher]:
    with web.raw() as sock:
        yield Publisher(sock, path, *lines, method=method)


@pytest.fixture
def again(web: Web, group: str) -> Iterator[Publisher]:
    """To the stream s of a new group, and it has published twice: the next one would be taken as it comes."""
    with publisher(web, f"{group}/s") as it:
        for body in (b"1", b"2", b"3"):
            assert statuses(it.send(body)) == [201]
        assert web.open_files(group, "s") == 1
        yield it


def test_each_is_its_own_message(web: Web, group: str, again: Publisher) -> None:
    bodies = [b"x" * size for size in (1, 9, 10, 11, 99, 100, 1_000, 20_000)]
    for number, body in enumerate(bodies, 4):
        assert f"Mqfs-Sequence: {number}\r\nLocation: {group}/s?seq={number}\r\n".encode() in again.send(body)
    assert web.get(f"{group}/s").body == b"123" + b"".join(bodies)


def test_with_put(web: Web, group: str) -> None:
    with publisher(web, f"{group}/s", method="PUT") as it:
        assert [statuses(it.send(body)) for body in (b"a", b"b", b"c", b"d")] == [[201]] * 4
    assert web.get(f"{group}/s").body == b"abcd"


def test_two_streams_by_turns(web: Web, group: str) -> None:
    with web.raw() as sock:
        for number in range(8):
            Publisher(sock, f"{group}/s{number // 2 % 2}").send(b"%d" % number)
    assert [web.get(f"{group}/s{n}").body for n in (0, 1)] == [b"0145", b"2367"]


def test_sequences_where_others_write(web: Web, group: str, again: Publisher) -> None:
    for number in range(4, 10, 2):
        assert web.post(f"{group}/other", "x").body == b"%d\n" % number
        assert again.send(b"y").endswith(b"\r\n\r\n%d\n" % (number + 1))


# ---------------------------------------------------------------- what is no repeat


@pytest.mark.parametrize(
    ("length", "body", "status"),
    [("0", b"", 201), ("x", b"1", 400), ("-1", b"1", 400), ("+1", b"1", 400), ("1" * 5_000, b"1", 400)],
    ids=["empty", "letter", "negative", "plus", "long"],
)
def test_lengths(again: Publisher, length: str, body: bytes, status: int) -> None:
    assert statuses(again.send(body, length=length)) == [status]


def test_an_empty_body_is_a_message(web: Web, group: str, again: Publisher) -> None:
    assert b"Mqfs-Sequence" in again.send(b"")
    assert web.get(f"{group}/.stats").json["written"] == 4


def test_a_body_in_two_parts(web: Web, group: str, again: Publisher) -> None:
    data = again.request(b"first half, second half")
    again.sock.sendall(data[:-11])
    assert web.get(f"{group}/s").body == b"123"
    again.sock.sendall(data[-11:])
    assert statuses(again.answer()) == [201]
    assert web.get(f"{group}/s").body == b"123first half, second half"


def test_a_head_in_two_parts(web: Web, group: str, again: Publisher) -> None:
    data = again.request(b"body")
    for at in (1, 20, data.index(b"Content-Length") + 16, len(data) - 5):
        again.sock.sendall(data[:at])
        assert web.get("/.ready").status == 200
        again.sock.sendall(data[at:])
        assert statuses(again.answer()) == [201]
    assert web.get(f"{group}/s").body == b"123" + 4 * b"body"


def test_several_together(web: Web, group: str, again: Publisher) -> None:
    again.sock.sendall(again.request(b"a") + again.request(b"b") + again.request(b"c"))
    assert [statuses(again.answer()) for _ in range(3)] == [[201]] * 3
    again.sock.sendall(again.request(b"d") + b"GET /.health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert [statuses(again.answer()) for _ in range(2)] == [[201], [200]]
    assert web.get(f"{group}/s").body == b"123abcd"


def test_bytes_that_are_no_request(again: Publisher) -> None:
    again.sock.sendall(again.request(b"a", behind=b"nonsense\r\n\r\n"))
    assert [statuses(again.answer()) for _ in range(2)] == [[201], [400]]


def test_another_head(web: Web, group: str, again: Publisher) -> None:
    for lines in (["Mqfs-Priority: 3"], ["Mqfs-Ttl: 1h"], ["Idempotency-Key: k"], ["Idempotency-Key: k"]):
        assert statuses(Publisher(again.sock, f"{group}/s", *lines).send(b"x")) == [201]
    assert web.get(f"{group}/.stats").json["written"] == 6


@pytest.mark.parametrize(
    ("line", "times"),
    [("Idempotency-Key: a", 1), ("Mqfs-Id: a", 1), ("Mqfs-Priority: 3", 4), ("Expect: 100-continue", 4)],
)
def test_heads_that_are_not_repeated(web: Web, group: str, line: str, times: int) -> None:
    with publisher(web, f"{group}/s", line) as it:
        for _ in range(4):
            assert 201 in statuses(it.send(b"x"))
        assert web.open_files(group, "s") == 0
    assert web.get(f"{group}/s").body == times * b"x"


def test_a_key_in_the_query_holds(web: Web, group: str) -> None:
    with publisher(web, f"{group}/s?id=a") as it:
        assert [statuses(it.send(b"x")) for _ in range(4)] == [[201]] * 4
    assert web.get(f"{group}/s").body == b"x"


def test_each_request_gets_its_reply(web: Web, group: str) -> None:
    with web.server.connect() as client, publisher(web, f"{group}/s?reply=60s") as it:
        there = client.group(group[1:])
        there.create("s")
        worker = there.work("w", lambda claim: there.reply(claim.message, claim.body[::-1]), over="s")
        answers = [it.send(body) for body in (b"abc", b"def", b"ghi")]
        worker.stop()
    assert [(statuses(one), one[-3:]) for one in answers] == [([200], b"cba"), ([200], b"fed"), ([200], b"ihg")]


def test_a_connection_that_is_to_close(web: Web, group: str) -> None:
    with publisher(web, f"{group}/s") as it:
        it.send(b"1")
        it.send(b"2")
        it.lines = ("Connection: close",)
        assert b"Connection: close" in it.send(b"3")
        assert it.sock.recv(1) == b""


# ---------------------------------------------------------------- what changes between two


def test_data_line(web: Web, group: str, again: Publisher) -> None:
    assert web.post(f"{group}/ctl", "data line").status == 204
    assert statuses(again.send(b"a\nb\n")) == [201]
    assert web.get(f"{group}/.stats").json["written"] == 5


def test_a_ring(web: Web, group: str, again: Publisher) -> None:
    with mqfs.connect(web.server.address, transport="ring") as client:
        for number in range(4, 10, 2):
            assert client.group(group[1:]).publish("s", "r").sequence == number
            assert again.send(b"h").endswith(b"\r\n\r\n%d\n" % (number + 1))
    assert web.get(f"{group}/s").body == b"123rhrhrh"


def test_modes() -> None:
    with short_folder() as folder:
        web = Web(folder, "--tcp-user", "nobody")
        with web.server, ninep.connect(web.server.address) as owner:
            owner.mkdir("g")
            owner.create("g/s").close()
            owner.chmod("g/s", 0o666)
            with publisher(web, "/g/s") as it:
                for path, denied, allowed in (("g/s", 0o644, 0o666), ("g", 0o700, 0o755)):
                    assert [statuses(it.send(b"x")) for _ in range(3)] == [[201]] * 3
                    owner.chmod(path, denied)
                    assert statuses(it.send(b"x")) == [403]
                    owner.chmod(path, allowed)


def test_room(web: Web) -> None:
    """Where a stream is full, a repeated publish waits as any other does."""
    group = web.group("full block", "depth 3", "deliver one")
    with publisher(web, f"{group}/s?wait=20ms") as it:
        assert [statuses(it.send(b"%d" % n)) for n in range(5)] == [[201]] * 3 + [[503]] * 2


@pytest.mark.parametrize("keeps", [False, True], ids=["gone", "made again"])
def test_the_stream_is_removed(web: Web, group: str, again: Publisher, keeps: bool) -> None:
    assert web.ask("DELETE", f"{group}/s").status == 204
    if keeps:
        web.put(f"{group}/s")
    assert statuses(again.send(b"new")) == [201]
    assert web.get(f"{group}/s").body == b"new"


def test_the_group_is_removed(web: Web, group: str, again: Publisher) -> None:
    assert web.ask("DELETE", f"{group}/s").status == 204
    assert web.ask("DELETE", f"{group}/").status == 204
    assert statuses(again.send(b"new")) == [404]
    web.put(f"{group}/")
    assert statuses(again.send(b"new")) == [201]
    assert web.get(f"{group}/s").body == b"new"


@pytest.mark.parametrize("where", ["its own", "above"])
def test_the_group_is_renamed(web: Web, group: str, where: str) -> None:
    inner = group if where == "its own" else f"{group}/inner"
    if where == "above":
        web.put(f"{inner}/")
    with publisher(web, f"{inner}/s") as it:
        for body in (b"1", b"2", b"3"):
            assert statuses(it.send(body)) == [201]
        with ninep.connect(web.server.address) as client:
            client.rename(group[1:], f"{group[1:]}-moved")
        assert statuses(it.send(b"4")) == [404]


# ---------------------------------------------------------------- the stream that stays open


def test_who_is_told(web: Web, group: str, again: Publisher) -> None:
    again.send(b"x")
    assert web.open_files(group, "s") == 1
    web.eventually_open(group, "s", 0)


def test_it_ends_with_the_connection(web: Web, group: str, again: Publisher) -> None:
    again.send(b"x")
    again.sock.close()
    web.eventually_open(group, "s", 0)


def test_another_request_ends_it(web: Web, group: str, again: Publisher) -> None:
    again.sock.sendall(b"GET /.health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert statuses(again.answer()) == [200]
    assert web.open_files(group, "s") == 0


def test_one_publish_keeps_nothing_open(web: Web, group: str) -> None:
    with publisher(web, f"{group}/s") as it:
        it.send(b"1")  # makes the stream
        it.send(b"2")
        assert web.open_files(group, "s") == 0


@pytest.mark.parametrize("repeated", [False, True], ids=["first", "repeated"])
def test_a_client_that_leaves_in_its_body(web: Web, group: str, again: Publisher, repeated: bool) -> None:
    sock = again.sock if repeated else web.raw()
    sock.sendall(Publisher(sock, f"{group}/s").request(b"a body")[:-3])
    sock.close()
    web.eventually_open(group, "s", 0 if repeated else 1)
    assert web.get(f"{group}/s").body == b"123"
    assert "Traceback" not in web.server.text()


def test_a_user_whose_open_files_are_bounded() -> None:
    with short_folder() as folder:
        web = Web(folder, "--limit", f"{os.geteuid()} handles=1")
        with web.server, publisher(web, f"{web.group()}/s") as one, publisher(web, one.path) as other:
            for _ in range(3):
                assert [statuses(it.send(b"x")) for it in (one, other)] == [[201]] * 2
