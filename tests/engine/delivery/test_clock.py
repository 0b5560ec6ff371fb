"""Deadlines run on the engine clock: nothing expires and nothing is redelivered because the wall clock was set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mqfs import errors
from mqfs.model import Wait
from tests.support.clock import SECOND, MachineClock
from tests.support.queues import BIG, Queues, drain, read, refusal, say, waits

YEAR = 31_556_952 * SECOND
JUMPS = [-10 * YEAR, 10 * YEAR]


@pytest.mark.parametrize("jump", JUMPS)
def test_leases(jump: int) -> None:
    q = Queues("lease 10s", "backoff 1s 1s")
    q.consumer()
    q.write("s", b"one")
    worker, other = q.worker(), q.worker()
    assert read(worker) == b"one"
    q.pass_time(5)
    q.clock.wall += jump
    wait = other.read(BIG)
    q.pass_time(4)
    assert not wait.settled
    say(worker, "touch")
    q.clock.wall -= jump
    q.pass_time(9)
    say(worker, "touch")
    q.pass_time(11)
    assert wait.result() == b"one"


@pytest.mark.parametrize("jump", JUMPS)
def test_backoff(jump: int) -> None:
    q = Queues("backoff 10s 10s")
    q.consumer()
    q.write("s", b"one")
    worker = q.worker()
    read(worker)
    say(worker, "nack")
    q.clock.wall += jump
    q.pass_time(9)
    assert waits(worker)
    q.pass_time(1)
    assert read(worker) == b"one"


@pytest.mark.parametrize("jump", JUMPS)
def test_delays(jump: int) -> None:
    q = Queues("deliver one")
    q.put(b"by delay", delay="10s")
    q.put(b"by date", at=1_700_000_012)
    q.clock.wall += jump
    q.pass_time(9)
    assert q.shows("s") == []
    q.pass_time(1)
    assert q.shows("s") == [b"by delay"]
    q.pass_time(2)
    assert q.shows("s") == [b"by delay", b"by date"]


@pytest.mark.parametrize("own", [False, True], ids=["of the group", "of its own"])
def test_a_ttl_ends_at_its_moment(own: bool) -> None:
    """For readers and for the room that it gives, and not a nanosecond earlier."""
    q = Queues("replay all", "depth 1", "full reject", *([] if own else ["ttl 5s"]))
    early, late = q.at("s"), q.at("s")
    q.put(b"one", **({"ttl": "5s"} if own else {}))
    q.clock.forward(5)
    q.clock.wall -= 1
    q.clock.engine -= 1
    assert read(early) == b"one"
    with pytest.raises(errors.StreamFull):
        q.write("s", b"two")
    q.clock.wall += 1
    q.clock.engine += 1
    assert waits(late)
    q.write("s", b"two")
    assert read(late) == b"two"


@pytest.mark.parametrize("jump", JUMPS)
def test_ttl(jump: int) -> None:
    q = Queues("deliver one", "ttl 20s")
    q.write("s", b"before")
    q.put(b"short before", ttl="10s")
    q.clock.wall += jump
    q.pass_time(5)
    q.write("s", b"after")
    q.put(b"short after", ttl="10s")
    assert q.shows("s") == [b"before", b"short before", b"after", b"short after"]
    q.pass_time(4)
    assert len(q.shows("s")) == 4
    q.pass_time(1)
    assert q.shows("s") == [b"before", b"after", b"short after"]
    q.pass_time(5)
    assert q.shows("s") == [b"before", b"after"]
    q.pass_time(5)
    assert q.shows("s") == [b"after"]
    q.pass_time(5)
    assert q.shows("s") == []


@pytest.mark.parametrize("jump", JUMPS)
def test_dedup(jump: int) -> None:
    q = Queues("deliver one", "dedup 10s")
    first = q.put(b"one", id="x")
    q.clock.wall += jump
    q.pass_time(9)
    assert q.put(b"again", id="x") == first
    q.pass_time(1)
    assert q.put(b"new", id="x") != first


@pytest.mark.parametrize("jump", JUMPS)
def test_order_expiry_over_a_jump(jump: int) -> None:
    q = Queues("order expiry", "ttl 100s")
    q.consumer()
    q.write("s", b"first")
    q.clock.wall += jump
    q.pass_time(1)
    q.write("s", b"second")
    q.put(b"urgent", ttl="5s")
    assert drain(q.worker()) == [b"urgent", b"first", b"second"]


def loaded(path: Path) -> Queues:
    """A group in which everything has a deadline at 100 s; 40 s are over."""
    q = Queues("ttl 100s", "backoff 100s 100s", "dedup 100s", "replay all", path=path, clock=MachineClock())
    q.stream("t")
    q.consumer("w", "t")
    q.write("s", b"kept")
    q.put(b"failed", "t", ttl="500s")
    q.put(b"later", "s", delay="100s", id="x")
    worker = q.worker()
    read(worker)
    say(worker, "nack")
    q.ctl("ttl 100s")
    q.pass_time(40)
    q.stream("so that the log tells the time")
    q.write("so that the log tells the time", b"x")
    return q


Down = Callable[[MachineClock], None]


def jump_of(ns: int) -> Down:
    def down(clock: MachineClock) -> None:
        clock.wall += ns

    return down


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("jump", JUMPS)
@pytest.mark.parametrize("running", [True, False])
def test_across_a_restart_within_one_boot(tmp_path: Path, jump: int, clean: bool, running: bool) -> None:
    q = loaded(tmp_path / "store")
    if running:
        q.clock.wall += jump
        q.pass_time(1)
        q.write("s", b"after the jump")
    q.restart(clean=clean, while_down=None if running else lambda: jump_of(jump)(q.clock))
    worker = q.worker()
    assert "kept" in [row["body"] for row in q.kept()]
    assert waits(worker)
    assert q.put(b"again", id="x") == 3
    q.pass_time(55)
    assert "kept" in [row["body"] for row in q.kept()]
    assert "later" not in [row["body"] for row in q.kept()]
    assert waits(worker)
    q.pass_time(10)
    assert "kept" not in [row["body"] for row in q.kept()]
    assert "later" in [row["body"] for row in q.kept()]
    assert q.put(b"again", id="x") != 3


@pytest.mark.parametrize("clean", [True, False])
def test_time_passes_while_the_server_is_down(tmp_path: Path, clean: bool) -> None:
    q = loaded(tmp_path / "store")
    q.restart(clean=clean, while_down=lambda: q.clock.forward(70))
    q.tree.tick()
    assert [row["body"] for row in q.kept()] == ["later"]


@pytest.mark.parametrize("clean", [True, False])
def test_another_boot_with_a_clock_that_went_back(tmp_path: Path, clean: bool) -> None:
    q = loaded(tmp_path / "store")

    def down() -> None:
        q.clock.reboot(30)
        q.clock.wall -= 10 * YEAR

    q.restart(clean=clean, while_down=down)
    q.tree.tick()
    assert [row["body"] for row in q.kept()] == ["kept"]
    assert waits(q.worker())
    q.pass_time(61)
    assert [row["body"] for row in q.kept()] == ["later"]


def test_another_boot_with_a_clock_that_went_ahead_moves_at_most_a_week(tmp_path: Path) -> None:
    q = Queues("replay all", path=tmp_path / "store", clock=MachineClock())
    q.put(b"in a month", delay="30d")
    q.put(b"short", ttl="1d")
    q.put(b"long", ttl="8d")

    def down() -> None:
        q.clock.reboot(30)
        q.clock.wall += 10 * YEAR

    q.restart(while_down=down)
    q.tree.tick()
    assert [row["body"] for row in q.kept()] == ["long"]


@pytest.mark.parametrize("jump", JUMPS)
def test_claims_across_a_restart_and_a_jump(tmp_path: Path, jump: int) -> None:
    q = Queues("lease 10s", "retries 5", path=tmp_path / "store", clock=MachineClock())
    q.consumer()
    q.write("s", b"one", b"two")
    read(q.worker())
    q.restart(clean=False, while_down=lambda: jump_of(jump)(q.clock))
    worker = q.worker()
    assert [read(worker), read(worker)] == [b"one", b"two"]
    q.pass_time(9)
    say(worker, "ack 1 2")
    assert waits(worker)


def test_times_of_records_never_go_back() -> None:
    q = Queues("replay all")
    q.consumer("w", "s")
    times = []
    for jump in (0, -10 * YEAR, 10 * YEAR, 10 * YEAR, -5 * YEAR):
        q.clock.wall += jump
        q.write("s", b"x")
        q.pass_time(1)
    times = [float(row["time"]) for row in q.kept()]
    assert times == sorted(times)


def test_a_lease_ends_for_who_waits_without_anything_else_happening() -> None:
    q = Queues("lease 1s", "backoff 0 0")
    q.consumer()
    q.write("s", b"one")
    slow, other = q.worker(), q.worker()
    read(slow)
    wait = other.read(BIG)
    assert isinstance(wait, Wait)
    q.pass_time(1)
    assert wait.result() == b"one"
    assert isinstance(refusal(slow, "ack"), errors.Stale)


@pytest.mark.parametrize("jump", JUMPS)
@pytest.mark.parametrize("clean", [True, False])
def test_a_jump_in_the_second_boot(tmp_path: Path, jump: int, clean: bool) -> None:
    """The store records the boot before; the server has been restarted within this one."""
    q = loaded(tmp_path / "store")
    q.restart(while_down=lambda: q.clock.reboot(10))
    q.pass_time(1)
    q.write("s", b"in the second boot")
    q.restart(clean=clean, while_down=lambda: jump_of(jump)(q.clock))
    q.tree.tick()
    assert [row["body"] for row in q.kept()] == ["kept", "in the second boot"]
    q.pass_time(50)
    assert [row["body"] for row in q.kept()] == ["in the second boot", "later"]


@pytest.mark.parametrize("jump", JUMPS)
def test_a_jump_that_nobody_wrote_after_and_another_boot(tmp_path: Path, jump: int) -> None:
    q = loaded(tmp_path / "store")
    q.clock.wall += jump
    q.pass_time(10)
    q.restart(while_down=lambda: q.clock.reboot(10))
    q.tree.tick()
    assert [row["body"] for row in q.kept()] == ["kept"]
    q.pass_time(41)
    assert [row["body"] for row in q.kept()] == ["later"]
