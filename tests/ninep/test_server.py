"""The server on real sockets: listening, identity, back-pressure, batches, standard input and output, the end."""

from __future__ import annotations

import gc
import os
import pwd
import socket
import stat
import traceback
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import trio

from mqfs import limits
from mqfs.clock import SystemClock
from mqfs.engine.tree.tree import Tree
from mqfs.errors import BadAddress, Denied, DiskFailed
from mqfs.net import identity
from mqfs.ninep.client import connection as blocking
from mqfs.ninep.codec.messages import Tread, Tversion, Twrite
from mqfs.ninep.codec.wire import encode
from mqfs.ninep.server.connection import Server
from mqfs.serving.accept import listen
from tests.support.eventually import HANG_S, eventually
from tests.support.ninep import (
    ME,
    FailingReader,
    FailingStore,
    Raw,
    Running,
    SlowStore,
    make_tree,
    open_handles,
    running,
)

NOT_ROOT = 65_534


# ---------------------------------------------------------------- listening


def test_socket_file(tmp_path: Path) -> None:
    listener = listen(f"unix!{tmp_path}/s", mode=0o640)
    assert stat.S_IMODE(os.stat(tmp_path / "s").st_mode) == 0o640
    with pytest.raises(BadAddress, match="in use by another server"):
        listen(f"unix!{tmp_path}/s")
    listener.close()
    assert not (tmp_path / "s").exists()
    listener.close()


def test_stale_socket_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(tmp_path / "s"))
    listen(f"unix!{tmp_path}/s").close()


def test_socket_of_a_successor_is_left_alone(tmp_path: Path) -> None:
    first = listen(f"unix!{tmp_path}/s")
    os.unlink(tmp_path / "s")
    second = listen(f"unix!{tmp_path}/s")
    first.close()
    assert (tmp_path / "s").exists()
    second.close()


def test_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("precious")
    with pytest.raises(BadAddress, match="not a socket"):
        listen(f"unix!{tmp_path}/s")
    assert (tmp_path / "s").read_text() == "precious"


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("unix!{}/none/s", "in a directory that does not exist"),
        ("tcp!0.0.0.0!0", "not a loopback address"),
        ("tcp!::!0", r"not a loopback address, and nothing is encrypted \(expected tls!HOST!PORT, or --insecure\)"),
        ("tls!0.0.0.0!0", r"no client is identified \(expected --token-file, --tls-client-ca or --insecure\)"),
        ("tcp!no-such-host.invalid!0", "not a loopback address"),
        ("unix!", "no path"),
        ("udp!x!1", "unknown network"),
    ],
)
def test_address_that_is_refused(tmp_path: Path, address: str, why: str) -> None:
    with pytest.raises(BadAddress, match=why):
        listen(address.format(tmp_path))


def test_off_loopback_if_told(tmp_path: Path) -> None:
    listen("tcp!0.0.0.0!0", insecure=True).close()
    listen("tls!0.0.0.0!0", insecure=True).close()
    listen("tls!0.0.0.0!0", identified=True).close()
    with pytest.raises(BadAddress, match="nothing is encrypted"):
        listen("tcp!0.0.0.0!0", identified=True)


def test_port_in_use() -> None:
    first = listen("tcp!127.0.0.1!0")
    with pytest.raises(BadAddress, match="in use by another server"):
        listen(str(first.address))
    first.close()


def test_tcp_user_that_does_not_exist(tree: Tree) -> None:
    with pytest.raises(BadAddress, match="unknown user"):
        Server(tree, tcp_user="nobody-of-that-name")


# ---------------------------------------------------------------- identity


