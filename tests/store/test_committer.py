"""The committer's thread: one sync for all who wait, deadlines, errors, and an end that loses nothing."""

from __future__ import annotations

import errno
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mqfs.errors import DiskFailed, ReadOnly
from mqfs.model import Kind, Wait
from mqfs.store.api import Bucket
from mqfs.store.disk import Disk
from mqfs.store.group_commit import CommitThread
from mqfs.store.store import PORTION_S, DiskStore
from tests.support.eventually import HANG_S
from tests.support.temp_store import SMALL, lowered

Calls = queue.SimpleQueue[Callable[[], None]]


class SlowDisk(Disk):
    """Counts syncs, and holds them while `gate` is closed. `broken`: they fail."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Semaphore(0)
        self.syncs = 0
        self.broken = False

    def fdatasync(self, fd: int) -> None:  # type: ignore[override]
        self.syncs += 1
        self.begun.release()
        assert self.gate.wait(HANG_S)
        if self.broken:
            raise OSError(errno.EIO, "broken")
        Disk.fdatasync(fd)


def made(path: Path, disk: Disk) -> tuple[DiskStore, Bucket, Calls]:
    calls: Calls = queue.SimpleQueue()
    store = DiskStore(f"{path}/store", calls.put, disk)
    bucket = store.make(store.number(), b"{}")
    bucket.writer.state = lambda: b"{}"
    return store, bucket, calls


def remove(store: DiskStore, number: int, calls: Calls) -> None:
    step = store.remove(number)
    assert isinstance(step, Wait)
    while not step.settled:
        calls.get(timeout=HANG_S)()
    step.result()


def test_one_sync_serves_all_who_wait(tmp_path: Path) -> None:
    disk = SlowDisk()
    store, bucket, calls = made(tmp_path, disk)
    told: list[int] = []
    disk.gate.clear()
    before = disk.syncs
    for number in range(50):
        bucket.writer.append(Kind.MESSAGE, 16, 0, b"x")
        bucket.upkeep.sync(lambda error, number=number: told.append(number))  # type: ignore[misc]
        if number == 0:
            while disk.syncs == before:
                assert disk.begun.acquire(timeout=HANG_S)
    disk.gate.set()
    while len(told) < 50:
        calls.get(timeout=HANG_S)()
    assert told == list(range(50))
    assert disk.syncs - before == 2  # the first one's, and one for the other 49
    store.close()


def test_a_deadline_is_kept_and_not_hurried(tmp_path: Path) -> None:
    disk = SlowDisk()
    store, bucket, calls = made(tmp_path, disk)
    begin, told = time.monotonic(), list[float]()
    for _ in range(3):
        bucket.writer.append(Kind.MESSAGE, 16, 0, b"x")
        bucket.upkeep.sync(lambda error: told.append(time.monotonic() - begin), 0.3)
    before = disk.syncs
    while len(told) < 3:
        calls.get(timeout=HANG_S)()
    assert 0.25 < told[0] <= told[2] < 10
    assert disk.syncs == before + 1
    bucket.writer.append(Kind.MESSAGE, 16, 0, b"x")
    bucket.upkeep.sync(lambda error: told.append(0), 3_600)
    bucket.upkeep.sync(lambda error: told.append(1))  # takes the other with it
    while len(told) < 5:
        calls.get(timeout=HANG_S)()
    assert told[3:] == [0, 1]
    store.close()


def test_an_error_reaches_all_who_wait(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = SlowDisk()
    store, bucket, calls = made(tmp_path, disk)
    told: list[OSError | None] = []
    bucket.writer.append(Kind.MESSAGE, 16, 0, b"x")
    disk.broken = True
    with caplog.at_level(logging.CRITICAL, "mqfs.store"):
        bucket.upkeep.sync(told.append)
        bucket.upkeep.sync(told.append, 100.0)
        while len(told) < 2:
            calls.get(timeout=HANG_S)()
    assert [error and error.errno for error in told] == [errno.EIO, errno.EIO]
    disk.broken = False
    bucket.upkeep.sync(told.append)
    assert told[2] is bucket.end.failed is not None
    with pytest.raises(ReadOnly):
        bucket.writer.append(Kind.MESSAGE, 16, 0, b"x")
    assert bucket.reader.scan(1) is not None
    store.close()


def append_beyond_a_block(bucket: Bucket) -> None:
    for _ in range(4 * SMALL["SEQUENCE_BLOCK"]):
        bucket.writer.append(Kind.MESSAGE, 16, 0, b"x")


def test_a_failure_that_nobody_was_told_of_yet_is_no_success(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The system reports it to one sync only: the next, which a block of sequences waits for, would pass."""
    disk = SlowDisk()
    with lowered(**SMALL):
        store, bucket, calls = made(tmp_path, disk)
        told: list[OSError | None] = []
        bucket.writer.append(Kind.MESSAGE, 16, 0, b"x")
        disk.broken = True
        bucket.upkeep.sync(told.append)
        failed = calls.get(timeout=HANG_S)
        disk.broken = False
        with caplog.at_level(logging.CRITICAL, "mqfs.store"), pytest.raises(DiskFailed):
            append_beyond_a_block(bucket)
        failed()
        assert [error and error.errno for error in told] == [errno.EIO]
        store.close()


