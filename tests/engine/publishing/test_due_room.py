"""Delayed messages and runs of schedules whose stream has no room when they are due: they keep to `depth`, `backlog`
and the quota of the stream's owner as a write does, and wait where a write would be refused."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from mqfs import limits
from mqfs.engine.publishing import delayed
from mqfs.errors import OverLimit, StreamFull, TooLong
from mqfs.model import Wait
from tests.engine.tree.test_quotas import Limited
from tests.support.batches import Units, frame
from tests.support.clock import SECOND
from tests.support.hand import ANNA, BERT, ROOT
from tests.support.queues import Queues

KINDS: dict[str, dict[str, Any]] = {
    "delay": {"delay": "2s"},
    "every": {"every": "1h", "delay": "2s", "id": "t"},
    "cron": {"cron": "* * * * *", "id": "t"},
}
DUE_S = 60  # by then each is


def bodies(q: Queues, stream: str = "s") -> list[str]:
    return [row["body"] for row in q.kept(stream)]


@pytest.mark.parametrize("keys", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("full", ["reject", "block", "drop-new", "drop-old"])
@pytest.mark.parametrize("depth", ["2", "10B"])
def test_depth_holds(full: str, depth: str, keys: dict[str, Any]) -> None:
    q = Queues("replay all", f"depth {depth}", f"full {full}")
    q.stream("t")
    for body in (b"old 1", b"old 2"):
        q.write("s", body)
    q.put(b"due", **keys)
    q.put(b"due", "t", **keys | ({"id": "other"} if "id" in keys else {}))
    q.pass_time(DUE_S)
    assert bodies(q, "t") == ["due"], "a stream without room holds back no other"
    if full == "drop-old":
        assert bodies(q) == ["old 2", "due"]
        return
    assert bodies(q) == ["old 1", "old 2"]
    assert json.loads(q.text(".stats"))["discarded"] == (full == "drop-new")
    q.ctl("clear s")
    q.pass_time(1)
    assert bodies(q) == ([] if full == "drop-new" else ["due"])


@pytest.mark.parametrize("full", ["reject", "block"])
def test_they_come_in_their_order_as_there_is_room(full: str) -> None:
    q = Queues("deliver one", "depth 2", f"full {full}")
    for body in (b"old 1", b"old 2"):
        q.write("s", body)
    for number in range(4):
        q.put(b"due %d" % number, delay=f"{number + 1}s")
    dropped = q.put(b"dropped", delay="2s")
    q.pass_time(20)
    assert q.shows("s") == [b"old 1", b"old 2"]
    q.ctl(f"drop s {dropped}")
    taker = q.taker()
    got = []
    for _ in range(6):
        got.append(taker.read(64))
        q.clock.forward(0.02)
        q.tree.run_timers()  # room is seen soon
    assert got == [b"old 1", b"old 2", b"due 0", b"due 1", b"due 2", b"due 3"]
    assert isinstance(taker.read(64), Wait)


def test_they_stand_before_writers_that_wait() -> None:
    q = Queues("replay all", "depth 1", "full block")
    q.write("s", b"old")
    waiting = q.at("s", os.O_WRONLY).write(b"new")
    q.put(b"due", delay="1s")
    q.pass_time(5)
    q.ctl("depth 2")
    q.pass_time(1)
    assert not waiting.settled
    assert bodies(q) == ["old", "due"]
    q.ctl("depth 3")
    assert waiting.settled
    assert bodies(q) == ["old", "due", "new"]


@pytest.mark.parametrize("batch", [False, True], ids=["write", "batch"])
def test_a_writer_that_gives_up_lets_none_overtake_them(batch: bool) -> None:
    q = Units("depth 8B", "full block")
    q.write("s", b"old1")
    first = q.batch(frame("s", b"longlong")) if batch else q.at("s", os.O_WRONLY).write(b"longlong")
    second = q.at("s", os.O_WRONLY).write(b"new")
    q.put(b"due 12", delay="1s")
    q.pass_time(5)
    first.cancel()
    assert bodies(q) == ["old1"]
    assert not second.settled
    q.ctl("depth 13B")
    q.pass_time(1)
    assert second.settled
    assert bodies(q) == ["old1", "due 12", "new"]


def test_a_batch_that_waits_for_another_stream_goes_after_them() -> None:
    q = Units("depth 8B", "full block")
    q.write("s", b"full of.")
    q.write("t", b"old1")
    waiting = q.batch(frame("s", b"b"), frame("t", b"b"))
    behind = q.at("s", os.O_WRONLY).write(b"c")
    q.put(b"due 12", "t", delay="1s")
    q.pass_time(5)
    q.ctl("clear s")
    q.pass_time(2)
    assert not waiting.settled
    assert behind.settled, "it needs no room in that stream"
    assert (bodies(q), bodies(q, "t")) == (["c"], ["old1"])
    q.ctl("depth 16B")
    q.pass_time(2)
    assert waiting.settled
    assert (bodies(q), bodies(q, "t")) == (["c", "b"], ["old1", "due 12", "b"])


def test_many_streams_without_room_hold_back_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SLICE_S", 0)
    q = Queues("replay all", "depth 1", "full reject")
    for number in range(30):
        q.stream(f"t{number}")
        q.write(f"t{number}", b"old")
        q.put(b"due", f"t{number}", delay="1s")
        q.put(b"due", f"t{number}", delay="2s")
    q.put(b"due", delay="10s")
    rings = 0
    while not bodies(q):
        q.clock.forward(0.2)
        q.tree.run_timers()
        rings += 1
    assert rings < 100
    q.ctl("depth 3")
    for _ in range(100):
        q.clock.forward(0.02)
        q.tree.run_timers()
    assert all(bodies(q, f"t{number}") == ["old", "due", "due"] for number in range(30))


@pytest.mark.parametrize("keys", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("policy", ["reject", "block"])
def test_the_backlog_of_a_consumer_holds(policy: str, keys: dict[str, Any]) -> None:
    q = Queues("replay all", f"consumer w s backlog 1 full {policy}")
    q.write("s", b"old")
    q.put(b"due", **keys)
    q.pass_time(DUE_S)
    assert bodies(q) == ["old"]
    worker = q.worker()
    assert worker.read(64) == b"old"
    worker.write(b"ack\n")
    q.pass_time(1)
    assert bodies(q) == ["old", "due"]


@pytest.mark.parametrize("every", ["1s", "10s"])
def test_a_schedule_keeps_to_the_quota(every: str) -> None:
    q = Limited(f"{ANNA.uid} kept=20K", ctl=("replay all",))
    q.stream("t", ANNA)
    handle = q.at(".put", os.O_RDWR, ANNA)
    handle.write(json.dumps({"stream": "s", "every": every, "id": "e", "kept": True}).encode() + b" " + b"x" * 4000)
    q.pass_time(100)
    count = len(q.kept())
    assert count == 3
    assert q.use()["used"]["kept"] <= 20 << 10
    texts = [text for text in q.errors() if "schedule 'e'" in text]
    assert len(texts) == 1, "it is told once"
    assert "waits for room: uid 1001 keeps" in texts[0]
    q.ctl("clear s", user=ROOT)
    q.pass_time(10)
    assert 1 <= len(q.kept()) <= 3


def test_runs_that_waited_are_one(tmp_path: Any) -> None:
    q = Queues("replay all", "depth 1", "full reject", path=tmp_path / "store")
    q.write("s", b"old")
    q.put(b"run", every="10s", id="t")
    q.pass_time(35)
    q.restart(clean=False)
    q.pass_time(1)
    assert bodies(q) == ["old"]
    q.ctl("depth 9")
    q.pass_time(1)
    assert [row["headers"]["id"][-9:] for row in q.kept()[1:]] == ["22:13:30Z"]
    q.pass_time(10)
    assert len(q.kept()) == 3


@pytest.mark.parametrize("keys", KINDS.values(), ids=KINDS)
def test_what_would_never_fit_is_refused(keys: dict[str, Any]) -> None:
    q = Queues("replay all", "depth 10B", "full reject")
    with pytest.raises(TooLong, match="depth"):
        q.put(b"x" * 11, **keys)
    q.put(b"x" * 10, **keys)
    q.ctl("depth 5B")
    q.pass_time(DUE_S)
    assert bodies(q) == []
    assert "dropped: message exceeds the stream's depth" in q.errors()[-1]
    with pytest.raises((StreamFull, TooLong)):
        q.write("s", b"x" * 6)
    q.write("s", b"x")


@pytest.mark.parametrize("full", ["reject", "block"])
def test_what_has_no_room_leaves_other_streams_half_of_the_bound(monkeypatch: pytest.MonkeyPatch, full: str) -> None:
    monkeypatch.setattr(limits, "HELD", 20)
    q = Queues("replay all", "depth 1", f"full {full}")
    q.stream("t")
    q.write("s", b"full")
    put = [q.put(b"due", user=user, delay="1s") for user in [ANNA, BERT] * 5]
    q.pass_time(3)
    with pytest.raises(OverLimit, match=r"stream 's': too many delayed messages wait for room"):
        q.put(b"due", delay="1s")
    for number in range(9):
        q.put(b"other", "t", delay=f"{number + 100}s")
    with pytest.raises(OverLimit, match=r"expected at most 10 a user, 20 in all"):
        q.put(b"other", "t", user=BERT, delay="1h")
    q.ctl(f"drop s {put[5]}")
    q.put(b"after", user=BERT, delay="1s")
    q.ctl("depth 100")
    q.pass_time(3)
    assert bodies(q) == ["full", *["due"] * 9, "after"]
    for user in [ANNA, BERT] * 5:
        q.put(b"again", user=user, delay="1s")


@pytest.mark.parametrize("dropped", [slice(1, None), slice(None, -1)], ids=["all but the first", "all but the last"])
def test_dropped_messages_do_not_count_as_waiting_for_room(monkeypatch: pytest.MonkeyPatch, dropped: slice) -> None:
    monkeypatch.setattr(limits, "HELD", 20)
    q = Queues("replay all", "depth 1", "full reject")
    q.write("s", b"full")
    put = [q.put(b"due %d" % number, user=user, delay="1s") for number, user in enumerate([ANNA, BERT] * 5)]
    q.pass_time(3)
    q.ctl(f"drop s {' '.join(map(str, put[dropped]))}")
    for number in range(9):
        q.put(b"later", user=ANNA, delay=f"{number + 100}s")
    q.put(b"one waits for room", user=BERT, delay="1h")
    q.ctl("depth 100")
    q.pass_time(3)
    assert bodies(q) == ["full", "due 0" if dropped.start else "due 9"]


def test_dropped_messages_that_are_not_due_keep_no_memory(tmp_path: Path) -> None:
    q, begun = Queues("replay all", path=tmp_path / "store"), tracemalloc.is_tracing()
    tracemalloc.start()
    for _ in range(30):
        put = [q.put(b"x", delay="30d") for _ in range(100)]
        q.ctl(f"drop s {' '.join(map(str, put))}")
    traces = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, delayed.__file__)]).traces
    if not begun:
        tracemalloc.stop()
    assert sum(trace.size for trace in traces) < 3_000 * 20


def test_one_user_has_half_of_the_bound(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(limits, "HELD", 32)
    q = Queues("replay all", path=tmp_path / "store")
    put = [q.put(b"anna's", user=ANNA, delay="1h") for _ in range(16)]
    for _ in range(14):
        q.put(b"bert's", user=BERT, delay="1m")
    for _ in range(2):
        for user in (ANNA, BERT):
            with pytest.raises(OverLimit, match=r"too many delayed messages in a group \(expected at most 16 a user"):
                q.put(b"one more", user=user, delay="1h")
        q.restart()
    q.ctl(f"drop s {put[0]}")
    q.put(b"anna's", user=ANNA, delay="1h")
    q.put(b"root's", delay="1h")
    q.pass_time(61)
    assert bodies(q) == ["bert's"] * 14
    q.put(b"bert's", user=BERT, delay="1h")


# ------------------------------------------------------------------ while there is no room


def rings_of(q: Queues, seconds: int) -> int:
    """Look at the alarms whenever one is due, as the server does, for that long: how often that was."""
    end, rings = q.clock.engine_ns() + seconds * SECOND, 0
    while (due_ns := q.tree.timers.next_due_ns) is not None and due_ns <= end and rings < 10_000:
        q.clock.forward(max(due_ns - q.clock.engine_ns(), 0) / SECOND)
        q.tree.run_timers()
        rings += 1
    return rings


@pytest.mark.parametrize("keys", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("lines", [("depth 1",), ("depth 10B",), ("consumer w s backlog 1 full reject",)])
def test_without_room_it_is_tried_once_a_second(lines: tuple[str, ...], keys: dict[str, Any]) -> None:
    q = Queues("replay all", "full reject", *lines)
    q.write("s", b"old 1")
    q.put(b"due 12", **keys)
    q.clock.forward(DUE_S)
    assert rings_of(q, 10) < 40
    assert bodies(q) == ["old 1"]


@pytest.mark.parametrize("keys", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("head", [{}, {"k": "v"}], ids=["plain", "headers"])
@pytest.mark.parametrize("lines", [("depth 1",), ("depth 20B",), ("consumer w s backlog 1 full block",)])
def test_what_has_no_room_is_not_read_again(
    monkeypatch: pytest.MonkeyPatch, lines: tuple[str, ...], head: dict[str, str], keys: dict[str, Any]
) -> None:
    q = Queues("replay all", "full reject", *lines)
    q.write("s", b"old 1 of 20 bytes ..")
    due = ["due 1"] if "id" in keys else ["due 1", "due 2"]
    for body in due:
        q.put(body.encode(), headers=head, **keys)
    q.clock.forward(DUE_S)
    reads: list[int] = []
    record = q.group.held.record
    monkeypatch.setattr(q.group.held, "record", lambda sequence: reads.append(sequence) or record(sequence))
    q.pass_time(20)
    for _ in range(50):
        q.clock.forward(0.02)
        q.group.unblock()  # others make room, elsewhere
        q.tree.run_timers()
    assert len(reads) == 1
    q.ctl("depth 100")
    q.ctl("consumer w s backlog 100 full block")
    q.pass_time(2)
    assert bodies(q)[1:] == due
    assert all(("k" in row["headers"]) == bool(head) for row in q.kept()[1:])
