"""Becoming the primary: by a start, by a standby that takes over, by `mqfs promote`.

    log empty                the store's older segments become a checkpoint, which the takeover names; its newest ones
                             frames
    log ahead of the disk    after a power cut: frames are fetched and applied, then it takes over
    disk ahead of the log    and no other server took over since: the rest is appended
    fenced since             where the disk has what the log has not: set aside in quarantine/, copied again

All of them end with one conditional append, the takeover. A server whose takeover is refused reads further and tries
again, or decides again if another server took over. `mqfs promote` has the primary append it; only if the primary does
not, the standby takes over by force. The request is an object beside the log with the standby's next run:

    standby    notes the run in its state; writes the object now and then, each time with another count
    primary    looks every two seconds; takes no more writes, copies the rest, and appends the takeover of that run
    standby    reads that takeover as any other frame: it is the primary

The log alone decides: without that takeover the primary continues to serve, with it the standby must serve, whatever
became of the command. A request counts only for the epoch that it names, and only if it appeared between two looks: an
old one is ignored.
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
    """A request of the standby at that address to the owner whose takeover is frame `own`. `count` differs in each
    request."""

    own: int
    run: uuid.UUID
    address: str
    count: int


def write_request(objects: Objects, request: HandoverRequest) -> None:
    """Write a request, in place of an earlier one. Raises NoAnswer, BadReplica."""
    text = {**attrs.asdict(request), "run": str(request.run)}
    objects.put(_NAME, json.dumps(text).encode())


def read_request(objects: Objects) -> HandoverRequest | None:
    """Return the newest request; None if there is none. Raises NoAnswer, BadReplica."""
    try:
        found = json.loads(objects.get(_NAME) or b"")
        own, run, count = int(found["own"]), uuid.UUID(found["run"]), int(found["count"])
        return HandoverRequest(own, run, str(found["address"]), count)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def remove_request(objects: Objects) -> None:
    """Remove the request. Raises NoAnswer, BadReplica."""
    objects.delete(_NAME)


# ------------------------------------------------------------ the takeover


log = logging.getLogger("mqfs.replica")
_ATTEMPTS = 16  # to take over while others do
_NEAR = 32  # frames before the end of the log from which on a standby asks, or appends
_ASK_S = 5.0  # between two requests to hand over: longer than a primary takes to read one
_BEATS = 3  # without a frame, until the primary counts as silent
_REASONS = 10  # different reasons for no answer that are logged at once
_CLOCK_S = 10.0  # difference of two servers' clocks above which a line is logged


class Driver:
    """Carries out a writer's requests on one thread, until each is answered, however long that takes."""

    def __init__(self, replicated: ReplicatedLog, writer: Writer, stop: threading.Event | None = None) -> None:
        self._log, self.writer = replicated, writer
        self._stop = stop or threading.Event()
        self._since: float | None = None  # when the engine ceased to answer
        self._warned = 0.0  # when a line of the log said so
        self._told: set[str] = set()  # the reasons logged so far: a new one is logged at once

    @property
    def silent_s(self) -> float:
        """Seconds since the engine stopped answering; 0: it answers."""
        since = self._since
        return time.monotonic() - since if since is not None else 0.0

    def finish(self) -> None:
        """Carry out requests until the writer is idle. Raises Fenced, Stopped."""
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
    """The owner of a log, with the state of its store."""

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
    """Take over with the store at that path, which is made if it does not exist. `run`: of the takeover; None: a new
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
    """Read to the end of the log and take over; None if another server did. The follower is closed. A primary that
    still appends may cause many refusals: its frames are read, and as little as possible is done between two
    attempts."""
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
    """Record a run before its takeover may be in the log: a start must recognize it as this store's own."""
    if run not in follower.state.runs:
        follower.state.add_run(run)
        follower.note()


def _store_of(follower: Follower) -> uuid.UUID:
    assert follower.state.position.store is not None
    return follower.state.position.store


