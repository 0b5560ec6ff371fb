"""Protocols: the calls of the engine to a store and a ring, and of front ends to an open file."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import accumulate
from typing import Any, NoReturn, Protocol

from mqfs.model import Buffer, Draft, Head, Listed, Record, RecordColumns, RecordRun, Split, Step

Committed = Callable[[OSError | None], None]
Wanted = Callable[[int, int], int]  # stream, sequence -> the last message up to that one which is wanted; 0: none


class LogEnd(Protocol):
    """The end of a log: the next sequence, the newest time, and the error that made the log read-only."""

    @property
    def next(self) -> int:
        """The sequence that the next message takes; starts at 1."""
        ...

    @property
    def last_ns(self) -> int:
        """Time of the newest record; 0 where there is none."""
        ...

    @property
    def failed(self) -> OSError | None:
        """The first write or sync that failed; the log is read-only from then on."""
        ...


class LogReader(Protocol):
    """The messages of a log: its records of kind MESSAGE and END. All calls raise DiskFailed where the disk cannot be
    read. A record that fails its check raises errors.Damaged each time it is read; readers continue behind its
    `sequence`."""

    @property
    def first(self) -> int:
        """The lowest sequence the log may still hold; == next where it holds no message."""
        ...

    def find(self, stream: int, sequence: int) -> Record | None:
        """Return the first message of `stream` at or after `sequence`. Cost: a search in the stream's own postings."""
        ...

    def locate(self, stream: int, sequence: int) -> tuple[int, int] | None:
        """Return (sequence, body bytes) of the message that `find` returns, from the index alone."""
        ...

    def scan(self, sequence: int) -> Record | None:
        """Return the first message of any stream at or after `sequence`."""
        ...

    def read_run(self, sequence: int, end: int, most_bytes: int, streams: Set[int], headed: bool) -> RecordRun | None:
        """Return messages of `streams` at or after `sequence` and below `end`: a contiguous run of at most
        `most_bytes`, each checked. `headed`: messages may have headers. Returns None where the caller should read them
        one by one: they are few, or damaged, or have headers although `headed` is off."""
        ...

    def before(self, sequence: int, stream: int | None = None) -> int | None:
        """Return the greatest sequence of a message (of `stream`) below `sequence`."""
        ...

    def first_at_time(self, time_ns: int) -> int:
        """Return the sequence of the first message at or after that wall time; `next` if there is none."""
        ...

    def heads(self, sequence: int, most: int) -> list[Head]:
        """Return the heads of the first messages at or after `sequence`: at most `most`, and at least one if there is
        any. Of the log only header bytes are read, and they are not checked."""
        ...

    def search_headers(self, sequence: int, most: int, keys: Sequence[bytes]) -> tuple[list[int], int]:
        """Search the headers of at most `most` messages at or after `sequence`, unchecked. Returns the sequences of
        messages that have one of `keys`, as headers.key makes them (a match may lie in another header), and the
        sequence to continue at: `next` at the end."""
        ...


class LogMetrics(Protocol):
    """Counts and positions, from the index alone."""

    def count(self, stream: int, sequence: int, end: int | None = None) -> tuple[int, int]:
        """Return (messages, body bytes) of `stream` at or after `sequence` and below `end` (None: to the end). Cost: a
        search, and a step for each message counted."""
        ...

    def header_bytes(self, stream: int, sequence: int, end: int | None = None) -> int:
        """Return the header bytes of the messages that `count` counts."""

    def count_eof_markers(self, stream: int, sequence: int, end: int | None = None) -> int:
        """Return the number of EOF markers among the messages that `count` counts."""
        ...

    def split_points(self, sequence: int, end: int, streams: Set[int] | None, messages: int, size: int) -> list[Split]:
        """Split the messages of `streams` (None: all) at or after `sequence` and below `end` into stretches of at most
        `messages` messages and about `size` bytes each. Of many splits only the first are returned."""
        ...

    def streams(self) -> Set[int]:
        """Return the numbers of all streams that have messages. Cost: every index is loaded."""
        ...

    def stretch_end(self, sequence: int) -> int:
        """Return where the stretch with `sequence` ends: that of its sealed segment, as room is given back by whole
        segments, or a portion of the segment that is appended to."""
        ...

    def listing(self, floors: Mapping[int, int], end: int) -> Iterator[Listed]:
        """Yield the messages of the streams in `floors` below `end`, each from its floor on: a segment at a time, the
        newest first."""
        ...


class LogWriter(Protocol):
    """Appending. All calls raise DiskFull, DiskFailed and ReadOnly, and append nothing then. A call waits for a sync
    only where it needs sequences whose reservation is not on disk yet."""

    state: Callable[[], bytes]  # set by the engine: returns the body of a STATE record of the present state

    def append(self, kind: int, stream: int, time_ns: int, body: bytes, headers: bytes = b"") -> int:
        """Append one record and return the sequence it carries."""
        ...

    def append_batch(self, drafts: Sequence[Draft], time_ns: int) -> int:
        """Append an atomic batch: records seen together or not at all. Returns the sequence of the first."""
        ...

    def skip(self) -> int:
        """Use up one sequence for a message that is not stored."""
        ...


