"""Long work that only looks is done in portions: what it gives is the same, and what it looks at may go meanwhile."""

from __future__ import annotations

import itertools
import json
import os
import queue
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mqfs import errors, limits
from mqfs.engine.core.portions import Work, in_order
from mqfs.engine.files.status import TEXTS
from mqfs.engine.nodes import Folder
from mqfs.engine.tree.attributes import Listing, set_attributes
from mqfs.engine.tree.tree import Tree
from mqfs.model import Wait
from mqfs.ninep.server.fids import Fid, OpenDirectory
from mqfs.store.store import DiskStore
from tests.support.calls import calls_once
from tests.support.clock import HastyClock
from tests.support.hand import ANNA, ROOT
from tests.support.queues import Queues
from tests.support.temp_store import damage

NAMES = [f"t{number * 7_919 % 10_000}" for number in range(10_000)]


def group_of(*names: str, path: Path | None = None) -> tuple[Queues, HastyClock]:
    clock = HastyClock()
    queues = Queues("replay all", clock=clock, path=path)
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


def test_what_waits_is_counted_at_the_moment_of_its_row() -> None:
    """Between two rows of consumers messages are written and claimed: none has claimed more than there were."""
    queues, clock = group_of()
    for number in range(30):
        queues.consumer(f"c{number}")
    worker = queues.worker("c7")
    clock.hasty = True
    handle = queues.open(".stats")
    step = handle.read(1 << 20)
    assert isinstance(step, Wait)
    written = 0
    while not step.settled:
        clock.hasty = False
        queues.write("s", *[b"x"] * 5)
        for _ in range(5):
            assert not isinstance(worker.read(1 << 20), Wait)
        clock.hasty = True
        written += 5
        queues.tree.run_timers()
    rows = json.loads(step.result())["consumers"]
    assert written > 100
    assert rows["c7"]["waiting"] == 0 < rows["c7"]["claimed"]
    assert all(0 <= row["waiting"] <= written for row in rows.values())


@pytest.mark.parametrize("many", ["streams", "claimed", "delayed"])
def test_however_much_a_consumer_has_its_row_is_made_in_portions(many: str) -> None:
    """In `.stats`: others are served between each few messages or streams of the one row."""
    queues, clock = group_of(*NAMES[: 2_000 if many == "streams" else 0])
    queues.ctl("backoff 1h 1h", "retries 0")
    before, _ = pieces_of_stats(queues, clock)
    queues.consumer("w")
    queues.write("s", *[b"x"] * 2_000)
    if many != "streams":
        worker = queues.worker("w", "format record")
        while len(worker.claims) < 2_000:
            assert not isinstance(worker.read(1 << 20), Wait)
    if many == "delayed":
        worker.write("".join(f"nack {sequence}\n" for sequence in list(worker.claims)).encode())
    pieces, text = pieces_of_stats(queues, clock)
    assert pieces - before > 20
    assert text == queues.text(".stats")
    row = queues.stats("w")
    assert (row["waiting"], row["claimed"], row["delayed"]) == {
        "streams": (2_000, 0, 0), "claimed": (0, 2_000, 0), "delayed": (2_000, 0, 2_000)
    }[many]  # fmt: skip


def pieces_of_stats(queues: Queues, clock: HastyClock) -> tuple[int, str]:
    """In how many pieces `.stats` is made where each look at the clock ends one, and its text."""
    clock.hasty = True
    step = queues.open(".stats").read(1 << 24)
    assert isinstance(step, Wait)
    pieces = finish(queues, step)
    clock.hasty = False
    return pieces, step.result().decode()


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


@pytest.mark.parametrize("error", [errors.DiskFailed("a"), ValueError("b")])
@pytest.mark.parametrize("waits", [False, True])
def test_an_answer_that_cannot_be_made_is_an_error_once(error: Exception, waits: bool) -> None:
    def fail() -> Work[bytes]:
        yield
        yield
        raise error

    queues, clock = group_of()
    cursor = queues.open(".cursor", os.O_RDWR)
    clock.hasty = True
    cursor.respond(fail())
    step = cursor.read(100) if waits else None
    while cursor.making is not None:
        queues.tree.run_timers()
    clock.hasty = False

    def answer() -> object:
        return step.result() if step is not None else cursor.read(100)

    if isinstance(error, errors.MqfsError):
        assert answer() == f"{error.wire_text()}\n".encode()
    else:
        with pytest.raises(ValueError, match="b"):
            answer()
    assert cursor.read(100).cancel()


