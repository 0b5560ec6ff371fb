"""Flow control: whether a message of a consumer may be claimed now, and what allows it later.

A consumer without rules (state/rules.py) has no Flow. A consumer with rules checks them before each claim:

    paused    no claims until `resume`, or until its time, when the alarm of the consumer rings
    limit     the end of any claim makes room
    rate      spreads deliveries evenly: the alarm rings when the next is due. Unused ones are saved for _SLACK_NS only
    key       the end of a claim of the same key makes room. Messages of other keys, or without one, do not wait

The search continues after a message that waits for its key. So the message stays here until it is claimed:

    key `a`   claimed 3                waiting 5, 9      5 is next: when 3 is acked, or a dead letter
    key `b`   failed 4, in its backoff waiting 6         `order key`: 6 goes after 4, or when 4 was removed
    key `c`                            waiting 7         it may be claimed; the parked reads may not read its stream

Memory: a row for each claimed or failed message, as in `progress.unacked`, and a row for each message that waits here.
With `limits.KEY_WAITING` of these the search stops until one is claimed.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from mqfs import limits
from mqfs.engine.core.log import record_at
from mqfs.engine.core.portions import Work
from mqfs.engine.core.timers import AGAIN_NS
from mqfs.engine.retention.low_watermark import LowWatermark
from mqfs.model import NEVER, Record, Step, Wait
from mqfs.records.headers import key_of
from mqfs.state.rules import TRIPPED

if TYPE_CHECKING:
    from mqfs.engine.delivery.consumer import Consumer
    from mqfs.engine.delivery.dispatcher import Dispatcher
    from mqfs.engine.group import Group

_FEW = 64  # messages looked up in less than a millisecond
_LOOK_NS = 200_000  # from one check for removed messages to the next, for each failed one: 20 times what that takes
_SLACK_NS = 10**8  # deliveries of this time may be made at once: no alarm for each of a thousand a second
Rank = tuple[int, int, int, int]  # as PriorityIndex.key: the least is first; [2] is the sequence
PAUSED, BREAKER, LIMIT, RATE, KEY = "paused", "breaker", "limit", "rate", "key"


class Flow:
    """The rules that concern all messages of a consumer."""

    __slots__ = ("_claims", "_dead", "_group", "_next_ns", "_set_alarm", "own")

    def __init__(self, owner: Consumer) -> None:
        self._group, self.own, self._claims = owner.group, owner.state, owner.claims
        self._set_alarm = owner.alarm.at  # serves the reads again at an engine time
        self._next_ns = 0  # when the next delivery is due, by the rate
        self._dead: deque[int] = deque()  # engine times of dead letters, no more than the breaker counts

    def reason(self) -> str:
        """Return why nothing may be claimed now; empty: messages may be claimed."""
        rules, now = self.own.rules, self._group.clock.engine_ns()
        if rules.is_paused(now):
            return BREAKER if rules.paused == TRIPPED else PAUSED
        if rules.limit and len(self._claims) >= rules.limit:
            return LIMIT
        return RATE if rules.rate[0] and not self._count_due(now) else ""

    def room(self) -> int:
        """Return the number of messages that may be claimed now. If it is 0 and time makes room, set the alarm."""
        rules, now = self.own.rules, self._group.clock.engine_ns()
        if rules.is_paused(now):
            if rules.paused > 0:
                self._set_alarm(rules.paused)
            return 0
        room = max(rules.limit - len(self._claims), 0) if rules.limit else NEVER
        if room and rules.rate[0]:
            room = min(room, self._count_due(now))
            if not room:
                self._set_alarm(self._next_ns - self._slack())
        return room

    def _interval(self) -> int:
        count, per_ns = self.own.rules.rate
        return per_ns // count

    def _slack(self) -> int:
        return max(_SLACK_NS - self._interval(), 0)

    def _count_due(self, now_ns: int) -> int:
        """Return the number of deliveries that the rate allows now."""
        late = now_ns + self._slack() - max(self._next_ns, now_ns)
        return late // self._interval() + 1 if late >= 0 else 0

    def on_delivered(self, count: int = 1) -> None:
        if self.own.rules.rate[0]:
            self._next_ns = max(self._next_ns, self._group.clock.engine_ns()) + count * self._interval()

    # ------------------------------------------------------------ breaker

    def is_broken(self) -> bool:
        """Count a dead letter. Return whether there are more than the breaker allows within its time."""
        count, per_ns = self.own.rules.breaker
        if not count:
            return False
        now = self._group.clock.engine_ns()
        self._dead.append(now)
        while self._dead[0] <= now - per_ns or len(self._dead) > count + 1:
            self._dead.popleft()
        return len(self._dead) > count

    def on_rules_changed(self) -> None:
        """Forget the dead letters counted for the breaker, and have the next delivery due within one interval of the
        rate: the rules changed, or the consumer was resumed."""
        self._dead.clear()
        if not self.own.rules.rate[0]:
            self._next_ns = 0
        elif self._next_ns:
            self._next_ns = min(self._next_ns, self._group.clock.engine_ns() + self._interval())


# ------------------------------------------------------------ keys


class KeyQueue:
    """The messages of one key that the search has met and that are not acked."""

    __slots__ = ("claimed", "failed", "waiting")

    def __init__(self) -> None:
        self.claimed: set[int] = set()
        self.failed = LowWatermark()  # released or failed, to be delivered again; the name of a sequence is itself
        self.waiting: list[Rank] = []  # a heap, with stale rows of claimed or removed messages


class Keys:
    """Which messages of a consumer may be claimed, given the unacked messages of their keys."""

    __slots__ = ("_check", "_check_again_ns", "_group", "_keys", "_ordered", "_per_key", "_progress", "_queues",
                 "_search", "_seen", "_serve", "_set_alarm", "_waits")  # fmt: skip

    def __init__(self, group: Group, flow: Flow, search: Dispatcher, serve: Callable[[], None]) -> None:
        self._group, self._progress, self._search = group, flow.own.progress, search
        self._set_alarm, self._serve = flow._set_alarm, serve
        self._ordered, self._per_key = flow.own.rules.ordered, flow.own.rules.per_key
        self._queues: dict[bytes, KeyQueue] = {}
        self._keys: dict[int, bytes] = {}  # of each message that is in a queue
        self._waits: dict[int, Rank] = {}  # ranks of the messages that wait
        self._seen = (-1, -1)  # `_count_removals` at the last check whether the failed messages are there
        self._check: Step[int] = 0  # that check, while it continues; or how many delayed messages it met
        self._check_again_ns = 0  # engine time, before which there is no other

    def load(self) -> Work[None]:
        """Load the messages that were delivered before, in steps: a message that changes meanwhile is entered then."""
        unacked = self._progress.unacked
        for sequence in list(unacked):
            yield
            entry = unacked.get(sequence)
            if entry is None or sequence in self._keys:
                continue
            record = record_at(self._group.log.reader, sequence)
            if record is not None and (key := key_of(record.headers)):
                self._keys[sequence] = key
                queue = self._queue(key)
                if entry.claimed:
                    queue.claimed.add(sequence)
                else:
                    queue.failed.set(sequence, sequence)

    def _queue(self, key: bytes) -> KeyQueue:
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = KeyQueue()
        return queue

    @property
    def is_full(self) -> bool:
        """Whether no more messages may wait."""
        return len(self._waits) >= limits.KEY_WAITING

    def __len__(self) -> int:
        """Return the number of messages that wait."""
        return len(self._waits)

    def may_go(self, record: Record, rank: Rank) -> bool:
        """Whether the other messages of its key allow a message to be claimed."""
        key = key_of(record.headers)
        queue = self._queues.get(key) if key else None
        if queue is None:
            return True
        if len(queue.claimed) >= self._per_key:
            return False
        if self._ordered and (failed := self._first_failed(queue)):
            return record.sequence == failed
        before = len(queue.waiting)
        while queue.waiting and self._is_stale(queue.waiting[0]):
            heapq.heappop(queue.waiting)
        if 0 < len(queue.waiting) < before:
            self._search.offer(queue.waiting[0])
        return not queue.waiting or rank <= queue.waiting[0]

    def is_next_after(self, record: Record) -> bool:
        """Whether a blocked message waits only for a failed one that is free. Then the next claim must examine it
        again, as the failed one may have been removed."""
        queue = self._queues[key_of(record.headers)]
        return not queue.claimed and bool(queue.failed) and self._search.is_free(queue.failed.value)

    def _first_failed(self, queue: KeyQueue) -> int:
        """Return the first message of a key that is to be delivered again; 0: there is none. Remove those that
        expired."""
        while queue.failed:
            first = queue.failed.value
            if not self._search.is_free(first) or self._search.is_kept(first):
                return first
            self._remove(first, queue)
        return 0

    def _is_stale(self, rank: Rank) -> bool:
        """Whether a row is obsolete: its message was claimed, acked unread, or removed."""
        sequence = rank[2]
        if self._waits.get(sequence) != rank:
            return True
        if self._search.is_free(sequence) and self._search.is_kept(sequence):
            return False
        self._forget(sequence)
        return True

    def _forget(self, sequence: int) -> None:
        self._waits.pop(sequence, None)
        if sequence not in self._progress.unacked:
            self._keys.pop(sequence, None)

    def wait(self, record: Record, rank: Rank) -> bool:
        """Enter a message that waits for its turn. False: it has no key."""
        key = key_of(record.headers)
        if key and rank[2] not in self._waits:
            self._waits[rank[2]] = rank
            self._keys[rank[2]] = key
            heapq.heappush(self._queue(key).waiting, rank)
        return bool(key)

    # ------------------------------------------------------------ changes of a message

    def on_claimed(self, record: Record) -> None:
        sequence, key = record.sequence, key_of(record.headers)
        if not key:
            return
        queue = self._queue(key)
        self._keys[sequence] = key
        queue.failed.remove(sequence)
        queue.claimed.add(sequence)
        self._waits.pop(sequence, None)
        self._offer_next(key, queue)

    def on_settled(self, sequence: int) -> None:
        """Update the queue of a message whose claim ended, or that was acked unread."""
        key = self._keys.get(sequence)
        if key is None:
            return
        queue = self._queues[key]
        queue.claimed.discard(sequence)
        if sequence in self._progress.unacked and self._search.is_kept(sequence):
            queue.failed.set(sequence, sequence)
        else:
            self._remove(sequence, queue)
        self._offer_next(key, queue)

    def on_gone(self, sequence: int) -> None:
        """Remove a message that the search found to be no longer retained."""
        if (key := self._keys.get(sequence)) is not None:
            queue = self._queues[key]
            self._remove(sequence, queue)
            self._offer_next(key, queue)

    @property
    def is_outdated(self) -> bool:
        """Whether messages were removed since the last check of the failed ones."""
        return self._seen != self._count_removals()

    def _count_removals(self) -> tuple[int, int]:
        """Return numbers that change whenever messages are removed or expire."""
        retention = self._group.retention
        return retention.removals, retention.expiry.expired_before()

    def release_removed(self) -> None:
        """Release the keys of failed messages that were removed during their back-off. The search itself finds those
        removed after it. Many are checked in portions and seldom, as each write may evict a message."""
        now_ns = self._group.clock.engine_ns()
        if isinstance(self._check, Wait) and not self._check.settled:
            return
        if now_ns < self._check_again_ns:
            self._set_alarm(self._check_again_ns)
            return
        self._seen, self._check_again_ns = self._count_removals(), now_ns + AGAIN_NS
        self._check = self._group.portions.run(self._check_failed())
        if isinstance(self._check, Wait):
            self._check.subscribe(self._end_check)
        else:
            self._check_again_ns = now_ns + (self._check * _LOOK_NS if self._check > _FEW else 0)

    def _check_failed(self) -> Work[int]:
        """Release the keys of removed messages, in steps. Return the number of delayed messages that were checked."""
        delayed = 0
        for queue in list(self._queues.values()):
            for sequence in list(queue.failed):
                if sequence in queue.failed and not self._search.is_free(sequence):
                    delayed += 1
                    if not self._search.is_kept(sequence):
                        self.on_gone(sequence)
                yield
        return delayed

    def _end_check(self, check: Wait[int]) -> None:
        self._check_again_ns = self._group.clock.engine_ns() + AGAIN_NS
        self._serve()

    def _remove(self, sequence: int, queue: KeyQueue) -> None:
        queue.failed.remove(sequence)
        self._waits.pop(sequence, None)
        self._keys.pop(sequence, None)

    def _offer_next(self, key: bytes, queue: KeyQueue) -> None:
        """Offer the messages of a key that may be claimed next."""
        waiting, waits = queue.waiting, self._waits
        while waiting and waits.get(waiting[0][2]) != waiting[0]:
            heapq.heappop(waiting)
        if not (queue.claimed or queue.failed or waiting):
            del self._queues[key]
        elif len(queue.claimed) < self._per_key:
            first = queue.failed.value if self._ordered and queue.failed else 0
            if first in waits:
                self._search.offer(waits[first])
            if waiting and not (first and not self._search.is_free(first)):
                self._search.offer(waiting[0])

    def on_due(self, sequence: int) -> None:
        """Offer the next messages of a key: one of its messages may be delivered again."""
        if (key := self._keys.get(sequence)) is not None:
            self._offer_next(key, self._queues[key])

    def offer_all(self) -> Work[None]:
        """Offer the next messages of all keys, while the known messages are loaded again. In steps."""
        for key, queue in list(self._queues.items()):
            if self._queues.get(key) is queue:
                self._offer_next(key, queue)
            yield
