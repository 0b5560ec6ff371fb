"""The consumers of a group: the named ones, and the default consumers of its streams.

A new message is offered only to consumers over its stream, through the Scopes: a thousand consumers of other streams
cost a write nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import attrs

from mqfs import errors, limits
from mqfs.engine.core import multipart
from mqfs.engine.core.portions import Work
from mqfs.engine.delivery.consumer import Consumer
from mqfs.engine.delivery.priorities import DeliveryAttributes
from mqfs.engine.delivery.waiting import ParkedReads, ReadEnds
from mqfs.engine.language.permissions import bits_for_writers
from mqfs.engine.retention.low_watermark import LowWatermark
from mqfs.engine.retention.newest import look_up
from mqfs.model import NEVER, Record, Step, User
from mqfs.state.acks import REQUEUE
from mqfs.state.group import Change, ConsumerState, Slot, bounds_of
from mqfs.state.rules import TRIPPED
from mqfs.syntax.duration import print_duration

if TYPE_CHECKING:
    from mqfs.engine.group import Group
    from mqfs.engine.stream import Stream


_RECOUNTED = 1_024  # streams between two looks at the clock: some 0.1 ms

log = logging.getLogger("mqfs.engine")


class Consumers(dict[str, Consumer]):
    """The named consumers of a group, by name."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group, self._log = group, group.log
        self.scopes = Scopes(group)
        self.read_ends: ReadEnds = ReadEnds(group.log)
        self.bounded: dict[Consumer, None] = {}  # consumers with a `backlog`
        self.keyed: dict[Consumer, None] = {}  # consumers with a rule about keys
        self._removals = 0  # `Retention.removals`, when their reads were last served
        self._lowest = LowWatermark()  # ack floors of consumers over the whole group

    def load(self) -> None:
        """Create the consumers that the group's state names."""
        for own in self._log.state.consumers.values():
            if own.name:
                self._enter(Consumer(self._group, own))
        self._group.update_must_retain()

    def start(self) -> None:
        """Requeue claims, remove transient consumers and restart `memory` ones, after the log was read."""
        for own in list(self._log.state.consumers.values()):
            stream = self._group.numbers.get(own.number)
            if own.name:
                self._contain(self[own.name], "starting", self[own.name].redelivery.recover)
            elif stream is not None and own.progress.unacked:
                consumer = stream.own_consumer()
                self._contain(consumer, "starting", consumer.redelivery.recover)
        self._release_uncovered()
        for consumer in list(self.values()):
            if consumer.state.transient:
                consumer.had_receiver = True
                consumer.on_handle_closed()
            elif consumer.state.memory:
                self._contain(consumer, "starting", partial(self._begin_again, consumer))

    def _contain(self, consumer: Consumer, doing: str, call: Callable[[], None]) -> None:
        self._group.faults.contain(self._group, f"consumer {consumer.name}: {doing}", call)

    def _begin_again(self, consumer: Consumer) -> None:
        """Restart the consumer where a new one would begin."""
        group, own = self._group, consumer.state
        streams = streams_over(group, own.over)
        replay = self._log.settings.replay
        consumer.seek(beginning(group, replay, streams))
        for slot in unclaimed(group, replay, streams):
            self._log.acknowledge(own, own.progress.step(REQUEUE, *bounds_of(slot)))

    def every(self) -> list[Consumer]:
        """Return the named consumers, and the default consumers in memory."""
        numbers, found = self._group.numbers, list(self.values())
        for own in self._log.state.consumers.values():
            stream = numbers.get(own.number) if not own.name else None
            if stream is not None and stream.default_consumer is not None:
                found.append(stream.default_consumer)
        return found

    def on_routing_changed(self) -> None:
        """Recount the bounded backlogs and retry blocked writers: a stream was removed, or views and consumers cover
        other streams."""
        for consumer in self.bounded:
            consumer.backlog.recount()
        self._group.unblock()

    def on_removals(self) -> None:
        """Serve parked reads, as messages may have been removed for which others of their key waited."""
        if self._removals == self._group.retention.removals:
            return
        self._removals = self._group.retention.removals
        self._group.waiting.left = limits.PASSED_MESSAGES
        for consumer in list(self.keyed):
            if consumer.dispatcher.held_by_key and consumer.reads.is_waiting:
                consumer.reads.serve()

    def on_coverage_changed(self, *overs: str) -> None:
        """Restart the search of consumers over these streams or views ("": the whole group), as they may cover other
        messages than before. Offer exclusive messages that their consumer no longer covers, then do as
        `on_routing_changed`. The removal of a stream needs only that: it takes no other stream from a consumer."""
        changed = list(self.scopes.over(overs))
        for consumer in changed:
            consumer.dispatcher.search_again()
        self._release_uncovered()
        for consumer in changed:
            consumer.reads.serve()  # before blocked writers continue
        if changed and self._keeps_for_consumers:
            self._group.portions.run(self._recount())
        self.on_routing_changed()

    def _recount(self) -> Work[None]:
        """Recount the messages that all streams retain, which may be fewer, and retry blocked writers. In steps."""
        for at, stream in enumerate(list(self._group.numbers.values()), 1):
            stream.kept.recount()
            if at % _RECOUNTED == 0:
                yield
        self._group.retention.note_change()
        self._group.unblock()

    def _release_uncovered(self) -> None:
        for consumer in [consumer for consumer in self.values() if consumer.held_exclusives]:
            self._contain(consumer, "offering what it held", consumer.exclusives.release_uncovered)

    def on_deliver_changed(self) -> None:
        for consumer in self.every():
            consumer.on_deliver_changed()

    @property
    def slowest(self) -> Consumer | None:
        """A consumer with the lowest ack floor, of those over the whole group; None if there is none."""
        number = self._lowest.name
        return self[self._log.state.consumers[number].name] if number is not None else None

    def floor(self, stream: Stream) -> int:
        """Return the lowest sequence of the stream that a named consumer has not acked."""
        low = self._lowest.value
        if len(self) > len(self._lowest):
            low = min([low, *(consumer.low for consumer in stream.consumers() if consumer.state.over)])
        return low

    def _enter(self, consumer: Consumer) -> None:
        own = consumer.state
        self[own.name] = consumer
        self.scopes.add(consumer)
        self._note_options(consumer)
        if not own.over:
            self._lowest.set(own.number, own.progress.ack_floor)

    def _note_options(self, consumer: Consumer) -> None:
        own = consumer.state
        for is_one, consumers in ((own.backlog, self.bounded), (own.rules.per_key, self.keyed)):
            if is_one:
                consumers[consumer] = None
            else:
                consumers.pop(consumer, None)

    # ------------------------------------------------------------ made and removed

    def bounds(self) -> list[str]:
        """Return the `full` policies of the consumers with a `backlog`."""
        return [consumer.state.full for consumer in self.bounded]

    def make(self, name: str, user: User, mode: int) -> Work[Step[Consumer]]:
        """Make a consumer of the whole group where `replay` lets readers begin, and return it. Raises Exists,
        OverLimit."""
        yield from look_up(self._group.retention)
        if name in self:  # made meanwhile
            raise errors.Exists(f"consumer {name!r}: exists already")
        if len(self) >= limits.CONSUMERS:
            raise errors.OverLimit(f"too many consumers (expected at most {limits.CONSUMERS} in a group)")
        number = self._log.state.next_stream
        group, replay = self._group, self._log.settings.replay
        change = plan(group, number, name, "", user, mode, replay, streams_over(group, ""))
        self._log.change(change)
        self.refresh([Consumer(group, self._log.state.consumers[number])])
        return self._log.after_metadata_sync(self[name])

    def refresh(self, consumers: Iterable[Consumer]) -> None:
        """Enter new consumers, and apply changed options of others. Skip those that the state no longer has."""
        known = self._log.state.consumers
        for consumer in consumers:
            own = consumer.state
            if known.get(own.number) is not own:
                continue
            if self.get(own.name) is not consumer:
                self._enter(consumer)
            self._note_options(consumer)
            consumer.on_rules_changed()
        self._group.update_must_retain()
        self._group.routing_version += 1  # new consumers are listed only now

    def trip(self, consumer: Consumer) -> None:
        """Pause a consumer whose breaker tripped. If the log refuses that, the next dead letter retries."""
        group, own = self._group, consumer.state
        count, per_ns = own.rules.breaker
        text = f"breaker: more than {count} dead letters in {print_duration(per_ns)}, paused (resume {consumer.name})"
        rules = attrs.evolve(own.rules, paused=TRIPPED)
        try:
            self._log.change({"do": "consumer", "number": own.number, **own.options(), "rules": rules.encode()})
        except errors.MqfsError as error:
            group.faults.report(group.number, f"consumer {consumer.name}: not paused by its breaker: {error}")
            return
        consumer.on_rules_changed()
        group.refuse(User(own.uid, own.gid), f".consumers/{consumer.name}", text)
        log.warning("group %d: consumer %s: %s", group.number, consumer.name, text)

    def remove(self, consumer: Consumer) -> None:
        """Remove a consumer. Raises Busy while it holds claims."""
        if consumer.claims:
            raise errors.Busy(f"consumer {consumer.name!r}: holds {len(consumer.claims)} claims (settle them first)")
        consumer.exclusives.release_all()
        covered = self.before_removal([consumer])
        self._log.change({"do": "forget", "number": consumer.number})
        self.removed([consumer], covered)

    @property
    def _keeps_for_consumers(self) -> bool:
        """Whether messages are kept until all consumers have acknowledged them, and no longer."""
        settings = self._log.settings
        return settings.deliver == "one" or settings.replay == "off"

    def before_removal(self, consumers: Collection[Consumer]) -> list[Stream]:
        """Return the streams whose messages may be trimmed without these consumers, as all others have acked them."""
        overs = {consumer.state.over for consumer in consumers}
        if not overs or not self._keeps_for_consumers:
            return []
        return [self._group.numbers[stream.number] for stream in streams_over(self._group, *overs)]

    def removed(self, consumers: Iterable[Consumer], covered: Iterable[Stream]) -> None:
        """Detach consumers whose removal is in the log, and recount the streams `covered` by them."""
        for consumer in consumers:
            number = consumer.state.number
            del self[consumer.state.name]
            self.scopes.remove(consumer)
            self._lowest.remove(number)
            self.read_ends.remove(number)
            self.bounded.pop(consumer, None)
            self.keyed.pop(consumer, None)
            consumer.end()
        self._group.update_must_retain()
        self._group.routing_version += 1
        for stream in covered:
            stream.kept.recount()
        self._group.retention.note_change()
        self._group.unblock()

    def on_acknowledged(self, own: ConsumerState) -> None:
        """Update the lowest ack floor after a consumer's progress has changed."""
        if own.name and not own.over and self._lowest.get(own.number) != own.progress.ack_floor:
            self._lowest.set(own.number, own.progress.ack_floor)
        self._group.mark_dirty()

    # ------------------------------------------------------------ new messages

    def offer(self, stream: Stream, record: Record, rank: DeliveryAttributes | None) -> None:
        """Count a new message, and serve parked reads."""
        own, routes = stream.default_consumer, stream.routes()
        if rank is not None:
            for consumer in (*routes.consumers, *([own] if own is not None else [])):
                consumer.dispatcher.add_ranked(record.sequence, rank)
        left = limits.PASSED_MESSAGES
        for consumer in routes.bounded:
            try:
                left -= self._keep_bound(consumer, record, max(left, 1))
            except errors.MqfsError as error:  # the message is written; other consumers get it
                text = f"consumer {consumer.name!r} stays over its backlog: {error}"
                self._group.faults.report(self._group.number, text)
        if own is not None and (rank is not None or not own.coverage.exclusives_only):
            own.reads.serve()
        for scope in routes.scopes:
            if scope.waiting:
                for reads in list(scope.waiting):
                    reads.serve()
        if self._log.end.next >= self.read_ends.next:
            self.read_ends.end_reads()

    def _keep_bound(self, consumer: Consumer, record: Record, most: int) -> int:
        """Enforce the bound of a consumer with a `backlog` after a new message: `full drop-new` skips it, `full
        drop-old` the oldest ones. Return the number of skipped messages, at most `most`: after the bound was lowered,
        later messages skip the rest."""
        backlog, bound = consumer.backlog, consumer.state.backlog
        backlog.on_appended()
        if self._group.numbers[record.stream].name == self._log.settings.dead:
            return 0  # nothing bounds dead letters
        if not backlog.exceeds(0):
            return 0
        if (consumer.state.full or self._log.settings.full) == "drop-new":
            if not multipart.has_next_part(record):
                consumer.skip(record)
            return 1
        skipped, position = 0, backlog.cut_from
        while skipped < most and backlog.size() > bound:
            oldest, position = backlog.unclaimed(position, limits.PASSED_MESSAGES)
            if oldest is None:
                break
            consumer.skip(oldest)
            self._group.counts.cut += 1
            skipped += 1
        else:
            position = 0
        backlog.cut_from = position if position < NEVER else 0
        return skipped


