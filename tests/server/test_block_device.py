"""The power is cut below a real file system while some write with `sync always`: nothing acknowledged is lost, nothing
is there that was not written."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import mqfs
from mqfs import ring
from mqfs.errors import MqfsError
from mqfs.ninep.client.connection import connect
from mqfs.store.check import check
from tests.support.campaign import seed, size, whole
from tests.support.eventually import HANG_S, eventually
from tests.support.mount_space import own_mounts
from tests.support.power import MAKE, MOUNT, PowerDisk, mount_point, mounted, run
from tests.support.server import Server, unmount

DISK_BYTES = 320 << 20  # xfs takes no less than 300 MiB
WAYS = ["mount", "9p"] + ["ring"] * (not ring.MISSING)
CUTS_A_STORE = 10  # then a new file system, so that a cut stays cheap

pytestmark = pytest.mark.root


class Writers:
    """Threads that write to streams of one group, each in a way of its own, and note what was sent and acknowledged."""

    def __init__(self, folder: Path, round_: int, ways: list[str]) -> None:
        self.folder, self.address, self.round = folder, f"unix!{folder}/s", round_
        self.sent: list[bytes] = []
        self.acknowledged: list[bytes] = []
        self.uncleared: list[bytes] = []  # of the group that is cleared again and again: acknowledged since
        self.cleared: set[bytes] = set()  # and what is gone, by an acknowledged `clear`
        self.ended: list[str] = []  # why each has
        self.threads = [
            threading.Thread(target=self._write, args=(getattr(self, f"_by_{way}"), n, f"g/s{n % 3}"))
            for n, way in enumerate(ways)
        ]
        self.threads.append(threading.Thread(target=self._write, args=(self._and_clear, 99, "cleared/s")))
        for thread in self.threads:
            thread.start()

    def _write(self, way: Callable[[int, str], None], number: int, path: str) -> None:
        try:
            way(number, path)
        except (MqfsError, OSError) as error:
            self.ended.append(f"{way.__name__} {number}: {error!r}")

    def _and_clear(self, number: int, path: str) -> None:
        with connect(self.address) as tree:
            stream, ctl = tree.open(path, "w"), tree.open("cleared/ctl", "w")
            for count, body in enumerate(self._bodies(number)):
                stream.write(body)
                self.uncleared.append(body)
                if count % 11 == 10:
                    before, self.uncleared = self.uncleared, []  # a clear may be done without an answer
                    ctl.write(b"clear\n")
                    self.cleared.update(before)

    def _bodies(self, number: int) -> Iterator[bytes]:
        for count in range(1_000_000):
            body = b"%d.%d.%d." % (self.round, number, count) + b"x" * (count * 37 % 900)
            self.sent.append(body)
            yield body

    def _by_mount(self, number: int, path: str) -> None:
        with open(self.folder / "mq" / path, "ab", buffering=0) as stream:
            for body in self._bodies(number):
                assert stream.write(body) == len(body)
                self.acknowledged.append(body)

    def _by_9p(self, number: int, path: str) -> None:
        with connect(self.address) as tree:
            stream = tree.open(path, "w")
            for body in self._bodies(number):
                stream.write(body)
                self.acknowledged.append(body)

    def _by_ring(self, number: int, path: str) -> None:
        group, _, stream = path.partition("/")
        with mqfs.connect(self.address, transport="ring", reconnect=False) as client:
            publish = client.group(group).publish
            for body in self._bodies(number):
                publish(stream, body, wait="committed")
                self.acknowledged.append(body)

    def join(self) -> None:
        for thread in self.threads:
            thread.join(HANG_S)
            assert not thread.is_alive()


def read_all(address: str, group: str) -> list[bytes]:
    found = []
    with connect(address) as tree:
        cursor = tree.open(f"{group}/.cursor", "r+")
        cursor.write(b"seek first\nuntil end\n")
        while body := cursor.read(1 << 20):
            found.append(body)
    return found


class Campaign:
    """A store whose disk loses its power again and again."""

    def __init__(self, kind: str, folder: Path, luck: random.Random) -> None:
        self.kind, self.folder, self.luck = kind, folder, luck
        self.durable = folder / "durable"
        for name in ("disk", "at", "mq"):
            (folder / name).mkdir()
        self.durable.touch()
        os.truncate(self.durable, DISK_BYTES)
        self.disk = PowerDisk(folder / "disk", self.durable, DISK_BYTES)
        self.done = self.total = 0  # cuts, messages acknowledged
        self.counts = dict.fromkeys(WAYS, 0)

    def store(self, cuts: int) -> None:
        """A new file system and store; the last look is after the last cut."""
        os.truncate(self.durable, 0)
        os.truncate(self.durable, DISK_BYTES)
        run(*MAKE[self.kind], self.durable)
        self.sent, self.acknowledged = set[bytes](), list[bytes]()
        self.last: Writers | None = None
        for left in range(cuts, -1, -1):
            self.disk.do("on")
            with (
                mount_point(self.folder / "at"),
                mounted(self.folder / "disk/disk", self.folder / "at", *MOUNT[self.kind]),
            ):
                self._check()
                server = Server(
                    *("--store", f"{self.folder}/at/store", "--listen", "unix!s", "--mount", "mq"),
                    cwd=self.folder,
                    program=[sys.executable, "-m", "tests.server.small_server"],
                )
                try:
                    if self.last is None:
                        self._prepare()
                    else:
                        self._look(self.last)
                    if left:
                        self._write_until_cut()
                finally:
                    server.kill()
                    unmount(self.folder / "mq")
                    if self.last is not None:
                        self.last.join()
                    eventually(self._is_dead, "nothing of the server is left")
                    assert server.process.returncode == -9, server.text()

    def _prepare(self) -> None:
        with connect(f"unix!{self.folder}/s") as tree:
            for path in ("g/s0", "g/s1", "g/s2", "cleared/s"):
                group = path.partition("/")[0]
                if group not in tree.list(""):
                    tree.mkdir(group)
                    tree.open(f"{group}/ctl", "w").write(b"replay all\n")
                tree.create(path).close()

    def _write_until_cut(self) -> None:
        ways = [self.luck.choice(WAYS) for _ in range(self.luck.choice([1, 4, 16]))]
        moment = round(len(ways) * 2 ** self.luck.uniform(1, 8))
        writers = self.last = Writers(self.folder, self.done, ways)
        eventually(lambda: bool(writers.ended) or len(writers.acknowledged) >= moment, f"{moment} acknowledged")
        assert not writers.ended, "before the cut"
        self.disk.do(f"cut {self.luck.randrange(1 << 30)}")
        self.done += 1
        for way in ways:
            self.counts[way] += 1

    def _is_dead(self) -> bool:
        """The keeper, and what was about to become it, have no power either."""
        store, found = b"%s\0" % os.fsencode(self.folder / "at/store"), False
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if store in (process / "cmdline").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)
                    found = True
        return not found

    def _check(self) -> None:
        if self.last is not None:
            lines: list[str] = []
            check(f"{self.folder}/at/store", report=lines.append)
            damage = [line for line in lines if not line.startswith("note: ") and ".idx " not in line]
            assert not damage, damage  # an index is never synced: a cut may tear it, and it is made again

    def _look(self, writers: Writers) -> None:
        self.sent.update(writers.sent)
        self.acknowledged += writers.acknowledged
        self.total += len(writers.acknowledged)
        found, uncleared = (read_all(f"unix!{self.folder}/s", group) for group in ("g", "cleared"))
        where = f"cut {self.done}"
        assert len(set(found)) == len(found), f"{where}: a message is there twice"
        assert self.sent.issuperset(found + uncleared), f"{where}: a message is there that was not written"
        missing = set(self.acknowledged) - set(found)
        assert not missing, f"{where}: {len(missing)} of {len(self.acknowledged)} lost: {min(missing)!r:.40}"
        newest: dict[bytes, int] = {}
        for body in found:
            round_, number, count, _ = body.split(b".")
            writer = round_ + b"." + number
            assert newest.get(writer, -1) < int(count), f"{where}: a writer's order is not kept"
            newest[writer] = int(count)
        assert set(uncleared) >= set(writers.uncleared), f"{where}: written after a clear, and gone"
        assert not writers.cleared & set(uncleared), f"{where}: cleared, and there"


def test_a_copy_of_a_mount_ends_with_it(tmp_path: Path) -> None:
    file, at = tmp_path / "file", tmp_path / "at"
    at.mkdir()
    file.touch()
    os.truncate(file, 16 << 20)
    run("mkfs.ext4", "-q", file)
    with contextlib.ExitStack() as stack:
        with mount_point(at), mounted(file, at):
            (at / "there").touch()
            # As ip-netns(8) begins a command.
            command = [*own_mounts("--propagation", "slave"), "sh", "-c", "echo ready; read end"]
            other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            stack.callback(other.communicate, b"\n")
            assert other.stdout is not None
            assert other.stdout.readline() == b"ready\n"
        assert not run("losetup", "--associated", file)


@pytest.mark.timeout(7_200)
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_power_is_cut(kind: str, tmp_path: Path) -> None:
    cuts, began = size(300) if whole() else 3, time.monotonic()
    campaign = Campaign(kind, tmp_path, random.Random(seed()))
    try:
        while campaign.done < cuts:
            campaign.store(min(CUTS_A_STORE, cuts - campaign.done))
    finally:
        campaign.disk.stop()
        print(
            f"{kind}: {campaign.done} cuts, {campaign.total} acknowledged, writers {campaign.counts},"
            f" {time.monotonic() - began:.0f} s"
        )
