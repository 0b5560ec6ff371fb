"""A `single` message whose claim ends without an ack is for someone again, wherever the others are by then."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from mqfs.errors import DiskFull
from tests.engine.publishing.test_crash import Lying
from tests.support.hand import ROOT
from tests.support.lying_disk import LyingDisk
from tests.support.queues import BIG, Queues, drain, read, say, waits


def all_left(q: Queues) -> list[bytes]:
    """What anybody at all gets; all is acked then."""
    q.pass_time(9)
    found = [body for name in list(q.group.consumers) for body in drain(q.worker(name))]
    return sorted(found + drain(q.at(".consumers/.s", os.O_RDWR)))


# ------------------------------------------------------------------ in the slot of another's claim


def remove(q: Queues, first: Any) -> None:
    say(first, "nack 1h")
    first.close()
    q.ctl("remove a")


def close_transient(q: Queues, first: Any) -> None:
    q.consumer("a", "transient")
    say(first, "nack 1h")
    first.close()
    assert "a" not in q.group.consumers


RETURNS: dict[str, Callable[[Queues, Any], None]] = {
    "released": lambda q, first: say(first, "release 1"),
    "removed": remove,
    "transient": close_transient,
    "seek first": lambda q, first: say(first, "seek first"),
    "seek end": lambda q, first: say(first, "seek end"),
    "failed, seek end": lambda q, first: say(first, "nack 1h\nseek end"),
}
THEN = {  # what the second consumer does, and what is left
    "ack": [b"x", b"z"],
    "nack, ack": [b"x", b"z"],
    "nack of the other": [b"x", b"z"],
    "ack of both": [b"z"],
    "ack of a run": [b"x"],
    "stop": [b"x", b"y", b"z"],
    "kill": [b"x", b"y", b"z"],
}


@pytest.mark.parametrize("replay", ["replay off", "replay all"])
@pytest.mark.parametrize("way", RETURNS)
@pytest.mark.parametrize("then", THEN)
def test_the_ack_of_a_later_message_does_not_cover_it(replay: str, way: str, then: str, tmp_path: Path) -> None:
    q = Queues(replay, "backoff 1s 1s", "consumer a", "consumer b", path=tmp_path / "store")
    q.put(b"x", single=True)
    q.write("s", b"y", b"z")
    first, second = q.worker("a"), q.worker("b")
    assert [read(first), read(second)] == [b"x", b"y"]
    RETURNS[way](q, first)
    progress = q.group.consumers["b"].progress
    if then == "ack":
        say(second, "ack")
    elif then == "nack, ack":
        say(second, "nack 0ms")
        assert [read(second), read(second)] == [b"x", b"y"]
        say(second, "ack 2\nnack 1 1s")
    elif then == "nack of the other":
        assert read(second) == b"x"
        say(second, "ack 2\nnack 1 1s")
    elif then == "ack of both":
        assert read(second) == b"x"
        say(second, "ack 1-2")
    elif then == "ack of a run":
        say(second, "format record")
        read(second)
        say(second, "ack 2\nack 3\nnack 1 0ms\nformat raw")
    assert progress.is_acked(1) == (then == "ack of both")
    if then in ("stop", "kill"):
        q.restart(clean=then == "stop")
    elif way != "removed" and way != "transient":
        first.close()
    if "a" in q.group.consumers:
        q.ctl("remove a")
    second.close()
    assert all_left(q) == THEN[then]
    assert q.group.consumers["b"].progress.ack_floor == 4 or then in ("stop", "kill")


@pytest.mark.parametrize("order", list(permutations((1, 2, 3))), ids=str)
@pytest.mark.parametrize("acked", range(4))
def test_several_in_one_slot_return_in_any_order(order: tuple[int, ...], acked: int, tmp_path: Path) -> None:
    """`acked`: how many are back when the other acks its own."""
    q = Queues("replay off", "consumer a", "consumer b", path=tmp_path / "store")
    for body in (b"1", b"2", b"3"):
        q.put(body, single=True)
    q.write("s", b"4")
    first, second = q.worker("a"), q.worker("b")
    assert [read(first), read(first), read(first), read(second)] == [b"1", b"2", b"3", b"4"]
    for count, sequence in enumerate(order):
        if count == acked:
            say(second, "ack 4")
        say(first, f"release {sequence}")
    if acked == 3:
        say(second, "ack 4")
    first.close()
    q.ctl("remove a")
    q.restart(clean=False)
    assert all_left(q) == [b"1", b"2", b"3"]
    assert q.group.consumers["b"].progress.ack_floor >= 5


# ------------------------------------------------------------------ a consumer that moves, or begins again


@pytest.mark.parametrize("replay", ["replay all", "replay last", "replay off"])
@pytest.mark.parametrize("place", ["first", "2", "end"])
@pytest.mark.parametrize("state", ["in flight", "failed", "returned"])
@pytest.mark.parametrize("how", ["", "stop", "kill"])
def test_a_seek_of_who_has_it_gives_it_back(replay: str, place: str, state: str, how: str, tmp_path: Path) -> None:
    q = Queues(replay, "consumer a", "consumer b", path=tmp_path / "store")
    q.put(b"x", single=True)
    q.put(b"y", single=True)
    worker = q.worker("a")
    assert [read(worker), read(worker)] == [b"x", b"y"]
    if state != "in flight":
        say(worker, "nack 1 1h\nnack 2 1h" if state == "failed" else "release")
    say(worker, f"seek {place}")
    if how:
        q.restart(clean=how == "stop")
    assert all_left(q) == [b"x", b"y"]
    q.restart(clean=False)
    assert all_left(q) == []


def test_a_seek_gives_it_to_who_waits_and_to_this_one_last() -> None:
    q = Queues("replay all", "consumer a", "consumer b")
    q.put(b"x", single=True)
    mine, too = q.worker("a"), q.worker("a")
    assert read(mine) == b"x"
    parked, others = too.read(BIG), q.worker("b").read(BIG)
    say(mine, "seek first")
    assert others.result() == b"x"
    assert parked.cancel()


@pytest.mark.parametrize("replay", ["replay all", "replay last", "replay off"])
@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("state", ["in flight", "failed", "returned", "acked", "two acked", "skipped"])
def test_it_survives_its_memory_consumer(replay: str, clean: bool, state: str, tmp_path: Path) -> None:
    q = Queues(replay, "consumer m memory", "consumer b", path=tmp_path / "store")
    q.put(b"x", single=True)
    if state == "two acked":
        q.write("s", b"plain")
    worker = q.worker("m")
    assert read(worker) == b"x"
    if state == "two acked":
        assert read(worker) == b"plain"
        say(worker, "ack 1 2")
        assert drain(q.worker("b")) == [b"plain"]
    elif state != "in flight":
        say(worker, {"failed": "nack 1h", "returned": "release", "acked": "ack", "skipped": "seek end"}[state])
    for _ in range(2):
        q.restart(clean=clean)
    left = [body for body in all_left(q) if body != b"plain"]
    assert left == ([] if "acked" in state else [b"x"])


# ------------------------------------------------------------------ a consumer that is over other streams now


LEAVES: dict[str, Callable[[Queues], object]] = {
    "unbind": lambda q: q.ctl("unbind v s"),
    "bind another": lambda q: q.ctl("unbind v", "bind v prefix:t"),
    "rename": lambda q: q.tree.rename(ROOT, q.group, "s", q.group, "other"),
}


@pytest.mark.parametrize("lines", [("replay all",), ("replay off",), ("deliver one",), ("replay off", "consumer b")])
@pytest.mark.parametrize("way", LEAVES)
@pytest.mark.parametrize("trim", [False, True])
@pytest.mark.parametrize("kill", [False, True])
def test_it_is_for_others_where_its_stream_leaves_the_view(
    lines: tuple[str, ...], way: str, trim: bool, kill: bool, tmp_path: Path
) -> None:
    """Those in flight stay with their consumer until they are to be delivered again."""
    q = Queues(*lines, "bind v s", "consumer a v", path=tmp_path / "store")
    for body in (b"1", b"2", b"3"):
        q.put(body, single=True)
    worker = q.worker("a")
    assert [read(worker), read(worker), read(worker)] == [b"1", b"2", b"3"]
    say(worker, "nack 1 1s")
    LEAVES[way](q)
    if trim:
        q.pass_time(1)
        q.group.retention.trim(always=True)
    say(worker, "nack 2 1s\nack 3")
    if trim:
        q.group.retention.trim(always=True)
    q.pass_time(2)
    if kill:
        q.restart(clean=False)
        q.pass_time(1)
    else:
        assert waits(worker)
    others = q.at(f".consumers/.{'other' if way == 'rename' else 's'}", os.O_RDWR)
    assert drain(others) == [b"1", b"2"]
    if "b" in q.group.consumers:
        assert drain(q.worker("b")) == []
    if lines in (("replay off",), ("deliver one",)):  # else it is kept, or `b` has not passed it
        q.group.retention.trim(always=True)
        assert q.row("other" if way == "rename" else "s")["messages"] == 0


@pytest.mark.parametrize("held", ["failed", "nack", "close", "lease"])
@pytest.mark.parametrize("way", ["unbind v s", "dead s"])
def test_one_in_flight_is_for_others_when_it_is_to_be_delivered_again(held: str, way: str) -> None:
    q = Queues("replay off", "lease 1m", "bind v s", "consumer a v")
    q.put(b"x", single=True)
    worker = q.worker("a")
    assert read(worker) == b"x"
    if held == "failed":
        say(worker, "nack 1h")
    q.ctl(way)
    others = q.at(".consumers/.s", os.O_RDWR)
    if held == "nack":
        say(worker, "nack 1h")
    elif held == "close":
        worker.close()
    elif held == "lease":
        assert waits(others)
        q.pass_time(61)
    assert drain(others) == [b"x"]


# ------------------------------------------------------------------ other ends


@pytest.mark.parametrize("kill", [None, True, False])
def test_many_returned_at_once_are_for_one_who_passed_them(kill: bool | None, tmp_path: Path) -> None:
    q = Queues("replay off", "consumer a", "consumer b", path=tmp_path / "store")
    for number in range(600):
        q.put(b"%d" % number, single=True)
        if number % 200 == 199:
            q.write("s", b"plain")
    a, b = q.worker("a"), q.worker("b")
    drain(a, ack=False)
    assert [read(b), read(b), read(b)] == [b"plain"] * 3
    say(a, "seek end")
    say(b, "ack")
    if kill is None:
        say(b, "release 201 402")
    else:
        q.restart(clean=not kill)
        b = q.worker("b")
    bodies = [b"%d" % number for number in range(600)]
    assert drain(b) == [*bodies[:200], b"plain", *bodies[200:400], b"plain", *bodies[400:]]
    assert q.group.consumers["b"].state.progress.ack_floor > 603


def test_what_its_bound_takes_from_one_consumer_is_for_the_others(tmp_path: Path) -> None:
    q = Queues("replay off", "consumer a backlog 1 full drop-old", "consumer b", path=tmp_path / "store")
    q.put(b"x", single=True)
    worker = q.worker("a")
    assert read(worker) == b"x"
    say(worker, "nack 0ms")
    q.write("s", b"1")
    q.restart(clean=False)
    assert drain(q.worker("b"), ack=False) == [b"x", b"1"]
    assert drain(q.worker("a")) == [b"1"]


@pytest.mark.parametrize("passes", ["seek", "backlog"])
@pytest.mark.parametrize("clean", [False, True])
def test_it_is_kept_until_claimed_though_all_consumers_passed_it(passes: str, clean: bool, tmp_path: Path) -> None:
    q = Queues("replay off", "consumer a", "consumer b", path=tmp_path / "store")
    if passes == "backlog":
        q.ctl("consumer a backlog 1 full drop-old", "consumer b backlog 1 full drop-old")
    q.put(b"x", single=True)
    q.put(b"y", single=True)
    q.write("s", b"z")
    for name in ("a", "b"):
        worker = q.worker(name)
        if passes == "seek":
            say(worker, "seek end")
        assert drain(worker) == ([] if passes == "seek" else [b"z"])
    q.group.retention.trim(always=True)
    q.restart(clean=clean)
    q.pass_time(2)
    assert q.row()["messages"] >= 2
    taker = q.at(".consumers/.s", os.O_RDWR)
    assert read(taker) == b"x"
    q.consumer("late")
    late = q.worker("late")
    assert drain(late) == [b"y"]
    say(taker, "nack 0ms")
    assert drain(taker) == [b"x"]
    late.close()
    q.ctl("remove late")
    assert q.row()["messages"] == 0


@pytest.mark.parametrize("then", ["remove a", "seek"])
def test_a_dead_letter_of_a_kill_is_not_offered_again(then: str, tmp_path: Path) -> None:
    q = Queues("replay all", "retries 1", "consumer a", "consumer b", path=tmp_path / "store")
    q.put(b"x", single=True)
    assert read(q.worker("a")) == b"x"
    q.restart(clean=False)
    if then == "seek":
        say(q.worker("a"), "seek first")
    else:
        q.ctl(then)
    assert waits(q.worker("b"))
    assert waits(q.at(".consumers/.s", os.O_RDWR))
    assert drain(q.at(".consumers/.dead", os.O_RDWR)) == [b"x"]


# ------------------------------------------------------------------ to those who wait at the stream


@pytest.mark.parametrize("way", RETURNS)
def test_a_returned_message_goes_to_a_waiting_reader_of_the_stream(way: str) -> None:
    q = Queues("replay all")
    q.consumer("a")
    q.put(b"x", single=True)
    first = q.worker("a")
    assert read(first) == b"x"
    plain, *readers = q.at("s"), q.at("s", os.O_RDWR), q.at("s", os.O_RDWR)
    waiting = [handle.read(9) for handle in (plain, *readers)]
    RETURNS[way](q, first)
    assert [wait.settled for wait in waiting] == [False, True, False]
    assert waiting[1].result() == b"x"


@pytest.mark.parametrize("way", RETURNS)
def test_a_returned_message_makes_its_stream_readable(way: str) -> None:
    q = Queues("replay all")
    q.consumer("a")
    q.put(b"x", single=True)
    first, told = q.worker("a"), list[bool]()
    assert read(first) == b"x"
    polled = q.at("s", os.O_RDWR)
    assert waits(polled)
    polled.watch(lambda: told.append(polled.readable))
    RETURNS[way](q, first)
    assert told[-1:] == [True]
    assert read(polled) == b"x"


# ------------------------------------------------------------------ a full disk


@pytest.mark.parametrize("line", ["seek first", "seek end"])
@pytest.mark.parametrize("state", ["in flight", "failed"])
@pytest.mark.parametrize("calls", range(4))
def test_a_seek_that_a_full_disk_refuses_loses_none(line: str, state: str, calls: int) -> None:
    disk = LyingDisk()
    q = Lying(disk)
    q.stream("s")
    q.ctl("sync off", "replay all", "consumer a", "consumer b")
    for body in (b"x", b"y"):
        q.put(body, single=True)
    worker = q.worker("a")
    assert [read(worker), read(worker)] == [b"x", b"y"]
    if state == "failed":
        say(worker, "nack 1 1h\nnack 2 1h")
    disk.fail_at, disk.fail_with = disk.calls + 1 + calls, errno.ENOSPC
    try:
        say(worker, line)
    except DiskFull:
        assert disk.failed
    disk.fail_at = 0
    worker.close()
    if calls % 2:
        q = Lying(disk.after_kill())
    q.pass_time(4000)
    assert all_left(q) == [b"x", b"y"]
