"""The head of a segment: the group's state, then a reserve record.

Owns making the file of a new segment.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from mqfs import limits
from mqfs.log.record import HEAD_BYTES, INNER, MORE, Row, encode, row_at
from mqfs.model import Kind
from mqfs.store.context import StoreContext
from mqfs.store.disk import Disk, read_all, write_all
from mqfs.store.segment.index import NonMessageRecords
from mqfs.store.sequences import reserve_body


def write_head(
    context: StoreContext, folder: str, group: int, first: int, state: bytes, reserve: int, now_ns: int
) -> tuple[NonMessageRecords, int, int]:
    """Make the file of a new segment in `folder`, with its head; the name is not synced. Returns the head's rows, its
    bytes, and a descriptor: a file that could not be opened, and has its name, would hide the records behind it in the
    old segment. Raises OSError."""
    step = limits.STATE_RECORD_BYTES
    bodies = [state[at : at + step] for at in range(0, len(state), step)] or [b""]
    bodies.append(reserve_body(reserve))
    rows = NonMessageRecords()
    records: list[bytes] = []
    position = 0
    for body in bodies:
        is_last = len(rows) == len(bodies) - 1
        kind, flags = Kind.CHANGE if is_last else Kind.STATE, (0 if is_last else MORE) | (INNER if len(rows) else 0)
        rows.append(Row(first - 1, now_ns, position, len(body), 0, 0, kind, flags))
        records.append(encode(first - 1, now_ns, 0, kind, flags, b"", body))
        position += len(records[-1])
    staged = f"{context.staging}/{group}-{first:020d}.log"
    fd = context.disk.open(staged, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        write_all(context.disk, fd, b"".join(records), 0)
        context.disk.rename(staged, f"{folder}/{first:020d}.log")
    except BaseException:
        context.disk.close(fd)
        raise
    return rows, position, fd


def read_heads(disk: Disk, folder: str) -> Iterator[bytes]:
    """The first records of the states at the heads of its segments, the newest first, as far as they can be read."""
    with contextlib.suppress(OSError):
        for name in sorted((name for name in disk.listdir(folder) if name.endswith(".log")), reverse=True):
            with contextlib.suppress(OSError):
                yield from _read_head(disk, f"{folder}/{name}")


def _read_head(disk: Disk, path: str) -> Iterator[bytes]:
    fd = disk.open(path, os.O_RDONLY)
    try:
        size = int.from_bytes(read_all(disk, fd, 4, 0), "little")
        data = read_all(disk, fd, min(size, HEAD_BYTES + limits.STATE_RECORD_BYTES), 0)
    finally:
        disk.close(fd)
    row = row_at(data, 0)
    if row is not None and row.kind == Kind.STATE:
        yield data[HEAD_BYTES : row.size]


__all__ = ["read_heads", "write_head"]
