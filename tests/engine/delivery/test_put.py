"""`.put`: one message with metadata in one write."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from mqfs import errors, limits
from mqfs.engine.tree.tree import Tree
from mqfs.model import Kind, User, Wait
from mqfs.state.group import GroupState
from tests.support.clock import SECOND, ManualClock
from tests.support.hand import ANNA, BERT, ROOT
from tests.support.queues import BIG, Queues, drain, read, waits


def headers_of(q: Queues, body: str, stream: str = "s") -> dict[str, str]:
    return next(row["headers"] for row in q.kept(stream) if row["body"] == body)


@pytest.mark.parametrize("blank", [" ", "\n", "\t"])
def test_one_object_one_blank_and_the_body(blank: str) -> None:
    q = Queues("replay all")
    handle = q.at(".put", os.O_RDWR)
    data = f'{{"stream":"s"}}{blank} {{}} body\n'.encode()
    assert handle.write(data) == len(data)
    assert handle.read(64) == b"1\n"
    assert [row["body"] for row in q.kept()] == [" {} body\n"]


def test_the_answer_is_the_last_ones_sequence() -> None:
    q = Queues("replay all")
    handle = q.at(".put", os.O_RDWR)
    handle.write(b'{"stream":"s"} one')
    handle.write(b'{"stream":"s"} two')
    assert handle.read(64) == b"2\n"


@pytest.mark.parametrize("more", [{"key": "x" * 70_000}, {"headers": {f"h{n}": "" for n in range(9_000)}}])
def test_an_object_that_is_too_long_says_so(more: dict[str, Any]) -> None:
    """And not that its JSON is invalid, as that was cut; one that is wrong says that, however long the body."""
    handle = Queues("replay all").at(".put", os.O_WRONLY)
    with pytest.raises(errors.TooLong, match=r"headers and key \(expected at most 65536 bytes of JSON\)"):
        handle.write(json.dumps({"stream": "s", **more}).encode() + b" body")
    with pytest.raises(errors.BadCommand, match=r"\.put: invalid JSON: Expecting"):
        handle.write(b'{"stream":nonsense} ' + b"x" * limits.PUT_BYTES)


def test_a_message_for_a_file_follows_its_name() -> None:
    q = Queues("replay all")
    stream = q.group.streams["s"]
    number = stream.qid.path
    handle = q.at(".put", os.O_WRONLY)
    q.tree.rename(ROOT, q.group, "s", q.group, "old")
    q.tree.create(ROOT, q.group, "s", 0o666)
    handle.write(b'{"stream":"s","file":%d} one' % number)
    handle.write(b'{"stream":"s"} two')
    assert [[row["body"] for row in q.kept(name)] for name in ("old", "s")] == [["one"], ["two"]]
    q.tree.unlink(ROOT, q.group, "old")
    for other in (number, q.group.streams["s"].qid.path + (1 << 32), 1 << 63):
        with pytest.raises(errors.NotFound):
            handle.write(b'{"stream":"s","file":%d} three' % other)
    for wrong in (b"0", b"-1", b"true", b'"1"', b"1.5", b"%d" % (1 << 64)):
        with pytest.raises(errors.BadCommand, match=r"file .*: not an inode"):
            handle.write(b'{"stream":"s","file":%s} three' % wrong)


def test_it_may_be_opened_for_writing_only() -> None:
    q = Queues("replay all")
    handle = q.at(".put", os.O_WRONLY)
    handle.write(b'{"stream":"s"} one')
    with pytest.raises(errors.Denied):
        handle.read(64)
    assert [row["body"] for row in q.kept()] == ["one"]


def test_headers_and_sender() -> None:
    q = Queues("replay all")
    q.tree.setattr(ROOT, q.group.streams["s"], mode=0o666)
    handle = q.at(".put", os.O_WRONLY, ANNA)
    handle.write('{"stream":"s","headers":{"colour":"grün","empty":""},"priority":7,"id":"x"} one'.encode())
    assert headers_of(q, "one") == {"colour": "grün", "empty": "", "priority": "7", "id": "x", "sender": "1001"}
    handle.write(b'{"stream":"s","priority":5} two')
    assert headers_of(q, "two") == {"sender": "1001"}


@pytest.mark.parametrize("fields", [{"key": "ü" * 127}, {"headers": {"key": "ü" * 127}}], ids=["key", "header"])
def test_a_key_is_a_header(fields: dict[str, Any]) -> None:
    q = Queues("replay all")
    q.put(b"now", **fields)
    q.put(b"later", delay="1s", **fields)
    q.pass_time(1)
    assert [headers_of(q, body)["key"] for body in ("now", "later")] == ["ü" * 127] * 2


def test_waiting_readers_get_it() -> None:
    q = Queues()
    reader = q.at("s")
    wait = reader.read(BIG, 0)
    q.put(b"one")
    assert wait.result() == b"one"


def test_a_message_that_is_put_needs_w_on_its_stream() -> None:
    q = Queues("replay all")
    q.tree.setattr(ROOT, q.group.streams["s"], mode=0o644)
    handle = q.at(".put", os.O_WRONLY, ANNA)
    with pytest.raises(errors.Denied):
        handle.write(b'{"stream":"s"} one')
    assert q.kept() == []


def test_a_message_that_is_put_obeys_depth() -> None:
    q = Queues("deliver one", "depth 1")
    q.put(b"one", id="1")
    with pytest.raises(errors.StreamFull):
        q.put(b"two", id="2")
    assert read(q.taker()) == b"one"
    q.put(b"two", id="2")
    assert q.shows("s") == [b"two"]


def test_a_put_may_wait_for_room() -> None:
    q = Queues("deliver one", "depth 1", "full block")
    q.put(b"one")
    handle = q.at(".put", os.O_RDWR)
    data = b'{"stream":"s"} two'
    step = handle.write(data)
    assert isinstance(step, Wait)
    assert read(q.taker()) == b"one"
    assert step.result() == len(data)
    assert handle.read(64) == b"2\n"


def test_a_writer_goes_on_when_a_message_has_outlived_its_ttl() -> None:
    q = Queues("deliver one", "depth 1", "full block")
    q.put(b"short", ttl="3s")
    blocked = q.at("s", os.O_WRONLY).write(b"waits")
    assert isinstance(blocked, Wait)
    q.pass_time(3)
    assert blocked.result() == 5
    assert q.shows("s") == [b"waits"]


# ------------------------------------------------------------------ delay


def test_a_delayed_message_is_nowhere_until_it_is_due() -> None:
    q = Queues("deliver one")
    taker = q.taker()
    held = q.put(b"later", delay="30s")
    wait = taker.read(BIG)
    q.write("s", b"now")
    assert wait.result() == b"now"
    q.pass_time(29)
    assert q.shows("s") == []
    assert q.kept() == []
    wait = taker.read(BIG)
    q.pass_time(1)
    assert wait.result() == b"later"
    assert held == 1


def test_it_becomes_a_new_message_that_tells_what_it_was() -> None:
    q = Queues("replay all")
    held = q.put(b"later", delay="5s", headers={"k": "v"}, priority=8)
    q.write("s", b"now")
    q.pass_time(5)
    rows = q.kept()
    assert [row["body"] for row in rows] == ["now", "later"]
    assert rows[1]["sequence"] > rows[0]["sequence"] > held
    assert rows[1]["headers"] == {"k": "v", "priority": "8", "sender": "0", "held": str(held)}
    assert float(rows[1]["time"]) == 1_700_000_005


def test_they_come_in_the_order_of_their_times() -> None:
    q = Queues("replay all")
    for body, delay in ((b"c", "3s"), (b"a", "1s"), (b"b", "2s"), (b"c2", "3s")):
        q.put(body, delay=delay)
    q.pass_time(10)
    assert [row["body"] for row in q.kept()] == ["a", "b", "c", "c2"]


def test_a_delayed_message_dropped_by_two_lines_of_one_write() -> None:
    q = Queues()
    sequence = q.put(b"x", delay="1s")
    q.ctl(f"drop s {sequence}", f"drop s {sequence}")
    q.pass_time(2)
    assert len(q.group.held) == 0
    assert q.kept() == []


def test_at_a_time() -> None:
    q = Queues("replay all")
    q.put(b"later", at=1_700_000_010)
    q.put(b"past", at=1_600_000_000)
    q.pass_time(1)
    assert [row["body"] for row in q.kept()] == ["past"]
    q.pass_time(9)
    assert [row["body"] for row in q.kept()] == ["past", "later"]


def test_its_ttl_counts_from_when_it_is_due() -> None:
    q = Queues("replay all")
    q.put(b"later", delay="10s", ttl="5s")
    q.pass_time(14)
    assert [row["body"] for row in q.kept()] == ["later"]
    q.pass_time(1)
    assert q.kept() == []


def test_it_follows_its_stream() -> None:
    q = Queues("replay all")
    q.stream("gone")
    q.put(b"one", delay="5s")
    q.put(b"two", "gone", delay="5s")
    q.tree.rename(ROOT, q.group, "s", q.group, "t")
    q.tree.unlink(ROOT, q.group, "gone")
    q.stream("gone")
    q.pass_time(5)
    assert [row["body"] for row in q.kept("t")] == ["one"]
    assert q.kept("gone") == []


def test_a_full_queue_loses_no_message_that_comes_due() -> None:
    q = Queues("deliver one", "depth 1")
    q.put(b"later", delay="5s")
    q.write("s", b"now")
    q.pass_time(10)
    taker = q.taker()
    assert read(taker) == b"now"
    q.pass_time(10)
    assert read(taker) == b"later"


class RunningClock(ManualClock):
    """Each look at it takes some time, now more, now less."""

    luck = random.Random(7)

    def wall_ns(self) -> int:
        self.forward(self.luck.randint(20, 900) / SECOND)
        return super().wall_ns()

    def engine_ns(self) -> int:
        self.forward(self.luck.randint(20, 900) / SECOND)
        return super().engine_ns()


def test_messages_for_one_time_come_as_they_were_written() -> None:
    """Though their times to wait are measured by two clocks, which are read one after the other."""
    q, start = Queues("replay all", clock=RunningClock()), 1_700_000_000
    times = [start + 10, start + 11, start + 10.5]
    for number in range(300):
        q.put(b"%d" % number, at=times[number % 3])
    dropped = [q.put(b"dropped", at=start + 100 + number) for number in range(300)]
    q.ctl(*(f"drop s {sequence}" for sequence in dropped))
    q.put(b"300", at=times[0])
    assert len(q.group.held._at) == len(times)
    q.clock.forward(20)
    q.tree.run_timers()
    bodies = [int(row["body"]) for row in q.kept()]
    assert bodies == [*range(0, 301, 3), *range(2, 300, 3), *range(1, 300, 3)]


def test_what_is_put_after_the_wall_clock_was_set_is_due_by_it() -> None:
    q = Queues("replay all")
    q.put(b"before", at=1_700_000_100)
    q.clock.wall += 60 * SECOND
    q.put(b"after", at=1_700_000_100)
    q.pass_time(41)
    assert [row["body"] for row in q.kept()] == ["after"]


@pytest.mark.parametrize("clean", [True, False])
def test_delayed_messages_survive(tmp_path: Path, clean: bool) -> None:
    q = Queues("deliver one", path=tmp_path / "store")
    held = q.put(b"later", delay="30s", headers={"k": "v"})
    q.put(b"soon", delay="3s")
    q.pass_time(3)
    q.restart(clean=clean)
    assert q.shows("s") == [b"soon"]
    q.pass_time(26)
    assert q.shows("s") == [b"soon"]
    q.pass_time(1)
    assert q.shows("s") == [b"soon", b"later"]
    assert headers_of(q, "later") == {"k": "v", "sender": "0", "held": str(held)}
    q.restart(clean=clean)
    assert q.shows("s") == [b"soon", b"later"]


# ------------------------------------------------------------------ ids


def test_an_id_is_accepted_once() -> None:
    q = Queues("replay all")
    first = q.put(b"one", id="x")
    assert q.put(b"one again", id="x") == first
    assert q.put(b"other", id="y") != first
    assert [row["body"] for row in q.kept()] == ["one", "other"]


@pytest.mark.parametrize("full", ["drop-old", "drop-new", "reject", "block"])
def test_a_repeat_needs_no_room(full: str) -> None:
    q = Queues("replay all", "depth 1", f"full {full}")
    first = q.put(b"one", id="x")
    assert q.put(b"one", id="x") == first
    assert [row["body"] for row in q.kept()] == ["one"]


def test_two_that_wait_for_room_with_one_id() -> None:
    q = Queues("deliver one", "depth 1", "full block")
    q.write("s", b"in the way")
    handles = [q.at(".put", os.O_RDWR) for _ in range(3)]
    steps = [handle.write(b'{"stream":"s","id":"x"} one') for handle in handles]
    assert all(isinstance(step, Wait) for step in steps)
    taker = q.taker()
    assert read(taker) == b"in the way"
    assert read(taker) == b"one"
    assert waits(taker)
    assert [step.result() for step in steps] == [27, 27, 27]
    assert [handle.read(64) for handle in handles] == [b"2\n"] * 3


def test_an_id_is_remembered_for_dedup() -> None:
    q = Queues("replay all", "dedup 10s")
    first = q.put(b"one", id="x")
    q.pass_time(9)
    assert q.put(b"again", id="x") == first
    q.pass_time(1)
    assert q.put(b"new", id="x") != first
    assert [row["body"] for row in q.kept()] == ["one", "new"]


def test_an_id_of_a_delayed_message() -> None:
    q = Queues("replay all")
    first = q.put(b"later", id="x", delay="5s")
    assert q.put(b"again", id="x") == first
    q.pass_time(5)
    assert [row["body"] for row in q.kept()] == ["later"]


def test_an_id_whose_message_was_refused_is_not_remembered() -> None:
    q = Queues("replay all", "depth 1", "full reject")
    q.write("s", b"in the way")
    with pytest.raises(errors.StreamFull):
        q.put(b"one", id="x")
    q.ctl("clear s")
    q.put(b"one", id="x")
    assert [row["body"] for row in q.kept()] == ["one"]


@pytest.mark.parametrize("clean", [True, False])
def test_ids_survive(tmp_path: Path, clean: bool) -> None:
    q = Queues("replay all", path=tmp_path / "store")
    first = q.put(b"one", id="x")
    q.restart(clean=clean)
    assert q.put(b"one", id="x") == first
    assert [row["body"] for row in q.kept()] == ["one"]


# ------------------------------------------------------------------ single


def test_single_goes_to_one_of_the_consumers() -> None:
    q = Queues()
    q.consumer("v")
    q.consumer("w")
    q.put(b"once", single=True)
    q.write("s", b"for all")
    got = [drain(q.worker("v")), drain(q.worker("w"))]
    assert sorted(len(bodies) for bodies in got) == [1, 2]
    assert all(bodies[-1] == b"for all" for bodies in got)


def test_single_goes_to_one_of_those_who_wait() -> None:
    q = Queues()
    readers = [q.at("s", os.O_RDWR) for _ in range(3)]
    steps = [reader.read(BIG) for reader in readers]
    q.put(b"once", single=True)
    assert [step.settled for step in steps].count(True) == 1
    q.write("s", b"for all")
    assert [step.result() for step in steps if step.settled].count(b"once") == 1


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (b"", errors.BadRequest),
        (b"hello", errors.BadRequest),
        (b'{"stream":"s"}', errors.BadRequest),
        (b'{"stream":"s"}x', errors.BadRequest),
        (b'{"stream":"s"', errors.BadRequest),
        (b'["s"] x', errors.BadRequest),
        (b"{} x", errors.BadRequest),
        (b'{"stream":7} x', errors.BadRequest),
        (b'{"stream":"s","colour":1} x', errors.BadRequest),
        (b'{"stream":"s","priority":10} x', errors.BadRequest),
        (b'{"stream":"s","priority":-1} x', errors.BadRequest),
        (b'{"stream":"s","priority":"5"} x', errors.BadRequest),
        (b'{"stream":"s","priority":true} x', errors.BadRequest),
        (b'{"stream":"s","priority":5.5} x', errors.BadRequest),
        (b'{"stream":"s","delay":30} x', errors.BadRequest),
        (b'{"stream":"s","delay":"soon"} x', errors.BadRequest),
        (b'{"stream":"s","delay":"-1s"} x', errors.BadRequest),
        (b'{"stream":"s","delay":"1s","at":1} x', errors.BadRequest),
        (b'{"stream":"s","at":"noon"} x', errors.BadRequest),
        (b'{"stream":"s","at":true} x', errors.BadRequest),
        (b'{"stream":"s","at":1e999} x', errors.BadRequest),
        (b'{"stream":"s","at":NaN} x', errors.BadRequest),
        (b'{"stream":"s","ttl":5} x', errors.BadRequest),
        (b'{"stream":"s","id":5} x', errors.BadRequest),
        (b'{"stream":"s","single":"yes"} x', errors.BadRequest),
        (b'{"stream":"s","key":""} x', errors.BadRequest),
        (b'{"stream":"s","key":7} x', errors.BadRequest),
        (b'{"stream":"s","key":"' + b"k" * 256 + b'"} x', errors.BadRequest),
        (b'{"stream":"s","headers":{"key":""}} x', errors.BadRequest),
        (b'{"stream":"s","headers":{"key":"' + b"k" * 256 + b'"}} x', errors.BadRequest),
        (b'{"stream":"s","key":"a","headers":{"key":"a"}} x', errors.BadRequest),
        (b'{"stream":"s","headers":[]} x', errors.BadRequest),
        (b'{"stream":"s","headers":{"a":1}} x', errors.BadRequest),
        (b'{"stream":"s","headers":{"sender":"me"}} x', errors.BadRequest),
        (b'{"stream":"s","headers":{"stream":"t"}} x', errors.BadRequest),
        (b'{"stream":"s","headers":{"k":"\\ud800"}} x', errors.BadRequest),
        (b'{"stream":"s","headers":{"' + b"k" * 256 + b'":"v"}} x', errors.BadRequest),
        (b'{"stream":"s","headers":{"k":"' + b"v" * 70_000 + b'"}} x', errors.TooLong),
        (b'{"stream":"s","x":' + b"[" * 100_000 + b"]" * 100_000 + b"} x", errors.BadRequest),
        (b'\xff{"stream":"s"} x', errors.BadRequest),
        (b'{"stream":"nowhere"} x', errors.NotFound),
        (b'{"stream":"ctl"} x', errors.NotFound),
        (b'{"stream":".cursor"} x', errors.NotFound),
    ],
)  # fmt: skip
def test_bad_puts(text: bytes, error: type[errors.MqfsError]) -> None:
    q = Queues("replay all")
    handle = q.at(".put", os.O_RDWR)
    with pytest.raises(errors.MqfsError) as caught:
        handle.write(text)
    assert caught.value.errno == error.errno
    assert caught.value.detail
    assert handle.read(1 << 16) == f"{caught.value}\n".encode()
    assert q.errors() == [str(caught.value)]
    assert q.kept() == []
    handle.write(b'{"stream":"s"} good')
    assert handle.read(64) == b"1\n"


def test_the_largest_message() -> None:
    q = Queues("replay all")
    handle = q.at(".put", os.O_RDWR)
    data = b'{"stream":"s"} ' + b"x" * (1_044_480 + 1)
    with pytest.raises(errors.TooLong):
        handle.write(data)
    assert q.kept() == []


def test_a_view_is_not_written() -> None:
    q = Queues("replay all", "bind v '#'")
    handle = q.at(".put", os.O_RDWR)
    with pytest.raises(errors.MqfsError):
        handle.write(b'{"stream":"v"} x')
    assert q.kept() == []


def test_lines_are_not_cut() -> None:
    q = Queues("replay all", "data line")
    q.put(b"one\ntwo\nthr")
    assert [row["body"] for row in q.kept()] == ["one\ntwo\nthr"]


def test_nothing_is_held_for_ever_in_json() -> None:
    q = Queues("replay all")
    q.put(json.dumps({"a": 1}).encode())
    assert q.kept()[0]["body"] == '{"a": 1}'
    assert waits(q.at("s", os.O_RDWR)) is False


def test_a_message_that_outlived_its_ttl_makes_room_for_a_writer_that_waits() -> None:
    q = Queues("deliver one", "depth 1", "full block")
    q.put(b"short", ttl="2s")
    wait = q.at("s", os.O_WRONLY).write(b"next")
    q.pass_time(1)
    assert not wait.settled
    q.pass_time(1)
    assert wait.settled
    assert q.shows("s") == [b"next"]


# ------------------------------------------------------------------ whose an id is


def put_as(q: Queues, user: User, body: str, **keys: object) -> int:
    handle = q.at(".put", os.O_RDWR, user)
    handle.write(f"{json.dumps({'stream': 's', **keys})} {body}".encode())
    return int(handle.read(64))


@pytest.mark.parametrize("keys", [{}, {"delay": "1s"}])
def test_an_id_is_its_users(tmp_path: Path, keys: dict[str, object]) -> None:
    """A user who may write another stream, or the same, makes no other user's message a repeat."""
    q = Queues("replay all", path=tmp_path / "store")
    q.tree.setattr(ROOT, q.group.streams["s"], mode=0o666)
    first = [put_as(q, user, f"{user.uid}", id="order-17", **keys) for user in (ANNA, BERT, ROOT)]
    q.restart(clean=False)
    assert [put_as(q, user, "again", id="order-17") for user in (ANNA, BERT, ROOT)] == first
    q.pass_time(2)
    assert sorted(row["body"] for row in q.kept()) == ["0", "1001", "1002"]


