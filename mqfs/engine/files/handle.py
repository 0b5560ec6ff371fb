"""What all open files share: who has them open, the way of a read that may have to wait, and the rest of a message.

Each kind of file has a module of its own in this package. A handle has a position and the unread rest of a message. The
rule for offsets: a read at an offset inside the message last given returns it from there (programs read ahead and seek
back). Any other offset, that of its beginning too (pread(2) at 0), means what comes next: its unread rest, or the next
message.

Files of commands take them line by line: a write is all or nothing, and a refusal is the next read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn, cast

from mqfs import errors, limits
from mqfs.engine.core.multipart import LongBody
from mqfs.engine.core.portions import Work
from mqfs.engine.group import Group
from mqfs.engine.nodes import path_text
from mqfs.errors import shortened
from mqfs.model import Record, Step, User, Wait
from mqfs.net.audit import REFUSALS


class OpenFile:
    """What all handles share: their file, their user, and their place in `.who`."""

    sequential = False
    parkable = False
    readable = True
    writable = True
    takes = False  # what it reads is claimed for it
    auto_ack = False  # a message is acked by being read
    publishes = False  # what is written to it are messages
    may_publish = False  # some of it are
    had_turn = False  # what is written to it was counted before against the rate of its user
    reader_pid = 0
    held = 0  # bytes of memory that count as its user's
    last: PartialRead | None = None  # what a message file gave last
    opening: Step[object] = None  # what a front end may wait for before it says that the file is open
    partial = b""  # an unfinished line
    whole_below = 0  # of a file of commands: a shorter write is whole, its last line too
    is_whole = False  # of a stream in a part: each write is whole, its last line too

    def __init__(self, node: Any, user: User, reads: bool, writes: bool) -> None:
        self.node, self.user, self.reads, self.writes = node, user, reads, writes
        self.group: Group = node.group
        self.opened_ns = self.group.tree.clock.wall_ns()
        self.closed = False

    def on_opened(self) -> None:
        """Enter it where it counts as open; `_end` takes it out. The constructor, which the disk may make fail, does
        not: an open that fails has changed nothing. Raises OverLimit, before anything is entered."""

    def read(self, count: int, offset: int = 0) -> Step[bytes]:
        raise errors.Denied(f"{self.node.name!r}: not open for reading")

    def write(self, data: bytes, offset: int = 0) -> Step[int]:
        raise errors.Denied(f"{self.node.name!r}: not open for writing")

    def refused(self, error: errors.MqfsError) -> None:
        """A write was refused: a line of `.errors`."""
        self.group.refuse(self.user, self.node.name, str(error))

    def refuse_long(self, size: int) -> NoReturn:
        """Refuse a write of at least `size` bytes, of which a mount may get only the first piece. Raises TooLong."""
        error = errors.TooLong(f"write of {size} bytes or more (expected at most {limits.MESSAGE_BYTES} with a mount)")
        self.refused(error)
        raise error

    def count_messages(self, data: bytes) -> int:
        """About how many messages a write is, where it publishes or may."""
        return 1

    def prepare(self, data: bytes) -> Iterator[None]:
        """Do in steps what can be done of a write of that data before it: others are served between."""
        return iter(())

    def push_back(self, data: bytes) -> None:
        pass

    def watch(self, then: Callable[[], None] | None) -> None:
        pass

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.group.tree.open_files.closed(self)
            try:
                self._end()
            finally:
                if self.held:
                    self.hold(0)
                if self.last is not None:
                    if self.last.held:
                        self.last.drop()
                    self.last.handle = None  # no memory of the user any more, and no cycle

    def _end(self) -> None:
        """What closing means for this kind of file."""

    def flush(self) -> Step[int]:
        """A descriptor is closed: what close(2) has to say. Raises why an unfinished command is refused."""
        return 0

    def hold(self, size: int, *, refuse: bool = True) -> None:
        """So many bytes of memory are its user's. Raises OverLimit."""
        self.held = self.group.tree.memory.change(self.user.uid, self.held, size, refuse=refuse)

    def require_memory(self) -> None:
        """Called before a new message is read where some user has more than its share of unread rests. Raises OverLimit
        for that user: the rest of one more would be kept."""
        self.group.tree.memory.require_none_over(self.user.uid)

    def keep(self, rest: bytes, *, refuse: bool = True) -> None:
        """An unfinished line waits here. Raises OverLimit."""
        self.hold(len(rest), refuse=refuse)
        self.partial = rest

    def audit(self, method: str, detail: str = "", *, status: str = "ok") -> None:
        """Leave an audit line: its user did this."""
        if self.group.tree.audit.changes:
            self.group.tree.audit.note(self.user, method, path_text(self.node), detail, status=status)

    def require(self, reading: bool) -> None:
        if not (self.reads if reading else self.writes):
            verb = "reading" if reading else "writing"
            raise errors.Denied(f"{self.node.name!r}: not open for {verb}")


