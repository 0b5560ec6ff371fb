"""Cursor: a private, positioned reader of a group through its file `.cursor`.

This module has its commands, rc(1) quoting and the decoding of `format record`. It never waits: a read returns
messages, nothing yet, or end of file. It never writes to a stream.
"""

from __future__ import annotations

import errno
import os
import re
import struct
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from mq_tools.errors import ToolError, close, reason

READ_BYTES = 1 << 20  # holds the largest message with its header, and many small ones
_HEADER = struct.Struct("<IIQqIBBH")  # size, checksum, sequence, time, stream, kind, flags, header bytes
_NAME = struct.Struct("<IH")
_VALUE = struct.Struct("<H")
_MESSAGE, _NAMES = 1, 7
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})
_EXPLAINED = (errno.EINVAL, errno.EACCES, errno.ENOENT, errno.ENFILE)  # the next read returns the error text
_PLAIN = re.compile(r"[A-Za-z0-9_.,:+@%/-]+")


class Message(NamedTuple):
    """A message of a group's log."""

    sequence: int
    time_ns: int
    stream: str
    body: bytes
    headers: Mapping[str, str] = _NO_HEADERS
    record: bytes = b""  # only on request: the log's bytes, after the NAMES record of a new stream
    deliveries: int = 0  # set by consumers only


_buffer = memoryview(bytearray(READ_BYTES))  # shared: allocating a MiB costs more than the read


def read_all(fd: int) -> bytes | None:
    """Read once, up to the largest message. Return None where the read would block."""
    try:
        return bytes(_buffer[: os.readv(fd, [_buffer])])
    except BlockingIOError:
        return None


def quote(name: str) -> str:
    """Return a name as one word of a command, quoted as by rc(1)."""
    return name if _PLAIN.fullmatch(name) else "'" + name.replace("'", "''") + "'"


def _names(body: bytes) -> dict[int, str]:
    """Return the table of a NAMES record: each `u32 number, u16 bytes of the name, name`."""
    names, at = {}, 0
    while at < len(body):
        number, size = _NAME.unpack_from(body, at)
        at += _NAME.size + size
        names[number] = body[at - size : at].decode()
    return names


def _headers(data: bytes) -> dict[str, str]:
    """Return the headers of a record: each `u8 key length, key, u16 value length, value`."""
    headers, at = {}, 0
    while at < len(data):
        key_end = at + 1 + data[at]
        start = key_end + _VALUE.size
        end = start + _VALUE.unpack_from(data, key_end)[0]
        headers[data[at + 1 : key_end].decode()] = data[start:end].decode()
        at = end
    return headers


class Cursor:
    """An open `.cursor` in `format record`."""

    format = "record"

    def __init__(self, group: str, file: str = ".cursor", *, records: bool = False) -> None:
        self.group = group
        self.names: dict[int, str] = {}
        self._rest = b""
        self._records = records  # whether each Message gets its `record`
        self._pending = b""  # NAMES records before the next message
        try:
            self.fd = os.open(os.path.join(group, file), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise ToolError(f"{os.path.join(group, file)}: {reason(error)}") from error
        try:
            self.command(f"format {self.format}")
        except BaseException:
            self.close()
            raise

    def select(self, names: Iterable[str]) -> None:
        """Narrow the cursor to these streams. Raises ToolError."""
        self.command("select " + " ".join(map(quote, names)))

    def command(self, line: str) -> None:
        """Write one command. Raises ToolError with the server's text where it is refused."""
        try:
            os.write(self.fd, os.fsencode(line) + b"\n")
        except OSError as error:
            raise ToolError(f"{self.group}: {self._refusal(error)}") from error

    def _refusal(self, error: OSError) -> str:
        if error.errno in _EXPLAINED:
            try:
                text = os.read(self.fd, 65536).decode("utf-8", "replace").strip()
            except OSError:
                text = ""
            if text:
                return text.splitlines()[0]
        return reason(error)

    def read(self) -> list[Message] | None:
        """Return the next messages, [] if the read had no complete one, None if there is nothing yet. Raises EOFError
        at the end, OSError."""
        data = read_all(self.fd)
        if data is None:
            return None
        if not data:
            raise EOFError
        return self._parse(self._rest + data if self._rest else data)

    def _parse(self, data: bytes) -> list[Message]:
        messages = []
        at, end = 0, len(data)
        while end - at >= _HEADER.size:
            size, _, sequence, time_ns, stream, kind, _, header_bytes = _HEADER.unpack_from(data, at)
            if at + size > end:
                break
            start, next_ = at + _HEADER.size + header_bytes, at + ((size + 7) & ~7)
            body = data[start : at + size]
            if kind == _NAMES:
                self.names.update(_names(body))
            if self._records:
                self._pending += data[at:next_]
            if kind == _MESSAGE:
                headers = _headers(data[start - header_bytes : start]) if header_bytes else _NO_HEADERS
                messages.append(Message(sequence, time_ns, self.names[stream], body, headers, self._pending))
                self._pending = b""
            at = next_
        self._rest = data[at:]
        return messages

    def close(self) -> None:
        close(self.fd)
