"""Files of a store that others have changed: wrong data is never served, and nothing is missing without a word."""

from __future__ import annotations

import logging
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mqfs.errors import BadStore, Damaged, MqfsError
from mqfs.model import Kind
from mqfs.store.api import Bucket
from mqfs.store.check import check
from mqfs.store.store import DiskStore
from tests.support.campaign import size, tree_seed
from tests.support.temp_store import SMALL, lowered

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    logging.getLogger("mqfs.store").setLevel(logging.CRITICAL)
    with lowered(**SMALL):
        yield
    logging.getLogger("mqfs.store").setLevel(logging.NOTSET)


def fill(path: str) -> None:
    store = DiskStore(path)
    for number in range(1, 4):
        bucket = store.make(store.number(), b'{"group":%d}' % number)
        bucket.writer.state = lambda number=number: b'{"group":%d}' % number  # type: ignore[misc]
        for step in range(60 + number):
            bucket.writer.append(
                Kind.MESSAGE, 16 + step % 3, step + 1, b"%d: body %d " % (number, step) * (1 + step % 9)
            )
            if step % 10 == 0:
                bucket.writer.append(Kind.CHANGE, 0, step + 1, b'{"do":"nothing"}')
        bucket.upkeep.sync()
    store.close()


def read(bucket: Bucket) -> tuple[dict[int, bytes], bool]:
    """The messages, and whether a reader got an error."""
    found: dict[int, bytes] = {}
    sequence, told = 0, False
    for _ in range(1_000):
        try:
            record = bucket.reader.scan(sequence)
        except Damaged as error:
            sequence, told = error.sequence + 1, True
            continue
        except MqfsError:
            return found, True
        if record is None:
            return found, told or bool(bucket.upkeep.damaged)
        assert record.sequence >= sequence
        found[record.sequence] = record.body
        sequence = record.sequence + 1
    raise AssertionError("a reader never comes to the end")


def contents(path: str) -> dict[int, tuple[dict[int, bytes], bool]]:
    found = {}
    store = DiskStore(path)
    try:
        for number in (1, 2, 3):
            try:
                bucket = store.open(number)
            except MqfsError:
                found[number] = dict[int, bytes](), True
                continue
            bucket.writer.state = lambda number=number: b'{"group":%d}' % number  # type: ignore[misc]
            found[number] = read(bucket)
    finally:
        store.close()
    return found


def run(path: str, *, fix: bool = False) -> tuple[int, list[str]]:
    lines: list[str] = []
    return check(path, fix, lines.append), lines


def snapshot(path: str) -> dict[str, bytes | None]:
    """Every file and folder with its bytes."""
    return {str(p): p.read_bytes() if p.is_file() else None for p in Path(path).rglob("*")}


# ------------------------------------------------------------ mutations of files

Mutation = Callable[[random.Random, Path], None]


def files(store: Path, ending: str, group: int | None = None) -> list[Path]:
    return sorted(store.glob(f"buckets/*/{group or '*'}/*{ending}"))


