"""`.cursor`: positions, selection, bounds, formats."""

from __future__ import annotations

import json
import os

import pytest

from mqfs import limits
from mqfs.errors import BadCommand, Denied, FellBehind, NotFound
from mqfs.model import Kind, Wait
from mqfs.records.record import HEAD
from tests.support.calls import calls_once
from tests.support.clock import SECOND
from tests.support.hand import ANNA, ROOT, Hand


@pytest.fixture
def full(hand: Hand) -> Hand:
    """Streams a and b, six messages written in turn, a second apart: a1 b2 a3 b4 a5 b6."""
    hand.stream("a")
    hand.stream("b")
    for i in range(1, 7):
        hand.clock.forward(1)
        hand.write("ab"[(i + 1) % 2], f"{'ab'[(i + 1) % 2]}{i}".encode())
    return hand


def drain(cursor: object) -> list[bytes]:
    got: list[bytes] = []
    while not isinstance(step := cursor.read(4096), Wait):  # type: ignore[attr-defined]
        if step == b"":
            return got
        got.append(step)
    assert step.cancel()
    return got


@pytest.mark.parametrize(
    ("seek", "first"),
    [
        ("first", b"a1"), ("last", b"b6"), ("3", b"a3"), ("-2", b"a5"), ("-100", b"a1"), ("end", None), ("100", None),
        ("-3s", b"a3"), ("-0", None),
    ],
)  # fmt: skip
def test_seek(full: Hand, seek: str, first: bytes | None) -> None:
    got = drain(full.cursor(f"seek {seek}"))
    assert (got[0] if got else None) == first


@pytest.mark.parametrize("select", ["select", "select a", "select a b"])
def test_a_seek_back_by_more_than_there_is_passes_end_marks(hand: Hand, select: str) -> None:
    """It leads to the oldest message, or to the end; a mark before it is passed, and gives its room back."""
    hand.ctl("replay off", "full block", "depth 1")
    for name in ("a", "b"):
        hand.stream(name)
    cursor, writer = hand.cursor(select), hand.open("a", os.O_WRONLY)
    writer.write(b"")
    wait = writer.write(b"x")
    assert isinstance(wait, Wait)
    cursor.write(b"seek -3\n")
    assert wait.result() == 1
    assert drain(cursor) == [b"x"]


MOVED = {"seek first": b"a1", "seek -2": b"a5", "until end": b"", "until 3": b"", "seek 2\nuntil 1": b"", "info": None}


@pytest.mark.parametrize(("command", "got"), MOVED.items())
def test_a_command_holds_for_a_read_that_waits(full: Hand, command: str, got: bytes | None) -> None:
    """Two threads, or two programs with one open file: the read neither waits on nor passes over what is there from the
    new place on, and a poll sees it."""
    cursor = full.cursor("seek last")
    assert drain(cursor) == [b"b6"]
    woken: list[bool] = []
    cursor.watch(lambda: woken.append(cursor.readable))
    first, second = cursor.read(4096), cursor.read(4096)
    assert isinstance(first, Wait)
    assert isinstance(second, Wait)
    cursor.write(f"{command}\n".encode())
    assert woken == [got != b"a5"]  # then the two reads have all
    if got is None:
        assert not first.settled
        assert cursor.read(4096).startswith(b"sequence")
        full.write("a", b"a7")
        assert first.result() == b"a7"
        return
    assert first.result() == got
    assert second.result() == {b"a1": b"b2", b"a5": b"b6"}.get(got, b"")


def test_a_selection_holds_for_a_read_that_waits(full: Hand) -> None:
    cursor = full.cursor("select a", "until end", "until 1000")
    assert drain(cursor) == [b"a1", b"a3", b"a5"]
    waiting = cursor.read(4096)
    assert isinstance(waiting, Wait)
    cursor.write(b"select b\nseek 2\n")
    assert waiting.result() == b"b2"
    assert drain(cursor) == [b"b4", b"b6"]


def test_seek_time_finds_the_first_at_or_after(full: Hand) -> None:
    at = full.clock.wall / SECOND
    assert drain(full.cursor(f"seek @{at - 1:.3f}")) == [b"a5", b"b6"]
    assert drain(full.cursor(f"seek @{at - 1.5:.3f}")) == [b"a5", b"b6"]
    assert drain(full.cursor(f"seek @{int(at) + 5}")) == []


