"""What `depth` took away does not come back with a start, whatever became of the messages that took its place."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mqfs.model import Kind
from tests.support.calls import lines
from tests.support.hand import ROOT
from tests.support.queues import Queues, waits


def dropped(q: Queues) -> None:
    q.put(b"1")
    q.put(b"2")
    q.ctl(f"drop s {q.put(b'3')}")


def ended(q: Queues) -> None:
    q.put(b"1")
    q.put(b"2", ttl="1s")
    q.put(b"3", ttl="1s")
    q.pass_time(3)


def deeper(q: Queues) -> None:
    for number in range(5):
        q.put(b"%d" % number)
    q.ctl("depth 4")


def not_bounded(q: Queues) -> None:
    for number in range(5):
        q.put(b"%d" % number)
    q.ctl("depth 0")


def other_full(q: Queues) -> None:
    for number in range(5):
        q.put(b"%d" % number)
    q.ctl("full reject")


def key_removed(q: Queues) -> None:
    q.ctl("replay key")
    for number, key in enumerate("abc"):
        q.put(b"%d" % number, key=key)
    q.pass_time(1)
    q.put(b"", key="c")
    q.pass_time(1)


def key_replaced(q: Queues) -> None:
    q.ctl("replay key")
    for number, key in enumerate("abc"):
        q.put(b"%d" % number, key=key)
    q.pass_time(1)
    q.put(b"new", key="c")
    q.pass_time(1)


WENT: dict[str, Callable[[Queues], None]] = {
    "drop": dropped,
    "ttl": ended,
    "depth": deeper,
    "no depth": not_bounded,
    "full": other_full,
    "key removed": key_removed,
    "key replaced": key_replaced,
}


@pytest.mark.parametrize("clean", [True, False], ids=["stop", "kill"])
@pytest.mark.parametrize("went", WENT)
def test_what_was_cut_does_not_come_back(tmp_path: Path, went: str, clean: bool) -> None:
    q = Queues("replay all", "depth 2", path=tmp_path / "store")
    WENT[went](q)
    before, messages = q.shows(".kept/s"), q.row()["messages"]
    q.restart(clean=clean)
    assert q.shows(".kept/s") == before
    assert q.row()["messages"] == messages


@pytest.mark.parametrize("clean", [True, False], ids=["stop", "kill"])
def test_what_was_cut_does_not_come_back_for_those_that_end_while_the_server_is_down(
    tmp_path: Path, clean: bool
) -> None:
    q = Queues("replay all", "depth 2", path=tmp_path / "store")
    q.put(b"1")
    q.put(b"2", ttl="5s")
    q.put(b"3", ttl="5s")
    q.tree.tick()
    q.restart(clean=clean, while_down=lambda: q.clock.forward(10))
    assert q.shows(".kept/s") == []


@pytest.mark.parametrize("path", ["s", "order", ".cursor"])
@pytest.mark.parametrize("clean", [True, False], ids=["stop", "kill"])
def test_a_new_reader_does_not_get_the_eof_marker_that_displaced_the_last_message(
    tmp_path: Path, clean: bool, path: str
) -> None:
    q = Queues("replay last", "depth 1", path=tmp_path / "store")
    q.write("s", b"1", b"")
    q.restart(clean=clean)
    assert waits(q.at(path, os.O_RDWR if path == ".cursor" else os.O_RDONLY))


def test_a_cut_is_recorded_once_where_anything_may_go_from_the_middle(tmp_path: Path) -> None:
    """Where only newer messages displace older ones, a start finds the same without it."""
    grown = []
    for ttl in ({}, {"ttl": "1h"}):
        q = Queues("replay all", "depth 2", path=tmp_path / f"store{len(ttl)}")
        for _ in range(9):
            q.put(b"x", **ttl)
        before = q.group.log.upkeep.size
        q.pass_time(5)
        grown.append(q.group.log.upkeep.size - before)
    assert grown[0] == 0
    assert 0 < grown[1] < 200


def recorded(q: Queues) -> list[int]:
    """How many floors each record of the log has."""
    _, records = q.group.log.upkeep.history()
    changes = [json.loads(record.body) for record in records if record.kind == Kind.CHANGE]
    return [len(change["floors"]) for change in changes if change["do"] == "floor"]


def test_cuts_of_many_streams_are_recorded_a_few_at_once(tmp_path: Path) -> None:
    q = Queues("replay all", "depth 1", path=tmp_path / "store")
    names = [f"s{number}" for number in range(700)]
    for name in names:
        q.stream(name)
        q.write(name, b"1", b"2")
    q.put(b"x", ttl="1h")
    q.group.retention.trim()
    assert sum(recorded(q)) == len(names)
    assert max(recorded(q)) <= 512


def test_cuts_of_streams_that_are_gone_are_forgotten() -> None:
    costs = []
    for gone in (10, 500):
        q = Queues("replay all", "depth 1")
        for _ in range(gone):
            q.stream("t")
            q.write("t", b"1", b"2")
            q.tree.unlink(ROOT, q.group, "t")
        q.write("s", b"1", b"2")
        q.put(b"x", ttl="1h")
        costs.append(lines(q.group.retention.trim))
    assert costs[1] <= costs[0] + 50
