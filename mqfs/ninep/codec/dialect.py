"""The three dialects of 9P: their names, their messages, and how each reports an error.

The session and the client machine read all differences between 9P2000, 9P2000.u and 9P2000.L from these tables.
"""

from __future__ import annotations

import enum
import errno
import os
from collections.abc import Iterator
from typing import Any

from mqfs import errors
from mqfs.errors import MqfsError
from mqfs.ninep.codec import linux_messages as linux
from mqfs.ninep.codec import messages as m
from mqfs.ninep.codec.linux_messages import Rlerror
from mqfs.ninep.codec.messages import Fcall, Rerror

_LINUX_FIRST, _LINUX_LAST = 7, 77  # the types that only 9P2000.L has
_NOT_LINUX = {106, 107, 112, 113, 114, 115, 124, 125, 126, 127}  # open, create, stat, wstat and error have others there


class Dialect(enum.Enum):
    """One of the three; `unix` dialects carry numbers of users and errors."""

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
    """The dialect to answer a Tversion with: the longest known prefix of its version, up to a dot."""
    known = {dialect.version: dialect for dialect in Dialect}
    while version and version not in known:
        version = version.rpartition(".")[0]
    return known.get(version)


def refusal(dialect: Dialect, tag: int, error: MqfsError, system: bool = False) -> Fcall:
    """The reply that carries an error. `system`: with strerror's text, which Linux turns back into a number."""
    if dialect.linux:
        return Rlerror(tag, error.errno)
    text = os.strerror(error.errno) if system else error.wire_text()
    while len(text.encode("utf-8", "replace")) > 1_024:
        text = text[: len(text) // 2]
    return Rerror(tag, text.encode("utf-8", "replace").decode(), error.errno)


_GENERIC: dict[int, type[MqfsError]] = {  # where several conditions share a number
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
    """The exception for a server's error."""
    if isinstance(reply, Rlerror):
        return _numbered(reply.ecode, "") or _other(os.strerror(reply.ecode), reply.ecode)
    text, _, detail = reply.ename.partition(": ")
    for kind in _all(MqfsError):
        if kind.text == text and reply.errno in (0, kind.errno):
            return kind(detail)
    return _numbered(reply.errno, reply.ename) or _other(reply.ename, reply.errno)


def _numbered(number: int, detail: str) -> MqfsError | None:
    """The condition of that errno."""
    if number in _GENERIC:
        return _GENERIC[number](detail)
    return next((kind(detail) for kind in _all(MqfsError) if kind.errno == number), None)


def _other(text: str, number: int) -> MqfsError:
    """A condition that this table does not have, with the server's own text."""
    error = errors.RemoteError(text)
    error.errno = number or error.errno  # type: ignore[misc]
    return error


# ---------------------------------------------------------------- the numbers of messages on the wire

# Numbers of the T-messages; each R-message is one more. Both kinds of error have only the R.
_PAIRS: dict[int, tuple[type[Any], type[Any]]] = {
    8: (linux.Tstatfs, linux.Rstatfs),
    12: (linux.Tlopen, linux.Rlopen),
    14: (linux.Tlcreate, linux.Rlcreate),
    16: (linux.Tsymlink, linux.Rsymlink),
    18: (linux.Tmknod, linux.Rmknod),
    20: (linux.Trename, linux.Rrename),
    22: (linux.Treadlink, linux.Rreadlink),
    24: (linux.Tgetattr, linux.Rgetattr),
    26: (linux.Tsetattr, linux.Rsetattr),
    30: (linux.Txattrwalk, linux.Rxattrwalk),
    32: (linux.Txattrcreate, linux.Rxattrcreate),
    40: (linux.Treaddir, linux.Rreaddir),
    50: (linux.Tfsync, linux.Rfsync),
    52: (linux.Tlock, linux.Rlock),
    54: (linux.Tgetlock, linux.Rgetlock),
    70: (linux.Tlink, linux.Rlink),
    72: (linux.Tmkdir, linux.Rmkdir),
    74: (linux.Trenameat, linux.Rrenameat),
    76: (linux.Tunlinkat, linux.Runlinkat),
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

TYPES: dict[int, type[Any]] = {7: linux.Rlerror, 107: m.Rerror}
for _number, (_request, _reply) in _PAIRS.items():
    TYPES[_number], TYPES[_number + 1] = _request, _reply
NUMBERS: dict[type[Any], int] = {message: number for number, message in TYPES.items()}
