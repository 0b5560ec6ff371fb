"""Three machines under load while anything fails that can: see tests/replica/history.py for what must be true after.

The short form is two faults; MQFS_SOAK=1, or MQFS_FAULTS=N, is the long one: of all kinds, in an order by the seed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from tests.replica import history
from tests.replica.nodes import ClusterNode, Nodes, nodes
from tests.replica.workload import ALL, PRODUCERS, Follower, Laborer, Load, LoadClient
from tests.support.campaign import seed, whole
from tests.support.eventually import eventually, patient

pytestmark = [pytest.mark.process, pytest.mark.root, pytest.mark.slow]
log = logging.getLogger(__name__)
T = TypeVar("T")
FAILOVER_S = 2.0
HOUR = 3_600


class Campaign:
    """One store on three machines, and its clients."""

    def __init__(self, made: Nodes, luck: random.Random, load: Load) -> None:
        self.nodes, self.luck, self.load = made, luck, load
        self.count: dict[str, int] = {}
        self.began = time.monotonic()
        self.takeovers_s: dict[str, list[float]] = {}
        self._closing = threading.Event()
        self._watch = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._closing.wait(0.2):
            self.load.watch()

    def begin(self, *kinds: type[LoadClient]) -> None:
        assert self.nodes.promote(self.nodes.all[0]), self.state()
        eventually(self._is_served, "a primary")
        self.load.prepare()
        self.load.start(*kinds)
        self._watch.start()
        self.wait_for_progress(20)

    def _is_served(self) -> bool:
        with contextlib.suppress(Exception), self.load.connect(0):
            return True
        return False

    def primary(self) -> ClusterNode:
        """The one that answered last."""
        return next(node for node in self.nodes.all if self.load.run.startswith(node.folder.name))

    def any_standby(self) -> ClusterNode | None:
        """One that can be promoted now; who is the primary may have changed a moment ago."""
        found = [node for node in self.nodes.all if node is not self.primary() and (node.store / "promote").exists()]
        return self.luck.choice(found) if found else None

    def wait_for_progress(self, count: int = 1) -> None:
        before = self.load.acknowledged
        self.wait(lambda: self.load.acknowledged >= before + count, "answers")

    def wait(self, value: Callable[[], T], what: str) -> T:
        """The first value that is true; else what the servers said, too."""
        try:
            return eventually(value, what)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.state()}") from None

    def state(self) -> str:
        said = (f"{node.folder.name}: {node.text()[-300:]!r}" for node in self.nodes.all)
        return "; ".join([*said, *self.differences()])

    # ------------------------------------------------------------ faults

    def inflict(self, name: str) -> None:
        """One fault, for a while; then all is as before, and calls are answered again."""
        self.count[name] = self.count.get(name, 0) + 1
        primary, before = self.primary(), [*self.load.runs][-1]
        node = primary if self.luck.random() < 0.7 else self.luck.choice(self.nodes.all)
        hurts, began = node is primary, time.monotonic()
        with FAULTS[name](self, node):
            if name in LASTING:
                self.pause(0.1 * 200 ** self.luck.random())
        self.wait_for_progress(5)
        log.info(
            "%s of %s: %.1f s, %d acknowledged",
            name,
            node.folder.name,
            time.monotonic() - began,
            self.load.acknowledged,
        )
        if hurts and name in ("kill mqfs", "kill both", "pause mqfs"):
            self.note_takeover(name, before, began)

    def pause(self, most_s: float) -> None:
        self._closing.wait(most_s)

    def note_takeover(self, name: str, before: str, began: float) -> None:
        """How long no server answered, where another one does since."""
        run, first = [*self.load.runs.items()][-1]
        if run != before and first > began:
            self.takeovers_s.setdefault(name, []).append(first - began)

    # ------------------------------------------------------------ end

    def finish(self) -> list[str]:
        """Let all that is under way end, and look."""
        self.load.end(PRODUCERS)
        self.load.draining.set()
        with contextlib.suppress(AssertionError):
            eventually(self.load.is_drained, "all jobs acknowledged")
        self._closing.set()
        self._watch.join()
        self.load.end((Follower, Laborer))
        self.wait(self.are_equal, "equal stores")
        for node in sorted(self.nodes.servers, key=lambda node: node is self.primary()):
            if (code := node.end()) not in (0, 75):
                self.load.faults.append(f"{node.folder.name}: ended with {code}: {node.text()[-500:]}")
        return [*self.nodes.faults(), *history.problems(self.load, [node.store for node in self.nodes.servers])]

    def are_equal(self) -> bool:
        """Whether all standbys have the primary's bytes."""
        first, *others = [history.segments(node.store) for node in self.nodes.servers]
        return bool(first) and all(other == first for other in others)

    def differences(self) -> list[str]:
        """Where the stores' segments begin to differ."""
        first, *others = [history.segments(node.store) for node in self.nodes.servers]
        found = list[str]()
        for other in others:
            for name in sorted(first.keys() | other.keys()):
                one, two = first.get(name, b""), other.get(name, b"")
                if one != two:
                    at = next(
                        (n for n, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two))
                    )
                    found.append(
                        f"{name}: {len(one)} and {len(two)} bytes, from {at} on {one[at:][:64]!r}, {two[at:][:64]!r}"
                    )
        return found

    def report(self) -> str:
        load, count = self.load, history.takeovers(self.load.calls)
        medians = {name: f"{statistics.median(found):.1f} s" for name, found in self.takeovers_s.items()}
        return (
            f"seed {seed()}: {time.monotonic() - self.began:.0f} s, {self.count}, {count} takeovers, medians {medians},"
            f" {load.acknowledged} acknowledged, {dict(Counter(call.outcome for call in load.calls))},"
            f" {len(load.seen)} seen, {len(load.units)} transactions, {len(load.puts)} jobs,"
            f" {sum(order.delay_s > 0 for order in list(load.orders.values()))} of them delayed,"
            f" {len(load.deliveries)} deliveries, {len(load.returns)} given back"
        )


