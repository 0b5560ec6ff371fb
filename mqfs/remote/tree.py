"""The calls on names of a server's tree: looking up, making, removing, listing, opening, locking.

A file is identified by its path, and checked by its number: where another file has its name now, it is Stale. So the
server keeps nothing for a name, and no name has to be found again after a restart. The server decides what each user
may do: a user's files are walked from the fid that attached as that user.

A lock is first taken among the processes of this mount, then at the server, where others see it. 9P has one kind of
lock, and no wait for one. So flock(2) is a lock of one byte that no file reaches, and a request that waits for a lock
is repeated again and again. After a restart the held locks are taken again.

    process -- take --> MountLocks -- granted there --> Tlock, again while BLOCKED --> granted
                            ^                             |  refused, interrupted
                            +-------- restore ------------+
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Awaitable, Callable, Hashable, Iterator
from functools import partial
from operator import attrgetter
from typing import Any
from weakref import WeakValueDictionary

import attrs

from mqfs import limits
from mqfs.clock import ProcessWatcher
from mqfs.engine.files.status import TEXTS
from mqfs.engine.language.permissions import require
from mqfs.engine.nodes import FOLDERS, META_FILES
from mqfs.errors import Exists, MqfsError, NotDirectory, NotFound, NotPermitted, Stale
from mqfs.model import QTDIR, Qid, Stat, Step, User, Wait
from mqfs.ninep.client.machine import check, stat_of_attributes
from mqfs.ninep.codec import messages as m
from mqfs.ninep.codec.messages import (
    AT_REMOVEDIR,
    GETATTR_BASIC,
    READ_LOCK,
    SET_GID,
    SET_MODE,
    SET_UID,
    UNLOCK,
    WRITE_LOCK,
    Fcall,
)
from mqfs.ninep.codec.wire import READ_OVERHEAD
from mqfs.quotas import UserLimits
from mqfs.remote.ahead import open_state
from mqfs.remote.channels import PutChannels
from mqfs.remote.files import OpenFile
from mqfs.remote.link import Link
from mqfs.remote.session import Procedure, Session, arrive, drop, near, walk
from mqfs.serving.await_step import await_step
from mqfs.state.file_locks import END, Held, Key, Locks

log = logging.getLogger("mqfs.mount")
FLOCK_BYTE = 1 << 62  # beyond any file: POSIX locks end below it
ASK_S, ASK_MOST_S = 0.01, 0.2  # between two requests for a lock held by another client, doubling


class MountLocks(Locks):
    """The locks of this mount's processes, each with the open file through which it was taken."""

    def owned(self, key: Key, owner: Any) -> list[Held]:
        """Return the locks that an owner holds on a file."""
        ranges = self._held.get(key)
        return [] if ranges is None else list(ranges._owned.get(owner, ()))

    def taken_through(self, file: OpenFile) -> Iterator[tuple[Key, Held]]:
        for key in keys_of(file):
            if (ranges := self._held.get(key)) is not None:
                for lock in ranges.through(file):
                    yield key, lock

    def restore(self, key: Key, taken: Held, before: list[Held]) -> None:
        """Undo a take: give the owner the locks that it had in that range before."""
        self._cut(key, taken.owner, taken.start, taken.end)
        for lock in before:
            self._put(key, lock)
        self._serve(key, taken.start, taken.end)


class LockRequest(Wait[bool]):
    """A lock that is being taken: here, then at the server. Its result is whether it was granted."""

    __slots__ = ("_before", "_file", "_key", "_locks", "_step", "_wait", "_wanted")

    def __init__(
        self, locks: RemoteLocks, file: OpenFile, key: Key, wanted: Held, before: list[Held], wait: bool
    ) -> None:
        """`before`: the locks that its owner holds in that range. Raises OverLimit."""
        super().__init__(lambda _: self._step.cancel())
        self._locks, self._file, self._key, self._wanted, self._wait = locks, file, key, wanted, wait
        self._before = before
        step = locks.local.take(key, wanted, wait=wait)
        if isinstance(step, Wait):
            self._step: Wait[Any] = step
            step.subscribe(self._ask)
        elif step is False:
            self.resolve(False)
        else:
            self._ask(None)

    def _ask(self, _: object) -> None:
        locks = self._locks
        self._step = call = locks.session.call(partial(_take, self._file, self._key, self._wanted, self._wait))
        call.subscribe(self._answered)

    def _answered(self, call: Wait[bool]) -> None:
        locks, key, wanted, error = self._locks, self._key, self._wanted, None
        try:
            granted = call.result()
        except MqfsError as failure:
            granted, error = False, failure
        if not granted:
            locks.local.restore(key, wanted, self._before)
        if error is None:
            self.resolve(granted)
            return
        if not self._before:  # it may have been granted, or taken again after a restart
            locks.session.call(partial(_release, self._file, key, wanted))
        self.fail(error)


