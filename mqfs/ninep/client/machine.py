"""The client's half of a 9P connection, without I/O: requests → bytes, bytes → replies by tag.

Owns tags, fids and what a client does step by step, in all three dialects. A procedure is a generator that yields
requests and is sent their replies (or thrown the error they carry); the trio client and the blocking client drive the
same ones. It imports nothing of the engine.
"""

from __future__ import annotations

import os
import stat as modes
from collections.abc import Generator
from typing import Any, TypeVar

import attrs

from mqfs import limits
from mqfs.errors import BadFrame, BadRequest, Denied, MqfsError, NotFound, OverLimit, TooLong, Unsupported
from mqfs.model import QTDIR, Qid, Stat
from mqfs.net import identity
from mqfs.net.identity import NONUNAME
from mqfs.ninep.codec import linux_messages as linux
from mqfs.ninep.codec import messages as m
from mqfs.ninep.codec.dialect import Dialect, raised
from mqfs.ninep.codec.messages import NOFID, NOTAG, Fcall
from mqfs.ninep.codec.numbers import NUMBERS, TYPES
from mqfs.ninep.codec.wire import (
    IO_OVERHEAD,
    R_READ,
    R_WRITE,
    READ_HEADER,
    READ_OVERHEAD,
    RWRITE,
    T_READ,
    T_WRITE,
    TREAD,
    WRITE_HEADER,
    Framer,
    Reader,
    decode,
    encode,
)

T = TypeVar("T")
Procedure = Generator[Fcall, Any, T]

O_NONBLOCK = 0o4000
KEEP16, KEEP32, KEEP64 = 0xFFFF, 0xFFFF_FFFF, 0xFFFF_FFFF_FFFF_FFFF
_SECOND_NS = 10**9


