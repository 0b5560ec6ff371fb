"""A process killed or stopped at each point between reserve and publish, between sleep and wake. What must hold after.

Also a program, so that a mutant of the ring can be put to the same: prints `caught POINT` where one does not hold.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from mqfs import errors
from mqfs.ring import Consumer, Ring, _native, create
from tests.support.eventually import eventually
from tests.support.forks import child, ended, fork, state_of, stopped

LOCKING, LOCKED, RESERVED, HALF, COPIED, STATED, PUBLISHED, UNLOCKED, RINGS, SLEEPS, READ, ATTACHED = range(
    1, _native.STOPS
)
PUBLISHING = range(LOCKING, RINGS)
HOLDING = range(LOCKED, UNLOCKED)  # with the lock
SIZE = 1 << 16


def filled(consumer: Consumer, ring: Ring) -> None:
    """Go around the ring some times, so that what is left of older records is everywhere."""
    for turn in range(3000):
        ring.publish(1, b"old %d" % turn * (turn % 20))
        consumer.skip()


def publish_and_stop(point: int, number: int, count: int = 1) -> Any:
    def act(ring: Ring) -> None:
        for body in (b"1", b"2", b"3"):
            ring.publish(1, body)
        _native._stop_at(point, number)
        ring.publish_unit([(1, 1, b"victim %d " % turn + bytes(1000)) for turn in range(count)])

    return act


def check_killed(point: int, count: int) -> None:
    """A publisher dies there: it published all or nothing, and no reader waits for the rest."""
    ring = create(SIZE)
    consumer = ring.consumer(gates=True)
    filled(consumer, ring)
    before = consumer.sequence or 3000
    assert ended(fork(ring, publish_and_stop(point, signal.SIGKILL, count))) == -signal.SIGKILL
    began = time.monotonic()
    ring.publish(1, b"survivor", b"", 1, 0, 1.0)
    assert time.monotonic() - began < 0.5
    records = consumer.records(100, 1.0)
    victims = count if point >= PUBLISHED else 0
    bodies = [record[6].rstrip(b"\0") for record in records]
    assert bodies == [b"1", b"2", b"3", *(b"victim %d " % turn for turn in range(victims)), b"survivor"]
    assert [record[0] for record in records] == list(range(before + 1, before + 5 + victims))
    assert ring.recovered == (point in HOLDING)


def check_stopped(point: int) -> None:
    """A publisher stands still there: readers read on, others get a timely error; then it continues as before."""
    ring = create(SIZE)
    consumer = ring.consumer(gates=True)
    with child(ring, publish_and_stop(point, signal.SIGSTOP)) as pid:
        stopped(pid)
        assert [bytes(body) for body in consumer.bodies(3, 1.0)] == [b"1", b"2", b"3"]
        others = 0
        for timeout in (0, 0.05):
            try:
                ring.publish(1, b"other", b"", 1, 0, timeout)
                others += 1
            except errors.Again:
                assert point in HOLDING
        assert others == (0 if point in HOLDING else 2)
        os.kill(pid, signal.SIGCONT)
        assert ended(pid) == 0
    bodies = [body[:6] for body in consumer.bodies(10, 1.0)]
    assert sorted(bodies) == [b"other"] * others + [b"victim"]
    assert ring.recovered == 0


def check_overwritten(point: int) -> None:
    """A publisher dies while it overwrites: a reader of what was there never gets torn bytes."""
    ring = create(SIZE)
    reader = ring.consumer()
    while ring.tail < SIZE - 2000:
        ring.publish(1, b"r" * 500)

    def act(again: Ring) -> None:
        _native._stop_at(point, signal.SIGKILL)
        again.publish(1, b"w" * 30_000)

    assert ended(fork(ring, act)) == -signal.SIGKILL
    try:
        body = reader.body(0)
    except errors.FellBehind:
        assert point >= RESERVED
    else:
        assert body == b"r" * 500
        assert point < RESERVED
    ring.publish(1, b"next")
    reader.skip()


def check_rings() -> None:
    """A publisher dies before its wake-up: the sleeper finds the record nevertheless, and the next wake-up works."""
    ring = create(SIZE)

    def sleep(again: Ring) -> None:
        consumer = again.consumer()
        again.publish(2, b"ready")
        assert consumer.body(5.0) == b"ready"
        assert consumer.body(5.0) == b"1"
        assert consumer.body(5.0) == b"2"

    follower = ring.consumer()
    with child(ring, sleep) as sleeper:
        assert follower.body(5.0) == b"ready"

        def act(again: Ring) -> None:
            eventually(lambda: state_of(sleeper) == "S")
            _native._stop_at(RINGS, signal.SIGKILL)
            again.publish(1, b"1")

        assert ended(fork(ring, act)) == -signal.SIGKILL
        assert follower.body(1.0) == b"1"
        ring.publish(1, b"2")
        began = time.monotonic()
        assert ended(sleeper) == 0
        assert time.monotonic() - began < 1.0


def check_consumer(point: int, number: int) -> None:
    """A consumer that gates dies or stands still there. Dead it gates no more, at once; alive it does."""
    ring = create(SIZE)

    def act(again: Ring) -> None:
        if point == ATTACHED:
            _native._stop_at(point, number)
        consumer = again.consumer(gates=True)
        if point != ATTACHED:
            _native._stop_at(point, number)
        again.publish(2, b"ready")
        while True:
            consumer.body(10.0)

    with child(ring, act) as pid:
        if number == signal.SIGKILL:
            assert ended(pid) == -signal.SIGKILL
            began = time.monotonic()
            for _ in range(100):
                ring.publish(1, bytes(1000), b"", 1, 0, 1.0)
            assert time.monotonic() - began < 0.5
            assert ring.slots() == []
            assert ring.recovered == (point == ATTACHED)
            return
        stopped(pid)
        published = 0
        try:
            for _ in range(100):
                ring.publish(1, bytes(1000), b"", 1, 0, 0.05)
                published += 1
        except errors.Again:
            pass
        assert published < 70
        assert point == ATTACHED or [row[1:] for row in ring.slots()] == [(pid, ring.slots()[0][2], True, True)]
        os.kill(pid, signal.SIGCONT)
        for _ in range(200):
            ring.publish(1, bytes(1000), b"", 1, 0, 5.0)


def checks() -> list[tuple[str, Any, tuple[int, ...]]]:
    return [
        *(("killed", check_killed, (point, count)) for point in PUBLISHING for count in (1, 3)),
        *(("stopped", check_stopped, (point,)) for point in PUBLISHING),
        *(("overwritten", check_overwritten, (point,)) for point in range(LOCKING, PUBLISHED)),
        ("rings", check_rings, ()),
        *(
            ("consumer", check_consumer, (point, number))
            for point in (SLEEPS, READ, ATTACHED)
            for number in (signal.SIGKILL, signal.SIGSTOP)
        ),
    ]


def main(only: str) -> None:
    for name, check, arguments in checks():
        if name != only:
            continue
        try:
            check(*arguments)
        except (AssertionError, errors.MqfsError):
            print("caught", name, *arguments, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