class RemoteLocks:
    """The locks that processes of this mount hold or wait for."""

    def __init__(self, session: Session) -> None:
        self.session, self.local = session, MountLocks()

    def __len__(self) -> int:
        return len(self.local)

    def conflict(self, file: OpenFile, key: Key, wanted: Held) -> Step[Held | None]:
        """Return a conflicting lock, or None."""
        mine = self.local.conflict(key, wanted)
        if mine is not None:
            return mine
        return self.session.call(partial(_conflict, file, key, wanted))

    def take(self, file: OpenFile, key: Key, wanted: Held, *, wait: bool) -> Step[bool]:
        """Take a lock. The result is False if another lock conflicts and `wait` is not set. Raises OverLimit."""
        own = self.local.owned(key, wanted.owner)
        if key.flock and own and own[0].exclusive != wanted.exclusive:  # released first, as by flock(2)
            self.release(file, key, wanted.owner)
            own = []
        before = [
            lock._replace(start=max(lock.start, wanted.start), end=min(lock.end, wanted.end))
            for lock in own
            if lock.start < wanted.end and wanted.start < lock.end
        ]
        # The server knows an owner by its client id and pid: all locks of one owner keep the first pid.
        wanted = wanted._replace(through=file, pid=own[0].pid if own else wanted.pid)
        return LockRequest(self, file, key, wanted, before, wait)

    def release(self, file: OpenFile, key: Key, owner: Any, start: int = 0, end: int = END) -> Step[None]:
        """Release an owner's locks in a range. Raises OverLimit."""
        own = self.local.owned(key, owner)
        self.local.release(key, owner, start, end)
        if not any(lock.start < end and start < lock.end for lock in own):
            return None
        return self.session.call(partial(_release, file, key, Held(owner, False, start, end, own[0].pid)))

    def retake(self, file: OpenFile, fid: int) -> Procedure[None]:
        """Take the locks of an open file again, at a server that has restarted."""
        locks = list(self.local.taken_through(file))
        if not locks:
            return
        replies: Any = yield [_request(fid, key, lock) for key, lock in locks]
        for reply in replies:
            if getattr(reply, "status", 1):
                log.warning("%s: lock lost: another took it while the server was gone", file.node.name)

    def forget(self, file: OpenFile) -> None:
        """Remove the locks of a closed file: the server released them with its fid."""
        for key in keys_of(file):
            self.local.release_through(key, file)


def keys_of(file: OpenFile) -> tuple[Key, Key]:
    ino = file.node.qid.path
    return Key(ino, False), Key(ino, True)


def _conflict(file: OpenFile, key: Key, wanted: Held, link: Link, repeated: bool) -> Procedure[Held | None]:
    kind = WRITE_LOCK if wanted.exclusive else READ_LOCK
    start, length = _range(key, wanted)
    (reply,) = yield [m.Tgetlock(0, file.require_fid(), kind, start, length, wanted.pid, _client(wanted))]
    it: Any = check(reply)
    if it.type == UNLOCK:
        return None
    end = it.start + it.length if it.length else FLOCK_BYTE
    return Held(None, it.type == WRITE_LOCK, it.start, end, it.proc_id)


def _take(file: OpenFile, key: Key, wanted: Held, wait: bool, link: Link, repeated: bool) -> Procedure[bool]:
    pause_s = ASK_S
    while True:
        (reply,) = yield [_request(file.require_fid(), key, wanted)]
        if not check(reply).status:  # type: ignore[attr-defined]
            return True
        if not wait:
            return False
        yield pause_s
        pause_s = min(pause_s * 2, ASK_MOST_S)


def _release(file: OpenFile, key: Key, lock: Held, link: Link, repeated: bool) -> Procedure[None]:
    if file.link is link:
        yield [_request(file.fid, key, lock, UNLOCK)]


def _client(lock: Held) -> str:
    return f"{lock.owner:x}"


def _range(key: Key, lock: Held) -> tuple[int, int]:
    """Return start and length as 9P encodes them."""
    if key.flock:
        return FLOCK_BYTE, 1
    return lock.start, min(lock.end, FLOCK_BYTE) - lock.start


