"""The keeper, as a real process: what it holds over a kill of the server, for whom, and when it ends."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqfs import errors, limits, ring
from mqfs.ring.server import keeper_link
from mqfs.ring.server.keeper_link import KeeperLink
from tests.support.anyone import NOBODY, plain_environment, python_for_anyone
from tests.support.eventually import HANG_S, eventually
from tests.support.server import environment, keepers

pytestmark = pytest.mark.skipif(bool(ring.MISSING), reason=ring.MISSING)

SERVER = """
import sys, time
from mqfs import ring
from mqfs.ring.server.keeper_link import KeeperLink
link = KeeperLink(sys.argv[1])
for group in (3, 4):
    made = ring.create(1 << 16, generation=group * 10)
    made.publish(1, b"of group %d" % group)
    link.keep(group, group * 10, made.fileno())
print("kept", flush=True)
time.sleep(600)
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    """A folder, and no keeper of it is left behind."""
    folder = tmp_path / "store"
    folder.mkdir(mode=0o700)
    yield folder
    folder.mkdir(exist_ok=True)
    KeeperLink(str(folder)).quit()
    eventually(lambda: keepers(folder) == [], "the keeper is gone")


@pytest.fixture
def link(store: Path) -> Iterator[KeeperLink]:
    made = KeeperLink(str(store))
    yield made
    made.close()


def body_of(fd: int) -> bytes:
    """The first message of the ring behind it."""
    handle = ring.attach(fd)
    found = ring.scan(os.pread(fd, 4_096, ring._native.HEAD_BYTES))
    at, size = found.positions[0], found.bodies[0]
    handle.close()
    return os.pread(fd, size, ring._native.HEAD_BYTES + at + ring._native.RECORD_HEAD)


def taken(store: Path) -> dict[tuple[int, int], bytes]:
    held = KeeperLink.held(str(store))
    bodies = {name: body_of(fd) for name, fd in held.items()}
    for fd in held.values():
        os.close(fd)
    return bodies


def server(store: Path) -> subprocess.Popen[bytes]:
    """A process that keeps two rings, and is to be killed."""
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(store)], env=environment(), stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"kept\n"
    process.stdout.close()
    return process


def kill(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL) if os.getpgid(process.pid) == process.pid else process.kill()
    process.wait()


@pytest.mark.process
def test_rings_outlive_a_killed_server(store: Path, link: KeeperLink) -> None:
    assert KeeperLink.held(str(store)) == {}
    kill(server(store))
    wanted = {(3, 30): b"of group 3", (4, 40): b"of group 4"}
    assert taken(store) == wanted
    assert taken(store) == wanted  # giving is not giving away
    link.drop(3, 30)
    assert list(taken(store)) == [(4, 40)]
    link.quit()
    assert KeeperLink.held(str(store)) == {}
    assert list(store.iterdir()) == []


@pytest.mark.process
@pytest.mark.parametrize("answers", [True, False])
def test_a_keeper_that_does_not_answer_at_once(store: Path, monkeypatch: pytest.MonkeyPatch, answers: bool) -> None:
    """Its rings are waited for, and never taken for none."""
    kill(server(store))
    [keeper] = keepers(store)
    os.kill(keeper, signal.SIGSTOP)
    later = threading.Timer(2 * keeper_link.PATIENCE_S, os.kill, (keeper, signal.SIGCONT))
    later.start()
    monkeypatch.setattr(keeper_link, "ANSWER_S", HANG_S if answers else 0.1)
    if answers:
        assert taken(store) == {(3, 30): b"of group 3", (4, 40): b"of group 4"}
    else:
        with pytest.raises(errors.BadStore, match="does not answer"):
            taken(store)
    later.join()


@pytest.mark.process
def test_it_is_small_and_apart(store: Path, link: KeeperLink) -> None:
    """Its own session, nothing of ours open, little memory."""
    secret = os.open(store, os.O_RDONLY)
    os.set_inheritable(secret, True)
    made = ring.create(1 << 16)
    made.publish(1, b"it")
    link.keep(1, 1, made.fileno())
    assert os.stat(store / "keeper").st_mode & 0o777 == 0o600
    [pid] = keepers(store)
    assert taken(store)
    eventually(lambda: len(os.listdir(f"/proc/{pid}/fd")) == 7, "it has seen that we left")
    assert os.getsid(pid) == pid
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    targets = [os.readlink(f"/proc/{pid}/fd/{fd}").split(":")[0] for fd in os.listdir(f"/proc/{pid}/fd")]
    assert sorted(targets) == sorted(["/dev/null"] * 3 + [str(store), "/memfd", "socket", "socket"])
    status = Path(f"/proc/{pid}/status").read_text()
    assert int(status.split("VmRSS:")[1].split()[0]) < 12 << 10
    os.close(secret)
    link.quit()
    eventually(lambda: keepers(store) == [], "it ended")


