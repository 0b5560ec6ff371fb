"""`.batch`: all of it, in order, as one unit, or nothing."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import pytest

from mqfs import errors, limits
from mqfs.model import Wait
from tests.support.batches import frame
from tests.support.clock import ManualClock
from tests.support.hand import ANNA, ROOT
from tests.support.parked import parked
from tests.support.queues import Queues, read

MORE, INNER = 1, 2


def test_in_order_over_several_streams(made: Any) -> None:
    u = made()
    u.write("s", b"before")
    assert u.batch(frame("s", b"1"), frame("t", b"2"), frame("s", b"3")) == 30
    u.write("t", b"after")
    assert u.log() == [("s", "before"), ("s", "1"), ("t", "2"), ("s", "3"), ("t", "after")]
    assert [row["sequence"] for row in u.kept("s")] == [1, 2, 4]


def test_it_is_one_unit_in_the_log(made: Any) -> None:
    u = made()
    u.batch(frame("s", b"1"), frame("t", b"2"), frame("s", b"3"))
    flags = [u.group.log.reader.scan(sequence).flags & (MORE | INNER) for sequence in (1, 2, 3)]
    assert flags == [MORE, MORE | INNER, INNER]


BAD = {
    "frame 1: 7 bytes left": b"\0" * 7,
    "frame 2: 1 bytes left": frame("s", b"x") + b"\0",
    "frame 2: size 11 exceeds the 10 bytes of the write": frame("s", b"x") + frame("s", b"xy")[:-1],
    "frame 1: size 8 is less than its name and headers (expected at least 9)": b"\x08\0\0\0\x01\0\0\0",
    "frame 1: size 0 is less than its name and headers": bytes(8),
    "frame 1: no name": bytes([8, 0, 0, 0, 0, 0, 0, 0]) * 1_000,
    "no stream 'x' in group 'g'": frame("s", b"x") + frame("x", b"x"),
    "frame 1: invalid bytes in name or header": frame("s", b"x").replace(b"s", b"\xff"),
    "frame 1: header 'sender': set by the server": frame("s", b"x", sender="0"),
    "frame 1: header 'priority': set by the server": frame("s", b"x", priority="9"),
    "frame 1: header without a name": frame("s", b"x", **{"": "y"}),
    "frame 1: incomplete header": b"\x0c\0\0\0\x01\0\x02\0s\x09ax",
    "frame 1: header 'key': 0 bytes (expected 1 to 255)": frame("s", b"x", key=""),
    "frame 1: header 'key': 256 bytes (expected 1 to 255)": frame("s", b"x", key="k" * 256),
    "frame 1: headers of 16388 bytes": frame("s", b"x", a="b" * 16_384),
    "frame 1: message of 1044481 bytes": frame("s", b"x" * (limits.MESSAGE_BYTES + 1)),
}


@pytest.mark.parametrize("text", BAD)
def test_bad_frames_append_nothing(made: Any, text: str) -> None:
    u = made()
    handle = u.at(".batch", os.O_RDWR)
    with pytest.raises(errors.MqfsError, match=re.escape(text)):
        handle.write(frame("t", b"good") + BAD[text] if text.startswith("no") else BAD[text])
    assert text.encode() in handle.read(4096), "the refusal can be read"
    assert handle.read(4096) == b""
    assert u.log() == []
    assert text in u.errors()[0]


def test_a_header_twice(made: Any) -> None:
    u, head = made(), b"\x01a\x01\0b" * 2
    data = (8 + 1 + len(head) + 1).to_bytes(4, "little") + b"\x01\0" + len(head).to_bytes(2, "little") + b"s" + head
    with pytest.raises(errors.BadCommand, match="given twice"):
        u.batch(data + b"x")


def test_headers_and_who_sent_them(made: Any) -> None:
    u = made()
    u.stream("mine", ANNA)
    u.batch(frame("mine", b"1", colour="blue", empty=""), frame("mine", b"2"), user=ANNA)
    assert [row.get("headers", {}) for row in u.kept("mine")] == [
        {"sender": str(ANNA.uid), "colour": "blue", "empty": ""}, {},
    ]  # fmt: skip


def test_every_stream_needs_permission(made: Any) -> None:
    u = made()
    u.stream("mine", ANNA)
    u.stream("closed", mode=0o644)
    with pytest.raises(errors.Denied):
        u.batch(frame("mine", b"1"), frame("closed", b"2"), user=ANNA)
    assert u.log() == []


def test_the_next_read_tells_the_first_sequence(made: Any) -> None:
    u = made()
    u.write("s", b"x")
    handle = u.at(".batch", os.O_RDWR)
    handle.write(frame("t", b"1") + frame("t", b"2"))
    assert handle.read(4096) == b"2\n"
    assert handle.read(4096) == b""
    assert handle.write(b"") == 0


def test_readers_that_wait_get_them_in_order(made: Any) -> None:
    u = made("bind v '#'")
    stream, view, order = u.open("s"), u.at("v"), u.open("order")
    cursor = u.cursor("seek end", "format json")
    waits = [file.read(4096) for file in (stream, stream, view, view, view, order, order, cursor, cursor)]
    assert all(isinstance(wait, Wait) for wait in waits)
    u.batch(frame("s", b"1"), frame("t", b"2"), frame("s", b"3"))
    told = [wait.result() for wait in waits]
    assert told[:7] == [b"1", b"3", b"1", b"2", b"3", b"s\0", b"t\0"]
    assert [json.loads(line)["body"] for line in told[7:]] == ["1", "2"]
    assert json.loads(cursor.read(4096))["body"] == "3"
    assert order.read(4096, 4) == b"s\0"


def test_consumers_and_workers_get_them(made: Any) -> None:
    u = made("deliver one", "ack next")
    u.consumer("w")
    worker, taker = u.worker("w"), u.taker("s")
    parked = taker.read(4096)
    u.batch(frame("s", b"1"), frame("t", b"2"), frame("s", b"3"))
    assert parked.result() == b"1"
    assert taker.read(4096) == b"3"
    assert [read(worker) for _ in range(3)] == [b"1", b"2", b"3"]


# ---------------------------------------------------------------- bounds


def test_reject_looks_at_everything_first(made: Any) -> None:
    u = made("depth 2", "full reject")
    u.write("t", b"x")
    with pytest.raises(errors.StreamFull, match="'t': depth reached with 1 messages"):
        u.batch(frame("s", b"1"), frame("t", b"2"), frame("t", b"3"))
    with pytest.raises(errors.TooLong):
        u.batch(*[frame("s", b"1")] * 3)
    assert u.log() == [("t", "x")]
    u.batch(frame("s", b"1"), frame("t", b"2"))
    assert len(u.log()) == 3


def test_drop_old_cuts_only_when_all_fits(made: Any) -> None:
    u = made("depth 8B")
    u.write("s", b"1234", b"5678")
    with pytest.raises(errors.TooLong):
        u.batch(frame("s", b"x"), frame("t", b"123456789"))
    assert u.log() == [("s", "1234"), ("s", "5678")], "what did not fit has cut nothing"
    u.batch(frame("s", b"abcd"), frame("t", b"12345678"))
    assert u.log() == [("s", "5678"), ("s", "abcd"), ("t", "12345678")]


def test_drop_old_by_count_keeps_the_newest(made: Any) -> None:
    u = made("depth 2")
    u.batch(*[frame("s", b"%d" % n) for n in range(5)])
    assert u.log() == [("s", "3"), ("s", "4")]


def test_drop_new_discards_the_whole(made: Any) -> None:
    u = made("depth 1", "full drop-new")
    u.write("t", b"x")
    assert u.batch(frame("s", b"1"), frame("t", b"2")) == 20
    assert u.log() == [("t", "x")]
    assert json.loads(u.text(".stats"))["discarded"] == 2


def test_block_waits_until_all_fits(made: Any) -> None:
    u = made("depth 1", "full block")
    u.write("s", b"x")
    u.write("t", b"y")
    wait = u.batch(frame("s", b"1"), frame("t", b"2"))
    assert isinstance(wait, Wait)
    u.ctl("clear s")
    assert not wait.settled
    u.ctl("clear t")
    assert wait.result() == 20
    assert u.log() == [("s", "1"), ("t", "2")]


def test_blocked_units_do_not_wait_for_each_other(made: Any) -> None:
    u = made("depth 1", "full block")
    u.write("s", b"x")
    first = u.batch(frame("s", b"1"), frame("t", b"2"))  # waits at s
    u.write("t", b"y")
    second = u.batch(frame("t", b"3"), frame("s", b"4"))  # waits at t
    assert isinstance(first, Wait)
    assert isinstance(second, Wait)
    u.ctl("clear t")
    u.ctl("clear s")
    assert first.settled or second.settled
    u.ctl("clear s", "clear t")
    u.ctl("clear s", "clear t")
    assert first.settled
    assert second.settled


def test_a_wait_that_is_given_up_appends_nothing(made: Any) -> None:
    u = made("depth 1", "full block")
    u.write("s", b"x")
    wait = u.batch(frame("s", b"1"), frame("t", b"2"))
    behind = u.batch(frame("s", b"3"))
    assert wait.cancel()
    u.ctl("clear s")
    assert behind.settled
    assert u.log() == [("s", "3")]
    assert parked(u.tree) == 0


def test_a_stream_removed_under_a_unit_that_waits(made: Any) -> None:
    u = made("depth 1", "full block")
    u.write("s", b"x")
    wait = u.batch(frame("s", b"1"), frame("t", b"2"))
    u.tree.unlink(ROOT, u.group, "t")
    u.ctl("clear s")
    with pytest.raises(errors.NotFound, match="stream 't': removed"):
        wait.result()
    assert u.log() == []


def test_a_consumers_backlog_counts_the_whole_unit(made: Any) -> None:
    u = made("full reject", "consumer w backlog 2")
    with pytest.raises(errors.StreamFull, match="backlog"):
        u.batch(frame("s", b"1"), frame("t", b"2"), frame("s", b"3"))
    u.batch(frame("s", b"1"), frame("t", b"2"))
    with pytest.raises(errors.StreamFull, match="backlog"):
        u.batch(frame("s", b"3"))


def test_the_logs_bound(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "GROUP_BYTES", 100_000)
    monkeypatch.setattr(limits, "MEMORY_BYTES", 100_000)
    u = made("full reject")
    with pytest.raises(errors.TooLong, match=r"exceeds the group's log \(expected at most 100000"):
        u.batch(*[frame("s", b"x" * 60_000)] * 2)
    u.batch(frame("s", b"x" * 60_000))
    with pytest.raises(errors.StreamFull):
        u.batch(frame("s", b"y" * 60_000))
    assert [row["body"][0] for row in u.kept("s")] == ["x"]


def test_the_logs_bound_with_drop_old(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "GROUP_BYTES", 100_000)
    monkeypatch.setattr(limits, "MEMORY_BYTES", 100_000)
    u = made()
    for _ in range(30):
        u.write("s", b"x" * 3_000)
    u.batch(*[frame("t", b"y" * 15_000)] * 3)
    assert len(u.kept("t")) == 3
    assert len(u.kept("s")) < 30


@pytest.mark.parametrize(("limit", "what"), [("UNIT_MESSAGES", "batch of 3 messages"), ("UNIT_BYTES", "bytes in the")])
def test_the_bounds_of_a_unit(made: Any, monkeypatch: pytest.MonkeyPatch, limit: str, what: str) -> None:
    monkeypatch.setattr(limits, limit, 2)
    u = made()
    with pytest.raises(errors.OverLimit, match=what):
        u.batch(*[frame("s", b"1")] * 3)
    assert u.log() == []


def test_counts_where_nobody_waits(made: Any) -> None:
    u = made()
    u.batch(frame("s", b"12"), frame("t", b"3"))
    stats = json.loads(u.text(".stats"))
    assert (stats["written"], stats["written_bytes"]) == (2, 3)
    assert stats["streams"]["s"]["messages"] == stats["streams"]["s"]["written"] == 1
    assert u.tree.stat(u.group.streams["s"]).mtime_ns == u.clock.wall


def test_poll_is_told(made: Any) -> None:
    u = made()
    told: list[int] = []
    handle, cursor = u.open("s"), u.cursor("seek end")
    handle.watch(lambda: told.append(1))
    cursor.watch(lambda: told.append(2))
    u.batch(frame("s", b"1"))
    assert sorted(told) == [1, 2]
    assert handle.readable
    assert cursor.readable


WAITING = {"stream": "s", "order": "order", "view": "v", "cursor": ".cursor"}


@pytest.mark.parametrize("who", WAITING)
def test_who_waits_alone_is_answered(made: Any, who: str) -> None:
    u = made("bind v s")
    handle = u.cursor("seek end") if who == "cursor" else u.at(WAITING[who])
    wait = handle.read(100)
    u.batch(frame("s", b"1"), frame("t", b"2"))
    assert wait.result() == (b"s\0" if who == "order" else b"1")


def test_who_waits_for_little_of_much(made: Any) -> None:
    """All is counted, whatever count each writer got; and the reader that waits for the last one gets it."""
    u = made("bind v t")
    stream, view, cursor = u.open("s"), u.at("v"), u.cursor("seek end", "select t", "format raw")
    waits = [stream.read(100), view.read(100), cursor.read(1)]
    u.batch(*[frame("s", b"%03d" % n) for n in range(1_000)], frame("t", b"last"))
    assert [wait.result() for wait in waits] == [b"000", b"last", b"l"]
    assert stream.read(100, 3) == b"001"
    u.batch(*[frame("st"[n % 2], b"%03d" % n) for n in range(1_000)])
    stats = json.loads(u.text(".stats"))
    assert (stats["written"], stats["written_bytes"]) == (2_001, 6_004)
    assert [stats["streams"][name]["written"] for name in "st"] == [1_500, 501]


def test_a_unit_stands_behind_writers_that_wait(made: Any) -> None:
    u = made("depth 10B", "full block")
    u.write("s", b"12345678")
    large = u.open("s", os.O_WRONLY).write(b"large")
    unit = u.batch(frame("s", b"x"))
    assert isinstance(large, Wait)
    assert isinstance(unit, Wait)
    u.ctl("clear s")
    assert u.log() == [("s", "large"), ("s", "x")]


def test_a_batch_waits_where_the_room_lacks(made: Any) -> None:
    """And holds up no writer where there is room."""
    u = made("depth 1", "full block")
    u.write("s", b"s1")
    u.write("t", b"t1")
    batch = u.batch(frame("s", b"s3"), frame("t", b"t3"))
    assert isinstance(batch, Wait)
    u.ctl("clear s")
    u.write("s", b"s2")
    late = u.at("t", os.O_WRONLY).write(b"t2")
    u.ctl("clear t")
    assert [isinstance(late, Wait) and late.settled, batch.settled] == [True, False]
    u.ctl("clear s")
    u.ctl("clear t")
    assert batch.settled
    assert u.log() == [("s", "s3"), ("t", "t3")]


@pytest.mark.parametrize("end", ["cancel", "remove", "reject"])
def test_a_batch_that_has_moved_can_be_ended(made: Any, end: str) -> None:
    u = made("depth 1", "full block")
    u.write("s", b"s1")
    u.write("t", b"t1")
    batch = u.batch(frame("s", b"s3"), frame("t", b"t3"))
    u.ctl("clear s")
    if end == "cancel":
        assert batch.cancel()
    elif end == "remove":
        u.tree.unlink(ROOT, u.group, "t")
        with pytest.raises(errors.NotFound):
            batch.result()
    else:
        u.ctl("full reject")
        with pytest.raises(errors.StreamFull):
            batch.result()
    assert parked(u.tree) == 0
    u.write("s", b"s2")
    u.ctl("clear")
    assert u.log() == []


class RunningClock(ManualClock):
    """A clock that advances whenever it is read."""

    def wall_ns(self) -> int:
        self.forward(0.001)
        return super().wall_ns()


def test_messages_of_a_batch_are_delivered_with_the_time_that_the_log_has() -> None:
    queues = Queues("replay all", clock=RunningClock())
    queues.stream("t")
    queues.consumer("w", "s")
    claimed = queues.worker().read(100)
    cursor = queues.at(".cursor", os.O_RDWR)
    cursor.write(b"select t\nformat json\n")
    wait = cursor.read(1_000)
    queues.at(".batch", os.O_WRONLY).write(frame("s", b"a") + frame("t", b"b"))
    assert claimed.settled  # its claim is a record, later than those of the batch
    assert json.loads(wait.result())["time"] == queues.kept("t")[0]["time"]