def _request(fid: int, key: Key, lock: Held, kind: int | None = None) -> Fcall:
    if kind is None:
        kind = WRITE_LOCK if lock.exclusive else READ_LOCK
    start, length = _range(key, lock)
    return m.Tlock(0, fid, kind, 0, start, length, lock.pid if lock.pid < 1 << 32 else 0, _client(lock))


# ------------------------------------------------------------ names


class RemoteNode:
    """A file or directory that the kernel knows."""

    __slots__ = ("__weakref__", "directory", "found", "name", "parent", "qid", "removed")

    def __init__(self, parent: RemoteNode | None, name: str, qid: Qid) -> None:
        self.parent, self.name, self.qid = parent, name, qid
        self.directory = bool(qid.type & QTDIR)
        self.removed = False
        self.found: Stat | None = None  # the attributes last read

    @property
    def path(self) -> list[str]:
        """The names on the path from the root."""
        names: list[str] = []
        node = self
        while node.parent is not None:
            names.append(node.name)
            node = node.parent
        return names[::-1]

    @property
    def is_snapshot(self) -> bool:
        """Whether the file, open for reading, is a snapshot of one moment."""
        parent = self.parent
        return parent is not None and (parent.name == ".kept" or (self.name in TEXTS and not self.directory))

    @property
    def is_stream(self) -> bool:
        """Whether a write to it is a message of a group, not of a part of a transaction."""
        parent = self.parent
        if parent is None or self.directory or self.name.startswith(".") or self.name in ("ctl", "order"):
            return False
        return parent.name not in FOLDERS and not self.is_in_part

    @property
    def is_in_part(self) -> bool:
        """Whether it is a file in a part of a transaction."""
        return self.parent is not None and self.parent.parent is not None and self.parent.parent.name == ".txn"


@attrs.frozen
class Entry:
    """One name of a listing."""

    name: str
    qid: Qid
    removed = False

    @property
    def directory(self) -> bool:
        return bool(self.qid.type & QTDIR)


class RemoteListing:
    """One open directory: its entries when it was read from the beginning."""

    def __init__(self, tree: RemoteTree, user: User, node: RemoteNode, account: Hashable) -> None:
        self._tree, self._account, self.user, self.node = tree, account, user, node
        self.nodes: list[Entry] = []
        self._held = tree.memory.change(account, 0, limits.LISTING_BYTES)
        self._closed = False

    @property
    def parent(self) -> RemoteNode:
        return self.node.parent or self.node

    def begin(self) -> Step[None]:
        """Read the current entries. Raises Denied, OverLimit."""
        return self._tree.session.call(self._read)

    def _read(self, link: Link, repeated: bool) -> Procedure[None]:
        flags = os.O_RDONLY | os.O_DIRECTORY
        fid, _ = yield from self._tree.opened_with(link, self.user, self.node, flags, lambda fid: [])
        nodes: list[Entry] = []
        try:
            offset = 0
            while True:
                (reply,) = yield [m.Treaddir(0, fid, offset, link.machine.msize - READ_OVERHEAD)]
                entries: Any = check(reply).entries  # type: ignore[attr-defined]
                if not entries:
                    break
                nodes += (Entry(one.name, one.qid) for one in entries if one.name not in (".", ".."))
                offset = entries[-1].offset
                self._hold(limits.LISTING_BYTES + len(nodes) * limits.LISTED_BYTES)
        finally:
            drop(link, fid)
        self.nodes = nodes

    def close(self) -> None:
        self._closed, self.nodes = True, []
        self._hold(0)

    def _hold(self, size: int) -> None:
        self._held = self._tree.memory.change(self._account, self._held, 0 if self._closed else size)


