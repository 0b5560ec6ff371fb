"""Parked reads, and polling programs.

    WaitList       readers of a stream, of `order`, of a view, and cursors: each of them gets every message
    ParkedReads    readers of a consumer: each message goes to one of them
    PollList       programs that poll open files: each is called once

All lists of a group share one Waiting. Its `readers` counts readers and pollers, so that a write checks one number.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from mqfs import errors, limits
from mqfs.engine.retention.low_watermark import LowWatermark
from mqfs.model import NEVER, Record, Step, Wait

if TYPE_CHECKING:
    from mqfs.engine.core.log import GroupLog
    from mqfs.engine.delivery.dispatcher import Dispatcher
    from mqfs.engine.files.claiming import ClaimingHandle
    from mqfs.engine.files.readers import Searcher


_AT_ONCE = 128  # reads of one reader resolved in a row: about half a millisecond


class Waiting:
    """State that all lists of a group share."""

    __slots__ = ("left", "readers", "record_being_delivered")

    def __init__(self) -> None:
        self.readers = 0  # parked readers and pollers
        self.left = limits.PASSED_MESSAGES  # messages that claims may pass over in this piece of work
        self.record_being_delivered: Record | None = None  # the newest message, so that it need not be read again


class WaitList:
    """Readers, each with its reads, in the order in which they began to wait. Each gets every message.

    A queue whose first row is removed is an OrderedDict, here and elsewhere: to find the first row of a dict takes a
    step for each row removed before it.
    """

    __slots__ = ("_waiting", "readers")

    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting
        self.readers: dict[Searcher, OrderedDict[Wait[bytes], tuple[int, int]]] = {}  # a read: count, offset

    def count_reads(self) -> int:
        return sum(map(len, self.readers.values()))

    def park(self, reader: Searcher, wait: Wait[bytes], count: int, offset: int) -> None:
        """Park a read of `count` bytes at `offset`."""
        reads = self.readers.get(reader)
        if reads is None:
            reads = self.readers[reader] = OrderedDict()
            self._waiting.readers += 1
        reads[wait] = count, offset

    def cancel(self, reader: Searcher, wait: Wait[bytes]) -> bool:
        """Remove a parked read; return whether it was parked."""
        reads = self.readers.get(reader)
        if reads is None or reads.pop(wait, None) is None:
            return False
        if not reads:
            self._forget(reader)
        return True

    def _forget(self, reader: Searcher) -> None:
        del self.readers[reader]
        self._waiting.readers -= 1

    def deliver(self, record: Record) -> None:
        """Resolve the first read of each reader that the message is for, and further reads with the rest of the
        message."""
        for reader in list(self.readers):
            reads = self.readers.get(reader)
            if reads is None:
                continue
            wait, (count, offset) = next(iter(reads.items()))
            try:
                data = reader.deliver(record, count, offset)
            except errors.MqfsError as error:  # the delivery could not be recorded; the write itself succeeded
                self.cancel(reader, wait)
                wait.fail(error)
                continue
            if data is None:
                continue
            del reads[wait]
            if not reads:
                del self.readers[reader]
                self._waiting.readers -= 1
            wait.resolve(data)
            if reads:
                self._serve_rest(reader, reads)

    def _serve_rest(self, reader: Searcher, reads: OrderedDict[Wait[bytes], tuple[int, int]]) -> None:
        """Resolve a reader's next reads without a new message: some at once, the rest in portions. Meanwhile a
        subscriber may push data back, cancel reads or close the reader."""
        served = 0
        while reads and self.readers.get(reader) is reads:
            if served == _AT_ONCE:
                reader.serve(self.take_out(reader))
                break
            served += 1
            wait, (count, offset) = next(iter(reads.items()))
            data = reader.rest(count, offset)
            if data is not None:
                self.cancel(reader, wait)
                wait.resolve(data)
            elif reader.has_ended:
                self.close(reader)
            else:
                break

    def take_out(self, reader: Searcher) -> OrderedDict[Wait[bytes], tuple[int, int]]:
        """Remove a reader with its parked reads, and return these."""
        reads = self.readers.get(reader)
        if reads is None:
            return OrderedDict()
        self._forget(reader)
        return reads

    def close(self, reader: Searcher) -> None:
        """Resolve all reads of a reader with end-of-file."""
        for wait in self.take_out(reader):
            wait.resolve(b"")


class PollList:
    """Programs that poll open files: each is called once when its file may be readable or writable."""

    __slots__ = ("_waiting", "calls")

    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting
        self.calls: dict[object, Callable[[], None]] = {}

    def watch(self, file: object, then: Callable[[], None] | None) -> None:
        """Call `then` once for that file; None: stop watching it."""
        before = len(self.calls)
        if then is None:
            self.calls.pop(file, None)
        else:
            self.calls[file] = then
        self._waiting.readers += len(self.calls) - before

    def wake_one(self, file: object) -> None:
        """Call the program that polls the file, if there is one."""
        if (then := self.calls.get(file)) is not None:
            self.watch(file, None)
            then()

    def wake(self) -> None:
        calls, self.calls = self.calls, {}
        self._waiting.readers -= len(calls)
        for then in calls.values():
            then()


# ------------------------------------------------------------ the reads of a consumer

# Each message goes to one read. The read parked first is served first; the dispatcher chooses its message. A reader
# without a message is passed over, as another may have other rights or another selection.


class ReadEnds:
    """The sequences at which parked reads of a group's consumers end. A message of any stream may reach one."""

    def __init__(self, log: GroupLog) -> None:
        self.log = log
        self._ends = LowWatermark()
        self._reads: dict[int, ParkedReads] = {}
        self.next = NEVER  # the lowest

    def set(self, number: int, reads: ParkedReads, sequence: int) -> None:
        """Record that a parked read of consumer `number` ends at `sequence`."""
        self._ends.set(number, sequence)
        self._reads[number] = reads
        self.next = self._ends.value

    def remove(self, number: int) -> None:
        self._ends.remove(number)
        self._reads.pop(number, None)
        self.next = self._ends.value

    def end_reads(self) -> None:
        """Serve the consumers whose parked reads end before the next message."""
        while self.next <= self.log.end.next and (number := self._ends.name) is not None:
            reads = self._reads[number]
            self.remove(number)
            reads.serve()
            if (end := reads.next_end(self.log.end.next)) != NEVER:
                self.set(number, reads, end)


