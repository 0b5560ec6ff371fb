"""`check` finds what is wrong, and with fix leaves a store that has nothing wrong, and all that was good."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import random
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mqfs.errors import BadStore, Damaged, DiskFailed
from mqfs.model import Kind
from mqfs.store.api import Bucket
from mqfs.store.check import check
from mqfs.store.disk import Disk
from mqfs.store.replication import LogBytes
from mqfs.store.standby import StandbyStore
from mqfs.store.store import DiskStore, take_lock
from tests.support.campaign import size, tree_seed
from tests.support.temp_store import SMALL, abandon, lowered


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    logging.getLogger("mqfs.store").setLevel(logging.CRITICAL)
    with lowered(**SMALL):
        yield
    logging.getLogger("mqfs.store").setLevel(logging.NOTSET)


def fill(path: str, *, clean: bool = True) -> None:
    store = DiskStore(path)
    for group in (1, 2):
        bucket = store.make(store.number(), b'{"group":%d}' % group)
        bucket.writer.state = lambda group=group: b'{"group":%d}' % group  # type: ignore[misc]
        for number in range(60):
            bucket.writer.append(Kind.MESSAGE, 16 + number % 3, number, b"body %d" % number * (number % 9))
            bucket.writer.append(Kind.ACK, 1, number, bytes(24))
            if number % 10 == 0:
                bucket.writer.append(Kind.CHANGE, 0, number, b'{"do":"nothing"}')
        bucket.upkeep.sync()
    if clean:
        store.close()
    else:
        abandon(store)


def bodies(bucket: Bucket) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    sequence = 0
    while True:
        try:
            record = bucket.reader.scan(sequence)
        except Damaged as error:
            sequence = error.sequence + 1
            continue
        if record is None:
            return found
        found[record.sequence] = record.body
        sequence = record.sequence + 1


def contents(path: str) -> dict[int, dict[int, bytes]]:
    store = DiskStore(path)
    try:
        return {number: bodies(store.open(number)) for number in store.groups()}
    finally:
        store.close()


def run(path: str, fix: bool = False) -> tuple[int, list[str]]:
    lines: list[str] = []
    problems = check(path, fix, lines.append)
    assert problems == len([line for line in lines if not line.startswith("note: ")])
    return problems, lines


@pytest.mark.parametrize("clean", [True, False])
def test_a_good_store_has_nothing_wrong(tmp_path: Path, clean: bool) -> None:
    path = f"{tmp_path}/store"
    fill(path, clean=clean)
    assert run(path)[0] == 0
    assert run(path, fix=True)[0] == 0
    assert run(path) == (0, [])
    assert [len(found) for found in contents(path).values()] == [60, 60]


@pytest.mark.parametrize("by", ["a start", "a standby"])
def test_damage_that_an_index_does_not_list_is_damage(tmp_path: Path, by: str) -> None:
    """The index was made from the damaged log. By the records behind it, it was on disk: so it is not torn."""
    path = f"{tmp_path}/store"
    with lowered(SEGMENT_BYTES=4_096):
        store = DiskStore(path)
        bucket = store.make(store.number(), b'{"group":1}')
        bucket.writer.state = lambda: b'{"group":1}'
        for number in range(40):
            bucket.writer.append(Kind.MESSAGE, 16, 0, b"%d." % number + bytes(400))
            bucket.upkeep.sync()
        uuid = store.uuid
        store.close()
        logs = sorted(Path(path).glob("buckets/*/*/*.log"))
        data = bytearray(logs[1].read_bytes())
        data[data.index(bytes(400), len(data) // 3)] ^= 1
        logs[1].write_bytes(data)
        logs[1].with_suffix(".idx").unlink()
        if by == "a start":
            assert len(next(iter(contents(path).values()))) == 39
        else:
            path = f"{tmp_path}/copy"
            standby = StandbyStore(path, uuid)
            standby.apply(LogBytes(1, int(log.stem), 0, log.read_bytes()) for log in logs)
            standby.close()
        assert Path(path, logs[1].relative_to(tmp_path / "store")).with_suffix(".idx").exists()
        problems, lines = run(path)
        assert problems == 1, lines
        assert any(f"{logs[1].name}: bytes " in line and "do not pass their check" in line for line in lines)
        assert run(path, fix=True)[0] == 1
        assert run(path)[0] == 0


@pytest.mark.slow
def test_one_bit_anywhere(tmp_path: Path) -> None:
    """It is found, wherever it is; fixed, the store is good, and nothing but what was hit is missing."""
    path, luck = f"{tmp_path}/store", random.Random(tree_seed())
    fill(path)
    good = contents(path)
    for number in range(size(400)):
        copy = f"{tmp_path}/{number}"
        shutil.copytree(path, copy)
        name = luck.choice([p for p in sorted(Path(copy).glob("buckets/*/*/*")) if p.stat().st_size])
        data = bytearray(name.read_bytes())
        at = luck.randrange(len(data))
        data[at] ^= 1 << luck.randrange(8)
        name.write_bytes(data)
        problems, lines = run(copy)
        if not problems:
            assert name.suffix == ".log" and _is_padding(path, name, copy, at), (name, at, lines)  # noqa: PT018
        assert run(copy, fix=True)[0] == problems
        assert run(copy)[0] == 0
        after = contents(copy)
        for group, found in after.items():
            assert found.items() <= good[group].items()
            assert len(found) >= len(good[group]) - (name.suffix == ".log")
        if problems and name.suffix == ".log":
            assert any(kept.read_bytes() in data for kept in Path(copy, "quarantine").iterdir())
        shutil.rmtree(copy)


def _is_padding(path: str, name: Path, copy: str, at: int) -> bool:
    """Whether that byte is one between two records, which no check covers."""
    from mqfs.records.record import padded, row_at

    data = Path(path, name.relative_to(copy)).read_bytes()
    position = 0
    while (row := row_at(data, position)) is not None:
        if position <= at < position + padded(row.size):
            return at >= position + row.size
        position += padded(row.size)
    return False


def test_numbers_are_not_given_again_after_a_repair(tmp_path: Path) -> None:
    path = f"{tmp_path}/store"
    fill(path)
    last = max(Path(path).glob("buckets/01/1/*.log"))
    data = bytearray(last.read_bytes())
    data[-8] ^= 1  # the record that says which number is next
    last.write_bytes(data)
    assert run(path, fix=True)[0] > 0
    store = DiskStore(path)
    bucket = store.open(1)
    bucket.writer.state = lambda: b"{}"
    assert bucket.writer.append(Kind.MESSAGE, 16, 0, b"new") > 60
    store.close()


def test_messages_without_any_state_are_saved(tmp_path: Path) -> None:
    path = f"{tmp_path}/store"
    fill(path)
    for name in Path(path).glob("buckets/02/2/*.log"):
        data = bytearray(name.read_bytes())
        data[40] ^= 1
        name.write_bytes(data)
    problems, lines = run(path, fix=True)
    assert problems
    assert any("no state is whole" in line for line in lines)
    assert run(path)[0] == 0
    store = DiskStore(path)
    state, _ = store.open(2).upkeep.history()
    assert state is not None
    assert b"recovered-16" in state
    assert len(bodies(store.open(2))) == 60
    store.close()


def test_a_label_below_a_group_is_mended(tmp_path: Path) -> None:
    path = f"{tmp_path}/store"
    fill(path)
    label = Path(path, "mqfs")
    label.write_text(label.read_text().replace("groups 3", "groups 2"))
    assert run(path)[0] == 1
    assert run(path, fix=True)[0] == 1
    assert run(path)[0] == 0
    store = DiskStore(path)
    assert store.number() > 2
    store.close()


class EndingDisk(Disk):
    """A disk that is full after a number of changes, and stays so: nothing is cleared away either, as after a kill."""

    def __init__(self, left: int) -> None:
        self.left = left

    def _change(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def pwrite(self, *arguments: Any) -> int:
        self._change()
        return os.pwrite(*arguments)

    def rename(self, *arguments: Any) -> None:
        self._change()
        os.rename(*arguments)

    def unlink(self, *arguments: Any) -> None:
        self._change()
        os.unlink(*arguments)


def flip_bits(path: str) -> None:
    for log in sorted(Path(path).glob("buckets/*/*/*.log"))[1:6:4]:
        data = bytearray(log.read_bytes())
        data[data.index(b"body")] ^= 1
        log.write_bytes(data)


def swap_names(path: str, which: slice = slice(1, 3)) -> None:
    """Each of two segments gets the other's."""
    one, two = sorted(Path(path).glob("buckets/01/1/*.log"))[which]
    one.rename(f"{path}/other")
    two.rename(one)
    Path(path, "other").rename(two)


