"""The backlog of a consumer: the messages for it that are not acked, listed and counted, and the bound of their number.

The number is counted when it is first asked for, and kept up to date from then on. After what makes it uncertain (a
stream that is covered no more, a body of many parts) it is counted again when it is next asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from mqfs import errors, limits
from mqfs.engine.core import multipart
from mqfs.engine.core.portions import Work
from mqfs.engine.delivery.dispatcher import visible_record
from mqfs.model import NEVER, Kind, Record
from mqfs.state.acks import ACK, State
from mqfs.state.group import ConsumerState

if TYPE_CHECKING:
    from mqfs.engine.delivery.consumer import Claim, Coverage
    from mqfs.engine.group import Group
    from mqfs.engine.retention.retained import KeptRange
    from mqfs.engine.stream import Stream

MESSAGE = int(Kind.MESSAGE)
_FREE_STEPS = 200  # a count of at most these may be made for each write
_STEP_NS, _RECOUNT_NS = 20_000, 10**9  # between two longer ones: for each step, and at most
_LEFT_OUT = 1_024  # messages acked at once, as a program leaves them out: some 3 ms
_LOOKED_AT = 64  # streams or messages between two looks at the clock: some 0.3 ms


class Backlog:
    """The messages that a consumer has not acked. Acks nothing itself."""

    __slots__ = ("_claims", "_coverage", "_group", "_held", "_left_out", "_looked_to", "_own", "_recount_ns", "_size",
                 "cut_from")  # fmt: skip

    def __init__(
        self, group: Group, own: ConsumerState, coverage: Coverage, claims: dict[int, Claim], held: set[int]
    ) -> None:
        self._group, self._own, self._coverage, self._claims = group, own, coverage, claims
        self._held = held  # exclusive messages that are claimed and not acked
        self._size: int | None = None  # None: to be counted
        self._recount_ns = 0  # not before, by the engine's clock
        self.cut_from = 0  # the last look for messages to be cut went that far
        self._looked_to = 0  # and that for messages that a program leaves out
        self._left_out: deque[tuple[int, int, int]] = deque()  # those: sequence, stream, bytes of the body

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

    def count(self) -> int:
        """Messages that are not acked, those too which a program of a view leaves out."""
        return sum(self.counts())

    def counts(self) -> Iterator[int]:
        """The same, stream by stream, so that a caller may pause: 0 too for those that it does not cover."""
        progress = self._own.progress
        low, last = progress.ack_floor, self._group.log.end.next
        for stream in self._candidates() if low < last else ():
            if not self._coverage.covers(stream):
                yield 0
                continue
            kept = stream.kept
            kept.update_low_watermark()
            begin = max(stream.state.floor, low)
            acked = sum(kept.messages(first, end + 1) for first, end in progress.acked_in(begin, last))
            yield kept.messages(begin) - acked

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
        """As `count`, kept up to date."""
        if self._size is None:
            self._size = self.count()
        return self._size

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
        elif stream is not None:
            stream.kept.on_acked(sequence, size)
        self._group.retention.note_change()

    def recount(self) -> None:
        """Other streams are covered, or other messages kept."""
        self._size, self.cut_from, self._looked_to = None, 0, 0
        self._left_out.clear()

    def exceeds(self, messages: int) -> bool:
        """Whether so much more would exceed the consumer's own bound."""
        most = self._own.backlog
        if not most or self.size() + messages <= most // 2:
            return False
        if not self._coverage.filter.by_stream:
            self._look_for_left_out()
            if self._left_out and self.size() + messages > most:
                self._ack_left_out()
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

    def _look_for_left_out(self) -> None:
        """Messages that a program leaves out do not wait for it: find those written since the last look, a portion."""
        progress, left = self._own.progress, limits.PASSED_MESSAGES
        self._looked_to = max(self._looked_to, progress.ack_floor)
        while left > 0:
            try:
                record = self._coverage.filter.find(self._looked_to, limits.SCANNED_MESSAGES)
            except errors.Damaged as error:
                self._looked_to = error.sequence + 1
                continue
            if record is None:
                return
            self._looked_to = record.sequence + 1
            left -= 1 + len(record.body) // limits.PASSED_BYTES
            if self._is_left_out(record):
                self._left_out.append((record.sequence, record.stream, len(record.body)))

    def _is_left_out(self, record: Record) -> bool:
        """Whether it is one of those; of a body in parts the last one decides, and it stays."""
        stream = self._group.numbers.get(record.stream)
        if stream is None or record.kind != MESSAGE or not self._counts(stream, record.sequence):
            return False
        if record.headers and multipart.place(record.headers) != (0, 0):
            return False
        return not self._coverage.matches(stream, record)

    def _ack_left_out(self) -> None:
        """A portion of them, the oldest first, by one record of the log."""
        some = list(islice(self._left_out, _LEFT_OUT))
        acked = [row for row in some if self._own.progress.of(row[0]) is State.READY]
        if sequences := [sequence for sequence, _, _ in acked]:
            self._group.log.acknowledge(self._own, self._own.progress.steps(ACK, sequences, sequences))
        for _ in some:
            self._left_out.popleft()
        for row in acked:
            self.on_acked(*row, False)

    def _steps(self) -> int:
        """About how many ranges of the log a count reads; ten messages for one, as a store in memory reads each."""
        progress, group = self._own.progress, self._group
        streams = 1 if self._coverage.stream is not None else len(group.numbers)
        return streams * (1 + len(progress.acked_ranges.firsts)) + (group.log.end.next - progress.ack_floor) // 10
