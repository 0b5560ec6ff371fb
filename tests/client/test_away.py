"""Faults that only a server can have: a kill, a restart, another owner. And who has a store."""

from __future__ import annotations

import gc
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

import mqfs
from mqfs import Outgoing, errors, limits, ring
from mqfs.client import Group
from mqfs.client.types import parse_answer
from tests.support.eventually import HANG_S, eventually, patient
from tests.support.server import Server, environment


def test_a_connection_that_is_lost_is_one_clear_error(server: Server) -> None:
    with server.connect(reconnect=False) as client:
        group = client.group("g", create=True)
        group.publish("s", b"1")
        messages = group.subscribe()
        server.kill()
        with pytest.raises(errors.Disconnected, match=r"^unix!"):
            next(messages)
        for _ in range(2):
            with pytest.raises(errors.Disconnected):
                group.publish("s", b"2")
        server.start()
        with pytest.raises(errors.Disconnected):
            group.publish("s", b"3")


@pytest.mark.slow
def test_a_call_after_the_restart_connects_again(server: Server) -> None:
    with server.connect(transport="9p") as client:
        group = client.group("g", create=True, ctl=["replay all"])
        group.publish("s", b"1")
        server.restart()
        with pytest.raises(errors.Disconnected):
            group.publish("s", b"2", id="two")
        group.publish("s", b"2", id="two")
        server.kill()
        with pytest.raises(errors.Disconnected):
            group.publish("s", b"3")
        with pytest.raises(errors.Disconnected, match="connection refused"):
            group.publish("s", b"3")
        server.start()
        group.publish("s", b"3")
        assert [message.body for message in group.history()] == [b"1", b"2", b"3"]