def with_much_in_ctl() -> tuple[Queues, HastyClock, str]:
    """And what it prints."""
    queues, clock = group_of()
    queues.ctl(*(f"bind v{number} a.{number}" for number in range(40)))
    queues.ctl(*(f"consumer c{number} s" for number in range(40)))
    return queues, clock, queues.text("ctl")


def test_ctl_is_printed_in_portions() -> None:
    """Open for reading only it has a size when it is made; else it is printed by a read of its beginning."""
    queues, clock, whole = with_much_in_ctl()
    clock.hasty = True
    handle = queues.open("ctl")
    step = handle.read(1 << 20)
    assert handle.size is None
    assert finish(queues, step) > 8
    assert step.result().decode() == whole
    assert handle.size == len(whole)
    both = queues.open("ctl", os.O_RDWR)
    step = both.read(100)
    assert not step.cancel(), "with O_NONBLOCK it would begin each time"
    assert finish(queues, step) > 8
    assert (step.result() + both.read(1 << 20, 100)).decode() == whole
    assert both.read(9, len(whole)) == b""


@pytest.mark.parametrize("hasty", [False, True])
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR])
def test_ctl_read_again_shows_how_things_stand_then(flags: int, hasty: bool) -> None:
    queues, clock, whole = with_much_in_ctl()

    def read(handle: Any, count: int, offset: int = 0) -> str:
        clock.hasty = hasty
        step = handle.read(count, offset)
        if isinstance(step, Wait):
            finish(queues, step)
            step = step.result()
        clock.hasty = False
        return str(step.decode())

    handle = queues.open("ctl", flags)
    assert read(handle, 100) + read(handle, 1 << 20, 100) == whole
    for retries in (7, 8):
        queues.ctl(f"retries {retries}")
        now = queues.text("ctl")
        assert read(handle, 1 << 20, 100) == whole[100:]
        assert read(handle, 100) + read(handle, 1 << 20, 100) == now
        whole = now
    handle.close()
    assert not queues.tree.memory.used


@pytest.mark.parametrize("at", range(0, 20, 2))
def test_ctl_has_all_of_a_write_or_nothing(at: int) -> None:
    queues, clock, whole = with_much_in_ctl()
    clock.hasty = True
    step = queues.open("ctl").read(1 << 20)
    for _ in range(at):
        queues.tree.run_timers()
    clock.hasty = False
    queues.ctl("retries 7", "unbind v39", "remove c0", "remove c39", "consumer c40 v38")
    clock.hasty = True
    finish(queues, step)
    clock.hasty = False
    assert step.result().decode() in (whole, queues.text("ctl"))


def test_ctl_is_printed_though_it_changes_all_the_time() -> None:
    queues, clock, whole = with_much_in_ctl()
    texts = {whole}
    clock.hasty = True
    step = queues.open("ctl").read(1 << 20)
    for number in range(1_000):
        if step.settled:
            break
        clock.hasty = False
        queues.ctl(f"retries {number}", f"lease {number}s")
        texts.add(queues.text("ctl"))
        clock.hasty = True
        queues.tree.run_timers()
    assert 20 < number < 999
    assert step.result().decode() in texts


@pytest.mark.parametrize("made", ["", "stream other", "stream new", "group new"])
def test_a_long_write_is_looked_at_in_portions(made: str) -> None:
    """Each of its lines; what others changed meanwhile is seen, and then it is looked at again, in portions too."""
    queues, clock = group_of(*NAMES[:80])
    clock.hasty = True
    lines = [f"clear {name}\n" for name in NAMES[:80]] + ["bind new a\n"]
    step = queues.open("ctl", os.O_WRONLY).write("".join(lines).encode())
    for _ in range(4):  # two portions of its lines are read, two are checked; two are prepared
        assert not step.settled
        queues.tree.run_timers()
    clock.hasty = False
    kind, _, name = made.partition(" ")
    if kind == "stream":
        queues.stream(name)
    elif kind:
        queues.tree.mkdir(ROOT, queues.group, name, 0o777)
    clock.hasty = True
    rounds = finish(queues, step)
    if name == "new":
        with pytest.raises(errors.Exists):
            step.result()
    else:
        assert step.result() == sum(map(len, lines))
        assert rounds == (16 if made else 14)


