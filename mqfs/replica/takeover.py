"""Becoming the primary: by a start, by a standby that takes over, by `mqfs promote`.

    log empty                the store's older segments become a checkpoint, which the takeover names; its newest ones
                             frames
    log ahead of the disk    after a power cut: frames are fetched and applied, then it takes over
    disk ahead of the log    and no other server took over since: the rest is appended
    fenced since             where the disk has what the log has not: set aside in quarantine/, copied again

All of them end with one conditional append, the takeover. Whoever it is refused to reads on and tries again, or
decides again where another server took over. `mqfs promote` has the primary append it, and only where that does not do
so is it taken by force. It asks by an object beside the log, in which a standby writes its next run:

    standby    notes the run in its state; writes the object now and then, each time with another count
    primary    looks every two seconds; takes no more writes, copies the rest, and appends the takeover of that run
    standby    reads that takeover as any other frame: it is the primary

The log alone decides: without that takeover the primary serves on, with it the standby is to serve, whatever became of
the command. A request counts for the epoch that it names, and only if it came between two looks: one that was left
there is none.
"""

from __future__ import annotations

import contextlib
import json
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
from mqfs.replica.frame import decode
from mqfs.replica.log import (
    Append,
    Fenced,
    Look,
    NoAnswer,
    Objects,
    Position,
    Refused,
    ReplicatedLog,
    Report,
    Stopped,
    Writer,
)
from mqfs.replica.state import ReplicaState
from mqfs.store.disk import Disk
from mqfs.store.standby import StandbyStore
from mqfs.store.store import read_label

_NAME = "handover"


@attrs.frozen
class HandoverRequest:
    """The standby at that address asks the owner whose takeover is frame `own`. `count` is another one each time."""

    own: int
    run: uuid.UUID
    address: str
    count: int


def write_request(objects: Objects, request: HandoverRequest) -> None:
    """Ask, in the place of who asked before. Raises NoAnswer, BadReplica."""
    text = {**attrs.asdict(request), "run": str(request.run)}
    objects.put(_NAME, json.dumps(text).encode())


def read_request(objects: Objects) -> HandoverRequest | None:
    """The newest request; None where there is none. Raises NoAnswer, BadReplica."""
    try:
        found = json.loads(objects.get(_NAME) or b"")
        own, run, count = int(found["own"]), uuid.UUID(found["run"]), int(found["count"])
        return HandoverRequest(own, run, str(found["address"]), count)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def remove_request(objects: Objects) -> None:
    """Nobody asks any more. Raises NoAnswer, BadReplica."""
    objects.delete(_NAME)


# ------------------------------------------------------------ the takeover


log = logging.getLogger("mqfs.replica")
_ATTEMPTS = 16  # to take over while others do
_NEAR = 32  # frames before the end of the log from which on a standby asks, or appends
_ASK_S = 5.0  # between two requests to hand over: more than a primary takes to read one
_BEATS = 3  # without a frame, before the primary counts as away
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


def become_primary(
    replicated: ReplicatedLog,
    path: str,
    address: str,
    stop: threading.Event | None = None,
    run: uuid.UUID | None = None,
) -> Primary:
    """Take over with the store at that path, which is made where there is none. `run`: of the takeover; None: a new
    one. Raises BadReplica, BadStore, NoAnswer, Stopped."""
    run = run or uuid.uuid4()
    for _ in range(_ATTEMPTS):
        store = following.store_of(replicated)
        if store is None:
            primary = _begin_log(replicated, path, address, run, stop)
        else:
            primary = take_over(following.open_follower(replicated, path, store), replicated, address, run, stop)
        if primary is not None:
            return primary
    raise BadReplica(f"{replicated.name}: not taken over: other servers did (expected one without --standby)")


def take_over(
    follower: Follower, replicated: ReplicatedLog, address: str, run: uuid.UUID, stop: threading.Event | None = None
) -> Primary | None:
    """Read to the end of the log and take over; None where another server did. The follower is closed. A primary that
    still appends may refuse it many times: what it appended is read, and no more is done between two attempts."""
    try:
        follower.catch_up(_NEAR)
        check_ends(follower)
        expect_run(follower, run)
        before = len(follower.takeovers)
        while len(follower.takeovers) == before:
            if stop is not None and stop.is_set():
                raise Stopped
            if follower.follow_next():
                continue
            writer = Writer(attrs.evolve(follower.reader.position), _store_of(follower), run)
            if _append_takeover(replicated, writer, address, stop):
                follower.sync()
                return _owner(replicated, follower.path, writer, follower.state)
        return None
    except Diverged as why:
        follower.close()
        following.discard(follower.path, why, primary=follower.state.primary)
        return None
    finally:
        follower.close()


