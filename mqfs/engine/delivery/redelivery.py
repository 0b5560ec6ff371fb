"""Redelivery: what becomes of a claim that is not acked.

It is released, nacked, its lease runs out, or its receiver goes; then the message is requeued, or is made a dead
letter. The table is ack_state.LIFE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from mqfs import errors
from mqfs.ack_state import ACK, REQUEUE, Unacked, step
from mqfs.engine.delivery.backlog import Backlog
from mqfs.engine.delivery.catalog import visible_record
from mqfs.engine.delivery.claims import Claims, Counts, InFlight
from mqfs.engine.delivery.coverage import Coverage
from mqfs.engine.delivery.dead_letters import Letters, append_dead_letter
from mqfs.engine.delivery.dispatcher import Dispatcher
from mqfs.engine.delivery.exclusive_claims import ExclusiveClaims, SharedStreams
from mqfs.engine.delivery.parked_reads import ParkedReads
from mqfs.engine.delivery.returned_claims import ReturnedClaims
from mqfs.group_state import ConsumerState
from mqfs.model import User


class Tree(Protocol):
    closing: bool  # the server stops


class RedeliveringGroup(Letters, SharedStreams, Protocol):
    """The group."""

    removed: bool

    @property
    def tree(self) -> Tree: ...

    def refuse(self, user: User, file: str, text: str) -> None:
        """Show in `.errors` why a write was refused."""
        ...


class Owner(Protocol):
    """The consumer."""

    state: ConsumerState
    removed: bool
    removal_due: bool
    counts: Counts
    held_exclusives: set[int]
    coverage: Coverage
    claims: Claims
    dispatcher: Dispatcher
    reads: ParkedReads
    exclusives: ExclusiveClaims
    backlog: Backlog

    def on_handle_closed(self) -> None: ...


class Redelivery:
    """Of one consumer. Calls that record raise DiskFailed and ReadOnly; then nothing has changed."""

    __slots__ = ("_claims", "_dispatcher", "_group", "_in_flight", "_log", "_owner", "_returned")

    def __init__(self, group: RedeliveringGroup, owner: Owner, set_alarm: Callable[[int], None]) -> None:
        self._group, self._log, self._owner = group, group.log, owner
        self._claims, self._dispatcher = owner.claims, owner.dispatcher
        self._in_flight = owner.state.progress.in_flight
        self._returned = ReturnedClaims(owner.claims, group.clock, set_alarm, self._requeue_returned)

    def release(self, claim: InFlight) -> None:
        """Requeue at once, not counted as failed. An exclusive message is then for any consumer again."""
        owner, sequence = self._owner, claim.sequence
        stream, held = self._group.numbers.get(claim.stream), owner.held_exclusives
        if stream is None or claim.entry.failed or sequence not in held:
            self._requeue(claim, claim.entry.failed, 0)
            return
        held.discard(sequence)
        self._claims.remove(claim)  # first: others ask whether it is taken
        try:
            owner.exclusives.offer(stream, sequence, (owner.state, step(REQUEUE, claim.entry.first, sequence)))
        except BaseException:
            held.add(sequence)
            self._claims.restore(claim)
            raise
        if (entry := self._in_flight.get(sequence)) is not None:  # else another consumer has claimed it
            self._dispatcher.make_ready(sequence, entry)
        owner.reads.serve()

    def nack(self, claim: InFlight, reason: str, delay_ns: int | None = None) -> None:
        """A delivery failed: requeue after that time (None: as `backoff` says), or make it a dead letter."""
        settings, failed = self._log.settings, claim.deliveries
        self._owner.counts.failed += 1
        if settings.retries and failed >= settings.retries and self.move_to_dead(claim, reason):
            return
        self._requeue(claim, failed, settings.backoff_after(failed) if delay_ns is None else delay_ns)

    def _requeue(self, claim: InFlight, failed: int, delay_ns: int) -> None:
        due_ns = self._group.clock.engine_ns() + delay_ns if delay_ns else 0
        steps = step(REQUEUE, claim.entry.first, claim.sequence, failed, due_ns)
        self._log.acknowledge(self._owner.state, steps)
        self._claims.remove(claim)
        self._dispatcher.make_ready(claim.sequence, self._in_flight[claim.sequence])
        if not due_ns:
            self._owner.reads.serve()

    # ------------------------------------------------------------ dead letters

    def move_to_dead(self, claim: InFlight, reason: str) -> bool:
        """Make it a dead letter. False: it stays, for it is one, or there is no room for it."""
        group, owner = self._group, self._owner
        stream = group.numbers.get(claim.stream)
        if stream is not None and stream.name == self._log.settings.dead:
            return False
        record = visible_record(group, claim.sequence)
        if record is None:
            self._log.acknowledge(owner.state, step(ACK, claim.entry.first, claim.sequence))
            owner.counts.acknowledged += 1
        else:
            try:
                append_dead_letter(group, owner.state, record, claim.entry.first, claim.deliveries, reason)
            except (errors.MqfsError, OSError) as error:
                text = f"message {claim.sequence} was not put there: {error}"
                group.refuse(claim.receiver.user, self._log.settings.dead, text)
                return False
            owner.counts.dead += 1
        self._claims.remove(claim)
        owner.backlog.on_acked(claim.sequence, claim.stream, claim.size, claim.is_multipart)
        return True

    # ------------------------------------------------------------ receivers that are gone

    def nack_all(self, claims: Iterable[InFlight], reason: str) -> None:
        """Requeue the claims of a receiver that is gone; where the server stops their deliveries are not counted as
        failed. Where there are many the rest stays in flight until the next alarm."""
        self._returned.add(claims, reason, self._group.tree.closing)

    @property
    def has_returned(self) -> bool:
        """Whether claims of receivers that are gone are still in flight."""
        return bool(self._returned)

    def _requeue_returned(self, claims: list[InFlight], reason: str) -> None:
        """By one record; each dead letter and each exclusive message by its own."""
        owner, settings = self._owner, self._log.settings
        plain: list[InFlight] = []
        try:
            if owner.removed or self._group.removed:
                raise errors.NotFound(f"consumer {owner.state.name!r} was removed")
            counted = not self._group.tree.closing
            for claim in claims:
                if not counted and claim.sequence in owner.held_exclusives:
                    self.release(claim)
                elif counted and settings.retries and claim.deliveries >= settings.retries:
                    self.nack(claim, reason, 0)
                else:
                    plain.append(claim)
            steps = [step(REQUEUE, c.entry.first, c.sequence, c.entry.failed + counted) for c in plain]
            if steps:
                self._log.acknowledge(owner.state, b"".join(steps))
        except errors.MqfsError:
            for claim in claims:
                self._claims.remove(claim)  # not recorded: the next start requeues it
            return
        owner.counts.failed += len(plain) if counted else 0
        for claim in plain:
            self._claims.remove(claim)
            self._dispatcher.add_requeued(claim.sequence, claim.stream)
        owner.reads.serve()

    # ------------------------------------------------------------ time, and the start

    def on_timer(self, now_ns: int) -> None:
        """Nack claims whose lease ran out, deliver messages whose delay is over, requeue returned claims."""
        if self._returned or self._owner.removal_due:
            self._returned.resume(self._group.tree.closing)
            self._owner.on_handle_closed()
        self._claims.run_timers(now_ns, self._end_timer)
        self._owner.reads.serve()

    def _end_timer(self, sequence: int, now_ns: int) -> None:
        claim, entry = self._claims.by_sequence.get(sequence), self._in_flight.get(sequence)
        if claim is not None:
            if claim.deadline_ns and claim.deadline_ns <= now_ns:
                self.nack(claim, "the lease ran out")
        elif entry is not None and not entry.claimed and entry.due_ns <= now_ns:
            self._dispatcher.make_ready(sequence, entry)

    def recover(self) -> None:
        """After a start: claims of before are requeued and counted as failed; delays continue."""
        owner, retries = self._owner, self._log.settings.retries
        if owner.coverage.stream is None or owner.coverage.exclusives_only:
            claimed = (s for s, entry in self._in_flight.items() if entry.claimed or entry.failed)
            owner.held_exclusives.update(s for s in claimed if self._group.ranks.is_exclusive(s))
        for sequence, entry in list(self._in_flight.items()):
            if entry.claimed:
                entry.claimed, entry.failed, entry.due_ns = False, entry.failed + 1, 0
                if retries and entry.failed >= retries:
                    self._bury_lost(sequence, entry)
            elif entry.due_ns:
                self._claims.set_timer(entry.due_ns, sequence)

    def _bury_lost(self, sequence: int, entry: Unacked) -> None:
        """Make a dead letter of a message that was in flight when the server was killed once too often."""
        group, owner = self._group, self._owner
        record = visible_record(group, sequence)
        if record is None or group.numbers[record.stream].name == self._log.settings.dead:
            return
        try:
            append_dead_letter(group, owner.state, record, entry.first, entry.failed, "the server ended")
            owner.counts.dead += 1
        except (errors.MqfsError, OSError):
            return  # it is delivered again
