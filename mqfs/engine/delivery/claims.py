"""The claims of a consumer: which messages are in flight, at which receiver, and until when.

Owns that table, and the times at which leases and delays end. What the log says of a claim is the consumer's.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

import attrs

from mqfs import errors, limits
from mqfs.clock import Clock
from mqfs.engine.core import multipart
from mqfs.model import Record
from mqfs.state.acks import AckState, Unacked

if TYPE_CHECKING:
    from mqfs.engine.files.claiming import ClaimingHandle
    from mqfs.engine.group import Group


def visible_record(group: Group, sequence: int) -> Record | None:
    """The message of that sequence; None where it is damaged, expired, evicted, dropped, or its stream was removed."""
    try:
        record = group.log.reader.scan(sequence)
    except errors.Damaged:
        return None
    if record is None or record.sequence != sequence:
        return None
    stream = group.numbers.get(record.stream)
    return record if stream is not None and stream.kept.visible(record) else None


@attrs.define
class Counts:
    """Of one consumer, since the server started; shown in `.stats`."""

    delivered: int = 0
    acknowledged: int = 0
    failed: int = 0  # deliveries
    dead: int = 0  # messages that became dead letters


class InFlight:
    """A message that a receiver has and did not ack."""

    __slots__ = ("deadline_ns", "deliveries", "entry", "is_multipart", "pid", "receiver", "sequence", "size", "stream")

    def __init__(self, receiver: ClaimingHandle, record: Record, entry: Unacked) -> None:
        self.receiver, self.entry = receiver, entry
        self.deliveries = entry.failed + 1
        self.sequence, self.stream, self.size = record.sequence, record.stream, len(record.body)
        self.is_multipart = bool(record.headers) and multipart.is_last(record)
        self.pid = receiver.claiming_pid
        self.deadline_ns = 0  # engine time; 0: no lease


class Claims:
    """Of one consumer."""

    __slots__ = ("_clock", "_progress", "_set_alarm", "_timers", "by_sequence")

    def __init__(self, progress: AckState, clock: Clock, set_alarm: Callable[[int], None]) -> None:
        self._progress, self._clock, self._set_alarm = progress, clock, set_alarm
        self.by_sequence: dict[int, InFlight] = {}
        self._timers: list[tuple[int, int]] = []  # (engine ns, sequence): leases and delays, outdated ones among them

    def __len__(self) -> int:
        return len(self.by_sequence)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self.by_sequence

    def next_delivery(self, sequence: int) -> int:
        """Which delivery of a message the next one is: 1 where none failed."""
        entry = self._progress.in_flight.get(sequence)
        return 1 if entry is None else entry.failed + 1

    def add(self, receiver: ClaimingHandle, record: Record) -> InFlight:
        """The log says that the receiver has it."""
        claim = InFlight(receiver, record, self._progress.in_flight[record.sequence])
        self.by_sequence[claim.sequence] = receiver.claims[claim.sequence] = claim
        return claim

    def restore(self, claim: InFlight) -> None:
        """Undo `remove`."""
        self.by_sequence[claim.sequence] = claim.receiver.claims[claim.sequence] = claim

    def remove(self, claim: InFlight) -> None:
        self.by_sequence.pop(claim.sequence, None)
        claim.receiver.claims.pop(claim.sequence, None)

    def clear(self) -> None:
        """Void them all, and the delays too."""
        for claim in list(self.by_sequence.values()):
            self.remove(claim)
        self._timers = []

    # ------------------------------------------------------------ time

    def renew(self, claim: InFlight, lease_ns: int) -> None:
        """Begin the lease again; 0: there is none."""
        claim.deadline_ns = self._clock.engine_ns() + lease_ns if lease_ns else 0
        if lease_ns:
            self.set_timer(claim.deadline_ns, claim.sequence)

    def set_timer(self, due_ns: int, sequence: int) -> None:
        heapq.heappush(self._timers, (due_ns, sequence))
        if len(self._timers) > 2 * len(self._progress.in_flight) + 64:  # most are of claims that ended long ago
            self._drop_outdated()
        self._set_alarm(due_ns)

    def _drop_outdated(self) -> None:
        mine = self.by_sequence
        self._timers = [(claim.deadline_ns, s) for s, claim in mine.items() if claim.deadline_ns]
        unacked = self._progress.in_flight.items()
        self._timers += [(entry.due_ns, s) for s, entry in unacked if s not in mine and entry.due_ns]
        heapq.heapify(self._timers)

    def run_timers(self, now_ns: int, end: Callable[[int, int], None]) -> None:
        """Call `end(sequence, now_ns)` for each timer that is due. One whose call fails stays."""
        while self._timers and self._timers[0][0] <= now_ns:
            timer = heapq.heappop(self._timers)
            try:
                end(timer[1], now_ns)
            except BaseException:
                heapq.heappush(self._timers, timer)
                raise
        if self._timers:
            self._set_alarm(self._timers[0][0])


# ------------------------------------------------------------ returned claims

# Claims whose receiver is gone, until they are requeued: in portions, since there may be many.
#
# Until then they are in flight.

_AT_ONCE = 256  # claims requeued by one record: about a millisecond


class ReturnedClaims:
    """Of one consumer. `requeue` is called with a portion and the reason."""

    __slots__ = ("_claims", "_clock", "_queue", "_requeue", "_set_alarm")

    def __init__(
        self,
        claims: Claims,
        clock: Clock,
        set_alarm: Callable[[int], None],
        requeue: Callable[[list[InFlight], str], None],
    ) -> None:
        self._claims, self._clock, self._set_alarm, self._requeue = claims, clock, set_alarm, requeue
        self._queue: list[tuple[Iterator[InFlight], str]] = []

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, claims: Iterable[InFlight], reason: str, whole: bool) -> None:
        """Requeue them; where it takes long and not `whole` is wanted, the rest at the next alarm."""
        self._queue.append((iter(claims), reason))
        self.resume(whole)

    def resume(self, whole: bool) -> None:
        until = self._clock.engine_ns() + int(limits.SLICE_S * 1e9)
        while self._queue:
            claims, reason = self._queue[0]
            portion = list(islice(claims, _AT_ONCE))
            if len(portion) < _AT_ONCE:
                del self._queue[0]
            current = self._claims.by_sequence
            self._requeue([claim for claim in portion if current.get(claim.sequence) is claim], reason)
            if self._queue and self._clock.engine_ns() >= until and not whole:
                self._set_alarm(self._clock.engine_ns() + 1)
                return
