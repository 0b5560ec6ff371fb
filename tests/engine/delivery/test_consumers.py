"""Named consumers: who gets what, what becomes of a claim, which commands a handle takes."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mqfs import errors
from mqfs.engine.core.portions import exhaust
from mqfs.engine.nodes import Meta
from mqfs.model import User, Wait
from mqfs.records.headers import NORMAL
from tests.support.batches import frame
from tests.support.calls import lines
from tests.support.hand import ANNA, BERT, ROOT
from tests.support.queues import BIG, Queues, drain, read, refusal, say, told, waits

# ------------------------------------------------------------------ who gets what


def test_every_consumer_gets_every_message_and_its_handles_share_them() -> None:
    q = Queues()
    q.consumer("v")
    q.consumer("w")
    first, second, other = q.worker("w"), q.worker("w"), q.worker("v")
    q.write("s", b"one", b"two", b"three")
    assert [read(first), read(second), read(first)] == [b"one", b"two", b"three"]
    assert waits(first)
    assert drain(other) == [b"one", b"two", b"three"]


@pytest.mark.parametrize(("replay", "first"), [("off", []), ("last", [b"b2"]), ("all", [b"a1", b"b1", b"a2", b"b2"])])
def test_a_consumer_starts_where_replay_says(replay: str, first: list[bytes]) -> None:
    q = Queues(f"replay {replay}")
    q.stream("t")
    for name, body in (("s", b"a1"), ("t", b"b1"), ("s", b"a2"), ("t", b"b2")):
        q.write(name, body)
    q.consumer()
    worker = q.worker()
    assert drain(worker) == first
    q.write("s", b"new")
    assert drain(worker) == [b"new"]


def test_it_does_not_begin_anew_with_each_handle() -> None:
    q = Queues("replay all")
    q.write("s", b"one", b"two")
    q.consumer()
    worker = q.worker()
    assert read(worker) == b"one"
    say(worker, "ack")
    worker.close()
    assert drain(q.worker()) == [b"two"]


def test_those_who_wait_are_served_in_the_order_in_which_they_began() -> None:
    q = Queues()
    q.consumer()
    handles = [q.worker() for _ in range(3)]
    order = [handles[i].read(BIG) for i in (2, 0, 1, 2)]
    q.write("s", b"one", b"two", b"three")
    assert [wait.result() for wait in order[:3]] == [b"one", b"two", b"three"]
    assert not order[3].settled
    q.write("s", b"four")
    assert order[3].result() == b"four"


def test_a_wait_that_was_cancelled_has_taken_nothing() -> None:
    q = Queues()
    q.consumer()
    first, second = q.worker(), q.worker()
    gives_up, stays = first.read(BIG), second.read(BIG)
    assert gives_up.cancel()
    q.write("s", b"one")
    assert stays.result() == b"one"
    assert waits(first)
    assert q.stats()["claimed"] == 1


def test_a_consumer_of_one_stream() -> None:
    q = Queues()
    q.stream("t")
    q.consumer("w", "t")
    q.write("s", b"not this")
    q.write("t", b"this")
    assert drain(q.worker()) == [b"this"]
    assert q.stats()["over"] == "t"


def test_a_consumer_may_precede_its_stream() -> None:
    q = Queues()
    q.consumer("w", "later")
    wait = q.worker().read(BIG)
    q.stream("later")
    q.write("s", b"not this")
    q.write("later", b"this")
    assert wait.result() == b"this"


def test_a_consumer_follows_its_stream_when_that_is_renamed() -> None:
    q = Queues()
    q.consumer("w", "s")
    q.write("s", b"before")
    q.tree.rename(ROOT, q.group, "s", q.group, "t")
    q.write("t", b"after")
    q.stream("s")
    q.write("s", b"another stream of that name")
    assert drain(q.worker()) == [b"before", b"after"]


COVERS_MORE: dict[str, Callable[[Queues], object]] = {
    "bound": lambda q: q.ctl("bind v x"),
    "added": lambda q: q.ctl("bind v y", "bind v x"),
    "renamed": lambda q: (q.ctl("bind v z"), q.tree.rename(ROOT, q.group, "x", q.group, "z")),
}


@pytest.mark.parametrize("how", COVERS_MORE)
@pytest.mark.parametrize("looks", ["not", "looks", "waits", "claims"])
def test_what_a_consumer_covers_later_is_not_acknowledged_unread(how: str, looks: str) -> None:
    """Whether or not a worker had looked for a message before: it counts as waiting, and the first claim gets it."""
    q = Queues()
    for name in ("a", "x", "y"):
        q.stream(name)
    q.ctl("bind v a")
    q.consumer("w", "v")
    if looks == "claims":
        q.write("a", b"0")
    q.write("x", b"1")
    worker = q.worker()
    if looks == "claims":
        assert read(worker) == b"0"
    waiting = worker.read(64) if looks in ("looks", "waits", "claims") else None
    if looks in ("looks", "claims"):
        assert isinstance(waiting, Wait)
        assert waiting.cancel()
    COVERS_MORE[how](q)
    q.write("a", b"2")
    if isinstance(waiting, Wait) and looks == "waits":
        assert waiting.result() == b"1"
        assert drain(worker) == [b"2"]
    else:
        assert drain(worker) == [b"1", b"2"]


def late(*words: str, path: Path | None = None) -> Queues:
    """A consumer over a view, which does not cover the stream `x` yet."""
    q = Queues(path=path)
    q.stream("a")
    q.stream("x")
    q.ctl("bind v a")
    q.consumer("w", "v", *words)
    return q


@pytest.mark.parametrize("how", COVERS_MORE)
def test_a_read_that_waits_gets_what_is_covered_later(how: str) -> None:
    """Without another message."""
    q = late()
    q.stream("y")
    q.write("x", b"1")
    waiting = q.worker().read(64)
    assert isinstance(waiting, Wait)
    COVERS_MORE[how](q)
    assert waiting.result() == b"1"


@pytest.mark.parametrize("how", ["renamed", "set"])
def test_a_consumer_gets_what_is_no_dead_letter_any_more(how: str) -> None:
    q = Queues("replay all", "dead lost")
    q.consumer()
    q.write("s", b"1")
    worker = q.worker()
    assert read(worker) == b"1"
    say(worker, "dead x")
    waiting = worker.read(64)
    assert isinstance(waiting, Wait)
    if how == "renamed":
        q.tree.rename(ROOT, q.group, "lost", q.group, "z")
    else:
        q.ctl("dead other")
    assert waiting.result() == b"1"
    say(worker, "ack")
    assert q.stats()["waiting"] == 0


def test_what_is_covered_later_is_not_lost_behind_a_message_that_waits_for_its_key() -> None:
    q = late("order", "key")
    q.put(b"1", "a", key="A")
    q.put(b"2", "x", key="B")
    q.put(b"3", "a", key="A")
    first, second = q.worker(), q.worker()
    assert read(first) == b"1"
    assert waits(second)
    q.ctl("bind v x")
    assert q.stats()["waiting"] == 2
    assert drain(second) == [b"2"]
    say(first, "ack")
    assert drain(second) == [b"3"]


@pytest.mark.parametrize("ahead", [{"ttl": "1h"}, {"priority": 9}])
@pytest.mark.parametrize("words", [(), ("order", "key")])
@pytest.mark.parametrize("then", ["claims", "offered"])
def test_what_is_covered_later_is_not_lost_between_messages_known_already(
    then: str, words: tuple[str, ...], ahead: dict[str, Any]
) -> None:
    """The consumer looked past it, but has claimed none behind it: `offered`, not even when another consumer releases
    a `single` message."""
    q = late(*words)
    q.stream("b")
    q.ctl("bind v b")
    q.consumer("other", "a")
    q.put(b"0", "a")
    worker, other = q.worker(), q.worker("other")
    assert [read(worker), read(other)] == [b"0", b"0"]
    say(worker, "nack 1h")
    worker.close()
    q.put(b"1", "a", single=then == "offered", **ahead)
    if then == "offered":
        assert read(other) == b"1"
    q.put(b"2", "x")
    q.put(b"3", "a", **ahead)
    worker = q.worker()
    if then == "claims":
        assert read(worker) == b"1"
    else:
        assert waits(q.worker("w", "select b"))
        say(other, "release 2")
    q.ctl("bind v x")
    assert sorted(drain(worker)) == ([b"2", b"3"] if then == "claims" else [b"1", b"2", b"3"])


def assert_left(q: Queues, *bodies: bytes) -> None:
    """Kill the server, and check which of the five messages stay."""
    q.restart(clean=False)
    assert q.stats()["waiting"] == len(bodies)
    assert drain(q.worker()) == [*bodies]
    assert q.stats()["low"] == 6


@pytest.mark.parametrize("gone", ["drop a 2 4", "clear a", "remove"])
@pytest.mark.parametrize("priority", [NORMAL, 9])
def test_what_is_covered_later_stays_unacked_where_a_message_behind_it_is_gone(
    priority: int, gone: str, tmp_path: Path
) -> None:
    """The slot of the message that is gone holds it, claimed or not, and is acked with a claim behind that."""
    q = late(path=tmp_path / "store")
    q.put(b"1", "x", priority=priority)
    for stream, body in (("a", b"2"), ("x", b"3"), ("a", b"4"), ("x", b"5")):
        q.write(stream, body)
    worker = q.worker()
    assert [read(worker), read(worker)] == [b"2", b"4"]
    say(worker, "release 2 4")
    if gone == "remove":
        q.tree.unlink(ROOT, q.group, "a")
    else:
        q.ctl(gone)
    q.ctl("bind v x")
    others = q.worker(), q.worker()
    assert [read(worker), *map(read, others)] == [b"1", b"3", b"5"]
    for other in others:
        say(other, "ack")
    assert q.stats()["low"] == 1
    assert_left(q, b"1")


def again(q: Queues, how: str) -> None:
    """Have the consumer look at all messages again."""
    if how == "restarted":
        q.restart(clean=False)
    elif how == "rules":
        q.ctl("consumer w v order key")


@pytest.mark.parametrize("how", ["bound", "rules", "restarted"])
@pytest.mark.parametrize("priority", [NORMAL, 9])
def test_an_acknowledgement_takes_none_of_what_is_covered_later_and_claimed(
    how: str, priority: int, tmp_path: Path
) -> None:
    """They lay in the slot of a message behind them."""
    q = late(path=tmp_path / "store")
    for body in (b"1", b"2", b"3"):
        q.put(body, "x", priority=priority)
    q.write("a", b"4", b"5")
    held = q.worker()
    assert read(held) == b"4"
    q.ctl("bind v x")
    again(q, how)
    if how == "restarted":
        held = q.worker()
    first, second, third = (q.worker() for _ in range(3))
    assert [read(one) for one in (first, second, third)] == [b"1", b"2", b"3"]
    if how == "restarted":
        assert read(held) == b"4"
    say(held, "ack")
    say(third, "ack")
    assert_left(q, b"1", b"2", b"5")


COVERS_LESS: dict[str, Callable[[Queues], object]] = {
    "unbound": lambda q: q.ctl("unbind v"),
    "one of two": lambda q: q.ctl("bind v x", "unbind v a"),
    "removed": lambda q: q.tree.unlink(ROOT, q.group, "v"),
    "renamed": lambda q: q.tree.rename(ROOT, q.group, "a", q.group, "b"),
}


@pytest.mark.parametrize("how", COVERS_LESS)
@pytest.mark.parametrize("kept", ["deliver one", "replay off"])
def test_what_no_consumer_covers_any_more_makes_room(kept: str, how: str) -> None:
    """For a write that waits."""
    q = late()
    q.ctl(kept, "depth 1", "full block")
    writer = q.open("a", os.O_WRONLY)
    writer.write(b"1")
    if kept == "deliver one":
        assert read(q.taker("a")) == b"1"
    blocked = writer.write(b"2")
    assert isinstance(blocked, Wait)
    COVERS_LESS[how](q)
    assert blocked.result() == 1


def test_an_urgent_message_covered_later_takes_none_of_those_before_it(tmp_path: Path) -> None:
    """It is claimed before them, out of the slot that holds them as well."""
    q = late(path=tmp_path / "store")
    q.write("x", b"before")
    q.put(b"urgent", "x", priority=9)
    q.write("x", b"behind")
    q.write("a", b"held", b"last")
    held = q.worker()
    assert read(held) == b"held"
    q.ctl("bind v x")
    assert drain(q.worker()) == [b"urgent", b"before", b"behind", b"last"]
    say(held, "ack")
    assert q.stats()["low"] == 6


@pytest.mark.parametrize("end", ["ack", "dead"])
@pytest.mark.parametrize("how", COVERS_LESS)
@pytest.mark.parametrize("kept", ["deliver one", "replay off"])
def test_what_is_claimed_and_not_covered_any_more_makes_room_once(kept: str, how: str, end: str) -> None:
    """When its claim ends its stream has no more room than before."""
    q = late()
    q.ctl(kept, "depth 3", "full reject")
    q.consumer("other", "a")
    writer, worker, other = q.open("a", os.O_WRONLY), q.worker(), q.worker("other")
    for body in (b"1", b"2", b"3"):
        writer.write(body)
    for reader in (worker, other, *([q.taker("a")] if kept == "deliver one" else [])):
        assert [read(reader), read(reader)] == [b"1", b"2"]
    say(other, "ack 2")
    COVERS_LESS[how](q)
    writer.write(b"4")
    say(worker, f"{end} 2")
    with pytest.raises(errors.StreamFull):
        writer.write(b"5")
    assert q.row("b" if how == "renamed" else "a")["messages"] == 3


def test_a_stream_of_dead_letters_counts_what_was_claimed_before_it_was_one_once() -> None:
    q = Queues("deliver one")
    q.consumer()
    q.write("s", b"1", b"2")
    worker = q.worker()
    assert [read(worker), read(q.taker())] == [b"1", b"1"]
    q.ctl("dead s")
    assert q.row()["messages"] == 1
    say(worker, "ack")
    assert q.row()["messages"] == 1


def test_a_consumer_of_a_view() -> None:
    q = Queues("bind quotes '*.quote'")
    for name in ("a.quote", "b.quote", "a.trade"):
        q.stream(name)
    q.consumer("w", "quotes")
    q.write("a.quote", b"one")
    q.write("a.trade", b"not this")
    q.write("b.quote", b"two")
    q.stream("c.quote")
    q.write("c.quote", b"three")
    assert drain(q.worker()) == [b"one", b"two", b"three"]


def test_a_message_is_offered_only_to_handles_that_may_read_its_stream() -> None:
    q = Queues()
    q.tree.setattr(ROOT, q.group, mode=0o777)
    q.stream("secret", mode=0o600)
    q.ctl("consumer w")
    q.tree.setattr(ROOT, q.tree.find(ROOT, "g/.consumers/w"), mode=0o666)
    anna, root = q.worker(user=ANNA), q.worker()
    hers, mine = anna.read(BIG), root.read(BIG)
    q.write("secret", b"for root")
    assert mine.result() == b"for root"
    q.write("s", b"for all")
    assert hers.result() == b"for all"
    assert q.shows(".consumers/w", ANNA) == []


def test_end_marks_are_not_for_workers() -> None:
    q = Queues()
    q.consumer()
    worker = q.worker()
    wait = worker.read(BIG)
    q.write("s", b"")
    assert not wait.settled
    q.write("s", b"one")
    assert wait.result() == b"one"
    q.write("s", b"")
    q.write("s", b"two")
    assert drain(worker) == [b"two"]


# ------------------------------------------------------------------ what becomes of a claim


def test_acknowledged_is_done() -> None:
    q = Queues()
    q.consumer()
    q.write("s", b"one")
    worker = q.worker()
    read(worker)
    assert q.stats()["claimed"] == 1
    say(worker, "ack")
    worker.close()
    assert waits(q.worker())
    assert (q.stats()["claimed"], q.stats()["waiting"]) == (0, 0)


def test_nack_brings_it_back_after_a_time_that_doubles() -> None:
    q = Queues("backoff 1s 4s", "retries 0")
    q.consumer()
    q.write("s", b"one")
    worker = q.worker()
    for delay in (1, 2, 4, 4):
        assert read(worker) == b"one"
        say(worker, "nack")
        assert q.stats()["delayed"] == 1
        q.pass_time(delay - 1)
        assert waits(worker)
        q.pass_time(1)
    assert read(worker) == b"one"
    assert told(worker)["deliveries"] == "5"


def test_nack_with_a_delay_of_its_own() -> None:
    q = Queues("backoff 1s 4s")
    q.consumer()
    q.write("s", b"one")
    worker = q.worker()
    read(worker)
    say(worker, "nack 0s")
    assert read(worker) == b"one"
    say(worker, "nack 10s")
    q.pass_time(9)
    assert waits(worker)
    wait = worker.read(BIG)
    q.pass_time(1)
    assert wait.result() == b"one"


def test_others_pass_one_that_is_held_back() -> None:
    q = Queues("backoff 5s 5s", "retries 0")
    q.consumer()
    q.write("s", b"poison", b"one", b"two")
    worker = q.worker()
    assert read(worker) == b"poison"
    say(worker, "nack")
    assert drain(worker) == [b"one", b"two"]
    q.pass_time(5)
    assert drain(worker) == [b"poison"]


def test_release_is_at_once_and_not_counted() -> None:
    q = Queues("retries 1")
    q.consumer()
    q.write("s", b"one")
    worker = q.worker()
    for _ in range(3):
        assert read(worker) == b"one"
        assert told(worker)["deliveries"] == "1"
        say(worker, "release")


def test_what_comes_back_is_at_its_old_place() -> None:
    q = Queues()
    q.consumer()
    q.write("s", b"one", b"two", b"three")
    worker = q.worker()
    assert [read(worker), read(worker)] == [b"one", b"two"]
    say(worker, "release 1 2")
    assert [read(worker), read(worker), read(worker)] == [b"one", b"two", b"three"]


def test_a_lease_that_runs_out_is_a_nack() -> None:
    q = Queues("lease 3s", "backoff 2s 2s")
    q.consumer()
    q.write("s", b"one")
    slow, other = q.worker(), q.worker()
    assert read(slow) == b"one"
    q.pass_time(2)
    assert q.stats()["claimed"] == 1
    q.pass_time(1)
    assert (q.stats()["claimed"], q.stats()["delayed"]) == (0, 1)
    assert isinstance(refusal(slow, "ack"), errors.Stale)
    q.pass_time(2)
    assert read(other) == b"one"
    assert told(other)["deliveries"] == "2"


def test_touch_renews_the_lease() -> None:
    q = Queues("lease 3s")
    q.consumer()
    q.write("s", b"one")
    worker = q.worker()
    read(worker)
    for _ in range(4):
        q.pass_time(2)
        say(worker, "touch")
    say(worker, "ack")


def test_without_a_lease_a_claim_lasts_as_long_as_its_handle() -> None:
    q = Queues()
    q.consumer()
    q.write("s", b"one")
    worker = q.worker()
    read(worker)
    q.pass_time(1000)
    say(worker, "ack")


def test_the_last_close_gives_claims_back_to_the_head_counted_and_at_once() -> None:
    q = Queues("backoff 60s 60s")
    q.consumer()
    q.write("s", b"one", b"two", b"three")
    dies, lives = q.worker(), q.worker()
    assert [read(dies), read(dies)] == [b"one", b"two"]
    dies.close()
    assert read(lives) == b"one"
    assert told(lives)["deliveries"] == "2"
    assert drain(lives) == [b"two", b"three"]


def test_a_reader_that_dies_before_it_got_the_answer_gives_it_back() -> None:
    q = Queues()
    q.consumer()
    dies, lives = q.worker(), q.worker()
    wait = dies.read(BIG)
    q.write("s", b"one", b"two")
    dies.push_back(wait.result())
    dies.close()
    assert drain(lives) == [b"one", b"two"]


def test_an_answer_that_was_not_delivered_is_given_again() -> None:
    q = Queues()
    q.consumer()
    q.write("s", b"one", b"two")
    worker = q.worker()
    worker.push_back(worker.read(BIG))
    assert read(worker) == b"one"
    say(worker, "ack")
    assert read(worker) == b"two"


def test_a_claim_that_was_cut_meanwhile_can_still_be_acknowledged() -> None:
    q = Queues()
    q.consumer()
    q.write("s", b"one", b"two", b"three")
    worker = q.worker()
    assert [read(worker), read(worker), read(worker)] == [b"one", b"two", b"three"]
    q.ctl("clear s")
    say(worker, "ack 1")
    say(worker, "release 2")
    say(worker, "nack 3")
    q.pass_time(10)
    assert waits(worker)


def test_what_was_cut_is_skipped() -> None:
    q = Queues("replay all", "ttl 10s")
    q.consumer()
    q.write("s", b"old")
    q.pass_time(5)
    q.write("s", b"dropped", b"one")
    q.ctl("drop s 2")
    q.pass_time(5)
    assert drain(q.worker()) == [b"one"]


def test_nothing_that_was_not_acknowledged_is_removed() -> None:
    q = Queues("replay off")
    q.consumer()
    bodies = [b"%d" % i for i in range(100)]
    q.write("s", *bodies)
    q.pass_time(5)
    assert drain(q.worker()) == bodies
    q.consumer("late")
    say(late := q.worker("late"), "seek first")
    assert waits(late)


@pytest.mark.parametrize("replay", ["off", "last", "all"])
@pytest.mark.parametrize(("first", "second"), [("", "s"), ("s", ""), ("s", "s"), ("", ""), ("", "v"), ("v", "s")])
def test_what_one_has_had_is_kept_for_the_other(replay: str, first: str, second: str) -> None:
    q = Queues(f"replay {replay}", "bind v '#'")
    q.consumer("one", first)
    q.consumer("two", second)
    q.write("s", b"1", b"2", b"3")
    assert drain(q.worker("one")) == [b"1", b"2", b"3"]
    q.pass_time(1)
    assert q.shows(".consumers/two") == [b"1", b"2", b"3"]
    assert drain(q.worker("two")) == [b"1", b"2", b"3"]
    assert len(q.kept()) == {"off": 0, "last": 1, "all": 3}[replay]


def test_acknowledged_ones_make_room() -> None:
    """A poison message does not stop the writers."""
    q = Queues("replay off", "depth 2", "full reject", "retries 0", "backoff 1h 1h")
    q.consumer()
    q.write("s", b"poison")
    worker = q.worker()
    assert read(worker) == b"poison"
    say(worker, "nack")
    for i in range(5):
        q.write("s", b"%d" % i)
        assert drain(worker) == [b"%d" % i]


def test_a_selection_that_was_removed_ends() -> None:
    q = Queues()
    q.stream("t")
    q.consumer()
    worker = q.worker("w", "select t")
    wait = worker.read(BIG)
    q.tree.unlink(ROOT, q.group, "t")
    assert wait.result() == b""
    assert read(worker) == b""


def test_the_text_of_a_refusal_is_for_the_next_read() -> None:
    """Also where another read of the handle waits for a message."""
    q = Queues()
    q.consumer()
    worker = q.worker()
    wait = worker.read(BIG)
    error = refusal(worker, "ack")
    assert isinstance(error, errors.Stale)
    q.write("s", b"one")
    assert wait.result() == b"one"


# ------------------------------------------------------------------ in which order


def test_higher_priority_first() -> None:
    q = Queues()
    q.consumer()
    q.put(b"low", priority=0)
    q.write("s", b"usual")
    q.put(b"high", priority=9)
    q.put(b"also high", priority=9)
    q.put(b"a bit", priority=6)
    assert drain(q.worker()) == [b"high", b"also high", b"a bit", b"usual", b"low"]


def test_order_expiry_serves_what_ends_first() -> None:
    q = Queues("order expiry")
    q.consumer()
    q.write("s", b"never")
    q.put(b"in 50", ttl="50s")
    q.put(b"in 20", ttl="20s")
    q.put(b"urgent", ttl="60s", priority=9)
    q.ctl("ttl 40s")
    q.put(b"in 30", ttl="30s")
    assert drain(q.worker()) == [b"urgent", b"in 20", b"in 30", b"never", b"in 50"]


def test_what_has_outlived_its_own_ttl_is_not_delivered() -> None:
    q = Queues("replay all")
    q.consumer()
    q.put(b"short", ttl="3s")
    q.put(b"long", ttl="30s")
    q.pass_time(3)
    assert drain(q.worker()) == [b"long"]
    assert [row["body"] for row in q.kept()] == ["long"]


# ------------------------------------------------------------------ commands about claims


def test_commands_name_claims() -> None:
    q = Queues()
    q.consumer()
    q.write("s", b"one", b"two", b"three", b"four")
    worker = q.worker()
    for _ in range(4):
        read(worker)
    say(worker, "ack 1 3")
    say(worker, "ack")
    assert isinstance(refusal(worker, "ack 3"), errors.Stale)
    worker.close()
    assert drain(q.worker()) == [b"two"]


def test_several_lines_are_done_together_or_not_at_all() -> None:
    q = Queues()
    q.consumer()
    q.write("s", b"one", b"two")
    worker = q.worker()
    assert [read(worker), read(worker)] == [b"one", b"two"]
    assert isinstance(refusal(worker, "ack 1\nack 7"), errors.Stale)
    assert q.stats()["claimed"] == 2
    say(worker, "ack 1\nack 2")
    assert q.stats()["claimed"] == 0


def test_a_line_may_come_in_pieces() -> None:
    q = Queues()
    q.consumer()
    q.write("s", b"one")
    worker = q.worker()
    read(worker)
    worker.write(b"ac")
    assert q.stats()["claimed"] == 1
    worker.write(b"k\n")
    assert q.stats()["claimed"] == 0


def test_a_short_buffer_gets_the_rest_next() -> None:
    q = Queues()
    q.consumer()
    q.write("s", b"0123456789", b"next")
    worker = q.worker()
    assert [worker.read(4), worker.read(4), worker.read(4), worker.read(4)] == [b"0123", b"4567", b"89", b"next"]


@pytest.mark.parametrize("command", ["ack", "nack 1m", "release", "dead"])
def test_a_command_discards_the_rest_of_its_message(command: str) -> None:
    q = Queues()
    q.consumer()
    q.write("s", b"0123456789", b"next")
    worker = q.worker()
    assert worker.read(4) == b"0123"
    say(worker, command)
    assert read(worker) == (b"0123456789" if command == "release" else b"next")


def test_info_tells_of_the_last_message() -> None:
    q = Queues()
    q.consumer()
    q.clock.wall = 1_700_000_000_123_456_789
    sequence = q.put(b"one", headers={"colour": "blue"}, priority=7)
    worker = q.worker()
    read(worker)
    own = told(worker)
    assert own.pop("time").startswith("1700000000.")
    assert own == {
        "sequence": str(sequence), "stream": "s", "deliveries": "1", "colour": "blue", "sender": "0", "priority": "7",
    }  # fmt: skip


def test_touch_leaves_the_rest() -> None:
    q = Queues("lease 10s")
    q.consumer()
    q.write("s", b"0123456789")
    worker = q.worker()
    assert worker.read(4) == b"0123"
    say(worker, "touch")
    assert read(worker) == b"456789"


# ------------------------------------------------------------------ formats


@pytest.mark.parametrize(
    ("form", "answers"),
    [
        ("raw", [b"one", b"two\n"]),
        ("line", [b"one\n", b"two\n"]),
        ("nul", [b"one\0", b"two\n\0"]),
        ("each", [b"one", b"", b"two\n", b""]),
    ],
)
def test_formats(form: str, answers: list[bytes]) -> None:
    q = Queues()
    q.consumer()
    q.write("s", b"one", b"two\n")
    worker = q.worker("w", f"format {form}")
    assert [read(worker) for _ in answers] == answers


def test_format_json() -> None:
    q = Queues()
    q.consumer()
    q.put(b"text", headers={"k": "v"})
    q.write("s", b"\xff")
    worker = q.worker("w", "format json")
    row = json.loads(read(worker))
    assert float(row.pop("time")) == 1_700_000_000
    assert row == {
        "sequence": 1, "stream": "s", "deliveries": 1, "headers": {"k": "v", "sender": "0"}, "body": "text",
    }  # fmt: skip
    row = json.loads(read(worker))
    assert (row["body_base64"], "headers" in row) == ("/w==", False)


def test_format_record_claims_all_that_it_gives() -> None:
    q = Queues()
    q.consumer()
    q.write("s", b"one", b"two", b"three")
    worker = q.worker("w", "format record")
    data = read(worker)
    assert all(body in data for body in (b"one", b"two", b"three"))
    assert q.stats()["claimed"] == 3
    say(worker, "ack")
    assert (q.stats()["claimed"], q.stats()["waiting"]) == (0, 0)


def test_format_record_gives_whole_records_as_many_as_fit() -> None:
    q = Queues()
    q.consumer()
    q.write("s", *[b"x" * 100] * 20)
    worker = q.worker("w", "format record")
    assert 0 < len(worker.read(1000)) <= 1000
    claimed = q.stats()["claimed"]
    assert 1 <= claimed < 10
    say(worker, "ack")
    assert q.stats()["waiting"] == 20 - claimed


# ------------------------------------------------------------------ seek, select, until


@pytest.mark.parametrize(
    ("place", "first"),
    [("first", b"m1"), ("last", b"m5"), ("3", b"m3"), ("-2", b"m4"), ("-99", b"m1"), ("@1700000020", b"m3"),
     ("-25s", b"m4")],
)  # fmt: skip
def test_seek(place: str, first: bytes) -> None:
    q = Queues("replay all")
    q.consumer()
    for i in range(1, 6):
        q.write("s", b"m%d" % i)
        q.pass_time(10)
    worker = q.worker()
    assert len(drain(worker)) == 5
    say(worker, f"seek {place}")
    assert read(worker) == first


def test_seek_end() -> None:
    q = Queues("replay all")
    q.write("s", b"one")
    q.consumer()
    worker = q.worker("w", "seek end")
    wait = worker.read(BIG)
    q.write("s", b"two")
    assert wait.result() == b"two"


@pytest.mark.parametrize("ends", ["ttl", "drop"])
def test_seek_last_when_the_newest_message_went_before_the_others(ends: str) -> None:
    q = Queues("replay all")
    q.consumer()
    worker = q.worker()
    q.write("s", b"one", b"two")
    newest = q.put(b"three", ttl="2s")
    if ends == "drop":
        q.ctl(f"drop s {newest}")
    q.pass_time(3)
    say(worker, "seek last")
    assert drain(worker) == [b"two"]


def test_seek_last_when_the_newest_message_was_acked_before_the_others() -> None:
    q = Queues()
    q.consumer()
    worker = q.worker()
    q.write("s", b"one", b"two")
    assert [read(worker), read(worker)] == [b"one", b"two"]
    say(worker, "ack")  # the newest
    assert q.row()["newest"] == q.row()["first"]
    say(worker, "seek first")
    say(worker, "seek last")
    assert drain(worker) == [b"two"]


@pytest.mark.parametrize("is_looked_for", [True, False])
def test_replay_last_shows_the_newest_that_all_acked_before(is_looked_for: bool) -> None:
    """While an older one of another stream keeps it in the log."""
    q = Queues()
    q.stream("t")
    q.consumer()
    worker = q.worker()
    q.write("t", b"claimed")
    q.write("s", b"newest")
    assert [read(worker), read(worker)] == [b"claimed", b"newest"]
    if is_looked_for:
        assert q.row()["newest"] == 2
    say(worker, "ack 2")
    if is_looked_for:
        assert q.row()["newest"] is None
    q.ctl("replay last")
    assert read(q.at("s")) == b"newest"


def looks(count: int) -> int:
    """The lines of a look for the first and newest message, of which there are none: as many were acked, and one of
    another stream keeps them in the log."""
    q = Queues()
    q.stream("t")
    q.consumer()
    worker = q.worker()
    q.write("t", b"claimed")
    q.write("s", *[b"x"] * count)
    for _ in range(count + 1):
        read(worker)
    for sequence in range(2, count + 2):
        say(worker, f"ack {sequence}")
    kept = q.group.streams["s"].kept
    kept.update_low_watermark()
    assert (kept.count, kept.state.floor) == (0, 1)
    return lines(lambda: (kept.first_kept(), kept.newest_kept()))


def test_a_look_for_the_first_and_newest_does_not_pass_all_that_were_acked() -> None:
    assert looks(10) == looks(100)


def test_an_eof_marker_is_not_the_newest_message() -> None:
    q = Queues("replay all")
    q.write("s", b"one")
    q.ctl("eof s")
    q.put(b"two", ttl="1s")
    q.pass_time(2)
    assert (q.row()["newest"], q.row()["messages"]) == (1, 2)


def test_seek_makes_all_claims_void_and_forgets_counts() -> None:
    q = Queues("replay all")
    q.consumer()
    q.write("s", b"one", b"two")
    first, second = q.worker(), q.worker()
    assert [read(first), read(second)] == [b"one", b"two"]
    say(first, "release")
    say(second, "seek first")
    assert isinstance(refusal(second, "ack"), errors.Stale)
    assert read(first) == b"one"
    assert told(first)["deliveries"] == "1"


def test_seek_serves_those_who_wait() -> None:
    q = Queues("replay all")
    q.consumer()
    q.write("s", b"one")
    first, second = q.worker(), q.worker()
    assert drain(first) == [b"one"]
    wait = first.read(BIG)
    say(second, "seek first")
    assert wait.result() == b"one"


def test_a_handle_open_for_writing_only_can_seek() -> None:
    q = Queues("replay all")
    q.write("s", b"one")
    q.consumer()
    assert drain(q.worker()) == [b"one"]
    say(q.at(".consumers/w", os.O_WRONLY), "seek first")
    assert drain(q.worker()) == [b"one"]


def test_who_may_not_read_seeks_over_nobodys_claim() -> None:
    q = Queues("replay all")
    q.write("s", b"one")
    q.consumer()
    consumer = q.group.consumers["w"]
    q.tree.setattr(ROOT, consumer, mode=0o622)
    worker = q.worker()
    assert read(worker) == b"one"
    blind = q.at(".consumers/w", os.O_WRONLY, ANNA)
    with pytest.raises(errors.Denied):
        blind.write(b"seek end\n")
    q.tree.setattr(ROOT, consumer, mode=0o666)
    q.tree.setattr(ROOT, q.group.streams["s"], mode=0o600)
    with pytest.raises(errors.Denied):
        blind.write(b"seek end\n")
    say(worker, "release")
    assert read(worker) == b"one"
    q.tree.setattr(ROOT, q.group.streams["s"], mode=0o644)
    say(blind, "seek end")
    assert isinstance(refusal(worker, "ack"), errors.Stale)


def test_select_is_the_handles_own() -> None:
    q = Queues()
    q.stream("t")
    q.consumer()
    narrow, wide = q.worker("w", "select t"), q.worker()
    q.write("s", b"s1", b"s2")
    q.write("t", b"t1", b"t2")
    assert read(narrow) == b"t1"
    assert drain(wide) == [b"s1", b"s2", b"t2"]
    say(narrow, "select")
    q.write("s", b"s3")
    assert read(narrow) == b"s3"


def test_until() -> None:
    q = Queues()
    q.consumer()
    q.write("s", b"one", b"two", b"three")
    worker = q.worker("w", "until 2")
    assert [read(worker), read(worker), read(worker), read(worker)] == [b"one", b"two", b"", b""]
    say(worker, "until end")
    q.write("s", b"four")
    assert [read(worker), read(worker)] == [b"three", b""]
    wait = q.worker("w", "until 6").read(BIG)
    assert wait == b"four"


def test_until_ends_a_wait() -> None:
    q = Queues()
    q.stream("t")
    q.consumer("w", "s")
    wait = q.worker("w", "until 1").read(BIG)
    assert not wait.settled
    q.write("t", b"the first message, not for this consumer")
    assert wait.result() == b""


# ------------------------------------------------------------------ options


@pytest.mark.parametrize("first", [os.O_RDWR, os.O_WRONLY])
@pytest.mark.parametrize("second", [os.O_RDWR, os.O_WRONLY])
def test_private_is_for_one_handle_at_a_time(first: int, second: int) -> None:
    q = Queues()
    q.consumer("w", "private")
    handle = q.at(".consumers/w", first)
    with pytest.raises(errors.Busy):
        q.at(".consumers/w", second)
    assert q.shows(".consumers/w") == []
    handle.close()
    q.at(".consumers/w", second)


def test_transient_is_gone_with_its_last_handle() -> None:
    q = Queues()
    q.consumer("w", "transient")
    first, second = q.worker(), q.worker()
    first.close()
    q.write("s", b"one")
    assert read(second) == b"one"
    second.close()
    with pytest.raises(errors.NotFound):
        q.worker()


def test_a_transient_consumer_that_was_only_shown_stays() -> None:
    """A backup, or a GET, may come before its first reader."""
    q = Queues()
    q.consumer("w", "transient")
    q.write("s", b"one")
    assert q.shows(".consumers/w") == [b"one"]
    assert "w" in q.group.consumers
    shown, worker = q.at(".consumers/w", os.O_RDONLY), q.worker()
    assert read(worker) == b"one"
    worker.close()
    assert "w" in q.group.consumers
    shown.close()
    assert "w" not in q.group.consumers


@pytest.mark.parametrize(("full", "got"), [("drop-old", [b"two", b"three"]), ("drop-new", [b"one", b"two"])])
def test_backlog_drops(full: str, got: list[bytes]) -> None:
    q = Queues("replay all", f"full {full}")
    q.consumer("w", "backlog", "2")
    q.consumer("other")
    q.write("s", b"one", b"two", b"three")
    assert drain(q.worker()) == got
    assert drain(q.worker("other")) == [b"one", b"two", b"three"]


@pytest.mark.parametrize("how", ["nack", "nack 0s", "release", "close"])
def test_backlog_drops_the_oldest_where_it_was_given_back(how: str) -> None:
    """Though the look for the oldest went further while it was claimed: end marks follow, which are no messages."""
    q = Queues("replay all", "backoff 1s 1s")
    q.consumer("w", "s", "backlog", "1", "full", "drop-old")
    q.write("s", b"first")
    worker, backlog = q.worker(), q.group.consumers["w"].backlog
    assert read(worker) == b"first"
    q.ctl(*["eof s"] * 600)
    q.write("s", b"second")
    assert backlog.cut_from > 256
    worker.close() if how == "close" else say(worker, how)
    q.write("s", b"third")
    assert q.shows(".consumers/w") == [b"second", b"third"]


@pytest.mark.parametrize("full", ["drop-old", "drop-new", "block", "reject"])
@pytest.mark.parametrize("restart", [False, True])
def test_a_backlog_is_of_messages_that_the_program_of_a_view_selects(full: str, restart: bool, tmp_path: Path) -> None:
    """The others do not wait for the consumer, whether it has a worker or not."""
    q = Queues("replay all", 'bind v prefix:"" payload_contains("yes")', path=tmp_path / "store")
    q.consumer("w", "v", "backlog", "4", "full", full)
    worker = q.worker()
    wait = worker.read(BIG)
    q.write("s", *[b"no"] * 50, b"yes")
    assert wait.result() == b"yes"
    worker.close()
    for number in range(3):
        if restart and number == 1:
            q.restart()
        q.write("s", *[b"no"] * 700, b"yes %d" % number)
    assert drain(q.worker()) == [b"yes", b"yes 0", b"yes 1", b"yes 2"]
    q.write("s", *[b"yes %d" % number for number in range(4)])
    if full == "reject":
        with pytest.raises(errors.StreamFull):
            q.write("s", b"yes 4")
    elif full == "block":
        blocked = q.open("s", os.O_WRONLY).write(b"yes 4")
        assert isinstance(blocked, Wait)
    else:
        q.write("s", b"yes 4")
    kept = {"drop-old": range(1, 5), "block": range(5)}.get(full, range(4))
    assert drain(q.worker()) == [b"yes %d" % number for number in kept]


@pytest.mark.parametrize("full", ["drop-old", "reject"])
def test_a_backlog_has_room_after_a_worker_passed_what_a_program_leaves_out(full: str) -> None:
    """What the claims passed is not looked at again: those left out later are found in time."""
    q = Queues("replay off", 'bind v prefix:"" payload_contains("yes")')
    q.consumer("w", "v", "backlog", "5000", "full", full)
    worker = q.worker()
    for _ in range(200):
        q.write("s", *[*[b"no"] * 9, b"yes"] * 10)
        assert len(drain(worker)) == 10
    selected = [b"yes %d" % number for number in range(200)]
    for body in selected:
        q.write("s", *[b"no"] * 50, body)
    assert drain(worker) == selected


@pytest.mark.parametrize("full", ["drop-old", "drop-new", "reject"])
@pytest.mark.parametrize(("bound", "waiting", "left_out"), [(20, 5, 600), (20, 5, 3_000), (3_000, 2_990, 20)])
def test_a_backlog_of_selected_messages_is_known_after_a_restart(
    full: str, bound: int, waiting: int, left_out: int, tmp_path: Path
) -> None:
    """Those left out are not counted again. Where many wait none is lost while it is not known which are left out."""
    q = Queues("replay all", 'bind v prefix:"" payload_contains("yes")', path=tmp_path / "store")
    q.consumer("w", "v", "backlog", str(bound), "full", full)
    selected = [b"yes %d" % number for number in range(waiting + 5)]
    q.write("s", *selected[:waiting], *[b"no"] * left_out)
    q.restart()
    for body in selected[waiting:]:
        q.write("s", b"no", b"no", b"no", body)
    assert drain(q.worker()) == selected
    assert q.group.counts.cut == 0


@pytest.mark.parametrize(("full", "first"), [("drop-old", 2), ("drop-new", 0)])
def test_a_backlog_of_selected_messages_is_filled_by_a_batch(full: str, first: int) -> None:
    """When the first message of a batch is counted the others are in the log already, and do not count yet."""
    q = Queues("replay all", 'bind v prefix:"" payload_contains("yes")')
    q.consumer("w", "v", "backlog", "4", "full", full)
    for left_out in (1, 40):
        bodies = [b"yes %d" % number for number in range(6)]
        batch = q.at(".batch", os.O_WRONLY)
        batch.write(b"".join(frame("s", body) for body in [*bodies, *[b"no"] * left_out]))
        batch.close()
        assert drain(q.worker()) == bodies[first : first + 4]


def test_backlog_rejects() -> None:
    q = Queues("full reject")
    q.consumer("w", "backlog", "2")
    writer = q.open("s", os.O_WRONLY)
    q.write("s", b"one", b"two")
    with pytest.raises(errors.StreamFull):
        writer.write(b"three")
    worker = q.worker()
    read(worker)
    with pytest.raises(errors.StreamFull):
        writer.write(b"three")
    say(worker, "ack")
    writer.write(b"three")
    assert drain(worker) == [b"two", b"three"]


def test_backlog_blocks() -> None:
    q = Queues("full block")
    q.consumer("w", "s", "backlog", "1")
    writer = q.open("s", os.O_WRONLY)
    q.write("s", b"one")
    blocked = writer.write(b"two")
    assert isinstance(blocked, Wait)
    worker = q.worker()
    read(worker)
    assert not blocked.settled
    say(worker, "ack")
    assert blocked.result() == 3
    assert drain(worker) == [b"two"]


@pytest.mark.parametrize(("full", "got"), [("drop-old", [b"two", b"three"]), ("drop-new", [b"one", b"two"])])
def test_a_policy_of_its_own_drops(full: str, got: list[bytes]) -> None:
    q = Queues("full block")
    q.consumer("w", "backlog", "2", "full", full)
    q.consumer("other")
    q.write("s", b"one", b"two", b"three")
    assert drain(q.worker()) == got
    assert drain(q.worker("other")) == [b"one", b"two", b"three"]


def test_a_policy_of_its_own_rejects() -> None:
    q = Queues("full drop-old", "depth 1")
    q.consumer("w", "backlog", "1", "full", "reject")
    q.write("s", b"one")
    with pytest.raises(errors.StreamFull, match="consumer 'w': backlog of 1 messages reached"):
        q.write("s", b"two")
    assert drain(q.worker()) == [b"one"]  # nothing was cut for what was refused


def test_a_policy_of_its_own_blocks_in_the_order_of_the_writes() -> None:
    q = Queues("full drop-old", "depth 9")
    q.consumer("w", "s", "backlog", "1", "full", "block")
    q.stream("free")
    q.write("s", b"one")
    blocked = [q.open("s", os.O_WRONLY).write(body) for body in (b"two", b"three")]
    batch = q.open(".batch", os.O_WRONLY).write(frame("s", b"four"))
    q.write("free", b"no consumer of this is full")
    worker = q.worker()
    assert read(worker) == b"one"
    assert not any(step.settled for step in blocked)
    say(worker, "ack")
    assert blocked[0].settled
    assert not blocked[1].settled
    assert not batch.settled
    q.ctl("consumer w s")
    assert blocked[1].settled
    assert batch.settled
    assert drain(worker) == [b"two", b"three", b"four"]


def test_a_policy_needs_a_word_there_is() -> None:
    q = Queues()
    for words in (["full"], ["full", "always"], ["full", "block", "full"]):
        with pytest.raises(errors.BadCommand, match="consumer"):
            q.consumer("w", *words)


@pytest.mark.parametrize("clean", [True, False])
def test_a_consumer_in_memory_begins_again(tmp_path: Path, clean: bool) -> None:
    q = Queues("replay all", path=tmp_path / "store")
    q.consumer("w", "memory")
    q.consumer("log")
    size = q.group.log.upkeep.size
    q.write("s", b"one", b"two")
    written = q.group.log.upkeep.size - size
    assert drain(q.worker()) == [b"one", b"two"]
    assert q.group.log.upkeep.size == size + written  # its acks are not in the log
    assert drain(q.worker("log"))[:1] == [b"one"]
    q.restart(clean=clean)
    assert "consumer w memory" in q.text("ctl").splitlines()
    assert drain(q.worker("log")) == []
    assert drain(q.worker()) == [b"one", b"two"]


@pytest.mark.parametrize("clean", [True, False])
def test_a_consumer_in_memory_has_nothing_of_before(tmp_path: Path, clean: bool) -> None:
    q = Queues(path=tmp_path / "store")
    q.consumer("w", "memory", "backlog", "9", "full", "drop-new")
    q.consumer("log")
    q.write("s", b"one")
    assert read(q.worker()) == b"one"
    q.restart(clean=clean)
    assert "consumer w memory backlog 9 full drop-new" in q.text("ctl").splitlines()
    q.write("s", b"two")
    assert drain(q.worker()) == [b"two"]
    assert drain(q.worker("log")) == [b"one", b"two"]


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("count", [9, 20_000])
def test_a_consumer_that_is_in_memory_no_more_is_where_it_was(tmp_path: Path, clean: bool, count: int) -> None:
    q = Queues("replay all", "retries 9", path=tmp_path / "store")
    q.consumer("w", "memory", "transient")
    q.write("s", *(b"%d" % n for n in range(count)))
    worker = q.worker()
    claimed = [read(worker) for _ in range(count - 3)]
    acked = [sequence for at, sequence in enumerate(worker.claims) if at % 2 == 0]
    worker.write(b"ack %s\n" % " ".join(map(str, acked)).encode())
    q.consumer("w")
    late = next(iter(worker.claims))
    worker.write(b"ack %d\n" % late)  # this is in the log, and the claims of before hold still
    q.restart(clean=clean)
    assert "consumer w" in q.text("ctl").splitlines()
    assert sorted(drain(q.worker()), key=int) == [*claimed[3::2], *(b"%d" % n for n in range(count - 3, count))]


def test_a_consumer_is_not_in_memory_from_now_on() -> None:
    q = Queues()
    q.consumer("w", "memory")
    q.consumer("w", "memory", "private")
    q.consumer("log")
    with pytest.raises(errors.Exists, match=r"'log' exists, without 'memory' \(remove it first"):
        q.consumer("log", "memory")


@pytest.mark.parametrize("how", ["clear s", "drop s 1", "ttl of its own", "ttl 5s"])
def test_an_ack_of_what_is_gone_makes_no_room_in_the_backlog(how: str) -> None:
    q = Queues("replay all", "full reject")
    q.consumer("w", "backlog", "2")
    q.put(b"1", **({"ttl": "2s"} if how == "ttl of its own" else {}))
    worker = q.worker()
    assert read(worker) == b"1"
    if how.startswith("ttl"):
        if how == "ttl 5s":
            q.ctl(how)
        q.pass_time(6)
    else:
        q.ctl(how)
    writer = q.at("s", os.O_WRONLY)
    writer.write(b"2")
    writer.write(b"3")
    with pytest.raises(errors.StreamFull):
        writer.write(b"4")
    say(worker, "ack 1")
    with pytest.raises(errors.StreamFull):
        writer.write(b"5")


def test_backlog_is_over_what_is_still_there() -> None:
    q = Queues("full block")
    q.stream("t")
    q.consumer("w", "backlog", "1")
    q.write("t", b"in the way")
    blocked = q.open("s", os.O_WRONLY).write(b"one")
    assert isinstance(blocked, Wait)
    q.tree.unlink(ROOT, q.group, "t")
    assert blocked.result() == 3
    assert drain(q.worker()) == [b"one"]


def test_a_seek_gives_what_is_kept_before_what_a_waiting_writer_writes() -> None:
    q = Queues("depth 1", "full block")
    q.consumer("w")
    q.write("s", b"one")
    q.stream("t")
    kept = q.put(b"kept", "t", priority=0)
    one, other = q.worker(), q.worker()
    assert [one.read(10), one.read(10)] == [b"one", b"kept"]
    reads = [one.read(10), other.read(10)]
    blocked = q.open("s", os.O_WRONLY).write(b"urgent")
    assert isinstance(blocked, Wait)
    say(q.worker(), f"seek {kept}")
    assert [read.result() for read in reads] == [b"kept", b"urgent"]
    assert blocked.result() == 6


@pytest.mark.parametrize("full", ["reject", "block"])
def test_removing_a_consumer_makes_room(full: str) -> None:
    q = Queues("depth 1", f"full {full}")
    q.consumer("w")
    q.consumer("v", "s")
    q.write("s", b"one")
    assert drain(q.worker()) == [b"one"]
    blocked = q.open("s", os.O_WRONLY).write(b"two") if full == "block" else None
    q.ctl("remove v")
    if isinstance(blocked, Wait):
        assert blocked.result() == 3
    else:
        q.write("s", b"two")
    assert drain(q.worker()) == [b"two"]


def test_options_are_set_again() -> None:
    q = Queues()
    q.consumer("w", "s")
    q.consumer("w", "s", "private")
    q.worker()
    with pytest.raises(errors.Busy):
        q.worker()
    q.consumer("w", "s")
    q.worker()
    with pytest.raises(errors.Exists):
        q.consumer("w")


def test_ctl_prints_consumers_so_that_they_can_be_made_again() -> None:
    q = Queues("bind v 'x.#'")
    q.consumer("all")
    q.consumer("one", "s", "private", "backlog", "10")
    q.consumer("'with blank'", "v", "transient")
    text = q.text("ctl")
    other: Any = q.mkdir("h")
    handle = q.tree.open(ROOT, Meta(other, "ctl"), os.O_RDWR)
    handle.write(text.encode())
    assert handle.read(BIG, 0) == text.encode()


# ------------------------------------------------------------------ the folder


def test_touch_makes_one() -> None:
    q = Queues("replay all")
    q.write("s", b"one")
    folder: Any = q.tree.find(ROOT, "g/.consumers")
    q.tree.create(ROOT, folder, "w", 0o666)
    assert drain(q.worker()) == [b"one"]
    assert [node.name for node in exhaust(q.tree.entries(ROOT, folder))] == ["w"]
    with pytest.raises(errors.Exists):
        q.tree.create(ROOT, folder, "w", 0o666)


@pytest.mark.parametrize(
    ("group", "asked", "mode"), [(0o777, 0o666, 0o666), (0o775, 0o666, 0o660), (0o755, 0o644, 0o600)]
)
def test_its_mode_follows_who_may_write_the_group(group: int, asked: int, mode: int) -> None:
    q = Queues()
    q.tree.setattr(ROOT, q.group, mode=group)
    folder: Any = q.tree.find(ROOT, "g/.consumers")
    q.tree.create(ROOT, folder, "w", asked)
    node = q.tree.find(ROOT, "g/.consumers/w")
    assert stat.S_IMODE(q.tree.stat(node).mode) == mode
    assert stat.S_ISREG(q.tree.stat(node).mode)


def test_making_and_removing_needs_w_on_the_group() -> None:
    q = Queues()
    q.tree.setattr(ROOT, q.group, mode=0o755)
    folder: Any = q.tree.find(ROOT, "g/.consumers")
    q.consumer()
    with pytest.raises(errors.Denied):
        q.tree.create(ANNA, folder, "x", 0o666)
    with pytest.raises(errors.Denied):
        q.tree.unlink(ANNA, folder, "w")
    q.tree.setattr(ROOT, q.group, mode=0o777)
    q.tree.create(ANNA, folder, "x", 0o666)
    q.tree.unlink(BERT, folder, "w")


def test_taking_needs_r_and_w() -> None:
    q = Queues()
    q.consumer()
    q.tree.setattr(ROOT, q.tree.find(ROOT, "g/.consumers/w"), mode=0o644)
    q.write("s", b"one")
    with pytest.raises(errors.Denied):
        q.worker(user=ANNA)
    assert q.shows(".consumers/w", ANNA) == [b"one"]


def test_the_folder_stays_as_it_is() -> None:
    q = Queues()
    q.consumer()
    folder: Any = q.tree.find(ROOT, "g/.consumers")
    with pytest.raises(errors.NotPermitted):
        q.tree.setattr(ROOT, folder, mode=0o700)
    with pytest.raises(errors.NotPermitted):
        q.tree.rename(ROOT, folder, "w", folder, "x")
    with pytest.raises(errors.NotPermitted):
        q.tree.mkdir(ROOT, folder, "x", 0o700)


@pytest.mark.parametrize("how", ["rm", "ctl"])
def test_a_consumer_that_holds_claims_is_not_removed(how: str) -> None:
    q = Queues()
    q.consumer()
    q.write("s", b"one", b"two")
    worker, other = q.worker(), q.worker()
    assert read(worker) == b"one"
    folder: Any = q.tree.find(ROOT, "g/.consumers")

    def remove() -> None:
        if how == "rm":
            q.tree.unlink(ROOT, folder, "w")
        else:
            q.ctl("remove w")

    with pytest.raises(errors.Busy):
        remove()
    say(worker, "ack")
    assert read(other) == b"two"
    say(other, "ack")
    wait = other.read(BIG)
    remove()
    assert wait.result() == b""
    assert read(worker) == b""
    assert isinstance(refusal(worker, "ack 1"), errors.Stale)
    with pytest.raises(errors.NotFound):
        q.worker()
    worker.close()
    other.close()


# ------------------------------------------------------------------ who only looks


def test_looking_takes_nothing() -> None:
    q = Queues()
    q.consumer()
    q.write("s", b"one", b"two\n", b"three")
    worker = q.worker()
    assert read(worker) == b"one"
    before = q.stats()
    for _ in range(3):
        assert q.shows(".consumers/w") == [b"two\n", b"three"]
    assert q.stats() == before
    say(worker, "nack 1m")
    assert q.shows(".consumers/w") == [b"one", b"two\n", b"three"]
    assert drain(worker) == [b"two\n", b"three"]


def test_stats_tell_of_a_consumer() -> None:
    q = Queues("backoff 60s 60s")
    q.consumer("w", "s")
    q.write("s", b"one", b"two", b"three", b"four", b"five")
    worker, other = q.worker(), q.worker()
    read(worker)
    say(worker, "ack")
    read(worker)
    say(worker, "nack")
    read(worker)
    read(other)
    say(other, "dead")
    own = q.stats()
    assert {key: own[key] for key in ("over", "claimed", "waiting", "delayed", "handles", "parked")} == {
        "over": "s", "claimed": 1, "waiting": 2, "delayed": 1, "handles": 2, "parked": 0,
    }  # fmt: skip
    assert {key: own[key] for key in ("delivered", "acknowledged", "dead")} == {
        "delivered": 4, "acknowledged": 1, "dead": 1,
    }  # fmt: skip
    read(other)
    wait = other.read(BIG)
    assert isinstance(wait, Wait)
    assert q.stats()["parked"] == 1


# ------------------------------------------------------------------ restarts


@pytest.mark.parametrize("clean", [True, False])
def test_acknowledgements_survive(tmp_path: Path, clean: bool) -> None:
    q = Queues(path=tmp_path / "store")
    q.consumer("w", "s")
    q.write("s", *[b"%d" % i for i in range(1, 9)])
    worker = q.worker()
    for _ in range(6):
        read(worker)
    say(worker, "ack 1 2 4 6")
    q.restart(clean=clean)
    assert drain(q.worker()) == [b"3", b"5", b"7", b"8"]
    q.restart(clean=clean)
    assert waits(q.worker())
    q.write("s", b"9")
    assert drain(q.worker()) == [b"9"]


@pytest.mark.parametrize(("clean", "deliveries"), [(True, "1"), (False, "2")])
def test_open_claims_come_back_and_a_kill_counts(tmp_path: Path, clean: bool, deliveries: str) -> None:
    q = Queues(path=tmp_path / "store")
    q.consumer()
    q.write("s", b"one", b"two")
    read(q.worker())
    q.restart(clean=clean)
    worker = q.worker()
    assert read(worker) == b"one"
    assert told(worker)["deliveries"] == deliveries
    assert read(worker) == b"two"
    assert told(worker)["deliveries"] == "1"


@pytest.mark.parametrize("clean", [True, False])
def test_failures_and_backoff_survive(tmp_path: Path, clean: bool) -> None:
    q = Queues("backoff 10s 60s", path=tmp_path / "store")
    q.consumer()
    q.write("s", b"one")
    worker = q.worker()
    read(worker)
    say(worker, "nack")
    q.pass_time(4)
    q.write("s", b"so that the log tells the time")
    q.restart(clean=clean)
    worker = q.worker()
    assert drain(worker) == [b"so that the log tells the time"]
    q.pass_time(6)
    assert read(worker) == b"one"
    assert told(worker)["deliveries"] == "2"


@pytest.mark.parametrize("clean", [True, False])
def test_options_survive_and_the_transient_does_not(tmp_path: Path, clean: bool) -> None:
    q = Queues(path=tmp_path / "store")
    q.consumer("w", "s", "private", "backlog", "7")
    q.consumer("gone", "transient")
    q.worker("gone")
    q.restart(clean=clean)
    assert [line for line in q.text("ctl").splitlines() if line.startswith("consumer")] == [
        "consumer w s private backlog 7"
    ]
    q.worker()
    with pytest.raises(errors.Busy):
        q.worker()


def test_a_clean_stop_ends_those_who_wait(tmp_path: Path) -> None:
    q = Queues(path=tmp_path / "store")
    q.consumer()
    wait = q.worker().read(BIG)
    q.restart()
    assert wait.result() == b""


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("replay", ["off", "last", "all"])
@pytest.mark.parametrize("lines", [[], ["depth 2"], ["full reject"]])
def test_what_depth_cut_stays_cut(tmp_path: Path, clean: bool, replay: str, lines: list[str]) -> None:
    q = Queues(f"replay {replay}", "depth 1", path=tmp_path / "store")
    q.consumer()
    q.write("s", b"one", b"two", b"three")
    q.ctl(*lines)
    q.restart(clean=clean)
    assert drain(q.worker()) == [b"three"]
    q.restart(clean=clean)
    say(worker := q.worker(), "seek first")
    assert drain(worker) == ([] if replay == "off" else [b"three"])


def test_another_user_may_work() -> None:
    q = Queues()
    q.tree.setattr(ROOT, q.group, mode=0o777)
    folder: Any = q.tree.find(ROOT, "g/.consumers")
    q.tree.create(ANNA, folder, "hers", 0o600)
    q.write("s", b"one")
    assert drain(q.worker("hers", user=ANNA)) == [b"one"]
    with pytest.raises(errors.Denied):
        q.worker("hers", user=BERT)
    assert User(1001, 1001) == ANNA


def test_what_consumers_alone_have_acknowledged_makes_room() -> None:
    """One message that cannot be processed does not stop the writers."""
    q = Queues("depth 2", "full reject")
    q.consumer("w", "s")
    worker = q.worker()
    q.write("s", b"bad")
    q.write("s", b"good")
    assert [read(worker), read(worker)] == [b"bad", b"good"]
    say(worker, "ack 2")
    q.write("s", b"more")
    with pytest.raises(errors.StreamFull):
        q.write("s", b"too many")
    reader = q.at("s")
    with pytest.raises(errors.StreamFull):
        q.write("s", b"too many")
    reader.close()
    say(worker, "ack 1")
    q.write("s", b"last")
    assert q.shows(".consumers/w") == [b"more", b"last"]
