"""The requests of a mount that the device loop passes on.

A handler of polls, locks, syncs, lookups, listings and closes takes its request from the device's buffer and replies,
or parks it. The meaning of a file is its handle's.

Requests that make, change, open and remove files have a task each, as they may wait, and delay no other request. A
waiting request is charged to its user's limit. An interrupt ends it where it can still be cancelled (see
`Wait.cancel`); an open that waits for its snapshot only after LEAST_S. After a change, reading the new attributes is
not interrupted: the caller would believe that the change was not made.

Permission is checked by the tree alone. The mount does not ask for `default_permissions`: with it the kernel would
repeat the check, for each name of a path with bits that it has to fetch first, and could only agree. The umask, on the
other hand, is the kernel's: a mode arrives here with it applied.
"""

from __future__ import annotations

import errno
import os
import select
import stat
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from mqfs import errors, limits
from mqfs.fuse import backend, protocol
from mqfs.fuse.backend import Backend, Files, Nodes
from mqfs.fuse.device import Device, ParkedRequests, Request
from mqfs.model import Stat, User, Wait
from mqfs.serving.await_step import await_step
from mqfs.state.file_locks import Held, Key

LEAST_S = 2.0  # of an open, before a signal ends it: programs do not expect EINTR from a regular file
BLOCK_BYTES = 128 << 10  # st_blksize: programs use it as their buffer size, so few messages are cut


