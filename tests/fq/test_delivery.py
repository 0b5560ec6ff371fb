"""Clients that are killed, and links that are cut, under messages: none is lost, and an id tells what came twice.

A client writes each message down before it takes it from its kernel, as a program must that loses none. A link is a
wire between two network namespaces, which is taken down.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from mqfs.fq import codec
from tests.fq.client import Client, connect, port, serve, stats
from tests.support import ROOT, campaign
from tests.support.eventually import HANG_S, eventually
from tests.support.server import Server, environment, short_folder, start

KIND = "disk:public,permanent,backlog=100000"
COUNT = 10_000


def publish(address: str, count: int) -> None:
    """Messages with numbers, as fast as they are taken."""
    with Client(address, kind="mem") as client:
        for at in range(0, count, 100):
            client.publish("kills", "r", *[b"%d" % number for number in range(at, min(at + 100, count))])
        eventually(lambda: client.counts()["routed"] == count, "all to be routed")


def had(file: Path) -> Counter[str]:
    """The lines that clients recorded; of one that was killed the last line may be torn."""
    return Counter(line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n"))


def reader(server: Server, file: Path) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "tests.fq.reader", f"{server.folder}/fq", "kills", KIND, str(file)]
    return start(words, cwd=ROOT, env=environment())


def seen(file: Path) -> int:
    """Different messages; what came twice has the same id both times."""
    pairs = {tuple(line.split()) for line in had(file)}
    assert len(pairs) == len({number for number, _ in pairs})
    return len(pairs)


def test_killed_clients_lose_nothing() -> None:
    choose = random.Random(campaign.seed())
    count = campaign.size(COUNT)
    with short_folder() as folder, serve(folder) as server:
        address, file = f"{folder}/fq", folder / "had"
        file.touch()
        with Client(address, "kills", KIND, with_data=False) as asks:
            asks.bind("kills")
            writer = threading.Thread(target=publish, args=(address, count))
            writer.start()
            for _ in range(campaign.size(40, least=3)):
                process = reader(server, file)
                enough = len(had(file)) + choose.randrange(1, count // 50)
                eventually(lambda: len(had(file)) >= min(enough, count), "progress")  # noqa: B023
                process.send_signal(signal.SIGKILL)
                process.wait(HANG_S)
            writer.join(HANG_S)
            process = reader(server, file)
            try:
                eventually(lambda: seen(file) == count, "the rest")
                eventually(lambda: stats(port(server))["queues"]["kills"]["backlog"] == 0, "the last acks")
            finally:
                process.kill()
                process.wait()


def test_a_peer_may_ack_the_first_of_what_is_still_being_sent() -> None:
    """A large message after it waits for room in the socket."""
    with short_folder() as folder, serve(folder) as server, server.connect() as tree:
        where, kind = f"{folder}/fq", "disk:private,permanent"
        with Client(where, "peer", kind, with_data=False) as peer, Client(where) as writer:
            peer.bind("ex")
            writer.publish("ex", "r", b"small", bytes(1_000_000))
            eventually(lambda: writer.counts()["routed"] == 2, "both to wait")
            peer.data = connect(where)
            peer.data.sendall(codec.data(peer.key, bytes([127, 0, 0, 9])))
            received = peer.data.recv(1_000)
            assert b"small" in received
            peer.data.sendall(ack(1))
            group = tree.group("fq/ex")
            eventually(lambda: group.stats().consumers["peer"].acknowledged == 1, "the first to be acked")
            left = 1_000_000 - len(received)
            while left > 0:
                left -= len(peer.data.recv(1 << 18))
            peer.data.sendall(ack(2))
            eventually(lambda: group.stats().consumers["peer"].acknowledged == 2, "the other, too")


def ack(count: int) -> bytes:
    """Confirm the first messages of a connection."""
    return codec.relayed(codec.Message(codec.CONFIRM, b"", bytes(codec.ID_BYTES), count.to_bytes(8), b"me"))


class Wire:
    """A network namespace, and the one wire to it."""

    def __init__(self) -> None:
        self.name = f"fq{os.getpid()}"
        number = os.getpid() % 250
        self.near, self.far = f"10.213.{number}.1", f"10.213.{number}.2"
        self._ip("netns", "add", self.name)
        self._ip("link", "add", self.name, "type", "veth", "peer", "name", "wire", "netns", self.name)
        self._ip("addr", "add", f"{self.near}/24", "dev", self.name)
        self._ip("link", "set", self.name, "up")
        self._ip("-n", self.name, "addr", "add", f"{self.far}/24", "dev", "wire")
        self.set("up")

    def set(self, state: str) -> None:
        """`down`: not a byte passes, and neither end gets an error."""
        self._ip("-n", self.name, "link", "set", "wire", state)

    def close(self) -> None:
        self._ip("netns", "del", self.name)

    @staticmethod
    def _ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, timeout=HANG_S)


@pytest.mark.root
def test_cut_links_lose_nothing() -> None:
    choose = random.Random(campaign.seed())
    count = campaign.size(COUNT)
    wire = Wire()
    with contextlib.closing(wire), short_folder() as folder:
        listen = ("--fq", f"tcp!{wire.near}!0", "--insecure")
        with serve(folder, *listen) as server:
            lines = server.text().splitlines()
            where = next(
                line.partition(f"{wire.near}!")[2].partition(",")[0] for line in lines if f"{wire.near}!" in line
            )
            address, file = f"{folder}/fq", folder / "had"
            file.touch()
            words = [sys.executable, "-m", "tests.fq.reader", f"{wire.near}:{where}", "kills", KIND, str(file)]
            in_space = ["ip", "netns", "exec", wire.name, *words]
            with Client(address, "kills", KIND, with_data=False) as asks:
                asks.bind("kills")
                writer = threading.Thread(target=publish, args=(address, count))
                writer.start()
                process = subprocess.Popen(in_space, cwd=ROOT, env=environment())
                try:
                    for _ in range(campaign.size(20, least=2)):
                        enough = len(had(file)) + choose.randrange(1, count // 20)
                        eventually(lambda: len(had(file)) >= min(enough, count), "progress")  # noqa: B023
                        wire.set("down")
                        eventually(lambda: clients(server) == 1, "its heartbeats to be missed")
                        wire.set("up")
                    writer.join(HANG_S)
                    eventually(lambda: seen(file) == count, "the rest")
                finally:
                    process.kill()
                    process.wait()


def clients(server: Server) -> int:
    return len(stats(port(server))["queues"]["kills"]["clients"])
