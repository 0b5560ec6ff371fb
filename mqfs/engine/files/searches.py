"""Reads of a cursor that pass over many messages: the log is looked through in portions, and others are served between.

A read that finds nothing within one look waits here while the next looks are made. Reads that come meanwhile wait
behind it: a client may send several at once, and each gets what follows the one before. At the end of the log all wait
for new messages, in the same order.
"""

from __future__ import annotations

from typing import Protocol

from mqfs.engine.delivery.wait_list import Reader
from mqfs.engine.group import Group
from mqfs.engine.log.portions import Work
from mqfs.wait import Step, Wait


class Cursor(Reader, Protocol):
    """An open cursor."""

    group: Group

    @property
    def unfinished(self) -> bool:
        """Whether the last look stopped at its bound."""
        ...

    def take(self, count: int) -> bytes | None:
        """What a read gets now; None: nothing within one look. Raises FellBehind, Damaged, DiskFailed."""
        ...


class Searches:
    """The reads of one cursor, each with its count."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self.reads: dict[Wait[bytes], int] = {}
        self.step: Step[None] = None  # what to wait for while the log is looked through

    def wait(self, count: int) -> Step[bytes]:
        """A read of `count` bytes for which the last look found nothing. Raises what further looks do."""
        cursor, wait = self._cursor, Wait[bytes](self._cancel)
        if not (self.reads or cursor.unfinished):
            cursor.group.fanout.cursor_waits.park(cursor, wait, count, 0)
            return wait
        self.reads[wait] = count
        if len(self.reads) == 1:
            step = cursor.group.portions.run(self._look())
            self.step = step if self.reads else None
        return wait.result() if wait.settled else wait

    def _look(self) -> Work[None]:
        cursor, waits = self._cursor, self._cursor.group.fanout.cursor_waits
        while self.reads:
            wait, count = next(iter(self.reads.items()))
            try:
                data = cursor.take(count)
            except Exception as error:
                del self.reads[wait]
                wait.fail(error)
            else:
                if data is not None:
                    del self.reads[wait]
                    wait.settle(data)
                elif not cursor.unfinished:
                    for wait, count in self.reads.items():
                        waits.park(cursor, wait, count, 0)
                    self.reads.clear()
            if self.reads:
                yield
        self.step = None

    def _cancel(self, wait: Wait[bytes]) -> bool:
        if self.reads.pop(wait, None) is None:
            return self._cursor.group.fanout.cursor_waits.cancel(self._cursor, wait)
        if not self.reads:
            self._stop()
        return True

    def _stop(self) -> None:
        if isinstance(self.step, Wait):
            self.step.cancel()
        self.step = None

    def end(self) -> None:
        """End-of-file for all."""
        reads = list(self.reads)
        self.reads.clear()
        self._stop()
        for wait in reads:
            wait.settle(b"")
