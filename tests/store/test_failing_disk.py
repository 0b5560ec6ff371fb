"""A disk that fails or is full: what was acknowledged stays, nothing half is seen, reads go on."""

from __future__ import annotations

import errno
import logging
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqfs import limits
from mqfs.errors import BadStore, DiskFailed, DiskFull, ReadOnly
from mqfs.model import Draft, Kind
from mqfs.store.api import Bucket
from mqfs.store.store import DiskBucket, DiskStore
from tests.store.script import PATH, Script, Unstarted
from tests.support.campaign import size, tree_seed
from tests.support.lying_disk import LyingDisk
from tests.support.temp_store import SMALL, lowered

STEPS = 200


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.getLogger("mqfs.store").setLevel(logging.CRITICAL + 1)
    yield
    logging.getLogger("mqfs.store").setLevel(logging.NOTSET)


def calls_to_try(slow: bool) -> list[int]:
    disk = LyingDisk()
    Script(tree_seed(), slow=slow).run(disk, STEPS)
    calls = range(1, disk.calls + 1)
    return sorted(random.Random(tree_seed()).sample(calls, size(len(calls))))


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("slow", [False, True], ids=["syncs at once", "syncs that take time"])
def test_each_call_fails(number: int, lasting: bool, slow: bool) -> None:
    """The process continues with what it can; then it is killed, and what was synced is there."""
    luck = random.Random(tree_seed())
    with lowered(**SMALL):
        for index in calls_to_try(slow):
            disk, script = LyingDisk(), Script(tree_seed(), slow=slow)
            disk.fail_at, disk.fail_with, disk.fail_on, disk.luck = index, number, lasting, random.Random(index)
            try:
                script.run(disk, STEPS, tolerate=True)
            except (Unstarted, BadStore, DiskFailed, DiskFull):
                pass  # it could not start
            disk.fail_at = 0
            after = disk.after_power_loss(luck) if luck.random() < 0.5 else disk.after_kill()
            script.check(DiskStore(PATH, disk=after))


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE])
@pytest.mark.parametrize("slow", [False, True], ids=["syncs at once", "syncs that take time"])
def test_each_look_fails_once(number: int, slow: bool) -> None:
    """What cannot be opened or read for once is not taken for what is not there."""
    luck = random.Random(tree_seed())
    with lowered(**SMALL):
        disk = LyingDisk()
        Script(tree_seed(), slow=slow).run(disk, STEPS)
        looks = range(1, disk.looks + 1)
        for index in sorted(luck.sample(looks, size(len(looks)))):
            disk, script = LyingDisk(), Script(tree_seed(), slow=slow)
            disk.fail_look_at, disk.fail_with, disk.luck = index, number, random.Random(index)
            try:
                script.run(disk, STEPS, tolerate=True)
            except (Unstarted, BadStore, DiskFailed, DiskFull):
                pass  # it could not start
            after = disk.after_power_loss(luck) if luck.random() < 0.5 else disk.after_kill()
            script.check(DiskStore(PATH, disk=after))


def made(disk: LyingDisk) -> tuple[DiskStore, DiskBucket]:
    store = DiskStore(PATH, disk=disk)
    bucket = store.make(store.number(), b"{}")
    bucket.writer.state = lambda: b"{}"
    return store, bucket


def test_a_failed_sync_is_for_good() -> None:
    disk = LyingDisk()
    _, bucket = made(disk)
    assert bucket.writer.append(Kind.MESSAGE, 16, 0, b"kept") == 1
    told: list[OSError | None] = []
    bucket.upkeep.sync(told.append)
    assert bucket.writer.append(Kind.MESSAGE, 16, 0, b"doubtful") == 2
    disk.fail_at, disk.fail_with = disk.calls + 1, errno.EIO
    bucket.upkeep.sync(told.append)
    assert disk.failed == ["fdatasync"]
    bucket.upkeep.sync(told.append)  # the disk would succeed now: it is not asked
    assert told[0] is None
    assert [error.errno for error in told[1:] if error is not None] == [errno.EIO, errno.EIO]
    assert bucket.end.failed is told[1]
    with pytest.raises(ReadOnly):
        bucket.writer.append(Kind.MESSAGE, 16, 0, b"no")
    with pytest.raises(ReadOnly):
        bucket.writer.append_batch([Draft(Kind.MESSAGE, 16, b"no")], 0)
    assert bucket.reader.scan(1) is not None
    found = bucket.reader.find(16, 2)
    assert found is not None
    assert found.body == b"doubtful"
    again = DiskStore(PATH, disk=disk.after_power_loss(None)).open(1)
    assert again.reader.scan(1) is not None
    assert again.reader.scan(2) is None
    assert again.end.next > 2


