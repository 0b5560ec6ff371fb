"""A stream: its group's log seen through its name, and who waits on it.

Owns the counting of what the stream keeps, the cutting of what it does not keep any more, and its readers and blocked
writers. The log itself, and the order of things between streams, are the group's.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import attrs

from mqfs import errors
from mqfs.ack_state import ACK, REQUEUE, step
from mqfs.engine.delivery.consumer import UNTOUCHED, NeverConsumed, Taken
from mqfs.engine.language.node import Numbered
from mqfs.group_state import ConsumerState, StreamState
from mqfs.model import Kind, Record
from mqfs.wait import Step, Wait

if TYPE_CHECKING:
    from mqfs.engine.delivery.consumer import Consumer, Crowd
    from mqfs.engine.files.positioned_reader import Reader
    from mqfs.engine.files.stream_file import StreamHandle
    from mqfs.engine.group import Group
    from mqfs.engine.language.settings import Depth
    from mqfs.engine.publishing.atomic_batch import AtomicBatch
    from mqfs.engine.publishing.deduplication import PutId


@attrs.define
class WriteRequest:
    """What is to be written to a stream, as one unit: by one write(2), `.put`, or the engine itself."""

    kind: int
    bodies: Sequence[bytes]
    total: int  # what the write returns
    undo: Callable[[], None] | None = None  # called where it is cancelled before it was appended
    headers: bytes = b""
    id: PutId | None = None  # of a `.put`
    on_sequence: Callable[[int], None] | None = None  # gets the sequence of the first message
    unit: AtomicBatch | None = None  # for this and perhaps other streams: it says itself what becomes of it

    @property
    def size(self) -> int:
        return sum(map(len, self.bodies))


Steps = tuple[ConsumerState, bytes]  # what is recorded of a consumer
_STEPS = 256  # messages passed between two looks at the clock: some 0.3 ms
UNKNOWN, RECOUNT = -2, -1  # a stream's count: not looked at since the start, and to be counted again


class Admission(enum.Enum):
    """What `depth` and `full` say of a write."""

    APPEND = enum.auto()
    DISCARD = enum.auto()
    WAIT = enum.auto()


@attrs.define
class Cut:
    """What is to be taken from the beginning of a stream: its floor and what it keeps behind that."""

    floor: int
    count: int
    size: int
    gone: int = 0  # what is taken
    gone_size: int = 0
    lost: int = 0  # messages among them
    last_lost: int = 0
    before: int = 0  # `Stream.gone` when it was planned


class Clearing(NamedTuple):
    """A stream of which all is to go."""

    stream: Stream
    floor: int
    newest: int  # message that goes; 0: none
    cut: Cut


class Routes(NamedTuple):
    """Which named consumers a stream has, while the group's `shape` is the same."""

    shape: int
    crowds: tuple[Crowd, ...]
    consumers: tuple[Consumer, ...]  # in the order in which they were made
    bounded: tuple[Consumer, ...]  # those with a `backlog`


NO_ROUTES = Routes(-1, (), (), ())


