"""Redelivery: what becomes of a claim that is not acked.

A claim is released or nacked, its lease runs out, or its receiver closes. Then the message is requeued, or becomes a
dead letter. The table is LIFE in state/acks.py.

    `nack` of 7, backoff 2 s     REQUEUE 7, due in 2 s     a row in Deadlines; when it is due, 7 is ready
    a worker with 7 to 9 closes  REQUEUE 7, 8, 9           one record, or several portions of ReturnedClaims
    the last of `retries`        a dead letter + ACK 7     one batch: a crash neither loses nor doubles the message
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from mqfs import errors, limits
from mqfs.engine.core import multipart
from mqfs.engine.core.portions import Work
from mqfs.engine.core.timers import AGAIN_NS, LazyHeap
from mqfs.engine.delivery.dispatcher import visible_record
from mqfs.model import Draft, Kind, Record, User
from mqfs.records import batch, headers
from mqfs.records.batch import BatchSource, RecordBatch
from mqfs.state.acks import ACK, REQUEUE, State, Unacked
from mqfs.state.group import Attributes, Change, ConsumerState

if TYPE_CHECKING:
    from mqfs.engine.delivery.consumer import Claim, Consumer
    from mqfs.engine.group import Group
    from mqfs.engine.stream import Stream

# ------------------------------------------------------------ dead letters

_RECORD_BYTES = 100  # bytes of the records, beside bodies and headers


def append_dead_letter(
    group: Group, own: ConsumerState, record: Record, slot: int, deliveries: int, reason: str
) -> None:
    """Append a dead letter and the ack of its message as one batch. `slot`: the first sequence of the message's slot; a
    body whose parts all lie in it is copied whole. Raises StreamFull, DiskFailed, ReadOnly and others."""
    acks = [(own, own.progress.step(ACK, slot, record.sequence))]
    origin = group.numbers[record.stream]
    stream = _stream_for(group, origin)
    texts = headers.decode(record.headers)
    texts.pop(headers.TTL, None)  # the dead letter must not expire with it
    texts.update(
        {
            headers.STREAM: origin.name,
            headers.SEQUENCE: str(record.sequence),
            headers.DELIVERIES: str(deliveries),
            headers.REASON: reason,
        }
    )
    if own.name:
        texts[headers.CONSUMER] = own.name
    first = multipart.first_of(group.log, record)
    letter, size = _copy(group, first if slot <= first else record.sequence, record, stream, texts)
    sequence = group.log.append_batch(letter, acks=acks)
    group.publisher.deliver_all(stream, sequence, letter, size)


def _stream_for(group: Group, origin: Stream) -> Stream:
    """Return the dead-letter stream: make a missing one, and narrow its mode to users who may open the origin."""
    name, own = group.log.settings.dead, origin.state
    stream = group.streams.get(name)
    if stream is None:
        return group.make_stream(name, own.mode & 0o666, User(own.uid, own.gid))
    narrow = stream.state.mode & _open_to(own, stream.state)
    if narrow != stream.state.mode:
        now = stream.state
        group.log.change({"do": "attributes", "file": stream.number, "mode": narrow, "uid": now.uid, "gid": now.gid})
    return stream


def _open_to(origin: Attributes, letters: Attributes) -> int:
    """Return the mode that opens the dead-letter stream only to users who may open the origin. Where owner or group
    differ, users of one class here may be of several classes there."""
    user, group, other = origin.mode >> 6 & 7, origin.mode >> 3 & 7, origin.mode & 7
    if letters.gid != origin.gid:
        group = other = group & other
    if letters.uid != origin.uid:
        user, group, other = group & other, group & user, other & user
    return user << 6 | group << 3 | other


def _copy(group: Group, first: int, last: Record, to: Stream, texts: Mapping[str, str]) -> tuple[Sequence[Draft], int]:
    """Return (drafts of a message for another stream, bytes of its body), and reserve their room in the log. All parts
    from `first` on are copied. `texts`: headers for every part; each part keeps its own header `part`."""
    if first == last.sequence:
        draft = Draft(Kind.MESSAGE, to.number, last.body, headers.encode(texts))
        group.retention.reserve_room(len(draft.body) + len(draft.headers) + _RECORD_BYTES)
        return [draft], len(draft.body)

    def pieces() -> Iterator[bytes]:
        for record in multipart.parts(group.log, last.stream, first, last.sequence):
            part = headers.decode(record.headers).get(headers.PART, "")
            head = headers.encode({**texts, headers.PART: part})
            yield batch.concatenate([("", head, record.body)], {}).data

    source = BatchSource(last.sequence - first + 1, sum(map(len, pieces())), array("I", [to.number]), pieces)
    group.retention.reserve_room(source.stored_bytes + _RECORD_BYTES)
    return RecordBatch([source]), group.log.metrics.count(last.stream, first, last.sequence + 1)[1]


def redrive(group: Group, name: str | None, most: int | None) -> Work[None]:
    """Send dead letters back to the streams they came from, the oldest first. `name`: only those of that stream.
    `most`: limit of letters; None: no limit. A letter that failed again meanwhile stays. A letter sent from above a
    remaining one is remembered as dropped. Raises OverLimit, after sending earlier letters, if the group already
    remembers as many dropped messages as it may."""
    dead = group.streams.get(group.log.settings.dead)
    if dead is None:
        return
    dead.kept.update_low_watermark()
    moved, position, end = 0, dead.state.floor, group.log.end.next
    while (most is None or moved < most) and not dead.removed:
        record = _next_letter(group, dead, position)
        if record is None or record.sequence >= end:
            break
        last = multipart.last_of(group.log, record) or record
        position = last.sequence + 1
        texts = headers.decode(record.headers)
        origin = group.streams.get(texts.get(headers.STREAM, ""))
        if origin is not None and origin is not dead and name in (None, origin.name):
            more = {key: value for key, value in texts.items() if key not in headers.LETTER}
            _send_back(group, dead, record.sequence, last, origin, more)
            moved += 1
        yield


def _next_letter(group: Group, dead: Stream, position: int) -> Record | None:
    while True:
        try:
            record = group.log.reader.find(dead.number, position)
        except errors.Damaged as error:
            position = error.sequence + 1
            continue
        if record is None:
            return None
        if record.kind == Kind.MESSAGE and dead.kept.visible(record) and not _is_claimed(group, dead, record):
            return record
        position = record.sequence + 1


def _is_claimed(group: Group, dead: Stream, record: Record) -> bool:
    """Whether a receiver of the dead-letter stream's default consumer has claimed the letter."""
    own = group.log.state.consumers.get(dead.number)
    if own is None or not own.progress.unacked:
        return False
    last = multipart.last_of(group.log, record) or record
    return own.progress.of(last.sequence) is State.IN_FLIGHT


