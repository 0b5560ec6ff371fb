"""The operations of 9P2000.L on the tree: the messages that Linux v9fs sends.

Each function checks, calls the tree, and returns the reply or a `Later`. Errors are raised, the session answers them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs

from mqfs import limits
from mqfs.engine.language.permissions import W, require_scope
from mqfs.engine.tree.attributes import disk_space
from mqfs.errors import BadFid, BadRequest, Exists, NoAttribute, NotDirectory, NotPermitted, Unsupported
from mqfs.model import Step, User
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
)  # fmt: skip
from mqfs.ninep.codec.wire import READ_OVERHEAD
from mqfs.ninep.server.fids import Fid
from mqfs.ninep.server.operations import become, directory, opened, rename_node, synced
from mqfs.ninep.server.pending import Later, later
from mqfs.state.file_locks import END, Held, Key

if TYPE_CHECKING:
    from mqfs.ninep.server.session import Session

# Flags of Tlopen and Tlcreate: Linux's numbers on every machine
O_EXCL, O_NONBLOCK, O_DIRECTORY = 0o200, 0o4000, 0o200000
V9FS_MAGIC = 0x0102_1997
BLOCK_BYTES, STAT_BLOCK_BYTES = 4_096, 512


# ---------------------------------------------------------------- opening and making


def lopen(session: Session, request: m.Tlopen) -> Fcall:
    fid = session.fids.find(request.fid).closed()
    if request.flags & O_DIRECTORY and not fid.node.directory:
        raise NotDirectory
    qid, iounit = opened(session, fid, request.flags & os.O_ACCMODE, nonblocking=bool(request.flags & O_NONBLOCK))
    return m.Rlopen(request.tag, qid, iounit)


def acting(user: User, gid: int) -> User:
    """Return the user acting with group `gid`, or unchanged if not a member of that group."""
    return attrs.evolve(user, gid=gid) if gid != user.gid and gid in user.groups else user


def lcreate(session: Session, request: m.Tlcreate) -> Fcall | Later:
    fid = session.fids.find(request.fid).closed()
    group = directory(fid)
    flags, nonblocking = request.flags & os.O_ACCMODE, bool(request.flags & O_NONBLOCK)
    made = True
    step: Step[Any]
    try:
        step = session.tree.create(acting(fid.user, request.gid), group, request.name, request.mode & 0o1777)
    except Exists:
        if request.flags & O_EXCL:
            raise
        made = False
        step = session.tree.walk(fid.user, group, request.name)

    def then(node: Any) -> Fcall:
        return m.Rlcreate(request.tag, *become(session, fid, node, flags, nonblocking=nonblocking, made=made))

    return later(step, then, calls=True)


def mkdir(session: Session, request: m.Tmkdir) -> Fcall | Later:
    fid = session.fids.find(request.dfid)
    step = session.tree.mkdir(acting(fid.user, request.gid), directory(fid), request.name, request.mode & 0o777)
    return later(step, lambda node: m.Rmkdir(request.tag, node.qid))


def mknod(session: Session, request: m.Tmknod) -> Fcall | Later:
    """Make a stream, which is a regular file here. Raises NotPermitted for any other type."""
    if stat.S_IFMT(request.mode) not in (0, stat.S_IFREG):
        raise NotPermitted("cannot create a special file (expected a stream or group)")
    fid = session.fids.find(request.fid)
    step = session.tree.create(acting(fid.user, request.gid), directory(fid), request.name, request.mode & 0o1777)
    return later(step, lambda node: m.Rmknod(request.tag, node.qid))


def symlink(session: Session, request: m.Tsymlink) -> Fcall:
    directory(session.fids.find(request.fid))
    raise NotPermitted("symbolic links are not supported")


def link(session: Session, request: m.Tlink) -> Fcall:
    directory(session.fids.find(request.dfid))
    session.fids.find(request.fid)
    raise NotPermitted("links are not supported")


def readlink(session: Session, request: m.Treadlink) -> Fcall:
    session.fids.find(request.fid)
    raise BadRequest("not a symbolic link")


# ---------------------------------------------------------------- renaming and removing


def rename(session: Session, request: m.Trename) -> Fcall | Later:
    to = directory(session.fids.find(request.dfid))
    step = rename_node(session, session.fids.find(request.fid), request.name, to)
    return later(step, lambda _: m.Rrename(request.tag))


def renameat(session: Session, request: m.Trenameat) -> Fcall | Later:
    fid = session.fids.find(request.olddirfid)
    to = directory(session.fids.find(request.newdirfid))
    step = session.tree.rename(fid.user, directory(fid), request.oldname, to, request.newname)
    return later(step, lambda _: m.Rrenameat(request.tag))


def unlinkat(session: Session, request: m.Tunlinkat) -> Fcall | Later:
    fid = session.fids.find(request.dirfd)
    take = session.tree.rmdir if request.flags & AT_REMOVEDIR else session.tree.unlink
    return later(take(fid.user, directory(fid), request.name), lambda _: m.Runlinkat(request.tag))


# ---------------------------------------------------------------- reading directories


def readdir(session: Session, request: m.Treaddir) -> Fcall | Later:
    fid = session.fids.find(request.fid)
    if (listing := fid.listing) is None:
        raise NotDirectory if fid.open else BadFid(f"fid {request.fid}: not open")
    count = min(request.count, session.negotiated.msize - READ_OVERHEAD)

    def then(_: None) -> Fcall:
        return m.Rreaddir(request.tag, listing.entries(fid, request.offset, count))

    return later(listing.begin(request.offset), then, fid=fid, calls=True)


# ---------------------------------------------------------------- attributes


def getattr_(session: Session, request: m.Tgetattr) -> Fcall:
    fid = session.fids.find(request.fid)
    it = session.tree.stat(fid.node)
    mtime, mtime_ns = divmod(it.mtime_ns, 10**9)
    ctime, ctime_ns = divmod(it.ctime_ns, 10**9)
    return m.Rgetattr(
        tag=request.tag,
        valid=GETATTR_BASIC,
        qid=it.qid,
        mode=it.mode,
        uid=it.uid,
        gid=it.gid,
        nlink=it.nlink,
        rdev=0,
        size=it.size if fid.size is None else fid.size,
        blksize=BLOCK_BYTES,
        blocks=-(-it.kept_bytes // STAT_BLOCK_BYTES),
        atime=mtime,
        atime_ns=mtime_ns,
        mtime=mtime,
        mtime_ns=mtime_ns,
        ctime=ctime,
        ctime_ns=ctime_ns,
        btime=0,
        btime_ns=0,
        gen=0,
        data_version=0,
    )


def setattr_(session: Session, request: m.Tsetattr) -> Fcall | Later:
    """Change mode, owner and group. Size and times are accepted and ignored."""
    fid = session.fids.find(request.fid)
    wanted = {"mode": (SET_MODE, request.mode & 0o1777), "uid": (SET_UID, request.uid), "gid": (SET_GID, request.gid)}
    changes = {name: value for name, (bit, value) in wanted.items() if request.valid & bit}
    step = session.tree.setattr(fid.user, fid.node, **changes) if changes else None
    return later(step, lambda _: m.Rsetattr(request.tag))


def statfs(session: Session, request: m.Tstatfs) -> Fcall:
    """Return the figures of the store's disk, as a mount shows them."""
    session.fids.find(request.fid)
    disk = disk_space(session.tree.store.path)
    return m.Rstatfs(
        tag=request.tag,
        type=V9FS_MAGIC,
        bsize=disk.f_frsize,  # the unit of the next three
        blocks=disk.f_blocks,
        bfree=disk.f_bfree,
        bavail=disk.f_bavail,
        files=disk.f_files,
        ffree=disk.f_ffree,
        fsid=0,
        namelen=limits.NAME_BYTES,
    )


