"""A write to `ctl` that is done in portions is answered when it is done, over every face, whatever comes meanwhile."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import mqfs
from mqfs.errors import MqfsError
from mqfs.ninep.client.connection import Client, connect
from mqfs.ninep.codec.messages import Fcall, Rerror, Tclunk, Twrite
from mqfs.ninep.codec.wire import Dialect, Framer, decode
from tests.server.users import send
from tests.support.batches import frame
from tests.support.eventually import HANG_S, eventually
from tests.support.server import NO_FUSE, Server, can_mount, short_folder

pytestmark = pytest.mark.process

STREAMS = 300
Write = Callable[[Server, bytes], None]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """With a group of many streams, and a mount where there is /dev/fuse."""
    program = (sys.executable, "-m", "tests.server.portioned_server")
    with short_folder() as folder:
        ways = ("--http", f"unix!{folder}/web", "--default", "sync off")
        with Server.at(folder, *ways, mount=can_mount(), program=program) as server:
            with connect(server.address) as client:
                client.mkdir("g")
                for number in range(STREAMS):
                    client.create(f"g/t{number}").close()
            yield server


@pytest.fixture(autouse=True)
def filled(server: Server) -> None:
    """Each keeps a message."""
    with connect(server.address) as client, client.open("g/ctl", "w") as ctl, client.open("g/.batch", "w") as batch:
        ctl.write(b"replay all\nretries 5\n")
        batch.write(b"".join(frame(f"t{number}", b"x") for number in range(STREAMS)))
    assert kept(server) == STREAMS


def kept(server: Server) -> int:
    """How many messages there are in the group."""
    with connect(server.address) as client, client.open("g/.stats") as stats:
        return sum(row["messages"] for row in json.loads(b"".join(iter(stats.read, b"")))["streams"].values())


def to_mount(server: Server, data: bytes, flags: int = 0) -> None:
    if server.mount is None:
        pytest.skip(NO_FUSE)
    file = os.open(server.mount / "g/ctl", os.O_WRONLY | flags)
    try:
        assert os.write(file, data) == len(data)
    except BaseException:
        os.close(file)
        raise
    os.close(file)


def to_mount_at_close(server: Server, data: bytes) -> None:
    """An unfinished line is carried out, and refused, by close(2)."""
    to_mount(server, data.removesuffix(b"\n"))


def to_mount_without_waiting(server: Server, data: bytes) -> None:
    to_mount(server, data, os.O_NONBLOCK)


def over_9p(server: Server, data: bytes) -> None:
    with connect(server.address) as client, client.open("g/ctl", "w") as ctl:
        ctl.write(data)


def over_9p_without_waiting(server: Server, data: bytes) -> None:
    with connect(server.address, dialect=Dialect.LINUX) as client, client.open("g/ctl", "w", nonblocking=True) as ctl:
        ctl.write(data)


def answers(client: Client, *requests: Fcall) -> list[Fcall]:
    """To requests that are sent at once."""
    send(client, *requests)
    framer, found = Framer(1 << 20), list[Fcall]()
    while len(found) < len(requests):
        data = client.socket.recv(1 << 16)
        assert data, "the connection ended"
        found += [decode(buffer, start, size, False) for buffer, start, size in framer.frames(data)]
    return found


def over_9p_and_clunked(server: Server, data: bytes) -> None:
    """By one that does not wait for the answer before it closes the file."""
    with connect(server.address) as client:
        fid = client.open("g/ctl", "w").channel.fid
        found = {reply.tag: reply for reply in answers(client, Twrite(7, fid, 0, data), Tclunk(8, fid))}
        if isinstance(found[7], Rerror):
            raise MqfsError(found[7].ename)


def over_http(server: Server, data: bytes) -> None:
    with posting(server, data) as sock:
        head = sock.recv(1 << 16)
    assert head.startswith(b"HTTP/1.1 ")
    if not head.startswith(b"HTTP/1.1 2"):
        raise MqfsError(head.decode())


def posting(server: Server, data: bytes) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(HANG_S)
    sock.connect(f"{server.folder}/web")
    head = f"POST /g/ctl HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    sock.sendall(head.encode() + data)
    return sock


def by_library(server: Server, data: bytes) -> None:
    with mqfs.connect(server.address, transport="9p") as tree:
        tree.group("g", ctl=data.decode().splitlines())


WRITES = (
    to_mount, to_mount_at_close, to_mount_without_waiting, over_9p, over_9p_without_waiting, over_9p_and_clunked,
    over_http, by_library,
)  # fmt: skip


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_it_is_done_when_it_is_answered(server: Server, write: Write) -> None:
    write(server, b"clear\nretries 7\n")
    assert kept(server) == 0
    with connect(server.address) as client, client.open("g/ctl") as ctl:
        assert b"retries 7\n" in ctl.read(4_096)


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_a_refusal_arrives_behind_a_long_one(server: Server, write: Write) -> None:
    """Another's, which is under way."""
    with connect(server.address) as client:
        fid = client.open("g/ctl", "w").channel.fid
        send(client, *(Twrite(tag, fid, 0, b"clear\n") for tag in range(10)))
        with pytest.raises((OSError, MqfsError), match=r"No such file|does not exist|no consumer 'nobody'"):
            write(server, b"clear\nremove nobody\n")