def check_ends(follower: Follower) -> None:
    """Raise Diverged if a disk does not have all that the log has. Raise it too if a standby has more, and another
    server took over since: that is another history. Without such a takeover the engine lost the rest, which is appended
    again."""
    for group, here, there in follower.ends():
        if here[0] < there[0] or (here > there and not follower.state.primary and follower.takeovers):
            raise Diverged(f"group {group} ends at {here}, in the log at {there}")


def _append_takeover(replicated: ReplicatedLog, writer: Writer, address: str, stop: threading.Event | None) -> bool:
    """Append the takeover. Returns False if another frame was appended. Raises Stopped: the takeover may still
    arrive."""
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
    """Return the primary whose takeover is at the position of `writer`. This disk has all that the log has before
    it."""
    found.position, found.primary = attrs.evolve(writer.position), True
    state.write(path, found)
    return Primary(replicated, writer, found)


def _begin_log(
    replicated: ReplicatedLog, path: str, address: str, run: uuid.UUID, stop: threading.Event | None
) -> Primary | None:
    """Begin a log with the contents of a store: the older segments as a checkpoint, the newest of each group as frames.
    The checkpoint is first: a log that has begun and lacks it would be followed, and taken over, without the store's
    contents."""
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
    """Return the state of a store whose log is empty. Raises BadReplica if the log was not empty before."""
    before = state.read(path)
    if before is not None and before.position.number:
        expected = f"expected the log, or {path}/{state.NAME} moved away to begin again"
        raise BadReplica(f"{replicated.name}: empty, but had frame {before.position.number} ({expected})")
    return before


# ------------------------------------------------------------ standby


class Hearing:
    """A standby's knowledge of the primary's time: when the newest bytes were written, and whether its clock is off.

        log        m1 | beat | beat | m2 | beat            beats are frames without bytes
        read       ........... at the end | m2 | beat      m2 is read when it is written: then this machine's clock
        or         ................ at the end | beat      m2 is older: by the primary's clock until the beat

    Durations after a takeover are computed from it.
    """

    def __init__(self, name: str) -> None:
        """`name`: the name of the log."""
        self.newest: Heard | None = None  # the last bytes; None: no frame was read when it was appended
        self._name = name
        self._exact = False  # whether they were read when they were appended
        self._is_live = False  # the end of the log was seen: further frames are new
        self._at_ns = 0  # time of the last step
        self._told: object = None  # the primary whose clock was logged last

    def begin(self) -> None:
        """Begin to read the log again after a pause."""
        self._is_live = False

    def step(self, at: Position, count: int, *, written: bool, is_end: Callable[[], bool]) -> None:
        """Record one look at the log. `at`: the position after the last frame; `count`: of frames read; `written`:
        whether they had bytes; `is_end`: tells whether there is no later frame. Raises what `is_end` raises."""
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
        """Log a clock that is far off; a frame may be as old as the look before."""
        ahead_s = (at.time_ns - time.time_ns()) / 1e9
        if not -_CLOCK_S - waited_s < ahead_s < _CLOCK_S and self._told != (at.epoch, at.own) and is_end():
            self._told = at.epoch, at.own
            words = f"{abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} this server's"
            log.warning("replica %s: the primary's clock is %s: one is wrong, or one was before", self._name, words)


