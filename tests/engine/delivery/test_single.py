"""`single` messages of `.put` go to one taker only, and nothing that only reads ever gets one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from mqfs import limits
from mqfs.engine.language.message_formats import FORMATS
from mqfs.model import Wait
from tests.support.queues import BIG, Queues, drain, read, say, waits


def test_one_of_the_readers_that_wait_gets_it_and_none_that_only_reads() -> None:
    q = Queues()
    only, first, second = q.at("s"), q.taker(), q.taker()
    parked = [handle.read(64) for handle in (only, first, second)]
    q.put(b"x", single=True)
    assert [step.settled for step in parked] == [False, True, False]
    assert parked[1].result() == b"x"
    q.write("s", b"all")
    assert [step.result() for step in (parked[0], parked[2])] == [b"all", b"all"]


def test_those_that_a_bound_took_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TRIM_BYTES", 1)
    q = Queues("replay all", "depth 10", "full drop-old")
    for _ in range(500):
        q.put(b"x", single=True)
    q.tree.tick()
    number = q.group.streams["s"].number
    assert len(q.group.ranks.by_stream[number]) == 10
    taker = q.taker()
    assert [read(taker) for _ in range(10)] == [b"x"] * 10
    assert waits(taker)


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


# ------------------------------------------------------------------ who merely reads


LINES = [
    ("replay all",), ("replay last",), ("replay off", "consumer other t"),
    ("replay all", "data coalesce"), ("deliver one", "ack next"), ("keep ring", "replay all"),
]  # fmt: skip


def readers(q: Queues) -> dict[str, Any]:
    """Every open file that shows messages and takes none, each with a read that waits, or what it gave."""
    handles = {name: q.at(name) for name in ("s", "order", "v")}
    if q.group.settings.deliver == "one":
        del handles["s"]  # it would end at once: see `shown`
    for form in FORMATS:
        for select in ("", "select s", "select v"):
            handles[f"{form} {select}"] = cursor = q.at(".cursor", os.O_RDWR)
            cursor.write(f"format {form}\n{select}\n".encode())
    return {name: handle.read(BIG) for name, handle in handles.items()}


def shown(q: Queues) -> bytes:
    """What all files show to who comes later."""
    found = b"".join(q.shows(".kept/s") + q.shows(".consumers/w") + q.shows(".consumers/.s"))
    if q.group.settings.deliver == "one":
        found += b"".join(q.shows("s"))
    for form in FORMATS:
        for select in ("", "select s", "select v"):
            cursor = q.at(".cursor", os.O_RDWR)
            cursor.write(f"{select}\nseek 0\nuntil end\nformat {form}\n".encode())
            for _ in range(9):
                found += cursor.read(BIG)
    late = [q.at(name) for name in ("order", "v", "s")] if q.group.settings.deliver == "all" else [q.at("order")]
    for handle in late:
        while not isinstance(step := handle.read(BIG), Wait) and step:
            found += step.replace(b"s\0", b"secret") if handle.node.name == "order" else step
    return found


@pytest.mark.parametrize("lines", LINES, ids=" ".join)
@pytest.mark.parametrize("delay", [None, "1s"])
def test_nobody_who_merely_reads_is_shown_it_taken_or_not(lines: tuple[str, ...], delay: str | None) -> None:
    q = Queues(*lines, "bind v s", "consumer w")
    q.stream("t")
    parked = readers(q)
    q.put(b"secret", single=True, **({"delay": delay} if delay else {}))
    q.pass_time(2)
    assert not any(b"secret" in step.result() for step in parked.values() if isinstance(step, Wait) and step.settled)
    assert b"secret" not in shown(q)
    taker = q.taker() if q.group.settings.deliver == "one" else q.worker()
    assert read(taker) == b"secret"
    assert b"secret" not in shown(q)
    if q.group.settings.deliver == "all":
        say(taker, "ack")
        assert b"secret" not in shown(q)


@pytest.mark.parametrize("replay", ["off", "last", "all"])
@pytest.mark.parametrize("over", ["", "s", "v"])
def test_a_consumer_made_before_it_is_taken_may_take_it(tmp_path: Path, replay: str, over: str) -> None:
    q = Queues(f"replay {replay}", "bind v s", path=tmp_path / "store")
    q.put(b"x", single=True)
    q.write("s", b"for all")
    q.put(b"y", single=True)
    q.consumer("w", over)
    q.restart(clean=False)
    worker = q.worker()
    got = drain(worker)
    assert [body for body in got if body != b"for all"] == [b"x", b"y"]
    assert got.count(b"for all") == (replay == "all") or replay == "last"
    q.consumer("late", over)
    assert not {b"x", b"y"} & set(drain(q.worker("late")))


def test_it_is_noted_once() -> None:
    q = Queues()
    sequences = [q.put(b"x", single=True) for _ in range(2)]
    assert q.group.streams["s"].exclusives.all_unclaimed() == sequences


@pytest.mark.parametrize("claimed", [False, True])
@pytest.mark.parametrize("ends", ["drop", "ttl"])
def test_one_that_has_left_the_log_holds_nothing_back(ends: str, claimed: bool) -> None:
    q = Queues("consumer w")
    first = q.put(b"first", single=True)
    second = q.put(b"second", single=True, **({"ttl": "1s"} if ends == "ttl" else {}))
    worker = q.worker()
    if claimed:
        assert [read(worker), read(worker)] == [b"first", b"second"]
    if ends == "drop":
        q.ctl(f"drop s {second}")
    q.pass_time(2)
    q.group.retention.trim(always=True)
    noted = {second} & (q.group.state.dropped.keys() | q.group.retention.lapsed.keys())
    assert bool(noted) == claimed  # an acknowledgement must not count it out again
    for sequence in (first, second) if claimed else ():
        say(worker, f"release {sequence}")
    assert q.group.streams["s"].exclusives.first_unclaimed() != second
    worker.close()
    assert read(q.taker()) == b"first"
    q.group.retention.trim(always=True)
    assert q.group.streams["s"].exclusives.first_unclaimed() == 0
