"""Fids, each a file of the tree, perhaps open, used by one user; the table of a connection's fids; open directories.

This module calls the tree, but never waits. Replies and tags are the session's.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Hashable
from typing import Any

from mqfs import limits
from mqfs.engine.tree.attributes import Listing
from mqfs.engine.tree.tree import Tree
from mqfs.errors import BadFid, BadRequest, IsDirectory, MqfsError, NotFound, NotPermitted, OverLimit
from mqfs.model import QTDIR, Grant, Step, User, Wait
from mqfs.net import identity
from mqfs.net.tokens import Proof
from mqfs.ninep.codec.messages import DMTMP, Dir, Entry
from mqfs.ninep.codec.wire import ENTRY, stat_bytes
from mqfs.quotas import UserLimits
from mqfs.state.file_locks import Key
from mqfs.store.api import Handle

STICKY = 0o1000  # DMTMP in other dialects

log = logging.getLogger("mqfs.ninep")

NOWHERE = -1  # of Fid.rest: no read is to be answered with 0 bytes, at whatever offset
DT_DIR, DT_REG = 4, 8
ALL_ONES = 0xFFFF_FFFF


class Fid:
    """One fid of a connection."""

    __slots__ = (
        "fills",
        "given",
        "handle",
        "listing",
        "locked",
        "node",
        "nonblocking",
        "number",
        "pending",
        "reader",
        "remove_at_close",
        "rest",
        "root",
        "takes",
        "truncated",
        "user",
        "watched",
        "writer",
        "xattr",
    )

    def __init__(self, number: int, user: User, root: Any, node: Any, fills: bool) -> None:
        self.number = number
        self.user = user
        self.root = root  # the root of its attach: ".." stays there
        self.node = node
        self.fills = fills  # its client repeats a read until the buffer is full (Linux v9fs)
        self.rest = NOWHERE  # the offset of that repeated read
        self.truncated = False  # the repeated read may be for more of the message, not only for its end
        self.handle: Handle | None = None
        self.reader: Handle | None = None  # the handle, if open for reading
        self.writer: Handle | None = None  # the handle, if open for writing
        self.listing: OpenDirectory | None = None
        self.takes = False  # its reads claim messages
        self.given = 0, b""  # the last reply with a claim: its end among all bytes replied, and its data
        self.xattr = False  # reads as the (empty) list of extended attributes
        self.nonblocking = False
        self.remove_at_close = False
        self.locked = False
        self.pending: set[int] = set()  # tags of its parked requests
        self.watched: Wait[bytes] | None = None  # its last wait for the STATE: see resumable.py

    @property
    def open(self) -> bool:
        return self.handle is not None or self.listing is not None or self.xattr

    @property
    def size(self) -> int | None:
        """The size in bytes of the open snapshot, or None."""
        return getattr(self.handle, "size", None)

    @property
    def unfinished(self) -> bool:
        """Whether a part of the last claimed message is still unread."""
        last: Any = getattr(self.reader, "last", None)
        return last is not None and bool(last.can_push_back or last.given < len(last.body))

    def clone(self, number: int, node: Any) -> Fid:
        return Fid(number, self.user, self.root, node, self.fills)

    def closed(self) -> Fid:
        """Return the fid itself. Raises BadFid if it is open."""
        if self.open:
            raise BadFid(f"fid {self.number}: already open")
        return self

    def walk(self, tree: Tree, node: Any, name: str) -> Any:
        """Take one step from a node; ".." never leaves the attached root."""
        if name == "." or (name == ".." and node is self.root):
            return node
        return tree.walk(self.user, node, name)

    def open_node(
        self, tree: Tree, flags: int, account: Hashable, *, nonblocking: bool = False, made: bool = False
    ) -> None:
        """Open the fid's file with flags of open(2). `made`: this request made the file, for this user."""
        mode = flags & os.O_ACCMODE
        if self.node.directory:
            if mode != os.O_RDONLY:
                raise IsDirectory
            if not made:
                tree.access(self.user, self.node, os.R_OK)
            self.listing = OpenDirectory(Listing(tree, self.user, self.node, account))
            return
        handle = tree.open(self.user, self.node, mode, made=made)
        self.handle = handle
        self.reader = None if mode == os.O_WRONLY else handle
        self.writer = None if mode == os.O_RDONLY else handle
        self.takes = self.reader is not None and bool(getattr(handle, "takes", False))
        self.fills = self.fills and handle.parkable and not nonblocking
        self.nonblocking = nonblocking

    def remove(self, tree: Tree) -> Step[None]:
        """Remove the fid's file or group from the tree."""
        node = self.node
        if node is tree.root:
            raise NotPermitted("cannot remove the root group")
        if node.removed:
            raise NotFound
        if node.directory:
            return tree.rmdir(self.user, tree.parent(node), node.name)
        return tree.unlink(self.user, tree.parent(node), node.name)

    def close(self, tree: Tree, session: int) -> None:
        """Close the file, and release its locks, which are held under the session's number."""
        if self.locked:
            tree.locks.release_through(Key(self.node.qid.path, False), (session, self.number))
        if self.listing is not None:
            self.listing.close()
        handle, self.handle, self.reader, self.writer, self.listing = self.handle, None, None, None, None
        if handle is not None:
            handle.close()
        if self.remove_at_close:
            try:
                self.remove(tree)
            except MqfsError as error:
                log.info("%s: not removed at its close: %s", self.node.name, error)


