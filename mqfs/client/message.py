"""A message as the library shows it, and the receipt of a publish."""

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
        return at, 0, 0, 0  # all is done in Python, slowly


EVER = -(2**63)  # ns, before all messages
SHOWN_BYTES = 40  # of a body, in a message's repr


def topic_of(stream: str, headers: Mapping[str, str] | None = None) -> str:
    """The text that is escaped as this name; the name where it is not escaped. `headers`: of a message, which have the
    text where the name was too short for it."""
    if headers and is_shortened(stream):
        text = headers.get(names.TOPIC, "")
        if stream_name(text) == stream:
            return text
    return text_of(stream).decode(errors="surrogateescape")


class _NoHeaders(dict[str, str]):
    """The headers of all messages without any, which share them. A copy is a dict of its own."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("headers of a message cannot be changed")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type[dict[str, str]], tuple[()]]:
        return dict, ()


NO_HEADERS: Mapping[str, str] = _NoHeaders()


class Message(NamedTuple):
    """A message: a tuple of its fields.

    Attributes:
        sequence: Its number in the group, from 1 on. Of a body in parts that of the first part.
        stream: The current name of its stream.
        time_ns: When it was written, UNIX nanoseconds.
        body: Its bytes.
        headers: Its headers by name, those of the server among them: `sender`, `priority`, `ttl`, `id`.
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
        """When its own `ttl` ends, UNIX nanoseconds; None: it has none. The group's is in `Group.settings`."""
        own = self.headers.get(names.TTL)
        return None if own is None else self.time_ns + parse_duration(own)

    @property
    def key(self) -> str:
        """Which messages it belongs to; empty: it has no key."""
        return self.headers.get(names.KEY, "")

    @property
    def topic(self) -> str:
        """The text that `mqfs.escape` made the stream's name of; else the name."""
        return topic_of(self.stream, self.headers)

    def json(self) -> Any:
        """The value of a body in JSON.

        Returns:
            The value that `Group.publish_json` was given.

        Raises:
            ValueError: The body is not JSON.
        """
        return json.loads(self.body)

    def open(self) -> io.BufferedIOBase:
        """Open the body as a file to read, which does not hold a large one in memory.

        Returns:
            A binary file, at its beginning.
        """
        return io.BytesIO(self.body)


class Receipt(NamedTuple):
    """The answer to a publish. Times are UNIX nanoseconds; of a delayed message those of its delivery.

    A ring knows the sequence only, and the commit of a body in parts not even that.

    Attributes:
        sequence: The message's; of a known `id` that of the message published first. 0: unknown, or `full drop-new`
            discarded it.
        time_ns: When it was written. 0: unknown.
        expires_ns: When its `ttl`, or else the group's, ends. None: never, or unknown.
        duplicate: Whether its `id` was known: nothing was published now.
        retained: Whether a later or a present reader gets it. False: the group has `replay off` and had no consumer and
            no reader, so none ever does; or the log has the message of a known `id` no more. None: unknown.
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
            ValueError: It is no such answer.
        """
        if not text:
            return cls(retained=False)
        sequence, time_ns, expires_ns, duplicate, retained = map(int, text.split())
        return cls(sequence, time_ns, expires_ns or None, bool(duplicate), bool(retained))


class RecordDecoder:
    """`format record` to messages. It holds the bytes of a record of which only a part was fed.

    It learns the names of streams from the records that carry them. Runs of messages are decoded in C, where that part
    was built; all other records, and a damaged one, here.
    """

    def __init__(self) -> None:
        self.deliveries: dict[int, int] = {}  # by sequence: of a consumer's messages that were delivered before
        self.has_headers = False  # some of the messages that `feed` returned have
        self._names: dict[int, str] = {}
        self._rest = b""

    @property
    def has_part(self) -> bool:
        """Whether it holds a part of a record."""
        return bool(self._rest)

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are whole now. Raises DiskFailed for a corrupt record: at once where it is the first, else
        with the next call."""
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
        """Decode the record at `at`; where the next one begins, or `at` if this one is not whole."""
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
    """The record at `at`, None if it is not whole, and where the next begins. Raises DiskFailed for a corrupt one."""
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
