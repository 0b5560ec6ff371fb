"""A newcomer's first minutes: a fresh copy, script/run, a shell beside it, kill -9, and again.

Under MQFS_SOAK the copy's virtual environment is made from nothing too, as on a fresh machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

from mqfs.ninep.client.connection import connect
from tests.support.clone import clone, installed
from tests.support.eventually import HANG_S, eventually
from tests.support.server import mounted, unmount

START_S = 300


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    copy = clone(tmp_path / "mqfs")
    if os.environ.get("MQFS_SOAK") != "1":
        installed(copy)
    yield copy
    unmount(copy / "mq")


@contextlib.contextmanager
def shell(folder: Path, command: str = "") -> Iterator[pexpect.spawn]:
    """A terminal of its own, in the project's folder."""
    arguments = ["-c", command] if command else ["--norc", "--noprofile"]
    known = {**os.environ, "PS1": "$ ", "TERM": "dumb"}
    child = pexpect.spawn(
        "bash", arguments, cwd=str(folder), env=known, encoding="utf-8", timeout=HANG_S, use_poll=True
    )
    try:
        yield child
    finally:
        child.close(force=True)


@contextlib.contextmanager
def script_run(folder: Path) -> Iterator[pexpect.spawn]:
    with shell(folder, "exec script/run") as server:
        server.expect(r"Ready\. In another shell", timeout=START_S)
        server.expect("Ctrl-C ends it")
        yield server


def interrupt(server: pexpect.spawn) -> None:
    """Ctrl-C, as typed: it says that it stops, and ends with 0."""
    server.sendintr()
    server.expect("stopping")
    server.expect(pexpect.EOF)
    server.wait()
    assert server.exitstatus == 0


@pytest.mark.timeout(900)
def test_first_minutes(folder: Path) -> None:
    with script_run(folder) as server, shell(folder) as user:
        user.sendline("mkdir mq/a; echo 'replay all' >mq/a/ctl; echo hi >mq/a/s; cat mq/a/s")
        user.expect("\r\nhi\r\n")
        eventually(lambda: '"waiting": 1' in (folder / "mq/a/.stats").read_text(), "cat waits")
        user.sendintr()
        user.sendline("echo still $((40 + 2))")
        user.expect("still 42")
        assert (folder / "mqfs.sock").is_socket()
        server.kill(signal.SIGKILL)
        server.expect(pexpect.EOF)
    assert mounted(folder / "mq")
    with script_run(folder) as server, shell(folder) as user:
        user.sendline("head -n 1 mq/a/s")
        user.expect("\r\nhi\r\n")
        interrupt(server)
    assert not mounted(folder / "mq")
    assert not (folder / "mqfs.sock").exists()
    assert (folder / "store").is_dir()


@pytest.mark.timeout(900)
def test_without_a_usable_fuse_device(folder: Path, tmp_path: Path) -> None:
    """It says so and serves 9P; the lines it prints work as they stand."""
    script = folder / "script" / "run"
    script.write_text(script.read_text().replace("/dev/fuse", str(tmp_path / "absent")))
    with shell(folder, "exec script/run") as server:
        server.expect("serving 9P only", timeout=START_S)
        server.expect(r"Ready\. In another shell, in this directory, start (\S+) and try:\r\n", timeout=START_S)
        python = server.match[1]
        lines = [server.readline().strip() for _ in range(3)]
        with shell(folder, f"exec {python}") as user:
            for line in lines:
                user.sendline(line)
            user.expect(r"b'hi\\n'\r\n")
        with connect(f"unix!{folder / 'mqfs.sock'}") as client:
            assert "a" in client.list()
        interrupt(server)
    assert not mounted(folder / "mq")
