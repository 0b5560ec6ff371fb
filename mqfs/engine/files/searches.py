"""Reads of a cursor that pass over many messages: the log is looked through in portions, and others are served between.

A read that finds nothing within one look waits here while the next looks are made, and then, at the end of the log,
like any other read for new messages. The cursor says where it looks and for which messages.
"""

from __future__ import annotations

from typing import Protocol

from mqfs import errors
from mqfs.engine.delivery.wait_list import Reader
from mqfs.engine.group import Group
from mqfs.engine.log.portions import Work
from mqfs.wait import Step, Wait


class Cursor(Reader, Protocol):
    """An open cursor."""

    group: Group
    unfinished: bool  # the last look stopped at its bound

    def take(self, count: int) -> bytes | None:
        """What a read gets now; None: nothing within one look."""
        ...


class Searches:
    """The reads of one cursor."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._reads: dict[Wait[bytes], Step[None]] = {}

    @property
    def first(self) -> Step[None]:
        """What to wait for where the log is looked through for a read; None: it is for none."""
        return next(iter(self._reads.values()), None)

    def begin(self, wait: Wait[bytes], count: int) -> Step[bytes]:
        """Continue for a read of that many bytes. Raises what the looks do."""
        self._reads[wait] = None
        step = self._cursor.group.portions.run(self._look(wait, count))
        if wait in self._reads:
            self._reads[wait] = step
        return wait.result() if wait.settled else wait

    def _look(self, wait: Wait[bytes], count: int) -> Work[None]:
        cursor, waits = self._cursor, self._cursor.group.fanout.cursor_waits
        data = None
        try:
            while cursor.unfinished and cursor not in waits.readers:
                yield
                data = cursor.take(count)
        except errors.MqfsError as error:
            del self._reads[wait]
            wait.fail(error)
            return
        del self._reads[wait]
        if data is None:
            waits.park(cursor, wait, count, 0)
        else:
            cursor.group.unblock()
            wait.settle(data)

    def cancel(self, wait: Wait[bytes]) -> bool:
        """Whether there was a search for that read; there is none any more."""
        if wait not in self._reads:
            return False
        search = self._reads.pop(wait)
        if isinstance(search, Wait):
            search.cancel()
        return True

    def end(self) -> None:
        """End-of-file for all."""
        for wait in list(self._reads):
            self.cancel(wait)
            wait.settle(b"")
