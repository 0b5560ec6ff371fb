"""The index of `replay key`: the newest message of every key of each stream, retained for later readers.

    the log       1 a  2 b  3 a  4 c  5 b  6 b=""     an empty message removes its key: no message of b stays
    rows          3 a, 4 c                            ascending: the older messages that a new reader gets
    `tail` 4      1 and 2 are trimmed, 5 and 6 are kept until all present readers have had them: see KeptRange

The index is made from the log, in portions, and catches up when it is used, so writes cost nothing more. It reads only
the headers of messages. The STATE record at the head of a segment has the index up to there (`GroupState.newest`). So
a start reads the log from there on, and the log may remove any older message without a row. All newer messages are kept
until the next segment begins: a message that removed a key must not be trimmed before the messages of that key.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import compress
from typing import TYPE_CHECKING

from mqfs import limits
from mqfs.engine.core.portions import Work, exhaust
from mqfs.model import NEVER, Head, Kind
from mqfs.records import headers

if TYPE_CHECKING:
    from mqfs.engine.group import Group
    from mqfs.engine.retention.retained import KeptRange
    from mqfs.engine.retention.retention import Retention
    from mqfs.engine.stream import Stream

_STEPS = 256  # messages between two checks of the clock: some 2 ms where each has a key
_ROWS = 64  # superseded rows allowed in any case; above it at most as many as rows that are alive
_SPECIAL = tuple(map(headers.key, (headers.SINGLE, headers.PART, headers.TTL)))


class NewestOfStream:
    """The rows of one stream, in columns. Superseded rows stay, not alive, until they are about half of all."""

    __slots__ = ("alive", "count", "firsts", "keys", "newest", "sequences", "sizes")

    def __init__(self) -> None:
        self.newest: dict[bytes | None, int] = {}  # sequence by key; None: of an EOF marker that ends the stream
        self.firsts: dict[int, int] = {}  # of multipart bodies: the first part by the last
        self.sequences, self.sizes, self.alive = array("Q"), array("I"), bytearray()
        self.keys: list[bytes | None] = []
        self.count = 0  # rows that are alive

    def add(self, key: bytes | None, sequence: int, size: int, first: int) -> None:
        """Append a row for the newest message of a key. `first`: the sequence of its body's first part."""
        self.newest[key] = sequence
        if first < sequence:
            self.firsts[sequence] = first
        self.sequences.append(sequence)
        self.sizes.append(size)
        self.alive.append(1)
        self.keys.append(key)
        self.count += 1

    def find(self, sequence: int) -> int:
        """Return the index of the row of a message; -1: it has none."""
        at = bisect_left(self.sequences, sequence)
        return at if at < len(self.sequences) and self.sequences[at] == sequence and self.alive[at] else -1

    def at_or_after(self, sequence: int) -> tuple[int, int] | None:
        """Return the first row at or after `sequence`: sequence and body bytes."""
        at = self.alive.find(1, bisect_left(self.sequences, sequence))
        return (self.sequences[at], self.sizes[at]) if at >= 0 else None

    def up_to(self, sequence: int, *, messages: bool = False) -> int:
        """Return the sequence of the last row up to `sequence`; 0: none. `messages`: without an EOF marker."""
        at = self.alive.rfind(1, 0, bisect_right(self.sequences, sequence))
        if messages and at >= 0 and self.keys[at] is None:
            at = self.alive.rfind(1, 0, at)
        return self.sequences[at] if at >= 0 else 0

    def count_messages(self, first: int, end: int) -> int:
        """Count the rows in [first, end), without an EOF marker."""
        return self.tally(first, end)[0] - (first <= self.newest.get(None, 0) < end)

    def tally(self, first: int, end: int) -> tuple[int, int]:
        """Return the (messages, body bytes) of the rows in [first, end)."""
        begin, to = bisect_left(self.sequences, first), bisect_left(self.sequences, end)
        return self.alive.count(1, begin, to), sum(self.sizes[begin:to])

    def messages(self) -> tuple[Sequence[int], Sequence[int]]:
        """Return sequences and body bytes of the rows, without an EOF marker."""
        alive = [present and key is not None for present, key in zip(self.alive, self.keys, strict=True)]
        return list(compress(self.sequences, alive)), list(compress(self.sizes, alive))

    def bodies(self) -> list[tuple[int, int]]:
        """Return the sequences of the first and last part of each body, without an EOF marker."""
        found = sorted(sequence for key, sequence in self.newest.items() if key is not None)
        return [(self.firsts.get(sequence, sequence), sequence) for sequence in found]

    def remove(self, sequence: int) -> list[tuple[int, int]]:
        """Remove the row of a message, and of the parts of its body before it. Returns their sequences and body
        bytes."""
        at = self.find(sequence)
        if at < 0:
            return []
        if self.newest.get(self.keys[at]) == sequence:
            del self.newest[self.keys[at]]
        gone = []
        first = self.firsts.pop(sequence, sequence)
        while at >= 0 and self.sequences[at] >= first:
            if self.alive[at]:
                gone.append((self.sequences[at], self.sizes[at]))
                self.alive[at] = self.sizes[at] = 0
                self.count -= 1
            at -= 1
        if len(self.alive) > 2 * self.count + _ROWS:
            self._shrink()
        return gone

    def _shrink(self) -> None:
        alive = self.alive
        self.sequences = array("Q", compress(self.sequences, alive))
        self.sizes = array("I", compress(self.sizes, alive))
        self.keys = list(compress(self.keys, alive))
        self.alive = bytearray(b"\1") * self.count

    def cut(self, floor: int) -> int:
        """Remove the rows below the sequence `floor`. Returns their number."""
        to, before = bisect_left(self.sequences, floor), self.count
        for at in range(to):
            if self.alive[at]:
                self.count -= 1
                self.firsts.pop(self.sequences[at], None)
                if self.newest.get(self.keys[at]) == self.sequences[at]:
                    del self.newest[self.keys[at]]
        del self.sequences[:to], self.sizes[:to], self.alive[:to], self.keys[:to]
        return before - self.count


