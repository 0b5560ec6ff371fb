"""Following a group in its ring: a subscription that reads shared memory, and the log where that does not do.

Owns the position that both share, a sequence: below it everything was given or is not wanted. What the ring has not any
more, or never had, is read by a cursor first; then it goes on in the ring, behind what it was given.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from operator import itemgetter

from mqfs import ring
from mqfs.client.subscription import Backoff, Filters, Patterns, Subscription, require_name, wild
from mqfs.client.transport.ring_group import LOOK_S, PAUSE_S, Attached, Refused, RingGroup
from mqfs.client.types import Link
from mqfs.errors import BadCommand, BadRing, Busy, Damaged, Disconnected, FellBehind, Interrupted, NotFound, Stale
from mqfs.log import headers
from mqfs.model import Kind, Message, Record
from mqfs.syntax.duration import parse_duration
from mqfs.syntax.patterns import compile_pattern

SLICE_S = 0.05  # of a wait, between two looks at whether somebody ended it
BATCH = 1_024  # records taken at once
_MESSAGE = int(Kind.MESSAGE)
_headers_of = itemgetter(Record._fields.index("headers"))
_new = tuple.__new__  # a Message from a tuple, at a third of what its own costs


class NotInRing(Exception):
    """What is asked for only a cursor can tell."""


class _Names(dict[int, str | None]):
    """The names of the streams that are wanted, by number; None: not wanted, or there is none."""

    def __init__(self, ask: Callable[[int], str | None], wanted: Callable[[str], bool]) -> None:
        self._ask, self._wanted = ask, wanted

    def __missing__(self, number: int) -> str | None:
        name = self._ask(number)
        found = self[number] = name if name is not None and self._wanted(name) else None
        return found


class RingSubscription(Subscription):
    """See `Subscription`."""

    def __init__(
        self,
        group: RingGroup,
        at: Attached,
        link: Link,
        path: str,
        patterns: Patterns,
        *,
        existing: bool,
        filters: Filters,
        reconnect: bool | float,
    ) -> None:
        """Raises NotInRing, and what the tree refuses with."""
        self._set_up(link, path, patterns, "", filters, reconnect)
        self._group, self._at, self._times_away = group, at, group.times_away
        self._past_away = self._times_away  # when what is read before the ring was opened
        self._ready: deque[Message] = deque()
        self._past: Subscription | None = None  # what is read before the ring goes on
        self._old_seats: list[ring.Consumer] = []  # of rings before: the log keeps what it has not had
        self._forever = False  # ... and there is no ring any more
        self._floor = 0  # records below are, or were, read from the log
        self._read_to = 0  # in the ring
        self._look_at = self._away_since = 0.0
        self._matching = self._matcher()
        self._known = self._plain_names_known()
        self._position = at.next
        self._consumer: ring.Consumer | None = None
        try:
            self._attach_slot(at)
        except (BadRing, Busy) as error:
            raise NotInRing(str(error)) from None
        if existing:
            self._catch_up("first")
            if self._past is not None:
                self._position = int(self._past._start)  # from there on again, should the server go away

    def _matcher(self) -> Callable[[str], bool]:
        if not self._names:
            return lambda name: True
        try:
            matches = [compile_pattern(name) for name in self._names if wild(name)]
        except BadCommand as error:
            raise NotInRing(str(error)) from None
        plain = frozenset(name for name in self._names if not wild(name))
        return lambda name: name in plain or any(match(name) for match in matches)

    def _plain_names_known(self) -> bool:
        """Whether it is over streams alone that are all there: it ends with them. Raises NotInRing for a view."""
        found = 0
        for name in self._names:
            if not wild(name):
                try:
                    if self._at.number(name) is None:
                        raise NotInRing(f"{name} is a view")
                    found += 1
                except NotFound:
                    require_name(name)
        return bool(found) and found == len(self._names)

    # ------------------------------------------------------------ the ring, and the log before it

    def _attach_slot(self, at: Attached) -> None:
        """Read from that ring's present end on. Raises Stale where it was retired, as nothing is kept for who
        comes then."""
        self._move_on()
        with at.publishing:  # a handle is one thread's for that, too
            self._at, self._consumer = at, at.ring.consumer(hold=True)
        self._wanted_names = _Names(at.name, self._matching)
        self._read_to = self._consumer.position
        if at.ring.retired:
            self._close_seat()
            at.over = True
            raise Stale("the ring ended")

    def _move_on(self) -> None:
        """Read there no more; it is left when what is to be read next is held elsewhere."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            self._old_seats.append(consumer)

    def _close_seat(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()

    def _close_old_seats(self) -> None:
        seats, self._old_seats = self._old_seats, []
        for consumer in seats:
            consumer.close()

    def _catch_up(self, start: str) -> None:
        """Have the log read from there on, as far as the ring may lack it. Raises Stale."""
        at = self._at
        end = self._floor = at.next
        if end <= 1 or (start.isdigit() and int(start) >= end):
            self._close_old_seats()
            return
        while not at.ring.wait_committed(end - 1, SLICE_S):
            end = self._floor = min(end, at.next)  # what was not published in the end is not waited for
            self._group.require()
            if at.ring.retired:
                raise Stale("the ring ended")
            if self._closed.is_set():
                return
            if at.door.lost and not self._group.still_valid(at):
                raise Stale("the ring ended")
        past = Subscription(
            self._link,
            self._path,
            self._names,
            start=start,
            until=str(end - 1),
            singly=True,
            was_away=self._server_was_away(),
        )
        self._read_first(past)

    def _server_was_away(self) -> bool:
        self._past_away = self._group.times_away
        return self._group.times_away > self._times_away

    def _read_first(self, past: Subscription) -> None:
        """Have that cursor read before the ring."""
        past.told_at, past._counted = self.told_at, self._counted
        past._lost, self._lost = self._lost, 0
        self._past = past
        self._close_old_seats()

    def _change_over(self) -> None:
        """That generation is over, or its server was away: go on behind what was given; the server is waited for."""
        self._move_on()
        patience = Backoff(self._reconnect, self._closed, self._link.where)
        while not self._over:
            try:
                self._go_on()
                return
            except NotFound:
                self._over = True
            except Stale:
                self._closed.wait(PAUSE_S)
                if self._closed.is_set():
                    return
            except Disconnected as error:
                if self._group.closed.is_set():
                    raise
                patience.wait(error)

    def _go_on(self) -> None:
        try:
            at = self._group.attached()
        except Refused as refused:
            if isinstance(refused.why, NotFound):
                raise refused.why from None
            self._follow_log()
        else:
            self._begin_again(at)

    def _begin_again(self, at: Attached) -> None:
        if self._known and self._all_gone(at):
            self._close_old_seats()
            self._over = True
            return
        try:
            self._attach_slot(at)
        except (BadRing, Busy):
            self._at = at
            self._follow_log()
            return
        try:
            self._catch_up(str(self._position))
        except BaseException:
            self._close_seat()  # the old ones hold what is to be read
            raise

    def _all_gone(self, at: Attached) -> bool:
        for name in self._names:
            try:
                at.number(name)
            except NotFound:
                continue
            return False
        return True

    def _follow_log(self) -> None:
        """There is no ring for us any more."""
        self._move_on()
        self._forever = True
        start = str(self._position)
        past = Subscription(
            self._link, self._path, self._names,
            start=start, reconnect=self._reconnect, singly=True, was_away=self._server_was_away(),
        )  # fmt: skip
        self._read_first(past)

    # ------------------------------------------------------------ messages

    def _get(self, deadline: float | None) -> Message:
        with self._turn:
            while True:
                try:
                    whole = self._assembly.take(self._ready.popleft())
                except IndexError:
                    self._fill(deadline)
                else:
                    if whole is not None:
                        return whole

    def __next__(self) -> Message:
        if not self._filters:
            try:
                message = self._ready.popleft()
                if headers.PART not in message.headers:
                    return message
                self._ready.appendleft(message)
            except IndexError:
                pass
        return super().__next__()

    def _fill(self, deadline: float | None) -> None:
        """Have something ready, or wait a little. Raises what `get` does."""
        if self._over or self._closed.is_set():
            raise EOFError
        if self._past is not None:
            self._from_past(self._past, deadline)
            return
        self._group.require()
        try:
            if self._consumer is None:
                self._change_over()
                return
            if self._consumer.position != self._read_to:
                self._catch_up(str(self._position))  # a batch was cut short (Ctrl-C)
                self._read_to = self._consumer.position
                return
            self._from_ring(self._consumer, deadline)
        except Stale:
            self._group.require()
            self._change_over()

    def _from_past(self, past: Subscription, deadline: float | None) -> None:
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        try:
            message = past.get(left)
        except EOFError:
            past.close()
            self._past, self._over = None, self._forever
            self._position = max(self._position, self._floor)  # what was lost below it is told
            self._times_away = self._past_away
        except FellBehind:
            self.told_at = past.told_at
            raise
        except Interrupted as error:
            self._interrupted(error)
        except Disconnected as error:
            self._away(error)
            if self._forever:
                raise
            self._lost, self._counted, self._past = past._lost, past._counted, None  # not all of it is told yet
            self._change_over()
            if self._past is None and self._lost:
                self._tell()
        else:
            self._position = message.sequence + 1
            self._ready.append(message)

    def _from_ring(self, consumer: ring.Consumer, deadline: float | None) -> None:
        consumer.release()  # what was read before was taken by whoever asks now
        slice_s = SLICE_S if deadline is None else min(max(deadline - time.monotonic(), 0.0), SLICE_S)
        wanted = self._wanted
        if wanted:
            slice_s = 0.0
        try:
            records = consumer.records(BATCH, slice_s)
        except FellBehind:
            self._catch_up(str(self._position))  # the ring was faster: the log has what is missing
            self._read_to = consumer.position
            return
        except Damaged:
            consumer.skip()  # somebody wrote nonsense there; the log has what was taken of it
            self._catch_up(str(self._position))
            self._read_to = consumer.position
            return
        if records:
            self._take(records)
            self._read_to = consumer.position
        elif wanted:
            self._wanted = False
            raise Interrupted
        elif deadline is not None and time.monotonic() >= deadline:
            raise TimeoutError
        elif time.monotonic() >= self._look_at:
            self._look()

    def _take(self, records: list[tuple[int, int, int, int, int, bytes, bytes]]) -> None:
        end = records[-1][0] + 1
        if records[0][0] < self._floor:
            records = [record for record in records if record[0] >= self._floor]
        names = self._wanted_names
        try:
            if self._at.ttl_ns or any(map(_headers_of, records)):
                self._ready.extend(self._chosen(records))
            else:
                self._ready.extend(
                    [
                        _new(Message, (sequence, name, time_ns, body, {}))
                        for sequence, time_ns, stream, kind, _, _, body in records
                        if (name := names[stream]) is not None and kind == _MESSAGE
                    ]
                )
        except Disconnected:  # a name could not be asked for: what was taken here is read again from the log
            if self._reconnect is False:
                raise
            raise Stale("the ring's server was away") from None
        self._position = max(self._position, end)

    def _chosen(self, records: Iterable[tuple[int, int, int, int, int, bytes, bytes]]) -> list[Message]:
        """Of records that may carry something: what is to be seen."""
        messages = []
        for sequence, time_ns, stream, kind, _, head, body in records:
            name = self._wanted_names[stream] if kind == _MESSAGE else None
            if name is None:
                continue
            more = headers.decode(head) if head else {}
            ttl_ns = parse_duration(more[headers.TTL]) if headers.TTL in more else self._at.ttl_ns
            if ttl_ns and time_ns + ttl_ns <= time.time_ns():
                continue
            if headers.SINGLE not in more:  # that is for one who takes
                messages.append(Message(sequence, name, time_ns, body, more))
        return messages

    def _look(self) -> None:
        """Whether the server is there; the ring goes on without it for a time."""
        self._look_at = time.monotonic() + LOOK_S
        if not self._at.door.lost:
            self._away_since = 0.0
            return
        self._away_since = self._away_since or time.monotonic()
        try:
            same = self._group.attached() is self._at
        except Refused:
            same = False
        except Disconnected:
            limit = self._reconnect
            if limit is False or (limit is not True and time.monotonic() - self._away_since > limit):
                raise
            return
        if not same:
            raise Stale("the ring ended")

    # ------------------------------------------------------------ ends

    def interrupt(self) -> None:
        """The thread that waits in `get` gets Interrupted, or the next one that would; nothing is lost."""
        self._wanted = True
        past = self._past
        if past is not None:
            past.interrupt()

    def close(self) -> None:
        """End it, whoever waits in it."""
        self._closed.set()
        self.interrupt()
        with self._turn:
            self._move_on()
            self._close_old_seats()
            past, self._past = self._past, None
            if past is not None:
                past.close()


__all__ = ["NotInRing", "RingSubscription"]
