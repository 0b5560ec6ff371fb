"""The server below a service manager: what it notifies, the watchdog, sockets that it is passed, the units."""

from __future__ import annotations

import fcntl
import math
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mqfs
from mqfs.ninep.client.connection import connect
from mqfs.server.service import Notices
from mqfs.store.group_commit import CommitThread
from tests.support import ROOT
from tests.support.eventually import HANG_S, eventually
from tests.support.server import COMMAND, Ready, Server, environment, run

UNITS = ROOT / "docs" / "howto" / "service"


# ---------------------------------------------------------------- notices


def test_life_is_sent_while_the_committer_proceeds() -> None:
    now, sent = 100.0, list[str]()
    notices = Notices(sent.append, 10, lambda: now)

    def tick(job: int | None) -> bool:
        nonlocal now
        now += 5
        sent.clear()
        notices.tick("serving", job)
        return "WATCHDOG=1" in sent

    jobs = None, None, 7, 7, 7, 8, 9, None
    assert [tick(job) for job in jobs] == [True, True, True, False, False, True, True, True]
    sent.clear()
    notices.tick("serving")
    assert sent == []  # not twice in half the time


def test_a_long_start_says_so_once_a_second() -> None:
    now, sent = 100.0, list[str]()
    notices = Notices(sent.append, math.inf, lambda: now)
    for done in range(30):
        notices.start(f"{done} of 30")
        now += 0.125
    assert sent == [f"STATUS={done} of 30\nEXTEND_TIMEOUT_USEC=60000000" for done in (0, 8, 16, 24)]


def test_the_committer_knows_whether_it_proceeds() -> None:
    results: list[object] = []
    thread = CommitThread(lambda job: job())
    ours, theirs = socket.socketpair()
    thread.request("later", lambda: None, results.append, 3_600)
    assert thread.progress() is None
    for number in (1, 2):
        thread.request("job", lambda: ours.recv(1) and None, results.append, 0)
        eventually(lambda number=number: thread.progress() == number, "it works")  # type: ignore[misc]
        theirs.send(b"x")
        eventually(lambda: thread.progress() is None, "it is idle")
    thread.stop()
    ours.close()
    theirs.close()


@pytest.fixture
def ready(tmp_path: Path) -> Iterator[Ready]:
    found = Ready(tmp_path)
    yield found
    found.close()


def test_what_the_service_manager_hears(tmp_path: Path, ready: Ready) -> None:
    """READY, groups, life, and of a reload its begin and end."""
    process = subprocess.Popen(
        [*COMMAND, "serve", "--listen", "unix!s"],
        cwd=tmp_path,
        env=environment(NOTIFY_SOCKET=ready.address, WATCHDOG_USEC="2000000"),
        stdin=subprocess.DEVNULL,
    )
    heard: list[str] = []

    def has(text: str) -> bool:
        heard.append(ready.next() or "")
        return any(re.fullmatch(text, one) for one in heard)

    try:
        for text in ("READY=1", "STATUS=serving 1 group", "WATCHDOG=1"):
            eventually(lambda text=text: has(text), text)  # type: ignore[misc]
        with connect(f"unix!{tmp_path}/s") as client:
            client.mkdir("a")
        eventually(lambda: has("STATUS=serving 2 groups"), "the number of groups")
        heard.clear()
        process.send_signal(signal.SIGHUP)
        eventually(lambda: has(r"RELOADING=1\nMONOTONIC_USEC=\d+"), "RELOADING")
        eventually(lambda: has("READY=1"), "READY after it")
        process.terminate()
        eventually(lambda: has("STOPPING=1"), "STOPPING")
        assert process.wait(HANG_S) == 0
    finally:
        process.kill()
        process.wait()


# ---------------------------------------------------------------- sockets that are passed

SHARE = """
import os, sys
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(sys.argv[1].split(":"))), LISTEN_FDNAMES=sys.argv[1])
os.execv(sys.executable, [sys.executable, "-m", "mqfs", "serve", *sys.argv[2:]])
"""


