"""`--limit` of a real server: over 9P, from the command line and from a file."""

from __future__ import annotations

import errno
import http.client
import json
import os
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mqfs.errors import Again, MqfsError, OverQuota
from mqfs.ninep.client import connection
from mqfs.ninep.codec.wire import Dialect
from mqfs.records import headers
from tests.support.eventually import HANG_S
from tests.support.ports import free_port
from tests.support.server import Server, can_mount
from tests.support.server import mqfs as run

pytestmark = pytest.mark.process
ME = str(os.geteuid())


def test_a_rate_and_a_bound_over_9p(tmp_path: Path) -> None:
    (tmp_path / "mqfs.toml").write_text(f'limit = ["{ME} messages=5 parked=1", "* handles=9"]\n')
    with (
        Server.at(tmp_path, "--config", "mqfs.toml") as server,
        connection.connect(server.address, dialect=Dialect.LINUX) as client,
    ):
        client.create("s").close()
        writer = client.open("s", "w", nonblocking=True)
        refused = 0
        for _ in range(1000):
            try:
                writer.write(b"x")
            except Again:
                refused += 1
        assert refused > 0
        assert client.open("s", "w").write(b"waits for its turn") == 18
        with connection.connect(server.address) as other, pytest.raises(TimeoutError):
            other.open("s").receive(timeout=0.01)
        row = json.loads(client.open(".stats").receive())["quotas"][ME]
        assert row["bounds"] == {"messages": 5, "parked": 1}
        assert row["delayed"] >= refused


@pytest.mark.parametrize("options", [{}, {"Mqfs-Ttl": "1h"}], ids=["plain", "with options"])
@pytest.mark.parametrize("keeps", [True, False], ids=["one connection", "a connection each"])
def test_a_publish_over_http_that_is_delayed_counts_once(tmp_path: Path, options: dict[str, str], keeps: bool) -> None:
    port, posts = free_port(), 4
    with (
        Server.at(tmp_path, "--http", f"127.0.0.1:{port}", "--limit", "* messages=1") as server,
        connection.connect(server.address) as client,
        closing(http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_S)) as web,
    ):
        client.mkdir("g")
        client.create("g/s").close()
        client.chmod("g", 0o777)
        client.chmod("g/s", 0o666)
        for _ in range(posts):
            web.request("POST", "/g/s", b"x", options)
            answer = web.getresponse()
            answer.read()
            assert answer.status == 201
            if not keeps:
                web.close()
        [delayed] = [row["delayed"] for row in quotas(client).values() if row["delayed"]]
        assert 1 <= delayed < posts  # the first was not


def quotas(client: connection.Client) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(client.open(".stats").receive())["quotas"]
    return found


@pytest.mark.fuse
@pytest.mark.skipif(not can_mount(), reason="no /dev/fuse")
def test_a_mount_answers_edquot(tmp_path: Path) -> None:
    with Server.at(tmp_path, "--limit", f"{ME} kept=200", mount=True) as server:
        group = server.group("g", "replay all", streams=["s"])
        (group / "s").write_bytes(b"x" * 90)
        with pytest.raises(OSError, match="quota") as caught:
            (group / "s").write_bytes(b"x" * 90)
        assert caught.value.errno == errno.EDQUOT


def test_the_library_raises_it_as_over_quota(tmp_path: Path) -> None:
    with Server.at(tmp_path, "--limit", f"{ME} kept=200") as server, server.connect() as client:
        group = client.group("g", create=True, ctl=["replay all"])
        group.publish("s", b"x" * 90)
        with pytest.raises(MqfsError, match=r"uid \d+ keeps 162 bytes in its streams"):
            group.publish("s", b"x" * 90)


def test_a_wrong_limit_is_refused_before_anything_is_opened(tmp_path: Path) -> None:
    done = run("serve", "--store", "store", "--limit", "* size=3", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "mqfs: --limit '* size=3': malformed (expected USER KEY=NUMBER..., keys messages, bytes, "
        "kept, parked, handles, claims, 10M for sizes)\n"
    )
    assert os.listdir(tmp_path) == []


def _used(folder: Path) -> int:
    """Bytes on disk."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def _framed(stream: bytes, head: bytes, body: bytes) -> bytes:
    return struct.pack("<IHH", 8 + len(stream) + len(head) + len(body), len(stream), len(head)) + stream + head + body


HEAD = headers.encode({"h": "x" * 15_000})


def _put(**options: object) -> bytes:
    return json.dumps({"stream": "s", **options}).encode() + b" "


WAYS: dict[str, tuple[str, Callable[[int], bytes]]] = {
    "headers": (".put", lambda n: _put(headers={"h": "x" * 15_000}) + b"b"),
    "headers of a batch": (".batch", lambda n: _framed(b"s", b"", b"b") + _framed(b"s", HEAD, b"b") * 7),
    "delayed": (".put", lambda n: _put(delay="1h") + b"x" * 8_000),
    "delayed with headers": (".put", lambda n: _put(delay="1h", headers={"h": "x" * 15_000}) + b"b"),
    "staged": (".txn/p/.batch", lambda n: _framed(b"s", b"", b"x" * 50_000)),
    "staged headers": (".txn/p/.put", lambda n: _put(headers={"h": "x" * 15_000}) + b"b"),
    "one byte": (".batch", lambda n: _framed(b"s", b"", b"b") * 200),
    "one byte each": ("s", lambda n: b"b"),
    "no byte": (".batch", lambda n: _framed(b"s", b"", b"") * 200),
}  # fmt: skip
KEPT = 1 << 20
TIMES = 4  # that the disk may have of a quota: man/mqfs.1


@pytest.mark.parametrize("way", WAYS)
def test_a_quota_of_kept_bytes_bounds_the_disk(tmp_path: Path, way: str) -> None:
    path, made = WAYS[way]
    with Server.at(tmp_path, "--limit", f"{ME} kept={KEPT}") as server, connection.connect(server.address) as client:
        client.mkdir("g")
        client.open("g/ctl", "w").write(b"replay all\nsync off\n")
        client.create("g/s").close()
        client.mkdir("g/.txn/p")
        file = client.open(f"g/{path}", "w")
        refused = False
        for written in range(0, 40 * KEPT, 100):
            try:
                file.write(made(written))
            except OverQuota:
                refused = True
                break
        used = _used(tmp_path)
        print(f"{way}: {used / KEPT:.2f} times the quota")
        assert refused
        assert KEPT / 8 < used < TIMES * KEPT


BODY = b"x" * 50_000
WAITING = {"s": BODY, ".put": _put() + BODY, ".batch": _framed(b"s", b"", BODY)}


@pytest.mark.parametrize("path", WAITING)
def test_a_quota_of_kept_bytes_bounds_writes_that_waited(tmp_path: Path, path: str) -> None:
    """All of them had room when they came."""
    with Server.at(tmp_path, "--limit", f"{ME} kept={KEPT}") as server, connection.connect(server.address) as client:
        client.mkdir("g")
        client.open("g/ctl", "w").write(b"replay all\nconsumer c backlog 1 full block\n")
        client.create("g/s").close()
        file, worker = client.open(f"g/{path}", "w"), client.open("g/.consumers/c", "r+")
        file.write(WAITING[path])
        waiting = [file.send(WAITING[path]) for _ in range(2 * KEPT // len(BODY))]
        refused = 0
        for wait in waiting:
            assert worker.receive()
            worker.write(b"ack\n")
            try:
                wait()
            except OverQuota:
                refused += 1
                break
        assert refused
        assert json.loads(client.open("g/.stats").receive())["streams"]["s"]["bytes"] <= KEPT
