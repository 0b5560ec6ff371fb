"""Worker: claims messages, runs commands, answers for each, and outlives the server.

Owns the loop, its signals and its pauses; it never spins and never holds a message it may not start. One thread: what
waits, waits in one poll(2).
"""

from __future__ import annotations

import errno
import os
import select
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import attrs

from mq_tools.errors import ToolError, close, note, reason
from mq_tools.work.consumer import Handle, Message, Place
from mq_tools.work.process import NOT_EXECUTABLE, NOT_FOUND, Busy, CannotRun, Outcome, Running, environment_of

PROGRAM = "mq-work"
_LOOK_S = 2.0  # how often a waiting worker reads though poll says nothing
_PAUSES_S = (0.05, 5.0)  # the first and the longest after an error
_AT_ONCE_S = 0.0005
_LAZY_S = 0.05  # how long to wait where poll says "readable" at once and the read "nothing", as without a real poll
_LATE_S = 0.05  # a start that was late by less lets the next come sooner


@attrs.frozen
class Wish:
    """What the command line asked for."""

    command: Sequence[str]
    parallel: int = 1
    count: int | None = None
    end: bool = False
    chatty: bool = False
    every_s: float | None = None
    timeout_s: float | None = None
    grace_s: float = 5.0


class Slot:
    """One of the commands that may run at a time, with its own open of the consumer."""

    def __init__(self) -> None:
        self.handle: Handle | None = None
        self.running: Running | None = None
        self.ended = False  # it has seen the end that was asked for

    @property
    def idle(self) -> bool:
        return self.running is None and not self.ended

    def drop(self) -> None:
        if self.handle is not None:
            self.handle.close()
        self.handle = None


