"""Messages of the library, and the receipts of publishes."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn, TypeVar

from mqfs.errors import DiskFailed
from mqfs.model import Kind, Record
from mqfs.records import headers, record
from mqfs.records import headers as names
from mqfs.syntax.duration import parse_duration
from mqfs.syntax.names import is_shortened, stream_name, text_of

T = TypeVar("T")

try:
    from mqfs.records._native import messages as native_messages
except ImportError:

    def native_messages(
        data: bytes, at: int, names: Mapping[int, str | None], type: type[T], to: list[T], none: object, since: int, /
    ) -> tuple[int, int, int, int]:
        return at, 0, 0, 0  # nothing is decoded: Python does all, slowly


EVER = -(2**63)  # ns, before all messages
SHOWN_BYTES = 40  # of a body in a message's repr


def topic_of(stream: str, headers: Mapping[str, str] | None = None) -> str:
    """Return the text that was escaped to a stream's name, or the name itself. `headers`: of a message; they have the
    text if the name was shortened."""
    if headers and is_shortened(stream):
        text = headers.get(names.TOPIC, "")
        if stream_name(text) == stream:
            return text
    return text_of(stream).decode(errors="surrogateescape")


class _NoHeaders(dict[str, str]):
    """The empty headers that all messages without headers share. It cannot be changed; a copy is an ordinary dict."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("headers of a message cannot be changed")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type[dict[str, str]], tuple[()]]:
        return dict, ()


NO_HEADERS: Mapping[str, str] = _NoHeaders()


class Message(NamedTuple):
    """A message: a tuple of its fields.

    Attributes:
        sequence: The message's number in the group, from 1 on; of a body in parts the first part's.
        stream: The present name of its stream.
        time_ns: When it was written, UNIX nanoseconds.
        body: Its bytes.
        headers: Its headers by name, including those of the server: `sender`, `priority`, `ttl`, `id`.
    """

    sequence: int
    stream: str
    time_ns: int
    body: bytes
    headers: Mapping[str, str]

    def __repr__(self) -> str:
        shown = f"{self.body[:SHOWN_BYTES]!r}{'...' if self.size > SHOWN_BYTES else ''}"
        return f"<mqfs message {self.sequence} of {self.stream!r}: {shown}, {self.size} bytes>"

    @property
    def size(self) -> int:
        """The body's size in bytes."""
        return len(self.body)

    @property
    def expires_ns(self) -> int | None:
        """When the message's own `ttl` ends, UNIX nanoseconds; None without one. `Group.settings` has the group's."""
        own = self.headers.get(names.TTL)
        return None if own is None else self.time_ns + parse_duration(own)

    @property
    def key(self) -> str:
        """The message's key; empty without one. Messages with the same key belong together."""
        return self.headers.get(names.KEY, "")

    @property
    def topic(self) -> str:
        """The text that `mqfs.escape` turned into the stream's name; else the name."""
        return topic_of(self.stream, self.headers)

    def json(self) -> Any:
        """Parse the body as JSON.

        Returns:
            The value that was passed to `Group.publish_json`.

        Raises:
            ValueError: The body is not JSON.
        """
        return json.loads(self.body)

    def open(self) -> io.BufferedIOBase:
        """Open the body as a file to read; a large one is not held in memory.

        Returns:
            A binary file, at its beginning.
        """
        return io.BytesIO(self.body)


