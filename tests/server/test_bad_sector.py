"""A server on a disk that cannot read a part of an index: it takes that from the log, and runs on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mqfs.store.disk import Disk
from mqfs.store.segment.index import IndexFile, NonMessageRecords
from tests.support import ROOT
from tests.support.bad_sector import bad_sector
from tests.support.server import Server, environment

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.process]

PAGE = os.sysconf("SC_PAGE_SIZE")
COUNT = 4_000
BODY = bytes(20_000)


def read_all(server: Server) -> list[int]:
    with server.connect(reconnect=False) as client:
        return [message.sequence for message in client.group("g").history(pattern="s")]


def sealed_indexes(server: Server) -> list[Path]:
    """Those of more than a page of sealed segments, and there are some."""
    found = [path for path in sorted(server.store.rglob("*.idx"))[:-1] if path.stat().st_size > 2 * PAGE]
    assert found
    return found


def beside_the_server(path: Path) -> str:
    """What a worker of Spark opens of that segment by itself."""
    opened = f"Segments({str(path.parents[3])!r}, {path.parent.name})._open({int(path.stem)})"
    code = f"from pyspark_mqfs.segments import Segments; print({opened})"
    return subprocess.run(
        [sys.executable, "-c", code], env=environment(), cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def test_an_index_that_cannot_be_read(tmp_path: Path) -> None:
    """The first page of the index can be read, and no other."""
    with Server.at(tmp_path) as server:
        with server.connect() as client:
            group = client.group("g", create=True, ctl=["replay all", "sync off"])
            group.publish_many(("s" if number % 2 else "t", BODY) for number in range(COUNT))
        wanted = read_all(server)
        server.stop()
        for number, path in enumerate(sealed_indexes(server)):
            folder = tmp_path / f"disk-{number}"
            folder.mkdir()
            assert "SealedIndex" in beside_the_server(path)
            with bad_sector(path, PAGE, folder):
                with pytest.raises(OSError, match="Input/output error"):
                    path.read_bytes()
                assert beside_the_server(path) == "None\n"
                server.start()
                assert read_all(server) == wanted
                assert server.process.poll() is None
                server.stop()
        server.start()
        assert read_all(server) == wanted


def test_an_index_that_is_cut_off_after_its_check(tmp_path: Path) -> None:
    """It is mapped again later, as after its segment was closed for others, without another check."""
    with Server.at(tmp_path) as server, server.connect() as client:
        group = client.group("g", create=True, ctl=["replay all", "sync off"])
        group.publish_many(("s", BODY) for _ in range(COUNT))
    path = sealed_indexes(server)[0]
    log = path.with_suffix(".log").read_bytes()
    index = IndexFile(Disk(), str(path), "")
    index.read(lambda count: log[:count], len(log), NonMessageRecords())
    assert index.is_sealed
    assert index.sealed_index() is not None
    os.truncate(path, PAGE)
    assert index.sealed_index() is None
