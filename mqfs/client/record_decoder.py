"""`format record` to messages.

Owns the bytes of a record of which only a part was read. Reads no file.
"""

from __future__ import annotations

from mqfs.client.message import Message
from mqfs.errors import DiskFailed
from mqfs.log import headers, record
from mqfs.model import Kind, Record


class RecordDecoder:
    """Messages of the records fed so far. Learns the names of streams from the records that carry them."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._data = b""
        self._at = 0

    def feed(self, data: bytes) -> None:
        self._data = self._data[self._at :] + data if self._at < len(self._data) else data
        self._at = 0

    def next(self) -> Message | None:
        """The next whole message; None: feed more. Raises DiskFailed for a corrupt record."""
        while (entry := self._next()) is not None:
            if entry.kind == Kind.NAMES:
                self._learn(entry.body)
            elif entry.kind == Kind.MESSAGE:
                more = headers.decode(entry.headers) if entry.headers else {}
                return Message(entry.sequence, self._names[entry.stream], entry.time_ns, entry.body, more)
        return None

    def _next(self) -> Record | None:
        at, have = self._at, len(self._data)
        if have - at < record.HEAD_BYTES:
            return None
        size = int.from_bytes(self._data[at : at + 4], "little")
        if have - at < record.padded(size):
            return None
        entry = record.decode(self._data[at : at + size])
        if entry is None:
            raise DiskFailed("corrupt record (CRC mismatch)")
        self._at = at + record.padded(size)
        return entry

    def _learn(self, table: bytes) -> None:
        at = 0
        while at < len(table):
            number, end = int.from_bytes(table[at : at + 4], "little"), at + 6
            end += int.from_bytes(table[at + 4 : at + 6], "little")
            self._names[number] = table[at + 6 : end].decode()
            at = end