# ------------------------------------------------------------ new consumers


def streams_over(group: Group, *overs: str) -> list[Stream]:
    """Return the streams that consumers over streams, views or the whole group ("") cover."""
    named = {group.streams[over]: None for over in overs if over in group.streams}
    if len(named) == len(overs):
        return list(named)
    views = group.views.keys() & set(overs)
    streams = [stream for stream in group.streams.values() if stream.name != group.log.settings.dead]
    if len(named) + len(views) == len(overs):
        streams = [stream for stream in streams if not views.isdisjoint(group.views.of(stream))]
    return list(dict.fromkeys([*named, *streams]))


def plan(
    group: Group,
    number: int,
    name: str,
    over: str,
    user: User,
    mode: int,
    replay: str,
    streams: Sequence[Stream],
) -> Change:
    """Return the change that makes a consumer; `streams`: those it will cover. The caller has checked that there is
    room."""
    return {
        "do": "consumer", "number": number, "name": name, "over": over, "transient": False, "private": False,
        "backlog": 0, "mode": mode & bits_for_writers(group.log.state.mode), "uid": user.uid, "gid": user.gid,
        "time": group.clock.wall_ns(), "low": beginning(group, replay, streams),
        "open": unclaimed(group, replay, streams),
    }  # fmt: skip


