"""Delivery of a new message to all parked readers: of its stream, `order`, cursors, views, consumers, and pollers.

They are served in that order, each before the write returns. While no read is parked a write checks one number.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from mqfs import limits
from mqfs.engine.delivery.waiting import PollList, WaitList
from mqfs.engine.routing import View
from mqfs.model import NEVER, Kind, Record

if TYPE_CHECKING:
    from mqfs.engine.files.cursor import Cursor
    from mqfs.engine.files.readers import MergedReader, Searcher
    from mqfs.engine.group import Group
    from mqfs.engine.stream import Stream

MESSAGE = int(Kind.MESSAGE)


class Fanout:
    """The open readers of a group, and the lists of their parked reads."""

    def __init__(self, group: Group) -> None:
        self._log, self._expiry, self._ranks = group.log, group.retention.expiry, group.ranks
        self._views, self._consumers, self._waiting = group.views, group.consumers, group.waiting
        self.log_readers: set[MergedReader] = set()  # readers of `order` and views
        self.order_waits = WaitList(group.waiting)
        self.cursors: set[Cursor] = set()
        self._unused = -1  # unused sequences before the first of this start; -1: not counted yet
        self.cursor_waits = WaitList(group.waiting)
        self.view_waits: dict[View, WaitList] = {}
        self.pollers = PollList(group.waiting)  # of `order`, views and cursors

    def all_wait(self, stream: Stream) -> bool:
        """Whether all open readers of the stream are parked: a message for them need not be stored."""
        return (
            len(stream.waits.readers) == len(stream.readers)
            and len(self.order_waits.readers) == len(self.log_readers)
            and len(self.cursor_waits.readers) == len(self.cursors)
        )

    def low_watermark(self, stream: Stream) -> int:
        """Return the lowest sequence of the stream that an open reader has not read."""
        low = NEVER
        if len(stream.waits.readers) < len(stream.readers):  # a parked reader has read everything
            for reader in stream.readers:
                if reader not in stream.waits.readers:
                    low = min(low, reader.position)
        for several in self.log_readers:
            if not several.idle and several.covers(stream):
                low = min(low, several.position)
        if self.cursors:
            slack = self._slack()
            for cursor in self.cursors:
                low = min(low, max(cursor.position, slack))
        return low

    def _slack(self) -> int:
        """Return the sequence below which cursors retain nothing: at most `CURSOR_SLACK_MESSAGES` before the end.
        Unused sequences do not count."""
        log = self._log
        slack = log.end.next - limits.CURSOR_SLACK_MESSAGES
        if slack < log.began_at:
            if self._unused < 0:
                self._unused = log.began_at - 1 - (log.reader.before(log.began_at) or 0)
            slack -= self._unused
        return slack

    def overtake_cursors(self, stream: Stream, old_floor: int) -> None:
        """Count evicted messages of the stream as lost for the cursors that had not read them."""
        if not self.cursors:
            return
        floor = stream.state.floor
        gone = self._log.reader.before(floor, stream.number)
        if gone is None or gone < self._expiry.expired_before():
            return
        for cursor in self.cursors:
            if cursor.position <= gone and stream.number in cursor.streams():
                cursor.lost += stream.kept.messages(max(cursor.position, old_floor), floor)

    def has_live_readers(self, streams: Iterable[Stream]) -> bool:
        """Whether a reader of these streams is open, parked or not."""
        return bool(self.log_readers or self.cursors or any(stream.readers for stream in streams))

    def is_selected(self, stream: Stream) -> bool:
        """Whether an open cursor has selected the stream by its name, so that the stream's removal may end it."""
        return any(stream.number in (cursor.selection.numbers or ()) for cursor in self.cursors)

    def is_awaited(self, streams: list[Stream]) -> bool:
        """Whether each new message of these streams must be delivered by itself, for a parked reader or a bound. Remove
        streams at the end of the list that no reader awaits: repeated calls during a delivery check each once."""
        consumers = self._consumers
        if self._log.end.next >= consumers.read_ends.next:
            return True
        if not (self._waiting.readers or consumers.bounded):
            return False
        if self.order_waits.readers or self.cursor_waits.readers or self.pollers.calls:
            return True
        while streams:
            last = streams[-1]
            if last.waits.readers or last.pollers.calls or last.is_attended:
                return True
            streams.pop()
        return any(waits.readers for waits in self.view_waits.values())

    def deliver(self, stream: Stream, record: Record) -> None:
        """Serve all parked readers with a message that was appended and counted."""
        rank = self._ranks.note(record) if record.headers else None
        consumers = self._consumers
        self._waiting.left = limits.PASSED_MESSAGES
        if self._waiting.readers:
            if stream.waits.readers:
                stream.waits.deliver(record)
            if self.order_waits.readers and record.kind == MESSAGE:
                self.order_waits.deliver(record)
            if self.cursor_waits.readers:
                self.cursor_waits.deliver(record)
            if self._views and record.kind == MESSAGE:
                self._deliver_to_views(stream, record)
        elif rank is None and not consumers.bounded:
            return
        ends = record.sequence + 1 >= consumers.read_ends.next
        if rank is not None or consumers or stream.default_consumer is not None or ends:
            self._waiting.record_being_delivered = record
            try:
                consumers.offer(stream, record, rank)
            finally:
                self._waiting.record_being_delivered = None
        if stream.pollers.calls:
            stream.pollers.wake()
        if self.pollers.calls:
            self.pollers.wake()

    def _deliver_to_views(self, stream: Stream, record: Record) -> None:
        """Deliver to readers of views. Each view's programs run once, whatever the number of its readers."""
        for name in self._views.of(stream):
            waits = self.view_waits.get(self._views[name])
            if waits is not None and waits.readers and self._views.selects(name, stream, record):
                waits.deliver(record)

    def waits_of(self, view: View) -> WaitList:
        """Return the parked readers of a view."""
        waits = self.view_waits.get(view)
        if waits is None:
            waits = self.view_waits[view] = WaitList(self._waiting)
        return waits

    def close_view(self, view: View) -> None:
        """End the parked reads of a removed view with end-of-file."""
        for reader in list(view.readers):
            reader.end()
        self.view_waits.pop(view, None)

    def end(self) -> None:
        """End the parked reads of `order`, views and cursors with end-of-file: the group is removed, or the server
        stops."""
        self.pollers.wake()
        readers: list[Searcher] = [*self.log_readers, *self.cursors]
        for reader in readers:
            reader.end()
        self.view_waits.clear()
