"""The messages of the bench, and the checks that all are received, in order, once and undamaged.

A message is producer, kind, number, time of sending, then known bytes. Every received message is checked whole.
"""

from __future__ import annotations

import struct

import attrs

DATA, END = 0, 1  # END: its number is the count of messages before it
_HEAD = struct.Struct("<HBxIq")
LEAST_BYTES = _HEAD.size
MISSED_MOST = 1 << 20  # missing numbers held, which limits the memory of a run that loses everything
TIMES_MOST = 3  # receipts counted of a message: summed over limits.BENCH_WORKERS workers they fit a byte
_FILL = b"The quick brown fox jumps over the lazy dog. "

_pack, _unpack = _HEAD.pack, _HEAD.unpack_from


def tail(size: int) -> bytes:
    """Return the known bytes of a message of that size."""
    return (_FILL * (size // len(_FILL) + 1))[: size - LEAST_BYTES]


def make(producer: int, number: int, sent_ns: int, rest: bytes, kind: int = DATA) -> bytes:
    return _pack(producer, kind, number, sent_ns) + rest


@attrs.define
class ReceiveCheck:
    """The counts of a receiver, over all producers."""

    received: int = 0
    twice: int = 0
    disordered: int = 0
    damaged: int = 0


class Order:
    """The check of a consumer: it receives all messages of each producer, in order."""

    def __init__(self, producers: int, size: int) -> None:
        self.result = ReceiveCheck()
        self.end_counts = [-1] * producers  # the count in a producer's end mark
        self.next = [0] * producers
        self.missing: list[set[int]] = [set() for _ in range(producers)]
        self._tail = tail(size)

    def count(self, body: bytes) -> int:
        """Count a message. Return its time of sending; 0 for an end mark or a damaged message."""
        if body[LEAST_BYTES:] != self._tail:
            self.result.damaged += 1
            return 0
        producer, kind, number, sent_ns = _unpack(body)
        if producer >= len(self.next):
            self.result.damaged += 1
            return 0
        if kind == END:
            self.end_counts[producer] = number
            return 0
        self.result.received += 1
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
            self.result.disordered += 1
        else:
            self.result.twice += 1

    @property
    def at_end(self) -> bool:
        return -1 not in self.end_counts


class QueueCheck:
    """The check of a worker: it receives its share of each producer's messages in order, once."""

    def __init__(self, producers: int, size: int) -> None:
        self.result = ReceiveCheck()
        self.at_end = False
        self.receipts = [bytearray() for _ in range(producers)]  # number of receipts of each message
        self._last = [-1] * producers
        self._tail = tail(size)

    def count(self, body: bytes) -> int:
        if body[LEAST_BYTES:] != self._tail:
            self.result.damaged += 1
            return 0
        producer, kind, number, sent_ns = _unpack(body)
        if kind == END:
            self.at_end = True
            return 0
        if producer >= len(self.receipts):
            self.result.damaged += 1
            return 0
        self.result.received += 1
        self._add_receipt(producer, number)
        return int(sent_ns)

    def _add_receipt(self, producer: int, number: int) -> None:
        receipts = self.receipts[producer]
        if number >= len(receipts):
            receipts.extend(bytes(number + 65_536 - len(receipts)))
        if receipts[number] < TIMES_MOST:
            receipts[number] += 1
        if number < self._last[producer]:
            self.result.disordered += 1
        self._last[producer] = number


def count_lost(nexts: list[int], missing: list[int], sent: list[int]) -> int:
    """Return how many messages one consumer never received. By producer: next number, missing ones before it, sent."""
    behind = sum(max(0, count - received) for count, received in zip(sent, nexts, strict=True))
    return behind + sum(missing)


def audit_shares(parts: list[list[bytes]], sent: list[int]) -> tuple[int, int]:
    """Return the numbers of lost and repeated messages, from the receipts of each worker and producer."""
    lost = twice = 0
    for producer, count in enumerate(sent):
        total = _sum([part[producer][:count] for part in parts], count)
        missing = total.count(0)
        lost += missing
        twice += sum(total) - (count - missing)
    return lost, twice


def _sum(receipts: list[bytes], count: int) -> bytes:
    """Add byte by byte, as one long number: no byte carries into the next, see TIMES_MOST."""
    return sum(int.from_bytes(one, "little") for one in receipts).to_bytes(count, "little")
