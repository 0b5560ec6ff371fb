"""The server stopped at any moment, and the next one continues; seeded, on a disk in memory.

The moments are all calls of the disk and of the ring: also between what is written and what is released, and between
retiring a ring and its end.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from mqfs import errors, ring
from tests.ring.server.rig import Rig
from tests.ring.server.story import Story, small
from tests.support.campaign import seed, size
from tests.support.lying_disk import LyingDisk, Stopped

pytestmark = [
    pytest.mark.skipif(bool(ring.MISSING), reason=ring.MISSING),
    pytest.mark.usefixtures("quiet"),
]

SYNCS = ("sync off", "sync always", "sync 10ms")


def tell(number: int, stops: int, dice: random.Random) -> int:
    """One story, its server stopped so often. How many messages were confirmed."""
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_power_loss(keeper: Any) -> None:
    """Then the rings are gone. Committed messages are there, those only published perhaps; no number comes again."""
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
                assert story.rig.group.log.end.next > newest, f"story {number}: sequences are given again"
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


def publish_and_kill(bodies: list[bytes]) -> LyingDisk:
    """What a killed server leaves: messages in the ring that its log has not."""
    disk = LyingDisk()
    rig = Rig("replay all", disk=disk)
    client = rig.attach()
    rig.write("s", b"before")
    for body in bodies:
        client.ring.publish(16, body, b"", 1, 0, 0)
    rig.kill()
    return disk.after_kill()


def write_meanwhile(rig: Rig, count: int) -> list[bytes]:
    """Write `count` messages; those that the group took."""
    taken = []
    for number in range(count):
        try:
            rig.write("s", b"meanwhile %d" % number)
        except (errors.MqfsError, OSError):
            continue
        taken.append(b"meanwhile %d" % number)
    return taken


def stop_process(rig: Rig) -> None:
    """In order; what the server still has of rings goes with its process."""
    try:
        rig.stop()
    finally:
        rig.kill()


def start_once(disk: LyingDisk, end: Callable[[Rig], None]) -> list[bytes]:
    """A start on a disk that may fail, writes, and an end. Returns the messages it took."""
    taken: list[bytes] = []
    try:
        rig = Rig(disk=disk)
        taken = write_meanwhile(rig, 5)
        rig.tick()
        end(rig)
    except (errors.MqfsError, OSError):
        pass
    return taken


@pytest.mark.slow
@pytest.mark.parametrize("end", [Rig.kill, stop_process])
@pytest.mark.parametrize("error", [errno.EIO, errno.EMFILE, errno.ENOSPC])
def test_a_start_on_a_disk_that_fails_once(keeper: Any, error: int, end: Callable[[Rig], None]) -> None:
    """Whichever call it is: what was published is in the ring still, for a start on a disk that is well. What the
    start that failed accepted is there too."""
    bodies = [b"%d" % number for number in range(3)]
    failed = 1
    with small():
        for number in range(1, 200):
            if not failed:
                break
            disk = publish_and_kill(bodies)
            disk.fail_at, disk.fail_with = number, error
            taken = start_once(disk, end)
            failed = len(disk.failed)
            rig = Rig(disk=disk.after_kill())
            expected = [b"before", *bodies, *taken]  # and perhaps what could not be committed
            assert [body for _, _, body in rig.log() if body in expected] == expected, f"call {number}: {disk.failed}"
            rig.stop()
            keeper("").quit()
    assert number > 3


def count_ring_descriptors() -> int:
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum("/memfd:" in link for link in links)


@pytest.mark.slow
@pytest.mark.parametrize("error", [errno.EIO, errno.EMFILE])
def test_a_start_keeps_no_descriptor_of_a_ring_that_it_could_not_resume(keeper: Any, error: int) -> None:
    with small():
        for number in range(1, 200):
            disk = publish_and_kill([b"published"])
            gc.collect()
            before = count_ring_descriptors()
            disk.fail_at, disk.fail_with = number, error
            try:
                rig = Rig(disk=disk)
            except (errors.MqfsError, OSError):
                keeper("").quit()
                continue
            if rig.own is None and keeper.rings:
                assert count_ring_descriptors() <= before, f"call {number}: {disk.failed}"
            if not disk.failed:
                break
            rig.kill()
            keeper("").quit()
        rig.stop()


def test_a_machine_without_another_thread_takes_no_ring_and_no_message(
    keeper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group works as before where it asked for a ring, and is read-only where a start found one."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with small():
        rig = Rig("replay all", disk=LyingDisk())
        before = count_ring_descriptors()
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with pytest.raises(errors.OverLimit):
                rig.attach()
        assert count_ring_descriptors() == before
        rig.write("s", b"before")
        client = rig.attach()
        client.ring.publish(16, b"published", b"", 1, 0, 0)
        rig.kill()
        assert isinstance(rig.disk, LyingDisk)
        disk = rig.disk.after_kill()
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            rig = Rig(disk=disk)
        assert write_meanwhile(rig, 5) == []
        rig.kill()
        rig = Rig(disk=disk.after_kill())
        assert [body for _, _, body in rig.log()] == [b"before", b"published"]
        rig.stop()
