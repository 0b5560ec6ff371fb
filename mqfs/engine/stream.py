"""A stream: its group's log seen through its name, and who waits on it.

Owns the counting of what the stream keeps, the cutting of what it does not keep any more, and its readers and blocked
writers. The log itself, and the order of things between streams, are the group's.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mqfs import errors
from mqfs.state import StreamState
from mqfs.types import QTFILE, Kind, Qid, Record, Step, Wait

if TYPE_CHECKING:
    from mqfs.engine.files import Reader, StreamHandle
    from mqfs.engine.group import Group


class Verdict(enum.Enum):
    """What `depth` and `full` say of a write."""

    APPEND = enum.auto()
    DISCARD = enum.auto()
    WAIT = enum.auto()


class Stream:
    """A file. Made and removed by its group."""

    __slots__ = (
        "blocked",
        "count",
        "cut",
        "gone",
        "group",
        "mtime_ns",
        "newest",
        "number",
        "opens",
        "parked",
        "readers",
        "removed",
        "size",
        "state",
        "unused_since_ns",
        "watchers",
        "written",
    )
    directory = False

    def __init__(self, group: Group, state: StreamState) -> None:
        self.group = group
        self.state = state
        self.number = state.number
        self.removed = False
        self.opens = 0
        self.readers: set[StreamHandle] = set()
        self.parked: Parked = {}
        self.blocked: dict[Wait[int], Blocked] = {}
        self.watchers: dict[object, Callable[[], None]] = {}
        self.count = -1  # messages kept at or above the floor; -1: not counted yet
        self.size = 0  # their bytes
        self.gone = 0  # messages that fell below the floor since the start
        self.cut = 0  # one above the newest message that a bound or `clear` took away
        self.newest = -1  # sequence of the newest message; 0: none; -1: not looked up yet
        self.mtime_ns = 0  # its time, or 0 where it was not looked up
        self.written = 0
        self.unused_since_ns = group.tree.clock.engine_ns()

    @property
    def name(self) -> str:
        return self.state.name

    @property
    def parent(self) -> Group:
        return self.group

    @property
    def qid(self) -> Qid:
        return Qid(QTFILE, 0, self.group.number << 32 | self.number)

    # ------------------------------------------------------------ what is kept

    def kept_from(self) -> int:
        """The lowest sequence this stream keeps now."""
        group = self.group
        floor = max(self.state.floor, group.expired_before())
        replay = group.settings.replay
        if replay == "all":
            return floor
        live = group.live_floor(self)
        if replay == "last" and (newest := self.newest_kept()) >= floor and newest:
            live = min(live, newest)
        return max(floor, live)

    def advance(self) -> None:
        """Raise the floor to what is kept now, and count what is above it."""
        floor = self.kept_from()
        if self.count < 0 or floor > self.state.floor:
            self._raise(floor)

    def _raise(self, floor: int) -> None:
        before = self.count
        self.state.floor = max(floor, self.state.floor)
        self.count, self.size = self.group.bucket.tally(self.number, self.state.floor)
        for sequence in self._dropped_from(self.state.floor):
            found = self.group.bucket.peek(self.number, sequence)
            if found is not None and found[0] == sequence:
                self.count -= 1
                self.size -= found[1]
        if before < 0 and self.group.settings.full == "drop-old":
            # Read from a log after a kill: what `depth` had cut since the newest state is still in it.
            cut = self.group.counts.cut
            while self.count > 0 and not self._fits(0, 0):
                self.cut_oldest()
            self.group.counts.cut = cut
        if before > self.count:
            self.gone += before - self.count
            if self.group.cursors:
                self.group.overtake_cursors(self)

    def _dropped_from(self, floor: int) -> list[int]:
        dropped = self.group.state.dropped
        return [s for s, number in dropped.items() if number == self.number and s >= floor] if dropped else []

    def first_kept(self) -> int:
        """Sequence of the first message at or above the floor that was not dropped; 0 where there is none."""
        found = self.group.bucket.peek(self.number, self.state.floor)
        while found is not None and found[0] in self.group.state.dropped:
            found = self.group.bucket.peek(self.number, found[0] + 1)
        return found[0] if found else 0

    def newest_kept(self) -> int:
        """Sequence of the newest message at or above the floor that was not dropped; 0 where there is none."""
        if self.newest < 0:
            self._look_up_newest()
        while self.newest and self.newest in self.group.state.dropped:
            self.newest = self.group.bucket.before(self.newest, self.number) or 0
        return self.newest if self.newest >= self.state.floor else 0

    def _look_up_newest(self) -> None:
        bucket = self.group.bucket
        sequence = bucket.before(bucket.next, self.number)
        while sequence is not None:
            try:
                record = bucket.find(self.number, sequence)
            except errors.Damaged:
                record = None
            if record is not None and record.kind == Kind.MESSAGE:
                self.newest, self.mtime_ns = record.sequence, max(self.mtime_ns, record.time_ns)
                return
            sequence = bucket.before(sequence, self.number)
        self.newest = 0

    def visible(self, record: Record) -> bool:
        """Whether a message found in the log is still to be seen."""
        sequence = record.sequence
        return (
            sequence >= self.state.floor and sequence not in self.group.state.dropped and not self.group.expired(record)
        )

    # ------------------------------------------------------------ depth

    def verdict(self, messages: int, size: int) -> Verdict:
        """Make room for a write as `full` says, or tell that there is none.

        Raises StreamFull (`full reject`), and TooLong for what would never fit.
        """
        depth, full = self.group.settings.depth, self.group.settings.full
        if self.blocked and full == "block":
            return Verdict.WAIT
        if not (depth.messages or depth.size):
            return Verdict.APPEND
        if full != "drop-old" or depth.size:
            self._require_fit(messages, size)
        if self._fits(messages, size):
            return Verdict.APPEND
        self.advance()
        if self._fits(messages, size):
            return Verdict.APPEND
        if full == "block":
            return Verdict.WAIT
        if full == "drop-new":
            self.group.counts.discarded += messages
            return Verdict.DISCARD
        if full == "reject":
            raise errors.StreamFull(f"{self.name} keeps {self.count} messages, {self.size} bytes; its depth is reached")
        while self.count > 0 and not self._fits(messages, size):
            self.cut_oldest()
        return Verdict.APPEND

    def _require_fit(self, messages: int, size: int) -> None:
        depth = self.group.settings.depth
        if (depth.size and size > depth.size) or (depth.messages and messages > depth.messages):
            raise errors.TooLong("it alone is more than the depth of the stream")

    def _fits(self, messages: int, size: int) -> bool:
        depth = self.group.settings.depth
        if self.count < 0:
            return False
        if depth.messages and self.count + messages > depth.messages:
            return False
        return not (depth.size and self.size + size > depth.size)

    def cut_oldest(self) -> None:
        """Take away the oldest kept message; readers behind it are told."""
        found = self.group.bucket.peek(self.number, self.state.floor)
        if found is None:
            self.count = self.size = 0
            return
        sequence, size = found
        self.state.floor = sequence + 1
        if sequence not in self.group.state.dropped:
            self.count -= 1
            self.size -= size
            self.gone += 1
            if size:  # an end mark is no loss to anyone
                self.cut = sequence + 1
                self.group.counts.cut += 1
                self.group.cuts += 1

    def clear(self) -> int:
        """Take away all that is kept. Returns the new floor."""
        self.advance()
        bucket = self.group.bucket
        newest, last = self.newest_kept(), bucket.before(bucket.next, self.number)
        if newest:
            self.cut = newest + 1
            self.group.cuts += 1
        if last is not None:
            self.state.floor = max(self.state.floor, last + 1)
        self.gone += max(self.count, 0)
        self.count = self.size = 0
        return self.state.floor

    # ------------------------------------------------------------ readers and writers that wait

    def appended(self, sequence: int, kind: int, size: int) -> None:
        """Count a message that the log now holds."""
        if kind == Kind.MESSAGE:
            self.newest = sequence
        if self.count >= 0:
            self.count += 1
            self.size += size

    def wake_watchers(self) -> None:
        watchers, self.watchers = self.watchers, {}
        for then in watchers.values():
            then()

    def unblock(self) -> None:
        """Let writers that wait go on as far as there is room, in their order."""
        blocked = self.blocked
        while blocked:
            wait, (kind, bodies, total) = next(iter(blocked.items()))
            del blocked[wait]
            rest, self.blocked = blocked, {}  # so that this one is not told to stand behind the others
            try:
                verdict = self.verdict(len(bodies), sum(map(len, bodies)))
                step: Step[int] | None = None
                if verdict is Verdict.DISCARD:
                    step = total
                elif verdict is Verdict.APPEND:
                    step = self.group.carry_out(self, kind, bodies, total)
            except errors.MqfsError as error:
                self.blocked = blocked = rest
                self.group.tree.parked -= 1
                wait.fail(error)
                continue
            if step is None:
                self.blocked = {wait: (kind, bodies, total), **rest}
                return
            self.blocked = blocked = rest
            self.group.tree.parked -= 1
            chain(step, wait)
        if self.watchers:
            self.wake_watchers()

    def end(self) -> None:
        """The stream is gone: its readers get end-of-file, its writers an error."""
        self.removed = True
        end_parked(self.parked, self.group)
        for wait in list(self.blocked):
            del self.blocked[wait]
            self.group.tree.parked -= 1
            wait.fail(errors.NotFound(f"{self.name} was removed"))
        self.wake_watchers()


Blocked = tuple[int, Sequence[bytes], int]  # kind, bodies, what the write returns
Waiting = tuple[Wait[bytes], int, int]  # the wait, the read's count and offset
Parked = dict["Reader", list[Waiting]]


def serve_parked(parked: Parked, record: Record) -> None:
    """Settle the first waiting read of each handle with the message."""
    for reader in list(parked):
        waits = parked[reader]
        wait, count, offset = waits.pop(0)
        if not waits:
            del parked[reader]
        reader.group.tree.parked -= 1
        wait.settle(reader.hand(record, count, offset))


def end_parked(parked: Parked, group: Group) -> None:
    for waits in list(parked.values()):
        for wait, _, _ in waits:
            group.tree.parked -= 1
            wait.settle(b"")
    parked.clear()


def chain(step: int | Wait[int], wait: Wait[int]) -> None:
    """Settle `wait` with what `step` comes to."""
    if not isinstance(step, Wait):
        wait.settle(step)
        return

    def settled(done: Wait[int]) -> None:
        try:
            wait.settle(done.result())
        except (errors.MqfsError, OSError) as error:
            wait.fail(error)

    step.subscribe(settled)
