"""A group's log, written: the only module that appends to it, and that applies what was appended to the group's state.

A record is in the log before the state says so. The log gives each record its time, and knows when it is as safe as
`sync` says. What a record means is in state/; delivery is the fan-out's.

Under `sync replica` a message is shown only once the copy of the store has it:

    in the log   m1 m2 m3 | m4  m5 m6            `stored` has all: what is written, counted against `depth`, trimmed
    held                    m4 [m5 m6]           one entry a write, in order, each with its delivery
    shown        m1 m2 m3 |                      `end.next` is 4 to all that read: nothing at or above it is found

When the copy has what a write appended, its entry is removed, its messages are counted and delivered, and its writer
is answered, in this order. So a reader that is served meanwhile finds what was delivered, and nothing more. Changes of
names and settings are not held: only their callers wait.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from typing import TypeVar

import attrs

from mqfs import errors
from mqfs.clock import Clock
from mqfs.engine.language.settings import SYNC_ALWAYS, SYNC_OFF, SYNC_REPLICA, Settings
from mqfs.model import NEVER, Draft, Head, Kind, Listed, Record, RecordRun, Split, Step, Wait
from mqfs.records.batch import RecordBatch
from mqfs.state.group import Change, ConsumerState, GroupState, Newest, encode_change
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


# ------------------------------------------------------------ the log


T = TypeVar("T")

_requests = logging.getLogger("mqfs.engine")

FLOORS: Change = {"do": "floor", "floors": []}  # stands for many
NOT_REPLICATED = "not replicated"
AckSteps = tuple[ConsumerState, bytes]  # of one consumer, as state.acks.step makes them


class GroupLog:
    """The log of one group. `bucket` is what stores it now; `end`, `reader`, `metrics` and `upkeep` are its parts.
    `stored` is the same with the messages that may not be shown yet; where such are held `shown` is the bucket.

    Calls that append raise DiskFailed, DiskFull and ReadOnly; then nothing was appended, nor applied.
    """

    def __init__(self, bucket: Bucket, state: GroupState, settings: Settings, clock: Clock) -> None:
        self.use(bucket)
        self.began_at = self.end.next  # a start after a kill leaves sequences below it unused
        self.state, self.settings = state, settings
        self.times = LogClock(self, clock)
        self.changes = 0  # of its state that were appended: what was looked up holds while there are no more
        self.must_retain = False  # whether what is written now is promised to someone who is not there yet
        self.on_changed: Callable[[Sequence[Change]], None] = _ignore
        self.on_acknowledged: Callable[[ConsumerState], None] = _ignore
        self.on_all_shown: Callable[[], None] = lambda: None

    def use(self, bucket: Bucket) -> None:
        """From now on that stores it: the store's own log, one in memory, or a ring."""
        self.bucket, self.end, self.reader, self.metrics = bucket, bucket.end, bucket.reader, bucket.metrics
        self.writer, self.upkeep = bucket.writer, bucket.upkeep
        self.shown = bucket if isinstance(bucket, ShownLog) else None
        self.stored = bucket.stored if isinstance(bucket, ShownLog) else bucket

    def require_writable(self, *, messages: bool = False) -> None:
        """`messages`: of these, too. Raises ReadOnly."""
        if (failed := self.end.failed if messages else self.stored.end.failed) is not None:
            raise errors.ReadOnly(f"the disk failed: {failed}" if failed.errno else str(failed))

    # ------------------------------------------------------------ appending

    def next_sequence(self, size: int) -> int:
        """The sequence of the first message of the batch that is appended next. `size`: its bytes at most, with what is
        recorded beside: the log has room for them first, as a new segment may use up a number."""
        with suppress(errors.DiskFull):  # the append says so, or needs less
            self.stored.ranges.reserve_space(size, 0)
        return self.stored.end.next

    def append(self, kind: int, stream: int, body: bytes, time_ns: int) -> int:
        """One message without headers; its sequence. `time_ns`: of `times.next_ns()`."""
        try:
            return self.writer.append(kind, stream, time_ns, body)
        except OSError as error:
            raise errors.DiskFailed(str(error)) from error

    def append_batch(
        self,
        messages: Sequence[Draft],
        changes: Sequence[Change] = (),
        acks: Sequence[AckSteps] = (),
        drafts: Sequence[Draft] = (),
    ) -> int:
        """Append messages, changes of the state and steps of consumers, all or none of which will be in the log, and
        apply the changes and steps. `drafts`: the changes, where they are encoded already. Returns the sequence of the
        first message."""
        tail = [*drafts] or list(map(draft_of, changes))
        tail += [Draft(Kind.ACK, own.number, steps) for own, steps in acks]
        if isinstance(messages, RecordBatch):
            batch: Sequence[Draft] = messages.with_tail(tail) if tail else messages
        else:
            batch = [*messages, *tail]
        time_ns = self.times.next_ns()
        try:
            first = self.writer.append_batch(batch, time_ns)
        except OSError as error:
            raise errors.DiskFailed(str(error)) from error
        self.changes += len(changes)
        for change in changes:
            self.state.apply(change)
        for own, steps in acks:
            own.progress.apply(steps)
            self.on_acknowledged(own)
        return first

    def remember_newest(self, newest: Newest | None) -> None:
        """The state has it when it is next at the head of a segment."""
        self.state.newest = newest

    def skip(self) -> int:
        """Use up a sequence for a message that all who are to have it get now; nothing is stored."""
        return self.writer.skip()

    def change(
        self,
        *changes: Change,
        acks: Sequence[AckSteps] = (),
        floors: Sequence[Draft] = (),
        drafts: Sequence[Draft] = (),
    ) -> None:
        """Change what the group is: its names, permissions, settings, views, consumers. `floors`: changes that the
        caller applies to the state."""
        self.require_writable()
        self.append_batch(floors, changes, acks, drafts)
        self.on_changed((FLOORS, *changes) if floors else changes)

    def reserve_numbers(self, count: int) -> None:
        """Keep the next `count` numbers of files for the caller. Those that it leaves may be given after a restart."""
        self.state.next_stream += count

    def acknowledge(self, own: ConsumerState, steps: bytes) -> None:
        """Record what became of a consumer's messages."""
        if own.memory:
            own.progress.apply(steps)
            self.on_acknowledged(own)
            return
        if self.end.failed is not None:
            self.require_writable()
        try:
            self.writer.append(Kind.ACK, own.number, self.times.next_ns(), steps)
        except OSError as error:
            raise errors.DiskFailed(str(error)) from error
        own.progress.apply(steps)
        self.on_acknowledged(own)

    def acknowledge_all(self, acks: Sequence[AckSteps]) -> None:
        """As `acknowledge`, of several consumers: recorded together or not at all."""
        self.require_writable()
        self.append_batch((), (), acks)

    def append_clock(self, change: Change, wall_ns: int) -> None:
        """Record how the wall clock stands against the engine's."""
        self.writer.append(Kind.CLOCK, 0, wall_ns, encode_change(change))
        self.state.apply(change)

    def persist_low_watermarks(self, floors: Mapping[int, int]) -> None:
        """Have the log say what these streams do not keep any more, before memory does: a message that was evicted
        must not come back after a kill. The caller raises them in the state."""
        change: Change = {"do": "floor", "floors": [[number, floor] for number, floor in floors.items()]}
        try:
            self.writer.append_batch([Draft(Kind.CHANGE, 0, encode_change(change))], self.times.next_ns())
        except OSError as error:
            raise errors.DiskFailed(str(error)) from error

    # ------------------------------------------------------------ as safe as `sync` says

    def after_data_sync(self, value: T) -> Step[T]:
        """`value`, when the messages appended so far are as safe as `sync` says."""
        sync = self.settings.sync
        if sync == SYNC_OFF or not self.must_retain:
            return value
        if sync == SYNC_REPLICA:
            return self._after_copy(value)
        if sync:
            self.upkeep.sync(None, sync / 1e9)
            return value
        return self.after_sync(value)

    def after_metadata_sync(self, value: T) -> Step[T]:
        """`value`, when a change of names, modes or settings is as safe as `sync` says."""
        sync = self.settings.sync
        if sync == SYNC_REPLICA:
            return self._after_copy(value)
        if sync > 0:
            self.upkeep.sync(None, sync / 1e9)
        return self.after_sync(value) if sync == SYNC_ALWAYS else value

    def after_sync(self, value: T) -> Step[T]:
        """`value`, once everything appended so far is on disk; DiskFailed where it failed."""
        wait: Wait[T] = Wait()
        self.upkeep.sync(answering(wait, value, "the disk failed"))
        return wait.result() if wait.settled else wait

    # ------------------------------------------------------------ what may be shown

    def _after_copy(self, value: T) -> Step[T]:
        """`value`, once everything appended so far is on disk and in the copy, and shown."""
        if self.shown is None or (self.end.failed is not None and self.stored.end.failed is None):
            return self.after_sync(value)  # nothing is promised that the group could not keep: it takes no messages
        wait: Wait[T] = Wait()
        self.hold(0, answering(wait, value, NOT_REPLICATED))
        return wait.result() if wait.settled else wait

    def hold(self, first: int, then: Answer) -> None:
        """Call `then` when the copy has all that was appended so far, after the calls held before. `first`: what it
        shows, as in `HeldAnswer`."""
        assert self.shown is not None
        entry = HeldAnswer(first, then)
        self.shown.end.add(entry)
        call = self.upkeep.replicate if self.settings.sync == SYNC_REPLICA else self.upkeep.sync
        call(lambda error: self._settle(entry, error))

    def _settle(self, entry: HeldAnswer, error: OSError | None) -> None:
        """The copy has what the entry waits for, and so what those before it do."""
        shown = self.shown
        if error is not None or shown is None:
            entry.settle(error)
            return
        held = shown.end.held
        while held and not entry.is_over:
            shown.end.pop().settle(None)
        if not held:
            self.on_all_shown()

    def end_waits(self, error: OSError) -> None:
        """Answer the callers that wait for the copy: it may have what they wrote, or not. Nothing is shown by that."""
        for entry in list(self.shown.end.held) if self.shown is not None else ():
            entry.settle(error)

    def stop_holding(self) -> None:
        """The group does not wait for the copy any more: what is held is shown when it is on disk."""
        for entry in list(self.shown.end.held) if self.shown is not None else ():
            self.upkeep.sync(lambda error, entry=entry: self._settle(entry, error))  # type: ignore[misc]


