"""The progress of a consumer in a log: acked messages, and the state of the others that its search has met.

    sequences     1 2 3 4 5 6 7 8 9      ack_floor 3: 1 and 2 are acked
                  a a c a a d . . .      acked_ranges 4-5; unacked: 3 is claimed, 6 delayed; from 7 on not looked at
    `ack` 3       a a a a a d . . .      3 is the floor, and 4-5 join on to it: ack_floor 6

Each event of a message is a step of an ACK record; the table LIFE says which step may follow which state. A step has
the same effect at run time and when the log is read again. Reading refuses no step, as a recorded step has happened.
This module has no I/O and no clock.
"""

from __future__ import annotations

import enum
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise

import attrs

_STEP = struct.Struct("<BxxxIQQq")
_pack, _unpack = _STEP.pack, _STEP.iter_unpack
_MOST = 1 << 63  # sequences
_RECORDED = 4_096  # steps of one record of a whole state: 128 KiB


class Op(enum.IntEnum):
    """The operation of a step in an ACK record, on the message `last`; [first, last] is its slot, see `Unacked`."""

    CLAIM = 1  # a receiver has it
    ACK = 2  # it is acknowledged
    REQUEUE = 3  # it is to be delivered again, from `due_ns` on
    SEEK = 4  # everything below `last` is acked, nothing from it on


CLAIM, ACK, REQUEUE, SEEK = (int(op) for op in Op)


def step(op: int, first: int, last: int, failed: int = 0, due_ns: int = 0) -> bytes:
    """Return one step; the body of an ACK record is one or more. `failed`: failed deliveries; `due_ns`: engine time.
    AckState.step also checks the step against the message's state."""
    return _pack(op, failed, first, last, due_ns)


class State(enum.StrEnum):
    """The state of a message, for one consumer. `steps`: the steps that LIFE has from it, kept on the member, as
    hashing a member costs a call."""

    steps: frozenset[int]

    READY = "ready"
    IN_FLIGHT = "in flight"  # a receiver has it
    DELAYED = "delayed"  # after a failed delivery
    UNCONFIRMED = "unconfirmed"  # acked by being read; its reader may still be found dead
    ACKED = "acked"
    DEAD = "dead letter"
    GONE = "gone"
    ANY = "any"


@attrs.frozen
class Transition:
    """The effect of an event on a message, and the step of an ACK record for it (None: nothing is recorded)."""

    state: State
    event: str
    next: State
    step: Op | None = None
    is_counted: bool = False  # as a failed delivery


# The states of a message at a consumer. AckState.step refuses a step without a row; the documents show the table.
LIFE = (
    Transition(State.READY, "read, with `ack next` or at a consumer", State.IN_FLIGHT, Op.CLAIM),
    Transition(State.READY, "read, with `ack read`", State.UNCONFIRMED, Op.ACK),
    Transition(State.READY, "expired, cut by `depth` or dropped", State.GONE),
    Transition(State.READY, "left out, for the consumer has its `backlog`", State.ACKED, Op.ACK),
    Transition(State.IN_FLIGHT, "`ack`; with `ack next` the next read", State.ACKED, Op.ACK),
    Transition(State.IN_FLIGHT, "`touch`: the lease is renewed", State.IN_FLIGHT),
    Transition(State.IN_FLIGHT, "`release`, or the server stops", State.READY, Op.REQUEUE),
    Transition(State.IN_FLIGHT, "`nack`, or the lease runs out", State.DELAYED, Op.REQUEUE, True),
    Transition(State.IN_FLIGHT, "last close, or the claiming process dies", State.READY, Op.REQUEUE, True),
    Transition(State.IN_FLIGHT, "the server is killed", State.READY, None, True),
    Transition(State.IN_FLIGHT, "`dead`, or the last of `retries` fails", State.DEAD, Op.ACK),
    Transition(State.DELAYED, "due", State.READY),
    Transition(State.UNCONFIRMED, "the next read", State.ACKED),
    Transition(State.UNCONFIRMED, "its handle is lost before the data was read", State.READY, Op.CLAIM, True),
    Transition(State.ANY, "another consumer releases an exclusive message", State.READY, Op.REQUEUE),
    Transition(State.ANY, "`seek` behind it", State.ACKED, Op.SEEK),
    Transition(State.ANY, "`seek` to it or before it", State.READY, Op.SEEK),
)

for _state in State:
    _from = (_state, State.ANY, State.READY) if _state is State.DELAYED else (_state, State.ANY)  # due: not recorded
    _state.steps = frozenset(int(row.step) for row in LIFE if row.step and row.state in _from)
_READY, _IN_FLIGHT = State.READY, State.IN_FLIGHT  # looked up for each message


