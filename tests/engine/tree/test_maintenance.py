"""Maintenance in portions, whatever there is; and that each change of names is seen by work that looks again."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mqfs import limits
from mqfs.engine.publishing import admission, kept_quotas
from mqfs.engine.tree import tree
from mqfs.engine.tree.tree import Tree
from mqfs.model import Wait
from mqfs.quotas import parse_quotas
from mqfs.store.memory import MemoryStore
from tests.engine.core.test_shown import Copied
from tests.support.batches import Units, frame
from tests.support.calls import calls
from tests.support.hand import ANNA, BERT, ROOT, Hand
from tests.support.queues import Queues, drain, read, say

NAMES: dict[str, Callable[[Hand], object]] = {
    "a stream is made": lambda h: h.stream("new"),
    "a stream is renamed": lambda h: h.tree.rename(ROOT, h.group, "s", h.group, "new"),
    "a stream is removed": lambda h: h.tree.unlink(ROOT, h.group, "s"),
    "a group is made": lambda h: h.tree.mkdir(ROOT, h.group, "new", 0o755),
    "a group is renamed": lambda h: h.tree.rename(ROOT, h.group, "inside", h.group, "new"),
    "a group is removed": lambda h: h.tree.rmdir(ROOT, h.group, "inside"),
    "a view is made": lambda h: h.ctl("bind new s"),
    "a consumer is made": lambda h: h.ctl("consumer new"),
}


@pytest.mark.parametrize("change", NAMES)
def test_each_change_of_names_is_one_of_the_catalog(hand: Hand, change: str) -> None:
    """Long work looks again whether names are free only where the version is another one."""
    hand.stream("s")
    hand.tree.mkdir(ROOT, hand.group, "inside", 0o755)
    before = hand.group.catalog_version
    NAMES[change](hand)
    assert hand.group.catalog_version > before


# ---------------------------------------------------------------- idle streams


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> Queues:
    """100 streams to be looked at, ten in a portion."""
    monkeypatch.setattr(tree, "_STREAMS", 10)
    queues = Queues("replay all", "idle 10s")
    for number in range(99):
        queues.stream(str(number))
    queues.tree.timers.piece_s = lambda continued: 0.0
    queues.clock.forward(11)
    return queues


def test_idle_streams_are_looked_at_in_portions(idle: Queues) -> None:
    left = [len(idle.group.streams)]
    idle.tree.tick()
    while left[-1] != (now := len(idle.group.streams)):
        left.append(now)
        idle.clock.forward(0.001)
        idle.tree.run_timers()
    assert left[-1] == 0
    assert max(before - after for before, after in itertools.pairwise(left)) <= 10


def test_no_stream_of_a_batch_that_waits_is_removed() -> None:
    """Others of the group are."""
    u = Units("replay off", "depth 1", "full block", "idle 10s")
    u.stream("unused")
    u.consumer()
    u.write("s", b"1")
    waiting = u.batch(frame("s", b"2"), frame("t", b"3"))
    u.clock.forward(11)
    u.tree.tick()
    assert not waiting.settled
    assert sorted(u.group.streams) == ["s", "t"]
    worker = u.worker()
    assert read(worker) == b"1"
    say(worker, "ack")
    u.tree.tick()
    assert waiting.settled
    assert drain(worker) == [b"2", b"3"]


def test_what_is_used_between_two_portions_stays(idle: Queues) -> None:
    idle.tree.tick()
    idle.tree.tick()
    held = idle.at("90")
    idle.write("91", b"x")
    idle.put(b"later", "92", delay="1h")
    idle.tree.unlink(ROOT, idle.group, "93")
    idle.ctl("idle 12s")
    for _ in range(30):
        idle.clock.forward(0.001)
        idle.tree.run_timers()
    assert set(idle.group.streams) == {"90", "91", "92"}
    held.close()
    idle.clock.forward(13)
    idle.tree.tick()
    for _ in range(30):
        idle.clock.forward(0.001)
        idle.tree.run_timers()
    assert set(idle.group.streams) == {"91", "92"}


def put(u: Copied, **keys: object) -> None:
    assert isinstance(u.at(".put", os.O_WRONLY).write(json.dumps({"stream": "t", **keys}).encode() + b" x"), Wait)


def by_put(u: Copied) -> None:
    put(u)


def by_a_stream_that_is_closed(u: Copied) -> None:
    handle = u.at("t", os.O_WRONLY)
    assert isinstance(handle.write(b"x"), Wait)
    handle.close()
    u.clock.forward(11)


def by_the_last_line(u: Copied) -> None:
    u.ctl("data line")
    handle = u.at("t", os.O_WRONLY)
    assert handle.write(b"x") == 1
    handle.close()
    u.clock.forward(11)


def by_batch(u: Copied) -> None:
    assert isinstance(u.at(".batch", os.O_WRONLY).write(frame("t", b"x")), Wait)


def by_commit(u: Copied) -> None:
    folder: Any = u.tree.find(ROOT, "g/.txn")
    u.tree.mkdir(ROOT, folder, "p", 0o755)
    assert u.at(".txn/p/t", os.O_WRONLY).write(b"x") == 1
    assert isinstance(u.at(".txn/ctl", os.O_WRONLY).write(b"commit a.1 p"), Wait)


def by_delay(u: Copied) -> None:
    put(u, delay="1s")
    u.confirm()
    u.clock.forward(1)
    u.tree.run_timers()


def by_a_schedule(u: Copied) -> None:
    put(u, id="n", every="1s")
    u.confirm()
    u.clock.forward(1)
    u.tree.run_timers()
    u.ctl("unschedule n")


def as_a_dead_letter(u: Copied) -> None:
    u.ctl("dead t", "consumer w s")
    u.send(b"x")
    u.confirm()
    worker = u.worker()
    assert read(worker) == b"x"
    worker.write(b"dead\n")


def by_redrive(u: Copied) -> None:
    u.ctl("consumer w t")
    put(u)
    u.confirm()
    worker = u.worker()
    assert read(worker) == b"x"
    worker.write(b"dead\n")
    worker.close()
    u.confirm()
    u.ctl("clear t", "redrive")


@pytest.mark.parametrize(
    "write",
    [
        by_put, by_a_stream_that_is_closed, by_the_last_line, by_batch, by_commit, by_delay, by_a_schedule,
        as_a_dead_letter, by_redrive,
    ],
)  # fmt: skip
def test_no_stream_is_removed_whose_message_waits_for_the_replica(
    tmp_path: Path, write: Callable[[Copied], None]
) -> None:
    """Its writer gets the answer that it was written."""
    u = Copied(tmp_path, "replay all", "sync replica", "idle 10s")
    for name in ("t", "dead"):
        u.tree.create(ROOT, u.group, name, 0o666)
    u.confirm()
    u.clock.forward(11)
    write(u)
    u.tree.tick()
    assert "t" in u.group.streams
    u.confirm()
    assert [row["body"] for row in u.kept("t")] == ["x"]
    assert u.taken_over().shows(".kept/t") == [b"x"]


def test_no_stream_is_removed_whose_writer_waits() -> None:
    """For room that a consumer makes elsewhere."""
    q = Queues("replay all", "idle 10s", "consumer w backlog 1 full block")
    q.stream("t")
    q.write("s", b"1")
    written = q.at(".put", os.O_WRONLY).write(b'{"stream":"t"} 2')
    assert isinstance(written, Wait)
    q.clock.forward(11)
    q.tree.tick()
    assert sorted(q.group.streams) == ["s", "t"]
    worker = q.worker()
    assert read(worker) == b"1"
    say(worker, "ack")
    assert drain(worker) == [b"2"]
    assert written.settled


def test_no_stream_is_removed_from_which_a_worker_takes() -> None:
    q = Queues("deliver one", "idle 10s")
    worker = q.at(".consumers/.s", os.O_RDWR)
    waiting = worker.read(99)
    q.clock.forward(11)
    q.tree.tick()
    q.write("s", b"1")
    assert waiting.result() == b"1"
    say(worker, "ack")
    worker.close()
    q.clock.forward(11)
    q.tree.tick()
    assert not q.group.streams


def idle_cost(delayed: int) -> int:
    queues = Queues("replay all", "idle 10s")
    for _ in range(delayed):
        queues.put(b"later", delay="1h")
    for name in "abcd":
        queues.stream(name)
        queues.put(b"later", name, delay="1h")
    queues.clock.forward(11)
    return calls(queues.tree.tick)


def test_an_idle_stream_costs_the_same_beside_many_delayed_messages() -> None:
    assert idle_cost(200) <= idle_cost(1) + 5


# ---------------------------------------------------------------- ids and delayed messages


def test_ids_are_forgotten_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_FORGOTTEN", 10)
    u = Units("dedup 10s")
    put = u.at(".put", os.O_WRONLY)
    for number in range(35):
        put.write(b'{"stream":"s","id":"%d"} x' % number)
    u.clock.forward(11)
    known = u.group.state.ids
    for left in (25, 15, 5, 0):
        u.group.retention.trim(always=True)
        assert sum(map(len, known.values())) == left
    assert known == {}


def test_a_full_window_forgets_a_portion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DEDUP_IDS", 40)
    monkeypatch.setattr(admission, "_FORGOTTEN", 10)
    u = Units("dedup 10s")
    put = u.at(".put", os.O_WRONLY)
    for number in range(20):
        put.write(b'{"stream":"s","id":"%d"} x' % number)
    u.clock.forward(11)
    put.write(b'{"stream":"s","id":"new"} x')
    assert [*u.group.state.ids[ROOT.uid]] == [*map(str, range(10, 20)), "new"]


def test_what_others_have_that_is_over_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where root, which may have the last places, has them."""
    monkeypatch.setattr(limits, "DEDUP_IDS", 64)
    u = Units("dedup 10s")
    u.tree.setattr(ROOT, u.group.streams["s"], mode=0o666)
    for user, first, count in ((ANNA, 0, 28), (ROOT, 28, 32)):
        put = u.at(".put", os.O_WRONLY, user)
        for number in range(first, first + count):
            put.write(b'{"stream":"s","id":"%d"} x' % number)
        u.clock.forward(6)
    put = u.at(".put", os.O_WRONLY, BERT)
    for number in range(5):
        put.write(b'{"stream":"s","id":"%d"} x' % number)
    assert sum(map(len, u.group.state.ids.values())) <= 64


