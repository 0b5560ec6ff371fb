"""py9p, a 9P client not written here, does a newcomer's first steps in all the dialects it knows."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqfs.net import identity
from tests.support.eventually import HANG_S, eventually
from tests.support.ninep import META, Running, make_tree, open_handles, running

py9p = pytest.importorskip("py9p.py9p", reason="py9p (of p9fs) is not installed")

OREAD, OWRITE, ORDWR = 0, 1, 2
DMDIR = 0x8000_0000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with running(make_tree(), tmp_path) as started:
        yield started


class Peer:
    """A client of py9p on a socket that is closed at the end."""

    def __init__(self, server: Running, version: Any = py9p.Version.v9P2000) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(HANG_S)
        self.socket.connect(server.address.removeprefix("unix!"))
        credentials = py9p.Credentials(user=identity.user_name(os.getuid()))
        self.client = py9p.Client(self.socket, credentials, ver=version)

    def __enter__(self) -> Any:
        return self.client

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def mkdir(client: Any, path: str) -> None:
    client.create(path, perm=DMDIR | 0o755, mode=OREAD)
    client.close()


def put(client: Any, path: str, data: bytes) -> None:
    client.open(path, OWRITE)
    assert client.write(data) == len(data)
    client.close()


def names(client: Any, path: str) -> list[bytes]:
    """py9p reads and takes apart a directory (its own `ls` mixes text and bytes, and knows 9P2000 only)."""
    client.open(path, OREAD)
    found: list[Any] = []
    while data := client.read(client.msize):
        marshal = py9p.Marshal9P(dotu=client.dotu)
        marshal.setBuffer(data)
        marshal.buf.seek(0)
        marshal.decstat(found)
    client.close()
    return [stat.name for stat in found]


VERSIONS = [py9p.Version.v9P2000, py9p.Version.v9P2000u]


@pytest.mark.parametrize("version", VERSIONS, ids=["9P2000", "9P2000.u"])
def test_first_steps(server: Running, version: Any) -> None:
    with Peer(server, version) as one, Peer(server, version) as two:
        mkdir(one, "a")
        put(one, "a/ctl", b"replay all\n")
        one.open("a/ctl", OREAD)
        assert b"replay all\n" in one.read(4096)
        one.close()
        one.create("a/s", perm=0o644, mode=OWRITE)
        one.write(b"hi\n")
        two.open("a/s", OREAD)
        assert two.read(100) == b"hi\n"
        if version is py9p.Version.v9P2000u:
            assert two.read(100) == b""  # the end for clients that read until their buffer is full

        # It waits, and is answered by the next write.
        got: list[bytes] = []
        reader = threading.Thread(target=lambda: got.append(two.read(100)))
        reader.start()
        eventually(lambda: server.tree.waits.used == 1)
        assert got == []
        one.write(b"second")
        reader.join(HANG_S)
        assert got == [b"second"]
        one.close()
        two.close()

        assert names(one, "a") == [*(name.encode() for name in META), b"s"]
        with pytest.raises(py9p.RpcError):
            one.open("a/none", OREAD)
        with pytest.raises(py9p.RpcError):
            one.create("a/s", perm=0o644, mode=OWRITE)
        one.rm("a/s")
        one.rm("a")
        assert [stat.name for stat in two.stat("ctl")] == [b"ctl"]
    eventually(lambda: open_handles(server.tree) == 0)


FORMATS = [b"raw", b"line", b"nul", b"each", b"json", b"record"]


@pytest.mark.parametrize("version", VERSIONS, ids=["9P2000", "9P2000.u"])
def test_a_worker(server: Running, version: Any) -> None:
    """A consumer made, read in every format, positioned, acknowledged and removed; the stream as a file."""
    unix = version is py9p.Version.v9P2000u
    with Peer(server, version) as one, Peer(server, version) as two:
        put(one, "ctl", b"replay all\n")
        one.create("s", perm=0o644, mode=OWRITE)
        for number in range(20):
            one.write(b"job %d" % number)
        one.close()
        one.create(".consumers/w", perm=0o666, mode=ORDWR)
        assert names(two, ".consumers") == [b"w"]
        shapes = [one.write(b"format %s\n" % how) and one.read(4096) for how in FORMATS[:5]]
        assert shapes[:4] == [b"job 0", b"job 1\n", b"job 2\0", b"job 3"]
        assert json.loads(shapes[4])["body"] == "job 4"
        one.write(b"ack 1\nack 2 3\nack 4 5\nformat each\n")
        ends = [b"", b""] if unix else [b""]  # of the message, and the end for clients that go on reading
        assert [one.read(100) for _ in range(1 + len(ends))] == [b"job 5", *ends]
        one.write(b"ack\nformat record\n")
        whole = one.read(4096)
        assert whole.index(b"job 6") < whole.index(b"job 19")
        one.write(b"ack\nformat raw\nseek -10\nuntil end\n")
        assert one.read(100) == b"job 10"
        one.write(b"seek @1\nuntil 1\n")
        assert one.read(100) == b"job 0"
        one.write(b"ack\n")
        assert one.read(100) == b""
        with pytest.raises(py9p.RpcError):
            one.write(b"ack 99\n")
        one.open(".errors", OREAD)  # py9p closes a file at its first error
        assert b"message 99" in one.read(4096)
        one.close()
        one.open(".consumers/w", ORDWR)
        one.write(b"seek last\n")
        assert one.read(100) == b"job 19"
        with pytest.raises(py9p.RpcError):
            two.rm(".consumers/w")
        one.write(b"ack\n")
        two.rm(".consumers/w")
        one.close()

        two.open(".kept/s", OREAD)
        assert two.read(4096) == b"".join(b"job %d" % number for number in range(20))
        two.close()
        (stat,) = two.stat(".kept/s")
        assert stat.length == sum(len(f"job {number}") for number in range(20))
    eventually(lambda: open_handles(server.tree) == 0)


def test_a_queue(server: Running) -> None:
    """Two connections share a stream that is delivered to one; what was not acknowledged goes back with them."""
    with Peer(server) as one:
        put(one, "ctl", b"deliver one\nack next\nretries 0\n")
        one.create("s", perm=0o644, mode=OWRITE)
        for body in (b"1", b"2", b"3"):
            one.write(body)
        one.close()
        with Peer(server) as two:
            one.open("s", ORDWR)
            two.open("s", ORDWR)
            assert [one.read(10), two.read(10), one.read(10)] == [b"1", b"2", b"3"]
        assert one.read(10) == b"2", "the other's connection ended"
        one.close()
        one.open("s", OREAD)
        assert [one.read(10), one.read(10)] == [b"2", b""]
        one.close()
