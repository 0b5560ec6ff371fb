"""What a reader had claimed when it went comes again, in portions: nothing is lost, or served twice, meanwhile."""

from __future__ import annotations

import contextlib
import os
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from mqfs import limits
from mqfs.model import NEVER, Wait
from tests.support.calls import lines
from tests.support.queues import Queues, read, say, waits

COUNT = 700  # more than two portions


@pytest.fixture
def queues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Queues:
    """A consumer `w`, and a reader of it that went with all messages claimed; no portion but the first is done."""
    monkeypatch.setattr(limits, "SLICE_S", 0)
    queues = Queues("replay all", path=tmp_path / "store")
    queues.consumer("w")
    return queues


def claim(queues: Queues) -> Any:
    writer, reader = queues.at("s", os.O_WRONLY), queues.at(".consumers/w", os.O_RDWR)
    for number in range(COUNT):
        writer.write(b"%d" % number)
        assert not isinstance(reader.read(100), Wait)
    return reader


def go_on(queues: Queues) -> None:
    queues.clock.forward(0.001)
    queues.tree.run_timers()


def serve(reader: Any) -> list[int]:
    """All that it is handed without waiting, acknowledged."""
    bodies = []
    while not isinstance(step := reader.read(100), Wait):
        bodies.append(int(step))
        reader.write(b"ack\n")
    step.cancel()
    return bodies


def test_each_comes_once_while_the_rest_is_still_claimed(queues: Queues) -> None:
    claim(queues).close()
    consumer, reader = queues.group.consumers["w"], queues.at(".consumers/w", os.O_RDWR)
    portions: list[list[int]] = []
    while sum(map(len, portions)) < COUNT:
        left = len(consumer.claims)
        portions.append(serve(reader))
        assert portions[-1]
        assert len(consumer.claims) == left
        go_on(queues)
    assert list(chain.from_iterable(portions)) == list(range(COUNT))
    assert len(portions) > 2
    assert consumer.counts.failed == COUNT
    assert not consumer.claims
    assert not consumer.state.progress.unacked


def test_a_reader_that_waits_is_served_by_the_next_portion(queues: Queues) -> None:
    first = claim(queues)
    reader = queues.at(".consumers/w", os.O_RDWR)
    wait = reader.read(100)
    first.close()
    assert wait.result() == b"0"
    reader.write(b"ack\n")
    assert len(serve(reader)) < COUNT - 1
    wait = reader.read(100)
    assert not wait.settled
    go_on(queues)
    assert wait.settled


@pytest.mark.parametrize("clean", [True, False])
def test_a_stop_in_between_loses_none(queues: Queues, clean: bool) -> None:
    claim(queues).close()
    go_on(queues)
    queues.restart(clean=clean)
    assert sorted(serve(queues.at(".consumers/w", os.O_RDWR))) == list(range(COUNT))


def test_a_seek_in_between_counts_for_those_that_are_still_claimed(queues: Queues) -> None:
    claim(queues).close()
    reader = queues.at(".consumers/w", os.O_RDWR)
    reader.write(b"seek -5\n")
    assert serve(reader) == list(range(COUNT - 5, COUNT))
    for _ in range(5):
        go_on(queues)
    assert serve(reader) == []


def test_a_lease_that_runs_out_in_between_is_one_failure(queues: Queues) -> None:
    queues.ctl("lease 1s", "backoff 0s 0s")
    claim(queues).close()
    queues.clock.forward(2)
    for _ in range(5):
        go_on(queues)
    consumer = queues.group.consumers["w"]
    assert consumer.counts.failed == COUNT
    assert sorted(serve(queues.at(".consumers/w", os.O_RDWR))) == list(range(COUNT))


def test_what_another_has_claimed_in_between_stays_with_it(queues: Queues) -> None:
    queues.ctl("lease 1s", "backoff 0s 0s")
    claim(queues).close()
    queues.clock.forward(2)
    consumer, reader = queues.group.consumers["w"], queues.at(".consumers/w", os.O_RDWR)
    claimed = 0
    while claimed < COUNT:  # leases end while portions are still to come back
        if isinstance(step := reader.read(100), Wait):
            assert step.cancel()
            go_on(queues)
        else:
            claimed += 1
    for _ in range(5):
        go_on(queues)
    assert len(consumer.claims) == COUNT
    assert serve(queues.at(".consumers/w", os.O_RDWR)) == []


def test_a_transient_consumer_goes_when_the_last_came_back(queues: Queues) -> None:
    queues.consumer("w", "transient")
    claim(queues).close()
    assert "w" in queues.group.consumers
    for _ in range(5):
        go_on(queues)
    assert "w" not in queues.group.consumers


def test_what_failed_too_often_becomes_a_dead_letter(queues: Queues) -> None:
    queues.ctl("retries 1")
    queues.stream("dead")
    claim(queues).close()
    for _ in range(5):
        go_on(queues)
    assert queues.group.consumers["w"].counts.dead == COUNT
    assert queues.group.streams["dead"].kept.count == COUNT


@pytest.mark.parametrize("gone", ["expired", "dropped"])
def test_a_delayed_message_that_is_gone_when_it_is_due_holds_back_nothing(gone: str) -> None:
    queues = Queues("replay all", "backoff 2s 2s", *["ttl 2s"] * (gone == "expired"))
    queues.consumer()
    queues.write("s", b"1")
    worker = queues.worker()
    assert read(worker) == b"1"
    assert waits(worker)
    say(worker, "nack")
    if gone == "dropped":
        queues.ctl("drop s 1")
    queues.pass_time(3)
    queues.write("s", b"2")
    assert read(worker) == b"2"
    say(worker, "ack")
    assert queues.stats()["low"] == 3


def test_looking_for_messages_that_are_gone_costs_no_more_each_time() -> None:
    q = Queues()
    q.consumer("w")
    worker = q.worker("w")
    for _ in range(50):
        q.put(b"x", ttl="3s")
        assert read(worker) == b"x"
        say(worker, "nack 2s")
    q.pass_time(5)
    worker.close()
    for _ in range(100):
        with contextlib.closing(q.worker("w")) as other:
            assert waits(other)
    steps = len(other.consumer.dispatcher.gap_steps(NEVER))
    q.write("s", b"1")
    worker = q.worker("w")
    assert read(worker) == b"1"
    say(worker, "ack")
    assert q.stats()["low"] == q.group.log.end.next
    assert steps <= 50 * 32


@pytest.mark.parametrize("select", ["", "select s"])
def test_a_message_that_is_released_again_and_again_is_kept_in_mind_once(select: str) -> None:
    q = Queues()
    q.consumer("w")
    q.stream("t")
    q.put(b"other", "t", priority=9)
    worker = q.worker("w", *[select] * bool(select))
    if not select:
        assert read(worker) == b"other"
    q.write("s", b"x")
    costs = []
    for times in (300, 3_000):
        for _ in range(times):
            assert read(worker) == b"x"
            say(worker, "release")
        assert read(worker) == b"x"
        costs.append(lines(lambda: worker.readable))
        say(worker, "release")
    assert costs[1] < 2 * costs[0]