class Stream(Numbered):
    """A file. Made and removed by its group."""

    __slots__ = (
        "_routes",
        "_was_shared",
        "blocked",
        "count",
        "default_consumer",
        "evicted_before",
        "group",
        "mtime_ns",
        "newest",
        "number",
        "opens",
        "parked",
        "readers",
        "removed",
        "size",
        "state",
        "trimmed_count",
        "unused_since_ns",
        "views",
        "watchers",
        "written",
    )

    def __init__(self, group: Group, state: StreamState) -> None:
        self.group = group
        self.state = state
        self.number = state.number
        self.removed = False
        self.opens = 0
        self.readers: set[StreamHandle] = set()
        self.parked: Parked = {}
        self.blocked: dict[Wait[int], WriteRequest] = {}
        self.watchers: dict[object, Callable[[], None]] = {}
        self.count = UNKNOWN  # messages kept at or above the floor
        self.size = 0  # their bytes
        self.trimmed_count = 0  # messages that fell below the floor since the start
        self.evicted_before = 0  # one above the newest message that a bound or `clear` took away
        self.newest = -1  # sequence of the newest message; 0: none; -1: not looked up yet
        self.mtime_ns = 0  # its time, or 0 where it was not looked up
        self.written = 0
        self.unused_since_ns = group.tree.clock.engine_ns()
        self.views: tuple[int, frozenset[str], frozenset[str]] | None = None  # the group's, for it
        self.default_consumer: Consumer | None = None  # who takes, under `deliver one`; see `own_consumer`
        self._was_shared = False  # when it was counted
        self._routes = NO_ROUTES

    @property
    def name(self) -> str:
        return self.state.name

    @property
    def parent(self) -> Group:
        return self.group

    # ------------------------------------------------------------ what is kept

    def kept_from(self) -> int:
        """The lowest sequence this stream keeps now."""
        group = self.group
        settings = group.settings
        floor = max(self.state.floor, group.times.expired_before())
        if settings.deliver == "one":
            return max(floor, min(consumer.low for consumer in self.interested_consumers()))
        if settings.replay == "all" or self.name == settings.dead:
            return floor
        live = group.low_watermark(self)
        if single := self.next_unclaimed_exclusive():
            live = min(live, single)
        if held := self._held_singles():
            live = min(live, *held)
        if settings.replay == "last" and (newest := self.newest_kept()) >= floor and newest:
            live = min(live, newest)
        return max(floor, live)

    def update_low_watermark(self) -> None:
        """Raise the floor to what is kept now, and count what is above it."""
        self.group.expire_messages()
        if self._was_shared != self.shared:
            self._was_shared = self.shared
            self.recount()
        floor = self.kept_from()
        if self.count < 0 or floor > self.state.floor:
            self._raise(floor)

    def pass_absent(self) -> Iterator[None]:
        """Raise the floor past messages that were dropped or outlived their ttl. In steps."""
        group = self.group
        self.update_low_watermark()
        first, steps = self.state.floor, 0
        while True:
            found = group.bucket.reader.locate(self.number, first)
            away = found is not None and (found[0] in group.lapsed or found[0] in group.state.dropped)
            steps += 1
            if not away or steps % _STEPS == 0:
                first = found[0] if found is not None else group.bucket.end.next
                if first > self.state.floor:
                    self._raise(first)
                yield
            if not away or found is None:
                return
            first = found[0] + 1

    def _raise(self, floor: int) -> None:
        old, before = self.state.floor, self.count
        self.state.floor = floor = max(floor, old)
        if before < 0:
            self.count, self.size = self._counted(floor)
            settings = self.group.settings
            depth_tells = settings.full == "drop-old" and self.name != settings.dead and not self._outlasts_readers
            if before == UNKNOWN and depth_tells:
                # Read from a log after a kill: what `depth` had cut since the newest state is still in it.
                cut = self.group.counts.cut
                self.cut_to_depth()
                self.group.counts.cut = cut
            return
        count, size = self._counted(old, floor)
        self.count -= count
        self.size -= size
        if count:
            self.trimmed_count += count
            if self.group.cursors:
                self.group.overtake_cursors(self, old)

    def _counted(self, first: int, end: int | None = None) -> tuple[int, int]:
        """(messages, bytes) in [first, end) of what is still to be counted."""
        tally = self.group.bucket.metrics.count
        count, size = tally(self.number, first, end)
        for run_first, run_last in self._acknowledged(first, end):
            done, done_size = tally(self.number, run_first, run_last + 1)
            away = self.deleted_in(run_first, run_last + 1)
            count -= done - len(away)
            size -= done_size - sum(away.values())
        away = self.deleted_in(first, end)
        return count - len(away), size - sum(away.values())

    def messages(self, first: int, end: int | None = None) -> int:
        """How many of those in [first, end) were not dropped and did not outlive their own ttl; no end marks."""
        metrics = self.group.bucket.metrics
        there = metrics.count(self.number, first, end)[0]
        if not there:
            return 0
        return there - metrics.count_eof_markers(self.number, first, end) - len(self.deleted_in(first, end))

    def _acknowledged(self, first: int, end: int | None) -> list[tuple[int, int]]:
        """Where it is shared: the parts of [first, end) that everyone has had."""
        if not self.shared:
            return []
        last = self.group.bucket.end.next if end is None else end - 1
        common = [(first, last)]
        for consumer in self.interested_consumers():
            common = [run for begin, stop in common for run in consumer.had_in(begin, stop)]
        return common

    def is_thinned(self) -> bool:
        """Whether some above the floor were had by all who share it."""
        return bool(self._acknowledged(self.state.floor, None))

    def listed(self) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """What whoever reads may see of it: sequences and body bytes, a stretch at a time, the oldest first."""
        group, floor = self.group, max(self.state.floor, self.group.times.expired_before())
        hidden = group.state.dropped.keys() | group.lapsed.keys() | group.ranks.all_singles()
        had = self._acknowledged(floor, None)
        for portion in reversed(list(group.bucket.metrics.listing({self.number: floor}, group.bucket.end.next))):
            sequences, sizes = portion.columns(portion.messages)
            if hidden or had:
                rows = zip(sequences, sizes, strict=True)
                left = [row for row in rows if row[0] not in hidden and not _lies_in(had, row[0])]
                sequences, sizes = [row[0] for row in left], [row[1] for row in left]
            yield sequences, sizes

    def deleted_in(self, first: int, end: int | None = None) -> dict[int, int]:
        """Messages in [first, end) that were dropped, or lived as long as their own ttl said: sequence -> bytes."""
        found = {}
        end = self.group.bucket.end.next if end is None else end
        for away in (self.group.state.dropped, self.group.lapsed):
            mine = range(first, end) if end - first < len(away) else away  # the fewer
            for sequence in mine:
                if first <= sequence < end and away.get(sequence) == self.number:
                    there = self.group.bucket.reader.locate(self.number, sequence)
                    if there is not None and there[0] == sequence:
                        found[sequence] = there[1]
        return found

    def is_deleted(self, sequence: int) -> bool:
        """Whether a message at or above the floor was dropped, outlived its ttl, or was had by all who share it."""
        group = self.group
        if sequence in group.state.dropped or sequence in group.lapsed:
            return True
        return self.shared and all(c.is_acked(sequence) for c in self.interested_consumers())

    def on_deleted(self, size: int) -> None:
        """One message of that size was taken away, by a change that the log has."""
        if self.count > 0:
            self.count -= 1
            self.size -= size

    def recount(self) -> None:
        """What is kept has changed in the middle."""
        self.count = min(self.count, RECOUNT)

    def lapse(self, sequence: int) -> None:
        """A message outlived its own ttl. Not yet in the group's list of those."""
        if self.count >= 0 and sequence >= self.state.floor and not self.is_deleted(sequence):
            found = self.group.bucket.reader.locate(self.number, sequence)
            if found is not None and found[0] == sequence:
                self.count -= 1
                self.size -= found[1]

    def first_kept(self) -> int:
        """Sequence of the first message at or above the floor that was not dropped; 0 where there is none."""
        found = self.group.bucket.reader.locate(self.number, self.state.floor)
        while found is not None and self.is_deleted(found[0]):
            found = self.group.bucket.reader.locate(self.number, found[0] + 1)
        return found[0] if found else 0

    def newest_kept(self) -> int:
        """Sequence of the newest message at or above the floor that was not dropped; 0 where there is none."""
        if self.newest < 0:
            self._look_up_newest()
        while self.newest and self.newest >= self.state.floor and self.is_deleted(self.newest):
            self.newest = self.group.bucket.reader.before(self.newest, self.number) or 0
        return self.newest if self.newest >= self.state.floor else 0

    def _look_up_newest(self) -> None:
        bucket = self.group.bucket
        sequence = bucket.reader.before(bucket.end.next, self.number)
        while sequence is not None:
            try:
                record = bucket.reader.find(self.number, sequence)
            except errors.Damaged:
                record = None
            if record is not None and record.kind == Kind.MESSAGE:
                self.newest, self.mtime_ns = record.sequence, max(self.mtime_ns, record.time_ns)
                return
            sequence = bucket.reader.before(sequence, self.number)
        self.newest = 0

    def visible(self, record: Record) -> bool:
        """Whether a message found in the log is still to be seen."""
        group, sequence = self.group, record.sequence
        if sequence < self.state.floor or sequence in group.state.dropped or group.times.expired(record):
            return False
        if record.headers and group.is_expired(sequence):
            return False
        return not self.shared or not self._had_by_all(sequence)

    # ------------------------------------------------------------ depth

    def verdict(self, messages: int, size: int) -> Admission:
        """Make room for a write as `full` says, or tell that there is none.

        Raises StreamFull (`full reject`), and TooLong for what would never fit.
        """
        depth, full = self.group.settings.depth, self.group.settings.full
        if self.blocked and full == "block":
            return Admission.WAIT
        if not (depth.messages or depth.size) or self.has_room(messages, size):
            return Admission.APPEND
        if full == "block":
            return Admission.WAIT
        if full == "drop-new":
            self.group.counts.discarded += messages
            return Admission.DISCARD
        if full == "reject":
            raise errors.StreamFull(f"{self.name} keeps {self.count} messages, {self.size} bytes; its depth is reached")
        self.cut_to_depth(messages, size)
        return Admission.APPEND

    def has_room(self, messages: int, size: int) -> bool:
        """Whether so much more fits below `depth`, nothing being taken away. Raises TooLong for what never would."""
        if self.group.settings.full != "drop-old" or self.group.settings.depth.size:
            self._require_fit(messages, size)
        depth = self.group.settings.depth
        if not _fits(depth, self, messages, size):
            self.update_low_watermark()
        return _fits(depth, self, messages, size)

    def _require_fit(self, messages: int, size: int) -> None:
        depth = self.group.settings.depth
        if (depth.size and size > depth.size) or (depth.messages and messages > depth.messages):
            raise errors.TooLong("it alone is more than the depth of the stream")

    def cut_to_depth(self, messages: int = 0, size: int = 0) -> None:
        """Take away the oldest until the rest fits, and so much more."""
        cut = self.plan_cut(self.group.settings.depth, messages, size)
        if cut.floor != self.state.floor and self._outlasts_readers:
            self.group.persist_low_watermarks({self.number: cut.floor})
        self.carry_out_cut(cut)

    @property
    def _outlasts_readers(self) -> bool:
        """Whether what it keeps after a start is told by what consumers have acknowledged, and not by `depth`."""
        settings = self.group.settings
        return settings.deliver == "one" or (settings.replay == "off" and bool(self.consumers()))

    def plan_cut(self, depth: Depth, messages: int = 0, size: int = 0) -> Cut:
        """The oldest, until the rest and so much more fits."""
        cut = self.begin_cut()
        while cut.count > 0 and not _fits(depth, cut, messages, size):
            self.extend_cut(cut)
        return cut

    def plan_cut_below(self, target: int) -> Cut | None:
        """All below that sequence; None where nothing is."""
        bucket, floor = self.group.bucket, self.state.floor
        found = bucket.reader.locate(self.number, floor)
        if found is None or found[0] >= target:
            return None
        count, size = self._counted(floor, target)
        lost = max(count - bucket.metrics.count_eof_markers(self.number, floor, target), 0)
        newest = bucket.reader.before(target, self.number) or 0
        while (
            lost
            and newest >= floor
            and (self.is_deleted(newest) or bucket.metrics.count_eof_markers(self.number, newest, newest + 1))
        ):
            newest = bucket.reader.before(newest, self.number) or 0
        return Cut(target, self.count - count, self.size - size, count, size, lost, newest, self.trimmed_count)

    def begin_cut(self) -> Cut:
        """Nothing of it yet."""
        return Cut(self.state.floor, self.count, self.size, before=self.trimmed_count)

    def extend_cut(self, cut: Cut) -> None:
        """By the oldest message that would be left."""
        found = self.group.bucket.reader.locate(self.number, cut.floor)
        if found is None:
            cut.gone_size += cut.size
            cut.gone += cut.count
            cut.count = cut.size = 0
            return
        sequence, size = found
        cut.floor = sequence + 1
        if not self.is_deleted(sequence):
            cut.count -= 1
            cut.size -= size
            cut.gone += 1
            cut.gone_size += size
            if size:  # an end mark is no loss to anyone
                cut.lost += 1
                cut.last_lost = sequence

    def carry_out_cut(self, cut: Cut) -> None:
        """Readers behind it are told. What has to be in the log is there; more may have been appended meanwhile."""
        self.state.floor = max(self.state.floor, cut.floor)
        self._count_gone(cut)
        if cut.lost:
            self.evicted_before = max(self.evicted_before, cut.last_lost + 1)
            self.group.counts.cut += cut.lost
            self.group.evictions += cut.lost

    def _count_gone(self, cut: Cut) -> None:
        """Count anew where messages came or went since it was planned."""
        if (self.count, self.trimmed_count) != (cut.count + cut.gone, cut.before):
            self.recount()
        else:
            self.count, self.size = cut.count, cut.size
        self.trimmed_count += cut.gone

    def plan_clear(self) -> Clearing:
        """What it takes to take away all that is kept."""
        self.update_low_watermark()
        bucket = self.group.bucket
        last = bucket.reader.before(bucket.end.next, self.number)
        floor = self.state.floor if last is None else max(self.state.floor, last + 1)
        cut = Cut(floor, 0, 0, self.count, self.size, before=self.trimmed_count)
        return Clearing(self, floor, self.newest_kept(), cut)

    def cleared(self, clearing: Clearing) -> None:
        """The log and the state say so."""
        if clearing.newest:
            self.evicted_before = max(self.evicted_before, clearing.newest + 1)
            self.group.evictions += 1
        self._count_gone(clearing.cut)

    # ------------------------------------------------------------ messages for one taker (`single`)

    def next_unclaimed_exclusive(self) -> int:
        """The lowest sequence of a message that is for one taker and was not taken; 0 where there is none.

        Who took which, its own consumer knows, under `deliver all` too.
        """
        singles = self.group.ranks.singles(self.number)
        if not singles:
            return 0
        while singles and (singles[0] < self.state.floor or self.is_taken(singles[0]) or self.is_deleted(singles[0])):
            del singles[0]
        return singles[0] if singles else 0

    def all_untaken(self) -> list[int]:
        """The sequences of all of those."""
        singles = self.group.ranks.singles(self.number) if self.next_unclaimed_exclusive() else []
        return [sequence for sequence in singles if not self.is_taken(sequence) and not self.is_deleted(sequence)]

    def is_taken(self, sequence: int) -> bool:
        """Whether somebody has that message which is for one taker, for good or not."""
        if not self._has_consumer:
            return False
        consumer = self.own_consumer()
        return consumer.is_acked(sequence) or sequence in consumer.claims or sequence in consumer.singles

    def _held_singles(self) -> set[int]:
        """Of those: what was taken from the stream under `deliver all`, and is not dealt with."""
        if self.default_consumer is None or not self.default_consumer.singles:
            return set()
        group, floor = self.group, self.state.floor
        held = (s for s in self.default_consumer.singles if s >= floor and group.ranks.is_single(s))
        return {s for s in held if s not in group.state.dropped and s not in group.lapsed}

    def claim_exclusive(self, sequence: int, *also: Steps) -> None:
        """Somebody takes it: nobody else gets it. Raises DiskFailed, ReadOnly."""
        self.group.consumers.acknowledge_all([(self.own_consumer().state, step(ACK, sequence, sequence)), *also])
        self.group.retention_changed()

    def release_exclusive(self, sequence: int, *also: Steps) -> None:
        """Who took it could not keep it. Raises DiskFailed, ReadOnly."""
        self.group.consumers.acknowledge_all([*also, (self.own_consumer().state, step(REQUEUE, sequence, sequence))])
        singles = self.group.ranks.singles(self.number)
        if sequence not in singles and self.group.ranks.is_single(sequence):  # it may have left the log meanwhile
            bisect.insort(singles, sequence)

    # ------------------------------------------------------------ who shares it

    def own_consumer(self) -> Consumer:
        """The nameless consumer it has under `deliver one`."""
        if self.default_consumer is None:
            self.default_consumer = self.group.consumers.nameless(self)
        return self.default_consumer

    def shown_consumer(self) -> Consumer:
        """The same, to be looked at: where nothing was ever taken, one that is not kept."""
        return self.own_consumer() if self._has_consumer else self.group.consumers.untouched(self)

    @property
    def _has_consumer(self) -> bool:
        return self.default_consumer is not None or self.number in self.group.state.consumers

    @property
    def shared(self) -> bool:
        """Whether consumers alone are to have its messages, so that one goes when the last of them acknowledged it."""
        group = self.group
        if group.settings.deliver == "one":
            return True
        if group.settings.replay != "off" or not group.consumers:
            return False
        live = self.readers or group.log_readers or group.cursors
        return not live and self.name != group.settings.dead and bool(self.consumers())

    def interested_consumers(self) -> tuple[Consumer | NeverConsumed | Taken, ...]:
        """Where it is shared, everyone who is to have its messages: under `deliver one` its own consumer, too."""
        if self.group.settings.deliver == "all":
            own = self.default_consumer
            if own is None or not own.singles:
                return self.consumers()
            return (*self.consumers(), Taken(own.singles))
        if not self._has_consumer:
            return (UNTOUCHED, *self.consumers())
        return (self.own_consumer(), *self.consumers())

    def consumers(self) -> tuple[Consumer, ...]:
        """The named consumers over it."""
        routes = self._routes
        return routes.consumers if routes.shape == self.group.routing_version else self.routes().consumers

    def routes(self) -> Routes:
        if self._routes.shape != self.group.routing_version:
            self._routes = self._look_up_routes()
        return self._routes

    def _look_up_routes(self) -> Routes:
        crowds = tuple(self.group.consumers.crowds_of(self))
        members = [consumer for crowd in crowds for consumer in crowd.members]
        members.sort(key=lambda consumer: consumer.number)
        return Routes(self.group.routing_version, crowds, tuple(members), tuple(c for c in members if c.state.backlog))

    @property
    def is_attended(self) -> bool:
        """Whether a consumer is to be told of each of its messages."""
        routes, own = self.routes(), self.default_consumer
        if routes.bounded or (own is not None and own.crowd.waiting):
            return True
        return any(crowd.waiting for crowd in routes.crowds)

    def _had_by_all(self, sequence: int) -> bool:
        hindmost = self.group.consumers.slowest  # of thousands it answers for all, mostly
        if hindmost is not None and not hindmost.is_acked(sequence) and hindmost.covers(self):
            return False
        return all(sharer.is_acked(sequence) for sharer in self.interested_consumers())

    def on_acked(self, consumer: Consumer, sequence: int, size: int) -> None:
        """The consumer acknowledged a message: where it is shared it counts no more when everyone has."""
        if self.count < 0 or sequence < self.state.floor or not self.shared:
            return
        if not self._was_shared:
            self.recount()
            return
        if sequence in self.group.state.dropped or sequence in self.group.lapsed:
            return
        if self._had_by_all(sequence):
            self.count -= 1
            self.size -= size

    # ------------------------------------------------------------ readers and writers that wait

    def appended(self, sequence: int, kind: int, size: int) -> None:
        """Count a message that the log now holds."""
        if kind == Kind.MESSAGE:
            self.newest = sequence
        if self.count >= 0:
            self.count += 1
            self.size += size

    def appended_many(self, newest: int, messages: int, size: int) -> None:
        """As `appended`, of so many messages, of which that is the last."""
        self.newest = newest
        if self.count >= 0:
            self.count += messages
            self.size += size

    def wake_pollers(self) -> None:
        watchers, self.watchers = self.watchers, {}
        for then in watchers.values():
            then()

    def unblock(self) -> None:
        """Let writers that wait go on as far as there is room, in their order."""
        blocked = self.blocked
        while blocked:
            wait, post = next(iter(blocked.items()))
            del blocked[wait]
            rest, self.blocked = blocked, {}  # so that this one is not told to stand behind the others
            try:
                verdict = self.group.admit(self, post)
                step: Step[int] | None = None
                if verdict is Admission.DISCARD:
                    step = post.total
                elif verdict is Admission.APPEND:
                    step = self.group.append_admitted(self, post)
            except Exception as error:
                self.blocked = blocked = rest
                self._refuse_blocked(wait, post, error)
                continue
            if step is None:
                place = self if post.unit is None else post.unit.lacking
                if place is None or place is self:
                    self.blocked = {wait: post, **rest}
                    return
                self.blocked = blocked = rest  # there is room here: it waits where there is none
                place.blocked[wait] = post
                self.group.blocking.add(place)
                continue
            self.blocked = blocked = rest
            chain(step, wait)
        if self.watchers:
            self.wake_pollers()

    def end(self) -> None:
        """The stream is gone: its readers get end-of-file, its writers an error."""
        self.removed = True
        close_waiters(self.parked)
        if self.default_consumer is not None:
            self.default_consumer.removed = True
            self.default_consumer.end()
        self.refuse_all_blocked(errors.NotFound(f"{self.name} was removed"))
        self.wake_pollers()

    def refuse_all_blocked(self, error: errors.MqfsError) -> None:
        for wait in list(self.blocked):
            self._refuse_blocked(wait, self.blocked.pop(wait), error)

    def _refuse_blocked(self, wait: Wait[int], post: WriteRequest, error: Exception) -> None:
        if post.undo is not None:
            post.undo()
        wait.fail(error)


