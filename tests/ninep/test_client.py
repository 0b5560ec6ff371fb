"""Both clients against a real server, in all three dialects: what they do, what they keep, what they raise."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mqfs import errors, limits
from mqfs.clock import SystemClock
from mqfs.engine.tree.tree import Tree
from mqfs.model import Qid, Stat
from mqfs.ninep.client import connection as blocking
from mqfs.ninep.client.machine import Channel, ClientMachine
from mqfs.ninep.codec.messages import Rclunk, Rflush, Rread, Rwrite, Tclunk, Tflush, Tread, Tstat, Twalk, Twrite
from mqfs.ninep.codec.wire import Dialect, Framer, decode, encode
from mqfs.store.replication import Entry
from mqfs.store.store import DiskStore
from tests.support.copied import follow
from tests.support.eventually import HANG_S, eventually, patient
from tests.support.ninep import ME, META, Running, running
from tests.support.server import mqfs


@pytest.fixture(params=list(Dialect), ids=lambda dialect: dialect.version)
def dialect(request: pytest.FixtureRequest) -> Any:
    return request.param


def replay_all(one: blocking.Client, group: str) -> None:
    one.mkdir(group)
    with one.open(f"{group}/ctl", "w") as ctl:
        ctl.write(b"replay all\n")


# ---------------------------------------------------------------- the blocking client


def test_blocking(server: Running, tree: Tree, dialect: Dialect) -> None:
    with server.connect(dialect=dialect) as one, server.connect(dialect=dialect) as two:
        replay_all(one, "a")
        with one.open("a/ctl") as ctl:
            assert "replay all" in ctl.read(4096).decode()
        writer = one.create("a/s")
        assert writer.write(b"hi\n") == 3
        reader = two.open("a/s", "rb")
        assert reader.receive() == b"hi\n"
        answers: list[bytes] = []
        waiting = threading.Thread(target=lambda: answers.append(reader.receive()))
        waiting.start()
        eventually(lambda: tree.waits.used == 1)
        writer.write(b"more")
        waiting.join(HANG_S)
        assert answers == [b"more"]
        assert one.list("a") == [*META, "s"]
        found = one.stat("a/s")
        assert (found.name, stat.S_ISREG(found.mode), found.uid) == ("s", True, os.getuid())
        assert stat.S_ISDIR(one.stat("a").mode)
        assert stat.S_ISDIR(one.stat("").mode)
        one.chmod("a/s", 0o600)
        one.rename("a/s", "t")
        assert stat.S_IMODE(one.stat("a/t").mode) == 0o600
        one.remove("a/t")
        assert reader.receive() == b""
        reader.close()
        writer.close()
        one.remove("a")
        assert "a" not in two.list()


def test_blocking_errors(server: Running, dialect: Dialect) -> None:
    with server.connect(dialect=dialect) as one:
        one.mkdir("a")
        for wrong, kind in (
            (lambda: one.open("none"), errors.NotFound),
            (lambda: one.open("a/none/x"), errors.NotFound),
            (lambda: one.mkdir("a"), errors.Exists),
            (lambda: one.open("a", "w"), errors.IsDirectory),
            (lambda: one.open("a/order", "w"), errors.Denied),
            (lambda: one.rename("a", "ctl"), errors.MqfsError),
            (lambda: one.open("a", "rw+"), errors.BadRequest),
        ):
            with pytest.raises(kind):
                wrong()
        one.create("a/s").close()
        with pytest.raises(errors.NotEmpty):
            one.remove("a")
        with one.open("a/s", "w") as stream, pytest.raises(errors.TooLong):
            stream.write(bytes(limits.MSIZE_DEFAULT))
        assert len(server.server.connections) == 1
        (connection,) = server.server.connections
        assert list(connection.session.fids.by_number) == [0]


def test_what_was_begun_is_not_mixed_up_with_what_is_asked_meanwhile(server: Running) -> None:
    """Its tag is free again when its reply is there, also where no caller asked for that yet."""
    with server.connect() as one:
        one.mkdir("a")
        with one.create("a/s") as stream:
            request = Twrite(0, stream.channel.fid, 0, b"x")
            slots: list[blocking.Slot] = []
            for _ in range(3):
                slots += one.send([request])
                assert one.stat("a/s").name == "s"
            for slot in slots:
                reply = one.answer(slot)
                assert isinstance(reply, Rwrite)
                assert reply.count == 1


def test_many_at_once(server: Running) -> None:
    with server.connect() as one:
        for number in range(0, 200, 2):
            one.mkdir(f"g{number}")
        found = one.together(one.caller.stat(f"g{number}") for number in range(200))
        assert [type(each) for each in found] == [Stat, errors.NotFound] * 100
        assert [each.name for each in found if isinstance(each, Stat)] == [f"g{number}" for number in range(0, 200, 2)]
        assert one.together([]) == []
        (connection,) = server.server.connections
        assert list(connection.session.fids.by_number) == [0]


def test_a_file_that_is_forgotten_in_the_middle_of_a_call_is_let_go_with_the_next(server: Running) -> None:
    """Its finalizer runs wherever the interpreter pleases: here, while another request is put into bytes."""

    class Name(str):
        def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
            files.clear()
            return super().encode(encoding, errors)

    with server.connect() as one:
        one.socket.settimeout(HANG_S)
        files = [one.open("ctl")]
        walk = one.do(_ask(Twalk(0, 0, 77, (Name("order"),))))
        assert len(walk.qids) == 1
        (connection,) = server.server.connections
        assert len(connection.session.fids.by_number) == 3
        one.do(_ask(Tclunk(0, 77)))
        assert list(connection.session.fids.by_number) == [0]


def test_a_file_that_is_forgotten_is_let_go_by_the_next_read_of_another(server: Running) -> None:
    with server.connect() as one:
        one.open("ctl")
        with one.open("ctl") as other:
            other.receive()
        (connection,) = server.server.connections
        assert list(connection.session.fids.by_number) == [0]


@pytest.mark.process
def test_a_child_that_closes_its_copy_does_not_end_the_connection(server: Running) -> None:
    with server.connect() as one:
        pid = os.fork()
        if not pid:
            with contextlib.suppress(errors.Disconnected):
                one.list()
                os._exit(1)
            one.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert "ctl" in one.list()


@pytest.mark.process
def test_a_child_leaves_the_parent_the_answers_to_what_it_sent(server: Running) -> None:
    with server.connect() as one, one.create("s") as stream:
        answer = stream.send(b"x")
        _, finish = one.begin([one.caller.stat("s")])
        pid = os.fork()
        if not pid:
            for wait in (answer, finish):
                with contextlib.suppress(errors.Disconnected):
                    wait()
                    os._exit(1)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        reply = answer()
        assert isinstance(reply, Rwrite)
        assert reply.count == 1
        assert finish()[0].name == "s"


def test_a_server_that_never_answers_the_connect(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"{tmp_path}/s")
        silent.listen()
        with pytest.raises(TimeoutError):
            blocking.connect(f"unix!{tmp_path}/s", timeout=0.05)


LONG = 1_000_000


def test_a_link_that_only_sends_is_not_taken_for_a_dead_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long request of another thread stands before what asks for the answer to a cancelled one."""
    monkeypatch.setattr(blocking, "FLUSH_S", patient(1.0))
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, blocking.SEND_BYTES)
    with ThreadPoolExecutor(2) as threads, theirs, blocking.Client(ours, ClientMachine()) as one:
        read, written = (blocking.File(one, Channel(n, Qid(0, 0, n), 1 << 20, False), "r+") for n in (1, 2))

        def serve() -> None:
            frames, asked, answers = Framer(1 << 20), 0, b""
            while data := theirs.recv(blocking.SEND_BYTES):
                for buffer, start, size in frames.frames(data):
                    message = decode(buffer, start, size, False)
                    asked += isinstance(message, Tstat)
                    if isinstance(message, Twrite):
                        answers += encode(Rwrite(message.tag, len(message.data)), False)
                    if isinstance(message, Tflush):
                        answers += encode(Rflush(message.tag), False)
                        begun.set()
                    if asked == 2:
                        theirs.sendall(answers)
                        return
                if begun.is_set():
                    time.sleep(blocking.FLUSH_S / 8)  # the link is slow

        begun = threading.Event()
        served = threads.submit(serve)
        long = threads.submit(lambda: begun.wait(HANG_S) and written.write(bytes(LONG)))
        with pytest.raises(TimeoutError):
            read.receive(timeout=0.01)
        served.result(HANG_S)
        assert long.result(HANG_S) == LONG


