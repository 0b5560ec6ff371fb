"""9P messages ↔ bytes, without I/O.

Here are the framing and the encoding of every kind of field. A length is checked against the bytes that have arrived
before anything is allocated, and a frame's size against the msize. A breach of the protocol raises BadFrame, which ends
its connection.

The session and the client machine read all differences between the dialects 9P2000, 9P2000.u and 9P2000.L from tables
here: their names, their messages, and how each reports an error.
"""

from __future__ import annotations

import enum
import errno
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints

from mqfs import errors
from mqfs.errors import BadFrame, MqfsError
from mqfs.model import Qid
from mqfs.ninep.codec import messages as m
from mqfs.ninep.codec.messages import Dir, Entry, Fcall, Rerror, Rlerror

_LINUX_FIRST, _LINUX_LAST = 7, 77  # the types that only 9P2000.L has
_NOT_LINUX = {106, 107, 112, 113, 114, 115, 124, 125, 126, 127}  # 9P2000.L replaces open, create, stat, wstat, error


class Dialect(enum.Enum):
    """A dialect of 9P. The `unix` dialects carry numbers of users and errors."""

    PLAIN = "9P2000"
    UNIX = "9P2000.u"
    LINUX = "9P2000.L"

    def __init__(self, version: str) -> None:
        self.version = version
        self.unix = version != "9P2000"
        self.linux = version == "9P2000.L"

    def has(self, kind: type[Fcall]) -> bool:
        """Whether this dialect has messages of that kind."""
        number = NUMBERS[kind]
        if self.linux:
            return number not in _NOT_LINUX
        return not _LINUX_FIRST <= number <= _LINUX_LAST


def negotiate(version: str) -> Dialect | None:
    """Return the dialect to answer a Tversion with: its longest known prefix that ends before a dot. None: unknown."""
    known = {dialect.version: dialect for dialect in Dialect}
    while version and version not in known:
        version = version.rpartition(".")[0]
    return known.get(version)


