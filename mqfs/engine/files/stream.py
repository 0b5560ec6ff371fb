"""Open streams: writing, and reading under `deliver all`. Claiming handles are in claiming.py.

A handle has an unfinished line, and a position in the stream.

An open `.kept/STREAM` shows the retained messages as one finite file. A small snapshot is copied when it is opened. Of
a large one only the places of the messages are stored: a read of a message that was removed meanwhile fails, and never
returns other bytes. Under `replay key`, just after a start, the keys are looked up first.
"""

from __future__ import annotations

import contextlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, islice

import attrs

from mqfs import errors, limits
from mqfs.engine.core.portions import Work
from mqfs.engine.delivery.waiting import WaitList
from mqfs.engine.files.handle import OpenFile, PreparedFile
from mqfs.engine.files.readers import Reader
from mqfs.engine.nodes import SnapshotNode
from mqfs.engine.publishing.admission import WriteRequest
from mqfs.engine.retention.newest import look_up
from mqfs.engine.stream import Stream
from mqfs.model import Kind, Record, Step, User, Wait
from mqfs.records import headers


@attrs.define
class LinePost(WriteRequest):
    """A write of complete lines, which may wait for room. `before` and `rest`: the handle's unfinished line before and
    after it."""

    before: bytes = b""
    rest: bytes = b""
    follows: LinePost | None = None  # the handle's next write
    refused: bool = False

    def give_back(self) -> bool:
        """Give the unfinished line before a refused write to the handle's next write. False: there is none."""
        self.refused = True
        behind = self.follows
        while behind is not None and behind.refused:
            behind = behind.follows
        if behind is None:
            return False
        size = len(self.rest)
        behind.before = self.before + behind.before[size:]
        behind.bodies = [self.before + behind.bodies[0][size:], *behind.bodies[1:]]
        return True


class Writer(OpenFile):
    """A stream open for writing, whether or not the handle also reads."""

    node: Stream
    publishes = True
    gate: Callable[[], bool] | None = None  # for a user with a rate: whether a write would be performed at once
    newest: LinePost | None = None

    def on_opened(self) -> None:
        super().on_opened()
        self.node.opens += 1

    @property
    def writable(self) -> bool:  # type: ignore[override]
        return not self.node.blocked and (self.gate is None or self.gate())

    def watch(self, then: Callable[[], None] | None) -> None:
        self.node.pollers.watch(self, then)

    def write(self, data: bytes, offset: int = 0) -> Step[int]:
        if not self.writes:
            self.require(reading=False)
        settings, size = self.group.settings, len(data)
        try:
            if size > limits.MESSAGE_BYTES:
                raise errors.TooLong(f"message of {size} bytes (expected at most {limits.MESSAGE_BYTES})")
            if not size:
                return self.group.publisher.write(self.node, WriteRequest(Kind.END, (b"",), 0))
            if settings.data == "line":
                return self._write_lines(data)
            if settings.sender:
                request = WriteRequest(Kind.MESSAGE, (data,), size, writer=self, headers=self._head())
                return self.group.publisher.write(self.node, request)
            return self.group.publisher.write_plain(self.node, data, self)
        except errors.MqfsError as error:
            self.refused(error)
            raise

    def _head(self) -> bytes:
        """Return the headers of messages written here."""
        return headers.of_sender(self.user.uid) if self.group.settings.sender else b""

    def count_messages(self, data: bytes) -> int:
        return data.count(b"\n") if self.group.settings.data == "line" else 1

    def _write_lines(self, data: bytes) -> Step[int]:
        """Write complete lines as messages, in one unit; store the text after the last newline."""
        if self.node.removed:
            raise errors.NotFound(f"stream {self.node.name!r}: removed")
        *lines, rest = (self.partial + data).split(b"\n")
        if len(rest) > limits.LINE_BYTES or any(len(line) >= limits.MESSAGE_BYTES for line in lines):
            raise errors.TooLong(f"line too long (expected at most {limits.MESSAGE_BYTES} bytes)")
        before = self.partial
        if rest or before:
            self.keep(rest)
        if not lines:
            return len(data)
        try:
            whole = [line + b"\n" for line in lines]
            head = self._head()
            return self._post_lines(
                LinePost(Kind.MESSAGE, whole, len(data), writer=self, headers=head, before=before, rest=rest)
            )
        except errors.MqfsError:
            self.keep(before, refuse=False)
            raise

    def _post_lines(self, post: LinePost) -> Step[int]:
        post.undo = lambda: self._undo(post)
        step = self.group.publisher.write(self.node, post)
        if not (isinstance(step, Wait) and step in self.node.blocked):  # it is done, and all writes before it
            self.newest = post.undo = None
            return step
        if self.newest is not None:
            self.newest.follows = post
        self.newest = post
        return step

    def _undo(self, post: LinePost) -> None:
        if not post.refused and not post.give_back() and not self.closed:
            self.keep(post.before + self.partial[len(post.rest) :], refuse=False)

    def _end(self) -> None:
        super()._end()
        stream = self.node
        stream.opens -= 1
        stream.pollers.watch(self, None)
        stream.unused_since_ns = self.group.tree.clock.engine_ns()
        if self.partial and not stream.removed:
            try:
                # The write may wait for room after the close, charged to its user's memory.
                self.group.publisher.write(
                    stream, WriteRequest(Kind.MESSAGE, (self.partial,), 0, writer=self, headers=self._head())
                )
            except errors.MqfsError as error:
                self.group.refuse(self.user, stream.name, f"last, unfinished line not written: {error}")
        self.group.unblock()
        if not stream.opens and stream.is_temporary and not (stream.removed or self.group.tree.closing):
            self.group.remove_temporary(stream)