PUBLISHING: dict[str, Callable[[Group], object]] = {
    "publish": lambda group: group.publish("s", b"2"),
    "publish by its stream's file": lambda group: group.publish_many([("s", b"2")]),
    "publish with an id": lambda group: group.publish("s", b"2", id="two"),
    "publish_many with options": lambda group: group.publish_many([Outgoing("s", b"2", id="two")]),
    "publish in parts": lambda group: group.publish("s", bytes(limits.MESSAGE_BYTES + 1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", PUBLISHING)
def test_a_publish_after_another_call_has_connected_again_is_sent(server: Server, how: str) -> None:
    """It was not sent by the lost connection, so that it cannot be there twice."""
    with server.connect(transport="9p") as client:
        group = client.group("g", create=True, ctl=["replay all"])
        PUBLISHING[how](group)
        server.restart()
        with pytest.raises(errors.Disconnected):
            group.settings()
        group.settings()
        group.publish("s", b"between")
        PUBLISHING[how](group)
        expected = 2 if "id" in how or "options" in how else 3
        assert len(list(group.history())) == expected


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("pattern", ["#", "s", "*"])
def test_a_subscription_goes_on_behind_the_last(server: Server, number: int, pattern: str) -> None:
    """Everything once, in order, whenever the server goes away: before the first message, between, while it waits."""
    got: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    with server.connect() as client, server.connect() as waits:
        group = client.group("g", create=True, ctl=["replay all"])
        group.publish("s", b"before")
        unread, read = group.subscribe(pattern), waits.group("g").subscribe(pattern)
        thread = threading.Thread(target=lambda: [got.put(message.body) for message in read], daemon=True)
        thread.start()
        group.publish("s", b"0")
        assert got.get(timeout=HANG_S) == b"0"
        for turn in range(1, 4):
            server.restart(number)
            with server.connect() as other:
                other.group("g").publish_many([("s", f"{turn}a"), ("s", f"{turn}b")])
        wanted = [b"1a", b"1b", b"2a", b"2b", b"3a", b"3b"]
        assert [got.get(timeout=HANG_S) for _ in wanted] == wanted
        assert [unread.get(HANG_S).body for _ in range(7)] == [b"0", *wanted]
        read.close()
        thread.join(HANG_S)
        assert got.empty()


@pytest.mark.slow
def test_a_kill_under_load_loses_and_repeats_nothing(server: Server) -> None:
    """A publisher with ids that repeats what is not known, a subscription, and a server that is killed five times."""
    got: list[int] = []
    with server.connect() as client, server.connect() as other:
        group = client.group("g", create=True, ctl=["replay all"])
        messages = group.subscribe()

        def run() -> None:
            while len(got) < 400:
                got.append(int(messages.get(HANG_S).body))

        reader = threading.Thread(target=run)
        reader.start()
        for number in range(400):
            if number % 80 == 40:
                threading.Thread(target=server.process.kill).start()
            while True:
                try:
                    other.group("g").publish("s", str(number), id=str(number))
                    break
                except errors.Disconnected:
                    server.kill()
                    server.start()
        reader.join(HANG_S)
    assert got == list(range(400))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_consumer_goes_on(server: Server, number: int) -> None:
    with server.connect() as client:
        group = client.group("g", create=True, ctl=["replay all"])
        group.publish_many(("s", str(n)) for n in range(3))
        with group.consume("c") as claims:
            claims.get(HANG_S).ack()
            lost = claims.get(HANG_S)
            server.restart(number)
            with pytest.raises(errors.MqfsError) as raised:
                lost.ack()
            assert isinstance(raised.value, errors.Disconnected | errors.Stale)
            again = claims.get(HANG_S)
            assert (again.sequence, again.deliveries) == (lost.sequence, 2 if number == signal.SIGKILL else 1)
            with pytest.raises(errors.Stale, match="connection lost"):
                lost.ack()
            again.ack()
            claims.get(HANG_S).ack()
        assert group.stats().consumers["c"].waiting == 0


@pytest.mark.parametrize("prefetch", [1, 8])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_that_goes_while_a_handler_runs_is_told_by_the_next_get(
    server: Server, number: int, prefetch: int
) -> None:
    """The block ends as ever."""
    with server.connect() as client:
        group = client.group("g", create=True, ctl=["replay all"])
        group.publish("s", b"x")
        with group.consume("c", prefetch=prefetch) as claims:
            with claims.get(HANG_S) as claim:
                server.restart(number)
            with pytest.raises(errors.Stale, match=r"connection lost|lost before it was written"):
                claims.get(HANG_S)
            with claims.get(HANG_S) as again:
                assert again.sequence == claim.sequence
        assert group.stats().consumers["c"].waiting == 0


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
@pytest.mark.parametrize("how", ["prefetch 1", "prefetch 8", "single"])
def test_handlers_are_called_again_after_a_server_that_went_in_their_midst(
    server: Server, how: str, fails: bool
) -> None:
    seen: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    first = threading.Event()

    def handler(message: mqfs.Message | mqfs.Claim) -> None:
        seen.put(message.body)
        if not first.is_set():
            first.set()
            server.restart()
            if fails:
                raise KeyError("in the midst")

    with server.connect() as client:
        group = client.group("g", create=True, ctl=["replay all", "backoff 10ms 10ms"])
        group.create("s")
        for body in (b"1", b"2"):
            group.publish("s", body, single=how == "single")
        if how == "single":
            group.on("s", handler, single=True, on_error=lambda *_: None)
        else:
            group.work("w", handler, prefetch=int(how[-1]), on_error=lambda *_: None)
        got = [seen.get(timeout=HANG_S) for _ in range(3)]
        assert sorted(got) == [b"1", b"1", b"2"]


def test_a_server_that_goes_before_a_large_body_is_read(server: Server) -> None:
    """Its claim came before, with the one of the message before it."""
    large = bytes(range(256)) * 8_000
    with server.connect() as client:
        group = client.group("g", create=True, ctl=["replay all", "backoff 1ms 1ms"])
        group.publish("s", b"x")
        group.publish("s", large)
        with group.consume("c", prefetch=2) as claims:
            claims.get(HANG_S)
            server.restart()
            assert {claims.get(HANG_S).body, claims.get(HANG_S).body} == {b"x", large}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_transient_consumer_is_made_again(server: Server, number: int) -> None:
    """By a handle that waits while the server goes; not one that is removed while the server is there."""
    ended = threading.Event()
    with server.connect() as client:
        claims = client.group("g", create=True, ctl=["replay all"]).consume("c", over="s", transient=True)
        claims._when_ready(ended.set)  # a stopped server ends that read as the removal of the consumer does
        server.restart(number)
        assert ended.wait(HANG_S)
        with server.connect() as other:
            again = other.group("g")
            again.publish("s", b"1")
            claim = claims.get(HANG_S)
            assert claim.body == b"1"
            claim.ack()
            again.remove_consumer("c")
        with pytest.raises(EOFError):
            claims.get(HANG_S)
        claims.close()


def test_who_receives_hands_on_when_it_has_its_own(server: Server) -> None:
    """Threads that wait on one connection; whichever receives for all, the others get theirs after it has left."""
    with server.connect(transport="9p") as client, server.connect() as other:
        group, there = client.group("g", create=True), other.group("g")
        there.create(*(f"s{number}" for number in range(8)))
        got: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        readers = [group.subscribe(f"s{number}") for number in range(8)]
        threads = [threading.Thread(target=lambda r=reader: got.put(r.get(HANG_S).body)) for reader in readers]
        for thread in threads:
            thread.start()
        while there.stats().cursors < 8:
            pass
        for number in range(8):
            there.publish(f"s{number}", str(number))
            assert got.get(timeout=HANG_S) == str(number).encode()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_was_there_before_comes_also_where_the_server_goes_before_the_first_is_read(
    server: Server, number: int
) -> None:
    with server.connect() as client, server.connect(transport="9p") as writer:
        group = writer.group("g", create=True, ctl=["replay last"])
        group.publish("s", b"last")
        with client.group("g").subscribe(existing=True) as messages:
            server.restart(number)
            assert messages.get(HANG_S).body == b"last"


def test_patience_has_an_end(server: Server) -> None:
    with server.connect(reconnect=0.05) as client:
        messages = client.group("g", create=True).subscribe()
        server.kill()
        with pytest.raises(errors.Disconnected):
            messages.get()
        server.start()


def test_a_get_obeys_its_limits_while_the_server_is_away(server: Server) -> None:
    with server.connect() as client:
        group = client.group("g", create=True, ctl=["replay all"])
        with group.subscribe(reconnect=HANG_S) as messages, group.consume("c", reconnect=HANG_S) as claims:
            server.kill()
            sources: tuple[mqfs.Subscription | mqfs.Claims, ...] = (messages, claims)
            for source in sources:
                for timeout in 0.0, 0.001, 0.1:
                    began = time.monotonic()
                    with pytest.raises(TimeoutError, match="no message in"):
                        source.get(timeout)
                    assert time.monotonic() - began >= timeout
                thread = threading.Thread(target=source.interrupt)
                thread.start()
                with pytest.raises(errors.Interrupted):
                    source.get()
                thread.join()
            server.start()
            with server.connect() as other:
                other.group("g").publish("s", b"x")
            assert (messages.get(HANG_S).body, claims.get(HANG_S).body) == (b"x", b"x")


def test_a_get_obeys_its_limit_at_a_server_that_takes_connections_and_says_nothing(server: Server) -> None:
    with server.connect(transport="9p") as client:
        group = client.group("g", create=True, ctl=["replay all"])
        readers = [group.subscribe() for _ in range(8)]
        server.kill()
        path = server.address.removeprefix("unix!")
        os.unlink(path)
        with socket.socket(socket.AF_UNIX) as silent:
            silent.bind(path)
            silent.listen()
            begin = time.monotonic()
            with ThreadPoolExecutor(len(readers)) as pool:
                for waiting in [pool.submit(reader.get, 0.2) for reader in readers]:
                    with pytest.raises(TimeoutError, match=r"^no message in 0\.2 s$"):
                        waiting.result()
            assert time.monotonic() - begin < 5, "each waited for its turn to connect"
        os.unlink(path)
        server.start()
        client.group("g").publish("s", b"x")
        assert [reader.get(HANG_S).body for reader in readers] == [b"x"] * len(readers)


def test_closing_ends_a_reader_that_waits_for_the_server(server: Server) -> None:
    with server.connect() as client:
        messages = client.group("g", create=True).subscribe()
        ended: queue.SimpleQueue[object] = queue.SimpleQueue()
        thread = threading.Thread(target=lambda: ended.put(list(messages)))
        thread.start()
        server.kill()
        messages.close()
        assert ended.get(timeout=HANG_S) == []
        thread.join()
        server.start()


# ---------------------------------------------------------------- addresses and stores


def test_a_store_that_a_server_has(server: Server, tmp_path: Path) -> None:
    with pytest.raises(errors.BadStore) as raised:
        mqfs.open(server.folder / "store")
    assert f"in use by process {server.pid} (expected mqfs.connect('{server.address}'))" in str(raised.value)
    with mqfs.open(tmp_path / "store"), pytest.raises(errors.BadStore, match="this process: use its client"):
        mqfs.open(tmp_path / "store")


def test_a_store_is_free_again_and_keeps_what_it_was_told(tmp_path: Path) -> None:
    for number in range(3):
        with mqfs.open(tmp_path / "store", defaults=["replay all"]) as client:
            group = client.group("g", create=True)
            group.publish("s", str(number))
            with group.consume("c") as claims, claims.get(HANG_S) as claim:
                assert (claim.body, claim.deliveries) == (str(number).encode(), 1)
    with mqfs.open(tmp_path / "store") as client:
        assert [message.body for message in client.group("g").history()] == [b"0", b"1", b"2"]


@pytest.mark.process
def test_what_was_published_inside_survives_a_kill(tmp_path: Path) -> None:
    """`sync always`: it is on disk when publish returns, and a server finds it."""
    code = (
        "import mqfs, os, signal, sys; g = mqfs.open(sys.argv[1]).group('g', create=True, ctl=['replay all']);"
        "g.publish('s', b'kept'); g.publish_many([('s', b'too')]); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "store")], env=environment(), timeout=HANG_S)
    assert done.returncode == -signal.SIGKILL
    with mqfs.open(tmp_path / "store") as client:
        assert [message.body for message in client.group("g").history()] == [b"kept", b"too"]


def test_in_memory() -> None:
    with mqfs.open(None, defaults=["replay all"]) as client:
        client.group("a/b", create=True).publish("s", b"x")
        assert [message.body for message in client.group("a/b").history()] == [b"x"]


def test_transports(server: Server) -> None:
    with pytest.raises(errors.Unsupported, match=r"ring.*on this machine"):
        mqfs.connect("tcp!127.0.0.1!564", transport="ring")
    with pytest.raises(errors.Unsupported, match=r"ring.*is not the user of this process"):
        server.connect(transport="ring", user="12345")
    with pytest.raises(errors.BadRequest, match="transport 'udp'"):
        server.connect(transport="udp")
    with pytest.raises(errors.BadAddress):
        mqfs.connect("http://nowhere")
    with pytest.raises(errors.Disconnected, match="no such socket"):
        mqfs.connect(server.address + ".none")
    with server.connect(transport="9p") as client:
        client.group("deep/er", create=True)
        with server.connect(aname="deep") as inner:
            assert inner.group().groups() == ["er"]


@pytest.mark.skipif(bool(ring.MISSING), reason=ring.MISSING)
@pytest.mark.parametrize("by_itself", [True, False])
def test_rings_of_groups_that_were_removed_are_released(server: Server, by_itself: bool) -> None:
    """A client that publishes to one group after the other held the memory and two descriptors of each to its end."""
    held = []
    with server.connect(transport="ring") as client, server.connect() as other:
        for number in range(64):
            group = client.group(f"of{number}", create=True)
            group.create("s")
            group.publish("s", b"x")
            group.remove("s")
            (client if by_itself else other).remove_group(f"of{number}")
            held.append(len(os.listdir("/proc/self/fd")))
    assert max(held) - held[0] < 120


@pytest.mark.root
def test_what_is_there_needs_no_permission_to_make_it(server: Server) -> None:
    with server.connect() as owner, server.connect(user="nobody") as guest:
        group = owner.group("g", create=True, ctl=["replay all", "consumer c s"])
        group.publish("s", b"x")
        theirs = guest.group("g", create=True)
        assert [message.body for message in theirs.history()] == [b"x"]
        theirs.create("s")
        for call in (
            lambda: theirs.create("new"),
            lambda: theirs.publish("s", b"y"),
            lambda: theirs.publish("new", b"y"),
            lambda: theirs.consume("c"),
            lambda: theirs.consume("c", over="s"),
            lambda: theirs.ctl("replay off"),
            lambda: guest.group("new", create=True),
        ):
            with pytest.raises(errors.Denied, match="excludes uid"):
                call()


def test_a_forked_child_is_told_to_connect_again(server: Server, tmp_path: Path) -> None:
    with server.connect() as client, mqfs.open(tmp_path / "store") as inside:
        for tree in (client, inside):
            group = tree.group("g", create=True)
            child = os.fork()
            if not child:
                try:
                    group.publish("s", b"x")
                except errors.Disconnected as error:
                    os._exit(0 if "parent process" in str(error) else 1)
                finally:
                    os._exit(2)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("what", ["client", "group", "registration", "unsubscribe", "messages", "claims", "worker"])
@pytest.mark.parametrize("where", ["server", "store"])
def test_a_forked_child_closes_what_its_parent_uses(server: Server, tmp_path: Path, where: str, what: str) -> None:
    """Threads of the parent wait in a read, and a handler runs."""
    has_begun, may_end = threading.Event(), threading.Event()
    with mqfs.open(tmp_path / "store") if where == "store" else server.connect() as client:
        group = client.group("g", create=True, ctl=["replay all"])
        messages, claims = group.subscribe("other"), group.consume("c", over="other")
        registration = group.on("s", lambda message: (has_begun.set(), may_end.wait(HANG_S)))
        calls: dict[str, Callable[[], object]] = {
            "client": client.close, "group": group.close, "registration": registration.unsubscribe,
            "unsubscribe": group.unsubscribe, "messages": messages.close, "claims": claims.close,
            "worker": group.work("w", print, over="other").stop,
        }  # fmt: skip
        ends = [deque[bytes](), deque[bytes]()]
        for one, end in zip((messages, claims), ends, strict=True):
            threading.Thread(target=lambda one=one, end=end: end.extend(m.body for m in one), daemon=True).start()
        eventually(lambda: messages._turn.locked() and claims._turn.locked())
        group.publish("s", b"x")
        assert has_begun.wait(HANG_S)
        child = os.fork()
        if not child:
            signal.alarm(int(patient(20)))
            try:
                calls[what]()
                os._exit(0)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        may_end.set()
        group.publish("other", b"to the parent")
        eventually(lambda: [list(end) for end in ends] == [[b"to the parent"]] * 2)
        messages.close()
        claims.close()


@pytest.mark.parametrize("what", ["publish", "close"])
def test_a_forked_child_does_not_wait_for_a_thread_of_its_parent(server: Server, what: str) -> None:
    """One that was connecting again when it was forked."""
    with server.connect(transport="9p") as client:
        group = client.group("g", create=True)
        with client._link._dialling:
            child = os.fork()
            if not child:
                signal.alarm(int(patient(20)))
                try:
                    client.close() if what == "close" else group.publish("s", b"x")
                except errors.Disconnected as error:
                    os._exit(0 if "parent process" in str(error) else 1)
                else:
                    os._exit(0 if what == "close" else 1)
                finally:
                    os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@contextmanager
def outlived(use: Callable[[], object]) -> Iterator[None]:
    """A process that has the result of `use` is killed; a child which it forked lives through the block."""
    forked, may_end = os.pipe(), os.pipe()
    parent = os.fork()
    if not parent:
        try:
            used = use()
            if not os.fork():
                os.close(may_end[1])
                os.write(forked[1], b"x")
                os.read(may_end[0], 1)
                os._exit(0)
            signal.pause()
            assert used  # until now
        finally:
            os._exit(2)
    try:
        assert os.read(forked[0], 1)
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        yield
    finally:
        for end in (*forked, *may_end):
            os.close(end)


@pytest.mark.parametrize("transport", ["9p", "auto"])
def test_a_forked_child_keeps_no_claim_of_a_parent_that_is_killed(server: Server, transport: str) -> None:
    """Its copy of the connection would be open, and the server not see the end."""

    def claim() -> object:
        claims = mqfs.connect(server.address, transport=transport).group("g").take("s")
        claims.get(HANG_S)
        return claims

    with server.connect() as client:
        group = client.group("g", create=True, ctl=["deliver one"])
        group.publish("s", b"job")
        with outlived(claim), group.take("s") as claims:
            assert claims.get(HANG_S).deliveries == 2


@pytest.mark.process
def test_a_forked_child_keeps_no_store_of_a_parent_that_is_killed(tmp_path: Path) -> None:
    """Its copy of the lock would hold that."""

    def publish() -> object:
        client = mqfs.open(tmp_path / "store")
        client.group("g", create=True, ctl=["replay all"]).publish("s", b"x")
        return client

    with outlived(publish), mqfs.open(tmp_path / "store") as client:
        assert [message.body for message in client.group("g").history()] == [b"x"]


def test_ctrl_c_in_a_waiting_read_loses_nothing(server: Server, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    gc.disable()  # in the end of what an earlier test left it would be ignored
    request.addfinalizer(gc.enable)
    with server.connect() as client, mqfs.open(tmp_path / "store") as inside:
        for tree in (client, inside):
            group = tree.group("g", create=True, ctl=["replay all"])
            messages = group.subscribe()
            timer = threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012
                timer.start()
                next(messages)
            timer.join()
            group.publish("s", b"next")
            assert messages.get(HANG_S).body == b"next"


@pytest.mark.process
def test_importing_loads_nothing_of_the_library() -> None:
    code = "import sys, mqfs; assert {m for m in sys.modules if m.startswith('mqfs.')} == set(); "
    code += "mqfs.connect; assert 'trio' not in sys.modules and 'mqfs.engine.tree.tree' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True, timeout=HANG_S)


@pytest.mark.parametrize(
    "kind", [errors.Interrupted, errors.NotFound, errors.DiskFailed], ids=lambda kind: kind.__name__
)
def test_an_error_in_place_of_an_answer_is_raised(kind: type[errors.MqfsError]) -> None:
    """A command may fail after its write was answered; the read then has the text."""
    with pytest.raises(kind, match="the server stops"):
        parse_answer(f"{kind.text}: the server stops\n".encode())
    assert parse_answer(b'{"next":1}\n') == {"next": 1}
