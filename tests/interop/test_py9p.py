"""py9p, a 9P client that nobody here wrote, does a newcomer's first steps in all the dialects it knows."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqfs.ninep import people
from tests.ninep.support import DEADLINE_S, META, Running, eventually, make_tree, open_handles, running

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
        self.socket.settimeout(DEADLINE_S)
        self.socket.connect(server.address.removeprefix("unix!"))
        credentials = py9p.Credentials(user=people.user_name(os.getuid()))
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
            assert two.read(100) == b""  # what is said to clients that read until their buffer is full

        # It waits, and is answered by the next write.
        got: list[bytes] = []
        reader = threading.Thread(target=lambda: got.append(two.read(100)))
        reader.start()
        eventually(lambda: server.tree.parked == 1)
        assert got == []
        one.write(b"second")
        reader.join(DEADLINE_S)
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
