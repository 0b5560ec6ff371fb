"""Claims ahead of the program, and acknowledgements that are written together.

One read claims up to `prefetch` messages. They are given out one by one, and what `with claim:` blocks acknowledge is
noted here, and written in one line: when the program waits for more, and else every TICK_S.

    read      7 8 9 10          `Claims._ready`
    blocks    7 8               noted; a program that asks for 9 does not wait for their acknowledgement
    write     ack 7-8           by `send`: before the next read, or by the thread

Claims that lie ahead for `hold_s` are released uncounted, so that a slow handler keeps no other worker from them, and
no lease ends. The thread ends once nothing is noted and nothing lies ahead.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING
from weakref import WeakSet

from mqfs.errors import Disconnected, MqfsError, Stale
from mqfs.syntax.lines import command_lines

if TYPE_CHECKING:
    from mqfs.client.delivery import Claim, Claims

TICK_S = 0.01  # after which an acknowledgement is written at the latest
AGAIN_S = 1.0  # between two attempts of the thread, where the server refuses acknowledgements: its disk is full, say
LEASE_AGE_S = 0.5  # after which the lease is read again
HOLD_S = 15.0  # that claims lie ahead at most; half the lease, where that is shorter
EXIT_S = 2.0  # that the end of a program waits for all of this at most
ANSWER_S = 1.0  # that a `get` awaits answers at least
SHOWN = 8  # ranges that an error names


def ranges(sequences: Iterable[int]) -> list[str]:
    """Sequences as the commands of a consumer take them: neighbours as one range."""
    runs: list[list[int]] = []
    for sequence in sorted(sequences):
        if runs and runs[-1][1] == sequence - 1:
            runs[-1][1] = sequence
        else:
            runs.append([sequence, sequence])
    return [str(first) if first == last else f"{first}-{last}" for first, last in runs]


class Lease:
    """The lease of a group, which may be changed at any time. It is read again where it is used after LEASE_AGE_S, by
    the threads that renew claims or release them: once for all handles, and never for short work."""

    def __init__(self, ask: Callable[[], float]) -> None:
        """`ask`: the lease in seconds; 0: none."""
        self._ask, self._lock = ask, threading.Lock()
        self._read_at = -LEASE_AGE_S
        self.seconds = 0.0  # when it was read last

    def read(self) -> None:
        """Raises what reading the settings does."""
        self._read_at = time.monotonic()  # where it fails, the next attempt is as late
        self.seconds = self._ask()

    def now(self) -> float:
        """The lease in seconds, or that of before where it cannot be read."""
        with self._lock, suppress(MqfsError):
            if time.monotonic() - self._read_at >= LEASE_AGE_S:
                self.read()
        return self.seconds


class SentAcks:
    """The acknowledgements of a handle that claims one message at a time: each is sent at the end of its block, and its
    answer is awaited with that of the next read. One round trip a message, not two."""

    def __init__(self, claims: Claims) -> None:
        self._claims = claims
        self._sent: deque[tuple[Claim, Callable[..., object]]] = deque()
        self._refused: list[tuple[Claim, MqfsError]] = []  # for the next `get`

    def received(self) -> None:
        """Nothing lies ahead for long."""

    def add(self, claim: Claim) -> bool:
        """Send an acknowledgement. False: it has to be awaited at once, for no `get` of this thread follows soon."""
        claims = self._claims
        if claims._shut or claim._file is not claims._file or claims._turn.locked():
            return False
        try:
            self._sent.append((claim, claim._file.send(command_lines(f"ack {claim.sequence}"))))
        except Disconnected as error:
            self._refused.append((claim, error))
        return True

    def stop(self) -> None:
        """The handle is closed: `add` sends nothing more."""

    def before_read(self, deadline: float | None) -> None:
        """Await the answers, once the next read was begun, or leave them to the one after it. The turn of `claims` is
        held, here and by `send`."""
        if self._sent:
            self._claims._begin_read()
            with suppress(TimeoutError):
                self.send(deadline)

    def send(self, deadline: float | None = None) -> None:
        """Await the answers to what was sent. A claim of which one is not lost can be settled again. Raises
        TimeoutError."""
        if deadline is not None:  # a server that is well answers soon: a `get` of no time is to raise why one failed
            deadline = max(deadline, time.monotonic() + ANSWER_S)
        while self._sent:
            claim, answer = self._sent[0]
            try:
                answer(deadline)
            except MqfsError as error:
                if not isinstance(error, Disconnected):
                    self._claims._note_refusal(error)
                self._refused.append((claim, error))
                if not isinstance(error, Stale | Disconnected):
                    self._claims._reopened(claim)
            self._sent.popleft()

    def raise_failure(self) -> None:
        """Raise, once, why acknowledgements failed."""
        refused, self._refused = self._refused, []
        if refused:
            raise _explain(refused)


class DeferredAcks(SentAcks):
    """The acknowledgements of a handle with prefetch. Thread-safe."""

    def __init__(self, claims: Claims, lease: Lease) -> None:
        super().__init__(claims)
        self._lease = lease
        self._unsent: deque[Claim] = deque()
        self._sending = threading.Lock()
        self._state = threading.Lock()  # of the next two
        self._has_thread = self._is_stopped = False
        self._stopped = threading.Event()
        self._received_at = self._again_at = 0.0
        _open.add(claims)

    def received(self) -> None:
        """Claims lie ahead from now on."""
        self._received_at = time.monotonic()
        with self._state:
            self._activate()

    def add(self, claim: Claim) -> bool:
        """Acknowledge a claim soon. False: the handle is closed."""
        with self._state:
            if self._is_stopped:
                return False
            self._unsent.append(claim)
            self._activate()
        return True

    def _activate(self) -> None:
        if not (self._has_thread or self._is_stopped):
            threading.Thread(target=self._run, name="mqfs-acks", daemon=True).start()
            self._has_thread = True  # where none can be started, the next call tries

    def stop(self) -> None:
        """Note nothing from now on: the handle is closed."""
        with self._state:
            self._is_stopped = True
        self._stopped.set()

    def before_read(self, deadline: float | None) -> None:
        self.send()

    def send(self, deadline: float | None = None) -> None:
        """Write what was noted until now. Returns when the server has it, or refused it: a lost claim for good, all
        else to be written again. The deadline does not bound that."""
        with self._sending:
            batch: list[Claim] = []
            while self._unsent:
                batch.append(self._unsent.popleft())
            try:
                refused = self._claims._settle_all("ack", batch)
            except BaseException:
                self._unsent.extendleft(reversed(batch))
                raise
            self._refused += refused
            again = [claim for claim, error in refused if not isinstance(error, Stale | Disconnected)]
            if again:
                self._again_at = time.monotonic() + AGAIN_S
                self._unsent.extendleft(reversed(again))

    def _run(self) -> None:
        while not self._stopped.wait(TICK_S):
            now = time.monotonic()
            if now >= self._again_at:
                self.send()
            if self._claims._ready and self._is_held_too_long(now - self._received_at):
                self._release_ahead()
            with self._state:
                if not (self._unsent or self._claims._ready):
                    self._has_thread = False
                    return

    def _is_held_too_long(self, held_s: float) -> bool:
        lease_s = self._lease.seconds if held_s < LEASE_AGE_S / 2 else self._lease.now()
        return held_s > min(lease_s / 2 or HOLD_S, HOLD_S)

    def _release_ahead(self) -> None:
        with self._sending:
            claims = self._claims
            ahead: list[Claim] = []
            with suppress(IndexError):
                while True:  # `get` may take some meanwhile
                    ahead.append(claims._ready.pop())
            refused = claims._settle_all("release", ahead)  # those that are lost are requeued already
            left = {claim for claim, error in refused if not isinstance(error, Stale | Disconnected)}
            claims._ready.extendleft(claim for claim in ahead if claim in left)  # on a full disk, say
            self._received_at = time.monotonic()


def _explain(refused: Sequence[tuple[Claim, MqfsError]]) -> MqfsError:
    """One error for claims whose acknowledgement was refused."""
    error = refused[0][1]
    shown = " ".join(ranges({claim.sequence for claim, _ in refused})[:SHOWN])
    if isinstance(error, Disconnected):
        return Stale(f"ack of {len(refused)} claims failed: connection lost, outcome unknown (messages {shown})")
    if isinstance(error, Stale):
        return Stale(f"ack of {len(refused)} claims failed: lost before it was written (redelivered: {shown})")
    return type(error)(f"ack of {len(refused)} claims failed: {error} (messages {shown})")


# ------------------------------------------------------------ the end of a program

_open: WeakSet[Claims] = WeakSet()


def close_all(link: object = None) -> None:
    """Close the handles of a connection, or all: what they noted is written, and what lies ahead is released."""
    for claims in list(_open):
        if link is None or claims._link is link:
            with suppress(MqfsError, TimeoutError):
                claims.close()


def _close_at_exit() -> None:
    """A server that is stopped keeps no program from its end: on a thread, and not for long."""
    if _open:
        thread = threading.Thread(target=close_all, name="mqfs-exit", daemon=True)
        thread.start()
        thread.join(EXIT_S)


atexit.register(_close_at_exit)
os.register_at_fork(after_in_child=_open.clear)  # they are the parent's
