"""The client side of a 9P connection without I/O: requests to bytes, bytes to replies by tag.

The machine allocates tags and fids, and has the procedures of a client in all three dialects. A procedure is a
generator: it yields requests, and is sent their replies or thrown their errors. An open fid is a channel, whose reads
and writes are procedures, too. Imports nothing of the engine.
"""

from __future__ import annotations

import os
import stat as modes
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

import attrs

from mqfs import limits
from mqfs.errors import BadFrame, BadRequest, Denied, MqfsError, NotFound, OverLimit, TooLong, Unsupported
from mqfs.model import QTDIR, Qid, Stat
from mqfs.net import challenge, identity
from mqfs.net.identity import NONUNAME
from mqfs.ninep.codec import messages as m
from mqfs.ninep.codec.messages import DMTMP, KEEP16, KEEP32, KEEP64, NOFID, NOTAG, Fcall
from mqfs.ninep.codec.wire import (
    IO_OVERHEAD,
    NUMBERS,
    R_READ,
    R_WRITE,
    READ_HEADER,
    READ_OVERHEAD,
    RWRITE,
    T_READ,
    T_WRITE,
    TREAD,
    TYPES,
    WRITE_HEADER,
    Dialect,
    Framer,
    Reader,
    decode,
    encode,
    raised,
)

T = TypeVar("T")
Procedure = Generator[Fcall, Any, T]
MODES = {"r": os.O_RDONLY, "w": os.O_WRONLY, "r+": os.O_RDWR}


def flags_of(mode: str) -> int:
    """Return the flags of open(2) for "r", "w" or "r+" ("b" may follow). Raises BadRequest."""
    plain = mode.replace("b", "")
    if plain not in MODES:
        raise BadRequest(f"invalid open mode {mode!r} (expected {', '.join(MODES)})")
    return MODES[plain]


@attrs.define(eq=False)
class Channel:
    """An open fid: its offset, and a message that arrived for a flushed read."""

    fid: int
    qid: Qid
    msize: int  # as agreed with the server
    unix: bool  # the dialect is 9P2000.u or 9P2000.L
    offset: int = 0
    kept: bytes | None = None  # data of a read that was answered in spite of its flush
    short: bool = False  # the last read returned less than its count
    is_clunked: bool = False  # or about to be: the fid may be another file's
    most: int = attrs.field(init=False)  # the largest message that can be written, in bytes

    @most.default
    def _most(self) -> int:
        return self.msize - IO_OVERHEAD

    def read_request(self, count: int) -> m.Tread:
        """Return the request that reads up to `count` bytes."""
        count = min(count, self.msize - READ_OVERHEAD)
        if count == self.most:
            count -= 1  # a server takes this count for a read that v9fs has clipped, and expects another
        return m.Tread(0, self.fid, self.offset, count)

    def read(self, count: int) -> Procedure[bytes]:
        """Read the next message or a part of it; b"" at the end."""
        if self.kept is not None:
            return self.take_kept(count)
        request = self.read_request(count)
        data: bytes = (yield request).data
        while self.took(len(data), request.count):
            data = (yield request).data
        return data

    def take_kept(self, count: int) -> bytes:
        kept = self.kept or b""
        self.kept = kept[count:] or None
        return kept[:count]

    def took(self, length: int, count: Any) -> bool:
        """Record a read. Return whether to read again, after a false end-of-file: clients that read until their buffer
        is full get one."""
        is_false_end = self.unix and self.short and not length
        self.offset += length
        self.short = 0 < length < count
        return is_false_end

    def keep(self, reply: Fcall | None, offset: int) -> None:
        """Keep a reply that came in spite of the read's flush, for the next read. `offset`: of that read."""
        if isinstance(reply, m.Rread):
            self.kept, self.offset = reply.data, offset
            self.took(len(reply.data), self.msize)

    def request(self, data: bytes) -> m.Twrite:
        """Return the request that writes one message. Raises TooLong."""
        if len(data) > self.most:
            raise TooLong(f"message of {len(data)} bytes (expected at most {self.most} by the connection's msize)")
        return m.Twrite(0, self.fid, self.offset, data)

    def write(self, data: bytes) -> Procedure[int]:
        """Write one message. Return the number of bytes written."""
        reply = yield self.request(data)
        return int(reply.count)


