"""What a write to `ctl` takes from many streams goes in portions: all of it or none, whatever is done meanwhile."""

from __future__ import annotations

import logging
import os
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from mqfs import errors, limits
from mqfs.model import Wait
from mqfs.net.audit import Audit
from tests.support.clock import HastyClock
from tests.support.hand import ROOT
from tests.support.queues import Queues, read, say

STREAMS = [f"t{number}" for number in range(40)]


@pytest.fixture
def queues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Queues:
    """Each of whose streams keeps two messages, in small segments."""
    monkeypatch.setattr(limits, "SEGMENT_BYTES", 16_384)
    monkeypatch.setattr(limits, "SEGMENT_FIRST_BYTES", 4_096)
    queues = Queues("replay all", path=tmp_path / "store", clock=HastyClock())
    for name in STREAMS:
        queues.stream(name)
        queues.write(name, b"1", b"2")
    return queues


def begin(queues: Queues, *lines: str) -> Wait[int]:
    handle = queues.open("ctl", os.O_WRONLY)
    queues.clock.hasty = True
    step = handle.write("".join(f"{line}\n" for line in lines).encode())
    assert isinstance(step, Wait)
    return step


def rounds(queues: Queues, count: int) -> None:
    for _ in range(count):
        queues.tree.run_timers()


def finish(queues: Queues, step: Wait[Any]) -> int:
    """How many portions it takes."""
    for count in range(1_000):
        if step.settled:
            queues.clock.hasty = False
            return count
        rounds(queues, 1)
    raise AssertionError("it does not end")


def left(queues: Queues) -> list[str]:
    """The streams that keep something."""
    queues.clock.hasty = False
    return [name for name in STREAMS if queues.shows(f".kept/{name}")]


def parts(queues: Queues, lines: tuple[str, ...]) -> int:
    step = begin(queues, *lines)
    return finish(queues, step)


@pytest.mark.parametrize("at", range(14))
@pytest.mark.parametrize("clean", [False, True])
def test_all_are_cleared_or_none(queues: Queues, at: int, clean: bool) -> None:
    """Whenever the server ends; a kill leaves what the log has."""
    begin(queues, "clear")
    rounds(queues, at)
    queues.clock.hasty = False
    queues.restart(clean=clean)
    assert left(queues) in ([], STREAMS)


def test_a_clear_is_in_the_log_before_any_stream_is_cleared(queues: Queues) -> None:
    step = begin(queues, "clear")
    seen = set()
    while not step.settled:
        floors = [queues.group.streams[name].state.floor for name in STREAMS]
        seen.add(sum(map(bool, floors)))
        rounds(queues, 1)
    assert len(seen) > 3, "it is not done in portions"
    assert left(queues) == []
    assert queues.group.streams["t3"].kept.count == queues.group.streams["t3"].kept.size == 0


def test_what_is_written_while_all_is_cleared_stays(queues: Queues) -> None:
    for at in range(0, 12, 3):
        step = begin(queues, "clear")
        rounds(queues, at)
        queues.clock.hasty = False
        for name in STREAMS:
            queues.write(name, b"new")
        queues.clock.hasty = True
        finish(queues, step)
        for name in STREAMS:
            assert queues.shows(f".kept/{name}") == [b"new"]
            assert (queues.row(name)["messages"], queues.row(name)["bytes"]) == (1, 3)
        queues.restart(clean=False)
        assert queues.shows(".kept/t5") == [b"new"]


def test_who_had_not_read_what_is_cleared_is_told(queues: Queues) -> None:
    late, order = queues.at("t1"), queues.at("order")
    finish(queues, begin(queues, "clear"))
    for reader in (late, order):
        with pytest.raises(errors.FellBehind):
            reader.read(100)


def test_a_state_written_meanwhile_has_all_of_it(queues: Queues) -> None:
    """A new segment begins with the state."""
    step = begin(queues, "clear")
    while not any(queues.group.streams[name].state.floor for name in STREAMS):
        rounds(queues, 1)
    assert not all(queues.group.streams[name].state.floor for name in STREAMS)
    queues.clock.hasty = False
    queues.write("s", *[b"x" * 1_000] * 20)
    assert all(queues.group.streams[name].state.floor for name in STREAMS)
    queues.clock.hasty = True
    finish(queues, step)
    queues.restart(clean=False)
    assert left(queues) == []


def test_it_is_done_whatever_its_client_does(queues: Queues) -> None:
    """It cannot be cancelled, as that would make a write with O_NONBLOCK fail each time; its file may be closed."""
    handle = queues.open("ctl", os.O_WRONLY)
    queues.clock.hasty = True
    handle.write(b"clear")
    step = handle.write(b"\nretries 7")
    assert isinstance(step, Wait)
    rounds(queues, 2)
    assert not step.cancel()
    handle.close()
    finish(queues, step)
    assert step.result() == len("\nretries 7")
    queues.clock.forward(1)
    rounds(queues, 1)
    assert left(queues) == []
    assert "retries 7\n" in queues.text("ctl")
    assert queues.tree.memory.used == 0


