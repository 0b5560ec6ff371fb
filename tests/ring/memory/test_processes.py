"""Several publishers and consumers, each a process: exact counts, one order, and the same under random kills."""

from __future__ import annotations

import os
import random
import signal
import struct
import time
from collections.abc import Callable
from typing import Literal

import pytest

from mqfs import errors
from mqfs.ring import Consumer, Ring, create
from tests.support.campaign import seed, size
from tests.support.eventually import HANG_S, eventually
from tests.support.forks import child, ended, fork

pytestmark = pytest.mark.process

HEAD = struct.Struct("<IQ")  # publisher, its count


def publisher(name: int, count: int, batch: int) -> Callable[[Ring], None]:
    def act(ring: Ring) -> None:
        bodies = [HEAD.pack(name, number) + bytes(number % 200) for number in range(count)]
        if batch == 1:
            for body in bodies:
                ring.publish(name, body)
        else:
            for at in range(0, count, batch):
                ring.publish_many(name, bodies[at : at + batch])

    return act


def digest(records: list[tuple[int, int, int, int, int, bytes, bytes]], state: list[int]) -> None:
    """Fold what is to be the same at all consumers: sequences, streams and counts, in order."""
    for record in records:
        state[0] = hash((state[0], record[0], record[2], record[6]))


@pytest.mark.parametrize("batch", [1, 50])
@pytest.mark.parametrize("wait", ["yield", "block"])
def test_all_consumers_see_one_order_and_each_publisher_its_own(batch: int, wait: Literal["yield", "block"]) -> None:
    publishers, count = 3, size(60_000)
    ring = create(1 << 18)
    mine = ring.consumer(gates=True, wait=wait)
    reads, writes = os.pipe()
    ready = ring.consumer()

    def follow(again: Ring) -> None:
        consumer = again.consumer(gates=True, wait=wait)
        again.publish(99, b"ready")
        seen, state = 0, [0]
        while seen < publishers * count:
            records = [record for record in consumer.records(100, 60.0) if record[2] != 99]
            seen += len(records)
            digest(records, state)
        os.write(writes, struct.pack("<qQ", state[0], seen))

    consumers = [fork(ring, follow) for _ in range(2)]
    for _ in consumers:
        assert ready.record(20.0)
    ready.close()
    pids = [fork(ring, publisher(name, count, batch)) for name in range(publishers)]
    following, seen, state, last = [0] * publishers, 0, [0], 2
    assert len(mine.records(2, 5.0)) == 2
    while seen < publishers * count:
        records = mine.records(100, 60.0)
        assert [record[0] for record in records] == list(range(last + 1, last + 1 + len(records)))
        last += len(records)
        for record in records:
            name, number = HEAD.unpack_from(record[6])
            assert (name, number) == (record[2], following[record[2]])
            assert len(record[6]) == HEAD.size + number % 200
            following[name] += 1
        seen += len(records)
        digest(records, state)
    assert [ended(pid) for pid in pids + consumers] == [0] * 5
    assert mine.record(0) is None
    for _ in consumers:
        assert struct.unpack("<qQ", os.read(reads, 16)) == (state[0], seen)
    os.close(reads)
    os.close(writes)


def drain(consumer: Consumer, following: dict[int, int], last: int) -> int:
    """Take what is there: no gap, no duplicate, nothing torn (the C side checks each CRC)."""
    for record in consumer.records(1000, 0):
        assert record[0] == last + 1
        last += 1
        name, number = HEAD.unpack_from(record[6])
        assert number == following.get(name, 0)
        assert record[6] == HEAD.pack(name, number) + bytes([name & 255]) * (number % 300)
        following[name] = number + 1
    return last


def endless(name: int, batch: int) -> Callable[[Ring], None]:
    def act(ring: Ring) -> None:
        number = 0
        while True:
            bodies = [HEAD.pack(name, at) + bytes([name & 255]) * (at % 300) for at in range(number, number + batch)]
            ring.publish_many(name, bodies)
            number += batch

    return act


def eager(ring: Ring) -> None:
    consumer = ring.consumer(gates=True)
    while True:
        consumer.bodies(10)