NOTHING = NewestOfStream()  # shared by streams without rows


def look_up(retention: Retention) -> Work[None]:
    """Read the delivery headers from the log, and under `replay key` index the newest message of each key. Long work
    only just after a start."""
    yield from retention.ranks.load()
    while retention.newest is not None and not retention.newest.is_complete:
        yield from retention.newest.follow_in_steps()


class NewestPerKey:
    """The index of a group. The rows of each stream are in its `KeptRange.rows`."""

    def __init__(self, group: Group) -> None:
        self._group, self._log = group, group.log
        self.position, rows = self._log.state.newest or (0, ())  # the log is indexed below this sequence
        self._pending = deque(sorted((sequence, number) for number, mine in rows for sequence in mine))
        # `position` in the last encoded state, and in the STATE record of the newest segment.
        self._given = self._saved = self.position
        self.count = 0  # rows of all streams

    # ------------------------------------------------------------ made from the log

    @property
    def reach(self) -> int:
        """The sequence below which the index is complete. After a start the rows from the state are read first."""
        return self._pending[0][0] if self._pending else self.position

    @property
    def is_complete(self) -> bool:
        """Whether all of the log is indexed."""
        return not self._pending and self.position >= self._log.end.next

    def follow(self, most: int = limits.PASSED_MESSAGES) -> bool:
        """Index at most `most` more messages of the log. Whether the index is complete. Raises DiskFailed."""
        reader = self._log.reader
        while self._pending and most > 0:
            sequence, number = self._pending.popleft()
            most -= 1
            found = reader.heads(sequence, 1)
            if found and found[0].sequence == sequence and found[0].stream == number:
                self._add(found[0])
        while most > 0 and self.position < self._log.end.next:
            found = reader.heads(max(self.position, reader.first), most)
            for head in found:
                self.position = head.sequence + 1
                self._add(head)
            if not found:
                self.position = self._log.end.next
            most -= len(found)
        return self.is_complete

    def follow_in_steps(self) -> Work[None]:
        """Index all of the log, in portions."""
        while not self.follow(_STEPS):
            yield

    def follow_to_end(self) -> None:
        """Index all of the log at once, for callers that cannot wait, as at a start."""
        exhaust(self.follow_in_steps())

    def _add(self, head: Head) -> None:
        """Index the next message of the log."""
        stream = self._group.numbers.get(head.stream)
        if stream is None or not self.covers(stream) or head.sequence < stream.state.floor:
            return
        texts = headers.decode(head.headers) if any(name in head.headers for name in _SPECIAL) else {}
        if headers.SINGLE in texts:
            return  # an exclusive message: one receiver gets it, not readers
        kept = stream.kept
        if kept.rows is NOTHING:
            kept.rows = NewestOfStream()
        rows, first = kept.rows, head.sequence
        key = None if head.kind == Kind.END else headers.key_of(head.headers)
        part, _ = headers.parse_part(texts.get(headers.PART, ""))
        before = rows.newest.get(key, 0)
        if part > 1 and before and rows.sequences[-1] == before == head.sequence - 1:
            first = rows.firsts.pop(before, before)  # the next part of that body
        else:
            self._supersede(kept, before)
        self._supersede(kept, rows.newest.get(None, 0))
        is_removal = bool(key) and not (head.size or part or headers.TTL in texts)
        if not is_removal and kept.is_counted(head.sequence):
            rows.add(key, head.sequence, head.size, first)
            self.count += 1
            if self.count > limits.KEYS:
                self._bound(kept)

    def _supersede(self, kept: KeptRange, sequence: int) -> None:
        """Remove the row of a message that is no longer the newest of its key; 0: no message."""
        for gone, size in kept.rows.remove(sequence) if sequence else ():
            self.count -= 1
            if kept.state.floor <= gone < kept.tail:
                kept.on_deleted(size)
            self._group.retention.retention_changed()

    def _bound(self, kept: KeptRange) -> None:
        """Evict the oldest key of the stream, when the group has more than KEYS."""
        rows = kept.rows
        if rows.count > 1 and (oldest := rows.at_or_after(0)) is not None:
            self._supersede(kept, rows.newest[rows.keys[rows.find(oldest[0])]])
            self._group.counts.cut += 1

    def end(self) -> None:
        """Stop indexing, as this index is replaced or dropped: unfinished work on it ends."""
        self._pending.clear()
        self.position = NEVER

    # ------------------------------------------------------------ queries

    def covers(self, stream: Stream) -> bool:
        """Whether the stream is retained by keys: dead letters are not."""
        return stream.name != self._log.settings.dead

    def is_superseded(self, stream: Stream, sequence: int) -> bool:
        """Whether a message is not retained for later readers: a newer one of its key superseded or removed it."""
        return self.covers(stream) and stream.kept.rows.find(sequence) < 0

    def next_of(self, stream: Stream, sequence: int, end: int) -> int:
        """Return the sequence of the first row at or after `sequence`, at most `end`."""
        if not self.covers(stream):
            return sequence
        found = stream.kept.rows.at_or_after(sequence)
        return min(end, found[0]) if found is not None else end

    def bodies_of(self, stream: Stream) -> Iterable[tuple[int, int]]:
        """Return the first and last sequence of the newest body of each key; for dead letters of each message."""
        kept = stream.kept
        if self.covers(stream):
            return kept.rows.bodies()
        portions = list(self._log.metrics.listing({stream.number: kept.state.floor}, self._log.end.next))
        return [(s, s) for one in portions for s in one.columns(one.messages)[0] if not kept.is_deleted(s)]

    def replaced_in(self, stream: Stream, heads: Iterable[bytes]) -> tuple[int, int]:
        """Return the (messages, bytes) that messages with these headers would supersede below the tail."""
        kept, messages, size = stream.kept, 0, 0
        kept.update_low_watermark()
        for key in {headers.key_of(head) for head in heads}:
            sequence = kept.rows.newest.get(key, 0)
            first = kept.rows.firsts.get(sequence, sequence)
            if kept.state.floor <= first and sequence < kept.tail:
                gone, gone_size = kept.rows.tally(first, sequence + 1)
                messages, size = messages + gone, size + gone_size
        return messages, size

    # ------------------------------------------------------------ removal

    def remove(self, number: int, sequence: int) -> None:
        """Remove the row of a message of stream `number` that was dropped or expired. The caller uncounts the message;
        other parts of its body are uncounted here."""
        if (stream := self._group.numbers.get(number)) is None:
            return
        for gone, size in stream.kept.rows.remove(sequence):
            self.count -= 1
            if gone != sequence and stream.kept.state.floor <= gone < stream.kept.tail:
                stream.kept.on_deleted(size)

    def cut(self, kept: KeptRange) -> None:
        """Remove the rows of a stream below its floor."""
        if kept.rows.sequences and kept.rows.sequences[0] < kept.state.floor:
            self.count -= kept.rows.cut(kept.state.floor)

    def forget(self, number: int) -> None:
        """Uncount the rows of stream `number`, which is removed."""
        if (stream := self._group.numbers.get(number)) is not None:
            self.count -= stream.kept.rows.count

    def wanted(self, number: int, sequence: int) -> int:
        """Return the last message of stream `number`, up to `sequence`, that the log has to keep if it is above the
        stream's floor; 0: none. Messages that the newest segment's STATE record does not cover are all kept."""
        stream = self._group.numbers.get(number)
        if stream is None or not self.covers(stream) or sequence >= min(self.known, stream.kept.tail):
            return sequence
        return stream.kept.rows.up_to(sequence)

    @property
    def known(self) -> int:
        """The sequence below which a start would know the index. NEVER for a log in memory, which does not survive."""
        is_on_disk = not self._group.in_memory and self._log.settings.keep == "disk"
        return self._saved if is_on_disk else NEVER

    def save(self) -> None:
        """Put the index into the state, before it is encoded for the head of a segment."""
        if self._pending:
            return  # the rows in the state are still valid
        found = [(number, stream.kept.rows) for number, stream in self._group.numbers.items()]
        rows = [[number, list(compress(mine.sequences, mine.alive))] for number, mine in found if mine.count]
        self._log.remember_newest((self.position, rows))
        self._given = self.position

    def saved(self) -> None:
        """Count the saved index as known to a start: a segment begins with it. Not before, as the disk may have no room
        for the segment."""
        self._saved = self._given
