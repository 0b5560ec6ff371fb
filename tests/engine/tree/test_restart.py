"""What a kill of the server leaves is read as it was promised."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from mqfs.engine.tree.tree import Tree
from mqfs.store.store import DiskStore
from tests.support.clock import ManualClock
from tests.support.hand import ROOT


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
