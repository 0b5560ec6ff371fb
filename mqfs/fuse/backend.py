"""What a mount shows: the tree of this process, or that of a server elsewhere (mqfs/remote).

The calls on names and open files that are not hot, each with a Step, as the second may have to ask. Reads and writes
are the handles', and handles are the same for both.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, Protocol

from mqfs import errors
from mqfs.clock import ProcessWatcher
from mqfs.engine.tree.attributes import Listing, disk_space, is_snapshot
from mqfs.engine.tree.tree import Tree
from mqfs.model import Stat, Step, User
from mqfs.net.yielding import let_client_run
from mqfs.quotas import UserLimits
from mqfs.state.file_locks import END, Held, Key, Locks

READABLE, WRITABLE = 1, 2


class Backend(Protocol):
    """Nodes have `name`, `qid`, `directory` and `removed`; there is one object of each file. Handles are those of
    mqfs/store/api.py, listings have the attributes of the engine's. Two: `LocalTree`, and mqfs/remote's `RemoteTree`.
    """

    waits: UserLimits
    locks: Any  # with the calls of LocalLocks
    processes: ProcessWatcher | None

    @property
    def root(self) -> Any: ...

    def receive(self) -> bool:
        """Take what a server elsewhere has answered by now; False: nothing."""
        ...

    def rest(self, device: int) -> bool:
        """Let another process run before the device is asked again; False: tasks of this one may wait for that."""
        ...

    def lookup(self, user: User, directory: Any, name: str) -> Step[tuple[Any, Stat]]: ...

    def stat(self, node: Any, handle: Any = None) -> Step[Stat]: ...

    def access(self, user: User, node: Any, mask: int) -> Step[None]: ...

    def statfs(self) -> Step[os.statvfs_result]: ...

    def is_snapshot(self, node: Any) -> bool:
        """Whether it is, open for reading, of one moment."""
        ...

    def listing(self, user: User, node: Any, account: Hashable) -> Step[Any]:
        """An open directory. Raises Denied."""
        ...

    def open(self, user: User, node: Any, flags: int) -> Step[Any]:
        """A handle, once its file is open."""
        ...

    async def create_open(
        self, user: User, group: Any, name: str, mode: int, flags: int, wait: Callable[[Step[Any]], Awaitable[Any]]
    ) -> tuple[Any, Any]:
        """A stream that is made, or unless `flags` has O_EXCL found, and its handle. `wait`: how it waits for a
        step."""
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
        """Everything written to the node's group is on disk. Needs write permission: its writers wait for that."""
        ...

    def poll(self, handle: Any, events: int, notify: Callable[[], None] | None) -> Step[int]:
        """Which of READABLE and WRITABLE a handle is. `notify` is called once that may have changed."""
        ...


class LocalTree:
    """The engine's tree, in this process."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.waits, self.root = tree.waits, tree.root
        self.locks = LocalLocks(tree.locks)
        self.access, self.mkdir, self.create = tree.access, tree.mkdir, tree.create
        self.unlink, self.rmdir, self.rename, self.setattr = tree.unlink, tree.rmdir, tree.rename, tree.setattr

    @property
    def processes(self) -> ProcessWatcher | None:
        return self.tree.processes

    @processes.setter
    def processes(self, watcher: ProcessWatcher | None) -> None:
        self.tree.processes = watcher

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
        except errors.Exists:  # made by another since the kernel's lookup
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
    """The engine's locks, with the calls that every mount's `locks` has."""

    def __init__(self, locks: Locks) -> None:
        self._locks = locks

    def conflict(self, handle: Any, key: Key, wanted: Held) -> Step[Held | None]:
        """A lock that stands in the way of another."""
        return self._locks.conflict(key, wanted)

    def take(self, handle: Any, key: Key, wanted: Held, *, wait: bool) -> Step[object]:
        """Take a lock; False: another stands in its way. Raises OverLimit."""
        return self._locks.take(key, wanted, wait=wait)

    def release(self, handle: Any, key: Key, owner: Hashable, start: int = 0, end: int = END) -> Step[None]:
        """Release what an owner holds of a range."""
        self._locks.release(key, owner, start, end)
        return None