def in_a_child(uid: int, work: Callable[[], None], gid: int | None = None, groups: list[int] | None = None) -> int:
    """Do something as another user, in a process of its own; its exit status."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            if groups is not None:
                os.setgroups(groups)
            os.setgid(uid if gid is None else gid)
            os.setuid(uid)
            work()
            status = 0
        except BaseException:
            traceback.print_exc()  # os._exit says nothing
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def open_to_all(server: Running) -> None:
    os.chmod(server.address.removeprefix("unix!"), 0o666)
    for folder in Path(server.address.removeprefix("unix!")).parents:
        if folder.stat().st_uid == 0 and not folder.stat().st_mode & 1:
            folder.chmod(folder.stat().st_mode | 0o11)


@pytest.mark.process
@pytest.mark.root
def test_peer_is_who_the_socket_says(server: Running) -> None:
    open_to_all(server)

    def attach(user: str) -> Callable[[], None]:
        return lambda: server.connect(user=user).close()

    assert in_a_child(NOT_ROOT, attach("")) == 0
    assert in_a_child(NOT_ROOT, attach(identity.user_name(NOT_ROOT))) == 0
    assert in_a_child(NOT_ROOT, attach("root")) != 0
    assert in_a_child(NOT_ROOT, attach("daemon")) != 0

    def make() -> None:
        with server.connect() as client, pytest.raises(Denied):
            client.mkdir("a")

    assert in_a_child(NOT_ROOT, make) == 0


@pytest.mark.process
@pytest.mark.root
def test_groups_are_those_of_the_process(server: Running) -> None:
    """Those it has dropped do not come back, those it was given are not missing, whatever the database says."""
    open_to_all(server)
    for name, gid in (("given", 4711), ("own", 4712), ("dropped", pwd.getpwuid(NOT_ROOT).pw_gid)):
        with server.connect() as client:
            client.create(name).close()
        stream = server.tree.find(ME, name)
        server.call(partial(server.tree.setattr, ME, stream, mode=0o660, gid=gid))

    def look() -> None:
        with server.connect() as client:
            client.open("given", "w").close()
            client.open("own", "w").close()
            with pytest.raises(Denied):
                client.open("dropped", "w")

    assert in_a_child(NOT_ROOT, look, 4712, [4711]) == 0


@pytest.mark.root
def test_root_attaches_as_anyone(server: Running) -> None:
    with server.connect(user="daemon") as client, pytest.raises(Denied):
        client.mkdir("a")
    with server.connect() as client:
        client.mkdir("a")


if os.getuid() != 0:  # the server's own user may act as anyone, as root may: but no more than the modes let it

    def test_own_user_attaches_as_anyone(server: Running) -> None:
        with server.connect(user="daemon") as client, pytest.raises(Denied):
            client.mkdir("a")


def test_tcp_acts_as_its_user(tree: Tree, tmp_path: Path) -> None:
    with (
        running(tree, tmp_path, tcp=True) as server,
        blocking.connect(f"tcp!127.0.0.1!{server.port}", user="root", timeout=HANG_S) as client,
    ):
        with pytest.raises(Denied):
            client.mkdir("a")
        assert "ctl" in client.list()


# ---------------------------------------------------------------- connections


def test_pipelined_writes_keep_their_order_and_leave_at_once(server: Running) -> None:
    with server.connect() as client:
        with client.open("ctl", "w") as ctl:
            ctl.write(b"replay all\n")
        client.create("s").close()
    sock = server.socket()
    raw = Raw(sock, "9P2000")
    raw.ask("Twalk tag 1 fid 0 newfid 1 names [s]")
    raw.ask("Topen tag 1 fid 1 mode 1")
    raw.send(*(f'Twrite tag {tag} fid 1 offset 0 data "{tag}"' for tag in range(100)))
    data = b""
    while len(data) < 100 * 11:  # a batch that takes longer leaves in portions
        data += sock.recv(1 << 20)
    assert len(data) == 100 * 11
    with server.connect() as client, client.open("s") as stream:
        assert [stream.receive(100) for _ in range(100)] == [str(tag).encode() for tag in range(100)]
    raw.close()


@pytest.mark.parametrize("offsets", [(0, 0, 0, 0), (0, 2, 4, 8_192)])
@pytest.mark.parametrize(("name", "mode"), [("s", 0), ("s", 2), ("view", 0), (".cursor", 2)])
def test_reads_sent_at_once_share_a_message(
    name: str, mode: int, offsets: tuple[int, ...], server: Running, tree: Tree
) -> None:
    with server.connect() as client, client.create("s") as stream, client.open("ctl", "w") as ctl:
        ctl.write(b"bind view s\n")
        raw = Raw(server.socket(), "9P2000")
        raw.ask(f"Twalk tag 1 fid 0 newfid 1 names [{name}]")
        raw.ask(f"Topen tag 1 fid 1 mode {mode}")
        counts = 2, 2, 100, 100
        reads = enumerate(zip(counts, offsets, strict=True))
        raw.send(*(f"Tread tag {tag} fid 1 offset {offset} count {count}" for tag, (count, offset) in reads))
        eventually(lambda: tree.waits.used == 4)
        stream.write(b"hello")
        stream.write(b"world")
        data = ["he", "ll", "o", "world"]
        assert [raw.reply() for _ in data] == [f'Rread tag {tag} data "{text}"' for tag, text in enumerate(data)]
        raw.close()


def test_bad_frame_ends_one_connection_only(server: Running) -> None:
    good, bad = Raw(server.socket(), "9P2000"), Raw(server.socket(), "9P2000")
    bad.socket.sendall(b"\xff" * 20)
    assert bad.reply() == "EOF"
    assert good.ask("Twalk tag 1 fid 0 newfid 1 names []") == "Rwalk tag 1 qids []"
    good.close()
    bad.close()


def test_client_that_goes_leaves_nothing(server: Running, tree: Tree) -> None:
    raw = Raw(server.socket(), "9P2000")
    raw.ask("Twalk tag 1 fid 0 newfid 1 names []")
    raw.ask("Tcreate tag 1 fid 1 name s perm 0666 mode 2")
    raw.send("Tread tag 5 fid 1 offset 0 count 10")
    eventually(lambda: tree.waits.used == 1)
    raw.close()
    eventually(lambda: (tree.waits.used, open_handles(tree), len(server.server.connections)) == (0, 0, 0))


@pytest.mark.slow
def test_client_that_does_not_read_is_held_up_and_nobody_else(server: Running, tree: Tree) -> None:
    body = 50_000
    asked = 400  # 20 MB of replies
    with server.connect() as client:
        with client.open("ctl", "w") as ctl:
            ctl.write(b"replay all\nsync off\n")
        with client.create("s", "r+") as stream:
            for _ in range(asked):
                stream.write(b"x" * body)
    sock = server.socket()
    sock.sendall(encode(Tversion(0xFFFF, limits.MSIZE_DEFAULT, "9P2000"), False))
    raw = Raw(sock)
    raw.reply()
    raw.ask('Tattach tag 0 fid 0 afid NOFID uname "" aname ""')
    raw.ask("Twalk tag 1 fid 0 newfid 1 names [s]")
    raw.ask("Topen tag 1 fid 1 mode 0")
    sock.settimeout(0.2)
    sent = b"".join(encode(Tread(tag, 1, 0, body), False) for tag in range(asked))
    sock.sendall(sent)
    with server.connect() as client:
        assert "s" in client.list()
        (held,) = (c for c in server.server.connections if c.session.fids.by_number.get(1) is not None)
        eventually(lambda: tree.memory.used >= limits.REPLY_BYTES)
        assert held.session.congested
        assert server.call(lambda: held.session.held) < limits.REPLY_BYTES + limits.MSIZE_DEFAULT
        sock.settimeout(HANG_S)
        for tag in range(asked):
            reply = raw.reply()
            assert reply.startswith(f"Rread tag {tag} data")
        assert "s" in client.list()
    raw.close()


def test_connections_are_bounded(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CONNECTIONS", 4)  # two of one user
    one, two = Raw(server.socket(), "9P2000"), Raw(server.socket(), "9P2000")
    three = Raw(server.socket())
    assert three.reply() == "EOF"
    two.close()
    eventually(lambda: len(server.server.connections) == 1)
    four = Raw(server.socket(), "9P2000")
    assert four.ask("Tclunk tag 1 fid 0") == "Rclunk tag 1"
    for raw in (one, three, four):
        raw.close()


def test_client_that_sends_no_more_hears_of_what_was_done(tmp_path: Path) -> None:
    """It closes its sending side while its write waits for the disk, and a read waits for a message."""
    store = SlowStore()
    tree = Tree(store, SystemClock(), owner=ME)
    with running(tree, tmp_path) as server:
        raw = Raw(server.socket(), "9P2000")
        raw.ask("Twalk tag 1 fid 0 newfid 1 names []")
        raw.ask("Tcreate tag 1 fid 1 name s perm 0666 mode 2")
        with server.connect() as other, other.open("ctl", "w") as ctl:
            ctl.write(b"replay all\n")
        store.slow = True
        raw.send('Twrite tag 5 fid 1 offset 0 data "x"', "Tread tag 6 fid 1 offset 0 count 9")
        raw.send("Tread tag 7 fid 1 offset 0 count 9")
        raw.socket.shutdown(socket.SHUT_WR)
        assert raw.reply() == 'Rread tag 6 data "x"'
        eventually(lambda: store.owed and tree.waits.used == 1)
        server.call(store.release)
        assert raw.reply() == "Rwrite tag 5 count 1"
        assert raw.reply() == "EOF"
        raw.close()


def test_large_replies_whole(server: Running, tree: Tree) -> None:
    """More than a socket takes at once, in pieces of every size."""
    body = os.urandom(limits.MESSAGE_BYTES)
    with server.connect(msize=limits.MSIZE_MOST) as writer, server.connect(msize=limits.MSIZE_MOST) as reader:
        with writer.open("ctl", "w") as ctl:
            ctl.write(b"replay all\n")
        with writer.create("s") as stream:
            for _ in range(5):
                stream.write(body)
        with reader.open("s") as stream:
            for _ in range(5):
                assert stream.receive() == body


def test_trace(tree: Tree, tmp_path: Path) -> None:
    lines: list[str] = []
    with running(tree, tmp_path, trace=lines.append) as server, server.connect() as client:
        assert "ctl" in client.list()
    assert lines[0].endswith("-> Tversion tag NOTAG msize 131096 version 9P2000")
    assert lines[1].endswith("<- Rversion tag NOTAG msize 131096 version 9P2000")
    assert any(" <- Rwalk " in line for line in lines)


# ---------------------------------------------------------------- the end


def test_stop_answers_who_waits(tree: Tree, tmp_path: Path) -> None:
    server = Running(tree, tmp_path)
    raw = Raw(server.socket(), "9P2000")
    raw.ask("Twalk tag 1 fid 0 newfid 1 names []")
    raw.ask("Tcreate tag 1 fid 1 name s perm 0666 mode 2")
    raw.send("Tread tag 5 fid 1 offset 0 count 10")
    eventually(lambda: tree.waits.used == 1)
    server.stop()
    assert raw.reply() == 'Rread tag 5 data ""'
    assert raw.reply() == "EOF"
    assert open_handles(tree) == 0
    assert not os.path.exists(server.address.removeprefix("unix!"))
    raw.close()


def send_for_ever(sock: socket.socket, data: bytes) -> None:
    while True:
        sock.sendall(data)


def test_stop_does_not_wait_for_a_client_that_does_not_read(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SHUTDOWN_S", 0.2)
    server = Running(tree, tmp_path)
    raw = Raw(server.socket(), "9P2000")
    raw.ask("Twalk tag 1 fid 0 newfid 1 names []")
    raw.ask("Tcreate tag 1 fid 1 name s perm 0666 mode 2")
    frames = [encode(Twrite(1, 1, 0, b"x" * 8000), False), encode(Tread(2, 1, 0, 8000), False)]
    raw.socket.settimeout(1.0)
    with pytest.raises(TimeoutError):
        send_for_ever(raw.socket, b"".join(frames))
    server.stop()
    raw.close()


def over_pipes(requests: bytes) -> bytes:
    """Serve one connection over two pipes until the client closes its end; what was answered."""
    tree = make_tree()

    async def serve() -> bytes:
        into, out = os.pipe(), os.pipe()
        server = Server(tree)
        async with trio.open_nursery() as nursery:
            await nursery.start(server.run)
            os.write(into[1], requests)
            os.close(into[1])
            await server.serve_descriptors(into[0], out[1])
            assert os.get_blocking(into[0])
            await server.stop()
        os.close(out[1])
        answered = os.read(out[0], 1 << 16)
        for descriptor in (into[0], out[0]):
            os.close(descriptor)
        return answered

    return trio.run(serve)


def test_over_pipes() -> None:
    asked = encode(Tversion(0xFFFF, 8192, "9P2000"), False)
    assert over_pipes(asked) == b"\x13\0\0\0\x65\xff\xff\0\x20\0\0\x06\x009P2000"
    assert over_pipes(b"") == b""


def test_a_client_that_goes_without_reading_gives_back_what_was_not_sent(tmp_path: Path) -> None:
    """What the system had taken for it may be lost; what the server still had is not."""
    tree, count, size = make_tree(), 12, 60_000
    with running(tree, tmp_path) as server, server.connect(msize=1 << 20) as client:
        with client.open("ctl", "w") as ctl:
            ctl.write(b"deliver one\n")
        with client.create("s") as stream:
            for _ in range(count):
                stream.write(bytes(size))
        gone = Raw(server.socket())
        gone.ask(f"Tversion tag NOTAG msize {1 << 20} version 9P2000")
        gone.ask('Tattach tag 0 fid 0 afid NOFID uname "" aname ""')
        for fid in range(1, count + 1):
            gone.ask(f"Twalk tag 1 fid 0 newfid {fid} names [s]")
            gone.ask(f"Topen tag 1 fid {fid} mode 2")
        for fid in range(1, count + 1):
            gone.send(f"Tread tag {fid} fid {fid} offset 0 count {size}")
        stream_node = tree.root.streams["s"]
        eventually(lambda: server.call(lambda: stream_node.own_consumer().counts.delivered) >= 8)
        gone.close()
        eventually(lambda: server.call(open_handles, tree) == 0)
        with client.open("s") as shown:
            back = len(list(iter(lambda: shown.receive(size), b"")))
        assert count - 6 <= back < count


def test_a_disk_that_fails_is_an_answer_and_a_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tree = Tree(FailingStore(), SystemClock(), owner=ME)
    with running(tree, tmp_path) as server, server.connect() as client:
        with client.open("ctl", "w") as ctl:
            ctl.write(b"replay all\n")
        with client.create("s") as stream:
            stream.write(b"x")
        FailingReader.failing = True
        try:
            with client.open("s") as stream:
                for _ in range(3):
                    with pytest.raises(DiskFailed):
                        stream.receive()
        finally:
            FailingReader.failing = False
        with client.open("s") as stream:
            assert stream.receive() == b"x"
    assert [(record.levelname, record.exc_info) for record in caplog.records] == [("ERROR", None)] * 3
    assert "Input/output error" in caplog.text


def test_a_connection_that_ended_leaves_nothing_for_the_garbage_collector(tmp_path: Path) -> None:
    """Which looks at everything only rarely, since all stands still meanwhile."""
    with running(make_tree(), tmp_path) as server:
        gc.disable()
        try:
            with server.connect() as client:
                client.create("s").close()
                (connection,) = server.call(lambda: [weakref.ref(one) for one in server.server.connections])
            eventually(lambda: connection() is None)
        finally:
            gc.enable()
