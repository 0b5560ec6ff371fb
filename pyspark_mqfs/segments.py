"""Sealed segments of a store on a local or shared disk, read beside its running server.

The module finds the bytes of a range in the files of a bucket (docs/reference/format.md). It writes nothing and takes
no lock: a sealed segment is never changed, only replaced or removed. The rest of a range is read from the server.
"""

from __future__ import annotations

import logging
import mmap
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import partial
from typing import Any

import pyarrow as pa

from mqfs.records.arrow import ArrowDecoder
from mqfs.records.record import HEAD_BYTES, padded
from mqfs.store.segment.index import HEAD_SIZE, SEALED, IndexPart, SealedIndex, decode_part, file_columns_pass, rows_end
from pyspark_mqfs.options import OptionError
from pyspark_mqfs.plan import Range

log = logging.getLogger(__name__)
PIECE_BYTES = 1 << 20  # bytes of one read, and about one batch


def check_store(path: str, store: str) -> bool:
    """Whether the store is visible at the path. Raises OptionError if the path has another store."""
    try:
        with open(os.path.join(path, "mqfs"), encoding="utf-8") as file:
            label = dict(line.split(None, 1) for line in file.read(4_096).splitlines() if " " in line)
    except OSError as error:
        log.warning("option path %r: %s; reading over 9P only", path, error.strerror)
        return False
    if label.get("uuid", "").strip() != store:
        raise OptionError(
            f"option path {path!r}: store {label.get('uuid', '')} (expected store {store}, of option address)"
        )
    return True


class Segments:
    """The sealed segments of one group's bucket."""

    def __init__(self, path: str, group: int) -> None:
        self.folder = os.path.join(path, "buckets", f"{group % 256:02x}", str(group))

    def batches(self, wanted: Range, decoder: ArrowDecoder, position: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield (position after a batch, batch), up to the end of the sealed segments or an error in one."""
        decoder.set_streams(
            {
                number: (
                    name,
                    max(wanted.streams[name][0], floor, wanted.low),
                    min(wanted.streams[name][1], wanted.high),
                )
                for name, (number, floor) in wanted.numbers.items()
            }
        )
        buffer = bytearray()  # shared by all pieces: batches copy from it
        while position < wanted.high:
            segment = self._open(position)
            if segment is None:
                return
            end, file, index = segment
            with file:
                stop = min(end, wanted.high)
                for piece in _pieces(index, position, stop):
                    size = piece[1] - piece[0]
                    if len(buffer) < size:
                        buffer = bytearray(size)
                    data = memoryview(buffer)[:size]
                    if os.preadv(file.fileno(), [data], piece[0]) < size:
                        return
                    batch = decoder.feed(data)
                    if not decoder.is_complete:
                        decoder.restart()
                        return  # the server reports the error
                    position = max(position, decoder.next)
                    yield position, batch
                position = stop

    def _open(self, position: int) -> tuple[int, Any, SealedIndex] | None:
        """Return the end, file and index of the sealed segment of a sequence; None if there is none."""
        try:
            firsts = sorted(int(name[:-4]) for name in os.listdir(self.folder) if name.endswith(".log"))
            at = max(bisect_right(firsts, position) - 1, 0)
            if at + 1 >= len(firsts):
                return None  # the open segment
            base = os.path.join(self.folder, f"{firsts[at]:020d}")
            index = _index(base + ".idx")
            return None if index is None else (firsts[at + 1], open(base + ".log", "rb"), index)
        except (OSError, ValueError):
            return None


def _index(path: str) -> SealedIndex | None:
    """Map an index after all of it was read: an access to a page that the disk cannot read would end the process."""
    with open(path, "rb") as file:
        read = partial(os.pread, file.fileno())
        head = read(rows_end(read(HEAD_SIZE, 0)), 0)
        part: IndexPart | None = decode_part(head) if head else None
        if part is None or not part.flags & SEALED or part.start or not file_columns_pass(read, part):
            return None
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return SealedIndex(data, part) if len(data) >= part.size else None


def _pieces(index: SealedIndex, low: int, high: int) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges of the records of [low, high), split between records."""
    begin, end = bisect_left(index.sequences, low), bisect_left(index.sequences, high)
    positions = index.positions
    while begin < end:
        to = max(bisect_left(positions, positions[begin] + PIECE_BYTES, begin, end), begin + 1)
        size = HEAD_BYTES + index.headers[to - 1] + index.bodies[to - 1]
        yield positions[begin], positions[to - 1] + padded(size)
        begin = to
