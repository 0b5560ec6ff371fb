"""`.kept/STREAM`, opened: what the stream keeps, as one finite file.

A small snapshot is copied when it is opened. Of a large one the places are noted: what the stream gives up meanwhile is
an error where it is read, never other bytes. Under `replay key` just after a start the keys are looked up first.
"""

from __future__ import annotations

import contextlib
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice

from mqfs import errors, limits
from mqfs.engine.core.portions import Work
from mqfs.engine.files.handle import PreparedFile
from mqfs.engine.nodes import SnapshotNode
from mqfs.engine.retention.newest import look_up
from mqfs.engine.stream import Stream
from mqfs.model import User

_LISTED = 8_192  # sequences of the log between two looks at the clock: some 2 ms
INDEX_BYTES = 16  # of a message, in the two arrays


class SnapshotHandle(PreparedFile):
    """Its `size` does not change."""

    node: SnapshotNode

    def __init__(self, node: SnapshotNode, user: User, reads: bool, writes: bool) -> None:
        super().__init__(node, user, reads, writes)
        self._sequences, self._ends = array("Q"), array("Q")  # where each message ends in the file
        self._copy: bytes | None = None

    def on_opened(self) -> None:
        self.make(self._look_up(), refuse=True)
        super().on_opened()

    def _look_up(self) -> Work[None]:
        stream = self.node.stream
        yield from look_up(self.group.retention)
        stream.kept.update_low_watermark()
        for sequences, sizes in visible(stream):
            if self._ends:
                yield
            before = self._ends[-1] if self._ends else 0
            self._sequences.extend(sequences)
            self._ends.extend(islice(accumulate(sizes, initial=before), 1, None))
        if len(self._ends) <= limits.KEPT_COPY_MESSAGES and self._bytes <= limits.KEPT_COPY_BYTES:
            self._copy_all()

    def keep_made(self, made: None, *, refuse: bool) -> None:
        self.hold(len(self._copy or b"") + INDEX_BYTES * len(self._ends), refuse=refuse)
        self.size = self._bytes

    @property
    def _bytes(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _copy_all(self) -> None:
        """Damaged messages are left out: readers of the stream get the error. So are those that went while others were
        looked up."""
        pieces = []
        for sequence in self._sequences:
            with contextlib.suppress(errors.Damaged, errors.Stale):
                pieces.append(self._body(sequence))
        self._copy = b"".join(pieces)
        self._sequences, self._ends = array("Q"), array("Q", [len(self._copy)])

    def piece(self, count: int, offset: int) -> bytes:
        if self._copy is not None:
            return self._copy[offset : offset + count]
        pieces = []
        end = min(offset + count, self._bytes)
        at = bisect_right(self._ends, offset)
        while offset < end:
            begin = self._ends[at - 1] if at else 0
            piece = self._body(self._sequences[at])[offset - begin : end - begin]
            pieces.append(piece)
            offset += len(piece)
            at += 1
        return b"".join(pieces)

    def _body(self, sequence: int) -> bytes:
        record = self.group.log.reader.find(self.node.stream.number, sequence)
        if record is None or record.sequence != sequence:
            raise errors.Stale(
                f"message {sequence} of {self.node.name!r} was removed while the file was open (reopen it)"
            )
        return record.body


def visible(stream: Stream) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """What a reader may see of a stream: sequences and body bytes, some at a time, the oldest first. The log may change
    between."""
    log, retention = stream.group.log, stream.group.retention
    if retention.newest is not None and retention.newest.covers(stream):
        yield stream.kept.rows.messages()
        return
    floor = max(stream.state.floor, retention.expiry.expired_before())
    hidden = log.state.dropped.keys() | retention.lapsed.keys() | stream.group.ranks.all_exclusives()
    acked = stream.kept.acked_by_all(floor, None)
    end = log.end.next
    while (found := log.reader.locate(stream.number, floor)) is not None and found[0] < end:
        stop = min(found[0] + _LISTED, end)
        for portion in reversed(list(log.metrics.listing({stream.number: found[0]}, stop))):
            sequences, sizes = portion.columns(portion.messages)
            if hidden or acked:
                rows = zip(sequences, sizes, strict=True)
                left = [row for row in rows if row[0] not in hidden and not _lies_in(acked, row[0])]
                sequences, sizes = [row[0] for row in left], [row[1] for row in left]
            yield sequences, sizes
        floor = stop


def _lies_in(ranges: list[tuple[int, int]], sequence: int) -> bool:
    """Whether it is in one of those ranges, which ascend."""
    at = bisect_right(ranges, sequence, key=lambda one: one[0])
    return at > 0 and sequence <= ranges[at - 1][1]
