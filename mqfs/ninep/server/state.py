"""The session as the operations of 9P see it: the connection's peer, what was negotiated, and its fids."""

from __future__ import annotations

from mqfs import limits
from mqfs.ninep.codec.dialect import Dialect


class Negotiated:
    """The terms of a connection, agreed by its last Tversion and its Tattach."""

    __slots__ = ("dialect", "msize", "resumable", "unix", "v9fs")

    def __init__(self) -> None:
        self.agree(None, limits.MSIZE_LEAST)

    def agree(self, dialect: Dialect | None, msize: int) -> None:
        """The terms of a Tversion. None: no dialect was accepted."""
        self.dialect, self.msize = dialect, msize
        self.unix = dialect is not None and dialect.unix
        self.v9fs = False  # its Tattach declared that the client is Linux v9fs
        self.resumable = False  # its Tattach declared that the client is a mount, see resumable.py
