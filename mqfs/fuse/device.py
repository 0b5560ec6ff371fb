"""The FUSE device of one mount: the request that was read last, and how requests are answered."""

from __future__ import annotations

import errno
import logging
import os
import sys

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

    def send(self, reply: bytes | memoryview) -> bool:
        """A whole reply."""
        try:
            os.write(self.fd, reply)
        except OSError as error:
            return self.lost(error)
        return True

    def answer(self, unique: int, data: bytes) -> bool:
        """Reply with data."""
        try:
            os.writev(self.fd, (protocol.REPLY.pack(protocol.OUT_HEADER + len(data), 0, unique), data))
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