class ParkedReads:
    """The parked reads of the consumer `number`, and the programs that poll it."""

    __slots__ = ("_dispatcher", "_ends", "_list", "_number", "_polls", "_waiting", "_withdrawn", "parked", "polling")

    def __init__(self, number: int, waiting: Waiting, dispatcher: Dispatcher, ends: ReadEnds) -> None:
        self._number, self._waiting, self._dispatcher, self._ends = number, waiting, dispatcher, ends
        self.parked: OrderedDict[Wait[bytes], ClaimingHandle] = OrderedDict()  # the first one parked is served first
        self.polling: set[ClaimingHandle] = set()  # receivers whose reads may end without a new message
        self._polls: dict[object, Callable[[], None]] = {}
        self._list: dict[ParkedReads, None] = {}
        self._withdrawn: dict[Wait[bytes], int] = {}  # to be cancelled when the search has reached this end

    def join(self, waiting: dict[ParkedReads, None]) -> None:
        """Use the list `waiting` from now on: it holds this object while a read is parked or a program polls."""
        if self in self._list:
            waiting[self] = None
        self._list = waiting

    @property
    def is_waiting(self) -> bool:
        return self in self._list

    def _start_waiting(self) -> None:
        if self not in self._list:
            self._list[self] = None
            self._waiting.readers += 1

    def stop_waiting(self) -> None:
        if self in self._list:
            del self._list[self]
            self._waiting.readers -= 1

    def _stop_if_idle(self) -> None:
        if not self.parked and not self._polls:
            self.stop_waiting()

    def park(self, wait: Wait[bytes], reader: ClaimingHandle) -> None:
        self.parked[wait] = reader
        self._start_waiting()
        if reader.end_sequence != NEVER:
            self.note_end(reader)

    def note_end(self, reader: ClaimingHandle) -> None:
        """Record that the parked reads of a receiver end at its `end_sequence`."""
        end = min(other.end_sequence for other in {reader, *self.parked.values()})
        self._ends.set(self._number, self, end)

    def next_end(self, after: int) -> int:
        """Return the lowest sequence above `after` at which a parked read ends; NEVER if there is none."""
        ends = (reader.end_sequence for reader in self.parked.values())
        return min((end for end in ends if end > after), default=NEVER)

    def cancel(self, wait: Wait[bytes]) -> bool:
        """Remove a parked read; return whether it was parked."""
        if self.parked.pop(wait, None) is None:
            return False
        self._withdrawn.pop(wait, None)
        self._stop_if_idle()
        return True

    def withdraw(self, wait: Wait[bytes]) -> bool:
        """As `cancel`, but only when the search has examined all present messages for the read's reader; until then
        return False. Then the read gets a message that was found, or fails with Interrupted."""
        end = self._withdrawn.get(wait, self._ends.log.end.next)
        reader = self.parked.get(wait)
        if reader is None or self._dispatcher.has_looked(reader, end):
            return self.cancel(wait)
        self._withdrawn[wait] = end
        return False

    def serve(self) -> None:
        """Resolve reads with the present messages, the first parked first. Once a reader gets nothing, try every other
        reader once."""
        passed: set[ClaimingHandle] = set()
        while self.parked and not passed and self._may_serve():
            self._serve_one(*next(iter(self.parked.items())), passed)
        for wait, reader in list(self.parked.items()) if passed else ():
            if not self._may_serve():
                break
            if wait in self.parked and reader not in passed:
                self._serve_one(wait, reader, passed)
        for wait, end in list(self._withdrawn.items()) if self._withdrawn else ():
            last = self.parked.get(wait)
            if last is not None and self._dispatcher.has_looked(last, end):
                self.cancel(wait)
                last.respond(wait, errors.Interrupted())
        self._wake_pollers()

    def _may_serve(self) -> bool:
        return bool(self.polling) or not self._dispatcher.exhausted

    def _serve_one(self, wait: Wait[bytes], reader: ClaimingHandle, passed: set[ClaimingHandle]) -> None:
        try:
            found = not self._dispatcher.exhausted or reader in self.polling
            result: Step[bytes] | errors.MqfsError | None = reader.next_data(wait) if found else None
        except errors.MqfsError as error:
            result = error
        if result is None:
            passed.add(reader)
        else:
            self.cancel(wait)
            reader.respond(wait, result)

    def watch(self, file: object, then: Callable[[], None] | None) -> None:
        """Call `then` once when there may be a message for that open file; None: stop watching it."""
        if then is None:
            self._polls.pop(file, None)
            self._stop_if_idle()
        else:
            self._polls[file] = then
            self._start_waiting()

    def _wake_pollers(self) -> None:
        if not self._polls:
            return
        polls, self._polls = self._polls, {}
        self._stop_if_idle()
        for then in polls.values():
            then()

    def close(self) -> None:
        """Resolve all reads with end-of-file: the consumer is removed, or the server stops."""
        for wait, reader in list(self.parked.items()):
            self.cancel(wait)
            reader.respond(wait, b"")
        self._wake_pollers()
