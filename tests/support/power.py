"""File systems on a disk whose power can be cut. Needs root."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support import ROOT
from tests.support.eventually import HANG_S, eventually
from tests.support.server import environment

MAKE = {"ext4": ["mkfs.ext4", "-q", "-F", "-O", "^metadata_csum_seed"], "xfs": ["mkfs.xfs", "-q", "-f"]}
# nouuid: the previous file system may still be mounted in another namespace
MOUNT = {"ext4": ["-o", "noauto_da_alloc,commit=1"], "xfs": ["-o", "nouuid"]}


def run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout.strip()


def unmount(at: Path) -> None:
    """Unmount, with retries while a process still uses the mount."""
    eventually(lambda: subprocess.run(["umount", at], check=False, capture_output=True).returncode == 0, "unmounted")


@contextlib.contextmanager
def mount_point(at: Path) -> Iterator[None]:
    """Make a folder a shared mount point, so that unmounts reach other mount namespaces, which begin as copies of ours.
    Else a file system would stay mounted there, and write to a disk that has another file system by then."""
    run("mount", "--bind", at, at)
    try:
        run("mount", "--make-shared", at)
        yield
    finally:
        unmount(at)


@contextlib.contextmanager
def mounted(file: Path, at: Path, *options: str) -> Iterator[None]:
    """Mount a file system in a file, within the block. The loop device is removed with the mount."""
    device = run("losetup", "--find", "--show", file)
    try:
        run("mount", *options, device, at)
        try:
            yield
        finally:
            unmount(at)
    finally:
        run("losetup", "--detach", device)
        eventually(lambda: not run("losetup", "--associated", file), "the loop device to go")


class PowerDisk:
    """The process that serves the disk."""

    def __init__(self, folder: Path, durable: Path, size: int) -> None:
        command = [sys.executable, "-m", "tests.support.block_device", str(folder), str(durable), str(size)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert self._says() == "ready"

    def _says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def do(self, what: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        assert self._says() == what.split()[0]

    def stop(self) -> None:
        self.process.communicate(timeout=HANG_S)