class ClientMachine:
    """Requests and replies of one connection."""

    def __init__(self, dialect: Dialect = Dialect.PLAIN, msize: int = limits.MSIZE_DEFAULT) -> None:
        self.dialect, self.msize = dialect, msize
        self._framer = Framer(msize)
        self._out: list[bytes] = []
        self._asked: set[int] = set()  # tags not answered
        self._about: dict[int, int] = {}  # of each Tflush not answered, the tag it gives up
        self._flushed: set[int] = set()  # those tags
        self._free_tags: list[int] = []
        self._next_tag = 0
        self._free_fids: list[int] = []
        self._next_fid = 1
        self.root = 0  # the fid of the attach

    # ------------------------------------------------------------ requests

    def call(self, request: Fcall) -> int:
        """Queue a request; its own tag is replaced by the one that is returned."""
        tag = NOTAG if type(request) is m.Tversion else self._tag()
        self._asked.add(tag)
        if type(request) is m.Tread:
            self._out.append(TREAD.pack(TREAD.size, T_READ, tag, request.fid, request.offset, request.count))
        elif type(request) is m.Twrite:
            size = WRITE_HEADER.size + len(request.data)
            head = WRITE_HEADER.pack(size, T_WRITE, tag, request.fid, request.offset, len(request.data))
            self._out.append(head + request.data)
        else:
            self._out.append(encode(request._replace(tag=tag), self.dialect.unix))  # type: ignore[attr-defined]
        return tag

    def flush(self, tag: int) -> int:
        """Give up a request: its reply may still come, but not after that to the tag returned."""
        flush = self._tag()
        self._asked.add(flush)
        self._about[flush] = tag
        self._flushed.add(tag)
        self._out.append(encode(m.Tflush(flush, tag), self.dialect.unix))
        return flush

    def take(self) -> bytes:
        """The requests so far, to be sent."""
        out, self._out = self._out, []
        return b"".join(out)

    def _tag(self) -> int:
        if self._free_tags:
            return self._free_tags.pop()
        if self._next_tag >= limits.TAGS:
            raise OverLimit(f"{limits.TAGS} requests are unanswered")
        self._next_tag += 1
        return self._next_tag - 1

    def fid(self) -> int:
        """A fid that is not in use."""
        if self._free_fids:
            return self._free_fids.pop()
        self._next_fid += 1
        return self._next_fid - 1

    def free_fid(self, fid: int) -> None:
        self._free_fids.append(fid)

    # ------------------------------------------------------------ replies

    @property
    def missing(self) -> int:
        return self._framer.missing

    def receive(self, data: bytes) -> list[tuple[int, Fcall]]:
        """The replies that are complete, with their tags. BadFrame: nothing more can be understood."""
        replies = []
        for buffer, start, size in self._framer.frames(data):
            number = buffer[start + 4]
            reply: Fcall
            if number == R_READ and size >= READ_OVERHEAD:
                _, _, tag, length = READ_HEADER.unpack_from(buffer, start)
                if length != size - READ_OVERHEAD:
                    raise BadFrame(f"an Rread of {length} bytes in a frame of {size}")
                reply = m.Rread(tag, bytes(memoryview(buffer)[start + READ_OVERHEAD : start + size]))
            elif number == R_WRITE and size == RWRITE.size:
                reply = m.Rwrite(*RWRITE.unpack_from(buffer, start)[2:])
            else:
                reply = decode(buffer, start, size, self.dialect.unix)
            if not number & 1 or reply.tag not in self._asked:
                raise BadFrame(f"{type(reply).__name__} of tag {reply.tag}, which nobody asked for")
            self._answered(reply.tag)
            replies.append((reply.tag, reply))
        return replies

    def _answered(self, tag: int) -> None:
        """A tag is free again when it was answered, but one that is being flushed only after its Rflush."""
        self._asked.discard(tag)
        if tag in self._flushed:
            return
        old = self._about.pop(tag, None)
        if old is not None:
            self._asked.discard(old)
            self._flushed.discard(old)
            self._free_tags.append(old)
        if tag != NOTAG:
            self._free_tags.append(tag)

    # ------------------------------------------------------------ procedures: the beginning

    def connect(self, user: str, aname: str = "", token: str = "") -> Procedure[None]:
        """Agree on version and size, and attach: as the user that the token is for, if there is one."""
        agreed = yield m.Tversion(NOTAG, self.msize, self.dialect.version)
        if agreed.version != self.dialect.version:
            raise Unsupported(f"the server speaks {agreed.version}, not {self.dialect.version}")
        if not limits.MSIZE_LEAST <= agreed.msize <= self.msize:
            raise BadRequest(f"the server offers msize {agreed.msize}")
        self.msize = self._framer.msize = agreed.msize
        if token:
            yield from self._attach_by_token(user, aname, token)
            return
        uid = identity.user_number(user) if user else os.geteuid()
        name = user or identity.user_name(os.geteuid())
        yield m.Tattach(0, self.root, NOFID, name, aname, NONUNAME if uid is None else uid)

    def _attach_by_token(self, user: str, aname: str, token: str) -> Procedure[None]:
        """Without a user it is the token that says who this is."""
        uid = identity.user_number(user) if user else None
        number = NONUNAME if uid is None else uid
        afid = self.fid()
        try:
            yield m.Tauth(0, afid, user, aname, number)
        except MqfsError as error:
            raise Denied(
                f"the server takes no tokens ({error}); without one, or with --token-file there, is right"
            ) from None
        yield m.Twrite(0, afid, 0, token.encode())
        yield m.Tattach(0, self.root, afid, user, aname, number)
        yield from self.clunk(afid)

    def walk(self, path: str) -> Procedure[int]:
        """A new fid for what is at a path from the root."""
        names = [name for name in path.split("/") if name not in ("", ".")]
        fid = self.fid()
        done = False
        try:
            for at in range(0, len(names) or 1, limits.WALK_NAMES):
                part = tuple(names[at : at + limits.WALK_NAMES])
                reply = yield m.Twalk(0, fid if at else self.root, fid, part)
                if len(reply.qids) < len(part):
                    raise NotFound("/".join(names[: at + len(reply.qids) + 1]))
                done = True
        except MqfsError:
            if done:
                yield m.Tclunk(0, fid)
            self.free_fid(fid)
            raise
        return fid

    def clunk(self, fid: int) -> Procedure[None]:
        try:
            yield m.Tclunk(0, fid)
        finally:
            self.free_fid(fid)

    def _with_fid(self, path: str, procedure: Any) -> Procedure[Any]:
        """Walk, do something with the fid, clunk it."""
        fid = yield from self.walk(path)
        try:
            value = yield from procedure(fid)
        except MqfsError:
            yield from self.clunk(fid)
            raise
        yield from self.clunk(fid)
        return value

    # ------------------------------------------------------------ procedures: files

    def open(self, path: str, flags: int, *, nonblocking: bool = False) -> Procedure[Channel]:
        """Open what is there; `flags` is os.O_RDONLY, O_WRONLY or O_RDWR."""
        fid = yield from self.walk(path)
        try:
            if self.dialect.linux:
                reply = yield linux.Tlopen(0, fid, flags | (O_NONBLOCK if nonblocking else 0))
            elif nonblocking:
                raise Unsupported(f"{self.dialect.version} has no way to say that a read shall not wait")
            else:
                reply = yield m.Topen(0, fid, flags)
        except MqfsError:
            yield from self.clunk(fid)
            raise
        return Channel(self, fid, reply.qid)

    def create(self, path: str, flags: int, mode: int = 0o666) -> Procedure[Channel]:
        """Make a stream and open it; Exists where there is one."""
        group, _, name = path.rstrip("/").rpartition("/")
        fid = yield from self.walk(group)
        try:
            if self.dialect.linux:
                reply = yield linux.Tlcreate(0, fid, name, flags | os.O_CREAT | os.O_EXCL, mode, os.getegid())
            else:
                reply = yield m.Tcreate(0, fid, name, mode, flags)
        except MqfsError:
            yield from self.clunk(fid)
            raise
        return Channel(self, fid, reply.qid)

    def mkdir(self, path: str, mode: int = 0o777) -> Procedure[None]:
        group, _, name = path.rstrip("/").rpartition("/")

        def make(fid: int) -> Procedure[None]:
            if self.dialect.linux:
                yield linux.Tmkdir(0, fid, name, mode, os.getegid())
            else:
                yield m.Tcreate(0, fid, name, m_dmdir(mode), os.O_RDONLY)

        yield from self._with_fid(group, make)

    def remove(self, path: str) -> Procedure[None]:
        """Remove a stream or an empty group."""
        fid = yield from self.walk(path)
        try:
            yield m.Tremove(0, fid)
        finally:
            self.free_fid(fid)

    def rename(self, path: str, name: str) -> Procedure[None]:
        """Another name in the same group."""
        group, _, _ = path.rstrip("/").rpartition("/")

        def give(fid: int) -> Procedure[None]:
            if not self.dialect.linux:
                yield m.Twstat(0, fid, unchanged()._replace(name=name))
                return
            above = yield from self.walk(group)
            try:
                yield linux.Trename(0, fid, above, name)
            finally:
                yield from self.clunk(above)

        yield from self._with_fid(path, give)

    def chmod(self, path: str, mode: int) -> Procedure[None]:
        """Other permissions."""
        kind = (yield from self.stat(path)).qid.type

        def give(fid: int) -> Procedure[None]:
            if self.dialect.linux:
                yield linux.Tsetattr(0, fid, 1, mode, 0, 0, 0, 0, 0, 0, 0)
            else:
                yield m.Twstat(0, fid, unchanged()._replace(mode=mode | kind << 24))

        yield from self._with_fid(path, give)

    # ------------------------------------------------------------ procedures: attributes

    def stat(self, path: str) -> Procedure[Stat]:
        def ask(fid: int) -> Procedure[Stat]:
            if self.dialect.linux:
                reply = yield linux.Tgetattr(0, fid, 0x7FF)
                return stat_of_attributes(reply, path.rstrip("/").rpartition("/")[2] or "/")
            reply = yield m.Tstat(0, fid)
            return stat_of_dir(reply.stat)

        it: Stat = yield from self._with_fid(path, ask)
        return it

    def names(self, path: str) -> Procedure[list[str]]:
        """The names in a group, "." and ".." aside."""

        def read(fid: int) -> Procedure[list[str]]:
            if self.dialect.linux:
                yield linux.Tlopen(0, fid, os.O_RDONLY)
                return (yield from self._read_entries(fid))
            yield m.Topen(0, fid, os.O_RDONLY)
            return (yield from self._read_stats(fid))

        names: list[str] = yield from self._with_fid(path, read)
        return names

    def _read_entries(self, fid: int) -> Procedure[list[str]]:
        names: list[str] = []
        offset = 0
        while True:
            entries = (yield linux.Treaddir(0, fid, offset, self.msize - READ_OVERHEAD)).entries
            if not entries:
                return [name for name in names if name not in (".", "..")]
            names += (entry.name for entry in entries)
            offset = entries[-1].offset

    def _read_stats(self, fid: int) -> Procedure[list[str]]:
        names: list[str] = []
        offset = 0
        while True:
            data = (yield m.Tread(0, fid, offset, self.msize - IO_OVERHEAD)).data
            if not data:
                return names
            reader = Reader(data, 0, len(data), self.dialect.unix)
            while reader.position < reader.end:
                names.append(reader.entry().name)
            offset += len(data)