class Worker:
    """The program behind the command line."""

    def __init__(self, place: Place, wish: Wish) -> None:
        self.place = place
        self.wish = wish
        self.slots = [Slot() for _ in range(wish.parallel)]
        self.left = wish.count
        self.next_start = 0.0
        self.try_at = 0.0  # no reading before
        self.pause_s = 0.0
        self.fruitless = 0
        self.trouble = ""  # why there is nothing to read from
        self.signals: list[int] = []
        self.code: int | None = None  # set once the worker takes no more
        self._wake, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> int:
        """Work until one of the ends; the exit code. Raises ToolError."""
        try:
            with self._watching_signals():
                self._open_all()
                while not self._over():
                    self._step()
                return self.code or 0
        finally:
            for slot in self.slots:
                if slot.running is not None:
                    slot.running.kill()
                slot.drop()
            close(self._wake)
            close(self._waker)

    @contextmanager
    def _watching_signals(self) -> Iterator[None]:
        watched = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
        before = {number: signal.getsignal(number) for number in [*watched, signal.SIGCHLD]}
        wakeup = signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        for number in watched:
            if before[number] != signal.SIG_IGN:  # as under nohup
                signal.signal(number, lambda got, _: self.signals.append(got))
        signal.signal(signal.SIGCHLD, lambda *_: None)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)

    # ------------------------------------------------------------ the loop

    def _over(self) -> bool:
        if len(self.signals) > 1:
            self._give_back()
            self.code = 128 + self.signals[-1]
            return True
        if self.signals or self.left == 0 or all(slot.ended for slot in self.slots):
            self.code = self.code or 0
        return self.code is not None and all(slot.running is None for slot in self.slots)

    def _step(self) -> None:
        now = time.monotonic()
        for slot in self.slots:
            if slot.running is not None:
                self._tend(slot, slot.running, now)
        self._take()
        if not self._over():
            self._sleep()

    def _sleep(self) -> None:
        """Until there may be something to do."""
        now = time.monotonic()
        until = [now + _LOOK_S]
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for slot in self.slots:
            if slot.running is not None:
                until += [at for at in (slot.running.signal_at, slot.running.renew_at) if at is not None]
        idle = next((slot for slot in self.slots if slot.idle), None)
        if idle is not None and self.code is None:
            start = max(self.next_start, self.try_at)
            if start > now or idle.handle is None:
                until.append(start)
            else:
                if self.fruitless > 3:
                    poll.poll(_LAZY_S * 1000)
                poll.register(idle.handle.fd, select.POLLIN)  # one is enough: they share the consumer
        started = time.monotonic()
        ready = poll.poll(max(0.0, min(until) - started) * 1000 + 1)
        if not ready or time.monotonic() - started > _AT_ONCE_S:
            self.fruitless = 0
        try:
            os.read(self._wake, 4096)
        except BlockingIOError:
            pass

    # ------------------------------------------------------------ taking

    def _take(self) -> None:
        """Start what can be started now."""
        while self.code is None and not self.signals and self.left != 0:
            slot = next((slot for slot in self.slots if slot.idle), None)
            if slot is None or time.monotonic() < max(self.next_start, self.try_at):
                return
            try:
                if slot.handle is None:
                    slot.handle = Handle(self.place, end=self.wish.end)
                message = slot.handle.take()
            except EOFError:
                self._at_end(slot)
            except (OSError, ValueError, KeyError) as error:
                self._in_trouble(slot, reason(error) if isinstance(error, OSError) else "what it says is no message")
            else:
                self._out_of_trouble()
                if message is None:
                    self.fruitless += 1
                    return
                self.fruitless = 0
                self._start(slot, message)

    def _start(self, slot: Slot, message: Message) -> None:
        env = environment_of(message, self.place.group, self.place.name)
        now = time.monotonic()
        try:
            slot.running = Running(self.wish.command, message, env, self.wish.timeout_s)
        except CannotRun as error:
            self._answer(slot, message, Outcome(f"dead {error}", f"{error}, now a dead letter"))
        except Busy as error:
            self._answer(slot, message, Outcome("release", f"{error}, given back"))
            self._pause()
            return
        except OSError as error:
            self.code = NOT_FOUND if error.errno == errno.ENOENT else NOT_EXECUTABLE
            text = f"{self.wish.command[0]}: {reason(error)}, given back"
            self._answer(slot, message, Outcome("release", text))
            return
        else:
            lease = self.place.lease_s()
            slot.running.renew_at = now + lease / 3 if lease else None
        if self.left is not None:
            self.left -= 1
        if self.wish.every_s is not None:
            self.next_start = max(self.next_start, now - _LATE_S) + self.wish.every_s

    # ------------------------------------------------------------ while a command runs, and at its end

    def _tend(self, slot: Slot, running: Running, now: float) -> None:
        running.check_time(now, self.wish.grace_s)
        if running.ended():
            slot.running = None
            verdict = running.verdict()
            if running.lost:
                self._say(running.message, f"{verdict.text or 'done'}, too late: its lease had run out")
            elif not self._answer(slot, running.message, verdict) and not verdict.text and self.wish.chatty:
                self._say(running.message, f"done in {time.monotonic() - running.started:.2f} s")
        elif running.renew_at is not None and now >= running.renew_at:
            self._renew(slot, running, now)

    def _renew(self, slot: Slot, running: Running, now: float) -> None:
        lease = self.place.lease_s()
        running.renew_at = now + (lease / 3 if lease else _LOOK_S)
        if slot.handle is None:
            return
        try:
            slot.handle.command("touch")
        except OSError as error:
            if error.errno == errno.ESTALE:
                running.lost, running.renew_at = True, None
                slot.handle.clear()
                self._say(running.message, "its lease ran out while the command runs: others may get it")

    def _answer(self, slot: Slot, message: Message, verdict: Outcome) -> bool:
        """Tell the consumer, and people where it did not go well. Whether that failed."""
        text, trouble = verdict.text, ""
        try:
            if slot.handle is not None and not self._tell(slot.handle, verdict.command):
                text = f"{text.partition(',')[0]}, but it cannot be a dead letter: will be tried again"
        except OSError as error:
            slot.drop()  # gives the message back, if it is still ours
            verb = verdict.command.split()[0]
            trouble = f"could not be told {verb!r}: {reason(error)}; the message may come again"
        if text:
            self._say(message, text + (f" (delivery {message.deliveries})" if message.deliveries > 1 else ""))
        if trouble:
            self._say(message, trouble)
        return bool(trouble)

    def _tell(self, handle: Handle, command: str) -> bool:
        """Whether that could be said. A dead letter cannot become one, nor what has no room: then it is a failure."""
        try:
            handle.command(command)
        except OSError as error:
            if not command.startswith("dead") or error.errno not in (errno.EINVAL, errno.ENOSPC):
                raise
            handle.clear()
            handle.command("nack")
            return False
        return True

    def _give_back(self) -> None:
        """End at once: kill what runs, then let others have it."""
        for slot in self.slots:
            if slot.running is not None:
                running, slot.running = slot.running, None
                running.kill()
                self._answer(slot, running.message, Outcome("release", "killed, given back"))

    def _say(self, message: Message, text: str) -> None:
        note(PROGRAM, f"{message.label}: {text}")

    # ------------------------------------------------------------ the server comes and goes

    def _open_all(self) -> None:
        """At the start an error is one: nobody knows yet whether it was ever right. Raises ToolError."""
        for slot in self.slots:
            try:
                slot.handle = Handle(self.place, end=self.wish.end)
            except OSError as error:
                text = reason(error)
                if error.errno == errno.EBUSY:
                    text = "somebody has it open, and it is private" + (": -j 1" if self.wish.parallel > 1 else "")
                raise ToolError(f"{self.place.given}: {text}") from error

    def _at_end(self, slot: Slot) -> None:
        if self.wish.end and os.path.lexists(self.place.path):
            slot.ended = True
            slot.drop()
        else:
            self._in_trouble(slot, "the tree ended the reading")

    def _in_trouble(self, slot: Slot, why: str) -> None:
        """Say so once, and try again later: soon at first."""
        slot.drop()
        if self.place.gone():
            self._stop(f"{self.place.given}: the consumer was removed")
            return
        if not self.trouble:
            self.trouble = why
            note(PROGRAM, f"{self.place.given}: {why}; waiting for it to come back")
        self._pause()

    def _stop(self, text: str) -> None:
        """Take no more; what runs may end."""
        note(PROGRAM, text)
        self.code = 1

    def _pause(self) -> None:
        least, most = _PAUSES_S
        self.pause_s = min(most, max(least, self.pause_s * 2))
        self.try_at = time.monotonic() + self.pause_s

    def _out_of_trouble(self) -> None:
        self.pause_s = 0.0
        if self.trouble:
            self.trouble = ""
            note(PROGRAM, f"{self.place.given}: back")
