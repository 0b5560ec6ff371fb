"""The server stopped at any moment, and the next one goes on; seeded, on a disk in memory.

The moments are all calls of the disk and of the ring: also between what is written and what is released, and between
retiring a ring and its end.
"""

from __future__ import annotations

import errno
import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest

from mqfs import errors, ring
from tests.campaign import seed, size
from tests.crash.liar import LyingDisk, Stopped
from tests.rings.rig import Rig, keeper
from tests.rings.story import Story, small

pytestmark = pytest.mark.skipif(bool(ring.MISSING), reason=ring.MISSING)

SYNCS = ("sync off", "sync always", "sync 10ms")
__all__ = ["keeper"]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(before)


def tell(number: int, stops: int, dice: random.Random) -> int:
    """One story, its server stopped so often. How many messages were told."""
    disk, story = LyingDisk(), Story(number, SYNCS[number % 3])
    story.start(disk)
    for _ in range(stops):
        disk.luck = random.Random(number)
        disk.stop_at = disk.calls + dice.randint(1, 150)
        try:
            story.run(40)
        except Stopped:
            pass
        story.kill()
        disk = disk.after_kill()
        story.start(disk)
        story.check()
    assert story.rig is not None
    story.rig.stop()
    story.clients.clear()
    story.start(disk.after_kill())
    story.check()
    story.rig.stop()
    return len(story.told) + len(story.unnumbered)


def test_any_moment(keeper: Any) -> None:
    told = 0
    with small():
        for number in range(seed() * 10_000, seed() * 10_000 + size(3_000)):
            try:
                told += tell(number, 4, random.Random(number))
            except Exception as error:
                raise AssertionError(f"story {number}: {type(error).__name__}: {error}") from error
            finally:
                keeper("").quit()
    assert told > 50 * size(3_000)
    print(f"{size(3_000)} stories, {4 * size(3_000)} stops, {told} messages")


def test_power_loss(keeper: Any) -> None:
    """Then the rings are gone. What was committed is there, what was only published perhaps; no number comes again."""
    with small():
        for number in range(seed() * 10_000, seed() * 10_000 + size(700)):
            dice, disk, story = random.Random(number), LyingDisk(), Story(number, "sync always")
            story.start(disk)
            committed = 0
            for _ in range(4):
                disk.stop_at = disk.calls + dice.randint(1, 150)
                try:
                    story.run(40)
                except Stopped:
                    pass
                committed = max([committed, *(client.ring.committed for client in story.clients)])
                story.kill()
                keeper("").quit()
                story.clients.clear()
                disk = disk.after_power_loss(random.Random(number))
                newest = max(story.told, default=0)
                story.start(disk)
                assert story.rig is not None
                assert story.rig.group.bucket.next > newest, f"story {number}: sequences are given again"
                found = {sequence: (stream, body) for sequence, stream, body in story.rig.log()}
                assert len({body for _, body in found.values()}) == len(found)
                for sequence, row in list(story.told.items()):
                    if sequence <= committed and row[0] not in story.gone:
                        assert found.get(sequence) == row, f"story {number}: {sequence} was committed"
                    assert found.get(sequence, row) == row
                    if sequence not in found:
                        del story.told[sequence]
            assert story.rig is not None
            story.rig.stop()
            keeper("").quit()


@pytest.mark.parametrize("error", [errno.EIO, errno.EMFILE, errno.ENOSPC])
def test_a_start_on_a_disk_that_fails_once(keeper: Any, error: int) -> None:
    """Whichever call it is: what was published is in the ring still, for a start on a disk that is well."""
    bodies = [b"%d" % number for number in range(3)]
    failed = 1
    with small():
        for number in range(1, 200):
            if not failed:
                break
            disk = LyingDisk()
            rig = Rig("replay all", disk=disk)
            client = rig.attach()
            rig.write("s", b"before")
            for body in bodies:
                client.ring.publish(16, body, b"", 1, 0, 0)
            rig.kill()
            disk = disk.after_kill()
            disk.fail_at, disk.fail_with = number, error
            try:
                rig = Rig(disk=disk)
                rig.tick()
                rig.kill()
            except (errors.MqfsError, OSError):
                pass
            failed = len(disk.failed)
            rig = Rig(disk=disk.after_kill())
            assert [body for _, _, body in rig.log()] == [b"before", *bodies], f"call {number}: {disk.failed}"
            rig.stop()
            keeper("").quit()
    assert number > 3
