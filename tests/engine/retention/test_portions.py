"""Work in portions: all of it is done, and messages that come between two of them are kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mqfs import errors, limits
from mqfs.engine.delivery import priorities
from mqfs.model import Wait
from mqfs.store import compaction, memory
from tests.support.hand import ROOT
from tests.support.queues import BIG, Queues, drain, read, say, waits

STREAMS = 200  # more than three portions


@pytest.fixture
def queues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Queues:
    """One in which only the first portion of anything is done at once, and small segments go as soon as they may."""
    monkeypatch.setattr(limits, "SLICE_S", 0)
    monkeypatch.setattr(limits, "TRIM_BYTES", 0)
    monkeypatch.setattr(limits, "SEGMENT_BYTES", 4_096)
    monkeypatch.setattr(limits, "SEGMENT_FIRST_BYTES", 4_096)
    monkeypatch.setattr(compaction, "_LOOKS", 1_000)  # segments that one trim looks into
    queues = Queues("replay all", "ttl 1h", path=tmp_path / "store")
    for number in range(STREAMS):
        queues.stream(str(number))
    return queues


def go_on(queues: Queues) -> None:
    queues.clock.forward(0.001)
    queues.tree.run_timers()


def portions(queues: Queues) -> int:
    """The number of portions that house-keeping takes until nothing is left to do."""
    count, timers = 0, queues.tree.timers
    while timers.next_due_ns is not None and timers.next_due_ns <= queues.clock.engine_ns() + 1_000:
        go_on(queues)
        count += 1
    return count


def fill(queues: Queues) -> None:
    with_much = queues.at("0", os.O_WRONLY)
    for _ in range(100):
        with_much.write(b"x" * 1_000)


def test_a_trim_goes_on_and_gives_back_what_has_expired(queues: Queues) -> None:
    fill(queues)
    before = queues.group.log.upkeep.size
    queues.clock.forward(7_200)
    queues.tree.tick()
    assert queues.group.log.upkeep.size == before, "nothing is given back before all streams were looked at"
    assert portions(queues) > 2
    assert queues.group.log.upkeep.size < before - 30_000


def test_what_is_written_between_portions_of_a_trim_is_kept(queues: Queues) -> None:
    """To streams that were looked at when they kept nothing, to some not yet looked at, and to new ones."""
    fill(queues)
    queues.clock.forward(7_200)
    queues.tree.tick()
    go_on(queues)
    go_on(queues)
    names = [*map(str, range(1, STREAMS)), *["new"] * 100]
    queues.stream("new")
    for name in names:
        queues.write(name, name.ljust(1_000).encode())
    fill(queues)  # so that none of them is in the last segment
    assert portions(queues) > 1
    for name in names[:-99]:
        kept = queues.shows(f".kept/{name}")
        assert b"".join(kept) == b"".join(other.ljust(1_000).encode() for other in names if other == name)


def test_a_stream_that_goes_between_portions_stops_no_trim(queues: Queues) -> None:
    fill(queues)
    before = queues.group.log.upkeep.size
    queues.clock.forward(7_200)
    queues.tree.tick()
    for number in range(1, STREAMS):
        queues.tree.unlink(ROOT, queues.group, str(number))
    portions(queues)
    queues.tree.tick()
    portions(queues)
    assert queues.group.log.upkeep.size < before / 2


def test_messages_that_are_due_together_come_one_after_the_other(queues: Queues) -> None:
    for number in range(50):
        queues.put(b"%d" % number, delay="1s")
    reader = queues.at("s")
    queues.clock.forward(1)
    queues.tree.run_timers()
    assert queues.group.streams["s"].kept.count == 1
    portions(queues)
    assert [int(reader.read(100)) for _ in range(50)] == list(range(50))
    assert len(queues.group.held) == 0


def test_a_trim_leaves_all_messages_that_wait_for_their_time(queues: Queues) -> None:
    for number in range(3):
        queues.put(b"%d" % number, delay=f"{number + 1}s")
        fill(queues)  # so that each is in a segment of its own
    queues.restart()
    before = queues.group.log.upkeep.size
    queues.ctl("clear")
    queues.tree.tick()
    portions(queues)
    assert queues.group.log.upkeep.size < before - 200_000
    for number in range(3):
        queues.clock.forward(1)
        portions(queues)
        assert queues.shows(".kept/s") == [b"".join(b"%d" % n for n in range(number + 1))]


@pytest.mark.parametrize("is_new", [True, False])
def test_messages_that_came_due_are_given_back(queues: Queues, is_new: bool) -> None:
    """Also in a group that was made since the start."""
    if not is_new:
        queues.restart()
    for _ in range(200):
        queues.put(b"x" * 1_000, delay="1s")
    before = queues.group.log.upkeep.size
    for _ in range(3):
        queues.clock.forward(1)
        queues.tree.tick()
        portions(queues)
    assert len(queues.group.held) == 0
    queues.ctl("clear")
    for _ in range(3):
        queues.clock.forward(1)
        queues.tree.tick()
        portions(queues)
    assert queues.group.log.upkeep.size < before / 10


def test_messages_that_end_together_are_all_counted_out(queues: Queues) -> None:
    for _ in range(1_100):
        queues.put(b"x", ttl="1s")
    queues.write("s", b"stays")
    queues.clock.forward(1)
    queues.tree.run_timers()
    stream = queues.group.streams["s"]
    portions(queues)
    assert (stream.kept.count, stream.kept.size) == (1, 5)
    queues.tree.tick()
    portions(queues)
    assert not queues.group.retention.lapsed
    assert queues.shows(".kept/s") == [b"stays"]


@pytest.mark.parametrize("held", ["lease", "delay"])
def test_claims_and_delays_that_end_together_end_one_after_the_other(queues: Queues, held: str) -> None:
    queues.ctl("lease 5s", "backoff 1h 1h", "retries 0", "consumer w")
    queues.write("s", *[b"x"] * 20)
    worker = queues.worker()
    for _ in range(20):
        assert read(worker) == b"x"
        if held == "delay":
            say(worker, "nack 5s")
    queues.clock.forward(6)
    queues.tree.run_timers()
    if held == "lease":
        assert (queues.stats()["claimed"], queues.stats()["delayed"]) == (19, 1)
    else:
        assert read(worker) == b"x"
        assert waits(worker)
    assert portions(queues) > 15
    assert queues.stats()["claimed"] == (0 if held == "lease" else 1)
    assert held == "lease" or drain(worker) == [b"x"] * 19


def _stats(queues: Queues) -> None:
    handle = queues.at(".stats")
    assert isinstance(handle.read(BIG), Wait)
    handle.close()


def _found(queues: Queues, path: str, *commands: str) -> list[bytes]:
    handle = queues.at(path, os.O_RDWR if commands else os.O_RDONLY)
    for command in commands:
        say(handle, command)
    return [read(handle) for _ in range(3)]


FIRST = {
    "reader": lambda q: _found(q, "s"),
    "order": lambda q: _found(q, "order"),
    "cursor": lambda q: _found(q, ".cursor", "seek first"),
    "write": lambda q: q.write("s", b"new"),
    "put": lambda q: q.put(b"new", ttl="1h"),
    "claim": lambda q: q.worker().read(BIG).cancel(),
    "stats": _stats,
    "records": lambda q: q.cursor("seek first", "format record").read(BIG) and None,
    "kept": lambda q: q.at(".kept/s").close(),
    "consumer": lambda q: q.at("ctl", os.O_WRONLY).write(b"consumer v\n") and None,
    "tick": lambda q: q.tree.tick(),
}


BODIES = [b"0", b"1", b"2"]
SHOWN = {"reader": BODIES, "cursor": BODIES, "order": [b"s\0"] * 3}


@pytest.mark.parametrize("first", FIRST)
def test_the_first_answer_after_a_start_does_not_wait_for_all_headers(
    queues: Queues, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Which messages have a ttl of their own, or are for one receiver, is read from the log in portions."""
    monkeypatch.setattr(priorities, "_HEADS", 2)
    queues.ctl("ttl 0", "consumer w")
    queues.tree.tick()
    queues.put(b"ended", ttl="1s")
    queues.put(b"for one", single=True)
    for number in range(40):
        queues.put(b"%d" % number)
    queues.restart()
    queues.clock.forward(2)
    monkeypatch.setattr(limits, "LOOKING_S", 0)
    found = FIRST[first](queues)
    assert not queues.group.ranks.is_complete
    assert found == SHOWN.get(first, found)
    monkeypatch.setattr(limits, "LOOKING_S", 1)
    queues.tree.tick()
    assert portions(queues) > 15
    assert queues.group.ranks.is_complete
    assert queues.row()["messages"] == 41 + (first in ("write", "put"))
    assert queues.row()["singles"]["first"]


