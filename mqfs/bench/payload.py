"""What a message of the bench looks like, and whether all came that were sent.

Owns the layout: who sent it, of which kind, its number, when it was sent, then bytes that are known. Every message that
comes is looked at whole.
"""

from __future__ import annotations

import struct

import attrs

DATA, END = 0, 1  # END: its number is how many came before
_HEAD = struct.Struct("<HBxIq")
LEAST_BYTES = _HEAD.size
MISSED_MOST = 1 << 20  # numbers remembered as missing: bounds what a bench that loses everything holds
TIMES_MOST = 3  # so often a worker counts that a message came: the sum over limits.BENCH_WORKERS fits a byte
_FILL = b"The quick brown fox jumps over the lazy dog. "

_pack, _unpack = _HEAD.pack, _HEAD.unpack_from


def tail(size: int) -> bytes:
    """The known bytes of a message of that size."""
    return (_FILL * (size // len(_FILL) + 1))[: size - LEAST_BYTES]


def make(producer: int, number: int, sent_ns: int, rest: bytes, kind: int = DATA) -> bytes:
    return _pack(producer, kind, number, sent_ns) + rest


@attrs.define
class ReceiveCheck:
    """What was looked at, of all producers."""

    received: int = 0
    twice: int = 0
    disordered: int = 0
    damaged: int = 0


class Order:
    """For who gets every message: of each producer all must come, in their order."""

    def __init__(self, producers: int, size: int) -> None:
        self.sight = ReceiveCheck()
        self.ended = [-1] * producers  # how many a producer says it sent
        self.next = [0] * producers
        self.missing: list[set[int]] = [set() for _ in range(producers)]
        self._tail = tail(size)

    def look(self, body: bytes) -> int:
        """When it was sent; 0 where that means nothing (an end mark, damage)."""
        if body[LEAST_BYTES:] != self._tail:
            self.sight.damaged += 1
            return 0
        producer, kind, number, sent_ns = _unpack(body)
        if producer >= len(self.next):
            self.sight.damaged += 1
            return 0
        if kind == END:
            self.ended[producer] = number
            return 0
        self.sight.received += 1
        if number == self.next[producer]:
            self.next[producer] = number + 1
        else:
            self._out_of_turn(producer, number)
        return int(sent_ns)

    def _out_of_turn(self, producer: int, number: int) -> None:
        missing = self.missing[producer]
        if number > self.next[producer]:
            last = min(number, self.next[producer] + MISSED_MOST - len(missing))
            missing.update(range(self.next[producer], last))
            self.next[producer] = number + 1
        elif number in missing:
            missing.discard(number)
            self.sight.disordered += 1
        else:
            self.sight.twice += 1

    @property
    def over(self) -> bool:
        return -1 not in self.ended

    def lost(self, sent: list[int]) -> int:
        """How many never came, of those sent by each."""
        behind = sum(max(0, count - came) for count, came in zip(sent, self.next, strict=True))
        return behind + sum(map(len, self.missing))


class QueueCheck:
    """For who gets some of the messages: those of a producer must come in order, once."""

    def __init__(self, producers: int, size: int) -> None:
        self.sight = ReceiveCheck()
        self.over = False
        self.seen = [bytearray() for _ in range(producers)]  # how often each number came
        self._last = [-1] * producers
        self._tail = tail(size)

    def look(self, body: bytes) -> int:
        if body[LEAST_BYTES:] != self._tail:
            self.sight.damaged += 1
            return 0
        producer, kind, number, sent_ns = _unpack(body)
        if kind == END:
            self.over = True
            return 0
        if producer >= len(self.seen):
            self.sight.damaged += 1
            return 0
        self.sight.received += 1
        self._note(producer, number)
        return int(sent_ns)

    def _note(self, producer: int, number: int) -> None:
        seen = self.seen[producer]
        if number >= len(seen):
            seen.extend(bytes(number + 65_536 - len(seen)))
        if seen[number] < TIMES_MOST:
            seen[number] += 1
        if number < self._last[producer]:
            self.sight.disordered += 1
        self._last[producer] = number


def shared_out(parts: list[list[bytes]], sent: list[int]) -> tuple[int, int]:
    """Of what each worker saw of each producer: how many were lost, how many came more than once."""
    lost = twice = 0
    for producer, count in enumerate(sent):
        total = _sum([part[producer][:count] for part in parts], count)
        missing = total.count(0)
        lost += missing
        twice += sum(total) - (count - missing)
    return lost, twice


def _sum(seen: list[bytes], count: int) -> bytes:
    """Byte by byte, as one long number: no byte carries into the next, see TIMES_MOST."""
    return sum(int.from_bytes(one, "little") for one in seen).to_bytes(count, "little")
