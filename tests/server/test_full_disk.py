"""A disk that is full below a real server: ring publishers get the error at once, and continue when there is
room."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mqfs
from mqfs import ring
from mqfs.errors import DiskFull
from mqfs.ninep.client.connection import connect
from mqfs.ninep.codec import messages as m
from mqfs.ninep.codec.wire import Dialect
from tests.http.web import Web
from tests.server.test_block_device import read_all
from tests.support.eventually import HANG_S, eventually
from tests.support.power import mount_point, mounted, run
from tests.support.server import Server, short_folder

DISK_BYTES = 48 << 20
AT_ONCE_S = 1.0  # that a publisher waits for its refusal

pytestmark = [pytest.mark.root, pytest.mark.skipif(bool(ring.MISSING), reason=ring.MISSING)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    file, at = tmp_path / "disk", tmp_path / "at"
    at.mkdir()
    file.touch()
    os.truncate(file, DISK_BYTES)
    run("mkfs.ext4", "-q", "-F", file)
    with mount_point(at), mounted(file, at):
        yield at


class Publisher:
    """A thread that publishes, each message again until it is accepted."""

    def __init__(self, address: str, name: str, wait: Any) -> None:
        self.address, self.name, self.wait = address, name, wait
        self.accepted: list[bytes] = []
        self.refused = 0
        self.longest_s = 0.0  # until a refusal
        self.error: BaseException | None = None
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            with mqfs.connect(self.address) as client:
                group = client.group("g")
                while not self.stop.wait(0.005):  # what was allocated before the disk is full is less than all of it
                    body = b"%s.%d." % (self.name.encode(), len(self.accepted)) + b"x" * 20_000
                    while not (done := self._publish(group, body)) and not self.stop.wait(0.05):
                        pass
                    self.accepted += [body] * done
        except BaseException as error:
            self.error = error

    def _publish(self, group: Any, body: bytes) -> bool:
        began = time.monotonic()
        try:
            group.publish("s", body, wait=self.wait)
        except DiskFull:
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            self.refused += 1
            return False
        return True

    def end(self) -> None:
        self.stop.set()
        self.thread.join(HANG_S)
        assert not self.thread.is_alive()
        assert self.error is None, repr(self.error)


def fill(path: Path) -> None:
    """All but what the log has allocated."""
    with open(path, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            os.fsync(file.fileno())


def stats(tree: Any) -> Any:
    return json.loads(tree.open("g/.stats", "r").read(1 << 20))


def lines(server: Server, what: str) -> list[str]:
    return [line for line in server.text().splitlines() if what in line]


def told(tree: Any) -> list[str]:
    """What `.errors` says of the disk."""
    text = tree.open("g/.errors", "r").read(1 << 16).decode()
    return [line for line in text.splitlines() if "no space left on device" in line]


def test_df_shows_the_disk_of_the_store_by_mount_and_over_9p(small_disk: Path, tmp_path: Path) -> None:
    (tmp_path / "mq").mkdir()
    with (
        Server("--store", str(small_disk / "store"), "--listen", "unix!s", "--mount", "mq", cwd=tmp_path),
        connect(f"unix!{tmp_path}/s", dialect=Dialect.LINUX) as client,
    ):
        (small_disk / "ballast").write_bytes(bytes(5 << 20))
        os.sync()
        request = m.Tstatfs(0, client.caller.root)
        nine: Any = client.answer(client.send([request])[0])
        found = nine.bsize, nine.blocks, nine.bfree, nine.bavail, nine.files, nine.ffree
        assert found == figures(small_disk) == figures(tmp_path / "mq")


def figures(path: Path) -> tuple[int, ...]:
    disk = os.statvfs(path)
    return disk.f_frsize, disk.f_blocks, disk.f_bfree, disk.f_bavail, disk.f_files, disk.f_ffree


def test_http_is_ready_on_a_full_disk_and_says_so(small_disk: Path) -> None:
    with short_folder() as folder:
        (small_disk / "store").mkdir()
        (folder / "store").symlink_to(small_disk / "store")
        web = Web(folder)
        with web.server:
            group = web.group("consumer c")
            web.put(f"{group}/s")
            assert web.post(f"{group}/s", "job").status == 201
            assert web.get("/.ready").json == {"status": "ok", "reasons": [], "warnings": []}
            fill(small_disk / "ballast")
            eventually(lambda: web.post(f"{group}/s", b"x" * 100_000).status == 507)
            full = web.get("/.ready")
            assert (full.status, full.json["status"], full.json["reasons"]) == (200, "ok", [])
            assert full.json["warnings"] == ["no space left on device: writes are refused until there is room"]
            (small_disk / "ballast").unlink()
            eventually(lambda: web.post(f"{group}/s", "job").status == 201)
            eventually(lambda: not web.get("/.ready").json["warnings"])


@pytest.mark.timeout(300)
def test_a_full_disk_refuses_who_publishes_through_a_ring_and_loses_nothing(small_disk: Path, tmp_path: Path) -> None:
    address = f"unix!{tmp_path}/s"
    server = Server("--store", str(small_disk / "store"), "--listen", "unix!s", cwd=tmp_path)
    try:
        with connect(address) as tree:
            tree.mkdir("g")
            tree.open("g/ctl", "w").write(b"replay all\nsync always\n")
            tree.create("g/s").close()
            for episode in (1, 2):
                tell(address, tree, small_disk / "ballast", episode)
                eventually(lambda: not stats(tree)["disk_full"])
                eventually(lambda e=episode: len(lines(server, "has room again")) == e)  # type: ignore[misc]
                assert len(told(tree)) == episode
                assert len(lines(server, "refused until there is room")) == episode, server.text()
                tree.open("g/ctl", "w").write(b"clear\n")
        assert "Traceback" not in server.text(), server.text()
    finally:
        (small_disk / "ballast").unlink(missing_ok=True)
        assert server.stop() == 0, server.text()


def tell(address: str, tree: Any, ballast: Path, episode: int) -> None:
    """Fill the disk while two publish, and give it room again."""
    eventually(lambda: _publishes_by_ring(address))
    publishers = [Publisher(address, name, wait) for name, wait in (("a", "committed"), ("b", "published"))]
    try:
        eventually(lambda: all(len(publisher.accepted) > 20 for publisher in publishers))
        fill(ballast)
        eventually(lambda: all(publisher.refused > 5 for publisher in publishers))
        with mqfs.connect(address, transport="ring") as client, pytest.raises(DiskFull, match="log has no room"):
            client.group("g").publish("s", b"never")
        eventually(lambda: len(told(tree)) == episode)
        assert stats(tree)["disk_full"]
        accepted = [len(publisher.accepted) for publisher in publishers]
        ballast.unlink()
        eventually(lambda: all(len(p.accepted) > n + 9 for p, n in zip(publishers, accepted, strict=True)))
    finally:
        for publisher in publishers:
            publisher.end()
    print([(p.name, len(p.accepted), p.refused, f"{p.longest_s:.3f} s") for p in publishers])
    assert all(publisher.longest_s < AT_ONCE_S for publisher in publishers)
    found = read_all(address, "g")
    assert max(Counter(found).values()) == 1, "a message is there twice"
    assert b"never" not in found
    for publisher in publishers:
        mine = [body for body in found if body.startswith(publisher.name.encode() + b".")]
        assert mine == publisher.accepted


def _publishes_by_ring(address: str) -> bool:
    try:
        with mqfs.connect(address, transport="ring") as client:
            client.group("g").publish("s", b"by ring")
    except DiskFull:
        return False  # what was cleared is given back soon
    return True
