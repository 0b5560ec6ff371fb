"""`mqfs bridge fq`: messages of other brokers, each here once, whoever is killed."""

from __future__ import annotations

import itertools
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from mqfs import limits
from mqfs.client import Group, Outgoing, StreamStats
from mqfs.errors import Disconnected
from mqfs.fq import codec
from mqfs.fq.codec import Message, MessageParser
from mqfs.ninep.client import connection
from tests.fq.client import Client, serve, stats
from tests.support import ROOT, campaign
from tests.support.certificates import Authority
from tests.support.eventually import HANG_S, eventually
from tests.support.ports import free_port
from tests.support.server import Server, environment, mqfs, short_folder, start

SETTINGS = ("replay all", "dedup 1h", "retries 0", "sync off")


class Node:
    """A broker of its own, and where it is reached after a restart, too."""

    def __init__(self, folder: Path, number: int, *options: str) -> None:
        folder.mkdir()
        self.address, self.port = f"127.0.0.{number}", free_port()
        self.server = serve(folder, "--fq", f"tcp!127.0.0.1!{self.port}", "--fq-node", self.address, *options)
        with self.server.connect() as tree:
            tree.group("fq/ex", create=True, ctl=SETTINGS)

    @property
    def at(self) -> str:
        return f"{self.server.folder}/fq"

    def bodies(self) -> Counter[bytes]:
        with self.server.connect() as tree:
            return Counter(message.body for message in tree.group("fq/ex").history())


class Bridge:
    """From one broker to another; started again when it was killed."""

    def __init__(self, source: int, target: Node, *more: str) -> None:
        """`source`: the port of a broker."""
        self._command = [sys.executable, "-m", "mqfs", "bridge", "fq", f"127.0.0.1:{source}", "ex"]
        self._target = [target.server.address, "--node", target.address, *more]
        self.program = "prefix:"
        self.log = target.server.folder / "bridge.log"
        self.start()

    def start(self, *more: str) -> None:
        with open(self.log, "ab") as log:
            words = [*self._command, self.program, *self._target, *more]
            self.process = start(words, cwd=ROOT, env=environment(), stdout=log, stderr=log)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(HANG_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert "Traceback" not in self.log.read_text(), self.log.read_text()


@contextmanager
def nodes(count: int, *options: str) -> Iterator[tuple[list[Node], ExitStack]]:
    with short_folder() as folder, ExitStack() as stack:
        found = []
        for number in range(count):
            found.append(Node(folder / f"{number}", number + 2, *options))
            stack.callback(found[-1].server.close)
        yield found, stack


@contextmanager
def bridged() -> Iterator[tuple[Node, Node, Bridge]]:
    """Two brokers, and a bridge from the one to the other, which is bound."""
    with nodes(2) as ((one, two), stack):
        bridge = Bridge(one.port, two)
        stack.callback(bridge.close)
        eventually(lambda: queue_is_bound(one, f"bridge-{two.address}-ex"), "the bridge to bind")
        yield one, two, bridge


@contextmanager
def bridged_from_peer(
    *options: str, more: tuple[str, ...] = (), settings: tuple[str, ...] = ()
) -> Iterator[tuple[Node, socket.socket, Bridge]]:
    """A broker, with more settings of its group, and a bridge to it from one that a test plays with `serve_peer`."""
    with nodes(1, *options) as ((here,), stack), socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(HANG_S)
        with here.server.connect() as tree:
            tree.group("fq/ex").ctl(*settings)
        bridge = Bridge(listener.getsockname()[1], here, *more)
        stack.callback(bridge.close)
        yield here, listener, bridge


def test_what_crosses_a_bridge() -> None:
    with bridged() as (one, two, bridge):
        with Client(one.at, kind="mem", user="Ünder") as here, Client(two.at, "there") as there:
            there.bind("ex")
            here.publish("ex", b"a/\xff", b"body", b"")
            full, empty = there.receive(2)
            assert (full.route, full.payload, full.sender) == (b"a/\xff", b"body", "Ünder".encode())
            assert full.hops == bytes([127, 0, 0, 3, 127, 0, 0, 2, 0, 0, 0, 0])
            assert (empty.payload, len(empty.id)) == (b"", 16)
        assert bridge.stop() == 0


SIGNALLED = """
import os, runpy, signal
from mqfs.ninep.client.connection import File
collect = File.__del__
def signal_and_collect(file):
    os.kill(os.getpid(), signal.SIGTERM)
    collect(file)
File.__del__ = signal_and_collect
runpy.run_module("mqfs", run_name="__main__")
"""


def test_a_signal_while_garbage_is_collected_ends_it() -> None:
    """Python ignores what is raised there."""
    with nodes(1) as ((one,), _):
        words = ("ex", "prefix:", one.server.address, "--node", "127.0.0.9")
        command = [sys.executable, "-c", SIGNALLED, "bridge", "fq", f"127.0.0.1:{one.port}", *words]
        done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=HANG_S)
        assert done.returncode == 0, done.stderr
        assert "ignored" not in done.stderr


