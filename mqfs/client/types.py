"""The API under the library: the Protocols of its transports, and the types of its arguments.

A transport reaches a server by 9P (transport/ninep.py), an engine in this process (embedded.py), or a server's rings
besides 9P (ring.py); the library above sees no difference. Links and files are thread-safe: one thread reads a file
while others write and interrupt.
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

READ_BYTES = 131_072  # of one read: its decoded messages fit the cache
TEMPORARY = 0o1622  # the mode of a stream for replies: everybody may write; it is removed with its last open file
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
        """Whether the connection is known to be lost: calls raise Disconnected and send nothing."""
        ...

    def receive(self, count: int = READ_BYTES, timeout: float | None = None) -> bytes:
        """Read once, waiting up to `timeout` seconds (None: without limit).

        Raises TimeoutError, Interrupted and Disconnected. The first two have read nothing: a message that arrives
        before the read is cancelled is returned instead."""
        ...

    def when_ready(self, call: Callable[[], None]) -> None:
        """Begin a read, unless one has begun, and call `call` once `receive` would not wait. It is called from any
        thread, with locks held, so it must not block. `receive` returns the data. Raises Disconnected."""
        ...

    def write(self, data: bytes) -> object:
        """Write once: a message, or lines of commands. Returns when it is as durable as the group's `sync` demands."""
        ...

    def send(self, data: bytes) -> Callable[..., object]:
        """Begin one write. Returns a function that waits for its answer.

        Its optional argument is a deadline of time.monotonic(), at which it raises TimeoutError; it may be called again
        then. Both raise Disconnected."""
        ...

    def begin_read(self) -> None:
        """Begin the read of the next `receive`, if that saves a round trip. Raises Disconnected."""
        ...

    def look_up(self, path: str) -> Callable[[], bool | None]:
        """Begin a read as `begin_read`, and ask in the same round trip whether a file exists.

        Returns a function to be called after `receive`, which returns the answer, or None if that is older than the
        data that was read. Both raise Disconnected."""
        ...

    def ask(self, data: bytes, timeout: float | None = None) -> bytes:
        """Write once and read the short answer, in one round trip. Raises TimeoutError after `timeout` seconds; nothing
        is written then."""
        ...

    def interrupt(self) -> None:
        """End the waiting read of another thread, or else the next read, with Interrupted."""
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
            TimeoutError: No message came in time.
            EOFError: The subscription was closed, or has ended.
            FellBehind: Messages were lost; `error.lost` is an upper bound of their number.
            DiskFailed: A message could not be read.
            DiskFull: The temporary folder has no room for a body of more than 8 MiB, which is left out.
            Interrupted: `interrupt` was called.
            Disconnected: The server is disconnected, and `reconnect` does not wait for it.
        """
        ...

    def interrupt(self) -> None:
        """End the waiting `get` of another thread, or else the next one, with Interrupted. No message is lost."""
        ...

    def lost(self, error: Exception) -> bool:
        """Check whether an error has ended the subscription.

        Args:
            error: An error that `get` raised.

        Returns:
            Whether no message follows.
        """
        ...

    def close(self) -> None:
        """Close the subscription; it ends for waiting threads, too."""
        ...

    def __iter__(self) -> Iterator[Message]: ...

    def __next__(self) -> Message: ...

    def __enter__(self) -> Subscription: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None: ...


class Link(Protocol):
    """The connection to a tree."""

    label: str  # its name in texts
    can_be_lost: bool  # whether the connection may be lost before it is closed

    def reach(self, deadline: float | None) -> None:
        """Connect again if the connection is lost. Raises TimeoutError at `deadline`, of time.monotonic()."""
        ...

    def open(self, path: str, mode: str) -> File:
        """Open a file. `mode`: "r", "w" or "r+"."""
        ...

    def create(self, path: str) -> None:
        """Make a stream or a consumer. Raises Exists."""
        ...

    def create_temporary(self, path: str) -> File:
        """Make a stream that everybody may write to, and return it open for reading and writing. It is removed when the
        file is closed."""
        ...

    def mkdir(self, path: str) -> None: ...

    def remove(self, path: str) -> None:
        """Remove a stream, a consumer or an empty group."""
        ...

    def names(self, path: str) -> list[str]: ...

    def look_up(self, paths: Sequence[str]) -> Callable[[], list[bool]]:
        """Begin to ask which files exist, in one round trip. Returns a function that waits for the answers, and has to
        be called. Both raise Disconnected."""
        ...

    def write_all(self, writes: Sequence[tuple[File, bytes]]) -> list[MqfsError | None]:
        """Write in order, with several writes under way at once. Returns the error of each, or None."""
        ...

    def direct(self, path: str) -> RingGroup | None:
        """Return a faster transport for a group's messages, if one may exist, else None. Sends nothing."""
        ...

    def close(self) -> None:
        """Close the connection: waiting reads end, and files must not be used after this."""
        ...


def read_whole(link: Link, path: str) -> bytes:
    """Read a file to its end."""
    with closing(link.open(path, "r")) as file:
        return b"".join(iter(file.receive, b""))


def write_lines(link: Link, path: str, *lines: str) -> None:
    """Write commands to a file by one write."""
    with closing(link.open(path, "w")) as file:
        file.write(command_lines(*lines))


def parse_answer(text: bytes) -> dict[str, Any]:
    """Parse the answer of a file to a command, in JSON. Raises the error in its place if the command failed after its
    write was answered: by a server that stops, for example."""
    if not text.startswith(b"{"):
        raise raised(Rerror(0, text.decode(errors="replace").rstrip("\n"), 0))
    answer: dict[str, Any] = json.loads(text)
    return answer


def view_of(body: object) -> memoryview:
    """Return the buffer of a body that is not text. Raises TypeError."""
    try:
        return memoryview(body)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"invalid body: {type(body).__name__} (expected bytes or str)") from None


def bytes_of(body: Body) -> bytes:
    """Return the bytes of a body; text as UTF-8. Raises TypeError."""
    return body.encode() if isinstance(body, str) else body if isinstance(body, bytes) else bytes(view_of(body))


def is_empty(body: Body) -> bool:
    return not (body if isinstance(body, str | bytes) else view_of(body).nbytes)