class Operations:
    """The handlers of one mount. `by_opcode` maps a request's number to a coroutine function, which replies."""

    def __init__(self, tree: Backend, nodes: Nodes, files: Files, device: Device, parked: ParkedRequests) -> None:
        self._tree, self._nodes, self._files, self._device, self._parked = tree, nodes, files, device, parked
        self.by_opcode: dict[int, Callable[[Request], Coroutine[Any, Any, None]]] = {
            protocol.SETATTR: self._setattr,
            protocol.ACCESS: self._access,
            protocol.STATFS: self._statfs,
            protocol.MKDIR: self._mkdir,
            protocol.MKNOD: self._mknod,
            protocol.UNLINK: self._unlink,
            protocol.RMDIR: self._rmdir,
            protocol.RENAME: partial(self._rename, fields=protocol.RENAME_IN),
            protocol.RENAME2: partial(self._rename, fields=protocol.RENAME2_IN),
            protocol.OPEN: self._open,
            protocol.CREATE: self._create,
        }

    async def perform(self, opcode: int, request: Request) -> None:
        """Answer one request, with an errno if it fails. Raises trio.Cancelled only."""
        try:
            await self.by_opcode[opcode](request)
        except errors.MqfsError as error:
            self._device.refuse(request.unique, error.errno)
        except Exception:
            self._device.bug(request.unique, f"request {opcode}")
        finally:
            self._parked.early.pop(request.unique, None)

    async def _finish(self, request: Request, step: Any) -> None:
        """Await a step, then reply that the request is done."""
        await self._parked.wait(request, step)
        self._device.refuse(request.unique, 0)

    # ------------------------------------------------------------ attributes

    async def _setattr(self, request: Request) -> None:
        valid, mode, uid, gid = protocol.SETATTR_IN.unpack_from(request.body)
        node, user = self._nodes.node(request.nodeid), user_of(request)
        if valid & (protocol.SET_MODE | protocol.SET_UID | protocol.SET_GID):
            step = self._tree.setattr(
                user,
                node,
                mode=stat.S_IMODE(mode) if valid & protocol.SET_MODE else None,
                uid=uid if valid & protocol.SET_UID else None,
                gid=gid if valid & protocol.SET_GID else None,
            )
            await self._parked.wait(request, step)
        elif not valid & protocol.SET_BY_FH:  # size and times: accepted from those who may write, and ignored
            found: Stat = await self._parked.wait(request, self._tree.stat(node))
            if found.uid != user.uid:
                await self._parked.wait(request, self._tree.access(user, node, os.W_OK))
        found = await await_step(self._tree.stat(node))
        self._device.send(pack_attributes_reply(request.unique, found, self._nodes.size(request.nodeid)))

    async def _access(self, request: Request) -> None:
        (mask,) = protocol.ACCESS_IN.unpack_from(request.body)
        await self._finish(request, self._tree.access(user_of(request), self._nodes.node(request.nodeid), mask))

    async def _statfs(self, request: Request) -> None:
        """Reply with the figures of the store's disk."""
        disk: os.statvfs_result = await self._parked.wait(request, self._tree.statfs())
        counts = disk.f_blocks, disk.f_bfree, disk.f_bavail, disk.f_files, disk.f_ffree
        figures = protocol.STATFS_OUT.pack(*counts, disk.f_bsize, limits.NAME_BYTES, disk.f_frsize)
        self._device.answer(request.unique, figures)

    # ------------------------------------------------------------ names

    async def _mkdir(self, request: Request) -> None:
        (mode,) = protocol.MKDIR_IN.unpack_from(request.body)
        (name,), group = request.names(protocol.MKDIR_IN.size), self._nodes.directory(request.nodeid)
        step = self._tree.mkdir(user_of(request), group, new_name(name), stat.S_IMODE(mode))
        await self._enter(request, await self._parked.wait(request, step))

    async def _mknod(self, request: Request) -> None:
        (mode,) = protocol.MKNOD_IN.unpack_from(request.body)
        (name,) = request.names(protocol.MKNOD_IN.size)
        if not stat.S_ISREG(mode):
            raise errors.NotPermitted("cannot make a special file (expected a stream or a group)")
        group = self._nodes.directory(request.nodeid)
        step = self._tree.create(user_of(request), group, new_name(name), stat.S_IMODE(mode))
        await self._enter(request, await self._parked.wait(request, step))

    async def _enter(self, request: Request, node: Any) -> None:
        """Reply with the entry of a file that was made."""
        found = await await_step(self._tree.stat(node))
        nodeid = self._nodes.enter(node, request.thread)
        if not self._device.answer(request.unique, pack_entry(nodeid, found)):
            self._nodes.forget(nodeid, 1)

    async def _unlink(self, request: Request) -> None:
        (name,), group = request.names(), self._nodes.directory(request.nodeid)
        await self._finish(request, self._tree.unlink(user_of(request), group, known_name(name)))

    async def _rmdir(self, request: Request) -> None:
        (name,), group = request.names(), self._nodes.directory(request.nodeid)
        await self._finish(request, self._tree.rmdir(user_of(request), group, known_name(name)))

    async def _rename(self, request: Request, *, fields: Any) -> None:
        directory, *flags = fields.unpack_from(request.body)
        name, new = request.names(fields.size)
        if any(flag & ~protocol.RENAME_NOREPLACE for flag in flags):
            raise errors.BadRequest(f"rename flags {flags[0]:#x} (expected RENAME_NOREPLACE or none)")
        group, to = self._nodes.directory(request.nodeid), self._nodes.directory(directory)
        await self._finish(request, self._tree.rename(user_of(request), group, known_name(name), to, new_name(new)))

    # ------------------------------------------------------------ opening

    def _add(self, node: Any, handle: Any, flags: int) -> tuple[int, int]:
        """Register an open file. Return its number, and the flags by which the kernel should treat it."""
        mode = flags & os.O_ACCMODE
        fh = self._files.add(node, handle, mode != os.O_WRONLY, mode != os.O_RDONLY)
        return fh, protocol.FOPEN_DIRECT_IO | (protocol.FOPEN_STREAM if handle.sequential else 0)

    async def _open(self, request: Request) -> None:
        (flags,) = protocol.OPEN_IN.unpack_from(request.body)
        node = self._nodes.node(request.nodeid)
        if flags & os.O_ACCMODE or self._tree.is_snapshot(node):
            self._nodes.take(request.nodeid, request.thread)
        step = self._tree.open(user_of(request, process=True), node, flags & os.O_ACCMODE)
        handle: Any = await self._parked.wait(request, step)
        fh, treatment = self._add(node, handle, flags)
        try:
            opened: Wait[Any] = Wait(lambda _: True)  # cancellable at any time: the file is closed then
            opened.follow(handle.opening)
            await self._parked.wait(request, opened, LEAST_S)
        except BaseException:
            self._files.close(fh)
            raise
        size: int | None = getattr(handle, "size", None)
        if size is not None:
            self._nodes.fix_size(request.nodeid, size)
        if not self._device.answer(request.unique, protocol.OPEN_OUT.pack(fh, treatment, 0)):
            self._files.close(fh)  # the kernel will not release it

    async def _create(self, request: Request) -> None:
        flags, mode = protocol.CREATE_IN.unpack_from(request.body)
        (name,) = request.names(protocol.CREATE_IN.size)
        user, group = user_of(request, process=True), self._nodes.directory(request.nodeid)
        wait = partial(self._parked.wait, request)
        node, handle = await self._tree.create_open(user, group, new_name(name), stat.S_IMODE(mode), flags, wait)
        fh, treatment = self._add(node, handle, flags)
        try:
            found = await await_step(self._tree.stat(node))
        except BaseException:
            self._files.close(fh)
            raise
        nodeid = self._nodes.enter(node, alone=True)
        if not self._device.answer(
            request.unique, pack_entry(nodeid, found) + protocol.OPEN_OUT.pack(fh, treatment, 0)
        ):
            self._nodes.forget(nodeid, 1)
            self._files.close(fh)