@pytest.mark.process
def test_a_killed_keeper_is_noticed_and_told_again(
    store: Path, link: KeeperLink, caplog: pytest.LogCaptureFixture
) -> None:
    made = ring.create(1 << 16)
    made.publish(1, b"here")
    link.keep(1, 7, made.fileno())
    [old] = keepers(store)
    link.ensure_alive()
    assert keepers(store) == [old]
    os.kill(old, signal.SIGKILL)

    def another() -> bool:
        link.ensure_alive()
        return keepers(store) not in ([], [old])

    eventually(another, "there is another one")
    assert taken(store) == {(1, 7): b"here"}
    assert "keeper died" in caplog.text
    [old] = keepers(store)
    os.kill(old, signal.SIGKILL)
    link.keep(2, 1, made.fileno())  # noticed by being used
    assert set(taken(store)) == {(1, 7), (2, 1)}


@pytest.mark.process
def test_it_ends_with_the_store(store: Path) -> None:
    kill(server(store))
    assert len(keepers(store)) == 1
    shutil.rmtree(store)
    eventually(lambda: keepers(store) == [], "it ended")


@pytest.mark.process
def test_it_ends_when_it_holds_nothing_and_nobody_speaks_to_it(store: Path, link: KeeperLink) -> None:
    made = ring.create(1 << 16)
    link.keep(1, 1, made.fileno())
    link.drop(1, 1)
    assert len(keepers(store)) == 1
    link.close()
    eventually(lambda: keepers(store) == [], "it ended")
    assert list(store.iterdir()) == []


@pytest.mark.process
def test_a_renamed_store_keeps_its_keeper(store: Path) -> None:
    kill(server(store))
    moved = store.with_name("m" * 200)
    store.rename(moved)
    assert len(str(moved / "keeper")) > 108
    assert set(taken(moved)) == {(3, 30), (4, 40)}
    KeeperLink(str(moved)).quit()


@pytest.mark.process
def test_others_are_not_listened_to(store: Path) -> None:
    """Even where the folder's and the socket's modes would let them."""
    if os.getuid():
        pytest.skip("only root can be another user")
    python, path = python_for_anyone()
    kill(server(store))
    for folder in (store, *store.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/tmp"):
            folder.chmod(0o755)
        if folder == Path("/tmp"):
            break
    (store / "keeper").chmod(0o777)
    script = (
        "import socket, sys\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.settimeout(20)\n"
        "s.connect(sys.argv[1])\n"
        "try: s.send(b'list'); print(socket.recv_fds(s, 100, 4)[:2])\n"
        "except ConnectionError: print((b'', []))"
    )
    where = f"/proc/self/fd/{os.open(store, os.O_RDONLY | os.O_DIRECTORY)}/keeper" if len(str(store)) > 99 else ""
    command = [*NOBODY, python, "-c", script, where or str(store / "keeper")]
    passed = [int(where.split("/")[4])] if where else []
    done = subprocess.run(
        command, cwd="/", capture_output=True, text=True, pass_fds=passed, env=plain_environment(path), check=False
    )
    for fd in passed:
        os.close(fd)
    assert done.stdout == "(b'', [])\n", done.stderr
    assert len(taken(store)) == 2
    script = "import sys; from mqfs.ring.server.keeper_link import KeeperLink\nprint(KeeperLink.held(sys.argv[1]))"
    command = [*NOBODY, python, "-c", script, str(store)]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, env=plain_environment(path), check=False)
    assert done.stdout == "{}\n", done.stderr


@pytest.mark.process
def test_its_bound(
    store: Path, link: KeeperLink, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "RINGS", 2)
    made = ring.create(1 << 16)
    for generation in (1, 2, 3):
        link.keep(1, generation, made.fileno())
    assert len(KeeperLink.held(str(store))) == 2
    assert "rings will not survive a kill" in caplog.text


@pytest.mark.process
def test_noise(store: Path) -> None:
    """Noise that is no request is refused, and the keeper still holds its rings."""
    kill(server(store))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        folder = os.open(store, os.O_RDONLY)
        sock.connect(f"/proc/self/fd/{folder}/keeper")
        sock.settimeout(HANG_S)
        for noise in (b"keep", b"keep 1.1", b"x" * 200, b"\0", b"drop"):
            sock.send(noise)
            assert sock.recv(200).startswith(b"no:") or noise == b"drop"
        socket.send_fds(sock, [b"nothing"], [folder] * 3)
        assert sock.recv(200).startswith(b"no:")
        os.close(folder)
    assert len(taken(store)) == 2
    [pid] = keepers(store)
    eventually(lambda: len(os.listdir(f"/proc/{pid}/fd")) <= 8, "nothing of it stays open")


def test_without_a_folder_it_says_so_and_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    link, made = KeeperLink(str(tmp_path / "none")), ring.create(1 << 16)
    link.keep(1, 1, made.fileno())
    link.keep(2, 1, made.fileno())
    link.ensure_alive()
    link.quit()
    assert caplog.text.count("no fd keeper") == 1


@pytest.mark.process
def test_a_server_with_thousands_of_descriptors(store: Path, link: KeeperLink) -> None:
    """Those that it hands to its keeper have numbers that select(2) does not bear."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    null = os.open(os.devnull, os.O_RDONLY)
    many = [os.dup(null) for _ in range(1_100)]
    try:
        made = ring.create(1 << 16, generation=30)
        made.publish(1, b"of group 3")
        link.keep(3, 30, made.fileno())
        link.ensure_alive()
        assert taken(store) == {(3, 30): b"of group 3"}
    finally:
        for fd in (null, *many):
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
