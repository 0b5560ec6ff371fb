"""Readers of the log: the base classes that search it in portions, and the readers of `order` and of views."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mqfs import errors, limits
from mqfs.engine.core.portions import Work
from mqfs.engine.delivery.waiting import WaitList
from mqfs.engine.files.handle import OpenFile, PartialRead
from mqfs.engine.language.permissions import R, allowed, sees
from mqfs.engine.nodes import Meta
from mqfs.engine.routing import MessageFilter, View
from mqfs.engine.stream import Stream
from mqfs.model import Kind, Record, Step, User, Wait

# ------------------------------------------------------------ searcher

# Open files that search the log for the messages they show, in portions: others are served in between.
#
# A read that finds nothing within one look waits here during the next looks. Later reads wait after it: a client may
# send several at once, and each continues where the one before ended. At the end of the log all wait for new messages,
# in the same order.


class Searcher(OpenFile):
    """A handle with a position in the log. It passes over messages that it does not show, and waits at the end."""

    parkable = True
    passed = 0  # messages that this look passed over
    since = 0  # under `replay key`: below it only the newest message of each key is shown

    def __init__(self, node: Any, user: User, reads: bool, writes: bool) -> None:
        super().__init__(node, user, reads, writes)
        self.position = self.group.log.end.next
        self.last: PartialRead = PartialRead(self)
        self.waits = self.wait_list()
        self.searching: OrderedDict[Wait[bytes], tuple[int, int]] = OrderedDict()  # its reads: count, offset
        self.search: Step[None] = None  # the search for these reads, while it lasts

    # For subclasses: where reads wait, and which bytes they get.

    def wait_list(self) -> WaitList:
        """Return the list where its reads wait for a new message, the same as long as it is open."""
        raise NotImplementedError

    def take(self, count: int, offset: int) -> bytes | None:
        """Return the bytes for a read, or None if it has to wait or the look is `unfinished`. Raises FellBehind,
        Damaged, DiskFailed."""
        raise NotImplementedError

    def rest(self, count: int, offset: int) -> bytes | None:
        """Return the rest of the last message for a read. None: the next message is due."""
        raise NotImplementedError

    def deliver(self, record: Record, count: int, offset: int) -> bytes | None:
        """Return the bytes of a new message for a waiting read. None: the message is not for this reader."""
        raise NotImplementedError

    @property
    def has_ended(self) -> bool:
        """Whether its reads get end-of-file from now on."""
        return False

    @property
    def unfinished(self) -> bool:
        """Whether the last look stopped at its bound."""
        return self.passed >= limits.PASSED_MESSAGES

    def pass_over(self, record: Record) -> None:
        """Count a message that is not shown."""
        self.passed += 1 + len(record.body) // limits.PASSED_BYTES

    def comes_now(self) -> None:
        """Start under `replay key`: of the present messages show only the newest of each key."""
        self.since = self.group.log.end.next if self.group.retention.newest is not None else 0

    def knows_newest(self) -> bool:
        """Whether the newest messages of the keys are known up to `since`. Just after a start they are looked up first,
        and the look is `unfinished`."""
        newest = self.group.retention.newest
        if newest is None or newest.follow() or newest.reach >= self.since:
            return True
        self.passed = limits.PASSED_MESSAGES
        return False

    def leaves_out(self, record: Record, stream: Stream) -> bool:
        """Whether a newer message of its key existed when the reader started."""
        newest = self.group.retention.newest
        return record.sequence < self.since and newest is not None and newest.is_superseded(stream, record.sequence)

    def has_next(self, look: Callable[[int], Record | None]) -> bool:
        """Whether the log may have a message for it, which `look(PASSED_MESSAGES)` finds. Move the position past
        messages that it leaves out."""
        for _ in range(limits.PASSED_MESSAGES):
            if self.position >= self.group.log.end.next or (record := look(limits.PASSED_MESSAGES)) is None:
                return False
            stream = self.group.numbers.get(record.stream)
            if stream is None or not self.leaves_out(record, stream):
                break
            self.position = record.sequence + 1
        return True

    def unpark(self, wait: Wait[bytes]) -> bool:
        """Remove a read that waits for a new message; return whether it waited."""
        return self.waits.cancel(self, wait)

    def push_back(self, data: bytes) -> None:
        self.last.back(data)

    # ------------------------------------------------------------ in portions

    def wait(self, count: int, offset: int = 0) -> Step[bytes]:
        """Let a read of `count` bytes wait, for which the last look found nothing: during further looks, or for a new
        message. Raises the error of a further look."""
        wait: Wait[bytes] = Wait(self._cancel_read)
        if not self.searching and self.passed < limits.PASSED_MESSAGES:
            self.waits.park(self, wait, count, offset)
            return wait
        self.look_again({wait: (count, offset)})
        return wait.result() if wait.settled else wait

    def look_again(self, reads: Mapping[Wait[bytes], tuple[int, int]]) -> None:
        """Search the present messages for reads: a short search now, a long one in portions."""
        self.searching.update(reads)
        if not isinstance(self.search, Wait) or self.search.settled:
            step = self.group.portions.run(self._look())
            self.search = step if self.searching else None

    def serve(self, reads: OrderedDict[Wait[bytes], tuple[int, int]]) -> None:
        """Resolve further waiting reads of a reader that got a message: in portions, as there are many."""
        self.searching.update(reads)
        self.search = self.group.portions.later(self._look())

    def _look(self) -> Work[None]:
        reads = self.searching
        while reads:
            wait, (count, offset) = next(iter(reads.items()))
            try:
                data = self.take(count, offset)
            except Exception as error:
                del reads[wait]
                wait.fail(error)
            else:
                if data is not None:
                    del reads[wait]
                    wait.resolve(data)
                elif not self.unfinished:
                    for wait, (count, offset) in reads.items():
                        self.waits.park(self, wait, count, offset)
                    reads.clear()
            if reads:
                yield
        self.search = None

    def _cancel_read(self, wait: Wait[bytes]) -> bool:
        if self.searching.pop(wait, None) is None:
            return self.unpark(wait)
        if not self.searching:
            if isinstance(self.search, Wait):
                self.search.cancel()
            self.search = None
        return True

    def end(self) -> None:
        """End waiting reads with end-of-file: the file or its group was removed, or the server stops. A search in hand
        ends by itself, as it has no reads left; it is not cancelled, since callers may wait for it."""
        reads = list(self.searching)
        self.searching.clear()
        for wait in reads:
            wait.resolve(b"")
        self.waits.close(self)


# ------------------------------------------------------------ positioned reader


class Reader(Searcher):
    """A reader that returns a message from its position on, or under `data coalesce` as many present messages as
    fit."""

    shows_only = False  # under `deliver one`: the present messages, then end-of-file

    def __init__(self, node: Any, user: User, reads: bool, writes: bool) -> None:
        super().__init__(node, user, reads, writes)
        self.sequential = reads and writes

    @property
    def idle(self) -> bool:
        """Whether it waits, and so has read everything."""
        return self in self.waits.readers

    # For subclasses: which records they find.

    def find(self) -> Record | None:
        """Return the next record, and move the position past it. None: there is none, or the look is `unfinished`.
        Raises FellBehind or Damaged."""
        raise NotImplementedError

    def is_behind(self) -> bool:
        """Whether unread messages were evicted, and the loss was not reported."""
        raise NotImplementedError

    def present(self, record: Record) -> bytes:
        """Return the bytes that show the record."""
        return record.body

    @property
    def over(self) -> bool:
        """Whether the file was removed: end-of-file from now on."""
        return self.group.removed

    def read(self, count: int, offset: int = 0) -> Step[bytes]:
        if not self.reads:
            self.require(reading=True)
        if not self.searching:
            data = self.take(count, offset)
            if data is not None:
                return data
            if not self.passed:  # as `wait`, with one call less
                wait: Wait[bytes] = Wait(self._cancel_read)
                self.waits.park(self, wait, count, offset)
                return wait
        return self.wait(count, offset)

    def take(self, count: int, offset: int) -> bytes | None:
        last, group, self.passed = self.last, self.group, 0
        if last.can_push_back or last.body:
            rest = last.rest(count, offset, self.sequential)
            if rest is not None:
                return rest if len(rest) == count else self._read_on(rest, count, offset)
        if self.over or count <= 0:
            return b""
        if group.tree.memory.over:
            self.require_memory()
        if self not in self.waits.readers:
            if group.settings.data == "coalesce":
                data = self._fill(count, offset)
            elif (record := self.find()) is not None:
                group.counts.read += 1
                data = last.first(self.present(record), count, offset)
            else:
                data = None
            if data is not None:
                group.retention.note_change()
                if group.publisher.blocked.streams:
                    group.unblock()
                return data
        if self.shows_only and group.settings.deliver == "one" and not self.unfinished:
            return b""
        return None

    def _read_on(self, rest: bytes, count: int, offset: int) -> bytes:
        """Return the rest of a message and, under `data coalesce`, the present messages after it."""
        if self.group.settings.data != "coalesce" or self.last.given < len(self.last.body):
            return rest
        if self.over or self.idle or self.is_behind():  # the next read reports that
            return rest
        data = self._fill(count, offset, rest)
        self.group.retention.note_change()
        self.group.unblock()
        return rest if data is None else data

    def _fill(self, count: int, offset: int, rest: bytes = b"") -> bytes | None:
        """Return `rest` and as many present messages as fit, a bounded number, for `data coalesce`. An EOF marker ends
        the messages before it, and is the end-of-file of the next read. None: there is no message."""
        pieces: list[bytes] = [rest] if rest else []
        size = len(rest)
        while size < count and len(pieces) < limits.COALESCED_MESSAGES:
            before = self.position
            try:
                record = self.find()
            except errors.MqfsError:
                if not pieces:
                    raise
                self.position = before  # the next read reports it
                break
            if record is None:
                break
            if record.kind == Kind.END:
                if pieces:
                    self.position = before
                    break
                return self.last.first(b"", count, offset)
            self.group.counts.read += 1
            pieces.append(self.present(record))
            size += len(pieces[-1])
        return self.last.first(b"".join(pieces), count, offset) if pieces else None

    def unpark(self, wait: Wait[bytes]) -> bool:
        if not super().unpark(wait):
            return False
        # All its messages up to now were delivered: they need not be searched for again, or retained.
        self.position = max(self.position, self.group.log.end.next)
        return True

    def deliver(self, record: Record, count: int, offset: int) -> bytes | None:
        self.position = record.sequence + 1
        self.group.counts.read += 1
        return self.last.first(self.present(record), count, offset)

    def rest(self, count: int, offset: int) -> bytes | None:
        rest: bytes | None = self.last.rest(count, offset, self.sequential)
        return rest

    @property
    def readable(self) -> bool:  # type: ignore[override]
        last = self.last
        if last.can_push_back or self.over or last.given < len(last.body):
            return True
        return self.ahead()

    def ahead(self) -> bool:
        """Whether there may be a record from the position on."""
        raise NotImplementedError

    def _end(self) -> None:
        self.end()
        self.group.retention.note_change()
        super()._end()


# ------------------------------------------------------------ order file


class MergedReader(Reader):
    """A reader of several streams at once, in the order of the log. It reports messages that were evicted unread."""

    shows_only = True

    def __init__(self, node: Any, user: User, reads: bool, writes: bool) -> None:
        super().__init__(node, user, reads, writes)
        self.cuts: dict[int, int] = {}  # stream -> the `evicted_before` reported here
        self.cuts_seen = self.group.retention.evictions
        self._start()

    def on_opened(self) -> None:
        super().on_opened()
        self.group.fanout.log_readers.add(self)

    def covers(self, stream: Stream) -> bool:
        """Whether messages of the stream are for this reader."""
        return True

    def admits(self, stream: Stream, record: Record) -> bool:
        """Whether the message is for this reader."""
        return record.kind == Kind.MESSAGE and not self.group.ranks.is_hidden(record)

    def wants(self, record: Record) -> bool:
        """Whether a new message is for this reader."""
        return not record.headers or not self.group.ranks.is_hidden(record)

    def deliver(self, record: Record, count: int, offset: int) -> bytes | None:
        return super().deliver(record, count, offset) if self.wants(record) else None

    def look(self, most: int) -> Record | None:
        """Return the next message in the log that may be for it, or the last of `most` others. Raises Damaged."""
        raise NotImplementedError

    def _start(self) -> None:
        replay = "all" if self.group.settings.deliver == "one" else self.group.settings.replay
        if replay == "off":
            return
        self.group.retention.advance_all()
        self.comes_now()
        if replay in ("all", "key"):
            self.position = self.group.log.reader.first
        else:
            mine = (s.kept.newest_kept() for s in self.group.numbers.values() if self.covers(s))
            self.position = max(mine, default=0) or self.position
        self.cuts = {stream.number: stream.kept.evicted_before for stream in self.group.numbers.values()}

    def find(self) -> Record | None:
        group = self.group
        if group.retention.evictions != self.cuts_seen:
            self._look_for_cuts()
        while self.position >= self.since or self.knows_newest():
            try:
                record = self.look(limits.SCANNED_MESSAGES)
            except errors.Damaged as error:
                self.position = error.sequence + 1
                raise
            if record is None:
                return None
            self.position = record.sequence + 1
            stream = group.numbers.get(record.stream)
            if (
                stream is not None
                and self.admits(stream, record)
                and stream.kept.visible(record)
                and not self.leaves_out(record, stream)
            ):
                return record
            self.pass_over(record)
            if self.unfinished:
                return None
        return None

    def is_behind(self) -> bool:
        group = self.group
        if group.retention.evictions == self.cuts_seen or self.position >= group.retention.evicted_before:
            return False
        return bool(fell_behind(self.position, dict(self.cuts), filter(self.covers, group.numbers.values())))

    def _look_for_cuts(self) -> None:
        group = self.group
        self.cuts_seen = group.retention.evictions
        if self.position >= group.retention.evicted_before:
            return
        behind = fell_behind(self.position, self.cuts, filter(self.covers, group.numbers.values()))
        if behind:
            group.counts.fell_behind += 1
            raise errors.FellBehind(f"messages of {behind} were lost (expected a larger 'depth' or faster reads)")

    def ahead(self) -> bool:
        return self.has_next(self.look)

    def watch(self, then: Callable[[], None] | None) -> None:
        self.group.fanout.pollers.watch(self, then)

    def _end(self) -> None:
        super()._end()
        self.group.fanout.log_readers.discard(self)
        self.group.fanout.pollers.watch(self, None)
        self.group.unblock()


class OrderHandle(MergedReader):
    """An open `order`: for each message of the group its stream's name and a NUL byte."""

    node: Meta

    def covers(self, stream: Stream) -> bool:
        return sees(self.user, self.group.state, stream.state)

    def admits(self, stream: Stream, record: Record) -> bool:
        return super().admits(stream, record) and self.covers(stream)

    def wants(self, record: Record) -> bool:
        return super().wants(record) and self.covers(self.group.numbers[record.stream])

    def look(self, most: int) -> Record | None:
        group, position = self.group, self.position
        while (record := group.log.reader.scan(position)) is not None:
            stream = group.numbers.get(record.stream)
            most -= 1
            if not most or (stream is not None and self.covers(stream)):
                break
            position = record.sequence + 1
        return record

    def wait_list(self) -> WaitList:
        return self.group.fanout.order_waits

    def present(self, record: Record) -> bytes:
        stream = self.group.numbers.get(record.stream)
        return (stream.name.encode() if stream else b"") + b"\0"


def fell_behind(position: int, reported: dict[int, int], streams: Iterable[Stream]) -> str:
    """Return the name of a stream with unreported losses at or above `position`; empty if there is none.

    Afterwards all evictions of the streams count as reported.
    """
    behind = ""
    for stream in streams:
        if stream.kept.evicted_before > position and reported.get(stream.number, 0) < stream.kept.evicted_before:
            behind = stream.name
        if stream.kept.evicted_before:
            reported[stream.number] = stream.kept.evicted_before
    return behind


# ------------------------------------------------------------ view file


class ViewHandle(MergedReader):
    """A view, open for reading."""

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
        """Whether the message is for this reader, if the view selects it."""
        return super().admits(stream, record) and self.covers(stream)

    def wants(self, record: Record) -> bool:
        return self._may_show(self.group.numbers[record.stream], record)

    def look(self, most: int) -> Record | None:
        return self.selection.find(self.position, most)

    def _end(self) -> None:
        self.node.readers.discard(self)
        super()._end()
