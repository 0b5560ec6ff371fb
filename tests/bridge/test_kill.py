"""kill -9 of fsq's processes and of bridges, while each side publishes to the other.

Each multi comes once to whoever reads it. Each single is worked on at least once, and more often only where a process
that had it was killed. The whole form has a kill every 2 s and 20,000 messages of each kind each way.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import pytest

from mqfs.bridge.exporter import SINGLES
from mqfs.bridge.folder import Origin, parse
from mqfs.client import Claim, Outgoing
from tests.bridge.rig import Node, Rig, rig
from tests.support import campaign
from tests.support.eventually import eventually

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(7_200 if campaign.whole() else 600)]
DAY_MS = 86_400_000
BUCKETS_AT_ONCE = 8  # of a process of fsq
CHUNK = 50  # publishes of a process of fsq under way or waiting


class NodePublisher(threading.Thread):
    """Has a process of fsq publish until `count` are confirmed. `lost`: of which that is not known."""

    def __init__(self, node: Node, turn: threading.Lock, topic: str, prefix: int, count: int, *, single: bool) -> None:
        super().__init__(daemon=True)
        self._node, self._turn, self._topic, self._single = node, turn, topic, single
        self._next, self._count = prefix * 1_000_000, count
        self.published: set[str] = set()
        self.lost: set[str] = set()
        self.start()

    def run(self) -> None:
        while len(self.published) < self._count:
            size = min(CHUNK, self._count - len(self.published))
            asked = {str(number) for number in range(self._next, self._next + size)}
            process = self._node.process
            more = {"ttl": DAY_MS // 2, "single": self._single}
            before = len(self._node.of("published"))
            try:
                with self._turn:
                    self._node.tell("many", topic=self._topic, count=size, first=self._next, lanes=4, **more)
            except (OSError, ValueError):
                time.sleep(0.01)  # it was killed, and is started again
                continue
            self._next += size
            done: set[str] = set()
            while not asked <= done and process.poll() is None:
                time.sleep(0.01)
                done = {event["body"] for event in self._node.of("published", before) if event["body"] in asked}
            self.published |= done & asked
            self.lost |= asked - done


class Worker:
    """Takes the singles that come from the folder."""

    def __init__(self, rig: Rig) -> None:
        self.bodies: list[str] = []
        rig.group.bind("arrivals", "in.single")
        self.worker = rig.group.work("workers", self._do, concurrency=4, over="arrivals")

    def _do(self, claim: Claim) -> None:
        self.bodies.append(claim.body.decode())


class Killer:
    """Kills one of them from time to time, and starts it again."""

    def __init__(self, rig: Rig, turn: threading.Lock) -> None:
        self._rig, self._turn, self._choose = rig, turn, random.Random(campaign.seed())
        self.nodes = self.bridges = 0

    def kill(self) -> None:
        victim = self._choose.choice([*self._rig.nodes, *self._rig.bridges])
        if isinstance(victim, Node):
            self.nodes += 1
            with self._turn:
                victim.restart()
                subscribe(victim)
        else:
            self.bridges += 1
            victim.restart()


def subscribe(node: Node) -> None:
    """To all but the singles of the folder: those are for workers of the group."""
    for topic in ("out.#", "in.multi"):
        node.tell("subscribe", topic=topic, existing=True)


def publish(rig: Rig, count: int) -> None:
    for first in range(0, count, 100):
        numbers = range(first, min(first + 100, count))
        rig.group.publish_many([("out.multi", str(number)) for number in numbers])
        rig.group.publish_many([Outgoing("out.single", str(number), single=True) for number in numbers])


def bodies(node: Node, topic: str) -> Counter[str]:
    return Counter(event["body"] for event in node.messages(topic=topic))


def kept(rig: Rig, stream: str) -> Counter[str]:
    with rig.group.history(pattern=stream) as messages:
        return Counter(message.body.decode() for message in messages)


def test_killed_at_random_each_multi_comes_once_and_each_single_at_least_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    count, pause_s, least = (20_000, 2.0, 1) if campaign.whole() else (150, 0.5, 4)
    with rig() as r:
        turn = threading.Lock()
        nodes = [r.node(bucket_concurrency=BUCKETS_AT_ONCE) for _ in range(3 if campaign.whole() else 2)]
        for node in nodes:
            subscribe(node)
        for _ in range(2):
            r.bridge("--multi-ttl", "12h", "--single-ttl", "12h")
        eventually(lambda: "fsq" in r.group.consumers(), "a bridge")
        worker, killer = Worker(r), Killer(r, turn)
        expected = {str(number) for number in range(count)}
        multis = NodePublisher(nodes[0], turn, "in.multi", 1, count, single=False)
        singles = NodePublisher(nodes[1], turn, "in.single", 2, count, single=True)
        ours = threading.Thread(target=publish, args=(r, count), daemon=True)
        ours.start()
        while any(thread.is_alive() for thread in (multis, singles, ours)) or killer.nodes + killer.bridges < least:
            time.sleep(pause_s)  # between two kills: it is the campaign's rate
            killer.kill()
        worked = finish(r, nodes, worker, multis, singles, expected)
        worker.worker.stop()
        report(r, killer, multis, singles, worked, nodes, capsys)


def rarely(seconds: float) -> None:
    """Between two looks at all messages, which cost much where they are many."""
    time.sleep(1 if campaign.whole() else seconds)


def wait_for_all(missing: Callable[[], Collection[str]], what: str) -> None:
    """However long it takes: a hang is that no more of them come."""
    left = len(missing())
    while left:
        (left,) = eventually(lambda: [now for now in [len(missing())] if now < left], what, rarely)  # noqa: B023


def finish(
    r: Rig, nodes: list[Node], worker: Worker, multis: NodePublisher, singles: NodePublisher, expected: set[str]
) -> dict[str, Counter[str]]:
    """Wait until all have come; how often each single was worked on."""
    wait_for_all(lambda: multis.published - kept(r, "in.multi").keys(), "the multis from the folder")
    for node in nodes:
        wait_for_all(partial(lambda node: expected - bodies(node, "out.multi").keys(), node), "the multis of the group")

    def worked() -> dict[str, Counter[str]]:
        out, into = Counter[str](), Counter(worker.bodies)
        for node in nodes:
            out += bodies(node, "out.single")
        return {"out": out, "in": into}

    wait_for_all(lambda: expected - worked()["out"].keys(), "the singles of the group")
    wait_for_all(lambda: singles.published - worked()["in"].keys(), "the singles of the folder")
    wait_for_all(lambda: [f for f in r.files() if "+s+" in f and f.startswith("messages")], "the singles to go")
    return worked()


def report(
    r: Rig,
    killer: Killer,
    multis: NodePublisher,
    singles: NodePublisher,
    worked: dict[str, Counter[str]],
    nodes: list[Node],
    capsys: pytest.CaptureFixture[str],
) -> None:
    into = kept(r, "in.multi")
    assert max(into.values()) == 1
    assert into.keys() <= multis.published | multis.lost
    assert worked["in"].keys() <= singles.published | singles.lost
    per_process = Counter((event["life"], event["fname"]) for node in nodes for event in node.messages(single=False))
    assert max(per_process.values()) == 1  # each process that read it has it once
    again = {way: sum(times - 1 for times in count.values()) for way, count in worked.items()}
    assert again["in"] == 0  # no worker of the group is killed
    # So many are in the hands of each:
    assert again["out"] <= BUCKETS_AT_ONCE * killer.nodes + SINGLES * killer.bridges
    left = leftovers(r)
    with capsys.disabled():
        print(f"\n{killer.nodes} kills of fsq's processes, {killer.bridges} of bridges")
        print(f"multis: {len(multis.published)} of the folder, {len(into)} kept; ", end="")
        print(f"{len(bodies(nodes[0], 'out.multi'))} of the group, to each of {len(nodes)}")
        print(f"singles: {len(worked['in'])} of the folder, {again['in']} twice; ", end="")
        print(f"{len(worked['out'])} of the group, {again['out']} twice")
        print(f"files left by processes of fsq that were killed as they wrote them: {len(left)}")


def leftovers(r: Rig) -> list[str]:
    """The files that remain once all has expired: only those that fsq's own processes had begun."""
    for bridge in r.bridges:
        assert bridge.stop() == 0
    for node in r.nodes:
        node.kill()
    tomorrow = r.node(late_ms=DAY_MS)
    eventually(lambda: not [f for f in r.files() if f.startswith("messages")], "expired files are removed")
    tomorrow.kill()
    stats = r.group.stats()
    origin = Origin(stats.store, stats.group)
    files = r.files()
    for file in files:
        name = parse(Path(file).name)
        assert name is not None, file
        assert not origin.wrote(name), file
    return files