def test_a_server_that_does_not_even_answer_a_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking, "FLUSH_S", 0.05)
    ours, theirs = socket.socketpair()
    with theirs, blocking.Client(ours, ClientMachine()) as one:
        file = blocking.File(one, Channel(1, Qid(0, 0, 1), 8_192, False), "r")
        for _ in range(2):
            with pytest.raises(errors.Disconnected, match="no answer to a cancelled request"):
                file.receive(timeout=0.01)


@pytest.mark.parametrize("dialect", [Dialect.PLAIN, Dialect.LINUX], ids=lambda dialect: dialect.version)
def test_a_write_that_waits_for_the_replica_is_cancelled_without_an_end_of_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dialect: Dialect
) -> None:
    """It is appended, so that the Tflush is answered after it."""
    monkeypatch.setattr(blocking, "FLUSH_S", patient(3.0))
    store = DiskStore(str(tmp_path / "store"), replica=lambda: None)

    def confirm() -> list[Entry]:
        assert store.replication is not None
        return list(follow(store.replication))

    with (
        running(Tree(store, SystemClock(), owner=ME), tmp_path) as server,
        server.connect(dialect=dialect) as one,
        ThreadPoolExecutor(1) as threads,
    ):
        one.mkdir("g")
        one.create("g/s").close()
        with one.open("g/ctl", "w") as ctl:
            done = threads.submit(ctl.write, b"replay all\nsync replica\n")
            eventually(lambda: (server.call(confirm), done.done())[1], "the settings")
        with one.open("g/.put", "r+") as put:
            answer = threads.submit(put.ask, b'{"stream":"s"} x', 0.0)
            before = eventually(lambda: is_flushing(one) and one._replies, "the Tflush")
            eventually(lambda: one.lost or one._replies >= before + 2, "answers beside that")
            eventually(lambda: (server.call(confirm), answer.done())[1], "the answer")
            assert answer.result(HANG_S) == b"1\n"
        assert one.lost == ""


