"""The tree that a mount shows, of this process or of a remote server (mqfs/remote), and the kernel's numbers.

A `Backend` has the calls on names and open files that are not hot. Each returns a Step, as a remote tree may have to
ask. Reads and writes are calls of the handles, and handles are the same for both.

The kernel's numbers are nodeids (files it knows) and file handles (files it has open). A nodeid lives until the kernel
forgets it, a file handle until it is released. Numbers are never reused.

The kernel excludes other writers of an inode while one write is parked. So each open for writing has a nodeid, and with
it a kernel inode, of its own: once opened for writing, a nodeid is not returned by further lookups. A process that
looked it up before gets ESTALE; the kernel then repeats the lookup, which returns a new nodeid. Readers share a nodeid:
otherwise a thousand readers that open a file at once would each invalidate the kernel's entry for the others. A
directory always keeps its nodeid, else getcwd would fail.

A file that is a snapshot at its open (`.kept/STREAM`, `.stats`, `ctl` for reading) has a nodeid for each open too, for
another reason: the kernel does not say by which open file it asks for a size, and keeps one size for an inode.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, Protocol, TypeAlias

from mqfs import errors, limits
from mqfs.engine.nodes import Node
from mqfs.engine.tree.attributes import Listing, disk_space, is_snapshot
from mqfs.engine.tree.tree import Tree
from mqfs.model import Stat, Step, User
from mqfs.net.sockets import let_client_run
from mqfs.quotas import UserLimits
from mqfs.state.file_locks import END, Held, Key, Locks
from mqfs.store.api import Handle

READABLE, WRITABLE = 1, 2


class Backend(Protocol):
    """The tree of a mount: `LocalTree`, or the `RemoteTree` of mqfs/remote.

    Nodes have `name`, `qid`, `directory` and `removed`; each file has one node object. Handles are those of
    mqfs/store/api.py, listings have the attributes of the engine's.
    """

    waits: UserLimits
    locks: Any  # with the calls of LocalLocks

    @property
    def root(self) -> Any: ...

    def receive(self) -> bool:
        """Process the answers of a remote server that have arrived. Return False if there were none."""
        ...

    def rest(self, device: int) -> bool:
        """Let another process run before the device is read again. Return False if the loop has to wait in trio."""
        ...

    def lookup(self, user: User, directory: Any, name: str) -> Step[tuple[Any, Stat]]: ...

    def stat(self, node: Any, handle: Any = None) -> Step[Stat]: ...

    def access(self, user: User, node: Any, mask: int) -> Step[None]: ...

    def statfs(self) -> Step[os.statvfs_result]: ...

    def is_snapshot(self, node: Any) -> bool:
        """Whether the file, open for reading, is a snapshot of one moment."""
        ...

    def listing(self, user: User, node: Any, account: Hashable) -> Step[Any]:
        """Open a directory and return its listing. Raises Denied."""
        ...

    def open(self, user: User, node: Any, flags: int) -> Step[Any]:
        """Open a file and return its handle."""
        ...

    async def create_open(
        self, user: User, group: Any, name: str, mode: int, flags: int, wait: Callable[[Step[Any]], Awaitable[Any]]
    ) -> tuple[Any, Any]:
        """Make a stream, or find it unless `flags` has O_EXCL, and open it. Return the node and the handle. `wait`:
        awaits a step."""
        ...

    def create(self, user: User, group: Any, name: str, mode: int) -> Step[Any]: ...

    def mkdir(self, user: User, group: Any, name: str, mode: int) -> Step[Any]: ...

    def unlink(self, user: User, group: Any, name: str) -> Step[None]: ...

    def rmdir(self, user: User, group: Any, name: str) -> Step[None]: ...

    def rename(self, user: User, group: Any, name: str, to: Any, new: str) -> Step[None]: ...

    def setattr(
        self, user: User, node: Any, *, mode: int | None = None, uid: int | None = None, gid: int | None = None
    ) -> Step[None]: ...

    def sync(self, node: Any, user: User, handle: Any = None) -> Step[None]:
        """Sync everything written to the node's group. Needs write permission, as the group's writers wait for that."""
        ...

    def poll(self, handle: Any, events: int, notify: Callable[[], None] | None) -> Step[int]:
        """Return which of READABLE and WRITABLE a handle is. `notify` is called once that may have changed."""
        ...


class LocalTree:
    """The engine's tree, in this process."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.waits, self.root = tree.waits, tree.root
        self.locks = LocalLocks(tree.locks)
        self.access, self.mkdir, self.create = tree.access, tree.mkdir, tree.create
        self.unlink, self.rmdir, self.rename, self.setattr = tree.unlink, tree.rmdir, tree.rename, tree.setattr

    def receive(self) -> bool:
        return False

    def rest(self, device: int) -> bool:
        return let_client_run()

    def lookup(self, user: User, directory: Any, name: str) -> tuple[Any, Stat]:
        node = self.tree.walk(user, directory, name)
        return node, self.tree.stat(node)

    def stat(self, node: Any, handle: Any = None) -> Stat:
        return self.tree.stat(node)

    def statfs(self) -> os.statvfs_result:
        return disk_space(self.tree.store.path)

    def is_snapshot(self, node: Any) -> bool:
        return is_snapshot(node)

    def listing(self, user: User, node: Any, account: Hashable) -> Listing:
        self.tree.access(user, node, os.R_OK)
        return Listing(self.tree, user, node, account)

    def open(self, user: User, node: Any, flags: int) -> Any:
        return self.tree.open(user, node, flags)

    async def create_open(
        self, user: User, group: Any, name: str, mode: int, flags: int, wait: Callable[[Step[Any]], Awaitable[Any]]
    ) -> tuple[Any, Any]:
        made = True
        try:
            node: Any = await wait(self.tree.create(user, group, name, mode))
        except errors.Exists:  # made by another process since the kernel's lookup
            node, made = self.tree.walk(user, group, name), False
            if flags & os.O_EXCL or node.directory:
                raise
        return node, self.tree.open(user, node, flags, made=made)

    def sync(self, node: Any, user: User, handle: Any = None) -> Step[None]:
        if handle is None or not handle.writes:
            self.tree.access(user, node, os.W_OK)
        return self.tree.sync(node)

    def poll(self, handle: Any, events: int, notify: Callable[[], None] | None) -> int:
        if notify is not None:
            handle.watch(notify)
        return (READABLE if handle.readable else 0) | (WRITABLE if handle.writable else 0)