@pytest.mark.parametrize("later", ["another sync", "the next tick"])
def test_a_sync_that_had_no_descriptor_comes_later(later: str) -> None:
    """Nothing was synced, nothing failed: a waiting sync still waits, and no other call is refused."""
    disk = LyingDisk()
    store, bucket = made(disk)
    bucket.writer.append(Kind.MESSAGE, 16, 0, b"kept")
    bucket.commit.note_folder_change()  # as a new segment does
    answers: list[OSError | None] = []
    disk.fail_at, disk.fail_with = disk.calls + 2, errno.EMFILE
    bucket.upkeep.sync(answers.append)
    assert disk.failed == ["sync_folder"]
    assert answers == []
    assert bucket.writer.append(Kind.MESSAGE, 16, 0, b"too") == 2
    if later == "another sync":
        bucket.upkeep.sync(answers.append)
    else:
        store.tick()
    assert answers == [None] * len(answers) != []
    again = DiskStore(PATH, disk=disk.after_power_loss(None)).open(1)
    assert again.reader.scan(2) is not None


class NoDescriptor(LyingDisk):
    """While `lacks`, a folder cannot be opened to sync it."""

    lacks = False

    def sync_folder(self, path: str) -> None:
        if self.lacks:
            raise OSError(errno.EMFILE, "Too many open files")
        super().sync_folder(path)


def test_who_waits_for_a_descriptor_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DESCRIPTOR_WAIT_S", 0.0)
    disk = NoDescriptor()
    store, bucket = made(disk)
    bucket.commit.note_folder_change()
    disk.lacks = True
    answers: list[OSError | None] = []
    for _ in range(2):
        bucket.writer.append(Kind.MESSAGE, 16, 0, b"doubtful")
        bucket.upkeep.sync(answers.append)
    assert [error.errno for error in answers if error is not None] == [errno.EMFILE] * 2
    assert bucket.end.failed is None
    disk.lacks = False
    store.tick()
    bucket.writer.append(Kind.MESSAGE, 16, 0, b"kept")
    bucket.upkeep.sync(answers.append)
    assert answers[2:] == [None]
    again = DiskStore(PATH, disk=disk.after_power_loss(None)).open(1)
    assert again.reader.scan(3) is not None


def test_without_a_descriptor_the_next_tick_syncs_what_nobody_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DESCRIPTOR_WAIT_S", 0.0)
    disk = NoDescriptor()
    store, bucket = made(disk)
    bucket.commit.note_folder_change()
    disk.lacks = True
    bucket.writer.append(Kind.MESSAGE, 16, 0, b"kept")
    bucket.upkeep.sync(None, 0.0)
    disk.lacks = False
    store.tick()
    again = DiskStore(PATH, disk=disk.after_power_loss(None)).open(1)
    assert again.reader.scan(1) is not None


def test_a_failed_write_is_for_good() -> None:
    disk = LyingDisk()
    _, bucket = made(disk)
    bucket.writer.append(Kind.MESSAGE, 16, 0, b"kept")
    disk.fail_at, disk.fail_with = disk.calls + 1, errno.EIO
    with pytest.raises(DiskFailed):
        bucket.writer.append(Kind.MESSAGE, 16, 0, b"no")
    with pytest.raises(ReadOnly):
        bucket.writer.append(Kind.MESSAGE, 16, 0, b"no")
    assert bucket.reader.scan(2) is None
    assert bucket.reader.scan(1) is not None