def is_flushing(client: blocking.Client) -> bool:
    """Whether one request and its Tflush are unanswered, and nothing else is."""
    slots = list(client._slots.values())
    return len(slots) == 2 and any(slot.about is not None for slot in slots)


def _ask(request: Any) -> Any:
    return (yield request)


def test_time_out_keeps_what_came(server: Running, tree: Tree, dialect: Dialect) -> None:
    with server.connect(dialect=dialect) as one, server.connect(dialect=dialect) as two:
        writer, reader = one.create("s"), two.open("s")
        with pytest.raises(TimeoutError):
            reader.receive(timeout=0.05)
        assert tree.waits.used == 0
        writer.write(b"later")
        assert reader.receive(timeout=HANG_S) == b"later"
        reader.close()
        writer.close()


def test_message_that_overtakes_its_flush_is_kept(server: Running) -> None:
    """Give up a read whose message is already on its way, as often as it takes to be too late."""
    with server.connect() as one, server.connect() as two:
        writer, reader = one.create("s"), two.open("s")
        kept = 0
        for number in range(20):
            slot = two.send([Tread(0, reader.channel.fid, reader.channel.offset, 100)])[0]
            writer.write(f"{number}".encode())
            late = reader._reply(slot, 0.0)
            reader.channel.keep(late, reader.channel.offset)
            kept += reader.channel.kept is not None
            assert reader.receive(timeout=HANG_S) == f"{number}".encode()
        assert kept == 20
        reader.close()
        writer.close()


def test_small_buffers_get_a_kept_message_in_parts(server: Running) -> None:
    with server.connect() as one:
        reader = one.create("s", "r+")
        reader.channel.kept = b"abcdef"
        assert [reader.receive(4), reader.receive(4)] == [b"abcd", b"ef"]
        reader.close()


def test_file_like(server: Running) -> None:
    import io

    with server.connect() as one:
        replay_all(one, "a")
        with one.create("a/s") as stream:
            for line in ("one\n", "two\n"):
                stream.write(line.encode())
        with one.open("a/ctl", "w") as ctl:
            ctl.write(b"eof s\n")
        with one.open("a/s") as raw:
            assert raw.readable()
            assert not raw.writable()
            assert io.BufferedReader(raw).read() == b"one\ntwo\n"


def test_nonblocking(server: Running, dialect: Dialect) -> None:
    with server.connect(dialect=dialect) as one:
        one.create("s").close()
        if not dialect.linux:
            with pytest.raises(errors.Unsupported):
                one.open("s", nonblocking=True)
            return
        with one.open("s", nonblocking=True) as stream, pytest.raises(errors.Again):
            stream.receive()


def test_server_that_goes(tree: Tree, tmp_path: Path) -> None:
    server = Running(tree, tmp_path)
    one = server.connect()
    server.stop()
    for _ in range(2):  # by reading, then by writing
        with pytest.raises(errors.Disconnected):
            one.list()
    one.close()
    with pytest.raises(errors.Disconnected, match="no such socket"):
        server.connect()


