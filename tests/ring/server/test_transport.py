"""The library over rings, against a real server: with other programs beside, and with everything being killed."""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import mqfs
from mqfs import errors, ring
from mqfs.client import Client, Group
from mqfs.client.transport import ring_attachment
from mqfs.client.transport.ring_subscription import RingSubscription
from mqfs.net import identity
from tests.support import ROOT
from tests.support.anyone import NOBODY, plain_environment, python_for_anyone
from tests.support.campaign import size
from tests.support.eventually import HANG_S, eventually
from tests.support.server import COMMAND, Server, environment, keepers, short_folder, start

pytestmark = [pytest.mark.skipif(bool(ring.MISSING), reason=ring.MISSING), pytest.mark.process]


def kept(client: Client, *ctl: str) -> Group:
    return client.group("g", create=True, ctl=["replay all", *ctl])


def bodies(messages: Any) -> list[bytes]:
    return [message.body for message in messages]


def attached(group: Group) -> bool:
    """Whether it has a ring now."""
    direct: Any = group._link.direct(group.path)
    return direct._attachment.now is not None and not direct._attachment.now.is_replaced


# ---------------------------------------------------------------- beside others


def cat(path: Path, out: Path) -> subprocess.Popen[bytes]:
    with open(out, "wb") as file:
        return subprocess.Popen(["cat", str(path)], stdout=file)


@pytest.mark.fuse
def test_a_mount_and_a_9p_client_beside_it() -> None:
    """What one process publishes through the ring, cat on the mount and py9p see, and back: in one order."""
    py9p = pytest.importorskip("py9p.py9p", reason="py9p (of p9fs) is not installed")
    with short_folder() as folder, contextlib.ExitStack() as stack:
        away = stack.enter_context(Server.at(folder, mount=True, transport="ring"))
        mount = away.path
        client = stack.enter_context(away.connect())
        group = kept(client)
        group.create("s")
        reader = cat(mount / "g" / "s", folder / "cat")
        stack.callback(reader.wait)
        stack.callback(reader.kill)
        sock = stack.enter_context(socket.socket(socket.AF_UNIX))
        sock.connect(str(folder / "socket"))
        credentials = py9p.Credentials(user=identity.user_name(os.getuid()))
        peer = py9p.Client(sock, credentials, ver=py9p.Version.v9P2000)
        messages = stack.enter_context(group.subscribe())
        assert isinstance(messages, RingSubscription)
        for number in range(60):
            text = f"{number}\n".encode()
            if number % 3 == 0:
                group.publish("s", text)
            elif number % 3 == 1:
                (mount / "g" / "s").write_bytes(text)
            else:
                peer.open("g/s", 1)
                assert peer.write(text) == len(text)
                peer.close()
        wanted = [f"{number}\n".encode() for number in range(60)]
        assert [messages.get(HANG_S).body for _ in wanted] == wanted
        assert bodies(group.history()) == wanted
        eventually(lambda: (folder / "cat").read_bytes() == b"".join(wanted), "cat has all of it")
        peer.open("g/s", 0)
        assert [peer.read(100) for _ in wanted] == wanted
        peer.close()


PUBLISHER = """
import mqfs, sys
with mqfs.connect(sys.argv[1], transport=sys.argv[2]) as client:
    group = client.group("g")
    for number in range(int(sys.argv[4])):
        group.publish("s", f"{sys.argv[3]} {number}")
"""