class Receipt(NamedTuple):
    """The answer to a publish. Times are UNIX nanoseconds; of a delayed message those of its delivery.

    From shared memory only `sequence` and `retained` are known. Nothing is known of a body in parts, and of a message
    of a user who may not write `.put`.

    Attributes:
        sequence: The message's sequence; for a known `id` that of the message published first. 0: unknown, or
            `full drop-new` discarded the message.
        time_ns: When it was written. 0: unknown.
        expires_ns: When its own `ttl`, else the group's, ends. None: never, or unknown.
        duplicate: Whether its `id` was known: nothing was published now.
        retained: Whether a later or a present reader gets the message. False: the group has `replay off` and had no
            consumer and no reader, so none ever does; the message was discarded; or the log no longer has the message
            of a known `id`. None: unknown.
    """

    sequence: int = 0
    time_ns: int = 0
    expires_ns: int | None = None
    duplicate: bool = False
    retained: bool | None = None

    @classmethod
    def parse(cls, text: bytes) -> Receipt:
        """Read the answer of `.put`.

        Args:
            text: Five numbers; empty: the message was discarded.

        Returns:
            The receipt.

        Raises:
            ValueError: The text is not such an answer.
        """
        if not text:
            return cls(retained=False)
        sequence, time_ns, expires_ns, duplicate, retained = map(int, text.split())
        return cls(sequence, time_ns, expires_ns or None, bool(duplicate), bool(retained))


class RecordDecoder:
    """A decoder of `format record` to messages. It keeps the bytes of an incomplete record for the next `feed`.

    It learns the names of streams from the records that carry them. Runs of messages are decoded in C, if the extension
    was built; all other records, and a damaged one, here.
    """

    def __init__(self) -> None:
        self.deliveries: dict[int, int] = {}  # by sequence, of a consumer's messages that were delivered before
        self.has_headers = False  # whether a message of the last `feed` has headers
        self._names: dict[int, str] = {}
        self._rest = b""

    @property
    def has_part(self) -> bool:
        """Whether it has a part of a record."""
        return bool(self._rest)

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that are complete now. Raises DiskFailed for a corrupt record: at once if no message is
        before it, else with the next call."""
        data = self._rest + data if self._rest else data
        found: list[Message] = []
        at, self.has_headers = 0, False
        while True:
            begin, _, _, headed = native_messages(data, at, self._names, Message, found, NO_HEADERS, EVER)
            self.has_headers |= bool(headed)
            try:
                at = self._decode(data, begin, found)
            except DiskFailed:
                self._rest = data[begin:]
                if not found:
                    raise
                return found
            if at == begin:
                self._rest = data[at:]
                return found

    def _decode(self, data: bytes, at: int, found: list[Message]) -> int:
        """Decode the record at `at`. Returns the offset of the next one, or `at` if the record is incomplete."""
        entry, end = record_at(data, at)
        if entry is None:
            return at
        if entry.kind == Kind.NAMES:
            self._learn(entry.body)
        elif entry.kind == Kind.DELIVERIES:
            self.deliveries[entry.sequence] = int.from_bytes(entry.body, "little")
        elif entry.kind == Kind.MESSAGE:
            found.append(message_of(entry, self._names[entry.stream]))
            self.has_headers |= bool(entry.headers)
        return end

    def _learn(self, table: bytes) -> None:
        at = 0
        while at < len(table):
            number, end = int.from_bytes(table[at : at + 4], "little"), at + 6
            end += int.from_bytes(table[at + 4 : at + 6], "little")
            self._names[number] = table[at + 6 : end].decode()
            at = end


def record_at(data: bytes, at: int) -> tuple[Record | None, int]:
    """Return the record at `at`, or None if it is incomplete, and the offset of the next. Raises DiskFailed for a
    corrupt record."""
    have = len(data) - at
    size = int.from_bytes(data[at : at + 4], "little")
    if have < record.HEAD_BYTES or have < record.padded(size):
        return None, at
    entry = record.decode(data[at : at + size])
    if entry is None:
        raise DiskFailed("corrupt record: CRC mismatch (run mqfs check)")
    return entry, at + record.padded(size)


def message_of(entry: Record, stream: str) -> Message:
    more = headers.decode(entry.headers) if entry.headers else NO_HEADERS
    return Message(entry.sequence, stream, entry.time_ns, entry.body, more)


__all__ = [
    "EVER",
    "NO_HEADERS",
    "Message",
    "Receipt",
    "RecordDecoder",
    "message_of",
    "native_messages",
    "record_at",
    "topic_of",
]