class RemoteTree:
    """The tree of the session's server, as `mqfs.fuse` calls it."""

    def __init__(self, session: Session, root: Stat) -> None:
        self.session = session
        self.root = RemoteNode(None, "/", root.qid)
        self.nodes: WeakValueDictionary[int, RemoteNode] = WeakValueDictionary({root.qid.path: self.root})
        self.waits = UserLimits("reads and writes that wait", "PARKED")
        self.memory = UserLimits("bytes in the memory of the mount", "HELD_BYTES")
        self.locks = RemoteLocks(session)
        self.channels = PutChannels(self)
        self.is_snapshot = attrgetter("is_snapshot")  # of a node
        self._unlinked: tuple[int, int, str, float] = 0, 0, "", 0.0
        self.processes: ProcessWatcher | None = None
        self.receive, self.rest = session.receive, session.rest

    @classmethod
    async def of(cls, session: Session) -> RemoteTree:
        """Return the tree of a running session."""

        def ask(link: Link, repeated: bool) -> Procedure[Stat]:
            (reply,) = yield [m.Tgetattr(0, link.machine.root, GETATTR_BASIC)]
            return stat_of_attributes(check(reply), "/")  # type: ignore[arg-type]

        return cls(session, await await_step(session.call(ask)))

    def node(self, parent: RemoteNode, name: str, qid: Qid) -> RemoteNode:
        """Return the one object of a file, with its present name."""
        node = self.nodes.get(qid.path)
        if node is None:
            node = self.nodes[qid.path] = RemoteNode(parent, name, qid)
        elif node is not self.root:
            node.parent, node.name, node.removed = parent, name, False
        return node

    # ------------------------------------------------------------ procedures

    def _at(
        self, link: Link, user: User | None, node: RemoteNode, requests: Callable[[int], list[Fcall]], *more: str
    ) -> Procedure[list[Any]]:
        """Return the replies to requests about a fid of a node, or a path below it. Raises NotFound, Denied, Stale."""
        root = yield from self.session.root(link, user)
        start, names = yield from near(link, root, [*node.path, *more])
        fid = link.new_fid()
        try:
            replies = yield [walk(start, fid, names), *requests(fid), m.Tclunk(0, fid)]
            link.machine.free_fid(fid)
            qid = yield from arrive(link, start, names, replies[0])
        finally:
            if start != root:
                drop(link, start)
        if not more:
            check_number(node, qid)
        return [check(reply) for reply in replies[1:-1]]

    def opened_with(
        self, link: Link, user: User | None, node: RemoteNode, flags: int, requests: Callable[[int], list[Fcall]]
    ) -> Procedure[tuple[int, list[Fcall]]]:
        """Open a node. Return its fid and the replies to further requests about it, which may be errors."""
        return self._new_fid(link, user, node, lambda fid: [m.Tlopen(0, fid, flags), *requests(fid)])

    def _new_fid(
        self, link: Link, user: User | None, node: RemoteNode, requests: Callable[[int], list[Fcall]]
    ) -> Procedure[tuple[int, list[Fcall]]]:
        """Return a fid of a node after the first request succeeded, and the other replies, which may be errors."""
        root = yield from self.session.root(link, user)
        start, names = yield from near(link, root, node.path)
        fid = link.new_fid()
        try:
            walked, first, *replies = yield [walk(start, fid, names), *requests(fid)]
            check_number(node, (yield from arrive(link, start, names, walked)))
            check(first)
        except MqfsError:
            drop(link, fid)
            raise
        finally:
            if start != root:
                drop(link, start)
        return fid, replies

    # ------------------------------------------------------------ looking

    def lookup(self, user: User, directory: RemoteNode, name: str) -> Step[tuple[RemoteNode, Stat]]:
        """Return a file of a directory, and its attributes. Raises NotFound, NotDirectory, Denied."""
        return self.session.call(partial(self.lookup_as, user, directory, name))

    def lookup_as(
        self, user: User | None, directory: RemoteNode, name: str, link: Link, repeated: bool = False
    ) -> Procedure[tuple[RemoteNode, Stat]]:
        """Look up in a procedure, as `lookup` does. `user` None: as the mount itself."""
        if not directory.directory:
            raise NotDirectory(f"{directory.name!r}: a file, not a group")
        (found,) = yield from self._at(link, user, directory, lambda fid: [m.Tgetattr(0, fid, GETATTR_BASIC)], name)
        node = self.node(directory, name, found.qid)
        node.found = stat_of_attributes(found, name)
        return node, node.found

    def stat(self, node: RemoteNode, file: OpenFile | None = None) -> Step[Stat]:
        """Return the attributes of a file, or of an open file, which may be removed."""
        return self.session.call(partial(self._stat, node, file))

    def _stat(self, node: RemoteNode, file: OpenFile | None, link: Link, repeated: bool) -> Procedure[Stat]:
        if file is not None and file.link is link:
            (reply,) = yield [m.Tgetattr(0, file.fid, GETATTR_BASIC)]
            return stat_of_attributes(check(reply), node.name)  # type: ignore[arg-type]
        try:
            (found,) = yield from self._at(link, None, node, lambda fid: [m.Tgetattr(0, fid, GETATTR_BASIC)])
        except (NotFound, Stale):
            if (other := self._open_file(node, link)) is not None and file is None:
                return (yield from self._stat(node, other, link, repeated))
            if not node.directory or node.found is None:
                raise
            return node.found._replace(nlink=0)  # a process has it open, or is in it
        node.found = stat_of_attributes(found, node.name)
        return node.found

    def _open_file(self, node: RemoteNode, link: Link) -> OpenFile | None:
        """Return an open file of a removed node, or None."""
        files = self.session.files
        return next((f for f in files if isinstance(f, OpenFile) and f.node is node and f.link is link), None)

    def access(self, user: User, node: RemoteNode, mask: int) -> Step[None]:
        """Raise Denied if the mode does not permit the user all of `mask`."""
        return self.session.call(partial(self._access, user, node, mask))

    def _access(self, user: User, node: RemoteNode, mask: int, link: Link, repeated: bool) -> Procedure[None]:
        found: Any = yield from self._stat(node, None, link, repeated)
        if self.session.is_per_user:  # else all act as one user, known to the server only
            require(user, found, mask, node.name)

    def statfs(self) -> Step[os.statvfs_result]:
        """Return the figures of the disk of the server's store."""
        return self.session.call(self._statfs)

    def _statfs(self, link: Link, repeated: bool) -> Procedure[os.statvfs_result]:
        (reply,) = yield [m.Tstatfs(0, link.machine.root)]
        it: Any = check(reply)
        return os.statvfs_result(
            (it.bsize, it.bsize, it.blocks, it.bfree, it.bavail, it.files, it.ffree, it.ffree, 0, it.namelen)
        )

    def listing(self, user: User, node: RemoteNode, account: Hashable) -> Step[RemoteListing]:
        """Open a directory and return its listing. Raises Denied."""
        return self.session.call(partial(self._listing, user, node, account))

    def _listing(
        self, user: User, node: RemoteNode, account: Hashable, link: Link, repeated: bool
    ) -> Procedure[RemoteListing]:
        yield from self._at(link, user, node, lambda fid: [m.Tlopen(0, fid, os.O_RDONLY | os.O_DIRECTORY)])
        return RemoteListing(self, user, node, account)

    # ------------------------------------------------------------ opening

    def open(self, user: User, node: RemoteNode, flags: int) -> Step[OpenFile]:
        """Open a file and return its handle. Raises Denied, NotFound, Stale, OverLimit."""
        file = OpenFile(self, node, user, flags & os.O_ACCMODE)
        return self.session.call(file.open)

    def poll(self, handle: OpenFile, events: int, notify: Callable[[], None] | None) -> Step[int]:
        return handle.poll(events, notify)

    async def create_open(
        self,
        user: User,
        group: RemoteNode,
        name: str,
        mode: int,
        flags: int,
        wait: Callable[[Step[Any]], Awaitable[Any]],
    ) -> tuple[RemoteNode, OpenFile]:
        """Make a stream and open it. An existing one is opened, unless `flags` has O_EXCL."""
        made: tuple[RemoteNode, OpenFile] = await wait(
            self.session.call(partial(self._create_open, user, group, name, mode, flags))
        )
        return made

    def _create_open(
        self, user: User, group: RemoteNode, name: str, mode: int, flags: int, link: Link, repeated: bool
    ) -> Procedure[tuple[RemoteNode, OpenFile]]:
        access = flags & os.O_ACCMODE
        exclusive = flags & os.O_EXCL if not repeated else 0  # the first attempt may have made it
        how = access | os.O_CREAT | exclusive
        fid, _ = yield from self._new_fid(
            link, user, group, lambda fid: [m.Tlcreate(0, fid, name, how, mode, user.gid)]
        )
        replies = yield [m.Tgetattr(0, fid, GETATTR_BASIC), open_state(fid)]  # a create may wait for the disk
        try:
            found: Any = check(replies[0])
            state = check(replies[1])
        except MqfsError:
            drop(link, fid)
            raise
        node = self.node(group, name, found.qid)
        file = OpenFile(self, node, user, access)
        yield from file.on_opened(link, fid, state)
        return node, file

    # ------------------------------------------------------------ making, removing, changing

    def create(self, user: User, group: RemoteNode, name: str, mode: int) -> Step[RemoteNode]:
        """Make a stream, or in `.consumers` a consumer. Raises Exists, BadName, Denied."""
        return self.session.call(
            partial(self._make, user, group, name, lambda fid: m.Tmknod(0, fid, name, mode, 0, 0, user.gid))
        )

    def mkdir(self, user: User, group: RemoteNode, name: str, mode: int) -> Step[RemoteNode]:
        """Make a group, or in `.txn` a part. Raises Exists, BadName, Denied."""
        return self.session.call(
            partial(self._make, user, group, name, lambda fid: m.Tmkdir(0, fid, name, mode, user.gid))
        )

    def _make(
        self, user: User, group: RemoteNode, name: str, request: Callable[[int], Fcall], link: Link, repeated: bool
    ) -> Procedure[RemoteNode]:
        try:
            (made,) = yield from self._at(link, user, group, lambda fid: [request(fid)])
        except Exists:
            if not repeated:
                raise
            node, _ = yield from self.lookup_as(user, group, name, link)  # made by the first attempt
            return node
        return self.node(group, name, made.qid)

    def unlink(self, user: User, group: RemoteNode, name: str) -> Step[None]:
        if name in META_FILES:
            self._require_once(user.pid, group, name)
        return self.session.call(partial(self._remove, user, group, name, 0))

    def _require_once(self, pid: int, group: RemoteNode, name: str) -> None:
        """Refuse to remove a group's own file twice in a short time, as the engine does.

        Its removal has no effect, and GNU tar would remove it for ever. Raises NotPermitted.
        """
        last, self._unlinked = self._unlinked, (pid, group.qid.path, name, time.monotonic())
        if last[:3] == self._unlinked[:3] and self._unlinked[3] - last[3] < limits.UNLINK_AGAIN_S:
            raise NotPermitted(f"cannot remove {name}: every group has it")

    def rmdir(self, user: User, group: RemoteNode, name: str) -> Step[None]:
        return self.session.call(partial(self._remove, user, group, name, AT_REMOVEDIR))

    def _remove(
        self, user: User, group: RemoteNode, name: str, flags: int, link: Link, repeated: bool
    ) -> Procedure[None]:
        try:
            yield from self._at(link, user, group, lambda fid: [m.Tunlinkat(0, fid, name, flags)])
        except NotFound:
            if not repeated:
                raise

    def rename(self, user: User, group: RemoteNode, name: str, to: RemoteNode, new: str) -> Step[None]:
        """Rename a file within its group."""
        return self.session.call(partial(self._rename, user, group, name, to, new))

    def _rename(
        self, user: User, group: RemoteNode, name: str, to: RemoteNode, new: str, link: Link, repeated: bool
    ) -> Procedure[None]:
        if to is not group:
            raise NotPermitted("cannot move a file into another group")
        try:
            yield from self._at(link, user, group, lambda fid: [m.Trenameat(0, fid, name, fid, new)])
        except NotFound:
            if not repeated:
                raise
            yield from self.lookup_as(user, group, new, link)  # renamed by the first attempt
        for node in list(self.nodes.values()):
            if node.parent is group and node.name == name:
                node.name = new

    def setattr(
        self, user: User, node: RemoteNode, *, mode: int | None = None, uid: int | None = None, gid: int | None = None
    ) -> Step[None]:
        """Change mode, owner or group. Raises NotPermitted, Denied."""
        valid = (SET_MODE if mode is not None else 0) | (SET_UID if uid is not None else 0)
        valid |= SET_GID if gid is not None else 0
        fields = valid, mode or 0, uid or 0, gid or 0, 0, 0, 0, 0, 0
        return self.session.call(partial(self._setattr, user, node, fields))

    def _setattr(
        self, user: User, node: RemoteNode, fields: tuple[int, ...], link: Link, repeated: bool
    ) -> Procedure[None]:
        yield from self._at(link, user, node, lambda fid: [m.Tsetattr(0, fid, *fields)])

    def sync(self, node: RemoteNode, user: User, file: OpenFile | None = None) -> Step[None]:
        """Sync everything written to the node's group so far. Needs write permission."""
        return self.session.call(partial(self._sync, node, user, file))

    def _sync(self, node: RemoteNode, user: User, file: OpenFile | None, link: Link, repeated: bool) -> Procedure[None]:
        if file is not None and file.link is link:
            (reply,) = yield [m.Tfsync(0, file.fid)]
            check(reply)
            return
        yield from self._at(link, user, node, lambda fid: [m.Tlopen(0, fid, os.O_RDONLY), m.Tfsync(0, fid)])


def check_number(node: RemoteNode, qid: Qid | None) -> None:
    """Raise Stale if a walk reached another file than the node."""
    if qid is not None and qid.path != node.qid.path:
        node.removed = True
        raise Stale(f"{node.name!r}: another file has its name now")
