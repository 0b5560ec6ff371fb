"""The log of a group with `keep ring`: messages and acknowledgements are in memory only.

Owns which record goes where: names, settings and consumers are changes and go to the bucket on disk, the rest is gone
with the server. Sequences are reserved there in very large blocks, so that none is given twice and no message costs the
disk anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set

from mqfs import limits
from mqfs.log.record import HEAD_BYTES, padded
from mqfs.model import Buffer, Columns, Draft, Kind
from mqfs.store.api import Bucket, LogEnd, LogUpkeep
from mqfs.store.memory_log import MemoryBucket

_IN_MEMORY = frozenset({Kind.MESSAGE, Kind.END, Kind.ACK})


class _CombinedEnd:
    """See `LogEnd` in mqfs/store/api.py."""

    __slots__ = ("_disk", "_memory")

    def __init__(self, memory: LogEnd, disk: LogEnd) -> None:
        self._memory, self._disk = memory, disk

    @property
    def next(self) -> int:
        return self._memory.next

    @property
    def last_ns(self) -> int:
        return max(self._memory.last_ns, self._disk.last_ns)

    @property
    def failed(self) -> OSError | None:
        return self._disk.failed


class _Writer:
    """See `LogWriter` and `RangeWriter` in mqfs/store/api.py."""

    __slots__ = ("_bound", "_disk", "_memory")

    def __init__(self, memory: MemoryBucket, disk: Bucket) -> None:
        self._memory, self._disk = memory, disk
        self._bound = 0
        self._reserve()

    def _reserve(self) -> None:
        bound = self._memory.end.next + limits.VOLATILE_SEQUENCES
        self._disk.ranges.reserve_space(0, limits.VOLATILE_SEQUENCES)
        self._bound = bound

    def _require_sequences(self, count: int) -> None:
        """Have as many reserved, before the first is given: what the disk refuses is not in memory."""
        if self._memory.end.next + count > self._bound:
            self._reserve()

    def _in_step(self) -> None:
        """Pass the next sequence to the bucket on disk, which writes it at a clean stop."""
        self._disk.ranges.skip_to(self._memory.end.next)

    @property
    def state(self) -> Callable[[], bytes]:
        return self._disk.writer.state

    @state.setter
    def state(self, state: Callable[[], bytes]) -> None:
        self._disk.writer.state = state

    def append(self, kind: int, stream: int, time_ns: int, body: bytes, headers: bytes = b"") -> int:
        if kind not in _IN_MEMORY:
            return self._disk.writer.append(kind, stream, time_ns, body, headers)
        self._require_sequences(1)
        sequence = self._memory.writer.append(kind, stream, time_ns, body, headers)
        self._in_step()
        return sequence

    def append_batch(self, drafts: Sequence[Draft], time_ns: int) -> int:
        durable = [draft for draft in drafts if draft.kind not in _IN_MEMORY]
        if len(durable) == len(drafts):
            return self._disk.writer.append_batch(drafts, time_ns)
        self._require_sequences(len(drafts))
        volatile = [draft for draft in drafts if draft.kind in _IN_MEMORY]
        if durable:
            # First what the disk may refuse, once memory cannot: nothing of a refused batch is readable.
            need = sum(padded(HEAD_BYTES + len(d.headers) + len(d.body)) for d in volatile if d.kind <= Kind.END)
            self._memory.ranges.reserve_space(need, 0)
            self._disk.writer.append_batch(durable, time_ns)
        sequence = self._memory.writer.append_batch(volatile, time_ns)
        self._in_step()
        return sequence

    def skip(self) -> int:
        self._require_sequences(1)
        sequence = self._memory.writer.skip()
        self._in_step()
        return sequence

    # ------------------------------------------------------------ records that others encoded and numbered

    def reserve_space(self, size: int, messages: int) -> int:
        self._require_sequences(messages)
        return self._memory.ranges.reserve_space(size, messages)

    def hold_room(self, size: int) -> None:
        pass  # of the disk none is used

    def append_range(self, data: Buffer, rows: Columns) -> None:
        self._memory.ranges.append_range(data, rows)
        self._in_step()

    def skip_to(self, sequence: int) -> None:
        self._memory.ranges.skip_to(sequence)
        self._in_step()

    def continue_at(self, sequence: int) -> None:
        if sequence <= self._bound:  # no ring was allowed to give a later one
            self.skip_to(sequence)

    def on_sequences_reserved(self, granted: Callable[[int], None] | None) -> None:
        self._memory.ranges.on_sequences_reserved(granted)

    def quarantine(self, data: bytes, why: str) -> None:
        self._disk.ranges.quarantine(data, why)


class _Upkeep:
    """See `LogUpkeep` in mqfs/store/api.py."""

    __slots__ = ("_disk", "_memory", "close", "fail", "history", "lost", "sync")

    def __init__(self, memory: LogUpkeep, disk: LogUpkeep) -> None:
        self._memory, self._disk = memory, disk
        self.history, self.sync, self.fail, self.close = disk.history, disk.sync, disk.fail, disk.close
        self.lost = disk.lost

    @property
    def damaged(self) -> int:
        return self._disk.damaged

    @property
    def size(self) -> int:
        return self._memory.size

    def trim(self, floors: Mapping[int, int], dropped: Set[int]) -> None:
        self._memory.trim(floors, dropped)
        self._disk.trim({}, frozenset())


class MemoryOnlyLog:
    """See `Bucket` in mqfs/store/api.py. Hands on the memory's reader."""

    __slots__ = ("end", "id", "metrics", "ranges", "reader", "upkeep", "writer")

    def __init__(self, disk: Bucket) -> None:
        memory = MemoryBucket(disk.id, b"")
        memory.writer.state = bytes  # its acknowledgements are forgotten at times: consumers have them
        memory.end.next = disk.end.next
        self.id = disk.id
        self.end = _CombinedEnd(memory.end, disk.end)
        self.reader, self.metrics = memory.reader, memory.metrics
        self.writer = self.ranges = _Writer(memory, disk)
        self.upkeep = _Upkeep(memory.upkeep, disk.upkeep)


__all__ = ["MemoryOnlyLog"]
