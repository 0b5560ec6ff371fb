"""What a start and a read cost, in calls and descriptors rather than in seconds."""

from __future__ import annotations

import os
from pathlib import Path

from mqfs.store.disk import Disk
from mqfs.store.store import DiskStore
from mqfs.types import Kind
from tests.store.small import lowered


class CountingDisk(Disk):
    def __init__(self) -> None:
        self.reads = 0
        self.read_bytes = 0

    def pread(self, fd: int, count: int, position: int) -> bytes:
        data = os.pread(fd, count, position)
        self.reads += 1
        self.read_bytes += len(data)
        return data


def test_descriptors_are_bounded(tmp_path: Path) -> None:
    with lowered(OPEN_BUCKETS=16, SEGMENT_BYTES=4_096, SEGMENT_FIRST_BYTES=1_024):
        store = DiskStore(f"{tmp_path}/store")
        buckets = [store.make(store.number(), b"{}") for _ in range(40)]
        most = before = len(os.listdir("/proc/self/fd"))
        for round_ in range(60):
            for bucket in buckets:
                bucket.state = lambda: b"{}"
                bucket.append(Kind.MESSAGE, 16, 0, b"x" * 200)
                if round_ % 10 == 0:
                    bucket.sync()
            most = max(most, len(os.listdir("/proc/self/fd")))
        for bucket in buckets:
            assert [bucket.find(16, n) is not None for n in (1, 30, 60)] == [True] * 3
            most = max(most, len(os.listdir("/proc/self/fd")))
        assert most - before <= 18
        store.close()


def filled(path: str) -> None:
    """10 messages in each of 1,000 streams."""
    store = DiskStore(path)
    bucket = store.make(store.number(), b"{}")
    bucket.state = lambda: b"{}"
    for number in range(10_000):
        bucket.append(Kind.MESSAGE, 16 + number % 1_000, number, b"x" * 1_000)
    store.close()


def test_one_stream_costs_its_own_messages(tmp_path: Path) -> None:
    """Both from sealed segments and from the open one; a start reads no messages at all."""
    with lowered(SEGMENT_BYTES=4 << 20):
        filled(f"{tmp_path}/store")
        disk = CountingDisk()
        store = DiskStore(f"{tmp_path}/store", disk=disk)
        bucket = store.open(1)
        bucket.history()
        assert disk.read_bytes < 20_000
        bucket.tally(20, 0)  # loads the indexes
        disk.reads = disk.read_bytes = 0
        sequence = count = 0
        while (record := bucket.find(20, sequence)) is not None:
            sequence, count = record.sequence + 1, count + 1
        assert count == 10
        assert disk.reads == 10
        assert disk.read_bytes == 10 * 1_032
        store.close()
