"""Retention: which messages of a group are kept, and when the log is trimmed of the others.

Each stream retains a range of sequences, its KeptRange. The log keeps whole segments: a segment is removed when no
stream retains a message of it.

    segments       [1 ... 400] [401 ... 800] [801 ...        `kept_from`: the lowest sequence that any stream keeps
    streams        a keeps 350 to 900, b keeps 700 to 900    350: no segment can be removed yet
    `clear a`      a keeps nothing                           700: the next trim removes the first segment

A trim examines all streams, in portions. It begins when the log has grown, or messages expired or were acked. Messages
in the middle of a range may be removed, too: they were dropped, or expired by a ttl of their own (`lapsed`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from mqfs import errors, limits
from mqfs.engine.core.timers import EXPIRY, TRIMMING, Alarm
from mqfs.engine.language.settings import NO_DEPTH, Settings
from mqfs.engine.retention import retained
from mqfs.engine.retention.newest import NOTHING, NewestPerKey, look_up
from mqfs.engine.retention.retained import Expiry
from mqfs.model import NEVER, Record
from mqfs.state.group import Change

if TYPE_CHECKING:
    from mqfs.engine.group import Group
    from mqfs.engine.stream import Stream

_LOOKED_AT = 1_024  # messages looked up in the log at once: some ms
_LAPSED = 1_024  # expired messages uncounted at once: some 3 ms
_TRIM_AGAIN_NS = 10**8
_STEPS = 64  # messages examined between two checks of the clock: 0.1 ms
_FLOORS = 512  # floors in one record


def is_per_key(settings: Settings) -> bool:
    """Whether the newest message of each key is retained."""
    return settings.replay == "key" and settings.deliver == "all"


class Retention:
    """The retention of one group. `interests`: functions that return the lowest sequence of a stream that a reader,
    consumer or ring still needs. `overtake_cursors` is called with a stream whose floor rose, and its floor before."""

    overtake_cursors: Callable[[Any, int], None]

    def __init__(self, host: Group) -> None:
        self._host, self._log, self.counts = host, host.log, host.counts
        self.ranks = host.ranks
        self.expiry: Expiry = Expiry(host.log, host.clock)
        self.interests: list[Callable[[Any], int]] = []
        self.lapsed: dict[int, int] = {}  # messages expired by their own ttl: sequence -> stream
        self.evictions = 0  # grows with every cut, so that cursors check for evictions only then
        self.evicted_before = 0  # one above the newest message that a cut removed
        self.removals = 0  # grows when messages were removed, so that consumers by keys check for that only then
        self.kept_from = 0  # the lowest sequence that any stream retained at the last trim
        self._trimmed_bytes = 0  # the log's size at the last trim
        self._trimmed_expired = 0  # `Expiry.expired_before` at the last trim
        self._unlooked = 0  # dropped messages to be looked up, as segments were removed since
        self._dirty = False  # whether messages may have become unneeded since the last trim
        self._trimming: Iterator[None] | None = None  # the rest of an unfinished trim
        self._cut_below = 0  # the sequence below which the log's bound evicted last
        self.room = 0  # bytes that may be written before the log's bound is checked again
        self._cuts_settled = False  # whether `apply_depth_after_recovery` is done
        self._cut: set[int] = set()  # streams that `depth` cut, whose floors are not in the log yet
        self._expiry_alarm = Alarm(host.timers, host, EXPIRY, "expiring messages", self._expire_due)
        self._trim_again_ns = 0  # engine time before which blocked writers cause no trim
        self._trim_alarm = Alarm(host.timers, host, TRIMMING, "giving back room", lambda _: self.trim())
        self.newest = NewestPerKey(host) if is_per_key(host.settings) else None
        self.tail = 0  # under `replay key`: the highest `KeptRange.tail` of all streams

    def low_watermark(self, stream: Stream) -> int:
        """Return the lowest sequence of the stream that a present reader, a consumer or a ring still needs; the end of
        the log if none does."""
        return min([self._log.end.next, *(interest(stream) for interest in self.interests)])

    def retention_changed(self, change: Change | None = None) -> None:
        """Mark the group for a trim after a change that the log and the state have. None: no recorded change."""
        self._dirty = True
        self.removals += change is not None
        if change is not None and change["do"] == "drop":
            self._record_cuts()
        if change is not None and change["do"] == "remove":
            self._cut.discard(change["stream"])
        if change is None or self.newest is None:
            return
        if change["do"] == "remove":
            self.newest.forget(change["stream"])
        for sequence in change["sequences"] if change["do"] == "drop" else ():
            self.newest.remove(change["stream"], sequence)

    def expire_messages(self) -> None:
        """Uncount messages whose own ttl has expired, at most _LAPSED."""
        ended = self.ranks.expired(self._host.clock.engine_ns(), _LAPSED)
        if not ended:
            return
        self.removals += 1
        touched: Counter[Stream] = Counter()
        for sequence, number in ended:
            stream = self._host.numbers.get(number)
            if stream is not None:
                stream.kept.lapse(sequence)
                self.lapsed[sequence] = number
                touched[stream] += 1
                if self.newest is not None:
                    self.newest.remove(number, sequence)
                self._dirty = True
                self._host.mark_dirty()
        # Else whoever asks for the first message passes all in one piece. Twice as many: some waited for an older one.
        for stream, count in touched.items():
            retained.pass_some(stream.kept, 2 * count)

    def _forget_lapsed(self) -> Iterator[None]:
        """Raise floors past expired and dropped messages, then forget the expired ones below them. In steps."""
        for number in {*self.lapsed.values(), *self._log.state.dropped.values()}:
            if (stream := self._host.numbers.get(number)) is not None:
                yield from retained.pass_absent(stream.kept)
        yield from self._forget_absent(self.lapsed)

    def _forget_absent(self, absent: dict[int, int]) -> Iterator[None]:
        """Remove from `absent` the messages below their stream's floor, or of removed streams. In steps."""
        for count, (sequence, number) in enumerate(list(absent.items())):
            owner = self._host.numbers.get(number)
            if owner is None or sequence < owner.kept.state.floor:
                absent.pop(sequence, None)
                self.ranks.remove(sequence)
            if count % _STEPS == 0:
                yield

    def _forget_removed(self, absent: dict[int, int]) -> None:
        """Remove from `absent` messages that the log no longer has, as segments were removed or compacted. Looks up a
        portion of them. Claimed messages stay: an acknowledgement must not uncount them again."""
        claimed = set[int]().union(*(consumer.claims for consumer in self._host.consumers.every()))
        for sequence, number in list(islice(absent.items(), _LOOKED_AT)):
            found = self._log.reader.locate(number, sequence)
            if (stream := self._host.numbers.get(number)) is not None:
                stream.kept.newest_kept()  # look it up while this message is known to be deleted
            del absent[sequence]
            if (found is not None and found[0] == sequence) or sequence in claimed:
                absent[sequence] = number  # at the end: the others are looked up first next time
            else:
                self.ranks.remove(sequence)

    def _forget_dropped(self) -> None:
        """Forget dropped messages that the log no longer has, a portion at a time.

        A dropped message is remembered while a start after a crash, or a server that takes over, may find it again.
        Below the stream's floor `_forget_absent` forgets it: the STATE record of the next segment has that floor.
        """
        if self._unlooked and self._log.upkeep.is_final:
            self._forget_removed(self._log.state.dropped)
            self._unlooked = max(self._unlooked - _LOOKED_AT, 0)
        if self._looks_again:
            self._host.mark_dirty()

    @property
    def _looks_again(self) -> bool:
        """Whether dropped messages have to be looked up in this trim or a later one. With a copy of the log they are
        not, as the copy keeps them."""
        return self._unlooked > 0 and (self._log.upkeep.is_final or self._log.upkeep.lag is None)

    def is_expired(self, record: Record) -> bool:
        """Whether a message has expired by its own ttl."""
        rank = self.ranks.of(record)
        return rank is not None and rank.expires_ns <= self._host.clock.engine_ns()

    @property
    def keeps_all(self) -> bool:
        """Whether only time and commands remove messages."""
        return not self.is_up_to_readers and self._log.settings.depth is NO_DEPTH

    @property
    def is_up_to_readers(self) -> bool:
        """Whether the progress of readers and consumers decides which messages are retained."""
        settings = self._log.settings
        return settings.replay != "all" or settings.deliver != "all"

    def advance_all(self) -> None:
        """Raise all floors that depend on readers, so that a seek back does not find trimmed messages. Under `replay
        last` a stream with one message retains it, so its floor stays."""
        if self.is_up_to_readers:
            is_last_kept = self._log.settings.replay == "last" and self._log.settings.deliver == "all"
            for stream in self._host.numbers.values():
                kept = stream.kept
                if kept.count and not (is_last_kept and kept.count == 1 and kept.newest >= kept.state.floor):
                    kept.update_low_watermark()

    def bound_bytes(self) -> int:
        if self._log.settings.keep == "ring":
            return limits.RING_BYTES
        return limits.MEMORY_BYTES if self._host.in_memory else limits.GROUP_BYTES

    def trim(self, always: bool = False) -> None:
        """Begin or continue a trim of the log. It begins if enough has changed, or with `always`, which also completes
        it at once."""
        if self._cut and (self.newest is not None or self.lapsed or self.ranks.count_expiring()):
            self._record_cuts()
        if always or self._trimming is None:
            size, expired = self._log.upkeep.size, self.expiry.expired_before()
            grown = abs(size - self._trimmed_bytes) >= limits.TRIM_BYTES
            loose = self._dirty and (size > limits.TRIM_BYTES or bool(self.lapsed))
            wanted = always or grown or loose or expired > self._trimmed_expired
            if not (wanted or self.lapsed or self._looks_again) and self.ranks.is_complete:
                return
            self._trimming = self._trim(size, expired, wanted)
        self._go_on_trimming(always)

    def _go_on_trimming(self, always: bool = False) -> None:
        """Continue the trim for a slice of time, or with `always` to its end."""
        clock = self._host.clock
        until = clock.engine_ns() + int(limits.SLICE_S * 1e9)
        try:
            for _ in self._trimming or ():
                if not always and clock.engine_ns() >= until:
                    self._trim_alarm.at(clock.engine_ns() + 1)
                    return
        except Exception:
            self._dirty = True  # have it retried
            self._trimming = None
            raise
        self._trimming = None

    def _trim(self, size: int, expired: int, wanted: bool) -> Iterator[None]:
        """Trim the log, in steps. Floors only rise, so the first ones found still hold at the end. Streams made during
        the trim keep all their messages."""
        yield from self.ranks.load()
        self._expire_due(self._host.clock.engine_ns())
        yield from self._forget_lapsed()
        if not wanted:
            self._forget_dropped()
            return
        yield from look_up(self)
        self._dirty, self._trimmed_expired = False, expired
        floors, kept_from, made = {}, self._log.end.next, self._log.state.next_stream
        for stream in list(self._host.numbers.values()):
            stream.kept.update_low_watermark()  # examines all consumers of the stream
            floors[stream.number] = stream.kept.state.floor
            if (kept := self._log.reader.locate(stream.number, stream.kept.state.floor)) is not None:
                kept_from = min(kept_from, kept[0])
            yield
        for absent in (self._log.state.dropped, self.lapsed):
            yield from self._forget_absent(absent)
        yield from self.ranks.forget()
        floors.update((n, 0) for n in range(made, self._log.state.next_stream) if n in self._host.numbers)
        floors.update(self._host.before_trim())
        self.kept_from = kept_from
        gone: Set[int] = self._log.state.dropped.keys() | self.lapsed.keys()
        if (newest := self.newest) is None:
            yield from self._log.upkeep.trim(floors, gone)
        else:
            known = {sequence for sequence in gone if sequence < newest.known}
            yield from self._log.upkeep.trim(floors, known, newest.wanted)
        if self._log.upkeep.size < max(size, self._trimmed_bytes):
            self._forget_removed(self.lapsed)
            self._unlooked = len(self._log.state.dropped)
        self._forget_dropped()
        self._trimmed_bytes = self._log.upkeep.size

    def note_eviction(self, messages: int, before: int) -> None:
        """Count messages below the sequence `before` that a bound or `clear` removed."""
        self.evictions += messages
        self.evicted_before = max(self.evicted_before, before)

    def note_change(self) -> None:
        """Mark the group for a trim after a reader advanced or closed: messages retained only for it can be trimmed."""
        if self._log.settings.replay != "all" or self._log.settings.deliver == "one":
            self._dirty = True
            self._host.mark_dirty()

    def find_room(self, room: int) -> bool:
        """Measure the room below the log's bound, after the estimate is used up, and make some if necessary. Whether
        there are `room` bytes."""
        if self._log.upkeep.size + room > self.bound_bytes() and not self._make_room(room):
            return False
        self.room = max(self.bound_bytes() - self._log.upkeep.size - room, 0)
        return True

    def _make_room(self, room: int) -> bool:
        """Trim a log that reached its bound, and with `full drop-old` evict its oldest segment. Whether messages may be
        appended: with `drop-old` always, as the room is free once the eviction is on disk."""
        full = self._log.settings.full
        if full == "block":
            self._trim_again()
        else:
            self.trim(always=True)
        beyond = self._log.upkeep.size + room - self.bound_bytes()
        if beyond > 0 and full == "drop-old":
            self._evict_oldest(beyond)
        return beyond <= 0 or full == "drop-old"

    def _trim_again(self) -> None:
        """Trim for blocked writers, at most every _TRIM_AGAIN_NS: each of them retries whenever a message is read."""
        now, self._dirty = self._host.clock.engine_ns(), True
        if now >= self._trim_again_ns:
            self._trim_again_ns = now + _TRIM_AGAIN_NS
            self.trim()
        else:
            self._trim_alarm.at(self._trim_again_ns)
        self._host.mark_dirty()

    def _evict_oldest(self, beyond: int) -> None:
        if self._log.reader.first < self._cut_below and beyond <= limits.SEGMENT_BYTES:
            return  # the room of the last cut is free as soon as the cut is on disk
        self._cut_below = self._log.metrics.stretch_end(self.kept_from)
        ranges = [stream.kept for stream in self._host.numbers.values()]
        found = {kept: cut for kept in ranges if (cut := retained.plan_cut_below(kept, self._cut_below))}
        if found:
            self.persist_low_watermarks({kept.number: cut.floor for kept, cut in found.items()})
        for kept, cut in found.items():
            kept.carry_out_cut(cut)
        self._trimmed_bytes = 0
        self.trim(always=True)

    def take_room(self, size: int) -> bool:
        """Take `size` bytes of the log's room before an append. False: the log has reached its bound, and `full` does
        not let it evict messages."""
        self.room -= size
        return self.room >= 0 or self.find_room(size)

    def reserve_room(self, size: int) -> None:
        """Take room for records that can neither wait nor be discarded. Raises StreamFull."""
        if not self.take_room(size):
            raise self.bound_reached()

    def bound_reached(self) -> errors.StreamFull:
        return errors.StreamFull(f"the group's log is full: {self.bound_bytes()} bytes")

    def note_cut(self, number: int) -> None:
        """Remember that `depth` cut a stream whose floor is not in the log yet; see `_record_cuts`."""
        self._cut.add(number)

    def _record_cuts(self) -> None:
        """Record the floors of streams that `depth` cut. A failure is retried with the next trim.

        A start evicts again only down to the depth. If messages in the middle were removed since, or another setting
        now retains more, evicted messages would reappear.
        """
        numbers = self._host.numbers
        with suppress(errors.MqfsError):  # tried again with the next trim
            while some := list(islice(self._cut, _FLOORS)):
                floors = {number: stream.state.floor for number in some if (stream := numbers.get(number))}
                if floors:
                    self.persist_low_watermarks(floors)
                self._cut.difference_update(some)

    def persist_low_watermarks(self, floors: Mapping[int, int]) -> None:
        """Record the low watermarks of these streams, unless the group is in memory. Raises DiskFailed."""
        if self._log.settings.keep != "ring":
            self._log.persist_low_watermarks(floors)

    def apply_depth_after_recovery(self) -> None:
        """Evict again, once, the messages that `depth` had evicted before the start, so that no reader gets them."""
        if self._log.settings.depth is not NO_DEPTH and not self._cuts_settled:
            for stream in self._host.numbers.values():
                stream.kept.update_low_watermark()
        self._cuts_settled = True

    def bound_depth(self, stream: Stream, *, is_counted: bool = False) -> None:
        """Cut a stream to its `depth` under `full drop-old`, after messages were appended beyond it. `is_counted`: the
        low watermark was updated just before the append, and a cut was found to be due."""
        settings, kept = self._log.settings, stream.kept
        if settings.full != "drop-old" or settings.depth is NO_DEPTH or stream.name == settings.dead:
            return
        # Messages that wait for the replica count, except under `replay key`: what they supersede is not known yet.
        held = (0, 0) if self.newest is not None else (kept.held_count, kept.held_size)
        if retained.fits(settings.depth, kept, *held):
            return
        if not is_counted or kept.count < 0:
            kept.update_low_watermark()
            if retained.fits_by_now(kept, *held):
                return
        with suppress(errors.MqfsError):  # the message is in the log, even if the cut is refused: the next one cuts
            kept.cut_to_depth()
        if self._host.consumers.keyed:
            self._host.consumers.on_removals()

    def expire_at(self, due_ns: int, number: int) -> None:
        """Set the alarm for a message of stream `number` whose own ttl expires at `due_ns`: a writer may wait for its
        room."""
        if (stream := self._host.numbers.get(number)) is not None:
            kept = stream.kept
            is_first = kept.ends_until < self.ranks.next_expiry_ns  # all earlier ones are uncounted already
            kept.ends_from = due_ns if is_first else min(kept.ends_from, due_ns)
            kept.ends_until = max(kept.ends_until, due_ns)
        self._expiry_alarm.at(due_ns)

    def _expire_due(self, now_ns: int) -> None:
        """Uncount expired messages and set the alarm again. If not all messages with an own ttl are known yet, `trim`
        reads them first, then calls this."""
        if not self.ranks.is_complete:
            self.trim()
            return
        self.expire_messages()
        if self.ranks.next_expiry_ns != NEVER:
            self._expiry_alarm.at(max(self.ranks.next_expiry_ns, now_ns + 1))  # the rest in the next portions


def forget_dropped(group: Group, names: Set[str]) -> Iterator[None]:
    """Forget the dropped messages below the first retained message of these streams. In steps."""
    for stream in [group.streams[name] for name in names & group.streams.keys()]:
        yield from retained.pass_absent(stream.kept)
    yield from group.retention._forget_absent(group.state.dropped)


def renew_newest(retention: Retention, group: Group) -> None:
    """Rebuild the index of keys after a change of `replay` or of the stream of dead letters; drop it if `replay` is not
    `key` any more."""
    group.log.remember_newest(None)
    retention._trimming, retention._dirty = None, True  # end a trim: messages unwanted so far may count again now
    if retention.newest is not None:
        retention.newest.end()
    retention.tail = 0
    for stream in group.numbers.values():
        stream.kept.tail, stream.kept.rows = 0, NOTHING
        stream.kept.recount()
    retention.newest = NewestPerKey(group) if is_per_key(group.settings) else None
