"""Open files that look through the log for what they show: in portions, and others are served between.

A read that finds nothing within one look waits here while the next looks are made. Reads that come meanwhile wait
behind it: a client may send several at once, and each gets what follows the one before. At the end of the log all wait
for new messages, in the same order.
"""

from __future__ import annotations

from typing import Any

from mqfs import limits
from mqfs.engine.delivery.wait_list import WaitList
from mqfs.engine.files.handle import OpenFile, PartialRead
from mqfs.engine.log.portions import Work
from mqfs.model import Record, User
from mqfs.wait import Step, Wait


class Searcher(OpenFile):
    """A handle with a position in the log, which passes over what it does not show and waits at the end."""

    parkable = True
    passed = 0  # messages that this look passed over

    def __init__(self, node: Any, user: User, reads: bool, writes: bool) -> None:
        super().__init__(node, user, reads, writes)
        self.position = self.group.log.end.next
        self.last = PartialRead()
        self.waits = self.wait_list()
        self.searching: dict[Wait[bytes], tuple[int, int]] = {}  # its reads, each with its count and offset
        self.search: Step[None] = None  # what to wait for while the log is looked through for them

    # What a subclass says: where it waits, and what it gives.

    def wait_list(self) -> WaitList:
        """Where its reads wait for a new message, as long as it is open."""
        raise NotImplementedError

    def take(self, count: int, offset: int) -> bytes | None:
        """What a read gets now; None: it has to wait, or the look was `unfinished`. Raises FellBehind, Damaged,
        DiskFailed."""
        raise NotImplementedError

    def rest(self, count: int, offset: int) -> bytes | None:
        """What a read gets of the message before; None: the next message is due."""
        raise NotImplementedError

    def deliver(self, record: Record, count: int, offset: int) -> bytes | None:
        """What a read that waits gets of a new message; None: the message is not for this reader."""
        raise NotImplementedError

    @property
    def has_ended(self) -> bool:
        """Whether its reads get end-of-file from now on."""
        return False

    @property
    def unfinished(self) -> bool:
        """Whether the last look stopped at its bound."""
        return self.passed >= limits.PASSED_MESSAGES

    def pass_over(self, record: Record) -> None:
        """That one is not shown."""
        self.passed += 1 + len(record.body) // limits.PASSED_BYTES

    def unpark(self, wait: Wait[bytes]) -> bool:
        """Whether that read waited for a new message; it does no more."""
        return self.waits.cancel(self, wait)

    def push_back(self, data: bytes) -> None:
        self.last.back(data)

    # ------------------------------------------------------------ in portions

    def wait(self, count: int, offset: int = 0) -> Step[bytes]:
        """A read of `count` bytes for which the last look found nothing. Raises what further looks do."""
        wait: Wait[bytes] = Wait(self._cancel_read)
        if not self.searching and self.passed < limits.PASSED_MESSAGES:
            self.waits.park(self, wait, count, offset)
            return wait
        self.searching[wait] = count, offset
        if len(self.searching) == 1:
            step = self.group.portions.run(self._look())
            self.search = step if self.searching else None
        return wait.result() if wait.settled else wait

    def _look(self) -> Work[None]:
        reads = self.searching
        while reads:
            wait, (count, offset) = next(iter(reads.items()))
            try:
                data = self.take(count, offset)
            except Exception as error:
                del reads[wait]
                wait.fail(error)
            else:
                if data is not None:
                    del reads[wait]
                    wait.settle(data)
                elif not self.unfinished:
                    for wait, (count, offset) in reads.items():
                        self.waits.park(self, wait, count, offset)
                    reads.clear()
            if reads:
                yield
        self.search = None

    def _cancel_read(self, wait: Wait[bytes]) -> bool:
        if self.searching.pop(wait, None) is None:
            return self.unpark(wait)
        if not self.searching:
            self._stop_search()
        return True

    def _stop_search(self) -> None:
        if isinstance(self.search, Wait):
            self.search.cancel()
        self.search = None

    def end(self) -> None:
        """End-of-file for reads that wait: the file or its group is gone, or the server stops."""
        if self.searching:
            reads = list(self.searching)
            self.searching.clear()
            self._stop_search()
            for wait in reads:
                wait.settle(b"")
        self.waits.close(self)