def _send_back(group: Group, dead: Stream, first: int, last: Record, origin: Stream, texts: dict[str, str]) -> None:
    messages, size = _copy(group, first, last, origin, texts)
    change: Change = {"do": "drop", "stream": dead.number, "sequences": list(range(first, last.sequence + 1))}
    if dead.kept.first_kept() == first:
        change = {"do": "floor", "floors": [[dead.number, last.sequence + 1]]}
    elif len(group.log.state.dropped) + len(change["sequences"]) > limits.DROPPED:
        raise errors.OverLimit(
            f"redrive: too many single messages (expected at most {limits.DROPPED} in a group; "
            f"first redrive or acknowledge the oldest letters of {dead.name!r}, or clear it)"
        )
    sequence = group.log.append_batch(messages, [change])
    group.retention.note_change()
    if first == last.sequence:
        dead.kept.on_deleted(size)
    else:
        dead.kept.recount()
    group.publisher.deliver_all(origin, sequence, messages, size)


# ------------------------------------------------------------ leases and delays


class Deadlines:
    """Ends of the leases of a consumer's claims, and of the delays of its requeued messages, with one alarm."""

    __slots__ = ("_claims", "_clock", "_progress", "_set_alarm", "_timers")

    def __init__(self, owner: Consumer) -> None:
        self._progress, self._claims = owner.progress, owner.claims
        self._clock, self._set_alarm = owner.group.clock, owner.alarm.at
        self._timers = LazyHeap(self._is_set)  # (engine ns, sequence)

    def clear(self) -> None:
        self._timers = LazyHeap(self._is_set)

    def renew(self, claim: Claim, lease_ns: int) -> None:
        """Start the lease of a claim again; `lease_ns` 0: no lease."""
        claim.deadline_ns = self._clock.engine_ns() + lease_ns if lease_ns else 0
        if lease_ns:
            self.set(claim.deadline_ns, claim.sequence)

    def set(self, due_ns: int, sequence: int) -> None:
        self._timers.push((due_ns, sequence))
        self._set_alarm(due_ns)

    def _is_set(self, row: tuple[int, int]) -> bool:
        """Whether a claim's lease, or a message's delay, still ends at that time."""
        due_ns, sequence = row
        if (claim := self._claims.get(sequence)) is not None:
            return claim.deadline_ns == due_ns
        entry = self._progress.unacked.get(sequence)
        return entry is not None and entry.due_ns == due_ns

    def run(self, now_ns: int, end: Callable[[int, int], None]) -> None:
        """Call `end(sequence, now_ns)` for each due timer. After a time slice leave the rest to the next alarm. A timer
        whose call fails stays."""
        until = self._clock.engine_ns() + int(limits.SLICE_S * 1e9)
        while (least := self._timers.least) is not None and least[0] <= now_ns:
            timer = self._timers.pop()
            try:
                end(timer[1], now_ns)
            except BaseException:
                self._timers.push(timer)
                raise
            if self._clock.engine_ns() >= until:
                break
        if (least := self._timers.least) is not None:
            self._set_alarm(max(least[0], now_ns + 1))  # other work is served before the rest


