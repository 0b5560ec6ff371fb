"""The seam under the library: what it needs of the files of a tree, however they are reached.

Owns the two Protocols and nothing else. nine.py reaches a server by 9P, inside.py the engine of this very process; all
above sees no difference. Any number of threads may use a link; of one file one reads, others write and interrupt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from mqfs.errors import MqfsError

READ_BYTES = 262_144  # asked for at once
Body: TypeAlias = bytes | bytearray | memoryview | str


class File(Protocol):
    """An open file of the tree. Errors of the tree arrive as the classes of mqfs.errors."""

    def read(self, count: int = READ_BYTES, timeout: float | None = None) -> bytes:
        """One read, waiting if it must. TimeoutError and Interrupted have taken nothing; a message that came all the
        same is returned. Disconnected: the server is gone."""
        ...

    def write(self, data: bytes) -> None:
        """One write: one message or lines of commands, kept as the group's `sync` promises."""
        ...

    def interrupt(self) -> None:
        """End the read that waits in another thread, or else the next one, with Interrupted."""
        ...

    def close(self) -> None: ...


class Link(Protocol):
    """A tree."""

    where: str  # for messages to people
    can_be_lost: bool  # there is a connection, and it may end before its user wants it

    def open(self, path: str, mode: str) -> File:
        """`mode` as in blocking.py: "r", "w", "r+"."""
        ...

    def create(self, path: str) -> None:
        """A stream, or a consumer; Exists where there is one."""
        ...

    def mkdir(self, path: str) -> None: ...

    def remove(self, path: str) -> None:
        """A stream, a consumer, an empty group."""
        ...

    def names(self, path: str) -> list[str]: ...

    def write_all(self, writes: Sequence[tuple[File, bytes]]) -> list[MqfsError | None]:
        """Many writes, in this order, without waiting for one before the next; what became of each."""
        ...

    def close(self) -> None:
        """Waiting reads end; files must not be used any more."""
        ...


def read_whole(link: Link, path: str) -> bytes:
    """All of a file that has an end."""
    file = link.open(path, "r")
    try:
        pieces = []
        while data := file.read():
            pieces.append(data)
        return b"".join(pieces)
    finally:
        file.close()