def expect_run(follower: Follower, run: uuid.UUID) -> None:
    """Note a run before a takeover of it may be in the log: a start has to know that it is this store's own."""
    if run not in follower.state.runs:
        follower.state.add_run(run)
        follower.note()


def _store_of(follower: Follower) -> uuid.UUID:
    assert follower.state.position.store is not None
    return follower.state.position.store


def check_ends(follower: Follower) -> None:
    """Raises Diverged where a disk has not what the log has; or where a standby has more, and another server took over
    since: that is another history. Without that the engine lost what it has, which is appended again."""
    for group, here, there in follower.ends():
        if here[0] < there[0] or (here > there and not follower.state.primary and follower.takeovers):
            raise Diverged(f"group {group} ends at {here}, in the log at {there}")


def _append_takeover(replicated: ReplicatedLog, writer: Writer, address: str, stop: threading.Event | None) -> bool:
    """Whether it was appended: False where another frame was. Raises Stopped: it may come late."""
    before_ns = writer.position.time_ns
    writer.take_over(address, time.time_ns())
    try:
        Driver(replicated, writer, stop).finish()
    except Fenced:
        return False
    ahead_s = (before_ns - time.time_ns()) / 1e9
    if ahead_s > _CLOCK_S:
        words = "this clock or that of the primary before is wrong, and --until @TIME goes by them"
        log.warning("replica %s: its last frame is of %.0f s from now: %s", replicated.name, ahead_s, words)
    return True


def _owner(replicated: ReplicatedLog, path: str, writer: Writer, found: ReplicaState) -> Primary:
    """The server whose takeover is at the position of `writer`. What the log has before it is on disk."""
    found.position, found.primary = attrs.evolve(writer.position), True
    state.write(path, found)
    return Primary(replicated, writer, found)