def beginning(group: Group, replay: str, streams: Iterable[Stream]) -> int:
    """Return the sequence where `replay` lets a reader begin."""
    if replay in ("off", "key"):
        return group.log.end.next  # `unclaimed` has the older messages for it
    group.retention.advance_all()
    if replay == "all":
        return group.log.reader.first
    return max((stream.kept.newest_kept() for stream in streams), default=0) or group.log.end.next


def unclaimed(group: Group, replay: str, streams: Iterable[Stream]) -> list[Slot]:
    """Return the slots that a new consumer may claim wherever it begins: unclaimed exclusive messages and, under
    `replay key`, the newest message of each key."""
    numbers, newest, streams = group.ranks.streams_with_exclusives(), group.retention.newest, list(streams)
    mine = [stream for stream in streams if stream.number in numbers]
    found: list[Slot] = sorted(sequence for stream in mine for sequence in stream.exclusives.all_unclaimed())
    if newest is not None and replay == "key":
        newest.follow_to_end()
        bodies = sorted((last, first) for s in streams for first, last in newest.bodies_of(s))
        found = [*found, *(last if first == last else [first, last] for last, first in bodies)]
    return found


# ------------------------------------------------------------ scopes

# A scope is what named consumers are over: a stream, a view or the whole group. A new message looks only at scopes of
# its stream, and in them only at consumers with parked reads.


