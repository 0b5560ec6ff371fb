"""A stream: its group's log seen through its name.

Stream composes its retained range (KeptRange), its waiting readers and blocked writers, and the consumers over it. The
log, and the order between streams, belong to the group.
"""

from __future__ import annotations

import stat
from collections import OrderedDict
from typing import TYPE_CHECKING

from mqfs import errors
from mqfs.engine.delivery.consumer import Consumer
from mqfs.engine.delivery.exclusive_messages import NEVER_CONSUMED, ExclusiveMessages, NeverConsumed
from mqfs.engine.delivery.registry import NO_ROUTES, Routes
from mqfs.engine.delivery.waiting import PollList, WaitList
from mqfs.engine.language.permissions import Numbered
from mqfs.engine.publishing.admission import WriteRequest
from mqfs.engine.publishing.publisher import refuse_all
from mqfs.engine.retention.retained import KeptRange
from mqfs.model import Wait
from mqfs.state.group import ConsumerState, StreamState

if TYPE_CHECKING:
    from mqfs.engine.files.readers import Searcher
    from mqfs.engine.group import Group


class Stream(Numbered):
    """A file. Made and removed by its group."""

    __slots__ = (
        "_routes",
        "blocked",
        "default_consumer",
        "exclusives",
        "group",
        "kept",
        "number",
        "opens",
        "pollers",
        "readers",
        "removed",
        "state",
        "unused_since_ns",
        "views",
        "waits",
        "written",
    )

    def __init__(self, group: Group, state: StreamState) -> None:
        self.group = group
        self.state = state
        self.number = state.number
        self.removed = False
        self.opens = 0
        self.readers: set[Searcher] = set()
        self.waits = WaitList(group.waiting)
        self.blocked: OrderedDict[Wait[int], WriteRequest] = OrderedDict()
        self.pollers = PollList(group.waiting)
        self.kept: KeptRange = KeptRange(self)
        self.exclusives = ExclusiveMessages(self)
        self.written = 0
        self.unused_since_ns = group.clock.engine_ns()
        self.views: tuple[int, frozenset[str], frozenset[str]] | None = None  # cache of the group's ViewRegistry
        self.default_consumer: Consumer | None = None  # of `deliver one`; see `own_consumer`
        self._routes = NO_ROUTES

    @property
    def name(self) -> str:
        return self.state.name

    @property
    def is_temporary(self) -> bool:
        """Whether the stream is removed with its last open file, and when the server starts."""
        return bool(self.state.mode & stat.S_ISVTX)

    @property
    def outlasts_readers(self) -> bool:
        """Whether after a start the stream retains all messages that consumers have not acked, whatever `depth` is."""
        settings = self.group.log.settings
        return settings.deliver == "one" or (settings.replay == "off" and bool(self.consumers()))

    # ------------------------------------------------------------ consumers of the stream

    def own_consumer(self) -> Consumer:
        """Return the stream's default consumer under `deliver one`."""
        if self.default_consumer is None:
            own = self.group.log.state.nameless(self.number)
            assert own is not None
            self.default_consumer = Consumer(self.group, own, self)
        return self.default_consumer

    def shown_consumer(self) -> Consumer:
        """Return the default consumer for display: a throw-away one if no message was ever claimed."""
        if self._has_consumer:
            return self.own_consumer()
        return Consumer(self.group, ConsumerState(0, 0, 0, self.number, "", "", 0), self)

    @property
    def _has_consumer(self) -> bool:
        return self.default_consumer is not None or self.number in self.group.log.state.consumers

    @property
    def shared(self) -> bool:
        """Whether only consumers need the stream's messages: each is trimmed when all consumers have acked it."""
        group = self.group
        if group.log.settings.deliver == "one":
            return True
        if group.log.settings.replay != "off" or not group.consumers:
            return False
        if self.name == group.log.settings.dead or group.fanout.has_live_readers((self,)):
            return False
        return bool(self.consumers())

    def interested_consumers(self) -> tuple[Consumer | NeverConsumed | ExclusiveMessages, ...]:
        """Return all that have to ack the messages of a shared stream: its consumers, under `deliver one` the default
        one first, and exclusive messages where there are any."""
        if self.group.log.settings.deliver == "all":
            if self.number not in self.group.ranks.by_stream:
                return self.consumers()
            return (*self.consumers(), self.exclusives)
        if not self._has_consumer:
            return (NEVER_CONSUMED, *self.consumers())
        if self.exclusives.astray:
            return (self.own_consumer(), *self.consumers(), self.exclusives)
        return (self.own_consumer(), *self.consumers())

    def consumers(self) -> tuple[Consumer, ...]:
        """Return the named consumers over the stream."""
        routes = self._routes
        return routes.consumers if routes.version == self.group.routing_version else self.routes().consumers

    def routes(self) -> Routes:
        if self._routes.version != self.group.routing_version:
            self._routes = self.group.consumers.scopes.routes(self)
        return self._routes

    @property
    def is_attended(self) -> bool:
        """Whether each new message has to be offered to a consumer: one has a bounded backlog or a waiting read."""
        routes, own = self.routes(), self.default_consumer
        if routes.bounded or (own is not None and own.reads.is_waiting):
            return True
        return any(scope.waiting for scope in routes.scopes)

    def is_acked_by_all(self, sequence: int) -> bool:
        slowest = self.group.consumers.slowest  # among thousands of consumers this one mostly decides
        if slowest is not None and not slowest.is_acked(sequence) and slowest.coverage.covers(self):
            return False
        return all(sharer.is_acked(sequence) for sharer in self.interested_consumers())

    # ------------------------------------------------------------ waiting readers and writers

    def end_reads(self) -> None:
        """End the reads of all readers with end-of-file."""
        for reader in list(self.readers):
            reader.end()

    def end(self) -> None:
        """Mark the stream as removed: its readers get end-of-file, its writers NotFound."""
        self.removed = True
        self.end_reads()
        if self.default_consumer is not None:
            self.default_consumer.end()
        refuse_all(self, errors.NotFound(f"stream {self.name!r}: removed"))
        self.pollers.wake()
