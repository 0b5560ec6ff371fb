"""`expect`: a message is appended only after the one that its writer names."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from mqfs import errors
from mqfs.model import Wait
from tests.engine.core.test_shown import Copied
from tests.engine.publishing.test_crash import Lying
from tests.support.batches import Units, frame
from tests.support.lying_disk import LyingDisk
from tests.support.queues import Queues, drain


def newest(call: Any) -> int:
    """The newest message that a refusal names."""
    with pytest.raises(errors.Conflict) as caught:
        call()
    assert caught.value.errno == errno.EEXIST
    return caught.value.newest


def test_only_after_the_message_that_is_named() -> None:
    q = Queues("replay all")
    q.stream("t")
    assert newest(lambda: q.put(b"early", expect=1)) == 0
    first = q.put(b"one", expect=0)
    q.put(b"of another stream", "t", expect=0)
    assert newest(lambda: q.put(b"late", expect=0)) == first
    q.put(b"two", expect=first)
    assert [row["body"] for row in q.kept()] == ["one", "two"]
    assert "expect" not in q.kept()[0].get("headers", {})
    assert q.errors()[-1] == "expect: newest message 1 of 's' (expected 0)"


def test_a_receipt_alone_adds_no_headers() -> None:
    q = Queues("replay all")
    handle = q.at(".put", os.O_RDWR)
    handle.write(b'{"stream":"s","kept":true,"expect":0} one')
    assert "headers" not in q.kept()[0]


def test_it_is_what_the_stream_keeps_that_counts() -> None:
    q = Queues("replay all")
    first, second, third = (q.put(body) for body in (b"one", b"two", b"three"))
    q.ctl(f"drop s {third}")
    assert newest(lambda: q.put(b"x", expect=third)) == second
    q.ctl("eof s")
    q.put(b"an end mark is no message", expect=second)
    q.ctl("clear s")
    assert newest(lambda: q.put(b"x", expect=second)) == 0
    q.put(b"short", expect=0, ttl="3s")
    q.pass_time(3)
    q.put(b"again", expect=0)
    assert first < second < third


def test_a_queue_whose_work_is_done_is_empty() -> None:
    q = Queues("deliver one")
    q.put(b"job", expect=0)
    assert newest(lambda: q.put(b"job", expect=0)) == 1
    assert drain(q.worker(".s")) == [b"job"]
    q.put(b"job", expect=0)


def test_a_repeat_with_its_id_is_no_conflict() -> None:
    q = Queues("replay all")
    first = q.put(b"one", expect=0, id="a")
    assert q.put(b"one", expect=0, id="a") == first
    assert len(q.kept()) == 1


@pytest.mark.parametrize("value", ["7", -1, True, 1.0, None, 1 << 63, [1]])
def test_what_is_no_sequence(value: Any) -> None:
    q = Queues("replay all")
    with pytest.raises(errors.BadCommand, match="not a sequence"):
        q.put(b"x", expect=value)


@pytest.mark.parametrize("when", [{"delay": "1s"}, {"at": 1}])
def test_not_of_a_delayed_message(when: dict[str, Any]) -> None:
    with pytest.raises(errors.BadCommand, match="expect: not with delay or at"):
        Queues().put(b"x", expect=0, **when)


def test_a_writer_that_waited_for_room_is_compared_when_its_turn_comes() -> None:
    q = Queues("deliver one", "depth 1", "full block")
    first = q.put(b"one")
    handles = [q.at(".put", os.O_RDWR) for _ in range(2)]
    steps = [handle.write(b'{"stream":"s","expect":%d} next' % first) for handle in handles]
    assert all(isinstance(step, Wait) for step in steps)
    taker = q.worker(".s")
    assert drain(taker) == [b"one"]  # acknowledged: now the stream is empty
    for step in steps:
        assert newest(step.result) == 0
    assert q.shows("s") == []


def test_what_is_written_and_not_shown_yet_counts(tmp_path: Path) -> None:
    u = Copied(tmp_path, "replay all", "sync replica")
    step = u.send(b"one")
    with pytest.raises(errors.Conflict):
        u.put(b"x", expect=0)
    put = u.at(".put", os.O_RDWR).write(b'{"stream":"s","expect":1} two')
    assert isinstance(put, Wait)
    u.confirm()
    assert (step.result(), put.result()) == (3, 29)
    assert [row["body"] for row in u.kept()] == ["one", "two"]
    u.close()


def test_a_write_that_failed_leaves_the_newest_as_it_was() -> None:
    disk = LyingDisk()
    u = Lying(disk)
    u.ctl("replay all", "sync off")
    u.stream("s")
    first = u.put(b"one")
    disk.fail_at, disk.fail_with = disk.calls + 1, errno.ENOSPC
    with pytest.raises(errors.MqfsError):
        u.put(b"two", expect=first)
    u.tree.tick()
    u.put(b"three", expect=first)
    assert [row["body"] for row in u.kept()] == ["one", "three"]
    u.close()


def test_all_of_a_batch_or_none() -> None:
    u = Units()
    u.batch(frame("s", b"one", expect="0"), frame("s", b"two"), frame("t", b"three", expect="0", colour="red"))
    assert u.log() == [("s", "one"), ("s", "two"), ("t", "three")]
    assert [row.get("headers") for row in u.kept("t")] == [{"sender": "0", "colour": "red"}]
    assert "headers" not in u.kept("s")[0]
    assert newest(lambda: u.batch(frame("t", b"four", expect="3"), frame("s", b"five", expect="1"))) == 2
    u.batch(frame("t", b"four", expect="3"), frame("s", b"five", expect="2"))
    assert len(u.log()) == 5


@pytest.mark.parametrize("text", ["", "x", "-1", "1" * 20, str(1 << 63), "１"])
def test_a_frame_that_expects_no_sequence(text: str) -> None:
    u = Units()
    with pytest.raises(errors.BadCommand, match="header 'expect'"):
        u.batch(frame("s", b"one", expect=text))


def test_a_stream_with_two_conditions() -> None:
    u = Units()
    with pytest.raises(errors.BadCommand, match="expect: 0 and 1 of stream 's'"):
        u.batch(frame("s", b"one", expect="0"), frame("s", b"two", expect="1"))
    u.part("p")
    u.part("q")
    for part, expect in (("p", 0), ("q", 1)):
        u.at(f".txn/{part}/.put", os.O_WRONLY).write(b'{"stream":"s","expect":%d} x' % expect)
    with pytest.raises(errors.BadCommand, match="expect: 0 and 1"):
        u.say("commit x.1 p q")
    u.say("commit x.1 p")
    assert u.log() == [("s", "x")]


def test_a_transaction_is_compared_at_its_commit() -> None:
    u = Units()
    u.part("p")
    u.at(".txn/p/.put", os.O_WRONLY).write(b'{"stream":"s","expect":0} one')
    u.at(".txn/p/.batch", os.O_WRONLY).write(frame("t", b"two", expect="0"))
    u.write("t", b"meanwhile")
    assert newest(lambda: u.say("commit x.1 p")) == 1
    assert u.parts() == ["p"]
    u.ctl("clear t")
    u.say("commit x.1 p")
    u.say("commit x.1 p")  # a repeat is no conflict
    assert u.log() == [("s", "one"), ("t", "two")]


def test_it_holds_after_a_kill(tmp_path: Path) -> None:
    q = Queues("replay all", path=tmp_path / "store")
    first = q.put(b"one")
    q.restart(clean=False)
    assert newest(lambda: q.put(b"two", expect=0)) == first
    q.put(b"two", expect=first)
    assert [row["body"] for row in q.kept()] == ["one", "two"]
