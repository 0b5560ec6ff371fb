"""The Debian package: installed by apt on a machine whose disk is laid over this one's, used, and purged.

Under MQFS_SOAK the same over a bare Debian of debootstrap, and it is looked at by lintian.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.test_package import package
from tests.support import ROOT
from tests.support.clone import clone
from tests.support.eventually import HANG_S, eventually

pytestmark = [pytest.mark.root, pytest.mark.timeout(1_800)]
in_soak = pytest.mark.skipif(os.environ.get("MQFS_SOAK") != "1", reason="takes minutes: MQFS_SOAK=1")
CACHE = ROOT / ".cache" / "package"  # with the wheels of what mqfs needs, which the first run fetches
LAID_OVER = """
mount -t tmpfs none "$1" && cd "$1" && mkdir upper work root
mount -t overlay overlay -o "lowerdir=$3,upperdir=$1/upper,workdir=$1/work" root
mount --rbind /dev "$1/root/dev" && mount -t proc proc "$1/root/proc" && mount -t tmpfs none "$1/root/run"
mkdir -p "$1/root/media/deb" && cp "$2" "$1/root/media/deb/mqfs.deb"
echo ready && exec cat
"""
LEFT = ("opt/venvs", "etc/mqfs.toml", "usr/bin/mqfs", "usr/sbin/mount.mqfs", "lib/systemd/system/mqfs.service")


class Machine:
    """A root directory of its own, in a name space of mounts of its own."""

    def __init__(self, folder: Path, deb: Path, disk: Path = Path("/")) -> None:
        words = ["unshare", "-m", "sh", "-ec", LAID_OVER, "sh", folder, deb, disk]
        self._holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._folder = folder
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "ready\n"

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = ["nsenter", "-m", "-t", str(self._holder.pid), "chroot", str(self._folder / "root"), *words]
        environ = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=pipe, stderr=subprocess.STDOUT, text=True
        )

    def run(self, *words: str, code: int = 0) -> str:
        """What a command prints, which ends with that code."""
        process = self.start(*words)
        said = process.communicate(timeout=HANG_S)[0]
        assert process.returncode == code, f"{words}: {process.returncode}: {said}"
        return said

    def path(self, path: str) -> Path:
        return Path(f"/proc/{self._holder.pid}/root{self._folder}/root/{path}")

    def close(self) -> None:
        self._holder.communicate()


@pytest.fixture(scope="module")
def deb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = package("deb", clone(tmp_path_factory.mktemp("source") / "mqfs"), CACHE)
    return Path(shutil.move(made, tmp_path_factory.mktemp("deb")))


@pytest.fixture
def machine(deb: Path, tmp_path: Path) -> Iterator[Machine]:
    found = Machine(tmp_path, deb)
    yield found
    found.close()


def use(machine: Machine) -> None:
    """Install it, serve as the unit does, mount as fstab does, ask the shell for a completion, purge it."""
    machine.run("apt-get", "install", "-y", "--no-install-recommends", "/media/deb/mqfs.deb")
    assert machine.run("mqfs", "--version").startswith("mqfs 0")
    assert "mqfs" in machine.run("getent", "passwd", "mqfs")
    assert machine.run("mqfs", "doctor", "/var/lib/mqfs").count("ok   ") > 6
    machine.run("mkdir", "/media/mq")
    machine.run("install", "-d", "-o", "mqfs", "/run/mqfs", "/var/lib/mqfs")  # as StateDirectory= and RuntimeDirectory=
    server = machine.start("setpriv", "--reuid=mqfs", "--regid=mqfs", "--init-groups", *unit_command())
    try:
        eventually(lambda: machine.path("run/mqfs/mqfs.sock").is_socket(), "it serves")
        machine.run("mount", "-t", "mqfs", "unix!/run/mqfs/mqfs.sock", "/media/mq")
        assert "replay all\n" in machine.run("cat", "/media/mq/ctl")
        machine.run("umount", "/media/mq")
    finally:
        server.terminate()
        said = server.communicate(timeout=HANG_S)[0]
    assert server.returncode == 0, said
    machine.run("mount", "-t", "mqfs", "-o", "default=replay all", "/var/lib/mq", "/media/mq")
    machine.run("sh", "-ec", "cd /media; mkdir mq/a; echo hello >mq/a/s; mq-cat -e mq/a | grep -x hello; umount mq")
    completion = (
        ". /usr/share/bash-completion/completions/mqfs; COMP_WORDS=(mqfs doc); COMP_CWORD=1; _mqfs_completion mqfs"
    )
    assert machine.run("bash", "-c", f'{completion}; echo "${{COMPREPLY[@]}}"') == "doctor\n"
    machine.run("dpkg", "--purge", "mqfs")
    assert [name for name in LEFT if os.path.lexists(machine.path(name))] == []
    assert machine.path("var/lib/mqfs/mqfs").exists()


def unit_command() -> list[str]:
    text = (ROOT / "docs" / "howto" / "service" / "mqfs.service").read_text()
    found = re.search(r"^ExecStart=(.*)$", text, re.MULTILINE)
    assert found is not None
    return found[1].split()


def test_installed_used_and_purged(machine: Machine) -> None:
    use(machine)


@pytest.fixture
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The disk of a Debian with nothing but what apt needs, of where this one gets its packages."""
    disk = tmp_path_factory.mktemp("bare")
    release = dict(line.split("=") for line in Path("/etc/os-release").read_text().splitlines())["VERSION_CODENAME"]
    targets = ["apt-get", "indextargets", "--format", "$(REPO_URI)", f"Codename: {release}", "Component: main"]
    mirror = subprocess.run(targets, check=True, capture_output=True, text=True).stdout.split()[0]
    words = ["debootstrap", "--variant=minbase", "--include=ca-certificates", release, disk, mirror]
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout[-2_000:] + done.stderr
    for path in (
        "etc/resolv.conf",
        *(f"etc/apt/apt.conf.d/{path.name}" for path in Path("/etc/apt/apt.conf.d").glob("99*")),
    ):
        shutil.copy(f"/{path}", disk / path)
    return disk


@in_soak
def test_on_a_bare_debian(bare: Path, deb: Path, tmp_path: Path) -> None:
    machine = Machine(tmp_path, deb, bare)
    try:
        machine.run("apt-get", "update")
        use(machine)
    finally:
        machine.close()


@in_soak
def test_it_is_a_good_package(deb: Path) -> None:
    """lintian, but for what is overridden with a reason."""
    done = subprocess.run(
        ["lintian", "--fail-on", "error,warning", "--no-tag-display-limit", deb], capture_output=True, text=True,
        timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
