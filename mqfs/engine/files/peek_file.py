"""Consumers and streams open for reading only: a look at the backlog, which changes nothing."""

from __future__ import annotations

from mqfs.engine.delivery.consumer import Consumer
from mqfs.engine.files.handle import OpenFile, PartialRead
from mqfs.engine.language.permissions import R, allowed
from mqfs.engine.nodes.own_files import TakeFile
from mqfs.engine.stream import Stream
from mqfs.model import Record, User
from mqfs.wait import Step


class PeekHandle(OpenFile):
    """The backlog of a consumer, opened for reading only: oldest first, then end-of-file."""

    def __init__(self, node: Consumer | Stream | TakeFile, user: User, reads: bool, writes: bool) -> None:
        super().__init__(node, user, reads, writes)
        self.last = PartialRead()
        self.position = 0
        self.shown: tuple[Record, int] | None = None  # the last message and which delivery its next one is
        self.opened = self.consumer
        self.group.retention.apply_depth_after_recovery()

    def on_opened(self) -> None:
        super().on_opened()
        self.opened.opens += 1

    @property
    def consumer(self) -> Consumer:
        node = self.node.stream if isinstance(self.node, TakeFile) else self.node
        return node if isinstance(node, Consumer) else node.shown_consumer()

    def read(self, count: int, offset: int = 0) -> Step[bytes]:
        self.require(reading=True)
        rest = self.last.rest(count, offset, sequential=False)
        if rest is not None:
            return rest
        if count <= 0 or self.node.removed:
            return b""
        record = self._next()
        if record is None:
            return b""
        self.shown = record, self.consumer.claims.next_delivery(record.sequence)
        return self.last.first(record.body, count, offset)

    def _next(self) -> Record | None:
        if self.consumer.coverage.exclusives_only:
            return None  # only a claim shows those
        for record in self.consumer.backlog.unclaimed(self.position):
            self.position = record.sequence + 1
            hidden = self.group.ranks.is_hidden(record)
            if not hidden and allowed(self.user, self.group.numbers[record.stream].state, R):
                return record
        return None

    def push_back(self, data: bytes) -> None:
        self.last.back(data)

    def _end(self) -> None:
        self.opened.opens -= 1
        self.opened.on_handle_closed()
        super()._end()
