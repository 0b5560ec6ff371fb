"""Metering: the open files of a user with a quota.

A meter has a user's rate of messages and bytes, its parked reads and its claims. A handle is metered by replacing its
`read` and `write` when it is opened: handles of users without a quota have no extra cost. A write beyond the rate waits
for its turn, in the order of all writes of the user; a read beyond a bound is refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs

from mqfs.engine.core.timers import PACING, Alarm
from mqfs.engine.files.claiming import ClaimingHandle
from mqfs.engine.files.handle import OpenFile
from mqfs.engine.files.stream import Writer
from mqfs.errors import Interrupted, OverQuota
from mqfs.model import Step, User, Wait
from mqfs.quotas import Quota, Quotas

if TYPE_CHECKING:
    from mqfs.engine.group import Group
    from mqfs.engine.tree.tree import Tree

SECOND_NS = 10**9


class Pace:
    """A rate: the amount of a second may be taken at once, then evenly. 0: no bound."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._free_ns = 0  # engine time at which the whole amount taken is allowed

    def delay_ns(self, amount: int, now_ns: int) -> int:
        """Return the time to wait before `amount` may be taken. More than a second's amount is allowed when nothing is
        owed."""
        if not self._rate or not amount:
            return 0
        cost = min(amount * SECOND_NS // self._rate, SECOND_NS)
        return max(max(self._free_ns - now_ns, 0) + cost - SECOND_NS, 0)

    def take(self, amount: int, now_ns: int) -> None:
        if self._rate:
            self._free_ns = max(self._free_ns, now_ns) + amount * SECOND_NS // self._rate


@attrs.define(eq=False)
class QueuedWrite:
    """A write that waits for its turn. `step`: its result, once performed. `handle`: None if it is performed
    elsewhere."""

    handle: OpenFile | None
    perform: Callable[[], Step[int]]
    messages: int
    size: int
    step: Step[int] | None = None


@attrs.define
class QuotaCounts:
    """Counters of a user's quota since the server started, shown in `.stats`."""

    delayed: int = 0  # delayed writes
    refused: int = 0  # refused reads, writes and opens


class Meter:
    """A user's use of its quota."""

    def __init__(self, uid: int, quota: Quota, tree: Tree) -> None:
        self.uid, self.quota, self._clock, self._kept = uid, quota, tree.clock, tree.kept_quotas
        self.counts = QuotaCounts()
        self._paces = Pace(quota.messages), Pace(quota.bytes)
        self._queue: OrderedDict[Wait[int], QueuedWrite] = OrderedDict()
        self._alarm = Alarm(tree.timers, tree.root, PACING, f"serving writers of uid {uid}", lambda _: self._serve())
        self._writers: set[Writer] = set()
        self._claiming: set[ClaimingHandle] = set()
        self.parked = 0  # parked reads
        self._claims_to_come = 0  # parked reads that will claim

    @property
    def claims(self) -> int:
        """Number of claims held, and of parked reads that will claim."""
        return sum(len(handle.claims) for handle in self._claiming) + self._claims_to_come

    def refusal(self, group: Group, user: User, file: str, what: str, most: int) -> OverQuota:
        """Return the error for a reached bound, and add it to `.errors`."""
        self.counts.refused += 1
        error = OverQuota(f"uid {self.uid} has {what} (expected at most {most})")
        group.refuse(user, file, str(error))
        return error

    def admit(self, user: User, group: Group, file: str, handles: int) -> None:
        """Check that the user may open one more file. Raises OverQuota."""
        if self.quota.handles and handles >= self.quota.handles:
            raise self.refusal(group, user, file, f"{handles} open files", self.quota.handles)

    def attach(self, handle: OpenFile) -> None:
        """Meter a handle that was just opened."""
        quota = self.quota
        if (handle.publishes or handle.may_publish) and handle.writes and (quota.messages or quota.bytes):
            write = handle.write
            handle.write = lambda data, offset=0: self._write(handle, data, lambda: write(data, offset))  # type: ignore[method-assign]
            if isinstance(handle, Writer):
                handle.gate = self._is_open
                self._writers.add(handle)
        if handle.reads and handle.parkable and (quota.parked or quota.claims):
            read = handle.read
            handle.read = lambda count, offset=0: self._read(handle, read, count, offset)  # type: ignore[method-assign]
        if isinstance(handle, ClaimingHandle):
            self._claiming.add(handle)
            handle.one_by_one = bool(quota.claims)

    def detach(self, handle: OpenFile) -> None:
        """Stop metering a closed handle. Its waiting writes fail with Interrupted."""
        if isinstance(handle, ClaimingHandle):
            self._claiming.discard(handle)
        if isinstance(handle, Writer):
            self._writers.discard(handle)
        for wait, queued in list(self._queue.items()):
            if queued.handle is handle:
                del self._queue[wait]
                wait.fail(Interrupted(f"{handle.node.name!r}: closed before its write had room"))

    def use(self, handles: int) -> dict[str, Any]:
        """Return the bounds that are set, their present use, and counters, for `.stats`."""
        kept = self._kept.total_of(self.uid) if self._kept is not None else 0
        now = {"kept": kept, "parked": self.parked, "handles": handles, "claims": self.claims}
        bounds = {key: most for key, most in attrs.asdict(self.quota).items() if most}
        used = {key: count for key, count in now.items() if key in bounds}
        return {"bounds": bounds, "used": used, "queued": len(self._queue), **attrs.asdict(self.counts)}

    # ------------------------------------------------------------ rates

    def try_turn(self, messages: int, size: int) -> bool:
        """Count a write of that number of messages and bytes that is performed elsewhere. False: it has to wait for its
        turn, and is not counted."""
        if self._queue or self._delay_ns(messages, size):
            return False
        self._perform(QueuedWrite(None, lambda: 0, messages, size))
        return True

    def turn(self, messages: int, size: int) -> Step[int]:
        """As `try_turn`, but wait for the turn of the write."""
        return self._perform_in_turn(QueuedWrite(None, lambda: 0, messages, size))

    def _write(self, handle: OpenFile, data: bytes, perform: Callable[[], Step[int]]) -> Step[int]:
        if handle.had_turn:
            return perform()
        messages = handle.count_messages(data)
        if not messages and not handle.publishes and all(other.handle is not handle for other in self._queue.values()):
            return perform()  # no earlier write of this file waits
        return self._perform_in_turn(QueuedWrite(handle, perform, messages, len(data) if handle.publishes else 0))

    def _perform_in_turn(self, queued: QueuedWrite) -> Step[int]:
        if not self._queue and not self._delay_ns(queued.messages, queued.size):
            return self._perform(queued)
        wait: Wait[int] = Wait(lambda wait: self._cancel(wait, queued))
        self._queue[wait] = queued
        self.counts.delayed += 1
        first = next(iter(self._queue.values()))
        self._alarm.at(self._clock.engine_ns() + self._delay_ns(first.messages, first.size))
        return wait

    def _delay_ns(self, messages: int, size: int) -> int:
        now, (first, second) = self._clock.engine_ns(), self._paces
        return max(first.delay_ns(messages, now), second.delay_ns(size, now))

    def _is_open(self) -> bool:
        """Whether a write would be performed at once. If not, wake polling programs once it would."""
        if not self._queue and not (delay := self._delay_ns(1, 1)):
            return True
        if not self._queue:
            self._alarm.at(self._clock.engine_ns() + delay)
        return False

    def _perform(self, queued: QueuedWrite) -> Step[int]:
        step, now = queued.perform(), self._clock.engine_ns()
        self._paces[0].take(queued.messages, now)
        self._paces[1].take(queued.size, now)
        return step

    def _serve(self) -> None:
        """Perform the writes whose turn has come; then wake polling programs."""
        while self._queue:
            wait, queued = next(iter(self._queue.items()))
            if delay := self._delay_ns(queued.messages, queued.size):
                self._alarm.at(self._clock.engine_ns() + delay)
                return
            del self._queue[wait]
            try:
                queued.step = self._perform(queued)
            except Exception as error:
                wait.fail(error)
            else:
                wait.follow(queued.step)
        for stream in {handle.node for handle in self._writers}:
            stream.pollers.wake()

    def _cancel(self, wait: Wait[int], queued: QueuedWrite) -> bool:
        """Cancel a write that waits for its turn, or by now for room in its stream."""
        return self._queue.pop(wait, None) is not None or (isinstance(queued.step, Wait) and queued.step.cancel())

    # ------------------------------------------------------------ parked reads, and claims

    def _read(self, handle: OpenFile, read: Callable[[int, int], Step[bytes]], count: int, offset: int) -> Step[bytes]:
        quota, claims = self.quota, False
        if quota.claims and isinstance(handle, ClaimingHandle) and not handle.auto_ack:
            claims = True
            if (held := self.claims - handle.acks_next) >= quota.claims:
                if not handle.waits and (data := handle.at_once(count, offset)) is not None:
                    return data  # it claims nothing
                raise self._refused(handle, f"{held} claims", quota.claims)
        step = read(count, offset)
        if not isinstance(step, Wait) or step.settled:
            return step
        if quota.parked and self.parked >= quota.parked and step.cancel():
            raise self._refused(handle, f"{self.parked} reads that wait", quota.parked)
        return self._park(step, claims)

    def _refused(self, handle: OpenFile, what: str, most: int) -> OverQuota:
        return self.refusal(handle.group, handle.user, handle.node.name, what, most)

    def _park(self, step: Wait[bytes], claims: bool) -> Wait[bytes]:
        self._count(1, claims)
        wait: Wait[bytes] = Wait(lambda wait: self._unpark(step, claims, wait.otherwise))

        def settled(done: Wait[bytes]) -> None:
            self._count(-1, claims)
            wait.follow(done)

        step.subscribe(settled)
        return wait

    def _unpark(self, step: Wait[bytes], claims: bool, otherwise: BaseException | None) -> bool:
        if not step.cancel(otherwise):
            return False
        self._count(-1, claims)
        return True

    def _count(self, more: int, claims: bool) -> None:
        self.parked += more
        self._claims_to_come += more * claims


class Meters:
    """The meters of all users of a tree."""

    def __init__(self, quotas: Quotas, tree: Tree) -> None:
        self._quotas, self._tree = quotas, tree
        self._users: dict[int, Meter] = {}

    def of(self, uid: int) -> Meter | None:
        """Return the user's meter. None: the user has no quota."""
        meter = self._users.get(uid)
        if meter is None and (quota := self._quotas.of(uid)) is not None:
            meter = self._users[uid] = Meter(uid, quota, self._tree)
        return meter

    def all(self) -> list[Meter]:
        """Return the meters used so far."""
        return list(self._users.values())
