"""A consumer: a durable position in a group's log, whose messages its receivers share, each message to one of them.

This module claims and acks, and records both in the log; other modules of the package do the rest. The same class
serves the named consumers of `.consumers` and the default consumer that each stream has under `deliver one`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import attrs

from mqfs import errors
from mqfs.engine.core import multipart
from mqfs.engine.core.timers import AGAIN_NS, CONSUMERS, Alarm
from mqfs.engine.delivery import dispatcher
from mqfs.engine.delivery.backlog import Backlog
from mqfs.engine.delivery.dispatcher import Dispatcher
from mqfs.engine.delivery.exclusive_messages import ExclusiveClaims
from mqfs.engine.delivery.flow import Flow
from mqfs.engine.delivery.redelivery import Deadlines, Redelivery
from mqfs.engine.delivery.waiting import ParkedReads
from mqfs.engine.language.permissions import Numbered
from mqfs.engine.routing import MessageFilter
from mqfs.model import NEVER, Kind, Record, RecordRun
from mqfs.records.record import heads
from mqfs.state.acks import ACK, CLAIM, SEEK, AckState, State, Unacked
from mqfs.state.group import Attributes, ConsumerState
from mqfs.state.rules import NO_RULES, print_rules
from mqfs.syntax.lines import quote

if TYPE_CHECKING:
    from mqfs.engine.files.claiming import ClaimingHandle
    from mqfs.engine.group import Group
    from mqfs.engine.stream import Stream

KEPT_BYTES = 4_096  # a larger body is not kept for an undo
Candidate = tuple[int, int, int]  # a message to be claimed: sequence, stream, bytes of its body


@attrs.define
class ConsumerCounts:
    """Counters of a consumer since the server started, shown in `.stats`."""

    delivered: int = 0
    acknowledged: int = 0
    failed: int = 0  # failed deliveries
    dead: int = 0  # messages that became dead letters


class Claim:
    """A message that a receiver claimed and has not acked."""

    __slots__ = ("deadline_ns", "deliveries", "entry", "is_multipart", "pid", "receiver", "sequence", "size", "stream")

    def __init__(
        self, receiver: ClaimingHandle, sequence: int, stream: int, size: int, entry: Unacked, is_multipart: bool
    ) -> None:
        self.receiver, self.entry = receiver, entry
        self.deliveries = entry.failed + 1
        self.sequence, self.stream, self.size, self.is_multipart = sequence, stream, size, is_multipart
        self.pid = receiver.claiming_pid
        self.deadline_ns = 0  # engine time; 0: no lease

    def remove(self) -> None:
        """Remove an ended claim from its consumer and its receiver."""
        consumer = self.receiver.consumer
        consumer.claims.pop(self.sequence, None)
        self.receiver.claims.pop(self.sequence, None)
        if self.sequence < consumer.backlog.cut_from:
            consumer.backlog.cut_from = self.sequence  # its message may be the oldest unclaimed one again
        if consumer.flow is not None:
            consumer.dispatcher.on_settled(self.sequence)


class Consumer(Numbered):
    """A durable position in a group's log, made and removed by its registry. `stream`: the stream whose default
    consumer it is; None for a named consumer."""

    def __init__(self, group: Group, own: ConsumerState, stream: Stream | None = None) -> None:
        self.group, self._log = group, group.log
        self.state: ConsumerState = own
        self.progress: AckState = own.progress
        self.removed = False
        self.opens = 0  # open handles, including those that only peek
        self.removal_due = False  # transient, its last handle closed, and the log refused its removal
        self.receivers: set[ClaimingHandle] = set()
        self.had_receiver = False  # since it was made: only then may a transient one be removed
        self.unconfirmed: dict[ClaimingHandle, tuple[Record, int, int, int]] = {}  # `ack read`: the last delivery
        self.undo_due: list[ClaimingHandle] = []  # `ack read`: receivers that closed unread while the disk was full
        self.counts = ConsumerCounts()
        self.held_exclusives: set[int] = set()  # exclusive messages claimed here first, not acked
        self.coverage: Coverage = Coverage(self, stream)
        what = f"ending leases and delays of {self.name}"
        self.alarm: Alarm = Alarm(group.timers, group, CONSUMERS, what, self._on_alarm)
        self.claims: dict[int, Claim] = {}  # by sequence
        self.deadlines: Deadlines = Deadlines(self)
        self.dispatcher: Dispatcher = Dispatcher(self)
        self.reads: ParkedReads = ParkedReads(own.number, group.waiting, self.dispatcher, group.consumers.read_ends)
        self.dispatcher.on_looked = self.reads.serve
        self.exclusives = ExclusiveClaims(self)
        self.backlog = Backlog(self)
        self.redelivery = Redelivery(self)
        self.flow: Flow | None = None  # None: no rules
        self._rules = NO_RULES  # rules in force
        self.on_deliver_changed()
        self.on_rules_changed()

    def _on_alarm(self, now_ns: int) -> None:
        if not self.removed:
            self._retry_undo()
            self.redelivery.on_timer(now_ns)

    def end(self) -> None:
        """End the parked reads of a removed consumer with end-of-file, and cancel its alarm."""
        self.removed = True
        self.alarm.cancel()
        self.reads.close()

    def on_deliver_changed(self) -> None:
        self.coverage.exclusives_only = self.coverage.stream is not None and self._log.settings.deliver == "all"

    def on_rules_changed(self) -> None:
        """Apply the rules of the state: new, changed or removed ones."""
        before, rules = self._rules, self.state.rules
        if rules is before or rules == before:
            return
        self._rules = rules
        flow = self.flow or Flow(self)
        flow.on_rules_changed()
        self.flow = self.dispatcher.flow = flow if rules != NO_RULES else None
        if (rules.ordered, rules.per_key) != (before.ordered, before.per_key):
            self.dispatcher.search_again()
        self.reads.serve()

    # ------------------------------------------------------------ as a file

    def _line(self) -> str:
        """Return the consumer as a line of `ctl`, without the lines of its rules."""
        own = self.state
        words = ["consumer", quote(own.name)]
        words += [quote(own.over)] if own.over else []
        words += ["transient"] * own.transient + ["private"] * own.private + ["memory"] * own.memory
        words += ["backlog", str(own.backlog)] if own.backlog else []
        words += ["full", own.full] if own.full else []
        words += ["order", "key"] if own.rules.ordered else []
        return " ".join(words)

    def lines(self) -> list[str]:
        """Return lines of `ctl`: the consumer's own, and one for each of its rules."""
        if self.flow is None:
            return [self._line()]
        rules = print_rules(self.state.rules, self.group.clock.engine_ns())
        return [self._line(), *(f"{verb} {quote(self.state.name)} {value}".rstrip() for verb, value in rules)]

    @property
    def name(self) -> str:
        stream = self.coverage.stream
        return self.state.name or (stream.name if stream is not None else "")

    @property
    def number(self) -> int:
        return self.state.number

    @property
    def attributes(self) -> Attributes:
        return self.state

    # ------------------------------------------------------------ to retention

    @property
    def low(self) -> int:
        """The sequence below which every message is acked and, as far as is known, reached its receiver."""
        low = self.progress.ack_floor
        return min(low, *(first for _, first, _, _ in self.unconfirmed.values())) if self.unconfirmed else low

    def is_acked(self, sequence: int) -> bool:
        return self.progress.is_acked(sequence)

    def acked_in(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of [first, last] that are acked."""
        return self.progress.acked_in(first, last)

    # ------------------------------------------------------------ claim and ack

    def claim_next(self, receiver: ClaimingHandle, most: int = NEVER, done: Claim | None = None) -> Record | None:
        """Claim the next message for a receiver and return it; None: no message, or it has more than `most` bytes of
        headers and body. `done`: a claim to ack with the same record of the log, also if no message is claimed. Raises
        Damaged, DiskFailed, ReadOnly; then nothing has changed."""
        steps = self.progress.step(ACK, done.entry.first, done.sequence) if done is not None else b""
        found = self.dispatcher.next_message(receiver)
        if found is not None and len(found[0].headers) + len(found[0].body) > most:
            found = None
        if found is None:
            if steps:
                self._log.acknowledge(self.state, steps)
        else:
            self._claim(receiver, found, steps)
        if done is not None:
            self.ack((done,), recorded=True)
        return found[0] if found is not None else None

    def _claim(self, receiver: ClaimingHandle, found: dispatcher.Next, steps: bytes) -> None:
        record, first, failed = found
        sequence, auto_ack = record.sequence, receiver.auto_ack
        if self.dispatcher.gaps:
            steps = self.dispatcher.gap_steps(sequence) + steps
        if self.dispatcher.slots.firsts:
            steps = self.dispatcher.divide(sequence) + steps
        steps += self.progress.step(ACK if auto_ack else CLAIM, first, sequence, failed)
        if record.headers and self._is_exclusive(sequence):
            self.exclusives.claim(record, steps)
        else:
            self._log.acknowledge(self.state, steps)
        self.dispatcher.on_claimed(sequence, first)
        if self.flow is not None:
            self.dispatcher.on_delivered(record)
        is_multipart = bool(record.headers) and multipart.is_last(record)
        if auto_ack:
            self.counts.delivered += 1
            self.group.counts.read += 1
            self.counts.acknowledged += 1
            size = len(record.body)
            kept = record if size <= KEPT_BYTES else record._replace(body=b"")
            self.unconfirmed[receiver] = kept, first, failed, size
            if self.flow is not None:
                self.dispatcher.on_settled(sequence)
            self.backlog.on_acked(sequence, record.stream, len(record.body), is_multipart)
        else:
            self._hand_over(receiver, ((sequence, record.stream, len(record.body)),), is_multipart)

    def claim_behind(
        self, receiver: ClaimingHandle, record: Record, messages: int, size: int, each: int = 0
    ) -> list[Record]:
        """Claim and return up to `messages` ordinary messages after `record`, just claimed, with one record of the log.
        They have at most `size` bytes: headers, bodies and `each` bytes per message. Raises DiskFailed, ReadOnly; then
        nothing has changed."""
        begin = record.sequence + 1
        if self.flow is not None:
            messages = min(messages, self.flow.room())
        found = [] if receiver.auto_ack else self.dispatcher.run_from(begin, receiver, messages, size, each)
        if found:
            self._claim_all(receiver, begin, [(one.sequence, one.stream, len(one.body)) for one in found])
            if self.flow is not None:
                for one in found:
                    self.dispatcher.on_delivered(one)
        return found

    def claim_run(
        self, receiver: ClaimingHandle, after: int, messages: int, size: int
    ) -> tuple[RecordRun, list[int]] | None:
        """As `claim_behind`, but return (records as stored, at most `size` bytes of them; their sequences). None: the
        caller must use `claim_behind`."""
        if self.flow is not None:
            messages = min(messages, self.flow.room())
        is_run = messages > 0 and not receiver.auto_ack
        run = self.dispatcher.read_run(after + 1, receiver, messages, size) if is_run else None
        rows = [row for piece in run.pieces for row in heads(piece)] if run is not None else []
        if not rows or any(kind != Kind.MESSAGE or sequence in self.progress.unacked for sequence, _, kind, _ in rows):
            return None
        self._claim_all(receiver, after + 1, [(sequence, stream, body) for sequence, stream, _, body in rows])
        assert run is not None
        if self.flow is not None:
            self.flow.on_delivered(len(rows))
        return run, [row[0] for row in rows]

    def _claim_all(self, receiver: ClaimingHandle, begin: int, rows: Sequence[Candidate]) -> None:
        """Claim messages that the search found from `begin` on, with one record of the log."""
        lasts = [sequence for sequence, _, _ in rows]
        firsts = [begin, *(last + 1 for last in lasts[:-1])]
        steps = self.progress.steps(CLAIM, firsts, lasts)
        self._log.acknowledge(self.state, self.dispatcher.gap_steps(lasts[-1]) + steps)
        self.dispatcher.on_claimed(lasts[-1], begin)
        self._hand_over(receiver, rows)

    def _hand_over(self, receiver: ClaimingHandle, rows: Sequence[Candidate], is_multipart: bool = False) -> None:
        """Create a receiver's claims on messages; the log has their record already."""
        self.counts.delivered += len(rows)
        self.group.counts.read += len(rows)
        lease_ns, unacked = self._log.settings.lease, self.progress.unacked
        for sequence, stream, size in rows:
            claim = Claim(receiver, sequence, stream, size, unacked[sequence], is_multipart)
            self.claims[sequence] = receiver.claims[sequence] = claim
            if lease_ns:
                self.deadlines.renew(claim, lease_ns)
            if claim.pid:
                receiver.guard(claim)

    def _is_exclusive(self, sequence: int) -> bool:
        coverage = self.coverage
        return (coverage.stream is None or coverage.exclusives_only) and self.group.ranks.is_exclusive(sequence)

    def ack(self, claims: Sequence[Claim], recorded: bool = False) -> None:
        """Ack claims. `recorded`: the log has the ack already. Raises DiskFailed, ReadOnly; then none is acked."""
        if not recorded:
            if len(claims) == 1:
                steps = self.progress.step(ACK, claims[0].entry.first, claims[0].sequence)
            else:
                lasts = [claim.sequence for claim in claims]
                steps = self.progress.steps(ACK, [claim.entry.first for claim in claims], lasts)
            if self.state.memory and not self.held_exclusives.isdisjoint(claim.sequence for claim in claims):
                self._log.acknowledge_all([(self.state, steps)])  # so that a restart offers them to no other consumer
            else:
                self._log.acknowledge(self.state, steps)
        self.counts.acknowledged += len(claims)
        for claim in claims:
            self.claims.pop(claim.sequence, None)
            claim.receiver.claims.pop(claim.sequence, None)
            self.backlog.on_acked(claim.sequence, claim.stream, claim.size, claim.is_multipart)
        if self.flow is not None:
            for claim in claims:
                self.dispatcher.on_settled(claim.sequence)
            if not recorded:  # with `recorded` the receiver gets its next message first
                self.reads.serve()

    def undo_auto_ack(self, receiver: ClaimingHandle) -> None:
        """Claim again the message that a receiver got under `ack read` and lost unread. On a full disk retry in a
        second: a close never fails because of it."""
        record, first, failed, size = self.unconfirmed[receiver]
        steps = self.progress.step(CLAIM, first, record.sequence, failed, state=State.UNCONFIRMED)
        try:
            self._log.acknowledge(self.state, steps)
        except errors.MqfsError as error:
            self.group.faults.report(self.group.number, f"message {record.sequence} stays acked unread: {error}")
            if self._log.end.failed is None and not self.removed:
                self.undo_due.append(receiver)
                self.alarm.at(self.group.clock.engine_ns() + AGAIN_NS)
            return
        del self.unconfirmed[receiver]
        self.counts.acknowledged -= 1
        self.backlog.on_appended()
        if (stream := self.group.numbers.get(record.stream)) is not None:
            stream.kept.recount()
        is_multipart = bool(record.headers) and multipart.is_last(record)
        entry = self.progress.unacked[record.sequence]
        claim = Claim(receiver, record.sequence, record.stream, size, entry, is_multipart)
        self.claims[claim.sequence] = receiver.claims[claim.sequence] = claim
        if self.flow is not None:
            self.dispatcher.on_delivered(record)

    def _retry_undo(self) -> None:
        """Retry the undo for receivers that closed while the disk was full, and nack their claims."""
        due, self.undo_due = self.undo_due, []
        for receiver in due:
            self.undo_auto_ack(receiver)
            self.redelivery.nack_all(list(receiver.claims.values()), "its reader ended")

    def skip(self, record: Record) -> None:
        """Ack a message unread, together with all parts of its body."""
        last = multipart.last_of(self._log, record) or record
        entry = self.progress.unacked.get(last.sequence)
        first = entry.first if entry else multipart.first_of(self._log, last)
        steps = self.progress.step(ACK, first, last.sequence)
        if last.sequence in self.held_exclusives:  # claimed here first: no other consumer received it
            self.exclusives.offer(self.group.numbers[last.stream], last.sequence, (self.state, steps))
        else:
            self._log.acknowledge(self.state, steps)
        self.backlog.on_acked(last.sequence, last.stream, len(last.body), first < last.sequence)
        if self.flow is not None:
            self.dispatcher.on_settled(last.sequence)

    def on_dead(self) -> None:
        """Count a dead letter. After too many within its time the breaker pauses the consumer."""
        self.counts.dead += 1
        if self.flow is not None:
            if self.flow.is_broken():
                self.group.consumers.trip(self)
            self.reads.serve()

    def seek(self, position: int) -> None:
        """Ack all messages below `position` and none from there on. Claims end, and held exclusive messages are offered
        to every consumer. Raises DiskFailed, ReadOnly."""
        try:
            self.exclusives.offer_all()
            self._log.acknowledge(self.state, self.progress.step(SEEK, position, position))
            for claim in list(self.claims.values()):
                claim.remove()
            self.deadlines.clear()
            self.dispatcher.search_again()
            self.backlog.recount()
            for stream in self.backlog.streams():
                stream.kept.recount()
            self.group.retention.note_change()
        finally:
            self.exclusives.serve_others()
            self.reads.serve()  # before blocked writers continue: retained messages come before theirs
            self.group.unblock()

    # ------------------------------------------------------------ receivers

    def closed(self, receiver: ClaimingHandle) -> None:
        """Detach a closed receiver and nack its claims."""
        self.receivers.discard(receiver)
        self.reads.polling.discard(receiver)
        if receiver not in self.undo_due:
            self.unconfirmed.pop(receiver, None)
        self.redelivery.nack_all(list(receiver.claims.values()), "its reader ended")
        self.on_handle_closed()

    def on_handle_closed(self) -> None:
        """Remove a transient consumer without open handles, unless only peeking handles have opened it so far."""
        if not self.receivers and not self.claims:
            self.dispatcher.release_cache()
        group = self.group
        if self.redelivery.has_returned or self.opens or self.removed or group.removed or group.tree.closing:
            return
        if self.state.transient and self.had_receiver:
            self._remove_transient()

    def _remove_transient(self) -> None:
        """Remove a transient consumer, or retry in a second. A close never fails because of it. On a full disk the
        consumer retains messages until then."""
        try:
            self.group.consumers.remove(self)
        except errors.MqfsError as error:
            self.group.faults.report(self.group.number, f"consumer {self.name} was not removed: {error}")
            if self._log.end.failed is None:
                self.removal_due = True
                self.alarm.at(self.group.clock.engine_ns() + AGAIN_NS)


# ------------------------------------------------------------ coverage


class Coverage:
    """Which messages of a group are for a consumer, whatever its position: those of its stream, view or group.

    `stream`: the stream whose default consumer it is; None for a named consumer, which has `state.over`.
    """

    __slots__ = ("_filter", "_filter_version", "_group", "_held", "_own", "_ranks", "exclusives_only", "stream")

    def __init__(self, owner: Consumer, stream: Stream | None) -> None:
        self._group, self._ranks, self._own, self.stream = owner.group, owner.group.ranks, owner.state, stream
        self._held = owner.held_exclusives
        self.exclusives_only = False  # true for a default consumer under `deliver all`
        self._filter: MessageFilter | None = None
        self._filter_version = -1

    @property
    def filter(self) -> MessageFilter:
        """The filter that finds the consumer's messages in the log, and some that `matches` excludes."""
        group = self._group
        if self._filter is None or self._filter_version != group.catalog_version:
            self._filter_version = group.catalog_version
            numbers, names = self._over()
            old = self._filter
            if old is None or (old.numbers, tuple(old.names)) != (numbers, names):
                self._filter = MessageFilter(group, numbers, names)
        assert self._filter is not None
        return self._filter

    def _over(self) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
        """Return (numbers of streams, names of views) that it is over; numbers None: all streams, or those of the
        views."""
        if self.stream is not None:
            return (self.stream.number,), ()
        over = self._own.over
        if not over:
            return None, ()
        if over in self._group.views:
            return None, (over,)
        stream = self._group.streams.get(over)
        return (stream.number,) if stream else (), ()

    def covers(self, stream: Stream) -> bool:
        """Whether messages of the stream may be for the consumer. Dead letters are only for a consumer over their
        stream."""
        if self.stream is not None:
            return stream is self.stream
        name, over = stream.state.name, self._own.over
        if name == self._group.log.settings.dead and name != over:
            return False
        return not over or self.filter.covers(stream)

    def matches(self, stream: Stream, record: Record) -> bool:
        """Whether the message is for this consumer, acked or not. An exclusive message belongs to the first consumer
        that claims it, even after its stream leaves that consumer's view."""
        if self.exclusives_only:
            return self._ranks.is_hidden(record)
        if self.stream is not None or record.sequence in self._held:
            return True
        if self._own.over:
            if not (self.covers(stream) and self.filter.selects(stream, record)):
                return False
        elif stream.state.name == self._group.log.settings.dead:
            return False
        if not record.headers or not self._ranks.is_exclusive(record.sequence):
            return True
        return not stream.exclusives.is_taken(record.sequence)
