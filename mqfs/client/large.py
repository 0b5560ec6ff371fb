"""Bodies of any size: a body larger than a message is several messages, its parts, in one atomic batch of one stream.

The header `part` is `1/17` in the first, then `2` to `16`, and `17/17` in the last. A writer holds about two parts in
memory; a reader has a body of more than 8 MiB in a temporary file.
"""

from __future__ import annotations

import io
import json
import secrets
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from typing import IO, Any

from mqfs import limits
from mqfs.client.message import Message
from mqfs.client.types import File, Link, view_of
from mqfs.errors import BadRequest, Disconnected, DiskFull, Interrupted, MqfsError, NotFound
from mqfs.records import headers

PIECE_BYTES = 1_000_000  # of a body in one message: with its headers it fits one write of every transport
SPOOLED_BYTES = 8 << 20  # of a received body in memory; a larger one is in a temporary file


# ---------------------------------------------------------------- reading


def place_of(message: Message) -> tuple[int, int]:
    """Return the number of a part, and the total if its header has it, else 0; (0, 0) for a whole body."""
    return headers.parse_part(message.headers.get(headers.PART, "")) if message.headers else (0, 0)


class LargeMessage(Message):
    """A message with a body in parts. `sequence` is the first part's. `open` reads the body without holding it in
    memory."""

    _spool: IO[bytes]
    _lock: threading.Lock

    @classmethod
    def begin(cls, first: Message, total: int) -> LargeMessage:
        more = {key: value for key, value in first.headers.items() if key != headers.PART}
        made = tuple.__new__(cls, (first.sequence, first.stream, first.time_ns, b"", more))
        made.total, made.parts, made.held = total, 0, 0
        made._spool = tempfile.SpooledTemporaryFile(SPOOLED_BYTES)  # noqa: SIM115 - it lives as long as the message
        made._lock = threading.Lock()
        made.add(first)
        return made

    total: int
    parts: int  # so far
    held: int  # bytes of these parts

    @property
    def size(self) -> int:
        """Bytes of the body."""
        return self.held

    @property
    def is_lost(self) -> bool:
        """Whether `add` has failed."""
        return self._spool.closed

    def add(self, part: Message) -> None:
        """Append a part. Raises DiskFull, once, if the temporary folder has no room for it."""
        self.parts += 1
        if self.is_lost:
            return
        try:
            self._spool.write(part.body)
            self._spool.flush()  # without it, a failure to write the last bytes would show only at a read
        except OSError as error:
            with suppress(OSError):
                self._spool.close()
            raise DiskFull(f"body of message {self.sequence} left out: temporary file: {error.strerror}") from None
        self.held += len(part.body)

    @property
    def body(self) -> bytes:
        """The whole body, in memory."""
        return self.read_at(0, self.size)

    def read_at(self, at: int, count: int) -> bytes:
        with self._lock:
            self._spool.seek(at)
            return self._spool.read(count)

    def open(self) -> io.BufferedReader:
        return io.BufferedReader(_BodyReader(self))

    def __del__(self) -> None:
        self._spool.close()

    def __iter__(self) -> Iterator[Any]:
        return iter((self.sequence, self.stream, self.time_ns, self.body, self.headers))

    def __getitem__(self, at: Any) -> Any:
        return tuple(self)[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, tuple) and tuple(self) == tuple(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    # Copies are ordinary messages, with the body in memory.

    @classmethod
    def _make(cls, fields: Iterable[Any]) -> Message:  # type: ignore[override]
        return Message._make(fields)

    def __copy__(self) -> LargeMessage:
        return self  # as of any tuple

    def __reduce__(self) -> tuple[type[Message], tuple[Any, ...]]:
        return Message, tuple(self)

    def __reduce_ex__(self, protocol: Any) -> tuple[type[Message], tuple[Any, ...]]:
        return self.__reduce__()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<mqfs message {self.sequence} of {self.stream!r}: {self.size} bytes in {self.parts} parts>"


class _BodyReader(io.RawIOBase):
    """A file over a body, with a position of its own."""

    def __init__(self, message: LargeMessage) -> None:
        self._message, self._at = message, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._message.size}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self._message.read_at(self._at, len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


class MultipartAssembler:
    """The assembly of bodies from their parts, which arrive in order. One thread at a time may use it."""

    def __init__(self) -> None:
        self._open: LargeMessage | None = None

    @property
    def is_open(self) -> bool:
        """Whether it has parts of an incomplete body."""
        return self._open is not None

    def add_part(self, message: Message) -> Message | None:
        """Return the message that is complete now, or None while parts are missing. A part that does not continue a
        body, and is not a first part, is a message. Raises DiskFull for a body without room, which is left out."""
        number, total = place_of(message)
        open_, self._open = self._open, None
        if open_ is not None and self._continues(open_, message, number):
            if number < open_.total:
                self._open = open_
            open_.add(message)
            return None if open_.parts < open_.total or open_.is_lost else open_
        if number == 1 and total > 1:
            self._open = LargeMessage.begin(message, total)
            return None
        return message

    @staticmethod
    def _continues(open_: LargeMessage, message: Message, number: int) -> bool:
        follows = message.sequence == open_.sequence + open_.parts and message.stream == open_.stream
        return follows and number == open_.parts + 1


# ---------------------------------------------------------------- writing


class StagedUploads:
    """Atomic batches of one group, committed through `.txn` under one producer id. Thread-safe."""

    def __init__(self, link: Link, path: str) -> None:
        self._link, self._path = link, path
        self._turn = threading.Lock()  # held to commit, so that numbers are committed in order
        self._producer, self._number = f"library-{secrets.token_hex(8)}", 0
        self.dropped: deque[str] = deque()  # parts of garbage-collected writers, aborted by the next call

    def open(self, part: str) -> File:
        """Make a part, and open it for its messages."""
        self._abort_dropped()
        self._link.mkdir(f"{self._path}/.txn/{part}")
        return self._link.open(f"{self._path}/.txn/{part}/.put", "w")

    def commit(self, *parts: str, wait_s: float | None = None) -> None:
        """Append the parts as one atomic batch; the commit is repeated once if the connection is lost. Raises
        TimeoutError if there was no room in `wait_s` seconds (None: no limit), and Disconnected."""
        if not self._turn.acquire(timeout=-1 if wait_s is None else wait_s):  # another commit waits for room
            raise TimeoutError
        try:
            self._number += 1
            command = f"commit {self._producer}.{self._number} {' '.join(parts)}"
            try:
                self._command(command, wait_s)
            except Disconnected as error:
                try:
                    self._command(command, wait_s)
                except NotFound:
                    raise error from None  # not committed: the server ended, and its parts with it
        finally:
            self._turn.release()

    def abort(self, *parts: str) -> None:
        """Drop parts, where they exist."""
        self.dropped.extend(parts)
        self._abort_dropped()

    def _abort_dropped(self) -> None:
        """Abort the parts in `dropped`. If the server refuses or is disconnected, the next call retries it."""
        with suppress(IndexError):
            while True:
                part = self.dropped.popleft()
                try:
                    self._command(f"abort {part}")
                except NotFound:
                    pass
                except MqfsError:
                    self.dropped.append(part)
                    return

    def close(self) -> None:
        """Remove this producer from the server, after which no commit of it is repeated."""
        self._abort_dropped()
        with self._turn:
            if self._number:
                with suppress(MqfsError):
                    self._command(f"forget {self._producer}")
                self._producer, self._number = f"library-{secrets.token_hex(8)}", 0

    def _command(self, command: str, wait_s: float | None = None) -> None:
        with closing(self._link.open(f"{self._path}/.txn/ctl", "w" if wait_s is None else "r+")) as file:
            if wait_s is None:
                file.write(command.encode())
            else:
                file.ask(command.encode(), wait_s)


class BodyWriter(io.RawIOBase):
    """A writer of a body of any size: one message, published when the writer is closed, whole or not at all.

    As a context manager: a clean exit publishes the body, an exception drops it.
    """

    def __init__(
        self,
        units: StagedUploads,
        stream: str,
        options: Mapping[str, Any],
        publish: Callable[[bytes], object],
        make: Callable[[], object] | None,
        wait_s: float | None = None,
    ) -> None:
        """`options`: fields of `.put`. `publish`: publishes a body that fits one message. `make`: makes a missing
        stream; None: it is not made. `wait_s`: the most seconds to wait for room; None: no limit."""
        self._units, self._publish, self._make, self._wait_s = units, publish, make, wait_s
        self._options = {"stream": stream, "headers": {}, **options}
        self._id = self._options.pop("id", "")
        if headers.PART in self._options["headers"]:
            raise BadRequest(f"invalid header {headers.PART!r}: set by the writer (expected other headers)")
        self._first, self._buffer = b"", bytearray()
        self._count = 0  # parts before the buffer
        token = secrets.token_hex(8)
        self._head, self._rest = f"{token}-1", f"{token}-2"
        self._staged: list[str] = []  # parts of the transaction that were opened
        self._file: File | None = None
        self._failure: MqfsError | None = None  # the error of a write, after which nothing is published

    def __repr__(self) -> str:
        size = self._count * PIECE_BYTES + len(self._buffer)
        return f"<mqfs body of {self._options['stream']!r}, {'closed' if self.closed else f'{size} bytes, open'}>"

    def writable(self) -> bool:
        """Say that the file can be written to, as files do.

        Returns:
            True.
        """
        return True

    def write(self, data: Any) -> int:
        """Append to the body.

        Args:
            data: Bytes, or text as UTF-8.

        Returns:
            The number of bytes.

        Raises:
            ValueError: The writer is closed.
            MqfsError: The server refused a part, or is disconnected. Nothing is published then, and `close` raises the
                error again.
        """
        self._require_open()
        view = memoryview(data).cast("B") if not isinstance(data, str) else memoryview(data.encode())
        at = 0
        try:
            while at < len(view):
                if len(self._buffer) == PIECE_BYTES:
                    self._stage(last=False)
                taken = view[at : at + PIECE_BYTES - len(self._buffer)]
                self._buffer += taken
                at += len(taken)
        except MqfsError as error:
            self._failure = error  # a part of the body is missing
            raise
        except BaseException:  # Ctrl-C
            self._failure = Interrupted("a write of the body was interrupted")
            raise
        return len(view)

    def _require_open(self) -> None:
        if self.closed:
            raise ValueError("write failed: the body is closed")
        if self._failure is not None:
            raise self._failure

    def _stage(self, *, last: bool) -> None:
        """Stage a part. The first one stays in memory, as it carries the total."""
        piece = bytes(self._buffer)
        self._buffer.clear()
        self._count += 1
        if self._count == 1:
            self._first = piece
            return
        if self._file is None:
            self._file = self._open_part(self._rest)
        self._put(self._file, piece, f"{self._count}/{self._count}" if last else str(self._count))

    def _open_part(self, name: str) -> File:
        self._staged.append(name)
        return self._units.open(name)

    def _put(self, file: File, piece: bytes, place: str) -> None:
        data = self._request(piece, place)
        try:
            file.write(data)
        except NotFound:
            if self._make is None:
                raise
            self._make()
            file.write(data)

    def _request(self, piece: bytes, place: str) -> bytes:
        """Return a request for `.put`. Only the first part has the `id` of the body."""
        fields = {**self._options, "headers": {**self._options["headers"], headers.PART: place}}
        if self._id and place.startswith("1/"):
            fields["id"] = self._id
        return json.dumps(fields, ensure_ascii=False).encode() + b"\n" + piece

    def close(self) -> None:
        """Publish the body. After an error, also of `write`, nothing of it is published.

        Raises:
            MqfsError: The error of a `write` that failed.
            NotFound: The stream is missing, with `create=False`.
            StreamFull: The stream is full, with `full reject`.
            Disconnected: The outcome is unknown.
        """
        if self.closed:
            return
        try:
            self._require_open()
            if not self._count:
                self._publish(bytes(self._buffer))
            else:
                self._commit()
        except BaseException:
            self._drop()
            raise
        finally:
            super().close()

    def _commit(self) -> None:
        self._stage(last=True)
        assert self._file is not None
        self._file.close()
        with closing(self._open_part(self._head)) as file:
            self._put(file, self._first, f"1/{self._count}")
        self._units.commit(self._head, self._rest, wait_s=self._wait_s)

    def abort(self) -> None:
        """Drop the body: nothing of it is published."""
        if not self.closed:
            self._drop()
            super().close()

    def _drop(self) -> None:
        self._first, self._buffer = b"", bytearray()
        if self._file is not None:
            with suppress(MqfsError):
                self._file.close()
        self._units.abort(*self._staged)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def __del__(self) -> None:
        """Leave the parts of an unclosed body for a later call to abort: any thread may collect this, with locks of the
        client held."""
        with suppress(AttributeError):  # `__init__` has raised
            if not self.closed:
                self._units.dropped.extend(self._staged)


def is_long(body: Any) -> bool:
    """Whether a body is larger than a message."""
    most = limits.MESSAGE_BYTES
    if isinstance(body, bytes):
        return len(body) > most
    if isinstance(body, str):
        return 4 * len(body) > most and len(body.encode()) > most
    return view_of(body).nbytes > most