class PreparedFile(OpenFile):
    """A finite file, made when it is opened. One that takes long is made in portions: until it is there its reads wait,
    and it has no `size`."""

    size: int | None = None
    is_made = False
    _making: Step[Any] = None
    _error: Exception | None = None  # why it could not be made

    def __init__(self, node: Any, user: User, reads: bool, writes: bool) -> None:
        super().__init__(node, user, reads, writes)
        self._reads: list[tuple[Wait[bytes], int, int]] = []

    # What a subclass says: how what was made is kept, and what a read gets of it.

    def keep_made(self, made: Any, *, refuse: bool) -> None:
        """Sets `size`. Raises OverLimit, with `refuse`."""
        raise NotImplementedError

    def piece(self, count: int, offset: int) -> bytes:
        raise NotImplementedError

    def make(self, work: Work[Any], *, refuse: bool) -> None:
        """What that work returns is the file. `refuse`: where its user has no memory left for it."""
        self._making = self.group.portions.run(work)
        if isinstance(self._making, Wait):
            self.is_made, self.size, self.opening = False, None, Wait()
            self._making.subscribe(self._made)
        else:
            self.keep_made(self._making, refuse=refuse)
            self.is_made = True

    def _made(self, making: Wait[Any]) -> None:
        """Others were served meanwhile; perhaps its reads wait."""
        reads, self._reads = self._reads, []
        try:
            self.keep_made(making.result(), refuse=False)
        except Exception as error:  # else its reads would wait for ever
            self._error = error
        else:
            self.is_made = True
        for wait, count, offset in reads:
            try:
                wait.resolve(self.read_made(count, offset))
            except Exception as error:
                wait.fail(error)
        if isinstance(self.opening, Wait):
            self.opening.resolve(None)

    def read_made(self, count: int, offset: int) -> bytes:
        """Once it was made. Raises why it could not be."""
        if self._error is not None:
            raise self._error
        return self.piece(count, offset)

    def read(self, count: int, offset: int = 0) -> Step[bytes]:
        self.require(reading=True)
        if self.is_made or self._error is not None:
            return self.read_made(count, offset)
        wait: Wait[bytes] = Wait(self._cancel)
        self._reads.append((wait, count, offset))
        return wait

    def _cancel(self, wait: Wait[bytes]) -> bool:
        self._reads = [read for read in self._reads if read[0] is not wait]
        return True

    def _end(self) -> None:
        if isinstance(self._making, Wait):
            self._making.cancel()
        for wait, _, _ in self._reads:
            wait.fail(errors.Interrupted(f"{self.node.name!r}: closed before the read was answered"))


FREE_BYTES = 4_096  # of a message, which count as the handle's own


def to_tell_of(record: Record) -> Record:
    """What `info` needs of a message: without its body, if that is large."""
    return record if len(record.body) <= FREE_BYTES else record._replace(body=b"")


class PartialRead:
    """The last message a handle gave, and how much of it. A large one counts as memory of the handle's user until it
    was read out. Then it is kept only where it may be read again, and in no more than half of the user's share: else
    files without anything unread could keep others from being read."""

    __slots__ = ("body", "can_push_back", "given", "gone", "handle", "held", "start")

    def __init__(self, handle: OpenFile | None = None) -> None:
        """`handle`: None where nothing is counted."""
        self.handle = handle
        self.held = 0  # bytes of memory that count as its user's
        self.body: bytes | LongBody = b""
        self.given = 0  # bytes of it that were given
        self.gone = 0  # bytes of the message before `body`: given, and not kept
        self.start = 0  # the offset at which it was given
        self.can_push_back = False  # `body[given:]` could not be delivered: it is next, whatever the offset

    def drop(self) -> None:
        """Forget the message, and what was not given of it."""
        self.body, self.given, self.gone, self.start, self.can_push_back = b"", 0, 0, 0, False
        if self.held:
            self._hold(0)

    def rest(self, count: int, offset: int, sequential: bool) -> Any:
        """The rest of the message at that offset; None: the next message is due. Bytes, or of a body in parts a
        step that comes to them."""
        if self.can_push_back:
            self.can_push_back, self.start = False, offset - self.given
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
        self.body, self.start, self.gone = body, offset, 0
        self.given = size = len(body)
        if (size > FREE_BYTES or self.held) and self.handle is not None:
            self._hold(size if size > FREE_BYTES else 0)
            if self.held and size <= count:
                self._read_out(self.handle)
        if size <= count:
            return body
        self.given = count
        return body[:count]

    def _read_out(self, handle: OpenFile) -> None:
        memory, uid = handle.group.tree.memory, handle.user.uid
        if handle.sequential or handle.auto_ack or not memory.has_room(uid, memory.of(uid)):
            self.body, self.given, self.gone = b"", 0, self.gone + len(self.body)
            self._hold(0)

    def _hold(self, size: int) -> None:
        if self.handle is not None:
            memory, uid = self.handle.group.tree.memory, self.handle.user.uid
            self.held = memory.change(uid, self.held, size, refuse=False)
            if size:
                memory.note_over(uid)

    def first_of_many(self, body: LongBody, count: int, offset: int) -> Step[bytes]:
        """As `first`, of a body that is read as it is given."""
        self.drop()
        self.body, self.start, self.given = body, offset, 0
        step: Step[bytes] = self._give(count)
        return step

    def _give(self, count: int) -> Any:
        begin, body = self.given, self.body
        self.given = end = min(begin + count, len(body))
        if not isinstance(body, bytes):
            return body.read(begin, end, partial(self._not_read, body, begin))
        if self.held and end == len(body) and self.handle is not None:
            self._read_out(self.handle)
        return body[begin:end]

    def _not_read(self, body: LongBody, begin: int) -> None:
        """The next read begins there again."""
        if self.body is body:
            self.given = begin

    def back(self, data: bytes) -> None:
        if not self.body or (self.gone and len(data) > self.given):
            self.gone = max(self.gone - len(data), 0)
            self.body, self.given = data + cast(bytes, self.body)[self.given :], len(data)
            if len(self.body) > FREE_BYTES:
                self._hold(len(self.body))
        self.given = max(self.given - len(data), 0)
        self.can_push_back = True


