"""The power of all three machines of an engine is cut at once while clients write, with `sync replica` and
`--confirm 1`: nothing that was answered is lost. See tests/replica/history.py for the rest of what must be true.

disks      of each machine a file system, on a disk that keeps any sectors of what was not flushed
where      "engine": only nats-server is on it, and the servers of mqfs run on; "all": the stores of mqfs are, too
interval   between two syncs of a nats-server: with "2m", its default, it loses what it confirmed

An engine that lost something gets a new log, as "The engine lost what it confirmed" in docs/howto/replicas.md says:
both stores must have all that was answered before that.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.replica import history
from tests.replica.nodes import ClusterNode, Nodes, nodes
from tests.replica.test_faults import FAILOVER_S, Campaign
from tests.replica.workload import ALL, Load
from tests.support.campaign import seed, size, whole
from tests.support.power import MAKE, MOUNT, PowerDisk, mount_point, mounted, run
from tests.support.server import short_folder

pytestmark = [pytest.mark.process, pytest.mark.root, pytest.mark.slow]
DISK_BYTES = 400 << 20
CUTS_A_STORE = 5
LOST = ("the engine lost what it confirmed", "empty, but had frame")
PATIENCE_S = 20.0  # for an engine that says it lost something: it may not be whole yet


class MachineDisk:
    """The disk of one machine, mounted at `at` while there is power."""

    def __init__(self, folder: Path, letter: str, kind: str) -> None:
        self.kind, self.at, self.device = kind, folder / "disks" / letter, folder / "devices" / letter
        durable = folder / f"durable-{letter}"
        for path in (self.at, self.device):
            path.mkdir(parents=True)
        durable.touch()
        os.truncate(durable, DISK_BYTES)
        run(*MAKE[kind], durable)
        self._disk = PowerDisk(self.device, durable, DISK_BYTES)
        self._mounts = contextlib.ExitStack()

    def on(self) -> None:
        self._disk.do("on")
        self._mounts.enter_context(mount_point(self.at))
        self._mounts.enter_context(mounted(self.device / "disk", self.at, *MOUNT[self.kind]))

    def cut(self, luck: int) -> None:
        """From now on it fails."""
        self._disk.do(f"cut {luck}")

    def off(self) -> None:
        """No process has a file of it any more."""
        self._mounts.close()

    def close(self) -> None:
        self.off()
        self._disk.stop()


class PowerCampaign(Campaign):
    """One store on two machines of three, whose disks lose their power again and again."""

    def __init__(self, made: Nodes, luck: random.Random, load: Load, disks: list[MachineDisk], where: str) -> None:
        super().__init__(made, luck, load)
        self.disks, self.where = disks, where
        self.replaced = self.wiped = 0

    def state(self) -> str:
        """And what the engines say."""
        engines = (f"{node.folder.name}'s engine: {node.engine_state()}" for node in self.nodes.all)
        return "\n".join([super().state(), *engines])

    def cut(self) -> None:
        """All lose it at once; then the power is back, and calls are answered again."""
        before = self.load.acknowledged + round(2 ** self.luck.uniform(3, 9))
        self.wait(lambda: self.load.acknowledged >= before, "answers before the cut")
        for disk in self.disks:
            disk.cut(self.luck.randrange(1 << 30))
        with contextlib.ExitStack() as held:
            for node in self.nodes.all:
                mine = ["mqfs"] if self.where == "all" and node in self.nodes.servers else []
                held.enter_context(node.without("nats", *mine))
            for disk in self.disks:
                disk.off()
            self.pause(self.luck.choice([0.0, 1.0, FAILOVER_S + 1]))
            before = self.load.acknowledged  # no call is answered now
            seen = {node.folder.name: len(node.text()) for node in self.nodes.servers}
            for disk in self.disks:
                disk.on()
        self._recover(before, seen)

    def _recover(self, acknowledged: int, seen: dict[str, int]) -> None:
        """Wait until calls are answered, or a server says for a while that the engine lost something."""
        began = time.monotonic()

        def is_over() -> str:
            if self.load.acknowledged > acknowledged + 5:
                return "served"
            said = "".join(node.text()[seen[node.folder.name] :] for node in self.nodes.servers)
            lost = time.monotonic() - began > PATIENCE_S and any(words in said for words in LOST)
            return "lost" if lost else ""

        if self.wait(is_over, "answers after the cut") == "lost":
            self._replace_log()

    def _replace_log(self, holder: ClusterNode | None = None) -> None:
        """As a person does it. `holder`: the one that has all; None: each has. The new log may be lost, too."""
        self.replaced += 1
        servers = list(self.nodes.servers)
        holders = servers if holder is None else [holder]
        with contextlib.ExitStack() as held:
            for node in servers:
                held.enter_context(node.without("mqfs"))
            answered = {call.body for call in list(self.load.calls) if call.outcome == "ok"}
            for node in holders:
                lost = answered.difference(one.body for one in history.read_store(node.store))
                assert not lost, f"{node.store}: {len(lost)} of {len(answered)} lost: {self.state()}"
            first = self.luck.choice(holders)
            (first.store / "replica").unlink(missing_ok=True)
            for node in servers:
                if node is not first:
                    shutil.rmtree(node.store, ignore_errors=True)
                node.url = f"{node.url.rpartition('/')[0]}/shop{self.replaced + 1}"
            self._make_engine_whole()
            said = len(first.text())
        if not self.nodes.promote(first):
            assert any(words in first.text()[said:] for words in LOST), self.state()
            self._replace_log(first)

    def _make_engine_whole(self) -> None:
        """Before a new log is made: a server of the engine that only now remembers older days may forget it."""
        began = time.monotonic()

        def is_over() -> str:
            if all(node.is_healthy() for node in self.nodes.all):
                return "whole"
            return "torn" if time.monotonic() - began > PATIENCE_S else ""

        if self.wait(is_over, "an engine that is whole") == "torn":
            for node in [node for node in self.nodes.all if not node.is_healthy()]:
                node.wipe_nats()
                self.wiped += 1
            self.wait(lambda: all(node.is_healthy() for node in self.nodes.all), "wiped servers that are whole")


def cut_one_store(
    kind: str, where: str, interval: str, cuts: int, luck: random.Random
) -> tuple[Counter[str], list[str]]:
    """Cut the power of one store so often; returns counts, and lines about what is wrong."""
    with short_folder() as folder, contextlib.ExitStack() as stack:
        with ThreadPoolExecutor(3) as threads:
            disks = list(threads.map(partial(MachineDisk, folder, kind=kind), "abc"))
            for disk in disks:
                stack.callback(disk.close)
            list(threads.map(MachineDisk.on, disks))
        home = folder / ("disks" if where == "all" else "homes")
        home.mkdir(exist_ok=True)
        more = {"engines": folder / "disks", "interval": interval, "servers": 2}
        options = ["--failover", f"{FAILOVER_S:g}s", "--confirm", "1"]
        made = stack.enter_context(nodes(home, *options, disk="", clocks=False, **more))  # type: ignore[arg-type]
        campaign = PowerCampaign(made, luck, Load(made.servers, luck.randrange(1 << 30)), disks, where)
        campaign.begin(*ALL)
        try:
            for _ in range(cuts):
                campaign.cut()
            found = [line for line in campaign.finish() if not any(words in line for words in LOST)]
        finally:
            made_anew = f"logs replaced {campaign.replaced}, engines wiped {campaign.wiped}"
            print(f"{kind}, {where}, {interval}, {cuts} cuts, {made_anew}: {campaign.report()}")
        count = Counter(cuts=cuts, replaced=campaign.replaced, acknowledged=campaign.load.acknowledged)
        return count, [f"{kind}, {where}, {interval}: {line}" for line in found]


@pytest.mark.timeout(7_200)
def test_a_power_cut_of_all_three_engines_loses_nothing_answered() -> None:
    luck, cuts, total = random.Random(seed()), size(100, 100), Counter[str]()
    while total["cuts"] < cuts:
        way = luck.choice(["ext4", "ext4", "xfs"]), luck.choice(["engine", "all"]), luck.choice(["always", "2m"])
        count, found = cut_one_store(*way, min(CUTS_A_STORE if whole() else 1, cuts - total["cuts"]), luck)
        total += count
        assert not found, "\n".join(found[:20])
    print(f"seed {seed()}: {dict(total)}")
