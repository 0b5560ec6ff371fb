"""Appending records that others encoded and numbered.

Owns the bytes of a ring on their way into the log. Checks nothing: its caller has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from mqfs import errors
from mqfs.log.record import settled
from mqfs.model import Buffer, Columns
from mqfs.store.appender import Appender
from mqfs.store.chain import Chain
from mqfs.store.disk import write_all
from mqfs.store.group_commit import GroupCommit
from mqfs.store.segment.index import OpenIndex
from mqfs.store.sequences import SequenceBlocks

log = logging.getLogger("mqfs.store")


class DiskRangeWriter:
    """See `RangeWriter` in mqfs/seams.py."""

    __slots__ = ("_appender", "_chain", "_commit", "_end", "_sequences")

    def __init__(self, chain: Chain, commit: GroupCommit, sequences: SequenceBlocks, appender: Appender) -> None:
        self._chain, self._commit, self._sequences, self._appender = chain, commit, sequences, appender
        self._end = chain.end

    def reserve_space(self, size: int, messages: int) -> int:
        end = self._end
        if end.failed is not None:
            raise errors.ReadOnly(str(end.failed))
        segment = self._chain.open
        if segment is None or segment.used + size > segment.room:
            segment = self._appender.make_room(size)
        if messages and end.next + messages > self._sequences.refill:
            segment = self._appender.reserve(size, end.next + messages)
        return segment.used

    def hold_room(self, size: int) -> None:
        if size and self._end.failed is not None:
            raise errors.ReadOnly(str(self._end.failed))
        self._appender.hold_room(size)

    def append_range(self, data: Buffer, rows: Columns) -> None:
        end, commit, segment = self._end, self._commit, self._chain.open
        if end.failed is not None:
            raise errors.ReadOnly(str(end.failed))
        assert segment is not None
        assert segment.used == rows.positions[0]
        if commit.synced == commit.written:
            data = settled(data)
        index = segment.load()
        assert isinstance(index, OpenIndex)
        fd = segment.open()
        try:
            write_all(self._chain.disk, fd, data, segment.used)
        except OSError as error:
            self._appender.roll_back(segment, len(data), error)
        segment.used += len(data)
        commit.written += len(data)
        end.last_ns = max(end.last_ns, rows.times[-1])
        index.extend_by(rows)
        end.next = rows.sequences[-1] + 1

    def skip_to(self, sequence: int) -> None:
        self._end.next = max(self._end.next, sequence)

    def continue_at(self, sequence: int) -> None:
        counts = (segment.counts() for segment in reversed(self._chain.segments))
        newest = next((last for messages, _, last in counts if messages), 0)
        if sequence > self._sequences.reserved:
            sequence = 0  # no ring was allowed to give that one
        self._end.next = max(sequence, newest + 1, self._chain.firsts[-1])
        self._sequences.continue_at(self._end.next)

    def on_sequences_reserved(self, granted: Callable[[int], None] | None) -> None:
        sequences, end = self._sequences, self._end
        sequences.give_to(granted)
        if granted is None or not sequences.is_low(end.next) or end.failed is not None:
            return
        try:
            self._appender.make_room(64)
            bound = self._appender.announce(end.next)
        except errors.MqfsError as error:  # the bound of before is granted; `reserve_space` tries again
            log.warning("group %d: %s", self._chain.group, error)
            return
        self._commit.sync(lambda error: None if error else sequences.confirm(bound))

    def quarantine(self, data: bytes, why: str) -> None:
        group = self._chain.group
        try:
            self._chain.context.quarantine.copy(group, self._end.next, 0, data, why)
        except OSError as error:
            log.warning("group %d: %d bytes were not copied: %s", group, len(data), error)


__all__ = ["DiskRangeWriter"]