def test_a_client_on_the_host_of_the_broker_here() -> None:
    """Hops are the brokers, the first one last, and behind it the client. A broker names itself as its own client."""
    other, mine = bytes([127, 0, 0, 9]), bytes([127, 0, 0, 2])
    ways = [other + mine, other + other + mine, mine + mine, other + mine + other, mine, other]
    with bridged_from_peer() as (here, listener, bridge):
        sent = [message(number)._replace(hops=hops) for number, hops in enumerate(ways)]
        serve_peer(listener, sent, len(sent))
        assert here.bodies() == Counter([b"0", b"1", b"5"])
        assert bridge.stop() == 0


def queue_is_bound(node: Node, queue: str) -> bool:
    with node.server.connect() as tree:
        return queue in tree.group("fq/ex").consumers()


def test_a_program_that_is_none_ends_it() -> None:
    with nodes(1) as ((one,), _):
        words = ("bridge", "fq", f"127.0.0.1:{one.port}", "ex", "none", one.server.address, "--node", "127.0.0.9")
        done = mqfs(*words, cwd=one.server.folder)
        assert done.returncode == 1
        assert "program 'none'" in done.stderr
        assert mqfs("bridge", "fq", "nowhere", "ex", "prefix:", "unix!x", "--node", "1.2.3.4", cwd=ROOT).returncode == 2


