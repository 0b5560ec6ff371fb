"""Reads that wait in one place, and programs that poll there.

All lists of a group share one Waiting, so that a write looks at one number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mqfs.model import Record, Wait

if TYPE_CHECKING:
    from mqfs.engine.files.readers import Searcher


class Waiting:
    """What all lists of a group share."""

    __slots__ = ("readers", "record_being_delivered")

    def __init__(self) -> None:
        self.readers = 0  # that wait, pollers among them
        self.record_being_delivered: Record | None = None  # the newest message, so that it need not be read again


class WaitList:
    """Readers, each with its reads, in the order in which they began to wait. Each gets every message."""

    __slots__ = ("_waiting", "readers")

    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting
        self.readers: dict[Searcher, dict[Wait[bytes], tuple[int, int]]] = {}  # each read with its count and offset

    def count_reads(self) -> int:
        return sum(map(len, self.readers.values()))

    def park(self, reader: Searcher, wait: Wait[bytes], count: int, offset: int) -> None:
        """A read of `count` bytes at that offset waits."""
        reads = self.readers.get(reader)
        if reads is None:
            reads = self.readers[reader] = {}
            self._waiting.readers += 1
        reads[wait] = count, offset

    def cancel(self, reader: Searcher, wait: Wait[bytes]) -> bool:
        """Whether that read waited; it does no more."""
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
        """Settle the first read of each reader that the message is for, and further reads with its rest."""
        for reader in list(self.readers):
            reads = self.readers.get(reader)
            if reads is None:
                continue
            wait, (count, offset) = next(iter(reads.items()))
            data = reader.deliver(record, count, offset)
            if data is None:
                continue
            del reads[wait]
            if not reads:
                del self.readers[reader]
                self._waiting.readers -= 1
            wait.settle(data)
            if reads:
                self._serve_rest(reader, reads)

    def _serve_rest(self, reader: Searcher, reads: dict[Wait[bytes], tuple[int, int]]) -> None:
        """Settle its next reads without a new message. A subscriber may push back, cancel reads or close the reader."""
        while reads and self.readers.get(reader) is reads:
            wait, (count, offset) = next(iter(reads.items()))
            data = reader.rest(count, offset)
            if data is not None:
                self.cancel(reader, wait)
                wait.settle(data)
            elif reader.has_ended:
                self.close(reader)
            else:
                break

    def close(self, reader: Searcher) -> None:
        """Settle all its reads with end-of-file."""
        reads = self.readers.get(reader)
        if reads is not None:
            self._forget(reader)
            for wait in reads:
                wait.settle(b"")


class PollList:
    """Programs that poll open files: each is called once when its file may be readable or writable."""

    __slots__ = ("_waiting", "calls")

    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting
        self.calls: dict[object, Callable[[], None]] = {}

    def watch(self, file: object, then: Callable[[], None] | None) -> None:
        """Call `then` for that file; None: no more."""
        before = len(self.calls)
        if then is None:
            self.calls.pop(file, None)
        else:
            self.calls[file] = then
        self._waiting.readers += len(self.calls) - before

    def wake(self) -> None:
        calls, self.calls = self.calls, {}
        self._waiting.readers -= len(calls)
        for then in calls.values():
            then()
