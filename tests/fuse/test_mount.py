"""Obstacles to a mount are reported in one line, and nothing is changed then."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from mqfs.clock import SystemClock
from mqfs.engine.tree.tree import Tree
from mqfs.errors import MountError
from mqfs.fuse import mount
from mqfs.model import User
from mqfs.store.memory import MemoryStore
from tests.fuse.served_by import Served
from tests.support.anyone import NOBODY, python_for_anyone
from tests.support.eventually import HANG_S


def complaint(path: Path) -> str:
    with pytest.raises(MountError) as caught:
        mount.check_mountpoint(str(path))
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_a_mount_point_is_an_empty_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "empty").mkdir()
    assert "expected an existing directory" in complaint(tmp_path / "missing")
    assert "not a directory" in complaint(tmp_path / "file")
    assert "not empty" in complaint(tmp_path / "full")
    assert mount.check_mountpoint(str(tmp_path / "empty")) == str(tmp_path / "empty")


def test_a_live_mount_is_left_alone(serve: Callable[..., Served]) -> None:
    served = serve()
    found = re.search(r"fuse.mqfs is mounted there by process (\d+) \(expected 'kill \1'", complaint(served.path))
    assert found is not None
    assert Path(f"/proc/{found[1]}/comm").read_text().startswith("python")
    assert (served.path / "ctl").exists()


def test_no_fuse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mount, "DEVICE", str(tmp_path / "fuse"))
    with pytest.raises(MountError, match="does not exist"):
        mount.check_device()


def test_who_may_allow_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "fuse.conf"
    monkeypatch.setattr(mount, "CONFIG", str(config))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert mount.others_allowed(None) is False
    config.write_text("#user_allow_other\n")
    with pytest.raises(MountError, match="user_allow_other"):
        mount.others_allowed(True)
    config.write_text("mount_max = 3\nuser_allow_other\n")
    assert mount.others_allowed(True) is True
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert [mount.others_allowed(wanted) for wanted in (None, True, False)] == [True, True, False]


def test_a_user_without_fusermount3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MountError, match="apt install fuse3"):
        mount.mount_as_user(str(tmp_path), allow_other=False, source="mqfs")


def test_a_name_with_blanks(tmp_path: Path) -> None:
    served = Served(tmp_path / "a b\\c")
    try:
        assert (served.path / "ctl").exists()
        assert mount.mounted(str(served.path)) == "fuse.mqfs"
    finally:
        assert served.stop() == 0
    assert mount.mounted(str(served.path)) == ""


@pytest.mark.parametrize("name", ["a\u00a0b", "a\fb", "a\rb"])
def test_a_name_with_what_python_takes_for_blanks(tmp_path: Path, name: str) -> None:
    served = Served(tmp_path / name)
    try:
        assert served.server.stop() == 0  # `served.stop` would unmount what stays
        assert str(tmp_path).encode() not in Path("/proc/self/mountinfo").read_bytes()
    finally:
        served.close()


@pytest.mark.root
def test_a_mount_that_another_covers_is_reported(tmp_path: Path) -> None:
    served = Served(tmp_path / "mq")
    try:
        subprocess.run(["mount", "-t", "tmpfs", "none", served.path], check=True)
        assert served.stop() == 0
        assert f"{served.path}: a dead mount stays" in served.complaints()
        assert f"(expected 'umount {served.path}')" in served.complaints()
    finally:
        served.close()


@pytest.fixture
def open_device() -> Iterator[None]:
    """The device as most systems have it: open to everyone."""
    if shutil.which("fusermount3") is None:
        pytest.skip("fusermount3 is missing: apt install fuse3")
    before = stat.S_IMODE(os.stat("/dev/fuse").st_mode)
    os.chmod("/dev/fuse", 0o666)
    yield
    os.chmod("/dev/fuse", before)


@pytest.mark.root
def test_an_ordinary_user_mounts_and_unmounts(open_device: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Also: what the user's dead server leaves, his next one cleans."""
    base = tmp_path_factory.mktemp("user")
    for path in (base, *base.parents[:-2]):
        path.chmod(path.stat().st_mode | 0o011)  # so that user nobody can come here
    home = base / "home"
    home.mkdir()
    (home / "mq").mkdir()
    for path in (home, home / "mq"):
        os.chown(path, 65534, 65534)
    python, packages = python_for_anyone()
    user = list(NOBODY)
    command = [*user, "env", f"PYTHONPATH={packages}", python, "-m", "tests.fuse.served", str(home / "mq")]
    shell = [*user, "bash", "-c"]
    dead = Served(home / "mq", command=command)
    dead.process.kill()
    dead.process.wait(HANG_S)
    served = Served(home / "mq", command=command)
    try:
        done = subprocess.run(
            [*shell, "echo 'replay all' >ctl; echo hi >s; head -n1 s"],
            cwd=home / "mq",
            capture_output=True,
            timeout=HANG_S,
        )
        assert (done.stdout, done.stderr) == (b"hi\n", b"")
    except PermissionError:  # root itself may not enter a user's mount
        done = subprocess.run(
            [*shell, f"cd {home}/mq; echo 'replay all' >ctl; echo hi >s; head -n1 s"],
            capture_output=True,
            timeout=HANG_S,
        )
        assert (done.stdout, done.stderr) == (b"hi\n", b"")
    with pytest.raises(PermissionError):
        os.listdir(home / "mq")
    assert served.stop() == 0
    assert mount.mounted(str(home / "mq")) == ""
    dead.close()


def test_a_mount_that_never_ran_is_taken_away(tmp_path: Path) -> None:
    async def run() -> None:
        tree = Tree(MemoryStore(), SystemClock(), owner=User(os.geteuid(), os.getegid()))
        fuse = mount.FuseMount(tree, str(tmp_path))
        await fuse.attach()
        assert mount.mounted(str(tmp_path)) == "fuse.mqfs"
        await fuse.stop()

    trio.run(run)
    assert mount.mounted(str(tmp_path)) == ""