@pytest.mark.slow
def test_random_kills_of_publishers_and_consumers() -> None:
    """No gap, no duplicate, no torn record, no stall."""
    rounds, chance = size(3000), random.Random(seed())
    ring = create(1 << 18)
    consumer = ring.consumer(gates=True)
    following: dict[int, int] = {}
    last, longest, names = 0, 0.0, iter(range(1, 1 << 30))

    def spawn(kind: int) -> int:
        return fork(ring, eager if kind == 3 else endless(next(names), chance.choice((1, 1, 7))))

    pids = [spawn(kind) for kind in range(4)]
    try:
        for _ in range(rounds):
            for _ in range(chance.randrange(3)):
                last = drain(consumer, following, last)
            time.sleep(chance.random() * 0.0003)  # before they have filled the ring
            victim = chance.randrange(4)
            os.kill(pids[victim], signal.SIGKILL)
            assert ended(pids[victim]) == -signal.SIGKILL
            pids[victim] = spawn(victim)
            behind = ring.tail + 1  # the others publish on
            began, before = time.monotonic(), last
            while last == before or consumer.position < behind:
                last = drain(consumer, following, last)
                assert time.monotonic() - began < HANG_S, "the ring stands still"
            longest = max(longest, time.monotonic() - began)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    while consumer.position < ring.tail:
        last = drain(consumer, following, last)
    ring.publish(0, HEAD.pack(0, 0), b"", 1, 0, 1.0)
    assert drain(consumer, following, last) == last + 1
    assert len(ring.slots()) <= 2
    print(f"{rounds} kills, {last} records, {ring.recovered} with the lock, longest stall {longest * 1e3:.0f} ms")


def test_a_stopped_follower_is_overtaken_and_says_so() -> None:
    """A consumer that does not gate delays no one; continued, it gets one report and never any torn bytes."""
    ring = create(1 << 16)
    watch = ring.consumer(gates=True)

    def follow(again: Ring) -> None:
        consumer = again.consumer()
        again.publish(9, b"ready")
        fell, last = 0, 0
        while True:
            try:
                record = consumer.record(20.0)
            except errors.FellBehind:
                fell += 1
                again.publish(9, b"fell")
                continue
            assert record is not None
            assert record[0] > last
            last = record[0]
            if record[2] == 1:
                number = int(record[6][:8])
                assert record[6] == b"%08d" % number * 20
            if record[6] == b"end":
                assert fell == 1
                return

    with child(ring, follow) as pid:
        assert watch.body(20.0) == b"ready"
        os.kill(pid, signal.SIGSTOP)
        for number in range(5000):
            ring.publish(1, b"%08d" % number * 20)
            watch.skip()
        os.kill(pid, signal.SIGCONT)
        assert watch.body(20.0) == b"fell"
        ring.publish(2, b"end")
        assert ended(pid) == 0


def test_readers_of_a_ring_that_is_always_overwritten_never_get_torn_bytes() -> None:
    """A publisher that waits for no reader laps the readers again and again."""
    ring = create(1 << 16)

    def act(again: Ring) -> None:
        number = 0
        while True:
            again.publish_many(1, [b"%08d" % at * (50 + at % 100) for at in range(number, number + 20)])
            number += 20

    consumer = ring.consumer(wait="yield")
    fell = whole = 0
    with child(ring, act):
        began = time.monotonic()
        while (fell < size(500) or whole < size(50_000)) and (took := time.monotonic() - began) < HANG_S:
            if fell and whole and took > 3:
                break  # a machine that is busy otherwise
            try:
                record = consumer.record(5.0)
            except errors.FellBehind:
                fell += 1
                continue
            assert record is not None
            number = int(record[6][:8])
            assert record[6] == b"%08d" % number * (50 + number % 100)
            whole += 1
    assert fell
    assert whole


def test_the_kept_seat_gates_when_its_consumer_is_dead_and_goes_on_where_it_was() -> None:
    ring = create(1 << 16)
    watch = ring.consumer(gates=True)

    def journal(again: Ring) -> None:
        consumer = again.consumer(kept=True, hold=True)
        again.publish(9, b"ready")
        assert consumer.body(5.0) == b"ready"
        consumer.release()
        assert consumer.body(20.0) == b"0"
        again.publish(9, b"read, not released")
        while True:
            signal.pause()

    with child(ring, journal) as pid:
        assert watch.body(20.0) == b"ready"
        with pytest.raises(errors.Busy):
            ring.consumer(kept=True)
        ring.publish(1, b"0")
        eventually(lambda: watch.record(0.1) is not None and watch.sequence == 3)
        os.kill(pid, signal.SIGKILL)
        assert ended(pid) == -signal.SIGKILL
    published = [b"0", b"read, not released"]

    def fill() -> None:
        while True:
            body = b"%d" % len(published) * 50
            ring.publish(1, body, b"", 1, 0, 0)
            published.append(body)
            watch.skip()

    with pytest.raises(errors.Again):
        fill()
    again = ring.consumer(kept=True, hold=True)
    assert again.bodies(10_000, 0) == published
    with pytest.raises(errors.Again):
        ring.publish(1, bytes(1000), b"", 1, 0, 0)
    again.release()
    ring.publish(1, bytes(1000), b"", 1, 0, 0)