def long_write(queues: Queues, clock: HastyClock, lines: list[str], rounds: int) -> Wait[int]:
    """It has begun, and was continued as often as that."""
    clock.hasty = True
    step = queues.open("ctl", os.O_WRONLY).write("".join(f"{line}\n" for line in lines).encode())
    assert isinstance(step, Wait)
    for _ in range(rounds):
        assert not step.settled
        queues.tree.run_timers()
    clock.hasty = False
    return step


@pytest.mark.parametrize("rounds", range(12))
def test_a_long_write_shows_nothing_before_all_of_it_holds(rounds: int, tmp_path: Path) -> None:
    """A consumer made meanwhile keeps its number, as do streams; after a restart, too."""
    queues, clock = group_of(path=tmp_path / "store")
    queues.ctl("bind v a", "consumer old")
    names = [f"c{number}" for number in range(150)]
    lines = [f"consumer {name}" for name in names] + ["bind v b", "remove old", "consumer c0 backlog 7"]
    step = long_write(queues, clock, lines, rounds)
    assert set(queues.group.consumers) == {"old"}
    assert list(queues.group.views["v"].state.patterns) == ["a"]
    folder = Folder(queues.group, ".consumers")
    for name in ("c0", "c1", "old"):
        if name == "old":
            queues.tree.unlink(ROOT, folder, name)
        queues.tree.create(ROOT, folder, name, 0o666)
    queues.stream("meanwhile")
    clock.hasty = True
    finish(queues, step)
    clock.hasty = False
    assert step.result() == sum(len(line) + 1 for line in lines)

    def check() -> None:
        consumers = queues.group.consumers
        assert set(consumers) == set(names)
        assert consumers["c0"].state.backlog == 7
        assert sum(1 for own in queues.group.log.state.consumers.values() if own.name) == len(names)
        assert all(queues.group.log.state.consumers[c.number] is c.state for c in consumers.values())
        assert not {c.number for c in consumers.values()} & set(queues.group.numbers)
        assert list(queues.group.views["v"].state.patterns) == ["a", "b"]
        queues.write("meanwhile", b"x")
        for name in ("c0", "c1", "c149"):
            worker = queues.worker(name)
            assert worker.read(9) == b"x"
            worker.write(b"ack\n")

    check()
    queues.restart(clean=False)
    check()


def is_counted_right(queues: Queues) -> bool:
    kept = queues.group.streams["s"].kept
    kept.update_low_watermark()
    before = kept.count, kept.size
    kept.recount()
    kept.update_low_watermark()
    return before == (kept.count, kept.size)


def acknowledge(queues: Queues, clock: HastyClock) -> None:
    worker = queues.worker(".s")
    worker.read(9)
    worker.write(b"ack\n")


def outlive(queues: Queues, clock: HastyClock) -> None:
    clock.forward(2)


def replace(queues: Queues, clock: HastyClock) -> None:
    queues.tree.unlink(ROOT, queues.group, "s")
    queues.stream("s")


LOST: dict[str, tuple[list[str], Callable[[Queues, HastyClock], None]]] = {
    "acknowledged": (["deliver one"], acknowledge),
    "expired": (["ttl 1s"], outlive),
    "in another stream of that name": ([], replace),
    "nothing": ([], lambda queues, clock: None),
}


