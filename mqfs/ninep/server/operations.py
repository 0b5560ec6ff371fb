"""The operations of 9P2000 and 9P2000.u on the tree, and those that 9P2000.L shares with them.

Each function checks, calls the tree, and returns the reply or a `Later`. Errors are raised, the session answers them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from mqfs import limits
from mqfs.errors import BadFid, BadRequest, MqfsError, NoAuthentication, NotDirectory, NotFound, NotPermitted
from mqfs.model import QTDIR, Qid, Step, User
from mqfs.net import identity
from mqfs.net.tokens import Proof
from mqfs.ninep.codec import messages as m
from mqfs.ninep.codec.messages import KEEP32, KEEP64, NOFID, Fcall
from mqfs.ninep.codec.wire import IO_OVERHEAD
from mqfs.ninep.server import resumable
from mqfs.ninep.server.fids import Fid, file_mode, stat
from mqfs.ninep.server.pending import Later, both, later

if TYPE_CHECKING:
    from mqfs.ninep.server.session import Session


QTAUTH = 0x08
OEXEC, ORDONLY_BITS = 3, 3
OTRUNC, OCEXEC, ORCLOSE = 0x10, 0x20, 0x40
OAPPEND = 0x80  # Linux in 9P2000.u; every write appends here
DMDIR = 0x8000_0000
DM_SPECIAL = 0x03B0_0000  # .u: symbolic link, link, device, named pipe, socket
FILLS = (",v9fs", "!v9fs")  # marks after the aname (mount(8) accepts no comma in it): this client repeats reads


# ---------------------------------------------------------------- beginning and walking


def auth(session: Session, request: m.Tauth) -> Fcall:
    """Make the fid to which a token is written. Raises NoAuthentication unless over TCP, to a server with tokens."""
    tokens = session.peer.tokens
    if tokens is None:
        raise NoAuthentication
    if len(request.uname) > identity.NAME_BYTES:
        raise BadRequest(f"user name of {len(request.uname)} characters (expected at most {identity.NAME_BYTES})")
    where = f"{session.peer.where} {session.peer.account}"
    session.fids.add_proof(request.afid, Proof(tokens, request.uname, request.n_uname, where))
    return m.Rauth(request.tag, Qid(QTAUTH, 0, 0))


def _attached(session: Session, request: m.Tattach) -> User:
    """Return the user of an attach: the token's, or the socket's."""
    if request.afid == NOFID:
        return session.peer.attach(request.uname, request.n_uname)
    proof = session.fids.proofs.get(request.afid)
    if proof is None:
        expected = "NOFID, the server has no tokens" if session.peer.tokens is None else "that of a Tauth"
        raise BadFid(f"unknown afid {request.afid} (expected {expected})")
    grant = proof.user(request.uname, request.n_uname)
    return identity.user(grant.uid, session.peer.where, grant=grant)


def attach(session: Session, request: m.Tattach) -> Fcall | Later:
    session.fids.check_new(request.fid)
    step = session.answered(partial(_attached, session, request))
    return later(step, partial(_attach_as, session, request), calls=True, makes=request.fid)


def _attach_as(session: Session, request: m.Tattach, user: User) -> Fcall:
    session.fids.check_new(request.fid)  # again: the user may have been looked up meanwhile
    terms = session.negotiated
    path = named = request.aname.removesuffix(resumable.MARK)
    terms.resumable = terms.resumable or path != request.aname
    for mark in FILLS:
        path = path.removesuffix(mark)
    root = session.tree.find(user, path) if path.strip("/") else session.tree.root
    terms.v9fs = terms.v9fs or path != named
    fills = (terms.unix and not terms.resumable) or terms.v9fs
    session.fids.add(Fid(request.fid, user, root, root, fills))
    session.attached = True
    return m.Rattach(request.tag, root.qid)


def walk(session: Session, request: m.Twalk) -> Fcall:
    fid = session.fids.find(request.fid)
    if len(request.names) > limits.WALK_NAMES:
        raise BadRequest(f"{len(request.names)} names in one walk (expected at most {limits.WALK_NAMES})")
    if request.newfid == request.fid:
        fid.closed()
    else:
        session.fids.check_new(request.newfid)
    node = fid.node
    qids: list[Qid] = []
    for name in request.names:
        try:
            node = fid.walk(session.tree, node, name)
        except MqfsError:
            if not qids:
                raise
            return m.Rwalk(request.tag, tuple(qids))
        qids.append(node.qid)
    if request.newfid == request.fid:
        fid.node = node
    else:
        session.fids.add(fid.clone(request.newfid, node))
    return m.Rwalk(request.tag, tuple(qids))


# ---------------------------------------------------------------- opening and making


def _flags(session: Session, mode: int) -> int:
    """Return the flags of open(2) for a mode of Topen or Tcreate."""
    if mode & ~(ORDONLY_BITS | OTRUNC | OCEXEC | ORCLOSE | (OAPPEND if session.negotiated.unix else 0)):
        raise BadRequest(f"invalid open mode {mode:#x}")
    return os.O_RDONLY if mode & 3 == OEXEC else mode & 3


def opened(session: Session, fid: Fid, flags: int, *, nonblocking: bool = False, made: bool = False) -> tuple[Qid, int]:
    """Open a fid's file and return the qid and the iounit of the reply."""
    fid.open_node(session.tree, flags, session.peer.account, nonblocking=nonblocking, made=made)
    if session.negotiated.resumable and fid.reader is not None:
        fid.reader = resumable.reader_of(fid.reader, takes=fid.takes)
    if fid.writer is not None:
        fid.writer.whole_below = session.negotiated.msize - IO_OVERHEAD  # longer writes arrive in pieces of this size
    return fid.node.qid, session.negotiated.msize - IO_OVERHEAD


