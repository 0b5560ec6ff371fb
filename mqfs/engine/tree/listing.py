"""Open directories, of all faces: what each held when it was read from its beginning.

So files that are removed meanwhile make a reader skip none and repeat none. Owns what that counts of the user's share
of the server's memory.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from mqfs import limits
from mqfs.engine.group import Group
from mqfs.engine.log.portions import Work
from mqfs.engine.nodes.places import Node
from mqfs.engine.tree.tree import Tree
from mqfs.model import User
from mqfs.wait import Step


class Listing:
    """One open directory."""

    __slots__ = ("_account", "_closed", "_held", "_tree", "node", "nodes", "user")

    def __init__(self, tree: Tree, user: User, node: Any, account: Hashable) -> None:
        """`node`: a group, or one of its folders. `account`: whose share it is of. Raises OverLimit."""
        self._tree, self._account, self.user, self.node = tree, account, user, node
        self.nodes: list[Node] = []
        self._closed = False
        self._held = tree.memory.change(account, 0, limits.LISTING_BYTES)

    def begin(self) -> Step[None]:
        """Read what it holds now. Raises Denied, OverLimit."""
        group: Group = self.node.group
        return group.portions.run(self._read(self._tree.entries(self.user, self.node)))

    def _read(self, entries: Work[list[Node]]) -> Work[None]:
        nodes = yield from entries
        if self._closed:
            return
        self._hold(limits.LISTING_BYTES + len(nodes) * limits.LISTED_BYTES)
        self.nodes = nodes

    @property
    def parent(self) -> Node:
        return self._tree.parent(self.node)

    def close(self) -> None:
        self._closed, self.nodes = True, []
        self._hold(0)

    def _hold(self, size: int) -> None:
        self._held = self._tree.memory.change(self._account, self._held, size)