class StreamHandle(Reader, Writer):
    """A stream, open for reading, writing, or both."""

    node: Stream

    def __init__(self, node: Stream, user: User, reads: bool, writes: bool) -> None:
        super().__init__(node, user, reads, writes)
        self.had = 0  # messages of the stream that were trimmed or read, counted as trimmed_count is
        if reads:
            self._start()

    def on_opened(self) -> None:
        super().on_opened()
        if self.reads:
            self.node.readers.add(self)

    def _start(self) -> None:
        stream, replay = self.node, self.group.settings.replay
        if replay in ("all", "key"):
            stream.kept.update_low_watermark(count_out=False)
            self.position = stream.state.floor
            self.comes_now()
        elif replay == "last" or stream.kept.count < 0:
            stream.kept.update_low_watermark(count_out=False)
        if replay == "last" and (newest := stream.kept.newest_kept()) >= stream.kept.kept_from():
            self.position = newest or self.position
        ahead = 0 if replay == "off" else self.group.log.metrics.count(stream.number, self.position)[0]
        if stream.kept.tail:
            ahead, _ = stream.kept.counted(self.position)
        self.had = stream.kept.trimmed_count + stream.kept.count - ahead

    def wait_list(self) -> WaitList:
        return self.node.waits

    @property
    def over(self) -> bool:
        return self.node.removed

    def _may_take(self, record: Record) -> bool:
        """Whether a message with headers is for this handle; an exclusive one is claimed."""
        stream = self.node
        if not self.group.ranks.is_hidden(record):
            return True
        if not self.writes or stream.exclusives.is_taken(record.sequence):
            return False
        stream.exclusives.claim(record.sequence)
        return True

    def _find_single(self) -> Record | None:
        """Claim and return an exclusive message before the position that no receiver has claimed. None: there is none,
        or the look is `unfinished`."""
        stream = self.node
        while (sequence := stream.exclusives.first_unclaimed()) and sequence < self.position:
            record = self.group.log.reader.find(stream.number, sequence)
            stream.exclusives.claim(sequence)
            if record is not None and record.sequence == sequence and stream.kept.visible(record):
                return record
            self.passed += 1
            if self.unfinished:
                break
        return None

    def find(self) -> Record | None:
        stream = self.node
        if self.position < stream.kept.evicted_before:
            self._fell_behind()
        if self.writes and ((single := self._find_single()) is not None or self.unfinished):
            return single
        while self.position >= self.since or self.knows_newest():
            try:
                position = self.position if self.position >= self.since else self._next_position()
                record = self.group.log.reader.find(stream.number, position)
            except errors.Damaged as error:
                self.position = error.sequence + 1
                raise
            if record is None:
                return None
            self.position = record.sequence + 1
            visible = stream.kept.visible(record)
            if visible or not stream.kept.is_deleted(record.sequence):
                self.had += 1
            if visible and (not record.headers or self._may_take(record)):
                return record
            self.pass_over(record)
            if self.unfinished:
                return None
        return None

    def _next_position(self) -> int:
        """Return the next position to look at, past messages that a newer one of their key had replaced when the reader
        started."""
        newest = self.group.retention.newest
        return self.position if newest is None else newest.next_of(self.node, self.position, self.since)

    def is_behind(self) -> bool:
        return self.position < self.node.kept.evicted_before

    def _fell_behind(self) -> None:
        stream, counts = self.node, self.group.counts
        lost = max(stream.kept.trimmed_count - self.had, 0)
        self.had = max(self.had, stream.kept.trimmed_count)
        self.position = max(stream.kept.evicted_before, stream.state.floor)
        counts.fell_behind += 1
        counts.lost += lost
        raise errors.FellBehind(
            f"{lost} messages of {stream.name} were lost (expected a larger 'depth' or faster reads)"
        )

    def deliver(self, record: Record, count: int, offset: int) -> bytes | None:
        if record.headers and not self._may_take(record):
            return None
        self.had += 1
        return super().deliver(record, count, offset)

    def ahead(self) -> bool:
        stream = self.node
        position = self.position if self.position >= self.since else self._next_position()
        return (
            self.position < stream.kept.evicted_before
            or (self.writes and 0 < stream.exclusives.first_unclaimed() < self.position)
            or self.group.log.reader.locate(stream.number, position) is not None
        )

    def _end(self) -> None:
        self.node.readers.discard(self)
        super()._end()