# ------------------------------------------------------------ the connection


O_NONBLOCK = 0o4000
_SECOND_NS = 10**9


class ClientMachine:
    """Requests and replies of one connection."""

    def __init__(self, dialect: Dialect = Dialect.PLAIN, msize: int = limits.MSIZE_DEFAULT) -> None:
        self.dialect, self.msize = dialect, msize
        self._framer = Framer(msize)
        self._out: list[bytes] = []
        self._unanswered: set[int] = set()  # tags
        self._about: dict[int, int] = {}  # the tag of each unanswered Tflush: the tag that it flushes
        self._flushed: set[int] = set()  # tags that are being flushed
        self._free_tags: list[int] = []
        self._next_tag = 0
        self._free_fids: list[int] = []
        self._next_fid = 1
        self.root = 0  # the fid of the attach

    # ------------------------------------------------------------ requests

    def call(self, request: Fcall) -> int:
        """Queue a request and return its tag, which replaces the request's own. Raises OverLimit."""
        [tag] = self.call_all([request])
        return tag

    def _queue(self, request: Fcall) -> int:
        tag = NOTAG if type(request) is m.Tversion else self._tag()
        self._unanswered.add(tag)
        if type(request) is m.Tread:
            self._out.append(TREAD.pack(TREAD.size, T_READ, tag, request.fid, request.offset, request.count))
        elif type(request) is m.Twrite:
            size = WRITE_HEADER.size + len(request.data)
            head = WRITE_HEADER.pack(size, T_WRITE, tag, request.fid, request.offset, len(request.data))
            self._out.append(head + request.data)
        else:
            self._out.append(encode(request._replace(tag=tag), self.dialect.unix))  # type: ignore[attr-defined]
        return tag

    def call_all(self, requests: Sequence[Fcall]) -> list[int]:
        """Queue all requests, or none, and return their tags. Raises OverLimit."""
        if len(requests) > len(self._free_tags) + limits.TAGS - self._next_tag:
            raise OverLimit(f"{limits.TAGS} unanswered requests (expected fewer)")
        return list(map(self._queue, requests))

    def flush(self, tag: int) -> int:
        """Queue a Tflush of a request and return the flush's tag.

        The request may still be answered, but not after the Rflush. TAGS limits requests only: when all tags are in
        use, each request can still be flushed once.
        """
        flush = self._tag()
        self._unanswered.add(flush)
        self._about[flush] = tag
        self._flushed.add(tag)
        self._out.append(encode(m.Tflush(flush, tag), self.dialect.unix))
        return flush

    def take(self) -> bytes:
        """Return and remove the queued requests, to be sent."""
        out, self._out = self._out, []
        return b"".join(out)

    def _tag(self) -> int:
        if self._free_tags:
            return self._free_tags.pop()
        self._next_tag += 1
        return self._next_tag - 1

    def fid(self) -> int:
        """Allocate a fid."""
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
        """Return the complete replies, with their tags. After BadFrame the connection is unusable."""
        replies = []
        for buffer, start, size in self._framer.frames(data):
            number = buffer[start + 4]
            reply: Fcall
            if number == R_READ and size >= READ_OVERHEAD:
                _, _, tag, length = READ_HEADER.unpack_from(buffer, start)
                if length != size - READ_OVERHEAD:
                    raise BadFrame(f"invalid Rread: {length} bytes in a frame of {size}")
                reply = m.Rread(tag, bytes(memoryview(buffer)[start + READ_OVERHEAD : start + size]))
            elif number == R_WRITE and size == RWRITE.size:
                reply = m.Rwrite(*RWRITE.unpack_from(buffer, start)[2:])
            else:
                reply = decode(buffer, start, size, self.dialect.unix)
            if not number & 1 or reply.tag not in self._unanswered:
                raise BadFrame(f"unexpected {type(reply).__name__} (expected no answer with tag {reply.tag})")
            self._answered(reply.tag)
            replies.append((reply.tag, reply))
        return replies

    def _answered(self, tag: int) -> None:
        """Free a tag. A tag that is being flushed is freed only at the Rflush."""
        self._unanswered.discard(tag)
        if tag in self._flushed:
            return
        old = self._about.pop(tag, None)
        if old is not None:
            self._unanswered.discard(old)
            self._flushed.discard(old)
            self._free_tags.append(old)
        if tag != NOTAG:
            self._free_tags.append(tag)

    # ------------------------------------------------------------ procedures: attach, walk, clunk

    def connect(self, user: str, aname: str = "", token: str = "", *, private: bool = True) -> Procedure[None]:
        """Agree on version and msize, and attach; with a token, as the token's user. `private`: only the server can
        read the connection, so the token itself may be sent."""
        agreed = yield m.Tversion(NOTAG, self.msize, self.dialect.version)
        if agreed.version != self.dialect.version:
            raise Unsupported(f"version of the server: {agreed.version!r} (expected {self.dialect.version!r})")
        if not limits.MSIZE_LEAST <= agreed.msize <= self.msize:
            raise BadRequest(f"msize of the server: {agreed.msize} (expected {limits.MSIZE_LEAST} to {self.msize})")
        self.msize = self._framer.msize = agreed.msize
        if token:
            yield from self._attach_by_token(user, aname, token.rstrip("\r\n").encode(), private)
            return
        uid = identity.user_number(user) if user else os.geteuid()
        name = user or identity.user_name(os.geteuid())
        yield m.Tattach(0, self.root, NOFID, name, aname, NONUNAME if uid is None else uid)

    def _attach_by_token(self, user: str, aname: str, token: bytes, private: bool) -> Procedure[None]:
        """Attach by a token; without a user name, as the token's user."""
        uid = identity.user_number(user) if user else None
        number = NONUNAME if uid is None else uid
        afid = self.fid()
        try:
            yield m.Tauth(0, afid, user, aname, number)
        except MqfsError as error:
            raise Denied(f"server without tokens: {error} (expected --token-file there, or no token)") from None
        nonce = challenge.parse_line((yield m.Tread(0, afid, 0, limits.TOKEN_BYTES)).data)
        if nonce:
            client = challenge.Client(token, nonce, user)
            yield m.Twrite(0, afid, 0, client.answer)
            client.check((yield m.Tread(0, afid, 0, limits.TOKEN_BYTES)).data)
        elif private:
            yield m.Twrite(0, afid, 0, token)
        else:
            raise Denied("server without a challenge: token not sent over TCP (expected tls!, or MQFS_PLAIN_TOKEN=yes)")
        yield m.Tattach(0, self.root, afid, user, aname, number)
        yield from self.clunk(afid)

    def walk(self, path: str) -> Procedure[int]:
        """Return a new fid of the file at a path from the root."""
        names = [name for name in path.split("/") if name not in ("", ".")]
        fid = self.fid()
        done = False
        try:
            for at in range(0, len(names) or 1, limits.WALK_NAMES):
                step = tuple(names[at : at + limits.WALK_NAMES])
                reply = yield m.Twalk(0, fid if at else self.root, fid, step)
                if len(reply.qids) < len(step):
                    path = "/".join(names[: at + len(reply.qids) + 1])
                    raise NotFound(f"no stream or group {path!r}")
                done = True
        except MqfsError:
            if done:
                yield m.Tclunk(0, fid)
            self.free_fid(fid)
            raise
        return fid

    def exists(self, path: str) -> Procedure[bool]:
        """Whether there is a file at a path."""
        try:
            fid = yield from self.walk(path)
        except NotFound:
            return False
        yield from self.clunk(fid)
        return True

    def clunk(self, fid: int) -> Procedure[None]:
        try:
            yield m.Tclunk(0, fid)
        finally:
            self.free_fid(fid)

    def _with_fid(self, path: str, procedure: Any) -> Procedure[Any]:
        """Run a procedure with a fid of a path, and clunk it."""
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
        """Open a file. `flags`: os.O_RDONLY, O_WRONLY or O_RDWR."""
        fid = yield from self.walk(path)
        try:
            if self.dialect.linux:
                reply = yield m.Tlopen(0, fid, flags | (O_NONBLOCK if nonblocking else 0))
            elif nonblocking:
                raise Unsupported(f"nonblocking open: not in {self.dialect.version} (expected 9P2000.L)")
            else:
                reply = yield m.Topen(0, fid, flags)
        except MqfsError:
            yield from self.clunk(fid)
            raise
        return Channel(fid, reply.qid, self.msize, self.dialect.unix)

    def create(self, path: str, flags: int, mode: int = 0o666) -> Procedure[Channel]:
        """Make a stream and open it. Raises Exists."""
        group, _, name = path.rstrip("/").rpartition("/")
        fid = yield from self.walk(group)
        try:
            if self.dialect.linux:
                reply = yield m.Tlcreate(0, fid, name, flags | os.O_CREAT | os.O_EXCL, mode, os.getegid())
            else:
                reply = yield m.Tcreate(0, fid, name, _permissions(mode), flags)
        except MqfsError:
            yield from self.clunk(fid)
            raise
        return Channel(fid, reply.qid, self.msize, self.dialect.unix)

    def mkdir(self, path: str, mode: int = 0o777) -> Procedure[None]:
        group, _, name = path.rstrip("/").rpartition("/")

        def make(fid: int) -> Procedure[None]:
            if self.dialect.linux:
                yield m.Tmkdir(0, fid, name, mode, os.getegid())
            else:
                yield m.Tcreate(0, fid, name, mode | QTDIR << 24, os.O_RDONLY)

        yield from self._with_fid(group, make)

    def remove(self, path: str) -> Procedure[None]:
        """Remove a stream or an empty group."""
        fid = yield from self.walk(path)
        try:
            yield m.Tremove(0, fid)
        finally:
            self.free_fid(fid)

    def rename(self, path: str, name: str) -> Procedure[None]:
        """Rename a file within its group."""
        group, _, _ = path.rstrip("/").rpartition("/")

        def give(fid: int) -> Procedure[None]:
            if not self.dialect.linux:
                yield m.Twstat(0, fid, unchanged()._replace(name=name))
                return
            above = yield from self.walk(group)
            try:
                yield m.Trename(0, fid, above, name)
            finally:
                yield from self.clunk(above)

        yield from self._with_fid(path, give)

    def chmod(self, path: str, mode: int) -> Procedure[None]:
        """Change the permissions of a file."""
        kind = (yield from self.stat(path)).qid.type

        def give(fid: int) -> Procedure[None]:
            if self.dialect.linux:
                yield m.Tsetattr(0, fid, m.SET_MODE, mode, 0, 0, 0, 0, 0, 0, 0)
            else:
                yield m.Twstat(0, fid, unchanged()._replace(mode=_permissions(mode) | kind << 24))

        yield from self._with_fid(path, give)

    # ------------------------------------------------------------ procedures: attributes

    def stat(self, path: str) -> Procedure[Stat]:
        def ask(fid: int) -> Procedure[Stat]:
            if self.dialect.linux:
                reply = yield m.Tgetattr(0, fid, m.GETATTR_BASIC)
                return stat_of_attributes(reply, path.rstrip("/").rpartition("/")[2] or "/")
            reply = yield m.Tstat(0, fid)
            return stat_of_dir(reply.stat)

        it: Stat = yield from self._with_fid(path, ask)
        return it

    def names(self, path: str) -> Procedure[list[str]]:
        """List the names in a group, without "." and ".."."""

        def read(fid: int) -> Procedure[list[str]]:
            if self.dialect.linux:
                yield m.Tlopen(0, fid, os.O_RDONLY)
                return (yield from self._read_entries(fid))
            yield m.Topen(0, fid, os.O_RDONLY)
            return (yield from self._read_stats(fid))

        names: list[str] = yield from self._with_fid(path, read)
        return names

    def _read_entries(self, fid: int) -> Procedure[list[str]]:
        names: list[str] = []
        offset = 0
        while True:
            entries = (yield m.Treaddir(0, fid, offset, self.msize - READ_OVERHEAD)).entries
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


