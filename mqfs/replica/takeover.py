"""Becoming the primary: by a start, by a standby that takes over, by `mqfs promote`.

    log empty                the store's older segments become a checkpoint, which the takeover names; its newest ones
                             frames
    log ahead of the disk    after a power cut: frames are fetched and applied, then it takes over
    disk ahead of the log    and no other server took over since: the rest is appended
    fenced since             the disk may have what the log has not: set aside in quarantine/, copied again

All of them end with one conditional append, the takeover. Whoever it is refused to reads on and decides again.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable

import attrs

from mqfs import limits
from mqfs.clock import Heard
from mqfs.errors import BadReplica
from mqfs.replica import following, state
from mqfs.replica.checkpoint import Checkpointer
from mqfs.replica.following import Diverged, Follower
from mqfs.replica.log import Append, Fenced, Look, NoAnswer, Position, Refused, ReplicatedLog, Report, Stopped, Writer
from mqfs.replica.state import ReplicaState
from mqfs.store.disk import Disk
from mqfs.store.standby import StandbyStore
from mqfs.store.store import read_label

log = logging.getLogger("mqfs.replica")
_ATTEMPTS = 16  # to take over while others do
_REASONS = 10  # why an engine does not answer, that have a line of the log at once
_CLOCK_S = 10.0  # that the clocks of two servers may differ before a line of the log says so


class Driver:
    """Does what a writer asks for, on one thread, until it is answered: for as long as it takes."""

    def __init__(self, replicated: ReplicatedLog, writer: Writer, stop: threading.Event | None = None) -> None:
        self._log, self.writer = replicated, writer
        self._stop = stop or threading.Event()
        self._since: float | None = None  # when the engine ceased to answer
        self._warned = 0.0  # when a line of the log said so
        self._told: set[str] = set()  # the reasons that it had a line for: a new one is not kept for a minute

    @property
    def silent_s(self) -> float:
        """Seconds since the engine ceased to answer; 0: it answers."""
        since = self._since
        return time.monotonic() - since if since is not None else 0.0

    def finish(self) -> None:
        """Until the writer is idle. Raises Fenced, Stopped."""
        while (request := self.writer.request) is not None:
            try:
                self._do(request)
            except (NoAnswer, BadReplica) as error:
                self._on_silence(str(error))
                if isinstance(request, Append):
                    self.writer.on_unclear()
        self._on_answer()
        if self.writer.fenced:
            raise Fenced

    def _do(self, request: Append | Look) -> None:
        if isinstance(request, Look):
            data = self._log.get(request.number)
            later = self._log.newest(request.number) is not None
            self.writer.on_found(data, later=later)
            if data is None and not later:
                end, at = following.end_before(self._log, self.writer.position), self.writer.position
                self._on_silence(following.lost(end, at) if end else "not appended, and no other record is there")
            return
        try:
            self._log.append(request.data, request.after, request.own, takeover=request.takeover)
        except Refused:
            self.writer.on_unclear()
        else:
            self.writer.on_appended()

    def _on_answer(self) -> None:
        if self._since is not None:
            log.info("replica %s answers again after %.1f s", self._log.name, time.monotonic() - self._since)
            self._since = None

    def _on_silence(self, why: str) -> None:
        now = time.monotonic()
        if self._since is None:
            self._since, self._warned, self._told = now, now, set()
        is_new = why not in self._told and len(self._told) < _REASONS
        if is_new or now - self._warned >= limits.REPLICA_WARNING_S:
            self._warned = now
            self._told.add(why)
            log.warning("replica %s: no answer for %.0f s: %s; tried again", self._log.name, now - self._since, why)
        if self._stop.wait(min(limits.REPLICA_RETRY_S, 0.05 + (now - self._since) / 4)):
            raise Stopped


@attrs.frozen
class Primary:
    """The owner of a log, and what its store has to know."""

    log: ReplicatedLog
    writer: Writer
    state: ReplicaState


def become_primary(replicated: ReplicatedLog, path: str, address: str, stop: threading.Event | None = None) -> Primary:
    """Take over with the store at that path, which is made where there is none. Raises BadReplica, BadStore, NoAnswer,
    Stopped."""
    for _ in range(_ATTEMPTS):
        store = following.store_of(replicated)
        if store is None:
            primary = _begin_log(replicated, path, address, stop)
        else:
            primary = take_over(following.open_follower(replicated, path, store), replicated, address, stop)
        if primary is not None:
            return primary
    raise BadReplica(f"{replicated.name}: not taken over: other servers did (expected one without --standby)")


def take_over(
    follower: Follower, replicated: ReplicatedLog, address: str, stop: threading.Event | None = None
) -> Primary | None:
    """Read to the end of the log and take over; None where another server did. The follower is closed."""
    try:
        follower.catch_up()
        _check_ends(follower)
        writer = Writer(attrs.evolve(follower.reader.position), _store_of(follower), uuid.uuid4())
        return _append_takeover(replicated, follower.path, writer, follower.state, address, stop)
    except Diverged as why:
        follower.close()
        following.discard(follower.path, why, primary=follower.state.primary)
        return None
    finally:
        follower.close()


def _store_of(follower: Follower) -> uuid.UUID:
    assert follower.state.position.store is not None
    return follower.state.position.store


def _check_ends(follower: Follower) -> None:
    """Raises Diverged where a disk has not what the log has; or where a standby has more, and another server took over
    since: that is another history. Without that the engine lost what it has, which is appended again."""
    found = follower.store.positions()
    for group in found.keys() | follower.state.have.keys():
        here, there = found.get(group, (0, 0)), follower.state.have.get(group, (0, 0))
        if here[0] < there[0] or (here > there and not follower.state.primary and follower.takeovers):
            raise Diverged(f"group {group} ends at {here}, in the log at {there}")


def _append_takeover(
    replicated: ReplicatedLog,
    path: str,
    writer: Writer,
    found: ReplicaState,
    address: str,
    stop: threading.Event | None,
) -> Primary | None:
    found.add_run(writer.run)
    state.write(path, found)  # first: a start has to know that this takeover is its own
    writer.take_over(address, time.time_ns())
    try:
        Driver(replicated, writer, stop).finish()
    except Fenced:
        return None
    ahead_s = (found.position.time_ns - time.time_ns()) / 1e9
    if ahead_s > _CLOCK_S:
        words = "this clock or that of the primary before is wrong, and --until @TIME goes by them"
        log.warning("replica %s: its last frame is of %.0f s from now: %s", replicated.name, ahead_s, words)
    found.position, found.primary = attrs.evolve(writer.position), True
    state.write(path, found)
    return Primary(replicated, writer, found)


def _begin_log(replicated: ReplicatedLog, path: str, address: str, stop: threading.Event | None) -> Primary | None:
    """Begin a log with what the store has: its older segments as a checkpoint. The newest of each group come as
    frames. The checkpoint is first: a log that has begun and lacks it would be followed, and taken over, without what
    the store has."""
    is_new = not os.path.exists(f"{path}/mqfs")
    number = uuid.uuid4() if is_new else uuid.UUID(read_label(Disk(), path)[0])
    holder = StandbyStore(path, str(number))
    try:
        before = _state_before_the_log(replicated, path)
        have = {group: (first, 0) for group, (first, _) in holder.positions().items()}
        position = Position(store=number, time_ns=time.time_ns())
        if have:
            log.info("replica %s: the store is copied", replicated.name)
            position = Checkpointer(replicated, path, stop).make(position, have).position
        found = ReplicaState(position, have, before.runs if before is not None else [], True)
        writer = Writer(attrs.evolve(position), number, uuid.uuid4())
        return _append_takeover(replicated, path, writer, found, address, stop)
    finally:
        holder.close()


def _state_before_the_log(replicated: ReplicatedLog, path: str) -> ReplicaState | None:
    """The state of a store whose log is empty. Raises BadReplica where the log was not."""
    before = state.read(path)
    if before is not None and before.position.number:
        expected = f"expected the log, or {path}/{state.NAME} moved away to begin again"
        raise BadReplica(f"{replicated.name}: empty, but had frame {before.position.number} ({expected})")
    return before


# ------------------------------------------------------------ standby


class Hearing:
    """What a standby hears of the primary's time: when the newest bytes were written, and whether its clock is far off.

        log        m1 | beat | beat | m2 | beat            beats are frames without bytes
        read       ........... at the end | m2 | beat      m2 is read when it is written: then this machine's clock
        or         ................ at the end | beat      m2 is older: by the primary's clock until the beat

    Durations go by that after a takeover.
    """

    def __init__(self, name: str) -> None:
        """`name`: of the log."""
        self.newest: Heard | None = None  # the last bytes; None: no frame was heard when it was appended
        self._name = name
        self._exact = False  # they were read when they were appended
        self._is_live = False  # the end of the log was seen: what comes is new
        self._at_ns = 0  # of the last step
        self._told: object = None  # of which primary's clock a line of the log was

    def begin(self) -> None:
        """The log is read on after a pause."""
        self._is_live = False

    def step(self, at: Position, count: int, *, written: bool, is_end: Callable[[], bool]) -> None:
        """One look at the log was made. `at`: after the last frame; `count`: of its frames; `written`: whether they
        had bytes; `is_end`: whether there is no later frame. Raises what that raises."""
        now, before = time.clock_gettime_ns(time.CLOCK_BOOTTIME), self._at_ns
        self._at_ns = now
        if self._is_live and count:
            if written or not self._exact:
                self.newest, self._exact = Heard(now, 0 if written else at.time_ns), True
            self._compare(at, (now - before) / 1e9, is_end)
        elif written:
            self.newest, self._exact = Heard(now) if self.newest is not None else None, False
        self._is_live = self._is_live or not count or is_end()

    def _compare(self, at: Position, waited_s: float, is_end: Callable[[], bool]) -> None:
        """A frame may be as old as the look before."""
        ahead_s = (at.time_ns - time.time_ns()) / 1e9
        if not -_CLOCK_S - waited_s < ahead_s < _CLOCK_S and self._told != (at.epoch, at.own) and is_end():
            self._told = at.epoch, at.own
            words = f"{abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} this server's"
            log.warning("replica %s: the primary's clock is %s: one is wrong, or one was before", self._name, words)


class Standby:
    """Follows the log until it is to take over: the primary is silent, or `promote` was called. One thread runs it."""

    def __init__(self, replicated: ReplicatedLog, path: str, address: str, failover_s: float) -> None:
        self._log, self._path, self._address, self._failover_s = replicated, path, address, failover_s
        where = f"{socket.gethostname()}:{os.path.realpath(path)}"
        self._name = uuid.uuid5(uuid.NAMESPACE_URL, where).hex[:16]  # the same at its next start
        self._promoted, self._stop = threading.Event(), threading.Event()
        self._silent_s = 0.0  # so long no frame came, while the engine answered
        self._answered = time.monotonic()  # when it did last
        self._heard: tuple[object, int] = (None, -1)  # whose frame came last, and its number
        self.hearing = Hearing(replicated.name)
        self._copied_at = -1  # number of the frame at which the store was set aside
        self.primary = ""  # its address

    def promote(self) -> None:
        """Take over as soon as all is read, whether the primary is silent or not."""
        self._promoted.set()

    def stop(self) -> None:
        self._stop.set()

    def run(self) -> Primary | None:
        """Follow, and take over; None: stopped. Raises BadReplica, BadStore and errors of the store."""
        while not self._stop.is_set():
            try:
                if (primary := self._follow()) is not None:
                    return primary
            except NoAnswer as error:
                log.warning("replica %s: no answer: %s; tried again until it answers", self._log.name, error)
                self._stop.wait(limits.REPLICA_RETRY_S / 2)
                if time.monotonic() - self._answered < self._failover_s / 2:
                    continue  # a short one: else an engine that fails now and then delays a takeover for ever
            except Stopped:
                break
            self._silent_s = 0.0
        return None

    def _follow(self) -> Primary | None:
        store = following.store_of(self._log)
        if store is None:
            if self._promoted.is_set():
                return become_primary(self._log, self._path, self._address, self._stop)
            _state_before_the_log(self._log, self._path)
            self._stop.wait(1.0)  # the primary has not begun
            return None
        follower = following.open_follower(self._log, self._path, store)
        self._answered = time.monotonic()
        self.hearing.begin()
        try:
            while not self._is_due() and not self._stop.is_set():
                self._step(follower)
            follower.note()
            return None if self._stop.is_set() else self._take_over(follower)
        except Diverged as why:
            self._discard(follower, why)
            return None
        finally:
            follower.close()

    def _is_due(self) -> bool:
        return self._promoted.is_set() or self._silent_s > self._failover_s

    def _step(self, follower: Follower) -> None:
        began, wait_s = time.monotonic(), min(1.0, self._failover_s / 4)
        try:
            count = follower.step(wait_s)
            end = follower.reader.position.number
            self.hearing.step(
                follower.state.position, count, written=follower.written, is_end=lambda: self._log.newest(end) is None
            )
        except NoAnswer:  # until now it did answer, at most for so long
            self._silent_s += min(time.monotonic() - began, wait_s)
            raise
        self._answered = time.monotonic()
        at = follower.state.position
        primary = at.epoch, at.own, at.address
        if primary != self._heard[0] or at.number > self._heard[1]:  # others were read before an error
            self._silent_s, self._heard = 0.0, (primary, at.number)
        else:
            self._silent_s += self._answered - began
        self._log.report(self._name, Report(at.number, at.crc))  # also again: the one before may be lost
        if follower.state.position.address != self.primary:
            self.primary = follower.state.position.address
            log.info("standby of %s, whose primary is %s", self._log.name, self.primary or "unnamed")

    def _take_over(self, follower: Follower) -> Primary | None:
        why = "promoted" if self._promoted.is_set() else f"no frame for {self._failover_s:g} s"
        log.warning("replica %s: %s: taking over", self._log.name, why)
        self._silent_s = 0.0  # without an answer it is looked at again whether the primary is there
        had = dict(follower.state.have)
        follower.catch_up()
        if follower.state.have != had:
            self.hearing.step(follower.state.position, 1, written=True, is_end=lambda: True)
        return take_over(follower, self._log, self._address, self._stop)

    def _discard(self, follower: Follower, why: Diverged) -> None:
        """Copy again; where that ends at the same frame, a person has to look."""
        at = follower.state.position.number
        follower.close()
        if at == self._copied_at:
            raise BadReplica(f"{self._log.name}: cannot be followed after frame {at}: {why}")
        self._copied_at = at
        following.discard(self._path, why, primary=follower.state.primary)


Post = Callable[[Callable[[], None]], None]
