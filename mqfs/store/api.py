"""What the engine asks of a store and a ring, and front ends of an open file: Protocols."""

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
    """Where a log ends: what its next record gets, and whether there will be one."""

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
    read. A record that fails its check raises errors.Damaged each time it is met; readers continue behind its
    `sequence`."""

    @property
    def first(self) -> int:
        """The lowest sequence the log may still hold; == next where it holds no message."""
        ...

    def find(self, stream: int, sequence: int) -> Record | None:
        """The first message of `stream` at or after `sequence`. Cost: a search in the stream's own postings."""
        ...

    def locate(self, stream: int, sequence: int) -> tuple[int, int] | None:
        """As find, from the index alone: (sequence, body bytes)."""
        ...

    def scan(self, sequence: int) -> Record | None:
        """The first message of any stream at or after `sequence`."""
        ...

    def read_run(self, sequence: int, end: int, most_bytes: int, streams: Set[int], headed: bool) -> RecordRun | None:
        """Messages of those streams at or after `sequence` and below `end`, as many as lie together within
        `most_bytes`, each checked. `headed`: some may have headers. None: read them one by one, as they are few, or
        damaged, or have headers where none may be."""
        ...

    def before(self, sequence: int, stream: int | None = None) -> int | None:
        """The greatest sequence of a message (of `stream`) below `sequence`."""
        ...

    def first_at_time(self, time_ns: int) -> int:
        """The sequence of the first message at or after that wall time; `next` if there is none."""
        ...

    def heads(self, sequence: int, most: int) -> list[Head]:
        """The first messages at or after `sequence`, at most `most` and at least one where there is any. Of those with
        headers only the bytes of these are read; they are not checked."""
        ...

    def search_headers(self, sequence: int, most: int, keys: Sequence[bytes]) -> tuple[list[int], int]:
        """Looks into the headers of at most `most` messages at or after `sequence`, which are not checked. Returns the
        sequences of those that have one of `keys`, as headers.key makes them, perhaps of some that have one in another
        header, and where to continue: `next` at the end."""
        ...


class LogMetrics(Protocol):
    """Counts and positions, from the index alone."""

    def count(self, stream: int, sequence: int, end: int | None = None) -> tuple[int, int]:
        """(messages, body bytes) of `stream` at or after `sequence` and below `end` (None: to the end). Cost: a search,
        and a step for each message counted."""
        ...

    def header_bytes(self, stream: int, sequence: int, end: int | None = None) -> int:
        """Bytes of the headers of the messages of `count`."""

    def count_eof_markers(self, stream: int, sequence: int, end: int | None = None) -> int:
        """The EOF markers among the messages of `count`."""
        ...

    def split_points(self, sequence: int, end: int, streams: Set[int] | None, messages: int, size: int) -> list[Split]:
        """Splits of the messages of those streams (None: all) at or after `sequence` and below `end`, each of at most
        that many messages and about that many bytes. Where there are many, the first of them."""
        ...

    def streams(self) -> Set[int]:
        """The numbers of all streams that have messages. Cost: every index."""
        ...

    def stretch_end(self, sequence: int) -> int:
        """The end of the segment that holds that sequence: room is given back by whole segments."""
        ...

    def listing(self, floors: Mapping[int, int], end: int) -> Iterator[Listed]:
        """The messages of those streams below `end`, each from its floor on: a segment at a time, the newest first."""
        ...