def swap(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def swap_indexes(luck: random.Random, store: Path) -> None:
    swap(*luck.sample(files(store, ".idx"), 2))


def another_index(luck: random.Random, store: Path) -> None:
    shutil.copy(*luck.sample(files(store, ".idx"), 2))


def no_index(luck: random.Random, store: Path) -> None:
    luck.choice(files(store, ".idx")).unlink()


def swap_segments(luck: random.Random, store: Path) -> None:
    swap(*luck.sample(files(store, ".log", luck.randint(1, 3)), 2))


def swap_whole_segments(luck: random.Random, store: Path) -> None:
    one, other = luck.sample(files(store, ".log", luck.randint(1, 3)), 2)
    swap(one, other)
    if one.with_suffix(".idx").exists() and other.with_suffix(".idx").exists():
        swap(one.with_suffix(".idx"), other.with_suffix(".idx"))


def free_name(luck: random.Random, one: Path) -> Path:
    names = (one.with_name(f"{int(one.stem) + luck.randint(1, 90):020d}.log") for _ in range(100))
    return next(name for name in names if not name.exists())


def a_segment_twice(luck: random.Random, store: Path) -> None:
    one = luck.choice(files(store, ".log"))
    shutil.copy(one, free_name(luck, one))


def another_name(luck: random.Random, store: Path) -> None:
    one = luck.choice(files(store, ".log"))
    one.rename(free_name(luck, one))


def a_folder_for_a_segment(luck: random.Random, store: Path) -> None:
    free_name(luck, luck.choice(files(store, ".log"))).mkdir()


def a_high_group(luck: random.Random, store: Path) -> None:
    number = luck.choice([300, 515])
    shutil.copytree(store / "buckets/02/2", store / f"buckets/{number & 255:02x}/{number}")


def no_label(luck: random.Random, store: Path) -> None:
    (store / "mqfs").unlink()


def cut(luck: random.Random, store: Path) -> None:
    one = luck.choice(files(store, ".log")[:-1])
    os.truncate(one, luck.randrange(one.stat().st_size))


def zeros(luck: random.Random, store: Path) -> None:
    one = luck.choice(files(store, luck.choice([".log", ".idx"])))
    data = bytearray(one.read_bytes())
    at = luck.randrange(len(data))
    data[at : at + 512] = bytes(len(data[at : at + 512]))
    one.write_bytes(data)


def noise(luck: random.Random, store: Path) -> None:
    luck.choice(files(store, luck.choice([".log", ".idx"]))).write_bytes(luck.randbytes(luck.choice([0, 1, 40, 3_000])))


MUTATIONS: list[Mutation] = [
    swap_indexes, another_index, no_index, swap_segments, swap_whole_segments, a_segment_twice, another_name,
    a_folder_for_a_segment, a_high_group, no_label, cut, zeros, noise,
]  # fmt: skip
HARMLESS = (swap_indexes, another_index, no_index)  # what is lost can be made again
UNSEEN = (another_name, cut, noise)  # the newest segment without its end, or whole: a power cut leaves that too
MENDED = (*HARMLESS, swap_segments, swap_whole_segments, a_segment_twice, a_folder_for_a_segment, a_high_group)


def _is_newest_only(good: Path, changed: Path) -> bool:
    """Whether all that differs is in the newest segment of a group."""
    logs = {path.relative_to(good) for path in files(good, ".log")}
    newest = {max(log for log in logs if log.parent == folder) for folder in {log.parent for log in logs}}
    return all(log in newest for log in logs if (good / log).read_bytes() != (changed / log).read_bytes())


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_files_changed_about(mutation: Mutation, tmp_path: Path) -> None:
    path, luck = tmp_path / "store", random.Random(tree_seed())
    fill(str(path))
    good = {number: found for number, (found, _) in contents(str(path)).items()}
    for number in range(size(390)):
        served, fixed = tmp_path / f"served{number}", tmp_path / f"fixed{number}"
        shutil.copytree(path, served)
        mutation(luck, served)
        shutil.copytree(served, fixed)
        newest_only = mutation is zeros and _is_newest_only(path, served)
        problems = _check_only_looks(served)
        silent = _serve(served, good)
        assert not silent or problems, "messages are missing without a word"
        assert not silent or mutation in UNSEEN or newest_only, "and a reader gets no error"
        if mutation in HARMLESS:
            assert contents(str(served)) == {group: (found, False) for group, found in good.items()}
        _fix(fixed, good, mutation)
        shutil.rmtree(served)
        shutil.rmtree(fixed)


def _check_only_looks(path: Path) -> int:
    before = snapshot(str(path))
    problems = run(str(path))[0]
    assert snapshot(str(path)) == before, "`check` without --fix wrote"
    return problems


def _serve(path: Path, good: dict[int, dict[int, bytes]]) -> bool:
    """Serve it: only what was written is seen. Whether something is missing and no reader got an error."""
    try:
        found = contents(str(path))
    except BadStore:
        return False
    for group, (messages, _) in found.items():
        assert messages.items() <= good[group].items(), "wrong data"
    return any(not told and messages != good[group] for group, (messages, told) in found.items())


def _fix(path: Path, good: dict[int, dict[int, bytes]], mutation: Mutation) -> None:
    lines = run(str(path), fix=True)[1]
    left, again = run(str(path))
    assert not left or any("cannot be repaired" in line for line in lines), (lines, again)
    for group, (messages, told) in contents(str(path)).items():
        assert messages.items() <= good[group].items(), "wrong data"
        assert not told
        if mutation in (*MENDED, no_label):
            assert messages == good[group], lines
