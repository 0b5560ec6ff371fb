"""The requests of a mount that the device loop passes on: polls, locks, syncs, lookups, listings and closes.

Each handler takes its request from the device's buffer and replies, or parks it. The meaning of a file is its handle's.
"""

from __future__ import annotations

import errno
import select
import stat
from collections.abc import Callable
from typing import Any

from mqfs import errors
from mqfs.fuse import backend, operations, protocol
from mqfs.fuse.backend import Backend
from mqfs.fuse.device import Device, ParkedRequests
from mqfs.fuse.nodes import Files, Nodes
from mqfs.fuse.operations import known_name, pack_attributes_reply, pack_entry
from mqfs.model import Stat, Wait
from mqfs.state.file_locks import Held, Key

SIZE_UNKNOWN = 1  # in a lookup: the kernel asks for it later; with 0 sendfile would end without a read
READABLE, WRITABLE = select.POLLIN | select.POLLRDNORM, select.POLLOUT | select.POLLWRNORM


class Handlers:
    """The handlers of one mount; `by_opcode` maps a request's number to a function of its `unique`."""

    def __init__(self, tree: Backend, nodes: Nodes, files: Files, device: Device, parked: ParkedRequests) -> None:
        self._tree, self._nodes, self._files, self._device, self._parked = tree, nodes, files, device, parked
        self.by_opcode: dict[int, Callable[[int], None]] = {
            protocol.LOOKUP: self._lookup,
            protocol.GETATTR: self._getattr,
            protocol.FORGET: self._forget,
            protocol.BATCH_FORGET: self._batch_forget,
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

    def _finish(self, unique: int, step: Any) -> None:
        """Reply that a request is done, when a step is."""
        if isinstance(step, Wait):
            self._parked.park(unique, step, lambda _: self._device.refuse(unique, 0))
        else:
            self._device.refuse(unique, 0)

    def _when(self, unique: int, step: Any, then: Callable[[Any], object]) -> None:
        """Reply by `then` from the result of a step, when it is there."""
        if isinstance(step, Wait):
            self._parked.park(unique, step, then)
        else:
            then(step)

    def _fsync(self, unique: int) -> None:
        fh = protocol.U64.unpack_from(self._device.buffer, protocol.IN_HEADER)[0]
        listing = self._files.listings.get(fh)
        if listing is None:
            file = self._files.find(fh)
            self._finish(unique, self._tree.sync(file.node, file.handle.user, file.handle))
        else:
            self._finish(unique, self._tree.sync(listing.node, listing.user))

    def _fallocate(self, unique: int) -> None:
        """Succeed and do nothing, as for a size: the C library would write a byte, a message, instead."""
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
        self._when(
            unique, self._tree.locks.conflict(handle, key, wanted), lambda lock: self._answer_getlk(unique, lock)
        )

    def _answer_getlk(self, unique: int, lock: Held | None) -> None:
        if lock is None:
            self._device.send(protocol.LOCKED.pack(40, 0, unique, 0, 0, 2, 0))
        else:
            kind = 1 if lock.exclusive else 0
            self._device.send(protocol.LOCKED.pack(40, 0, unique, lock.start, lock.end - 1, kind, lock.pid))

    def _setlk(self, unique: int) -> None:
        self._lock(unique, wait=False)

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
        """A duplicate of a descriptor was closed: by POSIX that releases the process's locks on the file. An incomplete
        command is carried out; close(2) returns its error."""
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
        step = self._tree.lookup(operations.user(uid, gid, thread), self._nodes.node(parent), name)
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
        """No reply."""
        nodeid, lookups = (protocol.U64.unpack_from(self._device.buffer, at)[0] for at in (16, protocol.IN_HEADER))
        self._nodes.forget(nodeid, lookups)

    def _batch_forget(self, _: int) -> None:
        """No reply."""
        count = protocol.U32.unpack_from(self._device.buffer, protocol.IN_HEADER)[0]
        at = protocol.IN_HEADER + 8
        forgotten = self._device.view[at : at + count * protocol.FORGET_ONE.size]
        for nodeid, lookups in protocol.FORGET_ONE.iter_unpack(forgotten):
            self._nodes.forget(nodeid, lookups)

    # ------------------------------------------------------------ listings

    def _opendir(self, unique: int) -> None:
        _, _, _, nodeid, uid, gid, thread = protocol.HEADER.unpack_from(self._device.buffer)
        user, node = operations.user(uid, gid, thread), self._nodes.directory(nodeid)
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
        if isinstance(step, Wait):
            self._parked.park(unique, step, lambda _: self._device.answer(unique, pack_names(listing, offset, room)))
        else:
            self._device.answer(unique, pack_names(listing, offset, room))

    def _releasedir(self, unique: int) -> None:
        self._files.close_listing(protocol.U64.unpack_from(self._device.buffer, protocol.IN_HEADER)[0])
        self._device.refuse(unique, 0)


def pack_names(listing: Any, offset: int, room: int) -> bytes:
    """Entries of a directory from a position on, as many as fit. Position n is after the nth of ".", "..", names."""
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
