"""Few descriptors for many segments, while others are synced."""

from __future__ import annotations

import gc
import queue
from collections.abc import Callable
from pathlib import Path

import pytest

from mqfs import limits
from mqfs.model import Kind
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
