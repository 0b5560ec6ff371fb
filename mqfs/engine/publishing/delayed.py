"""Delayed messages: they wait in the log until they are due (`.put` with `delay` or `at`).

A delayed message is in the log under the number of `.put`, so in no stream. When it is due it is appended again, to its
stream, and acknowledged here in the same batch. So after a crash it is delayed or in its stream, never both. Its
position in the stream is where it could first be read. The message was accepted before: if its stream has no room when
it is due, it waits here, also where a write would be refused.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from mqfs import errors, limits
from mqfs.engine.core.log import AckSteps, record_at
from mqfs.engine.core.timers import AGAIN_NS, DELAYED, ROUND_NS, Alarm, LazyHeap
from mqfs.engine.publishing.admission import Admission, request_of, require_fit
from mqfs.engine.publishing.kept_quotas import stored
from mqfs.engine.publishing.schedules import Schedules
from mqfs.model import Draft, Kind, Record, User
from mqfs.quotas import UserLimits
from mqfs.records import headers
from mqfs.state.acks import ACK, step
from mqfs.state.group import PUT, Change

if TYPE_CHECKING:
    from mqfs.engine.group import Group
    from mqfs.engine.stream import Stream

_HEAD_BYTES = 1_024  # headers cached of a message without room; with larger ones it is read at each try
_APART_NS = 10**9  # most by which the engine times of one `at` differ while no clock is set
LOOKED_AT = 1_000  # messages examined at once: 0.1 ms


class DelayedMessages:
    """The messages of a group that wait for their time."""

    def __init__(self, host: Group) -> None:
        self._host, self._log = host, host.log
        self._due = LazyHeap[tuple[int, int]](lambda row: row[1] in self._streams)  # (engine ns, sequence)
        self._at: dict[int, tuple[int, int]] = {}  # wall times of `at` -> engine ns, and number of messages
        self.overdue: dict[int, OrderedDict[int, None]] = {}  # by stream: sequences that are due and wait for room
        self._tried: dict[int, tuple[int, int, bytes]] = {}  # by stream: the first of these, bytes of its body, headers
        self._round: list[int] = []  # streams still to be retried in this round
        self._round_ns = self._next_round_ns = 0  # engine times of the last and the next round over all `overdue`
        self._streams: dict[int, int] = {}  # sequence -> the number of its stream
        self._sizes: dict[int, tuple[int, int, int]] = {}  # sequence -> bytes of body and headers, its user, its `at`
        self._shares = UserLimits("delayed messages in a group", "HELD")
        self._bytes: Counter[int] = Counter()  # by stream: see `bytes_of`
        self._counts: Counter[int] = Counter()  # by stream: its delayed messages
        self._known = False  # whether all delayed messages were found in the log
        self.schedules = Schedules(host, self)
        self._alarm = Alarm(host.timers, host, DELAYED, "appending what is due", self._append_due)

    def __len__(self) -> int:
        return len(self._streams)

    def start(self) -> None:
        """Find the delayed messages in the log after it was read."""
        own = self._log.state.consumers.get(PUT)
        position = own.progress.ack_floor if own is not None else 0
        bucket, removed = self._log.stored, self._log.state.removed
        while True:
            try:
                record = bucket.reader.find(PUT, position)
            except errors.Damaged as error:
                position = error.sequence + 1
                continue
            if record is None:
                self._known = True
                for number in removed.keys() - self._counts.keys():
                    del removed[number]
                return
            position = record.sequence + 1
            if own is None or not own.progress.is_acked(record.sequence):
                texts = headers.decode(record.headers)
                size = len(record.body) + len(record.headers)
                self._count(record.sequence, number := int(texts[headers.TO]), size, _user(texts))
                if number not in self._host.numbers:
                    removed.setdefault(number, _user(texts))  # older logs do not have the stream's owner
                if headers.NEXT in texts:
                    self.schedules.load(record.sequence, texts)
                else:
                    self._add(record.sequence, int(texts[headers.DUE]))

    @property
    def floor(self) -> int:
        """The lowest sequence of a delayed message; 0: there are none. 1 while they are not all known."""
        return next(iter(self._streams), 0) if self._known else 1  # the keys are in ascending order

    def put(
        self,
        stream: Stream,
        body: bytes,
        texts: dict[str, str],
        due_ns: int,
        changes: Sequence[Change] = (),
        acks: Sequence[AckSteps] = (),
        at_ns: int = 0,
    ) -> int:
        """Append a delayed message, due at engine time `due_ns`, with these changes and steps. `at_ns`: the wall time
        that its writer gave, 0 for none. Returns its sequence. A message with the header `next` is published by
        Schedules. Raises OverLimit, OverQuota, TooLong, StreamFull."""
        self._shares.check(user := _user(texts))
        if len(self.overdue.get(stream.number, ())) >= max(limits.HELD // 2, 1):
            raise errors.OverLimit(
                f"stream {stream.name!r}: too many delayed messages wait for room (expected at most {limits.HELD // 2})"
            )
        if stream.name != self._log.settings.dead:
            require_fit(self._log.settings, 1, len(body))
        head = headers.encode({**texts, headers.TO: str(stream.number), headers.DUE: str(due_ns)})
        if (quotas := self._host.publisher.kept_quotas) is not None:
            sizes = {stream: stored(1, len(body) + len(head))}
            quotas.require(sizes)
            quotas.charge(sizes)
        self._host.publisher.retention.reserve_room(len(body) + len(head) + 40)
        sequence = self._log.append_batch([Draft(Kind.MESSAGE, PUT, body, head)], changes, acks)
        self._log.state.nameless(PUT)
        self._count(sequence, stream.number, len(body) + len(head), user, at_ns)
        if at_ns:
            _, count = self._at.get(at_ns, (0, 0))
            self._at[at_ns] = due_ns, count + 1
        if headers.NEXT not in texts:
            self._add(sequence, due_ns)
        self.end_reads(sequence)
        return sequence

    def due_at(self, at_ns: int, due_ns: int) -> int:
        """Return the engine time at which messages for the wall time `at_ns` are due. `due_ns`: that time by the clocks
        as read now. The two clocks are not read at one moment, so without this a later message of the same `at` could
        be due before an earlier one."""
        known, _ = self._at.get(at_ns, (0, 0))
        return known if due_ns < known < due_ns + _APART_NS else due_ns

    def end_reads(self, sequence: int) -> None:
        """End the reads with an `until` at a delayed message that was appended: it is not delivered, so no delivery
        ends them."""
        ends = self._host.publisher.consumers.read_ends
        if self._log.shown is None:
            ends.end_reads()
        else:
            self._log.hold(sequence, lambda _: ends.end_reads())

    def _count(self, sequence: int, stream: int, size: int, user: int, at_ns: int = 0) -> None:
        self._shares.release(user, -1)
        self._streams[sequence] = stream
        self._sizes[sequence] = size, user, at_ns
        self._bytes[stream] += stored(1, size)
        self._counts[stream] += 1

    def _add(self, sequence: int, due_ns: int) -> None:
        self._due.push((due_ns, sequence))
        self._alarm.at(due_ns)

    def replaced(self, sequence: int, new: int) -> None:
        """Count the message `new` in place of `sequence`, which was published. It has the same stream and about the
        same size. The log has both."""
        self._count(new, self._streams[sequence], *self._sizes[sequence][:2])
        self._forget(sequence)

    def bytes_of(self, stream: int) -> int:
        """Return the bytes that the owner's quota is charged for the delayed messages of a stream."""
        return self._bytes[stream]

    def targets(self, stream: Stream, sequence: int) -> bool:
        return self._streams.get(sequence) == stream.number

    def retry(self) -> None:
        """Set the alarm to retry due messages and schedules, as there may be room for them."""
        now = self._host.clock.engine_ns()
        if self.overdue:
            self._next_round_ns = min(self._next_round_ns, max(self._round_ns + ROUND_NS, now))
            self._alarm.at(self._next_round_ns)
        self.schedules.retry(now)

    def _append_due(self, now_ns: int) -> None:
        """Append the messages that are due, for at most SLICE_S at once. Those without room wait, by stream."""
        clock = self._host.clock
        until = clock.engine_ns() + int(limits.SLICE_S * 1e9)
        for number in self._due_streams(now_ns, until):
            if not self._append_to(number, until):
                self._alarm.at(now_ns + AGAIN_NS)
                return
            if clock.engine_ns() >= until:
                break
        if (least := self._due.least) is not None:
            self._alarm.at(max(least[0], clock.engine_ns() + 1))
        if self._round:
            self._alarm.at(clock.engine_ns() + 1)
        elif self.overdue:
            self._alarm.at(self._next_round_ns)

    def _due_streams(self, now_ns: int, until: int) -> Iterator[int]:
        """Yield the streams with messages to append: those with a newly due one, then a round of those without room."""
        while (least := self._due.least) is not None and least[0] <= now_ns:
            _, sequence = self._due.pop()
            if (number := self._streams.get(sequence)) is not None:
                line = self.overdue.setdefault(number, OrderedDict())
                line[sequence] = None
                if len(line) == 1:
                    yield number
                    continue
            if self._host.clock.engine_ns() >= until:
                return
        if not self._round and now_ns >= self._next_round_ns:
            self._round = list(self.overdue)
            self._round_ns, self._next_round_ns = now_ns, now_ns + AGAIN_NS
        while self._round:
            if (number := self._round.pop()) in self.overdue:
                yield number

    def _append_to(self, number: int, until: int) -> bool:
        """Append the overdue messages of a stream as far as there is room. False: the disk refused one."""
        line = self.overdue[number]
        while line:
            try:
                if not self._release(first := next(iter(line))):
                    return True
            except (errors.MqfsError, OSError) as error:
                text = f"delayed message {first} is due and cannot be appended: {error}"
                self._host.faults.report(self._host.number, text)
                return False
            if line and self._host.clock.engine_ns() >= until:
                self._round.append(number)
                return True
        del self.overdue[number]
        self._tried.pop(number, None)
        self._host.unblock()  # blocked writes come after due messages
        return True

    def _release(self, sequence: int) -> bool:
        """Append a due message to its stream, or drop it if it is damaged, too large, or its stream was removed.
        False: there is no room for it. Raises MqfsError and OSError if the disk refuses it."""
        number = self._streams[sequence]
        stream, publisher = self._host.numbers.get(number), self._host.publisher
        tried, size, head = self._tried.get(number, (0, 0, b""))
        message = self._message(sequence) if tried != sequence else None
        if stream is None or (message is None and tried != sequence):
            self.drop([sequence])  # its stream was removed, or it is damaged, which was reported
            return True
        if message is not None:
            size, head = len(message.body), message.headers
        verdict = self._admit(stream, sequence, size, head)
        if verdict is Admission.WAIT:
            if len(head) <= _HEAD_BYTES:
                self._tried[number] = sequence, size, head
            return False
        message = message or self._message(sequence)
        if verdict is Admission.DISCARD or message is None:
            self.drop([sequence])
            return True
        made = self._log.append_batch([message], acks=self.drop_steps([sequence]))
        self._forget(sequence)
        publisher.deliver_all(stream, made, [message], size)
        publisher.retention.bound_depth(stream)
        return True

    def _message(self, sequence: int) -> Draft | None:
        """Return a delayed message as it is appended to its stream; None: it is damaged."""
        record = self.record(sequence)
        if record is None:
            return None
        texts = headers.decode(record.headers)
        number = int(texts.pop(headers.TO))
        del texts[headers.DUE]
        texts[headers.HELD] = str(sequence)
        return Draft(Kind.MESSAGE, number, record.body, headers.encode(texts))

    def _admit(self, stream: Stream, sequence: int, size: int, head: bytes) -> Admission:
        """Return the verdict on a due message with a body of `size` bytes, which need not be read for that."""
        message = Draft(Kind.MESSAGE, stream.number, bytes(size), head)
        try:
            return self._host.publisher.admit_due(stream, request_of(message), charged=True)
        except errors.StreamFull:
            return Admission.WAIT
        except errors.TooLong as error:  # `depth` was changed since
            user = User(_user(headers.decode(head)), 0)
            self._host.refuse(user, stream.name, f"delayed message {sequence} dropped: {error}")
            return Admission.DISCARD

    def sequences(self, streams: Container[int]) -> Iterator[list[tuple[int, int]]]:
        """Yield the (sequence, stream) of the present delayed messages of these streams, oldest first: a list for each
        LOOKED_AT of all delayed messages, so that requests can be served between two lists."""
        waiting = list(self._streams)
        for at in range(0, len(waiting), LOOKED_AT):
            found = ((sequence, self._streams.get(sequence, 0)) for sequence in waiting[at : at + LOOKED_AT])
            yield [row for row in found if row[1] in streams]

    def record(self, sequence: int) -> Record | None:
        """Return the record of a delayed message; None: it is damaged, or no delayed message."""
        record = record_at(self._log.stored.reader, sequence)
        return record if record is not None and record.stream == PUT else None

    def drop(self, sequences: list[int]) -> None:
        """Drop delayed messages."""
        if sequences:
            self._log.acknowledge_all(self.drop_steps(sequences))
            self.dropped(sequences)

    def drop_steps(self, sequences: list[int]) -> list[AckSteps]:
        """Return the steps that drop these delayed messages."""
        own = self._log.state.nameless(PUT) if sequences else None
        if own is None:
            return []
        before = self._log.stored.reader.before
        return [(own, step(ACK, (before(sequence, PUT) or 0) + 1, sequence)) for sequence in sequences]

    def dropped(self, sequences: list[int]) -> None:
        """Forget delayed messages whose drop the log has."""
        for sequence in sequences:
            if sequence in self._streams:
                self._forget(sequence)

    def _forget(self, sequence: int) -> None:
        stream = self._streams.pop(sequence)
        if (line := self.overdue.get(stream)) is not None:
            line.pop(sequence, None)
        size, user, at_ns = self._sizes.pop(sequence)
        if at_ns:
            due_ns, count = self._at.pop(at_ns)
            if count > 1:
                self._at[at_ns] = due_ns, count - 1
        self.schedules.removed(sequence)
        self._shares.release(user)
        self._bytes[stream] -= stored(1, size)
        self._counts[stream] -= 1
        if not self._counts[stream]:
            del self._bytes[stream], self._counts[stream]
            self._log.state.removed.pop(stream, None)


def _user(texts: Mapping[str, str]) -> int:
    """Return the user who wrote a message with these headers."""
    return int(texts.get(headers.SENDER, "0"))