@pytest.mark.parametrize("rounds", range(9))
@pytest.mark.parametrize("what", LOST)
def test_a_long_drop_of_what_is_gone_meanwhile_is_refused_whole(what: str, rounds: int, tmp_path: Path) -> None:
    lines, lose = LOST[what]
    queues, clock = group_of(path=tmp_path / "store")
    queues.ctl(*lines)
    queues.write("s", *[b"x"] * 120)
    first = queues.group.log.end.next - 120
    step = long_write(queues, clock, [*(f"drop s {first + number}" for number in range(100)), "retries 7"], rounds)
    lose(queues, clock)
    clock.hasty = True
    finish(queues, step)
    clock.hasty = False
    if what == "nothing":
        assert step.result() > 0
        assert queues.group.streams["s"].kept.count == 20
    else:
        with pytest.raises(errors.NotFound):
            step.result()
        assert queues.group.settings.retries != 7
        assert not queues.group.state.dropped
    assert is_counted_right(queues)
    queues.restart(clean=False)
    assert is_counted_right(queues)


def test_a_long_write_is_planned_at_once_where_its_names_change_all_the_time() -> None:
    queues, clock = group_of()
    folder = Folder(queues.group, ".consumers")
    step = long_write(queues, clock, [f"consumer c{number}" for number in range(90)], 0)
    for _ in range(100):
        if step.settled:
            break
        clock.hasty = False
        if "c7" in queues.group.consumers:
            queues.tree.unlink(ROOT, folder, "c7")
        else:
            queues.tree.create(ROOT, folder, "c7", 0o666)
        clock.hasty = True
        queues.tree.run_timers()
    assert step.result() > 0
    assert len(queues.group.consumers) >= 89


def consume(queues: Queues, name: str) -> None:
    queues.tree.create(ROOT, Folder(queues.group, ".consumers"), name, 0o666)


MEANWHILE: dict[str, Callable[[Queues], object]] = {
    "a stream is made": lambda q: q.stream("other"),
    "a stream of the view's name is made": lambda q: q.stream("v"),
    "a consumer is made": lambda q: consume(q, "x"),
    "the same consumer is made": lambda q: consume(q, "w"),
    "a consumer is removed": lambda q: q.tree.unlink(ROOT, Folder(q.group, ".consumers"), "old"),
    "a stream is removed": lambda q: q.tree.unlink(ROOT, q.group, "t1"),
    "a stream is renamed": lambda q: q.tree.rename(ROOT, q.group, "t1", q.group, "v"),
    "a group is made": lambda q: q.tree.mkdir(ROOT, q.group, "v", 0o755),
    "a message is written": lambda q: q.write("t1", b"new"),
    "several": lambda q: [q.stream("other"), consume(q, "x"), q.stream("w")],
}
WRITES = [
    ["depth 5", "consumer w"],
    ["clear", "consumer w t1", "bind v #", "consumer u v"],
    ["depth 1", "pause old", "limit old 3", "consumer w"],
    ["depth 1", "dead t2", "consumer w", "bind v t1"],
    ["clear", "eof t1", "depth 1", "consumer w"],
]


def named(queues: Queues) -> tuple[dict[str, Any], ...]:
    """By name each file that has a number, and its state; and the settings."""
    group = queues.group
    return (
        {stream.name: stream.number for stream in group.streams.values()},
        {c.name: (c.number, c.state.over, c.state.rules) for c in group.consumers.values()},
        {view.name: (view.number, list(view.state.patterns)) for view in group.views.values()},
        {"ctl": group.settings.lines(given=True)},
    )


@pytest.mark.parametrize("lines", WRITES, ids=", ".join)
@pytest.mark.parametrize("what", MEANWHILE)
def test_a_write_of_few_lines_that_pauses_knows_what_others_change(tmp_path: Path, what: str, lines: list[str]) -> None:
    """At each of its pauses: a number is given once, a name is taken once, and what holds does after a restart, too."""
    for rounds in itertools.count():
        names = [f"t{number}" for number in range(24)]
        queues, clock = group_of(*names, path=tmp_path / str(rounds))
        for name in names:
            queues.write(name, b"1", b"2")
        queues.ctl("consumer old")
        clock.hasty = True
        step = queues.open("ctl", os.O_WRONLY).write("".join(f"{line}\n" for line in lines).encode())
        for _ in range(rounds):
            queues.tree.run_timers()
        if step.settled:
            assert rounds > 2
            return
        clock.hasty = False
        with suppress(errors.Exists):
            MEANWHILE[what](queues)
        clock.hasty = True
        finish(queues, step)
        clock.hasty = False
        with suppress(errors.Exists, errors.NotFound):
            step.result()
            assert {"w"} <= queues.group.consumers.keys()
            assert ("bind v #" in lines or "bind v t1" in lines) == ("v" in queues.group.views)
        found = named(queues)
        streams, consumers, views, _ = found
        numbers = [*streams.values(), *(row[0] for row in [*consumers.values(), *views.values()])]
        assert len(set(numbers)) == len(numbers)
        assert len({*streams, *views, *queues.group.groups}) == len(streams) + len(views) + len(queues.group.groups)
        queues.restart(clean=False)
        assert named(queues) == found
        queues.close()