def leave_http(server: Server) -> None:
    posting(server, b"clear\nretries 7\n").close()


def leave_9p(server: Server) -> None:
    client = connect(server.address)
    send(client, Twrite(7, client.open("g/ctl", "w").channel.fid, 0, b"clear\nretries 7\n"))
    client.socket.close()


def leave_mount(server: Server) -> None:
    """Killed while it writes."""
    if server.mount is None:
        pytest.skip(NO_FUSE)
    code = "import os, sys; os.write(os.open(sys.argv[1], os.O_WRONLY), b'clear\\nretries 7\\n')"
    child = subprocess.Popen([sys.executable, "-c", code, str(server.mount / "g/ctl")])
    eventually(lambda: child.poll() is not None or kept(server) < STREAMS, "it is at work")
    child.kill()
    child.wait()


@pytest.mark.parametrize("leave", [leave_http, leave_9p, leave_mount], ids=lambda leave: leave.__name__)
def test_it_is_done_though_its_client_leaves(server: Server, leave: Callable[[Server], None]) -> None:
    leave(server)
    eventually(lambda: kept(server) == 0, "all are cleared")
    with connect(server.address) as client, client.open("g/ctl") as ctl:
        assert b"retries 7\n" in ctl.read(4_096)


def test_a_signal_does_not_end_it(server: Server) -> None:
    """As of a regular file; what was done could not be known."""
    if server.mount is None:
        pytest.skip(NO_FUSE)
    file, rings, ended = os.open(server.mount / "g/ctl", os.O_WRONLY), list[int](), threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda number, _: rings.append(number))
    thread = threading.main_thread().ident
    assert thread is not None

    def ring() -> None:
        while not ended.wait(0.001):
            signal.pthread_kill(thread, signal.SIGUSR1)

    ringing = threading.Thread(target=ring)
    ringing.start()
    try:
        signal.siginterrupt(signal.SIGUSR1, True)
        assert os.write(file, b"clear\n") == 6
        assert rings
    finally:
        ended.set()
        ringing.join()
        signal.signal(signal.SIGUSR1, before)
        os.close(file)
    assert kept(server) == 0


def test_a_server_that_is_killed_has_done_all_or_nothing(tmp_path: Path) -> None:
    """At some moment of it."""
    program = (sys.executable, "-m", "tests.server.portioned_server")
    with short_folder() as folder, Server.at(folder, "--default", "sync off", program=program) as server:
        with connect(server.address) as client:
            client.mkdir("g")
            for number in range(STREAMS):
                client.create(f"g/t{number}").close()
        for delay in (0.0, 0.005, 0.01, 0.02, 0.04):
            with connect(server.address) as client, client.open("g/.batch", "w") as batch:
                ctl = client.open("g/ctl", "w")
                ctl.write(b"replay all\n")
                batch.write(b"".join(frame(f"t{number}", b"x") for number in range(STREAMS)))
                before = kept(server)
                with suppress(OSError):
                    send(client, Twrite(7, ctl.channel.fid, 0, b"clear\n"))
                time.sleep(delay)
                server.kill()
            server.start()
            assert kept(server) in (0, before)
