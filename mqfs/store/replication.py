"""The copy of a store elsewhere: which bytes of which logs it lacks, and which of them are confirmed.

    segment     [state|m1 .. m9]  [state|m10 .. m14|....]     two segments of one log, the second is appended to
    taken                   ^ the next run begins here        bytes before it are in the hands of the replicator
    a series    [m7 .. m9] [state m10 .. m14]                 all that lacked in all logs when it began, in portions
    confirmed   `copied` is what `written` was when the series began; callers that wait for no more are answered

Bytes are copied as they are in the segments, so the copy of a log is its chain of segments. A segment that was
removed meanwhile is left out: a newer one has the state. A segment with unconfirmed bytes is not compacted: positions
in the rewritten segment would differ from those in the copy.

The store notes on its own thread what is written. One other thread takes portions. It reads `written` first and `used`
after it, while an append sets them the other way round, so a portion ends at the end of an atomic batch.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from mqfs import errors
from mqfs.store.api import Committed
from mqfs.store.disk import opened, read_all
from mqfs.store.segment.file import Segment

if TYPE_CHECKING:
    from mqfs.store.chain import Chain
    from mqfs.store.group_commit import GroupCommit
    from mqfs.store.store import DiskStore

_PORTION_S = 0.01  # spent on answers to callers before others are served
_ANSWERS = 16  # answers between two readings of the clock


class LogBytes(NamedTuple):
    """Bytes of a log: of the segment that begins with sequence `first`, from `position` on."""

    group: int
    first: int
    position: int
    data: bytes


class Trimmed(NamedTuple):
    """A trim: no message of [first, end) is needed, so segments that hold no others may be removed."""

    group: int
    first: int
    end: int


class Removed(NamedTuple):
    """The removal of a group, whose log may be removed."""

    group: int


Entry = LogBytes | Trimmed | Removed


class Portion(NamedTuple):
    """A portion of what the copy lacks. `more`: the next portion belongs to it; both count together or not at all."""

    entries: list[Entry]
    more: bool


class _Range(NamedTuple):
    """A range of bytes to be read: from `begin` to `end` of a segment."""

    group: int
    segment: Segment
    begin: int
    end: int


class _Mark(NamedTuple):
    """How far a log is: `written` of its group commit, and the segment that had it."""

    written: int
    first: int


class LogCopy:
    """The state of the copy of one log."""

    __slots__ = (
        "_dirty", "_ended", "_expected", "_lacking", "_position", "_replication", "_since", "_taken", "_waiting",
        "chain", "commit", "copied", "settled",
    )  # fmt: skip

    def __init__(self, replication: Replication, chain: Chain, commit: GroupCommit) -> None:
        self._replication, self.chain, self.commit = replication, chain, commit
        self.copied = 0  # of `commit.written`
        self.settled = 0  # segments below that name are copied whole: they may be rewritten, except `held`
        self._lacking: deque[Segment] = deque()  # segments with bytes to be taken, in order
        self._position = 0  # in the first of them
        self._taken = 0  # the newest segment of which the copy may have bytes
        self._dirty = False  # it is listed among the logs with something to copy
        self._since = 0.0  # when the oldest bytes that are not copied were written; monotonic; 0: none
        self._expected = 0  # the mark for which callers wait, or will wait
        self._waiting: deque[tuple[int, Committed]] = deque()
        self._ended: OSError | None = None

    def begin(self, have: tuple[int, int] | None) -> None:
        """Begin with the state of the copy: the name of its newest segment, and the bytes it has of it; None: it has
        nothing. Raises BadReplica if that segment and all after it are lost here: quarantined, because its state failed
        its check."""
        first, position = have or (0, 0)
        self.settled = self._taken = first
        segments = [segment for segment in self.chain.segments if segment.first >= first]
        if not segments:
            raise errors.BadReplica(
                f"group {self.chain.group}: segment {first} is in the replica, and not whole here "
                "(move the store away, and start from the replica)"
            )
        self._lacking.extend(segments)
        if segments[0].first == first:
            self._position = min(position, segments[0].used)
        self.copied = self.commit.written
        if segments[0].used > self._position or any(segment.used for segment in segments[1:]):
            self.copied -= 1
            self.note()

    def note(self) -> None:
        """Note that something was appended."""
        if not self._dirty:
            self._dirty = True
            self._since = self._since or time.monotonic()
            self._replication.note(self)

    def add(self, segment: Segment) -> None:
        """Add a new segment, which is appended to from now on."""
        self._lacking.append(segment)

    def note_trimmed(self, first: int, end: int, remove: Callable[[], object]) -> None:
        """Note that no message of that segment is needed, and call `remove` for its file. If the copy has bytes of it,
        that waits until the copy has recorded the trim: after a kill the file is found and trimmed again. Without the
        file a start could not tell a trimmed segment from a lost one, and what was lost here must stay in the copy."""
        has_nothing = first > self._taken
        self._replication.note_event(Trimmed(self.chain.group, first, end), None if has_nothing else remove)
        if has_nothing:
            remove()

    def expect(self, mark: int) -> None:
        """Note that a caller is about to wait for the bytes up to that mark."""
        if mark > self.copied and self._replication.failed is None and self._ended is None:
            self._expected = mark
            self._replication.expect(self)

    def after(self, mark: int, then: Committed) -> None:
        """Call `then` when the bytes up to that mark are copied."""
        failed = self._replication.failed or self._ended
        if failed is not None:
            then(failed)
        elif mark <= self.copied:
            then(None)
        else:
            self._waiting.append((mark, then))

    @property
    def held(self) -> int:
        """The name of the segment that a checkpoint is reading, which is not rewritten meanwhile; 0: none."""
        return self._replication.held.get(self.chain.group, (0, 0))[0]

    @property
    def lag_bytes(self) -> int:
        """Bytes that the copy lacks; each unconfirmed change of the folder counts as one."""
        return max(0, self.commit.written - self.copied)

    @property
    def lag_s(self) -> float:
        """Age of the oldest bytes that the copy lacks, or how long its engine has not answered, if that is more; in
        seconds."""
        own = time.monotonic() - self._since if self.lag_bytes and self._since else 0.0
        return max(own, self._replication.silent_s())

    # ------------------------------------------------------------ the replicator's thread

    def take(self) -> tuple[_Mark, list[_Range]]:
        """Return the position the log has once all missing ranges are copied, and these ranges."""
        self._dirty = False  # first: bytes appended from here on note themselves again
        written = self.commit.written
        ranges = []
        while True:
            segment, is_last = self._lacking[0], len(self._lacking) == 1
            end = segment.used
            self._taken = segment.first
            if end > self._position:
                ranges.append(_Range(self.chain.group, segment, self._position, end))
                self._position = end
            if is_last:
                return _Mark(written, segment.first), ranges
            self._lacking.popleft()
            self._position = 0

    # ------------------------------------------------------------ the store's thread

    def confirm(self, mark: _Mark, taken_s: float) -> None:
        """Record that the copy has the bytes up to that mark; `taken_s`: when they were taken, monotonic."""
        self.copied, self.settled = max(self.copied, mark.written), max(self.settled, mark.first)
        self._since = taken_s if self.lag_bytes else 0.0
        if self._expected <= self.copied:
            self._replication.expected.discard(self)

    def next_answer(self) -> Committed | None:
        """Return the next caller whose bytes are copied; None if there is none."""
        if self._waiting and self._waiting[0][0] <= self.copied:
            return self._waiting.popleft()[1]
        return None

    def detach(self) -> None:
        """Close the copy of a closed log: bytes that are not copied stay so, and callers that wait for them get an
        error."""
        self._ended = OSError(errno.EIO, "the log was closed before it was copied")
        self._replication.detach(self.chain.group)
        self.answer_all(self._ended)

    def answer_all(self, error: OSError | None) -> None:
        """Answer all waiting callers, whether or not their bytes are copied."""
        waiting, self._waiting = self._waiting, deque()
        for _, then in waiting:
            self.commit.answer(then, error)


class _Series(NamedTuple):
    """All that the copy lacked at one moment."""

    marks: dict[LogCopy, _Mark]
    ranges: deque[_Range]
    events: list[tuple[Entry, Callable[[], object] | None]]
    taken_s: float


class Replication:
    """The copies of all logs of a store. `begin` is called before any log is opened; `take` is called by one thread,
    `confirm` and `fail` on the store's. `notify` is called on the store's thread, and returns at once. It is called
    when there is something to copy, once until that is taken, and when a caller is about to wait for it."""

    def __init__(self, context: DiskStore, notify: Callable[[], None]) -> None:
        self._context, self.notify = context, notify
        self._copies: dict[int, LogCopy] = {}
        self.expected: set[LogCopy] = set()  # copies for which callers wait
        self._have: Mapping[int, tuple[int, int]] = {}
        self.held: Mapping[int, tuple[int, int]] = {}  # the segments that a checkpoint is reading; as in `begin`
        self._dirty: deque[LogCopy] = deque()
        self._events: deque[tuple[Entry, Callable[[], object] | None]] = deque()
        self._is_notified = False
        self._series: _Series | None = None  # the series that is being taken
        self._taken: _Series | None = None  # a series taken whole and not confirmed
        self._answering: deque[LogCopy] = deque()
        self.failed: OSError | None = None
        self.silent_s: Callable[[], float] = float  # seconds for which the engine of the copy has not answered
        self.has_no_checkpoint = False  # the last checkpoint that was due failed
        self.on_closed: Callable[[], None] = lambda: None  # called when the store is closed, except for its lock

    # ------------------------------------------------------------ the store's thread

    def begin(self, have: Mapping[int, tuple[int, int]]) -> None:
        """Set what the copy has: of each group, the name of its newest segment and the bytes it has of it."""
        self._have = dict(have)

    def open_all(self) -> Iterator[None]:
        """Open every log, one a step, so that all that the copy lacks is known at the end. A log that cannot be opened
        is left to the engine, which reports why."""
        for number in self._context.groups():
            with contextlib.suppress(errors.MqfsError):
                self._context.open(number)
            yield

    def attach(self, chain: Chain, commit: GroupCommit) -> None:
        """Begin to copy a log that was opened or made."""
        copy = LogCopy(self, chain, commit)
        copy.begin(self._have.get(chain.group))
        self._copies[chain.group] = commit.copy = copy
        if self.failed is not None:
            commit.fail(self.failed)

    def detach(self, group: int) -> None:
        """Forget a log that is closed for good."""
        if (copy := self._copies.pop(group, None)) is not None:
            self.expected.discard(copy)

    def note(self, copy: LogCopy) -> None:
        """List a log that has something to copy."""
        self._dirty.append(copy)
        self._notify()

    def note_event(self, event: Entry, told: Callable[[], object] | None = None) -> None:
        """Queue an event that the bytes of the log do not show. `told` is called when the copy has recorded it."""
        self._events.append((event, told))
        self._notify()

    def _notify(self) -> None:
        if not self._is_notified:
            self._is_notified = True
            self.notify()

    def confirm(self) -> None:
        """Record that the copy has all portions that were taken. While a series is incomplete nothing of it counts."""
        series, self._taken = self._taken, None
        if series is None:
            return
        for copy, mark in series.marks.items():
            copy.confirm(mark, series.taken_s)
            self._answering.append(copy)
        for _, told in series.events:
            if told is not None:
                told()
        self._answer()

    def _answer(self) -> None:
        """Answer callers; in portions, if the store has an event loop to continue on."""
        until, answered = time.monotonic() + _PORTION_S, 0
        while self._answering:
            copy = self._answering[0]
            then = copy.next_answer()
            if then is None:
                self._answering.popleft()
                continue
            copy.commit.answer(then, None)
            answered += 1
            if answered % _ANSWERS == 0 and self._context.post is not None and time.monotonic() > until:
                self._context.post(self._answer)
                return

    def fail(self, error: OSError) -> None:
        """Make all logs read-only, because nothing reaches the copy any more; waiting callers get the error."""
        if self.failed is None:
            self.failed = error
            for copy in list(self._copies.values()):
                copy.commit.fail(error)

    def expect(self, copy: LogCopy) -> None:
        """Note that a caller is about to wait for that log."""
        if copy not in self.expected:
            self.expected.add(copy)
            self.notify()

    @property
    def lag_bytes(self) -> int:
        """Bytes that the copy lacks, of all logs."""
        return sum(copy.lag_bytes for copy in list(self._copies.values()))

    @property
    def lag_s(self) -> float:
        """The greatest `lag_s` of all logs."""
        return max((copy.lag_s for copy in list(self._copies.values())), default=0.0)

    # ------------------------------------------------------------ the replicator's thread

    def take(self, most_bytes: int) -> Portion | None:
        """Return the next bytes and events that the copy lacks, at most `most_bytes` of data; None: it has everything.
        Raises DiskFailed, and takes nothing then."""
        series = self._series or self._begin_series()
        if series is None:
            return None
        self._series, ranges = series, series.ranges
        entries, room, count, rest = list[Entry](), most_bytes, 0, list[_Range]()
        for group, segment, begin, end in ranges:
            if room <= 0 or rest:
                break
            data = self._read(segment, begin, min(end - begin, room))
            if data:
                entries.append(LogBytes(group, segment.first, begin, data))
                room -= len(data)
                rest += [_Range(group, segment, begin + len(data), end)] if begin + len(data) < end else []
            count += 1
        for _ in range(count):  # only now: after an error the call is repeated
            ranges.popleft()
        ranges.extendleft(rest)
        if ranges:
            return Portion(entries, True)
        self._series, self._taken = None, series
        return Portion(entries + [event for event, _ in series.events], False)

    def _begin_series(self) -> _Series | None:
        self._is_notified = False  # first: what is noted from here on notifies again
        events = [self._events.popleft() for _ in range(len(self._events))]
        marks, ranges, now = dict[LogCopy, _Mark](), deque[_Range](), time.monotonic()
        for _ in range(len(self._dirty)):
            copy = self._dirty.popleft()
            marks[copy], more = copy.take()
            ranges.extend(more)
        return _Series(marks, ranges, events, now) if marks or events else None

    def _read(self, segment: Segment, position: int, size: int) -> bytes:
        """Read bytes of a segment by a descriptor of its own; none if the segment was removed meanwhile."""
        disk = self._context.disk
        try:
            with opened(disk, segment.path) as fd:
                return read_all(disk, fd, size, position)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise errors.DiskFailed(f"{segment.path}: {error.strerror}") from error