def answering(wait: Wait[T], value: T, why: str) -> Answer:
    """A callback that resolves a Wait with `value`, or fails it with DiskFailed: `why` and the error. A
    subscriber that fails then is one request's fault: the log is not affected."""

    def then(error: OSError | None) -> None:
        try:
            if error is None:
                wait.resolve(value)
            else:
                wait.fail(errors.DiskFailed(f"{why}: {error.strerror or error}"))
        except Exception:
            _requests.exception("a request failed when its wait was over")

    return then


def record_at(reader: LogReader, sequence: int) -> Record | None:
    """The record of that sequence; None where there is none, or it is damaged. Raises DiskFailed."""
    try:
        record = reader.scan(sequence)
    except errors.Damaged:
        return None
    return record if record is not None and record.sequence == sequence else None


def draft_of(change: Change) -> Draft:
    """Its record."""
    return Draft(Kind.CHANGE, change.get("stream", 0), encode_change(change))


def _ignore(_: object) -> None:
    """Until the group has its parts."""


# ------------------------------------------------------------ log clock

# The two clocks of a log: the wall times that its records carry, and the engine time that they mean. Anchors turn one
# into the other (mqfs(4), "Time").

_SECOND_NS = 10**9
_COMPARE_NS = _SECOND_NS // 10  # how often the two clocks are compared while messages are written


