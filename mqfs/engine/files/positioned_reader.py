"""Readers that go on where they are: the offset of a read says what it is to get."""

from __future__ import annotations

from typing import Any

from mqfs import errors, limits
from mqfs.engine.files.searcher import Searcher
from mqfs.model import Kind, Record, User
from mqfs.wait import Step, Wait


class Reader(Searcher):
    """A reader that gives a message, or under `data coalesce` what is there, from its position on."""

    shows_only = False  # under `deliver one`: what is there, then end-of-file

    def __init__(self, node: Any, user: User, reads: bool, writes: bool) -> None:
        super().__init__(node, user, reads, writes)
        self.sequential = reads and writes

    @property
    def idle(self) -> bool:
        """It waits, so it has had everything."""
        return self in self.waits.readers

    # What a subclass says: what it finds.

    def find(self) -> Record | None:
        """The next record to give, the position moved behind it; None, too, where the look is `unfinished`. Raises
        FellBehind or Damaged."""
        raise NotImplementedError

    def is_behind(self) -> bool:
        """Whether messages that it had not had were cut, and the loss was not reported."""
        raise NotImplementedError

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
        if not self.searching:
            data = self.take(count, offset)
            if data is not None:
                return data
        return self.wait(count, offset)

    def take(self, count: int, offset: int) -> bytes | None:
        last, group, self.passed = self.last, self.group, 0
        if last.can_push_back or last.body:
            rest = last.rest(count, offset, self.sequential)
            if rest is not None:
                return rest if len(rest) == count else self._read_on(rest, count, offset)
        if self.over or count <= 0:
            return b""
        if self not in self.waits.readers:
            if group.settings.data == "coalesce":
                data = self._fill(count, offset)
            elif (record := self.find()) is not None:
                group.counts.read += 1
                data = last.first(self.present(record), count, offset)
            else:
                data = None
            if data is not None:
                group.retention.note_change()
                if group.publisher.blocked.streams:
                    group.unblock()
                return data
        if self.shows_only and group.settings.deliver == "one" and not self.unfinished:
            return b""
        return None

    def _read_on(self, rest: bytes, count: int, offset: int) -> bytes:
        """The rest of a message, and under `data coalesce` what is there behind it."""
        if self.group.settings.data != "coalesce" or self.last.given < len(self.last.body):
            return rest
        if self.over or self.idle or self.is_behind():  # which the next read tells
            return rest
        data = self._fill(count, offset, rest)
        self.group.retention.note_change()
        self.group.unblock()
        return rest if data is None else data

    def _fill(self, count: int, offset: int, rest: bytes = b"") -> bytes | None:
        """`data coalesce`: as much as fits, of a bounded number of messages; an end mark ends what stands before it."""
        pieces: list[bytes] = [rest] if rest else []
        size = len(rest)
        while size < count and len(pieces) < limits.COALESCED_MESSAGES:
            before = self.position
            try:
                record = self.find()
            except errors.MqfsError:
                if not pieces:
                    raise
                self.position = before  # the next read reports it
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

    def unpark(self, wait: Wait[bytes]) -> bool:
        if not super().unpark(wait):
            return False
        # Everything for it that came meanwhile was handed over: it need not be looked for again, or be kept.
        self.position = max(self.position, self.group.log.end.next)
        return True

    def deliver(self, record: Record, count: int, offset: int) -> bytes | None:
        self.position = record.sequence + 1
        self.group.counts.read += 1
        return self.last.first(self.present(record), count, offset)

    def rest(self, count: int, offset: int) -> bytes | None:
        return self.last.rest(count, offset, self.sequential)

    @property
    def readable(self) -> bool:  # type: ignore[override]
        last = self.last
        if last.can_push_back or self.over or last.given < len(last.body):
            return True
        return self.ahead()

    def ahead(self) -> bool:
        """Whether something is there to be found."""
        raise NotImplementedError

    def _end(self) -> None:
        self.end()
        self.group.retention.note_change()
        super()._end()
