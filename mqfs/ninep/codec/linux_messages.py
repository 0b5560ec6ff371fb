"""The messages of 9P2000.L that the other dialects do not have: fields as in messages.py."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from mqfs.ninep.codec.messages import U8, U16, U32, U64, Ident, LateU32, Mode, Name, Text

AT_REMOVEDIR = 0x200  # of Tunlinkat
GETATTR_BASIC = 0x7FF  # all that Tgetattr has
SET_MODE, SET_UID, SET_GID = 1, 2, 4  # of Tsetattr: which fields are valid
READ_LOCK, WRITE_LOCK, UNLOCK = 0, 1, 2  # types of Tlock and Tgetlock


class Entry(NamedTuple):
    """One entry of a directory in 9P2000.L. `offset` is where the next one begins."""

    qid: Ident
    offset: U64
    type: U8
    name: Name


Entries = Annotated[tuple[Entry, ...], "entries"]


class Rlerror(NamedTuple):
    tag: U16
    ecode: U32


class Tstatfs(NamedTuple):
    tag: U16
    fid: U32


class Rstatfs(NamedTuple):
    tag: U16
    type: U32
    bsize: U32
    blocks: U64
    bfree: U64
    bavail: U64
    files: U64
    ffree: U64
    fsid: U64
    namelen: U32


class Tlopen(NamedTuple):
    tag: U16
    fid: U32
    flags: Mode


class Rlopen(NamedTuple):
    tag: U16
    qid: Ident
    iounit: U32


class Tlcreate(NamedTuple):
    tag: U16
    fid: U32
    name: Name
    flags: Mode
    mode: Mode
    gid: U32


class Rlcreate(NamedTuple):
    tag: U16
    qid: Ident
    iounit: U32


class Tsymlink(NamedTuple):
    tag: U16
    fid: U32
    name: Name
    target: Name
    gid: U32


class Rsymlink(NamedTuple):
    tag: U16
    qid: Ident


class Tmknod(NamedTuple):
    tag: U16
    fid: U32
    name: Name
    mode: Mode
    major: U32
    minor: U32
    gid: U32


class Rmknod(NamedTuple):
    tag: U16
    qid: Ident


class Trename(NamedTuple):
    tag: U16
    fid: U32
    dfid: U32
    name: Name


class Rrename(NamedTuple):
    tag: U16


class Treadlink(NamedTuple):
    tag: U16
    fid: U32


class Rreadlink(NamedTuple):
    tag: U16
    target: Name


class Tgetattr(NamedTuple):
    tag: U16
    fid: U32
    mask: U64


class Rgetattr(NamedTuple):
    tag: U16
    valid: U64
    qid: Ident
    mode: Mode
    uid: U32
    gid: U32
    nlink: U64
    rdev: U64
    size: U64
    blksize: U64
    blocks: U64
    atime: U64
    atime_ns: U64
    mtime: U64
    mtime_ns: U64
    ctime: U64
    ctime_ns: U64
    btime: U64
    btime_ns: U64
    gen: U64
    data_version: U64


class Tsetattr(NamedTuple):
    tag: U16
    fid: U32
    valid: U32
    mode: Mode
    uid: U32
    gid: U32
    size: U64
    atime: U64
    atime_ns: U64
    mtime: U64
    mtime_ns: U64


class Rsetattr(NamedTuple):
    tag: U16


class Txattrwalk(NamedTuple):
    tag: U16
    fid: U32
    newfid: U32
    name: Name


class Rxattrwalk(NamedTuple):
    tag: U16
    size: U64


class Txattrcreate(NamedTuple):
    tag: U16
    fid: U32
    name: Name
    size: U64
    flags: U32


class Rxattrcreate(NamedTuple):
    tag: U16


class Treaddir(NamedTuple):
    tag: U16
    fid: U32
    offset: U64
    count: U32  # type: ignore[assignment]  # hides tuple.count


class Rreaddir(NamedTuple):
    tag: U16
    entries: Entries


class Tfsync(NamedTuple):
    tag: U16
    fid: U32
    datasync: LateU32 = 0


class Rfsync(NamedTuple):
    tag: U16


class Tlock(NamedTuple):
    tag: U16
    fid: U32
    type: U8
    flags: U32
    start: U64
    length: U64
    proc_id: U32
    client_id: Text


class Rlock(NamedTuple):
    tag: U16
    status: U8


class Tgetlock(NamedTuple):
    tag: U16
    fid: U32
    type: U8
    start: U64
    length: U64
    proc_id: U32
    client_id: Text


class Rgetlock(NamedTuple):
    tag: U16
    type: U8
    start: U64
    length: U64
    proc_id: U32
    client_id: Text


class Tlink(NamedTuple):
    tag: U16
    dfid: U32
    fid: U32
    name: Name


class Rlink(NamedTuple):
    tag: U16


class Tmkdir(NamedTuple):
    tag: U16
    dfid: U32
    name: Name
    mode: Mode
    gid: U32


class Rmkdir(NamedTuple):
    tag: U16
    qid: Ident


class Trenameat(NamedTuple):
    tag: U16
    olddirfid: U32
    oldname: Name
    newdirfid: U32
    newname: Name


class Rrenameat(NamedTuple):
    tag: U16


class Tunlinkat(NamedTuple):
    tag: U16
    dirfd: U32
    name: Name
    flags: U32


class Runlinkat(NamedTuple):
    tag: U16
