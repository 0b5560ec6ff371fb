"""Every message of 9P2000, 9P2000.u and 9P2000.L as a plain value.

A class has the names, order and kinds of a message's fields. Bytes are in wire.py, text in notation.py, meaning in
session.py. A field's kind is its annotation: `U32` is an int that is four bytes on the wire. Fields annotated `Unix...`
exist in 9P2000.u and 9P2000.L only, and so have a default. Those of 9P2000.L that the other dialects do not have come
last.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple, Protocol

from mqfs.model import Qid
from mqfs.net.identity import NONUNAME

U8 = Annotated[int, "u8"]
U16 = Annotated[int, "u16"]
U32 = Annotated[int, "u32"]
U64 = Annotated[int, "u64"]
Text = Annotated[str, "text"]  # must be UTF-8
Name = Annotated[str, "name"]  # one file name; bytes that are not UTF-8 become surrogates, which the tree refuses
Names = Annotated[tuple[str, ...], "names"]
Ident = Annotated[Qid, "qid"]
Idents = Annotated[tuple[Qid, ...], "qids"]
Data = Annotated[bytes, "data"]
Mode = Annotated[int, "mode"]  # four bytes, shown in octal
UnixU32 = Annotated[int, "u32", "unix"]
UnixText = Annotated[str, "text", "unix"]
LateU32 = Annotated[int, "u32", "late"]  # fields that older clients omit

NOTAG = 0xFFFF
NOFID = 0xFFFF_FFFF
KEEP16, KEEP32, KEEP64 = 0xFFFF, 0xFFFF_FFFF, 0xFFFF_FFFF_FFFF_FFFF  # of a Twstat: leave the attribute as it is
DMTMP = 0x0400_0000  # a mode bit: temporary file


class Fcall(Protocol):
    """Any of the messages below."""

    @property
    def tag(self) -> int: ...


class Dir(NamedTuple):
    """A file's attributes in 9P2000 and 9P2000.u. In a Twstat, all bits set or an empty text leave one as it is."""

    type: U16
    dev: U32
    qid: Ident
    mode: Mode
    atime: U32
    mtime: U32
    length: U64
    name: Name
    uid: Text
    gid: Text
    muid: Text
    extension: UnixText = ""
    n_uid: UnixU32 = NONUNAME
    n_gid: UnixU32 = NONUNAME
    n_muid: UnixU32 = NONUNAME


Stats = Annotated[Dir, "stat"]


class Tversion(NamedTuple):
    tag: U16
    msize: U32
    version: Text


class Rversion(NamedTuple):
    tag: U16
    msize: U32
    version: Text


class Tauth(NamedTuple):
    tag: U16
    afid: U32
    uname: Text
    aname: Text
    n_uname: UnixU32 = NONUNAME


class Rauth(NamedTuple):
    tag: U16
    aqid: Ident


class Tattach(NamedTuple):
    tag: U16
    fid: U32
    afid: U32
    uname: Text
    aname: Text
    n_uname: UnixU32 = NONUNAME


class Rattach(NamedTuple):
    tag: U16
    qid: Ident


class Rerror(NamedTuple):
    tag: U16
    ename: Text
    errno: UnixU32 = 0


class Tflush(NamedTuple):
    tag: U16
    oldtag: U16


class Rflush(NamedTuple):
    tag: U16


class Twalk(NamedTuple):
    tag: U16
    fid: U32
    newfid: U32
    names: Names


class Rwalk(NamedTuple):
    tag: U16
    qids: Idents


class Topen(NamedTuple):
    tag: U16
    fid: U32
    mode: U8


class Ropen(NamedTuple):
    tag: U16
    qid: Ident
    iounit: U32


class Tcreate(NamedTuple):
    tag: U16
    fid: U32
    name: Name
    perm: Mode
    mode: U8
    extension: UnixText = ""


class Rcreate(NamedTuple):
    tag: U16
    qid: Ident
    iounit: U32


class Tread(NamedTuple):
    tag: U16
    fid: U32
    offset: U64
    count: U32  # type: ignore[assignment]  # hides tuple.count


class Rread(NamedTuple):
    tag: U16
    data: Data


class Twrite(NamedTuple):
    tag: U16
    fid: U32
    offset: U64
    data: Data


class Rwrite(NamedTuple):
    tag: U16
    count: U32  # type: ignore[assignment]  # hides tuple.count


class Tclunk(NamedTuple):
    tag: U16
    fid: U32


class Rclunk(NamedTuple):
    tag: U16


class Tremove(NamedTuple):
    tag: U16
    fid: U32


class Rremove(NamedTuple):
    tag: U16


class Tstat(NamedTuple):
    tag: U16
    fid: U32


class Rstat(NamedTuple):
    tag: U16
    stat: Stats


class Twstat(NamedTuple):
    tag: U16
    fid: U32
    stat: Stats


class Rwstat(NamedTuple):
    tag: U16


# ------------------------------------------------------------ 9P2000.L


AT_REMOVEDIR = 0x200  # a flag of Tunlinkat
GETATTR_BASIC = 0x7FF  # the attributes of stat(2); not btime, gen and data_version
SET_MODE, SET_UID, SET_GID = 1, 2, 4  # bits of Tsetattr's `valid`
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