@pytest.mark.process
def test_a_server_that_ends_the_connection_unanswered(tmp_path: Path) -> None:
    """Also the command line says so: click takes EPIPE for the end of its standard output."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/s")
        listener.listen()
        threading.Thread(target=hang_up, args=(listener, 2)).start()
        address = f"unix!{tmp_path}/s"
        with pytest.raises(errors.Disconnected, match="/s: "):
            blocking.connect(address)
        done = mqfs("bench", "--at", address, "--transport", "9p", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch("mqfs: unix!.*\n", done.stderr)


def hang_up(listener: socket.socket, times: int) -> None:
    for _ in range(times):
        listener.accept()[0].close()


def test_a_write_to_a_server_that_is_gone() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with blocking.Client(ours, ClientMachine()) as one, pytest.raises(errors.Disconnected):
        one.list()


@pytest.mark.parametrize("writes", [True, False], ids=["writing", "reading"])
def test_a_host_that_does_not_answer_any_more(writes: bool) -> None:
    """The system ends the connection, as it does where the network is gone: no error of a deadline of ours."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 100)
        with blocking.Client(ours, ClientMachine()) as one:
            request = Tread(0, 1, 0, 10)
            slot = one.send([request])[0]
            ours.settimeout(0.01)
            with contextlib.suppress(TimeoutError):
                while True:
                    ours.sendall(bytes(LONG))
            ours.settimeout(None)
            with pytest.raises(errors.Disconnected, match="timed out"):
                one.list() if writes else one.answer(slot)


@pytest.mark.parametrize("address", ["unix!/none/9p", "tcp!127.0.0.1!1", "nonsense"])
def test_address_nobody_serves(address: str) -> None:
    kind = errors.BadAddress if address == "nonsense" else errors.Disconnected
    with pytest.raises(kind, match=r"expected|does not exist|connection refused"):
        blocking.connect(address)


# ---------------------------------------------------------------- the machine


def test_tag_of_a_flushed_request_is_not_used_before_its_rflush() -> None:
    caller = ClientMachine()
    first = caller.call(Tread(0, 1, 0, 10))
    flush = caller.flush(first)
    assert len({first, flush, caller.call(Tclunk(0, 1))}) == 3
    caller.receive(encode(Rread(first, b"x"), False))
    assert caller.call(Tclunk(0, 1)) not in (first, flush)
    caller.receive(b"\x07\0\0\0\x6d" + flush.to_bytes(2, "little"))
    assert {caller.call(Tclunk(0, 1)), caller.call(Tclunk(0, 1))} == {first, flush}


@pytest.mark.parametrize(
    "reply",
    [encode(Rclunk(9), False), encode(Tclunk(0, 1), False), b"\xff\xff\xff\xff", b"\x0b\0\0\0\x75\0\0\xff\xff\xff\xff"],
    ids=["tag nobody used", "request from a server", "too large", "count too large"],
)
def test_server_that_breaks_the_protocol(reply: bytes) -> None:
    caller = ClientMachine()
    caller.call(Tread(0, 1, 0, 10))
    with pytest.raises(errors.BadFrame):
        caller.receive(reply)


def test_tags_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TAGS", 2)
    caller = ClientMachine()
    for _ in range(2):
        caller.call(Tclunk(0, 1))
    with pytest.raises(errors.OverLimit):
        caller.call(Tclunk(0, 1))


def test_where_all_tags_are_in_use_each_request_can_be_cancelled(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "TAGS", 4)
    with server.connect() as one, server.connect() as two:
        writer = two.create("s", "w")
        files = [one.open("s") for _ in range(limits.TAGS)]
        for file in files:
            file.begin_read()
        for file in files:
            with pytest.raises(TimeoutError):
                file.receive(timeout=0.0)
            file.begin_read()
        for message in (b"1", b"2"):
            writer.write(message)
        for file in files:
            assert [file.receive(timeout=HANG_S) for _ in range(2)] == [b"1", b"2"]
        for file in (writer, *files):
            file.close()


def test_of_requests_without_tags_for_all_none_is_sent(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TAGS", 3)
    with server.connect() as one:
        with pytest.raises(errors.OverLimit):
            one.send([Tclunk(0, 90 + number) for number in range(4)])
        assert [one.wait(slot) for slot in one.send([Tclunk(0, 90 + number) for number in range(3)])]
        assert one.list() == META
