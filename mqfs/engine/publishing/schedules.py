"""Schedules: delayed messages that are published repeatedly (`.put` with `every` or `cron`).

A schedule is a delayed message with the header `every` or `cron`; no other record belongs to it:

    put       held 7 {id backup, cron 0 5 * * *, next 05:00}
    05:00     one atomic batch: message 8 {id backup@2026-03-01T05:00:00Z, held 7}  ·  held 9 {..., next 05:00
              tomorrow}  ·  the acknowledgement of held 7

After a crash the log has all of a run or nothing of it, so each run publishes once. Missed runs are published as one,
that of the first missed time; the next run is in the future. A run without room when it is due waits, as a delayed
message does, and the runs missed meanwhile are again one. The name of a schedule is the `id` of its message.

`every` is due on the engine clock, `cron` on the wall clock; `next` is a wall time for both. For `every` it is computed
from the first run, so that no two runs have the same time, whatever the wall clock does.

When the wall clock is set back, `cron` computes its next time again. If it is set back by up to three hours, no time
runs twice, as for cron(8). If it is set back by more, it had been wrong, and earlier runs do not count: else a run in a
wrong year would delay all others for a year.

    05:00     runs, next is 05:00 tomorrow     set back to 04:10: still tomorrow     to last week: 05:00 of that day
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs

from mqfs import errors, limits
from mqfs.engine.core.log import record_at
from mqfs.engine.core.timers import AGAIN_NS, ROUND_NS, SCHEDULES, Alarm
from mqfs.engine.language.put_request import Schedule, parse_shown, shown
from mqfs.engine.publishing.admission import Admission, request_of
from mqfs.model import Draft, Kind, Record, User
from mqfs.quotas import require_share
from mqfs.records import headers
from mqfs.state.group import PUT
from mqfs.syntax.duration import parse_duration

if TYPE_CHECKING:
    from mqfs.engine.group import Group
    from mqfs.engine.publishing.delayed import DelayedMessages
    from mqfs.engine.stream import Stream


@attrs.define(eq=False)
class NextRun:
    """The next run of a schedule. `sequence`: of its delayed message; `stream`: the number of its target."""

    name: str
    schedule: Schedule
    sequence: int
    stream: int
    uid: int  # the user who wrote it
    next_ns: int  # wall time
    due_ns: int  # engine time
    last_ns: int = 0  # wall time of the run before; 0: there was none, or it is not known
    size: int = -1  # bytes of its body; -1: not read yet
    head: bytes = b""  # headers of the message that the run publishes; set with `size`


class Schedules:
    """The schedules of a group."""

    def __init__(self, host: Group, held: DelayedMessages) -> None:
        self._host, self._held = host, held
        self._runs: dict[str, NextRun] = {}
        self._names: dict[int, str] = {}  # by the sequence of the delayed message
        self.waiting: dict[str, int] = {}  # by name of a due run that waits for room: engine time of the next try
        self._round_ns = 0  # engine time of the last retry of all waiting runs
        self._alarm = Alarm(host.timers, host, SCHEDULES, "running schedules", self._run_due)

    def __iter__(self) -> Iterator[NextRun]:
        return iter(list(self._runs.values()))

    def get(self, name: str) -> NextRun | None:
        return self._runs.get(name)

    # ------------------------------------------------------------ put

    def put(
        self, user: User, stream: Stream, body: bytes, texts: dict[str, str], schedule: Schedule, wait_ns: int | None
    ) -> tuple[int, bool]:
        """Make a schedule, or replace the one of its name. `wait_ns`: time to the first run of `every`; None: one
        period. Returns the sequence of its delayed message, and whether an identical schedule existed. Raises
        OverLimit, NotPermitted, and as DelayedMessages.put."""
        name, old = texts[headers.ID], self._runs.get(texts[headers.ID])
        texts = {**texts, **schedule.texts()}
        if old is not None:
            if user.uid not in (0, self._host.state.uid, old.uid):
                raise errors.NotPermitted(f"schedule {name!r}: another user's")
            if self._is_same(old, stream, body, texts):
                return old.sequence, True
        else:
            mine = sum(run.uid == user.uid for run in self._runs.values()) + 1
            require_share("schedules", limits.SCHEDULES, user.uid, mine, len(self._runs) + 1)
        run = self._first(name, schedule, stream.number, user.uid, wait_ns)
        taken = [old.sequence] if old is not None else []
        texts[headers.NEXT] = str(run.next_ns)
        run.sequence = self._held.put(stream, body, texts, run.due_ns, (), self._held.drop_steps(taken))
        self._held.dropped(taken)
        self._add(run)
        return run.sequence, False

    def _first(self, name: str, schedule: Schedule, stream: int, uid: int, wait_ns: int | None) -> NextRun:
        clock = self._host.clock
        wall, engine = clock.wall_ns(), clock.engine_ns()
        wait_ns = schedule.every if wait_ns is None else wait_ns
        next_ns = schedule.next_ns(wall) if schedule.cron else wall + wait_ns
        return NextRun(name, schedule, 0, stream, uid, next_ns, engine + next_ns - wall)

    def _is_same(self, old: NextRun, stream: Stream, body: bytes, texts: dict[str, str]) -> bool:
        record = self._held.record(old.sequence)
        if record is None or record.body != body or old.stream != stream.number:
            return False
        before = headers.decode(record.headers)
        return {key: before[key] for key in before.keys() - {headers.TO, headers.DUE, headers.NEXT}} == texts

    def load(self, sequence: int, texts: dict[str, str]) -> None:
        """Enter a schedule whose delayed message was found in the log."""
        schedule = Schedule(cron=texts.get(headers.CRON, ""))
        if headers.EVERY in texts:
            schedule = Schedule(every=parse_duration(texts[headers.EVERY]))
        next_ns, due_ns = int(texts[headers.NEXT]), int(texts[headers.DUE])
        uid = int(texts.get(headers.SENDER, "0"))
        name = texts[headers.ID]
        run = NextRun(name, schedule, sequence, int(texts[headers.TO]), uid, next_ns, due_ns)
        run.last_ns = self._last_ns(name, sequence) if schedule.cron else 0
        self._wait_by_wall(run)
        self._add(run)

    def _last_ns(self, name: str, sequence: int) -> int:
        """Return the wall time of the run before the delayed message `sequence`; 0: not known. That run's message is
        the one before it in the log, from the same batch."""
        record = record_at(self._host.log.stored.reader, sequence - 1)
        if record is None:
            return 0
        schedule, _, time = headers.decode(record.headers).get(headers.ID, "").rpartition("@")
        return parse_shown(time) if schedule == name else 0

    def _add(self, run: NextRun) -> None:
        self.waiting.pop(run.name, None)
        self._runs[run.name], self._names[run.sequence] = run, run.name
        self._alarm.at(run.due_ns)

    def removed(self, sequence: int) -> None:
        """Remove the schedule of a delayed message that was published or dropped, if it has one and no newer message
        replaced it."""
        name = self._names.pop(sequence, None)
        if name is not None and self._runs[name].sequence == sequence:
            del self._runs[name]
            self.waiting.pop(name, None)

    # ------------------------------------------------------------ run

    def on_clock_step(self) -> None:
        """Compute the engine times of `cron` runs again after a step of the wall clock."""
        for run in self._runs.values():
            if self._wait_by_wall(run):
                self._alarm.at(run.due_ns)

    def _wait_by_wall(self, run: NextRun) -> bool:
        """Compute the engine time of a `cron` run, and an earlier wall time if the clock was set back. Whether the run
        is of `cron`."""
        clock = self._host.clock
        if run.schedule.cron:
            wall = clock.wall_ns()
            if run.next_ns > wall:
                run.next_ns = min(run.next_ns, _not_run_yet(run, wall))
            run.due_ns = clock.engine_ns() + max(run.next_ns - wall, 0)
        return bool(run.schedule.cron)

    def retry(self, now_ns: int) -> None:
        """Retry all waiting runs at once, as there may be room; at most every ROUND_NS."""
        if self.waiting and now_ns >= self._round_ns + ROUND_NS:
            self._round_ns = now_ns
            self.waiting = dict.fromkeys(self.waiting, now_ns)
            self._alarm.at(now_ns)

    def _run_due(self, now_ns: int) -> None:
        """Publish the runs that are due, in order, for at most SLICE_S at once."""
        clock = self._host.clock
        until = clock.engine_ns() + int(limits.SLICE_S * 1e9)
        for run in sorted(self._runs.values(), key=lambda run: (self._next_try_ns(run), run.sequence)):
            if self._next_try_ns(run) > now_ns or clock.engine_ns() >= until:
                break
            if self._wait_by_wall(run) and run.next_ns > clock.wall_ns():
                self.waiting.pop(run.name, None)
                continue  # the wall clock was set back; the new `due_ns` is later than `now_ns`
            if not self._publish(run):
                self._alarm.at(now_ns + AGAIN_NS)
                return
        if self._runs:
            self._alarm.at(max(min(map(self._next_try_ns, self._runs.values())), clock.engine_ns() + 1))

    def _next_try_ns(self, run: NextRun) -> int:
        return self.waiting.get(run.name, run.due_ns)

    def _publish(self, run: NextRun) -> bool:
        """Publish one run, or leave it waiting for room. False: the disk refused it, so it has to be retried."""
        host, held = self._host, self._held
        publisher, stream = host.publisher, host.numbers.get(run.stream)
        try:
            record = held.record(run.sequence) if run.size < 0 else None  # read once only to check for room
            if record is not None:
                run.size, run.head = len(record.body), _headers(run, record)
            verdict = self._admit(run, stream) if stream is not None and run.size >= 0 else Admission.DISCARD
            if verdict is Admission.WAIT:
                return True
            record = record or held.record(run.sequence)
            if record is None or stream is None:
                held.drop([run.sequence])  # its stream was removed, or it is damaged, which was reported
                return True
            following = self._following(run)
            waits = headers.decode(record.headers)
            waits |= {headers.NEXT: str(following.next_ns), headers.DUE: str(following.due_ns)}
            messages = [Draft(Kind.MESSAGE, stream.number, record.body, _headers(run, record))]
            if verdict is Admission.DISCARD:
                messages.clear()
            next_one = Draft(Kind.MESSAGE, PUT, record.body, headers.encode(waits))
            publisher.retention.reserve_room(len(next_one.body) + len(next_one.headers) + 40)
            made = host.log.append_batch([*messages, next_one], acks=held.drop_steps([run.sequence]))
        except (errors.MqfsError, OSError) as error:
            host.faults.report(host.number, f"schedule {run.name!r} is due and cannot be published: {error}")
            return False
        following.sequence = made + len(messages)
        held.replaced(run.sequence, following.sequence)
        self._add(following)
        if messages:
            publisher.deliver_all(stream, made, messages, len(record.body))
            publisher.retention.bound_depth(stream)
        held.end_reads(following.sequence)
        return True

    def _admit(self, run: NextRun, stream: Stream) -> Admission:
        """Admit a run as Publisher.admit_due does, but let it wait where a write is refused. Each waiting run gets one
        line in `.errors`."""
        user, why = User(run.uid, 0), f"stream {stream.name!r} is full"
        message = Draft(Kind.MESSAGE, stream.number, bytes(run.size), run.head)
        try:
            verdict = self._host.publisher.admit_due(stream, request_of(message), charged=False)
        except errors.TooLong as error:  # `depth` was changed since
            self._host.refuse(user, stream.name, f"run of schedule {run.name!r} dropped: {error}")
            return Admission.DISCARD
        except (errors.StreamFull, errors.OverQuota) as error:
            verdict, why = Admission.WAIT, str(error)
        if verdict is Admission.WAIT:
            if run.name not in self.waiting:
                self._host.refuse(user, stream.name, f"schedule {run.name!r} waits for room: {why}")
            self.waiting[run.name] = self._host.clock.engine_ns() + AGAIN_NS
        return verdict

    def _following(self, run: NextRun) -> NextRun:
        """Return the next run of the schedule after this one; it is in the future."""
        clock, schedule = self._host.clock, run.schedule
        run = attrs.evolve(run, size=-1, head=b"")
        if schedule.cron:
            wall = clock.wall_ns()
            next_ns = schedule.next_ns(max(wall, run.next_ns))
            return attrs.evolve(run, next_ns=next_ns, due_ns=clock.engine_ns() + next_ns - wall, last_ns=run.next_ns)
        later = ((clock.engine_ns() - run.due_ns) // schedule.every + 1) * schedule.every
        return attrs.evolve(run, next_ns=run.next_ns + later, due_ns=run.due_ns + later)


def _headers(run: NextRun, record: Record) -> bytes:
    """Return the headers of the message that a run publishes. `record`: the delayed message of the schedule."""
    texts = {key: text for key, text in headers.decode(record.headers).items() if key not in _OF_SCHEDULES}
    return headers.encode({**texts, headers.ID: f"{run.name}@{shown(run.next_ns)}", headers.HELD: str(run.sequence)})


def _not_run_yet(run: NextRun, wall_ns: int) -> int:
    """Return the first time of `cron` after that wall time at which it has not run; if none, the present `next_ns`."""
    try:
        next_ns = run.schedule.next_ns(wall_ns)
        if next_ns == run.last_ns or next_ns < run.last_ns <= wall_ns + _NEVER_TWICE_NS:
            next_ns = run.schedule.next_ns(run.last_ns)
    except errors.BadCommand:  # for example, its time zone is no longer installed
        return run.next_ns
    return next_ns


_NEVER_TWICE_NS = 3 * 3600 * 10**9  # most by which the wall clock may be set back without a time that runs twice
_OF_SCHEDULES = {headers.TO, headers.DUE, headers.EVERY, headers.CRON, headers.NEXT}
