"""Fids: each a file of the tree, perhaps open, on behalf of a user; the table of a connection's; open directories.

It calls the tree, but never waits. Replies and tags are the session's.
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
from mqfs.model import QTDIR, Grant, Step, User
from mqfs.net import identity
from mqfs.net.tokens import Proof
from mqfs.ninep.codec.messages import DMTMP, Dir, Entry
from mqfs.ninep.codec.wire import ENTRY, stat_bytes
from mqfs.quotas import UserLimits
from mqfs.state.file_locks import Key
from mqfs.store.api import Handle

STICKY = 0o1000  # DMTMP of others

log = logging.getLogger("mqfs.ninep")

NOWHERE = -1  # Fid.rest: no offset is to be answered with 0 bytes
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
        "writer",
        "xattr",
    )

    def __init__(self, number: int, user: User, root: Any, node: Any, fills: bool) -> None:
        self.number = number
        self.user = user
        self.root = root  # of its attach: ".." stays there
        self.node = node
        self.fills = fills  # its client repeats a read until the buffer is full (Linux v9fs)
        self.rest = NOWHERE  # the offset of such a repeated read
        self.truncated = False  # that read may be for more of the message, not only for its end
        self.handle: Handle | None = None
        self.reader: Handle | None = None  # the handle, if open for reading
        self.writer: Handle | None = None  # the handle, if open for writing
        self.listing: OpenDirectory | None = None
        self.takes = False  # its reads claim messages
        self.given = 0, b""  # of the last such reply: where it ends among all bytes replied, and its data
        self.xattr = False  # reads as the (empty) list of extended attributes
        self.nonblocking = False
        self.remove_at_close = False
        self.locked = False
        self.pending: set[int] = set()  # tags of its parked requests

    @property
    def open(self) -> bool:
        return self.handle is not None or self.listing is not None or self.xattr

    @property
    def size(self) -> int | None:
        """The size in bytes of its snapshot, if it has one open."""
        return getattr(self.handle, "size", None)

    @property
    def unfinished(self) -> bool:
        """Whether the last claimed message was not read to its end."""
        last: Any = getattr(self.reader, "last", None)
        return last is not None and bool(last.can_push_back or last.given < len(last.body))

    def clone(self, number: int, node: Any) -> Fid:
        return Fid(number, self.user, self.root, node, self.fills)

    def closed(self) -> Fid:
        """Self. Raises BadFid if it is open."""
        if self.open:
            raise BadFid(f"fid {self.number}: already open")
        return self

    def walk(self, tree: Tree, node: Any, name: str) -> Any:
        """One step from a node; ".." never leaves the attached root."""
        if name == "." or (name == ".." and node is self.root):
            return node
        return tree.walk(self.user, node, name)

    def open_node(
        self, tree: Tree, flags: int, account: Hashable, *, nonblocking: bool = False, made: bool = False
    ) -> None:
        """Open its file with flags of open(2). `made`: the file was made by this request, for this user."""
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
        """Remove its file or group from the tree."""
        node = self.node
        if node is tree.root:
            raise NotPermitted("cannot remove the root group")
        if node.removed:
            raise NotFound
        if node.directory:
            return tree.rmdir(self.user, tree.parent(node), node.name)
        return tree.unlink(self.user, tree.parent(node), node.name)

    def close(self, tree: Tree, session: int) -> None:
        """Release its locks, which are those of a session's number, and close its file."""
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
    """The fids of a connection by number, those of Tauth apart. Each counts against the user's share of `memory`."""

    def __init__(self, memory: UserLimits, account: Hashable) -> None:
        self.by_number: dict[int, Fid] = {}
        self.proofs: dict[int, Proof] = {}  # of Tauth
        self._memory, self._account = memory, account

    def grants(self) -> set[Grant | None]:
        """The grants of the tokens that its fids came with."""
        return {fid.user.grant for fid in self.by_number.values()} | {proof.grant for proof in self.proofs.values()}

    def find(self, number: int) -> Fid:
        """Raises BadFid."""
        fid = self.by_number.get(number)
        if fid is None:
            raise BadFid(f"unknown fid {number}")
        return fid

    def check_new(self, number: int) -> None:
        """Raises BadFid or OverLimit where a number cannot become a fid."""
        if number in self.by_number or number in self.proofs:
            raise BadFid(f"fid {number}: in use")
        if len(self.by_number) + len(self.proofs) >= limits.FIDS:
            raise OverLimit(f"too many fids (expected at most {limits.FIDS} of a connection)")

    def add(self, fid: Fid) -> None:
        """Add a fid of a new number. Raises OverLimit."""
        self._memory.acquire(self._account, limits.FID_BYTES)
        self.by_number[fid.number] = fid

    def add_proof(self, number: int, proof: Proof) -> None:
        """Add the fid of a Tauth. Raises BadFid, OverLimit."""
        self.check_new(number)
        self._memory.acquire(self._account, limits.FID_BYTES)
        self.proofs[number] = proof

    def remove_proof(self, number: int) -> bool:
        """Whether that was the fid of a Tauth."""
        if self.proofs.pop(number, None) is None:
            return False
        self._memory.release(self._account, limits.FID_BYTES)
        return True

    def remove(self, fid: Fid) -> None:
        del self.by_number[fid.number]
        self._memory.release(self._account, limits.FID_BYTES)

    def clear(self) -> list[Fid]:
        """Remove all. Returns them, for the caller to close."""
        fids, proofs, self.by_number, self.proofs = self.by_number, self.proofs, {}, {}
        self._memory.release(self._account, limits.FID_BYTES * (len(fids) + len(proofs)))
        return list(fids.values())


def qid_mode(mode: int, kind: int) -> int:
    """The mode of 9P2000: permissions below, the qid's type on top. A file's sticky bit is DMTMP."""
    return (mode & 0o777) | kind << 24 | (DMTMP if mode & STICKY and not kind & QTDIR else 0)


def file_mode(mode: int) -> int:
    """The mode of a file from that of 9P2000."""
    return (mode & 0o777) | (STICKY if mode & DMTMP else 0)


def stat(tree: Tree, node: Any, size: int | None = None) -> Dir:
    """A node's attributes as 9P2000 and 9P2000.u have them. `size`: of the snapshot it is open for. Raises
    NotAnswered."""
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
    """An open directory, as 9P reads it."""

    def __init__(self, listing: Listing) -> None:
        self._listing = listing
        self._next = 0
        self._offset = 0
        self._left = 0  # bytes of the last read's count that it did not fill

    def begin(self, offset: int) -> Step[None]:
        """To be done before a read there: at the beginning, read what it holds now."""
        return None if offset and self._listing.is_there else self._listing.begin()

    def close(self) -> None:
        self._listing.close()

    def read(self, tree: Tree, offset: int, count: int, unix: bool) -> bytes:
        """Whole stat entries, as many as fit; `offset` is 0 or where the last read ended.

        Too small a count is an error, except from a client that asks for the rest of its buffer (Linux v9fs): 0 bytes
        end its loop, and its next read continues here. Raises NotAnswered: then the same read is to be repeated.
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
        """Entries of 9P2000.L after the cookie `offset`, as many as fit in `count` bytes."""
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
        """The entry at an index: ".", "..", then the nodes; None where one was removed meanwhile."""
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
    """A node's entry; nothing where it was removed meanwhile. Raises NotAnswered."""
    try:
        return b"" if node.removed else stat_bytes(stat(tree, node), unix)
    except identity.NotAnswered:
        raise
    except MqfsError:
        return b""