def test_over_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker asks for a password, which is a token."""
    with short_folder() as folder, nodes(1) as ((here,), stack):
        authority, tokens = Authority(folder), folder / "tokens"
        secret = mqfs("token", "new", "root", "--token-file", str(tokens), cwd=folder).stdout.split()[-1]
        (folder / "secret").write_text(secret)
        tls = ("--tls-cert", str(authority.of_server()), "--fq", "tls!127.0.0.1!0", "--token-file", str(tokens))
        there = stack.enter_context(Server.at(folder, *tls, "--fq-node", "127.0.0.9"))
        (number,) = re.findall(r"tls!127\.0\.0\.1!(\d+)", there.text())
        monkeypatch.setenv("MQFS_CA", str(authority.path))
        words = (
            "bridge",
            "fq",
            f"tls!127.0.0.1!{number}",
            "ex",
            "prefix:",
            here.server.address,
            "--node",
            here.address,
        )
        secrets = ("--name", "root", "--password-file", str(folder / "secret"))
        command = [sys.executable, "-m", "mqfs", *words, *secrets]
        with open(folder / "bridge.log", "wb") as log:
            process = start(command, cwd=ROOT, env=environment(), stderr=log)
        stack.callback(process.wait, HANG_S)
        stack.callback(process.terminate)
        with there.connect() as tree:
            group = tree.group("fq/ex", create=True)
            eventually(lambda: f"bridge-{here.address}-ex" in group.consumers(), "the bridge to bind")
            group.publish("r", b"secret")
        eventually(lambda: here.bodies() == Counter([b"secret"]))
        assert "counters not read" not in (folder / "bridge.log").read_text()


def message(number: int, route: bytes = b"a", payload: bytes = b"") -> Message:
    return Message(b"ex", route, bytes([number] * 16), payload or b"%d" % number, b"me")


def refuse_counters(counters: socket.socket) -> None:
    counters.sendall(b"HTTP/1.0 404 Not Found\r\n\r\n")


def drip_counters(counters: socket.socket) -> None:
    """An answer of ever more bytes while the bridge reads it, at most for as long as a key waits for its connection."""
    counters.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
    ended = select.poll()
    ended.register(counters, select.POLLRDHUP)
    deadline = time.monotonic() + limits.FQ_AUTH_S
    while not ended.poll(100):
        assert time.monotonic() < deadline
        counters.sendall(b" ")


def serve_peer(
    listener: socket.socket,
    sent: list[Message],
    confirmed: int,
    answer_counters: Callable[[socket.socket], None] = refuse_counters,
) -> None:
    """Be a broker for one connection of a bridge: send it messages, until it confirms that number of them.
    `answer_counters`: is called with the connection that asks for the counters."""
    with listener.accept()[0] as commands:
        commands.sendall(codec.authenticated(b"key"))
        commands.sendall(codec.bound(1))
        with listener.accept()[0] as counters:
            counters.recv(1 << 16)
            answer_counters(counters)
        with listener.accept()[0] as data:
            data.settimeout(HANG_S)
            data.recv(len(codec.data(b"key", bytes(4))), socket.MSG_WAITALL)
            data.sendall(b"".join(map(codec.relayed, sent)))
            parser, count = MessageParser(relayed=True), 0
            while count < confirmed:
                received = data.recv(1 << 16)
                assert received, f"it ended after {count}"
                counts = [int.from_bytes(one.payload) for one in parser.receive(received)]
                assert [count, *counts] == sorted([count, *counts])
                count = counts[-1]
            assert count == confirmed


def test_a_broker_that_ends_each_connection_is_reported_once() -> None:
    """Until a message has come: then it is reported once again."""
    with bridged_from_peer() as (_, listener, bridge):
        for count in (0, 0, 0, 1, 0, 0, 0):
            serve_peer(listener, [message(1)] * count, count)
        assert bridge.log.read_text().count("; reconnecting") == 2
        assert bridge.log.read_text().count(": exchange ex") == 2
        assert bridge.stop() == 0


@pytest.mark.parametrize(
    "wrong",
    [("", "prefix:"), ("e" * 128, "prefix:"), ("ex", ""), ("ex", "prefix:" + "p" * 4_096), ("ex", "prefix:\udcff")]
    + [("ex", "prefix:", "--queue", "q" * 1_024), ("ex", "prefix:", "--name", "n" * 128)],
)
def test_what_no_broker_can_be_asked_ends_it(wrong: tuple[str, ...]) -> None:
    exchange, program, *more = wrong
    words = ("bridge", "fq", "127.0.0.1:1", exchange, program, "unix!/nowhere", "--node", "127.0.0.9", *more)
    done = mqfs(*words, cwd=ROOT)
    assert done.returncode == 2
    assert re.search("(EXCHANGE|PROGRAM|--queue|--name): .*(expected|UTF-8)", done.stderr)


@pytest.mark.parametrize("more", [(), ("--transient",)], ids=["permanent", "transient"])
def test_another_program_takes_the_place_of_the_one_before(more: tuple[str, ...]) -> None:
    """The messages that wait were selected by the earlier one, and are carried. `more`: options of the later run."""
    with bridged() as (one, two, bridge), Client(one.at, kind="mem") as client:
        client.publish("ex", "secret.1", b"before")
        eventually(lambda: two.bodies() == Counter([b"before"]))
        assert bridge.stop() == 0
        client.publish("ex", "secret.2", b"waits")
        client.publish("ex", "public.2", b"selected")
        bridge.program = 'prefix:"public."'
        bridge.start(*more)
        eventually(lambda: routes(one.port) == [bridge.program], "one program")
        client.publish("ex", "secret.3", b"secret")
        client.publish("ex", "public.3", b"public")
        eventually(lambda: b"public" in two.bodies())
        assert two.bodies() == Counter([b"before", b"waits", b"selected", b"public"])
        assert bridge.stop() == 0


def test_a_message_comes_though_the_counters_never_end() -> None:
    with bridged_from_peer() as (here, listener, bridge):
        serve_peer(listener, [message(1)], 1, drip_counters)
        assert here.bodies() == Counter([b"1"])
        assert "earlier programs stay bound: TimeoutError" in bridge.log.read_text()
        assert bridge.stop() == 0


def routes(port: int) -> list[str]:
    """The programs of an exchange."""
    return [row["program"] for row in stats(port)["exchanges"]["ex"]["routes"].values()]


def test_a_bind_that_is_refused_for_now_is_tried_again() -> None:
    with bridged_from_peer() as (_, listener, bridge):
        for _ in range(2):
            with listener.accept()[0] as commands:
                commands.sendall(codec.authenticated(b"key") + codec.bound(codec.ILLEGAL))
                commands.recv(1 << 16)
        serve_peer(listener, [message(1)], 1)
        assert bridge.log.read_text().count("bind refused") == 1
        assert bridge.stop() == 0


@pytest.mark.parametrize(
    "route", [b"\xff" * 127, b"sub", b"closed", b"new"], ids=["too-long", "a-group", "denied", "no-new-streams"]
)
def test_a_message_that_no_stream_can_take_is_left_out(route: bytes) -> None:
    """Too long are 381 bytes, escaped. The bridge acts as the user nobody."""
    with bridged_from_peer(more=("--user", "nobody")) as (here, listener, bridge):
        with here.server.connect() as tree, connection.connect(here.server.address) as files:
            tree.group("fq/ex/sub", create=True)
            for stream in ("a", "closed"):
                tree.group("fq/ex").publish(stream, b"before")
            for path, mode in (("fq", 0o777), ("fq/ex", 0o777), ("fq/ex/a", 0o666), ("fq/ex/closed", 0o600)):
                files.chmod(path, mode)
            if route == b"new":
                files.chmod("fq/ex", 0o755)
        serve_peer(listener, [message(0), message(1, route), message(2)], 3)
        assert here.bodies() == Counter({b"before": 2, b"0": 1, b"2": 1})
        assert bridge.log.read_text().count("left out") == 1
        assert bridge.stop() == 0


def test_a_group_that_takes_no_message_ends_it_and_none_is_confirmed() -> None:
    with bridged_from_peer(more=("--user", "nobody")) as (here, listener, bridge):
        eventually(lambda: select.select([listener], [], [], 0)[0], "the bridge to connect")
        with connection.connect(here.server.address) as files:
            files.chmod("fq/ex", 0o700)
        with pytest.raises((AssertionError, ConnectionError), match=r"it ended after 0|reset"):
            serve_peer(listener, [message(0)], 1)
        assert bridge.process.wait(HANG_S) == 1


def test_what_a_full_group_discards_waits_for_room() -> None:
    with bridged_from_peer() as (here, listener, bridge), here.server.connect() as tree:
        group = tree.group("fq/ex")
        serve_peer(listener, [message(9)], 1)
        group.purge("a")
        group.ctl("depth 2", "full drop-new")
        sent = [message(number) for number in range(6)]
        serving = threading.Thread(target=serve_peer, args=(listener, sent, 6))
        serving.start()
        for number in range(0, 6, 2):
            eventually(lambda: here.bodies() == Counter([b"%d" % number, b"%d" % (number + 1)]), "two")  # noqa: B023
            eventually(lambda: "waiting for room" in bridge.log.read_text(), "it waits")
            group.purge("a")
        serving.join(HANG_S)
        assert bridge.log.read_text().count("waiting for room") == 1
        assert bridge.stop() == 0


def test_what_comes_first_to_a_group_that_discards_is_there_once_and_in_order() -> None:
    """It remembers no id."""
    settings = ("dedup 0", "deliver one", "full drop-new", "depth 10")
    with bridged_from_peer(settings=settings) as (here, listener, bridge), here.server.connect() as tree:
        group, sent = tree.group("fq/ex"), [message(number) for number in range(30)]
        group.create("a")
        serving = threading.Thread(target=serve_peer, args=(listener, sent, len(sent)))
        serving.start()
        found = []
        with group.take("a") as claims:
            while serving.is_alive() or group.stats().streams["a"].messages:
                with suppress(TimeoutError), claims.get(0.1) as claim:
                    found.append(claim.body)
        assert found == [one.payload for one in sent]
        assert bridge.stop() == 0


def test_it_waits_for_room() -> None:
    with bridged() as (one, two, bridge), one.server.connect() as there, two.server.connect() as here:
        slow = here.group("fq/ex")
        slow.ctl("consumer slow a backlog 1 full reject")
        there.group("fq/ex").publish_many([("a", b"%d" % number) for number in range(5)])
        eventually(lambda: "waiting for room" in bridge.log.read_text(), "the bridge to wait")
        assert two.bodies() == Counter([b"0"])
        with slow.consume("slow") as claims:
            for number in range(5):
                with claims.get(HANG_S) as claim:
                    assert claim.body == b"%d" % number
        assert bridge.log.read_text().count("waiting for room") == 1
        assert bridge.stop() == 0


def test_it_waits_while_its_user_may_open_no_file() -> None:
    limit = ("--limit", f"{os.geteuid()} handles=1")
    with bridged_from_peer(*limit) as (here, listener, bridge):
        eventually(lambda: select.select([listener], [], [], 0)[0], "the bridge to connect")
        with connection.connect(here.server.address) as files, files.open("fq/ex/ctl"):
            serving = threading.Thread(target=serve_peer, args=(listener, [message(1)], 1))
            serving.start()
            eventually(lambda: "waiting for room" in bridge.log.read_text(), "the bridge to wait")
        serving.join(HANG_S)
        assert here.bodies() == Counter([b"1"])
        assert bridge.stop() == 0


def forget(group: Group) -> None:
    """Have all ids of before forgotten: wait until one more is."""
    first = group.publish("probe", b"probe", id="probe").sequence
    eventually(lambda: group.publish("probe", b"probe", id="probe").sequence != first, "the end of dedup")


def take(group: Group, count: int) -> Counter[bytes]:
    """What the consumer has, and nothing behind that."""
    with group.consume("slow") as claims:
        bodies = Counter[bytes]()
        while bodies.total() < count:
            with claims.get(HANG_S) as claim:
                bodies[claim.body] += 1
    assert group.stats().consumers["slow"].waiting == 0
    return bodies


def blocked(group: Group) -> int:
    """Writes to the stream that wait for room."""
    try:
        return group.stats().streams.get("a", StreamStats()).blocked
    except Disconnected:
        return 0


def test_it_waits_for_room_through_a_restart() -> None:
    """The stopping server interrupts the write that waits."""
    with bridged() as (one, two, bridge), one.server.connect() as there, two.server.connect() as here:
        slow = here.group("fq/ex")
        slow.ctl("consumer slow a backlog 1 full block")
        there.group("fq/ex").publish_many([("a", b"%d" % number) for number in range(5)])
        eventually(lambda: blocked(slow), "the bridge to wait")
        for _ in range(2):
            two.server.restart(signal.SIGTERM)
            eventually(lambda: blocked(slow), "the bridge to wait again")
        assert take(slow, 5) == Counter(b"%d" % number for number in range(5))
        assert bridge.stop() == 0


@pytest.mark.parametrize("full", ["reject", "block"])
def test_what_has_room_is_confirmed_before_what_waits(full: str) -> None:
    """So that it does not come again, when its id is forgotten."""
    with bridged_from_peer() as (here, listener, bridge), here.server.connect() as tree:
        slow = tree.group("fq/ex")
        slow.ctl("dedup 1s", f"consumer slow a backlog 2 full {full}")
        sent = [message(number) for number in range(5)]
        serve_peer(listener, sent, 2)
        serve_peer(listener, sent[2:], 0)  # the broker has gone: it connects again, also while it waits
        forget(slow)
        serving = threading.Thread(target=serve_peer, args=(listener, sent[2:], 3))
        serving.start()
        assert take(slow, 5) == Counter(b"%d" % number for number in range(5))
        serving.join(HANG_S)
        assert bridge.stop() == 0


def test_a_long_wait_for_room_repeats_nothing() -> None:
    """The broker has sent all at once, and takes a confirmation of some of it."""
    with bridged() as (one, two, bridge), one.server.connect() as there, two.server.connect() as here:
        slow = here.group("fq/ex")
        slow.ctl("dedup 1s", "consumer slow a backlog 2 full reject")
        there.group("fq/ex").publish_many([("a", b"%d" % number) for number in range(5)])
        eventually(lambda: "waiting for room" in bridge.log.read_text(), "the bridge to wait")
        forget(slow)
        assert bridge.stop() == 0
        bridge.start()
        assert take(slow, 5) == Counter(b"%d" % number for number in range(5))
        assert bridge.stop() == 0


def test_what_went_in_behind_a_refused_message_is_there_once() -> None:
    """A small one has room, where the one before it has none, until its id is forgotten."""
    with bridged_from_peer() as (here, listener, bridge), here.server.connect() as tree:
        group = tree.group("fq/ex")
        group.ctl("dedup 1s", "full reject", "depth 100B")
        payloads = [b"a" * 60, b"b" * 60, b"c" * 20]
        sent = [message(number, payload=payload) for number, payload in enumerate(payloads)]
        serving = threading.Thread(target=serve_peer, args=(listener, sent, 3))
        serving.start()
        eventually(lambda: here.bodies() == Counter([payloads[0], payloads[2]]), "two to have room")
        forget(group)
        group.ctl("depth 0")
        serving.join(HANG_S)
        assert here.bodies() == Counter([*payloads, b"probe", b"probe"])
        assert bridge.stop() == 0


def test_nothing_is_confirmed_that_is_not_published() -> None:
    """The broker here is away when a message comes, and the bridge is killed before it is back."""
    with bridged() as (one, two, bridge):
        two.server.kill()
        with one.server.connect() as tree:
            tree.group("fq/ex").publish("r", b"body")
        eventually(lambda: "reconnecting" in bridge.log.read_text(), "the bridge to have it")
        bridge.stop(signal.SIGKILL)
        two.server.start()
        bridge.start()
        eventually(lambda: two.bodies() == Counter([b"body"]), "the message")


def publish(group: Group, bodies: list[bytes]) -> None:
    """Each once, however often the server is killed meanwhile."""
    for at in range(0, len(bodies), 100):
        some = [Outgoing("r", body, id=body.decode()) for body in bodies[at : at + 100]]
        while True:
            try:
                group.publish_many(some)
                break
            except Disconnected:
                continue


def test_a_triangle_under_kills() -> None:
    """Each of three brokers has each message once: by two ways it comes, and by none again where it began."""
    choose = random.Random(campaign.seed())
    count = campaign.size(100_000, 200) // 3
    with nodes(3) as (all_three, stack):
        bridges = [Bridge(one.port, other) for one, other in itertools.permutations(all_three, 2)]
        for bridge in bridges:
            stack.callback(bridge.close)
        sent = [[b"%d-%d" % (number, n) for n in range(count)] for number in range(3)]
        groups = [stack.enter_context(node.server.connect()).group("fq/ex") for node in all_three]
        writers = [threading.Thread(target=publish, args=pair) for pair in zip(groups, sent, strict=True)]
        for one, other in itertools.permutations(all_three, 2):
            eventually(lambda: queue_is_bound(one, f"bridge-{other.address}-ex"), "all to be bound")  # noqa: B023
        for writer in writers:
            writer.start()
        for _ in range(campaign.size(60, least=3)):
            victim = choose.choice([*all_three, *bridges])
            if isinstance(victim, Bridge):
                victim.stop(signal.SIGKILL)
                victim.start()
            else:
                victim.server.restart()
        for writer in writers:
            writer.join(HANG_S)
        wanted = Counter(itertools.chain(*sent))
        for node in all_three:
            eventually(lambda: len(node.bodies()) == len(wanted), f"all at {node.address}")  # noqa: B023
            assert node.bodies() == wanted
