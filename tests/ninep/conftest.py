"""A tree in memory, and a server of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mqfs.engine.tree.tree import Tree
from tests.support.ninep import Running, make_tree, open_handles, running


@pytest.fixture
def tree() -> Tree:
    return make_tree()


@pytest.fixture
def server(tree: Tree, tmp_path: Path) -> Iterator[Running]:
    """It has no file open at the end."""
    with running(tree, tmp_path) as started:
        yield started
    assert open_handles(tree) == 0