def remove_label(path: str) -> None:
    Path(path, "mqfs").unlink()


def ended_repairs(path: str) -> Iterator[str]:
    """Copies of a store, each after a repair that ended one change of the disk later; the last after a whole one."""
    for count in itertools.count():
        copy, disk = f"{path}.{count}", EndingDisk(count)
        shutil.copytree(path, copy)
        with pytest.MonkeyPatch.context() as patched, contextlib.suppress(OSError):
            patched.setattr("mqfs.store.check.Disk", lambda disk=disk: disk)
            check(copy, fix=True, report=lambda line: None)
        yield copy
        if disk.left >= 0:
            return


@pytest.mark.parametrize("spoil", [flip_bits, swap_names, remove_label])
def test_a_repair_that_ended_early_is_completed_by_the_next(tmp_path: Path, spoil: Callable[[str], None]) -> None:
    path, whole = f"{tmp_path}/store", f"{tmp_path}/whole"
    fill(path)
    spoil(path)
    shutil.copytree(path, whole)
    assert run(whole, fix=True)[0] > 0
    assert (os.listdir(f"{whole}/quarantine") == []) is (spoil is not flip_bits)
    expected = contents(whole)
    assert [len(found) for found in expected.values()] == [60 - (spoil is flip_bits)] * 2
    for count, copy in enumerate(ended_repairs(path)):
        run(copy, fix=True)
        assert run(copy)[0] == 0, count
        assert contents(copy) == expected, count
    assert count >= 1