class FidTable:
    """The fids of a connection by number; those of Tauth apart. Each is charged to the user's limit of `memory`."""

    def __init__(self, memory: UserLimits, account: Hashable) -> None:
        self.by_number: dict[int, Fid] = {}
        self.proofs: dict[int, Proof] = {}  # of Tauth
        self._memory, self._account = memory, account

    def grants(self) -> set[Grant | None]:
        """Return the grants of the tokens that its fids were attached or proven with."""
        return {fid.user.grant for fid in self.by_number.values()} | {proof.grant for proof in self.proofs.values()}

    def find(self, number: int) -> Fid:
        """Return a fid. Raises BadFid if unknown."""
        fid = self.by_number.get(number)
        if fid is None:
            raise BadFid(f"unknown fid {number}")
        return fid

    def check_new(self, number: int) -> None:
        """Raise BadFid or OverLimit if a number cannot become a fid."""
        if number in self.by_number or number in self.proofs:
            raise BadFid(f"fid {number}: in use")
        if len(self.by_number) + len(self.proofs) >= limits.FIDS:
            raise OverLimit(f"too many fids (expected at most {limits.FIDS} of a connection)")

    def add(self, fid: Fid) -> None:
        """Add a fid with a new number. Raises OverLimit."""
        self._memory.acquire(self._account, limits.FID_BYTES)
        self.by_number[fid.number] = fid

    def add_proof(self, number: int, proof: Proof) -> None:
        """Add the fid of a Tauth. Raises BadFid, OverLimit."""
        self.check_new(number)
        self._memory.acquire(self._account, limits.FID_BYTES)
        self.proofs[number] = proof

    def remove_proof(self, number: int) -> bool:
        """Remove the fid of a Tauth. Return whether the number was one."""
        if self.proofs.pop(number, None) is None:
            return False
        self._memory.release(self._account, limits.FID_BYTES)
        return True

    def remove(self, fid: Fid) -> None:
        del self.by_number[fid.number]
        self._memory.release(self._account, limits.FID_BYTES)

    def clear(self) -> list[Fid]:
        """Remove all fids and return those of files, for the caller to close."""
        fids, proofs, self.by_number, self.proofs = self.by_number, self.proofs, {}, {}
        self._memory.release(self._account, limits.FID_BYTES * (len(fids) + len(proofs)))
        return list(fids.values())


def qid_mode(mode: int, kind: int) -> int:
    """Return the mode of 9P2000: permissions below, the qid's type on top. A file's sticky bit is DMTMP."""
    return (mode & 0o777) | kind << 24 | (DMTMP if mode & STICKY and not kind & QTDIR else 0)


def file_mode(mode: int) -> int:
    """Return the mode of a file from that of 9P2000."""
    return (mode & 0o777) | (STICKY if mode & DMTMP else 0)