def test_closing_answers_those_who_wait(tmp_path: Path) -> None:
    store, bucket, _ = made(tmp_path, Disk())
    told: list[OSError | None] = []
    bucket.writer.append(Kind.MESSAGE, 16, 0, b"x")
    bucket.upkeep.sync(told.append, 3_600)
    store.close()
    assert told == [None]
    again = DiskStore(f"{tmp_path}/store")
    assert (again.open(1).end.next, again.open(1).upkeep.damaged) == (2, 0)
    again.close()


def test_a_removed_bucket_answers_those_who_wait(tmp_path: Path) -> None:
    store, bucket, calls = made(tmp_path, Disk())
    told: list[OSError | None] = []
    bucket.writer.append(Kind.MESSAGE, 16, 0, b"x")
    bucket.upkeep.sync(told.append, 3_600)
    remove(store, 1, calls)
    assert told == [None]
    assert list(store.groups()) == []
    store.close()


def test_a_bucket_is_removed_while_its_index_is_to_be_extended(tmp_path: Path) -> None:
    told: list[OSError | None] = []
    with lowered(**{**SMALL, "SEGMENT_BYTES": 1 << 20, "SEGMENT_RECORDS": 1_000}):
        store, bucket, calls = made(tmp_path, Disk())
        for number in range(12):
            bucket.writer.append(Kind.MESSAGE, 16, 0, bytes(1_000))
            if number < 8:  # parts of the index are written; behind them more are asked for
                bucket.upkeep.sync(told.append)
                while len(told) <= number:
                    calls.get(timeout=HANG_S)()
        remove(store, 1, calls)
        assert list(store.groups()) == []
        store.close()


def test_a_loop_that_ended_is_no_error() -> None:
    done = threading.Event()

    def post(call: Callable[[], None]) -> None:
        done.set()
        raise RuntimeError("the loop ended")

    thread = CommitThread(post)
    thread.request("key", lambda: None, lambda error: None, 0.0)
    assert done.wait(HANG_S)
    thread.request("other", lambda: None, lambda error: None, 3_600)
    thread.stop()


def test_at_no_moment_of_a_roll_a_sync_leaves_out_the_old_segment(tmp_path: Path) -> None:
    """The committer's thread may run between any two steps of the engine's."""
    with lowered(**SMALL):
        synced: set[int] = set()
        jobs: list[Callable[[], None]] = []
        disk: Any = Disk()
        disk.fdatasync = synced.add
        store: Any = DiskStore(str(tmp_path / "store"), disk=disk)
        bucket = store.make(store.number(), b"{}")
        bucket.writer.state = lambda: b"{}"
        store.committer.request = lambda key, job, done, within_s: jobs.append(job)
        bucket.writer.append(Kind.MESSAGE, 16, 0, b"x")
        bucket.upkeep.sync()
        old, steps = bucket.chain.open, 0

        def step(frame: Any, event: str, argument: Any) -> Any:
            nonlocal steps
            frame.f_trace_opcodes = True
            synced.clear()
            sys.settrace(None)
            jobs[0]()
            sys.settrace(step)
            steps += 1
            assert old.fd in synced
            return step

        while bucket.chain.open is old:
            sys.settrace(step)
            try:
                bucket.writer.append(Kind.MESSAGE, 16, 0, b"x" * 100)
            finally:
                sys.settrace(None)
        assert steps > 1_000
        store.close()


def test_a_group_that_is_made_while_the_store_closes_is_there_at_the_next_start(tmp_path: Path) -> None:
    posts: Calls = queue.SimpleQueue()
    store = DiskStore(f"{tmp_path}/store", posts.put)
    number = store.number()
    step: Any = store.make_soon(number, b"0")
    answer = posts.get(timeout=HANG_S)
    store.close()
    answer()
    with pytest.raises(DiskFailed, match="the store was closed"):
        step.result()
    again = DiskStore(f"{tmp_path}/store")
    assert again.groups() == [number]
    again.close()


class UnlinkingDisk(Disk):
    """Each removal of a file takes longer than a portion."""

    def __init__(self) -> None:
        self.unlinked = 0

    def unlink(self, path: str) -> None:  # type: ignore[override]
        self.unlinked += 1
        time.sleep(2 * PORTION_S)
        Disk.unlink(path)


def test_commits_go_between_the_files_of_a_removed_group(tmp_path: Path) -> None:
    disk, told = UnlinkingDisk(), list[object]()
    with lowered(SEGMENT_BYTES=2_048, SEGMENT_FIRST_BYTES=512):
        store, bucket, calls = made(tmp_path, disk)
        large = store.make(store.number(), b"{}")
        large.writer.state = lambda: b"{}"
        for _ in range(200):
            large.writer.append(Kind.MESSAGE, 16, 0, b"x" * 100)
        remove(store, large.id, calls)
        disk.unlinked = 0
        bucket.writer.append(Kind.MESSAGE, 16, 0, b"x")
        bucket.upkeep.sync(told.append)
        while not told:
            calls.get(timeout=HANG_S)()
        assert disk.unlinked <= 2
        while os.listdir(store.staging):
            calls.get(timeout=HANG_S)()
        assert disk.unlinked > 10
        store.close()
