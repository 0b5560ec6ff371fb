"""Files that are staged and not put in place are removed at once, whatever ended it; and the cost of new numbers."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mqfs.errors import DiskFailed, DiskFull, MqfsError, ReadOnly
from mqfs.model import Draft, Kind
from mqfs.store.disk import Disk, read_file
from mqfs.store.segment.file import Descriptors, Segment
from mqfs.store.store import DiskBucket, DiskStore, begin, write_label
from tests.store.script import PATH
from tests.support.lying_disk import LyingDisk, Stopped
from tests.support.temp_store import lowered


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    with lowered(SEGMENT_BYTES=2_048, SEGMENT_FIRST_BYTES=512):
        yield


def staged(disk: Disk) -> list[str]:
    return sorted(disk.listdir(f"{PATH}/staging"))


class Filled:
    """A group of some segments, of which all but a message in ten is unwanted."""

    def __init__(self) -> None:
        self.disk = LyingDisk()
        self.store = DiskStore(PATH, disk=self.disk)
        self.bucket: DiskBucket = self.store.make(self.store.number(), b"{}")
        self.bucket.writer.state = lambda: b"{}"
        self.kept = [self.write(17 if number % 10 else 16) for number in range(100)]
        self.bucket.upkeep.sync()
        self.bucket.upkeep.trim({16: 0}, frozenset())

    def write(self, stream: int) -> int:
        return self.bucket.writer.append(Kind.MESSAGE, stream, 0, b"x" * 100)


def compact(f: Filled) -> None:
    for _ in f.bucket.upkeep.compaction.compact():
        pass


def roll(f: Filled) -> None:
    for _ in range(40):
        f.write(16)


def make(f: Filled) -> None:
    f.store.make(f.store.number(), b"{}")


def label(f: Filled) -> None:
    write_label(f.disk, PATH, f.store.uuid, 1_000)


def batch(f: Filled) -> None:
    f.bucket.writer.append_batch([Draft(Kind.MESSAGE, 16, b"x" * 3_000, b"")] * 3, 0)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("work", [compact, roll, make, label, batch])
def test_each_call_of_it_fails(work: Callable[[Filled], None], number: int) -> None:
    filled = Filled()
    before = filled.disk.calls
    work(filled)
    made = filled.disk.calls - before
    assert staged(filled.disk) == []
    assert made > 3
    for call in range(1, made + 1):
        filled = Filled()
        filled.disk.fail_at, filled.disk.fail_with = filled.disk.calls + call, number
        try:
            work(filled)
        except (DiskFailed, DiskFull, ReadOnly, OSError):
            pass
        left = [name for name in staged(filled.disk) if not name.endswith(".idx")]  # one that waits for its place
        assert left == [], filled.disk.failed


ENDS: dict[str, Callable[[Filled], None]] = {
    "cancel": lambda f: f.bucket.upkeep.compaction.cancel(),
    "removal": lambda f: f.store.remove(1),
    "stop": lambda f: f.store.close(),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_compaction_that_is_ended_at_each_portion(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setattr("mqfs.store.compaction._PORTION", 2)
    portions, seen = 0, set()
    while True:
        filled, portions = Filled(), portions + 1
        for _ in range(portions):
            filled.bucket.upkeep.compaction.tick(0.0)
        names = staged(filled.disk)
        seen.update(name.rpartition(".")[2] for name in names)
        ENDS[end](filled)
        assert [name for name in staged(filled.disk) if not name.endswith(".gone")] == []
        if seen and not names:
            break
    assert "compact" in seen


def logs(disk: LyingDisk) -> dict[int, bytes]:
    folder = f"{PATH}/buckets/01/1"
    names = [name for name in disk.listdir(folder) if name.endswith(".log")]
    return {int(name[:-4]): read_file(disk, f"{folder}/{name}") for name in names}


@pytest.mark.parametrize("fails", [False, True], ids=["killed in a call", "killed after a call that failed"])
def test_a_compacted_segment_has_its_index_at_the_next_start(fails: bool) -> None:
    """So a copy that continues with the frames before does not take it for one that is not whole."""
    waited = 0
    for call in range(1, 1_000):
        filled = Filled()
        before = logs(filled.disk)
        at = filled.disk.calls + call
        if fails:
            filled.disk.fail_at, filled.disk.fail_with = at, errno.EIO
        else:
            filled.disk.stop_at = at
        try:
            compact(filled)
        except (Stopped, OSError):
            pass
        if filled.disk.calls < at:
            assert waited
            return
        filled.disk.stop_at = filled.disk.fail_at = 0
        after = filled.disk.after_kill()
        waited += any(name.endswith(".idx") for name in staged(after)) and logs(after) != before
        begin(after, PATH)
        assert staged(after) == []
        for first, data in logs(after).items():
            if data != before[first]:
                folder, staging = f"{PATH}/buckets/01/1", f"{PATH}/staging"
                assert Segment(after, Descriptors(), folder, staging, 1, first, lambda *_: None).looks_sealed(), call


def test_a_start_needs_nothing_of_an_index_that_waits_for_its_place() -> None:
    for call in range(1, 1_000):
        filled = Filled()
        filled.disk.fail_at, filled.disk.fail_with = filled.disk.calls + call, errno.EIO
        compact(filled)
        if waiting := [name for name in staged(filled.disk) if name.endswith(".idx")]:
            break
    filled.disk.fail_at = 0
    without = filled.disk.copy()
    without.unlink(f"{PATH}/staging/{waiting[0]}")
    assert looks_that_stop_a_start(filled.disk) == looks_that_stop_a_start(without)


def looks_that_stop_a_start(disk: LyingDisk) -> int:
    """How many of its looks at the disk must not fail."""
    stopped = 0
    for look in range(1, 1_000):
        failing = disk.copy()
        failing.fail_look_at, failing.fail_with = look, errno.EIO
        try:
            DiskStore(PATH, disk=failing)
        except (MqfsError, OSError):
            stopped += 1
        if failing.looks < look:
            break
    return stopped


# ---------------------------------------------------------------- numbers


def numbered(path: Path, groups: int) -> tuple[DiskStore, ListingDisk]:
    disk = ListingDisk()
    store = DiskStore(f"{path}/{groups}", disk=disk)
    for _ in range(groups):
        store.make(store.number(), b"{}")
    return store, disk


class ListingDisk(Disk):
    def __init__(self) -> None:
        self.listed = 0

    def listdir(self, path: str) -> list[str]:
        self.listed += 1
        return super().listdir(path)


def test_a_number_lists_no_folders(tmp_path: Path) -> None:
    with lowered(GROUP_NUMBER_BLOCK=4):
        store, disk = numbered(tmp_path, 10)
        disk.listed = 0
        numbers = [store.number() for _ in range(20)]
        assert disk.listed == 0
        assert numbers == list(range(11, 31))
        store.close()


@pytest.mark.parametrize("label", [1, 3, 10, 11, 500])
def test_a_number_in_use_is_never_given(tmp_path: Path, label: int) -> None:
    """Whatever the label says, which has no check of its own."""
    store, _ = numbered(tmp_path, 10)
    store.close()
    for _ in range(2):
        write_label(Disk(), store.path, store.uuid, label)
        again = DiskStore(store.path)
        assert again.number() == max(label, 11)
        again.close()
