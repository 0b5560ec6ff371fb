"""Heaps with rows of what is gone: those are dropped a few at a time, however many there are."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from mqfs.engine.core.timers import LOOKING, Alarm, LazyHeap
from tests.support.calls import lines
from tests.support.clock import SECOND, HastyClock
from tests.support.queues import Queues, drain, say, waits


@pytest.mark.parametrize("seed", range(20))
def test_a_heap_gives_all_live_rows_in_order_and_has_few_others(seed: int) -> None:
    luck, live = random.Random(seed), dict[int, tuple[int, int]]()
    heap = LazyHeap[tuple[int, int]](lambda row: live.get(row[1]) == row)
    most = 0
    for number in range(5_000):
        most = max(most, len(live))
        action = luck.random()
        if action < 0.5:
            live[number] = luck.randrange(1_000), number
            heap.push(live[number])
        elif action < 0.8 and live:
            del live[luck.choice(list(live))]
        elif action < 0.9 and live:
            while (row := heap.pop()) not in live.values():
                pass
            assert row == min(live.values())
            del live[row[1]]
        elif action > 0.999:
            for _ in heap.examine_all():
                pass
            assert len(heap) == len(live)
        assert len(heap) <= 3 * most + 100
    rest = []
    while heap.least is not None:
        rest.append(heap.least)
        assert heap.pop() == rest[-1]
    assert [row for row in rest if live.get(row[1]) == row] == sorted(live.values())
    assert len(heap) == 0


def dropping(count: int) -> Iterator[Callable[[], None]]:
    """Messages that are delayed, after most of that many were dropped."""
    queues = Queues()
    put = queues.at(".put", os.O_RDWR)

    def delay(number: int) -> None:
        put.write(b'{"stream":"s","at":%d} x' % (2_000_000_000 + number))

    for number in range(count):
        delay(number)
    held = queues.group.held
    held.drop(list(held._streams)[: count * 3 // 5])
    for number in range(count):
        yield partial(delay, count + number)
    assert len(held._due) < 3 * len(held)


def due_at_once(count: int) -> Iterator[Callable[[], None]]:
    """The alarm at which as many delayed messages are due, all of which were dropped."""
    clock = HastyClock()
    queues = Queues(clock=clock)
    for _ in range(count):
        queues.put(b"x", delay="1h")
    queues.group.held.drop(list(queues.group.held._streams))
    clock.forward(3_600)
    clock.hasty = True
    while len(queues.group.held._due):
        yield queues.tree.run_timers


def cancelled(count: int) -> Iterator[Callable[[], None]]:
    """The alarms of many groups, which are due at once after all were cancelled."""
    clock = HastyClock()
    queues = Queues(clock=clock)
    timers = queues.group.timers
    alarms = [Alarm(timers, queues.group, LOOKING, "x", lambda now_ns: None) for _ in range(count)]
    for alarm in alarms:
        alarm.at(SECOND)
    for alarm in alarms:
        alarm.cancel()
    clock.forward(2)
    clock.hasty = True
    while timers.next_due_ns == SECOND:
        yield queues.tree.run_timers


def renewing(count: int) -> Iterator[Callable[[], None]]:
    """Renewals of the leases of that many claims."""
    queues = Queues("lease 9h", "consumer w")
    queues.write("s", *[b"x"] * count)
    worker = queues.worker()
    sequences: list[int] = []
    for _ in range(count):
        worker.read(9)
        sequences += queues.group.consumers["w"].claims.keys() - set(sequences)
    for sequence in 2 * sequences:
        queues.clock.engine += 1
        yield partial(say, worker, f"touch {sequence}")


def nacking(count: int) -> Iterator[Callable[[], None]]:
    """Failures of messages whose consumers have other claims: each sets an alarm to an earlier time."""
    queues = Queues("retries 0", "lease 9h")
    workers = []
    for number in range(count):
        queues.consumer(f"c{number}")
        workers.append(queues.worker(f"c{number}"))
    queues.write("s", b"x", b"y")
    for worker in workers:
        worker.read(9)
        worker.read(9)
    for worker in workers:
        yield partial(say, worker, "nack 1s")


def with_ttl(count: int, acked: int) -> Queues:
    """Messages with an own ttl, of which the first ones are acked."""
    queues = Queues("consumer w")
    put, worker = queues.at(".put", os.O_WRONLY), queues.worker("w")
    for _ in range(count):
        put.write(b'{"stream":"s","ttl":"9h"} x')
    for _ in range(acked):
        assert worker.read(9) == b"x"
        worker.write(b"ack\n")
    queues.group.retention.advance_all()
    return queues


def forgetting(count: int) -> Iterator[Callable[[], None]]:
    """The steps that forget messages with an own ttl, of which most were acked."""
    ranks, left = with_ttl(count, count * 4 // 5).group.ranks, True
    steps = ranks.forget()

    def step() -> None:
        nonlocal left
        left = next(steps, StopIteration) is None

    while left:
        yield step
    assert ranks.count_expiring() < count // 2


def expiring(count: int) -> Iterator[Callable[[], None]]:
    """The expiry of messages of which many were acked."""
    queues = with_ttl(count, count // 2)
    for _ in queues.group.ranks.forget():
        pass
    queues.clock.forward(10 * 3_600)
    while queues.group.ranks.count_expiring():
        yield lambda: queues.group.ranks.expired(queues.clock.engine_ns(), 10)


@pytest.mark.parametrize("operations", [dropping, due_at_once, cancelled, renewing, nacking, forgetting, expiring])
def test_rows_of_what_is_gone_are_dropped_a_few_at_a_time(
    operations: Callable[[int], Iterator[Callable[[], None]]],
) -> None:
    few, many = (max(lines(do) for do in operations(count)) for count in (400, 1_600))
    assert many < 1.5 * few


def test_a_worker_that_opens_again_sets_no_deadline_twice() -> None:
    queues = Queues("retries 0", "consumer w")
    queues.write("s", *[b"x"] * 100)
    worker = queues.worker()
    for _ in range(100):
        assert worker.read(9) == b"x"
        say(worker, "nack 1h")
    for _ in range(50):
        worker.close()
        worker = queues.worker()
        assert waits(worker)
    assert len(queues.group.consumers["w"].deadlines._timers) < 200
    queues.clock.forward(3_600)
    queues.tree.run_timers()
    assert len(drain(worker)) == 100
