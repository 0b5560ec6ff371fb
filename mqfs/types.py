"""The types every part shares, and the seams between parts. Read this file first.

Owns no behaviour beyond `Wait`, the one-shot promise by which the synchronous engine says "nothing yet".
Seams (Protocols) are declared here, small, by what their user needs: `Clock`, `Bucket`, `Store` by the engine; `Node`,
`Handle` and `Tree` (in engine/) are what faces call.
"""

from __future__ import annotations

import abc
import enum
import io
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import attrs

Buffer: TypeAlias = bytes | bytearray | memoryview

T = TypeVar("T")


# ---------------------------------------------------------------- records


class Kind(enum.IntEnum):
    """What a record of a group's log is. Only MESSAGE and END take a sequence; all others carry the last one."""

    MESSAGE = 1
    END = 2  # end-of-file mark: readers get 0 bytes once
    CHANGE = 3  # of the group's state: a stream made, a ctl line, ... (mqfs/group_state.py)
    ACK = 4  # acknowledgement by a consumer
    CLOCK = 5  # where the wall clock stands against the engine clock (mqfs/group_state.py)
    STATE = 6  # all of it, at the head of each segment (mqfs/group_state.py)
    NAMES = 7  # stream numbers and names; only in `format record`, never in a segment


MORE = 1  # Record.flags bit 0: more of this unit follows


class Record(NamedTuple):
    """One record of a log. `stream` is the stream's number in its group (0: the group itself)."""

    sequence: int
    time_ns: int  # wall time, never going back inside a group
    stream: int
    kind: int
    flags: int
    headers: bytes  # u8 key length, key, u16 value length, value, ... ; usually empty
    body: bytes


class Columns(NamedTuple):
    """The records of a buffer, column by column; `end` is where the first that does not pass would begin."""

    end: int
    sequences: memoryview
    times: memoryview
    positions: memoryview  # in the buffer, or in the log
    bodies: memoryview  # bytes of each body
    streams: memoryview
    headers: memoryview  # bytes of each record's headers
    kinds: memoryview
    flags: memoryview

    def part(self, begin: int, end: int) -> Columns:
        """Some of the rows."""
        return Columns(self.end, *(column[begin:end] for column in self[1:]))


class Span(NamedTuple):
    """Messages as the log has them."""

    pieces: Sequence[bytes]  # whole records, in order
    streams: Set[int]  # of them
    messages: int  # at least one
    last: int  # up to that sequence everything was looked at
    newest: Record  # the last of them


class Stretch(NamedTuple):
    """Messages that lie next to each other in a log."""

    end: int  # the sequence behind them
    messages: int
    size: int  # about the bytes they take


class Draft(NamedTuple):
    """A record to be appended: the bucket gives it its sequence."""

    kind: int
    stream: int
    body: bytes
    headers: bytes = b""


class Message(NamedTuple):
    """A message as the library shows it: shapes as in Record, the stream by its current name."""

    sequence: int
    stream: str
    time_ns: int
    body: bytes
    headers: Mapping[str, str]

    def open(self) -> io.BufferedIOBase:
        """The body as a file."""
        return io.BytesIO(self.body)


# ---------------------------------------------------------------- waiting


class Wait(Generic[T]):
    """A result that is not there yet. Settled exactly once, by the engine, with a value or an error.

    The waker hands the value over: whoever settles has already taken the value for this waiter, so there is no second
    look and no race. `subscribe` calls its function at once if the result is there, else from inside the engine's
    stretch that settles it: such a function must not call back into the engine, except `Handle.unread`.
    """

    __slots__ = ("_cancel", "_error", "_settled", "_then", "_value")

    def __init__(self, cancel: Callable[[Wait[T]], bool] | None = None) -> None:
        self._cancel = cancel
        self._settled = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._then: Callable[[Wait[T]], None] | None = None

    @property
    def settled(self) -> bool:
        return self._settled

    def result(self) -> T:
        """The value, or raises the error. Only after it was settled."""
        assert self._settled
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def subscribe(self, then: Callable[[Wait[T]], None]) -> None:
        """Call `then(self)` once, when settled. One subscriber."""
        if self._settled:
            then(self)
        else:
            assert self._then is None
            self._then = then

    def settle(self, value: T) -> None:
        assert not self._settled
        self._settled, self._value = True, value
        if self._then is not None:
            self._then(self)

    def fail(self, error: BaseException) -> None:
        assert not self._settled
        self._settled, self._error = True, error
        if self._then is not None:
            self._then(self)

    def cancel(self) -> bool:
        """Stop waiting. True: nothing was consumed or done, and `then` will never be called. False: too late, the
        thing is done (a message handed over, a write appended) and the result comes as if nothing had been asked."""
        if self._settled or self._cancel is None or not self._cancel(self):
            return False
        self._then = None
        return True


