"""Streams that are work queues: `deliver one`, opened for reading and writing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mqfs import errors
from mqfs.engine.core.portions import exhaust
from mqfs.model import Wait
from tests.support.hand import ANNA, ROOT
from tests.support.queues import BIG, Queues, drain, read, say, waits

ONE = "deliver one"
NEXT = "ack next"


def take(handle: Any) -> list[bytes]:
    """Every message that is to be had at once."""
    bodies = []
    while not isinstance(step := handle.read(BIG), Wait):
        assert step
        bodies.append(bytes(step))
    assert step.cancel()
    return bodies


@pytest.mark.parametrize("ack", ["ack read", "ack next"])
@pytest.mark.parametrize("replay", ["off", "last", "all"])
def test_every_message_goes_to_exactly_one(ack: str, replay: str) -> None:
    q = Queues(ONE, ack, f"replay {replay}")
    q.write("s", b"one", b"two")
    takers = [q.taker() for _ in range(3)]
    got = [read(takers[0]), read(takers[1])]
    q.write("s", b"three")
    got += [read(takers[2])]
    assert got == [b"one", b"two", b"three"]
    assert all(waits(taker) for taker in takers)


def test_the_first_who_waits_is_served_first() -> None:
    q = Queues(ONE)
    takers = [q.taker() for _ in range(3)]
    order = [takers[i].read(BIG) for i in (1, 2, 0)]
    q.write("s", b"one", b"two", b"three")
    assert [wait.result() for wait in order] == [b"one", b"two", b"three"]


def test_a_wait_that_was_cancelled_took_nothing() -> None:
    q = Queues(ONE)
    first, second = q.taker(), q.taker()
    gives_up, stays = first.read(BIG), second.read(BIG)
    assert gives_up.cancel()
    q.write("s", b"one")
    assert stays.result() == b"one"


def test_ack_read_acknowledges_by_handing_over() -> None:
    q = Queues(ONE)
    q.write("s", b"one", b"two")
    taker = q.taker()
    assert read(taker) == b"one"
    assert [row["body"] for row in q.kept()] == ["two"]
    taker.close()
    assert take(q.taker()) == [b"two"]


def test_ack_read_what_could_not_be_delivered_goes_back() -> None:
    q = Queues(ONE)
    dies, lives = q.taker(), q.taker()
    q.write("s", b"one", b"two")
    dies.push_back(dies.read(BIG))
    dies.close()
    assert take(lives) == [b"one", b"two"]


def test_ack_read_what_could_not_be_delivered_while_a_writer_waits() -> None:
    q = Queues(ONE, "depth 1", "full block")
    writer, dies = q.at("s", os.O_WRONLY), q.taker()
    writer.write(b"one")
    blocked = writer.write(b"two")
    assert isinstance(blocked, Wait)
    data = dies.read(BIG)
    assert blocked.settled
    q.queue()
    dies.push_back(data)
    dies.close()
    assert q.shows("s") == [b"one", b"two"]
    assert take(q.taker()) == [b"one", b"two"]


def test_ack_next_the_read_that_makes_room_gets_what_comes() -> None:
    q = Queues(ONE, NEXT, "depth 1", "full block")
    writer, taker = q.at("s", os.O_WRONLY), q.taker()
    writer.write(b"one")
    blocked = writer.write(b"two")
    assert read(taker) == b"one"
    assert read(taker) == b"two"
    assert blocked.result() == 3


def test_ack_read_what_could_not_be_delivered_is_given_again() -> None:
    q = Queues(ONE)
    taker = q.taker()
    q.write("s", b"one", b"two")
    taker.push_back(taker.read(BIG))
    assert take(taker) == [b"one", b"two"]
    taker.close()
    assert waits(q.taker())


def test_a_dead_reader_counts_as_a_failure() -> None:
    q = Queues(ONE, "retries 2")
    q.write("s", b"one")
    for _ in range(2):
        taker = q.taker()
        taker.push_back(taker.read(BIG))
        taker.close()
    assert q.shows("s") == []
    assert q.shows("dead") == [b"one"]


def test_ack_next_acknowledges_with_the_next_read() -> None:
    q = Queues(ONE, NEXT)
    q.write("s", b"one", b"two")
    taker = q.taker()
    assert read(taker) == b"one"
    assert q.queue()["claimed"] == 1
    assert read(taker) == b"two"
    assert q.queue()["claimed"] == 1
    taker.close()
    assert take(q.taker()) == [b"two"]


def test_ack_next_a_read_that_waits_acknowledges_too() -> None:
    q = Queues(ONE, NEXT)
    q.write("s", b"one")
    taker = q.taker()
    assert read(taker) == b"one"
    wait = taker.read(BIG)
    assert q.queue()["claimed"] == 0
    assert wait.cancel()
    taker.close()
    assert waits(q.taker())


def test_ack_next_the_rest_of_a_message_is_no_next_read() -> None:
    q = Queues(ONE, NEXT)
    q.write("s", b"0123456789")
    taker = q.taker()
    assert [taker.read(4), taker.read(4), taker.read(4)] == [b"0123", b"4567", b"89"]
    taker.close()
    assert read(q.taker()) == b"0123456789"


def test_ack_next_a_handle_that_ends_gives_back_to_the_head_counted() -> None:
    q = Queues(ONE, NEXT, "retries 3")
    q.write("s", b"one", b"two")
    for _ in range(2):
        taker = q.taker()
        assert read(taker) == b"one"
        taker.close()
    waiting = q.taker()
    assert read(waiting) == b"one"
    other = q.taker()
    assert read(other) == b"two"
    waiting.close()
    assert q.shows("dead") == [b"one"]
    assert q.kept("dead")[0]["headers"]["deliveries"] == "3"


def test_ack_next_one_that_ends_serves_one_that_waits() -> None:
    q = Queues(ONE, NEXT)
    q.write("s", b"one")
    dies, lives = q.taker(), q.taker()
    assert read(dies) == b"one"
    wait = lives.read(BIG)
    dies.close()
    assert wait.result() == b"one"


def test_ack_next_with_a_lease() -> None:
    q = Queues(ONE, NEXT, "lease 2s", "backoff 1s 1s")
    q.write("s", b"one")
    slow, other = q.taker(), q.taker()
    assert read(slow) == b"one"
    wait = other.read(BIG)
    q.pass_time(2)
    assert not wait.settled
    q.pass_time(1)
    assert wait.result() == b"one"
    assert waits(slow)
    other.close()
    assert read(slow) == b"one"


def test_taking_needs_both_permissions() -> None:
    q = Queues(ONE)
    q.write("s", b"one")
    q.tree.setattr(ROOT, q.group.streams["s"], mode=0o644)
    with pytest.raises(errors.Denied):
        q.taker(user=ANNA)
    assert q.shows("s", ANNA) == [b"one"]


def test_a_taker_writes_and_takes() -> None:
    q = Queues(ONE)
    taker = q.taker()
    taker.write(b"mine")
    assert read(taker) == b"mine"


def test_a_writer_does_not_read() -> None:
    q = Queues(ONE)
    with pytest.raises(errors.Denied):
        q.at("s", os.O_WRONLY).read(BIG)


def test_nobody_could_be_given_an_end_mark() -> None:
    q = Queues(ONE)
    q.write("s", b"one")
    with pytest.raises(errors.BadCommand):
        q.ctl("eof s")
    q.write("s", b"")
    q.write("s", b"two")
    assert q.shows("s") == [b"one", b"two"]
    assert take(q.taker()) == [b"one", b"two"]


# ------------------------------------------------------------------ who only looks


def test_opened_for_reading_only_it_shows_what_waits_and_ends() -> None:
    q = Queues(ONE, NEXT, "backoff 60s 60s")
    q.write("s", b"one", b"two\n", b"three")
    for _ in range(3):
        assert q.shows("s") == [b"one", b"two\n", b"three"]
    taker = q.taker()
    assert read(taker) == b"one"
    assert q.shows("s") == [b"two\n", b"three"]
    taker.close()
    assert q.shows("s") == [b"one", b"two\n", b"three"]


def test_at_its_end_every_read_ends() -> None:
    q = Queues(ONE)
    q.write("s", b"one")
    looks = q.at("s")
    assert [looks.read(BIG, 0), looks.read(BIG, 3), looks.read(BIG, 3)] == [b"one", b"", b""]


def test_what_waits_for_its_backoff_is_shown() -> None:
    q = Queues(ONE, NEXT, "lease 1s", "backoff 60s 60s")
    q.write("s", b"one", b"two")
    assert read(q.taker()) == b"one"
    q.pass_time(1)
    assert q.shows("s") == [b"one", b"two"]
    assert (q.queue()["delayed"], q.queue()["waiting"]) == (1, 2)


def test_who_only_looks_holds_nothing_back() -> None:
    q = Queues(ONE)
    q.write("s", b"one")
    looks = q.at("s")
    assert read(q.taker()) == b"one"
    assert looks.read(BIG, 0) == b""
    assert q.kept() == []


def test_a_short_buffer_that_only_looks() -> None:
    q = Queues(ONE)
    q.write("s", b"0123456789", b"next")
    looks = q.at("s")
    assert [looks.read(6, 0), looks.read(6, 6), looks.read(6, 10)] == [b"012345", b"6789", b"next"]


# ------------------------------------------------------------------ what is kept, and depth


def test_acknowledged_is_gone_whatever_replay_says() -> None:
    q = Queues(ONE, "replay all")
    q.write("s", b"one", b"two")
    assert take(q.taker()) == [b"one", b"two"]
    assert q.kept() == []
    assert q.tree.stat(q.group.streams["s"]).kept_bytes == 0


def test_depth_counts_what_waits_and_what_is_claimed() -> None:
    q = Queues(ONE, NEXT, "depth 2")
    assert "full reject" in q.text("ctl")
    writer = q.at("s", os.O_WRONLY)
    writer.write(b"one")
    writer.write(b"two")
    taker = q.taker()
    assert read(taker) == b"one"
    with pytest.raises(errors.StreamFull):
        writer.write(b"three")
    assert read(taker) == b"two"
    writer.write(b"three")
    with pytest.raises(errors.StreamFull):
        writer.write(b"four")


def test_depth_in_bytes() -> None:
    q = Queues(ONE, "depth 10B")
    q.write("s", b"12345", b"6789")
    with pytest.raises(errors.StreamFull):
        q.write("s", b"ab")
    with pytest.raises(errors.TooLong):
        q.write("s", b"longer than ten")
    assert read(q.taker()) == b"12345"
    q.write("s", b"ab")


def test_full_block() -> None:
    q = Queues(ONE, "depth 1", "full block")
    writer = q.at("s", os.O_WRONLY)
    writer.write(b"one")
    blocked = writer.write(b"two")
    assert isinstance(blocked, Wait)
    assert read(q.taker()) == b"one"
    assert blocked.result() == 3
    assert q.shows("s") == [b"two"]


@pytest.mark.parametrize(("full", "left"), [("drop-old", [b"two", b"three"]), ("drop-new", [b"one", b"two"])])
def test_full_drop(full: str, left: list[bytes]) -> None:
    q = Queues(ONE, "depth 2", f"full {full}")
    q.write("s", b"one", b"two", b"three")
    assert q.shows("s") == left
    assert take(q.taker()) == left


def test_ttl() -> None:
    q = Queues(ONE, "ttl 5s")
    q.write("s", b"old")
    q.pass_time(3)
    q.write("s", b"young")
    q.pass_time(2)
    assert q.shows("s") == [b"young"]
    assert take(q.taker()) == [b"young"]


def test_clear_and_drop() -> None:
    q = Queues(ONE)
    q.write("s", b"one", b"two", b"three")
    q.ctl("drop s 2")
    assert q.shows("s") == [b"one", b"three"]
    q.ctl("clear s")
    assert q.shows("s") == []
    assert waits(q.taker())


def test_priorities_are_served_first() -> None:
    q = Queues(ONE)
    q.write("s", b"usual")
    q.put(b"high", priority=9)
    q.put(b"low", priority=1)
    assert take(q.taker()) == [b"high", b"usual", b"low"]


def test_a_stream_that_is_removed_ends_its_takers() -> None:
    q = Queues(ONE)
    taker = q.taker()
    wait = taker.read(BIG)
    q.tree.unlink(ROOT, q.group, "s")
    assert wait.result() == b""
    assert read(taker) == b""
    taker.close()


def test_a_named_consumer_beside_the_queue() -> None:
    q = Queues(ONE)
    q.consumer("audit")
    q.write("s", b"one", b"two")
    assert take(q.taker()) == [b"one", b"two"]
    assert len(q.kept()) == 2
    audit = q.worker("audit")
    assert read(audit) == b"one"
    say(audit, "ack")
    assert [row["body"] for row in q.kept()] == ["two"]


def test_the_queue_beside_a_named_consumer() -> None:
    q = Queues(ONE)
    q.consumer("audit")
    q.write("s", b"one")
    audit = q.worker("audit")
    assert read(audit) == b"one"
    say(audit, "ack")
    assert q.shows("s") == [b"one"]
    assert take(q.taker()) == [b"one"]
    assert q.kept() == []


def test_stats_tell_of_the_queue() -> None:
    q = Queues(ONE, NEXT)
    q.write("s", b"one", b"two", b"three")
    taker, other = q.taker(), q.taker()
    read(taker)
    read(taker)
    own = q.queue()
    assert {key: own[key] for key in ("claimed", "waiting", "delayed", "handles", "parked")} == {
        "claimed": 1, "waiting": 1, "delayed": 0, "handles": 2, "parked": 0,
    }  # fmt: skip
    assert (own["delivered"], own["acknowledged"]) == (2, 1)
    other.close()


# ------------------------------------------------------------------ settings


def test_deliver_is_not_changed_on_a_group_that_keeps_messages() -> None:
    q = Queues("replay all")
    q.write("s", b"one")
    with pytest.raises(errors.Busy):
        q.ctl(ONE)
    q.ctl("clear")
    q.ctl(ONE)
    q.write("s", b"one")
    with pytest.raises(errors.Busy):
        q.ctl("deliver all")
    assert take(q.taker()) == [b"one"]
    q.ctl("ack next")


def test_deliver_is_not_changed_while_a_stream_is_open() -> None:
    q = Queues()
    handle = q.at("s", os.O_RDONLY)
    with pytest.raises(errors.Busy):
        q.ctl(ONE)
    handle.close()
    q.ctl(ONE)
    assert read_ctl(q, "ack") == "read"
    q.ctl("ack next")
    q.ctl("deliver all")
    q.ctl(ONE)
    assert read_ctl(q, "ack") == "read"


def read_ctl(q: Queues, key: str) -> str:
    return next(line.split(" ", 1)[1] for line in q.text("ctl").splitlines() if line.split(" ")[0] == key)


@pytest.mark.parametrize("lines", [["ack next"], ["deliver one", "data coalesce"], ["data coalesce", "deliver one"],
                                   ["deliver one", "deliver all", "ack next"]])  # fmt: skip
def test_contradictions(lines: list[str]) -> None:
    q = Queues()
    with pytest.raises(errors.BadCommand):
        q.ctl(*lines)
    assert read_ctl(q, "deliver") == "all"


def test_ack_may_follow_deliver_in_one_write() -> None:
    q = Queues("deliver one", "ack next")
    assert read_ctl(q, "ack") == "next"


def test_lines() -> None:
    q = Queues(ONE, "data line")
    q.write("s", b"one\ntwo\nthr")
    taker = q.taker()
    assert take(taker) == [b"one\n", b"two\n", b"thr"]


# ------------------------------------------------------------------ restarts


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("ack", ["ack read", "ack next"])
@pytest.mark.parametrize("replay", ["off", "all"])
def test_the_queue_survives(tmp_path: Path, clean: bool, ack: str, replay: str) -> None:
    q = Queues(ONE, ack, f"replay {replay}", path=tmp_path / "store")
    q.write("s", b"one", b"two", b"three")
    assert read(q.taker()) == b"one"
    q.restart(clean=clean)
    left = [b"two", b"three"] if ack == "ack read" else [b"one", b"two", b"three"]
    assert q.shows("s") == left
    taker = q.taker()
    assert take(taker) == left
    taker.close()
    q.restart(clean=clean)
    assert q.shows("s") == []
    q.write("s", b"four")
    assert take(q.taker()) == [b"four"]


def test_a_kill_counts_and_a_clean_stop_does_not(tmp_path: Path) -> None:
    q = Queues(ONE, NEXT, "retries 2", path=tmp_path / "store")
    q.write("s", b"one")
    for clean in (True, False, True):
        assert read(q.taker()) == b"one"
        q.restart(clean=clean)
    assert read(q.taker()) == b"one"
    q.restart(clean=False)
    assert q.shows("s") == []
    assert q.shows("dead") == [b"one"]


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("lines", [[], ["depth 2"], ["full reject"]])
def test_what_depth_cut_stays_cut(tmp_path: Path, clean: bool, lines: list[str]) -> None:
    q = Queues(ONE, "depth 1", "full drop-old", path=tmp_path / "store")
    q.write("s", b"one", b"two", b"three")
    q.ctl(*lines)
    q.restart(clean=clean)
    assert q.shows("s") == [b"three"]
    assert take(q.taker()) == [b"three"]
    q.restart(clean=clean)
    assert take(q.taker()) == []


def test_depth_after_a_restart(tmp_path: Path) -> None:
    q = Queues(ONE, "depth 2", path=tmp_path / "store")
    q.write("s", b"one", b"two")
    assert read(q.taker()) == b"one"
    q.restart(clean=False)
    q.write("s", b"three")
    with pytest.raises(errors.StreamFull):
        q.write("s", b"four")
    assert take(q.taker()) == [b"two", b"three"]


def consumers(q: Queues) -> Any:
    return json.loads(q.group.state.encode())["consumers"]


@pytest.mark.parametrize("lines", [(ONE,), (ONE, NEXT), ("replay off", "consumer w"), ("replay all",)], ids=str)
def test_looking_changes_nothing(lines: tuple[str, ...]) -> None:
    q = Queues(*lines)
    q.stream("t")
    q.write("s", b"one", b"two")
    q.put(b"only", single=True)
    before = consumers(q)
    node: Any
    for folder in ("g", "g/.consumers", "g/.kept"):
        for node in exhaust(q.tree.entries(ROOT, q.tree.find(ROOT, folder))):  # type: ignore[arg-type]
            q.tree.stat(node)
            if not node.directory and node.name not in (".cursor", ".put", ".batch"):
                handle = q.tree.open(ROOT, node, os.O_RDONLY)
                step = handle.read(64)
                if isinstance(step, Wait):
                    step.cancel()
                handle.close()
    assert consumers(q) == before


def test_a_new_consumer_gets_what_all_others_had_after_a_message_that_is_kept() -> None:
    """And nothing before that one."""
    q = Queues("replay all", "deliver one")
    q.consumer("u")
    first, _, urgent = q.put(b"first"), q.put(b"kept"), q.put(b"urgent", priority=9)
    for name in (".s", "u"):
        worker = q.worker(name)
        assert [read(worker), read(worker)] == [b"urgent", b"first"]
        say(worker, f"ack {first} {urgent}")
        worker.close()
    assert q.shows(".kept/s") == [b"kept"]
    q.consumer("w")
    assert drain(q.worker("w")) == [b"urgent", b"kept"]
