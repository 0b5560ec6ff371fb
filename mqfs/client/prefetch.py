"""Prefetched claims, and acknowledgements that are written together.

One read claims up to `prefetch` messages, which `get` returns one by one. The acknowledgements of `with claim:` blocks
are queued here, and written in one line: when the program waits for more messages, and else every TICK_S.

    read      7 8 9 10          `Claims._ready`
    blocks    7 8               queued; a program that asks for 9 does not wait for their acknowledgement
    write     ack 7-8           by `send`: before the next read, or by the thread

Prefetched claims are released uncounted after HOLD_S or half the lease, so that a slow handler does not keep them from
other workers, and no lease expires. The thread ends once no acknowledgement is queued and no claim is prefetched.
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

TICK_S = 0.01  # an acknowledgement is written after this time at the latest
AGAIN_S = 1.0  # between two attempts of the thread, while the server refuses acknowledgements (its disk is full)
LEASE_AGE_S = 0.5  # after this time the lease is read again
HOLD_S = 15.0  # prefetched claims are released after this time, or half the lease if that is shorter
EXIT_S = 2.0  # the end of a program waits for this time at most until its handles are closed
ANSWER_S = 1.0  # a `get` awaits answers for this time at least
SHOWN = 8  # ranges in an error's text


def ranges(sequences: Iterable[int]) -> list[str]:
    """Return sequences as arguments of a consumer's commands: neighbours as one range."""
    runs: list[list[int]] = []
    for sequence in sorted(sequences):
        if runs and runs[-1][1] == sequence - 1:
            runs[-1][1] = sequence
        else:
            runs.append([sequence, sequence])
    return [str(first) if first == last else f"{first}-{last}" for first, last in runs]


class Lease:
    """The lease of a group, which may be changed at any time.

    The threads that renew or release claims read it again when it is older than LEASE_AGE_S: once for all handles, and
    never for short work."""

    def __init__(self, ask: Callable[[], float]) -> None:
        """`ask` returns the lease in seconds; 0: none."""
        self._ask, self._lock = ask, threading.Lock()
        self._read_at = -LEASE_AGE_S
        self.seconds = 0.0  # by the last read

    def read(self) -> None:
        """Read the lease. Raises the errors of reading the settings."""
        self._read_at = time.monotonic()  # also if the attempt fails: the next one is not earlier then
        self.seconds = self._ask()

    def now(self) -> float:
        """Return the lease in seconds; the last known one if it cannot be read."""
        with self._lock, suppress(MqfsError):
            if time.monotonic() - self._read_at >= LEASE_AGE_S:
                self.read()
        return self.seconds


class SentAcks:
    """The acknowledgements of a handle that claims one message at a time.

    Each is sent at the end of its block, and its answer is awaited with that of the next read: one round trip a
    message, not two."""

    def __init__(self, claims: Claims) -> None:
        self._claims = claims
        self._sent: deque[tuple[Claim, Callable[..., object]]] = deque()
        self._refused: list[tuple[Claim, MqfsError]] = []  # for the next `get`

    def received(self) -> None:
        """Do nothing: claims are not prefetched here."""

    def add(self, claim: Claim) -> bool:
        """Send an acknowledgement. Returns False if the caller has to acknowledge and wait, as no `get` follows soon
        that would await the answer."""
        claims = self._claims
        if claims._shut or claim._file is not claims._file or claims._turn.locked():
            return False
        try:
            self._sent.append((claim, claim._file.send(command_lines(f"ack {claim.sequence}"))))
        except Disconnected as error:
            self._refused.append((claim, error))
        return True

    def stop(self) -> None:
        """Do nothing: `add` sends nothing for a closed handle."""

    def before_read(self, deadline: float | None) -> None:
        """Begin the next read, and await the answers; after the deadline they are left to a later read. The caller of
        this and of `send` holds the turn of `claims`."""
        if self._sent:
            self._claims._begin_read()
            with suppress(TimeoutError):
                self.send(deadline)

    def send(self, deadline: float | None = None) -> None:
        """Await the answers to the acknowledgements that were sent. A claim that was refused but not lost can be
        settled again. Raises TimeoutError."""
        if deadline is not None:  # a healthy server answers soon: `get(0)`, too, has to raise a failed acknowledgement
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
        """Raise, once, the error of the acknowledgements that failed."""
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
        self._state = threading.Lock()  # guards the next two
        self._has_thread = self._is_stopped = False
        self._stopped = threading.Event()
        self._received_at = self._again_at = 0.0
        _open.add(claims)

    def received(self) -> None:
        """Record that claims were prefetched, and start the thread."""
        self._received_at = time.monotonic()
        with self._state:
            self._activate()

    def add(self, claim: Claim) -> bool:
        """Queue the acknowledgement of a claim. Returns False if the handle is closed."""
        with self._state:
            if self._is_stopped:
                return False
            self._unsent.append(claim)
            self._activate()
        return True

    def _activate(self) -> None:
        if not (self._has_thread or self._is_stopped):
            threading.Thread(target=self._run, name="mqfs-acks", daemon=True).start()
            self._has_thread = True  # not set if the start fails: the next call tries again

    def stop(self) -> None:
        """Queue no more acknowledgements: the handle is closed."""
        with self._state:
            self._is_stopped = True
        self._stopped.set()

    def before_read(self, deadline: float | None) -> None:
        self.send()

    def send(self, deadline: float | None = None) -> None:
        """Write the queued acknowledgements, and wait for the server's answer, whatever the deadline. After a refusal
        they are queued again, unless the claim is lost."""
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
                while True:  # `get` may remove some meanwhile
                    ahead.append(claims._ready.pop())
            refused = claims._settle_all("release", ahead)  # the server has requeued lost ones already
            left = {claim for claim, error in refused if not isinstance(error, Stale | Disconnected)}
            claims._ready.extendleft(claim for claim in ahead if claim in left)  # refused, by a full disk, for example
            self._received_at = time.monotonic()


def _explain(refused: Sequence[tuple[Claim, MqfsError]]) -> MqfsError:
    """Return one error for all claims whose acknowledgement was refused."""
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
    """Close the handles of a connection, or all (None): queued acknowledgements are written, and prefetched claims
    released."""
    for claims in list(_open):
        if link is None or claims._link is link:
            with suppress(MqfsError, TimeoutError):
                claims.close()


def _close_at_exit() -> None:
    """Close all handles at the end of the program, on a thread and for at most EXIT_S: a stopped server must not block
    the end."""
    if _open:
        thread = threading.Thread(target=close_all, name="mqfs-exit", daemon=True)
        thread.start()
        thread.join(EXIT_S)


atexit.register(_close_at_exit)
os.register_at_fork(after_in_child=_open.clear)  # the handles are the parent's