# ------------------------------------------------------------ .kept/STREAM


_LISTED = 8_192  # sequences of the log between two looks at the clock: some 2 ms
INDEX_BYTES = 16  # of a message, in the two arrays


class SnapshotHandle(PreparedFile):
    """An open `.kept/STREAM`, whose `size` does not change."""

    node: SnapshotNode

    def __init__(self, node: SnapshotNode, user: User, reads: bool, writes: bool) -> None:
        super().__init__(node, user, reads, writes)
        self._sequences, self._ends = array("Q"), array("Q")  # where each message ends in the file
        self._copy: bytes | None = None

    def on_opened(self) -> None:
        self.make(self._look_up(), refuse=True)
        super().on_opened()

    def _look_up(self) -> Work[None]:
        stream = self.node.stream
        yield from look_up(self.group.retention)
        stream.kept.update_low_watermark()
        for sequences, sizes in visible(stream):
            if self._ends:
                yield
            before = self._ends[-1] if self._ends else 0
            self._sequences.extend(sequences)
            self._ends.extend(islice(accumulate(sizes, initial=before), 1, None))
        if len(self._ends) <= limits.KEPT_COPY_MESSAGES and self._bytes <= limits.KEPT_COPY_BYTES:
            self._copy_all()

    def keep_made(self, made: None, *, refuse: bool) -> None:
        self.hold(len(self._copy or b"") + INDEX_BYTES * len(self._ends), refuse=refuse)
        self.size = self._bytes

    @property
    def _bytes(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _copy_all(self) -> None:
        """Copy the bodies. Leave out damaged messages, whose error readers of the stream get, and messages removed
        during the look-up."""
        pieces = []
        for sequence in self._sequences:
            with contextlib.suppress(errors.Damaged, errors.Stale):
                pieces.append(self._body(sequence))
        self._copy = b"".join(pieces)
        self._sequences, self._ends = array("Q"), array("Q", [len(self._copy)])

    def piece(self, count: int, offset: int) -> bytes:
        if self._copy is not None:
            return self._copy[offset : offset + count]
        pieces = []
        end = min(offset + count, self._bytes)
        at = bisect_right(self._ends, offset)
        while offset < end:
            begin = self._ends[at - 1] if at else 0
            piece = self._body(self._sequences[at])[offset - begin : end - begin]
            pieces.append(piece)
            offset += len(piece)
            at += 1
        return b"".join(pieces)

    def _body(self, sequence: int) -> bytes:
        record = self.group.log.reader.find(self.node.stream.number, sequence)
        if record is None or record.sequence != sequence:
            raise errors.Stale(
                f"message {sequence} of {self.node.name!r} was removed while the file was open (reopen it)"
            )
        return record.body


def visible(stream: Stream) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Yield (sequences, body bytes) of the messages that a reader may see, some at a time, the oldest first. The log
    may change between."""
    log, retention = stream.group.log, stream.group.retention
    if retention.newest is not None and retention.newest.covers(stream):
        yield stream.kept.rows.messages()
        return
    floor = max(stream.state.floor, retention.expiry.expired_before())
    hidden = log.state.dropped.keys() | retention.lapsed.keys() | stream.group.ranks.all_exclusives()
    acked = stream.kept.acked_by_all(floor, None)
    end = log.end.next
    while (found := log.reader.locate(stream.number, floor)) is not None and found[0] < end:
        stop = min(found[0] + _LISTED, end)
        for portion in reversed(list(log.metrics.listing({stream.number: found[0]}, stop))):
            sequences, sizes = portion.columns(portion.messages)
            if hidden or acked:
                rows = zip(sequences, sizes, strict=True)
                left = [row for row in rows if row[0] not in hidden and not _lies_in(acked, row[0])]
                sequences, sizes = [row[0] for row in left], [row[1] for row in left]
            yield sequences, sizes
        floor = stop


def _lies_in(ranges: list[tuple[int, int]], sequence: int) -> bool:
    """Whether the sequence is in one of the ascending ranges."""
    at = bisect_right(ranges, sequence, key=lambda one: one[0])
    return at > 0 and sequence <= ranges[at - 1][1]
