"""The checks of a campaign find what they are for: each of these histories has one fault, and none without it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.replica import history
from tests.replica.history import Found
from tests.replica.workload import Call, Delivery, Load, Order, Return


def call(body: bytes, began: float, outcome: str = "ok", run: str = "a1") -> Call:
    """It takes a second."""
    return Call(body, began, began + 1, outcome, run)


def story() -> Load:
    """Jobs 1 to 3 of two servers: the first is urgent and fails once, the second is late, the third is released."""
    load = Load([], 1)
    load.calls += [call(b"single.1", 0), call(b"single.2", 20, run="b1")]
    for number, (priority, delay_s) in enumerate([(9, 0.0), (5, 5.0), (1, 0.0)], 1):
        load.orders[b"job.%d" % number] = Order(priority, delay_s)
        load.puts.append(call(b"job.%d" % number, 1))
    load.deliveries += [Delivery(b"job.1", 3, 3, 1, "a1"), Delivery(b"job.3", 4, 4, 1, "a1")]
    load.returns += [Return(call(b"job.1", 3.5), 1, 2.0), Return(call(b"job.3", 4.5), 1, None)]
    load.deliveries += [Delivery(b"job.1", 6, 6, 2, "a1"), Delivery(b"job.2", 7, 7, 1, "a1")]
    load.deliveries += [Delivery(b"job.3", 30, 30, 1, "b1"), Delivery(b"job.2", 31, 31, 2, "b1")]
    load.acks += [call(b"job.1", 6), call(b"job.3", 32, run="b1"), call(b"job.2", 33, run="b1")]
    return load


def jobs(load: Load) -> list[str]:
    return history.jobs(load)


def forget_an_ack(load: Load) -> None:
    del load.acks[1]


def lose_one_that_was_seen(load: Load) -> None:
    load.puts[2] = load.puts[2]._replace(outcome="unknown")
    del load.acks[1]


def deliver_after_the_ack(load: Load) -> None:
    load.deliveries.append(Delivery(b"job.1", 40, 40, 3, "b1"))


def deliver_what_was_never_put(load: Load) -> None:
    load.puts[0] = load.puts[0]._replace(outcome="failed")


def count_a_failure_twice_the_same(load: Load) -> None:
    load.deliveries[2] = load.deliveries[2]._replace(count=1)


def forget_a_failure_at_the_next_server(load: Load) -> None:
    load.deliveries[2] = Delivery(b"job.1", 25, 25, 1, "b1")
    load.acks[0] = call(b"job.1", 26, run="b1")


def deliver_before_the_backoff(load: Load) -> None:
    load.deliveries[2] = Delivery(b"job.1", 4.6, 5.4, 2, "a1")


def deliver_before_it_is_due(load: Load) -> None:
    load.deliveries[3] = Delivery(b"job.2", 5, 5.9, 1, "a1")


def deliver_the_least_urgent_first(load: Load) -> None:
    load.deliveries[:2] = [Delivery(b"job.3", 2.5, 2.6, 1, "a1"), Delivery(b"job.1", 3, 3, 1, "a1")]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (forget_an_ack, "never acknowledged: b'job.3'"),
        (lose_one_that_was_seen, "never acknowledged: b'job.3'"),
        (deliver_after_the_ack, "after its ack by a1"),
        (deliver_what_was_never_put, "never put: b'job.1'"),
        (count_a_failure_twice_the_same, "delivery 1 of b'job.1' by a1 after 1"),
        (forget_a_failure_at_the_next_server, "and 1 was given back to a1"),
        (deliver_before_the_backoff, "0.100 s too early: b'job.1'"),
        (deliver_before_it_is_due, "0.100 s before it is due: b'job.2'"),
        (deliver_the_least_urgent_first, "b'job.3' of priority 1 before b'job.1' of 9"),
    ],
)
def test_a_fault_of_jobs_is_found(spoil: Callable[[Load], None], words: str) -> None:
    load = story()
    assert jobs(load) == []
    spoil(load)
    assert words in "\n".join(jobs(load))


CALLS = [call(b"one", 0), call(b"two", 2, "unknown"), call(b"three", 4, "failed"), call(b"four", 6, run="b1")]
FOUND = [Found(1, sequence, body) for sequence, body in [(1, b"one"), (2, b"two"), (3, b"four")]]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (FOUND[1:], "ok of a1, and 0 times there: b'one'"),
        ([*FOUND, Found(1, 4, b"four")], "ok of b1, and 2 times there: b'four'"),
        ([*FOUND, Found(1, 4, b"two")], "unknown of a1, and 2 times there: b'two'"),
        ([*FOUND, Found(1, 4, b"three")], "failed of a1, and 1 times there: b'three'"),
    ],
)
def test_a_write_that_is_lost_or_there_twice_is_found(found: list[Found], words: str) -> None:
    assert history.writes(CALLS, FOUND) == []
    assert words in "\n".join(history.writes(CALLS, found))


def test_an_acknowledgement_of_an_old_primary_is_found() -> None:
    assert history.order(CALLS, FOUND) == []
    swapped = [Found(1, 1, b"four"), Found(1, 2, b"one")]
    assert history.order(CALLS, swapped) == ["acknowledged by b1 after one that is later in the log: b'four'"]


@pytest.mark.parametrize(
    ("sequences", "words"), [([1, 2], ""), ([1], "there [1, 0] times"), ([1, 3], "not together"), ([], "[0, 0]")]
)
def test_a_transaction_in_parts_is_found(sequences: list[int], words: str) -> None:
    load = Load([], 1)
    load.units[b"p1"] = "ok", [b"unit.1", b"unit.2"]
    found = [Found(1, sequence, b"unit.%d" % number) for number, sequence in enumerate(sequences, 1)]
    assert words in "\n".join(history.units(load, found))
    assert bool(history.units(load, found)) == bool(words)
