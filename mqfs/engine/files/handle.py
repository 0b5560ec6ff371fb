"""Base classes of open files: their user, reads that may have to wait, and the unread rest of a message.

Each kind of file has a module of its own in this package. A handle has a position and the unread rest of a message. A
`sequential` handle ignores offsets: a read gets the unread rest, or the next message. On other handles a read at an
offset inside the last message, behind its first byte, returns that message from there, as programs read ahead and seek
back. A read at any other offset, as of pread(2) at 0, gets the unread rest, or the next message.

Command files take commands line by line. A write is carried out whole or not at all; the next read tells why it was
refused.
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
    """Base class of all handles: their file, their user, and their row in `.who`."""

    sequential = False
    parkable = False
    readable = True
    writable = True
    takes = False  # messages read are claimed by it
    auto_ack = False  # a message is acked by being read
    publishes = False  # writes are messages
    may_publish = False  # some writes are messages
    had_turn = False  # its writes were already counted against the rate of its user
    reader_pid = 0
    held = 0  # bytes of memory charged to its user
    last: PartialRead | None = None  # the last message that a message file returned
    opening: Step[object] = None  # a front end may wait for it before it reports the file as open
    partial = b""  # an unfinished line
    whole_below = 0  # command file: a shorter write is complete, its last line too
    is_whole = False  # stream in a part: each write is complete, its last line too

    def __init__(self, node: Any, user: User, reads: bool, writes: bool) -> None:
        self.node, self.user, self.reads, self.writes = node, user, reads, writes
        self.group: Group = node.group
        self.opened_ns = self.group.tree.clock.wall_ns()
        self.closed = False

    def on_opened(self) -> None:
        """Register the handle where it counts as open; `_end` undoes that. The constructor, which an error of the disk
        may fail, registers nothing: a failed open changes nothing. Raises OverLimit, before anything is registered."""

    def read(self, count: int, offset: int = 0) -> Step[bytes]:
        raise errors.Denied(f"{self.node.name!r}: not open for reading")

    def write(self, data: bytes, offset: int = 0) -> Step[int]:
        raise errors.Denied(f"{self.node.name!r}: not open for writing")

    def refused(self, error: errors.MqfsError) -> None:
        """Record a refused write in `.errors`."""
        self.group.refuse(self.user, self.node.name, str(error))

    def refuse_long(self, size: int) -> NoReturn:
        """Refuse a write of at least `size` bytes, of which a mount may get only the first piece. Raises TooLong."""
        error = errors.TooLong(f"write of {size} bytes or more (expected at most {limits.MESSAGE_BYTES} with a mount)")
        self.refused(error)
        raise error

    def count_messages(self, data: bytes) -> int:
        """Estimate the messages in a write to a file that publishes, or may publish."""
        return 1

    def prepare(self, data: bytes) -> Iterator[None]:
        """Prepare a write of `data` in steps: others are served in between."""
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
                    self.last.handle = None  # no memory is charged any more, and no reference cycle is left

    def _end(self) -> None:
        """Release what this kind of file holds; called once, by `close`."""

    def flush(self) -> Step[int]:
        """Carry out an unfinished command when a descriptor is closed, for the result of close(2). Raises the error of
        a refused command."""
        return 0

    def hold(self, size: int, *, refuse: bool = True) -> None:
        """Set the memory charged to the user for this file to `size` bytes. Raises OverLimit, if it may `refuse`."""
        self.held = self.group.tree.memory.change(self.user.uid, self.held, size, refuse=refuse)

    def require_memory(self) -> None:
        """Check the user's memory before a new message is read, while some user has more than its share of unread
        rests. Raises OverLimit for such a user: the rest of one more message would be kept."""
        self.group.tree.memory.require_none_over(self.user.uid)

    def keep(self, rest: bytes, *, refuse: bool = True) -> None:
        """Store an unfinished line, charged to the user's memory. Raises OverLimit, if it may `refuse`."""
        self.hold(len(rest), refuse=refuse)
        self.partial = rest

    def audit(self, method: str, detail: str = "", *, status: str = "ok") -> None:
        """Write an audit line for an action of the user."""
        if self.group.tree.audit.changes:
            self.group.tree.audit.note(self.user, method, path_text(self.node), detail, status=status)

    def require(self, reading: bool) -> None:
        if not (self.reads if reading else self.writes):
            verb = "reading" if reading else "writing"
            raise errors.Denied(f"{self.node.name!r}: not open for {verb}")


