"""The writer of a group's log: the only module that appends records and applies them to the group's state.

A record is in the log before it is applied to the state. GroupLog gives each record its time, and knows when the record
is as safe as `sync` says. state/ defines what a record means; the fan-out delivers messages.

Under `sync replica` a message is shown only once the copy of the store has it:

    in the log   m1 m2 m3 | m4  m5 m6            `stored` has all: what is written, counted against `depth`, trimmed
    held                    m4 [m5 m6]           one entry a write, in order, each with its delivery
    shown        m1 m2 m3 |                      `end.next` is 4 to all that read: nothing at or above it is found

When the copy has the records of a write, its entry is removed, its messages are counted and delivered, and its writer
is answered, in this order. So a reader that is served meanwhile finds delivered messages only. Changes of names and
settings are not held: only their callers wait.
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
    """A call that waits for the copy. `first`: the first sequence of the messages that its answer shows; 0: none."""

    __slots__ = ("first", "is_over", "then")

    def __init__(self, first: int, then: Answer) -> None:
        self.first, self.then = first, then
        self.is_over = False

    def settle(self, error: OSError | None) -> None:
        """Answer the call, once. An error does not answer a call with messages: they stay held until a later call
        succeeds."""
        if not self.is_over and not (error is not None and self.first):
            self.is_over = True
            self.then(error)


class ShownEnd:
    """See `LogEnd` in mqfs/store/api.py."""

    __slots__ = ("_inner", "_lacking", "firsts", "held")

    def __init__(self, inner: LogEnd, lacking: OSError | None) -> None:
        self._inner, self._lacking = inner, lacking
        self.held: deque[HeldAnswer] = deque()
        self.firsts: deque[int] = deque()  # `first` of the entries in `held` that show messages

    @property
    def next(self) -> int:
        return self.firsts[0] if self.firsts else self._inner.next

    def add(self, entry: HeldAnswer) -> None:
        """Append an entry to `held`."""
        self.held.append(entry)
        if entry.first:
            self.firsts.append(entry.first)

    def pop(self) -> HeldAnswer:
        """Remove and return the first entry of `held`."""
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
    """The `LogReader` and `LogMetrics` (mqfs/store/api.py) of the shown part of a log: below `end.next`."""

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
    """A bucket that shows only the messages that the copy has. `lacking`: why no message may be written, if so."""

    __slots__ = ("end", "id", "metrics", "ranges", "reader", "stored", "upkeep", "writer")

    def __init__(self, stored: Bucket, lacking: OSError | None = None) -> None:
        self.stored, self.id = stored, stored.id
        self.end = ShownEnd(stored.end, lacking)
        self.reader = self.metrics = ShownReader(stored.reader, stored.metrics, self.end)
        self.writer, self.ranges, self.upkeep = stored.writer, stored.ranges, stored.upkeep


# ------------------------------------------------------------ the log


T = TypeVar("T")

_requests = logging.getLogger("mqfs.engine")

FLOORS: Change = {"do": "floor", "floors": []}  # passed to `on_changed` in place of many changes of floors
NOT_REPLICATED = "not replicated"
AckSteps = tuple[ConsumerState, bytes]  # a consumer, and steps as state.acks.step makes them


class GroupLog:
    """The log of one group. `bucket` is its present storage; `end`, `reader`, `metrics` and `upkeep` are its parts.
    `stored` also has the messages that may not be shown yet. `shown` is the bucket under `sync replica`, and after a
    change of `sync` until no message is held; else None.

    Calls that append raise DiskFailed, DiskFull and ReadOnly; then no record was appended or applied.
    """

    def __init__(self, bucket: Bucket, state: GroupState, settings: Settings, clock: Clock) -> None:
        self.use(bucket)
        self.began_at = self.end.next  # a start after a kill leaves sequences below it unused
        self.state, self.settings = state, settings
        self.times = LogClock(self, clock)
        self.changes = 0  # changes of the state appended so far; a cached look-up is valid while this is the same
        self.must_retain = False  # whether a message written now is kept for later readers, consumers or the copy
        self.on_changed: Callable[[Sequence[Change]], None] = _ignore
        self.on_acknowledged: Callable[[ConsumerState], None] = _ignore
        self.on_all_shown: Callable[[], None] = lambda: None

    def use(self, bucket: Bucket) -> None:
        """Store the log in `bucket` from now on: the store's own log, one in memory, or a ring."""
        self.bucket, self.end, self.reader, self.metrics = bucket, bucket.end, bucket.reader, bucket.metrics
        self.writer, self.upkeep = bucket.writer, bucket.upkeep
        self.shown = bucket if isinstance(bucket, ShownLog) else None
        self.stored = bucket.stored if isinstance(bucket, ShownLog) else bucket

    def require_writable(self, *, messages: bool = False) -> None:
        """Check that the log accepts records, and with `messages` also messages. Raises ReadOnly."""
        if (failed := self.end.failed if messages else self.stored.end.failed) is not None:
            raise errors.ReadOnly(f"the disk failed: {failed}" if failed.errno else str(failed))

    # ------------------------------------------------------------ appending

    def next_sequence(self, size: int) -> int:
        """Return the sequence of the first message of the batch that is appended next. `size`: at most the bytes of
        the batch with its changes. Room for them is reserved first, as a new segment may use up a sequence."""
        with suppress(errors.DiskFull):  # the append raises it, or needs less
            self.stored.ranges.reserve_space(size, 0)
        return self.stored.end.next

    def append(self, kind: int, stream: int, body: bytes, time_ns: int) -> int:
        """Append one message without headers and return its sequence. `time_ns`: from `times.next_ns()`."""
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
        """Append messages, changes of the state and steps of consumers, all or none, and apply the changes and steps.
        `drafts`: the records of the changes, where they are encoded already. Returns the sequence of the first
        message."""
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
        """Put `newest` into the state: it is recorded with the next STATE record, at the head of a segment."""
        self.state.newest = newest

    def skip(self) -> int:
        """Use up and return a sequence for a message that is not stored: all its readers get it now."""
        return self.writer.skip()

    def change(
        self,
        *changes: Change,
        acks: Sequence[AckSteps] = (),
        floors: Sequence[Draft] = (),
        drafts: Sequence[Draft] = (),
    ) -> None:
        """Append and apply changes of names, permissions, settings, views or consumers. `drafts`: their records, where
        encoded already. `floors`: records of floors that the caller applies to the state itself."""
        self.require_writable()
        self.append_batch(floors, changes, acks, drafts)
        self.on_changed((FLOORS, *changes) if floors else changes)

    def reserve_numbers(self, count: int) -> None:
        """Reserve the next `count` file numbers for the caller. Unused numbers may be given again after a restart."""
        self.state.next_stream += count

    def acknowledge(self, own: ConsumerState, steps: bytes) -> None:
        """Record the steps of a consumer, unless it is one in memory, and apply them."""
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
        """Record the steps of several consumers, all or none, and apply them."""
        self.require_writable()
        self.append_batch((), (), acks)

    def append_clock(self, change: Change, wall_ns: int) -> None:
        """Record an anchor of the wall clock against the engine clock."""
        self.writer.append(Kind.CLOCK, 0, wall_ns, encode_change(change))
        self.state.apply(change)

    def persist_low_watermarks(self, floors: Mapping[int, int]) -> None:
        """Record the low watermarks of these streams, by number, before the caller raises them in the state: an evicted
        message must not reappear after a kill."""
        change: Change = {"do": "floor", "floors": [[number, floor] for number, floor in floors.items()]}
        try:
            self.writer.append_batch([Draft(Kind.CHANGE, 0, encode_change(change))], self.times.next_ns())
        except OSError as error:
            raise errors.DiskFailed(str(error)) from error

    # ------------------------------------------------------------ syncs

    def after_data_sync(self, value: T) -> Step[T]:
        """Return `value` once the messages appended so far are as safe as `sync` says."""
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
        """Return `value` once the changes of names, modes or settings so far are as safe as `sync` says."""
        sync = self.settings.sync
        if sync == SYNC_REPLICA:
            return self._after_copy(value)
        if sync > 0:
            self.upkeep.sync(None, sync / 1e9)
        return self.after_sync(value) if sync == SYNC_ALWAYS else value

    def after_sync(self, value: T) -> Step[T]:
        """Return `value` once everything appended so far is on disk. Fails with DiskFailed if the sync does."""
        wait: Wait[T] = Wait()
        self.upkeep.sync(answering(wait, value, "the disk failed"))
        return wait.result() if wait.settled else wait

    # ------------------------------------------------------------ waiting for the copy

    def _after_copy(self, value: T) -> Step[T]:
        """Return `value` once everything appended so far is on disk, in the copy, and shown."""
        if self.shown is None or (self.end.failed is not None and self.stored.end.failed is None):
            return self.after_sync(value)  # without a copy the group accepts no messages, so none needs the copy
        wait: Wait[T] = Wait()
        self.hold(0, answering(wait, value, NOT_REPLICATED))
        return wait.result() if wait.settled else wait

    def hold(self, first: int, then: Answer) -> None:
        """Call `then` when the copy has everything appended so far, after the calls held before. If `sync` is no longer
        `replica`, the disk is enough. `first`: as in `HeldAnswer`."""
        assert self.shown is not None
        entry = HeldAnswer(first, then)
        self.shown.end.add(entry)
        call = self.upkeep.replicate if self.settings.sync == SYNC_REPLICA else self.upkeep.sync
        call(lambda error: self._settle(entry, error))

    def _settle(self, entry: HeldAnswer, error: OSError | None) -> None:
        """Answer the entry and those before it: the copy has their records. An `error` answers this entry only."""
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
        """Fail the calls that wait for the copy with `error`, whether or not the copy has their records. Calls with
        messages stay held, so no message is shown."""
        for entry in list(self.shown.end.held) if self.shown is not None else ():
            entry.settle(error)

    def stop_holding(self) -> None:
        """Stop waiting for the copy: held messages are shown when they are on disk."""
        for entry in list(self.shown.end.held) if self.shown is not None else ():
            self.upkeep.sync(lambda error, entry=entry: self._settle(entry, error))  # type: ignore[misc]