def test_writes_are_carried_out_in_their_order(queues: Queues) -> None:
    """Also those of other files, and those that are refused."""
    first, other = (queues.open("ctl", os.O_WRONLY) for _ in range(2))
    queues.clock.hasty = True
    steps = [
        first.write(b"bind view t1\nclear\n"),
        first.write(b"consumer mail view\n"),
        other.write(b"protect on\n"),
        first.write(b"clear\n"),
        other.write(b"remove mail\nprotect off\n"),
    ]
    assert all(isinstance(step, Wait) for step in steps)
    for step in steps:
        finish(queues, step)
        queues.clock.hasty = True
    for step in steps[:3]:
        step.result()
    for step in steps[3:]:
        with pytest.raises(errors.NotPermitted):
            step.result()
    queues.clock.hasty = False
    assert "protect on\nsender off\nwords . * '#'\nbind view t1\nconsumer mail view\n" in queues.text("ctl")
    assert queues.tree.memory.used == 0


@pytest.mark.parametrize("rest", [b"", b"retries 6"])
def test_a_refused_write_takes_its_own_unfinished_line_only(queues: Queues, rest: bytes) -> None:
    handle = queues.open("ctl", os.O_WRONLY)
    queues.clock.hasty = True
    step = handle.write(b"clear\n" * 40 + b"remove none\n" + rest)
    later = b"" if rest else b"retries"
    if later:
        assert handle.write(later) == len(later)
    finish(queues, step)
    with pytest.raises(errors.NotFound):
        step.result()
    assert handle.partial == later
    if later:
        assert handle.write(b" 7\n") == 3
        assert queues.group.settings.retries == 7


