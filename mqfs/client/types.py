"""The API under the library: the Protocols of its transports, and the values its calls take.

Only bodies are converted here. A transport reaches a server by 9P (transport/ninep.py), an engine in this process
(embedded.py), or a server's rings besides 9P (ring.py); the library above sees no difference. Links and files are
thread-safe: one thread reads a file while others write and interrupt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from mqfs.client.message import Message
from mqfs.errors import MqfsError
from mqfs.ninep.codec.messages import Rerror
from mqfs.ninep.codec.wire import raised
from mqfs.syntax.lines import command_lines

if TYPE_CHECKING:
    from mqfs.client.transport.ring import RingGroup

READ_BYTES = 131_072  # of one read: what is made of them fits the cache
TEMPORARY = 0o1622  # the mode of a stream for replies: everybody may write to it, and it goes with its last open file
Body: TypeAlias = bytes | bytearray | memoryview | str
Duration: TypeAlias = float | str | timedelta  # seconds, or as in ctl: "30s"
Moment: TypeAlias = float | str | timedelta | datetime  # UNIX seconds; or how long ago: "10m", a timedelta
Filter: TypeAlias = Callable[[Message], bool]
Filters: TypeAlias = Filter | Sequence[Filter]
Patterns: TypeAlias = str | Sequence[str]


class File(Protocol):
    """An open file of the tree. Raises the tree's errors as the classes of mqfs.errors."""

    @property
    def is_lost(self) -> bool:
        """Whether its connection is known to be lost: a call raises Disconnected, and sends nothing."""
        ...

    def receive(self, count: int = READ_BYTES, timeout: float | None = None) -> bytes:
        """One read, which may wait. TimeoutError and Interrupted have read nothing: a message that arrived all the same
        is returned. Raises Disconnected."""
        ...

    def when_ready(self, call: Callable[[], None]) -> None:
        """Begin to read, unless that was begun, and call once `receive` does not wait: from any thread, with locks
        held, so that it must not block. `receive` returns what was read. Raises Disconnected."""
        ...

    def write(self, data: bytes) -> object:
        """One write: a message, or lines of commands. Returns when it is as durable as the group's `sync` demands."""
        ...

    def send(self, data: bytes) -> Callable[..., object]:
        """Begin one write. Returns a function that waits for it, until a time of time.monotonic() if it is given one,
        and then raises TimeoutError; it may be called again. Both raise Disconnected."""
        ...

    def begin_read(self) -> None:
        """Begin the read of the next `receive`, where that saves a round trip. Raises Disconnected."""
        ...

    def look_up(self, path: str) -> Callable[[], bool | None]:
        """As `begin_read`, and ask in the same round trip whether there is this file. Returns a function, to be called
        after `receive`: the answer; None: it is older than what was read. Both raise Disconnected."""
        ...

    def ask(self, data: bytes, timeout: float | None = None) -> bytes:
        """One write and then the read of its short answer, in one round trip. After TimeoutError nothing is written."""
        ...

    def interrupt(self) -> None:
        """End the read that waits in another thread, or else the next one, with Interrupted."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Subscription(Protocol):
    """Messages of a group, one by one: an iterator and a context manager, shared by any number of threads.

    After FellBehind, DiskFailed or DiskFull, raised once each, the next call continues after the loss.
    """

    def get(self, timeout: float | None = None) -> Message:
        """Wait for the next message.

        Args:
            timeout: The most seconds to wait. None: without limit.

        Returns:
            The message.

        Raises:
            TimeoutError: There was none in time.
            EOFError: It was closed, or has ended.
            FellBehind: Messages were lost; `error.lost` is the most it can be.
            DiskFailed: A message could not be read.
            DiskFull: The temporary folder does not take a body of more than 8 MiB, which is left out.
            Interrupted: `interrupt` was called.
            Disconnected: The server went away, and it is not to be waited for.
        """
        ...

    def interrupt(self) -> None:
        """End the `get` that waits in another thread, or else the next one, with Interrupted. Loses no message."""
        ...

    def lost(self, error: Exception) -> bool:
        """Ask whether an error was the end.

        Args:
            error: What `get` raised.

        Returns:
            Whether no message follows.
        """
        ...

    def close(self) -> None:
        """End it; threads that wait in it get the end."""
        ...

    def __iter__(self) -> Iterator[Message]: ...

    def __next__(self) -> Message: ...

    def __enter__(self) -> Subscription: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None: ...


class Link(Protocol):
    """A tree."""

    label: str  # for texts
    can_be_lost: bool  # the connection may end before its user closes it

    def reach(self, deadline: float | None) -> None:
        """Connect again where the connection is lost, of time.monotonic() until then. Raises TimeoutError."""
        ...

    def open(self, path: str, mode: str) -> File:
        """`mode`: "r", "w" or "r+"."""
        ...

    def create(self, path: str) -> None:
        """Make a stream or a consumer. Raises Exists."""
        ...

    def create_temporary(self, path: str) -> File:
        """Make a stream that everybody may write to and that goes with the file, which is open for both."""
        ...

    def mkdir(self, path: str) -> None: ...

    def remove(self, path: str) -> None:
        """Remove a stream, a consumer or an empty group."""
        ...

    def names(self, path: str) -> list[str]: ...

    def look_up(self, paths: Sequence[str]) -> Callable[[], list[bool]]:
        """Begin to ask which of these files there are, in one round trip. Returns a function that waits for the
        answers, and is to be called. Both raise Disconnected."""
        ...

    def write_all(self, writes: Sequence[tuple[File, bytes]]) -> list[MqfsError | None]:
        """Many writes in order, several under way at once; the error of each, or None."""
        ...

    def direct(self, path: str) -> RingGroup | None:
        """A faster transport of a group's messages, where one may exist. Sends nothing yet."""
        ...

    def close(self) -> None:
        """End reads that wait; files must not be used after this."""
        ...


def read_whole(link: Link, path: str) -> bytes:
    """All of a file that has an end."""
    with closing(link.open(path, "r")) as file:
        return b"".join(iter(file.receive, b""))


def write_lines(link: Link, path: str, *lines: str) -> None:
    """Write commands to a file, all at once."""
    with closing(link.open(path, "w")) as file:
        file.write(command_lines(*lines))


def parse_answer(text: bytes) -> dict[str, Any]:
    """The answer of a file to a command, in JSON. Raises the error in its place where the command failed after its
    write was answered: by a server that stops, say."""
    if not text.startswith(b"{"):
        raise raised(Rerror(0, text.decode(errors="replace").rstrip("\n"), 0))
    answer: dict[str, Any] = json.loads(text)
    return answer


def view_of(body: object) -> memoryview:
    """The buffer of a body that is not text. Raises TypeError."""
    try:
        return memoryview(body)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"invalid body: {type(body).__name__} (expected bytes or str)") from None


def bytes_of(body: Body) -> bytes:
    """A message's bytes; text as UTF-8. Raises TypeError."""
    return body.encode() if isinstance(body, str) else body if isinstance(body, bytes) else bytes(view_of(body))


def is_empty(body: Body) -> bool:
    return not (body if isinstance(body, str | bytes) else view_of(body).nbytes)