def _begin_log(
    replicated: ReplicatedLog, path: str, address: str, run: uuid.UUID, stop: threading.Event | None
) -> Primary | None:
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
        found.add_run(run)
        state.write(path, found)  # first: as in `take_over`
        writer = Writer(attrs.evolve(position), number, run)
        if not _append_takeover(replicated, writer, address, stop):
            return None
        return _owner(replicated, path, writer, found)
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
    """Follows the log until it is to take over: the primary is silent, or `promote` was called. One thread runs it;
    `promote`, `withdraw` and `stop` are called by others."""

    def __init__(self, replicated: ReplicatedLog, path: str, address: str, failover_s: float) -> None:
        self._log, self._path, self._address, self._failover_s = replicated, path, address, failover_s
        where = f"{socket.gethostname()}:{os.path.realpath(path)}"
        self._name = uuid.uuid5(uuid.NAMESPACE_URL, where).hex[:16]  # the same at its next start
        self._run = uuid.uuid4()  # of its takeover, however that comes into the log
        self._stop = threading.Event()
        self._unwanted = threading.Event()  # no command waits for a takeover
        self._unwanted.set()
        self._handover_s = 0.0  # so long the primary may take to hand over
        self._asked: tuple[int, float] | None = None  # which owner, and since when
        self._requests, self._requested = 0, 0.0  # how many, and when the newest was
        self._owner = 0, False  # number of the newest takeover, and whether it is that of `_run`
        self._silent_s = 0.0  # so long no frame came, while the engine answered
        self._answered = time.monotonic()  # when it did last
        self._heard: tuple[object, int] = (None, -1)  # whose frame came last, and its number
        self.hearing = Hearing(replicated.name)
        self._copied_at = -1  # number of the frame at which the store was set aside
        self.forced = ""  # why the primary did not hand over; "": it did, or was not asked
        self.primary = ""  # its address

    def promote(self, handover_s: float = limits.REPLICA_HANDOVER_S) -> None:
        """Take over, whether the primary is silent or not: ask it to hand over as soon as all is read. Where it is
        away, or takes longer than `handover_s` seconds, take over by force."""
        self._handover_s = handover_s
        self._unwanted.clear()

    def withdraw(self) -> None:
        """As if `promote` had not been called, unless the takeover is in the log."""
        self._unwanted.set()

    def stop(self) -> None:
        self._stop.set()
        self._unwanted.set()

    def run(self) -> Primary | None:
        """Follow, and take over; None: stopped. Raises BadReplica, BadStore and errors of the store."""
        while not self._stop.is_set():
            try:
                if (primary := self._follow()) is not None:
                    return primary
            except NoAnswer as error:
                self._asked = None  # nor does it answer the primary
                log.warning("replica %s: no answer: %s; tried again until it answers", self._log.name, error)
                self._stop.wait(limits.REPLICA_RETRY_S / 2)
                if time.monotonic() - self._answered < self._failover_s / 2:
                    continue  # a short one: else an engine that fails now and then delays a takeover for ever
            except Stopped:
                pass  # or the takeover is not wanted any more
            self._silent_s = 0.0
        return None

    def _follow(self) -> Primary | None:
        store = following.store_of(self._log)
        if store is None:
            if not self._unwanted.is_set():
                return become_primary(self._log, self._path, self._address, self._unwanted, self._run)
            _state_before_the_log(self._log, self._path)
            self._stop.wait(1.0)  # the primary has not begun
            return None
        follower = following.open_follower(self._log, self._path, store)
        self._answered = time.monotonic()
        self.hearing.begin()
        try:
            while not self._stop.is_set():
                if self._is_owner(follower):
                    return self._accept(follower)
                if reason := self._reason():
                    return self._take_over(follower, reason)
                self._ask(follower)
                self._step(follower)
            follower.note()
            self._unwanted.set()
            self._ask(follower)
            return None
        except Diverged as why:
            self._discard(follower, why)
            return None
        finally:
            follower.close()

    def _is_owner(self, follower: Follower) -> bool:
        """Whether the newest takeover is of this run, and nothing is above it."""
        at = follower.state.position
        if at.own != self._owner[0] and (data := self._log.get(at.own)) is not None:
            owner = decode(data).owner
            self._owner = at.own, owner is not None and owner.run == self._run
        return self._owner == (at.own, True) and self._log.newest(at.number) is None

    def _accept(self, follower: Follower) -> Primary:
        with contextlib.suppress(NoAnswer, BadReplica):
            remove_request(self._log.objects)  # one that stays changes nothing
        writer = Writer(attrs.evolve(follower.state.position), _store_of(follower), self._run)
        writer.accept()
        log.warning("replica %s: %s: primary", self._log.name, self.forced or "the primary handed over")
        return _owner(self._log, self._path, writer, follower.state)

    def _reason(self) -> str:
        """Why to take over by force now; "": not."""
        if self._silent_s > self._failover_s:
            return f"no frame for {self._failover_s:g} s"
        if self._unwanted.is_set():
            return ""
        if self._silent_s > _BEATS * limits.REPLICA_BEAT_S:
            return f"promoted, and no frame of the primary for {self._silent_s:.0f} s"
        if not self._handover_s or (self._asked and time.monotonic() - self._asked[1] > self._handover_s):
            return f"promoted, and the primary did not hand over in {self._handover_s:g} s"
        return ""

    def _ask(self, follower: Follower) -> None:
        """Ask the primary to hand over, where that is wanted and all is read; or no more, where it is not any more."""
        now, own = time.monotonic(), follower.state.position.own
        if self._unwanted.is_set():
            if self._requested:
                remove_request(self._log.objects)
                log.warning("replica %s: mqfs promote ended early: the primary is not asked any more", self._log.name)
                self._asked, self._requested = None, 0.0
            return
        if self._asked is None or self._asked[0] != own:
            if self._log.get(follower.reader.position.number + _NEAR) is not None:
                return
            check_ends(follower)
            expect_run(follower, self._run)
            self._asked, self.forced = (own, now), ""
        if now - self._requested > _ASK_S:
            self._requests, self._requested = self._requests + 1, now
            write_request(self._log.objects, HandoverRequest(own, self._run, self._address, self._requests))

    def _step(self, follower: Follower) -> None:
        began, wait_s = time.monotonic(), min(1.0 if self._unwanted.is_set() else 0.1, self._failover_s / 4)
        try:
            count = follower.step(wait_s)
            end = follower.reader.position.number
            self.hearing.step(
                follower.state.position, count, written=follower.written, is_end=lambda: self._log.get(end + 1) is None
            )  # not `newest`, which lists all that is kept: while it is behind it would be so at each frame
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

    def _take_over(self, follower: Follower, reason: str) -> Primary | None:
        log.warning("replica %s: %s: taking over", self._log.name, reason)
        stop = self._stop if self._silent_s > self._failover_s else self._unwanted
        self._silent_s = 0.0  # without an answer it is looked at again whether the primary is there
        self.forced, had = reason, dict(follower.state.have)
        primary = take_over(follower, self._log, self._address, self._run, stop)
        if primary is not None and primary.state.have != had:
            self.hearing.step(primary.state.position, 1, written=True, is_end=lambda: True)
        return primary

    def _discard(self, follower: Follower, why: Diverged) -> None:
        """Copy again; where that ends at the same frame, a person has to look."""
        at = follower.state.position.number
        follower.close()
        if at == self._copied_at:
            raise BadReplica(f"{self._log.name}: cannot be followed after frame {at}: {why}")
        self._copied_at = at
        following.discard(self._path, why, primary=follower.state.primary)
