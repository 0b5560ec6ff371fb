"""The seam under the library: what it needs of the files of a tree, however they are reached.

Owns the Protocols and nothing else. ninep.py reaches a server by 9P, embedded.py the engine of this very process, and
ring.py the messages of some groups by shared memory besides; all above sees no difference. Any number of threads
may use a link; of one file one reads, others write and interrupt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from mqfs.errors import MqfsError

if TYPE_CHECKING:
    from mqfs.client.subscription import Filters, Patterns, Subscription

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


class Direct(Protocol):
    """A group's plain messages without its files. What it does not do it leaves to the files, and says so."""

    def publish(self, stream: str, body: bytes, committed: bool) -> int | None:
        """Publish a message (`committed`: and wait until it is); its sequence. None: use the files. Raises NotFound."""
        ...

    def publish_many(self, messages: Sequence[tuple[str, bytes]]) -> tuple[int, Callable[[], None] | None]:
        """Publish them in order; how many were: the others are for the files. The function waits until all are
        committed. NotFound has published nothing; of other errors `published` tells how many were."""
        ...

    def subscribe(
        self, patterns: Patterns, *, existing: bool, filters: Filters, reconnect: bool | float
    ) -> Subscription | None:
        """Follow it. None: use the files."""
        ...


class Link(Protocol):
    """A tree."""

    where: str  # for messages to people
    can_be_lost: bool  # there is a connection, and it may end before its user wants it

    def open(self, path: str, mode: str) -> File:
        """`mode` as in connection.py: "r", "w", "r+"."""
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

    def direct(self, path: str) -> Direct | None:
        """A quicker way to the messages of that group, where there may be one. It costs nothing until it is used."""
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
