"""Open files that claim messages: their base class, streams under `deliver one`, and files that peek.

They are the receivers of delivery. The consumer decides which message a read gets.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from itertools import count as count_up
from typing import TYPE_CHECKING, Any

from mqfs import errors, limits
from mqfs.engine.core import multipart
from mqfs.engine.core.portions import Work
from mqfs.engine.delivery.consumer import Claim, Consumer
from mqfs.engine.files.handle import OpenFile, PartialRead, to_tell_of
from mqfs.engine.files.stream import Writer
from mqfs.engine.language.permissions import R, allowed
from mqfs.engine.nodes import TakeFile
from mqfs.model import NEVER, Record, Step, User, Wait

if TYPE_CHECKING:
    from mqfs.engine.delivery.priorities import OwnHeap
    from mqfs.engine.stream import Stream

_LOOKED_AT = 32  # messages, between two looks at the clock
RECORD_OVERHEAD = 120 + limits.NAME_BYTES  # bytes of a record beside headers and body: three heads, a name


class ClaimingHandle(OpenFile):
    """A receiver: its claims, its parked reads, and the processes that may ack the claims."""

    parkable = True
    takes = True
    end_sequence = NEVER  # reads end there
    acks_next = 0  # claims that the next read acks
    one_by_one = False  # its claims are counted against a quota

    def __init__(self, node: Any, user: User, reads: bool, writes: bool) -> None:
        super().__init__(node, user, reads, writes)
        self.consumer: Consumer = self._consumer()
        self.claims: dict[int, Claim] = {}
        self.last: PartialRead = PartialRead(self)
        self.waits: dict[Wait[bytes], tuple[int, int, int]] = {}  # count, offset, the process that reads
        self.claiming_pid = 0  # the process for which a message is being claimed
        self.scanned_to, self.scanned_version = 0, -1  # up to here the log has nothing for this handle
        self.own_heap: OwnHeap | None = None  # known messages for it, where it may not have all
        self.guards: dict[int, Callable[[], None]] = {}  # living processes, and how to stop watching them
        self.group.retention.apply_depth_after_recovery()

    def on_opened(self) -> None:
        super().on_opened()
        self.consumer.opens += 1
        self.consumer.receivers.add(self)
        self.consumer.had_receiver = True

    def _consumer(self) -> Consumer:
        raise NotImplementedError

    def may_receive(self, stream: Stream, sequence: int) -> bool:
        """Whether this handle may have that message of that stream."""
        return allowed(self.user, stream.state, R)

    def may_receive_all(self, stream: Stream) -> bool:
        """Whether this handle surely may have all messages of that stream, below `end_sequence`."""
        return False

    # ------------------------------------------------------------ reading

    @property
    def has_ended(self) -> bool:
        """Whether reads get end-of-file from now on."""
        return self.consumer.removed or self.group.removed

    def read(self, count: int, offset: int = 0) -> Step[bytes]:
        if not self.reads:
            self.require(reading=True)
        if not self.waits:
            data = self.at_once(count, offset)
            if data is not None:
                return data
            if self.group.tree.memory.over:
                self.require_memory()
            self.claiming_pid = self.reader_pid
            self.group.waiting.left = limits.PASSED_MESSAGES
            data = self.fetch(count, offset)
            if data is not None:
                self.group.unblock()
                return data
        else:
            self.consumer.reads.polling.add(self)  # an earlier read may leave a rest for this one
        wait: Wait[bytes] = Wait(self._unpark)
        self.waits[wait] = count, offset, self.reader_pid
        self.consumer.reads.park(wait, self)
        return wait

    def at_once(self, count: int, offset: int) -> Step[bytes] | None:
        """Return the bytes for a read that needs no new message: a rest, or end-of-file. None: it needs one."""
        rest: Step[bytes] | None = self.last.rest(count, offset, self.sequential)
        if rest is not None:
            return rest
        return b"" if self.has_ended or count <= 0 else None

    def fetch(self, count: int, offset: int) -> Step[bytes] | None:
        """Claim a message and return its first part. None: there is none for this handle."""
        raise NotImplementedError

    def next_data(self, wait: Wait[bytes]) -> Step[bytes] | None:
        """Return the bytes for a parked read. None: it stays parked."""
        count, offset, self.claiming_pid = self.waits[wait]
        data = self.at_once(count, offset)
        return self.fetch(count, offset) if data is None else data

    def respond(self, wait: Wait[bytes], result: Step[bytes] | errors.MqfsError) -> None:
        del self.waits[wait]
        if isinstance(result, errors.MqfsError):
            wait.fail(result)
        else:
            wait.follow(result)

    def _unpark(self, wait: Wait[bytes]) -> bool:
        reads = self.consumer.reads
        if not (reads.cancel(wait) if wait.otherwise is None else reads.withdraw(wait)):
            return False
        del self.waits[wait]
        return True

    def push_back(self, data: bytes) -> None:
        self.last.back(data)
        self.consumer.reads.polling.add(self)

    @property
    def readable(self) -> bool:  # type: ignore[override]
        last = self.last
        if last.can_push_back or self.has_ended or last.given < len(last.body):
            return True
        self.group.waiting.left = limits.PASSED_MESSAGES
        try:
            return self.consumer.dispatcher.next_message(self) is not None
        except errors.MqfsError:
            return True

    def watch(self, then: Callable[[], None] | None) -> None:
        self.consumer.reads.watch(self, then)

    # ------------------------------------------------------------ reading processes

    def guard(self, claim: Claim) -> None:
        """Nack a claim when both the process that opened the handle and the one that read the message have ended.

        The last close does not show that: a child that inherited the descriptor keeps it open. Only some front ends
        know the reading process.
        """
        processes = self.group.tree.processes
        if claim.pid and processes is not None:
            for pid in {claim.pid, self.user.pid}:
                if pid not in self.guards:
                    stop = processes.watch(pid, lambda pid=pid: self._died(pid))  # type: ignore[misc]
                    if stop is not None:
                        self.guards[pid] = stop

    def _died(self, pid: int) -> None:
        self.guards.pop(pid, None)
        if self.user.pid not in self.guards:
            orphans = [claim for claim in self.claims.values() if claim.pid and claim.pid not in self.guards]
            self.consumer.redelivery.nack_all(orphans, "its reader ended")
            self.group.unblock()

    def _end(self) -> None:
        for wait in list(self.waits):
            self.consumer.reads.cancel(wait)
            self.respond(wait, b"")
        for stop in self.guards.values():
            stop()
        self.guards.clear()
        self.consumer.reads.watch(self, None)
        self.consumer.opens -= 1
        self.group.waiting.left = limits.PASSED_MESSAGES
        with ExitStack() as rest:  # an error of the disk leaves nothing open
            rest.callback(self.group.unblock)
            rest.callback(super()._end)
            rest.callback(self.consumer.closed, self)
            last = self.last
            if self in self.consumer.unconfirmed and last.can_push_back and not last.given + last.gone:
                self.consumer.undo_auto_ack(self)


# ------------------------------------------------------------ work stream file


class WorkStreamHandle(ClaimingHandle, Writer):
    """A stream of a `deliver one` group, opened for reading and writing."""

    node: Stream
    pending: Claim | None = None  # `ack next`: the claim that the next read acks

    def _consumer(self) -> Consumer:
        return self.node.own_consumer()

    def may_receive(self, stream: Stream, sequence: int) -> bool:
        return True

    @property
    def auto_ack(self) -> bool:  # type: ignore[override]
        return self.group.settings.ack == "read"

    @property
    def acks_next(self) -> int:  # type: ignore[override]
        return int(self.pending is not None and self.pending.sequence in self.claims)

    def fetch(self, count: int, offset: int) -> Step[bytes] | None:
        done, consumer = self.pending, self.consumer
        if done is not None and done.sequence not in self.claims:
            done = self.pending = None  # its lease ran out
        record = consumer.claim_next(self, done=done)
        self.pending = None
        if record is None and done is not None:
            self.group.unblock()  # the ack may have made room for a blocked writer
            record = consumer.claim_next(self)
        if record is None:
            return None
        self.pending = self.claims.get(record.sequence)  # none under `ack read`
        if record.headers:
            first = self.pending.entry.first if self.pending is not None else consumer.unconfirmed[self][1]
            if (long := multipart.whole(self.group, record, first)) is not None:
                return self.last.first_of_many(long, count, offset)
        return self.last.first(record.body, count, offset)

    def watch(self, then: Callable[[], None] | None) -> None:
        ClaimingHandle.watch(self, then)
        Writer.watch(self, then)


# ------------------------------------------------------------ peek file


class PeekHandle(OpenFile):
    """The backlog of a consumer, opened for reading only: oldest first, then end-of-file. It changes nothing."""

    def __init__(self, node: Consumer | Stream | TakeFile, user: User, reads: bool, writes: bool) -> None:
        super().__init__(node, user, reads, writes)
        self.last: PartialRead = PartialRead(self)
        self.position = 0
        self.shown: tuple[Record, int] | None = None  # the last message, and the number of its next delivery
        self.opened = self.consumer
        self.group.retention.apply_depth_after_recovery()

    def on_opened(self) -> None:
        super().on_opened()
        self.opened.opens += 1

    @property
    def consumer(self) -> Consumer:
        node = self.node.stream if isinstance(self.node, TakeFile) else self.node
        return node if isinstance(node, Consumer) else node.shown_consumer()

    def read(self, count: int, offset: int = 0) -> Step[bytes]:
        self.require(reading=True)
        rest: bytes | None = self.last.rest(count, offset, sequential=False)
        if rest is not None:
            return rest
        if count <= 0 or self.node.removed:
            return b""
        if self.group.tree.memory.over:
            self.require_memory()
        # Cannot be cancelled: with O_NONBLOCK a cancelled read would look like end-of-file.
        return self.group.portions.run(self._look(count, offset), may_be_cancelled=False)

    def _look(self, count: int, offset: int) -> Work[bytes]:
        """Return the next message that may be shown, in steps; empty at the end. Other reads may move the position
        meanwhile."""
        for looked in count_up(1):
            if self.node.removed or self.closed:
                break
            consumer = self.consumer  # perhaps made for this look
            if consumer.coverage.exclusives_only:
                break  # only a claim delivers exclusive messages
            record, position = consumer.backlog.unclaimed(self.position, _LOOKED_AT)
            if record is None and position == NEVER:
                break
            self.position = position
            if record is not None and self._shows(record):
                entry = consumer.progress.unacked.get(record.sequence)
                self.shown = to_tell_of(record), 1 if entry is None else entry.failed + 1
                return self.last.first(record.body, count, offset)
            if record is None or looked % _LOOKED_AT == 0:
                yield
        return b""

    def _shows(self, record: Record) -> bool:
        hidden = self.group.ranks.is_hidden(record)
        return not hidden and allowed(self.user, self.group.numbers[record.stream].state, R)

    def push_back(self, data: bytes) -> None:
        self.last.back(data)

    def _end(self) -> None:
        self.opened.opens -= 1
        self.opened.on_handle_closed()
        super()._end()
