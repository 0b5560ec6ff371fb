"""The replies of a session that were not taken by its driver yet: frames, in the order in which they are sent."""

from __future__ import annotations

import logging
from collections.abc import Callable

from mqfs.errors import DiskFailed, MqfsError
from mqfs.ninep.codec.dialect import Dialect, refusal
from mqfs.ninep.codec.messages import Fcall, Rread
from mqfs.ninep.codec.notation import show
from mqfs.ninep.codec.wire import R_READ, READ_HEADER, READ_OVERHEAD, decode, encode
from mqfs.ninep.server.state import Negotiated

log = logging.getLogger("mqfs.ninep")

APART_BYTES = 16_384  # data above this is sent from where it lies, not copied behind its header
TRACE_DATA_BYTES = 64


class Replies:
    """Frames for the client. `where` names the peer in the log, `trace` gets a line a frame."""

    def __init__(self, negotiated: Negotiated, where: str, trace: Callable[[str], None] | None) -> None:
        self.bytes = 0  # not taken yet
        self.taken_bytes = 0
        self._negotiated, self._where, self._trace = negotiated, where, trace
        self._frames: list[bytes] = []

    def take(self) -> list[bytes]:
        """All frames, whole or in pieces, in order; the caller sends them."""
        self.taken_bytes += self.bytes
        frames, self._frames, self.bytes = self._frames, [], 0
        return frames

    def put(self, head: bytes, data: bytes = b"") -> None:
        """Append a frame."""
        if self._trace is not None:
            frame = head + data
            self._trace(f"<- {show(decode(frame, 0, len(frame), self._negotiated.unix), TRACE_DATA_BYTES)}")
        self.bytes += len(head) + len(data)
        if len(data) > APART_BYTES:
            self._frames += (head, data)
        else:
            self._frames.append(head + data)

    def reply(self, message: Fcall) -> None:
        if type(message) is Rread:
            length = len(message.data)
            self.put(READ_HEADER.pack(READ_OVERHEAD + length, R_READ, message.tag, length), message.data)
        else:
            self.put(encode(message, self._negotiated.unix))

    def refuse(self, tag: int, error: BaseException) -> None:
        """Answer with an error. One that is not a condition of the tree is logged and answered as DiskFailed."""
        if isinstance(error, OSError):
            log.error("%s: request failed: %s", self._where, error)
            error = DiskFailed()
        elif not isinstance(error, MqfsError):
            log.error("9P request failed", exc_info=error)
            error = DiskFailed()
        terms = self._negotiated
        self.put(encode(refusal(terms.dialect or Dialect.PLAIN, tag, error, terms.v9fs), terms.unix))
