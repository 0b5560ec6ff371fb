"""Real servers: a standby beside a primary that is killed, paused, or replaced by hand."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqfs import errors
from mqfs.client.client import open as open_store
from tests.fq import client as fq
from tests.replica.history import segments
from tests.support.campaign import size
from tests.support.eventually import HANG_S, eventually
from tests.support.ports import free_port
from tests.support.server import SERVE, Server, environment, mqfs, short_folder, start

pytestmark = [pytest.mark.process, pytest.mark.slow]
EACH = pytest.mark.parametrize("url", ["file", "nats"], indirect=True)


@pytest.fixture
def places() -> Iterator[tuple[Path, Path]]:
    with short_folder() as one, short_folder() as two:
        yield one, two


class Node(Server):
    """A server with a replica, at a socket, over TCP and HTTP."""

    http = 0

    @classmethod
    def of(cls, folder: Path, url: str, *more: str, **environ: Any) -> Node:
        port = free_port()
        options = ["--replica", url, "--http", f"127.0.0.1:{port}", "--listen", f"tcp!127.0.0.1!{free_port()}"]
        node = cls.at(folder, *options, *more, **environ)
        assert isinstance(node, Node)
        node.http = port
        return node

    def get(self, path: str) -> tuple[int, str]:
        """Status and text of a request; 0 where there is no answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http}{path}", timeout=HANG_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def is_primary(self) -> bool:
        return self.get("/.ready")[0] == 200

    def stand_by(self) -> None:
        """Start again as a standby."""
        if "--standby" not in self.arguments:
            self.arguments.append("--standby")
        self.start()

    def publish(self, begin: int, end: int) -> None:
        with self.connect() as client:
            group = client.group("jobs", create=True, ctl=["replay all"])
            for number in range(begin, end):
                group.publish("q", b"%d" % number)

    def numbers(self) -> list[int]:
        with self.connect() as client:
            return [int(message.body) for message in client.group("jobs").history()]


def are_equal(one: Node, two: Node) -> bool:
    return segments(one.store) == segments(two.store) != {}


def wait_until_equal(one: Node, two: Node) -> None:
    try:
        eventually(lambda: are_equal(one, two))
    except AssertionError:
        raise AssertionError(f"not equal: {one.text()}\n{two.text()}") from None


@EACH
def test_a_standby_refuses_clients_and_takes_over_from_a_killed_primary(places: tuple[Path, Path], url: str) -> None:
    with Node.of(places[0], url) as primary, Node.of(places[1], url, "--standby", "--failover", "2s") as standby:
        assert standby.get("/.health")[0] == 200, f"{primary.text()}\n{standby.text()}"
        eventually(lambda: "the primary is tcp!127.0.0.1!" in standby.get("/.ready")[1])
        assert standby.get("/.ready")[0] == standby.get("/jobs/")[0] == 503
        with pytest.raises(errors.Standby, match=r"the primary is tcp!127\.0\.0\.1!"):
            standby.connect()
        primary.publish(0, 20)
        wait_until_equal(primary, standby)
        primary.kill()
        eventually(standby.is_primary)
        assert standby.numbers() == list(range(20))
        standby.publish(20, 21)
        primary.stand_by()
        wait_until_equal(primary, standby)


def test_a_standby_with_fq_refuses_its_clients_and_takes_over(places: tuple[Path, Path], tmp_path: Path) -> None:
    one, two = (str(place / "fq") for place in places)
    url, more = f"file://{tmp_path}/log", ["--standby", "--failover", "2s"]
    with Node.of(places[0], url, "--fq", f"unix!{one}") as primary:
        with fq.Client(one, "q", "disk:public,permanent", with_data=False) as asks:
            asks.bind("e")
        with Node.of(places[1], url, "--fq", f"unix!{two}", *more) as standby:
            eventually(lambda: "the primary is tcp!" in standby.get("/.ready")[1])
            with pytest.raises(fq.Refused, match="the primary is tcp!"):
                fq.Client(two, "q", "disk:public,permanent")
            assert "the primary is tcp!" in fq.stats(two)["error"]
            wait_until_equal(primary, standby)
            primary.kill()
            eventually(standby.is_primary)
            with fq.Client(two, "q", "disk:public,permanent") as client:
                client.publish("e", "r", b"1")
                assert [message.payload for message in client.receive()] == [b"1"]