def open_(session: Session, request: m.Topen) -> Fcall:
    fid = session.fids.find(request.fid).closed()
    flags = _flags(session, request.mode)
    if request.mode & 3 == OEXEC:
        session.tree.access(fid.user, fid.node, os.X_OK)
    if request.mode & ORCLOSE:
        session.tree.access(fid.user, session.tree.parent(fid.node), os.W_OK)
    qid, iounit = opened(session, fid, flags)
    fid.remove_at_close = bool(request.mode & ORCLOSE)
    return m.Ropen(request.tag, qid, iounit)


def directory(fid: Fid) -> Any:
    """Return the group, or folder of a group, of a fid. Raises NotDirectory."""
    if not fid.node.directory:
        raise NotDirectory
    return fid.node


def create(session: Session, request: m.Tcreate) -> Fcall | Later:
    fid = session.fids.find(request.fid).closed()
    group = directory(fid)
    flags = _flags(session, request.mode)
    if request.perm & DM_SPECIAL:
        raise NotPermitted("cannot create a special file (expected a stream or group)")
    above = session.tree.stat(group).mode
    step: Step[Any]
    if request.perm & DMDIR:
        if flags != os.O_RDONLY:
            raise BadRequest("cannot open a group for writing")
        mode = request.perm & (~0o777 | (above & 0o777)) & 0o777
        step = session.tree.mkdir(fid.user, group, request.name, mode)
    else:
        mode = file_mode(request.perm & (~0o666 | (above & 0o666)))
        step = session.tree.create(fid.user, group, request.name, mode)

    def then(node: Any) -> Fcall:
        qid, iounit = become(session, fid, node, flags)
        fid.remove_at_close = bool(request.mode & ORCLOSE)
        return m.Rcreate(request.tag, qid, iounit)

    return later(step, then, calls=True)


def become(
    session: Session, fid: Fid, node: Any, flags: int, *, nonblocking: bool = False, made: bool = True
) -> tuple[Qid, int]:
    """Move a group's fid to a file just made in it (or found there), and open it."""
    if session.fids.by_number.get(fid.number) is not fid:
        raise BadFid(f"fid {fid.number}: clunked meanwhile")
    fid.closed()
    group, fid.node = fid.node, node
    try:
        return opened(session, fid, flags, nonblocking=nonblocking, made=made)
    except MqfsError:
        fid.node = group
        raise


# ---------------------------------------------------------------- closing and removing


def clunk(session: Session, request: m.Tclunk) -> Fcall:
    if not session.fids.remove_proof(request.fid):
        session.clunk(session.fids.find(request.fid))
    return m.Rclunk(request.tag)