def publisher(away: Server, transport: str, name: str, count: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", PUBLISHER, away.address, transport, name, str(count)]
    return start(command, cwd=ROOT, env=environment())


@pytest.mark.slow
def test_processes_of_both_kinds_see_one_order(away: Server) -> None:
    with away.connect() as client, away.connect(transport="9p") as other:
        group = kept(client, "sync off")
        group.create("s")
        by_ring, by_files = group.subscribe(), other.group("g").subscribe()
        count = size(4_000)
        processes = [publisher(away, transport, transport, count) for transport in ("ring", "9p", "auto")]
        one = [by_ring.get(HANG_S) for _ in range(3 * count)]
        two = [by_files.get(HANG_S) for _ in range(3 * count)]
        assert [process.wait(HANG_S) for process in processes] == [0, 0, 0]
        assert one == two
        assert one == list(group.history())
        for name in ("ring", "9p", "auto"):
            mine = [body for body in bodies(one) if body.startswith(name.encode())]
            assert mine == [f"{name} {number}".encode() for number in range(count)]


def test_from_the_beginning_while_others_publish(away: Server) -> None:
    """The log first, then the ring: nothing is missing between them and nothing is there twice."""
    with away.connect() as client:
        group = kept(client, "sync off")
        group.publish_many(("s", str(number)) for number in range(5_000))
        process = publisher(away, "ring", "more", count := size(20_000))
        readers = []
        for _ in range(5):
            reading = group.subscribe(existing=True)
            readers.append(reading)
            first = [reading.get(HANG_S) for _ in range(500)]
            assert bodies(first) == [str(number).encode() for number in range(500)]
        assert process.wait(HANG_S) == 0
        wanted = [message.sequence for message in group.history()]
        assert len(wanted) == 5_000 + count
        for reading in readers:
            got = [reading.get(HANG_S).sequence for _ in range(len(wanted) - 500)]
            assert got == wanted[500:]
            with pytest.raises(TimeoutError):
                reading.get(0)
            reading.close()


def test_what_is_published_while_a_reader_takes_its_seat(away: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between taking it and asking where the ring stands: that is in the log and in the ring, and is given once."""
    with away.connect() as client, away.connect() as other:
        group, there = kept(client), other.group("g")
        group.publish_many(("s", str(number)) for number in range(100))
        asked = ring_attachment.Attached.next
        published = 100

        def late(self: ring_attachment.Attached) -> int:
            nonlocal published
            there.publish_many([("s", str(number)) for number in range(published, published + 10)], wait="published")
            published += 10
            assert asked.fget is not None
            found: int = asked.fget(self)
            return found

        monkeypatch.setattr(ring_attachment.Attached, "next", property(late))
        readers = [group.subscribe(existing=True) for _ in range(3)]
        for reader in readers:
            assert [int(reader.get(HANG_S).body) for _ in range(published)] == list(range(published))
            with pytest.raises(TimeoutError):
                reader.get(0)


def test_patterns_and_what_is_carried(away: Server) -> None:
    """Streams that come later, views, headers, ttl, delay, single."""
    with away.connect() as client:
        group = kept(client)
        group.create("a.b")
        group.bind("view", "a.*")
        everything, some, later, view = (group.subscribe(p) for p in ("#", ["a.*", "exact"], "later.one", "view"))
        assert [type(r) is RingSubscription for r in (everything, some, later, view)] == [True, True, True, False]
        group.publish("a.b", b"1")
        group.publish("later.one", b"2", headers={"colour": "blue"})
        group.publish("exact", b"3", ttl="1h")
        group.publish("a.c", b"late", delay=0.05)
        group.publish("x", b"4", priority=9)
        got = [everything.get(HANG_S) for _ in range(5)]
        assert sorted(bodies(got)) == [b"1", b"2", b"3", b"4", b"late"]
        assert got[1].headers["colour"] == "blue"
        assert got == list(group.history())
        assert bodies(some.get(HANG_S) for _ in range(3)) == [b"1", b"3", b"late"]
        assert later.get(HANG_S) == got[1]
        assert bodies(view.get(HANG_S) for _ in range(2)) == [b"1", b"late"]
        with group.consume("c"):
            group.publish("a.b", b"for one", single=True)
            group.publish("a.b", b"for all")
            assert everything.get(HANG_S).body in (b"for one", b"for all")  # who gets it the server decides


def test_what_has_run_out_is_not_shown(away: Server) -> None:
    with away.connect() as client:
        group = kept(client)
        messages = group.subscribe()
        group.publish("s", b"short", ttl=0.01)
        group.publish("s", b"long", ttl="1h")
        eventually(lambda: bodies(group.history()) == [b"long"])
        assert messages.get(HANG_S).body == b"long"


def test_groups_that_have_no_ring(away: Server) -> None:
    with away.connect() as client, away.connect(transport="auto") as either:
        client.group("lines", create=True, ctl=["replay all", "data line"])
        client.group("one", create=True, ctl=["deliver one"])
        with pytest.raises(errors.Unsupported, match="data line"):
            client.group("lines").publish("s", b"x\n")
        with pytest.raises(errors.Unsupported, match="data line"):
            client.group("lines").subscribe()
        either.group("lines").publish("s", b"x\n")
        assert bodies(either.group("lines").history()) == [b"x\n"]
        assert not attached(either.group("lines"))
        group = either.group("one")
        group.publish("s", b"job")
        assert attached(group)
        with group.consume("mine") as claims:
            group.publish("s", b"work")
            assert claims.get(HANG_S).body in (b"job", b"work")


def test_words(away: Server) -> None:
    with away.connect() as client, away.connect(transport="9p") as files:
        group = kept(client)
        for each in (group, files.group("g")):
            with pytest.raises(errors.BadRequest, match="expected committed or published"):
                each.publish("s", b"x", wait="soon")  # type: ignore[arg-type]
            each.publish("s", b"x", wait="published")
            assert each.publish_many([("s", b"y"), ("t", b"z")], wait="published") == 2
        assert group.publish("s", b"last").sequence == 7
        eventually(lambda: bodies(group.history()) == [b"x", b"y", b"z"] * 2 + [b"last"], "all are kept")


# ---------------------------------------------------------------- a ring that ends


def test_streams_that_go(away: Server) -> None:
    """Removed, made again, renamed: the ring ends each time, and nothing that was published is lost or repeated."""
    with away.connect() as client:
        group = kept(client)
        everything = group.subscribe()
        for turn in range(5):
            group.publish("s", f"{turn} s")
            exact = group.subscribe("s")
            group.publish("t", f"{turn} t")
            group.publish("s", f"{turn} more")
            assert exact.get(HANG_S).body == f"{turn} more".encode()
            assert bodies(everything.get(HANG_S) for _ in range(3)) == [
                f"{turn} {what}".encode() for what in ("s", "t", "more")
            ]
            group.remove("s")
            with pytest.raises(EOFError):
                exact.get(HANG_S)
        group.remove("t")
        client.remove_group("g")
        with pytest.raises(EOFError):
            everything.get(HANG_S)


def test_a_ring_that_ends_under_publishers(away: Server) -> None:
    """Streams are removed all the time; of every publish that returned its message is there once, in order."""
    with away.connect() as client, away.connect(transport="9p") as other:
        group = kept(client, "sync off")
        group.create("s")
        stop = threading.Event()
        published: list[int] = []
        messages = group.subscribe("s")

        def run() -> None:
            while not stop.is_set():
                many = [("s", str(len(published) + n)) for n in range(7)]
                group.publish_many(many, wait="published")
                published.extend(range(7))
                group.publish("s", str(len(published)))
                published.append(0)

        thread = threading.Thread(target=run)
        thread.start()
        for _ in range(size(200)):
            other.group("g").create("gone")
            other.group("g").publish("gone", b"x")
            other.group("g").remove("gone")
        stop.set()
        thread.join()
        wanted = [str(number).encode() for number in range(len(published))]
        assert bodies(messages.get(HANG_S) for _ in wanted) == wanted
        assert bodies(group.history(pattern="s")) == wanted


@pytest.mark.fuse
@pytest.mark.root
def test_chmod_cuts() -> None:
    """Who may not any more: what was shared memory before is of no use."""
    python, path = python_for_anyone()
    code = (
        "import mqfs, sys\n"
        "from mqfs import errors\n"
        "with mqfs.connect(sys.argv[1], transport='auto') as client:\n"
        "    group = client.group('g')\n"
        "    messages = group.subscribe()\n"
        "    group.publish('s', b'mine')\n"
        "    print(type(messages).__name__, messages.get(20).body, flush=True)\n"
        "    input()\n"
        "    try: group.publish('s', b'more'); print('published', flush=True)\n"
        "    except errors.MqfsError as error: print(type(error).__name__, flush=True)\n"
        "    try: print(messages.get(1).body, flush=True)\n"
        "    except (TimeoutError, errors.MqfsError, EOFError) as error: print(type(error).__name__, flush=True)\n"
    )
    with short_folder() as folder:
        away = Server.at(folder, "--allow-other", mount=True, transport="ring")
        try:
            with away.connect() as client:
                group = kept(client, "ring all")
                group.create("s")
                (folder / "mq" / "g" / "s").chmod(0o666)
                mine = group.subscribe()
                process = subprocess.Popen(
                    [*NOBODY, python, "-c", code, away.address],
                    cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=plain_environment(path), text=True,
                )  # fmt: skip
                assert process.stdin is not None
                assert process.stdout is not None
                assert process.stdout.readline() == "RingSubscription b'mine'\n"
                (folder / "mq" / "g" / "s").chmod(0o600)
                group.publish("s", b"secret")
                process.stdin.write("\n")
                process.stdin.close()
                assert process.stdout.readline() == "Denied\n"
                assert process.stdout.readline() == "TimeoutError\n"
                assert process.wait(HANG_S) == 0
                process.stdout.close()
                assert bodies(mine.get(HANG_S) for _ in range(2)) == [b"mine", b"secret"]
                assert bodies(group.history()) == [b"mine", b"secret"]
        finally:
            away.close()


@pytest.mark.slow
def test_a_ring_that_ends_in_the_middle_of_a_batch(away: Server) -> None:
    """What of it was published before is not published again."""
    with away.connect() as client, away.connect(transport="9p") as other:
        group = kept(client, "sync off")
        group.create("s")
        stop = threading.Event()
        count = 0

        def run() -> None:
            nonlocal count
            while not stop.is_set():
                bodies = (b"%06d" % number + bytes(50_000) for number in range(count, count + 40))
                count += group.publish_many((("s", body) for body in bodies), wait="published")

        thread = threading.Thread(target=run)
        thread.start()
        for _ in range(size(200)):
            other.group("g").create("gone")
            other.group("g").remove("gone")
        stop.set()
        thread.join()
        assert [int(message.body[:6]) for message in group.history()] == list(range(count))


# ---------------------------------------------------------------- a reader that is behind


def test_a_reader_that_is_overtaken_reads_the_log(away: Server) -> None:
    with away.connect() as client:
        group = kept(client, "sync off")
        slow, patient = group.subscribe(), group.subscribe("a")
        assert isinstance(slow, RingSubscription)
        body = bytes(500_000)
        for number in range(90):  # nearly three rings
            group.publish("a" if number % 30 == 0 else "b", body + str(number).encode())
        assert [int(slow.get(HANG_S).body[500_000:]) for _ in range(90)] == list(range(90))
        assert [int(patient.get(HANG_S).body[500_000:]) for _ in range(3)] == [0, 30, 60]
        group.publish("a", b"now")
        assert slow.get(HANG_S).body == patient.get(HANG_S).body == b"now"
        assert slow._past is None


def test_a_reader_gets_a_corrupt_record_of_the_ring_from_the_log(away: Server) -> None:
    with away.connect() as client:
        group = kept(client, "sync off")
        reading = group.subscribe()
        for number in range(9):
            group.publish("s", b"%d" % number)
        fd = group._link.direct(group.path)._attachment.now.ring.fileno()  # type: ignore[union-attr]
        with mmap.mmap(fd, 0) as memory:
            memory[ring.HEAD_BYTES + 4 * 40 + 32] ^= 1  # in the body of the fifth
        group.publish("s", b"after")
        assert [reading.get(HANG_S).body for _ in range(10)] == [*(b"%d" % number for number in range(9)), b"after"]
        group.publish("s", b"now")
        assert reading.get(HANG_S).body == b"now"


def test_what_the_log_has_not_any_more_is_told(away: Server) -> None:
    with away.connect() as client:
        group = kept(client, "sync off", "depth 10")
        slow = group.subscribe()
        body = bytes(500_000)
        for number in range(90):
            group.publish("s", body + str(number).encode())
        with pytest.raises(errors.FellBehind, match="messages of the group were lost"):
            slow.get(HANG_S)
        assert [int(slow.get(HANG_S).body[500_000:]) for _ in range(10)] == list(range(80, 90))


READER = """
import mqfs, sys
with mqfs.connect(sys.argv[1], transport="ring") as client:
    messages = client.group("g").subscribe()
    print("reads", flush=True)
    for _ in range(int(sys.argv[2])):
        print(int(messages.get(30).body[500_000:]), flush=True)
"""


def test_a_reader_that_is_stopped_holds_up_nobody(away: Server) -> None:
    """`replay off`: what it has not had is in the log when it continues."""
    with away.connect() as client:
        group = client.group("g", create=True, ctl=["sync off"])
        group.create("s")
        command = [sys.executable, "-c", READER, away.address, "80"]
        process = start(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"reads\n"
        body = bytes(500_000)
        group.publish("s", body + b"0")
        assert process.stdout.readline() == b"0\n"
        process.send_signal(signal.SIGSTOP)
        for number in range(1, 80):
            group.publish("s", body + str(number).encode())
        process.send_signal(signal.SIGCONT)
        assert [int(process.stdout.readline()) for _ in range(1, 80)] == list(range(1, 80))
        assert process.wait(HANG_S) == 0
        process.stdout.close()


# ---------------------------------------------------------------- a server that is killed


def test_what_is_published_outlives_the_server(away: Server) -> None:
    """Not committed, as the server is stopped: but it is in the ring."""
    with away.connect() as client:
        group = kept(client)
        assert group.publish("s", b"0").sequence == 1
        os.kill(away.pid, signal.SIGSTOP)
        group.publish("s", b"1", wait="published")
        group.publish_many([("s", b"2"), ("s", b"3")], wait="published")
        away.kill()
        assert group.publish("s", b"4", wait="published").sequence == 5
        away.start()
        assert group.publish("s", b"5").sequence == 6
        assert [(m.sequence, m.body) for m in group.history()] == [(n + 1, b"%d" % n) for n in range(6)]


@pytest.mark.slow
def test_kills_under_load(away: Server) -> None:
    """The server is killed again and again: a publish waits for the next one and then knows; subscriptions of both
    kinds miss nothing and get nothing twice."""
    with away.connect() as client, away.connect() as second, away.connect(transport="9p") as files:
        group, other = kept(client), second.group("g")
        group.create("s", "t")
        by_ring, by_files = group.subscribe(), files.group("g").subscribe()
        stop = threading.Event()
        published: dict[str, list[int]] = {"s": [], "t": []}
        failed: list[BaseException] = []

        def run(mine: Group, stream: str) -> None:
            try:
                while not stop.is_set():
                    number = len(published[stream])
                    if number % 5:
                        sequence = mine.publish(stream, str(number)).sequence
                        assert sequence is not None
                        published[stream].append(sequence)
                    else:
                        mine.publish_many([(stream, str(number + n)) for n in range(3)])
                        published[stream] += [0, 0, 0]
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=run, args=pair) for pair in ((group, "s"), (other, "t"))]
        for thread in threads:
            thread.start()
        for _ in range(size(60)):
            before = len(published["s"])
            away.restart(signal.SIGKILL)
            eventually(lambda before=before: len(published["s"]) > before + 10 or bool(failed), "progress")  # type: ignore[misc]
        stop.set()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]
        history = list(group.history())
        for stream, sequences in published.items():
            mine = [message for message in history if message.stream == stream]
            assert [int(message.body) for message in mine] == list(range(len(sequences)))
            assert all(known in (0, message.sequence) for known, message in zip(sequences, mine, strict=True))
        assert [by_ring.get(HANG_S) for _ in history] == history
        assert [by_files.get(HANG_S) for _ in history] == history


STOPS_HALFWAY = """
import os, signal, mqfs.cli.main
from mqfs.ring.server.ring_log import RingLog

def publish(self, drafts, flags, before=RingLog._publish):
    time_ns = before(self, drafts, flags)
    if bytes(drafts[-1][2]) == b"half":
        os.kill(os.getpid(), signal.SIGSTOP)
    return time_ns

RingLog._publish = publish
mqfs.cli.main.main()
"""


def test_a_message_of_the_server_that_only_the_ring_has() -> None:
    """The next server leaves it out: no reader sees it, however far they have read, until it is published again."""
    with short_folder() as folder, contextlib.ExitStack() as stack:
        program = (sys.executable, "-c", STOPS_HALFWAY, "serve")
        away = Server.at(folder, transport="ring", program=program)
        stack.callback(away.close)
        stack.callback(away.process.kill)  # it may be stopped
        client, writer = stack.enter_context(away.connect()), stack.enter_context(away.connect(transport="9p"))
        group = kept(client)
        group.publish("s", b"first")
        waits, times_out, is_behind = readers = [group.subscribe() for _ in range(3)]
        group.publish("s", b"second")
        assert bodies(reader.get(HANG_S) for reader in (waits, times_out)) == [b"second"] * 2
        got: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        waiter = threading.Thread(target=lambda: [got.put(waits.get(HANG_S).body) for _ in range(2)])
        waiter.start()

        def put() -> None:
            with pytest.raises(errors.Disconnected):
                writer.group("g").publish("s", b"half", id="half")

        putter = threading.Thread(target=put)
        putter.start()
        eventually(lambda: times_out._at.ring.next == 4, "it is in the ring")  # type: ignore[attr-defined]
        with pytest.raises(TimeoutError):
            times_out.get(0)
        away.kill()
        putter.join()
        away.program = (*COMMAND, "serve")
        away.start()
        writer.group("g").publish("s", b"half", id="half")
        writer.group("g").publish("s", b"last", id="last")
        waiter.join()
        assert [got.get(timeout=HANG_S) for _ in range(2)] == [b"half", b"last"]
        assert is_behind.get(HANG_S).body == b"second"
        for reader in (times_out, is_behind):
            assert bodies(reader.get(HANG_S) for _ in range(2)) == [b"half", b"last"]
        assert bodies(group.history()) == [b"first", b"second", b"half", b"last"]
        for reader in readers:
            with pytest.raises(TimeoutError):
                reader.get(0)


def test_a_killed_keeper_too(away: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the ring is gone: what was committed is there, what was not known is reported as such."""
    monkeypatch.setattr(ring_attachment, "GRACE_S", 20.0)
    with away.connect() as client:
        group = kept(client)
        messages = group.subscribe()
        for number in range(5):
            group.publish("s", str(number))
        [keeper] = keepers(away.folder)
        os.kill(away.pid, signal.SIGSTOP)
        raised: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

        def run() -> None:
            try:
                group.publish("s", b"unknown")
            except errors.Disconnected as error:
                raised.put(error)

        thread = threading.Thread(target=run)
        thread.start()
        eventually(lambda: messages._at.ring.next == 7, "it is published")  # type: ignore[attr-defined]
        os.kill(keeper, signal.SIGKILL)
        away.kill()
        away.start()
        assert "unknown" in str(raised.get(timeout=HANG_S))
        thread.join()
        group.publish("s", b"after")
        wanted = [b"0", b"1", b"2", b"3", b"4", b"after"]
        assert bodies(group.history()) == wanted
        got = bodies(messages.get(HANG_S) for _ in wanted[:-1])
        last = messages.get(HANG_S).body
        if last == b"unknown":  # it was in the ring that this process still had
            last = messages.get(HANG_S).body
        assert [*got, last] == wanted


def test_patience(away: Server) -> None:
    with away.connect(reconnect=0.1) as client, away.connect(reconnect=False) as hasty:
        groups = [kept(client), hasty.group("g")]
        readers = [group.subscribe() for group in groups]
        for group in groups:
            group.publish("s", b"x")
        for reader in readers:
            assert bodies(reader.get(HANG_S) for _ in range(2)) == [b"x", b"x"]
        away.kill()
        for group, reader in zip(groups, readers, strict=True):
            with pytest.raises(errors.Disconnected):
                group.publish("s", b"y")
            with pytest.raises(errors.Disconnected):
                list(reader)
        away.start()


def test_a_stopped_server_and_a_full_ring(away: Server) -> None:
    """Publishers wait for room, and no longer than until the client is closed."""
    with away.connect() as client:
        group = kept(client)
        group.publish("s", b"0")
        os.kill(away.pid, signal.SIGSTOP)
        done: list[int] = []
        ended: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

        def run() -> None:
            try:
                while True:
                    group.publish("s", bytes(1_000_000), wait="published")
                    done.append(1)
            except errors.MqfsError as error:
                ended.put(error)

        thread = threading.Thread(target=run)
        thread.start()
        eventually(lambda: len(done) >= 15, "the ring is nearly full")
        direct: Any = client._link.direct("g")
        eventually(lambda: direct._attachment.now.ring.tail + 1_000_032 > direct._attachment.now.ring.size, "it is")
        threading.Thread(target=client.close).start()
        assert "the client was closed" in str(ended.get(timeout=HANG_S))
        thread.join()
        os.kill(away.pid, signal.SIGCONT)
    with away.connect(transport="9p") as client:
        eventually(lambda: len(list(client.group("g").history())) == len(done) + 1, "all of it is kept")


def test_a_batch_that_waits_for_room(away: Server) -> None:
    with away.connect() as client:
        group = kept(client, "sync off")
        group.create("s")
        group.publish("s", b"000 first")
        os.kill(away.pid, signal.SIGSTOP)
        bodies = [b"%03d" % number + bytes(1_000_000) for number in range(1, 31)]
        thread = threading.Thread(target=lambda: group.publish_many(("s", body) for body in bodies))
        thread.start()
        direct: Any = client._link.direct("g")
        eventually(
            lambda: direct._attachment.now.ring.tail + 1_000_064 > direct._attachment.now.ring.size, "it is full"
        )
        os.kill(away.pid, signal.SIGCONT)
        thread.join()
        assert [int(message.body[:3]) for message in group.history()] == list(range(31))


def test_what_was_read_is_let_go_of(away: Server) -> None:
    """`replay off`: the log keeps what a reader has not had, and no longer."""
    with away.connect() as client:
        group = client.group("g", create=True, ctl=["sync off"])
        group.create("s")

        def keeps() -> int:
            found: int = group.stats().streams["s"].messages
            return found

        with group.subscribe() as messages:
            group.publish_many(("s", bytes(1_000)) for _ in range(2_000))
            for _ in range(1_500):
                messages.get(HANG_S)
            assert keeps() >= 500
            for _ in range(500):
                messages.get(HANG_S)
            with pytest.raises(TimeoutError):
                messages.get(0)
            eventually(lambda: keeps() <= 100, "what was read has gone, but for the last of it")


# ---------------------------------------------------------------- processes


def test_a_forked_child_is_told_to_connect_again(away: Server) -> None:
    with away.connect() as client:
        group = kept(client)
        messages = group.subscribe()
        group.publish("s", b"x")
        child = os.fork()
        if not child:
            code = 3
            try:
                for call in (lambda: group.publish("s", b"y"), messages.get, lambda: group.publish_many([("s", b"y")])):
                    try:
                        call()
                        os._exit(1)
                    except errors.Disconnected as error:
                        if "expected a new one in the child" not in str(error):
                            os._exit(2)
                with mqfs.connect(away.address, transport="ring") as own:
                    own.group("g").publish("s", b"of the child")
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert bodies(messages.get(HANG_S) for _ in range(2)) == [b"x", b"of the child"]
        group.publish("s", b"y")
        assert messages.get(HANG_S).body == b"y"


def test_threads_share_a_group(away: Server) -> None:
    with away.connect() as client:
        group = kept(client, "sync off")
        messages = group.subscribe()
        count = size(5_000)

        def run(name: int) -> None:
            for number in range(count):
                group.publish(f"s{name}", str(number))

        threads = [threading.Thread(target=run, args=(name,)) for name in range(6)]
        for thread in threads:
            thread.start()
        got = [messages.get(HANG_S) for _ in range(6 * count)]
        for thread in threads:
            thread.join()
        for name in range(6):
            assert [int(m.body) for m in got if m.stream == f"s{name}"] == list(range(count))


def test_subscriptions_begin_while_a_thread_publishes(away: Server) -> None:
    """Each in the ring, and each gets everything from then on."""
    with away.connect() as client:
        group = kept(client, "sync off")
        group.create("s")
        stop = threading.Event()

        def run() -> None:
            while not stop.is_set():
                group.publish_many((("s", bytes(100_000)) for _ in range(4)), wait="published")

        thread = threading.Thread(target=run)
        thread.start()
        for _ in range(size(300)):
            with group.subscribe() as messages:
                assert isinstance(messages, RingSubscription)
                first = messages.get(HANG_S).sequence
                assert [messages.get(HANG_S).sequence for _ in range(5)] == list(range(first + 1, first + 6))
        stop.set()
        thread.join()


def test_more_subscriptions_than_seats(away: Server) -> None:
    with away.connect() as client:
        group = kept(client)
        readers = [group.subscribe() for _ in range(70)]
        assert {type(reader) is RingSubscription for reader in readers} == {True, False}
        group.publish("s", b"x")
        assert {reader.get(HANG_S).body for reader in readers} == {b"x"}
        for reader in readers:
            reader.close()
        assert isinstance(group.subscribe(), RingSubscription)


def test_connecting_asks_for_no_ring(away: Server) -> None:
    """Nor does what only reads files: the first that is published or followed does."""
    with away.connect(transport="auto") as client:
        group = kept(client)
        group.create("s")
        assert list(group.history()) == []
        assert not attached(group)
        assert not (away.folder / "store" / "keeper").exists()
        group.publish("s", b"x", headers={"a": "b"})
        assert not attached(group)
        group.publish("s", b"x")
        assert attached(group)
        assert (away.folder / "store" / "keeper").exists()
