"""Costs of positions and looks, in calls: nothing is walked that can be searched."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mqfs import limits
from mqfs.clock import SystemClock
from mqfs.model import Wait
from tests.support.batches import Units, frame
from tests.support.calls import calls, calls_once, lines
from tests.support.clock import SECOND
from tests.support.eventually import patient
from tests.support.hand import ROOT, Hand, finished
from tests.support.queues import Queues, drain, read, say, waits


def selecting(streams: int, patterns: int) -> Any:
    """The calls of a `select`, and of the look for what it may show."""
    hand = Hand("replay all")
    for number in range(streams):
        hand.stream(f"a{number}.b.c")
    cursor = hand.open(".cursor", os.O_RDWR)
    line = "select " + " ".join(f"#.x{number}.*" for number in range(patterns)) + "\n"

    def do() -> None:
        cursor.write(line.encode())
        assert cursor.streams() == {}

    return calls(do)


def test_patterns_are_matched_with_a_name_all_at_once() -> None:
    few = selecting(200, 4) - selecting(100, 4)
    assert selecting(200, 400) - selecting(100, 400) <= 2 * few


def test_who_looks_at_open_files_of_its_own_group_only() -> None:
    costs = []
    for count in (0, 100):
        hand = Hand()
        other = hand.tree.create(ROOT, hand.mkdir("other"), "s", 0o666)
        files = [hand.tree.open(ROOT, other, os.O_RDONLY) for _ in range(count)]
        costs.append(lines(lambda hand=hand: hand.text(".who")))
        for file in files:
            file.close()
        assert hand.tree.open_files.count == 0
    assert costs[0] == costs[1]


def filled(path: Path, messages: int) -> Queues:
    queues = Queues("replay all", path=path / str(messages))
    queues.stream("t")
    for number in range(messages):
        queues.write("st"[number % 2], b"x")
    queues.at(".stats").read(1)  # they are counted
    return queues


def seeking(queues: Queues, *lines: str) -> int:
    cursor, count = queues.cursor(*lines), queues.group.streams["s"].kept.count
    return calls(lambda: cursor.write(b"seek -%d\n" % (count - 4)))


@pytest.mark.parametrize("lines", [(), ("select s",), ("select #",)])
def test_seeking_back_does_not_walk_the_messages(lines: tuple[str, ...], tmp_path: Path) -> None:
    few, many = (seeking(filled(tmp_path, messages), *lines) for messages in (100, 2_000))
    assert few == many


def test_opening_a_snapshot_does_not_walk_the_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KEPT_COPY_MESSAGES", 10)
    both = [filled(tmp_path, messages) for messages in (100, 2_000)]
    few, many = (calls(lambda queues=queues: queues.at(".kept/s")) for queues in both)
    assert few == many


def opening(streams: int, line: str) -> int:
    """The calls of an open of `order` and of a seek, beside streams that keep a message each."""
    hand = Hand(line)
    for number in range(streams):
        hand.stream(f"s{number}")
        hand.write(f"s{number}", b"x", b"y")
    hand.open("order").close()  # what is not kept goes
    cursor = hand.cursor()
    return calls(lambda: (hand.open("order").close(), cursor.write(b"seek 5\n")))


def test_a_reader_of_newest_messages_does_not_look_at_each_again() -> None:
    few, many = (opening(streams, "replay last") for streams in (100, 200))
    assert many - few <= 100 * 12


def evicting(path: Path, messages: int) -> tuple[int, int]:
    """What the write costs that finds a log at its bound, in calls; and how many messages it takes away."""
    queues = Queues("replay all", path=path / str(messages))
    stream, writer = queues.group.streams["s"], queues.at("s", os.O_WRONLY)
    limits.SEGMENT_BYTES = messages * 40
    limits.GROUP_BYTES = 8 * limits.SEGMENT_BYTES
    cost = 0
    while not stream.state.floor:
        cost = calls_once(lambda: writer.write(b"xx"))
    assert (stream.kept.count, stream.kept.size) == queues.group.log.metrics.count(stream.number, stream.state.floor)[
        :2
    ]
    assert stream.kept.evicted_before == stream.state.floor
    assert queues.group.counts.cut == stream.kept.trimmed_count
    return cost, queues.group.counts.cut


@pytest.mark.slow
def test_eviction_at_the_logs_bound_takes_one_stretch_and_does_not_walk_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SEGMENT_BYTES", 0)
    monkeypatch.setattr(limits, "GROUP_BYTES", 0)
    monkeypatch.setattr(limits, "SEGMENT_FIRST_BYTES", 1_024)
    monkeypatch.setattr(limits, "TRIM_BYTES", 0)
    (few, few_cut), (many, many_cut) = (evicting(tmp_path, messages) for messages in (200, 2_000))
    assert few_cut <= 200
    assert 1_000 < many_cut <= 2_000
    assert many <= 2 * few


def test_eviction_waits_for_the_disk_to_give_back_what_was_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SEGMENT_BYTES", 40_000)
    monkeypatch.setattr(limits, "GROUP_BYTES", 400_000)
    monkeypatch.setattr(limits, "SEGMENT_FIRST_BYTES", 1_024)
    queues = Queues("replay all", path=tmp_path / "store")
    monkeypatch.setattr(queues.store.committer, "request", lambda *job: None)  # the disk takes its time
    stream, writer = queues.group.streams["s"], queues.at("s", os.O_WRONLY)
    while not stream.state.floor:
        writer.write(b"x")
    cut = queues.group.counts.cut
    for _ in range(100):
        writer.write(b"x")
    assert queues.group.counts.cut == cut


@pytest.mark.parametrize("pattern", ["a%d.#", 'prefix:"a%d" true()'])
def test_lines_of_one_write_that_bind_a_view_cost_the_same_each(pattern: str) -> None:
    def binding(lines: int) -> int:
        hand = Hand("replay all")
        ctl = hand.open("ctl", os.O_WRONLY)
        text = "".join(f"bind v '{pattern % number}'\n" for number in range(lines))
        return calls_once(lambda: ctl.write(text.encode()))

    binding(200)  # programs that were parsed once are known
    assert binding(200) <= 12 * binding(20)


def returning(messages: int) -> int:
    """What the read costs that finds returned messages expired."""
    queues = Queues("replay all", "ttl 5s")
    queues.consumer()
    queues.write("s", *[b"x"] * messages)
    worker, other = queues.worker(), queues.worker()
    for _ in range(messages):
        worker.read(1)
    assert waits(other)  # what may be delivered is known from now on
    worker.close()
    queues.pass_time(8)
    queues.write("s", b"last")
    cost = lines(lambda: other.read(9))
    assert other.consumer.state.progress.encode() == [messages + 1, [], [[messages + 1, messages + 1, 0, 0, 1]]]
    return cost


def test_expired_messages_that_were_returned_are_passed_by_one_after_the_other() -> None:
    assert returning(1_600) < 5 * returning(400)


def ring(consumers: int) -> float:
    """Seconds that one lease which ends takes, beside that many consumers with others."""
    queues = Queues("lease 9h", "retries 0")
    queues.write("s", b"x")
    queues.ctl(*(f"consumer c{n}" for n in range(consumers)), "consumer due")
    queues.write("s", b"y")
    sleeping = [queues.worker(f"c{n}") for n in range(consumers)]
    assert [worker.read(9) for worker in sleeping] == [b"y"] * consumers
    due, times = queues.worker("due"), []
    for _ in range(20):
        assert due.read(9) == b"y"
        due.write(b"nack 1s\n")
        queues.clock.engine += SECOND
        begun = time.perf_counter()
        queues.tree.run_timers()
        times.append(time.perf_counter() - begun)
    return min(times)


def test_a_lease_that_ends_costs_the_same_beside_many_others() -> None:
    assert ring(2_000) < 5 * ring(20)


def test_alarms_that_were_set_again_leave_nothing() -> None:
    queues = Queues("retries 0", "lease 9h", "consumer w")
    for body in (b"x", b"y"):
        queues.write("s", body)
    worker, other = queues.worker("w"), queues.worker("w")
    assert other.read(9) == b"x"
    for _ in range(1_000):
        assert worker.read(9) == b"y"
        worker.write(b"nack 1s\n")
        queues.clock.engine += SECOND
        queues.tree.run_timers()
    assert len(queues.tree.timers) < 200


@pytest.mark.parametrize("lines", [["replay all"], ["replay all", "deliver one"]])
def test_consumers_that_are_gone_leave_no_alarm(lines: list[str]) -> None:
    queues = Queues(*lines)
    for number in range(300):
        queues.stream(f"s{number}")
        queues.write(f"s{number}", b"x")
        if len(lines) == 1:
            queues.ctl(f"consumer w s{number} transient")
        worker = queues.worker("w") if len(lines) == 1 else queues.worker(f".s{number}")
        assert worker.read(9) == b"x"
        worker.write(b"nack 1d\n")
        worker.close()
        queues.tree.unlink(ROOT, queues.group, f"s{number}")
    assert len(queues.tree.timers) < 200


def test_messages_with_a_ttl_that_are_gone_leave_nothing() -> None:
    queues = Queues("consumer w")
    worker, put = queues.worker("w"), queues.at(".put", os.O_WRONLY)
    for _ in range(5_000):
        put.write(b'{"stream":"s","ttl":"9h"} x')
        assert worker.read(9) == b"x"
        worker.write(b"ack\n")
    queues.group.retention.trim(always=True)
    assert queues.group.ranks.count_expiring() < 200


def acked_above_a_claim(path: Path, messages: int) -> Queues:
    queues = Queues("replay all", path=path / str(messages))
    queues.consumer()
    first, worker = queues.worker(), queues.worker()
    queues.write("s", *[b"x"] * (messages + 2))
    first.read(64)
    for _ in range(messages):
        worker.read(64)
        worker.write(b"ack\n")
    return queues


def test_what_is_acked_above_a_claim_is_passed_in_one_step(tmp_path: Path) -> None:
    few, many = (acked_above_a_claim(tmp_path, messages) for messages in (10, 1_000))
    assert few.stats()["oldest"] is not None
    assert lines(lambda: few.text(".stats")) == lines(lambda: many.text(".stats"))


def test_claims_are_counted_without_a_look_at_the_log(tmp_path: Path) -> None:
    queues = Queues("replay all", path=tmp_path / "store")
    queues.consumer()
    worker = queues.worker()
    queues.write("s", *[b"x"] * 101)
    costs = []
    for claims in (1, 99):
        for _ in range(claims):
            worker.read(64)
        costs.append(calls(lambda: queues.text(".stats")))
    assert queues.stats()["waiting"] == 1
    assert (costs[1] - costs[0]) / 99 <= 2


def looking_in_vain(readers: int) -> int:
    """The lines of code that a message costs which is for none of the parked readers of a consumer."""
    queues = Queues("replay all")
    queues.stream("t")
    queues.ctl("consumer w")
    parked = [queues.worker("w", "select t").read(64) for _ in range(readers)]
    cost = lines(lambda: queues.write("s", b"x"))
    queues.write("t", *[b"x"] * readers)
    assert all(wait.settled for wait in parked)
    return cost


def test_each_parked_reader_is_looked_at_once() -> None:
    assert looking_in_vain(400) <= 4.5 * looking_in_vain(100)


def trimming(depth: int) -> int:
    queues = Queues("replay all", f"depth {depth}")
    queues.write("s", *[b"x"] * depth)
    queues.group.retention.trim(always=True)
    queues.write("s", *[b"x"] * 10)
    cost = lines(lambda: queues.group.retention.trim(always=True))
    assert len(queues.kept()) == depth
    return cost


def test_memory_is_trimmed_without_a_walk_over_what_stays() -> None:
    assert trimming(2_000) == trimming(100)


@pytest.mark.parametrize("full", ["drop-new", "drop-old"])
def test_a_write_to_a_full_backlog_counts_it_not_again(full: str) -> None:
    """However many gaps and streams it has; what expired meanwhile is seen a second later."""
    queues = Queues("replay off", f"consumer w backlog 600 full {full}", "ttl 1h")
    for number in range(10):
        queues.stream(str(number))
    for number in range(600):
        queues.write(str(number % 10), b"x")
    worker = queues.worker()
    for number in range(500):
        read(worker)
        if number % 2:
            say(worker, "ack")
    for number in range(251):
        queues.write(str(number % 10), b"x")
    assert calls(lambda: queues.write("1", b"y")) < 1_500
    queues.clock.forward(3600)
    before = queues.stats()["waiting"]
    queues.write("1", b"z")
    assert (before, queues.stats()["waiting"]) == (0, 1)


def test_a_backlog_that_evictions_keep_below_its_bound_gets_all() -> None:
    queues = Queues("replay off", "depth 20", "full drop-old", "consumer w backlog 300 full drop-new")
    for number in range(10):
        queues.stream(str(number))
    for number in range(4_000):
        queues.write(str(number % 10), b"%d" % number)
    worker = queues.worker()
    assert drain(worker) == [b"%d" % number for number in range(3_800, 4_000)]


def test_a_backlog_made_smaller_is_kept_in_portions() -> None:
    """One message skipped all that were above the bound, and counted those left for each of them."""
    queues = Queues("replay all", "consumer w", "consumer v")
    queues.write("s", *[b"x"] * 3_000)
    for name in "wv":
        queues.ctl(f"consumer {name} backlog 5")
    assert calls(lambda: queues.write("s", b"y")) < 30_000
    for _ in range(30):
        queues.write("s", b"y")
    left = [queues.stats(name)["waiting"] for name in "wv"]
    assert left == [5, 5]


def written_at_depth(full: str, readers: int) -> int:
    """The lines of a write to a stream that is at its depth, none of these readers having read anything."""
    queues = Queues("replay off", "depth 4", f"full {full}")
    files = [queues.at("s") for _ in range(readers)]
    queues.write("s", b"1", b"2", b"3", b"4")
    writer = queues.at("s", os.O_WRONLY)
    writer.write(b"5")
    cost = lines(lambda: writer.write(b"6"))
    for file in files:
        file.close()
    return cost


def test_a_write_at_the_depth_asks_once_what_the_readers_have_had() -> None:
    once = written_at_depth("drop-new", 101) - written_at_depth("drop-new", 1)
    assert once > 0
    assert written_at_depth("drop-old", 101) - written_at_depth("drop-old", 1) < 1.5 * once


def per_stream(path: Path, *lines: str) -> float:
    """Calls of the last of those lines, for each of many streams that keep something."""
    costs = []
    for count in (100, 200):
        queues = Queues("replay all", path=path / f"{len(lines)}.{count}")
        for number in range(count):
            queues.stream(f"t{number}")
            queues.write(f"t{number}", b"x")
        queues.at(".stats").read(1)  # they are counted
        for line in lines[:-1]:
            queues.ctl(line)
        costs.append(calls_once(lambda queues=queues: queues.ctl(lines[-1])))
    return (costs[1] - costs[0]) / 100


def test_a_setting_that_loses_all_looks_up_nothing_of_each_stream(tmp_path: Path) -> None:
    assert per_stream(tmp_path, "replay off", "replay all") <= 34


def test_settings_leave_alone_what_consumers_cover(tmp_path: Path) -> None:
    lines = ("consumer mail s", "replay off", "replay all", "replay off")
    assert per_stream(tmp_path, *lines, "replay all") < per_stream(tmp_path, *lines, "dead other", "replay all")


def batch_over(path: Path, streams: int, how: str, waits: str) -> int:
    """The calls of an atomic batch of one message for each of that many streams, where a program waits for the last."""
    queues = Units(path=path / str(streams))
    names = [f"t{number}" for number in range(streams)]
    frames = [frame(queues.stream(name).name, b"x") for name in names]
    if waits == "worker":
        queues.consumer("w", names[-1])
    waiting = queues.worker() if waits == "worker" else queues.at(names[-1])
    if waits == "poller":
        waiting.watch(lambda: None)
    else:
        assert isinstance(waiting.read(10), Wait)
    if how == "batch":
        return calls_once(lambda: queues.batch(*frames))
    queues.part("p")
    batch = queues.at(".txn/p/.batch", os.O_WRONLY)
    batch.write(b"".join(frames))
    return calls_once(lambda: queues.say("commit a.1 p"))


@pytest.mark.parametrize("waits", ["reader", "worker", "poller"])
@pytest.mark.parametrize("how", ["batch", "commit"])
def test_a_batch_over_many_streams_costs_little_for_each(how: str, waits: str, tmp_path: Path) -> None:
    costs = [batch_over(tmp_path, streams, how, waits) for streams in (1_000, 2_000)]
    assert (costs[1] - costs[0]) / 1_000 <= 40


def test_ctl_makes_the_line_of_each_consumer_once() -> None:
    costs = []
    for count in (100, 200):
        queues = Queues()
        queues.ctl(*(f"consumer c{number}" for number in range(count)))
        costs.append(calls_once(lambda queues=queues: queues.open("ctl")))
    assert (costs[1] - costs[0]) / 100 <= 8


def test_a_line_that_clears_again_costs_what_it_takes_to_read_it() -> None:
    queues = Queues()
    costs = [calls_once(lambda lines=lines: queues.ctl(*["clear s"] * lines)) for lines in (100, 200)]
    assert (costs[1] - costs[0]) / 100 <= 17


def holder(count: int) -> Queues:
    """A group where `c` holds that many exclusive messages of `s`, which `d` covers, too."""
    queues = Queues("replay off", "retries 0", "bind v s", "consumer c v", "consumer d s")
    for _ in range(count):
        queues.put(b"x", single=True)
    worker = queues.worker("c")
    drain(worker, ack=False)
    worker.close()
    assert len(queues.group.consumers["c"].held_exclusives) == count
    return queues


OFFERING: dict[str, Callable[[Queues], None]] = {
    "seek": lambda queues: say(queues.worker("c"), "seek end"),
    "view": lambda queues: queues.ctl("unbind v s"),
    "removal": lambda queues: queues.ctl("remove c"),
}


@pytest.mark.parametrize("how", OFFERING)
def test_offering_an_exclusive_message_does_not_walk_the_others(how: str) -> None:
    def cost(count: int) -> int:
        queues = holder(count)
        cost = lines(lambda: OFFERING[how](queues))
        assert len(drain(queues.worker("d"))) == count
        return cost

    none, few, many = (cost(count) for count in (0, 300, 600))
    assert many - none <= 2.1 * (few - none)


def test_removing_a_stream_does_not_walk_what_consumers_hold_of_others() -> None:
    costs = []
    for count in (0, 300):
        queues = holder(count)
        other = queues.stream("other")
        costs.append(lines(lambda queues=queues, other=other: queues.group.remove_stream(other)))
    assert costs[0] == costs[1]


def parked_reads(count: int) -> Callable[[], None]:
    """A message that is the body of that many reads of one file."""
    hand = Hand()
    hand.stream()
    reader, writer = hand.open("s"), hand.open("s", os.O_WRONLY)
    waits = [reader.read(10) for _ in range(count)]

    def do() -> None:
        writer.write(b"x" * 10 * count)
        hand.clock.engine += 1
        hand.tree.run_timers()
        assert all(wait.settled for wait in waits)

    return do


def blocked_writers(count: int) -> Callable[[], None]:
    """Room for that many writes that wait for it, one after the other."""
    hand = Hand("replay all", "depth 1", "full block")
    hand.stream()
    writer = hand.open("s", os.O_WRONLY)
    waits = [writer.write(b"x") for _ in range(count + 1)][1:]

    def do() -> None:
        for _ in range(count):
            hand.ctl("clear s")
        assert all(wait.settled for wait in waits)

    return do


@pytest.mark.parametrize("queue", [parked_reads, blocked_writers])
def test_the_first_of_a_long_queue_costs_what_that_of_a_short_one_does(
    queue: Callable[[int], Callable[[], None]],
) -> None:
    def seconds_each(count: int) -> float:
        do = queue(count)
        began = time.thread_time()
        do()
        return (time.thread_time() - began) / count

    short, long = (min(seconds_each(count) for _ in range(2)) for count in (1_000, 20_000))
    assert long < 3 * short


def test_a_put_that_nothing_retains_is_answered_and_not_appended(tmp_path: Path) -> None:
    queues = Queues(path=tmp_path / "store")
    reader, put = queues.at("s"), queues.at(".put", os.O_RDWR)
    wait = reader.read(64)
    put.write(b'{"stream":"s","kept":true} not in the log')
    sequence, *receipt = map(int, put.read(128).split())
    assert wait.result() == b"not in the log"
    assert sequence == queues.group.log.end.next - 1
    assert receipt == [queues.clock.wall_ns(), 0, 0, 1]
    queues.close()
    stored = [path for path in tmp_path.rglob("*") if path.is_file() and b"not in the log" in path.read_bytes()]
    assert stored == []


NAMES = range(3_500)
CONSUMERS = [f"consumer c{n}" for n in NAMES]
BOUND = [f"bind v{n % 4} a{n}.#" for n in NAMES]


def written(queues: Queues) -> None:
    for _ in range(12):
        queues.write("s", *[b"x"] * 1_000)


def shared(queues: Queues) -> None:
    queues.ctl("deliver one", "consumer c", "consumer d")
    written(queues)


def delayed(queues: Queues) -> None:
    for _ in range(6_000):
        queues.put(b"x", delay="1h")


def in_streams(queues: Queues) -> None:
    """Message 1 + N in stream N."""
    for n in NAMES:
        queues.write(queues.stream(str(n)).name, b"x")


LONG_WRITES: dict[str, tuple[Callable[[Queues], object] | list[str], list[str]]] = {
    "make consumers": ([], CONSUMERS),
    "change consumers": (CONSUMERS, [f"consumer c{n} private" for n in NAMES[:2_800]]),
    "remove consumers": (CONSUMERS, [f"remove c{n}" for n in NAMES]),
    "bind": ([], BOUND),
    "unbind": (BOUND, [f"unbind v{n % 4} a{n}.#" for n in NAMES]),
    "end": ([], ["eof s"] * 9_000),
    "clear and end": ([], ["clear s", "eof s"] * 4_500),
    "redrive": ([], ["redrive s"] * 6_000),
    "drop": (written, [f"drop s {n}" for n in range(1, 5_001)]),
    "drop by one line": (written, [f"drop s {' '.join(map(str, range(1, 12_001)))}"]),
    "drop what consumers share": (shared, [f"drop s {' '.join(map(str, range(1, 12_001)))}"]),
    "drop delayed": (delayed, [f"drop s {' '.join(map(str, range(1, 6_001)))}"]),
    "drop in many streams": (in_streams, [f"drop {n} {n + 1}" for n in NAMES]),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", LONG_WRITES)
def test_a_ctl_write_of_64_kib_is_carried_out_in_short_pieces(what: str, tmp_path: Path) -> None:
    def longest(folder: Path) -> float:
        queues, pieces = Queues("replay all", path=folder, clock=SystemClock()), []
        before, lines = LONG_WRITES[what]
        if callable(before):
            before(queues)
            before = []
        for at in range(0, len(before), 1_000):
            some = "".join(f"{line}\n" for line in before[at : at + 1_000])
            finished(queues.tree, queues.open("ctl", os.O_WRONLY).write(some.encode()))
        text = "".join(f"{line}\n" for line in lines).encode()
        assert len(text) <= 65_536
        handle, step = queues.open("ctl", os.O_WRONLY), None
        gc.collect()
        gc.disable()
        try:
            while step is None or (isinstance(step, Wait) and not step.settled):
                began = time.thread_time()
                step = handle.write(text) if step is None else queues.tree.run_timers() or step
                pieces.append(time.thread_time() - began)
        finally:
            gc.enable()
        assert not isinstance(step, Wait) or step.result() == len(text)
        print(what, *sorted(round(1_000 * piece, 1) for piece in pieces)[-3:])
        return max(pieces)

    # A virtual processor counts other work of the machine as this thread's: not in all of four.
    assert any(longest(tmp_path / str(n)) < patient(0.05) for n in range(4))
