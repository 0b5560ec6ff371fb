"""Subscriptions that read a group's ring, and the log for messages that the ring lacks.

Both share one position: messages below it were received, or are not selected. A cursor reads the messages that the ring
lacks; then the ring is read from there.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from mqfs import ring
from mqfs.client.message import EVER, NO_HEADERS, Message, message_of, native_messages, record_at
from mqfs.client.subscription import CursorSubscription, require_name
from mqfs.client.transport.ring_attachment import LONGEST_PAUSE_S, LOOK_S, Attached, Refused, RingAttachment
from mqfs.client.types import READ_BYTES, Filters, Link, Patterns
from mqfs.client.waiting import Backoff
from mqfs.errors import (
    BadCommand,
    BadRing,
    Busy,
    Damaged,
    Disconnected,
    DiskFailed,
    FellBehind,
    Interrupted,
    NotFound,
    Stale,
)
from mqfs.model import Kind
from mqfs.records import headers
from mqfs.syntax.duration import parse_duration
from mqfs.syntax.patterns import Words, compile_selection, has_wildcard

SLICE_S = 0.05  # of a wait, between two checks for `close` and `interrupt`
LOGGED_S = 0.1  # a `get` waits at least this time for the log to have the messages that the server wrote itself
POLL_S = 0.005  # between two checks of several rings, if the kernel cannot wait for all of them
MOST_RINGS = 127  # rings that the kernel can wait for at once
IDLE_S = 5.0  # the watcher's thread ends after this time without a subscription


class RingSubscription(CursorSubscription):
    """See `Subscription`."""

    def __init__(
        self,
        attachment: RingAttachment,
        at: Attached,
        link: Link,
        path: str,
        patterns: Patterns,
        *,
        existing: bool,
        filters: Filters,
        reconnect: bool | float,
    ) -> None:
        """`existing`: begin at the oldest retained message. Raises NotInRing, Stale, and the tree's errors."""
        self._set_up(link, path, patterns, "", filters, reconnect)
        self._attachment, self._at, self._times_away = attachment, at, attachment.times_away
        self._past_away = self._times_away  # its value when `_past` was opened
        self._past: CursorSubscription | None = None  # reads the log before the ring is read again
        self._old_slots: list[ring.Consumer] = []  # of earlier generations: the log retains their unread messages
        self._forever = False  # `_past` is read for good: the group has no ring for this client
        self._floor = 0  # records below it are read from the log
        self._read_to = 0  # the position in the ring after the records that were read
        self._check_at = self._away_since = 0.0
        self._ending = Backoff(True, self._closed, longest_s=LONGEST_PAUSE_S)  # between attempts while one ring ends
        self._filter = RingFilter(self._names)
        self._has_plain_names = self._check_names()
        self._position = at.next
        self._consumer: ring.Consumer | None = None
        try:
            self._attach_slot(at)
        except (BadRing, Busy) as error:
            raise NotInRing(str(error)) from None
        if existing:
            self._catch_up("first")
            if self._past is not None:
                self._position = int(self._past._start)  # where to continue if the server disconnects

    def _check_names(self) -> bool:
        """Whether all names are existing streams: the subscription ends with them. Raises NotInRing for a view."""
        count = 0
        for name in self._names:
            if not has_wildcard(name, self._at.words):
                try:
                    if self._at.number(name) is None:
                        raise NotInRing(f"{name} is a view")
                    count += 1
                except NotFound:
                    require_name(name)
        return bool(count) and count == len(self._names)

    # ------------------------------------------------------------ the ring, and the log before it

    def _attach_slot(self, at: Attached) -> None:
        """Begin to read at the present end of a ring. Raises Stale if the ring is retired, as it retains nothing for
        new slots; BadRing, Busy."""
        self._filter.attach(at)
        self._leave_slot()
        with at.publishing:  # one thread at a time may use the handle
            self._at, self._consumer, self._socket = at, at.ring.consumer(hold=True), at.socket
        self._read_to = self._consumer.position
        if at.ring.retired:
            self._close_slot()
            at.is_replaced = True
            raise Stale("ring is retired")

    def _leave_slot(self) -> None:
        """Stop reading the ring. Its slot is closed once the log or the next ring retains the messages after it."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            self._old_slots.append(consumer)

    def _close_slot(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()

    def _close_old_slots(self) -> None:
        slots, self._old_slots = self._old_slots, []
        for consumer in slots:
            consumer.close()

    def _catch_up(self, start: str) -> None:
        """Read the log from `start` up to the messages that the ring certainly has. Raises Stale, Disconnected."""
        at = self._at
        end = self._floor = at.next
        if end <= 1 or (start.isdigit() and int(start) >= end):
            self._close_old_slots()
            return
        while not at.ring.wait_committed(end - 1, SLICE_S):
            end = self._floor = min(end, at.next)  # do not wait for abandoned reservations
            self._attachment.require()
            if at.ring.retired:
                raise Stale("ring is retired")
            if self._closed.is_set():
                return
            if at.socket.is_lost:
                raise Disconnected(f"{self._link.label}: the server closed the connection")  # the log gets no more
        past = CursorSubscription(
            self._link, self._path, self._names,
            start=start, until=str(end - 1), singly=True, was_away=self._server_was_away(),
        )  # fmt: skip
        self._read_first(past)

    def _server_was_away(self) -> bool:
        self._past_away = self._attachment.times_away
        return self._attachment.times_away > self._times_away

    def _read_first(self, past: CursorSubscription) -> None:
        """Read the log by `past` before the ring is read again."""
        past.reported_at, past._counted_below = self.reported_at, self._counted_below
        past._losses, self._losses = self._losses, 0
        self._past = past
        self._close_old_slots()

    def _change_over(self, deadline: float | None) -> None:
        """Wait for the server, and continue after the last message in the next generation or the log."""
        self._leave_slot()
        try:
            self._retry(partial(self._change_in_turn, deadline), deadline)  # a stopping server raises Interrupted
        except NotFound:
            self._at_end = True
        if self._past is None and self._losses:  # some losses are not reported yet
            self._report()

    def _change_in_turn(self, deadline: float | None) -> None:
        with suppress(Stale):  # closed
            self._ending.retry(self._change_once, Stale, deadline=deadline)
        self._ending = Backoff(True, self._closed, longest_s=LONGEST_PAUSE_S)

    def _change_once(self) -> None:
        try:
            at = self._attachment.attached()
        except Refused as refused:
            if isinstance(refused.why, NotFound):
                raise refused.why from None
            self._follow_log()
        else:
            self._read_generation(at)

    def _read_generation(self, at: Attached) -> None:
        if self._has_plain_names and self._all_removed(at):
            self._close_old_slots()
            self._at_end = True
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
            self._close_slot()  # the old slots retain the unread messages
            raise

    def _all_removed(self, at: Attached) -> bool:
        for name in self._names:
            try:
                at.number(name)
            except NotFound:
                continue
            return False
        return True

    def _follow_log(self) -> None:
        """Read only the log from now on: the group has no ring for this client."""
        self._leave_slot()
        self._forever = True
        start = str(self._position)
        past = CursorSubscription(
            self._link, self._path, self._names,
            start=start, reconnect=self._reconnect, singly=True, was_away=self._server_was_away(),
        )  # fmt: skip
        self._read_first(past)

    # ------------------------------------------------------------ messages

    def _fill(self, deadline: float | None) -> None:
        if self._at_end or self._closed.is_set():
            raise EOFError
        if self._past is not None:
            self._from_past(self._past, deadline)
            return
        self._attachment.require()
        try:
            if self._consumer is None:
                self._change_over(deadline)
                return
            if self._consumer.position != self._read_to:
                self._read_missed(self._consumer)  # Ctrl-C interrupted the reading of a batch
                return
            self._from_ring(self._consumer, deadline)
        except Stale:
            self._attachment.require()
            self._change_over(deadline)

    def _from_past(self, past: CursorSubscription, deadline: float | None) -> None:
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        try:
            message = past.get(left)
        except EOFError:
            past.close()
            self._past, self._at_end = None, self._forever
            self._position = max(self._position, self._floor)  # losses below that are reported
            self._times_away = self._past_away
        except FellBehind:
            self.reported_at = past.reported_at
            raise
        except Interrupted as error:
            self._interrupted(error)
        except Disconnected as error:
            self._require_reconnect(error)
            if self._forever:
                raise
            self._past = None
            self._losses, self._counted_below = past._losses, past._counted_below
            self._change_over(deadline)
        else:
            run = [message]
            if past._pop is not None:
                run += past._ready
                past._ready.clear()
            self._receive(run, past._decoder.has_headers)
            self._position = run[-1].sequence + 1

    def _from_ring(self, consumer: ring.Consumer, deadline: float | None) -> None:
        consumer.release()  # of the records that were read
        slice_s = SLICE_S if deadline is None else min(max(deadline - time.monotonic(), 0.0), SLICE_S)
        wanted = self._interrupt_requested
        if wanted:
            slice_s = 0.0
        try:
            data = consumer.range(READ_BYTES, slice_s)
        except FellBehind:
            self._read_missed(consumer)  # overtaken
            return
        except Damaged:
            self._skip(consumer)
            return
        if data:
            sound = self._decode(data, deadline)
            self._read_to = consumer.position
            if not sound:
                self._skip(consumer)
        elif wanted:
            self._interrupt_requested = False
            raise Interrupted
        elif time.monotonic() >= self._check_at:
            self._check_server()
        elif deadline is not None and time.monotonic() >= deadline:
            raise TimeoutError

    def _skip(self, consumer: ring.Consumer) -> None:
        """Skip a corrupt record and all after it in the ring: the log has the records that passed the check."""
        consumer.skip()
        self._read_missed(consumer)

    def _read_missed(self, consumer: ring.Consumer) -> None:
        """Read from the log the messages that were not read from the ring. Raises Stale if the server is disconnected,
        so that the caller continues with the next one."""
        try:
            self._catch_up(str(self._position))
        except Disconnected:
            if self._reconnect is False:
                raise
            raise Stale("server of the ring is away") from None
        self._read_to = consumer.position

    def _decode(self, data: bytes, deadline: float | None) -> bool:
        """Receive the messages of a range up to its first corrupt record. Returns whether the range has none."""
        try:
            run = self._filter.messages(data)
        except Disconnected:  # the records will be read again, from the log
            if self._reconnect is False:
                raise
            raise Stale("server of the ring was restarted") from None
        if run.flags >= ring.OWN:
            self._require_logged(run.last, deadline)
        messages = run.messages
        if messages and messages[0].sequence < self._floor:
            messages = [message for message in messages if message.sequence >= self._floor]
        self._receive(messages, run.has_headers)
        self._position = max(self._position, run.last + 1)
        return run.is_sound

    def _require_logged(self, sequence: int, deadline: float | None) -> None:
        """Wait until the log has the messages up to `sequence`.

        A server that is killed may not have logged messages that it wrote itself; the next server drops these. Raises
        Stale if only the log can tell which were dropped; EOFError, TimeoutError."""
        at, deadline = self._at, None if deadline is None else max(deadline, time.monotonic() + LOGGED_S)
        while not at.ring.wait_committed(sequence, SLICE_S) and not (at.ring.retired or at.socket.is_lost):
            if self._closed.is_set():
                raise EOFError
            if deadline is not None and time.monotonic() >= deadline:
                self._leave_slot()  # the messages will be read again, from the log
                raise TimeoutError
        if at.ring.retired or at.socket is not self._socket or at.socket.is_lost:
            raise Stale("ring is ahead of the log: its server ended")

    def _check_server(self) -> None:
        """Check that the server still has this ring. It can be read without the server for some time. Raises Stale, and
        Disconnected after the time of `reconnect`."""
        self._check_at = time.monotonic() + LOOK_S
        if not self._at.socket.is_lost:
            self._away_since = 0.0
            return
        self._away_since = self._away_since or time.monotonic()
        try:
            same = self._attachment.attached() is self._at
        except Refused:
            same = False
        except Disconnected:
            limit = self._reconnect
            if limit is False or (limit is not True and time.monotonic() - self._away_since > limit):
                raise
            return
        if not same:
            raise Stale("ring is retired")

    # ------------------------------------------------------------ async programs

    def _has_next(self) -> bool:
        return bool(self._ready) and not self._closed.is_set()

    def _when_ready(self, call: Callable[[], None]) -> tuple[float, float] | None:
        past, consumer, at = self._past, self._consumer, self._at
        if self._ready or self._closed.is_set() or self._at_end or self._interrupt_requested:
            call()
        elif past is not None:
            return past._when_ready(call)
        elif self._backoff is not None:
            return self._wait_away(call, max(self._backoff.next_at, self._ending.next_at) - time.monotonic())
        elif consumer is None or consumer.position != self._read_to:
            call()
        elif at.is_replaced:
            if not at.socket.is_lost:
                call()
            return self._wait_away(call, LOOK_S)  # its server is disconnected: `get` checks for the next every LOOK_S
        else:
            consumer.release()
            WATCHER.watch(self, at, consumer.position, call)
            if self._closed.is_set() or self._interrupt_requested:  # since the check above
                WATCHER.wake(self)
        return None

    # ------------------------------------------------------------ ends

    def cover(self, names: Sequence[str]) -> None:
        """Do nothing: all messages of the ring are read."""

    def interrupt(self) -> None:
        self._interrupt_requested = True
        WATCHER.wake(self)
        self._wake()
        past = self._past
        if past is not None:
            past.interrupt()

    def close(self) -> None:
        self._closed.set()
        if self._is_of_parent:
            return
        self.interrupt()
        with self._turn:
            self._leave_slot()
            self._close_old_slots()
            past, self._past = self._past, None
            if past is not None:
                past.close()


# ---------------------------------------------------------------- subscriptions without a waiting thread


class RingWatcher:
    """One thread for all subscriptions of async programs that wait for messages in rings.

    It waits in shared memory, for all rings at once.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[Attached, dict[RingSubscription, Callable[[], None]]] = {}  # each at its ring's tail
        self._tails: dict[Attached, int] = {}
        self._runs = False

    def watch(self, waiting: RingSubscription, at: Attached, position: int, call: Callable[[], None]) -> None:
        """Call `call` once the ring has a record at `position` or is retired, or its server has disconnected."""
        calls: list[Callable[[], None]] = []
        with self._changed:
            if at in self._tails and at.ring.tail != self._tails[at]:  # a record for the waiting ones has come
                del self._tails[at]
                calls = list(self._waiting.pop(at).values())
            if at.ring.tail == position and not at.ring.retired:
                if at not in self._tails and self._tails:
                    ring.bell(True)  # the thread waits for other rings
                self._tails[at] = position
                self._waiting.setdefault(at, {})[waiting] = call
                self._start()
            else:
                calls.append(call)
        for due in calls:
            due()

    def _start(self) -> None:
        if not self._runs:
            threading.Thread(target=self._run, name="mqfs-rings", daemon=True).start()
            self._runs = True  # not set if the start fails: the next call tries again
        self._changed.notify()

    def wake(self, waiting: RingSubscription) -> None:
        """Call the function of a subscription now, if it waits."""
        with self._changed:
            calls = [row.pop(waiting) for row in self._waiting.values() if waiting in row]
        for call in calls:
            call()

    def _run(self) -> None:
        look_at, bell = time.monotonic() + LOOK_S, ring.bell()
        while rings := self._rings():
            looks = time.monotonic() >= look_at
            if looks:
                look_at = time.monotonic() + LOOK_S
            changed = [at for at, tail in rings.items() if at.ring.tail != tail or at.ring.retired or looks]
            for at in changed:
                self._call_all(at, only_lost=looks and at.ring.tail == rings[at] and not at.ring.retired)
            if not changed or looks:
                pause_s = SLICE_S if len(rings) <= MOST_RINGS else POLL_S
                if not ring.wait_any([(at.ring, tail) for at, tail in rings.items()], bell, pause_s):
                    self._wait_a_little(rings)
            bell = ring.bell()  # read before the rings are, so that no new one is missed

    @staticmethod
    def _wait_a_little(rings: dict[Attached, int]) -> None:
        """Wait for a single ring, or for a short time, on a system that cannot wait for several rings."""
        if len(rings) == 1:
            ((at, tail),) = rings.items()
            at.ring.wait(tail, SLICE_S)
        else:
            time.sleep(POLL_S)

    def _rings(self) -> dict[Attached, int]:
        """Return the rings with waiting subscriptions, and their tails; none if the thread has to end."""
        with self._changed:
            while True:
                for at in [at for at, row in self._waiting.items() if not row]:
                    del self._waiting[at], self._tails[at]
                if not self._waiting and not self._changed.wait(IDLE_S) and not self._waiting:
                    self._runs = False
                    return {}
                if any(self._waiting.values()):
                    return dict(self._tails)

    def _call_all(self, at: Attached, *, only_lost: bool) -> None:
        if only_lost and not (at.socket.is_lost or at.is_replaced):
            return
        with self._changed:
            row = self._waiting.pop(at, {})
            self._tails.pop(at, None)
        for call in row.values():
            call()


