"""The session as the operations of 9P see it: the connection's peer, what was negotiated, and its fids."""

from __future__ import annotations

from typing import Protocol

from mqfs import limits
from mqfs.engine.tree.tree import Tree
from mqfs.net.peer import Peer
from mqfs.ninep.codec.dialect import Dialect
from mqfs.ninep.server.fids import Fid, FidTable


class Negotiated:
    """The terms of a connection, settled by its last Tversion and its Tattach."""

    __slots__ = ("dialect", "msize", "unix", "v9fs")

    def __init__(self) -> None:
        self.settle(None, limits.MSIZE_LEAST)

    def settle(self, dialect: Dialect | None, msize: int) -> None:
        """The terms of a Tversion. None: no dialect was accepted."""
        self.dialect, self.msize = dialect, msize
        self.unix = dialect is not None and dialect.unix
        self.v9fs = False  # its Tattach declared that the client is Linux v9fs


class SessionState(Protocol):
    """The server's half of one connection. `number` is its own among all connections of the process."""

    tree: Tree
    peer: Peer
    number: int
    negotiated: Negotiated
    attached: bool  # at least once
    fids: FidTable

    def clunk(self, fid: Fid) -> None:
        """Forget a fid: its parked reads fail with Interrupted, its parked writes are answered when they are done."""
