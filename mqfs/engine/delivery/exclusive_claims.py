"""The claims of a consumer on exclusive messages, of which only the first consumer of all gets each.

Owns such a claim against the other consumers of the stream, and its release to them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mqfs.engine.core.log import AckSteps
from mqfs.engine.delivery.backlog import Coverage
from mqfs.engine.delivery.claims import visible_record
from mqfs.engine.delivery.dispatcher import Dispatcher
from mqfs.model import Record
from mqfs.state.acks import REQUEUE, step
from mqfs.state.group import ConsumerState

if TYPE_CHECKING:
    from mqfs.engine.group import Group
    from mqfs.engine.stream import Stream


class ExclusiveClaims:
    """Of one consumer. `held`: messages it claimed first and did not ack. `serve` has its parked reads look again."""

    __slots__ = ("_coverage", "_dispatcher", "_group", "_held", "_own", "_serve")

    def __init__(
        self,
        group: Group,
        own: ConsumerState,
        coverage: Coverage,
        dispatcher: Dispatcher,
        held: set[int],
        serve: Callable[[], None],
    ) -> None:
        self._group, self._own, self._coverage = group, own, coverage
        self._dispatcher, self._held, self._serve = dispatcher, held, serve

    def claim(self, record: Record, steps: bytes) -> None:
        """Record the steps by which this consumer claims it. Raises DiskFailed, ReadOnly."""
        sequence = record.sequence
        if sequence in self._held or self._coverage.stream is not None:
            self._group.log.acknowledge(self._own, steps)
        else:
            self._group.numbers[record.stream].exclusives.claim(sequence, (self._own, steps))
        self._held.add(sequence)

    def release_all(self) -> None:
        """Offer what it holds to others: the consumer is removed."""
        for sequence in list(self._held):
            if (record := visible_record(self._group, sequence)) is not None:
                self.offer(self._group.numbers[record.stream], sequence)
            self._held.discard(sequence)

    def offer(self, stream: Stream, sequence: int, *also: AckSteps) -> None:
        """Let the other consumers of the stream claim a message that this one held, and record those steps with it."""
        others = [other.exclusives for other in stream.consumers() if other.exclusives is not self]
        offers = [steps for other in others if (steps := other._steps_to_offer(sequence)) is not None]
        stream.exclusives.release(sequence, *also, *offers)
        for other in others:
            other._dispatcher.gaps = {}
        if self._coverage.stream is None and stream.default_consumer is not None:
            others.append(stream.default_consumer.exclusives)
        for other in others:
            other._on_offered(sequence)

    def _steps_to_offer(self, sequence: int) -> AckSteps | None:
        """What the log has to say so that this consumer may claim it; None: nothing."""
        self._dispatcher.reopen(sequence)
        if not self._dispatcher.gaps and sequence in self._own.progress.in_flight:
            return None
        return self._own, self._dispatcher.gap_steps() + step(REQUEUE, sequence, sequence)

    def _on_offered(self, sequence: int) -> None:
        """The log says so."""
        if (entry := self._own.progress.in_flight.get(sequence)) is not None:
            self._dispatcher.make_ready(sequence, entry)
        self._serve()
