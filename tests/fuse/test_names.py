"""Names and attributes through a real mount."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mqfs.errors import MqfsError
from tests.fuse.served_by import Child, Served, libc
from tests.fuse.test_data import drain, sh
from tests.support.campaign import size
from tests.support.eventually import HANG_S, eventually

FILES = {"ctl", "order", ".cursor", ".put", ".batch", ".stats", ".who", ".errors"}
FOLDERS = {".consumers", ".kept", ".txn"}


def refused(number: int, call: object, *words: object) -> None:
    with pytest.raises(OSError) as caught:
        call(*words)  # type: ignore[operator]
    assert caught.value.errno == number, caught.value


def test_a_group_has_its_files(mq: Path) -> None:
    assert {path.name for path in mq.iterdir()} == FILES | FOLDERS
    (mq / "sub").mkdir()
    (mq / "s").touch()
    assert sorted(os.listdir(mq)) == sorted(FILES | FOLDERS | {"sub", "s"})
    with os.scandir(mq) as entries:
        found = {entry.name: (entry.is_dir(follow_symlinks=False), entry.inode()) for entry in entries}
    assert found["sub"] == (True, (mq / "sub").stat().st_ino)
    assert found["s"] == (False, (mq / "s").stat().st_ino)


def test_inode_numbers_stay_and_differ(mq: Path) -> None:
    (mq / "s").touch()
    with open(mq / "s") as one, open(mq / "s") as two:
        numbers = {os.stat(mq / "s").st_ino, os.fstat(one.fileno()).st_ino, os.fstat(two.fileno()).st_ino}
    assert len(numbers) == 1
    assert len({path.stat().st_ino for path in mq.iterdir()}) == len(FILES | FOLDERS) + 1


def test_making_and_removing(mq: Path) -> None:
    (mq / "g").mkdir()
    refused(errno.EEXIST, os.mkdir, mq / "g")
    (mq / "g" / "s").touch()
    refused(errno.ENOTEMPTY, os.rmdir, mq / "g")
    refused(errno.EEXIST, os.open, mq / "g" / "s", os.O_CREAT | os.O_EXCL)
    refused(errno.EISDIR, os.unlink, mq / "g")
    refused(errno.ENOTDIR, os.rmdir, mq / "g" / "s")
    refused(errno.ENOENT, os.unlink, mq / "nothing")
    for name in (".dot", "ctl2\udcff"):
        refused(errno.EINVAL, os.mkdir, mq / name)
    os.mknod(mq / "n")
    refused(errno.EPERM, os.mkfifo, mq / "f")
    os.unlink(mq / "ctl")
    assert (mq / "ctl").exists()
    assert sh("rm -r g", mq) == ""
    assert not (mq / "g").exists()


def test_removed_files_have_no_links(mq: Path) -> None:
    (mq / "g").mkdir()
    (mq / "s").touch()
    stream, group = os.open(mq / "s", os.O_RDONLY), os.open(mq / "g", os.O_RDONLY)
    assert (os.fstat(stream).st_nlink, os.fstat(group).st_nlink) == (1, 5)
    os.unlink(mq / "s")
    os.rmdir(mq / "g")
    assert (os.fstat(stream).st_nlink, os.fstat(group).st_nlink) == (0, 0)
    assert os.read(stream, 10) == b""
    os.close(stream)
    os.close(group)


def test_rename(mq: Path) -> None:
    (mq / "a").write_text("x")
    (mq / "b").touch()
    (mq / "g").mkdir()
    refused(errno.EEXIST, os.rename, mq / "a", mq / "b")
    refused(errno.EPERM, os.rename, mq / "a", mq / "g" / "a")
    os.rename(mq / "a", mq / "c")
    assert drain(mq / "c") == [b"x"]
    for flags, number in ((1, errno.EEXIST), (2, errno.EINVAL), (4, errno.EINVAL)):
        done = libc.renameat2(-100, os.fsencode(mq / "c"), -100, os.fsencode(mq / "b"), flags)
        assert (done, ctypes.get_errno()) == (-1, number)
    assert libc.renameat2(-100, os.fsencode(mq / "c"), -100, os.fsencode(mq / "d"), 1) == 0
    os.rename(mq / "g", mq / "h")
    assert "ctl" in os.listdir(mq / "h")


def test_what_there_is_not(mq: Path) -> None:
    (mq / "s").touch()
    refused(errno.EPERM, os.link, mq / "s", mq / "t")
    refused(errno.EPERM, os.symlink, "s", mq / "t")
    refused(errno.EOPNOTSUPP, os.setxattr, mq / "s", "user.a", b"b")
    refused(errno.EOPNOTSUPP, os.getxattr, mq / "s", "user.a")
    refused(errno.EOPNOTSUPP, os.listxattr, mq / "s")
    fd = os.open(mq / "s", os.O_WRONLY)
    os.posix_fallocate(fd, 0, 10)
    os.close(fd)
    assert drain(mq / "s") == []


def test_getcwd_holds_while_others_look_at_the_group(mq: Path) -> None:
    (mq / "g").mkdir()
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            os.stat(mq / "g")
            os.listdir(mq / "g")

    program = "os.chdir(mq + '/g')\nfor i in range(500): assert os.getcwd() == mq + '/g'; os.stat('ctl')\nprint('ok')"
    with ThreadPoolExecutor(2) as threads:
        for _ in range(2):
            threads.submit(look)
        with Child(mq, program) as child:
            line = child.line()
            stop.set()
    assert line == "ok"


def test_a_listing_holds_while_entries_come_and_go(mq: Path) -> None:
    """A name that is there throughout is listed exactly once."""
    for i in range(300):
        (mq / f"stay{i:03}").touch()
    for i in range(300):
        (mq / f"go{i:03}").touch()
    directory = os.open(mq, os.O_RDONLY)
    buffer = ctypes.create_string_buffer(4096)
    names: list[bytes] = []
    for turn in range(1000):
        got = libc.syscall(217, directory, buffer, 4096)  # getdents64
        if got <= 0:
            break
        at = 0
        while at < got:
            length = int.from_bytes(buffer.raw[at + 16 : at + 18], "little")
            names.append(buffer.raw[at + 19 : at + length].split(b"\0")[0])
            at += length
        if turn < 200:
            (mq / f"go{turn:03}").unlink()
            (mq / f"came{turn:03}").touch()
    os.close(directory)
    assert [name for name in names if name.startswith(b"stay")] == [b"stay%03d" % i for i in range(300)]
    assert len(names) == len(set(names))


def test_statfs(mq: Path) -> None:
    assert os.statvfs(mq).f_namemax == 255


def test_the_umask_is_applied_once(mq: Path) -> None:
    sh("umask 027; touch s; mkdir g; umask 077; : >t", mq)
    assert [oct((mq / name).stat().st_mode & 0o777) for name in "sgt"] == ["0o640", "0o750", "0o600"]
    (mq / "s").chmod(0o600)
    assert (mq / "s").stat().st_mode == 0o100600


AS_NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")


@pytest.mark.root
def test_the_server_decides_who_may_what(mq: Path) -> None:
    (mq / "s").write_text("x")
    (mq / "s").chmod(0o640)
    (mq / "g").mkdir(mode=0o700)
    for script, denied in (
        ("cat s", True),
        ("echo y >s", True),
        ("touch new", True),
        ("ls g", True),
        ("cat g/ctl", True),
        ("cd g", True),
        ("chmod 666 s", True),
        ("rm -f s", True),
        ("echo 'replay off' >ctl", True),
        ("truncate -s0 s", True),
        ("ls; cat ctl; stat s", False),
    ):
        done = subprocess.run(
            [*AS_NOBODY, "bash", "-c", script], cwd=mq, capture_output=True, text=True, timeout=HANG_S
        )
        assert (done.returncode != 0) == denied, script
        assert not denied or "ermission" in done.stderr or "ermitted" in done.stderr, done.stderr


@pytest.mark.root
def test_supplementary_groups_count(mq: Path) -> None:
    (mq / "s").write_text("x")
    os.chown(mq / "s", 0, 4711)
    (mq / "s").chmod(0o640)
    words = ["setpriv", "--reuid=65534", "--regid=65534", "--groups=4711", "head", "-c1", "s"]
    assert subprocess.run(words, cwd=mq, capture_output=True, timeout=HANG_S).stdout == b"x"
    assert (mq / "s").stat().st_gid == 4711


@pytest.mark.root
def test_what_nobody_makes_is_his(mq: Path) -> None:
    mq.chmod(0o777)
    script = "echo hi >s; mkdir g; umask 777; echo secret >t"
    done = subprocess.run([*AS_NOBODY, "bash", "-c", script], cwd=mq, capture_output=True, timeout=HANG_S)
    assert done.stderr == b""
    assert [(mq / name).stat().st_uid for name in "sgt"] == [65534, 65534, 65534]
    assert drain(mq / "t") == [b"secret\n"]  # its mode did not bind the one who made it


def test_who_names_the_process(mq: Path) -> None:
    program = "import threading\n"
    program += "def f():\n fd = os.open(mq + '/s', os.O_RDONLY); print(os.getpid()); input()\n"
    program += "t = threading.Thread(target=f); t.start(); t.join()"
    (mq / "s").touch()
    with Child(mq, program) as child:
        pid = child.line()
        assert f'"pid": {pid}' in (mq / ".who").read_text().replace('"pid":', '"pid": ').replace("  ", " ")


def test_tables_do_not_grow(mq: Path, served: Served) -> None:
    (mq / "s").touch()
    (mq / "g").mkdir()
    before = eventually(lambda: served.sizes())
    most = 0
    for i in range(size(100_000)):
        os.stat(mq / "s")
        if i % 1000 == 0:
            os.listdir(mq / "g")
            most = max(most, served.sizes()["nodes"])
    assert most < before["nodes"] + 100
    for _ in range(200):
        with open(mq / "s", "ab", buffering=0) as file:
            file.write(b"x")
    after = eventually(lambda: not (sizes := served.sizes())["files"] and sizes)
    for table in ("files", "listings", "waiting", "locks", "handles", "parked"):
        assert after[table] == before[table], table


def test_every_refusal_has_an_errno() -> None:
    for kind in MqfsError.__subclasses__():
        assert kind.errno > 0


def test_python_opens_every_file(mq: Path) -> None:
    (mq / "s").write_text("x")
    for name in FILES - {".cursor", ".put", ".batch"}:
        with open(mq / name, "rb", buffering=0) as file:
            os.set_blocking(file.fileno(), False)
            try:
                assert file.read(1) is not None or name == "order"
            except BlockingIOError:
                assert name == "order"
