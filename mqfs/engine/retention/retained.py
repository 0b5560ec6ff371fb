"""The retained range of one stream: its floor, and the count of messages at or above it.

KeptRange also knows which messages of the range are still visible. The group (retention.py) and `depth` decide why a
message is removed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import attrs

from mqfs import errors, limits
from mqfs.clock import Clock
from mqfs.engine.core.log import GroupLog
from mqfs.engine.core.portions import Work
from mqfs.engine.language.settings import NO_DEPTH, Depth
from mqfs.engine.retention.newest import NOTHING
from mqfs.model import NEVER, Kind, Record
from mqfs.store.api import Bucket

if TYPE_CHECKING:
    from mqfs.engine.stream import Stream

_FOLLOWED = 4_096  # messages whose keys are looked up at once where `depth` depends on them: some 30 ms
_STEPS = 256  # messages passed between two checks of the clock: some 0.3 ms
UNKNOWN, RECOUNT = -2, -1  # values of `count`: never counted since the start, and to be counted again


class KeptRange:
    """The range of messages that one stream retains. It begins at `state.floor`."""

    __slots__ = (
        "_owner",
        "_retention",
        "_was_shared",
        "count",
        "ends_from",
        "ends_until",
        "evicted_before",
        "held_count",
        "held_size",
        "log",
        "mtime_ns",
        "newest",
        "number",
        "rows",
        "size",
        "state",
        "tail",
        "trimmed_count",
    )

    def __init__(self, owner: Stream) -> None:
        self._owner, self.log, self._retention = owner, owner.group.log, owner.group.retention
        self.state, self.number = owner.state, owner.number
        self.count = UNKNOWN  # messages retained at or above the floor
        self.size = 0  # bytes of these messages
        self.held_count = self.held_size = 0  # messages that may not be shown yet, and their bytes; not in `count`
        self.trimmed_count = 0  # messages that fell below the floor since the start
        self.evicted_before = 0  # one above the newest message that a bound or `clear` removed
        self.ends_from, self.ends_until = NEVER, 0  # engine ns: earliest and latest expiry by an own ttl, at widest
        self.newest = -1  # sequence of the newest message; 0: none; -1: not looked up yet
        self.mtime_ns = 0  # time of the newest message; 0: not looked up
        self._was_shared = False  # whether the stream was shared when it was counted
        self.tail = 0  # under `replay key`: below it only `rows` are retained, the newest message of each key
        self.rows = NOTHING

    def kept_from(self) -> int:
        """Return the lowest sequence that the stream has to retain now."""
        settings, owner = self.log.settings, self._owner
        floor = max(self.state.floor, self._retention.expiry.expired_before())
        if settings.deliver == "one":
            return max(floor, min(consumer.low for consumer in owner.interested_consumers()))
        if settings.replay == "all" or self._owner.name == settings.dead:
            return floor
        live = self._retention.low_watermark(owner)
        if exclusive := owner.exclusives.first_kept():
            live = min(live, exclusive)
        if settings.replay == "last" and (newest := self.newest_kept()) >= floor and newest:
            live = min(live, newest)
        if (per_key := self._retention.newest) is not None:
            per_key.follow(_FOLLOWED if settings.depth is not NO_DEPTH else limits.PASSED_MESSAGES)
            self._raise_tail(min(live, per_key.reach))
            found = self.rows.at_or_after(floor)
            live = self.tail if found is None else min(self.tail, found[0])
        return max(floor, live)

    def _raise_tail(self, tail: int) -> None:
        """Raise the tail: all readers and consumers have had the messages below it. Of these only the newest of each
        key counts from now on."""
        first = max(self.tail, self.state.floor)
        if self.count > 0 and first < tail:
            count, size = self._counted_all(first, tail)
            kept, kept_size = self.rows.tally(first, tail)
            self.on_deleted(size - kept_size, count - kept)
        self.tail = max(tail, self.tail)
        self._retention.tail = max(tail, self._retention.tail)

    def update_low_watermark(self, *, count_out: bool = True) -> None:
        """Raise the floor to `kept_from`, and count the messages above it. Without `count_out`, messages whose own ttl
        expired may still count if after a start it is not known yet which messages have one."""
        if count_out or self._retention.ranks.is_complete or not self._retention.keeps_all:
            self._retention.expire_messages()
        if self._was_shared != (shared := self._owner.shared):
            self._share(shared)
        floor = self.kept_from()
        if self.count < 0 or floor > self.state.floor:
            self._raise(floor)
            if (newest := self._retention.newest) is not None:
                newest.cut(self)

    def _raise(self, floor: int) -> None:
        old, before = self.state.floor, self.count
        floor = self.state.raise_floor(floor)
        self._retention.removals += floor > old
        if before < 0:
            self.count, self.size = self.counted(floor)
            settings, owner = self.log.settings, self._owner
            is_bounded = settings.full == "drop-old" and owner.name != settings.dead
            if before == UNKNOWN and is_bounded and not owner.outlasts_readers:
                # After a kill the log still has messages that `depth` evicted since the newest STATE record. Evict them
                # again, without counting or reporting a new loss.
                retention = self._retention
                before_it = retention.counts.cut, retention.evictions, retention.evicted_before, self.evicted_before
                if self._retention.newest is not None and settings.depth is not NO_DEPTH:
                    self._retention.newest.follow_to_end()  # so that no superseded message counts against `depth`
                    self.kept_from()
                if not fits_by_now(self, self.held_count, self.held_size):
                    self.cut_to_depth()
                retention.counts.cut, retention.evictions, retention.evicted_before, self.evicted_before = before_it
            return
        everything = not before or floor >= self.log.end.next
        count, size = (before, self.size) if everything else self.counted(old, floor)
        self.count -= count
        self.size -= size
        if count:
            self.trimmed_count += count
            self._retention.overtake_cursors(self._owner, old)

    def counted(self, first: int, end: int | None = None) -> tuple[int, int]:
        """Return the (messages, bytes) retained in [first, end)."""
        if first >= self.tail:
            return self._counted_all(first, end)
        count, size = self.rows.tally(first, self.tail if end is None else min(end, self.tail))
        more, more_size = self._counted_all(self.tail, end) if end is None or end > self.tail else (0, 0)
        return count + more, size + more_size

    def _counted_all(self, first: int, end: int | None = None) -> tuple[int, int]:
        """Return the (messages, bytes) retained in [first, end), without regard to keys."""
        if first >= self.log.end.next:
            return 0, 0
        tally = self.log.metrics.count
        count, size = tally(self.number, first, end)
        for run_first, run_last in self.acked_by_all(first, end):
            done, done_size = tally(self.number, run_first, run_last + 1)
            away = self._deleted_in(run_first, run_last + 1)
            count -= done - len(away)
            size -= done_size - sum(away.values())
        away = self._deleted_in(first, end)
        return count - len(away), size - sum(away.values())

    def messages(self, first: int, end: int | None = None) -> int:
        """Count the messages in [first, end) that were neither dropped nor expired by their own ttl, without EOF
        markers. Acknowledged messages count."""
        if first < self.tail:
            below = self.rows.count_messages(first, self.tail if end is None else min(end, self.tail))
            return below + (self.messages(self.tail, end) if end is None or end > self.tail else 0)
        bucket = self.log.bucket
        there = bucket.metrics.count(self.number, first, end)[0]
        return (
            there - bucket.metrics.count_eof_markers(self.number, first, end) - len(self._deleted_in(first, end))
            if there
            else 0
        )

    def acked_by_all(self, first: int, end: int | None) -> list[tuple[int, int]]:
        """Return the ranges of [first, end), ends included, that all consumers of a shared stream have acked."""
        if not self._owner.shared:
            return []
        last = self.log.end.next if end is None else end - 1
        common = [(first, last)]
        for consumer in self._owner.interested_consumers():
            common = [run for begin, stop in common for run in consumer.acked_in(begin, stop)]
        return common

    def _deleted_in(self, first: int, end: int | None = None) -> dict[int, int]:
        """Return the messages in [first, end) that were dropped, or expired by their own ttl: sequence -> bytes."""
        found = {}
        end = self.log.end.next if end is None else end
        for away in (self.log.state.dropped, self._retention.lapsed):
            mine = range(first, end) if end - first < len(away) else away  # the shorter of the two
            for sequence in mine:
                if first <= sequence < end and away.get(sequence) == self.number:
                    there = self.log.reader.locate(self.number, sequence)
                    if there is not None and there[0] == sequence:
                        found[sequence] = there[1]
        return found

    def is_counted(self, sequence: int) -> bool:
        """Whether a message is at or above the floor, and neither dropped nor expired by its own ttl."""
        return (
            sequence >= self.state.floor
            and sequence not in self.log.state.dropped
            and sequence not in self._retention.lapsed
        )

    def is_deleted(self, sequence: int) -> bool:
        """Whether a message at or above the floor was dropped, expired, superseded, or acked by all consumers."""
        if sequence in self.log.state.dropped or sequence in self._retention.lapsed:
            return True
        if sequence < self.tail and self.rows.find(sequence) < 0:
            return True
        return self._owner.shared and all(c.is_acked(sequence) for c in self._owner.interested_consumers())

    def on_deleted(self, size: int, count: int = 1) -> None:
        """Uncount `count` messages of `size` bytes in all that were removed."""
        if self.count > 0:
            self.count -= count
            self.size -= size

    def recount(self) -> None:
        """Have the messages counted, and the newest looked up, when they are needed next: some in the middle were
        removed, or are retained again."""
        self.count, self.newest = min(self.count, RECOUNT), -1

    def _share(self, shared: bool) -> None:
        """Have all counted again, as the stream is shared now, or is not any more."""
        self._was_shared = shared
        self.recount()

    def lapse(self, sequence: int) -> None:
        """Uncount a message whose own ttl expired. Called before it is entered in `Retention.lapsed`."""
        if self.count >= 0 and sequence >= self.state.floor and not self.is_deleted(sequence):
            found = self.log.reader.locate(self.number, sequence)
            if found is not None and found[0] == sequence:
                self.count -= 1
                self.size -= found[1]

    def first_kept(self, position: int = 0) -> int:
        """Return the sequence of the first retained message at or above the floor and `position`; 0: none."""
        if not self.count and self._was_shared == self._owner.shared:
            return 0
        found = locate(self, max(self.state.floor, position))
        while found is not None and self.is_deleted(found[0]):
            found = locate(self, found[0] + 1)
        return found[0] if found else 0

    def newest_kept(self) -> int:
        """Return the sequence of the newest retained message at or above the floor; 0: none. May have the messages
        counted again."""
        if self._was_shared != (shared := self._owner.shared):
            self._share(shared)
        if self.newest < 0:
            record = _newest_in(self.log.bucket, self.number)
            self.newest = record.sequence if record is not None else 0
            self.mtime_ns = max(self.mtime_ns, record.time_ns if record is not None else 0)
        if not self.count:
            self.newest = 0
        while self.newest and self.newest >= self.state.floor and self.is_deleted(self.newest):
            self.newest = before(self, self.newest)
        return self.newest if self.newest >= self.state.floor else 0

    def visible(self, record: Record, unacked: bool = False) -> bool:
        """Whether a message found in the log is visible to readers. `unacked`: it is known that a consumer over the
        stream has not acked it."""
        if self.count == UNKNOWN:
            bound_after_start(self)
        sequence, retention = record.sequence, self._retention
        if sequence < self.state.floor or sequence in self.log.state.dropped or retention.expiry.is_expired(record):
            return False
        if record.headers and retention.is_expired(record):
            return False
        if sequence < self.tail and self.rows.find(sequence) < 0:
            return False
        return unacked or not self._owner.shared or not self._owner.is_acked_by_all(sequence)

    def appended(self, sequence: int, kind: int, size: int) -> None:
        """Count a message that was appended."""
        if kind == Kind.MESSAGE:
            self.newest = sequence
        if self.count >= 0:
            self.count += 1
            self.size += size

    def appended_many(self, newest: int, messages: int, size: int) -> None:
        """Count several messages that were appended; `newest` is the last of them."""
        self.newest = newest
        if self.count >= 0:
            self.count += messages
            self.size += size

    def on_acked(self, sequence: int, size: int) -> None:
        """Uncount a message of a shared stream once every consumer has acked it. Called after each ack."""
        if self.count < 0 or sequence < self.state.floor or not self._owner.shared:
            return
        if not self._was_shared:
            self.recount()
        elif self.is_counted(sequence) and self._owner.is_acked_by_all(sequence):
            self.count -= 1
            self.size -= size

    # ------------------------------------------------------------ removal by `depth` and `clear`

    def cut_to_depth(self) -> None:
        """Evict the oldest messages until the others fit below `depth`. Messages that may not be shown yet count."""
        if self._retention.newest is not None and not self._retention.newest.is_complete:
            return  # the count may include messages that a newer one supersedes
        cut = plan_cut(self, self.log.settings.depth, self.held_count, self.held_size)
        if cut.floor != self.state.floor:
            if self._owner.outlasts_readers:
                self._retention.persist_low_watermarks({self.number: cut.floor})
            else:
                self._retention.note_cut(self.number)
        self.carry_out_cut(cut)

    def carry_out_cut(self, cut: Cut) -> None:
        """Apply a cut: readers below its floor get FellBehind. The log has the floor, or gets it later (`note_cut`).
        Messages may have been appended since the cut was planned."""
        cut = self._count_gone(cut)
        if cut.lost:
            self.evicted_before = max(self.evicted_before, cut.last_lost + 1)
            self._retention.counts.cut += cut.lost
            self._retention.note_eviction(cut.lost, self.evicted_before)

    def _count_gone(self, cut: Cut) -> Cut:
        """Raise the floor and update the counts. Returns the cut, planned again if messages were appended or removed
        since."""
        if (self.count, self.trimmed_count) != (cut.count + cut.gone, cut.before):
            self.recount()
            cut = plan_cut_below(self, cut.floor) or Cut(cut.floor, RECOUNT, 0)
        else:
            self.count, self.size = cut.count, cut.size
        self.state.raise_floor(cut.floor)
        self._retention.removals += 1
        if self._retention.newest is not None:
            self._retention.newest.cut(self)
        self.trimmed_count += cut.gone
        return cut

    def cleared(self, clearing: Clearing) -> None:
        """Apply a clearing that the log has."""
        if clearing.newest:
            self.evicted_before = max(self.evicted_before, clearing.newest + 1)
            self._retention.note_eviction(1, self.evicted_before)
        self._count_gone(clearing.cut)


def pass_absent(kept: KeptRange) -> Iterator[None]:
    """Raise the floor past messages that were dropped, or whose own ttl expired. In steps."""
    kept.update_low_watermark()
    while pass_some(kept, _STEPS):
        yield
    yield


def pass_some(kept: KeptRange, most: int) -> bool:
    """Raise the floor past at most `most` of these messages, if the range is counted. Whether more may follow."""
    locate, dropped, lapsed = kept.log.reader.locate, kept.log.state.dropped, kept._retention.lapsed
    first, away = kept.state.floor, False
    for _ in range(most if kept.count >= 0 else 0):
        found = locate(kept.number, first)
        away = found is not None and (found[0] in lapsed or found[0] in dropped)
        first = found[0] + away if found is not None else first
        if not away:
            break
    if first > kept.state.floor:  # none of the messages passed counts
        kept.state.raise_floor(first)
        kept._retention.removals += 1
    return away


def bound_after_start(kept: KeptRange) -> None:
    """Apply `depth` before messages are shown the first time since the start: the log may still have evicted ones."""
    if kept.count == UNKNOWN and kept.log.settings.depth is not NO_DEPTH:
        kept.update_low_watermark()


# ------------------------------------------------------------ cuts

# Cuts: the messages that `depth`, a full log or `clear` removes from the beginning of a stream, planned beforehand.
#
# A cut is recorded in the log before it is applied in memory; messages may be appended in between. Only the floor of a
# cut by `depth` may follow later, see Retention.note_cut.

_CUT_STEPS = 64  # messages between two checks of the clock: 0.1 ms


@attrs.define
class Cut:
    """Messages to remove from the beginning of a stream: the new floor, and the counts after it."""

    floor: int
    count: int
    size: int
    gone: int = 0  # messages and EOF markers to remove
    lost: int = 0  # messages among these
    last_lost: int = 0  # sequence of the newest of them
    before: int = 0  # `trimmed_count` when the cut was planned


def locate(kept: KeptRange, sequence: int) -> tuple[int, int] | None:
    """Return sequence and bytes of the first message at or after `sequence`, without those superseded by keys."""
    if sequence < kept.tail:
        found = kept.rows.at_or_after(sequence)
        if found is not None and found[0] < kept.tail:
            return found
        sequence = kept.tail
    return kept.log.reader.locate(kept.number, sequence)


def before(kept: KeptRange, sequence: int) -> int:
    """Return the sequence of the last message below `sequence`, without EOF markers and, below the tail, without those
    superseded by keys; 0: none. From above the tail the first one below it may be superseded."""
    while sequence > kept.tail:
        sequence = kept.log.reader.before(sequence, kept.number) or 0
        if not (sequence and kept.log.metrics.count_eof_markers(kept.number, sequence, sequence + 1)):
            return sequence
    return kept.rows.up_to(sequence - 1, messages=True)


class Clearing(NamedTuple):
    """The planned removal of all messages of a stream."""

    newest: int  # the newest message to remove; 0: none
    cut: Cut


def plan_cut(kept: KeptRange, depth: Depth, messages: int, size: int) -> Cut:
    """Plan to remove the oldest messages until the others fit, with `messages` more of `size` bytes."""
    cut = begin_cut(kept)
    while cut.count > 0 and not fits(depth, cut, messages, size):
        extend_cut(kept, cut)
    return cut


def cut_in_steps(kept: KeptRange, depth: Depth) -> Work[Cut]:
    """As `plan_cut`, in steps, without more messages."""
    cut, steps = begin_cut(kept), 0
    while cut.count > 0 and not fits(depth, cut, 0, 0):
        extend_cut(kept, cut)
        steps += 1
        if steps % _CUT_STEPS == 0:
            yield
    return cut


def plan_cut_below(kept: KeptRange, target: int) -> Cut | None:
    """Plan to remove all messages below the sequence `target`; None if there are none."""
    bucket, floor = kept.log.bucket, kept.state.floor
    found = bucket.reader.locate(kept.number, floor)
    if found is None or found[0] >= target:
        return None
    count, size = kept.counted(floor, target)
    marks = bucket.metrics.count_eof_markers(kept.number, floor, target)
    lost = kept.messages(floor, target) if kept.tail > floor else max(count - marks, 0)
    newest = before(kept, target)
    while lost and newest >= floor and kept.is_deleted(newest):
        newest = before(kept, newest)
    return Cut(target, kept.count - count, kept.size - size, count, lost, newest, kept.trimmed_count)


def plan_clear(kept: KeptRange, end: int) -> Clearing:
    """Plan to remove all retained messages below the sequence `end`."""
    kept.update_low_watermark()
    before, floor = kept.log.reader.before, kept.state.floor
    last = before(end, kept.number) or 0
    gone, size, newest = kept.count, kept.size, kept.newest_kept()
    if kept.log.end.next > end and (before(kept.log.end.next, kept.number) or 0) > last:
        gone, size = kept.counted(floor, end)
        newest = last if last >= floor else 0
    cut = Cut(max(floor, last + 1 if last else 0), kept.count - gone, kept.size - size, gone)
    cut.before = kept.trimmed_count
    return Clearing(newest, cut)


def has_all(kept: KeptRange, sequences: Collection[int]) -> bool:
    """Whether messages that were retained before all still are."""
    kept.update_low_watermark()
    return min(sequences) >= kept.state.floor and not any(map(kept.is_deleted, sequences))


def counted_of(kept: KeptRange, sizes: Mapping[int, int]) -> tuple[int, int]:
    """Return the (messages, bytes) of those in `sizes` that still count. `sizes`: bytes by sequence."""
    left = [size for sequence, size in sizes.items() if kept.is_counted(sequence)]
    return len(left), sum(left)


def begin_cut(kept: KeptRange) -> Cut:
    """Return a cut that removes no message yet."""
    return Cut(kept.state.floor, kept.count, kept.size, before=kept.trimmed_count)


def extend_cut(kept: KeptRange, cut: Cut) -> None:
    """Extend the cut by the oldest remaining message."""
    found = locate(kept, cut.floor)
    if found is None:
        cut.gone += cut.count
        cut.count = cut.size = 0
        return
    sequence, size = found
    cut.floor = sequence + 1
    if not kept.is_deleted(sequence):
        cut.count -= 1
        cut.size -= size
        cut.gone += 1
        if size or not kept.log.metrics.count_eof_markers(kept.number, sequence, cut.floor):  # a marker is not a loss
            cut.lost += 1
            cut.last_lost = sequence


def fits(depth: Depth, kept: KeptRange | Cut, messages: int, size: int) -> bool:
    """Whether `messages` more of `size` bytes fit below `depth`; False if the range is not counted."""
    if kept.count < 0:
        return False
    if depth.messages and kept.count + messages > depth.messages:
        return False
    return not (depth.size and kept.size + size > depth.size)


def fits_by_now(kept: KeptRange, messages: int, size: int) -> bool:
    """Whether `messages` more of `size` bytes fit below the group's `depth`. Expired messages take no room: they are
    uncounted in portions until the others fit, or none of the stream remains."""
    depth = kept.log.settings.depth
    while not (enough := fits(depth, kept, messages, size)) and _has_ended(kept):
        kept._retention.expire_messages()
    return enough


def _has_ended(kept: KeptRange) -> bool:
    """Whether messages of the stream may have expired by their own ttl and still count."""
    group = kept._owner.group
    now = group.clock.engine_ns()
    return kept.ends_from <= now and group.ranks.next_expiry_ns <= min(now, kept.ends_until)


# ------------------------------------------------------------ expiry


class Expiry:
    """Expiry of messages by the `ttl` of one group."""

    def __init__(self, log: GroupLog, clock: Clock) -> None:
        self._log, self._clock = log, clock
        self._before = (-1, 0)  # cache of `expired_before`: (engine time, result)
        self._first = 0  # the first message that had not expired at that time

    def is_expired(self, record: Record) -> bool:
        """Whether a message has expired by the group's `ttl`."""
        ttl = self._log.settings.ttl
        return bool(ttl) and self._log.times.written_ns(record) + ttl <= self._clock.engine_ns()

    def expired_before(self) -> int:
        """Return the sequence below which every message has expired by the group's `ttl`; 0: none has."""
        ttl = self._log.settings.ttl
        if not ttl:
            return 0
        limit = self._clock.engine_ns() - ttl
        known_at, known = self._before
        if known_at == limit:
            return known
        young, behind, reader, anchors = 0, self._log.end.next, self._log.reader, self._log.state.anchors
        for first, anchor in reversed(anchors):  # the newest anchor at or before that time converts it
            if anchor.engine_ns <= limit or anchor is anchors[0][1]:
                young = min(reader.first_at_time(anchor.wall_ns + limit - anchor.engine_ns + 1), behind)
                break
            behind = first
        if young != self._first:  # the gap that a kill leaves in the sequences is no loss to a reader before it
            self._first, known = young, (reader.before(young) or 0) + 1
        self._before = (limit, known)
        return known

    def expires_by_ttl(self, sequence: int) -> int:
        """Return the engine ns at which a message expires by the group's `ttl`; NEVER without one."""
        ttl = self._log.settings.ttl
        if not ttl:
            return NEVER
        record = self._log.reader.scan(sequence)
        return self._log.times.written_ns(record) + ttl if record is not None else NEVER


# ------------------------------------------------------------ newest message


def newest_written(kept: KeptRange) -> int:
    """Return the sequence of the stream's newest retained message, also one that may not be shown yet; 0: none."""
    kept.update_low_watermark()
    held = _newest_in(kept.log.stored, kept.number) if kept.held_count else None
    return held.sequence if held is not None and held.sequence >= kept.log.end.next else kept.newest_kept()


def _newest_in(bucket: Bucket, number: int) -> Record | None:
    """Return the newest message of a stream in a bucket, retained or not, without EOF markers; None: none."""
    sequence = bucket.reader.before(bucket.end.next, number)
    while sequence is not None:
        try:
            record = bucket.reader.find(number, sequence)
        except errors.Damaged:
            record = None
        if record is not None and record.kind == Kind.MESSAGE:
            return record
        sequence = bucket.reader.before(sequence, number)
    return None
