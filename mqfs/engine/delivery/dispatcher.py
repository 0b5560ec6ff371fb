"""Which message a handle of a consumer is to have next.

Owns the search: what was given back and what is urgent stands in a heap, everything else is only in the log, from
`_scan_position` on. Below it each message is acked (progress.acked_ranges), or unacked and in the list of those; so
memory grows with what is claimed, given back or urgent, never with what waits. Claims nothing.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from mqfs import errors
from mqfs.ack_state import ACK, AckState, Unacked, step
from mqfs.engine.delivery.priority_index import ORDINARY, DeliveryAttributes
from mqfs.engine.log import multipart
from mqfs.log.headers import NORMAL
from mqfs.model import NEVER, Kind, Record

if TYPE_CHECKING:
    from mqfs.engine.delivery.consumer import Consumer
    from mqfs.engine.files.claiming_handle import ClaimingHandle

MESSAGE = int(Kind.MESSAGE)
_FEW = 64  # messages looked up in less than a millisecond
Key = tuple[int, int, int, int]  # (-priority, expiry, sequence, stream): what is served first is least


class Dispatcher:
    """Of one consumer."""

    def __init__(self, consumer: Consumer) -> None:
        self.consumer, self.group = consumer, consumer.group
        self._scan_position = self._gap_start = (
            self.progress.ack_floor
        )  # where to look next; where the slot of what is found begins
        self.gaps = b""  # steps that say what holds nothing for it: recorded with the next claim
        self._ready: list[Key] | None = None  # known and free, perhaps; None: not looked up since nobody takes

    @property
    def progress(self) -> AckState:
        return self.consumer.state.progress

    def move(self, position: int) -> None:
        """Everything below is dealt with, nothing above."""
        self._scan_position = self._gap_start = position
        self._ready, self.gaps = None, b""

    def reopen(self, sequence: int) -> None:
        """It is to be had again: no slot may run over it."""
        if self._gap_start <= sequence < self._scan_position:
            if self._gap_start < sequence:
                self.gaps += step(ACK, self._gap_start, sequence - 1)
            self._gap_start = sequence + 1

    def forget(self) -> None:
        """What is served first has changed, or nobody takes: it is looked up again when somebody does."""
        self._ready = None

    def release_cache(self) -> None:
        """Nobody takes. What was given back took long to look up where it is much, so that is kept: a worker that opens
        anew for each message would look it up each time. Urgent messages, which all consumers share, are not."""
        if self._ready is not None and not _FEW < len(self._ready) <= 2 * len(self.progress.in_flight):
            self._ready = None

    def add_ready(self, record: Record) -> None:
        """That message is free."""
        if self._ready is not None:
            heapq.heappush(self._ready, self._key(record))

    def back(self, sequence: int, stream: int) -> None:
        """As `note`, of a message that was given back; whether it is still there is seen when its turn comes."""
        if self._ready is not None:
            ranks = self.group.ranks
            heapq.heappush(
                self._ready, ranks.key(sequence, ranks.get(sequence) or DeliveryAttributes(stream, NORMAL, NEVER))
            )

    def rank(self, sequence: int, rank: DeliveryAttributes) -> None:
        """A new message has a rank of its own."""
        if self._ready is not None and (rank.single or not self.consumer.singles_only):
            heapq.heappush(self._ready, self.group.ranks.key(sequence, rank))
            if not self.consumer.receivers:
                self.release_cache()

    def picked(self, sequence: int, entry: Unacked) -> None:
        """It was handed out: if the scan found it, the scan goes on behind it."""
        if sequence >= self._scan_position and entry.first == self._gap_start:
            self._gap_start = self._scan_position = sequence + 1

    @property
    def exhausted(self) -> bool:
        """There is surely nothing, whoever asks: all that is known was handed out, and the log was read to its end."""
        if self._ready is None or self._ready:
            return False
        return self._scan_position >= self.group.log.end.next or self.consumer.singles_only

    def next_message(self, taker: ClaimingHandle) -> tuple[Record, Unacked] | None:
        """What this handle is to have next, not claimed yet. Raises Damaged, once for each record that is."""
        if self.exhausted:
            return None
        ready = self._best_ready(taker) if self._ready_keys() else None
        if ready is not None and ready[0] < ORDINARY:
            return ready[1]
        found = None if self.consumer.singles_only else self._look(taker)  # those all have ranks
        if ready is None or (found is not None and self._key(found[0]) < ready[2]):
            return found
        return ready[1]

    def _ready_keys(self) -> list[Key]:
        if self._ready is None:
            self._ready = []
            only = self.consumer.singles_only
            for sequence, rank in self.group.ranks.over(self.consumer.covers):
                if not self.progress.is_acked(sequence) and (rank.single or not only):
                    heapq.heappush(self._ready, self.group.ranks.key(sequence, rank))
            for sequence, entry in self.progress.in_flight.items():
                self.consumer.make_ready(sequence, entry)
        return self._ready

    def _key(self, record: Record) -> Key:
        ranks = self.group.ranks
        rank = ranks.get(record.sequence) if record.headers else None
        return ranks.key(record.sequence, rank or DeliveryAttributes(record.stream, NORMAL, NEVER))

    def _is_free(self, sequence: int) -> bool:
        progress = self.progress
        entry = progress.in_flight.get(sequence)
        if entry is None:
            return not progress.is_acked(sequence)
        return not entry.claimed and entry.due_ns <= self.group.tree.clock.engine_ns()

    def _best_ready(self, taker: ClaimingHandle) -> tuple[Key, tuple[Record, Unacked], Key] | None:
        """The best that is known, and may be had by this handle."""
        heap = self._ready
        assert heap is not None
        while heap:
            if not self._is_free(heap[0][2]):
                heapq.heappop(heap)
                continue
            key = heap[0] if self._may_have(taker, heap[0]) else self._next_best(taker, heap)
            if key is None:
                return None
            sequence = key[2]
            record = self.consumer.record(sequence)
            entry = self.progress.in_flight.get(sequence) or self._untouched(sequence, record)
            if record is not None and self.consumer.matches(self.group.numbers[record.stream], record):
                return key, (record, entry), key
            self._vanished(sequence, entry)
            heap[:] = [other for other in heap if other[2] != sequence]
            heapq.heapify(heap)
        return None

    def _next_best(self, taker: ClaimingHandle, heap: list[Key]) -> Key | None:
        fit = (key for key in sorted(heap) if self._is_free(key[2]) and self._may_have(taker, key))
        return next(fit, None)

    def _may_have(self, taker: ClaimingHandle, key: Key) -> bool:
        stream = self.group.numbers.get(key[3])
        return stream is None or taker.admits(stream, key[2])  # one that is gone is found to be so

    def _vanished(self, sequence: int, entry: Unacked) -> None:
        """It expired, was cut or dropped: nobody can have it any more."""
        self.gaps += step(ACK, entry.first, sequence)

    def _untouched(self, sequence: int, record: Record | None) -> Unacked:
        """The entry of an urgent message that was not claimed yet."""
        return Unacked(sequence if record is None else multipart.first_of(self.group.log, record))

    def _look(self, taker: ClaimingHandle) -> tuple[Record, Unacked] | None:
        """The first message in the log that nobody was given and this handle may have."""
        position, aside = self._scan_position, False
        if taker.scanned_to > position and taker.scanned_version == self.group.catalog_version:
            position, aside = taker.scanned_to, True  # what lies between is not for this one
        while True:
            try:
                record = self._find(position)
            except errors.Damaged as error:
                self._scan_position = max(self._scan_position, error.sequence + 1) if not aside else self._scan_position
                taker.scanned_to, taker.scanned_version = error.sequence + 1, self.group.catalog_version
                raise
            if record is None:
                if not aside:
                    self._scan_position = max(position, self.group.log.end.next)
                return None
            if record.sequence >= taker.until:
                return None
            first = record.sequence
            if record.headers and (last := multipart.last_of(self.group.log, record)) is not None:
                record = last  # a body in parts: all of it, or nothing
            position = record.sequence + 1
            what = self._judge(record)
            if what is _TAKE:
                stream = self.group.numbers[record.stream]
                if taker.admits(stream, record.sequence):
                    return record, Unacked(first if aside else self._gap_start)
                aside = True
            elif what is _SKIP and not aside:
                self._scan_position = position
            elif what is _LOOKED_AT and not aside:
                position = self._pass(record.sequence, first)
            if aside:
                taker.scanned_to, taker.scanned_version = position, self.group.catalog_version

    def _find(self, position: int) -> Record | None:
        """The first message at or after that sequence that may be for it; not read again where it was just written."""
        fresh, selection = self.group.fanout.record_being_delivered, self.consumer.selection
        if fresh is not None and fresh.sequence == position and selection.covers(self.group.numbers[fresh.stream]):
            return fresh
        return selection.find(position)

    def _judge(self, record: Record) -> int:
        """What to do with a message that the scan meets."""
        sequence, progress = record.sequence, self.progress
        if sequence in progress.in_flight or progress.is_acked(sequence):
            return _LOOKED_AT
        stream = self.group.numbers.get(record.stream)
        if stream is None or record.kind != MESSAGE or not self.consumer.matches(stream, record):
            return _SKIP
        if not stream.kept.visible(record):
            # Before its slot is acknowledged with the next one's: it is counted as gone now.
            stream.kept.update_low_watermark()
            return _SKIP
        if record.headers and self.group.ranks.get(sequence) is not None:
            return _LOOKED_AT  # it is served by its rank
        return _TAKE

    def _pass(self, sequence: int, first: int) -> int:
        """The scan goes past a message with an Entry, or past a run; returns where to go on."""
        progress = self.progress
        if self._gap_start < first:
            self.gaps += step(ACK, self._gap_start, first - 1)  # nothing of ours is in between
        end = max(sequence, progress.acked_ranges.end_of(sequence), progress.ack_floor - 1)
        self._gap_start = self._scan_position = end + 1
        return self._scan_position


_TAKE, _SKIP, _LOOKED_AT = 0, 1, 2