def test_an_id_of_an_older_log_is_anybodys() -> None:
    q = Queues("replay all")
    until = q.clock.engine_ns() + 10 * SECOND
    state = GroupState.decode(q.group.state.encode())
    state.apply({"do": "id", "id": "b", "until": until, "sequence": 4})
    older = json.loads(state.encode())
    del older["id_users"]
    q.group.log.bucket.writer.append(Kind.STATE, 0, 0, json.dumps(older).encode())
    q.tree = Tree(q.store, q.clock, owner=ROOT)
    q.group = q.tree.root.groups["g"]
    q.tree.setattr(ROOT, q.group.streams["s"], mode=0o666)
    assert [put_as(q, user, "x", id="b") for user in (ANNA, BERT)] == [4, 4]
    q.clock.forward(11)
    assert put_as(q, ANNA, "x", id="b") != 4


def test_no_user_takes_all_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DEDUP_IDS", 4)
    q = Queues("replay all", "dedup 10s")
    q.tree.setattr(ROOT, q.group.streams["s"], mode=0o666)
    for number in range(2):
        put_as(q, ANNA, "x", id=str(number))
    with pytest.raises(errors.OverLimit, match=r"too many ids within 'dedup' \(expected at most 2 a user, 4 in all"):
        put_as(q, ANNA, "x", id="2")
    put_as(q, BERT, "x", id="2")
    put_as(q, ANNA, "x")
    q.clock.forward(11)
    put_as(q, ANNA, "x", id="2")
    assert len(q.kept()) == 5


