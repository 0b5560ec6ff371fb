"""`scheduled=1` of ntfy: what it costs where many topics are asked for and many messages wait, in lines of Python."""

from __future__ import annotations

import http.client
import json
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import trio

from mqfs.http.dialects.ntfy import table
from tests.engine.subject import USER
from tests.http.subject import HttpSubject
from tests.http.web import Web
from tests.support import ROOT
from tests.support.eventually import HANG_S
from tests.support.server import short_folder
from tests.support.temp_store import lowered

OURS = str(ROOT / "mqfs")
WAIT_S = 3_600
TOPICS = [f"t{number}" for number in range(50)]


class Steps(trio.abc.Instrument):
    """The lines that the server's thread goes through: all, and the most between two switches of tasks."""

    def __init__(self) -> None:
        self.all = self.longest = self._before = 0

    def trace(self, frame: Any, event: str, argument: Any) -> Any:
        self.all += event == "line"
        return self.trace if frame.f_code.co_filename.startswith(OURS) else None  # the client has this thread, too

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.longest = max(self.longest, self.all - self._before)
        self._before = self.all


class Subject(HttpSubject):
    """A group with topics, and messages that wait for theirs."""

    def __init__(self) -> None:
        super().__init__(table=table("g"))

    def delay(self, topic: str, count: int) -> None:
        """That many messages of that topic, a second after each other."""

        def put() -> None:
            if topic not in self.group.streams:
                self.tree.create(USER, self.group, topic, 0o644)
            stream = self.group.streams[topic]
            for number in range(count):
                due_ns = self.clock.engine_ns() + (WAIT_S + number) * 10**9
                self.group.held.put(stream, b"%d" % number, {}, due_ns)

        self.call(put)

    def steps(self, topics: list[str]) -> tuple[Steps, Any]:
        """What a poll of these costs, and its answer."""
        steps = Steps()

        def begin() -> None:
            trio.lowlevel.add_instrument(steps)
            sys.settrace(steps.trace)

        def end() -> None:
            sys.settrace(None)
            trio.lowlevel.remove_instrument(steps)

        self._call(begin)
        try:
            return steps, self.ask(0, "GET", f"../{','.join(topics)}/json?poll=1&scheduled=1")
        finally:
            self._call(end)


@pytest.fixture
def subject() -> Iterator[Subject]:
    subject = Subject()
    with lowered(LOOKING_S=0, PIECE_S=0):  # each point where others may be served is one where they are
        yield subject
    subject.end()


def bodies(reply: Any) -> list[str]:
    assert reply.status == 200, reply.body
    return [event["message"] for event in reply.lines]


def test_all_that_waits_is_looked_at_once_for_however_many_topics(subject: Subject) -> None:
    waiting = 500
    for topic in TOPICS:
        subject.delay(topic, 0)
    before, _ = subject.steps(TOPICS)
    subject.delay("another", waiting)
    after, reply = subject.steps(TOPICS)
    assert bodies(reply) == []
    assert after.all - before.all < 4 * waiting


def test_others_are_served_where_none_of_many_that_wait_is_of_the_topic(subject: Subject) -> None:
    subject.delay("t0", 0)
    subject.delay("another", 10_000)
    steps, reply = subject.steps(["t0"])
    assert bodies(reply) == []
    assert steps.longest < 4_000


def test_each_that_waits_comes_once_in_the_order_of_publishing(subject: Subject) -> None:
    for number in range(300):
        subject.delay(TOPICS[number % 3], 1)
    _, reply = subject.steps(TOPICS[:3])
    assert [event["topic"] for event in reply.lines] == [TOPICS[number % 3] for number in range(300)]


def test_too_many_topics_are_refused_before_a_look_at_what_waits(subject: Subject) -> None:
    subject.delay("t0", 0)
    topics = [f"t{number}" for number in range(1_100)]
    before, _ = subject.steps(topics)
    subject.delay("t0", 1_000)
    after, reply = subject.steps(topics)
    assert reply.status == 429, reply.body
    assert after.all - before.all < 1_000


def test_memory_does_not_hold_all_that_waits() -> None:
    """It is made as the client takes it."""
    body, count = "x" * 500_000, 100
    with short_folder() as folder:
        tree = Web(folder, "--http-ntfy", "g=tcp!127.0.0.1!0")
        with tree.server as server, ExitStack() as stack:
            assert tree.put("/g/").status == 201
            port = int(re.findall(r"ntfy of group 'g' at tcp!127\.0\.0\.1!(\d+)", server.text())[-1])
            for _ in range(count):
                assert tree.post("/g/t?delay=1h", body).status == 201
            before = peak_kib(server.pid)
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_S)
            stack.callback(client.close)
            client.request("GET", "/t/json?poll=1&scheduled=1")
            answer = client.getresponse()
            assert sum(json.loads(line)["message"] == body for line in answer) == count
            assert peak_kib(server.pid) - before < len(body) * count // 4 // 1_024


def peak_kib(pid: int) -> int:
    """The most memory that a process had, in KiB."""
    return int(re.findall(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())[0])
