"""Claims ahead of the program, and acknowledgements that are written together.

One read claims up to `prefetch` messages. They are given out one by one, and what `with claim:` blocks acknowledge is
noted here, and written in one line: when the program waits for more, and else every TICK_S.

    read      7 8 9 10          `Claims._ready`
    blocks    7 8               noted; a program that asks for 9 does not wait for their acknowledgement
    write     ack 7-8           by `send`: before the next read, or by the thread

Claims that lie ahead for `hold_s` are released uncounted, so that a slow handler keeps no other worker from them, and
no lease ends. The thread runs only while something is noted or lies ahead.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from mqfs.errors import Disconnected, MqfsError, Stale

if TYPE_CHECKING:
    from mqfs.client.delivery import Claim, Claims

TICK_S = 0.01  # after which an acknowledgement is written at the latest
HOLD_S = 15.0  # that claims lie ahead at most; half the lease, where that is shorter
SHOWN = 8  # sequences that an error names


def ranges(sequences: Iterable[int]) -> list[str]:
    """Sequences as the commands of a consumer take them: neighbours as one range."""
    runs: list[list[int]] = []
    for sequence in sorted(sequences):
        if runs and runs[-1][1] == sequence - 1:
            runs[-1][1] = sequence
        else:
            runs.append([sequence, sequence])
    return [str(first) if first == last else f"{first}-{last}" for first, last in runs]


class DeferredAcks:
    """The acknowledgements of one handle, `claims`. Thread-safe."""

    def __init__(self, claims: Claims, hold_s: float) -> None:
        self._claims, self._hold_s = claims, hold_s
        self._unsent: deque[Claim] = deque()
        self._sending = threading.Lock()
        self._active, self._stopped = threading.Event(), threading.Event()
        self._has_thread = False
        self._received_at = 0.0  # what lies ahead
        self._refused: list[tuple[Claim, MqfsError]] = []  # for the next `get`

    def received(self) -> None:
        """Claims lie ahead from now on."""
        self._received_at = time.monotonic()
        self._activate()

    def add(self, claim: Claim) -> None:
        """Acknowledge a claim soon."""
        self._unsent.append(claim)
        if not self._active.is_set():
            self._activate()

    def _activate(self) -> None:
        self._active.set()
        if not self._has_thread:
            threading.Thread(target=self._run, name="mqfs-acks", daemon=True).start()
            self._has_thread = True  # where none can be started, the next call tries

    def stop(self) -> None:
        """The handle is closed: the thread ends."""
        self._stopped.set()
        self._active.set()

    def raise_failure(self) -> None:
        """Raise, once, why acknowledgements failed."""
        if self._refused:
            refused, self._refused = self._refused, []
            raise _explain(refused)

    def send(self) -> None:
        """Write what was noted until now. Returns when the server has it, or refused it."""
        with self._sending:
            batch: list[Claim] = []
            while self._unsent:
                batch.append(self._unsent.popleft())
            self._refused += self._claims._settle_all("ack", batch)

    def _run(self) -> None:
        claims = self._claims
        while self._active.wait() and not self._stopped.wait(TICK_S):
            self.send()
            if claims._ready and time.monotonic() - self._received_at > self._hold_s:
                self._release_ahead()
            if not (self._unsent or claims._ready):
                self._active.clear()
                if self._unsent or claims._ready:  # meanwhile
                    self._active.set()

    def _release_ahead(self) -> None:
        with self._sending:
            ahead: list[Claim] = []
            with suppress(IndexError):
                while True:  # `get` may take some meanwhile
                    ahead.append(self._claims._ready.pop())
            self._claims._settle_all("release", ahead)  # those refused are requeued already


def _explain(refused: Sequence[tuple[Claim, MqfsError]]) -> MqfsError:
    """One error for claims whose acknowledgement was refused."""
    first = refused[0][1]
    if not isinstance(first, Stale | Disconnected):
        return first
    shown = " ".join(ranges(claim.sequence for claim, _ in refused)[:SHOWN])
    return Stale(f"ack of {len(refused)} claims failed: lost before it was written (redelivered: {shown})")


__all__ = ["HOLD_S", "DeferredAcks", "ranges"]
