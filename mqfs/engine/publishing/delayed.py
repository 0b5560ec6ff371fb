"""Messages that wait on disk for their time (`.put` with `delay` or `at`).

A delayed message lies in the log under the number of `.put`, so in no stream; when it is due it is
appended again, to its stream, and acknowledged here in the same batch. After a crash it is in one place or the other,
and in its stream it stands where it could first be read. It was accepted, so where its stream has no room by then it
waits here, also where a write would be refused.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from mqfs import errors, limits
from mqfs.engine.core.log import AckSteps, record_at
from mqfs.engine.core.timers import AGAIN_NS, DELAYED, ROUND_NS, Alarm
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

_HEAD_BYTES = 1_024  # of headers that are remembered of a message without room; with more it is read at each look
_APART_NS = 10**9  # by which what the two clocks say of one `at` may differ, where none was set
_SPARE = 64
LOOKED_AT = 1_000  # messages at once, for those of some streams: 0.1 ms


class DelayedMessages:
    """The messages of a group that wait for their time."""

    def __init__(self, host: Group) -> None:
        self._host, self._log = host, host.log
        self._due: list[tuple[int, int]] = []  # (engine ns, sequence)
        self._at: dict[int, int] = {}  # wall times that `at` named -> engine ns, also of some that are past
        self.overdue: dict[int, deque[int]] = {}  # by stream: sequences that are due and wait for room
        self._tried: dict[int, tuple[int, int, bytes]] = {}  # by stream: the first of those, bytes of its body, headers
        self._round: list[int] = []  # streams of those in which it is still to be tried
        self._round_ns = self._next_round_ns = 0  # engine time at which it was tried in all of them, and will be
        self._streams: dict[int, int] = {}  # sequence -> the stream it is for
        self._sizes: dict[int, tuple[int, int]] = {}  # sequence -> bytes of body and headers, and who put it
        self._shares = UserLimits("delayed messages in a group", "HELD")
        self._bytes: Counter[int] = Counter()  # by stream
        self._counts: Counter[int] = Counter()
        self._known = False  # all of them are
        self.schedules = Schedules(host, self)
        self._alarm = Alarm(host.timers, host, DELAYED, "appending what is due", self._append_due)

    def __len__(self) -> int:
        return len(self._streams)

    def start(self) -> None:
        """Find them in the log that was read."""
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
                    removed.setdefault(number, _user(texts))  # as older logs do not say whose it was
                if headers.NEXT in texts:
                    self.schedules.load(record.sequence, texts)
                else:
                    self._add(record.sequence, int(texts[headers.DUE]))

    @property
    def floor(self) -> int:
        """The lowest sequence that one may have; 0 where there is none."""
        return next(iter(self._streams), 0) if self._known else 1  # they come in ascending order

    def put(
        self,
        stream: Stream,
        body: bytes,
        texts: dict[str, str],
        due_ns: int,
        changes: Sequence[Change] = (),
        acks: Sequence[AckSteps] = (),
    ) -> int:
        """Keep a message until then, and record those changes and steps with it; returns the sequence it has here. That
        of a schedule, which has `next`, is published by it. Raises OverLimit, OverQuota, TooLong, StreamFull."""
        self._shares.check(user := _user(texts))
        overdue = min(len(self.overdue.get(stream.number, ())), self._counts[stream.number])  # not those dropped since
        if overdue >= max(limits.HELD // 2, 1):
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
        self._count(sequence, stream.number, len(body) + len(head), user)
        if headers.NEXT not in texts:
            self._add(sequence, due_ns)
        self.end_reads(sequence)
        return sequence

    def due_at(self, at_ns: int, due_ns: int) -> int:
        """When messages for that wall time are due, which is engine time `due_ns` as the clocks were read now. They are
        read one after the other: what was written first is due no later than what follows."""
        if len(self._at) > 2 * len(self._streams) + _SPARE:
            now = self._host.clock.engine_ns()
            self._at = {at: due for at, due in self._at.items() if due > now}
            if len(self._at) > len(self._streams) + _SPARE:
                self._at.clear()  # most were dropped before their time
        known = self._at.get(at_ns, 0)
        if due_ns < known < due_ns + _APART_NS:
            due_ns = known
        self._at[at_ns] = due_ns
        return due_ns

    def end_reads(self, sequence: int) -> None:
        """End the reads that end at a message which was appended here: no delivery does."""
        ends = self._host.publisher.consumers.read_ends
        if self._log.shown is None:
            ends.end_reads()
        else:
            self._log.hold(sequence, lambda _: ends.end_reads())

    def _count(self, sequence: int, stream: int, size: int, user: int) -> None:
        self._shares.release(user, -1)
        self._streams[sequence] = stream
        self._sizes[sequence] = size, user
        self._bytes[stream] += stored(1, size)
        self._counts[stream] += 1

    def _add(self, sequence: int, due_ns: int) -> None:
        heapq.heappush(self._due, (due_ns, sequence))
        self._alarm.at(due_ns)

    def replaced(self, sequence: int, new: int) -> None:
        """One was published, and another of the same stream and size, about, waits from now on: that was recorded."""
        self._count(new, self._streams[sequence], *self._sizes[sequence])
        self._forget(sequence)

    def bytes_of(self, stream: int) -> int:
        """What a quota of its owner is charged for those."""
        return self._bytes[stream]

    def targets(self, stream: Stream, sequence: int) -> bool:
        return self._streams.get(sequence) == stream.number

    def retry(self) -> None:
        """Something may have made room for what is due."""
        now = self._host.clock.engine_ns()
        if self.overdue:
            self._next_round_ns = min(self._next_round_ns, max(self._round_ns + ROUND_NS, now))
            self._alarm.at(self._next_round_ns)
        self.schedules.retry(now)

    def _append_due(self, now_ns: int) -> None:
        """Append what is due; after a slice the rest later. Messages without room wait in order, by stream."""
        clock = self._host.clock
        until = clock.engine_ns() + int(limits.SLICE_S * 1e9)
        for number in self._due_streams(now_ns, until):
            if not self._append_to(number, until):
                self._alarm.at(now_ns + AGAIN_NS)
                return
            if clock.engine_ns() >= until:
                break
        if self._due:
            self._alarm.at(max(self._due[0][0], clock.engine_ns() + 1))
        if self._round:
            self._alarm.at(clock.engine_ns() + 1)
        elif self.overdue:
            self._alarm.at(self._next_round_ns)

    def _due_streams(self, now_ns: int, until: int) -> Iterator[int]:
        """The streams to which something is to be appended: as it becomes due, and in rounds those without room."""
        while self._due and self._due[0][0] <= now_ns:
            _, sequence = heapq.heappop(self._due)
            number = self._streams.get(sequence)
            if number is None:
                continue
            line = self.overdue.setdefault(number, deque())
            line.append(sequence)
            if len(line) == 1:
                yield number
            elif self._host.clock.engine_ns() >= until:
                return
        if not self._round and now_ns >= self._next_round_ns:
            self._round = list(self.overdue)
            self._round_ns, self._next_round_ns = now_ns, now_ns + AGAIN_NS
        while self._round:
            if (number := self._round.pop()) in self.overdue:
                yield number

    def _append_to(self, number: int, until: int) -> bool:
        """Append what is overdue for a stream, as far as there is room. False: the disk does not take it."""
        line = self.overdue[number]
        while line:
            try:
                if line[0] in self._streams and not self._release(line[0]):
                    return True
            except (errors.MqfsError, OSError) as error:
                text = f"delayed message {line[0]} is due and cannot be appended: {error}"
                self._host.faults.report(self._host.number, text)
                return False
            line.popleft()
            if line and self._host.clock.engine_ns() >= until:
                self._round.append(number)
                return True
        del self.overdue[number]
        self._tried.pop(number, None)
        self._host.unblock()  # writes that came later
        return True

    def _release(self, sequence: int) -> bool:
        """False: there is no room for it. Raises MqfsError and OSError where the disk does not take it."""
        number = self._streams[sequence]
        stream, publisher = self._host.numbers.get(number), self._host.publisher
        tried, size, head = self._tried.get(number, (0, 0, b""))
        message = self._message(sequence) if tried != sequence else None
        if stream is None or (message is None and tried != sequence):
            self.drop([sequence])  # its stream is gone, or it is damaged, which was reported
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
        """As it is appended to its stream; None: it is damaged."""
        record = self.record(sequence)
        if record is None:
            return None
        texts = headers.decode(record.headers)
        number = int(texts.pop(headers.TO))
        del texts[headers.DUE]
        texts[headers.HELD] = str(sequence)
        return Draft(Kind.MESSAGE, number, record.body, headers.encode(texts))

    def _admit(self, stream: Stream, sequence: int, size: int, head: bytes) -> Admission:
        """Whether there is room for a body of `size` bytes: it need not be read to learn that."""
        message = Draft(Kind.MESSAGE, stream.number, bytes(size), head)
        try:
            return self._host.publisher.admit_due(stream, request_of(message), charged=True)
        except errors.StreamFull:
            return Admission.WAIT
        except errors.TooLong as error:  # `depth` is another one by now
            user = User(_user(headers.decode(head)), 0)
            self._host.refuse(user, stream.name, f"delayed message {sequence} dropped: {error}")
            return Admission.DISCARD

    def sequences(self, streams: Container[int]) -> Iterator[list[tuple[int, int]]]:
        """Those for these streams that wait now, oldest first, each with its stream: a list of each LOOKED_AT of all,
        so that others may be served between two, however many wait for other streams."""
        waiting = list(self._streams)
        for at in range(0, len(waiting), LOOKED_AT):
            found = ((sequence, self._streams.get(sequence, 0)) for sequence in waiting[at : at + LOOKED_AT])
            yield [row for row in found if row[1] in streams]

    def record(self, sequence: int) -> Record | None:
        """None: it is damaged, or is not delayed any more."""
        record = record_at(self._log.stored.reader, sequence)
        return record if record is not None and record.stream == PUT else None

    def drop(self, sequences: list[int]) -> None:
        """Drop these."""
        if sequences:
            self._log.acknowledge_all(self.drop_steps(sequences))
            self.dropped(sequences)

    def drop_steps(self, sequences: list[int]) -> list[AckSteps]:
        """The steps that drop these."""
        own = self._log.state.nameless(PUT) if sequences else None
        if own is None:
            return []
        before = self._log.stored.reader.before
        return [(own, step(ACK, (before(sequence, PUT) or 0) + 1, sequence)) for sequence in sequences]

    def dropped(self, sequences: list[int]) -> None:
        """That was recorded."""
        for sequence in sequences:
            if sequence in self._streams:
                self._forget(sequence)

    def _forget(self, sequence: int) -> None:
        stream = self._streams.pop(sequence)
        size, user = self._sizes.pop(sequence)
        self.schedules.removed(sequence)
        self._shares.release(user)
        self._bytes[stream] -= stored(1, size)
        self._counts[stream] -= 1
        if not self._counts[stream]:
            del self._bytes[stream], self._counts[stream]
            self._log.state.removed.pop(stream, None)


def _user(texts: Mapping[str, str]) -> int:
    """Who put a message with these headers."""
    return int(texts.get(headers.SENDER, "0"))