# ------------------------------------------------------------ returned claims

_AT_ONCE = 256  # claims requeued by one record: about a millisecond


class ReturnedClaims:
    """Claims of closed receivers, in flight until they are requeued: in portions, since there may be many.

    `requeue` is called with a portion and the reason. If it returns False, the portion's claims still in flight are
    retried later.
    """

    __slots__ = ("_claims", "_clock", "_queue", "_requeue", "_set_alarm")

    def __init__(self, owner: Consumer, requeue: Callable[[list[Claim], str], bool]) -> None:
        self._claims, self._clock, self._set_alarm = owner.claims, owner.group.clock, owner.alarm.at
        self._requeue = requeue
        self._queue: list[tuple[Iterator[Claim], str]] = []

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, claims: Iterable[Claim], reason: str, whole: bool) -> None:
        """Requeue claims. If that takes long and `whole` is false, leave the rest to the next alarm."""
        self._queue.append((iter(claims), reason))
        self.resume(whole)

    def resume(self, whole: bool) -> None:
        until = self._clock.engine_ns() + int(limits.SLICE_S * 1e9)
        while self._queue:
            claims, reason = self._queue[0]
            portion = list(islice(claims, _AT_ONCE))
            if len(portion) < _AT_ONCE:
                del self._queue[0]
            if not self._requeue([claim for claim in portion if self._claims.get(claim.sequence) is claim], reason):
                self._queue.append((iter(portion), reason))
                self._set_alarm(self._clock.engine_ns() + AGAIN_NS)
                return
            if self._queue and self._clock.engine_ns() >= until and not whole:
                self._set_alarm(self._clock.engine_ns() + 1)
                return


# ------------------------------------------------------------ redelivery