def test_select_and_until(full: Hand) -> None:
    assert drain(full.cursor("seek first", "select b", "until end")) == [b"b2", b"b4", b"b6"]
    assert drain(full.cursor("select a", "seek -2", "until 3")) == [b"a3"]
    cursor = full.cursor("seek first", "until 2")
    assert drain(cursor) == [b"a1", b"b2"]
    full.write("a", b"later")
    assert cursor.read(64) == b"", "end-of-file until the next seek or until"
    cursor.write(b"until 3\n")
    assert drain(cursor) == [b"a3"]


def test_it_begins_at_the_replay_position(full: Hand) -> None:
    assert drain(full.cursor())[0] == b"a1"
    full.ctl("replay last")
    assert drain(full.cursor())[0] == b"b6"
    full.ctl("replay off")
    assert drain(full.cursor()) == []


def test_formats(hand: Hand) -> None:
    hand.stream("s")
    hand.write("s", b"plain", b"line\n", b"\xff")
    assert drain(hand.cursor("seek first", "format line")) == [b"plain\n", b"line\n", b"\xff\n"]
    assert drain(hand.cursor("seek first", "format nul")) == [b"plain\0", b"line\n\0", b"\xff\0"]
    cursor = hand.cursor("seek first", "format each")
    assert [cursor.read(64) for _ in range(4)] == [b"plain", b"", b"line\n", b""]
    rows = [json.loads(line) for line in drain(hand.cursor("seek first", "format json"))]
    assert [row["sequence"] for row in rows] == [1, 2, 3]
    assert {row["stream"] for row in rows} == {"s"}
    assert rows[0]["time"] == hand.clock.wall / SECOND
    assert [row.get("body") for row in rows] == ["plain", "line\n", None]
    assert rows[2]["body_base64"] == "/w=="


def test_record_is_the_log_behind_a_table_of_names(full: Hand) -> None:
    cursor = full.cursor("seek first", "format record", "until end")
    data = b"".join(drain(cursor))
    kinds, at = [], 0
    while at < len(data):
        size, _, sequence, _, _, kind, _, _ = HEAD.unpack_from(data, at)
        kinds.append((kind, sequence, bytes(data[at + HEAD.size : at + size])))
        at += size + -size % 8
    assert kinds[0][0] == Kind.NAMES
    assert [body for kind, _, body in kinds if kind == Kind.MESSAGE] == [b"a1", b"b2", b"a3", b"b4", b"a5", b"b6"]


def test_record_gives_as_many_whole_records_as_fit(full: Hand) -> None:
    cursor = full.cursor("seek first", "format record", "until end")
    first = cursor.read(120)
    assert len(first) <= 120
    assert len(cursor.read(90)) == 80, "two of forty bytes"


def test_info(full: Hand) -> None:
    cursor = full.cursor("seek 2")
    with pytest.raises(BadCommand, match="no message"):
        cursor.write(b"info\n")
    assert b"no message" in cursor.read(4096)
    cursor.read(64)
    cursor.write(b"info\n")
    lines = cursor.read(4096).decode()
    assert lines.startswith("sequence 2\nstream b\ntime ")
    assert lines.endswith("\n\n")
    assert cursor.read(64) == b"a3"


@pytest.mark.parametrize(
    "line",
    ["seek", "seek nowhere", "seek 1 2", "seek --3", "until x", "format xml", "select nobody", "jump 3", "info 1"],
)
def test_bad_commands(full: Hand, line: str) -> None:
    cursor = full.cursor("seek 2")
    with pytest.raises((BadCommand, NotFound)) as refused:
        cursor.write(f"seek end\n{line}\n".encode())
    assert cursor.read(4096).decode() == f"{refused.value}\n"
    assert cursor.read(64) == b"b2", "nothing of the write was done"


def test_only_what_the_opener_may_read_is_shown(full: Hand) -> None:
    full.tree.setattr(ROOT, full.group.streams["a"], mode=0o600)
    assert drain(full.cursor("seek first", user=ANNA)) == [b"b2", b"b4", b"b6"]
    with pytest.raises(Denied):
        full.cursor("select a", user=ANNA)
    cursor = full.cursor("seek first", user=ANNA)
    full.tree.setattr(ROOT, full.group.streams["b"], mode=0o600)
    assert drain(cursor) == []


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY])
def test_it_is_opened_for_reading_and_writing(hand: Hand, flags: int) -> None:
    with pytest.raises(Denied):
        hand.open(".cursor", flags)


