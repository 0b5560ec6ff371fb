"""`mqfs promote` under load: the primary hands over, and nothing that was acknowledged is lost, whatever ends half-way.
And a start without --standby, which takes over from a primary that still appends."""

from __future__ import annotations

import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import pytest

from mqfs import errors
from tests.replica.servers import NatsServer, url_of
from tests.replica.test_servers import Node, wait_until_equal
from tests.support.campaign import seed, size
from tests.support.eventually import HANG_S, eventually
from tests.support.server import COMMAND, environment, mqfs, short_folder, start

ASKED = "mqfs promote: the standby is to be the primary"
pytestmark = [pytest.mark.process, pytest.mark.slow]


@contextmanager
def served(url: str, count: int = 2) -> Iterator[list[Node]]:
    """A primary and its standbys, none of which takes over by itself."""
    nodes = list[Node]()
    folders = [short_folder() for _ in range(count)]
    try:
        for number, folder in enumerate(folders):
            more = ["--standby"] if number else []
            nodes.append(Node.of(folder.__enter__(), url, "--failover", "1h", *more))
        yield nodes
    finally:
        for node in nodes:
            node.close()
        for folder in folders[: len(nodes)]:
            folder.__exit__(None, None, None)


class Load:
    """Four writers at a time, each round to one server, with numbers of their own, until that has ended or `end`."""

    def __init__(self) -> None:
        self.acknowledged: list[int] = []
        self._writers = 0
        self._threads: list[threading.Thread] = []
        self._ending = threading.Event()

    def begin(self, node: Node, sync: str) -> None:
        with node.connect() as client:
            client.group("jobs", create=True, ctl=["replay all", f"sync {sync}"])
        self._ending.clear()
        before = len(self.acknowledged)
        for _ in range(4):
            self._writers += 1
            self._threads.append(threading.Thread(target=self._write, args=(node, self._writers)))
            self._threads[-1].start()
        eventually(lambda: len(self.acknowledged) > before + 100)

    def _write(self, node: Node, writer: int) -> None:
        with suppress(errors.MqfsError), node.connect(reconnect=False) as client:
            group = client.group("jobs")
            for number in count(writer * 1_000_000):
                if self._ending.is_set():
                    break
                group.publish("q", b"%d" % number)
                self.acknowledged.append(number)

    def end(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()
        self._threads = []

    def check(self, node: Node) -> None:
        """That server has each message that was acknowledged, and none twice."""
        found = node.numbers()
        assert set(self.acknowledged) - set(found) == set(), node.text()
        assert len(found) == len(set(found))


def promote(node: Node, *more: str) -> subprocess.CompletedProcess[str]:
    return mqfs("promote", *more, str(node.store), cwd=node.folder)


def set_aside(node: Node) -> list[Path]:
    return list(node.store.glob("quarantine/fenced-*"))


@pytest.mark.parametrize("url", ["file", "nats", "s3"], indirect=True)
def test_a_promote_loses_nothing_and_sets_nothing_aside(url: str) -> None:
    """To and fro, while others write."""
    load = Load()
    with served(url) as (primary, standby):
        for _ in range(3):
            load.begin(primary, "always")
            done = promote(standby)
            assert (done.returncode, done.stderr) == (0, ""), standby.text()
            assert primary.process.wait(HANG_S) == 75
            load.end()
            eventually(standby.is_primary)
            load.check(standby)
            primary.stand_by()
            primary, standby = standby, primary
            wait_until_equal(primary, standby)
        assert set_aside(primary) + set_aside(standby) == []


@pytest.mark.parametrize("url", ["file"], indirect=True)
def test_a_start_takes_over_from_a_primary_that_goes_on(url: str) -> None:
    """Whatever it appends between the last look of the other one and its takeover."""
    load = Load()
    with served(url) as nodes:
        for node in nodes:
            node.arguments = [word for word in node.arguments if word != "--standby"]
        for _ in range(size(6, 3)):
            primary, other = nodes
            assert other.stop() in (0, 75)
            load.begin(primary, "replica")
            other.start()
            load.end()
            assert primary.process.wait(HANG_S) == 75
            load.check(other)
            nodes.reverse()


def test_a_promote_that_failed_takes_nothing_over_later(engine: NatsServer) -> None:
    """The log does not answer for as long as the command waits."""
    with served(url_of([engine], "shop")) as (primary, standby):
        primary.publish(0, 5)
        wait_until_equal(primary, standby)
        assert engine.process is not None
        engine.process.send_signal(signal.SIGSTOP)
        try:
            done = promote(standby, "--wait", "1s")
        finally:
            engine.process.send_signal(signal.SIGCONT)
        assert done.returncode == 1
        assert "not promoted in 1 s, and given up" in done.stderr
        for number in range(5, 15):  # for longer than the primary needs to see a request
            primary.publish(number, number + 1)
            wait_until_equal(primary, standby)
            time.sleep(0.2)
        assert primary.is_primary()
        assert not standby.is_primary()
        assert promote(standby).returncode == 0
        eventually(standby.is_primary)  # it listens after the command has its answer
        assert standby.numbers() == list(range(15))


@pytest.mark.parametrize("url", ["file", "nats"], indirect=True)
def test_of_a_promote_that_is_interrupted_the_primary_serves_on_or_the_other_one(url: str) -> None:
    """At any moment, and another promote after it."""
    pick, load = random.Random(seed()), Load()
    with served(url) as (primary, standby):
        for _ in range(size(16, 4)):
            load.begin(primary, "always")
            command = [*COMMAND, "promote", str(standby.store)]
            with start(command, cwd=standby.folder, env=environment(), stdout=subprocess.DEVNULL) as promoting:
                eventually(lambda one=standby: ASKED in one.text())  # type: ignore[misc]
                time.sleep(pick.uniform(0.0, 1.5))
                promoting.kill()
            done = promote(standby)
            assert (done.returncode, done.stderr) == (0, "") or "no standby serves it" in done.stderr, standby.text()
            assert primary.process.wait(HANG_S) == 75
            load.end()
            eventually(standby.is_primary)
            load.check(standby)
            standby.log.write_text("")
            primary.log.write_text("")
            primary.stand_by()
            primary, standby = standby, primary
            wait_until_equal(primary, standby)
        assert set_aside(primary) + set_aside(standby) == []


@pytest.mark.parametrize("url", ["file", "nats"], indirect=True)
def test_a_primary_that_is_killed_while_it_hands_over(url: str) -> None:
    load = Load()
    with served(url) as (primary, standby):
        for _ in range(size(4, 1)):
            load.begin(primary, "replica")
            command = [*COMMAND, "promote", str(standby.store)]
            with start(command, cwd=standby.folder, env=environment(), stdout=subprocess.DEVNULL) as promoting:
                eventually(lambda one=primary: "is to be the primary: stopping" in one.text())  # type: ignore[misc]
                primary.kill()
                assert promoting.wait(HANG_S) == 0
            load.end()
            eventually(standby.is_primary)
            load.check(standby)
            primary.log.write_text("")
            primary.stand_by()
            primary, standby = standby, primary
            wait_until_equal(primary, standby)


def test_a_primary_that_is_paused_is_taken_over_from_by_force_which_is_said(tmp_path: Path) -> None:
    with served(f"file://{tmp_path}/replica") as (primary, standby):
        primary.publish(0, 5)
        wait_until_equal(primary, standby)
        primary.process.send_signal(signal.SIGSTOP)
        done = promote(standby)
        primary.process.send_signal(signal.SIGCONT)
        assert (done.returncode, done.stdout) == (0, f"{standby.store}: primary\n")
        assert "what it had not copied yet may be set aside" in done.stderr
        assert "promoted, and no frame of the primary for" in standby.text()
        assert primary.process.wait(HANG_S) == 75
        eventually(standby.is_primary)
        assert standby.numbers() == list(range(5))


@pytest.mark.parametrize("url", ["file", "nats"], indirect=True)
def test_of_two_promotes_at_once_one_is_the_primary_in_the_end(url: str) -> None:
    load = Load()
    with served(url, 3) as (primary, *others):
        load.begin(primary, "always")
        with ThreadPoolExecutor(2) as threads:
            done = list(threads.map(promote, others))
        load.end()
        assert [(one.returncode, one.stderr) for one in done] == [(0, "")] * 2
        assert primary.process.wait(HANG_S) == 75
        (last,) = eventually(lambda: [node for node in others if node.is_primary()])
        (first,) = [node for node in others if node is not last]
        assert first.process.wait(HANG_S) == 75
        load.check(last)
        for node in (primary, first):
            node.stand_by()
            wait_until_equal(last, node)
            assert set_aside(node) == []
