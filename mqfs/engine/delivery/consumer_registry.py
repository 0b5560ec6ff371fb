"""The consumers of a group, by name, and the nameless ones of its streams.

Owns making and removing them, what of the log they hold back, their bounds and their timers. Which of its messages a
reader gets, the consumer decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from mqfs import errors, limits
from mqfs.engine.delivery.consumer import Consumer, Crowd
from mqfs.engine.delivery.priority_index import DeliveryAttributes
from mqfs.engine.language.permissions import bits_for_writers
from mqfs.engine.log import multipart
from mqfs.engine.log.timers import CONSUMERS, Alarm
from mqfs.engine.retention.low_watermark import LowWatermark
from mqfs.engine.stream import Stream
from mqfs.group_state import Change, ConsumerState
from mqfs.model import NEVER, Record, User
from mqfs.syntax.quoting import quote

if TYPE_CHECKING:
    from mqfs.engine.group import Group

_AGAIN_NS = 10**9  # after a failure


class Consumers(dict[str, Consumer]):
    """Of one group."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group
        self._crowds: dict[str, Crowd] = {}  # by the stream or view that they are over; "": the whole group
        self._ends = LowWatermark()  # of consumers, the sequence at which a waiting read ends whatever stream takes it
        self.next_end = NEVER  # the least of those
        self._lowest = LowWatermark()  # of those over the whole group
        self._due: dict[Consumer, int] = {}  # those with something to do at an engine time
        self._alarm = Alarm(group.tree.timers, group, CONSUMERS, "ending leases and delays", self._wake)
        self.bounded: dict[Consumer, None] = {}  # consumers with a `backlog`

    def load(self) -> None:
        """Those that the group's state names."""
        for own in self.group.state.consumers.values():
            if own.name:
                self._enter(Consumer(self.group, own))

    def start(self) -> None:
        """After the log was read: what was claimed is free, and what nobody has open goes if it was transient."""
        for own in list(self.group.state.consumers.values()):
            stream = self.group.numbers.get(own.number)
            if own.name:
                self._recover(self[own.name])
            elif stream is not None and own.progress.in_flight:
                self._recover(stream.own_consumer())
        for consumer in list(self.values()):
            if consumer.state.transient:
                self.remove(consumer)

    def _recover(self, consumer: Consumer) -> None:
        self.group.faults.contain(self.group, f"starting consumer {consumer.name}", consumer.recover)

    def every(self) -> list[Consumer]:
        """The named ones, and the nameless ones that are in use."""
        numbers = self.group.numbers
        streams = (numbers.get(own.number) for own in self.group.state.consumers.values() if not own.name)
        return [
            *self.values(),
            *(s.default_consumer for s in streams if s is not None and s.default_consumer is not None),
        ]

    def on_routing_changed(self) -> None:
        """A stream went, or what views and consumers are over has changed: room for writers that wait, perhaps."""
        for consumer in self.bounded:
            consumer.recount()
        self.group.unblock()

    def on_views_changed(self) -> None:
        self.on_routing_changed()
        self.invalidate_order()

    def invalidate_order(self) -> None:
        """The order in which messages are served has changed, or which they are."""
        for consumer in self.every():
            consumer.serve_anew()

    @property
    def slowest(self) -> Consumer | None:
        """Of those over the whole group, one that is as far behind as any."""
        number = self._lowest.name
        return self[self.group.state.consumers[number].name] if number is not None else None

    def floor(self, stream: Stream) -> int:
        """The lowest sequence of the stream that a named consumer has not dealt with."""
        low = self._lowest.value
        if len(self) > len(self._lowest):
            low = min([low, *(consumer.low for consumer in stream.consumers() if consumer.state.over)])
        return low

    def lines(self) -> list[str]:
        """As ctl lines."""
        return [" ".join(_words(consumer.state)) for consumer in self.values()]

    def nameless(self, stream: Stream) -> Consumer:
        own = self.group.state.nameless(stream.number)
        assert own is not None
        return Consumer(self.group, own, stream)

    def untouched(self, stream: Stream) -> Consumer:
        """One like it, of which the group knows nothing."""
        return Consumer(self.group, ConsumerState(0, 0, 0, stream.number, "", "", 0), stream)

    def _enter(self, consumer: Consumer) -> None:
        self[consumer.name] = consumer
        self._join(consumer)
        self._note_bound(consumer)
        self.group.update_must_retain()
        if not consumer.state.over:
            self._lowest.set(consumer.number, consumer.low)

    # ------------------------------------------------------------ which of them a stream has

    def _join(self, consumer: Consumer) -> None:
        """Stand with the others that are over the same."""
        consumer.crowd = self._crowds.setdefault(consumer.state.over, Crowd())
        consumer.crowd.members[consumer] = None
        if consumer.parked or consumer.watchers:
            consumer.crowd.waiting[consumer] = None

    def _leave(self, consumer: Consumer) -> None:
        crowd = consumer.crowd
        del crowd.members[consumer]
        consumer.stop_waiting()
        if not crowd.members:
            del self._crowds[consumer.state.over]

    def renamed(self, old: str, new: str) -> None:
        """Consumers that were over a stream of the old name are over the new one: the state says so."""
        if (crowd := self._crowds.pop(old, None)) is not None:
            for consumer in crowd.members:
                self._join(consumer)

    def crowds_of(self, stream: Stream) -> list[Crowd]:
        """All whose consumers cover the stream; see `Consumer.covers`."""
        names = [stream.name]
        if stream.name != self.group.settings.dead:
            names = ["", stream.name, *self.group.views.of(stream)]
        return [crowd for name in names if (crowd := self._crowds.get(name)) is not None]

    def all_waiting(self) -> Iterator[Consumer]:
        """Those with readers that wait."""
        for crowd in list(self._crowds.values()):
            yield from list(crowd.waiting)

    def is_end_reached(self) -> bool:
        """Whether a read that waits ends with the next message, whatever stream takes it."""
        return self.group.log.end.next >= self.next_end

    def _note_bound(self, consumer: Consumer) -> None:
        if consumer.state.backlog:
            self.bounded[consumer] = None
        else:
            self.bounded.pop(consumer, None)

    def make(self, name: str, user: User, mode: int) -> Consumer:
        """A new consumer of the whole group, at the place where `replay` lets readers begin."""
        if len(self) >= limits.CONSUMERS:
            raise errors.OverLimit(f"a group has at most {limits.CONSUMERS} consumers")
        number = self.group.state.next_stream
        change = self.plan(number, name, "", user, mode, self.group.settings.replay, self.streams_of(""))
        self.group.log.change(change)
        self.refresh(name, number)
        return self[name]

    def plan(
        self, number: int, name: str, over: str, user: User, mode: int, replay: str, streams: Sequence[Stream]
    ) -> Change:
        """The change that makes one; `streams`: which it will be over. The caller has checked that there is room."""
        return {
            "do": "consumer", "number": number, "name": name, "over": over, "transient": False, "private": False,
            "backlog": 0, "mode": mode & bits_for_writers(self.group.state.mode), "uid": user.uid, "gid": user.gid,
            "time": self.group.tree.clock.wall_ns(), "low": self._beginning(replay, streams),
            "open": self._untaken(streams),
        }  # fmt: skip

    def _untaken(self, streams: Iterable[Stream]) -> list[int]:
        """Messages for one taker that nobody took: they are for a new consumer, too, wherever it begins."""
        numbers = self.group.ranks.with_singles()
        mine = [stream for stream in streams if stream.number in numbers] if numbers else []
        return sorted(sequence for stream in mine for sequence in stream.all_untaken())

    def streams_of(self, over: str) -> list[Stream]:
        """Those that a consumer over a stream, a view or the whole group ("") is over."""
        group = self.group
        if over in group.streams:
            return [group.streams[over]]
        streams = [stream for stream in group.streams.values() if stream.name != group.settings.dead]
        if over in group.views:
            streams = [stream for stream in streams if over in group.views.of(stream)]
        return streams

    def refresh(self, name: str, number: int) -> None:
        """What the state says of that consumer has changed."""
        own = self.group.state.consumers.get(number)
        if own is None:
            return
        if name in self and self[name].number == number:
            self._note_bound(self[name])
            return
        consumer = Consumer(self.group, own)
        self._enter(consumer)
        self.group.routing_version += 1  # it is in the list only now

    def _beginning(self, replay: str, streams: Iterable[Stream]) -> int:
        """Where a new consumer starts: as `replay` lets a reader begin."""
        group = self.group
        end = group.log.end.next
        if replay == "off":
            return end
        group.retention.advance_all()
        if replay == "all":
            return group.log.reader.first
        return max((stream.kept.newest_kept() for stream in streams), default=0) or end

    def remove(self, consumer: Consumer) -> None:
        """Raises Busy while it holds claims."""
        if consumer.claims:
            raise errors.Busy(f"consumer {consumer.name} holds {len(consumer.claims)} claims")
        covered = self.before_removal(consumer)
        self.group.log.change({"do": "forget", "number": consumer.number})
        self.removed(consumer, covered)

    def before_removal(self, consumer: Consumer) -> list[Stream]:
        """What it took for itself is for others again. Returns the streams that it covers."""
        consumer.give_singles_back()
        return [stream for stream in self.group.numbers.values() if consumer.covers(stream)]

    def removed(self, consumer: Consumer, covered: Iterable[Stream]) -> None:
        """The log says so."""
        del self[consumer.name]
        self._leave(consumer)
        self.group.update_must_retain()
        self.group.routing_version += 1
        self._lowest.remove(consumer.number)
        self._ends.remove(consumer.number)
        self._due.pop(consumer, None)
        self.bounded.pop(consumer, None)
        consumer.removed = True
        consumer.end()
        for stream in covered:
            stream.kept.recount()
        self.group.retention.note_change()
        self.group.unblock()

    def on_acknowledged(self, own: ConsumerState) -> None:
        """Its progress has changed."""
        if own.name and not own.over:
            self._lowest.set(own.number, own.progress.ack_floor)
        self.group.tree.dirty_groups.add(self.group)

    # ------------------------------------------------------------ new messages

    def offer(self, stream: Stream, record: Record, rank: DeliveryAttributes | None) -> None:
        """A new message: for who waits, and to be counted."""
        if rank is not None:
            self._rank(stream, record.sequence, rank)
        routes = stream.routes()
        for consumer in routes.bounded:
            self._keep_bound(consumer, record)
        own = stream.default_consumer
        if own is not None and (rank is not None or not own.singles_only):
            own.serve()
        for crowd in routes.crowds:
            if crowd.waiting:
                for consumer in list(crowd.waiting):
                    consumer.serve()
        if self.group.log.end.next >= self.next_end:
            self._end_reads()

    def end_at(self, consumer: Consumer, sequence: int) -> None:
        """A read of it waits that ends there."""
        self._ends.set(consumer.number, sequence)
        self.next_end = self._ends.value

    def _end_reads(self) -> None:
        """Those that end here, whatever stream took the message."""
        while (number := self._ends.name) is not None and self._ends.value <= self.group.log.end.next:
            self._ends.remove(number)
            stream, own = self.group.numbers.get(number), self.group.state.consumers.get(number)
            consumer = (
                stream.default_consumer if stream is not None else self.get(own.name) if own is not None else None
            )
            if consumer is not None:
                self._end_reads_of(consumer)
        self.next_end = self._ends.value

    def _end_reads_of(self, consumer: Consumer) -> None:
        consumer.serve()
        ends = [taker.until for taker in consumer.parked.values() if taker.until > self.group.log.end.next]
        if ends and min(ends) != NEVER:
            self._ends.set(consumer.number, min(ends))

    def _rank(self, stream: Stream, sequence: int, rank: DeliveryAttributes) -> None:
        if stream.default_consumer is not None:
            stream.default_consumer.picker.rank(sequence, rank)
        for consumer in stream.consumers():
            consumer.picker.rank(sequence, rank)

    def _keep_bound(self, consumer: Consumer, record: Record) -> None:
        """A new message for a consumer with a `backlog`: `full drop-new` skips it, `full drop-old` the oldest."""
        consumer.appended()
        if self.group.numbers[record.stream].name == self.group.settings.dead:
            return  # nothing bounds dead letters
        if self.group.settings.full == "drop-new":
            if consumer.exceeds_backlog(0) and not multipart.goes_on(record):
                consumer.skip(record)
            return
        while consumer.exceeds_backlog(0) and consumer.skip_oldest():
            self.group.counts.cut += 1

    # ------------------------------------------------------------ time

    def set_alarm(self, consumer: Consumer, due_ns: int) -> None:
        """Wake that consumer then, if not before."""
        due = self._due.get(consumer)
        if due is None or due_ns < due:
            self._due[consumer] = due_ns
        self._alarm.at(due_ns)

    def _wake(self, now_ns: int) -> None:
        """Leases and delays that are over, in the order in which consumers came to have some."""
        for consumer, due in list(self._due.items()):
            if due <= now_ns:
                del self._due[consumer]
                contain = self.group.faults.contain
                if not contain(
                    self.group, f"ending leases and delays of {consumer.name}", partial(consumer.wake, now_ns)
                ):
                    self.set_alarm(consumer, now_ns + _AGAIN_NS)
        if self._due:
            self._alarm.at(min(self._due.values()))


def _words(own: ConsumerState) -> list[str]:
    words = ["consumer", quote(own.name)]
    words += [quote(own.over)] if own.over else []
    words += ["transient"] * own.transient + ["private"] * own.private
    words += ["backlog", str(own.backlog)] if own.backlog else []
    return words
