"""The data lane: requests are read from the FUSE device itself, and what is hot or waits is answered there.

Owns the device while the mount lives: one task drains it, without a coroutine a request. Reads, writes, interrupts,
polls, locks, syncs, lookups and listings are answered here; what makes, changes, opens or removes files is passed on to
libfuse (and so to pyfuse3) through a socket pair and its reply passed back, amended where pyfuse3 cannot say what is
meant. Knows nothing of what a file means: that is the handle's.

Why not pyfuse3 alone: it ignores interrupts, so that a waiting reader could not even be killed and the next message
would go to the dead one; a limited number of waiting reads would stop the mount; and it takes thrice the time.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import stat
import sys
from collections.abc import Callable
from typing import Any

import trio

from mqfs import errors, limits
from mqfs.engine.tree.listing import Listing
from mqfs.engine.tree.node_stat import Node
from mqfs.engine.tree.tree import Tree
from mqfs.file_locks import Held, Key
from mqfs.fuse import identity, protocol
from mqfs.fuse.nodes import File, Files, Nodes
from mqfs.fuse.operations import BLOCK_BYTES, known_name
from mqfs.model import Stat
from mqfs.seams import Handle
from mqfs.wait import Wait

log = logging.getLogger("mqfs.fuse")

BATCH = 64  # requests answered before other tasks have a turn
PASSED = frozenset(
    (
        protocol.SETATTR, protocol.READLINK, protocol.SYMLINK, protocol.MKNOD, protocol.MKDIR, protocol.UNLINK,
        protocol.RMDIR, protocol.RENAME, protocol.LINK, protocol.OPEN, protocol.STATFS, protocol.INIT,
        protocol.ACCESS, protocol.CREATE, protocol.RENAME2,
    )
)  # fmt: skip
AMENDED = frozenset((protocol.INIT, protocol.MKNOD, protocol.MKDIR, protocol.CREATE, protocol.OPEN))
WANTED = (
    protocol.POSIX_LOCKS
    | protocol.FLOCK_LOCKS
    | protocol.ATOMIC_O_TRUNC
    | protocol.BIG_WRITES
    | protocol.ASYNC_DIO
    | protocol.PARALLEL_DIROPS
    | protocol.MAX_PAGES
    | protocol.HANDLE_KILLPRIV
)  # not READDIRPLUS: it would enter every file of a directory in the table of nodes
MAX_WRITE, PAGES = 1 << 20, 256
BACKGROUND = 0xFFFF  # asynchronous reads that wait must not stand in the way of a RELEASE
SIZE_NOT_ASKED = 1  # in a lookup: the kernel asks before it tells a size; at 0 sendfile would end without a read
READABLE, WRITABLE = select.POLLIN | select.POLLRDNORM, select.POLLOUT | select.POLLWRNORM


class Waiting:
    """A request that is not answered yet. Called by the engine with what it came to."""

    __slots__ = ("lane", "step", "uid", "unique")

    def __init__(self, lane: DeviceLoop, unique: int, step: Wait[Any]) -> None:
        self.lane, self.unique, self.step = lane, unique, step
        self.uid: int | None = protocol.U32.unpack_from(lane.buffer, protocol.USER)[
            0
        ]  # whose share it is of; None: nobody's
        try:
            lane.tree.waits.take(self.uid)
        except errors.OverLimit:
            if step.cancel():
                raise
            self.uid = None
        lane.waiting[unique] = self
        step.subscribe(self)

    def end(self) -> None:
        """It waits no more."""
        if self.lane.waiting.pop(self.unique, None) is not None and self.uid is not None:
            self.lane.tree.waits.give(self.uid)

    def __call__(self, step: Wait[Any]) -> None:
        lane, unique = self.lane, self.unique
        self.end()
        try:
            self.answer(step.result())
        except errors.MqfsError as error:
            lane.refuse(unique, error.errno)
        except Exception:
            lane.bug(unique, "a request that waited")

    def answer(self, _: Any) -> None:
        """Nothing but that it is done."""
        self.lane.refuse(self.unique, 0)


class WaitingRead(Waiting):
    __slots__ = ("handle",)

    def __init__(self, lane: DeviceLoop, unique: int, step: Wait[bytes], handle: Handle) -> None:
        self.handle = handle
        super().__init__(lane, unique, step)

    def answer(self, data: bytes) -> None:
        if not self.lane.answer(self.unique, data):
            self.handle.push_back(data)


class WaitingWrite(Waiting):
    __slots__ = ()

    def answer(self, size: int) -> None:
        self.lane.send(protocol.WRITTEN.pack(24, 0, self.unique, size, 0))


class WaitingLock(Waiting):
    __slots__ = ("held", "key")

    def __init__(self, lane: DeviceLoop, unique: int, step: Wait[None], key: Key, held: Held) -> None:
        self.key, self.held = key, held
        super().__init__(lane, unique, step)

    def answer(self, _: None) -> None:
        if not self.lane.refuse(self.unique, 0):
            self.lane.locks.release(self.key, self.held.owner, self.held.start, self.held.end)


class DeviceLoop:
    """One mount's device."""

    def __init__(self, tree: Tree, nodes: Nodes, files: Files, device: int, libfuse: socket.socket) -> None:
        self.tree, self.nodes, self.files, self.device, self.libfuse = tree, nodes, files, device, libfuse
        self.locks = tree.locks
        self.waiting: dict[int, Waiting] = {}
        self.passed: dict[int, int] = {}  # unique -> opcode, of what pyfuse3 answers and we amend
        self.early: dict[int, None] = {}  # requests that were interrupted before they came, the oldest first
        self.closing = False
        self.buffer = bytearray(limits.FUSE_REQUEST_BYTES)
        self._view = memoryview(self.buffer)
        self._handlers: dict[int, Callable[[int], None]] = {
            protocol.LOOKUP: self._lookup,
            protocol.GETATTR: self._getattr,
            protocol.FORGET: self._forget,
            protocol.BATCH_FORGET: self._batch_forget,
            protocol.INTERRUPT: self._interrupt,
            protocol.POLL: self._poll,
            protocol.GETLK: self._getlk,
            protocol.SETLK: self._setlk,
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

    # ------------------------------------------------------------ the two tasks

    async def requests(self) -> None:
        """Answer or pass on what the device has, until the mount ends."""
        device, buffer, vector, hot = self.device, self.buffer, [self.buffer], protocol.HOT.unpack_from
        readv, waiting_room = os.readv, trio.lowlevel.wait_readable
        yielded = False
        while True:
            for _ in range(BATCH):
                try:
                    size = readv(device, vector)
                except BlockingIOError:
                    if yielded:
                        await waiting_room(device)
                    else:  # the caller just answered may share this CPU and ask again at once: twice the speed
                        os.sched_yield()
                    yielded = not yielded
                    continue
                except OSError as error:
                    if error.errno in (errno.ENODEV, errno.ECONNABORTED):  # unmounted, by force perhaps
                        return
                    if error.errno == errno.ENOENT:  # the caller was killed before we had its request
                        continue
                    raise
                yielded = False
                opcode, unique, fh, offset, count, caller, flags = hot(buffer)
                try:
                    if opcode == protocol.WRITE:
                        self._write(unique, fh, offset, count, flags)
                    elif opcode == protocol.READ:
                        self._read(unique, fh, offset, count, caller, flags)
                    elif opcode in PASSED:
                        await self._forward(opcode, unique, size)
                    elif opcode in self._handlers:
                        self._handlers[opcode](unique)
                    else:
                        self.refuse(unique, errno.ENOSYS)  # the kernel then knows what to do, and does not ask again
                except errors.MqfsError as error:
                    self.refuse(unique, error.errno)
                except Exception:
                    self.bug(unique, f"request {opcode}")
            await trio.lowlevel.checkpoint()

    async def replies(self) -> None:
        """Pass pyfuse3's replies back to the device, until its end is closed."""
        buffer = bytearray(64 << 10)
        view = memoryview(buffer)
        while True:
            try:
                size = self.libfuse.recv_into(buffer)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self.libfuse)
                continue
            if not size:
                return
            try:
                undo = self._amend(buffer, size)
                if not self.send(view[:size]):
                    undo()
            except Exception:
                self.bug(protocol.U64.unpack_from(buffer, 8)[0], "a reply")

    async def _forward(self, opcode: int, unique: int, size: int) -> None:
        if opcode in AMENDED:
            self.passed[unique] = opcode
        if opcode == protocol.INIT:  # libfuse would splice from what it takes for the device
            at = protocol.IN_HEADER + 12
            protocol.U32.pack_into(self.buffer, at, protocol.U32.unpack_from(self.buffer, at)[0] & ~protocol.SPLICES)
        while True:
            try:
                self.libfuse.send(self._view[:size])
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self.libfuse)
            else:
                return

    # ------------------------------------------------------------ replies

    def send(self, reply: bytes | memoryview) -> bool:
        """False if the request is gone."""
        try:
            os.write(self.device, reply)
        except OSError as error:
            return self._unheard(error)
        return True

    def answer(self, unique: int, data: bytes) -> bool:
        """What a read came to. False if the request is gone."""
        try:
            os.writev(self.device, (protocol.REPLY.pack(protocol.OUT_HEADER + len(data), 0, unique), data))
        except OSError as error:
            return self._unheard(error)
        return True

    def refuse(self, unique: int, number: int) -> bool:
        """An errno, or 0: done. False if the request is gone."""
        return self.send(protocol.REPLY.pack(protocol.OUT_HEADER, -number, unique))

    def bug(self, unique: int, what: str) -> None:
        """In an exception handler: it is no condition of the tree, or the disk's."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            log.error("%s failed: %s", what, error)
        else:
            log.exception("%s failed", what)
        self.refuse(unique, errno.EIO)

    def _unheard(self, error: OSError) -> bool:
        if error.errno not in (errno.ENOENT, errno.ENODEV, errno.EPERM, errno.ECONNABORTED):
            log.error("a reply was not taken: %s", error)
        return False

    # ------------------------------------------------------------ data

    def _file(self, fh: int) -> File:
        file = self.files.open.get(fh)
        if file is None:
            raise errors.Stale(f"file handle {fh}")
        return file

    def _read(self, unique: int, fh: int, offset: int, count: int, caller: int, flags: int) -> None:
        file = self.files.open.get(fh)
        if file is None or not caller & protocol.READ_LOCKOWNER or self.early:
            if self.closing:
                self.answer(unique, b"")
                return
            file = self._file(fh)
            if self._interrupt_too_late(unique):
                return
            if not caller & protocol.READ_LOCKOWNER:
                self._require_pages(file)
        handle = file.handle
        if handle.takes:
            self._tell_reader(file)
        if count > limits.MESSAGE_BYTES and handle.parkable:
            # The kernel asks for more than it can carry at once in pieces, and goes on only behind a full one.
            count = limits.MESSAGE_BYTES
        step = handle.read(count, offset)
        if step.__class__ is bytes:
            try:
                os.writev(self.device, (protocol.REPLY.pack(protocol.OUT_HEADER + len(step), 0, unique), step))
            except OSError as error:
                self._unheard(error)
                handle.push_back(step)
        elif flags & os.O_NONBLOCK and not step.settled and step.cancel():
            self.refuse(unique, errno.EAGAIN)
        else:
            WaitingRead(self, unique, step, handle)

    def _require_pages(self, file: File) -> None:
        """The kernel fills a page, for sendfile or splice. Programs that are refused there read instead."""
        if not self.nodes.may_be_mapped(protocol.U64.unpack_from(self.buffer, 16)[0]):
            raise errors.BadRequest(f"{file.node.name} is read, not mapped")

    def _tell_reader(self, file: File) -> None:
        """A handle that takes is told the process that reads; the kernel names the thread."""
        thread = protocol.U32.unpack_from(self.buffer, protocol.THREAD)[0]
        if thread != file.thread:
            file.thread = thread
            file.process = identity.membership(thread)[0] if thread else 0  # 0: of another pid namespace
        file.handle.reader_pid = file.process

    def _write(self, unique: int, fh: int, offset: int, count: int, flags: int) -> None:
        file = self.files.open.get(fh)
        if file is None or self.early:
            if self.closing:
                self.refuse(unique, errno.EIO)
                return
            file = self._file(fh)
            if self._interrupt_too_late(unique):
                return
        step = file.handle.write(bytes(self._view[protocol.WRITE_DATA : protocol.WRITE_DATA + count]), offset)
        if step.__class__ is int:
            self.send(protocol.WRITTEN.pack(24, 0, unique, step, 0))
        elif flags & os.O_NONBLOCK and not step.settled and step.cancel():
            self.refuse(unique, errno.EAGAIN)
        else:
            WaitingWrite(self, unique, step)

    def _fsync(self, unique: int) -> None:
        """All writers of the group wait for it: it is for who may write."""
        fh = protocol.U64.unpack_from(self.buffer, protocol.IN_HEADER)[0]
        listing = self.files.listings.get(fh)
        if listing is None:
            file = self._file(fh)
            user, node, writes = file.handle.user, file.node, file.writes
        else:
            user, node, writes = listing.user, listing.node, False
        if not writes:
            self.tree.access(user, node, os.W_OK)
        step = self.tree.sync(node)
        if isinstance(step, Wait):
            Waiting(self, unique, step)
        else:
            self.refuse(unique, 0)

    def _fallocate(self, unique: int) -> None:
        """Succeeds and does nothing, as setting the size: else the C library would write a byte, a message, instead."""
        mode = protocol.U32.unpack_from(self.buffer, protocol.IN_HEADER + 24)[0]
        self.refuse(unique, errno.EOPNOTSUPP if mode & ~protocol.FALLOC_FL_KEEP_SIZE else 0)

    # ------------------------------------------------------------ interrupts

    def _interrupt(self, _: int) -> None:
        """No reply. What is done already is answered as if nothing had been asked."""
        victim = protocol.U64.unpack_from(self.buffer, protocol.IN_HEADER)[0]
        waiting = self.waiting.get(victim)
        if waiting is not None:
            self._cancel(waiting)
        elif victim not in self.passed and not self.closing:
            self.early[victim] = None
            if len(self.early) > limits.INTERRUPTS:
                del self.early[next(iter(self.early))]

    def _cancel(self, waiting: Waiting) -> None:
        if waiting.step.cancel():
            waiting.end()
            self.refuse(waiting.unique, errno.EINTR)

    def _interrupt_too_late(self, unique: int) -> bool:
        """Whether the request was interrupted before it came; then it is answered."""
        if unique not in self.early:
            return False
        del self.early[unique]
        self.refuse(unique, errno.EINTR)
        return True

    def close(self) -> None:
        """Answer all that waits, and from now on every read with end-of-file."""
        self.closing = True
        self.early[0] = None  # no request has that number: from now on every read and write looks here
        for waiting in reversed(list(self.waiting.values())):  # so that none becomes the first of its queue
            self._cancel(waiting)

    # ------------------------------------------------------------ poll

    def _poll(self, unique: int) -> None:
        fh, kh, flags, events = protocol.POLL_IN.unpack_from(self.buffer, protocol.IN_HEADER)
        file = self._file(fh)
        handle, ready = file.handle, 0
        if flags & protocol.POLL_SCHEDULE_NOTIFY:
            handle.watch(lambda: self._notify(kh))
        if self.closing:
            ready = READABLE | WRITABLE
        else:
            if events & READABLE and file.reads and handle.readable:
                ready |= READABLE
            if events & WRITABLE and file.writes and handle.writable:
                ready |= WRITABLE
        self.send(protocol.POLLED.pack(24, 0, unique, ready, 0))

    def _notify(self, kh: int) -> None:
        self.send(protocol.NOTIFIED.pack(24, protocol.NOTIFY_POLL, 0, kh))

    # ------------------------------------------------------------ locks

    def _wanted(self) -> tuple[Key, Held, int]:
        fh, owner, start, end, kind, pid, flags = protocol.LOCK_IN.unpack_from(self.buffer, protocol.IN_HEADER)
        key = Key(self._file(fh).ino, bool(flags & protocol.LK_FLOCK))
        uid = protocol.U32.unpack_from(self.buffer, protocol.USER)[0]
        return key, Held(owner, kind == 1, start, end + 1, pid, user=uid), kind

    def _getlk(self, unique: int) -> None:
        key, wanted, _ = self._wanted()
        lock = self.locks.conflict(key, wanted)
        if lock is None:
            self.send(protocol.LOCKED.pack(40, 0, unique, 0, 0, 2, 0))
        else:
            kind = 1 if lock.exclusive else 0
            self.send(protocol.LOCKED.pack(40, 0, unique, lock.start, lock.end - 1, kind, lock.pid))

    def _setlk(self, unique: int) -> None:
        self._lock(unique, wait=False)

    def _setlkw(self, unique: int) -> None:
        if not self._interrupt_too_late(unique):
            self._lock(unique, wait=True)

    def _lock(self, unique: int, *, wait: bool) -> None:
        key, wanted, kind = self._wanted()
        if kind == 2:
            self.locks.release(key, wanted.owner, wanted.start, wanted.end)
            self.refuse(unique, 0)
            return
        try:
            step = self.locks.take(key, wanted, wait=wait and not self.closing)
        except errors.OverLimit:
            self.refuse(unique, errno.ENOLCK)
            return
        if step is False:
            self.refuse(unique, errno.EAGAIN)
        elif isinstance(step, Wait):
            WaitingLock(self, unique, step, key, wanted)
        elif not self.refuse(unique, 0):
            self.locks.release(key, wanted.owner, wanted.start, wanted.end)

    # ------------------------------------------------------------ closing

    def _flush(self, unique: int) -> None:
        """One duplicate of a descriptor was closed: by POSIX that ends the process's locks on the file. An unfinished
        command is carried out, and close(2) says how it went."""
        fh, owner = protocol.FLUSH_IN.unpack_from(self.buffer, protocol.IN_HEADER)
        file = self.files.open.get(fh)
        step: Any = None
        if file is not None:
            self.locks.release(Key(file.ino, False), owner)
            step = file.handle.flush()
        if isinstance(step, Wait):
            Waiting(self, unique, step)
        else:
            self.refuse(unique, 0)

    def _release(self, unique: int) -> None:
        fh, _, flags, owner = protocol.RELEASE_IN.unpack_from(self.buffer, protocol.IN_HEADER)
        file = self.files.open.get(fh)
        if file is not None and flags & protocol.RELEASE_FLOCK_UNLOCK:
            self.locks.release(Key(file.ino, True), owner)
        try:
            self.files.close(fh)
        finally:
            self.refuse(unique, 0)

    # ------------------------------------------------------------ what every path is made of

    def _lookup(self, unique: int) -> None:
        size, _, _, parent, uid, gid, thread = protocol.HEADER.unpack_from(self.buffer)
        name = known_name(bytes(self._view[protocol.IN_HEADER : size - 1]))
        node = self.tree.walk(identity.user(uid, gid, thread), self.nodes.node(parent), name)
        found = self.tree.stat(node)
        attributes = pack_attributes(found, None if node.directory else found.size or SIZE_NOT_ASKED)
        nodeid = self.nodes.enter(node, thread)
        entry = protocol.ENTRY.pack(nodeid, 0, 0, 0, 0, 0)
        size = protocol.OUT_HEADER + protocol.ENTRY_BYTES
        if not self.send(protocol.REPLY.pack(size, 0, unique) + entry + attributes):
            self.nodes.forget(nodeid, 1)

    def _getattr(self, unique: int) -> None:
        nodeid = protocol.U64.unpack_from(self.buffer, 16)[0]
        flags, fh = protocol.GETATTR_IN.unpack_from(self.buffer, protocol.IN_HEADER)
        file = self.files.open.get(fh) if flags & protocol.GETATTR_FH else None
        fixed = self.nodes.size(nodeid) if file is None else getattr(file.handle, "size", None)
        attributes = pack_attributes(self.tree.stat(self.nodes.node(nodeid)), fixed)
        size = protocol.OUT_HEADER + protocol.ATTR_TIMES.size + protocol.ATTR.size
        self.send(protocol.REPLY.pack(size, 0, unique) + protocol.ATTR_TIMES.pack(0, 0, 0) + attributes)

    def _forget(self, _: int) -> None:
        """No reply."""
        nodeid, lookups = (protocol.U64.unpack_from(self.buffer, at)[0] for at in (16, protocol.IN_HEADER))
        self.nodes.forget(nodeid, lookups)

    def _batch_forget(self, _: int) -> None:
        """No reply."""
        count = protocol.U32.unpack_from(self.buffer, protocol.IN_HEADER)[0]
        at = protocol.IN_HEADER + 8
        for nodeid, lookups in protocol.FORGET_ONE.iter_unpack(self._view[at : at + count * protocol.FORGET_ONE.size]):
            self.nodes.forget(nodeid, lookups)

    # ------------------------------------------------------------ listings

    def _opendir(self, unique: int) -> None:
        _, _, _, nodeid, uid, gid, thread = protocol.HEADER.unpack_from(self.buffer)
        user, node = identity.user(uid, gid, thread), self.nodes.directory(nodeid)
        self.tree.access(user, node, os.R_OK)
        fh = self.files.add_listing(Listing(self.tree, user, node, uid))
        if not self.send(protocol.OPENED.pack(32, 0, unique, fh, 0, 0)):
            self.files.close_listing(fh)

    def _readdir(self, unique: int) -> None:
        _, _, fh, offset, room, _, _ = protocol.HOT.unpack_from(self.buffer)
        listing = self.files.listings.get(fh)
        if listing is None:
            raise errors.Stale(f"file handle {fh}")
        if offset == 0:
            listing.begin()
        self.answer(unique, pack_names(listing, offset, room))

    def _releasedir(self, unique: int) -> None:
        self.files.close_listing(protocol.U64.unpack_from(self.buffer, protocol.IN_HEADER)[0])
        self.refuse(unique, 0)

    # ------------------------------------------------------------ what pyfuse3 cannot say

    def _amend(self, reply: bytearray, size: int) -> Callable[[], None]:
        """Change a reply of pyfuse3 in passing. Returns what takes it back, should the request be gone."""
        unique = protocol.U64.unpack_from(reply, 8)[0]
        opcode = self.passed.pop(unique, 0)
        if not opcode or size == protocol.OUT_HEADER:
            return nothing
        if opcode == protocol.INIT:
            self._amend_init(reply)
            return nothing
        nodeid = fh = 0
        if opcode != protocol.OPEN:
            nodeid = protocol.U64.unpack_from(reply, protocol.ENTRY_NODEID)[0]
            protocol.U64.pack_into(reply, protocol.ENTRY_INO, self.nodes.ino(nodeid))
        if opcode in (protocol.OPEN, protocol.CREATE):
            at = protocol.OUT_HEADER + (protocol.ENTRY_BYTES if opcode == protocol.CREATE else 0)
            fh = protocol.U64.unpack_from(reply, at)[0]
            if self.files.open[fh].handle.sequential:
                protocol.U32.pack_into(
                    reply, at + 8, protocol.U32.unpack_from(reply, at + 8)[0] | protocol.FOPEN_STREAM
                )

        def undo() -> None:
            self.nodes.forget(nodeid, 1)
            self.files.close(fh)

        return undo

    def _amend_init(self, reply: bytearray) -> None:
        """What we ask of the kernel, whatever libfuse asks; it never offers what it does not have."""
        major, minor, ahead, *_ = protocol.INIT_OUT.unpack_from(reply, protocol.OUT_HEADER)
        fields = (major, minor, ahead, WANTED, BACKGROUND, BACKGROUND, MAX_WRITE, 1, PAGES, 0, 0)
        protocol.INIT_OUT.pack_into(reply, protocol.OUT_HEADER, *fields)


def nothing() -> None:
    pass


def pack_attributes(found: Stat, size: int | None = None) -> bytes:
    """Attributes of a file, as the kernel takes them. `size`: of its snapshot."""
    mtime, mtime_ns = divmod(found.mtime_ns, 10**9)
    ctime, ctime_ns = divmod(found.ctime_ns, 10**9)
    return protocol.ATTR.pack(
        *(found.qid.path, found.size if size is None else size, (found.kept_bytes + 511) // 512, mtime, mtime, ctime),
        *(mtime_ns, mtime_ns, ctime_ns, found.mode, found.nlink, found.uid, found.gid, 0, BLOCK_BYTES, 0),
    )


def pack_names(listing: Listing, offset: int, room: int) -> bytes:
    """Entries of a directory from a position on, as many as fit. Position n is behind the nth: ".", "..", names."""
    directory = listing.node
    packed: list[bytes] = []
    names = listing.nodes
    for position in range(offset, len(names) + 2):
        if position < 2:
            node: Node = listing.parent if position else directory
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
