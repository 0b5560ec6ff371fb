"""The rules of a consumer: keys in order, limits, rates, pauses and breakers."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest

from mqfs import errors, limits
from mqfs.engine.delivery import dispatcher, priorities
from mqfs.model import Wait
from tests.support.calls import calls_once
from tests.support.clock import HastyClock
from tests.support.hand import ANNA, ROOT
from tests.support.queues import BIG, Queues, drain, read, say, waits


def keyed(*rules: str, path: Path | None = None, order: str = "order key") -> Queues:
    """A consumer `w` by keys, with those rules."""
    q = Queues("backoff 10s 10s", path=path)
    q.consumer("w", *order.split())
    if rules:
        q.ctl(*rules)
    return q


def put(q: Queues, *bodies: str, **more: Any) -> None:
    """Each with its first letter as key."""
    for body in bodies:
        q.put(body.encode(), **{"key": body[0], **more})


def lines(q: Queues) -> list[str]:
    """The consumer and its rules."""
    return [row for row in q.text("ctl").splitlines() if " w" in row]


# ---------------------------------------------------------------- order key


def test_one_of_a_key_at_a_time_and_other_keys_go_on() -> None:
    q = keyed()
    first, second = q.worker(), q.worker()
    put(q, "a1", "a2", "b1", "a3")
    q.put(b"none")
    q.put(b"none either")
    assert [read(first), read(second), read(second), read(second)] == [b"a1", b"b1", b"none", b"none either"]
    assert waits(second)
    assert q.stats()["held_back"] == "key"
    wait = second.read(BIG)
    say(first, "ack")
    assert wait.result() == b"a2"
    say(second, "ack")
    assert drain(first) == [b"a3"]
    assert q.stats()["held_back"] is None


@pytest.mark.parametrize("verb", ["nack", "nack 0s", "release"])
def test_a_message_that_failed_keeps_its_place(verb: str) -> None:
    q = keyed()
    worker = q.worker()
    put(q, "a1", "a2")
    put(q, "a9", priority=9)
    assert read(worker) == b"a9"
    say(worker, "ack")
    assert read(worker) == b"a1"
    put(q, "a8", priority=9)
    say(worker, verb)
    if verb == "nack":
        assert waits(worker)
        q.pass_time(10)
    assert drain(worker) == [b"a1", b"a8", b"a2"]


def test_a_dead_letter_frees_its_key() -> None:
    q = keyed()
    worker = q.worker()
    put(q, "a1", "a2")
    assert read(worker) == b"a1"
    wait = worker.read(BIG)
    say(worker, "dead it is broken")
    assert wait.result() == b"a2"
    assert q.kept("dead")[0]["headers"]["key"] == "a"


def test_a_worker_that_dies_keeps_the_order() -> None:
    q = keyed()
    first, second = q.worker(), q.worker()
    put(q, "a1", "a2", "b1")
    assert [read(first), read(second)] == [b"a1", b"b1"]
    wait = second.read(BIG)
    first.close()
    assert wait.result() == b"a1"


@pytest.mark.parametrize("clean", [True, False])
def test_the_order_survives(tmp_path: Path, clean: bool) -> None:
    q = keyed(path=tmp_path / "store")
    worker = q.worker()
    put(q, "a1", "a2", "b1", "b2", "c1")
    assert [read(worker), read(worker)] == [b"a1", b"b1"]
    say(worker, "nack 1")
    say(worker, "ack 3")
    q.restart(clean=clean)
    assert drain(q.worker(), ack=False) == [b"b2", b"c1"]
    q.pass_time(10)
    assert drain(q.worker()) == [b"a1", b"a2"]


def test_what_was_delivered_before_a_start_is_looked_up_in_portions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "_STEPS", 1)
    clock = HastyClock()
    q = Queues("backoff 10s 10s", path=tmp_path / "store", clock=clock)
    q.consumer("w", "order", "key")
    worker = q.worker()
    put(q, *(f"{key}{number}" for number in (1, 2) for key in "abcdefgh"))
    assert drain(worker, ack=False) == [b"%c1" % key for key in b"abcdefgh"]
    q.restart()
    worker, clock.hasty = q.worker(), True
    wait = worker.read(BIG)
    for _ in range(10):
        q.tree.run_timers()
    assert isinstance(wait, Wait)
    assert not wait.settled
    put(q, "a3", "i1")
    until_settled(q, wait)
    clock.hasty = False
    say(worker, "ack")
    given = [wait.result(), *drain(worker)]
    assert sorted(given) == sorted([b"%c%d" % (key, n) for key in b"abcdefgh" for n in (1, 2)] + [b"a3", b"i1"])
    assert all(given.index(b"%c1" % key) < given.index(b"%c2" % key) for key in b"abcdefgh")


@pytest.mark.parametrize("meanwhile", [(), ("clear",), ("eof s", "consumer v")])
def test_messages_with_headers_are_looked_up_in_portions_after_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: tuple[str, ...]
) -> None:
    """Writes and commands meanwhile have the same effect as when all are known."""
    monkeypatch.setattr(priorities, "_HEADS", 2)
    clock = HastyClock()
    q = Queues("replay all", path=tmp_path / "store", clock=clock)
    q.consumer()
    for number in range(40):
        q.put(b"%d" % number, priority=9 if number == 33 else 5, key="k")
    q.put(b"gone", ttl="1s")
    q.put(b"single", single=True)
    q.restart()
    clock.forward(2)
    worker, clock.hasty = q.worker(), True
    wait = worker.read(BIG)
    for _ in range(10):
        q.tree.run_timers()
    assert isinstance(wait, Wait)
    assert not wait.settled, "there are 20 portions"
    if meanwhile != ("clear",):
        q.put(b"urgent", priority=8)
    q.ctl(*meanwhile)
    q.put(b"last", priority=9)
    until_settled(q, wait)
    clock.hasty = False
    say(worker, "ack")
    given = [wait.result(), *drain(worker)]
    if meanwhile == ("clear",):
        assert given == [b"last"]
    else:
        rest = [b"%d" % number for number in range(40) if number != 33]
        assert given == [b"33", b"last", b"urgent", *rest, b"single"]


def test_large_messages_with_headers_are_looked_up_a_few_at_a_time(tmp_path: Path) -> None:
    clock = HastyClock()
    q = Queues("replay all", path=tmp_path / "store", clock=clock)
    q.consumer()
    for _ in range(200):
        q.put(bytes(300_000), priority=6)
    q.restart()
    worker, clock.hasty = q.worker(), True
    wait = worker.read(BIG)
    for _ in range(9):
        q.tree.run_timers()
    assert isinstance(wait, Wait)
    assert not wait.settled
    until_settled(q, wait)


def test_a_seek_ends_what_is_looked_up_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "_STEPS", 1)
    clock = HastyClock()
    q = Queues(clock=clock)
    q.consumer("w", "order", "key")
    worker = q.worker()
    put(q, *"abcdefgh")
    assert len(drain(worker, ack=False)) == 8
    say(worker, "release 1-8")
    q.ctl("limit w 2 key", "consumer w order sequence")
    clock.hasty = True
    wait = worker.read(BIG)
    q.tree.run_timers()
    say(worker, "seek 7")
    until_settled(q, wait)
    clock.hasty = False
    assert [wait.result(), *drain(worker, ack=False)] == [b"g", b"h"]


def until_settled(q: Queues, wait: Wait[bytes]) -> None:
    """Ring the alarm until it is."""
    for _ in range(1_000):
        if not wait.settled:
            q.tree.run_timers()
    assert wait.settled


def test_many_failed_messages_of_one_key_cost_no_more_than_few() -> None:
    few, many = seconds_with(500), seconds_with(8_000)
    assert many[0] < 64 * few[0], "the first claim looks each of them up once"
    assert many[1] < 2 * few[1]


def seconds_with(failed: int) -> tuple[float, float]:
    """Processor time, with that number of failed messages of one key: the first claim, and 500 that fail again."""
    q = Queues("backoff 0s 0s", "retries 0")
    q.consumer()
    worker = q.worker()
    put(q, *["a"] * failed)
    assert len(drain(worker, ack=False)) == failed
    say(worker, f"release 1-{failed}")
    q.ctl("consumer w order key")
    times = [time.process_time()]
    read(worker)
    times.append(time.process_time())
    for _ in range(500):
        say(worker, "nack")
        read(worker)
    return times[1] - times[0], time.process_time() - times[1]


def test_a_delayed_message_comes_in_its_turn() -> None:
    q = keyed()
    worker = q.worker()
    put(q, "a1", delay="5s")
    put(q, "a2", "a3")
    assert read(worker) == b"a2"
    q.pass_time(5)
    say(worker, "ack")
    assert drain(worker) == [b"a3", b"a1"]


def test_a_message_for_another_reader_holds_back_the_next_of_its_key() -> None:
    q = keyed()
    q.stream("private")
    q.tree.setattr(ROOT, q.group.streams["private"], mode=0o600)
    q.tree.setattr(ROOT, q.group.streams["s"], mode=0o666)
    q.tree.setattr(ROOT, q.group.consumers["w"], mode=0o666)
    anna = q.worker(user=ANNA)
    put(q, "a1", stream="private")
    put(q, "a2", "b1")
    assert drain(anna) == [b"b1"]
    wait = anna.read(BIG)
    root = q.worker()
    assert read(root) == b"a1"
    assert not wait.settled
    say(root, "ack")
    assert wait.result() == b"a2"


@pytest.mark.parametrize("how", ["dropped", "expired", "evicted"])
def test_one_that_goes_while_it_waits_holds_nothing_back(how: str) -> None:
    """Though it is acked with the slot of another message, which another worker claims."""
    q = keyed("retries 0")
    q.stream("private", mode=0o600)
    q.tree.setattr(ROOT, q.group.consumers["w"], mode=0o666)
    q.write("private", b"of root")
    first = q.put(b"a1", key="a")
    options = {"ttl": "5s"} if how == "expired" else {"stream": "few"} if how == "evicted" else {}
    q.stream("few")
    gone = q.put(b"a2", key="a", **options)
    q.put(b"a3", key="a")
    anna, root = q.worker(user=ANNA), q.worker()
    assert read(anna) == b"a1"
    step = anna.read(BIG)
    if how == "expired":
        q.clock.forward(10)
        q.tree.tick()
    else:
        q.ctl("clear few" if how == "evicted" else f"drop s {gone}")
    assert read(root) == b"of root"
    q.put(b"without", stream="private")
    assert read(root) == b"without"
    say(anna, f"ack {first}")
    assert isinstance(step, Wait)
    assert step.result() == b"a3"


REMOVALS = ["drop", "clear", "own ttl", "ttl", "depth", "less depth", "rm"]


def before_a2(q: Queues, how: str) -> int:
    """`a1` of stream `t`, which the group can lose that way, and 5 seconds later `a2` of stream `s`."""
    if how == "ttl":
        q.ctl("ttl 8s")
    q.ctl("full drop-old", *(["depth 1"] if how == "depth" else []))
    q.stream("t")
    q.stream("u")
    q.consumer("v")
    options = {"own ttl": {"ttl": "8s"}, "taken": {"single": True}}.get(how, {})
    first = q.put(b"a1", stream="t", key="a", **options)
    q.pass_time(5)
    put(q, "a2")
    return first


def remove_a1(q: Queues, how: str, first: int) -> None:
    if how in ("ttl", "own ttl"):
        q.pass_time(4)
    elif how == "taken":
        assert read(q.worker("v")) == b"a1"
    elif how == "rm":
        q.tree.unlink(ROOT, q.group, "t")
    elif how in ("drop", "clear"):
        q.ctl(f"drop t {first}" if how == "drop" else "clear t")
    else:
        q.put(b"newer", stream="t", key="z")
        q.ctl(*(["depth 1"] if how == "less depth" else []))


def assert_a2_waits_for_a1(q: Queues, worker: Any, how: str, first: int, is_parked: bool) -> None:
    """Until that is removed. `is_parked`: a read waits meanwhile."""
    wait = worker.read(BIG)
    assert isinstance(wait, Wait), "a1 is before it"
    if not is_parked:
        wait.cancel()
    remove_a1(q, how, first)
    assert (wait.result() if is_parked else read(worker)) == b"a2"


@pytest.mark.parametrize("is_parked", [False, True])
@pytest.mark.parametrize("rule", ["order key", "limit"])
@pytest.mark.parametrize("how", [*REMOVALS, "taken"])
def test_one_for_another_reader_that_goes_holds_nothing_back(rule: str, how: str, is_parked: bool) -> None:
    """Beside one that stays, and that the reader may not have either."""
    q = keyed(order="order key") if rule == "order key" else keyed("limit w 1 key", order="")
    first = before_a2(q, how)
    q.put(b"other", stream="u", key="x")
    worker = q.worker("w", "select s")
    assert_a2_waits_for_a1(q, worker, how, first, is_parked)


@pytest.mark.parametrize("is_parked", [False, True])
@pytest.mark.parametrize("how", REMOVALS)
def test_a_failed_one_that_goes_before_its_time_holds_nothing_back(how: str, is_parked: bool) -> None:
    q = keyed("retries 0")
    first = before_a2(q, how)
    failing, worker = q.worker("w", "select t"), q.worker("w", "select s")
    assert read(failing) == b"a1"
    say(failing, "nack 1h")
    assert_a2_waits_for_a1(q, worker, how, first, is_parked)


@pytest.mark.parametrize("gone", [1, 2])
def test_of_several_failed_ones_those_that_stay_hold_their_key(gone: int) -> None:
    """The first of three goes, or the first two; the others are still in their back-off."""
    q = keyed("retries 0")
    worker = q.worker()
    for number in (1, 2, 3):
        q.ctl("consumer w order sequence")
        put(q, f"a{number}")
        assert read(worker) == b"a%d" % number
        say(worker, f"nack {number * 100}s")
    q.ctl("consumer w order key")
    put(q, "a4")
    wait = worker.read(BIG)
    q.ctl(*[f"drop s {sequence}" for sequence in range(1, gone + 1)])
    q.pass_time(10)
    assert not wait.settled
    q.pass_time(gone * 100 + 90)
    assert wait.result() == b"a%d" % (gone + 1)


def failing_keys(count: int, clock: Any = None) -> Queues:
    """A consumer by keys: the first message of each, in `s`, is in its back-off, and the next, in `t`, waits for it."""
    q = Queues("retries 0", clock=clock)
    q.consumer("w", "order", "key")
    q.stream("t")
    failing = q.worker("w", "select s")
    for number in range(count):
        q.put(b"first", key=str(number))
    assert len(drain(failing, ack=False)) == count
    say(failing, "\n".join(f"nack {sequence} 1h" for sequence in range(1, count + 1)))
    for number in range(count):
        q.put(b"next", stream="t", key=str(number))
    assert waits(q.worker("w", "select t"))
    return q


def test_many_failed_ones_that_go_are_looked_up_in_portions() -> None:
    clock = HastyClock()
    q = failing_keys(200, clock)
    workers = [q.worker("w", "select t") for _ in range(9)]
    reads = [worker.read(BIG) for worker in workers]
    clock.hasty = True
    q.ctl("clear s")
    assert not reads[-1].settled, "it takes some portions"
    until_settled(q, reads[-1])
    clock.hasty = False
    q.pass_time(2)
    assert len(drain(workers[0], ack=False)) == 200 - 9


def test_many_failed_ones_are_not_all_looked_up_for_each_that_goes() -> None:
    """A worker waits, and the stream of the failed ones loses one with each write."""
    few, many = calls_of_cuts(10), calls_of_cuts(1_000)
    assert many < few + 100 * 1_000, "less than a hundred calls for each"


def calls_of_cuts(failed: int) -> int:
    """The calls of 100 writes with that number of keys. All that were waited for go at last."""
    q = failing_keys(failed)
    q.ctl("full drop-old", f"depth {failed}")
    q.stream("u")
    other, writer = q.worker("w", "select u"), q.at("s", os.O_WRONLY)
    assert isinstance(other.read(BIG), Wait)
    counted = calls_once(lambda: [writer.write(b"x") for _ in range(100)])
    q.pass_time(2)
    assert len(drain(q.worker("w", "select t"))) == min(100, failed)
    return counted


def test_a_message_that_expired_holds_nothing_back() -> None:
    q = keyed("retries 0")
    worker = q.worker()
    put(q, "a1", ttl="2s")
    put(q, "a2", "a3")
    assert read(worker) == b"a1"
    say(worker, "nack 1s")
    q.pass_time(1)
    q.pass_time(2)
    assert drain(worker) == [b"a2", b"a3"]


@pytest.mark.parametrize("retries", [0, 1, 5])
@pytest.mark.parametrize("gone", ["expired", "dropped", "cleared"])
@pytest.mark.parametrize("how", ["nack", "nack 1h", "nack 0s", "release", "ack", "dead", "lease", "close"])
def test_a_message_that_goes_while_it_is_claimed_holds_nothing_back(how: str, gone: str, retries: int) -> None:
    """However its claim ends, and whether it would have been a dead letter or not."""
    q = keyed(f"retries {retries}", "lease 3s" if how == "lease" else "lease 0")
    q.stream("t")
    first, second = q.worker(), q.worker()
    put(q, "a1", **({"ttl": "2s"} if gone == "expired" else {}))
    put(q, "a2", stream="t")
    assert read(first) == b"a1"
    wait = second.read(BIG)
    if gone != "expired":
        q.ctl("clear s" if gone == "cleared" else "drop s 1")
    q.pass_time(2)
    assert not wait.settled
    if how == "lease":
        q.pass_time(1)
    elif how == "close":
        first.close()
    else:
        say(first, how)
    assert wait.settled
    assert wait.result() == b"a2"
    assert "dead" not in q.group.streams
    say(second, "ack")
    assert (q.stats()["low"], q.stats()["waiting"], q.stats()["delayed"]) == (3, 0, 0)


def test_reads_of_many_messages_have_one_of_each_key() -> None:
    q = keyed()
    worker = q.worker("w", "format record")
    put(q, *(f"{key}{n}" for n in range(20) for key in "ab"))
    data = worker.read(BIG)
    assert (data.count(b"a0"), data.count(b"b0"), len(worker.claims)) == (1, 1, 2)
    say(worker, "ack 1-2")
    worker.read(BIG)
    assert sorted(worker.claims) == [3, 4]
    other = q.worker("w", "format record", "prefetch 64")
    assert waits(other)
    q.consumer("w", "order sequence")
    other.read(BIG)
    assert len(other.claims) == 36


def test_the_order_can_be_given_and_taken_away_while_messages_are_out() -> None:
    q = Queues()
    q.consumer()
    first, second = q.worker(), q.worker()
    put(q, "a1", "a2", "a3", "a4")
    assert [read(first), read(second)] == [b"a1", b"a2"]
    q.consumer("w", "order key")
    say(second, "ack")
    assert waits(second)
    wait = second.read(BIG)
    say(first, "nack 0s")
    assert wait.result() == b"a1"
    assert waits(first)
    wait = first.read(BIG)
    q.consumer("w", "order sequence")
    assert wait.result() == b"a3"
    assert read(first) == b"a4"


def test_the_search_stops_where_too_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KEY_WAITING", 10)
    q = keyed()
    worker = q.worker()
    put(q, *(f"a{n}" for n in range(15)), "b1")
    assert read(worker) == b"a0"
    assert waits(worker)
    assert q.group.consumers["w"].dispatcher.held_by_key == 10
    taken = []
    for _ in range(15):
        say(worker, "ack")
        taken.append(read(worker))
    assert sorted(taken) == sorted([*(b"a%d" % n for n in range(1, 15)), b"b1"])


def test_a_seek_forgets_what_waited() -> None:
    q = keyed("ttl 0")
    worker = q.worker()
    put(q, "a1", "a2", "a3")
    assert read(worker) == b"a1"
    assert waits(worker)
    say(worker, "seek 2")
    assert drain(worker) == [b"a2", b"a3"]


# ---------------------------------------------------------------- limit


def test_no_more_than_the_limit() -> None:
    q = keyed("limit w 2", order="")
    first, second = q.worker(), q.worker()
    put(q, "a1", "a2", "a3", "a4", "a5")
    assert [read(first), read(second)] == [b"a1", b"a2"]
    wait = first.read(BIG)
    assert not wait.settled
    assert q.stats()["held_back"] == "limit"
    say(second, "ack")
    assert wait.result() == b"a3"
    wait = second.read(BIG)
    q.ctl("limit w 3")
    assert wait.result() == b"a4"
    q.ctl("limit w 0")
    assert read(first) == b"a5"


@pytest.mark.parametrize("settle", ["ack", "nack", "release", "dead"])
def test_the_end_of_a_claim_makes_room(settle: str) -> None:
    q = keyed("limit w 1", order="")
    first, second = q.worker(), q.worker()
    put(q, "a1", "a2")
    assert read(first) == b"a1"
    wait = second.read(BIG)
    say(first, settle)
    assert wait.result() == (b"a1" if settle == "release" else b"a2")


def test_a_limit_of_a_key() -> None:
    q = keyed("limit w 2 key", "limit w 4", order="")
    worker = q.worker()
    put(q, "a1", "a2", "a3", "b1", "b2", "b3", "c1")
    assert drain(worker, ack=False) == [b"a1", b"a2", b"b1", b"b2"]
    say(worker, "nack 1 9s")
    assert drain(worker, ack=False) == [b"a3"]
    say(worker, "ack 2")
    assert drain(worker, ack=False) == [b"c1"]


def test_a_read_of_many_messages_claims_what_the_limit_has() -> None:
    q = keyed("limit w 5", order="")
    for n in range(20):
        q.at("s", os.O_WRONLY).write(b"%d" % n)
    worker, other = q.worker("w", "format record"), q.worker("w", "format record")
    worker.read(BIG)
    assert len(worker.claims) == 5
    assert waits(other)
    say(worker, "ack 1-3")
    other.read(BIG)
    assert len(other.claims) == 3


# ---------------------------------------------------------------- rate


def test_a_rate_spreads_deliveries_evenly() -> None:
    q = keyed("rate w 30/m", order="")
    worker = q.worker()
    put(q, "a1", "a2", "a3")
    assert read(worker) == b"a1"
    say(worker, "ack")
    wait = worker.read(BIG)
    q.pass_time(1)
    assert not wait.settled
    assert q.stats()["held_back"] == "rate"
    q.pass_time(1)
    assert wait.result() == b"a2"
    q.pass_time(3_600)  # which is not saved
    assert read(worker) == b"a3"
    put(q, "a4")
    assert waits(worker)


def test_a_tenth_of_a_second_may_go_at_once() -> None:
    q = keyed("rate w 100/s", order="")
    worker = q.worker("w", "format record")
    for n in range(50):
        q.at("s", os.O_WRONLY).write(b"%d" % n)
    worker.read(BIG)
    assert len(worker.claims) == 10
    assert waits(worker)
    q.clock.forward(0.05)
    q.tree.tick()
    worker.read(BIG)
    assert len(worker.claims) == 15


# ---------------------------------------------------------------- pause


def test_paused_and_resumed() -> None:
    q = keyed(order="")
    worker = q.worker()
    put(q, "a1", "a2", "a3")
    assert read(worker) == b"a1"
    q.ctl("pause w")
    say(worker, "ack")
    wait = worker.read(BIG)
    put(q, "a4")
    q.pass_time(100)
    assert not wait.settled
    assert (q.stats()["held_back"], q.stats()["waiting"]) == ("paused", 3)
    q.ctl("resume w")
    assert wait.result() == b"a2"
    assert drain(worker) == [b"a3", b"a4"]


def test_what_is_out_is_settled_while_paused() -> None:
    q = keyed("lease 5s", order="")
    worker = q.worker()
    put(q, "a1", "a2", "a3")
    for _ in range(3):
        read(worker)
    q.ctl("pause w")
    say(worker, "ack 1")
    say(worker, "nack 2")
    q.pass_time(5)
    assert (q.stats()["claimed"], q.stats()["waiting"], q.stats()["failed"]) == (0, 2, 2)


@pytest.mark.parametrize("clean", [True, False])
def test_a_pause_survives(tmp_path: Path, clean: bool) -> None:
    q = keyed("pause w 10s", path=tmp_path / "store", order="")
    put(q, "a1")
    q.pass_time(4)
    assert lines(q)[-1] == "pause w 6s"
    q.restart(clean=clean)
    worker = q.worker()
    wait = worker.read(BIG)
    q.pass_time(5)
    assert not wait.settled
    q.pass_time(1)
    assert wait.result() == b"a1"
    q.ctl("pause w")
    q.restart(clean=clean)
    q.pass_time(1_000)
    assert lines(q)[-1] == "pause w"
    assert waits(q.worker())


def test_a_clock_that_is_set_changes_no_pause() -> None:
    q = keyed("pause w 10s", order="")
    put(q, "a1")
    wait = q.worker().read(BIG)
    q.clock.wall += 10**18
    q.tree.tick()
    assert not wait.settled
    q.clock.wall -= 2 * 10**18
    q.pass_time(10)
    assert wait.result() == b"a1"


def test_seek_while_paused() -> None:
    q = keyed("pause w", order="")
    worker = q.worker()
    put(q, "a1", "a2", "a3")
    wait = worker.read(BIG)
    say(worker, "seek 2")
    assert not wait.settled
    q.ctl("resume w")
    assert wait.result() == b"a2"


# ---------------------------------------------------------------- breaker


def test_a_breaker_pauses_its_consumer(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("mqfs.engine").setLevel(logging.NOTSET)
    q = keyed("breaker w 2/1m", order="")
    worker = q.worker()
    put(q, *(f"a{n}" for n in range(9)))
    for _ in range(2):
        read(worker)
        say(worker, "dead")
    q.pass_time(60)
    for _ in range(2):
        read(worker)
        say(worker, "dead")
    assert q.stats()["held_back"] is None
    read(worker)
    say(worker, "dead")
    wait = worker.read(BIG)
    assert not wait.settled
    assert q.stats()["held_back"] == "breaker"
    text = "breaker: more than 2 dead letters in 1m, paused (resume w)"
    assert q.errors() == [text]
    assert [row.getMessage() for row in caplog.records] == [f"group {q.group.number}: consumer w: {text}"]
    assert lines(q) == ["consumer w", "breaker w 2/m", "pause w"]
    q.ctl("resume w")
    assert wait.result() == b"a5"
    for _ in range(2):  # it counts from 0
        say(worker, "dead")
        read(worker)
    assert q.stats()["held_back"] is None


def test_a_breaker_counts_what_kills_the_server(tmp_path: Path) -> None:
    q = keyed("breaker w 1/1h", "retries 1", path=tmp_path / "store", order="")
    worker = q.worker()
    put(q, "a1", "a2", "a3")
    read(worker)
    read(worker)
    q.restart(clean=False)
    assert len(q.kept("dead")) == 2
    assert waits(q.worker())
    assert q.stats()["held_back"] == "breaker"


# ---------------------------------------------------------------- the lines of ctl


RULES = ["limit w 5", "limit w 2 key", "rate w 100/s", "breaker w 10/5m", "pause w 30s"]


def test_what_is_printed_can_be_written_back() -> None:
    q, other = keyed(*RULES), Queues()
    assert lines(q) == ["consumer w order key", *RULES]
    other.ctl(*q.text("ctl").splitlines())
    assert lines(other) == lines(q)
    q.ctl("limit w 0", "limit w 0 key", "rate w 0", "breaker w 0", "resume w")
    assert lines(q) == ["consumer w order key"]
    assert q.group.consumers["w"].flow is not None
    q.consumer("w", "order sequence")
    assert lines(q) == ["consumer w"]
    assert q.group.consumers["w"].flow is None


def test_other_options_keep_the_rules() -> None:
    q = keyed(*RULES)
    q.consumer("w", "backlog", "7")
    assert lines(q) == ["consumer w backlog 7 order key", *RULES]


def test_lines_of_one_write_follow_each_other() -> None:
    q = Queues()
    q.ctl("consumer w s order key", "limit w 3", "limit w 4", "pause w", "resume w", "rate w 5/10s")
    assert lines(q) == ["consumer w s order key", "limit w 4", "rate w 5/10s"]
    q.ctl("pause w", "remove w", "consumer w")
    assert lines(q) == ["consumer w"]


@pytest.mark.parametrize("clean", [True, False])
def test_rules_survive(tmp_path: Path, clean: bool) -> None:
    q = keyed(*RULES, path=tmp_path / "store")
    for _ in range(2):  # from the changes, then from the state
        q.restart(clean=clean)
        assert lines(q) == ["consumer w order key", *RULES]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("limit w", "limit: 1 values (expected limit CONSUMER N [key])"),
        ("limit w -1", "limit: invalid number '-1'"),
        ("limit w 5 keys", "limit: unexpected word 'keys' (expected limit NAME N [key])"),
        ("rate w 5", "rate: invalid value '5' (expected a number in a time, such as 5/s or 10/5m, or 0)"),
        ("rate w 0/s", "rate: invalid value '0/s'"),
        ("rate w 5/0", "rate: invalid value '5/0'"),
        ("rate w 5/fortnight", "rate: invalid value '5/fortnight'"),
        ("rate w /s", "rate: invalid value '/s'"),
        ("rate w 1e9/s", "rate: invalid value '1e9/s'"),
        ("rate w 1000000001/s", "rate '1000000001/s': too fast"),
        ("rate w " + "9" * 5_000 + "/s", "rate: invalid value '99"),
        ("breaker w 1025/m", "breaker '1025/m': too many (expected at most 1024)"),
        ("breaker w m", "breaker: invalid value 'm'"),
        ("pause w soon", "pause: invalid duration 'soon'"),
        ("pause w 0", "pause: invalid duration '0' (expected 1ms or more, or none)"),
        ("pause w 1s 2s", "pause: 3 values (expected pause CONSUMER [DURATION])"),
        ("resume", "resume: 0 values (expected resume CONSUMER)"),
        ("consumer w order", "consumer: order without a value"),
        ("consumer w order expiry", "consumer: unknown order 'expiry' (expected"),
    ],
)
def test_lines_that_make_no_sense(line: str, text: str) -> None:
    q = keyed(*RULES)
    with pytest.raises(errors.BadCommand) as caught:
        q.ctl("replay all", line)
    assert text in caught.value.detail
    assert lines(q) == ["consumer w order key", *RULES]


@pytest.mark.parametrize("line", ["limit x 1", "rate x 1/s", "breaker x 1/s", "pause x", "resume x", "pause .s"])
def test_a_consumer_that_is_not_there(line: str) -> None:
    q = keyed()
    with pytest.raises(errors.NotFound, match=r"no consumer '.*' in group 'g'"):
        q.ctl("replay all", line)
    assert "replay off" in q.text("ctl")


def test_a_rule_that_changes_nothing_counts_on() -> None:
    q = keyed("breaker w 1/1h", order="")
    worker = q.worker()
    put(q, "a1", "a2", "a3")
    for _ in range(2):
        read(worker)
        say(worker, "dead")
        q.ctl("breaker w 1/1h", "consumer w")
    assert isinstance(worker.read(BIG), Wait)
