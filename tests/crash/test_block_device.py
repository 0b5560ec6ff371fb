"""The power is cut below a real file system while many write with `sync always`: nothing acknowledged is lost."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqfs.errors import MqfsError
from mqfs.ninep.blocking import connect
from mqfs.store.check import check
from tests.campaign import seed, size
from tests.server.process import ROOT, Running, environment, serving, until

MAKE = {"ext4": ["mkfs.ext4", "-q", "-F", "-O", "^metadata_csum_seed"], "xfs": ["mkfs.xfs", "-q", "-f"]}
MOUNT = {"ext4": ["-o", "noauto_da_alloc,commit=1"], "xfs": []}
DISK_BYTES = 320 << 20  # xfs takes no less than 300 MiB
WRITERS = 16

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="file systems cannot be mounted: needs root")


def run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout.strip()


@contextlib.contextmanager
def mounted(file: Path, at: Path, *options: str) -> Iterator[None]:
    """A file system in a file; the loop device goes with the mount."""
    device = run("losetup", "--find", "--show", file)
    try:
        run("mount", *options, device, at)
        try:
            yield
        finally:
            subprocess.run(["umount", at], check=False, capture_output=True)
    finally:
        run("losetup", "--detach", device)


class PowerDisk:
    """The process that is the disk."""

    def __init__(self, folder: Path, durable: Path) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "tests.crash.block_device", folder, durable, str(DISK_BYTES)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert self._says() == "ready"

    def _says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def cut(self, number: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"cut {number}\n")
        assert self._says() == "cut"

    def stop(self) -> None:
        self.process.communicate(timeout=30)


class Writers:
    """Threads that write to streams of one group, each over a connection of its own, and note what was acknowledged."""

    def __init__(self, address: str, round_: int) -> None:
        self.acknowledged: list[bytes] = []
        self.uncleared: list[bytes] = []  # of the group that is cleared again and again: acknowledged since
        self.cleared: set[bytes] = set()  # and what is gone, by an acknowledged `clear`
        self.threads = [threading.Thread(target=self._write, args=(address, round_, n)) for n in range(WRITERS)]
        self.threads.append(threading.Thread(target=self._write_and_clear, args=(address, round_)))
        for thread in self.threads:
            thread.start()

    def _write_and_clear(self, address: str, round_: int) -> None:
        with contextlib.suppress(MqfsError, OSError), connect(address) as tree:
            stream, ctl = tree.open("cleared/s", "w"), tree.open("cleared/ctl", "w")
            for count in range(1_000_000):
                body = b"%d.%d." % (round_, count) + b"x" * (count * 37 % 900)
                stream.write(body)
                self.uncleared.append(body)
                if count % 11 == 10:
                    before, self.uncleared = self.uncleared, []  # a clear may be done without an answer
                    ctl.write(b"clear\n")
                    self.cleared.update(before)

    def _write(self, address: str, round_: int, number: int) -> None:
        with contextlib.suppress(MqfsError, OSError), connect(address) as tree:
            stream = tree.open(f"g/s{number % 3}", "w")
            for count in range(1_000_000):
                body = b"%d.%d.%d." % (round_, number, count) + b"x" * (count * 37 % 900)
                stream.write(body)
                self.acknowledged.append(body)

    def join(self) -> None:
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()


def read_all(address: str, group: str) -> list[bytes]:
    found = []
    with connect(address) as tree:
        cursor = tree.open(f"{group}/.cursor", "r+")
        cursor.write(b"seek first\nuntil end\n")
        while body := cursor.read(1 << 20):
            found.append(body)
    return found


@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_power_is_cut(kind: str, tmp_path: Path) -> None:
    luck = random.Random(seed())
    durable, disk_at, at = tmp_path / "durable", tmp_path / "disk", tmp_path / "at"
    disk_at.mkdir()
    at.mkdir()
    durable.touch()
    os.truncate(durable, DISK_BYTES)
    run(*MAKE[kind], durable)
    with mounted(durable, at), serving("--store", "at/store", "--listen", "unix!s", cwd=tmp_path) as server:
        with connect(f"unix!{tmp_path}/s") as tree:
            for path in ("g/s0", "g/s1", "g/s2", "cleared/s"):
                group = path.partition("/")[0]
                if group not in tree.list(""):
                    tree.mkdir(group)
                    tree.open(f"{group}/ctl", "w").write(b"replay all\n")
                tree.create(path).close()
        server.stop()
    acknowledged: list[bytes] = []
    for round_ in range(size(30)):
        writers = _write_until_cut(kind, tmp_path, durable, luck, round_)
        acknowledged += writers.acknowledged
        with mounted(durable, at):
            lines: list[str] = []
            check(f"{at}/store", report=lines.append)
            damage = [line for line in lines if not line.startswith("note: ") and ".idx " not in line]
            assert not damage, damage  # an index is never synced: a cut may tear it, and it is made again
            with serving("--store", "at/store", "--listen", "unix!s", cwd=tmp_path):
                found, uncleared = read_all(f"unix!{tmp_path}/s", "g"), read_all(f"unix!{tmp_path}/s", "cleared")
            assert len(set(found)) == len(found), "a message is there twice"
            missing = set(acknowledged) - set(found)
            assert not missing, f"round {round_}: {len(missing)} of {len(acknowledged)} lost: {min(missing)!r:.40}"
            assert set(uncleared) >= set(writers.uncleared), "written after a clear, and gone"
            assert not writers.cleared & set(uncleared), "cleared, and there"


def _write_until_cut(kind: str, folder: Path, durable: Path, luck: random.Random, round_: int) -> Writers:
    """Serve the store on a disk whose power is cut at a random moment."""
    disk = PowerDisk(folder / "disk", durable)
    try:
        with mounted(folder / "disk/disk", folder / "at", *MOUNT[kind]):
            command = [sys.executable, "-m", "tests.crash.small_server"]
            server = Running("--store", "at/store", "--listen", "unix!s", cwd=folder, program=command)
            writers = Writers(f"unix!{folder}/s", round_)
            moment = luck.randint(1, 4_000)
            until(lambda: len(writers.acknowledged) >= moment, f"{moment} acknowledged", 120.0)
            disk.cut(luck.randrange(1 << 30))
            server.kill()
            writers.join()
    finally:
        disk.stop()
    return writers
