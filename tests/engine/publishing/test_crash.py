"""A unit is there whole or not at all, and its commit with it, whatever moment the machine stops at."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator

import pytest

from mqfs import errors
from mqfs.engine.tree.tree import Tree
from mqfs.model import Wait
from mqfs.store.store import DiskStore
from tests.store.script import PATH
from tests.support.batches import Units
from tests.support.campaign import seed, size
from tests.support.clock import ManualClock
from tests.support.hand import ROOT
from tests.support.lying_disk import LyingDisk, Stopped
from tests.support.temp_store import SMALL, lowered

After = Callable[[LyingDisk, random.Random], LyingDisk]
COMMITS = 12


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    logging.getLogger("mqfs.store").setLevel(logging.CRITICAL)
    with lowered(**SMALL, PART_BUFFER_BYTES=100, UNIT_PIECE_BYTES=300):
        yield
    logging.getLogger("mqfs.store").setLevel(logging.NOTSET)


class Lying(Units):
    """The same over a disk that lies."""

    def __init__(self, disk: LyingDisk) -> None:
        self.clock, self.path = ManualClock(), None
        self.store = DiskStore(PATH, disk=disk)
        self.tree = Tree(self.store, self.clock, owner=ROOT)
        self.group = self.tree.root.groups.get("g") or self.mkdir("g")

    def prepare(self) -> None:
        if "t" not in self.group.streams:
            self.ctl("replay all")
            for name in ("s", "t"):
                if name not in self.group.streams:
                    self.stream(name)


def bodies(number: int, luck: random.Random) -> list[tuple[str, bytes]]:
    count = luck.randint(1, 9)
    return [(luck.choice("st"), b"%d %d/%d %s" % (number, n, count, b"x" * luck.randint(0, 300))) for n in range(count)]


def produce(u: Lying, luck: random.Random, done: list[int]) -> None:
    """Commits, each repeated until it is answered: as a producer does. Notes what was acknowledged."""
    u.prepare()
    first = u.committed().get("x", -1) + 1
    for number in range(first, COMMITS):
        messages = bodies(number, random.Random(number))
        split = luck.randint(0, len(messages))
        for part, some in (("a", messages[:split]), ("b", messages[split:])):
            u.part(part)
            for stream, body in some:
                u.stage(part, stream, body)
        step = u.say(f"commit x.{number} a b")
        assert step is None or (isinstance(step, Wait) and step.settled)
        done.append(number)
        if luck.random() < 0.3:
            u.write(luck.choice("st"), b"-1 of others")


def check(u: Lying, done: list[int]) -> int:
    """Every unit once, whole and in its order, or not; returns how many there are."""
    found: dict[int, list[tuple[str, str]]] = {}
    for stream, body in u.log():
        number = int(body.split()[0])
        if number >= 0:
            found.setdefault(number, []).append((stream, body))
    for number, messages in found.items():
        wanted = bodies(number, random.Random(number))
        assert messages == [(stream, body.decode()) for stream, body in wanted], "a part of a unit, or twice"
    assert list(found) == list(range(len(found)))
    assert u.committed().get("x", -1) == len(found) - 1, "the commit is part of the unit"
    assert not done or max(done) < len(found), "an acknowledged commit is lost"
    assert u.parts() == []
    return len(found)


def forgets(disk: LyingDisk, luck: random.Random) -> LyingDisk:
    return disk.after_power_loss(None)


def tears(disk: LyingDisk, luck: random.Random) -> LyingDisk:
    return disk.after_power_loss(luck)


def killed(disk: LyingDisk, luck: random.Random) -> LyingDisk:
    return disk.after_kill()


def calls() -> int:
    disk = LyingDisk()
    produce(Lying(disk), random.Random(seed()), [])
    return disk.calls


@pytest.mark.slow
@pytest.mark.parametrize("after", [forgets, tears, killed])
def test_stop_at_every_call(after: After) -> None:
    total = calls()
    luck = random.Random(seed())
    seen = set()
    making = range(1, 31)  # of the store itself
    for index in sorted({*making, *luck.sample(range(1, total + 1), size(total, least=20))}):
        disk, done = LyingDisk(), list[int]()
        disk.stop_at, disk.luck = index, random.Random(index)
        try:
            produce(Lying(disk), random.Random(seed()), done)
        except Stopped:
            disk = after(disk, luck)
        disk.stop_at = 0
        u = Lying(disk)
        seen.add(check(u, done))
        produce(u, random.Random(index), done)
        assert check(u, done) == COMMITS
    assert len(seen) > COMMITS // 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [28, 5])  # ENOSPC, EIO
def test_a_disk_that_fails_once(number: int) -> None:
    total = calls()
    luck = random.Random(seed())
    failures = 0
    for index in sorted(luck.sample(range(1, total + 1), size(total, least=20))):
        disk, done = LyingDisk(), list[int]()
        disk.luck = random.Random(index)
        u = Lying(disk)
        u.prepare()
        disk.fail_at, disk.fail_with = disk.calls + index, number
        for _ in range(3):
            try:
                produce(u, random.Random(seed()), done)
                break
            except (errors.MqfsError, OSError):
                failures += 1
                for part in u.parts():
                    u.say(f"abort {part}")
                assert u.tree.staging.bytes.used == 0
        check(u, done)
        disk.fail_at = 0
        check(Lying(disk.after_kill()), [])
    assert failures > 5


def test_a_commit_is_on_disk_where_messages_need_not_be() -> None:
    """With `replay off` and no reader there no message is promised to anyone; the commit is, to its producer."""
    disk = LyingDisk()
    u = Lying(disk)
    u.prepare()
    u.ctl("replay off")
    u.part("p")
    u.stage("p", "s", b"x")
    u.say("commit x.7 p")
    assert Lying(disk.after_power_loss(None)).committed()["x"] == 7