Step: TypeAlias = T | Wait[T]  # what engine calls return


# ---------------------------------------------------------------- who and what


@attrs.frozen
class User:
    """On whose behalf a call is made."""

    uid: int
    gid: int
    groups: frozenset[int] = frozenset()  # supplementary
    pid: int = 0  # 0 where the face cannot know
    where: str = ""  # the face and connection, for `.who`: "fuse", "9p unix 3"


class Qid(NamedTuple):
    """As 9P has it; `path` is also st_ino: stable over restarts, never shared by two files of a store."""

    type: int  # 0x80 directory, 0x40 append-only, 0 plain
    version: int
    path: int


QTDIR, QTAPPEND, QTFILE = 0x80, 0x40, 0x00


class Stat(NamedTuple):
    """Attributes of a file. Times are UNIX nanoseconds."""

    qid: Qid
    mode: int  # with the S_IFDIR or S_IFREG bits
    uid: int
    gid: int
    size: int
    kept_bytes: int  # st_blocks = kept_bytes rounded up to 512
    nlink: int
    mtime_ns: int  # the newest message's time
    ctime_ns: int
    name: str


# ---------------------------------------------------------------- seams


class Many(Sequence[Draft]):
    """Drafts that are made each time they are iterated, for there may be more than is good to hold. `room`: the bytes
    they take in a log; `taking`: how many of them take a sequence."""

    room: int
    taking: int

    @abc.abstractmethod
    def __iter__(self) -> Iterator[Draft]: ...

    def __getitem__(self, at: Any) -> Any:
        raise TypeError("these are iterated")


class Blanks(Many):
    """Messages that are encoded already but for what only the log knows (mqfs/bulk), and behind them other drafts of
    the same unit. Iterated, they are all drafts."""

    behind: Sequence[Draft]

    @abc.abstractmethod
    def pieces(self) -> Iterator[tuple[bytes, array[int]]]:
        """Whole blanks, some at a time, and of each place the stream's number."""
        ...


class Anchor(NamedTuple):
    """The clocks read at one moment: what turns a record's wall time into engine time. `wall_ns` is what a record got
    then: where the wall clock went back, that is more than what it showed, `shown_ns` (0: the same)."""

    engine_ns: int
    wall_ns: int
    boot_ns: int = 0
    boot: str = ""
    shown_ns: int = 0


class Clock(Protocol):
    """Time as the engine is told it."""

    def wall_ns(self) -> int: ...

    def engine_ns(self) -> int:
        """Never goes back and never jumps while serving; see "Time" in mqfs(4)."""
        ...

    def anchor(self) -> Anchor:
        """All clocks at once."""
        ...

    def resume(self, last: Sequence[tuple[Anchor, int]]) -> None:
        """Go on behind the newest (anchor, wall time of the newest record under it) of an earlier run."""
        ...


class Processes(Protocol):
    """Who tells when a process has ended."""

    def watch(self, pid: int, then: Callable[[], None]) -> Callable[[], None] | None:
        """Call `then` once when the process has ended, never before this returns; what is returned stops the watch.
        None: it has ended already, or never was."""
        ...


Committed = Callable[[OSError | None], None]


class Listed(NamedTuple):
    """Messages of some streams in a stretch of a log, end marks left out."""

    messages: int
    columns: Callable[[int], tuple[Sequence[int], Sequence[int]]]  # of the newest so many: sequences, and body bytes