def test_a_group_that_is_being_made_has_its_name_already(tmp_path: Path) -> None:
    queues, clock = group_of(*NAMES[:24], path=tmp_path / "store")
    queues.close()
    posts: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    queues.store = DiskStore(str(queues.path), posts.put)
    queues.tree = Tree(queues.store, clock, owner=ROOT)
    queues.group = queues.tree.root.groups["g"]
    step = long_write(queues, clock, ["clear", "bind v #"], 1)
    making = queues.tree.mkdir(ROOT, queues.group, "v", 0o755)
    assert isinstance(making, Wait)
    clock.hasty = True
    finish(queues, step)
    clock.hasty = False
    with pytest.raises(errors.Exists):
        step.result()
    while not making.settled:
        posts.get(timeout=60)()
    assert making.result().name == "v"
    assert not queues.group.views


def test_lines_that_write_messages_let_others_be_served_between_and_are_checked_again() -> None:
    queues, clock = group_of("gone")
    lines = ["eof s", "retries 7", "eof s", "retries 8", "eof gone", "retries 9"]
    step = long_write(queues, clock, lines, 1)
    assert queues.group.settings.retries == 7
    queues.tree.unlink(ROOT, queues.group, "gone")
    clock.hasty = True
    finish(queues, step)
    with pytest.raises(errors.NotFound):
        step.result()
    assert queues.group.settings.retries == 7, "the part of 'eof gone' is refused whole, and those before it hold"


def test_dead_letters_are_sent_back_in_portions() -> None:
    queues, clock = group_of()
    queues.ctl("retries 1", "dead letters", "consumer w")
    queues.write("s", *[b"x"] * 9)
    worker = queues.worker()
    for _ in range(9):
        worker.read(9)
        worker.write(b"nack\n")
    step = long_write(queues, clock, ["redrive"], 3)
    assert 0 < queues.group.streams["letters"].kept.count < 9
    for _ in range(2):
        worker.read(9)
        worker.write(b"nack\n")
    clock.hasty = True
    finish(queues, step)
    assert step.result() == 8
    assert queues.group.streams["letters"].kept.count == 2, "those that failed again stay"


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


def test_an_open_file_of_a_removed_group_is_answered() -> None:
    """No alarm of the group rings any more."""
    queues, clock, _ = with_much_in_ctl()
    handle = queues.open("ctl", os.O_RDWR)
    queues.tree.unlink(ROOT, queues.group, "s")
    queues.tree.rmdir(ROOT, queues.tree.root, "g")
    clock.hasty = True
    for lines in (1, 100, 1):
        with pytest.raises(errors.NotFound):
            handle.write(b"retries 3\n" * lines)
    with pytest.raises(errors.NotFound):
        handle.read(100)


def test_a_command_behind_the_end_of_the_server_is_answered() -> None:
    """A command in force before its first portion ends is done to its end."""
    queues, clock, _ = with_much_in_ctl()
    handles = [queues.open("ctl", os.O_RDWR) for _ in range(2)]
    queues.tree.close()
    clock.hasty = True
    for handle in handles:
        with pytest.raises(errors.Interrupted):
            handle.write(b"retries 3\n" * 100)
        assert handle.write(b"#\n" * 100) == 200
    assert not queues.tree.memory.used


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

    monkeypatch.setitem(TEXTS, ".stats", fail)
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