class LogWriter(Protocol):
    """Appending. All calls raise DiskFull, DiskFailed and ReadOnly, and leave nothing then; none waits for a sync."""

    state: Callable[[], bytes]  # set by the engine: the body of a STATE record, now

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
    """All calls are synchronous; none waits for a sync."""

    @property
    def size(self) -> int:
        """Bytes of the whole log as stored."""
        ...

    @property
    def damaged(self) -> int:
        """Records met that failed their check."""
        ...

    @property
    def lag(self) -> tuple[int, float] | None:
        """Bytes that the copy of the store lacks, and the age of the oldest in seconds; None: it has no copy."""
        ...

    @property
    def is_final(self) -> bool:
        """Whether messages that were found and are not any more are nowhere: neither in a file that is yet to be
        removed, nor in the copy of the store, which is not compacted."""
        ...

    @property
    def lost(self) -> list[str]:
        """What of the history is damaged; known when `history` was iterated."""
        ...

    def history(self) -> tuple[bytes | None, Iterable[Record]]:
        """The newest durable state's body (None: no state is whole), and the CHANGE, ACK and CLOCK records behind it,
        in order; of a log in memory with many of these the state as it is. They may be read during the iteration:
        iterate once, before any other use of the bucket."""
        ...

    def trim(self, floors: Mapping[int, int], dropped: Set[int], wanted: Wanted | None = None) -> None:
        """Give back room. `floors`: the low watermark of each stream that retains messages. Unwanted are the messages
        below it, those of other streams, those in `dropped`, and those that `wanted` leaves out; they may still be
        found afterwards. May do nothing, remove segments, or compact. Cheap enough to be called every second."""
        ...

    def sync(self, then: Committed | None = None, within_s: float = 0.0) -> None:
        """Have every record appended so far on disk, at once or within that time; then call `then(None)`, or
        `then(error)` if it failed. `then` is called on the engine's thread, perhaps before this returns."""
        ...

    def replicate(self, then: Committed) -> None:
        """As `sync`, at once, and in the copy of the store too, where it has one."""
        ...

    def on_rolled(self, then: Callable[[], None]) -> None:
        """Call `then` when the state that `LogWriter.state` gave last is at the head of the newest segment; never for a
        log in memory."""
        ...

    def fail(self, error: OSError) -> None:
        """Make the log read-only from now on; callers that wait for a sync get the error."""
        ...

    def close(self) -> None:
        """Leave everything on disk and marked as cleanly stopped."""
        ...


class RangeWriter(Protocol):
    """Appending records that others encoded and numbered: what a ring's log needs."""

    def reserve_space(self, size: int, messages: int) -> int:
        """Have room for that many bytes of records, and their sequences on disk. Returns the position they would get.
        Raises DiskFull, DiskFailed, ReadOnly."""
        ...

    def hold_room(self, size: int) -> None:
        """Have that many bytes of the disk, which the next appends use: they are not refused for want of room. 0: no
        more. Raises DiskFull, DiskFailed, ReadOnly."""

    def append_range(self, data: Buffer, rows: RecordColumns) -> None:
        """Append whole batches of messages as they were encoded, at the position that `reserve_space` returned and for
        which `rows` was made. Their sequences are not below `next`."""
        ...

    def skip_to(self, sequence: int) -> None:
        """Use up all sequences below that one, for which `reserve_space` was called."""
        ...

    def continue_at(self, sequence: int) -> None:
        """After a start, before anything is appended: sequences from there on were never given."""
        ...

    def on_sequences_reserved(self, granted: Callable[[int], None] | None) -> None:
        """From now on reserve sequences in large blocks, and pass the bound below which they may be given to `granted`,
        now and with each block. None: no more."""
        ...

    def quarantine(self, data: bytes, why: str) -> None:
        """Keep bytes that failed a check for a person to look at."""
        ...


class Bucket(Protocol):
    """One group's log, in parts. Whatever stands in for one hands on the parts it does not change."""

    @property
    def id(self) -> int:
        """The group's number: > 0, never given twice in a store; the root group's is 1."""
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
    """A group's ring, as the engine sees it. While there is one, the group's bucket is what writes to it."""

    @property
    def floor(self) -> int:
        """The lowest sequence that a process which follows it may not have had; also when it has ended."""
        ...

    def drain(self) -> None:
        """Have in the log, and delivered, all messages published until now."""
        ...

    def changed(self, changes: Sequence[Mapping[str, Any]]) -> None:
        """The group's state has changed so."""
        ...

    def retire(self, why: str) -> None:
        """End it: what was published is in the log, and the group has a ring no more."""
        ...