def stat(tree: Tree, node: Any, size: int | None = None) -> Dir:
    """Return a node's attributes in 9P2000 and 9P2000.u. `size`: of the open snapshot, if any. Raises NotAnswered."""
    it = tree.stat(node)
    owner = identity.shown_user(it.uid)
    seconds = it.mtime_ns // 10**9 & ALL_ONES
    name = it.name or "/"
    mode = qid_mode(it.mode, it.qid.type)
    return Dir(
        0, 0, it.qid, mode, seconds, seconds, it.size if size is None else size, name, owner,
        identity.shown_group(it.gid), owner, "", it.uid, it.gid, it.uid,
    )  # fmt: skip


class OpenDirectory:
    """An open directory, read by offsets of 9P."""

    def __init__(self, listing: Listing) -> None:
        self._listing = listing
        self._next = 0
        self._offset = 0
        self._left = 0  # bytes of the last read's count that it did not fill

    def begin(self, offset: int) -> Step[None]:
        """Read the directory's current names before the first read, and before one at offset 0."""
        return None if offset and self._listing.is_there else self._listing.begin()

    def close(self) -> None:
        self._listing.close()

    def read(self, tree: Tree, offset: int, count: int, unix: bool) -> bytes:
        """Return whole stat entries, as many as fit. `offset` is 0 or where the last read ended.

        Raises BadRequest where `count` is too small for an entry, unless the client asks for the rest of its buffer
        (Linux v9fs): 0 bytes end its loop, and its next read continues here. Raises NotAnswered: then repeat the same
        read.
        """
        if offset == 0:
            self._next, self._offset, self._left = 0, 0, 0
        elif offset != self._offset:
            raise BadRequest(f"offset {offset} in a directory (expected 0 or {self._offset})")
        nodes, size, at = self._listing.nodes, 0, self._next
        parts: list[bytes] = []
        while at < len(nodes) and len(parts) < limits.STATS_AT_ONCE:
            raw = _stat_or_nothing(tree, nodes[at], unix)
            if size + len(raw) > count:
                break
            parts.append(raw)
            size += len(raw)
            at += 1
        if not parts and at < len(nodes) and count > self._left:
            raise BadRequest(f"count {count}: too small for a directory entry")
        self._next, self._offset, self._left = at, self._offset + size, count - size
        return b"".join(parts)

    def entries(self, fid: Fid, offset: int, count: int) -> tuple[Entry, ...]:
        """Return the entries of 9P2000.L after the cookie `offset`, as many as fit in `count` bytes."""
        nodes = self._listing.nodes
        found: list[Entry] = []
        size, at = 0, offset
        while at < len(nodes) + 2 and len(found) < limits.NAMES_AT_ONCE:
            entry = self._entry(fid, nodes, at)
            at += 1
            if entry is None:
                continue
            size += ENTRY.size + len(entry.name.encode("utf-8", "surrogateescape"))
            if size > count:
                break
            found.append(entry)
        if not found and size > count:
            raise BadRequest(f"count {count}: too small for a directory entry")
        return tuple(found)

    def _entry(self, fid: Fid, nodes: list[Any], at: int) -> Entry | None:
        """Return the entry at an index: ".", "..", then the nodes; None if that node was removed meanwhile."""
        if at == 0:
            return Entry(fid.node.qid, 1, DT_DIR, ".")
        if at == 1:
            parent = fid.node if fid.node is fid.root else self._listing.parent
            return Entry(parent.qid, 2, DT_DIR, "..")
        node = nodes[at - 2]
        if node.removed:
            return None
        qid = node.qid
        return Entry(qid, at + 1, DT_DIR if qid.type & QTDIR else DT_REG, node.name)


def _stat_or_nothing(tree: Tree, node: Any, unix: bool) -> bytes:
    """Return a node's entry, or b"" if the node was removed meanwhile. Raises NotAnswered."""
    try:
        return b"" if node.removed else stat_bytes(stat(tree, node), unix)
    except identity.NotAnswered:
        raise
    except MqfsError:
        return b""
