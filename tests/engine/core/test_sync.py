"""`sync`: when a write is answered, and what happens when the disk fails."""

from __future__ import annotations

import errno
import json
import os
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mqfs import errors
from mqfs.engine.nodes import Meta
from mqfs.engine.tree.tree import Tree
from mqfs.model import Wait
from mqfs.store import group_commit
from mqfs.store.disk import Disk
from mqfs.store.store import DiskStore
from tests.support.clock import ManualClock
from tests.support.hand import ROOT


class Failing(Disk):
    """A disk whose syncs can be made to fail."""

    broken = False

    def fdatasync(self, fd: int) -> None:
        if self.broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().fdatasync(fd)


class Late:
    """The engine's thread as the committer sees it: what is posted is done when the test says so."""

    def __init__(self) -> None:
        self.posted: list[Callable[[], None]] = []

    def __call__(self, call: Callable[[], None]) -> None:
        self.posted.append(call)

    def until(self, done: Callable[[], bool]) -> None:
        while not done():
            if self.posted:
                self.posted.pop(0)()


class Case:
    def __init__(self, path: Path, post: Late | None) -> None:
        self.disk, self.post = Failing(), post
        self.store = DiskStore(str(path), post, self.disk)
        self.tree = Tree(self.store, ManualClock(), owner=ROOT, defaults=["replay all"])
        self.group: Any = self.settled(self.tree.mkdir(ROOT, self.tree.root, "g", 0o777))
        self.stream = self.settled(self.tree.create(ROOT, self.group, "s", 0o666))
        self.writer = self.tree.open(ROOT, self.stream, os.O_WRONLY)
        self.reader = self.tree.open(ROOT, self.stream, os.O_RDONLY)

    def settled(self, step: Any) -> Any:
        if isinstance(step, Wait):
            assert self.post is not None
            self.post.until(lambda: step.settled)
            return step.result()
        return step

    def stats(self) -> Any:
        handle = self.tree.open(ROOT, Meta(self.group, ".stats"), os.O_RDONLY)
        return json.loads(handle.read(1 << 20))  # type: ignore[arg-type]


@pytest.fixture
def late(tmp_path: Path) -> Iterator[Case]:
    """Commits by the committer's thread."""
    case = Case(tmp_path / "store", Late())
    yield case
    case.tree.close()
    case.store.close()


@pytest.fixture
def failing(tmp_path: Path) -> Iterator[Case]:
    case = Case(tmp_path / "store", None)
    yield case
    case.tree.close()
    case.store.close()


def test_readers_are_answered_before_the_disk_has_it_and_writers_after(late: Case) -> None:
    waiting = late.reader.read(64)
    step = late.writer.write(b"hello")
    assert isinstance(waiting, Wait)
    assert waiting.result() == b"hello"
    assert isinstance(step, Wait)
    assert not step.settled
    assert not step.cancel(), "it is appended: its caller may go, the write stays"
    assert late.settled(step) == 5


def test_one_sync_serves_all_who_wait_for_it(late: Case) -> None:
    steps = [late.writer.write(b"%d" % i) for i in range(50)]
    assert [late.settled(step) for step in steps] == [len(b"%d" % i) for i in range(50)]


def test_off_and_a_duration_do_not_wait(late: Case) -> None:
    for sync in (b"sync off\n", b"sync 1s\n"):
        ctl = late.tree.open(ROOT, Meta(late.group, "ctl"), os.O_WRONLY)
        late.settled(ctl.write(sync))
        assert late.writer.write(b"x") == 1


def test_a_group_of_live_readers_never_waits_for_the_disk(late: Case) -> None:
    ctl = late.tree.open(ROOT, Meta(late.group, "ctl"), os.O_WRONLY)
    late.settled(ctl.write(b"replay off\n"))
    assert late.writer.write(b"x") == 1


def test_a_failed_sync_makes_the_group_read_only_and_loses_nothing_acknowledged(failing: Case) -> None:
    assert failing.writer.write(b"kept") == 4
    failing.disk.broken = True
    with pytest.raises(errors.DiskFailed):
        failing.settled(failing.writer.write(b"lost"))
    failing.disk.broken = False
    for call in (
        lambda: failing.writer.write(b"more"),
        lambda: failing.tree.create(ROOT, failing.group, "t", 0o666),
        lambda: failing.tree.unlink(ROOT, failing.group, "s"),
    ):
        with pytest.raises(errors.ReadOnly):
            call()
    assert failing.reader.read(64, 0) == b"kept", "reads go on"
    stats = failing.stats()
    assert stats["read_only"]
    assert "Input/output error" in stats["failure"]
    other: Any = failing.tree.mkdir(ROOT, failing.tree.root, "h", 0o777)
    assert failing.settled(failing.tree.create(ROOT, other, "s", 0o666)), "other groups go on"


def test_writes_of_one_duration_wait_as_one(tmp_path: Path) -> None:
    """However many come before the disk is asked, the bucket remembers one of them."""
    case = Case(tmp_path / "store", Late())
    case.settled(case.tree.open(ROOT, case.tree.walk(ROOT, case.group, "ctl"), os.O_WRONLY).write(b"sync 1h\n"))
    case.settled(case.writer.write(b"first"))
    tracemalloc.start()
    try:
        for _ in range(2_000):
            case.settled(case.writer.write(b"more"))
        kept = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, group_commit.__file__)])
    finally:
        tracemalloc.stop()
    assert sum(trace.size for trace in kept.traces) < 10_000
    case.store.close()


def test_a_name_is_taken_while_its_group_is_made(late: Case) -> None:
    """Others who would make a file of that name wait for it; a dead letter's stream and a view are refused."""
    made: Any = late.tree.mkdir(ROOT, late.group, "x", 0o777)
    created: Any = late.tree.create(ROOT, late.group, "x", 0o666)
    assert (made.settled, created.settled) == (False, False)
    with pytest.raises(errors.Exists, match="taken by a group"):
        late.group.make_stream("x", 0o666, ROOT)
    with pytest.raises(errors.Exists, match="'x' is a stream or group"):
        late.tree.open(ROOT, late.tree.walk(ROOT, late.group, "ctl"), os.O_WRONLY).write(b"bind x s\n")
    group = late.settled(made)
    with pytest.raises(errors.Exists, match="exists already"):
        late.settled(created)
    assert late.tree.walk(ROOT, late.group, "x") is group
