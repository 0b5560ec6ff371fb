"""`keep ring`: messages are in memory only, bounded, and a reader that is too slow gets a report."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mqfs import errors, limits
from mqfs.clock import SystemClock
from mqfs.engine.tree.tree import Tree
from mqfs.model import User
from mqfs.store.store import DiskStore
from tests.engine.publishing.test_crash import Lying
from tests.support.lying_disk import LyingDisk

ME = User(os.geteuid(), os.getegid(), frozenset(), os.getpid(), "test")


def started(path: Path) -> Tree:
    return Tree(DiskStore(str(path)), SystemClock(), owner=ME)


def stop(tree: Tree) -> None:
    tree.close()
    tree.store.close()


def ctl(tree: Tree, *lines: str) -> None:
    handle = tree.open(ME, tree.find(ME, "g/ctl"), os.O_WRONLY)
    try:
        handle.write("".join(f"{line}\n" for line in lines).encode())
    finally:
        handle.close()


def volatile(tree: Tree, *lines: str) -> Any:
    group = tree.mkdir(ME, tree.root, "g", 0o775)
    ctl(tree, "keep ring", "replay all", *lines)
    tree.create(ME, group, "s", 0o664)  # type: ignore[arg-type]
    return group


def opened(tree: Tree, flags: int) -> Any:
    return tree.open(ME, tree.find(ME, "g/s"), flags)


def bytes_on_disk(path: Path) -> int:
    return sum(file.stat().st_blocks for file in path.rglob("*.log"))


def test_messages_cost_the_disk_nothing(tmp_path: Path) -> None:
    tree = started(tmp_path / "store")
    group = volatile(tree)
    before = bytes_on_disk(tmp_path)
    writer, reader = opened(tree, os.O_WRONLY), opened(tree, os.O_RDWR)
    for number in range(10_000):
        writer.write(b"%d" % number)
    assert [int(reader.read(100)) for _ in range(10_000)] == list(range(10_000))
    assert bytes_on_disk(tmp_path) == before
    assert group.log.upkeep.size > 0
    stop(tree)


def test_names_and_settings_outlive_the_server_and_no_sequence_comes_twice(tmp_path: Path) -> None:
    tree = started(tmp_path / "store")
    group = volatile(tree, "depth 7")
    opened(tree, os.O_WRONLY).write(b"gone")
    seen = group.log.end.next
    stop(tree)
    tree = started(tmp_path / "store")
    again: Any = tree.find(ME, "g")
    assert "keep ring" in again.settings.lines()
    assert "depth 7" in again.settings.lines()
    assert again.streams["s"].kept.first_kept() == 0
    opened(tree, os.O_WRONLY).write(b"new")
    assert again.streams["s"].kept.first_kept() >= seen
    stop(tree)


def test_it_is_bounded_and_the_slow_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RING_BYTES", 64 << 10)
    tree = started(tmp_path / "store")
    group = volatile(tree)
    slow, writer = opened(tree, os.O_RDWR), opened(tree, os.O_WRONLY)
    for number in range(1_000):
        writer.write(b"%1000d" % number)
    assert group.log.upkeep.size <= 64 << 10
    with pytest.raises(errors.FellBehind):
        slow.read(2_000)
    assert 900 < int(slow.read(2_000)) < 1_000
    stop(tree)


def test_keep_changes_only_while_nothing_is_kept(tmp_path: Path) -> None:
    tree = started(tmp_path / "store")
    volatile(tree)
    writer = opened(tree, os.O_WRONLY)
    writer.write(b"1")
    with pytest.raises(errors.Busy, match="keep: stream 's' has 1 messages"):
        ctl(tree, "keep disk")
    ctl(tree, "clear")
    with pytest.raises(errors.Busy, match="keep: stream 's' is open"):
        ctl(tree, "keep disk")
    writer.close()
    ctl(tree, "keep disk")
    before = bytes_on_disk(tmp_path)
    writer = opened(tree, os.O_WRONLY)
    for _ in range(1_000):
        writer.write(bytes(1_000))
    assert bytes_on_disk(tmp_path) > before
    stop(tree)


def test_consumers_take_from_it(tmp_path: Path) -> None:
    tree = started(tmp_path / "store")
    volatile(tree, "deliver one", "ack next")
    writer, worker = opened(tree, os.O_WRONLY), opened(tree, os.O_RDWR)
    for number in range(100):
        writer.write(b"%d" % number)
    taken: list[bytes] = []
    for _ in range(100):
        taken.append(worker.read(100, sum(map(len, taken))))
    assert list(map(int, taken)) == list(range(100))
    stop(tree)


DEEDS: dict[str, Callable[[Lying], Any]] = {
    "put": lambda u: u.put(b"once", id="x"),
    "put later": lambda u: u.put(b"once", id="x", delay="1h"),
    "commit": lambda u: u.say("commit job.1 p"),
}


def readable(u: Lying) -> Any:
    """What a reader, `.stats` and a producer see."""
    stream = u.group.streams["s"]
    stream.kept.update_low_watermark()
    counts = u.group.counts.written, u.group.counts.written_bytes, stream.written, stream.kept.count, stream.kept.size
    return u.log(), counts, len(u.group.held), u.committed(), u.parts()


def refused(
    deed: Callable[[Lying], Any], fault: Callable[[Lying, LyingDisk, int], Callable[[], bool]], at: int
) -> bool:
    """Do it while there is no room, and again when there is. False: the fault was not met."""
    disk = LyingDisk()
    u = Lying(disk)
    u.ctl("keep ring", "replay all", "sync off")
    u.stream("s")
    u.stage("p", "s", b"once")
    before, end = readable(u), fault(u, disk, at)
    try:
        deed(u)
    except errors.DiskFull:
        assert readable(u) == before
    else:
        assert not end()
        return False
    assert end()
    deed(u)
    u.clock.forward(3_601.0)
    u.tree.run_timers()
    assert [body for _, body in u.log()] == ["once"]
    assert u.group.counts.written == 1
    return True


def full_disk(u: Lying, disk: LyingDisk, at: int) -> Callable[[], bool]:
    disk.fail_at, disk.fail_with = disk.calls + at, errno.ENOSPC

    def end() -> bool:
        disk.fail_at = 0
        return bool(disk.failed)

    return end


@pytest.mark.parametrize("what", DEEDS)
def test_what_a_full_disk_refuses_was_not_written(what: str) -> None:
    at = 1
    while refused(DEEDS[what], full_disk, at):
        at += 1
    assert at > 1


@pytest.mark.parametrize("what", DEEDS)
def test_what_a_full_memory_refuses_was_not_written(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_memory(u: Lying, disk: LyingDisk, at: int) -> Callable[[], bool]:
        monkeypatch.setattr(limits, "MEMORY_BYTES", 16)

        def end() -> bool:
            monkeypatch.undo()
            return True

        return end

    assert refused(DEEDS[what], full_memory, 1)


def test_what_no_sequence_can_be_reserved_for_was_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "VOLATILE_SEQUENCES", 1_024)
    disk = LyingDisk()
    u = Lying(disk)
    u.ctl("keep ring", "replay all", "sync off")
    stream = u.stream("s")
    stream.kept.update_low_watermark()
    taken = refusals = 0
    while refusals < 3:
        disk.fail_at, disk.fail_with = disk.calls + 1, errno.ENOSPC
        try:
            u.write("s", b"%d" % taken)
            taken += 1
        except errors.DiskFull:
            assert stream.kept.count == taken
            assert u.group.log.reader.before(1 << 40) == taken
            refusals, disk.fail_at = refusals + 1, 0
            u.write("s", b"%d" % taken)
            taken += 1
    assert taken > 1_024