def test_writes_that_wait_are_their_users_memory(queues: Queues, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HELD_BYTES", 2_000)
    step = begin(queues, "clear")
    with pytest.raises(errors.OverLimit):
        queues.open("ctl", os.O_WRONLY).write(b"#" * 1_200 + b"\n")
    finish(queues, step)
    assert queues.open("ctl", os.O_WRONLY).write(b"#" * 1_200 + b"\n") == 1_201
    assert len(queues.errors()) == 1


def test_short_writes_that_wait_count_as_what_they_take(queues: Queues) -> None:
    """20,000 of one byte took 10 MB, and counted as 20,000 bytes."""
    step, handle = begin(queues, "clear"), queues.open("ctl", os.O_WRONLY)
    used, begun = queues.tree.memory.used, tracemalloc.is_tracing()
    tracemalloc.start()
    taken = tracemalloc.get_traced_memory()[0]
    steps = [handle.write(b"\n") for _ in range(2_000)]
    taken = tracemalloc.get_traced_memory()[0] - taken
    if not begun:
        tracemalloc.stop()
    assert taken / 2 < queues.tree.memory.used - used < 2 * taken
    finish(queues, step)
    queues.clock.forward(1)
    rounds(queues, 1)
    assert all(step.result() == 1 for step in steps)
    assert queues.tree.memory.used == 0


def remove(queues: Queues) -> None:
    queues.tree.unlink(ROOT, queues.group, "t30")


def test_what_is_no_longer_allowed_is_refused(queues: Queues) -> None:
    step = begin(queues, "bind view t1", "clear")
    rounds(queues, 2)
    queues.clock.hasty = False
    queues.stream("view")
    queues.clock.hasty = True
    finish(queues, step)
    with pytest.raises(errors.Exists):
        step.result()
    assert left(queues) == STREAMS
    assert len(queues.errors()) == 1


def test_streams_may_go_meanwhile(queues: Queues) -> None:
    step = begin(queues, "clear", "retries 7")
    rounds(queues, 2)
    queues.clock.hasty = False
    remove(queues)
    queues.clock.hasty = True
    finish(queues, step)
    assert step.result() == len("clear\nretries 7\n")
    assert "retries 7\n" in queues.text("ctl")
    assert queues.shows(".kept/t5") == []


def test_what_old_settings_did_not_keep_does_not_come_back(queues: Queues) -> None:
    queues.ctl("replay off")
    assert finish(queues, begin(queues, "replay all")) > 3
    queues.restart(clean=False)
    assert left(queues) == []


@pytest.mark.parametrize("at", [0, 1, 4, 20])
def test_a_new_depth_cuts_all_streams(queues: Queues, at: int) -> None:
    step = begin(queues, "depth 1")
    rounds(queues, at)
    queues.clock.hasty = False
    for name in STREAMS[::3]:
        queues.write(name, b"3")
    queues.clock.hasty = True
    finish(queues, step)
    expected = [[b"3" if name in STREAMS[::3] else b"2"] for name in STREAMS]
    assert [queues.shows(f".kept/{name}") for name in STREAMS] == expected
    queues.restart(clean=False)
    assert [queues.shows(f".kept/{name}") for name in STREAMS] == expected


@pytest.mark.parametrize("line", ["clear", "depth 5"])
@pytest.mark.parametrize("at", range(14))
def test_what_goes_by_itself_meanwhile_is_lost_once(queues: Queues, line: str, at: int) -> None:
    """By the `depth` that holds before the write does."""
    queues.ctl("full drop-old", "depth 10")
    queues.write("s", *[b"x"] * 10)
    reader = queues.at("s")
    step = begin(queues, line)
    rounds(queues, at)
    queues.clock.hasty = False
    queues.write("s", *[b"y"] * 6)
    queues.clock.hasty = True
    finish(queues, step)
    lost = 16 - len(b"".join(queues.shows(".kept/s")))
    with pytest.raises(errors.FellBehind, match=f"^{lost} messages of s were lost"):
        reader.read(100)
    if line != "clear":
        assert queues.group.counts.cut == lost


def test_a_group_that_is_removed_answers(queues: Queues) -> None:
    step = begin(queues, "retries 4", "clear")
    queues.clock.hasty = False
    for name in (*STREAMS, "s"):
        queues.tree.unlink(ROOT, queues.group, name)
    queues.tree.rmdir(ROOT, queues.tree.root, "g")
    with pytest.raises(errors.NotFound):
        step.result()


@pytest.mark.parametrize("more", [0, 1, 3, 9])
def test_a_write_in_force_is_answered_by_a_server_that_stops(
    queues: Queues, more: int, caplog: pytest.LogCaptureFixture
) -> None:
    """When it has done all that it does; what has not begun is interrupted."""
    queues.ctl("full drop-old", "depth 2")
    queues.tree.audit, before = Audit("changes"), queues.group.commands.count
    caplog.set_level(logging.INFO, "mqfs.audit")
    step, later = begin(queues, "depth 1", *["retries 7"] * 400), begin(queues, "retries 8")
    while queues.group.commands.count == before:
        rounds(queues, 1)
    rounds(queues, more)
    assert not step.settled
    queues.clock.hasty = False
    queues.tree.close()
    assert step.result() == len("depth 1\n" + "retries 7\n" * 400)
    assert len(caplog.messages) == 401
    with pytest.raises(errors.Interrupted):
        later.result()
    assert queues.group.settings.retries == 7
    assert all(stream.kept.count == 1 for stream in queues.group.streams.values() if stream.name in STREAMS)
    assert queues.tree.memory.used == 0


@pytest.mark.parametrize("how", ["drop", "ttl"])
def test_a_reader_had_none_of_what_it_passed_over(how: str) -> None:
    """So that does not lessen its loss."""
    queues = Queues("replay all", "depth 10")
    reader, first = queues.at("s"), queues.group.log.end.next
    for number in range(6):
        queues.put(b"gone", ttl="5s" if how == "ttl" else "1h")
        if how == "drop":
            queues.ctl(f"drop s {first + number}")
    queues.pass_time(6)
    queues.write("s", b"had", b"lost")
    assert reader.read(100) == b"had"
    queues.write("s", *[b"lost"] * 6, *[b"kept"] * 10)
    with pytest.raises(errors.FellBehind, match="7 messages of s were lost"):
        reader.read(100)
    assert reader.read(100) == b"kept"


def cost_of_drops(lines: int) -> float:
    """Seconds of a write that drops 4,000 messages in that many lines."""
    costs = []
    for _ in range(3):
        queues = Queues("replay all")
        queues.write("s", *[b"x"] * 4_000)
        first, each = queues.group.streams["s"].kept.first_kept(), 4_000 // lines
        numbers = [" ".join(str(first + at + number) for number in range(each)) for at in range(0, 4_000, each)]
        begun = time.thread_time()
        queues.ctl(*(f"drop s {some}" for some in numbers))
        costs.append(time.thread_time() - begun)
        assert queues.row()["messages"] == 0
    return min(costs)


def test_dropping_the_last_message_brings_none_back(tmp_path: Path) -> None:
    """Under `replay last` the one before it was seen again, where the stream was not looked at in between."""
    queues = Queues("replay last", path=tmp_path / "store")
    queues.put(b"1")
    queues.put(b"2")
    reader = queues.at("s")
    assert reader.read(10) == b"2"
    last = queues.put(b"3")
    assert reader.read(10, 1) == b"3"
    queues.ctl(f"drop s {last}")
    assert isinstance(queues.at("s").read(10), Wait)


def test_drops_of_a_stream_are_put_in_force_together() -> None:
    """Each line had all that were dropped counted again."""
    assert cost_of_drops(40) < 2 * cost_of_drops(1)


def test_what_was_acked_before_a_reader_opened_is_not_lost_to_it() -> None:
    queues = Queues("depth 20", "consumer w")
    worker = queues.worker()
    queues.write("s", *[b"early"] * 6)
    for _ in range(6):
        read(worker)
    for sequence in (2, 3, 4):
        say(worker, f"ack {sequence}")
    assert queues.row()["messages"] == 3
    queues.ctl("replay last")
    reader = queues.at("s")
    queues.write("s", *[b"y"] * 30)
    with pytest.raises(errors.FellBehind, match="11 messages of s were lost"):  # the last early one, and ten
        reader.read(100)