class LogUpkeep(Protocol):
    """All calls are synchronous; only `close` waits for a sync."""

    @property
    def size(self) -> int:
        """Bytes of the whole log as stored."""
        ...

    @property
    def damaged(self) -> int:
        """Number of records read that failed their check."""
        ...

    @property
    def lag(self) -> tuple[int, float] | None:
        """Bytes that the copy of the store lacks, and the age of the oldest in seconds; None: the store has no copy."""
        ...

    @property
    def is_final(self) -> bool:
        """Whether trimmed messages are gone for good: no file waiting for removal holds them, and the store has no copy
        (a copy is not compacted)."""
        ...

    @property
    def lost(self) -> list[str]:
        """Descriptions of the damaged parts of the history; complete once `history` was iterated."""
        ...

    def history(self) -> tuple[bytes | None, Iterable[Record]]:
        """Return the newest durable state's body (None: no state is whole), and the CHANGE, ACK and CLOCK records
        behind it, in order. A log in memory returns the group's current state instead of many records. Records are read
        during the iteration: iterate once, before any other use of the bucket."""
        ...

    def trim(self, floors: Mapping[int, int], dropped: Set[int], wanted: Wanted | None = None) -> Iterator[None]:
        """Give back the room of unwanted messages. `floors`: the low watermark of each stream that retains messages.
        Unwanted are messages below it, those of other streams, those in `dropped`, and those that `wanted` leaves out;
        they may still be found afterwards. The call may do nothing, remove segments, or compact. It is cheap enough to
        be made every second. Returns the rest of the work, in steps: for a log in memory all of it. Between steps
        messages may be appended, and read. `dropped` must not change."""
        ...

    def sync(self, then: Committed | None = None, within_s: float = 0.0) -> None:
        """Sync every record appended so far, at once or within `within_s` seconds; then call `then(None)`, or
        `then(error)` if that failed. `then` is called on the engine's thread, perhaps before this returns."""
        ...

    def replicate(self, then: Committed) -> None:
        """Sync as `sync` does, at once, and also wait for the copy of the store, if there is one."""
        ...

    def on_rolled(self, then: Callable[[], None]) -> None:
        """Call `then` when the state last returned by `LogWriter.state` is at the head of the newest segment; never for
        a log in memory."""
        ...

    def fail(self, error: OSError) -> None:
        """Make the log read-only from now on; callers that wait for a sync get the error."""
        ...

    def close(self) -> None:
        """Sync everything, and mark the log as cleanly stopped."""
        ...


class RangeWriter(Protocol):
    """Appending of records that others encoded and numbered, as a ring's log needs it."""

    def reserve_space(self, size: int, messages: int) -> int:
        """Make room for `size` bytes of records, and reserve `messages` sequences on disk. Returns the position that
        the records would get. Raises DiskFull, DiskFailed, ReadOnly."""
        ...

    def hold_room(self, size: int) -> None:
        """Keep `size` bytes of the disk allocated for the next appends, so that these cannot fail with DiskFull; 0:
        give them back. Raises DiskFull, DiskFailed, ReadOnly."""

    def append_range(self, data: Buffer, rows: RecordColumns) -> None:
        """Append whole encoded batches of messages at the position that `reserve_space` returned and for which `rows`
        was made. Their sequences are not below `next`."""
        ...

    def skip_to(self, sequence: int) -> None:
        """Use up all sequences below `sequence`, for which `reserve_space` was called."""
        ...

    def continue_at(self, sequence: int) -> None:
        """Set the next sequence after a start, before anything is appended: numbers from `sequence` on were never
        assigned."""
        ...

    def on_sequences_reserved(self, granted: Callable[[int], None] | None) -> None:
        """Reserve sequences in large blocks from now on, and pass the bound below which they may be assigned to
        `granted`, now and with each block. None: stop that."""
        ...

    def quarantine(self, data: bytes, why: str) -> None:
        """Keep bytes that failed a check for a person to examine."""
        ...


class Bucket(Protocol):
    """One group's log, in parts. A wrapper passes on the parts it does not change."""

    @property
    def id(self) -> int:
        """The group's number: > 0, never assigned twice in a store; the root group's is 1."""
        ...

    @property
    def end(self) -> LogEnd: ...

    @property
    def reader(self) -> LogReader: ...

    @property
    def metrics(self) -> LogMetrics: ...

    @property
    def writer(self) -> LogWriter: ...

    @property
    def upkeep(self) -> LogUpkeep: ...

    @property
    def ranges(self) -> RangeWriter: ...


