"""One frame of a replicated log and its bytes: a group commit over all groups, or a part of one.

    at  type      what
    0   8 bytes   `mqfsrep1`
    8   u32       CRC-32C of all bytes but these four
    12  u32       size of the frame
    16  u32       flags: bit 0 MORE, the next frame belongs to this one; bit 1 OWN, a takeover
    20  u32       CRC field of the frame before it; of the first that of a checkpoint before it, 0: there is none
    24  u64 u64   epoch, number
    40  u64       number of the frame before it, 0 of the first
    48  i64       wall time, UNIX nanoseconds
    56  16 bytes  uuid of the store
    72            entries: each `u32 bytes of the rest, u8 kind, 3 bytes of 0`, and the rest

Numbers only grow and may have holes. Frames up to one without MORE are applied together or not at all. A run has the
bytes of one segment file, at their position there. There is no I/O here.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable, Sequence
from typing import NamedTuple

from google_crc32c import extend, value

from mqfs import limits
from mqfs.errors import BadReplica
from mqfs.store.replication import LogBytes, Removed, Trimmed

MAGIC = b"mqfsrep1"
MORE, OWN = 1, 2
_HEAD = struct.Struct("<8sIIIIQQQq16s")
HEAD_BYTES = _HEAD.size
_ENTRY = struct.Struct("<IB3s")
_RUN = struct.Struct("<IQQ")
_TRIMMED = struct.Struct("<IQQ")
_REMOVED = struct.Struct("<I")
_OWNER = struct.Struct("<16sH")
RUN_BYTES = _ENTRY.size + _RUN.size  # of a run without its data


class Owner(NamedTuple):
    """The primary from this frame on: the number of one run of a server, and the address that clients connect to."""

    run: uuid.UUID
    address: str


Entry = LogBytes | Trimmed | Removed | Owner


class Frame(NamedTuple):
    """One frame of the log. `previous` and `previous_crc` are the number and CRC field of the frame before it."""

    store: uuid.UUID
    epoch: int
    number: int
    previous: int
    previous_crc: int
    time_ns: int
    more: bool
    entries: Sequence[Entry]

    @property
    def owner(self) -> Owner | None:
        """The new owner if the frame is a takeover."""
        first = self.entries[0] if self.entries else None
        return first if isinstance(first, Owner) else None


def encode(frame: Frame) -> bytes:
    """Encode a frame. Raises BadReplica if it exceeds limits.REPLICA_FRAME_BYTES."""
    pieces = [piece for entry in frame.entries for piece in _encode_entry(entry)]
    size = HEAD_BYTES + sum(map(len, pieces))
    if size > limits.REPLICA_FRAME_BYTES:
        raise BadReplica(f"frame {frame.number}: {size} bytes (expected at most {limits.REPLICA_FRAME_BYTES})")
    flags = frame.more * MORE | (frame.owner is not None) * OWN
    rest = (size, flags, frame.previous_crc, frame.epoch, frame.number, frame.previous, frame.time_ns)
    head = bytearray(_HEAD.pack(MAGIC, 0, *rest, frame.store.bytes))
    crc = _crc(bytes(head), b"".join(pieces))
    head[8:12] = crc.to_bytes(4, "little")
    return b"".join((head, *pieces))


def _encode_entry(entry: Entry) -> tuple[bytes, ...]:
    if isinstance(entry, LogBytes):
        body = _RUN.pack(entry.group, entry.first, entry.position)
        return _ENTRY.pack(len(body) + len(entry.data), 1, b""), body, entry.data
    if isinstance(entry, Trimmed):
        return _ENTRY.pack(_TRIMMED.size, 2, b""), _TRIMMED.pack(*entry)
    if isinstance(entry, Removed):
        return _ENTRY.pack(_REMOVED.size, 3, b""), _REMOVED.pack(*entry)
    address = entry.address.encode()
    body = _OWNER.pack(entry.run.bytes, len(address)) + address
    return _ENTRY.pack(len(body), 4, b""), body


def _crc(head: bytes, entries: bytes) -> int:
    return int(extend(value(head[:8] + head[12:HEAD_BYTES]), entries))


def crc_of(data: bytes) -> int:
    """Return the CRC field of an encoded frame, which the next frame repeats."""
    return int.from_bytes(data[8:12], "little")


def decode(data: bytes) -> Frame:
    """Decode a frame; sizes are checked before anything is read. Raises BadReplica for other bytes."""
    if not HEAD_BYTES <= len(data) <= limits.REPLICA_FRAME_BYTES:
        raise BadReplica(f"frame: {len(data)} bytes (expected {HEAD_BYTES} to {limits.REPLICA_FRAME_BYTES})")
    magic, crc, size, flags, before_crc, epoch, number, before, time_ns, store = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise BadReplica(f"frame: begins with {magic!r} (expected {MAGIC!r})")
    if size != len(data):
        raise BadReplica(f"frame {number}: {len(data)} bytes (expected {size}, as it says)")
    if _crc(data, data[HEAD_BYTES:]) != crc:
        raise BadReplica(f"frame {number}: wrong check sum (expected {crc:#010x})")
    entries = _decode_entries(data, number)
    if flags & ~(MORE | OWN):
        raise BadReplica(f"frame {number}: unknown flags {flags:#x} (expected a server of this version)")
    frame = Frame(uuid.UUID(bytes=store), epoch, number, before, before_crc, time_ns, bool(flags & MORE), entries)
    if bool(flags & OWN) != (frame.owner is not None):
        raise BadReplica(f"frame {number}: flags {flags:#x} do not fit its entries")
    return frame


def _decode_entries(data: bytes, number: int) -> list[Entry]:
    entries: list[Entry] = []
    at = HEAD_BYTES
    while at < len(data):
        if len(data) - at < _ENTRY.size:
            raise BadReplica(f"frame {number}: ends inside an entry at {at}")
        size, kind, zeros = _ENTRY.unpack_from(data, at)
        at += _ENTRY.size
        decoder = _DECODERS.get(kind)
        if decoder is None or zeros != b"\0\0\0":
            raise BadReplica(f"frame {number}: unknown entry {kind} (expected a server of this version)")
        if size > len(data) - at:
            raise BadReplica(f"frame {number}: entry of {size} bytes at {at} exceeds the frame")
        entry = decoder(data[at : at + size])
        if entry is None:
            raise BadReplica(f"frame {number}: invalid entry of kind {kind} at {at}")
        entries.append(entry)
        at += size
    return entries


def _decode_run(body: bytes) -> Entry | None:
    if len(body) <= _RUN.size:
        return None
    group, first, position = _RUN.unpack_from(body)
    return LogBytes(group, first, position, body[_RUN.size :])


def _decode_trimmed(body: bytes) -> Entry | None:
    return Trimmed(*_TRIMMED.unpack(body)) if len(body) == _TRIMMED.size else None


def _decode_removed(body: bytes) -> Entry | None:
    return Removed(*_REMOVED.unpack(body)) if len(body) == _REMOVED.size else None


def _decode_owner(body: bytes) -> Entry | None:
    if len(body) < _OWNER.size:
        return None
    run, size = _OWNER.unpack_from(body)
    if size != len(body) - _OWNER.size:
        return None
    try:
        return Owner(uuid.UUID(bytes=run), body[_OWNER.size :].decode())
    except UnicodeDecodeError:
        return None


_DECODERS: dict[int, Callable[[bytes], Entry | None]] = {
    1: _decode_run,
    2: _decode_trimmed,
    3: _decode_removed,
    4: _decode_owner,
}
