"""The exclusive messages of a stream (`single` of `.put`), of which only the first consumer of all gets each.

The stream's default consumer acks such a message when any consumer claims it, under `deliver all` too. So the log tells
who came first:

    consumer `a` claims 7    one record: `a` CLAIM 7, default ACK 7       no other consumer is given it
    ... and releases it      one record: `a` REQUEUE 7, default REQUEUE 7, and of each other that passed it REQUEUE 7
    ... or acks it           `a` ACK 7: it is gone for all
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from mqfs.engine.core.log import AckSteps
from mqfs.engine.delivery.dispatcher import visible_record
from mqfs.model import NEVER, Record
from mqfs.state.acks import ACK, REQUEUE

if TYPE_CHECKING:
    from mqfs.engine.delivery.consumer import Claim, Consumer
    from mqfs.engine.stream import Stream


class ExclusiveMessages:
    """Which of a stream's were claimed."""

    __slots__ = ("_index", "_log", "_retention", "_stream", "astray")

    def __init__(self, stream: Stream) -> None:
        group = stream.group
        self._stream, self._log, self._index, self._retention = stream, group.log, group.ranks, group.retention
        self.astray: dict[int, set[int]] = {}  # claimed by a consumer that does not cover the stream now: what that has

    def is_taken(self, sequence: int) -> bool:
        """Whether a receiver claimed that one, acked or not."""
        own = self._log.state.consumers.get(self._stream.number)
        if own is None:
            return False
        if own.progress.is_acked(sequence):
            return True
        consumer = self._stream.default_consumer
        return consumer is not None and (sequence in consumer.claims or sequence in consumer.held_exclusives)

    def _is_unclaimed(self, sequence: int) -> bool:
        return not (self.is_taken(sequence) or self._stream.kept.is_deleted(sequence))

    def first_unclaimed(self) -> int:
        """The lowest sequence of one that was not claimed; 0 where there is none."""
        sequences = self._index.exclusives(self._stream.number)
        floor = self._stream.kept.state.floor
        at = bisect.bisect_left(sequences, floor)
        while at < len(sequences) and not self._is_unclaimed(sequences[at]):
            at += 1
        del sequences[:at]
        return sequences[0] if sequences else 0

    def all_unclaimed(self) -> list[int]:
        """The sequences of those that were not claimed."""
        sequences = self._index.exclusives(self._stream.number) if self.first_unclaimed() else []
        return [sequence for sequence in sequences if self._is_unclaimed(sequence)]

    def first_kept(self) -> int:
        """The lowest sequence of one that retention must keep: not claimed, or not acked; 0 where there is none."""
        unclaimed = self.first_unclaimed()
        return min((sequence for sequence in (unclaimed, *self._held(), *self._astray()) if sequence), default=0)

    def first_waiting(self) -> int:
        """The lowest sequence of one that a taker of the stream would get: not claimed, or returned by a taker before;
        0 where there is none."""
        consumer = self._stream.default_consumer
        returned = [s for s in self._held() if consumer is not None and s not in consumer.claims]
        return min((sequence for sequence in (self.first_unclaimed(), *returned) if sequence), default=0)

    def _held(self) -> list[int]:
        """Those that were claimed through the stream, are not acked, and are there still."""
        consumer = self._stream.default_consumer
        return self._there(consumer.held_exclusives) if consumer is not None and consumer.held_exclusives else []

    def _astray(self) -> list[int]:
        """Those of `astray` that are not acked, and are there still."""
        self.astray = {sequence: held for sequence, held in self.astray.items() if sequence in held}
        return self._there(self.astray) if self.astray else []

    def _there(self, sequences: Iterable[int]) -> list[int]:
        floor = self._stream.kept.state.floor
        there = [sequence for sequence in sequences if sequence >= floor and self._index.is_exclusive(sequence)]
        return [s for s in there if s not in self._log.state.dropped and s not in self._retention.lapsed]

    # As one of those that share the stream's messages. It holds back those that were not claimed, or that were claimed
    # through the stream's own consumer and are not acked, and those astray.

    @property
    def low(self) -> int:
        """The lowest of those that are astray: under `deliver one` the stream's own consumer holds back the others."""
        return min(self._astray(), default=NEVER)

    def is_acked(self, sequence: int) -> bool:
        if sequence in self.astray and sequence in self.astray[sequence]:
            return False
        own = self._log.state.consumers.get(self._stream.number)
        return not self._index.is_exclusive(sequence) or (own is not None and own.progress.is_acked(sequence))

    def acked_in(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """The parts of [first, last] that it does not hold back."""
        consumer = self._stream.default_consumer
        held = consumer.held_exclusives if consumer is not None else ()
        for sequence in sorted({*self._index.exclusives(self._stream.number), *held, *self.astray}):
            if sequence > last:
                break
            if self.is_acked(sequence):
                continue
            if first < sequence:
                yield first, sequence - 1
            first = max(first, sequence + 1)
        if first <= last:
            yield first, last

    def claim(self, sequence: int, *also: AckSteps) -> None:
        """Record that it was claimed, and those steps with it. Raises DiskFailed, ReadOnly."""
        own = self._stream.own_consumer().state
        self._log.acknowledge_all([(own, own.progress.step(ACK, sequence, sequence)), *also])
        if self._stream.shared and self._stream.is_acked_by_all(sequence):  # consumers have passed it before
            self._stream.kept.recount()
        self._retention.note_change()

    def release(self, sequences: Sequence[int], *also: AckSteps) -> None:
        """Record that any receiver may claim them, and those steps with it. Raises DiskFailed, ReadOnly."""
        own = self._stream.own_consumer().state
        self._log.acknowledge_all([*also, (own, own.progress.steps(REQUEUE, sequences, sequences))])
        unclaimed = self._index.exclusives(self._stream.number)
        for sequence in sequences:
            at = bisect.bisect_left(unclaimed, sequence)
            if unclaimed[at : at + 1] != [sequence] and self._index.is_exclusive(sequence):  # it may have left the log
                unclaimed.insert(at, sequence)


# ------------------------------------------------------------ a consumer's claims


_AT_ONCE = 256  # messages offered by one record


class ExclusiveClaims:
    """The claims of a consumer on them."""

    __slots__ = ("_claims", "_coverage", "_dispatcher", "_group", "_held", "_offered_to", "_own", "_reads")

    def __init__(self, owner: Consumer) -> None:
        self._group, self._own, self._coverage = owner.group, owner.state, owner.coverage
        self._dispatcher, self._claims, self._reads = owner.dispatcher, owner.claims, owner.reads
        self._held = owner.held_exclusives  # messages it claimed first and did not ack
        self._offered_to: dict[ExclusiveClaims, None] = {}  # others, whose reads were not served since

    def claim(self, record: Record, steps: bytes) -> None:
        """Record the steps by which this consumer claims it. Raises DiskFailed, ReadOnly."""
        sequence = record.sequence
        if sequence in self._held or self._coverage.stream is not None:
            self._group.log.acknowledge(self._own, steps)
        else:
            self._group.numbers[record.stream].exclusives.claim(sequence, (self._own, steps))
        self._held.add(sequence)

    def release_all(self) -> None:
        """Offer what it holds to others: the consumer is removed. Raises DiskFailed, ReadOnly; then it holds the rest
        still."""
        try:
            self.offer_all()
        finally:
            self.serve_others()

    def release_uncovered(self) -> None:
        """Offer what it holds of streams that it does not cover any more; what is in flight stays its own. Raises
        DiskFailed, ReadOnly; then the rest stays its own, too."""
        numbers, gone = self._group.numbers, list[int]()
        for sequence in self._held:
            rank = self._group.ranks.get(sequence)
            stream = numbers.get(rank.stream) if rank is not None else None
            if stream is not None and not self._coverage.covers(stream):
                stream.exclusives.astray[sequence] = self._held
                gone.append(sequence)
        try:
            self._offer_each(sequence for sequence in gone if sequence not in self._claims)
        finally:
            self.serve_others()

    def offer_uncovered(self, claim: Claim) -> bool:
        """Offer a held message that was in flight, and is to be delivered again, where this consumer does not cover its
        stream any more. False: it is this consumer's still. Raises DiskFailed, ReadOnly."""
        sequence, stream = claim.sequence, self._group.numbers.get(claim.stream)
        if stream is None or self._coverage.covers(stream):
            return False
        if visible_record(self._group, sequence, True) is None:
            return False
        self._offer_each([sequence])
        self.serve_others()
        return True

    def offer_all(self) -> None:
        """As `release_all`, but the reads of the others wait for `serve_others`."""
        self._offer_each(self._held)

    def _offer_each(self, claimed: Iterable[int]) -> None:
        progress, there = self._own.progress, dict[int, list[int]]()
        for sequence in sorted(claimed):
            record = visible_record(self._group, sequence, True) if sequence in progress.unacked else None
            if record is not None:
                there.setdefault(record.stream, []).append(sequence)
            else:
                self._let_go(sequence)
        for number, held in there.items():
            stream = self._group.numbers[number]
            offers = self._offers(stream, held)
            for at in range(0, len(held), _AT_ONCE):
                part = slice(at, at + _AT_ONCE)
                some, sequences = [(other, offered[part]) for other, offered in offers], held[part]
                steps = progress.steps(REQUEUE, [progress.unacked[s].first for s in sequences], sequences)
                self._record_offers(stream, sequences, some, (self._own, steps))
                for sequence in sequences:
                    self._dispatcher.add_requeued(sequence, number)
                    self._let_go(sequence)

    def _let_go(self, sequence: int) -> None:
        self._held.discard(sequence)
        if (claim := self._claims.get(sequence)) is not None:
            claim.remove()

    def offer(self, stream: Stream, sequence: int, *also: AckSteps) -> None:
        """Let the other consumers of the stream claim a message that this one held, and record those steps with it.
        Raises DiskFailed, ReadOnly."""
        self._record_offers(stream, [sequence], self._offers(stream, [sequence]), *also)
        self.serve_others()

    def _offers(self, stream: Stream, sequences: Sequence[int]) -> list[Offered]:
        """The other consumers of the stream, and for each of these messages the steps by which such a one may claim
        it."""
        others = [other.exclusives for other in stream.consumers() if other.exclusives is not self]
        return [(other, other._own.progress.offer(sequences)) for other in others]

    def _record_offers(
        self, stream: Stream, sequences: Sequence[int], offers: Iterable[Offered], *also: AckSteps
    ) -> None:
        others = [other for other, _ in offers]
        acks = [(other._own, other._steps_to_offer(sequences, offered)) for other, offered in offers]
        stream.exclusives.release(sequences, *also, *(ack for ack in acks if ack[1]))
        for other in others:
            other._dispatcher.gaps = {}
        if self._coverage.stream is None and stream.default_consumer is not None:
            others.append(stream.default_consumer.exclusives)
        for other in others:
            self._offered_to[other] = None
            for sequence in sequences:
                if (entry := other._own.progress.unacked.get(sequence)) is not None:
                    other._dispatcher.make_ready(sequence, entry)

    def serve_others(self) -> None:
        """Serve the reads of those to whom messages were offered."""
        others, self._offered_to = self._offered_to, {}
        for other in others:
            other._reads.serve()

    def _steps_to_offer(self, sequences: Iterable[int], offered: Iterable[bytes]) -> bytes:
        """What the log has to say so that this consumer may claim them: these steps, after those of its gaps."""
        for sequence in sequences:
            self._dispatcher.reopen(sequence)
        unacked, gaps = self._own.progress.unacked, self._dispatcher.gap_steps()
        if not gaps:  # else one may be in a gap
            offered = [steps for sequence, steps in zip(sequences, offered, strict=True) if sequence not in unacked]
        return b"".join([gaps, *offered])


Offered = tuple[ExclusiveClaims, list[bytes]]  # to whom; its steps, of each message its own


# ------------------------------------------------------------ sharers


class NeverConsumed:
    """Stands in for the default consumer under `deliver one`, where no message was ever claimed: it has acked
    nothing."""

    low = 0

    def is_acked(self, sequence: int) -> bool:
        return False

    def acked_in(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        return iter(())


NEVER_CONSUMED = NeverConsumed()