def test_a_wait_is_answered_by_the_next_message_it_selects(full: Hand) -> None:
    cursor = full.cursor("seek end", "select b")
    step = cursor.read(64)
    full.write("a", b"no")
    assert not step.settled
    full.write("b", b"yes")
    assert step.result() == b"yes"


def test_a_cut_is_told_once(full: Hand) -> None:
    cursor = full.cursor("seek first")
    full.ctl("depth 1")
    full.write("a", b"a7")
    with pytest.raises(FellBehind):
        cursor.read(64)
    assert drain(cursor) == [b"b6", b"a7"]


def test_a_cut_of_streams_selected_only_now_is_told(full: Hand) -> None:
    cursor = full.cursor("seek first", "select a")
    full.ctl("clear b")
    assert cursor.read(4096) == b"a1"
    cursor.write(b"select b\n")
    with pytest.raises(FellBehind):
        cursor.read(4096)


def test_select_takes_views_and_patterns(full: Hand) -> None:
    full.stream("a.x.y")
    full.ctl("bind ab a\nbind ab b")
    full.write("a.x.y", b"axy")
    assert drain(full.cursor("select #.y", "seek first")) == [b"axy"]
    assert drain(full.cursor("select ab", "seek first")) == [b"a1", b"b2", b"a3", b"b4", b"a5", b"b6"]
    assert drain(full.cursor("select b a.*.y", "seek first")) == [b"b2", b"b4", b"b6", b"axy"]


def test_a_slow_cursor_holds_back_only_a_little() -> None:
    hand = Hand("replay off")
    hand.stream("s")
    cursor = hand.cursor("seek end")
    hand.write("s", *[b"%d" % i for i in range(3000)])
    hand.group.retention.trim(always=True)
    with pytest.raises(FellBehind):
        cursor.read(64)
    assert drain(cursor)[-1] == b"2999"


def test_a_cursor_far_behind_that_lost_nothing_is_told_nothing() -> None:
    hand = Hand("replay last")
    hand.stream("slow")
    hand.stream("quick")
    hand.write("slow", b"old")
    hand.write("quick", *[b"%d" % i for i in range(3000)])
    cursor = hand.cursor("seek first")
    hand.group.retention.trim(always=True)
    assert drain(cursor) == [b"old", b"2999"]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["raw", "line", "json", "record"])
@pytest.mark.parametrize("every", [0, 3])
@pytest.mark.parametrize("command", ["", "select a", "select"])
def test_under_replay_off_each_message_is_read_or_told_to_be_lost(form: str, every: int, command: str) -> None:
    """A reader slower than the writers: up to the slack all waits for it, and what does not is counted."""
    hand = Hand("replay off")
    for name in ("a", "b"):
        hand.stream(name)
    cursor = hand.cursor(command, f"format {form}")
    writers = [hand.open(name, os.O_WRONLY) for name in ("a", "b")]
    got, lost = 0, 0

    def read() -> bool:
        nonlocal got, lost
        try:
            data = cursor.read(4096)
        except FellBehind as error:
            lost += int(error.detail.split()[0])
            return True
        if isinstance(data, Wait):
            return not data.cancel()
        got += data.count(b"body<")
        return True

    for number in range(6000):
        writers[number % 2].write(b"body<" + b"." * 59)
        if number % 1000 == 999:
            hand.tree.tick()
        if every and number % every == 0:
            read()
    while read():
        pass
    assert got + lost == (3000 if command == "select a" else 6000)
    assert lost == hand.group.counts.lost
    assert lost > 0 or every
    assert got >= limits.CURSOR_SLACK_MESSAGES // 2


def test_end_marks_are_no_lost_messages() -> None:
    """A `replay off` group, whose cursor is behind by more than the slack."""
    hand = Hand("replay off")
    hand.stream("s")
    cursor = hand.cursor("select s", "seek end")
    for number in range(1_500):
        hand.write("s", b"" if number % 3 else b"%d" % number)
    hand.group.retention.trim(always=True)
    with pytest.raises(FellBehind) as caught:
        cursor.read(4096)
    lost, got = int(caught.value.detail.split()[0]), len([body for body in drain(cursor) if body])
    assert lost + got == 500
    assert lost > 100


