"""`single` messages of `.put` go to one taker only, and nothing that only reads ever gets one."""

from __future__ import annotations

import os
from pathlib import Path

from tests.queues.hand import Queues, drain, read, say, waits


def test_one_of_the_readers_that_wait_gets_it_and_none_that_only_reads() -> None:
    q = Queues()
    only, first, second = q.at("s"), q.taker(), q.taker()
    parked = [handle.read(64) for handle in (only, first, second)]
    q.put(b"x", single=True)
    assert [step.settled for step in parked] == [False, True, False]
    assert parked[1].result() == b"x"
    q.write("s", b"all")
    assert [step.result() for step in (parked[0], parked[2])] == [b"all", b"all"]


def test_it_waits_for_who_takes() -> None:
    q = Queues()
    q.put(b"x", single=True)
    assert waits(q.at("s"))
    assert read(q.taker()) == b"x"
    assert waits(q.taker())


def test_the_first_consumer_that_comes_has_it_for_itself() -> None:
    q = Queues()
    q.consumer("a")
    q.consumer("b")
    q.put(b"x", single=True)
    a, b, reader = q.worker("a"), q.worker("b"), q.taker()
    assert read(a) == b"x"
    assert waits(b)
    assert waits(reader)
    say(a, "nack 1s")
    assert waits(b)
    q.pass_time(1)
    assert waits(b)
    assert read(a) == b"x"
    say(a, "ack")
    assert waits(a)


def test_released_or_its_consumer_removed_it_is_for_anyone_again() -> None:
    q = Queues()
    q.consumer("a")
    q.consumer("b")
    q.put(b"x", single=True)
    a, b = q.worker("a"), q.worker("b")
    assert read(a) == b"x"
    assert waits(b)
    say(a, "release")
    assert read(b) == b"x"
    assert waits(a)
    say(b, "nack 1h")
    b.close()
    q.ctl("remove b")
    assert read(a) == b"x"


def test_it_survives_a_restart_taken_or_not(tmp_path: Path) -> None:
    q = Queues(path=tmp_path / "store")
    q.put(b"x", single=True)
    q.put(b"y", single=True)
    assert read(q.taker()) == b"x"
    q.restart(clean=False)
    assert drain(q.taker(), ack=False) == [b"y"]
    q.restart()
    assert waits(q.at("s", os.O_RDWR))
