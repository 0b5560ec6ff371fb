"""A disk that is full, or fails, under a group with a ring: what was published waits there; nothing is lost or twice.

Seeded, on a disk in memory: the server writes meanwhile and is refused, is stopped or killed while the disk is full,
and the next one may find it full too.
"""

from __future__ import annotations

import errno
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mqfs
from mqfs import errors, ring
from mqfs.ring.server.keeper_link import KeeperLink
from tests.ring.server import crowd
from tests.ring.server.rig import Keeper, Rig
from tests.ring.server.story import Story, small
from tests.ring.server.test_any_moment import SYNCS
from tests.support.campaign import seed, size
from tests.support.eventually import eventually
from tests.support.lying_disk import LyingDisk
from tests.support.server import Server

pytestmark = [
    pytest.mark.skipif(bool(ring.MISSING), reason=ring.MISSING),
    pytest.mark.usefixtures("quiet"),
]

TAKES_ROOM = ("allocate", "create", "mkdir")


class Disk(LyingDisk):
    """Its calls that take no room do not fail for want of it."""

    def _count(self, what: str, *, reads: bool = False) -> None:
        spared = self.fail_with == errno.ENOSPC and what not in TAKES_ROOM
        fail_at = self.fail_at
        if spared:
            self.fail_at = 0
        try:
            super()._count(what, reads=reads)
        finally:
            if spared:
                self.fail_at = fail_at + (fail_at == self.calls)

    def after_kill(self) -> Disk:
        return Disk(self.root)

    def fill(self, after: int, *, how: int = errno.ENOSPC, lasting: bool = True) -> None:
        self.fail_at, self.fail_with, self.fail_on = self.calls + after, how, lasting


class Told:
    """What came of the stories."""

    def __init__(self) -> None:
        self.refused = self.kept = self.messages = 0


def stop(story: Story) -> int:
    """An orderly stop; how many rings the keeper still holds."""
    assert story.rig is not None
    story.rig.stop()
    story.rig.kill()
    return len(Keeper.rings)


def tell(number: int, how: int, told: Told) -> None:
    dice, disk = random.Random(number), Disk()
    story = Story(number, SYNCS[number % 3])
    story.start(disk)
    story.run(10)
    for _ in range(2):
        disk.luck = random.Random(number)
        disk.fill(dice.randint(1, 60), how=how, lasting=dice.random() < 0.7)
        story.run(dice.choice([5, 30, 80]))
        told.refused += len(story.refused)
        if how == errno.ENOSPC and dice.random() < 0.4:
            told.kept += stop(story)
            disk = disk.after_kill()
            story.start(disk)
        disk.fail_at = 0
        if how == errno.EIO or dice.random() < 0.3:
            story.kill()
            disk = disk.after_kill()
            if how == errno.ENOSPC and dice.random() < 0.5:
                disk.fill(1)
                story.start(disk)
                story.run(20)
                disk.fail_at = 0
            else:
                story.start(disk)
        story.check()
        assert story.rig is not None
        assert story.rig.group.log.end.failed is None
    stop(story)
    story.clients.clear()
    story.start(disk.after_kill())
    story.check()
    stop(story)
    told.messages += len(story.told) + len(story.unnumbered)


STORIES = size(700, least=40)


@pytest.mark.slow
@pytest.mark.parametrize("how", [errno.ENOSPC, errno.EIO])
def test_stories(keeper: Any, how: int) -> None:
    told = Told()
    with small():
        for number in range(seed() * 10_000, seed() * 10_000 + STORIES):
            try:
                tell(number, how, told)
            except Exception as error:
                raise AssertionError(f"story {number}: {type(error).__name__}: {error}") from error
            finally:
                keeper("").quit()
    assert told.refused > STORIES
    assert how == errno.EIO or told.kept > size(70)
    print(f"{STORIES} stories, {told.messages} messages, {told.refused} refused, {told.kept} rings kept over a stop")


def test_what_was_published_is_committed_on_a_full_disk_and_no_more_is_published(keeper: Any) -> None:
    disk = Disk()
    with small():
        rig = Rig("replay all", "sync always", disk=disk)
        client = rig.attach()
        number = client.number("s")
        disk.fill(0)
        published = 0
        try:
            while True:
                last = client.ring.publish(number, bytes(1_000), b"", 1, 0, 0)
                published += 1
        except errors.Again:
            pass
        rig.tick()
        rig.until(lambda: client.ring.committed >= last)
        with pytest.raises(errors.Stale):
            client.ring.publish(number, b"x", b"", 1, 0, 0)
        with pytest.raises(errors.DiskFull, match="no room for its 65536 bytes"):
            rig.attach()
        written = 0
        try:
            while True:
                rig.write("s", b"x" * 1_000)
                written += 1
        except errors.DiskFull:
            pass
        disk.fail_at = 0
        rig.write("s", b"y")
        found = [body for _, _, body in rig.log()]
        assert found == [bytes(1_000)] * published + [b"x" * 1_000] * written + [b"y"]
        client = rig.attach()
        assert client.ring.publish(client.number("s"), b"z", b"", 1, 0, 0) == last + written + 2
        rig.stop()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 12 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", folder]).returncode:
        pytest.skip("a tmpfs cannot be mounted: needs root")
    yield folder
    eventually(lambda: not subprocess.run(["umount", folder], capture_output=True).returncode, "the keeper has left")


@pytest.mark.process
@pytest.mark.timeout(120)
def test_a_log_without_room_for_a_ring_has_none(small_disk: Path, tmp_path: Path) -> None:
    """Its clients use the files; tests/server/test_full_disk.py fills a disk below a ring."""
    address = f"unix!{tmp_path / 's'}"
    server = Server("--store", str(small_disk / "store"), "--listen", "unix!s", cwd=tmp_path)
    try:
        with mqfs.connect(address, transport="9p") as client:
            client.group("a", create=True, ctl=["replay all"]).publish("s", b"by 9P")
        with (
            mqfs.connect(address, transport="ring") as client,
            pytest.raises(errors.DiskFull, match="no ring: the log"),
        ):
            client.group("a").publish("s", b"never")
        with mqfs.connect(address) as client:
            client.group("a").publish("s", b"by file")
        assert [body for _, body in crowd.log_of(address, "a").values()] == ["by 9P", "by file"]
        assert "Traceback" not in server.text(), server.text()
    finally:
        assert server.stop() == 0
        KeeperLink(str(small_disk / "store")).quit()