@pytest.mark.parametrize("which", [slice(0, 2), slice(-2, None)])
def test_a_start_after_a_repair_that_ended_early_serves_nothing_else(tmp_path: Path, which: slice) -> None:
    """Where segments are missing it would give their sequences to new messages."""
    path = f"{tmp_path}/store"
    fill(path)
    if which.start == 0:  # both are all that the group has
        for log in sorted(Path(path).glob("buckets/01/1/*"))[4:]:
            log.unlink()
    expected = contents(path)
    swap_names(path, which)
    for count, copy in enumerate(ended_repairs(path)):
        with contextlib.suppress(DiskFailed):
            assert contents(copy) == expected, count
        run(copy, fix=True)
        assert contents(copy) == expected, count
    assert count >= 4


def test_two_checks_of_a_store_without_a_file_of_the_lock(tmp_path: Path) -> None:
    path = f"{tmp_path}/store"
    fill(path)
    Path(path, "lock").unlink()
    lock = take_lock(Disk(), path, write=False)
    try:
        with pytest.raises(BadStore, match=f"in use by process {os.getpid()}"):
            check(path)
    finally:
        os.close(lock)


def test_a_store_that_is_checked_is_in_use_by_the_check(tmp_path: Path) -> None:
    """The file of the lock has the number of the server before, which may be that of any process by now."""
    path = f"{tmp_path}/store"
    fill(path)
    Path(path, "lock").write_text("1\n")

    def report(line: str) -> None:
        with pytest.raises(BadStore, match=f"in use by process {os.getpid()}"):
            DiskStore(path)
        lines.append(line)

    lines: list[str] = []
    Path(path, "other").touch()
    check(path, report=report)
    assert lines == ["note: other: not a part of a store"]
    assert Path(path, "lock").read_text() == "1\n"


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    path = f"{tmp_path}/store"
    fill(path)
    store = DiskStore(path)
    with pytest.raises(BadStore, match=f"in use by process {os.getpid()}"):
        check(path)
    with pytest.raises(BadStore, match=f"in use by process {os.getpid()}"):
        DiskStore(path)
    store.close()
    before = sorted(Path(path).rglob("*"))
    label = Path(path, "mqfs")
    for text, said in (("mqfs 2\nuuid x\ngroups 1\n", "version 2"), ("hello", "no label"), ("mqfs 1\n", "no uuid")):
        label.write_text(text)
        for refuses in (DiskStore, check):
            with pytest.raises(BadStore, match=said):
                refuses(path)
    assert sorted(Path(path).rglob("*")) == before
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "file").touch()
    with pytest.raises(BadStore, match="not empty"):
        DiskStore(f"{tmp_path}/foreign")
    assert os.listdir(tmp_path / "foreign") == ["file"]
    with pytest.raises(BadStore):
        DiskStore(f"{tmp_path}/foreign/file")


