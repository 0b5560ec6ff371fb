"""Publishers wait for followers that read, for a while; none that is stuck, slow or hostile stops them."""

from __future__ import annotations

import mmap
import os
import select
import signal
import threading
import time
from collections.abc import Callable

import pytest

from mqfs import errors
from mqfs.ring import HEAD_BYTES, Ring, _native, create
from tests.ring.memory.stops import READ
from tests.support.eventually import HANG_S, eventually, patient
from tests.support.forks import ended, fork, state_of

pytestmark = pytest.mark.process

LEAST = 1 << 16
BODY = bytes(1_000)
A_RING = LEAST // 1_032
POSITION_AT = 768 + 8  # of slot 0; a slot takes 128 bytes


def overtaken(ring: Ring, rings: int) -> int:
    """How often a process that reads all the time is overtaken by one that publishes all the time."""
    reads, writes = os.pipe()

    def follow(again: Ring) -> None:
        consumer, times = again.consumer(), 0
        os.write(writes, b"r")
        while True:
            try:
                records = consumer.records(20, HANG_S)
            except errors.FellBehind:
                times += 1
                continue
            if records[-1][6] == b"end":
                os.write(writes, times.to_bytes(4, "little"))
                return

    pid = fork(ring, follow)
    os.read(reads, 1)
    for _ in range(rings * A_RING):
        ring.publish(1, BODY)
    while not select.select([reads], [], [], 0.01)[0]:
        ring.publish(1, b"end")  # the one before may be what it was overtaken by
    times = int.from_bytes(os.read(reads, 4), "little")
    assert ended(pid) == 0
    os.close(reads)
    os.close(writes)
    return times


def test_a_follower_that_reads_is_not_overtaken() -> None:
    """Where it gets no processor for 10 ms, it is: so once, of some times."""
    assert any(overtaken(create(LEAST), 50) == 0 for _ in range(50))


def stopped(ring: Ring) -> Callable[[], object]:
    pid = fork(ring, lambda again: (again.consumer(), time.sleep(HANG_S))[1])
    eventually(lambda: len(ring.slots()) == 1)
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: state_of(pid) == "T")
    return lambda: (os.kill(pid, signal.SIGKILL), ended(pid))


def killed(ring: Ring) -> Callable[[], object]:
    stopped(ring)()
    return lambda: None


def idle(ring: Ring) -> Callable[[], object]:
    return ring.consumer().close


@pytest.mark.parametrize("reader", [stopped, killed, idle])
def test_a_follower_that_stands_still_costs_once(reader: Callable[[Ring], Callable[[], object]]) -> None:
    ring = create(LEAST)
    end = reader(ring)
    began = time.monotonic()
    for _ in range(2_000 * A_RING):
        ring.publish(1, BODY)
    assert time.monotonic() - began < patient(10)  # 20 s, were it 10 ms for each ring
    end()


def test_one_that_only_seems_to_read_costs_little() -> None:
    """Its word in the ring moves all the time, and never far."""
    ring = create(LEAST)
    memory = mmap.mmap(ring.fileno(), HEAD_BYTES + LEAST)
    slot = ring.consumer().slot
    at, over = POSITION_AT + 128 * slot, threading.Event()

    def crawl() -> None:
        while not over.is_set():
            position = max(int.from_bytes(memory[at : at + 8], "little"), ring.tail - LEAST)
            memory[at : at + 8] = (position + 8).to_bytes(8, "little")
            time.sleep(0.001)

    thread = threading.Thread(target=crawl)
    thread.start()
    began = time.monotonic()
    for _ in range(20 * A_RING):
        ring.publish(1, BODY)
    over.set()
    thread.join()
    assert time.monotonic() - began < patient(20 * 2 * 0.05 + 10)


def test_a_publisher_that_may_not_wait_does_not() -> None:
    ring = create(LEAST)
    follower = ring.consumer()
    for _ in range(2 * A_RING):
        ring.publish(1, BODY, b"", 1, 0, 0)
    with pytest.raises(errors.FellBehind):
        follower.records(1, 0)


def test_what_is_published_now_or_not_at_all_overtakes_nobody() -> None:
    ring = create(LEAST)
    follower, count = ring.consumer(), 0
    while ring.publish_now({"s": 1}, "s", BODY):
        count += 1
    assert count == len(follower.records(1_000, 0)) == A_RING
    assert ring.publish_now({"s": 1}, "s", BODY)
    tail = ring.tail
    for stream, body in (("s", b""), ("s", "text"), ("s", bytearray(9)), ("t", b"unknown"), (b"s", b"bytes")):
        assert ring.publish_now({"s": 1}, stream, body) is None  # type: ignore[arg-type]
        assert ring.publish_pairs({"s": 1}, [("s", BODY), (stream, body)], 1_000) is None
    assert ring.publish_pairs({"s": 1}, [("s", BODY), ["s", BODY]], 1_000) is None
    assert ring.publish_pairs({"s": 1}, [("s", BODY)], 999) is None
    ring.retire()
    assert ring.publish_now({"s": 1}, "s", BODY) is None
    assert ring.tail == tail
    ring.close()
    assert ring.publish_now({"s": 1}, "s", BODY) is None


def test_one_that_was_given_up_is_waited_for_again() -> None:
    """Once it has caught up."""
    ring = create(LEAST)
    follower = ring.consumer()
    for _ in range(2 * A_RING):
        ring.publish(1, BODY)
    with pytest.raises(errors.FellBehind):
        follower.records(1, 0)
    assert len(follower.records(10_000, 0)) == 0
    got = 0
    over = threading.Event()

    def read() -> None:
        nonlocal got
        while not over.is_set():
            got += len(follower.records(10, 0.01))

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(A_RING * 3 // 4):
        ring.publish(1, BODY)
    eventually(lambda: got == A_RING * 3 // 4)
    over.set()
    thread.join()


@pytest.mark.parametrize("what", ["records", "bodies"])
def test_what_is_published_before_it_learns_that_it_was_overtaken_is_not_lost(what: str) -> None:
    """A call that was overtaken gives what it had read before, and the next one raises: reading continues where the
    ring ended at the first one."""
    ring = create(LEAST)
    reads, writes = os.pipe()

    def follow(again: Ring) -> None:
        follower = again.consumer()
        again.publish(1, b"read")
        again.publish(1, b"overwritten")
        _native._stop_at(READ, signal.SIGSTOP)
        assert len(getattr(follower, what)(10, 0)) == 1
        os.write(writes, b"r")
        signal.raise_signal(signal.SIGSTOP)
        with pytest.raises(errors.FellBehind):
            getattr(follower, what)(10, 0)
        assert follower.body(0) == b"meanwhile"

    pid = fork(ring, follow)
    eventually(lambda: state_of(pid) == "T")
    for _ in range(2 * A_RING):
        ring.publish(1, BODY, b"", 1, 0, 0)
    os.kill(pid, signal.SIGCONT)
    os.read(reads, 1)
    eventually(lambda: state_of(pid) == "T")
    ring.publish(1, b"meanwhile")
    os.kill(pid, signal.SIGCONT)
    assert ended(pid) == 0
    os.close(reads)
    os.close(writes)