@attrs.define(eq=False)
class Channel:
    """An open file of the client: where its next read and write go, and what a flush left over."""

    caller: ClientMachine
    fid: int
    qid: Qid
    offset: int = 0
    kept: bytes | None = None  # a message that came although its read was given up
    short: bool = False  # the last read filled less than was asked for

    @property
    def most(self) -> int:
        """The largest message that can be written."""
        return self.caller.msize - IO_OVERHEAD

    def _ask(self, count: int) -> m.Tread:
        count = min(count, self.caller.msize - READ_OVERHEAD)
        if count == self.most:
            count -= 1  # the server would take it for one that v9fs has cut, and expect another
        return m.Tread(0, self.fid, self.offset, count)

    def read(self, count: int) -> Procedure[bytes]:
        """The next message, or what there is of it; b"" at an end."""
        if self.kept is not None:
            return self.take_kept(count)
        request = self._ask(count)
        data: bytes = (yield request).data
        if not data and self.short and self.caller.dialect.unix:
            # The end that a server gives to clients which read until their buffer is full: ask again.
            data = (yield request).data
        self.took(len(data), request.count)
        return data

    def take_kept(self, count: int) -> bytes:
        kept = self.kept or b""
        self.kept = kept[count:] or None
        return kept[:count]

    def took(self, length: int, count: Any) -> None:
        self.offset += length
        self.short = 0 < length < count

    def keep(self, reply: Fcall) -> None:
        """The reply of a read that was given up too late: the next read returns it."""
        if isinstance(reply, m.Rread):
            self.kept = reply.data
            self.took(len(reply.data), self.caller.msize)

    def write(self, data: bytes) -> Procedure[int]:
        """One message."""
        if len(data) > self.most:
            raise TooLong(f"{len(data)} bytes; with this msize {self.most} is right")
        reply = yield m.Twrite(0, self.fid, self.offset, data)
        return int(reply.count)


