"""Dead letters: when a message becomes one, what it tells, and how it goes back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mqfs import errors
from mqfs.engine.language.permissions import R, W, allowed
from mqfs.model import User, Wait
from tests.engine.core.test_shown import Copied
from tests.support.hand import ROOT
from tests.support.queues import BIG, Queues, drain, read, refusal, say, told, waits
from tests.support.temp_store import lowered


def letter(q: Queues, at: int = 0, stream: str = "dead") -> dict[str, str]:
    return dict(q.kept(stream)[at]["headers"])


def test_after_so_many_failures() -> None:
    q = Queues("retries 3", "backoff 1s 1s")
    q.consumer()
    q.write("s", b"poison", b"good")
    worker = q.worker("w", "select s")
    for i in range(3):
        assert read(worker) == b"poison"
        assert told(worker)["deliveries"] == str(i + 1)
        say(worker, "nack")
        q.pass_time(1)
    assert drain(worker) == [b"good"]
    assert [row["body"] for row in q.kept("dead")] == ["poison"]
    own = letter(q)
    assert own.pop("reason")
    assert own == {"stream": "s", "sequence": "1", "deliveries": "3", "consumer": "w"}


def test_retries_0_is_no_bound() -> None:
    q = Queues("retries 0", "backoff 0 0")
    q.consumer()
    q.write("s", b"poison")
    worker = q.worker()
    for _ in range(20):
        assert read(worker) == b"poison"
        say(worker, "nack")
        q.pass_time(1)
    assert "dead" not in q.group.streams


def test_a_group_that_has_the_name_of_dead_letters() -> None:
    """No letter is written, and `.errors` has why; the message stays."""
    q = Queues("retries 1", "backoff 0 0")
    q.consumer("w", "s")
    made: Any = q.tree.mkdir(ROOT, q.group, "dead", 0o777)
    q.write("s", b"poison")
    worker = q.worker()
    for _ in range(2):
        assert read(worker) == b"poison"
        say(worker, "nack")
    assert any("dead letter of message 1 not written: name 'dead': taken by a group" in line for line in q.errors())
    assert q.tree.find(ROOT, "g/dead") is made
    q.tree.rmdir(ROOT, q.group, "dead")
    assert read(worker) == b"poison"
    say(worker, "nack")
    assert [row["body"] for row in q.kept("dead")] == ["poison"]


def test_dead_with_a_reason() -> None:
    q = Queues()
    q.consumer()
    q.put(b"poison", headers={"k": "v"}, priority=8)
    worker = q.worker()
    read(worker)
    say(worker, "dead no such address, sorry")
    assert letter(q) == {
        "stream": "s", "sequence": "1", "deliveries": "1", "reason": "no such address, sorry", "consumer": "w",
        "k": "v", "priority": "8", "sender": "0",
    }  # fmt: skip
    assert q.stats()["dead"] == 1


def test_dead_of_an_older_claim() -> None:
    q = Queues()
    q.consumer("w", "s")
    q.write("s", b"one", b"two")
    worker = q.worker()
    assert [read(worker), read(worker)] == [b"one", b"two"]
    say(worker, "dead 1 broken")
    assert (q.kept("dead")[0]["body"], letter(q)["reason"]) == ("one", "broken")
    say(worker, "ack")


@pytest.mark.parametrize("how", ["lease", "close"])
def test_other_ways_to_fail(how: str) -> None:
    q = Queues("retries 1", "lease 2s")
    q.consumer("w", "s")
    q.write("s", b"one")
    worker = q.worker()
    read(worker)
    if how == "lease":
        q.pass_time(2)
    else:
        worker.close()
    assert letter(q)["reason"] == {"lease": "the lease ran out", "close": "its reader ended"}[how]


def test_a_nameless_consumer_is_not_named() -> None:
    q = Queues("deliver one", "ack next", "retries 1")
    q.write("s", b"one")
    taker = q.taker()
    read(taker)
    taker.close()
    assert letter(q) == {"stream": "s", "sequence": "1", "deliveries": "1", "reason": "its reader ended"}


def test_a_stream_of_another_name_which_is_made() -> None:
    q = Queues("retries 1", "dead 'bad ones'")
    q.consumer("w", "s")
    q.write("s", b"one")
    worker = q.worker()
    read(worker)
    say(worker, "nack")
    assert [row["body"] for row in q.kept("'bad ones'")] == ["one"]
    made = q.tree.stat(q.group.streams["bad ones"])
    assert (made.mode & 0o777, made.uid) == (0o666, 0), "as its origin"


MODES = [0o600, 0o640, 0o644, 0o664, 0o666, 0o606, 0o444, 0o060]
PEOPLE = [User(uid, gid) for uid in (1001, 1002, 1003) for gid in (1001, 1002, 1003)]


@pytest.mark.parametrize("mode", MODES, ids=oct)
@pytest.mark.parametrize("owner", [(1001, 1001), (1002, 1001), (1002, 1002)], ids=str)
@pytest.mark.parametrize("there", [None, (0o664, 1001, 1001), (0o666, 0, 0)], ids=str)
def test_who_may_not_read_a_message_may_not_read_it_dead(
    mode: int, owner: tuple[int, int], there: tuple[int, int, int] | None
) -> None:
    q = Queues("retries 1", "replay all")
    q.tree.setattr(ROOT, q.group.streams["s"], mode=mode, uid=owner[0], gid=owner[1])
    if there is not None:
        q.stream("dead")
        q.tree.setattr(ROOT, q.group.streams["dead"], mode=there[0], uid=there[1], gid=there[2])
    q.consumer()
    q.write("s", b"secret")
    worker = q.worker("w", "select s")
    read(worker)
    say(worker, "dead")
    assert q.shows(".kept/dead") == [b"secret"]
    origin, dead = q.group.streams["s"].state, q.group.streams["dead"].state
    for user in PEOPLE:
        for mask in (R, W):
            assert allowed(user, origin, mask) or not allowed(user, dead, mask), (user, mask, oct(dead.mode))
    if there is None and mode & 0o600 == 0o600:
        assert allowed(User(*owner), dead, R | W)


def claimed_by_view(path: Path, replay: str, *lines: str) -> tuple[Queues, Any]:
    """A worker of a view has claimed the one message of a stream, and one failure makes a dead letter."""
    q = Queues("retries 1", f"replay {replay}", "bind v s", *lines, path=path / "store")
    q.consumer("w", "v")
    q.write("s", b"poison")
    worker = q.worker()
    assert read(worker) == b"poison"
    return q, worker


def fail(q: Queues, worker: Any, how: str) -> None:
    if how == "lease":
        q.pass_time(2)
    elif how == "close":
        worker.close()
    elif how == "kill":
        q.restart(clean=False)
    else:
        say(worker, how)


ENDS = ["nack", "nack 1h", "dead", "lease", "close", "kill"]


@pytest.mark.parametrize("others", ["nothing", "newer", "another consumer"])
@pytest.mark.parametrize("replay", ["off", "last", "all"])
@pytest.mark.parametrize("how", ENDS)
def test_what_a_view_no_longer_shows_becomes_none(tmp_path: Path, how: str, replay: str, others: str) -> None:
    """Whether the message is retained still or not."""
    q, worker = claimed_by_view(tmp_path, replay, *(["lease 2s"] if how == "lease" else []))
    if others == "another consumer":
        q.consumer("x", "s")
    q.ctl("unbind v")
    if others == "newer":
        q.write("s", b"newer")
    q.row("s")  # what is not retained is removed now
    fail(q, worker, how)
    assert "dead" not in q.group.streams
    assert q.stats()["claimed"] == 0
    q.ctl("bind v s")
    q.pass_time(5)
    assert b"poison" not in drain(q.worker())


@pytest.mark.parametrize("how", ENDS)
def test_what_a_view_shows_again_becomes_one(tmp_path: Path, how: str) -> None:
    q, worker = claimed_by_view(tmp_path, "all", *(["lease 2s"] if how == "lease" else []))
    q.ctl("unbind v")
    q.ctl("bind v s")
    fail(q, worker, how)
    assert [row["body"] for row in q.kept("dead")] == ["poison"]


def test_a_dead_letter_never_becomes_one() -> None:
    q = Queues("retries 1", "backoff 1s 4s")
    q.consumer("undertaker", "dead")
    q.consumer("w", "s")
    q.write("s", b"poison")
    worker, undertaker = q.worker(), q.worker("undertaker")
    read(worker)
    say(worker, "nack")
    for delay in (1, 2, 4):
        assert read(undertaker) == b"poison"
        say(undertaker, "nack")
        q.pass_time(delay - 1)
        assert waits(undertaker)
        q.pass_time(1)
    assert read(undertaker) == b"poison"
    assert isinstance(refusal(undertaker, "dead really"), errors.BadCommand)
    undertaker.close()
    assert len(q.kept("dead")) == 1


def test_a_poison_message_never_spins() -> None:
    """A worker that takes all and dies with each: the dead letter is reported to it at growing intervals only."""
    q = Queues("retries 2", "backoff 1s 300s")
    q.consumer()
    q.write("s", b"poison")
    tries = 0
    for _ in range(100):
        for _ in range(5):
            worker = q.worker()
            if not isinstance(step := worker.read(BIG), Wait):
                tries += 1
            else:
                assert step.cancel()
            worker.close()
        q.pass_time(1)
    assert tries < 15


def test_dead_letters_obey_no_depth() -> None:
    q = Queues("deliver one", "ack next", "retries 1", "depth 2")
    q.stream("dead")
    q.write("dead", b"one", b"two")
    q.write("s", b"poison")
    taker = q.taker()
    read(taker)
    taker.close()
    assert q.shows("dead") == [b"one", b"two", b"poison"]
    assert q.shows("s") == []


def test_they_are_kept_whatever_replay_says() -> None:
    q = Queues("retries 1", "replay off")
    q.consumer("w", "s")
    q.write("s", b"poison")
    worker = q.worker()
    read(worker)
    say(worker, "nack")
    worker.close()
    q.pass_time(100)
    assert [row["body"] for row in q.kept("dead")] == ["poison"]
    q.ctl("clear dead")
    assert q.kept("dead") == []


def test_a_worker_of_the_dead_stream() -> None:
    q = Queues("deliver one", "ack next", "retries 1")
    waiting = None
    q.stream("dead")
    undertaker = q.taker("dead")
    waiting = undertaker.read(BIG)
    q.write("s", b"poison")
    taker = q.taker()
    read(taker)
    taker.close()
    assert waiting.result() == b"poison"


def test_expired_and_cut_messages_do_not_become_letters() -> None:
    q = Queues("retries 1", "ttl 5s")
    q.consumer("w", "s")
    q.write("s", b"expires", b"cleared")
    worker, other = q.worker(), q.worker()
    assert [read(worker), read(other)] == [b"expires", b"cleared"]
    q.ctl("drop s 2")
    say(other, "nack")
    q.pass_time(5)
    say(worker, "nack")
    assert "dead" not in q.group.streams or q.kept("dead") == []


# ------------------------------------------------------------------ redrive


def three(*lines: str) -> tuple[Queues, Any]:
    """A group with dead letters of s, t, s."""
    q = Queues("retries 1", *lines)
    q.stream("t")
    q.consumer()
    worker = q.worker("w", "select s t")
    for stream, body in (("s", b"s1"), ("t", b"t1"), ("s", b"s2")):
        q.put(body, stream, headers={"k": body.decode()}, priority=6)
        assert read(worker) == body
        say(worker, "nack")
    assert [row["body"] for row in q.kept("dead")] == ["s1", "t1", "s2"]
    return q, worker


@pytest.mark.parametrize(
    ("command", "back", "left"),
    [
        ("redrive", [b"s1", b"t1", b"s2"], []),
        ("redrive s", [b"s1", b"s2"], ["t1"]),
        ("redrive s 1", [b"s1"], ["t1", "s2"]),
        ("redrive t 9", [b"t1"], ["s1", "s2"]),
    ],
)
def test_redrive(command: str, back: list[bytes], left: list[str]) -> None:
    q, worker = three()
    q.ctl(command)
    assert [row["body"] for row in q.kept("dead")] == left
    assert drain(worker) == back


def test_redriven_messages_begin_anew() -> None:
    q, worker = three("replay all")
    q.ctl("redrive")
    rows = [row for name in ("s", "t") for row in q.kept(name)][-1:]
    assert rows[0]["headers"] == {"k": "t1", "priority": "6", "sender": "0"}
    assert read(worker) == b"s1"
    own = told(worker)
    assert own["deliveries"] == "1"
    assert int(own["sequence"]) > 6


def test_letters_of_a_stream_that_is_gone_stay() -> None:
    q, _ = three()
    q.tree.unlink(ROOT, q.group, "t")
    q.ctl("redrive")
    assert [row["body"] for row in q.kept("dead")] == ["t1"]


def test_redrive_says_that_it_cannot_go_on() -> None:
    """A letter that stays keeps those taken from above it among the dropped ones of the group, which are bounded. Once
    it goes, the others do."""
    q = Queues("retries 1")
    q.stream("old")
    q.consumer()
    worker = q.worker()
    for stream, body in [("old", b"o"), *(("s", b"%d" % number) for number in range(5))]:
        q.write(stream, body)
        assert read(worker) == body
        say(worker, "nack")
    q.tree.unlink(ROOT, q.group, "old")
    with lowered(DROPPED=3):
        for _ in range(2):
            with pytest.raises(errors.OverLimit, match=r"at most 3 .* oldest letters of 'dead'"):
                q.ctl("redrive")
            assert [row["body"] for row in q.kept("dead")] == ["o", "3", "4"]
        assert drain(worker) == [b"0", b"1", b"2"]
        q.stream("old")
        q.ctl("redrive")
        assert q.kept("dead") == []
        assert drain(worker) == [b"o", b"3", b"4"]


def test_redrive_of_nothing() -> None:
    q = Queues()
    q.ctl("redrive")
    q.ctl("redrive s 5")
    with pytest.raises(errors.BadCommand):
        q.ctl("redrive s many")


def test_what_is_no_letter_is_not_redriven() -> None:
    q, _ = three()
    q.write("dead", b"written by hand")
    q.ctl("redrive")
    assert [row["body"] for row in q.kept("dead")] in ([], ["written by hand"])
    assert all(row["body"] != "written by hand" for row in q.kept("s"))


# ------------------------------------------------------------------ restarts


@pytest.mark.parametrize("clean", [True, False])
def test_letters_survive(tmp_path: Path, clean: bool) -> None:
    q = Queues("retries 1", path=tmp_path / "store")
    q.consumer("w", "s")
    q.write("s", b"poison", b"good")
    worker = q.worker()
    read(worker)
    say(worker, "dead broken")
    q.restart(clean=clean)
    assert [row["body"] for row in q.kept("dead")] == ["poison"]
    assert letter(q)["reason"] == "broken"
    assert drain(q.worker()) == [b"good"]
    q.ctl("redrive")
    q.restart(clean=clean)
    assert q.kept("dead") == []
    assert drain(q.worker()) == [b"poison"]


def test_a_server_that_is_killed_by_every_delivery(tmp_path: Path) -> None:
    q = Queues("retries 3", path=tmp_path / "store")
    q.consumer("w", "s")
    q.write("s", b"poison", b"good")
    for _ in range(3):
        worker = q.worker()
        assert read(worker) == b"poison"
        q.restart(clean=False)
    assert drain(q.worker()) == [b"good"]
    assert letter(q)["deliveries"] == "3"


def test_retries_of_less_hold_at_the_next_start_for_what_a_kill_left_in_flight(tmp_path: Path) -> None:
    q = Queues("deliver one", "ack next", path=tmp_path / "store")
    q.write("s", b"poison", b"good")
    assert read(q.taker()) == b"poison"
    q.restart(clean=False)
    assert q.queue()["waiting"] == 2
    q.ctl("retries 1")
    q.restart()
    assert q.queue()["waiting"] == 1
    assert letter(q)["deliveries"] == "1"
    assert read(q.taker()) == b"good"


@pytest.mark.parametrize("full", ["drop-old", "drop-new"])
def test_no_backlog_takes_a_dead_letter_away(full: str) -> None:
    q = Queues("deliver one", f"full {full}", "retries 1")
    q.consumer("letters", "dead", "backlog", "1")
    for body in (b"one", b"two"):
        q.write("s", body)
        taker = q.taker()
        taker.push_back(read(taker))
        taker.close()
    assert q.shows(".consumers/letters") == [b"one", b"two"]


def test_they_are_counted_after_a_restart(tmp_path: Path) -> None:
    q = Queues("retries 1", path=tmp_path / "store")
    q.consumer("w", "s")
    q.write("s", b"poison")
    worker = q.worker()
    read(worker)
    say(worker, "nack")
    worker.close()
    q.restart()
    assert json.loads(q.text(".stats"))["dead_letters"] == 1


# ---------------------------------------------------------------- another stream of dead letters


def with_letters(q: Queues) -> list[bytes]:
    """Three dead letters, of which each has a key of its own."""
    q.consumer("w", "s")
    for number in range(3):
        q.put(b"%d" % number, key=f"k{number}")
        worker = q.worker()
        read(worker)
        say(worker, "nack 0ms")
        worker.close()
    return [b"0", b"1", b"2"]


def letters(q: Queues, name: str = "dead") -> list[bytes]:
    return [row["body"].encode() for row in q.kept(name)]


def renamed(q: Queues, old: str, new: str) -> None:
    q.tree.rename(ROOT, q.group, old, q.group, new)


def pointed_elsewhere(q: Queues, old: str, new: str) -> None:
    q.ctl(f"dead {new}")


LESSER = [
    ["replay off"], ["replay last"], ["replay key"], ["replay all", "depth 2"],
    ["deliver one", "ack next", "depth 9", "full drop-old"],
]  # fmt: skip


@pytest.mark.parametrize("change", [renamed, pointed_elsewhere])
@pytest.mark.parametrize("settings", LESSER, ids=", ".join)
def test_letters_are_not_left_where_they_would_not_be_kept(tmp_path: Path, settings: list[str], change: Any) -> None:
    q = Queues(*settings, "retries 1", path=tmp_path / "store")
    bodies = with_letters(q)
    with pytest.raises(errors.Busy, match="'dead' has 3 dead letters"):
        change(q, "dead", "old")
    q.pass_time(2)
    assert letters(q) == bodies
    q.restart(clean=False)
    q.pass_time(2)
    assert letters(q) == bodies
    q.ctl("clear dead")
    change(q, "dead", "old")
    assert q.group.settings.dead not in q.group.streams


@pytest.mark.parametrize("change", [renamed, pointed_elsewhere])
@pytest.mark.parametrize("full", [[], ["full reject", "depth 2"]], ids=", ".join)
@pytest.mark.parametrize("settings", [["replay all"], ["deliver one", "ack next"]], ids=", ".join)
def test_letters_may_be_left_where_every_stream_keeps_its_messages(
    tmp_path: Path, settings: list[str], full: list[str], change: Any
) -> None:
    q = Queues(*settings, "retries 1", path=tmp_path / "store")
    bodies = with_letters(q)
    q.ctl("clear s", *full)
    change(q, "dead", "old")
    q.pass_time(2)
    name = "old" if change is renamed else "dead"
    assert letters(q, name) == bodies
    q.restart(clean=False)
    q.pass_time(2)
    assert letters(q, name) == bodies


def test_the_settings_that_come_with_another_name_count_too() -> None:
    q = Queues("replay all", "retries 1")
    bodies = with_letters(q)
    with pytest.raises(errors.Busy, match="3 dead letters"):
        q.ctl("dead other", "replay off")
    assert letters(q) == bodies


@pytest.mark.parametrize("change", [renamed, pointed_elsewhere])
def test_letters_that_the_replica_does_not_have_are_letters(tmp_path: Path, change: Any) -> None:
    u = Copied(tmp_path, "replay off", "sync replica", "retries 1")
    u.consumer("w", "s")
    u.confirm()
    u.send(b"poison")
    u.confirm()
    worker = u.worker()
    read(worker)
    worker.write(b"dead\n")
    assert not u.kept("dead")
    with pytest.raises(errors.Busy, match="1 dead letters"):
        change(u, "dead", "old")
    u.confirm()
    u.pass_time(2)
    assert letters(u) == [b"poison"]


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("change", [renamed, pointed_elsewhere])
@pytest.mark.parametrize("replay", ["off", "last", "key", "all"])
def test_a_stream_of_dead_letters_from_now_on_keeps_what_it_kept(
    tmp_path: Path, replay: str, change: Any, clean: bool
) -> None:
    """All that comes, too; and nothing that it did not keep any more, under whatever `replay`."""
    q = Queues(f"replay {replay}", "retries 1", path=tmp_path / "store")
    q.stream("x")
    for body, key in (b"1", "k"), (b"2", "j"), (b"3", "j"):
        q.put(body, "x", key=key)
    assert q.row("x")["messages"] == {"off": 0, "last": 1, "key": 2, "all": 3}[replay]
    name = "dead" if change is renamed else "x"
    change(q, "x", name)
    before = {"off": [], "last": [b"3"], "key": [b"1", b"2", b"3"], "all": [b"1", b"2", b"3"]}[replay]
    bodies = [*before, *with_letters(q)]
    for _ in range(2):
        assert letters(q, name) == bodies
        assert q.row(name)["messages"] == len(bodies)
        q.restart(clean=clean)
        q.pass_time(2)
