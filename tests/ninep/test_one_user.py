"""The share of one user in the server, and that others have theirs: connections, waiting requests, memory.

Other users come over TCP here: there a user is a host.
"""

from __future__ import annotations

import os
import pwd
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqfs import limits
from mqfs.engine.tree.tree import Tree
from mqfs.net import identity
from mqfs.ninep.codec.messages import Tread, Tversion, Twrite
from mqfs.ninep.codec.wire import encode
from tests.support.eventually import HANG_S, eventually
from tests.support.ninep import Raw, Running, running


def over_tcp(server: Running, version: str = "") -> Raw:
    sock = socket.create_connection(("127.0.0.1", server.port))
    sock.settimeout(HANG_S)
    return Raw(sock, version)


@pytest.fixture
def shared(tree: Tree, tmp_path: Path) -> Iterator[Running]:
    with running(tree, tmp_path, tcp=True, tcp_user=identity.user_name(os.getuid())) as server:
        with server.connect() as client:
            client.create("s").close()
        yield server
        eventually(lambda: (tree.memory.used, tree.waits.used, tree.open_files.count) == (0, 0, 0))


def test_one_user_does_not_take_all_connections(shared: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CONNECTIONS", 32)
    theirs = [over_tcp(shared, "9P2000") for _ in range(16)]
    one_more = over_tcp(shared)
    assert one_more.reply() == "EOF"
    ours = [Raw(shared.socket(), "9P2000") for _ in range(16)]
    assert all(raw.ask("Tclunk tag 1 fid 0") == "Rclunk tag 1" for raw in (*theirs, *ours))
    for raw in (*theirs, one_more, *ours):
        raw.close()


@pytest.mark.parametrize("said", [[], ["Tversion tag NOTAG msize 8192 version 9P2000"]])
@pytest.mark.slow
def test_who_does_not_attach_is_let_go(shared: Running, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    monkeypatch.setattr(limits, "HANDSHAKE_S", 0.3)
    attached = Raw(shared.socket(), "9P2000")
    strangers = [Raw(shared.socket()) for _ in range(3)]
    for raw in strangers:
        raw.send(*said)
    for raw in strangers:
        assert all(raw.reply() != "EOF" for _ in said)
        assert raw.reply() == "EOF"
        raw.close()
    assert attached.ask("Tclunk tag 1 fid 0") == "Rclunk tag 1"
    attached.close()


def test_one_user_does_not_take_all_reads_that_wait(shared: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PARKED", 32)
    theirs, ours = over_tcp(shared, "9P2000"), Raw(shared.socket(), "9P2000")
    for raw in (theirs, ours):
        raw.ask("Twalk tag 1 fid 0 newfid 1 names [s]")
        raw.ask("Topen tag 1 fid 1 mode 0")
    theirs.send(*(f"Tread tag {tag} fid 1 offset 0 count 10" for tag in range(20)))
    assert [theirs.reply().split('"')[1] for _ in range(4)] == [
        "limit reached: too many reads and writes that wait (expected at most 16 a user, 32 in all)"
    ] * 4
    ours.send("Tread tag 7 fid 1 offset 0 count 10")
    ours.sync()
    theirs.close()
    eventually(lambda: shared.tree.waits.used == 1)
    with shared.connect() as client, client.open("s", "w") as stream:
        stream.write(b"x")
    assert ours.reply() == 'Rread tag 7 data "x"'
    ours.close()


@pytest.mark.slow
@pytest.mark.parametrize("request_", [Tread(0, 1, 0, 10), Twrite(0, 1, 0, b"x")], ids=["reads", "writes"])
def test_who_hangs_up_with_many_requests_waiting_holds_up_nobody(shared: Running, request_: Tread | Twrite) -> None:
    if isinstance(request_, Twrite):
        with shared.connect() as client, client.open("ctl", "w") as ctl:
            ctl.write(b"replay all\ndepth 1\nfull block\n")
    raw = Raw(shared.socket(), "9P2000")
    raw.ask("Twalk tag 1 fid 0 newfid 1 names [s]")
    raw.ask("Topen tag 1 fid 1 mode 2")
    count = limits.TAGS - 10
    raw.socket.sendall(b"".join(encode(request_._replace(tag=tag), False) for tag in range(2, count)))
    eventually(lambda: shared.tree.waits.used >= count - 3)
    with shared.connect() as client:
        raw.close()
        began = time.process_time()
        while shared.tree.waits.used:
            client.stat("s")
        assert time.process_time() - began < 1  # some 30 ms; it was four seconds


def test_half_requests_are_bounded_for_all_connections_of_a_user(
    shared: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "HELD_BYTES", 64 << 10)
    half = encode(Twrite(5, 1, 0, b"x" * 20_000), False)[:-1]
    theirs = [over_tcp(shared) for _ in range(3)]
    for raw in theirs:
        raw.send("Tversion tag NOTAG msize 65536 version 9P2000")
        raw.reply()
    theirs[0].socket.sendall(half)
    eventually(lambda: shared.tree.memory.used >= len(half))
    theirs[1].socket.sendall(half)
    assert theirs[1].reply() == "EOF"
    with shared.connect() as client, client.open("s", "w") as stream:
        stream.write(b"x" * 20_000)
    for raw in theirs:
        raw.close()
    eventually(lambda: shared.tree.memory.used == 0)
    assert "too many bytes in the server's memory (expected at most 32768 a user, 65536 in all)" in caplog.text


def test_fids_and_unfinished_lines_are_bounded_for_all_connections_of_a_user(
    shared: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shared.connect() as client, client.open("ctl", "w") as ctl:
        ctl.write(b"data line\n")
    monkeypatch.setattr(limits, "HELD_BYTES", 64 << 10)
    raw = over_tcp(shared, "9P2000")
    replies = [raw.ask(f"Twalk tag 1 fid 0 newfid {fid} names [s]") for fid in range(1, 40)]
    assert sum(reply.startswith("Rwalk") for reply in replies) == 31
    assert replies[-1].startswith('Rerror tag 1 ename "limit reached: too many bytes in the')
    for fid in range(1, 32):
        assert raw.ask(f"Tclunk tag 1 fid {fid}" if fid > 8 else f"Topen tag 1 fid {fid} mode 1").startswith("R")
    line = "x" * 7_000
    replies = [raw.ask(f'Twrite tag 1 fid {fid} offset 0 data "{line}"') for fid in range(1, 9)]
    assert [reply.split()[0] for reply in replies[:3]] == ["Rwrite"] * 3
    assert "limit reached" in replies[-1]
    raw.close()
    eventually(lambda: shared.tree.memory.used == 0)


def test_replies_to_who_does_not_read_are_bounded(shared: Running, tree: Tree) -> None:
    with shared.connect() as client:
        with client.open("ctl", "w") as ctl:
            ctl.write(b"replay all\nsync off\n")
        with client.open("s", "w") as stream:
            for _ in range(100):
                stream.write(b"x" * 100_000)
    asked = b"".join(encode(Tread(tag, 1, 0, 100_000), False) for tag in range(100))
    theirs = []
    for _ in range(10):
        sock = socket.create_connection(("127.0.0.1", shared.port))
        sock.sendall(encode(Tversion(0xFFFF, limits.MSIZE_DEFAULT, "9P2000"), False))
        theirs.append(raw := Raw(sock))
        raw.reply()
        raw.ask('Tattach tag 0 fid 0 afid NOFID uname "" aname ""')
        raw.ask("Twalk tag 1 fid 0 newfid 1 names [s]")
        raw.ask("Topen tag 1 fid 1 mode 0")
        sock.sendall(asked)
    eventually(lambda: all(c.session.congested for c in shared.server.connections))
    assert tree.memory.used < 10 * (limits.REPLY_BYTES + 2 * 100_000)
    for raw in theirs:
        raw.close()
    eventually(lambda: tree.memory.used == 0)


def test_a_slow_directory_service_holds_up_nobody_else(shared: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system is asked who a client is on a thread of its own, once in a while."""
    answered = threading.Event()

    at_once = pwd.getpwuid

    def ask(uid: int) -> pwd.struct_passwd:
        assert answered.wait(HANG_S)
        return at_once(uid)

    with shared.connect() as client:
        monkeypatch.setattr(pwd, "getpwuid", ask)
        identity._answers.clear()
        raw = Raw(shared.socket())
        raw.send("Tversion tag NOTAG msize 8192 version 9P2000")
        for _ in range(20):
            client.open("s").close()
        assert not answered.is_set()
        answered.set()
        assert raw.reply().startswith("Rversion")
        raw.close()
        monkeypatch.setattr(pwd, "getpwuid", None)  # for a while it is not asked again
        with shared.connect() as another:
            another.stat("s")