def stat_of_root(caller: ClientMachine) -> Fcall:
    """Return a request that a server answers at once, even while others wait."""
    root = caller.root
    return m.Tgetattr(0, root, m.GETATTR_BASIC) if caller.dialect.linux else m.Tstat(0, root)


def clunk_once(caller: ClientMachine, channel: Channel) -> Procedure[None]:
    """Clunk an open file, unless that was done.

    `is_clunked` is set before the request is sent: if Ctrl-C comes after that, either the answer has arrived or the
    connection is lost.
    """
    if not channel.is_clunked:
        channel.is_clunked = True
        yield from caller.clunk(channel.fid)


def check(reply: Fcall) -> Fcall:
    """Return the reply. Raises the error it carries."""
    if isinstance(reply, (m.Rerror, m.Rlerror)):
        raise raised(reply)
    return reply


def expect(request: Fcall, reply: Fcall) -> Fcall:
    """Return the reply to a request. Raises the error it carries, or BadFrame if it answers another request."""
    if type(reply) is not TYPES[NUMBERS[type(request)] + 1]:
        check(reply)
        raise BadFrame(f"unexpected {type(reply).__name__} (expected an answer to {type(request).__name__})")
    return reply


def unchanged() -> m.Dir:
    """Return the stat of a Twstat that changes nothing."""
    qid = Qid(0xFF, KEEP32, KEEP64)
    return m.Dir(KEEP16, KEEP32, qid, KEEP32, KEEP32, KEEP32, KEEP64, "", "", "", "")


