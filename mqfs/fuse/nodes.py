"""The tables of the kernel's numbers: nodeids (files it knows) and file handles (files it has open).

A nodeid lives until the kernel forgets it, a file handle until it is released. Numbers are never used twice.

The kernel excludes other writers of an inode while one write is parked. So each open for writing has a nodeid, and with
it a kernel inode, of its own: once opened for writing, a nodeid is not given to further lookups. A process that looked
it up before gets ESTALE; the kernel then repeats the lookup, which gets a nodeid of its own. Readers share: with a new
nodeid for every lookup, a thousand that open a file at once would each invalidate the kernel's entry for the others. A
directory always keeps its nodeid, else getcwd would fail.

A file that is a snapshot at its open (`.kept/STREAM`, `.stats`, `ctl` for reading) has a nodeid for each open too, for
another reason: the kernel does not say by which open file it asks for a size, and keeps one size for an inode.
"""

from __future__ import annotations

import itertools
from typing import Any, TypeAlias

from mqfs import errors, limits
from mqfs.engine.nodes import Node
from mqfs.engine.tree.attributes import Listing
from mqfs.engine.tree.tree import Tree
from mqfs.fuse.backend import Backend
from mqfs.store.api import Handle

ROOT = 1  # the kernel's name for the root directory
Directory: TypeAlias = Any  # a node with `directory`: a group, or one of its folders


class Inode:
    """A file the kernel knows."""

    __slots__ = ("ino", "lookups", "node", "size", "size_known", "taken")

    def __init__(self, node: Node, ino: int) -> None:
        self.node, self.ino, self.lookups = node, ino, 0
        self.taken = False  # opened for writing, or as a snapshot
        self.size: int | None = None  # of the snapshot
        self.size_known = False  # to the kernel, since the snapshot was opened


class File:
    """A file the kernel has open."""

    __slots__ = ("handle", "ino", "node", "process", "reads", "thread", "writes")

    def __init__(self, node: Node, handle: Any, ino: int, reads: bool, writes: bool) -> None:
        self.node, self.handle, self.ino, self.reads, self.writes = node, handle, ino, reads, writes
        self.thread = self.process = 0  # the last reader's, for handles that claim


class Nodes:
    """The nodeids the kernel holds."""

    def __init__(self, tree: Tree | Backend) -> None:
        self._inodes = {ROOT: Inode(tree.root, tree.root.qid.path)}
        self._current: dict[Node, int] = {tree.root: ROOT}  # what a lookup gets
        self._retrying: dict[int, None] = {}  # threads that repeat a lookup, the oldest first
        self.given = ROOT  # the last nodeid

    def __len__(self) -> int:
        return len(self._inodes)

    def node(self, nodeid: int) -> Node:
        """Raises Stale."""
        inode = self._inodes.get(nodeid)
        if inode is None:
            raise errors.Stale(f"unknown node {nodeid}")
        return inode.node

    def directory(self, nodeid: int) -> Directory:
        """Raises NotDirectory, Stale."""
        node = self.node(nodeid)
        if not node.directory:
            raise errors.NotDirectory(f"{node.name!r}: not a group")
        return node

    def size(self, nodeid: int) -> int | None:
        """The size of its open snapshot, for a reply to the kernel; None: the file's current one."""
        inode = self._inodes.get(nodeid)
        if inode is None or inode.size is None:
            return None
        inode.size_known = True
        return inode.size

    def may_be_mapped(self, nodeid: int) -> bool:
        """Whether the kernel may fill pages of it: it is a snapshot whose size the kernel knows."""
        inode = self._inodes.get(nodeid)
        return inode is not None and inode.size_known

    def fix_size(self, nodeid: int, size: int) -> None:
        """Note that it is open as a snapshot of that many bytes."""
        inode = self._inodes.get(nodeid)
        if inode is not None:
            inode.size, inode.size_known = size, False

    def ino(self, nodeid: int) -> int:
        """The stable number of a file."""
        inode = self._inodes.get(nodeid)
        return inode.ino if inode else nodeid

    def enter(self, node: Node, thread: int = 0, *, alone: bool = False) -> int:
        """The nodeid for one reply that carries an entry; `alone`: one of its own."""
        alone = (alone or thread in self._retrying) and not node.directory
        nodeid = 0 if alone else self._current.get(node, 0)
        if not nodeid:
            self.given = nodeid = self.given + 1
            self._inodes[nodeid] = Inode(node, node.qid.path)
            if not alone:
                self._current[node] = nodeid
        self._inodes[nodeid].lookups += 1
        return nodeid

    def take(self, nodeid: int, thread: int) -> None:
        """Take a nodeid for one open alone. Raises Stale, once in a row for a thread, where it was taken before."""
        inode = self._inodes.get(nodeid)
        if inode is None:
            raise errors.Stale(f"unknown node {nodeid}")
        if inode.taken and thread not in self._retrying:  # twice: it was not looked up, but is /proc/self/fd/N
            self._retrying[thread] = None
            if len(self._retrying) > limits.INTERRUPTS:
                del self._retrying[next(iter(self._retrying))]
            raise errors.Stale(f"node {nodeid}: taken by another open")
        self._retrying.pop(thread, None)
        inode.taken = True
        if self._current.get(inode.node) == nodeid:
            del self._current[inode.node]

    def forget(self, nodeid: int, lookups: int) -> None:
        inode = self._inodes.get(nodeid)
        if inode is None or nodeid == ROOT:
            return
        inode.lookups -= lookups
        if inode.lookups <= 0:
            del self._inodes[nodeid]
            if self._current.get(inode.node) == nodeid:
                del self._current[inode.node]


class Files:
    """The file handles the kernel holds."""

    def __init__(self) -> None:
        self.open: dict[int, File] = {}
        self.listings: dict[int, Listing] = {}
        self._fresh = itertools.count(1)

    def find(self, fh: int) -> File:
        """Raises Stale."""
        file = self.open.get(fh)
        if file is None:
            raise errors.Stale(f"unknown file handle {fh}")
        return file

    def add(self, node: Node, handle: Handle, reads: bool, writes: bool) -> int:
        fh = next(self._fresh)
        self.open[fh] = File(node, handle, node.qid.path, reads, writes)
        return fh

    def add_listing(self, listing: Listing) -> int:
        fh = next(self._fresh)
        self.listings[fh] = listing
        return fh

    def close_listing(self, fh: int) -> None:
        listing = self.listings.pop(fh, None)
        if listing is not None:
            listing.close()

    def close(self, fh: int) -> None:
        file = self.open.pop(fh, None)
        if file is not None:
            file.handle.watch(None)
            file.handle.close()

    def close_all(self) -> None:
        """Close all: the kernel releases nothing any more."""
        for fh in list(self.listings):
            self.close_listing(fh)
        for fh in list(self.open):
            self.close(fh)
