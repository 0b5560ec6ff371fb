"""An open view: a position in the log, like `order`, that gives bodies."""

from __future__ import annotations

from mqfs.engine.delivery.wait_list import WaitList
from mqfs.engine.files.order_file import MergedReader
from mqfs.engine.language.permissions import R, allowed
from mqfs.engine.routing.message_filter import MessageFilter
from mqfs.engine.routing.view import View
from mqfs.engine.stream import Stream
from mqfs.model import Record, User


class ViewHandle(MergedReader):
    """A view, open to read."""

    node: View

    def __init__(self, node: View, user: User, reads: bool, writes: bool) -> None:
        self.selection = MessageFilter(node.group, None, (node.name,))
        super().__init__(node, user, reads, writes)

    def on_opened(self) -> None:
        super().on_opened()
        self.node.readers.add(self)

    def wait_list(self) -> WaitList:
        return self.group.fanout.waits_of(self.node)

    @property
    def over(self) -> bool:
        return self.node.removed or self.group.removed

    def covers(self, stream: Stream) -> bool:
        return self.selection.covers(stream) and allowed(self.user, stream.state, R)

    def admits(self, stream: Stream, record: Record) -> bool:
        return self._may_show(stream, record) and self.group.views.selects(self.node.name, stream, record)

    def _may_show(self, stream: Stream, record: Record) -> bool:
        """Whether it is to be shown that one, if it is in the view."""
        return super().admits(stream, record) and self.covers(stream)

    def wants(self, record: Record) -> bool:
        return self._may_show(self.group.numbers[record.stream], record)

    def look(self, most: int) -> Record | None:
        return self.selection.find(self.position, most)

    def present(self, record: Record) -> bytes:
        return record.body

    def _end(self) -> None:
        self.node.readers.discard(self)
        super()._end()