class LogClock:
    """The clocks of one group's log."""

    def __init__(self, log: GroupLog, clock: Clock) -> None:
        self._log, self._clock = log, clock
        self._checked_ns = 0  # wall time at which the clocks were last compared
        self._anchored = False  # the log says how the clocks stand in this boot

    def next_ns(self) -> int:
        """The wall time of the next record: never before the last one's. Notes a step of the wall clock."""
        wall = self._clock.wall_ns()
        last_ns = self._log.end.last_ns
        if wall < last_ns:
            wall = last_ns
        elif 0 <= wall - self._checked_ns < _COMPARE_NS:
            return wall
        self._checked_ns, engine = wall, self._clock.engine_ns()
        anchors = self._log.state.anchors
        if anchors:
            last = anchors[-1][1]
            steady = abs((wall - last.wall_ns) - (engine - last.engine_ns)) < _SECOND_NS
            if steady and (self._anchored or last.boot == self._clock.anchor().boot):
                self._anchored = True
                return wall
        self._anchored = True
        self._anchor(wall, engine)
        return wall

    def _anchor(self, wall: int, engine: int) -> None:
        """Note how the clocks stand."""
        now = self._clock.anchor()
        anchor = now._replace(wall_ns=wall, engine_ns=engine, shown_ns=now.wall_ns)
        change: Change = {"do": "clock", "sequence": self._log.stored.end.next, "anchor": list(anchor)}
        self._log.append_clock(change, wall)

    def note_step(self) -> None:
        """The wall clock was set: let the log say so even if nothing is written, for the next boot to know."""
        log = self._log
        if log.end.failed is None:
            self._anchor(max(self._clock.wall_ns(), log.end.last_ns), self._clock.engine_ns())
            log.upkeep.sync(None, 1.0)

    def written_ns(self, record: Record) -> int:
        """When a message was written, on the engine clock."""
        anchor = self._log.state.anchor_at(record.sequence)
        return anchor.engine_ns + record.time_ns - anchor.wall_ns if anchor else record.time_ns


# ------------------------------------------------------------ counts


@attrs.define
class GroupCounts:
    """What happened in a group since the server started; shown in `.stats`."""

    written: int = 0  # messages
    written_bytes: int = 0
    read: int = 0  # messages handed to handles
    discarded: int = 0  # by `full drop-new`
    cut: int = 0  # by `full drop-old`
    fell_behind: int = 0  # times it was reported to a reader
    lost: int = 0  # messages they had not had
    refused: int = 0  # writes
