"""An index of a group's messages with a priority or ttl of their own, and of its exclusive messages.

It takes about 200 B of memory for each such retained message. All other messages are only in the log.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, NamedTuple, cast

from mqfs import errors, limits
from mqfs.engine.core import multipart
from mqfs.engine.core.log import record_at
from mqfs.engine.core.portions import Work, exhaust
from mqfs.engine.core.timers import LazyHeap
from mqfs.model import NEVER, Record
from mqfs.records import headers
from mqfs.records.headers import NORMAL
from mqfs.syntax.duration import parse_duration

if TYPE_CHECKING:
    from mqfs.engine.group import Group
    from mqfs.engine.stream import Stream

_HEADS = 1_024  # messages whose headers are read together
_NOTED = 64  # messages entered between two looks at the clock: some 1 ms
_OWN = 1_024  # messages that a full OwnHeap keeps: 8 B each
_STEPS = 256  # messages between two looks at the clock: some 0.1 ms


_PRIORITIES = {str(priority): priority for priority in range(10)}


def _duration(text: str) -> int:
    """Return nanoseconds; 0 if the text is not a duration, as the header did not come through `.put`."""
    try:
        return parse_duration(text) if len(text) <= 64 else 0
    except errors.BadCommand:
        return 0


_PRIORITY, _TTL, _SINGLE = headers.key(headers.PRIORITY), headers.key(headers.TTL), headers.key(headers.SINGLE)


class DeliveryAttributes(NamedTuple):
    """Attributes of delivery, from the headers of a message. `expires_ns`: engine time; NEVER without an own ttl.
    `continued`: a part of a body but the last, with which the body is delivered."""

    stream: int
    priority: int
    expires_ns: int
    exclusive: bool = False
    continued: bool = False


Key = tuple[int, int, int, int]  # (-priority, expiry, sequence, stream): the least is delivered first


class OwnHeap:
    """A heap of free messages that one receiver may have, used when it may not have the first of all.

    `offered` are all known messages in order of arrival, of which the first `seen` were examined. A full heap has only
    messages below `end`. Once it is empty, `offered` is examined again, without the messages below that `end`.
    """

    __slots__ = ("_again", "_begin", "end", "heap", "offered", "seen", "version")

    def __init__(self, offered: list[Key], version: int) -> None:
        self.offered, self.version = offered, version
        self.heap: list[Key] = []
        self.seen, self.end = 0, cast(Key | None, None)
        self._again, self._begin = 0, cast(Key | None, None)  # of the first `_again`, those below `_begin` were tried

    def next_offered(self) -> Key | None:
        """Return the next message to examine; None: an earlier heap had it."""
        key, self.seen = self.offered[self.seen], self.seen + 1
        return None if self._begin is not None and self.seen <= self._again and key < self._begin else key

    def add(self, key: Key) -> None:
        """Add a message that the receiver may have."""
        if self.end is None or key < self.end:
            heapq.heappush(self.heap, key)
            if len(self.heap) > 2 * _OWN:
                first = heapq.nsmallest(_OWN + 1, self.heap)
                self.heap, self.end = first[:-1], first[-1]

    def begin_again(self) -> None:
        """Start to examine all offered messages again: the heap is empty, and there are more."""
        self._again, self._begin = self.seen, self.end
        self.seen, self.end = 0, None


class PriorityIndex:
    """Delivery attributes by sequence, read from the log when first needed and then kept up to date. Claims and
    maintenance have it read in portions. Meanwhile `of` uses the headers of its message; every other query reads the
    rest at once."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._messages: dict[int, DeliveryAttributes] | None = None
        self._loading: Work[None] | None = None  # the rest of the log to be read
        self.is_complete = False  # the whole log was read
        self._expiring = LazyHeap(self._is_present)  # (engine ns, sequence)
        self.by_stream: dict[int, list[int]] = {}  # sequences of exclusive messages, ascending

    def _all(self) -> dict[int, DeliveryAttributes]:
        if not self.is_complete:
            exhaust(self.load())
        assert self._messages is not None
        return self._messages

    def load(self) -> Work[None]:
        """Read the index from the log, in steps; a short log at once."""
        if self._messages is None:
            self._messages, self._loading = {}, self._look()
        while (loading := self._loading) is not None:
            try:
                next(loading)
            except StopIteration:
                self._loading, self.is_complete = None, True
            except BaseException:
                self._messages = self._loading = None  # to be read again
                self._expiring, self.by_stream = LazyHeap(self._is_present), {}
                raise
            else:
                yield

    def _look(self) -> Work[None]:
        bucket = self._group.log.bucket
        position = bucket.reader.first
        while position < bucket.end.next:
            found, position = bucket.reader.search_headers(position, _HEADS, (_PRIORITY, _TTL, _SINGLE))
            left = _NOTED
            for sequence in found:
                left -= 1 + self._note_found(sequence) // limits.PASSED_BYTES
                if left <= 0:
                    left = _NOTED
                    yield
            if position < bucket.end.next:
                yield

    def _note_found(self, sequence: int) -> int:
        """Record a message that may have attributes, unless it is damaged. Return the bytes of its body."""
        record = record_at(self._group.log.reader, sequence)
        if record is None:
            return 0
        if record.stream in self._group.numbers:
            self.note(record)
        return len(record.body)

    def note(self, record: Record) -> DeliveryAttributes | None:
        """Record a message with headers that was found or appended. Return its attributes; None: it has none."""
        rank = self._rank(record)
        if rank is not None:
            if self._messages is None:
                next(self.load(), None)
            messages = cast(dict[int, DeliveryAttributes], self._messages)
            if record.sequence in messages:  # the load has just read it
                return messages[record.sequence]
            messages[record.sequence] = rank
            if rank.expires_ns != NEVER:
                self._expiring.push((rank.expires_ns, record.sequence))
                self._group.retention.expire_at(rank.expires_ns, rank.stream)
            if rank.exclusive:
                bisect.insort(self.by_stream.setdefault(rank.stream, []), record.sequence)
        return rank

    def _rank(self, record: Record) -> DeliveryAttributes | None:
        head = record.headers
        if not (_PRIORITY in head or _TTL in head or _SINGLE in head):
            return None
        texts = headers.decode(head)
        priority = _PRIORITIES.get(texts.get(headers.PRIORITY, ""), NORMAL)
        ttl = _duration(texts.get(headers.TTL, ""))
        expires = self._group.log.times.written_ns(record) + ttl if ttl else NEVER
        exclusive = headers.SINGLE in texts
        if priority == NORMAL and expires == NEVER and not exclusive:
            return None
        continued = headers.PART in texts and multipart.has_next_part(record)
        return DeliveryAttributes(record.stream, priority, expires, exclusive, continued)

    def __len__(self) -> int:
        return len(self._all())

    def get(self, sequence: int) -> DeliveryAttributes | None:
        return self._all().get(sequence)

    def exclusives(self, stream: int) -> list[int]:
        """Return the sequences of a stream's exclusive messages, ascending; ExclusiveMessages removes the first ones
        once they are claimed."""
        self._all()
        return self.by_stream.setdefault(stream, []) if self.by_stream else []

    def streams_with_exclusives(self) -> Collection[int]:
        """Return the streams that have, or had, exclusive messages."""
        self._all()
        return self.by_stream.keys()

    def all_exclusives(self) -> set[int]:
        """Return the sequences of all exclusive messages, claimed or not."""
        messages = self._all()
        return {sequence for sequence, rank in messages.items() if rank.exclusive} if self.by_stream else set()

    def is_exclusive(self, sequence: int) -> bool:
        rank = self._all().get(sequence)
        return rank is not None and rank.exclusive

    def of(self, record: Record) -> DeliveryAttributes | None:
        """As `get`, for a message that was read: until the index is complete its headers are used."""
        if not record.headers:
            return None
        return self.get(record.sequence) if self.is_complete else self._rank(record)

    def is_hidden(self, record: Record) -> bool:
        """Whether the message is exclusive: only a claim delivers it."""
        rank = self.of(record)
        return rank is not None and rank.exclusive

    def over(self, covers: Callable[[Stream], bool]) -> Iterator[tuple[int, DeliveryAttributes]]:
        """Yield (sequence, attributes) of the messages in streams for which `covers` is true, from a snapshot."""
        for sequence, rank in list(self._all().items()):
            stream = self._group.numbers.get(rank.stream)
            if stream is not None and covers(stream):
                yield sequence, rank

    def key(self, sequence: int, rank: DeliveryAttributes) -> Key:
        """Return the place of a message in the order of delivery: the least is delivered first."""
        expires = 0
        if self._group.log.settings.order == "expiry":
            expires = min(rank.expires_ns, self._group.retention.expiry.expires_by_ttl(sequence))
        return (-rank.priority, expires, sequence, rank.stream)

    def expired(self, now_ns: int, most: int) -> list[tuple[int, int]]:
        """Return (sequence, stream) of messages whose own ttl ended since the last call, at most `most`."""
        messages = self._all()
        gone: list[tuple[int, int]] = []
        for _ in range(most):
            if (least := self._expiring.least) is None or least[0] > now_ns:
                break
            _, sequence = self._expiring.pop()
            rank = messages.get(sequence)
            if rank is not None:
                gone.append((sequence, rank.stream))
        return gone

    def _is_present(self, row: tuple[int, int]) -> bool:
        return self._messages is not None and row[1] in self._messages

    def count_expiring(self) -> int:
        """Return the number of rows of messages whose own ttl may not have ended; some are of removed messages."""
        return len(self._expiring)

    @property
    def next_expiry_ns(self) -> int:
        """When the next own ttl ends, in engine time; NEVER if none does."""
        return NEVER if (least := self._expiring.least) is None else least[0]

    def remove(self, sequence: int) -> None:
        """Remove a message that is no longer retained."""
        rank = self._all().pop(sequence, None) if self._messages is not None else None
        if rank is not None and rank.exclusive:
            sequences = self.by_stream[rank.stream]
            at = bisect.bisect_left(sequences, sequence)
            del sequences[at : bisect.bisect_right(sequences, sequence, at)]

    def forget(self) -> Iterator[None]:
        """Remove all messages that are no longer retained. In steps."""
        numbers = self._group.numbers
        messages = self._all() if self._messages is not None else {}
        for count, (sequence, rank) in enumerate(list(messages.items())):
            stream = numbers.get(rank.stream)
            if stream is None or sequence < stream.state.floor:
                messages.pop(sequence, None)
            if count % _STEPS == 0:
                yield
        if len(self._expiring) > 2 * len(messages):
            yield from self._expiring.examine_all()
        for number, sequences in list(self.by_stream.items()):
            if (stream := numbers.get(number)) is None:
                del self.by_stream[number]
            else:
                del sequences[: bisect.bisect_left(sequences, stream.state.floor)]
