"""The Debian package: installed by apt on a machine whose disk is laid over this one's, booted, used, and purged.

Under MQFS_SOAK the same over a bare Debian of debootstrap, and it is looked at by lintian.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Container, Iterator
from pathlib import Path

import pytest

from tests.docs.test_package import package
from tests.support import ROOT
from tests.support.clone import clone
from tests.support.eventually import HANG_S, eventually
from tests.support.mount_space import own_mounts

pytestmark = [pytest.mark.root, pytest.mark.timeout(1_800)]
in_soak = pytest.mark.skipif(os.environ.get("MQFS_SOAK") != "1", reason="takes minutes: MQFS_SOAK=1")
CACHE = ROOT / ".cache" / "package"  # with the wheels of what mqfs needs, which the first run fetches
LAID_OVER = """
mount -t tmpfs none "$1" && cd "$1" && mkdir upper work root
mount -t overlay overlay -o "lowerdir=$3,upperdir=$1/upper,workdir=$1/work" root
mount --rbind /dev "$1/root/dev" && mount -t proc proc "$1/root/proc" && mount -t tmpfs none "$1/root/run"
mkdir -p "$1/root/media/deb" && cp "$2" "$1/root/media/deb/mqfs.deb"
rm -f "$1/root/var/lib/man-db/auto-update" # else man-db indexes every page of the system at each change of a package
echo ready && exec cat
"""
# A name space of everything, in which systemd is PID 1. /dev has what a container has, and fuse.
BOOTED = """
cd "$1" && mount --make-rprivate / && mount --bind . . && cd "$1"
mount -t proc proc proc && mount -t sysfs sysfs sys && mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=755 none run && mount -t tmpfs none tmp && mount -t tmpfs -o mode=755 none dev
for name in null zero full random urandom tty fuse; do touch dev/$name && mount --bind /dev/$name dev/$name; done
mkdir dev/pts dev/shm && mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
ln -s pts/ptmx dev/ptmx && ln -s /proc/self/fd dev/fd
mkdir -p .old && pivot_root . .old && umount -l .old
mount --make-rshared / # as at a boot: else name spaces of services keep what is unmounted
exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --unit=multi-user.target
"""
LEFT = ("opt/venvs", "etc/mqfs.toml", "usr/bin/mqfs", "usr/sbin/mount.mqfs", "lib/systemd/system/mqfs.service")


class Machine:
    """A root directory of its own, in a name space of mounts of its own."""

    def __init__(self, folder: Path, deb: Path, disk: Path = Path("/")) -> None:
        words = [*own_mounts(), "sh", "-ec", LAID_OVER, "sh", folder, deb, disk]
        self._holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._folder = folder
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "ready\n"

    @property
    def number(self) -> str:
        """The process that holds its name space."""
        return str(self._holder.pid)

    @property
    def root(self) -> str:
        return str(self._folder / "root")

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = ["nsenter", "-m", "-t", self.number, "chroot", self.root, *words]
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


class Booted:
    """A machine that runs: its units are in force."""

    def __init__(self, machine: Machine) -> None:
        apart = ("--mount", "--pid", "--fork", "--net", "--uts", "--ipc", "--cgroup")
        words = ["nsenter", "-m", "-t", machine.number, "unshare", *apart, "sh", "-ec", BOOTED, "sh", machine.root]
        self._process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        eventually(self._is_up, "it has booted")

    @property
    def first(self) -> str:
        """The number of its PID 1."""
        return Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().strip()

    def _is_up(self) -> bool:
        assert self._process.poll() is None, self._process.communicate()[0]
        return self.first != "" and self.run("systemctl", "is-active", "mqfs", codes=range(256)) == "active\n"

    def run(self, *words: str, codes: Container[int] = (0,)) -> str:
        command = ["nsenter", "-a", "-t", self.first, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
        if done.returncode not in codes:
            journal = self.run("journalctl", "--no-pager", "-n", "40", codes=range(256))
            raise AssertionError(f"{words}: {done.returncode}: {done.stdout}{done.stderr}{journal}")
        return done.stdout

    def main_pid(self, unit: str) -> int:
        return int(self.run("systemctl", "show", "-P", "MainPID", unit))

    def close(self) -> None:
        os.kill(int(self.first), signal.SIGKILL)
        self._process.communicate()


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


def test_its_units_under_a_real_pid_1(machine: Machine) -> None:
    """It serves at boot, reloads, restarts, is started again after a kill; a line of fstab and a unit mount; the
    journal has each line."""
    machine.run("apt-get", "install", "-y", "--no-install-recommends", "/media/deb/mqfs.deb")
    machine.run("mkdir", "-p", "/srv/mq", "/srv/two", "/etc/mqfs")
    with open(machine.path("etc/fstab"), "a") as fstab:
        fstab.write("/var/lib/mq /srv/mq mqfs default=replay\\040all,nofail 0 0\n")
    machine.path("etc/mqfs/two.toml").write_text('store = "/var/lib/two"\nmount = "/srv/two"\n')
    booted = Booted(machine)
    try:
        look_at_services(booted)
    finally:
        booted.close()


def look_at_services(booted: Booted) -> None:
    first = booted.main_pid("mqfs")
    with open(f"/proc/{booted.first}/root/etc/mqfs.toml", "a") as config:
        config.write('log-format = "json"\n')
    booted.run("systemctl", "reload", "mqfs")
    assert booted.main_pid("mqfs") == first, "a reload is no restart"
    booted.run("systemctl", "restart", "mqfs")
    second = booted.main_pid("mqfs")
    assert second != first
    booted.run("systemctl", "kill", "-s", "KILL", "mqfs")
    eventually(lambda: booted.main_pid("mqfs") not in (0, second) and is_active(booted, "mqfs"), "it is started again")
    booted.run("sh", "-ec", "cd /srv; echo hello >mq/s; mkdir mq/a; echo hello >mq/a/s; mq-cat -e mq/a | grep -x hello")
    assert is_active(booted, "srv-mq.mount"), "by its line of fstab, at boot"
    booted.run("systemctl", "restart", "srv-mq.mount")
    assert booted.run("mq-cat", "-e", "/srv/mq/a") == "hello\n"
    booted.run("systemctl", "stop", "srv-mq.mount")
    assert booted.run("findmnt", "/srv/mq", codes=[1]) == ""
    booted.run("systemctl", "start", "mqfs-mount@two")
    booted.run("systemctl", "kill", "-s", "KILL", "mqfs-mount@two")
    eventually(lambda: booted.run("ls", "/srv/two", codes=range(3)).startswith("ctl\n"), "it is mounted again")
    booted.run("systemctl", "stop", "mqfs-mount@two", "mqfs")
    assert booted.run("findmnt", "/srv/two", codes=[1]) == ""
    said = booted.run("journalctl", "-o", "cat", "-u", "mqfs")
    assert said.count("ready") == 3
    assert '"message": "ready"' in said, "with the format of the second start"
    assert booted.run("systemctl", "--failed", "--quiet", "--no-legend", "list-units", "*mq*") == ""


def is_active(booted: Booted, unit: str) -> bool:
    return booted.run("systemctl", "is-active", unit, codes=range(256)) == "active\n"


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