def cost_of_leaving(count: int) -> float:
    """Seconds to end one of that many works that wait for their next portion."""

    def work() -> Work[None]:
        yield
        yield

    costs = []
    for _ in range(3):
        queues, clock = group_of()
        clock.hasty = True
        steps = [queues.group.portions.run(work()) for _ in range(count)]
        begun = time.thread_time()
        assert all(step.cancel() for step in reversed(steps))
        costs.append((time.thread_time() - begun) / count)
    return min(costs)


def test_to_leave_costs_the_same_beside_any_number() -> None:
    assert cost_of_leaving(5_000) < 4 * cost_of_leaving(500)


NO = 12_000  # messages that a search passes over


class Search:
    """An open file of a kind, beside messages that it passes over (`hide`) and others that it gives (`show`)."""

    def __init__(self, kind: str, *lines: str, path: Path | None = None) -> None:
        self.queues, self.clock = group_of(path=path)
        self.queues.ctl(*lines)
        self.kind = kind
        if kind == "order":  # shows what its user may read, who may not list the group
            self.queues.stream("t", mode=0o600)
            set_attributes(ROOT, self.queues.group, 0o711, None, None)
        if kind == "view":
            self.queues.ctl('bind view prefix:"" payload_contains("yes")')

    def open(self) -> Any:
        """From the first message on."""
        if self.kind != "cursor":
            return self.queues.open({"stream": "s"}.get(self.kind, self.kind), user=ANNA)
        cursor = self.queues.open(".cursor", os.O_RDWR)
        cursor.write(b'select program prefix:"" payload_contains("yes")\nseek first\n')
        return cursor

    def hide(self, count: int) -> None:
        if self.kind == "stream":  # these are for one that may write
            put = self.queues.open(".put", os.O_WRONLY)
            for _ in range(count):
                put.write(b'{"stream": "s", "single": true} no')
            put.close()
        else:
            self.queues.write("t" if self.kind == "order" else "s", *[b"no"] * count)

    def show(self, body: bytes) -> bytes:
        """Write a message that the file shows; the bytes that a read of it gives."""
        self.queues.write("s", body)
        return b"s\0" if self.kind == "order" else body


def searching(kind: str, *lines: str) -> tuple[Search, Any]:
    """Behind many messages there is one that the file gives."""
    search = Search(kind, *lines)
    search.hide(NO)
    search.show(b"yes")
    file = search.open()
    search.clock.hasty = True
    return search, file


readers = pytest.mark.parametrize("kind", ["cursor", "order", "stream", "view"])


@readers
def test_messages_are_passed_over_in_portions(kind: str) -> None:
    search, file = searching(kind)
    step = file.read(100)
    assert finish(search.queues, step) > 5
    assert step.result() == search.show(b"yes")
    assert file.read(100) == step.result()
    step = file.read(100)
    assert isinstance(step, Wait)
    assert file.search is None  # there is nothing more to look through
    search.hide(1)
    expected = search.show(b"yes, too")
    assert step.result() == expected


@readers
def test_what_a_search_does_not_find_is_waited_for(kind: str) -> None:
    search, _ = searching(kind)
    search.hide(NO)
    file = search.open()
    finish(search.queues, file.read(100))
    step = file.read(100)
    search.queues.tree.run_timers()
    assert file.search is not None
    expected = search.show(b"yes, late")
    finish(search.queues, step)
    assert step.result() == expected


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_seek_back_looks_in_portions(count: int) -> None:
    """And leads to the same message, whatever is written and asked for meanwhile."""
    search, cursor = searching("cursor")
    search.hide(NO)
    expected = [b"yes", *(search.show(b"yes %d" % number) for number in range(2))][-count:]
    search.hide(NO)
    search.clock.hasty = True
    looks = calls_once(lambda: cursor.write(b"seek -%d\n" % count))
    assert looks < 40 * limits.PASSED_MESSAGES
    assert cursor.readable
    cursor.write(b"until end\nformat json\nformat raw\n")
    step = cursor.read(100)
    assert isinstance(step, Wait)
    search.show(b"behind the end")
    assert finish(search.queues, step) > 5
    found = [step.result()]
    while found[-1]:
        step = cursor.read(100)
        if isinstance(step, Wait):
            finish(search.queues, step)
            step = step.result()
        found.append(step)
    assert found == [*expected, b""]


