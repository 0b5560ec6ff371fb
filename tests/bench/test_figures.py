"""What the figures are made of: percentiles, and the check that sees each kind of fault."""

from __future__ import annotations

import random

from mqfs.bench import payload
from mqfs.bench.actors import PERCENTILES, Histogram

SIZE = 40


def test_percentiles_beside_a_sorted_list() -> None:
    chance = random.Random(1)
    lengths = [int(chance.lognormvariate(9, 3)) for _ in range(20_000)] + [0, 1, 63, 64, 2**40]
    counted = Histogram()
    for ns in lengths:
        counted.add(ns)
    lengths.sort()
    for percent in (*PERCENTILES, 1.0, 100.0):
        exact = lengths[max(0, round(len(lengths) * percent / 100) - 1)]
        assert abs(counted.percentile(percent) - exact) <= exact * 0.04 + 1, percent
    assert (counted.most, len(counted)) == (2**40, len(lengths))


def test_two_make_one() -> None:
    one, other, both = Histogram(), Histogram(), Histogram()
    for ns in range(0, 10_000, 7):
        (one if ns % 2 else other).add(ns)
        both.add(ns)
    one.merge(Histogram.from_list(other.to_list()))
    assert one.to_list() == both.to_list()


def message(number: int, producer: int = 0, kind: int = payload.DATA) -> bytes:
    return payload.make(producer, number, 5, payload.tail(SIZE), kind)


def lost(order: payload.Order, sent: list[int]) -> int:
    return payload.count_lost(order.next, [len(missing) for missing in order.missing], sent)


def checked(numbers: list[int], sent: int) -> tuple[payload.ReceiveCheck, int]:
    order = payload.Order(1, SIZE)
    for number in numbers:
        order.count(message(number))
    return order.result, lost(order, [sent])


def test_a_consumer_sees_each_fault() -> None:
    assert checked([0, 1, 2], 3) == (payload.ReceiveCheck(received=3), 0)
    assert checked([0, 2], 3) == (payload.ReceiveCheck(received=2), 1)
    assert checked([0, 1], 3) == (payload.ReceiveCheck(received=2), 1)
    assert checked([0, 1, 1, 2], 3) == (payload.ReceiveCheck(received=4, twice=1), 0)
    assert checked([0, 2, 1], 3) == (payload.ReceiveCheck(received=3, disordered=1), 0)
    assert checked([2, 1, 1, 0], 3) == (payload.ReceiveCheck(received=4, twice=1, disordered=2), 0)


def test_damage_is_seen_anywhere() -> None:
    for at in (0, payload.LEAST_BYTES, SIZE - 1):
        data = bytearray(message(0))
        data[at] ^= 0x80
        for check in (payload.Order(1, SIZE), payload.QueueCheck(1, SIZE)):
            assert check.count(bytes(data)) == 0
            assert check.result == payload.ReceiveCheck(damaged=1), at
    order = payload.Order(1, SIZE)
    order.count(message(0)[:-1])
    assert order.result == payload.ReceiveCheck(damaged=1)


def shares(*numbers: list[int], sent: int) -> tuple[int, int, int]:
    """Lost, more than once, out of order."""
    workers = [payload.QueueCheck(1, SIZE) for _ in numbers]
    for worker, mine in zip(workers, numbers, strict=True):
        for number in mine:
            worker.count(message(number))
    receipts = [[bytes(counts) for counts in worker.receipts] for worker in workers]
    missing, twice = payload.audit_shares(receipts, [sent])
    return missing, twice, sum(worker.result.disordered for worker in workers)


def test_workers_see_each_fault() -> None:
    assert shares([0, 2, 70_000], [1, 3], sent=4) == (0, 0, 0)
    assert shares([0], [1, 3], sent=4) == (1, 0, 0)
    assert shares([0, 2], [1, 2, 3], sent=4) == (0, 1, 0)
    assert shares([0, 2, 2], [3, 1], sent=4) == (0, 1, 1)
    assert shares(*[[0] * 300 for _ in range(64)], sent=1) == (0, 64 * payload.TIMES_MOST - 1, 0)


def test_end_marks() -> None:
    order = payload.Order(2, SIZE)
    order.count(message(0, kind=payload.END))
    assert not order.at_end
    order.count(message(3, producer=1, kind=payload.END))
    assert order.at_end
    assert lost(order, [0, 3]) == 3
