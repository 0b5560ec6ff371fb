"""The server stopped at any moment, and the next one goes on; seeded, on a disk in memory.

The moments are all calls of the disk and of the ring: also between what is written and what is released, and between
retiring a ring and its end.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest

from mqfs import ring
from tests.campaign import seed, size
from tests.crash.liar import LyingDisk, Stopped
from tests.rings.rig import keeper
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