def test_what_a_reader_waited_for_does_not_hide_a_loss() -> None:
    """It was given to it at once, and never in the log; what is cut later is counted all the same."""
    hand = Hand("replay off", "depth 2")
    hand.stream("s")
    reader = hand.open("s")
    for number in range(3):
        step = reader.read(4096)
        assert isinstance(step, Wait)
        hand.write("s", b"%d" % number)
        assert step.result() == b"%d" % number
    hand.write("s", *(b"more %d" % number for number in range(5)))
    with pytest.raises(FellBehind, match="3 messages of s were lost"):
        reader.read(4096)
    assert json.loads(hand.text(".stats"))["lost"] == 3


def test_a_log_is_plain_again_when_what_was_special_is_below_the_floor() -> None:
    hand = Hand("replay all", "depth 2")
    hand.stream("s")

    def is_plain() -> bool:
        return bool(json.loads(hand.text(".stats"))["plain"])

    hand.write(".put", b'{"stream": "s", "priority": 3}\nurgent')
    assert not is_plain()
    hand.write("s", b"1", b"2")
    assert is_plain()
    hand.ctl(f"drop s {hand.group.log.end.next - 1}")
    assert not is_plain()
    hand.write("s", b"3", b"4", b"5")
    assert is_plain()


@pytest.mark.parametrize(
    "lines",
    ["seek first", "seek -3", "cover b\nseek first", "cover b nothing\nseek -3", "select view a\nseek last"],
)
@pytest.mark.parametrize("settings", ["replay all", "replay all\ndepth 9", "replay all\nttl 1h"])
def test_other_streams_cost_a_cursor_nothing(lines: str, settings: str) -> None:
    """A cursor of root, over one stream or all: neither its open nor its seek looks at each."""
    costs = []
    for count in (100, 2_000):
        hand = Hand(settings, "bind view b")
        for name in ("a", "b", *(f"t{number}" for number in range(count))):
            hand.stream(name)
        for name in "abab":
            hand.write(name, b"x")

        def act(hand: Hand = hand) -> None:
            cursor = hand.cursor(*lines.split("\n"))
            assert cursor.read(100) == b"x"
            cursor.close()

        costs.append(calls_once(act))
    assert costs[1] < costs[0] + 100


@pytest.mark.parametrize("count", range(1, 8))
@pytest.mark.parametrize("form", ["raw", "record"])
def test_near_and_far_seeks_back_lead_to_the_same(count: int, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stands between: end marks, what is for one taker, what was dropped, what its user may not read."""
    hand = Hand("replay all")
    for number in range(20):
        hand.stream(f"t{number}", mode=0o600 if number % 3 else 0o666)
    for number in range(12):
        hand.write(f"t{number}", b"x")
        hand.ctl(f"eof t{number}")
    hand.ctl("drop t9 19")
    hand.open(".put", os.O_WRONLY).write(b'{"stream":"t6","single":true} x')
    found = set()
    for most in (limits.PASSED_MESSAGES, 0):
        monkeypatch.setattr(limits, "PASSED_MESSAGES", most)
        for user in (ROOT, ANNA):
            cursor = hand.cursor(f"format {form}", f"seek -{count}", user=user)
            found.add((user, cursor.position))
    assert len(found) == 2


@pytest.mark.parametrize("settings", ["replay all\ndepth 2", "replay last", "replay off"])
def test_near_and_far_seeks_to_the_first_lead_to_the_same(settings: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stands before: what `depth` cut, what was dropped, what its stream was removed with."""
    hand = Hand(settings)
    for name in "abc":
        hand.stream(name)
    found = [hand.cursor("seek first").position]
    holder = hand.cursor("select b")
    hand.write("a", b"1")
    hand.write("c", b"2")
    for _ in range(5):
        hand.write("b", b"3")
    hand.tree.unlink(ROOT, hand.group, "c")
    for change in ((), ("clear a",), ("drop b 6",), ("eof a",), ("clear b",)):
        hand.ctl(*change)
        near = hand.cursor("seek first").position
        with monkeypatch.context() as patch:
            patch.setattr(limits, "PASSED_MESSAGES", 0)
            assert hand.cursor("seek first").position == near
        found.append(near)
    assert len(set(found)) > 2
    holder.close()