class Redelivery:
    """The ends of claims other than `ack`. Methods that record raise DiskFailed and ReadOnly; then nothing has
    changed."""

    __slots__ = ("_dispatcher", "_group", "_log", "_owner", "_progress", "_returned")

    def __init__(self, owner: Consumer) -> None:
        self._group, self._log, self._owner = owner.group, owner.group.log, owner
        self._dispatcher = owner.dispatcher
        self._progress = owner.progress
        self._returned = ReturnedClaims(owner, self._requeue_returned)

    def release(self, claim: Claim) -> None:
        """Requeue a claim at once, without counting a failure. An exclusive message that never failed here is then
        offered to all consumers."""
        owner, sequence = self._owner, claim.sequence
        stream, held = self._group.numbers.get(claim.stream), owner.held_exclusives
        if stream is None or claim.entry.failed or sequence not in held:
            self._requeue(claim, claim.entry.failed, 0)
            return
        held.discard(sequence)
        claim.remove()  # first: other consumers check whether it is claimed
        try:
            owner.exclusives.offer(
                stream, sequence, (owner.state, self._progress.step(REQUEUE, claim.entry.first, sequence))
            )
        except BaseException:
            held.add(sequence)
            owner.claims[sequence] = claim.receiver.claims[sequence] = claim
            raise
        if (entry := self._progress.unacked.get(sequence)) is not None:  # else another consumer has claimed it
            self._dispatcher.make_ready(sequence, entry)
        owner.reads.serve()

    def release_all(self, claims: Sequence[Claim]) -> None:
        """Release claims with one record of the log, and each exclusive message with its own."""
        held = self._owner.held_exclusives
        plain = [claim for claim in claims if claim.sequence not in held]
        step = self._progress.step
        if plain:
            steps = b"".join([step(REQUEUE, c.entry.first, c.sequence, c.entry.failed) for c in plain])
            self._log.acknowledge(self._owner.state, steps)
        for claim in plain:
            claim.remove()
            self._dispatcher.add_requeued(claim.sequence, claim.stream)
        for claim in claims:
            if claim.sequence in held:
                self.release(claim)
        if plain:
            self._owner.reads.serve()

    def nack(self, claim: Claim, reason: str, delay_ns: int | None = None) -> None:
        """Record a failed delivery: requeue the message after `delay_ns` (None: as `backoff` says), or make it a dead
        letter after the last of `retries`."""
        settings, failed = self._log.settings, claim.deliveries
        if not (settings.retries and failed >= settings.retries and self.move_to_dead(claim, reason)):
            self._requeue(claim, failed, settings.backoff_after(failed) if delay_ns is None else delay_ns)
        self._owner.counts.failed += 1

    def _requeue(self, claim: Claim, failed: int, delay_ns: int) -> None:
        if claim.sequence in self._owner.held_exclusives and self._owner.exclusives.offer_uncovered(claim):
            return
        if delay_ns and visible_record(self._group, claim.sequence, unacked=True) is None:
            delay_ns = 0  # expired or removed: the next message of its key must not wait for it
        due_ns = self._group.clock.engine_ns() + delay_ns if delay_ns else 0
        steps = self._progress.step(REQUEUE, claim.entry.first, claim.sequence, failed, due_ns)
        self._log.acknowledge(self._owner.state, steps)
        claim.remove()
        self._dispatcher.make_ready(claim.sequence, self._progress.unacked[claim.sequence])
        if not due_ns or self._owner.flow is not None:  # with rules, the end of a claim may make room for another
            self._owner.reads.serve()

    # ------------------------------------------------------------ dead letters

    def move_to_dead(self, claim: Claim, reason: str) -> bool:
        """Make the claimed message a dead letter; one that was removed, or is for this consumer no longer, is only
        acked. False: it stays, as it is a dead letter already, or its letter could not be written."""
        group, owner = self._group, self._owner
        stream = group.numbers.get(claim.stream)
        if stream is not None and stream.name == self._log.settings.dead:
            return False
        record = self._shown_record(claim.sequence)
        if record is None:
            self._log.acknowledge(owner.state, self._progress.step(ACK, claim.entry.first, claim.sequence))
            owner.counts.acknowledged += 1
        else:
            try:
                append_dead_letter(group, owner.state, record, claim.entry.first, claim.deliveries, reason)
            except (errors.MqfsError, OSError) as error:
                text = f"dead letter of message {claim.sequence} not written: {error}"
                group.refuse(claim.receiver.user, self._log.settings.dead, text)
                return False
        claim.remove()
        owner.backlog.on_acked(claim.sequence, claim.stream, claim.size, claim.is_multipart)
        if record is not None:
            owner.on_dead()
        elif owner.flow is not None:
            owner.reads.serve()
        return True

    def _shown_record(self, sequence: int) -> Record | None:
        """Return the claimed message; None where it was removed, or the consumer does not cover it any more. Then only
        other readers and consumers decide how long it is retained, so whether it still is does not matter."""
        record = visible_record(self._group, sequence)
        if record is None or not self._owner.coverage.matches(self._group.numbers[record.stream], record):
            return None
        return record

    # ------------------------------------------------------------ closed receivers

    def nack_all(self, claims: Iterable[Claim], reason: str) -> None:
        """Requeue claims whose receiver has ended; while the server stops, their deliveries do not count as failed.
        Many claims are requeued in portions, and stay in flight until then."""
        self._returned.add(claims, reason, self._group.tree.closing)

    @property
    def has_returned(self) -> bool:
        """Whether claims of closed receivers are still in flight."""
        return bool(self._returned)

    def _requeue_returned(self, claims: list[Claim], reason: str) -> bool:
        """Requeue claims with one record of the log, and each dead letter and each exclusive message with its own.
        False: the log refused them, as on a full disk."""
        owner, settings = self._owner, self._log.settings
        plain: list[Claim] = []
        try:
            if owner.removed or self._group.removed:
                raise errors.NotFound(f"consumer {owner.state.name!r}: removed")
            counted = not self._group.tree.closing
            for claim in claims:
                if not counted and claim.sequence in owner.held_exclusives:
                    self.release(claim)
                elif counted and settings.retries and claim.deliveries >= settings.retries:
                    self.nack(claim, reason, 0)
                elif claim.sequence in owner.held_exclusives and owner.exclusives.offer_uncovered(claim):
                    owner.counts.failed += 1
                else:
                    plain.append(claim)
            steps = [self._progress.step(REQUEUE, c.entry.first, c.sequence, c.entry.failed + counted) for c in plain]
            if steps:
                self._log.acknowledge(owner.state, b"".join(steps))
        except errors.MqfsError:
            if not (owner.removed or self._group.removed or self._group.tree.closing or self._log.end.failed):
                return False
            for claim in claims:
                claim.remove()  # not recorded: the next start requeues it
            return True
        owner.counts.failed += len(plain) if counted else 0
        for claim in plain:
            claim.remove()
            self._dispatcher.add_requeued(claim.sequence, claim.stream)
        owner.reads.serve()
        return True

    # ------------------------------------------------------------ time, and the start

    def on_timer(self, now_ns: int) -> None:
        """Nack claims whose lease ran out, deliver messages whose delay is over, requeue returned claims, and retry the
        removal of a transient consumer."""
        self._group.waiting.left = limits.PASSED_MESSAGES
        if self._returned or self._owner.removal_due:
            self._returned.resume(self._group.tree.closing)
            self._owner.on_handle_closed()
        self._owner.deadlines.run(now_ns, self._end_timer)
        self._owner.reads.serve()

    def _end_timer(self, sequence: int, now_ns: int) -> None:
        claim, entry = self._owner.claims.get(sequence), self._progress.unacked.get(sequence)
        if claim is not None:
            if claim.deadline_ns and claim.deadline_ns <= now_ns:
                self.nack(claim, "the lease ran out")
        elif entry is not None and not entry.claimed and entry.due_ns <= now_ns:
            self._dispatcher.make_ready(sequence, entry)

    def recover(self) -> None:
        """Requeue the claims from before a start, counted as failed, and continue delays."""
        owner, retries = self._owner, self._log.settings.retries
        if owner.coverage.stream is None or owner.coverage.exclusives_only:
            claimed = (s for s, entry in self._progress.unacked.items() if entry.claimed or entry.failed)
            owner.held_exclusives.update(s for s in claimed if self._group.ranks.is_exclusive(s))
        for sequence, entry in list(self._progress.unacked.items()):
            if entry.claimed:
                entry.claimed, entry.failed, entry.due_ns = False, entry.failed + 1, 0
                if retries and entry.failed >= retries:
                    self._bury_lost(sequence, entry)
            elif entry.due_ns:
                owner.deadlines.set(entry.due_ns, sequence)

    def _bury_lost(self, sequence: int, entry: Unacked) -> None:
        """Make a dead letter of a message whose last allowed delivery was in flight when the server was killed; one
        that was removed, or is for this consumer no longer, is acked."""
        group, owner = self._group, self._owner
        record = self._shown_record(sequence)
        if record is not None and group.numbers[record.stream].name == self._log.settings.dead:
            return
        try:
            if record is None:
                self._log.acknowledge(owner.state, self._progress.step(ACK, entry.first, sequence))
                return
            append_dead_letter(group, owner.state, record, entry.first, entry.failed, "the server ended")
        except (errors.MqfsError, OSError):
            return  # it is delivered again
        owner.held_exclusives.discard(sequence)
        owner.on_dead()