# ------------------------------------------------------------------ what is remembered of messages with a ttl


@pytest.mark.parametrize("disk", [True, False], ids=["disk", "memory"])
@pytest.mark.parametrize(
    "lines", [("replay all",), ("replay off", "consumer idle"), ("replay last", "consumer w"), ("deliver one",)]
)
def test_a_message_that_outlived_its_ttl_is_forgotten(tmp_path: Path, lines: tuple[str, ...], disk: bool) -> None:
    """While one is remembered, bulk readers read one by one, and it takes memory."""
    q = Queues(*lines, path=tmp_path / "store" if disk else None)
    handle = q.at(".put", os.O_WRONLY)
    for number in range(300):
        handle.write(b'{"stream":"s","ttl":"%ds"} %d' % (1 + number % 3, number))
    q.pass_time(5)
    assert (len(q.group.retention.lapsed), len(q.group.ranks)) == (0, 0)
    q.write("s", b"alive")
    q.put(b"too", ttl="1h")
    assert json.loads(q.text(".stats"))["streams"]["s"]["messages"] == 2
    if disk:
        q.restart(clean=False)
        assert json.loads(q.text(".stats"))["streams"]["s"]["messages"] == 2
        q.pass_time(1)
    assert len(q.group.retention.lapsed) == 0