class SpoolFile(Protocol):
    """Staged bytes; gone with the server that wrote them. All calls raise OSError where the disk fails."""

    @property
    def size(self) -> int: ...

    def append(self, data: bytes) -> None:
        """Append; after an error nothing of `data` is there."""
        ...

    def read(self, at: int, count: int) -> bytes:
        """Short only at the end."""
        ...

    def close(self) -> None:
        """It is not needed any more."""
        ...


class Store(Protocol):
    """Where groups keep their logs."""

    uuid: str
    path: str  # "" in memory
    sync_times: Histogram  # seconds that syncs of messages took
    replication: Any  # None where it is copied nowhere; else of mqfs/store/replication.py
    full: dict[int, int]  # groups that the disk had no room for, and for how many bytes; until it has as many

    def groups(self) -> Sequence[int]:
        """Numbers of all groups, the root's (1) too once it was made."""

    def number(self) -> int:
        """A new group number, never given before and never again. The first is 1."""

    def stage(self, number: int) -> SpoolFile:
        """A new file for what is staged until it is committed or dropped, under a number that no group and no other
        file has."""
        ...

    def make(self, number: int, state: bytes) -> Bucket:
        """A new bucket whose first record is that state; durable when this returns."""
        ...

    def make_soon(self, number: int, state: bytes) -> Step[Bucket]:
        """As `make`, but the disk is waited for elsewhere."""
        ...

    def open(self, number: int) -> Bucket: ...

    def heads(self, number: int) -> Iterable[bytes]:
        """The beginnings of the states of a group that cannot be opened: the readable ones, the newest first."""

    def in_memory(self, bucket: Bucket) -> Bucket:
        """The same log, its messages in memory only: for a group with `keep ring`."""
        ...

    def remove(self, number: int, then: Committed | None = None) -> Step[None]:
        """Durable when the step is done; the bucket is to be left alone from now on, unless that fails. Where the store
        has a copy, `then` is called when the copy knows it, too."""
        ...

    def tick(self) -> None:
        """Maintenance in small portions (compaction, closing of idle files); called about once a second."""
        ...

    def close(self) -> None:
        """Leave everything on disk and marked as cleanly stopped."""
        ...


class Handle(Protocol):
    """An open file: all that a front end does with it. One owner at a time; not shared between front ends."""

    reader_pid: int  # the process that reads, set before `read` by a front end that knows it; 0: not known
    sequential: bool  # offsets mean nothing: opened to read and write, or a cursor (FUSE: FOPEN_STREAM)
    parkable: bool  # a read may wait: streams, order, cursors (FUSE: direct I/O; 9P: never a second Tread to fill up)
    whole_below: int  # of a file of commands, set by a front end: a shorter write is whole, its last line too

    def read(self, count: int, offset: int = 0) -> Step[bytes]: ...

    def write(self, data: bytes, offset: int = 0) -> Step[int]: ...

    def refuse_long(self, size: int) -> NoReturn:
        """Refuse a write of at least `size` bytes, which a mount may get in pieces. Raises TooLong."""
        ...

    def push_back(self, data: bytes) -> None:
        """`data`, the result of the last read of this handle, could not be delivered: the next read returns it."""
        ...

    @property
    def readable(self) -> bool: ...

    @property
    def writable(self) -> bool: ...

    def flush(self) -> Step[int]:
        """A descriptor is closed: what close(2) has to say. Raises why an unfinished command is refused."""
        ...

    def watch(self, then: Callable[[], None] | None) -> None:
        """Call `then` once when `readable` or `writable` may have become true (poll); None: no more."""
        ...

    def close(self) -> None: ...


# ------------------------------------------------------------ histogram

BOUNDS_S = (0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0)


class Histogram:
    """Counted by one thread or by several. `bounds`: the highest value of each bucket, ascending; a last bucket has
    what is above all."""

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
        """How many values are at or below each bound, and last, how many there are."""
        return list(accumulate(self._counts))