WATCHER = RingWatcher()


def _forget_parent() -> None:
    """Replace the watcher in a forked child, which has neither the parent's subscriptions nor its thread."""
    global WATCHER
    WATCHER = RingWatcher()


os.register_at_fork(after_in_child=_forget_parent)


# ---------------------------------------------------------------- the records of a ring that a subscription selects


class NotInRing(Exception):
    """Only a cursor can read the requested messages."""


class _Names(dict[int, str | None]):
    """The names of selected streams, by number; None: not selected, or unknown."""

    def __init__(self, ask: Callable[[int], str | None], selects: Callable[[str], bool]) -> None:
        self._ask, self._selects = ask, selects

    def __missing__(self, number: int) -> str | None:
        name = self._ask(number)
        selected = self[number] = name if name is not None and self._selects(name) else None
        return selected


class RangeMessages(NamedTuple):
    """The messages of a range of a ring for a subscription."""

    messages: list[Message]  # selected, and not expired
    last: int  # sequence of the range's last record; 0: it has none
    flags: int  # of all records
    has_headers: bool  # whether a message has headers
    is_sound: bool  # False: the range ends with a corrupt record


class RingFilter:
    """Streams and patterns over one generation of a ring at a time."""

    def __init__(self, names: Sequence[str]) -> None:
        """`names`: streams and patterns; none: everything."""
        self._selected = names

    def attach(self, at: Attached) -> None:
        """Use the stream numbers of a generation. Raises BadRing for a pattern that is invalid in its group."""
        self._names, self._ttl_ns = _Names(at.name, _selector(self._selected, at.words)), at.ttl_ns

    def messages(self, data: bytes) -> RangeMessages:
        """Return the messages of whole records. Raises Disconnected if the name of a stream could not be asked for."""
        names, found, now = self._names, list[Message](), time.time_ns() if self._ttl_ns else 0
        since = now - self._ttl_ns + 1 if now else EVER
        at = last = flags = headed = 0
        is_sound = True
        while True:
            at, end, more, some = native_messages(data, at, names, Message, found, NO_HEADERS, since)
            last, flags, headed = end or last, flags | more, headed | some
            if at == len(data):
                break
            try:
                entry, at = record_at(data, at)
            except DiskFailed:
                entry = None
            if entry is None:
                is_sound = False
                break
            last, flags = entry.sequence, flags | entry.flags
            name = names[entry.stream] if entry.kind == Kind.MESSAGE else None
            if name is not None and (entry.headers or entry.time_ns >= since):
                found.append(message_of(entry, name))
                headed |= bool(entry.headers)
        if headed:
            found = [message for message in found if not message.headers or self._passes(message)]
        return RangeMessages(found, last, flags, bool(headed), is_sound)

    def _passes(self, message: Message) -> bool:
        """Whether a message with headers is for all receivers and has not expired."""
        more = message.headers
        ttl_ns = parse_duration(more[headers.TTL]) if headers.TTL in more else self._ttl_ns
        return headers.SINGLE not in more and not (ttl_ns and message.time_ns + ttl_ns <= time.time_ns())


def _selector(names: Sequence[str], words: Words) -> Callable[[str], bool]:
    try:
        return compile_selection(names, words)
    except BadCommand as error:
        raise BadRing(str(error)) from None
