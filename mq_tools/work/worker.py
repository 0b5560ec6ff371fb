"""Worker: claims messages, runs commands, settles each claim, and outlives a restart of the server.

It never spins, and never claims a message that it may not start. Its one thread waits in one poll(2).
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

from mq_tools.cursor import Message
from mq_tools.errors import ToolError, close, print_line, reason
from mq_tools.parts import PartMissing, whole
from mq_tools.work.consumer import ConsumerFile, Handle
from mq_tools.work.process import NOT_EXECUTABLE, NOT_FOUND, Busy, CannotRun, Outcome, Process, environment_of

PROGRAM = "mq-work"
_CHECK_S = 2.0  # interval of reads of a waiting worker without a poll(2) event
_BACKOFF_S = (0.05, 5.0)  # the first and the longest pause after an error
_IMMEDIATE_S = 0.0005
_PAUSE_S = 0.05  # if poll(2) reports "readable" but reads return no message
_LATE_S = 0.05  # a start late by less does not delay the next


@attrs.frozen
class Options:
    """Parsed command-line options."""

    command: Sequence[str]
    parallel: int = 1
    count: int | None = None
    end: bool = False
    verbose: bool = False
    interval_s: float | None = None
    timeout_s: float | None = None
    grace_s: float = 5.0


class Slot:
    """One of the parallel commands, with its own handle on the consumer."""

    def __init__(self) -> None:
        self.handle: Handle | None = None
        self.process: Process | None = None
        self.at_end = False  # read the end of file that -e asks for

    @property
    def idle(self) -> bool:
        return self.process is None and not self.at_end

    def close(self) -> None:
        if self.handle is not None:
            self.handle.close()
        self.handle = None


class Worker:
    """The loop of mq-work."""

    def __init__(self, consumer: ConsumerFile, options: Options) -> None:
        self.consumer = consumer
        self.options = options
        self.slots = [Slot() for _ in range(options.parallel)]
        self.remaining = options.count
        self.next_start = 0.0
        self.retry_at = 0.0  # no claim before this time
        self.pause_s = 0.0
        self.empty_polls = 0  # in a row that returned immediately
        self.failure = ""  # why the consumer cannot be read
        self.signals: list[int] = []
        self.said_finishing = False
        self.code: int | None = None  # the exit code, once the worker claims no more
        self._wake, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> int:
        """Work until an end condition holds; return the exit code. Raises ToolError."""
        try:
            with self._handled_signals():
                self._open_all()
                while not self._is_over():
                    self._step()
                return self.code or 0
        finally:
            for slot in self.slots:
                if slot.process is not None:
                    slot.process.kill()
                slot.close()
            close(self._wake)
            close(self._waker)

    @contextmanager
    def _handled_signals(self) -> Iterator[None]:
        signals = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
        before = {number: signal.getsignal(number) for number in [*signals, signal.SIGCHLD]}
        wakeup = signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        for number in signals:
            if before[number] != signal.SIG_IGN:  # as under nohup
                signal.signal(number, lambda received, _: self.signals.append(received))
        signal.signal(signal.SIGCHLD, lambda *_: None)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)

    # ------------------------------------------------------------ the loop

    def _is_over(self) -> bool:
        if len(self.signals) > 1:
            self._release_all()
            self.code = 128 + self.signals[-1]
            return True
        if self.signals:
            self._say_finishing()
        if self.signals or self.remaining == 0 or all(slot.at_end for slot in self.slots):
            self.code = self.code or 0
        return self.code is not None and all(slot.process is None for slot in self.slots)

    def _say_finishing(self) -> None:
        """Say once, on a terminal, that Ctrl-C waits for the running jobs."""
        jobs = sum(slot.process is not None for slot in self.slots)
        if jobs and not self.said_finishing and self.signals == [signal.SIGINT] and os.isatty(2):
            jobs_text, them = ("1 job", "it") if jobs == 1 else (f"{jobs} jobs", "them")
            print_line(PROGRAM, f"finishing {jobs_text}; Ctrl-C again to give {them} back")
        self.said_finishing = True

    def _step(self) -> None:
        now = time.monotonic()
        for slot in self.slots:
            if slot.process is not None:
                self._check_process(slot, slot.process, now)
        self._start_next()
        if not self._is_over():
            self._sleep()

    def _sleep(self) -> None:
        """Wait for a signal, a message, the end of a command, or the next due time."""
        now = time.monotonic()
        until = [now + _CHECK_S]
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for slot in self.slots:
            if slot.process is not None:
                process = slot.process
                until += [at for at in (process.signal_at, process.renew_at, process.look_at) if at is not None]
        idle = next((slot for slot in self.slots if slot.idle), None)
        if idle is not None and self.code is None:
            start = max(self.next_start, self.retry_at)
            if start > now or idle.handle is None:
                until.append(start)
            else:
                if self.empty_polls > 3:
                    poll.poll(_PAUSE_S * 1000)
                poll.register(idle.handle.fd, select.POLLIN)  # one handle is enough: all are open on one consumer
        started = time.monotonic()
        ready = poll.poll(max(0.0, min(until) - started) * 1000 + 1)
        if not ready or time.monotonic() - started > _IMMEDIATE_S:
            self.empty_polls = 0
        try:
            os.read(self._wake, 4096)
        except BlockingIOError:
            pass

    # ------------------------------------------------------------ claiming

    def _start_next(self) -> None:
        """Claim messages and start their commands, as far as possible now."""
        while self.code is None and not self.signals and self.remaining != 0:
            slot = next((slot for slot in self.slots if slot.idle), None)
            if slot is None or time.monotonic() < max(self.next_start, self.retry_at):
                return
            try:
                if slot.handle is None:
                    slot.handle = Handle(self.consumer, end=self.options.end)
                message = slot.handle.claim_next()
            except EOFError:
                self._at_end(slot)
            except (OSError, ValueError, KeyError) as error:
                self._on_failure(slot, reason(error) if isinstance(error, OSError) else "malformed data from consumer")
            else:
                self._on_success()
                if message is None:
                    self.empty_polls += 1
                    return
                self.empty_polls = 0
                self._start(slot, message)

    def _start(self, slot: Slot, message: Message) -> None:
        try:
            message = whole(self.consumer.group, message)
        except PartMissing as error:
            self._count()
            self._settle(slot, message, Outcome(f"dead {error}", f"{error}, now a dead letter"))
            return
        except (ToolError, OSError) as error:
            text = reason(error) if isinstance(error, OSError) else str(error)
            self._settle(slot, message, Outcome("nack", f"cannot read its parts: {text}, will be retried"))
            self._pause()
            return
        env = environment_of(message, self.consumer.group, self.consumer.name)
        now = time.monotonic()
        try:
            slot.process = Process(self.options.command, message, env, self.options.timeout_s)
        except CannotRun as error:
            self._settle(slot, message, Outcome(f"dead {error}", f"{error}, now a dead letter"))
        except Busy as error:
            self._settle(slot, message, Outcome("release", f"{error}, released"))
            self._pause()
            return
        except OSError as error:
            self.code = NOT_FOUND if error.errno == errno.ENOENT else NOT_EXECUTABLE
            text = f"{self.options.command[0]}: {reason(error)}, released"
            self._settle(slot, message, Outcome("release", text))
            return
        else:
            lease = self.consumer.lease_s()
            slot.process.renew_at = now + lease / 3 if lease else None
        self._count()
        if self.options.interval_s is not None:
            self.next_start = max(self.next_start, now - _LATE_S) + self.options.interval_s

    def _count(self) -> None:
        """Count a message against -n."""
        if self.remaining is not None:
            self.remaining -= 1

    # ------------------------------------------------------------ running commands

    def _check_process(self, slot: Slot, process: Process, now: float) -> None:
        process.check_time(now, self.options.grace_s)
        if process.has_ended():
            slot.process = None
            outcome = process.outcome()
            if process.lease_lost:
                self._log(process.message, f"{outcome.text or 'done'}, after its lease ran out")
            elif not self._settle(slot, process.message, outcome) and not outcome.text and self.options.verbose:
                self._log(process.message, f"done in {time.monotonic() - process.started:.2f} s")
        elif process.renew_at is not None and now >= process.renew_at:
            self._renew(slot, process, now)

    def _renew(self, slot: Slot, process: Process, now: float) -> None:
        lease = self.consumer.lease_s()
        process.renew_at = now + (lease / 3 if lease else _CHECK_S)
        if slot.handle is None:
            return
        try:
            slot.handle.command("touch")
        except OSError as error:
            if error.errno == errno.ESTALE:
                process.lease_lost, process.renew_at = True, None
                slot.handle.skip_error()
                self._log(process.message, "lease ran out while the command runs (the message may be redelivered)")

    def _settle(self, slot: Slot, message: Message, outcome: Outcome) -> bool:
        """Write the outcome to the consumer, and log a failed message. Return whether the write failed."""
        text, failure = outcome.text, ""
        try:
            if slot.handle is not None and not self._command(slot.handle, outcome.command):
                text = f"{text.partition(',')[0]}, cannot become a dead letter, will be retried"
        except OSError as error:
            slot.close()  # requeues the message, if the claim still holds
            verb = outcome.command.split()[0]
            failure = f"{verb} failed: {reason(error)} (the message may be redelivered)"
        if text:
            self._log(message, text + (f" (delivery {message.deliveries})" if message.deliveries > 1 else ""))
        if failure:
            self._log(message, failure)
        return bool(failure)

    def _command(self, handle: Handle, command: str) -> bool:
        """Write a command. If `dead` is refused (a dead letter, or no room), write `nack` and return False."""
        try:
            handle.command(command)
        except OSError as error:
            if not command.startswith("dead") or error.errno not in (errno.EINVAL, errno.ENOSPC):
                raise
            handle.skip_error()
            handle.command("nack")
            return False
        return True

    def _release_all(self) -> None:
        """Kill the running commands and release their messages."""
        for slot in self.slots:
            if slot.process is not None:
                process, slot.process = slot.process, None
                process.kill()
                self._settle(slot, process.message, Outcome("release", "killed, released"))

    def _log(self, message: Message, text: str) -> None:
        print_line(PROGRAM, f"{message.stream} {message.sequence}: {text}")

    # ------------------------------------------------------------ restarts of the server

    def _open_all(self) -> None:
        """Open the consumer for each slot. Raises ToolError: at startup a failure is final, the path may be wrong."""
        for slot in self.slots:
            try:
                slot.handle = Handle(self.consumer, end=self.options.end)
            except OSError as error:
                text = reason(error)
                if error.errno == errno.EBUSY:
                    text = "consumer is private and already open" + " (expected -j 1)" * (self.options.parallel > 1)
                raise ToolError(f"{self.consumer.label}: {text}") from error

    def _at_end(self, slot: Slot) -> None:
        if self.options.end and os.path.lexists(self.consumer.path):
            slot.at_end = True
            slot.close()
        else:
            self._on_failure(slot, "unexpected end of file")

    def _on_failure(self, slot: Slot, text: str) -> None:
        """Log the first failure and retry with backoff. If the consumer was removed, claim no more."""
        slot.close()
        if self.consumer.is_removed():
            print_line(PROGRAM, f"{self.consumer.label}: the consumer was removed")
            self.code = 1  # claim no more; running commands may finish
            return
        if not self.failure:
            self.failure = text
            print_line(PROGRAM, f"{self.consumer.label}: {text}; retrying")
        self._pause()

    def _pause(self) -> None:
        first, longest = _BACKOFF_S
        self.pause_s = min(longest, max(first, self.pause_s * 2))
        self.retry_at = time.monotonic() + self.pause_s

    def _on_success(self) -> None:
        self.pause_s = 0.0
        if self.failure:
            self.failure = ""
            print_line(PROGRAM, f"{self.consumer.label}: reconnected")
