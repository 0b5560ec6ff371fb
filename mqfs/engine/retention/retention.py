"""Retention: which messages of a group are kept, and the room that the others give back.

Each stream keeps a range of sequences, its KeptRange. The log keeps whole segments: one goes when no stream keeps a
message of it.

    segments       [1 ... 400] [401 ... 800] [801 ...        `kept_from`: the lowest sequence that any stream keeps
    streams        a keeps 350 to 900, b keeps 700 to 900    350: nothing can go yet
    `clear a`      a keeps nothing                           700: the first segment goes with the next trim

A trim looks at all streams, in portions. It begins when the log has grown or something expired or was acked. A message
in the middle of a range may be gone, too: it was dropped, or outlived a ttl of its own (`lapsed`).
"""

from __future__ import annotations

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
_LAPSED = 1_024  # messages that outlived their ttl, counted out at once: some 3 ms
_TRIM_AGAIN_NS = 10**8
_STEPS = 64  # looked at between two looks at the clock: 0.1 ms
_FLOORS = 512  # in one record


def is_per_key(settings: Settings) -> bool:
    """Whether of each key the newest message is kept."""
    return settings.replay == "key" and settings.deliver == "all"


class Retention:
    """`interests`: each tells the lowest sequence of a stream that some reader, consumer or ring has not
    had. `overtake_cursors` is called with a stream that gave up messages, and its floor before."""

    overtake_cursors: Callable[[Any, int], None]

    def __init__(self, host: Group) -> None:
        self._host, self._log, self.counts = host, host.log, host.counts
        self.ranks = host.ranks
        self.expiry: Expiry = Expiry(host.log, host.clock)
        self.interests: list[Callable[[Any], int]] = []
        self.lapsed: dict[int, int] = {}  # messages that outlived their own ttl: sequence -> stream
        self.evictions = 0  # grows with every cut, so that cursors look only then
        self.evicted_before = 0  # one above the newest message that a cut took away
        self.kept_from = 0  # the lowest sequence that any stream keeps, when it was last trimmed
        self._trimmed_bytes = 0  # the log's size, and what had expired, when it was last trimmed
        self._trimmed_expired = 0
        self._unlooked = 0  # dropped messages to be looked up, as the log has given back room
        self._dirty = False  # something that was wanted then may not be any more
        self._trimming: Iterator[None] | None = None  # what is left of it
        self._cut_below = 0  # what the log's bound has cut last
        self.room = 0  # bytes that may surely be written before the log's bound is looked at again
        self._cuts_settled = False
        self._cut: set[int] = set()  # streams that `depth` has cut since the log had their floors
        self._expiry_alarm = Alarm(host.timers, host, EXPIRY, "expiring messages", self._expire_due)
        self._trim_again_ns = 0  # engine time, before which writers that wait have nothing trimmed
        self._trim_alarm = Alarm(host.timers, host, TRIMMING, "giving back room", lambda _: self.trim())
        self.newest = NewestPerKey(host) if is_per_key(host.settings) else None
        self.tail = 0  # under `replay key`: no stream has one above it

    def low_watermark(self, stream: Stream) -> int:
        """The lowest sequence of the stream that a reader present now, or a consumer, has not had."""
        return min([self._log.end.next, *(interest(stream) for interest in self.interests)])

    def retention_changed(self, change: Change | None = None) -> None:
        """A change of the group may have made messages unwanted. The log has it, and the state."""
        self._dirty = True
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
        """Messages whose own ttl has ended count no more: a portion."""
        ended = self.ranks.expired(self._host.clock.engine_ns(), _LAPSED)
        for sequence, number in ended:
            stream = self._host.numbers.get(number)
            if stream is not None:
                stream.kept.lapse(sequence)
                self.lapsed[sequence] = number
                if self.newest is not None:
                    self.newest.remove(number, sequence)
                self._dirty = True
                self._host.mark_dirty()

    def _forget_lapsed(self) -> Iterator[None]:
        """Those at the beginning of their stream need not be remembered, nor dropped ones: it keeps nothing there. In
        steps."""
        for number in {*self.lapsed.values(), *self._log.state.dropped.values()}:
            if (stream := self._host.numbers.get(number)) is not None:
                yield from stream.kept.pass_absent()
        yield from self._forget_absent(self.lapsed)

    def _forget_absent(self, absent: dict[int, int]) -> Iterator[None]:
        """Forget what is below its stream's floor, of messages that are not to be seen. In steps."""
        for count, (sequence, number) in enumerate(list(absent.items())):
            owner = self._host.numbers.get(number)
            if owner is None or sequence < owner.kept.state.floor:
                absent.pop(sequence, None)
                self.ranks.remove(sequence)
            if count % _STEPS == 0:
                yield

    def _forget_removed(self, absent: dict[int, int]) -> None:
        """The log has given back room: messages in the middle may be gone from it, too. A portion of them is looked up.
        Claimed ones are remembered: an acknowledgement must not count them out again."""
        claimed = set[int]().union(*(consumer.claims for consumer in self._host.consumers.every()))
        for sequence, number in list(islice(absent.items(), _LOOKED_AT)):
            found = self._log.reader.locate(number, sequence)
            if (stream := self._host.numbers.get(number)) is not None:
                stream.kept.newest_kept()  # while it is known that this one is not
            del absent[sequence]
            if (found is not None and found[0] == sequence) or sequence in claimed:
                absent[sequence] = number  # after the others, which are looked at before it is again
            else:
                self.ranks.remove(sequence)

    def _forget_dropped(self) -> None:
        """As `_forget_removed`, but while the message may be found again, by a start after a crash or by a server that
        takes over, it is remembered. Below their stream's floor `_forget_absent` forgets them, as the state at the head
        of the next segment has that floor."""
        if self._unlooked and self._log.upkeep.is_final:
            self._forget_removed(self._log.state.dropped)
            self._unlooked = max(self._unlooked - _LOOKED_AT, 0)
        if self._looks_again:
            self._host.mark_dirty()

    @property
    def _looks_again(self) -> bool:
        """Whether dropped messages are to be looked up in this trim or a later one. In a copy they stay."""
        return self._unlooked > 0 and (self._log.upkeep.is_final or self._log.upkeep.lag is None)

    def is_expired(self, record: Record) -> bool:
        """Whether a message has outlived its own ttl."""
        rank = self.ranks.of(record)
        return rank is not None and rank.expires_ns <= self._host.clock.engine_ns()

    @property
    def keeps_all(self) -> bool:
        """Whether nothing but time and commands decide what is kept."""
        return not self.is_up_to_readers and self._log.settings.depth is NO_DEPTH

    @property
    def is_up_to_readers(self) -> bool:
        """Whether what they have had is not kept. Where it is, floors rise at once; only time is looked at later."""
        settings = self._log.settings
        return settings.replay != "all" or settings.deliver != "all"

    def advance_all(self) -> None:
        """Raise all floors that readers decide: removed messages stay removed for those that seek back. Under `replay
        last` a stream with one message keeps that."""
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
        """Tell the log what is still wanted, when enough has changed to make it worth the while."""
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
        """A slice of it, or with `always` all."""
        clock = self._host.clock
        until = clock.engine_ns() + int(limits.SLICE_S * 1e9)
        try:
            for _ in self._trimming or ():
                if not always and clock.engine_ns() >= until:
                    self._trim_alarm.at(clock.engine_ns() + 1)
                    return
        except Exception:
            self._dirty = True  # to be tried again
            self._trimming = None
            raise
        self._trimming = None

    def _trim(self, size: int, expired: int, wanted: bool) -> Iterator[None]:
        """In steps. Floors only rise: those found first still hold at the end. Of streams made meanwhile all stays."""
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
            stream.kept.update_low_watermark()  # up to all its consumers
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
            self._log.upkeep.trim(floors, gone)
        else:
            self._log.upkeep.trim(floors, {sequence for sequence in gone if sequence < newest.known}, newest.wanted)
        if self._log.upkeep.size < max(size, self._trimmed_bytes):
            self._forget_removed(self.lapsed)
            self._unlooked = len(self._log.state.dropped)
        self._forget_dropped()
        self._trimmed_bytes = self._log.upkeep.size

    def note_eviction(self, messages: int, before: int) -> None:
        """A bound or `clear` took away that many messages below that sequence."""
        self.evictions += messages
        self.evicted_before = max(self.evicted_before, before)

    def note_change(self) -> None:
        """A reader advanced or closed; messages retained only for it can be trimmed."""
        if self._log.settings.replay != "all" or self._log.settings.deliver == "one":
            self._dirty = True
            self._host.mark_dirty()

    def find_room(self, room: int) -> bool:
        """The estimated room is used up: measure it. False: there is none."""
        if self._log.upkeep.size + room > self.bound_bytes() and not self._make_room(room):
            return False
        self.room = max(self.bound_bytes() - self._log.upkeep.size - room, 0)
        return True

    def _make_room(self, room: int) -> bool:
        """The log reached its bound: give back what is not wanted, and with `full drop-old` cut the oldest stretch."""
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
        """For writers that wait, of whom each asks again whenever a message was read."""
        now, self._dirty = self._host.clock.engine_ns(), True
        if now >= self._trim_again_ns:
            self._trim_again_ns = now + _TRIM_AGAIN_NS
            self.trim()
        else:
            self._trim_alarm.at(self._trim_again_ns)
        self._host.mark_dirty()

    def _evict_oldest(self, beyond: int) -> None:
        if self._log.reader.first < self._cut_below and beyond <= limits.SEGMENT_BYTES:
            return  # what was cut is given back as soon as the disk has that
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
        """So many bytes are to be appended. False: the log has reached its bound, and `full` does not have it cut."""
        self.room -= size
        return self.room >= 0 or self.find_room(size)

    def reserve_room(self, size: int) -> None:
        """As `take_room`, for what can neither wait nor be discarded. Raises StreamFull."""
        if not self.take_room(size):
            raise self.bound_reached()

    def bound_reached(self) -> errors.StreamFull:
        return errors.StreamFull(f"the group's log is full: {self.bound_bytes()} bytes")

    def note_cut(self, number: int) -> None:
        """`depth` has cut a stream, and the log does not have its floor."""
        self._cut.add(number)

    def _record_cuts(self) -> None:
        """Have the log say what `depth` has cut. A start cuts to the depth what it finds: where that is less, as others
        went from the middle, or it keeps more by another setting, the oldest would come back."""
        numbers = self._host.numbers
        with suppress(errors.MqfsError):  # tried again with the next trim
            while some := list(islice(self._cut, _FLOORS)):
                floors = {number: stream.state.floor for number in some if (stream := numbers.get(number))}
                if floors:
                    self.persist_low_watermarks(floors)
                self._cut.difference_update(some)

    def persist_low_watermarks(self, floors: Mapping[int, int]) -> None:
        """Have the log say what these streams will not keep any more. Raises DiskFailed."""
        if self._log.settings.keep != "ring":
            self._log.persist_low_watermarks(floors)

    def apply_depth_after_recovery(self) -> None:
        """What `depth` had cut before the start is not offered to anyone again."""
        if self._log.settings.depth is not NO_DEPTH and not self._cuts_settled:
            for stream in self._host.numbers.values():
                stream.kept.update_low_watermark()
        self._cuts_settled = True

    def bound_depth(self, stream: Stream, *, is_counted: bool = False) -> None:
        """Cut a stream to its `depth`, with `full drop-old`: messages accepted earlier were appended beyond it.
        `is_counted`: just before the append it was found out what it keeps, and that a cut is due."""
        settings, kept = self._log.settings, stream.kept
        if settings.full != "drop-old" or settings.depth is NO_DEPTH or stream.name == settings.dead:
            return
        # Messages that wait for the replica count; under `replay key` only then it is known what it replaces.
        held = (0, 0) if self.newest is not None else (kept.held_count, kept.held_size)
        if retained.fits(settings.depth, kept, *held):
            return
        if not is_counted or kept.count < 0:
            kept.update_low_watermark()
            if retained.fits_by_now(kept, *held):
                return
        with suppress(errors.MqfsError):  # the log did not take the cut, but it has the message: the next one cuts
            kept.cut_to_depth()

    def expire_at(self, due_ns: int, number: int) -> None:
        """A message of the stream of that number outlives its own ttl then: a writer may wait for its room."""
        if (stream := self._host.numbers.get(number)) is not None:
            kept = stream.kept
            is_first = kept.ends_until < self.ranks.next_expiry_ns  # those noted before are counted out
            kept.ends_from = due_ns if is_first else min(kept.ends_from, due_ns)
            kept.ends_until = max(kept.ends_until, due_ns)
        self._expiry_alarm.at(due_ns)

    def _expire_due(self, now_ns: int) -> None:
        """Not before all with an own ttl are known: `trim` has them read, then calls this again."""
        if not self.ranks.is_complete:
            self.trim()
            return
        self.expire_messages()
        if self.ranks.next_expiry_ns != NEVER:
            self._expiry_alarm.at(max(self.ranks.next_expiry_ns, now_ns + 1))  # the rest after others


def forget_dropped(group: Group, names: Set[str]) -> Iterator[None]:
    """Forget the dropped messages before all that these streams keep. In steps."""
    for stream in [group.streams[name] for name in names & group.streams.keys()]:
        yield from stream.kept.pass_absent()
    yield from group.retention._forget_absent(group.state.dropped)


def renew_newest(retention: Retention, group: Group) -> None:
    """`replay` or the stream of dead letters is another: what is kept by keys is looked up again, if anything is."""
    group.log.remember_newest(None)
    if retention.newest is not None:
        retention.newest.end()
    retention.tail = 0
    for stream in group.numbers.values():
        stream.kept.tail, stream.kept.rows, stream.kept.newest = 0, NOTHING, -1
        stream.kept.recount()
    retention.newest = NewestPerKey(group) if is_per_key(group.settings) else None