def test_a_full_disk_is_not_for_good() -> None:
    """Also where the file was written in part, and where there was no room to allocate."""
    disk = LyingDisk()
    store, bucket = made(disk)
    bucket.writer.append(Kind.MESSAGE, 16, 0, b"one")
    for attempt in range(40):
        disk.luck = random.Random(attempt)
        disk.fail_at, disk.fail_with = disk.calls + 1, errno.ENOSPC
        big = random.Random(attempt).randbytes(random.Random(attempt).choice([10, 70_000]))
        with pytest.raises(DiskFull):
            bucket.writer.append_batch([Draft(Kind.MESSAGE, 16, big), Draft(Kind.MESSAGE, 17, big)], 0)
    assert bucket.end.failed is None
    assert bucket.end.next == 2
    assert bucket.writer.append(Kind.MESSAGE, 16, 0, b"two") == 2
    assert bucket.reader.find(16, 2) is not None
    killed = DiskStore(PATH, disk=disk.after_kill().copy())
    assert killed.open(1).reader.find(17, 0) is None
    assert killed.disk.listdir(f"{PATH}/quarantine") == [], "something was left of a refused write"
    store.close()
    again = DiskStore(PATH, disk=disk.after_kill()).open(1)
    assert (again.end.next, again.upkeep.damaged) == (3, 0)
    assert again.reader.find(17, 0) is None


class Full(LyingDisk):
    """While it is full nothing is allocated or made; what was allocated is written."""

    is_full = False

    def open(self, path: str, flags: int) -> int:
        self._refuse(flags & os.O_CREAT)
        return super().open(path, flags)

    def allocate(self, fd: int, position: int, length: int) -> None:
        self._refuse(True)
        super().allocate(fd, position, length)

    def _refuse(self, takes_room: int) -> None:
        if self.is_full and takes_room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_group_asks_for_the_most_that_the_disk_refused() -> None:
    disk = Full()
    store, bucket = made(disk)
    bucket.writer.append(Kind.MESSAGE, 16, 0, bytes(3 << 20))
    disk.is_full = True
    bucket.upkeep.trim({}, frozenset())  # a roll
    assert store.full[bucket.id] > 0
    for length in (500_000, 100_000):
        with pytest.raises(DiskFull):
            bucket.writer.append(Kind.MESSAGE, 16, 0, bytes(length))
        assert store.full[bucket.id] > 500_000
    store.full[bucket.id + 1] = 1  # of a group that was not opened
    store.tick()
    assert [*store.full] == [bucket.id]
    disk.is_full = False
    store.tick()
    assert not store.full


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 4 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder]).returncode:
        pytest.skip("a tmpfs cannot be mounted: needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def fill(bucket: Bucket) -> int:
    """Append until there is no room; the last sequence."""
    for number in range(5_000):
        try:
            last = bucket.writer.append(Kind.MESSAGE, 16, number, b"x" * 5_000)
        except DiskFull:
            return last
    raise AssertionError("a disk of 4 MiB is never full")


@pytest.mark.process
def test_a_really_full_disk(small_disk: Path) -> None:
    store = DiskStore(f"{small_disk}/store")
    bucket = store.make(store.number(), b"{}")
    bucket.writer.state = lambda: b"{}"
    other = store.make(store.number(), b"{}")
    other.writer.state = lambda: b"{}"
    last = fill(bucket)
    assert last > 500
    fill(other)
    with pytest.raises(DiskFull):
        store.make(3, b"x" * 100_000)
    found = bucket.reader.find(16, last)
    assert found is not None
    assert found.sequence == last
    bucket.upkeep.trim({}, frozenset())  # a roll needs room for a head; the other group gives it
    store.remove(2)
    bucket.upkeep.trim({}, frozenset())
    assert bucket.writer.append(Kind.MESSAGE, 16, 0, b"again") > last
    store.close()
    store = DiskStore(f"{small_disk}/store")
    assert store.open(1).upkeep.damaged == 0
    store.close()
