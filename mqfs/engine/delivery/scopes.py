"""What the named consumers of a group are over: a stream, a view or the whole group.

Owns which of them a new message has to look at: those over its stream, and of them those with parked reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mqfs.engine.delivery.catalog import Group, Stream
from mqfs.engine.delivery.consumer import Consumer
from mqfs.engine.delivery.parked_reads import ParkedReads


class Scope:
    """The consumers over one stream, one view, or the whole group."""

    __slots__ = ("members", "waiting")

    def __init__(self) -> None:
        self.members: dict[Consumer, None] = {}
        self.waiting: dict[ParkedReads, None] = {}  # of those with parked reads


class Routes(NamedTuple):
    """The named consumers over a stream, while the group's `routing_version` is this one."""

    version: int
    scopes: tuple[Scope, ...]
    consumers: tuple[Consumer, ...]  # in the order in which they were made
    bounded: tuple[Consumer, ...]  # those with a `backlog`


NO_ROUTES = Routes(-1, (), (), ())


class Scopes:
    """Of one group, by the name of the stream or view; "": the whole group."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._scopes: dict[str, Scope] = {}

    def add(self, consumer: Consumer) -> None:
        scope = self._scopes.setdefault(consumer.state.over, Scope())
        scope.members[consumer] = None
        consumer.reads.join(scope.waiting)

    def remove(self, consumer: Consumer) -> None:
        scope = self._scopes[consumer.state.over]
        del scope.members[consumer]
        consumer.reads.stop_waiting()
        if not scope.members:
            del self._scopes[consumer.state.over]

    def rename(self, old: str) -> None:
        """A stream of that name has another now; so the state says of the consumers that were over it."""
        if (scope := self._scopes.pop(old, None)) is not None:
            for consumer in scope.members:
                self.add(consumer)

    def routes(self, stream: Stream) -> Routes:
        """All consumers that cover the stream: see Coverage."""
        names = [stream.name]
        if stream.name != self._group.log.settings.dead:
            names = ["", stream.name, *self._group.views.of(stream)]
        scopes = tuple(scope for name in names if (scope := self._scopes.get(name)) is not None)
        members = sorted((c for scope in scopes for c in scope.members), key=lambda consumer: consumer.number)
        bounded = tuple(consumer for consumer in members if consumer.state.backlog)
        return Routes(self._group.routing_version, scopes, tuple(members), bounded)

    def waiting(self) -> Iterator[ParkedReads]:
        """Of all consumers with parked reads."""
        for scope in list(self._scopes.values()):
            yield from list(scope.waiting)