def fsync(session: Session, request: m.Tfsync) -> Fcall | Later:
    fid = session.fids.find(request.fid)
    if not fid.open:
        raise BadFid(f"fid {request.fid}: not open")
    return later(synced(session, fid), lambda _: m.Rfsync(request.tag))


def xattrwalk(session: Session, request: m.Txattrwalk) -> Fcall:
    """Answer with an empty list of extended attributes. Raises NoAttribute for a named one: no file has any."""
    fid = session.fids.find(request.fid)
    if request.name:
        raise NoAttribute
    session.fids.check_new(request.newfid)
    listed = fid.clone(request.newfid, fid.node)
    listed.xattr = True
    session.fids.add(listed)
    return m.Rxattrwalk(request.tag, 0)


def xattrcreate(session: Session, request: m.Txattrcreate) -> Fcall:
    session.fids.find(request.fid)
    raise Unsupported("extended attributes")


# ---------------------------------------------------------------- locks


GRANTED, BLOCKED = 0, 1


def _lock(session: Session, fid: Fid, request: m.Tlock | m.Tgetlock) -> tuple[Key, Held]:
    if fid.handle is None and fid.listing is None:
        raise BadFid(f"fid {fid.number}: not open")
    if len(request.client_id) > limits.NAME_BYTES:
        raise BadRequest(f"client id of {len(request.client_id)} characters (expected at most {limits.NAME_BYTES})")
    end = min(request.start + request.length, END) if request.length else END  # 0: to the end of the file
    owner = (session.number, request.client_id, request.proc_id)
    exclusive, through = request.type == WRITE_LOCK, (session.number, fid.number)
    held = Held(owner, exclusive, request.start, end, request.proc_id, through, session.peer.account)
    return Key(fid.node.qid.path, False), held


