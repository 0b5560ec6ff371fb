"""A claim that passes over very many messages, by every front end: others are served, and it finds what is there."""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import mqfs
from mqfs import limits
from mqfs.ninep.client.connection import connect
from mqfs.ninep.codec import messages as m
from mqfs.ninep.codec.wire import Framer, decode, encode
from tests.fuse.served_by import READ, calls
from tests.support.batches import frame
from tests.support.campaign import size
from tests.support.eventually import HANG_S, eventually
from tests.support.server import COMMAND, Server, short_folder, unmount
from tests.support.tools import mq_cat, mq_work

TAGS, PARKED = 50, 200  # of the server here
NO = size(200_000, 4)  # messages that no consumer selects, before one that all do
LOWERED = [sys.executable, "-m", "tests.server.lowered_server"]
VIEW = 'bind v prefix:"" payload_contains("needle")'


class House:
    """A server, its mount, a mount of it elsewhere, and consumers for whom one message is behind many others."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.elsewhere, self.count = folder, folder / "elsewhere", 0
        lowered = {"program": LOWERED, "MQFS_LIMITS": f"TAGS={TAGS} PARKED={PARKED}"}
        self.server = Server.at(folder, "--http", "unix!web", mount=True, **lowered)
        self.elsewhere.mkdir()
        (folder / "mount").mkdir()
        words = [*COMMAND, "mount", self.server.address, str(self.elsewhere)]
        self.mount = Server(cwd=folder / "mount", program=words)
        with connect(self.server.address, msize=limits.MSIZE_MOST) as client:
            client.mkdir("g")
            with client.open("g/ctl", "w") as ctl:
                ctl.write(f"replay all\nsync off\n{VIEW}\n".encode())
            for name in ("s", "t", "quiet"):
                client.create(f"g/{name}").close()
            with client.open("g/.batch", "w") as batch:
                for _ in range(NO // 5_000):
                    batch.write(frame("s", b"hay") * 5_000)
                batch.write(frame("s", b"needle"))

    def consumer(self) -> str:
        """A new one, which has looked at nothing yet."""
        self.count += 1
        (self.server.path / "g" / "ctl").write_text(f"consumer c{self.count} v\n")
        return f"c{self.count}"

    def stats(self, name: str) -> Any:
        found: dict[str, Any] = json.loads((self.server.path / "g" / ".stats").read_text())["consumers"][name]
        return found

    def close(self) -> None:
        try:
            self.mount.close()
        finally:
            unmount(self.elsewhere)
            self.server.close()


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with short_folder() as folder:
        it = House(folder)
        try:
            yield it
        finally:
            it.close()


class Nine:
    """A plain connection: each answer is seen."""

    def __init__(self, house: House, path: str, *, linux: bool = False) -> None:
        self.linux, self.framer, self.answers = linux, Framer(8_192), list[Any]()
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(HANG_S)
        self.socket.connect(house.server.address.removeprefix("unix!"))
        flags = os.O_RDWR | os.O_NONBLOCK
        opens = m.Tlopen(1, 1, flags) if linux else m.Topen(1, 1, os.O_RDWR)
        version = m.Tversion(0xFFFF, 8_192, "9P2000.L" if linux else "9P2000")
        for request in (version, m.Tattach(1, 0, m.NOFID, "", "", 0), m.Twalk(1, 0, 1, tuple(path.split("/"))), opens):
            self.send(request)
            self.answer()

    def __enter__(self) -> Nine:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *requests: Any) -> None:
        self.socket.sendall(b"".join(encode(request, self.linux) for request in requests))

    def answer(self) -> Any:
        while not self.answers:
            data = self.socket.recv(8_192)
            assert data
            self.answers += [decode(*one, self.linux) for one in self.framer.frames(data)]
        return self.answers.pop(0)


# ------------------------------------------------------------ the doors


def nonblocking(path: Path) -> list[bytes]:
    fd, found = os.open(path, os.O_RDWR | os.O_NONBLOCK), list[bytes]()
    try:
        while True:
            found.append(os.read(fd, 100))
            os.write(fd, b"ack\n")
    except BlockingIOError:
        return found
    finally:
        os.close(fd)


def of_mount(house: House, name: str) -> list[bytes]:
    return nonblocking(house.server.path / "g" / ".consumers" / name)


def of_a_mount_elsewhere(house: House, name: str) -> list[bytes]:
    return nonblocking(house.elsewhere / "g" / ".consumers" / name)


def of_9p(house: House, name: str) -> list[bytes]:
    found = list[bytes]()
    with Nine(house, f"g/.consumers/{name}", linux=True) as nine:
        while True:
            nine.send(m.Tread(1, 1, 0, 100))
            answer = nine.answer()
            if isinstance(answer, m.Rlerror):
                assert answer.ecode == errno.EAGAIN
                return found
            found.append(bytes(answer.data))
            nine.send(m.Twrite(1, 1, 0, b"ack\n"))
            nine.answer()


def of_9p_with_flushes(house: House, name: str) -> list[bytes]:
    found = list[bytes]()
    with Nine(house, f"g/.consumers/{name}") as nine:
        while True:
            nine.send(m.Tread(1, 1, 0, 100), m.Tflush(2, 1))
            answer = nine.answer()
            if isinstance(answer, m.Rflush):
                return found
            found.append(bytes(answer.data))
            assert isinstance(nine.answer(), m.Rflush)
            nine.send(m.Twrite(1, 1, 0, b"ack\n"))
            nine.answer()


def of_http(house: House, name: str) -> list[bytes]:
    url, found = f"http://localhost/g/.consumers/{name}", list[bytes]()
    post = ["curl", "-s", "--unix-socket", str(house.folder / "web"), "-X", "POST"]
    while text := subprocess.run([*post, f"{url}/claim?wait=0s"], check=True, stdout=subprocess.PIPE).stdout:
        row = json.loads(text)
        found.append(row["body"].encode())
        subprocess.run([*post, "-d", row["token"], f"{url}/ack"], check=True)
    return found


def of_library(house: House, name: str) -> list[bytes]:
    found = list[bytes]()
    with house.server.connect() as client, client.group("g").consume(name) as claims:
        while True:
            try:
                claim = claims.get(0)
            except TimeoutError:
                return found
            found.append(claim.body)
            claim.ack()


def of_mq_cat(house: House, name: str) -> list[bytes]:
    return [mq_cat("-e", "--consumer", name, house.server.path / "g").stdout]


def of_mq_work(house: House, name: str) -> list[bytes]:
    return [mq_work("-e", house.server.path / "g" / ".consumers" / name, "--", "cat").stdout]


@pytest.mark.parametrize(
    "door", [of_mount, of_a_mount_elsewhere, of_9p, of_9p_with_flushes, of_http, of_library, of_mq_cat, of_mq_work]
)
def test_who_does_not_wait_has_what_is_there(house: House, door: Callable[[House, str], list[bytes]]) -> None:
    """And no more: it was looked at to the end."""
    name = house.consumer()
    assert door(house, name) == [b"needle"]
    stats = house.stats(name)
    assert (stats["claimed"], stats["parked"], stats["failed"]) == (0, 0, 0)
    assert stats["delivered"] == 1


def test_the_embedded_library_has_what_is_there() -> None:
    with mqfs.open(None) as client:
        group = client.group("g", create=True, ctl=["replay all", VIEW, "consumer c v"])
        group.create("s")
        group.publish_many([("s", b"hay")] * NO)
        group.publish("s", b"needle")
        with group.consume("c") as claims:
            assert claims.get(0).body == b"needle"
            with pytest.raises(TimeoutError):
                claims.get(0)


# ------------------------------------------------------------ meanwhile


def test_others_are_served_meanwhile(house: House) -> None:
    """Many round trips of another end before the claim does, each begun after the one before has ended."""
    with Nine(house, f"g/.consumers/{house.consumer()}") as nine, connect(house.server.address) as client:
        nine.send(m.Tread(1, 1, 0, 100))
        with client.open("g/t", "r+") as other:
            for _ in range(50):
                other.write(b"x")
                assert other.receive() == b"x"
        assert not select.select([nine.socket], [], [], 0)[0], "it looks still"
        assert nine.answer().data == b"needle"


def test_a_full_connection_is_read_while_one_looks(house: House) -> None:
    """Its requests, flushes and end are seen: what cannot wait there is refused, and what would wait is not kept."""
    name = house.consumer()
    with Nine(house, f"g/.consumers/{name}") as nine:
        reads = [m.Tread(tag, 1, 0, 100) for tag in range(10, 10 + TAGS + 3)]
        flushes = [m.Tflush(0, 10), m.Tflush(1, 11), m.Tflush(2, 12), m.Tflush(3, 20), m.Tread(9, 1, 0, 100)]
        nine.send(*reads, *flushes, m.Tflush(4, 20), m.Twalk(8, 0, 2, ()))
        answers = [nine.answer() for _ in range(9)]
        assert [answer.tag for answer in answers] == [60, 61, 62, 0, 2, 9, 3, 4, 8], "that of 11 has a place to wait"
        assert [answer.tag for answer in answers if isinstance(answer, m.Rerror)] == [60, 61, 62, 9]
    eventually(lambda: house.stats(name)["handles"] == 0, "its end to be seen")
    assert house.stats(name)["delivered"] == 0
    assert nonblocking(house.server.path / "g" / ".consumers" / name) == [b"needle"]


def of_9p_alone(house: House, name: str) -> bool:
    with Nine(house, f"g/.consumers/{name}") as nine:
        nine.send(m.Tread(1, 1, 0, 100))
        answer = nine.answer()
        return isinstance(answer, m.Rerror) and answer.ename.startswith("limit reached")


def refused(claim: Callable[[], object]) -> bool:
    try:
        claim()
    except OSError as error:
        return error.errno == errno.ENFILE
    return False


def of_mount_alone(house: House, name: str) -> bool:
    fd = os.open(house.server.path / "g" / ".consumers" / name, os.O_RDWR)
    try:
        return refused(lambda: os.read(fd, 100))
    finally:
        os.close(fd)


def of_http_alone(house: House, name: str) -> bool:
    url = f"http://localhost/g/.consumers/{name}/claim?wait=60s"
    post = ["curl", "-s", "-w", "%{http_code}", "--unix-socket", str(house.folder / "web"), "-X", "POST", url]
    return subprocess.run(post, check=True, stdout=subprocess.PIPE).stdout.endswith(b"429")


@pytest.mark.parametrize("door", [of_9p_alone, of_mount_alone, of_http_alone])
def test_one_that_looks_needs_a_place_to_wait(house: House, door: Callable[[House, str], bool]) -> None:
    """Also while it looks it is one of its user's reads that wait."""
    name = house.consumer()
    with ExitStack() as waiting:
        for _ in range(3):
            nine = waiting.enter_context(Nine(house, "g/quiet"))
            nine.send(*[m.Tread(tag, 1, 0, 100) for tag in range(10, 6 + TAGS)], m.Twalk(8, 0, 2, ()))
            answer = nine.answer()
        assert isinstance(answer, m.Rerror), "all places are taken"
        assert door(house, name)
        assert house.stats(name)["delivered"] == 0

    eventually(lambda: not refused(lambda: of_mount(house, house.consumer())), "there to be places again")
    assert of_mount(house, name) == [b"needle"]


@pytest.mark.parametrize("wait", ["0s", "60s"])
def test_a_client_of_http_that_is_gone_takes_nothing(house: House, wait: str) -> None:
    name = house.consumer()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(house.folder / "web"))
        client.sendall(f"POST /g/.consumers/{name}/claim?wait={wait} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        eventually(lambda: house.stats(name)["parked"], "it to look")
    eventually(lambda: house.stats(name)["handles"] == 0, "its end to be seen")
    assert house.stats(name)["delivered"] == 0
    assert of_mount(house, name) == [b"needle"]


CLAIM = """
import os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
print(os.read(fd, 100), flush=True)
"""


def test_one_that_is_killed_while_it_looks_took_nothing(house: House) -> None:
    name = house.consumer()
    path = house.server.path / "g" / ".consumers" / name
    words = [sys.executable, "-c", CLAIM, str(path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        eventually(lambda: calls(process.pid, READ) or process.poll() is not None, "it to read")
        process.send_signal(signal.SIGKILL)
        assert process.communicate()[0] in (b"", b"b'needle'\n")
    eventually(lambda: house.stats(name)["handles"] == 0, "its file to be closed")
    assert nonblocking(path) == [b"needle"]