def check(reply: Fcall) -> Fcall:
    """A reply that is not a refusal."""
    if isinstance(reply, (m.Rerror, linux.Rlerror)):
        raise raised(reply)
    return reply


def expect(request: Fcall, reply: Fcall) -> Fcall:
    """The reply to a request, or the error it carries."""
    check(reply)
    if type(reply) is not TYPES[NUMBERS[type(request)] + 1]:
        raise BadFrame(f"{type(reply).__name__} in answer to {type(request).__name__}")
    return reply


def unchanged() -> m.Dir:
    """The stat of a Twstat that changes nothing."""
    qid = Qid(0xFF, KEEP32, KEEP64)
    return m.Dir(KEEP16, KEEP32, qid, KEEP32, KEEP32, KEEP32, KEEP64, "", "", "", "")


def m_dmdir(mode: int) -> int:
    return mode | QTDIR << 24


def _kind(qid: Qid) -> int:
    return modes.S_IFDIR if qid.type & QTDIR else modes.S_IFREG


def stat_of_dir(it: m.Dir) -> Stat:
    """The attributes in a stat of 9P2000 or 9P2000.u; a user that is only named is looked up, -1 if not known."""
    uid = identity.user_number(it.uid) if it.n_uid == NONUNAME else it.n_uid
    gid = identity.group_number(it.gid) if it.n_gid == NONUNAME else it.n_gid
    uid, gid = -1 if uid is None else uid, -1 if gid is None else gid
    mtime = it.mtime * _SECOND_NS
    return Stat(it.qid, it.mode & 0o777 | _kind(it.qid), uid, gid, it.length, 0, 1, mtime, mtime, it.name)


def stat_of_attributes(it: linux.Rgetattr, name: str) -> Stat:
    mtime, ctime = it.mtime * _SECOND_NS + it.mtime_ns, it.ctime * _SECOND_NS + it.ctime_ns
    return Stat(it.qid, it.mode, it.uid, it.gid, it.size, it.blocks * 512, it.nlink, mtime, ctime, name)
