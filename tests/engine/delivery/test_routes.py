"""Which consumers a write comes to: those that cover its stream, and no other is looked at."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from mqfs.errors import MqfsError
from mqfs.model import Wait
from tests.support.calls import calls
from tests.support.queues import Queues, read, say


def beside(over: list[str], count: int) -> Queues:
    """A group with `count` consumers over each of those, and a reader that waits on each."""
    queues = Queues("replay all", "bind news news.*")
    for name in ("other", "news.a"):
        queues.stream(name)
    for number in range(count):
        for name in over:
            queues.consumer(f"{name}-{number}", name)
            assert isinstance(queues.at(f".consumers/{name}-{number}", os.O_RDWR).read(100), Wait)
    queues.consumer("mine", "s")
    return queues


@pytest.mark.parametrize("over", [["other"], ["news"], ["other", "news"]])
def test_a_write_does_not_look_at_consumers_that_wait_on_other_streams(over: list[str]) -> None:
    costs = []
    for count in (1, 50):
        writer = beside(over, count).at("s", os.O_WRONLY)
        costs.append(calls(lambda writer=writer: writer.write(b"x")))
    assert costs[0] == costs[1]


def test_a_write_does_not_look_at_the_backlogs_of_consumers_of_other_streams() -> None:
    costs = []
    for count in (1, 50):
        queues = Queues("replay all", "full reject")
        queues.stream("other")
        for number in range(count):
            queues.consumer(f"c{number}", "other", "backlog", "9")
        queues.consumer("mine", "s")
        writer = queues.at("s", os.O_WRONLY)
        costs.append(calls(lambda writer=writer: writer.write(b"x")))
    assert costs[0] == costs[1]


def test_a_program_that_polled_a_consumer_costs_a_write_nothing() -> None:
    queues = Queues("replay all")
    queues.consumer()
    handle, writer = queues.at(".consumers/w", os.O_RDWR), queues.at("s", os.O_WRONLY)
    before = calls(lambda: writer.write(b"x"))
    handle.watch(lambda: None)
    handle.watch(None)
    assert calls(lambda: writer.write(b"x")) == before


def test_a_read_that_ends_somewhere_ends_there_whatever_stream_takes_it() -> None:
    queues = Queues("replay all")
    queues.stream("other")
    queues.consumer("w", "other")
    handle, writer = queues.at(".consumers/w", os.O_RDWR), queues.at("s", os.O_WRONLY)
    handle.write(b"until %d\n" % (queues.group.log.end.next + 1))
    wait = handle.read(100)
    writer.write(b"one")
    assert not wait.settled
    writer.write(b"two")
    assert wait.result() == b""


NAMES = ["s", "a.x", "a.y", "b.x", "dead"]
VIEWS = {"v": "a.*", "w": "#.x"}
OVERS = ["", *NAMES, *VIEWS]


class Campaign:
    """Streams, views and consumers come, go and change at random; each time it is looked whom a write comes to."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.queues = Queues("replay all")
        self.waits: dict[str, Any] = {}

    def run(self) -> None:
        steps = [self.stream, self.consumer, self.consumer, self.view, self.rename, self.remove, self.dead, self.write]
        for _ in range(120):
            try:
                self.random.choice(steps)()
            except MqfsError:
                continue  # there already, or gone
            self.look()

    def stream(self) -> None:
        self.queues.stream(self.random.choice(NAMES))

    def consumer(self) -> None:
        name = f"c{self.random.randrange(9)}"
        words = ["backlog 3"] if self.random.random() < 0.3 else []
        self.queues.consumer(name, self.random.choice(OVERS), *words)
        if name not in self.waits:
            step = self.queues.at(f".consumers/{name}", os.O_RDWR).read(100)
            self.waits[name] = step

    def view(self) -> None:
        name = self.random.choice(list(VIEWS))
        self.queues.ctl(f"bind {name} {VIEWS[name]}" if self.random.random() < 0.6 else f"unbind {name}")

    def rename(self) -> None:
        group = self.queues.group
        old, new = self.random.choice(NAMES), self.random.choice(NAMES)
        self.queues.tree.rename(self.queues.at("ctl").user, group, old, group, new)

    def remove(self) -> None:
        what = self.random.choice(["stream", "consumer"])
        if what == "consumer" and self.waits:
            name = self.random.choice(list(self.waits))
            self.queues.ctl(f"remove {name}")
            del self.waits[name]
        elif self.random.random() < 0.3:
            self.queues.tree.unlink(self.queues.at("ctl").user, self.queues.group, self.random.choice(NAMES))

    def dead(self) -> None:
        self.queues.ctl(f"dead {self.random.choice(['dead', 's', 'a.x'])}")

    def write(self) -> None:
        """A waiting reader is answered if the message is its own, and no other is."""
        group = self.queues.group
        name = self.random.choice(list(group.streams))
        stream = group.streams[name]
        waiting = {c: wait for c, wait in self.waits.items() if isinstance(wait, Wait) and not wait.settled}
        theirs = {c for c in waiting if group.consumers[c].coverage.covers(stream)}
        self.queues.write(name, b"x")
        assert {c for c, wait in waiting.items() if wait.settled} == theirs

    def look(self) -> None:
        consumers = self.queues.group.consumers
        for stream in self.queues.group.streams.values():
            covering = [consumer for consumer in consumers.values() if consumer.coverage.covers(stream)]
            assert sorted(stream.consumers(), key=id) == sorted(covering, key=id)
            bounded = [consumer for consumer in covering if consumer.state.backlog]
            assert sorted(stream.routes().bounded, key=id) == sorted(bounded, key=id)


@pytest.mark.parametrize("seed", range(12))
def test_a_write_comes_to_the_consumers_that_cover_its_stream(seed: int) -> None:
    Campaign(seed).run()


@pytest.mark.parametrize("settings", [("replay off",), ("replay all",), ("replay off", "deliver one")])
@pytest.mark.parametrize("gone", [("all",), ("one", "view"), ("one", "later", "dead"), ("all", "one", "view", "later")])
def test_consumers_removed_by_one_write_or_each_by_itself(settings: tuple[str, ...], gone: tuple[str, ...]) -> None:
    """What only they had not acknowledged goes with them, in each stream that one of them is over."""
    found = []
    for together in (True, False):
        queues = Queues(*settings)
        for name in ("a.1", "a.2", "b", "dead"):
            queues.stream(name)
        queues.ctl("bind v a.*", "consumer all", "consumer one a.1", "consumer view v", "consumer later later")
        queues.ctl("consumer dead dead", "consumer stays b")
        for name in ("a.1", "a.2", "b", "dead"):
            queues.write(name, b"1", b"2")
        for reader in ("one", "view", "stays"):
            worker = queues.worker(reader)
            read(worker)
            say(worker, "ack")
            worker.close()
        lines = [f"remove {name}" for name in gone]
        for some in [lines] if together else [[line] for line in lines]:
            queues.ctl(*some)
        found.append([queues.row(name)["messages"] for name in ("a.1", "a.2", "b", "dead")])
    assert found[0] == found[1]
    assert settings != ("replay off",) or gone != ("all", "one", "view", "later") or found[0] == [0, 0, 1, 2]