class Bucket(Protocol):
    """One group's log. All calls are synchronous and raise OSError where the disk fails; none waits for a sync.

    "Message" here means records of kind MESSAGE and END. One that fails its check raises errors.Damaged each time it is
    met; the caller goes on behind its `sequence`.
    """

    state: Callable[[], bytes]  # set by the engine: the body of a STATE record, now

    @property
    def id(self) -> int:
        """The group's number: > 0, never given twice in a store; the root group's is 1."""
        ...

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
        """The first write or sync that failed; the bucket is read-only from then on."""
        ...

    def fail(self, error: OSError) -> None:
        """Nothing more is to be written: the bucket is read-only from now on, and all who wait for a sync get the
        error."""
        ...

    @property
    def damaged(self) -> int:
        """Records met that failed their check."""
        ...

    @property
    def first(self) -> int:
        """The lowest sequence the log may still hold; == next where it holds no message."""
        ...

    @property
    def size(self) -> int:
        """Bytes of the whole log as stored."""
        ...

    def history(self) -> tuple[bytes, Iterable[Record]]:
        """The newest durable state's body, and the CHANGE, ACK and CLOCK records behind it, in order. They may be read
        as they are asked for: go through them once, before anything else is done with the bucket."""
        ...

    def append(self, kind: int, stream: int, time_ns: int, body: bytes, headers: bytes = b"") -> int:
        """Append one record and return the sequence it carries."""
        ...

    def append_unit(self, drafts: Sequence[Draft], time_ns: int) -> int:
        """Append records that are seen together or not at all; returns the sequence of the first."""
        ...

    def skip(self) -> int:
        """Use up one sequence for a message that nobody will ever read; nothing is stored."""
        ...

    def find(self, stream: int, sequence: int) -> Record | None:
        """The first message of `stream` at or after `sequence`. Cost: a search in the stream's own postings."""
        ...

    def peek(self, stream: int, sequence: int) -> tuple[int, int] | None:
        """As find, from the index alone: (sequence, body bytes)."""
        ...

    def scan(self, sequence: int) -> Record | None:
        """The first message of any stream at or after `sequence`."""
        ...

    def span(self, sequence: int, end: int, most_bytes: int, streams: Set[int], headed: bool) -> Span | None:
        """Messages of those streams at or after `sequence` and below `end`, as many as lie together in so many bytes,
        each checked. None: they are few, or damaged, or some have headers and may not: to be read one by one."""
        ...

    def before(self, sequence: int, stream: int | None = None) -> int | None:
        """The greatest sequence of a message (of `stream`) below `sequence`."""
        ...

    def stretch_end(self, sequence: int) -> int:
        """Where the stretch of the log that holds that sequence ends: room is given back by whole ones."""
        ...

    def at(self, time_ns: int) -> int:
        """The sequence of the first message at or after that wall time; `next` if there is none."""
        ...

    def tally(self, stream: int, sequence: int, end: int | None = None) -> tuple[int, int]:
        """(messages, body bytes) of `stream` at or after `sequence` and below `end` (None: to the end), from the index.
        Costs a search, and a step for each message counted."""
        ...

    def stretches(self, sequence: int, end: int, streams: Set[int] | None, messages: int, size: int) -> list[Stretch]:
        """Where what those streams (None: all) have at or after `sequence` and below `end` would be cut into stretches
        of at most so many messages and about so many bytes; from the index. The first few only, where they are many."""
        ...

    def end_marks(self, stream: int, sequence: int, end: int | None = None) -> int:
        """How many of what `tally` counts are end marks."""
        ...

    def listing(self, floors: Mapping[int, int], end: int) -> Iterator[Listed]:
        """The messages of those streams, each from its floor on, below `end`: a stretch of the log at a time, the
        newest first; from the index, which finds them by streams."""
        ...

    def headed(self, sequence: int, stream: int | None = None) -> Iterator[int]:
        """The sequences, ascending, of the messages (of `stream`) at or after `sequence` whose record carries headers,
        from the index: the log is not read. The log may change meanwhile: what is appended or removed then may be
        told or not."""
        ...

    def trim(self, floors: Mapping[int, int], dropped: Set[int]) -> None:
        """Give back room. `floors`: of each stream that keeps something, the lowest kept sequence; every message below,
        of a stream not named, or in `dropped` is not wanted any more. May do nothing, may remove segments, may compact;
        unwanted messages may still be found afterwards. Cheap enough to be called every second."""
        ...

    def sync(self, then: Committed | None = None, within_s: float = 0.0) -> None:
        """Have everything appended so far on disk, at once or within that time; then call `then(None)`, or
        `then(error)` if it failed. `then` is called on the engine's thread, perhaps before this returns."""
        ...

    def close(self) -> None: ...


