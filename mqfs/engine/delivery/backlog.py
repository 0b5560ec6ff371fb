"""The backlog of a consumer: its unacked messages, listed and counted, and the bound of their number.

The number is counted on first use and kept up to date from then on. A change that makes it uncertain (a stream that is
no longer covered, a body of many parts) has it counted again on next use.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mqfs import errors, limits
from mqfs.engine.core import multipart
from mqfs.engine.core.portions import Work
from mqfs.engine.delivery.dispatcher import visible_record
from mqfs.model import NEVER, Kind, Record
from mqfs.state.acks import ACK, State

if TYPE_CHECKING:
    from mqfs.engine.delivery.consumer import Consumer
    from mqfs.engine.retention.retained import KeptRange
    from mqfs.engine.stream import Stream

MESSAGE = int(Kind.MESSAGE)
_FREE_STEPS = 200  # a count of at most these steps may be made for each write
_STEP_NS, _RECOUNT_NS = 20_000, 10**9  # pause after a longer count: for each step, and at most
_LOOK_EVERY = 64  # sequences between two searches for messages that a program excludes
_LOOK_WHEN_FULL = 4 * limits.PASSED_MESSAGES  # messages that one of these searches passes over: some 8 ms
_LOOKED_AT = 64  # streams or messages between two looks at the clock: some 0.3 ms


class Backlog:
    """The unacked messages of a consumer. Above half of its bound it acks the messages that a view's program
    excludes."""

    __slots__ = ("_claims", "_coverage", "_group", "_held", "_look_at", "_looked_to", "_own", "_recount_ns", "_size",
                 "cut_from")  # fmt: skip

    def __init__(self, owner: Consumer) -> None:
        self._group, self._own, self._coverage, self._claims = owner.group, owner.state, owner.coverage, owner.claims
        self._held = owner.held_exclusives
        self._size: int | None = None  # None: to be counted
        self._recount_ns = 0  # engine time before which it is not counted again
        self.cut_from = 0  # end of the last search for messages to skip
        self._looked_to = 0  # end of the last search for messages that a program excludes
        self._look_at = 0  # log end at which that search continues, or sooner

    def streams(self) -> list[Stream]:
        """Return the streams whose messages may be for the consumer."""
        return [stream for stream in self._candidates() if self._coverage.covers(stream)]

    def _candidates(self) -> list[Stream]:
        """Return all streams of the group, or the single stream that the consumer is over."""
        single = self._coverage.stream or self._group.streams.get(self._own.over)
        return [single] if single is not None else list(self._group.numbers.values())

    def unclaimed(self, position: int = 0, most: int = limits.PASSED_MESSAGES) -> tuple[Record | None, int]:
        """Return the first message from `position` on that is neither acked nor in flight, delayed or not, and the
        sequence to continue from. Pass over at most `most` messages. (None, NEVER): there is none; (None, another
        sequence): none found yet."""
        progress, claims = self._own.progress, self._claims
        position = max(position, progress.ack_floor)
        bodies = [(claim.entry.first, claim.sequence) for claim in claims.values() if claim.is_multipart]
        while most > 0:
            while position in claims or (acked := progress.acked_ranges.end_of(position)):
                position = position + 1 if position in claims else acked + 1
            try:
                record = self._coverage.filter.find(position, limits.SCANNED_MESSAGES)
            except errors.Damaged as error:
                position = error.sequence + 1
                continue
            if record is None:
                return None, NEVER
            position = record.sequence + 1
            most -= 1 + len(record.body) // limits.PASSED_BYTES
            if record.sequence in claims or not self._waits(record):
                continue
            if not any(first <= record.sequence <= last for first, last in bodies):
                return record, position
        return None, position

    def _waits(self, record: Record) -> bool:
        """Whether the message is for this consumer and not acked."""
        stream = self._group.numbers.get(record.stream)
        return (
            stream is not None
            and record.kind == MESSAGE
            and not self._own.progress.is_acked(record.sequence)
            and stream.kept.visible(record)
            and self._coverage.matches(stream, record)
        )

    def count(self, end: int | None = None) -> int:
        """Return the number of unacked messages before `end`, including those that a view's program excludes."""
        return sum(self.counts(end))

    def counts(self, end: int | None = None) -> Iterator[int]:
        """Yield the count of each stream, so that a caller may pause; 0 for a stream that is not covered."""
        progress = self._own.progress
        low, last = progress.ack_floor, self._group.log.end.next if end is None else end
        for stream in self._candidates() if low < last else ():
            if not self._coverage.covers(stream):
                yield 0
                continue
            kept = stream.kept
            kept.update_low_watermark()
            begin = max(stream.state.floor, low)
            if begin >= last:
                yield 0
                continue
            acked = sum(kept.messages(first, stop + 1) for first, stop in progress.acked_in(begin, last - 1))
            yield kept.messages(begin, end) - acked

    def count_unclaimed(self, counts: dict[object, int]) -> Work[tuple[int, int]]:
        """Return (messages neither acked nor in flight, delayed messages among them). In steps: the numbers
        are of one moment only if few rows are counted. `counts` caches counts for all consumers with the same streams
        and progress, until other work was served."""
        progress, stream = self._own.progress, self._coverage.stream
        moment = self._group.portions.count
        place = moment, stream, self._own.over, progress.ack_floor, tuple(progress.acked_ranges)
        if place not in counts:
            unacked = 0
            for looked, part in enumerate(self.counts(), 1):
                unacked += part
                if looked % _LOOKED_AT == 0:
                    yield
            counts[place] = unacked
        claimed, delayed = yield from self.count_claimed_and_delayed()
        waiting = max(counts[place] - claimed, 0)  # some may have been claimed between two steps
        return waiting, min(delayed, waiting)

    def count_claimed_and_delayed(self) -> Work[tuple[int, int]]:
        """Return (claimed messages, delayed messages) among those that `count` counts, of streams covered now. In
        steps."""
        now, numbers, unacked = self._group.clock.engine_ns(), self._group.numbers, self._own.progress.unacked
        claimed = delayed = 0
        covered: dict[int, KeptRange | None] = {}
        for looked, claim in enumerate(list(self._claims.values()), 1):
            if claim.stream not in covered:
                stream = numbers.get(claim.stream)
                covered[claim.stream] = stream.kept if stream is not None and self._coverage.covers(stream) else None
            claimed += (kept := covered[claim.stream]) is not None and kept.is_counted(claim.sequence)
            if looked % _LOOKED_AT == 0:
                yield
        for looked, sequence in enumerate(list(unacked), 1):
            entry = unacked.get(sequence)
            delayed += entry is not None and not entry.claimed and entry.due_ns > now and self._is_shown(sequence)
            if looked % _LOOKED_AT == 0:
                yield
        return claimed, delayed

    def _counts(self, stream: Stream, sequence: int) -> bool:
        """Whether `count` counts that message of the stream, acked or not."""
        return self._coverage.covers(stream) and stream.kept.is_counted(sequence)

    def _is_shown(self, sequence: int) -> bool:
        record = visible_record(self._group, sequence)
        return record is not None and self._coverage.covers(self._group.numbers[record.stream])

    # ------------------------------------------------------------ the bound

    def size(self) -> int:
        """As `count`, kept up to date. While a message of a batch is delivered, later ones do not count yet."""
        if self._size is None:
            self._size = self.count(self._end())
        return self._size

    def _end(self) -> int:
        """Return the sequence after the last message that counts."""
        new = self._group.waiting.record_being_delivered
        return self._group.log.end.next if new is None else new.sequence + 1

    def on_appended(self) -> None:
        """Count a covered message that was appended, or is no longer acked."""
        if self._size is not None:
            self._size += 1

    def on_acked(self, sequence: int, number: int, size: int, is_multipart: bool) -> None:
        """Record the ack of a message of stream `number`, with a body of `size` bytes. `is_multipart`: it is the last
        part of a body, all parts of which were acked."""
        self._held.discard(sequence)
        stream = self._group.numbers.get(number)
        if is_multipart:
            self._size = None
        elif self._size is not None and stream is not None and self._counts(stream, sequence):
            self._size -= 1
        settings = self._group.log.settings
        if settings.replay == "all" and settings.deliver == "all":
            return  # the message is retained, whoever acks it
        if stream is not None and is_multipart:
            stream.kept.recount()
        elif stream is not None and self._coverage.covers(stream):  # else it no longer counts for this consumer
            stream.kept.on_acked(sequence, size)
        self._group.retention.note_change()

    def recount(self) -> None:
        """Discard the counts: other streams are covered, or other messages retained."""
        self._size, self.cut_from, self._looked_to, self._look_at = None, 0, 0, 0

    def exceeds(self, messages: int) -> bool:
        """Whether `messages` more would exceed the consumer's own bound."""
        most = self._own.backlog
        if not most or self.size() + messages <= most // 2:
            return False
        if not self._coverage.filter.by_stream:
            end = self._end()
            self._look_for_left_out(end, self.size() + messages)
            new = self._group.waiting.record_being_delivered
            if new is not None and self._own.progress.is_acked(new.sequence):
                return False
            if self._looked_to < end:
                most += most // 2  # excluded ones are not known yet: better some too many than one lost
        if self.size() + messages <= most:
            return False
        now_ns = self._group.clock.engine_ns()
        if now_ns < self._recount_ns:
            return True
        self._size = None  # messages expired or evicted since do not count
        if self.size() + messages <= most:
            return False
        steps = self._steps()
        self._recount_ns = now_ns + (min(steps * _STEP_NS, _RECOUNT_NS) if steps > _FREE_STEPS else 0)
        return True

    def _look_for_left_out(self, end: int, waiting: int) -> None:
        """Continue the search for excluded messages up to `end`: at once if `waiting` exceeds the bound, else after
        some sequences. A search that is far behind, as after a start, continues at once only if `waiting` is half more
        than the bound: a batch would do all of it at once."""
        most = self._own.backlog
        has_come = self._looked_to >= self._look_at - _LOOK_EVERY  # whether the last search reached its end
        if end >= self._look_at or (waiting > most and (has_come or waiting > most + most // 2)):
            self._pass_left_out(end, _LOOK_WHEN_FULL if waiting > most else limits.PASSED_MESSAGES)
            self._look_at = end + _LOOK_EVERY

    def _pass_left_out(self, end: int, most: int) -> None:
        """Ack the messages before `end` that a program excludes and that were not examined yet. Pass over at most
        `most` messages."""
        progress, position = self._own.progress, max(self._looked_to, self._own.progress.ack_floor)
        found: list[tuple[int, int, int]] = []  # sequence, stream, bytes of the body
        while most > 0 and position < end:
            if acked := progress.acked_ranges.end_of(position):
                position = acked + 1
                continue
            try:
                record = self._coverage.filter.find(position, limits.SCANNED_MESSAGES)
            except errors.Damaged as error:
                position = error.sequence + 1
                continue
            if record is None or record.sequence >= end:
                position = end
                break
            position = record.sequence + 1
            most -= 1 + len(record.body) // limits.PASSED_BYTES
            if self._is_left_out(record):
                found.append((record.sequence, record.stream, len(record.body)))
        if sequences := [sequence for sequence, _, _ in found]:
            self._group.log.acknowledge(self._own, progress.steps(ACK, sequences, sequences))
        self._looked_to = position
        for row in found:
            self.on_acked(*row, False)

    def _is_left_out(self, record: Record) -> bool:
        """Whether a program excludes the message, and it is free. Parts of a body are not excluded here: the last part
        decides for them."""
        stream = self._group.numbers.get(record.stream)
        if stream is None or record.kind != MESSAGE or not self._counts(stream, record.sequence):
            return False
        if record.headers and multipart.place(record.headers) != (0, 0):
            return False
        if self._own.progress.of(record.sequence) is not State.READY:
            return False
        return not self._coverage.matches(stream, record)

    def _steps(self) -> int:
        """Estimate the ranges of the log that a count reads. Ten messages count as a range: their sizes are summed."""
        progress, group = self._own.progress, self._group
        streams = 1 if self._coverage.stream is not None else len(group.numbers)
        return streams * (1 + len(progress.acked_ranges.firsts)) + (group.log.end.next - progress.ack_floor) // 10
