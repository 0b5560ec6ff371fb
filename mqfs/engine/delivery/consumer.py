"""A consumer: a durable cursor whose messages its readers share, each to one of them; a work queue.

Owns what becomes of a message that is handed to a reader, and the records of that in the log. One class serves the
named consumers of `.consumers` and the nameless one that each stream has under `deliver one`. Which message is next is
in dispatcher.py, what a handle looks like to its user in consumer_file.py.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

import attrs

from mqfs import errors, limits
from mqfs.ack_state import ACK, CLAIM, REQUEUE, SEEK, Unacked, step
from mqfs.engine.delivery import dead_letters
from mqfs.engine.delivery.dispatcher import Dispatcher
from mqfs.engine.language.node import Numbered
from mqfs.engine.log import multipart
from mqfs.engine.log.group_log import AckSteps
from mqfs.engine.routing.message_filter import MessageFilter
from mqfs.group_state import Attributes, ConsumerState
from mqfs.model import NEVER, Kind, Record
from mqfs.wait import Wait

if TYPE_CHECKING:
    from mqfs.engine.files.claiming_handle import ClaimingHandle
    from mqfs.engine.group import Group
    from mqfs.engine.stream import Stream

MESSAGE = int(Kind.MESSAGE)
_RETURNED_AT_ONCE = 256  # claims given back by one record: about a millisecond


@attrs.define
class Counts:
    """What happened since the server started; shown in `.stats`."""

    delivered: int = 0
    acknowledged: int = 0
    failed: int = 0  # deliveries
    dead: int = 0  # messages that became dead letters


class Claim:
    """A message that a handle has."""

    __slots__ = ("deadline_ns", "entry", "long", "pid", "sequence", "size", "stream", "taker")

    def __init__(self, taker: ClaimingHandle, record: Record, entry: Unacked) -> None:
        self.taker, self.entry = taker, entry
        self.sequence, self.stream, self.size = record.sequence, record.stream, len(record.body)
        self.long = bool(record.headers) and multipart.is_last(record)  # a body in parts, of which that is the last
        self.pid = taker.claiming_pid
        self.deadline_ns = 0  # engine time; 0: none


class Crowd:
    """The named consumers that are over the same stream, view or group; a nameless one stands alone."""

    __slots__ = ("members", "waiting")

    def __init__(self) -> None:
        self.members: dict[Consumer, None] = {}
        self.waiting: dict[Consumer, None] = {}  # those with readers that wait


class Consumer(Numbered):
    """Made and removed by its group."""

    def __init__(self, group: Group, own: ConsumerState, stream: Stream | None = None) -> None:
        self.group, self.state, self.stream = group, own, stream
        self.removed = False
        self.claims: dict[int, Claim] = {}
        self.receivers: set[ClaimingHandle] = set()  # handles open for writing, most of them for reading too
        self.polling_receivers: set[ClaimingHandle] = set()  # of them: those whose reads may end without a new message
        self.opens = 0
        self.crowd = Crowd()  # of a named one: that of its group
        self.parked: dict[Wait[bytes], ClaimingHandle] = {}  # reads that wait, in the order in which they began to
        self.watchers: dict[object, Callable[[], None]] = {}
        self.counts = Counts()
        self.picker = Dispatcher(self)
        self.singles_only = False  # only messages for one taker are for it: the nameless one under `deliver all`
        self.unconfirmed: dict[ClaimingHandle, int] = {}  # `ack read`: what was handed out last, by who got it
        self._timers: list[tuple[int, int]] = []  # (engine ns, sequence): leases and delays, perhaps outdated
        self._backlog: int | None = None
        self._returning: deque[tuple[Iterator[Claim], str]] = deque()  # claims whose reader has gone, and why
        self.singles: set[int] = set()  # messages for one taker that this one took first, and has not dealt with
        self._selection: MessageFilter | None = None
        self._epoch = -1
        self.serve_anew()

    def serve_anew(self) -> None:
        """The order in which messages are served has changed, or which they are."""
        self.singles_only = self.stream is not None and self.group.settings.deliver == "all"
        self.picker.forget()

    # ------------------------------------------------------------ as a file

    @property
    def name(self) -> str:
        return self.state.name or (self.stream.name if self.stream else "")

    @property
    def number(self) -> int:
        return self.state.number

    @property
    def attributes(self) -> Attributes:
        return self.state

    # ------------------------------------------------------------ what it is over

    @property
    def selection(self) -> MessageFilter:
        group = self.group
        if self._selection is None or self._epoch != group.catalog_version:
            self._epoch = group.catalog_version
            numbers, names = self._over()
            old = self._selection
            if old is None or (old.numbers, tuple(old.names)) != (numbers, names or ()):
                self._selection = MessageFilter(group, numbers, names)
        assert self._selection is not None
        return self._selection

    def _over(self) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
        if self.stream is not None:
            return (self.stream.number,), ()
        over = self.state.over
        if not over:
            return None, ()
        if over in self.group.views:
            return None, (over,)
        stream = self.group.streams.get(over)
        return (stream.number,) if stream else (), ()

    def covers(self, stream: Stream) -> bool:
        """Whether messages of the stream may be for it. Dead letters are not for who made them, unless asked for."""
        if self.stream is not None:
            return self.stream is stream
        name = stream.name
        if name == self.group.settings.dead and name != self.state.over:
            return False
        return self.selection.covers(stream)

    def is_acked(self, sequence: int) -> bool:
        return self.state.progress.is_acked(sequence)

    def had_in(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """The parts of [first, last] that are dealt with."""
        progress = self.state.progress
        if first < progress.ack_floor:
            yield first, min(last, progress.ack_floor - 1)
        for begin, end in progress.acked_ranges:
            if end >= first and begin <= last:
                yield max(begin, first), min(end, last)

    @property
    def low(self) -> int:
        """Everything below is dealt with, and has arrived as far as is known."""
        low = self.state.progress.ack_floor
        return min(low, *self.unconfirmed.values()) if self.unconfirmed else low

    def matches(self, stream: Stream, record: Record) -> bool:
        """Whether the message is for this consumer, had or not."""
        if self.stream is not None:
            return not self.singles_only or self.group.ranks.is_hidden(record)
        return self.covers(stream) and self.selection.selects(stream, record) and not self._is_others(stream, record)

    def _is_others(self, stream: Stream, record: Record) -> bool:
        """Whether it is for one taker, and another has come first."""
        if not record.headers or not self.group.ranks.is_single(record.sequence):
            return False
        return stream.is_taken(record.sequence) and record.sequence not in self.singles

    def record(self, sequence: int) -> Record | None:
        """The message, if it is still there to be had."""
        try:
            record = self.group.log.reader.scan(sequence)
        except errors.Damaged:
            return None
        if record is None or record.sequence != sequence:
            return None
        stream = self.group.numbers.get(record.stream)
        return record if stream is not None and stream.kept.visible(record) else None

    # ------------------------------------------------------------ claims

    def claim_next(self, taker: ClaimingHandle, before: bytes = b"", most: int = NEVER) -> Record | None:
        """Hand a message to a handle; None: nothing for it, or it is larger than `most`. `before`: steps to be recorded
        with it."""
        picked = self.picker.next_message(taker)
        if picked is None or len(picked[0].headers) + len(picked[0].body) > most:
            if before:
                self._log(before)
            return None
        record, entry = picked
        sequence = record.sequence
        op = ACK if taker.acks_at_once else CLAIM
        steps = before + step(op, entry.first, sequence, entry.failed)
        if self.picker.gaps:
            steps = self.picker.gaps + steps
        if record.headers and (self.stream is None or self.singles_only) and self.group.ranks.is_single(sequence):
            self._take_single(record, steps)
        else:
            self._log(steps)
        self.picker.gaps = b""
        self.picker.picked(sequence, entry)
        self.counts.delivered += 1
        self.group.counts.read += 1
        if taker.acks_at_once:
            self.counts.acknowledged += 1
            taker.had = (record, entry)
            self.unconfirmed[taker] = entry.first
            long = bool(record.headers) and multipart.is_last(record)
            self._gone(record.sequence, record.stream, len(record.body), long)
        else:
            self._claimed(taker, record)
        return record

    def _take_single(self, record: Record, steps: bytes) -> None:
        if record.sequence in self.singles or self.stream is not None:
            self._log(steps)
        else:
            self.group.numbers[record.stream].claim_exclusive(record.sequence, (self.state, steps))
        self.singles.add(record.sequence)

    def give_singles_back(self) -> None:
        """It is removed: messages for one taker that it took and did not deal with are for others again."""
        for sequence in list(self.singles):
            if (record := self.record(sequence)) is not None:
                self._give_single_back(self.group.numbers[record.stream], sequence)
            self.singles.discard(sequence)

    def _give_single_back(self, stream: Stream, sequence: int, *also: AckSteps) -> None:
        others = [other for other in stream.consumers() if other is not self]
        offers = [steps for other in others if (steps := other.offer_steps(sequence)) is not None]
        stream.release_exclusive(sequence, *also, *offers)
        for other in others:
            other.picker.gaps = b""
        if self.stream is None and stream.default_consumer is not None:
            others.append(stream.default_consumer)
        for other in others:
            other.offered(sequence)

    def offer_steps(self, sequence: int) -> AckSteps | None:
        """What is to be recorded so that a message for one taker, which another had, is to be had again."""
        self.picker.reopen(sequence)
        if not self.picker.gaps and sequence in self.state.progress.in_flight:
            return None
        return self.state, self.picker.gaps + step(REQUEUE, sequence, sequence)

    def offered(self, sequence: int) -> None:
        """That was recorded."""
        if (entry := self.state.progress.in_flight.get(sequence)) is not None:
            self.make_ready(sequence, entry)
        self.serve()

    def _claimed(self, taker: ClaimingHandle, record: Record) -> None:
        claim = Claim(taker, record, self.state.progress.in_flight[record.sequence])
        self.claims[record.sequence] = taker.claims[record.sequence] = claim
        self.renew(claim)
        taker.guard(claim)

    def renew(self, claim: Claim) -> None:
        """The lease begins anew."""
        lease = self.group.settings.lease
        claim.deadline_ns = self.group.tree.clock.engine_ns() + lease if lease else 0
        if lease:
            self._set_timer(claim.deadline_ns, claim.sequence)

    def _log(self, steps: bytes) -> None:
        """Record steps, and carry them out. Raises DiskFailed, ReadOnly; then nothing of them counts."""
        self.group.log.acknowledge(self.state, steps)

    def ack_step(self, claim: Claim) -> bytes:
        return step(ACK, claim.entry.first, claim.sequence)

    def acknowledge(self, claims: Iterable[Claim]) -> None:
        """These were dealt with."""
        done = list(claims)
        self._log(b"".join(map(self.ack_step, done)))
        for claim in done:
            self.acknowledged(claim)

    def acknowledged(self, claim: Claim) -> None:
        """Its step was recorded."""
        self._end_claim(claim)
        self.counts.acknowledged += 1
        self._gone(claim.sequence, claim.stream, claim.size, claim.long)

    def _end_claim(self, claim: Claim) -> None:
        self.claims.pop(claim.sequence, None)
        claim.taker.claims.pop(claim.sequence, None)

    def _gone(self, sequence: int, number: int, size: int, long: bool = False) -> None:
        """One message less waits for this consumer, or the parts of one body."""
        if long:
            self._backlog = None
        if self._backlog is not None:
            self._backlog -= 1
        self.singles.discard(sequence)
        stream = self.group.numbers.get(number)
        if stream is not None and long:
            stream.kept.recount()
        elif stream is not None:
            stream.kept.on_acked(sequence, size)
        self.group.retention.note_change()

    def release(self, claim: Claim) -> None:
        """Back at once, not counted; what is for one taker is for anyone, as if it had never been taken."""
        stream = self.group.numbers.get(claim.stream)
        if stream is None or claim.entry.failed or claim.sequence not in self.singles:
            self._give_back(claim, claim.entry.failed, 0)
            return
        sequence = claim.sequence
        self.singles.discard(sequence)
        self._end_claim(claim)  # first: others ask whether it is taken
        try:
            self._give_single_back(stream, sequence, (self.state, step(REQUEUE, claim.entry.first, sequence)))
        except BaseException:
            self.singles.add(sequence)
            self.claims[sequence] = claim.taker.claims[sequence] = claim
            raise
        if (entry := self.state.progress.in_flight.get(sequence)) is not None:  # else another has taken it
            self.make_ready(sequence, entry)
        self.serve()

    def nack(self, claim: Claim, reason: str, delay_ns: int | None = None) -> None:
        """A delivery failed: back after that time (None: as `backoff` says), or to the dead letters."""
        failed = claim.entry.failed + 1
        self.counts.failed += 1
        settings = self.group.settings
        if settings.retries and failed >= settings.retries and self.move_to_dead(claim, reason, failed):
            return
        self._give_back(claim, failed, settings.backoff_after(failed) if delay_ns is None else delay_ns)

    def _give_back(self, claim: Claim, failed: int, delay_ns: int) -> None:
        due = self.group.tree.clock.engine_ns() + delay_ns if delay_ns else 0
        self._log(step(REQUEUE, claim.entry.first, claim.sequence, failed, due))
        self._gave_back(claim, due)

    def _gave_back(self, claim: Claim, due: int) -> None:
        self._end_claim(claim)
        self.make_ready(claim.sequence, self.state.progress.in_flight[claim.sequence])
        if not due:
            self.serve()

    def make_ready(self, sequence: int, entry: Unacked) -> None:
        """It may be handed out again, now or when it is due."""
        if entry.claimed:
            return
        if entry.due_ns > self.group.tree.clock.engine_ns():
            self._set_timer(entry.due_ns, sequence)
        elif (record := self.record(sequence)) is not None:
            self.picker.add_ready(record)

    def move_to_dead(self, claim: Claim, reason: str, failed: int) -> bool:
        """Make it a dead letter. False: it stays, for it is one, or there is no room for it."""
        group = self.group
        stream = group.numbers.get(claim.stream)
        if stream is not None and stream.name == group.settings.dead:
            return False
        record = self.record(claim.sequence)
        if record is None:
            self.acknowledge([claim])
            return True
        try:
            dead_letters.append_dead_letter(
                group, self.state, record, self.ack_step(claim), reason, failed, claim.entry.first
            )
        except (errors.MqfsError, OSError) as error:
            group.refuse(claim.taker.user, group.settings.dead, f"message {claim.sequence} was not put there: {error}")
            return False
        self.counts.dead += 1
        self._end_claim(claim)
        self._gone(claim.sequence, claim.stream, claim.size, claim.long)
        return True

    def undo_auto_ack(self, taker: ClaimingHandle) -> None:
        """What `ack read` handed over did not arrive, and its handle goes: it is claimed, as if not acknowledged."""
        had, taker.had = taker.had, None
        if had is None:
            return
        self.unconfirmed.pop(taker, None)
        record, entry = had
        self._log(step(CLAIM, entry.first, record.sequence, entry.failed))
        self.counts.acknowledged -= 1
        if self._backlog is not None:
            self._backlog += 1
        stream = self.group.numbers.get(record.stream)
        if stream is not None:
            stream.kept.recount()
        claim = Claim(taker, record, self.state.progress.in_flight[record.sequence])
        self.claims[record.sequence] = taker.claims[record.sequence] = claim

    def recover(self) -> None:
        """After a start: what was claimed then is free, counted as failed; delays go on."""
        progress = self.state.progress
        dead = self.group.settings.retries
        if self.stream is None or self.singles_only:
            had_once = (sequence for sequence, entry in progress.in_flight.items() if entry.claimed or entry.failed)
            self.singles = {sequence for sequence in had_once if self.group.ranks.is_single(sequence)}
        for sequence, entry in list(progress.in_flight.items()):
            if entry.claimed:
                entry.claimed, entry.failed, entry.due_ns = False, entry.failed + 1, 0
                if dead and entry.failed >= dead:
                    self._bury_lost(sequence, entry)
            elif entry.due_ns:
                self._set_timer(entry.due_ns, sequence)

    def _bury_lost(self, sequence: int, entry: Unacked) -> None:
        """A message whose server was killed under it once too often."""
        record = self.record(sequence)
        if record is None or self.group.numbers[record.stream].name == self.group.settings.dead:
            return
        try:
            steps = step(ACK, entry.first, sequence)
            dead_letters.append_dead_letter(
                self.group, self.state, record, steps, "the server ended", entry.failed, entry.first
            )
            self.counts.dead += 1
        except (errors.MqfsError, OSError):
            return  # it is served again

    # ------------------------------------------------------------ time

    def _set_timer(self, due_ns: int, sequence: int) -> None:
        heapq.heappush(self._timers, (due_ns, sequence))
        if len(self._timers) > 2 * len(self.state.progress.in_flight) + 64:  # most are of claims that ended long ago
            mine = self.claims
            self._timers = [(claim.deadline_ns, s) for s, claim in mine.items() if claim.deadline_ns]
            self._timers += [
                (e.due_ns, s) for s, e in self.state.progress.in_flight.items() if s not in mine and e.due_ns
            ]
            heapq.heapify(self._timers)
        self.group.consumers.set_alarm(self, due_ns)

    def wake(self, now_ns: int) -> None:
        """Leases that have run out, delays that are over, and claims whose reader has gone."""
        if self._returning:
            self._go_on_returning()
            if not self._returning:
                self._rest()
                self.on_handle_closed()
        while self._timers and self._timers[0][0] <= now_ns:
            timer = heapq.heappop(self._timers)
            try:
                self._end_timer(timer[1], now_ns)
            except BaseException:
                heapq.heappush(self._timers, timer)  # it is tried again
                raise
        if self._timers:
            self.group.consumers.set_alarm(self, self._timers[0][0])
        self.serve()

    def _end_timer(self, sequence: int, now_ns: int) -> None:
        claim = self.claims.get(sequence)
        entry = self.state.progress.in_flight.get(sequence)
        if claim is not None:
            if claim.deadline_ns and claim.deadline_ns <= now_ns:
                self.nack(claim, "the lease ran out")
        elif entry is not None and not entry.claimed and entry.due_ns <= now_ns:
            self.make_ready(sequence, entry)

    # ------------------------------------------------------------ readers that wait

    def park(self, wait: Wait[bytes], taker: ClaimingHandle) -> None:
        self.parked[wait] = taker
        self._start_waiting()
        if taker.until != NEVER:
            self.note_end(taker)

    def note_end(self, taker: ClaimingHandle) -> None:
        """Reads of it that wait end at some sequence, whatever stream takes that."""
        ends = [other.until for other in {taker, *self.parked.values()}]
        self.group.consumers.end_at(self, min(ends))

    def unpark(self, wait: Wait[bytes]) -> bool:
        if self.parked.pop(wait, None) is None:
            return False
        if not self.parked and not self.watchers:
            self.stop_waiting()
        return True

    def _start_waiting(self) -> None:
        if self not in self.crowd.waiting:
            self.crowd.waiting[self] = None
            self.group.waiting.readers += 1

    def stop_waiting(self) -> None:
        if self in self.crowd.waiting:
            del self.crowd.waiting[self]
            self.group.waiting.readers -= 1

    def serve(self) -> None:
        """Hand what there is to who waits, first come first served."""
        passed: set[ClaimingHandle] = set()
        while self.parked:
            dry = self.picker.exhausted
            if dry and not self.polling_receivers:
                break
            waits = self.parked.items()
            fit = ((w, t) for w, t in waits if t not in passed and (not dry or t in self.polling_receivers))
            wait, taker = next(fit, (None, None))
            if wait is None or taker is None:
                break
            try:
                data = taker.next_data(wait)
            except errors.MqfsError as error:
                self.unpark(wait)
                taker.answer(wait, error)
                continue
            if data is None:
                passed.add(taker)
                continue
            self.unpark(wait)
            taker.answer(wait, data)
        self._wake_watchers()

    def watch(self, taker: ClaimingHandle, then: Callable[[], None] | None) -> None:
        """Call `then` once when there may be something for the handle; None: no more."""
        if then is None:
            self.watchers.pop(taker, None)
        else:
            self.watchers[taker] = then
            self._start_waiting()

    def _wake_watchers(self) -> None:
        if not self.watchers:
            return
        watchers, self.watchers = self.watchers, {}
        if not self.parked:
            self.stop_waiting()
        for then in watchers.values():
            then()

    def end(self) -> None:
        """It is gone, or the server stops: who waits gets end-of-file."""
        for wait, taker in list(self.parked.items()):
            self.unpark(wait)
            taker.answer(wait, b"")
        self._wake_watchers()

    def opened(self, taker: ClaimingHandle) -> None:
        self.receivers.add(taker)
        self.group.retention.apply_depth_after_recovery()

    def closed(self, taker: ClaimingHandle) -> None:
        """A handle goes: what it has goes back to the head."""
        self.receivers.discard(taker)
        self.polling_receivers.discard(taker)
        self.unconfirmed.pop(taker, None)
        self.nack_all(list(taker.claims.values()), "its reader ended")
        self._rest()
        self.on_handle_closed()

    def _rest(self) -> None:
        if not self.receivers and not self.claims:
            self.picker.release_cache()

    def on_handle_closed(self) -> None:
        """One handle less."""
        if self._returning:
            return
        if self.state.transient and not self.opens and not self.removed and not self.group.tree.closing:
            self.group.consumers.remove(self)

    def nack_all(self, claims: Iterable[Claim], reason: str) -> None:
        """Their reader has gone: each delivery failed, but where the server stops. What takes long goes on later; until
        then they are claimed."""
        self._returning.append((iter(claims), reason))
        self._go_on_returning()

    def _go_on_returning(self) -> None:
        clock, returning = self.group.tree.clock, self._returning
        until = clock.engine_ns() + int(limits.SLICE_S * 1e9)
        while returning:
            claims, reason = returning[0]
            some = list(islice(claims, _RETURNED_AT_ONCE))
            if len(some) < _RETURNED_AT_ONCE:
                returning.popleft()
            self._return([claim for claim in some if self.claims.get(claim.sequence) is claim], reason)
            if returning and clock.engine_ns() >= until and not self.group.tree.closing:
                self.group.consumers.set_alarm(self, clock.engine_ns() + 1)
                return

    def _return(self, claims: list[Claim], reason: str) -> None:
        """By one record; what becomes a dead letter, or is for one taker, by its own."""
        try:
            if self.removed or self.group.removed:
                raise errors.NotFound(f"{self.name} was removed")
            counted, retries = not self.group.tree.closing, self.group.settings.retries
            plain: list[Claim] = []
            for claim in claims:
                if not counted and claim.sequence in self.singles:
                    self.release(claim)
                elif counted and retries and claim.entry.failed + 1 >= retries:
                    self.nack(claim, reason, 0)
                else:
                    plain.append(claim)
            steps = [step(REQUEUE, c.entry.first, c.sequence, c.entry.failed + counted) for c in plain]
            if steps:
                self._log(b"".join(steps))
        except errors.MqfsError:
            for claim in claims:
                self._end_claim(claim)  # not recorded: after the next start it is free as well
            return
        self.counts.failed += len(plain) if counted else 0
        for claim in plain:
            self._end_claim(claim)
            self.picker.back(claim.sequence, claim.stream)
        self.serve()

    def appended(self) -> None:
        """A message was appended that it covers."""
        if self._backlog is not None:
            self._backlog += 1

    # ------------------------------------------------------------ position and count

    def seek(self, position: int) -> None:
        """Everything below is dealt with, nothing above: also what is claimed."""
        self._log(step(SEEK, position, position))
        for claim in list(self.claims.values()):
            self._end_claim(claim)
        self.picker.move(position)
        self._timers, self._backlog = [], None
        for taker in self.receivers:
            taker.scanned_to = 0
        for stream in self._streams():
            stream.kept.recount()
        self.group.retention.note_change()
        self.group.unblock()
        self.serve()

    def _streams(self) -> list[Stream]:
        if self.stream is not None:
            return [self.stream]
        return [stream for stream in self.group.numbers.values() if self.covers(stream)]

    def waiting(self, position: int = 0) -> Iterator[Record]:
        """What is neither acknowledged nor claimed, due or not, from that sequence on, oldest first."""
        position = max(position, self.low)
        spans = [(claim.entry.first, claim.sequence) for claim in self.claims.values() if claim.long]
        while True:
            try:
                record = self.selection.find(position)
            except errors.Damaged as error:
                position = error.sequence + 1
                continue
            if record is None:
                return
            position = record.sequence + 1
            if spans and any(first <= record.sequence <= last for first, last in spans):
                continue  # a part of a body that is claimed
            if record.sequence not in self.claims and self.wants(record):
                yield record

    def wants(self, record: Record) -> bool:
        """Whether the message is for this consumer, and was not dealt with."""
        stream = self.group.numbers.get(record.stream)
        return (
            stream is not None
            and record.kind == MESSAGE
            and not self.is_acked(record.sequence)
            and stream.kept.visible(record)
            and self.matches(stream, record)
        )

    def count(self) -> int:
        """Messages that are not acknowledged (what a program in a view leaves out counts, too)."""
        low, last = self.state.progress.ack_floor, self.group.log.end.next
        if low >= last:
            return 0
        total = 0
        for stream in self._streams():
            stream.kept.update_low_watermark()
            begin = max(stream.state.floor, low)
            total += stream.kept.messages(begin)
            total -= sum(stream.kept.messages(first, end + 1) for first, end in self.had_in(begin, last))
        return total

    def waiting_now(self, counts: dict[object, int]) -> tuple[int, int]:
        """(messages neither acknowledged nor claimed, those of them that are not due). `counts`: what was counted for
        others at the same moment, for many are at one place."""
        progress = self.state.progress
        place = self.stream, self.state.over, progress.ack_floor, tuple(progress.acked_ranges)
        if place not in counts:
            counts[place] = self.count()
        now = self.group.tree.clock.engine_ns()
        claimed = sum(self.record(sequence) is not None for sequence in self.claims)
        entries = self.state.progress.in_flight.items()
        later = (s for s, entry in entries if not entry.claimed and entry.due_ns > now)
        return counts[place] - claimed, sum(self.record(sequence) is not None for sequence in later)

    def backlog(self) -> int:
        """As `count`, kept up to date."""
        if self._backlog is None:
            self._backlog = self.count()
        return self._backlog

    def exceeds_backlog(self, messages: int) -> bool:
        """Whether so many more would exceed its own bound."""
        most = self.state.backlog
        if not most or self.backlog() + messages <= most:
            return False
        self._backlog = None  # what expired or was cut since does not count
        return self.backlog() + messages > most

    def recount(self) -> None:
        """Other streams than before may be covered, or other messages be kept."""
        self._backlog = None

    def skip_oldest(self) -> bool:
        """Its own bound is exceeded: the oldest message that waits is given up. False: all are claimed."""
        record = next(self.waiting(), None)
        if record is None:
            return False
        self.skip(record)
        return True

    def skip(self, record: Record) -> None:
        """That message is not for this consumer, nor is the rest of its body."""
        last = multipart.last_of(self.group.log, record) or record
        entry = self.state.progress.in_flight.get(last.sequence)
        first = entry.first if entry else multipart.first_of(self.group.log, last)
        self._log(step(ACK, first, last.sequence))
        self._gone(last.sequence, last.stream, len(last.body), first < last.sequence)


class Taken:
    """The nameless consumer of a stream under `deliver all`, to those who ask what may go: only what is for one taker,
    was taken through it and is not dealt with may not."""

    low = 0

    def __init__(self, singles: set[int]) -> None:
        self.exclusives = singles

    def is_acked(self, sequence: int) -> bool:
        return sequence not in self.exclusives

    def had_in(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        for sequence in sorted(self.exclusives):
            if sequence > last:
                break
            if first < sequence:
                yield first, sequence - 1
            first = max(first, sequence + 1)
        if first <= last:
            yield first, last


class NeverConsumed:
    """The nameless consumer of a stream of which nothing was ever taken: not worth an object each."""

    low = 0

    def is_acked(self, sequence: int) -> bool:
        return False

    def had_in(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        return iter(())


UNTOUCHED = NeverConsumed()


def delivery_count(entry: Unacked) -> int:
    """How often a message was handed out, this time included."""
    return entry.failed + 1