@pytest.mark.parametrize("then", ["select a", "measure 1", "seek end", "seek first"])
def test_what_a_seek_back_means_is_what_was_selected(then: str) -> None:
    search, cursor = searching("cursor")
    search.queues.stream("a")
    search.queues.write("a", b"a")
    search.hide(NO)
    cursor.write(f"seek -1\n{then}\n".encode())
    if then == "measure 1":
        measured = cursor.read(1 << 20)
        finish(search.queues, measured)
        assert measured.result().startswith(b"%d 1 " % (NO + 2))
    step = cursor.read(100)
    if isinstance(step, Wait) and then != "seek end":
        finish(search.queues, step)
        step = step.result()
    expected = {"select a": b"a", "measure 1": b"yes", "seek first": b"yes"}
    assert step == expected[then] if then in expected else step.cancel()


def test_a_search_ends_where_its_cursor_does() -> None:
    search, cursor = searching("cursor")
    cursor.write(b"seek first\nuntil 12000\n")
    step = cursor.read(100)
    finish(search.queues, step)
    assert step.result() == b""


@pytest.mark.parametrize("kind", ["order", "view"])
def test_where_one_reader_gets_each_message_a_search_ends(kind: str) -> None:
    search, file = searching(kind, "deliver one")
    steps = [file.read(100) for _ in range(3)]
    finish(search.queues, steps[-1])
    assert [step.result() for step in steps] == [search.show(b"yes"), b"", b""]


@readers
def test_a_search_can_be_given_up_and_begun_again(kind: str) -> None:
    search, file = searching(kind)
    for _ in range(3):
        step = file.read(100)
        assert file.readable
        search.queues.tree.run_timers()
        assert step.cancel()
        assert file.search is None
    first, second = file.read(100), file.read(100)
    finish(search.queues, first)
    expected = search.show(b"yes, too")
    finish(search.queues, second)
    assert second.result() == expected
    assert isinstance(step := file.read(100), Wait)
    assert step.cancel()
    assert not file.readable


@readers
def test_a_look_that_finds_nothing_moves_on(kind: str) -> None:
    """A program that does not wait looks a little further each time."""
    search, file = searching(kind)
    looks = 0
    while isinstance(step := file.read(100), Wait):
        assert file.readable
        assert step.cancel()
        looks += 1
    assert step == search.show(b"yes")
    assert 3 < looks <= NO // 256


@pytest.mark.parametrize("form", ["raw", "each", "record", "order", "stream", "view"])
def test_reads_are_served_in_the_order_in_which_they_came(form: str) -> None:
    """Some while others search, each for what is between 600 messages that are passed over, with rests of each."""
    search = Search("cursor" if form in ("raw", "each", "record") else form)
    for number in range(20):
        search.hide(600)
        search.show(b"yes %d" % number)

    def opened() -> Any:
        file = search.open()
        if search.kind == "cursor":
            file.write(f"format {form}\nseek first\n".encode())
        return file

    file, whole = opened(), b""
    while isinstance(data := file.read(1_000), bytes):
        whole += data
    assert whole.count(search.show(b"yes")) == 20
    file.close()
    file = opened()
    search.clock.hasty = True
    steps: list[Any] = []
    for number in range(200):
        steps.append(file.read(1 + number % 50))
        if number % 3 == 0:
            search.queues.tree.run_timers()
    while file.searching:
        search.queues.tree.run_timers()
    done = [step for step in steps if not isinstance(step, Wait) or step.settled]
    assert done == steps[: len(done)]  # only the last ones still wait
    found = b"".join(step.result() if isinstance(step, Wait) else step for step in done)
    assert found.startswith(whole)


@readers
def test_messages_lost_to_a_search_are_reported_once(kind: str) -> None:
    search, file = searching(kind)
    first, second = file.read(100), file.read(100)
    search.queues.tree.run_timers()
    expected = search.show(b"yes, too")
    search.clock.hasty = False
    search.queues.ctl("depth 1")
    search.queues.tree.run_timers()
    with pytest.raises(errors.FellBehind):
        first.result()
    assert second.result() == expected