def test_a_newest_segment_that_a_replica_has_is_left_as_it_is(tmp_path: Path) -> None:
    """Records behind a rewritten one would be copied over those that are whole there."""
    path = str(tmp_path / "store")
    fill(path)
    newest = max((tmp_path / "store/buckets/01/1").glob("*.log"))
    data = bytearray(newest.read_bytes())
    data[8] ^= 1
    newest.write_bytes(data)
    (tmp_path / "store/replica").write_text("{}")
    problems, lines = run(path, fix=True)
    assert problems
    assert newest.read_bytes() == data
    assert any("left as it is, for a replica has it" in line for line in lines)
    (tmp_path / "store/replica").unlink()
    run(path, fix=True)
    assert run(path) == (0, [line for line in run(path)[1] if line.startswith("note: ")])


@pytest.mark.parametrize("name", ["lock", "staging", "mqfs", "buckets"])
def test_links_are_not_followed(tmp_path: Path, name: str) -> None:
    """Whoever may write beside a store of root makes it empty or change nothing of his choice."""
    path, victim = f"{tmp_path}/store", tmp_path / "victim"
    fill(path)
    shutil.move(f"{path}/{name}", victim)
    if victim.is_dir():
        (victim / "file").write_text("precious")
    os.symlink(victim, f"{path}/{name}")
    before = {p: p.read_bytes() for p in sorted([victim, *victim.rglob("*")]) if p.is_file()}
    with pytest.raises(BadStore, match=name):
        DiskStore(path)
    for fix in (False, True):
        with contextlib.suppress(BadStore):
            run(path, fix)
        assert {p: p.read_bytes() for p in sorted([victim, *victim.rglob("*")]) if p.is_file()} == before


def test_a_store_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    path = f"{tmp_path}/store"
    fill(path)
    os.chmod(path, 0o777)
    with pytest.raises(BadStore, match="open to other users"):
        DiskStore(path)
    if os.geteuid() == 0:
        os.chmod(path, 0o700)
        os.chown(path, 65534, 65534)
        with pytest.raises(BadStore, match="open to other users"):
            DiskStore(path)


def test_the_bytes_of_one_log_at_a_time_are_in_memory(tmp_path: Path) -> None:
    """A group without a whole state: every log is looked at."""
    path, count, large = f"{tmp_path}/store", 16, 1 << 20
    with lowered(SEGMENT_BYTES=large, STATE_RECORD_BYTES=large):
        store = DiskStore(path)
        bucket = store.make(store.number(), b'{"group":1}')
        bucket.writer.state = lambda: b'{"group":1}'
        for _ in range(count):
            bucket.writer.append(Kind.MESSAGE, 16, 0, bytes(large - 4_096))
        store.close()
    logs = sorted(Path(path).glob("buckets/*/*/*.log"))
    assert len(logs) == count
    for log in logs:
        data = bytearray(log.read_bytes())
        data[data.index(b'{"group":1}')] ^= 1
        log.write_bytes(data)
    tracemalloc.start()
    try:
        assert any("no state is whole" in line for line in run(path)[1])
        assert tracemalloc.get_traced_memory()[1] < count * large / 2
    finally:
        tracemalloc.stop()


def test_files_of_the_server_beside_the_groups_are_a_part_of_the_store(tmp_path: Path) -> None:
    DiskStore(str(tmp_path / "store")).close()
    for name in ("keeper", "replica", "foreign"):
        (tmp_path / "store" / name).touch()
    lines: list[str] = []
    check(str(tmp_path / "store"), report=lines.append)
    assert [line for line in lines if "not a part" in line] == ["note: foreign: not a part of a store"]
