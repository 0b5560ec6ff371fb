"""Long work that only looks is done in portions: what it gives is the same, and what it looks at may go meanwhile."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from mqfs import errors
from mqfs.engine.files.text import TextHandle
from mqfs.engine.log.portions import Work, in_order
from mqfs.engine.tree.listing import Listing
from mqfs.wait import Wait
from tests.support.clock import HastyClock
from tests.support.hand import ROOT
from tests.support.queues import Queues

NAMES = [f"t{number * 7_919 % 10_000}" for number in range(10_000)]


def group_of(*names: str) -> tuple[Queues, HastyClock]:
    clock = HastyClock()
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


def test_a_server_that_stops_does_not_say_that_a_group_is_gone() -> None:
    """A bridge ended by that: it repeats what is interrupted only."""
    queues, clock = group_of()
    clock.hasty = True
    step = queues.open(".stats").read(100)
    assert isinstance(step, Wait)
    queues.tree.close()
    with pytest.raises(errors.Interrupted):
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


def searching() -> tuple[Queues, HastyClock, Any]:
    """A cursor for what is rare: 12,000 messages, then one that it selects."""
    queues, clock = group_of()
    queues.write("s", *[b"no"] * 12_000, b"yes")
    cursor = queues.open(".cursor", os.O_RDWR)
    cursor.write(b'select program prefix:"" payload_contains("yes")\nseek first\n')
    clock.hasty = True
    return queues, clock, cursor


def test_a_cursor_passes_over_messages_in_portions() -> None:
    queues, _, cursor = searching()
    step = cursor.read(100)
    assert finish(queues, step) > 10
    assert step.result() == b"yes"
    step = cursor.read(100)
    assert isinstance(step, Wait)
    assert cursor.searches.step is None  # there is nothing more to look through
    queues.write("s", b"no", b"yes, too")
    assert step.result() == b"yes, too"


def test_what_a_search_does_not_find_is_waited_for() -> None:
    queues, _, cursor = searching()
    cursor.write(b'select program prefix:"" payload_contains("late")\n')
    step = cursor.read(100)
    queues.tree.run_timers()
    assert cursor.searches.step is not None
    queues.write("s", b"late")
    finish(queues, step)
    assert step.result() == b"late"
    cursor.write(b"seek first\nuntil 12000\n")
    step = cursor.read(100)
    finish(queues, step)
    assert step.result() == b""


def test_a_search_can_be_given_up_and_begun_again() -> None:
    queues, _, cursor = searching()
    for _ in range(3):
        step = cursor.read(100)
        queues.tree.run_timers()
        assert step.cancel()
        assert cursor.searches.step is None
    first, second = cursor.read(100), cursor.read(100)
    finish(queues, first)
    assert first.result() == b"yes"
    queues.write("s", b"yes, too")
    finish(queues, second)
    assert second.result() == b"yes, too"


@pytest.mark.parametrize("form", ["raw", "each", "record"])
def test_reads_are_served_in_the_order_in_which_they_came(form: str) -> None:
    """Some while others search, each for what is between 600 messages that are passed over, with rests of each."""
    queues, clock = group_of()
    for number in range(20):
        queues.write("s", *[b"no"] * 600, b"yes %d" % number)
    cursor = queues.open(".cursor", os.O_RDWR)
    commands = f'select program prefix:"" payload_contains("yes")\nformat {form}\nseek first\n'.encode()
    cursor.write(commands)
    whole = b""
    while isinstance(data := cursor.read(1_000), bytes):
        whole += data
    assert whole.count(b"yes") == 20
    cursor.close()
    cursor = queues.open(".cursor", os.O_RDWR)
    cursor.write(commands)
    clock.hasty = True
    steps: list[Any] = []
    for number in range(200):
        steps.append(cursor.read(1 + number % 50))
        if number % 3 == 0:
            queues.tree.run_timers()
    while cursor.searches.reads:
        queues.tree.run_timers()
    done = [step for step in steps if not isinstance(step, Wait) or step.settled]
    assert done == steps[: len(done)]  # only the last ones still wait
    assert b"".join(step.result() if isinstance(step, Wait) else step for step in done) == whole


@pytest.mark.parametrize("how", ["close", "rmdir", "stop"])
def test_a_search_ends_with_its_file(how: str) -> None:
    queues, _, cursor = searching()
    step = cursor.read(100)
    queues.tree.run_timers()
    if how == "close":
        cursor.close()
    elif how == "stop":
        queues.tree.close()
    else:
        queues.tree.unlink(ROOT, queues.group, "s")
        queues.tree.rmdir(ROOT, queues.tree.root, "g")
    assert step.result() == b""


def test_a_directory_is_read_in_portions() -> None:
    queues, clock = group_of(*NAMES[:600])
    listing = Listing(queues.tree, ROOT, queues.group, 0)
    assert listing.begin() is None
    whole = [node.name for node in listing.nodes]
    assert whole == sorted(whole)
    clock.hasty = True
    step = listing.begin()
    assert isinstance(step, Wait)
    queues.stream("new")
    assert [node.name for node in listing.nodes] == whole
    assert finish(queues, step) > 1
    assert [node.name for node in listing.nodes] in (whole, sorted([*whole, "new"]))
    step = listing.begin()
    listing.close()
    assert isinstance(step, Wait)
    finish(queues, step)
    assert not queues.tree.memory.used


def test_sorted_in_steps() -> None:
    work = in_order(NAMES)
    found, steps = None, 0
    while found is None:
        try:
            next(work)
            steps += 1
        except StopIteration as end:
            found = end.value
    assert found == sorted(NAMES)
    assert steps > 4