# ------------------------------------------------------------ files of commands


class CommandFile(OpenFile):
    """A file whose writes are command lines and whose refusals can be read."""

    refusal: bytes | None = None  # why the last write was refused
    pending: bytes | None = None  # what the last write answers, or the text that a command asked for, `info` say
    unexpected: Exception | None = None  # what the next read raises: a bug

    def lines_of(self, data: bytes) -> str:
        """The whole lines there are now; an unfinished one waits. Raises TooLong, BadCommand."""
        text = self.partial + data
        if len(text) > limits.CTL_BYTES:
            raise errors.TooLong(f"commands of {len(text)} bytes (expected at most {limits.CTL_BYTES} in a write)")
        whole, newline, rest = text.rpartition(b"\n")
        if len(data) < self.whole_below:
            whole, newline, rest = text, b"", b""
        if rest or self.partial:
            self.keep(rest)
        try:
            return (whole + newline).decode()
        except UnicodeDecodeError:
            raise errors.BadCommand("invalid commands: not UTF-8") from None

    def refused(self, error: errors.MqfsError, rest: bytes | None = None) -> None:
        """A write was refused, and with it the unfinished line: `rest`, unless later writes changed it; None: any."""
        if self.partial and (rest is None or self.partial is rest):
            self.keep(b"")
        self.refusal = f"{shortened(str(error))}\n".encode()
        super().refused(error)
        if isinstance(error, REFUSALS):
            self.audit("write", error.detail, status="refused")

    def read(self, count: int, offset: int = 0) -> Step[bytes]:
        self.require(reading=True)
        return self.take_response(count) or b""

    def flush(self) -> Step[int]:
        return self.write(b"\n") if self.partial else 0

    def close(self) -> None:
        if not self.closed:
            with contextlib.suppress(errors.MqfsError):  # it is in `.errors`
                self.flush()
        super().close()

    def take_response(self, count: int) -> bytes | None:
        """What the next read returns first, once: why a write was refused, then what a command asked for."""
        text = None
        if self.unexpected is not None:
            error, self.unexpected = self.unexpected, None
            raise error
        if self.refusal is not None:
            text, self.refusal = self.refusal[:count], self.refusal[count:] or None
        elif self.pending is not None:
            text, self.pending = self.pending[:count], self.pending[count:] or None
        return text


class LongResponses(CommandFile):
    """One whose commands ask for texts that may take long: these are made in portions, and a read waits for one."""

    making: Wait[bytes] | None = None
    _reading: tuple[Wait[bytes], int] | None = None  # the read that waits, and its size

    def respond(self, work: Work[bytes]) -> None:
        """The next read returns what that work gives."""
        self.stop_making()
        step = self.group.portions.run(work)
        if isinstance(step, Wait):
            self.making = step
            step.subscribe(self._made)
        else:
            self.pending = step

    def _made(self, making: Wait[bytes]) -> None:
        self.making, read, self._reading = None, self._reading, None
        try:
            self.pending = making.result()
        except errors.MqfsError as error:
            self.refused(error)
            self.refusal = f"{error.wire_text()}\n".encode()  # in place of the answer: a program has no errno
        except Exception as error:  # else its read would wait for ever
            self.unexpected = error
        if read is not None:
            try:
                answer = self.take_response(read[1]) or b""
            except Exception as error:
                read[0].fail(error)
            else:
                read[0].resolve(answer)
        self.group.fanout.pollers.wake()

    def await_response(self, count: int) -> Wait[bytes]:
        """What a read gets while one is made. Raises Busy for a second read."""
        if self._reading is not None:
            raise errors.Busy(f"{self.node.name}: another read waits for an answer")
        wait: Wait[bytes] = Wait(self._cancel)
        self._reading = wait, count
        return wait

    def _cancel(self, _: Wait[bytes]) -> bool:
        self._reading = None
        return True

    def stop_making(self) -> None:
        """It is not wanted any more."""
        making, read = self.making, self._reading
        self.making = self._reading = None
        if making is not None:
            making.cancel()
        if read is not None:
            read[0].fail(errors.Interrupted(f"{self.node.name}: the answer was cut off"))