class Scope:
    """The consumers over one stream, one view, or the whole group."""

    __slots__ = ("members", "waiting")

    def __init__(self) -> None:
        self.members: dict[Consumer, None] = {}
        self.waiting: dict[ParkedReads, None] = {}  # of those with parked reads


class Routes(NamedTuple):
    """The named consumers over a stream, valid while `version` is the group's `routing_version`."""

    version: int
    scopes: tuple[Scope, ...]
    consumers: tuple[Consumer, ...]  # in the order in which they were made
    bounded: tuple[Consumer, ...]  # those with a `backlog`


NO_ROUTES = Routes(-1, (), (), ())


class Scopes:
    """The scopes of a group, by the name of the stream or view; "": the whole group."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._scopes: dict[str, Scope] = {}

    def add(self, consumer: Consumer) -> None:
        scope = self._scopes.get(consumer.state.over)
        if scope is None:
            scope = self._scopes[consumer.state.over] = Scope()
        scope.members[consumer] = None
        consumer.reads.join(scope.waiting)

    def remove(self, consumer: Consumer) -> None:
        scope = self._scopes[consumer.state.over]
        del scope.members[consumer]
        consumer.reads.stop_waiting()
        if not scope.members:
            del self._scopes[consumer.state.over]

    def over(self, names: Iterable[str]) -> Iterator[Consumer]:
        """Yield the consumers over these streams or views."""
        for name in names:
            if (scope := self._scopes.get(name)) is not None:
                yield from scope.members

    def rename(self, old: str) -> None:
        """Enter the consumers over a renamed stream again; the state has their new name already."""
        if (scope := self._scopes.pop(old, None)) is not None:
            for consumer in scope.members:
                self.add(consumer)

    def routes(self, stream: Stream) -> Routes:
        """Return all named consumers that cover the stream: see Coverage."""
        names = [stream.name]
        if stream.name != self._group.log.settings.dead:
            names = ["", stream.name, *self._group.views.of(stream)]
        scopes = tuple(scope for name in names if (scope := self._scopes.get(name)) is not None)
        members = sorted((c for scope in scopes for c in scope.members), key=lambda consumer: consumer.number)
        bounded = tuple(consumer for consumer in members if consumer.state.backlog)
        return Routes(self._group.routing_version, scopes, tuple(members), bounded)

    def waiting(self) -> Iterator[ParkedReads]:
        """Yield the parked reads of every consumer that has some."""
        for scope in list(self._scopes.values()):
            yield from list(scope.waiting)
