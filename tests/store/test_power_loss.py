"""Whatever moment the machine stops at: nothing acknowledged is lost, nothing invented, and the store starts."""

from __future__ import annotations

import logging
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mqfs.store.check import check
from mqfs.store.store import DiskStore
from tests.store.script import PATH, Script
from tests.support.campaign import size, tree_seed
from tests.support.lying_disk import LyingDisk, Stopped
from tests.support.temp_store import SMALL, lowered

pytestmark = pytest.mark.slow

STEPS = 200
After = Callable[[LyingDisk, random.Random], LyingDisk]


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    logging.getLogger("mqfs.store").setLevel(logging.CRITICAL)
    with lowered(**SMALL):
        yield
    logging.getLogger("mqfs.store").setLevel(logging.NOTSET)


def forgets(disk: LyingDisk, luck: random.Random) -> LyingDisk:
    return disk.after_power_loss(None)


def tears(disk: LyingDisk, luck: random.Random) -> LyingDisk:
    return disk.after_power_loss(luck)


def killed(disk: LyingDisk, luck: random.Random) -> LyingDisk:
    return disk.after_kill()


def calls_of(script_seed: int, slow: bool) -> int:
    disk = LyingDisk()
    Script(script_seed, slow=slow).run(disk, STEPS)
    return disk.calls


def indexes(script_seed: int, slow: bool, luck: random.Random) -> list[int]:
    calls = calls_of(script_seed, slow)
    count = size(calls)
    return list(range(1, calls + 1)) if count == calls else sorted(luck.sample(range(1, calls + 1), count))


def run_until(script: Script, disk: LyingDisk, steps: int) -> bool:
    """True: it was stopped."""
    try:
        script.run(disk, steps)
    except Stopped:
        return True
    return False


@pytest.mark.parametrize("slow", [False, True], ids=["syncs at once", "syncs that take time"])
@pytest.mark.parametrize("after", [forgets, tears, killed])
def test_stop_at_every_call(after: After, slow: bool) -> None:
    luck = random.Random(tree_seed())
    script_seed = tree_seed()
    for index in indexes(script_seed, slow, luck):
        disk, script = LyingDisk(), Script(script_seed, slow=slow)
        disk.stop_at, disk.luck = index, random.Random(index)
        if not run_until(script, disk, STEPS):
            continue  # a short write more or less: the last calls are not always reached
        _recover(script, after(disk, luck), luck, after, everything=after is killed)


def sound(disk: LyingDisk) -> None:
    """`mqfs check` reports no damage: whatever is missing, a stop tore. An index is never synced, and the script's
    states are no JSON."""
    if not disk.exists(f"{PATH}/mqfs"):
        return  # stopped before the store was made to the end
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        disk.save(Path(folder, "disk"))
        check(f"{folder}/disk{PATH}", report=lines.append)
    damage = [line for line in lines if not line.startswith("note: ") and ".idx " not in line and "JSON" not in line]
    assert not damage, damage


def _recover(script: Script, disk: LyingDisk, luck: random.Random, after: After, *, everything: bool) -> None:
    """Start, perhaps being stopped in that too; check; go on; stop; check again."""
    sound(disk)
    disk.stop_at = luck.choice([0, luck.randint(1, 12)])
    try:
        store = DiskStore(PATH, disk=disk)
        for number in store.groups():
            store.open(number)
    except Stopped:
        disk = after(disk, luck)
        store = DiskStore(PATH, disk=disk)
    disk.stop_at = 0
    script.check(store, everything=everything)
    store.close()
    disk.stop_at = disk.calls + luck.randint(1, 150)
    stopped = run_until(script, disk, 40)
    disk = after(disk, luck) if stopped else disk.after_kill()
    sound(disk)
    script.check(DiskStore(PATH, disk=disk), everything=everything or not stopped)
