"""The log of a group with `keep ring`: its messages, and what became of them, are in memory only.

Owns which record goes where: names, settings and consumers are changes and go to the bucket on disk, all else is gone
with the server. Sequences are reserved there once for a very long time, so that none is given twice and no message
costs the disk anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set

from mqfs import limits
from mqfs.model import Buffer, Columns, Draft, Kind, Record
from mqfs.seams import Committed, Log
from mqfs.store.memory import MemoryBucket

_IN_MEMORY = frozenset({Kind.MESSAGE, Kind.END, Kind.ACK})


class MemoryOnlyLog:
    """See `Log` in mqfs/seams.py."""

    def __init__(self, kept: Log) -> None:
        self.kept = kept
        self._memory = memory = MemoryBucket(kept.id, b"")
        memory.state = bytes  # its acknowledgements are forgotten at times: consumers have them
        memory.next = kept.next
        self._bound = 0
        self._reserve()
        self.find, self.locate, self.scan, self.before = memory.find, memory.locate, memory.scan, memory.before
        self.read_run, self.split_points, self.listing = memory.read_run, memory.split_points, memory.listing
        self.stretch_end = memory.stretch_end
        self.first_at_time, self.count, self.count_eof_markers, self.with_headers = (
            memory.first_at_time,
            memory.count,
            memory.count_eof_markers,
            memory.with_headers,
        )

    def _reserve(self) -> None:
        self._bound = self._memory.next + limits.VOLATILE_SEQUENCES
        self.kept.reserve_space(0, limits.VOLATILE_SEQUENCES)

    def _in_step(self) -> None:
        """The bucket on disk knows what was given: it says so at a clean stop."""
        self.kept.skip_to(self._memory.next)
        if self._memory.next >= self._bound:
            self._reserve()

    @property
    def id(self) -> int:
        return self.kept.id

    @property
    def next(self) -> int:
        return self._memory.next

    @property
    def last_ns(self) -> int:
        return max(self._memory.last_ns, self.kept.last_ns)

    @property
    def failed(self) -> OSError | None:
        return self.kept.failed

    def fail(self, error: OSError) -> None:
        self.kept.fail(error)

    @property
    def damaged(self) -> int:
        return self.kept.damaged

    @property
    def first(self) -> int:
        return self._memory.first

    @property
    def size(self) -> int:
        return self._memory.size

    @property
    def state(self) -> Callable[[], bytes]:
        return self.kept.state

    @state.setter
    def state(self, state: Callable[[], bytes]) -> None:
        self.kept.state = state

    def history(self) -> tuple[bytes, Iterable[Record]]:
        return self.kept.history()

    def append(self, kind: int, stream: int, time_ns: int, body: bytes, headers: bytes = b"") -> int:
        if kind not in _IN_MEMORY:
            return self.kept.append(kind, stream, time_ns, body, headers)
        sequence = self._memory.append(kind, stream, time_ns, body, headers)
        self._in_step()
        return sequence

    def append_unit(self, drafts: Sequence[Draft], time_ns: int) -> int:
        kept = [draft for draft in drafts if draft.kind not in _IN_MEMORY]
        if len(kept) == len(drafts):
            return self.kept.append_unit(drafts, time_ns)
        sequence = self._memory.append_unit([draft for draft in drafts if draft.kind in _IN_MEMORY], time_ns)
        self._in_step()
        if kept:
            self.kept.append_unit(kept, time_ns)
        return sequence

    def skip(self) -> int:
        sequence = self._memory.skip()
        self._in_step()
        return sequence

    def trim(self, floors: Mapping[int, int], dropped: Set[int]) -> None:
        self._memory.trim(floors, dropped)
        self.kept.trim({}, frozenset())

    def sync(self, then: Committed | None = None, within_s: float = 0.0) -> None:
        self.kept.sync(then, within_s)

    def close(self) -> None:
        self.kept.close()

    # ------------------------------------------------------------ what others encoded and numbered

    def reserve_space(self, size: int, messages: int) -> int:
        return self._memory.reserve_space(size, messages)

    def append_range(self, data: Buffer, rows: Columns) -> None:
        self._memory.append_range(data, rows)
        self._in_step()

    def skip_to(self, sequence: int) -> None:
        self._memory.skip_to(sequence)
        self._in_step()

    def continue_at(self, sequence: int) -> None:
        if sequence <= self._bound:  # nobody was allowed to give a later one
            self.skip_to(sequence)

    def on_sequences_reserved(self, granted: Callable[[int], None] | None) -> None:
        self._memory.on_sequences_reserved(granted)

    def quarantine(self, data: bytes, why: str) -> None:
        self.kept.quarantine(data, why)


__all__ = ["MemoryOnlyLog"]