class PreparedFile(OpenFile):
    """A finite file, made when it is opened. A long one is made in portions; until it is complete its reads wait, and
    `size` is None."""

    size: int | None = None
    is_made = False
    _making: Step[Any] = None
    _error: Exception | None = None  # why it could not be made

    def __init__(self, node: Any, user: User, reads: bool, writes: bool) -> None:
        super().__init__(node, user, reads, writes)
        self._reads: list[tuple[Wait[bytes], int, int]] = []

    # For subclasses: how the result is stored, and which bytes of it a read gets.

    def keep_made(self, made: Any, *, refuse: bool) -> None:
        """Store the result and set `size`. Raises OverLimit, if it may `refuse`."""
        raise NotImplementedError

    def piece(self, count: int, offset: int) -> bytes:
        raise NotImplementedError

    def make(self, work: Work[Any], *, refuse: bool) -> None:
        """Make the file of the result of `work`. `refuse`: raise OverLimit if the user has no memory left for it; never
        after work in portions."""
        self._making = self.group.portions.run(work)
        if isinstance(self._making, Wait):
            self.is_made, self.size, self.opening = False, None, Wait()
            self._making.subscribe(self._made)
        else:
            self.keep_made(self._making, refuse=refuse)
            self.is_made = True

    def _made(self, making: Wait[Any]) -> None:
        """Store the result of work in portions, and answer the reads that waited for it."""
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
        """Return bytes of the complete file. Raises the error that prevented making it."""
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


FREE_BYTES = 4_096  # of a message, not charged to the user


def to_tell_of(record: Record) -> Record:
    """Return the message for `info`: without its body, if that is large."""
    return record if len(record.body) <= FREE_BYTES else record._replace(body=b"")


class PartialRead:
    """The last message that a handle returned, and how much of it was read. A large message is charged to the user's
    memory until it was read to its end. After that it is kept only if it may be read again, and if no more than half of
    the user's share is used: else files without unread bytes could keep others from being read."""

    __slots__ = ("body", "can_push_back", "given", "gone", "handle", "held", "start")

    def __init__(self, handle: OpenFile | None = None) -> None:
        """`handle`: its user is charged for memory; None: no charge."""
        self.handle = handle
        self.held = 0  # bytes of memory charged to its user
        self.body: bytes | LongBody = b""
        self.given = 0  # bytes of `body` that were returned
        self.gone = 0  # bytes of the message before `body`: returned, and not kept
        self.start = 0  # the offset at which the message began
        self.can_push_back = False  # `body[given:]` was not delivered: it is next, at any offset

    def drop(self) -> None:
        """Drop the message with its unread rest."""
        self.body, self.given, self.gone, self.start, self.can_push_back = b"", 0, 0, 0, False
        if self.held:
            self._hold(0)

    def rest(self, count: int, offset: int, sequential: bool) -> Any:
        """Return the rest of the message at that offset; None: the next message is due. A body in parts gives a step
        that resolves to bytes."""
        if self.can_push_back:
            self.can_push_back, self.start = False, offset - self.given
            return self._give(count)
        at = offset - self.start
        if not sequential and 0 < at < len(self.body):
            self.given = at
        elif self.given == len(self.body):
            return None
        elif at:
            self.start = offset - self.given  # outside: the rest continues there
        return self._give(count)

    def first(self, body: bytes, count: int, offset: int) -> bytes:
        """Start with a new message, and return its first `count` bytes."""
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
        """As `first`, for a body in parts, which is read piece by piece."""
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
        """Have the next read begin at `begin` again, as a read of a body in parts failed."""
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


# ------------------------------------------------------------ command files


class CommandFile(OpenFile):
    """A file whose writes are command lines and whose refusals can be read."""

    refusal: bytes | None = None  # why the last write was refused
    pending: bytes | None = None  # the answer to the last write or command, as `info`
    unexpected: Exception | None = None  # raised by the next read: a bug

    def lines_of(self, data: bytes) -> str:
        """Return the complete lines so far, and store an unfinished one. Raises TooLong, OverLimit, BadCommand."""
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
        """Record a refused write, which the next read reports. Drop the unfinished line if it is still `rest`; None:
        any unfinished line."""
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
        """Return, once, the text that the next read gets first: why a write was refused, else the answer of a command.
        None: there is none."""
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
    """A command file whose answers may take long: they are made in portions, and a read waits for them."""

    making: Wait[bytes] | None = None
    _reading: tuple[Wait[bytes], int] | None = None  # the waiting read, and its size

    def respond(self, work: Work[bytes]) -> None:
        """Answer the next read with the result of `work`."""
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
        """Return a wait for the answer that is being made. Raises Busy for a second read."""
        if self._reading is not None:
            raise errors.Busy(f"{self.node.name}: another read waits for an answer")
        wait: Wait[bytes] = Wait(self._cancel)
        self._reading = wait, count
        return wait

    def _cancel(self, _: Wait[bytes]) -> bool:
        self._reading = None
        return True

    def stop_making(self) -> None:
        """Cancel the answer that is being made. A read that waits for it fails with Interrupted."""
        making, read = self.making, self._reading
        self.making = self._reading = None
        if making is not None:
            making.cancel()
        if read is not None:
            read[0].fail(errors.Interrupted(f"{self.node.name}: the answer was cut off"))