@EACH
def test_a_paused_primary_ends_when_it_wakes(places: tuple[Path, Path], url: str) -> None:
    with Node.of(places[0], url) as primary, Node.of(places[1], url, "--standby", "--failover", "2s") as standby:
        primary.publish(0, 5)
        wait_until_equal(primary, standby)
        primary.process.send_signal(signal.SIGSTOP)
        eventually(standby.is_primary)
        standby.publish(5, 6)
        primary.process.send_signal(signal.SIGCONT)
        assert primary.process.wait(HANG_S) == 75
        assert "no longer the primary" in primary.text()
        primary.stand_by()
        wait_until_equal(primary, standby)
        assert standby.numbers() == list(range(6))


@EACH
def test_a_standby_is_promoted_by_hand(places: tuple[Path, Path], url: str) -> None:
    with Node.of(places[0], url) as primary, Node.of(places[1], url, "--standby", "--failover", "1h") as standby:
        primary.publish(0, 5)
        wait_until_equal(primary, standby)
        done = mqfs("promote", str(standby.store), cwd=places[1])
        assert (done.returncode, done.stdout) == (0, f"{standby.store}: primary\n"), done.stderr + standby.text()
        assert primary.process.wait(HANG_S) == 75
        eventually(standby.is_primary)
        assert standby.numbers() == list(range(5))
        refused = mqfs("promote", str(standby.store), cwd=places[1])
        assert refused.returncode == 1
        assert "no standby serves it" in refused.stderr


@pytest.mark.parametrize("mistake", ["a file", "in a file", "a folder where its socket is", "an address that is taken"])
def test_a_standby_that_cannot_go_on_says_it_in_one_line(places: tuple[Path, Path], mistake: str) -> None:
    """When it begins, or when it takes over, and listens again."""
    folder, replica = places
    store = folder / "store"
    if mistake == "a file":
        store.touch()
    elif mistake == "in a file":
        store.touch()
        store /= "store"
    elif mistake == "a folder where its socket is":
        (store / "promote").mkdir(parents=True)
    where = f"unix!{folder}/gone/socket"
    (folder / "gone").mkdir()
    command = [*SERVE, "--store", str(store), "--listen", where, "--replica", f"file://{replica}", "--standby"]
    with start(command, cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True) as standby:
        if mistake == "an address that is taken":
            eventually((store / "promote").exists)
            shutil.rmtree(folder / "gone")
            (folder / "gone").touch()
            eventually(lambda: "no standby" not in mqfs("promote", str(store), cwd=folder).stderr)
        text = standby.communicate(timeout=HANG_S)[1]
    assert standby.returncode == 1
    assert "Traceback" not in text
    assert text.splitlines()[-1].startswith(f"mqfs: {where if 'address' in mistake else store}")


@EACH
def test_a_restore_is_a_store_of_its_own(places: tuple[Path, Path], url: str) -> None:
    with Node.of(places[0], url) as primary:
        primary.publish(0, 5)
        eventually(lambda: replicated(primary))
    done = mqfs("restore", url, f"{places[1]}/store", cwd=places[1])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{places[1]}/store: 2 groups, up to frame ")
    with Server.at(places[1]) as server, server.connect() as client:
        messages = list(client.group("jobs").history())
        assert [int(message.body) for message in messages] == list(range(5))
        assert client.group("jobs").publish("q", b"5").sequence > 1 << 32
    again = mqfs("restore", url, f"{places[1]}/store", cwd=places[1])
    assert again.returncode == 1
    assert "not empty" in again.stderr


def replicated(primary: Node) -> bool:
    """Whether a restore has what it has."""
    folder = primary.folder / "try"
    done = mqfs("restore", primary.arguments[primary.arguments.index("--replica") + 1], str(folder), cwd=primary.folder)
    found = segments(folder)
    subprocess.run(["rm", "-r", str(folder)], check=True)
    ours = segments(primary.store)
    return done.returncode == 0 and all(found.get(name, b"").startswith(data) for name, data in ours.items())