def _lies_in(runs: list[tuple[int, int]], sequence: int) -> bool:
    """Whether it is in one of those ranges, which ascend."""
    at = bisect.bisect_right(runs, sequence, key=lambda run: run[0])
    return at > 0 and sequence <= runs[at - 1][1]


def _fits(depth: Depth, kept: Stream | Cut, messages: int, size: int) -> bool:
    """Whether so much more fits below `depth`; not where it was not counted."""
    if kept.count < 0:
        return False
    if depth.messages and kept.count + messages > depth.messages:
        return False
    return not (depth.size and kept.size + size > depth.size)


Parked = dict["Reader", dict[Wait[bytes], tuple[int, int]]]  # each wait with its read's count and offset


def deliver_to_waiters(parked: Parked, record: Record) -> None:
    """Settle the first waiting read of each handle that may have it with the message."""
    for reader in list(parked):
        if not reader.wants(record):
            continue  # also all but the first, of a message for one taker
        waits = parked[reader]
        wait = next(iter(waits))
        count, offset = waits.pop(wait)
        if not waits:
            del parked[reader]
        wait.settle(reader.hand(record, count, offset))


def close_waiters(parked: Parked) -> None:
    for waits in list(parked.values()):
        for wait in waits:
            wait.settle(b"")
    parked.clear()


def chain(step: int | Wait[int], wait: Wait[int]) -> None:
    """Settle `wait` with what `step` comes to."""
    if not isinstance(step, Wait):
        wait.settle(step)
        return

    def settled(done: Wait[int]) -> None:
        try:
            wait.settle(done.result())
        except (errors.MqfsError, OSError) as error:
            wait.fail(error)

    step.subscribe(settled)
