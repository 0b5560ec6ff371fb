"""The requests of a mount that pyfuse3 performs: making, changing, opening and removing files.

Requests are translated into calls on the tree, and the tree's errors into errno. Reads, writes, lookups and listings
never come here: device_loop.py answers them. Nothing but FUSEError leaves a handler, because pyfuse3 would end the
mount.

Permission is checked by the tree alone. The mount does not ask for `default_permissions`: with it the kernel would
repeat the check, for each name of a path with bits that it has to fetch first, and could only agree. The umask, on the
other hand, is the kernel's: a mode comes here with it applied.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import stat
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

import pyfuse3
from pyfuse3 import EntryAttributes, FileInfo, FUSEError, RequestContext, SetattrFields, StatvfsData

from mqfs import errors, limits
from mqfs.fuse.backend import Backend
from mqfs.fuse.nodes import Files, Nodes
from mqfs.model import Step, User
from mqfs.serving.await_step import await_step

log = logging.getLogger("mqfs.fuse")
P = ParamSpec("P")
T = TypeVar("T")

BLOCK_BYTES = 128 << 10  # st_blksize: what programs take as their buffer, so as few messages as can be are cut


def answering(
    handler: Callable[Concatenate[Operations, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Operations, P], Coroutine[Any, Any, T]]:
    """A handler that raises only FUSEError: conditions as their errno, a bug as EIO, and logged."""

    @functools.wraps(handler)
    async def answer(self: Operations, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await handler(self, *args, **kwargs)
        except errors.MqfsError as error:
            raise FUSEError(error.errno) from None
        except FUSEError:
            raise
        except OSError as error:
            log.error("%s failed: %s", handler.__name__, error)
            raise FUSEError(errno.EIO) from None
        except Exception:
            log.exception("%s failed", handler.__name__)
            raise FUSEError(errno.EIO) from None

    return answer


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


class Operations(pyfuse3.Operations):
    """The handlers that pyfuse3 calls."""

    enable_writeback_cache = False

    def __init__(self, tree: Backend, nodes: Nodes, files: Files) -> None:
        super().__init__()
        self.tree, self.nodes, self.files = tree, nodes, files

    # ------------------------------------------------------------ attributes

    async def attributes(self, node: Any, nodeid: int = 0) -> EntryAttributes:
        """For a reply. With a nodeid: for one with an entry, in which the device loop sets the stable number."""
        found = await await_step(self.tree.stat(node))
        entry = EntryAttributes()
        entry.st_ino = nodeid or found.qid.path
        entry.attr_timeout = entry.entry_timeout = 0
        entry.st_mode, entry.st_nlink, entry.st_uid, entry.st_gid = found.mode, found.nlink, found.uid, found.gid
        entry.st_size, entry.st_blocks, entry.st_blksize = found.size, (found.kept_bytes + 511) // 512, BLOCK_BYTES
        entry.st_atime_ns = entry.st_mtime_ns = found.mtime_ns
        entry.st_ctime_ns = found.ctime_ns
        return entry

    async def enter(self, node: Any, ctx: RequestContext) -> EntryAttributes:
        return await self.attributes(node, self.nodes.enter(node, ctx.pid))

    def user(self, ctx: RequestContext, *, process: bool = False) -> User:
        return user(ctx.uid, ctx.gid, ctx.pid, process=process)

    @answering
    async def setattr(
        self, inode: int, attr: EntryAttributes, fields: SetattrFields, fh: int | None, ctx: RequestContext
    ) -> EntryAttributes:
        node, user = self.nodes.node(inode), self.user(ctx)
        mode = stat.S_IMODE(attr.st_mode) if fields.update_mode else None
        uid = attr.st_uid if fields.update_uid else None
        gid = attr.st_gid if fields.update_gid else None
        if (mode, uid, gid) != (None, None, None):
            await await_step(self.tree.setattr(user, node, mode=mode, uid=uid, gid=gid))
        elif fh is None and (await await_step(self.tree.stat(node))).uid != user.uid:
            # size and times: accepted from those who may write, and dropped
            await await_step(self.tree.access(user, node, os.W_OK))
        reply, size = await self.attributes(node), self.nodes.size(inode)
        reply.st_size = reply.st_size if size is None else size
        return reply

    @answering
    async def access(self, inode: int, mode: int, ctx: RequestContext) -> bool:
        try:
            await await_step(self.tree.access(self.user(ctx), self.nodes.node(inode), mode))
        except errors.Denied:
            return False
        return True

    @answering
    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        """The figures of the store's disk."""
        reply, disk = StatvfsData(), await await_step(self.tree.statfs())
        reply.f_bsize, reply.f_frsize = disk.f_bsize, disk.f_frsize
        reply.f_blocks, reply.f_bfree, reply.f_bavail = disk.f_blocks, disk.f_bfree, disk.f_bavail
        reply.f_files, reply.f_ffree, reply.f_favail = disk.f_files, disk.f_ffree, disk.f_favail
        reply.f_namemax = limits.NAME_BYTES
        return reply

    # ------------------------------------------------------------ names

    @answering
    async def mkdir(self, parent_inode: int, name: bytes, mode: int, ctx: RequestContext) -> EntryAttributes:
        group = self.nodes.directory(parent_inode)
        made: Any = await await_step(self.tree.mkdir(self.user(ctx), group, new_name(name), stat.S_IMODE(mode)))
        return await self.enter(made, ctx)

    @answering
    async def mknod(self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: RequestContext) -> EntryAttributes:
        if not stat.S_ISREG(mode):
            raise errors.NotPermitted("cannot make a special file (expected a stream or a group)")
        group = self.nodes.directory(parent_inode)
        made: Step[Any] = self.tree.create(self.user(ctx), group, new_name(name), stat.S_IMODE(mode))
        return await self.enter(await await_step(made), ctx)

    @answering
    async def unlink(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        await await_step(self.tree.unlink(self.user(ctx), self.nodes.directory(parent_inode), known_name(name)))

    @answering
    async def rmdir(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        await await_step(self.tree.rmdir(self.user(ctx), self.nodes.directory(parent_inode), known_name(name)))

    @answering
    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: RequestContext,
    ) -> None:
        if flags & ~pyfuse3.RENAME_NOREPLACE:
            raise errors.BadRequest(f"rename flags {flags:#x} (expected RENAME_NOREPLACE or none)")
        group, to = self.nodes.directory(parent_inode_old), self.nodes.directory(parent_inode_new)
        await await_step(self.tree.rename(self.user(ctx), group, known_name(name_old), to, new_name(name_new)))

    @answering
    async def link(self, inode: int, new_parent_inode: int, new_name: bytes, ctx: RequestContext) -> EntryAttributes:
        raise errors.NotPermitted("cannot make a second name of a file")

    @answering
    async def symlink(self, parent_inode: int, name: bytes, target: bytes, ctx: RequestContext) -> EntryAttributes:
        raise errors.NotPermitted("cannot make a symbolic link")

    @answering
    async def readlink(self, inode: int, ctx: RequestContext) -> bytes:
        raise errors.BadRequest("not a symbolic link")

    # ------------------------------------------------------------ opening

    def add(self, node: Any, handle: Any, flags: int) -> FileInfo:
        mode = flags & os.O_ACCMODE
        fh = self.files.add(node, handle, mode != os.O_WRONLY, mode != os.O_RDONLY)
        return FileInfo(fh=fh, direct_io=True, keep_cache=False)

    @answering
    async def open(self, inode: int, flags: int, ctx: RequestContext) -> FileInfo:
        node = self.nodes.node(inode)
        if flags & os.O_ACCMODE or self.tree.is_snapshot(node):
            self.nodes.take(inode, ctx.pid)
        step: Any = self.tree.open(self.user(ctx, process=True), node, flags & os.O_ACCMODE)
        handle: Any = await await_step(step)
        info = self.add(node, handle, flags)
        try:
            await await_step(handle.opening)
        except BaseException:
            self.files.close(info.fh)
            raise
        size: int | None = getattr(handle, "size", None)
        if size is not None:
            self.nodes.fix_size(inode, size)
        return info

    @answering
    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        user, group = self.user(ctx, process=True), self.nodes.directory(parent_inode)
        node, handle = await self.tree.create_open(user, group, new_name(name), stat.S_IMODE(mode), flags)
        info = self.add(node, handle, flags)
        try:
            return info, await self.attributes(node, self.nodes.enter(node, alone=True))
        except BaseException:
            self.files.close(info.fh)
            raise


# ---------------------------------------------------------------- the user of a request, from its header and /proc

# The kernel names uid, gid and thread. Supplementary groups and the process are looked up when a file is named or
# opened, never for a read or a write.


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
