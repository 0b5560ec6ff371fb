"""`.consumers/.STREAM`: what a stream gives to one taker each, with the claims and commands of a consumer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from mqfs import errors
from mqfs.engine.core.portions import exhaust
from mqfs.model import User, Wait
from tests.support.hand import ANNA, ROOT
from tests.support.queues import BIG, Queues, drain, read, refusal, say, told, waits

ONE = "deliver one"


def test_it_is_there_with_its_stream_and_in_no_listing() -> None:
    q = Queues(ONE)
    folder: Any = q.tree.find(ROOT, "g/.consumers")
    node: Any = q.tree.find(ROOT, "g/.consumers/.s")
    assert exhaust(q.tree.entries(ROOT, folder)) == []
    stat, stream = q.tree.stat(node), q.tree.stat(q.tree.find(ROOT, "g/s"))
    assert (stat.name, stat.mode, stat.uid, stat.gid) == (".s", stream.mode, stream.uid, stream.gid)
    numbers = {q.tree.stat(q.tree.find(ROOT, f"g/{path}")).qid for path in ("s", ".kept/s", ".consumers/.s")}
    assert len(numbers) == 3
    assert q.tree.find(ROOT, "g/.consumers/.s") == node != q.tree.find(ROOT, "g/.kept/s")
    for name in (".t", ".ctl", "s"):
        with pytest.raises(errors.NotFound):
            q.tree.find(ROOT, f"g/.consumers/{name}")
    for change in (
        lambda: q.tree.unlink(ROOT, folder, ".s"),
        lambda: q.tree.setattr(ROOT, node, mode=0o600),
        lambda: q.tree.rename(ROOT, folder, ".s", folder, "new"),
    ):
        with pytest.raises(errors.NotPermitted):
            change()
    with pytest.raises(errors.BadName):
        q.tree.create(ROOT, folder, ".t", 0o666)


@pytest.mark.parametrize("ack", ["ack read", "ack next"])
def test_its_claims_and_the_readers_of_the_stream_share_the_messages(ack: str) -> None:
    q = Queues(ONE, ack)
    q.write("s", *(b"%d" % number for number in range(6)))
    claims, taker = q.worker(".s"), q.taker()
    got = [read(claims), read(taker), read(claims), read(taker), read(claims)]
    assert got == [b"0", b"1", b"2", b"3", b"4"]
    assert q.shows(".consumers/.s") == q.shows("s") == [b"5"]
    claims.close()  # all that it had comes again, before the rest
    assert [read(taker) for _ in range(4)] == [b"0", b"2", b"4", b"5"]


def test_whoever_waits_first_is_served_first() -> None:
    q = Queues(ONE)
    claims, taker = q.worker(".s"), q.taker()
    order = [claims.read(BIG), taker.read(BIG)]
    q.write("s", b"one", b"two")
    assert [step.result() for step in order] == [b"one", b"two"]


def test_the_commands_of_a_consumer() -> None:
    q = Queues(ONE, "lease 10s", "retries 2", "backoff 1s 1s")
    q.write("s", b"0", b"1", b"2", b"3")
    claims = q.worker(".s", "format line")
    assert read(claims) == b"0\n"
    assert {key: told(claims)[key] for key in ("stream", "deliveries")} == {"stream": "s", "deliveries": "1"}
    say(claims, "ack")
    assert read(claims) == b"1\n"
    say(claims, "release")
    assert read(claims) == b"1\n"
    say(claims, "nack 1s")
    assert read(claims) == b"2\n"
    say(claims, "dead it is no good")
    assert read(claims) == b"3\n"
    say(claims, "touch")
    assert q.queue()["claimed"] == 1
    q.pass_time(11)  # 3 has failed by its lease, 1 is due
    assert {read(claims), read(claims)} == {b"1\n", b"3\n"}
    say(claims, "nack")
    say(claims, "select s")
    say(claims, "until end")
    letters = [row["body"] for row in q.kept("dead")]
    assert (letters[0], len(letters)) == ("2", 2)
    assert isinstance(refusal(claims, "seek end"), errors.BadCommand)


@pytest.mark.parametrize("delay", [{}, {"delay": "9h"}])
def test_until_ends_a_read_that_waits(delay: dict[str, str]) -> None:
    """Whatever stream takes the sequence, or none yet."""
    q = Queues(ONE)
    q.stream("t")
    claims = q.worker(".s", f"until {q.group.log.end.next}")
    step = claims.read(BIG)
    assert isinstance(step, Wait)
    q.put(b"other", stream="t", **delay)
    assert step.result() == b""


@pytest.mark.parametrize("clean", [True, False])
def test_a_restart_gives_claims_back(tmp_path: Path, clean: bool) -> None:
    q = Queues(ONE, path=tmp_path / "store")
    q.write("s", b"one", b"two")
    assert read(q.worker(".s")) == b"one"
    q.restart(clean=clean)
    claims = q.worker(".s")
    assert read(claims) == b"one"
    assert told(claims)["deliveries"] == str(1 + (not clean))
    say(claims, "ack")
    assert drain(claims) == [b"two"]


def test_the_stream_says_who_may_take() -> None:
    q = Queues(ONE)
    q.write("s", b"one", b"two")
    stream = q.tree.find(ROOT, "g/s")
    q.tree.setattr(ROOT, stream, mode=0o664, uid=ANNA.uid)
    other = User(1002, 1002)
    for flags in (os.O_RDWR, os.O_WRONLY):
        with pytest.raises(errors.Denied):
            q.at(".consumers/.s", flags, other)
    claims = q.worker(".s", user=ANNA)
    assert read(claims) == b"one"
    q.tree.setattr(ROOT, stream, mode=0o260)  # from here on Anna may only write
    assert waits(claims)
    with pytest.raises(errors.Denied):
        q.at(".consumers/.s", os.O_RDONLY, ANNA)


def test_it_goes_with_its_stream() -> None:
    q = Queues(ONE)
    q.write("s", b"one")
    claims, parked = q.worker(".s"), q.worker(".s")
    assert read(claims) == b"one"
    step = parked.read(BIG)
    q.tree.rename(ROOT, q.group, "s", q.group, "new")
    assert claims.node.name == ".new"
    q.tree.unlink(ROOT, q.group, "new")
    assert step.result() == b""
    with pytest.raises(errors.Stale):
        say(claims, "ack")
    claims.close()
    parked.close()


# ------------------------------------------------------------------ `deliver all`: what is for one taker


KINDS = [("replay all",), ("replay last",), ("replay off",), ("replay off", "consumer w"), ("keep ring", "replay all")]


@pytest.mark.parametrize("lines", KINDS, ids=" ".join)
def test_only_what_is_for_one_taker_is_taken(lines: tuple[str, ...]) -> None:
    q = Queues(*lines)
    q.write("s", b"before")
    q.put(b"urgent", priority=9)
    q.put(b"one", single=True)
    first, second = q.worker(".s"), q.worker(".s")
    assert read(first) == b"one"
    assert waits(first)
    step = second.read(BIG)
    q.write("s", b"between")
    q.put(b"urgent", priority=9)
    q.put(b"two", single=True)
    assert isinstance(step, Wait)
    assert step.result() == b"two"
    say(first, "ack")
    say(second, "ack")
    assert waits(q.worker(".s"))
    assert read(q.worker(".s", "until 1")) == b""
    if "consumer w" in lines:
        assert not {b"one", b"two"} & set(drain(q.worker()))


@pytest.mark.parametrize("clean", [None, True, False])
@pytest.mark.parametrize("lines", KINDS[:4], ids=" ".join)
def test_what_is_taken_stays_until_it_is_dealt_with(tmp_path: Path, lines: tuple[str, ...], clean: bool | None) -> None:
    """In a group that keeps nothing, too, and where all consumers have passed it."""
    q = Queues(*lines, "retries 3", "backoff 1s 1s", path=tmp_path / "store")
    q.put(b"one", single=True)
    claims = q.worker(".s")
    assert read(claims) == b"one"
    q.write("s", b"plain")
    if "consumer w" in lines:
        assert drain(q.worker()) in ([b"plain"], [])
    q.group.retention.trim(always=True)
    say(claims, "nack")
    q.group.retention.trim(always=True)
    assert waits(claims)
    assert b"one" not in drain(q.taker(), ack=False)
    if clean is None:
        q.pass_time(2)
    else:
        q.restart(clean=clean)
        q.pass_time(2)
        q.group.retention.trim(always=True)
        claims = q.worker(".s")
    assert read(claims) == b"one"
    assert told(claims)["deliveries"] == "2"
    say(claims, "ack")
    q.group.retention.trim(always=True)
    assert waits(claims)
    assert q.group.streams["s"].kept.kept_from() >= q.group.streams["s"].exclusives.first_unclaimed()


def test_released_it_is_for_anyone_and_failed_for_who_takes_from_the_stream() -> None:
    q = Queues("replay all")
    q.consumer("w")
    q.put(b"x", single=True)
    claims, worker = q.worker(".s"), q.worker()
    assert read(claims) == b"x"
    assert waits(worker)
    say(claims, "release")
    assert read(worker) == b"x"
    assert waits(claims)
    parked = claims.read(BIG)
    say(worker, "release")
    assert isinstance(parked, Wait)
    assert parked.result() == b"x"
    claims.close()  # that counts
    assert waits(worker)
    assert waits(q.taker())
    claims = q.worker(".s")
    assert read(claims) == b"x"
    say(claims, "dead")
    assert waits(worker)
    assert q.shows(".kept/dead") == []  # it is for one taker still
    letters = q.worker(".dead")
    assert read(letters) == b"x"
    assert told(letters)["reason"] == "dead"


def test_under_deliver_one_what_a_consumer_releases_is_for_takers_that_wait() -> None:
    q = Queues(ONE)
    q.consumer("w")
    q.put(b"x", single=True)
    worker = q.worker()
    assert read(worker) == b"x"
    takes = [q.worker(".s").read(BIG), q.taker().read(BIG)]
    say(worker, "release")
    assert [step.settled for step in takes] == [True, False]


def test_a_released_single_message_goes_to_a_consumer_that_waits() -> None:
    q = Queues("replay all")
    q.consumer("a")
    taker, waiting = q.worker(".s"), q.worker("a")
    q.put(b"one", single=True)
    assert taker.read(100) == b"one"
    wait = waiting.read(100)
    assert isinstance(wait, Wait)
    say(taker, "release")
    assert wait.settled
    assert wait.result() == b"one"


@pytest.mark.parametrize("end", ["closed", "nack", "killed", "stopped"])
def test_stats_show_an_exclusive_message_that_a_taker_did_not_ack(tmp_path: Path, end: str) -> None:
    q = Queues("replay all", "backoff 0s 0s", path=tmp_path / "store")
    q.write("s", b"before")
    q.put(b"one", single=True)
    taker = q.worker(".s")
    assert read(taker) == b"one"
    assert "singles" not in q.row()
    if end == "closed":
        taker.close()
    elif end == "nack":
        say(taker, "nack")
    else:
        q.restart(clean=end == "stopped")
    assert q.row()["singles"]["first"] == 2
    again = q.worker(".s")
    assert read(again) == b"one"
    assert "singles" not in q.row()
    say(again, "ack")
    again.close()
    assert "singles" not in q.row()
