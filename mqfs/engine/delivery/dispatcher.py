"""Which message a receiver of a consumer gets next.

Requeued and urgent messages stand in the heap `_ready`; all others are only in the log, from `_scan_position` on. Each
message below that is acked, or unacked and in `progress.unacked`. So memory grows with what is claimed, requeued or
urgent, never with the backlog.

    sequences         1 2 3 4 5 6 7 8 9     `.` of other streams, `u` urgent, `r` requeued, `m` not looked at
                      . r . . m . u m m     `_gap_start` 3, `_scan_position` 3, `_ready` [7, 2]
    the next claims   7, as it is urgent; 2, as it is older than all that a scan finds; then the scan: 5 in slot [3, 5]

The claim of 5 says `slot 3 to 5`: 3 and 4 have nothing for the consumer, and the acks of neighbours join to one range.
Past 7, which is known, the slot [6, 6] holds no message. It is a gap, and acked with the next claim after it: a later
`bind`, which applies after the newest claim, may show a message there until then.

A receiver that may not have the first message of `_ready` gets its own heap (`OwnHeap`), and each message is examined
once for it.

A search that passes over many messages, of `_ready` or of the log, continues in portions for its receiver. It ends at a
message for the receiver, or at the end that the log had when it began. Each step stores both positions,
`_scan_position` and the receiver's `scanned_to`. Until the search ends the receiver gets no message. A claim that does
not wait ends when `has_looked` is true.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from mqfs import errors, limits
from mqfs.engine.core import multipart
from mqfs.engine.core.portions import Work
from mqfs.engine.delivery.flow import Flow, Keys
from mqfs.engine.delivery.priorities import DeliveryAttributes, Key, OwnHeap
from mqfs.model import NEVER, Kind, Record, RecordRun, Wait
from mqfs.records.headers import NORMAL, key_of
from mqfs.state.acks import ACK, Ranges, Unacked, step

if TYPE_CHECKING:
    from mqfs.engine.delivery.consumer import Consumer
    from mqfs.engine.files.claiming import ClaimingHandle
    from mqfs.engine.group import Group

MESSAGE = int(Kind.MESSAGE)
_FEW = 64  # messages looked up in less than a millisecond
_STEPS = 256  # between two looks at the clock, so that a busy machine does not divide a short look-up
Next = tuple[Record, int, int]  # a message, the first sequence of its slot, its failed deliveries


def visible_record(group: Group, sequence: int, unacked: bool = False) -> Record | None:
    """Return the message of that sequence; None if it is damaged, expired, evicted or dropped, or its stream was
    removed. `unacked`: a consumer is known that has not acked it."""
    try:
        record = group.log.reader.scan(sequence)
    except errors.Damaged:
        return None
    if record is None or record.sequence != sequence:
        return None
    stream = group.numbers.get(record.stream)
    return record if stream is not None and stream.kept.visible(record, unacked) else None


class Dispatcher:
    """The search for a consumer's next message. It claims nothing: the consumer does, and calls `on_claimed`."""

    __slots__ = (
        "_by_expiry",
        "_coverage",
        "_deadlines",
        "_gap_start",
        "_group",
        "_keys",
        "_loading",
        "_looked",
        "_offered",
        "_offered_most",
        "_order",
        "_progress",
        "_ranks",
        "_ready",
        "_receivers",
        "_scan_position",
        "_scans",
        "_waiting",
        "flow",
        "gaps",
        "on_looked",
        "slots",
    )

    def __init__(self, owner: Consumer) -> None:
        group, progress = owner.group, owner.progress
        self._group, self._ranks, self._waiting = group, group.ranks, group.waiting
        self._progress, self._coverage, self._deadlines = progress, owner.coverage, owner.deadlines
        self._receivers = owner.receivers
        self._scan_position = progress.ack_floor  # where to look next
        self._gap_start = progress.ack_floor  # where the slot of the message found there begins
        # slots without a message for it, (last, first), ascending: acked with the next claim after them
        self.gaps: list[tuple[int, int]] = []
        self._ready: list[Key] | None = None  # known messages, perhaps free; None: the next claim loads them
        self._loading: list[Key] | None = None  # `_ready` while it is loaded; no claims meanwhile
        self._offered: list[Key] | None = None  # rows of `_ready` by arrival, for receivers with an OwnHeap
        self._scans: set[ClaimingHandle] = set()  # receivers whose search continues in portions
        self._looked: ClaimingHandle | None = None  # its search has just ended: see `_end_scan`
        self.on_looked: Callable[[], None] = lambda: None  # serves reads after a load or a search
        self._offered_most = 0  # rows, before `_offered` is made again
        self._order = 0  # the group's order_version when `_ready` was loaded
        self.slots = Ranges()  # of messages unacked at the load, without the messages: see `divide`
        self.flow: Flow | None = None  # the consumer's rules; None: no rules
        self._keys: Keys | None = None  # with a rule about keys, from the first claim on
        self._by_expiry = False  # whether messages wait in `_keys` in order of expiry

    def search_again(self) -> None:
        """Restart the search at the ack floor: the consumer was moved, or its streams, selection or keys have
        changed."""
        self._scan_position = self._gap_start = self._progress.ack_floor
        self._ready, self._offered, self._loading, self._keys, self.gaps = None, None, None, None, []
        for receiver in self._receivers:
            receiver.scanned_to = 0

    def reopen(self, sequence: int) -> None:
        """Exclude a message from every slot, so that it can be delivered again."""
        if self._gap_start <= sequence < self._scan_position:
            self._close_gap(sequence)
            self._gap_start = sequence + 1
        self._divide_gap(sequence, sequence)

    def _close_gap(self, end: int) -> None:
        """Record a gap that ends before `end`. Leave out the slots of messages at its end that expired in flight, which
        the scan does not meet: their receivers ack these."""
        last = end - 1
        while last >= self._gap_start and (entry := self._progress.unacked.get(last)) is not None:
            last = entry.first - 1
        if last >= self._gap_start:
            self._add_gap(self._gap_start, last)

    def _add_gap(self, first: int, last: int) -> None:
        row = last, first
        at = bisect_left(self.gaps, row)
        if self.gaps[at : at + 1] != [row]:
            self.gaps.insert(at, row)

    def _divide_gap(self, first: int, last: int) -> None:
        """Exclude the slot [first, last] of a message from the gap that holds the message."""
        at = bisect_left(self.gaps, (last,))
        if at < len(self.gaps) and self.gaps[at][1] <= last:
            end, begin = self.gaps.pop(at)
            if begin < first:
                self._add_gap(begin, first - 1)
            if last < end:
                self._add_gap(last + 1, end)

    def release_cache(self) -> None:
        """Drop `_ready` when no receiver is open. Keep it if it has many requeued messages: a worker that opens for
        each message would load them each time. Urgent messages, which all consumers share, are no reason to keep it."""
        if self._ready is None or self._loading is not None:
            return
        if not _FEW < len(self._ready) <= 2 * len(self._progress.unacked):
            self._ready = self._offered = None

    def gap_steps(self, sequence: int) -> bytes:
        """Return the steps that ack the gaps before a message to be claimed."""
        return b"".join([step(ACK, first, last) for last, first in self.gaps[: bisect_left(self.gaps, (sequence,))]])

    # ------------------------------------------------------------ known messages

    def make_ready(self, sequence: int, entry: Unacked) -> None:
        """Offer a message that is not claimed, or set its deadline if it is delayed."""
        if entry.claimed:
            return
        if entry.due_ns > self._group.clock.engine_ns():
            self._deadlines.set(entry.due_ns, sequence)
        elif self._ready is not None:
            record = visible_record(self._group, sequence)
            rank = DeliveryAttributes(0, NORMAL, NEVER)  # removed: the search finds that, and its slot is acked
            self.offer(self._ranks.key(sequence, rank) if record is None else self._key(record))
            if self._keys is not None:
                self._keys.on_due(sequence)

    def add_requeued(self, sequence: int, stream: int) -> None:
        """Offer a requeued message. Whether it is retained is checked when its turn comes."""
        if self._ready is not None:
            rank = self._ranks.get(sequence) or DeliveryAttributes(stream, NORMAL, NEVER)
            heapq.heappush(self._ready, key := self._ranks.key(sequence, rank))
            if (offered := self._offered) is not None:
                offered.append(key)
                self._offered = offered if len(offered) <= self._offered_most else None
            if self._keys is not None:
                self._keys.on_due(sequence)

    def add_ranked(self, sequence: int, rank: DeliveryAttributes) -> None:
        """Offer a new message that has delivery attributes."""
        if self._ready is not None and not rank.continued and (rank.exclusive or not self._coverage.exclusives_only):
            self.offer(self._ranks.key(sequence, rank))
            if not self._receivers:
                self.release_cache()

    def offer(self, key: Key) -> None:
        """Add a message that may be free to those that the next claim chooses from."""
        if self._ready is not None:
            heapq.heappush(self._ready, key)
            if (offered := self._offered) is not None:
                offered.append(key)
                self._offered = offered if len(offered) <= self._offered_most else None

    def _load(self) -> bool:
        """Load the known messages. False: the load continues in portions, and `on_looked` is called at its end."""
        step = self._group.portions.run(self._load_ready())
        if not isinstance(step, Wait):
            return self._ready is not None
        step.subscribe(self._end_loading)
        return False

    def _end_loading(self, wait: Wait[None]) -> None:
        if not self._receivers:
            self.release_cache()
        self.on_looked()

    def _load_ready(self) -> Work[None]:
        if self._keys is not None and self._by_expiry != (self._group.log.settings.order == "expiry"):
            self.search_again()
        ready: list[Key] = []
        self._ready = self._loading = ready
        self._offered, self._offered_most = None, 0
        try:
            for _ in self._ranks.load():
                yield
                if self._loading is not ready:
                    return  # the position was moved
            for count, _ in enumerate(self._load_steps(), 1):
                if count % _STEPS == 0:
                    yield
                if self._loading is not ready:
                    return  # the position was moved
            self._loading = None
        except BaseException:
            if self._loading is ready:
                self._ready = self._loading = self._keys = None
            raise

    def _load_steps(self) -> Work[None]:
        """Load in steps; changes of a message between two steps are recorded as usual."""
        self._order, progress, only = self._group.order_version, self._progress, self._coverage.exclusives_only
        for sequence, rank in self._ranks.over(self._coverage.covers):
            if not (rank.continued or progress.is_acked(sequence)) and (rank.exclusive or not only):
                self.offer(self._ranks.key(sequence, rank))
            yield
        self.slots = slots = Ranges()
        for sequence in sorted(progress.unacked):
            if (entry := progress.unacked.get(sequence)) is not None:
                if self.is_free(sequence):  # a delay has its deadline already
                    self.make_ready(sequence, entry)
                if entry.first < sequence:
                    slots.add(entry.first, sequence - 1)
            yield
        yield from self._load_keys()
        if progress.unacked or self._keys is not None:
            yield from self._pass_known()

    def _key(self, record: Record) -> Key:
        rank = self._ranks.get(record.sequence) if record.headers else None
        return self._ranks.key(record.sequence, rank or DeliveryAttributes(record.stream, NORMAL, NEVER))

    # ------------------------------------------------------------ the next message

    @property
    def exhausted(self) -> bool:
        """Whether surely no receiver can get a message now, or the known messages are still being loaded."""
        if self._loading is not None:
            return True
        if self.flow is not None and not self.flow.room():
            return True
        if self._ready is None or self._ready or self._order != self._group.order_version:
            return False
        if self._keys is not None and self._keys.is_outdated:
            return False
        return self._coverage.exclusives_only or self._scan_position >= self._group.log.end.next

    def next_message(self, receiver: ClaimingHandle) -> Next | None:
        """Return the next message for this receiver, without claiming it. None: there is none, or the search continues
        in portions. Raises Damaged, once for each damaged record."""
        if self._loading is not None or (self.flow is not None and not self.flow.room()):
            return None
        if (self._ready is None or self._order != self._group.order_version) and not self._load():
            return None
        keys = self._keys
        if keys is not None and keys.is_outdated:
            keys.release_removed()
        while True:
            best = None
            if self._ready:
                best = self._best_ready(receiver) if keys is None else self._best_of_keys(receiver, keys)
            # A scan finds only messages of normal priority at or above its position. So an urgent message, or an older
            # requeued one, comes first without a look at the log. An earlier expiry needs that look.
            if best is not None and best[0] < (-NORMAL, 0, self._scan_position):
                return best[1]
            ended = self._coverage.exclusives_only or self._scan_position >= self._group.log.end.next
            found = None if ended else self._scan(receiver)
            if found is None and receiver in self._scans and receiver is not self._looked:
                return None  # the search may find a message that comes before the best known one
            if best is None or (found is not None and self._key(found[0]) < best[0]):
                return found
            if keys is None or keys.may_go(best[1][0], best[0]):
                return best[1]
            # The scan met an earlier message of the key, not for this receiver: look at the known messages again.

    def run_from(self, position: int, receiver: ClaimingHandle, messages: int, size: int, each: int) -> list[Record]:
        """Return up to `messages` messages from `position` on; empty if the scan is not there, or known messages come
        first. They have at most `size` bytes: headers, bodies and `each` bytes per message. The run ends before a
        message that is not ordinary, or is a part of a body."""
        found: list[Record] = []
        taken: set[bytes] = set()  # keys of the messages found
        if self._ready != [] or not position == self._gap_start == self._scan_position or self.slots.reaches(position):
            return found
        bound = position + limits.PASSED_MESSAGES * limits.SCANNED_MESSAGES  # with room for others between
        while len(found) < messages:
            try:
                record = self._find(position, max(bound - position, 1))
            except errors.Damaged:
                break  # the next search raises it
            if record is None or record.sequence >= receiver.end_sequence or self._judge(record) != _CLAIMABLE:
                break
            size -= each + len(record.headers) + len(record.body)
            if size < 0 or not receiver.may_receive(self._group.numbers[record.stream], record.sequence):
                break
            if record.headers and multipart.place(record.headers) != (0, 0):
                break
            if self._keys is not None and (key := key_of(record.headers)):
                if key in taken:
                    break
                taken.add(key)
            found.append(record)
            position, bound = record.sequence + 1, bound + 1
        return found

    def read_run(self, position: int, receiver: ClaimingHandle, messages: int, size: int) -> RecordRun | None:
        """As `run_from`, but return records as stored, at most `size` bytes of them. None: the caller must check each
        message, as one may be known, removed, or not for this receiver."""
        group, progress, coverage = self._group, self._progress, self._coverage
        if self._ready != [] or not position == self._gap_start == self._scan_position or coverage.exclusives_only:
            return None
        if progress.ack_floor > position or progress.acked_ranges.reaches(position) or self.slots.reaches(position):
            return None
        few, retention = coverage.filter.is_sparse(), group.retention
        if (
            self._keys is not None
            or few is None
            or retention.lapsed
            or group.state.dropped
            or max(retention.expiry.expired_before(), retention.tail) > position
        ):
            return None
        streams = {n for n in few if coverage.covers(group.numbers[n])}
        if not coverage.filter.by_stream or not all(
            group.numbers[n].state.floor <= position and receiver.may_receive_all(group.numbers[n]) for n in streams
        ):
            return None
        end = min(position + messages, receiver.end_sequence, group.log.end.next)
        return group.log.reader.read_run(position, end, size, streams, False) if streams else None

    def divide(self, sequence: int) -> bytes:
        """Return a step to record before the claim of a message; empty: none is needed. The message may lie in the slot
        of an unacked one, as the consumer covers it only now: an ack of that slot would ack it, so the step moves the
        slot's beginning past it. The restarted scan finds earlier messages of the slot."""
        owner = self.slots.end_of(sequence) + 1 if self.slots.reaches(sequence) else 0
        entry = self._progress.unacked.get(owner)
        if entry is None or not entry.first <= sequence < owner:
            return b""
        return entry.divided(sequence, owner)

    def on_claimed(self, sequence: int, first: int) -> None:
        """Move past a message that was claimed and recorded. If the scan found it, the next slot begins after it."""
        if self.gaps:
            del self.gaps[: bisect_left(self.gaps, (sequence,))]
            self._divide_gap(first, sequence)  # it lay in the slot of a removed one, as the consumer covers it only now
        if self.slots.firsts:
            self.slots.remove(sequence, sequence)
        if self._ready and self._ready[0][2] == sequence:
            heapq.heappop(self._ready)
        if sequence >= self._scan_position and first == self._gap_start:
            self._gap_start = self._scan_position = sequence + 1

    def _best_ready(self, receiver: ClaimingHandle, in_portions: bool = False) -> tuple[Key, Next] | None:
        """Return the best known message that this receiver may have. None: there is none, or the search continues in
        portions."""
        waiting, is_first, heap = self._waiting, self._waiting.left > 0, self._ready
        assert heap is not None
        while heap:
            if not self.is_free(heap[0][2]):
                heapq.heappop(heap)
                continue
            mine = heap
            if not self._may_have(receiver, heap[0]):
                own = self._own_of(receiver, heap)
                if not self._look_at_offered(own, receiver):
                    if in_portions or not self._go_on(receiver, is_first):
                        return None
                    in_portions = True  # the search has ended: do not start another
                    continue
                mine = own.heap
                while mine and not (self.is_free(mine[0][2]) and self._may_have(receiver, mine[0])):
                    heapq.heappop(mine)
                if not mine and own.end is None:
                    return None
                if not mine:
                    own.begin_again()
                    continue
            key = mine[0]
            sequence = key[2]
            record = visible_record(self._group, sequence, unacked=True)
            first, failed = self._slot(sequence, record)
            if record is not None and self._coverage.matches(self._group.numbers[record.stream], record):
                return key, (record, first, failed)
            self._add_gap(first, sequence)  # it expired, was evicted or dropped
            heapq.heappop(mine)
            waiting.left -= 1
            if waiting.left <= 0 and (in_portions or not self._go_on(receiver, is_first)):
                return None
        return None

    # ------------------------------------------------------------ rules, and keys

    @property
    def held_by_key(self) -> int:
        """Number of messages that wait for their key."""
        return len(self._keys) if self._keys is not None else 0

    def _load_keys(self) -> Work[None]:
        if self.flow is None or not self.flow.own.rules.per_key:
            return
        if self._keys is None:
            self._keys = Keys(self._group, self.flow, self, self._serve)
            self._by_expiry = self._group.log.settings.order == "expiry"
            yield from self._keys.load()
        yield from self._keys.offer_all()

    def is_kept(self, sequence: int) -> bool:
        """Whether a message is retained and for this consumer."""
        record = visible_record(self._group, sequence)
        return record is not None and self._coverage.matches(self._group.numbers[record.stream], record)

    def on_delivered(self, record: Record) -> None:
        """Count a claimed and recorded message for the rules."""
        if self.flow is not None:
            self.flow.on_delivered()
        if self._keys is not None:
            self._keys.on_claimed(record)

    def on_settled(self, sequence: int) -> None:
        """Update the key of a message whose claim ended, or that was acked unread."""
        if self._keys is not None:
            self._keys.on_settled(sequence)

    def _best_of_keys(self, receiver: ClaimingHandle, keys: Keys) -> tuple[Key, Next] | None:
        """Return the best known message that its key allows and that this receiver may have."""
        heap, again, found = self._ready, dict[Key, None](), None
        assert heap is not None
        while heap and found is None:
            key = heapq.heappop(heap)
            sequence = key[2]
            if key in again:
                continue
            if not self.is_free(sequence):
                if self._progress.is_acked(sequence):  # acked with another's slot: removed while it waited
                    keys.on_gone(sequence)
                continue
            record = visible_record(self._group, sequence)
            first, failed = self._slot(sequence, record)
            if record is None or not self._coverage.matches(self._group.numbers[record.stream], record):
                self._add_gap(first, sequence)
                keys.on_gone(sequence)
            elif not keys.may_go(record, key):
                keys.wait(record, key)
                if keys.is_next_after(record):
                    again[key] = None
            else:
                again[key] = None
                if self._may_have(receiver, key):
                    found = key, (record, first, failed)
                else:
                    keys.wait(record, key)
        for key in again:
            heapq.heappush(heap, key)
        return found

    # ------------------------------------------------------------ known messages, for a receiver

    def is_free(self, sequence: int) -> bool:
        """Whether a message is neither claimed, delayed nor acked."""
        entry = self._progress.unacked.get(sequence)
        if entry is None:
            return not self._progress.is_acked(sequence)
        return not entry.claimed and entry.due_ns <= self._group.clock.engine_ns()

    def _own_of(self, receiver: ClaimingHandle, heap: list[Key]) -> OwnHeap:
        """Return the receiver's own heap. If `heap` has doubled, first remove its rows that are not free or occur
        twice."""
        if self._offered is None:
            if len(heap) > self._offered_most > 0:
                heap[:] = {key for key in heap if self.is_free(key[2])}
                heapq.heapify(heap)
            self._offered, self._offered_most = heap.copy(), 2 * len(heap) + _FEW
        own, version = receiver.own_heap, self._group.reach_version
        if own is None or own.offered is not self._offered or (own.version != version and receiver not in self._scans):
            own = receiver.own_heap = OwnHeap(self._offered, version)
        return own

    def _look_at_offered(self, own: OwnHeap, receiver: ClaimingHandle) -> bool:
        """Examine newly offered messages for the receiver. False: the rest must be examined in portions."""
        waiting, offered = self._waiting, own.offered
        while own.seen < len(offered):
            if waiting.left <= 0:
                return False
            waiting.left -= 1
            if (key := own.next_offered()) is not None and self._may_have(receiver, key):
                own.add(key)
        return True

    def _may_have(self, receiver: ClaimingHandle, key: Key) -> bool:
        stream = self._group.numbers.get(key[3])
        return stream is None or receiver.may_receive(stream, key[2])  # stream removed: so is the message

    def _slot(self, sequence: int, record: Record | None) -> tuple[int, int]:
        """Return (first sequence of its slot, failed deliveries) of a known message."""
        if (entry := self._progress.unacked.get(sequence)) is not None:
            return entry.first, entry.failed
        return (sequence if record is None else multipart.first_of(self._group.log, record)), 0

    # ------------------------------------------------------------ the scan of the log

    def _scan(self, receiver: ClaimingHandle, in_portions: bool = False, may_go_on: bool = True) -> Next | None:
        """Return the first message in the log that no receiver has had and this one may have. None: there is none, or
        the search continues in portions. `may_go_on`: portions may begin."""
        group, waiting = self._group, self._waiting
        if receiver in self._scans and not in_portions:
            return None
        position, aside, is_first = self._scan_position, False, waiting.left > 0
        if receiver.scanned_to > position and receiver.scanned_version == group.reach_version:
            position, aside = receiver.scanned_to, True  # messages in between are not for this receiver
        while True:
            try:
                record = self._find(position)
            except errors.Damaged as error:
                if in_portions:
                    return None  # the next search raises it
                self._scan_position = max(self._scan_position, error.sequence + 1) if not aside else self._scan_position
                receiver.scanned_to, receiver.scanned_version = error.sequence + 1, group.reach_version
                raise
            if record is None:
                if not aside:
                    self._scan_position = max(position, group.log.end.next)
                return None
            if record.sequence >= receiver.end_sequence or (self._keys is not None and self._keys.is_full):
                return None
            first = record.sequence
            if record.headers and (last := multipart.last_of(group.log, record)) is not None:
                record = last  # a multipart body is claimed whole
            position = record.sequence + 1
            verdict = self._judge(record)
            if verdict == _CLAIMABLE:
                if receiver.may_receive(group.numbers[record.stream], record.sequence):
                    return record, first if aside else self._gap_start, 0
                if self._keys is not None and self._keys.wait(record, key := self._key(record)):
                    self.offer(key)  # to other receivers: the next of its key waits
                    verdict = _KNOWN
                aside = aside or verdict == _CLAIMABLE
            if verdict != _CLAIMABLE and not aside:
                position = self._go_past(record, first, verdict)
            if aside:
                receiver.scanned_to, receiver.scanned_version = position, group.reach_version
            waiting.left -= 1 + len(record.body) // limits.PASSED_BYTES
            if waiting.left <= 0 and position < group.log.end.next:
                if in_portions or not may_go_on or not self._go_on(receiver, is_first):
                    return None
                return self._scan(receiver, may_go_on=False)  # the result of the portions

    def _go_on(self, receiver: ClaimingHandle, is_first: bool) -> bool:
        """Continue the search in portions; return whether it has ended. `is_first`: run a portion now, as this is the
        first search of the current piece of work."""
        if receiver in self._scans:
            return False
        version, portions, work = self._group.reach_version, self._group.portions, self._scan_steps(receiver)
        if receiver.scanned_version != version:
            receiver.scanned_to = 0
        step = portions.run(work) if is_first else portions.later(work)
        self._waiting.left = 0
        if not isinstance(step, Wait):
            return True
        self._scans.add(receiver)
        step.subscribe(partial(self._end_scan, receiver, version))
        return False

    def _scan_steps(self, receiver: ClaimingHandle) -> Work[None]:
        """Search until there is a message for the receiver, which the next scan finds at once, or until the end that
        the log had. Changed names or permissions do not restart the search: with constant changes it would never
        end."""
        waiting, ready, end = self._waiting, self._ready, self._group.log.end.next
        while receiver in self._receivers and self._ready is ready:
            waiting.left, receiver.scanned_version = _FEW, self._group.reach_version
            if receiver.own_heap is not None:
                receiver.own_heap.version = receiver.scanned_version
            best = self._best_ready(receiver, in_portions=True) if ready and self._keys is None else None
            if waiting.left > 0:
                if self._coverage.exclusives_only or (best and best[0] < (-NORMAL, 0, self._scan_position)):
                    return
                found = self._scan(receiver, in_portions=True)
                if found is not None or waiting.left > 0 or self._looked_to(receiver) >= end:
                    return
            yield

    def _end_scan(self, receiver: ClaimingHandle, version: int, scan: Wait[None]) -> None:
        """Serve reads after a search in portions. Reads that do not wait end here, and a steady flow of new messages
        keeps no receiver from the known ones. If names or permissions changed meanwhile, search again for waiting
        reads: skipped messages may be for the receiver now."""
        group = self._group
        self._scans.discard(receiver)
        self._looked = receiver
        self._serve()
        self._looked = None
        if group.reach_version != version:
            receiver.scanned_to, receiver.own_heap = 0, None
            if receiver.waits:
                self._serve()

    def _serve(self) -> None:
        if not (self._group.removed or self._group.tree.closing):  # else the group ends the reads itself
            self._waiting.left = limits.PASSED_MESSAGES
            self.on_looked()

    def _looked_to(self, receiver: ClaimingHandle) -> int:
        return max(self._scan_position, receiver.scanned_to)

    def has_looked(self, receiver: ClaimingHandle, end: int) -> bool:
        """Whether the search has examined all messages below `end`, and the known ones, for the receiver. Then
        none of them is for it, or it has received them."""
        if self._loading is not None or receiver not in self._scans:
            return self._loading is None
        return receiver is self._looked and self._looked_to(receiver) >= end

    def _pass_known(self) -> Work[None]:
        """Move the scan to the first claimable message, in steps: many messages may come before it."""
        while not (self._coverage.exclusives_only or (self._keys is not None and self._keys.is_full)):
            try:
                record = self._find(self._scan_position)
            except errors.Damaged:
                return  # the next search raises it
            if record is None:
                self._scan_position = max(self._scan_position, self._group.log.end.next)
                return
            first = record.sequence
            if record.headers and (last := multipart.last_of(self._group.log, record)) is not None:
                record = last
            verdict = self._judge(record)
            if verdict == _CLAIMABLE:
                self._scan_position = first
                return
            self._go_past(record, first, verdict)
            yield

    def _go_past(self, record: Record, first: int, verdict: int) -> int:
        """Move the scan past a message that it does not deliver, and past acked messages after a known one. Return its
        new position."""
        position, progress = record.sequence + 1, self._progress
        if verdict == _KNOWN:
            self._close_gap(first)
            position = max(position, progress.acked_ranges.end_of(record.sequence) + 1, progress.ack_floor)
            self._gap_start = position
        self._scan_position = position
        return position

    def _find(self, position: int, most: int = limits.SCANNED_MESSAGES) -> Record | None:
        """Return the first message from `position` on that may be for the consumer, or the last of `most` others. The
        newest message is not read again while it is delivered."""
        fresh, coverage = self._waiting.record_being_delivered, self._coverage
        if fresh is not None and fresh.sequence == position and coverage.covers(self._group.numbers[fresh.stream]):
            return fresh
        return coverage.filter.find(position, most)

    def _judge(self, record: Record) -> int:
        sequence, progress = record.sequence, self._progress
        if sequence in progress.unacked or progress.is_acked(sequence):
            return _KNOWN
        stream = self._group.numbers.get(record.stream)
        if stream is None or record.kind != MESSAGE or not self._coverage.matches(stream, record):
            return _SKIPPED
        if not stream.kept.visible(record, unacked=True):
            # Count it as removed now, before its slot is acked with the next message's.
            stream.kept.update_low_watermark()
            return _SKIPPED
        if record.headers and (rank := self._ranks.get(sequence)) is not None and not rank.continued:
            return _KNOWN  # `_ready` has it
        if self._keys is not None and not self._keys.may_go(record, key := self._key(record)):
            self._keys.wait(record, key)
            return _KNOWN
        return _CLAIMABLE


_CLAIMABLE, _SKIPPED, _KNOWN = range(3)  # verdicts of the scan on a message
