"""Which messages of a group are for a consumer: those of the stream, the view or the group that it is over.

Owns that question. Knows nothing of positions, claims and permissions.
"""

from __future__ import annotations

from mqfs.engine.delivery.catalog import Group, Stream
from mqfs.engine.delivery.priority_index import PriorityIndex
from mqfs.engine.routing.message_filter import MessageFilter
from mqfs.group_state import ConsumerState
from mqfs.model import Record


class Coverage:
    """Of one consumer. `stream`: the one whose default consumer it is; None: it has a name and `state.over`."""

    __slots__ = ("_filter", "_filter_version", "_group", "_held", "_own", "_ranks", "exclusives_only", "stream")

    def __init__(
        self, group: Group, ranks: PriorityIndex, own: ConsumerState, stream: Stream | None, held: set[int]
    ) -> None:
        self._group, self._ranks, self._own, self.stream = group, ranks, own, stream
        self._held = held  # exclusive messages that this consumer claimed first
        self.exclusives_only = False  # a default consumer under `deliver all` has no others
        self._filter: MessageFilter | None = None
        self._filter_version = -1

    @property
    def filter(self) -> MessageFilter:
        """Finds its messages in the log, and others that `matches` leaves out."""
        group = self._group
        if self._filter is None or self._filter_version != group.catalog_version:
            self._filter_version = group.catalog_version
            numbers, names = self._over()
            old = self._filter
            if old is None or (old.numbers, tuple(old.names)) != (numbers, names):
                self._filter = MessageFilter(group, numbers, names)
        assert self._filter is not None
        return self._filter

    def _over(self) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
        """Numbers of streams, names of views."""
        if self.stream is not None:
            return (self.stream.number,), ()
        over = self._own.over
        if not over:
            return None, ()
        if over in self._group.views:
            return None, (over,)
        stream = self._group.streams.get(over)
        return (stream.number,) if stream else (), ()

    def covers(self, stream: Stream) -> bool:
        """Whether messages of the stream may be for it. Dead letters are only for a consumer over their stream."""
        if self.stream is not None:
            return stream is self.stream
        name, over = stream.state.name, self._own.over
        if name == self._group.log.settings.dead and name != over:
            return False
        return not over or self.filter.covers(stream)

    def matches(self, stream: Stream, record: Record) -> bool:
        """Whether the message is for this consumer, acked or not. An exclusive one is for the first that claims it."""
        if self.exclusives_only:
            return self._ranks.is_hidden(record)
        if self.stream is not None:
            return True
        if self._own.over:
            if not (self.covers(stream) and self.filter.selects(stream, record)):
                return False
        elif stream.state.name == self._group.log.settings.dead:
            return False
        if not record.headers or not self._ranks.is_exclusive(record.sequence):
            return True
        return record.sequence in self._held or not stream.exclusives.is_taken(record.sequence)
