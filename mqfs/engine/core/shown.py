"""What of a log may be shown, where a message is shown only once the copy of the store has it (`sync replica`).

    in the log   m1 m2 m3 | m4  m5 m6            `stored` has all: what is written, counted against `depth`, trimmed
    held                    m4 [m5 m6]           one entry a write, in order, each with its delivery
    shown        m1 m2 m3 |                      `end.next` is 4 to all that read: nothing at or above it is found

When the copy has what a write appended, its entry is removed, its messages are counted and delivered, and its writer
is answered, in this order. So a reader that is served meanwhile finds what was delivered, and nothing more. Changes of
names and settings are not held: only their callers wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set

from mqfs.model import NEVER, Head, Listed, Record, RecordRun, Split
from mqfs.store.api import Bucket, LogEnd, LogMetrics, LogReader

Answer = Callable[[OSError | None], None]


class HeldAnswer:
    """A call that waits for the copy. `first`: the first sequence of the messages that it shows; 0: it shows none."""

    __slots__ = ("first", "is_over", "then")

    def __init__(self, first: int, then: Answer) -> None:
        self.first, self.then = first, then
        self.is_over = False

    def settle(self, error: OSError | None) -> None:
        """Answer it, once. After an error its messages are not shown: they are held until a later call succeeds."""
        if not self.is_over and not (error is not None and self.first):
            self.is_over = True
            self.then(error)


class ShownEnd:
    """See `LogEnd` in mqfs/store/api.py."""

    __slots__ = ("_inner", "_lacking", "firsts", "held")

    def __init__(self, inner: LogEnd, lacking: OSError | None) -> None:
        self._inner, self._lacking = inner, lacking
        self.held: deque[HeldAnswer] = deque()
        self.firsts: deque[int] = deque()  # those of `held` that show messages

    @property
    def next(self) -> int:
        return self.firsts[0] if self.firsts else self._inner.next

    def add(self, entry: HeldAnswer) -> None:
        """Hold one more."""
        self.held.append(entry)
        if entry.first:
            self.firsts.append(entry.first)

    def pop(self) -> HeldAnswer:
        """The first, which is held no more."""
        entry = self.held.popleft()
        if entry.first:
            self.firsts.popleft()
        return entry

    @property
    def last_ns(self) -> int:
        return self._inner.last_ns

    @property
    def failed(self) -> OSError | None:
        return self._inner.failed or self._lacking


class ShownReader:
    """See `LogReader` and `LogMetrics` in mqfs/store/api.py: of the log below `end.next`."""

    def __init__(self, reader: LogReader, metrics: LogMetrics, end: ShownEnd) -> None:
        self._reader, self._metrics, self._end = reader, metrics, end

    @property
    def first(self) -> int:
        return min(self._reader.first, self._end.next)

    def _shown(self, record: Record | None) -> Record | None:
        return record if record is not None and record.sequence < self._end.next else None

    def find(self, stream: int, sequence: int) -> Record | None:
        return self._shown(self._reader.find(stream, sequence)) if sequence < self._end.next else None

    def scan(self, sequence: int) -> Record | None:
        return self._shown(self._reader.scan(sequence)) if sequence < self._end.next else None

    def locate(self, stream: int, sequence: int) -> tuple[int, int] | None:
        found = self._reader.locate(stream, sequence)
        return found if found is not None and found[0] < self._end.next else None

    def read_run(self, sequence: int, end: int, most_bytes: int, streams: Set[int], headed: bool) -> RecordRun | None:
        return self._reader.read_run(sequence, min(end, self._end.next), most_bytes, streams, headed)

    def before(self, sequence: int, stream: int | None = None) -> int | None:
        return self._reader.before(min(sequence, self._end.next), stream)

    def first_at_time(self, time_ns: int) -> int:
        return min(self._reader.first_at_time(time_ns), self._end.next)

    def heads(self, sequence: int, most: int) -> list[Head]:
        return [head for head in self._reader.heads(sequence, most) if head.sequence < self._end.next]

    def search_headers(self, sequence: int, most: int, keys: Sequence[bytes]) -> tuple[list[int], int]:
        found, position = self._reader.search_headers(sequence, most, keys)
        return [sequence for sequence in found if sequence < self._end.next], min(position, self._end.next)

    def _before_end(self, end: int | None) -> int:
        return min(NEVER if end is None else end, self._end.next)

    def count(self, stream: int, sequence: int, end: int | None = None) -> tuple[int, int]:
        return self._metrics.count(stream, sequence, self._before_end(end))

    def header_bytes(self, stream: int, sequence: int, end: int | None = None) -> int:
        return self._metrics.header_bytes(stream, sequence, self._before_end(end))

    def count_eof_markers(self, stream: int, sequence: int, end: int | None = None) -> int:
        return self._metrics.count_eof_markers(stream, sequence, self._before_end(end))

    def split_points(self, sequence: int, end: int, streams: Set[int] | None, messages: int, size: int) -> list[Split]:
        return self._metrics.split_points(sequence, self._before_end(end), streams, messages, size)

    def streams(self) -> Set[int]:
        return self._metrics.streams()

    def stretch_end(self, sequence: int) -> int:
        return min(self._metrics.stretch_end(sequence), self._end.next)

    def listing(self, floors: Mapping[int, int], end: int) -> Iterator[Listed]:
        return self._metrics.listing(floors, self._before_end(end))


class ShownLog:
    """A bucket of which only that is read which the copy has. `lacking`: why nothing may be written at all."""

    __slots__ = ("end", "id", "metrics", "ranges", "reader", "stored", "upkeep", "writer")

    def __init__(self, stored: Bucket, lacking: OSError | None = None) -> None:
        self.stored, self.id = stored, stored.id
        self.end = ShownEnd(stored.end, lacking)
        self.reader = self.metrics = ShownReader(stored.reader, stored.metrics, self.end)
        self.writer, self.ranges, self.upkeep = stored.writer, stored.ranges, stored.upkeep