def passing(cwd: Path, names: str, sockets: list[socket.socket], *options: str) -> subprocess.Popen[str]:
    """A server that is passed these sockets, from descriptor 3 on."""
    numbers = [fcntl.fcntl(sock.fileno(), fcntl.F_DUPFD, 10) for sock in sockets]
    moves = "".join(f"os.dup2({number}, {3 + at}); " for at, number in enumerate(numbers))
    program = f"import os; {moves}\n{SHARE}"
    try:
        return subprocess.Popen(
            [sys.executable, "-c", program, names, *options], cwd=cwd, env=environment(), text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=numbers,
        )  # fmt: skip
    finally:
        for number in numbers:
            os.close(number)


def test_it_serves_at_sockets_that_it_is_passed(tmp_path: Path) -> None:
    """9P, HTTP and fq, each by its name. The files of the sockets stay."""
    sockets = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    for sock, name in zip(sockets, "9hf", strict=True):
        sock.bind(str(tmp_path / name))
        sock.listen()
    more = ["--http-qpubs", "--http-host", "mq.example", "--fq-group", "exchanges"]  # need --http and --fq, or these
    process = passing(tmp_path, "9p:http:fq", sockets, "--store", "store", *more)
    try:
        for sock in sockets:
            sock.close()
        with mqfs.connect(f"unix!{tmp_path}/9", transport="9p") as client:
            client.group("g", create=True, ctl=["replay all"]).publish("s", b"hello")
        for name in "hf":
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(str(tmp_path / name))
                sock.sendall(b"GET /.health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                assert b"HTTP/1.1 " in sock.recv(100)
        process.terminate()
        text = process.communicate(timeout=HANG_S)[0]
        assert process.returncode == 0, text
        assert f"9P at unix!{tmp_path}/9\n" in text
    finally:
        process.kill()
        process.wait()
    assert {"9", "h", "f"} <= set(os.listdir(tmp_path))


@pytest.mark.parametrize(
    ("name", "text"),
    [("mqfs.socket", "socket 'mqfs.socket': unknown name (expected FileDescriptorName=9p, http, fq)"),
     ("9p", "socket '9p': does not listen (expected ListenStream= and Accept=no)")],
)  # fmt: skip
def test_a_socket_that_is_no_such(tmp_path: Path, name: str, text: str) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        process = passing(tmp_path, name, [sock])
        assert (process.communicate(timeout=HANG_S)[0], process.returncode) == (f"mqfs: {text}\n", 2)


def test_sockets_of_another_process_are_not_taken(tmp_path: Path) -> None:
    with Server("--listen", "unix!s", cwd=tmp_path, LISTEN_PID="1", LISTEN_FDS="1", LISTEN_FDNAMES="9p"):
        connect(f"unix!{tmp_path}/s").close()


def test_it_is_started_by_its_first_client(tmp_path: Path) -> None:
    """By systemd's own program."""
    command = ["systemd-socket-activate", "-l", str(tmp_path / "s"), "--fdname=9p"]
    command += [f"--setenv={name}" for name in ("PYTHONPATH", "PATH")]
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(
            [*command, *COMMAND, "serve", "--store", "store"], cwd=tmp_path, env=environment(), stderr=log
        )
    try:
        eventually(lambda: (tmp_path / "s").is_socket(), "it listens")
        assert not (tmp_path / "store").exists()
        with connect(f"unix!{tmp_path}/s") as client:
            assert "ctl" in client.list()
        process.terminate()
        assert process.wait(HANG_S) == 0, (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()


# ---------------------------------------------------------------- the units


def analyze(*words: str) -> str:
    done = run(["systemd-analyze", *words], cwd=UNITS, env=environment(), text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout + done.stderr)


@pytest.mark.parametrize(("unit", "threshold"), [("mqfs.service", 20), ("mqfs-mount@.service", 40)])
def test_units(tmp_path: Path, unit: str, threshold: int) -> None:
    """They are valid, and as closed as they can be: a mount would not be seen out of a name space of its own."""
    copy = tmp_path / unit.replace("@.", "@a.")
    copy.write_text((UNITS / unit).read_text().replace("/usr/bin/mqfs", "/bin/true"))
    assert analyze("verify", "--man=no", str(copy)) == ""
    analyze("security", "--offline=true", f"--threshold={threshold}", str(copy))