class Log(Bucket, Protocol):
    """A bucket, as the ring's journal needs it: it takes what others encoded and numbered."""

    def place(self, size: int, messages: int) -> int:
        """Have room for so many bytes of records, and their sequences on disk; the position they would get. Raises
        DiskFull, DiskFailed, ReadOnly."""
        ...

    def append_range(self, data: Buffer, rows: Columns) -> None:
        """Append whole units of messages as they were encoded elsewhere, in the place that `place` told; `rows` was
        made for that position. The sequences are as they say, and not below `next`."""
        ...

    def pass_to(self, sequence: int) -> None:
        """As `skip`, of all below that sequence. `place` was asked for them."""
        ...

    def continue_at(self, sequence: int) -> None:
        """After a start: none from there on was given. Before anything is appended."""
        ...

    def grants(self, granted: Callable[[int], None] | None) -> None:
        """From now on reserve sequences in large blocks and tell, now and for each, the bound below which they may be
        given."""
        ...

    def set_aside(self, data: bytes, why: str) -> None:
        """Keep bytes that failed a check, where a person finds them."""
        ...


class Shared(Protocol):
    """A group's ring, as the engine sees it. While there is one, the group's bucket is what writes to it."""

    @property
    def floor(self) -> int:
        """The lowest sequence that a process which follows it may not have had; also when it has ended."""
        ...

    def settle(self) -> None:
        """Have in the log, and told, what was published until now."""
        ...

    def changed(self, changes: Sequence[Mapping[str, Any]]) -> None:
        """The group's state has changed so."""
        ...

    def retire(self, why: str) -> None:
        """End it: what was published is in the log, and the group has a ring no more."""
        ...


class Staged(Protocol):
    """Bytes put aside; gone with the server that wrote them. All calls raise OSError where the disk fails."""

    @property
    def size(self) -> int: ...

    def append(self, data: bytes) -> None:
        """Behind what is there. After an error nothing of it is."""
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

    def groups(self) -> Sequence[int]:
        """Numbers of all groups kept, the root's (1) too once it was made."""
        ...

    def number(self) -> int:
        """A new group number, never given before and never again. The first is 1."""
        ...

    def make(self, number: int, state: bytes) -> Bucket:
        """A new bucket whose first record is that state; durable when this returns."""
        ...

    def open(self, number: int) -> Bucket: ...

    def in_memory(self, bucket: Bucket) -> Bucket:
        """The same log, its messages in memory only: for a group with `keep ring`."""
        ...

    def remove(self, number: int) -> None:
        """Durable when this returns; the bucket must not be used any more."""
        ...

    def stage(self, number: int) -> Staged:
        """A place to put bytes aside, under a number that no group and no other place has."""
        ...

    def tick(self) -> None:
        """House-keeping in small portions (compaction, closing of idle files); called about once a second."""
        ...

    def close(self) -> None:
        """Leave everything on disk and marked as cleanly stopped."""
        ...


class Node(Protocol):
    """A file or directory of the tree: a group, a stream, a meta file. Faces hold it as fid or inode."""

    name: str

    @property
    def qid(self) -> Qid: ...

    @property
    def parent(self) -> Any: ...


class Handle(Protocol):
    """An open file: all that a face does with it. One owner at a time; not shared between faces."""

    reader_pid: int  # the process that reads, set before `read` by a face that knows it; 0: not known
    sequential: bool  # offsets mean nothing: opened to read and write, or a cursor (FUSE: FOPEN_STREAM)
    parkable: bool  # a read may wait: streams, order, cursors (FUSE: direct I/O; 9P: never a second Tread to fill up)
    whole_below: int  # of a file of commands, set by a face: a shorter write is whole, its last line too

    def read(self, count: int, offset: int = 0) -> Step[bytes]: ...

    def write(self, data: bytes, offset: int = 0) -> Step[int]: ...

    def unread(self, data: bytes) -> None:
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