def check(body: bytes) -> None:
    """Check the body of an ACK record read from a log. Raises ValueError if it is not whole steps that `apply`
    knows."""
    if len(body) % _STEP.size:
        raise ValueError(f"not an acknowledgement: {len(body)} bytes (expected a multiple of {_STEP.size})")
    for op, _, first, last, _ in _STEP.iter_unpack(body):
        if not (CLAIM <= op <= SEEK and first <= last < _MOST):
            raise ValueError(f"not an acknowledgement: step {op} of {first} to {last}")


class Unacked:
    """A message that the search has met and that is not acked. `claimed`: its last step in the log is CLAIM. Its slot
    [first, sequence] holds no other message for the consumer, so that slots of acked neighbours join to one range."""

    __slots__ = ("claimed", "due_ns", "failed", "first")

    def __init__(self, first: int, failed: int = 0, due_ns: int = 0, claimed: bool = False) -> None:
        self.first, self.failed, self.due_ns, self.claimed = first, failed, due_ns, claimed

    def divided(self, at: int, last: int) -> bytes:
        """Return the step that moves the beginning of the slot, which ends with `last`, after `at`. The message's state
        stays the same."""
        return step(CLAIM if self.claimed else REQUEUE, at + 1, last, self.failed, self.due_ns)


class Ranges:
    """Disjoint ranges of sequences, ends included, ascending; neighbours are joined."""

    __slots__ = ("_lasts", "firsts")

    def __init__(self, ranges: Sequence[Sequence[int]] = ()) -> None:
        self.firsts = [first for first, _ in ranges]  # empty: there are none
        self._lasts = [last for _, last in ranges]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self.firsts, self._lasts, strict=True))

    def within(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of [first, last] that the ranges hold."""
        found = slice(bisect_left(self._lasts, first), bisect_right(self.firsts, last))
        for begin, end in zip(self.firsts[found], self._lasts[found], strict=True):
            yield max(begin, first), min(end, last)

    def end_of(self, sequence: int) -> int:
        """Return the end of the range that holds the sequence; 0 if none does."""
        at = bisect_right(self.firsts, sequence) - 1
        return self._lasts[at] if at >= 0 and self._lasts[at] >= sequence else 0

    def reaches(self, sequence: int) -> bool:
        """Whether any range ends at the sequence or after it."""
        return bool(self._lasts) and self._lasts[-1] >= sequence

    def add(self, first: int, last: int) -> None:
        begin = bisect_left(self._lasts, first - 1)
        end = bisect_right(self.firsts, last + 1)
        if begin < end:
            first, last = min(first, self.firsts[begin]), max(last, self._lasts[end - 1])
        self.firsts[begin:end] = [first]
        self._lasts[begin:end] = [last]

    def remove(self, first: int, last: int) -> None:
        begin = bisect_left(self._lasts, first)
        end = bisect_right(self.firsts, last)
        if begin >= end:
            return
        left, right = self.firsts[begin], self._lasts[end - 1]
        rest = [(left, first - 1)] if left < first else []
        rest += [(last + 1, right)] if right > last else []
        self.firsts[begin:end] = [f for f, _ in rest]
        self._lasts[begin:end] = [x for _, x in rest]

    def pop_below(self, floor: int) -> int:
        """Remove the ranges that join on to `floor`, and return the floor after them."""
        while self.firsts and self.firsts[0] <= floor:
            floor = max(floor, self._lasts[0] + 1)
            del self.firsts[0], self._lasts[0]
        return floor


@attrs.define
class AckState:
    """The progress of a consumer. Everything below `ack_floor` is acked, and so are `acked_ranges` above it. `unacked`
    has all other messages that the search has met, claimed or not."""

    ack_floor: int = 0
    acked_ranges: Ranges = attrs.Factory(Ranges)
    unacked: dict[int, Unacked] = attrs.Factory(dict)

    def is_acked(self, sequence: int) -> bool:
        if sequence < self.ack_floor or not self.acked_ranges.firsts:
            return sequence < self.ack_floor
        return self.acked_ranges.end_of(sequence) > 0

    def acked_in(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of [first, last] that are acked."""
        if first < self.ack_floor:
            yield first, min(last, self.ack_floor - 1)
        yield from self.acked_ranges.within(first, last)

    def of(self, sequence: int) -> State:
        """Return the state of a message according to the log: ready, in flight, delayed (perhaps due already) or
        acked."""
        entry = self.unacked.get(sequence)
        if entry is not None:
            return _IN_FLIGHT if entry.claimed else State.DELAYED if entry.due_ns else _READY
        if sequence < self.ack_floor or (self.acked_ranges.firsts and self.acked_ranges.end_of(sequence)):
            return State.ACKED
        return _READY

    def step(
        self, op: int, first: int, last: int, failed: int = 0, due_ns: int = 0, state: State | None = None
    ) -> bytes:
        """Return a step to record, as the function `step`. `state`: the message's state, if not as the log says. Raises
        ValueError if LIFE has no such step from that state."""
        if op not in (state or self.of(last)).steps:
            state = state or self.of(last)
            raise ValueError(f"message {last}: {Op(op).name} of one that is {state} (not a step of LIFE)")
        return _pack(op, failed, first, last, due_ns)

    def steps(self, op: int, firsts: Sequence[int], lasts: Sequence[int]) -> bytes:
        """As `step`, for several messages with these slots: a step for each."""
        for last in lasts:
            if op not in self.of(last).steps:
                self.step(op, last, last)
        words = [op, 0, 0, 0] * len(lasts)  # as _STEP has them
        words[1::4], words[2::4] = firsts, lasts
        return struct.pack(f"<{len(words)}Q", *words)

    def offer(self, sequences: Sequence[int]) -> list[bytes]:
        """Return the steps that let the consumer deliver messages that it may have passed: for each of the ascending
        `sequences` its own, to be recorded in this order. If a message lies in the slot of an unacked one, the slot is
        divided: else an ack of that slot would cover it."""
        offers, at = list[bytes](), 0
        slots = sorted([last, entry.first] for last, entry in self.unacked.items() if entry.first < last)
        for sequence in sequences:
            while at < len(slots) and slots[at][0] < sequence:
                at += 1
            first, rest = sequence, b""
            if at < len(slots) and slots[at][1] <= sequence:
                last, first = slots[at]
                if sequence < last:
                    rest = self.unacked[last].divided(sequence, last)
                    slots[at][1] = sequence + 1
            offers.append(rest + self.step(REQUEUE, first, sequence))
        return offers

    def whole(self) -> Iterator[bytes]:
        """Return the bodies of ACK records that give a consumer this progress, whatever its progress was."""
        steps = [step(SEEK, self.ack_floor, self.ack_floor)]
        steps += [step(ACK, first, last) for first, last in self.acked_ranges]
        steps += [
            step(CLAIM if entry.claimed else REQUEUE, entry.first, sequence, entry.failed, entry.due_ns)
            for sequence, entry in self.unacked.items()
        ]
        return (b"".join(steps[at : at + _RECORDED]) for at in range(0, len(steps), _RECORDED))

    def apply(self, body: bytes) -> None:
        """Apply the steps of an ACK record. The entry of a message is one object while it is unacked."""
        unacked = self.unacked
        for op, failed, first, last, due_ns in _unpack(body):
            if op == ACK:
                unacked.pop(last, None)
                if first <= self.ack_floor <= last and not self.acked_ranges.firsts:
                    self.ack_floor = last + 1
                else:
                    self._mark_acked(first, last)
            elif op != SEEK:  # CLAIM or REQUEUE
                if last in unacked:
                    entry = unacked[last]
                    entry.first, entry.failed, entry.due_ns, entry.claimed = first, failed, due_ns, op == CLAIM
                    continue
                if last < self.ack_floor or self.acked_ranges.firsts:
                    self._reopen(first, last)
                unacked[last] = Unacked(first, failed, due_ns, op == CLAIM)
            else:
                self.ack_floor, self.acked_ranges = last, Ranges()
                unacked.clear()

    def _mark_acked(self, first: int, last: int) -> None:
        """Mark [first, last] as acked."""
        if first <= self.ack_floor:
            self.ack_floor = max(self.ack_floor, last + 1)
        else:
            self.acked_ranges.add(first, last)
        if self.acked_ranges.firsts:
            self.ack_floor = self.acked_ranges.pop_below(self.ack_floor)

    def _reopen(self, first: int, last: int) -> None:
        """Mark [first, last] as no longer acked."""
        if last < self.ack_floor:
            if last + 1 < self.ack_floor:
                self.acked_ranges.add(last + 1, self.ack_floor - 1)
            self.ack_floor = first
        else:
            self.acked_ranges.remove(first, last)

    def encode(self) -> list[object]:
        entries = [[s, e.first, e.failed, e.due_ns, int(e.claimed)] for s, e in self.unacked.items()]
        return [self.ack_floor, list(self.acked_ranges), entries]

    @classmethod
    def decode(cls, floor: int, ranges: list[list[int]], entries: list[list[int]]) -> AckState:
        """Return an encoded progress. Raises ValueError if the ranges are not ascending and disjoint."""
        ends = [floor, *(end for acked in ranges for end in acked)]
        if any(before > after for before, after in pairwise(ends)):
            raise ValueError("acked ranges: out of order")
        unacked = {s: Unacked(first, failed, due, bool(claimed)) for s, first, failed, due, claimed in entries}
        return cls(floor, Ranges(ranges), unacked)