def remove(session: Session, request: m.Tremove) -> Fcall | Later:
    """Remove a file. The fid is clunked even if that fails."""
    fid = session.fids.find(request.fid)
    fid.remove_at_close = False
    try:
        step = fid.remove(session.tree)
    finally:
        session.clunk(fid)
    return later(step, lambda _: m.Rremove(request.tag))


# ---------------------------------------------------------------- attributes


def stat_(session: Session, request: m.Tstat) -> Fcall | Later:
    fid = session.fids.find(request.fid)  # once: the client may clunk it while the names are looked up
    step = session.answered(partial(stat, session.tree, fid.node, fid.size))
    return later(step, lambda found: m.Rstat(request.tag, found))


def wstat(session: Session, request: m.Twstat) -> Fcall | Later:
    """Change name, mode, owner and group, all or none. Length and times are accepted and ignored."""
    fid = session.fids.find(request.fid)
    step = session.answered(partial(_changes, session, fid, request.stat))
    return later(step, partial(_change_as, session, request, fid), calls=True)


def _change_as(session: Session, request: m.Twstat, fid: Fid, changes: dict[str, int]) -> Fcall | Later:
    wanted = request.stat
    renamed = bool(wanted.name) and wanted.name != fid.node.name
    if not changes and not renamed:
        touched = any((wanted.length != KEEP64, wanted.mtime != KEEP32, wanted.atime != KEEP32, wanted.name))
        step = None if touched else synced(session, fid)
    else:
        step = _change(session, fid, wanted.name if renamed else "", changes)
    return later(step, lambda _: m.Rwstat(request.tag))


def synced(session: Session, fid: Fid) -> Step[None]:
    """Sync all that was written to a fid's group. Its writers wait for that, so it needs write permission."""
    if fid.writer is None:
        session.tree.access(fid.user, fid.node, os.W_OK)
    return session.tree.sync(fid.node)


def _changes(session: Session, fid: Fid, wanted: m.Dir) -> dict[str, int]:
    """Return the attributes that a Twstat changes, as arguments of the tree's setattr. Raises BadRequest, NotPermitted,
    NotAnswered."""
    changes = {}
    qid = fid.node.qid
    if wanted.mode != KEEP32:
        if bool(wanted.mode & DMDIR) != bool(qid.type & QTDIR):
            raise BadRequest("cannot turn a stream into a group, or a group into a stream")
        changes["mode"] = wanted.mode & 0o777 if wanted.mode & DMDIR else file_mode(wanted.mode)
    if wanted.n_gid != KEEP32:
        changes["gid"] = wanted.n_gid
    elif wanted.gid:
        changes["gid"] = identity.group_wanted(wanted.gid, fid.user)
    if wanted.n_uid != KEEP32:
        changes["uid"] = wanted.n_uid
    elif wanted.uid and wanted.uid != identity.user_name(session.tree.stat(fid.node).uid):
        raise NotPermitted("cannot change the owner by 9P2000")
    return changes


def _change(session: Session, fid: Fid, name: str, changes: dict[str, int]) -> Step[None]:
    """Rename first, which fails most often, and undo that if the other changes are refused."""
    tree, node = session.tree, fid.node
    old = node.name
    rename = partial(rename_node, session, fid)
    moved = rename(name) if name else None
    try:
        changed = tree.setattr(fid.user, node, **changes) if changes else None
    except MqfsError:
        if name:
            rename(old)
        raise
    return both(moved, changed)


def rename_node(session: Session, fid: Fid, name: str, to: Any = None) -> Step[None]:
    """Rename a fid's file, in its group or to another group (which the tree refuses)."""
    node = fid.node
    if node is session.tree.root:
        raise NotPermitted("cannot rename the root group")
    if node.removed:
        raise NotFound
    directory = session.tree.parent(node)
    return session.tree.rename(fid.user, directory, node.name, directory if to is None else to, name)


OPERATIONS: dict[type[Any], Callable[[Session, Any], Fcall | Later]] = {
    m.Tauth: auth,
    m.Tattach: attach,
    m.Twalk: walk,
    m.Topen: open_,
    m.Tcreate: create,
    m.Tclunk: clunk,
    m.Tremove: remove,
    m.Tstat: stat_,
    m.Twstat: wstat,
}