def answering(wait: Wait[T], value: T, why: str) -> Answer:
    """Return a callback that resolves a Wait with `value`, or fails it with DiskFailed (`why` and the error). An
    exception of the Wait's subscriber concerns one request: it is logged, and the log stays writable."""

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
    """Return the message of that sequence, or None if there is none or it is damaged. Raises DiskFailed."""
    try:
        record = reader.scan(sequence)
    except errors.Damaged:
        return None
    return record if record is not None and record.sequence == sequence else None


def draft_of(change: Change) -> Draft:
    """Encode a change as a record."""
    return Draft(Kind.CHANGE, change.get("stream", 0), encode_change(change))


def _ignore(_: object) -> None:
    """Do nothing: the default of the hooks until the group sets them."""


# ------------------------------------------------------------ log clock

# A log has two clocks: its records carry wall times, the engine uses engine times. Anchors convert one into the other
# (mqfs(4), "Time").

_SECOND_NS = 10**9
_COMPARE_NS = _SECOND_NS // 10  # how often the two clocks are compared while messages are written


class LogClock:
    """The clocks of one group's log."""

    def __init__(self, log: GroupLog, clock: Clock) -> None:
        self._log, self._clock = log, clock
        self._checked_ns = 0  # wall time at which the clocks were last compared
        self._anchored = False  # whether the log has an anchor of this boot

    def next_ns(self) -> int:
        """Return the wall time of the next record, never before that of the last one. Records an anchor if the wall
        clock stepped, or the log has none of this boot."""
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
        """Record an anchor of these two times."""
        now = self._clock.anchor()
        anchor = now._replace(wall_ns=wall, engine_ns=engine, shown_ns=now.wall_ns)
        change: Change = {"do": "clock", "sequence": self._log.stored.end.next, "anchor": list(anchor)}
        self._log.append_clock(change, wall)

    def note_step(self) -> None:
        """Record an anchor after a step of the wall clock, even if no message is written: the next boot needs it."""
        log = self._log
        if log.end.failed is None:
            self._anchor(max(self._clock.wall_ns(), log.end.last_ns), self._clock.engine_ns())
            log.upkeep.sync(None, 1.0)

    def written_ns(self, record: Record) -> int:
        """Return the engine time at which a message was written."""
        anchor = self._log.state.anchor_at(record.sequence)
        return anchor.engine_ns + record.time_ns - anchor.wall_ns if anchor else record.time_ns


# ------------------------------------------------------------ counts


@attrs.define
class GroupCounts:
    """Counters of a group since the server started; shown in `.stats`."""

    written: int = 0  # messages
    written_bytes: int = 0
    read: int = 0  # messages handed to handles
    discarded: int = 0  # by `full drop-new`
    cut: int = 0  # by `full drop-old`
    fell_behind: int = 0  # times it was reported to a reader
    lost: int = 0  # messages evicted before those readers had them
    refused: int = 0  # writes
