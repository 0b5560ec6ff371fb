"""One record ↔ bytes: the same bytes in the log, in `format record` and in shared memory (doc/format.md, "Record")."""

from __future__ import annotations

import struct
from collections.abc import Mapping

import google_crc32c

from mqfs.types import Kind, Record

HEAD = struct.Struct("<IIQqIBBH")  # size, crc, sequence, time, stream, kind, flags, header bytes
_SIZE = struct.Struct("<I")
_REST = struct.Struct("<QqIBBH")


def encode(record: Record) -> bytes:
    """The bytes of one record, padded."""
    sequence, time_ns, stream, kind, flags, headers, body = record
    size = HEAD.size + len(headers) + len(body)
    first = _SIZE.pack(size)
    rest = _REST.pack(sequence, time_ns, stream, kind, flags, len(headers)) + headers + body
    crc = google_crc32c.extend(google_crc32c.value(first), rest)
    return first + _SIZE.pack(crc) + rest + bytes(-size % 8)


def encode_names(sequence: int, time_ns: int, names: Mapping[int, str]) -> bytes:
    """A record that tells the names of streams: each `u32 number, u16 bytes of the name, name`."""
    pieces = []
    for number, name in names.items():
        data = name.encode()
        pieces.append(struct.pack("<IH", number, len(data)) + data)
    return encode(Record(sequence, time_ns, 0, Kind.NAMES, 0, b"", b"".join(pieces)))
