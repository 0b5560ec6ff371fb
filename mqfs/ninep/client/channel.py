"""An open fid of the client: its reads and writes, as procedures."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any, TypeVar

import attrs

from mqfs.errors import BadRequest, TooLong
from mqfs.model import Qid
from mqfs.ninep.codec import messages as m
from mqfs.ninep.codec.messages import Fcall
from mqfs.ninep.codec.wire import IO_OVERHEAD, READ_OVERHEAD

T = TypeVar("T")
Procedure = Generator[Fcall, Any, T]
MODES = {"r": os.O_RDONLY, "w": os.O_WRONLY, "r+": os.O_RDWR}


def flags_of(mode: str) -> int:
    """The flags of open(2) for "r", "w" or "r+" ("b" may follow)."""
    plain = mode.replace("b", "")
    if plain not in MODES:
        raise BadRequest(f"invalid open mode {mode!r} (expected {', '.join(MODES)})")
    return MODES[plain]


@attrs.define(eq=False)
class Channel:
    """An open fid: the offset, and a message that arrived for a flushed read."""

    fid: int
    qid: Qid
    msize: int  # as agreed
    unix: bool  # the dialect is 9P2000.u
    offset: int = 0
    kept: bytes | None = None  # of a read that was flushed too late
    short: bool = False  # the last read returned less than its count
    is_clunked: bool = False  # or about to be: the fid may be another file's
    most: int = attrs.field(init=False)  # the largest message that can be written, in bytes

    @most.default
    def _most(self) -> int:
        return self.msize - IO_OVERHEAD

    def read_request(self, count: int) -> m.Tread:
        """The request that reads."""
        count = min(count, self.msize - READ_OVERHEAD)
        if count == self.most:
            count -= 1  # a server takes it for a read that v9fs has cut, and expects another
        return m.Tread(0, self.fid, self.offset, count)

    def read(self, count: int) -> Procedure[bytes]:
        """The next message or a part of it; b"" at the end."""
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
        """Whether to read again: behind the end of file that clients get which read until their buffer is full."""
        is_false_end = self.unix and self.short and not length
        self.offset += length
        self.short = 0 < length < count
        return is_false_end

    def keep(self, reply: Fcall | None, offset: int) -> None:
        """Keep the reply of a read at an offset that was flushed too late, for the next read."""
        if isinstance(reply, m.Rread):
            self.kept, self.offset = reply.data, offset
            self.took(len(reply.data), self.msize)

    def request(self, data: bytes) -> m.Twrite:
        """The request that writes one message. Raises TooLong."""
        if len(data) > self.most:
            raise TooLong(f"message of {len(data)} bytes (expected at most {self.most} by the connection's msize)")
        return m.Twrite(0, self.fid, self.offset, data)

    def write(self, data: bytes) -> Procedure[int]:
        """One message."""
        reply = yield self.request(data)
        return int(reply.count)
