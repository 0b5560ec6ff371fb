"""The state file of bridges: shared, cut by a kill, lost, and kept small."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mqfs.bridge import importer
from mqfs.bridge.importer import Import, Seen


def test_bridges_know_what_each_other_imported(tmp_path: Path) -> None:
    path = str(tmp_path / "state" / "seen")
    one, other = Seen(path), Seen(path)
    one.add([Import("a", 1), Import("b", 2)])
    other.add([Import("c", 3)])
    one.refresh()
    later = Seen(path)
    for each in (one, other, later):
        assert all(id in each for id in "abc")
        assert "d" not in each
        each.close()


def test_a_line_that_was_cut_by_a_kill_costs_no_other(tmp_path: Path) -> None:
    path = tmp_path / "seen"
    first = Seen(str(path))
    first.add([Import("a", 1), Import("b", 2)])
    first.close()
    path.write_bytes(path.read_bytes()[:-3])
    second = Seen(str(path))
    assert "a" in second
    assert "b" not in second
    second.add([Import("c", 3)])
    third = Seen(str(path))
    assert "a" in third
    assert "c" in third
    assert len(third) <= 3
    second.close()
    third.close()


@contextmanager
def a_full_disk_at(size: int) -> Iterator[None]:
    """No file of this process grows beyond that: as with a full disk, a write takes what fits, and the next one
    fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", range(990, 1_010))
def test_what_was_noted_is_in_the_file_also_where_the_disk_becomes_full(tmp_path: Path, size: int) -> None:
    path, noted = tmp_path / "seen", list[Import]()
    one = Seen(str(path))

    def fill() -> None:
        for begin in range(0, 1_000, 10):
            some = [Import(f"id-{number}", 10**12 + number) for number in range(begin, begin + 10)]
            one.add(some)
            noted.extend(some)

    with a_full_disk_at(size), pytest.raises(OSError, match="large"):
        fill()
    one.close()
    again = Seen(str(path))
    again.add([Import("later", 7)])
    again.close()
    third = Seen(str(path))
    assert noted
    assert all(each.id in third for each in [*noted, Import("later", 7)])
    third.close()


def test_a_file_that_is_lost_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "seen"
    first = Seen(str(path))
    first.add([Import("a", 1)])
    path.unlink()
    first.add([Import("b", 2)])
    assert "b" in first
    other = Seen(str(path))
    assert "b" in other
    first.close()
    other.close()


def test_what_is_forgotten_leaves_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importer, "REWRITE_LINES", 10)
    path = tmp_path / "seen"
    one, other = Seen(str(path)), Seen(str(path))
    one.add([Import(str(number), number) for number in range(20)])
    one.forget(lambda each: each.expires_ms < 15)
    assert len(one) == 5
    assert len(path.read_text().splitlines()) == 5
    other.add([Import("new", 99)])
    one.refresh()
    for each in (one, other):
        assert "new" in each
        assert "17" in each
        assert "3" not in each
        each.close()


def test_a_power_cut_leaves_no_empty_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new file is on disk before it gets the name."""
    monkeypatch.setattr(importer, "REWRITE_LINES", 10)
    synced = list[tuple[int, int]]()  # inodes, and their sizes then

    def fsync(file: int) -> None:
        status = os.fstat(file)
        synced.append((status.st_ino, status.st_size))

    monkeypatch.setattr(os, "fsync", fsync)
    one = Seen(str(tmp_path / "seen"))
    one.add([Import(str(number), number) for number in range(20)])
    one.forget(lambda each: each.expires_ms < 15)
    one.close()
    status = os.stat(tmp_path / "seen")
    assert (status.st_ino, status.st_size) in synced