@EACH
def test_what_was_acknowledged_under_sync_replica_outlives_its_primary(places: tuple[Path, Path], url: str) -> None:
    """Each round the primary is killed under four writers; the other one takes over, and the killed one follows it."""
    nodes = [Node.of(places[0], url), Node.of(places[1], url, "--standby", "--failover", "2s")]
    acknowledged: list[int] = []
    try:
        with nodes[0].connect() as client:
            client.group("jobs", create=True, ctl=["replay all", "sync replica"])
        for number in range(size(100, 25)):
            primary, standby = nodes
            writers = [Writer(primary, 100_000 * number + 10_000 * writer) for writer in range(4)]
            eventually(lambda writers=writers: all(len(writer.acknowledged) > 20 for writer in writers))  # type: ignore[misc]
            primary.kill()
            for writer in writers:
                acknowledged += writer.end()
            eventually(standby.is_primary)
            primary.stand_by()
            nodes = [standby, primary]
            assert set(acknowledged) <= set(standby.numbers())
        wait_until_equal(*nodes)
        found = nodes[0].numbers()
        assert len(found) == len(set(found))
    finally:
        for node in nodes:
            node.close()


class Writer:
    """Publishes numbers from `begin` on, until its server is gone."""

    def __init__(self, node: Node, begin: int) -> None:
        self._node, self._begin = node, begin
        self.acknowledged: list[int] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._node.connect(reconnect=False) as client:
                group = client.group("jobs")
                for number in range(self._begin, self._begin + 10_000):
                    group.publish("q", b"%d" % number)
                    self.acknowledged.append(number)
        except errors.MqfsError:
            pass

    def end(self) -> list[int]:
        self._thread.join()
        return self.acknowledged


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--standby"], "expected also --replica"),
        (["--replica", "file:///tmp/x"], "expected also --store"),
        (["--replica", "ftp://a/b", "--store", "s"], "unknown engine"),
        (["--replica", "file:///tmp/x", "--store", "s", "--confirm", "2"], "expected 0 or 1"),
        (["--replica", "file:///tmp/x", "--store", "s", "--failover", "soon"], "--failover 'soon': invalid duration"),
        (["--replica", "file:///tmp/x", "--store", "s", "--failover", "100ms"], "too short"),
        (["--replica", "file:///tmp/x", "--store", "s", "--replica-keep", "x"], "--replica-keep 'x'"),
        (["--replica", "nats://127.0.0.1:1/x", "--store", "s"], "not reachable"),
    ],
)
def test_wrong_options_are_one_line(options: list[str], words: str, tmp_path: Path) -> None:
    done = mqfs("serve", *options, "--listen", f"unix!{tmp_path}/socket", cwd=tmp_path)
    assert done.returncode == (1 if "reachable" in words else 2)
    assert words in done.stderr.splitlines()[-1]
    assert done.stderr.count("mqfs: ") == 1


def test_a_store_with_a_replicated_log_is_not_served_without_it(tmp_path: Path) -> None:
    with short_folder() as folder:
        with Node.of(folder, f"file://{folder}/log") as node:
            node.publish(0, 1)
        done = mqfs("serve", "--store", str(folder / "store"), "--listen", f"unix!{folder}/socket", cwd=folder)
        assert done.returncode == 1
        words = "has a replicated log (expected mqfs serve --replica URL, or its file 'replica' moved away for good)"
        assert words in done.stderr
        with pytest.raises(errors.BadStore, match=re.escape(words)):
            open_store(folder / "store")
        (folder / "store/replica").rename(folder / "moved")
        with Server.at(folder) as server, server.connect() as client:
            assert len(list(client.group("jobs").history())) == 1


@pytest.mark.parametrize("url", ["file", "nats"], indirect=True)
def test_a_restore_of_no_log_makes_nothing(tmp_path: Path, url: str) -> None:
    done = mqfs("restore", url, "out", cwd=tmp_path)
    assert done.returncode == 1
    assert "no log (expected" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_without_a_replica_nothing_of_it_is_imported(tmp_path: Path) -> None:
    program = (
        "import sys, mqfs.cli.main, mqfs.server.app, mqfs.server.web, mqfs.client\n"
        "ours = ('nats', 'obstore', 'mqfs.replica')\n"
        "print([name for name in sys.modules if name.startswith(ours)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_a_server_that_waits_for_its_engine_can_be_stopped(tmp_path: Path) -> None:
    with short_folder() as folder:
        node = Node.of(folder, f"file://{folder}/replica", "--standby")
        began = time.monotonic()
        assert node.stop() == 0
        assert time.monotonic() - began < HANG_S
        node.close()