@pytest.mark.parametrize("full", ["drop-old", "drop-new", "reject"])
def test_what_has_ended_takes_no_room_just_after_a_start(tmp_path: Path, full: str) -> None:
    """In the backlog of a consumer, and in .kept; nor can it be dropped."""
    queues = Queues("replay all", f"consumer w backlog 3 full {full}", f"full {full}", path=tmp_path / "store")
    queues.write("s", b"A", b"B")
    sequence = queues.put(b"ended", ttl="1s")
    queues.restart()
    queues.clock.forward(2)
    assert queues.shows(".kept/s") == [b"AB"]
    queues.restart()
    with pytest.raises(errors.NotFound):
        queues.ctl(f"drop s {sequence}")
    queues.restart()
    queues.write("s", b"C")
    assert drain(queues.worker()) == [b"A", b"B", b"C"]


def test_messages_that_count_again_are_not_taken_by_a_trim_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had found that newer ones of their keys supersede them."""
    monkeypatch.setattr(limits, "SLICE_S", 0)
    monkeypatch.setattr(limits, "TRIM_BYTES", 0)
    monkeypatch.setattr(memory, "_STEPS", 4)
    looks = 0
    while True:
        queues = Queues("replay key")
        put = queues.at(".put", os.O_RDWR)
        for number in range(40):
            put.write(b'{"stream":"s","key":"%d"} %d' % (number % 3 if number else 9, number))
        queues.group.retention._dirty = True
        queues.group.retention.trim()
        for _ in range(looks):
            go_on(queues)
        is_over = queues.group.retention._trimming is None
        queues.ctl("replay all")
        bodies = [row["body"] for row in queues.kept()]
        assert queues.row()["messages"] == len(bodies)
        portions(queues)
        queues.pass_time(2)
        assert [row["body"] for row in queues.kept()] == bodies
        if is_over:
            break
        looks += 1
    assert looks > 10


def test_a_ring_leaves_nothing_of_the_log_in_memory() -> None:
    queues = Queues("replay all")
    queues.write("s", *[b"x" * 1_000] * 100)
    log = queues.group.log.upkeep
    queues.ctl("clear s")
    queues.ctl("keep ring")
    queues.write("s", b"y")
    assert log.size > 0
    queues.group.retention.trim(always=True)
    assert log.size == 0
