"""Long work that only looks is done in portions: what it gives is the same, and what it looks at may go meanwhile."""

from __future__ import annotations

import json
import os

import pytest

from mqfs import errors
from mqfs.engine.files.text import TextHandle
from mqfs.engine.log.portions import Work, in_order
from mqfs.wait import Wait
from tests.support.clock import ManualClock
from tests.support.hand import ROOT
from tests.support.queues import Queues

NAMES = [f"t{number * 7_919 % 5_000}" for number in range(5_000)]


class Hasty(ManualClock):
    """Whenever it is looked at, a portion is over: while `hasty`."""

    hasty = False

    def engine_ns(self) -> int:
        if self.hasty:
            self.forward(0.001)
        return super().engine_ns()


def group_of(*names: str) -> tuple[Queues, Hasty]:
    clock = Hasty()
    queues = Queues("replay all", clock=clock)
    for name in names:
        queues.stream(name)
    return queues, clock


def finish(queues: Queues, wait: Wait[bytes]) -> int:
    """Ring the alarm until it is there. How often."""
    for count in range(100_000):
        if wait.settled:
            return count
        queues.tree.run_timers()
    raise AssertionError("it does not end")


def test_stats_are_as_in_one_piece() -> None:
    queues, clock = group_of(*NAMES[:40])
    queues.ctl("bind view t1", "consumer mail s")
    whole = queues.text(".stats")
    assert whole == json.dumps(json.loads(whole), indent=1) + "\n"
    clock.hasty = True
    handle = queues.open(".stats")
    step = handle.read(1 << 20)
    assert isinstance(step, Wait)
    assert handle.size is None
    assert finish(queues, step) > 40
    assert step.result().decode() == whole
    assert handle.size == len(whole)
    assert handle.read(10, 5).decode() == whole[5:15]


def test_what_is_removed_meanwhile_is_not_shown() -> None:
    queues, clock = group_of("a", "z")
    clock.hasty = True
    step = queues.open(".stats").read(1 << 20)
    queues.tree.unlink(ROOT, queues.group, "z")
    assert isinstance(step, Wait)
    finish(queues, step)
    assert list(json.loads(step.result())["streams"]) == ["a", "s"]


def test_an_answer_of_a_cursor_comes_when_it_is_made() -> None:
    queues, clock = group_of(*NAMES[:40])
    cursor = queues.open(".cursor", os.O_RDWR)
    cursor.write(b"streams\n")
    whole = cursor.read(1 << 20)
    clock.hasty = True
    cursor.write(b"streams\n")
    step = cursor.read(1 << 20)
    assert isinstance(step, Wait)
    with pytest.raises(errors.Busy):
        cursor.read(1)
    finish(queues, step)
    assert json.loads(step.result()) == json.loads(whole)
    cursor.write(b"streams\n")
    step = cursor.read(5)
    assert step.cancel()
    clock.hasty = False
    clock.forward(1)
    queues.tree.run_timers()
    assert json.loads(cursor.read(1 << 20)) == json.loads(whole)


def test_two_of_them_go_on_in_turns() -> None:
    queues, clock = group_of(*NAMES[:40])
    clock.hasty = True
    first, second = (queues.open(".stats").read(1 << 20) for _ in range(2))
    rounds = finish(queues, first)
    assert rounds > 40
    assert finish(queues, second) <= 2


def test_closed_files_and_removed_groups_want_no_more() -> None:
    queues, clock = group_of()
    queues.ctl("consumer mail", "consumer other")
    clock.hasty = True
    handle = queues.open(".stats")
    step = handle.read(100)
    handle.close()
    with pytest.raises(errors.Interrupted):
        step.result()
    queues.tree.unlink(ROOT, queues.group, "s")
    step = queues.open(".stats").read(100)
    queues.tree.rmdir(ROOT, queues.tree.root, "g")
    with pytest.raises(errors.NotFound):
        step.result()


@pytest.mark.parametrize("error", [errors.DiskFailed("a"), ValueError("b")])
def test_an_error_is_for_later_reads_too(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Work[str]:
        yield
        yield
        raise error

    monkeypatch.setitem(TextHandle._MAKE, ".stats", fail)
    queues, clock = group_of()
    clock.hasty = True
    handle = queues.open(".stats")
    step = handle.read(100)
    assert isinstance(step, Wait)
    finish(queues, step)
    with pytest.raises(type(error)):
        step.result()
    with pytest.raises(type(error)):
        handle.read(100)


def test_sorted_in_steps() -> None:
    work = in_order(NAMES, str)
    found, steps = None, 0
    while found is None:
        try:
            next(work)
            steps += 1
        except StopIteration as end:
            found = end.value
    assert found == sorted(NAMES)
    assert steps > 5