class RingPort(Protocol):
    """A group's ring, as the engine sees it. While a group has one, its bucket writes messages through the ring."""

    @property
    def floor(self) -> int:
        """The lowest sequence that a process following the ring may not have read yet; NEVER without such a process. It
        stays valid after the ring has ended."""
        ...

    def drain(self) -> None:
        """Append to the log, and deliver, all messages published so far."""
        ...

    def changed(self, changes: Sequence[Mapping[str, Any]]) -> None:
        """React to changes of the group's state; some end the ring."""
        ...

    def retire(self, why: str) -> None:
        """End the ring: published messages are appended to the log first, and the group has no ring afterwards."""
        ...


class SpoolFile(Protocol):
    """Staged bytes; they end with the server that wrote them. All calls raise OSError where the disk fails."""

    @property
    def size(self) -> int: ...

    def append(self, data: bytes) -> None:
        """Append `data`; after an error none of it is in the file."""
        ...

    def read(self, at: int, count: int) -> bytes:
        """Read up to `count` bytes at `at`; fewer only at the end of the file."""
        ...

    def close(self) -> None:
        """Discard the file."""
        ...


class Store(Protocol):
    """Where groups keep their logs."""

    uuid: str
    path: str  # "" in memory
    sync_times: Histogram  # seconds that syncs of messages took
    replication: Any  # None without a copy; else a Replication of mqfs/store/replication.py
    full: dict[int, int]  # groups whose log found no room -> the bytes that were refused, until the disk has as many

    def groups(self) -> Sequence[int]:
        """Return the numbers of all groups, including the root's (1) once it was made."""

    def number(self) -> int:
        """Return a new group number, never assigned before or again. The first is 1."""

    def stage(self, number: int) -> SpoolFile:
        """Make a file for bytes that are staged until they are committed or dropped. `number` is not the number of a
        group or of another file."""
        ...

    def make(self, number: int, state: bytes) -> Bucket:
        """Make a bucket whose first record is `state`; it is durable when this returns."""
        ...

    def make_soon(self, number: int, state: bytes) -> Step[Bucket]:
        """Make a bucket as `make` does, without blocking this thread on the disk."""
        ...

    def open(self, number: int) -> Bucket: ...

    def heads(self, number: int) -> Iterable[bytes]:
        """Return the beginnings of the states of a group that cannot be opened: the readable ones, the newest first."""

    def in_memory(self, bucket: Bucket) -> Bucket:
        """Return the same log with its messages in memory only: for a group with `keep ring`."""
        ...

    def remove(self, number: int, then: Committed | None = None) -> Step[None]:
        """Remove a group; durable when the step is done. The bucket must not be used afterwards, unless the step fails.
        If the store has a copy, `then` is called when the copy has recorded the removal."""
        ...

    def tick(self) -> None:
        """Do a small portion of maintenance (compaction, closing of idle files); called about once a second."""
        ...

    def close(self) -> None:
        """Sync everything, and mark all logs as cleanly stopped."""
        ...


class Handle(Protocol):
    """An open file, with all calls of a front end. One front end owns it at a time."""

    reader_pid: int  # the process that reads, set before `read` by a front end that knows it; 0: unknown
    sequential: bool  # offsets mean nothing: opened to read and write, or a cursor (FUSE: FOPEN_STREAM)
    parkable: bool  # a read may wait: streams, order, cursors (FUSE: direct I/O; 9P: never a second Tread to fill up)
    whole_below: int  # command files, set by a front end: a shorter write is complete, its last line too

    def read(self, count: int, offset: int = 0) -> Step[bytes]: ...

    def write(self, data: bytes, offset: int = 0) -> Step[int]: ...

    def refuse_long(self, size: int) -> NoReturn:
        """Refuse a write of at least `size` bytes, which a mount may get in pieces. Raises TooLong."""
        ...

    def push_back(self, data: bytes) -> None:
        """Return `data` again at the next read: it was the result of the last read and could not be delivered."""
        ...

    @property
    def readable(self) -> bool: ...

    @property
    def writable(self) -> bool: ...

    def flush(self) -> Step[int]:
        """Handle close(2) of a descriptor, and return its result. Raises why an unfinished command is refused."""
        ...

    def watch(self, then: Callable[[], None] | None) -> None:
        """Call `then` once when `readable` or `writable` may have become true (poll); None: cancel that."""
        ...

    def close(self) -> None: ...


# ------------------------------------------------------------ histogram

BOUNDS_S = (0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0)


class Histogram:
    """A histogram of values added by one thread or by several. `bounds`: the highest value of each bucket, ascending; a
    last bucket counts all values above them."""

    def __init__(self, bounds: tuple[float, ...] = BOUNDS_S) -> None:
        self.bounds = bounds
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)
        self._lock = threading.Lock()

    def add(self, value: float) -> None:
        with self._lock:
            self._counts[bisect_left(self.bounds, value)] += 1
            self.sum += value

    def cumulative(self) -> list[int]:
        """Return the number of values at or below each bound, and last, the number of all values."""
        return list(accumulate(self._counts))
