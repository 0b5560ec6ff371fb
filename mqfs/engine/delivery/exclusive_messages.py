"""The exclusive messages of a stream (`single` of `.put`): only the first consumer that claims one receives it.

The stream's default consumer acks an exclusive message when any consumer claims it, also under `deliver all`. So the
log records which consumer was first:

    consumer `a` claims 7    one record: `a` CLAIM 7, default ACK 7       no other consumer is given it
    ... and releases it      one record: `a` REQUEUE 7, default REQUEUE 7, and of each other that passed it REQUEUE 7
    ... or acks it           `a` ACK 7: it is acked for all
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
    """The exclusive messages of a stream, and which of them were claimed."""

    __slots__ = ("_index", "_log", "_retention", "_stream", "astray")

    def __init__(self, stream: Stream) -> None:
        group = stream.group
        self._stream, self._log, self._index, self._retention = stream, group.log, group.ranks, group.retention
        # claimed by consumers that no longer cover the stream: sequence -> `held_exclusives` of its consumer
        self.astray: dict[int, set[int]] = {}

    def is_taken(self, sequence: int) -> bool:
        """Whether a consumer has claimed the exclusive message, acked or not."""
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
        """Return the lowest sequence of an unclaimed exclusive message; 0 if there is none."""
        sequences = self._index.exclusives(self._stream.number)
        floor = self._stream.kept.state.floor
        at = bisect.bisect_left(sequences, floor)
        while at < len(sequences) and not self._is_unclaimed(sequences[at]):
            at += 1
        del sequences[:at]
        return sequences[0] if sequences else 0

    def all_unclaimed(self) -> list[int]:
        """Return the sequences of the unclaimed exclusive messages."""
        sequences = self._index.exclusives(self._stream.number) if self.first_unclaimed() else []
        return [sequence for sequence in sequences if self._is_unclaimed(sequence)]

    def first_kept(self) -> int:
        """Return the lowest sequence that retention must keep: unclaimed, or not acked; 0 if there is none."""
        unclaimed = self.first_unclaimed()
        return min((sequence for sequence in (unclaimed, *self._held(), *self._astray()) if sequence), default=0)

    def first_waiting(self) -> int:
        """Return the lowest sequence that a receiver of the stream would get: unclaimed, or returned by an earlier
        receiver; 0 if there is none."""
        consumer = self._stream.default_consumer
        returned = [s for s in self._held() if consumer is not None and s not in consumer.claims]
        return min((sequence for sequence in (self.first_unclaimed(), *returned) if sequence), default=0)

    def _held(self) -> list[int]:
        """Return the retained messages that were claimed through the stream and are not acked."""
        consumer = self._stream.default_consumer
        return self._there(consumer.held_exclusives) if consumer is not None and consumer.held_exclusives else []

    def _astray(self) -> list[int]:
        """Return the retained messages of `astray` that are not acked."""
        self.astray = {sequence: held for sequence, held in self.astray.items() if sequence in held}
        return self._there(self.astray) if self.astray else []

    def _there(self, sequences: Iterable[int]) -> list[int]:
        floor = self._stream.kept.state.floor
        there = [sequence for sequence in sequences if sequence >= floor and self._index.is_exclusive(sequence)]
        return [s for s in there if s not in self._log.state.dropped and s not in self._retention.lapsed]

    # As a sharer of the stream's messages. It retains unclaimed messages, those claimed through the stream's default
    # consumer and not acked, and those astray.

    @property
    def low(self) -> int:
        """The lowest sequence of `astray`; under `deliver one` the stream's default consumer retains the other
        messages."""
        return min(self._astray(), default=NEVER)

    def is_acked(self, sequence: int) -> bool:
        if sequence in self.astray and sequence in self.astray[sequence]:
            return False
        own = self._log.state.consumers.get(self._stream.number)
        return not self._index.is_exclusive(sequence) or (own is not None and own.progress.is_acked(sequence))

    def acked_in(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of [first, last] that it does not retain."""
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
        """Record that a message was claimed, together with the steps `also`. Raises DiskFailed, ReadOnly."""
        own = self._stream.own_consumer().state
        self._log.acknowledge_all([(own, own.progress.step(ACK, sequence, sequence)), *also])
        if self._stream.shared and self._stream.is_acked_by_all(sequence):  # all its consumers had passed it
            self._stream.kept.recount()
        self._retention.note_change()

    def release(self, sequences: Sequence[int], *also: AckSteps) -> None:
        """Record that any consumer may claim the messages again, together with the steps `also`. Raises DiskFailed,
        ReadOnly."""
        own = self._stream.own_consumer().state
        self._log.acknowledge_all([*also, (own, own.progress.steps(REQUEUE, sequences, sequences))])
        unclaimed = self._index.exclusives(self._stream.number)
        for sequence in sequences:
            at = bisect.bisect_left(unclaimed, sequence)
            if unclaimed[at : at + 1] != [sequence] and self._index.is_exclusive(sequence):  # it may have been removed
                unclaimed.insert(at, sequence)