class LocalLocks:
    """The engine's locks, with the calls that each `Backend.locks` has."""

    def __init__(self, locks: Locks) -> None:
        self._locks = locks

    def conflict(self, handle: Any, key: Key, wanted: Held) -> Step[Held | None]:
        """Return a lock that conflicts with the wanted one, or None."""
        return self._locks.conflict(key, wanted)

    def take(self, handle: Any, key: Key, wanted: Held, *, wait: bool) -> Step[object]:
        """Take a lock. The result is False if another lock conflicts. Raises OverLimit."""
        return self._locks.take(key, wanted, wait=wait)

    def release(self, handle: Any, key: Key, owner: Hashable, start: int = 0, end: int = END) -> Step[None]:
        """Release an owner's locks in a range."""
        self._locks.release(key, owner, start, end)
        return None


# ------------------------------------------------------------ the kernel's numbers


ROOT = 1  # the kernel's name for the root directory
Directory: TypeAlias = Any  # a node with `directory`: a group, or one of its folders


class Inode:
    """A file the kernel knows."""

    __slots__ = ("lookups", "node", "size", "size_known", "taken")

    def __init__(self, node: Node) -> None:
        self.node, self.lookups = node, 0
        self.taken = False  # reserved: opened for writing, or as a snapshot
        self.size: int | None = None  # of the open snapshot
        self.size_known = False  # whether the kernel was given that size


class File:
    """A file the kernel has open."""

    __slots__ = ("handle", "ino", "node", "process", "reads", "thread", "writes")

    def __init__(self, node: Node, handle: Any, ino: int, reads: bool, writes: bool) -> None:
        self.node, self.handle, self.ino, self.reads, self.writes = node, handle, ino, reads, writes
        self.thread = self.process = 0  # the last reader's, for handles that claim


class Nodes:
    """The nodeids that the kernel holds."""

    def __init__(self, tree: Tree | Backend) -> None:
        self._inodes = {ROOT: Inode(tree.root)}
        self._current: dict[Node, int] = {tree.root: ROOT}  # the nodeid that a lookup returns
        self._retrying: dict[int, None] = {}  # threads that repeat a lookup, oldest first
        self.given = ROOT  # the last nodeid assigned

    def __len__(self) -> int:
        return len(self._inodes)

    def _find(self, nodeid: int) -> Inode:
        """Return the inode of a nodeid. Raises Stale."""
        inode = self._inodes.get(nodeid)
        if inode is None:
            raise errors.Stale(f"unknown node {nodeid}")
        return inode

    def node(self, nodeid: int) -> Node:
        """Return the node of a nodeid. Raises Stale."""
        return self._find(nodeid).node

    def directory(self, nodeid: int) -> Directory:
        """Return the group or folder of a nodeid. Raises NotDirectory, Stale."""
        node = self.node(nodeid)
        if not node.directory:
            raise errors.NotDirectory(f"{node.name!r}: not a group")
        return node

    def size(self, nodeid: int) -> int | None:
        """Return the size of the open snapshot, and record that the kernel knows it. None: no snapshot is open."""
        inode = self._inodes.get(nodeid)
        if inode is None or inode.size is None:
            return None
        inode.size_known = True
        return inode.size

    def may_be_mapped(self, nodeid: int) -> bool:
        """Whether the kernel may fill pages of the file: it is a snapshot whose size the kernel knows."""
        inode = self._inodes.get(nodeid)
        return inode is not None and inode.size_known

    def fix_size(self, nodeid: int, size: int) -> None:
        """Record that the file is open as a snapshot of that many bytes."""
        inode = self._inodes.get(nodeid)
        if inode is not None:
            inode.size, inode.size_known = size, False

    def enter(self, node: Node, thread: int = 0, *, alone: bool = False) -> int:
        """Return the nodeid for one reply that carries an entry, and count the lookup. `alone`: a new nodeid."""
        alone = (alone or thread in self._retrying) and not node.directory
        nodeid = 0 if alone else self._current.get(node, 0)
        if not nodeid:
            self.given = nodeid = self.given + 1
            self._inodes[nodeid] = Inode(node)
            if not alone:
                self._current[node] = nodeid
        self._inodes[nodeid].lookups += 1
        return nodeid

    def take(self, nodeid: int, thread: int) -> None:
        """Reserve a nodeid for one open. Raises Stale if it is reserved, but never twice in a row for a thread."""
        inode = self._find(nodeid)
        if inode.taken and thread not in self._retrying:  # twice: opened by /proc/self/fd/N, without a lookup
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
    """The file handles that the kernel holds."""

    def __init__(self) -> None:
        self.open: dict[int, File] = {}
        self.listings: dict[int, Listing] = {}
        self._fresh = itertools.count(1)

    def find(self, fh: int) -> File:
        """Return the open file of a file handle. Raises Stale."""
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
        """Close all files and listings: the kernel will release none of them."""
        for fh in list(self.listings):
            self.close_listing(fh)
        for fh in list(self.open):
            self.close(fh)
