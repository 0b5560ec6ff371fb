"""What a kill of the server leaves is read as it was promised."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from mqfs.engine.tree.tree import Tree
from mqfs.model import Wait
from mqfs.store.store import DiskStore
from tests.support.clock import ManualClock
from tests.support.hand import ROOT
from tests.support.queues import Queues


@pytest.mark.parametrize("depth", ["depth 2", "depth 6B"])
def test_what_depth_cut_stays_cut(tmp_path: Path, depth: str) -> None:
    store = DiskStore(str(tmp_path / "store"))
    tree = Tree(store, ManualClock(), owner=ROOT, defaults=["replay all", depth])
    writer = tree.open(ROOT, tree.create(ROOT, tree.root, "s", 0o644), os.O_WRONLY)  # type: ignore[arg-type]
    for body in (b"one", b"two", b"six", b"ten"):
        writer.write(body)
    shutil.copytree(tmp_path / "store", tmp_path / "killed")
    tree.close()
    store.close()
    store = DiskStore(str(tmp_path / "killed"))
    tree = Tree(store, ManualClock(), owner=ROOT)
    reader: Any = tree.open(ROOT, tree.root.streams["s"], os.O_RDONLY)
    assert [reader.read(64, 0), reader.read(64, 3)] == [b"six", b"ten"]
    tree.close()
    store.close()


def test_a_removed_group_stays_removed_whether_its_copy_knew_it_or_not(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    store = DiskStore(path, replica=lambda: None)
    tree = Tree(store, ManualClock(), owner=ROOT)
    tree.mkdir(ROOT, tree.root, "old", 0o755)
    tree.rename(ROOT, tree.root, "old", tree.root, "new")
    tree.rmdir(ROOT, tree.root, "new")
    tree.mkdir(ROOT, tree.root, "new", 0o755)
    number = tree.root.groups["new"].number
    assert len(list((tmp_path / "store/buckets").glob("*/*"))) == 3, "the copy does not know it yet"
    shutil.copytree(path, tmp_path / "killed")
    tree.close()
    store.close()
    for left in (path, str(tmp_path / "killed")):
        store = DiskStore(left)
        tree = Tree(store, ManualClock(), owner=ROOT)
        assert {name: group.number for name, group in tree.root.groups.items()} == {"new": number}
        assert len(list(Path(left, "buckets").glob("*/*"))) == 2
        tree.close()
        store.close()


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("order", ""),
        ("view", ""),
        (".cursor", "seek first\n"),
        (".cursor", "seek -3\n"),
        (".cursor", "format record\nseek first\n"),
        (".kept/s", ""),
        ("s", ""),
    ],
)
def test_what_a_depth_cut_before_a_kill_is_not_seen_again(tmp_path: Path, name: str, lines: str) -> None:
    """Who came first after the start, and read several streams at once, saw it."""
    queues = Queues("replay all", "depth 2", "bind view prefix:s", "bind view prefix:t", path=tmp_path / "store")
    queues.stream("t")
    for body in (b"1", b"2", b"3", b"4"):
        queues.put(body)
        queues.put(body, "t")

    def shown() -> object:
        with contextlib.closing(queues.at(name, os.O_RDWR if lines else os.O_RDONLY)) as handle:
            if lines:
                handle.write(lines.encode())
            pieces: list[bytes] = []
            while not isinstance(step := handle.read(1_000, sum(map(len, pieces))), Wait) and step:
                pieces.append(step)
            if isinstance(step, Wait):
                step.cancel()
            return b"".join(pieces).count(b"sender") if "record" in lines else pieces

    before = shown()
    queues.restart(clean=False)
    assert shown() == before
    queues.put(b"5")
    assert queues.row()["messages"] == 2


def test_a_cursor_misses_nothing_because_a_kill_left_sequences_unused(tmp_path: Path) -> None:
    """They counted as messages, of which a cursor holds 1,024 back."""
    queues = Queues("replay last", path=tmp_path / "store")
    queues.put(b"1")
    queues.restart(clean=False)
    with contextlib.closing(queues.at(".cursor", os.O_RDWR)) as cursor:
        cursor.write(b"seek first\n")
        for body in (b"2", b"3"):
            queues.put(body)
        assert queues.row()["messages"] == 3  # the floors are raised
        assert [cursor.read(100) for _ in range(3)] == [b"1", b"2", b"3"]
