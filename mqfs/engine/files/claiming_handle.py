"""What open files share that claim messages: a consumer and, under `deliver one`, a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mqfs import errors, limits
from mqfs.ack_state import Unacked
from mqfs.engine.delivery.consumer import Claim, Consumer
from mqfs.engine.files.handle import OpenFile, PartialRead
from mqfs.engine.language.permissions import R, allowed
from mqfs.model import NEVER, Record, User
from mqfs.wait import Step, Wait

if TYPE_CHECKING:
    from mqfs.engine.stream import Stream


RECORD_OVERHEAD = 80 + limits.NAME_BYTES  # of one in `format record`, beside headers and body: two heads, a name


class ClaimingHandle(OpenFile):
    """What both have: claims, reads that wait, and the processes on whose life the claims hang."""

    parkable = True
    takes = True
    until = NEVER  # reads of it end at that sequence
    acks_at_once = False

    def __init__(self, node: Any, user: User, reads: bool, writes: bool) -> None:
        super().__init__(node, user, reads, writes)
        self.consumer: Consumer = self._consumer()
        self.claims: dict[int, Claim] = {}
        self.had: tuple[Record, Unacked] | None = None  # acknowledged at once, not known to have arrived
        self.last = PartialRead()
        self.waits: dict[Wait[bytes], tuple[int, int, int]] = {}  # count, offset, the process that reads
        self.claiming_pid = 0  # the process for which a message is being fetched
        self.scanned_to, self.scanned_version = 0, -1  # up to here the log has nothing for this handle
        self.guards: dict[int, Callable[[], None]] = {}  # processes that live, and how to stop watching them
        self.consumer.opens += 1
        self.consumer.opened(self)

    def _consumer(self) -> Consumer:
        raise NotImplementedError

    def admits(self, stream: Stream, sequence: int) -> bool:
        """Whether this handle may have a message of that stream."""
        return allowed(self.user, stream.state, R)

    # ------------------------------------------------------------ reading

    @property
    def over(self) -> bool:
        return self.consumer.removed or self.group.removed

    def read(self, count: int, offset: int = 0) -> Step[bytes]:
        self.require(reading=True)
        told = self.tell(count)
        if told is not None:
            return told
        if not self.waits:
            data = self.at_once(count, offset)
            if data is not None:
                return data
            self.claiming_pid = self.reader_pid
            data = self.fetch(count, offset)
            if data is not None:
                self.group.unblock()
                return data
        else:
            self.consumer.polling_receivers.add(self)  # a read before it may leave something for this one
        wait: Wait[bytes] = Wait(self._unpark)
        self.waits[wait] = count, offset, self.reader_pid
        self.consumer.park(wait, self)
        return wait

    def tell(self, count: int) -> bytes | None:
        """What a read is told, whoever waits: why a write was refused, `info`."""
        return None

    def at_once(self, count: int, offset: int) -> bytes | None:
        """What a read gets without a new message."""
        rest = self.last.rest(count, offset, self.sequential)
        if rest is not None:
            return rest
        return b"" if self.over or count <= 0 else None

    def fetch(self, count: int, offset: int) -> bytes | None:
        """A new message's first part; None: there is nothing for this handle."""
        raise NotImplementedError

    def next_data(self, wait: Wait[bytes]) -> bytes | None:
        """For a read that waits."""
        count, offset, self.claiming_pid = self.waits[wait]
        data = self.at_once(count, offset)
        return self.fetch(count, offset) if data is None else data

    def answer(self, wait: Wait[bytes], result: bytes | errors.MqfsError) -> None:
        del self.waits[wait]
        if isinstance(result, bytes):
            wait.settle(result)
        else:
            wait.fail(result)

    def _unpark(self, wait: Wait[bytes]) -> bool:
        if not self.consumer.unpark(wait):
            return False
        del self.waits[wait]
        return True

    def push_back(self, data: bytes) -> None:
        self.last.back(data)
        self.consumer.polling_receivers.add(self)

    @property
    def readable(self) -> bool:  # type: ignore[override]
        last = self.last
        if last.can_push_back or self.over or last.given < len(last.body):
            return True
        try:
            return self.consumer.picker.next_message(self) is not None
        except errors.MqfsError:
            return True

    def watch(self, then: Callable[[], None] | None) -> None:
        self.consumer.watch(self, then)

    # ------------------------------------------------------------ the processes behind it

    def guard(self, claim: Claim) -> None:
        """Give a claim back when the process that opened the handle and the one that read the message are both gone.

        The last close is no sign: a child that inherited the descriptor keeps it open. Only a face that knows who
        reads says so.
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
            self.consumer.nack_all(orphans, "its reader ended")
            self.group.unblock()

    def _end(self) -> None:
        for wait in list(self.waits):
            self.consumer.unpark(wait)
            self.answer(wait, b"")
        for stop in self.guards.values():
            stop()
        self.guards.clear()
        self.consumer.watch(self, None)
        self.consumer.opens -= 1
        if self.had is not None and self.last.can_push_back and self.last.given == 0:
            self.consumer.undo_auto_ack(self)
        self.consumer.closed(self)
        super()._end()
        self.group.unblock()