def _permissions(mode: int) -> int:
    """Return the permissions of a file in 9P2000, where DMTMP (temporary) stands for the sticky bit."""
    return mode & 0o777 | (DMTMP if mode & modes.S_ISVTX else 0)


def _kind(qid: Qid) -> int:
    return modes.S_IFDIR if qid.type & QTDIR else modes.S_IFREG


def stat_of_dir(it: m.Dir) -> Stat:
    """Return the attributes in a stat of 9P2000 or 9P2000.u. A user given only by name is looked up; -1: unknown."""
    uid = identity.user_number(it.uid) if it.n_uid == NONUNAME else it.n_uid
    gid = identity.group_number(it.gid) if it.n_gid == NONUNAME else it.n_gid
    uid, gid = -1 if uid is None else uid, -1 if gid is None else gid
    mtime = it.mtime * _SECOND_NS
    return Stat(it.qid, it.mode & 0o777 | _kind(it.qid), uid, gid, it.length, 0, 1, mtime, mtime, it.name)


def stat_of_attributes(it: m.Rgetattr, name: str) -> Stat:
    mtime, ctime = it.mtime * _SECOND_NS + it.mtime_ns, it.ctime * _SECOND_NS + it.ctime_ns
    return Stat(it.qid, it.mode, it.uid, it.gid, it.size, it.blocks * 512, it.nlink, mtime, ctime, name)