# ------------------------------------------------------------ a consumer's claims


_AT_ONCE = 256  # messages offered by one record


class ExclusiveClaims:
    """A consumer's claims on exclusive messages."""

    __slots__ = ("_claims", "_coverage", "_dispatcher", "_group", "_held", "_offered_to", "_own", "_reads", "_released")

    def __init__(self, owner: Consumer) -> None:
        self._group, self._own, self._coverage = owner.group, owner.state, owner.coverage
        self._dispatcher, self._claims, self._reads = owner.dispatcher, owner.claims, owner.reads
        self._held = owner.held_exclusives  # messages claimed here first, not acked
        self._offered_to: dict[ExclusiveClaims, None] = {}  # consumers to serve, as they were offered messages
        self._released: dict[Stream, None] = {}  # streams whose readers may claim messages again

    def claim(self, record: Record, steps: bytes) -> None:
        """Record the steps by which this consumer claims the message. Raises DiskFailed, ReadOnly."""
        sequence = record.sequence
        if sequence in self._held or self._coverage.stream is not None:
            self._group.log.acknowledge(self._own, steps)
        else:
            self._group.numbers[record.stream].exclusives.claim(sequence, (self._own, steps))
        self._group.retention.removals += 1  # for the other consumers
        self._held.add(sequence)

    def release_all(self) -> None:
        """Offer all held messages to other consumers, as this one is removed. Raises DiskFailed, ReadOnly; then it
        still holds the rest."""
        try:
            self.offer_all()
        finally:
            self.serve_others()

    def release_uncovered(self) -> None:
        """Offer held messages of streams that this consumer no longer covers; those in flight stay its own. Raises
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
        """Offer a held message that must be delivered again, if this consumer no longer covers its stream. False: the
        message stays with this consumer. Raises DiskFailed, ReadOnly."""
        sequence, stream = claim.sequence, self._group.numbers.get(claim.stream)
        if stream is None or self._coverage.covers(stream):
            return False
        if visible_record(self._group, sequence, True) is None:
            return False
        self._offer_each([sequence])
        self.serve_others()
        return True

    def offer_all(self) -> None:
        """As `release_all`, but the reads of other consumers wait for `serve_others`."""
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
        """Let the other consumers of the stream claim a message that this one held, and record the steps `also` with
        that. Raises DiskFailed, ReadOnly."""
        self._record_offers(stream, [sequence], self._offers(stream, [sequence]), *also)
        self.serve_others()

    def _offers(self, stream: Stream, sequences: Sequence[int]) -> list[Offered]:
        """Return the other consumers of the stream, each with the steps that let it claim each message."""
        others = [other.exclusives for other in stream.consumers() if other.exclusives is not self]
        return [(other, other._own.progress.offer(sequences)) for other in others]

    def _record_offers(
        self, stream: Stream, sequences: Sequence[int], offers: Iterable[Offered], *also: AckSteps
    ) -> None:
        others = [other for other, _ in offers]
        acks = [(other._own, other._steps_to_offer(sequences, offered)) for other, offered in offers]
        stream.exclusives.release(sequences, *also, *(ack for ack in acks if ack[1]))
        if self._coverage.stream is None and stream.default_consumer is not None:
            others.append(stream.default_consumer.exclusives)
        self._released[stream] = None
        for other in others:
            self._offered_to[other] = None
            for sequence in sequences:
                if (entry := other._own.progress.unacked.get(sequence)) is not None:
                    other._dispatcher.make_ready(sequence, entry)

    def serve_others(self) -> None:
        """Serve the reads of the consumers that were offered messages, then those of the streams."""
        others, self._offered_to = self._offered_to, {}
        streams, self._released = self._released, {}
        for other in others:
            other._reads.serve()
        for stream in streams:
            for reader in [reader for reader in stream.waits.readers if reader.writes]:
                reader.look_again(stream.waits.take_out(reader))
            stream.pollers.wake()

    def _steps_to_offer(self, sequences: Iterable[int], offered: Iterable[bytes]) -> bytes:
        """Return those steps of `offered` to record so that this consumer may claim the messages."""
        for sequence in sequences:
            self._dispatcher.reopen(sequence)
        unacked = self._own.progress.unacked
        return b"".join([steps for sequence, steps in zip(sequences, offered, strict=True) if sequence not in unacked])


Offered = tuple[ExclusiveClaims, list[bytes]]  # a consumer's claims, and its steps for each message


# ------------------------------------------------------------ sharers


class NeverConsumed:
    """Stand-in for the default consumer under `deliver one` until a message is claimed: it has acked nothing."""

    low = 0

    def is_acked(self, sequence: int) -> bool:
        return False

    def acked_in(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        return iter(())


NEVER_CONSUMED = NeverConsumed()
