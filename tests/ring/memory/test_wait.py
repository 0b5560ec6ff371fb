"""Waiting: for records, for room, for the lock, for what is committed; with time-outs, signals and threads."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import pytest

from mqfs import errors
from mqfs.ring import Ring, bell, create, wait_any
from tests.support.eventually import HANG_S, eventually, patient
from tests.support.forks import child, ended, state_of

LEAST = 1 << 16
LOCK, DATA, SPACE, COMMIT = 128, 384, 512, 648  # where the words are that are waited for
DISTURBED_S = patient(10.0)
FUTEX = 98 if platform.machine() == "aarch64" else 202  # the system call's number
WAYS: list[Literal["spin", "yield", "block"]] = ["spin", "yield", "block"]


@pytest.mark.parametrize("wait", WAYS)
def test_time_outs(wait: Literal["spin", "yield", "block"]) -> None:
    ring = create(LEAST)
    consumer = ring.consumer(wait=wait, gates=True)
    calls: list[Callable[[float], Any]] = [
        consumer.body,
        consumer.record,
        lambda timeout: consumer.bodies(5, timeout) or None,
        lambda timeout: consumer.range(9, timeout),
    ]
    for call in calls:
        for timeout in (0, -1, 0.03):
            began = time.monotonic()
            assert call(timeout) is None
            assert max(0.0, timeout) <= time.monotonic() - began < HANG_S
    with pytest.raises(TypeError):
        consumer.body("soon")  # type: ignore[arg-type]
    while ring.tail < LEAST - 1000:
        ring.publish(1, bytes(500))
    for timeout in (0, 0.03):
        began = time.monotonic()
        with pytest.raises(errors.Again) as error:
            ring.publish_many(1, [bytes(500)] * 5, timeout)
        assert error.value.published <= 1  # type: ignore[attr-defined]
        assert timeout <= time.monotonic() - began < HANG_S


@pytest.mark.process
@pytest.mark.parametrize("wait", WAYS)
def test_a_signal_ends_a_wait(wait: Literal["spin", "yield", "block"]) -> None:
    ring = create(LEAST)
    waits: list[Callable[[Ring], Any]] = [
        lambda again: again.consumer(wait=wait).body(),
        lambda again: again.wait_committed(5),
        lambda again: [again.publish(1, bytes(1000)) for _ in range(100)],
    ]
    watch = ring.consumer()
    for call in waits:

        def act(again: Ring, call: Callable[[Ring], Any] = call) -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            gate = again.consumer(gates=True)
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012
                again.publish(9, b"ready")
                call(again)
            gate.close()

        with child(ring, act) as pid:
            while watch.body(20.0) != b"ready":
                pass
            if wait == "block":
                eventually(lambda pid=pid: state_of(pid) == "S")  # type: ignore[misc]
            os.kill(pid, signal.SIGINT)
            assert ended(pid) == 0
        watch.skip()


@pytest.mark.parametrize("wait", WAYS)
def test_a_thread_waits_while_another_publishes(wait: Literal["spin", "yield", "block"]) -> None:
    ring = create(LEAST)
    consumer = ring.consumer(wait=wait, gates=True)
    found: list[bytes | None] = []
    thread = threading.Thread(target=lambda: found.extend(consumer.body(20.0) for _ in range(300)))
    thread.start()
    for number in range(300):
        ring.publish(1, b"%d" % number * 300)
    thread.join(HANG_S)
    assert found == [b"%d" % number * 300 for number in range(300)]


def test_any_of_several_rings_ends_a_wait() -> None:
    rings = [create(LEAST) for _ in range(3)]
    began = time.monotonic()
    if not wait_any([(ring, ring.tail) for ring in rings], bell(), 0.03):
        pytest.skip("futex_waitv(2) is missing")
    assert time.monotonic() - began >= 0.03
    changes: list[Callable[[], object]] = [
        lambda: rings[2].publish(1, b"x"),
        lambda: rings[0].retire(0),
        lambda: bell(True),
    ]
    for change in changes:
        rows = [(ring, ring.tail) for ring in rings if not ring.retired]
        thread = threading.Thread(target=wait_any, args=(rows, bell(), HANG_S))
        thread.start()
        change()
        thread.join(HANG_S / 2)
        assert not thread.is_alive()
    assert wait_any([(ring, 0) for ring in [rings[2]] * 200], bell(), HANG_S)  # it has a record already
    with pytest.raises(TypeError):
        wait_any([(rings[1], 0), (1, 0)], bell(), 0)  # type: ignore[list-item]
    rings[1].close()


def test_one_thread_at_a_time() -> None:
    ring = create(LEAST)
    consumer = ring.consumer()
    thread = threading.Thread(target=consumer.body)
    thread.start()

    def refuses() -> bool:
        try:
            consumer.body(0)
        except errors.Busy:
            return True
        return False

    eventually(refuses)
    for call in (ring.close, consumer.close):
        with pytest.raises(errors.Busy):
            call()
    ring.publish(1, b"x")
    thread.join(HANG_S)
    consumer.close()
    ring.close()
    for late in (lambda: ring.publish(1, b""), lambda: consumer.body(0), lambda: ring.size):
        with pytest.raises(errors.Stale):
            late()
    ring.close()


def test_committed() -> None:
    ring = create(LEAST, sequence=10)
    assert ring.committed == 9
    assert ring.wait_committed(9, 0)
    assert not ring.wait_committed(10, 0.01)
    thread = threading.Thread(target=lambda: found.append(ring.wait_committed(12, 20.0)))
    found: list[bool] = []
    thread.start()
    ring.commit(11)
    ring.commit(12)
    thread.join(HANG_S)
    assert found == [True]


def test_sequences_are_given_as_granted() -> None:
    ring = create(LEAST)
    ring.grant(4)
    assert ring.publish_many(1, [b"a", b"b"], 0) == 2
    with pytest.raises(errors.Again, match="granted"):
        ring.publish_many(1, [b"c", b"d"], 0)
    assert ring.publish(0, b"{}", b"", 3, 0, 0) == 2
    thread = threading.Thread(target=lambda: found.append(ring.publish_many(1, [b"c", b"d"], 20.0)))
    found: list[int] = []
    thread.start()
    ring.grant(100)
    thread.join(HANG_S)
    assert found == [4]


def test_a_retired_ring_is_read_to_its_end() -> None:
    ring = create(LEAST)
    consumer = ring.consumer()
    ring.publish(1, b"last")
    assert ring.retire(0)
    assert ring.retired
    assert ring.final is None
    with pytest.raises(errors.Stale, match="newer generation"):
        ring.publish(1, b"")
    assert consumer.body(0) is None  # whether it was taken is not known yet
    ring.end(ring.tail)
    assert consumer.body() == b"last"
    with pytest.raises(errors.Stale):
        consumer.body()
    assert not ring.wait_committed(1, 0)
    ring.commit(1)
    assert ring.wait_committed(1, 0)  # what was taken is committed, though the ring has ended


def test_what_was_not_taken_was_not_published() -> None:
    ring = create(LEAST)
    consumer = ring.consumer()
    ring.publish(1, b"taken")
    end = ring.tail
    ring.publish(1, b"not taken")
    ring.retire()
    ring.end(end)
    assert consumer.body() == b"taken"
    with pytest.raises(errors.Stale):
        consumer.body()


def test_seats_are_bounded_and_given_again() -> None:
    ring = create(LEAST)
    consumers = [ring.consumer(gates=True) for _ in range(63)]
    assert sorted(consumer.slot for consumer in consumers) == list(range(1, 64))
    with pytest.raises(errors.Busy):
        ring.consumer()
    slot = consumers.pop(10).slot
    assert ring.consumer().slot == slot
    with pytest.raises(ValueError, match="wait"):
        ring.consumer(wait="sleep")  # type: ignore[arg-type]


def test_times_never_go_back() -> None:
    late = time.time_ns() + 10**15
    ring = create(LEAST, time_ns=late)
    consumer = ring.consumer()
    ring.publish_many(1, [b""] * 3)
    assert [record[1] for record in consumer.records(9)] == [late] * 3


@contextmanager
def woken(ring: Ring, at: int, value: int | None = None) -> Iterator[None]:
    """Processes that keep waking the waiters for that word of the ring: any that is attached may, as often as it
    likes. They end after DISTURBED_S. `value`: of the word meanwhile."""
    memory = mmap.mmap(ring.fileno(), 4_096)
    word = ctypes.c_uint32.from_buffer(memory, at)
    before, word.value = word.value, word.value if value is None else value
    wake, began = ctypes.CDLL(None, use_errno=True).syscall, time.monotonic()

    def disturb(_: Ring) -> None:
        while time.monotonic() - began < DISTURBED_S:
            wake(FUTEX, ctypes.byref(word), 1, 2**31 - 1, None, None, 0)

    try:
        with ExitStack() as children:
            for _ in range(3):
                children.enter_context(child(ring, disturb))
            yield
    finally:
        word.value = before


def filled(ring: Ring) -> None:
    for bodies in ([bytes(100)] * 1_000, [bytes(100)], [b""]):
        while True:
            try:
                ring.publish_many(1, bodies, 0)
            except errors.Again:
                break


@pytest.mark.process
def test_wake_ups_by_others_do_not_extend_a_wait() -> None:
    ring = create(1 << 24)
    waits: dict[int, tuple[int | None, Callable[[], object]]] = {
        LOCK: (1 | 1 << 31, lambda: ring.retire(0.1)),  # that process lives as long as the machine
        SPACE: (None, lambda: ring.publish(1, b"x", b"", 1, 0, 0.1)),
        COMMIT: (None, lambda: ring.wait_committed(1 << 40, 0.1)),
        DATA: (None, lambda: ring.wait(ring.tail, 0.1)),
    }
    gate = ring.consumer(gates=True, hold=True)
    filled(ring)
    for at, (value, wait) in reversed(waits.items()):
        with woken(ring, at, value):
            began = time.monotonic()
            try:
                assert not wait()
            except errors.Again:
                pass
            assert time.monotonic() - began < DISTURBED_S / 2
    gate.close()
