"""Few descriptors for many segments, while others are synced."""

from __future__ import annotations

import gc
import os
import queue
import resource
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from mqfs import limits
from mqfs.model import Kind
from mqfs.store.disk import Disk
from mqfs.store.segment.file import Segment
from mqfs.store.store import DiskStore
from tests.support.campaign import size
from tests.support.eventually import HANG_S
from tests.support.temp_store import lowered


def test_segments_that_are_on_disk_are_not_opened_to_be_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To open one may close another, which is synced first, which was to open all: a log became read-only by that."""
    for name, value in {"OPEN_BUCKETS": 6, "SEGMENT_BYTES": 4_096, "SEGMENT_FIRST_BYTES": 4_096}.items():
        monkeypatch.setattr(limits, name, value)
    posts: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    store = DiskStore(str(tmp_path / "store"), posts.put)
    buckets = [store.make(store.number(), b"{}") for _ in range(3)]
    synced: queue.SimpleQueue[OSError | None] = queue.SimpleQueue()
    for bucket in buckets:
        bucket.writer.state = lambda: b"{}"
    for number in range(size(9_000)):
        bucket = buckets[number % 3]
        bucket.writer.append(Kind.MESSAGE, 16, 0, b"x" * 900)
        bucket.reader.find(16, max(1, bucket.end.next - 40))
        if number % 50 == 7:
            bucket.upkeep.sync(synced.put)
            while synced.empty():
                posts.get(timeout=HANG_S)()
            assert synced.get() is None
    assert [bucket.end.failed for bucket in buckets] == [None] * 3
    store.close()


def test_removed_segments_leave_nothing_in_memory(tmp_path: Path) -> None:
    """Neither those that are trimmed, nor those of removed groups."""
    with lowered(SEGMENT_BYTES=4_096, SEGMENT_FIRST_BYTES=4_096):
        store = DiskStore(str(tmp_path / "store"))
        for number in [store.number() for _ in range(10)]:
            bucket = store.make(number, b"{}")
            bucket.writer.state = lambda: b"{}"
            for _ in range(100):
                bucket.writer.append(Kind.MESSAGE, 16, 0, b"x" * 900)
                bucket.upkeep.trim({16: bucket.end.next}, frozenset())
                store.tick()
            store.remove(number)
        store.tick()
        gc.collect()
        mine = [one for one in gc.get_objects() if type(one) is Segment and one.path.startswith(str(tmp_path))]
        assert len(mine) <= len(bucket.chain.segments)
        store.close()


class SyncingDisk(Disk):
    """Which threads sync logs."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def fdatasync(self, fd: int) -> None:  # type: ignore[override]
        self.threads.append(threading.current_thread().name)
        Disk.fdatasync(fd)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_logs_are_synced_elsewhere_for_their_descriptors_to_be_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of many groups with `sync off`, which no writer syncs: these do not wait for the disk."""
    monkeypatch.setattr(limits, "OPEN_BUCKETS", 6)
    posts: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    disk, before = SyncingDisk(), open_files()
    store = DiskStore(str(tmp_path / "store"), posts.put, disk)
    buckets = [store.make(store.number(), b"{}") for _ in range(20)]
    disk.threads.clear()
    for number in range(200):
        bucket = buckets[number % 20]
        bucket.writer.state = lambda: b"{}"
        bucket.writer.append(Kind.MESSAGE, 16, 0, b"x")
    while any(bucket.commit.synced != bucket.commit.written for bucket in buckets[:-6]):
        posts.get(timeout=HANG_S)()
    assert set(disk.threads) == {"committer"}
    store.make(store.number(), b"{}")
    assert open_files() - before <= 6 + 2
    assert [bucket.reader.find(16, 10) is not None for bucket in buckets] == [True] * 20
    store.close()


def test_without_descriptors_for_more_a_log_is_synced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "OPEN_BUCKETS", 6)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (16, 16))
    disk, before = SyncingDisk(), open_files()
    store = DiskStore(str(tmp_path / "store"), lambda call: None, disk)  # whose posts are late
    buckets = [store.make(store.number(), b"{}") for _ in range(20)]
    for bucket in buckets:
        bucket.writer.state = lambda: b"{}"
        bucket.writer.append(Kind.MESSAGE, 16, 0, b"x")
        assert open_files() - before <= 8 + 2
    store.close()