@readers
def test_a_damaged_message_in_a_search_is_reported_once(kind: str, tmp_path: Path) -> None:
    search = Search(kind, path=tmp_path / "store")
    search.hide(3_000)
    expected = search.show(b"yes, to be damaged"), search.show(b"yes")
    file = search.open()
    damage(tmp_path, b"to be damaged")
    search.clock.hasty = True
    first, second = file.read(100), file.read(100)
    finish(search.queues, second)
    with pytest.raises(errors.Damaged):
        first.result()
    assert second.result() == expected[1]


ENDS = [(kind, how) for kind in ("cursor", "order", "stream", "view") for how in ("close", "rmdir", "stop")]


@pytest.mark.parametrize(("kind", "how"), [*ENDS, ("stream", "unlink"), ("view", "unbind")])
def test_a_search_ends_with_its_file(kind: str, how: str) -> None:
    search, file = searching(kind)
    queues = search.queues
    step = file.read(100)
    queues.tree.run_timers()
    over = file.search  # which HTTP waits for
    if how == "close":
        file.close()
    elif how == "stop":
        queues.tree.close()
    elif how == "unbind":
        queues.ctl("unbind view")
    else:
        queues.tree.unlink(ROOT, queues.group, "s")
        if how == "rmdir":
            if kind == "order":
                queues.tree.unlink(ROOT, queues.group, "t")
            queues.tree.rmdir(ROOT, queues.tree.root, "g")
    assert step.result() == b""
    finish(queues, over)


def parked(queues: Queues, name: str, count: int) -> tuple[Any, list[Any]]:
    """An open file of which that many reads wait, for three bytes each."""
    handle = queues.open(name)
    return handle, [handle.read(3) for _ in range(count)]


@pytest.mark.parametrize("name", ["s", "view"])
def test_many_reads_that_one_message_answers_are_settled_in_portions(name: str) -> None:
    queues, clock = group_of()
    queues.ctl("replay off", "bind view s")
    handle, steps = parked(queues, name, 600)
    _, others = parked(queues, name, 2)
    first, second, third = b"0123456789" * 100, b"another", b"last"
    queues.write("s", first)
    assert 100 < sum(step.settled for step in steps) < 200
    queues.write("s", second)
    clock.hasty = True
    assert finish(queues, steps[336]) > 100
    assert b"".join(step.result() for step in steps[:334]) == first
    assert b"".join(step.result() for step in steps[334:337]) == second
    assert not any(step.settled for step in steps[337:])
    assert steps[337].cancel()
    queues.write("s", third)
    finish(queues, steps[339])
    assert [step.result() for step in steps[338:340]] == [b"las", b"t"]
    assert [step.result() for step in others] == [first[:3], first[3:6]]
    handle.close()
    assert not steps[340].settled or steps[340].result() == b""


def test_a_file_may_be_closed_while_its_reads_are_settled() -> None:
    queues, clock = group_of()
    handle, steps = parked(queues, "s", 600)
    queues.write("s", b"x" * 1_800)
    assert steps[-1].cancel()
    handle.close()
    clock.hasty = True
    queues.tree.run_timers()
    assert {step.result() for step in steps[:-1] if step.settled} <= {b"xxx", b""}
    assert steps[-2].settled


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


@pytest.mark.parametrize("given_up", [False, True])
def test_a_directory_is_not_at_its_end_before_it_was_read(given_up: bool) -> None:
    """For a client that sends its next read before it has the answer to the first, or gives the first up."""
    queues, clock = group_of(*NAMES[:600])
    listing = Listing(queues.tree, ROOT, queues.group, 0)
    directory, fid = OpenDirectory(listing), Fid(1, ROOT, queues.tree.root, queues.group, False)
    clock.hasty = True
    first = directory.begin(0)
    assert isinstance(first, Wait)
    if given_up:
        assert first.cancel()
    step = directory.begin(500)
    assert isinstance(step, Wait)
    finish(queues, step)
    names = [entry.name for entry in directory.entries(fid, 500, 1 << 20)]
    assert names == [node.name for node in listing.nodes][498:][: len(names)]
    assert names
    assert first.settled is not given_up
    assert directory.begin(600) is None


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