class Standby:
    """Follows the log until it must take over: the primary is silent, or `promote` was called. One thread runs it;
    `promote`, `withdraw` and `stop` are called by other threads."""

    def __init__(self, replicated: ReplicatedLog, path: str, address: str, failover_s: float) -> None:
        self._log, self._path, self._address, self._failover_s = replicated, path, address, failover_s
        where = f"{socket.gethostname()}:{os.path.realpath(path)}"
        self._name = uuid.uuid5(uuid.NAMESPACE_URL, where).hex[:16]  # the same after a restart
        self._run = uuid.uuid4()  # of its takeover, whoever appends that
        self._stop = threading.Event()
        self._unwanted = threading.Event()  # no command waits for a takeover
        self._unwanted.set()
        self._handover_s = 0.0  # how long the primary may take to hand over
        self._asked: tuple[int, float] | None = None  # which owner was asked, and since when
        self._requests, self._requested = 0, 0.0  # number of requests, and when the newest was written
        self._owner = 0, False  # number of the newest takeover, and whether it is of `_run`
        self._silent_s = 0.0  # how long no frame came while the engine answered
        self._answered = time.monotonic()  # when the engine answered last
        self._heard: tuple[object, int] = (None, -1)  # the primary of the last frame, and the frame's number
        self.hearing = Hearing(replicated.name)
        self._copied_at = -1  # number of the frame at which the store was copied again
        self.forced = ""  # why the primary did not hand over; "": it did, or was not asked
        self.primary = ""  # the primary's address

    def promote(self, handover_s: float = limits.REPLICA_HANDOVER_S) -> None:
        """Take over, whether the primary is silent or not: ask it to hand over as soon as all is read. If it is silent,
        or takes longer than `handover_s` seconds, take over by force."""
        self._handover_s = handover_s
        self._unwanted.clear()

    def withdraw(self) -> None:
        """Cancel `promote`, unless the takeover is in the log."""
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
                self._asked = None  # the engine does not answer the primary either
                log.warning("replica %s: no answer: %s; tried again until it answers", self._log.name, error)
                self._stop.wait(limits.REPLICA_RETRY_S / 2)
                if time.monotonic() - self._answered < self._failover_s / 2:
                    continue  # a short failure: an engine that fails now and then must not delay a takeover for ever
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
        """Whether the newest takeover is of this run, and no frame is above it."""
        at = follower.state.position
        if at.own != self._owner[0] and (data := self._log.get(at.own)) is not None:
            owner = decode(data).owner
            self._owner = at.own, owner is not None and owner.run == self._run
        return self._owner == (at.own, True) and self._log.newest(at.number) is None

    def _accept(self, follower: Follower) -> Primary:
        with contextlib.suppress(NoAnswer, BadReplica):
            remove_request(self._log.objects)  # a remaining request changes nothing
        writer = Writer(attrs.evolve(follower.state.position), _store_of(follower), self._run)
        writer.accept()
        log.warning("replica %s: %s: primary", self._log.name, self.forced or "the primary handed over")
        return _owner(self._log, self._path, writer, follower.state)

    def _reason(self) -> str:
        """Return why to take over by force now; "": there is no reason."""
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
        """Ask the primary to hand over, if that is wanted and all is read; remove the request if it is not wanted any
        more."""
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
            )  # not `newest`, which lists all retained frames: a standby that is behind would do so at each frame
        except NoAnswer:  # the engine answered until now, at most for so long
            self._silent_s += min(time.monotonic() - began, wait_s)
            raise
        self._answered = time.monotonic()
        at = follower.state.position
        primary = at.epoch, at.own, at.address
        if primary != self._heard[0] or at.number > self._heard[1]:  # the frames before were read before an error
            self._silent_s, self._heard = 0.0, (primary, at.number)
        else:
            self._silent_s += self._answered - began
        self._log.report(self._name, Report(at.number, at.crc))  # also repeated: the report before may be lost
        if follower.state.position.address != self.primary:
            self.primary = follower.state.position.address
            log.info("standby of %s, whose primary is %s", self._log.name, self.primary or "unnamed")

    def _take_over(self, follower: Follower, reason: str) -> Primary | None:
        log.warning("replica %s: %s: taking over", self._log.name, reason)
        stop = self._stop if self._silent_s > self._failover_s else self._unwanted
        self._silent_s = 0.0  # without an answer the primary's silence is measured again
        self.forced, had = reason, dict(follower.state.have)
        primary = take_over(follower, self._log, self._address, self._run, stop)
        if primary is not None and primary.state.have != had:
            self.hearing.step(primary.state.position, 1, written=True, is_end=lambda: True)
        return primary

    def _discard(self, follower: Follower, why: Diverged) -> None:
        """Copy the store again; if that ends at the same frame, raise BadReplica: a person has to look."""
        at = follower.state.position.number
        follower.close()
        if at == self._copied_at:
            raise BadReplica(f"{self._log.name}: cannot be followed after frame {at}: {why}")
        self._copied_at = at
        following.discard(self._path, why, primary=follower.state.primary)
