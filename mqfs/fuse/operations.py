"""The requests of a mount that make, change, open and remove files: each has a task, as it may wait.

A request that waits holds up no other. It counts against its user's share of the requests that wait, and an interrupt
ends it, where that can still be (see `Wait.cancel`); an open that waits for its snapshot, after LEAST_S. After a
change, the look at the new attributes is not interrupted: the caller would take the change for not made.

Permission is checked by the tree alone. The mount does not ask for `default_permissions`: with it the kernel would
repeat the check, for each name of a path with bits that it has to fetch first, and could only agree. The umask, on the
other hand, is the kernel's: a mode comes here with it applied.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from mqfs import errors, limits
from mqfs.fuse import protocol
from mqfs.fuse.backend import Backend
from mqfs.fuse.device import Device, ParkedRequests, Request
from mqfs.fuse.nodes import Files, Nodes
from mqfs.model import Stat, User, Wait
from mqfs.serving.await_step import await_step

LEAST_S = 2.0  # of an open, before a signal ends it: programs do not expect EINTR of a file that is there soon
BLOCK_BYTES = 128 << 10  # st_blksize: what programs take as their buffer, so as few messages as can be are cut


class Operations:
    """The handlers of one mount; `by_opcode` maps a request's number to a coroutine function, which replies."""

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
        """Answer one request, with an errno where it fails. Raises trio.Cancelled alone."""
        try:
            await self.by_opcode[opcode](request)
        except errors.MqfsError as error:
            self._device.refuse(request.unique, error.errno)
        except Exception:
            self._device.bug(request.unique, f"request {opcode}")
        finally:
            self._parked.early.pop(request.unique, None)

    async def _finish(self, request: Request, step: Any) -> None:
        """Reply that it is done, when a step is."""
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
        elif not valid & protocol.SET_BY_FH:  # size and times: accepted from those who may write, and dropped
            found: Stat = await self._parked.wait(request, self._tree.stat(node))
            if found.uid != user.uid:
                await self._parked.wait(request, self._tree.access(user, node, os.W_OK))
        found = await await_step(self._tree.stat(node))
        self._device.send(pack_attributes_reply(request.unique, found, self._nodes.size(request.nodeid)))

    async def _access(self, request: Request) -> None:
        (mask,) = protocol.ACCESS_IN.unpack_from(request.body)
        await self._finish(request, self._tree.access(user_of(request), self._nodes.node(request.nodeid), mask))

    async def _statfs(self, request: Request) -> None:
        """The figures of the store's disk."""
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
        """The number of an open file, and how the kernel should treat it."""
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
            opened: Wait[Any] = Wait(lambda _: True)  # it can be left at any time: the file is closed then
            opened.follow(handle.opening)
            await self._parked.wait(request, opened, LEAST_S)
        except BaseException:
            self._files.close(fh)
            raise
        size: int | None = getattr(handle, "size", None)
        if size is not None:
            self._nodes.fix_size(request.nodeid, size)
        if not self._device.answer(request.unique, protocol.OPEN_OUT.pack(fh, treatment, 0)):
            self._files.close(fh)  # no release will come

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
    """The name of a file to be made. Raises BadName."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise errors.BadName(f"{raw!r} (expected UTF-8)") from None


def known_name(raw: bytes) -> str:
    """The name of a file to be found. Raises NotFound where no file can have it."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise errors.NotFound(repr(raw)) from None


def pack_attributes(found: Stat, size: int | None = None) -> bytes:
    """Attributes of a file for the kernel. `size`: of its snapshot."""
    mtime, mtime_ns = divmod(found.mtime_ns, 10**9)
    ctime, ctime_ns = divmod(found.ctime_ns, 10**9)
    return protocol.ATTR.pack(
        *(found.qid.path, found.size if size is None else size, (found.kept_bytes + 511) // 512, mtime, mtime, ctime),
        *(mtime_ns, mtime_ns, ctime_ns, found.mode, found.nlink, found.uid, found.gid, 0, BLOCK_BYTES, 0),
    )


def pack_attributes_reply(unique: int, found: Stat, size: int | None) -> bytes:
    """The reply to a GETATTR or SETATTR."""
    count = protocol.OUT_HEADER + protocol.ATTR_TIMES.size + protocol.ATTR.size
    return protocol.REPLY.pack(count, 0, unique) + protocol.ATTR_TIMES.pack(0, 0, 0) + pack_attributes(found, size)


def pack_entry(nodeid: int, found: Stat, size: int | None = None) -> bytes:
    """A file for the kernel under a nodeid. `size`: of its snapshot."""
    return protocol.ENTRY.pack(nodeid, 0, 0, 0, 0, 0) + pack_attributes(found, size)


# ---------------------------------------------------------------- the user of a request, from its header and /proc

# The kernel names uid, gid and thread. Supplementary groups and the process are looked up when a file is named or
# opened, never for a read or a write.


def user_of(request: Request, *, process: bool = False) -> User:
    return user(request.uid, request.gid, request.thread, process=process)


def user(uid: int, gid: int, thread: int, *, process: bool = False) -> User:
    """The user of a request. Root needs no groups; `process` has the process looked up for root too."""
    if uid == 0 and not process:
        return User(uid, gid, frozenset(), thread, "fuse")
    pid, groups = membership(thread)
    return User(uid, gid, groups, pid, "fuse")


def membership(thread: int) -> tuple[int, frozenset[int]]:
    """(process, supplementary groups) of a thread; what is known where it is gone or in another pid namespace."""
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
