"""`data line` with `full block`: a refused write leaves nothing, an accepted one loses nothing."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest

from mqfs.engine.files.stream import LinePost
from mqfs.errors import Interrupted, NotFound, StreamFull
from mqfs.model import Wait
from tests.support.hand import ROOT, Hand


def blocked() -> tuple[Hand, Any, list[Any]]:
    """A writer whose first unfinished line was accepted, and two writes that wait for room."""
    hand = Hand("replay all", "data line", "full block", "depth 1")
    hand.stream()
    hand.write("s", b"there\n")
    writer = hand.open("s", os.O_WRONLY)
    assert writer.write(b"a") == 1
    steps = [writer.write(data) for data in (b"b\nX", b"c\nY")]
    assert all(isinstance(step, Wait) for step in steps)
    return hand, writer, steps


@pytest.mark.parametrize("first", [0, 1])
def test_a_cancelled_write_leaves_the_line_as_it_was(first: int) -> None:
    hand, writer, steps = blocked()
    assert steps[first].cancel()
    hand.ctl("clear s")
    assert [step.settled for step in steps] == [first == 1, first == 0]
    writer.close()
    hand.ctl("depth 0")
    want = {0: b"ac\nY", 1: b"ab\nX"}[first]
    assert hand.tree.open(ROOT, hand.tree.find(ROOT, "g/.kept/s"), os.O_RDONLY).read(99) == want


def test_full_reject_refuses_all_of_what_waits() -> None:
    hand, writer, steps = blocked()
    hand.ctl("full reject")
    for step in steps:
        with pytest.raises(StreamFull):
            step.result()
    hand.ctl("depth 0")
    writer.write(b"!\n")
    assert hand.tree.open(ROOT, hand.tree.find(ROOT, "g/.kept/s"), os.O_RDONLY).read(99) == b"there\na!\n"


def test_a_removed_stream_and_the_end_of_the_server() -> None:
    hand, writer, steps = blocked()
    hand.tree.unlink(ROOT, hand.group, "s")
    for step in steps:
        with pytest.raises(NotFound):
            step.result()
    assert writer.partial == b"a"
    hand, writer, steps = blocked()
    hand.ctl("depth 2")
    assert steps[0].result() == 3
    hand.tree.close()
    with pytest.raises(Interrupted):
        steps[1].result()
    assert writer.partial == b"X"


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["off", "always"])
def test_a_handle_keeps_nothing_of_lines_that_were_written(sync: str) -> None:
    def posts() -> int:
        return sum(isinstance(thing, LinePost) for thing in gc.get_objects())

    hand = Hand("replay all", "data line", f"sync {sync}")
    hand.stream()
    writer = hand.open("s", os.O_WRONLY)
    gc.collect()
    before = posts()
    gc.disable()
    try:
        for _ in range(3):
            writer.write(b"line\nrest")
        assert posts() == before
    finally:
        gc.enable()
