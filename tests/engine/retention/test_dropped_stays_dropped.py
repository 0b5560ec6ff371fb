"""A dropped message stays dropped, wherever its bytes are still: on a standby, whose segments are not compacted, or in
a file that a compaction replaced and a kill left."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqfs.engine.retention import retention
from mqfs.engine.tree.tree import Tree
from mqfs.model import Wait
from mqfs.store.disk import Disk
from mqfs.store.standby import StandbyStore
from mqfs.store.store import DiskStore
from tests.support.clock import ManualClock
from tests.support.copied import follow
from tests.support.hand import ROOT
from tests.support.queues import BIG, Queues
from tests.support.temp_store import lowered

SETTINGS = [("replay all",), ("deliver one",), ("replay all", "depth 100", "full drop-old")]


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    with lowered(SEGMENT_BYTES=20_000, SEGMENT_FIRST_BYTES=4_096, TRIM_BYTES=10_000):
        yield


class OneGroup(Queues):
    """A server over that store, which has the group `g` or gets it."""

    def __init__(self, store: DiskStore, *lines: str) -> None:
        self.clock, self.path, self.store = ManualClock(), Path(store.path), store
        self.tree = Tree(store, self.clock, owner=ROOT)
        self.on_disk.append(self)
        if "g" in self.tree.root.groups:
            self.group = self.tree.root.groups["g"]
        else:
            self.group = self.mkdir("g")
            self.ctl("sync off", *lines)
            self.stream("s")

    def all_of(self) -> list[bytes]:
        """The first word of each message that is to be had."""
        if self.group.settings.deliver != "one":
            return [row["body"].split()[0].encode() for row in self.kept()]
        taker, bodies = self.taker(), []
        while not isinstance(step := taker.read(BIG), Wait):
            bodies.append(bytes(step).split()[0])
        return bodies

    def work(self) -> list[bytes]:
        """Write 100 messages, drop most of them, and write more until they are compacted. Returns those left."""
        sequences = []
        for number in range(100):
            self.write("s", b"%d " % number + b"x" * 1_000)
            sequences.append(self.group.log.end.next - 1)
        self.ctl("drop s " + " ".join(str(sequence) for n, sequence in enumerate(sequences) if n % 20))
        before = self.group.log.upkeep.size
        for number in range(60):
            self.write("s", b"later-%d " % number + b"y" * 1_000)
            self.pass_time(1)
            self.store.tick()
            self.on_turn()
        assert self.group.log.upkeep.size < before  # it was compacted
        return [b"%d" % n for n in range(0, 100, 20)] + [b"later-%d" % n for n in range(60)]

    def on_turn(self) -> None:
        """A turn of `work` is over."""


class Copied(OneGroup):
    def __init__(self, path: Path, *lines: str) -> None:
        store = DiskStore(str(path / "primary"), replica=lambda: None)
        assert store.replication is not None
        store.replication.begin({})
        super().__init__(store, *lines)
        self.copy = StandbyStore(str(path / "standby"), store.uuid)

    def on_turn(self) -> None:
        assert self.store.replication is not None
        self.copy.apply(follow(self.store.replication))
        self.copy.sync()


@pytest.mark.parametrize("lines", SETTINGS)
def test_after_a_takeover(tmp_path: Path, lines: tuple[str, ...]) -> None:
    primary = Copied(tmp_path, *lines)
    left = primary.work()
    primary.on_turn()
    primary.copy.close()
    standby = OneGroup(DiskStore(str(tmp_path / "standby")))
    assert standby.all_of() == left
    assert primary.all_of() == left


class Stuck(Disk):
    """A disk that removes no segment, until it does."""

    is_stuck = True

    def unlink(self, path: str) -> None:
        if self.is_stuck and "/buckets/" in path and path.endswith(".log"):
            raise OSError(errno.EBUSY, "not now")
        super().unlink(path)


@pytest.mark.parametrize("lines", SETTINGS)
def test_after_a_kill_with_replaced_segments(tmp_path: Path, lines: tuple[str, ...]) -> None:
    q = OneGroup(DiskStore(str(tmp_path / "store"), disk=Stuck()), *lines)
    left = q.work()
    shutil.copytree(tmp_path / "store", tmp_path / "killed")
    assert OneGroup(DiskStore(str(tmp_path / "killed"))).all_of() == left


def test_the_dropped_are_forgotten(tmp_path: Path) -> None:
    """Without a replica, once the messages are gone; with one, once their stream keeps nothing below them."""
    q = OneGroup(DiskStore(str(tmp_path / "alone")), "replay all")
    q.work()
    assert len(q.group.state.dropped) < 30
    primary = Copied(tmp_path, "replay all")
    primary.work()
    assert len(primary.group.state.dropped) == 95  # the oldest message is kept
    primary.ctl(f"drop s {primary.kept()[0]['sequence']}")
    primary.write("s", *[b"y" * 1_000] * 20)
    primary.pass_time(2)
    assert len(primary.group.state.dropped) == 95 - 19


@pytest.mark.parametrize("at_once", [1_000, 10])
def test_the_dropped_are_forgotten_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """Where files of replaced segments go only after the trim, and where there are more than one trim looks up. Nothing
    more is written."""
    monkeypatch.setattr(retention, "_LOOKED_AT", at_once)
    disk = Stuck()
    q = OneGroup(DiskStore(str(tmp_path / "store"), disk=disk), "replay all")
    left = q.work()
    assert len(q.group.state.dropped) == 95
    disk.is_stuck = False
    for _ in range(100):
        q.store.tick()
        q.pass_time(1)
    assert len(q.group.state.dropped) < 30
    assert q.all_of() == left
