"""`order`, and what else reads several streams of a group at once in the order of its log.

Owns the telling of a reader that messages it had not had were cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from mqfs import errors, limits
from mqfs.engine.delivery.wait_list import WaitList
from mqfs.engine.files.positioned_reader import Reader
from mqfs.engine.language.permissions import sees
from mqfs.engine.nodes.own_files import Meta
from mqfs.engine.stream import Stream
from mqfs.model import Kind, Record, User


class MergedReader(Reader):
    """A reader of several streams at once, in the order of the log."""

    shows_only = True

    def __init__(self, node: Any, user: User, reads: bool, writes: bool) -> None:
        super().__init__(node, user, reads, writes)
        self.cuts: dict[int, int] = {}  # of each stream, the cut that was reported here
        self.cuts_seen = self.group.retention.evictions
        self._start()

    def on_opened(self) -> None:
        super().on_opened()
        self.group.fanout.log_readers.add(self)

    def covers(self, stream: Stream) -> bool:
        """Whether it is to be shown messages of that stream."""
        return True

    def admits(self, stream: Stream, record: Record) -> bool:
        """Whether it is to be shown that one."""
        return record.kind == Kind.MESSAGE and not self.group.ranks.is_hidden(record)

    def wants(self, record: Record) -> bool:
        """Whether a new message is for it."""
        return not record.headers or not self.group.ranks.is_hidden(record)

    def deliver(self, record: Record, count: int, offset: int) -> bytes | None:
        return super().deliver(record, count, offset) if self.wants(record) else None

    def look(self, most: int) -> Record | None:
        """The next message in the log that may be for it. If none of `most` is, the last of them. Raises Damaged."""
        raise NotImplementedError

    def _start(self) -> None:
        replay = "all" if self.group.settings.deliver == "one" else self.group.settings.replay
        if replay == "off":
            return
        self.group.retention.advance_all()
        if replay == "all":
            self.position = self.group.log.reader.first
        else:
            mine = (s.kept.newest_kept() for s in self.group.numbers.values() if self.covers(s))
            self.position = max(mine, default=0) or self.position
        self.cuts = {stream.number: stream.kept.evicted_before for stream in self.group.numbers.values()}

    def find(self) -> Record | None:
        group = self.group
        if group.retention.evictions != self.cuts_seen:
            self._look_for_cuts()
        while True:
            try:
                record = self.look(limits.SCANNED_MESSAGES)
            except errors.Damaged as error:
                self.position = error.sequence + 1
                raise
            if record is None:
                return None
            self.position = record.sequence + 1
            stream = group.numbers.get(record.stream)
            if stream is not None and self.admits(stream, record) and stream.kept.visible(record):
                return record
            self.pass_over(record)
            if self.unfinished:
                return None

    def is_behind(self) -> bool:
        group = self.group
        if group.retention.evictions == self.cuts_seen or self.position >= group.retention.evicted_before:
            return False
        return bool(fell_behind(self.position, dict(self.cuts), filter(self.covers, group.numbers.values())))

    def _look_for_cuts(self) -> None:
        group = self.group
        self.cuts_seen = group.retention.evictions
        if self.position >= group.retention.evicted_before:
            return
        behind = fell_behind(self.position, self.cuts, filter(self.covers, group.numbers.values()))
        if behind:
            group.counts.fell_behind += 1
            raise errors.FellBehind(f"messages of {behind} were lost")

    def ahead(self) -> bool:
        return self.position < self.group.log.end.next and self.look(limits.PASSED_MESSAGES) is not None

    def watch(self, then: Callable[[], None] | None) -> None:
        self.group.fanout.pollers.watch(self, then)

    def _end(self) -> None:
        super()._end()
        self.group.fanout.log_readers.discard(self)
        self.group.fanout.pollers.watch(self, None)
        self.group.unblock()


class OrderHandle(MergedReader):
    """`order`: of each message of the group, its stream's name and a NUL byte."""

    node: Meta

    def covers(self, stream: Stream) -> bool:
        return sees(self.user, self.group.state, stream.state)

    def admits(self, stream: Stream, record: Record) -> bool:
        return super().admits(stream, record) and self.covers(stream)

    def wants(self, record: Record) -> bool:
        return super().wants(record) and self.covers(self.group.numbers[record.stream])

    def look(self, most: int) -> Record | None:
        group, position = self.group, self.position
        while (record := group.log.reader.scan(position)) is not None:
            stream = group.numbers.get(record.stream)
            most -= 1
            if not most or (stream is not None and self.covers(stream)):
                break
            position = record.sequence + 1
        return record

    def wait_list(self) -> WaitList:
        return self.group.fanout.order_waits

    def present(self, record: Record) -> bytes:
        stream = self.group.numbers.get(record.stream)
        return (stream.name.encode() if stream else b"") + b"\0"


def fell_behind(position: int, reported: dict[int, int], streams: Iterable[Stream]) -> str:
    """The name of a stream that lost messages at or above `position`, and the loss was not reported; "" if none.

    All cuts of the streams count as reported afterwards.
    """
    behind = ""
    for stream in streams:
        if stream.kept.evicted_before > position and reported.get(stream.number, 0) < stream.kept.evicted_before:
            behind = stream.name
        if stream.kept.evicted_before:
            reported[stream.number] = stream.kept.evicted_before
    return behind