# ---------------------------------------------------------------- names and attributes


def new_name(raw: bytes) -> str:
    """Decode the name of a file to be made. Raises BadName."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise errors.BadName(f"{raw!r} (expected UTF-8)") from None


def known_name(raw: bytes) -> str:
    """Decode the name of an existing file. Raises NotFound where no file can have it."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise errors.NotFound(repr(raw)) from None


def pack_attributes(found: Stat, size: int | None = None) -> bytes:
    """Pack the attributes of a file for the kernel. `size`: of its snapshot."""
    mtime, mtime_ns = divmod(found.mtime_ns, 10**9)
    ctime, ctime_ns = divmod(found.ctime_ns, 10**9)
    return protocol.ATTR.pack(
        *(found.qid.path, found.size if size is None else size, (found.kept_bytes + 511) // 512, mtime, mtime, ctime),
        *(mtime_ns, mtime_ns, ctime_ns, found.mode, found.nlink, found.uid, found.gid, 0, BLOCK_BYTES, 0),
    )


def pack_attributes_reply(unique: int, found: Stat, size: int | None) -> bytes:
    """Pack the reply to a GETATTR or SETATTR."""
    count = protocol.OUT_HEADER + protocol.ATTR_TIMES.size + protocol.ATTR.size
    return protocol.REPLY.pack(count, 0, unique) + protocol.ATTR_TIMES.pack(0, 0, 0) + pack_attributes(found, size)


def pack_entry(nodeid: int, found: Stat, size: int | None = None) -> bytes:
    """Pack the entry of a file for the kernel. `size`: of its snapshot."""
    return protocol.ENTRY.pack(nodeid, 0, 0, 0, 0, 0) + pack_attributes(found, size)


# ---------------------------------------------------------------- the user of a request, from its header and /proc

# The kernel gives uid, gid and thread. Supplementary groups and the process are looked up when a file is named or
# opened, never for a read or a write.


def user_of(request: Request, *, process: bool = False) -> User:
    return acting_user(request.uid, request.gid, request.thread, process=process)


def acting_user(uid: int, gid: int, thread: int, *, process: bool = False) -> User:
    """Return the user of a request. Root needs no groups; `process`: look up the process for root, too."""
    if uid == 0 and not process:
        return User(uid, gid, frozenset(), thread, "fuse")
    pid, groups = membership(thread)
    return User(uid, gid, groups, pid, "fuse")


def membership(thread: int) -> tuple[int, frozenset[int]]:
    """Return (process, supplementary groups) of a thread: (thread, none) if it ended or is in another pid namespace."""
    pid, groups = thread, frozenset[int]()
    try:
        with open(f"/proc/{thread}/status", "rb") as file:
            for line in file:
                if line.startswith(b"Tgid:"):
                    pid = int(line[5:])
                elif line.startswith(b"Groups:"):
                    groups = frozenset(map(int, line[7:].split()))
                    break
    except (OSError, ValueError):
        pass
    return pid, groups


# ------------------------------------------------------------ requests that do not wait


SIZE_UNKNOWN = 1  # in a lookup: the kernel asks for the size later; with 0 sendfile would end without a read
READABLE, WRITABLE = select.POLLIN | select.POLLRDNORM, select.POLLOUT | select.POLLWRNORM


class Handlers:
    """The handlers of one mount. `by_opcode` maps a request's number to a function of its `unique`."""

    def __init__(self, tree: Backend, nodes: Nodes, files: Files, device: Device, parked: ParkedRequests) -> None:
        self._tree, self._nodes, self._files, self._device, self._parked = tree, nodes, files, device, parked
        self.by_opcode: dict[int, Callable[[int], None]] = {
            protocol.LOOKUP: self._lookup,
            protocol.GETATTR: self._getattr,
            protocol.FORGET: self._forget,
            protocol.BATCH_FORGET: self._batch_forget,
            protocol.POLL: self._poll,
            protocol.GETLK: self._getlk,
            protocol.SETLK: partial(self._lock, wait=False),
            protocol.SETLKW: self._setlkw,
            protocol.FLUSH: self._flush,
            protocol.RELEASE: self._release,
            protocol.FSYNC: self._fsync,
            protocol.FSYNCDIR: self._fsync,
            protocol.FALLOCATE: self._fallocate,
            protocol.OPENDIR: self._opendir,
            protocol.READDIR: self._readdir,
            protocol.RELEASEDIR: self._releasedir,
        }

    def _finish(self, unique: int, step: Any) -> None:
        """Reply that a request is done, once a step is."""
        self._when(unique, step, lambda _: self._device.refuse(unique, 0))

    def _when(self, unique: int, step: Any, then: Callable[[Any], object]) -> None:
        """Call `then`, which replies, with the result of a step, once resolved."""
        if isinstance(step, Wait):
            self._parked.park(unique, step, then)
        else:
            then(step)

    def _fsync(self, unique: int) -> None:
        fh = protocol.U64.unpack_from(self._device.buffer, protocol.IN_HEADER)[0]
        if (listing := self._files.listings.get(fh)) is not None:
            step = self._tree.sync(listing.node, listing.user)
        else:
            file = self._files.find(fh)
            step = self._tree.sync(file.node, file.handle.user, file.handle)
        self._finish(unique, step)

    def _fallocate(self, unique: int) -> None:
        """Succeed and do nothing, as for a size: else the C library would write a byte instead, which is a message."""
        mode = protocol.U32.unpack_from(self._device.buffer, protocol.IN_HEADER + 24)[0]
        self._device.refuse(unique, errno.EOPNOTSUPP if mode & ~protocol.FALLOC_FL_KEEP_SIZE else 0)

    # ------------------------------------------------------------ poll

    def _poll(self, unique: int) -> None:
        fh, kh, flags, events = protocol.POLL_IN.unpack_from(self._device.buffer, protocol.IN_HEADER)
        file = self._files.find(fh)
        wanted = (backend.READABLE if events & READABLE else 0) | (backend.WRITABLE if events & WRITABLE else 0)

        def answer(ready: int) -> None:
            found = READABLE if ready & wanted & backend.READABLE and file.reads else 0
            found |= WRITABLE if ready & wanted & backend.WRITABLE and file.writes else 0
            self._device.send(protocol.POLLED.pack(24, 0, unique, found, 0))

        if self._parked.closing:
            self._device.send(protocol.POLLED.pack(24, 0, unique, READABLE | WRITABLE, 0))
            return
        notify = (lambda: self._notify(kh)) if flags & protocol.POLL_SCHEDULE_NOTIFY else None
        self._when(unique, self._tree.poll(file.handle, wanted, notify), answer)

    def _notify(self, kh: int) -> None:
        self._device.send(protocol.NOTIFIED.pack(24, protocol.NOTIFY_POLL, 0, kh))

    # ------------------------------------------------------------ locks

    def _wanted(self) -> tuple[Any, Key, Held, int]:
        fh, owner, start, end, kind, pid, flags = protocol.LOCK_IN.unpack_from(self._device.buffer, protocol.IN_HEADER)
        file = self._files.find(fh)
        key = Key(file.ino, bool(flags & protocol.LK_FLOCK))
        uid = protocol.U32.unpack_from(self._device.buffer, protocol.USER)[0]
        return file.handle, key, Held(owner, kind == 1, start, end + 1, pid, user=uid), kind

    def _getlk(self, unique: int) -> None:
        handle, key, wanted, _ = self._wanted()
        step = self._tree.locks.conflict(handle, key, wanted)
        self._when(unique, step, lambda lock: self._answer_getlk(unique, lock))

    def _answer_getlk(self, unique: int, lock: Held | None) -> None:
        if lock is None:
            self._device.send(protocol.LOCKED.pack(40, 0, unique, 0, 0, 2, 0))
        else:
            kind = 1 if lock.exclusive else 0
            self._device.send(protocol.LOCKED.pack(40, 0, unique, lock.start, lock.end - 1, kind, lock.pid))

    def _setlkw(self, unique: int) -> None:
        if not self._parked.is_interrupted(unique):
            self._lock(unique, wait=True)

    def _lock(self, unique: int, *, wait: bool) -> None:
        handle, key, wanted, kind = self._wanted()
        if kind == 2:
            self._finish(unique, self._tree.locks.release(handle, key, wanted.owner, wanted.start, wanted.end))
            return
        try:
            step = self._tree.locks.take(handle, key, wanted, wait=wait and not self._parked.closing)
        except errors.OverLimit:
            self._device.refuse(unique, errno.ENOLCK)
            return
        self._when(unique, step, lambda granted: self._grant(unique, handle, key, wanted, granted))

    def _grant(self, unique: int, handle: Any, key: Key, lock: Held, granted: object) -> None:
        if granted is False:
            self._device.refuse(unique, errno.EAGAIN)
        elif not self._device.refuse(unique, 0):
            self._tree.locks.release(handle, key, lock.owner, lock.start, lock.end)

    # ------------------------------------------------------------ closing

    def _flush(self, unique: int) -> None:
        """Handle the close of a duplicate of a descriptor.

        By POSIX it releases the process's locks on the file. An incomplete command is carried out; close(2) returns its
        error.
        """
        fh, owner = protocol.FLUSH_IN.unpack_from(self._device.buffer, protocol.IN_HEADER)
        file = self._files.open.get(fh)
        if file is None:
            self._device.refuse(unique, 0)
            return
        unlocked = self._tree.locks.release(file.handle, Key(file.ino, False), owner)
        step = file.handle.flush()
        self._finish(unique, step if isinstance(step, Wait) else unlocked)

    def _release(self, unique: int) -> None:
        fh, _, flags, owner = protocol.RELEASE_IN.unpack_from(self._device.buffer, protocol.IN_HEADER)
        file = self._files.open.get(fh)
        if file is not None and flags & protocol.RELEASE_FLOCK_UNLOCK:
            self._tree.locks.release(file.handle, Key(file.ino, True), owner)
        try:
            self._files.close(fh)
        finally:
            self._device.refuse(unique, 0)

    # ------------------------------------------------------------ paths

    def _lookup(self, unique: int) -> None:
        size, _, _, parent, uid, gid, thread = protocol.HEADER.unpack_from(self._device.buffer)
        name = known_name(bytes(self._device.view[protocol.IN_HEADER : size - 1]))
        step = self._tree.lookup(acting_user(uid, gid, thread), self._nodes.node(parent), name)
        self._when(unique, step, lambda found: self._answer_lookup(unique, thread, *found))

    def _answer_lookup(self, unique: int, thread: int, node: Any, found: Stat) -> None:
        nodeid = self._nodes.enter(node, thread)
        entry = pack_entry(nodeid, found, None if node.directory else found.size or SIZE_UNKNOWN)
        if not self._device.answer(unique, entry):
            self._nodes.forget(nodeid, 1)

    def _getattr(self, unique: int) -> None:
        nodeid = protocol.U64.unpack_from(self._device.buffer, 16)[0]
        flags, fh = protocol.GETATTR_IN.unpack_from(self._device.buffer, protocol.IN_HEADER)
        file = self._files.open.get(fh) if flags & protocol.GETATTR_FH else None
        handle = None if file is None else file.handle
        step = self._tree.stat(self._nodes.node(nodeid), handle)
        self._when(unique, step, lambda found: self._answer_getattr(unique, nodeid, handle, found))

    def _answer_getattr(self, unique: int, nodeid: int, handle: Any, found: Stat) -> None:
        fixed = self._nodes.size(nodeid) if handle is None else getattr(handle, "size", None)
        self._device.send(pack_attributes_reply(unique, found, fixed))

    def _forget(self, _: int) -> None:
        """Forget a nodeid. There is no reply."""
        nodeid, lookups = (protocol.U64.unpack_from(self._device.buffer, at)[0] for at in (16, protocol.IN_HEADER))
        self._nodes.forget(nodeid, lookups)

    def _batch_forget(self, _: int) -> None:
        """Forget many nodeids. There is no reply."""
        count = protocol.U32.unpack_from(self._device.buffer, protocol.IN_HEADER)[0]
        at = protocol.IN_HEADER + 8
        forgotten = self._device.view[at : at + count * protocol.FORGET_ONE.size]
        for nodeid, lookups in protocol.FORGET_ONE.iter_unpack(forgotten):
            self._nodes.forget(nodeid, lookups)

    # ------------------------------------------------------------ listings

    def _opendir(self, unique: int) -> None:
        _, _, _, nodeid, uid, gid, thread = protocol.HEADER.unpack_from(self._device.buffer)
        user, node = acting_user(uid, gid, thread), self._nodes.directory(nodeid)
        self._when(unique, self._tree.listing(user, node, uid), lambda listing: self._answer_opendir(unique, listing))

    def _answer_opendir(self, unique: int, listing: Any) -> None:
        fh = self._files.add_listing(listing)
        if not self._device.send(protocol.OPENED.pack(32, 0, unique, fh, 0, 0)):
            self._files.close_listing(fh)

    def _readdir(self, unique: int) -> None:
        _, _, fh, offset, room, _, _ = protocol.HOT.unpack_from(self._device.buffer)
        listing = self._files.listings.get(fh)
        if listing is None:
            raise errors.Stale(f"unknown file handle {fh}")
        step = listing.begin() if offset == 0 else None
        self._when(unique, step, lambda _: self._device.answer(unique, pack_names(listing, offset, room)))

    def _releasedir(self, unique: int) -> None:
        self._files.close_listing(protocol.U64.unpack_from(self._device.buffer, protocol.IN_HEADER)[0])
        self._device.refuse(unique, 0)


def pack_names(listing: Any, offset: int, room: int) -> bytes:
    """Pack entries of a directory from a position, as many as fit. Position n is after the nth of ".", "..", names."""
    directory = listing.node
    packed: list[bytes] = []
    names = listing.nodes
    for position in range(offset, len(names) + 2):
        if position < 2:
            node: Any = listing.parent if position else directory
            name = b".." if position else b"."
        else:
            node = names[position - 2]
            if node.removed:
                continue
            name = node.name.encode()
        size = (protocol.DIRENT.size + len(name) + 7) & ~7
        if size > room:
            break
        room -= size
        kind = (stat.S_IFDIR if node.directory else stat.S_IFREG) >> 12
        packed.append((protocol.DIRENT.pack(node.qid.path, position + 1, len(name), kind) + name).ljust(size, b"\0"))
    return b"".join(packed)
