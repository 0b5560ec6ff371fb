"""The FUSE device of one mount: the request that was read last, and how requests are answered."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from mqfs import limits
from mqfs.fuse import protocol

log = logging.getLogger("mqfs.fuse")

_GONE = (errno.ENOENT, errno.ENODEV, errno.EPERM, errno.ECONNABORTED)  # the request, or the mount


class Device:
    """An open FUSE device. Each reply returns False where its request is gone."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.buffer = bytearray(limits.FUSE_REQUEST_BYTES)  # the request
        self.view = memoryview(self.buffer)
        self.readv, self.write, self.writev = os.readv, os.write, os.writev  # or what traces them

    def trace(self, line: Callable[[str], None]) -> None:
        """Pass on a line for each request and each reply from now on."""

        def readv(fd: int, buffers: Any) -> int:
            size = os.readv(fd, buffers)
            line(f"-> {_show_request(self.buffer, size)}")
            return size

        def write(fd: int, reply: Any) -> int:
            line(f"<- {_show_reply(reply)}")
            return os.write(fd, reply)

        def writev(fd: int, parts: Any) -> int:
            line(f"<- {_show_reply(parts[0])}")
            return os.writev(fd, parts)

        self.readv, self.write, self.writev = readv, write, writev

    def send(self, reply: bytes | memoryview) -> bool:
        """A whole reply."""
        try:
            self.write(self.fd, reply)
        except OSError as error:
            return self.lost(error)
        return True

    def answer(self, unique: int, data: bytes) -> bool:
        """Reply with data."""
        try:
            self.writev(self.fd, (protocol.REPLY.pack(protocol.OUT_HEADER + len(data), 0, unique), data))
        except OSError as error:
            return self.lost(error)
        return True

    def refuse(self, unique: int, number: int) -> bool:
        """Reply with an errno, or 0: done."""
        return self.send(protocol.REPLY.pack(protocol.OUT_HEADER, -number, unique))

    def bug(self, unique: int, what: str) -> None:
        """In an exception handler: reply EIO to a request that failed by no condition of the tree, and log it."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            log.error("%s failed: %s", what, error)
        else:
            log.exception("%s failed", what)
        self.refuse(unique, errno.EIO)

    def lost(self, error: OSError) -> bool:
        """Returns False, for a reply that the device did not take."""
        if error.errno not in _GONE:
            log.error("reply failed: %s", error)
        return False


def _show_request(buffer: bytearray, size: int) -> str:
    _, opcode, unique, node, uid, _, pid = protocol.HEADER.unpack_from(buffer)
    text = f"{protocol.NAMES.get(opcode, opcode)} {unique} node {node} uid {uid} pid {pid}"
    if opcode in (protocol.READ, protocol.WRITE):
        _, _, fh, offset, count, _, _ = protocol.HOT.unpack_from(buffer)
        return f"{text} fh {fh} offset {offset} count {count}"
    return f"{text} {size - protocol.IN_HEADER} bytes"


def _show_reply(reply: Any) -> str:
    size, number, unique = protocol.REPLY.unpack_from(reply)
    status = errno.errorcode.get(-number, str(number)) if number else f"{size - protocol.OUT_HEADER} bytes"
    return f"{unique} {status}"