def lock(session: Session, request: m.Tlock) -> Fcall:
    """Grant, refuse or release a lock at once. A client that gets BLOCKED asks again."""
    fid = session.fids.find(request.fid)
    key, wanted = _lock(session, fid, request)
    if request.type == UNLOCK:
        session.tree.locks.release(key, wanted.owner, wanted.start, wanted.end)
        return m.Rlock(request.tag, GRANTED)
    if request.type not in (READ_LOCK, WRITE_LOCK):
        raise BadRequest(f"lock type {request.type} (expected {READ_LOCK}, {WRITE_LOCK} or {UNLOCK})")
    if wanted.exclusive:  # it keeps others from reading, so it needs W; flock(2) itself locks any descriptor
        require_scope(fid.user, W, fid.node.name)
    granted = session.tree.locks.take(key, wanted, wait=False) is None
    fid.locked = fid.locked or granted
    return m.Rlock(request.tag, GRANTED if granted else BLOCKED)


def getlock(session: Session, request: m.Tgetlock) -> Fcall:
    """Return the conflicting lock, or the requested one with type UNLOCK if there is none."""
    fid = session.fids.find(request.fid)
    held = session.tree.locks.conflict(*_lock(session, fid, request))
    if held is None:
        return m.Rgetlock(request.tag, UNLOCK, *request[3:])
    length = 0 if held.end == END else held.end - held.start
    kind = WRITE_LOCK if held.exclusive else READ_LOCK
    client_id = held.owner[1] if isinstance(held.owner, tuple) else ""  # else the lock is not a 9P client's
    return m.Rgetlock(request.tag, kind, held.start, length, held.pid, client_id)


OPERATIONS: dict[type[Any], Callable[[Session, Any], Fcall | Later]] = {
    m.Tlopen: lopen,
    m.Tlcreate: lcreate,
    m.Tmkdir: mkdir,
    m.Tmknod: mknod,
    m.Tsymlink: symlink,
    m.Tlink: link,
    m.Treadlink: readlink,
    m.Trename: rename,
    m.Trenameat: renameat,
    m.Tunlinkat: unlinkat,
    m.Treaddir: readdir,
    m.Tgetattr: getattr_,
    m.Tsetattr: setattr_,
    m.Tstatfs: statfs,
    m.Tfsync: fsync,
    m.Txattrwalk: xattrwalk,
    m.Txattrcreate: xattrcreate,
    m.Tlock: lock,
    m.Tgetlock: getlock,
}