def refusal(dialect: Dialect, tag: int, error: MqfsError, system: bool = False) -> Fcall:
    """Return the reply that carries an error. `system`: use strerror's text, which Linux turns back into a number."""
    if dialect.linux:
        return Rlerror(tag, error.errno)
    text = os.strerror(error.errno) if system else error.wire_text()
    while len(text.encode("utf-8", "replace")) > 1_024:
        text = text[: len(text) // 2]
    return Rerror(tag, text.encode("utf-8", "replace").decode(), error.errno)


_GENERIC: dict[int, type[MqfsError]] = {  # for errnos of several conditions
    errno.EINVAL: errors.BadRequest,
    errno.ENOENT: errors.NotFound,
    errno.EIO: errors.DiskFailed,
    errno.ENOSPC: errors.StreamFull,
}
_REMOTE_NEVER = (errors.Damaged, errors.RemoteError)


def _all(base: type[MqfsError]) -> Iterator[type[MqfsError]]:
    for kind in base.__subclasses__():
        if kind not in _REMOTE_NEVER:
            yield kind
            yield from _all(kind)


def raised(reply: Rerror | Rlerror) -> MqfsError:
    """Return the exception for a server's error reply."""
    if isinstance(reply, Rlerror):
        return _numbered(reply.ecode, "") or _other(os.strerror(reply.ecode), reply.ecode)
    text, _, detail = reply.ename.partition(": ")
    for kind in _all(MqfsError):
        if kind.text == text and reply.errno in (0, kind.errno):
            return kind(detail)
    return _numbered(reply.errno, reply.ename) or _other(reply.ename, reply.errno)


def _numbered(number: int, detail: str) -> MqfsError | None:
    """Return the exception of an errno, or None if no class has it."""
    if number in _GENERIC:
        return _GENERIC[number](detail)
    return next((kind(detail) for kind in _all(MqfsError) if kind.errno == number), None)


def _other(text: str, number: int) -> MqfsError:
    """Return a RemoteError with the server's own text, for an error that has no class here."""
    error = errors.RemoteError(text)
    error.errno = number or error.errno  # type: ignore[misc]
    return error


# ---------------------------------------------------------------- the numbers of messages on the wire

# Numbers of the T-messages; each R-message is one more. Both kinds of error have only the R.
_PAIRS: dict[int, tuple[type[Any], type[Any]]] = {
    8: (m.Tstatfs, m.Rstatfs),
    12: (m.Tlopen, m.Rlopen),
    14: (m.Tlcreate, m.Rlcreate),
    16: (m.Tsymlink, m.Rsymlink),
    18: (m.Tmknod, m.Rmknod),
    20: (m.Trename, m.Rrename),
    22: (m.Treadlink, m.Rreadlink),
    24: (m.Tgetattr, m.Rgetattr),
    26: (m.Tsetattr, m.Rsetattr),
    30: (m.Txattrwalk, m.Rxattrwalk),
    32: (m.Txattrcreate, m.Rxattrcreate),
    40: (m.Treaddir, m.Rreaddir),
    50: (m.Tfsync, m.Rfsync),
    52: (m.Tlock, m.Rlock),
    54: (m.Tgetlock, m.Rgetlock),
    70: (m.Tlink, m.Rlink),
    72: (m.Tmkdir, m.Rmkdir),
    74: (m.Trenameat, m.Rrenameat),
    76: (m.Tunlinkat, m.Runlinkat),
    100: (m.Tversion, m.Rversion),
    102: (m.Tauth, m.Rauth),
    104: (m.Tattach, m.Rattach),
    108: (m.Tflush, m.Rflush),
    110: (m.Twalk, m.Rwalk),
    112: (m.Topen, m.Ropen),
    114: (m.Tcreate, m.Rcreate),
    116: (m.Tread, m.Rread),
    118: (m.Twrite, m.Rwrite),
    120: (m.Tclunk, m.Rclunk),
    122: (m.Tremove, m.Rremove),
    124: (m.Tstat, m.Rstat),
    126: (m.Twstat, m.Rwstat),
}

TYPES: dict[int, type[Any]] = {7: m.Rlerror, 107: m.Rerror}
for _asked, (_request, _reply) in _PAIRS.items():
    TYPES[_asked], TYPES[_asked + 1] = _request, _reply
NUMBERS: dict[type[Any], int] = {message: number for number, message in TYPES.items()}


HEADER = struct.Struct("<IBH")  # size of the frame, type, tag
READ_HEADER = struct.Struct("<IBHI")  # of an Rread, up to its data
WRITE_HEADER = struct.Struct("<IBHIQI")  # of a Twrite, up to its data
TREAD = struct.Struct("<IBHIQI")
RWRITE = struct.Struct("<IBHI")
COUNT = struct.Struct("<I")
SHORT = struct.Struct("<H")
QID = struct.Struct("<BIQ")
ENTRY = struct.Struct("<BIQQBH")

T_VERSION, T_FLUSH, T_READ, R_READ, T_WRITE, R_WRITE = 100, 108, 116, 117, 118, 119
HEADER_BYTES = HEADER.size
READ_OVERHEAD = READ_HEADER.size  # an Rread carries at most msize less this
IO_OVERHEAD = 24  # bytes that every client reserves; a Twrite carries at most msize less this

Buffer = bytes | bytearray


# ---------------------------------------------------------------- framing


class Framer:
    """The framing of received bytes. `msize` may change between two frames."""

    def __init__(self, msize: int) -> None:
        self.msize = msize
        self._rest = bytearray()

    @property
    def unfinished(self) -> int:
        """The number of bytes kept for the next frame."""
        return len(self._rest)

    @property
    def missing(self) -> int:
        """The number of bytes that the incomplete frame still needs; 0 where that is unknown."""
        if len(self._rest) < 4:
            return 0
        return max(int(COUNT.unpack_from(self._rest)[0]) - len(self._rest), 0)

    def keep(self, data: bytes) -> None:
        """Keep bytes for the next call of `frames`."""
        self._rest += data

    def frames(self, data: bytes = b"") -> Iterator[tuple[Buffer, int, int]]:
        """Yield each whole frame as (buffer, position, size). Bytes not consumed stay for the next call."""
        buffer: Buffer = data
        if self._rest:
            self._rest += data
            buffer, self._rest = self._rest, bytearray()
        position, end = 0, len(buffer)
        try:
            while end - position >= 4:
                (size,) = COUNT.unpack_from(buffer, position)
                if size < HEADER_BYTES or size > self.msize:
                    raise BadFrame(f"frame of {size} bytes (expected {HEADER_BYTES} to {self.msize})")
                if end - position < size:
                    break
                start = position
                position += size
                yield buffer, start, size
        finally:
            if not position and isinstance(buffer, bytearray):
                self._rest = buffer
            elif position < end:
                self._rest = bytearray(memoryview(buffer)[position:])


# ---------------------------------------------------------------- reading fields


class Reader:
    """A position in a frame. Each step raises BadFrame where the frame is too short for it."""

    __slots__ = ("buffer", "end", "position", "unix")

    def __init__(self, buffer: Buffer, position: int, end: int, unix: bool) -> None:
        self.buffer, self.position, self.end, self.unix = buffer, position, end, unix

    def take(self, count: int) -> int:
        """Step over `count` bytes and return the position where they begin."""
        start = self.position
        if count > self.end - start:
            raise BadFrame(f"field of {count} bytes: beyond the end of its frame")
        self.position = start + count
        return start

    def raw(self, count: int) -> bytes:
        start = self.take(count)
        return bytes(memoryview(self.buffer)[start : start + count])

    def number(self, form: struct.Struct) -> int:
        value: int = form.unpack_from(self.buffer, self.take(form.size))[0]
        return value

    def text(self) -> str:
        raw = self.raw(self.number(SHORT))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise BadFrame("text is not UTF-8") from None

    def name(self) -> str:
        return self.raw(self.number(SHORT)).decode("utf-8", "surrogateescape")

    def names(self) -> tuple[str, ...]:
        return tuple(self.name() for _ in range(self.number(SHORT)))

    def qid(self) -> Qid:
        return Qid(*QID.unpack_from(self.buffer, self.take(QID.size)))

    def qids(self) -> tuple[Qid, ...]:
        return tuple(self.qid() for _ in range(self.number(SHORT)))

    def data(self) -> bytes:
        return self.raw(self.number(COUNT))

    def stat(self) -> Dir:
        """Read the stat in a message: the size of the field, then a stat as in a directory, with its own size."""
        within = self._part(self.number(SHORT))
        value = within.entry()
        within.finish()
        return value

    def entry(self) -> Dir:
        """Read a stat as a directory holds it."""
        within = self._part(self.number(SHORT))
        value: Dir = _FIELDS[Dir, self.unix](within)
        within.finish()
        return value

    def entries(self) -> tuple[Entry, ...]:
        within = self._part(self.number(COUNT))
        found = []
        while within.position < within.end:
            qid, offset = within.qid(), within.number(_NUMBERS["u64"])
            found.append(Entry(qid, offset, within.number(_NUMBERS["u8"]), within.name()))
        return tuple(found)

    def _part(self, count: int) -> Reader:
        start = self.take(count)
        return Reader(self.buffer, start, start + count, self.unix)

    def finish(self) -> None:
        if self.position != self.end:
            raise BadFrame(f"frame too long: {self.end - self.position} bytes after its last field")


_NUMBERS = {"u8": struct.Struct("<B"), "u16": SHORT, "u32": COUNT, "mode": COUNT, "u64": struct.Struct("<Q")}


def _number(form: struct.Struct) -> Callable[[Reader], Any]:
    return lambda reader: reader.number(form)


_READERS: dict[str, Callable[[Reader], Any]] = {
    **{kind: _number(form) for kind, form in _NUMBERS.items()},
    "text": Reader.text,
    "name": Reader.name,
    "names": Reader.names,
    "qid": Reader.qid,
    "qids": Reader.qids,
    "data": Reader.data,
    "stat": Reader.stat,
    "entries": Reader.entries,
}


# ---------------------------------------------------------------- writing fields


def _put_text(value: str, unix: bool) -> bytes:
    raw = value.encode("utf-8", "surrogateescape")
    return SHORT.pack(len(raw)) + raw


def _put_names(value: tuple[str, ...], unix: bool) -> bytes:
    return SHORT.pack(len(value)) + b"".join(_put_text(name, unix) for name in value)


def _put_qids(value: tuple[Qid, ...], unix: bool) -> bytes:
    return SHORT.pack(len(value)) + b"".join(QID.pack(*qid) for qid in value)


def _put_data(value: bytes, unix: bool) -> bytes:
    return COUNT.pack(len(value)) + value


def stat_bytes(value: Dir, unix: bool) -> bytes:
    """Return a stat as a directory holds it."""
    raw = _body(Dir, value, unix)
    return SHORT.pack(len(raw)) + raw


def _put_stat(value: Dir, unix: bool) -> bytes:
    raw = stat_bytes(value, unix)
    return SHORT.pack(len(raw)) + raw


def entry_bytes(entry: Entry) -> bytes:
    """Return an entry as encoded in an Rreaddir."""
    name = entry.name.encode("utf-8", "surrogateescape")
    return ENTRY.pack(*entry.qid, entry.offset, entry.type, len(name)) + name


def _put_entries(value: tuple[Entry, ...], unix: bool) -> bytes:
    raw = b"".join(map(entry_bytes, value))
    return COUNT.pack(len(raw)) + raw


def _pack(form: struct.Struct) -> Callable[[Any, bool], bytes]:
    return lambda value, unix: form.pack(value)


_WRITERS: dict[str, Callable[[Any, bool], bytes]] = {
    **{kind: _pack(form) for kind, form in _NUMBERS.items()},
    "text": _put_text,
    "name": _put_text,
    "names": _put_names,
    "qid": lambda value, unix: QID.pack(*value),
    "qids": _put_qids,
    "data": _put_data,
    "stat": _put_stat,
    "entries": _put_entries,
}


# ---------------------------------------------------------------- whole messages


def _layout(value: type[Any]) -> tuple[tuple[str, str, str], ...]:
    hints = get_type_hints(value, include_extras=True)
    marks = [(name, (*hints[name].__metadata__, "")) for name in value._fields if name != "tag"]
    return tuple((name, mark[0], mark[1]) for name, mark in marks)


_LAYOUTS = {value: _layout(value) for value in (*TYPES.values(), Dir, Entry)}


def layout(value: type[Any]) -> tuple[tuple[str, str, str], ...]:
    """Return the fields of a message or a stat, without the tag, as (name, kind, mark). Mark: "unix", "late" or ""."""
    return _LAYOUTS[value]


def _fields(value: type[Any], unix: bool) -> Callable[..., Any]:
    """Return a function that reads all fields of a message (or a stat) after its tag."""
    wanted = [field for field in layout(value) if unix or field[2] != "unix"]
    readers = [_READERS[kind] for _, kind, mark in wanted if mark != "late"]
    late = any(mark == "late" for _, _, mark in wanted)

    def read(reader: Reader, *tag: int) -> Any:
        fields = [step(reader) for step in readers]
        if late and reader.position < reader.end:
            fields.append(reader.number(COUNT))
        return value(*tag, *fields)

    return read


_FIELDS = {(value, unix): _fields(value, unix) for value in _LAYOUTS for unix in (False, True)}


def _body(kind: type[Any], value: Any, unix: bool) -> bytes:
    fields = layout(kind)
    return b"".join(_WRITERS[form](getattr(value, name), unix) for name, form, mark in fields if unix or mark != "unix")


def decode(buffer: Buffer, position: int, size: int, unix: bool) -> Fcall:
    """Decode the message in one whole frame. `unix`: the dialect has the fields of 9P2000.u. Raises BadFrame."""
    _, number, tag = HEADER.unpack_from(buffer, position)
    kind = TYPES.get(number)
    if kind is None:
        raise BadFrame(f"unknown message type {number}")
    reader = Reader(buffer, position + HEADER_BYTES, position + size, unix)
    message: Fcall = _FIELDS[kind, unix](reader, tag)
    reader.finish()
    return message


def encode(message: Fcall, unix: bool) -> bytes:
    """Return the whole frame of a message. Raises BadFrame where a field is out of range."""
    kind = type(message)
    try:
        body = _body(kind, message, unix)
        return HEADER.pack(HEADER_BYTES + len(body), NUMBERS[kind], message.tag) + body
    except struct.error as error:
        raise BadFrame(f"{kind.__name__}: {error}") from None
