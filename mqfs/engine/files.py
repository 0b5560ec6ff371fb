"""Open files: what a face reads and writes. One class a kind of file; `ctl` is in control.py, `.cursor` in cursor.py.

Owns positions, the unread rest of a message, and the rule for offsets: a read at an offset inside the message last
given returns its rest (programs read ahead and seek back), any other offset means the next message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from mqfs import errors, limits
from mqfs.engine import report
from mqfs.engine.stream import Parked, Post, end_parked
from mqfs.types import Kind, Record, Step, User, Wait

if TYPE_CHECKING:
    from mqfs.engine.group import Group
    from mqfs.engine.nodes import Meta
    from mqfs.engine.stream import Stream


class Open:
    """What all handles share: their file, their user, and their place in `.who`."""

    sequential = False
    parkable = False
    readable = True
    writable = True
    takes = False  # what it reads is claimed for it
    reader_pid = 0

    def __init__(self, node: Any, user: User, reads: bool, writes: bool) -> None:
        self.node, self.user, self.reads, self.writes = node, user, reads, writes
        self.group: Group = node.group
        self.opened_ns = self.group.tree.clock.wall_ns()
        self.closed = False

    def read(self, count: int, offset: int = 0) -> Step[bytes]:
        raise errors.Denied(f"{self.node.name} is not open for reading")

    def write(self, data: bytes, offset: int = 0) -> Step[int]:
        raise errors.Denied(f"{self.node.name} is not open for writing")

    def unread(self, data: bytes) -> None:
        pass

    def watch(self, then: Callable[[], None] | None) -> None:
        pass

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.group.tree.closed(self)
            self._end()

    def _end(self) -> None:
        """What closing means for this kind of file."""

    def require(self, reading: bool) -> None:
        if not (self.reads if reading else self.writes):
            verb = "reading" if reading else "writing"
            raise errors.Denied(f"{self.node.name} is not open for {verb}")


class Given:
    """The last message a handle gave, and how much of it."""

    __slots__ = ("again", "body", "given", "start")

    def __init__(self) -> None:
        self.body = b""
        self.given = 0  # bytes of it that were given
        self.start = 0  # the offset at which it was given
        self.again = False  # `body[given:]` could not be delivered: it is next, whatever the offset

    def rest(self, count: int, offset: int, sequential: bool) -> bytes | None:
        """What is still to be had of it at that offset; None: the next message."""
        if self.again:
            self.again, self.start = False, offset - self.given
            return self._give(count)
        if sequential:
            return self._give(count) if self.given < len(self.body) else None
        at = offset - self.start
        if 0 <= at < len(self.body):
            self.given = at
            return self._give(count)
        return None

    def first(self, body: bytes, count: int, offset: int) -> bytes:
        """Begin with a new message."""
        self.body, self.start = body, offset
        self.given = size = len(body)
        if size <= count:
            return body
        self.given = count
        return body[:count]

    def _give(self, count: int) -> bytes:
        data = self.body[self.given : self.given + count]
        self.given += len(data)
        return data

    def back(self, data: bytes) -> None:
        self.given = max(self.given - len(data), 0)
        self.again = True


class Reader(Open):
    """A handle with a position in the log, which waits at its end."""

    parkable = True

    def __init__(self, node: Any, user: User, reads: bool, writes: bool) -> None:
        super().__init__(node, user, reads, writes)
        self.sequential = reads and writes
        self.position = self.group.bucket.next
        self.last = Given()

    @property
    def idle(self) -> bool:
        """It waits, so it has had everything."""
        return self in self.waiting_room()

    # What a subclass says: where it waits, and what it finds.

    def waiting_room(self) -> Parked:
        raise NotImplementedError

    def find(self) -> Record | None:
        """The next record to give, the position moved behind it; raises FellBehind or Damaged."""
        raise NotImplementedError

    def wants(self, record: Record) -> bool:
        """Whether a new message where it waits is for it."""
        return True

    def present(self, record: Record) -> bytes:
        """What the record looks like."""
        raise NotImplementedError

    @property
    def over(self) -> bool:
        """The file is gone: end-of-file for good."""
        return self.group.removed

    def read(self, count: int, offset: int = 0) -> Step[bytes]:
        if not self.reads:
            self.require(reading=True)
        last = self.last
        if last.again or last.body:
            rest = last.rest(count, offset, self.sequential)
            if rest is not None:
                return rest
        if self.over:
            return b""
        if count <= 0:
            return b""
        if not self.waiting_room().get(self):
            if self.group.settings.data == "coalesce":
                data = self._fill(count, offset)
            elif (record := self.find()) is not None:
                self.group.counts.read += 1
                data = last.first(self.present(record), count, offset)
            else:
                data = None
            if data is not None:
                self.group.loosened()
                if self.group.blocking:
                    self.group.unblock()
                return data
        ended = self.at_end()
        return self._park(count, offset) if ended is None else ended

    def at_end(self) -> bytes | None:
        """What a read gets where there is nothing to be found; None: it waits."""
        return None

    def _fill(self, count: int, offset: int) -> bytes | None:
        """`data coalesce`: as much as fits; an end mark ends what stands before it."""
        pieces: list[bytes] = []
        size = 0
        while size < count:
            before = self.position
            try:
                record = self.find()
            except errors.MqfsError:
                if not pieces:
                    raise
                self.position = before  # told at the next read
                break
            if record is None:
                break
            if record.kind == Kind.END:
                if pieces:
                    self.position = before
                    break
                return self.last.first(b"", count, offset)
            self.group.counts.read += 1
            pieces.append(self.present(record))
            size += len(pieces[-1])
        return self.last.first(b"".join(pieces), count, offset) if pieces else None

    def _park(self, count: int, offset: int) -> Wait[bytes]:
        self.group.tree.park()
        wait: Wait[bytes] = Wait(self._unpark)
        self.waiting_room().setdefault(self, []).append((wait, count, offset))
        return wait

    def _unpark(self, wait: Wait[bytes]) -> bool:
        room = self.waiting_room()
        waits = room.get(self)
        if waits is None:
            return False
        for i, (other, _, _) in enumerate(waits):
            if other is wait:
                del waits[i]
                if not waits:
                    del room[self]
                self.group.tree.parked -= 1
                # Everything for it that came meanwhile was handed over: it need not be looked for again, or be kept.
                self.position = max(self.position, self.group.bucket.next)
                return True
        return False

    def hand(self, record: Record, count: int, offset: int) -> bytes:
        """A new message, for a read that waits."""
        self.position = record.sequence + 1
        self.group.counts.read += 1
        return self.last.first(self.present(record), count, offset)

    def unread(self, data: bytes) -> None:
        self.last.back(data)

    @property
    def readable(self) -> bool:  # type: ignore[override]
        last = self.last
        if last.again or self.over or last.given < len(last.body):
            return True
        return self.ahead()

    def ahead(self) -> bool:
        """Whether something is there to be found."""
        raise NotImplementedError

    def _end(self) -> None:
        room = self.waiting_room()
        if self in room:
            end_parked({self: room.pop(self)}, self.group)
        self.group.loosened()
        super()._end()


class Writer(Open):
    """A stream, open to be written: what writing is, whatever else the handle does."""

    node: Stream
    partial = b""  # `data line`: an unfinished line

    def __init__(self, node: Stream, user: User, reads: bool, writes: bool) -> None:
        super().__init__(node, user, reads, writes)
        node.opens += 1

    @property
    def writable(self) -> bool:  # type: ignore[override]
        return not self.node.blocked

    def watch(self, then: Callable[[], None] | None) -> None:
        if then is None:
            self.node.watchers.pop(self, None)
        else:
            self.node.watchers[self] = then

    def write(self, data: bytes, offset: int = 0) -> Step[int]:
        if not self.writes:
            self.require(reading=False)
        size = len(data)
        if size > limits.MESSAGE_BYTES:
            raise errors.TooLong(f"{size} bytes; a message has at most {limits.MESSAGE_BYTES}")
        if not size:
            return self.group.write(self.node, Post(Kind.END, (b"",), 0))
        if self.group.settings.data == "line":
            return self._write_lines(data)
        return self.group.write(self.node, Post(Kind.MESSAGE, (data,), size))

    def _write_lines(self, data: bytes) -> Step[int]:
        """Whole lines are messages, one unit; what follows the last newline waits here."""
        if self.node.removed:
            raise errors.NotFound(f"{self.node.name} was removed")
        *lines, rest = (self.partial + data).split(b"\n")
        if len(rest) > limits.LINE_BYTES or any(len(line) >= limits.MESSAGE_BYTES for line in lines):
            raise errors.TooLong(f"a line has at most {limits.MESSAGE_BYTES} bytes")
        step: Step[int] = len(data)
        before = self.partial

        def undo() -> None:
            if self.partial == rest:
                self.partial = before

        if lines:
            post = Post(Kind.MESSAGE, [line + b"\n" for line in lines], len(data), undo)
            step = self.group.write(self.node, post)
        self.partial = rest
        return step

    def _end(self) -> None:
        super()._end()
        stream = self.node
        stream.opens -= 1
        stream.watchers.pop(self, None)
        stream.unused_since_ns = self.group.tree.clock.engine_ns()
        if self.partial and not stream.removed:
            try:
                self.group.write(stream, Post(Kind.MESSAGE, (self.partial,), 0))
            except errors.MqfsError as error:
                self.group.refuse(self.user, stream.name, f"the last, unfinished line was not written: {error}")
        self.group.unblock()


class StreamHandle(Reader, Writer):
    """A stream, open to read, to write, or both."""

    node: Stream

    def __init__(self, node: Stream, user: User, reads: bool, writes: bool) -> None:
        super().__init__(node, user, reads, writes)
        self.had = 0  # messages of the stream that fell below the floor or were had, counted as Stream.gone is
        if reads:
            self._start()
            node.readers.add(self)

    def _start(self) -> None:
        stream, replay = self.node, self.group.settings.replay
        if replay == "all":
            stream.advance()
            self.position = stream.state.floor
        elif replay == "last" and (newest := stream.newest_kept()) >= stream.kept_from():
            self.position = newest or self.position
        if stream.count < 0:
            stream.advance()
        ahead = 0 if replay == "off" else self.group.bucket.tally(stream.number, self.position)[0]
        self.had = stream.gone + stream.count - ahead

    def waiting_room(self) -> Parked:
        return self.node.parked

    @property
    def over(self) -> bool:
        return self.node.removed

    def wants(self, record: Record) -> bool:
        return not record.headers or self._may_take(record.sequence)

    def _may_take(self, sequence: int) -> bool:
        """Whether a message with headers is for this handle; one that is for one taker is then taken."""
        stream = self.node
        if not self.group.ranks.is_single(sequence):
            return True
        if not self.writes or stream.is_taken(sequence):
            return False
        stream.take_single(sequence)
        return True

    def _find_single(self) -> Record | None:
        """A message for one taker, written before this handle came and not taken since."""
        stream = self.node
        while (sequence := stream.untaken()) and sequence < self.position:
            record = self.group.bucket.find(stream.number, sequence)
            stream.take_single(sequence)
            if record is not None and record.sequence == sequence and stream.visible(record):
                return record
        return None

    def find(self) -> Record | None:
        stream = self.node
        if self.position < stream.cut:
            self._fell_behind()
        if self.writes and (single := self._find_single()) is not None:
            return single
        while True:
            try:
                record = self.group.bucket.find(stream.number, self.position)
            except errors.Damaged as error:
                self.position = error.sequence + 1
                raise
            if record is None:
                return None
            self.position = record.sequence + 1
            self.had += 1
            if stream.visible(record) and (not record.headers or self._may_take(record.sequence)):
                return record

    def _fell_behind(self) -> None:
        stream, counts = self.node, self.group.counts
        lost = max(stream.gone - self.had, 0)
        self.had = max(self.had, stream.gone)
        self.position = max(stream.cut, stream.state.floor)
        counts.fell_behind += 1
        counts.lost += lost
        raise errors.FellBehind(f"{lost} messages of {stream.name} were lost")

    def hand(self, record: Record, count: int, offset: int) -> bytes:
        self.had += 1
        return super().hand(record, count, offset)

    def present(self, record: Record) -> bytes:
        return record.body

    def ahead(self) -> bool:
        stream = self.node
        return self.position < stream.cut or self.group.bucket.peek(stream.number, self.position) is not None

    def _end(self) -> None:
        self.node.readers.discard(self)
        super()._end()


class LogReader(Reader):
    """A reader of several streams at once, in the order of the log."""

    def __init__(self, node: Any, user: User, reads: bool, writes: bool) -> None:
        super().__init__(node, user, reads, writes)
        self.cuts: dict[int, int] = {}  # of each stream, the cut that this handle was told of
        self.cuts_seen = self.group.cuts
        self._start()
        self.group.log_readers.add(self)

    def covers(self, stream: Stream) -> bool:
        """Whether it is to be shown messages of that stream."""
        return True

    def admits(self, stream: Stream, record: Record) -> bool:
        """Whether it is to be shown that one."""
        return record.kind == Kind.MESSAGE

    def look(self) -> Record | None:
        """The next message in the log that may be for it. Raises Damaged."""
        return self.group.bucket.scan(self.position)

    def at_end(self) -> bytes | None:
        """Under `deliver one` it only shows: what is there, then end-of-file."""
        return b"" if self.group.settings.deliver == "one" else None

    def _start(self) -> None:
        replay = "all" if self.group.settings.deliver == "one" else self.group.settings.replay
        if replay == "off":
            return
        for stream in self.group.numbers.values():
            stream.advance()
        if replay == "all":
            self.position = self.group.bucket.first
        else:
            mine = (s.newest_kept() for s in self.group.numbers.values() if self.covers(s))
            self.position = max(mine, default=0) or self.position
        self.cuts = {stream.number: stream.cut for stream in self.group.numbers.values()}

    def find(self) -> Record | None:
        group = self.group
        if group.cuts != self.cuts_seen:
            self._look_for_cuts()
        while True:
            try:
                record = self.look()
            except errors.Damaged as error:
                self.position = error.sequence + 1
                raise
            if record is None:
                return None
            self.position = record.sequence + 1
            stream = group.numbers.get(record.stream)
            if stream is not None and self.admits(stream, record) and stream.visible(record):
                return record

    def _look_for_cuts(self) -> None:
        group = self.group
        self.cuts_seen = group.cuts
        behind = overtaken(self.position, self.cuts, filter(self.covers, group.numbers.values()))
        if behind:
            group.counts.fell_behind += 1
            raise errors.FellBehind(f"messages of {behind} were lost")

    def ahead(self) -> bool:
        return self.position < self.group.bucket.next and self.look() is not None

    def watch(self, then: Callable[[], None] | None) -> None:
        if then is None:
            self.group.order_watchers.pop(self, None)
        else:
            self.group.order_watchers[self] = then

    def _end(self) -> None:
        super()._end()
        self.group.log_readers.discard(self)
        self.group.order_watchers.pop(self, None)
        self.group.unblock()


class OrderHandle(LogReader):
    """`order`: of each message of the group, its stream's name and a NUL byte."""

    node: Meta

    def waiting_room(self) -> Parked:
        return self.group.order_parked

    def present(self, record: Record) -> bytes:
        stream = self.group.numbers.get(record.stream)
        return (stream.name.encode() if stream else b"") + b"\0"


def overtaken(position: int, told: dict[int, int], streams: Iterable[Stream]) -> str:
    """The name of a stream of which messages at or above `position` were cut and the reader not told; "" if none.

    All cuts of the streams count as told afterwards.
    """
    behind = ""
    for stream in streams:
        if stream.cut > position and told.get(stream.number, 0) < stream.cut:
            behind = stream.name
        if stream.cut:
            told[stream.number] = stream.cut
    return behind


class TextHandle(Open):
    """A file made when it is opened: `.stats`, `.who`, `.errors`. Finite and seekable."""

    _MAKE: dict[str, Callable[[Group, User], str]] = {  # noqa: RUF012 - a table, never altered
        ".stats": report.stats,
        ".who": report.who,
        ".errors": report.refusals,
    }

    def __init__(self, node: Meta, user: User, reads: bool, writes: bool) -> None:
        super().__init__(node, user, reads, writes)
        self.text = self._MAKE[node.name](self.group, user).encode()

    def read(self, count: int, offset: int = 0) -> Step[bytes]:
        self.require(reading=True)
        return self.text[offset : offset + count]