Fault = Callable[[Campaign, ClusterNode], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def kill(campaign: Campaign, node: ClusterNode, *which: str) -> Iterator[None]:
    with node.without(*which):
        campaign.pause(campaign.luck.choice([0.0, 0.5, FAILOVER_S + 1]))
        yield


@contextlib.contextmanager
def paused(campaign: Campaign, node: ClusterNode, which: str) -> Iterator[None]:
    node.signal(which, signal.SIGSTOP)
    try:
        yield
    finally:
        node.signal(which, signal.SIGCONT)


@contextlib.contextmanager
def cut(campaign: Campaign, node: ClusterNode, ways: str) -> Iterator[None]:
    wires, machine = campaign.nodes.network, node.machine
    others = [other for other in wires.machines if other is not machine]
    if ways == "alone":
        wires.isolate(machine)
    elif ways == "slow":
        wires.slow(0.2)
    else:
        pair = [machine, campaign.luck.choice(others)]
        campaign.luck.shuffle(pair)
        for sender, receiver in [pair, pair[::-1]][: 2 if ways == "both" else 1]:
            wires.cut(sender, receiver)
    try:
        yield
    finally:
        wires.heal()


@contextlib.contextmanager
def leader_alone(campaign: Campaign, node: ClusterNode) -> Iterator[None]:
    """The engine's leader of the log, whichever machine has the primary."""
    leader = eventually(campaign.nodes.engine_leader, "a leader of the log")
    with cut(campaign, leader, "alone"):
        yield


@contextlib.contextmanager
def wrong_clock(campaign: Campaign, node: ClusterNode) -> Iterator[None]:
    node.set_clock(campaign.luck.choice([-HOUR, HOUR]))
    yield
    node.set_clock(0)


@contextlib.contextmanager
def full_disk(campaign: Campaign, node: ClusterNode) -> Iterator[None]:
    with node.full_disk():
        yield
    node.signal("nats", signal.SIGKILL)  # JetStream is off until its start


@contextlib.contextmanager
def wiped(campaign: Campaign, node: ClusterNode) -> Iterator[None]:
    everyone = campaign.nodes.all
    eventually(lambda: all(one.is_healthy() for one in everyone), "all engines whole")  # else two would be empty
    node.wipe_nats()
    eventually(lambda: all(one.is_healthy() for one in everyone), "all engines whole again")
    yield


@contextlib.contextmanager
def promoted(campaign: Campaign, node: ClusterNode) -> Iterator[None]:
    campaign.nodes.promote(eventually(campaign.any_standby, "a standby"))
    yield


FAULTS: dict[str, Fault] = {
    "kill mqfs": lambda campaign, node: kill(campaign, node, "mqfs"),
    "kill nats": lambda campaign, node: kill(campaign, node, "nats"),
    "kill both": lambda campaign, node: kill(campaign, node, "mqfs", "nats"),
    "pause mqfs": lambda campaign, node: paused(campaign, node, "mqfs"),
    "pause nats": lambda campaign, node: paused(campaign, node, "nats"),
    "cut one way": lambda campaign, node: cut(campaign, node, "one"),
    "cut both ways": lambda campaign, node: cut(campaign, node, "both"),
    "alone": lambda campaign, node: cut(campaign, node, "alone"),
    "leader alone": leader_alone,
    "slow": lambda campaign, node: cut(campaign, node, "slow"),
    "wrong clock": wrong_clock,
    "full disk": full_disk,
    "wiped nats": wiped,
    "promoted": promoted,
}
LASTING = {name for name in FAULTS if not name.startswith(("kill", "wiped", "promoted"))}

TAKEOVERS = ["kill mqfs", "pause mqfs", "promoted"]
SHORT = ["alone", "kill mqfs"]


def count_of_faults() -> int:
    return int(os.environ.get("MQFS_FAULTS", "300" if whole() else "2"))


@pytest.mark.timeout(7_200)
def test_nothing_answered_is_lost_whatever_fails() -> None:
    luck, count = random.Random(seed()), count_of_faults()
    names = [luck.choice(luck.choice([[*FAULTS], TAKEOVERS])) for _ in range(count)] if count > 2 else SHORT
    disk = "256m" if count == 2 else "4g"
    with (
        tempfile.TemporaryDirectory(prefix="mqfs-") as folder,
        nodes(Path(folder), "--failover", f"{FAILOVER_S:g}s", disk=disk) as made,
    ):
        campaign = Campaign(made, luck, Load(made.all, seed(), unit=20 if count == 2 else 200))
        campaign.begin(*ALL)
        try:
            for name in names:
                campaign.inflict(name)
            found = campaign.finish()
        finally:
            print(campaign.report())
    print(f"{len(found)} problems", *found[:20], sep="\n")
    assert not found, "\n".join(found[:20])
    if (
        len(killed := campaign.takeovers_s.get("kill mqfs", [])) > 4
    ):  # with its engine: the election of that takes longer
        assert statistics.median(killed) <= patient(FAILOVER_S + 3)
