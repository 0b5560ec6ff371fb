"""A claim that passes over many messages: in portions, and as if it were made in one piece."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mqfs import errors
from mqfs.engine.delivery import priorities
from mqfs.engine.tree.attributes import set_attributes
from mqfs.model import Wait
from tests.support.calls import calls_once
from tests.support.clock import SECOND, HastyClock
from tests.support.hand import ANNA, ROOT
from tests.support.queues import BIG, Queues, read, say, waits
from tests.support.temp_store import damage

NO = 12_000  # messages that a claim passes over
SELECT = 'select program prefix:"" payload_contains("yes")'
VIEW = 'bind v prefix:"" payload_contains("yes")'


class Long:
    """A consumer with many messages that are not for the one who claims. `kind` says why."""

    def __init__(self, kind: str, path: Path | None = None) -> None:
        self.clock, self.kind = HastyClock(), kind
        self.q = Queues("replay all", clock=self.clock, path=path)
        self.hidden_in = "s"
        if kind == "view":
            self.q.ctl(VIEW)
        elif kind == "rights":  # of ANNA
            self.q.stream("t", mode=0o600)
            self.hidden_in = "t"
        elif kind == "streams":  # too many for a search by stream: the log is walked
            self.q.ctl("bind v a.#")
            for number in range(20):
                self.q.stream(f"a.{number}")
            self.hidden_in = "s"
        self.q.consumer("w", *(["v"] if kind in ("view", "streams") else []))
        set_attributes(ROOT, self.q.tree.find(ROOT, "g/.consumers/w"), 0o666, None, None)
        self.shown_in = "a.7" if kind == "streams" else "s"

    def hide(self, count: int = NO) -> None:
        self.q.write(self.hidden_in, *[b"no"] * count)

    def show(self, body: bytes = b"yes") -> bytes:
        self.q.write(self.shown_in, body)
        return body

    def open(self, *commands: str) -> Any:
        select = [SELECT] if self.kind == "select" else []
        worker = self.q.worker("w", *select, *commands, user=ANNA)
        self.clock.hasty = True
        return worker

    def finish(self, step: Any, between: Callable[[], object] = lambda: None) -> int:
        """Ring the alarm until there is a result. How often."""
        assert isinstance(step, Wait)
        for count in range(NO):
            if step.settled:
                return count
            between()
            self.q.tree.run_timers()
        raise AssertionError("it does not end")

    def finish_all(self, step: Any) -> int:
        """Ring the alarm until nothing is left to be looked at. How often."""
        assert isinstance(step, Wait)
        for count in range(NO):
            due = self.q.tree.timers.next_due_ns
            if due is None or due > self.clock.engine + SECOND:
                return count
            self.q.tree.run_timers()
        raise AssertionError("it does not end")

    def claim(self, worker: Any) -> bytes:
        step = worker.read(BIG)
        if isinstance(step, Wait):
            self.finish(step)
            step = step.result()
        return bytes(step)

    def hide_one(self) -> None:
        self.hide(1)

    def nothing(self, worker: Any) -> bool:
        """Whether a claim that does not wait gets nothing."""
        step = worker.read(BIG)
        if not isinstance(step, Wait) or step.cancel(errors.Again()):
            return isinstance(step, Wait)
        self.finish(step)
        with pytest.raises(errors.Again):
            step.result()
        return True


kinds = pytest.mark.parametrize("kind", ["select", "view", "rights", "streams"])


@kinds
def test_others_are_served_while_it_looks(kind: str) -> None:
    long = Long(kind)
    long.hide()
    expected = long.show()
    worker, served = long.open(), 0
    writer, reader = long.q.at("s", os.O_WRONLY), long.q.at("order")

    def between() -> None:
        nonlocal served
        writer.write(b"of another")
        served += isinstance(reader.read(BIG), bytes)

    step = worker.read(BIG)
    pieces = long.finish(step, between)
    assert pieces == served > (40 if kind == "streams" else 100)
    assert step.result() == expected


@kinds
def test_a_claim_that_does_not_wait_has_what_is_there(kind: str) -> None:
    long = Long(kind)
    long.hide()
    expected = long.show()
    worker = long.open()
    step = worker.read(BIG)
    assert not step.cancel(errors.Again())
    long.finish(step)
    assert step.result() == expected
    assert [claim.deliveries for claim in worker.claims.values()] == [1]
    assert long.nothing(worker)


@kinds
def test_a_claim_that_a_signal_ends_takes_nothing(kind: str) -> None:
    """At once, and the next one continues where it was."""
    long = Long(kind)
    long.hide()
    expected = long.show()
    worker, pieces = long.open(), 0
    while isinstance(step := worker.read(BIG), Wait):
        long.q.tree.run_timers()
        pieces += 1
        if step.settled:
            step = step.result()
            break
        if pieces % 2:
            assert not step.cancel(errors.Again())
        assert step.cancel()
        assert not worker.claims
    assert pieces > 20
    assert step == expected
    assert [claim.deliveries for claim in worker.claims.values()] == [1]


@kinds
def test_a_claim_that_has_nothing_takes_nothing(kind: str) -> None:
    long = Long(kind)
    long.hide()
    worker = long.open()
    step = worker.read(BIG)
    assert not step.cancel(errors.Again())
    assert not step.cancel(errors.Again())
    long.finish(step)
    with pytest.raises(errors.Again):
        step.result()
    assert not worker.claims
    assert not worker.consumer.reads.parked
    expected = long.show()
    assert read(worker) == expected
    assert [claim.deliveries for claim in worker.claims.values()] == [1]


@kinds
def test_what_was_looked_at_is_not_looked_at_again(kind: str) -> None:
    long = Long(kind)
    long.hide()
    worker = long.open()
    assert long.nothing(worker)
    step = worker.read(BIG)
    assert step.cancel(errors.Again())


@kinds
def test_a_new_stream_does_not_have_it_looked_at_again(kind: str) -> None:
    long = Long(kind)
    long.hide()
    worker = long.open()
    assert long.nothing(worker)
    long.q.stream("new")
    long.q.consumer("other")
    step = worker.read(BIG)
    assert step.cancel(errors.Again())


@kinds
def test_poll_says_when_it_has_found_one(kind: str) -> None:
    long = Long(kind)
    long.hide()
    expected = long.show()
    worker, calls = long.open(), list[bool]()
    assert not worker.readable
    worker.watch(lambda: calls.append(worker.readable))
    while not calls:
        long.q.tree.run_timers()
    assert calls == [True]
    assert read(worker) == expected


@kinds
def test_the_end_is_behind_what_is_there(kind: str) -> None:
    long = Long(kind)
    long.hide()
    expected = long.show()
    worker = long.open("until end")
    step = worker.read(BIG)
    long.finish(step)
    assert step.result() == expected
    long.hide(10)
    last = worker.read(BIG)
    if isinstance(last, Wait):
        long.finish(last)
        last = last.result()
    assert last == b""


def test_the_first_to_wait_is_served_first() -> None:
    long = Long("select")
    long.hide()
    first, second = long.open(), long.open()
    steps = [first.read(BIG), second.read(BIG)]
    long.show(b"yes 1")
    long.show(b"yes 2")
    long.finish(steps[0])
    long.finish(steps[1])
    assert [step.result() for step in steps] == [b"yes 1", b"yes 2"]


WAYS: dict[str, Callable[[Queues, Any], None]] = {
    "ack": lambda q, holder: say(holder, "ack"),
    "nack": lambda q, holder: say(holder, "nack 0s"),
    "close": lambda q, holder: holder.close(),
    "lease": lambda q, holder: q.pass_time(9),
    "limit": lambda q, holder: q.ctl("limit w 9"),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_first_to_wait_is_served_first_after_a_long_claim_of_another(way: str) -> None:
    """Two wait until a claim ends, or a rule: the first has to pass over messages, the other did that before."""
    q = Queues("replay all", "lease 9s")
    for name in ("held", "other"):
        q.stream(name)
    for name in ("w", "v"):
        q.consumer(name)
    q.write("other", *[b"no"] * 300)
    q.write("held", b"held")
    holder, second = q.worker("w", "select held"), q.worker("w", "select s")
    assert read(holder) == b"held"
    assert waits(second)
    q.ctl("limit w 1")
    reads = [worker.read(BIG) for worker in (q.worker("w", "select s"), second)]
    q.write("s", b"1", b"2")
    assert read(q.worker("v", "select s")) == b"1", "a long claim"
    WAYS[way](q, holder)
    q.pass_time(1)
    assert reads[0].settled
    assert reads[0].result() == b"1"


def test_each_that_looks_gets_another_one() -> None:
    """And all of them what is there, each message once."""
    long = Long("select")
    for number in range(10):
        long.hide(700)
        long.show(b"yes %d" % number)
    workers = [long.open() for _ in range(4)]
    found: list[bytes] = []
    while len(found) < 10:
        steps = [worker.read(BIG) for worker in workers]
        for step in steps:
            if isinstance(step, Wait):
                if step.cancel(errors.Again()):
                    continue
                long.finish(step)
                with suppress(errors.Again):
                    found.append(step.result())
            else:
                found.append(step)
    assert sorted(found) == [b"yes %d" % number for number in range(10)]
    assert len(found) == len(set(found))


def test_one_that_may_have_all_is_not_held_up() -> None:
    long = Long("select")
    long.hide()
    step = long.open().read(BIG)
    assert isinstance(step, Wait)
    assert read(long.q.worker("w")) == b"no"
    assert not step.settled


def test_it_ends_though_names_and_messages_come_all_the_time() -> None:
    long = Long("select")
    long.hide()
    expected = long.show()
    worker, count = long.open(), 0

    def between() -> None:
        nonlocal count
        count += 1
        long.q.stream(f"more{count}")
        long.hide(100)

    for body in (expected, None):
        step = worker.read(BIG)
        assert not step.cancel(errors.Again())
        long.finish(step, between)
        if body is None:
            with pytest.raises(errors.Again):
                step.result()
        else:
            assert step.result() == body


def test_what_names_change_is_seen_when_it_ends() -> None:
    """A stream that its user may read from now on."""
    long = Long("rights")
    long.hide()
    worker = long.open()
    step = worker.read(BIG)
    long.q.tree.run_timers()
    set_attributes(ROOT, long.q.tree.find(ROOT, "g/t"), 0o666, None, None)
    long.show()
    long.finish(step)
    again = worker.read(BIG)
    if isinstance(again, Wait):
        long.finish(again)
        again = again.result()
    assert {step.result(), again} <= {b"no", b"yes"}
    assert b"no" in (step.result(), again)


@pytest.mark.parametrize("change", ["mode", "owner", "name"])
@pytest.mark.parametrize("when", [0, 5, 40])
@pytest.mark.parametrize("written", [False, True])
def test_a_read_gets_what_a_change_of_names_or_rights_shows_it(change: str, when: int, written: bool) -> None:
    """Though it looked past that message before, and though one comes that is not for it."""
    long = Long("rights")
    long.q.stream("u", mode=0o600)
    expected = b"of its own from now on"
    long.q.write("t", expected)
    long.q.write("u", *[b"secret"] * NO)
    worker = long.open(*(["select a.#"] if change == "name" else []))
    step = worker.read(BIG)
    for _ in range(when):
        long.q.tree.run_timers()
    assert isinstance(step, Wait)
    assert not step.settled
    if change == "name":
        long.q.tree.rename(ROOT, long.q.group, "t", long.q.group, "a.t")
    stream = long.q.tree.find(ROOT, f"g/{'a.t' if change == 'name' else 't'}")
    set_attributes(ROOT, stream, 0o666 if change != "owner" else None, ANNA.uid if change == "owner" else None, None)
    if written:
        long.q.write("u", b"secret")
    long.finish(step)
    assert step.result() == expected


def test_it_ends_though_more_comes_than_it_looks_at() -> None:
    long = Long("select")
    long.hide()
    step = long.open().read(BIG)
    assert not step.cancel(errors.Again())
    long.finish(step, lambda: long.hide(100))
    with pytest.raises(errors.Again):
        step.result()


def test_a_damaged_message_is_reported_once(tmp_path: Path) -> None:
    long = Long("select", tmp_path / "store")
    long.hide(3_000)
    long.show(b"yes, to be damaged")
    expected = long.show()
    damage(tmp_path, b"to be damaged")
    worker = long.open()
    first, second = worker.read(BIG), worker.read(BIG)
    long.finish(first)
    with pytest.raises(errors.Damaged):
        first.result()
    long.finish(second)
    assert second.result() == expected


@pytest.mark.parametrize("withdrawn", [False, True])
@pytest.mark.parametrize("how", ["close", "rmdir", "stop", "remove", "seek", "select", "rules"])
def test_what_may_happen_meanwhile(how: str, withdrawn: bool) -> None:
    long = Long("select")
    long.hide()
    worker = long.open()
    step = worker.read(BIG)
    assert isinstance(step, Wait)
    long.q.tree.run_timers()
    if withdrawn:
        assert not step.cancel(errors.Again())
    q = long.q
    if how == "close":
        worker.close()
    elif how == "stop":
        q.tree.close()
    elif how == "remove":
        q.ctl("remove w")
    elif how == "rmdir":
        q.tree.unlink(ROOT, q.group, "s")
        q.tree.unlink(ROOT, q.tree.find(ROOT, "g/.consumers"), "w")
        q.tree.rmdir(ROOT, q.tree.root, "g")
    elif how == "seek":
        say(q.worker("w"), "seek end")
    elif how == "select":
        say(worker, "select")
    else:
        q.ctl("limit w 5")
    ends = how in ("close", "stop", "remove", "rmdir")
    if ends:
        assert step.settled
        assert step.result() == b""
    elif how == "select":
        long.finish(step)
        assert step.result() == b"no"
    elif withdrawn:
        long.finish(step)
        with pytest.raises(errors.Again):
            step.result()
    else:
        for _ in range(NO):
            q.tree.run_timers()
        assert not step.settled
        expected = long.show()
        long.finish(step)
        assert step.result() == expected


def test_the_first_claim_that_does_not_wait_has_what_is_there() -> None:
    """Messages with headers are looked up in portions before it."""
    long = Long("view")
    for _ in range(2_000):
        long.q.put(b"no", priority=5)
    long.q.put(b"yes", priority=5)
    worker = long.open()
    step = worker.read(BIG)
    assert not step.cancel(errors.Again())
    long.finish(step)
    assert step.result() == b"yes"


def test_what_was_given_back_comes_before_what_is_found() -> None:
    long = Long("select")
    long.show(b"yes 1")
    long.hide()
    long.show(b"yes 2")
    worker = long.open()
    assert read(worker) == b"yes 1"
    step = worker.read(BIG)
    assert isinstance(step, Wait)
    say(worker, "release 1")
    long.finish(step)
    assert step.result() == b"yes 1"
    again = worker.read(BIG)
    long.finish(again)
    assert again.result() == b"yes 2"


@pytest.mark.parametrize("known", ["of low priority", "given back"])
@pytest.mark.parametrize("others", [0, 20])
def test_what_is_known_comes_though_others_write_all_the_time(known: str, others: int) -> None:
    """To a claim that does not wait, and that looks through the log first."""
    long = Long("select")
    long.hide(3_000)
    if known == "given back":
        long.show(b"yes")
    else:
        long.q.put(b"yes", priority=1)
    worker = long.open()
    if known == "given back":
        assert long.claim(worker) == b"yes"
        say(worker, "nack 0s")
    long.hide(3_000)
    step = worker.read(BIG)
    assert not step.cancel(errors.Again())
    long.finish(step, lambda: long.hide(others))
    assert step.result() == b"yes"


@pytest.mark.parametrize("kind", ["select", "rights"])
@pytest.mark.parametrize("known", ["urgent", "given back"])
def test_those_known_are_passed_over_once_and_in_portions(kind: str, known: str) -> None:
    long = Long(kind)
    q, count = long.q, 3_000
    if known == "urgent":
        for _ in range(count):
            q.put(b"no", priority=9, stream=long.hidden_in)
    else:
        long.hide(count)
        other = q.worker("w")
        for _ in range(count):
            read(other)
        other.close()
    worker = long.open()
    step = worker.read(BIG)
    assert long.finish_all(step) > 20
    assert not step.settled
    assert calls_once(long.hide_one) < 300
    assert q.put(b"yes", priority=9)
    assert step.result() == b"yes"


def test_known_ones_that_are_gone_are_passed_over_in_portions() -> None:
    long = Long("rights")
    long.q.ctl("ttl 60s")
    for _ in range(3_000):
        long.q.put(b"no", priority=9)
    worker = long.open()
    assert long.claim(worker) == b"no"
    long.clock.forward(100)
    steps = list[Any]()
    assert calls_once(lambda: steps.append(worker.read(BIG))) < 10_000
    long.finish_all(steps[0])
    assert long.show() == steps[0].result()


@pytest.mark.parametrize("seed", range(30))
def test_each_gets_the_best_that_it_may_have(seed: int) -> None:
    """Among those known: urgent ones, of low priority, given back, and of streams of others."""
    choose = random.Random(seed)
    q = Queues("replay all", "retries 0", "backoff 0s 0s")
    q.stream("t", mode=0o600)
    q.consumer("w")
    set_attributes(ROOT, q.tree.find(ROOT, "g/.consumers/w"), 0o666, None, None)
    free, claimed = dict[int, tuple[int, str]](), dict[int, tuple[Any, int, str]]()
    workers = {q.worker("w", user=ANNA): "s", q.worker("w", "select t"): "t", q.worker("w"): "st"}
    for _ in range(150):
        what = choose.choice(["put", "put", "claim", "claim", "claim", "nack", "ack", "rights"])
        worker, mine = choose.choice(list(workers.items()))
        if what == "put":
            priority, stream = choose.choice([1, 4, 4, 9, 9]), choose.choice("st")
            free[q.put(b"x", priority=priority, stream=stream)] = -priority, stream
        elif what == "claim":
            best = min(((p, s) for s, (p, stream) in free.items() if stream in mine), default=None)
            step = worker.read(BIG)
            if best is None:
                assert isinstance(step, Wait)
                assert step.cancel()
            else:
                assert max(worker.claims) == best[1] or best[1] in worker.claims
                claimed[best[1]] = worker, *free.pop(best[1])
        elif what == "rights":
            mode = choose.choice([0o600, 0o666])
            set_attributes(ROOT, q.tree.find(ROOT, "g/t"), mode, None, None)
            workers[next(iter(workers))] = "s" if mode == 0o600 else "st"
        elif claimed:
            sequence = choose.choice(list(claimed))
            worker, priority, stream = claimed.pop(sequence)
            say(worker, f"{what} {sequence}")
            if what == "nack":
                free[sequence] = priority, stream
    assert set(claimed) == {sequence for worker in workers for sequence in worker.claims}


@pytest.mark.parametrize("every", [1, 7])
def test_known_ones_are_looked_at_to_the_end_though_rights_change_all_the_time(every: int) -> None:
    long = Long("rights")
    for _ in range(3_000):
        long.q.put(b"no", priority=9, stream="t")
    expected = b"yes"
    long.q.put(expected, priority=8)
    long.q.stream("other")
    worker, count = long.open(), 0

    def change() -> None:
        nonlocal count
        count += 1
        if count % every == 0:
            mode = 0o600 + count % 2
            set_attributes(ROOT, long.q.tree.find(ROOT, "g/other"), mode, None, None)

    step = worker.read(BIG)
    assert long.finish(step, change) < 200
    assert step.result() == expected


@pytest.mark.parametrize("room", [4, 1_024])
def test_a_worker_remembers_a_few_of_those_that_it_may_have(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And gets all in order."""
    monkeypatch.setattr(priorities, "_OWN", room)
    q = Queues("replay all", "retries 0", "backoff 0s 0s")
    q.stream("t", mode=0o600)
    q.consumer("w")
    set_attributes(ROOT, q.tree.find(ROOT, "g/.consumers/w"), 0o666, None, None)
    q.put(b"first", priority=9, stream="t")
    chosen = random.Random(room)
    wanted = sorted((-p, q.put(b"x", priority=p)) for p in (chosen.choice([1, 7, 8, 9]) for _ in range(60)))
    q.ctl(f"drop s {wanted[20][1]}")
    del wanted[20]
    worker, got = q.worker("w", user=ANNA), list[int]()
    for turn in range(59):
        assert read(worker) == b"x"
        got.append(next(iter(set(worker.claims) - set(got))))
        if turn == 30:
            say(worker, f"nack {got[3]}")
            assert read(worker) == b"x"
            assert got[3] in worker.claims
    assert got == [sequence for _, sequence in wanted]
    assert worker.own_heap is not None
    assert len(worker.own_heap.heap) <= 2 * room


def test_what_comes_and_goes_is_not_remembered() -> None:
    """Once a worker that may not have all was there."""
    long = Long("rights")
    long.q.put(b"no", priority=9, stream="t")
    restricted, other = long.q.worker("w", user=ANNA), long.q.worker("w")
    assert long.nothing(restricted)
    restricted.close()
    read(other)
    for _ in range(2_000):
        sequence = long.q.put(b"yes", priority=9)
        assert read(other) == b"yes"
        say(other, f"ack {sequence}")
    assert len(long.q.group.consumers["w"].dispatcher._offered or ()) < 200
