"""The backlog of a consumer: the messages for it that are not acked, listed and counted, and the bound of their number.

The number is counted when it is first asked for, and kept up to date from then on. After what makes it uncertain (a
stream that is covered no more, a body of many parts) it is counted again when it is next asked for.
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
_FREE_STEPS = 200  # a count of at most these may be made for each write
_STEP_NS, _RECOUNT_NS = 20_000, 10**9  # between two longer ones: for each step, and at most
_LOOK_EVERY = 64  # sequences, between two looks for messages that a program leaves out
_LOOK_WHEN_FULL = 4 * limits.PASSED_MESSAGES  # passed over by one of them: some 8 ms
_LOOKED_AT = 64  # streams or messages between two looks at the clock: some 0.3 ms


class Backlog:
    """The messages that a consumer has not acked. It acks those that a program leaves out, where these fill it."""

    __slots__ = ("_claims", "_coverage", "_group", "_held", "_look_at", "_looked_to", "_own", "_recount_ns", "_size",
                 "cut_from")  # fmt: skip

    def __init__(self, owner: Consumer) -> None:
        self._group, self._own, self._coverage, self._claims = owner.group, owner.state, owner.coverage, owner.claims
        self._held = owner.held_exclusives
        self._size: int | None = None  # None: to be counted
        self._recount_ns = 0  # not before, by the engine's clock
        self.cut_from = 0  # the last look for messages to be cut went that far
        self._looked_to = 0  # and that for messages that a program leaves out
        self._look_at = 0  # it continues when the log is that long, or sooner

    def streams(self) -> list[Stream]:
        """Those whose messages may be for it."""
        return [stream for stream in self._candidates() if self._coverage.covers(stream)]

    def _candidates(self) -> list[Stream]:
        """All of the group's, unless it is over a single one."""
        single = self._coverage.stream or self._group.streams.get(self._own.over)
        return [single] if single is not None else list(self._group.numbers.values())

    def unclaimed(self, position: int = 0, most: int = limits.PASSED_MESSAGES) -> tuple[Record | None, int]:
        """The first message from that sequence on that is neither acked nor in flight, a delayed one too, and the
        sequence to go on from. It passes over `most` messages at most; (None, NEVER): there is none."""
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
        """Messages before the sequence `end` that are not acked, those too which a program of a view leaves out."""
        return sum(self.counts(end))

    def counts(self, end: int | None = None) -> Iterator[int]:
        """The same, stream by stream, so that a caller may pause: 0 too for those that it does not cover."""
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
        """(messages neither acked nor in flight, those of them that are delayed). In steps: of few they are of one
        moment. `counts` is filled with what was counted: it serves all consumers at the same place, until others were
        served."""
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
        """(messages claimed, messages delayed) of those that `count` counts: of streams that it covers by now. In
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
        """As `count`, kept up to date. While a message of a batch is delivered, those after it do not count yet."""
        if self._size is None:
            self._size = self.count(self._end())
        return self._size

    def _end(self) -> int:
        """Where the messages end that count."""
        new = self._group.waiting.record_being_delivered
        return self._group.log.end.next if new is None else new.sequence + 1

    def on_appended(self) -> None:
        """A message that it covers was appended, or is not acked any more."""
        if self._size is not None:
            self._size += 1

    def on_acked(self, sequence: int, number: int, size: int, is_multipart: bool) -> None:
        """A message of the stream of that number was acked; if `is_multipart`, all parts of one body, of which it is
        the last."""
        self._held.discard(sequence)
        stream = self._group.numbers.get(number)
        if is_multipart:
            self._size = None
        elif self._size is not None and stream is not None and self._counts(stream, sequence):
            self._size -= 1
        settings = self._group.log.settings
        if settings.replay == "all" and settings.deliver == "all":
            return  # whoever acks, the message is kept
        if stream is not None and is_multipart:
            stream.kept.recount()
        elif stream is not None and self._coverage.covers(stream):  # else it does not count for this one by now
            stream.kept.on_acked(sequence, size)
        self._group.retention.note_change()

    def recount(self) -> None:
        """Other streams are covered, or other messages kept."""
        self._size, self.cut_from, self._looked_to, self._look_at = None, 0, 0, 0

    def exceeds(self, messages: int) -> bool:
        """Whether so much more would exceed the consumer's own bound."""
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
                most += most // 2  # it is not known yet how many of them wait: rather some too many than one lost
        if self.size() + messages <= most:
            return False
        now_ns = self._group.clock.engine_ns()
        if now_ns < self._recount_ns:
            return True
        self._size = None  # what expired or was evicted since does not count
        if self.size() + messages <= most:
            return False
        steps = self._steps()
        self._recount_ns = now_ns + (min(steps * _STEP_NS, _RECOUNT_NS) if steps > _FREE_STEPS else 0)
        return True

    def _look_for_left_out(self, end: int, waiting: int) -> None:
        """Continue the look up to `end`: where `waiting` exceed the bound at once, else after some sequences. So does
        one that is far behind, as after a start, up to half more than the bound: a batch would do all of it at once."""
        most = self._own.backlog
        has_come = self._looked_to >= self._look_at - _LOOK_EVERY  # to the end of the last time
        if end >= self._look_at or (waiting > most and (has_come or waiting > most + most // 2)):
            self._pass_left_out(end, _LOOK_WHEN_FULL if waiting > most else limits.PASSED_MESSAGES)
            self._look_at = end + _LOOK_EVERY

    def _pass_left_out(self, end: int, most: int) -> None:
        """Messages that a program leaves out do not wait for it: ack those before `end` that were not looked at yet. It
        passes over `most` messages at most."""
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
        """Whether it is one of those, and free; of a body in parts the last one decides, and it stays."""
        stream = self._group.numbers.get(record.stream)
        if stream is None or record.kind != MESSAGE or not self._counts(stream, record.sequence):
            return False
        if record.headers and multipart.place(record.headers) != (0, 0):
            return False
        if self._own.progress.of(record.sequence) is not State.READY:
            return False
        return not self._coverage.matches(stream, record)

    def _steps(self) -> int:
        """About how many ranges of the log a count reads; ten messages for one, as a store in memory reads each."""
        progress, group = self._own.progress, self._group
        streams = 1 if self._coverage.stream is not None else len(group.numbers)
        return streams * (1 + len(progress.acked_ranges.firsts)) + (group.log.end.next - progress.ack_floor) // 10
