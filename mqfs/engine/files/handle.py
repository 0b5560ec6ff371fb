"""What all open files share: who has them open, the way of a read that may have to wait, and the rest of a message.

Each kind of file has a module of its own: stream_handle.py, order.py, view.py, taking.py, cursor.py, put.py,
control.py, kept.py, text.py. Owns positions, the unread rest of a message, and the rule for offsets: a read at an
offset inside the message last given returns it from there (programs read ahead and seek back). Any other offset, that
of its beginning too (pread(2) at 0), means what comes next: its unread rest, or the next message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mqfs import errors
from mqfs.engine.stream import Parked, end_parked
from mqfs.types import Kind, Record, Step, User, Wait

if TYPE_CHECKING:
    from mqfs.engine.group import Group
    from mqfs.engine.log.multipart import LongBody


class Open:
    """What all handles share: their file, their user, and their place in `.who`."""

    sequential = False
    parkable = False
    readable = True
    writable = True
    takes = False  # what it reads is claimed for it
    reader_pid = 0
    held = 0  # bytes of memory that count as its user's
    partial = b""  # an unfinished line
    whole_below = 0  # of a file of commands: a shorter write is whole, its last line too

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
            try:
                self._end()
            finally:
                if self.held:
                    self.hold(0)

    def _end(self) -> None:
        """What closing means for this kind of file."""

    def flush(self) -> Step[int]:
        """A descriptor is closed: what close(2) has to say. Raises why an unfinished command is refused."""
        return 0

    def hold(self, size: int, *, refuse: bool = True) -> None:
        """So many bytes of memory are its user's. Raises OverLimit."""
        self.held = self.group.tree.memory.change(self.user.uid, self.held, size, refuse=refuse)

    def keep(self, rest: bytes, *, refuse: bool = True) -> None:
        """An unfinished line waits here. Raises OverLimit."""
        self.hold(len(rest), refuse=refuse)
        self.partial = rest

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
        if sequential or offset == self.start:
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

    def first_of_many(self, body: LongBody, count: int, offset: int) -> bytes:
        """As `first`, of a body that is read as it is given."""
        data = body[:count]
        self.body, self.start, self.given = body, offset, len(data)  # type: ignore[assignment]
        return data

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

    def is_behind(self) -> bool:
        """Whether messages it had not had were cut, and it was not told."""
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
                return rest if len(rest) == count else self._read_on(rest, count, offset)
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

    def _read_on(self, rest: bytes, count: int, offset: int) -> bytes:
        """The rest of a message, and under `data coalesce` what is there behind it."""
        if self.group.settings.data != "coalesce" or self.last.given < len(self.last.body):
            return rest
        if self.over or self.idle or self.is_behind():  # which the next read tells
            return rest
        data = self._fill(count, offset, rest)
        self.group.loosened()
        self.group.unblock()
        return rest if data is None else data

    def _fill(self, count: int, offset: int, rest: bytes = b"") -> bytes | None:
        """`data coalesce`: as much as fits; an end mark ends what stands before it."""
        pieces: list[bytes] = [rest] if rest else []
        size = len(rest)
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
        wait: Wait[bytes] = Wait(self._unpark)
        self.waiting_room().setdefault(self, {})[wait] = count, offset
        return wait

    def _unpark(self, wait: Wait[bytes]) -> bool:
        room = self.waiting_room()
        waits = room.get(self)
        if waits is None or waits.pop(wait, None) is None:
            return False
        if not waits:
            del room[self]
        # Everything for it that came meanwhile was handed over: it need not be looked for again, or be kept.
        self.position = max(self.position, self.group.bucket.next)
        return True

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
            end_parked({self: room.pop(self)})
        self.group.loosened()
        super()._end()
