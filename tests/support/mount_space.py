"""A mount namespace in which mount(8) finds our mount.mqfs, as on a machine where mqfs is installed."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import TracebackType

import pytest

from tests.support import ROOT
from tests.support.eventually import HANG_S, eventually

SBIN = os.path.realpath("/sbin")
HOLD = 'mount --bind "$1" "$2" && echo ready && exec cat'


def own_mounts(*options: str) -> list[str]:
    """Return the first words of a command that runs in a mount namespace of its own. `options`: of unshare(1).

    Skips the test in a chroot, whose root directory is not a mount point: mounts cannot be isolated there, and
    nsenter(1) would leave the chroot.
    """
    with open("/proc/self/mountinfo", encoding="utf-8") as table:
        if not any(line.split()[4] == "/" for line in table):
            pytest.skip("no name spaces of mounts: the root directory is no mount point, as in a chroot")
    return ["unshare", "--mount", *options]


class MountSpace:
    """A mount namespace. Its mounts are visible only in it, and are removed at the end. Needs root."""

    def __init__(self, folder: Path) -> None:
        programs = folder / "sbin"
        programs.mkdir()
        run = f"PYTHONPATH={shlex.quote(str(ROOT))} exec {shlex.quote(sys.executable)}"
        helper = programs / "mount.mqfs"
        helper.write_text(f'#!/bin/sh\n{run} -c "from mqfs.cli.mount_helper import main; main()" "$@"\n')
        helper.chmod(0o755)
        (programs / "mount.fuse.mqfs").symlink_to("mount.mqfs")
        command = [*own_mounts("--propagation", "slave"), "sh", "-c", HOLD, "sh", str(programs), SBIN]
        self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "ready\n"

    def run(self, *words: str | Path) -> tuple[int, str]:
        """Run a command in the namespace. Return its exit code and its output."""
        command = ["nsenter", "-m", "-t", str(self._holder.pid), *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, stdin=subprocess.DEVNULL)
        return done.returncode, done.stdout + done.stderr

    def path(self, path: Path) -> Path:
        """Return the path by which this process opens a path of the namespace."""
        return Path(f"/proc/{self._holder.pid}/root{path}")

    def servers(self) -> list[int]:
        """Return the processes that serve its mounts."""
        space, found = os.stat(f"/proc/{self._holder.pid}/ns/mnt").st_ino, []
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with contextlib.suppress(OSError):
                if pid != self._holder.pid and os.stat(f"/proc/{pid}/ns/mnt").st_ino == space:
                    found.append(pid)
        return found

    def close(self) -> None:
        with open(f"/proc/{self._holder.pid}/mountinfo", encoding="utf-8") as table:
            paths = [line.split()[4] for line in table if " fuse.mqfs " in line]
        for path in paths:
            self.run("umount", "-l", path)
        eventually(lambda: not self.servers(), "their servers end")
        self._holder.communicate()

    def __enter__(self) -> MountSpace:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
