"""The values that all packages share: messages, records, users, files, and Wait, a pending result."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence, Set
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import attrs

from mqfs.errors import Interrupted

Buffer: TypeAlias = bytes | bytearray | memoryview
NEVER = 1 << 62  # greater than any sequence, any count of bytes, and any time in ns


class Kind(enum.IntEnum):
    """The kind of a log record. Only MESSAGE and END use up a sequence; all others carry the last one."""

    MESSAGE = 1
    END = 2  # EOF marker: readers get 0 bytes once
    CHANGE = 3  # change of the group's state: a stream made, a ctl line, ... (mqfs/state/group.py)
    ACK = 4  # acknowledgement by a consumer
    CLOCK = 5  # the wall clock against the engine clock (mqfs/state/group.py)
    STATE = 6  # the whole state, at the head of each segment (mqfs/state/group.py)
    NAMES = 7  # stream numbers and names; only in `format record`, never in a segment
    DELIVERIES = 8  # how often the next message was delivered before, if it was; like NAMES never in a segment


MORE = 1  # Record.flags bit 0: more of this atomic batch follows


class Record(NamedTuple):
    """One record of a log. `stream` is the stream's number in its group (0: the group itself)."""

    sequence: int
    time_ns: int  # wall time, never going back inside a group
    stream: int
    kind: int
    flags: int
    headers: bytes  # u8 key length, key, u16 value length, value, ... ; usually empty
    body: bytes


class RecordColumns(NamedTuple):
    """The valid records of a buffer, as columns, and the offset at which they end."""

    end: int
    sequences: memoryview
    times: memoryview
    positions: memoryview  # in the buffer, or in the log
    bodies: memoryview  # bytes of each body
    streams: memoryview
    headers: memoryview  # bytes of each record's headers
    kinds: memoryview
    flags: memoryview

    def part(self, begin: int, end: int) -> RecordColumns:
        """Return the rows from `begin` to `end`."""
        return RecordColumns(self.end, *(column[begin:end] for column in self[1:]))


class Head(NamedTuple):
    """A message of a log without its body."""

    sequence: int
    stream: int
    kind: int
    size: int  # of the body, bytes
    headers: bytes


class RecordRun(NamedTuple):
    """Messages of a log as encoded records."""

    pieces: Sequence[bytes]  # whole records, in order
    streams: Set[int]  # the streams of the messages
    messages: int  # at least one
    last: int  # the last sequence examined
    newest: Record  # the last of the messages


class Split(NamedTuple):
    """A range of adjacent messages in a log."""

    end: int  # the sequence after them
    messages: int
    size: int  # about the bytes they take


class Draft(NamedTuple):
    """A record to be appended, without its sequence."""

    kind: int
    stream: int
    body: bytes
    headers: bytes = b""


SCOPES = {"read": 0o5, "write": 0o7, "admin": 0o17}  # permission bits that a token leaves: see permissions.py


@attrs.frozen
class Grant:
    """The rights of a token: a user, and the scope and path to which its permissions are narrowed."""

    uid: int
    id: str  # not secret: names the token in its file and in audit lines
    scope: str = "admin"  # a key of SCOPES
    path: tuple[str, ...] = ()  # names from the root: this file, or everything below this group


@attrs.frozen
class User:
    """The user on whose behalf a call is made."""

    uid: int
    gid: int
    groups: frozenset[int] = frozenset()  # supplementary
    pid: int = 0  # 0 where the front end cannot know
    where: str = ""  # front end and connection, for `.who`: "fuse", "9p unix 3"
    grant: Grant | None = None  # of the client's token, if it has one


class Qid(NamedTuple):
    """A qid of 9P. `path` is also st_ino: stable over restarts, never shared by two files of a store."""

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


class Listed(NamedTuple):
    """The messages of some streams in a segment of a log, without EOF markers."""

    messages: int
    columns: Callable[[int], tuple[Sequence[int], Sequence[int]]]  # sequences and body bytes of the newest N


# ------------------------------------------------------------ wait

T = TypeVar("T")


class Wait(Generic[T]):
    """A pending result. The engine settles it exactly once, with a value or an error.

    The code that settles it has already taken the value for this waiter, so the waiter need not check again, and there
    is no race. `subscribe` calls its function at once if the result is there, else from inside the engine's call that
    settles it. So the function must not call back into the engine, except `Handle.push_back`.
    """

    __slots__ = ("_cancel", "_error", "_settled", "_then", "_value", "otherwise")
    is_prompt = False  # True: it waits for a disk or a server, never for other users, so O_NONBLOCK lets it wait

    def __init__(self, cancel: Callable[[Wait[T]], bool] | None = None) -> None:
        self._cancel = cancel
        self._settled = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self.otherwise: BaseException | None = None  # see `cancel`
        self._then: Callable[[Wait[T]], None] | None = None

    @property
    def settled(self) -> bool:
        return self._settled

    def result(self) -> T:
        """Return the value, or raise the error. Only after it was settled."""
        assert self._settled
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def subscribe(self, then: Callable[[Wait[T]], None]) -> None:
        """Call `then(self)` once, when it is settled. Only one subscriber is allowed."""
        if self._settled:
            then(self)
        else:
            assert self._then is None
            self._then = then

    def resolve(self, value: T) -> None:
        assert not self._settled
        self._settled, self._value = True, value
        if (then := self._then) is not None:
            self._then = None  # breaks a reference cycle: it mostly refers to this Wait, and garbage collection is rare
            then(self)

    def fail(self, error: BaseException) -> None:
        assert not self._settled
        if self.otherwise is not None and isinstance(error, Interrupted):
            error = self.otherwise
        self._settled, self._error = True, error
        if (then := self._then) is not None:
            self._then = None
            then(self)

    def follow(self, step: T | Wait[T]) -> None:
        """Resolve or fail as a step does."""
        if not isinstance(step, Wait):
            self.resolve(step)
        else:
            step.subscribe(self._follow)

    def follow_call(self, call: Callable[[], T | Wait[T]]) -> None:
        """Resolve or fail as the step that a call returns; fail if the call raises."""
        try:
            step = call()
        except Exception as error:
            self.fail(error)
        else:
            self.follow(step)

    def _follow(self, done: Wait[T]) -> None:
        if done._error is None:
            self.resolve(done.result())
        else:
            self.fail(done._error)

    def cancel(self, otherwise: BaseException | None = None) -> bool:
        """Stop waiting. True: nothing was consumed or done, and `then` will never be called. False: it is too late, as
        a message was handed over or a write appended; the result comes as without this call.

        `otherwise`: stop waiting only for what may come later. While existing messages are still searched the answer is
        False; the result is then the message found, or this error. With the error nothing was consumed."""
        self.otherwise = otherwise
        if self._settled or self._cancel is None or not self._cancel(self):
            return False
        self._then = None
        return True


Step: TypeAlias = T | Wait[T]  # the result of an engine call