def test_one_behind_a_message_that_stays_is_forgotten_when_the_log_has_given_it_back() -> None:
    q = Queues("replay all")
    q.write("s", b"stays")
    for _ in range(300):
        q.put(b"goes", ttl="1s")
    q.pass_time(3)
    assert (len(q.group.retention.lapsed), len(q.group.ranks)) == (0, 0)
    assert q.shows(".kept/s") == [b"stays"]
    assert json.loads(q.text(".stats"))["plain"]


def test_dropped_messages_that_the_log_still_has_hide_none_that_it_has_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SEGMENT_BYTES", 4_096)
    monkeypatch.setattr(limits, "SEGMENT_FIRST_BYTES", 1_024)
    monkeypatch.setattr("mqfs.engine.retention.retention._LOOKED_AT", 2)
    q = Queues("replay all", path=tmp_path / "store")
    q.write("s", *[b"x" * 100] * 200)
    first = q.group.streams["s"].kept.first_kept()
    newest = range(first + 196, first + 198)
    q.ctl(*(f"drop s {sequence}" for sequence in newest))
    for begin in range(first + 1, first + 161, 20):
        q.ctl(*(f"drop s {sequence}" for sequence in range(begin, begin + 20)))
        q.group.retention.trim(always=True)
        q.tree.tick()
    assert set(newest) <= q.group.state.dropped.keys()
    assert len(q.group.state.dropped) < 162
