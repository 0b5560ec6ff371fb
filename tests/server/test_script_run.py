"""A newcomer's first minutes: a fresh copy, script/run, a shell beside it, kill -9, and again.

Under MQFS_SOAK the copy's virtual environment is made from nothing too, as on a fresh machine.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import urllib.error
import urllib.request
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


def addresses(server: pexpect.spawn, folder: Path) -> str:
    """The URL of the page. The other addresses that it says are these of the folder."""
    said = str(server.before)
    assert f"  files    file://{folder}/mq\r\n" in said
    assert f"  9P       unix!{folder}/mqfs.sock\r\n" in said
    return re.findall(r"  browser  (http://127\.0\.0\.1:\d+/)\r\n", said)[0]


@contextlib.contextmanager
def script_run(folder: Path) -> Iterator[pexpect.spawn]:
    with shell(folder, "exec script/run") as server:
        server.expect(r"Ready:\r\n", timeout=START_S)
        server.expect("Ctrl-C here ends the server")
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
        url = addresses(server, folder)
        user.sendline("mkdir mq/a && echo hi >mq/a/s")
        user.sendline("cat mq/a/s")
        user.expect("\r\nhi\r\n")
        browser = urllib.request.Request(url, headers={"Accept": "text/html"})
        with urllib.request.urlopen(browser, timeout=HANG_S) as page:
            assert b"<html" in page.read()
        assert urllib.request.urlopen(f"{url}a/t", b"by http", timeout=HANG_S).status == 201
        assert (folder / "mq/a/.kept/t").read_bytes() == b"by http"
        settings = (folder / "mq/a/ctl").read_text().splitlines()
        assert {"replay all", "depth 256M"} <= set(settings)
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


@pytest.mark.parametrize("port", ["http", "65536", "-1", " 80", "8080/tcp"])
def test_a_port_that_is_none(folder: Path, port: str) -> None:
    """One line, before anything is installed or made."""
    before = sorted(os.listdir(folder))
    known = {**os.environ, "MQFS_PORT": port}
    done = subprocess.run(["script/run"], cwd=folder, env=known, capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"script/run: MQFS_PORT '{port}': not a port (expected 0 to 65535)\n"
    assert sorted(os.listdir(folder)) == before


@pytest.mark.timeout(900)
def test_without_a_usable_fuse_device(folder: Path, tmp_path: Path) -> None:
    """It says so and serves the rest; the lines it prints work as they stand."""
    script = folder / "script" / "run"
    script.write_text(script.read_text().replace("/dev/fuse", str(tmp_path / "absent")))
    with shell(folder, "exec script/run") as server:
        server.expect("nothing is mounted", timeout=START_S)
        server.expect(r"In another shell, in this directory:\r\n", timeout=START_S)
        lines = [server.readline().strip() for _ in range(2)]
        with shell(folder) as user:
            for line in lines:
                user.sendline(line)
            user.expect("hi")
            user.expect(r"\r\nhi")
        with connect(f"unix!{folder / 'mqfs.sock'}") as client:
            assert "a" in client.list()
        interrupt(server)
    assert not mounted(folder / "mq")


@pytest.mark.timeout(900)
def test_two_beside_each_other(tmp_path: Path) -> None:
    """The second has another port; what its arguments say wins."""
    one, two = (installed(clone(tmp_path / name)) for name in ("one", "two"))
    with script_run(one) as first, shell(two, "exec script/run --default 'replay off' --tcp-user nobody") as second:
        second.expect("Ctrl-C here ends the server", timeout=START_S)
        urls = {addresses(first, one), addresses(second, two)}
        assert len(urls) == 2
        (two / "mq/a").mkdir()
        assert "replay off\n" in (two / "mq/a/ctl").read_text()
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(f"{addresses(second, two)}a/t", b"x", timeout=HANG_S)
        interrupt(second)
        interrupt(first)
