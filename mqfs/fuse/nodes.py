"""What the numbers of the kernel mean: nodeids (files it knows) and file handles (files it has open).

Owns both tables and nothing else. A nodeid lives until the kernel forgets it, a file handle until it is released.
Every lookup of a file gives it a fresh nodeid, so that separate opens have kernel inodes of their own and a write that
waits holds up nobody else; a directory keeps its nodeid, else getcwd would fail. Numbers are never given twice.
"""

from __future__ import annotations

import itertools
from typing import Any

from mqfs import errors
from mqfs.engine.tree import Group, Node, Tree
from mqfs.types import Handle, User

ROOT = 1  # the kernel's name for the root directory


class Inode:
    """A file the kernel knows."""

    __slots__ = ("ino", "lookups", "node")

    def __init__(self, node: Node, ino: int) -> None:
        self.node, self.ino, self.lookups = node, ino, 0


class File:
    """A file the kernel has open."""

    __slots__ = ("handle", "ino", "node", "reads", "writes")

    def __init__(self, node: Node, handle: Any, ino: int, reads: bool, writes: bool) -> None:
        self.node, self.handle, self.ino, self.reads, self.writes = node, handle, ino, reads, writes


class Listing:
    """An open directory: what it held when it was read from its beginning, so that positions stay what they are."""

    __slots__ = ("group", "names", "user")

    def __init__(self, group: Group, user: User) -> None:
        self.group, self.user = group, user
        self.names: list[Node] = []


class Nodes:
    """The nodeids the kernel holds."""

    def __init__(self, tree: Tree) -> None:
        self._inodes = {ROOT: Inode(tree.root, tree.root.qid.path)}
        self._groups = {tree.root: ROOT}
        self._fresh = itertools.count(ROOT + 1)

    def __len__(self) -> int:
        return len(self._inodes)

    def node(self, nodeid: int) -> Node:
        """Raises Stale."""
        inode = self._inodes.get(nodeid)
        if inode is None:
            raise errors.Stale(f"node {nodeid}")
        return inode.node

    def group(self, nodeid: int) -> Group:
        """Raises NotDirectory, Stale."""
        node = self.node(nodeid)
        if not isinstance(node, Group):
            raise errors.NotDirectory(node.name)
        return node

    def ino(self, nodeid: int) -> int:
        """The stable number of a file."""
        inode = self._inodes.get(nodeid)
        return inode.ino if inode else nodeid

    def enter(self, node: Node) -> int:
        """The nodeid for one reply that carries an entry."""
        nodeid = self._groups.get(node) if isinstance(node, Group) else None
        if nodeid is None:
            nodeid = next(self._fresh)
            self._inodes[nodeid] = Inode(node, node.qid.path)
            if isinstance(node, Group):
                self._groups[node] = nodeid
        self._inodes[nodeid].lookups += 1
        return nodeid

    def forget(self, nodeid: int, lookups: int) -> None:
        inode = self._inodes.get(nodeid)
        if inode is None or nodeid == ROOT:
            return
        inode.lookups -= lookups
        if inode.lookups <= 0:
            del self._inodes[nodeid]
            if isinstance(inode.node, Group):
                self._groups.pop(inode.node, None)


class Files:
    """The file handles the kernel holds."""

    def __init__(self) -> None:
        self.open: dict[int, File] = {}
        self.listings: dict[int, Listing] = {}
        self._fresh = itertools.count(1)

    def add(self, node: Node, handle: Handle, reads: bool, writes: bool) -> int:
        fh = next(self._fresh)
        self.open[fh] = File(node, handle, node.qid.path, reads, writes)
        return fh

    def add_listing(self, listing: Listing) -> int:
        fh = next(self._fresh)
        self.listings[fh] = listing
        return fh

    def close(self, fh: int) -> None:
        file = self.open.pop(fh, None)
        if file is not None:
            file.handle.watch(None)
            file.handle.close()
