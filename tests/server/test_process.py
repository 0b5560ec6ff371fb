"""The server as a process: readiness, signals, the configuration file, where it serves, what it leaves behind."""

from __future__ import annotations

import array
import fcntl
import os
import resource
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pexpect
import pytest

from mqfs import __version__, limits
from mqfs.ninep.client.connection import Client, connect
from mqfs.ninep.codec.messages import Rversion, Tread, Tversion
from mqfs.ninep.codec.wire import decode, encode
from mqfs.server.options import KINDS
from tests.support import ROOT
from tests.support.eventually import HANG_S, eventually, patient
from tests.support.ports import free_port
from tests.support.server import COMMAND, Ready, Server, environment, mounted, mqfs, run, unmount
from tests.support.shell import hang_up


def dial(cwd: Path, name: str = "s") -> str:
    return f"unix!{cwd / name}"


def keep(client: Client, group: str, *messages: bytes) -> None:
    """A group that keeps everything, and messages in its stream `s`."""
    client.mkdir(group)
    with client.open(f"{group}/ctl", "w") as ctl:
        ctl.write(b"replay all\n")
    with client.create(f"{group}/s") as stream:
        for message in messages:
            stream.write(message)


def test_version(tmp_path: Path) -> None:
    done = mqfs("--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"mqfs {__version__}\n")


def test_help_names_every_option_of_the_manual(tmp_path: Path) -> None:
    manual = (ROOT / "man" / "mqfs.1").read_text()
    shown = mqfs("serve", "--help", cwd=tmp_path).stdout
    for word in (*KINDS, "config"):
        assert f"--{word}" in shown
        assert f"Fl -{word}" in manual, word


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("promote", "store", "--wait", "1x"), "invalid duration '1x'"),
        (("promote", "store", "--wait", "0"), "'0' (expected more than 0)"),
        (("mount", "x", "y"), "invalid address 'x'"),
        (("mount", "unix!s", "y", "--patience", "1x"), "invalid duration '1x'"),
        (("bridge", "fsq", "folder", "x", "g"), "invalid address 'x'"),
        (("bridge", "fsq", "folder", "unix!s", "g", "--poll", "1x"), "invalid duration '1x'"),
        (("bridge", "fq", "localhost:1", "e", "p", "x", "--node", "127.0.0.1"), "invalid address 'x'"),
        (("bench", "--at", "x"), "invalid address 'x'"),
        (("mcp", "--at", "x"), "invalid address 'x'"),
        (("mcp", "--at", "tcp!h!x"), "invalid address 'tcp!h!x'"),
        (("spark", "verify", "g/s", "--at", "x"), "'x'"),
        (("restore", "file:///nowhere", "store", "--until", "x"), "--until 'x': invalid time"),
    ],
)
def test_a_wrong_command_line_is_2(tmp_path: Path, words: tuple[str, ...], why: str) -> None:
    done = mqfs(*words, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert why in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("abstract", [False, True])
def test_readiness(tmp_path: Path, abstract: bool) -> None:
    ready = Ready(tmp_path, abstract=abstract)
    said: list[str] = []
    process = subprocess.Popen(
        [*COMMAND, "serve", "--listen", "unix!s"],
        cwd=tmp_path,
        env=environment(NOTIFY_SOCKET=ready.address),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def heard(text: str) -> bool:
        said.append(ready.next() or "")
        return text in said

    try:
        eventually(lambda: heard("READY=1"), "READY=1")
        connect(dial(tmp_path)).close()
        process.terminate()
        eventually(lambda: heard("STOPPING=1"), "STOPPING=1")
        assert process.wait(HANG_S) == 0
    finally:
        process.kill()
        process.wait()
        ready.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order(tmp_path: Path, number: int) -> None:
    """Waiting readers get end-of-file; the socket's file and the lock are gone; written messages are there again."""
    with Server("--store", "store", "--listen", "unix!s", cwd=tmp_path) as server:
        client = connect(dial(tmp_path))
        keep(client, "a", b"hello\n")
        stream = client.open("a/s")
        assert stream.receive() == b"hello\n"
        with ThreadPoolExecutor(1) as threads:
            read = threads.submit(stream.receive)
            with connect(dial(tmp_path)) as other:
                eventually(lambda: b'"waiting": 1' in other.open("a/.stats").receive(65_536), "it waits")
            server.process.send_signal(number)
            assert read.result(HANG_S) == b""
        assert server.process.wait(HANG_S) == 0
        client.close()
    assert not (tmp_path / "s").exists()
    with Server("--store", "store", "--listen", "unix!s", cwd=tmp_path), connect(dial(tmp_path)) as client:
        assert client.open("a/s").receive() == b"hello\n"


def test_hangup_is_ignored_and_a_second_signal_does_no_harm(tmp_path: Path) -> None:
    with Server("--store", "store", "--listen", "unix!s", cwd=tmp_path) as server:
        server.process.send_signal(signal.SIGHUP)
        with connect(dial(tmp_path)) as client:
            keep(client, "a", b"x")
        for _ in range(5):
            server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(HANG_S) == 0
    check = mqfs("check", "store", cwd=tmp_path)
    assert check.returncode == 0, check.stdout + check.stderr


def test_without_a_store_it_says_so(tmp_path: Path) -> None:
    with Server("--listen", "unix!s", cwd=tmp_path) as server:
        assert "kept in memory" in server.text()
        with connect(dial(tmp_path)) as client:
            keep(client, "a", b"x")
            assert client.open("a/s").receive() == b"x"


def test_config_and_command_line(tmp_path: Path) -> None:
    """What the file says counts, what the command line says counts more."""
    (tmp_path / "mqfs.toml").write_text(
        'store = "from-file"\nlisten = ["unix!one", "unix!two"]\ndefault = "replay all"\ntrace = true\n'
    )
    with Server("--config", "mqfs.toml", "--store", "from-line", "--trace", "off", cwd=tmp_path) as server:
        assert (tmp_path / "from-line").is_dir()
        assert not (tmp_path / "from-file").exists()
        with connect(dial(tmp_path, "one")) as client:
            client.mkdir("a")
        with connect(dial(tmp_path, "two")) as client:
            assert b"replay all\n" in client.open("a/ctl").receive()
        assert "Tattach" not in server.text()


def test_defaults_are_of_new_groups(tmp_path: Path) -> None:
    lines = ["--default", "replay last", "--default", "depth 7"]
    with Server("--listen", "unix!s", *lines, cwd=tmp_path), connect(dial(tmp_path)) as client:
        client.mkdir("a")
        ctl = client.open("a/ctl").receive()
        assert b"replay last\n" in ctl
        assert b"depth 7\n" in ctl


def test_trace(tmp_path: Path) -> None:
    with Server("-D", "--listen", "unix!s", cwd=tmp_path) as server:
        connect(dial(tmp_path)).close()
        eventually(lambda: "Rattach" in server.text(), "a trace")
        assert "Tversion" in server.text()


def test_service_name(tmp_path: Path) -> None:
    """-s: a socket in the name space directory, which is made for its user alone."""
    space = tmp_path / "ns"
    with Server("-s", "mq", cwd=tmp_path, NAMESPACE=str(space)):
        assert space.stat().st_mode & 0o777 == 0o700
        with connect(f"unix!{space}/mq") as client:
            assert "ctl" in client.list()
    assert not (space / "mq").exists()


def test_socket_of_a_killed_server_is_replaced(tmp_path: Path) -> None:
    server = Server("--listen", "unix!s", cwd=tmp_path)
    server.kill()
    assert (tmp_path / "s").exists()
    with Server("--listen", "unix!s", cwd=tmp_path):
        connect(dial(tmp_path)).close()


def test_tcp(tmp_path: Path) -> None:
    address = f"tcp!127.0.0.1!{free_port()}"
    with Server("--listen", address, "--tcp-user", "root", cwd=tmp_path), connect(address) as client:
        assert "ctl" in client.list()


def test_standard_input_and_output(tmp_path: Path) -> None:
    """With nothing else asked for: 9P there, to the end of the input."""
    process = subprocess.Popen(
        [*COMMAND, "serve", "--store", "store"],
        cwd=tmp_path,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    request = encode(Tversion(0xFFFF, 8192, "9P2000.L"), False)
    out, log = process.communicate(request, timeout=HANG_S)
    assert decode(out, 0, len(out), False) == Rversion(0xFFFF, 8192, "9P2000.L")
    assert process.returncode == 0
    assert b"Traceback" not in log


def test_open_file_limit_is_raised(tmp_path: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Server("--listen", "unix!s", cwd=tmp_path) as server:
        limits = Path(f"/proc/{server.pid}/limits").read_text()
        (line,) = [line for line in limits.splitlines() if line.startswith("Max open files")]
        assert line.split()[3:5] == [str(hard), str(hard)]


def test_a_client_that_takes_nothing_does_not_hold_up_the_end(tmp_path: Path) -> None:
    with (
        Server("--store", "store", "--listen", "unix!s", cwd=tmp_path) as server,
        connect(dial(tmp_path)) as client,
    ):
        keep(client, "a", *[bytes(100_000)] * 40)
        stream = client.open("a/s")
        for tag in range(40):
            client.socket.sendall(encode(Tread(tag, stream.channel.fid, 0, 100_000), False))
        eventually(lambda: queued(client.socket) > 100_000, "replies that are not taken")
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < patient(limits.SHUTDOWN_S + 30)


def queued(sock: socket.socket) -> int:
    """Bytes that wait in a socket to be received."""
    number = array.array("i", [0])
    fcntl.ioctl(sock, termios.FIONREAD, number)
    return number[0]


def test_a_bug_in_maintenance_stops_nobody(tmp_path: Path) -> None:
    """It is logged, with its traceback once; the server serves on, and stops in order."""
    bug = "from mqfs.engine.tree.tree import Tree; Tree.tick = lambda tree: tree.no_such_thing"
    program = [sys.executable, "-c", f"{bug}; from mqfs.cli.main import main; main()", "serve"]
    server = Server("--store", "store", "--listen", "unix!s", cwd=tmp_path, program=program)
    eventually(lambda: server.text().count("periodic maintenance failed") > 1, "maintenance failed twice")
    with connect(dial(tmp_path)) as client:
        keep(client, "a", b"hello")
        assert client.open("a/s").receive() == b"hello"
    assert server.stop() == 0
    assert server.text().count("Traceback") == 1
    server.log.unlink()
    with Server("--store", "store", "--listen", "unix!s", cwd=tmp_path), connect(dial(tmp_path)) as client:
        assert client.open("a/s").receive() == b"hello"


# ---------------------------------------------------------------- the mount


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "mq"
    path.mkdir()
    yield path
    unmount(path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_unmounts(tmp_path: Path, mount: Path, number: int) -> None:
    """Also with readers that wait, which get end-of-file, and with a shell that stands in it."""
    with Server("--store", "store", cwd=tmp_path, mount=mount) as server:
        (mount / "a").mkdir()
        (mount / "a" / "s").touch()
        standing = subprocess.Popen(["sleep", "600"], cwd=mount / "a")
        readers = [subprocess.Popen(["cat", str(mount / "a" / "s")], stdout=subprocess.PIPE) for _ in range(3)]
        stats = mount / "a" / ".stats"
        eventually(lambda: '"waiting": 3' in stats.read_text(), "three readers wait")
        assert server.stop(number) == 0
        for reader in readers:
            assert reader.communicate(timeout=HANG_S)[0] == b""
        assert not mounted(mount)
        assert os.listdir(mount) == []
        assert standing.poll() is None
        standing.kill()
        standing.wait()


def test_mq_flags(tmp_path: Path, mount: Path) -> None:
    """-m, -s and -D as mq(4) has them: the mount, the service and the trace are of one tree."""
    space = tmp_path / "ns"
    with Server("-D", "-m", str(mount), "-s", "mq", cwd=tmp_path, NAMESPACE=str(space)) as server:
        (mount / "a").mkdir()
        with connect(f"unix!{space}/mq") as client:
            assert "a" in client.list()
        assert "Twalk" in server.text()
        assert server.stop() == 0


def test_unmounted_from_outside(tmp_path: Path, mount: Path) -> None:
    """Without another face there is nothing left to serve; the server ends in order."""
    with Server("--store", "store", cwd=tmp_path, mount=mount) as server:
        unmount(mount)
        assert server.process.wait(HANG_S) == 0


def test_unmounted_from_outside_9p_goes_on(tmp_path: Path, mount: Path) -> None:
    with Server("--listen", "unix!s", cwd=tmp_path, mount=mount) as server:
        unmount(mount)
        eventually(lambda: "unmounted" in server.text(), "a line in the log")
        with connect(dial(tmp_path)) as client:
            assert "ctl" in client.list()


def test_a_server_says_whether_its_mount_is_there_without_asking_it(tmp_path: Path, mount: Path) -> None:
    """The thread that answers serves the mount, too: it would wait for itself."""

    def ask(path: str) -> str:
        words = ["curl", "-s", "-m", str(HANG_S), "--unix-socket", "web", f"http://localhost{path}"]
        return subprocess.run(words, cwd=tmp_path, check=True, stdout=subprocess.PIPE, text=True).stdout

    with Server("--http", "unix!web", cwd=tmp_path, mount=mount) as server:
        for path in ("/.ready", "/v1/health", "/.health", "/.metrics", "/"):
            assert "is not mounted" not in ask(path)
        unmount(mount)
        eventually(lambda: "unmounted" in server.text(), "a line in the log")
        assert f"{mount} is not mounted" in ask("/.ready")


def test_a_server_in_a_terminal_ends_with_it(tmp_path: Path) -> None:
    """Closing it leaves neither server nor mount."""
    (tmp_path / "mq").mkdir()
    words = [*COMMAND[1:], "serve", "--store", "store", "--mount", "mq"]
    settings = {"cwd": str(tmp_path), "env": environment(), "timeout": HANG_S, "use_poll": True}
    terminal = pexpect.spawn(COMMAND[0], words, **settings)
    terminal.expect("ready")
    assert mounted(tmp_path / "mq")
    hang_up(terminal)
    eventually(lambda: os.waitpid(terminal.pid, os.WNOHANG)[0] == terminal.pid, "it to end")
    assert not mounted(tmp_path / "mq")


def test_a_server_under_nohup_stays(tmp_path: Path) -> None:
    words = [*COMMAND, "serve", "--listen", f"unix!{tmp_path}/s"]
    terminal = pexpect.spawn("nohup", words, cwd=str(tmp_path), env=environment())
    eventually(lambda: (tmp_path / "s").exists(), "its socket")
    hang_up(terminal)
    with connect(f"unix!{tmp_path}/s") as client:
        assert client.list() != []
    os.kill(terminal.pid, signal.SIGTERM)
    eventually(lambda: os.waitpid(terminal.pid, os.WNOHANG)[0] == terminal.pid, "it to end")


def test_a_forked_process_ends_beside_an_idle_pool_of_threads(tmp_path: Path) -> None:
    """As Python does: tests/support/forked.py ends it."""
    program = "from concurrent.futures import ThreadPoolExecutor as Pool; pool = Pool(); pool.submit(print, 'done')"
    done = run([sys.executable, "-c", program], cwd=tmp_path, env=environment(), text=True)
    assert (done.returncode, done.stdout) == (0, "done\n")