def test_the_floor_of_delayed_messages_is_that_of_the_first() -> None:
    u = Units()
    sequences = [u.put(b"x", "s", delay=f"{delay}s") for delay in (30, 10, 20)]
    u.put(b"x", "s", id="job", every="7s")
    for _ in range(40):
        waiting = list(u.group.held._streams)
        assert u.group.held.floor == min(waiting)
        assert waiting == sorted(waiting)
        u.clock.forward(1)
        u.tree.run_timers()
    assert u.group.held.floor > max(sequences)


# ---------------------------------------------------------------- quotas


def kept(owners: int, streams: int) -> Hand:
    hand = Hand("replay all")
    hand.tree = Tree(MemoryStore(), hand.clock, owner=ROOT, quotas=parse_quotas(["* kept=1G"]))
    hand.group = hand.mkdir("g")
    for owner in range(owners):
        for number in range(streams):
            name = f"{owner}-{number}"
            hand.stream(name)
            hand.tree.setattr(ROOT, hand.group.streams[name], uid=2_000 + owner)
            hand.write(name, b"x")
    return hand


def test_a_second_looks_at_so_many_streams_of_all_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_quotas, "_TICK", 20)
    few, many = kept(4, 4), kept(40, 4)
    costs = [calls(hand.tree.kept_quotas.tick) for hand in (few, many)]
    assert costs[1] <= 1.2 * costs[0]


def test_each_owner_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_quotas, "_TICK", 20)
    hand = kept(40, 4)
    quotas = hand.tree.kept_quotas
    before = {owner: quotas.total_of(owner) for owner in quotas.owners}
    assert len(before) == 40
    hand.ctl(*(f"clear {name}" for name in hand.group.streams))
    for _ in range(10):
        quotas.tick()
    assert all(quotas.total_of(owner) < before[owner] for owner in before)
