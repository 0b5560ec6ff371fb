"""Alarms, in one heap for all groups of a tree, and the faults of single groups.

Each part of a group that waits for a time has one alarm, set to the earliest moment at which it has something to do.
The part itself knows which of its messages are due. A failure is contained, and the alarm rings again after a second.

An exception in the start, maintenance or stop of a group is logged and affects no other group. An exception in a
client's request is answered by the front end.
"""

from __future__ import annotations

import errno
import heapq
import logging
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from mqfs import errors, limits
from mqfs.clock import Clock
from mqfs.errors import shortened

if TYPE_CHECKING:
    from mqfs.engine.group import Group

Row = TypeVar("Row", bound=tuple[Any, ...])

log = logging.getLogger("mqfs.engine")


class Faults:
    """The faults of a tree: contained, counted and logged."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._silent_until: dict[int, int] = {}  # group number -> engine ns

    def contain(self, group: Group, what: str, call: Callable[[], object]) -> bool:
        """Whether `call` succeeded. After a bug the group is read-only: its state in memory may be inconsistent."""
        try:
            call()
        except (errors.MqfsError, OSError) as error:
            self.report(group.number, f"{what} failed: {error}")
        except Exception as error:
            self._fail(group, f"{what} failed: {error!r}")
        else:
            return True
        return False

    def _fail(self, group: Group, text: str) -> None:
        """Make the group read-only. Log the exception being handled, with its traceback the first time."""
        line = f"{text}; the group is read-only until the next start"
        if group.log.end.failed is None:
            self._silent_until[group.number] = self._clock.engine_ns() + limits.LOG_AGAIN_S * 10**9
            log.exception("group %d: %s", group.number, line)
        else:
            self.report(group.number, line)
        group.log.upkeep.fail(OSError(errno.EIO, text))

    def report(self, number: int, text: str) -> None:
        """Log an error of a group, at most once in LOG_AGAIN_S seconds."""
        now = self._clock.engine_ns()
        if now >= self._silent_until.get(number, now):
            self._silent_until[number] = now + limits.LOG_AGAIN_S * 10**9
            log.error("group %d: %s", number, text)


def report_unserved(number: int, why: object) -> None:
    """Log that a group is not served."""
    log.error("group %d is not served: %s; run mqfs check --fix on the stopped store", number, why)


# ------------------------------------------------------------ refusals

# Why writes to a group's files were refused, for `.errors`. Each user has a list, so none evicts another's refusals.


class Refused(NamedTuple):
    """One line of `.errors`."""

    time_ns: int
    uid: int
    pid: int
    file: str
    text: str


class Refusals:
    """The last refusals of each user in one group."""

    def __init__(self) -> None:
        self._users: dict[int, deque[Refused]] = {}  # by uid, the user that was refused last at the end

    def add(self, refused: Refused) -> None:
        mine = self._users.pop(refused.uid, None)
        if mine is None:
            mine = deque(maxlen=limits.ERRORS)
            while len(self._users) >= limits.ERROR_USERS:
                del self._users[next(iter(self._users))]
        mine.append(refused._replace(text=shortened(refused.text)))
        self._users[refused.uid] = mine

    def of(self, uid: int) -> list[Refused]:
        """Return the refusals of one user, oldest first."""
        return list(self._users.get(uid, ()))

    def all(self) -> list[Refused]:
        """Return the refusals of all users, oldest first."""
        return sorted((row for mine in self._users.values() for row in mine), key=lambda row: row.time_ns)


# ------------------------------------------------------------ rows by time

_SPARE = 64
_EXAMINED = 16  # rows examined by a push, or passed between two looks at the clock: some 5 us


class LazyHeap(Generic[Row]):
    """A heap from which rows are removed late: a row that is not live any more, by `is_live`, stays until it is the
    least, or is examined. All rows are examined when there are twice as many as after the last time, but each push
    examines only a few of them, however many there are.

        _rows    2 5                   new rows, and examined ones that are live
        _old     1 4 3 6 9             a heap, too: examined from its end, so the rest remains a heap
    """

    __slots__ = ("_is_live", "_most", "_old", "_rows", "least")

    def __init__(self, is_live: Callable[[Row], bool]) -> None:
        self._is_live = is_live
        self.least: Row | None = None  # the least row, live or not
        self._rows: list[Row] = []
        self._old: list[Row] = []
        self._most = _SPARE  # rows above which they are examined

    def __len__(self) -> int:
        """Count the rows, with those that are not live."""
        return len(self._rows) + len(self._old)

    def push(self, row: Row) -> None:
        heapq.heappush(self._rows, row)
        if self.least is None or row < self.least:
            self.least = row
        if self._old:
            self.examine()
        elif len(self._rows) > self._most:
            self._rows, self._old = self._old, self._rows

    def pop(self) -> Row:
        """Remove the least row and return it."""
        rows, old = self._rows, self._old
        row = heapq.heappop(old if old and (not rows or old[0] < rows[0]) else rows)
        self._most = min(self._most, 2 * len(self) + _SPARE)
        self._find_least()
        return row

    def examine(self) -> bool:
        """Examine a few rows. Return whether more have to be examined."""
        for row in self._old[-_EXAMINED:]:
            if self._is_live(row):
                heapq.heappush(self._rows, row)
        del self._old[-_EXAMINED:]
        if not self._old:
            self._most = 2 * len(self._rows) + _SPARE
        self._find_least()
        return bool(self._old)

    def _find_least(self) -> None:
        self.least = min(self._rows[:1] + self._old[:1], default=None)

    def examine_all(self) -> Iterator[None]:
        """Examine all rows, in steps."""
        while self.examine():
            yield
        self._rows, self._old = [], self._rows
        while self.examine():
            yield


# ------------------------------------------------------------ alarms


AGAIN_NS = 10**9  # until a retry after a failure
ROUND_NS = 10**7  # least time between two retries for room
EXPIRY, DELAYED, SCHEDULES, CONSUMERS, PARTS, TRIMMING, PACING, LOOKING = range(8)  # turns
_DUE = (DELAYED, SCHEDULES)  # their alarms retry by themselves: a retry after each would set them without end


class Timers:
    """The alarms of a tree, in the order of their due times. All times are engine time, in nanoseconds."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self._heap = LazyHeap(_is_set)
        self._numbers = count()
        self.on_sooner: Callable[[], None] | None = None  # called when `next_due_ns` became sooner
        self.piece_s: Callable[[bool], float] = lambda _: limits.LOOKING_S  # see mqfs/serving/fairness.py

    @property
    def next_due_ns(self) -> int | None:
        """The engine time at which `run` has to be called next, or None."""
        return None if (least := self._heap.least) is None else least[0]

    def __len__(self) -> int:
        """Count the rows of the heap, with those of alarms that were set to another time."""
        return len(self._heap)

    def push(self, alarm: Alarm, due_ns: int) -> None:
        """Set an alarm. Called by Alarm.at only."""
        sooner = (next_due_ns := self.next_due_ns) is None or due_ns < next_due_ns
        if not alarm.due_ns:
            alarm.number = next(self._numbers)
        alarm.due_ns = due_ns
        self._heap.push((due_ns, alarm.turn, alarm.number, alarm))
        if sooner and self.on_sooner is not None:
            self.on_sooner()

    def run(self, clock: Clock) -> None:
        """Ring the alarms that are due, then let blocked writers of those groups continue. After SLICE_S the remaining
        alarms wait for the next call, as many groups may have one at once."""
        groups: dict[Group, bool] = {}  # whether to retry due messages that wait for room, too
        now_ns = clock.engine_ns()
        until, dead = now_ns + int(limits.SLICE_S * 1e9), 0
        while (next_due_ns := self.next_due_ns) is not None and next_due_ns <= now_ns:
            row = self._heap.pop()
            if _is_set(row):
                alarm = row[3]
                alarm.due_ns = 0
                groups[alarm.group] = groups.get(alarm.group, False) or alarm.turn not in _DUE
                if not self.faults.contain(alarm.group, alarm.what, partial(alarm.ring, now_ns)):
                    alarm.at(now_ns + AGAIN_NS)
            elif (dead := dead + 1) % _EXAMINED:
                continue
            if clock.engine_ns() >= until:
                break
        for group, look in groups.items():
            self.faults.contain(group, "letting writers continue", partial(group.unblock, look))


class Alarm:
    """The alarm of one part of a group. `ring` is called with the engine time; `what` names the call in a log line if
    it fails. Of alarms due at once the lowest `turn` rings first, then the one set first since it last rang."""

    __slots__ = ("_timers", "due_ns", "group", "number", "ring", "turn", "what")

    def __init__(self, timers: Timers, group: Group, turn: int, what: str, ring: Callable[[int], None]) -> None:
        self._timers, self.group, self.turn, self.what, self.ring = timers, group, turn, what, ring
        self.due_ns = 0  # 0: not set
        self.number = 0

    def at(self, due_ns: int) -> None:
        """Set the alarm to that engine time, unless it is set to an earlier one."""
        if not self.due_ns or due_ns < self.due_ns:
            self._timers.push(self, due_ns)

    def cancel(self) -> None:
        """Unset the alarm. Its row stays in the heap."""
        self.due_ns = 0


def _is_set(row: tuple[int, int, int, Alarm]) -> bool:
    """Whether the row's alarm is still set to its time."""
    due_ns, _, number, alarm = row
    return due_ns == alarm.due_ns and number == alarm.number and not alarm.group.removed
